package lane

import (
	"errors"
	"testing"

	"pgregory.net/rapid"

	"holdfast/internal/ack"
)

// recorded makes a claimed lane whose claim stands for the given position.
func recorded(t *testing.T, start, position int64) *Lane {
	t.Helper()
	l := New(Config{Topic: "orders", Partition: 3, Start: start, Committed: start, StartLeaderEpoch: -1, Progress: &Progress{}})
	if c, ok := l.ToCommit(false, t0); ok {
		t.Fatalf("undecided, it commits %+v", c)
	}
	if err := l.Claim(position, "i1"); err == nil {
		t.Fatal("claimed before its epoch was noted")
	}
	if !l.Decide(7) || l.Decide(8) || l.Epoch() != 7 {
		t.Fatal("decided otherwise than once")
	}
	c := wantCommit(t, l, start)
	if c.Row.Known || c.Clean {
		t.Fatalf("the announcement is %+v", c)
	}
	if err := l.Committed(c); err != nil {
		t.Fatal(err)
	}
	if _, ok := l.ToCommit(false, t0); ok {
		t.Fatal("it commits before it has claimed")
	}
	l.Receive(recs(start))
	if got := l.Peek(nil, 1, t0); len(got) > 0 {
		t.Fatal("it sends before it has claimed")
	}
	if err := l.Claim(position, "i1"); err != nil {
		t.Fatal(err)
	}
	c = wantCommit(t, l, start)
	if want := (Row{Known: true, Epoch: 7, Incarnation: "i1"}); c.Row != want || c.Rows != position {
		t.Fatalf("behind the claim it commits %+v", c)
	}
	if err := l.Committed(c); err != nil {
		t.Fatal(err)
	}
	if _, ok := l.ToCommit(false, t0); ok {
		t.Fatal("it commits the same once more")
	}
	return l
}

// A range that gave rows is completed by the row behind it alone; one without
// rows by its own evidence, once everything before it is.
func TestRowCompletes(t *testing.T) {
	l := recorded(t, 10, 8)
	l.Receive(recs(11, 12))
	one := take(t, l, 1)
	one.Rows = 11
	accept(t, l, one)
	none := take(t, l, 1)
	accept(t, l, none)
	two := take(t, l, 1)
	two.Rows = 13
	accept(t, l, two)
	if _, _, ok := l.Recordable(); ok {
		t.Fatal("a row for what is not ingested")
	}
	for _, rg := range []Range{one, none} {
		evidence(t, l, rg, ack.Completed)
	}
	if _, ok := l.ToCommit(false, t0); ok {
		t.Fatal("committed on the completion of rows")
	}
	position, next, ok := l.Recordable()
	if !ok || position != 11 || next != 11 {
		t.Fatalf("recordable is %d, %d, %v", position, next, ok)
	}
	l.Recorded(next)
	if _, _, ok := l.Recordable(); ok {
		t.Fatal("recorded twice")
	}
	evidence(t, l, two, ack.Ingested)
	if position, next, ok = l.Recordable(); !ok || position != 13 || next != 13 {
		t.Fatalf("recordable is %d, %d, %v", position, next, ok)
	}
	if err := l.Proven(11, "i1"); err != nil {
		t.Fatal(err)
	}
	if c := wantCommit(t, l, 12); c.Rows != 11 || c.Row.Epoch != 7 {
		t.Errorf("%+v", c)
	}
	l.Drain()
	if c, _ := l.ToCommit(true, t0); c.Clean || l.Drained() {
		t.Error("clean with a row to come")
	}
	l.Recorded(13)
	if err := l.Proven(13, "i1"); err != nil {
		t.Fatal(err)
	}
	if c, ok := l.ToCommit(true, t0); !ok || !c.Clean || c.Offset != 13 || c.Rows != 13 || !l.Drained() {
		t.Errorf("%+v", c)
	}
	l.Kill()
	if err := l.Proven(13, "i1"); !errors.Is(err, ErrDead) {
		t.Error(err)
	}
}

