package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// retry makes a clause about a fault that the client gets over by itself.
func retry(id, says string, f felderasim.Fault) clause {
	return clause{
		id: id, section: "client", says: says, needs: needFaults,
		run: func(p *probe) {
			c, t := p.listen(nil)
			d := p.destination(c, "hfc_kv")
			p.inject(f)
			_, err := d.writer.Send(p.ctx, p.inserts(d, full(p.id(0), "a", 1)))
			p.noErr("Send", err)
			want(p, "requests", 2, len(t.requests("/ingress/hfc_kv")))
			p.put("hfc_pair", p.kv(0, "x", 1))
			p.holds("hfc_kv", "0:a/1")
		},
	}
}

// uncertain makes a clause about a fault after which the client cannot know
// whether its rows were applied.
func uncertain(id, says string, f felderasim.Fault) clause {
	return clause{
		id: id, section: "client", says: says, needs: needFaults,
		run: func(p *probe) {
			c, t := p.listen(func(cfg *feldera.Config) { cfg.RequestTimeout = lifetime })
			d := p.destination(c, "hfc_kv")
			p.inject(f)
			first := p.sending(d, p.inserts(d, full(p.id(0), "first", 1), full(p.id(1), "b", 2)))
			p.until("the first request is on its way", func() bool { return p.sim().Counters().FaultsInjected > 0 })
			second := p.sending(d, p.inserts(d, full(p.id(0), "second", 3)))
			p.noErr("the first Send", p.sent(first).err)
			o := p.sent(second)
			p.noErr("the second Send", o.err)
			p.complete(o.tok.Raw)
			p.holds("hfc_kv", "0:second/3 1:b/2")
			p.settledOnce(t)
		},
	}
}

// settledOnce demands of what a tap has seen: the first body twice, the second
// time a lifetime after the first had ended and with /stats asked in between,
// and the second body only then.
func (p *probe) settledOnce(t *tap) {
	sent := t.requests("/ingress/hfc_kv")
	if len(sent) != 3 {
		p.failf("expected three requests, got %d", len(sent))
	}
	want(p, "the body of the repetition", sent[0].body, sent[1].body)
	if sent[2].body == sent[0].body {
		p.failf("expected the second Send's body in the third request, got the first's")
	}
	if gap := sent[1].began.Sub(sent[0].ended); gap < lifetime {
		p.failf("expected at least %s before the repetition, got %s", lifetime, gap)
	}
	asked := 0
	for _, s := range t.requests("/stats") {
		if s.began.After(sent[0].ended) && s.ended.Before(sent[1].began) && s.status == http.StatusOK {
			asked++
		}
	}
	if asked < 2 {
		p.failf("expected /stats before and after the wait, got it asked %d times", asked)
	}
}

// refusal is a fault that refuses the next n requests' rows and says which
// ones: texts are rows as the client writes them.
func refusal(n int, texts ...string) felderasim.Fault {
	rows := make([]string, len(texts))
	for i, text := range texts {
		rows[i] = fmt.Sprintf(`{"description":"d","event_number":1,"field":"n","invalid_text":%q,"tag":"text_event_err"}`, text)
	}
	f := felderasim.Fault{
		Kind: felderasim.Answer, Count: n, Status: http.StatusBadRequest,
		Code: "ParseErrors", Message: "Errors parsing input data:",
	}
	if len(texts) > 0 {
		f.Details = []byte(fmt.Sprintf(`{"num_errors":%d,"errors":[%s]}`, len(texts), strings.Join(rows, ",")))
	}
	return f
}

// kvText is a row of hfc_kv as the client writes it.
func (p *probe) kvText(n int, name string, v int64) string {
	return fmt.Sprintf(`{"id":%d,"note":%q,"n":%d}`, p.id(n), name, v)
}

// clientParams gives the parameters with which the client writes to a table,
// so that a clause can meet it at its endpoint.
func (p *probe) clientParams(d destination) string {
	p.deliver(d, &feldera.Array{})
	all := p.sim().Requests()
	return all[len(all)-1].Query
}

