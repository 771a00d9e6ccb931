package wal

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/sabotage"
)

// The events of a transaction of the pipeline, as the metric names them.
const (
	txBegun     = "begun"
	txResumed   = "resumed"
	txCommitted = "committed"
	txTaken     = "taken"
)

// opened is a transaction of the pipeline that rows are being sent into. While
// it is open nothing in the pipeline completes, whoever sent it.
type opened struct {
	tx *feldera.Transaction
	// through is the end LSN of the last Postgres transaction that belongs in
	// it: before, it must not be committed.
	through uint64
	// recorded is the end LSN up to which the recorded intent says that rows may
	// be in it, before what it said when the transaction was found open; 0 where
	// it was not.
	recorded, before uint64
	// sum is everything that was sent into it; nil for nothing yet. rows is the end
	// LSN of the last batch that brought rows: what comes behind it brings none,
	// and the bookmark does not name it as produced.
	sum  *batch
	rows uint64
	// torn: it has rows of a transaction of which others were refused. It must
	// not be committed before that one is sent whole, or passed over.
	torn bool
}

// whole tells whether what is in it is a state of the source: then it may be
// committed although more was to come. next is the end LSN of the transaction
// that comes next, 0 where that is not known: all before it are in.
func (o *opened) whole(next uint64) bool {
	if o.torn {
		return false
	}
	return o.before == 0 || next > o.before || (o.sum != nil && o.sum.end >= o.before)
}

// add takes a batch whose rows are all in.
func (o *opened) add(b *batch) {
	if len(b.tokens) > 0 {
		o.rows = b.end
	}
	if o.sum == nil {
		o.sum = b
		return
	}
	o.sum.last, o.sum.end = b.last, b.end
	for _, t := range b.tokens {
		o.sum.keep(t.out, t.token)
	}
}

// ourTransaction names a transaction of the pipeline as ours, for whoever looks
// at the pipeline's state.
type ourTransaction struct {
	incarnation string
	id          int64
}

// isOurs tells whether the pipeline's open transaction is the one that this
// process opened last.
func (a *attempt) isOurs(st *feldera.TransactionState) bool {
	ours := a.ours.Load()
	return ours != nil && ours.incarnation == st.Incarnation && ours.id == st.ID
}

// finishing gives the context for what must be brought to its end although work
// has ended: it lives on for ShutdownTimeout. A transaction that is left open
// would stop the whole pipeline until the next start.
func (d *deliverer) finishing(work, hard context.Context) (context.Context, context.CancelFunc) {
	finish, cancel := context.WithCancelCause(hard)
	stop := context.AfterFunc(work, func() {
		timer := time.NewTimer(d.cfg.ShutdownTimeout)
		defer timer.Stop()
		select {
		case <-timer.C:
			cancel(fmt.Errorf("PGSOURCE_SHUTDOWN_TIMEOUT (%v) has passed", d.cfg.ShutdownTimeout))
		case <-finish.Done():
		}
	})
	return finish, func() { stop(); cancel(nil) }
}

// lookBack finds out how the attempt begins: what the pipeline can, and
// whether a transaction of ours is open in it, of a process that died or of an
// attempt that ended in the middle. That one is sent into again, from what was
// acknowledged on, and committed when all that belongs in it is in.
func (d *deliverer) lookBack(work context.Context) error {
	incarnation, err := d.canOpen(work)
	if err != nil {
		return err
	}
	sent := uint64(d.a.s.keeper.exactlySent(LSN(d.a.start)))
	// Nothing above the server's position at the start of the attempt comes a
	// second time, however far ahead the record of what was sent runs.
	d.a.s.keeper.boundInherited(LSN(d.a.ready.at))
	// Where something fails again and again, what is before it is to be
	// acknowledged, one transaction after the other.
	if !d.a.s.struggle.cautious() {
		d.replay = min(uint64(d.a.s.keeper.exactlySent(LSN(d.a.start))), d.a.ready.at)
	}
	if sabotage.On(sabotage.ReplayApart) {
		d.replay = 0
	}
	if err := d.outliveOthers(work, sent); err != nil {
		return err
	}
	if err := d.outliveRequests(work); err != nil {
		return err
	}
	in := d.cfg.Intents.Intent()
	asked := in.Incarnation != "" && in.ID == 0 // for a transaction, and how that ended is not known
	if !asked && in.Incarnation != incarnation {
		return nil
	}
	tx, err := d.cfg.Pipeline.Resume(work, feldera.Intent{Incarnation: in.Incarnation, ID: in.ID})
	if err != nil {
		return fmt.Errorf("look for an open transaction of ours: %w", err)
	}
	if tx == nil {
		if asked { // it can come no more
			return d.cfg.Intents.RecordIntent(work, Intent{})
		}
		return nil
	}
	if own := tx.Intent(); asked {
		// It was found by an intent without its number, which holds only while
		// nothing is in it.
		if err := d.cfg.Intents.RecordIntent(work, Intent{Incarnation: own.Incarnation, ID: own.ID, Through: in.Through}); err != nil {
			return fmt.Errorf("record the pipeline's transaction %d as ours: %w", own.ID, err)
		}
	}
	d.opened = &opened{tx: tx, through: max(in.Through, d.replay), recorded: in.Through, before: in.Through}
	d.nowOpen(txResumed)
	d.a.s.log.WarnContext(work, "a transaction of ours is open in the pipeline, from before: its rows are sent again into it, then it is committed",
		"transaction", tx.Intent().ID, "lsn", decode.FormatLSN(d.opened.through))
	return nil
}

