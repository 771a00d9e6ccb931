package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/test/harness"
)

// TestKafkasinkVerbs: what an operator does from the command line.
func TestKafkasinkVerbs(t *testing.T) {
	t.Parallel()
	sinkCases(t, harness.NeedKafka(t, harness.KafkaOptions{}), map[string]func(*sinkWorld){
		"offsets are shown and reset":             sinkOffsets,
		"dead letters are listed and put back":    sinkRedrive,
		"verbs that are called wrong say how":     sinkVerbMistakes,
		"a reset by time and of a single":         sinkResetByTime,
		"two redrives at once are noticed by one": sinkTwoRedrives,
	})
}

// verb runs a verb of kafkasink with the world's settings.
func (w *sinkWorld) verb(changes map[string]string, args ...string) harness.RunResult {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*patience)
	defer cancel()
	r, err := harness.Run(ctx, harness.DaemonOptions{Program: build(w.t, "kafkasink"), Args: args, Env: merged(w.env(), changes)})
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

// stop ends a daemon in order.
func stop(t *testing.T, d *harness.Daemon) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	if code, err := d.Wait(ctx); err != nil || code != 0 {
		t.Fatalf("it ended with %d, %v", code, err)
	}
}

func sinkOffsets(w *sinkWorld) {
	t := w.t
	says(t, w.verb(nil, "offsets", "show"), 0, "0 members", w.topic)
	d := w.start(nil)
	w.produceOrders(0, 0, 10, "a")
	w.produceOrders(1, 10, 30, "b")
	w.awaitCommitted(map[int32]int64{0: 10, 1: 20})

	says(t, w.verb(nil, "offsets", "show"), 0, "Stable, 1 members")
	says(t, w.verb(nil, "offsets", "reset", "-to", "earliest", "-yes"), 65, "has 1 members", "stop them")
	w.awaitCommitted(map[int32]int64{0: 10, 1: 20})
	stop(t, d)

	var shown struct {
		Members int
		Offsets []struct {
			Partition           int32
			Committed, Lag, End int64
			Epoch               int64
			Clean               bool
			Time                time.Time
		}
	}
	r := w.verb(nil, "offsets", "show", "-json", w.topic+":1")
	says(t, r, 0)
	if err := json.Unmarshal([]byte(r.Stdout), &shown); err != nil || len(shown.Offsets) != 1 {
		t.Fatalf("%v: %s", err, r.Stdout)
	}
	if o := shown.Offsets[0]; o.Partition != 1 || o.Committed != 20 || o.Lag != 0 || o.Epoch != 1 || !o.Clean || time.Since(o.Time) > time.Hour {
		t.Errorf("it shows %+v", o)
	}
	// Without -yes nothing changes; with it, one topic's offsets do.
	says(t, w.verb(nil, "offsets", "reset", "-to", "earliest"), 0, "10 offsets are read again", "20 offsets are read again", "nothing was changed")
	w.awaitCommitted(map[int32]int64{0: 10, 1: 20})
	says(t, w.verb(nil, "offsets", "reset", "-to", "4", "-yes", w.topic+":0"), 0, "6 offsets are read again", "done")
	w.awaitCommitted(map[int32]int64{0: 4, 1: 20})
	note, err := w.kafka.CommitMetadata(t.Context(), w.group, w.topic, 0)
	if err != nil || !strings.Contains(note, `"epoch":2`) || !strings.Contains(note, `"offset":4`) || !strings.Contains(note, `"clean":true`) {
		t.Errorf("note %s, %v", note, err)
	}
	says(t, w.verb(nil, "offsets", "reset", "-to", "99", "-yes"), 65, "no such offset", "from 0 to 10")
	w.produceOrders(0, 30, 40, "c")
	says(t, w.verb(nil, "offsets", "reset", "-to", "latest", "-yes"), 0, "16 offsets are never read")
	w.awaitCommitted(map[int32]int64{0: 20, 1: 20})
	w.start(nil)
	w.produceOrders(0, 40, 50, "d")
	w.awaitCommitted(map[int32]int64{0: 30, 1: 20})
	w.wantOrders(40)
}

