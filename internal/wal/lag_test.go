package wal

import (
	"testing"
	"time"
)

// The lag is the age of the oldest WAL that is not dealt with, by the server's
// clock, whatever ours says.
func TestLag(t *testing.T) {
	t.Parallel()
	here := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	server := here.Add(-7 * time.Hour) // our clock is wrong by hours
	l := &lag{now: func() time.Time { return here }}
	pass := func(d time.Duration) { here, server = here.Add(d), server.Add(d) }
	want := func(what string, received, acknowledged time.Duration) {
		t.Helper()
		if got := l.received(); got != received {
			t.Errorf("%s: received lag %v, want %v", what, got, received)
		}
		if got := l.acknowledged(); got != acknowledged {
			t.Errorf("%s: acknowledged lag %v, want %v", what, got, acknowledged)
		}
	}
	l.heard(server)
	want("nothing is known", 0, 0)
	l.reached(100)
	pass(10 * time.Second)
	l.reached(200)
	want("nothing was received", 10*time.Second, 10*time.Second)
	l.moved(100, 0)
	want("the first part was received", 0, 10*time.Second)
	l.committed(150, server.Add(-2*time.Second))
	l.committed(160, server.Add(-1*time.Second))
	l.moved(200, 150)
	pass(3 * time.Second)
	want("one commit is left", 0, 4*time.Second)
	l.moved(200, 200)
	want("all is acknowledged", 0, 0)
	pass(time.Hour)
	want("nothing happens", 0, 0)
}

// A trail stays within its bound over an outage of days, and its first point,
// which the lag is taken from, stays.
func TestTrailIsBounded(t *testing.T) {
	t.Parallel()
	var tr trail
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	const points = 300_000
	for i := range uint64(points) {
		tr.add(i+1, start.Add(time.Duration(i)*time.Second))
		if len(tr.points) > maxTrail {
			t.Fatalf("%d points", len(tr.points))
		}
	}
	end := start.Add(points * time.Second)
	if got := tr.age(end); got != points*time.Second {
		t.Errorf("age %v", got)
	}
	tr.passed(points / 2)
	if got := tr.age(end); got > (points/2)*time.Second || got < (points/2-1000)*time.Second {
		t.Errorf("age %v after half was dealt with", got)
	}
	tr.passed(points)
	if got := tr.age(end); got != 0 {
		t.Errorf("age %v at the end", got)
	}
}

func TestSlope(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	size := func(n int64) *int64 { return &n }
	var s slope
	if growth, left := s.add(at, 0, size(600<<20)); growth != 0 || left != 0 {
		t.Errorf("after one look: %v, %v", growth, left)
	}
	if growth, left := s.add(at.Add(10*time.Second), 10<<20, size(590<<20)); growth != 0 || left != 0 {
		t.Errorf("too early: %v, %v", growth, left)
	}
	if growth, left := s.add(at.Add(60*time.Second), 60<<20, size(540<<20)); growth != 1<<20 || left != 9*time.Minute {
		t.Errorf("1 MiB a second with 540 MiB left: %v, %v", growth, left)
	}
	// The destination has caught up: nothing to warn of.
	if _, left := s.add(at.Add(2*time.Minute), 0, size(600<<20)); left != 0 {
		t.Errorf("%v left of a slot that has caught up", left)
	}
	if growth, left := s.add(at.Add(3*time.Minute), 1<<20, nil); growth <= 0 || left != 0 {
		t.Errorf("without a limit: %v, %v", growth, left)
	}
}
