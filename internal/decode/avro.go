package decode

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"
)

const (
	// maxAvroDepth bounds how deep the values of a record are nested.
	maxAvroDepth = 64
	// maxAvroNothings bounds the elements of a record that have no bytes, such
	// as those of an array of nulls: nothing else bounds them.
	maxAvroNothings = 1024
	// maxAvroValues bounds the values of a record, the parts of each included,
	// beside those that its bytes grant: valuesPerByte each. Records without a
	// byte that have two of one another, forty levels deep, are a million
	// million values of no bytes, from a schema that fits a page.
	maxAvroValues, valuesPerByte = 1 << 20, 64
)

// avroReader reads Avro's binary encoding. It never trusts a length or a count:
// each is compared with the bytes that are left. The end of the input inside of
// a value is an error, and the first error ends everything.
type avroReader struct {
	b        []byte
	pos      int
	nothings int
	values   int
	err      error
}

func (r *avroReader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("at byte %d "+format, append([]any{r.pos}, args...)...)
		r.pos = len(r.b)
	}
}

func (r *avroReader) left() int { return len(r.b) - r.pos }

// take gives the next n bytes.
func (r *avroReader) take(n int) []byte {
	if n > r.left() {
		r.fail("there are %d bytes and %d are needed", r.left(), n)
		return nil
	}
	b := r.b[r.pos : r.pos+n]
	r.pos += n
	return b
}

// long reads a zigzag varint of at most 64 bits.
func (r *avroReader) long() int64 {
	v, n := binary.Varint(r.b[r.pos:])
	switch {
	case n > 0:
		r.pos += n
		return v
	case n == 0:
		r.fail("the bytes end inside of a number")
	default:
		r.fail("a number has more than 64 bits")
	}
	return 0
}

func (r *avroReader) int() int64 {
	at := r.pos
	v := r.long()
	if r.err == nil && (v > math.MaxInt32 || v < math.MinInt32 || r.pos-at > 5) {
		r.pos = at
		r.fail("an int has more than 32 bits")
	}
	return v
}

// size reads the length of a string or of bytes.
func (r *avroReader) size() int {
	n := r.long()
	if n < 0 || n > int64(r.left()) {
		r.fail("a length is %d and %d bytes are left", n, r.left())
		return 0
	}
	return int(n)
}

func (r *avroReader) bool() bool {
	b := r.take(1)
	if r.err != nil {
		return false
	}
	if b[0] > 1 {
		r.fail("a boolean is %d", b[0])
	}
	return b[0] == 1
}

func (r *avroReader) text() []byte {
	b := r.take(r.size())
	if !utf8.Valid(b) {
		r.fail("text is not UTF-8")
	}
	return b
}

// index reads which part of a union, or which symbol of an enum, comes.
func (r *avroReader) index(n int, of string) int {
	i := r.int() // a union's is a long, and never beyond an int
	if r.err == nil && (i < 0 || i >= int64(n)) {
		r.fail("a %s of %d has the index %d", of, n, i)
	}
	if r.err != nil {
		return 0
	}
	return int(i)
}

// block reads the head of the next block of an array or a map: how many
// elements it has, 0 at the end, and where it ends, -1 where that is not said.
func (r *avroReader) block(elem *avroType, isMap bool) (count, end int) {
	n := r.long()
	end = -1
	if n < 0 {
		if n == math.MinInt64 {
			r.fail("a block has a count that is out of range")
			return 0, -1
		}
		n = -n
		end = r.size() + r.pos
	}
	least := elem.least
	if isMap {
		least++ // its key
	}
	switch {
	case r.err != nil:
		return 0, -1
	case least > 0 && n > int64(r.left()/least):
		r.fail("a block claims %d elements, and %d bytes are left", n, r.left())
		return 0, -1
	case least == 0:
		if n > maxAvroNothings-int64(r.nothings) {
			r.fail("it has more than %d elements without a byte", maxAvroNothings)
			return 0, -1
		}
		r.nothings += int(n)
	}
	return int(n), end
}

