package model

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/internal/ack"
)

// limit bounds the states of one scope.
const limit = 3_000_000

func explore(t *testing.T, s Scope) *Report[world] {
	t.Helper()
	began := time.Now()
	r, err := Explore(Model{s}, limit)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d states, %d steps, depth %d, %s", r.States, r.Transitions, r.Depth, time.Since(began).Round(time.Millisecond))
	return r
}

var kafkaScopes = map[string]Scope{
	"hand-overs":       {Log: "aa.", Kafka: true, Rebalances: 2},
	"late requests":    {Log: "aa", Kafka: true, Rebalances: 1, Timeouts: 1},
	"crashes":          {Log: "aa", Kafka: true, Rebalances: 1, Crashes: 1},
	"crash, log":       {Log: "aaa", Kafka: true, Crashes: 1},
	"loss":             {Log: "aa", Kafka: true, Rebalances: 1, Restarts: 1},
	"loss, late":       {Log: "aa", Kafka: true, Timeouts: 1, Restarts: 1},
	"loss, checkpoint": {Log: "aa", Kafka: true, Restarts: 1, Storage: KeepsCheckpoint},
	"resets":           {Log: "aa", Kafka: true, Resets: 1, Crashes: 2},
	"resets, loss":     {Log: "aa", Kafka: true, Rebalances: 1, Resets: 1, Restarts: 1},
	"retention":        {Log: "aaa", Kafka: true, Restarts: 1, Retentions: 1},
}

var postgresScopes = map[string]Scope{
	"no fault":            {Log: "ab.a"},
	"crashes":             {Log: "ab.a", Crashes: 2},
	"late requests":       {Log: "ab.", Crashes: 1, Timeouts: 1},
	"transaction taken":   {Log: "ab.", Crashes: 1, Takings: 1},
	"loss":                {Log: "ab.", Crashes: 1, Restarts: 1},
	"loss twice":          {Log: "a.a", Crashes: 1, Restarts: 2},
	"loss, late":          {Log: "ab", Crashes: 1, Restarts: 1, Timeouts: 1},
	"loss, stop":          {Log: "ab.", Crashes: 1, Restarts: 1, StopOnLoss: true},
	"loss, journal":       {Log: "ab.", Crashes: 1, Restarts: 1, Storage: KeepsJournal},
	"loss twice, journal": {Log: "ab", Restarts: 2, Storage: KeepsJournal},
	"loss, checkpoint":    {Log: "aa", Crashes: 1, Restarts: 1, Storage: KeepsCheckpoint},
	"durable":             {Log: "ab", Restarts: 1, Storage: KeepsCheckpoint, Durable: true},
	"durable, crash":      {Log: "a.", Crashes: 1, Restarts: 1, Storage: KeepsCheckpoint, Durable: true},
	"loss twice, ck":      {Log: "a", Crashes: 1, Restarts: 2, Storage: KeepsCheckpoint},
}

// mustHappen lists what every kind of source has to go through somewhere in
// its scopes: a rule that holds because nothing happens is worth nothing.
var mustHappen = map[string][]string{
	"both": {
		"take over", "decide fresh", "decide equal", "decide ahead", "decide lost", "receive", "keepalive", "send", "send row", "answer",
		"timeout", "late", "drop", "ingest", "complete", "checkpoint begins", "checkpoint", "restart", "stray", "notice", "crash",
	},
	"postgres": {
		"write", "begin", "begun", "begun elsewhere", "begun late", "not begun", "late begin", "commit transaction", "committed", "committed late",
		"not committed", "commit elsewhere", "late commit", "person", "taken", "start again", "bookmark", "status", "heal", "ask checkpoint",
	},
	"kafka": {"commit", "revoke", "lost", "retention", "gap", "reset", "decide reset"},
}

