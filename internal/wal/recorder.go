package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"holdfast/internal/ack"
	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/sabotage"
)

// recorder is the deliverer's part for effectively_once: it finds out what the
// pipeline holds before anything is sent, and writes a progress row behind each
// group of batches, whose completion is then what counts.
type recorder struct {
	store *feldera.ProgressStore
	// lane belongs to whoever writes rows: the recorder's goroutine, but for the
	// deliverer while it commits a transaction of the pipeline, before which
	// nothing is left in flight.
	lane *feldera.ProgressLane
	// held: the pipeline holds everything up to it, which is passed over; 0 for
	// nothing beyond the bookmark.
	held uint64
	// claim is the token of the first row.
	claim feldera.Token
	// passed collects what is passed over until held is reached.
	passed *batch
	// wake: a batch is ingested.
	wake signal
}

// storedProgress is what the state keeps of the progress table: see
// feldera.Noted.
type storedProgress struct {
	// Epoch is the highest that was claimed.
	Epoch int64 `json:"epoch"`
	// Pending: nothing is remembered of the rows but the epoch, since no claim is
	// completed yet after a reset of the state, or a first start. Otherwise the
	// one who noted its epoch could die before its claim, and the next one would
	// take the rows of before the reset for its own, and skip them.
	Pending bool `json:"pending,omitzero"`
	// Produced is the last acknowledged position that a progress row stands
	// for, RowEpoch and RowIncarnation name that row.
	Produced       LSN    `json:"produced_lsn"`
	RowEpoch       int64  `json:"row_epoch"`
	RowIncarnation string `json:"row_incarnation"`
}

// noted gives the state's memory as a decision wants it. A state without it is
// one that was reset, or that at_least_once has left.
func (st *State) noted() feldera.Noted {
	if st == nil || st.Progress == nil {
		return feldera.Noted{}
	}
	p := st.Progress
	produced := p.Produced
	if sabotage.On(sabotage.IdleCompared) {
		produced = st.Acknowledged
	}
	return feldera.Noted{
		Known: !p.Pending, Epoch: p.Epoch, Produced: uint64(produced), RowEpoch: p.RowEpoch, RowIncarnation: p.RowIncarnation,
	}
}

// effectivelyOnce tells whether the progress table is used, as prepare found.
func (s *Source) effectivelyOnce() bool { return s.cfg.ProgressTable != "" && !s.atLeastOnce.Load() }

// checkProgress is a part of prepare: it finds the level of delivery. Where
// effectively_once was asked for by name, what the pipeline lacks is refused.
func (s *Source) checkProgress(ctx context.Context, schema *feldera.Schema, targets map[tableName]*feldera.Table) error {
	if s.cfg.ProgressTable == "" {
		s.cfg.Report(Status{Check: CheckDelivery, OK: true, Message: "at_least_once, as set"})
		return nil
	}
	err := s.canRecord(ctx, schema, targets)
	var refused *decode.Refusal
	if err != nil && (!s.cfg.ProgressIfPossible || !errors.As(err, &refused)) {
		return fmt.Errorf("PGSOURCE_DELIVERY=effectively_once: %w", err)
	}
	if before := s.atLeastOnce.Swap(err != nil); err != nil && !before {
		s.log.WarnContext(ctx, "delivery at least once: more is not possible here", "err", err)
	}
	s.cfg.Report(Status{Check: CheckDelivery, OK: true, Message: s.levelText(refused)})
	return nil
}

// levelText says which level of delivery holds, and why not more.
func (s *Source) levelText(why *decode.Refusal) string {
	if why == nil {
		return "effectively_once, recorded in " + s.cfg.ProgressTable
	}
	return "at_least_once, since effectively_once cannot be held: " + why.Error()
}

// CheckDelivery is a preflight: it says which level of delivery holds, and what
// the pipeline lacks for more.
func (s *Source) CheckDelivery(ctx context.Context) (string, error) {
	if s.cfg.ProgressTable == "" {
		return "at_least_once, as set", nil
	}
	r := &ready{}
	targets, err := s.findTargets(ctx, r)
	if err != nil {
		return "", err
	}
	err = s.canRecord(ctx, r.schema, targets)
	var refused *decode.Refusal
	if err != nil && (!s.cfg.ProgressIfPossible || !errors.As(err, &refused)) {
		return "", err
	}
	return s.levelText(refused), nil
}

