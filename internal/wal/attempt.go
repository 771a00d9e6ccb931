package wal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/ack"
	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/sabotage"
)

// attempt is one life of the whole path under one incarnation of the
// pipeline: it starts at what the source was told, and ends at a stop, a
// refusal or a change of incarnation. Connections to Postgres come and go
// inside it: the ledger and the queue outlive them, so nothing that is in
// flight is read twice.
type attempt struct {
	s     *Source
	ready *ready
	queue *queue
	// start is what was acknowledged when the attempt began.
	start uint64

	mu sync.Mutex
	// ledger is guarded by mu, since reader, deliverer, poller and status
	// goroutines all touch it.
	ledger *ack.Ledger[uint64]
	// walEnd is the server's position as last heard.
	walEnd uint64

	// stalled is what the pipeline's statistics say about why nothing
	// completes: a string.
	stalled atomic.Value
	// ours is the Feldera transaction that this process opened last; nil before.
	ours atomic.Pointer[ourTransaction]
	// pressed: what was received is to be delivered before any more is read.
	pressed atomic.Bool
	// wanted is the position up to which the deliverer must have received before
	// it acknowledges anything, 0 for none.
	wanted atomic.Uint64

	// merge brings copied rows and the stream together, chunk is what was read
	// last.
	merge *merge
	chunk atomic.Pointer[chunk]

	proven   signal // the ledger may have something to acknowledge
	progress signal // the bookmark has moved: the server can be told
	// drained is closed when the deliverer has ended: nothing more can become
	// completed. settled is closed when the bookmark of that is durable too, or
	// cannot be made so.
	drained, settled *once
	// bookmarked is the highest position that is durable in the state store:
	// all that the server may be told. Guarded by mu.
	bookmarked uint64
	// load is what the deliverer took on last. What it points to is not
	// changed. Guarded by mu.
	load *load
	// truncations are the TRUNCATEs that were received, until foreseen, which may
	// lie in what is sent again. Guarded by mu.
	truncations []truncation
	foreseen    bool
	// produced are the ends of batches that brought rows and are not yet
	// acknowledged, in order; it is as long as the ledger at most. Guarded by
	// mu.
	produced []uint64
	// rowEpoch and rowIncarnation name the progress rows that this attempt
	// writes; 0 where it writes none. Guarded by mu.
	rowEpoch       int64
	rowIncarnation string

	// peeker reads where the transport is TransportPeek. It belongs to the
	// goroutine of connections.
	peeker *peeker

	// highest is the end of the last batch that was completed, whatever was
	// before it: a wrong build acknowledges it. Guarded by mu.
	highest uint64

	failure error                   // guarded by mu
	stop    context.CancelCauseFunc // ends reading and delivering
	halt    context.CancelCauseFunc // ends everything, at once
}

