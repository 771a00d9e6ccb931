package feldera

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json/jsontext"

	"holdfast/internal/decode"
)

// Emptier takes every row out of one table, page by page: the engine has no
// such operation. It asks for keys with an ad-hoc query and makes deletes of
// them. Memory is that of one page. It is not safe for concurrent use.
type Emptier struct {
	c       *Client
	table   *Table
	encoder *Encoder
	all     string // selects every key
	values  []decode.Value
	scratch []byte
}

// The bounds of one page: rows at most, and bytes of the query's answer.
const (
	maxPageRows  = 10_000
	maxPageBytes = 64 << 20
)

// NewEmptier prepares the emptying of t. Errors are *decode.Refusal: a table
// without a PRIMARY KEY, whose rows cannot be told apart, or with a key of a
// type that a query does not give back as it was sent.
func (c *Client) NewEmptier(t *Table) (*Emptier, error) {
	if !t.HasKey() {
		return nil, &decode.Refusal{
			Reason: decode.ReasonUnsupported, What: "emptying a table", Where: "table " + t.spelling, Why: "it has no PRIMARY KEY",
			Expected: "a key to delete its rows by", Do: "declare the PRIMARY KEY in the Feldera table, or empty it by other means",
		}
	}
	rel := &decode.Relation{Name: t.Name, Identity: decode.IdentityDefault}
	e := &Encoder{table: t, rel: rel}
	names := make([]string, 0, len(t.key))
	for n, i := range t.key {
		col := &t.Columns[i]
		pl, why := compile(&col.Type, 0)
		if why == "" && pl.kind >= planVariant {
			why = "a query gives back values of type " + col.Type.String() + " in another form"
		}
		if why != "" {
			return nil, &decode.Refusal{
				Reason: decode.ReasonUnsupported, What: "emptying a table", Where: "table " + t.spelling + ", column " + strconv.Quote(col.Name),
				Why: why, Expected: "a PRIMARY KEY of scalar columns", Do: "empty the Feldera table by other means",
			}
		}
		pl.name = col.Name
		rel.Columns = append(rel.Columns, decode.Column{Name: col.Name, Key: true})
		e.cols = append(e.cols, encColumn{plan: pl, source: n, member: append(appendString(nil, []byte(col.Name)), ':'), key: true})
		e.keys = append(e.keys, n)
		names = append(names, QuoteName(col.Name))
	}
	return &Emptier{
		c: c, table: t, encoder: e, values: make([]decode.Value, len(e.cols)),
		all: "SELECT " + strings.Join(names, ", ") + " FROM " + QuoteName(t.Name),
	}, nil
}

// Page fills a, emptied before, with deletes of at most rows rows that the
// table has, and gives their number: 0 when it has none. The query sees what
// is completed; a caller that deletes each page and waits for its completion
// before it asks for the next gets to the end.
//
// It tries again, for as long as ctx lets it, and halves a page that is too
// large to be read. Errors: *decode.Refusal, *[IncarnationChanged], or ctx's
// cause joined with the last reason.
func (m *Emptier) Page(ctx context.Context, rows int, a *Array) (int, error) {
	rows = max(1, min(rows, maxPageRows))
	r := m.c.retrier("read the keys of table " + strconv.Quote(m.table.Name))
	for {
		a.Reset()
		q := Query{Select: m.all + " LIMIT " + strconv.Itoa(rows), MaxBytes: maxPageBytes}
		err := m.c.Query(ctx, q, func(row []byte) error { return m.add(a, row) })
		refused, ok := errors.AsType[*decode.Refusal](err)
		switch {
		case err == nil:
			return a.Rows(), m.sameIncarnation(ctx, r)
		case ok && refused.Reason == decode.ReasonLimit && rows > 1:
			rows /= 2
			continue
		}
		if err := m.again(ctx, r, err); err != nil {
			return 0, err
		}
	}
}

// The bounds of a look at all keys.
const (
	maxKeysBytes = 1 << 40
	keysTimeout  = 6 * time.Hour
)

