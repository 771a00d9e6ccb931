package wal

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

const (
	// sentStep is how far State.Sent runs ahead of what is sent: one save for
	// so much WAL, instead of one for each request.
	sentStep = 16 << 20
	// saveTimeout bounds one save in a table.
	saveTimeout = 15 * time.Second
	// lastSaveTimeout bounds how long a stop waits for a store that fails.
	lastSaveTimeout = 10 * time.Second
)

// keeper holds the state of one source: what is durable, and the one way to
// change it. It outlives attempts and connections.
//
// Its methods may be called by any goroutine; saves happen one at a time.
type keeper struct {
	s     *Source
	store StateStore
	// turn is held by whoever changes the state. It is a channel so that nobody
	// waits for a hanging disk after a stop.
	turn chan struct{}
	// st is what the last save that succeeded made durable; nil before the
	// first. What it points to is never changed.
	st atomic.Pointer[State]
	// failing: the last save failed, and the check says so.
	failing atomic.Bool
	// inherited is the Sent of the process before, sent the highest position
	// that this one has let pass: together they are what Sent must bound.
	inherited, sent atomic.Uint64
	// ahead is the durable Sent, for a look without the turn.
	ahead atomic.Uint64
}

// openKeeper takes the store and reads it, trying again until that succeeds,
// is refused, or ctx ends.
func (s *Source) openKeeper(ctx context.Context) (*keeper, error) {
	k := &keeper{s: s, store: s.cfg.State, turn: make(chan struct{}, 1)}
	err := k.insist(ctx, func() error {
		if err := k.store.Acquire(ctx); err != nil {
			return err
		}
		st, err := k.store.Load(ctx)
		if err == nil && st != nil {
			err = s.ownState(st)
		}
		k.st.Store(st)
		return err
	})
	if err != nil {
		k.close(ctx)
		return nil, err
	}
	k.reportStore()
	if st := k.st.Load(); st != nil {
		k.inherited.Store(uint64(st.Sent))
		k.ahead.Store(uint64(st.Sent))
		s.told.Store(uint64(st.Acknowledged))
		s.slotSeen.Store(true)
		s.cfg.Pipeline.Expect(st.Incarnation)
		s.log.InfoContext(ctx, "state read", "store", k.store.Where(), "lsn", st.Acknowledged.String(), "timeline", st.Timeline, "saved_at", st.Saved)
		s.reportNotices(st)
	}
	return k, nil
}

// ownState refuses a state that is about something else than this source.
func (s *Source) ownState(st *State) error {
	refuse := func(what, has, want, setting string) error {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "state", Where: s.cfg.State.Where(),
			Why:      fmt.Sprintf("it is about %s %q, and this pgsource reads %q", what, has, want),
			Expected: "the state of this slot and publication",
			Do:       "correct " + setting + " or PGSOURCE_STATE; to go on with this state under the new name, " + wayBack,
		}
	}
	switch {
	case st.Slot != s.cfg.Slot:
		return refuse("slot", st.Slot, s.cfg.Slot, "PGSOURCE_SLOT")
	case st.Publication != s.cfg.Publication:
		return refuse("publication", st.Publication, s.cfg.Publication, "PGSOURCE_PUBLICATION")
	}
	return nil
}

// insist does something with the store until it succeeds, is refused, or ctx
// ends; meanwhile the check "state store" says what fails.
func (k *keeper) insist(ctx context.Context, do func() error) error {
	retry := newBackOff()
	for attempt := 1; ; attempt++ {
		k.s.cfg.Beat()
		err := do()
		if err == nil {
			return nil
		}
		k.reportFailing(ctx, err)
		var refused *decode.Refusal
		if errors.As(err, &refused) {
			return err
		}
		k.s.cfg.Metrics.retries.WithLabelValues("state").Inc()
		if sleepErr := sleep(ctx, retry.NextBackOff()); sleepErr != nil {
			return errors.Join(sleepErr, err)
		}
	}
}

// get gives the durable state, nil where there is none yet.
func (k *keeper) get(ctx context.Context) (*State, error) { return k.st.Load(), ctx.Err() }

// update saves a changed state, once. change gets a copy and tells whether
// there is anything to save; when update returns nil, what it made is durable.
func (k *keeper) update(ctx context.Context, change func(next *State) bool) error {
	select {
	case k.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-k.turn }()
	next := new(State)
	before := k.st.Load()
	if before != nil {
		next = before.clone()
	}
	if !change(next) {
		return nil
	}
	if before != nil {
		if err := before.follows(next); err != nil {
			return err
		}
	}
	next.Sequence++
	next.Saved, next.Writer = time.Now().UTC(), thisProcess()
	began := time.Now()
	sctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	if err := k.store.Save(sctx, next); err != nil {
		k.s.cfg.Metrics.stateFailures.Inc()
		return err
	}
	k.s.cfg.Metrics.stateSeconds.Observe(time.Since(began).Seconds())
	k.st.Store(next)
	k.ahead.Store(uint64(next.Sent))
	if k.failing.Load() {
		k.reportStore()
	}
	return nil
}

// must is update, again and again until it succeeds, is refused, or ctx ends.
func (k *keeper) must(ctx context.Context, change func(next *State) bool) error {
	return k.insist(ctx, func() error { return k.update(ctx, change) })
}

