package ack_test

import (
	"testing"

	"pgregory.net/rapid"

	"holdfast/internal/ack"
)

// oracle is the ledger's meaning, written as plainly as possible: every unit
// and every idle position ever admitted, in order, and nothing forgotten.
type oracle struct {
	start int64
	items []item
	acked int64
	// confirmedOn is the lowest rung that anything was confirmed on; above it
	// the ledger may stop answering.
	confirmedOn ack.Rung
}

type item struct {
	pos  int64
	idle bool
	rung ack.Rung
}

func (o *oracle) last() int64 {
	if len(o.items) == 0 {
		return o.start
	}
	return o.items[len(o.items)-1].pos
}

func (o *oracle) at(r ack.Rung) int64 {
	p := o.start
	for _, it := range o.items {
		if !it.idle && it.rung < r {
			return p
		}
		p = it.pos
	}
	return p
}

func (o *oracle) units() []*item {
	var us []*item
	for i := range o.items {
		if !o.items[i].idle {
			us = append(us, &o.items[i])
		}
	}
	return us
}

func (o *oracle) outstanding() int {
	n := 0
	for _, u := range o.units() {
		if u.rung < ack.Completed && u.pos > o.acked {
			n++
		}
	}
	return n
}

func TestLedgerAgainstOracle(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		start := rapid.Int64Range(0, 5).Draw(t, "start")
		l := ack.New(start)
		o := &oracle{start: start, acked: start, confirmedOn: ack.Durable}
		rung := rapid.SampledFrom([]ack.Rung{ack.Received, ack.Accepted, ack.Ingested, ack.Completed, ack.Durable})

		t.Repeat(map[string]func(*rapid.T){
			"admit": func(t *rapid.T) {
				pos := o.last() + rapid.Int64Range(-2, 4).Draw(t, "step")
				ticket, err := l.Admit(pos)
				if pos <= o.last() {
					if err == nil {
						t.Fatalf("admitted %d after %d", pos, o.last())
					}
					return
				}
				if err != nil {
					t.Fatalf("admit %d after %d: %v", pos, o.last(), err)
				}
				if want := ack.Ticket(len(o.units())); ticket != want {
					t.Fatalf("ticket %d, want %d", ticket, want)
				}
				o.items = append(o.items, item{pos: pos})
			},
			"idle": func(t *rapid.T) {
				pos := o.last() + rapid.Int64Range(-2, 4).Draw(t, "step")
				l.AdmitIdle(pos)
				if pos > o.last() {
					o.items = append(o.items, item{pos: pos, idle: true})
				}
			},
			"mark": func(t *rapid.T) {
				us := o.units()
				first := rapid.IntRange(0, len(us)).Draw(t, "first")
				last := rapid.IntRange(0, len(us)).Draw(t, "last")
				r := rung.Draw(t, "rung")
				err := l.Mark(ack.Ticket(first), ack.Ticket(last), r)
				if first > last || last >= len(us) {
					if err == nil {
						t.Fatalf("marked tickets %d to %d of %d", first, last, len(us))
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				for _, u := range us[first : last+1] {
					u.rung = max(u.rung, r)
				}
			},
			"confirm": func(t *rapid.T) {
				r := rapid.SampledFrom([]ack.Rung{ack.Ingested, ack.Completed, ack.Completed, ack.Durable}).Draw(t, "rung")
				if r > o.confirmedOn {
					r = o.confirmedOn // one daemon acknowledges on one rung
				}
				p := rapid.Int64Range(o.acked-1, o.last()+1).Draw(t, "pos")
				err := l.Confirm(p, r)
				if bad := p > o.at(r) || p < o.acked; bad != (err != nil) {
					t.Fatalf("confirm %d (at %d, acknowledged %d): %v", p, o.at(r), o.acked, err)
				}
				if err == nil {
					o.acked, o.confirmedOn = p, r
				}
			},
			"": func(t *rapid.T) {
				prev := l.Last()
				for r := ack.Received; r <= ack.Durable; r++ {
					got := l.At(r)
					if got > prev {
						t.Fatalf("At(%v) = %d above the rung below it, %d", r, got, prev)
					}
					prev = got
					if r <= o.confirmedOn && got != o.at(r) {
						t.Fatalf("At(%v) = %d, oracle says %d", r, got, o.at(r))
					}
					if got > o.at(r) {
						t.Fatalf("At(%v) = %d is more than the evidence, %d", r, got, o.at(r))
					}
				}
				if l.Last() != o.last() || l.Acknowledged() != o.acked {
					t.Fatalf("last %d acknowledged %d, want %d %d", l.Last(), l.Acknowledged(), o.last(), o.acked)
				}
				if got, ok := l.Ready(o.confirmedOn); ok != (o.at(o.confirmedOn) > o.acked) || got != o.at(o.confirmedOn) {
					t.Fatalf("Ready = %d %v, want %d above %d", got, ok, o.at(o.confirmedOn), o.acked)
				}
				if l.Outstanding() != o.outstanding() {
					t.Fatalf("outstanding %d, want %d", l.Outstanding(), o.outstanding())
				}
				if held := l.Held(); held > len(o.units()) {
					t.Fatalf("holds %d of %d units", held, len(o.units()))
				}
			},
		})
	})
}

// A keepalive that arrives behind unfinished work must not overtake it,
// however often it comes, and must cost nothing while it waits.
func TestIdleDoesNotOvertake(t *testing.T) {
	t.Parallel()
	l := ack.New[uint64](100)
	ticket, err := l.Admit(200)
	if err != nil {
		t.Fatal(err)
	}
	for p := uint64(201); p < 10_000; p++ {
		l.AdmitIdle(p)
	}
	if got, ok := l.Ready(ack.Completed); ok {
		t.Fatalf("ready at %d with the transaction at 200 unfinished", got)
	}
	if l.Held() != 1 {
		t.Fatalf("idle positions take memory: %d entries", l.Held())
	}
	if err := l.Mark(ticket, ticket, ack.Completed); err != nil {
		t.Fatal(err)
	}
	if got, ok := l.Ready(ack.Completed); !ok || got != 9_999 {
		t.Fatalf("ready = %d %v, want 9999", got, ok)
	}
}

// Evidence in reverse order: the position waits for the first unit.
func TestEvidenceOutOfOrder(t *testing.T) {
	t.Parallel()
	l := ack.New[int64](0)
	for i := range int64(3) {
		if _, err := l.Admit(i + 1); err != nil {
			t.Fatal(err)
		}
	}
	for _, step := range []struct {
		ticket ack.Ticket
		want   int64
	}{{2, 0}, {1, 0}, {0, 3}} {
		if err := l.Mark(step.ticket, step.ticket, ack.Completed); err != nil {
			t.Fatal(err)
		}
		if got := l.At(ack.Completed); got != step.want {
			t.Fatalf("after ticket %d: completed %d, want %d", step.ticket, got, step.want)
		}
	}
	if err := l.Confirm(4, ack.Completed); err == nil {
		t.Fatal("confirmed a position beyond the evidence")
	}
	if err := l.Confirm(3, ack.Completed); err != nil {
		t.Fatal(err)
	}
	if err := l.Confirm(2, ack.Completed); err == nil {
		t.Fatal("confirmed a lower position than before")
	}
	if l.Held() != 0 {
		t.Fatalf("%d units held after everything was confirmed", l.Held())
	}
}
