package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"
)

// clauseTime bounds one clause: two of the manager's time-outs and room.
const clauseTime = 2 * time.Minute

// summary is what a run comes to.
type summary struct{ passed, failed, untestable int }

// String is the last line of the output.
func (s summary) String() string {
	return fmt.Sprintf("contract: %d clauses, %d passed, %d failed, %d untestable here",
		s.passed+s.failed+s.untestable, s.passed, s.failed, s.untestable)
}

// runner runs clauses against one target, one after the other.
type runner struct {
	target target
	out    io.Writer
	// shared is the world of the clauses that disturb nothing. With a real
	// target it is everybody's.
	shared *world
	// front, where it is set, is put between the clauses and the simulator. It
	// gives the address to use in place of upstream, and what ends it.
	front func(upstream string) (url string, end func())
	// hurry gives up soon on what must come: for a server that is known to
	// withhold it.
	hurry bool
}

func newRunner(ctx context.Context, t target, out io.Writer) (*runner, error) {
	r := &runner{target: t, out: out}
	if t.url == "" {
		return r, nil
	}
	w, err := reach(ctx, t)
	if err != nil {
		return nil, err
	}
	r.shared = w
	return r, nil
}

func (r *runner) close() {
	if r.shared != nil {
		r.shared.close()
	}
}

// run runs the clauses and prints one line for each.
func (r *runner) run(ctx context.Context, list []clause) summary {
	var s summary
	for _, c := range list {
		w, err := r.world(ctx, c)
		if err != nil {
			s.failed++
			r.printf("FAIL %s %s: expected a simulator, got %v\n", c.id, c.says, err)
			continue
		}
		if r.hurry {
			w.patience = time.Second
		}
		if missing := c.needs &^ w.has; missing != 0 {
			s.untestable++
			if w.passing {
				w.close()
			}
			r.printf("n/a  %s %s: needs %s\n", c.id, c.says, missing)
			continue
		}
		why := prove(ctx, w, c)
		if w.passing {
			w.close()
		}
		if why != "" {
			s.failed++
			r.printf("FAIL %s %s: %s\n", c.id, c.says, why)
			continue
		}
		s.passed++
		r.printf("ok   %s %s\n", c.id, c.says)
	}
	return s
}

func (r *runner) printf(format string, args ...any) { _, _ = fmt.Fprintf(r.out, format, args...) }

// world gives the world a clause runs in.
func (r *runner) world(ctx context.Context, c clause) (*world, error) {
	if r.target.url != "" {
		return r.shared, nil
	}
	if c.sim != nil || c.needs&disturbing != 0 {
		w, err := simulate(ctx, c.sim, r.front)
		if err == nil {
			w.passing = true
		}
		return w, err
	}
	if r.shared == nil {
		w, err := simulate(ctx, nil, r.front)
		if err != nil {
			return nil, err
		}
		r.shared = w
	}
	return r.shared, nil
}

// errOver ends what a clause has left running.
var errOver = errors.New("the clause is over")

// prove runs one clause and gives why it does not hold, "" if it does. The
// clause runs in a goroutine of its own, so that a failure can end it from any
// depth; what it started has ended when prove returns.
func prove(ctx context.Context, w *world, c clause) string {
	ctx, cancel := context.WithCancelCause(ctx)
	timed, stop := context.WithTimeoutCause(ctx, clauseTime, fmt.Errorf("no end after %s", clauseTime))
	defer stop()
	p := newProbe(timed, w)
	var done sync.WaitGroup
	done.Go(func() {
		// Cleanups run also after a failure, each in its own turn: one that
		// fails itself must not keep the others from running.
		defer p.cleanUp()
		defer func() {
			if v := recover(); v != nil {
				p.fail(fmt.Sprintf("expected no panic, got %v at %s", v, firstLine(string(debug.Stack()))))
			}
		}()
		c.run(p)
	})
	done.Wait()
	cancel(errOver)
	p.owned.Wait()
	for _, f := range p.closers {
		f()
	}
	return p.why()
}

// firstLine gives the line of a stack where the panic arose.
func firstLine(stack string) string {
	for line := range strings.Lines(stack) {
		if strings.Contains(line, "/test/contract/") && !strings.Contains(line, "runner.go") {
			return strings.TrimSpace(line)
		}
	}
	return "an unknown place"
}

// failf ends the clause as broken. It does not return.
func (p *probe) failf(format string, args ...any) {
	p.fail(fmt.Sprintf(format, args...))
	runtime.Goexit()
}