// attempt runs the path. acknowledged tells whether anything was acknowledged
// in it: that is progress, which a mere connection is not.
func (s *Source) attempt(ctx context.Context, r *ready) (acknowledged bool, err error) {
	if s.spill != nil {
		s.spill.reset() // of the attempt before, which nobody reads any more
	}
	a := &attempt{
		s: s, ready: r, queue: newQueue(s.cfg.MemoryLimit, s.spill), start: r.confirmed,
		ledger: ack.New(r.confirmed), bookmarked: r.confirmed,
		proven: newSignal(), progress: newSignal(), drained: newOnce(), settled: newOnce(),
		merge: newMerge(s.cfg.ChunkBytes),
	}
	// Two contexts: work ends at a stop, hard ends when nothing is left to
	// wait for. What must still run after a stop (waiting for evidence,
	// telling the server) hangs on hard.
	hard, halt := context.WithCancelCause(context.WithoutCancel(ctx))
	defer halt(nil)
	work, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	a.stop, a.halt = stop, halt
	s.current.Store(a)

	completions := s.cfg.Pipeline.NewCompletions(feldera.CompletionsOptions{})
	var deliverer, others sync.WaitGroup
	var durability *feldera.Durability
	if s.cfg.AckOn == ack.Durable {
		durability = s.cfg.Pipeline.NewDurability(feldera.DurabilityOptions{})
		others.Go(func() {
			if err := durability.Run(hard); err != nil && hard.Err() == nil {
				a.fail(err)
			}
		})
	}
	d := newDeliverer(a, completions, durability)
	others.Go(func() {
		if err := completions.Run(hard); err != nil && hard.Err() == nil {
			a.fail(err)
		}
	})
	others.Go(func() { a.keepBookmark(hard) })
	others.Go(func() { a.watch(work) })
	others.Go(func() { a.copyTables(work, hard, d) })
	others.Go(func() { a.watchPipeline(work) })
	if s.cfg.StopNow != nil {
		others.Go(func() {
			select {
			case <-s.cfg.StopNow:
				s.cfg.Pipeline.Halt()
				a.halt(errors.New("stopped at once, without waiting for evidence"))
				a.stop(nil)
			case <-hard.Done():
			}
		})
	}
	deliverer.Go(func() {
		defer a.drained.close()
		if err := d.run(work, hard); err != nil {
			a.fail(err)
		}
	})
	a.connections(work, hard)
	deliverer.Wait()
	halt(nil)
	others.Wait()
	s.current.Store(nil)

	l := a.underWay()
	a.mu.Lock()
	defer a.mu.Unlock()
	acknowledged = a.ledger.Acknowledged() > a.start
	var changed *feldera.IncarnationChanged
	var again *replayError
	failed := (errors.As(a.failure, &changed) || errors.As(a.failure, &again)) && ctx.Err() == nil
	if failed {
		if refused := s.struggle.copyFailed(d.copiesUnderWay(), a.failure); refused != nil {
			s.reportFailure(CheckSnapshot, refused)
			return acknowledged, refused
		}
	}
	if failed && !acknowledged && l != nil {
		if refused := s.struggle.attemptFailed(l, a.failure); refused != nil {
			s.reportFailure(CheckDestination, refused)
			return false, refused
		}
	}
	return acknowledged, a.failure
}

// fail records the first failure and stops the work; nil only stops it. A
// change of incarnation leaves nothing to wait for; after a refusal, what was
// accepted before may still be completed and acknowledged.
func (a *attempt) fail(err error) {
	a.mu.Lock()
	if a.failure == nil {
		a.failure = err
	}
	a.mu.Unlock()
	var changed *feldera.IncarnationChanged
	if errors.As(err, &changed) || errors.Is(err, errOtherServer) {
		a.halt(err)
	}
	a.stop(err)
}

// connections keeps one replication connection after the other until work
// ends; it returns when the last one has told the server what completed.
func (a *attempt) connections(work, hard context.Context) {
	retry := newBackOff()
	seen := a.start
	for attempt := 1; ; attempt++ {
		var err error
		if a.s.cfg.Transport == TransportPeek {
			err = a.peekConnection(work, hard)
		} else {
			err = a.connection(work, hard)
		}
		crash.Here(crash.PgReconnect)
		if work.Err() != nil {
			a.lastWord(hard)
			return
		}
		var refused *decode.Refusal
		switch {
		case errors.As(err, &refused):
			err = a.placed(err, refused)
			a.s.reportFailure(CheckSource, err)
			// What was received before it is not to blame: it is delivered
			// first, if the destination takes it.
			if a.waitDelivered(work) {
				a.fail(err)
			}
			a.lastWord(hard)
			return
		case errors.Is(err, errOtherServer):
			a.fail(err)
			return
		case errors.Is(err, errMemory):
			a.s.cfg.Metrics.backpressure.Inc()
			a.s.log.WarnContext(work, "stream closed on purpose until the destination has caught up: the slot keeps its position", "err", err, "buffered_bytes", a.queue.held())
			a.s.phaseConnecting()
			a.s.cfg.Report(Status{
				Check: CheckSource, Message: "disconnected on purpose, since the destination is slower than the source: " + err.Error(),
				Hint: "look at the check \"destination\"; the slot retains WAL meanwhile",
			})
			if !a.waitDelivered(work) {
				a.lastWord(hard)
				return
			}
			continue
		}
		// Progress is what counts as success, not a connection.
		a.mu.Lock()
		acknowledged, received := a.ledger.Acknowledged(), a.ledger.Last()
		a.mu.Unlock()
		if acknowledged > seen {
			seen, attempt = acknowledged, 1
			retry.Reset()
		}
		if refused := a.s.struggle.streamFailed(received, err); refused != nil {
			a.s.reportFailure(CheckSource, refused)
			if a.waitDelivered(work) {
				a.fail(refused)
			}
			a.lastWord(hard)
			return
		}
		wait := waitFor(err, retry.NextBackOff())
		a.s.cfg.Metrics.retries.WithLabelValues("stream").Inc()
		a.s.phaseConnecting()
		a.s.reportFailure(CheckSource, err)
		a.s.log.WarnContext(work, "no replication connection, trying again", "err", err, "attempt", attempt, "wait", wait)
		if sleep(work, wait) != nil {
			a.lastWord(hard)
			return
		}
	}
}

