package feldera

import (
	"context"
	"errors"
	"sync"
)

// errHalted is the cause with which the requests end that Halt cuts.
var errHalted = errors.New("stopped at once, without waiting for the answer")

// uncut knows the requests that are not cut by their caller's context, since
// they change something and their outcome would be open. Only Halt cuts them.
type uncut struct {
	mu      sync.Mutex
	halted  bool
	next    int
	cancels map[int]context.CancelCauseFunc // bounded by the requests in flight
}

// Halt cuts every such request that is in flight and fails every later one.
// It is for a stop that must not wait: whoever runs next settles what was cut.
// It may be called more than once and by any goroutine.
func (c *Client) Halt() {
	c.uncut.mu.Lock()
	defer c.uncut.mu.Unlock()
	c.uncut.halted = true
	for _, cancel := range c.uncut.cancels {
		cancel(errHalted)
	}
}

// unlessHalted gives ctx without its end, but with that of Halt. done must be
// called when the request has ended.
func (c *Client) unlessHalted(ctx context.Context) (own context.Context, done func()) {
	own, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	u := &c.uncut
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.halted {
		cancel(errHalted)
	}
	if u.cancels == nil {
		u.cancels = make(map[int]context.CancelCauseFunc)
	}
	id := u.next
	u.next++
	u.cancels[id] = cancel
	return own, func() {
		u.mu.Lock()
		delete(u.cancels, id)
		u.mu.Unlock()
		cancel(nil)
	}
}
