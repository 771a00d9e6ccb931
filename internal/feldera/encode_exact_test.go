package feldera

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"holdfast/internal/decode"
)

// encodeFrom writes one value of a Postgres column.
func encodeFrom(t *testing.T, typ Type, source decode.Column, v decode.Value, p Policy) (string, error) {
	t.Helper()
	table := &Table{Name: "t", spelling: "t", Columns: []Column{{Name: "v", Type: typ}}}
	source.Name = "v"
	rel := &decode.Relation{ID: 1, Schema: "public", Name: "t", Identity: decode.IdentityDefault, Columns: []decode.Column{source}}
	e, err := NewEncoder(table, rel, p)
	if err != nil {
		return "", err
	}
	var a Array
	if err := a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: rel, After: []decode.Value{v}}); err != nil {
		return "", err
	}
	return strings.TrimSuffix(strings.TrimPrefix(string(a.Body()), `[{"insert":{"v":`), `}}]`), nil
}

// expect compares what a value was written as; "" stands for a refusal.
func expect(t *testing.T, name, got string, err error, want string) {
	t.Helper()
	var refused *decode.Refusal
	switch {
	case want == "" && err == nil:
		t.Errorf("%s: written as %s, expected a refusal", name, got)
	case want == "" && !errors.As(err, &refused):
		t.Errorf("%s: %T, expected a *decode.Refusal", name, err)
	case want != "" && (err != nil || got != want):
		t.Errorf("%s: got %s, %v, want %s", name, got, err, want)
	}
}

func arrayOf(t Type) Type { return Type{Name: ArrayOf, Nullable: true, Element: &t} }

// The elements of a Postgres array are what their type says, in an ARRAY of
// VARIANT too, where the text alone would not tell.
func TestArrayElementsByType(t *testing.T) {
	variants := arrayOf(typeOf(Variant))
	for _, c := range []struct {
		typ     Type
		element uint32
		text    string
		want    string
	}{
		{variants, 16, "{t,f,NULL}", "[true,false,null]"},
		{variants, 16, "{yes}", ""},
		{variants, 20, "{1,-9223372036854775808}", "[1,-9223372036854775808]"},
		{variants, 1700, "{1.50,NULL}", "[1.50,null]"},
		{variants, 1700, "{NaN}", ""},
		{variants, 701, "{1e+20,0.1}", "[1e+20,0.1]"},
		{variants, 701, "{1e+300}", ""},
		{variants, 3802, `{"{\"a\": [1, null]}","\"x\"",7}`, `[{"a": [1, null]},"x",7]`},
		{variants, 3802, `{"{\"a\":"}`, ""},
		{variants, 114, `{"{\"a\":1,\"a\":2}"}`, ""},
		{variants, 17, `{"\\xdead"}`, `["dead"]`},
		{variants, 17, `{dead}`, ""},
		{variants, 25, `{"1",t,"a,b"}`, `["1","t","a,b"]`},
		{variants, 1082, `{2024-01-02}`, `["2024-01-02"]`},
		{arrayOf(variants), 23, "{{1,2},{3,4}}", "[[1,2],[3,4]]"},
		{arrayOf(typeOf(Varchar)), 16, "{t,f}", `["true","false"]`},
		{arrayOf(typeOf(Varchar)), 1700, "{1.50}", `["1.50"]`},
		{arrayOf(typeOf(Varchar)), 3802, `{"{\"a\": 1}"}`, `["{\"a\": 1}"]`},
		{arrayOf(typeOf(Integer)), 23, "{1,2}", "[1,2]"},
		{arrayOf(decimal(4, 2)), 1700, "{1.5}", `["1.5"]`},
		{arrayOf(typeOf(Double)), 701, "{0.1,NaN}", ""},
		{arrayOf(typeOf(Double)), 1700, "{9007199254740993}", ""},
		{arrayOf(typeOf(Boolean)), 16, "{t}", "[true]"},
		{arrayOf(typeOf(Varbinary)), 17, `{"\\x00ff"}`, "[[0,255]]"},
		{arrayOf(Type{Name: Struct, Nullable: true, Fields: []Column{{Name: "a", Type: typeOf(Integer)}}}), 3802, `{"{\"a\": 1}"}`, `[{"a":1}]`},
		// Refused before the first row.
		{arrayOf(typeOf(Date)), 23, "{1}", ""},
		{variants, 0, "{1}", ""},                 // an array of a type whose delimiter is no comma
		{arrayOf(typeOf(Varchar)), 0, "{1}", ""}, // the same
		{typeOf(Varchar), 0, "{(1,1),(0,0);(2,2),(1,1)}", `"{(1,1),(0,0);(2,2),(1,1)}"`},
	} {
		got, err := encodeFrom(t, c.typ, decode.Column{TypeOID: 90001, Element: c.element}, txt(c.text), Policy{})
		expect(t, fmt.Sprintf("%s of type %d into %s", c.text, c.element, c.typ.String()), got, err, c.want)
	}
	// From a source that is not Postgres nobody knows what the elements are.
	got, err := encodeValue(t, variants, txt("{1,t}"), Policy{})
	expect(t, "text into a VARIANT ARRAY", got, err, "")
	got, err = encodeFrom(t, variants, decode.Column{TypeOID: 1231, Element: 1700}, txt("{NaN,1}"), Policy{NonFinite: NullSpecial})
	expect(t, "NaN by policy", got, err, "[null,1]")
}

