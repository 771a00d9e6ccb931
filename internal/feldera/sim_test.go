package feldera

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

const simSQL = `
CREATE TABLE orders (
	id BIGINT NOT NULL PRIMARY KEY,
	note VARCHAR,
	qty INT NOT NULL
) WITH ('materialized' = 'true');
CREATE TABLE items (
	id BIGINT NOT NULL PRIMARY KEY,
	order_id BIGINT,
	price DECIMAL(12, 2),
	at TIMESTAMP,
	raw VARBINARY,
	doc VARIANT
) WITH ('materialized' = 'true');
CREATE TABLE "Events" (name VARCHAR NOT NULL, n INT) WITH ('materialized' = 'true');
`

// patience is the deadline of everything that a test waits for.
const patience = 20 * time.Second

func simulated(t *testing.T, opts felderasim.Options, cfg Config) (*felderasim.Sim, *Client, *Schema) {
	t.Helper()
	if opts.SQL == "" {
		opts.SQL = simSQL
	}
	sim, err := felderasim.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := sim.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Close(); err != nil {
			t.Error(err)
		}
	})
	cfg.URL, cfg.Pipeline = sim.URL(), "p"
	cfg.BackoffInitial, cfg.BackoffMax = time.Millisecond, 10*time.Millisecond
	if cfg.RequestLifetime == 0 {
		cfg.RequestLifetime = 50 * time.Millisecond
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdle)
	s, err := c.Describe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return sim, c, s
}

func table(t *testing.T, s *Schema, name string) *Table {
	t.Helper()
	tab, err := s.Table(name)
	if err != nil {
		t.Fatal(err)
	}
	return tab
}

// fill gives an array of inserts of whole rows.
func fill(t *testing.T, tab *Table, rows ...[]decode.Value) *Array {
	t.Helper()
	e, err := NewEncoder(tab, tab.Relation(), Policy{})
	if err != nil {
		t.Fatal(err)
	}
	a := &Array{}
	for _, row := range rows {
		if err := a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: e.rel, After: row}); err != nil {
			t.Fatal(err)
		}
	}
	return a
}

// insertOf is an insert of an order.
func insertOf(e *Encoder, id string) *decode.OrderChange {
	return &decode.OrderChange{Op: decode.Insert, Relation: e.rel, After: order(id)}
}

func order(id string) []decode.Value { return []decode.Value{num(id), txt("n" + id), num("1")} }

// background runs a poller until the test ends.
func background(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := run(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("poller ended with %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
}

func waitFor(t *testing.T, sim *felderasim.Sim, cond func(felderasim.View) bool) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return sim.WaitFor(ctx, cond)
}

// await waits for evidence of a rung.
func await(t *testing.T, ch <-chan Evidence, rung ack.Rung) Evidence {
	t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case ev := <-ch:
			if ev.Err != nil || ev.Rung == rung {
				return ev
			}
		case <-deadline:
			t.Fatalf("no evidence of %s", rung)
		}
	}
}

func TestSimulatedRoundTrip(t *testing.T) {
	sim, c, s := simulated(t, felderasim.Options{APIKey: "apikey:k"}, Config{APIKey: func() (string, error) { return "apikey:k", nil }})
	cs := c.NewCompletions(CompletionsOptions{})
	background(t, cs.Run)
	items := table(t, s, "ITEMS")
	tok, err := c.Writer(items).Send(t.Context(), fill(t, items,
		[]decode.Value{num("1"), num("7"), num("12.50"), txt("2024-01-02 03:04:05.123456+00"), set(decode.Hex, "dead"), set(decode.JSON, `{"a":[1,null]}`)},
		[]decode.Value{num("2"), null, null, null, null, null},
	))
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan Evidence, 2)
	cs.Watch(tok, func(ev Evidence) { got <- ev })
	if ev := await(t, got, ack.Ingested); ev.Err != nil || ev.Step == 0 {
		t.Errorf("%+v", ev)
	}
	if ev := await(t, got, ack.Completed); ev.Err != nil {
		t.Errorf("%+v", ev)
	}
	if n := sim.Count("items"); n != 2 {
		t.Errorf("%d rows", n)
	}
	var ids []string
	err = c.Query(t.Context(), Query{Select: "SELECT id, price FROM items", OrderBy: "id"}, func(row []byte) error {
		var r struct {
			ID int64 `json:"id"`
		}
		if err := json.Unmarshal(row, &r); err != nil {
			return fmt.Errorf("%s: %w", row, err)
		}
		ids = append(ids, fmt.Sprint(r.ID))
		return nil
	})
	if err != nil || !slices.Equal(ids, []string{"1", "2"}) {
		t.Errorf("%v, %v", ids, err)
	}
}

