package feldera

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// progressRig is a simulated pipeline with a progress table and the part of
// one source in it.
type progressRig struct {
	sim    *felderasim.Sim
	c      *Client
	orders *Table
	store  *ProgressStore
}

const progressSource = "7311/o'holdfast" // a name that has to be quoted

func newProgressRig(t *testing.T, opts felderasim.Options, cfg Config) *progressRig {
	t.Helper()
	def := ProgressTable(DefaultProgressTable)
	opts.SQL = simSQL + def.SQL()
	sim, c, s := simulated(t, opts, cfg)
	store, err := c.Progress(s, DefaultProgressTable, progressSource, "f")
	if err != nil {
		t.Fatal(err)
	}
	return &progressRig{sim, c, table(t, s, "orders"), store}
}

// read gives the lane's rows as "epoch.slot position incarnation".
func (r *progressRig) read(t *testing.T) (*ProgressFound, []string) {
	t.Helper()
	found, err := r.store.Read(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var rows []string
	for lane := range found.Lanes {
		for _, row := range found.Lanes[lane] {
			if row.RecordedAt.IsZero() || row.Fingerprint != "f" || row.Source != progressSource {
				t.Errorf("%+v", row)
			}
			rows = append(rows, fmt.Sprintf("%s%d.%d %d", lane, row.Epoch, row.Slot, row.Position))
		}
	}
	slices.Sort(rows)
	return found, rows
}

// own claims the lane after a decision.
func (r *progressRig) own(t *testing.T, noted Noted, want Progress) *ProgressLane {
	t.Helper()
	found, _ := r.read(t)
	d := Decide(found.Lanes[""], noted, found.Incarnation, "f")
	if d.Found != want {
		t.Fatalf("expected %v: %s", want, d.Reason(func(p uint64) string { return fmt.Sprint(p) }))
	}
	begin := noted.Produced
	if want == ProgressLost {
		begin = min(begin, d.Held)
	}
	l, err := r.store.Lane("", &d, begin)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.store.Claim(t.Context(), found.Incarnation, false, l); err != nil {
		t.Fatal(err)
	}
	return l
}

// send gives the evidence that an order is ingested.
func (r *progressRig) send(t *testing.T, id string) Evidence {
	t.Helper()
	tok, err := r.c.Writer(r.orders).Send(t.Context(), fill(t, r.orders, order(id)))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.c.awaitIngested(t.Context(), "test", []Token{tok}); err != nil {
		t.Fatal(err)
	}
	return Evidence{Token: tok, Rung: ack.Ingested, Step: 1}
}

// advance writes the row for a position.
func (r *progressRig) advance(t *testing.T, l *ProgressLane, position uint64, ev Evidence) Token {
	t.Helper()
	tok, err := r.store.Write(t.Context(), Advance{l, position, []Evidence{ev}})
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func TestProgressTableMissing(t *testing.T) {
	_, c, s := simulated(t, felderasim.Options{}, Config{})
	_, err := c.Progress(s, "my_progress", "a", "f")
	var refused *decode.Refusal
	if !errors.As(err, &refused) || refused.Reason != decode.ReasonSetup || !strings.Contains(refused.Do, "CREATE TABLE my_progress") ||
		!strings.Contains(refused.Do, "PRIMARY KEY (source, lane, epoch, slot)") {
		t.Errorf("%v", err)
	}
	// A table of this name with other columns is none.
	_, err = c.Progress(s, "orders", "a", "f")
	if !errors.As(err, &refused) || !strings.Contains(refused.Where, "orders") {
		t.Errorf("%v", err)
	}
}

// One owner writes its two rows in turn; the next one finds them, and replaces
// what no decision can rest on any more.
func TestProgressOwners(t *testing.T) {
	r := newProgressRig(t, felderasim.Options{}, Config{})
	first := r.own(t, Noted{}, ProgressFresh)
	for i := range 3 {
		r.advance(t, first, uint64(10*(i+1)), r.send(t, fmt.Sprint(i)))
	}
	if _, rows := r.read(t); cmp.Diff([]string{"1.0 20", "1.1 30"}, rows) != "" {
		t.Error(rows)
	}
	if first.Position() != 30 || first.Epoch() != 1 {
		t.Error(first)
	}
	inc := r.c.Expected()
	second := r.own(t, Noted{Known: true, Epoch: 1, Produced: 20, RowEpoch: 1, RowIncarnation: inc}, ProgressAhead)
	r.advance(t, second, 40, r.send(t, "4"))
	third := r.own(t, Noted{Known: true, Epoch: 2, Produced: 40, RowEpoch: 2, RowIncarnation: inc}, ProgressEqual)
	if _, rows := r.read(t); cmp.Diff([]string{"2.0 20", "2.1 40", "3.0 40"}, rows) != "" {
		t.Error(rows)
	}
	// A row of the first owner that comes now changes nothing.
	r.advance(t, first, 90, r.send(t, "5"))
	r.advance(t, third, 50, r.send(t, "6"))
	r.own(t, Noted{Known: true, Epoch: 3, Produced: 50, RowEpoch: 3, RowIncarnation: inc}, ProgressEqual)
}

// Several lanes share a request.
func TestProgressLanesTogether(t *testing.T) {
	r := newProgressRig(t, felderasim.Options{}, Config{})
	found, _ := r.read(t)
	var lanes []*ProgressLane
	for _, name := range []string{"orders[0]", "orders[1]"} {
		d := Decide(nil, Noted{}, found.Incarnation, "f")
		l, err := r.store.Lane(name, &d, 0)
		if err != nil {
			t.Fatal(err)
		}
		lanes = append(lanes, l)
	}
	before := len(r.sim.Requests())
	if _, err := r.store.Claim(t.Context(), found.Incarnation, false, lanes...); err != nil {
		t.Fatal(err)
	}
	ev := r.send(t, "1")
	if _, err := r.store.Write(t.Context(), Advance{lanes[0], 5, []Evidence{ev}}, Advance{lanes[1], 7, []Evidence{ev}}); err != nil {
		t.Fatal(err)
	}
	if n := len(r.sim.Requests()) - before; n != 3 {
		t.Errorf("%d requests, expected claim, row, progress rows", n)
	}
	if _, rows := r.read(t); cmp.Diff([]string{"orders[0]1.0 0", "orders[0]1.1 5", "orders[1]1.0 0", "orders[1]1.1 7"}, rows) != "" {
		t.Error(rows)
	}
}

// What a row may not be written for.
func TestProgressWriteRefuses(t *testing.T) {
	r := newProgressRig(t, felderasim.Options{}, Config{})
	l := r.own(t, Noted{}, ProgressFresh)
	ev := r.send(t, "1")
	accepted, other := ev, ev
	accepted.Rung = ack.Accepted
	other.Token.Incarnation = "another"
	gone := Evidence{Err: &IncarnationChanged{Was: "a", Now: "b"}}
	d := Decide(nil, Noted{}, r.c.Expected(), "f")
	unclaimed, err := r.store.Lane("x", &d, 0)
	if err != nil {
		t.Fatal(err)
	}
	for says, a := range map[string]Advance{
		"its rows are accepted, not ingested": {l, 10, []Evidence{ev, accepted}},
		"incarnation":                         {l, 10, []Evidence{ev, other}},
		"comes without evidence":              {l, 10, nil},
		"is not above 0":                      {l, 0, []Evidence{ev}},
		"not claimed":                         {unclaimed, 10, []Evidence{ev}},
		"b":                                   {l, 10, []Evidence{gone}},
	} {
		if _, err := r.store.Write(t.Context(), a); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("expected %q, got %v", says, err)
		}
	}
	if _, err := r.store.Write(t.Context(), Advance{l, 20, []Evidence{ev}}, Advance{l, 10, []Evidence{ev}}); err == nil || !strings.Contains(err.Error(), "given twice") {
		t.Errorf("one lane twice: %v", err)
	}
	if _, err := r.store.Claim(t.Context(), r.c.Expected(), false, l); err == nil {
		t.Error("claimed twice")
	}
	if _, rows := r.read(t); cmp.Diff([]string{"1.0 0"}, rows) != "" {
		t.Error(rows)
	}
}

// The newest row proves the one before it only because it is not sent before
// that one is ingested.
func TestProgressRowWaitsForTheOneBefore(t *testing.T) {
	asked := make(chan struct{}, 1)
	r := newProgressRig(t, felderasim.Options{}, Config{Observe: func(endpoint, _ string, _ time.Duration) {
		if endpoint == epCompletion {
			select {
			case asked <- struct{}{}:
			default:
			}
		}
	}})
	l := r.own(t, Noted{}, ProgressFresh)
	ev := r.send(t, "1")
	r.sim.HoldIngest(DefaultProgressTable)
	r.advance(t, l, 10, ev)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	sent := len(r.sim.Requests())
	wg.Go(func() {
		if _, err := r.store.Write(ctx, Advance{l, 20, []Evidence{ev}}); !errors.Is(err, context.Canceled) {
			t.Errorf("the second row did not wait: %v", err)
		}
	})
	for range 3 {
		<-asked
	}
	if n := len(r.sim.Requests()); n != sent {
		t.Errorf("%d requests went out meanwhile", n-sent)
	}
	cancel()
	wg.Wait()
	r.sim.ReleaseIngest(DefaultProgressTable)
	r.advance(t, l, 20, ev)
	if _, rows := r.read(t); cmp.Diff([]string{"1.0 20", "1.1 10"}, rows) != "" {
		t.Error(rows)
	}
}

// A pipeline that came back empty is found out, and one that was never used is
// not taken for it.
func TestProgressLoss(t *testing.T) {
	r := newProgressRig(t, felderasim.Options{}, Config{})
	l := r.own(t, Noted{}, ProgressFresh)
	r.advance(t, l, 10, r.send(t, "1"))
	was := r.c.Expected()
	r.sim.Crash(core.KeepNothing)

	// The daemon does not know yet, and has looked at all it looks at: the row
	// lands in the new incarnation.
	ev := Evidence{Token: Token{Incarnation: was}, Rung: ack.Ingested}
	l.newest = Token{}
	_, err := r.store.Write(t.Context(), Advance{l, 20, []Evidence{ev}})
	var changed *IncarnationChanged
	if !errors.As(err, &changed) || changed.Was != was {
		t.Fatalf("%v", err)
	}
	if _, err := r.store.Read(t.Context(), nil); !errors.As(err, &changed) {
		t.Errorf("%v", err)
	}
	r.c.Expect(r.sim.Incarnation())
	// Nothing of the old incarnation goes out any more.
	requests := len(r.sim.Requests())
	if _, err := r.store.Write(t.Context(), Advance{l, 30, []Evidence{ev}}); !errors.As(err, &changed) || len(r.sim.Requests()) != requests {
		t.Errorf("%v", err)
	}
	if _, rows := r.read(t); cmp.Diff([]string{"1.0 20"}, rows) != "" {
		t.Error(rows)
	}
	noted := Noted{Known: true, Epoch: 1, Produced: 10, RowEpoch: 1, RowIncarnation: was}
	r.own(t, noted, ProgressLost)
	// The claim has not hidden it.
	noted.Epoch = 2
	r.own(t, noted, ProgressLost)

	for _, d := range []Decision{{Found: ProgressForeign, Epoch: 3}, {Found: ProgressLost, Epoch: 3, Held: 9}} {
		if l, err := r.store.Lane("", &d, 10); err == nil {
			t.Errorf("%v: a hold that begins at %d", d.Found, l.Position())
		}
	}
}

// Inside a Feldera transaction the row is visible with the rows, and what is
// open is not read over.
func TestProgressInTransaction(t *testing.T) {
	told := make(chan string, 100)
	r := newProgressRig(t, felderasim.Options{}, Config{OnRetry: func(rt Retry) {
		select {
		case told <- rt.Err.Error():
		default:
		}
	}})
	l := r.own(t, Noted{}, ProgressFresh)
	var intent Intent
	tx, err := r.c.Begin(t.Context(), nil, func(_ context.Context, in Intent) error { intent = in; return nil })
	if err != nil {
		t.Fatal(err)
	}
	ev := r.send(t, "1")
	tx.Sent(ev.Token)

	// Our own open transaction does not hold up a read; it shows what was.
	found, err := r.store.Read(t.Context(), &intent)
	if err != nil || len(found.Lanes[""]) != 1 || found.Lanes[""][0].Position != 0 {
		t.Errorf("%+v, %v", found, err)
	}
	// Somebody else's is waited for.
	var wg sync.WaitGroup
	wg.Go(func() {
		found, err := r.store.Read(t.Context(), &Intent{Incarnation: intent.Incarnation, ID: 99})
		if err != nil || len(found.Lanes[""]) != 2 {
			t.Errorf("%+v, %v", found, err)
		}
	})
	if why := <-told; !strings.Contains(why, "somebody else's transaction") {
		t.Errorf("%s", why)
	}
	err = tx.Commit(t.Context(), func(ctx context.Context) (Token, error) {
		return r.store.Write(ctx, Advance{l, 10, []Evidence{ev}})
	})
	if err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if _, rows := r.read(t); cmp.Diff([]string{"1.0 0", "1.1 10"}, rows) != "" {
		t.Error(rows)
	}
}

// An error inside a 200, and an answer that is lost, are no table without rows.
func TestProgressReadThroughFaults(t *testing.T) {
	r := newProgressRig(t, felderasim.Options{}, Config{})
	l := r.own(t, Noted{}, ProgressFresh)
	r.advance(t, l, 10, r.send(t, "1"))
	for _, f := range []felderasim.Fault{
		{Kind: felderasim.QueryError, Endpoint: epQuery},
		{Kind: felderasim.QueryError, Endpoint: epQuery, Rows: 1},
		{Kind: felderasim.UnavailableBefore, Endpoint: epQuery},
		{Kind: felderasim.DropResponse, Endpoint: epQuery},
		{Kind: felderasim.DropResponse, Table: DefaultProgressTable},
		{Kind: felderasim.UnavailableBefore, Endpoint: epStats},
	} {
		id, err := r.sim.Inject(f)
		if err != nil {
			t.Fatal(err)
		}
		if _, rows := r.read(t); cmp.Diff([]string{"1.0 0", "1.1 10"}, rows) != "" {
			t.Errorf("%+v: %v", f, rows)
		}
		if r.sim.FaultHits(id) == 0 {
			t.Errorf("%+v did not strike", f)
		}
	}
}

// What no daemon writes is not decided on.
func TestProgressForeignRows(t *testing.T) {
	good := fmt.Sprintf(`{"source":%q,"lane":"","epoch":1,"slot":0,"position":1,"incarnation":"i","step":1,"fingerprint":"f","recorded_at":"2026-01-02 03:04:05"}`, progressSource)
	p := &ProgressStore{source: progressSource, writer: &Writer{table: &Table{Name: DefaultProgressTable}}}
	if row, err := p.parse([]byte(good)); err != nil || row.Position != 1 || row.RecordedAt.IsZero() {
		t.Fatalf("%+v, %v", row, err)
	}
	for _, swap := range [][2]string{
		{`"slot":0`, `"slot":2`},
		{`"slot":0`, `"slot":-1`},
		{`"epoch":1`, `"epoch":0`},
		{`"position":1`, `"position":-1`},
		{`"position":1,`, ``},
		{`"lane":""`, `"lane":null`},
		{`"incarnation":"i"`, `"incarnation":7`},
		{`"lane":""`, `"lane":"` + strings.Repeat("x", maxProgressName+1) + `"`},
		{progressSource, "another"},
		{`{`, `[`},
	} {
		row, err := p.parse([]byte(strings.Replace(good, swap[0], swap[1], 1)))
		var refused *decode.Refusal
		if !errors.As(err, &refused) || refused.Reason != decode.ReasonMalformed {
			t.Errorf("%q: %+v, %v", swap[1], row, err)
		}
	}
}

func TestFingerprint(t *testing.T) {
	a := Fingerprint("orders", "items")
	if a == Fingerprint("items", "orders") || a == Fingerprint("ordersitems") || a == Fingerprint("orders", "item", "s") || a != Fingerprint("orders", "items") {
		t.Error("parts are not told apart")
	}
}

func FuzzProgressRow(f *testing.F) {
	f.Add([]byte(`{"source":"s","lane":"","epoch":1,"slot":0,"position":1,"incarnation":"i","step":1,"fingerprint":"f","recorded_at":"2026-01-02 03:04:05"}`))
	f.Add([]byte(`{"source":"s"`))
	p := &ProgressStore{source: "s", writer: &Writer{table: &Table{Name: DefaultProgressTable}}}
	f.Fuzz(func(t *testing.T, line []byte) {
		row, err := p.parse(line)
		if err == nil && (row.Source != "s" || row.Epoch < 1 || row.Slot < 0 || row.Slot > 1 || len(row.Lane) > maxProgressName) {
			t.Errorf("%+v", row)
		}
	})
}
