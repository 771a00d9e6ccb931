package partition

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"holdfast/internal/decode"
)

// shared waits until two members have n partitions between them, each some.
func (w *world) shared(a, b *member, n int) {
	w.t.Helper()
	w.eventually("partitions shared", func() bool { return a.owns() > 0 && b.owns() > 0 && a.owns()+b.owns() == n })
}

// moved gives a partition that b has.
func moved(b *member) place {
	p := b.Snapshot().Partitions[0]
	return place{p.Topic, p.Partition}
}

func TestRevocationDrains(t *testing.T) {
	realTime(t, func(w *world) {
		t := w.t
		a := w.start(nil)
		w.eventually("both taken", func() bool { return a.owns() == 2 })
		w.pass(200 * time.Millisecond)
		w.engine.hold()
		w.fill(topic, 0, 5)
		w.fill(topic, 1, 5)
		w.eventually("accepted", func() bool {
			return len(w.engine.arrived(place{topic, 0})) == 5 && len(w.engine.arrived(place{topic, 1})) == 5
		})
		b := w.start(nil)
		w.pass(1200 * time.Millisecond)
		if b.owns() != 0 {
			t.Fatal("the partition moved although rows of it are without evidence")
		}
		w.engine.release()
		w.shared(a, b, 2)
		at := moved(b)
		if !w.cleanly(at, 5) {
			t.Error("no clean commit at 5")
		}
		if p, _ := b.partition(at); p.Epoch != 2 || p.Waits != "" {
			t.Errorf("new owner: epoch %d, waits %q", p.Epoch, p.Waits)
		}
		w.fill(topic, 0, 5)
		w.fill(topic, 1, 5)
		for p := range int32(2) {
			w.eventually("committed", func() bool { return w.committed(place{topic, p}) == 10 })
			w.ascending(place{topic, p}, 0)
		}
		if a.metric("kafkasink_drains_total", "outcome=clean") != 1 {
			t.Error("the drain was not counted as clean")
		}
		for _, m := range []*member{a, b} {
			if err := m.stop(); err != nil {
				t.Fatal(err)
			}
		}
	}, kfake.SeedTopics(2, topic))
}

func TestRevocationDeadlineAbandonsAndLateEvidenceChangesNothing(t *testing.T) {
	realTime(t, func(w *world) {
		t := w.t
		a := w.start(nil)
		w.eventually("both taken", func() bool { return a.owns() == 2 })
		w.engine.hold()
		w.fill(topic, 0, 5)
		w.fill(topic, 1, 5)
		w.eventually("accepted", func() bool {
			return len(w.engine.arrived(place{topic, 0})) == 5 && len(w.engine.arrived(place{topic, 1})) == 5
		})
		began := time.Now()
		b := w.start(nil)
		w.shared(a, b, 2)
		if d := time.Since(began); d < 2*time.Second || d > 8*time.Second {
			t.Errorf("the partition moved after %v, want the drain timeout of 2s and a little", d)
		}
		at := moved(b)
		taken := time.Now()
		if p, _ := b.partition(at); p.Completed != 0 || p.Waits == "" {
			t.Errorf("new owner begins at %d, waits %q; want 0 and a wait", p.Completed, p.Waits)
		}
		if got := len(w.engine.arrived(at)); got != 5 {
			t.Fatalf("%d rows arrived", got)
		}
		// The abandoned rows complete now: too late for the first owner.
		w.engine.release()
		w.pass(time.Second)
		if c, _ := w.lastCommit(at); c.offset != 0 {
			t.Errorf("committed %+v on late evidence", c)
		}
		if got := a.metric("kafkasink_late_evidence_records_total", "rung=completed"); got != 5 {
			t.Errorf("late evidence for %v records", got)
		}
		w.eventually("committed by the new owner", func() bool { return w.committed(at) == 5 })
		table := w.engine.table("orders")
		table.mu.Lock()
		last := table.starts[len(table.starts)-1]
		table.mu.Unlock()
		if d := last.Sub(taken); d < 2500*time.Millisecond {
			t.Errorf("the new owner sent after %v, within the lifetime of the last owner's requests", d)
		}
		w.ascending(at, 1)
		for _, m := range []*member{a, b} {
			if err := m.stop(); err != nil {
				t.Fatal(err)
			}
		}
	}, kfake.SeedTopics(2, topic))
}

