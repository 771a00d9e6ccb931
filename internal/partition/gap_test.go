package partition

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"holdfast/internal/decode"
	"holdfast/internal/partition/lane"
)

var first = place{topic, 0}

// run delivers n records with a member that is stopped again.
func (w *world) run(n int, change func(*Config)) {
	w.t.Helper()
	m := w.start(change)
	from := w.committed(first)
	w.fill(topic, 0, n)
	w.eventually("committed", func() bool { return w.committed(first) == max(from, 0)+int64(n) })
	if err := m.stop(); err != nil {
		w.t.Fatal(err)
	}
}

func wantGap(t *testing.T, err error, parts ...string) {
	t.Helper()
	var r *decode.Refusal
	if !errors.As(err, &r) || r.Reason != decode.ReasonGap || r.Do == "" {
		t.Fatalf("%v is no refusal of a gap with a remedy", err)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("%q does not say %q", err, p)
		}
	}
}

func TestRetentionPassedThePosition(t *testing.T) {
	for _, policy := range []GapPolicy{GapStop, GapContinue} {
		t.Run(string(policy), func(t *testing.T) {
			bubble(t, func(w *world) {
				t := w.t
				set := func(c *Config) { c.OnGap = policy }
				w.run(5, set)
				w.fill(topic, 0, 10)
				w.fill(topic, 1, 10)
				if err := w.cluster.DeleteRecords(topic, 0, 9); err != nil {
					t.Fatal(err)
				}
				if policy == GapContinue {
					w.engine.forgive(first, 5, 6, 7, 8)
				}
				polls := w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Fetch}, Observe: true, Count: -1})
				m := w.start(set)
				w.eventually("the other partition goes on", func() bool { return w.committed(place{topic, 1}) == 10 })
				if policy == GapStop {
					w.eventually("stopped", func() bool { p, _ := m.partition(first); return p.State == lane.Blocked && p.FetchErr == nil })
					w.pass(time.Minute)
					p, _ := m.partition(first)
					wantGap(t, p.Block.Err, "4 offsets", "5 to 8", "the log has 9 to 15")
					if got := w.committed(first); got != 5 {
						t.Errorf("committed %d", got)
					}
					st := m.Snapshot()
					if p.Paused != "blocked" || len(st.Blocked()) != 1 {
						t.Errorf("paused %q, status %+v", p.Paused, st)
					}
					if got := polls.Hits(); got > 1000 {
						t.Errorf("%d fetches in a minute", got)
					}
				} else {
					w.eventually("committed", func() bool { return w.committed(first) == 15 })
					w.ascending(first, 0)
					if p, _ := m.partition(first); p.State != lane.Live || p.Paused != "" {
						t.Errorf("partition %+v", p)
					}
				}
				if got := m.metric("kafkasink_gaps_total", "reason=retention"); got != 1 {
					t.Errorf("%v gaps counted", got)
				}
				if err := m.stop(); err != nil {
					t.Fatal(err)
				}
			}, kfake.SeedTopics(2, topic))
		})
	}
}

// While a partition is being consumed, its log is replaced by a shorter one
// under the same name.
func TestTopicMadeAnewWhileConsuming(t *testing.T) {
	for _, policy := range []GapPolicy{GapStop, GapContinue} {
		t.Run(string(policy), func(t *testing.T) {
			bubble(t, func(w *world) {
				t := w.t
				m := w.start(func(c *Config) { c.OnGap = policy })
				w.fill(topic, 0, 5)
				w.eventually("committed", func() bool { return w.committed(first) == 5 })
				w.reruns = true
				w.remake(1)
				w.fill(topic, 0, 3)
				if policy == GapStop {
					w.eventually("stopped", func() bool { p, _ := m.partition(first); return p.State == lane.Blocked && p.FetchErr == nil })
					p, _ := m.partition(first)
					wantGap(t, p.Block.Err, "made anew")
					w.pass(time.Minute)
					if got := len(w.engine.arrived(first)); got != 0 {
						t.Errorf("%d rows of the new topic arrived", got)
					}
				} else {
					w.eventually("committed", func() bool { return w.committed(first) == 3 })
					w.ascending(first, 0)
				}
				if got := m.metric("kafkasink_gaps_total", "reason=recreated"); got == 0 {
					t.Error("the gap was not counted")
				}
				if err := m.stop(); err != nil {
					t.Fatal(err)
				}
			}, kfake.SeedTopics(1, topic))
		})
	}
}

