package feldera

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/go-json-experiment/json"

	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/sabotage"
)

// TransactionState is what the pipeline says about its transaction. While one
// is open or committing, nothing in the whole pipeline completes.
type TransactionState struct {
	// Incarnation is the process that was asked.
	Incarnation string
	// Status is the engine's view: NoTransaction, TransactionInProgress or
	// CommitInProgress. A requested transaction is NoTransaction until data
	// arrives.
	Status string
	// ID is 0 where there is none. It is that of the transaction that was asked
	// for over HTTP, where there is one; the one before may still commit.
	ID int64
	// API is "Started" while a transaction that was asked for over HTTP is
	// open, "Committed" until its commit begins, else "".
	API string
	// Connectors are the input connectors that take part.
	Connectors []string
	// Since is when the engine opened it; zero where it did not say.
	Since time.Time
	// Records is how many it holds.
	Records uint64
}

const (
	statusNone   = "NoTransaction"
	statusCommit = "CommitInProgress"
	apiStarted   = "Started"
	apiCommitted = "Committed"
)

// Open tells whether a transaction is open, requested or committing.
func (s *TransactionState) Open() bool {
	return s.API == apiStarted || len(s.Connectors) > 0 || (s.Status != "" && s.Status != statusNone)
}

// String describes the transaction for a status page: `transaction 12 open
// since …`.
func (s *TransactionState) String() string {
	if !s.Open() {
		return "no transaction"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "transaction %d ", s.ID)
	switch s.Status {
	case statusCommit:
		if s.API == apiStarted {
			b.WriteString("requested, while the one before commits")
			break
		}
		b.WriteString("committing")
	case statusNone:
		b.WriteString("requested, without data yet")
	default:
		b.WriteString("open")
	}
	if !s.Since.IsZero() {
		b.WriteString(" since " + s.Since.UTC().Format(time.RFC3339))
	}
	if s.Records > 0 {
		fmt.Fprintf(&b, " with %d records", s.Records)
	}
	if len(s.Connectors) > 0 {
		b.WriteString(", held by connectors " + strings.Join(s.Connectors[:min(len(s.Connectors), 5)], ", "))
	}
	b.WriteString("; nothing completes before it ends")
	return b.String()
}

// TransactionState reads the pipeline's transaction: one attempt.
func (c *Client) TransactionState(ctx context.Context) (TransactionState, error) {
	s, err := c.Stats(ctx)
	if err != nil {
		return TransactionState{}, fmt.Errorf("read the transaction: %w", err)
	}
	return s.Transaction, nil
}

// Intent is the record by which a transaction is known as ours after a crash.
type Intent struct {
	Incarnation string
	// ID is the transaction's; 0 = it was about to be asked for.
	ID int64
}

// Transaction is one open transaction of ours. It belongs to one goroutine.
type Transaction struct {
	c       *Client
	intent  Intent
	resumed bool
	// tokens are what has to be ingested before the commit: one a table.
	tokens []Token
}

// Begin opens a transaction, waiting while somebody else's is open (each wait
// is reported by OnRetry, with the transaction's description).
//
// own is the intent that the caller recorded last, nil for none. An open
// transaction that matches it is ours from before a crash: Begin gives it with
// Resumed, and the caller sends the whole unit again into it. A recorded
// intent with ID 0 matches only a transaction that is still without data, of
// whichever incarnation. Any other open transaction is foreign.
//
// record is called with the intent before the request (ID 0) and with the ID
// after it, before any data can be in the transaction; it makes the intent
// durable. Its error ends Begin.
//
// Through the manager a request can reach the pipeline twice, and the second
// one is then told that a transaction is open. Begin looks first that none is;
// what is open when its own request is answered with 409, or with nothing, it
// takes for its own. Only a client that starts a transaction in that very
// moment is mistaken by this.
//
// Errors: *decode.Refusal, *[IncarnationChanged], record's, or ctx's cause
// joined with the last reason; with [ErrOutcomeOpen] where the request may still
// be applied.
func (c *Client) Begin(ctx context.Context, own *Intent, record func(context.Context, Intent) error) (_ *Transaction, err error) {
	r := c.retrier("begin transaction")
	b := beginning{c: c, own: own, record: record}
	defer func() { err = outcomeOpen(err, b.unsettled) }()
	for {
		if ctx.Err() != nil {
			return nil, r.ended(ctx)
		}
		tx, err := b.try(ctx)
		if err == nil {
			return tx, nil
		}
		var failed *recordError
		if errors.As(err, &failed) {
			return nil, fmt.Errorf("begin transaction: record the intent: %w", failed.err)
		}
		if final := c.transient(err); final != nil {
			return nil, final
		}
		if err := r.wait(ctx, err); err != nil {
			return nil, err
		}
	}
}

