package main

import (
	"context"
	"slices"
	"time"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// fault is something that happens when the daemon is at a place.
type fault struct {
	name   string
	action string // of the daemon itself; "" = it is killed
	// everywhere: in every variant, not in one of them in turn.
	everywhere bool
	// both: in half of the runs the daemon is not killed, it meets the fault in the
	// place where it is and goes on.
	both bool
	// request goes wrong with the next requests of the daemon, which goes on from
	// the place until that has happened.
	request felderasim.FaultKind
	// back: the pipeline crashes and comes back.
	back bool
	// losing: the pipeline loses what it had completed.
	losing bool
	// wakes: the daemon is not killed, it goes on with what it had in its hands.
	wakes bool
	// at is done when the daemon is at the place; alive is done instead where it is
	// not killed there, nil for the same.
	at    func(ctx context.Context, w world) error
	alive func(w world)
}

// standstill is longer than the session time-out of the group.
const standstill = 4 * time.Second

// faults are what happens at every place.
var faults = []fault{
	{name: "SIGKILL", everywhere: true},
	{name: "standstill", action: actStop, wakes: true, at: func(ctx context.Context, w world) error {
		return w.common().standStill(ctx, standstill)
	}},
	{name: "response lost after apply", both: true, request: felderasim.DropResponse},
	{name: "time-out with late apply", both: true, request: felderasim.ApplyLate},
	{name: "destination back from its journal", both: true, back: true, at: destination(core.KeepJournal)},
	{name: "destination back at its last checkpoint", both: true, back: true, losing: true, at: destination(core.KeepCheckpoint)},
	{name: "destination back with nothing", both: true, back: true, losing: true, at: destination(core.KeepNothing)},
	{name: "source server killed", both: true, at: func(ctx context.Context, w world) error { return w.killSource(ctx) }},
	{name: "half-open network", action: actNote, both: true, at: func(ctx context.Context, w world) error {
		w.common().proxy.Stall()
		return w.common().standStill(ctx, standstill)
	}, alive: func(w world) {
		w.common().proxy.Freeze() // nothing tells the daemon but the silence
	}},
}

func destination(keep core.Keep) func(context.Context, world) error {
	return func(ctx context.Context, w world) error {
		w.crashDestination(ctx, keep)
		return nil
	}
}

// hits lets the fault happen to a daemon that is at a place, and gives false
// where it did not happen.
func (c *crashCase) hits(ctx context.Context, w world) (bool, error) {
	f := c.fault
	switch {
	case c.alive && f.alive != nil:
		f.alive(w)
		return true, nil
	case f.request != "":
		return w.common().failRequests(ctx, w, f.request)
	case f.at != nil:
		return true, f.at(ctx, w)
	}
	return true, nil
}

// lateBy is when a request that was given up is applied.
const lateBy = 300 * time.Millisecond

// failRequests lets the next requests of the daemon go wrong, and lets it go on
// from the place until one of them has.
func (r *rig) failRequests(ctx context.Context, w world, kind felderasim.FaultKind) (bool, error) {
	w.alone() // another member has requests too
	f := felderasim.Fault{Kind: kind, Count: 2}
	if kind == felderasim.ApplyLate {
		f.Delay = lateBy
	}
	from := r.sim.Counters().Requests
	id, err := r.sim.Inject(f)
	if err != nil {
		return false, err
	}
	if err := r.goOn(); err != nil {
		return false, err
	}
	limit, cancel := context.WithTimeout(ctx, r.patience)
	defer cancel()
	err = harness.Eventually(limit, "a request of the daemon goes wrong", func(context.Context) (any, bool) {
		return nil, r.sim.FaultHits(id) > 0 && r.answered(kind, from)
	})
	return err == nil, context.Cause(ctx)
}

// answered tells whether a request behind the first ones that went wrong has had
// the answer that it gets, or none.
func (r *rig) answered(kind felderasim.FaultKind, from int64) bool {
	return slices.ContainsFunc(r.sim.Requests(), func(q felderasim.Request) bool {
		return q.Seq > from && q.Done && slices.Contains(q.Faults, string(kind))
	})
}
