package wal

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"holdfast/internal/ack"
	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// TruncatePolicy says what becomes of a TRUNCATE at the source.
type TruncatePolicy uint8

const (
	// TruncateStop stops. The default.
	TruncateStop TruncatePolicy = iota
	// TruncateIgnore lets it pass, counted: the rows stay at the destination.
	TruncateIgnore
	// TruncateDeleteAll deletes every row of the destination table.
	TruncateDeleteAll
)

// maxTruncated bounds the relations that one transaction may truncate.
const maxTruncated = 65536

// addTruncate counts the relations of a Truncate message.
func (t *transaction) addTruncate(msg []byte) error {
	ids, err := decode.TruncatedIDs(msg)
	if err != nil {
		return err
	}
	if t.truncated == nil {
		t.truncated = make(map[uint32]int)
	}
	for _, id := range ids {
		if len(t.truncated) >= maxTruncated && t.truncated[id] == 0 {
			return &decode.Refusal{
				Reason: decode.ReasonLimit, What: "transaction", Where: fmt.Sprintf("xid %d", t.xid),
				Why: fmt.Sprintf("it truncates more than %d tables", maxTruncated), Expected: "fewer",
			}
		}
		t.truncated[id]++
	}
	return nil
}

// deliverParts delivers txs so that each one with a TRUNCATE to be carried out
// stands first in its batch. The engine has no such operation: the keys are asked
// for by a query, which sees what is completed, and deleted. So everything before
// it has to be completed first:
//
//	rows before → completed → transaction of the pipeline → all keys, and their
//	deletes → rows of the transaction and after it → commit
//
// Within the pipeline's transaction the query's answer does not change, and all
// of it becomes visible together. Where there is none (see empty), the table is
// emptied visibly. A crash anywhere in it leads to the same again: nothing is
// acknowledged before all of it is completed.
func (d *deliverer) deliverParts(work, finish context.Context, txs []*transaction) error {
	for len(txs) > 0 {
		n := 1
		for n < len(txs) && !d.empties(txs[n]) {
			n++
		}
		d.foresee()
		if d.empties(txs[0]) && (d.gone == nil || txs[0].end > d.goneThrough) {
			if err := d.commitEarly(finish); err != nil {
				return err
			}
		}
		if !d.atomic && d.empties(txs[0]) {
			if err := d.emptyTables(work, txs[0]); err != nil {
				return err
			}
		}
		if err := d.deliver(work, finish, txs[:n]); err != nil {
			return err
		}
		txs = txs[n:]
	}
	return nil
}

// truncation is a TRUNCATE that was received.
type truncation struct {
	relation uint32
	end      uint64
}

// noteTruncations keeps what foresee wants to know of a transaction. The caller
// holds a.mu.
func (a *attempt) noteTruncations(tx *transaction) {
	if a.foreseen || a.s.cfg.Truncate != TruncateDeleteAll || tx.end == a.ready.skip {
		return
	}
	for oid := range tx.truncated {
		if len(a.truncations) == maxTruncated {
			a.foreseen, a.truncations = true, nil // too many: nothing is foreseen
			return
		}
		a.truncations = append(a.truncations, truncation{oid, tx.end})
	}
}

// foresee looks, once in an attempt and before the first row is sent, for
// TRUNCATEs in what is sent again in one transaction of the pipeline. While that
// is open, a query does not show what was sent into it. So the rows before the
// last TRUNCATE of a table are sent as deletes: of those that this process sends,
// and of those that one before has left in it. What the table had before the
// transaction goes at the TRUNCATE itself.
func (d *deliverer) foresee() {
	if d.foreseen {
		return
	}
	d.foreseen = true
	through := d.replay
	if d.opened != nil {
		through = max(through, d.opened.through)
	}
	d.a.mu.Lock()
	defer d.a.mu.Unlock()
	list, complete := d.a.truncations, !d.a.foreseen && d.a.ledger.Last() >= through
	d.a.foreseen, d.a.truncations = true, nil
	if !d.atomic || !complete || through == 0 {
		return
	}
	d.gone, d.goneThrough = make(map[uint32]uint64), through
	for _, t := range list {
		if t.end <= through {
			d.gone[t.relation] = max(d.gone[t.relation], t.end)
		}
	}
}

func (d *deliverer) empties(tx *transaction) bool {
	return d.cfg.Truncate == TruncateDeleteAll && len(tx.truncated) > 0 && !d.passesOver(tx)
}

// emptying is a table that is to be emptied.
type emptying struct {
	out     *output
	emptier *feldera.Emptier
}

