package wal

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"holdfast/internal/decode"
)

// A table that differs is in the state once, with its reasons, and
// until a resync that began behind it; what cannot be saved changes nothing of
// the refusal.
func TestDifferingTables(t *testing.T) {
	var fails bool
	store := &flakyStore{fail: func() (bool, bool) { return fails, false }, durable: stateAt(100)}
	s := testSource(t, store)
	s.cfg.Tables = []Table{{Schema: "public", Name: "a"}, {Schema: "public", Name: "b"}}
	var last Status
	s.cfg.Report = func(st Status) {
		if st.Check == CheckState {
			last = st
		}
	}
	var err error
	if s.keeper, err = s.openKeeper(t.Context()); err != nil {
		t.Fatal(err)
	}
	a, b := tableName{"public", "a"}, tableName{"public", "b"}
	refused := func(why string) error { return &decode.Refusal{Reason: decode.ReasonGap, Why: why} }
	note := func(err error, tables ...tableName) {
		t.Helper()
		if got := s.differs(t.Context(), err, tables...); !errors.Is(got, err) {
			t.Errorf("it gives %v back", got)
		}
	}
	holds := func(want string) {
		t.Helper()
		var got []string
		for _, d := range store.durable.Differing {
			got = append(got, d.Table+" "+d.Why)
		}
		if strings.Join(got, ", ") != want {
			t.Errorf("the state has %q, want %q", got, want)
		}
	}
	note(errors.New("an outage"), a)
	note(refused("no table"))
	holds("")
	note(refused("first"), a, b)
	between := store.durable.Events
	note(refused("second"), a)
	holds("a first; then: second, b first")
	if last.OK || last.Blocking || !strings.Contains(last.Message, "second") || !strings.Contains(last.Hint, "pgsource resync public.a public.b,") {
		t.Errorf("it says %+v", last)
	}
	fails = true
	note(refused("third"), a)
	fails = false
	holds("a first; then: second, b first")

	must(t, s.resynced(t.Context(), a.String(), between+1))
	must(t, s.resynced(t.Context(), b.String(), between+1))
	holds("a first; then: second")
	must(t, s.resynced(t.Context(), a.String(), store.durable.Events+1))
	holds("")
	if !last.OK {
		t.Errorf("it says %+v", last)
	}

	// Reasons, names and entries are bounded.
	st := stateAt(100)
	for i := range 30 {
		st.differ(strings.Repeat("ü", maxDifferenceText), tableName{"public", fmt.Sprint(i)})
	}
	if said := describeDiffering(st.Differing); len(said) > 5*maxDifferenceText || !strings.Contains(said, "and those of 26 more") {
		t.Errorf("%d bytes: %s", len(said), said)
	}
	if run := resyncOf(st.Differing); run != "pgsource resync -all" {
		t.Errorf("it says %s", run)
	}
	s.cfg.Tables = []Table{{Schema: "public", Name: "7"}} // the others are not carried any more
	if got := s.differing(st); len(got) != 1 || got[0].Table != "7" {
		t.Errorf("carried are %v", got)
	}
	st.differ("a filter cut off in \xc3", tableName{"public", "latin"})
	raw, err := encodeState(st)
	must(t, err)
	if back, err := decodeState(raw); err != nil || len(back.Differing) != 31 || back.Differing[7].Table != "7" {
		t.Errorf("read back: %v, %v", back, err)
	}
}
