package decode

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// maxJSONDepth bounds the nesting of one value. Feldera's own parser stops at
// 128 levels, the row and its envelope included.
const maxJSONDepth = 100

// JSONRows decodes Kafka records whose value is one JSON object, a row of the
// destination table: the format named "json".
//
//   - A value is an upsert (Insert) of the row. Members are matched to columns
//     by name, exactly, or without regard to case where the column's name is
//     lower case, which is how Feldera folds unquoted names. Members that are
//     no column are ignored and counted (Unknown).
//   - No value (a tombstone) is a Delete by the record's key: a JSON object
//     with the key columns or, for a key of one column, a JSON scalar or plain
//     UTF-8 text.
//
// Numbers keep their digits. Duplicate names, invalid UTF-8, trailing bytes
// and values nested deeper than 100 levels are refused, since every one of
// them would make the row mean different things to different readers.
//
// It is not safe for concurrent use. What Decode returns aliases the record
// and the decoder, and is valid until the next call.
type JSONRows struct {
	// RefuseUnknown refuses members that are no column, instead of ignoring
	// and counting them. It is set before the first Decode.
	RefuseUnknown bool

	rel     *Relation
	columns map[string]int
	keys    []int
	dec     jsontext.Decoder
	src     bytes.Buffer
	row     []Value
	scratch []byte
	change  OrderChange
	unknown uint64
}

// NewJSONRows makes a decoder for rows of rel, whose key columns are the
// destination's primary key.
func NewJSONRows(rel *Relation) *JSONRows {
	d := &JSONRows{rel: rel, columns: make(map[string]int, len(rel.Columns)), row: make([]Value, len(rel.Columns))}
	for i := range rel.Columns {
		d.columns[rel.Columns[i].Name] = i
		if rel.Columns[i].Key {
			d.keys = append(d.keys, i)
		}
	}
	return d
}

// Unknown counts the members that were ignored because the table has no such
// column.
func (d *JSONRows) Unknown() uint64 { return d.unknown }

// Decode reads one record. Errors are *Refusal with the position in Where.
func (d *JSONRows) Decode(rec *Record) (*OrderChange, error) {
	key, value, pos := rec.Key, rec.Value, rec.Position
	clear(d.row)
	d.scratch = d.scratch[:0]
	d.change = OrderChange{Relation: d.rel, Position: pos}
	if value == nil {
		return d.tombstone(key, pos)
	}
	if err := d.object(value); err != nil {
		return nil, d.refuse("value", pos, err)
	}
	d.change.Op, d.change.After = Insert, d.row
	return &d.change, nil
}

func (d *JSONRows) tombstone(key []byte, pos Position) (*OrderChange, error) {
	if len(d.keys) == 0 {
		return nil, &Refusal{
			Reason: ReasonIdentity, What: "tombstone", Where: pos.String(),
			Why:      fmt.Sprintf("table %s has no primary key, so a delete by key has nothing to match", d.rel),
			Expected: "a table with a PRIMARY KEY, or a topic without tombstones",
		}
	}
	if err := d.key(key); err != nil {
		return nil, d.refuse("tombstone key", pos, err)
	}
	for _, i := range d.keys {
		if d.row[i].State != Set {
			return nil, d.refuse("tombstone key", pos, fmt.Errorf("key column %q is missing or null", d.rel.Columns[i].Name))
		}
	}
	d.change.Op, d.change.Before = Delete, d.row
	return &d.change, nil
}

func (d *JSONRows) key(key []byte) error {
	trimmed := bytes.TrimLeft(key, " \t\r\n")
	if len(trimmed) == 0 {
		return errors.New("the record has no key")
	}
	if trimmed[0] == '{' {
		return d.object(key)
	}
	if len(d.keys) != 1 {
		return fmt.Errorf("it is no object, and the table's key has %d columns", len(d.keys))
	}
	only := &d.row[d.keys[0]]
	raw, err := d.scalar(key)
	switch {
	case err == nil && raw[0] == '[':
		return errors.New("it is an array")
	case err == nil:
		*only, err = d.value(raw)
		return err
	case trimmed[0] == '"' || !utf8.Valid(key):
		return err // meant as JSON and broken, or no text at all
	}
	*only = Value{State: Set, Kind: Text, Bytes: key}
	return nil
}

// scalar reads src as exactly one JSON value.
func (d *JSONRows) scalar(src []byte) ([]byte, error) {
	d.reset(src)
	raw, err := d.read(src)
	if err != nil {
		return nil, err
	}
	return raw, d.end()
}

