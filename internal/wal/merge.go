package wal

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"holdfast/internal/decode"
	"holdfast/internal/sabotage"
)

// Rows that are read from a table beside the stream are merged with it here.
//
// A read sees the transactions of its snapshot (view). Of the others the stream
// brings every change, some of them before the rows can be sent, and those are
// noted while they pass:
//
//	open    from here on the deliverer notes what it delivers to the table
//	fence   the snapshot is known: what it sees is forgotten, what the deliverer
//	        delivered before open must all be seen, or the read is given up
//	fill    the rows are known, and are brought up to what was noted
//	next    once everything that the snapshot sees has been delivered, the rows
//	        go out between two batches, and are forgotten
//
// So each row that goes out is the source's, as of the transaction delivered
// last. What the stream brings later is applied on top of it, in order.
//
// merge has no I/O and no clock. One goroutine delivers (notes, truncated,
// next), one reads (open, fence, fill, end).
type merge struct {
	// on is set while there is anything to note, for a look without the lock.
	on atomic.Bool
	// wake: the deliverer is to look whether rows can go out.
	wake signal
	// limit bounds the bytes of what is noted, and of what is added to the rows.
	limit int

	mu sync.Mutex
	// passed are the transactions that were delivered since tracking began and
	// that no snapshot has been known to see yet, with the order in which they
	// began to be. last is the one that is being delivered.
	passed map[uint32]uint64
	count  uint64
	last   *transaction
	// forgot: there were too many of them.
	forgot bool
	win    *window
}

// maxPassed bounds the transactions that are remembered.
const maxPassed = 1 << 20

// window is one read of one table.
type window struct {
	table uint32 // the source table's OID
	// since tells the transactions that began to be delivered before it was
	// opened (up to it) from those that it has noted whole.
	since  uint64
	phase  windowPhase
	view   view
	noted  []notedChange
	bytes  int
	broken string // why the rows are of no use, "" while they are

	// through is the position up to which everything has to be delivered before
	// a row goes out.
	through uint64
	columns []string
	rows    []copiedRow
	index   map[string]int // by key
	sent    int            // of rows, those that next has given out
}

type windowPhase uint8

const (
	windowOpen windowPhase = iota
	windowFenced
	windowFilled
)

// copiedRow is one row that was read, or the key of one that is not there.
type copiedRow struct {
	key string
	// values are parallel to the window's columns; of an absent row, those of the
	// key.
	values []decode.Value
	absent bool
	// gone: the stream has brought what this key has.
	gone bool
}

// notedChange is a change that passes before the rows are known.
type notedChange struct {
	xid      uint32
	op       decode.Op
	old, now string // the keys, "" where there is none
	// partial is the new row where the stream has left out columns of it, with
	// the names of its columns; nil where it is whole.
	partial []decode.Value
	rel     *decode.Relation
}

func newMerge(limit int) *merge { return &merge{wake: newSignal(), limit: limit} }

// track begins to remember what is delivered. It forgets what it knew: the
// caller then finds out in another way what was delivered before.
func (m *merge) track() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.passed, m.forgot = make(map[uint32]uint64), false
	m.on.Store(true)
}

// idle ends remembering.
func (m *merge) idle() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.passed, m.win = nil, nil
	m.on.Store(false)
}

