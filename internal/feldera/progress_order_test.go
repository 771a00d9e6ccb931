package feldera

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/internal/ack"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// A decision holds for the incarnation that was read. The pipeline restarts
// between the decision and the claim: the claim must not land in the new
// process, where it would say that the pipeline holds what it has lost.
func TestClaimGoesToTheIncarnationThatWasReadAlone(t *testing.T) {
	r := newProgressRig(t, felderasim.Options{}, Config{})
	found, _ := r.read(t)
	noted := Noted{Known: true, Epoch: 0, Produced: 0}
	d := Decide(found.Lanes[""], noted, found.Incarnation, "f")
	l, err := r.store.Lane("", &d, 0)
	if err != nil {
		t.Fatal(err)
	}
	r.sim.Crash(core.KeepNothing)
	now := r.sim.Incarnation()
	r.c.Expect(now)
	var changed *IncarnationChanged
	if _, err := r.store.Claim(t.Context(), found.Incarnation, false, l); !errors.As(err, &changed) || changed.Was != found.Incarnation || changed.Now != now {
		t.Errorf("%v", err)
	}
	if n := r.sim.Count(DefaultProgressTable); n != 0 {
		t.Errorf("%d progress rows in a process that nobody has looked into", n)
	}
}

// The progress row goes into a transaction when all of its rows are in: in front
// of them it would be committed alone, by whoever commits in between.
func TestProgressRowIsTheLastInATransaction(t *testing.T) {
	asked := make(chan struct{}, 1)
	r := newProgressRig(t, felderasim.Options{}, Config{Observe: func(endpoint, _ string, _ time.Duration) {
		if endpoint == epCompletion {
			select {
			case asked <- struct{}{}:
			default:
			}
		}
	}})
	l := r.own(t, Noted{}, ProgressFresh)
	tx, err := r.c.Begin(t.Context(), nil, func(context.Context, Intent) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	r.sim.HoldIngest("orders")
	tok, err := r.c.Writer(r.orders).Send(t.Context(), fill(t, r.orders, order("1")))
	if err != nil {
		t.Fatal(err)
	}
	tx.Sent(tok)
	var called atomic.Bool
	done := make(chan error, 1)
	go func() {
		done <- tx.Commit(t.Context(), func(ctx context.Context) (Token, error) {
			called.Store(true)
			return r.store.Write(ctx, Advance{l, 10, []Evidence{{Token: tok, Rung: ack.Ingested, Step: 1}}})
		})
	}()
	// It asks about the rows again and again, and does nothing else.
	for range 5 {
		<-asked
	}
	if called.Load() {
		t.Error("the progress row was written before the rows were in")
	}
	r.sim.ReleaseIngest("orders")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if _, rows := r.read(t); len(rows) != 2 || rows[1] != "1.1 10" {
		t.Error(rows)
	}
}