// The broker kept the group's offset under the topic's name, as those before
// 4.2 do: only the note tells that it is another topic.
func TestTopicMadeAnewWhileAway(t *testing.T) {
	for _, policy := range []GapPolicy{GapStop, GapContinue} {
		t.Run(string(policy), func(t *testing.T) {
			bubble(t, func(w *world) {
				t := w.t
				set := func(c *Config) { c.OnGap = policy }
				w.run(5, set)
				old := w.cluster.GroupInfo(group).Commits[topic][0]
				w.reruns = true
				w.remake(1)
				w.fill(topic, 0, 9)
				w.putOffset(topic, 0, old.Offset, old.Metadata)
				m := w.start(set)
				if policy == GapStop {
					w.eventually("refused", func() bool { p, ok := m.partition(first); return ok && p.NotTaken })
					p, _ := m.partition(first)
					wantGap(t, p.Block.Err, "made anew", "the log has 0 to 9")
					w.pass(time.Minute)
					if got := len(w.engine.arrived(first)); got != 0 {
						t.Errorf("%d rows of the new topic arrived", got)
					}
				} else {
					w.eventually("committed", func() bool { return w.committed(first) == 9 })
					if got := len(w.engine.arrived(first)); got != 9 {
						t.Errorf("%d rows arrived", got)
					}
				}
				if err := m.stop(); err != nil {
					t.Fatal(err)
				}
			}, kfake.SeedTopics(1, topic))
		})
	}
}

// remake deletes the topic and makes it again.
func (w *world) remake(partitions int32) {
	w.t.Helper()
	if err := w.cluster.DeleteTopic(topic); err != nil {
		w.t.Fatal(err)
	}
	if err := w.cluster.CreateTopic(topic, partitions, nil); err != nil {
		w.t.Fatal(err)
	}
	w.engine.reset(topic)
	w.learn(topic)
	// The producer's client knows the old topic; a new one does not.
	w.writer.Close()
	var err error
	w.writer, err = kgo.NewClient(kgo.SeedBrokers("localhost:9092"), kgo.Dialer(w.network.DialContext), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		w.t.Fatal(err)
	}
}

// putOffset commits an offset as an administrator's tool does.
func (w *world) putOffset(topic string, partition int32, offset int64, metadata string) {
	w.t.Helper()
	req := kmsg.NewPtrOffsetCommitRequest()
	req.Group, req.Generation = group, -1
	t := kmsg.NewOffsetCommitRequestTopic()
	t.Topic, t.TopicID = topic, w.cluster.TopicInfo(topic).TopicID
	p := kmsg.NewOffsetCommitRequestTopicPartition()
	p.Partition, p.Offset, p.Metadata, p.LeaderEpoch = partition, offset, &metadata, -1
	t.Partitions = append(t.Partitions, p)
	req.Topics = append(req.Topics, t)
	w.mu.Lock()
	w.tool = true // not ours to audit
	w.mu.Unlock()
	resp, err := req.RequestWith(w.t.Context(), w.writer)
	w.mu.Lock()
	w.tool = false
	w.mu.Unlock()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := kerr.ErrorForCode(resp.Topics[0].Partitions[0].ErrorCode); err != nil {
		w.t.Fatal(err)
	}
}

