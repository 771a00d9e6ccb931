package decode

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	oracle "github.com/twmb/avro"
)

// heldSchemas are those that are here; others are on their way.
type heldSchemas map[SchemaRef]*AvroSchema

func (h heldSchemas) Find(ref SchemaRef) (*AvroSchema, error) {
	if s := h[ref]; s != nil {
		return s, nil
	}
	return nil, &PendingError{What: ref.String(), Why: errors.New("registry is away")}
}

const longID = `{"type":"record","name":"k","fields":[{"name":"id","type":"long"}]}`

// framed makes a decoder of Avro that finds longID under one name of each kind.
func framed(t *testing.T, change func(*TopicConfig)) (*Topic, [16]byte, uint64) {
	t.Helper()
	guid := [16]byte{0x89, 0x79, 15: 7}
	s := mustAvro(t, longID)
	return avroTopic(t, debeziumRelation, nil, func(c *TopicConfig) {
		c.Schemas = heldSchemas{
			{Kind: SchemaID, ID: 7}: s, {Kind: SchemaGUID, GUID: guid}: s, {Kind: SchemaFingerprint, Fingerprint: s.Fingerprint()}: s,
			{Kind: SchemaID, ID: 8}: mustAvro(t, `"string"`), {Kind: SchemaID, ID: 9}: mustAvro(t, `["null",`+longID+`]`),
		}
		if change != nil {
			change(c)
		}
	}), guid, s.Fingerprint()
}

func TestAvroFrames(t *testing.T) {
	t.Parallel()
	d, guid, fingerprint := framed(t, nil)
	body := []byte{84}
	id := append([]byte{0, 0, 0, 0, 7}, body...)
	with := append(append([]byte{1}, guid[:]...), body...)
	single := append(binary.LittleEndian.AppendUint64([]byte{0xc3, 1}, fingerprint), body...)
	header := func(name string, v []byte) []Header {
		return []Header{{name, []byte("an earlier one")}, {name, v}}
	}
	for name, c := range map[string]struct {
		rec  Record
		want string
	}{
		"id":                 {Record{Value: id}, "insert - > n:42 ? ? ? ? ?"},
		"GUID in front":      {Record{Value: with}, "insert - > n:42 ? ? ? ? ?"},
		"GUID in a header":   {Record{Value: body, Headers: header("__value_schema_id", with[:17])}, "insert - > n:42 ? ? ? ? ?"},
		"id in a header":     {Record{Value: body, Headers: header("__value_schema_id", id[:5])}, "insert - > n:42 ? ? ? ? ?"},
		"single object":      {Record{Value: single}, "insert - > n:42 ? ? ? ? ?"},
		"key, id":            {Record{Key: id}, "delete n:42 ? ? ? ? ? > -"},
		"key, header":        {Record{Key: body, Headers: header("__key_schema_id", with[:17])}, "delete n:42 ? ? ? ? ? > -"},
		"key, JSON":          {Record{Key: []byte(`{"id":42}`)}, "delete n:42 ? ? ? ? ? > -"},
		"key, text":          {Record{Key: []byte(`x`)}, "delete t:x ? ? ? ? ? > -"},
		"key, Avro scalar":   {Record{Key: []byte{0, 0, 0, 0, 8, 2, 'x'}}, "delete t:x ? ? ? ? ? > -"},
		"null is no value":   {Record{Key: id, Value: []byte{0, 0, 0, 0, 9, 0}}, "delete n:42 ? ? ? ? ? > -"},
		"a union with a row": {Record{Value: []byte{0, 0, 0, 0, 9, 2, 84}}, "insert - > n:42 ? ? ? ? ?"},
	} {
		c.rec.Position = somewhere
		ch, err := d.Decode(&c.rec)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := changed(ch); got != c.want {
			t.Errorf("%s: got %s, want %s", name, got, c.want)
		}
	}
	// The oracle writes the same frame of its own accord.
	s, err := oracle.Parse(longID)
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := s.AppendSingleObject(nil, map[string]any{"id": int64(42)})
	if err != nil || hex.EncodeToString(theirs) != hex.EncodeToString(single) {
		t.Errorf("the oracle writes %x, %v; want %x", theirs, err, single)
	}
}

