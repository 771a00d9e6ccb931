package wal

import (
	"encoding/binary"
	"errors"
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
	// The messages, each behind its length as 4 bytes, in blocks of whole ones:
	// first those in the spill, then those in memory. They include the Relation
	// messages, so that whoever decodes the messages of all transactions in
	// order needs nothing else.
	spilled []extent
	blocks  [][]byte
	// bytes is the length of all blocks, memory of those in memory.
	bytes, memory int64

	rows int
	xid  uint32
	// commit is where its commit record begins, as its BEGIN said: for people.
	commit uint64
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

const (
	// overhead is what a transaction takes beside its messages, in the queue and
	// in the ledger: without it, a backlog of tiny transactions would take many
	// times the memory that is counted.
	overhead = 256
	// ledgerOverhead is what one takes in the ledger alone.
	ledgerOverhead = 48
	// extentOverhead is what one block in the spill takes in memory.
	extentOverhead = 32
)

// size is the memory that the transaction is counted with.
func (t *transaction) size() int64 {
	return t.memory + int64(len(t.spilled))*extentOverhead + overhead
}

// each calls fn for every message, which is valid until fn returns. The blocks
// were written by add, so their lengths hold; what comes out of the spill has
// been checked against what went in.
func (t *transaction) each(fn func(msg []byte) error) error {
	var r blockReader
	for _, e := range t.spilled {
		block, err := r.read(e)
		if err != nil {
			return err
		}
		if err := eachMessage(block, fn); err != nil {
			return err
		}
	}
	for _, block := range t.blocks {
		if err := eachMessage(block, fn); err != nil {
			return err
		}
	}
	return nil
}

func eachMessage(block []byte, fn func(msg []byte) error) error {
	for rest := block; len(rest) > 0; {
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
	open    *transaction
	commits *decode.PgOutput
	buffers *buffers

	// spill takes the blocks of a transaction that is larger than keep, nil for
	// none. block is the size at which a block is full.
	spill *spill
	keep  int64
	block int
	// spillErr is why the blocks of the open transaction stay in memory.
	spillErr error
}

// newAssembler makes an assembler for a connection under a memory limit.
func newAssembler(limit int64, b *buffers, sp *spill) *assembler {
	return &assembler{
		commits: decode.NewPgOutput(), buffers: b, spill: sp,
		keep: min(limit/8, maxKept), block: int(min(max(limit/64, minBlock), maxBlock)),
	}
}

const (
	// maxKept is the most of one open transaction that stays in memory where
	// there is a spill: what is larger is streamed from it anyway.
	maxKept  = 16 << 20
	minBlock = 4 << 10
	maxBlock = 256 << 10
)

// inTransaction tells whether a BEGIN is open.
func (a *assembler) inTransaction() bool { return a.open != nil }

// held is the memory of the open transaction.
func (a *assembler) held() int64 {
	if a.open == nil {
		return 0
	}
	return a.open.size()
}

// drop gives up the open transaction: its connection has ended, and the next
// one brings it again.
func (a *assembler) drop() {
	if a.open == nil {
		return
	}
	if a.spill != nil {
		a.spill.release(a.open.spilled)
	}
	a.open = nil
}

// append adds a message to the open transaction, and sends what is full to the
// spill once the transaction is larger than keep. What the spill does not take
// stays in memory, for the reader to judge.
func (a *assembler) append(msg []byte) {
	tx := a.open
	need := 4 + len(msg)
	last := len(tx.blocks) - 1
	full := last >= 0 && len(tx.blocks[last]) > 0 && len(tx.blocks[last])+need > a.block
	switch {
	case last < 0:
		tx.blocks = append(tx.blocks, a.buffers.get())
		last++
	case full:
		next := a.buffers.get()
		if cap(next) < need {
			next = make([]byte, 0, max(a.block, need))
		}
		tx.blocks = append(tx.blocks, next)
		last++
	}
	b := binary.BigEndian.AppendUint32(tx.blocks[last], uint32(len(msg))) //nolint:gosec // a wire message is below 1 GiB
	tx.blocks[last] = append(b, msg...)
	tx.bytes += int64(need)
	tx.memory += int64(need)
	if a.spill == nil || (tx.memory <= a.keep && len(tx.spilled) == 0) || (!full && need <= a.block) {
		return
	}
	a.spillErr = tx.toSpill(a.spill, a.buffers, last)
	if need > a.block && a.spillErr == nil { // a block of its own, and a large one
		a.spillErr = tx.toSpill(a.spill, a.buffers, 1)
	}
}

// toSpill moves the first n blocks in memory into the spill.
func (t *transaction) toSpill(sp *spill, b *buffers, n int) error {
	for range n {
		e, err := sp.write(t.blocks[0])
		if err != nil {
			return err
		}
		t.spilled = append(t.spilled, e)
		crash.Here(crash.PgSpill)
		t.memory -= e.length
		b.put(t.blocks[0])
		t.blocks[0] = nil
		t.blocks = t.blocks[1:]
	}
	return nil
}

// tooLarge is the error for an open transaction that does not fit although
// nothing else is held.
func (a *assembler) tooLarge(limit int64) error {
	what := fmt.Sprintf("xid %d, commit at LSN %s", a.open.xid, decode.FormatLSN(a.open.commit))
	received := fmt.Sprintf("%d bytes in %d rows are received and its COMMIT is still to come", a.open.bytes, a.open.rows)
	switch {
	case a.spillErr != nil && !errors.Is(a.spillErr, errSpillFull):
		return fmt.Errorf("transaction (%s) is larger than memory allows (%d bytes) and cannot be spilled; %s: %w", what, limit, received, a.spillErr)
	case a.spill == nil:
		return &decode.Refusal{
			Reason: decode.ReasonLimit, What: "transaction", Where: what,
			Why: fmt.Sprintf("it is larger than %d bytes: %s", limit, received), Expected: "every transaction to fit into PGSOURCE_MEMORY_LIMIT where there is no spill",
			Do: "set PGSOURCE_SPILL_DIR and PGSOURCE_SPILL_LIMIT, or raise PGSOURCE_MEMORY_LIMIT; the slot keeps its position and the transaction is read again",
		}
	}
	return &decode.Refusal{
		Reason: decode.ReasonLimit, What: "transaction", Where: what,
		Why:      fmt.Sprintf("it is larger than the spill (%d bytes) and memory (%d bytes): %s", a.spill.limit, limit, received),
		Expected: "every transaction to fit into PGSOURCE_SPILL_LIMIT",
		Do:       "raise PGSOURCE_SPILL_LIMIT; the slot keeps its position and the transaction is read again",
	}
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
		alike(msg, m)
		if a.open != nil {
			return nil, outOfOrder("BEGIN", m.CommitLSN, "another transaction is open")
		}
		a.open, a.spillErr = &transaction{xid: m.XID, commit: m.CommitLSN, received: now}, nil
		crash.Here(crash.PgBegin)
		return nil, nil
	case decode.MsgCommit:
		m, err := a.commits.Decode(msg)
		if err != nil {
			return nil, err
		}
		alike(msg, m)
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
		if kind != decode.MsgRelation && kind != decode.MsgType {
			a.open.rows++
		}
		if kind == decode.MsgTruncate {
			if err := a.open.addTruncate(msg); err != nil {
				return nil, err
			}
		}
		a.append(msg)
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

// spareBufferSize bounds one spare buffer, so that a rare large row does not
// keep its memory.
const spareBufferSize = 1 << 20

// buffers keeps the memory of delivered transactions for the next ones:
// growing a buffer row by row copies every row about twice and leaves the rest
// to the garbage collector.
type buffers struct {
	limit int64 // of all spare ones

	mu    sync.Mutex
	spare [][]byte
	bytes int64
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
	b.bytes -= int64(cap(buf))
	return buf
}

func (b *buffers) put(buf []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := int64(cap(buf)); n > 0 && n <= spareBufferSize && b.bytes+n <= b.limit && len(b.spare) < maxSpare {
		b.spare = append(b.spare, buf[:0])
		b.bytes += n
	}
}

// maxSpare bounds the number of spare buffers: a small transaction that gets a
// large one holds more memory than it is counted with.
const maxSpare = 64