func TestPositionBeyondTheLog(t *testing.T) {
	for _, policy := range []GapPolicy{GapStop, GapContinue} {
		t.Run(string(policy), func(t *testing.T) {
			bubble(t, func(w *world) {
				t := w.t
				w.reruns = true
				w.fill(topic, 0, 5)
				w.putOffset(topic, 0, 50, "")
				w.mu.Lock()
				w.tool = true // the position itself is not one that evidence gave
				w.mu.Unlock()
				m := w.start(func(c *Config) { c.OnGap = policy })
				if policy == GapStop {
					w.eventually("stopped", func() bool { p, _ := m.partition(first); return p.State == lane.Blocked && p.FetchErr == nil })
					p, _ := m.partition(first)
					wantGap(t, p.Block.Err, "the log ends at 5")
				} else {
					w.eventually("committed from the start", func() bool { return w.committed(first) == 5 })
					if p, _ := m.partition(first); p.Epoch != 2 {
						t.Errorf("epoch %d", p.Epoch)
					}
				}
				if err := m.stop(); err != nil {
					t.Fatal(err)
				}
			}, kfake.SeedTopics(1, topic))
		})
	}
}

func TestTransientFetchErrorPausesAndComesBack(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(nil)
		w.eventually("taken", func() bool { return m.owns() == 2 })
		f := w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Fetch}, Topic: topic, Partitions: []int32{0}, Err: kerr.TopicAuthorizationFailed, Count: -1})
		w.fill(topic, 0, 5)
		w.fill(topic, 1, 5)
		w.eventually("the other goes on", func() bool { return w.committed(place{topic, 1}) == 5 })
		w.eventually("stated", func() bool { p, _ := m.partition(first); return p.FetchErr != nil })
		w.pass(time.Minute)
		if got := f.Hits(); got > 20 {
			t.Errorf("%d attempts in a minute", got)
		}
		f.Remove()
		w.eventually("committed", func() bool { return w.committed(first) == 5 })
		if p, _ := m.partition(first); p.FetchErr != nil || p.Paused != "" {
			t.Errorf("partition %+v", p)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(2, topic))
}

func TestStartPolicies(t *testing.T) {
	for _, policy := range []StartPolicy{StartEarliest, StartLatest, StartStop} {
		t.Run(string(policy), func(t *testing.T) {
			bubble(t, func(w *world) {
				t := w.t
				w.fill(topic, 0, 5)
				if policy == StartLatest {
					w.engine.forgive(first, 0, 1, 2, 3, 4)
				}
				m := w.start(func(c *Config) { c.Start = policy })
				switch policy {
				case StartEarliest:
					w.eventually("committed", func() bool { return w.committed(first) == 5 })
				case StartLatest:
					// The end is put on record before anything is read.
					w.eventually("committed", func() bool { return w.committed(first) == 5 })
					w.fill(topic, 0, 2)
					w.eventually("committed", func() bool { return w.committed(first) == 7 })
					if got := w.engine.arrived(first); len(got) != 2 || got[0] != 5 {
						t.Errorf("rows %v arrived", got)
					}
				case StartStop:
					w.eventually("refused", func() bool { p, ok := m.partition(first); return ok && p.NotTaken })
					p, _ := m.partition(first)
					wantGap(t, p.Block.Err, "no committed offset")
					if m.metric("kafkasink_partitions", "state=blocked") != 1 || m.metric("kafkasink_gaps_total", "reason=no_offset") != 1 {
						t.Error("not counted")
					}
					w.pass(10 * time.Second)
					if got := w.committed(first); got != -1 {
						t.Errorf("committed %d", got)
					}
				}
				if err := m.stop(); err != nil {
					t.Fatal(err)
				}
			}, kfake.SeedTopics(1, topic))
		})
	}
}