// Resume gives the open transaction that own names, after a crash of the
// process that opened it; nil where that is not open any more. The caller
// records its intent anew where own had no ID, sends the whole unit again into
// it, then commits.
//
// Errors: *decode.Refusal, *[IncarnationChanged], or ctx's cause joined with
// the last reason.
func (c *Client) Resume(ctx context.Context, own Intent) (*Transaction, error) {
	st, err := c.awaitState(ctx, nil)
	if err != nil {
		return nil, err
	}
	if err := c.sameIncarnation(st.Incarnation); err != nil {
		return nil, err
	}
	if st.API != apiStarted || !own.matches(&st) {
		return nil, nil //nolint:nilnil // none of ours is open
	}
	return &Transaction{c: c, intent: Intent{Incarnation: st.Incarnation, ID: st.ID}, resumed: true}, nil
}

// recordError marks an error of the caller's own store.
type recordError struct{ err error }

func (e *recordError) Error() string { return e.err.Error() }

// betweenCommits reads the transaction's state when no commit waits to begin.
// That takes the pipeline one step.
//
// The race it is against: a commit is accepted; a request to begin comes before
// the step in which the commit begins, and replaces it; the transaction stays
// open, with another one's number on record.
func (c *Client) betweenCommits(ctx context.Context) (TransactionState, error) {
	const turns, turn = 100, 10 * time.Millisecond
	for i := 0; ; i++ {
		st, err := c.TransactionState(ctx)
		if err != nil || st.API != apiCommitted {
			return st, err
		}
		if i == turns {
			return st, fmt.Errorf("the commit of transaction %d has not begun yet", st.ID)
		}
		if !sleep(ctx, turn) {
			return st, context.Cause(ctx)
		}
	}
}

// beginning is one call of Begin.
type beginning struct {
	c      *Client
	record func(context.Context, Intent) error
	// own is the intent by which an open transaction is known as ours.
	own *Intent
	// asked: own is of a request of this call, so that nothing of ours can be in
	// what it opens late.
	asked bool
	// unsettled is why the outcome of a request is still open, nil otherwise.
	unsettled error
}

func (b *beginning) try(ctx context.Context) (*Transaction, error) {
	c, record := b.c, b.record
	st, err := c.betweenCommits(ctx)
	if err != nil {
		return nil, err
	}
	if err := c.sameIncarnation(st.Incarnation); err != nil {
		return nil, err
	}
	keep := func(id int64, resumed bool) (*Transaction, error) {
		in := Intent{Incarnation: st.Incarnation, ID: id}
		if b.own == nil || *b.own != in {
			if err := record(ctx, in); err != nil {
				return nil, &recordError{err}
			}
		}
		return &Transaction{c: c, intent: in, resumed: resumed}, nil
	}
	if st.API == apiStarted {
		if b.own.matches(&st) {
			return keep(st.ID, !b.asked)
		}
		return nil, fmt.Errorf("somebody else's %s", st.String())
	}
	if err := record(ctx, Intent{Incarnation: st.Incarnation}); err != nil {
		return nil, &recordError{err}
	}
	id, err := c.start(ctx)
	var e *Error
	switch {
	case err == nil:
		// The process that was looked at ends; the request reaches the one that
		// comes after, which answers with a number of its own; rows would go into
		// that transaction under a record that names another. So it is looked again,
		// before there is a row in it.
		now, err := c.awaitState(ctx, nil)
		switch {
		case err != nil:
			return nil, err
		case now.Incarnation == st.Incarnation:
			return keep(id, false)
		case now.API == apiStarted && now.ID == id:
			if err := record(ctx, Intent{Incarnation: now.Incarnation, ID: id}); err != nil {
				return nil, &recordError{err}
			}
		}
		return nil, &IncarnationChanged{Was: st.Incarnation, Now: now.Incarnation}
	case !errors.As(err, &e):
		return nil, err
	case e.Code == codeTransactionInProgress && !c.viaManager():
		return nil, fmt.Errorf("somebody else began a transaction first: %w", err)
	case e.Code != codeTransactionInProgress && Classify(err) != ClassRetryUncertain:
		return nil, err
	}
	if e.Code != codeTransactionInProgress {
		// No answer: the request, or the manager's repetition of it, may come
		// late. Were it to come after our commit, it would open a transaction
		// that nobody ends. One that it opens is ours, also behind the next look.
		b.own, b.asked, b.unsettled = &Intent{Incarnation: st.Incarnation}, true, err
	}
	again, stateErr := c.outlast(ctx, c.retrier("begin transaction"), err, b.unsettled != nil)
	if stateErr != nil {
		return nil, stateErr
	}
	b.unsettled = nil
	if again.Incarnation != st.Incarnation {
		return nil, &IncarnationChanged{Was: st.Incarnation, Now: again.Incarnation}
	}
	if again.API == apiStarted && again.ID > 0 {
		return keep(again.ID, false)
	}
	return nil, err
}