// Keys that are one to the column are one: the second of them would take the
// place of the first.
func TestMapKeysGivenTwice(t *testing.T) {
	for _, c := range []struct {
		key  Type
		json string
		want string
	}{
		{Type{Name: Varchar}, `{"a":1,"A":2}`, `{"a":1,"A":2}`},
		{Type{Name: Varchar}, `{"1":1,"1.0":2}`, `{"1":1,"1.0":2}`},
		{Type{Name: Varchar}, `{"a":1,"\u0061":2}`, ""},
		{Type{Name: Integer}, `{"1":1,"2":2}`, `{"1":1,"2":2}`},
		{Type{Name: Integer}, `{"1":1,"1.0":2}`, ""},
		{Type{Name: Integer}, `{"10":1,"1e1":2}`, ""},
		{Type{Name: Integer}, `{"0":1,"-0":2}`, ""},
		{Type{Name: Double}, `{"1":1,"1.0":2}`, ""},
		{Type{Name: Double}, `{"0":1,"-0":2}`, ""},
		{Type{Name: Double}, `{"0.1":1,"1e-1":2}`, ""},
		{Type{Name: Double}, `{"0.1":1,"0.10000000000000001":2}`, ""},
		{Type{Name: Real}, `{"0.1":1,"0.2":2}`, `{"0.1":1,"0.2":2}`},
		{Type{Name: Decimal, Precision: 6, Scale: 3, Known: true}, `{"1.5":1,"1.50":2}`, ""},
		{Type{Name: Decimal, Precision: 6, Scale: 3, Known: true}, `{"10":1,"1e1":2}`, ""},
		{Type{Name: Decimal, Precision: 6, Scale: 3, Known: true}, `{"10":1,"100":2}`, `{"10":1,"100":2}`},
		{Type{Name: Boolean}, `{"true":1,"false":2}`, `{"true":1,"false":2}`},
		{Type{Name: UUID}, `{"A0EEBC99-9c0b-4ef8-bb6d-6bb9bd380a11":1,"a0eebc999c0b4ef8bb6d6bb9bd380a11":2}`, ""},
		{Type{Name: Timestamp}, `{"2024-01-01 00:00:00":1,"2024-01-01T01:00:00+01:00":2}`, ""},
		{Type{Name: Timestamp}, `{"2024-01-01 00:00:00":1,"2024-01-01":2}`, ""},
		{Type{Name: TimestampTZ}, `{"2024-01-01 00:00:00Z":1,"2024-01-01 00:00:00.000Z":2}`, ""},
		{Type{Name: Time}, `{"01:02:00":1,"01:02":2}`, ""},
	} {
		typ := Type{Name: MapOf, Nullable: true, MapKey: &c.key, Element: ptr(typeOf(Integer))}
		got, err := encodeValue(t, typ, set(decode.JSON, c.json), Policy{})
		expect(t, c.json+" as "+typ.String(), got, err, c.want)
	}
	// Two keys that a policy makes one.
	key := Type{Name: Decimal, Precision: 6, Scale: 1, Known: true}
	typ := Type{Name: MapOf, Nullable: true, MapKey: &key, Element: ptr(typeOf(Integer))}
	got, err := encodeValue(t, typ, set(decode.JSON, `{"1.51":1,"1.52":2}`), Policy{Fraction: TruncateExcess})
	expect(t, "keys that are cut to one", got, err, "")
	// A key is never NULL, whatever becomes of such values.
	lenient := Policy{NonFinite: NullSpecial, OutOfRange: NullSpecial}
	for name, k := range map[string]Type{"NaN": typeOf(Double), "Infinity": decimal(6, 1), "infinity": typeOf(Timestamp)} {
		typ := Type{Name: MapOf, Nullable: true, MapKey: &k, Element: ptr(typeOf(Integer))}
		got, err := encodeValue(t, typ, set(decode.JSON, `{"`+name+`":1}`), lenient)
		expect(t, name+" as a key", got, err, "")
	}
	// The value of an entry goes by the policy.
	typ = Type{Name: MapOf, Nullable: true, MapKey: &Type{Name: Varchar}, Element: ptr(typeOf(Timestamp))}
	got, err = encodeValue(t, typ, set(decode.JSON, `{"a":"infinity"}`), lenient)
	expect(t, "infinity as a value", got, err, `{"a":null}`)
}

