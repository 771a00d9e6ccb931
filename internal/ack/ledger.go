// Package ack holds the one rule of Holdfast as a data structure: a source
// position advances only on evidence from the destination, in source order.
//
// Positions are admitted in the order in which the source gave them, evidence
// for them arrives in any order, and the ledger answers with the highest
// position below which nothing is missing. It performs no I/O, has no clock
// and starts no goroutine. internal/wal keeps one ledger per replication slot
// (positions are LSNs), internal/partition one per assignment of a partition
// (positions are next offsets).
//
// The ledger does not decide when to tell the source: it says what may be
// told, and records what was.
package ack

import (
	"cmp"
	"fmt"
)

// Rung is how much evidence there is that the destination holds something.
// Rungs are ordered: each includes the ones below it.
type Rung uint8

// The rungs of evidence, by the names used in metrics, logs and documents.
const (
	// Received: the bytes arrived and were admitted.
	Received Rung = iota
	// Accepted: Feldera answered 200 with a completion token of the expected
	// incarnation.
	Accepted
	// Ingested: the circuit has taken the rows; the token has a step.
	Ingested
	// Completed: the completion token says complete.
	Completed
	// Durable: a checkpoint that provably started after Ingested succeeded.
	Durable

	rungs = int(Durable) + 1
)

// String gives the rung's name.
func (r Rung) String() string {
	switch r {
	case Received:
		return "received"
	case Accepted:
		return "accepted"
	case Ingested:
		return "ingested"
	case Completed:
		return "completed"
	case Durable:
		return "durable"
	}
	return fmt.Sprintf("rung(%d)", uint8(r))
}

// Ticket identifies one admitted unit. Tickets of one ledger are consecutive
// in admission order, starting at 0.
type Ticket uint64

// Ledger tracks units of work from admission to acknowledgement.
//
// Invariants, held after every call:
//
//	Acknowledged() <= At(r) for the rung r it was confirmed on
//	At(Durable) <= At(Completed) <= At(Ingested) <= At(Accepted) <= At(Received)
//	no At(r) ever decreases, and no position is ever returned that was not
//	admitted (or given to New)
//
// A Ledger is not safe for concurrent use: its owner holds a lock, since it
// must read liveness and position together anyway.
type Ledger[P cmp.Ordered] struct {
	// entries holds the units from ticket first on that were not yet released
	// by Confirm. Entry i has ticket first+i.
	entries []entry[P]
	first   Ticket

	reach [rungs]reach[P]
	last  P // the highest admitted position, unit or idle
	acked P

	outstanding int // units whose rung is below Completed
}

// entry is one unit that produced rows.
type entry[P cmp.Ordered] struct {
	pos P
	// tail >= pos is the highest idle position admitted directly behind the
	// unit. It is safe exactly when the unit is.
	tail P
	rung Rung
}

// reach is the contiguous prefix known to be at one rung.
type reach[P cmp.Ordered] struct {
	pos  P
	next Ticket // the first ticket that is not at the rung
	// frozen is set when a unit was released on a lower rung before it reached
	// this one: from then on nothing can be said about this rung.
	frozen bool
}

// New makes a ledger whose every rung stands at start: the position from
// which the source is read, already acknowledged.
func New[P cmp.Ordered](start P) *Ledger[P] {
	l := &Ledger[P]{last: start, acked: start}
	for r := range l.reach {
		l.reach[r].pos = start
	}
	return l
}

// Admit adds a unit that ends at pos: a transaction with its commit's end
// LSN, or a record with its offset + 1. It must be above everything admitted
// before, idle positions included; anything else means that the source went
// backwards, and is refused without effect.
func (l *Ledger[P]) Admit(pos P) (Ticket, error) {
	if pos <= l.last {
		return 0, fmt.Errorf("admit position %v: the source went backwards, %v was admitted before", pos, l.last)
	}
	t := l.end()
	l.entries = append(l.entries, entry[P]{pos: pos, tail: pos, rung: Received})
	l.last = pos
	l.outstanding++
	l.advance(Received)
	return t, nil
}