// clientSendClauses hold Writer and Completions to contract §1.4, §2.5, §5
// and §6.5.
func clientSendClauses() []clause {
	const section = "client"
	return []clause{
		{
			id: "K-SEND-TOKEN", section: section, says: "Send gives a token of the incarnation that /stats names, and it completes",
			run: func(p *probe) {
				c := p.connect(nil)
				tok := p.deliver(p.destination(c, "hfc_kv"), p.inserts(p.destination(c, "hfc_kv"), full(p.id(0), "a", 1)))
				want(p, "the token's incarnation", p.incarnation(), tok.Incarnation)
				want(p, "the expected incarnation", p.incarnation(), c.Expected())
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "K-SEND-EMPTY", section: section, says: "an empty array gives a token that completes",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				p.deliver(d, &feldera.Array{})
			},
		},
		{
			id: "K-SEND-ONE-STEP", section: section, says: "an array of many rows is one step", needs: needExclusive,
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				p.deliver(d, p.inserts(d, full(p.id(0), "a", 0)))
				before := p.stats().Global.Initiated
				var rows [][]decode.Value
				for n := range 3000 {
					rows = append(rows, full(p.id(n), "a", int64(n)))
				}
				p.deliver(d, p.inserts(d, rows...))
				want(p, "steps", before+1, p.stats().Global.Initiated)
			},
		},
		{
			id: "K-SEND-ONE-URL", section: section, says: "every array goes to one URL with array=true and without force, whatever the spelling that was asked for", needs: needFaults,
			run: func(p *probe) {
				c := p.connect(nil)
				for n, name := range []string{"hfc_kv", "HFC_KV", `"hfc_kv"`} {
					d := p.destination(c, name)
					p.deliver(d, p.inserts(d, full(p.id(n), "a", 1)))
				}
				seen := map[string]bool{}
				for _, r := range p.sim().Requests() {
					seen[r.Table+"?"+r.Query] = true
				}
				if len(seen) != 1 {
					p.failf("expected one URL, got %v", seen)
				}
				for u := range seen {
					if !strings.Contains(u, "array=true") || !strings.Contains(u, "format=json") || strings.Contains(u, "force") {
						p.failf("expected format=json and array=true without force, got %s", u)
					}
				}
			},
		},
		{
			id: "K-SEND-ONE-IN-FLIGHT", section: section, says: "many callers of one table have one request in flight", needs: needFaults,
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				var wg sync.WaitGroup
				errs := make([]error, 8)
				for n := range errs {
					a := p.inserts(d, full(p.id(n), "a", int64(n)))
					wg.Go(func() {
						for range 5 {
							if _, err := d.writer.Send(p.ctx, a); err != nil {
								errs[n] = err
							}
						}
					})
				}
				wg.Wait()
				p.noErr("Send", errors.Join(errs...))
				want(p, "requests at once", 1, p.sim().Counters().Concurrent)
			},
		},
		{
			id: "K-SEND-NOT-CUT", section: section, says: "a request that is under way is not cut when its caller gives up", needs: needFaults,
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				p.inject(felderasim.Fault{Kind: felderasim.Delay, Delay: 200 * time.Millisecond})
				ctx, cancel := context.WithCancel(p.ctx)
				out := make(chan outcome, 1)
				a := p.inserts(d, full(p.id(0), "a", 1))
				p.owned.Go(func() { tok, err := d.writer.Send(ctx, a); out <- outcome{tok, err} })
				p.until("the request is under way", func() bool { return p.sim().Counters().Requests == 1 })
				cancel()
				o := p.sent(out)
				p.noErr("Send", o.err)
				p.complete(o.tok.Raw)
				r := p.sim().Requests()[0]
				want(p, "the answer to the request", http.StatusOK, r.Status)
			},
		},
		{
			id: "K-SEND-REJECTED", section: section, says: "400 ParseErrors about a row of the request ends Send with a refusal, after one request", needs: needFaults,
			run: func(p *probe) {
				c, t := p.listen(nil)
				d := p.destination(c, "hfc_kv")
				p.inject(refusal(1, p.kvText(1, "b", 2)))
				_, err := d.writer.Send(p.ctx, p.inserts(d, full(p.id(0), "a", 1), full(p.id(1), "b", 2)))
				p.mustRefuse("Send", err, decode.ReasonRejected)
				want(p, "requests", 1, len(t.requests("/ingress/hfc_kv")))
			},
		},
		{
			id: "K-SEND-REJECTED-silent", section: section, says: "a refusal that does not say which rows is tried once more, also on a table that has taken a request before, and the second one is meant", needs: needFaults,
			run: func(p *probe) {
				c, t := p.listen(nil)
				d := p.destination(c, "hfc_kv")
				p.deliver(d, p.inserts(d, full(p.id(0), "a", 1)))
				p.inject(refusal(2))
				_, err := d.writer.Send(p.ctx, p.inserts(d, full(p.id(1), "b", 2)))
				p.mustRefuse("Send", err, decode.ReasonRejected)
				want(p, "requests", 3, len(t.requests("/ingress/hfc_kv")))
			},
		},
		{
			id: "K-SEND-REJECTED-other", section: section, says: "a refusal for text that the request does not have is no refusal of its rows", needs: needFaults,
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				for _, text := range []string{p.kvText(7, "ghost", 1), "7", "[", `[{"insert":{"id":9,"note":"abc[{`} {
					p.inject(refusal(3, text))
					toks, rejected, err := d.writer.SendSplit(p.ctx, p.inserts(d, full(p.id(0), "a", 7)))
					p.noErr("SendSplit", err)
					if len(rejected) != 0 || len(toks) != 1 {
						p.failf("expected the row applied, got %+v and %d tokens", rejected, len(toks))
					}
				}
			},
		},
		{
			id: "K-SEND-SPLIT", section: section, says: "SendSplit sets the refused change aside and applies the others, in order", needs: needFaults,
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				// Of four changes the whole, the first half and its first
				// change are refused.
				p.inject(refusal(3, p.kvText(0, "a", 1)))
				toks, rejected, err := d.writer.SendSplit(p.ctx, p.inserts(d, full(p.id(0), "a", 1), full(p.id(1), "b", 2), full(p.id(2), "c", 3), full(p.id(3), "d", 4)))
				p.noErr("SendSplit", err)
				if len(rejected) != 1 || rejected[0].Index != 0 || len(toks) != 2 {
					p.failf("expected the change 0 rejected and two requests applied, got %+v and %d", rejected, len(toks))
				}
				for _, tok := range toks {
					p.complete(tok.Raw)
				}
				p.holds("hfc_kv", "1:b/2 2:c/3 3:d/4")
			},
		},
		{
			id: "K-SEND-FRAGMENT", section: section, says: "a new writer gets past the fragment that another request left in its endpoint, and no row of it is taken", needs: needFaults,
			run: func(p *probe) {
				params := p.clientParams(p.destination(p.connect(nil), "hfc_cut"))
				d := p.destination(p.connect(nil), "hfc_cut")
				p.cut(params, "["+p.kv(7, "ghost", 1)+","+strings.Repeat(" ", 1<<18))
				p.deliver(d, p.inserts(d, full(p.id(0), "a", 1)))
				p.holds("hfc_cut", "0:a/1")
			},
		},
		{
			id: "K-UNCERTAIN-CUT", section: section, says: "a body that was cut on its way is settled like any uncertain outcome, and its own fragment is got past", needs: needFaults,
			run: func(p *probe) {
				c, t := p.listen(nil)
				d := p.destination(c, "hfc_cut")
				p.deliver(d, p.inserts(d, full(p.id(0), "old", 1)))
				p.inject(felderasim.Fault{Kind: felderasim.CutBody, Bytes: 20})
				p.deliver(d, p.inserts(d, full(p.id(0), "a", 1), full(p.id(1), "b", 2)))
				p.holds("hfc_cut", "0:a/1 1:b/2")
				var statuses []string
				sent := t.requests("/ingress/hfc_cut")
				for _, r := range sent {
					statuses = append(statuses, strconv.Itoa(r.status))
				}
				// Before this, the rows; the tap gives 0 for no answer.
				want(p, "the answers", "200 0 400 200", strings.Join(statuses, " "))
				if gap := sent[2].began.Sub(sent[1].ended); gap < lifetime {
					p.failf("expected at least %s before the repetition, got %s", lifetime, gap)
				}
			},
		},
		retry("K-RETRY-429", "429 is tried again", felderasim.Fault{Kind: felderasim.TooMany}),
		retry("K-RETRY-INITIALIZING", "503 Initializing is tried again at once: nothing was applied", felderasim.Fault{Kind: felderasim.Answer, Status: http.StatusServiceUnavailable, Code: "Initializing", Message: "x"}),
		retry("K-RETRY-NOT-DEPLOYED", "503 PipelineInteractionNotDeployed is tried again", felderasim.Fault{Kind: felderasim.Answer, Status: http.StatusServiceUnavailable, Code: "PipelineInteractionNotDeployed", Message: "x"}),
		retry("K-RETRY-401", "401 is tried again once with the key asked for anew", felderasim.Fault{Kind: felderasim.Unauthorized}),
		{
			id: "K-RETRY-KEY-ROTATED", section: section, says: "a key that was rotated is read anew after a 401", needs: needFaults | needAuth,
			run: func(p *probe) {
				var mu sync.Mutex
				key, asked := p.w.key, 0
				c := p.connect(func(cfg *feldera.Config) {
					cfg.APIKey = func() (string, error) { mu.Lock(); defer mu.Unlock(); asked++; return key, nil }
				})
				d := p.destination(c, "hfc_kv")
				mu.Lock()
				key = simKey("n")
				mu.Unlock()
				p.sim().SetAPIKey(simKey("n"))
				tok, err := d.writer.Send(p.ctx, p.inserts(d, full(p.id(0), "a", 1)))
				p.noErr("Send", err)
				want(p, "the token's incarnation", p.sim().Incarnation(), tok.Incarnation)
			},
		},
		{
			id: "K-STOP-403", section: section, says: "403 ends Send with a refusal", needs: needFaults,
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				p.inject(felderasim.Fault{Kind: felderasim.Forbidden})
				_, err := d.writer.Send(p.ctx, p.inserts(d, full(p.id(0), "a", 1)))
				want(p, "the class", feldera.ClassStopOperator, feldera.Classify(err))
			},
		},
		uncertain("K-UNCERTAIN-503", "after 503 Unreachable nothing later is sent, and the same bytes only after /stats and a lifetime", felderasim.Fault{Kind: felderasim.UnavailableAfter}),
		uncertain("K-UNCERTAIN-503-before", "the same when nothing had been applied: the client cannot know", felderasim.Fault{Kind: felderasim.UnavailableBefore}),
		uncertain("K-UNCERTAIN-LOST", "the same when the answer was lost", felderasim.Fault{Kind: felderasim.DropResponse}),
		uncertain("K-UNCERTAIN-TIMEOUT", "the same when the client's own time-out passed and the request is applied afterwards", felderasim.Fault{Kind: felderasim.Delay, Delay: lifetime + lifetime/2}),
		uncertain("K-UNCERTAIN-LATE", "the same when the abandoned request is applied within its lifetime", felderasim.Fault{Kind: felderasim.ApplyLate, Delay: lifetime / 2}),
		{
			id: "K-UNCERTAIN-PAUSED", section: section, says: "while the pipeline is paused the same bytes are not sent again", needs: needFaults,
			run: func(p *probe) {
				c, t := p.listen(nil)
				d := p.destination(c, "hfc_kv")
				p.inject(felderasim.Fault{Kind: felderasim.UnavailableAfter})
				p.inject(felderasim.Fault{Kind: felderasim.Hang, Endpoint: "stats", Skip: 1})
				first := p.sending(d, p.inserts(d, full(p.id(0), "a", 1)))
				p.until("the first request was answered", func() bool { return len(t.requests("/ingress/hfc_kv")) == 1 })
				p.sim().Pause()
				p.sim().ClearFault("")
				p.until("a lifetime has passed twice", func() bool {
					return time.Since(t.requests("/ingress/hfc_kv")[0].ended) > 2*lifetime
				})
				want(p, "requests", 1, len(t.requests("/ingress/hfc_kv")))
				p.sim().Resume()
				p.noErr("Send", p.sent(first).err)
				want(p, "requests", 2, len(t.requests("/ingress/hfc_kv")))
			},
		},
		{
			id: "K-UNCERTAIN-RESTART", section: section, says: "when the process has changed meanwhile the bytes are not sent again: *IncarnationChanged", needs: needFaults,
			run: func(p *probe) {
				c, t := p.listen(nil)
				d := p.destination(c, "hfc_kv")
				_, err := c.Incarnation(p.ctx)
				p.noErr("Incarnation", err)
				was := p.sim().Incarnation()
				p.inject(felderasim.Fault{Kind: felderasim.CrashAfter, Keep: core.KeepNothing})
				_, err = d.writer.Send(p.ctx, p.inserts(d, full(p.id(0), "a", 1)))
				changed := errAs[*feldera.IncarnationChanged](p, "Send", err)
				want(p, "Was", was, changed.Was)
				want(p, "requests", 1, len(t.requests("/ingress/hfc_kv")))
				p.holds("hfc_kv", "")
			},
		},
		{
			id: "K-UNCERTAIN-REASON", section: section, says: "a caller that gives up gets the reason of the last attempt with its own", needs: needFaults,
			run: func(p *probe) {
				c, _ := p.listen(nil)
				d := p.destination(c, "hfc_kv")
				p.inject(felderasim.Fault{Kind: felderasim.UnavailableBefore, Count: -1})
				ctx, cancel := context.WithTimeout(p.ctx, lifetime/2)
				defer cancel()
				_, err := d.writer.Send(ctx, p.inserts(d, full(p.id(0), "a", 1)))
				if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(fmt.Sprint(err), "PipelineInteractionUnreachable") {
					p.failf("expected the deadline joined with the 503, got %v", err)
				}
			},
		},
		{
			id: "K-INCARNATION-SEND", section: section, says: "a token of another incarnation is *IncarnationChanged with both, not a success; after Expect sending goes on", needs: needRestart | needManager,
			run: func(p *probe) {
				c := p.connect(nil)
				d := p.destination(c, "hfc_kv")
				p.deliver(d, p.inserts(d, full(p.id(0), "a", 1)))
				was := p.incarnation()
				p.restart()
				a := p.inserts(d, full(p.id(1), "b", 2))
				_, err := d.writer.Send(p.ctx, a)
				changed := errAs[*feldera.IncarnationChanged](p, "Send", err)
				want(p, "Was", was, changed.Was)
				want(p, "Now", p.incarnation(), changed.Now)
				c.Expect(p.incarnation())
				p.deliver(d, a)
			},
		},
		{
			id: "K-INCARNATION-WATCH", section: section, says: "a watched token of a process that is gone ends with *IncarnationChanged", needs: needFaults,
			run: func(p *probe) {
				c := p.connect(nil)
				d := p.destination(c, "hfc_kv")
				o := p.observe(c)
				p.sim().HoldCompletion()
				tok, err := d.writer.Send(p.ctx, p.inserts(d, full(p.id(0), "a", 1)))
				p.noErr("Send", err)
				o.watch(tok)
				o.rung(ack.Ingested)
				was := p.sim().Incarnation()
				p.sim().Crash(core.KeepNothing)
				changed := errAs[*feldera.IncarnationChanged](p, "the evidence", o.next().Err)
				want(p, "Was", was, changed.Was)
				want(p, "Now", p.sim().Incarnation(), changed.Now)
			},
		},
		{
			id: "K-EVIDENCE", section: section, says: "a token gives Ingested with its step, then Completed with the same, and no more",
			run: func(p *probe) {
				c := p.connect(nil)
				d := p.destination(c, "hfc_kv")
				o := p.observe(c)
				tok, err := d.writer.Send(p.ctx, p.inserts(d, full(p.id(0), "a", 1)))
				p.noErr("Send", err)
				o.watch(tok)
				step := o.rung(ack.Ingested).Step
				want(p, "the step of Completed", step, o.rung(ack.Completed).Step)
				want(p, "the step at the pipeline", step, p.complete(tok.Raw))
				o.none("after Completed")
				want(p, "tokens outstanding", 0, o.cs.Outstanding())
			},
		},
		{
			id: "K-EVIDENCE-QUEUED", section: section, says: "accepted is not ingested: no evidence while the rows are queued", needs: needFaults,
			run: func(p *probe) {
				c := p.connect(nil)
				d := p.destination(c, "hfc_kv")
				o := p.observe(c)
				p.sim().HoldIngest("")
				tok, err := d.writer.Send(p.ctx, p.inserts(d, full(p.id(0), "a", 1)))
				p.noErr("Send", err)
				o.watch(tok)
				o.none("while the rows are queued")
				p.sim().ReleaseIngest("")
				o.rung(ack.Ingested)
				o.rung(ack.Completed)
			},
		},
		{
			id: "K-EVIDENCE-INGESTED", section: section, says: "ingested is not completed: one piece of evidence while outputs are stuck", needs: needFaults,
			run: func(p *probe) {
				c := p.connect(nil)
				d := p.destination(c, "hfc_kv")
				o := p.observe(c)
				p.sim().HoldCompletion()
				tok, err := d.writer.Send(p.ctx, p.inserts(d, full(p.id(0), "a", 1)))
				p.noErr("Send", err)
				o.watch(tok)
				o.rung(ack.Ingested)
				o.none("of Completed while outputs are stuck")
				p.sim().ReleaseCompletion()
				o.rung(ack.Completed)
			},
		},
		{
			id: "K-EVIDENCE-TRANSIENT", section: section, says: "a 503 while asking is tried again and is no evidence", needs: needFaults,
			run: func(p *probe) {
				var r retries
				c := p.connect(func(cfg *feldera.Config) { cfg.OnRetry = r.add })
				d := p.destination(c, "hfc_kv")
				o := p.observe(c)
				p.inject(felderasim.Fault{Kind: felderasim.UnavailableBefore, Endpoint: "completion_status", Count: 3})
				tok, err := d.writer.Send(p.ctx, p.inserts(d, full(p.id(0), "a", 1)))
				p.noErr("Send", err)
				o.watch(tok)
				o.rung(ack.Ingested)
				o.rung(ack.Completed)
				if r.count() == 0 {
					p.failf("expected the failed attempts reported, got none")
				}
			},
		},
		{
			id: "K-EVIDENCE-IDLE", section: section, says: "with nothing outstanding nothing is asked", needs: needFaults,
			run: func(p *probe) {
				c := p.connect(nil)
				d := p.destination(c, "hfc_kv")
				o := p.observe(c)
				tok, err := d.writer.Send(p.ctx, p.inserts(d, full(p.id(0), "a", 1)))
				p.noErr("Send", err)
				o.watch(tok)
				o.rung(ack.Ingested)
				o.rung(ack.Completed)
				polls := p.sim().Counters().Polls
				p.stays("nothing is asked", func() bool { return p.sim().Counters().Polls == polls })
			},
		},
		{
			id: "K-STATS", section: section, says: "the client reads /stats as it is written", needs: needExclusive,
			run: func(p *probe) {
				c := p.connect(nil)
				d := p.destination(c, "hfc_kv")
				p.deliver(d, p.inserts(d, full(p.id(0), "a", 1)))
				got, err := c.Stats(p.ctx)
				p.noErr("Stats", err)
				g := p.stats().Global
				want(p, "State", g.State, got.State)
				want(p, "Incarnation", g.Incarnation, got.Incarnation)
				want(p, "StartTime", g.StartTime, got.StartTime)
				want(p, "InitialStartTime", g.InitialStartTime, got.InitialStartTime)
				want(p, "InitiatedSteps", g.Initiated, got.InitiatedSteps)
				want(p, "CompletedSteps", g.Completed, got.CompletedSteps)
				want(p, "the number of inputs", len(p.stats().Inputs), len(got.Inputs))
			},
		},
		{
			id: "K-STATS-STALLED", section: section, says: "the client says why nothing completes: an open transaction, a paused pipeline", needs: needExclusive,
			run: func(p *probe) {
				c := p.connect(nil)
				stalled := func() string {
					s, err := c.Stats(p.ctx)
					p.noErr("Stats", err)
					return s.Stalled()
				}
				want(p, "Stalled", "", stalled())
				p.begin()
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.ingested(tok)
				if s := stalled(); !strings.Contains(s, "transaction") {
					p.failf("expected the transaction named, got %q", s)
				}
				p.commit()
				p.complete(tok)
				p.pause()
				if s := stalled(); !strings.Contains(strings.ToLower(s), "paused") {
					p.failf("expected the pause named, got %q", s)
				}
			},
		},
	}
}
