package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-json-experiment/json"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// ledger records intents as a bookmark would.
type ledger struct{ list []feldera.Intent }

func (l *ledger) record(_ context.Context, in feldera.Intent) error {
	l.list = append(l.list, in)
	return nil
}

func (l *ledger) last() *feldera.Intent { return &l.list[len(l.list)-1] }

// within sends rows into a transaction.
func (p *probe) within(tx *feldera.Transaction, d destination, rows ...[]decode.Value) feldera.Token {
	tok, err := d.writer.Send(p.ctx, p.inserts(d, rows...))
	p.noErr("Send", err)
	tx.Sent(tok)
	return tok
}

// unit runs one transaction over two tables with a last write.
func (p *probe) unit(c *feldera.Client, l *ledger, note string) {
	kv, pair := p.destination(c, "hfc_kv"), p.destination(c, "hfc_pair")
	tx, err := c.Begin(p.ctx, nil, l.record)
	p.noErr("Begin", err)
	p.within(tx, kv, full(p.id(0), note, 1))
	var last feldera.Token
	err = tx.Commit(p.ctx, func(ctx context.Context) (feldera.Token, error) {
		var err error
		last, err = pair.writer.Send(ctx, p.inserts(pair, full(p.id(0), note, 2)))
		return last, err
	})
	p.noErr("Commit", err)
	p.complete(last.Raw)
	p.holds("hfc_kv", "0:"+note+"/1")
	p.holds("hfc_pair", "0:"+note+"/2")
	p.noTransaction()
}

// faulty makes a clause about a fault in one call of a transaction.
func faulty(id, says, endpoint string, kind felderasim.FaultKind) clause {
	return clause{
		id: id, section: "client", says: says, needs: needFaults,
		run: func(p *probe) {
			c := p.connect(func(cfg *feldera.Config) { cfg.RequestLifetime = 50 * time.Millisecond })
			p.inject(felderasim.Fault{Kind: kind, Endpoint: endpoint})
			p.unit(c, &ledger{}, "first")
			p.unit(c, &ledger{}, "second")
			if api := p.stats().Global.Initiators.API; api != nil {
				p.failf("expected that no transaction is left open, got %s", *api)
			}
		},
	}
}