// emptyings gives the tables that are to be emptied for tx; nil for none, and
// where one of them cannot be: the refusal comes when the message is met, after
// the transactions before it.
func (d *deliverer) emptyings(tx *transaction) (list []emptying) {
	if !d.empties(tx) {
		return nil
	}
	for _, name := range slices.SortedFunc(maps.Keys(d.a.ready.oids), func(x, y tableName) int { return strings.Compare(x.String(), y.String()) }) {
		oid := d.a.ready.oids[name]
		if tx.truncated[oid] == 0 || tx.end < d.gone[oid] { // a later one does it
			continue
		}
		emptier, why := d.emptier(name)
		if why != "" {
			return nil
		}
		list = append(list, emptying{d.outputFor(d.a.ready.tables[name]), emptier})
	}
	return list
}

// mayEmpty waits until everything before is completed, so that a query sees all
// of the tables' rows, and asks whether nobody else feeds them.
func (d *deliverer) mayEmpty(work context.Context, tx *transaction, list []emptying) error {
	if len(list) == 0 {
		return nil
	}
	if d.opened == nil { // else nothing was in flight when it was opened
		if err := d.awaitCompleted(work); err != nil {
			return err
		}
	}
	for _, e := range list {
		if err := d.sole(work, e.out.table, retractsByTruncate); err != nil {
			return at(err, tx)
		}
	}
	return nil
}

// emptyWithin deletes every row of the tables in the pipeline's transaction that
// is open for batch b, which then owes these deletes its evidence too: a table
// that is found empty may owe that to others that no checkpoint holds yet.
func (d *deliverer) emptyWithin(ctx context.Context, tx *transaction, list []emptying, b *batch) error {
	for _, e := range list {
		send := func(page *feldera.Array) error {
			d.cfg.Beat()
			token, err := e.out.writer.SendOnly(ctx, page, d.opened.tx.Intent().Incarnation)
			if err != nil {
				return err
			}
			crash.Here(crash.PgSent)
			b.keep(e.out, token)
			d.cfg.Metrics.truncatedRows.WithLabelValues(e.out.table.Name).Add(float64(page.Rows()))
			d.cfg.Metrics.sentBytes.Add(float64(page.Bytes()))
			return nil
		}
		b.emptied = append(b.emptied, e.out.table.Spelling())
		var rows int
		err := d.patiently(func() (err error) {
			rows, err = e.emptier.All(ctx, d.cfg.BatchRows, d.cfg.BatchBytes, send)
			if err == nil && rows == 0 {
				err = send(&feldera.Array{})
			}
			return err
		})
		if err != nil {
			return at(fmt.Errorf("empty table %s in the pipeline's transaction %d, which stays open: %w", e.out.table.Spelling(), d.opened.tx.Intent().ID, err), tx)
		}
		d.emptied(ctx, e, rows, tx)
	}
	return nil
}

// emptied says that it was done.
func (d *deliverer) emptied(ctx context.Context, e emptying, rows int, tx *transaction) {
	d.cfg.Metrics.truncatesApplied.Inc()
	d.a.s.log.InfoContext(ctx, "table emptied after a TRUNCATE at the source", "table", e.out.table.Spelling(), "rows", rows, "lsn", decode.FormatLSN(tx.end))
}

// emptyTables deletes every row of the tables that tx truncates, before a row of
// it is encoded, where there is no transaction of the pipeline for it.
func (d *deliverer) emptyTables(work context.Context, tx *transaction) error {
	list := d.emptyings(tx)
	if err := d.mayEmpty(work, tx, list); err != nil {
		return err
	}
	for _, e := range list {
		rows, err := d.empty(work, e.out, e.emptier)
		if err != nil {
			return at(err, tx)
		}
		d.emptied(work, e, rows, tx)
	}
	return nil
}

// emptier prepares to carry out the TRUNCATE of a source table, or says why
// that cannot be done.
func (d *deliverer) emptier(name tableName) (m *feldera.Emptier, why string) {
	m, err := d.cfg.Pipeline.NewEmptier(d.a.ready.tables[name])
	if err == nil {
		return m, ""
	}
	why = err.Error()
	if refused, ok := errors.AsType[*decode.Refusal](err); ok {
		why = "the Feldera " + refused.Where + " cannot be emptied: " + refused.Why
	}
	return nil, why
}

