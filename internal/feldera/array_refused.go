package feldera

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sort"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"holdfast/internal/decode"
)

// ArrayRefusedError is the refusal of the changes of an array by the pipeline:
// nothing of the request was applied.
type ArrayRefusedError struct {
	// Refusal is the pipeline's, in its words.
	Refusal *decode.Refusal
	// Index is the place in the array of the first change that the pipeline
	// named, -1 where it named none. Others may be bad too.
	Index int
}

// Error is the refusal's.
func (e *ArrayRefusedError) Error() string { return e.Refusal.Error() }

// Unwrap gives the refusal.
func (e *ArrayRefusedError) Unwrap() error { return e.Refusal }

// UnansweredError says that requests with the same rows got no answer time after
// time, although the pipeline said each time, before and after the request's
// life, that it runs, and answers an empty request to the same table. So it is
// about this request, and an outage it is not. None of the requests can be
// applied any more; whether one was is not known.
type UnansweredError struct {
	// Times is how many requests in a row.
	Times int
	// Err is why the last one has no outcome.
	Err error
}

// Error says so.
func (e *UnansweredError) Error() string {
	return fmt.Sprintf("%d requests with these rows got no answer from a pipeline that runs, and that answers other requests to the table: %v", e.Times, e.Err)
}

// Unwrap gives the last reason.
func (e *UnansweredError) Unwrap() error { return e.Err }

// SendRows is [Writer.Send] for the changes lo to below hi of an array, which
// are one request of their own. What the pipeline refuses is an *[ArrayRefusedError].
// After [Config].UnansweredLimit requests it can be an *[UnansweredError]. only is
// the one incarnation that they may go to, as for [Writer.SendOnly]; "" for the
// expected one.
func (w *Writer) SendRows(ctx context.Context, a *Array, lo, hi int, only string) (Token, error) {
	if err := w.owns(a); err != nil {
		return Token{}, err
	}
	if err := w.take(ctx); err != nil {
		return Token{}, err
	}
	defer w.give()
	w.patience, w.named, w.only = w.c.cfg.UnansweredLimit, nil, only
	defer func() { w.patience, w.only = 0, "" }()
	tok, err := w.deliver(ctx, a.slice(lo, hi))
	if refused, ok := errors.AsType[*decode.Refusal](err); ok && refused.Reason == decode.ReasonRejected {
		return tok, &ArrayRefusedError{Refusal: refused, Index: a.find(lo, hi, w.named)}
	}
	return tok, err
}

// find gives the first change from lo to below hi that one of the faults is
// about, -1 where none is.
func (a *Array) find(lo, hi int, faults []rowFault) int {
	at := 1
	if lo > 0 {
		at = a.ends[lo-1]
	}
	for _, fault := range faults {
		if fault.InvalidText == nil || hi <= lo {
			continue
		}
		// The bracket behind the last row is not in buf yet.
		if end := findRow(a.buf[:a.ends[hi-1]], at, []byte(*fault.InvalidText)); end >= 0 {
			return sort.SearchInts(a.ends, end)
		}
	}
	return -1
}

// Key writes the key of one change for people: the row's place where the table
// has none. Long values are cut.
func (a *Array) Key(i int) string {
	if i < 0 || i >= len(a.ends) || a.table == nil {
		return "unknown"
	}
	place := fmt.Sprintf("number %d of the request, of a table without a key", i+1)
	var elements []map[string]map[string]jsontext.Value
	if !a.table.HasKey() || json.Unmarshal(a.slice(i, i+1), &elements) != nil || len(elements) == 0 {
		return place
	}
	var parts []string
	for _, row := range elements[len(elements)-1] { // one element, or a delete and an insert
		for name, value := range row {
			c := a.table.find(name)
			if c < 0 || !a.table.Columns[c].Key {
				continue
			}
			const most = 80
			text := []byte(value)
			if len(text) > most {
				text = append(bytes.ToValidUTF8(text[:most], nil), "…"...)
			}
			parts = append(parts, a.table.Columns[c].Name+"="+string(text))
		}
	}
	sort.Strings(parts)
	return strings.Join(parts, ", ")
}

// answersElse sends an empty array to the table: whether the pipeline answers
// it tells an outage from requests whose rows it cannot take. The caller has
// the turn, and no request is unsettled.
func (w *Writer) answersElse(ctx context.Context) (bool, error) {
	_, err := w.post(ctx, []byte("[]"))
	switch Classify(err) {
	case ClassRetryUncertain:
		w.unsettled = fmt.Errorf("an empty request to the table is not answered either: %w", err)
		return false, nil
	case ClassStopOperator, ClassOtherIncarnation:
		return false, w.final(err)
	case ClassRefuseRecord:
		return true, nil // of what was left in the endpoint by a body that was cut
	case ClassRetry:
	}
	return err == nil, nil
}