// waitDelivered waits until everything that was received is accepted; false
// when work ended first.
func (a *attempt) waitDelivered(work context.Context) bool {
	a.pressed.Store(true)
	a.queue.arrived.set() // the deliverer must not wait for more
	for a.queue.held() > 0 {
		select {
		case <-a.queue.emptied:
		case <-work.Done():
			return false
		}
	}
	return true
}

// lastWord tells the server what has completed since the last connection
// ended, over one made for this. Without it a stop while disconnected would
// leave finished work to be done again.
func (a *attempt) lastWord(hard context.Context) {
	a.fail(nil) // nothing new is begun; a failure that came before stays
	select {
	case <-a.settled.ch:
	case <-hard.Done():
		return
	}
	crash.Here(crash.PgShutdownLastWord)
	a.mu.Lock()
	more := a.bookmarked > a.ledger.Acknowledged()
	from := a.ledger.Last()
	a.mu.Unlock()
	if !more || hard.Err() != nil {
		return
	}
	var err error
	if a.s.cfg.Transport == TransportPeek {
		err = a.lastAdvance(hard)
	} else {
		err = a.lastStatus(hard, from)
		if _, failed := errors.AsType[*pgconn.PgError](err); failed {
			// The server cannot decode what is next, and says so before it has read what
			// it was to be told. To advance a slot it calls no plug-in.
			err = a.lastAdvance(hard)
		}
	}
	if err != nil {
		a.s.log.WarnContext(hard, "the server could not be told of what completed after the connection ended: the next start tells it what is in the state, and delivers the rest again", "err", err)
	}
}

// lastStatus is lastWord's for TransportStream.
func (a *attempt) lastStatus(hard context.Context, from uint64) error {
	conn, err := a.s.reachStream(hard, a.ready, from)
	if err != nil {
		return err
	}
	defer a.s.streamsNowhere()
	st, err := a.s.startStream(hard, conn, from)
	if err != nil {
		return err
	}
	defer func() { _ = st.conn.Close() }()
	if err := a.acknowledge(st, false); err != nil {
		return err
	}
	return st.sayGoodbye(time.Now())
}

// connection runs one replication connection. At a stop it keeps telling the
// server what completes until the deliverer has ended, then closes in good
// order.
func (a *attempt) connection(work, hard context.Context) error {
	conn, err := a.s.reachStream(work, a.ready, a.received())
	if err != nil {
		return err
	}
	defer a.s.streamsNowhere()
	if err := a.s.look(work, a.verify); err != nil {
		_ = conn.Close(context.WithoutCancel(work))
		return err
	}
	if sabotage.On(sabotage.DropBuffer) {
		a.dropReceived()
	}
	a.mu.Lock()
	from := a.ledger.Last()
	a.mu.Unlock()
	st, err := a.s.startStream(work, conn, from)
	if err != nil {
		return err
	}
	a.s.log.InfoContext(work, "streaming", "slot", a.s.cfg.Slot, "lsn", decode.FormatLSN(from))
	a.s.phaseStreaming()
	a.s.cfg.Report(Status{Check: CheckSource, OK: true, Message: "streaming from slot " + a.s.cfg.Slot})

	// The reader is interrupted at a stop; the socket closes at a halt.
	defer context.AfterFunc(work, st.interrupt)()
	defer context.AfterFunc(hard, func() { _ = st.conn.Close() })()
	defer func() { _ = st.conn.Close() }()

	gone := newOnce() // the connection is of no use any more
	asked := newSignal()
	var status sync.WaitGroup
	var statusErr error
	status.Go(func() {
		if statusErr = a.status(hard, st, asked, gone.ch); statusErr != nil {
			st.interrupt() // a connection that cannot be written to is over
		}
	})
	looking, seen := context.WithCancel(work)
	defer seen()
	status.Go(func() { a.lookAgain(looking) })
	err = a.read(work, st, asked)
	if err != nil {
		err = &streamError{err}
		_ = st.conn.Close() // a last status update would wait for a dead peer
	}
	if err == nil {
		select {
		case <-a.settled.ch:
		case <-hard.Done():
		}
	}
	gone.close()
	seen()
	status.Wait()
	if err == nil {
		err = statusErr
	}
	if work.Err() != nil && statusErr == nil && hard.Err() == nil {
		_ = st.sendDone(time.Now()) // a courtesy; the connection closes anyway
	}
	return err
}

