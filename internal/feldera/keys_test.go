package feldera

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// A table is emptied page by page, over answers that break off, and rows of
// other tables stay.
func TestSimulatedEmptier(t *testing.T) {
	t.Parallel()
	sim, c, s := simulated(t, felderasim.Options{}, Config{})
	orders, items := table(t, s, "orders"), table(t, s, "items")
	var fifty [][]decode.Value
	for i := range 50 {
		fifty = append(fifty, order(strconv.Itoa(i)))
	}
	if _, err := c.Writer(orders).Send(t.Context(), fill(t, orders, fifty...)); err != nil {
		t.Fatal(err)
	}
	null := decode.Value{State: decode.Null}
	if _, err := c.Writer(items).Send(t.Context(), fill(t, items, []decode.Value{num("1"), null, null, null, null, null})); err != nil {
		t.Fatal(err)
	}
	for _, rows := range []int{0, 3} {
		if _, err := sim.Inject(felderasim.Fault{Kind: felderasim.QueryError, Endpoint: epQuery, Rows: rows}); err != nil {
			t.Fatal(err)
		}
	}
	m, err := c.NewEmptier(orders)
	if err != nil {
		t.Fatal(err)
	}
	var page Array
	for left := 50; ; {
		if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Count("orders") == int64(left) }); err != nil {
			t.Fatal(err)
		}
		n, err := m.Page(t.Context(), 20, &page)
		if err != nil {
			t.Fatal(err)
		}
		if n != min(left, 20) || page.Rows() != n || strings.Contains(string(page.Body()), "insert") {
			t.Fatalf("%d rows left, a page of %d: %s", left, n, page.Body())
		}
		if _, err := c.Writer(orders).Send(t.Context(), &page); err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			break
		}
		left -= n
	}
	if n := sim.Count("items"); n != 1 {
		t.Errorf("the other table has %d rows", n)
	}

	// Another incarnation has an empty table, which is no proof.
	sim.Crash(core.KeepNothing)
	var changed *IncarnationChanged
	if _, err := m.Page(t.Context(), 20, &page); !errors.As(err, &changed) {
		t.Errorf("after another incarnation: %v", err)
	}
	keyless := table(t, s, `"Events"`)
	var refused *decode.Refusal
	if _, err := c.NewEmptier(keyless); !errors.As(err, &refused) || !strings.Contains(refused.Why, "PRIMARY KEY") {
		t.Errorf("a table without a key: %v", err)
	}
}

// An answer that is too large is asked for in smaller pages.
func TestEmptierHalvesItsPages(t *testing.T) {
	t.Parallel()
	tab := ordersTable(true)
	row := `{"holdfast_rows":1,"id":7,"x":"` + strings.Repeat("x", 17<<20) + "\"}\n"
	var asked []string
	cl, _ := newScripted(t, Config{}, func(_ int, q seen) answer {
		if !strings.HasSuffix(q.path, "/query") {
			return statsOf("u1", stateRunning)
		}
		asked = append(asked, q.query)
		if len(asked) < 3 {
			return answer{status: http.StatusOK, body: row}
		}
		return answer{status: http.StatusOK, body: `{"holdfast_rows":1,"id":7}`}
	})
	m, err := cl.NewEmptier(tab)
	if err != nil {
		t.Fatal(err)
	}
	var page Array
	n, err := m.Page(t.Context(), 8, &page)
	if err != nil || n != 1 || string(page.Body()) != `[{"delete":{"id":7}}]` {
		t.Fatalf("%d rows, %v: %s", n, err, page.Body())
	}
	for i, limit := range []string{"LIMIT+8", "LIMIT+4", "LIMIT+2"} {
		if !strings.Contains(asked[i], limit) {
			t.Errorf("question %d is %s, want %s", i, asked[i], limit)
		}
	}
}

