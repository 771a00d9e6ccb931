package decode

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var jsonRelation = &Relation{Name: "orders", Identity: IdentityDefault, Columns: []Column{
	{Name: "id", Key: true}, {Name: "note"}, {Name: "doc"}, {Name: "Exact"},
}}

var somewhere = Position{Topic: "orders", Partition: 3, Offset: 42}

// jsonTopic makes a decoder of rows of jsonRelation.
func jsonTopic(tb testing.TB, change func(*TopicConfig)) *Topic {
	tb.Helper()
	cfg := TopicConfig{Format: FormatJSON, Relation: jsonRelation}
	if change != nil {
		change(&cfg)
	}
	d, err := NewTopic(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return d
}

func TestJSONRows(t *testing.T) {
	t.Parallel()
	set := func(k Kind, s string) Value { return Value{State: Set, Kind: k, Bytes: []byte(s)} }
	for name, c := range map[string]struct {
		key, value string
		want       []Value // After, or Before for a tombstone
	}{
		"plain":                    {"", `{"id":1,"note":"a"}`, []Value{set(Number, "1"), set(Text, "a"), {}, {}}},
		"null is not absent":       {"", `{"id":1,"note":null}`, []Value{set(Number, "1"), {State: Null}, {}, {}}},
		"digits beyond a float64":  {"", `{"id":9007199254740993}`, []Value{set(Number, "9007199254740993"), {}, {}, {}}},
		"escapes":                  {"", `{"id":1,"note":"a\n\u00e9\"\\"}`, []Value{set(Number, "1"), set(Text, "a\né\"\\"), {}, {}}},
		"nested document verbatim": {"", `{"id":1,"doc":{"a": [1, 2.50]}}`, []Value{set(Number, "1"), {}, set(JSON, `{"a": [1, 2.50]}`), {}}},
		"unquoted names fold":      {"", `{"ID":1,"Note":"a"}`, []Value{set(Number, "1"), set(Text, "a"), {}, {}}},
		"escaped member name":      {"", `{"\u0069d":1}`, []Value{set(Number, "1"), {}, {}, {}}},
		"mixed case name is exact": {"", `{"id":1,"Exact":true,"exact":2}`, []Value{set(Number, "1"), {}, {}, set(Bool, "true")}},
		"unknown member":           {"", `{"id":1,"other":{"deep":[1]}}`, []Value{set(Number, "1"), {}, {}, {}}},
		"spaces around":            {"", " {\"id\":1}\n", []Value{set(Number, "1"), {}, {}, {}}},
		"tombstone, object key":    {`{"id":7}`, "", []Value{set(Number, "7"), {}, {}, {}}},
		"tombstone, number key":    {`7`, "", []Value{set(Number, "7"), {}, {}, {}}},
		"tombstone, string key":    {`"a\tb"`, "", []Value{set(Text, "a\tb"), {}, {}, {}}},
		"tombstone, plain text":    {`order-7`, "", []Value{set(Text, "order-7"), {}, {}, {}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := jsonTopic(t, nil)
			value := []byte(c.value)
			if c.value == "" {
				value = nil
			}
			ch, err := d.Decode(&Record{Key: []byte(c.key), Value: value, Position: somewhere})
			if err != nil {
				t.Fatal(err)
			}
			op, row, other := Insert, ch.After, ch.Before
			if value == nil {
				op, row, other = Delete, ch.Before, ch.After
			}
			if ch.Op != op || other != nil || ch.Position != somewhere {
				t.Fatalf("%+v", ch)
			}
			if diff := cmp.Diff(c.want, row); diff != "" {
				t.Errorf("row (-want +got):\n%s", diff)
			}
		})
	}
}

func TestJSONRowsRefuse(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ key, value, why string }{
		"no JSON":               {"", `hello`, "not valid JSON"},
		"no JSON but like null": {"", `not json`, "not valid JSON"},
		"empty":                 {"", ` `, "empty"},
		"cut short":             {"", `{"id":1`, "not valid JSON"},
		"array":                 {"", `[1]`, "array"},
		"null":                  {"", `null`, "null"},
		"trailing bytes":        {"", `{"id":1} x`, "left over"},
		"two values":            {"", `{"id":1}{"id":2}`, "left over"},
		"duplicate name":        {"", `{"id":1,"id":2}`, "duplicate"},
		"duplicate by folding":  {"", `{"id":1,"ID":2}`, "given twice"},
		"invalid UTF-8":         {"", "{\"id\":1,\"note\":\"\xff\"}", "UTF-8"},
		"lone surrogate":        {"", `{"id":1,"note":"\ud83d"}`, "not valid JSON"},
		"leading zero":          {"", `{"id":01}`, "not valid JSON"},
		"NaN":                   {"", `{"id":NaN}`, "not valid JSON"},
		"deep":                  {"", `{"id":1,"doc":` + strings.Repeat("[", 101) + strings.Repeat("]", 101) + `}`, "101 levels"},
		"very deep":             {"", `{"id":1,"doc":` + strings.Repeat("[", 100_000), "not valid JSON"},
		"deep, ignored":         {"", `{"id":1,"other":` + strings.Repeat("[", 104) + strings.Repeat("]", 104) + `}`, "104 levels"},
		"duplicate, deep":       {"", `{"id":1,"other":[{"a":{"b":1,"\u0062":2}}]}`, "duplicate"},
		"duplicate of many":     {"", `{"id":1,"other":{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1,"h":1,"i":1,"j":1,"c":1}}`, "duplicate"},
		"tombstone, no key":     {"", "\x00", "no key"},
		"tombstone, null key":   {"null", "\x00", "missing or null"},
		"tombstone, no column":  {`{"note":"a"}`, "\x00", "missing or null"},
		"tombstone, array":      {`[1]`, "\x00", "array"},
		"tombstone, broken":     {`"abc`, "\x00", "not valid JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			value := []byte(c.value)
			if c.value == "\x00" {
				value = nil
			}
			_, err := jsonTopic(t, nil).Decode(&Record{Key: []byte(c.key), Value: value, Position: somewhere})
			var refusal *Refusal
			if !errors.As(err, &refusal) {
				t.Fatalf("error %v", err)
			}
			if !strings.Contains(refusal.Why, c.why) || refusal.Where != "orders[3]@42" {
				t.Fatalf("the refusal says %q", refusal.Error())
			}
		})
	}
}

