package model

import (
	"cmp"
	"fmt"
	"slices"

	"holdfast/internal/feldera"
)

// emit hands one possible step on; wrong is what the step itself breaks.
type emit func(kind, action string, fault bool, to world, wrong string)

// Next implements System.
func (m Model) Next(w world, yield func(Step[world])) {
	out := func(kind, action string, fault bool, to world, wrong string) {
		// Which of the abandoned requests is which does not matter.
		slices.SortFunc(to.net[:], func(a, b request) int { return cmp.Compare(b.order(), a.order()) })
		yield(Step[world]{Kind: kind, Action: action, Fault: fault, To: to, Wrong: wrong})
	}
	m.source(w, out)
	m.network(w, out)
	m.controls(w, out)
	m.engine(w, out)
	m.ownership(w, out)
	m.sending(w, out)
	m.acknowledging(w, out)
}

// order is a total order over requests, for a canonical state.
func (r request) order() int {
	n := 0
	for _, v := range []uint8{bit(r.used), bit(r.live), r.to, r.unit, r.epoch, r.slot, r.inc, r.step, bit(r.mine)} {
		n = n<<5 | int(v)
	}
	return n<<8 | int(r.drop)
}

func bit(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}

// source writes its log, and forgets what it may (Kafka: what it likes).
func (m Model) source(w world, out emit) {
	if w.written < m.length() {
		to := w
		to.written++
		out("write", fmt.Sprintf("source writes %d", to.written), false, to, "")
	}
	if w.retentions > 0 && w.start <= w.written {
		for start := w.start + 1; start <= w.written+1; start++ {
			to := w
			to.retentions--
			to.start = start
			out("retention", fmt.Sprintf("retention up to %d", start-1), true, to, "")
		}
	}
}

// network delivers, loses and delays requests.
func (m Model) network(w world, out emit) {
	for i, r := range w.net {
		if !r.used {
			continue
		}
		gone := w
		gone.net[i] = request{}
		if w.p.room(r.to) {
			to := gone
			e := r.entry
			e.mine = r.live && r.inc == w.p.inc
			to.p.push(e)
			if r.inc != w.p.inc && r.to != tableP {
				to.stray |= unitBit(r.unit)
			}
			switch {
			case !r.live:
				out("late", "late: "+r.String(), false, to, "")
			case r.inc == w.p.inc:
				m.accepted(&to, r.entry)
				out("answer", "answered: "+r.String(), false, to, "")
			default:
				// The token names another incarnation than the expected one.
				to.interrupt(undecided)
				out("stray", "answered by another incarnation: "+r.String(), false, to, "")
			}
		}
		switch {
		case !r.live:
			out("drop", "never applied: "+r.String(), false, gone, "")
		case w.timeouts > 0:
			to := w
			to.timeouts--
			to.net[i].live = false
			out("timeout", "no answer: "+r.String(), true, to, "")
		}
	}
}

// controls delivers, loses and delays requests to begin and to commit.
func (m Model) controls(w world, out emit) {
	if w.begin.live {
		to := w
		to.begin.live = false
		to.p.open()
		m.begun(to, out)
	}
	if w.commit.live {
		to := w
		to.commit.live = false
		m.shut(&to)
		if to.d.exp == to.p.inc {
			to.committed()
			out("committed", "committed", false, to, m.shown(&w, &to))
		} else {
			// It tells of no transaction, and the look behind it of another process.
			to.interrupt(undecided)
			out("commit elsewhere", "the commit is answered by another incarnation", false, to, m.shown(&w, &to))
		}
	}
	if w.begin.late != nobodys {
		gone := w
		gone.begin.late = nobodys
		out("drop", "never applied: begin", false, gone, "")
		to := gone
		to.p.open()
		out("late begin", "late: begin", false, to, "")
	}
	if w.commit.late != nobodys {
		gone := w
		gone.commit.late = nobodys
		out("drop", "never applied: commit", false, gone, "")
		to := gone
		m.shut(&to)
		out("late commit", "late: commit", false, to, m.shown(&w, &to))
	}
	if w.timeouts == 0 {
		return
	}
	if w.begin.live && w.begin.late == nobodys {
		to := w
		to.timeouts--
		to.begin.abandon(ours)
		out("timeout", "no answer: begin", true, to, "")
	}
	if w.commit.live && w.commit.late == nobodys {
		to := w
		to.timeouts--
		to.commit.abandon(ours)
		out("timeout", "no answer: commit", true, to, "")
	}
}