// All of a table within a transaction of the pipeline: nothing is seen before
// the commit, and an answer that breaks off is asked for again.
func TestSimulatedEmptierInATransaction(t *testing.T) {
	t.Parallel()
	sim, c, s := simulated(t, felderasim.Options{}, Config{})
	orders := table(t, s, "orders")
	var fifty [][]decode.Value
	for i := range 50 {
		fifty = append(fifty, order(strconv.Itoa(i)))
	}
	sendAll(t, c, orders, fill(t, orders, fifty...))
	m, err := c.NewEmptier(orders)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sim.Inject(felderasim.Fault{Kind: felderasim.QueryError, Endpoint: epQuery, Rows: 25, Count: 2}); err != nil {
		t.Fatal(err)
	}
	tx, err := c.Begin(t.Context(), nil, func(context.Context, Intent) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	var pages []int
	total, err := m.All(t.Context(), 20, 1<<20, func(a *Array) error {
		tok, err := c.Writer(orders).Send(t.Context(), a)
		if err == nil {
			tx.Sent(tok)
		}
		pages = append(pages, a.Rows())
		return err
	})
	if err != nil || total != 50 || pages[len(pages)-1] != 10 || len(pages) <= 3 {
		t.Errorf("%d rows, %v in pages of %v", total, err, pages)
	}
	if n := sim.Count("orders"); n != 50 {
		t.Errorf("%d rows are seen before the commit", n)
	}
	if err := tx.Commit(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if n := sim.Count("orders"); n != 0 {
		t.Errorf("%d rows are left", n)
	}
	if total, err := m.All(t.Context(), 20, 1<<20, func(*Array) error { t.Error("a page of an empty table"); return nil }); total != 0 || err != nil {
		t.Error(total, err)
	}
	// What the caller says ends it, whatever it is, and so does another pipeline.
	sendAll(t, c, orders, fill(t, orders, order("1")))
	mine := errors.New("mine")
	if _, err := m.All(t.Context(), 1, 1<<20, func(*Array) error { return mine }); !errors.Is(err, mine) {
		t.Error(err)
	}
	sim.Crash(core.KeepNothing)
	var changed *IncarnationChanged
	if _, err := m.All(t.Context(), 20, 1<<20, func(*Array) error { return nil }); !errors.As(err, &changed) {
		t.Errorf("after another incarnation: %v", err)
	}
}

// In place of a change stand deletes of all rows that it is about.
func TestAddGone(t *testing.T) {
	tab := &Table{Name: "t", spelling: "t", key: []int{0, 1}, Columns: []Column{
		{Name: "a", Type: typeOf(BigInt), Key: true}, {Name: "b", Type: typeOf(Varchar), Key: true}, {Name: "v", Type: typeOf(Varchar)},
	}}
	e, err := NewEncoder(tab, tab.Relation(), Policy{})
	if err != nil {
		t.Fatal(err)
	}
	row := func(a, b, v string) []decode.Value { return []decode.Value{num(a), txt(b), txt(v)} }
	kept := row("2", "y", "w")
	kept[1] = decode.Value{State: decode.Unchanged}
	for name, c := range map[string]struct {
		ch   decode.OrderChange
		want string
	}{
		"insert":           {decode.OrderChange{Op: decode.Insert, After: row("1", "x", "v")}, `[{"delete":{"a":1,"b":"x"}}]`},
		"update":           {decode.OrderChange{Op: decode.Update, After: row("1", "x", "v")}, `[{"delete":{"a":1,"b":"x"}}]`},
		"change of key":    {decode.OrderChange{Op: decode.Update, Before: row("1", "x", "v"), After: row("2", "x", "v")}, `[{"delete":{"a":1,"b":"x"}},{"delete":{"a":2,"b":"x"}}]`},
		"key left out":     {decode.OrderChange{Op: decode.Update, Before: row("2", "y", "v"), After: kept}, `[{"delete":{"a":2,"b":"y"}},{"delete":{"a":2,"b":"y"}}]`},
		"part of it moves": {decode.OrderChange{Op: decode.Update, Before: row("1", "y", "v"), After: kept}, `[{"delete":{"a":1,"b":"y"}},{"delete":{"a":2,"b":"y"}}]`},
		"delete":           {decode.OrderChange{Op: decode.Delete, Before: row("1", "x", "v")}, `[{"delete":{"a":1,"b":"x"}}]`},
		"nothing at all":   {decode.OrderChange{Op: decode.Update}, ""},
		"a key not known":  {decode.OrderChange{Op: decode.Update, After: kept}, ""},
		"half a row of it": {decode.OrderChange{Op: decode.Insert, After: row("1", "x", "v")[:2]}, ""},
	} {
		c.ch.Relation = e.rel
		var a Array
		if err := a.AddGone(e, &c.ch); (err == nil) != (c.want != "") || err == nil && string(a.Body()) != c.want {
			t.Errorf("%s: %v, %s", name, err, a.Body())
		}
	}
	_, _, s := simulated(t, felderasim.Options{SQL: identitySQL}, Config{})
	log := table(t, s, "log")
	rel := log.Relation()
	if e, err = NewEncoder(log, rel, Policy{}); err != nil {
		t.Fatal(err)
	}
	var a Array
	ch := decode.OrderChange{Op: decode.Insert, Relation: rel, After: []decode.Value{txt("w"), num("1")}, Position: decode.Position{LSN: 7, Source: "s", Sequence: 2}}
	if err := a.AddGone(e, &ch); err != nil || string(a.Body()) != `[{"delete":{"holdfast_source":"s","holdfast_partition":0,"holdfast_position":7,"holdfast_sequence":2}}]` {
		t.Errorf("%v %s", err, a.Body())
	}
	ch.Op = decode.Delete
	if err := a.AddGone(e, &ch); err == nil {
		t.Error("a delete of a row without a key was taken")
	}
}
