package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"holdfast/internal/crash"
	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// patience bounds each wait of the matrix for something that must happen.
const patience = 60 * time.Second

// rig is one daemon with what every world has around it. It stays warm over
// many runs: writers go on writing, and the taps go on listening.
type rig struct {
	dir    string
	sim    *felderasim.Sim
	proxy  *harness.Proxy // between the daemon and its source
	daemon *harness.Daemon
	gate   gate
	random *rand.Rand

	terminated  bool // the daemon of this run was asked to stop: a second signal would be another thing
	stopWriters context.CancelFunc
	writers     sync.WaitGroup
}

// world is what differs between the two daemons.
type world interface {
	common() *rig
	// killSource crashes the source server and brings it up again.
	killSource(ctx context.Context) error
	// fromJournal crashes the pipeline and brings it up from its journal.
	fromJournal()
	// provoke makes the daemon pass places that a steady stream does not.
	provoke(ctx context.Context, p crash.Point) error
	// settle holds the writers, waits until everything is acknowledged
	// (whatever happened before, it has to end), and compares the two sides.
	settle(ctx context.Context) error
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

// terminate asks the daemon to stop, once a run.
func (r *rig) terminate() error {
	if r.terminated {
		return nil
	}
	r.terminated = true
	return r.daemon.Terminate()
}

func (r *rig) ready(ctx context.Context) error {
	limit, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return r.daemon.WaitHealthy(limit)
}

// noProgress adds what the daemon says to an error.
func (r *rig) noProgress(ctx context.Context, err error) error {
	_, body, errHealth := r.daemon.Health(ctx)
	if errHealth != nil {
		body = []byte(errHealth.Error())
	}
	return fmt.Errorf("no progress after the fault: %w; health: %s", err, body)
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

// crashCase is one run: a fault at a place.
type crashCase struct {
	point crash.Point
	fault fault
}

// run does one run: the daemon goes to a place, something happens there, and
// then everything has to be well again.
func (c crashCase) run(ctx context.Context, w world) (reached bool, err error) {
	r := w.common()
	log := filepath.Join(r.dir, strings.ReplaceAll(fmt.Sprintf("%s-%s.log", c.point, c.fault.name), " ", "-"))
	_ = os.Remove(log)
	visit := 1
	if often(c.point) {
		visit += r.random.IntN(6)
	}
	action := "kill"
	if c.fault.action != "" {
		action = c.fault.action
	}
	r.daemon.Kill()
	if c.fault.before != nil {
		if err := c.fault.before(r); err != nil {
			return false, err
		}
	}
	armed := map[string]string{"CRASH_AT": string(c.point) + ":" + strconv.Itoa(visit) + ":" + action, "CRASH_LOG": log}
	r.terminated = false
	if err := r.daemon.Restart(armed); err != nil {
		return false, err
	}
	provoked := time.Now()
	limit, cancel := context.WithTimeout(ctx, patience/2)
	defer cancel()
	var failed error
	err = harness.Eventually(limit, "the daemon reaches "+string(c.point), func(ctx context.Context) (any, bool) {
		text, _ := os.ReadFile(log)
		if strings.Contains(string(text), "acts "+string(c.point)) {
			return nil, true
		}
		if time.Since(provoked) > 500*time.Millisecond {
			provoked = time.Now()
			failed = w.provoke(ctx, c.point)
		}
		return string(text), failed != nil
	})
	reached = err == nil && failed == nil
	if reached && c.fault.at != nil {
		if err := c.fault.at(ctx, w); err != nil {
			return reached, err
		}
	}
	// Whatever is left of it: the fault ends, and a daemon runs.
	r.daemon.Kill()
	r.sim.ClearFault("")
	r.sim.Resume()
	r.proxy.Resume()
	if err := r.daemon.Restart(map[string]string{"CRASH_AT": "", "CRASH_LOG": log}); err != nil {
		return reached, err
	}
	if failed != nil {
		return false, failed
	}
	return reached, w.settle(ctx)
}

// often tells whether a steady stream passes the place again and again, so
// that a later visit than the first is worth a try.
func often(p crash.Point) bool {
	switch p {
	case crash.PgShutdown, crash.PgShutdownLastWord, crash.PgReconnect,
		crash.KafkaShutdown, crash.KafkaRevoke, crash.KafkaLost, crash.KafkaDrain, crash.KafkaBeforeDLQ, crash.KafkaAfterDLQ:
		return false
	}
	return true
}

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
