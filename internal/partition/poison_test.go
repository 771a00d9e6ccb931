package partition

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"holdfast/internal/partition/lane"
)

func ptr[T any](v T) *T { return &v }

const dead = "orders-dead"

func withDLQ(c *Config) { c.Poison, c.DLQTopic = PoisonDLQ, dead }

// A row that the pipeline refuses goes by the policy; the array's others go
// on, in order.
func TestRefusedRowsAreIsolated(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		var values []string
		bad := map[int64]bool{0: true, 7: true, 8: true, 31: true}
		for o := range int64(40) {
			values = append(values, map[bool]string{true: "reject", false: "row"}[bad[o]])
		}
		w.produceTogether(topic, 0, values...)
		w.produceTogether(topic, 1, slices.Repeat([]string{"row"}, 40)...)
		w.engine.forgive(first, slices.Collect(maps.Keys(bad))...)
		m := w.start(func(c *Config) { c.Poison = PoisonSkip; c.BatchAge = 5 * time.Second })
		w.eventually("both are committed", func() bool { return w.committed(first) == 40 && w.committed(place{topic, 1}) == 40 })
		w.ascending(first, 0)
		w.ascending(place{topic, 1}, 0)
		if n := len(w.engine.arrived(first)); n != 36 {
			t.Errorf("%d rows arrived", n)
		}
		if got := m.metric("kafkasink_skipped_records_total", "reason=rejected"); got != 4 {
			t.Errorf("%v records skipped", got)
		}
		// Each bad row costs about two requests per halving.
		if n := w.engine.table("orders").count(); n > 80 {
			t.Errorf("%d requests", n)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(2, topic))
}

// A record that is refused once when it stands alone, and taken the second
// time, is not to blame.
func TestOneRefusalIsNotBelieved(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		w.produce(topic, 0, "row")
		w.engine.table("orders").set(func(_ context.Context, n int) error {
			if n == 1 {
				return rejection()
			}
			return nil
		})
		m := w.start(func(c *Config) { c.Poison = PoisonSkip })
		w.eventually("it is committed", func() bool { return w.committed(first) == 1 })
		if got := m.metric("kafkasink_skipped_records_total"); got != 0 {
			t.Errorf("%v records skipped", got)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

func TestBreakerStopsTheNextOne(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(func(c *Config) { c.Poison, c.PoisonLimit, c.PoisonWindow = PoisonSkip, 3, time.Minute })
		w.produce(topic, 0, "bad", "row", "bad")
		w.engine.forgive(first, 0, 2)
		w.eventually("two are skipped", func() bool { return w.committed(first) == 3 })
		w.pass(2 * time.Minute) // they are forgotten
		w.produceTogether(topic, 0, "row", "bad", "bad", "row", "bad", "row", "bad", "row")
		w.engine.forgive(first, 4, 5, 7)
		w.eventually("it stops", func() bool { p, _ := m.partition(first); return p.State == lane.Blocked })
		w.eventually("what lies before is committed", func() bool { return w.committed(first) == 9 })
		p, _ := m.partition(first)
		if p.Block.At != 9 {
			t.Errorf("stopped at %d", p.Block.At)
		}
		wantText(t, p.Block.Err, "orders[0]@9", "3 records", "KAFKASINK_POISON_LIMIT", "it is bad")
		if got := m.metric("kafkasink_stopped_partitions_total", "reason=malformed"); got != 1 {
			t.Errorf("%v stops counted", got)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

// letters reads the whole dead-letter topic.
func (w *world) letters(n int) []*kgo.Record {
	w.t.Helper()
	c, err := kgo.NewClient(kgo.SeedBrokers("localhost:9092"), kgo.Dialer(w.network.DialContext), kgo.ConsumeTopics(dead), kgo.FetchMaxWait(100*time.Millisecond))
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(w.t.Context(), 20*time.Second)
	defer cancel()
	var out []*kgo.Record
	for len(out) < n && ctx.Err() == nil {
		out = append(out, c.PollFetches(ctx).Records()...)
	}
	return out
}

func headerMap(r *kgo.Record) map[string]string {
	out := map[string]string{}
	for _, h := range r.Headers {
		out[h.Key] = string(h.Value)
	}
	return out
}

func TestDeadLetters(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		at := time.UnixMilli(1_700_000_000_123)
		for _, r := range []*kgo.Record{
			{Key: []byte("k0"), Value: []byte("row")},
			{Key: []byte("k1"), Value: []byte("bad"), Headers: []kgo.RecordHeader{{Key: "trace", Value: []byte{0, 255}}, {Key: headerStage, Value: []byte("old")}}, Timestamp: at},
			{Key: []byte("k2"), Value: []byte("reject"), Timestamp: at},
			{Key: []byte("k3"), Value: []byte("row")},
		} {
			r.Topic = topic
			if err := w.writer.ProduceSync(t.Context(), r).FirstErr(); err != nil {
				t.Fatal(err)
			}
			w.engine.produced(first, r.Offset, string(r.Value))
		}
		w.engine.forgive(first, 1, 2)
		m := w.start(withDLQ)
		w.eventually("committed", func() bool { return w.committed(first) == 4 })
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
		got := w.letters(2)
		if len(got) != 2 {
			t.Fatalf("%d dead letters", len(got))
		}
		for i, want := range []struct{ key, value, offset, class, stage, message string }{
			{"k1", "bad", "1", "malformed", "VALUE_CONVERTER", "it is bad"},
			{"k2", "reject", "2", "rejected", "TASK_PUT", "the pipeline says no"},
		} {
			r, h := got[i], headerMap(got[i])
			if string(r.Key) != want.key || string(r.Value) != want.value || !r.Timestamp.Equal(at) {
				t.Errorf("letter %d: %q=%q at %v", i, r.Key, r.Value, r.Timestamp)
			}
			if h[headerTopic] != topic || h[headerPartition] != "0" || h[headerOffset] != want.offset || h[headerClass] != want.class ||
				h[headerStage] != want.stage || !strings.Contains(h[headerMessage], want.message) || h[headerConnector] != group {
				t.Errorf("letter %d has headers %v", i, h)
			}
		}
		if h := headerMap(got[0]); h["trace"] != "\x00\xff" || len(got[0].Headers) != 9 {
			t.Errorf("headers %v", h)
		}
		if n := m.metric("kafkasink_dead_letter_records_total", "topic=orders"); n != 2 {
			t.Errorf("%v counted", n)
		}
	}, kfake.SeedTopics(1, topic, dead))
}

// While the dead-letter topic cannot be written, the partition is held and the
// others go on; no offset moves past the record.
func TestDeadLetterTopicAway(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		away := w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: dead, Err: kerr.TopicAuthorizationFailed, Count: -1})
		w.produce(topic, 0, "row", "bad", "row")
		w.fill(topic, 1, 2)
		w.engine.forgive(first, 1)
		m := w.start(withDLQ)
		w.eventually("what lies before it is committed", func() bool { return w.committed(first) == 1 })
		w.eventually("it is held, and said so", func() bool { p, _ := m.partition(first); return p.Held != nil })
		p, _ := m.partition(first)
		wantText(t, p.Held, "orders[0]@1", dead)
		w.fill(topic, 1, 2)
		w.eventually("the other goes on", func() bool { return w.committed(place{topic, 1}) == 4 })
		w.pass(5 * time.Minute)
		if got := w.committed(first); got != 1 {
			t.Errorf("committed %d past a record that is nowhere", got)
		}
		if n := m.metric("kafkasink_dead_letter_failures_total"); n < 3 || n > 60 {
			t.Errorf("%v attempts in five minutes", n)
		}
		away.Remove()
		w.eventually("it goes on", func() bool { return w.committed(first) == 3 })
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
		if n := len(w.letters(1)); n != 1 {
			t.Errorf("%d dead letters", n)
		}
	}, kfake.SeedTopics(2, topic, dead))
}

