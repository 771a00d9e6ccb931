package wal

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// watchInterval is how often the source and the pipeline are looked at beside
// the stream.
const watchInterval = 10 * time.Second

// watch looks at slot, publication and tables from time to time, over a
// connection of its own. What it finds wrong for good ends the attempt; a look that
// fails otherwise is said, since nobody watches the slot then.
func (a *attempt) watch(work context.Context) {
	a.s.every(work, func() {
		var seen Status
		err := a.s.look(work, func(ctx context.Context, conn *pgx.Conn) error {
			slot, err := a.s.showSlot(ctx, conn)
			if err != nil {
				return err
			}
			seen = a.s.slotStatus(slot)
			a.mu.Lock()
			a.walEnd = max(a.walEnd, slot.current)
			a.s.cfg.Metrics.slot.lag.reached(slot.current)
			a.setPositions()
			received := a.ledger.Last()
			a.mu.Unlock()
			if err := a.s.noticeTables(ctx, conn); err != nil {
				return err
			}
			return a.s.checkUnchanged(ctx, conn, a.ready, received)
		})
		if work.Err() == nil && a.s.showLook(seen, err) {
			a.fail(err)
		}
	})
}

// WatchSlot keeps looking at the slot until ctx ends, for a daemon that waits
// for a person: the slot goes on keeping WAL on the server's disk meanwhile.
func (s *Source) WatchSlot(ctx context.Context) {
	s.every(ctx, func() {
		var seen Status
		err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			slot, err := s.showSlot(ctx, conn)
			if err == nil {
				seen = s.slotStatus(slot)
			}
			return err
		})
		if ctx.Err() == nil {
			_ = s.showLook(seen, err) // nothing is left to end
		}
	})
}

// looks is what the watcher has to say of itself. Only it uses it, or what watches
// in its place.
type looks struct {
	// failingSince is when the first of the looks failed that all did since; zero
	// while they work. seen and seenAt are of the last one that worked.
	failingSince, seenAt time.Time
	seen                 string
}

// looksStale is after how long without a look what was seen counts for nothing.
const looksStale = 3 * time.Minute

// showLook shows what became of a look, and tells whether it has found a gap.
func (s *Source) showLook(seen Status, err error) (gap bool) {
	refused, _ := errors.AsType[*decode.Refusal](err)
	_, judged := errors.AsType[*unusableSlotError](err)
	switch {
	case err == nil:
		s.looked(seen)
	case judged, refused != nil && refused.Reason == decode.ReasonGap:
		s.reportFailure(CheckSlot, err)
	default:
		s.cannotLook(err)
	}
	return refused != nil && refused.Reason == decode.ReasonGap
}

// unusableSlotError is a refusal of the slot itself, which a look has found.
type unusableSlotError struct{ error }

func (e *unusableSlotError) Unwrap() error { return e.error }

// looked shows what a look has found.
func (s *Source) looked(st Status) {
	s.looks = looks{seen: st.Message, seenAt: time.Now()}
	s.cfg.Metrics.slot.looked.Store(s.looks.seenAt.UnixNano())
	s.cfg.Report(st)
}

// cannotLook says since when the slot is not watched, and why. It holds nothing up:
// the stream does not need it.
func (s *Source) cannotLook(err error) {
	now := time.Now()
	if s.looks.failingSince.IsZero() {
		s.looks.failingSince = now
	}
	st := failureStatus(CheckSlot, err)
	st.Blocking, st.Works = false, true
	st.Message = fmt.Sprintf("slot, publication and tables could not be looked at since %s: %v", s.looks.failingSince.UTC().Format(time.RFC3339), err)
	switch {
	case s.looks.seenAt.IsZero():
		st.Message += "; they have not been looked at before"
	case now.Sub(s.looks.seenAt) < looksStale:
		st.Message += "; the last look found: " + s.looks.seen
	default:
		st.Message += "; what the metrics of the slot show is out of date, and what it keeps on the server's disk is not known"
	}
	s.cfg.Report(st)
}

func (s *Source) every(ctx context.Context, look func()) {
	s.cfg.Metrics.slot.looked.CompareAndSwap(0, time.Now().UnixNano()) // the age of none is that of the wait for the first
	defer s.cfg.Metrics.slot.looked.Store(0)                           // between two attempts the checks say what is wrong
	turn := time.NewTicker(watchInterval)
	defer turn.Stop()
	for {
		look()
		select {
		case <-turn.C:
		case <-ctx.Done():
			return
		}
	}
}

