package main

import (
	"fmt"
	"math/big"
	"net/http"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// How a column's value is compared. The rendering of ad-hoc queries is not
// part of the contract, so values are compared by what they mean.
type meaning func(v jsontext.Value) string

// text gives the content of a JSON string, or the raw text of anything else.
func text(v jsontext.Value) string {
	var s string
	if json.Unmarshal(v, &s) == nil && v.Kind() == '"' {
		return s
	}
	return string(v)
}

// decimal writes any form of a number without surplus zeros.
func decimal(v jsontext.Value) string {
	r, ok := new(big.Rat).SetString(text(v))
	if !ok {
		return text(v)
	}
	s := r.FloatString(40)
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
}

func float32Of(v jsontext.Value) string { return float(v, 32) }
func float64Of(v jsontext.Value) string { return float(v, 64) }

func float(v jsontext.Value, bits int) string {
	f, err := strconv.ParseFloat(text(v), bits)
	if err != nil {
		return text(v)
	}
	return strconv.FormatFloat(f, 'g', -1, bits)
}

// clock writes times and timestamps with a blank, without zone and without
// surplus zeros.
func clock(v jsontext.Value) string {
	s := strings.TrimSuffix(strings.TrimSuffix(strings.Replace(text(v), "T", " ", 1), "Z"), "+00:00")
	if strings.Contains(s, ".") {
		s = strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
	}
	return s
}

// octets writes binary data in hexadecimal, from hexadecimal or an array.
func octets(v jsontext.Value) string {
	var b []uint8
	var list []int
	if json.Unmarshal(v, &list) == nil {
		for _, n := range list {
			b = append(b, byte(n))
		}
		return fmt.Sprintf("%x", b)
	}
	return strings.TrimPrefix(strings.ToLower(text(v)), "0x")
}

// document writes JSON canonically, also where it comes inside a string.
func document(v jsontext.Value) string {
	c := jsontext.Value(strings.Clone(string(v)))
	if v.Kind() == '"' {
		if inner := jsontext.Value(text(v)); inner.IsValid() {
			c = inner
		}
	}
	if err := c.Canonicalize(); err != nil {
		return string(v)
	}
	return string(c)
}

// cell reads one column of one row of hfc_types, "" where there is no row.
func (p *probe) cell(table, column string, id int64) (jsontext.Value, bool) {
	rows := p.query(fmt.Sprintf("SELECT %s AS v FROM %s WHERE id = %d", column, table, id))
	if len(rows) != 1 {
		return nil, false
	}
	return rows[0]["v"], true
}

// value is a value that a column takes and what it is then.
type value struct{ sent, held string }

// typeCase makes the clauses of one SQL type.
type typeCase struct {
	name, column string
	mean         meaning
	takes        string  // what the clause of the good values says
	good         []value // held "" means the same as sent
	refuses      string
	bad          []string
}

// typeClauses are the table of contract §2.4.
func typeClauses() []clause {
	big := func(n int) string { return strings.Repeat("9", n) }
	cases := []typeCase{
		{
			name: "BOOLEAN", column: "t_boolean", mean: text, takes: "true and false", good: []value{{"true", ""}, {"false", ""}},
			refuses: "strings and numbers", bad: []string{`"true"`, "1"},
		},
		{name: "TINYINT", column: "t_tinyint", mean: text, takes: "-128 to 127", good: []value{{"-128", ""}, {"127", ""}}, refuses: "values out of range, fractions and strings", bad: []string{"-129", "128", "1.5", `"1"`}},
		{name: "SMALLINT", column: "t_smallint", mean: text, takes: "-32768 to 32767", good: []value{{"-32768", ""}, {"32767", ""}}, refuses: "values out of range, fractions and strings", bad: []string{"-32769", "32768", "1.5", `"1"`}},
		{name: "INTEGER", column: "t_integer", mean: text, takes: "-2^31 to 2^31-1", good: []value{{"-2147483648", ""}, {"2147483647", ""}}, refuses: "values out of range, fractions and strings", bad: []string{"-2147483649", "2147483648", "1.5", `"1"`}},
		{
			name: "BIGINT", column: "t_bigint", mean: text, takes: "-2^63 to 2^63-1 as bare numbers, exact beyond 2^53",
			good:    []value{{"-9223372036854775808", ""}, {"9223372036854775807", ""}, {"9007199254740993", ""}},
			refuses: "values out of range, fractions and strings", bad: []string{"-9223372036854775809", "9223372036854775808", "1.5", `"1"`},
		},
		{name: "UTINYINT", column: "t_utinyint", mean: text, takes: "0 to 255", good: []value{{"0", ""}, {"255", ""}}, refuses: "values out of range and strings", bad: []string{"-1", "256", `"1"`}},
		{name: "USMALLINT", column: "t_usmallint", mean: text, takes: "0 to 65535", good: []value{{"0", ""}, {"65535", ""}}, refuses: "values out of range and strings", bad: []string{"-1", "65536", `"1"`}},
		{name: "UINTEGER", column: "t_uinteger", mean: text, takes: "0 to 2^32-1", good: []value{{"0", ""}, {"4294967295", ""}}, refuses: "values out of range and strings", bad: []string{"-1", "4294967296", `"1"`}},
		{name: "UBIGINT", column: "t_ubigint", mean: text, takes: "0 to 2^64-1", good: []value{{"0", ""}, {"18446744073709551615", ""}}, refuses: "values out of range and strings", bad: []string{"-1", "18446744073709551616", `"1"`}},
		{name: "REAL", column: "t_real", mean: float32Of, takes: "JSON numbers", good: []value{{"0.5", ""}, {"-3.4028235e38", "-3.4028235e+38"}, {"7", ""}}, refuses: "NaN and Infinity, which JSON cannot write", bad: []string{"NaN", "Infinity"}},
		{name: "DOUBLE", column: "t_double", mean: float64Of, takes: "JSON numbers", good: []value{{"0.1", ""}, {"1.7976931348623157e308", "1.7976931348623157e+308"}, {"-7", ""}}, refuses: "NaN and Infinity, which JSON cannot write", bad: []string{"NaN", "-Infinity"}},
		{
			name: "DECIMAL", column: "t_decimal", mean: decimal, takes: "numbers and strings alike",
			good:    []value{{"12.5", ""}, {`"12.50"`, "12.5"}, {`"-9999999999.99"`, "-9999999999.99"}, {"0", ""}},
			refuses: "numbers with too many digits before the point, and text", bad: []string{"10000000000", `"-10000000000.00"`, `"x"`, `""`},
		},
		{name: "DECIMAL-exact", column: "t_wide", mean: decimal, takes: "numbers of any length without going through a float", good: []value{{big(18) + ".1234567891", ""}, {`"-` + big(18) + `.0000000001"`, "-" + big(18) + ".0000000001"}}},
		{name: "DECIMAL-truncates", column: "t_decimal", mean: decimal, takes: "surplus fractional digits and cuts them off toward zero", good: []value{{"1.239", "1.23"}, {`"-1.239"`, "-1.23"}, {`"0.009"`, "0"}, {"9999999999.999", "9999999999.99"}}},
		{name: "CHAR", column: "t_char", mean: text, takes: "strings longer than declared, uncut", good: []value{{`"abc"`, "abc"}, {`"abcdefgh"`, "abcdefgh"}}, refuses: "anything but strings", bad: []string{"1", "true", "[]"}},
		{
			name: "VARCHAR", column: "t_varchar", mean: text, takes: "strings longer than declared, uncut, with escapes and any Unicode",
			good:    []value{{`"abcdefghij"`, "abcdefghij"}, {`""`, ""}, {`"\u00e4\n\"\\\ud83d\ude00"`, "ä\n\"\\😀"}, {`"日本"`, "日本"}},
			refuses: "anything but strings", bad: []string{"1", "false", "{}"},
		},
		{name: "DATE", column: "t_date", mean: text, takes: "YYYY-MM-DD, trimmed", good: []value{{`"2024-02-29"`, "2024-02-29"}, {`" 0001-01-01 "`, "0001-01-01"}, {`"9999-12-31"`, "9999-12-31"}}, refuses: "days that do not exist and other forms", bad: []string{`"2023-02-29"`, `"yesterday"`, "19782"}},
		{name: "TIME", column: "t_time", mean: clock, takes: "HH:MM:SS with up to nine digits, trimmed", good: []value{{`"23:59:59.123456789"`, "23:59:59.123456789"}, {`" 00:00:00 "`, "00:00:00"}, {`"01:02:03.5"`, "01:02:03.5"}}, refuses: "other forms", bad: []string{`"noon"`, "43200"}},
		{
			name: "TIMESTAMP", column: "t_timestamp", mean: clock, takes: "YYYY-MM-DD HH:MM:SS with up to six digits",
			good:    []value{{`"2024-01-02 03:04:05.123456"`, "2024-01-02 03:04:05.123456"}, {`"2024-01-02 03:04:05"`, "2024-01-02 03:04:05"}},
			refuses: "other forms", bad: []string{`"today"`, "1704164645"},
		},
		{name: "TIMESTAMP-rfc3339", column: "t_timestamp", mean: clock, takes: "RFC 3339 and converts its offset to UTC", good: []value{{`"2024-01-02T03:04:05+05:30"`, "2024-01-01 21:34:05"}, {`"2024-01-02T03:04:05.5Z"`, "2024-01-02 03:04:05.5"}}},
		{name: "TIMESTAMP_TZ", column: "t_timestamp_tz", mean: clock, takes: "RFC 3339", good: []value{{`"2024-01-02T03:04:05Z"`, "2024-01-02 03:04:05"}, {`"2024-01-02T03:04:05.25-01:00"`, "2024-01-02 04:04:05.25"}}, refuses: "a timestamp without an offset", bad: []string{`"2024-01-02 03:04:05"`, `"2024-01-02T03:04:05"`}},
		{name: "BINARY", column: "t_binary", mean: octets, takes: "an array of byte integers", good: []value{{"[1,255]", "01ff"}}, refuses: "strings", bad: []string{`"01ff"`}},
		{name: "VARBINARY", column: "t_varbinary", mean: octets, takes: "an array of byte integers", good: []value{{"[222,173,0]", "dead00"}, {"[]", ""}}, refuses: "hexadecimal and base64 strings, and integers that are no bytes", bad: []string{`"dead"`, `"3q0="`, "[256]", "[-1]"}},
		{
			name: "UUID", column: "t_uuid", mean: func(v jsontext.Value) string { return strings.ToLower(text(v)) }, takes: "the hyphenated and the plain form in any case, and 16 byte integers",
			good: []value{
				{`"019A0000-0000-7000-8000-0000000000FF"`, "019a0000-0000-7000-8000-0000000000ff"},
				{`"019a00000000700080000000000000ff"`, "019a0000-0000-7000-8000-0000000000ff"},
				{"[1,154,0,0,0,0,112,0,128,0,0,0,0,0,0,255]", "019a0000-0000-7000-8000-0000000000ff"},
			},
			refuses: "anything else", bad: []string{`"019a"`, "1", "[1,2]"},
		},
		{name: "VARIANT", column: "t_variant", mean: document, takes: "any inline JSON", good: []value{{`{"b":[1,"x",null],"a":{"c":true}}`, `{"a":{"c":true},"b":[1,"x",null]}`}, {"[1,2]", ""}, {"7", ""}, {"true", ""}}},
		{name: "VARIANT-number", column: "t_variant", mean: text, takes: "numbers of 38 digits as they are", good: []value{{big(38), ""}, {"0." + big(37) + "8", ""}}, refuses: "numbers beyond 38 places before the point", bad: []string{"1e400", big(39)}},
		{name: "VARIANT-null", column: "t_variant", mean: text, takes: "null for SQL's NULL", good: []value{{"null", ""}}},
		{name: "ARRAY", column: "t_array", mean: document, takes: "arrays of the element type", good: []value{{"[1,null,-3]", ""}, {"[]", ""}}, refuses: "elements of another type", bad: []string{`["x"]`, `{"a":1}`, "1"}},
		{name: "MAP", column: "t_map", mean: document, takes: "objects with the keys as strings", good: []value{{`{"b":2,"a":null}`, `{"a":null,"b":2}`}, {"{}", ""}}, refuses: "values of another type", bad: []string{`{"a":"x"}`, "1"}},
		{name: "ROW", column: "t_row", mean: document, takes: "objects by field name", good: []value{{`{"b":"x","a":1}`, `{"a":1,"b":"x"}`}, {`{"a":1}`, `{"a":1,"b":null}`}}, refuses: "fields of another type", bad: []string{`{"a":"x"}`, "1"}},
	}
	var out []clause
	for _, tc := range cases {
		out = append(out, clause{
			id: "C2.4-" + tc.name, section: "2.4", says: "takes " + tc.takes,
			run: func(p *probe) {
				var rows []string
				for n, v := range tc.good {
					rows = append(rows, fmt.Sprintf(`{"insert":{"id":%d,"%s":%s}}`, p.id(n), tc.column, v.sent))
				}
				p.put("hfc_types", rows...)
				for n, v := range tc.good {
					got, ok := p.cell("hfc_types", tc.column, p.id(n))
					if !ok {
						p.failf("expected a row for %s, got none", v.sent)
					}
					expected := v.held
					if expected == "" && v.sent != `""` && v.sent != "[]" || tc.name == "ARRAY" && expected == "" {
						expected = v.sent
					}
					want(p, "for "+v.sent, expected, tc.mean(got))
				}
			},
		})
		if len(tc.bad) == 0 {
			continue
		}
		out = append(out, clause{
			id: "C2.4-" + tc.name + "-refuses", section: "2.4", says: "refuses " + tc.refuses,
			run: func(p *probe) {
				for _, bad := range tc.bad {
					p.array("hfc_types", fmt.Sprintf(`{"insert":{"id":%d,"%s":%s}}`, p.id(0), tc.column, bad)).refused(http.StatusBadRequest, "ParseErrors")
				}
				if _, ok := p.cell("hfc_types", tc.column, p.id(0)); ok {
					p.failf("expected no row of the refused values, got one")
				}
			},
		})
	}
	return append(out, valueClauses()...)
}

// valueClauses are what contract §2.4 says of all types.
func valueClauses() []clause {
	return []clause{
		{
			id: "C2.4-CHEX", section: "2.4", says: "json_flavor=c_hex takes binary data as hexadecimal",
			run: func(p *probe) {
				p.complete(p.ingress("hfc_types", arrayParams+"&json_flavor=c_hex", fmt.Sprintf(`[{"insert":{"id":%d,"t_varbinary":"dead"}}]`, p.id(0))).token())
				got, _ := p.cell("hfc_types", "t_varbinary", p.id(0))
				want(p, "t_varbinary", "dead", octets(got))
			},
		},
		{
			id: "C2.4-NULL", section: "2.4", says: "null, or leaving the key out, is NULL in a nullable column of any type",
			run: func(p *probe) {
				t := p.table("hfc_types")
				var members, names []string
				for _, f := range t.Fields[1:] {
					members = append(members, `"`+f.Name+`":null`)
					names = append(names, f.Name+" IS NULL")
				}
				p.put("hfc_types", fmt.Sprintf(`{"insert":{"id":%d,%s}}`, p.id(0), strings.Join(members, ",")), fmt.Sprintf(`{"insert":{"id":%d}}`, p.id(1)))
				rows := p.query(fmt.Sprintf("SELECT id FROM hfc_types WHERE id >= %d AND id <= %d AND %s", p.id(0), p.id(1), strings.Join(names, " AND ")))
				want(p, "rows with all columns NULL", 2, len(rows))
			},
		},
		{
			id: "C2.4-NOT-NULL-absent", section: "2.4", says: "leaving a NOT NULL column out is a parse error",
			run: func(p *probe) {
				d := p.array("hfc_strict", fmt.Sprintf(`{"insert":{"id":%d,"may":"x"}}`, p.id(0))).bad(1)
				if !strings.Contains(d.Errors[0].Description, "missing field `must`") {
					p.failf("expected a description with %q, got %q", "missing field `must`", d.Errors[0].Description)
				}
			},
		},
		{
			id: "C2.4-NOT-NULL-null", section: "2.4", says: "null in a NOT NULL column is a parse error",
			run: func(p *probe) { p.array("hfc_strict", fmt.Sprintf(`{"insert":{"id":%d,"must":null}}`, p.id(0))).bad(1) },
		},
		{
			id: "C2.4-UNKNOWN-COLUMN", section: "2.4", says: "an unknown column is ignored, whatever it holds",
			run: func(p *probe) {
				p.put("hfc_kv", fmt.Sprintf(`{"insert":{"id":%d,"note":"a","n":1,"nonsense":{"deep":[1]}}}`, p.id(0)))
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C2.4-DUPLICATE-COLUMN", section: "2.4", says: "of two equal keys the last one wins",
			run: func(p *probe) {
				p.put("hfc_kv", fmt.Sprintf(`{"insert":{"id":%d,"note":"first","n":1,"note":"last"}}`, p.id(0)))
				p.holds("hfc_kv", "0:last/1")
			},
		},
	}
}

// nameClauses are what contract §2.4 says of names.
func nameClauses() []clause {
	return []clause{
		{
			id: "C2.4-TABLE-FOLDED", section: "2.4", says: "an unquoted table in the URL is matched without regard to case",
			run: func(p *probe) {
				p.complete(p.array("HFC_pair", p.kv(0, "a", 1)).token())
				p.holds("hfc_pair", "0:a/1")
			},
		},
		{
			id: "C2.4-TABLE-QUOTED", section: "2.4", says: "a quoted table in the URL is matched exactly",
			run: func(p *probe) {
				p.put(`"HfcQuoted"`, fmt.Sprintf(`{"insert":{"id":%d,"Must":"a"}}`, p.id(0)))
				want(p, "rows", 1, len(p.query(fmt.Sprintf(`SELECT "Must" AS v FROM "HfcQuoted" WHERE id = %d`, p.id(0)))))
			},
		},
		{
			id: "C2.4-TABLE-QUOTED-lower", section: "2.4", says: "an unquoted table may be written quoted in lower case",
			run: func(p *probe) {
				p.touch("hfc_pair")
				p.complete(p.array(`"hfc_pair"`, p.kv(0, "a", 1)).token())
				p.holds("hfc_pair", "0:a/1")
			},
		},
		{
			id: "C2.4-TABLE-QUOTED-case", section: "2.4", says: "a quoted table is unknown without its quotes, and in another case",
			run: func(p *probe) {
				for _, name := range []string{"HfcQuoted", `"hfcquoted"`, `"HFCQUOTED"`, `"HFC_KV"`} {
					p.ingress(name, arrayParams, "[]").refused(http.StatusNotFound, "ConfigError.UnknownInputStream")
				}
			},
		},
		{
			id: "C2.4-COLUMN-FOLDED", section: "2.4", says: "an unquoted column is matched without regard to case",
			run: func(p *probe) {
				p.put("hfc_kv", fmt.Sprintf(`{"insert":{"ID":%d,"NoTe":"a","N":1}}`, p.id(0)))
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C2.4-COLUMN-QUOTED", section: "2.4", says: "a quoted column in another case is not matched: a parse error where it is NOT NULL",
			run: func(p *probe) {
				p.array(`"HfcQuoted"`, fmt.Sprintf(`{"insert":{"id":%d,"must":"a"}}`, p.id(0))).bad(1)
				p.array(`"HfcQuoted"`, fmt.Sprintf(`{"insert":{"id":%d,"MUST":"a"}}`, p.id(0))).bad(1)
			},
		},
		{
			id: "C2.4-COLUMN-QUOTED-nullable", section: "2.4", says: "a nullable quoted column in another case is ignored like any unknown key: it stays NULL, without an error",
			run: func(p *probe) {
				p.put(`"HfcQuoted"`, fmt.Sprintf(`{"insert":{"id":%d,"Must":"a","may":"lost"}}`, p.id(0)))
				got, ok := p.cell(`"HfcQuoted"`, `"May"`, p.id(0))
				if !ok || string(got) != "null" {
					p.failf(`expected "May" NULL, got %s`, got)
				}
			},
		},
	}
}
