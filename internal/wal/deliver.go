package wal

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"holdfast/internal/ack"
	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/sabotage"
)

const (
	// idleTurn is how often the deliverer turns with nothing to do: it feeds
	// the watchdog and looks after batches that wait for completion.
	idleTurn = 5 * time.Second
	// completionPatience is how long a batch may wait for completion before
	// the check "destination" says so.
	completionPatience = 30 * time.Second
)

// deliverer takes transactions from the queue in order, makes batches of
// whole ones, and sends each batch to every table it touches, in one
// transaction of the pipeline where that takes more than one request. The next
// batch goes out when all requests of the last one are accepted; completion is
// awaited behind its back, for at most InFlight batches.
type deliverer struct {
	a           *attempt
	cfg         *Config
	completions *feldera.Completions
	durability  *feldera.Durability // nil unless acknowledging on durable
	decoder     *decode.PgOutput
	// routes knows, for each version of a relation in the stream, where its
	// rows go. An entry is replaced when the relation changes, so it is
	// bounded by the number of tables.
	routes map[uint32]*route
	// strangers are relations that the stream described and that are not
	// mapped. To describe one is no offence (the server describes the leaf of
	// a partitioned table beside its root); a row of one is. Bounded as the
	// decoder's own relations are.
	strangers map[uint32]*decode.Relation
	// unusable are relations that a transaction described which was passed
	// over, and that were refused: their rows are. passed is the end of the
	// last transaction that was passed over.
	unusable map[uint32]error
	passed   uint64
	// outputs are the Feldera tables that rows have gone to, in the order of
	// their first row, which is the order in which a batch is sent.
	outputs []*output
	// superseded counts, for the transaction being encoded and by relation, the
	// TRUNCATEs that are still to come in it: the rows before them are of no
	// account, since the table is empty already.
	superseded map[uint32]int
	// gone says, of what is sent again in one transaction of the pipeline and by
	// relation, where the last TRUNCATE ends that is to be carried out: of the
	// rows before it none is left. goneThrough is the end of it all. foreseen:
	// it was looked for.
	gone        map[uint32]uint64
	goneThrough uint64
	foreseen    bool
	// owners is the record of who feeds the tables; nil where there is none.
	owners *feldera.Owners
	// carried are the tokens of the deletes for the TRUNCATEs of the next
	// batch, which owes them its evidence.
	carried []feldera.Token

	// atomic: what takes more than one request becomes visible together.
	atomic bool
	// opened is the pipeline's transaction that rows are being sent into; nil
	// for none.
	opened *opened
	// replay is the position up to which rows may have been sent before: they
	// become visible again together, not one state of the past after the other.
	replay uint64
	// rec is set while the progress table is used.
	rec *recorder
	// rehearsing: rows are encoded to see whether they can be, and thrown away.
	rehearsing bool
	// delivered is the end of the transaction that was delivered last. copied
	// collects copied rows; turned: the last turn was theirs.
	delivered uint64
	copied    feldera.Array
	turned    bool

	mu       sync.Mutex
	inFlight []*batch // in the order in which they were sent
	// undurable counts the batches that are completed and wait for a checkpoint,
	// and their transactions: each takes some memory, in its batch and in the
	// ledger, for as long as checkpoints fail. since is when one was proven last,
	// or when the first began to wait.
	undurable struct {
		batches      int
		transactions uint64
		since        time.Time
	}
	// copying are the requests of copied rows that wait for evidence; they stay
	// when no more of it comes (lost). copyFailed is one that ended without an
	// outcome. apart: the rows on their way go alone.
	copying    []*copyRequest
	copyFailed *copyRequest
	apart      bool
	lost       bool
	finished   signal
	stopping   time.Time // when the work ended; zero before
}

// output collects what one batch has for one Feldera table.
type output struct {
	table  *feldera.Table
	writer *feldera.Writer
	array  feldera.Array
	// counts are the rows by source table and operation, for the metric;
	// pending are those of the transaction being encoded.
	counts, pending map[rowCount]int
	// through is how many rows the array has up to the end of each transaction
	// of the batch.
	through []int
	// sequence counts the rows of the transaction that is being encoded.
	sequence uint64
}

type rowCount struct {
	table string
	op    decode.Op
}