// A lane that begins ahead of what was acknowledged commits the old offset
// until its claim is completed, and a lane that never claimed is not clean.
func TestBeginsAhead(t *testing.T) {
	old := Row{Known: true, Epoch: 3, Incarnation: "i0"}
	l := New(Config{Topic: "orders", Epoch: 4, Start: 50, StartRows: 38, Committed: 40, Progress: &Progress{Row: old, Decided: true, Announce: 40}})
	c := wantCommit(t, l, 40)
	if c.Row != old || c.Rows != 38 {
		t.Fatalf("%+v", c)
	}
	if err := l.Committed(Commit{Offset: 50}); err == nil {
		t.Fatal("another announcement was taken")
	}
	if err := l.Committed(c); err != nil {
		t.Fatal(err)
	}
	if err := l.Claim(50, "i1"); err != nil {
		t.Fatal(err)
	}
	c = wantCommit(t, l, 50)
	if c.Rows != 50 || c.Row != (Row{Known: true, Epoch: 4, Incarnation: "i1"}) || c.LeaderEpoch != -1 {
		t.Errorf("%+v", c)
	}
	if err := l.Committed(c); err != nil {
		t.Fatal(err)
	}

	l = New(Config{Topic: "orders", Epoch: 4, Start: 50, Committed: 40, Progress: &Progress{Decided: true, Announce: 40}})
	if err := l.Committed(wantCommit(t, l, 40)); err != nil {
		t.Fatal(err)
	}
	l.Drain()
	if c, ok := l.ToCommit(true, t0); ok || c.Clean {
		t.Errorf("%+v", c)
	}
}

// TestProgressOracle drives a claimed lane through random histories: what it
// commits is never above a range with rows that no completed row stands for,
// and what it names was completed.
func TestProgressOracle(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		l := recorded(t, 0, 0)
		type sent struct {
			Range
			proven bool
		}
		var flying []*sent
		var rows []int64 // Next of rows that were sent
		next, proven := int64(1), int64(0)
		rt.Repeat(map[string]func(*rapid.T){
			"send": func(rt *rapid.T) {
				l.Receive(recs(next))
				next += rapid.Int64Range(1, 3).Draw(rt, "step")
				n := len(l.Peek(nil, rapid.IntRange(1, 3).Draw(rt, "n"), t0))
				if n == 0 {
					rt.Skip()
				}
				rg, err := l.Take(n)
				if err != nil {
					rt.Fatal(err)
				}
				if rapid.Bool().Draw(rt, "rows") {
					rg.Rows = rg.Next - rapid.Int64Range(0, rg.Next-rg.From-1).Draw(rt, "tail")
				}
				if rg.Rows == 0 && rapid.Bool().Draw(rt, "skip") {
					_, err = l.Skip(rg)
				} else {
					_, err = l.Accept(rg)
				}
				if err != nil {
					rt.Fatal(err)
				}
				flying = append(flying, &sent{Range: rg})
			},
			"evidence": func(rt *rapid.T) {
				if len(flying) == 0 {
					rt.Skip()
				}
				f := flying[rapid.IntRange(0, len(flying)-1).Draw(rt, "range")]
				if err := l.Mark(f.Range, rapid.SampledFrom([]ack.Rung{ack.Ingested, ack.Completed}).Draw(rt, "rung")); err != nil {
					rt.Fatal(err)
				}
			},
			"record": func(rt *rapid.T) {
				position, upTo, ok := l.Recordable()
				if !ok {
					rt.Skip()
				}
				if len(rows) > 0 && upTo <= rows[len(rows)-1] || position > upTo {
					rt.Fatalf("a row for %d, up to %d, behind one up to %v", position, upTo, rows)
				}
				l.Recorded(upTo)
				rows = append(rows, upTo)
			},
			"prove": func(rt *rapid.T) {
				if len(rows) == 0 {
					rt.Skip()
				}
				upTo := rows[rapid.IntRange(0, len(rows)-1).Draw(rt, "row")]
				if err := l.Proven(upTo, "i1"); err != nil {
					rt.Fatal(err)
				}
				for _, f := range flying {
					if f.Next <= upTo {
						f.proven = true
						proven = max(proven, f.Rows)
					}
				}
			},
			"": func(rt *rapid.T) {
				c, ok := l.ToCommit(false, t0)
				for _, f := range flying {
					if f.Rows > 0 && !f.proven && c.Offset > f.From {
						rt.Fatalf("%+v is above the range from %d, whose rows no row stands for", c, f.From)
					}
				}
				if c.Rows != proven || !c.Row.Known || c.Row.Epoch != 7 {
					rt.Fatalf("%+v names another row than that for %d", c, proven)
				}
				if ok {
					if err := l.Committed(c); err != nil {
						rt.Fatal(err)
					}
				}
			},
		})
	})
}
