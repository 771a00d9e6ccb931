package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"holdfast/internal/feldera"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// TestKafkasinkProgress: kafkasink with the progress table, against a real
// broker: what is sent again and what is not, and what a loss of the pipeline
// comes to.
func TestKafkasinkProgress(t *testing.T) {
	t.Parallel()
	cases := map[string]func(*sinkWorld){
		"a restart sends nothing again":        sinkProgressEqual,
		"two members hand over":                sinkProgressHandsOver,
		"a lost owner":                         sinkProgressLostOwner,
		"retention passed the position":        sinkProgressRetention,
		"latest is kept after a loss":          sinkProgressLatest,
		"a changed mapping is sent":            sinkProgressRemapped,
		"a reset is obeyed":                    sinkProgressReset,
		"a foreign owner stops":                sinkProgressForeign,
		"a loss stops when told to":            sinkProgressLossStops,
		"no table, at least once":              sinkProgressNoTable,
		"a table without a key, at least once": sinkProgressNoKey,
		"a switch of the level is no loss":     sinkProgressSwitch,
		"rows that need none":                  sinkProgressSkips,
		"durable":                              sinkProgressDurable,
	}
	for name, c := range map[string]struct {
		keep    core.Keep
		running bool
		found   string
	}{
		"emptied, while down":         {core.KeepNothing, false, "lost"},
		"emptied, while running":      {core.KeepNothing, true, "lost"},
		"kept, while down":            {core.KeepJournal, false, "equal"},
		"kept, while running":         {core.KeepJournal, true, "equal"},
		"a checkpoint, while down":    {core.KeepCheckpoint, false, "lost"},
		"a checkpoint, while running": {core.KeepCheckpoint, true, "lost"},
	} {
		cases[name] = func(w *sinkWorld) { sinkProgressPipelineRestarts(w, c.keep, c.running, c.found) }
	}
	sinkCases(t, harness.NeedKafka(t, harness.KafkaOptions{}), cases)
}

// TestKafkasinkProgressCrashes kills kafkasink at each place around the progress
// rows: the tables end equal to the topic, and what the pipeline holds by a
// completed progress row is not sent again.
func TestKafkasinkProgressCrashes(t *testing.T) {
	t.Parallel()
	cases := map[string]func(*sinkWorld){}
	for place, again := range map[string]bool{
		"claim-sent": false, "claim-completed": false, "ingested": true, "completed": true, "before-progress": true,
		"progress-sent": true, "progress-completed": false, "after-commit": false,
	} {
		cases["killed at "+place] = func(w *sinkWorld) { sinkProgressKilled(w, "kafkasink."+place, again) }
	}
	sinkCases(t, harness.NeedKafka(t, harness.KafkaOptions{}), cases)
}

// recorded gives the world a pipeline with a progress table.
func (w *sinkWorld) recorded(opts felderasim.Options) {
	w.t.Helper()
	def := feldera.ProgressTable(feldera.DefaultProgressTable)
	if opts.SQL == "" {
		opts.SQL = program
	}
	opts.SQL += def.SQL()
	w.sim = startSim(w.t, opts)
}

func (w *sinkWorld) found(d *harness.Daemon, what string, n float64) {
	w.t.Helper()
	harness.Await(w.t, patience, fmt.Sprintf("%v decisions are %s", n, what), func(ctx context.Context) (any, bool) {
		got, err := d.Metric(ctx, "kafkasink_progress_decisions_total", map[string]string{"found": what})
		return fmt.Sprint(got, err), got == n
	})
}

// sentRecords counts the changes in requests to a table.
func sentRecords(sim *felderasim.Sim, table string) (n int) {
	for _, r := range sim.Requests() {
		if strings.Trim(r.Table, `"`) == table {
			n += r.Records
		}
	}
	return n
}

// begun starts a daemon that has delivered ten orders of partition 0.
func (w *sinkWorld) begun(changes map[string]string) *harness.Daemon {
	w.t.Helper()
	d := w.start(changes)
	w.produceOrders(0, 0, 10, "a")
	w.awaitCommitted(map[int32]int64{0: 10})
	return d
}

func (w *sinkWorld) wantSent(n int) {
	w.t.Helper()
	if got := sentRecords(w.sim, "orders"); got != n {
		w.t.Errorf("%d changes were sent to orders, want %d", got, n)
	}
}