// outlast reads the transaction's state behind a request without an answer: where
// that may still be applied, when its lifetime has passed in front of a pipeline
// that answered at its beginning and at its end. A process that stands still has
// what was sent to it in its sockets, and applies it when it goes on, however
// late. So does one that comes after it, to which the manager passes it on.
func (c *Client) outlast(ctx context.Context, r *retrier, cause error, late bool) (TransactionState, error) {
	for {
		st, err := c.awaitState(ctx, cause)
		if err != nil || !late {
			return st, err
		}
		if err := r.pause(ctx, cause, c.cfg.RequestLifetime); err != nil {
			return st, err
		}
		st, err = c.TransactionState(ctx)
		if err == nil {
			return st, nil
		}
		if final := c.transient(err); final != nil {
			return st, final
		}
		if err := r.wait(ctx, err); err != nil {
			return st, err
		}
	}
}

// outcomeOpen marks an error that leaves a request without a known outcome.
func outcomeOpen(err, unsettled error) error {
	if err == nil || unsettled == nil {
		return err
	}
	return fmt.Errorf("%w (%w: %w)", err, ErrOutcomeOpen, unsettled)
}

// awaitState reads the transaction's state, again and again where it must.
func (c *Client) awaitState(ctx context.Context, cause error) (TransactionState, error) {
	r := c.retrier("read the transaction")
	r.last = cause
	for {
		st, err := c.TransactionState(ctx)
		if err == nil {
			return st, nil
		}
		if ctx.Err() != nil {
			return st, r.ended(ctx)
		}
		if final := c.transient(err); final != nil {
			return st, final
		}
		if err := r.wait(ctx, err); err != nil {
			return st, err
		}
	}
}

// matches tells whether an open transaction is the one of the intent.
//
// Of an intent without an ID only the request is known, and not where it
// arrived. It is sent; the pipeline's process ends, and so does ours; the
// manager passes the request on to the process that comes after; nobody knows
// the transaction that it opens there, and nothing completes until it ends.
func (in *Intent) matches(st *TransactionState) bool {
	switch {
	case in == nil || in.Incarnation == "":
		return false
	case in.ID == 0:
		return st.Status == statusNone || st.Status == statusCommit // of the one before: meanwhile nothing is ingested
	}
	return in.Incarnation == st.Incarnation && in.ID == st.ID
}

func (c *Client) start(ctx context.Context) (int64, error) {
	cl := call{endpoint: epStart, method: http.MethodPost, path: "/start_transaction", mutates: true, limit: maxSmallBody, timeout: postTimeout}
	uncut, done := c.unlessHalted(ctx)
	defer done()
	body, err := c.roundTrip(uncut, cl)
	if err != nil {
		return 0, err
	}
	var b struct {
		ID int64 `json:"transaction_id"`
	}
	if err := json.Unmarshal(body, &b); err != nil {
		return 0, c.badAnswer(cl, body, err)
	}
	if b.ID <= 0 {
		return 0, c.badAnswer(cl, body, fmt.Errorf("transaction_id is %d", b.ID))
	}
	return b.ID, nil
}

// postTimeout is above the manager's 10 s, twice: it sends such requests again.
const postTimeout = 22 * time.Second

// Intent is the transaction's record.
func (tx *Transaction) Intent() Intent { return tx.intent }

// Resumed tells that the transaction was open before, with data of ours in it.
func (tx *Transaction) Resumed() bool { return tx.resumed }

// Sent notes the token of a request whose rows belong to the transaction.
// Rows are sent by the tables' writers as always.
func (tx *Transaction) Sent(tok Token) {
	for i, had := range tx.tokens {
		if had.lane == tok.lane && tok.lane != "" {
			if had.seq < tok.seq {
				tx.tokens[i] = tok // a table's newest token covers those before
			}
			return
		}
	}
	tx.tokens = append(tx.tokens, tok)
}

// ErrTaken says that the transaction was ended by somebody else before all of
// its rows were in. The rows are in the pipeline, but not as one: the caller
// sends the whole unit again in a new transaction.
var ErrTaken = errors.New("the transaction was committed by somebody else before it was complete")