// A partition that is added to the topic later is read from its start, or its
// first records would be missed.
func TestStartLatestReadsAddedPartitionsFromTheirStart(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		set := func(c *Config) { c.Start = StartLatest }
		m := w.start(set)
		w.eventually("committed", func() bool { return w.committed(first) == 0 })
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
		req := kmsg.NewPtrCreatePartitionsRequest()
		rt := kmsg.NewCreatePartitionsRequestTopic()
		rt.Topic, rt.Count = topic, 2
		req.Topics = append(req.Topics, rt)
		if _, err := req.RequestWith(w.t.Context(), w.writer); err != nil {
			t.Fatal(err)
		}
		w.writer.ForceMetadataRefresh()
		w.pass(10 * time.Second)
		w.fill(topic, 1, 4)
		m = w.start(set)
		w.eventually("committed", func() bool { return w.committed(place{topic, 1}) == 4 })
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

func TestTransactionMarkersAndAbortedRecords(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(nil)
		w.eventually("taken", func() bool { return m.owns() == 1 })
		producer, err := kgo.NewClient(kgo.SeedBrokers("localhost:9092"), kgo.Dialer(w.network.DialContext), kgo.TransactionalID("tx"),
			kgo.RecordPartitioner(kgo.ManualPartitioner()))
		if err != nil {
			t.Fatal(err)
		}
		defer producer.Close()
		ctx := t.Context()
		for i := range 6 {
			if err := producer.BeginTransaction(); err != nil {
				t.Fatal(err)
			}
			end := kgo.TryCommit
			value := "row"
			if i%2 == 1 {
				end, value = kgo.TryAbort, "aborted"
			}
			r := &kgo.Record{Topic: topic, Value: []byte(value)}
			if err := producer.ProduceSync(ctx, r).FirstErr(); err != nil {
				t.Fatal(err)
			}
			w.engine.produced(first, r.Offset, value)
			if err := producer.EndTransaction(ctx, end); err != nil {
				t.Fatal(err)
			}
		}
		// Six records and six markers; the last of all is the abort's marker.
		w.eventually("committed to the log's end", func() bool { return w.committed(first) == 12 })
		w.eventually("no lag", func() bool { p, _ := m.partition(first); return p.LagKnown && p.Lag == 0 })
		if got := w.engine.arrived(first); len(got) != 3 {
			t.Errorf("rows %v arrived", got)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

func TestDiagnose(t *testing.T) {
	id := func(b byte) (out [16]byte) { out[0] = b; return out }
	at := place{topic, 3}
	oor := kerr.OffsetOutOfRange
	lost := func(to int64) error {
		return &kgo.ErrDataLoss{Topic: topic, Partition: 3, ConsumedTo: 100, ResetTo: to}
	}
	for name, c := range map[string]struct {
		f      facts
		reason string
		to     int64
		says   string
	}{
		"deleted":             {facts{next: 10, err: oor, deleted: true}, gapDeleted, -1, "does not exist"},
		"recreated":           {facts{next: 10, err: kerr.UnknownTopicID, oldID: id(1), newID: id(2), start: 0, end: 3}, gapRecreated, 0, "made anew"},
		"no ids":              {facts{next: 10, err: oor, newID: id(2), start: 20, end: 30}, gapRetention, 20, "10 offsets"},
		"retention":           {facts{next: 10, err: oor, oldID: id(1), newID: id(1), start: 12, end: 30}, gapRetention, 12, "10 to 11"},
		"truncated":           {facts{next: 50, err: oor, oldID: id(1), newID: id(1), start: 2, end: 30}, gapTruncated, 2, "20 below"},
		"tail lost":           {facts{next: 100, err: lost(80), start: 2, end: 90}, gapTruncated, 80, "differs from offset 80"},
		"tail lost, old lane": {facts{next: 70, err: lost(80), start: 2, end: 90}, gapTruncated, 70, "differs"},
		"healed":              {facts{next: 10, err: oor, start: 2, end: 30}, gapHealed, 10, ""},
	} {
		t.Run(name, func(t *testing.T) {
			c.f.place = at
			stop := diagnose(GapStop, c.f)
			if stop.reason != c.reason || (stop.why == nil) != (c.says == "") {
				t.Fatalf("stop: %+v", stop)
			}
			if c.says != "" {
				wantGap(t, stop.why, c.says, "orders[3]@")
			}
			if c.to < 0 {
				return // no policy goes on
			}
			if on := diagnose(GapContinue, c.f); on.reason != c.reason || on.why != nil || on.to != c.to {
				t.Fatalf("earliest: %+v", on)
			}
		})
	}
}

func TestTakeOver(t *testing.T) {
	id := [16]byte{7}
	text := func(n note) string { return n.encode() }
	good := note{Offset: 40, TopicID: topicIDText(id), Epoch: 4, Clean: true, Owner: "them"}
	for name, c := range map[string]struct {
		cfg  Config
		at   situation
		want placement
		err  string
	}{
		"earliest":         {Config{Start: StartEarliest}, situation{committed: -1, start: 3, end: 9}, placement{offset: 3, committed: -1, epoch: 1}, ""},
		"latest":           {Config{Start: StartLatest}, situation{committed: -1, start: 3, end: 9}, placement{offset: 9, committed: -1, epoch: 1, begin: 9}, ""},
		"latest, added":    {Config{Start: StartLatest}, situation{committed: -1, start: 3, end: 9, added: true}, placement{offset: 3, committed: -1, epoch: 1}, ""},
		"latest, remade":   {Config{Start: StartLatest}, situation{committed: -1, start: 3, end: 9, remade: true}, placement{offset: 3, committed: -1, epoch: 1, gap: gapRecreated}, ""},
		"stop":             {Config{Start: StartStop}, situation{committed: -1}, placement{}, "no committed offset"},
		"no note":          {Config{}, situation{committed: 40}, placement{offset: 40, committed: 40, epoch: 1, wait: "x", begin: 40}, ""},
		"foreign note":     {Config{}, situation{committed: 40, metadata: "kafkasink-1"}, placement{offset: 40, committed: 40, epoch: 1, wait: "x", begin: 40}, ""},
		"note of another":  {Config{}, situation{committed: 41, metadata: text(good)}, placement{offset: 41, committed: 41, epoch: 1, wait: "x"}, ""},
		"begun late":       {Config{}, situation{committed: 40, metadata: text(note{Offset: 40, Epoch: 4, Clean: true, Begin: 9})}, placement{offset: 40, committed: 40, epoch: 5, begin: 9}, ""},
		"restarted, heal":  {Config{Incarnation: "b"}, situation{committed: 40, metadata: text(note{Offset: 40, Epoch: 4, Clean: true, Rows: 39, Incarnation: "a"})}, placement{offset: 40, committed: 40, epoch: 5}, ""},
		"restarted, stop":  {Config{Incarnation: "b", OnLoss: LossStop}, situation{committed: 40, metadata: text(note{Offset: 40, Epoch: 4, Clean: true, Rows: 39, Incarnation: "a"})}, placement{}, "KAFKASINK_ON_DESTINATION_LOSS is stop"},
		"restarted, idle":  {Config{Incarnation: "b", OnLoss: LossStop}, situation{committed: 40, metadata: text(note{Offset: 40, Epoch: 4, Clean: true, Incarnation: "a"})}, placement{offset: 40, committed: 40, epoch: 5}, ""},
		"clean":            {Config{}, situation{committed: 40, metadata: text(good), topicID: id}, placement{offset: 40, committed: 40, epoch: 5}, ""},
		"unclean":          {Config{}, situation{committed: 40, metadata: text(note{Offset: 40, Epoch: 4, Owner: "them"}), owner: "me"}, placement{offset: 40, committed: 40, epoch: 5, wait: "x"}, ""},
		"unclean, own":     {Config{}, situation{committed: 40, metadata: text(note{Offset: 40, Epoch: 4, Owner: "me"}), owner: "me"}, placement{offset: 40, committed: 40, epoch: 5}, ""},
		"recreated, stop":  {Config{OnGap: GapStop}, situation{committed: 40, metadata: text(good), topicID: [16]byte{8}}, placement{}, "made anew"},
		"recreated, go on": {Config{OnGap: GapContinue}, situation{committed: 40, metadata: text(good), topicID: [16]byte{8}, start: 2}, placement{offset: 2, committed: -1, epoch: 5, gap: gapRecreated}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			c.at.place = first
			got, err := takeOver(&c.cfg, c.at)
			if c.err != "" {
				wantGap(t, err, c.err)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if (got.wait == "") != (c.want.wait == "") {
				t.Errorf("waits %q, want %q", got.wait, c.want.wait)
			}
			got.wait, got.note, got.known, c.want.wait = "", note{}, false, ""
			if got != c.want {
				t.Errorf("placement %+v, want %+v", got, c.want)
			}
		})
	}
}
