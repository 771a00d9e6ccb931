package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// TestKafkasinkGaps: what a real broker takes away from under a sink.
func TestKafkasinkGaps(t *testing.T) {
	t.Parallel()
	sinkCases(t, harness.NeedKafka(t, harness.KafkaOptions{}), map[string]func(*sinkWorld){
		"retention is passed over when told to":  sinkGapContinues,
		"a topic made anew stops":                sinkRecreatedStops,
		"a topic made anew is read when told to": sinkRecreatedContinues,
		"a topic made anew while away":           sinkRecreatedWhileAway,
		"expired offsets stop when told to":      sinkNoOffsetStops,
		"compaction leaves no stall":             sinkCompacted,
	})
}

func (w *sinkWorld) recreate() {
	w.t.Helper()
	if err := w.kafka.DeleteTopic(w.t.Context(), w.topic); err != nil {
		w.t.Fatal(err)
	}
	if err := w.kafka.CreateTopic(w.t.Context(), w.topic, 3, nil); err != nil {
		w.t.Fatal(err)
	}
}

func sinkGapContinues(w *sinkWorld) {
	t := w.t
	d := w.start(nil)
	w.produceOrders(0, 0, 10, "a")
	w.awaitCommitted(map[int32]int64{0: 10})
	stop(t, d)
	w.produceOrders(0, 10, 30, "b")
	w.deleteRecords(25)
	d = w.start(map[string]string{"KAFKASINK_ON_GAP": "continue"})
	w.awaitCommitted(map[int32]int64{0: 30})
	w.wantOrders(15)
	if v, err := d.Metric(t.Context(), "kafkasink_gaps_total", map[string]string{"reason": "retention"}); err != nil || v != 1 {
		t.Errorf("gaps counted: %v, %v", v, err)
	}
	waitHealthy(t, d)
}

func sinkRecreatedStops(w *sinkWorld) {
	t := w.t
	d := w.start(nil)
	w.produceOrders(0, 0, 10, "a")
	w.awaitCommitted(map[int32]int64{0: 10})
	w.recreate()
	w.produceOrders(0, 100, 130, "new")
	waitCheck(t, d, "partitions", func(c check) bool { return !c.OK && strings.Contains(c.Message, "made anew") })
	if n := len(d.Log().Tail(1 << 20)); n > 2000 {
		t.Errorf("%d lines of log: something spins", n)
	}
	w.wantOrders(10)
}

func sinkRecreatedContinues(w *sinkWorld) {
	t := w.t
	d := w.start(map[string]string{"KAFKASINK_ON_GAP": "continue"})
	w.produceOrders(0, 0, 10, "a")
	w.awaitCommitted(map[int32]int64{0: 10})
	w.recreate()
	w.produceOrders(0, 100, 103, "new")
	w.awaitCommitted(map[int32]int64{0: 3})
	w.produceOrders(1, 200, 205, "new")
	w.awaitCommitted(map[int32]int64{0: 3, 1: 5})
	w.wantOrders(18)
	waitHealthy(t, d)
}

// The group's offset is valid in the new log too: only the topic's id tells.
func sinkRecreatedWhileAway(w *sinkWorld) {
	t := w.t
	d := w.start(nil)
	w.produceOrders(0, 0, 10, "a")
	w.awaitCommitted(map[int32]int64{0: 10})
	stop(t, d)
	before, err := w.kafka.CommitMetadata(t.Context(), w.group, w.topic, 0)
	if err != nil {
		t.Fatal(err)
	}
	w.recreate()
	w.produceOrders(0, 100, 130, "new")
	if after, err := w.kafka.CommitMetadata(t.Context(), w.group, w.topic, 0); err != nil || after != before {
		// The broker forgets a deleted topic's offsets; put them back as one
		// that does not would have them.
		if err := w.kafka.Commit(t.Context(), w.group, w.topic, 0, 10, before); err != nil {
			t.Fatal(err)
		}
	}
	d = w.start(nil)
	waitCheck(t, d, "partitions", func(c check) bool { return !c.OK && strings.Contains(c.Message, "made anew") })
	w.wantOrders(10)
	stop(t, d)
	w.start(map[string]string{"KAFKASINK_ON_GAP": "continue"})
	w.awaitCommitted(map[int32]int64{0: 30})
	w.wantOrders(40)
}

func sinkNoOffsetStops(w *sinkWorld) {
	t := w.t
	w.produceOrders(0, 0, 10, "a")
	d := w.start(map[string]string{"KAFKASINK_START": "stop", "KAFKASINK_ON_REFUSAL": "wait"})
	waitCheck(t, d, "partitions", func(c check) bool {
		return !c.OK && strings.Contains(c.Message, "no committed offset") && strings.Contains(c.Message, "expired")
	})
	w.wantOrders(0)
}