// begun is an answer to a request to begin. The process that was looked at may
// have ended since, and the one behind it have answered: so it is looked again,
// and the record names the one that has the transaction, before there is a row
// in it.
func (m Model) begun(to world, out emit) {
	to.noted.asked = false
	switch {
	case m.Broken == BeginNotLookedAt:
		to.p.named = to.d.exp == to.p.inc
		to.d.tx, to.d.asks = to.d.asks, 0
		out("begun", "BROKEN: begun, wherever", false, to, "")
	case to.d.exp == to.p.inc:
		to.p.named = true
		to.d.tx, to.d.asks = to.d.asks, 0
		out("begun", "begun", false, to, "")
	default:
		to.noted.intent, to.p.named = to.p.inc, true
		to.interrupt(undecided)
		out("begun elsewhere", "begun by another incarnation", false, to, "")
	}
}

// shut is a commit that reaches the pipeline: whatever is open ends.
func (m Model) shut(w *world) {
	if w.p.tx {
		w.p.shut()
		m.complete(w)
	}
}

// committed enters into the daemon's books that its transaction has ended.
func (w *world) committed() {
	d := &w.d
	d.tx, d.commits = 0, false
	if d.snt >= d.replay {
		d.replay = 0
	}
	w.noted.intent = 0
}

// isOurs tells whether the daemon knows the open transaction as its own: by its
// number, or, where only the request is on record, as one without data, in
// whichever incarnation it has landed.
func (m Model) isOurs(w *world) bool {
	if w.p.named {
		return w.noted.intent == w.p.inc
	}
	return w.p.tx && w.noted.asked && !w.p.filled && m.Broken != LateBeginForeign
}

// accepted enters an answer into the daemon's books.
func (m Model) accepted(w *world, e entry) {
	d := &w.d
	if e.to == tableP {
		d.rowSent = e.unit + 1
		d.slot ^= 1
		return
	}
	d.part++
	if d.part > bit(m.wide(e.unit)) {
		d.snt, d.part = e.unit, 0
	}
}

// engine takes, completes, stores and dies.
func (m Model) engine(w world, out emit) {
	for e := range endpoints {
		if !w.p.queue[e][0].used {
			continue
		}
		to := w
		took := to.p.ingest(e)
		out("ingest", "ingested: "+took.String(), false, to, "")
	}
	if m.Broken == BelieveBySteps && w.p.steps < 4 {
		to := w
		to.p.steps++
		out("other step", "a step for another source", false, to, "")
	}
	if !w.p.tx {
		to := w
		m.complete(&to)
		if to != w {
			out("complete", "a step completes", false, to, m.shown(&w, &to))
		}
	}
	if m.Storage == KeepsCheckpoint && !w.p.tx {
		switch {
		case w.p.isWriting:
			to := w
			to.p.stored, to.p.writing, to.p.isWriting = w.p.writing, content{}, false
			to.p.storedSteps, to.p.writingSteps = w.p.writingSteps, 0
			m.checkpointed(&to)
			out("checkpoint", "a checkpoint succeeds", false, to, "")
		case w.p.work != w.p.stored || w.d.proof > 0:
			to := w
			to.p.writing, to.p.isWriting, to.p.writingSteps = w.p.work, true, w.p.steps
			out("checkpoint begins", "a checkpoint begins", false, to, "")
		}
	}
	if w.restarts > 0 {
		to := w
		to.restarts--
		die := func(with content, steps uint8, how string) {
			again := to
			again.p.restart(with, steps)
			out("restart", "the pipeline restarts "+how, true, again, "")
		}
		switch m.Storage {
		case KeepsNothing:
			die(content{}, 0, "from nothing")
		case KeepsCheckpoint:
			die(w.p.stored, w.p.storedSteps, "from its checkpoint")
		case KeepsJournal:
			// Steps that were not completed may have been journaled or not.
			die(w.p.work, w.p.steps, "from its journal")
			if w.p.seen != w.p.work {
				die(w.p.seen, w.p.steps, "from its journal, without the last steps")
			}
		}
	}
}