// canOpen gives the pipeline's incarnation, and says what becomes visible
// together.
func (d *deliverer) canOpen(work context.Context) (incarnation string, err error) {
	retry := newBackOff()
	for {
		st, err := d.cfg.Pipeline.TransactionState(work)
		if err == nil {
			d.sayAtomicity(&st)
			return st.Incarnation, nil
		}
		var refused *decode.Refusal
		if errors.As(err, &refused) || work.Err() != nil {
			return "", err
		}
		d.a.s.reportFailure(CheckDestination, err)
		d.cfg.Beat()
		if err := sleep(work, retry.NextBackOff()); err != nil {
			return "", err
		}
	}
}

// sayAtomicity shows what of a transaction becomes visible together.
func (d *deliverer) sayAtomicity(st *feldera.TransactionState) {
	status := Status{Check: CheckAtomicity, OK: true}
	switch {
	case !d.atomic:
		status.Message = "table: the rows of one transaction become visible table by table, as PGSOURCE_ATOMICITY=table says"
	case !d.cfg.intentsLast():
		d.atomic = false
		status.OK, status.Works = false, true
		status.Message = "table: the rows of one transaction become visible table by table, since no state is kept in which a transaction that a crash leaves open could be known again"
		status.Hint = "give pgsource a place for its state, or set PGSOURCE_ATOMICITY=table"
		d.a.s.log.Warn("no state is kept: the rows of one transaction become visible table by table, and those of a large one request by request")
	case st.Status == "":
		d.atomic = false
		status.OK, status.Works = false, true
		status.Message = "table: the rows of one transaction become visible table by table, since this pipeline reports no transactions"
		status.Hint = "use a build of Feldera with transactions, or set PGSOURCE_ATOMICITY=table"
		d.a.s.log.Error("this pipeline reports no transactions: the rows of one transaction become visible table by table, and those of a large one request by request")
	default:
		status.Message = "transaction: the rows of one transaction become visible together"
	}
	d.cfg.Report(status)
}

// holdsBack tells whether to wait until everything is received that may have
// been sent before: it goes into one transaction of the pipeline, which is to
// be open for as long as sending takes, and not for as long as the source may
// be away. Where there is no room for so much, it is not waited for.
func (d *deliverer) holdsBack(received uint64) bool {
	return d.atomic && received < d.waitsFor() && !d.a.pressed.Load()
}

// waitsFor gives the position up to which everything is to be received before
// anything is sent. A transaction that is open is not waited in, unless there
// may be a TRUNCATE to be carried out in it: see foresee.
func (d *deliverer) waitsFor() uint64 {
	switch {
	case d.opened == nil:
		return d.replay
	case d.cfg.Truncate == TruncateDeleteAll && !d.foreseen:
		return d.opened.through
	}
	return 0
}

// wants gives the position up to which everything must be received before what
// is sent can be acknowledged: one that is to be waited for, or the end of what
// belongs in the open transaction.
func (d *deliverer) wants() uint64 {
	if d.opened != nil {
		return d.opened.through
	}
	return d.waitsFor()
}

