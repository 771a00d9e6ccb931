package feldera

import (
	"errors"
	"fmt"
	"math/big"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"holdfast/internal/decode"
)

func set(kind decode.Kind, s string) decode.Value {
	return decode.Value{State: decode.Set, Kind: kind, Bytes: []byte(s)}
}

var (
	null      = decode.Value{State: decode.Null}
	unchanged = decode.Value{State: decode.Unchanged}
	absent    = decode.Value{}
)

func num(s string) decode.Value { return set(decode.Number, s) }
func txt(s string) decode.Value { return set(decode.Text, s) }

// typeOf gives a nullable type by its SQL name.
func typeOf(name TypeName) Type { return Type{Name: name, Nullable: true} }

func decimal(p, s int) Type {
	return Type{Name: Decimal, Nullable: true, Precision: p, Scale: s, Known: true}
}

func ptr(t Type) *Type { return &t }

// encodeValue writes one value of a column "v" of the given type.
func encodeValue(t *testing.T, typ Type, v decode.Value, p Policy) (string, error) {
	t.Helper()
	table := &Table{Name: "t", spelling: "t", Columns: []Column{{Name: "v", Type: typ}}}
	e, err := NewEncoder(table, table.Relation(), p)
	if err != nil {
		t.Fatal(err)
	}
	var a Array
	if err := a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: e.rel, After: []decode.Value{v}}); err != nil {
		return "", err
	}
	body := string(a.Body())
	body = strings.TrimPrefix(body, `[{"insert":{"v":`)
	return strings.TrimSuffix(body, `}}]`), nil
}

