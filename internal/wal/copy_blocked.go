package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// Copied rows that cannot be carried, that the pipeline refuses, never answers,
// or ends at, each time, are named by their key. Nothing of a copy is atomic, so
// its requests are cut anywhere.

// suspectParts is into how many requests those rows are parted that may be what
// ends attempts. So two requests full of rows have become one row by the last
// but one of PoisonAttempts.
const suspectParts = 32

// copySuspects are the copied rows that were under way when each of the last
// attempts ended, and have not arrived since: at first all of the requests',
// then those of a part of them, then one.
type copySuspects struct {
	table string
	keys  map[string]bool // as the merge has them; bounded by what is under way at once
	times int
}

// suspected tells whether a row is to go apart from others.
func (g *struggle) suspected(table, key string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.suspects.table == table && g.suspects.keys[key]
}

// apart tells how many of the suspected rows of a table go together; 0 where
// there are none.
func (g *struggle) apart(table string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.suspects.table != table || len(g.suspects.keys) == 0 {
		return 0
	}
	return max(1, len(g.suspects.keys)/suspectParts)
}

// copied clears rows that have arrived.
func (g *struggle) copied(table string, keys []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.suspects.table != table {
		return
	}
	for _, key := range keys {
		delete(g.suspects.keys, key)
	}
	if len(g.suspects.keys) == 0 {
		g.suspects = copySuspects{}
	}
}

// copyDone forgets the suspects of a table whose copy is done.
func (g *struggle) copyDone(table string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.suspects.table == table {
		g.suspects = copySuspects{}
	}
}

// copyFailed counts an attempt that ended while requests of copied rows were
// under way. Rows that were so each time are suspects; at last it gives a
// refusal that names them.
func (g *struggle) copyFailed(underWay []*copyRequest, cause error) error {
	if len(underWay) == 0 {
		return nil
	}
	table, kind := underWay[0].ch.job.table().String(), underWay[0].ch.job.Kind
	g.mu.Lock()
	defer g.mu.Unlock()
	both, all := make(map[string]bool), make(map[string]bool)
	var named []string
	for _, req := range underWay {
		for _, key := range req.keys {
			all[key] = true
			if g.suspects.table == table && g.suspects.keys[key] {
				both[key] = true
			}
		}
		named = append(named, req.named)
	}
	if len(both) == 0 {
		g.suspects = copySuspects{table: table, keys: all, times: 1}
		return nil
	}
	g.suspects.keys = both
	if g.suspects.times++; g.suspects.times < PoisonAttempts {
		return nil
	}
	why := "the attempt to copy it ended"
	if _, changed := errors.AsType[*feldera.IncarnationChanged](cause); changed {
		why = "the pipeline came back as another process while it was being copied"
	}
	return &decode.Refusal{
		Reason: decode.ReasonRejected, What: strings.Join(named, " and "), Where: fmt.Sprintf("%s of %s", kind, table),
		Why:      fmt.Sprintf("%s, %d times in a row, without its arrival in between: it is most likely what ends it (last: %v)", why, g.suspects.times, cause),
		Expected: "a pipeline that takes the row", Do: "look at the pipeline's log and at this row; " + mendCopied,
	}
}

// mendCopied is what helps against a row that stops a copy: other than a
// transaction, it is not passed over.
const mendCopied = "mend the row at the source or what it meets in the pipeline, and start pgsource again: the row is read anew"

// mustStandAlone tells whether something is under way that has to arrive before
// anything else goes out, or before what comes next does. While a transaction of
// the pipeline is open nothing arrives before its commit, so nothing is waited
// for: what belongs in it are the rows of one transaction of the source then, or
// of a replay.
func (d *deliverer) mustStandAlone() bool {
	if d.opened != nil {
		return false
	}
	d.mu.Lock()
	n, copying, apart := len(d.inFlight), len(d.copying), d.apart
	d.mu.Unlock()
	switch {
	case copying > 0 && apart:
		return true
	case n+copying > 0 && d.a.s.struggle.cautious():
		return true
	}
	return n+copying > 0 && d.copyApart(d.delivered)
}