// read is the reader: it takes what the server sends and never waits for the
// destination. A client that stops reading can freeze the primary: the
// checkpointer waits for a walsender that cannot write to our socket. So when
// memory is used up, it leaves instead.
//
// It returns nil only when work has ended.
func (a *attempt) read(work context.Context, st *stream, asked signal) error {
	asm := newAssembler(a.s.cfg.MemoryLimit, a.queue.buffers, a.s.spill)
	defer asm.drop()
	a.s.cfg.Metrics.buffered.Set(float64(a.queue.held()))
	var shutdown shutdownWatch
	for {
		msg, err := st.read(a.s.cfg.StallTimeout)
		if work.Err() != nil {
			return nil
		}
		if err != nil {
			var netErr net.Error
			if errors.As(err, &netErr) && netErr.Timeout() {
				return fmt.Errorf("nothing was heard from the server for %v: the connection counts as dead", a.s.cfg.StallTimeout)
			}
			var refused *decode.Refusal
			if errors.As(err, &refused) || errors.Is(err, errServerDone) {
				return err
			}
			return fmt.Errorf("read the replication stream: %w", err)
		}
		switch msg.Kind {
		case decode.CopyKeepalive:
			a.s.cfg.Metrics.slot.lag.heard(msg.ServerTime)
			a.keepalive(msg.WALEnd, asm.inTransaction())
			if msg.ReplyRequested {
				asked.set()
			}
			if shutdown.keepalive(msg, time.Now()) {
				return errShuttingDown
			}
		case decode.CopyXLogData:
			shutdown = shutdownWatch{}
			tx, err := asm.add(msg.Data, time.Now())
			if err != nil {
				return err
			}
			if tx != nil {
				a.s.cfg.Metrics.slot.lag.heard(msg.ServerTime)
				if err := a.admit(tx, msg.WALEnd); err != nil {
					return err
				}
			}
			if err := a.bounded(asm); err != nil {
				return err
			}
		}
	}
}

// bounded keeps what is received within memory: what is too much goes into the
// spill, and where that cannot take it, the connection ends.
func (a *attempt) bounded(asm *assembler) error {
	limit := a.s.cfg.MemoryLimit
	queued, open := a.queue.held(), asm.held()
	var spillErr error
	if a.s.spill != nil && queued+open > limit/2 {
		var moved int
		moved, spillErr = a.queue.relieve(limit / 4)
		if moved > 0 {
			a.s.cfg.Metrics.spilled.Add(float64(moved))
		}
		queued = a.queue.held()
		a.s.cfg.Metrics.buffered.Set(float64(queued + open))
	}
	if queued+open <= limit {
		return nil
	}
	if queued == 0 {
		return asm.tooLarge(limit)
	}
	reason := fmt.Errorf("%w: %d bytes are buffered", errMemory, queued+open)
	if spillErr = cmp.Or(asm.spillErr, spillErr); spillErr != nil {
		a.s.cfg.Metrics.spillFaults.WithLabelValues(spillFault(spillErr)).Inc()
		reason = fmt.Errorf("%w, and the spill takes no more: %w", reason, spillErr)
	}
	return reason
}

