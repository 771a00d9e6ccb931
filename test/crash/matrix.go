package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"holdfast/test/felderasim"
)

// fault is something that happens when the daemon is at a place.
type fault struct {
	name   string
	action string // of the daemon itself; "" = it is killed
	// before is done before the daemon starts, at when it is at the place.
	before func(r *rig) error
	at     func(ctx context.Context, w world) error
}

// faults are what happens at every place.
var faults = []fault{
	{name: "SIGKILL"},
	{name: "standstill", action: "stop", at: func(ctx context.Context, w world) error {
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
	{name: "destination back from its journal", at: func(_ context.Context, w world) error {
		w.fromJournal()
		return nil
	}},
	{name: "source server killed", at: func(ctx context.Context, w world) error { return w.killSource(ctx) }},
	{name: "half-open network", action: "note", at: func(ctx context.Context, w world) error {
		w.common().proxy.Stall()
		return w.common().standStill(ctx, standstill)
	}},
}

// standstill is longer than the session time-out of the group.
const standstill = 4 * time.Second

// result counts what the oracles of all runs have found.
type result struct {
	points, faults, runs                 int
	lost, torn, regressed, doubleApplied int
	unreached                            []string
	other                                []string
}

func (r *result) green() bool {
	return r.runs > 0 && r.lost+r.torn+r.regressed+r.doubleApplied == 0 && len(r.unreached)+len(r.other) == 0
}

// line is the last line of the matrix.
func (r *result) line() string {
	return fmt.Sprintf("crash matrix: %d points, %d faults, %d runs, lost %d, torn %d, regressed %d, double-applied %d",
		r.points, r.faults, r.runs, r.lost, r.torn, r.regressed, r.doubleApplied)
}

// collect takes what the oracles found in one run.
func (r *result) collect(out io.Writer, name string, w world, err error) {
	f := w.findings()
	r.lost += len(f.early)
	r.torn += len(f.torn)
	r.regressed += len(f.regress) + len(f.back)
	r.doubleApplied += len(f.double)
	r.other = append(r.other, f.invented...)
	for what, list := range map[string][]string{
		"acknowledged too early": f.early, "acknowledged position went back": f.back, "position out of nowhere": f.invented,
		"torn": f.torn, "regressed": f.regress, "applied twice": f.double,
	} {
		for i, text := range list {
			if i == 3 {
				fmt.Fprintf(out, "%s: %s: %d more\n", name, what, len(list)-i)
				break
			}
			fmt.Fprintf(out, "%s: %s: %s\n", name, what, text)
		}
	}
	if err != nil {
		fmt.Fprintf(out, "%s: %v\n", name, err)
		var lost *lostError
		if errors.As(err, &lost) {
			r.lost++
		} else {
			r.other = append(r.other, err.Error())
		}
	}
}