func TestValues(t *testing.T) {
	str := func(s string) string { b, _ := json.Marshal(s); return string(b) }
	ts, tz := typeOf(Timestamp), typeOf(TimestampTZ)
	ints := Type{Name: ArrayOf, Nullable: true, Element: ptr(typeOf(Integer))}
	texts := Type{Name: ArrayOf, Nullable: true, Element: ptr(typeOf(Varchar))}
	grid := Type{Name: ArrayOf, Nullable: true, Element: &ints}
	strict := Type{Name: ArrayOf, Nullable: true, Element: &Type{Name: Integer}}
	prices := Type{Name: MapOf, Nullable: true, MapKey: &Type{Name: Varchar}, Element: ptr(decimal(5, 2))}
	byID := Type{Name: MapOf, Nullable: true, MapKey: &Type{Name: Integer}, Element: ptr(typeOf(Boolean))}
	row := Type{Name: Struct, Nullable: true, Fields: []Column{
		{Name: "a", Type: Type{Name: Integer}}, {Name: "b", Type: typeOf(Timestamp)}, {Name: "C", Quoted: true, Type: typeOf(Varchar)},
	}}
	for _, c := range []struct {
		typ  Type
		v    decode.Value
		want string // "" = refused
	}{
		{typeOf(Boolean), set(decode.Bool, "true"), "true"},
		{typeOf(Boolean), set(decode.Bool, "t"), ""},
		{typeOf(Boolean), txt("true"), ""},
		{typeOf(Boolean), null, "null"},
		{Type{Name: Boolean}, null, ""},
		{Type{Name: Boolean}, absent, ""},
		{typeOf(Boolean), absent, "null"},
		{typeOf(Boolean), unchanged, ""},

		{typeOf(TinyInt), num("127"), "127"},
		{typeOf(TinyInt), num("-128"), "-128"},
		{typeOf(TinyInt), num("128"), ""},
		{typeOf(TinyInt), num("-129"), ""},
		{typeOf(SmallInt), num("32768"), ""},
		{typeOf(Integer), num("2147483647"), "2147483647"},
		{typeOf(Integer), num("2147483648"), ""},
		{typeOf(BigInt), num("9223372036854775807"), "9223372036854775807"},
		{typeOf(BigInt), num("-9223372036854775808"), "-9223372036854775808"},
		{typeOf(BigInt), num("9223372036854775808"), ""},
		{typeOf(BigInt), num("99999999999999999999999"), ""},
		{typeOf(UBigInt), num("18446744073709551615"), "18446744073709551615"},
		{typeOf(UBigInt), num("18446744073709551616"), ""},
		{typeOf(UTinyInt), num("-1"), ""},
		{typeOf(UTinyInt), num("-0"), "0"},
		{typeOf(BigInt), num("10.00"), "10"},
		{typeOf(BigInt), num("10.5"), ""},
		{typeOf(BigInt), num("1e3"), "1000"},
		{typeOf(BigInt), num("007"), ""},
		{typeOf(BigInt), num(""), ""},
		{typeOf(BigInt), num("-"), ""},
		{typeOf(BigInt), num("NaN"), ""},
		{typeOf(BigInt), txt("7"), ""},

		{typeOf(Double), num("1e-45"), "1e-45"},
		{typeOf(Double), num("1.2345678901234568e+17"), "1.2345678901234568e+17"},
		{typeOf(Double), num("-0"), "-0"},
		{typeOf(Double), num("1e999"), ""},
		{typeOf(Real), num("1e39"), ""},
		{typeOf(Double), num("1e39"), "1e39"},
		{typeOf(Double), num("NaN"), ""},
		{typeOf(Double), num(".5"), ""},
		{typeOf(Double), num("5."), ""},
		{typeOf(Double), num("0x1p4"), ""},

		{decimal(12, 2), num("12.5"), `"12.5"`},
		{decimal(12, 2), num("12345.6000"), `"12345.60"`},
		{decimal(12, 2), num("12.345"), ""},
		{decimal(12, 2), num("9999999999.99"), `"9999999999.99"`},
		{decimal(12, 2), num("10000000000"), ""},
		{decimal(12, 2), num("-0.00"), `"0.00"`},
		{decimal(12, 2), num("-7"), `"-7"`},
		{decimal(12, 2), txt("7.10"), `"7.10"`},
		{decimal(12, 2), txt("$7.10"), ""},
		{decimal(12, 2), num("1.25e1"), `"12.5"`},
		{decimal(12, 2), num("125e-2"), `"1.25"`},
		{decimal(12, 2), num("5e-3"), ""},
		{decimal(12, 2), num("1e12"), ""},
		{decimal(12, 2), num("1e99999999999"), ""},
		{decimal(12, 2), num("0e5"), `"0"`},
		{decimal(2, 2), num("0.25"), `"0.25"`},
		{decimal(2, 2), num("1.25"), ""},
		{decimal(12, 2), num("NaN"), ""},
		{decimal(12, 2), num("Infinity"), ""},

		{typeOf(Varchar), txt("a\"b\\c\nd\te\x01ü😀"), `"a\"b\\c\nd\te\u0001ü😀"`},
		{typeOf(Varchar), txt("a\x00b"), `"a\u0000b"`},
		{typeOf(Varchar), txt("\xff"), ""},
		{typeOf(Varchar), txt("a\xed\xa0\x80"), ""},
		{typeOf(Varchar), num("1.50"), `"1.50"`},
		{typeOf(Varchar), set(decode.Bool, "false"), `"false"`},
		{typeOf(Varchar), set(decode.JSON, `{"a": 1}`), str(`{"a": 1}`)},
		{typeOf(Varchar), set(decode.Hex, "00"), ""},
		{typeOf(Char), txt("ab   "), `"ab   "`},

		{typeOf(Varbinary), set(decode.Hex, "DEad00"), "[222,173,0]"},
		{typeOf(Varbinary), set(decode.Hex, ""), "[]"},
		{typeOf(Varbinary), set(decode.Hex, "0"), ""},
		{typeOf(Varbinary), set(decode.Hex, "0g"), ""},
		{typeOf(Varbinary), set(decode.JSON, "[1, 255]"), "[1,255]"},
		{typeOf(Varbinary), set(decode.JSON, "[1,256]"), ""},
		{typeOf(Varbinary), set(decode.JSON, "[1,2] 3"), ""},
		{typeOf(Varbinary), txt("abc"), ""},

		{typeOf(Date), txt("2024-02-29"), `"2024-02-29"`},
		{typeOf(Date), txt("2023-02-29"), ""},
		{typeOf(Date), txt("0001-01-01"), `"0001-01-01"`},
		{typeOf(Date), txt("0000-01-01"), ""},
		{typeOf(Date), txt("10000-01-01"), ""},
		{typeOf(Date), txt("0044-03-15 BC"), ""},
		{typeOf(Date), txt("infinity"), ""},
		{typeOf(Date), txt("2024-01-01 00:00:00"), ""},
		{typeOf(Date), txt("24-01-01"), ""},

		{typeOf(Time), txt("23:59:59.999999"), `"23:59:59.999999"`},
		{typeOf(Time), txt("04:05:06.700"), `"04:05:06.7"`},
		{typeOf(Time), txt("04:05:06.123456789"), `"04:05:06.123456789"`},
		{typeOf(Time), txt("04:05"), `"04:05:00"`},
		{typeOf(Time), txt("24:00:00"), ""},
		{typeOf(Time), txt("23:59:60"), ""},
		{typeOf(Time), txt("04:05:06+02"), ""},
		{typeOf(Time), txt("infinity"), ""},

		{ts, txt("2024-01-01 00:00:00.1"), `"2024-01-01 00:00:00.1"`},
		{ts, txt("2024-01-01T00:00:00"), `"2024-01-01 00:00:00"`},
		{ts, txt("2024-01-01"), `"2024-01-01 00:00:00"`},
		{ts, txt("2024-01-01T01:30:00+05:30"), `"2023-12-31 20:00:00"`},
		{ts, txt("2024-01-01 00:00:00Z"), `"2024-01-01 00:00:00"`},
		{ts, txt("1880-01-01 00:00:00+00:19:32"), `"1879-12-31 23:40:28"`},
		{ts, txt("2024-01-01 00:00:00.123456000"), `"2024-01-01 00:00:00.123456"`},
		{ts, txt("2024-01-01 00:00:00.1234567"), ""},
		{ts, txt("-infinity"), ""},
		{ts, txt("294276-12-31 23:59:59.999999"), ""},
		{ts, txt("4713-01-01 00:00:00 BC"), ""},
		{ts, txt("0001-01-01 00:00:00+01"), ""},
		{ts, txt("9999-12-31 23:59:59-01"), ""},
		{ts, txt("2024-01-01 24:00:00"), ""},
		{ts, txt("2024-01-01 00:00:00 "), ""},
		{ts, num("1700000000"), ""},
		{tz, txt("2023-12-31 22:00:00.5+00"), `"2023-12-31T22:00:00.5Z"`},
		{tz, txt("2023-12-31 22:00:00-0330"), `"2024-01-01T01:30:00Z"`},
		{tz, txt("2023-12-31T22:00:00Z"), `"2023-12-31T22:00:00Z"`},
		{tz, txt("2023-12-31 22:00:00"), ""},
		{tz, txt("2023-12-31"), ""},

		{typeOf(UUID), txt("A0EEBC99-9c0b-4ef8-bb6d-6bb9bd380a11"), `"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"`},
		{typeOf(UUID), txt("a0eebc999c0b4ef8bb6d6bb9bd380a11"), `"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"`},
		{typeOf(UUID), txt("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a1"), ""},
		{typeOf(UUID), txt("g0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"), ""},

		{typeOf(Variant), set(decode.JSON, ` {"a":[1, 2.50,"x"]} `), `{"a":[1, 2.50,"x"]}`},
		{typeOf(Variant), set(decode.JSON, `{"a":1,"a":2}`), ""},
		{typeOf(Variant), set(decode.JSON, `"\ud83d"`), ""},
		{typeOf(Variant), set(decode.JSON, `{"a":1} 2`), ""},
		{typeOf(Variant), set(decode.JSON, strings.Repeat("[", 101)+strings.Repeat("]", 101)), ""},
		{typeOf(Variant), set(decode.JSON, `null`), "null"},
		{Type{Name: Variant}, set(decode.JSON, `null`), ""},
		{typeOf(Variant), txt("x"), `"x"`},
		{typeOf(Variant), num("1.5"), "1.5"},
		{typeOf(Variant), set(decode.Bool, "true"), "true"},
		{typeOf(Variant), set(decode.Hex, "dead"), `"dead"`},

		{ints, set(decode.JSON, `[1, null, -3]`), `[1,null,-3]`},
		{ints, set(decode.JSON, `[]`), `[]`},
		{ints, set(decode.JSON, `null`), `null`},
		{ints, set(decode.JSON, `[1, "2"]`), ""},
		{ints, set(decode.JSON, `[1, [2]]`), ""},
		{ints, set(decode.JSON, `[1`), ""},
		{ints, set(decode.JSON, `[1] 2`), ""},
		{ints, set(decode.JSON, `{"a":1}`), ""},
		{ints, txt("{1,NULL,-3}"), "[1,null,-3]"},
		{ints, txt("{}"), "[]"},
		{ints, txt("{1"), ""},
		{ints, txt("{1,}"), ""},
		{ints, txt("{,1}"), ""},
		{ints, txt("{1}2"), ""},
		{ints, txt("{{1},{2}}"), ""},
		{ints, txt("[0:1]={7,8}"), ""},
		{ints, txt(`{"NULL"}`), ""},
		{ints, txt(""), ""},
		{grid, txt("{{1,2},{NULL,4}}"), "[[1,2],[null,4]]"},
		{grid, txt("{}"), "[]"},
		{grid, txt("{1,2}"), ""},
		{texts, txt(`{"a,b","c\"d","e\\f","NULL",NULL," sp ","",x}`), `["a,b","c\"d","e\\f","NULL",null," sp ","","x"]`},
		{texts, txt(`{"a}`), ""},
		{texts, txt(`{"a\`), ""},
		{Type{Name: ArrayOf, Nullable: true, Element: ptr(typeOf(Boolean))}, txt("{t,f}"), "[true,false]"},
		{Type{Name: ArrayOf, Nullable: true, Element: ptr(typeOf(Varbinary))}, txt(`{"\\x00ff"}`), "[[0,255]]"},
		{Type{Name: ArrayOf, Nullable: true, Element: ptr(decimal(4, 2))}, txt("{1.50,NaN}"), ""},
		{Type{Name: ArrayOf, Nullable: true, Element: ptr(typeOf(Timestamp))}, txt(`{"2024-01-01 00:00:00"}`), `["2024-01-01 00:00:00"]`},
		{strict, set(decode.JSON, `[1, null]`), ""},
		{prices, set(decode.JSON, `{"x": 1.5, "y\n": "2.25"}`), `{"x":"1.5","y\n":"2.25"}`},
		{prices, set(decode.JSON, `{"x": 1.555}`), ""},
		{byID, set(decode.JSON, `{"7": true}`), `{"7":true}`},
		{byID, set(decode.JSON, `{"seven": true}`), ""},
		{row, set(decode.JSON, `{"A": 1, "b": "2024-01-01T00:00:00Z", "C": "x"}`), `{"a":1,"b":"2024-01-01 00:00:00","C":"x"}`},
		{row, set(decode.JSON, `{"a": 1}`), `{"a":1}`},
		{row, set(decode.JSON, `{"b": null}`), ""},
		{row, set(decode.JSON, `{"a": 1, "A": 2}`), ""},
		{row, set(decode.JSON, `{"a": 1, "c": "x"}`), ""},
		{row, set(decode.JSON, `{"a": 1, "d": "x"}`), ""},
	} {
		name := fmt.Sprintf("%s/%d/%.40q", c.typ.String(), c.v.State, c.v.Bytes)
		got, err := encodeValue(t, c.typ, c.v, Policy{})
		var refused *decode.Refusal
		switch {
		case c.want != "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.want == "" && err == nil:
			t.Errorf("%s: written as %s, expected a refusal", name, got)
		case c.want == "" && !errors.As(err, &refused):
			t.Errorf("%s: %T, expected a *decode.Refusal", name, err)
		case got != c.want:
			t.Errorf("%s: got %s, want %s", name, got, c.want)
		}
	}
}

func TestPolicies(t *testing.T) {
	lenient := Policy{Fraction: TruncateExcess, NonFinite: NullSpecial, OutOfRange: NullSpecial}
	for _, c := range []struct {
		typ  Type
		v    decode.Value
		want string
		how  Alteration
	}{
		{decimal(4, 2), num("1.239"), `"1.23"`, AlteredTruncated},
		{decimal(4, 2), num("-0.009"), `"0.00"`, AlteredTruncated},
		{decimal(4, 2), num("1.230"), `"1.23"`, ""},
		{decimal(4, 2), num("NaN"), "null", AlteredNonFinite},
		{typeOf(Double), num("-Infinity"), "null", AlteredNonFinite},
		{Type{Name: Double}, num("NaN"), "", ""},
		{typeOf(Date), txt("infinity"), "null", AlteredOutOfRange},
		{typeOf(Time), txt("24:00:00"), "null", AlteredOutOfRange},
		{typeOf(Timestamp), txt("0001-01-01 00:00:00+01"), "null", AlteredOutOfRange},
		{typeOf(Timestamp), txt("2024-01-01 00:00:00.1234567"), `"2024-01-01 00:00:00.123456"`, AlteredTruncated},
		{typeOf(Timestamp), txt("gibberish"), "", ""},
		{typeOf(Integer), num("3000000000"), "", ""},
		{decimal(4, 2), num("123.4"), "", ""},
		{typeOf(Variant), set(decode.JSON, "null"), "null", AlteredJSONNull},
	} {
		var how []Alteration
		p := lenient
		p.OnAltered = func(table, column string, h Alteration) {
			if table != "t" || column != "v" {
				t.Errorf("altered %s.%s", table, column)
			}
			how = append(how, h)
		}
		got, err := encodeValue(t, c.typ, c.v, p)
		if (err != nil) != (c.want == "") || got != c.want {
			t.Errorf("%s %q: got %s, %v, want %s", c.typ.String(), c.v.Bytes, got, err, c.want)
		}
		var want []Alteration
		if c.how != "" {
			want = []Alteration{c.how}
		}
		if diff := cmp.Diff(want, how); diff != "" {
			t.Errorf("%s %q: %s", c.typ.String(), c.v.Bytes, diff)
		}
	}
}

// A DECIMAL that is written must be the number that came in.
func TestDecimalKeepsTheNumber(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := rapid.StringMatching(`-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,8})?([eE][+-]?[0-9]{1,2})?`).Draw(rt, "number")
		p := rapid.IntRange(1, 20).Draw(rt, "precision")
		scale := rapid.IntRange(0, p).Draw(rt, "scale")
		got, err := encodeValue(t, decimal(p, scale), num(s), Policy{})
		in, ok := new(big.Rat).SetString(s)
		if !ok {
			rt.Fatal(s)
		}
		unit := new(big.Rat).SetFrac(big.NewInt(1), new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(scale)), nil))
		limit := new(big.Rat).SetInt(new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(p-scale)), nil))
		fits := new(big.Rat).Quo(in, unit).IsInt() && new(big.Rat).Abs(in).Cmp(limit) < 0
		if fits != (err == nil) {
			rt.Fatalf("%s as DECIMAL(%d,%d): %v, want accepted %v", s, p, scale, err, fits)
		}
		if err != nil {
			return
		}
		out, ok := new(big.Rat).SetString(strings.Trim(got, `"`))
		if !ok || out.Cmp(in) != 0 {
			rt.Fatalf("%s became %s", s, got)
		}
	})
}

