package wal

import (
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"holdfast/internal/ack"
)

// queue holds the transactions that were received whole and wait for
// delivery, and counts the memory of everything that was received and not yet
// accepted. It is bounded by its users: the reader moves what is too much for
// memory into the spill, and disconnects when that does not help.
//
// One goroutine takes and releases, the deliverer; one pushes and relieves,
// the reader.
type queue struct {
	buffers *buffers
	spill   *spill // nil for none

	mu      sync.Mutex
	waiting []unit
	// bytes is the memory of the waiting transactions and of those that were
	// taken and not yet released.
	bytes int64
	// hopeless is the number of bytes below which relieve need not try again,
	// after it failed.
	hopeless int64
	// fault is why relieve could do no more; nil where there was no more to do.
	fault   error
	arrived signal
	emptied signal

	// loaded are the transactions of the pack that was read last and that were
	// not taken yet. They belong to the deliverer, but their count is guarded
	// by mu.
	loaded []*transaction
	reader blockReader

	// packSize is about how large packs are; scratch is where they are made.
	packSize int64
	scratch  []byte
}

// unit is one waiting transaction, or a pack of adjacent small ones in the
// spill.
type unit struct {
	tx   *transaction
	pack *pack
}

// pack is a run of small transactions as one block of the spill: of thousands
// of them in memory, not even the bookkeeping would be small.
type pack struct {
	at       extent
	count    int
	rows     int
	bytes    int64
	received time.Time // of the first
}

const packOverhead = 192

// size is the memory that the pack is counted with.
func (p *pack) size() int64 { return packOverhead + int64(p.count)*ledgerOverhead }

// newQueue makes a queue for a memory limit.
func newQueue(limit int64, sp *spill) *queue {
	return &queue{
		buffers: &buffers{limit: limit / 8}, spill: sp, arrived: newSignal(), emptied: newSignal(),
		packSize: min(max(limit/16, minBlock), maxBlock),
	}
}

func (q *queue) push(tx *transaction) {
	q.mu.Lock()
	q.waiting = append(q.waiting, unit{tx: tx})
	q.bytes += tx.size()
	q.mu.Unlock()
	q.arrived.set()
}

// take removes whole transactions from the front: the first one always, more
// while the sum stays within rows and bytes. It returns nil when none waits.
// An error means that the spill cannot give back what it holds; the queue is
// of no use then.
func (q *queue) take(rows, bytes int) ([]*transaction, error) {
	var taken []*transaction
	sumRows, sumBytes := 0, int64(0)
	for {
		tx, err := q.front()
		if err != nil {
			return nil, err
		}
		if tx == nil {
			return taken, nil
		}
		sumRows += tx.rows
		sumBytes += tx.bytes
		if len(taken) > 0 && (sumRows > rows || sumBytes > int64(bytes)) {
			return taken, nil
		}
		taken = append(taken, tx)
		q.pop()
	}
}

// front gives the first waiting transaction, reading its pack where it must;
// nil for none.
func (q *queue) front() (*transaction, error) {
	q.mu.Lock()
	if len(q.loaded) > 0 {
		defer q.mu.Unlock()
		return q.loaded[0], nil
	}
	if len(q.waiting) == 0 {
		q.mu.Unlock()
		return nil, nil //nolint:nilnil // none waits
	}
	p := q.waiting[0].pack
	if p == nil {
		defer q.mu.Unlock()
		return q.waiting[0].tx, nil
	}
	q.mu.Unlock()
	// Only this goroutine removes units, so the pack stays the first one.
	block, err := q.reader.read(p.at)
	if err != nil {
		return nil, err
	}
	txs, err := p.unpack(block)
	if err != nil {
		return nil, err
	}
	q.spill.release([]extent{p.at})
	q.mu.Lock()
	defer q.mu.Unlock()
	q.removeFirst()
	for _, tx := range txs {
		q.bytes += tx.size()
	}
	q.bytes -= p.size()
	q.loaded = txs
	return txs[0], nil
}