func TestFloats(t *testing.T) {
	const json, float4, float8, number = 0, 700, 701, 1700
	for _, c := range []struct {
		typ    TypeName
		source uint32
		text   string
		want   bool
	}{
		{Double, json, "1e-400", false},
		{Double, json, "-1e-400", false},
		{Double, json, "0." + strings.Repeat("0", 400) + "1", false},
		{Double, json, "0e-400", true},
		{Double, json, "0.0000000000000000000000", true},
		{Double, json, "5e-324", true},
		{Double, json, "2e-324", false},
		{Real, json, "1e-46", false},
		{Real, json, "1e-45", true},
		{Double, json, "1e308", true},
		{Double, json, "1e309", false},
		{Double, json, "1e99999999999999999999", false},
		{Double, json, "9007199254740992", true},
		{Double, json, "9007199254740993", false},
		{Double, json, "90071992547409930", false},
		{Double, json, "9007199254740993.0", false},
		{Double, json, "18446744073709551616", true}, // a power of two
		{Double, json, "18446744073709551615", false},
		{Double, number, "9007199254740993", false},
		{Double, 20, "9007199254740993", false},
		{Double, 20, "9007199254740992", true},
		{Real, 23, "16777217", false},
		{Real, 23, "16777216", true},
		{Real, json, "16777217", false},
		{Double, json, "0.1", true},
		{Double, json, "0.1000000000000000055511151231257827021181583404541015625", true}, // exactly the float
		{Double, json, "0.1000000000000000055511151231257827021181583404541015626", false},
		{Double, json, "0.10000000000000001", true},    // 17 digits, as older servers write them
		{Double, number, "0.10000000000000001", false}, // another number than 0.1
		{Double, json, "0.12345678901234567890", false},
		{Double, number, "12.34", true},
		{Double, number, "3.141592653589793", true},
		{Double, number, "3.14159265358979323846", false},
		{Real, float4, "3.1415927", true},
		{Real, float4, "0.1", true},
		{Double, float4, "0.1", true},
		{Real, float8, "0.1", true},
		{Real, float8, "3.141592653589793", false},
		{Real, json, "3.14159274", true}, // 9 digits
		{Double, float8, "1.7976931348623157e+308", true},
		{Double, json, "123456789012345678901234567890", false},
		{Double, json, "1" + strings.Repeat("0", 100_000), false},
		{Double, json, "1." + strings.Repeat("3", 100_000), false},
		{Double, json, "0.5" + strings.Repeat("0", 100_000), true},
	} {
		want := ""
		if c.want {
			want = c.text
		}
		got, err := encodeFrom(t, typeOf(c.typ), decode.Column{TypeOID: c.source}, num(c.text), Policy{})
		expect(t, fmt.Sprintf("%.60s of %d into %s", c.text, c.source, c.typ), got, err, want)
	}
	var how []Alteration
	lenient := Policy{Fraction: TruncateExcess, OnAltered: func(_, _ string, h Alteration) { how = append(how, h) }}
	got, err := encodeFrom(t, typeOf(Double), decode.Column{TypeOID: 20}, num("9007199254740993"), lenient)
	expect(t, "rounded by policy", got, err, "9007199254740993")
	if diff := cmp.Diff([]Alteration{AlteredRounded}, how); diff != "" {
		t.Error(diff)
	}
	got, err = encodeFrom(t, typeOf(Double), decode.Column{}, num("1e-400"), lenient)
	expect(t, "to zero by policy", got, err, "")
}

