package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"holdfast/internal/crash"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// patience is how long the matrix waits for something that must happen.
const patience = 2 * time.Minute

// rig is one daemon with what every world has around it. It stays warm over
// many runs: writers go on writing, and the taps go on listening.
type rig struct {
	dir    string
	sim    *felderasim.Sim
	proxy  *harness.Proxy // between the daemon and its source
	daemon *harness.Daemon
	gate   gate
	// letGo gives the daemon the answer for which it waits in a place that the
	// harness holds; nil where there is none.
	letGo func()
	// patience bounds each wait for something that must happen.
	patience time.Duration

	stopWriters context.CancelFunc
	writers     sync.WaitGroup
}

// world is what differs between the two daemons.
type world interface {
	common() *rig
	// killSource crashes the source server and brings it up again.
	killSource(ctx context.Context) error
	// crashDestination crashes the pipeline and brings it up with what it keeps.
	crashDestination(ctx context.Context, keep core.Keep)
	// unclean tells the oracle that the daemon ends without order, or that evidence
	// which it has may be worth nothing any more.
	unclean()
	// alone ends every other member.
	alone()
	// holdAnswer holds the n-th answer for which the daemon waits in one of
	// crash.OutsidePoints; there tells whether it does, letGo gives the answer.
	holdAnswer(p crash.Point, n int) (there func() bool, letGo func(), err error)
	// prepare is called before each run, while no daemon runs, and sees to it
	// that the next one comes to the place of the run; it may add to the
	// daemon's configuration.
	prepare(ctx context.Context, c crashCase, env map[string]string) error
	// provoke makes the daemon pass places that a steady stream does not.
	provoke(ctx context.Context, c crashCase) error
	// flow waits until the daemon acknowledges again while the writers write.
	flow(ctx context.Context) error
	// settle holds the writers, waits until everything is acknowledged
	// (whatever happened before, it has to end), and compares the two sides.
	settle(ctx context.Context) error
	// otherMember lets another process that shares the work come, or go, in order
	// or not, if there can be one.
	otherMember(ctx context.Context, inOrder bool) error
	// rest waits until everything is acknowledged. The writers are held.
	rest(ctx context.Context) error
	// compareNow compares the two sides, which are at rest.
	compareNow(ctx context.Context) error
	// wrong tells whether something was found wrong since the last findings.
	wrong() bool
	variantOf() *variant
	// findings gives what the taps and the oracle have found since the last
	// call.
	findings() findings
	// numbers says how much was looked at.
	numbers() string
	close()
}

// findings are what is wrong, by kind.
type findings struct {
	early, back, invented []string // acknowledgements
	torn, regress, double []string // states of the destination
	// expected counts what is not promised, by name.
	expected map[string]int
	healed   int // offsets that went back on purpose
}

// worldOptions say what a world is like.
type worldOptions struct {
	options

	variant *variant
	// tags and env are of the build and of the daemon, beside those of every
	// world.
	tags string
	env  map[string]string
	// patience is for worlds that are expected to fail; 0 = that of the matrix.
	patience time.Duration
}

// patienceOr gives how long a world waits for what must happen.
func (o *worldOptions) patienceOr() time.Duration { return cmp.Or(o.patience, patience) }

// random gives the randomness of a world's writers.
func (o *worldOptions) random() *rand.Rand {
	h := fnv.New64a()
	_, _ = h.Write([]byte(o.variant.String()))
	return rand.New(rand.NewPCG(o.seed, h.Sum64()))
}

// daemonEnv adds what the variant and the options say to a configuration.
func (o *worldOptions) daemonEnv(env map[string]string) map[string]string {
	maps.Copy(env, o.variant.settings)
	maps.Copy(env, o.env)
	return env
}

// build gives the daemon's program, with its places in it.
func (o *worldOptions) build(ctx context.Context) (string, error) {
	return harness.Build(ctx, "./cmd/"+o.variant.daemon, harness.BuildOptions{Tags: strings.Trim("crashpoints,"+o.tags, ",")})
}

func (r *rig) common() *rig { return r }

// write runs a writer until the world is closed.
func (r *rig) write(ctx context.Context, write func(context.Context)) {
	if r.stopWriters == nil {
		panic("write before writing")
	}
	r.writers.Go(func() { write(ctx) })
}

func (r *rig) close() {
	if r.stopWriters != nil {
		r.stopWriters()
		r.writers.Wait()
	}
	if r.daemon != nil {
		r.daemon.Close()
	}
	if r.proxy != nil {
		r.proxy.Close()
	}
	if r.sim != nil {
		_ = r.sim.Close()
	}
}

