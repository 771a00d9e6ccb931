package decode

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/hamba/avro/v2"
)

const (
	// maxAvroSchema bounds a schema's text with all that it refers to.
	maxAvroSchema = 1 << 20
	// maxAvroTypes bounds how many types a schema may have, and maxAvroSchemaDepth
	// how deep they may be nested.
	maxAvroTypes       = 20_000
	maxAvroSchemaDepth = 128
)

// AvroSchema is a schema that records are written with, prepared for reading
// them. It is immutable and safe for concurrent use.
type AvroSchema struct {
	root        *avroType
	fingerprint uint64
}

// Fingerprint is the schema's CRC-64-AVRO, by which single-object encoding
// names it.
func (s *AvroSchema) Fingerprint() uint64 { return s.fingerprint }

// ParseAvro reads a schema. references are the texts of the schemas that it
// names and does not define, each after those that it needs itself.
func ParseAvro(schema string, references ...string) (out *AvroSchema, err error) {
	defer func() {
		// The text may come from anywhere, and the parser is not ours.
		if r := recover(); r != nil {
			out, err = nil, fmt.Errorf("its schema makes the parser fail: %v", r)
		}
	}()
	size := len(schema)
	for _, r := range references {
		size += len(r)
	}
	if size > maxAvroSchema {
		return nil, fmt.Errorf("its schema has %d bytes with what it refers to, more than %d", size, maxAvroSchema)
	}
	// Of its own, so that two schemas can define one name differently.
	cache := &avro.SchemaCache{}
	for _, text := range append(append([]string(nil), references...), schema) {
		if err := checkSchemaDepth(text); err != nil {
			return nil, err
		}
	}
	for _, text := range references {
		if _, err := avro.ParseBytesWithCache([]byte(text), "", cache); err != nil {
			return nil, fmt.Errorf("a schema that it refers to: %w", err)
		}
	}
	parsed, err := avro.ParseBytesWithCache([]byte(schema), "", cache)
	if err != nil {
		return nil, fmt.Errorf("its schema: %w", err)
	}
	c := avroCompiler{named: make(map[avro.NamedSchema]*avroType)}
	root, err := c.compile(parsed, 0)
	if err != nil {
		return nil, fmt.Errorf("its schema: %w", err)
	}
	for range min(c.types, maxAvroSchemaDepth) { // a bound that is too low is still one
		if !c.grow() {
			break
		}
	}
	print, err := parsed.FingerprintUsing(avro.CRC64Avro)
	if err != nil {
		return nil, fmt.Errorf("its schema's fingerprint: %w", err)
	}
	s := &AvroSchema{root: root}
	for _, b := range print {
		s.fingerprint = s.fingerprint<<8 | uint64(b)
	}
	return s, nil
}

// checkSchemaDepth keeps deep nesting away from the parser, which recurs.
func checkSchemaDepth(text string) error {
	if depth([]byte(text)) > 2*maxAvroSchemaDepth {
		return fmt.Errorf("its schema is nested more than %d levels deep", 2*maxAvroSchemaDepth)
	}
	return nil
}

// avroKind is what a type is written as.
type avroKind uint8

const (
	avroNull avroKind = iota + 1
	avroBoolean
	avroInt
	avroLong
	avroFloat
	avroDouble
	avroBytes
	avroString
	avroEnum
	avroFixed
	avroArray
	avroMap
	avroRecord
	avroUnion
)

var avroKindNames = [...]string{
	avroNull: "null", avroBoolean: "boolean", avroInt: "int", avroLong: "long", avroFloat: "float", avroDouble: "double", avroBytes: "bytes",
	avroString: "string", avroEnum: "enum", avroFixed: "fixed", avroArray: "array", avroMap: "map", avroRecord: "record", avroUnion: "union",
}

func (k avroKind) shape() shape {
	switch k {
	case avroInt, avroLong:
		return shapeInt
	case avroFloat, avroDouble:
		return shapeFloat
	case avroString, avroEnum:
		return shapeText
	case avroBytes, avroFixed:
		return shapeBytes
	case avroArray:
		return shapeArray
	case avroMap:
		return shapeMap
	case avroRecord:
		return shapeRecord
	case avroNull, avroBoolean, avroUnion:
	}
	return shapeAny
}

// avroType is one type of a schema. A record can contain itself.
type avroType struct {
	kind    avroKind
	means   meaning
	scale   int
	length  int         // of a bit string
	size    int         // of a fixed
	symbols [][]byte    // of an enum
	elem    *avroType   // of an array or of a map's values
	parts   []*avroType // of a union
	fields  []avroField
	// least is the fewest bytes that a value can have. It bounds the counts
	// that a record may claim.
	least int
}

type avroField struct {
	name   []byte
	quoted []byte // as a JSON string
	typ    *avroType
}

type avroCompiler struct {
	named map[avro.NamedSchema]*avroType
	all   []*avroType
	types int
}

