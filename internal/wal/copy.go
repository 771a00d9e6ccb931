package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/internal/ack"
	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// Existing rows are copied beside the stream, in chunks:
//
//	read (copy_read.go) → merge with what the stream brings (merge.go) → out
//	between two batches → completed, or durable → the cursor is durable → next
//
// The cursor moves on its own evidence alone: the stream's positions do not wait
// for a chunk, and a chunk does not wait for them. A crash at any step reads the
// chunk again, with a later snapshot: what was acknowledged meanwhile is in it,
// and what was not comes again behind it.

const (
	// copyRows and copyBytes bound one request of copied rows, maxCopying how
	// many of them may wait for completion: the stream's rows stand behind them.
	copyRows   = 2_000
	copyBytes  = 1 << 20
	maxCopying = 2
	// copyTurn is how often the copier looks again at what it waits for, where no
	// event tells it.
	copyTurn = 250 * time.Millisecond
	// flushAfter is how long a chunk waits for the stream to pass it before the
	// server is asked to write out the end of its WAL.
	flushAfter = 150 * time.Millisecond
)

// copier works on the jobs of one attempt.
type copier struct {
	a      *attempt
	d      *deliverer
	reader chunkReader
	// highest is the position behind the last chunk.
	highest uint64
	pace    copyPace
}

// copyTables works on jobs until work ends, and then notes whether all copied
// rows that went out are proven.
func (a *attempt) copyTables(work, hard context.Context, d *deliverer) {
	c := &copier{a: a, d: d, reader: chunkReader{a: a}, highest: a.ready.at}
	defer a.merge.idle()
	c.work(work, hard)
	c.reader.close(hard)
	<-a.drained.ch
	if !d.copiesProven() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(hard), lastSaveTimeout)
	defer cancel()
	if err := a.s.keeper.update(ctx, quietly(true)); err != nil {
		a.s.log.WarnContext(ctx, "the state could not be told that no copied rows are under way: the next start waits", "err", err)
	}
}

// work is the loop of copyTables.
func (c *copier) work(work, hard context.Context) {
	a := c.a
	retry := newBackOff()
	for work.Err() == nil {
		changed := a.s.copies.next()
		job, err := a.s.nextCopy(work)
		if err != nil {
			return
		}
		if job == nil {
			a.merge.idle()
			c.reader.tracked = false
			c.reader.close(hard)
			a.s.showCopies(nil, 0, 0)
			if a.s.cfg.Snapshot == SnapshotOnly {
				c.awaitStream(work)
				return
			}
			select {
			case <-changed:
			case <-work.Done():
			}
			continue
		}
		if err := c.turn(work, hard, job); err == nil {
			retry.Reset()
		} else if !c.cope(work, job, err, retry.NextBackOff()) {
			return
		}
	}
}

// cope says what has kept a chunk from being copied, and waits; false when that
// ends the attempt.
func (c *copier) cope(work context.Context, job *copyJob, err error, wait time.Duration) bool {
	s := c.a.s
	var held *waiting
	var hinted interface {
		error
		Hint() string
	}
	st := Status{Check: CheckSnapshot, Works: true, Message: fmt.Sprintf("%s of %s waits: %v", job.Kind, job.table(), err)}
	result := "failed"
	switch {
	case work.Err() != nil:
		return false
	case errors.Is(err, errReadAgain), errors.Is(err, errForgot):
		result, wait = "discarded", min(wait, time.Second)
		st.Hint = "a commit is in the WAL before it is visible; with a synchronous standby that is away, long before"
	case errors.Is(err, errRestart):
		s.cfg.Metrics.snapshot.chunks.WithLabelValues("restarted").Inc()
		s.log.WarnContext(work, "the table was rewritten or altered: its copy begins again", "table", job.table().String(), "rows", job.Rows)
		return s.updateCopy(work, job.ID, func(j *copyJob) { j.beginAgain() }) == nil
	case errors.As(err, &held):
		result, wait = "waited", min(wait, 2*time.Second)
		st.Hint = held.do
	default:
		if _, refused := errors.AsType[*decode.Refusal](err); refused {
			s.reportFailure(CheckSnapshot, err)
			c.a.fail(err)
			return false
		}
		c.reader.close(work)
		if errors.As(err, &hinted) {
			st.Hint = hinted.Hint()
		}
		s.cfg.Metrics.retries.WithLabelValues("snapshot").Inc()
		s.log.WarnContext(work, "a chunk could not be read, trying again", "table", job.table().String(), "err", err, "wait", wait)
	}
	s.cfg.Metrics.snapshot.chunks.WithLabelValues(result).Inc()
	s.cfg.Report(st)
	return sleep(work, wait) == nil
}

