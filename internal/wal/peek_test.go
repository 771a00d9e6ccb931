package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"pgregory.net/rapid"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
)

// The messages of a made-up relation: what answers look at is whole, the rest
// is a version in one byte.
func peekBegin(commit uint64) []byte {
	msg := binary.BigEndian.AppendUint64([]byte{'B'}, commit)
	return append(msg, make([]byte, 12)...)
}

func peekCommit(commit, end uint64) []byte {
	msg := binary.BigEndian.AppendUint64([]byte{'C', 0}, commit)
	msg = binary.BigEndian.AppendUint64(msg, end)
	return append(msg, make([]byte, 8)...)
}

func about(kind byte, oid uint32, version byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{kind}, oid), version)
}

func peekAttempt(tb testing.TB, start uint64) *attempt {
	tb.Helper()
	return peekAttemptOf(testSource(tb, noStore{}), start)
}

func peekAttemptOf(s *Source, start uint64) *attempt {
	s.cfg.MemoryLimit = 1 << 20
	return &attempt{s: s, queue: newQueue(1<<20, nil), ledger: ack.New(start), proven: newSignal(), progress: newSignal()}
}

// What was received before is passed over, and what it described is not: later
// transactions of the same answer rely on it.
func TestAnswerPassesOverWhatWasReceived(t *testing.T) {
	a := peekAttempt(t, 200)
	w := a.newAnswer(200)
	for _, msg := range [][]byte{
		peekBegin(90), about('Y', 9, 1), about('R', 7, 1), about('I', 7, 1), peekCommit(90, 100),
		peekBegin(150), about('R', 7, 2), about('R', 8, 1), about('I', 7, 2), about('D', 8, 1), peekCommit(150, 200),
		peekBegin(200), about('O', 0, 0), about('I', 7, 2), about('R', 5, 1), about('U', 5, 1), peekCommit(200, 230),
		peekBegin(230), about('I', 8, 1), peekCommit(230, 260),
	} {
		if err := w.take(msg); err != nil {
			t.Fatalf("%q: %v", msg, err)
		}
	}
	if err := w.end(); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(w.received, w.repeated); got != "[{230 6} {260 3}] 11" {
		t.Errorf("received and repeated: %s", got)
	}
	if got := delivered(t, a); got != "Y9.1 R7.2 R8.1 I7.2 R5.1 U5.1 C230 I8.1 C260" {
		t.Errorf("queued: %s", got)
	}
}

// delivered writes what the queue has, in order.
func delivered(tb testing.TB, a *attempt) string {
	tb.Helper()
	txs, err := a.queue.take(1<<20, 1<<20)
	if err != nil {
		tb.Fatal(err)
	}
	var out []string
	for _, tx := range txs {
		_ = tx.each(func(msg []byte) error {
			out = append(out, fmt.Sprintf("%c%d.%d", msg[0], binary.BigEndian.Uint32(msg[1:]), msg[5]))
			return nil
		})
		out = append(out, fmt.Sprintf("C%d", tx.end))
	}
	return strings.Join(out, " ")
}

func TestAnswerRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		msgs [][]byte
		says string
	}{
		"an empty message":                   {[][]byte{{}}, "empty"},
		"a row outside":                      {[][]byte{about('R', 7, 1)}, "no transaction is open"},
		"a row of an undescribed relation":   {[][]byte{peekBegin(200), about('I', 7, 1)}, "left out the description of relation 7"},
		"one in what is passed over":         {[][]byte{peekBegin(100), about('I', 7, 1)}, "left out the description of relation 7"},
		"a truncation of one":                {[][]byte{peekBegin(200), about('R', 7, 1), {'T', 0, 0, 0, 2, 0, 0, 0, 0, 7, 0, 0, 0, 8}}, "relation 8"},
		"a truncation that is cut":           {[][]byte{peekBegin(200), about('R', 7, 1), {'T', 255, 255, 255, 255, 0, 0, 0, 0, 7}}, "cut short"},
		"a row that is cut":                  {[][]byte{peekBegin(200), {'I', 0, 0}}, "cut short"},
		"a description that is cut":          {[][]byte{peekBegin(200), {'R', 0, 0}}, "cut short"},
		"a begin that is cut":                {[][]byte{{'B', 1}}, "inside a field"},
		"a commit that is cut":               {[][]byte{peekBegin(100), {'C', 0}}, "inside a field"},
		"begin in a transaction":             {[][]byte{peekBegin(200), peekBegin(201)}, "another transaction is open"},
		"begin in one that is passed over":   {[][]byte{peekBegin(100), peekBegin(101)}, "another transaction is open"},
		"an unknown message":                 {[][]byte{peekBegin(200), {'z'}}, "z"},
		"one in what is passed over, too":    {[][]byte{peekBegin(100), {'S'}}, "S"},
		"a position inside a commit record":  {[][]byte{peekBegin(199), peekCommit(199, 201)}, "lies inside its record"},
		"a commit that goes back":            {[][]byte{peekBegin(300), peekCommit(300, 330), peekBegin(310), about('R', 7, 1), about('I', 7, 1), peekCommit(310, 320)}, "went backwards"},
		"an end inside a transaction":        {[][]byte{peekBegin(200), nil}, "a transaction is open"},
		"an end inside one passed over":      {[][]byte{peekBegin(100), nil}, "a transaction is open"},
		"a transaction larger than memory":   {[][]byte{peekBegin(200), about('R', 7, 1), append(about('I', 7, 1), make([]byte, 2<<20)...)}, "larger than"},
		"a description larger than that too": {[][]byte{peekBegin(200), append(about('R', 7, 1), make([]byte, 2<<20)...)}, "larger than"},
	} {
		t.Run(name, func(t *testing.T) {
			w := peekAttempt(t, 200).newAnswer(200)
			var err error
			for _, msg := range c.msgs {
				if msg == nil {
					err = w.end()
				} else {
					err = w.take(msg)
				}
				if err != nil {
					break
				}
			}
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v, want one that says %q", err, c.says)
			}
		})
	}
}

