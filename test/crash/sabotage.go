package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"holdfast/internal/crash"
	"holdfast/internal/sabotage"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// wrongBuild is a daemon with one rule broken, and the shortest way to find it
// out: a run of the matrix, a scenario of its own, or a test of a package.
type wrongBuild struct {
	// id is the number in the list of known mistakes, "" for a rule of
	// test/model.
	id    string
	wrong sabotage.Wrong
	what  string

	// sees matches what the oracles have to say of a world: red for another reason
	// is not found out.
	sees    string
	variant string // of the matrix
	// env is added to the daemon's configuration.
	env map[string]string
	// point and fault make it a run of the matrix; scenario is another way.
	point    crash.Point
	fault    string
	scenario func(ctx context.Context, w world) error
	// tries is how often it may take, 0 for once.
	tries int
	// firstStart: the daemon shows it when it starts for the first time.
	firstStart bool

	// pkg and test make it a test of a package.
	pkg, test string
}

func (b *wrongBuild) name() string {
	return strings.TrimSpace(b.id + " " + b.what)
}

// What the oracles say, as result.collect words it.
const (
	theTap   = `^(acknowledged too early|position out of nowhere)`
	wentBack = `^(acknowledged position went back|regressed)|went .* back`
	torn     = `^torn`
	atRest   = `differ at rest`
)

const (
	effectively = "pgsource effectively_once"
	atLeast     = "pgsource at_least_once"
	peeking     = "pgsource peek"
	durably     = "pgsource durable"
	kafka       = "kafkasink at_least_once"
	kafkaOnce   = "kafkasink effectively_once"
)

// wrongBuilds are all that have a counterpart in the code.
var wrongBuilds = slices.Concat(streamBuilds, copyBuilds)

