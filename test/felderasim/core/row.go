package core

import (
	"encoding/binary"
	"math/big"
	"strconv"
	"strings"
)

// Row is a row, or the part of one that an update carries, as one string.
// Columns stand in storage order: those of the primary key first, in key
// order, then the others as declared. Each is a uvarint, 0 for "absent", 1 for
// NULL, n+2 for a value of n canonical bytes, followed by those bytes. So the
// key of a row is a prefix of it, and equal rows are equal strings.
type Row string

// rowMode says which columns of a row are read.
type rowMode uint8

const (
	wholeRow  rowMode = iota // absent nullable columns are NULL, absent NOT NULL ones an error
	keyOnly                  // only the key columns, others are not even looked at
	patchOnly                // the key columns and whatever else is there
)

type slot struct {
	state uint8 // 0 absent, 1 null, 2 value
	a, b  int   // in codec.scratch
}

// codec turns JSON rows of one table into Row strings. It is reused from row
// to row and is not safe for concurrent use.
type codec struct {
	t       *TableDef
	flavor  Flavor
	storage []int          // storage order → column index
	isKey   []bool         // by column index
	byName  map[string]int // canonical name → column index
	exact   []bool         // by column index: the name must match exactly
	deflt   [][]byte       // by column index: canonical bytes of DEFAULT, nil for none
	slots   []slot
	scratch []byte
	out     []byte
}

func storageOrder(t *TableDef) (order []int, isKey []bool) {
	isKey = make([]bool, len(t.Columns))
	for _, k := range t.PrimaryKey {
		order = append(order, k)
		isKey[k] = true
	}
	for i := range t.Columns {
		if !isKey[i] {
			order = append(order, i)
		}
	}
	return order, isKey
}

func newCodec(t *TableDef, fl Flavor) *codec {
	c := &codec{t: t, flavor: fl, byName: map[string]int{}, slots: make([]slot, len(t.Columns))}
	c.storage, c.isKey = storageOrder(t)
	c.exact = make([]bool, len(t.Columns))
	c.deflt = make([][]byte, len(t.Columns))
	for i, col := range t.Columns {
		c.byName[col.Name] = i
		c.exact[i] = col.CaseSensitive
		if col.Default != "" && !strings.EqualFold(col.Default, "null") {
			js, err := literalValue(col)
			if err != nil {
				continue // refused when the program was parsed
			}
			if v, n, null, verr := col.Type.appendValue(nil, js, 0, FlavorDefault, 0); verr == nil && !null && n == len(js) {
				c.deflt[i] = v
			}
		}
	}
	return c
}

// column finds the column a JSON key means, -1 for none.
func (c *codec) column(key []byte, guess int) int {
	if guess < len(c.t.Columns) && str(key) == c.t.Columns[guess].Name {
		return guess
	}
	if i, ok := c.byName[str(key)]; ok {
		return i
	}
	if i, ok := c.byName[strings.ToLower(string(key))]; ok && !c.exact[i] {
		return i
	}
	return -1
}

// fieldError names the column that could not be read; field is "" when the
// error is of the row as a whole.
type fieldError struct {
	field string
	err   *valueError
}

// read decodes the row at b[i] in the given mode. On success the row stands
// in c.out and keyLen is the length of its key prefix.
func (c *codec) read(b []byte, i int, mode rowMode) (keyLen, next int, ferr *fieldError) {
	clear(c.slots)
	c.scratch = c.scratch[:0]
	if i >= len(b) {
		return 0, i, &fieldError{"", errSyntax}
	}
	switch b[i] {
	case '{':
		next, ferr = c.readObject(b, i, mode)
	case '[':
		next, ferr = c.readPositional(b, i, mode)
	default:
		return 0, i, &fieldError{"", invalidType(b, i, "struct "+c.t.Name)}
	}
	if ferr != nil {
		return 0, i, ferr
	}
	return c.build(mode, next)
}

func (c *codec) set(col int, b []byte, i int) (int, *fieldError) {
	at := len(c.scratch)
	out, n, null, err := c.t.Columns[col].Type.appendValue(c.scratch, b, i, c.flavor, 0)
	if err != nil {
		return i, &fieldError{c.t.Columns[col].Name, err}
	}
	c.scratch = out
	if null {
		c.slots[col] = slot{state: 1}
	} else {
		c.slots[col] = slot{2, at, len(out)}
	}
	return n, nil
}

