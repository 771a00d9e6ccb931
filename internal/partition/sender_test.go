package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/partition/lane"
)

func TestPoisonStopsItsPartitionOnly(t *testing.T) {
	for value, says := range map[string]string{"bad": "it is bad", "reject": "the pipeline says no"} {
		t.Run(value, func(t *testing.T) {
			bubble(t, func(w *world) {
				t := w.t
				w.produce(topic, 0, "row", "row", value, "row")
				w.fill(topic, 1, 4)
				m := w.start(nil)
				w.eventually("what lies before it is committed", func() bool { return w.committed(first) == 2 })
				w.eventually("the other goes on", func() bool { return w.committed(place{topic, 1}) == 4 })
				w.fill(topic, 1, 4)
				w.eventually("the other goes on", func() bool { return w.committed(place{topic, 1}) == 8 })
				w.pass(time.Minute)
				p, _ := m.partition(first)
				if p.State != lane.Blocked || p.Block.At != 2 || p.Paused != "blocked" || p.QueuedRecords != 0 {
					t.Fatalf("partition %+v", p)
				}
				wantText(t, p.Block.Err, says, "orders[0]@2", "table ")
				if got := w.engine.arrived(first); !slices.Equal(got, []int64{0, 1}) {
					t.Errorf("rows %v arrived", got)
				}
				if err := m.stop(); err != nil {
					t.Fatal(err)
				}
				if !w.cleanly(first, 2) {
					t.Error("no clean commit at 2")
				}
			}, kfake.SeedTopics(2, topic))
		})
	}
}

func TestPoisonSkip(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		w.engine.hold()
		w.produce(topic, 0, "row", "bad", "huge", "none", "row", "bad")
		w.engine.forgive(first, 1, 5)
		m := w.start(func(c *Config) { c.Poison = PoisonSkip })
		w.eventually("sent", func() bool { return len(w.engine.arrived(first)) == 2 })
		w.pass(5 * time.Second)
		if got := w.committed(first); got != 0 {
			t.Errorf("committed %d: a skipped record counts only when everything before it is completed", got)
		}
		w.engine.release()
		w.eventually("committed", func() bool { return w.committed(first) == 6 })
		if got := m.metric("kafkasink_skipped_records_total", "topic=orders", "reason=malformed"); got != 2 {
			t.Errorf("%v malformed records counted", got)
		}
		if got := m.metric("kafkasink_skipped_records_total", "topic=orders", "reason=value"); got != 1 {
			t.Errorf("%v records with bad values counted", got)
		}
		w.produce(topic, 0, "none")
		w.eventually("committed", func() bool { return w.committed(first) == 7 })
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

// A decoder that lacks something has no verdict on the record: whatever the
// policy, the partition waits, says so and goes on when it can.
func TestDecoderThatLacksSomethingHoldsItsPartitionOnly(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		w.produce(topic, 0, "row", "odd", "row")
		w.fill(topic, 1, 4)
		var mended atomic.Bool
		m := w.start(func(c *Config) {
			c.Poison = PoisonSkip
			c.Routes[0].Decoder = plainDecoder{mended: &mended}
		})
		w.eventually("what lies before it is committed", func() bool { return w.committed(first) == 1 })
		w.eventually("the other goes on", func() bool { return w.committed(place{topic, 1}) == 4 })
		w.pass(5 * time.Minute)
		p, _ := m.partition(first)
		wantText(t, p.Held, "the registry is away", "orders[0]@1")
		if p.Block != nil || m.metric("kafkasink_held_partitions", "cause=decoder") != 1 {
			t.Errorf("partition %+v", p)
		}
		if _, all := ptr(m.Snapshot()).AllStopped(); all {
			t.Error("it counts as stopped")
		}
		mended.Store(true)
		w.eventually("it goes on", func() bool { return w.committed(first) == 3 })
		if p, _ = m.partition(first); p.Held != nil {
			t.Errorf("still held: %v", p.Held)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(2, topic))
}

func TestRefusedTableStopsItsPartitionsOnly(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		refused := &decode.Refusal{Reason: decode.ReasonSchema, What: "array", Why: "column gone", Do: "put it back"}
		w.engine.table("orders").set(func(context.Context, int) error { return refused })
		m := w.start(func(c *Config) {
			c.Routes = append(c.Routes, Route{Topic: "other", Table: "other", Destination: w.engine.table("other"), Decoder: plainDecoder{}})
		})
		w.fill(topic, 0, 3)
		w.fill(topic, 1, 3)
		w.fill("other", 0, 3)
		w.eventually("the other table goes on", func() bool { return w.committed(place{"other", 0}) == 3 })
		w.eventually("stopped", func() bool {
			a, _ := m.partition(first)
			b, _ := m.partition(place{topic, 1})
			return a.State == lane.Blocked && b.State == lane.Blocked
		})
		st := m.Snapshot()
		if got := st.Blocked(); len(got) != 1 || !errors.Is(got[0], refused) {
			t.Errorf("blocked: %v", got)
		}
		if got := w.committed(first); got != 0 {
			t.Errorf("committed %d", got)
		}
		if n := w.engine.table("orders").count(); n != 1 {
			t.Errorf("%d requests", n)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(2, topic, "other"))
}

// A table that is refused while the outcome of a request is open stops, but
// the lane leaves no clean note before the request's life is over: the next
// owner would overtake it.
func TestRefusalWithAnOpenOutcomeLeavesNoCleanNote(t *testing.T) {
	for name, c := range map[string]struct {
		open  bool
		wait  time.Duration
		clean bool
	}{
		"nothing is open":  {false, 0, true},
		"open":             {true, 0, false},
		"open, and waited": {true, 31 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(w *world) {
				t := w.t
				var refused error = &decode.Refusal{Reason: decode.ReasonSetup, What: "write", Why: "the key is not known", Do: "set another"}
				if c.open {
					refused = fmt.Errorf("%w (%w)", refused, feldera.ErrOutcomeOpen)
				}
				w.engine.table("orders").set(func(_ context.Context, n int) error {
					if n > 1 {
						return refused
					}
					return nil
				})
				m := w.start(func(c *Config) { c.DrainTimeout = time.Second })
				w.fill(topic, 0, 1)
				w.eventually("committed", func() bool { return w.committed(first) == 1 })
				w.fill(topic, 0, 2)
				w.eventually("stopped", func() bool { p, _ := m.partition(first); return p.State == lane.Blocked })
				w.pass(c.wait)
				if err := m.stop(); err != nil {
					t.Fatal(err)
				}
				if got := w.cleanly(first, 1); got != c.clean {
					t.Errorf("clean note: %v", got)
				}
				if n := w.engine.table("orders").count(); n != 2 {
					t.Errorf("%d requests", n)
				}
			}, kfake.SeedTopics(1, topic))
		})
	}
}