// beforeSend makes sure that the state knows of everything that may have been
// sent once rows up to end are. It saves nothing as long as Sent is ahead. One
// goroutine, the deliverer, calls it.
func (k *keeper) beforeSend(ctx context.Context, end uint64) error {
	k.sent.Store(max(k.sent.Load(), end))
	if end <= k.ahead.Load() {
		return nil
	}
	return k.must(ctx, func(next *State) bool {
		if next.Sent >= LSN(end) {
			return false
		}
		next.Sent = LSN(end) + sentStep
		return true
	})
}

// boundInherited lowers what the process before may have sent to where the
// server's WAL ended when this one looked: nothing above it can have been.
func (k *keeper) boundInherited(end LSN) {
	for {
		inherited := k.inherited.Load()
		if inherited <= uint64(end) || k.inherited.CompareAndSwap(inherited, uint64(end)) {
			return
		}
	}
}

// exactlySent gives the tightest bound of what was sent that is known: that of
// the process before counts until everything up to it is acknowledged.
func (k *keeper) exactlySent(acknowledged LSN) LSN {
	sent := max(acknowledged, LSN(k.sent.Load()))
	if inherited := LSN(k.inherited.Load()); inherited > acknowledged {
		sent = max(sent, inherited)
	}
	return sent
}

// Intent gives the transaction that was recorded last, the zero Intent for
// none: see IntentStore.
func (k *keeper) Intent() Intent {
	st := k.st.Load()
	if st == nil || st.Intent == nil {
		return Intent{}
	}
	in := st.Intent
	return Intent{Incarnation: in.Incarnation, ID: in.ID, Through: uint64(in.Through)}
}

// RecordIntent makes an intent durable: see IntentStore.
func (k *keeper) RecordIntent(ctx context.Context, in Intent) error {
	if in == (Intent{}) {
		return k.must(ctx, func(next *State) bool {
			was := next.Intent != nil
			next.Intent = nil
			return was
		})
	}
	own := storedIntent{Incarnation: in.Incarnation, ID: in.ID, Through: LSN(in.Through)}
	return k.must(ctx, func(next *State) bool {
		if next.Intent != nil && *next.Intent == own {
			return false
		}
		next.Intent = &own
		return true
	})
}

// close gives the store back.
func (k *keeper) close(ctx context.Context) {
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveTimeout)
	defer cancel()
	if err := k.store.Release(rctx); err != nil {
		k.s.log.WarnContext(ctx, "the state store was not given back in order", "err", err)
	}
}

func (k *keeper) reportStore() {
	k.failing.Store(false)
	message := "positions are saved in " + k.store.Where()
	if _, none := k.store.(noStore); none {
		message = "no state is kept: what happens to the slot or the pipeline while pgsource is down goes unnoticed"
		if k.s.cfg.StateByDefault {
			k.s.log.Warn("no state is kept, since PGSOURCE_STATE is not set and its default folder is not there")
			k.s.cfg.Report(Status{Check: CheckStore, Works: true, Message: message, Hint: "set PGSOURCE_STATE to a file or a table, or to none to accept this"})
			return
		}
	}
	k.s.cfg.Report(Status{Check: CheckStore, OK: true, Message: message})
}

func (k *keeper) reportFailing(ctx context.Context, err error) {
	if !k.failing.Swap(true) {
		k.s.log.WarnContext(ctx, "the state store fails: nothing is acknowledged until it works again", "store", k.store.Where(), "err", err)
	}
	st := Status{
		Check: CheckStore, Message: err.Error(),
		Hint: "mend " + k.store.Where() + "; it is tried again until it works, and the LSN does not move meanwhile",
	}
	var refused *decode.Refusal
	if errors.As(err, &refused) {
		st.Blocking, st.Hint = true, refused.Do
	}
	k.s.cfg.Report(st)
}

// destinationRestarted says what a change of incarnation means. What was not
// confirmed is delivered again by the next attempt; what was confirmed may be
// gone, and only a person can know. Where nothing that brought rows was
// confirmed, nothing can be.
func (s *Source) destinationRestarted(ctx context.Context, changed *feldera.IncarnationChanged) error {
	s.cfg.Metrics.incarnations.Inc()
	s.log.WarnContext(ctx, "the pipeline is another incarnation: unconfirmed transactions are delivered again", "was", changed.Was, "now", changed.Now)
	s.restarted.Store(true)
	err := s.keeper.must(ctx, func(next *State) bool {
		if next.System == "" {
			return false // nothing was ever acknowledged
		}
		next.Incarnation = changed.Now
		// The progress table tells whether anything is lost, where it was used.
		recorded := s.effectivelyOnce() && next.Progress != nil && !next.Progress.Pending
		if (next.Rows > 0 && !recorded) || s.copiesInDoubt(next) {
			s.log.ErrorContext(ctx, "transactions that were confirmed before may be lost from the pipeline", "lsn", next.Acknowledged.String())
			next.notice(Notice{Kind: NoticeIncarnation, Was: changed.Was, Now: changed.Now, To: next.Acknowledged, Noticed: time.Now().UTC(), Tables: s.tableNames()})
		}
		return true
	})
	if err != nil {
		return err
	}
	st, err := s.keeper.get(ctx)
	if err != nil {
		return err
	}
	s.cfg.Pipeline.Expect(changed.Now)
	if st == nil {
		return nil
	}
	s.reportNotices(st)
	return s.stopOnLoss(st)
}