// A quoted table has its own spelling in the address.
func TestSimulatedQuotedTable(t *testing.T) {
	sim, c, s := simulated(t, felderasim.Options{}, Config{})
	events := table(t, s, `"Events"`)
	if _, err := c.Writer(events).Send(t.Context(), fill(t, events, []decode.Value{txt("a"), num("1")})); err != nil {
		t.Fatal(err)
	}
	if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Count(`"Events"`) == 1 }); err != nil {
		t.Error(err)
	}
}

// The destination's parser and the encoder must agree on what a row is: what
// the encoder lets through is not refused.
func TestSimulatedSplit(t *testing.T) {
	sim, c, s := simulated(t, felderasim.Options{}, Config{})
	orders := table(t, s, "orders")
	a := fill(t, orders, order("1"), order("2"), order("3"), order("4"))
	// The encoder would not write such a row: a table that was changed since.
	a.buf = []byte(strings.Replace(string(a.buf), `"id":3,`, `"id":x3,`, 1))
	for i := range a.ends {
		if i >= 2 {
			a.ends[i]++
		}
	}
	_, err := c.Writer(orders).Send(t.Context(), a)
	var refused *decode.Refusal
	if !errors.As(err, &refused) || refused.Reason != decode.ReasonRejected {
		t.Fatalf("got %v", err)
	}
	toks, rejected, err := c.Writer(orders).SendSplit(t.Context(), a)
	if err != nil || len(toks) == 0 || len(rejected) != 1 || rejected[0].Index != 2 {
		t.Fatalf("%v, %+v, %v", toks, rejected, err)
	}
	if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 3 }); err != nil {
		t.Error(err)
	}
}

// A request whose answer was lost is applied once, twice or late: in the end
// the table is the same.
func TestSimulatedUncertainOutcome(t *testing.T) {
	sim, c, s := simulated(t, felderasim.Options{}, Config{RequestTimeout: 300 * time.Millisecond})
	orders := table(t, s, "orders")
	if _, err := c.Incarnation(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := sim.Inject(felderasim.Fault{Kind: felderasim.DropResponse}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Writer(orders).Send(t.Context(), fill(t, orders, order("1"), order("2"))); err != nil {
		t.Fatal(err)
	}
	if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 2 && v.Counters().Requests == 2 }); err != nil {
		t.Error(err)
	}
}

func TestSimulatedCrash(t *testing.T) {
	sim, c, s := simulated(t, felderasim.Options{}, Config{})
	cs := c.NewCompletions(CompletionsOptions{})
	background(t, cs.Run)
	orders := table(t, s, "orders")
	sim.HoldCompletion()
	tok, err := c.Writer(orders).Send(t.Context(), fill(t, orders, order("1")))
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan Evidence, 2)
	cs.Watch(tok, func(ev Evidence) { got <- ev })
	await(t, got, ack.Ingested)
	was := sim.Incarnation()
	sim.Crash(core.KeepNothing)
	ev := await(t, got, ack.Completed)
	var changed *IncarnationChanged
	if !errors.As(ev.Err, &changed) || changed.Was != was || changed.Now != sim.Incarnation() {
		t.Errorf("%+v", ev)
	}
	_, err = c.Writer(orders).Send(t.Context(), fill(t, orders, order("2")))
	if !errors.As(err, &changed) {
		t.Errorf("got %v", err)
	}
	c.Expect(sim.Incarnation())
	if _, err = c.Writer(orders).Send(t.Context(), fill(t, orders, order("2"))); err != nil {
		t.Error(err)
	}
}