// clientTransactionClauses hold the five-step protocol to contract §4.2.
func clientTransactionClauses() []clause {
	const section = "client"
	return []clause{
		{
			id: "K-TXN", section: section, says: "the five steps: rows of two tables and the last write become visible together", needs: needExclusive,
			run: func(p *probe) {
				c := p.connect(nil)
				kv, pair := p.destination(c, "hfc_kv"), p.destination(c, "hfc_pair")
				l := &ledger{}
				tx, err := c.Begin(p.ctx, nil, l.record)
				p.noErr("Begin", err)
				want(p, "Resumed", false, tx.Resumed())
				p.within(tx, kv, full(p.id(0), "a", 1))
				p.within(tx, kv, full(p.id(1), "b", 2))
				var last feldera.Token
				err = tx.Commit(p.ctx, func(ctx context.Context) (feldera.Token, error) {
					p.holds("hfc_kv", "")
					var err error
					last, err = pair.writer.Send(ctx, p.inserts(pair, full(p.id(0), "progress", 3)))
					return last, err
				})
				p.noErr("Commit", err)
				p.complete(last.Raw)
				p.holds("hfc_kv", "0:a/1 1:b/2")
				p.holds("hfc_pair", "0:progress/3")
			},
		},
		{
			id: "K-TXN-INTENT", section: section, says: "the intent is recorded before the start and with its id after it", needs: needExclusive,
			run: func(p *probe) {
				c := p.connect(nil)
				l := &ledger{}
				tx, err := c.Begin(p.ctx, nil, l.record)
				p.noErr("Begin", err)
				want(p, "records", 2, len(l.list))
				want(p, "the first record", feldera.Intent{Incarnation: p.incarnation()}, l.list[0])
				want(p, "the second record", tx.Intent(), l.list[1])
				want(p, "the id at the pipeline", p.stats().Global.TransactionID, tx.Intent().ID)
				p.noErr("Commit", tx.Commit(p.ctx, nil))
			},
		},
		{
			id: "K-TXN-WAITS", section: section, says: "the commit waits until every row is ingested", needs: needFaults,
			run: func(p *probe) {
				c := p.connect(nil)
				kv := p.destination(c, "hfc_kv")
				tx, err := c.Begin(p.ctx, nil, (&ledger{}).record)
				p.noErr("Begin", err)
				p.sim().HoldIngest("")
				tok := p.within(tx, kv, full(p.id(0), "a", 1))
				done := make(chan error, 1)
				p.owned.Go(func() { done <- tx.Commit(p.ctx, nil) })
				p.stays("the transaction is not committed", func() bool {
					api := p.stats().Global.Initiators.API
					return len(done) == 0 && api != nil && *api == "Started"
				})
				p.sim().ReleaseIngest("")
				select {
				case err := <-done:
					p.noErr("Commit", err)
				case <-p.ctx.Done():
					p.failf("expected that Commit returns, got %v", context.Cause(p.ctx))
				}
				p.complete(tok.Raw)
			},
		},
		{
			id: "K-TXN-WAITS-LAST", section: section, says: "the last write goes out when the rows are ingested, and is itself awaited", needs: needFaults,
			run: func(p *probe) {
				c := p.connect(nil)
				kv, pair := p.destination(c, "hfc_kv"), p.destination(c, "hfc_pair")
				tx, err := c.Begin(p.ctx, nil, (&ledger{}).record)
				p.noErr("Begin", err)
				tok := p.within(tx, kv, full(p.id(0), "a", 1))
				err = tx.Commit(p.ctx, func(ctx context.Context) (feldera.Token, error) {
					if p.status(tok.Raw).Step == nil {
						return feldera.Token{}, errors.New("the rows are not ingested")
					}
					return pair.writer.Send(ctx, p.inserts(pair, full(p.id(0), "last", 2)))
				})
				p.noErr("Commit", err)
				p.until("both are seen", func() bool { return p.rows("hfc_kv") == "0:a/1" && p.rows("hfc_pair") == "0:last/2" })
			},
		},
		{
			id: "K-TXN-EMPTY", section: section, says: "a transaction without rows ends and leaves nothing open", needs: needExclusive,
			run: func(p *probe) {
				tx, err := p.connect(nil).Begin(p.ctx, nil, (&ledger{}).record)
				p.noErr("Begin", err)
				p.noErr("Commit", tx.Commit(p.ctx, nil))
				if api := p.stats().Global.Initiators.API; api != nil {
					p.failf("expected no initiator, got %s", *api)
				}
			},
		},
		{
			id: "K-TXN-RESUMED", section: section, says: "an open transaction that matches the recorded intent is taken up: the unit is sent again into it and committed", needs: needExclusive,
			run: func(p *probe) {
				l := &ledger{}
				c := p.connect(nil)
				kv := p.destination(c, "hfc_kv")
				tx, err := c.Begin(p.ctx, nil, l.record)
				p.noErr("Begin", err)
				tok := p.within(tx, kv, full(p.id(0), "a", 1))
				p.ingested(tok.Raw)

				after := p.connect(nil) // the same daemon after a crash of its own
				kv = p.destination(after, "hfc_kv")
				again, err := after.Begin(p.ctx, l.last(), l.record)
				p.noErr("Begin after a crash", err)
				want(p, "Resumed", true, again.Resumed())
				tok = p.within(again, kv, full(p.id(0), "a", 1), full(p.id(1), "b", 2))
				p.noErr("Commit", again.Commit(p.ctx, nil))
				p.complete(tok.Raw)
				p.holds("hfc_kv", "0:a/1 1:b/2")
			},
		},
		{
			id: "K-TXN-FOREIGN", section: section, says: "any other open transaction is foreign: Begin waits, says so, and goes on when it has ended", needs: needExclusive,
			run: func(p *probe) {
				var r retries
				c := p.connect(func(cfg *feldera.Config) { cfg.OnRetry = r.add })
				p.begin()
				p.ingested(p.array("hfc_kv", p.kv(0, "foreign", 1)).token())
				type begun struct {
					tx  *feldera.Transaction
					err error
				}
				out := make(chan begun, 1)
				p.owned.Go(func() {
					tx, err := c.Begin(p.ctx, &feldera.Intent{Incarnation: "019a0000-0000-7000-8000-000000000001", ID: 1}, (&ledger{}).record)
					out <- begun{tx, err}
				})
				p.until("the wait is reported", func() bool { return strings.Contains(r.last(), "somebody else's transaction") })
				p.stays("Begin waits", func() bool { return len(out) == 0 })
				p.commit()
				select {
				case b := <-out:
					p.noErr("Begin", b.err)
					p.noErr("Commit", b.tx.Commit(p.ctx, nil))
				case <-p.ctx.Done():
					p.failf("expected that Begin returns, got %v", context.Cause(p.ctx))
				}
			},
		},
		{
			id: "K-TXN-TAKEN", section: section, says: "a transaction that somebody else commits before it is complete gives ErrTaken", needs: needFaults,
			run: func(p *probe) {
				c := p.connect(nil)
				kv := p.destination(c, "hfc_kv")
				tx, err := c.Begin(p.ctx, nil, (&ledger{}).record)
				p.noErr("Begin", err)
				p.ingested(p.within(tx, kv, full(p.id(0), "a", 1)).Raw)
				p.noErr("a stranger's commit", p.sim().CommitTransaction())
				p.noTransaction()
				err = tx.Commit(p.ctx, func(ctx context.Context) (feldera.Token, error) {
					return kv.writer.Send(ctx, p.inserts(kv, full(p.id(1), "b", 2)))
				})
				if !errors.Is(err, feldera.ErrTaken) {
					p.failf("expected ErrTaken, got %v", err)
				}
			},
		},
		{
			id: "K-TXN-ORPHAN", section: section, says: "CommitOrphan ends a transaction of ours without rows for it", needs: needExclusive,
			run: func(p *probe) {
				l := &ledger{}
				c := p.connect(nil)
				_, err := c.Begin(p.ctx, nil, l.record)
				p.noErr("Begin", err)
				p.noErr("CommitOrphan", c.CommitOrphan(p.ctx, *l.last()))
				if api := p.stats().Global.Initiators.API; api != nil {
					p.failf("expected no initiator, got %s", *api)
				}
			},
		},
		{
			id: "K-TXN-RESTART", section: section, says: "a restart inside a transaction is *IncarnationChanged, not a success", needs: needFaults,
			run: func(p *probe) {
				c := p.connect(nil)
				kv := p.destination(c, "hfc_kv")
				tx, err := c.Begin(p.ctx, nil, (&ledger{}).record)
				p.noErr("Begin", err)
				p.ingested(p.within(tx, kv, full(p.id(0), "a", 1)).Raw)
				p.sim().Crash(core.KeepNothing)
				mustBe[*feldera.IncarnationChanged](p, "Commit", tx.Commit(p.ctx, nil))
			},
		},
		{
			id: "K-TXN-RESTART-REPLAYED", section: section, says: "under exactly_once too: the replay has committed half of the unit, and the client does not call that a commit", needs: needFaults | needEnterprise, sim: withModel(core.ModelExactlyOnce),
			run: func(p *probe) {
				c := p.connect(nil)
				kv := p.destination(c, "hfc_kv")
				tx, err := c.Begin(p.ctx, nil, (&ledger{}).record)
				p.noErr("Begin", err)
				p.ingested(p.within(tx, kv, full(p.id(0), "a", 1)).Raw)
				p.sim().Crash(core.KeepByModel)
				p.holds("hfc_kv", "0:a/1")
				mustBe[*feldera.IncarnationChanged](p, "Commit", tx.Commit(p.ctx, nil))
			},
		},
		{
			id: "K-TXN-STATE", section: section, says: "TransactionState tells requested, open and none apart", needs: needExclusive,
			run: func(p *probe) {
				c := p.connect(nil)
				state := func() feldera.TransactionState {
					s, err := c.TransactionState(p.ctx)
					p.noErr("TransactionState", err)
					return s
				}
				s := state()
				want(p, "Open", false, s.Open())
				id := p.begin()
				s = state()
				want(p, "the id when requested", id, s.ID)
				want(p, "Status when requested", "NoTransaction", s.Status)
				want(p, "Open when requested", true, s.Open())
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.ingested(tok)
				s = state()
				want(p, "Status when open", "TransactionInProgress", s.Status)
				want(p, "Records", 1, s.Records)
				p.commit()
				p.complete(tok)
				s = state()
				want(p, "Open at the end", false, s.Open())
			},
		},
		faulty("K-TXN-START-TWICE", "a start that the manager sent twice is one transaction", "start_transaction", felderasim.AppliedTwice),
		faulty("K-TXN-START-LOST", "a start whose answer was lost is one transaction", "start_transaction", felderasim.DropResponse),
		faulty("K-TXN-START-503", "a start that got 503 before it was applied is one transaction", "start_transaction", felderasim.UnavailableBefore),
		faulty("K-TXN-COMMIT-TWICE", "a commit that the manager sent twice is a commit", "commit_transaction", felderasim.AppliedTwice),
		faulty("K-TXN-COMMIT-LOST", "a commit whose answer was lost is a commit", "commit_transaction", felderasim.DropResponse),
		faulty("K-TXN-COMMIT-503", "a commit that got 503 before it was applied is made again", "commit_transaction", felderasim.UnavailableBefore),
	}
}

