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
// stands first in its batch: everything before it is then completed, and the
// table emptied, before a row of it is encoded.
//
// Emptying a table is a loop of its own and not a part of the batch, since the
// keys have to be asked for: a query sees what is completed, so
//
//	rows before → completed → page of keys → their deletes → completed → …
//	→ no key left → rows of the transaction and after it
//
// is in order. A crash anywhere in it leads to the same again: the transaction
// is not acknowledged before all of it is completed.
func (d *deliverer) deliverParts(work, finish context.Context, txs []*transaction) error {
	for len(txs) > 0 {
		n := 1
		for n < len(txs) && !d.empties(txs[n]) {
			n++
		}
		if d.empties(txs[0]) {
			if err := d.commitEarly(finish); err != nil {
				return err
			}
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

func (d *deliverer) empties(tx *transaction) bool {
	return d.cfg.Truncate == TruncateDeleteAll && len(tx.truncated) > 0 && !d.passesOver(tx)
}

// emptyTables deletes every row of the tables that tx truncates. Where one of
// them cannot be emptied it does nothing: the refusal comes when the message
// is met, after the transactions before it.
func (d *deliverer) emptyTables(work context.Context, tx *transaction) error {
	var outs []*output
	emptiers := make(map[*output]*feldera.Emptier)
	for _, name := range slices.SortedFunc(maps.Keys(d.a.ready.oids), func(x, y tableName) int { return strings.Compare(x.String(), y.String()) }) {
		if tx.truncated[d.a.ready.oids[name]] == 0 {
			continue
		}
		emptier, why := d.emptier(name)
		if why != "" {
			return nil
		}
		out := d.outputFor(d.a.ready.tables[name])
		outs, emptiers[out] = append(outs, out), emptier
	}
	if err := d.awaitCompleted(work); err != nil {
		return err
	}
	for _, out := range outs {
		if err := d.sole(work, out.table, retractsByTruncate); err != nil {
			return at(err, tx)
		}
	}
	for _, out := range outs {
		rows, err := d.empty(work, out, emptiers[out])
		if err != nil {
			return at(err, tx)
		}
		d.cfg.Metrics.truncatesApplied.Inc()
		d.a.s.log.InfoContext(work, "table emptied after a TRUNCATE at the source", "table", out.table.Spelling(), "rows", rows, "lsn", decode.FormatLSN(tx.end))
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

// awaitCompleted waits until no batch waits for completion.
func (d *deliverer) awaitCompleted(work context.Context) error {
	turn := time.NewTicker(idleTurn)
	defer turn.Stop()
	for d.unfinished() > 0 {
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