func sinkProgressEqual(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	d := w.start(map[string]string{"KAFKASINK_DELIVERY": "effectively_once"})
	w.found(d, "fresh", 3)
	w.produceOrders(0, 0, 10, "a")
	w.produceOrders(1, 10, 15, "b")
	w.awaitCommitted(map[int32]int64{0: 10, 1: 5})
	waitHealthy(t, d)
	health(t, d, "the level is shown", func(_ int, body string) bool {
		return strings.Contains(body, "effectively_once, recorded in holdfast_progress")
	})
	stop(t, d)
	d = w.start(nil)
	w.found(d, "equal", 2)
	w.found(d, "fresh", 1)
	w.produceOrders(0, 20, 21, "c")
	w.awaitCommitted(map[int32]int64{0: 11, 1: 5})
	w.wantOrders(16)
	w.wantSent(16)
}

func sinkProgressKilled(w *sinkWorld, place string, again bool) {
	t := w.t
	w.recorded(felderasim.Options{})
	w.produceOrders(0, 0, 10, "a")
	d := harness.NeedDaemon(t, "./cmd/kafkasink", harness.BuildOptions{Race: true, Tags: "crashpoints"},
		harness.DaemonOptions{Env: merged(w.env(), map[string]string{"CRASH_AT": place + ":1:kill"}), ListenVar: "KAFKASINK_LISTEN"})
	awaitEnd(t, d, -1)
	before := sentRecords(w.sim, "orders")
	d = w.start(nil)
	w.awaitCommitted(map[int32]int64{0: 10})
	waitHealthy(t, d)
	w.wantOrders(10)
	if got := sentRecords(w.sim, "orders"); again && got > before+10 || !again && got != 10 {
		t.Errorf("%d changes were sent, %d of them before the crash", got, before)
	}
	w.produce(0, "3", "")
	w.awaitCommitted(map[int32]int64{0: 11})
	w.wantOrders(9)
}

func sinkProgressHandsOver(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	one := w.start(nil)
	w.produceOrders(0, 0, 10, "a")
	w.produceOrders(1, 10, 20, "a")
	w.produceOrders(2, 20, 30, "a")
	w.awaitCommitted(map[int32]int64{0: 10, 1: 10, 2: 10})
	two := w.start(nil)
	harness.Await(t, patience, "the second member has taken a partition", func(ctx context.Context) (any, bool) {
		n, err := two.Metric(ctx, "kafkasink_progress_decisions_total", map[string]string{"found": "equal"})
		return fmt.Sprint(n, err), n > 0
	})
	w.produceOrders(0, 30, 40, "b")
	w.produceOrders(1, 40, 50, "b")
	w.produceOrders(2, 50, 60, "b")
	w.awaitCommitted(map[int32]int64{0: 20, 1: 20, 2: 20})
	stop(t, one)
	w.produceOrders(0, 60, 61, "c")
	w.produceOrders(1, 61, 62, "c")
	w.produceOrders(2, 62, 63, "c")
	w.awaitCommitted(map[int32]int64{0: 21, 1: 21, 2: 21})
	w.wantOrders(63)
	w.wantSent(63)
	waitHealthy(t, two)
}

// The owner dies without a word while completed rows wait for their commit.
func sinkProgressLostOwner(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	one := w.begun(nil)
	stop(t, one)
	one = w.start(map[string]string{"KAFKASINK_COMMIT_INTERVAL": "1m"})
	w.produceOrders(0, 10, 20, "b")
	waitSim(t, w.sim, "the second rows have their progress row", func(v felderasim.View) bool {
		return v.Count("orders") == 20 && newestPosition(v.Rows(feldera.DefaultProgressTable)) == 20
	})
	one.Kill()
	two := w.start(nil)
	w.found(two, "ahead", 1)
	w.awaitCommitted(map[int32]int64{0: 20})
	w.wantOrders(20)
	w.wantSent(20)
	if n := sinkMetric(t, two, "kafkasink_held_offsets_total"); n != 10 {
		t.Errorf("%v offsets were passed over", n)
	}
	w.produceOrders(0, 20, 25, "c")
	w.awaitCommitted(map[int32]int64{0: 25})
	w.wantOrders(25)
	w.wantSent(25)
	waitHealthy(t, two)
}

func newestPosition(rows []map[string]any) (newest uint64) {
	for _, row := range rows {
		if p, ok := row["position"].(uint64); ok {
			newest = max(newest, p)
		}
	}
	return newest
}

