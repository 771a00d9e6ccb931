package feldera

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"sync"
	"time"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
)

// Evidence is what became of the rows of one token.
type Evidence struct {
	Token Token
	// Rung is Ingested, Completed or Durable; meaningless with Err.
	Rung ack.Rung
	// Step is the engine step by which the rows had been ingested: they are in
	// it or in an earlier one. Steps compare within one incarnation only.
	Step uint64
	// Err is *[IncarnationChanged], the rows may be lost, or *decode.Refusal,
	// a person has to act before anything can be known.
	Err error
}

// CompletionsOptions tune the polling. Zero values mean the defaults.
type CompletionsOptions struct {
	// MinInterval and MaxInterval bound the pause between two rounds of
	// questions: short after news, twice as long after each round without.
	// Defaults 1 ms and 250 ms.
	MinInterval, MaxInterval time.Duration
}

// Completions finds out what became of tokens, with one goroutine for all of
// them. While nothing is outstanding it asks nothing.
type Completions struct {
	c    *Client
	opts CompletionsOptions
	wake chan struct{}

	mu sync.Mutex
	// lanes holds the outstanding tokens by incarnation and writer, in the
	// order of sending.
	// Their number is bounded by what the callers keep in flight. No lane in
	// it is empty.
	lanes map[string][]*watched
}

// watched is one outstanding token. All but rung is fixed; rung belongs to the
// polling goroutine.
type watched struct {
	token Token
	fn    func(Evidence)
	rung  ack.Rung // Accepted or Ingested
	step  uint64
}

// NewCompletions makes a poller. Its owner calls Run.
func (c *Client) NewCompletions(opts CompletionsOptions) *Completions {
	opts.MinInterval = orDefault(max(opts.MinInterval, 0), time.Millisecond)
	opts.MaxInterval = max(orDefault(max(opts.MaxInterval, 0), 250*time.Millisecond), opts.MinInterval)
	return &Completions{c: c, opts: opts, wake: make(chan struct{}, 1), lanes: make(map[string][]*watched)}
}

// Watch calls fn once when the rows of tok are ingested and once when they are
// completed, or once with Err and never again. fn runs on the goroutine of Run
// and must not block. Nothing more is called once Run has returned.
func (cs *Completions) Watch(tok Token, fn func(Evidence)) {
	// A later token covers an earlier one of its own process only: what that
	// of a new one has reached says nothing about rows that the old one took.
	lane := tok.Incarnation + "\x00" + tok.lane
	if tok.lane == "" {
		lane += "\x00" + tok.Raw // of an unknown writer: comparable with no other
	}
	cs.mu.Lock()
	list := append(cs.lanes[lane], &watched{token: tok, fn: fn, rung: ack.Accepted})
	// Watch calls of several goroutines can come in another order than the
	// tokens: later ones cover earlier ones only in the order of sending.
	for i := len(list) - 1; i > 0 && list[i].token.seq < list[i-1].token.seq; i-- {
		list[i], list[i-1] = list[i-1], list[i]
	}
	cs.lanes[lane] = list
	cs.mu.Unlock()
	select {
	case cs.wake <- struct{}{}:
	default: // a wake-up is pending already, and it comes after this token
	}
}

// Outstanding is the number of tokens that are neither completed nor failed.
func (cs *Completions) Outstanding() int {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	n := 0
	for _, l := range cs.lanes {
		n += len(l)
	}
	return n
}