// batch is what was sent together: whole, adjacent transactions.
type batch struct {
	first, last ack.Ticket
	end         uint64
	accepted    time.Time
	// tokens are the newest of each table that it has rows for: a newer one
	// covers those before it.
	tokens []tableToken
	// waiting counts the tokens that have not reached the rung yet.
	waiting map[ack.Rung]int
	// row: the token is that of a progress row, or of the claim; proof is what
	// is known to be ingested of any other batch, where progress is recorded.
	// Guarded by the deliverer's mu.
	row   bool
	proof []feldera.Evidence
	// emptied are the tables that were emptied for its first transaction, in the
	// pipeline's transaction that its rows go into.
	emptied []string
}

type tableToken struct {
	out   *output
	token feldera.Token
}

// transactions is at most how many of the source's it has.
func (b *batch) transactions() uint64 { return uint64(b.last-b.first) + 1 }

// keep notes the token of a request; out is nil where it stands for itself.
func (b *batch) keep(out *output, token feldera.Token) {
	for i := range b.tokens {
		if out != nil && b.tokens[i].out == out {
			b.tokens[i].token = token
			return
		}
	}
	b.tokens = append(b.tokens, tableToken{out, token})
}

func newDeliverer(a *attempt, completions *feldera.Completions, durability *feldera.Durability) *deliverer {
	return &deliverer{
		a: a, cfg: &a.s.cfg, completions: completions, durability: durability, decoder: decode.NewPgOutput(),
		routes: make(map[uint32]*route), strangers: make(map[uint32]*decode.Relation), unusable: make(map[uint32]error), finished: newSignal(),
		atomic: !a.s.cfg.TableAtomicity, delivered: a.start,
	}
}

// run delivers until work ends or something is refused, then waits for the
// evidence that is still to come, within ShutdownTimeout.
func (d *deliverer) run(work, hard context.Context) error {
	defer context.AfterFunc(work, func() {
		d.mu.Lock()
		d.stopping = time.Now()
		d.mu.Unlock()
	})()
	finish, cancel := d.finishing(work, hard)
	defer cancel()
	err := d.lookBack(work)
	if err == nil {
		err = d.take(work)
	}
	if err == nil {
		err = d.own(work)
	}
	if d.rec != nil {
		defer d.recording(hard)()
	}
	for err == nil {
		if !d.waitForRoom(work) {
			break
		}
		var txs []*transaction
		if txs, err = d.collect(work, finish); err != nil || txs == nil {
			break
		}
		d.cfg.Beat()
		if d.turned = len(txs) == 0; d.turned {
			err = d.sendCopied(work)
			continue
		}
		end := txs[len(txs)-1].end
		if txs, err = d.passHeld(work, txs); err == nil {
			err = d.deliverParts(work, finish, txs)
		}
		d.delivered = end
	}
	d.leftOpen(work)
	if work.Err() != nil && err != nil && errors.Is(err, context.Canceled) {
		err = nil // a stop, not a fault; what was not accepted is replayed
	}
	if work.Err() != nil {
		crash.Here(crash.PgShutdown)
	}
	d.drain(hard)
	return err
}

// collect waits for the first transaction and, for at most BatchAge from when
// it was received, for company. It returns nil when work ends, and none when it
// is the turn of copied rows.
func (d *deliverer) collect(work, finish context.Context) ([]*transaction, error) {
	turn := time.NewTimer(idleTurn)
	defer turn.Stop()
	for {
		wait := idleTurn
		d.a.wanted.Store(d.wants())
		received := d.a.received()
		rows := d.cfg.BatchRows
		if d.a.s.struggle.cautious() {
			rows = 1
		}
		since, full, some := d.a.queue.oldest(rows, d.cfg.BatchBytes)
		delivered := d.delivered
		if !some {
			delivered = max(delivered, received) // everything up to it was there before
		}
		// Copied rows and batches take turns where both are ready.
		if due := d.copyDue(delivered); due && (!some || !d.turned) {
			return []*transaction{}, nil
		}
		var finished signal // what copied rows that go alone wait for
		if d.copyApart(delivered) {
			finished = d.finished
		}
		if some && !d.holdsBack(received) {
			left := d.cfg.BatchAge - time.Since(since)
			if full || left <= 0 {
				txs, err := d.a.queue.take(rows, d.cfg.BatchBytes)
				if err != nil {
					d.cfg.Metrics.spillFaults.WithLabelValues(spillFault(err)).Inc()
					return nil, &replayError{err}
				}
				return txs, nil
			}
			wait = min(wait, left)
		} else if !some && d.opened != nil && received >= d.opened.through {
			// Everything that belongs in it has been delivered.
			if err := d.commit(finish); err != nil {
				return nil, err
			}
		}
		turn.Reset(wait)
		select {
		case <-d.a.queue.arrived:
		case <-d.a.merge.wake:
		case <-finished:
		case <-turn.C:
			d.lookAround()
		case <-work.Done():
			return nil, nil
		}
	}
}

