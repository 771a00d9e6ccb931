package e2e

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// TestKafkasink runs its cases against one real broker, each with a topic, a
// group and a pipeline of its own.
func TestKafkasink(t *testing.T) {
	t.Parallel()
	kafka := harness.NeedKafka(t, harness.KafkaOptions{})
	sinkCases(t, kafka, map[string]func(*sinkWorld){
		"waits for a checkpoint when told to":  sinkDurable,
		"carries rows and tombstones":          sinkCarries,
		"carries what Debezium writes":         sinkDebezium,
		"columns from elsewhere":               sinkMapped,
		"topics by pattern":                    sinkPatterns,
		"carries Avro past a registry outage":  sinkAvro,
		"carries what Debezium writes in Avro": sinkDebeziumAvro,
		"waits for completion":                 sinkWaitsForCompletion,
		"killed before completion":             sinkKilledBeforeCompletion,
		"one bad record stops one partition":   sinkStopsOnePartition,
		"skips bad records when told to":       sinkSkips,
		"stops clean":                          sinkStopsClean,
		"hands partitions to another member":   sinkHandsOver,
		"says that the pipeline restarted":     sinkPipelineRestarted,
		"waits for Feldera":                    sinkWaitsForFeldera,
		"passes aborted records and markers":   sinkPassesMarkers,
		"rows without a key have an identity":  sinkIdentity,
		"bad settings":                         sinkBadSettings,
		"a gap by retention stops, in numbers": sinkGap,
		"all stopped exits":                    sinkAllStoppedExits,
		"all stopped waits when told to":       sinkAllStoppedWaits,
		"a missing topic is said":              sinkMissingTopic,
		"unreachable brokers are said":         sinkNoBrokers,
		"a paused pipeline is shown":           sinkPausedPipeline,
		"an idle sink sees a restart":          sinkIdleSeesRestart,
		"a second signal cuts the request":     sinkSecondSignal,
	})
}

type sinkWorld struct {
	t            *testing.T
	kafka        *harness.Kafka
	sim          *felderasim.Sim
	topic, group string
}

func (w *sinkWorld) env() map[string]string {
	return map[string]string{
		"KAFKASINK_BROKERS": strings.Join(w.kafka.Seeds, ","), "KAFKASINK_GROUP": w.group,
		"KAFKASINK_TOPICS": w.topic + "=orders:json", "KAFKASINK_COMMIT_INTERVAL": "100ms",
		"KAFKASINK_SESSION_TIMEOUT": "6s", "KAFKASINK_DRAIN_TIMEOUT": "10s",
		"FELDERA_URL": w.sim.URL(), "FELDERA_PIPELINE": "p",
		// A new owner waits for this long when the last one died; the
		// simulator applies nothing late unless it is told to.
		"FELDERA_REQUEST_TIMEOUT": "1s", "FELDERA_REQUEST_LIFETIME": "1s",
	}
}

func (w *sinkWorld) start(changes map[string]string) *harness.Daemon {
	w.t.Helper()
	d := harness.NeedDaemon(w.t, "./cmd/kafkasink", harness.BuildOptions{Race: true},
		harness.DaemonOptions{Env: merged(w.env(), changes), ListenVar: "KAFKASINK_LISTEN"})
	return d
}

// produce writes values to one partition; an empty value is a tombstone for
// the key.
func (w *sinkWorld) produce(partition int32, keysAndValues ...string) {
	w.t.Helper()
	var records []*kgo.Record
	for i := 0; i < len(keysAndValues); i += 2 {
		r := &kgo.Record{Topic: w.topic, Partition: partition, Key: []byte(keysAndValues[i])}
		if keysAndValues[i+1] != "" {
			r.Value = []byte(keysAndValues[i+1])
		}
		records = append(records, r)
	}
	if err := w.kafka.Produce(w.t.Context(), records...); err != nil {
		w.t.Fatal(err)
	}
}

func order(id int, customer string) string {
	return fmt.Sprintf(`{"id":%d,"customer":%q,"amount":"%d.50","paid":true}`, id, customer, id)
}

func (w *sinkWorld) produceOrders(partition int32, from, to int, customer string) {
	w.t.Helper()
	var kv []string
	for id := from; id < to; id++ {
		kv = append(kv, fmt.Sprint(id), order(id, customer))
	}
	w.produce(partition, kv...)
}

