package wal

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"holdfast/internal/decode"
)

// Transport is how the slot is read.
type Transport uint8

const (
	// TransportStream reads by the replication protocol: the server sends.
	TransportStream Transport = iota
	// TransportPeek reads over plain SQL: pgsource asks with
	// pg_logical_slot_peek_binary_changes and acknowledges with
	// pg_replication_slot_advance.
	TransportPeek
)

const (
	// peekChanges is how many messages of the plug-in one answer is asked for
	// beyond those that are known already. The server ends an answer at the end
	// of a transaction only, so a larger one arrives whole all the same.
	peekChanges = 50_000
	// peekSoon is the pause after an answer that had something.
	peekSoon = 20 * time.Millisecond
	// peekAnyway is how long a slot is not asked because the server has no WAL
	// that is new. A slot that nobody uses at all would be taken for idle and,
	// with idle_replication_slot_timeout, given up.
	peekAnyway = 10 * time.Second
	// cancelTimeout bounds the request to end a call that is of no use any more.
	cancelTimeout = 2 * time.Second
)

// peekSession is one plain connection over which the slot is read and advanced.
// One goroutine uses it; interrupt may be called by others. After any error it
// is of no use, and the caller closes it.
//
// What a call needs is in the transaction around it: behind a pooler the next
// transaction may be another session of the server, and the one after it go to
// another server. So each transaction sets the settings that decide what the
// text of values looks like, and finds out anew which server it is and where
// the slot stands.
type peekSession struct {
	wire
	s     *Source
	r     *ready
	pg    *pgconn.PgConn
	stall time.Duration
	// received is how far the server has given its changes before.
	received func() uint64
	// pid is the server process of the transaction that is open; 0 before it is
	// known.
	pid int32
	// busy: an answer is outstanding.
	busy bool
	// code is the SQLSTATE with which the server has ended the last call, empty
	// for none.
	code string
}

// openPeek connects; it asks nothing yet.
func (a *attempt) openPeek(ctx context.Context) (*peekSession, error) {
	s := a.s
	cfg, err := s.connectionConfig()
	if err != nil {
		return nil, err
	}
	asPooled(cfg) // each transaction sets the rest
	cfg.BuildFrontend = boundedFrontend
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, s.excuse(connectFailure("connect to Postgres", cfg, err))
	}
	return &peekSession{
		wire: wire{conn: conn.Conn(), frontend: conn.Frontend()}, s: s, r: a.ready, pg: conn, stall: s.cfg.StallTimeout, received: a.received,
	}, nil
}

// close ends the session. A call that still runs is cancelled: the server would
// not notice that nobody waits for it, and hold the slot to its end.
func (p *peekSession) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelTimeout)
	defer cancel()
	if p.busy {
		_ = p.pg.CancelRequest(ctx) // a courtesy: the call ends by itself too
	}
	_ = p.pg.Close(ctx)
}

// run sends statements by the simple protocol and gives each row of their
// results to row; the values are valid until it returns. It returns when all
// are done, or with the first error.
func (p *peekSession) run(ctx context.Context, sql string, row func(values [][]byte) error) error {
	p.frontend.Send(&pgproto3.Query{String: sql})
	if err := p.conn.SetWriteDeadline(time.Now().Add(statusTimeout)); err != nil {
		return err
	}
	p.busy = true
	if err := p.frontend.Flush(); err != nil {
		return fmt.Errorf("ask the server: %w", err)
	}
	for {
		msg, err := p.receive(ctx)
		if err != nil {
			return err
		}
		switch m := msg.(type) {
		case *pgproto3.DataRow:
			if len(m.Values) == 0 {
				return &decode.Refusal{Reason: decode.ReasonMalformed, What: "answer to a query", Why: "a row without values", Expected: "rows"}
			}
			if err := row(m.Values); err != nil {
				return err
			}
		case *pgproto3.ErrorResponse:
			p.busy, p.code = false, m.Code
			return pgconn.ErrorResponseToPgError(m)
		case *pgproto3.ReadyForQuery:
			p.busy = false
			return nil
		case *pgproto3.RowDescription, *pgproto3.CommandComplete, *pgproto3.EmptyQueryResponse:
		default:
			return &decode.Refusal{Reason: decode.ReasonMalformed, What: "answer to a query", Why: fmt.Sprintf("the server sent a %T", msg), Expected: "rows"}
		}
	}
}

