package wal

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/ack"
	"holdfast/internal/feldera"
)

// A server that fails at the same place again and again is called by its name;
// an outage, a connection that got further, and another error are not.
func TestStreamThatEndsAtOnePlace(t *testing.T) {
	server := func(code string) error {
		return &streamError{fmt.Errorf("stream: %w", &pgconn.PgError{Code: code, Message: "invalid memory alloc request size"})}
	}
	var g struggle
	for n := range PoisonAttempts - 1 {
		if err := g.streamFailed(100, server("XX000")); err != nil {
			t.Fatalf("after %d: %v", n+1, err)
		}
		for _, outage := range []error{
			server("57P01"), server("53200"), errors.New("connection reset"), &streamError{errors.New("read: EOF")},
			fmt.Errorf("connect: %w", &pgconn.PgError{Code: "XX000"}),
		} {
			if err := g.streamFailed(100, outage); err != nil {
				t.Fatalf("%v: %v", outage, err)
			}
		}
	}
	refused := refusal(t, g.streamFailed(100, server("XX000")))
	for _, part := range []string{"0/64", "XX000", "invalid memory alloc", "5 times in a row"} {
		if !strings.Contains(refused.Error(), part) {
			t.Errorf("it does not say %q: %v", part, refused)
		}
	}
	for name, between := range map[string]func(*struggle){
		"acknowledged": func(g *struggle) { g.progress(100) },
		"got further":  func(g *struggle) { _ = g.streamFailed(101, server("XX000")) },
		"other error":  func(g *struggle) { _ = g.streamFailed(100, server("XX001")) },
	} {
		var g struggle
		for range PoisonAttempts - 1 {
			_ = g.streamFailed(100, server("XX000"))
		}
		between(&g)
		if err := g.streamFailed(100, server("XX000")); err != nil {
			t.Errorf("%s in between: %v", name, err)
		}
	}
}

// Attempts that end with the same work under way become cautious, then name
// it; an acknowledged position begins the count anew.
func TestAttemptsThatEndInTheSameWork(t *testing.T) {
	a := &attempt{s: testSource(t, noStore{}), ledger: ack.New[uint64](100)}
	if a.underWay() != nil {
		t.Error("work is under way before anything was taken on")
	}
	ticket, err := a.ledger.Admit(0x200)
	if err != nil {
		t.Fatal(err)
	}
	a.takesOn([]*transaction{{xid: 7, end: 0x200, rows: 3}})
	a.goesTo("orders")
	a.goesTo("orders")
	a.goesTo("items")
	l := a.underWay()
	if l == nil {
		t.Fatal("nothing is under way")
	}
	cause := &feldera.IncarnationChanged{Was: "i1", Now: "i2"}
	g := &a.s.struggle
	for n := range PoisonAttempts - 1 {
		if got := g.cautious(); got != (n >= cautiousAfter) {
			t.Errorf("cautious %t after %d", got, n)
		}
		if err := g.attemptFailed(l, cause); err != nil {
			t.Fatalf("after %d: %v", n+1, err)
		}
	}
	g.progress(0x100)
	if g.cautious() {
		t.Error("cautious after progress")
	}
	for range PoisonAttempts - 1 {
		if err := g.attemptFailed(l, cause); err != nil {
			t.Fatal(err)
		}
	}
	refused := refusal(t, g.attemptFailed(l, cause))
	for _, part := range []string{"transaction 7", "0/200", "orders, items", "3 rows", "another process", "5 times"} {
		if !strings.Contains(refused.Error(), part) {
			t.Errorf("it does not say %q: %v", part, refused)
		}
	}
	a.s.current.Store(a)
	if got := a.s.Delivering(); got != "transaction 7, LSN 0/200, tables orders, items (3 rows)" {
		t.Errorf("delivering %q", got)
	}
	a.evidence(ticket, ticket, ack.Completed)
	if a.underWay() != nil || a.s.Delivering() != "" {
		t.Error("completed work is still under way")
	}
}