func TestRevocationAbandonPolicy(t *testing.T) {
	realTime(t, func(w *world) {
		t := w.t
		abandon := func(c *Config) { c.Revoke = RevokeAbandon }
		a := w.start(abandon)
		w.eventually("both taken", func() bool { return a.owns() == 2 })
		w.fill(topic, 0, 3)
		w.fill(topic, 1, 3)
		w.eventually("committed", func() bool { return w.committed(place{topic, 0}) == 3 && w.committed(place{topic, 1}) == 3 })
		w.engine.hold()
		w.fill(topic, 0, 3)
		w.fill(topic, 1, 3)
		w.eventually("accepted", func() bool {
			return len(w.engine.arrived(place{topic, 0})) == 6 && len(w.engine.arrived(place{topic, 1})) == 6
		})
		began := time.Now()
		b := w.start(abandon)
		w.shared(a, b, 2)
		if d := time.Since(began); d > 1900*time.Millisecond {
			t.Errorf("moving took %v", d)
		}
		if got := a.metric("kafkasink_drains_total", "outcome=abandoned"); got != 1 {
			t.Errorf("%v drains counted as abandoned", got)
		}
		w.engine.release()
		for p := range int32(2) {
			w.eventually("committed", func() bool { return w.committed(place{topic, p}) == 6 })
		}
		for _, m := range []*member{a, b} {
			if err := m.stop(); err != nil {
				t.Fatal(err)
			}
		}
	}, kfake.SeedTopics(2, topic))
}

// A request that is tried again and again must not put rows of a partition
// that moved over those of its new owner; and the table's other partitions
// must not overtake it.
func TestRetryDoesNotOutliveTheLane(t *testing.T) {
	realTime(t, func(w *world) {
		t := w.t
		a := w.start(func(c *Config) { c.BatchAge = 500 * time.Millisecond })
		w.eventually("both taken", func() bool { return a.owns() == 2 })
		w.pass(300 * time.Millisecond)
		table := w.engine.table("orders")
		table.set(until)
		w.fill(topic, 0, 5)
		w.fill(topic, 1, 5)
		w.eventually("a request hangs", func() bool { return table.count() > 0 })
		second := w.engine.table("orders of the second member")
		b := w.start(func(c *Config) { c.Routes[0].Destination = second })
		w.shared(a, b, 2)
		at := moved(b)
		hung := table.count()
		table.set(nil)
		w.pass(1500 * time.Millisecond)
		if got := table.count(); got != hung {
			t.Errorf("%d requests within the lifetime of one whose outcome is unknown", got-hung)
		}
		for p := range int32(2) {
			w.eventually("committed", func() bool { return w.committed(place{topic, p}) == 5 })
			w.ascending(place{topic, p}, 0)
		}
		if got := w.engine.arrived(at); len(got) != 5 {
			t.Errorf("rows of the partition that moved: %v", got)
		}
		for _, m := range []*member{a, b} {
			if err := m.stop(); err != nil {
				t.Fatal(err)
			}
		}
	}, kfake.SeedTopics(2, topic))
}

func TestLostPartitionsDieWithoutCommit(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(nil)
		w.eventually("taken", func() bool { return m.owns() == 1 })
		w.engine.hold()
		w.fill(topic, 0, 5)
		w.eventually("accepted", func() bool { return len(w.engine.arrived(place{topic, 0})) == 5 })
		w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Heartbeat}, Err: kerr.UnknownMemberID})
		w.eventually("lost", func() bool { return m.metric("kafkasink_drains_total", "outcome=lost") == 1 })
		w.engine.release() // late
		w.pass(100 * time.Millisecond)
		if c, _ := w.lastCommit(place{topic, 0}); c.offset != 0 {
			t.Errorf("commit %+v followed the loss", c)
		}
		w.eventually("read again and committed", func() bool { return w.committed(place{topic, 0}) == 5 })
		w.ascending(place{topic, 0}, 1)
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