func (c *avroCompiler) compile(s avro.Schema, level int) (*avroType, error) {
	if ref, ok := s.(*avro.RefSchema); ok {
		s = ref.Schema()
	}
	if named, ok := s.(avro.NamedSchema); ok {
		if t := c.named[named]; t != nil {
			return t, nil
		}
	}
	if c.types++; c.types > maxAvroTypes {
		return nil, fmt.Errorf("it has more than %d types", maxAvroTypes)
	}
	if level > maxAvroSchemaDepth {
		return nil, fmt.Errorf("it is nested more than %d levels deep", maxAvroSchemaDepth)
	}
	t := &avroType{}
	c.all = append(c.all, t)
	if named, ok := s.(avro.NamedSchema); ok {
		c.named[named] = t
	}
	var err error
	switch s := s.(type) {
	case *avro.NullSchema:
		t.kind = avroNull
	case *avro.PrimitiveSchema:
		if t.kind = primitiveKinds[s.Type()]; t.kind == 0 {
			return nil, fmt.Errorf("it has the type %q, which is not known", s.Type())
		}
		t.mean(s.Logical(), s.Props())
	case *avro.FixedSchema:
		t.kind, t.size = avroFixed, s.Size()
		if t.size < 0 || t.size > maxJSON {
			return nil, fmt.Errorf("it has a fixed type of %d bytes", t.size)
		}
		t.mean(s.Logical(), s.Props())
	case *avro.EnumSchema:
		t.kind = avroEnum
		for _, symbol := range s.Symbols() {
			t.symbols = append(t.symbols, []byte(symbol))
		}
	case *avro.ArraySchema:
		t.kind = avroArray
		t.elem, err = c.compile(s.Items(), level+1)
	case *avro.MapSchema:
		t.kind = avroMap
		t.elem, err = c.compile(s.Values(), level+1)
	case *avro.UnionSchema:
		t.kind = avroUnion
		for _, part := range s.Types() {
			p, err := c.compile(part, level+1)
			if err != nil {
				return nil, err
			}
			t.parts = append(t.parts, p)
		}
		if len(t.parts) == 0 {
			return nil, errors.New("it has a union of nothing")
		}
	case *avro.RecordSchema:
		t.kind = avroRecord
		for _, f := range s.Fields() {
			typ, err := c.compile(f.Type(), level+1)
			if err != nil {
				return nil, fmt.Errorf("field %.100s: %w", f.Name(), err)
			}
			t.fields = append(t.fields, avroField{name: []byte(f.Name()), quoted: []byte(strconv.Quote(f.Name())), typ: typ})
		}
		t.mean(nil, s.Props())
	default:
		return nil, fmt.Errorf("it has a type of %T, which is not known", s)
	}
	return t, err
}

var primitiveKinds = map[avro.Type]avroKind{
	avro.Boolean: avroBoolean, avro.Int: avroInt, avro.Long: avroLong, avro.Float: avroFloat, avro.Double: avroDouble,
	avro.Bytes: avroBytes, avro.String: avroString, avro.Null: avroNull,
}

// mean finds what the type stands for. What Kafka Connect's converter says goes
// first: its types are finer than Avro's. The parser knows some logical types
// and leaves the others among the properties.
func (t *avroType) mean(logical avro.LogicalSchema, props map[string]any) {
	name, _ := props["connect.name"].(string)
	m := meanings[name]
	if m == plain || !m.fits(t.kind.shape()) {
		name, _ = props["logicalType"].(string)
		if logical != nil {
			name = string(logical.Type())
		}
		// The names of this program's settings are none of Avro's.
		if m = meanings[name]; m == meansBits || m == meansJSON {
			m = plain
		}
	}
	if !m.fits(t.kind.shape()) || (m == meansDuration && t.size != 12) || (m == meansUUID && t.size != 16) {
		return
	}
	parameters, _ := props["connect.parameters"].(map[string]any)
	switch m {
	case meansDecimal:
		if d, ok := logical.(*avro.DecimalLogicalSchema); ok {
			t.scale = d.Scale()
			break
		}
		scale, ok := whole(parameters["scale"])
		if !ok {
			return // a decimal without a valid scale is bytes
		}
		t.scale = scale
	case meansBits:
		length, ok := whole(parameters["length"])
		if !ok {
			return
		}
		t.length = length
	default: // no parameters
	}
	t.means = m
}

func whole(v any) (int, bool) {
	switch v := v.(type) {
	case string:
		n, err := strconv.Atoi(v)
		return n, err == nil
	case float64:
		return int(v), v == float64(int(v))
	}
	return 0, false
}

// grow computes least once more for every type, and tells whether anything
// changed. Types that contain themselves need several rounds.
func (c *avroCompiler) grow() bool {
	changed := false
	for _, t := range c.all {
		least := 1
		switch t.kind {
		case avroNull:
			least = 0
		case avroFloat:
			least = 4
		case avroDouble:
			least = 8
		case avroFixed:
			least = t.size
		case avroRecord:
			least = 0
			for _, f := range t.fields {
				least = min(least+f.typ.least, maxJSON)
			}
		case avroUnion:
			least = maxJSON
			for _, p := range t.parts {
				least = min(least, 1+p.least)
			}
		case avroBoolean, avroInt, avroLong, avroBytes, avroString, avroEnum, avroArray, avroMap:
		}
		// The rounds begin at 0 and go up: what is not known yet counts as
		// nothing, so that no count is bounded too tightly.
		if least != t.least {
			t.least, changed = least, true
		}
	}
	return changed
}
