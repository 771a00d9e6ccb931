package wal

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
)

// LoadState gives what the store holds, nil where it holds nothing. It takes
// no lock: a running pgsource is not disturbed.
func (s *Source) LoadState(ctx context.Context) (*State, error) { return s.cfg.State.Load(ctx) }

// CheckStateStore is a preflight: the store can be used, and what it holds fits
// the server, the slot and the pipeline as they are now. It changes nothing and
// takes no lock. It gives what it found to be right.
func (s *Source) CheckStateStore(ctx context.Context) (string, error) {
	if _, none := s.cfg.State.(noStore); none {
		return "none is kept: what happens to slot or pipeline while pgsource is down goes unnoticed", nil
	}
	if err := s.cfg.State.Check(ctx); err != nil {
		return "", err
	}
	st, err := s.cfg.State.Load(ctx)
	if err != nil {
		return "", err
	}
	if st == nil {
		return s.cfg.State.Where() + " can be used and holds nothing yet", nil
	}
	if err := s.ownState(st); err != nil {
		return "", err
	}
	if err := s.fence(ctx, st, &ready{}); err != nil {
		return "", err
	}
	if err := s.slotFits(ctx, st); err != nil {
		return "", err
	}
	if err := s.pipelineFits(ctx, st); err != nil {
		return "", err
	}
	return fmt.Sprintf("%s holds the bookmark %s, saved at %s", s.cfg.State.Where(), st.Acknowledged, st.Saved.UTC().Format(time.RFC3339)), nil
}

func (s *Source) slotFits(ctx context.Context, st *State) error {
	return s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		slot, err := readSlot(ctx, conn, s.cfg.Slot)
		if err != nil {
			return err
		}
		seen := s.withoutCreating()
		seen.told.Store(uint64(st.Acknowledged))
		seen.slotSeen.Store(true)
		if slot == nil {
			return seen.slotDropped()
		}
		// A running pgsource moves both; the slot was looked at last.
		if slot.active {
			return nil
		}
		return seen.sameSlot(slot)
	})
}

func (s *Source) pipelineFits(ctx context.Context, st *State) error {
	do := "start pgsource, which resyncs the tables at risk (PGSOURCE_ON_DESTINATION_LOSS=heal); or compare them (pgsource verify), and where nothing differs run: pgsource state accept -yes"
	if len(st.Notices) > 0 {
		return &decode.Refusal{
			Reason: decode.ReasonGap, What: "state", Where: s.cfg.State.Where(), Why: fmt.Sprintf("it has %d notices of a possible difference between source and pipeline", len(st.Notices)),
			Expected: "none", Do: do,
		}
	}
	if differ := s.differing(st); len(differ) > 0 {
		return &decode.Refusal{
			Reason: decode.ReasonGap, What: "state", Where: s.cfg.State.Where(), Why: describeDiffering(differ), Expected: "tables that have what the source has",
			Do: "start pgsource, then run: " + resyncOf(differ) + "; or compare them (pgsource verify), and where nothing differs run: pgsource state accept -yes",
		}
	}
	now, err := s.cfg.Pipeline.Incarnation(ctx)
	if err != nil {
		return fmt.Errorf("ask the pipeline for its incarnation: %w", err)
	}
	if s.cfg.ProgressTable != "" && st.Progress != nil && !st.Progress.Pending {
		return nil // the progress table tells, at the start
	}
	if now != st.Incarnation && (st.Rows > 0 || s.copiesInDoubt(st)) && st.Incarnation != "" {
		return &decode.Refusal{
			Reason: decode.ReasonGap, What: "pipeline", Where: "incarnation " + now,
			Why:      fmt.Sprintf("it is not the one that proved the positions (%s): rows acknowledged up to %s may be missing from it", st.Incarnation, st.Rows),
			Expected: "the same incarnation", Do: do,
		}
	}
	return nil
}

// Reset is what ResetState has done.
type Reset struct {
	// Before is nil where there was no state; Unreadable says why, where there
	// was one that could not be read.
	Before     *State
	Unreadable error
	After      *State
	// Transaction is the pipeline's open transaction that the state before names
	// as this pgsource's; nil for none, or where the pipeline did not answer.
	// Foreign is one that it does not name.
	Transaction, Foreign *FelderaTransaction
	// PipelineAsked is false where the pipeline did not answer: its incarnation
	// is then taken over at the next start.
	PipelineAsked bool
}

