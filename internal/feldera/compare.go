package feldera

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"holdfast/internal/decode"
)

// Comparer brings rows of one table into a form in which they can be compared:
// what the encoder would send of a source's row, and what a query gives back
// of the table's. The same value has the same bytes on both sides, whatever
// digits, zones, spellings or order of members it was written with.
//
// It is not safe for concurrent use.
type Comparer struct {
	enc  *Encoder
	cols []cmpColumn // of the key in the order of its declaration, then the others as the table has them
	keys int
	left []Uncompared
	sql  string

	array   Array // for what the encoder notes beside the bytes
	scratch []byte
	buf     []byte // values, each behind its length
	ends    []int  // where the values begin in buf
	vals    []jsontext.Value
	found   []bool
}

// cmpColumn is one column that is compared.
type cmpColumn struct {
	name string
	enc  *encColumn
}

// Uncompared is a column that is not compared, and why.
type Uncompared struct {
	Column string `json:"column"`
	Why    string `json:"why"`
}

// Image is a row in its comparable form. It is the caller's.
type Image struct {
	// Key identifies the row: see [Comparer.KeyText].
	Key []byte
	// Sum stands for the values of all columns that are compared.
	Sum [16]byte
	// Values are those of the columns, in the order of [Comparer.Columns]; they
	// are kept only where they were asked for.
	Values [][]byte
}

// absentValue stands for NULL in an image. No value begins with this byte: the
// others have a 1 in front.
const (
	nullMark  = 0
	valueMark = 1
)

// NewComparer prepares the comparison of what e encodes. Errors are
// *decode.Refusal: a table that has no key or cannot be read by a query, a key
// that cannot be compared.
func NewComparer(e *Encoder) (*Comparer, error) {
	t := e.table
	refuse := func(why, expected, do string) error {
		return &decode.Refusal{Reason: decode.ReasonUnsupported, What: "comparison", Where: "table " + t.spelling, Why: why, Expected: expected, Do: do}
	}
	if !t.HasKey() {
		return nil, refuse("it has no PRIMARY KEY, so its rows have no names by which they could be compared", "a PRIMARY KEY", "declare the source's key as the table's PRIMARY KEY")
	}
	if e.identity != nil {
		return nil, refuse("its PRIMARY KEY is where each row stands in the change log, which the source's table does not say: the rows of the two cannot be paired",
			"a PRIMARY KEY that the source has", "compare it by a query of your own, such as the number of rows")
	}
	if !t.Materialized {
		return nil, refuse("it is not materialized, so no query can read it", "a table that queries can read", "declare it with 'materialized' = 'true'")
	}
	m := &Comparer{enc: e}
	of := func(name string) *encColumn {
		for i := range e.cols {
			if e.cols[i].plan.name == name {
				return &e.cols[i]
			}
		}
		return nil
	}
	for _, i := range t.key {
		c := of(t.Columns[i].Name) // NewEncoder has seen to it
		if why := c.plan.unreadable(); why != "" || c.plan.kind >= planVariant {
			return nil, refuse("column "+strconv.Quote(c.plan.name)+" of its PRIMARY KEY has type "+c.plan.typ.String()+", by which a query finds no rows", "a PRIMARY KEY of scalar columns", "")
		}
		m.cols = append(m.cols, cmpColumn{c.plan.name, c})
	}
	m.keys = len(m.cols)
	for i := range t.Columns {
		col := &t.Columns[i]
		c := of(col.Name)
		switch {
		case col.Key:
		case c == nil:
			m.left = append(m.left, Uncompared{col.Name, "the source has no such column"})
		case c.plan.unreadable() != "":
			m.left = append(m.left, Uncompared{col.Name, c.plan.unreadable()})
		default:
			m.cols = append(m.cols, cmpColumn{col.Name, c})
		}
	}
	for _, name := range e.extra {
		m.left = append(m.left, Uncompared{name, "the Feldera table has no such column"})
	}
	names := make([]string, len(m.cols))
	for i := range m.cols {
		names[i] = QuoteName(m.cols[i].name)
	}
	m.sql = "SELECT " + strings.Join(names, ", ") + " FROM " + QuoteName(t.Name)
	m.vals, m.found = make([]jsontext.Value, len(m.cols)), make([]bool, len(m.cols))
	return m, nil
}

