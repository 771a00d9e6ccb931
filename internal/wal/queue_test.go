package wal

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"holdfast/internal/ack"
)

// read gives what a transaction holds.
func read(tx *transaction) (msgs []string, err error) {
	err = tx.each(func(msg []byte) error { msgs = append(msgs, string(msg)); return nil })
	return msgs, err
}

// Whatever is pushed, moved into the spill and taken, in whatever order: the
// same messages come out, in the same order, in whole transactions; the limits
// of a batch hold except for a transaction that is above them alone; memory
// and the spill are counted until they are released, and then are empty.
func TestQueueAgainstList(t *testing.T) {
	t.Parallel()
	type sent struct {
		xid  uint32
		end  uint64
		msgs []string
	}
	rapid.Check(t, func(t *rapid.T) {
		limit := int64(rapid.SampledFrom([]int{1 << 20, 1 << 18, 1 << 16}).Draw(t, "limit"))
		var sp *spill
		if rapid.Bool().Draw(t, "spill") {
			sp = memorySpill(int64(rapid.SampledFrom([]int{1 << 30, 1 << 21, 1 << 17}).Draw(t, "spill limit")))
		}
		q := newQueue(limit, sp)
		asm := newAssembler(limit, q.buffers, sp)
		// Deterministic but unpredictable: drawing megabytes would take minutes.
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		var waiting []sent
		var taken []*transaction
		var xid uint32
		t.Repeat(map[string]func(*rapid.T){
			"push": func(t *rapid.T) {
				xid++
				want := sent{xid: xid, end: uint64(xid) * 100}
				add := func(msg []byte) *transaction {
					tx, err := asm.add(msg, time.Unix(int64(xid), 0))
					if err != nil {
						t.Fatal(err)
					}
					return tx
				}
				add(beginMsg(xid))
				for range rapid.IntRange(1, 20).Draw(t, "rows") {
					msg := make([]byte, 1+random.IntN(rapid.SampledFrom([]int{40, 400, 4_000, 100_000}).Draw(t, "size")))
					msg[0] = 'I'
					for i := 1; i < len(msg); i += 64 {
						msg[i] = byte(random.Uint32())
					}
					want.msgs = append(want.msgs, string(msg))
					add(msg)
				}
				tx := add(commitMsg(want.end))
				tx.ticket = ack.Ticket(xid)
				if xid%7 == 0 {
					tx.truncated = map[uint32]int{xid: 1}
				}
				if sp != nil && len(tx.spilled) == 0 && tx.memory > asm.keep+int64(asm.block)+100_010 && asm.spillErr == nil {
					t.Fatalf("%d bytes stay in memory, with %d to be kept", tx.memory, asm.keep)
				}
				q.push(tx)
				waiting = append(waiting, want)
			},
			"relieve": func(t *rapid.T) {
				if sp == nil {
					t.Skip("there is no spill")
				}
				before := q.held()
				moved, err := q.relieve(int64(rapid.IntRange(0, int(limit)).Draw(t, "keep")))
				if after := q.held(); moved > 0 && err == nil && after >= before {
					t.Fatalf("%d moved, and memory goes from %d to %d", moved, before, after)
				}
			},
			"take": func(t *rapid.T) {
				rowLimit, byteLimit := rapid.IntRange(1, 100).Draw(t, "rows"), rapid.IntRange(1, 1<<20).Draw(t, "bytes")
				_, full, some := q.oldest(rowLimit, byteLimit)
				got, err := q.take(rowLimit, byteLimit)
				if err != nil {
					t.Fatal(err)
				}
				if some != (len(waiting) > 0) || some != (len(got) > 0) {
					t.Fatalf("took %d of %d, of which some wait: %v", len(got), len(waiting), some)
				}
				rows, size := 0, int64(0)
				for i, tx := range got {
					msgs, err := read(tx)
					if err != nil {
						t.Fatal(err)
					}
					if tx.xid != waiting[i].xid || tx.end != waiting[i].end || tx.ticket != ack.Ticket(tx.xid) || !tx.received.Equal(time.Unix(int64(tx.xid), 0)) {
						t.Fatalf("took %+v, want %d", tx, waiting[i].xid)
					}
					if (tx.truncated[tx.xid] == 1) != (tx.xid%7 == 0) {
						t.Fatalf("transaction %d: TRUNCATEs %v", tx.xid, tx.truncated)
					}
					if !slices.Equal(waiting[i].msgs, msgs) {
						t.Fatalf("transaction %d holds %d messages, not the %d that were put in", tx.xid, len(msgs), len(waiting[i].msgs))
					}
					rows, size = rows+tx.rows, size+tx.bytes
				}
				if len(got) > 1 && (rows > rowLimit || size > int64(byteLimit)) {
					t.Fatalf("%d transactions with %d rows and %d bytes above the limits %d and %d", len(got), rows, size, rowLimit, byteLimit)
				}
				if n := len(got); n > 0 && n < len(waiting) && !full {
					t.Fatal("less than what waits was taken, although it did not fill a batch")
				}
				waiting, taken = waiting[len(got):], append(taken, got...)
			},
			"release": func(*rapid.T) {
				q.release(taken)
				taken = nil
			},
			"": func(t *rapid.T) {
				if len(waiting)+len(taken) > 0 {
					if q.held() <= 0 {
						t.Fatalf("held %d with %d waiting", q.held(), len(waiting))
					}
					return
				}
				if q.held() != 0 {
					t.Fatalf("%d bytes are counted of nothing", q.held())
				}
				if sp != nil {
					if used, files := sp.held(); used != 0 || files != 0 {
						t.Fatalf("%d bytes in %d files of the spill for nothing", used, files)
					}
				}
			},
		})
	})
}

// A backlog of tiny transactions takes little memory once it is in the spill:
// not even their bookkeeping stays.
func TestQueueOfTinyTransactions(t *testing.T) {
	t.Parallel()
	sp := memorySpill(1 << 30)
	q := newQueue(1<<20, sp)
	asm := newAssembler(1<<20, q.buffers, sp)
	const n = 20_000
	for i := range uint64(n) {
		for _, msg := range [][]byte{beginMsg(uint32(i)), []byte(fmt.Sprintf("I%06d", i))} {
			if _, err := asm.add(msg, time.Now()); err != nil {
				t.Fatal(err)
			}
		}
		tx, err := asm.add(commitMsg(i+1), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		q.push(tx)
		if q.held() > 1<<19 {
			if _, err := q.relieve(1 << 18); err != nil {
				t.Fatal(err)
			}
		}
	}
	if held, limit := q.held(), int64(n*(ledgerOverhead+8)+1<<19); held > limit {
		t.Errorf("%d bytes in memory for %d tiny transactions, want at most %d", held, n, limit)
	}
	next := uint64(1)
	for next <= n {
		txs, err := q.take(1000, 1<<20)
		if err != nil || len(txs) == 0 {
			t.Fatalf("%d transactions, %v; next is %d", len(txs), err, next)
		}
		for _, tx := range txs {
			if msgs, err := read(tx); err != nil || tx.end != next || !bytes.Equal([]byte(msgs[0]), []byte(fmt.Sprintf("I%06d", next-1))) {
				t.Fatalf("transaction %d: %q, %v, want %d", tx.end, msgs, err, next)
			}
			next++
		}
		q.release(txs)
	}
	if q.held() != 0 {
		t.Errorf("%d bytes are counted of nothing", q.held())
	}
}