// turn copies one chunk.
func (c *copier) turn(work, hard context.Context, job *copyJob) error {
	s := c.a.s
	if now := s.cfg.Pipeline.Expected(); job.Incarnation != "" && job.Incarnation != now && s.cfg.AckOn != ack.Durable {
		s.log.WarnContext(work, "the pipeline is another incarnation: the copy begins again", "table", job.table().String(), "rows", job.Rows)
		return s.updateCopy(work, job.ID, func(j *copyJob) { j.beginAgain(); j.Incarnation = now })
	}
	if err := c.makeRoom(work, job); err != nil {
		return err
	}
	crash.Here(crash.PgCopyBefore)
	ch, err := c.reader.read(work, job)
	if err != nil {
		return err
	}
	defer c.a.merge.end()
	if len(ch.rows) > 0 {
		// Before a row goes out the state says that some may be under way.
		if err := s.setCopyQuiet(work, false); err != nil {
			return err
		}
		if err := c.await(work, hard, ch); err != nil {
			return err
		}
	}
	crash.Here(crash.PgCopyProven)
	// hard: what is proven is saved also when work has ended meanwhile.
	err = c.save(hard, ch)
	crash.Here(crash.PgCopySaved)
	return err
}

// makeRoom waits while the stream itself is behind: a copy must not add to
// that.
func (c *copier) makeRoom(work context.Context, job *copyJob) error {
	for told := false; ; {
		c.a.mu.Lock()
		lag := c.a.walEnd - min(c.a.walEnd, c.a.ledger.Acknowledged())
		c.a.mu.Unlock()
		held := c.a.queue.held()
		limit := c.a.s.cfg.SnapshotLag
		if (limit == 0 || lag <= uint64(limit)) && held <= c.a.s.cfg.MemoryLimit/2 { //nolint:gosec // a limit is positive
			c.a.s.cfg.Metrics.snapshot.paused.Set(0)
			return work.Err()
		}
		if !told {
			told = true
			c.a.s.cfg.Metrics.snapshot.paused.Set(1)
			c.a.s.cfg.Report(Status{
				Check: CheckSnapshot, OK: true,
				Message: fmt.Sprintf("%s of %s pauses: the stream is behind (%s not acknowledged, %s buffered)", job.Kind, job.table(), BytesText(int64(lag)), BytesText(held)), //nolint:gosec // WAL of one server fits
			})
		}
		if err := sleep(work, copyTurn); err != nil {
			return err
		}
	}
}

// await waits until the rows of a chunk have gone out and are proven. When work
// ends it waits on for the evidence of what has gone out, as long as the
// deliverer does.
func (c *copier) await(work, hard context.Context, ch *chunk) error {
	flush := time.NewTimer(flushAfter)
	defer flush.Stop()
	turn := time.NewTicker(copyTurn)
	defer turn.Stop()
	for {
		select {
		case <-ch.proven.ch:
			return nil
		case <-flush.C:
			if c.a.received() < ch.through {
				c.nudge(work)
			}
		case <-turn.C:
			if _, err := c.a.merge.left(); err != nil {
				return err
			}
		case <-c.a.drained.ch:
			select {
			case <-ch.proven.ch:
				return nil
			default:
			}
			return errors.New("stopped before the chunk was proven")
		case <-hard.Done():
			return context.Cause(hard)
		}
	}
}

// nudge makes the server write out the end of its WAL, so that the stream comes
// past it: what is not a commit can lie in the server's memory for a quarter of
// a minute when nobody commits. An empty transaction with a number is the least
// that does; where that is not allowed, the chunk waits so long.
func (c *copier) nudge(work context.Context) {
	if err := c.reader.connect(work); err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(work, queryTimeout)
	defer cancel()
	if _, err := c.reader.conn.Exec(ctx, `SELECT pg_current_xact_id()`); err != nil {
		c.reader.close(work)
	}
}