// copyApart tells whether the copied rows that could go out next, now that
// everything up to delivered is delivered, go alone.
func (d *deliverer) copyApart(delivered uint64) bool {
	ch := d.a.chunk.Load()
	if ch == nil || d.opened != nil || !d.a.merge.on.Load() {
		return false
	}
	table := ch.job.table().String()
	return d.a.s.struggle.apart(table) > 0 && d.a.merge.due(delivered) && d.a.s.struggle.suspected(table, d.a.merge.nextKey())
}

// copiesUnderWay gives the requests of copied rows that have not arrived.
func (d *deliverer) copiesUnderWay() []*copyRequest {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := slices.Clone(d.copying)
	if d.copyFailed != nil {
		list = append(list, d.copyFailed)
	}
	return list
}

// partCopied finds the row that the pipeline refuses, sends those before it
// where it takes that to find it, and gives its refusal.
func (d *deliverer) partCopied(work context.Context, ch *chunk, rows []copiedRow, refused *feldera.ArrayRefusedError) error {
	lo, hi := 0, len(rows)
	for hi-lo > 1 && refused.Index < 0 {
		middle := lo + (hi-lo)/2
		err := d.postCopiedRows(work, ch, rows, lo, middle)
		again, refusedAgain := errors.AsType[*feldera.ArrayRefusedError](err)
		switch {
		case refusedAgain:
			hi, refused = middle, again
		case err != nil:
			return err
		default:
			lo = middle
		}
	}
	r := *refused.Refusal
	r.What = rowsNamed(&d.copied, lo, hi, refused.Index) + ", which the pipeline refuses"
	if r.Where == "" {
		r.Where = "table " + ch.encoder.Table().Spelling()
	}
	r.Where = fmt.Sprintf("%s of %s, %s", ch.job.Kind, ch.rel, r.Where)
	r.Do = mendCopied
	return &r
}

// unansweredCopy takes a request of copied rows that gets no answer although
// the pipeline answers others. Several rows are parted by the next attempts.
func (d *deliverer) unansweredCopy(ch *chunk, lo, hi int, stuck *feldera.UnansweredError) error {
	where := fmt.Sprintf("%s of %s", ch.job.Kind, ch.rel)
	if hi-lo > 1 {
		return &replayError{fmt.Errorf("%s, %d rows for table %s, from here on in smaller requests: %w", where, hi-lo, ch.encoder.Table().Name, stuck)}
	}
	return &decode.Refusal{
		Reason: decode.ReasonRejected, What: rowsNamed(&d.copied, lo, hi, -1), Where: where, Why: stuck.Error(),
		Expected: "an answer within FELDERA_REQUEST_TIMEOUT",
		Do:       "give the request more time (FELDERA_REQUEST_TIMEOUT, FELDERA_REQUEST_LIFETIME), look at what is between pgsource and the pipeline; " + mendCopied,
	}
}

// about says of the refusal of a row what the row was read for.
func (ch *chunk) about(err error) error {
	refused, ok := errors.AsType[*decode.Refusal](err)
	if !ok {
		return fmt.Errorf("%s of %s: %w", ch.job.Kind, ch.rel, err)
	}
	r := *refused
	r.Where = fmt.Sprintf("%s of %s, %s", ch.job.Kind, ch.rel, r.Where)
	r.Do = mendCopied
	if refused.Do != "" {
		r.Do = refused.Do + "; or " + mendCopied
	}
	return &r
}

// keyed names the row of a refusal by the texts of its key, "" for NULL.
func keyed(refused *decode.Refusal, names []string, texts [][]byte) *decode.Refusal {
	r := *refused
	var parts []string
	for i, name := range names {
		const most = 80
		text := string(texts[i])
		if len(text) > most {
			text = strings.ToValidUTF8(text[:most], "") + "…"
		}
		parts = append(parts, name+"="+text)
	}
	r.Where = "key " + strings.Join(parts, ", ") + ", " + r.Where
	return &r
}