// canRecord tells why effectively_once is not possible, by name and with what
// mends it. An error that is no *decode.Refusal says nothing about that.
func (s *Source) canRecord(ctx context.Context, schema *feldera.Schema, targets map[tableName]*feldera.Table) error {
	refuse := func(why, expected, do string) error {
		return &decode.Refusal{Reason: decode.ReasonSetup, What: "PGSOURCE_DELIVERY=effectively_once", Why: why, Expected: expected, Do: do}
	}
	if _, none := s.cfg.State.(noStore); none {
		return refuse("no state is kept, so nobody could tell a loss from a first start", "a file or a table", "set PGSOURCE_STATE")
	}
	if s.cfg.TableAtomicity {
		return refuse("what is sent again after a crash would be seen table by table", "PGSOURCE_ATOMICITY=transaction", "set it")
	}
	if _, err := s.cfg.Pipeline.Progress(schema, s.cfg.ProgressTable, s.cfg.Slot, ""); err != nil {
		return err
	}
	for _, t := range s.cfg.Tables {
		if target := targets[tableName{t.Schema, t.Name}]; !target.HasKey() {
			return &decode.Refusal{
				Reason: decode.ReasonSetup, What: "PGSOURCE_DELIVERY=effectively_once", Where: "table " + target.Spelling(),
				Why:      "it has no PRIMARY KEY in Feldera, so rows that are sent again after a crash count twice",
				Expected: "a PRIMARY KEY: the source table's, or identity columns",
				Do:       "declare it; or set PGSOURCE_DELIVERY=at_least_once and accept duplicates",
			}
		}
	}
	tx, err := s.cfg.Pipeline.TransactionState(ctx)
	if err != nil {
		return fmt.Errorf("ask whether the pipeline has transactions: %w", err)
	}
	if tx.Status == "" {
		return refuse(noTransactions, "a build of Feldera with transactions", "upgrade Feldera, or set PGSOURCE_DELIVERY=at_least_once")
	}
	return nil
}

const noTransactions = "this pipeline has no transactions, so rows that are sent again after a crash would be seen one by one"

// take finds out what the pipeline holds, claims the progress table for this
// attempt, and tells the deliverer what to pass over. Nothing is sent before it
// returns.
func (d *deliverer) take(work context.Context) error {
	if !d.a.s.effectivelyOnce() {
		return nil
	}
	if !d.atomic {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "PGSOURCE_DELIVERY=effectively_once", Why: noTransactions,
			Expected: "a build of Feldera with transactions", Do: "upgrade Feldera, or set PGSOURCE_DELIVERY=at_least_once",
		}
	}
	s := d.a.s
	st, err := s.keeper.get(work)
	if err != nil {
		return err
	}
	if err := d.waitOut(work); err != nil {
		return err
	}
	store, err := d.cfg.Pipeline.Progress(d.a.ready.schema, d.cfg.ProgressTable, d.a.ready.identity.system+"/"+d.cfg.Slot, s.mapping())
	if err != nil {
		return err
	}
	var own *feldera.Intent
	if d.opened != nil {
		in := d.opened.tx.Intent()
		own = &in
	}
	var found *feldera.ProgressFound
	if err := d.patiently(func() (err error) { found, err = store.Read(work, own); return err }); err != nil {
		return fmt.Errorf("find out what the pipeline holds: %w", err)
	}
	noted := st.noted()
	dec := feldera.Decide(found.Lanes[""], noted, found.Incarnation, store.Mapping())
	if err := d.heed(work, &dec, st, found.Incarnation); err != nil {
		return err
	}
	r := &recorder{store: store, wake: newSignal()}
	begin := noted.Produced
	switch dec.Found {
	case feldera.ProgressAhead:
		begin, r.held = dec.Held, dec.Held
	case feldera.ProgressLost:
		begin = dec.Held
	case feldera.ProgressFresh, feldera.ProgressReset:
		if !noted.Known {
			begin = uint64(st.Rows) // no progress row stands for them, and they count as delivered
		}
	default:
	}
	if r.lane, err = store.Lane("", &dec, begin); err != nil {
		return err
	}
	crash.Here(crash.PgEpochNoted)
	err = d.patiently(func() (err error) {
		if r.claim, err = store.SendClaim(work, found.Incarnation, r.lane); err != nil {
			return err
		}
		crash.Here(crash.PgClaimSent)
		return store.AwaitClaim(work, d.opened != nil, r.claim)
	})
	if err != nil {
		return fmt.Errorf("claim the progress table: %w", err)
	}
	crash.Here(crash.PgClaimed)
	if err := d.nameClaim(work, r.lane, found.Incarnation); err != nil {
		return err
	}
	d.rec = r
	d.a.mu.Lock()
	d.a.rowEpoch, d.a.rowIncarnation = r.lane.Epoch(), found.Incarnation
	d.a.mu.Unlock()
	return nil
}

// nameClaim makes durable which row stands for what was acknowledged before
// progress was recorded. A claim inside an open transaction is not completed;
// its first row after that does it.
func (d *deliverer) nameClaim(work context.Context, l *feldera.ProgressLane, incarnation string) error {
	if d.opened != nil {
		return nil
	}
	return d.a.s.keeper.must(work, func(next *State) bool {
		if next.Progress == nil || !next.Progress.Pending {
			return false
		}
		next.Progress = &storedProgress{Epoch: next.Progress.Epoch, Produced: LSN(l.Position()), RowEpoch: l.Epoch(), RowIncarnation: incarnation}
		return true
	})
}