// All hands deletes of every row that the table has to send, at most rows rows
// or about size bytes at a time, in an array that it fills anew afterwards. It
// is for a table that does not change to a query's eyes: the query sees what was
// completed when it began, so the deletes may go into a transaction of the
// pipeline meanwhile. It reads one answer, as fast as send takes it, so memory
// is that of one array.
//
// Where the answer breaks off it is asked for again: a row is then deleted
// twice, which is once. Errors: send's, or those of Page.
func (m *Emptier) All(ctx context.Context, rows, size int, send func(*Array) error) (total int, err error) {
	r := m.c.retrier("read the keys of table " + strconv.Quote(m.table.Name))
	var a Array
	for {
		a.Reset()
		total = 0
		var sendErr error
		flush := func() error {
			total += a.Rows()
			sendErr = send(&a)
			a.Reset()
			return sendErr
		}
		err := m.c.Query(ctx, Query{Select: m.all, MaxBytes: maxKeysBytes, Timeout: keysTimeout}, func(row []byte) error {
			if err := m.add(&a, row); err != nil {
				return err
			}
			if a.Rows() < rows && a.Bytes() < size {
				return nil
			}
			return flush()
		})
		if err == nil && a.Rows() > 0 {
			err = flush()
		}
		switch {
		case sendErr != nil:
			return total, sendErr
		case err == nil:
			return total, m.sameIncarnation(ctx, r)
		}
		if err := m.again(ctx, r, err); err != nil {
			return total, err
		}
	}
}

// again waits before another look, or gives the error that ends them.
func (m *Emptier) again(ctx context.Context, r *retrier, err error) error {
	if _, ok := errors.AsType[*decode.Refusal](err); ok {
		return err
	}
	switch {
	case errors.Is(err, ErrIncomplete):
	case Classify(err) == ClassOtherIncarnation:
		return &IncarnationChanged{Was: m.c.Expected()}
	case Classify(err) == ClassStopOperator:
		if e, ok := errors.AsType[*Error](err); ok {
			return e.refusal(m.c)
		}
		return err
	}
	return r.wait(ctx, err)
}

// sameIncarnation sees to it that the answer came from the incarnation that is
// expected: a query says nothing of it, and "no rows" from another one would
// be taken for the end.
func (m *Emptier) sameIncarnation(ctx context.Context, r *retrier) error {
	for {
		now, err := m.c.Incarnation(ctx)
		if err == nil {
			return m.c.sameIncarnation(now)
		}
		if _, ok := errors.AsType[*decode.Refusal](err); ok || Classify(err) != ClassRetry && Classify(err) != ClassRetryUncertain {
			return err
		}
		if err := r.wait(ctx, err); err != nil {
			return err
		}
	}
}

// add makes a delete of one row of the answer.
func (m *Emptier) add(a *Array, row []byte) error {
	clear(m.values)
	m.scratch = m.scratch[:0]
	dec := jsontext.NewDecoder(bytes.NewBuffer(row))
	if t, err := dec.ReadToken(); err != nil || t.Kind() != '{' {
		return fmt.Errorf("%w: instead of a row came %q", ErrIncomplete, clip(string(row[:min(len(row), maxMessage)]), maxMessage))
	}
	for dec.PeekKind() == '"' {
		name, err := dec.ReadToken()
		if err != nil {
			return fmt.Errorf("%w: %w", ErrIncomplete, jsonCause(err))
		}
		i := slices.IndexFunc(m.encoder.rel.Columns, func(c decode.Column) bool { return c.Name == name.String() })
		raw, err := dec.ReadValue()
		if err != nil {
			return fmt.Errorf("%w: %w", ErrIncomplete, jsonCause(err))
		}
		if i < 0 {
			continue // the count of all rows
		}
		if m.values[i], err = m.value(&m.encoder.cols[i].plan, raw); err != nil {
			return err
		}
	}
	change := decode.OrderChange{Op: decode.Delete, Relation: m.encoder.rel, Before: m.values}
	return a.Add(m.encoder, &change)
}

// value reads one value as the engine's queries write it.
func (m *Emptier) value(p *plan, raw jsontext.Value) (decode.Value, error) {
	v := decode.Value{State: decode.Set, Bytes: raw}
	switch raw.Kind() {
	case 'n':
		return decode.Value{State: decode.Null}, nil // which the delete refuses
	case 't', 'f':
		v.Kind = decode.Bool
	case '{', '[':
		v.Kind = decode.JSON
	case '"':
		// The text goes into memory that lasts as long as the row: the
		// decoder's does not.
		at := len(m.scratch)
		var err error
		if m.scratch, err = jsontext.AppendUnquote(m.scratch, raw); err != nil {
			return v, fmt.Errorf("%w: %w", ErrIncomplete, jsonCause(err))
		}
		v.Bytes = m.scratch[at:len(m.scratch):len(m.scratch)]
		switch p.kind {
		case planBytes:
			v.Kind = decode.Hex
		case planInt, planFloat:
			v.Kind = decode.Number
		default: // text, and what is written as text
		}
		return v, nil
	default:
		v.Kind = decode.Number
	}
	at := len(m.scratch)
	m.scratch = append(m.scratch, raw...)
	v.Bytes = m.scratch[at:len(m.scratch):len(m.scratch)]
	return v, nil
}
