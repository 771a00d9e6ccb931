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

// What a look has found is taken in once it is saved, and not before: a save that
// fails is made up for at the next look, and nothing is said twice.
func TestLooksAreTakenInWhenTheyAreSaved(t *testing.T) {
	name := tableName{"public", "a"}
	was, now := plainBaseline(), plainBaseline()
	now.columns["x"] = baseColumn{number: 6, has: true, carried: true, filled: true}
	st := stateAt(100)
	line := was.remembered()
	st.Snapshot = &snapshotState{Quiet: true, Tables: []knownTable{{Schema: "public", Name: "a", OID: 7, Shape: line}}}
	var before, after bool
	store := &flakyStore{fail: func() (bool, bool) { return before, after }, durable: st}
	s := testSource(t, store)
	s.cfg.Tables = []Table{{Schema: "public", Name: "a"}}
	var err error
	if s.keeper, err = s.openKeeper(t.Context()); err != nil {
		t.Fatal(err)
	}
	look := func(wantTaken bool, wantSaves, wantDiffering int) {
		t.Helper()
		saves := len(store.saves)
		s.keepUp(t.Context(), &ready{}, name, was, now)
		if _, taken := was.columns["x"]; taken != wantTaken {
			t.Errorf("taken in: %v", taken)
		}
		if got := len(store.saves) - saves; got != wantSaves {
			t.Errorf("%d saves", got)
		}
		if wantShape := map[bool]string{true: now.remembered(), false: line}[wantDiffering > 0]; store.durable.Snapshot.Tables[0].Shape != wantShape {
			t.Errorf("the state has the shape %q", store.durable.Snapshot.Tables[0].Shape)
		}
		if got := len(store.durable.Differing); got != wantDiffering {
			t.Errorf("%d tables differ in the state", got)
		}
	}
	before = true
	look(false, 0, 0)
	look(false, 0, 0)
	before, after = false, true // saved, and nobody knows
	look(false, 1, 1)
	after = false
	look(true, 1, 1)
	order := store.durable.Differing[0].Order
	look(true, 0, 1)
	if got := store.durable.Differing[0]; got.Order != order || strings.Count(got.Why, "came later") != 1 {
		t.Errorf("the state has %+v", got)
	}
}
