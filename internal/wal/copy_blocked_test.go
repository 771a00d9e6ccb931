package wal

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// Copied rows that were under way each time an attempt ended are parted until
// one stands alone, and named then; what has arrived is cleared, and an attempt
// that ended with other rows begins the count anew.
func TestCopiedRowsThatEndAttempts(t *testing.T) {
	job := &copyJob{Kind: CopySnapshot, Schema: "public", Name: "orders"}
	request := func(named string, keys ...string) []*copyRequest {
		return []*copyRequest{{ch: &chunk{job: job}, keys: keys, named: named}}
	}
	table, cause := job.table().String(), &feldera.IncarnationChanged{Was: "i1", Now: "i2"}
	keys := func(from, to int) (list []string) {
		for i := from; i < to; i++ {
			list = append(list, fmt.Sprint(i))
		}
		return list
	}
	var g struggle
	if err := g.copyFailed(nil, cause); err != nil || g.apart(table) != 0 {
		t.Errorf("nothing was under way: %v", err)
	}
	lo, hi := 0, 4000
	for n := range PoisonAttempts - 1 {
		if err := g.copyFailed(request("", keys(lo, hi)...), cause); err != nil {
			t.Fatalf("after %d: %v", n+1, err)
		}
		if few := g.apart(table); few != max(1, (hi-lo)/suspectParts) {
			t.Errorf("after %d, %d go together", n+1, few)
		}
		if !g.suspected(table, fmt.Sprint(lo)) || g.suspected(table, fmt.Sprint(hi)) || g.suspected("other", fmt.Sprint(lo)) {
			t.Error("others are suspected")
		}
		hi = lo + g.apart(table)
	}
	if hi != 1 {
		t.Errorf("%d rows are left for the last attempt", hi)
	}
	err := g.copyFailed(request("row id=0", "0"), cause)
	refused, ok := errors.AsType[*decode.Refusal](err)
	if !ok || !strings.Contains(err.Error(), "row id=0") || !strings.Contains(err.Error(), "5 times in a row") || !strings.Contains(refused.Where, "snapshot of") {
		t.Errorf("it says %v", err)
	}

	for name, between := range map[string]func(*struggle){
		"arrived":    func(g *struggle) { g.copied(table, []string{"7"}) },
		"other rows": func(g *struggle) { _ = g.copyFailed(request("", "8"), cause) },
		"done":       func(g *struggle) { g.copyDone(table) },
	} {
		var g struggle
		for range PoisonAttempts - 1 {
			_ = g.copyFailed(request("", "7"), cause)
		}
		between(&g)
		if err := g.copyFailed(request("", "7"), cause); err != nil {
			t.Errorf("%s in between: %v", name, err)
		}
	}
}

// Suspected rows go by themselves, few at a time, and in their order.
func TestMergeKeepsSuspectsApart(t *testing.T) {
	m := newMerge(1 << 20)
	m.track()
	m.open(1)
	if err := m.fence(view{xmin: 1, xmax: 1}); err != nil {
		t.Fatal(err)
	}
	var rows []copiedRow
	for i := range 9 {
		rows = append(rows, copiedRow{key: fmt.Sprint(i)})
	}
	if err := m.fill(nil, rows, 0); err != nil {
		t.Fatal(err)
	}
	m.win.take("2")
	suspect := func(key string) bool { return key >= "3" && key <= "6" }
	var got []string
	for m.due(0) {
		next := m.nextKey()
		out, _ := m.next(100, 1<<20, suspect, 3)
		part := ""
		for _, r := range out {
			part += r.key
		}
		if !strings.HasPrefix(part, next) {
			t.Errorf("%q goes out, and %q was next", part, next)
		}
		got = append(got, part)
	}
	if want := "[01 345 6 78]"; fmt.Sprint(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
	if m.nextKey() != "" {
		t.Error("a row is left")
	}
}