// save makes the cursor durable behind a chunk whose rows are proven, and ends
// the job behind its last one.
func (c *copier) save(ctx context.Context, ch *chunk) error {
	s := c.a.s
	c.highest = max(c.highest, ch.through)
	over := false
	var left copyJob
	now := s.cfg.Pipeline.Expected()
	received := LSN(c.a.received())
	err := s.keeper.must(ctx, func(next *State) bool {
		st := next.Snapshot.clone()
		j := st.job(ch.job.ID)
		if j == nil {
			return false
		}
		j.Rows += int64(len(ch.rows))
		j.Total, j.Shape, j.Settle, j.Incarnation = ch.total(), ch.shape, 0, now
		if ch.job.Keys != nil {
			j.Done = ch.done
		} else if ch.after != nil {
			j.After = ch.after
		}
		left = *j
		if over = ch.last; over {
			st.Jobs = slices.DeleteFunc(st.Jobs, func(j copyJob) bool { return j.ID == ch.job.ID })
			st.know(Table{Schema: left.Schema, Name: left.Name}).copied(&left, received)
			st.Quiet = len(st.Jobs) == 0
			next.Resyncs = rowsCopied(next.Resyncs, ch.job.ID)
		}
		next.Snapshot = st
		return true
	})
	if err != nil {
		return err
	}
	c.pace.add(ch)
	s.cfg.Metrics.snapshot.chunks.WithLabelValues("copied").Inc()
	s.cfg.Metrics.snapshot.seconds.Observe(ch.took.Seconds())
	if over {
		s.cfg.Metrics.snapshot.percent.WithLabelValues(ch.job.table().String()).Set(100)
		s.struggle.copyDone(ch.job.table().String())
		s.log.InfoContext(ctx, "copy done", "kind", string(ch.job.Kind), "table", ch.job.table().String(), "rows", left.Rows, "restarts", left.Restarts)
		s.copies.changed()
		return nil
	}
	rate, remaining := c.pace.estimate(&left)
	s.showCopies(&left, rate, remaining)
	if c.pace.due() {
		s.log.InfoContext(ctx, "copying", "kind", string(left.Kind), "table", left.table().String(), "rows", left.Rows, "percent", fmt.Sprintf("%.1f", left.percent()),
			"rows_per_second", int64(rate), "remaining", remaining.Round(time.Second).String())
	}
	return nil
}

// awaitStream waits until the stream has passed the last chunk and all of that
// is acknowledged, and ends the run.
func (c *copier) awaitStream(work context.Context) {
	for {
		c.a.mu.Lock()
		done := c.a.ledger.Acknowledged() >= c.highest
		c.a.mu.Unlock()
		if done {
			if err := c.a.s.lostMeanwhile(work); err != nil {
				c.a.fail(err)
				return
			}
			c.a.s.log.InfoContext(work, "all tables are copied and the stream has passed them: the end of PGSOURCE_SNAPSHOT=only", "lsn", decode.FormatLSN(c.highest))
			c.a.fail(nil)
			return
		}
		if c.a.received() < c.highest {
			c.nudge(work)
		}
		if sleep(work, 2*copyTurn) != nil {
			return
		}
	}
}

// lostMeanwhile gives the refusal with which PGSOURCE_SNAPSHOT=only ends where
// the pipeline lost rows, or may have: nobody resyncs the tables then, and the
// copies that were done before are not made again.
func (s *Source) lostMeanwhile(ctx context.Context) error {
	st, err := s.keeper.get(ctx)
	if err != nil {
		return err
	}
	at := st.NeedsResync()
	if len(at) == 0 {
		return nil
	}
	return &decode.Refusal{
		Reason: decode.ReasonGap, What: "pipeline", Where: "tables " + listTables(at), Why: "it lost rows that were copied, or may have, and PGSOURCE_SNAPSHOT=only resyncs nothing",
		Expected: "a pipeline that keeps what it has completed until everything is copied",
		Do:       "start pgsource with PGSOURCE_SNAPSHOT=auto, which resyncs the tables; or compare them with the source (pgsource verify), and where nothing differs run: pgsource state accept -yes",
	}
}

// nextCopy gives the first job, nil for none.
func (s *Source) nextCopy(ctx context.Context) (*copyJob, error) {
	st, err := s.keeper.get(ctx)
	if err != nil || st == nil || st.Snapshot == nil || len(st.Snapshot.Jobs) == 0 {
		return nil, err
	}
	j := st.Snapshot.Jobs[0]
	return &j, nil
}

