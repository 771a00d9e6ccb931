package partition

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"pgregory.net/rapid"

	"holdfast/internal/decode"
)

func wantText(t *testing.T, err error, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if err == nil || !strings.Contains(err.Error(), p) {
			t.Errorf("%v does not say %q", err, p)
		}
	}
}

func TestJudge(t *testing.T) {
	for code, want := range map[*kerr.Error]verdict{
		kerr.UnknownMemberID: fenced, kerr.IllegalGeneration: fenced, kerr.FencedInstanceID: fenced,
		kerr.FencedMemberEpoch: fenced, kerr.StaleMemberEpoch: fenced,
		kerr.RebalanceInProgress: later, kerr.CoordinatorLoadInProgress: later, kerr.CoordinatorNotAvailable: later,
		kerr.NotCoordinator: later, kerr.RequestTimedOut: later,
		kerr.UnknownTopicID: topicGone, kerr.UnknownTopicOrPartition: topicGone, kerr.InconsistentTopicID: topicGone,
		kerr.OffsetMetadataTooLarge:   noteTooBig,
		kerr.GroupAuthorizationFailed: denied, kerr.TopicAuthorizationFailed: denied, kerr.InvalidCommitOffsetSize: denied,
		kerr.UnknownServerError: denied,
	} {
		if got := judge(code.Code); got != want {
			t.Errorf("%s is judged %d, want %d", code.Message, got, want)
		}
		if got := codeLabel(code.Code); got != code.Message {
			t.Errorf("label %q", got)
		}
	}
	if judge(0) != committed {
		t.Error("no error is no commit")
	}
	if judge(9999) != denied || codeLabel(9999) == "" {
		t.Error("an unknown code")
	}
}

func TestNoteRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := note{
			V: noteVersion, Offset: rapid.Int64Min(0).Draw(t, "offset"), Epoch: rapid.Int64Min(0).Draw(t, "epoch"),
			Incarnation: rapid.StringMatching(`[a-f0-9-]{0,36}`).Draw(t, "incarnation"), Owner: "0123456789abcdef",
			Clean: rapid.Bool().Draw(t, "clean"), Time: rapid.Int64Range(0, 1<<42).Draw(t, "time"),
			TopicID: topicIDText([16]byte{rapid.Byte().Draw(t, "id"), 1}),
		}
		text := n.encode()
		if len(text) > maxNote {
			t.Fatalf("%d bytes", len(text))
		}
		got, err := parseNote(text, n.Offset)
		if err != nil || got != n {
			t.Fatalf("%+v, %v; want %+v", got, err, n)
		}
		if _, err := parseNote(text, n.Offset-1); err == nil {
			t.Fatal("a note of another offset was believed")
		}
	})
}

func TestNoteLeavesOutWhatDoesNotFit(t *testing.T) {
	n := note{Offset: 1, Incarnation: strings.Repeat("x", maxNote)}
	text := n.encode()
	if got, err := parseNote(text, 1); err != nil || got.Incarnation != "" {
		t.Errorf("%q: %+v, %v", text, got, err)
	}
}

func FuzzParseNote(f *testing.F) {
	f.Add(note{Offset: 4, Epoch: 1, Clean: true, TopicID: topicIDText([16]byte{1})}.encode(), int64(4))
	f.Add("kafkasink-8a9e", int64(0))
	f.Add(`{"v":1,"offset":4,"topic_id":"zz"}`, int64(4))
	f.Add(`{"v":2,"offset":4}`, int64(4))
	f.Fuzz(func(t *testing.T, metadata string, offset int64) {
		n, err := parseNote(metadata, offset)
		if err != nil {
			if strings.Contains(err.Error(), metadata) && len(metadata) > 20 {
				t.Errorf("the error repeats foreign metadata: %v", err)
			}
			return
		}
		if n.Offset != offset || n.V != noteVersion || n.Epoch < 0 || n.TopicID != "" && len(n.TopicID) != 32 {
			t.Errorf("believed %+v at offset %d", n, offset)
		}
	})
}

func TestConfigReportsEveryFault(t *testing.T) {
	_, err := New(Config{DrainTimeout: time.Minute, SASL: &SASL{Mechanism: "magic", User: "u", Password: func() (string, error) { return "hunter2", nil }}, Poison: "lose"})
	wantText(t, err, "no brokers", "no consumer group", "no topics", "no watcher", "no logger", "twice the drain timeout", `"magic"`, `"lose"`)
	if strings.Contains(err.Error(), "hunter2") {
		t.Error("the password is in the error")
	}
	w := newEngine(t)
	dest := w.table("orders")
	ok := Config{
		Brokers: []string{"b:1"}, Group: "g", Watcher: w, Logger: slog.New(slog.DiscardHandler),
		Routes: []Route{{Topic: "t", Table: "t", Destination: dest, Decoder: plainDecoder{}}},
	}
	if _, err := New(ok); err != nil {
		t.Error(err)
	}
	ok.Routes = append(ok.Routes, ok.Routes[0])
	_, err = New(ok)
	wantText(t, err, "routed twice")
}