// showSlot reads the slot's state into metrics.
func (s *Source) showSlot(ctx context.Context, conn *pgx.Conn) (*slotState, error) {
	slot, err := readSlot(ctx, conn, s.cfg.Slot)
	if err == nil && slot == nil {
		err = s.slotDropped()
	}
	if err != nil {
		return nil, err
	}
	m := s.cfg.Metrics
	m.slotRetained.Set(float64(slot.retained))
	m.setSlotStatus(slot.status)
	m.slotSafe.Reset()
	if slot.safe != nil {
		m.slotSafe.WithLabelValues().Set(float64(*slot.safe))
	}
	m.slotActive.Set(0)
	if slot.active {
		m.slotActive.Set(1)
	}
	m.slot.spilledTransactions.Store(slot.spilledTransactions)
	m.slot.spilledBytes.Store(slot.spilledBytes)
	if err := slot.usable(s.cfg.Slot); err != nil {
		return nil, &unusableSlotError{err}
	}
	return slot, nil
}

// slotStatus adds a look to the slot's course, and says how it is doing.
func (s *Source) slotStatus(slot *slotState) Status {
	m := s.cfg.Metrics
	growth, left := s.slotCourse(slot)
	m.slot.growth.Set(growth)
	m.slot.left.Reset()
	if left > 0 {
		m.slot.left.WithLabelValues().Set(left.Seconds())
	}
	return slot.report(s.cfg.Failover, growth, left)
}

// slotCourse adds a look to the slot's course.
func (s *Source) slotCourse(slot *slotState) (growth float64, left time.Duration) {
	s.courseMu.Lock()
	defer s.courseMu.Unlock()
	return s.course.add(time.Now(), slot.retained, slot.safe)
}

// When a slot counts as in danger: so little time at this pace, or so small a
// part of what the server keeps.
const (
	dangerTime  = 30 * time.Minute
	dangerShare = 0.1
)

// report says how a slot that can serve is doing.
func (st *slotState) report(wantsFailover bool, growth float64, left time.Duration) Status {
	r := Status{Check: CheckSlot, OK: true, Message: st.String()}
	if growth > 0 {
		r.Message += fmt.Sprintf(", growing by %s a second", BytesText(int64(growth)))
	}
	if left > 0 {
		r.Message += fmt.Sprintf(", about %s left at this pace", left.Round(time.Second))
	}
	const mend = "make the destination catch up, or raise max_slot_wal_keep_size and SELECT pg_reload_conf()"
	switch {
	case st.status == "unreserved":
		r.OK, r.Hint = false, "the server is about to remove WAL that the slot needs: "+mend
	case left > 0 && left < dangerTime, st.safe != nil && float64(*st.safe) < dangerShare*float64(*st.safe+st.retained):
		r.OK, r.Hint = false, "the slot will soon be lost: "+mend
	case st.syncState == "sync" || st.syncState == "quorum":
		r.OK = false
		r.Message += "; the server takes pgsource for a synchronous standby, so commits wait for Feldera"
		r.Hint = "name the standbys in synchronous_standby_names instead of *"
	case wantsFailover && !st.failover:
		r.OK = false
		r.Message += "; it is no failover slot, although PGSOURCE_SLOT_FAILOVER is true"
		r.Hint = fmt.Sprintf("stop pgsource and run over a replication connection (psql 'dbname=… replication=database'): ALTER_REPLICATION_SLOT %s (FAILOVER true)", quoteIdentifier(st.name))
	}
	return r
}

// watchPipeline looks at the pipeline from time to time, so that an idle
// source notices that it is gone, paused or another one.
func (a *attempt) watchPipeline(work context.Context) {
	a.s.every(work, func() {
		stats, err := a.s.cfg.Pipeline.Stats(work)
		switch {
		case work.Err() != nil:
		case err != nil:
			a.s.reportFailure(CheckPipeline, fmt.Errorf("ask the pipeline for its state: %w", err))
		case stats.Incarnation != a.s.cfg.Pipeline.Expected():
			a.fail(&feldera.IncarnationChanged{Was: a.s.cfg.Pipeline.Expected(), Now: stats.Incarnation})
		default:
			a.stalled.Store(stats.Stalled())
			st := Status{Check: CheckPipeline, OK: stats.State == pipelineRunning, Message: "the pipeline is " + stats.State}
			switch {
			case !st.OK:
				st.Hint = "resume the pipeline; rows wait and the LSN does not move meanwhile"
			case stats.Transaction.Open() && a.isOurs(&stats.Transaction):
				st.Message = "our " + stats.Transaction.String()
			case stats.Transaction.Open():
				st.OK, st.Message = false, "blocked: "+stats.Transaction.String()
				st.Hint = "whoever opened it must commit it, or a person who knows that nobody will (pgsource feldera-transaction show); the LSN does not move meanwhile"
			}
			a.s.cfg.Report(st)
		}
	})
}

// pipelineRunning is the engine's name for a pipeline that takes input.
const pipelineRunning = "Running"