// A timestamp with an offset must be the instant that package time reads.
func TestTimestampKeepsTheInstant(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		sec := rapid.Int64Range(-62135596800, 253402300799).Draw(rt, "unix")
		micro := rapid.Int64Range(0, 999999).Draw(rt, "micro")
		offset := rapid.IntRange(-14*60, 14*60).Draw(rt, "offset") * 60
		in := time.Unix(sec, micro*1000).In(time.FixedZone("", offset))
		if in.Year() < 1 || in.Year() > 9999 {
			return // written with another number of digits
		}
		got, err := encodeValue(t, typeOf(TimestampTZ), txt(in.Format("2006-01-02 15:04:05.999999-07:00")), Policy{})
		if err != nil {
			rt.Fatal(err)
		}
		plain, err := strconv.Unquote(got)
		if err != nil {
			rt.Fatal(err)
		}
		out, err := time.Parse(time.RFC3339Nano, plain)
		if err != nil || !out.Equal(in) {
			rt.Fatalf("%s became %s (%v)", in, got, err)
		}
	})
}

// ordersTable has a primary key, a nullable and a NOT NULL column.
func ordersTable(keyed bool) *Table {
	t := &Table{Name: "orders", spelling: "orders", Columns: []Column{
		{Name: "id", Type: Type{Name: BigInt}, Key: keyed},
		{Name: "note", Type: typeOf(Varchar)},
		{Name: "qty", Type: Type{Name: Integer}},
	}}
	if keyed {
		t.key = []int{0}
	}
	return t
}