func (w *sinkWorld) committed() map[int32]int64 {
	w.t.Helper()
	all, err := w.kafka.CommittedOffsets(w.t.Context(), w.group)
	if err != nil {
		w.t.Fatal(err)
	}
	return aboveZero(all[w.topic])
}

// aboveZero leaves out partitions of which nothing was read: their position,
// 0, is committed too.
func aboveZero(offsets map[int32]int64) map[int32]int64 {
	maps.DeleteFunc(offsets, func(_ int32, offset int64) bool { return offset == 0 })
	return offsets
}

// awaitCommitted waits until the offsets that the broker has for the group
// are the ones wanted.
func (w *sinkWorld) awaitCommitted(want map[int32]int64) {
	w.t.Helper()
	harness.Await(w.t, patience, fmt.Sprintf("committed offsets become %v", want), func(ctx context.Context) (any, bool) {
		all, err := w.kafka.CommittedOffsets(ctx, w.group)
		if err != nil {
			return err, false
		}
		if cmp.Equal(aboveZero(all[w.topic]), want) {
			w.t.Logf("committed offsets read back from the broker: %v", want)
			return nil, true
		}
		return all[w.topic], false
	})
}

func (w *sinkWorld) wantRows(want ...[]string) {
	w.t.Helper()
	if diff := cmp.Diff(want, rows(w.sim, "orders", "id", "customer", "amount")); diff != "" {
		w.t.Errorf("the table (-want +got):\n%s", shorten(diff))
	}
}

func (w *sinkWorld) wantOrders(n int) {
	w.t.Helper()
	if got := w.sim.Count("orders"); got != int64(n) {
		w.t.Errorf("%d rows, want %d", got, n)
	}
}

func sinkCarries(w *sinkWorld) {
	t := w.t
	d := w.start(nil)
	w.produce(0, "1", order(1, "ada"), "2", order(2, "bob"), "1", order(1, "ada again"), "2", "")
	w.produce(1, "3", `{"ID": 3, "Customer": "c\u00e9", "amount": 1.10, "paid": false, "unknown": [1]}`)
	w.awaitCommitted(map[int32]int64{0: 4, 1: 1})
	w.wantRows([]string{"1", "ada again", "1.5"}, []string{"3", "cé", "1.1"})
	waitHealthy(t, d)
	if lag, err := d.Metric(t.Context(), "kafkasink_assigned_partitions", nil); err != nil || lag != 3 {
		t.Errorf("assigned partitions %v, %v", lag, err)
	}
}

// With KAFKASINK_ACK_ON=durable, offsets wait for a checkpoint.
func sinkDurable(w *sinkWorld) {
	t := w.t
	w.sim = startSim(t, enterprise())
	w.start(map[string]string{"KAFKASINK_ACK_ON": "durable", "FELDERA_CHECKPOINT_INTERVAL": "200ms"})
	w.produce(0, "1", order(1, "durable"))
	w.awaitCommitted(map[int32]int64{0: 1})
	w.sim.HoldCheckpoint()
	w.produce(0, "2", order(2, "completed"))
	waitSim(t, w.sim, "the row is completed", func(v felderasim.View) bool { return v.Count("orders") == 2 })
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
		if got := w.committed(); got[0] != 1 {
			t.Fatalf("offsets moved to %v without a checkpoint", got)
		}
	}
	w.sim.ReleaseCheckpoint()
	w.awaitCommitted(map[int32]int64{0: 2})
}

func sinkWaitsForCompletion(w *sinkWorld) {
	t := w.t
	d := w.start(nil)
	w.produce(0, "1", order(1, "before"))
	w.awaitCommitted(map[int32]int64{0: 1})
	w.sim.HoldCompletion()
	w.produce(0, "2", order(2, "held"))
	w.produce(1, "3", order(3, "held"))
	waitSim(t, w.sim, "the held rows are accepted", func(v felderasim.View) bool { return v.Counters().Records >= 3 })
	// Longer than a commit interval, and than the group's session.
	for end := time.Now().Add(8 * time.Second); time.Now().Before(end); {
		if got := w.committed(); got[0] != 1 || got[1] > 0 {
			t.Fatalf("offsets moved to %v without completion", got)
		}
	}
	t.Logf("committed offsets stood at %v without completion", w.committed())
	w.sim.ReleaseCompletion()
	w.awaitCommitted(map[int32]int64{0: 2, 1: 1})
	w.wantOrders(3)
	if lines := d.Log().Grep(regexp.MustCompile("expelled")); len(lines) != 0 {
		t.Errorf("the group expelled it meanwhile: %v", lines)
	}
}