// Whatever a float source writes passes, and what passes from an exact source
// is what a reader of the column sees, or the float exactly.
func TestFloatsKeepTheNumber(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		bits := rapid.SampledFrom([]int{32, 64}).Draw(rt, "bits")
		typ, digits := typeOf(Double), 17
		f := rapid.Float64().Draw(rt, "float")
		if bits == 32 {
			typ, digits, f = typeOf(Real), 9, float64(rapid.Float32().Draw(rt, "float32"))
		}
		if math.IsNaN(f) || math.IsInf(f, 0) {
			return
		}
		for _, text := range []string{
			strconv.FormatFloat(f, 'e', -1, bits), strconv.FormatFloat(f, 'e', digits-1, bits), strconv.FormatFloat(f, 'f', -1, bits),
		} {
			if got, err := encodeValue(t, typ, num(text), Policy{}); err != nil || got != text {
				rt.Fatalf("%s of a float was refused: %v", text, err)
			}
		}
	})
	rapid.Check(t, func(rt *rapid.T) {
		text := rapid.StringMatching(`-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?`).Draw(rt, "number")
		bits := rapid.SampledFrom([]int{32, 64}).Draw(rt, "bits")
		typ := typeOf(Double)
		if bits == 32 {
			typ = typeOf(Real)
		}
		_, err := encodeFrom(t, typ, decode.Column{TypeOID: 1700}, num(text), Policy{})
		f, rangeErr := strconv.ParseFloat(text, bits)
		in, ok := new(big.Rat).SetString(text)
		if !ok {
			rt.Fatal(text)
		}
		held := false
		if rangeErr == nil && (f != 0 || in.Sign() == 0) {
			seen, _ := new(big.Rat).SetString(strconv.FormatFloat(f, 'e', -1, bits))
			held = seen.Cmp(in) == 0 || new(big.Rat).SetFloat64(f).Cmp(in) == 0
		}
		if held != (err == nil) {
			rt.Fatalf("%s into %d bits: %v, held %v", text, bits, err, held)
		}
	})
}

// An integer is taken in every form that is exactly an integer.
func TestIntegersKeepTheNumber(t *testing.T) {
	for _, c := range []struct {
		typ        TypeName
		text, want string
	}{
		{BigInt, "1e3", "1000"},
		{BigInt, "1E+3", "1000"},
		{BigInt, "-1.5e1", "-15"},
		{BigInt, "1.50e1", "15"},
		{BigInt, "15e-1", ""},
		{BigInt, "150e-1", "15"},
		{BigInt, "0e999999999999", "0"},
		{BigInt, "-0.000e-5", "0"},
		{BigInt, "1e18", "1000000000000000000"},
		{BigInt, "1e19", ""},
		{BigInt, "1e999999999999", ""},
		{BigInt, "1e-999999999999", ""},
		{BigInt, "92233720368547758070e-1", "9223372036854775807"},
		{BigInt, "92233720368547758080e-1", ""},
		{UBigInt, "184467440737095516150e-1", "18446744073709551615"},
		{UBigInt, "1.8446744073709551616e19", ""},
		{TinyInt, "1.27e2", "127"},
		{TinyInt, "1.28e2", ""},
		{BigInt, "1e", ""},
		{BigInt, "1e+", ""},
		{BigInt, "1.e3", ""},
		{BigInt, "01e3", ""},
		{BigInt, "99999999999999999999x", ""},
	} {
		got, err := encodeValue(t, typeOf(c.typ), num(c.text), Policy{})
		expect(t, c.text+" as "+string(c.typ), got, err, c.want)
	}
	rapid.Check(t, func(rt *rapid.T) {
		text := rapid.StringMatching(`-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,3})?([eE][+-]?[0-9]{1,2})?`).Draw(rt, "number")
		got, err := encodeValue(t, typeOf(BigInt), num(text), Policy{})
		in, ok := new(big.Rat).SetString(text)
		if !ok {
			rt.Fatal(text)
		}
		fits := in.IsInt() && in.Num().IsInt64()
		if fits != (err == nil) || fits && got != in.Num().String() {
			rt.Fatalf("%s became %s, %v", text, got, err)
		}
	})
}

