package wal

import (
	"context"
	"errors"
	"time"

	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/sabotage"
)

// keepBookmark makes durable what the ledger says may be acknowledged, and
// only then lets the status goroutine tell the server. In between a crash
// leaves a bookmark ahead of the slot, which is normal: the next start begins
// at the bookmark. The reverse, a slot ahead of the bookmark, would mean that
// somebody else has moved it.
//
// While the store fails nothing is acknowledged: the rows are in the pipeline
// already, so what that costs is WAL on the server's disk.
func (a *attempt) keepBookmark(hard context.Context) {
	defer a.settled.close()
	var last time.Time // when the last save ended
	retry := newBackOff()
	for {
		select {
		case <-a.proven:
		case <-a.drained.ch:
			a.lastBookmark(hard)
			return
		case <-hard.Done():
			return
		}
		if !a.pace(hard, last) {
			continue // drained or halted: the next turn finds out which
		}
		err := a.saveBookmark(hard)
		last = time.Now()
		var refused *decode.Refusal
		switch {
		case err == nil:
			retry.Reset()
		case errors.As(err, &refused) || errors.Is(err, errGoesBack):
			a.s.keeper.reportFailing(hard, err)
			a.fail(err)
			return
		case hard.Err() != nil:
			return
		default:
			a.s.keeper.reportFailing(hard, err)
			a.s.cfg.Metrics.retries.WithLabelValues("state").Inc()
			a.proven.set() // nothing else might
			wait := time.NewTimer(retry.NextBackOff())
			select {
			case <-wait.C:
			case <-a.drained.ch:
			case <-hard.Done():
			}
			wait.Stop()
		}
	}
}

// pace waits until the store may be written to again; false when the attempt
// is ending instead.
func (a *attempt) pace(hard context.Context, last time.Time) bool {
	rows, idle := a.s.keeper.store.Pace()
	for {
		a.mu.Lock()
		lsn, _ := a.ledger.Ready(a.s.cfg.AckOn)
		every := idle
		if len(a.produced) > 0 && a.produced[0] <= lsn {
			every = rows
		}
		a.mu.Unlock()
		left := every - time.Since(last)
		if left <= 0 {
			return true
		}
		wait := time.NewTimer(left)
		select {
		case <-wait.C:
		case <-a.proven: // rows may have come behind an idle position
		case <-a.drained.ch:
			wait.Stop()
			return false
		case <-hard.Done():
			wait.Stop()
			return false
		}
		wait.Stop()
	}
}

// saveBookmark saves what may be acknowledged, if that is more than what is
// durable.
func (a *attempt) saveBookmark(ctx context.Context) error {
	a.mu.Lock()
	lsn, _ := a.ledger.Ready(a.s.cfg.AckOn)
	switch {
	case sabotage.On(sabotage.BookmarkReceived):
		lsn = a.ledger.Last()
	case sabotage.On(sabotage.KeepaliveOvertakes):
		lsn = max(lsn, a.walEnd)
	case sabotage.On(sabotage.MaxWatermark):
		lsn = max(lsn, a.highest)
	}
	rows, n := uint64(0), 0
	for n < len(a.produced) && a.produced[n] <= lsn {
		rows = a.produced[n]
		n++
	}
	durable := a.bookmarked
	epoch, incarnation := a.rowEpoch, a.rowIncarnation
	a.mu.Unlock()
	if lsn <= durable {
		return nil
	}
	crash.Here(crash.PgBeforeBookmark)
	err := a.s.keeper.update(ctx, func(next *State) bool {
		next.Acknowledged = LSN(lsn)
		next.Rows = max(next.Rows, LSN(rows))
		if epoch > 0 && rows > 0 && next.Progress != nil {
			next.Progress = &storedProgress{Epoch: next.Progress.Epoch, Produced: LSN(rows), RowEpoch: epoch, RowIncarnation: incarnation}
		}
		return true
	})
	if err != nil {
		return err
	}
	crash.Here(crash.PgAfterBookmark)
	a.mu.Lock()
	a.bookmarked = lsn
	a.produced = append(a.produced[:0], a.produced[n:]...)
	a.setPositions()
	a.mu.Unlock()
	a.progress.set()
	return nil
}

// lastBookmark saves once more when nothing can become completed any more. It
// gives up on a store that fails: what it could not save is delivered again.
func (a *attempt) lastBookmark(hard context.Context) {
	ctx, cancel := context.WithTimeout(hard, lastSaveTimeout)
	defer cancel()
	err := a.s.keeper.insist(ctx, func() error { return a.saveBookmark(ctx) })
	if err == nil {
		// What was recorded ahead is known exactly now; it costs a save that
		// nothing depends on.
		err = a.s.keeper.update(ctx, func(next *State) bool {
			exact := a.s.keeper.exactlySent(next.Acknowledged)
			if next.Sent <= exact {
				return false
			}
			next.Sent = exact
			return true
		})
	}
	if err != nil && hard.Err() == nil {
		a.s.log.WarnContext(hard, "the last position could not be saved and is not acknowledged: what it covers is delivered again after the next start", "err", err)
	}
}

// brought notes that a batch which ends at end brings rows. It is called
// before any evidence for the batch can come.
func (a *attempt) brought(end uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n := len(a.produced); n == 0 || a.produced[n-1] < end { // else it is sent a second time
		a.produced = append(a.produced, end)
	}
}
