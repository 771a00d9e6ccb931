package e2e

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// form says how the two sides' texts of a value are compared.
type form int

const (
	asText form = iota
	asDecimal
	asFloat
	asTime
	asJSON
)

// column is one column of the table of every type, with two values and what
// the destination is to hold for them; want "" is the text that Postgres has.
type column struct {
	name, typ string
	values    [2]string
	form      form
	want      [2]string
	since     int // the server's version, 0 for all
}

// typesOf gives the columns of everyType that the server takes.
func typesOf(t *testing.T, pg *harness.Postgres) []column {
	t.Helper()
	version := major(t, pg)
	return slices.DeleteFunc(slices.Clone(everyType), func(c column) bool { return version < c.since })
}

// everyType has a column for each row of the matrix of types.
var everyType = []column{
	{name: "b", typ: "boolean", values: [2]string{"true", "false"}},
	{name: "i2", typ: "smallint NOT NULL DEFAULT 7", values: [2]string{"-32768", "32767"}},
	{name: "i4", typ: "integer", values: [2]string{"-2147483648", "2147483647"}},
	{name: "i8", typ: "bigint", values: [2]string{"-9223372036854775808", "9223372036854775807"}},
	{name: "o", typ: "oid", values: [2]string{"0", "4294967295"}},
	{name: "x", typ: "xid", values: [2]string{"'3'", "'4294967295'"}},
	{name: "x8", typ: "xid8", values: [2]string{"'3'", "'18446744073709551615'"}},
	{name: "r4", typ: "real", values: [2]string{"1e-45", "'3.4028235e+38'"}, form: asFloat},
	{name: "r8", typ: "double precision", values: [2]string{"-0.1", "'1.7976931348623157e+308'"}, form: asFloat},
	{name: "n12", typ: "numeric(12, 2)", values: [2]string{"-9999999999.99", "0.01"}, form: asDecimal},
	{name: "n38", typ: "numeric(38, 0)", values: [2]string{"-99999999999999999999999999999999999999", "1"}, form: asDecimal},
	{name: "nsmall", typ: "numeric(3, 5)", values: [2]string{"0.00999", "-0.00001"}, form: asDecimal, since: 15},
	{name: "nround", typ: "numeric(3, -2)", values: [2]string{"99900", "-100"}, form: asDecimal, since: 15},
	{name: "nbare", typ: "numeric", values: [2]string{"1234567890123456789012345678.0123456789", "-5"}, form: asDecimal},
	{name: "nwide", typ: "numeric(60, 10)", values: [2]string{"12345.0123456789", "-5"}, form: asDecimal},
	{name: "t", typ: "text", values: [2]string{`E'line\nbreak "q" \\ ☃'`, "''"}},
	{name: "vc", typ: "varchar(20)", values: [2]string{"'blank '", "'x'"}},
	{name: "nm", typ: "name", values: [2]string{"'n'", "'N N'"}},
	{name: "ch", typ: `"char"`, values: [2]string{"'c'", "'d'"}},
	{name: "bp", typ: "char(5)", values: [2]string{"'ab'", "'abcde'"}, want: [2]string{"ab   ", "abcde"}},
	{name: "by", typ: "bytea", values: [2]string{`'\x00ff10'`, `'\x'`}, want: [2]string{"00ff10", ""}},
	{name: "u", typ: "uuid", values: [2]string{"'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "'00000000-0000-0000-0000-000000000000'"}},
	{name: "d", typ: "date", values: [2]string{"'0001-01-01'", "'9999-12-31'"}},
	{name: "ti", typ: "time", values: [2]string{"'23:59:59.999999'", "'00:00'"}, form: asTime},
	{name: "tz", typ: "timetz", values: [2]string{"'04:05:06.7-08:30'", "'00:00+00'"}},
	{name: "ts", typ: "timestamp", values: [2]string{"'2026-01-02 03:04:05.123456'", "'0001-01-01'"}, form: asTime},
	{name: "tstz", typ: "timestamptz", values: [2]string{"'2026-01-02 03:04:05.5+02'", "'9999-12-31 23:59:59+00'"}, form: asTime},
	{name: "iv", typ: "interval", values: [2]string{"'1 year 2 mons 3 days 04:05:06.7'", "'-1 s'"}},
	{name: "js", typ: "json", values: [2]string{`'{"a": [1, 2.50, "x"]}'`, `'"s"'`}, form: asJSON},
	{name: "jb", typ: "jsonb", values: [2]string{`'{"b": {"c": null}}'`, `'[true]'`}, form: asJSON},
	{name: "mo", typ: "money", values: [2]string{"'1234.5'", "'-1'"}},
	{name: "ine", typ: "inet", values: [2]string{"'192.168.0.1/24'", "'::1'"}, want: [2]string{"192.168.0.1/24", "::1"}},
	{name: "ci", typ: "cidr", values: [2]string{"'10.0.0.0/8'", "'::/0'"}},
	{name: "ma", typ: "macaddr", values: [2]string{"'08:00:2b:01:02:03'", "'ff:ff:ff:ff:ff:ff'"}},
	{name: "bi", typ: "bit(3)", values: [2]string{"B'101'", "B'000'"}},
	{name: "vb", typ: "bit varying", values: [2]string{"B'1'", "B''"}},
	{name: "pt", typ: "point", values: [2]string{"'(1.5,-2)'", "'(0,0)'"}},
	{name: "bx", typ: "box", values: [2]string{"'(3,4),(1,2)'", "'(0,0),(0,0)'"}},
	{name: "pa", typ: "path", values: [2]string{"'[(1,2),(3,4)]'", "'((1,2),(3,4))'"}},
	{name: "tsv", typ: "tsvector", values: [2]string{"'a:1 b:2'", "''"}},
	{name: "jp", typ: "jsonpath", values: [2]string{"'$.a'", "'$'"}},
	{name: "lsn", typ: "pg_lsn", values: [2]string{"'16/B374D848'", "'0/0'"}},
	{name: "rc", typ: "regclass", values: [2]string{"'pg_class'", "'pg_type'"}},
	{name: "iv2", typ: "int2vector", values: [2]string{"'1 2 3'", "''"}},
	{name: "en", typ: "mood", values: [2]string{"'so so'", "'happy'"}},
	{name: "dt", typ: "dtext", values: [2]string{"'text'", "''"}},
	{name: "dn", typ: "dmoney", values: [2]string{"12.50", "-0.01"}, form: asDecimal},
	{name: "dd", typ: "dday", values: [2]string{"'2026-01-02'", "'2026-02-03'"}},
	{name: "di", typ: "dint", values: [2]string{"1", "2147483647"}},
	{name: "db", typ: "dbool", values: [2]string{"true", "false"}},
	{name: "dj", typ: "djson", values: [2]string{`'{"a":1}'`, `'[]'`}, form: asJSON},
	{name: "df", typ: "dfloat", values: [2]string{"0.5", "-2e300"}, form: asFloat},
	{name: "dby", typ: "dbytes", values: [2]string{`'\x00ff'`, `'\x'`}, want: [2]string{"00ff", ""}},
	{name: "ddi", typ: "ddint", values: [2]string{"3", "4"}},
	{name: "den", typ: "dmood", values: [2]string{"'happy'", "'so so'"}},
	{name: "ct", typ: "citext", values: [2]string{"'MiXed'", "''"}},
	{name: "act", typ: "citext[]", values: [2]string{"'{A,b}'", "'{}'"}, form: asJSON, want: [2]string{`["A","b"]`, "[]"}},
	{name: "hs", typ: "hstore", values: [2]string{`'"a"=>"1", "b c"=>NULL'`, "''"}},
	{name: "xm", typ: "xml", values: [2]string{"'<a>1</a>'", "'<b/>'"}},
	{name: "ma8", typ: "macaddr8", values: [2]string{"'08:00:2b:01:02:03:04:05'", "'ff:ff:ff:ff:ff:ff:ff:ff'"}},
	{name: "snap", typ: "pg_snapshot", values: [2]string{"'10:20:10,14'", "'1:1:'"}},
	{name: "tdi", typ: "tid", values: [2]string{"'(0,1)'", "'(4294967295,65535)'"}},
	{name: "da", typ: "dints", values: [2]string{"'{1,2}'", "'{}'"}, form: asJSON, want: [2]string{"[1,2]", "[]"}},
	{name: "rg", typ: "int4range", values: [2]string{"'[1,5)'", "'empty'"}},
	{name: "rt", typ: "tsrange", values: [2]string{`'["2024-01-01 00:00:00",infinity]'`, "'(,)'"}},
	{name: "mr", typ: "int4multirange", values: [2]string{"'{[1,3),[5,7)}'", "'{}'"}},
	{name: "co", typ: "pair", values: [2]string{`ROW(1, 'x"y, (z) ')`, "ROW(NULL, '')"}},
	{name: "ai", typ: "integer[]", values: [2]string{"'{1,NULL,3}'", "'{}'"}, form: asJSON, want: [2]string{"[1,null,3]", "[]"}},
	{name: "aii", typ: "bigint[][]", values: [2]string{"'{{1,2},{3,9223372036854775807}}'", "'{}'"}, form: asJSON, want: [2]string{"[[1,2],[3,9223372036854775807]]", "[]"}},
	{
		name: "at", typ: "text[]", values: [2]string{`ARRAY['a,b', 'c"d', E'e\\f', ' sp ', '', 'NULL', NULL, '{}', '☃']`, "'{x}'"}, form: asJSON,
		want: [2]string{`["a,b","c\"d","e\\f"," sp ","","NULL",null,"{}","☃"]`, `["x"]`},
	},
	{name: "ab", typ: "boolean[]", values: [2]string{"'{t,f}'", "'{NULL}'"}, form: asJSON, want: [2]string{"[true,false]", "[null]"}},
	{name: "af", typ: "double precision[]", values: [2]string{"'{0.5,-2}'", "'{100}'"}, form: asJSON, want: [2]string{"[0.5,-2]", "[100]"}},
	{name: "an", typ: "numeric(8, 2)[]", values: [2]string{"'{1.50,-2.25}'", "'{}'"}, form: asJSON, want: [2]string{`["1.50","-2.25"]`, "[]"}},
	{name: "ay", typ: "bytea[]", values: [2]string{`ARRAY['\x00ff'::bytea]`, "'{}'"}, form: asJSON, want: [2]string{"[[0,255]]", "[]"}},
	{name: "ats", typ: "date[]", values: [2]string{"'{2026-01-02}'", "'{NULL}'"}, form: asJSON, want: [2]string{`["2026-01-02"]`, "[null]"}},
	{name: "au", typ: "uuid[]", values: [2]string{"'{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}'", "'{}'"}, form: asJSON, want: [2]string{`["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]`, "[]"}},
	{name: "aj", typ: "jsonb[]", values: [2]string{`ARRAY['{"a": "b,c"}'::jsonb]`, "'{}'"}, form: asJSON, want: [2]string{`["{\"a\": \"b,c\"}"]`, "[]"}},
	{name: "ae", typ: "mood[]", values: [2]string{`'{"so so",happy}'`, "'{}'"}, form: asJSON, want: [2]string{`["so so","happy"]`, "[]"}},
	{name: "ad", typ: "dint[]", values: [2]string{"'{1,2}'", "'{}'"}, form: asJSON, want: [2]string{"[1,2]", "[]"}},
	{name: "abx", typ: "box[]", values: [2]string{"'{(3,4),(1,2);(1,1),(0,0)}'", "'{}'"}},
	{name: "select", typ: "text", values: [2]string{"'word of the language'", "''"}},
	{name: "Mixed Case", typ: "integer", values: [2]string{"1", "2"}},
	{name: `q"uote`, typ: "integer", values: [2]string{"1", "2"}},
	{name: "größe", typ: "integer", values: [2]string{"1", "2"}},
}

const everyTypeTypes = `
CREATE TYPE mood AS ENUM ('so so', 'happy');
CREATE TYPE pair AS (a integer, b text);
CREATE DOMAIN dtext AS text;
CREATE DOMAIN dmoney AS numeric(12, 2) CHECK (VALUE < 1000);
CREATE DOMAIN dday AS date;
CREATE DOMAIN dint AS integer CHECK (VALUE > 0);
CREATE DOMAIN dbool AS boolean;
CREATE DOMAIN djson AS jsonb;
CREATE DOMAIN dfloat AS double precision;
CREATE DOMAIN dbytes AS bytea;
CREATE DOMAIN ddint AS dint CHECK (VALUE < 100);
CREATE DOMAIN dmood AS mood;
CREATE EXTENSION citext;
CREATE EXTENSION hstore;
CREATE DOMAIN dints AS integer[];
`

func quoted(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

// createEveryType makes the table and gives the statement that inserts both
// rows of values and one of NULLs.
func createEveryType(t *testing.T, pg *harness.Postgres) (insert string) {
	t.Helper()
	var defs, names []string
	values := [3][]string{{"1"}, {"2"}, {"3"}}
	for _, c := range typesOf(t, pg) {
		defs = append(defs, quoted(c.name)+" "+c.typ)
		names = append(names, quoted(c.name))
		for i, v := range c.values {
			values[i] = append(values[i], v)
		}
		null := "NULL"
		if strings.Contains(c.typ, "NOT NULL") {
			null = "DEFAULT"
		}
		values[2] = append(values[2], null)
	}
	execSQL(t, pg, everyTypeTypes+`CREATE TABLE "Every Type" (id bigint PRIMARY KEY, `+strings.Join(defs, ", ")+", doubled bigint GENERATED ALWAYS AS (id * 2) STORED)")
	for i := range values {
		insert += fmt.Sprintf(`INSERT INTO "Every Type" (id, %s) VALUES (%s);`, strings.Join(names, ", "), strings.Join(values[i], ", "))
	}
	return insert
}

// verb runs pgsource feldera-sql.
func verb(t *testing.T, env map[string]string, args ...string) harness.RunResult {
	t.Helper()
	return runPgsource(t, env, append([]string{"feldera-sql"}, args...)...)
}

// says fails the test unless the run ended with code and its output has all
// parts.
func says(t *testing.T, r harness.RunResult, code int, parts ...string) {
	t.Helper()
	if r.ExitCode != code {
		t.Errorf("exit code %d, want %d", r.ExitCode, code)
	}
	for _, p := range parts {
		if !strings.Contains(r.Stdout+r.Stderr, p) {
			t.Errorf("it does not say %q", p)
		}
	}
	if t.Failed() {
		t.Fatalf("stdout:\n%s\nstderr:\n%s", r.Stdout, r.Stderr)
	}
}

// canonical gives one text for all texts of the same value.
func canonical(t *testing.T, f form, s string) string {
	t.Helper()
	if s == "NULL" {
		return s
	}
	switch f {
	case asText:
	case asDecimal:
		return decimal(s)
	case asFloat:
		n, err := strconv.ParseFloat(s, 64)
		if err != nil {
			t.Fatal(err)
		}
		return strconv.FormatFloat(float64(float32(n)), 'g', -1, 32) + " " + strconv.FormatFloat(n, 'g', 6, 64)
	case asTime:
		for _, layout := range []string{"2006-01-02 15:04:05.999999999", "2006-01-02 15:04:05.999999999Z07", "2006-01-02T15:04:05.999999999Z07:00", "15:04:05.999999999"} {
			if at, err := time.Parse(layout, s); err == nil {
				return at.UTC().Format(time.RFC3339Nano)
			}
		}
		t.Fatalf("%q is no time", s)
	case asJSON:
		dec := json.NewDecoder(strings.NewReader(s))
		dec.UseNumber()
		var v any
		if err := dec.Decode(&v); err != nil {
			t.Fatalf("%q: %v", s, err)
		}
		out, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	return s
}

func simText(v any) string {
	switch x := v.(type) {
	case nil:
		return "NULL"
	case []byte:
		return hex.EncodeToString(x)
	case float64:
		return strconv.FormatFloat(x, 'g', -1, 64)
	}
	return fmt.Sprint(v)
}

// assertEveryType compares the table column by column, so that a failure names
// the type.
func assertEveryType(t *testing.T, pg *harness.Postgres, sim *felderasim.Sim) {
	t.Helper()
	selected, types := []string{"id"}, typesOf(t, pg)
	for _, c := range types {
		selected = append(selected, quoted(c.name)+"::text")
	}
	source, err := pg.Rows(t.Context(), `SELECT `+strings.Join(selected, ", ")+` FROM "Every Type" ORDER BY id`)
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]map[string]any{}
	for _, row := range sim.Rows(`"Every Type"`) {
		rows[fmt.Sprint(row["id"])] = row
	}
	if len(rows) != len(source) {
		t.Fatalf("the destination has %d rows, the source %d", len(rows), len(source))
	}
	for _, row := range source {
		got := rows[row[0]]
		for i, c := range types {
			want := row[i+1]
			if n, _ := strconv.Atoi(row[0]); n <= 2 && c.want != [2]string{} {
				want = c.want[n-1]
			}
			has := simText(got[c.name])
			if a, b := canonical(t, c.form, want), canonical(t, c.form, has); a != b {
				t.Errorf("row %s, %s %s: source %q, destination %q", row[0], c.name, c.typ, a, b)
			}
		}
	}
}

// Every type of the matrix: the statements that are written for a table make a
// pipeline that takes its rows, and holds them.
func TestFelderaSQLCarriesEveryType(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	insert := createEveryType(t, pg)
	execSQL(t, pg, `CREATE TABLE whole (a text, n integer); ALTER TABLE whole REPLICA IDENTITY FULL;
		CREATE TABLE two (b integer, a integer, v text, PRIMARY KEY (a, b))`)
	sim := startSim(t, felderasim.Options{})
	sim.RemovePipeline()
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": `public."Every Type",public.whole,public.two`})

	printed := verb(t, env)
	says(t, printed, 0, "-- holdfast:begin", `CREATE TABLE "Every Type" (`, "PRIMARY KEY (id)", "doubled", "PRIMARY KEY (a, b)", "count twice", "holdfast_progress")
	if strings.Contains(printed.Stdout, "doubled BIGINT") {
		t.Error("a generated column is declared although it is not published")
	}
	if _, err := felderasim.New(felderasim.Options{SQL: printed.Stdout}); err != nil {
		t.Fatalf("%v in\n%s", err, printed.Stdout)
	}

	says(t, verb(t, env, "-diff"), 65, "there is no such pipeline")
	applied := verb(t, env, "-apply")
	says(t, applied, 0, "creating the pipeline", "program: Success", "pipeline: Running", `pipeline "p" runs with 4 tables`)
	if applied.Stdout != "pipeline \"p\" runs with 4 tables\n" {
		t.Errorf("progress is on stdout: %q", applied.Stdout)
	}
	if sim.ProgramCode() != printed.Stdout {
		t.Error("what was applied is not what is printed")
	}
	says(t, verb(t, env, "-diff"), 0, "no difference")
	says(t, verb(t, env, "-apply"), 0, "has these tables already")

	waitHealthy(t, startPgsource(t, env))
	execSQL(t, pg, insert)
	execSQL(t, pg, `INSERT INTO whole VALUES ('x', 1), ('x', 1), (NULL, 2); DELETE FROM whole WHERE n = 2; INSERT INTO two VALUES (1, 2, 'x'), (3, 4, 'y'); DELETE FROM two WHERE a = 2`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEveryType(t, pg, sim)
	execSQL(t, pg, `UPDATE "Every Type" SET "Mixed Case" = 5 WHERE id = 3; UPDATE "Every Type" SET id = 20 WHERE id = 2; DELETE FROM "Every Type" WHERE id = 20`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEveryType(t, pg, sim)
	if n := sim.Count("whole"); n != 2 {
		t.Errorf("the table without a key has %d rows, want 2", n)
	}
	if diff := cmp.Diff([]string{`{"b":3,"a":4,"v":"y"}`}, sim.Dump("two")); diff != "" {
		t.Error(diff)
	}
}

// The source changes under a running pipeline: -diff says what is needed,
// -apply refuses to stop the pipeline, and does it when told to. Views and
// tables of the user's own stay.
func TestFelderaSQLFollowsAChangedSource(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{SQL: "-- mine\nCREATE TABLE own (id BIGINT NOT NULL PRIMARY KEY);\n"})
	env := pgsourceEnv(pg, sim)
	says(t, verb(t, env, "-apply"), 65, "-- holdfast:begin", "no part that belongs to pgsource")
	if !sim.Deployed() || !strings.HasPrefix(sim.ProgramCode(), "-- mine") {
		t.Fatal("a refused change has changed something")
	}

	user := "-- mine\nCREATE TABLE own (id BIGINT NOT NULL PRIMARY KEY);\n-- holdfast:begin\n-- holdfast:end\nCREATE VIEW v AS SELECT * FROM own;\n"
	sim2 := startSim(t, felderasim.Options{SQL: user})
	env["FELDERA_URL"] = sim2.URL()
	says(t, verb(t, env, "-apply"), 65, "-restart", "loses all rows")
	says(t, verb(t, env, "-apply", "-restart"), 0, "table orders is new", "what it holds is lost", "program: Success", "pipeline: Running")
	for _, part := range []string{"-- mine\nCREATE TABLE own", "CREATE VIEW v AS", "CREATE TABLE orders"} {
		if !strings.Contains(sim2.ProgramCode(), part) {
			t.Errorf("the program lacks %q", part)
		}
	}
	says(t, verb(t, env, "-diff"), 0)

	execSQL(t, pg, `ALTER TABLE orders ADD COLUMN "Extra" jsonb, ALTER amount TYPE numeric(14, 4), ALTER customer DROP NOT NULL, ALTER placed TYPE time USING NULL;
		CREATE TABLE added (id integer PRIMARY KEY);
		ALTER TABLE items DROP CONSTRAINT items_pkey, ADD PRIMARY KEY (id, sku), DROP COLUMN order_id`)
	env["PGSOURCE_TABLES"] = "public.orders,public.items,public.added"
	says(t, verb(t, env, "-diff"), 65,
		`table orders, column "Extra": the table has no such column`, `"Extra" VARIANT`,
		`column "amount": the source has numeric(14,4), which needs DECIMAL(14,4); the table has DECIMAL(12,2)`,
		`column "customer": it can be NULL in the source`,
		`column "placed": the source has time without time zone, which needs TIME; the table has TIMESTAMP`,
		"table added: the program has no such table", "CREATE TABLE added (",
		`table items: the source identifies rows by ("id", "sku"), the table by ("id")`,
		`table items, column "order_id": the table has it as NOT NULL and the source has no such column`)
	var parsed struct {
		OK          bool
		Differences []struct{ Table, Column, Kind string }
	}
	asJSON := verb(t, env, "-diff", "-json")
	if err := json.Unmarshal([]byte(asJSON.Stdout), &parsed); err != nil || parsed.OK || len(parsed.Differences) != 7 || asJSON.ExitCode != 65 {
		t.Errorf("%v %+v %s", err, parsed, asJSON.Stdout)
	}
	says(t, verb(t, env, "-apply", "-restart"), 0, "table added is new")
	says(t, verb(t, env, "-diff"), 0, "no difference")
	waitHealthy(t, startPgsource(t, env))
}

// Keys and column lists that are not the plain ones.
func TestFelderaSQLReadsTheCatalogue(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE TABLE covering (b integer, a integer, v text, PRIMARY KEY (b, a) INCLUDE (v));
		CREATE TABLE by_index (id integer PRIMARY KEY, a integer NOT NULL); CREATE UNIQUE INDEX other ON by_index (a); ALTER TABLE by_index REPLICA IDENTITY USING INDEX other;
		CREATE TABLE parted (id integer, day date, PRIMARY KEY (id, day)) PARTITION BY RANGE (day);
		CREATE PUBLICATION holdfast FOR TABLE orders (id, customer, paid), covering, by_index, parted WITH (publish_via_partition_root)`)
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": `public.orders=renamed,public.covering,public.by_index="By",public.parted`})
	printed := verb(t, env)
	says(t, printed, 0, "CREATE TABLE renamed (", "customer VARCHAR NOT NULL", "paid BOOLEAN NOT NULL", "column list",
		"CREATE TABLE covering (\n    b INTEGER NOT NULL,\n    a INTEGER NOT NULL,\n    v VARCHAR,\n    PRIMARY KEY (b, a)\n)",
		"CREATE TABLE \"By\" (\n    id INTEGER NOT NULL,\n    a INTEGER NOT NULL,\n    PRIMARY KEY (a)\n)",
		`PRIMARY KEY (id, "day")`)
	if n := strings.Count(printed.Stdout, "column list"); n != 4 {
		t.Errorf("%d columns are said to be left out by the publication, want 4:\n%s", n, printed.Stdout)
	}
	if strings.Contains(printed.Stdout+printed.Stderr, "NOT USABLE") {
		t.Error(printed.Stdout)
	}
}

// What cannot work is said before anything is changed.
func TestFelderaSQLBadInput(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE TABLE keyless (a text, A2 text); CREATE TABLE twice (id integer PRIMARY KEY, n integer, "N" integer); CREATE VIEW v AS SELECT 1 AS one;
		CREATE TABLE later (id integer, PRIMARY KEY (id) DEFERRABLE)`)
	env := pgsourceEnv(pg, sim)
	with := func(changes map[string]string) map[string]string { return merged(env, changes) }

	for _, args := range [][]string{{"-diff", "-apply"}, {"-restart"}, {"-json"}, {"-apply", "-timeout", "0s"}, {"-nosuch"}, {"argument"}} {
		says(t, verb(t, env, args...), 64)
	}
	says(t, verb(t, with(map[string]string{"PGSOURCE_TABLES": "public.nosuch"})), 65, "the database has no such table")
	says(t, verb(t, with(map[string]string{"PGSOURCE_TABLES": "public.v"})), 65, "it is no table")
	says(t, verb(t, with(map[string]string{"PGSOURCE_DSN": "postgres://postgres@127.0.0.1:1/postgres"})), 69, "127.0.0.1")
	says(t, verb(t, with(map[string]string{"FELDERA_URL": "http://127.0.0.1:1"}), "-diff"), 69, "127.0.0.1:1")
	says(t, verb(t, with(map[string]string{"FELDERA_URL": "http://127.0.0.1:1"}), "-apply", "-timeout", "1s"), 69, "-timeout", "trying again", "connection refused")
	says(t, verb(t, with(map[string]string{"FELDERA_URL": sim.BareURL(), "FELDERA_PIPELINE": ""}), "-apply"), 65, "bare pipeline process", "FELDERA_PIPELINE")

	// To print, no pipeline is needed; to compare and to apply it is.
	alone := with(nil)
	delete(alone, "FELDERA_URL")
	delete(alone, "FELDERA_PIPELINE")
	says(t, verb(t, alone), 0, "CREATE TABLE orders (")
	says(t, verb(t, alone, "-diff"), 78, "FELDERA_URL")
	says(t, verb(t, alone, "-apply"), 78, "FELDERA_URL")

	for table, wants := range map[string][]string{
		"twice": {"differ by case alone"},
	} {
		one := with(map[string]string{"PGSOURCE_TABLES": "public." + table})
		printed := verb(t, one)
		says(t, printed, 0, append(wants, "NOT USABLE YET", "CREATE TABLE "+table)...)
		if _, err := felderasim.New(felderasim.Options{SQL: printed.Stdout}); err != nil {
			t.Errorf("%s: %v", table, err)
		}
		says(t, verb(t, one, "-diff"), 65, wants...)
		says(t, verb(t, one, "-apply", "-restart"), 65, wants...)
	}
	// What has no key gets one that the daemon fills.
	for _, table := range []string{"keyless", "later"} {
		one := with(map[string]string{"PGSOURCE_TABLES": "public." + table})
		printed := verb(t, one)
		says(t, printed, 0, `ALTER TABLE "public"."`+table+`" ADD PRIMARY KEY`, `ALTER TABLE "public"."`+table+`" REPLICA IDENTITY FULL`,
			"only inserts", "PRIMARY KEY (holdfast_source, holdfast_partition, holdfast_position, holdfast_sequence)")
		other, err := felderasim.New(felderasim.Options{SQL: printed.Stdout})
		if err != nil {
			t.Fatalf("%s: %v", table, err)
		}
		if err := other.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		says(t, verb(t, merged(one, map[string]string{"FELDERA_URL": other.URL()}), "-diff"), 0, "no difference")
		if err := other.Close(); err != nil {
			t.Error(err)
		}
	}
	if !sim.Deployed() || sim.ProgramPhase() != felderasim.Compiled || sim.ProgramCode() != program {
		t.Error("a refusal has changed the pipeline")
	}
}

// Compilation is watched phase by phase; an error is shown, and a signal ends
// the wait.
func TestFelderaSQLWatchesTheCompilation(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	sim.RemovePipeline()
	env := pgsourceEnv(pg, sim)
	sim.HoldCompile(felderasim.Pending)
	d, err := harness.StartDaemon(harness.DaemonOptions{Program: build(t, "pgsource"), Args: []string{"feldera-sql", "-apply"}, Env: env})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	phases := []felderasim.CompilePhase{felderasim.Pending, felderasim.CompilingSQL, felderasim.SQLCompiled, felderasim.CompilingRust, felderasim.Compiled}
	for i, phase := range phases {
		if _, err := d.WaitLog(ctx, regexp.MustCompile("program: "+string(phase)+"$")); err != nil {
			t.Fatal(err)
		}
		if i+1 < len(phases) {
			sim.HoldCompile(phases[i+1])
		}
	}
	if code, err := d.Wait(ctx); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v", code, err)
	}

	sim.FailRust("error[E0308]: mismatched types")
	sim.RemovePipeline()
	sim.ReleaseCompile()
	says(t, verb(t, env, "-apply"), 65, "program: RustError", "E0308")
	sim.RemovePipeline()
	sim.HoldCompile(felderasim.CompilingRust)
	stopped, err := harness.StartDaemon(harness.DaemonOptions{Program: build(t, "pgsource"), Args: []string{"feldera-sql", "-apply"}, Env: env})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stopped.Close)
	if _, err := stopped.WaitLog(ctx, regexp.MustCompile("program: CompilingRust$")); err != nil {
		t.Fatal(err)
	}
	if err := stopped.Terminate(); err != nil {
		t.Fatal(err)
	}
	if code, err := stopped.Wait(ctx); err != nil || code == 0 {
		t.Fatalf("exit code %d, %v", code, err)
	}
}