func (c *codec) readObject(b []byte, i int, mode rowMode) (int, *fieldError) {
	j := skipSpace(b, i+1)
	if j < len(b) && b[j] == '}' {
		return j + 1, nil
	}
	for guess := 0; ; guess++ {
		key, esc, n, ok := scanString(b, j)
		if !ok {
			return i, &fieldError{"", errSyntax}
		}
		if esc {
			if key, ok = unescape(nil, key); !ok {
				return i, &fieldError{"", errSyntax}
			}
		}
		j = skipSpace(b, n)
		if j >= len(b) || b[j] != ':' {
			return i, &fieldError{"", errSyntax}
		}
		j = skipSpace(b, j+1)
		col := c.column(key, guess)
		if col >= 0 && (mode != keyOnly || c.isKey[col]) {
			var ferr *fieldError
			if j, ferr = c.set(col, b, j); ferr != nil {
				return i, ferr
			}
		} else if j, ok = skipValue(b, j, 0); !ok {
			return i, &fieldError{"", errSyntax}
		}
		j = skipSpace(b, j)
		if j >= len(b) {
			return i, &fieldError{"", errSyntax}
		}
		if b[j] == '}' {
			return j + 1, nil
		}
		if b[j] != ',' {
			return i, &fieldError{"", errSyntax}
		}
		j = skipSpace(b, j+1)
	}
}

// readPositional reads a row written as an array of all its columns; for a
// key, of all the key's columns. What is beyond them is ignored.
func (c *codec) readPositional(b []byte, i int, mode rowMode) (int, *fieldError) {
	want := len(c.t.Columns)
	if mode == keyOnly {
		want = len(c.t.PrimaryKey)
	}
	j := skipSpace(b, i+1)
	if j < len(b) && b[j] == ']' {
		if want > 0 {
			return i, &fieldError{"", errAt(j+1, "invalid length 0, expected %d columns", want)}
		}
		return j + 1, nil
	}
	for n := 0; ; n++ {
		if n < want {
			col := n
			if mode == keyOnly {
				col = c.t.PrimaryKey[n]
			}
			var ferr *fieldError
			if j, ferr = c.set(col, b, j); ferr != nil {
				return i, ferr
			}
		} else {
			var ok bool
			if j, ok = skipValue(b, j, 0); !ok {
				return i, &fieldError{"", errSyntax}
			}
		}
		j = skipSpace(b, j)
		if j >= len(b) {
			return i, &fieldError{"", errSyntax}
		}
		if b[j] == ']' {
			if n+1 < want {
				return i, &fieldError{"", errAt(j+1, "invalid length %d, expected %d columns", n+1, want)}
			}
			return j + 1, nil
		}
		if b[j] != ',' {
			return i, &fieldError{"", errSyntax}
		}
		j = skipSpace(b, j+1)
	}
}

// build lays the slots out as a Row in c.out.
func (c *codec) build(mode rowMode, end int) (keyLen, next int, ferr *fieldError) {
	c.out = c.out[:0]
	for n, col := range c.storage {
		s := c.slots[col]
		switch s.state {
		case 0:
			needed := mode == wholeRow || c.isKey[col]
			switch {
			case !needed:
				c.out = append(c.out, 0)
			case mode == wholeRow && c.deflt[col] != nil:
				c.out = binary.AppendUvarint(c.out, uint64(len(c.deflt[col])+2))
				c.out = append(c.out, c.deflt[col]...)
			case c.t.Columns[col].Type.Nullable:
				c.out = append(c.out, 1)
			default:
				return 0, end, &fieldError{"", errAt(end, "missing field `%s`", c.t.Columns[col].Name)}
			}
		case 1:
			c.out = append(c.out, 1)
		default:
			c.out = binary.AppendUvarint(c.out, uint64(s.b-s.a+2))
			c.out = append(c.out, c.scratch[s.a:s.b]...)
		}
		if n+1 == len(c.t.PrimaryKey) {
			keyLen = len(c.out)
			if mode == keyOnly {
				return keyLen, end, nil
			}
		}
	}
	return keyLen, end, nil
}

// readFields decodes a CSV record.
func (c *codec) readFields(fields []string) (keyLen int, ferr *fieldError) {
	clear(c.slots)
	c.scratch = c.scratch[:0]
	if len(fields) < len(c.t.Columns) {
		return 0, &fieldError{"", errAt(0, "invalid length %d, expected %d columns", len(fields), len(c.t.Columns))}
	}
	for i, col := range c.t.Columns {
		f := fields[i]
		if f == "" && col.Type.Nullable && col.Type.Kind != Varchar && col.Type.Kind != Char {
			c.slots[i] = slot{state: 1}
			continue
		}
		at := len(c.scratch)
		switch col.Type.Kind {
		case Char, Varchar, Date, Time, Timestamp, TimestampTZ, UUID:
			out, why := col.Type.canonicalText(c.scratch, f)
			if why != "" {
				return 0, &fieldError{col.Name, errAt(0, "%s", why)}
			}
			c.scratch = out
		default:
			out, n, null, err := col.Type.appendValue(c.scratch, []byte(strings.TrimSpace(f)), 0, c.flavor, 0)
			if err != nil || n != len(strings.TrimSpace(f)) {
				return 0, &fieldError{col.Name, errAt(0, "invalid value %s, expected %s", strconv.Quote(f), col.Type.expected())}
			}
			if null {
				c.slots[i] = slot{state: 1}
				continue
			}
			c.scratch = out
		}
		c.slots[i] = slot{2, at, len(c.scratch)}
	}
	keyLen, _, ferr = c.build(wholeRow, 0)
	return keyLen, ferr
}

