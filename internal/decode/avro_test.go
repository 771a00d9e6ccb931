package decode

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	oracle "github.com/twmb/avro"
	"pgregory.net/rapid"
)

// testHelper is what the helpers need of a test, a fuzz target or a property.
type testHelper interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

var oneColumn = &Relation{Name: "t", Identity: IdentityDefault, Columns: []Column{{Name: "v"}}}

// inRow wraps a type into a record with the one field v.
func inRow(schema string) string {
	return `{"type":"record","name":"row","fields":[{"name":"v","type":` + schema + `}]}`
}

func mustAvro(tb testHelper, schema string, references ...string) *AvroSchema {
	tb.Helper()
	s, err := ParseAvro(schema, references...)
	if err != nil {
		tb.Fatalf("%s: %v", schema, err)
	}
	return s
}

func avroTopic(tb testHelper, rel *Relation, schema *AvroSchema, change func(*TopicConfig)) *Topic {
	tb.Helper()
	return debeziumTopic(tb, rel, func(c *TopicConfig) {
		c.Format, c.ValueSchema = FormatAvro, schema
		if change != nil {
			change(c)
		}
	})
}

// avroCases are types, a value for the oracle to encode, and the text that the
// column is to have.
var avroCases = []struct {
	name, schema string
	value        any
	want         string
}{
	{"null", `"null"`, nil, "null"},
	{"boolean", `"boolean"`, true, "b:true"},
	{"int", `"int"`, int32(math.MinInt32), "n:-2147483648"},
	{"long", `"long"`, int64(math.MaxInt64), "n:9223372036854775807"},
	{"float", `"float"`, float32(0.1), "n:0.1"},
	{"double", `"double"`, 1e300, "n:1e+300"},
	{"double, whole", `"double"`, 1e20, "n:100000000000000000000"},
	{"double NaN", `"double"`, math.NaN(), "n:NaN"},
	{"double infinity", `"double"`, math.Inf(-1), "n:-Infinity"},
	{"bytes", `"bytes"`, []byte{0, 255}, "h:00ff"},
	{"string", `"string"`, "é\"", "t:é\""},
	{"enum", `{"type":"enum","name":"e","symbols":["A","B"]}`, "B", "t:B"},
	{"fixed", `{"type":"fixed","name":"f","size":3}`, []byte("abc"), "h:616263"},
	{"decimal", `{"type":"bytes","logicalType":"decimal","precision":10,"scale":2}`, big.NewRat(-1, 100), "n:-0.01"},
	{"decimal, fixed", `{"type":"fixed","name":"f","size":9,"logicalType":"decimal","precision":20,"scale":0}`, big.NewRat(12345, 1), "n:12345"},
	{"date", `{"type":"int","logicalType":"date"}`, time.Date(2024, 2, 29, 0, 0, 0, 0, time.UTC), "t:2024-02-29"},
	{"time-millis", `{"type":"int","logicalType":"time-millis"}`, 3*time.Hour + 5*time.Millisecond, "t:03:00:00.005"},
	{"time-micros", `{"type":"long","logicalType":"time-micros"}`, 3*time.Hour + 5*time.Microsecond, "t:03:00:00.000005"},
	{"timestamp-millis", `{"type":"long","logicalType":"timestamp-millis"}`, time.UnixMilli(-1), "t:1969-12-31T23:59:59.999Z"},
	{"timestamp-micros", `{"type":"long","logicalType":"timestamp-micros"}`, time.UnixMicro(1), "t:1970-01-01T00:00:00.000001Z"},
	{"timestamp-nanos", `{"type":"long","logicalType":"timestamp-nanos"}`, time.Unix(0, 1), "t:1970-01-01T00:00:00.000000001Z"},
	{"local-timestamp-millis", `{"type":"long","logicalType":"local-timestamp-millis"}`, time.UnixMilli(1).UTC(), "t:1970-01-01T00:00:00.001"},
	{"local-timestamp-micros", `{"type":"long","logicalType":"local-timestamp-micros"}`, time.UnixMicro(1).UTC(), "t:1970-01-01T00:00:00.000001"},
	{"local-timestamp-nanos", `{"type":"long","logicalType":"local-timestamp-nanos"}`, time.Unix(0, 1).UTC(), "t:1970-01-01T00:00:00.000000001"},
	{"uuid", `{"type":"string","logicalType":"uuid"}`, "09e19fc7-3d7e-4b0e-9d43-7d1c9dbd1c1a", "t:09e19fc7-3d7e-4b0e-9d43-7d1c9dbd1c1a"},
	{"uuid, fixed", `{"type":"fixed","name":"f","size":16,"logicalType":"uuid"}`, [16]byte{0x09, 0xe1, 15: 0x1a}, "t:09e10000-0000-0000-0000-00000000001a"},
	{"duration", `{"type":"fixed","name":"f","size":12,"logicalType":"duration"}`, oracle.Duration{Months: 1, Days: 2, Milliseconds: 3004}, "t:P1M2DT3.004S"},
	{"nullable, null", `["null","string"]`, nil, "null"},
	{"nullable, set", `["null",{"type":"long","logicalType":"timestamp-micros"}]`, time.UnixMicro(0), "t:1970-01-01T00:00:00Z"},
	{"wide union", `["null","string","long","boolean"]`, int64(7), "n:7"},
	{"array", `{"type":"array","items":["null","int"]}`, []any{int32(1), nil}, "j:[1,null]"},
	{"array of nothing", `{"type":"array","items":"int"}`, []any{}, "j:[]"},
	{"array of bytes", `{"type":"array","items":"bytes"}`, []any{[]byte{255}}, `j:["\\xff"]`},
	{"map", `{"type":"map","values":{"type":"int","logicalType":"date"}}`, map[string]any{"a\n": time.Unix(0, 0).UTC()}, `j:{"a\u000a":"1970-01-01"}`},
	{"record", `{"type":"record","name":"in","fields":[{"name":"a","type":"string"},{"name":"b","type":"double"}]}`, map[string]any{"a": "x", "b": 0.5}, `j:{"a":"x","b":0.5}`},
	{
		"recursive", `{"type":"record","name":"n","fields":[{"name":"x","type":"int"},{"name":"next","type":["null","n"]}]}`,
		map[string]any{"x": int32(1), "next": map[string]any{"x": int32(2), "next": nil}},
		`j:{"x":1,"next":{"x":2,"next":null}}`,
	},
	{"nested enum", `{"type":"array","items":{"type":"enum","name":"e","symbols":["A"]}}`, []any{"A"}, `j:["A"]`},
	{"nested decimal", `{"type":"array","items":{"type":"bytes","logicalType":"decimal","precision":4,"scale":1}}`, []any{big.NewRat(5, 2)}, `j:[2.5]`},

	{"Debezium date", `{"type":"int","connect.version":1,"connect.name":"io.debezium.time.Date"}`, int32(1), "t:1970-01-02"},
	{"Debezium MicroTimestamp", `["null",{"type":"long","connect.version":1,"connect.name":"io.debezium.time.MicroTimestamp"}]`, int64(1), "t:1970-01-01T00:00:00.000001"},
	{"Debezium Json", `{"type":"string","connect.version":1,"connect.name":"io.debezium.data.Json"}`, `{"a":1}`, `j:{"a":1}`},
	{"Debezium Bits", `{"type":"bytes","connect.version":1,"connect.parameters":{"length":"4"},"connect.name":"io.debezium.data.Bits"}`, []byte{10}, "t:1010"},
	{"Connect decimal", `{"type":"bytes","scale":2,"precision":10,"connect.version":1,"connect.parameters":{"scale":"2","connect.decimal.precision":"10"},"connect.name":"org.apache.kafka.connect.data.Decimal","logicalType":"decimal"}`, big.NewRat(623, 50), "n:12.46"},
	{"Connect timestamp", `{"type":"long","connect.version":1,"connect.name":"org.apache.kafka.connect.data.Timestamp","logicalType":"timestamp-millis"}`, time.UnixMilli(0), "t:1970-01-01T00:00:00Z"},
	{
		"variable scale", `{"type":"record","name":"VariableScaleDecimal","namespace":"io.debezium.data","fields":[{"name":"scale","type":"int"},{"name":"value","type":"bytes"}],"connect.version":1,"connect.name":"io.debezium.data.VariableScaleDecimal"}`,
		map[string]any{"scale": int32(3), "value": []byte{0x30, 0x39}},
		"n:12.345",
	},
	{"logical type that does not fit", `{"type":"string","logicalType":"date"}`, "x", "t:x"},
}