func pgRelation(identity decode.Identity) *decode.Relation {
	full := identity == decode.IdentityFull
	return &decode.Relation{ID: 77, Schema: "public", Name: "orders", Identity: identity, Columns: []decode.Column{
		{Name: "id", Key: true, TypeOID: 20}, {Name: "note", Key: full, TypeOID: 25}, {Name: "qty", Key: full, TypeOID: 23},
	}}
}

func TestOperations(t *testing.T) {
	row := func(id, note, qty decode.Value) []decode.Value { return []decode.Value{id, note, qty} }
	one := row(num("1"), txt("x"), num("5"))
	keyOnly := row(num("1"), absent, absent)
	for _, c := range []struct {
		name     string
		keyed    bool
		identity decode.Identity
		op       decode.Op
		before   []decode.Value
		after    []decode.Value
		want     string // the array, or with "refused " the reason and a part of the message
	}{
		{"insert", true, 'd', decode.Insert, nil, one, `[{"insert":{"id":1,"note":"x","qty":5}}]`},
		{"insert without row", true, 'd', decode.Insert, nil, nil, "refused malformed no new row"},
		{"null in NOT NULL", true, 'd', decode.Insert, nil, row(num("1"), null, null), `refused value column "qty"`},
		{"short row", true, 'd', decode.Insert, nil, one[:2], "refused malformed 2 columns"},
		{"delete by key", true, 'd', decode.Delete, keyOnly, nil, `[{"delete":{"id":1}}]`},
		{"delete without key", true, 'd', decode.Delete, row(absent, absent, absent), nil, "refused identity REPLICA IDENTITY FULL"},
		{"delete without old row", true, 'd', decode.Delete, nil, nil, "refused identity old key"},
		{"delete without table key", false, 'f', decode.Delete, one, nil, `[{"delete":{"id":1,"note":"x","qty":5}}]`},
		{"delete without table key and with half a row", false, 'f', decode.Delete, keyOnly, nil, "refused identity ALTER TABLE public.orders REPLICA IDENTITY FULL"},
		{"delete without table key and identity", false, 'd', decode.Delete, one, nil, "refused identity"},
		{"update", true, 'd', decode.Update, nil, one, `[{"insert":{"id":1,"note":"x","qty":5}}]`},
		{
			"update moves the key", true, 'd', decode.Update, keyOnly, row(num("2"), txt("x"), num("5")),
			`[{"delete":{"id":1}},{"insert":{"id":2,"note":"x","qty":5}}]`,
		},
		{
			"update with another spelling of the key", true, 'd', decode.Update, row(num("1.0"), absent, absent), one,
			`[{"insert":{"id":1,"note":"x","qty":5}}]`,
		},
		{
			"update with TOAST", true, 'd', decode.Update, nil, row(num("1"), unchanged, num("6")),
			`[{"update":{"id":1,"qty":6}}]`,
		},
		{
			"update with TOAST and null", true, 'd', decode.Update, nil, row(num("1"), null, unchanged),
			`[{"update":{"id":1,"note":null}}]`,
		},
		{
			"update with TOAST and the old row", true, 'f', decode.Update, row(num("1"), txt("long"), num("5")), row(num("1"), unchanged, num("6")),
			`[{"insert":{"id":1,"note":"long","qty":6}}]`,
		},
		{
			"update with TOAST of an old row that is not whole", true, 'f', decode.Update, row(num("1"), null, num("5")), row(num("1"), unchanged, num("6")),
			`[{"update":{"id":1,"qty":6}}]`,
		},
		{
			"a null that a key tuple fills up with is not believed", true, 'd', decode.Update, row(num("1"), null, null), row(num("1"), unchanged, num("6")),
			`[{"update":{"id":1,"qty":6}}]`,
		},
		{
			"update moves the key with TOAST", true, 'd', decode.Update, keyOnly, row(num("2"), unchanged, num("5")),
			`refused identity column "note"`,
		},
		{
			"update moves the key with TOAST and the old row", true, 'f', decode.Update, row(num("1"), txt("long"), num("5")), row(num("2"), unchanged, num("5")),
			`[{"delete":{"id":1}},{"insert":{"id":2,"note":"long","qty":5}}]`,
		},
		{"update with unknown key", true, 'd', decode.Update, nil, row(unchanged, txt("x"), num("5")), `refused identity column "id"`},
		{
			"update with a TOASTed key", true, 'd', decode.Update, keyOnly, row(unchanged, txt("x"), num("5")),
			`[{"insert":{"id":1,"note":"x","qty":5}}]`,
		},
		{
			"update without table key", false, 'f', decode.Update, one, row(num("1"), unchanged, num("6")),
			`[{"delete":{"id":1,"note":"x","qty":5}},{"insert":{"id":1,"note":"x","qty":6}}]`,
		},
		{"update without table key and old row", false, 'd', decode.Update, nil, one, "refused identity whole old row"},
		{"truncate", true, 'd', decode.Truncate, nil, nil, "refused unsupported"},
		{"no operation", true, 'd', 0, nil, one, "refused malformed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e, err := NewEncoder(ordersTable(c.keyed), pgRelation(c.identity), Policy{})
			if err != nil {
				t.Fatal(err)
			}
			var a Array
			ch := &decode.OrderChange{Op: c.op, Relation: e.rel, Before: c.before, After: c.after, Position: decode.Position{LSN: 0x10}}
			err = a.Add(e, ch)
			if want, isRefusal := strings.CutPrefix(c.want, "refused "); isRefusal {
				reason, part, _ := strings.Cut(want, " ")
				var refused *decode.Refusal
				if !errors.As(err, &refused) {
					t.Fatalf("got %v and %s, want a refusal", err, a.Body())
				}
				if string(refused.Reason) != reason || !strings.Contains(refused.Error(), part) || !strings.Contains(refused.Error(), "LSN 0/10") {
					t.Errorf("got %s: %v", refused.Reason, refused)
				}
				if a.Rows() != 0 || a.Records() != 0 || string(a.Body()) != "[]" {
					t.Errorf("the array kept %s", a.Body())
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, string(a.Body())); diff != "" {
				t.Error(diff)
			}
			if a.Bytes() != len(a.Body()) || a.Rows() != 1 {
				t.Errorf("Bytes %d for %d, Rows %d", a.Bytes(), len(a.Body()), a.Rows())
			}
		})
	}
}

