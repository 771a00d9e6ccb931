package partition

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/twmb/franz-go/pkg/kfake"
)

func TestDeliversAndCommits(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		for p := range int32(3) {
			w.fill(topic, p, 50)
		}
		m := w.start(func(c *Config) { c.BatchRows = 7 })
		for p := range int32(3) {
			w.eventually("everything committed", func() bool { return w.committed(place{topic, p}) == 50 })
			w.ascending(place{topic, p}, 0)
		}
		w.eventually("lag known", func() bool {
			p, ok := m.partition(place{topic, 0})
			return ok && p.LagKnown && p.Lag == 0
		})
		st := m.Snapshot()
		if st.Assigned != 3 || !st.Joined || !st.Current || st.CommitErr != nil || len(st.Blocked()) > 0 {
			t.Errorf("status %+v", st)
		}
		if got := m.metric("kafkasink_records_total", "topic=orders"); got != 150 {
			t.Errorf("records_total %v", got)
		}
		if got := m.metric("kafkasink_assigned_partitions"); got != 3 {
			t.Errorf("assigned_partitions %v", got)
		}
		problems, err := testutil.GatherAndLint(m.reg)
		if err != nil || len(problems) > 0 {
			t.Errorf("lint: %v %v", problems, err)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
		c, ok := w.lastCommit(place{topic, 1})
		if !ok || !c.note.Clean || c.note.Epoch != 1 || c.note.Incarnation != "one" || c.note.Offset != 50 || c.note.TopicID == "" || c.note.Time == 0 {
			t.Errorf("last commit %+v", c)
		}
		if info := w.cluster.GroupInfo(group); len(info.Members) != 0 {
			t.Error("the member did not leave the group")
		}
	}, kfake.SeedTopics(3, topic))
}

func TestNothingIsCommittedBeforeItIsCompleted(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		w.engine.hold()
		w.fill(topic, 0, 5)
		m := w.start(nil)
		w.eventually("accepted", func() bool {
			p, ok := m.partition(place{topic, 0})
			return ok && p.Accepted == 5
		})
		w.pass(10 * time.Second)
		if got := w.committed(place{topic, 0}); got != 0 {
			t.Errorf("committed %d", got)
		}
		w.engine.release()
		w.eventually("committed", func() bool { return w.committed(place{topic, 0}) == 5 })
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}