// receive takes the next message of an answer. The server says nothing while it
// decodes, however long that takes, so silence is no sign of anything: after
// each stall time-out it is asked, over another connection, whether the call
// still runs.
func (p *peekSession) receive(ctx context.Context) (pgproto3.BackendMessage, error) {
	for {
		if err := p.refreshDeadline(p.stall); err != nil {
			return nil, err
		}
		msg, err := p.frontend.Receive()
		if err != nil {
			if isTimeout(err) && ctx.Err() == nil {
				if err := p.alive(ctx); err != nil {
					return nil, err
				}
				continue // what has arrived of a message is kept
			}
			return nil, fmt.Errorf("read an answer of the server: %w", err)
		}
		switch m := msg.(type) {
		case *pgproto3.NoticeResponse:
			if err := unpublishedThen("read the slot", m); err != nil {
				return nil, err
			}
		case *pgproto3.ParameterStatus, *pgproto3.NotificationResponse:
		default:
			return msg, nil
		}
	}
}

// alive tells whether the server process that we wait for has the slot.
func (p *peekSession) alive(ctx context.Context) error {
	works := false
	err := p.s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1 AND active_pid = $2)`, p.s.cfg.Slot, p.pid).Scan(&works)
	})
	if err != nil {
		return fmt.Errorf("nothing was heard from the server for %v, and whether it still decodes cannot be found out: %w", p.stall, err)
	}
	if !works {
		return fmt.Errorf("nothing was heard from the server for %v, and it does not decode any more: the connection counts as dead", p.stall)
	}
	return nil
}

// peekFacts is what a transaction finds before it calls anything.
type peekFacts struct {
	// answering: what a call that begins later decodes to at least is its end.
	answering
	clock time.Time
	// confirmed is where the slot stands.
	confirmed uint64
}

// beginSQL begins a transaction that is as we need it, and asks for the facts.
func (p *peekSession) beginSQL(readOnly bool) string {
	begin := "BEGIN ISOLATION LEVEL READ COMMITTED"
	if readOnly {
		begin += " READ ONLY"
	}
	return begin + "; " + pinSQL + `;
		SELECT 'facts', pg_backend_pid()::text, ` + identitySQL + `,
		       (extract(epoch FROM clock_timestamp()) * 1000000)::int8::text, ` + p.confirmedSQL()
}

// confirmedSQL gives the slot's position as text, NULL where there is no slot.
func (p *peekSession) confirmedSQL() string {
	return "(SELECT coalesce(confirmed_flush_lsn, '0/0')::text FROM pg_replication_slots WHERE slot_name = " + quoteLiteral(p.s.cfg.Slot) + ")"
}

// begin opens a transaction and finds out where it is: on the server that
// prepare has found, which still has what it has given, with the slot where we
// left it.
func (p *peekSession) begin(ctx context.Context, readOnly bool) (*peekFacts, error) {
	var f *peekFacts
	received := p.received()
	p.pid = 0
	err := p.run(ctx, p.beginSQL(readOnly), func(values [][]byte) (err error) {
		if string(values[0]) == "facts" { // else what was set
			f, err = p.readFacts(values[1:])
		}
		return err
	})
	switch {
	case err != nil:
		return nil, p.explain("look at the server before a peek", err)
	case f == nil:
		return nil, errors.New("look at the server before a peek: it gave no row")
	}
	if err := p.r.same(f.identity); err != nil {
		return nil, err
	}
	if err := f.reaches(LSN(received)); err != nil {
		return nil, err
	}
	return f, p.s.notMoved(f.confirmed)
}

func (p *peekSession) readFacts(values [][]byte) (*peekFacts, error) {
	const fields = 8
	if len(values) != fields {
		return nil, fmt.Errorf("look at the server before a peek: %d values, not %d", len(values), fields)
	}
	text := func(i int) string { return string(values[i]) }
	pid, err := strconv.ParseInt(text(0), 10, 32)
	if err != nil {
		return nil, fmt.Errorf("look at the server before a peek: its process id is %q", text(0))
	}
	p.pid = int32(pid)
	var f peekFacts
	if f.answering, err = readIdentity(text(1), text(2), text(3), text(4), text(5)); err != nil {
		return nil, err
	}
	clock, err := strconv.ParseInt(text(6), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("look at the server before a peek: its clock is %q", text(6))
	}
	f.clock = time.UnixMicro(clock)
	if values[7] == nil {
		return nil, p.s.slotDropped()
	}
	f.confirmed, err = parseLSN(text(7))
	return &f, err
}

func parseLSN(text string) (uint64, error) {
	lsn, err := pglogrepl.ParseLSN(text)
	if err != nil {
		return 0, fmt.Errorf("read a position of the server: %w", err)
	}
	return uint64(lsn), nil
}

// commit ends a transaction.
func (p *peekSession) commit(ctx context.Context) error {
	return p.run(ctx, "COMMIT", func([][]byte) error { return nil })
}

// advance makes lsn the slot's confirmed position. Only what is durable in the
// state may be given to it.
func (p *peekSession) advance(ctx context.Context, lsn uint64) error {
	var end uint64
	err := p.run(ctx, fmt.Sprintf("SELECT end_lsn::text FROM pg_replication_slot_advance(%s, %s)", quoteLiteral(p.s.cfg.Slot), quoteLiteral(decode.FormatLSN(lsn))),
		func(values [][]byte) (err error) {
			end, err = parseLSN(string(values[0]))
			return err
		})
	if err != nil {
		return p.explain("advance slot "+strconv.Quote(p.s.cfg.Slot)+" to "+decode.FormatLSN(lsn), err)
	}
	if end != lsn {
		// It cannot be above, or the call would have failed; below it is where
		// the server's own WAL does not reach that far.
		return fmt.Errorf("advance slot %q to %s: it stands at %s", p.s.cfg.Slot, decode.FormatLSN(lsn), decode.FormatLSN(end))
	}
	return p.commit(ctx)
}

// peek asks for what the slot has, in whole transactions: at most limit
// messages, and what is left of the transaction in which that is reached. take
// is called for each message; answered before the first one, when the server
// has decoded.
//
// The server decodes before it sends the first row and lets go of the slot. So
// the slot is looked at once more then, before anything is believed: it only
// ever goes forward, and where it is not above what we told it, nobody has
// moved it before the call began either.
func (p *peekSession) peek(ctx context.Context, limit int, answered func(), take func(msg []byte) error) (messages int, err error) {
	operation := "peek at slot " + strconv.Quote(p.s.cfg.Slot)
	var first []byte
	var after string
	// A cursor, so that the slot can be looked at in between, and a binary one,
	// since the text of a bytea is twice as long.
	err = p.run(ctx, fmt.Sprintf(`DECLARE peeked NO SCROLL BINARY CURSOR FOR
		SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, %d, 'proto_version', '1', 'publication_names', %s);
		FETCH 1 FROM peeked; SELECT 'slot', %s`,
		quoteLiteral(p.s.cfg.Slot), limit, quoteLiteral(quoteIdentifier(p.s.cfg.Publication)), p.confirmedSQL()),
		func(values [][]byte) error {
			switch len(values) {
			case 1:
				messages, first = 1, slices.Clone(values[0])
			case 2: //nolint:mnd // the slot's position and its label
				after = string(values[1])
			}
			return nil
		})
	if err != nil {
		return 0, p.explain(operation, err)
	}
	if after == "" {
		return 0, p.s.slotDropped()
	}
	confirmed, err := parseLSN(after)
	if err == nil {
		err = p.s.notMoved(confirmed)
	}
	if err != nil {
		return 0, err
	}
	answered()
	if messages == 0 {
		return 0, p.commit(ctx)
	}
	if err := take(first); err != nil {
		return 0, err
	}
	err = p.run(ctx, "FETCH ALL FROM peeked; COMMIT", func(values [][]byte) error {
		if len(values) != 1 {
			return fmt.Errorf("%s: a row of %d values", operation, len(values))
		}
		messages++
		return take(values[0])
	})
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return 0, p.explain(operation, err)
	}
	return messages, err
}

// explain finds the words for an error of a call.
func (p *peekSession) explain(operation string, err error) error {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return err
	}
	said := fmt.Sprintf("%s (SQLSTATE %s)", pgErr.Message, pgErr.Code)
	switch {
	case pgErr.Code == "55006":
		return errSlotInUse
	case pgErr.Code == "55000" && strings.HasPrefix(pgErr.Message, "cannot advance replication slot to"):
		return fmt.Errorf("%s: %w", operation, err) // moved by somebody: the next look names it
	case pgErr.Code == sqlTempFileLimit && strings.Contains(pgErr.Message, "temporary file"):
		return &decode.Refusal{
			Reason: decode.ReasonLimit, What: operation, Why: said,
			Expected: "room for a whole answer in temporary files: a transaction is never split, and the server collects an answer before it sends it",
			Do:       "raise temp_file_limit for this role, or use PGSOURCE_TRANSPORT=stream over a direct connection; the slot keeps its position",
		}
	case pgErr.Code == "57014":
		return &outage{what: operation, why: said, do: "does something between here and the server bound how long a statement may take (a pooler's query_timeout)?", err: err}
	}
	return classify(operation, err)
}

// errSlotInUse is turned into words by occupied, which looks who it is.
var errSlotInUse = errors.New("the slot is in use")

// peeker is the reader of an attempt that peeks. It belongs to the goroutine
// that keeps its connections, and outlives those.
type peeker struct {
	a *attempt
	// ahead are the transactions that were received and are not acknowledged,
	// in order, with the number of their messages: each answer begins with them
	// once more, since the server knows of the acknowledged position alone.
	ahead    []peeked
	messages int // of all in ahead
	// more is what is asked for beyond those.
	more int
	// narrow: up to this position of the server the answers are kept small, since
	// a larger one failed; 0 for no such thing. See narrower.
	narrow uint64
	// short is how many more messages than counted what is in ahead was in the
	// last answer: each answer describes a relation anew. It is kept while
	// answers are small, when a limit that is too high would be too much.
	short int
	// complete is the server's position up to which the last answer had
	// everything, 0 where it was cut off; asked is when that was.
	complete uint64
	asked    time.Time
	// next is when the slot may be looked at again, pause the one before it.
	next  time.Time
	pause time.Duration
	// took is how long the last peek kept the server busy: as long it has peace
	// afterwards, so that at most half of a core goes into decoding. The same
	// holds for telling it a position, which may be done again at tellNext.
	took     time.Duration
	tellNext time.Time
}

// peeked is one transaction of an answer.
type peeked struct {
	end      uint64
	messages int
}

func newPeeker(a *attempt) *peeker { return &peeker{a: a, more: peekChanges} }

// read uses one connection until work ends, when it returns nil, or with what
// ended it.
func (k *peeker) read(work context.Context, p *peekSession) error {
	for {
		if err := k.turn(work, p); err != nil {
			if work.Err() != nil {
				return nil //nolint:nilerr // the stop is what ended it
			}
			return err
		}
		until, pending := k.next, k.a.pending()
		if pending && k.tellNext.Before(until) {
			until = k.tellNext
		}
		wait := time.NewTimer(time.Until(until))
		progress := k.a.progress
		if pending {
			progress = nil // known already, and it has to wait
		}
		select {
		case <-wait.C:
		case <-progress:
		case <-work.Done():
			wait.Stop()
			return nil
		}
		wait.Stop()
	}
}

// turn acknowledges what can be, then looks for more if it is time to.
func (k *peeker) turn(work context.Context, p *peekSession) error {
	if fresh := k.asked.IsZero(); fresh || (k.a.pending() && !time.Now().Before(k.tellNext)) {
		began := time.Now()
		if err := k.a.tellByAdvance(work, p, fresh); err != nil {
			return err
		}
		k.tellNext = time.Now().Add(max(statusCoalesce, time.Since(began)))
	}
	k.settle()
	if time.Now().Before(k.next) {
		return nil
	}
	if k.enough() {
		// So much is under way that asking again would mostly repeat it, or more
		// than that would not fit: the destination comes first. Nothing at the
		// server waits for us, other than for a stream.
		k.later(k.a.s.cfg.PeekInterval)
		return nil
	}
	f, err := p.begin(work, true)
	if err != nil {
		return err
	}
	k.a.heard(f)
	if uint64(f.end) == k.complete && time.Since(k.asked) < peekAnyway {
		k.idle()
		return p.commit(work)
	}
	return k.ask(work, p, f)
}

// enough tells whether to wait for the destination before more is asked for.
func (k *peeker) enough() bool {
	if k.a.received() < k.a.wanted.Load() {
		// The deliverer acknowledges nothing before it has that much: to wait for
		// it here would be for ever. What memory does not hold ends the connection.
		return false
	}
	return k.messages >= max(k.more, peekChanges) || k.a.queue.held() > k.a.s.cfg.MemoryLimit/2
}

// narrower makes the next answers smaller after the server has ended a call with
// an error, and tells whether that is to be tried.
//
// The server gives nothing of an answer in which it fails. So what was committed
// before the transaction that is to blame would never come, that one would be
// taken for the next behind what was received, and whoever passes over it would
// pass over the others too. With a limit of one message an answer is one
// transaction.
func (k *peeker) narrower(code string, flush uint64) bool {
	const by = 16
	const forbidden = "42501" // which is not about what is decoded
	if k.more == 1 || code == forbidden || !poisonous(code) && code != sqlTempFileLimit {
		return false
	}
	k.more, k.narrow = max(k.more/by, 1), max(k.narrow, flush)
	return true
}

// sqlTempFileLimit is the SQLSTATE of an answer that is too large for the
// server's temporary files, among other limits.
const sqlTempFileLimit = "53400"

// ask peeks, and admits what the answer has and was not received before.
func (k *peeker) ask(work context.Context, p *peekSession, f *peekFacts) error {
	limit := min(k.messages+k.short+k.more, math.MaxInt32)
	began := time.Now()
	answer := k.a.newAnswer(k.a.received())
	defer answer.asm.drop()
	n, err := p.peek(work, limit, func() {
		k.took = time.Since(began)
		k.a.s.phaseStreaming()
		k.a.s.cfg.Report(Status{Check: CheckSource, OK: true, Message: fmt.Sprintf("reading slot %s over plain SQL (PGSOURCE_TRANSPORT=peek)", k.a.s.cfg.Slot)})
	}, answer.take)
	k.ahead = append(k.ahead, answer.received...)
	for _, t := range answer.received {
		k.messages += t.messages
	}
	if err != nil {
		if k.narrower(p.code, uint64(f.end)) {
			err = fmt.Errorf("%v; the server gives nothing of an answer in which it fails, so it is asked for less from here on: %d messages", err, k.more) //nolint:errorlint // what it means is not known yet
		}
		return err
	}
	if err := answer.end(); err != nil {
		return err
	}
	k.asked = time.Now()
	m := k.a.s.cfg.Metrics.peek
	m.seconds.WithLabelValues("peek").Observe(time.Since(began).Seconds())
	m.messages.WithLabelValues("repeated").Add(float64(answer.repeated))
	m.messages.WithLabelValues("new").Add(float64(n - answer.repeated))
	k.complete = 0
	switch {
	case n < limit:
		// The server has come to the end of its WAL as it was when the call
		// began, or behind it: everything that was committed before f.end is
		// in the answer.
		k.complete, k.more, k.narrow, k.short = uint64(f.end), peekChanges, 0, 0
		k.a.idleAt(uint64(f.end))
	case k.narrow > k.a.received():
		k.short = max(0, n-k.messages)
	case len(answer.received) == 0:
		k.more = min(2*k.more, math.MaxInt32) // what was known already was more than counted
	default:
		k.more, k.narrow, k.short = peekChanges, 0, 0
	}
	switch {
	case n >= limit:
		k.next, k.pause = time.Now(), 0
	case len(answer.received) > 0:
		k.pause = 0
		k.later(peekSoon)
	default:
		k.idle()
	}
	return nil
}

// idle makes the pauses longer while nothing comes.
func (k *peeker) idle() { k.later(max(peekSoon, 2*k.pause)) }

// later sets the next look, at least as far away as the last one took.
func (k *peeker) later(pause time.Duration) {
	k.pause = min(pause, k.a.s.cfg.PeekInterval)
	jittered := k.pause - rand.N(k.pause/4+1) //nolint:gosec // no secret
	k.next = time.Now().Add(max(jittered, k.took))
}

// settle forgets what is acknowledged.
func (k *peeker) settle() {
	k.a.mu.Lock()
	acknowledged := k.a.ledger.Acknowledged()
	k.a.mu.Unlock()
	n := 0
	for n < len(k.ahead) && k.ahead[n].end <= acknowledged {
		k.messages -= k.ahead[n].messages
		n++
	}
	if n > 0 {
		k.short = 0 // it may have been of these
	}
	k.ahead = append(k.ahead[:0], k.ahead[n:]...)
}

// pending tells whether the server can be told of more.
func (a *attempt) pending() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.bookmarked > a.ledger.Acknowledged()
}

// heard notes what the server says about itself.
func (a *attempt) heard(f *peekFacts) {
	a.s.cfg.Metrics.slot.lag.heard(f.clock)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.walEnd = max(a.walEnd, uint64(f.end))
	a.setPositions()
}

// tellByAdvance tells the server the bookmark, where that is news to it, and
// records it: what status does for a stream. With always the server is asked
// where the slot stands even if nothing has moved here: a crash between bookmark
// and advance leaves the slot behind, and so does one of the server, which
// writes a slot's position down only now and then.
func (a *attempt) tellByAdvance(ctx context.Context, p *peekSession, always bool) error {
	a.mu.Lock()
	lsn := a.bookmarked
	moved := lsn > a.ledger.Acknowledged()
	a.mu.Unlock()
	if !moved && !always {
		return nil
	}
	began := time.Now()
	f, err := p.begin(ctx, false)
	if err != nil {
		return err
	}
	if f.confirmed >= lsn {
		if err := p.commit(ctx); err != nil {
			return err
		}
	} else {
		// Whatever becomes of the call, the server may have done it.
		a.s.tells(lsn)
		if err := p.advance(ctx, lsn); err != nil {
			return err
		}
		a.s.cfg.Metrics.peek.seconds.WithLabelValues("advance").Observe(time.Since(began).Seconds())
	}
	return a.confirm(lsn, moved)
}

// peekConnection is connection for TransportPeek. At a stop it ends at once:
// lastWord tells the server what completes after that.
func (a *attempt) peekConnection(work, hard context.Context) error {
	if err := a.peekVerify(work); err != nil {
		return err
	}
	p, err := a.openPeek(work)
	if err != nil {
		return err
	}
	defer p.close(hard)
	defer context.AfterFunc(work, p.interrupt)()
	if a.peeker == nil {
		a.peeker = newPeeker(a)
		a.s.log.InfoContext(work, "peeking", "slot", a.s.cfg.Slot, "lsn", decode.FormatLSN(a.received()))
	}
	a.peeker.asked = time.Time{} // a new connection begins with a look at where the slot stands
	err = a.peeker.read(work, p)
	if errors.Is(err, errSlotInUse) {
		return a.s.occupied(work)
	}
	if err != nil {
		return &streamError{err}
	}
	return nil
}

// peekVerify is verify for TransportPeek. No connection of its own says which
// server is read: each transaction finds that out, and so does this look, which
// lets the others go to a server that has restarted.
func (a *attempt) peekVerify(work context.Context) error {
	// A pooler can bring the next turn to the server after a restart, without an
	// end of the connection to it.
	defer a.s.streamsNowhere()
	return a.s.look(work, func(ctx context.Context, conn *pgx.Conn) error {
		now, err := identifySQL(ctx, conn)
		if err == nil {
			err = a.ready.same(now.identity)
		}
		if err == nil {
			err = a.s.streamsHere(ctx, conn.PgConn(), a.ready)
		}
		if err != nil {
			return err
		}
		return a.verify(ctx, conn)
	})
}

// lastAdvance is lastWord's for TransportPeek: over a connection of its own it
// tells the server the bookmark. A call of ours that was cancelled may still
// have the slot for a moment.
func (a *attempt) lastAdvance(hard context.Context) error {
	deadline := time.Now().Add(lastAdvanceTimeout)
	for {
		p, err := a.openPeek(hard)
		if err != nil {
			return err
		}
		ended := context.AfterFunc(hard, p.interrupt)
		err = a.tellByAdvance(hard, p, true)
		ended()
		p.close(hard)
		if !errors.Is(err, errSlotInUse) {
			return err
		}
		err = a.s.occupied(hard)
		if time.Now().After(deadline) {
			return err
		}
		if sleep(hard, 100*time.Millisecond) != nil {
			return err
		}
	}
}

// lastAdvanceTimeout bounds how long a stop waits for the slot.
const lastAdvanceTimeout = 10 * time.Second

// answer is one answer to a peek on its way into the ledger. It leaves out the
// transactions that were received before.
type answer struct {
	a       *attempt
	asm     *assembler
	commits *decode.PgOutput
	// from: what was committed before it was received before.
	from uint64
	now  time.Time

	open     bool // inside BEGIN and COMMIT
	passing  bool // of a transaction that was received before
	count    int  // messages since BEGIN
	repeated int
	received []peeked
	// described has the relations that this answer has described, the last of
	// them in front.
	described map[uint32]struct{}
	last      uint32
	// held are descriptions of relations and types in transactions that are
	// passed over, the last of each. A call describes each relation once, so
	// what comes after them may rely on them.
	held      []heldMessage
	heldBytes int64
}

// heldMessage is a message about the relation or type with this OID.
type heldMessage struct {
	kind byte
	oid  uint32
	msg  []byte
}

// maxHeldMessages is more than a decoder keeps.
const maxHeldMessages = 65536

func (a *attempt) newAnswer(from uint64) *answer {
	return &answer{
		a: a, asm: newAssembler(a.s.cfg.MemoryLimit, a.queue.buffers, a.s.spill), commits: decode.NewPgOutput(),
		from: from, now: time.Now(), described: map[uint32]struct{}{},
	}
}

// take takes one message. msg is copied where it is kept.
//
// A transaction is passed over by the server's own rule for the start of a
// stream: where its commit record begins before the position.
func (w *answer) take(msg []byte) error {
	if len(msg) == 0 {
		return &decode.Refusal{Reason: decode.ReasonMalformed, What: "pgoutput message", Why: "it is empty"}
	}
	w.count++
	kind := decode.MessageKind(msg[0])
	switch kind {
	case decode.MsgBegin:
		m, err := w.commits.Decode(msg)
		if err != nil {
			return err
		}
		if w.open {
			return outOfOrder("BEGIN", m.CommitLSN, "another transaction is open")
		}
		w.open, w.passing, w.count = true, m.CommitLSN < w.from, 1
	case decode.MsgCommit:
		if w.passing {
			return w.passed(msg)
		}
	case decode.MsgRelation, decode.MsgType:
		if err := w.describes(msg); err != nil {
			return err
		}
	case decode.MsgInsert, decode.MsgUpdate, decode.MsgDelete, decode.MsgTruncate:
		if err := w.refersTo(msg); err != nil {
			return err
		}
	case decode.MsgOrigin, decode.MsgLogical:
	default:
		_, err := w.commits.Decode(msg) // let the decoder say what is wrong with it
		return err
	}
	if w.passing {
		return nil
	}
	return w.add(msg)
}

// add gives a message to the assembler and what is whole to the ledger.
func (w *answer) add(msg []byte) error {
	tx, err := w.asm.add(msg, w.now)
	if err != nil {
		return err
	}
	if tx != nil {
		w.open = false
		if err := w.a.admit(tx, 0); err != nil {
			return err
		}
		w.received = append(w.received, peeked{tx.end, w.count})
	}
	return w.a.bounded(w.asm)
}

// passed ends a transaction that was received before.
func (w *answer) passed(msg []byte) error {
	m, err := w.commits.Decode(msg)
	if err != nil {
		return err
	}
	if m.EndLSN > w.from {
		return outOfOrder("COMMIT", m.EndLSN, fmt.Sprintf("everything up to %s was received, which lies inside its record", decode.FormatLSN(w.from)))
	}
	w.open, w.passing = false, false
	w.repeated += w.count
	return nil
}

// describes takes a description of a relation or type. Those held from before
// go first, so that the last one of each counts.
func (w *answer) describes(msg []byte) error {
	oid, err := messageOID(msg, 1)
	if err != nil {
		return err
	}
	if msg[0] == byte(decode.MsgRelation) {
		w.described[oid] = struct{}{}
		if len(w.described) > maxHeldMessages {
			return tooManyDescribed()
		}
	}
	if !w.passing {
		return w.release()
	}
	h := heldMessage{msg[0], oid, slices.Clone(msg)}
	if i := slices.IndexFunc(w.held, func(o heldMessage) bool { return o.kind == h.kind && o.oid == h.oid }); i >= 0 {
		w.heldBytes -= int64(len(w.held[i].msg))
		w.held = slices.Delete(w.held, i, i+1)
	}
	if len(w.held) >= maxHeldMessages {
		return tooManyDescribed()
	}
	if w.heldBytes += int64(len(h.msg)); w.heldBytes > w.a.s.cfg.MemoryLimit {
		return &decode.Refusal{
			Reason: decode.ReasonLimit, What: "answer to a peek", Why: fmt.Sprintf("its descriptions of relations and types take more than %d bytes", w.a.s.cfg.MemoryLimit),
			Expected: "descriptions within PGSOURCE_MEMORY_LIMIT", Do: "raise PGSOURCE_MEMORY_LIMIT",
		}
	}
	w.held = append(w.held, h)
	return nil
}

func tooManyDescribed() error {
	return &decode.Refusal{Reason: decode.ReasonLimit, What: "answer to a peek", Why: fmt.Sprintf("it describes more than %d relations and types", maxHeldMessages), Expected: "fewer"}
}

// refersTo sees to it that the relations of a row are known as they were when
// it was written. A session of the server that was interrupted in an earlier
// call may believe that it has described them: behind a pooler that call was
// perhaps not ours. Without the description the row would be read in the shape
// of an older one.
func (w *answer) refersTo(msg []byte) error {
	first, n := 1, 1
	if msg[0] == byte(decode.MsgTruncate) {
		count, err := messageOID(msg, 1)
		if err != nil {
			return err
		}
		first, n = 6, int(min(count, math.MaxInt32))
	}
	for i := range n {
		oid, err := messageOID(msg, first+4*i)
		if err != nil {
			return err
		}
		if oid == w.last && oid != 0 {
			continue
		}
		if _, ok := w.described[oid]; !ok {
			return fmt.Errorf("the server has left out the description of relation %d in its answer, most likely since its session was interrupted in a call before: it is asked again over another connection", oid)
		}
		w.last = oid
	}
	if w.passing {
		return nil
	}
	return w.release()
}

// release adds what is held to the transaction that is open.
func (w *answer) release() error {
	held := w.held
	w.held, w.heldBytes = nil, 0
	for _, h := range held {
		if err := w.add(h.msg); err != nil {
			return err
		}
	}
	return nil
}

// end is called after the last message: the server ends an answer between
// transactions.
func (w *answer) end() error {
	if w.open {
		return outOfOrder("end of the answer", 0, "a transaction is open")
	}
	return nil
}

// messageOID reads an OID inside a message of pgoutput.
func messageOID(msg []byte, at int) (uint32, error) {
	if len(msg) < at+4 {
		return 0, &decode.Refusal{Reason: decode.ReasonMalformed, What: fmt.Sprintf("pgoutput message %q", msg[0]), Why: "it is cut short"}
	}
	return binary.BigEndian.Uint32(msg[at:]), nil
}
