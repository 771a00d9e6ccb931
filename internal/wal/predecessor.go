package wal

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/internal/feldera"
	"holdfast/internal/sabotage"
)

// outliveOthers waits, once in the life of this process, until no request of
// the process before can still be applied.
//
// The race it is against: the process before sends version 1 of a row, the
// manager passes the request on slowly, and the process is killed. This one
// replays version 1, sends version 2, and both are completed and acknowledged.
// Then the old request arrives, and the row is version 1 again until it
// changes the next time: a wrong row that nobody notices.
//
// Nobody waits where the record says that everything sent was acknowledged (a
// stop in order), or where this process has made the slot. A pipeline that is
// another process by now makes no difference: the manager may pass an old
// request on to it.
//
// sent is the record as it stands, and not bounded by the server's position: a
// standby that was promoted, or that lags, may be below what was sent from
// another server.
func (d *deliverer) outliveOthers(work context.Context, sent uint64) error {
	s := d.a.s
	if s.alone.Load() || s.madeSlot.Load() || sabotage.On(sabotage.StartWithoutWait) {
		s.alone.Store(true)
		return nil
	}
	st, err := s.keeper.get(work)
	if err != nil {
		return err
	}
	_, none := s.keeper.store.(noStore)
	switch {
	case none, st == nil: // somebody may have sent anything
	case sent <= d.a.start && st.copiesQuiet():
		s.alone.Store(true)
		return nil
	}
	if err := d.outlive(work, s.began, "a request of the process before may still be applied, and must not overtake what is sent again"); err != nil {
		return err
	}
	s.alone.Store(true)
	return nil
}

// outliveRequests waits until no request of this process to begin or to commit a
// transaction of the pipeline can still be applied. An attempt that ended while it
// waited for the outcome leaves that to the next one.
//
// The race it is against: a commit gets no answer, and the pipeline's process is
// another one; the attempt ends; the next one opens a transaction and sends half
// of its rows; the commit, which the manager has passed on, makes them visible.
//
// The pipeline has just answered: the wait begins now, since a process that stood
// still until then may have the request before it.
func (d *deliverer) outliveRequests(work context.Context) error {
	s := d.a.s
	if !s.requestOpen || sabotage.On(sabotage.CommitForgotten) {
		return nil
	}
	if err := d.outlive(work, time.Now(), "a request to begin or to commit a transaction may still be applied, and would meet what is sent"); err != nil {
		return err
	}
	s.requestOpen = false
	return nil
}

// noteOpen remembers that the outcome of a request is left open.
func (d *deliverer) noteOpen(err error) {
	if errors.Is(err, feldera.ErrOutcomeOpen) {
		d.a.s.requestOpen = true
	}
}

// outlive waits until no request that was given up at the time can be applied
// any more, and says why.
func (d *deliverer) outlive(work context.Context, given time.Time, why string) error {
	s := d.a.s
	until := given.Add(d.cfg.Pipeline.RequestLifetime())
	left := time.Until(until)
	if left > 0 {
		s.log.InfoContext(work, "waiting before anything is sent", "wait", left.Round(time.Millisecond), "why", why)
		s.cfg.Report(Status{
			Check: CheckDestination, Works: true,
			Message: fmt.Sprintf("waiting for %v: %s", left.Round(time.Second), why),
			Hint:    "it ends by itself after FELDERA_REQUEST_LIFETIME; behind a stop in order nobody waits",
		})
	}
	for left > 0 {
		d.cfg.Beat()
		if err := sleep(work, min(left, idleTurn)); err != nil {
			return err
		}
		left = time.Until(until)
	}
	s.cfg.Report(Status{Check: CheckDestination, OK: true, Message: "the pipeline has every table"})
	return nil
}