// open begins a transaction of the pipeline, if none is open, for the
// transactions up to end. It waits while somebody else's is open. The recorded
// intent says so before a row of them is sent.
func (d *deliverer) open(work context.Context, end uint64) error {
	if o := d.opened; o != nil {
		if end <= o.recorded {
			return nil
		}
		in := o.tx.Intent()
		if err := d.cfg.Intents.RecordIntent(work, Intent{Incarnation: in.Incarnation, ID: in.ID, Through: end}); err != nil {
			return fmt.Errorf("record what goes into the pipeline's transaction %d: %w", in.ID, err)
		}
		o.recorded = end
		return nil
	}
	if d.rec != nil {
		// The progress row inside it stands for all rows before it too.
		if err := d.awaitCompleted(work); err != nil {
			return err
		}
	}
	last := d.cfg.Intents.Intent()
	var own *feldera.Intent
	if last.Incarnation != "" {
		own = &feldera.Intent{Incarnation: last.Incarnation, ID: last.ID}
	}
	var tx *feldera.Transaction
	err := d.patiently(func() (err error) {
		tx, err = d.cfg.Pipeline.Begin(work, own, func(ctx context.Context, in feldera.Intent) error {
			err := d.cfg.Intents.RecordIntent(ctx, Intent{Incarnation: in.Incarnation, ID: in.ID, Through: end})
			crash.Here(crash.PgIntent)
			return err
		})
		return err
	})
	if err != nil {
		d.noteOpen(err)
		return fmt.Errorf("begin a transaction of the pipeline for the transactions up to LSN %s: %w", decode.FormatLSN(end), err)
	}
	d.opened = &opened{tx: tx, through: max(end, d.replay), recorded: end}
	if tx.Resumed() {
		d.opened.through = max(d.opened.through, last.Through)
		d.opened.before = last.Through
		d.nowOpen(txResumed)
		return nil
	}
	d.nowOpen(txBegun)
	return nil
}

// openEmptying opens a transaction of the pipeline for batch b, and empties in
// it the tables that its first transaction truncates.
func (d *deliverer) openEmptying(work, finish context.Context, tx *transaction, list []emptying, b *batch) error {
	if err := d.mayEmpty(work, tx, list); err != nil {
		return err
	}
	if err := d.open(work, b.end); err != nil {
		return err
	}
	return d.emptyWithin(finish, tx, list, b)
}

func (d *deliverer) nowOpen(event string) {
	crash.Here(crash.PgTxOpen)
	in := d.opened.tx.Intent()
	d.a.ours.Store(&ourTransaction{in.Incarnation, in.ID})
	d.cfg.Metrics.transactionSince.Store(time.Now().UnixNano())
	d.cfg.Metrics.destinationTx.WithLabelValues(event).Inc()
}

// commit ends the open transaction when the pipeline has taken all of its rows,
// and leaves them in flight. After an error it may be open still, and its
// intent is recorded.
func (d *deliverer) commit(finish context.Context) error {
	o := d.opened
	if o.sum != nil {
		for _, t := range o.sum.tokens {
			o.tx.Sent(t.token)
		}
	}
	write, row := d.lastRow()
	err := d.patiently(func() error { return o.tx.Commit(finish, write) })
	d.noteOpen(err)
	switch {
	case errors.Is(err, feldera.ErrTaken):
		// The rows are in, but not as one. Sent again as one, they become so.
		d.opened = nil
		d.nowClosed(txTaken)
		return &replayError{err}
	case err != nil:
		return fmt.Errorf("commit the pipeline's transaction %d (transactions up to LSN %s): %w", o.tx.Intent().ID, decode.FormatLSN(o.through), err)
	}
	crash.Here(crash.PgTxCommitted)
	d.opened, d.replay, d.gone = nil, 0, nil
	d.nowClosed(txCommitted)
	if row != nil {
		o.sum.tokens, o.sum.row = nil, true
		o.sum.keep(nil, *row)
	}
	if o.sum != nil {
		d.watch(o.sum)
	}
	return nil
}

// commitEarly ends a transaction that is sent into again before all that
// belongs in it is in: a table is to be emptied, and what a query says of its
// keys holds for what is completed. Rows of later transactions that are in it
// already become visible now.
func (d *deliverer) commitEarly(finish context.Context) error {
	if d.opened == nil {
		return nil
	}
	d.a.s.log.WarnContext(finish, "the pipeline's transaction is committed before all of its rows are sent again, for a TRUNCATE",
		"transaction", d.opened.tx.Intent().ID, "lsn", decode.FormatLSN(d.opened.through))
	replay := max(d.replay, d.opened.through)
	err := d.commit(finish)
	if err == nil {
		d.replay = replay // what is left of it goes into another one
	}
	return err
}

func (d *deliverer) nowClosed(event string) {
	d.cfg.Metrics.transactionSince.Store(0)
	d.cfg.Metrics.destinationTx.WithLabelValues(event).Inc()
}

// patiently runs fn, which waits for the pipeline, and feeds the watchdog
// meanwhile: that wait is no hang.
func (d *deliverer) patiently(fn func() error) error {
	done := make(chan struct{})
	fed := make(chan struct{})
	go func() {
		defer close(fed)
		turn := time.NewTicker(idleTurn)
		defer turn.Stop()
		for {
			select {
			case <-turn.C:
				d.lookAround()
			case <-done:
				return
			}
		}
	}()
	defer func() { close(done); <-fed }()
	return fn()
}

