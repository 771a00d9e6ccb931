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
// whole ones, and sends each batch to every table it touches. The next batch
// goes out when all requests of the last one are accepted; completion is
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
	// outputs are the Feldera tables that rows have gone to, in the order of
	// their first row, which is the order in which a batch is sent.
	outputs []*output
	// superseded counts, for the transaction being encoded and by relation, the
	// TRUNCATEs that are still to come in it: the rows before them are of no
	// account, since the table is empty already.
	superseded map[uint32]int
	// carried are the tokens of the deletes for the TRUNCATEs of the next
	// batch, which owes them its evidence.
	carried []feldera.Token

	mu       sync.Mutex
	inFlight []*batch // in the order in which they were sent
	// undurable counts the batches that are completed and wait for a
	// checkpoint. They take no memory but this and their units in the ledger.
	undurable int
	finished  signal
	stopping  time.Time // when the work ended; zero before
}

// output collects what one batch has for one Feldera table.
type output struct {
	table  *feldera.Table
	writer *feldera.Writer
	array  feldera.Array
	// counts are the rows by source table and operation, for the metric;
	// pending are those of the transaction being encoded.
	counts, pending map[rowCount]int
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
	// waiting counts the tokens that have not reached the rung yet.
	waiting map[ack.Rung]int
}

func newDeliverer(a *attempt, completions *feldera.Completions, durability *feldera.Durability) *deliverer {
	return &deliverer{
		a: a, cfg: &a.s.cfg, completions: completions, durability: durability, decoder: decode.NewPgOutput(),
		routes: make(map[uint32]*route), strangers: make(map[uint32]*decode.Relation), finished: newSignal(),
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
	var err error
	for err == nil {
		if !d.waitForRoom(work) {
			break
		}
		txs := d.collect(work)
		if txs == nil {
			break
		}
		d.cfg.Beat()
		err = d.deliverParts(work, txs)
	}
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
// it was received, for company. It returns nil when work ends.
func (d *deliverer) collect(work context.Context) []*transaction {
	turn := time.NewTimer(idleTurn)
	defer turn.Stop()
	for {
		wait := idleTurn
		if received, full, some := d.a.queue.oldest(d.cfg.BatchRows, d.cfg.BatchBytes); some {
			left := d.cfg.BatchAge - time.Since(received)
			if full || left <= 0 {
				return d.a.queue.take(d.cfg.BatchRows, d.cfg.BatchBytes)
			}
			wait = min(wait, left)
		}
		turn.Reset(wait)
		select {
		case <-d.a.queue.arrived:
		case <-turn.C:
			d.lookAround()
		case <-work.Done():
			return nil
		}
	}
}

// waitForRoom waits until fewer than InFlight batches wait for completion.
func (d *deliverer) waitForRoom(work context.Context) bool {
	turn := time.NewTicker(idleTurn)
	defer turn.Stop()
	for d.unfinished() >= d.cfg.InFlight {
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
	d.mu.Unlock()
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
	return len(d.inFlight) + d.undurable
}

// deliver sends one batch. When a transaction in the middle of it is refused,
// the ones before it are delivered first, since they are not to blame.
func (d *deliverer) deliver(work context.Context, txs []*transaction) error {
	if err := d.a.s.keeper.beforeSend(work, txs[len(txs)-1].end); err != nil {
		return err
	}
	good, refused := d.encode(work, txs)
	if good > 0 {
		if err := d.send(work, txs[:good]); err != nil {
			return err
		}
	}
	d.a.queue.release(txs)
	d.cfg.Metrics.buffered.Set(float64(d.a.queue.held()))
	if refused != nil {
		d.a.s.reportFailure(CheckDestination, refused)
	}
	return refused
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
	}
	return len(txs), nil
}

// send sends what encode has filled in, one table after the other, and leaves
// the batch in flight. It returns when every table has accepted its rows.
//
// The order of effects: all tables accepted → tokens watched → evidence. A
// batch of which some tables accepted and one did not is never marked; it is
// sent again as a whole, after a restart or a reconnect.
func (d *deliverer) send(work context.Context, txs []*transaction) error {
	b := &batch{first: txs[0].ticket, last: txs[len(txs)-1].ticket, end: txs[len(txs)-1].end}
	tokens := d.carried
	d.carried = nil
	for _, out := range d.outputs {
		if out.array.Rows() == 0 {
			continue
		}
		crash.Here(crash.PgBeforeSend)
		token, err := out.writer.Send(work, &out.array)
		if err != nil {
			return fmt.Errorf("deliver %d rows to table %s (transactions up to LSN %s): %w",
				out.array.Rows(), out.table.Name, decode.FormatLSN(b.end), err)
		}
		tokens = append(tokens, token)
		crash.Here(crash.PgSent)
		d.cfg.Metrics.sentBytes.Add(float64(out.array.Bytes()))
		for c, n := range out.counts {
			d.cfg.Metrics.rows.WithLabelValues(c.table, c.op.String()).Add(float64(n))
		}
	}
	if len(tokens) == 0 {
		// Nothing of it concerns the destination, so there is nothing to wait
		// for; the ledger still keeps it behind everything before it.
		d.a.evidence(b.first, b.last, d.cfg.AckOn)
		return nil
	}
	d.a.brought(b.end)
	d.a.evidence(b.first, b.last, ack.Accepted)
	crash.Here(crash.PgAccepted)
	b.accepted = time.Now()
	b.waiting = map[ack.Rung]int{ack.Ingested: len(tokens), ack.Completed: len(tokens)}
	d.mu.Lock()
	d.inFlight = append(d.inFlight, b)
	d.cfg.Metrics.inFlight.Set(float64(len(d.inFlight)))
	d.mu.Unlock()
	for _, token := range tokens {
		d.completions.Watch(token, func(e feldera.Evidence) { d.evidence(b, e) })
	}
	return nil
}

// evidence takes what one token has proven. It runs on the poller.
func (d *deliverer) evidence(b *batch, e feldera.Evidence) {
	if e.Err != nil {
		// No more evidence comes for any batch: the poller has ended.
		d.mu.Lock()
		d.inFlight, d.undurable = nil, 0
		d.mu.Unlock()
		d.a.fail(e.Err)
		d.finished.set()
		return
	}
	d.mu.Lock()
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
			d.undurable++
		}
	}
	d.mu.Unlock()
	if !all {
		return
	}
	if e.Rung == ack.Ingested {
		crash.Here(crash.PgIngested)
	} else {
		crash.Here(crash.PgCompleted)
	}
	d.a.evidence(b.first, b.last, e.Rung)
	if e.Rung == ack.Completed && d.durability != nil {
		d.durability.Watch(e, func(e feldera.Evidence) { d.durable(b, e) })
	}
	if e.Rung == ack.Completed {
		d.cfg.Report(Status{Check: CheckDestination, OK: true, Message: "rows are completed"})
		d.finished.set()
	}
}

// durable takes the proof that a checkpoint holds a batch. It runs on the
// checkpointer.
func (d *deliverer) durable(b *batch, e feldera.Evidence) {
	if e.Err != nil {
		d.mu.Lock()
		d.undurable = 0
		d.mu.Unlock()
		d.a.fail(e.Err)
		d.finished.set()
		return
	}
	d.mu.Lock()
	d.undurable--
	d.mu.Unlock()
	d.a.evidence(b.first, b.last, ack.Durable)
	d.finished.set()
}
