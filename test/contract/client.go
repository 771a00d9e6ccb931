package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// lifetime is how long the clauses let an abandoned request live where they
// watch the client wait for it.
const lifetime = 300 * time.Millisecond

// connect makes a client of the target.
func (p *probe) connect(alter func(*feldera.Config)) *feldera.Client {
	cfg := feldera.Config{
		URL: p.w.address, Pipeline: p.w.pipeline,
		BackoffInitial: time.Millisecond, BackoffMax: 20 * time.Millisecond,
	}
	if p.w.key != "" {
		cfg.APIKey = func() (string, error) { return p.w.key, nil }
	}
	if alter != nil {
		alter(&cfg)
	}
	c, err := feldera.New(cfg)
	p.noErr("making a client", err)
	p.closers = append(p.closers, c.CloseIdle)
	return c
}

// listen puts a tap before the target and makes a client that goes through it.
func (p *probe) listen(alter func(*feldera.Config)) (*feldera.Client, *tap) {
	t, end, err := newTap(p.ctx, p.w.address, nil)
	p.noErr("listening in", err)
	c := p.connect(func(cfg *feldera.Config) {
		cfg.URL = t.url
		cfg.RequestLifetime = lifetime
		if alter != nil {
			alter(cfg)
		}
	})
	p.closers = append(p.closers, end)
	return c, t
}

// destination is a table as the client knows it, with an encoder for its own
// columns.
type destination struct {
	table   *feldera.Table
	rel     *decode.Relation
	encoder *feldera.Encoder
	writer  *feldera.Writer
}

func (p *probe) destination(c *feldera.Client, name string) destination {
	p.touch(name)
	s, err := c.Describe(p.ctx)
	p.noErr("Describe", err)
	t, err := s.Table(name)
	p.noErr("Table", err)
	rel := t.Relation()
	e, err := feldera.NewEncoder(t, rel, feldera.Policy{})
	p.noErr("NewEncoder", err)
	return destination{t, rel, e, c.Writer(t)}
}

// val makes a value.
func val(k decode.Kind, text string) decode.Value {
	return decode.Value{State: decode.Set, Kind: k, Bytes: []byte(text)}
}

func number(n int64) decode.Value             { return val(decode.Number, itoa(n)) }
func words(s string) decode.Value             { return val(decode.Text, s) }
func null() decode.Value                      { return decode.Value{State: decode.Null} }
func unchanged() decode.Value                 { return decode.Value{State: decode.Unchanged} }
func absent() decode.Value                    { return decode.Value{} }
func values(v ...decode.Value) []decode.Value { return v }

// full is a row of the tables with the columns id, note, n.
func full(id int64, note string, n int64) []decode.Value {
	return values(number(id), words(note), number(n))
}

// changes encodes changes of a destination into one array.
func (p *probe) changes(d destination, list ...decode.OrderChange) *feldera.Array {
	a := &feldera.Array{}
	for i := range list {
		list[i].Relation = d.rel
		p.noErr("Add", a.Add(d.encoder, &list[i]))
	}
	return a
}

func (p *probe) inserts(d destination, rows ...[]decode.Value) *feldera.Array {
	var list []decode.OrderChange
	for _, r := range rows {
		list = append(list, decode.OrderChange{Op: decode.Insert, After: r})
	}
	return p.changes(d, list...)
}

// deliver sends an array and waits until it is complete.
func (p *probe) deliver(d destination, a *feldera.Array) feldera.Token {
	tok, err := d.writer.Send(p.ctx, a)
	p.noErr("Send", err)
	p.complete(tok.Raw)
	return tok
}

// observer collects the evidence of one poller.
type observer struct {
	p  *probe
	cs *feldera.Completions
	ch chan feldera.Evidence
}

// observe runs a poller until the clause is over.
func (p *probe) observe(c *feldera.Client) *observer {
	o := &observer{p: p, cs: c.NewCompletions(feldera.CompletionsOptions{}), ch: make(chan feldera.Evidence, 64)}
	p.owned.Go(func() { _ = o.cs.Run(p.ctx) }) // it ends with the clause
	return o
}

func (o *observer) watch(tok feldera.Token) {
	o.cs.Watch(tok, func(ev feldera.Evidence) { o.ch <- ev })
}

// next waits for a piece of evidence.
func (o *observer) next() feldera.Evidence {
	select {
	case ev := <-o.ch:
		return ev
	case <-o.p.ctx.Done():
		o.p.failf("expected evidence, got %v", context.Cause(o.p.ctx))
		return feldera.Evidence{}
	}
}

// rung waits for evidence of a rung, which must be the next.
func (o *observer) rung(r ack.Rung) feldera.Evidence {
	ev := o.next()
	if ev.Err != nil || ev.Rung != r {
		o.p.failf("expected evidence of %v, got %v and error %v", r, ev.Rung, ev.Err)
	}
	return ev
}

// none demands that there is no evidence for a while.
func (o *observer) none(what string) {
	o.p.stays("there is no evidence "+what, func() bool { return len(o.ch) == 0 })
}

// outcome is what Send gave.
type outcome struct {
	tok feldera.Token
	err error
}

// sending runs Send in the background.
func (p *probe) sending(d destination, a *feldera.Array) <-chan outcome {
	out := make(chan outcome, 1)
	p.owned.Go(func() {
		tok, err := d.writer.Send(p.ctx, a)
		out <- outcome{tok, err}
	})
	return out
}

func (p *probe) sent(ch <-chan outcome) outcome {
	select {
	case o := <-ch:
		return o
	case <-p.ctx.Done():
		p.failf("expected that Send returns, got %v", context.Cause(p.ctx))
		return outcome{}
	}
}

// retries collects what a client reports of its attempts.
type retries struct {
	mu   sync.Mutex
	list []feldera.Retry
}

func (r *retries) add(x feldera.Retry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(r.list, x)
}

func (r *retries) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.list)
}

// last gives the text of the last report.
func (r *retries) last() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.list) == 0 {
		return ""
	}
	x := r.list[len(r.list)-1]
	return fmt.Sprintf("%s: %v", x.What, x.Err)
}

// refusedFor demands a refusal with a reason.
func (p *probe) refusedFor(what string, err error, reason decode.Reason) *decode.Refusal {
	var r *decode.Refusal
	if !errors.As(err, &r) {
		p.failf("expected a refusal from %s, got %v", what, err)
	}
	want(p, "the reason of the refusal from "+what, reason, r.Reason)
	return r
}

// mustRefuse is refusedFor for those who need no more than the reason.
func (p *probe) mustRefuse(what string, err error, reason decode.Reason) {
	_ = p.refusedFor(what, err, reason)
}
