package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"syscall"
	"time"

	"holdfast/test/felderasim"
)

// soak lets random faults happen to both daemons, at no place in particular
// and several at once, for as long as it is told; again and again it lets
// everything come to rest and compares. What it finds wrong is counted as the
// matrix does.
func soak(ctx context.Context, opts options, length time.Duration) (*result, error) {
	fmt.Fprintf(opts.out, "seed %d\n", opts.seed)
	opts.out = &oneAtATime{w: opts.out}
	var mu sync.Mutex
	r := &result{points: 0}
	kinds := map[string]bool{}
	var failed error
	var sides sync.WaitGroup
	for i, open := range []func(context.Context, string, *rand.Rand) (world, error){openBank, openCounters} {
		random := rand.New(rand.NewPCG(opts.seed, uint64(i)+100))
		sides.Go(func() {
			w, err := open(ctx, opts.dir, random)
			if err != nil {
				mu.Lock()
				failed = err
				mu.Unlock()
				return
			}
			defer w.close()
			for end := time.Now().Add(length); time.Now().Before(end) && ctx.Err() == nil; {
				names, err := storm(ctx, w, random)
				if err == nil {
					err = w.settle(ctx)
				}
				mu.Lock()
				for _, name := range names {
					kinds[name] = true
				}
				r.runs++
				r.collect(opts.out, fmt.Sprintf("after %q", names), w, err)
				mu.Unlock()
				if err != nil {
					return
				}
			}
			fmt.Fprintln(opts.out, w.numbers())
		})
	}
	sides.Wait()
	r.faults = len(kinds)
	return r, failed
}

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
		d := w.common().daemon
		if err := d.Terminate(); err != nil {
			return err
		}
		limit, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if _, err := d.Wait(limit); err != nil {
			return fmt.Errorf("a daemon that was asked to stop goes on: %w", err)
		}
		return d.Restart(nil)
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
	{"destination back from its journal", func(_ context.Context, w world, _ *rand.Rand) error {
		w.fromJournal()
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

// storm lets a few faults happen, one after the other with random pauses.
func storm(ctx context.Context, w world, random *rand.Rand) (names []string, err error) {
	r := w.common()
	for range 1 + random.IntN(5) {
		f := weather[random.IntN(len(weather))]
		names = append(names, f.name)
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

// oneAtATime lets several goroutines write lines.
type oneAtATime struct {
	mu sync.Mutex
	w  io.Writer
}

func (o *oneAtATime) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.w.Write(p)
}