func sinkResetByTime(w *sinkWorld) {
	t := w.t
	base := time.Now().Add(-time.Hour).Truncate(time.Second)
	for i := range 10 {
		err := w.kafka.Produce(t.Context(), &kgo.Record{Topic: w.topic, Value: []byte(order(i, "x")), Timestamp: base.Add(time.Duration(i) * time.Minute)})
		if err != nil {
			t.Fatal(err)
		}
	}
	at := base.Add(4*time.Minute + time.Second).UTC().Format(time.RFC3339)
	says(t, w.verb(nil, "offsets", "reset", "-to", at, "-yes"), 0, "5 offsets are never read")
	w.awaitCommitted(map[int32]int64{0: 5})
	w.start(nil)
	w.awaitCommitted(map[int32]int64{0: 10})
	w.wantOrders(5)
}

func sinkVerbMistakes(w *sinkWorld) {
	t := w.t
	for _, tc := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"offsets"}, 64, "there is no verb"},
		{[]string{"offsets", "drop"}, 64, "there is no verb"},
		{[]string{"offsets", "show", "nowhere"}, 64, "none of KAFKASINK_TOPICS"},
		{[]string{"offsets", "show", w.topic + ":x"}, 64, "not TOPIC or TOPIC:PARTITION"},
		{[]string{"offsets", "show", w.topic + ":77"}, 64, "does not have"},
		{[]string{"offsets", "reset"}, 64, "-to has to be"},
		{[]string{"offsets", "reset", "-to", "soon"}, 64, "-to has to be"},
		{[]string{"dlq", "list"}, 78, "KAFKASINK_DLQ_TOPIC"},
		{[]string{"dlq", "show"}, 64, "PARTITION:OFFSET"},
		{[]string{"dlq", "redrive"}, 64, "-dry-run"},
	} {
		says(t, w.verb(nil, tc.args...), tc.code, tc.says)
	}
	dlq := map[string]string{"KAFKASINK_DLQ_TOPIC": "absent"}
	says(t, w.verb(dlq, "dlq", "list"), 65, "does not exist")
	says(t, w.verb(map[string]string{"KAFKASINK_BROKERS": "127.0.0.1:1"}, "offsets", "show"), 69, "no answer")
}