// Two tables change in one transaction, and nobody sees one without the other.
func TestSimulatedTransaction(t *testing.T) {
	sim, c, s := simulated(t, felderasim.Options{}, Config{})
	cs := c.NewCompletions(CompletionsOptions{})
	background(t, cs.Run)
	orders, items := table(t, s, "orders"), table(t, s, "items")
	var intents []Intent
	record := func(_ context.Context, in Intent) error { intents = append(intents, in); return nil }
	tx, err := c.Begin(t.Context(), nil, record)
	if err != nil {
		t.Fatal(err)
	}
	want := []Intent{{sim.Incarnation(), 0}, {sim.Incarnation(), 1}}
	if diff := cmp.Diff(want, intents); diff != "" || tx.Resumed() {
		t.Error(diff, tx.Resumed())
	}
	for _, a := range []*Array{fill(t, orders, order("1")), fill(t, orders, order("2"))} {
		tok, err := c.Writer(orders).Send(t.Context(), a)
		if err != nil {
			t.Fatal(err)
		}
		tx.Sent(tok)
	}
	var last Token
	err = tx.Commit(t.Context(), func(ctx context.Context) (Token, error) {
		if n, err := c.Count(ctx, Query{Select: "SELECT id FROM orders"}); n != 0 || err != nil {
			t.Errorf("%d rows are visible before the commit (%v)", n, err)
		}
		st, err := c.TransactionState(ctx)
		if err != nil || st.ID != 1 || !st.Open() || !strings.Contains(st.String(), "transaction 1 open") {
			t.Errorf("%s, %v", st.String(), err)
		}
		last, err = c.Writer(items).Send(ctx, fill(t, items, []decode.Value{num("1"), null, null, null, null, null}))
		return last, err
	})
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan Evidence, 2)
	cs.Watch(last, func(ev Evidence) { got <- ev })
	await(t, got, ack.Completed)
	if sim.Count("orders") != 2 || sim.Count("items") != 1 {
		t.Errorf("%d orders, %d items", sim.Count("orders"), sim.Count("items"))
	}
	if st, err := c.TransactionState(t.Context()); err != nil || st.Open() {
		t.Errorf("%s, %v", st.String(), err)
	}
}

// The manager sends a request twice, or an answer gets lost: both times the
// transaction is begun and ended once, and no orphan stays.
func TestSimulatedTransactionThroughFaults(t *testing.T) {
	for _, endpoint := range []string{epStart, epCommit} {
		for _, kind := range []felderasim.FaultKind{
			felderasim.AppliedTwice, felderasim.DropResponse, felderasim.UnavailableAfter, felderasim.DropRequest, felderasim.UnavailableBefore,
		} {
			t.Run(endpoint+" "+string(kind), func(t *testing.T) {
				sim, c, s := simulated(t, felderasim.Options{}, Config{})
				orders := table(t, s, "orders")
				if _, err := sim.Inject(felderasim.Fault{Kind: kind, Endpoint: endpoint}); err != nil {
					t.Fatal(err)
				}
				for id := range 2 {
					tx, err := c.Begin(t.Context(), nil, func(context.Context, Intent) error { return nil })
					if err != nil {
						t.Fatal(err)
					}
					tok, err := c.Writer(orders).Send(t.Context(), fill(t, orders, order(fmt.Sprint(id))))
					if err != nil {
						t.Fatal(err)
					}
					tx.Sent(tok)
					if err := tx.Commit(t.Context(), nil); err != nil {
						t.Fatal(err)
					}
				}
				if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 2 }); err != nil {
					t.Error(err)
				}
				st, err := c.TransactionState(t.Context())
				if err != nil || st.API == apiStarted {
					t.Errorf("%s, %v", st.String(), err)
				}
			})
		}
	}
}

// An error inside a 200 never passes for a result.
func TestSimulatedQueryErrors(t *testing.T) {
	sim, c, s := simulated(t, felderasim.Options{}, Config{})
	orders := table(t, s, "orders")
	if _, err := c.Writer(orders).Send(t.Context(), fill(t, orders, order("1"), order("2"), order("3"))); err != nil {
		t.Fatal(err)
	}
	if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 3 }); err != nil {
		t.Fatal(err)
	}
	for rows := range 4 {
		if _, err := sim.Inject(felderasim.Fault{Kind: felderasim.QueryError, Endpoint: epQuery, Rows: rows}); err != nil {
			t.Fatal(err)
		}
		seen := 0
		err := c.Query(t.Context(), Query{Select: "SELECT id FROM orders"}, func([]byte) error { seen++; return nil })
		if !errors.Is(err, ErrIncomplete) || seen > rows {
			t.Errorf("after %d of 3 rows: %d seen, %v", rows, seen, err)
		}
		sim.ClearFault("")
	}
	err := c.Query(t.Context(), Query{Select: "SELECT id FROM nowhere"}, nil)
	var refused *decode.Refusal
	if !errors.As(err, &refused) || !strings.Contains(refused.Do, "materialized") {
		t.Errorf("got %v", err)
	}
	if n, err := c.Count(t.Context(), Query{Select: "SELECT id FROM orders WHERE note = " + QuoteText("n2")}); n != 1 || err != nil {
		t.Error(n, err)
	}
	err = c.Query(t.Context(), Query{Select: "SELECT id FROM orders WHERE id > 99"}, func([]byte) error { t.Error("a row"); return nil })
	if err != nil {
		t.Error(err)
	}
}