// streamBuilds break the rules of what is carried, and of what is acknowledged.
var streamBuilds = []wrongBuild{
	{id: "S1", wrong: sabotage.AckOnReceived, what: "acknowledged when decoded", sees: theTap, variant: atLeast, scenario: frozen, tries: 2},
	{id: "S2", wrong: sabotage.AckOnAccepted, what: "acknowledged on 200", sees: theTap, variant: atLeast, scenario: frozen},
	{id: "S2", wrong: sabotage.AckOnAccepted, what: "committed on 200", sees: theTap, variant: kafka, scenario: frozen},
	{id: "S3", wrong: sabotage.KeepaliveEcho, what: "keepalive echoed", sees: theTap, variant: atLeast, env: map[string]string{"PGSOURCE_WAL_SENDER_TIMEOUT": "4s"}, scenario: keepaliveBehindWork, tries: 2},
	{id: "S4", wrong: sabotage.StatusReceived, what: "timed status says what was received", sees: theTap, variant: atLeast, env: map[string]string{"PGSOURCE_WAL_SENDER_TIMEOUT": "4s"}, scenario: keepaliveBehindWork, tries: 2},
	{id: "S5", wrong: sabotage.BookmarkReceived, what: "bookmark before completion", sees: theTap, variant: atLeast, scenario: frozen, tries: 2},
	{id: "S6", wrong: sabotage.NoSync, what: "state not made durable", pkg: "./internal/wal", test: "TestFileStoreSyncs"},
	{id: "S7", wrong: sabotage.MaxWatermark, what: "highest instead of contiguous position", sees: atRest, variant: atLeast, scenario: outOfOrder, tries: 2},
	{id: "S8", wrong: sabotage.TimeoutIsSuccess, what: "time-out taken for success", sees: theTap, variant: atLeast, scenario: requestsLost},
	{id: "S8", wrong: sabotage.TimeoutIsSuccess, what: "time-out taken for success by kafkasink", sees: theTap, variant: kafka, scenario: requestsLost},
	{id: "S9", wrong: sabotage.GoneIsComplete, what: "410 taken for complete", sees: theTap, variant: atLeast, scenario: acceptedAndGone},
	{id: "S10", wrong: sabotage.StatusBeforeBookmark, what: "status before bookmark", sees: `no progress`, variant: atLeast, point: crash.PgBeforeBookmark, fault: "SIGKILL", tries: 4},
	{id: "S13", wrong: sabotage.DropBuffer, what: "position kept and buffer dropped on reconnect", sees: `^torn|no progress`, variant: atLeast, scenario: cutWithABacklog},
	{id: "S14", wrong: sabotage.TrustSlot, what: "recreated slot followed", sees: torn + "|" + atRest, variant: effectively, scenario: slotMadeAnew},
	{id: "S15", wrong: sabotage.LetterLater, what: "offset passes before the dead letter", sees: `is not among the dead letters`, variant: kafka, point: crash.KafkaBeforeDLQ, fault: "SIGKILL", tries: 2},
	{id: "S16", wrong: sabotage.CommitAfterRevoke, what: "commit after revoke", sees: wentBack, variant: kafka, scenario: handOver, tries: 2},
	{id: "S17", wrong: sabotage.CommitPolled, what: "polled position committed", sees: theTap + "|^no progress", variant: kafka, scenario: frozen, tries: 2},
	{id: "S18", wrong: sabotage.RetryAtOnce, what: "abandoned request applied after its retry", sees: torn + "|" + wentBack, variant: atLeast, scenario: requestsLate, tries: 4},
	{id: "S19", wrong: sabotage.TablesApart, what: "transaction split over requests", sees: torn, variant: atLeast, scenario: traffic, tries: 3},
	{id: "S20", wrong: sabotage.NoFirstStatus, what: "no first status", pkg: "./internal/wal", test: "TestStatusIsSaidFirst"},
	{id: "S22", wrong: sabotage.SkipUnrenderable, what: "row that cannot be carried left out", sees: atRest, variant: atLeast, scenario: unrenderable},
	{wrong: sabotage.KeepaliveOvertakes, what: "keepalive overtakes what was received before", sees: theTap, variant: atLeast, env: map[string]string{"PGSOURCE_WAL_SENDER_TIMEOUT": "4s"}, scenario: keepaliveBehindWork},
	{wrong: sabotage.AckBeforeRow, what: "acknowledged before the progress row is completed", sees: `and no progress row`, variant: effectively, scenario: rowHeld},
	{wrong: sabotage.RowBeforeIngested, what: "progress row before its rows are ingested", sees: theTap, variant: effectively, scenario: rowAlone},
	{wrong: sabotage.RowIntoNewIncarnation, what: "progress row sent into a new incarnation", pkg: "./internal/feldera", test: "TestClaimGoesToTheIncarnationThatWasReadAlone"},
	{wrong: sabotage.RowIntoNewIncarnation, what: "rows of a transaction sent into a new incarnation", sees: torn, variant: effectively, scenario: rowsMeetAnotherProcess, tries: 2},
	{wrong: sabotage.RowNotLast, what: "progress row not the last in a transaction", sees: theTap, variant: effectively, scenario: committedBySomebody},
	{wrong: sabotage.SameEpoch, what: "stale owner's row wins", sees: `went back|calls lost what the pipeline holds`, variant: kafkaOnce, scenario: staleRow, tries: 3},
	{wrong: sabotage.SingleCheckpoint, what: "a single checkpoint taken as proof", sees: `came back from its checkpoint`, variant: durably, scenario: checkpointOfBefore, tries: 2},
	{wrong: sabotage.NeverUsedIsLost, what: "never used taken for lost", sees: `the first start fails: .*lost`, variant: effectively, env: stopAtLoss, scenario: traffic, firstStart: true},
	{wrong: sabotage.BelieveAnyRow, what: "any progress row believed", sees: atRest, variant: effectively, scenario: claimMeetsAnotherProcess, tries: 3},
	{wrong: sabotage.BelieveByPosition, what: "progress row believed by its position", sees: atRest, variant: effectively, scenario: claimMeetsAnotherProcess, tries: 3},
	{wrong: sabotage.StartWithoutWait, what: "requests of the process before not waited out", sees: torn + "|" + wentBack, variant: atLeast, env: longLife, scenario: lateBehindAStart, tries: 6},
	{wrong: sabotage.HandOverWithoutWait, what: "requests of the owner before not waited out", sees: wentBack, variant: kafka, env: longLife, scenario: lateBehindAStart, tries: 3},
	{wrong: sabotage.ReplayApart, what: "replay visible transaction by transaction", sees: torn, variant: atLeast, env: map[string]string{"PGSOURCE_BATCH_ROWS": "5"}, point: crash.PgBeforeBookmark, fault: "SIGKILL", tries: 8},
	{wrong: sabotage.IdleCompared, what: "idle position compared with the progress row's", sees: `no progress|ended by itself`, variant: effectively, env: stopAtLoss, scenario: startAgainIdle},
	{wrong: sabotage.CleanNoteKept, what: "clean note not replaced before the first request", sees: wentBack, variant: kafka, env: longLife, scenario: lateBehindACleanStop, tries: 3},
	{wrong: sabotage.ResetForgotten, what: "reset forgotten before its claim", sees: `knows nothing of the reset`, variant: effectively, scenario: resetAndKill},
	{wrong: sabotage.EpochByRow, what: "epoch claimed by a row alone", sees: `no progress|ended by itself`, variant: effectively, scenario: startAgainIdle},
	{wrong: sabotage.CommitForgotten, what: "commit without an answer forgotten by the next attempt", pkg: "./internal/wal", test: "TestRequestsAreOutlived"},
}