func TestJSONRowsRefuseUnknown(t *testing.T) {
	t.Parallel()
	d := jsonTopic(t, func(c *TopicConfig) { c.RefuseUnknown = true })
	_, err := d.Decode(&Record{Value: []byte(`{"id":1,"other":2}`), Position: somewhere})
	if err == nil || !strings.Contains(err.Error(), "other") {
		t.Fatalf("error %v", err)
	}
}

// Whatever comes in: no panic, errors of one type, and a row that is a faithful
// part of the input.
func FuzzJSONRows(f *testing.F) {
	for _, s := range []string{`{"id":1,"note":"a\u00e9","doc":{"a":[1]}}`, `{"ID":null}`, `[]`, `{"id":1}x`, "\xff"} {
		f.Add([]byte(s), []byte(s))
	}
	f.Fuzz(func(t *testing.T, key, value []byte) {
		d := jsonTopic(t, nil)
		for _, v := range [][]byte{value, nil} {
			ch, err := d.Decode(&Record{Key: key, Value: v, Position: somewhere})
			if err != nil {
				var refusal *Refusal
				if !errors.As(err, &refusal) {
					t.Fatalf("error of another type: %v", err)
				}
				continue
			}
			if (ch.Op == Insert) != (v != nil) && !bytes.Contains(v, []byte("payload")) && !bytes.Contains(v, []byte("debezium")) {
				t.Fatalf("%v from value %q", ch.Op, v)
			}
		}
	})
}

func BenchmarkJSONRows(b *testing.B) {
	d := jsonTopic(b, nil)
	value := []byte(`{"id":123456,"note":"a note of some length","doc":{"a":[1,2,3]},"Exact":true}`)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Decode(&Record{Value: value, Position: somewhere}); err != nil {
			b.Fatal(err)
		}
	}
}
