package model

import (
	"fmt"
	"strings"

	"holdfast/internal/feldera"
)

// Broken names one rule that a variant of the model breaks.
type Broken uint8

// The broken rules.
const (
	Nothing Broken = iota
	// KeepaliveOvertakes: a keepalive's position is acknowledged although units
	// received before it are not.
	KeepaliveOvertakes
	// AckOnAccepted: a 200 counts as evidence.
	AckOnAccepted
	// AckBeforeRow: completed data count although their progress row is not.
	AckBeforeRow
	// RowBeforeIngested: a progress row is sent when its data are accepted.
	RowBeforeIngested
	// RowIntoNewIncarnation: a progress row is tried again without a look at
	// the incarnation.
	RowIntoNewIncarnation
	// RowNotLast: inside a transaction the row goes first.
	RowNotLast
	// IdleCompared: the acknowledged position, idle or not, is compared with
	// the row's.
	IdleCompared
	// NoEpochs: all owners write the same rows, so that a stale one's can win.
	NoEpochs
	// EpochByRow: an owner claims its epoch by its first row alone.
	EpochByRow
	// CommitAfterRevoke: an owner commits what it had when it lost the lane.
	CommitAfterRevoke
	// RetryWithoutWait: a request of unknown outcome is sent again at once.
	RetryWithoutWait
	// StartWithoutWait: an owner does not wait out its predecessor's requests.
	StartWithoutWait
	// CleanNoteKept: a clean note is not replaced before the first request.
	CleanNoteKept
	// SingleCheckpoint: one successful checkpoint counts as proof.
	SingleCheckpoint
	// NeverUsedIsLost: a table without rows counts as a loss.
	NeverUsedIsLost
	// BelieveAnyRow: a row is believed whatever incarnation it names.
	BelieveAnyRow
	// BelieveBySteps: a row of another incarnation is believed when the present
	// one resumed at or after its step.
	BelieveBySteps
	// BelieveByPosition: a row at the noted position is believed, whoever wrote
	// it.
	BelieveByPosition
	// ReplayOutsideTransaction: what may have been applied already is sent
	// again in the open.
	ReplayOutsideTransaction
	// ResetForgotten: the owner that finds a reset remembers progress again with
	// its epoch, before its claim is completed.
	ResetForgotten
	// TablesApart: the tables of one unit are sent without a transaction.
	TablesApart
	// SettledAtOnce: what became of a request to begin or to commit is decided
	// while it may still be applied.
	SettledAtOnce
	// CommitNotWaitedOut: an attempt does not wait until the commit of the one
	// before can no longer be applied.
	CommitNotWaitedOut
	// BeginNotWaitedOut: nor until its request to begin cannot.
	BeginNotWaitedOut
	// BeginNotLookedAt: whatever process answers a request to begin, rows are
	// sent, under a record that names the process that was asked.
	BeginNotLookedAt
	// LateBeginForeign: a transaction whose number is not on record is never
	// taken for ours.
	LateBeginForeign
)

// Storage is what a pipeline keeps of its tables when its process dies.
type Storage uint8

// The kinds of storage.
const (
	// KeepsNothing: the open-source build.
	KeepsNothing Storage = iota
	// KeepsCheckpoint: back to the last checkpoint (at_least_once).
	KeepsCheckpoint
	// KeepsJournal: every journaled step, an open transaction as committed
	// (exactly_once).
	KeepsJournal
)

// Scope bounds a model and says which it is.
type Scope struct {
	Broken Broken
	// Kafka: lanes with owners and commits; otherwise Postgres: transactions
	// over several tables, a bookmark, keepalives.
	Kafka bool
	// Log is the source: 'a' a unit with rows for table A, 'b' one for A and B,
	// '.' a position without rows.
	Log     string
	Storage Storage
	// Durable acknowledges on checkpoints.
	Durable bool
	// StopOnLoss waits for a person when something is lost.
	StopOnLoss bool
	// How often each fault can happen.
	// Takings are commits of our transaction by somebody else.
	// Resets are positions that an operator sets while nobody owns the lane.
	Crashes, Restarts, Timeouts, Rebalances, Retentions, Takings, Resets uint8
}

