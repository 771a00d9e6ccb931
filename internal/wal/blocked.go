package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// Rows that the pipeline refuses, and requests that it never answers, are named
// by their row where it says which, and by their transaction always. What is
// before that one is delivered first: it is not to blame.

// sendAround sends what it may of a batch of which the pipeline has refused the
// array of outputs[n], and gives the refusal of the transaction that is to
// blame. The tables before n have all their rows.
//
// Arrays are cut between transactions only, so that nobody sees a part of one.
// Where the pipeline does not say which row it was, the transactions are parted
// in halves until one stands alone.
func (d *deliverer) sendAround(ctx context.Context, txs []*transaction, n int, b *batch, refused *feldera.ArrayRefusedError) error {
	good, blamed := len(txs), d.outputs[n]
	sent := make([]int, len(d.outputs)) // transactions, by output
	for m, out := range d.outputs {
		why := refused
		if m != n {
			why = nil
		}
		// Of the tables behind it, only what is before the refused one.
		if hi := out.rowsThrough(good); m > n && hi > 0 {
			err := d.postRows(ctx, out, b, 0, hi)
			var ok bool
			if why, ok = errors.AsType[*feldera.ArrayRefusedError](err); err != nil && !ok {
				return err
			}
		}
		if why != nil {
			first, last, err := d.part(ctx, out, b, good, why)
			if err != nil {
				return err
			}
			good, blamed, refused = first, out, last
		}
		sent[m] = good
	}
	// A table that was sent to before good was lowered has rows of the refused
	// transaction, or from behind it.
	var torn []string
	for m, out := range d.outputs {
		if out.rowsThrough(sent[m]) > out.rowsThrough(good) {
			torn = append(torn, out.table.Spelling())
		}
	}
	tx := txs[good]
	if good == 0 {
		torn = append(torn, b.emptied...)
	}
	about := d.refusedIn(tx, blamed, blamed.rowsThrough(good), blamed.rowsThrough(good+1), refused, torn)
	if good == 0 || (d.opened != nil && d.opened.torn) {
		return about
	}
	b.last, b.end = txs[good-1].ticket, txs[good-1].end
	if err := d.sent(ctx, b); err != nil {
		return err
	}
	return about
}

// rowsThrough is how many rows of the array belong to the first n transactions
// of the batch.
func (out *output) rowsThrough(n int) int {
	switch {
	case n == 0 || len(out.through) == 0:
		return 0
	case n > len(out.through):
		return out.through[len(out.through)-1]
	}
	return out.through[n-1]
}

// part finds the first transaction, below hi, that the pipeline refuses rows of
// for one table, and sends the rows of those before it. refused is the refusal
// of all of them, and last becomes that of the transaction.
func (d *deliverer) part(ctx context.Context, out *output, b *batch, hi int, refused *feldera.ArrayRefusedError) (first int, last *feldera.ArrayRefusedError, err error) {
	lo := 0
	last = refused
	for {
		// The transactions from lo to below hi are refused together; those
		// without rows for this table have no part in it.
		for lo < hi && out.rowsThrough(lo+1) == out.rowsThrough(lo) {
			lo++
		}
		for hi-1 > lo && out.rowsThrough(hi-1) == out.rowsThrough(hi) {
			hi--
		}
		middle := lo + (hi-lo)/2
		if last.Index >= 0 {
			middle = sort.Search(hi-1, func(i int) bool { return out.rowsThrough(i+1) > last.Index })
			hi = middle + 1
		}
		if middle <= lo {
			return lo, last, nil
		}
		err := d.postRows(ctx, out, b, out.rowsThrough(lo), out.rowsThrough(middle))
		why, refusedAgain := errors.AsType[*feldera.ArrayRefusedError](err)
		switch {
		case refusedAgain:
			hi, last = middle, why
		case err != nil:
			return 0, nil, err
		default:
			lo = middle
		}
	}
}

// alreadyIn gives the tables that a batch has sent rows to.
func (d *deliverer) alreadyIn(b *batch) (tables []string) {
	for _, t := range b.tokens {
		if t.out != nil && !slices.Contains(tables, t.out.table.Spelling()) {
			tables = append(tables, t.out.table.Spelling())
		}
	}
	return tables
}