// unreadable says why a query's answer cannot carry values of the type, "" where
// it can. The engine writes its answers through Arrow, whose JSON has no maps
// with other keys than text.
func (p *plan) unreadable() string {
	switch p.kind {
	case planArray:
		return p.element.unreadable()
	case planMap:
		if p.key.kind != planText {
			return "a query's answer has no form for a MAP whose keys are " + p.key.typ.String()
		}
		return p.element.unreadable()
	case planStruct:
		for i := range p.fields {
			if why := p.fields[i].unreadable(); why != "" {
				return why
			}
		}
	default: // a scalar
	}
	return ""
}

// Uncompared gives the columns that are not compared.
func (m *Comparer) Uncompared() []Uncompared { return m.left }

// Columns gives the compared columns' names, those of the key first.
func (m *Comparer) Columns() []string {
	names := make([]string, len(m.cols))
	for i := range m.cols {
		names[i] = m.cols[i].name
	}
	return names
}

// KeyColumns gives the indexes, in the source's relation, of the key's columns
// in the order of the PRIMARY KEY.
func (m *Comparer) KeyColumns() []int {
	out := make([]int, m.keys)
	for i := range out {
		out[i] = m.cols[i].enc.source
	}
	return out
}

// Source gives the image of a source's row, which is parallel to the encoder's
// relation. The error is a *decode.Refusal where the row cannot be sent; the
// image then has its key, unless that is what cannot.
func (m *Comparer) Source(row []decode.Value, values bool) (Image, error) {
	if len(row) != len(m.enc.rel.Columns) {
		return Image{}, &decode.Refusal{Reason: decode.ReasonMalformed, What: "row", Where: "table " + m.enc.table.spelling, Why: fmt.Sprintf("it has %d columns, the relation %d", len(row), len(m.enc.rel.Columns))}
	}
	for i := range m.cols {
		c := m.cols[i].enc
		m.array.altered = m.array.altered[:0]
		var pr *problem
		if m.scratch, pr = c.append(m.scratch[:0], &row[c.source], &m.enc.policy, &m.array); pr != nil {
			ch := decode.OrderChange{Op: decode.Insert, Relation: m.enc.rel, After: row}
			var im Image
			if i >= m.keys {
				im = m.image(false)
				im.Sum = [16]byte{}
			}
			return im, m.enc.refusal(&ch, pr)
		}
		if err := m.put(i, canon{}, m.scratch); err != nil {
			return Image{}, fmt.Errorf("broken invariant: column %q of table %s as it would be sent: %w", m.cols[i].name, m.enc.table.spelling, err)
		}
	}
	return m.image(values), nil
}

// Answer gives the image of one row of a query's answer.
func (m *Comparer) Answer(row []byte, values bool) (Image, error) {
	clear(m.found)
	dec := jsontext.NewDecoder(bytes.NewBuffer(row))
	if t, err := dec.ReadToken(); err != nil || t.Kind() != '{' {
		return Image{}, fmt.Errorf("%w: instead of a row came %q", ErrIncomplete, clip(string(row[:min(len(row), maxMessage)]), maxMessage))
	}
	// The values are copied out of the decoder, which lends them until its next
	// read.
	m.scratch = m.scratch[:0]
	for dec.PeekKind() == '"' {
		name, err := dec.ReadToken()
		if err != nil {
			return Image{}, fmt.Errorf("%w: %w", ErrIncomplete, jsonCause(err))
		}
		i := slices.IndexFunc(m.cols, func(c cmpColumn) bool { return c.name == name.String() })
		raw, err := dec.ReadValue()
		if err != nil {
			return Image{}, fmt.Errorf("%w: %w", ErrIncomplete, jsonCause(err))
		}
		if i < 0 {
			continue // the count of all rows
		}
		at := len(m.scratch)
		m.scratch = append(m.scratch, raw...)
		m.vals[i], m.found[i] = m.scratch[at:len(m.scratch):len(m.scratch)], true
	}
	if t, err := dec.ReadToken(); err != nil || t.Kind() != '}' || atEnd(dec) != nil {
		return Image{}, fmt.Errorf("%w: a row is cut off", ErrIncomplete)
	}
	for i := range m.cols {
		raw := m.vals[i]
		if !m.found[i] {
			raw = jsontext.Value("null") // how some releases write NULL
		}
		if err := m.put(i, canon{answer: true}, raw); err != nil {
			return Image{}, fmt.Errorf("%w: column %q of table %s: %w", ErrIncomplete, m.cols[i].name, m.enc.table.spelling, err)
		}
	}
	return m.image(values), nil
}