// blockEnd checks that a block that says its size has it.
func (r *avroReader) blockEnd(end int) {
	if r.err == nil && end >= 0 && r.pos != end {
		r.fail("a block ends that was to end at byte %d", end)
	}
}

// skip reads over one value, checking all of it.
func (r *avroReader) skip(t *avroType, level int) {
	if level > maxAvroDepth {
		r.fail("it is nested more than %d levels deep", maxAvroDepth)
	}
	if r.values++; r.values > maxAvroValues+valuesPerByte*len(r.b) {
		r.fail("it has more than %d values, and only %d bytes", r.values-1, len(r.b))
	}
	if r.err != nil {
		return
	}
	switch t.kind {
	case avroNull:
	case avroBoolean:
		r.bool()
	case avroInt:
		r.int()
	case avroLong:
		r.long()
	case avroFloat:
		r.take(4)
	case avroDouble:
		r.take(8)
	case avroBytes:
		r.take(r.size())
	case avroString:
		r.text()
	case avroEnum:
		r.index(len(t.symbols), "enum")
	case avroFixed:
		r.take(t.size)
	case avroRecord:
		for i := range t.fields {
			if r.skip(t.fields[i].typ, level+1); r.err != nil {
				return
			}
		}
	case avroUnion:
		r.skip(t.parts[r.index(len(t.parts), "union")], level+1)
	case avroArray, avroMap:
		r.skipBlocks(t, level)
	}
}

func (r *avroReader) skipBlocks(t *avroType, level int) {
	for {
		n, end := r.block(t.elem, t.kind == avroMap)
		if r.err != nil || n == 0 {
			r.blockEnd(end)
			return
		}
		for ; n > 0 && r.err == nil; n-- {
			if t.kind == avroMap {
				r.text()
			}
			r.skip(t.elem, level+1)
		}
		r.blockEnd(end)
	}
}

// avroEncoding reads Avro. A message is checked as a whole before anything is
// read of it: it has to be consumed exactly.
type avroEncoding struct {
	schemas Schemas     // nil where there is no registry
	fixed   *AvroSchema // for messages without a frame; nil: they have one
	scratch *scratch
}

func (a *avroEncoding) open(rec *Record, p part) (node, error) {
	schema, body := a.fixed, p.of(rec)
	if schema == nil {
		var ref SchemaRef
		var err error
		if ref, body, err = unframe(rec, p); err != nil {
			return node{}, err
		}
		if a.schemas == nil {
			return node{}, &Refusal{
				Reason: ReasonSetup, Why: fmt.Sprintf("it was written with %s, and no place is set where schemas are found", ref),
				Do: "set KAFKASINK_REGISTRY_URL, or give the topic a schema with KAFKASINK_AVRO_SCHEMAS",
			}
		}
		if schema, err = a.schemas.Find(ref); err != nil {
			return node{}, err
		}
	}
	r := avroReader{b: body}
	r.skip(schema.root, 0)
	switch {
	case r.err != nil:
		return node{}, fmt.Errorf("it is no Avro of its schema: %w", r.err)
	case r.left() > 0:
		return node{}, fmt.Errorf("%d bytes are left over after the value's end at byte %d: it was written with another schema", r.left(), r.pos)
	}
	return a.node(body, schema.root), nil
}

// node gives a value with its unions resolved.
func (a *avroEncoding) node(raw []byte, t *avroType) node {
	for t.kind == avroUnion {
		r := avroReader{b: raw}
		t = t.parts[r.index(len(t.parts), "union")]
		raw = raw[r.pos:]
	}
	return node{raw: raw, avro: t}
}

func (a *avroEncoding) null(n node) bool   { return n.avro.kind == avroNull }
func (a *avroEncoding) empty(n node) bool  { return n.avro.kind == avroNull }
func (a *avroEncoding) record(n node) bool { return n.avro.kind == avroRecord }