// complete makes visible what was ingested and tells the daemon.
func (m Model) complete(w *world) {
	if w.p.seen != w.p.work && m.Broken == BelieveBySteps {
		w.p.steps++
	}
	w.p.seen = w.p.work
	d := &w.d
	if d.mode != running || d.exp != w.p.inc {
		return
	}
	if !w.foreignQueued() && (d.tx == 0 || w.p.tx) {
		w.stray = 0
	}
	d.dataDone = max(d.dataDone, m.ingested(w))
	if w.rowIngested() {
		d.rowDone = max(d.rowDone, d.rowSent)
	}
}

// checkpointed counts a success towards the proof of durability. The request
// was credited with whatever checkpoint was running when it was made.
func (m Model) checkpointed(w *world) {
	d := &w.d
	if d.proof == 0 || d.exp != w.p.inc {
		return
	}
	if d.proof == 1 && m.Broken != SingleCheckpoint {
		d.proof = 2
		return
	}
	d.durable, d.proof, d.proofPos = d.proofPos, 0, 0
}

// foreignQueued tells whether rows that nobody follows are still to become
// visible.
func (w *world) foreignQueued() bool {
	for _, queue := range w.p.queue {
		for _, q := range queue {
			if q.used && !q.mine {
				return true
			}
		}
	}
	return false
}

// interrupt ends what the daemon was doing; its requests go on without it.
func (w *world) interrupt(next mode) {
	w.d = daemon{mode: next}
	for i := range w.net {
		w.net[i].live, w.net[i].mine = false, false
	}
	w.begin.abandon(predecessors)
	w.commit.abandon(predecessors)
	for e := range w.p.queue {
		for i := range w.p.queue[e] {
			w.p.queue[e][i].mine = false
		}
	}
}

// inFlight tells whether the daemon waits for an answer, and whether a request
// of unknown outcome may still be applied.
func (m Model) inFlight(w *world) (live, open bool) {
	live = w.begin.live || w.commit.live
	open = (w.begin.late == ours || w.commit.late == ours) && m.Broken != SettledAtOnce
	for _, r := range w.net {
		live = live || (r.used && r.live)
		open = open || (r.used && !r.live && r.mine)
	}
	return live, open
}

