package feldera

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// ownersRig is a pipeline with a progress table and two tables.
func ownersRig(t *testing.T) (*progressRig, func(name string) *Owners) {
	t.Helper()
	r := newProgressRig(t, felderasim.Options{}, Config{})
	return r, func(name string) *Owners {
		t.Helper()
		s, err := r.c.Describe(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		o, err := r.c.Owners(s, DefaultProgressTable, name)
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
}

// ownersOf gives the owners of tables as "table owner".
func ownersOf(t *testing.T, o *Owners, tables ...*Table) []string {
	t.Helper()
	list, err := o.List(t.Context(), tables...)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, w := range list {
		text := w.Table + " " + w.Name
		if w.Retracts {
			text += " retracts"
		}
		if w.Since.IsZero() || time.Since(w.Since) > time.Hour {
			t.Errorf("%s since %v", text, w.Since)
		}
		out = append(out, text)
	}
	return out
}

func refusedBy(t *testing.T, err error, parts ...string) {
	t.Helper()
	refused, ok := errors.AsType[*decode.Refusal](err)
	if !ok || refused.Reason != decode.ReasonSetup {
		t.Fatalf("expected a refusal, got %v", err)
	}
	for _, part := range parts {
		if !strings.Contains(refused.Error()+refused.Do, part) {
			t.Errorf("it does not say %q: %v %s", part, refused, refused.Do)
		}
	}
}

func TestOwnersClaim(t *testing.T) {
	r, open := ownersRig(t)
	a, b := open(PgsourceOwner("7311", "a")), open(KafkasinkOwner("c'l", "b"))
	for range 2 { // the second time it says nothing new
		if err := a.Claim(t.Context(), nil, "", r.orders); err != nil {
			t.Fatal(err)
		}
	}
	written := r.sim.Counters().Records
	if err := a.Claim(t.Context(), nil, "", r.orders); err != nil || r.sim.Counters().Records != written {
		t.Errorf("%v, %d records after %d", err, r.sim.Counters().Records, written)
	}
	// Those who only add may share a table.
	if err := b.Claim(t.Context(), nil, "", r.orders); err != nil {
		t.Fatal(err)
	}
	if got := ownersOf(t, a, r.orders); !slices.Equal(got, []string{"orders kafkasink:c'l/b", "orders pgsource:7311/a"}) {
		t.Error(got)
	}
	// Nobody may retract from it then.
	refusedBy(t, a.Claim(t.Context(), nil, "PGSOURCE_TRUNCATE=delete_all", r.orders), "table orders", "pgsource:7311/a", "kafkasink:c'l/b", "PGSOURCE_TRUNCATE=delete_all", "owners remove kafkasink:c'l/b")
	refusedBy(t, b.Sole(t.Context(), r.orders, "pgsource resync"), "pgsource:7311/a", "pgsource resync")
	// The owner that is gone is taken out, and then it may.
	if err := a.Remove(t.Context(), Owner{Table: "orders", Name: b.Name()}); err != nil {
		t.Fatal(err)
	}
	if err := a.Sole(t.Context(), r.orders, "pgsource resync"); err != nil {
		t.Error(err)
	}
	if err := a.Claim(t.Context(), nil, "PGSOURCE_TRUNCATE=delete_all", r.orders); err != nil {
		t.Fatal(err)
	}
	if got := ownersOf(t, b); !slices.Equal(got, []string{"orders pgsource:7311/a retracts"}) {
		t.Error(got)
	}
	// And whoever comes later is refused, whatever it does.
	refusedBy(t, b.Claim(t.Context(), nil, "", r.orders), "takes away rows that kafkasink:c'l/b wrote")
	if got := ownersOf(t, b, r.orders); len(got) != 1 {
		t.Error(got)
	}
}

// What the daemons record of progress and of owners does not meet.
func TestOwnersAndProgressAreApart(t *testing.T) {
	r, open := ownersRig(t)
	r.own(t, Noted{}, ProgressFresh)
	o := open(progressSource)
	if err := o.Claim(t.Context(), nil, "", r.orders); err != nil {
		t.Fatal(err)
	}
	if _, rows := r.read(t); len(rows) != 1 {
		t.Error(rows)
	}
	if got := ownersOf(t, o); len(got) != 1 {
		t.Error(got)
	}
}

// Of two that come at the same moment and cannot share, at most one stays.
func TestOwnersAtOnce(t *testing.T) {
	r, open := ownersRig(t)
	for round := range 5 {
		a, b := open("pgsource:1/a"), open("pgsource:2/b")
		var both sync.WaitGroup
		var errs [2]error
		for i, o := range []*Owners{a, b} {
			both.Go(func() { errs[i] = o.Claim(t.Context(), nil, "delete_all", r.orders) })
		}
		both.Wait()
		left := ownersOf(t, a, r.orders)
		stayed := 0
		for _, err := range errs {
			if err == nil {
				stayed++
				continue
			}
			refusedBy(t, err, "table orders")
		}
		if stayed > 1 || len(left) != stayed {
			t.Fatalf("round %d: %d stayed, %v; %v", round, stayed, left, errs)
		}
		if err := a.Remove(t.Context(), Owner{Table: "orders", Name: a.Name()}, Owner{Table: "orders", Name: b.Name()}); err != nil {
			t.Fatal(err)
		}
	}
}

// A pipeline that restarted empty has no owners: they say it again.
func TestOwnersAfterALoss(t *testing.T) {
	r, open := ownersRig(t)
	o := open("pgsource:1/a")
	if err := o.Claim(t.Context(), nil, "", r.orders); err != nil {
		t.Fatal(err)
	}
	r.sim.Crash(core.KeepNothing)
	if _, ok := errors.AsType[*IncarnationChanged](o.Claim(t.Context(), nil, "", r.orders)); !ok {
		t.Error("the other incarnation was not noticed")
	}
	now, err := r.c.Incarnation(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.c.Expect(now)
	if got := ownersOf(t, o); len(got) != 0 {
		t.Error(got)
	}
	if err := o.Claim(t.Context(), nil, "", r.orders); err != nil {
		t.Fatal(err)
	}
	if got := ownersOf(t, o); len(got) != 1 {
		t.Error(got)
	}
}

// With a transaction of our own open, which a crash has left, nothing
// completes: the claim goes into it, and is seen when it is committed.
func TestOwnersWithinATransaction(t *testing.T) {
	r, open := ownersRig(t)
	o := open("pgsource:1/a")
	tx, err := r.c.Begin(t.Context(), nil, func(context.Context, Intent) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	own := tx.Intent()
	if err := o.Claim(t.Context(), &own, "", r.orders); err != nil {
		t.Fatal(err)
	}
	if list, err := o.List(t.Context()); err != nil || len(list) != 0 {
		t.Error(list, err)
	}
	if err := tx.Commit(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if got := ownersOf(t, o); len(got) != 1 {
		t.Error(got)
	}
}

func TestOwnersWithoutATable(t *testing.T) {
	_, c, s := simulated(t, felderasim.Options{}, Config{})
	_, err := c.Owners(s, DefaultProgressTable, "x")
	refusedBy(t, err, "CREATE TABLE holdfast_progress")
	if _, err := c.Owners(s, DefaultProgressTable, strings.Repeat("x", maxProgressName+1)); err == nil {
		t.Error("a name without bounds was taken")
	}
}
