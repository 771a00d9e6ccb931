package harness

import (
	"context"
	"fmt"
	"testing"
	"time"
)

// lookEvery is how often a condition is looked at: often enough not to be felt
// in a test, seldom enough not to load two cores.
const lookEvery = 20 * time.Millisecond

// Eventually looks at cond until it reports done, and gives up with ctx, or
// after 30 s when ctx has no deadline. cond also gives what it saw; the error of
// a wait that ended too early says what was seen last and how often cond looked.
// cond gets the same deadline and runs on the caller's goroutine.
func Eventually(ctx context.Context, what string, cond func(ctx context.Context) (seen any, done bool)) error {
	ctx, cancel := withDefaultTimeout(ctx, 30*time.Second)
	defer cancel()
	start := time.Now()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var seen any
	for looks := 1; ; looks++ {
		now, done := cond(ctx)
		if done {
			return nil
		}
		// A look that the deadline cut short saw nothing but the deadline.
		if ctx.Err() == nil || seen == nil {
			seen = now
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: not after %s and %d looks; last seen: %v: %w",
				what, time.Since(start).Round(time.Millisecond), looks, seen, context.Cause(ctx))
		}
	}
}

// Await is [Eventually] for tests: it fails the test when cond does not report
// done within the given time.
func Await(tb testing.TB, within time.Duration, what string, cond func(ctx context.Context) (seen any, done bool)) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), within)
	defer cancel()
	if err := Eventually(ctx, what, cond); err != nil {
		tb.Fatal(err)
	}
}