// request is one on its way. A live one is waited for by the daemon; any other
// was abandoned, and is applied late or never.
type request struct {
	entry

	live bool
}

const maxNet = 3

// control is a request to begin, or to commit, a transaction: it names none,
// and whichever process it reaches carries it out. Of each kind one is waited
// for by the daemon, and one was abandoned.
type control struct {
	live bool
	late abandoned
}

// abandoned tells whose request is applied late or never.
type abandoned uint8

const (
	nobodys      abandoned = iota
	predecessors           // of an attempt, or a daemon, before
	ours                   // of this attempt, which knows of it
)

// abandon leaves the request to itself.
func (c *control) abandon(by abandoned) {
	switch {
	case c.live:
		*c = control{late: by}
	case c.late != nobodys:
		c.late = by
	}
}

// noted is the daemon's durable memory: bookmark, or commit and its note.
type noted struct {
	// pos is acknowledged, produced the last position up to it with rows.
	pos, produced uint8
	// epoch is the highest that was claimed; rowEpoch and rowInc name the row
	// that was completed for produced.
	epoch, rowEpoch, rowInc uint8
	// sent is the highest unit that was ever sent (pgsource only).
	sent uint8
	// intent is the incarnation in which a transaction of ours may be open. asked:
	// its number is not on record, since it was about to be asked for.
	intent uint8
	asked  bool
	// clean: nothing that was sent is without an outcome.
	clean bool
	// gone: units up to it were lost by the pipeline when retention had taken
	// them already; a person was called (Kafka only).
	gone uint8
	// unknown: nothing is remembered of progress, since somebody else has set the
	// position.
	unknown bool
}

// mode is what the daemon is at.
type mode uint8

const (
	down mode = iota
	undecided
	running
	lost    // decided that the pipeline lost acknowledged units: heal or wait
	stopped // a gap at the source: a person has to act
)

// daemon is the owner of the lane and all that it forgets when it dies.
type daemon struct {
	mode mode
	// exp is the incarnation that it expects, epoch the one it has claimed.
	exp, epoch uint8
	// base: everything up to it was in the pipeline at the decision, or is gone
	// for good; claim is the position of the first progress row.
	base, claim uint8
	// recv was received, snt accepted whole; part counts the tables of the next
	// unit that were accepted.
	recv, snt, part uint8
	// rowSent and rowDone are positions + 1 of the newest progress row that was
	// accepted, and completed. The first one is the claim.
	rowSent, rowDone uint8
	slot             uint8
	// drop is what the claim will delete.
	drop uint8
	// dataDone is how far data are completed, whatever the rows.
	dataDone uint8
	// tx is the last unit of the open transaction, 0 for none, asks that of the
	// one that is asked for; replay the last one that may have been applied
	// before. commits: the open one's commit was asked for.
	tx, asks, replay uint8
	commits          bool
	// proof counts the checkpoints asked for since proofPos was completed;
	// durable is what they have proven, + 1.
	proof, proofPos, durable uint8
}

// world is one state.
type world struct {
	d     daemon
	noted noted
	p     pipeline
	net   [maxNet]request
	// begin and commit are on their way.
	begin, commit control
	// written is how much of the log exists, confirmed what the source was
	// told, start the first position that it still has.
	written, confirmed, start uint8
	// stray has bit u-1 for each unit u of which something has landed in another
	// incarnation than it was meant for, or may land outside of the transaction,
	// and nobody has decided since, or what it brought is not visible yet.
	stray uint8
	// reset is the position that an operator has set and no owner has claimed
	// yet, + 1.
	reset uint8
	// zombie is what a revoked owner could still commit, + 1.
	zombie uint8
	// What is left of each fault.
	crashes, restarts, timeouts, rebalances, retentions, takings, resets uint8
}

// Model is the world under a scope.
type Model struct{ Scope }

