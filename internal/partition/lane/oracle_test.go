package lane

import (
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"

	"holdfast/internal/ack"
)

// model is the dumb twin of a lane: one state per received offset, and every
// question answered by looking at all of them.
type model struct {
	start     int64
	next      int64
	rows      []row
	idle      []int64 // positions without rows, in order
	committed int64
	alive     bool
	draining  bool
}

type row struct {
	offset int64
	rung   ack.Rung
	taken  bool // in the range of unknown outcome
	queued bool
}

// safe gives the highest position below which every row is completed.
func (m *model) safe(r ack.Rung) int64 {
	at := m.start
	limit := int64(1 << 62)
	for _, x := range m.rows {
		if x.rung < r {
			limit = x.offset
			break
		}
		at = max(at, x.offset+1)
	}
	for _, p := range m.idle {
		if p <= limit {
			at = max(at, p)
		}
	}
	return at
}

// TestOracle drives a lane and the model through the same random history.
func TestOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := rapid.Int64Range(0, 50).Draw(t, "start")
		limits := Limits{HighRecords: 12, LowRecords: 4, HighBytes: 1 << 20, LowBytes: 1 << 19, MaxUncommitted: 64}
		l := New(Config{Topic: "t", Start: start, Committed: start, Limits: limits})
		if err := l.Committed(Commit{Offset: start}); err != nil {
			t.Fatal(err)
		}
		m := &model{start: start, next: start, committed: start, alive: true}
		now := time.Unix(1, 0)

		var current *Range // taken, no outcome
		var flying []Range // accepted, maybe completed
		paused := false
		lastSent := start - 1

		t.Repeat(map[string]func(*rapid.T){
			"receive": func(t *rapid.T) {
				if paused {
					t.Skip("a paused partition gives no records")
				}
				n := rapid.IntRange(1, 5).Draw(t, "n")
				var in []Record
				for range n {
					// Steps below 1 are duplicates, above 1 are gaps.
					o := max(m.next+rapid.Int64Range(-3, 4).Draw(t, "step"), 0)
					idle := rapid.IntRange(0, 4).Draw(t, "idle") == 0
					in = append(in, Record{Offset: o, Idle: idle, Value: []byte("x")})
					if m.alive && !m.draining && o >= m.next {
						if idle {
							m.idle = append(m.idle, o+1)
						} else {
							m.rows = append(m.rows, row{offset: o, queued: true})
						}
						m.next = o + 1
					}
				}
				paused = l.Receive(in).Full
			},
			"take": func(t *rapid.T) {
				limit := rapid.IntRange(1, 6).Draw(t, "limit")
				got := l.Peek(nil, limit, now)
				if current != nil && len(got) > 0 {
					t.Fatalf("%d records given out while an outcome is unknown", len(got))
				}
				if !m.alive || m.draining {
					if len(got) > 0 {
						t.Fatalf("%d records given out by a lane that is over", len(got))
					}
					return
				}
				if len(got) == 0 {
					return
				}
				i := 0
				for j := range m.rows {
					if !m.rows[j].queued {
						continue
					}
					if i == len(got) {
						break
					}
					if got[i].Offset != m.rows[j].offset {
						t.Fatalf("record %d given out, want %d", got[i].Offset, m.rows[j].offset)
					}
					i++
				}
				n := rapid.IntRange(1, len(got)).Draw(t, "n")
				rg, err := l.Take(n)
				if err != nil {
					t.Fatal(err)
				}
				if rg.From <= lastSent {
					t.Fatalf("range from %d although %d was accepted", rg.From, lastSent)
				}
				current = &rg
				for j := range m.rows {
					if n > 0 && m.rows[j].queued {
						m.rows[j].queued, m.rows[j].taken = false, true
						n--
					}
				}
			},
			"accept": func(t *rapid.T) {
				if current == nil {
					t.Skip()
				}
				full, err := l.Accept(*current)
				if m.alive != (err == nil) {
					t.Fatalf("accept with alive=%v: %v", m.alive, err)
				}
				paused = full
				lastSent = current.Next - 1
				flying = append(flying, *current)
				current = nil
				for j := range m.rows {
					if m.rows[j].taken && m.alive {
						m.rows[j].taken, m.rows[j].rung = false, ack.Accepted
					}
				}
			},
			"return": func(t *rapid.T) {
				if current == nil {
					t.Skip()
				}
				if err := l.Return(*current); m.alive != (err == nil) {
					t.Fatalf("return with alive=%v: %v", m.alive, err)
				}
				current = nil
				for j := range m.rows {
					if m.rows[j].taken {
						m.rows[j].taken, m.rows[j].queued = false, !m.draining
					}
				}
			},
			"evidence": func(t *rapid.T) {
				if len(flying) == 0 {
					t.Skip()
				}
				rg := flying[rapid.IntRange(0, len(flying)-1).Draw(t, "range")]
				r := rapid.SampledFrom([]ack.Rung{ack.Ingested, ack.Completed}).Draw(t, "rung")
				err := l.Mark(rg, r)
				if m.alive != (err == nil) || !m.alive && !errors.Is(err, ErrDead) {
					t.Fatalf("mark with alive=%v: %v", m.alive, err)
				}
				for j := range m.rows {
					x := &m.rows[j]
					if m.alive && x.offset >= rg.From && x.offset < rg.Next {
						x.rung = max(x.rung, r)
					}
				}
			},
			"commit": func(t *rapid.T) {
				c, ok := l.ToCommit(m.draining, now)
				if !m.alive {
					if ok {
						t.Fatalf("a dead lane gave out %+v", c)
					}
					return
				}
				safe := m.safe(ack.Completed)
				if c.Offset != safe {
					t.Fatalf("offset %d to commit, want %d", c.Offset, safe)
				}
				if !ok {
					if safe > m.committed {
						t.Fatalf("nothing to commit although %d is safe and %d committed", safe, m.committed)
					}
					return
				}
				if c.Offset < m.committed {
					t.Fatalf("commit goes back from %d to %d", m.committed, c.Offset)
				}
				if c.Clean && (!m.draining || current != nil) {
					t.Fatal("clean although something is without an outcome")
				}
				if rapid.Bool().Draw(t, "lost") {
					return // the broker's answer never came
				}
				if err := l.Committed(c); err != nil {
					t.Fatal(err)
				}
				m.committed = c.Offset
			},
			"drain": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "really") > 0 {
					t.Skip()
				}
				l.Drain()
				if m.alive {
					m.draining, paused = true, false
					for j := range m.rows {
						m.rows[j].queued = false
					}
				}
			},
			"kill": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "really") > 0 {
					t.Skip()
				}
				left := l.Kill()
				if m.alive && (left.From != m.committed || left.Next != m.next || left.Completed != m.safe(ack.Completed)) {
					t.Fatalf("left behind %+v, want from %d to %d", left, m.committed, m.next)
				}
				m.alive, paused = false, false
			},
			"": func(t *rapid.T) {
				s := l.Snapshot()
				if m.alive {
					for r, got := range map[ack.Rung]int64{ack.Received: s.Received, ack.Accepted: s.Accepted, ack.Ingested: s.Ingested, ack.Completed: s.Completed} {
						want := m.safe(r)
						if r == ack.Received {
							want = m.next
						}
						if got != want {
							t.Fatalf("%v stands at %d, want %d", r, got, want)
						}
					}
				}
				if s.Committed > s.Completed || s.Completed > s.Ingested || s.Ingested > s.Accepted || s.Accepted > s.Received {
					t.Fatalf("rungs out of order: %+v", s)
				}
				if s.Committed != m.committed {
					t.Fatalf("committed %d, want %d", s.Committed, m.committed)
				}
				// One poll of at most 5 may arrive after the mark was reached.
				if s.QueuedRecords > limits.HighRecords+5 {
					t.Fatalf("%d records queued", s.QueuedRecords)
				}
				if m.alive && paused && s.QueuedRecords <= limits.LowRecords {
					t.Fatalf("full with %d records queued", s.QueuedRecords)
				}
			},
		})
	})
}