func sinkCompacted(w *sinkWorld) {
	t := w.t
	topic := w.topic + "-compacted"
	if err := w.kafka.CreateTopic(t.Context(), topic, 1, map[string]string{
		"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01", "max.compaction.lag.ms": "200", "delete.retention.ms": "100",
	}); err != nil {
		t.Fatal(err)
	}
	for i := range 20 { // segments of their own
		r := &kgo.Record{Topic: topic, Key: []byte(fmt.Sprint(i % 2)), Value: []byte(order(i%2, fmt.Sprint("v", i)))}
		if err := w.kafka.Produce(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	w.topic = topic
	w.start(nil)
	w.awaitCommitted(map[int32]int64{0: 20})
	w.wantOrders(2)
}

// TestKafkasinkLosesBrokers runs on three brokers: a leader that is lost with
// everything replicated costs nothing; one that is lost with a tail that only
// it had makes a gap, which is said in numbers.
func TestKafkasinkLosesBrokers(t *testing.T) {
	t.Parallel()
	first := harness.NeedKafka(t, harness.KafkaOptions{})
	// The topic for groups is made while there is one broker, which is not
	// killed: what is lost here is data.
	if _, err := first.CommittedOffsets(t.Context(), "none"); err != nil {
		t.Log(err)
	}
	second := harness.NeedKafka(t, harness.KafkaOptions{Join: first, NodeID: 2})
	third := harness.NeedKafka(t, harness.KafkaOptions{Join: first, NodeID: 3})

	world := func(topic, group string) *sinkWorld {
		return &sinkWorld{t: t, kafka: first, sim: startSim(t, felderasim.Options{}), topic: topic, group: group}
	}
	state := func(topic, what string, want func(leader int32, inSync []int32) bool) {
		t.Helper()
		harness.Await(t, 2*patience, what, func(ctx context.Context) (any, bool) {
			leader, inSync, err := first.PartitionState(ctx, topic, 0)
			return fmt.Sprint(leader, inSync, err), err == nil && want(leader, inSync)
		})
	}
	if err := first.CreateTopicOn(t.Context(), "safe", map[string]string{"min.insync.replicas": "1"}, 2, 1, 3); err != nil {
		t.Fatal(err)
	}
	if err := first.CreateTopicOn(t.Context(), "unclean", map[string]string{"unclean.leader.election.enable": "true"}, 2, 3); err != nil {
		t.Fatal(err)
	}
	safe, stops, goesOn := world("safe", "g-safe"), world("unclean", "g-stops"), world("unclean", "g-goes-on")
	proven := world("unclean", "g-proven") // kafkasink verify looks at it
	proven.recorded(felderasim.Options{})
	provenDaemon := proven.start(nil)
	safeDaemon := safe.start(nil)
	stopsDaemon := stops.start(map[string]string{"KAFKASINK_ON_REFUSAL": "wait"})
	goesOnDaemon := goesOn.start(map[string]string{"KAFKASINK_ON_GAP": "continue"})
	safe.produceOrders(0, 0, 10, "a")
	stops.produceOrders(0, 0, 10, "a")
	for _, w := range []*sinkWorld{safe, stops, goesOn} {
		w.awaitCommitted(map[int32]int64{0: 10})
	}

	third.Kill()
	state("unclean", "the follower is out of sync", func(_ int32, inSync []int32) bool { return slices.Equal(inSync, []int32{2}) })
	stops.produceOrders(0, 10, 15, "lost with its broker")
	stops.awaitCommitted(map[int32]int64{0: 15})
	goesOn.awaitCommitted(map[int32]int64{0: 15})
	proven.awaitCommitted(map[int32]int64{0: 15})
	stop(t, provenDaemon)
	proven.verify(nil, 0)

	second.Kill()
	state("unclean", "nobody leads", func(leader int32, _ []int32) bool { return leader < 0 })
	proven.wantFound(nil, 69, "unreadable", 0, 0)
	state("safe", "the leader of the safe topic moves", func(leader int32, _ []int32) bool { return leader == 1 })
	safe.produceOrders(0, 10, 20, "b")
	safe.awaitCommitted(map[int32]int64{0: 20})
	safe.wantOrders(20)
	waitHealthy(t, safeDaemon)

	if err := third.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	state("unclean", "the follower that lacks the tail leads", func(leader int32, _ []int32) bool { return leader == 3 })
	proven.wantFound(nil, 65, "above_log_end", 10, 15, "the log ends at 10, 5 below the committed offset 15")
	stops.produceOrders(0, 100, 103, "in its place")

	waitCheck(t, stopsDaemon, "partitions", func(c check) bool {
		return !c.OK && strings.Contains(c.Message, "unclean[0]@15") && (strings.Contains(c.Message, "lost the log's tail") || strings.Contains(c.Message, "truncated"))
	})
	stops.awaitCommitted(map[int32]int64{0: 15})
	stops.wantOrders(15)
	goesOn.awaitCommitted(map[int32]int64{0: 13})
	goesOn.wantOrders(18) // what was delivered of the lost tail stays
	if v, err := goesOnDaemon.Metric(t.Context(), "kafkasink_gaps_total", map[string]string{"reason": "truncated"}); err != nil || v < 1 {
		t.Errorf("gaps counted: %v, %v", v, err)
	}
	if v, err := goesOnDaemon.Metric(t.Context(), "kafkasink_fetch_errors_total", nil); err != nil || v > 500 {
		t.Errorf("%v fetch errors, %v: something spins", v, err)
	}

	// What the pipeline holds is above the log's end too, and other records than
	// those that were read stand below the commit when the log has grown again.
	proven.setOffset(5, "")
	out, _ := proven.verify(nil, 65)
	if got := out.Partitions[0].Findings; len(got) != 2 || got[0].Name != "set_below_progress" || got[1].Name != "progress_above_log_end" || got[1].From != 13 || got[1].To != 15 {
		t.Errorf("%+v", got)
	}
	stop(t, stopsDaemon)
	stops.produceOrders(0, 103, 120, "in its place")
	stops.wantFound(nil, 65, "log_cut", 10, 15, "has that epoch up to offset 10 only", "offsets reset -to 10")
}