// Commit waits until all rows are ingested, lets last send the progress row
// and waits for that too, then commits: what is still queued at a commit falls
// outside of the transaction. last may be nil; it gives the token of what it
// sent. The tokens complete after Commit has returned: [Completions] tells.
//
// Errors: [ErrTaken], last's, *decode.Refusal, *[IncarnationChanged], or ctx's
// cause joined with the last reason; with [ErrOutcomeOpen] where the request to
// commit may still be applied. After an error the transaction may be open: Begin
// with its intent finds it.
func (tx *Transaction) Commit(ctx context.Context, last func(context.Context) (Token, error)) error {
	c := tx.c
	if sabotage.On(sabotage.RowNotLast) && last != nil {
		if _, err := last(ctx); err != nil {
			return err
		}
		last = nil
	}
	if err := c.awaitIngested(ctx, "await the transaction's rows", tx.tokens); err != nil {
		return err
	}
	if last != nil {
		tok, err := last(ctx)
		if err != nil {
			return fmt.Errorf("commit transaction %d: last row: %w", tx.intent.ID, err)
		}
		if err := c.awaitIngested(ctx, "await the transaction's last row", []Token{tok}); err != nil {
			return err
		}
	}
	st, err := c.awaitState(ctx, nil)
	if err != nil {
		return err
	}
	if st.Incarnation != tx.intent.Incarnation {
		return &IncarnationChanged{Was: tx.intent.Incarnation, Now: st.Incarnation}
	}
	if !tx.open(&st) {
		return fmt.Errorf("commit transaction %d: %w (now: %s)", tx.intent.ID, ErrTaken, st.String())
	}
	crash.Here(crash.PgTxIngested)
	return tx.commit(ctx)
}

// open tells whether the transaction is still open for us.
func (tx *Transaction) open(st *TransactionState) bool {
	return st.API == apiStarted && st.ID == tx.intent.ID
}

// commit asks for the commit until it is known to have happened. All rows are
// in by now, so that whoever commits, commits the whole.
//
// A request of which nothing is known may still come late, and the interface has
// no way to say which transaction it means: it would commit the next one in the
// middle. So none is begun before its lifetime is over, and where this call ends
// before that, its error says so.
func (tx *Transaction) commit(ctx context.Context) (err error) {
	r := tx.c.retrier(fmt.Sprintf("commit transaction %d", tx.intent.ID))
	var unsettled error
	defer func() { err = outcomeOpen(err, unsettled) }()
	for {
		if ctx.Err() != nil {
			return r.ended(ctx)
		}
		cl := call{endpoint: epCommit, method: http.MethodPost, path: "/commit_transaction", mutates: true, limit: maxSmallBody, timeout: postTimeout}
		uncut, done := tx.c.unlessHalted(ctx)
		_, cause := tx.c.roundTrip(uncut, cl)
		done()
		if cause == nil {
			return nil
		}
		class := Classify(cause)
		if e := asError(cause); e != nil && e.Code == codeNoTransaction {
			class = ClassRetry // it came from the second of two requests, or after somebody else's commit
		}
		switch class {
		case ClassRetryUncertain:
			unsettled = cause
		case ClassRetry: // nothing of it is on its way
			if err := r.wait(ctx, cause); err != nil {
				return err
			}
		case ClassRefuseRecord, ClassStopOperator, ClassOtherIncarnation:
			return tx.c.transient(cause)
		}
		st, err := tx.c.outlast(ctx, r, cause, unsettled != nil)
		if err != nil {
			return err
		}
		unsettled = nil
		if st.Incarnation != tx.intent.Incarnation {
			return &IncarnationChanged{Was: tx.intent.Incarnation, Now: st.Incarnation}
		}
		if !tx.open(&st) {
			return nil
		}
	}
}

// CommitOrphan ends a transaction that the caller's intent names and that it
// has no rows for any more, without waiting for anything.
func (c *Client) CommitOrphan(ctx context.Context, own Intent) error {
	st, err := c.awaitState(ctx, nil)
	if err != nil {
		return err
	}
	if st.API != apiStarted || !own.matches(&st) {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "commit", Where: c.where(),
			Why: fmt.Sprintf("no open transaction is ours: %s", st.String()), Expected: fmt.Sprintf("transaction %d of incarnation %s", own.ID, own.Incarnation),
		}
	}
	return (&Transaction{c: c, intent: Intent{Incarnation: st.Incarnation, ID: st.ID}}).commit(ctx)
}
