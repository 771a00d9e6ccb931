package feldera

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"holdfast/internal/sabotage"
)

// This file decides, from the rows of the progress table, what the pipeline
// provably holds of a source. It does no I/O: reading and writing the table is
// progress.go's, and test/model walks through every state of a small world
// with this very function.

// ProgressRow is one row of the progress table: "all rows of this source and
// lane up to Position were in the circuit before this row was sent".
type ProgressRow struct {
	// Source is the cluster's identity and the slot, or the cluster's and the
	// group. Lane is "" or topic and partition.
	Source, Lane string
	// Epoch is raised by one by each owner, and by each decision of one: a
	// stale owner's row is never the highest.
	Epoch int64
	// Slot is 0 or 1. An owner writes its rows into the two in turn, each only
	// when the one before is ingested, so that the newest row proves the other.
	Slot int64
	// Position is a commit's end LSN or a next offset (offset + 1); 0 claims
	// the lane before anything was sent. It grows from row to row of an epoch.
	Position uint64
	// Incarnation is the process that had ingested the rows up to Position when
	// this row was sent. The row itself can have landed in a later one.
	Incarnation string
	// Step is the engine's step of the last of those rows; it informs only.
	Step uint64
	// Fingerprint is of the mapping of source to tables.
	Fingerprint string
	RecordedAt  time.Time
}

// Noted is what the daemon's own memory says about a lane: the bookmark of
// pgsource, the note beside a committed offset of kafkasink.
type Noted struct {
	// Known is false where there is no such memory, or where somebody else set
	// the source's position since.
	Known bool
	// Epoch is the highest that was claimed. It is noted before a row with it
	// is sent.
	Epoch int64
	// Produced is the last acknowledged position that produced rows; 0 = none
	// ever did. Positions without rows (keepalives, skipped and dead-lettered
	// records) do not count: no progress row stands for them.
	Produced uint64
	// RowEpoch and RowIncarnation name the progress row that was completed for
	// Produced.
	RowEpoch       int64
	RowIncarnation string
}

// Progress is what a decision found.
type Progress uint8

// What can be found. The zero value is invalid on purpose.
const (
	// ProgressFresh: nothing was ever delivered. That is no loss.
	ProgressFresh Progress = iota + 1
	// ProgressEqual: the pipeline holds what was acknowledged; go on.
	ProgressEqual
	// ProgressAhead: it provably holds more; what is up to Held is skipped.
	ProgressAhead
	// ProgressLost: it does not hold what the source was told to forget.
	ProgressLost
	// ProgressRemapped: it holds what was acknowledged, under another mapping.
	// Nothing is skipped: other tables would miss it.
	ProgressRemapped
	// ProgressReset: somebody set the source's position. It is obeyed: nothing
	// is skipped, and nothing counts as lost.
	ProgressReset
	// ProgressForeign: an owner that this daemon's memory knows nothing of has
	// claimed the lane. Nothing may be sent.
	ProgressForeign
)

// String gives the name used in logs and metric labels.
func (p Progress) String() string {
	switch p {
	case ProgressFresh:
		return "fresh"
	case ProgressEqual:
		return "equal"
	case ProgressAhead:
		return "ahead"
	case ProgressLost:
		return "lost"
	case ProgressRemapped:
		return "remapped"
	case ProgressReset:
		return "reset"
	case ProgressForeign:
		return "foreign"
	}
	return fmt.Sprintf("invalid(%d)", uint8(p))
}

// Decision is the answer of [Decide].
type Decision struct {
	Found Progress
	// Held is the highest position that the pipeline provably holds everything
	// up to; 0 = nothing is proven.
	Held uint64
	// Proof is the row that proves Held, nil where none does.
	Proof *ProgressRow
	// Epoch is the one to claim: above every one seen.
	Epoch int64

	noted   Noted
	now     string
	rows    []ProgressRow
	doubted *ProgressRow // the newest row, where it is not believed
	highest int64        // the highest epoch in the table
}

// Completed names the row that was completed for Held, by its epoch and
// incarnation, as Noted keeps it; 0 and "" where there is none. A claim that
// was not sent yet is no such row: it could land in a later incarnation, and
// would be believed there.
func (d *Decision) Completed() (epoch int64, incarnation string) {
	if d.Proof == nil || d.Proof.Position != d.Held {
		return 0, ""
	}
	return d.Proof.Epoch, d.Proof.Incarnation
}

// Superseded gives the rows that the claim of the new epoch replaces: all but
// those of the epochs that Held rests on, now or, should the pipeline go back
// to an earlier state, again.
func (d *Decision) Superseded() (rows []ProgressRow) {
	for _, r := range d.rows {
		if (d.Proof == nil || r.Epoch != d.Proof.Epoch) && (!d.noted.Known || r.Epoch != d.noted.RowEpoch) {
			rows = append(rows, r)
		}
	}
	return rows
}

