package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/jackc/pglogrepl"

	"holdfast/internal/decode"
	"holdfast/test/harness"
)

// postgresTap listens to the replication connections of pgsource, both ways:
// it learns from the server which transaction ends where, and checks every
// status update at the moment it is sent, before the server has it. The end
// state alone would miss most wrong orders: a position that is confirmed too
// early loses nothing unless a crash follows at the right moment.
//
// Of a pgsource that peeks it hears the answers to its queries, and the queries
// with which it advances the slot: each is judged as a status update is.
type postgresTap struct {
	oracle *bankOracle
	// progress: a transaction is proven by its progress row, not by its rows.
	progress bool
	peeks    bool

	mu sync.Mutex
	// ends are the transactions in commit order that the server has sent and
	// that are not confirmed yet.
	ends []ended
	// known is the highest end that the server has sent.
	known     uint64
	confirmed uint64
	idle      map[uint64]bool // positions of keepalives since known
	updates   int
	moves     int // updates that said more than the one before
	samples   int
	another   bool // the slot is one that the daemon has not moved
	// confirmedOf is the last transaction of each writer that was confirmed.
	confirmedOf [writers + 1]int64
	early       []string
	back        []string
	invented    []string
}

type ended struct {
	end    uint64
	writer int
	n      int64
}

func newPostgresTap(o *bankOracle, v *variant) *postgresTap {
	return &postgresTap{oracle: o, progress: v.progress, peeks: v.peek, idle: make(map[uint64]bool)}
}

// connection makes the two ears of one connection.
func (t *postgresTap) connection() [2]func([]byte) {
	var ears [2]func([]byte)
	c := &heard{t: t, decoder: decode.NewPgOutput()}
	up := &framer{first: true, message: c.fromClient}
	down := &framer{message: c.fromServer}
	ears[harness.Up], ears[harness.Down] = up.add, down.add
	return ears
}

// heard is what was heard on one connection.
type heard struct {
	t       *postgresTap
	decoder *decode.PgOutput
	open    ended
	query   string // the last one, which the server answers
}

// fromServer takes one message of the server: of a stream, or an answer to one
// who peeks. Other connections carry neither.
func (c *heard) fromServer(kind byte, body []byte) {
	c.t.mu.Lock()
	defer c.t.mu.Unlock()
	switch {
	case kind == 'd':
		m, err := decode.ParseCopy(body)
		switch {
		case err != nil: // the daemon will say what is wrong with it
		case m.Kind == decode.CopyKeepalive:
			c.t.idle[m.WALEnd] = true
		default:
			c.change(m.Data)
		}
	case kind == 'D' && c.t.peeks:
		c.row(body)
	}
}

// row takes a row of an answer: a message of the slot, or what the server says
// of itself before it is asked for those.
func (c *heard) row(body []byte) {
	values, ok := dataRow(body)
	const flush = 6 // of the facts: up to there the next answer has everything
	switch {
	case !ok:
	case len(values) == 1 && strings.Contains(c.query, "FROM peeked"):
		c.change(values[0])
	case len(values) > flush && string(values[0]) == "facts":
		if at, err := pglogrepl.ParseLSN(string(values[flush])); err == nil {
			c.t.idle[uint64(at)] = true
		}
	}
}

// dataRow takes the values of a row apart; false where it is none.
func dataRow(body []byte) (values [][]byte, ok bool) {
	if len(body) < 2 {
		return nil, false
	}
	n := int(binary.BigEndian.Uint16(body))
	for body = body[2:]; n > 0; n-- {
		if len(body) < 4 {
			return nil, false
		}
		size := int(int32(binary.BigEndian.Uint32(body)))
		body = body[4:]
		if size > len(body) {
			return nil, false
		}
		if size < 0 {
			values = append(values, nil)
			continue
		}
		values, body = append(values, body[:size]), body[size:]
	}
	return values, len(body) == 0
}

// change takes one message of pgoutput. The caller holds the lock.
func (c *heard) change(data []byte) {
	t, open := c.t, &c.open
	msg, err := c.decoder.Decode(data)
	if err != nil {
		return
	}
	switch msg.Kind {
	case decode.MsgBegin:
		*open = ended{}
	case decode.MsgInsert, decode.MsgUpdate:
		if msg.Change.Relation.Name != "writers" {
			return
		}
		id, errID := strconv.Atoi(string(msg.Change.After[0].Bytes))
		n, errN := strconv.ParseInt(string(msg.Change.After[1].Bytes), 10, 64)
		if errID == nil && errN == nil && n > 0 { // 0 is the row that the writers start with
			open.writer, open.n = id, n
		}
	case decode.MsgCommit:
		if msg.EndLSN <= t.known {
			return // a replay
		}
		t.known = msg.EndLSN
		open.end = msg.EndLSN
		t.ends = append(t.ends, *open)
	case decode.MsgDelete, decode.MsgTruncate, decode.MsgRelation, decode.MsgType, decode.MsgOrigin, decode.MsgLogical:
	}
}

// advanced finds the position in a query that advances the slot.
var advanced = regexp.MustCompile(`pg_replication_slot_advance\('holdfast', '([0-9A-F]+/[0-9A-F]+)'\)`)