func (a *avroEncoding) describe(n node) string { return "an Avro " + avroKindNames[n.avro.kind] }

func (a *avroEncoding) walk(n node) walker { return walker{src: n.raw, avro: n.avro} }

func (a *avroEncoding) next(w *walker) (name []byte, n node, ok bool, err error) {
	if w.field == len(w.avro.fields) {
		return nil, node{}, false, nil
	}
	f := &w.avro.fields[w.field]
	r := avroReader{b: w.src, pos: w.pos}
	r.skip(f.typ, 0)
	if r.err != nil {
		return nil, node{}, false, r.err
	}
	n = a.node(w.src[w.pos:r.pos], f.typ)
	w.pos = r.pos
	w.field++
	return f.name, n, true, nil
}

func (a *avroEncoding) value(n node) (Value, error) {
	r := avroReader{b: n.raw}
	t := n.avro
	switch t.kind {
	case avroNull:
		return Value{State: Null}, nil
	case avroString:
		if t.means == plain {
			return Value{State: Set, Kind: Text, Bytes: r.text()}, r.err
		}
	case avroEnum:
		return Value{State: Set, Kind: Text, Bytes: t.symbols[r.index(len(t.symbols), "enum")]}, r.err
	default: // written below
	}
	w := a.scratch.begin()
	kind, err := a.write(&w, &r, t, 0)
	if err == nil {
		err = r.err
	}
	if err != nil {
		return Value{}, err
	}
	return w.value(kind)
}

// write writes the next value. Inside of another one (level > 0) it is JSON.
func (a *avroEncoding) write(w *writer, r *avroReader, t *avroType, level int) (Kind, error) {
	inside := level > 0
	switch t.kind {
	case avroNull:
		w.string("null")
		return JSON, nil
	case avroBoolean:
		w.string(strconv.FormatBool(r.bool()))
		return Bool, nil
	case avroInt, avroLong:
		return a.writeInt(w, r.long(), t, inside)
	case avroFloat:
		if b := r.take(4); b != nil {
			return a.writeFloat(w, float64(math.Float32frombits(binary.LittleEndian.Uint32(b))), 32, inside)
		}
	case avroDouble:
		if b := r.take(8); b != nil {
			return a.writeFloat(w, math.Float64frombits(binary.LittleEndian.Uint64(b)), 64, inside)
		}
	case avroBytes:
		return a.writeBytes(w, r.take(r.size()), t, inside)
	case avroFixed:
		return a.writeBytes(w, r.take(t.size), t, inside)
	case avroString:
		return writeMeantText(w, r.text(), t.means, inside)
	case avroEnum:
		return JSON, writeQuoted(w, t.symbols[r.index(len(t.symbols), "enum")])
	case avroUnion:
		return a.write(w, r, t.parts[r.index(len(t.parts), "union")], max(level, 1))
	case avroRecord:
		if t.means == meansVariableDecimal {
			return Number, a.writeVariableDecimal(w, r, t)
		}
		return JSON, a.writeRecord(w, r, t, level)
	case avroArray, avroMap:
		return JSON, a.writeBlocks(w, r, t, level)
	}
	return JSON, r.err
}

func (a *avroEncoding) writeInt(w *writer, n int64, t *avroType, inside bool) (Kind, error) {
	if !t.means.temporal() {
		w.grow(20, func(dst []byte) []byte { return strconv.AppendInt(dst, n, 10) })
		return Number, nil
	}
	if err := t.means.check(n); err != nil {
		return Text, err
	}
	if inside {
		w.byte('"')
	}
	t.means.writeInt(w, n)
	if inside {
		w.byte('"')
	}
	return Text, nil
}

