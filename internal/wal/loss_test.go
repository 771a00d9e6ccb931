package wal

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"pgregory.net/rapid"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// A loss names the tables until each was read again since; a resync that began
// before a loss does not mend it.
func TestNeedsResync(t *testing.T) {
	store := &flakyStore{fail: func() (bool, bool) { return false, false }, durable: stateAt(100)}
	s := testSource(t, store)
	s.cfg.Tables = []Table{{Schema: "public", Name: "b"}, {Schema: "public", Name: "A"}}
	var last Status
	var phases []string
	s.cfg.Report = func(st Status) {
		if st.Check == CheckResync {
			last = st
		}
	}
	s.cfg.Phase = func(p string) { phases = append(phases, p) }
	var err error
	if s.keeper, err = s.openKeeper(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.phaseStreaming()
	var before uint64
	must(t, s.keeper.must(t.Context(), func(next *State) bool { before = next.event(); return true }))
	for _, now := range []string{"i2", "i3"} {
		if err := s.destinationRestarted(t.Context(), &feldera.IncarnationChanged{Was: s.cfg.Pipeline.Expected(), Now: now}); err != nil {
			t.Fatal(err)
		}
	}
	if last.Blocking || !last.Works || !strings.HasPrefix(last.Message, `needs resync: "public"."A", "public"."b": `) {
		t.Errorf("it says %+v", last)
	}
	list := func() (names string) {
		for _, a := range store.durable.NeedsResync() {
			names += a.Table
		}
		return names
	}
	resync := func(table string, began uint64, left string) {
		t.Helper()
		if err := s.resynced(t.Context(), table, began); err != nil {
			t.Fatal(err)
		}
		if got := list(); got != left {
			t.Errorf("left is %s, expected %s", got, left)
		}
	}
	resync(`"public"."A"`, before, `"public"."A""public"."b"`)
	behind := store.durable.Events + 1
	resync(`"public"."A"`, behind, `"public"."b"`)
	if last.OK {
		t.Errorf("it says %+v", last)
	}
	resync(`"public"."b"`, behind, "")
	if !last.OK || len(store.durable.Notices) != 0 {
		t.Errorf("it says %+v, with %d notices", last, len(store.durable.Notices))
	}
	if got := strings.Join(phases, ","); got != "streaming,needs resync,streaming" {
		t.Errorf("the phases were %s", got)
	}
}

// With PGSOURCE_ON_DESTINATION_LOSS=stop it ends by name, at the loss and at
// each start until a person has accepted it.
func TestStopOnLoss(t *testing.T) {
	store := &flakyStore{fail: func() (bool, bool) { return false, false }, durable: stateAt(100)}
	s := testSource(t, store)
	s.cfg.Tables = []Table{{Schema: "public", Name: "b"}}
	s.cfg.StopOnLoss = true
	var err error
	if s.keeper, err = s.openKeeper(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.stopOnLoss(store.durable); err != nil {
		t.Fatal(err)
	}
	err = s.destinationRestarted(t.Context(), &feldera.IncarnationChanged{Was: "i1", Now: "i2"})
	if r := refusal(t, err); r.Reason != decode.ReasonGap || !strings.Contains(r.Where, `"public"."b"`) || !strings.Contains(r.Why, "up to LSN 0/64") {
		t.Errorf("%v", r)
	}
	if err := s.stopOnLoss(store.durable); err == nil {
		t.Error("the next start goes on")
	}
	s.cfg.StopOnLoss = false
	if err := s.stopOnLoss(store.durable); err != nil {
		t.Errorf("heal: %v", err)
	}
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// Whatever the clock says at each of them, a resync mends the losses before its
// beginning and none behind it, and a loss that no resync mends gets one.
func TestLossesAreOrderedWithoutTheClock(t *testing.T) {
	const table = `"public"."orders"`
	rapid.Check(t, func(rt *rapid.T) {
		store := &flakyStore{durable: stateAt(100)}
		s, err := newTestSource(store, NewMetrics(prometheus.NewRegistry()))
		if err != nil {
			rt.Fatal(err)
		}
		no := func(err error) {
			rt.Helper()
			if err != nil {
				rt.Fatal(err)
			}
		}
		s.keeper, err = s.openKeeper(t.Context())
		no(err)
		defer s.keeper.close(t.Context())
		// clock gives a time before or behind all others.
		clock := func() time.Time {
			return time.Now().Add(time.Duration(rapid.IntRange(-1000, 1000).Draw(rt, "clock")) * time.Hour)
		}
		atRisk, mends := false, false // what is true: a loss is not mended; the resync that has begun mends all there are
		var r *resyncState            // the one that has begun
		for n := range rapid.IntRange(1, 40).Draw(rt, "steps") {
			switch rapid.SampledFrom([]string{"loss", "begin", "end"}).Draw(rt, "step") {
			case "loss":
				no(s.destinationRestarted(t.Context(), &feldera.IncarnationChanged{Was: s.cfg.Pipeline.Expected(), Now: fmt.Sprint("again ", n)}))
				at := clock()
				no(s.keeper.must(t.Context(), func(next *State) bool {
					next.Notices = slices.Clone(next.Notices)
					next.Notices[len(next.Notices)-1].Noticed = at
					return true
				}))
				atRisk, mends = true, false
			case "begin":
				if r != nil {
					break
				}
				no(s.addResync(t.Context(), &resyncState{ID: fmt.Sprint(n), Schema: "public", Name: "orders", Cause: causeAsked}))
				next, err := s.nextResync(t.Context())
				no(err)
				r = next
				no(s.beginResync(t.Context(), r))
				r.Began = clock()
				no(s.updateResync(t.Context(), r.ID, func(to *resyncState) { to.Began = r.Began }))
				mends = true
			case "end":
				if r == nil {
					break
				}
				no(s.resynced(t.Context(), table, r.Order))
				no(s.updateResync(t.Context(), r.ID, nil))
				no(s.keeper.must(t.Context(), func(next *State) bool { next.Snapshot = nil; return true }))
				atRisk, r, mends = atRisk && !mends, nil, false
			}
			if got := len(store.durable.NeedsResync()) > 0; got != atRisk {
				rt.Fatalf("at risk: %t, expected %t: %+v", got, atRisk, store.durable.Notices)
			}
			_, err := s.nextResync(t.Context())
			no(err)
			waits := slices.ContainsFunc(store.durable.Resyncs, func(r resyncState) bool { return r.stage() == stageWaiting })
			if atRisk && !mends && !waits {
				rt.Fatalf("no resync is to come for a loss that none mends: %+v, %+v", store.durable.Notices, store.durable.Resyncs)
			}
		}
	})
}

// Of too many notices some go, but no table that is at risk is forgotten, and
// none counts as lost before it was.
func TestTablesAtRiskOutliveTheirNotice(t *testing.T) {
	tables := []string{"a", "b", "c", "d"}
	rapid.Check(t, func(rt *rapid.T) {
		st := stateAt(100)
		lost := make(map[string]uint64)
		for range rapid.IntRange(1, 60).Draw(rt, "notices") {
			n := Notice{Kind: rapid.SampledFrom([]NoticeKind{NoticeLoss, NoticeTimeline, NoticeTimeline}).Draw(rt, "kind")}
			if n.atRisk() {
				n.Tables = rapid.SliceOfNDistinct(rapid.SampledFrom(tables), 1, 2, rapid.ID[string]).Draw(rt, "tables")
			}
			st = st.clone()
			st.notice(n)
			for _, table := range n.Tables {
				lost[table] = st.Events
			}
			if len(st.Notices) > maxNotices {
				rt.Fatalf("%d notices", len(st.Notices))
			}
			var names []string
			for _, at := range st.NeedsResync() {
				names = append(names, at.Table)
				if at.order < lost[at.Table] {
					rt.Fatalf("%s counts as lost at %d, and was at %d", at.Table, at.order, lost[at.Table])
				}
			}
			if want := slices.Sorted(maps.Keys(lost)); !slices.Equal(names, want) {
				rt.Fatalf("at risk are %v, expected %v: %+v", names, want, st.Notices)
			}
		}
	})
}

// A state of a version that did not number them: its losses stand, a resync that
// it has begun mends none of them, and the one that begins behind it does.
func TestLossesOfAnOlderState(t *testing.T) {
	const table = `"public"."orders"`
	was := stateAt(100)
	was.Notices = []Notice{{Kind: NoticeLoss, To: 50, Noticed: time.Now().Add(-time.Hour), Tables: []string{table}}}
	was.Snapshot = &snapshotState{Last: 1, Jobs: []copyJob{{ID: 1, Kind: CopyResync, Schema: "public", Name: "orders"}}}
	was.Resyncs = []resyncState{{ID: "begun", Schema: "public", Name: "orders", Cause: causeLoss, Job: 1, Began: time.Now()}}
	b, err := encodeState(was)
	must(t, err)
	st, err := decodeState(b)
	must(t, err)
	store := &flakyStore{durable: st}
	s := testSource(t, store)
	s.keeper, err = s.openKeeper(t.Context())
	must(t, err)
	defer s.keeper.close(t.Context())
	_, err = s.nextResync(t.Context())
	must(t, err)
	if n := len(store.durable.Resyncs); n != 2 {
		t.Fatalf("%d resyncs, expected the old one and another", n)
	}
	must(t, s.resynced(t.Context(), table, store.durable.Resyncs[0].Order))
	if len(store.durable.NeedsResync()) != 1 {
		t.Error("the old resync has mended the loss")
	}
	r := store.durable.Resyncs[1]
	must(t, s.beginResync(t.Context(), &r))
	must(t, s.resynced(t.Context(), table, r.Order))
	if at := store.durable.NeedsResync(); len(at) != 0 {
		t.Errorf("the new resync has not: %+v", at)
	}
}

// What copies did is lost with an incarnation too, though no acknowledged
// position stands for it: rows, the rows and deletes of lists of keys, and what a
// copy that goes on behind its cursor has brought.
func TestNoticeOfCopiesThatMayBeLost(t *testing.T) {
	recorded := func(produced LSN) *storedProgress {
		return &storedProgress{Epoch: 1, Produced: produced, RowEpoch: 1, RowIncarnation: "i1"}
	}
	keys := [][]string{{"1"}}
	for _, c := range []struct {
		name     string
		done     []copyJob // in their order, each when the stream had received 100 more than at the one before
		job      copyJob   // under way
		progress *storedProgress
		rung     ack.Rung
		lost     bool
	}{
		{name: "no copy"},
		{name: "a table that was empty", done: []copyJob{{}}},
		{name: "all rows", done: []copyJob{{Rows: 5}}, lost: true},
		{name: "keys", done: []copyJob{{Keys: keys, Rows: 1}}, lost: true},
		{name: "keys of a table that was empty", done: []copyJob{{}, {Keys: keys, Rows: 1}}, lost: true},
		{name: "keys behind all rows", done: []copyJob{{Rows: 5}, {Keys: keys, Rows: 1}}, lost: true},
		{name: "a progress row behind all of it", done: []copyJob{{Rows: 5}, {Keys: keys, Rows: 1}}, progress: recorded(201)},
		{name: "a progress row between the rows and the keys", done: []copyJob{{Rows: 5}, {Keys: keys, Rows: 1}}, progress: recorded(150), lost: true},
		{name: "under way", job: copyJob{Rows: 5}},
		{name: "under way and durable", job: copyJob{Rows: 5}, rung: ack.Durable, lost: true},
		{name: "under way, durable and recorded", job: copyJob{Rows: 5}, rung: ack.Durable, progress: recorded(1)},
		{name: "not begun", rung: ack.Durable},
	} {
		t.Run(c.name, func(t *testing.T) {
			st := stateAt(100)
			st.Rows, st.Progress = 0, c.progress
			st.Snapshot = &snapshotState{Quiet: true, Last: 1, Jobs: []copyJob{c.job}}
			st.Snapshot.Jobs[0].ID = 1
			for i := range c.done {
				st.Snapshot.know(Table{Schema: "public", Name: "orders"}).copied(&c.done[i], LSN(100*(i+1)))
			}
			store := &flakyStore{durable: st}
			s := testSource(t, store)
			if c.progress != nil {
				s.cfg.ProgressTable = "holdfast_progress"
			}
			if c.rung != 0 {
				s.cfg.AckOn = c.rung
			}
			var err error
			s.keeper, err = s.openKeeper(t.Context())
			must(t, err)
			must(t, s.destinationRestarted(t.Context(), &feldera.IncarnationChanged{Was: "i1", Now: "i2"}))
			if got := len(store.durable.NeedsResync()) > 0; got != c.lost {
				t.Errorf("a resync is needed: %t", got)
			}
		})
	}
}
