package feldera

import (
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