// mustBeReached are states in which a rule is put to the test.
var mustBeReached = map[string]map[string]func(world) bool{
	"both": {
		"a crash between acknowledgement and what it is of": func(w world) bool {
			return w.d.mode == down && w.noted.produced > 0 && w.p.seen != w.p.work
		},
		"a pipeline without what was acknowledged": func(w world) bool {
			return !Model{Scope{Log: "aaaa"}}.holds(&w.p.work, 0, 1) && w.noted.produced > 0
		},
		"a row of one incarnation in another": func(w world) bool {
			for _, e := range w.p.seen.rows {
				for _, r := range e {
					if r != 0 && r.inc() != w.p.inc {
						return true
					}
				}
			}
			return false
		},
		"a request that outlives its daemon": func(w world) bool {
			return w.d.mode != running && w.net[0].used && w.net[0].to != tableP
		},
		"a request that outlives its pipeline": func(w world) bool { return w.net[0].used && w.net[0].inc < w.p.inc },
		"everything acknowledged after a loss": func(w world) bool { return w.p.inc > 1 && w.confirmed == w.written && w.d.mode == running },
		"an idle position acknowledged":        func(w world) bool { return w.noted.pos > w.noted.produced },
	},
	"postgres": {
		"a transaction without an owner": func(w world) bool { return w.p.tx && w.d.mode == down },
		"a transaction gone on with":     func(w world) bool { return w.d.tx > 0 && w.d.replay > 0 },
		"a part of a unit in a transaction": func(w world) bool {
			return w.p.tx && w.p.work.mask[0] != w.p.seen.mask[0] && w.p.work.mask[1] == w.p.seen.mask[1]
		},
		"a commit that outlives its pipeline": func(w world) bool { return w.commit.late != nobodys && w.p.inc > 1 && w.d.mode == undecided },
		"a transaction in another incarnation than was asked for it": func(w world) bool {
			return w.p.tx && w.noted.asked && w.noted.intent != w.p.inc
		},
		"a bookmark ahead of the slot": func(w world) bool { return w.d.mode == down && w.noted.pos > w.confirmed },
		"a checkpoint behind the tables, and a proof under way": func(w world) bool {
			return w.d.proof == 2 && w.p.stored.mask != w.p.seen.mask
		},
	},
	"kafka": {
		"the commit taken back to nothing": func(w world) bool {
			return w.d.mode == running && w.d.epoch > 1 && w.p.inc > 1 && w.noted.pos == 0 && w.noted.rowEpoch == 0
		},
		"gone on behind what retention took": func(w world) bool { return w.d.mode == running && w.noted.gone > 0 },
		"a clean note":                       func(w world) bool { return w.noted.clean },
		"a gap at the source":                func(w world) bool { return w.d.mode == stopped },
		"a stale owner's row on its way": func(w world) bool {
			return w.d.mode == running && w.net[0].used && !w.net[0].mine && w.net[0].to == tableP && w.net[0].epoch < w.d.epoch
		},
	},
}

func TestPostgres(t *testing.T) { exploreAll(t, "postgres", postgresScopes) }

func TestKafka(t *testing.T) { exploreAll(t, "kafka", kafkaScopes) }

// exploreAll expects every scope to be right, and its source to have been put
// to every test.
func exploreAll(t *testing.T, source string, scopes map[string]Scope) {
	t.Helper()
	var mu sync.Mutex
	kinds, reached := map[string]int{}, map[string]int{}
	t.Run("scopes", func(t *testing.T) {
		for name, s := range scopes {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				r := explore(t, s)
				if r.Wrong != nil {
					t.Fatalf("%+v\n%s", s, r.Wrong)
				}
				ledgerAgrees(t, Model{s}, r)
				mu.Lock()
				defer mu.Unlock()
				for kind, n := range r.Kinds {
					kinds[kind] += n
				}
				for _, of := range []string{"both", source} {
					for name, has := range mustBeReached[of] {
						reached[name] += r.Count(has)
					}
				}
			})
		}
	})
	for _, kind := range slices.Concat(mustHappen["both"], mustHappen[source]) {
		if kinds[kind] == 0 {
			t.Errorf("it never happened: %s", kind)
		}
		delete(kinds, kind)
	}
	for kind := range kinds {
		t.Errorf("happens, and is in no list: %s", kind)
	}
	for name, n := range reached {
		t.Logf("%8d states: %s", n, name)
		if n == 0 {
			t.Errorf("never reached: %s", name)
		}
	}
}

// ledgerAgrees holds the model's arithmetic of acknowledgement against the
// ledger that the daemons use.
func ledgerAgrees(t *testing.T, m Model, r *Report[world]) {
	t.Helper()
	for i := range r.states {
		w := &r.states[i]
		d := &w.d
		if d.mode != running || m.Durable || d.rowDone == 0 {
			continue
		}
		l := ack.New(d.base)
		for u := d.base + 1; u <= d.recv; u++ {
			if !m.rows(u) {
				l.AdmitIdle(u)
				continue
			}
			ticket, err := l.Admit(u)
			if err != nil {
				t.Fatal(err)
			}
			if u < d.rowDone {
				if err := l.Mark(ticket, ticket, ack.Completed); err != nil {
					t.Fatal(err)
				}
			}
		}
		if got, want := l.At(ack.Completed), m.acknowledgeable(w); got != want {
			t.Fatalf("the ledger says %d, the model %d in %s", got, want, m.Show(*w))
		}
	}
}