func TestNewEncoderRefuses(t *testing.T) {
	column := func(name string, oid uint32) decode.Column { return decode.Column{Name: name, TypeOID: oid} }
	relation := func(cols ...decode.Column) *decode.Relation {
		return &decode.Relation{ID: 1, Schema: "public", Name: "orders", Identity: decode.IdentityDefault, Columns: cols}
	}
	key := func(c decode.Column) decode.Column { c.Key = true; return c }
	id, note, qty := key(column("id", 20)), column("note", 25), column("qty", 23)
	for _, c := range []struct {
		name  string
		table *Table
		rel   *decode.Relation
		want  []string
	}{
		{"extra column", ordersTable(true), relation(id, note, qty, column("Total", 1700)), []string{`"Total"`, "DECIMAL(38, 10)"}},
		{"missing NOT NULL column", ordersTable(true), relation(id, note), []string{`"qty"`, "NOT NULL"}},
		{"missing key column", ordersTable(true), relation(note, qty), []string{`"id"`, "primary key"}},
		{"another key", ordersTable(true), relation(column("id", 20), key(note), qty), []string{`("note")`, `("id")`}},
		{"a wider key", ordersTable(true), relation(id, key(note), qty), []string{`("id", "note")`}},
		{"names that fold to one", ordersTable(true), relation(id, note, qty, column("ID", 20)), []string{`"ID"`, `"id"`}},
		{"a type that cannot fit", ordersTable(true), relation(key(column("id", 25)), note, qty), []string{"OID 25", "BIGINT"}},
		{"nothing in common", &Table{Name: "orders", spelling: "orders", Columns: []Column{{Name: "z", Type: typeOf(Varchar)}}}, relation(), []string{"in common"}},
		{
			"an interval", &Table{Name: "orders", spelling: "orders", Columns: []Column{{Name: "id", Type: Type{Name: "INTERVAL_DAY"}}}},
			relation(id),
			[]string{"INTERVAL_DAY"},
		},
		{
			"a DECIMAL without digits", &Table{Name: "orders", spelling: "orders", Columns: []Column{{Name: "id", Type: Type{Name: Decimal}}}},
			relation(id),
			[]string{"precision"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := NewEncoder(c.table, c.rel, Policy{})
			var refused *decode.Refusal
			if !errors.As(err, &refused) || refused.Reason != decode.ReasonSchema {
				t.Fatalf("got %v", err)
			}
			for _, part := range c.want {
				if !strings.Contains(refused.Error(), part) {
					t.Errorf("%q is not in: %v", part, refused)
				}
			}
		})
	}
	e, err := NewEncoder(ordersTable(true), relation(id, note, qty, column("total", 1700)), Policy{IgnoreExtraColumns: true})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"total"}, e.Ignored()); diff != "" {
		t.Error(diff)
	}
	// Under FULL every column is marked as key: the table's own is right.
	if _, err := NewEncoder(ordersTable(true), pgRelation(decode.IdentityFull), Policy{}); err != nil {
		t.Error(err)
	}
}

