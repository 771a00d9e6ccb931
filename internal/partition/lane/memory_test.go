package lane

import (
	"runtime"
	"testing"
	"time"
)

// What a lane counts as held must not be less than what it costs, or the
// limits that are set in bytes hold something else.
func TestHeldIsNotLessThanTheHeap(t *testing.T) {
	const n = 100_000
	l := New(Config{Topic: "t", Limits: Limits{HighRecords: n, HighBytes: 1 << 40}})
	now := time.Now()
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	for from := int64(0); from < n; from += 1000 {
		var recs []Record
		for o := from; o < from+1000; o++ {
			recs = append(recs, Record{Offset: o, Value: make([]byte, 112), Time: now, Received: now})
		}
		l.Receive(recs)
	}
	grown := heap() - before
	held, _ := l.Held()
	t.Logf("held %d bytes for a heap of %d: %d and %d a record", held, grown, held/n, grown/n)
	if held < grown {
		t.Errorf("%d records are counted as %d bytes and cost %d", n, held, grown)
	}
	runtime.KeepAlive(l)
}
