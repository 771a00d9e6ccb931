package wal

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

const (
	// PoisonAttempts is how often the same thing may fail in a row, with
	// nothing acknowledged in between, before it is called by its name instead
	// of being tried as if nothing were the matter.
	PoisonAttempts = 5
	// cautiousAfter is how many failed attempts make the next one deliver one
	// transaction at a time: so the one that is to blame ends up alone, and
	// what is before it is acknowledged.
	cautiousAfter = 2
)

// struggle remembers, over the connections and attempts of a process, what
// fails again and again. A connection, a request that was accepted, or an
// attempt that began are no progress: an acknowledged position is.
type struggle struct {
	mu sync.Mutex
	// attempts counts those in a row that ended with work under way and
	// nothing acknowledged.
	attempts int
	// ends counts the connections in a row that the server ended with an
	// error of the same code after the same position had been received.
	ends int
	at   uint64
	code string
	// narrow: transactions up to it are delivered one at a time, since one of
	// them, nobody knows which, is what a request gets no answer for.
	narrow uint64
	// suspects are copied rows that may be what ends attempts.
	suspects copySuspects
}

// cautious tells whether transactions are to be delivered one at a time.
func (g *struggle) cautious() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.attempts >= cautiousAfter || g.narrow > 0
}

// oneByOne makes what is delivered up to end go one transaction at a time.
func (g *struggle) oneByOne(end uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.narrow = end
}

// progress is called when the position at was acknowledged.
func (g *struggle) progress(at uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.attempts, g.ends = 0, 0
	if at >= g.narrow {
		g.narrow = 0
	}
}

// attemptFailed counts an attempt that ended without progress while l was under
// way. At last it gives a refusal that names l.
func (g *struggle) attemptFailed(l *load, cause error) error {
	g.mu.Lock()
	g.attempts++
	n := g.attempts
	g.mu.Unlock()
	if n < PoisonAttempts {
		return nil
	}
	why := "the attempt to deliver it ended"
	var changed *feldera.IncarnationChanged
	if errors.As(cause, &changed) {
		why = "the pipeline came back as another process while it was being delivered"
	}
	refused := &decode.Refusal{
		Reason: decode.ReasonRejected, What: l.what(), Where: l.where(),
		Why:      fmt.Sprintf("%s, %d times in a row with nothing acknowledged: it is most likely what ends it (last: %v)", why, n, cause),
		Expected: "acknowledged positions between failures",
		Do:       "look at the pipeline's log and at these rows; a restart of pgsource tries them again",
	}
	if l.transactions > 1 {
		return refused
	}
	if l.named != "" {
		refused.What += ", " + l.named
	}
	refused.Do += fmt.Sprintf(", and pgsource skip %s passes over it", decode.FormatLSN(l.last))
	return &transactionError{xid: l.lastXID, end: l.last, err: refused}
}

// streamFailed counts a connection that err has ended after everything up to at
// had been received. At last it gives a refusal that names the place.
func (g *struggle) streamFailed(at uint64, err error) error {
	var streaming *streamError
	var pgErr *pgconn.PgError
	if !errors.As(err, &streaming) || !errors.As(err, &pgErr) || !poisonous(pgErr.Code) {
		return nil // an outage: that says nothing about the WAL
	}
	g.mu.Lock()
	if g.at != at || g.code != pgErr.Code {
		g.at, g.code, g.ends = at, pgErr.Code, 0
	}
	g.ends++
	n := g.ends
	g.mu.Unlock()
	if n < PoisonAttempts {
		return nil
	}
	return &decode.Refusal{
		Reason: decode.ReasonUnsupported, What: "transaction", Where: "LSN behind " + decode.FormatLSN(at),
		Why:      fmt.Sprintf("the server cannot send it: %s (SQLSTATE %s), %d times in a row at the same position", pgErr.Message, pgErr.Code, n),
		Expected: "a transaction that the server can decode; a value above half a gigabyte, for one, is stored and can never be sent",
		Do: "look in the server's log, and upgrade it if the error is its own; what cannot be decoded can only be passed over: " +
			"SELECT pg_replication_slot_advance to behind the transaction, then " + wayBack,
	}
}

// poisonous tells whether an error of the server can be about what it decodes.
// Connections (08), resources (53), interventions (57), objects in use (55) and
// its files (58) are not.
func poisonous(code string) bool {
	return len(code) == 5 && !slices.Contains([]string{"08", "53", "55", "57", "58"}, code[:2])
}

// streamError marks an error of a connection that was streaming.
type streamError struct{ err error }

func (e *streamError) Error() string { return e.err.Error() }

func (e *streamError) Unwrap() error { return e.err }

// load is what the deliverer is at work with, for messages.
type load struct {
	first, last        uint64 // end LSNs of the first and the last transaction
	firstXID, lastXID  uint32
	transactions, rows int
	tables             []string
	// named are the rows sent last, by their keys, where one transaction stands
	// alone because something fails again and again.
	named string
}

func (l *load) what() string {
	if l.transactions == 1 {
		return fmt.Sprintf("transaction %d", l.firstXID)
	}
	return fmt.Sprintf("one of %d transactions, %d to %d", l.transactions, l.firstXID, l.lastXID)
}

func (l *load) where() string {
	where := "LSN " + decode.FormatLSN(l.last)
	if l.transactions > 1 {
		where = "LSN " + decode.FormatLSN(l.first) + " to " + decode.FormatLSN(l.last)
	}
	if len(l.tables) > 0 {
		where += ", tables " + strings.Join(l.tables, ", ")
	}
	return fmt.Sprintf("%s (%d rows)", where, l.rows)
}

// takesOn notes what the deliverer begins to work with.
func (a *attempt) takesOn(txs []*transaction) {
	first, last := txs[0], txs[len(txs)-1]
	l := &load{first: first.end, last: last.end, firstXID: first.xid, lastXID: last.xid, transactions: len(txs)}
	for _, tx := range txs {
		l.rows += tx.rows
	}
	a.mu.Lock()
	a.load = l
	a.mu.Unlock()
}

// goesTo notes a table that rows of it are sent to.
func (a *attempt) goesTo(table string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.load != nil && !slices.Contains(a.load.tables, table) {
		l := *a.load
		l.tables = append(slices.Clone(l.tables), table)
		a.load = &l
	}
}

// goesAs notes the keys of rows that are sent, where it matters.
func (a *attempt) goesAs(out *output, lo, hi int) {
	if !a.s.struggle.cautious() {
		return
	}
	named := rowsNamed(&out.array, lo, hi, -1) + " of table " + out.table.Spelling()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.load != nil {
		l := *a.load
		l.named = named
		a.load = &l
	}
}

// underWay gives what was taken on and has not reached the rung on which it is
// acknowledged, nil for nothing.
func (a *attempt) underWay() *load {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.load == nil || a.ledger.At(a.s.cfg.AckOn) >= a.load.last {
		return nil
	}
	return a.load
}

// Delivering says in words what is being delivered now, "" for nothing.
func (s *Source) Delivering() string {
	a := s.current.Load()
	if a == nil {
		return ""
	}
	l := a.underWay()
	if l == nil {
		return ""
	}
	return l.what() + ", " + l.where()
}

// placed says of a refusal that ended a stream behind which position it was,
// where the refusal itself does not say where.
func (a *attempt) placed(err error, refused *decode.Refusal) error {
	var streaming *streamError
	if !errors.As(err, &streaming) || refused.Where != "" {
		return err
	}
	at := *refused
	at.Where = "LSN behind " + decode.FormatLSN(a.received())
	return &at
}
