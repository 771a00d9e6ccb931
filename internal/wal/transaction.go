package wal

import (
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"holdfast/internal/ack"
	"holdfast/internal/crash"
	"holdfast/internal/decode"
)

// transaction is one committed transaction as the server sent it: the
// pgoutput messages between BEGIN and COMMIT that concern rows, undecoded.
type transaction struct {
	// frames holds the messages, each behind its length as 4 bytes. It
	// includes the Relation messages, so that whoever decodes the frames of
	// all transactions in order needs nothing else.
	frames []byte
	rows   int
	xid    uint32
	// end is the commit's end LSN: the only position of it that may be
	// acknowledged.
	end        uint64
	commitTime time.Time
	received   time.Time
	ticket     ack.Ticket
	// truncated counts the TRUNCATEs of each relation in it, by OID; nil for
	// none, as for nearly all.
	truncated map[uint32]int
}

// overhead is what a transaction takes beside its frames, in the queue and in
// the ledger: without it, a backlog of tiny transactions would take many times
// the memory that is counted.
const overhead = 256

// size is the memory that the transaction is counted with.
func (t *transaction) size() int64 { return int64(len(t.frames)) + overhead }

// each calls fn for every message. The frames were written by add, so their
// lengths hold.
func (t *transaction) each(fn func(msg []byte) error) error {
	for rest := t.frames; len(rest) > 0; {
		n := binary.BigEndian.Uint32(rest)
		if err := fn(rest[4 : 4+n]); err != nil {
			return err
		}
		rest = rest[4+n:]
	}
	return nil
}

// assembler turns the messages of one connection into transactions. It holds
// the one transaction that is open. It checks the order of BEGIN and COMMIT
// and nothing else: rows are decoded by whoever delivers them.
type assembler struct {
	limit   int64
	open    *transaction
	commits *decode.PgOutput
	buffers *buffers
}

func newAssembler(limit int64, b *buffers) *assembler {
	return &assembler{limit: limit, commits: decode.NewPgOutput(), buffers: b}
}

// inTransaction tells whether a BEGIN is open.
func (a *assembler) inTransaction() bool { return a.open != nil }

// held is the memory of the open transaction.
func (a *assembler) held() int64 {
	if a.open == nil {
		return 0
	}
	return a.open.size()
}

// add takes one pgoutput message and returns the transaction that it
// completes, if it completes one. msg is copied.
func (a *assembler) add(msg []byte, now time.Time) (*transaction, error) {
	if len(msg) == 0 {
		return nil, &decode.Refusal{Reason: decode.ReasonMalformed, What: "pgoutput message", Why: "it is empty"}
	}
	switch kind := decode.MessageKind(msg[0]); kind {
	case decode.MsgBegin:
		m, err := a.commits.Decode(msg)
		if err != nil {
			return nil, err
		}
		if a.open != nil {
			return nil, outOfOrder("BEGIN", m.CommitLSN, "another transaction is open")
		}
		a.open = &transaction{xid: m.XID, received: now, frames: a.buffers.get()}
		crash.Here(crash.PgBegin)
		return nil, nil
	case decode.MsgCommit:
		m, err := a.commits.Decode(msg)
		if err != nil {
			return nil, err
		}
		if a.open == nil {
			return nil, outOfOrder("COMMIT", m.CommitLSN, "no transaction is open")
		}
		tx := a.open
		tx.end, tx.commitTime = m.EndLSN, m.CommitTime
		a.open = nil
		return tx, nil
	case decode.MsgOrigin, decode.MsgLogical:
		return nil, nil // nothing about rows; a logical message may stand outside a transaction
	case decode.MsgInsert, decode.MsgUpdate, decode.MsgDelete, decode.MsgTruncate, decode.MsgRelation, decode.MsgType:
		if a.open == nil {
			return nil, outOfOrder(fmt.Sprintf("message %q", msg[0]), 0, "no transaction is open")
		}
		if held := a.held() + int64(len(msg)) + 4; held > a.limit {
			return nil, &decode.Refusal{
				Reason: decode.ReasonLimit, What: "transaction", Where: fmt.Sprintf("xid %d", a.open.xid),
				Why:      fmt.Sprintf("it is larger than %d bytes with %d rows received and its COMMIT still to come", a.limit, a.open.rows),
				Expected: "every transaction to fit into PGSOURCE_MEMORY_LIMIT",
				Do:       "raise PGSOURCE_MEMORY_LIMIT; the slot keeps its position and the transaction is read again",
			}
		}
		if kind != decode.MsgRelation && kind != decode.MsgType {
			a.open.rows++
		}
		if kind == decode.MsgTruncate {
			if err := a.open.addTruncate(msg); err != nil {
				return nil, err
			}
		}
		a.open.frames = binary.BigEndian.AppendUint32(a.open.frames, uint32(len(msg))) //nolint:gosec // a wire message is below 1 GiB
		a.open.frames = append(a.open.frames, msg...)
		crash.Here(crash.PgBuffer)
		return nil, nil
	}
	// Let the decoder say what is wrong with it.
	_, err := a.commits.Decode(msg)
	return nil, err
}