// What may wait for a checkpoint at once: batches for each one that may be in
// flight, and transactions. A few tens of megabytes; checkpoints are seconds
// apart where they succeed.
const (
	maxUndurableBatches      = 512
	maxUndurableTransactions = 1 << 20
)

// full tells whether so much waits for evidence that nothing more is to be sent:
// for completion, or for a checkpoint. What is received meanwhile is buffered and
// spilled within its limits. While a transaction of the pipeline is open, neither
// can come for anything: what belongs in it is sent, and it is committed.
//
// The sequence that this is for: a transaction is open from before, the claim of
// the progress table goes into it, and what the pipeline is found to hold waits
// for that claim: with PGSOURCE_IN_FLIGHT=1 nothing would ever be sent again.
func (d *deliverer) full() bool {
	if d.opened != nil {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.inFlight) >= d.cfg.InFlight || d.behindCheckpoints()
}

func (d *deliverer) behindCheckpoints() bool {
	return d.undurable.batches >= maxUndurableBatches*d.cfg.InFlight || d.undurable.transactions >= maxUndurableTransactions
}

// waitForRoom waits until nothing is full; where something fails again and
// again, until nothing waits for completion.
func (d *deliverer) waitForRoom(work context.Context) bool {
	turn := time.NewTicker(idleTurn)
	defer turn.Stop()
	for d.full() || d.mustStandAlone() {
		select {
		case <-d.finished:
		case <-turn.C:
			d.lookAround()
		case <-work.Done():
			return false
		}
	}
	return true
}

// lookAround feeds the watchdog and says when completion is overdue.
func (d *deliverer) lookAround() {
	d.cfg.Beat()
	d.mu.Lock()
	n := len(d.inFlight)
	var oldest batch
	if n > 0 {
		oldest = *d.inFlight[0]
	}
	behind, undurable, open := d.behindCheckpoints(), d.undurable, d.opened != nil
	d.mu.Unlock()
	if behind {
		waits := "nothing more is sent before one is"
		if open {
			waits = "nothing more is sent before one is but what belongs in the pipeline's transaction that is open, which no checkpoint comes before"
		}
		d.cfg.Report(Status{
			Check: CheckDestination, Message: fmt.Sprintf("%d batches (%d transactions) are completed and in no checkpoint, and none has been proven to be since %s: %s",
				undurable.batches, undurable.transactions, undurable.since.UTC().Format(time.RFC3339), waits),
			Hint: "look in the pipeline's log for why it makes no checkpoints (storage, permissions, an open transaction); the LSN does not move meanwhile",
		})
		return
	}
	if n == 0 || time.Since(oldest.accepted) < completionPatience {
		return
	}
	message := fmt.Sprintf("%d batches are accepted but not completed, the oldest (up to LSN %s) since %s",
		n, decode.FormatLSN(oldest.end), oldest.accepted.UTC().Format(time.RFC3339))
	if why, _ := d.a.stalled.Load().(string); why != "" {
		message += ": " + why
	}
	d.cfg.Report(Status{
		Check: CheckDestination, Message: message,
		Hint: "look in the pipeline's /stats for an open transaction, a stuck output or a paused state; the LSN does not move meanwhile",
	})
}

// drain waits for the batches in flight. What does not complete in time is
// not acknowledged, and is delivered again after the next start.
// The time counts from the stop, not from the end of the request that was in
// flight then.
func (d *deliverer) drain(hard context.Context) {
	d.mu.Lock()
	left := d.cfg.ShutdownTimeout
	if !d.stopping.IsZero() {
		left -= time.Since(d.stopping)
	}
	d.mu.Unlock()
	timeout := time.NewTimer(left)
	defer timeout.Stop()
	turn := time.NewTicker(idleTurn)
	defer turn.Stop()
	for d.unproven() > 0 {
		select {
		case <-turn.C:
			d.cfg.Beat()
		case <-d.finished:
		case <-timeout.C:
			d.a.s.log.WarnContext(hard, "stopping without waiting any longer for completion: the rest is delivered again after the next start",
				"batches", d.unproven(), "waited", d.cfg.ShutdownTimeout)
			return
		case <-hard.Done():
			return
		}
	}
}

func (d *deliverer) unfinished() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.inFlight)
}