func sinkRedrive(w *sinkWorld) {
	t := w.t
	dlq := w.topic + "-dead"
	if err := w.kafka.CreateTopic(t.Context(), dlq, 2, nil); err != nil {
		t.Fatal(err)
	}
	with := map[string]string{"KAFKASINK_POISON": "dlq", "KAFKASINK_DLQ_TOPIC": dlq, "FELDERA_URL": w.refusing("unwanted")}
	d := w.start(with)
	w.produce(0, "1", order(1, "unwanted"), "2", "not json", "3", order(3, "good"))
	w.produce(1, "4", order(4, "unwanted"))
	w.awaitCommitted(map[int32]int64{0: 3, 1: 1})
	stop(t, d)

	r := w.verb(with, "dlq", "list")
	says(t, r, 0, w.topic+"[0]@0", w.topic+"[0]@1", w.topic+"[1]@0", "rejected", "malformed", "this row will not do")
	if n := strings.Count(r.Stdout, "\n"); n != 3 {
		t.Errorf("%d lines:\n%s", n, r.Stdout)
	}
	r = w.verb(with, "dlq", "list", "-class", "malformed", "-json")
	var one struct {
		Partition int32
		Offset    int64
		Key       []byte
		Value     []byte
	}
	if err := json.Unmarshal([]byte(r.Stdout), &one); err != nil || string(one.Key) != "2" || string(one.Value) != "not json" {
		t.Errorf("%v: %s", err, r.Stdout)
	}
	says(t, w.verb(with, "dlq", "show", fmt.Sprintf("%d:%d", one.Partition, one.Offset)), 0, "not json", w.topic+"[0]@1", "VALUE_CONVERTER")
	says(t, w.verb(with, "dlq", "show", "0:12345"), 65, "there is none")

	says(t, w.verb(with, "dlq", "redrive", "-dry-run"), 0, "3 to be put back", "would be put back")
	ends, err := w.kafka.EndOffsets(t.Context(), w.topic)
	if err != nil || ends[0] != 3 || ends[1] != 1 {
		t.Fatalf("a dry run wrote: %v, %v", ends, err)
	}
	says(t, w.verb(with, "dlq", "redrive", "-yes"), 0, "3 put back, 0 left")
	says(t, w.verb(with, "dlq", "redrive", "-yes"), 0, "0 put back, 0 left") // it goes on where it was
	ends, err = w.kafka.EndOffsets(t.Context(), w.topic)
	if err != nil || ends[0] != 5 || ends[1] != 2 {
		t.Fatalf("put back into %v, %v", ends, err)
	}
	// The pipeline takes them now; the one that is no JSON comes round.
	mended := map[string]string{"KAFKASINK_POISON": "dlq", "KAFKASINK_DLQ_TOPIC": dlq}
	for round := range 3 {
		d = w.start(mended)
		w.awaitCommitted(map[int32]int64{0: int64(5 + round), 1: 2})
		stop(t, d)
		if round < 2 {
			says(t, w.verb(with, "dlq", "redrive", "-yes"), 0, "1 put back, 0 left")
		}
	}
	says(t, w.verb(with, "dlq", "redrive", "-yes"), 0, "0 put back, 1 left", "put back 3 times already")
	w.wantOrders(3)
	letters := w.readTopic(dlq, 6)
	for _, l := range letters {
		if n := strings.Count(fmt.Sprint(l.Headers), "__connect.errors.topic"); n != 1 {
			t.Errorf("a dead letter says %d times where it came from", n)
		}
	}
}

// A redrive that finds the offsets moved under it ends.
func sinkTwoRedrives(w *sinkWorld) {
	t := w.t
	dlq := w.topic + "-dead"
	if err := w.kafka.CreateTopic(t.Context(), dlq, 1, nil); err != nil {
		t.Fatal(err)
	}
	var records []*kgo.Record
	for i := range 3000 {
		records = append(records, &kgo.Record{Topic: dlq, Value: []byte(order(i, "x")), Headers: []kgo.RecordHeader{
			{Key: "__connect.errors.topic", Value: []byte(w.topic)}, {Key: "__connect.errors.partition", Value: []byte("2")},
		}})
	}
	if err := w.kafka.Produce(t.Context(), records...); err != nil {
		t.Fatal(err)
	}
	with := map[string]string{"KAFKASINK_DLQ_TOPIC": dlq}
	results := make(chan harness.RunResult, 2)
	program := build(t, "kafkasink")
	for range 2 {
		go func() {
			r, err := harness.Run(t.Context(), harness.DaemonOptions{Program: program, Args: []string{"dlq", "redrive", "-yes", "-json"}, Env: merged(w.env(), with)})
			if err != nil {
				t.Error(err)
			}
			results <- r
		}()
	}
	refused := 0
	for range 2 {
		r := <-results
		if r.ExitCode == 65 && strings.Contains(r.Stderr, "somebody else moved its offsets") {
			refused++
		} else if r.ExitCode != 0 {
			t.Errorf("it ended with %d: %s", r.ExitCode, r.Stderr)
		}
	}
	// Both may have been refused by each other; then a third goes on.
	says(t, w.verb(with, "dlq", "redrive", "-yes"), 0)
	// What is refused has written what the other one writes too: a step, or, where
	// its commit comes late and so moves the offset back, all since that step.
	ends, err := w.kafka.EndOffsets(t.Context(), w.topic)
	if err != nil || ends[2] < 3000 || ends[2] > 3000*int64(1+refused)+100 {
		t.Errorf("%d records were put back, %d refused, %v", ends[2], refused, err)
	}
}
