package core

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestS6Types(t *testing.T) {
	const bad = "\x00refused"
	for _, tc := range []struct {
		typ  string
		vals map[string]string // JSON in → JSON as dumped
	}{
		{"BOOLEAN", map[string]string{"true": "true", "false": "false", "1": bad, `"true"`: bad}},
		{"TINYINT", map[string]string{"127": "127", "-128": "-128", "128": bad, "-129": bad, "1.0": bad, "1e1": bad, `"1"`: bad, "-0": "0", "01": bad}},
		{"SMALLINT", map[string]string{"32767": "32767", "32768": bad, "-32768": "-32768", "-32769": bad}},
		{"INT", map[string]string{"2147483647": "2147483647", "2147483648": bad, "-2147483648": "-2147483648"}},
		{"BIGINT", map[string]string{"9223372036854775807": "9223372036854775807", "9223372036854775808": bad, "-9223372036854775808": "-9223372036854775808", "-9223372036854775809": bad, "99999999999999999999999": bad}},
		{"TINYINT UNSIGNED", map[string]string{"255": "255", "256": bad, "-1": bad}},
		{"SMALLINT UNSIGNED", map[string]string{"65535": "65535", "65536": bad}},
		{"INT UNSIGNED", map[string]string{"4294967295": "4294967295", "4294967296": bad}},
		{"BIGINT UNSIGNED", map[string]string{"18446744073709551615": "18446744073709551615", "18446744073709551616": bad, "-1": bad, "-0": "0"}},
		{"REAL", map[string]string{"1.50": "1.5", "0.1": "0.1", "1e39": bad, `"NaN"`: bad}},
		{"DOUBLE", map[string]string{"1e2": "100", "0.10": "0.1", "-0.0": "0", "1e400": bad, `"1"`: bad}},
		{"DECIMAL(5,2)", map[string]string{
			"1": `"1.00"`, `"1.005"`: `"1.00"`, "-1.999": `"-1.99"`, "-0.001": `"0.00"`, "999.999": `"999.99"`, "1000": bad, `"1e2"`: `"100.00"`,
			"0.00000000000000000000000001e26": `"1.00"`, `"x"`: bad, `""`: bad, `"1.2.3"`: bad, "true": bad, "1e3": bad, "0e999": `"0.00"`,
		}},
		{"DECIMAL(3,3)", map[string]string{"0.1239": `"0.123"`, "1": bad}},
		{"DECIMAL(38,0)", map[string]string{"99999999999999999999999999999999999999": `"99999999999999999999999999999999999999"`, "100000000000000000000000000000000000000": bad}},
		{"VARCHAR(2)", map[string]string{`"longer than declared"`: `"longer than declared"`, `"\u0041\ud83d\ude00\n"`: "\"A\U0001F600\\n\"", "1": bad, `"\ud83d"`: bad}},
		{"CHAR(3)", map[string]string{`"x"`: `"x"`}},
		{"DATE", map[string]string{`" 2024-02-29 "`: `"2024-02-29"`, `"2023-02-29"`: bad, `"2024-1-1"`: bad, "19000": bad}},
		{"TIME", map[string]string{`" 11:12:33.483221092 "`: `"11:12:33.483221092"`, `"13:22:00"`: `"13:22:00"`, `"13:22:00.5"`: `"13:22:00.500"`, `"24:00:00"`: bad, `"1:2:3"`: bad}},
		{"TIMESTAMP", map[string]string{
			`"2021-05-20 12:12:33"`: `"2021-05-20 12:12:33.000000"`, `" 2024-02-25 12:12:33.1234567 "`: `"2024-02-25 12:12:33.123456"`,
			`"2026-01-02T03:04:05.5+02:00"`: `"2026-01-02 01:04:05.500000"`, `"2026-01-02T03:04:05Z"`: `"2026-01-02 03:04:05.000000"`, `"2026-01-02T03:04:05"`: bad, `"2026-01-02"`: bad, "0": bad,
		}},
		{"TIMESTAMP WITH TIME ZONE", map[string]string{`"2026-01-02T03:04:05+01:00"`: `"2026-01-02 02:04:05.000000Z"`, `"2026-01-02 03:04:05"`: bad}},
		{"VARBINARY", map[string]string{"[1,255]": "[1,255]", "[]": "[]", "[256]": bad, "[1.0]": bad, `"01ff"`: bad}},
		{"BYTEA", map[string]string{"[ 0 , 7 ]": "[0,7]"}},
		{"UUID", map[string]string{
			`"550E8400-E29B-41D4-A716-446655440000"`: `"550e8400-e29b-41d4-a716-446655440000"`, `"550e8400e29b41d4a716446655440000"`: `"550e8400-e29b-41d4-a716-446655440000"`,
			`"{550e8400-e29b-41d4-a716-446655440000}"`: `"550e8400-e29b-41d4-a716-446655440000"`, `"urn:uuid:550e8400-e29b-41d4-a716-446655440000"`: `"550e8400-e29b-41d4-a716-446655440000"`,
			"[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]": `"00010203-0405-0607-0809-0a0b0c0d0e0f"`, "[1]": bad, `"x"`: bad,
		}},
		{"VARIANT", map[string]string{`{"b": [1, 2.50], "a": null}`: `{"a":null,"b":[1,2.50]}`, `"x"`: `"x"`, "12": "12", `{"a":1,"a":2}`: `{"a":2}`}},
		{"VARIANT", map[string]string{
			"1e400": bad, "1e38": bad, "1e37": "1e37", "1e-400": "0", "-1e-256": "0", "1e-255": "1e-255", "0e999999999999999999999": "0e999999999999999999999",
			strings.Repeat("9", 38): strings.Repeat("9", 38), strings.Repeat("9", 39): bad, "[1e99999999999999999999]": bad,
			"0." + strings.Repeat("3", 40): strings.Repeat("3", 38) + "e-38", "-0." + strings.Repeat("6", 39): "-" + strings.Repeat("6", 37) + "7e-38",
		}},
		{"INT ARRAY", map[string]string{"[1, null, 2]": "[1,null,2]", "[]": "[]", `["1"]`: bad, "1": bad}},
		{"ARRAY<DECIMAL(4,1)>", map[string]string{"[1.25]": `["1.2"]`}},
		{"MAP<VARCHAR, INT>", map[string]string{`{"b":1,"a":2,"b":3}`: `{"a":2,"b":3}`, `{"a":"x"}`: bad, "[]": bad}},
		{"MAP<INT, VARCHAR>", map[string]string{`{"1":"x"}`: `{"1":"x"}`, `{"y":"x"}`: bad}},
		{"ROW(x INT, y VARCHAR)", map[string]string{`{"x":1,"y":"a"}`: `{"x":1,"y":"a"}`, `{"x":1}`: bad, `{"x":null,"y":"a"}`: bad}},
		{"ROW(x INT NULL, \"Y\" VARCHAR NOT NULL)", map[string]string{`{"X":1,"Y":"a"}`: `{"x":1,"Y":"a"}`, `{"Y":"a"}`: `{"x":null,"Y":"a"}`, `{"x":1,"y":"a"}`: bad}},
	} {
		t.Run(tc.typ, func(t *testing.T) {
			for in, want := range tc.vals {
				r := newRig(t, Config{Program: program(t, "CREATE TABLE v (c "+tc.typ+");")})
				_, err := r.send("v", arrayQuery, `[{"insert":{"c":`+in+`}}]`)
				if (err != nil) != (want == bad) {
					t.Errorf("%s: got %v", in, err)
					continue
				}
				if err != nil {
					continue
				}
				r.steps()
				if d := cmp.Diff([]string{`{"c":` + want + `} weight=1`}, r.Dump("v")); d != "" {
					t.Errorf("%s (-want +got):\n%s", in, d)
				}
			}
			// NULL goes into a nullable column, and not into the other kind.
			r := newRig(t, Config{Program: program(t, "CREATE TABLE v (c "+tc.typ+"); CREATE TABLE w (c "+tc.typ+" NOT NULL);")})
			r.ok("v", `[{"insert":{"c":null}},{"insert":{}}]`)
			r.fails("ParseErrors", "w", arrayQuery, `[{"insert":{"c":null}}]`)
			r.fails("ParseErrors", "w", arrayQuery, `[{"insert":{}}]`)
		})
	}
}

