package feldera

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/go-json-experiment/json"

	"holdfast/internal/decode"
	"holdfast/internal/sabotage"
)

// Writer sends arrays to one table: one address, one request in flight. Two
// requests at once would be interleaved by the engine, so every writer of a
// table is the same one. It is safe for concurrent use; callers queue.
type Writer struct {
	c     *Client
	table *Table
	// turn holds one element while a request may be in flight or of unknown
	// outcome: nothing else goes to the table before that is settled.
	turn chan struct{}
	// unsettled is why the outcome of an earlier request is still open, nil
	// where none is. Whoever has the turn owns it. A Send can end with its
	// context before it has settled: the next one must not overtake the rows
	// that may still be applied.
	unsettled error
	// only is the one incarnation that the rows in hand may go to, "" for the
	// expected one, whichever that is. It is guarded by turn.
	only string
	// alsoOthers: other processes write the table whatever Config.Shared says, as
	// daemons do that share a progress table. It is set before the first request.
	alsoOthers atomic.Bool
	// mixing is how many parse errors the endpoint had when it was last looked
	// at, where others write the table too. Guarded by turn.
	mixing mixing
	// patience is how many requests with the same rows may go unanswered before
	// Send gives up, 0 for any number; named are the rows that the last refusal
	// named. Guarded by turn.
	patience int
	named    []rowFault
	// blind is true once it was said that the statistics do not show the
	// endpoint. Guarded by turn.
	blind bool
}

// Writer gives the writer of a table. All calls for one table give the same.
func (c *Client) Writer(t *Table) *Writer {
	c.writersMu.Lock()
	defer c.writersMu.Unlock()
	w, ok := c.writers[t.spelling]
	if !ok {
		w = &Writer{c: c, table: t, turn: make(chan struct{}, 1)}
		c.writers[t.spelling] = w
	}
	return w
}

// shared tells whether other processes write the table.
func (w *Writer) shared() bool { return w.c.cfg.Shared || w.alsoOthers.Load() }

func (w *Writer) what() string { return "write table " + w.table.spelling }

func (w *Writer) take(ctx context.Context) error {
	select {
	case w.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s: wait for the request before: %w", w.what(), context.Cause(ctx))
	}
}

func (w *Writer) give() { <-w.turn }

// Send sends the array and blocks until the pipeline has accepted it: a 200
// with a token of the expected incarnation. Transient errors are tried again
// for as long as ctx lives. After an uncertain outcome the same bytes go out
// again only when the incarnation is the same, the pipeline is Running, and a
// request lifetime has passed; they are applied twice at worst, one after the
// other, which a table with a primary key does not show.
//
// With [Config.Shared] a 200 alone does not count. Bodies of two processes that
// arrive at once are mixed in the endpoint; in one order of events the other's
// request completes the mixture and gets its errors, and ours, of which nothing
// is left, gets a 200. So the endpoint's count of parse errors is compared with
// the one before the request: where it has grown, the same bytes go out again.
//
// A request that has been started is never cut by ctx: it ends by its own
// time-out, and ctx counts between attempts. The array belongs to the writer
// until Send returns.
//
// Errors: *decode.Refusal where a person has to act or a row was refused,
// *[IncarnationChanged], or ctx's cause joined with the last reason. Whether
// the rows were applied can be open in the last case, and where a refusal is
// joined with [ErrOutcomeOpen]; after any other refusal nothing of the array
// was applied, but where [Config.Shared] is set and the look for parse errors
// was refused: then it was, or never will be.
func (w *Writer) Send(ctx context.Context, a *Array) (Token, error) {
	if err := w.owns(a); err != nil {
		return Token{}, err
	}
	if err := w.take(ctx); err != nil {
		return Token{}, err
	}
	defer w.give()
	return w.deliver(ctx, a.Body())
}

// RejectedRow is one change that the pipeline refused.
type RejectedRow struct {
	// Index is the change's place in the array, from 0.
	Index int
	// Refusal says why, in the pipeline's words.
	Refusal *decode.Refusal
}