func TestArrayIsAllOrNothingPerChange(t *testing.T) {
	e, err := NewEncoder(ordersTable(true), pgRelation(decode.IdentityDefault), Policy{})
	if err != nil {
		t.Fatal(err)
	}
	var a Array
	add := func(id, qty string) error {
		return a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: e.rel, After: []decode.Value{num(id), null, num(qty)}})
	}
	if err := add("1", "1"); err != nil {
		t.Fatal(err)
	}
	if err := add("2", "x"); err == nil {
		t.Fatal("a bad row was taken")
	}
	if err := add("3", "3"); err != nil {
		t.Fatal(err)
	}
	want := `[{"insert":{"id":1,"note":null,"qty":1}},{"insert":{"id":3,"note":null,"qty":3}}]`
	if got := string(a.Body()); got != want {
		t.Error(got)
	}
	if got := string(a.slice(1, 2)); got != `[{"insert":{"id":3,"note":null,"qty":3}}]` {
		t.Error(got)
	}
	if got := string(a.slice(0, 1)); got != `[{"insert":{"id":1,"note":null,"qty":1}}]` {
		t.Error(got)
	}
	other, err := NewEncoder(ordersTable(true), pgRelation(decode.IdentityDefault), Policy{})
	if err != nil {
		t.Fatal(err)
	}
	ch := &decode.OrderChange{Op: decode.Insert, Relation: other.rel, After: []decode.Value{num("1"), null, num("1")}}
	if err := a.Add(e, ch); err == nil {
		t.Error("a change of another relation version was taken")
	}
	if err := a.Add(other, ch); err == nil {
		t.Error("a row of another table was taken")
	}
	a.Reset()
	if err := a.Add(other, ch); err != nil || a.Rows() != 1 {
		t.Error(err)
	}
}