func TestAvroFrameRefusals(t *testing.T) {
	t.Parallel()
	d, _, _ := framed(t, nil)
	for name, c := range map[string]struct {
		rec Record
		why string
	}{
		"nothing":           {Record{Value: []byte{}}, "begins with nothing"},
		"JSON":              {Record{Value: []byte(`{"id":1}`)}, "looks like JSON"},
		"cut id":            {Record{Value: []byte{0, 0, 0}}, "names no schema"},
		"cut GUID":          {Record{Value: []byte{1, 2, 3}}, "names no schema"},
		"cut fingerprint":   {Record{Value: []byte{0xc3, 1, 0}}, "names no schema"},
		"another magic":     {Record{Value: []byte{9, 0, 0, 0, 7, 84}}, "the bytes 0900000007"},
		"header of nothing": {Record{Value: []byte{84}, Headers: []Header{{"__value_schema_id", nil}}}, "names no schema"},
		"header too long":   {Record{Value: []byte{84}, Headers: []Header{{"__value_schema_id", []byte{0, 0, 0, 0, 7, 7}}}}, "names no schema"},
		"no row":            {Record{Value: []byte{0, 0, 0, 0, 8, 2, 'x'}}, "an Avro string"},
		"trailing":          {Record{Value: []byte{0, 0, 0, 0, 7, 84, 0}}, "1 bytes are left over"},
		"no body":           {Record{Value: []byte{0, 0, 0, 0, 7}}, "end inside of a number"},
	} {
		c.rec.Position = somewhere
		_, err := d.Decode(&c.rec)
		var refusal *Refusal
		if !errors.As(err, &refusal) || !strings.Contains(refusal.Error(), c.why) || refusal.Where != "orders[3]@42" {
			t.Errorf("%s: %v, want %q", name, err, c.why)
		}
	}
	// Without a place to find schemas it says so.
	none := avroTopic(t, debeziumRelation, nil, nil)
	_, err := none.Decode(&Record{Value: []byte{0, 0, 0, 0, 7, 84}, Position: somewhere})
	var refusal *Refusal
	if !errors.As(err, &refusal) || refusal.Reason != ReasonSetup {
		t.Errorf("error %v", err)
	}
}

// A schema that is not here yet is no fault of the record, for values and keys.
func TestAvroPending(t *testing.T) {
	t.Parallel()
	d, _, _ := framed(t, nil)
	away := []byte{0, 0, 0, 0, 77, 84}
	for _, rec := range []*Record{{Value: away}, {Key: away}} {
		_, err := d.Decode(rec)
		var pending *PendingError
		var refusal *Refusal
		if !errors.As(err, &pending) || errors.As(err, &refusal) || !strings.Contains(err.Error(), "schema 77") || !strings.Contains(err.Error(), "away") {
			t.Errorf("error %v", err)
		}
	}
}

func TestAvroFixedSchemas(t *testing.T) {
	t.Parallel()
	d := avroTopic(t, debeziumRelation, mustAvro(t, longID), func(c *TopicConfig) { c.KeySchema = mustAvro(t, `"long"`) })
	for want, rec := range map[string]*Record{
		"insert - > n:42 ? ? ? ? ?": {Value: []byte{84}},
		"delete n:42 ? ? ? ? ? > -": {Key: []byte{84}},
	} {
		ch, err := d.Decode(rec)
		if err != nil || changed(ch) != want {
			t.Errorf("%s, %v; want %s", changed(ch), err, want)
		}
	}
}

