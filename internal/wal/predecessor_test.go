package wal

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/internal/feldera"
)

// An attempt that ended without knowing how its request to begin or to commit
// ended leaves the wait for it to the next one, however that ends itself; other
// errors leave nothing.
func TestRequestsAreOutlived(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := testSource(t, noStore{})
		beats := 0
		s.cfg.Beat = func() { beats++ }
		s.cfg.Report = func(Status) {}
		a := &attempt{s: s}
		d := &deliverer{a: a, cfg: &s.cfg}
		life := s.cfg.Pipeline.RequestLifetime()
		waits := func(want time.Duration) {
			t.Helper()
			began := time.Now()
			if err := d.outliveRequests(t.Context()); err != nil {
				t.Error(err)
			}
			if took := time.Since(began); took != want {
				t.Errorf("it waits %v, want %v", took, want)
			}
		}
		waits(0)
		d.noteOpen(nil)
		d.noteOpen(errors.New("no answer to a look"))
		waits(0)
		d.noteOpen(fmt.Errorf("commit: %w", feldera.ErrOutcomeOpen))
		d.noteOpen(errors.New("what came after it"))
		waits(life)
		if beats < int(life/idleTurn) {
			t.Errorf("the watchdog was fed %d times", beats)
		}
		waits(0)
	})
}