// mapping is the fingerprint of what goes where.
func (s *Source) mapping() string {
	parts := make([]string, 0, len(s.cfg.Tables))
	for _, t := range s.cfg.Tables {
		parts = append(parts, feldera.Fingerprint(t.Schema, t.Name, t.Target))
	}
	slices.Sort(parts)
	return feldera.Fingerprint(parts...)
}

// waitOut waits, after a restart of the pipeline, until no request that was
// meant for the process before can land in this one any more. A restart of
// pgsource itself has waited already.
func (d *deliverer) waitOut(work context.Context) error {
	s := d.a.s
	if !s.restarted.Swap(false) {
		return nil
	}
	wait := d.cfg.Pipeline.RequestLifetime()
	s.log.InfoContext(work, "waiting before anything is sent: a request meant for the pipeline's process before may still land in this one", "wait", wait)
	d.cfg.Report(Status{Check: CheckDestination, Works: true, Message: fmt.Sprintf("waiting for %v: a request meant for the pipeline's process before may still land in this one", wait)})
	if err := d.patiently(func() error { return sleep(work, wait) }); err != nil {
		s.restarted.Store(true)
		return err
	}
	d.cfg.Report(Status{Check: CheckDestination, OK: true, Message: "the pipeline has every table"})
	return nil
}

// heed says what was decided, and makes durable what follows from it before
// anything is written with the new epoch.
func (d *deliverer) heed(work context.Context, dec *feldera.Decision, st *State, incarnation string) error {
	s := d.a.s
	reason := dec.Reason(decode.FormatLSN)
	d.cfg.Metrics.progressFound.WithLabelValues(dec.Found.String()).Inc()
	switch dec.Found {
	case feldera.ProgressForeign:
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "progress table", Where: fmt.Sprintf("table %s, source %s/%s", d.cfg.ProgressTable, d.a.ready.identity.system, d.cfg.Slot),
			Why: reason, Expected: "the epoch that this pgsource has claimed last, since a slot has one pgsource and one state",
			Do: "stop the other one; where its state was lost or replaced by an older copy, " + wayBack,
		}
	case feldera.ProgressLost:
		s.log.ErrorContext(work, "the pipeline lost acknowledged transactions", "reason", reason)
	case feldera.ProgressRemapped, feldera.ProgressReset:
		s.log.WarnContext(work, "progress of the pipeline is not skipped over", "found", dec.Found.String(), "reason", reason)
	default:
		s.log.InfoContext(work, "progress of the pipeline", "found", dec.Found.String(), "reason", reason)
	}
	err := s.keeper.must(work, func(next *State) bool {
		p := storedProgress{Pending: !sabotage.On(sabotage.ResetForgotten)}
		if next.Progress != nil {
			p = *next.Progress
		}
		if !sabotage.On(sabotage.EpochByRow) {
			p.Epoch = dec.Epoch
		}
		next.Progress = &p
		if dec.Found == feldera.ProgressLost {
			// From here on the notice tells of it, until a person has accepted it.
			p = storedProgress{Epoch: dec.Epoch, Produced: LSN(dec.Held)}
			p.RowEpoch, p.RowIncarnation = dec.Completed()
			next.notice(Notice{
				Kind: NoticeLoss, Was: st.noted().RowIncarnation, Now: incarnation, From: LSN(dec.Held), To: next.Acknowledged,
				Noticed: time.Now().UTC(), Tables: s.tableNames(),
			})
		}
		return true
	})
	if err != nil {
		return err
	}
	d.cfg.Report(Status{Check: CheckProgress, OK: dec.Found != feldera.ProgressLost, Works: true, Message: reason})
	now, err := s.keeper.get(work)
	if err != nil {
		return err
	}
	s.reportNotices(now)
	return s.stopOnLoss(now)
}

