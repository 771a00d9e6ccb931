package harness_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/test/harness"
)

func TestKafkaKeepsRecordsAndOffsetsOverACrash(t *testing.T) {
	k := harness.NeedKafka(t, harness.KafkaOptions{})
	useBroker(t, &k.Brokers)
	k.Kill()
	must(t, k.Start(t.Context()))
	seeUse(t, &k.Brokers)
	must(t, k.Restart(t.Context()))
	seeUse(t, &k.Brokers)
}

func TestFakeKafkaKeepsRecordsAndOffsetsOverARestart(t *testing.T) {
	f := harness.NeedFakeKafka(t, harness.FakeKafkaOptions{
		Topics: map[string]int32{"seeded": 3}, DataDir: t.TempDir(),
	})
	seeds := f.Seeds
	useBroker(t, &f.Brokers)
	must(t, f.Restart())
	if diff := cmp.Diff(seeds, f.Seeds); diff != "" {
		t.Errorf("addresses after the restart (-want +got):\n%s", diff)
	}
	seeUse(t, &f.Brokers)
	ends, err := f.EndOffsets(t.Context(), "seeded")
	must(t, err)
	if len(ends) != 3 {
		t.Errorf("topic seeded has %d partitions, want 3", len(ends))
	}
}

// useBroker writes three records, commits two of them for group g, and makes and
// deletes a topic.
func useBroker(t *testing.T, b *harness.Brokers) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	must(t, b.CreateTopic(ctx, "orders", 2, map[string]string{"retention.ms": "-1"}))
	must(t, b.Produce(ctx,
		&kgo.Record{Topic: "orders", Partition: 1, Value: []byte("a")},
		&kgo.Record{Topic: "orders", Partition: 1, Value: []byte("b")},
		&kgo.Record{Topic: "orders", Partition: 1, Value: []byte("c")},
	))
	client, err := b.Client()
	must(t, err)
	defer client.Close()
	var offsets kadm.Offsets
	offsets.Add(kadm.Offset{Topic: "orders", Partition: 1, At: 2, LeaderEpoch: -1, Metadata: "a note"})
	must(t, kadm.NewClient(client).CommitAllOffsets(ctx, "g", offsets))
	must(t, b.DeleteRecords(ctx, "orders", 1, 1))
	must(t, b.CreateTopic(ctx, "short-lived", 1, nil))
	must(t, b.DeleteTopic(ctx, "short-lived"))
	must(t, b.CreateTopic(ctx, "short-lived", 1, nil))
	seeUse(t, b)
}

func seeUse(t *testing.T, b *harness.Brokers) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	ends, err := b.EndOffsets(ctx, "orders")
	must(t, err)
	if diff := cmp.Diff(map[int32]int64{0: 0, 1: 3}, ends); diff != "" {
		t.Errorf("end offsets (-want +got):\n%s", diff)
	}
	committed, err := b.CommittedOffsets(ctx, "g")
	must(t, err)
	if diff := cmp.Diff(map[string]map[int32]int64{"orders": {1: 2}}, committed); diff != "" {
		t.Errorf("committed offsets (-want +got):\n%s", diff)
	}
	note, err := b.CommitMetadata(ctx, "g", "orders", 1)
	must(t, err)
	if note != "a note" {
		t.Errorf("commit metadata is %q", note)
	}
}