// encode has the oracle write a value.
func encodeAvro(tb testHelper, schema string, v any) []byte {
	tb.Helper()
	s, err := oracle.Parse(schema)
	if err != nil {
		tb.Fatalf("%s: %v", schema, err)
	}
	b, err := s.Encode(v)
	if err != nil {
		tb.Fatalf("%s: %v", schema, err)
	}
	return b
}

func TestAvroTypes(t *testing.T) {
	t.Parallel()
	for _, c := range avroCases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			schema := inRow(c.schema)
			body := encodeAvro(t, schema, map[string]any{"v": c.value})
			ch, err := avroTopic(t, oneColumn, mustAvro(t, schema), nil).Decode(&Record{Value: append([]byte{}, body...), Position: somewhere})
			if err != nil {
				t.Fatal(err)
			}
			if got := cells(ch.After); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
			// Cut anywhere, or with a byte more, it is refused, by the oracle too.
			for n := range len(body) {
				avroAgrees(t, schema, body[:n], false)
			}
			avroAgrees(t, schema, append(append([]byte(nil), body...), 0), false)
			avroAgrees(t, schema, body, true)
		})
	}
}

// bothSchemas is one schema, as both decoders read it.
type bothSchemas struct {
	ours   *AvroSchema
	oracle *oracle.Schema
}