// ownership is everything by which a lane changes hands.
func (m Model) ownership(w world, out emit) {
	d := &w.d
	switch d.mode {
	case down:
		to := w
		to.d.mode = undecided
		out("take over", "a daemon takes over", false, to, "")
		m.reset(w, out)
		if m.Broken == CommitAfterRevoke && w.zombie > 0 {
			m.zombieCommits(w, out)
		}
		return
	case undecided:
		m.take(w, out)
	default:
	}
	if w.p.filled && w.noted.asked && !w.p.named {
		// Rows that were queued before have gone into what a request to begin has
		// opened. Nobody can tell whose it is, and the daemon says so and waits.
		to := w
		m.shut(&to)
		out("person", "a person commits a transaction that nobody knows", false, to, m.shown(&w, &to))
	}
	if m.Broken == CommitAfterRevoke && w.zombie > 0 {
		m.zombieCommits(w, out)
	}
	live, open := m.inFlight(&w)
	if w.crashes > 0 {
		to := w
		to.crashes--
		to.interrupt(down)
		out("crash", "the daemon dies", true, to, "")
	}
	if m.Kafka && w.rebalances > 0 && d.mode == running {
		to := w
		to.rebalances--
		if m.Broken == CommitAfterRevoke {
			to.zombie = m.acknowledgeable(&w) + 1
		}
		to.interrupt(down)
		out("lost", "the lane is lost to another owner", true, to, "")
		if w.claimed() && !live && !open && d.exp == w.p.inc && d.part == 0 && d.rowDone == m.rowFor(&w, d.snt)+1 {
			to := w
			to.rebalances--
			wrong := m.note(&to, m.acknowledgeable(&w))
			to.noted.clean = true
			to.interrupt(down)
			out("revoke", "the lane is revoked: drained, committed clean", true, to, wrong)
		}
	}
	if (d.mode == running || d.mode == lost) && d.exp != w.p.inc && !live && m.Broken != RowIntoNewIncarnation {
		to := w
		to.interrupt(undecided)
		out("notice", "the daemon sees another incarnation", false, to, "")
	}
	if w.takings > 0 && d.mode == running && d.tx > 0 && w.p.tx {
		// A commit names no transaction, and anybody can send one.
		to := w
		to.takings--
		to.p.shut()
		for u := d.base + 1; u <= d.tx; u++ {
			to.stray |= unitBit(u) // what the daemon sends of it now is not in a transaction
		}
		m.complete(&to)
		out("taken", "somebody else commits our transaction", true, to, "")
	}
	if d.mode == running && d.tx > 0 && !d.commits && !w.p.tx && d.exp == w.p.inc && !live && !open {
		to := w
		to.interrupt(undecided)
		out("start again", "the transaction is no longer ours: from the start", false, to, "")
	}
	if m.Broken == RowIntoNewIncarnation && d.mode == running && d.exp != w.p.inc && !live && open {
		to := w
		to.d.exp = w.p.inc
		out("adopt", "BROKEN: a retry adopts the new incarnation", false, to, "")
	}
}

// reset is an operator who sets the position. What lies below is his to answer
// for.
func (m Model) reset(w world, out emit) {
	if w.resets == 0 {
		return
	}
	for pos := uint8(0); pos <= w.written; pos++ {
		to := w
		to.resets--
		to.noted = noted{pos: pos, epoch: w.noted.epoch, clean: w.noted.clean, gone: pos, unknown: true}
		to.confirmed, to.reset = pos, pos+1
		out("reset", fmt.Sprintf("an operator sets the position %d", pos), true, to, "")
	}
}

func (m Model) zombieCommits(w world, out emit) {
	to := w
	to.zombie = 0
	wrong := m.told(&to, w.zombie-1)
	to.noted.pos = w.zombie - 1
	out("zombie commit", "BROKEN: the last owner commits", false, to, wrong)
}