// stopAtLoss lets a pgsource end that finds a loss.
var stopAtLoss = map[string]string{"PGSOURCE_ON_DESTINATION_LOSS": "stop"}

// longLife is the life of a request in scenarios where one comes late by that.
var longLife = map[string]string{"FELDERA_REQUEST_LIFETIME": "14s"}

// withoutCounterpart are those of the list of known mistakes that cannot be
// made here, and why.
var withoutCounterpart = map[string]string{
	"S11": "hand-over without waiting for the chunks: nothing is handed over, since the stream runs before anything else is read",
	"S12": "copy before the slot: the slot and its stream come before anything else is read",
	"S21": "resume inside a transaction: the server sends whole transactions by their commit, and nothing here leaves out rows by position",
}

// caught is how a wrong build was found out; oracle is "" where it was not.
type caught struct {
	oracle string
	after  time.Duration
	err    error // it could not be tried
}

// runSabotage tries every wrong build whose name contains one of only, a few at
// a time, and says for each how it was found out.
func runSabotage(ctx context.Context, opts options, only []string, atOnce int) (green int, err error) {
	fmt.Fprintf(opts.out, "seed %d\n", opts.seed)
	began := time.Now()
	work := make(chan *wrongBuild)
	var mu sync.Mutex
	var running sync.WaitGroup
	tried := 0
	for range atOnce {
		running.Go(func() {
			for b := range work {
				c := b.try(ctx, opts, b.wrong)
				if c.oracle != "" && !regexp.MustCompile(b.sees).MatchString(c.oracle) {
					c.err = fmt.Errorf("it was to be found out by %q, and is by: %s", b.sees, c.oracle)
				}
				control := b.control(ctx, opts, c)
				mu.Lock()
				tried++
				switch {
				case c.err != nil:
					err = errors.Join(err, fmt.Errorf("%s: %w", b.name(), c.err))
					fmt.Fprintf(opts.out, "%s: COULD NOT BE TRIED: %v\n", b.name(), c.err)
				case c.oracle == "":
					green++
					fmt.Fprintf(opts.out, "%s: STAYS GREEN after %v\n", b.name(), c.after.Round(100*time.Millisecond))
				case control.err != nil || control.oracle != "":
					green++
					fmt.Fprintf(opts.out, "%s: the right build is red too: %s %v\n", b.name(), control.oracle, control.err)
				default:
					fmt.Fprintf(opts.out, "%s: caught by %.300s after %v\n", b.name(), c.oracle, c.after.Round(100*time.Millisecond))
				}
				mu.Unlock()
			}
		})
	}
	for i := range wrongBuilds {
		if b := &wrongBuilds[i]; matches(b.name()+" "+string(b.wrong), only) && ctx.Err() == nil {
			work <- b
		}
	}
	close(work)
	running.Wait()
	if only == nil {
		for _, id := range []string{"S11", "S12", "S21"} {
			fmt.Fprintf(opts.out, "%s has no counterpart: %s\n", id, withoutCounterpart[id])
		}
	}
	fmt.Fprintf(opts.out, "took %v and %v of processor time\n", time.Since(began).Round(time.Second), processorTime().Round(time.Second))
	fmt.Fprintf(opts.out, "sabotage: %d wrong builds, %d not found out\n", tried, green)
	return green, errors.Join(err, context.Cause(ctx))
}

