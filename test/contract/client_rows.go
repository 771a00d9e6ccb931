package main

import (
	"fmt"
	"slices"
	"strings"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// clientSchemaClauses hold the client's discovery to contract §1.5 and §2.4.
func clientSchemaClauses() []clause {
	const section = "client"
	describe := func(p *probe) *feldera.Schema {
		s, err := p.connect(nil).Describe(p.ctx)
		p.noErr("Describe", err)
		return s
	}
	table := func(p *probe, name string) *feldera.Table {
		t, err := describe(p).Table(name)
		p.noErr("Table", err)
		return t
	}
	return []clause{
		{
			id: "K-DESCRIBE", section: section, says: "Describe lists every input table and no view",
			run: func(p *probe) {
				names := describe(p).Names()
				for _, n := range []string{"hfc_types", "hfc_kv", "hfc_bag", "HfcQuoted"} {
					if !slices.ContainsFunc(names, func(s string) bool { return strings.Trim(s, `"`) == n }) {
						p.failf("expected the table %s, got %v", n, names)
					}
				}
				if slices.Contains(names, "hfc_view") {
					p.failf("expected no view among the input tables, got hfc_view")
				}
			},
		},
		{
			id: "K-DESCRIBE-FOLD", section: section, says: "an unquoted table is found in any case, and written in one canonical spelling",
			run: func(p *probe) {
				a, b := table(p, "hfc_kv"), table(p, "HFC_Kv")
				want(p, "the spelling", a.Spelling(), b.Spelling())
			},
		},
		{
			id: "K-DESCRIBE-QUOTED", section: section, says: `a quoted table is found under its quoted name only, and written with its quotes`,
			run: func(p *probe) {
				want(p, "the spelling", `"HfcQuoted"`, table(p, `"HfcQuoted"`).Spelling())
				_, err := describe(p).Table("HfcQuoted")
				mustBe[*decode.Refusal](p, "Table", err)
			},
		},
		{
			id: "K-DESCRIBE-UNKNOWN", section: section, says: "an unknown table is refused with the names that come near",
			run: func(p *probe) {
				_, err := describe(p).Table("hfc_kvv")
				r := errAs[*decode.Refusal](p, "Table", err)
				if !strings.Contains(r.Error(), "hfc_kv") {
					p.failf("expected hfc_kv among the near names, got %v", r)
				}
			},
		},
		{
			id: "K-DESCRIBE-KEY", section: section, says: "primary keys are known, and their absence",
			run: func(p *probe) {
				want(p, "the key of hfc_kv", "id", strings.Join(table(p, "hfc_kv").KeyNames(), ","))
				want(p, "the number of key columns of hfc_composite", 2, len(table(p, "hfc_composite").KeyNames()))
				want(p, "HasKey of hfc_bag", false, table(p, "hfc_bag").HasKey())
			},
		},
		{
			id: "K-DESCRIBE-MATERIALIZED", section: section, says: "what can be queried is known: materialized tables and those with a primary key",
			run: func(p *probe) {
				want(p, "hfc_kv", true, table(p, "hfc_kv").Materialized)
				want(p, "hfc_bag", true, table(p, "hfc_bag").Materialized)
				want(p, "hfc_hidden", false, table(p, "hfc_hidden").Materialized)
			},
		},
		{
			id: "K-DESCRIBE-TYPES", section: section, says: "every column's type is known by name, nullability, precision and parts",
			run: func(p *probe) {
				types := map[string]feldera.Type{}
				for _, c := range table(p, "hfc_types").Columns {
					types[c.Name] = c.Type
				}
				for col, name := range map[string]feldera.TypeName{
					"t_boolean": feldera.Boolean, "t_integer": feldera.Integer, "t_ubigint": feldera.UBigInt, "t_decimal": feldera.Decimal, "t_varchar": feldera.Varchar,
				} {
					want(p, "the type of "+col, name, types[col].Name)
				}
				d := types["t_decimal"]
				want(p, "the precision of t_decimal", 12, d.Precision)
				want(p, "the scale of t_decimal", 2, d.Scale)
				want(p, "id is nullable", false, types["id"].Nullable)
				a, m, r := types["t_array"], types["t_map"], types["t_row"]
				if a.Element == nil || m.MapKey == nil || m.Element == nil || len(r.Fields) != 2 {
					p.failf("expected the parts of ARRAY, MAP and ROW, got %v, %v, %v", a, m, r)
				}
			},
		},
		{
			id: "K-DESCRIBE-PIPELINE", section: section, says: "an unknown pipeline is a refusal, not a retry", needs: needManager,
			run: func(p *probe) {
				_, err := p.connect(func(c *feldera.Config) { c.Pipeline = "hfc-nowhere" }).Describe(p.ctx)
				want(p, "the class", feldera.ClassStopOperator, feldera.Classify(err))
			},
		},
		{
			id: "K-DESCRIBE-KEY-WRONG", section: section, says: "a wrong API key is a refusal, and does not stand in the error", needs: needAuth,
			run: func(p *probe) {
				_, err := p.connect(func(c *feldera.Config) { c.APIKey = func() (string, error) { return simKey("x"), nil } }).Describe(p.ctx)
				want(p, "the class", feldera.ClassStopOperator, feldera.Classify(err))
				if strings.Contains(err.Error(), simKey("x")[10:]) {
					p.failf("expected no key in the error, got one")
				}
			},
		},
		{
			id: "K-DESCRIBE-BARE", section: section, says: "a bare process is described by its /metadata", needs: needBare | needManager,
			run: func(p *probe) {
				c := p.connect(func(c *feldera.Config) { c.URL, c.Pipeline, c.APIKey = p.w.bare, "", nil })
				s, err := c.Describe(p.ctx)
				p.noErr("Describe", err)
				_, err = s.Table("hfc_types")
				p.noErr("Table", err)
			},
		},
	}
}

// encoded is one value of a source and what the table then holds.
type encoded struct {
	kind decode.Kind
	text string
	held string
}

// encodeCase is one column with values that must arrive as they are, and
// values that must be refused before anything is sent.
type encodeCase struct {
	name, column string
	mean         meaning
	good         []encoded
	bad          []encoded
}

func encodeCases() []encodeCase {
	num, txt, hex, js, boolean := decode.Number, decode.Text, decode.Hex, decode.JSON, decode.Bool
	same := func(k decode.Kind, texts ...string) []encoded {
		var out []encoded
		for _, s := range texts {
			out = append(out, encoded{k, s, s})
		}
		return out
	}
	return []encodeCase{
		{"BOOLEAN", "t_boolean", text, same(boolean, "true", "false"), same(txt, "yes")},
		{"TINYINT", "t_tinyint", text, same(num, "-128", "127"), same(num, "-129", "128", "1.5", "NaN")},
		{"SMALLINT", "t_smallint", text, same(num, "-32768", "32767"), same(num, "-32769", "32768")},
		{"INTEGER", "t_integer", text, same(num, "-2147483648", "2147483647"), same(num, "-2147483649", "2147483648")},
		{"BIGINT", "t_bigint", text, append(same(num, "-9223372036854775808", "9223372036854775807", "9007199254740993"), encoded{num, "1.5e3", "1500"}), same(num, "1.5", "9223372036854775808", "-9223372036854775809")},
		{"UTINYINT", "t_utinyint", text, same(num, "0", "255"), same(num, "-1", "256")},
		{"USMALLINT", "t_usmallint", text, same(num, "0", "65535"), same(num, "-1", "65536")},
		{"UINTEGER", "t_uinteger", text, same(num, "0", "4294967295"), same(num, "-1", "4294967296")},
		{"UBIGINT", "t_ubigint", text, same(num, "0", "18446744073709551615"), same(num, "-1", "18446744073709551616")},
		{"REAL", "t_real", float32Of, same(num, "0.5", "-3.25"), same(num, "NaN", "Infinity", "1e39", "1e-46", "16777217")},
		{"DOUBLE", "t_double", float64Of, []encoded{{num, "0.1", "0.1"}, {num, "1e300", "1e+300"}}, same(num, "NaN", "-Infinity", "1e309", "1e-400", "9007199254740993")},
		{"DECIMAL", "t_decimal", decimal, []encoded{{num, "12.50", "12.5"}, {num, "-9999999999.99", "-9999999999.99"}, {txt, "7.25", "7.25"}, {num, "1.2300", "1.23"}}, same(num, "1.239", "10000000000", "NaN")},
		{"DECIMAL-wide", "t_wide", decimal, same(num, "123456789012345678.1234567891"), same(num, "1234567890123456789", "0.12345678901")},
		{"CHAR", "t_char", text, []encoded{{txt, "abc", "abc"}}, same(txt, "a\xff")},
		{"VARCHAR", "t_varchar", text, []encoded{{txt, "ä\n\"\\😀\u0001", "ä\n\"\\😀\u0001"}, {num, "12.50", "12.50"}, {js, `{"a":1}`, `{"a":1}`}, {boolean, "true", "true"}, {txt, "", ""}}, same(txt, "\xc3\x28")},
		{"DATE", "t_date", text, same(txt, "2024-02-29", "0001-01-01", "9999-12-31"), same(txt, "infinity", "10000-01-01", "10000-01-01junk", "0044-03-15 BC", "2023-02-29")},
		{"TIME", "t_time", clock, []encoded{{txt, "23:59:59.123456", "23:59:59.123456"}, {txt, "00:00:00", "00:00:00"}}, same(txt, "24:00:00", "noon")},
		{
			"TIMESTAMP", "t_timestamp", clock,
			[]encoded{{txt, "2024-01-02 03:04:05.123456", "2024-01-02 03:04:05.123456"}, {txt, "2024-01-02T03:04:05", "2024-01-02 03:04:05"}, {txt, "2024-01-02 03:04:05.1+05:30", "2024-01-01 21:34:05.1"}},
			same(txt, "infinity", "-infinity", "10000-01-01 00:00:00", "0044-03-15 00:00:00 BC", "today"),
		},
		{
			"TIMESTAMP_TZ", "t_timestamp_tz", clock,
			[]encoded{{txt, "2024-01-02 03:04:05+00", "2024-01-02 03:04:05"}, {txt, "2024-01-02 03:04:05.25+05:30", "2024-01-01 21:34:05.25"}, {txt, "2024-01-02 03:04:05-08", "2024-01-02 11:04:05"}},
			same(txt, "infinity", "tomorrow"),
		},
		{"BINARY", "t_binary", octets, []encoded{{hex, "01ff", "01ff"}}, same(hex, "0", "zz")},
		{"VARBINARY", "t_varbinary", octets, []encoded{{hex, "dead00", "dead00"}, {hex, "", ""}}, same(hex, "abc", "xy")},
		{"UUID", "t_uuid", text, same(txt, "019a0000-0000-7000-8000-0000000000ff"), same(txt, "019a", "not-a-uuid")},
		{"VARIANT", "t_variant", document, []encoded{{js, `{"b":[1,"x",null],"a":{"c":true}}`, `{"a":{"c":true},"b":[1,"x",null]}`}, {num, "7", "7"}, {boolean, "true", "true"}}, append(same(js, `{"a":`, `{"a":1}x`, `{"a":[1e400]}`, `1e-400`), encoded{kind: num, text: strings.Repeat("9", 39)})},
		{"ARRAY", "t_array", document, []encoded{{js, "[1,null,-3]", "[1,null,-3]"}, {js, "[]", "[]"}}, same(js, `["x"]`, `{"a":1}`, "[9223372036854775808]")},
		{"MAP", "t_map", document, []encoded{{js, `{"b":2,"a":null}`, `{"a":null,"b":2}`}}, same(js, `{"a":"x"}`, "[]", `{"a":1,"\u0061":2}`)},
		{"ROW", "t_row", document, []encoded{{js, `{"a":1,"b":"x"}`, `{"a":1,"b":"x"}`}}, same(js, `{"a":"x","b":"y"}`, "1")},
	}
}

// clientEncodeClauses hold the encoder to contract §2.4 and §3.
func clientEncodeClauses() []clause {
	const section = "client"
	var out []clause
	for _, ec := range encodeCases() {
		prepare := func(p *probe) (destination, *decode.Relation, *feldera.Encoder) {
			d := p.destination(p.connect(nil), "hfc_types")
			rel := &decode.Relation{Name: "hfc_types", Identity: decode.IdentityDefault, Columns: []decode.Column{{Name: "id", Key: true}, {Name: ec.column}}}
			e, err := feldera.NewEncoder(d.table, rel, feldera.Policy{})
			p.noErr("NewEncoder", err)
			return d, rel, e
		}
		out = append(
			out, clause{
				id: "K-ENCODE-" + ec.name, section: section, says: "values of " + ec.name + " that the encoder lets through arrive as they were",
				run: func(p *probe) {
					d, rel, e := prepare(p)
					a := &feldera.Array{}
					for n, v := range ec.good {
						p.noErr("Add of "+v.text, a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: rel, After: values(number(p.id(n)), val(v.kind, v.text))}))
					}
					last := p.id(len(ec.good))
					p.noErr("Add of NULL", a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: rel, After: values(number(last), null())}))
					p.deliver(d, a)
					for n, v := range ec.good {
						got, ok := p.cell("hfc_types", ec.column, p.id(n))
						if !ok {
							p.failf("expected a row for %q, got none", v.text)
						}
						want(p, fmt.Sprintf("for %q", v.text), v.held, ec.mean(got))
					}
					got, _ := p.cell("hfc_types", ec.column, last)
					want(p, "for NULL", "null", string(got))
				},
			},
			clause{
				id: "K-ENCODE-" + ec.name + "-refuses", section: section, says: "values of " + ec.name + " that would arrive otherwise are refused before they are sent, by table and column",
				run: func(p *probe) {
					_, rel, e := prepare(p)
					a := &feldera.Array{}
					for _, v := range ec.bad {
						err := a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: rel, After: values(number(p.id(0)), val(v.kind, v.text))})
						r := errAs[*decode.Refusal](p, fmt.Sprintf("Add of %q", v.text), err)
						if !strings.Contains(r.Where, "hfc_types") || !strings.Contains(r.Where, ec.column) {
							p.failf("expected table and column in the refusal of %q, got %q", v.text, r.Where)
						}
					}
					want(p, "changes in the array", 0, a.Rows())
				},
			},
		)
	}
	update := func(before, after []decode.Value) decode.OrderChange {
		return decode.OrderChange{Op: decode.Update, Before: before, After: after}
	}
	return append(
		out,
		clause{
			id: "K-ENCODE-ALL-BAG", section: section, says: "a whole row of every type, inserted and deleted again in a table without a key, leaves nothing",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_types_bag")
				row := make([]decode.Value, len(d.rel.Columns))
				for i, c := range d.rel.Columns {
					row[i] = number(p.id(0))
					for _, ec := range encodeCases() {
						if ec.column == c.Name {
							row[i] = val(ec.good[0].kind, ec.good[0].text)
						}
					}
				}
				count := func() string {
					return string(p.query(fmt.Sprintf("SELECT COUNT(*) AS c FROM hfc_types_bag WHERE id = %d", p.id(0)))[0]["c"])
				}
				p.deliver(d, p.inserts(d, row, row))
				want(p, "rows", "2", count())
				p.deliver(d, p.changes(d, decode.OrderChange{Op: decode.Delete, Before: row}))
				want(p, "rows", "1", count())
				p.deliver(d, p.changes(d, decode.OrderChange{Op: decode.Delete, Before: row}))
				want(p, "rows", "0", count())
			},
		},
		clause{
			id: "K-ENCODE-UPSERT", section: section, says: "an update with all columns replaces the row, and makes it where it was absent",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				p.deliver(d, p.inserts(d, full(p.id(0), "a", 1)))
				p.deliver(d, p.changes(d, update(nil, full(p.id(0), "b", 2)), update(nil, full(p.id(1), "c", 3))))
				p.holds("hfc_kv", "0:b/2 1:c/3")
			},
		},
		clause{
			id: "K-ENCODE-UNCHANGED", section: section, says: "an update with an unchanged column keeps what the table has",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				p.deliver(d, p.inserts(d, full(p.id(0), "kept", 1)))
				p.deliver(d, p.changes(d, update(nil, values(number(p.id(0)), unchanged(), number(2)))))
				p.holds("hfc_kv", "0:kept/2")
			},
		},
		clause{
			id: "K-ENCODE-KEY-CHANGE", section: section, says: "a change of key deletes the old row and inserts the new one, in one array",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				p.deliver(d, p.inserts(d, full(p.id(0), "a", 1)))
				p.deliver(d, p.changes(d, update(values(number(p.id(0)), absent(), absent()), full(p.id(1), "a", 1))))
				p.holds("hfc_kv", "1:a/1")
			},
		},
		clause{
			id: "K-ENCODE-KEY-UNCHANGED", section: section, says: "a change of key with an unchanged column is refused with the statement that mends it",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				ch := update(values(number(p.id(0)), absent(), absent()), values(number(p.id(1)), unchanged(), number(2)))
				ch.Relation = d.rel
				a := &feldera.Array{}
				r := errAs[*decode.Refusal](p, "Add", a.Add(d.encoder, &ch))
				if !strings.Contains(r.Do, "REPLICA IDENTITY FULL") {
					p.failf("expected the advice REPLICA IDENTITY FULL, got %q", r.Do)
				}
			},
		},
		clause{
			id: "K-ENCODE-DELETE", section: section, says: "a delete needs the key alone, and of an absent key changes nothing",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				p.deliver(d, p.inserts(d, full(p.id(0), "a", 1), full(p.id(1), "b", 2)))
				del := func(n int) decode.OrderChange {
					return decode.OrderChange{Op: decode.Delete, Before: values(number(p.id(n)), absent(), absent())}
				}
				p.deliver(d, p.changes(d, del(0), del(5)))
				p.holds("hfc_kv", "1:b/2")
			},
		},
		clause{
			id: "K-ENCODE-BAG-UPDATE", section: section, says: "without a primary key an update takes the old whole row away and adds the new one",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_bag")
				p.deliver(d, p.inserts(d, values(number(p.id(0)), words("a")), values(number(p.id(0)), words("a"))))
				p.deliver(d, p.changes(d, update(values(number(p.id(0)), words("a")), values(number(p.id(0)), words("b")))))
				want(p, "the rows", "0:a×1 0:b×1", p.bag())
			},
		},
		clause{
			id: "K-ENCODE-BAG-IDENTITY", section: section, says: "without a primary key a delete without the whole row is refused",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_bag")
				a := &feldera.Array{}
				err := a.Add(d.encoder, &decode.OrderChange{Op: decode.Delete, Relation: d.rel, Before: values(number(p.id(0)), absent())})
				p.mustRefuse("Add", err, decode.ReasonIdentity)
			},
		},
		clause{
			id: "K-ENCODE-QUOTED", section: section, says: "quoted columns are written exactly",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), `"HfcQuoted"`)
				p.deliver(d, p.inserts(d, values(number(p.id(0)), words("a"), words("b"))))
				got, _ := p.cell(`"HfcQuoted"`, `"May"`, p.id(0))
				want(p, `"May"`, "b", text(got))
			},
		},
		clause{
			id: "K-ENCODE-NOT-NULL", section: section, says: "a NOT NULL column without a value is refused before it is sent",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_strict")
				for _, v := range []decode.Value{null(), absent()} {
					a := &feldera.Array{}
					r := errAs[*decode.Refusal](p, "Add", a.Add(d.encoder, &decode.OrderChange{Op: decode.Insert, Relation: d.rel, After: values(number(p.id(0)), v, null())}))
					if !strings.Contains(r.Error(), "must") {
						p.failf("expected the column in the refusal, got %v", r)
					}
				}
			},
		},
		clause{
			id: "K-ENCODE-EXTRA", section: section, says: "a source column that the table lacks is refused, since the engine would ignore it in silence",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_kv")
				rel := d.table.Relation()
				rel.Columns = append(rel.Columns, decode.Column{Name: "hfc_new"})
				_, err := feldera.NewEncoder(d.table, rel, feldera.Policy{})
				r := p.refusedFor("NewEncoder", err, decode.ReasonSchema)
				if !strings.Contains(r.Error(), "hfc_new") {
					p.failf("expected the column in the refusal, got %v", r)
				}
			},
		},
		clause{
			id: "K-ENCODE-TRUNCATE-POLICY", section: section, says: "with the policy to cut surplus digits the client cuts as the engine does, toward zero",
			run: func(p *probe) {
				d := p.destination(p.connect(nil), "hfc_types")
				rel := &decode.Relation{Name: "hfc_types", Columns: []decode.Column{{Name: "id", Key: true}, {Name: "t_decimal"}}}
				e, err := feldera.NewEncoder(d.table, rel, feldera.Policy{Fraction: feldera.TruncateExcess})
				p.noErr("NewEncoder", err)
				a := &feldera.Array{}
				for n, s := range []string{"1.239", "-1.239"} {
					p.noErr("Add", a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: rel, After: values(number(p.id(n)), val(decode.Number, s))}))
				}
				p.deliver(d, a)
				// The engine's own cut of the same values stands beside it.
				p.put("hfc_types", fmt.Sprintf(`{"insert":{"id":%d,"t_decimal":"1.239"}}`, p.id(2)), fmt.Sprintf(`{"insert":{"id":%d,"t_decimal":"-1.239"}}`, p.id(3)))
				for n := range 2 {
					ours, _ := p.cell("hfc_types", "t_decimal", p.id(n))
					theirs, _ := p.cell("hfc_types", "t_decimal", p.id(n+2))
					want(p, "the client's cut", decimal(theirs), decimal(ours))
				}
			},
		},
	)
}