// The envelope is the same code in both encodings.
func TestDebeziumAvro(t *testing.T) {
	t.Parallel()
	const row = `{"type":"record","name":"Value","fields":[{"name":"id","type":"long"},{"name":"customer","type":["null","string"]},
		{"name":"due","type":["null",{"type":"int","connect.name":"io.debezium.time.Date"}]}]}`
	const schema = `{"type":"record","name":"Envelope","fields":[{"name":"before","type":["null",` + row + `]},{"name":"after","type":["null","Value"]},
		{"name":"source","type":{"type":"record","name":"Source","fields":[{"name":"connector","type":"string"}]}},{"name":"op","type":"string"}]}`
	d := debeziumTopic(t, debeziumRelation, func(c *TopicConfig) { c.Format, c.ValueSchema = FormatDebeziumAvro, mustAvro(t, schema) })
	one := func(id int64, customer any) map[string]any {
		return map[string]any{"id": id, "customer": customer, "due": int32(1)}
	}
	for _, c := range []struct {
		op            string
		before, after any
		want          string
	}{
		{"c", nil, one(1, "a"), "insert - > n:1 t:a ? t:1970-01-02 ? ?"},
		{"u", one(1, "a"), one(2, "a"), "update n:1 ? ? ? ? ? > n:2 t:a ? t:1970-01-02 ? ?"},
		{"u", nil, one(2, defaultPlaceholder), "update - > n:2 ~ ? t:1970-01-02 ? ?"},
		{"d", one(1, nil), nil, "delete n:1 ? ? ? ? ? > -"},
		{"m", nil, nil, "nothing"},
	} {
		body := encodeAvro(t, schema, map[string]any{"before": c.before, "after": c.after, "source": map[string]any{"connector": "postgresql"}, "op": c.op})
		ch, err := d.Decode(&Record{Value: body, Position: somewhere})
		if err != nil || changed(ch) != c.want {
			t.Errorf("%s: %s, %v; want %s", c.op, changed(ch), err, c.want)
		}
	}
	body := encodeAvro(t, schema, map[string]any{"before": one(0, nil), "after": one(2, nil), "source": map[string]any{"connector": "postgresql"}, "op": "u"})
	var refusal *Refusal
	if _, err := d.Decode(&Record{Value: body, Position: somewhere}); !errors.As(err, &refusal) || refusal.Reason != ReasonIdentity {
		t.Errorf("error %v", err)
	}
}

func TestOpAvro(t *testing.T) {
	t.Parallel()
	const schema = `{"type":"record","name":"row","fields":[{"name":"id","type":"long"},{"name":"__deleted","type":"boolean"}]}`
	d := avroTopic(t, debeziumRelation, mustAvro(t, schema), func(c *TopicConfig) { c.Format, c.OpField = FormatOpAvro, "__deleted" })
	for body, want := range map[string]string{"\x02\x00": "insert - > n:1 ? ? ? ? ?", "\x02\x01": "delete n:1 ? ? ? ? ? > -"} {
		ch, err := d.Decode(&Record{Value: []byte(body)})
		if err != nil || changed(ch) != want {
			t.Errorf("%s, %v; want %s", changed(ch), err, want)
		}
	}
}

// Names are each schema's own, and references give those that it lacks.
func TestAvroReferences(t *testing.T) {
	t.Parallel()
	a := mustAvro(t, `{"type":"record","name":"x","fields":[{"name":"v","type":"y"}]}`, `{"type":"enum","name":"y","symbols":["A"]}`)
	b := mustAvro(t, `{"type":"record","name":"x","fields":[{"name":"v","type":"y"}]}`, `{"type":"fixed","name":"y","size":1}`)
	for want, s := range map[string]*AvroSchema{"t:A": a, "h:00": b} {
		ch, err := avroTopic(t, oneColumn, s, nil).Decode(&Record{Value: []byte{0}})
		if err != nil || cells(ch.After) != want {
			t.Errorf("%v; want %s", err, want)
		}
	}
	for _, bad := range []string{
		"", "{", `{"type":"record"}`, `{"type":"record","name":"x","fields":[{"name":"v","type":"y"}]}`, `{"type":"fixed","name":"f","size":-1}`,
		strings.Repeat("[", 1_000_000), `"` + strings.Repeat("x", maxAvroSchema) + `"`, `{"type":"record","name":"x","fields":[{"name":"v","type":[]}]}`,
	} {
		if _, err := ParseAvro(bad); err == nil {
			t.Errorf("the schema %.60s is taken", bad)
		}
	}
}

// Whatever a schema says: no panic, and what it describes can be read or not,
// but never beyond the record.
func FuzzAvroSchema(f *testing.F) {
	for _, c := range avroCases {
		f.Add(inRow(c.schema), []byte{0, 2, 4, 'a', 'b', 0})
	}
	f.Fuzz(func(t *testing.T, schema string, body []byte) {
		s, err := ParseAvro(schema)
		if err != nil {
			return
		}
		d := avroTopic(t, oneColumn, s, nil)
		var refusal *Refusal
		if _, err := d.Decode(&Record{Value: append([]byte{}, body...)}); err != nil && !errors.As(err, &refusal) {
			t.Fatalf("error of another type: %v", err)
		}
	})
}