// ResetState makes the slot's present position the bookmark. Whatever the
// stream has left out before it is the caller's to have loaded.
func (s *Source) ResetState(ctx context.Context) (*Reset, error) {
	if _, none := s.cfg.State.(noStore); none {
		return nil, errNoState()
	}
	var done Reset
	r := &ready{}
	if err := s.fence(ctx, nil, r); err != nil {
		return nil, err
	}
	var slot *slotState
	err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		slot, err = readSlot(ctx, conn, s.cfg.Slot)
		return err
	})
	if err != nil {
		return nil, err
	}
	if slot == nil {
		return nil, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "slot", Where: s.cfg.Slot, Why: "the server has none of this name, so there is no position to go on from",
			Expected: "the slot that pgsource is to read",
			Do:       fmt.Sprintf("run: SELECT pg_create_logical_replication_slot(%s, 'pgoutput'); then %s", quoteLiteral(s.cfg.Slot), wayBack),
		}
	}
	if err := slot.usable(s.cfg.Slot); err != nil {
		return nil, err
	}
	st := &State{
		System: r.identity.system, Timeline: r.identity.timeline, Database: r.identity.database, Slot: s.cfg.Slot, Publication: s.cfg.Publication,
		Acknowledged: LSN(slot.confirmed), Rows: LSN(slot.confirmed), Sent: LSN(slot.confirmed),
	}
	if st.Incarnation, err = s.cfg.Pipeline.Incarnation(ctx); err == nil {
		done.PipelineAsked = true
	}
	err = s.changeState(ctx, func(before *State, unreadable error) *State {
		done.Before, done.Unreadable = before, unreadable
		if before != nil {
			st.follow(before)
		}
		return st
	})
	done.After = st
	if err == nil && done.PipelineAsked {
		if tx, lookErr := s.ShowFelderaTransaction(ctx); lookErr == nil && tx.Open {
			if tx.Ours {
				done.Transaction = tx
			} else {
				done.Foreign = tx
			}
		}
	}
	return &done, err
}

// follow keeps of the state before a reset what holds behind it too.
func (st *State) follow(before *State) {
	st.Sequence = before.Sequence
	if before.System == st.System {
		st.Sent = max(st.Sent, before.Sent)
	}
	if !before.copiesQuiet() {
		// Copied rows may be on their way, and the new state knows of no copies: the
		// next start waits them out as rows of the stream.
		st.Sent = max(st.Sent, st.Acknowledged+1)
	}
	if before.Intent != nil {
		// It is about the pipeline, not about the source. Of another cluster nothing
		// more can be sent into it: its positions mean nothing here.
		in := *before.Intent
		if before.System != st.System {
			in.Through = 0
		}
		st.Intent = &in
	}
}

// Accepted is what AcceptState has done.
type Accepted struct {
	Notices   []Notice
	Differing []DifferingTable
	// Was and Now are the incarnations, "" where the same one still runs.
	Was, Now string
}

// AcceptState says that a person has looked after what the state gives notice
// of, and that the pipeline as it runs now holds what it should.
func (s *Source) AcceptState(ctx context.Context) (*Accepted, error) {
	if _, none := s.cfg.State.(noStore); none {
		return nil, errNoState()
	}
	now, err := s.cfg.Pipeline.Incarnation(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask the pipeline for its incarnation, which is what is accepted: %w", err)
	}
	var done Accepted
	err = s.changeState(ctx, func(before *State, _ error) *State {
		if before == nil || (len(before.Notices) == 0 && len(before.Differing) == 0 && before.Incarnation == now) {
			return nil
		}
		after := before.clone()
		done.Notices, after.Notices = before.Notices, nil
		done.Differing, after.Differing = before.Differing, nil
		if before.Incarnation != now {
			done.Was, done.Now, after.Incarnation = before.Incarnation, now, now
		}
		return after
	})
	return &done, err
}

// changeState takes the store, which a running pgsource prevents, and saves
// what change makes of it; nil saves nothing. What cannot be read is passed as
// unreadable if change is to replace it, which only a change from nothing can.
func (s *Source) changeState(ctx context.Context, change func(before *State, unreadable error) *State) (err error) {
	store := s.cfg.State
	if err := store.Acquire(ctx); err != nil {
		return err
	}
	defer func() {
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveTimeout)
		defer cancel()
		err = errors.Join(err, store.Release(rctx))
	}()
	before, unreadableErr := store.Load(ctx)
	if unreadableErr != nil && !errors.Is(unreadableErr, errStateUnreadable) {
		return unreadableErr
	}
	after := change(before, unreadableErr)
	if after == nil {
		return unreadableErr
	}
	after.Sequence++
	after.Saved, after.Writer = time.Now().UTC(), thisProcess()
	return store.Save(ctx, after)
}

func errNoState() error {
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "state", Why: "PGSOURCE_STATE says that none is kept", Expected: "a file or a table",
		Do: "set PGSOURCE_STATE to what the daemon uses",
	}
}

// StateWhere names the store for people.
func (s *Source) StateWhere() string { return s.cfg.State.Where() }