var brokenRules = []struct {
	name  string
	scope Scope
	// wrong is a part of what has to be found wrong first.
	wrong string
}{
	{"keepalive overtakes unacknowledged work", Scope{Broken: KeepaliveOvertakes, Log: "a."}, "acknowledged before the pipeline shows it"},
	{"acknowledged on accepted", Scope{Broken: AckOnAccepted, Log: "a"}, "acknowledged before the pipeline shows it"},
	{"acknowledged before the progress row is completed", Scope{Broken: AckBeforeRow, Log: "a"}, "before the progress row for 1 is completed"},
	{"progress row sent before its data are ingested", Scope{Broken: RowBeforeIngested, Log: "a", Restarts: 1, Storage: KeepsJournal}, "acknowledged before the pipeline shows it"},
	{"progress row retried into a new incarnation", Scope{Broken: RowIntoNewIncarnation, Log: "aa", Restarts: 1, Timeouts: 1}, "acknowledged before the pipeline shows it"},
	{"progress row not last inside a transaction", Scope{Broken: RowNotLast, Log: "ab", Takings: 1}, "acknowledged before the pipeline shows it"},
	{"idle position compared with the row's", Scope{Broken: IdleCompared, Log: "a.", Crashes: 1}, "called lost although the pipeline never restarted"},
	{"stale owner's row wins", Scope{Broken: NoEpochs, Kafka: true, Log: "aaa", Crashes: 1}, "before the progress row for 2 is completed"},
	{"epoch claimed by a row alone", Scope{Broken: EpochByRow, Kafka: true, Log: "aaa", Crashes: 1}, "before the progress row for 2 is completed"},
	{"commit after revoke", Scope{Broken: CommitAfterRevoke, Kafka: true, Log: "aa", Rebalances: 1}, "the source was told 1, now 0"},
	{"abandoned request applied after its retry", Scope{Broken: RetryWithoutWait, Log: "aa", Timeouts: 1}, "go back from unit 2 to 1"},
	{"predecessor's request not waited out", Scope{Broken: StartWithoutWait, Log: "aa", Crashes: 1}, "go back from unit 2 to 1"},
	{"clean note not replaced", Scope{Broken: CleanNoteKept, Kafka: true, Log: "aa", Rebalances: 1, Crashes: 1}, "acknowledged before the pipeline shows it"},
	{"a single checkpoint taken as proof", Scope{Broken: SingleCheckpoint, Log: "a", Storage: KeepsCheckpoint, Durable: true}, "acknowledged before the pipeline has stored it"},
	{"never used taken for lost", Scope{Broken: NeverUsedIsLost, Log: "a"}, "called lost"},
	{"any row believed", Scope{Broken: BelieveAnyRow, Log: "a", Restarts: 1}, "nobody notices"},
	{"row believed by its step", Scope{Broken: BelieveBySteps, Log: "a", Restarts: 2, Storage: KeepsCheckpoint}, "nobody notices"},
	{"row believed by its position", Scope{Broken: BelieveByPosition, Log: "a", Restarts: 1, Crashes: 1}, "nobody notices"},
	{"replay outside of a transaction", Scope{Broken: ReplayOutsideTransaction, Log: "aa", Crashes: 1}, "go back from unit 2 to 1"},
	{"reset forgotten before its claim", Scope{Broken: ResetForgotten, Kafka: true, Log: "aa", Resets: 1, Crashes: 2}, "an operator told to send again"},
	{"the tables of a unit sent apart", Scope{Broken: TablesApart, Log: "b"}, "a part of a unit"},
	{"commit taken for settled at once", Scope{Broken: SettledAtOnce, Log: "bb", Timeouts: 1, Takings: 1}, "a part of a unit"},
	{"begin taken for settled at once", Scope{Broken: SettledAtOnce, Log: "b", Timeouts: 1}, "no schedule without faults"},
	{"commit of the attempt before not waited out", Scope{Broken: CommitNotWaitedOut, Log: "b", Restarts: 1, Timeouts: 1}, "a part of a unit"},
	{"begin of the attempt before not waited out", Scope{Broken: BeginNotWaitedOut, Log: "b", Crashes: 1}, "no schedule without faults"},
	{"process that answers a begin not looked at", Scope{Broken: BeginNotLookedAt, Log: "b", Restarts: 1}, "no schedule without faults"},
	{"late begin taken for somebody else's", Scope{Broken: LateBeginForeign, Log: "b", Timeouts: 1}, "no schedule without faults"},
}

// Every rule is needed: broken, it has a counterexample, which is printed.
func TestBrokenRules(t *testing.T) {
	for _, b := range brokenRules {
		t.Run(b.name, func(t *testing.T) {
			r := explore(t, b.scope)
			switch {
			case r.Wrong == nil:
				t.Error("no counterexample")
			case !strings.Contains(r.Wrong.Wrong, b.wrong):
				t.Errorf("expected %q\n%s", b.wrong, r.Wrong)
			default:
				t.Logf("\n%s", r.Wrong)
			}
		})
	}
}