// Against a server that answers as Postgres does: from the acknowledged position
// on, describing a relation before its first row in each answer and after a
// change, cut at the limit behind a commit, or by a broken wire anywhere. Each
// transaction is received once, in order, and each row is read behind the
// description that was in force when it was written.
func TestAnswersAgainstAServer(t *testing.T) {
	type row struct {
		oid     uint32
		version byte
	}
	type committed struct {
		commit, end uint64
		rows        []row
	}
	s := testSource(t, noStore{})
	rapid.Check(t, func(t *rapid.T) {
		a := peekAttemptOf(s, 100)
		var log []committed
		version, at, from := map[uint32]byte{}, uint64(100), 0 // from: log index behind the acknowledged position
		write := func() {
			c := committed{commit: at + uint64(rapid.IntRange(0, 3).Draw(t, "gap"))}
			c.end = c.commit + 10
			for range rapid.IntRange(0, 4).Draw(t, "rows") {
				oid := uint32(rapid.IntRange(1, 3).Draw(t, "relation"))
				if rapid.IntRange(0, 3).Draw(t, "alter") == 0 || version[oid] == 0 {
					version[oid]++
				}
				c.rows = append(c.rows, row{oid, version[oid]})
			}
			at = c.end
			log = append(log, c)
		}
		seen, described := 0, map[uint32]byte{}
		check := func() {
			txs, err := a.queue.take(1<<20, 1<<20)
			if err != nil {
				t.Fatal(err)
			}
			for _, tx := range txs {
				for len(log[seen].rows) == 0 { // it has nothing to deliver
					seen++
				}
				if tx.end != log[seen].end {
					t.Fatalf("received a transaction that ends at %d, want %d", tx.end, log[seen].end)
				}
				var got []row
				_ = tx.each(func(msg []byte) error {
					oid := binary.BigEndian.Uint32(msg[1:])
					if msg[0] == 'R' {
						described[oid] = msg[5]
						return nil
					}
					if described[oid] != msg[5] {
						t.Fatalf("a row of version %d is read behind description %d", msg[5], described[oid])
					}
					got = append(got, row{oid, msg[5]})
					return nil
				})
				if !slices.Equal(got, log[seen].rows) {
					t.Fatalf("rows %v, want %v", got, log[seen].rows)
				}
				seen++
			}
			a.queue.release(txs)
		}
		// ask peeks once; broken is the message at which the wire breaks.
		ask := func(limit, broken int) {
			w := a.newAnswer(a.received())
			sent, n := map[uint32]byte{}, 0
			say := func(msg []byte) {
				if n++; n < broken {
					if err := w.take(msg); err != nil {
						t.Fatalf("%q: %v", msg, err)
					}
				}
			}
			for i := from; i < len(log) && n < limit; i++ {
				say(peekBegin(log[i].commit))
				for _, r := range log[i].rows {
					if sent[r.oid] != r.version {
						sent[r.oid] = r.version
						say(about('R', r.oid, r.version))
					}
					say(about('I', r.oid, r.version))
				}
				say(peekCommit(log[i].commit, log[i].end))
			}
			if n < broken {
				if err := w.end(); err != nil {
					t.Fatal(err)
				}
				if n < limit {
					a.idleAt(at) // the server's position when it was asked
				}
			}
			w.asm.drop()
			check()
		}
		for range rapid.IntRange(1, 25).Draw(t, "turns") {
			switch rapid.IntRange(0, 5).Draw(t, "act") {
			case 0, 1, 5:
				write()
			case 3: // a new attempt: it knows nothing, and the slot may be behind its start
				begin := rapid.IntRange(from, max(from, seen)).Draw(t, "new attempt behind")
				start := uint64(100)
				if begin > 0 {
					start = log[begin-1].end
				}
				if rapid.Bool().Draw(t, "told") {
					from = begin
				}
				a, seen = peekAttemptOf(s, start), begin
				clear(described)
			case 2: // what was received is acknowledged, in part
				for from < len(log) && log[from].end <= a.received() && rapid.Bool().Draw(t, "acknowledge") {
					from++
				}
				if rapid.IntRange(0, 9).Draw(t, "crash of the server") == 0 {
					from = rapid.IntRange(0, from).Draw(t, "it goes back")
				}
			default:
				broken := 1 << 30
				if rapid.IntRange(0, 3).Draw(t, "the wire breaks") == 0 {
					broken = rapid.IntRange(1, 40).Draw(t, "at")
				}
				ask(rapid.IntRange(1, 12).Draw(t, "limit"), broken)
			}
		}
		ask(1<<30, 1<<30)
		for _, c := range log[seen:] {
			if len(c.rows) > 0 {
				t.Fatalf("the transaction that ends at %d was never received", c.end)
			}
		}
	})
}

// What an answer describes is held within bounds, whatever the server sends.
func TestAnswerBoundsDescriptions(t *testing.T) {
	big := func(oid uint32) []byte { return append(about('R', oid, 1), make([]byte, 1<<16)...) }
	for name, msg := range map[string]func(i uint32) []byte{
		"many bytes":     big,
		"many relations": func(i uint32) []byte { return about('R', i, 1) },
		"many types":     func(i uint32) []byte { return about('Y', i, 1) },
	} {
		w := peekAttempt(t, 200).newAnswer(200)
		if err := w.take(peekBegin(100)); err != nil {
			t.Fatal(err)
		}
		w.a.s.cfg.MemoryLimit = 1 << 20
		var err error
		n := uint32(0)
		for ; err == nil && n <= maxHeldMessages+1; n++ {
			err = w.take(msg(n))
		}
		var refused *decode.Refusal
		if !errors.As(err, &refused) || refused.Reason != decode.ReasonLimit {
			t.Errorf("%s: after %d of them: %v", name, n, err)
		}
	}
	// The same ones again are no more than one each.
	w := peekAttempt(t, 200).newAnswer(200)
	if err := w.take(peekBegin(100)); err != nil {
		t.Fatal(err)
	}
	for i := range uint32(100) {
		if err := w.take(big(i % 3)); err != nil {
			t.Fatal(err)
		}
	}
	if len(w.held) != 3 || w.heldBytes != 3*int64(len(big(0))) {
		t.Errorf("%d held with %d bytes", len(w.held), w.heldBytes)
	}
}