// object reads src as exactly one JSON object into the row.
func (d *JSONRows) object(src []byte) error {
	d.reset(src)
	if kind := d.dec.PeekKind(); kind != '{' {
		if kind == jsontext.KindInvalid {
			_, err := d.dec.ReadToken()
			return syntaxError(err)
		}
		// The kind is only a guess by the first byte.
		if _, err := d.dec.ReadValue(); err != nil {
			return syntaxError(err)
		}
		return fmt.Errorf("it is a JSON %s, not an object with one member a column", kindName(kind))
	}
	if _, err := d.dec.ReadToken(); err != nil {
		return syntaxError(err)
	}
	for d.dec.PeekKind() != '}' {
		name, err := d.read(src)
		if err != nil {
			return err
		}
		i, known := d.column(name)
		raw, err := d.read(src)
		if err != nil {
			return err
		}
		if !known && d.RefuseUnknown {
			return fmt.Errorf("member %.100s is no column of the table", name)
		}
		if !known {
			d.unknown++
			continue
		}
		if d.row[i].State != Absent {
			return fmt.Errorf("column %q is given twice", d.rel.Columns[i].Name)
		}
		if d.row[i], err = d.value(raw); err != nil {
			return fmt.Errorf("column %q: %w", d.rel.Columns[i].Name, err)
		}
	}
	if _, err := d.dec.ReadToken(); err != nil {
		return syntaxError(err)
	}
	return d.end()
}

// column finds the column that a quoted member name stands for.
func (d *JSONRows) column(quoted []byte) (int, bool) {
	name := quoted[1 : len(quoted)-1]
	if bytes.IndexByte(name, '\\') >= 0 {
		plain, err := jsontext.AppendUnquote(nil, quoted)
		if err != nil {
			return 0, false
		}
		name = plain
	}
	if i, ok := d.columns[string(name)]; ok {
		return i, true
	}
	i, ok := d.columns[strings.ToLower(string(name))]
	return i, ok
}

// value classifies one raw JSON value.
func (d *JSONRows) value(raw []byte) (Value, error) {
	v := Value{State: Set, Bytes: raw}
	switch raw[0] {
	case 'n':
		return Value{State: Null}, nil
	case 't', 'f':
		v.Kind = Bool
	case '"':
		v.Kind = Text
		if bytes.IndexByte(raw, '\\') < 0 {
			v.Bytes = raw[1 : len(raw)-1]
			break
		}
		// Unescaped text is never longer than escaped text, so growing scratch
		// here cannot happen after an earlier value of this row aliased it
		// unless it is copied: the old backing array then stays as it was.
		start := len(d.scratch)
		var err error
		if d.scratch, err = jsontext.AppendUnquote(d.scratch, raw); err != nil {
			return v, syntaxError(err)
		}
		v.Bytes = d.scratch[start:len(d.scratch):len(d.scratch)]
	case '{', '[':
		v.Kind = JSON
		if n := depth(raw); n > maxJSONDepth {
			return v, fmt.Errorf("it is nested %d levels deep, more than %d", n, maxJSONDepth)
		}
	default:
		v.Kind = Number
	}
	return v, nil
}

func (d *JSONRows) reset(src []byte) {
	// A bytes.Buffer is read in place; the decoder never writes to it.
	d.src = *bytes.NewBuffer(src)
	d.dec.Reset(&d.src)
}

// read gives the next raw value or member name, as a slice of src rather than
// of the decoder's buffer, which is only lent until the next read.
func (d *JSONRows) read(src []byte) ([]byte, error) {
	raw, err := d.dec.ReadValue()
	if err != nil {
		return nil, syntaxError(err)
	}
	end := d.dec.InputOffset()
	return src[end-int64(len(raw)) : end], nil
}

func (d *JSONRows) end() error {
	if _, err := d.dec.ReadToken(); err == nil || !errors.Is(err, io.EOF) {
		return fmt.Errorf("bytes are left over after the value's end at byte %d", d.dec.InputOffset())
	}
	return nil
}

func (d *JSONRows) refuse(what string, pos Position, cause error) *Refusal {
	return &Refusal{
		Reason: ReasonMalformed, What: "record " + what, Where: pos.String(),
		Why:      cause.Error(),
		Expected: fmt.Sprintf("one JSON object, a row of table %s", d.rel),
	}
}

// syntaxError makes the parser's message ours: without its package prefix,
// and never with more of the input than it quotes.
func syntaxError(err error) error {
	if errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("it is empty")
	}
	return errors.New("it is not valid JSON: " + strings.TrimPrefix(err.Error(), "jsontext: "))
}

func kindName(k jsontext.Kind) string {
	switch k {
	case 'n':
		return "null"
	case 't', 'f':
		return "boolean"
	case '"':
		return "string"
	case '0':
		return "number"
	case '[':
		return "array"
	default:
		return "value"
	}
}

// depth counts the levels of nesting of a valid JSON value.
func depth(raw []byte) int {
	level, deepest, inString := 0, 0, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			level++
			deepest = max(deepest, level)
		case c == '}' || c == ']':
			level--
		}
	}
	return deepest
}
