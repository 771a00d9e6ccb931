package model

import "fmt"

// Invariant implements System: what must hold in every state.
func (m Model) Invariant(w world) string {
	d := &w.d
	// No loss goes unnoticed: whoever has decided in this incarnation, and goes
	// on, has all that will not be sent again.
	if d.mode == running && d.exp == w.p.inc {
		keep := d.base
		if w.noted.rowEpoch == d.epoch {
			keep = max(keep, w.noted.pos) // acknowledged by this owner
		}
		if !m.holds(&w.p.work, w.noted.gone, keep) {
			return fmt.Sprintf("units up to %d will not be sent again, and the pipeline does not hold them: nobody notices", keep)
		}
	}
	// While the pipeline has never restarted, what was acknowledged is to be
	// seen in it, at every instant.
	if w.p.inc == 1 && !m.holds(&w.p.seen, w.noted.gone, w.confirmed) {
		return fmt.Sprintf("%d was acknowledged, and the pipeline does not show it", w.confirmed)
	}
	return ""
}

// evidence says what is wrong with acknowledging pos now. A pipeline that has
// restarted in between is another matter: the evidence was of its predecessor.
func (m Model) evidence(w *world, pos uint8) string {
	if w.d.exp != w.p.inc {
		return ""
	}
	held := &w.p.seen
	if m.Durable {
		held = &w.p.stored
	}
	if !m.holds(held, w.noted.gone, pos) {
		return fmt.Sprintf("%d is acknowledged before the pipeline %s it", pos, map[bool]string{false: "shows", true: "has stored"}[m.Durable])
	}
	need := m.rowFor(w, pos)
	if need == 0 {
		return "" // nothing was sent
	}
	for e := range held.rows {
		for _, r := range held.rows[e] {
			if r.posPlus1() > need {
				return ""
			}
		}
	}
	return fmt.Sprintf("%d is acknowledged before the progress row for %d is completed", pos, need)
}

// shown says what is wrong with what a reader sees after a step that he did
// not see before it. A unit of which something has landed in another incarnation
// than it was meant for can be seen in any way until a daemon has decided there.
func (m Model) shown(before, after *world) string {
	stray := before.stray | after.stray
	if m.torn(&after.p.seen)&^(m.torn(&before.p.seen)|stray) != 0 {
		return "a reader sees a part of a unit"
	}
	if !m.Kafka && after.p.seen.x < before.p.seen.x && stray&(unitBit(after.p.seen.x)|unitBit(before.p.seen.x)) == 0 {
		return fmt.Sprintf("a reader sees the shared key go back from unit %d to %d", before.p.seen.x, after.p.seen.x)
	}
	return ""
}

// Settled implements System: everything is carried and acknowledged, or a
// person has been called.
func (m Model) Settled(w world) bool {
	switch w.d.mode {
	case stopped:
		return true
	case lost:
		return m.StopOnLoss
	case running:
	default:
		return false
	}
	end := m.length()
	live, open := m.inFlight(&w)
	full := m.full(end)
	equal := w.p.seen.mask == full.mask && w.p.seen.x == full.x
	if w.noted.gone > 0 {
		equal = m.holds(&w.p.seen, w.noted.gone, end)
	}
	return w.written == end && w.confirmed == end && !live && !open && w.p.idle() && !w.p.tx &&
		w.p.seen == w.p.work && w.d.exp == w.p.inc && equal
}
