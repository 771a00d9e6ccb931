package decode

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
)

// jsonEncoding reads JSON, with or without the schema that Kafka Connect's
// converter puts beside the payload.
type jsonEncoding struct {
	check   jsonCheck
	schemas connectSchemas
	scratch *scratch
	rooted  bool // the root stands alone, not as a payload
	// wrapped is false where a table has a column "payload": such a message is
	// taken as it stands.
	wrapped bool
}

func (j *jsonEncoding) open(rec *Record, p part) (node, error) {
	src := p.of(rec)
	if err := j.check.check(src); err != nil {
		return node{}, err
	}
	i := skipSpace(src, 0)
	n := node{raw: src[i:skipValue(src, i)]}
	root, err := j.unwrap(n)
	j.rooted = len(root.raw) == len(n.raw)
	return root, err
}

// unwrap takes a payload out of {"schema":…,"payload":…}.
func (j *jsonEncoding) unwrap(n node) (node, error) {
	if !j.wrapped || n.raw[0] != '{' {
		return n, nil
	}
	var schema, payload []byte
	c := j.walk(n)
	for {
		name, v, ok := c.nextJSON()
		if !ok {
			break
		}
		switch string(name) {
		case `"schema"`:
			schema = v
		case `"payload"`:
			payload = v
		default:
			return n, nil
		}
	}
	if schema == nil || payload == nil {
		return n, nil
	}
	n = node{raw: payload}
	if schema[0] == 'n' {
		return n, nil
	}
	var err error
	n.con, err = j.schemas.find(schema)
	return n, err
}

func (j *jsonEncoding) null(n node) bool   { return n.raw[0] == 'n' }
func (j *jsonEncoding) empty(n node) bool  { return n.raw[0] == 'n' && !j.rooted }
func (j *jsonEncoding) record(n node) bool { return n.raw[0] == '{' }

func (j *jsonEncoding) describe(n node) string {
	return "a JSON " + kindName(n.raw[0])
}

func (j *jsonEncoding) walk(n node) walker { return walker{src: n.raw, pos: 1, con: n.con} }

func (j *jsonEncoding) next(c *walker) (name []byte, n node, ok bool, err error) {
	quoted, v, ok := c.nextJSON()
	if !ok {
		return nil, node{}, false, nil
	}
	if name, err = j.unquote(quoted); err != nil {
		return nil, node{}, false, err
	}
	n = node{raw: v}
	if c.con != nil {
		n.con = c.con.fields[string(name)]
	}
	return name, n, true, nil
}

// unquote gives the text of a string.
func (j *jsonEncoding) unquote(quoted []byte) ([]byte, error) {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return quoted[1 : len(quoted)-1], nil
	}
	w := j.scratch.begin()
	var err error
	w.grow(len(quoted), func(dst []byte) []byte {
		dst, err = jsontext.AppendUnquote(dst, quoted)
		return dst
	})
	if err != nil {
		return nil, syntaxError(err)
	}
	v, err := w.value(Text)
	return v.Bytes, err
}

// nextJSON gives the next member of an object, its name with its quotes.
func (c *walker) nextJSON() (name, value []byte, ok bool) {
	i := skipSpace(c.src, c.pos)
	if i < len(c.src) && c.src[i] == ',' {
		i = skipSpace(c.src, i+1)
	}
	if i >= len(c.src) || c.src[i] != '"' {
		return nil, nil, false
	}
	end := skipString(c.src, i)
	at := skipSpace(c.src, skipSpace(c.src, end)+1) // behind the colon
	c.pos = skipValue(c.src, at)
	return c.src[i:end], c.src[at:c.pos], true
}

// skipComma gives the beginning of the next element of an array, or its end,
// from the end of an element.
func skipComma(src []byte, i int) int {
	i = skipSpace(src, i)
	if src[i] == ',' {
		i = skipSpace(src, i+1)
	}
	return i
}