// control lets the right build go through the scenario or the test, which it must
// survive. The runs of the matrix are in another target.
func (b *wrongBuild) control(ctx context.Context, opts options, c caught) caught {
	if (b.scenario == nil && b.pkg == "") || c.err != nil || c.oracle == "" {
		return caught{}
	}
	right := *b
	right.tries = 1
	return right.try(ctx, opts, "none")
}

func (b *wrongBuild) try(ctx context.Context, opts options, wrong sabotage.Wrong) caught {
	began := time.Now()
	var c caught
	if b.pkg != "" {
		c.oracle, c.err = b.tryTest(ctx, wrong)
	} else {
		c.oracle, c.err = b.tryWorld(ctx, opts, wrong)
	}
	c.after = time.Since(began)
	return c
}

var failedTest = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)`)

// tryTest runs one test of the build.
func (b *wrongBuild) tryTest(ctx context.Context, wrong sabotage.Wrong) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	root, err := harness.ModuleRoot()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-tags", "sabotage", "-count=1", "-timeout", "2m", "-run", "^"+b.test+"$", b.pkg)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "SABOTAGE="+string(wrong))
	out, err := cmd.CombinedOutput()
	if err == nil {
		if strings.Contains(string(out), "no tests to run") {
			return "", fmt.Errorf("%s has no %s", b.pkg, b.test)
		}
		return "", nil
	}
	failed := failedTest.FindSubmatch(out)
	if failed == nil {
		return "", fmt.Errorf("go test: %w\n%s", err, out)
	}
	return string(failed[1]) + " of " + b.pkg, nil
}

// tryWorld runs the daemon and gives what the oracles say.
func (b *wrongBuild) tryWorld(ctx context.Context, opts options, wrong sabotage.Wrong) (string, error) {
	v := variantNamed(b.variant)
	env := map[string]string{"SABOTAGE": string(wrong)}
	for name, value := range b.env {
		env[name] = value
	}
	for try, more := 0, 3; try < max(b.tries, 1); try++ {
		r := newResult(&strings.Builder{})
		w, err := v.open(ctx, worldOptions{options: opts, variant: v, tags: "sabotage", env: env, patience: time.Minute})
		if b.firstStart && errors.Is(err, errFirstStart) {
			lines := strings.Split(strings.TrimSpace(err.Error()), "\n")
			return fmt.Sprintf("%v: %s", errFirstStart, lines[len(lines)-1]), nil // the last thing that the daemon says
		}
		if err != nil {
			return "", err
		}
		err = b.play(ctx, opts, w)
		if errors.Is(err, errNotTried) && more > 0 {
			more--
			try--
			w.close()
			continue
		}
		r.collect(b.name(), w, err)
		w.close()
		if r.first != "" {
			return r.first, nil
		}
	}
	return "", nil
}

// play lets the daemon do what the wrong build does wrong.
func (b *wrongBuild) play(ctx context.Context, opts options, w world) error {
	if b.scenario == nil {
		c := crashCase{variant: w.variantOf(), point: b.point, fault: faultNamed(b.fault), visit: 1}
		c.visit += c.random(opts.seed).IntN(c.visits())
		reached, err := c.run(ctx, w)
		if err == nil && !reached {
			err = fmt.Errorf("%s was not reached", b.point)
		}
		return err
	}
	return b.scenario(ctx, w)
}

func variantNamed(name string) *variant {
	for _, v := range variants {
		if v.String() == name {
			return v
		}
	}
	panic("no variant " + name)
}

func faultNamed(name string) *fault {
	for i := range faults {
		if faults[i].name == name {
			return &faults[i]
		}
	}
	panic("no fault " + name)
}

// traffic lets rows come until something is found wrong, for some seconds.
func traffic(ctx context.Context, w world) error {
	watch(ctx, w, 6*time.Second)
	if w.wrong() {
		return nil
	}
	return w.settle(ctx)
}

// frozen lets the pipeline accept rows and complete none for some seconds.
func frozen(ctx context.Context, w world) error {
	w.common().sim.HoldCompletion()
	watch(ctx, w, 3*time.Second)
	w.common().sim.ReleaseCompletion()
	if w.wrong() {
		return nil
	}
	return w.settle(ctx)
}

// watch waits until something is found wrong, or for so long.
func watch(ctx context.Context, w world, d time.Duration) {
	limit, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	_ = harness.Eventually(limit, "something wrong", func(context.Context) (any, bool) { return nil, w.wrong() })
}

// requestsLost loses a request before anything of it is applied.
func requestsLost(ctx context.Context, w world) error {
	lost := felderasim.Fault{Kind: felderasim.DropRequest, Count: 1}
	if w.variantOf().daemon == "kafkasink" {
		id, err := w.common().sim.Inject(lost)
		if err != nil {
			return err
		}
		return struck(ctx, w, id, 1)
	}
	// Nothing comes behind it that could make good for it.
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	defer release()
	if _, err := b.sim.Inject(lost); err != nil {
		return err
	}
	if err := b.pg.Exec(ctx, onlyWriter); err != nil {
		return err
	}
	limit, cancel := context.WithTimeout(ctx, b.patience)
	defer cancel()
	if err := b.rest(limit); err != nil {
		return err
	}
	return b.compareNow(ctx)
}

// requestsLate gives requests no answer and applies them a moment later.
func requestsLate(ctx context.Context, w world) error {
	id, err := w.common().sim.Inject(felderasim.Fault{Kind: felderasim.ApplyLate, Count: 3, Delay: 700 * time.Millisecond})
	if err != nil {
		return err
	}
	return struck(ctx, w, id, 3)
}

// struck waits until a fault has happened so often, and lets all come to rest.
func struck(ctx context.Context, w world, id string, times int) error {
	r := w.common()
	limit, cancel := context.WithTimeout(ctx, r.patience)
	defer cancel()
	err := harness.Eventually(limit, "the requests that are to fail", func(context.Context) (any, bool) {
		n := r.sim.FaultHits(id)
		return n, n >= times || w.wrong()
	})
	if err != nil {
		return err
	}
	if err := w.flow(ctx); err != nil {
		return err
	}
	return w.settle(ctx)
}

// lateBehindAStart kills a daemon while a request of it is on its way, and lets
// it land behind everything that the next one sends at once.
func lateBehindAStart(ctx context.Context, w world) error {
	return lateAndKilled(ctx, w, func() error { return nil })
}

// lateBehindACleanStop does so to a daemon whose first request it is, behind one
// that was stopped in order.
func lateBehindACleanStop(ctx context.Context, w world) error {
	r := w.common()
	if err := r.stopDaemon(ctx); err != nil {
		return err
	}
	return lateAndKilled(ctx, w, func() error { return r.daemon.Restart(nil) })
}

// lateAndKilled calls begin when the next request is to be on its way for long.
func lateAndKilled(ctx context.Context, w world, begin func() error) error {
	const late = 12 * time.Second
	r := w.common()
	f := felderasim.Fault{Kind: felderasim.ApplyLate, Count: 1, Delay: late}
	if w.variantOf().daemon == "kafkasink" {
		f.Table = "counters" // an event that comes late is still itself
	}
	id, err := r.sim.Inject(f)
	if err == nil {
		err = begin()
	}
	if err != nil {
		return err
	}
	limit, cancel := context.WithTimeout(ctx, r.patience)
	defer cancel()
	err = harness.Eventually(limit, "a request on its way", func(context.Context) (any, bool) { return nil, r.sim.FaultHits(id) > 0 })
	if err != nil {
		return err
	}
	due := time.Now().Add(late + 500*time.Millisecond)
	r.daemon.Kill()
	w.unclean()
	if err := r.standStill(ctx, 200*time.Millisecond); err != nil { // so that there is something newer
		return err
	}
	if err := r.daemon.Restart(nil); err != nil {
		return err
	}
	release := r.gate.hold()
	defer release()
	limit, cancel = context.WithTimeout(ctx, r.patience)
	defer cancel()
	if err := w.rest(limit); err != nil {
		return err
	}
	if err := r.standStill(ctx, time.Until(due)); err != nil {
		return err
	}
	return w.compareNow(ctx)
}

// quiet holds the writers of a bank, waits until all is acknowledged, and gives
// the bank with the function that lets the writers go on, once.
func quiet(ctx context.Context, w world) (*bankWorld, func(), error) {
	b, ok := w.(*bankWorld)
	if !ok {
		panic("the scenario needs a bank")
	}
	release := sync.OnceFunc(b.gate.hold())
	limit, cancel := context.WithTimeout(ctx, b.patience)
	defer cancel()
	if err := b.rest(limit); err != nil {
		release()
		return nil, nil, err
	}
	return b, release, nil
}

// accept executes a statement that touches one table, and waits until its
// request is accepted.
func (w *bankWorld) accept(ctx context.Context, sql string) error {
	limit, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	before := w.sim.Counters().Accepted
	if err := w.pg.Exec(limit, sql); err != nil {
		return err
	}
	return harness.Eventually(limit, "a request is accepted", func(context.Context) (any, bool) { return nil, w.sim.Counters().Accepted > before })
}

// onlyWriter is a change of one table that the tap knows.
const onlyWriter = "UPDATE writers SET n = n + 1 WHERE id = 1"

// outOfOrder lets a later transaction complete before an earlier one, whose
// rows are then lost with the pipeline's process.
func outOfOrder(ctx context.Context, w world) error {
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	defer release()
	b.sim.HoldIngest("left_accounts")
	if err := b.accept(ctx, "UPDATE left_accounts SET version = version + 1 WHERE id = 1"); err != nil {
		return err
	}
	if err := b.accept(ctx, onlyWriter); err != nil {
		return err
	}
	moved := b.tap.moved()
	limit, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	_ = harness.Eventually(limit, "a status that a right build does not send", func(context.Context) (any, bool) { return nil, b.tap.moved() > moved })
	b.crashDestination(ctx, core.KeepJournal)
	b.sim.ReleaseIngest("")
	release()
	return b.settle(ctx)
}

// acceptedAndGone lets the pipeline restart with rows that it had accepted and
// not ingested.
func acceptedAndGone(ctx context.Context, w world) error {
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	defer release()
	b.sim.HoldIngest("writers")
	if err := b.accept(ctx, onlyWriter); err != nil {
		return err
	}
	b.crashDestination(ctx, core.KeepJournal)
	b.sim.ReleaseIngest("")
	watch(ctx, w, 2*time.Second)
	release()
	return b.settle(ctx)
}

// keepaliveBehindWork lets the server tell a position behind rows that are not
// completed: it is quiet but for them, so it asks for a status.
func keepaliveBehindWork(ctx context.Context, w world) error {
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	defer release()
	b.sim.HoldCompletion()
	defer b.sim.ReleaseCompletion()
	if err := b.accept(ctx, onlyWriter); err != nil {
		return err
	}
	if err := b.pg.Exec(ctx, "CHECKPOINT"); err != nil {
		return err
	}
	watch(ctx, w, 7*time.Second)
	b.sim.ReleaseCompletion()
	release()
	if w.wrong() {
		return nil
	}
	return b.settle(ctx)
}

// rowAlone lets the pipeline restart with everything but what was queued for
// the tables: a progress row that did not wait for them is in.
func rowAlone(ctx context.Context, w world) error {
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	defer release()
	b.sim.HoldIngest("writers")
	if err := b.accept(ctx, onlyWriter); err != nil {
		return err
	}
	watch(ctx, w, 3*time.Second)
	b.daemon.Kill()
	b.crashDestination(ctx, core.KeepJournal)
	b.sim.ReleaseIngest("")
	if err := b.daemon.Restart(nil); err != nil {
		return err
	}
	release()
	return b.settle(ctx)
}

// rowHeld lets rows complete whose progress row does not.
func rowHeld(ctx context.Context, w world) error {
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	b.sim.HoldIngest("holdfast_progress")
	err = b.accept(ctx, onlyWriter)
	watch(ctx, w, 3*time.Second)
	b.sim.ReleaseIngest("")
	release()
	if err != nil || w.wrong() {
		return err
	}
	return b.settle(ctx)
}

// cutWithABacklog cuts the connection while received transactions wait.
func cutWithABacklog(ctx context.Context, w world) error {
	b, ok := w.(*bankWorld)
	if !ok {
		panic("the scenario needs a bank")
	}
	b.sim.HoldCompletion()
	limit, cancel := context.WithTimeout(ctx, b.patience)
	defer cancel()
	// They wait once more and more of them come and none is taken any more: what is
	// on its way to the pipeline counts as buffered too, and survives a cut.
	var taken, buffered float64
	err := harness.Eventually(limit, "received transactions wait", func(ctx context.Context) (any, bool) {
		n, err := b.daemon.Metric(ctx, "pgsource_buffered_bytes", nil)
		if err != nil {
			return err, false
		}
		inFlight, err := b.daemon.Metric(ctx, "pgsource_inflight_batches", nil)
		if err != nil {
			return err, false
		}
		if inFlight != taken || buffered == 0 {
			taken, buffered = inFlight, n
		}
		return fmt.Sprintf("%v bytes, %v when %v batches were in flight", n, buffered, taken), n > buffered+20_000
	})
	if err != nil {
		return err
	}
	before := b.proxy.Connections()
	b.proxy.Cut()
	err = harness.Eventually(limit, "another connection", func(context.Context) (any, bool) { return nil, b.proxy.Connections() > before+1 })
	if err != nil {
		return err
	}
	if err := b.standStill(ctx, time.Second); err != nil {
		return err
	}
	b.sim.ReleaseCompletion()
	return b.settle(ctx)
}

// startAgainIdle starts a daemon again that has acknowledged a position without
// rows behind its last one with rows.
func startAgainIdle(ctx context.Context, w world) error {
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	defer release()
	if err := b.pg.Exec(ctx, "CHECKPOINT"); err != nil {
		return err
	}
	limit, cancel := context.WithTimeout(ctx, b.patience)
	defer cancel()
	if err := b.rest(limit); err != nil {
		return err
	}
	if err := b.stopDaemon(ctx); err != nil {
		return err
	}
	if err := b.daemon.Restart(nil); err != nil {
		return err
	}
	if err := b.pg.Exec(ctx, onlyWriter); err != nil {
		return err
	}
	if err := b.rest(limit); err != nil {
		return err
	}
	return b.compareNow(ctx)
}

// resetAndKill forgets what was acknowledged, as a person who wants everything
// sent again that the slot has, and kills the daemon that finds it when it has
// noted its epoch: the next one must find the reset too.
func resetAndKill(ctx context.Context, w world) error {
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	defer release()
	if err := b.stopDaemon(ctx); err != nil {
		return err
	}
	got, err := b.verb(ctx, "state", "reset", "-yes")
	if err != nil || got.ExitCode != 0 {
		return fmt.Errorf("state reset: %+v %w", got, err)
	}
	if err := b.daemon.Restart(map[string]string{"CRASH_AT": string(crash.PgEpochNoted) + ":1:kill"}); err != nil {
		return err
	}
	limit, cancel := context.WithTimeout(ctx, b.patience)
	defer cancel()
	if _, err := b.daemon.Wait(limit); err != nil {
		return fmt.Errorf("the daemon does not come to %s: %w", crash.PgEpochNoted, err)
	}
	if err := b.daemon.Restart(map[string]string{"CRASH_AT": ""}); err != nil {
		return err
	}
	if err := b.pg.Exec(ctx, onlyWriter); err != nil {
		return err
	}
	if err := b.rest(limit); err != nil {
		return err
	}
	resets, err := b.daemon.Metric(limit, "pgsource_progress_decisions_total", map[string]string{"found": "reset"})
	if err != nil {
		return err
	}
	if resets == 0 {
		return errors.New("the next start knows nothing of the reset: it passes over what it was told to send again")
	}
	return b.compareNow(ctx)
}

// slotMadeAnew drops the slot while no daemon runs and makes it again later:
// what came between is lost to the stream, which has to be said.
func slotMadeAnew(ctx context.Context, w world) error {
	b, ok := w.(*bankWorld)
	if !ok {
		panic("the scenario needs a bank")
	}
	if err := b.stopDaemon(ctx); err != nil {
		return err
	}
	b.tap.anotherSlot()
	for _, sql := range []string{
		"SELECT pg_drop_replication_slot('holdfast')",
		"INSERT INTO ledger (writer, n) SELECT 0, i FROM generate_series(1, 10) i",
		"SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')",
	} {
		if err := b.pg.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return b.mustRefuse(ctx)
}

// unrenderable writes a row that the pipeline's table cannot hold.
func unrenderable(ctx context.Context, w world) error {
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	if err = b.pg.Exec(ctx, "INSERT INTO filler (id, note, rate) VALUES (-1, 'not a number', 'NaN')"); err != nil {
		release()
		return err
	}
	release()
	if err := b.stopDaemon(ctx); err != nil {
		return err
	}
	return b.mustRefuse(ctx)
}

// mustRefuse starts the daemon and expects it to end with the code for what a
// person has to look at. One that goes on must have everything.
func (w *bankWorld) mustRefuse(ctx context.Context) error {
	if err := w.daemon.Restart(nil); err != nil {
		return err
	}
	limit, cancel := context.WithTimeout(ctx, w.patience/2)
	defer cancel()
	code, err := w.daemon.Wait(limit)
	if err == nil {
		if code != 65 {
			return fmt.Errorf("the daemon ended with code %d, expected 65", code)
		}
		return nil
	}
	return w.settle(ctx)
}

// handOver gives half of the partitions to a second member and lets both work.
func handOver(ctx context.Context, w world) error {
	k, ok := w.(*counterWorld)
	if !ok {
		panic("the scenario needs a group")
	}
	if err := k.second.Restart(nil); err != nil {
		return err
	}
	limit, cancel := context.WithTimeout(ctx, k.patience)
	defer cancel()
	err := harness.Eventually(limit, "the second member has partitions", func(ctx context.Context) (any, bool) {
		n, err := k.second.Metric(ctx, "kafkasink_assigned_partitions", nil)
		return fmt.Sprint(n, err), err == nil && n > 0
	})
	if err != nil {
		return err
	}
	watch(ctx, w, 15*time.Second)
	if w.wrong() {
		return nil
	}
	w.unclean() // the second member is killed
	return k.settle(ctx)
}