func TestS6Names(t *testing.T) {
	r := newRig(t, Config{Program: program(t, `
		CREATE TABLE "TaBle1" (id BIGINT NOT NULL, "Name" VARCHAR, ΔΘ BOOLEAN);
		CREATE TABLE table1 (id BIGINT DEFAULT 7);`)})
	for spelling, table := range map[string]string{`"TaBle1"`: `"TaBle1"`, "table1": "table1", "TABLE1": "table1", `"table1"`: "table1"} {
		ep, err := r.Open(spelling, ParserConfig{Format: "json"})
		if err != nil || ep.Table.Name != CanonicalName(table) {
			t.Errorf("%s: %v", spelling, err)
		}
	}
	r.fails("ConfigError.UnknownInputStream", `"Table1"`, arrayQuery, "[]")
	r.ok(`"TaBle1"`, `[{"insert":{"ID":1,"Name":"x","name":"ignored","δθ":true,"unknown":[{}]}},{"insert":{"id":1,"id":2,"Id":3}}]`)
	r.ok("table1", `[{"insert":{}},{"insert":{"id":null}}]`)
	r.steps()
	r.dump(`"TaBle1"`, `{"id":1,"Name":"x","δθ":true} weight=1`, `{"id":3,"Name":null,"δθ":null} weight=1`)
	r.dump("table1", `{"id":7} weight=1`, `{"id":null} weight=1`)
}