// updateCopy changes a job durably.
func (s *Source) updateCopy(ctx context.Context, id uint64, change func(*copyJob)) error {
	return s.keeper.must(ctx, func(next *State) bool {
		st := next.Snapshot.clone()
		j := st.job(id)
		if j == nil {
			return false
		}
		change(j)
		next.Snapshot = st
		return true
	})
}

// setCopyQuiet notes whether copied rows can be on their way.
func (s *Source) setCopyQuiet(ctx context.Context, quiet bool) error {
	return s.keeper.must(ctx, quietly(quiet))
}

func quietly(quiet bool) func(*State) bool {
	return func(next *State) bool {
		if next.Snapshot == nil || next.Snapshot.Quiet == quiet {
			return false
		}
		st := next.Snapshot.clone()
		st.Quiet = quiet
		next.Snapshot = st
		return true
	}
}

// copiesQuiet tells whether no copied rows of the process before can be on
// their way.
func (st *State) copiesQuiet() bool { return st.Snapshot == nil || st.Snapshot.Quiet }

// The deliverer's part.

// note tells the merge of a change that is delivered.
func (d *deliverer) note(r *route, ch *decode.OrderChange, tx *transaction) {
	m := d.a.merge
	if !m.wants(tx, r.rel.ID) {
		return
	}
	var old, now string
	if ch.Before != nil {
		key, err := r.encoder.AppendKey(nil, ch.Before, nil)
		if err != nil {
			m.refuse("a change of it has no key: " + err.Error())
			return
		}
		old = string(key)
	}
	if ch.After != nil {
		key, err := r.encoder.AppendKey(nil, ch.After, ch.Before)
		if err != nil {
			m.refuse("a change of it has no key: " + err.Error())
			return
		}
		now = string(key)
	}
	m.change(tx, ch, old, now)
}

// copyDue tells whether copied rows can go out now that everything up to
// delivered is delivered. A transaction of the pipeline that is open holds them
// back: they would become visible with it, and not be among what its commit
// waits for.
func (d *deliverer) copyDue(delivered uint64) bool {
	if d.opened != nil || !d.a.merge.due(delivered) {
		return false
	}
	apart := d.copyApart(delivered)
	d.mu.Lock()
	defer d.mu.Unlock()
	if apart || d.apart {
		return len(d.inFlight) == 0 && len(d.copying) == 0
	}
	return len(d.copying) < maxCopying
}

// copyRequest is one request of copied rows.
type copyRequest struct {
	ch   *chunk
	keys []string // of its rows, as the merge has them
	// named are its rows for people, where they go alone.
	named string
}

// sendCopied sends the next rows of the chunk, between two batches.
func (d *deliverer) sendCopied(work context.Context) error {
	ch := d.a.chunk.Load()
	if ch == nil {
		return nil // it is on its way
	}
	table, struggle := ch.job.table().String(), &d.a.s.struggle
	rows, _ := d.a.merge.next(copyRows, copyBytes, func(key string) bool { return struggle.suspected(table, key) }, struggle.apart(table))
	if len(rows) > 0 {
		if err := d.encodeCopied(ch, rows); err != nil {
			return err
		}
	}
	left, err := d.a.merge.left()
	if err != nil {
		return nil //nolint:nilerr // the copier reads the chunk again
	}
	if len(rows) > 0 {
		if err := d.postCopied(work, ch, rows); err != nil {
			return err
		}
		crash.Here(crash.PgCopySent)
	}
	d.mu.Lock()
	ch.sentAll = left == 0
	done := ch.sentAll && ch.sending == 0
	d.mu.Unlock()
	if done {
		ch.proven.close()
	}
	return nil
}

func (d *deliverer) encodeCopied(ch *chunk, rows []copiedRow) error {
	d.copied.Reset()
	for i := range rows {
		change := decode.OrderChange{Op: decode.Insert, Relation: ch.rel, After: rows[i].values, Position: decode.Position{LSN: ch.through}}
		if rows[i].absent {
			change.Op, change.Before, change.After = decode.Delete, rows[i].values, nil
		}
		if err := d.copied.Add(ch.encoder, &change); err != nil {
			err = ch.about(err)
			d.a.s.reportFailure(CheckSnapshot, err)
			return err
		}
	}
	return nil
}