func sinkKilledBeforeCompletion(w *sinkWorld) {
	t := w.t
	d := w.start(nil)
	total := 0
	for round := range 3 {
		w.sim.HoldCompletion()
		before := w.sim.Counters().Records
		for p := range int32(3) {
			w.produceOrders(p, total, total+100, "round")
			total += 100
		}
		waitSim(t, w.sim, "something of the round is accepted", func(v felderasim.View) bool { return v.Counters().Records > before })
		d.Kill()
		got := w.committed()
		if n := int64(round * 100); got[0] > n || got[1] > n || got[2] > n {
			t.Fatalf("offsets %v committed before completion", got)
		}
		w.sim.ReleaseCompletion()
		if err := d.Restart(nil); err != nil {
			t.Fatal(err)
		}
		n := int64(round*100 + 100)
		w.awaitCommitted(map[int32]int64{0: n, 1: n, 2: n})
		w.wantOrders(total)
	}
}

func sinkStopsOnePartition(w *sinkWorld) {
	t := w.t
	d := w.start(nil)
	w.produce(0, "1", order(1, "good"), "x", `{"id": 2, `, "3", order(3, "behind it"))
	w.produceOrders(1, 10, 20, "other")
	w.awaitCommitted(map[int32]int64{0: 1, 1: 10})
	w.wantOrders(11)
	health(t, d, "the stop is shown", func(status int, body string) bool {
		return status == 503 && strings.Contains(body, w.topic+"[0]@1") && strings.Contains(body, "not valid JSON")
	})
	w.produceOrders(1, 20, 30, "goes on")
	w.awaitCommitted(map[int32]int64{0: 1, 1: 20})
	// The same bad record again after a restart: no crash loop, no loss.
	d.Kill()
	if err := d.Restart(map[string]string{"KAFKASINK_POISON": "skip"}); err != nil {
		t.Fatal(err)
	}
	w.awaitCommitted(map[int32]int64{0: 3, 1: 20})
	w.wantOrders(22)
}

func sinkSkips(w *sinkWorld) {
	t := w.t
	d := w.start(map[string]string{"KAFKASINK_POISON": "skip"})
	w.produce(0, "1", "not json", "2", order(2, "good"), "3", `{"id":3,"customer":null,"paid":true}`)
	w.awaitCommitted(map[int32]int64{0: 3})
	w.wantRows([]string{"2", "good", "2.5"})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.WaitLog(ctx, regexp.MustCompile(`set aside.*offset=0`)); err != nil {
		t.Error(err)
	}
}

func sinkStopsClean(w *sinkWorld) {
	t := w.t
	d := w.start(nil)
	w.sim.HoldCompletion()
	w.produce(0, "1", order(1, "in flight"))
	waitSim(t, w.sim, "the row is accepted", func(v felderasim.View) bool { return v.Counters().Records == 1 })
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.WaitLog(ctx, regexp.MustCompile("finishing what is in flight")); err != nil {
		t.Fatal(err)
	}
	w.sim.ReleaseCompletion()
	if code, err := d.Wait(ctx); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v", code, err)
	}
	w.awaitCommitted(map[int32]int64{0: 1})
	if n := w.sim.Counters().Accepted; n != 1 {
		t.Errorf("%d requests", n)
	}
}

func sinkHandsOver(w *sinkWorld) {
	t := w.t
	first := w.start(nil)
	for p := range int32(3) {
		w.produceOrders(p, int(p)*1000, int(p)*1000+100, "first")
	}
	w.awaitCommitted(map[int32]int64{0: 100, 1: 100, 2: 100})
	second := w.start(nil)
	harness.Await(t, patience, "both members have partitions", func(ctx context.Context) (any, bool) {
		a, errA := first.Metric(ctx, "kafkasink_assigned_partitions", nil)
		b, errB := second.Metric(ctx, "kafkasink_assigned_partitions", nil)
		return fmt.Sprint(a, b, errA, errB), a >= 1 && b >= 1 && a+b == 3
	})
	for p := range int32(3) {
		w.produceOrders(p, int(p)*1000+100, int(p)*1000+200, "both")
	}
	w.awaitCommitted(map[int32]int64{0: 200, 1: 200, 2: 200})
	first.Kill()
	for p := range int32(3) {
		w.produceOrders(p, int(p)*1000+200, int(p)*1000+300, "second")
	}
	w.awaitCommitted(map[int32]int64{0: 300, 1: 300, 2: 300})
	w.wantOrders(900)
}