// clientQueryClauses hold the client's queries to contract §1.6.
func clientQueryClauses() []clause {
	const section = "client"
	sel := func(p *probe) feldera.Query {
		return feldera.Query{Select: fmt.Sprintf("SELECT id, note FROM hfc_kv WHERE id >= %d AND id <= %d", p.id(0), p.id(9)), OrderBy: "id"}
	}
	return []clause{
		{
			id: "K-QUERY", section: section, says: "Query gives every row, in order",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(1, "b", 2), p.kv(0, "a", 1))
				var got []string
				err := p.connect(nil).Query(p.ctx, sel(p), func(row []byte) error {
					var r struct {
						ID   int64  `json:"id"`
						Note string `json:"note"`
					}
					err := json.Unmarshal(row, &r)
					got = append(got, fmt.Sprintf("%d:%s", r.ID-p.base, r.Note))
					return err
				})
				p.noErr("Query", err)
				want(p, "the rows", "0:a 1:b", strings.Join(got, " "))
			},
		},
		{
			id: "K-QUERY-NONE", section: section, says: "no row is a result too",
			run: func(p *probe) {
				p.noErr("Query", p.connect(nil).Query(p.ctx, sel(p), func(row []byte) error { return fmt.Errorf("a row %s", row) }))
			},
		},
		{
			id: "K-QUERY-COUNT", section: section, says: "Count counts, also by a text with a quote in it",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "it's", 1), p.kv(1, "its", 1))
				q := sel(p)
				q.Select += " AND note = " + feldera.QuoteText("it's")
				n, err := p.connect(nil).Count(p.ctx, q)
				p.noErr("Count", err)
				want(p, "the count", 1, n)
			},
		},
		{
			id: "K-QUERY-QUOTED", section: section, says: "quoted names reach quoted tables and columns",
			run: func(p *probe) {
				p.put(`"HfcQuoted"`, fmt.Sprintf(`{"insert":{"id":%d,"Must":"a"}}`, p.id(0)))
				n, err := p.connect(nil).Count(p.ctx, feldera.Query{Select: fmt.Sprintf("SELECT %s FROM %s WHERE id = %d", feldera.QuoteName("Must"), feldera.QuoteName("HfcQuoted"), p.id(0))})
				p.noErr("Count", err)
				want(p, "the count", 1, n)
			},
		},
		{
			id: "K-QUERY-ERROR-INSIDE", section: section, says: "an error inside a 200 is ErrIncomplete, after however many rows", needs: needFaults,
			run: func(p *probe) {
				c := p.connect(nil)
				p.put("hfc_kv", p.kv(0, "a", 1), p.kv(1, "b", 2), p.kv(2, "c", 3))
				for rows := range 4 {
					p.inject(felderasim.Fault{Kind: felderasim.QueryError, Endpoint: "query", Rows: rows})
					seen := 0
					err := c.Query(p.ctx, sel(p), func([]byte) error { seen++; return nil })
					if !errors.Is(err, feldera.ErrIncomplete) {
						p.failf("expected ErrIncomplete after %d rows, got %v with %d rows", rows, err, seen)
					}
					p.sim().ClearFault("")
				}
			},
		},
		{
			id: "K-QUERY-REFUSED", section: section, says: "a table that cannot be queried is a refusal",
			run: func(p *probe) {
				err := p.connect(nil).Query(p.ctx, feldera.Query{Select: "SELECT id FROM hfc_hidden"}, func([]byte) error { return nil })
				mustBe[*decode.Refusal](p, "Query", err)
			},
		},
	}
}