// A wait for requests of an owner that crashed is not cut short by losing the
// partition meanwhile: neither where the same member gets it back, nor where
// another does.
func TestWaitSurvivesLossAndShutdown(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		// The first owner sends and is gone without a clean note.
		a := w.start(nil)
		w.eventually("taken", func() bool { return a.owns() == 1 })
		w.engine.hold()
		w.fill(topic, 0, 5)
		w.eventually("accepted", func() bool { return len(w.engine.arrived(first)) == 5 })
		a.cancel()
		a.now()
		<-a.done
		w.engine.release()
		gone := time.Now()
		table := w.engine.table("orders")
		before := table.count()

		b := w.start(nil)
		w.eventually("taken", func() bool { p, ok := b.partition(first); return ok && p.Waits != "" })
		w.pass(10 * time.Second)
		w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Heartbeat}, Err: kerr.UnknownMemberID})
		w.eventually("lost", func() bool { return b.metric("kafkasink_drains_total", "outcome=lost") == 1 })
		w.eventually("taken again", func() bool { p, ok := b.partition(first); return ok && p.Waits != "" })
		w.eventually("sent", func() bool { return table.count() > before })
		if d := time.Since(gone); d < 29*time.Second || d > 45*time.Second {
			t.Errorf("sent after %v", d)
		}
		w.eventually("committed", func() bool { return w.committed(first) == 5 })
		if err := b.stop(); err != nil {
			t.Fatal(err)
		}

		// An owner that waits, and is stopped before the wait is over.
		w.putOffset(topic, 0, 5, note{Offset: 5, Epoch: 9, Owner: "crashed"}.encode())
		c := w.start(nil)
		w.eventually("taken", func() bool { p, ok := c.partition(first); return ok && p.Waits != "" })
		w.pass(5 * time.Second)
		if err := c.stop(); err != nil {
			t.Fatal(err)
		}
		if last, _ := w.lastCommit(first); last.note.Clean || last.note.Epoch != 10 {
			t.Errorf("last commit %+v", last)
		}
	}, kfake.SeedTopics(1, topic))
}

func TestFencedCommitKillsAllLanesAndJoinsAnew(t *testing.T) {
	for _, code := range []*kerr.Error{kerr.IllegalGeneration, kerr.UnknownMemberID} {
		t.Run(code.Message, func(t *testing.T) {
			bubble(t, func(w *world) {
				t := w.t
				m := w.start(nil)
				w.eventually("taken", func() bool { return m.owns() == 2 })
				w.pass(time.Second)
				w.fill(topic, 0, 5)
				w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Err: code})
				w.eventually("expelled", func() bool { return m.Snapshot().Expulsions == 1 })
				w.fill(topic, 1, 5)
				w.eventually("committed", func() bool { return w.committed(place{topic, 0}) == 5 && w.committed(place{topic, 1}) == 5 })
				w.ascending(place{topic, 0}, 1)
				if got := m.metric("kafkasink_commits_total", "outcome="+code.Message); got == 0 {
					t.Error("the failed commit was not counted")
				}
				if err := m.stop(); err != nil {
					t.Fatal(err)
				}
			}, kfake.SeedTopics(2, topic))
		})
	}
}