// AdmitIdle adds a position behind which there are no rows of its own: a
// keepalive between transactions, or a fetch position past control records.
// It becomes safe when everything admitted before it is, and costs no memory,
// however many arrive. A position at or below the last admitted one says
// nothing new and is ignored.
func (l *Ledger[P]) AdmitIdle(pos P) {
	if pos <= l.last {
		return
	}
	l.last = pos
	if n := len(l.entries); n > 0 {
		l.entries[n-1].tail = pos
	}
	for r := range l.reach {
		if c := &l.reach[r]; !c.frozen && c.next == l.end() {
			c.pos = pos
		}
	}
}

// Mark records evidence for the units first..last, both included. Evidence
// may arrive in any order and repeatedly; it never lowers a rung. Evidence
// for released units is ignored, evidence for units that were never admitted
// is an error without effect.
func (l *Ledger[P]) Mark(first, last Ticket, r Rung) error {
	if int(r) >= rungs {
		return fmt.Errorf("mark tickets %d to %d: unknown %v", first, last, r)
	}
	if first > last || last >= l.end() {
		return fmt.Errorf("mark tickets %d to %d as %v: only tickets below %d were admitted", first, last, r, l.end())
	}
	for t := max(first, l.first); t <= last; t++ {
		e := &l.entries[t-l.first]
		if e.rung >= r {
			continue
		}
		if e.rung < Completed && r >= Completed {
			l.outstanding--
		}
		e.rung = r
	}
	for c := Accepted; c <= r; c++ {
		l.advance(c)
	}
	return nil
}

// At gives the highest position such that everything up to it has reached r.
//
// After Confirm on a lower rung, the rungs above it stop where they are:
// evidence for released units is not kept.
func (l *Ledger[P]) At(r Rung) P { return l.reach[r].pos }

// Last gives the highest position admitted, with rows or without.
func (l *Ledger[P]) Last() P { return l.last }

// Ready gives At(r), and whether that is above what was acknowledged.
func (l *Ledger[P]) Ready(r Rung) (P, bool) {
	p := l.reach[r].pos
	return p, p > l.acked
}

// Confirm records that the source was told p, on the evidence of rung r, and
// releases the units up to p. Telling the source more than At(r), or less
// than it was told before, is a broken invariant: it is refused without
// effect.
func (l *Ledger[P]) Confirm(p P, r Rung) error {
	if p > l.reach[r].pos {
		return fmt.Errorf("confirm position %v: only %v is %v", p, l.reach[r].pos, r)
	}
	if p < l.acked {
		return fmt.Errorf("confirm position %v: %v was acknowledged before", p, l.acked)
	}
	l.acked = p
	n := 0
	for n < len(l.entries) && l.entries[n].pos <= p {
		if l.entries[n].rung < Completed {
			l.outstanding-- // acknowledged on a rung below completed
		}
		n++
	}
	if n == 0 {
		return nil
	}
	l.first += Ticket(n)
	l.entries = append(l.entries[:0], l.entries[n:]...)
	for i := range l.reach {
		if c := &l.reach[i]; c.next < l.first {
			c.next, c.frozen = l.first, true
		}
	}
	return nil
}

// Acknowledged gives the highest position that the source was told.
func (l *Ledger[P]) Acknowledged() P { return l.acked }

// Outstanding counts admitted units that are not yet completed.
func (l *Ledger[P]) Outstanding() int { return l.outstanding }

// Held counts the units that are kept: those not yet released by Confirm. It
// is what the ledger's memory is proportional to.
func (l *Ledger[P]) Held() int { return len(l.entries) }

func (l *Ledger[P]) end() Ticket { return l.first + Ticket(len(l.entries)) }

// advance moves the prefix of rung r over all units that have reached it.
func (l *Ledger[P]) advance(r Rung) {
	c := &l.reach[r]
	if c.frozen {
		return
	}
	for c.next < l.end() {
		e := &l.entries[c.next-l.first]
		if e.rung < r {
			return
		}
		c.pos = e.tail
		c.next++
	}
}