// leftOpen says that the deliverer ends with a transaction open.
func (d *deliverer) leftOpen(work context.Context) {
	if d.opened == nil {
		return
	}
	d.a.s.log.ErrorContext(work, "the pipeline's transaction that pgsource opened stays open: nothing in the pipeline completes until pgsource is started again and commits it",
		"transaction", d.opened.tx.Intent().ID, "lsn", decode.FormatLSN(d.opened.through))
}

// isLarge tells whether a transaction may need more than one request for one
// table.
func (d *deliverer) isLarge(tx *transaction) bool {
	return tx.rows > d.cfg.BatchRows || tx.bytes > int64(d.cfg.BatchBytes)
}

// rehearse encodes a transaction as stream does, sends nothing, and tells how
// many requests it takes. What was opened cannot be taken back: a row that is
// refused has to be found before. What it learned of relations is forgotten,
// since the rows are read once more.
func (d *deliverer) rehearse(work context.Context, tx *transaction) (requests int, err error) {
	decoder, routes, strangers, unusable := d.decoder, d.routes, d.strangers, d.unusable
	d.decoder, d.routes, d.strangers, d.unusable = decoder.Clone(), maps.Clone(routes), maps.Clone(strangers), maps.Clone(unusable)
	d.rehearsing = true
	for _, out := range d.outputs {
		out.array.Quiet = true
	}
	defer func() {
		d.decoder, d.routes, d.strangers, d.unusable = decoder, routes, strangers, unusable
		d.rehearsing = false
		for _, out := range d.outputs {
			out.empty()
			out.array.Quiet = false
		}
	}()
	err = d.inRequests(work, tx, func(*output) error { requests++; return nil })
	return requests, err
}

// stream sends a large transaction in as many requests as it takes, in the
// order of its rows for each table: in one transaction of the pipeline, or one
// by one where that is not wanted.
func (d *deliverer) stream(work, finish context.Context, tx *transaction) error {
	b := &batch{first: tx.ticket, last: tx.ticket, end: tx.end}
	d.owe(b)
	ctx := work
	if d.opened != nil || d.atomic {
		if err := d.openEmptying(work, finish, tx, d.emptyings(tx), b); err != nil {
			return err
		}
		ctx = finish
	}
	err := d.inRequests(ctx, tx, func(out *output) error {
		err := d.post(ctx, out, b)
		if refused, ok := errors.AsType[*feldera.ArrayRefusedError](err); ok {
			return d.refusedIn(tx, out, 0, out.array.Rows(), refused, d.alreadyIn(b))
		}
		return err
	})
	if errors.Is(err, errSpillDamaged) {
		d.cfg.Metrics.spillFaults.WithLabelValues(spillFault(err)).Inc()
		return &replayError{err}
	}
	if err != nil {
		return err
	}
	return d.sent(ctx, b)
}

// lookEvery is after how many bytes of messages the arrays are looked at, at
// the latest.
const lookEvery = 16 << 10

// inRequests encodes a transaction row by row and calls send with each output
// that is full, and in the end with each that has rows.
func (d *deliverer) inRequests(ctx context.Context, tx *transaction, send func(*output) error) error {
	for _, out := range d.outputs {
		out.empty()
	}
	d.countAnew()
	d.superseded = nil
	if d.empties(tx) {
		d.superseded = maps.Clone(tx.truncated)
	}
	// room is how many more rows fit into the fullest array.
	room, unseen := 0, 0
	flush := func(all bool) error {
		sum := 0
		for _, out := range d.outputs {
			sum += out.array.Bytes()
			out.count()
		}
		all = all || sum > 2*d.cfg.BatchBytes
		room, unseen = d.cfg.BatchRows, 0
		for _, out := range d.outputs {
			rows := out.array.Rows()
			if rows == 0 || (!all && rows < d.cfg.BatchRows && out.array.Bytes() < d.cfg.BatchBytes) {
				room = min(room, d.cfg.BatchRows-rows)
				continue
			}
			if err := send(out); err != nil {
				return err
			}
			out.empty()
		}
		return nil
	}
	if err := flush(false); err != nil {
		return err
	}
	err := tx.each(func(msg []byte) error {
		if err := d.row(ctx, msg, tx); err != nil {
			return err
		}
		room--
		unseen += len(msg)
		if room > 0 && unseen < lookEvery {
			return nil
		}
		d.cfg.Beat()
		return flush(false)
	})
	if err != nil {
		return err
	}
	return flush(true)
}

// empty makes the output ready for its next array.
func (out *output) empty() {
	out.array.Reset()
	clear(out.counts)
	clear(out.pending)
}

// count takes the pending rows as those of the array.
func (out *output) count() {
	for c, rows := range out.pending {
		out.counts[c] += rows
	}
	clear(out.pending)
}