// fromClient takes one message of the daemon and checks what it acknowledges.
func (c *heard) fromClient(kind byte, body []byte) {
	t := c.t
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case kind == 'd' && len(body) == 34 && body[0] == 'r':
		write, flush, apply := binary.BigEndian.Uint64(body[1:]), binary.BigEndian.Uint64(body[9:]), binary.BigEndian.Uint64(body[17:])
		if write != flush || apply != flush {
			t.invented = append(t.invented, fmt.Sprintf("write %s, flush %s and apply %s differ", decode.FormatLSN(write), decode.FormatLSN(flush), decode.FormatLSN(apply)))
		}
		t.acknowledged(flush)
	case kind == 'Q' && t.peeks:
		c.query = string(bytes.TrimSuffix(body, []byte{0}))
		if m := advanced.FindStringSubmatch(c.query); m != nil {
			at, err := pglogrepl.ParseLSN(m[1])
			if err != nil {
				t.invented = append(t.invented, fmt.Sprintf("%q: %v", m[1], err))
				return
			}
			t.acknowledged(uint64(at))
		}
	}
}

// acknowledged judges a position at the moment at which the daemon tells it. The
// caller holds the lock.
func (t *postgresTap) acknowledged(flush uint64) {
	t.updates++
	if flush < t.confirmed {
		t.back = append(t.back, fmt.Sprintf("%s after %s", decode.FormatLSN(flush), decode.FormatLSN(t.confirmed)))
	}
	n := 0
	isEnd := flush == t.confirmed || t.idle[flush]
	for n < len(t.ends) && t.ends[n].end <= flush {
		tx := t.ends[n]
		isEnd = isEnd || tx.end == flush
		if tx.writer != 0 && !t.oracle.holds(tx.writer, tx.n) {
			t.early = append(t.early, fmt.Sprintf("%s confirmed, and transaction %d of writer %d, which ends at %s, is in no completed state",
				decode.FormatLSN(flush), tx.n, tx.writer, decode.FormatLSN(tx.end)))
		}
		if t.progress && tx.writer != 0 && !t.oracle.records(tx.end) {
			t.early = append(t.early, fmt.Sprintf("%s confirmed, and no progress row for transaction %d of writer %d, which ends at %s, is completed",
				decode.FormatLSN(flush), tx.n, tx.writer, decode.FormatLSN(tx.end)))
		}
		t.confirmedOf[tx.writer] = max(t.confirmedOf[tx.writer], tx.n)
		t.oracle.acknowledged(tx.writer, tx.n)
		n++
	}
	if !isEnd && t.confirmed != 0 {
		t.invented = append(t.invented, fmt.Sprintf("%s is neither the end of a transaction nor a keepalive's position", decode.FormatLSN(flush)))
	}
	t.ends = append(t.ends[:0], t.ends[n:]...)
	if flush > t.confirmed {
		t.moves++
	}
	t.confirmed = max(t.confirmed, flush)
	for at := range t.idle {
		if at < t.confirmed {
			delete(t.idle, at)
		}
	}
}

// anotherSlot says that the slot is about to be made anew.
func (t *postgresTap) anotherSlot() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.another = true
}

func (t *postgresTap) wrong() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.early)+len(t.back)+len(t.invented) > 0
}

// moved counts the updates that said more than the one before.
func (t *postgresTap) moved() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.moves
}

// sampled takes the slot's position as the server has it.
func (t *postgresTap) sampled(at uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.samples++
	if t.confirmed != 0 && !t.another && at > t.confirmed {
		t.early = append(t.early, fmt.Sprintf("the server has %s confirmed, and the daemon was heard to say %s", decode.FormatLSN(at), decode.FormatLSN(t.confirmed)))
	}
}

// told gives the last transaction of each writer that was confirmed.
func (t *postgresTap) told() [writers + 1]int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.confirmedOf
}

// holdAgainst compares what was confirmed as durable with what a pipeline has
// that came back.
func (t *postgresTap) holdAgainst(told [writers + 1]int64, rows []map[string]any) {
	var has [writers + 1]int64
	for _, row := range rows {
		has[number(row["id"])] = number(row["n"])
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, n := range told {
		if id > 0 && has[id] < n {
			t.early = append(t.early, fmt.Sprintf("transaction %d of writer %d was confirmed as durable, and the pipeline came back from its checkpoint with %d", n, id, has[id]))
		}
	}
}

// faults gives what the tap has found wrong since it was last asked.
func (t *postgresTap) faults() (early, back, invented []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	early, back, invented = t.early, t.back, t.invented
	t.early, t.back, t.invented = nil, nil, nil
	return early, back, invented
}

// framer cuts one direction of a Postgres connection into messages.
type framer struct {
	first   bool // the next message has no kind
	buf     []byte
	message func(kind byte, body []byte)
}

func (f *framer) add(b []byte) {
	f.buf = append(f.buf, b...)
	for {
		head := 5
		if f.first {
			head = 4
		}
		if len(f.buf) < head {
			return
		}
		size := int(binary.BigEndian.Uint32(f.buf[head-4:])) - 4
		if size < 0 || len(f.buf) < head+size {
			return
		}
		if f.first {
			// Anything but an encrypted session's request is the start.
			f.first = size == 4 && binary.BigEndian.Uint32(f.buf[4:]) == 80877103
		} else {
			f.message(f.buf[0], f.buf[head:head+size])
		}
		f.buf = append(f.buf[:0], f.buf[head+size:]...)
	}
}