// pop removes what front gave.
func (q *queue) pop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.loaded) > 0 {
		q.loaded = q.loaded[1:]
		return
	}
	q.removeFirst()
}

func (q *queue) removeFirst() {
	q.waiting[0] = unit{}
	q.waiting = q.waiting[1:]
}

// oldest gives when the first waiting transaction was received and whether
// the waiting ones fill a batch already.
func (q *queue) oldest(rows, bytes int) (received time.Time, full, any bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	sumRows, sumBytes := 0, int64(0)
	add := func(r int, b int64, at time.Time) bool {
		if !any {
			received, any = at, true
		}
		sumRows += r
		sumBytes += b
		return sumRows >= rows || sumBytes >= int64(bytes)
	}
	for _, tx := range q.loaded {
		if add(tx.rows, tx.bytes, tx.received) {
			return received, true, true
		}
	}
	for _, u := range q.waiting {
		if u.pack != nil {
			if add(u.pack.rows, u.pack.bytes, u.pack.received) {
				return received, true, true
			}
		} else if add(u.tx.rows, u.tx.bytes, u.tx.received) {
			return received, true, true
		}
	}
	return received, false, any
}

// release gives back the memory of transactions that take returned.
func (q *queue) release(txs []*transaction) {
	q.mu.Lock()
	for _, tx := range txs {
		q.bytes -= tx.size()
		for _, b := range tx.blocks {
			q.buffers.put(b)
		}
		if q.spill != nil {
			q.spill.release(tx.spilled)
		}
		tx.blocks, tx.spilled = nil, nil
	}
	q.hopeless, q.fault = 0, nil // there is room again
	empty := q.bytes == 0
	q.mu.Unlock()
	if empty {
		q.emptied.set()
	}
}

func (q *queue) held() int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.bytes
}

// relieve moves waiting transactions into the spill, but for the first ones up
// to keep bytes, which are delivered next. It returns how many it moved, and
// the error that kept it from moving more: then the rest stays in memory.
//
// It writes under the lock. That makes the deliverer wait for a disk, and
// nobody for the destination.
func (q *queue) relieve(keep int64) (moved int, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.bytes < q.hopeless {
		return 0, q.fault
	}
	var kept int64
	first := 0
	for ; first < len(q.waiting) && kept < keep; first++ {
		if tx := q.waiting[first].tx; tx != nil {
			kept += tx.size()
		}
	}
	rest := q.waiting[first:]
	var movable int64
	for _, u := range rest {
		if u.tx != nil && len(u.tx.spilled) == 0 {
			movable += u.tx.size()
		}
	}
	if movable < q.packSize { // a pack is worth its bookkeeping
		q.giveUp(q.waiting, nil)
		return 0, nil
	}
	done := append([]unit(nil), q.waiting[:first]...)
	for i := 0; i < len(rest); {
		tx := rest[i].tx
		switch {
		case tx == nil || len(tx.spilled) > 0:
			done = append(done, rest[i])
			i++
		case !q.packable(tx):
			before := tx.size()
			if err = tx.toSpill(q.spill, q.buffers, len(tx.blocks)); err != nil {
				q.bytes += tx.size() - before
				q.giveUp(append(done, rest[i:]...), err)
				return moved, err
			}
			q.bytes += tx.size() - before
			done = append(done, rest[i])
			moved++
			i++
		default:
			n := q.run(rest[i:])
			var p *pack
			if p, err = q.pack(rest[i : i+n]); err != nil {
				q.giveUp(append(done, rest[i:]...), err)
				return moved, err
			}
			done = append(done, unit{pack: p})
			moved += n
			i += n
		}
	}
	q.waiting, q.fault = done, nil
	return moved, nil
}

// giveUp ends a relieve that could do no more.
func (q *queue) giveUp(waiting []unit, fault error) {
	q.waiting, q.fault = waiting, fault
	q.hopeless = q.bytes + q.packSize
}

