package main

import (
	"context"
	"time"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// fault is something that happens when the daemon is at a place.
type fault struct {
	name   string
	action string // of the daemon itself; "" = it is killed
	// everywhere: in every variant, not in one of them in turn.
	everywhere bool
	// back: the pipeline crashes and comes back.
	back bool
	// losing: the pipeline loses what it had completed.
	losing bool
	// wakes: the daemon is not killed, it goes on with what it had in its hands.
	wakes bool
	// before is done before the daemon starts, at when it is at the place.
	before func(r *rig) error
	at     func(ctx context.Context, w world) error
}

// standstill is longer than the session time-out of the group.
const standstill = 4 * time.Second

// faults are what happens at every place.
var faults = []fault{
	{name: "SIGKILL", everywhere: true},
	{name: "standstill", action: "stop", wakes: true, at: func(ctx context.Context, w world) error {
		return w.common().standStill(ctx, standstill)
	}},
	{name: "response lost after apply", before: func(r *rig) error {
		_, err := r.sim.Inject(felderasim.Fault{Kind: felderasim.DropResponse, Skip: 1, Count: 2})
		return err
	}},
	{name: "time-out with late apply", before: func(r *rig) error {
		_, err := r.sim.Inject(felderasim.Fault{Kind: felderasim.ApplyLate, Skip: 1, Count: 2, Delay: 300 * time.Millisecond})
		return err
	}},
	{name: "destination back from its journal", back: true, at: destination(core.KeepJournal)},
	{name: "destination back at its last checkpoint", back: true, losing: true, at: destination(core.KeepCheckpoint)},
	{name: "destination back with nothing", back: true, losing: true, at: destination(core.KeepNothing)},
	{name: "source server killed", at: func(ctx context.Context, w world) error { return w.killSource(ctx) }},
	{name: "half-open network", action: "note", at: func(ctx context.Context, w world) error {
		w.common().proxy.Stall()
		return w.common().standStill(ctx, standstill)
	}},
}

func destination(keep core.Keep) func(context.Context, world) error {
	return func(ctx context.Context, w world) error {
		w.crashDestination(ctx, keep)
		return nil
	}
}