// postCopied sends the rows that are encoded, and leaves them in flight.
func (d *deliverer) postCopied(work context.Context, ch *chunk, rows []copiedRow) error {
	err := d.postCopiedRows(work, ch, rows, 0, len(rows))
	if refused, ok := errors.AsType[*feldera.ArrayRefusedError](err); ok {
		err = d.partCopied(work, ch, rows, refused)
	}
	if _, refused := errors.AsType[*decode.Refusal](err); refused {
		d.a.s.reportFailure(CheckSnapshot, err)
	}
	return err
}

// postCopiedRows is postCopied for the rows lo to below hi.
func (d *deliverer) postCopiedRows(work context.Context, ch *chunk, rows []copiedRow, lo, hi int) error {
	out := d.outputFor(ch.encoder.Table())
	req := &copyRequest{ch: ch, keys: make([]string, 0, hi-lo)}
	for i := lo; i < hi; i++ {
		req.keys = append(req.keys, rows[i].key)
	}
	apart := d.a.s.struggle.suspected(ch.job.table().String(), rows[lo].key)
	if apart {
		req.named = rowsNamed(&d.copied, lo, hi, -1)
	}
	d.mu.Lock()
	d.copying = append(d.copying, req)
	d.apart = apart
	ch.sending++
	d.mu.Unlock()
	token, err := out.writer.SendRows(work, &d.copied, lo, hi, "")
	if err != nil {
		d.mu.Lock()
		d.copying = slices.DeleteFunc(d.copying, func(r *copyRequest) bool { return r == req })
		ch.sending--
		if _, refused := errors.AsType[*feldera.ArrayRefusedError](err); !refused {
			d.copyFailed = req // it may be applied, or still be
		}
		d.mu.Unlock()
	}
	if stuck, ok := errors.AsType[*feldera.UnansweredError](err); ok {
		return d.unansweredCopy(ch, lo, hi, stuck)
	}
	if err != nil {
		return fmt.Errorf("%s of %s, %d rows for table %s: %w", ch.job.Kind, ch.rel, hi-lo, out.table.Name, err)
	}
	m := d.cfg.Metrics
	m.snapshot.rows.WithLabelValues(ch.rel.String(), string(ch.job.Kind)).Add(float64(hi - lo))
	m.sentBytes.Add(float64(d.copied.BytesOf(lo, hi)))
	d.cfg.Beat()
	d.completions.Watch(token, func(e feldera.Evidence) { d.copiedEvidence(req, e) })
	return nil
}

// copiedEvidence takes what is proven of one request of copied rows. It runs on
// the poller, or the checkpointer.
func (d *deliverer) copiedEvidence(req *copyRequest, e feldera.Evidence) {
	switch {
	case e.Err != nil:
		d.lose(e.Err)
		return
	case e.Rung == ack.Completed && d.durability != nil:
		d.durability.Watch(e, func(e feldera.Evidence) { d.copiedEvidence(req, e) })
		return
	case e.Rung < d.cfg.AckOn:
		return
	}
	ch := req.ch
	d.a.s.struggle.copied(ch.job.table().String(), req.keys)
	d.mu.Lock()
	d.copying = slices.DeleteFunc(d.copying, func(r *copyRequest) bool { return r == req })
	if len(d.copying) == 0 {
		d.apart = false
	}
	ch.sending--
	done := ch.sentAll && ch.sending == 0
	d.mu.Unlock()
	if done {
		ch.proven.close()
	}
	d.a.merge.wake.set()
	d.finished.set()
}

// noteHeld tells the merge of a message of a transaction that is not sent, since
// the pipeline has it: to rows that were read it is a change like any other.
func (d *deliverer) noteHeld(msg []byte, tx *transaction) error {
	if !d.a.merge.on.Load() || d.passesOver(tx) {
		return nil
	}
	m, err := d.decoder.Decode(msg)
	if err != nil {
		return at(err, tx)
	}
	switch m.Kind {
	case decode.MsgInsert, decode.MsgUpdate, decode.MsgDelete:
		if r := d.routes[m.Change.Relation.ID]; r != nil && r.rel == m.Change.Relation {
			d.note(r, &m.Change, tx)
		}
	case decode.MsgTruncate:
		d.noteTruncated(m, tx)
	default:
	}
	return nil
}
