package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"holdfast/internal/crash"
	"holdfast/test/harness"
)

// runMatrix runs what the options ask for, the variants beside each other.
func runMatrix(ctx context.Context, opts options) (*result, error) {
	fmt.Fprintf(opts.out, "seed %d\n", opts.seed)
	r := newResult(opts.out)
	byVariant := map[*variant][]crashCase{}
	cases := opts.cases
	if cases == nil {
		cases = plan(opts.seed, opts.points, opts.faults)
	}
	for _, c := range cases {
		if matches(c.variant.String(), opts.variants) {
			byVariant[c.variant] = append(byVariant[c.variant], c)
		}
	}
	var mu sync.Mutex
	var failed error
	var running sync.WaitGroup
	for _, v := range variants {
		if len(byVariant[v]) == 0 {
			continue
		}
		running.Go(func() {
			if err := runVariant(ctx, opts, r, v, byVariant[v]); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed = errors.Join(failed, fmt.Errorf("%s: %w", v, err))
			}
		})
	}
	running.Wait()
	return r, errors.Join(failed, context.Cause(ctx))
}

// runVariant runs the cases of one variant, in one world for as long as
// nothing is wrong in it.
func runVariant(ctx context.Context, opts options, r *result, v *variant, cases []crashCase) error {
	var w world
	leave := func() {
		if w == nil {
			return
		}
		w.close()
		r.mu.Lock()
		fmt.Fprintln(r.out, w.numbers())
		r.mu.Unlock()
		w = nil
	}
	defer leave()
	for _, c := range cases {
		if ctx.Err() != nil {
			return nil
		}
		if w == nil {
			var err error
			if w, err = v.open(ctx, worldOptions{options: opts, variant: v}); err != nil {
				return err
			}
		}
		began := time.Now()
		reached, err := c.run(ctx, w)
		r.mu.Lock()
		if reached {
			r.hits[string(c.point)]++
			r.faults[c.fault.name]++
			if c.alive {
				r.alive[c.fault.name]++
			}
		} else {
			r.unreached = append(r.unreached, c.name())
		}
		r.runs++
		fmt.Fprintf(r.out, "%s: %s, %v\n%s", c.name(), map[bool]string{true: "reached", false: "NOT REACHED"}[reached], time.Since(began).Round(time.Millisecond), c.noted)
		r.mu.Unlock()
		r.collect(c.name(), w, err)
		if err != nil { // what follows in this world would only repeat it
			leave()
		}
	}
	return nil
}

// run does one run: the daemon goes to a place, something happens there, and
// then everything has to be well again.
func (c *crashCase) run(ctx context.Context, w world) (reached bool, err error) {
	r := w.common()
	log := filepath.Join(r.dir, strings.Map(func(r rune) rune {
		if strings.ContainsRune(" ,()", r) {
			return '-'
		}
		return r
	}, c.name())+".log")
	_ = os.Remove(log)
	if err := r.stopDaemon(ctx); err != nil {
		return false, err
	}
	armed := map[string]string{}
	if err := w.prepare(ctx, *c, armed); err != nil {
		return false, fmt.Errorf("prepare: %w", err)
	}
	armed["CRASH_AT"], armed["CRASH_LOG"] = string(c.point)+":"+strconv.Itoa(c.visit)+":"+c.action(), log
	there := func() bool {
		text, _ := os.ReadFile(log)
		return strings.Contains(string(text), "acts "+string(c.point))
	}
	outside := slices.Contains(crash.OutsidePoints, c.point)
	if outside {
		armed["CRASH_AT"] = ""
		if there, r.letGo, err = w.holdAnswer(c.point, c.visit); err != nil {
			return false, err
		}
	}
	if err := r.daemon.Restart(armed); err != nil {
		return false, err
	}
	failed, err := c.reach(ctx, w, there)
	reached = err == nil && failed == nil
	if !reached {
		c.noted = r.lastWords(ctx)
	}
	w.unclean()
	if reached && outside {
		err = r.act(c.action())
	}
	if reached && err == nil {
		reached, err = c.hits(ctx, w)
	}
	// Whatever is left of it: the fault ends, and a daemon runs.
	if !reached || err != nil || !c.lives() {
		r.daemon.Kill()
	}
	err = errors.Join(err, r.goOn())
	if err != nil && reached {
		return reached, err
	}
	r.sim.ClearFault("")
	r.sim.Resume()
	r.proxy.Resume()
	if slices.Contains(lastPlaces, c.point) && reached && c.lives() {
		if err := r.ends(ctx); err != nil {
			return reached, err
		}
	}
	if _, ended := r.daemon.ExitCode(); ended {
		if err := r.daemon.Restart(map[string]string{"CRASH_AT": "", "CRASH_LOG": log}); err != nil {
			return reached, err
		}
	}
	if failed != nil {
		return false, failed
	}
	if err := w.flow(ctx); err != nil {
		return reached, err
	}
	return reached, w.settle(ctx)
}

// action is what the daemon does at the place.
func (c *crashCase) action() string {
	switch {
	case c.fault.action != "":
		return c.fault.action
	case c.alive || c.fault.request != "":
		return actStop
	}
	return actKill
}

// lives tells whether the daemon goes on behind the fault.
func (c *crashCase) lives() bool { return c.alive || c.fault.wakes }

// lastPlaces are those of a daemon that was asked to end.
var lastPlaces = []crash.Point{crash.PgShutdown, crash.PgShutdownLastWord, crash.KafkaShutdown}

// reach waits until the daemon is at the place.
func (c *crashCase) reach(ctx context.Context, w world, there func() bool) (failed, err error) {
	provoked := time.Now()
	limit, cancel := context.WithTimeout(ctx, w.common().patience)
	defer cancel()
	err = harness.Eventually(limit, "the daemon reaches "+string(c.point), func(ctx context.Context) (any, bool) {
		if there() {
			return nil, true
		}
		if time.Since(provoked) > 500*time.Millisecond {
			failed = w.provoke(ctx, *c)
			provoked = time.Now() // the daemon is to have some time in between
		}
		return nil, failed != nil
	})
	return failed, err
}