// RowReader reads the columns of Rows of one table.
type RowReader struct {
	t       *TableDef
	storage []int
	vals    []Cell
}

// Cell is one column of a row.
type Cell struct {
	// Known is false for a column an update does not carry.
	Known bool
	Null  bool
	// Raw is the canonical value; it aliases the row.
	Raw string
}

// NewRowReader makes a reader for rows of t.
func NewRowReader(t *TableDef) *RowReader {
	r := &RowReader{t: t, vals: make([]Cell, len(t.Columns))}
	r.storage, _ = storageOrder(t)
	return r
}

// Cells gives the columns of a row in declared order. The slice is reused by
// the next call.
func (r *RowReader) Cells(row Row) []Cell {
	i := 0
	s := string(row)
	for _, col := range r.storage {
		n, w := uvarint(s[i:])
		i += w
		switch n {
		case 0:
			r.vals[col] = Cell{}
		case 1:
			r.vals[col] = Cell{Known: true, Null: true}
		default:
			end := i + int(n) - 2 // written by build
			r.vals[col] = Cell{Known: true, Raw: s[i:end]}
			i = end
		}
	}
	return r.vals
}

func uvarint(s string) (uint64, int) {
	var x uint64
	for i := 0; i < len(s) && i < binary.MaxVarintLen64; i++ {
		if s[i] < 0x80 {
			return x | uint64(s[i])<<(7*i), i + 1
		}
		x |= uint64(s[i]&0x7f) << (7 * i)
	}
	return 0, len(s)
}

// JSON writes a row as an object, columns in declared order.
func (r *RowReader) JSON(dst []byte, row Row) []byte {
	dst = append(dst, '{')
	for i, c := range r.Cells(row) {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendQuoted(dst, []byte(r.t.Columns[i].Name))
		dst = append(dst, ':')
		if c.Null || !c.Known {
			dst = append(dst, "null"...)
		} else {
			dst = r.t.Columns[i].Type.AppendJSON(dst, []byte(c.Raw))
		}
	}
	return append(dst, '}')
}

// Values gives a row as Go values: nil, bool, int64, uint64 for unsigned
// types, float64, []byte for binary data, and string for the rest, DECIMAL
// and composite types (as JSON text) included.
func (r *RowReader) Values(row Row) map[string]any {
	out := make(map[string]any, len(r.vals))
	for i, c := range r.Cells(row) {
		col := r.t.Columns[i]
		if c.Null || !c.Known {
			out[col.Name] = nil
			continue
		}
		out[col.Name] = col.Type.goValue(c.Raw)
	}
	return out
}

func (t *Type) goValue(raw string) any {
	switch t.Kind {
	case Boolean:
		return raw == "true"
	case TinyInt, SmallInt, Integer, BigInt:
		n, _ := strconv.ParseInt(raw, 10, 64)
		return n
	case UTinyInt, USmallInt, UInteger, UBigInt:
		n, _ := strconv.ParseUint(raw, 10, 64)
		return n
	case Real, Double:
		f, _ := strconv.ParseFloat(raw, 64)
		return f
	case Binary, Varbinary:
		return []byte(raw)
	default:
		return raw
	}
}

// mergeRow lays a patch over a row of the same table: columns that the patch
// does not carry keep their value.
func mergeRow(old, patch Row) Row {
	var out []byte
	a, b := string(old), string(patch)
	for len(b) > 0 {
		na, wa := uvarint(a)
		nb, wb := uvarint(b)
		la, lb := wa, wb
		if na > 1 {
			la += int(na) - 2 // written by build
		}
		if nb > 1 {
			lb += int(nb) - 2 // written by build
		}
		if nb == 0 {
			out = append(out, a[:la]...)
		} else {
			out = append(out, b[:lb]...)
		}
		a, b = a[la:], b[lb:]
	}
	return Row(out)
}

// CompareDecimals orders two canonical DECIMAL texts by value; it is the
// collation of the query engine's DECIMAL columns.
func CompareDecimals(a, b string) int {
	x, okx := new(big.Rat).SetString(a)
	y, oky := new(big.Rat).SetString(b)
	if !okx || !oky {
		return strings.Compare(a, b)
	}
	return x.Cmp(y)
}