// awaitCompleted waits until no batch waits for completion, and no copied rows.
func (d *deliverer) awaitCompleted(work context.Context) error {
	turn := time.NewTicker(idleTurn)
	defer turn.Stop()
	for d.unfinished() > 0 || len(d.copiesUnderWay()) > 0 {
		select {
		case <-d.finished:
		case <-turn.C:
			d.lookAround()
		case <-work.Done():
			return context.Cause(work)
		}
	}
	return work.Err()
}

// empty deletes every row of a table, and leaves a token whose completion
// stands for all of it, also where there was nothing to delete: a table found
// empty may owe that to deletes that no checkpoint holds yet.
func (d *deliverer) empty(work context.Context, out *output, emptier *feldera.Emptier) (rows int, err error) {
	var page feldera.Array
	for {
		d.cfg.Beat()
		n, err := emptier.Page(work, d.cfg.BatchRows, &page)
		if err != nil {
			return rows, fmt.Errorf("empty table %s: %w", out.table.Spelling(), err)
		}
		token, err := out.writer.Send(work, &page)
		if err != nil {
			return rows, fmt.Errorf("empty table %s: %w", out.table.Spelling(), err)
		}
		if n == 0 {
			d.carried = append(d.carried, token)
			return rows, nil
		}
		if err := d.awaitToken(work, token); err != nil {
			return rows, fmt.Errorf("empty table %s: %w", out.table.Spelling(), err)
		}
		rows += n
		d.cfg.Metrics.truncatedRows.WithLabelValues(out.table.Name).Add(float64(n))
		d.cfg.Metrics.sentBytes.Add(float64(page.Bytes()))
	}
}

// awaitToken waits until the rows of a token are completed.
func (d *deliverer) awaitToken(work context.Context, token feldera.Token) error {
	done := make(chan error, 1)
	d.completions.Watch(token, func(e feldera.Evidence) {
		if e.Err != nil || e.Rung == ack.Completed {
			done <- e.Err // Err comes once and alone, Completed comes last
		}
	})
	turn := time.NewTicker(idleTurn)
	defer turn.Stop()
	since := time.Now()
	for {
		select {
		case err := <-done:
			return err
		case <-turn.C:
			d.cfg.Beat()
			if time.Since(since) > completionPatience {
				d.cfg.Report(Status{
					Check: CheckDestination, Message: fmt.Sprintf("deletes for a TRUNCATE are accepted but not completed since %s", since.UTC().Format(time.RFC3339)),
					Hint: "look in the pipeline's /stats for an open transaction, a stuck output or a paused state; the LSN does not move meanwhile",
				})
			}
		case <-work.Done():
			return context.Cause(work)
		}
	}
}

// truncate takes a Truncate message of a transaction.
func (d *deliverer) truncate(m *decode.Message, tx *transaction) error {
	var names []string
	for _, rel := range m.Truncated {
		names = append(names, rel.String())
	}
	switch d.cfg.Truncate {
	case TruncateIgnore:
		if !d.rehearsing {
			d.cfg.Metrics.truncates.Inc()
			d.noteTruncated(m, tx)
		}
		return nil
	case TruncateDeleteAll:
		for _, rel := range m.Truncated {
			name := nameOf(rel)
			if d.a.ready.tables[name] == nil || d.a.ready.oids[name] != rel.ID {
				return at(notMapped(rel), tx)
			}
			if _, why := d.emptier(name); why != "" {
				return at(truncateRefused(rel.String(), why), tx)
			}
			d.superseded[rel.ID]--
		}
		d.noteTruncated(m, tx)
		return nil
	case TruncateStop:
	}
	refused := truncateRefused(fmt.Sprint(names), "the rows it removes are unknown to the stream, and Feldera has no such operation")
	refused.Do = "set PGSOURCE_TRUNCATE=delete_all to have every row of the Feldera table deleted; or empty it by other means, then start once with PGSOURCE_TRUNCATE=ignore"
	return at(refused, tx)
}

// noteTruncated tells the merge that the tables are empty as of here: rows that
// were read before are not, whatever becomes of those at the destination.
func (d *deliverer) noteTruncated(m *decode.Message, tx *transaction) {
	if d.rehearsing {
		return
	}
	for _, rel := range m.Truncated {
		d.a.merge.truncated(tx, rel.ID)
	}
}

func truncateRefused(where, why string) *decode.Refusal {
	return &decode.Refusal{
		Reason: decode.ReasonUnsupported, What: "TRUNCATE", Where: where, Why: why,
		Expected: "no TRUNCATE of a published table (DELETE is carried)",
		Do:       "delete the rows from the Feldera table by other means, then start once with PGSOURCE_TRUNCATE=ignore",
	}
}