func TestIncarnationChangeEndsRunWithoutCommit(t *testing.T) {
	for name, sent := range map[string]bool{"seen by a request": true, "seen by a completion": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(w *world) {
				t := w.t
				m := w.start(nil)
				w.eventually("taken", func() bool { return m.owns() == 1 })
				w.pass(time.Second)
				w.engine.hold()
				w.fill(topic, 0, 5)
				w.eventually("accepted", func() bool { return len(w.engine.arrived(first)) == 5 })
				if sent {
					w.engine.table("orders").set(func(context.Context, int) error {
						return &feldera.IncarnationChanged{Was: "one", Now: "two"}
					})
					w.fill(topic, 0, 1)
				} else {
					w.engine.restart("two")
				}
				<-m.done
				var changed *feldera.IncarnationChanged
				if !errors.As(m.err, &changed) {
					t.Fatalf("run ended with %v", m.err)
				}
				w.engine.release()
				w.pass(10 * time.Second)
				if got := w.committed(first); got != 0 {
					t.Errorf("committed %d", got)
				}
				// The caller restarts the session at the committed offsets.
				w.engine.table("orders").set(nil)
				again := w.start(func(c *Config) { c.Incarnation = "two" })
				want := int64(len(w.engine.want[first]))
				w.eventually("committed", func() bool { return w.committed(first) == want })
				w.ascending(first, 1)
				if err := again.stop(); err != nil {
					t.Fatal(err)
				}
			}, kfake.SeedTopics(1, topic))
		})
	}
}

func TestIncarnationChangeDuringShutdownCommitsNothing(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(func(c *Config) { c.CommitInterval = time.Hour })
		w.fill(topic, 0, 2)
		w.eventually("completed", func() bool { p, _ := m.partition(first); return p.Completed == 2 })
		w.engine.hold()
		w.fill(topic, 0, 5)
		w.eventually("accepted", func() bool { return len(w.engine.arrived(first)) == 7 })
		m.cancel()
		w.pass(time.Second)
		w.engine.restart("two")
		<-m.done
		var changed *feldera.IncarnationChanged
		if !errors.As(m.err, &changed) {
			t.Errorf("run ended with %v", m.err)
		}
		if got := w.committed(first); got != 0 {
			t.Errorf("committed %d of the incarnation that is gone", got)
		}
	}, kfake.SeedTopics(1, topic))
}

// A note that says clean must not outlive its truth: an owner that cannot
// replace it sends nothing.
func TestNothingIsSentBeforeTheOwnerHasLeftItsNote(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		w.run(5, nil)
		if c, _ := w.lastCommit(first); !c.note.Clean {
			t.Fatalf("last commit %+v", c)
		}
		f := w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Err: kerr.GroupAuthorizationFailed, Count: -1})
		m := w.start(nil)
		w.fill(topic, 0, 5)
		w.eventually("received", func() bool { p, _ := m.partition(first); return p.QueuedRecords == 5 })
		before := w.engine.table("orders").count()
		w.pass(30 * time.Second)
		if got := w.engine.table("orders").count(); got != before {
			t.Errorf("%d requests", got-before)
		}
		if m.Snapshot().CommitErr == nil {
			t.Error("the commit's error is not stated")
		}
		f.Remove()
		w.eventually("committed", func() bool { return w.committed(first) == 10 })
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