// SendOnly is [Writer.Send] for rows that are meant for one incarnation: those that
// say themselves which one they stand for, and those that belong in a transaction
// that it has open. No attempt goes out while another one is expected, or where
// that one has not been heard of a moment ago and does not answer a look.
//
// What is left is the moment itself: an incarnation ends between its last answer
// and the request, and the next one takes that. An error says so; the rows are in.
func (w *Writer) SendOnly(ctx context.Context, a *Array, incarnation string) (Token, error) {
	if err := w.owns(a); err != nil {
		return Token{}, err
	}
	if err := w.take(ctx); err != nil {
		return Token{}, err
	}
	defer w.give()
	w.only = incarnation
	defer func() { w.only = "" }()
	return w.deliver(ctx, a.Body())
}

// SendSplit is Send for policies that set refused rows aside: an array that is
// refused is halved until the bad changes stand alone. The good ones are
// applied in order, in as many requests as it takes, one engine step each: the
// array is then no longer atomic.
//
// On an error toks and rejected tell what was done up to there. To send the
// whole array again is right for a table with a primary key, and may repeat
// rows in one without.
func (w *Writer) SendSplit(ctx context.Context, a *Array) (toks []Token, rejected []RejectedRow, err error) {
	if err := w.owns(a); err != nil {
		return nil, nil, err
	}
	if err := w.take(ctx); err != nil {
		return nil, nil, err
	}
	defer w.give()
	if a.Rows() == 0 {
		tok, err := w.deliver(ctx, a.Body())
		if err != nil {
			return nil, nil, err
		}
		return []Token{tok}, nil, nil
	}
	err = w.split(ctx, a, 0, a.Rows(), &toks, &rejected)
	return toks, rejected, err
}

// split is bounded in depth by the logarithm of the array's length.
func (w *Writer) split(ctx context.Context, a *Array, lo, hi int, toks *[]Token, rejected *[]RejectedRow) error {
	tok, err := w.deliver(ctx, a.slice(lo, hi))
	if err == nil {
		*toks = append(*toks, tok)
		return nil
	}
	var refused *decode.Refusal
	if !errors.As(err, &refused) || refused.Reason != decode.ReasonRejected {
		return err
	}
	if hi-lo == 1 {
		*rejected = append(*rejected, RejectedRow{Index: lo, Refusal: refused})
		return nil
	}
	middle := lo + (hi-lo)/2
	if err := w.split(ctx, a, lo, middle, toks, rejected); err != nil {
		return err
	}
	return w.split(ctx, a, middle, hi, toks, rejected)
}

func (w *Writer) owns(a *Array) error {
	if a.table != nil && a.table.spelling != w.table.spelling {
		return fmt.Errorf("%s: the array holds rows of table %s", w.what(), a.table.spelling)
	}
	return nil
}

// ErrOutcomeOpen is joined to a refusal of Send, and to any error of Begin and
// Commit, that came while the outcome of a request was awaited: it may still be
// applied, until a request lifetime has passed. The sequence it tells of: the
// answer to a request is lost; the key is withdrawn; the look at the pipeline,
// which was to settle the request, gets a 401.
var ErrOutcomeOpen = errors.New("a request before it may still be applied")

// open marks a refusal that leaves a request unsettled.
func (w *Writer) open(err error) error {
	var refused *decode.Refusal
	if !errors.As(err, &refused) {
		return err
	}
	return outcomeOpen(err, w.unsettled)
}