// After a crash of ours, the open transaction that our intent names is taken
// up; somebody else's is waited for.
func TestSimulatedOpenTransactions(t *testing.T) {
	told := func(Retry) {}
	sim, c, s := simulated(t, felderasim.Options{}, Config{OnRetry: func(r Retry) { told(r) }})
	orders := table(t, s, "orders")
	var intent Intent
	record := func(_ context.Context, in Intent) error { intent = in; return nil }
	tx, err := c.Begin(t.Context(), nil, record)
	if err != nil {
		t.Fatal(err)
	}
	tok, err := c.Writer(orders).Send(t.Context(), fill(t, orders, order("1")))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.awaitIngested(t.Context(), "test", []Token{tok}); err != nil {
		t.Fatal(err)
	}

	again, err := c.Begin(t.Context(), &intent, record)
	if err != nil || !again.Resumed() || again.Intent() != tx.Intent() {
		t.Fatalf("%+v, %v", again, err)
	}
	// Neither another transaction's intent matches it, nor one that was about
	// to ask: that would match only what has no data yet.
	for _, own := range []Intent{{Incarnation: intent.Incarnation, ID: 99}, {Incarnation: intent.Incarnation}} {
		ctx, cancel := context.WithCancel(t.Context())
		told = func(Retry) { cancel() }
		_, err = c.Begin(ctx, &own, record)
		if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "somebody else's transaction 1 open") {
			t.Errorf("got %v", err)
		}
	}
	told = func(Retry) {}
	// Somebody else commits under us, before we are complete.
	if err := sim.CommitTransaction(); err != nil {
		t.Fatal(err)
	}
	if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 1 }); err != nil {
		t.Fatal(err)
	}
	again.Sent(tok)
	if err := again.Commit(t.Context(), nil); !errors.Is(err, ErrTaken) {
		t.Errorf("got %v", err)
	}
}

func TestSimulatedOrphan(t *testing.T) {
	sim, c, _ := simulated(t, felderasim.Options{}, Config{})
	id, err := sim.StartTransaction()
	if err != nil {
		t.Fatal(err)
	}
	own := Intent{Incarnation: sim.Incarnation(), ID: int64(id)}
	var refused *decode.Refusal
	if err := c.CommitOrphan(t.Context(), Intent{Incarnation: own.Incarnation, ID: own.ID + 1}); !errors.As(err, &refused) {
		t.Errorf("got %v", err)
	}
	if err := c.CommitOrphan(t.Context(), own); err != nil {
		t.Error(err)
	}
}