// take decides where a new owner begins.
func (m Model) take(w world, out emit) {
	wait := !w.noted.clean && m.Broken != StartWithoutWait
	if m.Broken == RetryWithoutWait {
		wait = false
	}
	for _, r := range w.net {
		// Kafka: rows of earlier owners can come at any time; epochs see to it.
		if r.used && wait && (!m.Kafka || r.to != tableP) {
			return
		}
	}
	if wait && (w.begin.late != nobodys && m.Broken != BeginNotWaitedOut || w.commit.late != nobodys && m.Broken != CommitNotWaitedOut) {
		return
	}
	// An empty array to the progress table, completed: all rows that were queued
	// are visible. Data that are still queued stand before all that will be sent.
	if w.p.queue[tableP][0].used || (!w.p.tx && w.p.seen.rows != w.p.work.rows) || (w.p.tx && !m.isOurs(&w)) {
		return
	}
	dec := m.decide(&w)
	to := w
	to.interrupt(undecided)
	base, claim := w.noted.pos, w.noted.produced
	wrong := ""
	next := running
	switch dec.Found {
	case feldera.ProgressFresh, feldera.ProgressEqual:
	case feldera.ProgressAhead:
		base, claim = max(base, uint8(dec.Held)), uint8(dec.Held)
	case feldera.ProgressLost:
		switch {
		case w.p.inc == 1:
			wrong = "called lost although the pipeline never restarted"
		case m.Durable || m.Storage == KeepsJournal:
			wrong = "called lost although it was stored"
		}
		if !m.Kafka {
			next = lost
			break
		}
		// The commit goes back, on purpose: to what the pipeline holds, or,
		// loudly, to what the log still has. It names the row that proves it.
		base, claim = uint8(dec.Held), uint8(dec.Held)
		to.noted.gone = min(to.noted.gone, base) // what a reset left out comes again
		if base+1 < w.start {
			base = w.start - 1
			to.noted.gone = base
		}
		to.noted.pos, to.noted.produced, to.confirmed = base, claim, base
		rowEpoch, rowInc := dec.Completed()
		to.noted.rowEpoch, to.noted.rowInc = uint8(rowEpoch), 0
		if rowInc != "" {
			to.noted.rowInc = rowInc[0] - '0'
		}
	case feldera.ProgressReset:
		claim = w.noted.pos
	default:
		wrong = "unexpected decision: " + dec.Found.String()
	}
	if w.reset > 0 && base > w.reset-1 {
		wrong = "units are passed over that an operator told to send again"
	}
	if m.Broken == ResetForgotten {
		to.noted.unknown = false
	}
	if m.Kafka && base+1 < w.start {
		next = stopped
	}
	epoch := uint8(dec.Epoch)
	if m.Broken == NoEpochs {
		epoch = 1
	}
	if m.Broken != EpochByRow {
		to.noted.epoch = epoch
	}
	if m.Broken != CleanNoteKept {
		to.noted.clean = false
	}
	to.d = daemon{
		mode: next, exp: w.p.inc, epoch: epoch, base: base, claim: claim, recv: base, snt: base,
		dataDone: m.produced(base), drop: m.superseded(&w, &dec),
	}
	if !m.Kafka && w.noted.sent > base && m.Broken != ReplayOutsideTransaction {
		to.d.replay = w.noted.sent
	}
	if w.p.tx {
		if to.d.replay > 0 && next == running {
			to.d.tx = to.d.replay // ours: go on in it
			to.noted.intent, to.p.named = to.p.inc, true
		} else {
			to.noted.intent = 0
			m.shut(&to) // nothing of ours can be in it
		}
	} else {
		to.noted.intent = 0
	}
	to.noted.asked = false
	kind := "decide " + dec.Found.String()
	out(kind, kind, false, to, wrong)
}

// superseded gives the epochs whose rows the claim deletes: all that were seen
// but for those that the decision rests on, or might have to again.
func (m Model) superseded(w *world, dec *feldera.Decision) (drop uint8) {
	if m.Broken == NoEpochs || m.Broken == EpochByRow {
		return 0
	}
	for _, r := range dec.Superseded() {
		drop |= 1 << r.Epoch
	}
	return drop
}

// claimed tells whether the owner's first row is where it has to be before
// anything else is sent.
func (w *world) claimed() bool {
	return w.d.rowDone > 0 || (w.d.tx > 0 && w.d.rowSent > 0 && w.rowIngested())
}

// send puts a request on its way, and says what is wrong with it.
func (m Model) send(w world, out emit, e entry) {
	for i := range w.net {
		if w.net[i].used {
			continue
		}
		to := w
		e.used, e.mine, e.inc = true, true, w.d.exp
		to.net[i] = request{e, true}
		kind := "send"
		if e.to == tableP {
			kind = "send row"
		} else {
			to.noted.sent = max(w.noted.sent, e.unit)
			if m.Kafka {
				to.noted.sent = 0
			}
		}
		out(kind, kind+" "+e.String(), false, to, "")
		return
	}
}