// unproven counts the batches that cannot be acknowledged yet.
func (d *deliverer) unproven() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lost {
		return 0
	}
	return len(d.inFlight) + d.undurable.batches + len(d.copying)
}

// copiesProven tells whether no copied rows can be under way: none wait for
// evidence, or have ended without an outcome.
func (d *deliverer) copiesProven() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.copying) == 0 && d.copyFailed == nil && !d.lost
}

// deliver sends one batch. When a transaction in the middle of it is refused,
// the ones before it are delivered first, since they are not to blame.
func (d *deliverer) deliver(work, finish context.Context, txs []*transaction) error {
	if err := d.a.s.keeper.beforeSend(work, txs[len(txs)-1].end); err != nil {
		return err
	}
	d.a.takesOn(txs)
	if len(txs) == 1 && d.isLarge(txs[0]) {
		requests, err := d.rehearse(work, txs[0])
		if err != nil {
			return d.refused(finish, err)
		}
		if requests > 1 {
			err := d.stream(work, finish, txs[0])
			d.settle(txs)
			return d.refusedRows(finish, err)
		}
	}
	good, refused := d.encode(work, txs)
	if good > 0 {
		if err := d.send(work, finish, txs[:good]); err != nil {
			return d.refusedRows(finish, err)
		}
	}
	d.settle(txs)
	if refused != nil {
		return d.refused(finish, refused)
	}
	return nil
}

// settle gives back the memory of transactions that were delivered.
func (d *deliverer) settle(txs []*transaction) {
	d.a.queue.release(txs)
	d.cfg.Metrics.buffered.Set(float64(d.a.queue.held()))
	d.shrink()
}

// shrink bounds the memory that the outputs keep for their next arrays: one
// after the other may have had a full one.
func (d *deliverer) shrink() {
	kept := 0
	for _, out := range d.outputs {
		kept += out.array.Footprint()
	}
	if kept <= 4*d.cfg.BatchBytes {
		return
	}
	for _, out := range d.outputs {
		if out.array.Footprint()*len(d.outputs) > 4*d.cfg.BatchBytes {
			out.array = feldera.Array{}
		}
	}
}

// refused says what a transaction's rows were refused for. A block of the
// spill that is not what was written is no such thing: Postgres has the rows.
func (d *deliverer) refused(finish context.Context, err error) error {
	if errors.Is(err, errSpillDamaged) {
		d.cfg.Metrics.spillFaults.WithLabelValues(spillFault(err)).Inc()
		return &replayError{err}
	}
	if o := d.opened; o != nil {
		// Everything before it is in: that is as good a state as any. Only a
		// transaction that was found open may hold rows of it, or from behind it,
		// from when it was not refused.
		var next uint64
		if about, ok := errors.AsType[*transactionError](err); ok {
			next = about.end
		}
		if o.whole(next) {
			if commitErr := d.commit(finish); commitErr != nil {
				err = errors.Join(err, commitErr)
			}
		} else {
			err = fmt.Errorf("with the pipeline's transaction %d open, which stays so: %w", o.tx.Intent().ID, err)
		}
	}
	d.a.s.reportFailure(CheckDestination, err)
	return err
}

// encode fills the outputs with the rows of txs and tells how many whole
// transactions they hold. With an error the next one is to blame, and nothing
// of it is in them.
//
// Each transaction is encoded exactly once: to encode one again after a later
// one was looked at would read its rows under that one's relations, since not
// every transaction brings its own.
func (d *deliverer) encode(work context.Context, txs []*transaction) (int, error) {
	for _, out := range d.outputs {
		out.array.Reset()
		clear(out.counts)
		out.through = out.through[:0]
	}
	for i, tx := range txs {
		marks := make([]feldera.Mark, len(d.outputs))
		for n, out := range d.outputs {
			marks[n] = out.array.Mark()
		}
		d.superseded = nil
		if d.empties(tx) {
			d.superseded = maps.Clone(tx.truncated)
		}
		d.countAnew()
		err := tx.each(func(msg []byte) error { return d.row(work, msg, tx) })
		for n, out := range d.outputs {
			switch {
			case err == nil:
				for c, rows := range out.pending {
					out.counts[c] += rows
				}
			case n < len(marks):
				out.array.TakeBack(marks[n])
			default: // the transaction was the first to touch it
				out.array.Reset()
			}
			clear(out.pending)
		}
		if err != nil {
			return i, err
		}
		for _, out := range d.outputs {
			for len(out.through) < i { // the first transaction that touches it
				out.through = append(out.through, 0)
			}
			out.through = append(out.through, out.array.Rows())
		}
	}
	return len(txs), nil
}