// lengthSize is the length in front of each value of an image.
const lengthSize = 4

// put appends the i-th column's value.
func (m *Comparer) put(i int, c canon, raw jsontext.Value) (err error) {
	if i == 0 {
		m.buf, m.ends = m.buf[:0], m.ends[:0]
	}
	at := len(m.buf)
	m.ends = append(m.ends, at)
	m.buf, err = c.value(append(m.buf, 0, 0, 0, 0), &m.cols[i].enc.plan, raw)
	if err == nil {
		binary.BigEndian.PutUint32(m.buf[at:], uint32(len(m.buf)-at-lengthSize)) //nolint:gosec // a row is no gigabyte
	}
	return err
}

// image takes what buf holds.
func (m *Comparer) image(values bool) Image {
	keyEnd := len(m.buf)
	if m.keys < len(m.ends) {
		keyEnd = m.ends[m.keys]
	}
	im := Image{Key: bytes.Clone(m.buf[:keyEnd])}
	whole := sha256.Sum256(m.buf)
	copy(im.Sum[:], whole[:])
	if values {
		im.Values = split(m.buf)
	}
	return im
}

// split takes values apart that stand one after the other with their lengths.
// It gives nil for what is not of this form.
func split(b []byte) (parts [][]byte) {
	for len(b) > 0 {
		if len(b) < lengthSize {
			return nil
		}
		n := binary.BigEndian.Uint32(b)
		b = b[lengthSize:]
		if uint64(len(b)) < uint64(n) || n == 0 {
			return nil
		}
		parts = append(parts, bytes.Clone(b[:n]))
		b = b[n:]
	}
	return parts
}

// Different gives the names of the columns in which two images differ that have
// their values.
func (m *Comparer) Different(a, b *Image) (names []string) {
	for i := range m.cols {
		if i < len(a.Values) && i < len(b.Values) && !bytes.Equal(a.Values[i], b.Values[i]) {
			names = append(names, m.cols[i].name)
		}
	}
	return names
}

// ValueText writes the value of a column for people, bounded.
func (m *Comparer) ValueText(i int, value []byte) string {
	if len(value) == 0 || value[0] == nullMark {
		return "NULL"
	}
	switch m.cols[i].enc.plan.kind {
	case planBytes:
		return `\x` + clip(string(value[1:]), maxFragment)
	case planText:
		return strconv.Quote(clip(string(value[1:min(len(value), maxFragment)]), maxFragment))
	default:
		return clip(string(value[1:min(len(value), maxFragment)]), maxFragment)
	}
}

// KeyText writes an image's key for people, such as id=5,at=2026-01-02.
func (m *Comparer) KeyText(key []byte) string {
	parts := split(key)
	out := make([]string, 0, len(parts))
	for i, p := range parts {
		if i < m.keys {
			out = append(out, m.cols[i].name+"="+m.ValueText(i, p))
		}
	}
	return strings.Join(out, ",")
}

// SourceKey gives the texts that name a key to Postgres, in the order of the
// PRIMARY KEY: each is to be cast to its column's type.
func (m *Comparer) SourceKey(key []byte) ([]string, error) {
	parts := split(key)
	if len(parts) != m.keys {
		return nil, errForeignKey
	}
	out := make([]string, len(parts))
	for i, p := range parts {
		if p[0] == nullMark {
			return nil, errors.New("a column of the key is NULL")
		}
		text := string(p[1:])
		switch m.cols[i].enc.plan.kind {
		case planBytes:
			text = `\x` + text
		case planTimestampTZ:
			// ISO 8601 with its zone, which every setting reads alike.
		default: // as it is written
		}
		out[i] = text
	}
	return out, nil
}