// writeFloat writes the shortest digits that give the number again, in the
// precision that it has.
func (a *avroEncoding) writeFloat(w *writer, f float64, bits int, inside bool) (Kind, error) {
	special := ""
	switch {
	case math.IsNaN(f):
		special = "NaN"
	case math.IsInf(f, 1):
		special = "Infinity"
	case math.IsInf(f, -1):
		special = "-Infinity"
	}
	switch {
	case special == "":
		format := byte('f')
		if abs := math.Abs(f); abs != 0 && (abs < 1e-6 || abs >= 1e21) {
			format = 'e'
		}
		w.grow(32, func(dst []byte) []byte { return strconv.AppendFloat(dst, f, format, -1, bits) })
	case inside:
		return Number, &Refusal{Reason: ReasonValue, Why: "it has the number " + special + " inside of another value, which JSON cannot write"}
	default:
		w.string(special)
	}
	return Number, nil
}

func (a *avroEncoding) writeBytes(w *writer, b []byte, t *avroType, inside bool) (Kind, error) {
	if t.means == meansDecimal {
		return Number, writeDecimal(w, b, t.scale)
	}
	return writeBinary(w, b, t.means, t.length, inside)
}

func (a *avroEncoding) writeVariableDecimal(w *writer, r *avroReader, t *avroType) error {
	var scale int64
	var unscaled []byte
	seen := 0
	for i := range t.fields {
		f := &t.fields[i]
		switch {
		case string(f.name) == "scale" && f.typ.kind == avroInt:
			scale = r.int()
			seen++
		case string(f.name) == "value" && f.typ.kind == avroBytes:
			unscaled = r.take(r.size())
			seen++
		default:
			r.skip(f.typ, 0)
		}
	}
	if seen != 2 {
		return errors.New("it is no decimal: its type has no scale and value")
	}
	if r.err != nil {
		return r.err
	}
	return writeDecimal(w, unscaled, int(scale))
}

func (a *avroEncoding) writeRecord(w *writer, r *avroReader, t *avroType, level int) error {
	w.byte('{')
	for i := range t.fields {
		if i > 0 {
			w.byte(',')
		}
		w.bytes(t.fields[i].quoted)
		w.byte(':')
		if err := a.part(w, r, t.fields[i].typ, level); err != nil {
			return err
		}
	}
	w.byte('}')
	return nil
}

func (a *avroEncoding) writeBlocks(w *writer, r *avroReader, t *avroType, level int) error {
	open, end := byte('['), byte(']')
	if t.kind == avroMap {
		open, end = '{', '}'
	}
	w.byte(open)
	for first := true; ; {
		n, _ := r.block(t.elem, t.kind == avroMap)
		if n == 0 || r.err != nil {
			break
		}
		for ; n > 0; n-- {
			if !first {
				w.byte(',')
			}
			first = false
			if t.kind == avroMap {
				if err := writeQuoted(w, r.text()); err != nil {
					return err
				}
				w.byte(':')
			}
			if err := a.part(w, r, t.elem, level); err != nil {
				return err
			}
		}
	}
	w.byte(end)
	return r.err
}

// part writes a value inside of another one.
func (a *avroEncoding) part(w *writer, r *avroReader, t *avroType, level int) error {
	if level > maxAvroDepth { // a message was checked to be no deeper
		r.fail("it is nested more than %d levels deep", maxAvroDepth)
	}
	if _, err := a.write(w, r, t, level+1); err != nil {
		return err
	}
	return errors.Join(r.err, w.s.err)
}

// writeMeantText writes text that may stand for something.
func writeMeantText(w *writer, text []byte, m meaning, inside bool) (Kind, error) {
	if m == meansISODate && len(text) > 0 && text[len(text)-1] == 'Z' {
		text = text[:len(text)-1]
	}
	if inside {
		return JSON, writeQuoted(w, text)
	}
	w.bytes(text)
	if m == meansJSON {
		return JSON, nil
	}
	return Text, nil
}