// send sends what encode has filled in, one table after the other, and leaves
// the batch in flight. It returns when every table has accepted its rows.
// Rows for several tables go into one transaction of the pipeline.
//
// The order of effects: all tables accepted → the pipeline's transaction
// committed, where there is one → tokens watched → evidence. A batch of which
// some tables accepted and one did not is never marked; it is sent again as a
// whole, after a restart or a reconnect.
func (d *deliverer) send(work, finish context.Context, txs []*transaction) error {
	b := &batch{first: txs[0].ticket, last: txs[len(txs)-1].ticket, end: txs[len(txs)-1].end}
	d.owe(b)
	var list []emptying
	if d.atomic {
		list = d.emptyings(txs[0])
	}
	tables := 0
	for _, out := range d.outputs {
		if out.array.Rows() > 0 {
			tables++
		}
	}
	ctx := work
	if d.opened != nil || (d.atomic && (len(list) > 0 || !sabotage.On(sabotage.TablesApart) && (tables > 1 || (tables > 0 && txs[0].end <= d.replay)))) {
		if err := d.openEmptying(work, finish, txs[0], list, b); err != nil {
			return err
		}
		ctx = finish
	}
	for n, out := range d.outputs {
		if out.array.Rows() == 0 {
			continue
		}
		err := d.post(ctx, out, b)
		if refused, ok := errors.AsType[*feldera.ArrayRefusedError](err); ok {
			return d.sendAround(ctx, txs, n, b, refused)
		}
		if err != nil {
			return err
		}
	}
	return d.sent(ctx, b)
}

// owe makes the batch wait for the deletes that were sent ahead of it too.
func (d *deliverer) owe(b *batch) {
	for _, token := range d.carried {
		b.keep(nil, token)
	}
	d.carried = nil
}

// post sends one output's array and keeps its token with the batch.
func (d *deliverer) post(ctx context.Context, out *output, b *batch) error {
	if err := d.postRows(ctx, out, b, 0, out.array.Rows()); err != nil {
		return err
	}
	for c, n := range out.counts {
		d.cfg.Metrics.rows.WithLabelValues(c.table, c.op.String()).Add(float64(n))
	}
	return nil
}

// postRows is post for the rows lo to below hi of the array.
func (d *deliverer) postRows(ctx context.Context, out *output, b *batch, lo, hi int) error {
	d.a.goesTo(out.table.Spelling())
	d.a.goesAs(out, lo, hi)
	crash.Here(crash.PgBeforeSend)
	only := ""
	if d.opened != nil { // they belong in its transaction, and in no other process
		only = d.opened.tx.Intent().Incarnation
	}
	token, err := out.writer.SendRows(ctx, &out.array, lo, hi, only)
	if stuck, ok := errors.AsType[*feldera.UnansweredError](err); ok {
		return d.unanswered(ctx, out, lo, hi, b, stuck)
	}
	if err != nil {
		err = fmt.Errorf("deliver %d rows to table %s (transactions up to LSN %s): %w",
			hi-lo, out.table.Name, decode.FormatLSN(b.end), err)
		if o := d.opened; o != nil {
			err = fmt.Errorf("in the pipeline's transaction %d, which stays open: %w", o.tx.Intent().ID, err)
		}
		return err
	}
	b.keep(out, token)
	crash.Here(crash.PgSent)
	d.cfg.Metrics.sentBytes.Add(float64(out.array.BytesOf(lo, hi)))
	d.cfg.Beat()
	return nil
}

// sent takes a batch whose rows are all accepted.
func (d *deliverer) sent(ctx context.Context, b *batch) error {
	if len(b.tokens) > 0 {
		d.a.brought(b.end)
		d.a.evidence(b.first, b.last, ack.Accepted)
		crash.Here(crash.PgAccepted)
		if sabotage.On(sabotage.AckOnAccepted) {
			d.a.evidence(b.first, b.last, d.cfg.AckOn)
		}
	}
	if d.opened == nil {
		d.watch(b)
		return nil
	}
	d.opened.add(b)
	if b.end < d.opened.through {
		return nil
	}
	return d.commit(ctx)
}