var parsedSchemas sync.Map // of text to bothSchemas

// parsedOnce parses each schema once: a fuzzer comes with the same ones again
// and again.
func parsedOnce(tb testHelper, schema string) bothSchemas {
	if known, ok := parsedSchemas.Load(schema); ok {
		both, _ := known.(bothSchemas)
		return both
	}
	theirs, err := oracle.Parse(schema)
	if err != nil {
		tb.Fatal(err)
	}
	both := bothSchemas{mustAvro(tb, schema), theirs}
	parsedSchemas.Store(schema, both)
	return both
}

// avroAgrees decodes with both decoders. What ours accepts, the oracle accepts
// too, and it is the same value. The other way round ours is the stricter:
//
//   - a boolean that is neither 0 nor 1, and text that is not UTF-8;
//   - a number of more bytes than its type ever needs;
//   - a block whose size is not what its elements have;
//   - more than 64 levels, and more than 1,024 elements without a byte;
//   - NaN and infinities inside of another value, which has no form for them;
//   - decimals above 1,024 bytes or without any.
func avroAgrees(tb testHelper, schema string, body []byte, accepted bool) {
	tb.Helper()
	if body == nil {
		body = []byte{} // no bytes are not a tombstone
	}
	ch, err := avroTopic(tb, oneColumn, parsedOnce(tb, schema).ours, nil).Decode(&Record{Value: body, Position: somewhere})
	var refusal *Refusal
	if err != nil && !errors.As(err, &refusal) {
		tb.Fatalf("error of another type: %v", err)
	}
	if err != nil {
		if accepted {
			tb.Fatalf("%x of %s: %v", body, schema, err)
		}
		return
	}
	parsed := parsedOnce(tb, schema).oracle
	var v any
	rest, err := parsed.Decode(body, &v)
	if err != nil || len(rest) > 0 {
		tb.Fatalf("%x of %s: ours gives %s, the oracle %v and %d bytes left over", body, schema, cells(ch.After), err, len(rest))
	}
	root := parsed.Root()
	o := oracleText{named: make(map[string]*oracle.SchemaNode)}
	o.names(root)
	row, ok := v.(map[string]any)
	if !ok {
		tb.Fatalf("the oracle gives %T", v)
	}
	got := cells(ch.After)
	if want := o.cell(&root.Fields[0].Type, row["v"]); want != got {
		tb.Fatalf("%x of %s: ours gives %s, the oracle %s", body, schema, got, want)
	}
}

// oracleText writes what the oracle decoded in the form of cells.
type oracleText struct{ named map[string]*oracle.SchemaNode }

func (o oracleText) names(n *oracle.SchemaNode) {
	switch n.Type {
	case "record", "enum", "fixed":
		o.named[n.Name] = n
	}
	for i := range n.Fields {
		o.names(&n.Fields[i].Type)
	}
	for i := range n.Branches {
		o.names(&n.Branches[i])
	}
	for _, part := range []*oracle.SchemaNode{n.Items, n.Values} {
		if part != nil {
			o.names(part)
		}
	}
}

func (o oracleText) cell(n *oracle.SchemaNode, v any) string {
	letter, text := o.text(n, v)
	if letter == "" {
		return text
	}
	return letter + ":" + text
}