// Run polls until ctx ends, and returns its cause. It is called once.
func (cs *Completions) Run(ctx context.Context) error {
	r := cs.c.retrier("read completion")
	interval := cs.opts.MinInterval
	for {
		if cs.Outstanding() == 0 {
			select {
			case <-cs.wake:
				interval = cs.opts.MinInterval
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		news, err := cs.round(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			if r.wait(ctx, err) != nil {
				return context.Cause(ctx)
			}
			continue
		}
		r = cs.c.retrier("read completion")
		if news {
			interval = cs.opts.MinInterval
		} else {
			interval = min(2*interval, cs.opts.MaxInterval)
		}
		if cs.rest(ctx, interval) {
			interval = cs.opts.MinInterval
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// rest waits out the interval and says whether a new token ended it: fresh rows
// are soon ingested. It is never shorter than the least interval.
func (cs *Completions) rest(ctx context.Context, d time.Duration) (woken bool) {
	if !sleep(ctx, cs.opts.MinInterval) {
		return false
	}
	t := time.NewTimer(d - cs.opts.MinInterval)
	defer t.Stop()
	select {
	case <-t.C:
		return false
	case <-cs.wake:
		return true
	case <-ctx.Done():
		return false
	}
}

// round asks once for every lane and says whether anything new was learned.
func (cs *Completions) round(ctx context.Context) (news bool, err error) {
	cs.mu.Lock()
	names := make([]string, 0, len(cs.lanes))
	for name := range cs.lanes {
		names = append(names, name)
	}
	cs.mu.Unlock()
	slices.Sort(names)
	for _, name := range names {
		learned, e := cs.ask(ctx, name)
		news = news || learned
		if e != nil {
			err = e
			if ctx.Err() != nil {
				return news, err
			}
		}
	}
	return news, err
}

// ask learns about one lane. The newest token comes first: what it has
// reached, all before it have. Else the oldest ones, for as long as they move.
func (cs *Completions) ask(ctx context.Context, lane string) (news bool, err error) {
	_, newest := cs.ends(lane)
	if newest == nil {
		return false, nil // given up by a failure of another lane in this round
	}
	news, completed, err := cs.askOne(ctx, lane, newest)
	for err == nil && !completed {
		oldest, _ := cs.ends(lane)
		if oldest == nil || oldest.token.seq >= newest.token.seq {
			break
		}
		var moved bool
		moved, completed, err = cs.askOne(ctx, lane, oldest)
		news = news || moved
		if !completed {
			break
		}
		completed = false // of the oldest: on to the next one
	}
	return news, err
}

// ends gives the lane's oldest and newest token, nil where it has none.
func (cs *Completions) ends(lane string) (oldest, newest *watched) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if list := cs.lanes[lane]; len(list) > 0 {
		return list[0], list[len(list)-1]
	}
	return nil, nil
}

// askOne asks about one token and applies the answer to all up to it.
func (cs *Completions) askOne(ctx context.Context, lane string, w *watched) (news, completed bool, err error) {
	st, err := cs.c.completion(ctx, w.token)
	if err != nil {
		if ctx.Err() != nil {
			return false, false, err
		}
		news, err = cs.failed(ctx, lane, w, err)
		return news, news, err
	}
	if st.step == nil {
		return false, false, nil
	}
	for _, covered := range cs.upTo(lane, w.token.seq, st.complete) {
		if covered.rung < ack.Ingested {
			covered.rung, covered.step = ack.Ingested, *st.step
			news = true
			covered.fn(Evidence{Token: covered.token, Rung: ack.Ingested, Step: covered.step})
		}
		if st.complete {
			news = true
			covered.fn(Evidence{Token: covered.token, Rung: ack.Completed, Step: covered.step})
		}
	}
	return news, st.complete, nil
}

// upTo gives the lane's tokens up to seq, and takes them out on request.
func (cs *Completions) upTo(lane string, seq uint64, takeOut bool) []*watched {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	list := cs.lanes[lane]
	n := 0
	for n < len(list) && list[n].token.seq <= seq {
		n++
	}
	covered := slices.Clone(list[:n])
	if !takeOut {
		return covered
	}
	if n == len(list) {
		delete(cs.lanes, lane)
	} else {
		cs.lanes[lane] = slices.Delete(list, 0, n)
	}
	return covered
}

// failed sorts an error: an incarnation that is gone takes all its tokens with
// it, an operator's matter all tokens, a token that is not understood itself.
func (cs *Completions) failed(ctx context.Context, lane string, w *watched, err error) (bool, error) {
	var e *Error
	errors.As(err, &e)
	switch Classify(err) {
	case ClassOtherIncarnation:
		lost := &IncarnationChanged{Was: w.token.Incarnation}
		if now, err := cs.c.Stats(ctx); err == nil && now.Incarnation != lost.Was {
			lost.Now = now.Incarnation
		}
		cs.abandon(lost, func(t Token, in string) bool {
			return t.Incarnation == w.token.Incarnation && (e == nil || e.Code != codeUnknownTokenEndpoint || in == lane)
		})
		return true, nil
	case ClassStopOperator:
		refused := err
		if e != nil {
			refused = e.refusal(cs.c)
		}
		cs.abandon(refused, func(t Token, _ string) bool {
			return e == nil || e.Code != codeInvalidParam || t == w.token
		})
		return true, nil
	case ClassRetry, ClassRetryUncertain, ClassRefuseRecord:
	}
	return false, err
}

// abandon ends the watching of the tokens that match.
func (cs *Completions) abandon(err error, match func(t Token, lane string) bool) {
	var ended []*watched
	cs.mu.Lock()
	for lane, list := range cs.lanes {
		kept := list[:0:0]
		for _, w := range list {
			if match(w.token, lane) {
				ended = append(ended, w)
			} else {
				kept = append(kept, w)
			}
		}
		if len(kept) == 0 {
			delete(cs.lanes, lane)
		} else {
			cs.lanes[lane] = kept
		}
	}
	cs.mu.Unlock()
	slices.SortFunc(ended, func(a, b *watched) int { return int(int64(a.token.seq) - int64(b.token.seq)) }) //nolint:gosec // counts of requests
	for _, w := range ended {
		w.fn(Evidence{Token: w.token, Err: err})
	}
}

// completionStatus is one answer about a token.
type completionStatus struct {
	complete bool
	// step is nil until the rows are ingested; never nil when complete.
	step *uint64
}

// completion asks once about a token.
func (c *Client) completion(ctx context.Context, tok Token) (completionStatus, error) {
	var b struct {
		Status string  `json:"status"`
		Step   *uint64 `json:"step"`
	}
	cl := call{endpoint: epCompletion, path: "/completion_status?token=" + url.QueryEscape(tok.Raw), limit: maxSmallBody, timeout: statusTimeout}
	if err := c.getJSON(ctx, cl, &b); err != nil {
		return completionStatus{}, err
	}
	switch {
	case b.Status == "complete" && b.Step != nil:
		return completionStatus{complete: true, step: b.Step}, nil
	case b.Status == "inprogress":
		return completionStatus{step: b.Step}, nil
	}
	return completionStatus{}, c.badAnswer(cl, nil, fmt.Errorf("status %q with step %v is not of the contract", clip(b.Status, 40), b.Step != nil))
}

// statusTimeout is above the manager's own 10 s for such questions.
const statusTimeout = 12 * time.Second

// awaitIngested waits until the rows of every token are in the circuit. It
// asks by itself, on the caller's goroutine.
func (c *Client) awaitIngested(ctx context.Context, what string, toks []Token) error {
	return c.awaitTokens(ctx, what, toks, func(st completionStatus) bool { return st.step != nil })
}

// awaitCompleted waits until every token is complete. What holds it up, such
// as somebody else's transaction, goes to OnRetry now and then.
func (c *Client) awaitCompleted(ctx context.Context, what string, toks []Token) error {
	return c.awaitTokens(ctx, what, toks, func(st completionStatus) bool { return st.complete })
}

// lookForStall is how often, while a token does not move, the pipeline is
// asked for the reason.
const lookForStall = 5 * time.Second

// awaitTokens asks for one token after the other until all are as done wants them.
func (c *Client) awaitTokens(ctx context.Context, what string, toks []Token, done func(completionStatus) bool) error {
	r := c.retrier(what)
	for _, tok := range toks {
		if err := c.awaitOne(ctx, r, tok, done); err != nil {
			return err
		}
	}
	return nil
}

func (c *Client) awaitOne(ctx context.Context, r *retrier, tok Token, done func(completionStatus) bool) error {
	interval := time.Millisecond
	stalled := time.Now()
	for {
		st, err := c.completion(ctx, tok)
		switch {
		case ctx.Err() != nil:
			return r.ended(ctx)
		case err == nil && done(st):
			return nil
		case err == nil && time.Since(stalled) > lookForStall:
			stalled = time.Now()
			err = errors.New("it takes long, and the pipeline says nothing about why")
			if s, statsErr := c.Stats(ctx); statsErr == nil && s.Stalled() != "" {
				err = errors.New(s.Stalled())
			}
			if err := r.pause(ctx, err, interval); err != nil {
				return err
			}
		case err == nil:
			if !sleep(ctx, interval) {
				return r.ended(ctx)
			}
			interval = min(2*interval, 100*time.Millisecond)
		default:
			if err := c.transient(err); err != nil {
				var changed *IncarnationChanged
				if errors.As(err, &changed) {
					changed.Was = tok.Incarnation
				}
				return err
			}
			if err := r.wait(ctx, err); err != nil {
				return err
			}
		}
	}
}

// transient gives nil for an error that is worth another attempt of a request
// that changes nothing, and otherwise the error for the caller.
func (c *Client) transient(err error) error {
	switch Classify(err) {
	case ClassRetry, ClassRetryUncertain:
		return nil
	case ClassOtherIncarnation:
		var changed *IncarnationChanged
		if errors.As(err, &changed) {
			return changed
		}
		return &IncarnationChanged{Was: c.Expected()}
	case ClassRefuseRecord, ClassStopOperator:
	}
	var refused *decode.Refusal
	if errors.As(err, &refused) {
		return refused
	}
	var e *Error
	if errors.As(err, &e) {
		return e.refusal(c)
	}
	return err
}