func TestProgramErrors(t *testing.T) {
	for sql, want := range map[string]string{
		"CREATE TABLE t (id BIGINT PRIMARY KEY);":               "must be declared NOT NULL",
		"CREATE TABLE t (id NOSUCH);":                           "unknown type",
		"CREATE TABLE t (id INT, id INT);":                      "declared twice",
		"CREATE TABLE t (id INT); CREATE TABLE T (id INT);":     "declared twice",
		"CREATE TABLE t (id INT NOT NULL, PRIMARY KEY (x));":    "is not declared",
		"CREATE TABLE t (id INT DEFAULT now());":                "only literals",
		"DROP TABLE t;":                                         "only CREATE TABLE",
		"CREATE TABLE t (id INT":                                "expected",
		"CREATE TABLE t (id DECIMAL(40,2));":                    "not a valid type",
		"CREATE TABLE t (name 'x');":                            "expected a type",
		"CREATE TABLE t (id VARCHAR UNSIGNED);":                 "cannot be UNSIGNED",
		"CREATE TABLE t (id INT) WITH (materialized = 'true');": "quoted property name",
		"CREATE TABLE t (id INT) AS SELECT 1;":                  "expected \";\"",
		"/* open":                                               "not closed",
	} {
		if _, err := ParseProgram(sql); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q in it", sql, err, want)
		}
	}
}

func TestProgramSchema(t *testing.T) {
	p := program(t, `
		-- a comment
		CREATE TABLE "T" (
			"Id" UUID NOT NULL, d DECIMAL(12, 2) DEFAULT 0, n CHARACTER VARYING(10) LATENESS INTERVAL 1 HOUR,
			m MAP<VARCHAR, ROW(a INT NOT NULL) ARRAY>, CONSTRAINT pk PRIMARY KEY ("Id"), FOREIGN KEY (d) REFERENCES o (d)
		) WITH ('materialized' = 'true', 'connectors' = '[{"name": "it''s"}]');
		CREATE MATERIALIZED VIEW v AS SELECT * FROM "T";
		CREATE LOCAL VIEW w AS (SELECT 1);`)
	s := p.Schema()
	got := toJSON(t, s.Inputs[0])
	want := `{"name":"T","case_sensitive":true,"fields":[{"name":"Id","case_sensitive":true,"columntype":{"type":"UUID","nullable":false},"unused":false},` +
		`{"name":"d","case_sensitive":false,"columntype":{"type":"DECIMAL","nullable":true,"precision":12,"scale":2},"default":"0","unused":false},` +
		`{"name":"n","case_sensitive":false,"columntype":{"type":"VARCHAR","nullable":true,"precision":10},"lateness":"INTERVAL 1 HOUR","unused":false},` +
		`{"name":"m","case_sensitive":false,"columntype":{"type":"MAP","nullable":true,"key":{"type":"VARCHAR","nullable":false,"precision":-1},` +
		`"value":{"type":"ARRAY","nullable":true,"component":{"type":"STRUCT","nullable":true,"fields":[{"name":"a","case_sensitive":false,"columntype":{"type":"INTEGER","nullable":false},"unused":false}]}}},"unused":false}],` +
		`"materialized":true,"properties":{"connectors":{"value":"[{\"name\": \"it's\"}]"},"materialized":{"value":"true"}},"primary_key":["Id"]}`
	if d := cmp.Diff(want, got); d != "" {
		t.Fatal(d)
	}
	if len(p.Views) != 2 || !p.Views[0].Materialized || p.Views[1].Materialized || p.Views[0].Query != `SELECT * FROM "T"` {
		t.Fatalf("%+v", p.Views)
	}
}