// wants tells whether a change of a table in tx has to be noted, and remembers
// that tx has begun to be delivered.
func (m *merge) wants(tx *transaction, table uint32) bool {
	if !m.on.Load() {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.passed == nil {
		return false
	}
	if m.last != tx || m.passed[tx.xid] == 0 {
		m.last = tx
		m.count++
		if len(m.passed) >= maxPassed {
			m.forgot = true
			clear(m.passed)
		}
		m.passed[tx.xid] = m.count
	}
	w := m.win
	if sabotage.On(sabotage.CopyByPosition) && w != nil && w.phase == windowFilled && tx.end <= w.through {
		return false
	}
	return w != nil && w.table == table && w.broken == "" && (w.phase == windowOpen || !w.view.sees(w.view.widen(tx.xid)))
}

// change notes a change for which wants said so. old and now are its keys, ""
// for a row that it does not have.
func (m *merge) change(tx *transaction, ch *decode.OrderChange, old, now string) {
	n := notedChange{xid: tx.xid, op: ch.Op, old: old, now: now, rel: ch.Relation}
	if ch.Op == decode.Update && leavesOut(ch) {
		n.partial = ch.After
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.win
	if w == nil {
		return
	}
	if w.phase == windowFilled {
		w.apply(&n)
	} else {
		n.partial = cloneRow(n.partial)
		w.noted = append(w.noted, n)
		w.bytes += notedOverhead + len(old) + len(now) + rowBytes(n.partial)
	}
	m.bound(w)
}

// truncated notes that a table was emptied.
func (m *merge) truncated(tx *transaction, table uint32) {
	if !m.wants(tx, table) {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.win
	if w == nil {
		return
	}
	n := notedChange{xid: tx.xid, op: decode.Truncate}
	if w.phase == windowFilled {
		w.apply(&n)
		return
	}
	w.noted = append(w.noted, n)
	w.bytes += notedOverhead
	m.bound(w)
}

// notedOverhead is what one noted change takes beside its bytes.
const notedOverhead = 128

func (m *merge) bound(w *window) {
	if w.bytes > m.limit && w.broken == "" {
		w.breakUp(fmt.Sprintf("more than %d bytes of changes to the table came while it was read", m.limit))
	}
}

// refuse gives the window up for a change that it cannot take.
func (m *merge) refuse(why string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.win != nil {
		m.win.breakUp(why)
	}
}

// breakUp gives up the rows. They are read again.
func (w *window) breakUp(why string) {
	w.broken = why
	w.noted, w.rows, w.index, w.sent = nil, nil, nil, 0
}

// open begins a window for a table.
func (m *merge) open(table uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.win = &window{table: table, since: m.count}
}

// errReadAgain ends a window whose rows are of no use. What it wraps says why.
var errReadAgain = errors.New("the rows have to be read again")

// errForgot: what was delivered is not known any more, so tracking has to begin
// anew.
var errForgot = errors.New("too many transactions were delivered to remember them")

// fence gives the window the snapshot of its read, which was taken after open.
//
// A transaction that was delivered before, and that the read does not see, is
// in the pipeline already: the rows would put back what was before it. Then the
// error says which one it is, and wraps errReadAgain. The cause is that a
// commit is in the WAL, and so in the stream, before it is visible.
func (m *merge) fence(v view) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.win
	if m.forgot {
		return errForgot
	}
	for xid, at := range m.passed {
		switch {
		case v.sees(v.widen(xid)):
			delete(m.passed, xid)
		case at <= w.since && !sabotage.On(sabotage.CopyBelievesDelivered):
			return fmt.Errorf("%w: transaction %d was delivered and is not visible yet", errReadAgain, xid)
		}
	}
	w.view, w.phase = v, windowFenced
	w.noted = slices.DeleteFunc(w.noted, func(n notedChange) bool { return v.sees(v.widen(n.xid)) })
	return w.err()
}

// received tells whether a transaction was delivered since tracking began.
func (m *merge) received(v *view, xid uint64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := m.passed[uint32(xid)]           //nolint:gosec // its lower half
	return ok && v.widen(uint32(xid)) == xid //nolint:gosec // its lower half
}

func (w *window) err() error {
	if w.broken != "" {
		return fmt.Errorf("%w: %s", errReadAgain, w.broken)
	}
	return nil
}

// fill gives the window its rows, which become the merge's. They go out when
// everything up to through has been delivered. Two rows of one key are a fault
// of the read.
func (m *merge) fill(columns []string, rows []copiedRow, through uint64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.win
	if err := w.err(); err != nil {
		return err
	}
	w.columns, w.rows, w.through = columns, rows, through
	w.index = make(map[string]int, len(rows))
	for i := range rows {
		if _, twice := w.index[rows[i].key]; twice {
			return fmt.Errorf("two rows that were read have one key in the destination")
		}
		w.index[rows[i].key] = i
	}
	w.phase = windowFilled
	w.bytes = 0
	noted := w.noted
	w.noted = nil
	for i := range noted {
		if w.broken == "" {
			w.apply(&noted[i])
		}
	}
	m.bound(w)
	m.wake.set()
	return w.err()
}

// apply brings the rows up to a change that the read did not see.
func (w *window) apply(n *notedChange) {
	switch {
	case w.broken != "":
	case n.op == decode.Truncate:
		for i := range w.rows {
			w.rows[i].gone = true
		}
		clear(w.index)
	case n.op != decode.Update || n.partial == nil || (n.old != "" && n.old != n.now) || sabotage.On(sabotage.CopyWithoutShadow):
		keyChange := n.old != "" && n.now != "" && n.old != n.now
		if !keyChange || !sabotage.On(sabotage.CopyNewKeyOnly) {
			w.take(n.old)
		}
		if !keyChange || !sabotage.On(sabotage.CopyOldKeyOnly) {
			w.take(n.now)
		}
	default:
		w.complete(n)
	}
}

// take leaves a key to the stream.
func (w *window) take(key string) {
	if i, ok := w.index[key]; ok && (!w.rows[i].absent || !sabotage.On(sabotage.CopyAbsenceStands)) {
		w.rows[i].gone = true
		delete(w.index, key)
	}
}

// complete applies an update that leaves out columns which did not change. The
// destination ignores it where the row is not there yet, so the row goes out
// with it.
func (w *window) complete(n *notedChange) {
	i, ok := w.index[n.now]
	if !ok {
		return // the stream has brought the row
	}
	row := &w.rows[i]
	if row.absent {
		w.take(n.now) // it was there before the update
		return
	}
	for at, v := range n.partial {
		if v.State == decode.Unchanged {
			continue
		}
		col := slices.Index(w.columns, n.rel.Columns[at].Name)
		if col < 0 {
			w.breakUp("a column came to the table while it was read")
			return
		}
		v.Bytes = slices.Clone(v.Bytes)
		w.bytes += len(v.Bytes)
		row.values[col] = v
	}
}

// due tells whether rows can go out once everything up to delivered is
// delivered.
func (m *merge) due(delivered uint64) bool {
	if !m.on.Load() {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.win
	return w != nil && w.phase == windowFilled && w.broken == "" && w.sent < len(w.rows) && delivered >= w.through
}

// nextKey gives the key of the row that goes out next, "" for none.
func (m *merge) nextKey() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.win
	if w == nil || w.phase != windowFilled || w.broken != "" {
		return ""
	}
	for i := w.sent; i < len(w.rows); i++ {
		if !w.rows[i].gone {
			return w.rows[i].key
		}
	}
	return ""
}

// next gives out rows, at most the given number and about as many bytes, at
// least one if any is left. They are the destination's from here on. Those that
// apart names go by themselves, at most few at a time.
func (m *merge) next(rows, bytes int, apart func(key string) bool, few int) (out []copiedRow, columns []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.win
	if w == nil || w.phase != windowFilled || w.broken != "" {
		return nil, nil
	}
	alone := false
	for w.sent < len(w.rows) && len(out) < rows && (len(out) == 0 || bytes > 0) {
		row := w.rows[w.sent]
		if !row.gone {
			suspect := apart(row.key)
			if len(out) == 0 {
				alone = suspect
			} else if suspect != alone || (alone && len(out) == few) {
				break
			}
		}
		w.rows[w.sent] = copiedRow{}
		w.sent++
		if row.gone {
			continue
		}
		delete(w.index, row.key)
		bytes -= rowBytes(row.values)
		out = append(out, row)
	}
	return out, w.columns
}

// left tells how many rows have not gone out yet, or why none will.
func (m *merge) left() (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.win == nil {
		return 0, errReadAgain
	}
	return len(m.win.rows) - m.win.sent, m.win.err()
}

// end closes the window.
func (m *merge) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.win = nil
}

// leavesOut tells whether an update leaves out columns whose values the old row
// does not give either.
func leavesOut(ch *decode.OrderChange) bool {
	for i := range ch.After {
		if ch.After[i].State == decode.Unchanged && (ch.Before == nil || ch.Before[i].State != decode.Set) {
			return true
		}
	}
	return false
}

func cloneRow(row []decode.Value) []decode.Value {
	if row == nil {
		return nil
	}
	own := slices.Clone(row)
	for i := range own {
		own[i].Bytes = slices.Clone(own[i].Bytes)
	}
	return own
}

// valueOverhead is what a value takes beside its bytes.
const valueOverhead = 48

func rowBytes(row []decode.Value) int {
	n := len(row) * valueOverhead
	for i := range row {
		n += len(row[i].Bytes)
	}
	return n
}