// inside writes a part of another value, which is JSON.
func (o oracleText) inside(n *oracle.SchemaNode, v any) string {
	letter, text := o.text(n, v)
	switch letter {
	case "t":
		return oracleQuote(text)
	case "h":
		return `"\\x` + text + `"`
	case "j":
		if text != "" && text[0] != '{' && text[0] != '[' {
			return oracleQuote(text)
		}
	}
	return text
}

func oracleQuote(text string) string {
	var b strings.Builder
	b.WriteByte('"')
	for i := range len(text) {
		switch c := text[i]; {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteByte(c)
		case c < ' ':
			fmt.Fprintf(&b, "\\u%04x", c)
		default:
			b.WriteByte(c)
		}
	}
	b.WriteByte('"')
	return b.String()
}

func (o oracleText) text(n *oracle.SchemaNode, v any) (letter, text string) {
	if named := o.named[n.Type]; named != nil {
		n = named
	}
	if n.Type == "union" {
		return o.union(n, v)
	}
	if letter, text, ok := connectText(n, v); ok {
		return letter, text
	}
	switch v := v.(type) {
	case nil:
		return "", "null"
	case bool:
		return "b", strconv.FormatBool(v)
	case int32:
		return "n", strconv.Itoa(int(v))
	case int64:
		return "n", strconv.FormatInt(v, 10)
	case float32:
		return "n", oracleFloat(float64(v), 32)
	case float64:
		return "n", oracleFloat(v, 64)
	case string:
		return "t", v
	case []byte:
		return "h", hex.EncodeToString(v)
	case [16]byte:
		text := hex.EncodeToString(v[:])
		return "t", text[:8] + "-" + text[8:12] + "-" + text[12:16] + "-" + text[16:20] + "-" + text[20:]
	case *big.Rat:
		return "n", v.FloatString(n.Scale)
	case time.Time:
		return "t", oracleTime(n.LogicalType, v)
	case time.Duration:
		return "t", oracleClock(n.LogicalType, v)
	case oracle.Duration:
		fraction := ""
		if ms := v.Milliseconds % 1000; ms > 0 {
			fraction = fmt.Sprintf(".%03d", ms)
		}
		return "t", fmt.Sprintf("P%dM%dDT%d%sS", v.Months, v.Days, v.Milliseconds/1000, fraction)
	case []any:
		parts := make([]string, len(v))
		for i := range v {
			parts[i] = o.inside(n.Items, v[i])
		}
		return "j", "[" + strings.Join(parts, ",") + "]"
	case map[string]any:
		if n.Type == "record" {
			parts := make([]string, len(n.Fields))
			for i := range n.Fields {
				parts[i] = oracleQuote(n.Fields[i].Name) + ":" + o.inside(&n.Fields[i].Type, v[n.Fields[i].Name])
			}
			return "j", "{" + strings.Join(parts, ",") + "}"
		}
		parts := make([]string, 0, len(v))
		for name, value := range v {
			parts = append(parts, oracleQuote(name)+":"+o.inside(n.Values, value))
		}
		return "j", "{" + strings.Join(parts, ",") + "}"
	}
	return "?", fmt.Sprintf("%T", v)
}

// union picks the part by the value's Go type: the schemas of these tests have
// no two parts of one type.
func (o oracleText) union(n *oracle.SchemaNode, v any) (letter, text string) {
	if v == nil {
		return "", "null"
	}
	word := map[string]string{"bool": "boolean", "int32": "int", "int64": "long", "string": "string", "float64": "double"}[fmt.Sprintf("%T", v)]
	for i := range n.Branches {
		if part := &n.Branches[i]; part.Type == word || (len(n.Branches) == 2 && part.Type != "null") {
			return o.text(part, v)
		}
	}
	return "?", fmt.Sprintf("union with %T", v)
}

// connectText reads what Kafka Connect's converter says about a type.
func connectText(n *oracle.SchemaNode, v any) (letter, text string, ok bool) {
	name, ok := n.Props["connect.name"].(string)
	if !ok {
		return "", "", false
	}
	switch v := v.(type) {
	case int32:
		if name == "io.debezium.time.Date" {
			return "t", oracleDate(time.Unix(int64(v)*86400, 0).UTC()), true
		}
	case int64:
		if name == "io.debezium.time.MicroTimestamp" {
			return "t", oracleTime("", time.UnixMicro(v).UTC()), true
		}
	case string:
		if name == "io.debezium.data.Json" {
			return "j", v, true
		}
	case []byte:
		if name == "io.debezium.data.Bits" && len(v) == 1 {
			return "t", fmt.Sprintf("%08b", v[0])[4:], true
		}
		if name == "io.debezium.data.Bits" {
			return "t", "0000", true
		}
	case map[string]any:
		scale, _ := v["scale"].(int32)
		unscaled, _ := v["value"].([]byte)
		if name == "io.debezium.data.VariableScaleDecimal" {
			r := oracle.RatFromBytes(unscaled, 0)
			for range scale {
				r.Quo(r, big.NewRat(10, 1))
			}
			for range -scale {
				r.Mul(r, big.NewRat(10, 1))
			}
			return "n", r.FloatString(max(int(scale), 0)), true
		}
	}
	return "", "", false
}