// Whatever the values are, an array is either unchanged or valid JSON.
func FuzzArrayStaysJSON(f *testing.F) {
	f.Add(byte(0), byte(4), []byte(`{"a":[1]}`))
	f.Add(byte(6), byte(2), []byte("1.5e3"))
	f.Add(byte(11), byte(0), []byte("2024-01-01 00:00:00+00"))
	types := []Type{
		typeOf(Boolean), typeOf(BigInt), typeOf(UTinyInt), typeOf(Real), typeOf(Double), decimal(10, 3), typeOf(Varchar),
		typeOf(Varbinary), typeOf(Date), typeOf(Time), typeOf(Timestamp), typeOf(TimestampTZ), typeOf(UUID), typeOf(Variant),
		{Name: ArrayOf, Nullable: true, Element: ptr(typeOf(Variant))},
		{Name: MapOf, Nullable: true, MapKey: &Type{Name: Timestamp}, Element: ptr(typeOf(Varbinary))},
		{Name: Struct, Nullable: true, Fields: []Column{{Name: "a", Type: typeOf(Double)}, {Name: "b", Type: Type{Name: ArrayOf, Nullable: true, Element: ptr(decimal(4, 1))}}}},
	}
	f.Fuzz(func(t *testing.T, which, kind byte, raw []byte) {
		typ := types[int(which)%len(types)]
		v := decode.Value{State: decode.Set, Kind: decode.Kind(kind % 6), Bytes: raw}
		for _, p := range []Policy{{}, {Fraction: TruncateExcess, NonFinite: NullSpecial, OutOfRange: NullSpecial}} {
			got, err := encodeValue(t, typ, v, p)
			if err != nil {
				continue
			}
			if err := validJSON([]byte(got)); err != nil {
				t.Fatalf("%s %d %q became %s: %v", typ.String(), kind, raw, got, err)
			}
		}
	})
}