// A checkpoint that began before the rows came is still being written: the
// first request is credited with it, and proves nothing.
func TestSimulatedDurability(t *testing.T) {
	asked := make(chan struct{}, 100)
	cfg := Config{Observe: func(endpoint, outcome string, _ time.Duration) {
		if endpoint == epCheckpoint && outcome == "ok" {
			asked <- struct{}{}
		}
	}}
	sim, c, s := simulated(t, felderasim.Options{Edition: felderasim.Enterprise, Model: core.ModelAtLeastOnce, Manual: true}, cfg)
	d := c.NewDurability(DurabilityOptions{MinInterval: time.Millisecond, Poll: time.Millisecond})
	if err := d.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Incarnation(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.request(t.Context(), c.Expected()); err != nil {
		t.Fatal(err)
	}
	<-asked
	if !sim.AdvanceCheckpoint() {
		t.Fatal("no checkpoint began")
	}
	orders := table(t, s, "orders")
	tok, err := c.Writer(orders).Send(t.Context(), fill(t, orders, order("1")))
	if err != nil {
		t.Fatal(err)
	}
	sim.Step(10)
	got := make(chan Evidence, 1)
	d.Watch(Evidence{Token: tok, Rung: ack.Completed, Step: 1}, func(ev Evidence) { got <- ev })
	background(t, d.Run)
	<-asked
	for sim.AdvanceCheckpoint() { // ends the old one, for both requests
	}
	select {
	case <-asked: // the second of the pair: the first had its success, and was not believed
	case ev := <-got:
		t.Fatalf("one success counted as proof: %+v", ev)
	}
	for sim.AdvanceCheckpoint() {
	}
	if ev := await(t, got, ack.Durable); ev.Err != nil {
		t.Fatal(ev.Err)
	}
	sim.Crash(core.KeepByModel)
	if n := sim.Count("orders"); n != 1 {
		t.Errorf("%d rows after a crash, although durable", n)
	}
	d.Watch(Evidence{Token: tok, Rung: ack.Completed, Step: 1}, func(ev Evidence) { got <- ev })
	var changed *IncarnationChanged
	if ev := await(t, got, ack.Durable); !errors.As(ev.Err, &changed) {
		t.Errorf("%+v", ev)
	}
}

func TestSimulatedNoCheckpoints(t *testing.T) {
	_, c, _ := simulated(t, felderasim.Options{}, Config{})
	err := c.NewDurability(DurabilityOptions{}).Check(t.Context())
	var refused *decode.Refusal
	if !errors.As(err, &refused) || refused.Reason != decode.ReasonUnsupported || !strings.Contains(refused.Why, "EnterpriseFeature") {
		t.Errorf("got %v", err)
	}
}

// What the encoder lets through, the engine's parser takes: each refusal is
// found here first, by name, and not in a request that takes good rows with it.
func TestSimulatedParserAgrees(t *testing.T) {
	sql := `CREATE TABLE v (
		id BIGINT NOT NULL PRIMARY KEY, b BOOLEAN, t TINYINT, s SMALLINT, i INT, l BIGINT, r REAL, d DOUBLE,
		n DECIMAL(8, 3), c VARCHAR, x VARBINARY, da DATE, ti TIME, ts TIMESTAMP, u UUID, j VARIANT, a INT ARRAY
	) WITH ('materialized' = 'true');`
	sim, err := felderasim.New(felderasim.Options{SQL: sql})
	if err != nil {
		t.Fatal(err)
	}
	if err := sim.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Close(); err != nil {
			t.Error(err)
		}
	})
	c, err := New(Config{URL: sim.URL(), Pipeline: "p"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdle)
	s, err := c.Describe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	tab := table(t, s, "v")
	e, err := NewEncoder(tab, tab.Relation(), Policy{})
	if err != nil {
		t.Fatal(err)
	}
	samples := rapid.OneOf(
		rapid.StringMatching(`-?[0-9]{1,4}(\.[0-9]{1,4})?([eE][+-]?[0-9]{1,3})?`),
		rapid.StringMatching(`-?(128|127|32767|32768|2147483647|2147483648|9223372036854775807|9223372036854775808)`),
		rapid.StringMatching(`[0-9]{4}-[01][0-9]-[0-3][0-9]([ T][0-2][0-9]:[0-5][0-9](:[0-5][0-9](\.[0-9]{1,7})?)?(Z|[+-][01][0-9](:?[0-5][0-9])?)?)?`),
		rapid.StringMatching(`[0-2][0-9]:[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?`),
		rapid.StringMatching(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`),
		rapid.StringMatching(`\{([0-9]{1,3}|NULL)(,([0-9]{1,3}|NULL)){0,3}\}|\[[0-9](,[0-9]|,null){0,3}\]`),
		rapid.StringMatching(`\{"[a-z]{1,3}": ?(1|true|null|"x"|\[1\.50\])\}`),
		rapid.SampledFrom([]string{"true", "false", "null", "NaN", "Infinity", "infinity", "dead", "0001-01-01", "9999-12-31 23:59:59.999999", "24:00:00", ""}),
		rapid.String(),
	)
	next := 0
	sent := make(map[string]int)
	rapid.Check(t, func(rt *rapid.T) {
		row := make([]decode.Value, len(tab.Columns))
		for i := range row {
			row[i] = null
		}
		next++
		row[0] = num(fmt.Sprint(next))
		at := rapid.IntRange(1, len(row)-1).Draw(rt, "column")
		row[at] = set(rapid.SampledFrom([]decode.Kind{decode.Text, decode.Bool, decode.Number, decode.Hex, decode.JSON}).Draw(rt, "kind"), samples.Draw(rt, "value"))
		var a Array
		if a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: e.rel, After: row}) != nil {
			return
		}
		if _, err := c.Writer(tab).Send(t.Context(), &a); err != nil {
			rt.Fatalf("%s %q, written as %s: %v", tab.Columns[at].Name, row[at].Bytes, a.Body(), err)
		}
		sent[tab.Columns[at].Name]++
	})
	t.Log("rows sent by column:", sent)
}

// The rest of a body that was cut stays in the endpoint and spoils the next
// request, which is refused although its rows are good. That refusal is not
// believed, whoever the rest is of: an attempt of our own, a process before us
// that died in the middle of a body, or a client that lives and still sends.
func TestSimulatedCutBodyIsNoBadRow(t *testing.T) {
	t.Parallel()
	sim, c, s := simulated(t, felderasim.Options{}, Config{})
	tab := table(t, s, "orders")
	if _, err := sim.Inject(felderasim.Fault{Kind: felderasim.CutBody, Bytes: 20}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Writer(tab).Send(t.Context(), fill(t, tab, order("1"), order("2"))); err != nil {
		t.Fatalf("after an attempt that was cut: %v", err)
	}
	if _, err := sim.Inject(felderasim.Fault{Kind: felderasim.CutBody, Bytes: 20, Count: -1}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := c.Writer(tab).Send(ctx, fill(t, tab, order("3"))); err == nil {
		t.Fatal("sent through a fault that cuts everything")
	}
	sim.ClearFault("")
	successor, err := New(Config{URL: sim.URL(), Pipeline: "p", RequestLifetime: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(successor.CloseIdle)
	if _, err := successor.Writer(tab).Send(t.Context(), fill(t, tab, order("3"))); err != nil {
		t.Fatalf("as the successor of a process that was cut: %v", err)
	}
	// The successor has just been answered 200: it has no reason to doubt the
	// endpoint.
	for i, begun := range []string{
		`[{"insert":{"id":9,"note":"abc`, `[{"insert":{"id":9,"note":`, `[`, `{"insert":{"id":9`, `{`, `7`, `"`, `\`, `]`, `[{"insert":{"id":4,"note":"n4","qty":1}},`,
	} {
		release := halfSent(t, sim, tab, begun)
		if _, err := successor.Writer(tab).Send(t.Context(), fill(t, tab, order("4"))); err != nil {
			t.Errorf("beside a living client that has sent %s: Send: %v", begun, err)
		}
		release()
		release = halfSent(t, sim, tab, begun)
		_, rejected, err := successor.Writer(tab).SendSplit(t.Context(), fill(t, tab, order(fmt.Sprint(10+i)), order("5")))
		if err != nil || len(rejected) > 0 {
			t.Errorf("beside a living client that has sent %s: SendSplit set aside %+v (%v)", begun, rejected, err)
		}
		release()
	}
	if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 15 }); err != nil {
		t.Error(err)
	}
	if rows := fmt.Sprint(sim.Rows("orders")); strings.Contains(rows, "abc") {
		t.Errorf("the other client's fragment is in %s", rows)
	}
}

// halfSent is another client of the table's endpoint, which has sent the
// beginning of a body and keeps its connection; release cuts it. It returns
// when the endpoint has the bytes.
func halfSent(t *testing.T, sim *felderasim.Sim, tab *Table, begun string) (release func()) {
	t.Helper()
	var d net.Dialer
	conn, err := d.DialContext(t.Context(), "tcp", strings.TrimPrefix(sim.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	had := sim.Counters().Bytes
	_, err = fmt.Fprintf(conn, "POST /v0/pipelines/p%s HTTP/1.1\r\nHost: sim\r\nContent-Length: 4096\r\n\r\n%s", tab.ingressPath(), begun)
	if err != nil {
		t.Fatal(err)
	}
	if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Counters().Bytes > had }); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
}