// Reason is one sentence for the log: what was found, and why. Positions are
// written by the given function.
func (d *Decision) Reason(position func(uint64) string) string {
	var b strings.Builder
	switch d.Found {
	case ProgressFresh:
		b.WriteString("nothing was delivered before: begin")
	case ProgressEqual:
		fmt.Fprintf(&b, "the pipeline holds all rows up to %s, the last acknowledged one with rows: go on", position(d.Held))
	case ProgressAhead:
		fmt.Fprintf(&b, "the pipeline holds all rows up to %s and only %s was acknowledged: skip what it holds", position(d.Held), position(d.noted.Produced))
	case ProgressLost:
		fmt.Fprintf(&b, "rows up to %s were acknowledged, and the pipeline ", position(d.noted.Produced))
		if d.Proof == nil {
			b.WriteString("proves to hold none of them")
		} else {
			fmt.Fprintf(&b, "proves to hold those up to %s", position(d.Held))
		}
		b.WriteString(": it lost what the source was told to forget")
	case ProgressRemapped:
		fmt.Fprintf(&b, "the rows up to %s were delivered under another mapping of tables: skip none after %s", position(d.Proof.Position), position(d.noted.Produced))
	case ProgressReset:
		b.WriteString("the source's position was not set by this program: send all from there, whatever the pipeline holds")
	case ProgressForeign:
		fmt.Fprintf(&b, "the progress table has epoch %d, and the highest that is known here is %d: another owner has taken over", d.highest, d.noted.Epoch)
	}
	fmt.Fprintf(&b, " (%d progress rows", len(d.rows))
	if d.Proof != nil {
		fmt.Fprintf(&b, "; proven by epoch %d of incarnation %s", d.Proof.Epoch, d.Proof.Incarnation)
	}
	if d.doubted != nil {
		fmt.Fprintf(&b, "; not believed: %s in epoch %d of incarnation %s, which is not the present one (%s), and nothing proves that it was completed",
			position(d.doubted.Position), d.doubted.Epoch, d.doubted.Incarnation, d.now)
	}
	b.WriteByte(')')
	return b.String()
}

// Decide compares the rows of one source and lane with what the daemon noted.
// They have been read from the pipeline while its incarnation was the given
// one, after every request of earlier owners had ended: see [ProgressStore].
//
// The rules. Without any of the first two, test/model finds a loss that nobody
// notices, or one that is called although nothing is lost:
//
//   - A row is believed as it stands if it names the present incarnation, or is
//     the very row that was noted as completed. Any other may have landed in a
//     later incarnation than its data did: the daemon compared the incarnation,
//     stood still, the pipeline restarted from nothing, and the row went out.
//     Step numbers do not tell: they are used again after a roll-back.
//   - A row that is not believed still proves the row before it in its epoch:
//     it was sent only when that one was ingested, so that one's presence is
//     survival.
//   - The rows of a lower epoch prove nothing above the position that a higher
//     epoch began with: after a reset, or under another mapping, its owner had
//     to send the rows above once more, and perhaps has not sent all of them.
//   - Only positions that produced rows are compared.
func Decide(rows []ProgressRow, noted Noted, incarnation, fingerprint string) Decision {
	d := Decision{Epoch: noted.Epoch + 1, noted: noted, now: incarnation, rows: rows}
	for i := range rows {
		d.highest = max(d.highest, rows[i].Epoch)
	}
	d.Epoch = max(d.Epoch, d.highest+1)
	if sabotage.On(sabotage.SameEpoch) {
		d.Epoch = max(noted.Epoch, 1)
	}
	d.prove(rows)
	switch {
	case noted.Known && d.highest > noted.Epoch:
		d.Found = ProgressForeign
	case !noted.Known && len(rows) > 0:
		d.Found = ProgressReset
	case !noted.Known || (noted.Produced == 0 && d.Held == 0):
		d.Found = ProgressFresh
		if sabotage.On(sabotage.NeverUsedIsLost) {
			d.Found = ProgressLost
		}
	case d.Held < noted.Produced:
		d.Found = ProgressLost
	case d.Proof.Fingerprint != fingerprint:
		d.Found, d.Held = ProgressRemapped, noted.Produced
	case d.Held > noted.Produced:
		d.Found = ProgressAhead
	default:
		d.Found = ProgressEqual
	}
	return d
}

// prove finds the highest proven position.
func (d *Decision) prove(rows []ProgressRow) {
	sorted := slices.Clone(rows)
	slices.SortStableFunc(sorted, func(a, b ProgressRow) int {
		return cmp.Or(cmp.Compare(b.Epoch, a.Epoch), cmp.Compare(b.Position, a.Position))
	})
	limit := ^uint64(0) // what a higher epoch began with
	for i := 0; i < len(sorted); {
		newest, proof := &sorted[i], (*ProgressRow)(nil)
		switch {
		case newest.Incarnation == d.now || d.noted.names(newest) || sabotage.On(sabotage.BelieveAnyRow):
			proof = newest
		case i+1 < len(sorted) && sorted[i+1].Epoch == newest.Epoch:
			proof = &sorted[i+1]
		}
		if proof != newest && d.doubted == nil {
			d.doubted = newest
		}
		if proof != nil {
			d.Proof, d.Held = proof, min(proof.Position, limit)
			return
		}
		limit = min(limit, newest.Position)
		for i++; i < len(sorted) && sorted[i].Epoch == newest.Epoch; i++ {
		}
	}
}

// names tells whether r is the row that was noted as completed.
func (n *Noted) names(r *ProgressRow) bool {
	if sabotage.On(sabotage.BelieveByPosition) {
		return n.Known && r.Position == n.Produced
	}
	return n.Known && r.Position == n.Produced && r.Epoch == n.RowEpoch && r.Incarnation == n.RowIncarnation
}
