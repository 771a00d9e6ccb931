package decode

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
)

// hostile are records whose size says little about what decoding them could
// take, with the schema of their values where they are Avro.
func hostile() map[string]struct {
	format     Format
	schema     string
	key, value []byte
} {
	type record = struct {
		format     Format
		schema     string
		key, value []byte
	}
	names := func(format string, n int) string {
		var b strings.Builder
		b.WriteByte('{')
		for i := range n {
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprintf(&b, format, i)
		}
		b.WriteByte('}')
		return b.String()
	}
	row := func(v string) []byte { return []byte(`{"v":` + v + `}`) }
	dates := `{"type":"struct","fields":[{"type":"array","items":{"type":"int32","name":"io.debezium.time.Date"},"field":"v"}]}`
	count := func(n int64) []byte { return binary.AppendVarint(nil, n) }
	many := func(n int, with []byte) []byte { return append(append(count(int64(n)), bytes.Repeat(with, n)...), 0) }
	self := `{"type":"record","name":"n","fields":[{"name":"x","type":["null","n"]}]}`
	return map[string]record{
		"JSON, brackets":                  {FormatJSON, "", nil, row(strings.Repeat("[", 1<<20))},
		"JSON, numbers":                   {FormatJSON, "", nil, row("[" + strings.Repeat("1,", 1<<19) + "1]")},
		"JSON, many members, not carried": {FormatJSON, "", nil, []byte(`{"w":` + names(`"%x":1`, 150_000) + `}`)},
		"JSON, many members, carried":     {FormatJSON, "", nil, row(names(`"%x":1`, 150_000))},
		"JSON, many columns":              {FormatJSON, "", nil, []byte(names(`"%x":1`, 150_000))},
		"JSON, escaped names":             {FormatJSON, "", nil, row(names(`"\u0061%x":1`, 80_000))},
		"JSON, one name again and again":  {FormatJSON, "", nil, row(names(`"a":%d`, 100_000))},
		"JSON, escapes":                   {FormatJSON, "", nil, row(`"` + strings.Repeat(`\n`, 1<<19) + `"`)},
		"JSON, escaped column name":       {FormatJSON, "", nil, []byte(`{"` + strings.Repeat(`\n`, 1<<19) + `":1}`)},
		"JSON, digits":                    {FormatJSON, "", nil, row(strings.Repeat("9", 1<<20))},
		"JSON, a key":                     {FormatJSON, "", []byte(names(`"%x":1`, 150_000)), nil},
		"JSON, typed array":               {FormatJSON, "", nil, []byte(withSchema(dates, string(row("["+strings.Repeat("0,", 1<<19)+"0]"))))},
		"JSON, schema of many fields":     {FormatJSON, "", nil, []byte(`{"schema":{"type":"struct","fields":[` + strings.Repeat(`{"type":"int8"},`, 16_000) + `{"type":"int8"}]},"payload":{"v":1}}`)},
		"JSON, schema of nested types":    {FormatJSON, "", nil, []byte(`{"schema":{"type":"struct","fields":[` + strings.Repeat(`{"type":"array","items":{"type":"array","items":{"type":"int8"}}},`, 3900) + `{"type":"int8"}]},"payload":{"v":1}}`)},
		"Debezium, text and binary":       {FormatDebeziumJSON, "", nil, []byte(payload("c", "null", `{"v":"`+strings.Repeat("\\u0041", 1<<17)+`"}`, pgSource))},

		"Avro, nulls without a byte":     {FormatAvro, inRow(`{"type":"array","items":"null"}`), nil, append(count(50_000_000), 0)},
		"Avro, blocks of nulls":          {FormatAvro, inRow(`{"type":"array","items":"null"}`), nil, append(bytes.Repeat(count(1000), 1<<19), 0)},
		"Avro, claimed longs":            {FormatAvro, inRow(`{"type":"array","items":"long"}`), nil, append(count(1<<40), 0)},
		"Avro, booleans":                 {FormatAvro, inRow(`{"type":"array","items":"boolean"}`), nil, many(1<<20, []byte{1})},
		"Avro, doubles":                  {FormatAvro, inRow(`{"type":"array","items":"double"}`), nil, many(1<<17, []byte{1, 2, 3, 4, 5, 6, 7, 8})},
		"Avro, bytes":                    {FormatAvro, inRow(`"bytes"`), nil, append(count(1<<20), make([]byte, 1<<20)...)},
		"Avro, bytes in an array":        {FormatAvro, inRow(`{"type":"array","items":"bytes"}`), nil, many(1<<19, []byte{2, 255})},
		"Avro, text of controls":         {FormatAvro, inRow(`{"type":"array","items":"string"}`), nil, many(1<<19, []byte{2, 1})},
		"Avro, a claimed text":           {FormatAvro, inRow(`"string"`), nil, count(1 << 31)},
		"Avro, a claimed text beyond":    {FormatAvro, inRow(`"string"`), nil, count(1<<63 - 1)},
		"Avro, a text below nothing":     {FormatAvro, inRow(`"string"`), nil, count(-1)},
		"Avro, a count of the least":     {FormatAvro, inRow(`{"type":"array","items":"int"}`), nil, append(count(-1<<63), 0, 0)},
		"Avro, a claimed block":          {FormatAvro, inRow(`{"type":"array","items":"int"}`), nil, append(append(count(-1), count(1<<40)...), 0)},
		"Avro, a map":                    {FormatAvro, inRow(`{"type":"map","values":"boolean"}`), nil, many(1<<19, []byte{0, 1})},
		"Avro, deep":                     {FormatAvro, inRow(self), nil, append(bytes.Repeat([]byte{2}, 1<<20), 0)},
		"Avro, long names of little":     {FormatAvro, inRow(`{"type":"array","items":{"type":"record","name":"r","fields":[{"name":"` + strings.Repeat("n", 1000) + `","type":"int"}]}}`), nil, many(1<<16, []byte{0})},
		"Avro, dates in an array":        {FormatAvro, inRow(`{"type":"array","items":{"type":"int","logicalType":"date"}}`), nil, many(1<<19, []byte{0})},
		"Avro, a decimal":                {FormatAvro, inRow(`{"type":"bytes","logicalType":"decimal","precision":1000000,"scale":2}`), nil, append(count(1<<20), bytes.Repeat([]byte{0x7f}, 1<<20)...)},
		"Avro, a decimal of zeros":       {FormatAvro, inRow(`{"type":"array","items":{"type":"bytes","connect.name":"org.apache.kafka.connect.data.Decimal","connect.parameters":{"scale":"16000"}}}`), nil, many(1<<19, []byte{2, 1})},
		"Avro, a variable decimal":       {FormatAvro, inRow(`{"type":"record","name":"VariableScaleDecimal","fields":[{"name":"scale","type":"int"},{"name":"value","type":"bytes"}],"connect.name":"io.debezium.data.VariableScaleDecimal"}`), nil, append(binary.AppendVarint(nil, 1<<31-1), 2, 1)},
		"Avro, records of twice nothing": {FormatAvro, inRow(twiceNothing(40)), nil, []byte{}},
		"Avro, twice nothing, in part":   {FormatAvro, inRow(`{"type":"array","items":` + twiceNothing(9) + `}`), nil, append(count(1000), 0)},
		"Avro, empty records in a map":   {FormatAvro, inRow(`{"type":"map","values":{"type":"record","name":"r","fields":[]}}`), nil, many(1<<19, []byte{0})},
	}
}

