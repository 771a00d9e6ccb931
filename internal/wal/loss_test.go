package wal

import (
	"strings"
	"testing"
	"time"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// A loss names the tables until each was read again since; a resync that began
// before a loss does not mend it.
func TestNeedsResync(t *testing.T) {
	store := &flakyStore{fail: func() (bool, bool) { return false, false }, durable: stateAt(100)}
	s := testSource(t, store)
	s.cfg.Tables = []Table{{Schema: "public", Name: "b"}, {Schema: "public", Name: "A"}}
	var last Status
	var phases []string
	s.cfg.Report = func(st Status) {
		if st.Check == CheckResync {
			last = st
		}
	}
	s.cfg.Phase = func(p string) { phases = append(phases, p) }
	var err error
	if s.keeper, err = s.openKeeper(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.phaseStreaming()
	before := time.Now()
	for _, now := range []string{"i2", "i3"} {
		if err := s.destinationRestarted(t.Context(), &feldera.IncarnationChanged{Was: s.cfg.Pipeline.Expected(), Now: now}); err != nil {
			t.Fatal(err)
		}
	}
	if last.Blocking || !last.Works || !strings.HasPrefix(last.Message, `needs resync: "public"."A", "public"."b": `) {
		t.Errorf("it says %+v", last)
	}
	list := func() (names string) {
		for _, a := range store.durable.NeedsResync() {
			names += a.Table
		}
		return names
	}
	resync := func(table string, began time.Time, left string) {
		t.Helper()
		if err := s.resynced(t.Context(), table, began); err != nil {
			t.Fatal(err)
		}
		if got := list(); got != left {
			t.Errorf("left is %s, expected %s", got, left)
		}
	}
	resync(`"public"."A"`, before, `"public"."A""public"."b"`)
	resync(`"public"."A"`, time.Now().Add(time.Second), `"public"."b"`)
	if last.OK {
		t.Errorf("it says %+v", last)
	}
	resync(`"public"."b"`, time.Now().Add(time.Second), "")
	if !last.OK || len(store.durable.Notices) != 0 {
		t.Errorf("it says %+v, with %d notices", last, len(store.durable.Notices))
	}
	if got := strings.Join(phases, ","); got != "streaming,needs resync,streaming" {
		t.Errorf("the phases were %s", got)
	}
}

// With PGSOURCE_ON_DESTINATION_LOSS=stop it ends by name, at the loss and at
// each start until a person has accepted it.
func TestStopOnLoss(t *testing.T) {
	store := &flakyStore{fail: func() (bool, bool) { return false, false }, durable: stateAt(100)}
	s := testSource(t, store)
	s.cfg.Tables = []Table{{Schema: "public", Name: "b"}}
	s.cfg.StopOnLoss = true
	var err error
	if s.keeper, err = s.openKeeper(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.stopOnLoss(store.durable); err != nil {
		t.Fatal(err)
	}
	err = s.destinationRestarted(t.Context(), &feldera.IncarnationChanged{Was: "i1", Now: "i2"})
	if r := refusal(t, err); r.Reason != decode.ReasonGap || !strings.Contains(r.Where, `"public"."b"`) || !strings.Contains(r.Why, "up to LSN 0/64") {
		t.Errorf("%v", r)
	}
	if err := s.stopOnLoss(store.durable); err == nil {
		t.Error("the next start goes on")
	}
	s.cfg.StopOnLoss = false
	if err := s.stopOnLoss(store.durable); err != nil {
		t.Errorf("heal: %v", err)
	}
}