// sending is the running daemon's work: receive, send, transactions, heal.
func (m Model) sending(w world, out emit) {
	d := &w.d
	live, open := m.inFlight(&w)
	if d.mode == lost && d.exp == w.p.inc && !m.StopOnLoss {
		// Resync: the tables become the source's, under the daemon's eyes.
		to := w
		to.p.work = m.healed(&w)
		to.p.seen = to.p.work
		to.d.mode, to.d.base, to.d.recv, to.d.snt = running, w.written, w.written, w.written
		to.d.dataDone, to.d.claim = m.produced(w.written), m.produced(w.written)
		to.d.replay = 0
		out("heal", fmt.Sprintf("resync up to %d", w.written), false, to, "")
	}
	if d.mode != running {
		return
	}
	if d.recv < w.written && d.recv < d.snt+2 {
		to := w
		if d.recv+1 < w.start {
			to.interrupt(stopped)
			out("gap", "the source no longer has what comes next", false, to, "")
		} else {
			to.d.recv++
			kind := "receive"
			if !m.rows(to.d.recv) {
				kind = "keepalive"
			}
			out(kind, fmt.Sprintf("%s %d", kind, to.d.recv), false, to, "")
		}
	}
	if live || (open && m.Broken != RetryWithoutWait) {
		return
	}
	if d.asks > 0 || d.commits {
		if d.exp == w.p.inc {
			m.settle(w, out)
		}
		return
	}
	m.sendRow(w, out)
	if !w.claimed() {
		return
	}
	u := m.next(d.snt, d.recv)
	inTx := u > 0 && (m.wide(u) || u <= d.replay) && m.Broken != TablesApart
	switch {
	case d.tx > 0 && (u == 0 || u > d.tx):
		m.commit(w, out)
	case u == 0:
	case d.tx == 0 && inTx && !w.p.tx:
		// What was sent before is settled first.
		if d.rowDone == m.produced(d.snt)+1 && d.rowSent == d.rowDone && d.exp == w.p.inc {
			to := w
			to.begin.live = true
			to.noted.intent, to.noted.asked = d.exp, true
			to.d.asks = u
			if u <= d.replay {
				to.d.asks = m.produced(d.replay)
			}
			out("begin", fmt.Sprintf("begin transaction up to %d", to.d.asks), false, to, "")
		}
	case d.tx == 0 && inTx:
	default:
		m.send(w, out, entry{to: tableA + d.part, unit: u})
	}
}

// settle finds out what became of a request to begin or to commit that got no
// answer, when it can no longer be applied.
func (m Model) settle(w world, out emit) {
	to := w
	switch d := &to.d; {
	case d.commits && w.p.named:
		d.commits = false
		out("not committed", "the transaction is still open", false, to, "")
	case d.commits:
		to.committed()
		out("committed late", "the transaction was committed", false, to, "")
	case !w.p.tx:
		d.asks, to.noted.intent, to.noted.asked = 0, 0, false
		out("not begun", "no transaction was begun", false, to, "")
	case m.isOurs(&w):
		d.tx, d.asks = d.asks, 0
		to.noted.asked, to.p.named = false, true
		out("begun late", "a transaction was begun", false, to, "")
	}
}

// healed gives the tables after a resync, with the rows as they are.
func (m Model) healed(w *world) content {
	c := m.full(w.written)
	c.rows = w.p.work.rows
	return c
}

// sendRow sends the progress row that is due, if one is. The first one, the
// claim, says where the owner begins.
func (m Model) sendRow(w world, out emit) {
	d := &w.d
	if !w.rowIngested() {
		return
	}
	var pos uint8
	switch {
	case d.rowSent == 0:
		pos = d.claim
	case m.Broken == RowNotLast && d.tx > 0:
		pos = d.tx
	case d.tx > 0 && (m.ingested(&w) < d.tx || d.part > 0):
		return
	case m.Broken == RowBeforeIngested:
		pos = m.produced(d.snt)
	default:
		pos = m.ingested(&w)
	}
	if pos+1 <= d.rowSent {
		return
	}
	e := entry{to: tableP, unit: pos, epoch: d.epoch, slot: d.slot, step: w.p.steps + 1}
	if d.rowSent == 0 {
		e.drop = d.drop
	}
	m.send(w, out, e)
}

