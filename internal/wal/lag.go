package wal

import (
	"sync"
	"time"
)

// maxTrail bounds a trail; trailStep is the least time between two of its
// points while it is short.
const (
	maxTrail  = 4096
	trailStep = 100 * time.Millisecond
)

// trail remembers when positions of the WAL came to be, coarsely: enough to
// tell how old the first one is that has not been dealt with.
type trail struct {
	points []trailPoint // ascending in both fields
	step   time.Duration
}

type trailPoint struct {
	lsn uint64
	at  time.Time // by the server's clock
}

// add notes that the WAL reached lsn at that time. Where the trail gets long,
// every second point is forgotten and points are taken half as often.
func (t *trail) add(lsn uint64, at time.Time) {
	t.step = max(t.step, trailStep)
	if n := len(t.points); n > 0 {
		last := t.points[n-1]
		if lsn <= last.lsn || at.Sub(last.at) < t.step {
			return // the point before it stands for it, and is older
		}
		if n >= maxTrail {
			kept := t.points[:0]
			for i := 0; i < n; i += 2 {
				kept = append(kept, t.points[i])
			}
			t.points = kept
			t.step *= 2
		}
	}
	t.points = append(t.points, trailPoint{lsn, at})
}

// passed forgets what lies at or below lsn.
func (t *trail) passed(lsn uint64) {
	n := 0
	for n < len(t.points) && t.points[n].lsn <= lsn {
		n++
	}
	t.points = t.points[n:]
	if len(t.points) == 0 {
		t.points, t.step = nil, trailStep
	}
}

// age tells how long before now the first point was, 0 when none is left.
func (t *trail) age(now time.Time) time.Duration {
	if len(t.points) == 0 {
		return 0
	}
	return max(0, now.Sub(t.points[0].at))
}

// lag is how far behind the server we are, in time. It is asked at each scrape,
// so that it grows while nothing moves. Its methods may be called by any
// goroutine.
//
// The clock is the server's: what its messages carry tells how far ours is
// off, so that a wrong clock here makes no wrong lag.
type lag struct {
	now func() time.Time

	mu      sync.Mutex
	ahead   time.Duration // the server's clock less ours
	written trail         // the server's own position, not yet received
	unacked trail         // the same, not yet acknowledged
	commits trail         // commits received and not yet acknowledged
}

// heard takes the server's clock from a message that has just arrived.
func (l *lag) heard(sent time.Time) {
	if sent.IsZero() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ahead = sent.Sub(l.now())
}

// reached notes the server's own position.
func (l *lag) reached(lsn uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := l.now().Add(l.ahead)
	l.written.add(lsn, at)
	l.unacked.add(lsn, at)
}

// committed notes a commit that was received.
func (l *lag) committed(end uint64, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.commits.add(end, at)
}

// moved notes what has been received and acknowledged.
func (l *lag) moved(received, acknowledged uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.written.passed(received)
	l.unacked.passed(acknowledged)
	l.commits.passed(acknowledged)
}

// received is the age of the oldest WAL that the server had and we have not.
func (l *lag) received() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.written.age(l.now().Add(l.ahead))
}

// acknowledged is the age of the oldest commit or WAL that the server has not
// been told to forget.
func (l *lag) acknowledged() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now().Add(l.ahead)
	return max(l.unacked.age(now), l.commits.age(now))
}

// slopeWindow is the time over which the slot's course is measured,
// slopeMinimum how much of it must have passed before anything is said.
const (
	slopeWindow  = 5 * time.Minute
	slopeMinimum = 30 * time.Second
)

// slope measures how fast a slot uses up what WAL the server will keep for it.
type slope struct {
	samples []slopeSample
}

type slopeSample struct {
	at       time.Time
	retained int64
	safe     *int64 // nil without max_slot_wal_keep_size
}

// add takes one look at the slot. growth is in bytes per second; left is how
// long the slot has at this pace, 0 where it is not shrinking, is not limited,
// or has not been watched for long enough.
func (s *slope) add(at time.Time, retained int64, safe *int64) (growth float64, left time.Duration) {
	for len(s.samples) > 0 && at.Sub(s.samples[0].at) > slopeWindow {
		s.samples = s.samples[1:]
	}
	s.samples = append(s.samples, slopeSample{at, retained, safe})
	first := s.samples[0]
	seconds := at.Sub(first.at).Seconds()
	if seconds < slopeMinimum.Seconds() {
		return 0, 0
	}
	growth = float64(retained-first.retained) / seconds
	if safe == nil || first.safe == nil {
		return growth, 0
	}
	if pace := float64(*first.safe-*safe) / seconds; pace > 0 && *safe > 0 {
		// Beyond what a duration holds there is nothing to warn of.
		left = time.Duration(min(float64(*safe)/pace, (1000*time.Hour).Seconds()) * float64(time.Second))
	}
	return growth, left
}