// deliver sends body until its outcome is known. The caller has the turn.
func (w *Writer) deliver(ctx context.Context, body []byte) (Token, error) {
	r := w.c.retrier(w.what())
	var doubt doubts
	failed := false // the last attempt has
	if err := w.knowIncarnation(ctx, r); err != nil {
		return Token{}, err
	}
	for {
		if w.unsettled != nil {
			if err := w.settle(ctx, r, w.unsettled); err != nil {
				return Token{}, w.open(err)
			}
			if w.patience > 0 && r.unknown >= w.patience {
				if answers, err := w.answersElse(ctx); err != nil {
					return Token{}, w.open(err)
				} else if answers {
					return Token{}, &UnansweredError{Times: r.unknown, Err: r.last}
				}
				r.unknown = 0 // an outage
				continue
			}
		}
		if err := w.beforeMixing(ctx, r); err != nil {
			return Token{}, err
		}
		if err := w.stillThere(ctx, r, failed); err != nil {
			return Token{}, err
		}
		if ctx.Err() != nil {
			return Token{}, r.ended(ctx)
		}
		failed = true // unless it returns
		tok, err := w.post(ctx, body)
		if err == nil {
			kept, err := w.unmixed(ctx, r)
			if err != nil || kept {
				return tok, err
			}
			continue
		}
		class := Classify(err)
		if class != ClassRefuseRecord {
			doubt = doubts{}
		}
		switch e := asError(err); {
		case class == ClassRetry:
			err = r.wait(ctx, err)
		case class == ClassRetryUncertain && sabotage.On(sabotage.TimeoutIsSuccess):
			return w.post(ctx, []byte("[]"))
		case class == ClassRetryUncertain:
			w.unsettled, err = err, nil
		case class == ClassRefuseRecord && e != nil:
			w.named = e.rows
			refused, why := doubt.weigh(w, e)
			w.mixing.known = false // it has counted our own errors too
			if refused != nil {
				return Token{}, refused
			}
			err = r.wait(ctx, why)
		case class == ClassStopOperator, class == ClassOtherIncarnation:
			return Token{}, w.final(err)
		default:
			return Token{}, err
		}
		if err != nil {
			return Token{}, err
		}
	}
}

// knowIncarnation sees to it that there is an expected incarnation before the
// first byte goes out: after an uncertain outcome it would be too late to ask
// which one the rows had gone to.
func (w *Writer) knowIncarnation(ctx context.Context, r *retrier) error {
	for w.c.Expected() == "" {
		_, err := w.c.Incarnation(ctx)
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return r.ended(ctx)
		case Classify(err) != ClassRetry:
			return w.final(err)
		default:
			if err := r.wait(ctx, err); err != nil {
				return err
			}
		}
	}
	return nil
}

// heardRecently is for how long an answer of an incarnation counts as a sign that
// the next request meets it too. A process takes longer to be replaced.
const heardRecently = 250 * time.Millisecond

// stillThere sees to it that rows which are meant for one incarnation meet it.
//
// The race it is against: a transaction is open; the pipeline's process ends; a
// request with some of its rows is refused, waits, and goes out again to the
// process that has come after it, where no transaction is open; they become
// visible there without the others.
func (w *Writer) stillThere(ctx context.Context, r *retrier, failed bool) error {
	if w.only == "" || (!failed && w.c.heardOf(heardRecently)) || sabotage.On(sabotage.RowIntoNewIncarnation) {
		return nil
	}
	for {
		s, err := w.c.Stats(ctx)
		switch {
		case err == nil && s.Incarnation != w.only:
			return &IncarnationChanged{Was: w.only, Now: s.Incarnation}
		case err == nil:
			return w.c.sameIncarnation(s.Incarnation)
		case ctx.Err() != nil:
			return r.ended(ctx)
		}
		if final := w.c.transient(err); final != nil {
			return final
		}
		if err := r.wait(ctx, err); err != nil {
			return err
		}
	}
}

// post makes one attempt. Its context is the caller's without the end: to cut
// a body in the middle would leave the outcome open for nothing.
func (w *Writer) post(ctx context.Context, body []byte) (Token, error) {
	if sabotage.On(sabotage.RowIntoNewIncarnation) {
		w.only = ""
	}
	if now := w.c.Expected(); w.only != "" && w.only != now {
		return Token{}, &IncarnationChanged{Was: w.only, Now: now}
	}
	cl := call{
		endpoint: epIngress, method: http.MethodPost, path: w.table.ingressPath(),
		body: body, mutates: true, limit: maxLargeBody,
	}
	uncut, done := w.c.unlessHalted(ctx)
	defer done()
	asked := time.Now()
	answer, err := w.c.roundTrip(uncut, cl)
	if err != nil {
		return Token{}, err
	}
	var t struct {
		Token string `json:"token"`
	}
	if err := json.Unmarshal(answer, &t); err != nil {
		return Token{}, w.c.badAnswer(cl, answer, err)
	}
	tok, err := parseToken(t.Token)
	if err != nil {
		return Token{}, w.c.badAnswer(cl, answer, err)
	}
	if err := w.c.sameIncarnation(tok.Incarnation); err != nil {
		return Token{}, err
	}
	w.c.hears(tok.Incarnation, asked)
	if w.only != "" && w.only != tok.Incarnation {
		return Token{}, &IncarnationChanged{Was: w.only, Now: tok.Incarnation}
	}
	tok.lane, tok.seq = w.table.spelling, w.c.seq.Add(1)
	return tok, nil
}

