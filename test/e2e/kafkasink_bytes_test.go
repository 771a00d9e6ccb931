package e2e

import (
	"bytes"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/test/harness"
)

// TestKafkasinkBytes: records as other clients write them, and as an enemy
// would.
func TestKafkasinkBytes(t *testing.T) {
	t.Parallel()
	kafka := harness.NeedKafka(t, harness.KafkaOptions{Settings: map[string]string{
		"message.max.bytes": "60000000", "replica.fetch.max.bytes": "60000000", "socket.request.max.bytes": "104857600",
	}})
	sinkCases(t, kafka, map[string]func(*sinkWorld){
		"librdkafka with every codec":                sinkForeignClient,
		"a batch that decompresses to too much":      sinkBomb,
		"a record larger than the budget passes":     sinkHugeRecord,
		"a batch larger than the budget of a lane":   sinkHugeBatch,
		"records without key, value or good headers": sinkBareRecords,
	})
}

// kcat is librdkafka's command-line client.
func sinkForeignClient(w *sinkWorld) {
	t := w.t
	w.start(nil)
	id := 0
	for i, codec := range []string{"none", "gzip", "snappy", "lz4", "zstd"} {
		var lines strings.Builder
		for range 200 {
			fmt.Fprintf(&lines, "%d|%s\n", id, order(id, codec))
			id++
		}
		cmd := exec.CommandContext(t.Context(), "kcat", "-b", strings.Join(w.kafka.Seeds, ","), "-t", w.topic, "-P", "-p", fmt.Sprint(i%3),
			"-K", "|", "-z", codec, "-H", "client=kcat", "-X", "acks=all")
		cmd.Stdin = strings.NewReader(lines.String())
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("kcat with %s: %v\n%s", codec, err, out)
		}
	}
	w.awaitCommitted(map[int32]int64{0: 400, 1: 400, 2: 200})
	w.wantOrders(1000)
	for _, row := range [][2]any{{0, "none"}, {250, "gzip"}, {450, "snappy"}, {650, "lz4"}, {999, "zstd"}} {
		if !strings.Contains(strings.Join(w.sim.Dump("orders"), "\n"), fmt.Sprintf("%v", row[1])) {
			t.Errorf("no row of %v", row[1])
		}
	}
}

// 200 MB of blanks are a few hundred kilobytes on the wire.
func sinkBomb(w *sinkWorld) {
	t := w.t
	d := w.start(map[string]string{"KAFKASINK_ON_REFUSAL": "wait"})
	w.produce(0, "1", order(1, "before"))
	w.awaitCommitted(map[int32]int64{0: 1})
	client, err := w.kafka.Client(kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchCompression(kgo.ZstdCompression()), kgo.ProducerBatchMaxBytes(1<<30), kgo.BrokerMaxWriteBytes(1<<30), kgo.MaxBufferedBytes(1<<30))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	bomb := &kgo.Record{Topic: w.topic, Partition: 0, Value: bytes.Repeat([]byte(" "), 200<<20)}
	if err := client.ProduceSync(t.Context(), bomb).FirstErr(); err != nil {
		t.Fatal(err)
	}
	w.produce(0, "2", order(2, "after"))
	w.produceOrders(1, 10, 20, "others")
	waitCheck(t, d, "partitions", func(c check) bool {
		return !c.OK && strings.Contains(c.Message, w.topic+"[0]@1") && strings.Contains(c.Message, "decompresses")
	})
	w.awaitCommitted(map[int32]int64{0: 1, 1: 10})
	stop(t, d)
	says(t, w.verb(nil, "offsets", "reset", "-to", "2", "-yes", w.topic+":0"), 0, "1 offsets are never read")
	w.start(nil)
	w.awaitCommitted(map[int32]int64{0: 3, 1: 10})
	w.wantOrders(12)
}

func sinkHugeRecord(w *sinkWorld) {
	t := w.t
	d := w.start(map[string]string{"KAFKASINK_LANE_MEMORY": "64KiB", "KAFKASINK_MEMORY_LIMIT": "1MiB", "KAFKASINK_BATCH_BYTES": "64KiB"})
	client, err := w.kafka.Client(kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerBatchMaxBytes(50<<20))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for i := range 3 {
		r := &kgo.Record{Topic: w.topic, Partition: 0, Value: []byte(order(i, strings.Repeat("x", 3<<20)))}
		if err := client.ProduceSync(t.Context(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	w.produceOrders(1, 10, 1000, "small")
	w.awaitCommitted(map[int32]int64{0: 3, 1: 990})
	w.wantOrders(993)
	waitHealthy(t, d)
}

// One batch of many records is more than a lane may hold: it arrives whole.
func sinkHugeBatch(w *sinkWorld) {
	w.start(map[string]string{"KAFKASINK_LANE_MEMORY": "64KiB", "KAFKASINK_MEMORY_LIMIT": "1MiB", "KAFKASINK_BATCH_BYTES": "1MiB"})
	w.produceOrders(0, 0, 20_000, strings.Repeat("y", 50))
	w.awaitCommitted(map[int32]int64{0: 20_000})
	w.wantOrders(20_000)
}

func sinkBareRecords(w *sinkWorld) {
	t := w.t
	w.start(map[string]string{"KAFKASINK_POISON": "skip"})
	for _, r := range []*kgo.Record{
		{Value: []byte(order(1, "no key"))},
		{},
		{Key: []byte{}, Value: []byte{}},
		{Key: []byte("\xff\x00"), Value: []byte("\x00\x00\x00\x00\x01")},
		{Value: []byte(order(2, "headers")), Headers: []kgo.RecordHeader{{Key: "", Value: nil}, {Key: "a"}, {Key: "a", Value: []byte("\xff")}}},
	} {
		r.Topic = w.topic
		if err := w.kafka.Produce(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	w.awaitCommitted(map[int32]int64{0: 5})
	w.wantOrders(2)
}