// watch leaves a batch in flight until its tokens are completed.
func (d *deliverer) watch(b *batch) {
	if len(b.tokens) == 0 {
		// Nothing of it concerns the destination, so there is nothing to wait
		// for; the ledger still keeps it behind everything before it.
		d.a.evidence(b.first, b.last, d.cfg.AckOn)
		return
	}
	b.accepted = time.Now()
	b.waiting = map[ack.Rung]int{ack.Ingested: len(b.tokens), ack.Completed: len(b.tokens)}
	d.mu.Lock()
	d.inFlight = append(d.inFlight, b)
	d.cfg.Metrics.inFlight.Set(float64(len(d.inFlight)))
	d.mu.Unlock()
	if sabotage.On(sabotage.RowBeforeIngested) && d.rec != nil {
		d.rec.wake.set()
	}
	for _, t := range b.tokens {
		d.completions.Watch(t.token, func(e feldera.Evidence) { d.evidence(b, e) })
	}
}

// evidence takes what one token has proven. It runs on the poller.
func (d *deliverer) evidence(b *batch, e feldera.Evidence) {
	if sabotage.On(sabotage.GoneIsComplete) {
		if _, gone := errors.AsType[*feldera.IncarnationChanged](e.Err); gone {
			d.evidence(b, feldera.Evidence{Token: e.Token, Rung: ack.Ingested})
			e = feldera.Evidence{Token: e.Token, Rung: ack.Completed}
		}
	}
	if e.Err != nil {
		// No more evidence comes for any batch: the poller has ended.
		d.lose(e.Err)
		return
	}
	d.mu.Lock()
	if d.rec != nil && !b.row {
		// Its progress row tells of its completion.
		if e.Rung != ack.Ingested {
			d.mu.Unlock()
			if sabotage.On(sabotage.AckBeforeRow) {
				d.a.evidence(b.first, b.last, e.Rung)
			}
			return
		}
		b.proof = append(b.proof, e)
	}
	b.waiting[e.Rung]--
	all := b.waiting[e.Rung] == 0
	if all && e.Rung == ack.Completed {
		for i, other := range d.inFlight {
			if other == b {
				d.inFlight = append(d.inFlight[:i], d.inFlight[i+1:]...)
				break
			}
		}
		d.cfg.Metrics.inFlight.Set(float64(len(d.inFlight)))
		if d.durability != nil {
			if d.undurable.batches == 0 {
				d.undurable.since = time.Now()
			}
			d.undurable.batches++
			d.undurable.transactions += b.transactions()
		}
	}
	d.mu.Unlock()
	if !all {
		return
	}
	if e.Rung == ack.Ingested {
		crash.Here(crash.PgIngested)
	} else {
		if b.row { // in a transaction of the pipeline or by itself
			crash.Here(crash.PgProgressCompleted)
		}
		crash.Here(crash.PgCompleted)
	}
	d.a.evidence(b.first, b.last, e.Rung)
	if sabotage.On(sabotage.MaxWatermark) && e.Rung >= d.cfg.AckOn {
		d.a.overtake(b.end)
	}
	if d.rec != nil && e.Rung == ack.Ingested {
		d.rec.wake.set()
	}
	if e.Rung == ack.Completed && d.durability != nil {
		d.durability.Watch(e, func(e feldera.Evidence) { d.durable(b, e) })
	}
	if e.Rung == ack.Completed {
		d.cfg.Report(Status{Check: CheckDestination, OK: true, Message: "rows are completed"})
		d.finished.set()
	}
}

// lose ends the attempt: nothing more can be proven in it.
func (d *deliverer) lose(err error) {
	d.mu.Lock()
	d.inFlight, d.lost = nil, true
	d.undurable.batches, d.undurable.transactions = 0, 0
	d.mu.Unlock()
	d.a.fail(err)
	d.finished.set()
}

// durable takes the proof that a checkpoint holds a batch. It runs on the
// checkpointer.
func (d *deliverer) durable(b *batch, e feldera.Evidence) {
	if e.Err != nil {
		d.lose(e.Err)
		return
	}
	d.proven(b)
	d.a.evidence(b.first, b.last, ack.Durable)
	d.finished.set()
}

// proven counts a batch as one that a checkpoint holds.
func (d *deliverer) proven(b *batch) {
	d.mu.Lock()
	behind := d.behindCheckpoints()
	if !d.lost {
		d.undurable.batches--
		d.undurable.transactions -= b.transactions()
		d.undurable.since = time.Now()
	}
	caughtUp := behind && !d.behindCheckpoints()
	d.mu.Unlock()
	if caughtUp {
		d.cfg.Report(Status{Check: CheckDestination, OK: true, Message: "rows are in a checkpoint"})
	}
}