// passHeld takes out of txs what the pipeline provably holds. Their relations are
// learned, since not every transaction brings its own. They are acknowledged
// together, on the completion of the claim: in between the state would name a
// position that no progress row stands for.
func (d *deliverer) passHeld(work context.Context, txs []*transaction) ([]*transaction, error) {
	if d.rec == nil || d.rec.held == 0 {
		return txs, nil
	}
	n := 0
	for n < len(txs) && txs[n].end <= d.rec.held {
		tx := txs[n]
		err := tx.each(func(msg []byte) error {
			if len(msg) > 0 && (decode.MessageKind(msg[0]) == decode.MsgRelation || decode.MessageKind(msg[0]) == decode.MsgType) {
				return d.row(work, msg, tx)
			}
			return d.noteHeld(msg, tx)
		})
		if err != nil {
			return nil, d.refused(work, err)
		}
		if d.rec.passed == nil {
			d.rec.passed = &batch{first: tx.ticket, row: true}
			d.rec.passed.keep(nil, d.rec.claim)
		}
		d.rec.passed.last, d.rec.passed.end = tx.ticket, tx.end
		n++
	}
	d.cfg.Metrics.heldAlready.Add(float64(n))
	d.settle(txs[:n])
	if b := d.rec.passed; b != nil && (n < len(txs) || b.end == d.rec.held) {
		d.a.s.log.InfoContext(work, "passed over what the pipeline holds", "lsn", decode.FormatLSN(b.end))
		d.rec.passed, d.rec.held = nil, 0
		d.a.brought(b.end)
		d.a.evidence(b.first, b.last, ack.Accepted)
		d.watch(b)
	}
	return txs[n:], nil
}

// lastRow gives the function that writes the progress row inside a transaction
// of the pipeline, behind all of its rows, and where its token will be; nil
// where none is due.
func (d *deliverer) lastRow() (write func(context.Context) (feldera.Token, error), row *feldera.Token) {
	sum := d.opened.sum
	if d.rec == nil || sum == nil || len(sum.tokens) == 0 {
		return nil, nil
	}
	row = new(feldera.Token)
	rows := d.opened.rows
	return func(ctx context.Context) (feldera.Token, error) {
		adv := feldera.Advance{Lane: d.rec.lane, Position: rows}
		for _, t := range sum.tokens {
			// Transaction.Commit has waited for it.
			adv.Data = append(adv.Data, feldera.Evidence{Token: t.token, Rung: ack.Ingested})
		}
		crash.Here(crash.PgBeforeProgress)
		tok, err := d.rec.store.Write(ctx, adv)
		if err == nil {
			crash.Here(crash.PgProgressSent)
		}
		*row = tok
		return tok, err
	}, row
}

// recording starts the goroutine that writes progress rows, and gives the
// function that ends it and waits for it.
func (d *deliverer) recording(hard context.Context) (end func()) {
	ctx, cancel := context.WithCancel(hard)
	var running sync.WaitGroup
	running.Go(func() { d.record(ctx) })
	return func() { cancel(); running.Wait() }
}

// record writes the rows for what is ingested, until ctx ends.
func (d *deliverer) record(ctx context.Context) {
	for {
		select {
		case <-d.rec.wake:
		case <-ctx.Done():
			return
		}
		for {
			group := d.ingested()
			if group == nil {
				break
			}
			if err := d.recordGroup(ctx, group); err != nil {
				if ctx.Err() == nil || !errors.Is(err, context.Cause(ctx)) {
					d.lose(err)
				}
				return
			}
		}
	}
}

// ingested gives the batches at the head of the line that are ingested and have
// no row yet, nil for none.
func (d *deliverer) ingested() (group []*batch) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, b := range d.inFlight {
		if b.row {
			continue
		}
		if b.waiting[ack.Ingested] > 0 && !sabotage.On(sabotage.RowBeforeIngested) {
			break
		}
		group = append(group, b)
	}
	return group
}

// recordGroup writes one row for a group, which from then on is one batch: it
// is completed when the row is, since the row came behind its rows.
func (d *deliverer) recordGroup(ctx context.Context, group []*batch) error {
	first, last := group[0], group[len(group)-1]
	adv := feldera.Advance{Lane: d.rec.lane, Position: last.end}
	for _, b := range group {
		adv.Data = append(adv.Data, b.proof...)
		if sabotage.On(sabotage.RowBeforeIngested) {
			for _, t := range b.tokens {
				adv.Data = append(adv.Data, feldera.Evidence{Token: t.token, Rung: ack.Ingested})
			}
		}
	}
	crash.Here(crash.PgBeforeProgress)
	tok, err := d.rec.store.Write(ctx, adv)
	if err != nil {
		return fmt.Errorf("write the progress row for the transactions up to LSN %s: %w", decode.FormatLSN(last.end), err)
	}
	crash.Here(crash.PgProgressSent)
	one := &batch{first: first.first, last: last.last, end: last.end, accepted: first.accepted, row: true}
	one.keep(nil, tok)
	one.waiting = map[ack.Rung]int{ack.Ingested: 1, ack.Completed: 1}
	d.mu.Lock()
	at := slices.Index(d.inFlight, first)
	if at >= 0 { // else the poller has given up all
		d.inFlight = slices.Replace(d.inFlight, at, at+len(group), one)
		d.cfg.Metrics.inFlight.Set(float64(len(d.inFlight)))
	}
	d.mu.Unlock()
	d.completions.Watch(tok, func(e feldera.Evidence) { d.evidence(one, e) })
	d.finished.set()
	return nil
}