func oracleDate(t time.Time) string {
	year := t.Year()
	if year < 0 {
		return fmt.Sprintf("-%04d-%02d-%02d", -year, t.Month(), t.Day())
	}
	return fmt.Sprintf("%04d-%02d-%02d", year, t.Month(), t.Day())
}

func oracleTime(logical string, t time.Time) string {
	t = t.UTC()
	if logical == "date" {
		return oracleDate(t)
	}
	digits := 6
	switch {
	case strings.HasSuffix(logical, "millis"):
		digits = 3
	case strings.HasSuffix(logical, "nanos"):
		digits = 9
	}
	text := oracleDate(t) + t.Format("T15:04:05")
	if t.Nanosecond() != 0 {
		text += "." + fmt.Sprintf("%09d", t.Nanosecond())[:digits]
	}
	if strings.HasPrefix(logical, "timestamp") {
		text += "Z"
	}
	return text
}

func oracleClock(logical string, d time.Duration) string {
	sign := ""
	if d < 0 {
		sign, d = "-", -d
	}
	text := fmt.Sprintf("%s%02d:%02d:%02d", sign, int64(d/time.Hour), int64(d/time.Minute)%60, int64(d/time.Second)%60)
	if d%time.Second != 0 {
		digits := 6
		if logical == "time-millis" {
			digits = 3
		}
		text += "." + fmt.Sprintf("%09d", d%time.Second)[:digits]
	}
	return text
}

func oracleFloat(f float64, bits int) string {
	switch {
	case math.IsNaN(f):
		return "NaN"
	case math.IsInf(f, 1):
		return "Infinity"
	case math.IsInf(f, -1):
		return "-Infinity"
	case f != 0 && (math.Abs(f) < 1e-6 || math.Abs(f) >= 1e21):
		return strconv.FormatFloat(f, 'e', -1, bits)
	}
	return strconv.FormatFloat(f, 'f', -1, bits)
}

// Bytes that were changed at random, of every type above.
func TestAvroDamaged(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := rapid.SampledFrom(avroCases).Draw(t, "case")
		schema := inRow(c.schema)
		body := encodeAvro(t, schema, map[string]any{"v": c.value})
		for range rapid.IntRange(1, 3).Draw(t, "changes") {
			at := rapid.IntRange(0, len(body)).Draw(t, "at")
			what := rapid.Byte().Draw(t, "byte")
			switch {
			case at == len(body) || rapid.Bool().Draw(t, "insert"):
				body = append(body[:at:at], append([]byte{what}, body[at:]...)...)
			case rapid.Bool().Draw(t, "drop"):
				body = append(body[:at:at], body[at+1:]...)
			default:
				body[at] = what
			}
		}
		avroAgrees(t, schema, body, false)
	})
}

// Whatever the bytes are, of every type above.
func FuzzAvro(f *testing.F) {
	for i, c := range avroCases {
		f.Add(byte(i), encodeAvro(f, inRow(c.schema), map[string]any{"v": c.value}))
	}
	f.Fuzz(func(t *testing.T, which byte, body []byte) {
		avroAgrees(t, inRow(avroCases[int(which)%len(avroCases)].schema), body, false)
	})
}

func BenchmarkAvroRows(b *testing.B) {
	const schema = `{"type":"record","name":"row","fields":[{"name":"id","type":"long"},{"name":"note","type":["null","string"]},
		{"name":"doc","type":{"type":"array","items":"int"}},{"name":"Exact","type":"boolean"}]}`
	d := avroTopic(b, jsonRelation, mustAvro(b, schema), nil)
	body := encodeAvro(b, schema, map[string]any{"id": int64(123456), "note": "a note of some length", "doc": []any{int32(1), int32(2), int32(3)}, "Exact": true})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Decode(&Record{Value: body, Position: somewhere}); err != nil {
			b.Fatal(err)
		}
	}
}
