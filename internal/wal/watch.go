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
// connection of its own. What it finds wrong for good ends the attempt.
func (a *attempt) watch(work context.Context) {
	a.s.every(work, func() {
		err := a.s.look(work, func(ctx context.Context, conn *pgx.Conn) error {
			slot, err := a.s.showSlot(ctx, conn)
			if err != nil {
				return err
			}
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
		var refused *decode.Refusal
		if errors.As(err, &refused) && refused.Reason == decode.ReasonGap && work.Err() == nil {
			a.s.reportFailure(CheckSlot, err)
			a.fail(err)
		}
	})
}

// WatchSlot keeps looking at the slot until ctx ends, for a daemon that waits
// for a person: the slot goes on keeping WAL on the server's disk meanwhile.
func (s *Source) WatchSlot(ctx context.Context) {
	s.streamsNowhere()
	s.every(ctx, func() {
		_ = s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error { // shown by showSlot
			_, err := s.showSlot(ctx, conn)
			return err
		})
	})
}

func (s *Source) every(ctx context.Context, look func()) {
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

// showSlot reads the slot's state into metrics and the check "slot".
func (s *Source) showSlot(ctx context.Context, conn *pgx.Conn) (*slotState, error) {
	slot, err := readSlot(ctx, conn, s.cfg.Slot)
	if err == nil && slot == nil {
		err = s.slotDropped()
	}
	if err != nil {
		s.reportFailure(CheckSlot, err)
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
	growth, left := s.slotCourse(slot)
	m.slot.growth.Set(growth)
	m.slot.left.Reset()
	if left > 0 {
		m.slot.left.WithLabelValues().Set(left.Seconds())
	}
	if err := slot.usable(s.cfg.Slot); err != nil {
		s.reportFailure(CheckSlot, err)
		return nil, err
	}
	s.cfg.Report(slot.report(s.cfg.Failover, growth, left))
	return slot, nil
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