// refusedIn words the refusal of rows lo to below hi of an output's array, which
// are all of the transaction tx that is in it. torn are the tables that have
// rows of it already.
func (d *deliverer) refusedIn(tx *transaction, out *output, lo, hi int, refused *feldera.ArrayRefusedError, torn []string) error {
	r := *refused.Refusal
	r.What = rowsNamed(&out.array, lo, hi, refused.Index) + ", which the pipeline refuses"
	r.Where = out.where(tx.end, r.Where)
	r.Do = fmt.Sprintf("mend the rule in the pipeline that refuses it, and start pgsource again; or, as the last resort, write this transaction to a file and pass over all of it: pgsource skip %s", decode.FormatLSN(tx.end))
	if len(torn) > 0 {
		d.tear(&r, torn)
	}
	return &transactionError{xid: tx.xid, end: tx.end, err: &r}
}

// tear says what it means that the pipeline has rows of the transaction, or of
// later ones, already.
func (d *deliverer) tear(r *decode.Refusal, torn []string) {
	in := "they are visible"
	if o := d.opened; o != nil {
		o.torn = true
		in = fmt.Sprintf("they are in its transaction %d, which stays open, so that nothing in the pipeline completes, until pgsource is started again and has sent this transaction whole or was told to pass over it", o.tx.Intent().ID)
	}
	r.Why += fmt.Sprintf("; the pipeline has rows of this transaction, or of later ones, for table %s already: %s", strings.Join(torn, ", "), in)
	r.Do += "; what the pipeline has of it for other tables stays when it is passed over: delete it by hand, by the file"
}

// where names the place of a transaction's rows. inTable is what the refusal
// says of it, with the column and the row where it knows them.
func (out *output) where(end uint64, inTable string) string {
	if inTable == "" {
		inTable = "table " + out.table.Spelling()
	}
	return "LSN " + decode.FormatLSN(end) + ", " + inTable
}

// rowsNamed names a row by its key, or as one of several.
func rowsNamed(array *feldera.Array, lo, hi, index int) string {
	switch {
	case index >= 0:
		return "row " + array.Key(index)
	case hi-lo == 1:
		return "row " + array.Key(lo)
	default:
		return fmt.Sprintf("one of %d rows, the first one %s, the last one %s", hi-lo, array.Key(lo), array.Key(hi-1))
	}
}

// unanswered takes a request that gets no answer although the pipeline answers
// others. Several transactions are parted: all that is not acknowledged is read
// again and goes one by one. One that stands alone is refused by its rows.
func (d *deliverer) unanswered(ctx context.Context, out *output, lo, hi int, b *batch, stuck *feldera.UnansweredError) error {
	l := d.a.underWay()
	if l == nil || l.transactions > 1 {
		d.a.s.struggle.oneByOne(b.end)
		return &replayError{fmt.Errorf("deliver %d rows to table %s (transactions up to LSN %s), from here on one transaction at a time: %w",
			hi-lo, out.table.Name, decode.FormatLSN(b.end), stuck)}
	}
	r := &decode.Refusal{
		Reason: decode.ReasonRejected, What: rowsNamed(&out.array, lo, hi, -1), Where: out.where(l.last, ""),
		Why:      stuck.Error(),
		Expected: "an answer within FELDERA_REQUEST_TIMEOUT",
		Do: fmt.Sprintf("give the request more time (FELDERA_REQUEST_TIMEOUT, FELDERA_REQUEST_LIFETIME) or less to carry (PGSOURCE_BATCH_ROWS, PGSOURCE_BATCH_BYTES), look at what is between pgsource and the pipeline, and start pgsource again; "+
			"or, as the last resort, write this transaction to a file and pass over all of it: pgsource skip %s", decode.FormatLSN(l.last)),
	}
	if torn := d.alreadyIn(b); len(torn) > 0 {
		d.tear(r, torn)
	}
	d.a.s.log.ErrorContext(ctx, "a request of one transaction gets no answer, while the pipeline answers others", "xid", l.lastXID, "lsn", decode.FormatLSN(l.last), "requests", stuck.Times)
	return &transactionError{xid: l.lastXID, end: l.last, err: r}
}

// refusedRows is refused for what the pipeline itself did not take.
func (d *deliverer) refusedRows(finish context.Context, err error) error {
	if _, about := errors.AsType[*transactionError](err); !about {
		return err
	}
	return d.refused(finish, err)
}