func benchmarkRow() (*Encoder, *decode.OrderChange) {
	table := &Table{Name: "orders", spelling: "orders", key: []int{0}, Columns: []Column{
		{Name: "id", Type: Type{Name: BigInt}, Key: true},
		{Name: "customer", Type: Type{Name: Integer}},
		{Name: "status", Type: typeOf(Varchar)},
		{Name: "amount", Type: decimal(12, 2)},
		{Name: "comment", Type: typeOf(Varchar)},
		{Name: "paid", Type: typeOf(Boolean)},
		{Name: "created", Type: typeOf(TimestampTZ)},
		{Name: "updated", Type: typeOf(Timestamp)},
	}}
	e, err := NewEncoder(table, table.Relation(), Policy{})
	if err != nil {
		panic(err)
	}
	return e, &decode.OrderChange{Op: decode.Insert, Relation: e.rel, After: []decode.Value{
		num("123456789"), num("4711"), txt("shipped"), num("1234.50"),
		txt("please leave the parcel with the neighbour on the second floor, door to the left"),
		set(decode.Bool, "true"), txt("2024-05-06 07:08:09.123456+00"), txt("2024-05-06 07:08:09.5"),
	}}
}

func BenchmarkEncodeOrder(b *testing.B) {
	e, ch := benchmarkRow()
	var a Array
	b.ReportAllocs()
	for b.Loop() {
		if a.Rows() == 1000 {
			a.Reset()
		}
		if err := a.Add(e, ch); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "rows/s")
}

func TestEncodingDoesNotAllocate(t *testing.T) {
	e, ch := benchmarkRow()
	doesNotAllocate(t, e, ch)
	table := &Table{Name: "t", spelling: "t", Columns: []Column{{Name: "r", Type: typeOf(Real)}, {Name: "d", Type: typeOf(Double)}, {Name: "i", Type: typeOf(BigInt)}, {Name: "v", Type: typeOf(Variant)}}}
	e, err := NewEncoder(table, table.Relation(), Policy{})
	if err != nil {
		t.Fatal(err)
	}
	doesNotAllocate(t, e, &decode.OrderChange{Op: decode.Insert, Relation: e.rel, After: []decode.Value{
		num("3.1415927"), num("-1.7976931348623157e+308"), num("1.5e3"), num("12345.678e5"),
	}})
}

func doesNotAllocate(t *testing.T, e *Encoder, ch *decode.OrderChange) {
	t.Helper()
	var a Array
	for range 100 {
		if err := a.Add(e, ch); err != nil {
			t.Fatal(err)
		}
	}
	if n := testing.AllocsPerRun(100, func() {
		a.Reset()
		if err := a.Add(e, ch); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations a row", n)
	}
}