// Start implements System.
func (m Model) Start() world {
	w := world{
		crashes: m.Crashes, restarts: m.Restarts, timeouts: m.Timeouts,
		rebalances: m.Rebalances, retentions: m.Retentions, takings: m.Takings, resets: m.Resets, start: 1,
	}
	w.p.inc = 1
	if m.Kafka {
		w.written = m.length() // only a resync asks how much there is
	}
	return w
}

func (m Model) length() uint8 { return uint8(len(m.Log)) }

// rows tells whether a unit has rows, wide whether for both tables.
func (m Model) rows(u uint8) bool { return m.Log[u-1] != '.' }
func (m Model) wide(u uint8) bool { return m.Log[u-1] == 'b' }

// produced gives the last position up to pos that has rows, 0 for none.
func (m Model) produced(pos uint8) uint8 {
	for pos > 0 && !m.rows(pos) {
		pos--
	}
	return pos
}

// next gives the first unit with rows above pos, 0 if there is none up to end.
func (m Model) next(pos, end uint8) uint8 {
	for u := pos + 1; u <= end; u++ {
		if m.rows(u) {
			return u
		}
	}
	return 0
}

// full gives the tables with all units up to pos.
func (m Model) full(pos uint8) content { return m.between(0, pos) }

// between gives the tables with the units above from, up to pos.
func (m Model) between(from, pos uint8) (c content) {
	for u := from + 1; u <= pos; u++ {
		switch {
		case !m.rows(u):
			continue
		case m.wide(u):
			c.put(entry{to: tableB, unit: u})
		}
		c.put(entry{to: tableA, unit: u})
	}
	return c
}

// holds tells whether c has the effect of all units up to pos: every row, and
// in the shared key nothing older. Units up to gone are not asked for.
func (m Model) holds(c *content, gone, pos uint8) bool {
	want := m.between(gone, pos)
	return c.mask[0]&want.mask[0] == want.mask[0] && c.mask[1]&want.mask[1] == want.mask[1] && c.x >= want.x
}

// torn gives the units of which c shows a part.
func (m Model) torn(c *content) (units uint8) {
	for u := uint8(1); u <= m.length(); u++ {
		if m.rows(u) && m.wide(u) {
			units |= (c.mask[0] ^ c.mask[1]) & unitBit(u)
		}
	}
	return units
}

// unitBit is a unit's place in a mask; there is none for 0.
func unitBit(u uint8) uint8 { return 1 << u >> 1 }

// ingested gives how far the data are in the circuit: up to what was accepted,
// less what still stands in a queue.
func (m Model) ingested(w *world) uint8 {
	pos := w.d.snt
	for e := tableA; e <= tableB; e++ {
		for _, q := range w.p.queue[e] {
			if q.used && q.mine && q.unit <= pos {
				pos = q.unit - 1
			}
		}
	}
	return max(m.rowFor(w, pos), m.rowFor(w, w.d.base))
}

// rowFor gives the position of the progress row that stands for everything up
// to pos. No row ever stands for what is gone.
func (m Model) rowFor(w *world, pos uint8) uint8 {
	p := m.produced(pos)
	if p <= w.noted.gone {
		p = min(p, w.d.claim)
	}
	return p
}

// rowIngested tells whether the newest progress row is in the circuit.
func (w *world) rowIngested() bool {
	for _, q := range w.p.queue[tableP] {
		if q.used && q.mine {
			return false
		}
	}
	return true
}

// incName spells an incarnation for feldera.Decide.
func incName(inc uint8) string { return string(rune('0' + inc)) }