// Two processes with one instance id would put each other out for ever.
func TestFencedInstanceIDEndsTheRun(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(func(c *Config) { c.InstanceID = "kafkasink-0" })
		w.eventually("taken", func() bool { return m.owns() == 2 })
		w.pass(2 * time.Second)
		w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Err: kerr.FencedInstanceID})
		w.fill(topic, 0, 5)
		<-m.done
		var refused *decode.Refusal
		if !errors.As(m.err, &refused) || refused.Reason != decode.ReasonSetup {
			t.Fatalf("it ended with %v", m.err)
		}
		wantText(t, m.err, "KAFKASINK_INSTANCE_ID", "kafkasink-0")
		if n := m.Snapshot().Expulsions; n != 0 {
			t.Errorf("it joined anew %d times", n)
		}
	}, kfake.SeedTopics(2, topic))
}

// The client library keeps fetching from where it was when the group expels
// the member between two of its requests and lets it in again.
func TestNewMemberIDWhileHoldingPartitions(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(nil)
		w.fill(topic, 0, 5)
		w.eventually("committed", func() bool { return w.committed(place{topic, 0}) == 5 })
		w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.JoinGroup}, Err: kerr.UnknownMemberID})
		w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Heartbeat}, Err: kerr.RebalanceInProgress})
		w.eventually("joined anew", func() bool { return m.Snapshot().Expulsions == 1 })
		w.fill(topic, 0, 5)
		w.eventually("committed", func() bool { return w.committed(place{topic, 0}) == 10 })
		w.ascending(place{topic, 0}, 1)
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

func TestCommitErrorsAreTriedAgain(t *testing.T) {
	for _, code := range []*kerr.Error{
		kerr.RebalanceInProgress, kerr.RequestTimedOut, kerr.CoordinatorNotAvailable, kerr.GroupAuthorizationFailed,
		kerr.OffsetMetadataTooLarge, kerr.InvalidCommitOffsetSize,
	} {
		t.Run(code.Message, func(t *testing.T) {
			bubble(t, func(w *world) {
				t := w.t
				m := w.start(nil)
				w.eventually("taken", func() bool { return m.owns() == 1 })
				w.pass(2 * time.Second)
				f := w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Err: code, Count: 3})
				w.fill(topic, 0, 5)
				w.eventually("fault hit", func() bool { return f.Hits() > 0 })
				w.fill(topic, 0, 5)
				w.eventually("committed", func() bool { return w.committed(place{topic, 0}) == 10 })
				w.eventually("known", func() bool {
					p, _ := m.partition(place{topic, 0})
					return p.Committed == 10 && m.Snapshot().CommitErr == nil
				})
				if got := m.Snapshot().Expulsions; got != 0 {
					t.Errorf("%d expulsions", got)
				}
				w.ascending(place{topic, 0}, 0)
				if err := m.stop(); err != nil {
					t.Fatal(err)
				}
			}, kfake.SeedTopics(1, topic))
		})
	}
}

