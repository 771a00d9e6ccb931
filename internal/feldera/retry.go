package feldera

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v4"
)

// Retry tells that something is about to be tried again; [Config.OnRetry]
// gets it.
type Retry struct {
	// What is being tried again: `write table "orders"`, "read completion", ….
	What string
	// Attempt counts the failed attempts, from 1.
	Attempt int
	// Wait is how long the next attempt is held back.
	Wait time.Duration
	// Err is why the last attempt did not do.
	Err error
	// Unknown counts, for a write, its requests in a row whose outcome was
	// unknown although the pipeline was seen running at once afterwards: an
	// outage of the pipeline is none, a request that it cannot take in time is
	// one.
	Unknown int
}

// retrier paces the attempts of one operation: exponential waits with jitter,
// a cap, no end, and the last reason kept. It belongs to one goroutine.
type retrier struct {
	c       *Client
	what    string
	back    *backoff.ExponentialBackOff
	attempt int
	last    error
	unknown int
}

func (c *Client) retrier(what string) *retrier {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval = c.cfg.BackoffInitial
	b.RandomizationFactor = 0.5
	// The jitter is added to the interval: with this cap it still has room
	// below BackoffMax, so that clients which failed together part again.
	b.MaxInterval = c.cfg.BackoffMax * 2 / 3
	b.MaxElapsedTime = 0 // the library's default gives up after a quarter of an hour
	b.Reset()
	return &retrier{c: c, what: what, back: b}
}

// wait reports err and holds the caller back. It returns an error only when
// ctx ended: then with the reason of the last attempt joined.
func (r *retrier) wait(ctx context.Context, err error) error {
	pause := min(r.back.NextBackOff(), r.c.cfg.BackoffMax)
	var e *Error
	if errors.As(err, &e) && e.RetryAfter > pause {
		pause = min(e.RetryAfter, maxRetryAfter)
	}
	return r.pause(ctx, err, pause)
}

// pause is wait with a given length.
func (r *retrier) pause(ctx context.Context, err error, pause time.Duration) error {
	if ctx.Err() != nil {
		// err is most likely the end of ctx itself, seen by a request that it
		// cut: the reason before it says more.
		if r.last == nil {
			r.last = err
		}
		return r.ended(ctx)
	}
	r.attempt++
	r.last = err
	if r.c.cfg.OnRetry != nil {
		r.c.cfg.OnRetry(Retry{What: r.what, Attempt: r.attempt, Wait: pause, Err: err, Unknown: r.unknown})
	}
	if !sleep(ctx, pause) {
		return r.ended(ctx)
	}
	return nil
}

// ended is the error for a context that ended between two attempts.
func (r *retrier) ended(ctx context.Context) error {
	err := context.Cause(ctx)
	if r.last != nil {
		err = errors.Join(err, r.last)
	}
	return fmt.Errorf("%s: %w", r.what, err)
}

// maxRetryAfter caps what a server may ask for by Retry-After.
const maxRetryAfter = time.Minute

// sleep waits and says whether the time passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	if ctx.Err() != nil {
		return false
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