func sinkMetric(t *testing.T, d *harness.Daemon, name string) float64 {
	t.Helper()
	n, err := d.Metric(t.Context(), name, nil)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func sinkProgressPipelineRestarts(w *sinkWorld, keep core.Keep, running bool, found string) {
	t := w.t
	w.recorded(felderasim.Options{Edition: felderasim.Enterprise, Model: map[bool]core.Model{true: core.ModelAtLeastOnce, false: core.ModelExactlyOnce}[keep == core.KeepCheckpoint]})
	d := w.begun(nil)
	lost := 20
	if keep == core.KeepCheckpoint {
		w.sim.PeriodicCheckpoint()
		waitSim(t, w.sim, "the checkpoint is written", func(v felderasim.View) bool { return len(v.Checkpoints()) > 0 })
		lost = 10
	}
	w.produceOrders(0, 10, 20, "b")
	w.produce(0, "5", "") // a delete is a change like others
	w.awaitCommitted(map[int32]int64{0: 21})
	if !running {
		stop(t, d)
	}
	w.sim.Crash(keep)
	if !running {
		d = w.start(nil)
	}
	w.found(d, found, 1)
	w.produceOrders(0, 30, 31, "c")
	w.awaitCommitted(map[int32]int64{0: 22})
	w.wantOrders(20)
	waitHealthy(t, d)
	if found == "equal" {
		w.wantSent(22)
		return
	}
	if n := sinkMetric(t, d, "kafkasink_rewound_offsets_total"); n < float64(lost-10) || n > 21 {
		t.Errorf("%v offsets were delivered again", n)
	}
	if n := sinkMetric(t, d, "kafkasink_gone_offsets_total"); n != 0 {
		t.Errorf("%v offsets are gone", n)
	}
}

// losesBehindRetention has the pipeline come back empty when retention has taken
// 15 of the 25 records of partition 0.
func (w *sinkWorld) losesBehindRetention() *harness.Daemon {
	w.t.Helper()
	d := w.start(nil)
	w.produceOrders(0, 0, 20, "a")
	w.awaitCommitted(map[int32]int64{0: 20})
	w.deleteRecords(15)
	w.sim.Crash(core.KeepNothing)
	w.found(d, "lost", 1)
	w.produceOrders(0, 20, 25, "b")
	w.awaitCommitted(map[int32]int64{0: 25})
	return d
}

// The pipeline comes back empty when retention has taken what it held: the rest
// is delivered, and what is not is on /healthz, over restarts, until somebody
// has set the offset.
func sinkProgressRetention(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	d := w.losesBehindRetention()
	w.wantOrders(10)
	said := func(d *harness.Daemon) {
		t.Helper()
		health(t, d, "the lost offsets are shown", func(status int, body string) bool {
			return status == 503 && strings.Contains(body, "retention had taken offsets 0 to 14 (15 of them)") && strings.Contains(body, "deletes included")
		})
	}
	said(d)
	stop(t, d)
	d = w.start(nil)
	said(d)
	w.found(d, "equal", 1)
	stop(t, d)
	got := w.verb(nil, "offsets", "reset", "-to", "25", "-yes", w.topic+":0")
	if got.ExitCode != 0 {
		t.Fatalf("%+v", got)
	}
	d = w.start(nil)
	w.found(d, "reset", 1)
	waitHealthy(t, d)
}

// A group that began at the end of the log is not healed from its start.
func sinkProgressLatest(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	w.produceOrders(0, 0, 10, "never wanted")
	d := w.start(map[string]string{"KAFKASINK_START": "latest"})
	w.found(d, "fresh", 3)
	w.awaitCommitted(map[int32]int64{0: 10})
	w.produceOrders(0, 10, 15, "a")
	w.awaitCommitted(map[int32]int64{0: 15})
	w.sim.Crash(core.KeepNothing)
	w.found(d, "lost", 1)
	w.produceOrders(0, 15, 16, "b")
	w.awaitCommitted(map[int32]int64{0: 16})
	w.wantOrders(6)
	waitHealthy(t, d)
}

func sinkProgressRemapped(w *sinkWorld) {
	t := w.t
	second := strings.ReplaceAll(program, "TABLE orders", "TABLE orders_too")
	w.recorded(felderasim.Options{SQL: program + second[:strings.Index(second, ";")+1] + "\n"})
	d := w.begun(nil)
	stop(t, d)
	d = w.start(map[string]string{"KAFKASINK_COMMIT_INTERVAL": "1m"})
	w.found(d, "equal", 1)
	w.produceOrders(0, 10, 20, "b")
	waitSim(t, w.sim, "the second rows have their progress row", func(v felderasim.View) bool { return newestPosition(v.Rows(feldera.DefaultProgressTable)) == 20 })
	d.Kill()
	d = w.start(map[string]string{"KAFKASINK_TOPICS": w.topic + "=orders_too:json"})
	w.found(d, "remapped", 1)
	w.awaitCommitted(map[int32]int64{0: 20})
	if n := w.sim.Count("orders_too"); n != 10 {
		t.Errorf("the other table has %d rows", n)
	}
}

func sinkProgressReset(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	d := w.begun(nil)
	stop(t, d)
	got := w.verb(nil, "offsets", "reset", "-to", "4", "-yes", w.topic+":0")
	if got.ExitCode != 0 {
		t.Fatalf("%+v", got)
	}
	// It is obeyed also where the first to find it dies before its claim.
	d = harness.NeedDaemon(t, "./cmd/kafkasink", harness.BuildOptions{Race: true, Tags: "crashpoints"},
		harness.DaemonOptions{Env: merged(w.env(), map[string]string{"CRASH_AT": "kafkasink.after-commit:1:kill"}), ListenVar: "KAFKASINK_LISTEN"})
	awaitEnd(t, d, -1)
	d = w.start(nil)
	w.found(d, "reset", 1)
	w.awaitCommitted(map[int32]int64{0: 10})
	w.wantOrders(10)
	w.wantSent(16)
	// What was before the reset is not forgotten: a loss is noticed.
	w.sim.Crash(core.KeepNothing)
	w.found(d, "lost", 1)
	w.produceOrders(0, 10, 11, "b")
	w.awaitCommitted(map[int32]int64{0: 11})
	w.wantOrders(11)
}

// Somebody else has put the group's offsets back to an older copy, note and
// all: an owner that it knows nothing of has claimed the partition since.
func sinkProgressForeign(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	d := w.begun(nil)
	stop(t, d)
	old, err := w.kafka.CommitMetadata(t.Context(), w.group, w.topic, 0)
	if err != nil {
		t.Fatal(err)
	}
	d = w.start(nil)
	w.produceOrders(0, 10, 20, "b")
	w.awaitCommitted(map[int32]int64{0: 20})
	stop(t, d)
	if err := w.kafka.Commit(t.Context(), w.group, w.topic, 0, 10, old); err != nil {
		t.Fatal(err)
	}
	d = w.start(nil)
	w.found(d, "foreign", 1)
	health(t, d, "the partition is stopped", func(status int, body string) bool {
		return status == 503 && strings.Contains(body, "another owner has taken over")
	})
	w.wantSent(20)
}

func sinkProgressLossStops(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	w.produceOrders(0, 0, 10, "a")
	w.produceOrders(1, 10, 20, "a")
	w.produceOrders(2, 20, 30, "a")
	stopping := map[string]string{"KAFKASINK_ON_DESTINATION_LOSS": "stop", "KAFKASINK_ON_REFUSAL": "wait"}
	d := w.start(stopping)
	w.awaitCommitted(map[int32]int64{0: 10, 1: 10, 2: 10})
	w.sim.Crash(core.KeepNothing)
	health(t, d, "the loss is shown", func(status int, body string) bool {
		return status == 503 && strings.Contains(body, "the group has committed offset 10, and the pipeline holds what lies below 0")
	})
	w.wantOrders(0)
	w.awaitCommitted(map[int32]int64{0: 10, 1: 10, 2: 10})
	d.Kill()
	d = w.start(nil)
	w.found(d, "lost", 3)
	harness.Await(t, patience, "the rows are back", func(context.Context) (any, bool) { n := w.sim.Count("orders"); return n, n == 30 })
	waitHealthy(t, d)
}

func sinkProgressNoTable(w *sinkWorld) {
	t := w.t
	d := w.begun(nil)
	health(t, d, "the level is shown, and why", func(status int, body string) bool {
		return status == 200 && strings.Contains(body, "at_least_once, since effectively_once cannot be held") && strings.Contains(body, "holdfast_progress")
	})
	stop(t, d)
	got := w.verb(map[string]string{"KAFKASINK_DELIVERY": "effectively_once"}, "run")
	if said := got.Stdout + got.Stderr; got.ExitCode != 65 || !strings.Contains(said, "CREATE TABLE holdfast_progress") {
		t.Errorf("it ends with %d and says:\n%s", got.ExitCode, said)
	}
	got = w.verb(map[string]string{"KAFKASINK_DELIVERY": "effectively_once"}, "check")
	if said := got.Stdout + got.Stderr; got.ExitCode != 65 || !strings.Contains(said, "CREATE TABLE holdfast_progress") {
		t.Errorf("check ends with %d and says:\n%s", got.ExitCode, said)
	}
}

func sinkProgressNoKey(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{SQL: strings.Replace(program, "id BIGINT NOT NULL PRIMARY KEY", "id BIGINT NOT NULL", 1)})
	d := w.begun(nil)
	health(t, d, "the level is shown, and why", func(status int, body string) bool {
		return status == 200 && strings.Contains(body, "table orders: it has no PRIMARY KEY in Feldera")
	})
	stop(t, d)
	got := w.verb(map[string]string{"KAFKASINK_DELIVERY": "effectively_once"}, "run")
	if said := got.Stdout + got.Stderr; got.ExitCode != 65 || !strings.Contains(said, "table orders: it has no PRIMARY KEY") || !strings.Contains(said, "KAFKASINK_DELIVERY=at_least_once") {
		t.Errorf("it ends with %d and says:\n%s", got.ExitCode, said)
	}
}

