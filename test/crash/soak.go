package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"time"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// soak lets random faults happen to all variants, at no place in particular
// and several at once, for as long as it is told; again and again it lets
// everything come to rest and compares. What it finds wrong is counted as the
// matrix does.
func soak(ctx context.Context, opts options, length time.Duration) (*result, error) {
	fmt.Fprintf(opts.out, "seed %d\n", opts.seed)
	r := newResult(opts.out)
	var mu sync.Mutex
	var failed error
	var running sync.WaitGroup
	for i, v := range variants {
		if !matches(v.String(), opts.variants) {
			continue
		}
		random := rand.New(rand.NewPCG(opts.seed, uint64(i)+100))
		running.Go(func() {
			if err := soakVariant(ctx, opts, r, v, random, length); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed = errors.Join(failed, fmt.Errorf("%s: %w", v, err))
			}
		})
	}
	running.Wait()
	return r, failed
}

func soakVariant(ctx context.Context, opts options, r *result, v *variant, random *rand.Rand, length time.Duration) error {
	w, err := v.open(ctx, worldOptions{options: opts, variant: v})
	if err != nil {
		return err
	}
	defer w.close()
	for end := time.Now().Add(length); time.Now().Before(end) && ctx.Err() == nil; {
		names, err := storm(ctx, w, random)
		if err == nil {
			err = w.settle(ctx)
		}
		if err == nil && (slices.Contains(names, backAtCheckpoint) || slices.Contains(names, backWithNothing)) {
			err = startAnew(ctx, w)
		}
		name := fmt.Sprintf("%s after %q", v, names)
		r.mu.Lock()
		for _, name := range names {
			r.faults[name]++
		}
		r.runs++
		fmt.Fprintln(r.out, name)
		r.mu.Unlock()
		r.collect(name, w, err)
		if err != nil {
			break
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintln(r.out, w.numbers())
	return nil
}

// startAnew starts the daemon anew, without the notices that a loss has left.
func startAnew(ctx context.Context, w world) error {
	r := w.common()
	if err := r.stopDaemon(ctx); err != nil {
		return err
	}
	env := map[string]string{}
	if err := w.prepare(ctx, crashCase{variant: w.variantOf()}, env); err != nil {
		return err
	}
	return r.daemon.Restart(env)
}

const (
	anotherMember    = "another member"
	backAtCheckpoint = "destination back at its last checkpoint"
	backWithNothing  = "destination back with nothing"
)

// weather are the faults of a storm. Each begins at once and ends by itself or
// by clear.
var weather = []struct {
	name string
	do   func(ctx context.Context, w world, random *rand.Rand) error
}{
	{"SIGKILL", func(_ context.Context, w world, _ *rand.Rand) error {
		w.common().daemon.Kill()
		return w.common().daemon.Restart(nil)
	}},
	{"SIGTERM", func(ctx context.Context, w world, _ *rand.Rand) error {
		if err := w.common().stopDaemon(ctx); err != nil {
			return err
		}
		return w.common().daemon.Restart(nil)
	}},
	{"standstill", func(ctx context.Context, w world, random *rand.Rand) error {
		if err := w.common().daemon.Signal(syscall.SIGSTOP); err != nil {
			return err
		}
		return w.common().standStill(ctx, time.Duration(random.IntN(5000))*time.Millisecond)
	}},
	{"connections cut", func(_ context.Context, w world, _ *rand.Rand) error {
		w.common().proxy.Cut()
		return nil
	}},
	{"half-open network", func(ctx context.Context, w world, random *rand.Rand) error {
		r := w.common()
		r.proxy.Stall()
		defer r.proxy.Resume()
		return r.standStill(ctx, time.Duration(random.IntN(6000))*time.Millisecond)
	}},
	{"source server killed", func(ctx context.Context, w world, _ *rand.Rand) error { return w.killSource(ctx) }},
	{"destination back from its journal", func(ctx context.Context, w world, _ *rand.Rand) error {
		w.crashDestination(ctx, core.KeepJournal)
		return nil
	}},
	{backAtCheckpoint, func(ctx context.Context, w world, _ *rand.Rand) error {
		w.crashDestination(ctx, core.KeepCheckpoint)
		return nil
	}},
	{backWithNothing, func(ctx context.Context, w world, _ *rand.Rand) error {
		w.crashDestination(ctx, core.KeepNothing)
		return nil
	}},
	{"completion frozen", func(ctx context.Context, w world, random *rand.Rand) error {
		r := w.common()
		r.sim.HoldCompletion()
		defer r.sim.ReleaseCompletion()
		return r.standStill(ctx, time.Duration(random.IntN(3000))*time.Millisecond)
	}},
	{"pipeline paused", func(ctx context.Context, w world, random *rand.Rand) error {
		r := w.common()
		r.sim.Pause()
		defer r.sim.Resume()
		return r.standStill(ctx, time.Duration(random.IntN(3000))*time.Millisecond)
	}},
	{anotherMember, func(ctx context.Context, w world, random *rand.Rand) error {
		return w.otherMember(ctx, random.IntN(2) == 0)
	}},
	{"calls fail", func(_ context.Context, w world, random *rand.Rand) error {
		for range 1 + random.IntN(4) {
			f := felderasim.Fault{
				Endpoint: calls[random.IntN(len(calls))], Kind: callFaults[random.IntN(len(callFaults))],
				Skip: random.IntN(4), Count: 1 + random.IntN(2), Delay: time.Duration(random.IntN(400)) * time.Millisecond,
			}
			if _, err := w.common().sim.Inject(f); err != nil {
				return err
			}
		}
		return nil
	}},
	{"requests fail", func(_ context.Context, w world, random *rand.Rand) error {
		for range 1 + random.IntN(4) {
			f := felderasim.Fault{
				Kind: requestFaults[random.IntN(len(requestFaults))], Skip: random.IntN(10), Count: 1 + random.IntN(2),
				Bytes: int64(random.IntN(300)), Delay: time.Duration(random.IntN(400)) * time.Millisecond,
			}
			if f.Kind == felderasim.Answer || f.Kind == felderasim.AnswerAfter {
				f.Status, f.Code = 500, "DbspPanic"
			}
			if _, err := w.common().sim.Inject(f); err != nil {
				return err
			}
		}
		return nil
	}},
}

var requestFaults = []felderasim.FaultKind{
	felderasim.Delay, felderasim.DropRequest, felderasim.DropResponse, felderasim.UnavailableBefore, felderasim.UnavailableAfter,
	felderasim.ApplyLate, felderasim.CutBody, felderasim.TooMany, felderasim.Answer, felderasim.AnswerAfter, felderasim.AppliedTwice,
}

// calls are what the daemons ask of a pipeline beside the rows that they send, and
// callFaults is what goes wrong with that.
var (
	calls      = []string{"start_transaction", "commit_transaction", "completion_status", "stats", "query", "checkpoint", "checkpoint_status"}
	callFaults = []felderasim.FaultKind{
		felderasim.Delay, felderasim.DropRequest, felderasim.DropResponse, felderasim.UnavailableBefore, felderasim.UnavailableAfter,
		felderasim.AppliedTwice,
	}
)

// storm lets a few faults happen, one after the other with random pauses.
func storm(ctx context.Context, w world, random *rand.Rand) (names []string, err error) {
	r := w.common()
	for range 1 + random.IntN(5) {
		f := weather[random.IntN(len(weather))]
		if f.name == anotherMember && w.variantOf().daemon != "kafkasink" {
			continue // a slot has one reader
		}
		if v := w.variantOf(); (f.name == backAtCheckpoint || f.name == backWithNothing) && v.daemon == "kafkasink" && !v.progress {
			continue // it cannot tell what a pipeline has lost
		}
		names = append(names, f.name)
		w.unclean()
		if err := f.do(ctx, w, random); err != nil {
			return names, fmt.Errorf("%s: %w", f.name, err)
		}
		if err := r.standStill(ctx, time.Duration(random.IntN(1500))*time.Millisecond); err != nil {
			return names, err
		}
	}
	r.sim.ClearFault("")
	r.sim.Resume()
	r.sim.ReleaseCompletion()
	r.proxy.Resume()
	return names, nil
}