func sinkPipelineRestarted(w *sinkWorld) {
	t := w.t
	d := w.start(nil)
	w.produce(0, "1", order(1, "committed"))
	w.awaitCommitted(map[int32]int64{0: 1})
	w.sim.HoldCompletion()
	w.produce(0, "2", order(2, "accepted"))
	waitSim(t, w.sim, "the second row is accepted", func(v felderasim.View) bool { return v.Counters().Records >= 2 })
	w.sim.Crash(core.KeepNothing)
	w.sim.ReleaseCompletion()
	w.awaitCommitted(map[int32]int64{0: 2})
	w.wantRows([]string{"2", "accepted", "2.5"})
	health(t, d, "the loss is shown", func(status int, body string) bool {
		return status == 503 && strings.Contains(body, "may be missing")
	})
}

func sinkWaitsForFeldera(w *sinkWorld) {
	t := w.t
	w.sim.Kill()
	d := w.start(nil)
	w.produce(0, "1", order(1, "early"))
	harness.Await(t, patience, "readyz says why", func(ctx context.Context) (any, bool) {
		status, body, err := d.Get(ctx, "/readyz")
		if err != nil {
			return err, false
		}
		return string(body), status == 503 && strings.Contains(string(body), "wait for the pipeline")
	})
	w.sim.Restart(core.KeepNothing)
	w.awaitCommitted(map[int32]int64{0: 1})
	waitHealthy(t, d)
	for _, line := range []string{`level=WARN msg=failing what="wait for the pipeline" err="read the incarnation: stats: HTTP 503`, `msg="works again" what="wait for the pipeline"`} {
		if len(d.Log().Grep(regexp.MustCompile(line))) != 1 {
			t.Errorf("not in the log once: %s", line)
		}
	}
	// The same once it runs: an outage under way, and its end.
	id, err := w.sim.Inject(felderasim.Fault{Kind: felderasim.UnavailableBefore, Endpoint: "ingress", Count: -1})
	if err != nil {
		t.Fatal(err)
	}
	w.produce(0, "2", order(2, "later"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.WaitLog(ctx, regexp.MustCompile(`level=WARN msg=failing what="write table orders"`)); err != nil {
		t.Error(err)
	}
	w.sim.ClearFault(id)
	w.awaitCommitted(map[int32]int64{0: 2})
	if _, err := d.WaitLog(ctx, regexp.MustCompile(`msg="works again" what="write table orders"`)); err != nil {
		t.Error(err)
	}
}

// Aborted transactions and their markers take offsets that are never
// received; the committed offset passes them all the same.
func sinkPassesMarkers(w *sinkWorld) {
	t := w.t
	w.start(nil)
	client, err := w.kafka.Client(kgo.TransactionalID(w.topic), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.DefaultProduceTopic(w.topic))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for round, commit := range []kgo.TransactionEndTry{kgo.TryCommit, kgo.TryAbort, kgo.TryCommit, kgo.TryAbort} {
		if err := client.BeginTransaction(); err != nil {
			t.Fatal(err)
		}
		r := &kgo.Record{Partition: 0, Key: []byte("k"), Value: []byte(order(round, "transactional"))}
		if err := client.ProduceSync(t.Context(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
		if err := client.EndTransaction(t.Context(), commit); err != nil {
			t.Fatal(err)
		}
	}
	w.awaitCommitted(map[int32]int64{0: 8})
	w.wantRows([]string{"0", "transactional", "0.5"}, []string{"2", "transactional", "2.5"})
}

func sinkGap(w *sinkWorld) {
	t := w.t
	d := w.start(nil)
	w.produceOrders(0, 0, 5, "read")
	w.awaitCommitted(map[int32]int64{0: 5})
	d.Kill()
	w.produceOrders(0, 5, 20, "some of it goes")
	if err := w.kafka.DeleteRecords(t.Context(), w.topic, 0, 12); err != nil {
		t.Fatal(err)
	}
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	health(t, d, "the gap is shown in numbers", func(status int, body string) bool {
		return status == 503 && strings.Contains(body, "5") && strings.Contains(body, "12") && strings.Contains(body, w.topic)
	})
	if got := w.committed(); got[0] != 5 {
		t.Errorf("the offset moved over the gap: %v", got)
	}
	d.Kill()
	if err := d.Restart(map[string]string{"KAFKASINK_ON_GAP": "continue"}); err != nil {
		t.Fatal(err)
	}
	w.awaitCommitted(map[int32]int64{0: 20})
	w.wantOrders(5 + 8)
}

// stopAll puts a bad record behind a good one into every partition.
func (w *sinkWorld) stopAll() {
	for p := range int32(3) {
		w.produce(p, "good", order(int(p), "good"), "bad", `{"id": `)
	}
}

func sinkAllStoppedExits(w *sinkWorld) {
	t := w.t
	w.stopAll()
	d := w.start(map[string]string{"KAFKASINK_LOG_FORMAT": "json"})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if code, err := d.Wait(ctx); err != nil || code != 65 {
		t.Fatalf("exit code %d, %v", code, err)
	}
	w.awaitCommitted(map[int32]int64{0: 1, 1: 1, 2: 1})
	w.wantOrders(3)
	if last := d.Log().Grep(regexp.MustCompile(`"level":"ERROR","msg":"ended","exit_code":65,"err":"run: all 3 partitions stopped: .*KAFKASINK_POISON=dlq`)); len(last) != 1 {
		t.Errorf("the end is not in the log once: %v", last)
	}
	for _, line := range d.Log().Grep(regexp.MustCompile(`^kafkasink: `)) {
		t.Errorf("a line that is no JSON: %s", line)
	}
}

func sinkAllStoppedWaits(w *sinkWorld) {
	t := w.t
	w.stopAll()
	d := w.start(map[string]string{"KAFKASINK_ON_REFUSAL": "wait"})
	health(t, d, "it is blocked", func(status int, body string) bool {
		return status == 503 && strings.Contains(body, `"phase":"blocked"`) && strings.Contains(body, "all 3 partitions stopped")
	})
	if status, body, err := d.Get(t.Context(), "/readyz"); err != nil || status != 503 {
		t.Errorf("readyz: %d %s, %v", status, body, err)
	}
	w.awaitCommitted(map[int32]int64{0: 1, 1: 1, 2: 1})
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if code, err := d.Wait(ctx); err != nil || code != 0 {
		t.Errorf("exit code %d, %v", code, err)
	}
}

func sinkMissingTopic(w *sinkWorld) {
	t := w.t
	missing := w.topic + "-nosuch"
	d := w.start(map[string]string{"KAFKASINK_TOPICS": missing + "=orders:json"})
	health(t, d, "the topic is named", func(_ int, body string) bool {
		return strings.Count(body, "topic "+missing+": it does not exist") == 2 && strings.Contains(body, "kafka-topics --create")
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.WaitLog(ctx, regexp.MustCompile(`level=WARN msg=failing what="consume topic `+missing)); err != nil {
		t.Error(err)
	}
	if status, _, err := d.Get(ctx, "/readyz"); err != nil || status != 503 {
		t.Errorf("readyz %d, %v", status, err)
	}
	if err := w.kafka.CreateTopic(ctx, missing, 1, nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	if _, err := d.WaitLog(ctx, regexp.MustCompile(`msg="works again" what="consume topic `+missing)); err != nil {
		t.Error(err)
	}
}

func sinkNoBrokers(w *sinkWorld) {
	t := w.t
	d := w.start(map[string]string{"KAFKASINK_BROKERS": "127.0.0.1:1"})
	health(t, d, "the brokers are named", func(_ int, body string) bool {
		return strings.Contains(body, "reach the brokers 127.0.0.1:1: ") && strings.Contains(body, "connection refused") && strings.Contains(body, "KAFKASINK_BROKERS")
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.WaitLog(ctx, regexp.MustCompile(`level=WARN msg=failing what="reach the brokers" err=.*connection refused`)); err != nil {
		t.Error(err)
	}
}

func sinkPausedPipeline(w *sinkWorld) {
	t := w.t
	w.sim.Pause()
	d := w.start(nil)
	harness.Await(t, patience, "readyz says why", func(ctx context.Context) (any, bool) {
		status, body, err := d.Get(ctx, "/readyz")
		if err != nil {
			return err, false
		}
		return string(body), status == 503 && strings.Contains(string(body), "the pipeline is Paused")
	})
	w.sim.Resume()
	waitHealthy(t, d)
}

// Without rows and without anything in flight, only the periodic look can
// notice.
func sinkIdleSeesRestart(w *sinkWorld) {
	t := w.t
	d := w.start(nil)
	w.produce(0, "1", order(1, "committed"))
	w.awaitCommitted(map[int32]int64{0: 1})
	waitHealthy(t, d)
	w.sim.Crash(core.KeepNothing)
	health(t, d, "the loss is shown", func(status int, body string) bool {
		return status == 503 && strings.Contains(body, "may be missing")
	})
}

func sinkSecondSignal(w *sinkWorld) {
	t := w.t
	if _, err := w.sim.Inject(felderasim.Fault{Kind: felderasim.Hang, Endpoint: "ingress", Count: -1}); err != nil {
		t.Fatal(err)
	}
	d := w.start(map[string]string{"FELDERA_REQUEST_TIMEOUT": "5m", "FELDERA_REQUEST_LIFETIME": "5m", "KAFKASINK_DRAIN_TIMEOUT": "5m", "KAFKASINK_REBALANCE_TIMEOUT": "10m"})
	w.produce(0, "1", order(1, "held"))
	waitSim(t, w.sim, "the request is there", func(v felderasim.View) bool { return v.Counters().Requests >= 1 })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, says := range []string{"finishing what is in flight", "stopping at once"} {
		if err := d.Terminate(); err != nil {
			t.Fatal(err)
		}
		if _, err := d.WaitLog(ctx, regexp.MustCompile(says)); err != nil {
			t.Fatal(err)
		}
	}
	if code, err := d.Wait(ctx); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v", code, err)
	}
	if got := w.committed(); len(got) != 0 {
		t.Errorf("committed %v", got)
	}
}

func sinkBadSettings(w *sinkWorld) {
	t := w.t
	for name, c := range map[string]struct {
		change map[string]string
		args   []string
		code   int
		says   string
	}{
		"no topics":             {change: map[string]string{"KAFKASINK_TOPICS": ""}, code: 78, says: "KAFKASINK_TOPICS"},
		"misspelt setting":      {change: map[string]string{"KAFKASINK_BROKER": "x:1"}, code: 78, says: "KAFKASINK_BROKERS"},
		"unknown format":        {change: map[string]string{"KAFKASINK_TOPICS": "a=b:xml"}, code: 78, says: "json"},
		"unknown Feldera table": {change: map[string]string{"KAFKASINK_TOPICS": w.topic + "=ordres:json"}, code: 65, says: "orders"},
		"unknown pipeline":      {change: map[string]string{"FELDERA_PIPELINE": "nosuch"}, code: 65, says: "nosuch"},
		"check: missing topic":  {change: map[string]string{"KAFKASINK_TOPICS": "nosuch=orders:json"}, args: []string{"check"}, code: 65, says: "nosuch"},
		"check: no broker":      {change: map[string]string{"KAFKASINK_BROKERS": "127.0.0.1:1"}, args: []string{"check"}, code: 69, says: "127.0.0.1:1"},
		"check: all is well":    {args: []string{"check"}, code: 0, says: "ok"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			env := merged(merged(w.env(), c.change), map[string]string{"KAFKASINK_LISTEN": "127.0.0.1:0"})
			got, err := harness.Run(ctx, harness.DaemonOptions{Program: build(t, "kafkasink"), Args: c.args, Env: env})
			if err != nil {
				t.Fatal(err)
			}
			if out := got.Stdout + got.Stderr; got.ExitCode != c.code || !strings.Contains(out, c.says) {
				t.Errorf("exit code %d (want %d), output (want %q):\n%s", got.ExitCode, c.code, c.says, out)
			}
		})
	}
}