// keepalive enters a keepalive's position into the ledger, in the order in
// which it was received and only between transactions. It is acknowledged
// when everything received before it is, so an idle publication does not hold
// WAL back; it overtakes nothing.
func (a *attempt) keepalive(walEnd uint64, inTransaction bool) {
	if sabotage.On(sabotage.KeepaliveEcho) {
		a.echo(walEnd)
	}
	if !inTransaction {
		a.idleAt(walEnd)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.walEnd = max(a.walEnd, walEnd)
	a.setPositions()
}

// idleAt enters a position between transactions behind which there are no rows
// of its own.
func (a *attempt) idleAt(lsn uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.walEnd = max(a.walEnd, lsn)
	a.ledger.AdmitIdle(lsn)
	a.proven.set()
	a.queue.arrived.set() // it may be the end of what the deliverer waits for
	a.setPositions()
}

// admit enters a whole transaction into the ledger and the queue, under one
// lock, so that the two have the same order.
func (a *attempt) admit(tx *transaction, walEnd uint64) error {
	a.s.cfg.Metrics.transactions.Inc()
	a.s.cfg.Metrics.lastCommit.Set(float64(tx.commitTime.UnixMicro()) / 1e6)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.walEnd = max(a.walEnd, walEnd, tx.end)
	if tx.bytes == 0 {
		a.ledger.AdmitIdle(tx.end)
		a.proven.set()
		a.setPositions()
		return nil
	}
	ticket, err := a.ledger.Admit(tx.end)
	if err != nil {
		return &decode.Refusal{
			Reason: decode.ReasonMalformed, What: "transaction", Where: "LSN " + decode.FormatLSN(tx.end), Why: err.Error(),
			Expected: "commits in ascending order of their end",
		}
	}
	tx.ticket = ticket
	a.noteTruncations(tx)
	a.ready.noteTruncates(tx)
	a.s.cfg.Metrics.slot.lag.committed(tx.end, tx.commitTime)
	if len(tx.spilled) > 0 {
		a.s.cfg.Metrics.spilled.Inc()
	}
	a.queue.push(tx)
	crash.Here(crash.PgAdmitted)
	if sabotage.On(sabotage.AckOnReceived) {
		_ = a.ledger.Mark(ticket, ticket, a.s.cfg.AckOn)
		a.proven.set()
	}
	a.s.cfg.Metrics.buffered.Set(float64(a.queue.held()))
	a.setPositions()
	return nil
}

// received gives the highest position admitted: everything up to it was put
// into the queue before.
func (a *attempt) received() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ledger.Last()
}

// evidence enters what the destination has proven about a range of
// transactions.
func (a *attempt) evidence(first, last ack.Ticket, r ack.Rung) {
	a.mu.Lock()
	err := a.ledger.Mark(first, last, r)
	a.setPositions()
	a.mu.Unlock()
	if err != nil {
		a.fail(fmt.Errorf("broken invariant: %w", err))
		return
	}
	if r >= a.s.cfg.AckOn {
		a.proven.set()
		if sabotage.On(sabotage.StatusBeforeBookmark) {
			a.progress.set()
		}
	}
}

// setPositions shows the rungs; its caller holds mu.
func (a *attempt) setPositions() {
	m := a.s.cfg.Metrics
	for r := ack.Received; r <= a.s.cfg.AckOn; r++ {
		m.position.WithLabelValues(r.String()).Set(float64(a.ledger.At(r)))
	}
	m.position.WithLabelValues("bookmarked").Set(float64(a.bookmarked))
	m.position.WithLabelValues("acknowledged").Set(float64(a.ledger.Acknowledged()))
	m.slot.lag.moved(a.ledger.At(ack.Received), a.ledger.Acknowledged())
	m.receivedLag.Set(float64(a.walEnd - min(a.walEnd, a.ledger.At(ack.Received))))
	m.acknowledgedLag.Set(float64(a.walEnd - min(a.walEnd, a.ledger.Acknowledged())))
}