// decide asks the real function.
func (m Model) decide(w *world) feldera.Decision {
	var rows []feldera.ProgressRow
	for e := range w.p.seen.rows {
		for slot, r := range w.p.seen.rows[e] {
			if r == 0 {
				continue
			}
			inc := incName(r.inc())
			if m.Broken == BelieveAnyRow || (m.Broken == BelieveBySteps && r.step() <= w.p.resumed) ||
				(m.Broken == BelieveByPosition && r.posPlus1()-1 == w.noted.produced) {
				inc = incName(w.p.inc)
			}
			rows = append(rows, feldera.ProgressRow{
				Epoch: int64(e), Slot: int64(slot), Position: uint64(r.posPlus1() - 1), Incarnation: inc,
			})
		}
	}
	n := feldera.Noted{
		Known: !w.noted.unknown, Epoch: int64(w.noted.epoch), Produced: uint64(w.noted.produced),
		RowEpoch: int64(w.noted.rowEpoch), RowIncarnation: incName(w.noted.rowInc),
	}
	switch m.Broken {
	case IdleCompared:
		n.Produced = uint64(w.noted.pos)
	case NoEpochs:
		n.Epoch = 1
	case EpochByRow:
		n.Epoch = 0
		for _, r := range rows {
			n.Epoch = max(n.Epoch, r.Epoch)
		}
	default:
	}
	d := feldera.Decide(rows, n, incName(w.p.inc), "")
	if m.Broken == NeverUsedIsLost && len(rows) == 0 {
		d.Found = feldera.ProgressLost
	}
	return d
}

// Show implements System.
func (m Model) Show(w world) string {
	var b strings.Builder
	d := &w.d
	switch d.mode {
	case down:
		b.WriteString("down")
	case undecided:
		b.WriteString("undecided")
	case lost:
		b.WriteString("LOST")
	case stopped:
		b.WriteString("STOPPED")
	case running:
		fmt.Fprintf(&b, "epoch %d inc %d base %d recv %d sent %d rows %d/%d", d.epoch, d.exp, d.base, d.recv, d.snt, int(d.rowDone)-1, int(d.rowSent)-1)
		if d.tx > 0 {
			fmt.Fprintf(&b, " tx..%d", d.tx)
		}
		if d.asks > 0 {
			fmt.Fprintf(&b, " asks for tx..%d", d.asks)
		}
	}
	fmt.Fprintf(&b, " | noted %d (rows %d) told %d | inc %d sees %s", w.noted.pos, w.noted.produced, w.confirmed, w.p.inc, w.p.seen)
	if w.p.work != w.p.seen {
		fmt.Fprintf(&b, " has %s", w.p.work)
	}
	if w.noted.intent > 0 {
		fmt.Fprintf(&b, " intent inc %d", w.noted.intent)
		if w.noted.asked {
			b.WriteString(" without a number")
		}
	}
	if w.p.tx {
		b.WriteString(" TX")
	}
	for name, c := range map[string]control{"begin": w.begin, "commit": w.commit} {
		if c.live {
			b.WriteString(" sent:" + name)
		}
		if c.late != nobodys {
			b.WriteString(" abandoned:" + name)
		}
	}
	for _, q := range w.p.queue {
		for _, e := range q {
			if e.used {
				b.WriteString(" queued:" + e.String())
			}
		}
	}
	for _, r := range w.net {
		if r.used {
			if r.live {
				b.WriteString(" sent:" + r.String())
			} else {
				b.WriteString(" abandoned:" + r.String())
			}
		}
	}
	return b.String()
}

// String names an entry: "A2", or "row 2 (epoch 1, inc 1)".
func (e entry) String() string {
	if e.to == tableP {
		return fmt.Sprintf("row%d(e%d.%d,inc%d)", e.unit, e.epoch, e.slot, e.inc)
	}
	return fmt.Sprintf("%c%d", 'A'+e.to, e.unit)
}

// String writes tables: the units in A, in B, the shared key, the rows.
func (c content) String() string {
	var b strings.Builder
	for i, mask := range c.mask {
		fmt.Fprintf(&b, "%c", 'A'+i)
		for u := range maxLog {
			if mask&(1<<u) != 0 {
				fmt.Fprintf(&b, "%d", u+1)
			}
		}
		b.WriteByte(' ')
	}
	fmt.Fprintf(&b, "x=%d", c.x)
	for e := range c.rows {
		for s, r := range c.rows[e] {
			if r != 0 {
				fmt.Fprintf(&b, " row%d(e%d.%d,inc%d)", r.posPlus1()-1, e, s, r.inc())
			}
		}
	}
	return b.String()
}
