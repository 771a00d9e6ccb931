package feldera

import (
	"fmt"
	"strings"
	"testing"
)

// progressRow is a row of the tests: epoch, slot, position, incarnation.
func progressRow(epoch, slot int64, position uint64, incarnation string) ProgressRow {
	return ProgressRow{Epoch: epoch, Slot: slot, Position: position, Incarnation: incarnation, Fingerprint: "f"}
}

func TestDecide(t *testing.T) {
	const now = "inc-2"
	// What a daemon in epoch 3 noted when row 3/40 of the last incarnation was
	// completed.
	noted := Noted{Known: true, Epoch: 3, Produced: 40, RowEpoch: 3, RowIncarnation: "inc-1"}
	for _, tc := range []struct {
		name  string
		rows  []ProgressRow
		noted Noted
		found Progress
		held  uint64
		epoch int64
		says  string
	}{
		{"a first start is no loss", nil, Noted{}, ProgressFresh, 0, 1, "nothing was delivered before"},
		{"a claim that produced nothing is no loss", []ProgressRow{progressRow(1, 0, 0, "inc-1")}, Noted{Known: true, Epoch: 1}, ProgressFresh, 0, 2, "nothing was delivered"},
		{"a claim that was lost with its pipeline is no loss", nil, Noted{Known: true, Epoch: 1}, ProgressFresh, 0, 2, "nothing was delivered"},
		{
			"a row of the present incarnation is believed",
			[]ProgressRow{progressRow(3, 0, 40, now)},
			noted, ProgressEqual, 40, 4, "holds all rows up to 40",
		},
		{
			"the destination is ahead after a crash before the bookmark",
			[]ProgressRow{progressRow(3, 0, 60, now), progressRow(3, 1, 50, now)},
			noted, ProgressAhead, 60, 4, "only 40 was acknowledged",
		},
		{
			"the row that was noted is believed in any incarnation",
			[]ProgressRow{progressRow(3, 0, 40, "inc-1"), progressRow(3, 1, 30, "inc-1")},
			noted, ProgressEqual, 40, 4, "proven by epoch 3 of incarnation inc-1",
		},
		{
			"a row of another incarnation proves only the one before it",
			[]ProgressRow{progressRow(3, 0, 60, "inc-1"), progressRow(3, 1, 50, "inc-1")},
			noted, ProgressAhead, 50, 4, "not believed: 60 in epoch 3 of incarnation inc-1",
		},
		{
			"a row that landed alone in a new incarnation proves nothing",
			[]ProgressRow{progressRow(3, 0, 60, "inc-1")},
			noted, ProgressLost, 0, 4, "proves to hold none of them",
		},
		{
			"the same position by an owner that never completed it proves nothing",
			[]ProgressRow{progressRow(2, 0, 40, "inc-1")},
			noted, ProgressLost, 0, 4, "not believed: 40 in epoch 2",
		},
		{
			"the same position in an incarnation that never completed it proves nothing",
			[]ProgressRow{progressRow(3, 0, 40, "inc-0")},
			noted, ProgressLost, 0, 4, "not believed: 40 in epoch 3 of incarnation inc-0",
		},
		{"no row although rows were acknowledged is a loss", nil, noted, ProgressLost, 0, 4, "rows up to 40 were acknowledged"},
		{
			"a row behind what was acknowledged is a loss",
			[]ProgressRow{progressRow(3, 1, 30, now)},
			noted, ProgressLost, 30, 4, "those up to 30",
		},
		{
			"a stale owner's row does not win",
			[]ProgressRow{progressRow(2, 0, 90, now), progressRow(3, 0, 40, now)},
			noted, ProgressEqual, 40, 4, "proven by epoch 3",
		},
		{
			"a claim that is not believed falls back on the epoch before",
			[]ProgressRow{progressRow(3, 0, 40, "inc-1"), progressRow(4, 0, 40, "inc-1b")},
			Noted{Known: true, Epoch: 4, Produced: 40, RowEpoch: 3, RowIncarnation: "inc-1"},
			ProgressEqual, 40, 5, "proven by epoch 3",
		},
		{
			"a lower epoch proves nothing above where a higher one began",
			[]ProgressRow{progressRow(3, 0, 90, "inc-1"), progressRow(3, 1, 80, "inc-1"), progressRow(4, 0, 40, "inc-1b")},
			Noted{Known: true, Epoch: 4, Produced: 40, RowEpoch: 2, RowIncarnation: "inc-0"},
			ProgressEqual, 40, 5, "proven by epoch 3",
		},
		{
			"another mapping is not skipped over",
			[]ProgressRow{{Epoch: 3, Position: 60, Incarnation: now, Fingerprint: "other"}},
			noted, ProgressRemapped, 40, 4, "under another mapping",
		},
		{
			"a loss is a loss under another mapping too",
			[]ProgressRow{{Epoch: 3, Position: 10, Incarnation: now, Fingerprint: "other"}},
			noted, ProgressLost, 10, 4, "lost what the source was told to forget",
		},
		{
			"a position that somebody set is obeyed",
			[]ProgressRow{progressRow(3, 0, 60, now)},
			Noted{},
			ProgressReset, 60, 4, "was not set by this program",
		},
		{
			"an owner that is not known here has taken over",
			[]ProgressRow{progressRow(5, 0, 60, now)},
			noted, ProgressForeign, 60, 6, "epoch 5, and the highest that is known here is 3",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := Decide(tc.rows, tc.noted, now, "f")
			if d.Found != tc.found || d.Held != tc.held || d.Epoch != tc.epoch {
				t.Errorf("%v, held %d, epoch %d; expected %v, %d, %d", d.Found, d.Held, d.Epoch, tc.found, tc.held, tc.epoch)
			}
			reason := d.Reason(func(p uint64) string { return fmt.Sprint(p) })
			if !strings.Contains(reason, tc.says) {
				t.Errorf("%s", reason)
			}
		})
	}
}

// The order in which a query gives the rows does not matter.
func TestDecideInAnyOrder(t *testing.T) {
	rows := []ProgressRow{progressRow(4, 0, 40, "x"), progressRow(3, 0, 90, "inc-1"), progressRow(3, 1, 80, "inc-1")}
	noted := Noted{Known: true, Epoch: 4, Produced: 30}
	for range len(rows) {
		rows = append(rows[1:], rows[0])
		if d := Decide(rows, noted, "inc-2", "f"); d.Found != ProgressAhead || d.Held != 40 {
			t.Errorf("%v: %v, held %d", rows, d.Found, d.Held)
		}
	}
}