// status sends the acknowledged position: first of all, when it moves, when
// the server asks, and often enough that the server keeps the connection. The
// timed ones ask for an answer, so that a dead wire is noticed. It is the
// only place that acknowledges, and it ends, after a last update, when the
// connection is of no use any more.
//
// The first one goes out at once: a crash between completion and the status
// update leaves a slot behind what is completed, and a server that has
// nothing to send would not ask.
func (a *attempt) status(hard context.Context, st *stream, asked signal, gone <-chan struct{}) error {
	every := time.NewTicker(a.ready.statusEvery)
	defer every.Stop()
	coalesce := time.NewTimer(0)
	defer coalesce.Stop()
	<-coalesce.C
	reply := true
	silent := sabotage.On(sabotage.NoFirstStatus)
	for {
		if silent {
			silent = false
		} else if err := a.acknowledge(st, reply); err != nil {
			return fmt.Errorf("send a status update: %w", err)
		}
		reply = false
		select {
		case <-asked:
		case <-every.C:
			reply = true
		case <-a.progress:
			coalesce.Reset(statusCoalesce)
			select {
			case <-coalesce.C:
			case <-gone:
			case <-hard.Done():
			}
		case <-gone:
			if hard.Err() != nil {
				return nil
			}
			return a.acknowledge(st, false)
		case <-hard.Done():
			return nil
		}
	}
}

// acknowledge sends one status update and records it. It tells the server the
// bookmark, which is durable already, and nothing above it: see keepBookmark.
// The position is taken and confirmed under the lock, and written between:
// only this goroutine confirms, so nothing can move in between but upwards.
func (a *attempt) acknowledge(st *stream, reply bool) error {
	a.mu.Lock()
	lsn := a.bookmarked
	switch {
	case sabotage.On(sabotage.StatusReceived) && reply:
		lsn = a.ledger.Last()
	case sabotage.On(sabotage.StatusBeforeBookmark):
		lsn, _ = a.ledger.Ready(a.s.cfg.AckOn)
	}
	moved := lsn > a.ledger.Acknowledged()
	a.mu.Unlock()
	now := time.Now()
	// Whatever becomes of the write, the server may have it.
	a.s.tells(lsn)
	if err := st.sendStatus(lsn, now, reply); err != nil {
		return err
	}
	return a.confirm(lsn, moved)
}

// confirm records that the server was told lsn; moved says that it was not told
// before.
func (a *attempt) confirm(lsn uint64, moved bool) error {
	if !moved {
		return nil
	}
	crash.Here(crash.PgAfterStatus)
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.ledger.Confirm(lsn, a.s.cfg.AckOn); err != nil {
		return err
	}
	a.s.struggle.progress(lsn)
	a.s.cfg.Metrics.lastAcknowledge.Set(float64(time.Now().UnixMilli()) / 1e3)
	a.setPositions()
	return nil
}

// lookAgain looks at the slot once more after START_REPLICATION. Before, it
// could still be dropped and made anew, or lost, between a look and the start;
// a slot that is being read from cannot.
func (a *attempt) lookAgain(work context.Context) {
	retry := newBackOff()
	for {
		err := a.s.look(work, func(ctx context.Context, conn *pgx.Conn) error {
			slot, err := readSlot(ctx, conn, a.s.cfg.Slot)
			switch {
			case err != nil:
				return err
			case slot == nil:
				return a.s.slotDropped()
			default:
				return a.s.sameSlot(slot)
			}
		})
		if err == nil || work.Err() != nil {
			return
		}
		if refused, ok := errors.AsType[*decode.Refusal](err); ok && refused.Reason == decode.ReasonGap {
			a.s.reportFailure(CheckSlot, err)
			a.fail(err)
			return
		}
		a.s.log.DebugContext(work, "the look at the slot behind START_REPLICATION is made again", "err", err)
		if sleep(work, retry.NextBackOff()) != nil {
			return
		}
	}
}

// verify looks at the source before a connection is made: whoever moved the
// slot or changed the publication while we were away has left a gap that the
// stream itself would not show.
func (a *attempt) verify(ctx context.Context, conn *pgx.Conn) error {
	slot, err := readSlot(ctx, conn, a.s.cfg.Slot)
	if err != nil {
		return err
	}
	if slot == nil {
		return a.s.slotDropped()
	}
	if err := a.s.sameSlot(slot); err != nil {
		return err
	}
	a.mu.Lock()
	received := a.ledger.Last()
	a.mu.Unlock()
	return a.s.checkUnchanged(ctx, conn, a.ready, received)
}