// commit asks for the transaction's end when all its rows, and the progress row behind
// them, are in the circuit.
func (m Model) commit(w world, out emit) {
	d := &w.d
	if d.part > 0 || d.snt < d.tx || m.ingested(&w) < d.tx || d.rowSent != d.tx+1 || !w.rowIngested() || d.exp != w.p.inc || !w.p.tx {
		return
	}
	to := w
	to.commit.live = true
	to.d.commits = true
	out("commit transaction", "commit transaction", false, to, "")
}

// acknowledgeable gives the position that the evidence allows.
func (m Model) acknowledgeable(w *world) uint8 {
	d := &w.d
	if d.mode != running || d.rowDone == 0 {
		return w.noted.pos
	}
	if m.Durable {
		if d.durable == 0 {
			return w.noted.pos
		}
		return m.trailing(d.durable-1, d.recv)
	}
	pos := max(d.base, d.rowDone-1)
	switch m.Broken {
	case AckOnAccepted:
		pos = max(d.base, d.snt)
	case AckBeforeRow:
		pos = max(d.base, d.dataDone)
	case KeepaliveOvertakes:
		if d.recv > 0 && !m.rows(d.recv) {
			pos = d.recv
		}
	default:
	}
	return m.trailing(pos, d.recv)
}

// trailing passes over the positions without rows behind pos.
func (m Model) trailing(pos, recv uint8) uint8 {
	for pos < recv && !m.rows(pos+1) {
		pos++
	}
	return pos
}

// acknowledging is bookmark and status update, or commit, and the checkpoints
// before them.
func (m Model) acknowledging(w world, out emit) {
	d := &w.d
	if d.mode != running {
		return
	}
	if m.Durable && d.proof == 0 && d.exp == w.p.inc && d.rowDone > d.durable {
		to := w
		to.d.proof, to.d.proofPos = 1, d.rowDone
		out("ask checkpoint", "ask for a checkpoint", false, to, "")
	}
	pos := m.acknowledgeable(&w)
	if pos > w.noted.pos || (pos == w.noted.pos && d.rowDone > m.rowFor(&w, pos) && w.noted.rowEpoch != d.epoch && !m.Durable) {
		to := w
		wrong := m.note(&to, pos)
		kind := "bookmark"
		if m.Kafka {
			kind = "commit"
		}
		out(kind, fmt.Sprintf("%s %d", kind, pos), false, to, wrong)
	}
	if !m.Kafka && w.confirmed < w.noted.pos {
		to := w
		wrong := m.told(&to, w.noted.pos)
		out("status", fmt.Sprintf("status update %d", w.noted.pos), false, to, wrong)
	}
}

// note writes the daemon's memory; Kafka's is the commit itself.
func (m Model) note(w *world, pos uint8) (wrong string) {
	wrong = m.evidence(w, pos)
	w.reset, w.noted.unknown = 0, false
	if pos > w.noted.pos || w.d.rowDone > m.rowFor(w, pos) {
		w.noted.rowEpoch, w.noted.rowInc = w.d.epoch, w.d.exp
	}
	w.noted.pos, w.noted.produced = pos, m.rowFor(w, pos)
	if m.Kafka {
		if fell := m.told(w, pos); wrong == "" {
			wrong = fell
		}
	}
	return wrong
}

// told moves what the source knows.
func (m Model) told(w *world, pos uint8) (wrong string) {
	if pos < w.confirmed {
		wrong = fmt.Sprintf("the source was told %d, now %d", w.confirmed, pos)
	}
	w.confirmed = pos
	return wrong
}