// twiceNothing is a record of two records of two records and so on, so many
// levels deep, none of which has a byte.
func twiceNothing(levels int) string {
	s := `{"type":"record","name":"r0","fields":[]}`
	for i := range levels {
		s = fmt.Sprintf(`{"type":"record","name":"r%d","fields":[{"name":"a","type":%s},{"name":"b","type":"r%d"}]}`, i+1, s, i)
	}
	return s
}

// No record takes more than four times its size and a mebibyte, whatever it
// claims, nor long.
func TestHostileRecords(t *testing.T) { // not parallel: it measures
	for name, c := range hostile() {
		t.Run(name, func(t *testing.T) {
			var schema *AvroSchema
			if c.schema != "" {
				schema = mustAvro(t, c.schema)
			}
			d := debeziumTopic(t, &Relation{Name: "t", Identity: IdentityDefault, Columns: []Column{{Name: "v", Key: true}}}, func(cfg *TopicConfig) {
				cfg.Format, cfg.ValueSchema = c.format, schema
			})
			rec := &Record{Key: c.key, Value: c.value, Position: somewhere}
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			began := time.Now()
			ch, err := d.Decode(rec)
			took := time.Since(began)
			runtime.ReadMemStats(&after)
			size := uint64(len(c.key) + len(c.value))
			used, limit := after.TotalAlloc-before.TotalAlloc, 4*size+1<<20
			what := "taken"
			if err != nil {
				what = err.Error()
				var refusal *Refusal
				if !errors.As(err, &refusal) {
					t.Fatalf("error of another type: %v", err)
				}
			} else if ch == nil {
				t.Fatal("it was passed over")
			}
			t.Logf("%d bytes: allocated %d of at most %d, in %v; %.120s", size, used, limit, took, what)
			if used > limit {
				t.Errorf("%d bytes allocated for %d, more than %d", used, size, limit)
			}
			if took > 20*time.Second { // they take milliseconds; a machine may be busy
				t.Errorf("it took %v", took)
			}
		})
	}
}