// A short outage costs the partitions, and no wait, where every request has an
// outcome.
func TestBrokerAwayAndBack(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(nil)
		w.fill(topic, 0, 5)
		w.eventually("committed", func() bool { return w.committed(place{topic, 0}) == 5 })
		m.line.cut(true)
		w.pass(10 * time.Second)
		w.fill(topic, 0, 5)
		m.line.cut(false)
		began := time.Now()
		w.eventually("committed", func() bool { return w.committed(place{topic, 0}) == 10 })
		if d := time.Since(began); d > 20*time.Second {
			t.Errorf("going on took %v", d)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

func TestNothingIsSentWhenTheSessionMayHaveRunOut(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(func(c *Config) { c.BatchAge = 40 * time.Second; c.BatchRows = 1000 })
		w.eventually("taken", func() bool { return m.owns() == 1 })
		w.fill(topic, 0, 5)
		w.eventually("received", func() bool {
			p, _ := m.partition(place{topic, 0})
			return p.QueuedRecords == 5
		})
		hang := w.hangHeartbeats()
		// The session is good for 45s less 15s. The array is due after 40s,
		// when the partition may be somebody else's.
		w.pass(50 * time.Second)
		table := w.engine.table("orders")
		if got := table.count(); got != 0 {
			t.Fatalf("%d requests were started when the session may have run out", got)
		}
		if m.Snapshot().Current {
			t.Error("status says that the session is current")
		}
		hang()
		w.eventually("committed", func() bool { return w.committed(place{topic, 0}) == 5 })
		w.ascending(place{topic, 0}, 0)
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

// A request under way when the session runs out is not tried again.
func TestStaleSessionEndsRetries(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(nil)
		w.eventually("taken", func() bool { return m.owns() == 1 })
		w.pass(2 * time.Second)
		table := w.engine.table("orders")
		ended := make(chan error, 1)
		table.set(func(ctx context.Context, n int) error {
			err := until(ctx, n)
			table.set(nil)
			ended <- err
			return err
		})
		w.fill(topic, 0, 5)
		w.eventually("a request hangs", func() bool { return table.count() == 1 })
		hang := w.hangHeartbeats()
		began := time.Now()
		if err := <-ended; err == nil {
			t.Error("the request ended without an error")
		}
		if d := time.Since(began); d < 25*time.Second || d > 31*time.Second {
			t.Errorf("retries ended after %v", d)
		}
		hang()
		w.eventually("committed", func() bool { return w.committed(place{topic, 0}) == 5 })
		w.ascending(place{topic, 0}, 0)
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

func TestShutdownDrainsAndCommits(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(func(c *Config) { c.CommitInterval = time.Hour })
		w.eventually("taken", func() bool { return m.owns() == 1 })
		w.pass(time.Second)
		w.engine.hold()
		w.fill(topic, 0, 5)
		w.eventually("accepted", func() bool { return len(w.engine.arrived(place{topic, 0})) == 5 })
		m.cancel()
		w.pass(3 * time.Second)
		select {
		case <-m.done:
			t.Fatal("stopped without waiting for evidence")
		default:
		}
		w.engine.release()
		<-m.done
		if m.err != nil {
			t.Fatal(m.err)
		}
		if c, _ := w.lastCommit(place{topic, 0}); c.offset != 5 || !c.note.Clean {
			t.Errorf("last commit %+v", c)
		}
		// The next owner need not wait.
		began := time.Now()
		b := w.start(nil)
		w.fill(topic, 0, 1)
		w.eventually("committed", func() bool { return w.committed(place{topic, 0}) == 6 })
		if d := time.Since(began); d > 10*time.Second {
			t.Errorf("the next owner began after %v", d)
		}
		if err := b.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

func TestStopNowSkipsTheDrain(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(nil)
		w.eventually("taken", func() bool { return m.owns() == 1 })
		w.engine.hold()
		w.fill(topic, 0, 5)
		w.eventually("accepted", func() bool { return len(w.engine.arrived(place{topic, 0})) == 5 })
		m.cancel()
		w.pass(time.Second)
		m.now()
		w.pass(time.Millisecond)
		select {
		case <-m.done:
		default:
			t.Error("still waiting")
		}
		<-m.done
		w.engine.release()
	}, kfake.SeedTopics(1, topic))
}

func TestManyMembersComeAndGo(t *testing.T) {
	realTime(t, func(w *world) {
		t := w.t
		var running []*member
		stop := func(i int) {
			if err := running[i].stop(); err != nil {
				t.Fatal(err)
			}
			running = slices.Delete(running, i, i+1)
		}
		for round := range 6 {
			if len(running) < 3 {
				running = append(running, w.start(func(c *Config) { c.BatchRows = 3; c.RequestLifetime = 100 * time.Millisecond }))
			}
			for p := range int32(4) {
				w.fill(topic, p, 7)
			}
			if round%2 == 1 {
				w.pass(700 * time.Millisecond)
				stop(0)
			}
			w.pass(300 * time.Millisecond)
		}
		for p := range int32(4) {
			w.eventually("committed", func() bool { return w.committed(place{topic, p}) == 42 })
		}
		for len(running) > 0 {
			stop(0)
		}
	}, kfake.SeedTopics(4, topic))
}