// From at_least_once and back: rows that no progress row stands for are not
// called lost, and old progress rows hide nothing.
func sinkProgressSwitch(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	once := map[string]string{"KAFKASINK_DELIVERY": "at_least_once"}
	d := w.begun(once)
	stop(t, d)
	d = w.start(nil)
	w.found(d, "fresh", 3)
	w.produceOrders(0, 10, 20, "b")
	w.awaitCommitted(map[int32]int64{0: 20})
	stop(t, d)
	d = w.start(once)
	w.produceOrders(0, 20, 30, "c")
	w.awaitCommitted(map[int32]int64{0: 30})
	stop(t, d)
	d = w.start(nil)
	w.found(d, "reset", 3)
	w.found(d, "lost", 0)
	w.produceOrders(0, 30, 31, "d")
	w.awaitCommitted(map[int32]int64{0: 31})
	w.wantOrders(31)
	w.wantSent(31)
	waitHealthy(t, d)
	// What at_least_once has carried counts as acknowledged.
	w.sim.Crash(core.KeepNothing)
	w.found(d, "lost", 1)
	w.produceOrders(0, 31, 32, "e")
	w.awaitCommitted(map[int32]int64{0: 32})
	w.wantOrders(32)
}

// Records that need nothing of the pipeline have no progress row, and move the
// offset all the same; a restart does not take them for lost.
func sinkProgressSkips(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	skip := map[string]string{"KAFKASINK_POISON": "skip"}
	d := w.start(skip)
	w.produce(0, "1", "no JSON", "2", "neither")
	w.awaitCommitted(map[int32]int64{0: 2})
	w.produceOrders(0, 0, 5, "a")
	w.produce(0, "3", "no JSON", "4", "neither")
	w.awaitCommitted(map[int32]int64{0: 9})
	stop(t, d)
	d = w.start(skip)
	w.found(d, "equal", 1)
	w.found(d, "fresh", 2)
	w.found(d, "lost", 0)
	w.wantSent(5)
	waitHealthy(t, d)
}

func sinkProgressDurable(w *sinkWorld) {
	t := w.t
	opts := enterprise()
	w.recorded(opts)
	d := w.start(map[string]string{"KAFKASINK_ACK_ON": "durable", "FELDERA_CHECKPOINT_INTERVAL": "200ms"})
	w.produceOrders(0, 0, 10, "a")
	w.awaitCommitted(map[int32]int64{0: 10})
	stop(t, d)
	w.sim.Crash(core.KeepCheckpoint)
	d = w.start(map[string]string{"KAFKASINK_ACK_ON": "durable", "FELDERA_CHECKPOINT_INTERVAL": "200ms"})
	w.found(d, "equal", 1)
	w.wantOrders(10)
	w.wantSent(10)
}