// value classifies a JSON value, and reads it as its type says where there is
// one.
func (j *jsonEncoding) value(n node) (Value, error) {
	raw, t := n.raw, n.con
	if t != nil && !t.verbatim && raw[0] != 'n' {
		return j.typed(raw, t)
	}
	v := Value{State: Set, Bytes: raw}
	switch raw[0] {
	case 'n':
		return Value{State: Null}, nil
	case 't', 'f':
		v.Kind = Bool
	case '"':
		var err error
		v.Kind = Text
		if v.Bytes, err = j.unquote(raw); err != nil {
			return v, err
		}
		if t != nil && t.shape == shapeFloat && nonFinite(string(v.Bytes)) {
			v.Kind = Number
		}
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

// typed reads a value that does not say by itself what it means.
func (j *jsonEncoding) typed(raw []byte, t *connectType) (Value, error) {
	if t.shape == shapeArray || t.shape == shapeMap || (t.shape == shapeRecord && t.means == plain) {
		if n := depth(raw); n > maxJSONDepth {
			return Value{}, fmt.Errorf("it is nested %d levels deep, more than %d", n, maxJSONDepth)
		}
	}
	w := j.scratch.begin()
	kind, err := j.write(&w, raw, t, false)
	if err != nil {
		return Value{}, err
	}
	return w.value(kind)
}

// write writes a value as its type says. Inside of another one it is JSON.
func (j *jsonEncoding) write(w *writer, raw []byte, t *connectType, inside bool) (Kind, error) {
	if raw[0] == 'n' || t == nil || t.verbatim {
		w.bytes(raw)
		return JSON, nil
	}
	switch {
	case t.means.temporal():
		return Text, j.writeTemporal(w, raw, t, inside)
	case t.means == meansDecimal, t.means == meansVariableDecimal:
		return Number, j.writeDecimal(w, raw, t)
	case t.means == meansISODate, t.means == meansJSON:
		return j.writeText(w, raw, t, inside)
	case t.shape == shapeBytes:
		return j.writeBytes(w, raw, t, inside)
	case t.shape == shapeRecord && raw[0] == '{', t.shape == shapeMap && raw[0] == '{':
		return JSON, j.writeObject(w, raw, t)
	case t.shape == shapeArray && raw[0] == '[':
		w.byte('[')
		for i := skipSpace(raw, 1); raw[i] != ']'; {
			end := skipValue(raw, i)
			if _, err := j.write(w, raw[i:end], t.elem, true); err != nil {
				return JSON, err
			}
			if i = skipComma(raw, end); raw[i] != ']' {
				w.byte(',')
			}
		}
		w.byte(']')
		return JSON, w.s.err
	case t.shape == shapeMap && raw[0] == '[':
		// A map whose keys are no strings is an array of pairs.
		return JSON, errors.New("it is a map with keys that are not text, which is not supported")
	}
	return JSON, fmt.Errorf("it is a JSON %s, which is not what its schema says", kindName(raw[0]))
}

func (j *jsonEncoding) writeObject(w *writer, raw []byte, t *connectType) error {
	w.byte('{')
	c, first := walker{src: raw, pos: 1}, true
	for {
		name, v, ok := c.nextJSON()
		if !ok {
			break
		}
		if !first {
			w.byte(',')
		}
		first = false
		w.bytes(name)
		w.byte(':')
		of := t.elem
		if t.shape == shapeRecord {
			of = t.fields[jsonText(name)]
		}
		if _, err := j.write(w, v, of, true); err != nil {
			return err
		}
	}
	w.byte('}')
	return w.s.err
}

func (j *jsonEncoding) writeTemporal(w *writer, raw []byte, t *connectType, inside bool) error {
	n, err := strconv.ParseInt(string(raw), 10, 64)
	if err != nil {
		return fmt.Errorf("the value %.40q is not the whole number that its type asks for", raw)
	}
	if err := t.means.check(n); err != nil {
		return err
	}
	if inside {
		w.byte('"')
	}
	t.means.writeInt(w, n)
	if inside {
		w.byte('"')
	}
	return nil
}

func (j *jsonEncoding) writeDecimal(w *writer, raw []byte, t *connectType) error {
	if raw[0] == '-' || (raw[0] >= '0' && raw[0] <= '9') {
		w.bytes(raw) // decimal.format=numeric
		return nil
	}
	scale, text := t.scale, raw
	if t.means == meansVariableDecimal {
		text = nil
		known := false
		c := walker{src: raw, pos: 1}
		for raw[0] == '{' {
			name, v, ok := c.nextJSON()
			if !ok {
				break
			}
			switch string(name) {
			case `"scale"`:
				var err error
				scale, err = strconv.Atoi(string(v))
				known = err == nil
			case `"value"`:
				text = v
			}
		}
		if !known || text == nil {
			return errors.New("it is no decimal: an object with scale and value was expected")
		}
	}
	b, err := j.base64(text)
	if err != nil {
		return err
	}
	return writeDecimal(w, b, scale)
}

// base64 reads binary data as the converter writes it.
func (j *jsonEncoding) base64(raw []byte) ([]byte, error) {
	if raw[0] != '"' {
		return nil, fmt.Errorf("it is a JSON %s, and binary data is a string in base64", kindName(raw[0]))
	}
	text, err := j.unescape(raw)
	if err != nil {
		return nil, err
	}
	// Decoding in place would change the record.
	out, err := base64.StdEncoding.Strict().AppendDecode(make([]byte, 0, base64.StdEncoding.DecodedLen(len(text))), text)
	if err != nil {
		return nil, fmt.Errorf("the value %.40q is not base64", text)
	}
	return out, nil
}

// unescape is unquote for the middle of a value that is being written.
func (j *jsonEncoding) unescape(quoted []byte) ([]byte, error) {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return quoted[1 : len(quoted)-1], nil
	}
	text, err := jsontext.AppendUnquote(nil, quoted)
	if err != nil {
		return nil, syntaxError(err)
	}
	return text, nil
}

func (j *jsonEncoding) writeBytes(w *writer, raw []byte, t *connectType, inside bool) (Kind, error) {
	b, err := j.base64(raw)
	if err != nil {
		return Hex, err
	}
	return writeBinary(w, b, t.means, t.length, inside)
}

// writeBinary writes bytes that are no decimal.
func writeBinary(w *writer, b []byte, m meaning, length int, inside bool) (Kind, error) {
	kind := Hex
	if inside {
		w.byte('"')
	}
	var err error
	switch {
	case m == meansBits:
		kind, err = Text, writeBits(w, b, length)
	case m == meansUUID && len(b) == 16:
		kind = Text
		writeUUID(w, b)
	case m == meansDuration && len(b) == 12:
		kind = Text
		writeDuration(w, b)
	default:
		if inside {
			w.string(`\\x`) // as Postgres writes bytea inside JSON
		}
		writeHex(w, b)
	}
	if inside {
		w.byte('"')
	}
	return kind, err
}

func (j *jsonEncoding) writeText(w *writer, raw []byte, t *connectType, inside bool) (Kind, error) {
	if raw[0] != '"' {
		return JSON, fmt.Errorf("it is a JSON %s, not the string that its schema says", kindName(raw[0]))
	}
	text, err := j.unescape(raw)
	if err != nil {
		return Text, err
	}
	return writeMeantText(w, text, t.means, inside)
}
