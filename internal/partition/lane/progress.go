package lane

import (
	"fmt"

	"holdfast/internal/ack"
)

// This file is what a lane with progress rows does otherwise: its owner finds
// out what the destination holds, notes its epoch, claims the lane, and only
// then sends; and a range that gave rows is completed by the progress row
// behind it.

// Row names a progress row that was completed. Known is false where nothing is
// remembered of progress rows, or somebody else has set the position since.
type Row struct {
	Known       bool
	Epoch       int64
	Incarnation string
}

// Progress is the part of a lane's configuration that is about progress rows.
type Progress struct {
	// Row is what was completed for Config.StartRows.
	Row Row
	// Decided: the lane begins where a decision has put it; Config.Epoch is the
	// decision's. Otherwise [Lane.Decide] comes first.
	Decided bool
	// Announce is the offset of the first commit of a decided lane. It is below
	// Start where the destination holds more than was acknowledged: nothing may
	// name that as acknowledged before the claim that stands for it is completed.
	Announce int64
}

// Stage is how far the owner of a lane with progress rows has got in taking it.
type Stage uint8

// The stages, in order.
const (
	// Undecided: what the destination holds is not known. Nothing is committed.
	Undecided Stage = iota
	// Announcing: the epoch is to be noted, with a commit that moves nothing.
	Announcing
	// Unclaimed: the epoch is noted, and the claim may be sent.
	Unclaimed
	// Claimed: the claim is completed. Also the stage of a lane without rows.
	Claimed
)

type progress struct {
	stage    Stage
	announce int64
	// claim is the first row, named once a commit has named it, or one behind it.
	claim Row
	named bool
	// recorded is the Next of the last range that a row was sent for.
	recorded int64
}

// claimed tells whether records may be sent, as far as progress rows go.
func (p *progress) claimed() bool { return p == nil || p.stage == Claimed }

// Begins gives where an undecided lane stands, and the offset behind the last
// record below it that is known to have given a row.
func (l *Lane) Begins() (offset, rows int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.progress == nil {
		return l.ledger.Acknowledged(), l.told.rows
	}
	return l.progress.announce, l.told.rows
}

// Stage gives the lane's stage.
func (l *Lane) Stage() Stage {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.progress == nil {
		return Claimed
	}
	return l.progress.stage
}

// Decide has an undecided lane go on where it stands, under the given epoch.
// On a lane that is not undecided, or over, it changes nothing and says so.
func (l *Lane) Decide(epoch int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != Live || l.progress == nil || l.progress.stage != Undecided {
		return false
	}
	l.epoch, l.progress.stage = epoch, Announcing
	return true
}

// announcement gives the first commit, which notes the epoch.
func (l *Lane) announcement() (Commit, bool) {
	c := Commit{Offset: l.progress.announce, LeaderEpoch: l.told.leaderEpoch, Time: l.told.time, Rows: l.told.rows, Row: l.told.row}
	return c, l.state == Live && l.progress.stage == Announcing
}

// Claim records that the owner's first row is completed: the one of the given
// epoch and incarnation that says that the destination holds all rows up to
// position. From here records may be sent.
func (l *Lane) Claim(position int64, incarnation string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.state == Dead:
		return ErrDead
	case l.progress == nil || l.progress.stage != Unclaimed:
		return fmt.Errorf("claim %s[%d]: its epoch was not noted before", l.topic, l.partition)
	}
	l.progress.stage = Claimed
	l.progress.claim = Row{Known: true, Epoch: l.epoch, Incarnation: incarnation}
	l.safe.rows, l.safe.row = position, l.progress.claim
	if l.ledger.At(ack.Completed) > l.progress.announce {
		l.safe.leaderEpoch = -1 // they are those of the offset that was announced
	}
	return nil
}

// Recordable gives the position that a progress row may be sent for: that of
// the last record with a row of the ranges at the front that are ingested, and
// the Next of the last such range. It is false where no rows are new.
func (l *Lane) Recordable() (position, next int64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == Dead || l.progress == nil || l.progress.stage != Claimed {
		return 0, 0, false
	}
	for _, f := range l.inflight {
		if f.rung < ack.Ingested {
			break
		}
		if f.Rows > 0 && f.Next > l.progress.recorded {
			position, next, ok = f.Rows, f.Next, true
		}
	}
	return position, next, ok
}

// Recorded records that a progress row was accepted for everything up to next.
func (l *Lane) Recorded(next int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.progress != nil {
		l.progress.recorded = max(l.progress.recorded, next)
	}
}

// Proven records that the progress row for everything up to next is completed.
// On a dead lane it returns ErrDead and changes nothing.
func (l *Lane) Proven(next int64, incarnation string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == Dead {
		return ErrDead
	}
	for _, f := range l.inflight {
		if f.Next > next {
			break
		}
		if err := l.ledger.Mark(f.first, f.last, ack.Completed); err != nil {
			return err
		}
		f.rung = ack.Completed
	}
	l.safe.row = Row{Known: true, Epoch: l.epoch, Incarnation: incarnation}
	l.settle()
	return nil
}
