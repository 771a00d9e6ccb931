package wal

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/sabotage"
)

// route is the way of one relation's rows.
type route struct {
	rel     *decode.Relation
	encoder *feldera.Encoder
	out     *output
	// source names the relation among all that can feed the table.
	source string
	// stale are columns that were added or have another type since the start: see
	// staleColumns.
	stale []string
}

// row takes one message of a transaction.
func (d *deliverer) row(work context.Context, msg []byte, tx *transaction) error {
	if d.passesOver(tx) {
		d.passOver(work, msg, tx)
		return nil
	}
	m, err := d.decoder.Decode(msg)
	if err != nil {
		return at(err, tx)
	}
	alike(msg, m)
	switch m.Kind {
	case decode.MsgType:
		return nil // the decoder keeps it
	case decode.MsgRelation:
		return at(d.setRoute(work, m.Relation, tx), tx)
	case decode.MsgTruncate:
		return d.truncate(m, tx)
	case decode.MsgInsert, decode.MsgUpdate, decode.MsgDelete:
		if stranger := d.strangers[m.Change.Relation.ID]; stranger != nil {
			return at(notMapped(stranger), tx)
		}
		if err := d.unusable[m.Change.Relation.ID]; err != nil {
			return at(err, tx)
		}
		r := d.routes[m.Change.Relation.ID]
		if r == nil || r.rel != m.Change.Relation {
			return at(fmt.Errorf("broken invariant: relation %s has no route", m.Change.Relation), tx)
		}
		r.out.sequence++
		if d.superseded[r.rel.ID] > 0 {
			return nil // a TRUNCATE later in the transaction takes it away
		}
		if d.a.merge.on.Load() && !d.rehearsing {
			d.note(r, &m.Change, tx)
		}
		m.Change.Position = decode.Position{LSN: tx.end, Source: r.source, Sequence: r.out.sequence}
		if tx.end < d.gone[r.rel.ID] {
			err = r.out.array.AddGone(r.encoder, &m.Change)
		} else {
			err = r.out.array.Add(r.encoder, &m.Change)
		}
		if err != nil {
			if sabotage.On(sabotage.SkipUnrenderable) {
				return nil
			}
			return at(err, tx)
		}
		r.out.pending[rowCount{r.rel.String(), m.Change.Op}]++
		return nil
	default:
		return at(fmt.Errorf("broken invariant: message %q in a transaction's frames", byte(m.Kind)), tx)
	}
}

// setRoute compiles the way for a relation's rows, as the server has just
// described it.
func (d *deliverer) setRoute(work context.Context, rel *decode.Relation, tx *transaction) error {
	delete(d.unusable, rel.ID)
	table := d.a.ready.tables[nameOf(rel)]
	if table == nil {
		d.strangers[rel.ID] = rel
		return nil
	}
	if err := d.a.s.resolveTypes(work, rel, d.decoder.Type); err != nil {
		return err
	}
	was := d.before(rel, tx)
	encoder, err := d.encoderFor(was, rel, table)
	if err != nil {
		return err
	}
	if err := d.checkDrift(work, was, rel, table); err != nil {
		return err
	}
	before := d.routes[rel.ID]
	stale := staleColumns(was, rel, table)
	if before != nil {
		stale = append(stale, before.stale...)
	}
	slices.Sort(stale)
	stale = slices.Compact(stale)
	if ignored := encoder.Ignored(); len(ignored) > 0 && !d.rehearsing && (before == nil || !slices.Equal(before.encoder.Ignored(), ignored)) {
		d.a.s.log.WarnContext(work, "columns of the source are left out, as PGSOURCE_EXTRA_COLUMNS=ignore says",
			"table", rel.String(), "columns", ignored)
	}
	d.cfg.Metrics.ignoredColumns.WithLabelValues(rel.String()).Set(float64(len(encoder.Ignored())))
	d.cfg.Metrics.absentColumns.WithLabelValues(rel.String()).Set(float64(len(encoder.Missing())))
	d.routes[rel.ID] = &route{rel: rel, encoder: encoder, out: d.outputFor(table), source: d.a.sourceOf(rel), stale: stale}
	if !d.rehearsing {
		d.showShapes()
	}
	return nil
}

// showShapes says in health which columns have no counterpart on the other
// side. Tables that fit whole are not named.
func (d *deliverer) showShapes() {
	const most = 20
	var parts []string
	for _, r := range d.routes {
		if left := r.encoder.Ignored(); len(left) > 0 {
			parts = append(parts, fmt.Sprintf("%s: left out %s", r.rel, strings.Join(left, ", ")))
		}
		if missing := r.encoder.Missing(); len(missing) > 0 {
			parts = append(parts, fmt.Sprintf("%s: always NULL in Feldera %s", r.rel, strings.Join(missing, ", ")))
		}
		if len(r.stale) > 0 {
			parts = append(parts, fmt.Sprintf("%s: added or of another type since the start, and not sent again for older rows (pgsource resync): %s", r.rel, strings.Join(r.stale, ", ")))
		}
	}
	slices.Sort(parts)
	if len(parts) > most {
		parts = append(parts[:most], fmt.Sprintf("and %d more", len(parts)-most))
	}
	message := "every column has its counterpart"
	if len(parts) > 0 {
		message = strings.Join(parts, "; ")
	}
	d.cfg.Report(Status{Check: CheckSchema, OK: true, Message: message})
}

func notMapped(rel *decode.Relation) error {
	return &decode.Refusal{
		Reason: decode.ReasonSchema, What: "row of table", Where: rel.String(), Why: "the publication carries it, but PGSOURCE_TABLES does not map it",
		Expected: "only mapped tables in the publication, and partitioned ones under their own name (publish_via_partition_root)",
		Do:       "map it in PGSOURCE_TABLES; to take it out of the publication helps only for changes that are not in the WAL yet",
	}
}

// outputFor gives the one output of a Feldera table: several source tables
// may feed it, through one writer.
func (d *deliverer) outputFor(table *feldera.Table) *output {
	for _, out := range d.outputs {
		if out.table == table {
			return out
		}
	}
	out := &output{table: table, writer: d.cfg.Pipeline.Writer(table), counts: make(map[rowCount]int), pending: make(map[rowCount]int)}
	out.array.Quiet = d.rehearsing
	d.outputs = append(d.outputs, out)
	return out
}

// at adds where in the source it happened.
func at(err error, tx *transaction) error {
	if err == nil {
		return nil
	}
	return &transactionError{xid: tx.xid, end: tx.end, err: skippable(err, tx)}
}

// skippable adds the last resort to a refusal of what is in the WAL already,
// where no later change of the source can mend it.
func skippable(err error, tx *transaction) error {
	refused, ok := err.(*decode.Refusal) //nolint:errorlint // its text is added to, so it must be the whole error
	if !ok {
		return err
	}
	switch refused.Reason {
	case decode.ReasonValue, decode.ReasonIdentity, decode.ReasonSchema, decode.ReasonUnsupported:
	default:
		return err
	}
	last := *refused
	if last.Do != "" {
		last.Do += "; "
	}
	last.Do += "as the last resort, to write this transaction to a file and pass over all of it: pgsource skip " + decode.FormatLSN(tx.end)
	return &last
}