// A stop, or a revocation, does not wait for the dead-letter topic.
func TestStopWhileALetterIsOnItsWay(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		w.cluster.ControlKey(int16(kmsg.Produce), func(r kmsg.Request) (kmsg.Response, error, bool) {
			w.cluster.KeepControl()
			req, ok := r.(*kmsg.ProduceRequest)
			if !ok || !slices.ContainsFunc(req.Topics, func(t kmsg.ProduceRequestTopic) bool { return t.Topic == dead || w.named(t.TopicID) == dead }) {
				return nil, nil, false
			}
			resp, _ := req.ResponseKind().(*kmsg.ProduceResponse)
			for _, rt := range req.Topics {
				at := kmsg.ProduceResponseTopic{Topic: rt.Topic, TopicID: rt.TopicID}
				for _, p := range rt.Partitions {
					at.Partitions = append(at.Partitions, kmsg.ProduceResponseTopicPartition{Partition: p.Partition, ErrorCode: kerr.NotEnoughReplicas.Code})
				}
				resp.Topics = append(resp.Topics, at)
			}
			return resp, nil, true
		})
		w.learn(dead)
		w.produce(topic, 0, "row", "bad", "row")
		m := w.start(withDLQ)
		w.eventually("what lies before it is committed", func() bool { return w.committed(first) == 1 })
		began := time.Now()
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("the stop took %v", took)
		}
		if got := w.committed(first); got != 1 {
			t.Errorf("committed %d", got)
		}
	}, kfake.SeedTopics(1, topic, dead))
}

func TestBreakerWindow(t *testing.T) {
	k := &breaker{limit: 2, window: time.Minute}
	at := time.Unix(1000, 0)
	for i, step := range []struct {
		after   time.Duration
		pending int
		want    bool
	}{{0, 0, false}, {0, 1, false}, {0, 2, true}} {
		if got := k.tripped("a", step.pending, at); got != step.want {
			t.Errorf("step %d: tripped %v", i, got)
		}
	}
	for i := range 5 {
		k.count("a", at.Add(time.Duration(i)*time.Second))
	}
	if !k.tripped("a", 0, at.Add(time.Minute)) || k.tripped("b", 0, at) || k.tripped("a", 0, at.Add(2*time.Minute)) {
		t.Error("the window does not hold")
	}
	if n := len(k.topics["a"]); n > 2 {
		t.Errorf("%d times are kept", n)
	}
}

func TestHalve(t *testing.T) {
	a, b := &held{}, &held{}
	for n := range 8 {
		one, two := halve([]share{{a, 3}, {b, 4}}, n)
		sum := map[*held]int{}
		for _, s := range append(slices.Clone(one), two...) {
			if s.records <= 0 {
				t.Errorf("%d: a share of %d", n, s.records)
			}
			sum[s.h] += s.records
		}
		got := 0
		for _, s := range one {
			got += s.records
		}
		if got != n || sum[a] != 3 || sum[b] != 4 {
			t.Errorf("halve at %d: %v %v", n, one, two)
		}
	}
}

func TestClipText(t *testing.T) {
	for _, text := range []string{"", "ä", strings.Repeat("ä", 10), "\xff\xfe", fmt.Sprint(strings.Repeat("x", 9), "ä")} {
		if got := clipText(text, 10); len(got) > 10+len("…") || strings.ToValidUTF8(got, "") != got {
			t.Errorf("%q became %q", text, got)
		}
	}
}