func TestQueuesAreBoundedAndFetchingComesBack(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"by records": func(c *Config) { c.LaneRecords = 100 },
		"by bytes":   func(c *Config) { c.LaneMemory = 16 << 10 },
		"in total":   func(c *Config) { c.MemoryLimit = 16 << 10; c.LaneMemory = 16 << 10; c.LaneRecords = 1000 },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(w *world) {
				t := w.t
				open := make(chan struct{})
				w.engine.table("orders").set(func(ctx context.Context, _ int) error {
					select {
					case <-open:
					case <-ctx.Done():
						return context.Cause(ctx)
					}
					return nil
				})
				const each = 1000
				for p := range int32(2) {
					batch := slices.Repeat([]string{"row"}, each)
					w.produceTogether(topic, p, batch...)
				}
				m := w.start(func(c *Config) { c.PollRecords = 50; change(c) })
				w.eventually("paused", func() bool { p, _ := m.partition(first); return p.Paused != "" })
				w.pass(10 * time.Second)
				total := int64(0)
				for _, p := range m.Snapshot().Partitions {
					total += p.QueuedBytes
					if name == "by records" && p.QueuedRecords > 150 || p.QueuedRecords == each {
						t.Errorf("%d records queued", p.QueuedRecords)
					}
				}
				if name == "in total" && total > 2*16<<10 {
					t.Errorf("%d bytes queued", total)
				}
				if m.metric("kafkasink_paused_seconds_total") < 10 {
					t.Error("the pause was not counted")
				}
				if m.metric("kafkasink_inflight_records") == 0 || m.metric("kafkasink_inflight_bytes") == 0 {
					t.Error("nothing counted as in flight")
				}
				close(open)
				for p := range int32(2) {
					w.eventually("committed", func() bool { return w.committed(place{topic, p}) == each })
					w.ascending(place{topic, p}, 0)
				}
				if err := m.stop(); err != nil {
					t.Fatal(err)
				}
			}, kfake.SeedTopics(2, topic))
		})
	}
}

func TestArraysInFlightAreBounded(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		w.engine.hold()
		m := w.start(func(c *Config) { c.InFlight = 3; c.BatchRows = 1 })
		w.fill(topic, 0, 10)
		w.eventually("sent", func() bool { return w.engine.table("orders").count() == 3 })
		w.pass(10 * time.Second)
		if n := w.engine.table("orders").count(); n != 3 {
			t.Errorf("%d arrays in flight", n)
		}
		if st := m.Snapshot(); st.Tables[0].InFlight != 3 || st.Tables[0].Sending {
			t.Errorf("table %+v", st.Tables[0])
		}
		w.engine.release()
		w.eventually("committed", func() bool { return w.committed(first) == 10 })
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

// A partition with a large backlog does not keep a small one waiting.
func TestLanesShareAnArrayFairly(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		w.produceTogether(topic, 0, slices.Repeat([]string{"row"}, 1000)...)
		w.fill(topic, 1, 10)
		w.fill(topic, 2, 3)
		var seen []int
		table := w.engine.table("orders")
		m := w.start(func(c *Config) { c.BatchRows = 100; c.BatchAge = 2 * time.Second })
		w.eventually("all committed", func() bool { return w.committed(first) == 1000 })
		w.engine.mu.Lock()
		for p := range int32(3) {
			seen = append(seen, len(w.engine.rows[place{topic, p}]))
		}
		w.engine.mu.Unlock()
		if !slices.Equal(seen, []int{1000, 10, 3}) {
			t.Errorf("rows %v", seen)
		}
		table.mu.Lock()
		firstOf := slices.Clone(table.starts)
		table.mu.Unlock()
		if len(firstOf) > 12 {
			t.Errorf("%d requests for 1013 rows of 100 each", len(firstOf))
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(3, topic))
}

// The age that counts is the oldest row's.
func TestBatchAge(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(func(c *Config) { c.BatchAge = 3 * time.Second })
		w.eventually("taken", func() bool { return m.owns() == 1 })
		w.pass(time.Second)
		table := w.engine.table("orders")
		began := time.Now()
		for range 5 {
			w.fill(topic, 0, 1)
			w.pass(500 * time.Millisecond)
		}
		w.eventually("sent", func() bool { return table.count() == 1 })
		if d := time.Since(began); d < 2900*time.Millisecond || d > 3700*time.Millisecond {
			t.Errorf("sent after %v", d)
		}
		if got := len(w.engine.arrived(first)); got < 5 {
			t.Errorf("%d rows in the array", got)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}