// Select gives the query for all rows.
func (m *Comparer) Select() string { return m.sql }

// SelectKeys gives the query for the rows with the given keys, of which there
// is one at least.
func (m *Comparer) SelectKeys(keys [][]byte) (string, error) {
	var b strings.Builder
	b.WriteString(m.sql + " WHERE ")
	if m.keys == 1 {
		b.WriteString(QuoteName(m.cols[0].name) + " IN (")
	}
	for n, key := range keys {
		parts := split(key)
		if len(parts) != m.keys {
			return "", errForeignKey
		}
		if m.keys == 1 {
			if n > 0 {
				b.WriteString(", ")
			}
			b.WriteString(m.cols[0].enc.plan.literal(parts[0]))
			continue
		}
		if n > 0 {
			b.WriteString(" OR ")
		}
		b.WriteByte('(')
		for i, p := range parts {
			if i > 0 {
				b.WriteString(" AND ")
			}
			b.WriteString(QuoteName(m.cols[i].name) + " = " + m.cols[i].enc.plan.literal(p))
		}
		b.WriteByte(')')
	}
	if m.keys == 1 {
		b.WriteByte(')')
	}
	return b.String(), nil
}

// errForeignKey is a mistake of the caller.
var errForeignKey = errors.New("broken invariant: a key has another number of columns than the table's")

// SelectPage gives the query for at most rows rows behind a key, nil for the
// first ones, in the engine's own order, which OrderBy names.
func (m *Comparer) SelectPage(after []byte, rows int) (string, error) {
	sql := m.sql
	if after != nil {
		parts := split(after)
		if len(parts) != m.keys {
			return "", errForeignKey
		}
		// (a, b) > (x, y), written out.
		var alternatives []string
		for i := range parts {
			var all []string
			for j := range i {
				all = append(all, QuoteName(m.cols[j].name)+" = "+m.cols[j].enc.plan.literal(parts[j]))
			}
			all = append(all, QuoteName(m.cols[i].name)+" > "+m.cols[i].enc.plan.literal(parts[i]))
			alternatives = append(alternatives, "("+strings.Join(all, " AND ")+")")
		}
		sql += " WHERE " + strings.Join(alternatives, " OR ")
	}
	return sql + " ORDER BY " + m.OrderBy() + " LIMIT " + strconv.Itoa(rows), nil
}

// OrderBy names the key's columns for a query.
func (m *Comparer) OrderBy() string {
	names := make([]string, m.keys)
	for i := range names {
		names[i] = QuoteName(m.cols[i].name)
	}
	return strings.Join(names, ", ")
}

// literal writes a value of a key for a query so that it has the column's own
// type: the engine would make a float of a decimal without a cast, and
// nanoseconds of a timestamp, which have no year 2263.
func (p *plan) literal(value []byte) string {
	if len(value) == 0 || value[0] == nullMark {
		return "NULL"
	}
	text := string(value[1:])
	switch p.kind {
	case planInt:
		if p.maxPos > math.MaxInt64 {
			return "CAST(" + QuoteText(text) + " AS " + p.typ.String() + ")"
		}
		return text
	case planBool:
		return text
	case planFloat, planDecimal:
		return "CAST(" + QuoteText(text) + " AS " + p.typ.String() + ")"
	case planBytes:
		return "X'" + text + "'"
	case planDate:
		return "DATE " + QuoteText(text)
	case planTime:
		return "TIME " + QuoteText(text)
	case planTimestamp:
		return "arrow_cast(" + QuoteText(text) + ", 'Timestamp(Microsecond, None)')"
	case planTimestampTZ:
		return "arrow_cast(" + QuoteText(text) + ", 'Timestamp(Microsecond, Some(\"UTC\"))')"
	default:
		return QuoteText(text)
	}
}