// packable tells whether a pack can hold all of a transaction: what is seldom
// there has no place in it.
func (q *queue) packable(tx *transaction) bool { return tx.bytes <= q.packSize && tx.truncated == nil }

// run tells how many of the units make the next pack: at least the first one.
func (q *queue) run(units []unit) int {
	n, bytes := 0, int64(0)
	for _, u := range units {
		if u.tx == nil || len(u.tx.spilled) > 0 || (n > 0 && !q.packable(u.tx)) || (n > 0 && bytes+u.tx.bytes > q.packSize) {
			break
		}
		bytes += u.tx.bytes
		n++
	}
	return n
}

// packHeader is what stands before each transaction's messages in a pack: xid,
// rows, commit and end LSN, commit and receive time, ticket, length.
const packHeader = 4 + 4 + 8 + 8 + 8 + 8 + 8 + 4

// pack writes transactions into the spill as one block and gives back their
// memory.
func (q *queue) pack(units []unit) (*pack, error) {
	p := &pack{count: len(units), received: units[0].tx.received}
	h := q.scratch[:0]
	for _, u := range units {
		tx := u.tx
		h = binary.BigEndian.AppendUint32(h, tx.xid)
		h = binary.BigEndian.AppendUint32(h, uint32(tx.rows)) //nolint:gosec // fewer than packSize
		h = binary.BigEndian.AppendUint64(h, tx.commit)
		h = binary.BigEndian.AppendUint64(h, tx.end)
		h = binary.BigEndian.AppendUint64(h, uint64(tx.commitTime.UnixMicro()))
		h = binary.BigEndian.AppendUint64(h, uint64(tx.received.UnixNano()))
		h = binary.BigEndian.AppendUint64(h, uint64(tx.ticket))
		h = binary.BigEndian.AppendUint32(h, uint32(tx.bytes)) //nolint:gosec // at most packSize
		for _, b := range tx.blocks {
			h = append(h, b...)
		}
		p.rows += tx.rows
		p.bytes += tx.bytes
	}
	q.scratch = h
	var err error
	if p.at, err = q.spill.write(h); err != nil {
		return nil, err
	}
	for _, u := range units {
		q.bytes -= u.tx.size()
		for _, b := range u.tx.blocks {
			q.buffers.put(b)
		}
		u.tx.blocks = nil
	}
	q.bytes += p.size()
	return p, nil
}

// unpack gives the transactions of a pack. The block's checksum was right, so
// a length that does not fit is a mistake of ours; it is treated like damage.
func (p *pack) unpack(block []byte) ([]*transaction, error) {
	txs := make([]*transaction, 0, p.count)
	for len(block) >= packHeader {
		n := int64(binary.BigEndian.Uint32(block[packHeader-4:]))
		if int64(len(block)-packHeader) < n {
			break
		}
		tx := &transaction{
			xid: binary.BigEndian.Uint32(block), rows: int(binary.BigEndian.Uint32(block[4:])),
			commit: binary.BigEndian.Uint64(block[8:]), end: binary.BigEndian.Uint64(block[16:]),
			commitTime: time.UnixMicro(int64(binary.BigEndian.Uint64(block[24:]))), //nolint:gosec // as it was written
			received:   time.Unix(0, int64(binary.BigEndian.Uint64(block[32:]))),   //nolint:gosec // as it was written
			ticket:     ack.Ticket(binary.BigEndian.Uint64(block[40:])),
			bytes:      n, memory: n,
			// A copy: the block's memory is used for the next one.
			blocks: [][]byte{append([]byte(nil), block[packHeader:packHeader+n]...)},
		}
		txs = append(txs, tx)
		block = block[packHeader+n:]
	}
	if len(block) > 0 || len(txs) != p.count {
		return nil, fmt.Errorf("%w: a pack of %d transactions holds %d and %d bytes", errSpillDamaged, p.count, len(txs), len(block))
	}
	return txs, nil
}