// The scanner agrees with encoding/json about what is JSON.
func FuzzSkipValue(f *testing.F) {
	for _, s := range []string{`{"a":[1,2.5e3,"x\u00e9",null,true]}`, `[`, `"\ud800"`, "-0", "01", `{"a":}`, "\"\x01\"", `[1,]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if !utf8.Valid(b) || strings.Count(string(b), "[")+strings.Count(string(b), "{") > 100 {
			return
		}
		i := skipSpace(b, 0)
		n, ok := skipValue(b, i, 0)
		ok = ok && n <= len(b) && skipSpace(b, n) == len(b)
		if want := json.Valid(b); ok != want && !strings.Contains(string(b), `\u`) { // surrogates are ours to refuse
			t.Fatalf("%q: got %v, encoding/json says %v", b, ok, want)
		}
	})
}

// No body makes the parser panic, and however it is cut, the same records
// come out.
func FuzzFeed(f *testing.F) {
	for _, s := range []string{
		`[{"insert":{"id":1,"qty":2}},{"delete":{"id":1}}]`, "{\"insert\":{\"id\":1}}\n{\"insert\":{\"id\":\"x\"}}", `[{"insert":`, "\x1f\x8b\x08", `}{"insert":[1,2,"é"]}`, `"a""b"`, `[[]]`, `12 [{}]`,
	} {
		f.Add([]byte(s), 3, true)
		f.Add([]byte(s), 1, false)
	}
	prog, err := ParseProgram(testSQL)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte, cut int, array bool) {
		pc := ParserConfig{Format: "json", Update: InsertDelete, Array: array}
		run := func(size int) (ops []Op, num int) {
			p := newParser(prog.Table("orders"), pc, false)
			var errs ParseErrors
			for i := 0; ; i += size {
				end := i >= len(b)
				var part []byte
				if !end {
					part = b[i:min(i+size, len(b))]
				}
				entries, aerr := p.Feed(part, end, &errs)
				if aerr != nil {
					t.Fatal(aerr)
				}
				for _, e := range entries {
					ops = append(ops, e.Ops...)
				}
				if end {
					return ops, errs.Num
				}
			}
		}
		whole, errsWhole := run(len(b) + 1)
		parts, errsParts := run(max(1, cut%16))
		if d := cmp.Diff(whole, parts); d != "" || errsWhole != errsParts {
			t.Fatalf("cut into pieces, %q gives something else (%d and %d errors):\n%s", b, errsWhole, errsParts, d)
		}
	})
}

// The two ways to read an array, the quick one and the one that explains, are
// one.
func TestFastPathIsThePath(t *testing.T) {
	prog := program(t, testSQL)
	rapid.Check(t, func(rt *rapid.T) {
		var b strings.Builder
		b.WriteString("[")
		n := rapid.IntRange(0, 4).Draw(rt, "n")
		for i := range n {
			if i > 0 {
				b.WriteString(",")
			}
			verb := rapid.SampledFrom([]string{"insert", "delete", "update", "upsert"}).Draw(rt, "verb")
			row := rapid.SampledFrom([]string{
				`{"id":1,"qty":2}`, `{"qty":2,"id":3,"x":{}}`, `[1,2,"x"]`, `{"id":"x"}`, `{}`, `{"ID": 5 , "note":"a\"b"}`, `null`, `{"id":1,"qty":null}`, `[9]`,
			}).Draw(rt, "row")
			fmt.Fprintf(&b, `{ %q : %s }`, verb, row)
		}
		b.WriteString("]")
		doc := []byte(b.String())
		table := rapid.SampledFrom([]string{"orders", "events"}).Draw(rt, "table")
		pc := ParserConfig{Format: "json", Update: InsertDelete, Array: true}
		var slow, fast Entry
		var errs ParseErrors
		sp, fp := newParser(prog.Table(table), pc, false), newParser(prog.Table(table), pc, false)
		sp.document(doc, &slow, &errs)
		_, ok := fp.fastArray(doc, 0, &fast)
		if !ok {
			if len(fast.Ops) != 0 {
				rt.Fatal("the quick way left something behind")
			}
			return
		}
		if errs.Num != 0 || sp.last != fp.last || slow.Records != fast.Records {
			rt.Fatalf("%s: %d errors, %d and %d records", doc, errs.Num, slow.Records, fast.Records)
		}
		if len(slow.Ops)+len(fast.Ops) > 0 {
			if d := cmp.Diff(slow.Ops, fast.Ops); d != "" {
				rt.Fatal(d)
			}
		}
	})
}

// Beside the engine stands a dumb model: a map, and a list of what each token
// covers. They are compared over random histories.
func TestEngineAgainstADumbModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		r := newRig(t, Config{Model: ModelExactlyOnce, Enterprise: true})
		type op struct{ key, val int } // val < 0: delete
		committed := map[int]int{}
		var queued [][]op
		var inTxn []op
		open, asked := false, false
		var tokens []string
		apply := func(ops []op) {
			for _, o := range ops {
				if o.val < 0 {
					delete(committed, o.key)
				} else {
					committed[o.key] = o.val
				}
			}
		}
		step := func(commit bool) {
			all := inTxn
			for _, q := range queued {
				all = append(all, q...)
			}
			had := len(queued) > 0
			queued = nil
			if asked && had {
				open = true
			}
			if open && !commit {
				inTxn = all
				return
			}
			apply(all)
			inTxn, open = nil, false
		}
		for range rapid.IntRange(1, 30).Draw(rt, "events") {
			switch rapid.SampledFrom([]string{"send", "send", "step", "start", "commit", "crash", "checkpoint"}).Draw(rt, "event") {
			case "send":
				var ops []op
				var parts []string
				for range rapid.IntRange(1, 3).Draw(rt, "n") {
					o := op{rapid.IntRange(0, 3).Draw(rt, "key"), rapid.IntRange(-1, 5).Draw(rt, "val")}
					ops = append(ops, o)
					if o.val < 0 {
						parts = append(parts, fmt.Sprintf(`{"delete":{"id":%d}}`, o.key))
					} else {
						parts = append(parts, fmt.Sprintf(`{"insert":{"id":%d,"qty":%d}}`, o.key, o.val))
					}
				}
				tokens = append(tokens, r.ok("orders", "["+strings.Join(parts, ",")+"]"))
				queued = append(queued, ops)
			case "step":
				if r.WantsStep() {
					r.Step()
					step(false)
				}
			case "start":
				if _, err := r.StartTransaction(); (err == nil) == asked {
					rt.Fatalf("start: %v, asked %v", err, asked)
				}
				asked = true
			case "commit":
				err := r.CommitTransaction()
				if (err == nil) != asked {
					rt.Fatalf("commit: %v, asked %v", err, asked)
				}
				if !asked {
					break
				}
				asked = false
				if open {
					for r.WantsStep() && r.Stats().Global.TransactionStatus != "NoTransaction" {
						r.Step()
					}
					step(true)
				}
			case "checkpoint":
				if _, err := r.RequestCheckpoint(); err != nil {
					rt.Fatal(err)
				}
				for r.AdvanceCheckpoint() {
					continue
				}
			case "crash":
				r.Crash(KeepByModel)
				// exactly_once: what was ingested stays, an open transaction
				// is committed, what was queued is lost.
				apply(inTxn)
				inTxn, open, asked, queued, tokens = nil, false, false, nil, nil
			}
			var want []string
			for k, v := range committed {
				want = append(want, fmt.Sprintf(`{"id":%d,"qty":%d,"note":null}`, k, v))
			}
			got := r.Dump("orders")
			if d := cmp.Diff(map[string]bool{}, diffSets(want, got)); d != "" {
				rt.Fatal(d)
			}
			g := r.Stats().Global
			if g.TotalCompletedSteps > g.TotalInitiatedSteps || g.TotalCompletedRecords > g.TotalProcessedRecords || g.TotalProcessedRecords+g.BufferedInputRecords > g.TotalInputRecords {
				rt.Fatalf("%+v", g)
			}
			for i, tok := range tokens {
				c, err := r.CompletionStatus(tok)
				if err != nil {
					rt.Fatal(err)
				}
				if (c.Step == nil) != (len(tokens)-i <= len(queued)) {
					rt.Fatalf("token %d of %d, %d queued: %+v", i, len(tokens), len(queued), c)
				}
			}
		}
	})
}

func diffSets(a, b []string) map[string]bool {
	out := map[string]bool{}
	for _, s := range a {
		out[s] = true
	}
	for _, s := range b {
		if out[s] {
			delete(out, s)
		} else {
			out[s] = false
		}
	}
	return out
}