func TestExplainPutsItsOwnSentenceFirst(t *testing.T) {
	c := &Config{Brokers: []string{"kafka:9092"}}
	for _, cause := range []error{&kgo.ErrFirstReadEOF{}, io.EOF} {
		err := c.explain("commit offsets", cause)
		if !strings.HasPrefix(err.Error(), "commit offsets: a broker of kafka:9092 closed the connection") || !errors.Is(err, cause) {
			t.Errorf("%v", err)
		}
	}
	if err := c.explain("commit offsets", kerr.NotCoordinator); strings.Contains(err.Error(), "closed") {
		t.Errorf("%v", err)
	}
}

func TestMembership(t *testing.T) {
	renewed := 0
	m := &membership{session: 45 * time.Second, margin: 15 * time.Second, renewed: func() { renewed++ }}
	now := time.Now()
	if m.remaining(now) > 0 || !m.contact().IsZero() {
		t.Error("a member before it has joined")
	}
	answer := func(key kmsg.Key, took time.Duration, err error) {
		m.OnBrokerE2E(kgo.BrokerMetadata{}, int16(key), kgo.BrokerE2E{ReadWait: took, ReadErr: err})
	}
	answer(kmsg.Fetch, 0, nil)
	answer(kmsg.Heartbeat, 0, io.EOF)
	if renewed != 0 || m.remaining(now) > 0 {
		t.Error("renewed by what proves nothing")
	}
	// What counts is when the request was written.
	answer(kmsg.Heartbeat, 20*time.Second, nil)
	if left := m.remaining(time.Now()); renewed != 1 || left > 10*time.Second || left < 9*time.Second {
		t.Errorf("remaining %v", left)
	}
	answer(kmsg.SyncGroup, 0, nil)
	if left := m.remaining(time.Now()); left < 29*time.Second {
		t.Errorf("remaining %v", left)
	}
	answer(kmsg.Heartbeat, time.Minute, nil) // an old answer takes nothing back
	if left := m.remaining(time.Now()); left < 29*time.Second {
		t.Errorf("remaining %v", left)
	}
}

func TestRetryWait(t *testing.T) {
	for n := range 100 {
		if d := retryWait(n); d < 500*time.Millisecond || d > time.Minute {
			t.Errorf("attempt %d waits %v", n, d)
		}
	}
}

func TestPreflights(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		cfg := Config{
			Brokers: []string{"localhost:9092"}, Group: group, Watcher: w.engine, Logger: w.log,
			Routes:  []Route{{Topic: topic, Table: "orders", Destination: w.engine.table("orders"), Decoder: plainDecoder{}}},
			Options: []kgo.Opt{kgo.Dialer(w.network.DialContext)},
		}
		check := func(name string) error {
			for _, p := range Preflights(cfg) {
				if p.Name == name {
					ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
					defer cancel()
					return p.Run(ctx)
				}
			}
			t.Fatalf("no check %q", name)
			return nil
		}
		refusal := func(name string, parts ...string) {
			t.Helper()
			err := check(name)
			var r *decode.Refusal
			if !errors.As(err, &r) || r.Do == "" {
				t.Errorf("%s: %v is no refusal with a remedy", name, err)
			}
			wantText(t, err, parts...)
		}
		for _, name := range []string{"kafka brokers", "kafka topics", "kafka group"} {
			if err := check(name); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.DescribeGroups}, Err: kerr.GroupAuthorizationFailed})
		refusal("kafka group", "may not use it", group)
		w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Metadata}, Topic: topic, Err: kerr.TopicAuthorizationFailed})
		refusal("kafka topics", "may not describe it")
		cfg.Routes = append(cfg.Routes, Route{Topic: "nowhere", Table: "x", Destination: w.engine.table("x"), Decoder: plainDecoder{}})
		refusal("kafka topics", "nowhere", "does not exist", "kafka-topics --create")

		cfg.Brokers = []string{"localhost:1"}
		err := check("kafka brokers")
		var r *decode.Refusal
		if err == nil || errors.As(err, &r) {
			t.Errorf("no broker there: %v", err)
		}
		other, err := kgo.NewClient(kgo.SeedBrokers("localhost:9092"), kgo.Dialer(w.network.DialContext), kgo.ConsumerGroup(group),
			kgo.ConsumeTopics(topic), kgo.Balancers(kgo.RangeBalancer()))
		if err != nil {
			t.Fatal(err)
		}
		w.eventually("the other joined", func() bool {
			info := w.cluster.GroupInfo(group)
			return info != nil && info.State == "Stable"
		})
		cfg.Brokers = []string{"localhost:9092"}
		refusal("kafka group", `balance by "range"`)
		other.Close()
	}, kfake.SeedTopics(1, topic))
}