// terminate asks a daemon that is at work to stop. One that has stopped without
// coming to the place that it was to come to is started again.
func (r *rig) terminate(ctx context.Context) error {
	if _, ended := r.daemon.ExitCode(); ended {
		return r.daemon.Restart(nil)
	}
	if status, _, err := r.daemon.Get(ctx, "/readyz"); err != nil || status != http.StatusOK {
		return nil //nolint:nilerr // not up yet, or stopping already
	}
	return r.daemon.Terminate()
}

func (r *rig) ready(ctx context.Context) error {
	limit, cancel := context.WithTimeout(ctx, r.patience)
	defer cancel()
	return r.daemon.WaitHealthy(limit)
}

// enough is how many acknowledgements make a flow.
const enough = 3

// flow waits for a number of acknowledgements, as counted by moved.
func (r *rig) flow(ctx context.Context, moved func() int, enough int) error {
	limit, cancel := context.WithTimeout(ctx, r.patience)
	defer cancel()
	from := moved()
	err := r.eventually(limit, "acknowledgements after the fault, under load", func(context.Context) (any, bool) {
		n := moved() - from
		return n, n >= enough
	})
	if err != nil {
		return r.noProgress(ctx, err)
	}
	return nil
}

// eventually is harness.Eventually for what a daemon does: it ends early where
// the daemon has ended by itself.
func (r *rig) eventually(ctx context.Context, what string, cond func(context.Context) (any, bool)) error {
	var gone error
	err := harness.Eventually(ctx, what, func(ctx context.Context) (any, bool) {
		seen, done := cond(ctx)
		if code, ended := r.daemon.ExitCode(); ended && !done {
			gone = fmt.Errorf("wait for %s: the daemon has ended by itself, with code %d; last seen: %v", what, code, seen)
		}
		return seen, done || gone != nil
	})
	return cmp.Or(gone, err)
}

// noProgress adds what the daemon says to an error.
func (r *rig) noProgress(ctx context.Context, err error) error {
	_, body, errHealth := r.daemon.Health(ctx)
	if errHealth != nil {
		body = []byte(errHealth.Error())
	}
	return fmt.Errorf("no progress after the fault: %w; health: %s", err, body)
}

// lastWords gives what the daemon says of itself, and its last lines.
func (r *rig) lastWords(ctx context.Context) string {
	_, body, err := r.daemon.Health(ctx)
	return fmt.Sprintf("  health: %s %v\n  %s\n", bytes.TrimSpace(body), err, strings.Join(r.daemon.Log().Tail(25), "\n  "))
}

// gate lets writers be held between transactions.
type gate struct{ mu sync.RWMutex }

// hold waits until no writer is in a transaction and keeps them out; the
// returned function lets them go on.
func (g *gate) hold() (release func()) {
	g.mu.Lock()
	return g.mu.Unlock
}

func (g *gate) enter(ctx context.Context) bool {
	g.mu.RLock()
	if ctx.Err() != nil {
		g.mu.RUnlock()
		return false
	}
	return true
}

func (g *gate) leave() { g.mu.RUnlock() }

// lostError is a difference between the two sides at rest.
type lostError struct{ what string }

func (e *lostError) Error() string { return "the two sides differ at rest: " + e.what }

// stopDaemon ends the daemon in order, if it can: what follows does not begin
// with an unclean end that nobody meant.
func (r *rig) stopDaemon(ctx context.Context) error {
	if _, ended := r.daemon.ExitCode(); ended {
		return nil
	}
	if err := r.daemon.Terminate(); err != nil {
		return err
	}
	return r.ends(ctx)
}

// ends waits for the end of a daemon that was asked to stop.
func (r *rig) ends(ctx context.Context) error {
	limit, cancel := context.WithTimeout(ctx, r.patience)
	defer cancel()
	if _, err := r.daemon.Wait(limit); err != nil {
		return fmt.Errorf("a daemon that was asked to stop goes on: %w", err)
	}
	return nil
}

// goOn lets a daemon go on that stands still in a place. One that has ended is
// left alone.
func (r *rig) goOn() error {
	if r.letGo != nil {
		r.letGo()
		r.letGo = nil
	}
	return r.daemon.Signal(syscall.SIGCONT)
}

// act does from outside what a place does when it is reached.
func (r *rig) act(action string) error {
	switch action {
	case actKill:
		r.daemon.Kill()
	case actStop:
		return r.daemon.Signal(syscall.SIGSTOP)
	}
	return nil
}

// What a daemon does at its place, as internal/crash names it.
const (
	actKill = "kill"
	actStop = "stop"
	actNote = "note"
)

// standStill lets things be as they are for a while, and wakes up a daemon
// that stopped itself.
func (r *rig) standStill(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return ctx.Err()
	}
	return r.daemon.Signal(syscall.SIGCONT)
}