func outOfOrder(what string, lsn uint64, why string) error {
	r := &decode.Refusal{Reason: decode.ReasonMalformed, What: what, Why: why, Expected: "BEGIN, rows and COMMIT in this order"}
	if lsn != 0 {
		r.Where = "LSN " + decode.FormatLSN(lsn)
	}
	return r
}

// Bounds of the spare buffers: enough for a steady stream of transactions of
// usual size, and no more memory than this is kept for nothing.
const (
	spareBuffers    = 64
	spareBufferSize = 1 << 20
)

// buffers keeps the memory of delivered transactions for the next ones:
// growing a buffer row by row copies every row about twice and leaves the rest
// to the garbage collector.
type buffers struct {
	mu    sync.Mutex
	spare [][]byte
}

func (b *buffers) get() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := len(b.spare)
	if n == 0 {
		return nil
	}
	buf := b.spare[n-1]
	b.spare = b.spare[:n-1]
	return buf
}

func (b *buffers) put(buf []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.spare) < spareBuffers && cap(buf) > 0 && cap(buf) <= spareBufferSize {
		b.spare = append(b.spare, buf[:0])
	}
}

// queue holds the transactions that were received whole and wait for
// delivery, and counts the memory of everything that was received and not yet
// accepted. It is bounded by its users: the reader disconnects when the
// memory is used up.
type queue struct {
	buffers *buffers

	mu      sync.Mutex
	waiting []*transaction
	// bytes is the memory of the waiting transactions and of those that were
	// taken and not yet released.
	bytes   int64
	arrived signal
	emptied signal
}

func newQueue() *queue {
	return &queue{buffers: new(buffers), arrived: newSignal(), emptied: newSignal()}
}

func (q *queue) push(tx *transaction) {
	q.mu.Lock()
	q.waiting = append(q.waiting, tx)
	q.bytes += tx.size()
	q.mu.Unlock()
	q.arrived.set()
}

// take removes whole transactions from the front: the first one always, more
// while the sum stays within rows and bytes. It returns nil when none waits.
func (q *queue) take(rows, bytes int) []*transaction {
	q.mu.Lock()
	defer q.mu.Unlock()
	n, sumRows, sumBytes := 0, 0, 0
	for n < len(q.waiting) {
		tx := q.waiting[n]
		sumRows += tx.rows
		sumBytes += len(tx.frames)
		if n > 0 && (sumRows > rows || sumBytes > bytes) {
			break
		}
		n++
	}
	taken := q.waiting[:n:n]
	q.waiting = q.waiting[n:]
	return taken
}

// oldest gives when the first waiting transaction was received and whether
// the waiting ones fill a batch already.
func (q *queue) oldest(rows, bytes int) (received time.Time, full, any bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		return time.Time{}, false, false
	}
	sumRows, sumBytes := 0, 0
	for _, tx := range q.waiting {
		sumRows += tx.rows
		sumBytes += len(tx.frames)
		if sumRows >= rows || sumBytes >= bytes {
			full = true
			break
		}
	}
	return q.waiting[0].received, full, true
}

// release gives back the memory of transactions that take returned.
func (q *queue) release(txs []*transaction) {
	q.mu.Lock()
	for _, tx := range txs {
		q.bytes -= tx.size()
		q.buffers.put(tx.frames)
		tx.frames = nil
	}
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
