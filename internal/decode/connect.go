package decode

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"
)

const (
	// maxConnectSchema bounds the text of a schema inside a message.
	maxConnectSchema = 256 << 10
	// maxConnectFields bounds its fields, nested ones included.
	maxConnectFields = 4096
	// keptSchemas bounds how many parsed schemas are kept, of one topic's keys
	// or values, and keptSchemaBytes their text.
	keptSchemas     = 8
	keptSchemaBytes = maxConnectSchema
)

// connectType is a type as Kafka Connect's JSON converter writes it in front of
// a message's payload. It is immutable once parsed.
type connectType struct {
	shape  shape
	means  meaning
	scale  int                     // of a decimal
	length int                     // of a bit string
	fields map[string]*connectType // of a record
	elem   *connectType            // of an array or of a map's values
	// verbatim: JSON of this type says what it says without the type.
	verbatim bool
}

// connectSchemas parses schemas and keeps those that were seen last: the same
// one stands in front of every message.
type connectSchemas struct {
	kept  []connectSchema // the one used last is first
	bytes int
}

type connectSchema struct {
	text []byte
	typ  *connectType
}

// find gives the type for the schema's text, which is valid JSON.
func (c *connectSchemas) find(text []byte) (*connectType, error) {
	for i := range c.kept {
		if bytes.Equal(c.kept[i].text, text) {
			found := c.kept[i]
			copy(c.kept[1:i+1], c.kept[:i])
			c.kept[0] = found
			return found.typ, nil
		}
	}
	if len(text) > maxConnectSchema {
		return nil, &Refusal{Reason: ReasonLimit, Why: fmt.Sprintf("its schema has %d bytes", len(text)), Expected: fmt.Sprintf("at most %d", maxConnectSchema)}
	}
	left := maxConnectFields
	typ, err := parseConnectType(text, &left)
	if err != nil {
		return nil, fmt.Errorf("its schema: %w", err)
	}
	for len(c.kept) > 0 && (len(c.kept) == keptSchemas || c.bytes+len(text) > keptSchemaBytes) {
		last := len(c.kept) - 1
		c.bytes -= len(c.kept[last].text)
		c.kept[last] = connectSchema{}
		c.kept = c.kept[:last]
	}
	c.bytes += len(text)
	c.kept = append(c.kept, connectSchema{})
	copy(c.kept[1:], c.kept)
	c.kept[0] = connectSchema{bytes.Clone(text), typ}
	return typ, nil
}

// parseConnectType reads one type. left is how many more there may be.
func parseConnectType(src []byte, left *int) (*connectType, error) {
	if *left--; *left < 0 {
		return nil, &Refusal{Reason: ReasonLimit, Why: fmt.Sprintf("its schema has more than %d fields", maxConnectFields)}
	}
	if src[0] != '{' {
		return nil, fmt.Errorf("a type of it is a JSON %s, not an object", kindName(src[0]))
	}
	var kind, name string
	var fields, items, values, parameters []byte
	c := walker{src: src, pos: 1}
	for {
		member, v, ok := c.nextJSON()
		if !ok {
			break
		}
		switch string(member) {
		case `"type"`:
			kind = jsonText(v)
		case `"name"`:
			name = jsonText(v)
		case `"fields"`:
			fields = v
		case `"items"`:
			items = v
		case `"values"`:
			values = v
		case `"parameters"`:
			parameters = v
		}
	}
	t := &connectType{verbatim: true}
	var err error
	switch kind {
	case "int8", "int16", "int32", "int64":
		t.shape = shapeInt
	case "float", "double", "float32", "float64":
		t.shape = shapeFloat
	case "string":
		t.shape = shapeText
	case "bytes":
		t.shape = shapeBytes
	case "array", "map":
		t.shape = shapeArray
		of := items
		if kind == "map" {
			t.shape, of = shapeMap, values
		}
		if of == nil {
			return nil, fmt.Errorf("its %s has no type of its elements", kind)
		}
		if t.elem, err = parseConnectType(of, left); err != nil {
			return nil, err
		}
		t.verbatim = t.elem.verbatim
	case "struct":
		t.shape = shapeRecord
		if err := t.parseFields(fields, left); err != nil {
			return nil, err
		}
	case "boolean":
		t.shape = shapeAny
	default:
		return nil, fmt.Errorf("it has the type %.40q, which Kafka Connect does not have", kind)
	}
	if m := meanings[name]; m.fits(t.shape) {
		t.means = m
	}
	if t.shape == shapeBytes || t.means != plain {
		t.verbatim = false
	}
	return t, t.parseParameters(parameters)
}

func (t *connectType) parseFields(src []byte, left *int) error {
	if src == nil || src[0] != '[' {
		return errors.New("its struct has no fields")
	}
	t.fields = make(map[string]*connectType)
	for i := skipSpace(src, 1); src[i] != ']'; i = skipComma(src, i) {
		end := skipValue(src, i)
		f := src[i:end]
		typ, err := parseConnectType(f, left)
		if err != nil {
			return err
		}
		var name string
		c := walker{src: f, pos: 1}
		for {
			member, v, ok := c.nextJSON()
			if !ok {
				break
			}
			if string(member) == `"field"` {
				name = jsonText(v)
			}
		}
		if _, twice := t.fields[name]; twice {
			return fmt.Errorf("it has the field %.100q twice", name)
		}
		t.fields[name] = typ
		t.verbatim = t.verbatim && typ.verbatim
		i = end
	}
	return nil
}

// parseParameters reads a decimal's scale and a bit string's length.
func (t *connectType) parseParameters(src []byte) error {
	if t.means != meansDecimal && t.means != meansBits {
		return nil
	}
	want, into := `"scale"`, &t.scale
	if t.means == meansBits {
		want, into = `"length"`, &t.length
	}
	if len(src) > 0 && src[0] == '{' {
		c := walker{src: src, pos: 1}
		for {
			member, v, ok := c.nextJSON()
			if !ok {
				break
			}
			if string(member) != want {
				continue
			}
			text := jsonText(v)
			if text == "" {
				text = string(v)
			}
			n, err := strconv.Atoi(text)
			if err != nil {
				return fmt.Errorf("its parameter %s is no whole number", want)
			}
			*into = n
			return nil
		}
	}
	if t.means == meansBits {
		t.means, t.verbatim = plain, false // bytes without a length stay bytes
		return nil
	}
	return fmt.Errorf("its decimal has no parameter %s", want)
}

// jsonText gives a JSON string's text, "" for what is no string.
func jsonText(v []byte) string {
	if len(v) < 2 || v[0] != '"' {
		return ""
	}
	if bytes.IndexByte(v, '\\') < 0 {
		return string(v[1 : len(v)-1])
	}
	text, err := jsontext.AppendUnquote(nil, v)
	if err != nil {
		return ""
	}
	return string(text)
}
