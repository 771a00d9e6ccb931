package partition

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/partition/lane"
)

func TestMissingTopicIsSaid(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(nil)
		var missing *decode.Refusal
		w.eventually("the topic is named", func() bool { return errors.As(m.Snapshot().TopicErrs[topic], &missing) })
		if missing.Where != topic || !strings.Contains(missing.Do, "--create --topic "+topic) || !strings.Contains(missing.Do, "KAFKASINK_TOPICS") {
			t.Errorf("it says: %v", missing)
		}
		if st := m.Snapshot(); st.Joined || st.BrokersErr != nil {
			t.Errorf("joined %v, brokers %v", st.Joined, st.BrokersErr)
		}
		if _, err := kadm.NewClient(w.writer).CreateTopic(t.Context(), 1, 1, nil, topic); err != nil {
			t.Fatal(err)
		}
		w.learn(topic)
		w.eventually("taken", func() bool { return m.owns() == 1 && len(m.Snapshot().TopicErrs) == 0 })
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, "other"))
}

func TestUnreachableBrokersAreSaid(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(nil)
		w.eventually("taken", func() bool { return m.owns() == 1 })
		m.line.cut(true)
		w.eventually("said", func() bool { return m.Snapshot().BrokersErr != nil })
		if err := m.Snapshot().BrokersErr; !strings.Contains(err.Error(), "reach the brokers localhost:9092: ") || !strings.Contains(err.Error(), "the line is cut") {
			t.Errorf("it says: %v", err)
		}
		m.line.cut(false)
		w.eventually("over", func() bool { return m.Snapshot().BrokersErr == nil })
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

func TestAllStopped(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(nil)
		w.eventually("taken", func() bool { return m.owns() == 2 })
		w.engine.hold()
		w.produce(topic, 0, "row", "bad", "row")
		w.eventually("one stopped", func() bool { p, _ := m.partition(first); return p.State == lane.Blocked })
		if _, all := allStopped(m); all {
			t.Error("one partition of two is not all")
		}
		w.produce(topic, 1, "bad")
		w.eventually("both stopped", func() bool { p, _ := m.partition(place{topic, 1}); return p.State == lane.Blocked })
		w.eventually("accepted", func() bool { return len(w.engine.arrived(first)) == 1 })
		if _, all := allStopped(m); all {
			t.Error("a row is in flight")
		}
		w.engine.release()
		w.eventually("all stopped", func() bool { _, all := allStopped(m); return all })
		why, _ := allStopped(m)
		if !strings.Contains(why.Error(), "KAFKASINK_POISON=dlq") || !strings.Contains(why.Error(), first.String()) {
			t.Errorf("it says: %v", why)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
		if got := w.committed(first); got != 1 {
			t.Errorf("committed %d: what is in front of the record is completed", got)
		}
	}, kfake.SeedTopics(2, topic))
}

func allStopped(m *member) (why error, all bool) {
	st := m.Snapshot()
	return st.AllStopped()
}

func TestAllStoppedIsNotBelievedEarly(t *testing.T) {
	refused := &lane.Block{Err: &decode.Refusal{Why: "first"}}
	stopped := PartitionStatus{Snapshot: lane.Snapshot{State: lane.Blocked, Block: refused}}
	queued := stopped
	queued.QueuedRecords = 1
	looking := PartitionStatus{Snapshot: lane.Snapshot{State: lane.Blocked, Block: &lane.Block{Err: errors.New("the log's bounds are being looked up")}}}
	for name, c := range map[string]struct {
		st  Status
		all bool
	}{
		"nothing assigned":        {Status{}, false},
		"one of two placed":       {Status{Assigned: 2, Partitions: []PartitionStatus{stopped}}, false},
		"one is being given up":   {Status{Assigned: 1, Partitions: []PartitionStatus{stopped, stopped}}, false},
		"one goes on":             {Status{Assigned: 2, Partitions: []PartitionStatus{stopped, {}}}, false},
		"a gap is being measured": {Status{Assigned: 2, Partitions: []PartitionStatus{stopped, looking}}, false},
		"rows are still to go":    {Status{Assigned: 1, Partitions: []PartitionStatus{queued}}, false},
		"rows are in flight":      {Status{Assigned: 1, Partitions: []PartitionStatus{stopped}, Tables: []TableStatus{{InFlight: 1}}}, false},
		"a request is under way":  {Status{Assigned: 1, Partitions: []PartitionStatus{stopped}, Tables: []TableStatus{{Sending: true}}}, false},
		"all":                     {Status{Assigned: 2, Partitions: []PartitionStatus{stopped, stopped}, Tables: []TableStatus{{}}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			why, all := c.st.AllStopped()
			if all != c.all || all && !errors.Is(why, refused.Err) {
				t.Errorf("%v, because %v", all, why)
			}
		})
	}
}

// Whoever finds out by itself that the pipeline is another process ends Run
// without the drain and without a commit.
func TestIncarnationChangeFromOutside(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(nil)
		w.eventually("taken", func() bool { return m.owns() == 1 })
		w.pass(time.Second)
		w.engine.hold()
		w.fill(topic, 0, 5)
		w.eventually("accepted", func() bool { return len(w.engine.arrived(first)) == 5 })
		began := time.Now()
		m.endWith(&feldera.IncarnationChanged{Was: "one", Now: "two"})
		<-m.done
		var changed *feldera.IncarnationChanged
		if !errors.As(m.err, &changed) {
			t.Errorf("ended with %v", m.err)
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("it waited for %v", took)
		}
		if got := w.committed(first); got != 0 {
			t.Errorf("committed %d", got)
		}
	}, kfake.SeedTopics(1, topic))
}

// A request that is cut by a stop at once ends like any of unknown outcome,
// not as a failure.
func TestStopNowCutsTheRequest(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(nil)
		w.eventually("taken", func() bool { return m.owns() == 1 })
		w.engine.table("orders").set(func(context.Context, int) error {
			<-m.stopNow
			return errors.New("stopped at once")
		})
		w.fill(topic, 0, 1)
		w.eventually("under way", func() bool { return m.Snapshot().Tables[0].Sending })
		m.cancel()
		m.now()
		<-m.done
		if m.err != nil {
			t.Errorf("ended with %v", m.err)
		}
	}, kfake.SeedTopics(1, topic))
}