// Numbers compare as numbers, however they are written.
func TestNumbersCompare(t *testing.T) {
	texts := rapid.StringMatching(`-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,4})?([eE][+-]?[0-9]{1,2})?`)
	equal := 0
	rapid.Check(t, func(rt *rapid.T) {
		a := texts.Draw(rt, "a")
		b := texts.Draw(rt, "b")
		if rapid.Bool().Draw(rt, "related") {
			b = a + "0"
			if e := strings.IndexAny(a, "eE"); e >= 0 {
				b = a[:e]
			} else if !strings.Contains(a, ".") {
				b = a + ".0e0"
			}
		}
		x, ok1 := new(big.Rat).SetString(a)
		y, ok2 := new(big.Rat).SetString(b)
		if !ok1 || !ok2 {
			rt.Fatal(a, b)
		}
		if got, want := shape([]byte(a)).same(shape([]byte(b))), x.Cmp(y) == 0; got != want {
			rt.Fatalf("%s and %s: %v, want %v", a, b, got, want)
		} else if got {
			equal++
		}
	})
	if equal == 0 {
		t.Error("no two were equal")
	}
}

// A VARIANT keeps numbers as decimals: what it would round, take for zero or
// read as something else is refused.
func TestVariantNumbers(t *testing.T) {
	digits := strings.Repeat("9", 38)
	for _, c := range []struct {
		v  decode.Value
		ok bool
	}{
		{num("1e400"), false},
		{num(digits), true},
		{num(digits + "9"), false},
		{num(digits + "000"), false},
		{num("-" + digits), true},
		{num("0." + digits), true},
		{num("0." + digits + "1"), false},
		{num("1e37"), true},
		{num("1e38"), false},
		{num("1e-255"), true},
		{num("1e-256"), false},
		{num("0e999"), true},
		{num("1.50000000000000000000000000000000000000000000000"), true},
		{num("NaN"), false},
		{set(decode.JSON, `{"a":[1,{"b":1e400}]}`), false},
		{set(decode.JSON, `{"a":[1,{"b":-1.5e3}]}`), true},
		{set(decode.JSON, `1e400`), false},
		{set(decode.JSON, `{"a":"1e400","1e400":1}`), true},
		{set(decode.JSON, `{"a":"\"1e400"}`), true},
		{set(decode.JSON, `[`+digits+`9]`), false},
		{set(decode.JSON, `{"$serde_json::private::Number":"5"}`), false},
	} {
		want := ""
		if c.ok {
			want = string(c.v.Bytes)
		}
		got, err := encodeValue(t, typeOf(Variant), c.v, Policy{})
		expect(t, string(c.v.Bytes), got, err, want)
	}
	got, err := encodeValue(t, arrayOf(typeOf(Variant)), set(decode.JSON, `[1,{"a":1e400}]`), Policy{})
	expect(t, "in an ARRAY", got, err, "")
}

// A date that is out of range is one only when the rest of it is a date: else
// the policy for such dates would hide what is not one.
func TestDatesOutOfRange(t *testing.T) {
	lenient := Policy{OutOfRange: NullSpecial}
	for _, c := range []struct {
		typ        TypeName
		text, want string
	}{
		{Date, "10000-01-01", "null"},
		{Date, "10000-01-01junk", ""},
		{Date, "10000-01-01 00:00:00", ""},
		{Date, "0044-03-15 BC", "null"},
		{Date, "0044-03-15junk BC", ""},
		{Date, "-0044-03-15", "null"},
		{Date, "0000-02-29", "null"},
		{Date, "0001-02-29 BC", "null"}, // the year 0
		{Date, "0005-02-29 BC", "null"},
		{Date, "0004-02-29 BC", ""},
		{Date, "-0004-02-29", "null"},
		{Date, "infinity ", ""},
		{Timestamp, "10000-01-01", "null"},
		{Timestamp, "10000-01-01junk", ""},
		{Timestamp, "10000-01-01 junk", ""},
		{Timestamp, "10000-01-01 00:00:00", "null"},
		{Timestamp, "10000-01-01 00:00:00junk", ""},
		{Timestamp, "10000-01-01 25:00:00", ""},
		{Timestamp, "294276-12-31 23:59:59.999999", "null"},
		{Timestamp, "4713-01-01 00:00:00 BC", "null"},
		{Timestamp, "4713-01-01 00:00:00junk BC", ""},
		{Timestamp, "2024-01-01 24:00:00junk", ""},
		{TimestampTZ, "10000-01-01 00:00:00+00", "null"},
		{TimestampTZ, "10000-01-01 00:00:00", ""},
		{TimestampTZ, "10000-01-01", ""},
		{TimestampTZ, "infinity", "null"},
		{Time, "24:00:00", "null"},
		{Time, "24:00:00junk", ""},
		{Time, "24:00:01", ""},
	} {
		got, err := encodeValue(t, typeOf(c.typ), txt(c.text), lenient)
		expect(t, c.text+" as "+string(c.typ), got, err, c.want)
	}
}
