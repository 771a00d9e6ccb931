package lane

import (
	"testing"

	"holdfast/internal/ack"
)

// BenchmarkLane is the cost of one record on its whole way, 2000 a poll and
// 10000 an array, committed after each.
func BenchmarkLane(b *testing.B) {
	l := newLane(0, Limits{})
	in := recs(make([]int64, 2000)...)
	var buf []Record
	next := int64(0)
	b.ReportAllocs()
	for n := 0; n < b.N; n += 10_000 {
		for range 5 {
			for i := range in {
				in[i].Offset = next
				next++
			}
			l.Receive(in)
		}
		buf = l.Peek(buf[:0], 10_000, t0)
		rg, err := l.Take(len(buf))
		if err != nil {
			b.Fatal(err)
		}
		if _, err := l.Accept(rg); err != nil {
			b.Fatal(err)
		}
		if err := l.Mark(rg, ack.Completed); err != nil {
			b.Fatal(err)
		}
		c, ok := l.ToCommit(false, t0)
		if !ok || c.Offset != next {
			b.Fatalf("to commit %+v %v, want %d", c, ok, next)
		}
		if err := l.Committed(c); err != nil {
			b.Fatal(err)
		}
	}
}