// Rows without values, which no server sends, are refused and nothing worse.
func TestPeekRefusesRowsWithoutValues(t *testing.T) {
	client, server := net.Pipe()
	defer client.Close()
	p := &peekSession{wire: wire{conn: client, frontend: boundedFrontend(client, client)}, s: testSource(t, noStore{}), stall: time.Minute, received: func() uint64 { return 0 }}
	var said sync.WaitGroup
	said.Go(func() {
		defer server.Close()
		_, _ = server.Read(make([]byte, 1<<16))
		_, _ = server.Write([]byte{'D', 0, 0, 0, 6, 0, 0})
	})
	_, err := p.begin(t.Context(), true)
	said.Wait()
	var refused *decode.Refusal
	if !errors.As(err, &refused) || refused.Reason != decode.ReasonMalformed {
		t.Errorf("%v", err)
	}
}

// A server that fails within an answer is asked for less, down to a single
// transaction, and for as much as before once it is past the place.
func TestPeekerAsksForLess(t *testing.T) {
	k := newPeeker(peekAttempt(t, 100))
	for _, code := range []string{"", "55006", "57014", "08006", "53100", "42501"} {
		if k.narrower(code, 500) {
			t.Errorf("for %q", code)
		}
	}
	var asked []int
	for k.narrower("22021", 500) {
		asked = append(asked, k.more)
	}
	if fmt.Sprint(asked) != "[3125 195 12 1]" || k.narrow != 500 {
		t.Errorf("asked for %v, up to %d", asked, k.narrow)
	}
	if k.more = 2; !k.narrower(sqlTempFileLimit, 400) || k.more != 1 || k.narrow != 500 {
		t.Errorf("asked for %d, up to %d", k.more, k.narrow)
	}
}

// What the deliverer waits for is read, however much is on its way: it would
// wait for ever.
func TestPeekerReadsWhatIsWaitedFor(t *testing.T) {
	k := newPeeker(peekAttempt(t, 100))
	if k.enough() {
		t.Error("enough of nothing")
	}
	if k.messages = peekChanges; !k.enough() {
		t.Error("not enough, with so much on its way")
	}
	if k.a.wanted.Store(101); k.enough() {
		t.Error("enough, and the deliverer waits for more")
	}
	if k.a.wanted.Store(100); !k.enough() {
		t.Error("not enough, with what it waited for received")
	}
}

// The pauses: none while more is known to wait, short ones after something
// came, longer ones while nothing does, and never shorter than the last call.
func TestPeekerPauses(t *testing.T) {
	k := newPeeker(peekAttempt(t, 100))
	k.a.s.cfg.PeekInterval = time.Second
	left := func() time.Duration { return time.Until(k.next) }
	var last time.Duration
	for range 12 {
		k.idle()
		if k.pause < last || k.pause > time.Second || left() > time.Second {
			t.Errorf("a pause of %v after %v, the next look in %v", k.pause, last, left())
		}
		last = k.pause
	}
	if last != time.Second {
		t.Errorf("at last %v", last)
	}
	k.took = time.Minute
	k.later(peekSoon)
	if left() < 59*time.Second {
		t.Errorf("the next look in %v after a call that took a minute", left())
	}
}

