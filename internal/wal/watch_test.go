package wal

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"holdfast/internal/decode"
)

// Looks that fail are said with their reason and since when; what was seen before
// counts for less and less. The first that works ends it.
func TestLooksThatFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var shown Status
		s := &Source{cfg: Config{Metrics: NewMetrics(prometheus.NewRegistry()), Report: func(st Status) { shown = st }}}
		look := func(err error, wantGap bool, parts ...string) {
			t.Helper()
			if gap := s.showLook(Status{Check: CheckSlot, OK: true, Message: "reserved"}, err); gap != wantGap {
				t.Errorf("gap %v, want %v", gap, wantGap)
			}
			for _, part := range parts {
				if !strings.Contains(shown.Message, part) {
					t.Errorf("it does not say %q: %s", part, shown.Message)
				}
			}
		}
		since := time.Now().UTC().Format(time.RFC3339)
		denied := &decode.Refusal{Reason: decode.ReasonSetup, What: "look", Why: "permission denied", Do: "grant it"}
		look(denied, false, "since "+since, "permission denied", "not been looked at before")
		if shown.OK || shown.Blocking || !shown.Works || shown.Hint != "grant it" {
			t.Errorf("it holds something up, or does not say what to do: %+v", shown)
		}
		_ = sleep(t.Context(), time.Minute)
		look(nil, false, "reserved")
		_ = sleep(t.Context(), time.Minute)
		since = time.Now().UTC().Format(time.RFC3339)
		look(errors.New("too many clients"), false, "since "+since, "too many clients", "the last look found: reserved")
		_ = sleep(t.Context(), 5*time.Minute)
		look(errors.New("too many clients"), false, "since "+since, "out of date")
		if strings.Contains(shown.Message, "reserved") {
			t.Errorf("it still shows what was: %s", shown.Message)
		}
		look(nil, false, "reserved")
		if !shown.OK {
			t.Errorf("it is not in order again: %+v", shown)
		}
		look(&decode.Refusal{Reason: decode.ReasonGap, What: "slot", Why: "dropped"}, true, "dropped")
		look(&unusableSlotError{&decode.Refusal{Reason: decode.ReasonSetup, What: "slot", Why: "temporary"}}, false, "temporary")
		if !shown.Blocking {
			t.Errorf("a slot that cannot serve waits for nobody: %+v", shown)
		}
	})
}