// clientDurableClauses hold the client's checkpoints to contract §6.3 and §6.4.
func clientDurableClauses() []clause {
	const section = "client"
	return []clause{
		{
			id: "K-DURABLE-OSS", section: section, says: "durable is refused at the start where checkpoints are impossible", needs: needOpenSource,
			run: func(p *probe) {
				err := p.connect(nil).NewDurability(feldera.DurabilityOptions{}).Check(p.ctx)
				p.mustRefuse("Check", err, decode.ReasonUnsupported)
			},
		},
		{
			id: "K-DURABLE", section: section, says: "rows become Durable and are there after a crash", needs: needEnterprise | needFaults, sim: withModel(core.ModelAtLeastOnce),
			run: func(p *probe) {
				ev, durable := p.durable()
				got := durable(ev)
				if got.Err != nil || got.Rung != ack.Durable {
					p.failf("expected Durable, got %v and error %v", got.Rung, got.Err)
				}
				p.sim().Crash(core.KeepCheckpoint)
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "K-DURABLE-COALESCED", section: section, says: "the success of a request that was credited with a running checkpoint is not Durable", needs: needEnterprise | needFaults, sim: byHand(core.ModelAtLeastOnce),
			run: func(p *probe) {
				c, t := p.listen(nil)
				kv := p.destination(c, "hfc_kv")
				want(p, "a periodic checkpoint starts", true, p.sim().PeriodicCheckpoint())
				tok, err := kv.writer.Send(p.ctx, p.inserts(kv, full(p.id(0), "a", 1)))
				p.noErr("Send", err)
				p.sim().Step(1)
				step := p.complete(tok.Raw)
				d := c.NewDurability(feldera.DurabilityOptions{MinInterval: time.Millisecond, Poll: 2 * time.Millisecond})
				p.owned.Go(func() { _ = d.Run(p.ctx) })
				ch := make(chan feldera.Evidence, 1)
				d.Watch(feldera.Evidence{Token: tok, Rung: ack.Completed, Step: step}, func(ev feldera.Evidence) { ch <- ev })
				requested := func(n int) bool { return len(t.requests("/checkpoint")) >= n }
				p.until("a checkpoint is asked for", func() bool { return requested(1) })
				// The running one, which does not hold the row, is finished:
				// the request is credited with it.
				p.sim().AdvanceCheckpoint()
				p.sim().AdvanceCheckpoint()
				p.until("a second one is asked for", func() bool { return requested(2) })
				p.stays("there is no evidence after the first success", func() bool { return len(ch) == 0 })
				for p.sim().AdvanceCheckpoint() {
					continue
				}
				select {
				case ev := <-ch:
					if ev.Err != nil || ev.Rung != ack.Durable {
						p.failf("expected Durable, got %v and error %v", ev.Rung, ev.Err)
					}
				case <-p.ctx.Done():
					p.failf("expected Durable, got %v", context.Cause(p.ctx))
				}
				p.sim().Crash(core.KeepCheckpoint)
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "K-DURABLE-RESTART", section: section, says: "a restart before the success is *IncarnationChanged", needs: needEnterprise | needFaults, sim: withModel(core.ModelAtLeastOnce),
			run: func(p *probe) {
				p.sim().HoldCheckpoint()
				ev, durable := p.durable()
				p.owned.Go(func() {
					// The crash comes when the request is there.
					if p.sim().WaitFor(p.ctx, func(v felderasim.View) bool { return v.Counters().FaultsInjected > 0 }) == nil {
						p.sim().Crash(core.KeepCheckpoint)
					}
				})
				p.inject(felderasim.Fault{Kind: felderasim.Delay, Endpoint: "checkpoint_status", Delay: time.Millisecond})
				mustBe[*feldera.IncarnationChanged](p, "the evidence", durable(ev).Err)
			},
		},
	}
}

// durable applies a row and gives its evidence and a way to watch it become
// durable.
func (p *probe) durable() (feldera.Evidence, func(feldera.Evidence) feldera.Evidence) {
	c := p.connect(nil)
	kv := p.destination(c, "hfc_kv")
	o := p.observe(c)
	d := c.NewDurability(feldera.DurabilityOptions{MinInterval: time.Millisecond, Poll: 2 * time.Millisecond})
	p.noErr("Check", d.Check(p.ctx))
	p.owned.Go(func() { _ = d.Run(p.ctx) })
	tok, err := kv.writer.Send(p.ctx, p.inserts(kv, full(p.id(0), "a", 1)))
	p.noErr("Send", err)
	o.watch(tok)
	o.rung(ack.Ingested)
	return o.rung(ack.Completed), func(ev feldera.Evidence) feldera.Evidence {
		d.Watch(ev, func(ev feldera.Evidence) { o.ch <- ev })
		return o.next()
	}
}