// settle waits until a request of unknown outcome can no longer be applied by
// surprise: then unsettled is nil. The order matters. A paused pipeline can hold
// what it has read of the body and apply it on resuming, however late: so the
// lifetime runs while the pipeline is seen to be Running, at its beginning and
// at its end.
//
// A change of the incarnation settles nothing. The manager may still be
// connecting to the old process, by a name that the new one answers to: the
// rows would land there, behind the replay of those after them.
func (w *Writer) settle(ctx context.Context, r *retrier, cause error) error {
	if err := r.wait(ctx, cause); err != nil {
		return err
	}
	if sabotage.On(sabotage.RetryAtOnce) {
		w.unsettled = nil
		return nil
	}
	for {
		if calm, err := w.running(ctx, r); err != nil {
			return err
		} else if !calm {
			r.unknown = 0 // an outage, which says nothing about the request
		}
		r.unknown++
		open := fmt.Errorf("outcome unknown, wait until the request can no longer be applied: %w", cause)
		if err := r.pause(ctx, open, w.c.cfg.RequestLifetime); err != nil {
			return err
		}
		state, err := w.state(ctx)
		switch {
		case err == nil && state == stateRunning:
			w.unsettled = nil
			return nil
		case err == nil:
			err = fmt.Errorf("the pipeline is %s: %w", state, cause)
		case Classify(err) == ClassOtherIncarnation || Classify(err) == ClassStopOperator:
			return w.final(err)
		}
		r.unknown = 0
		if err := r.wait(ctx, err); err != nil {
			return err
		}
	}
}

// running waits until the pipeline is seen Running in the expected incarnation,
// and tells whether it was at the first look.
func (w *Writer) running(ctx context.Context, r *retrier) (calm bool, err error) {
	for calm = true; ; calm = false {
		state, err := w.state(ctx)
		switch {
		case err == nil && state == stateRunning:
			return calm, nil
		case err == nil:
			err = fmt.Errorf("a request's outcome is unknown and the pipeline is %s", state)
		case Classify(err) == ClassOtherIncarnation || Classify(err) == ClassStopOperator:
			return false, w.final(err)
		}
		if err := r.wait(ctx, err); err != nil {
			return false, err
		}
	}
}

// state reads the pipeline's state; another incarnation is an error.
func (w *Writer) state(ctx context.Context) (string, error) {
	s, err := w.c.Stats(ctx)
	if err != nil {
		return "", err
	}
	return s.State, w.c.sameIncarnation(s.Incarnation)
}

// final makes the error that a caller gets out of one that ends the attempts.
func (w *Writer) final(err error) error {
	e := asError(err)
	switch {
	case e == nil:
		return err
	case Classify(err) == ClassOtherIncarnation:
		return &IncarnationChanged{Was: w.c.Expected()}
	}
	return e.refusal(w.c)
}

// rejected words a ParseErrors answer.
func (w *Writer) rejected(e *Error) *decode.Refusal {
	r := &decode.Refusal{
		Reason: decode.ReasonRejected, What: "rows", Where: "table " + w.table.spelling,
		Why: e.Message, Expected: "rows that the pipeline's parser takes",
		Do: "compare the table's columns with the source's; nothing of the request was applied", Err: e.Err,
	}
	if len(e.rows) == 0 {
		return r
	}
	first := e.rows[0]
	r.Why = "the pipeline says: " + first.Description
	if first.Field != nil {
		r.Where += fmt.Sprintf(", column %q", *first.Field)
	}
	if first.InvalidText != nil {
		r.Where += ", row " + *first.InvalidText
	}
	return r
}
