package partition

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
)

func TestParseRetention(t *testing.T) {
	for _, tc := range []struct {
		policy, ms, bytes string
		want              retention
	}{
		{"delete", "1000", "-1", retention{age: time.Second}},
		{"compact,delete", "-1", "5", retention{bytes: 5}},
		{"compact", "1000", "5", retention{}},
		{"", "1000", "", retention{age: time.Second}},
		{"delete", "9223372036854775807", "soon", retention{}},
	} {
		if got := parseRetention(tc.policy, tc.ms, tc.bytes); got != tc.want {
			t.Errorf("%+v gives %+v", tc, got)
		}
	}
}

func TestCourse(t *testing.T) {
	at := time.Unix(1000, 0)
	byAge := retention{age: time.Hour}
	for name, tc := range map[string]struct {
		by      retention
		samples []sample
		want    *RetentionStatus
	}{
		"nothing is known": {byAge, nil, nil},
		"no retention":     {retention{}, []sample{{at: at}}, nil},
		"keeps up":         {byAge, []sample{{at, 0, 10, time.Second}, {at.Add(time.Minute), 5, 100, time.Second}}, &RetentionStatus{Limit: time.Hour, Records: 95, Headroom: time.Hour - time.Second}},
		// It ages 30 seconds in a minute, and has 50 minutes.
		"falls behind": {byAge, []sample{{at, 0, 10, 570 * time.Second}, {at.Add(time.Minute), 0, 100, 600 * time.Second}}, &RetentionStatus{
			Limit: time.Hour, Records: 100, Headroom: 50 * time.Minute, Left: 100 * time.Minute, Approaching: true,
		}},
		// The start comes 30 offsets nearer in a minute, and is 60 away.
		"the start comes nearer": {retention{bytes: 1}, []sample{{at, 0, 90, 0}, {at.Add(time.Minute), 40, 100, 0}}, &RetentionStatus{Records: 60, Left: 2 * time.Minute, Approaching: true}},
		"it was overtaken":       {byAge, []sample{{at, 0, 10, time.Hour}, {at.Add(time.Minute), 20, 10, 61 * time.Minute}}, &RetentionStatus{Limit: time.Hour, Records: -10, Headroom: -time.Minute, Approaching: true}},
		"it was set back":        {byAge, []sample{{at, 0, 100, 0}, {at.Add(time.Minute), 0, 50, time.Minute}}, &RetentionStatus{Limit: time.Hour, Records: 50, Headroom: 59 * time.Minute}},
	} {
		t.Run(name, func(t *testing.T) {
			c := new(course)
			for _, s := range tc.samples {
				c.add(s)
			}
			if diff := cmp.Diff(tc.want, c.status(tc.by)); diff != "" {
				t.Error(diff)
			}
		})
	}
	c := new(course)
	for i := range 1000 {
		c.add(sample{at: at, committed: int64(i)})
	}
	if len(c.samples) != maxSamples {
		t.Errorf("%d samples are kept", len(c.samples))
	}
}

// A position that stands still is said to be overtaken, and when.
func TestRetentionHeadroom(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		created, err := kadm.NewClient(w.writer).CreateTopic(t.Context(), 1, 1, map[string]*string{"retention.ms": ptr("3600000")}, topic)
		if err := errors.Join(err, created.Err); err != nil {
			t.Fatal(err)
		}
		w.learn(topic)
		w.engine.hold()
		m := w.start(nil)
		w.fill(topic, 0, 10)
		w.eventually("the retention is known", func() bool { p, _ := m.partition(first); return p.Retention != nil })
		w.pass(10 * time.Minute)
		p, _ := m.partition(first)
		r := p.Retention
		if !r.Approaching || r.Limit != time.Hour || r.Records != 0 || r.Headroom < 48*time.Minute || r.Headroom > 51*time.Minute ||
			r.Left < 48*time.Minute || r.Left > 51*time.Minute || p.LagAge < 9*time.Minute {
			t.Errorf("lag %v, retention %+v", p.LagAge, r)
		}
		for _, name := range []string{"partition_retention_headroom_seconds", "partition_retention_left_seconds", "partition_lag_seconds"} {
			if m.metric("kafkasink_"+name, "topic=orders", "partition=0") < 500 {
				t.Errorf("%s is %v", name, m.metric("kafkasink_"+name))
			}
		}
		w.engine.release()
		w.eventually("committed", func() bool { return w.committed(first) == 10 })
		w.eventually("it is far again", func() bool {
			p, _ := m.partition(first)
			return p.Retention != nil && p.Retention.Headroom == time.Hour && p.LagAge == 0
		})
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	})
}

// Only records that gave a row count for the note's last row.
func TestNoteNamesTheLastRow(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		m := w.start(func(c *Config) { c.Poison = PoisonSkip })
		w.produce(topic, 0, "row", "row", "none", "bad")
		w.engine.forgive(first, 3)
		w.eventually("committed", func() bool { return w.committed(first) == 4 })
		if c, _ := w.lastCommit(first); c.note.Rows != 2 {
			t.Errorf("the last row is at %d", c.note.Rows-1)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
		// The next owner keeps it, also when it sees no row itself.
		m = w.start(func(c *Config) { c.Poison = PoisonSkip })
		w.produce(topic, 0, "none")
		w.eventually("committed", func() bool { return w.committed(first) == 5 })
		if c, _ := w.lastCommit(first); c.note.Rows != 2 {
			t.Errorf("the last row is at %d", c.note.Rows-1)
		}
		w.produce(topic, 0, "row")
		w.eventually("committed", func() bool { return w.committed(first) == 6 })
		if c, _ := w.lastCommit(first); c.note.Rows != 6 {
			t.Errorf("the last row is at %d", c.note.Rows-1)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}