// What is acknowledged no longer counts as repeated.
func TestPeekerForgetsWhatIsAcknowledged(t *testing.T) {
	a := peekAttempt(t, 100)
	k := newPeeker(a)
	for _, end := range []uint64{110, 120, 130} {
		ticket, err := a.ledger.Admit(end)
		if err == nil {
			err = a.ledger.Mark(ticket, ticket, ack.Completed)
		}
		if err != nil {
			t.Fatal(err)
		}
		k.ahead = append(k.ahead, peeked{end, 10})
		k.messages += 10
	}
	if err := a.ledger.Confirm(120, ack.Completed); err != nil {
		t.Fatal(err)
	}
	if k.settle(); k.messages != 10 || len(k.ahead) != 1 || k.ahead[0].end != 130 {
		t.Errorf("%d messages in %v", k.messages, k.ahead)
	}
}

func TestPeekErrors(t *testing.T) {
	p := &peekSession{s: testSource(t, noStore{})}
	for name, c := range map[string]struct {
		err   *pgconn.PgError
		says  string
		final bool
		inUse bool
	}{
		"in use":              {err: &pgconn.PgError{Code: "55006", Message: "replication slot \"s\" is active for PID 1"}, says: "in use", inUse: true},
		"advanced by another": {err: &pgconn.PgError{Code: "55000", Message: "cannot advance replication slot to 0/1, minimum is 0/2"}, says: "minimum is 0/2"},
		"lost":                {err: &pgconn.PgError{Code: "55000", Message: "can no longer access replication slot \"s\""}, says: "invalidated", final: true},
		"temporary files":     {err: &pgconn.PgError{Code: "53400", Message: "temporary file size exceeds temp_file_limit (1kB)"}, says: "temp_file_limit", final: true},
		"statement timeout":   {err: &pgconn.PgError{Code: "57014", Message: "canceling statement due to statement timeout"}, says: "statement timeout"},
		"no REPLICATION":      {err: &pgconn.PgError{Code: "42501", Message: "must be superuser or replication role to use replication slots"}, says: "REPLICATION", final: true},
		"no publication":      {err: &pgconn.PgError{Code: "42704", Message: "publication \"p\" does not exist"}, says: "publication", final: true},
	} {
		err := p.explain("peek", c.err)
		var refused *decode.Refusal
		if !strings.Contains(err.Error(), c.says) || errors.As(err, &refused) != c.final || errors.Is(err, errSlotInUse) != c.inUse {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The same code means other things too.
func TestLimitsByTheirWords(t *testing.T) {
	for message, says := range map[string]string{
		"temporary file size exceeds temp_file_limit (0kB)": "temp_file_limit",
		"all replication slots are in use":                  "max_replication_slots",
	} {
		err := classify("look", &pgconn.PgError{Code: "53400", Message: message})
		if refused := refusal(t, err); !strings.Contains(refused.Do, says) {
			t.Errorf("%s: %v", message, err)
		}
	}
}

func TestReadIdentity(t *testing.T) {
	now, err := readIdentity("76543", "0000001F", "shop", "false", "16/B374D848")
	if want := (answering{identity{"76543", 31, "shop"}, 0x16_B374D848}); err != nil || now != want {
		t.Errorf("%v %v", now, err)
	}
	for _, wrong := range [][5]string{
		{"", "00000001", "d", "false", "0/1"},
		{"1", "", "d", "false", "0/1"},
		{"1", "00000000", "d", "false", "0/1"},
		{"1", "xyz", "d", "false", "0/1"},
		{"1", "00000001", "d", "true", "0/1"},
		{"1", "00000001", "d", "false", ""},
		{"1", "00000001", "d", "false", "0/0"},
	} {
		if now, err := readIdentity(wrong[0], wrong[1], wrong[2], wrong[3], wrong[4]); err == nil {
			t.Errorf("%q is %v", wrong, now)
		}
	}
}
