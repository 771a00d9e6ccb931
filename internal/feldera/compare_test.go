package feldera

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
)

// comparedSQL has a column of every type that rows can have.
const comparedSQL = `CREATE TABLE every (
	id BIGINT NOT NULL PRIMARY KEY,
	b BOOLEAN, t TINYINT, s SMALLINT, i INT, u BIGINT UNSIGNED, r REAL, d DOUBLE, n DECIMAL(12, 3), c CHAR(5), v VARCHAR, bin VARBINARY,
	day DATE, clock TIME, ts TIMESTAMP, tz TIMESTAMP WITH TIME ZONE, uid UUID, doc VARIANT,
	arr INT ARRAY, stamps TIMESTAMP ARRAY, blobs VARBINARY ARRAY, sums DECIMAL(6, 2) ARRAY, docs VARIANT ARRAY,
	m MAP<VARCHAR, DECIMAL(6, 2)>, ro ROW(a INT NULL, b VARBINARY NULL, c TIMESTAMP NULL), odd MAP<INT, INT>
) WITH ('materialized' = 'true');`

// pgColumns are the same columns in Postgres.
var pgColumns = []struct {
	name    string
	oid     uint32
	element uint32
}{
	{"id", 20, 0},
	{"b", 16, 0},
	{"t", 21, 0},
	{"s", 21, 0},
	{"i", 23, 0},
	{"u", 1700, 0},
	{"r", 700, 0},
	{"d", 701, 0},
	{"n", 1700, 0},
	{"c", 1042, 0},
	{"v", 25, 0},
	{"bin", 17, 0},
	{"day", 1082, 0},
	{"clock", 1083, 0},
	{"ts", 1114, 0},
	{"tz", 1184, 0},
	{"uid", 2950, 0},
	{"doc", 3802, 0},
	{"arr", 1007, 23},
	{"stamps", 1115, 1114},
	{"blobs", 1001, 17},
	{"sums", 1231, 1700},
	{"docs", 3807, 3802},
	{"m", 3802, 0},
	{"ro", 3802, 0},
	{"odd", 3802, 0},
}

func everyRelation() *decode.Relation {
	rel := &decode.Relation{ID: 1, Schema: "public", Name: "every", Identity: decode.IdentityDefault}
	for _, c := range pgColumns {
		rel.Columns = append(rel.Columns, decode.Column{Name: c.name, TypeOID: c.oid, Element: c.element, Key: c.name == "id"})
	}
	return rel
}

// pgRow makes a row of Postgres' texts; "-" is NULL.
func pgRow(t *testing.T, rel *decode.Relation, texts ...string) []decode.Value {
	t.Helper()
	row := make([]decode.Value, len(rel.Columns))
	for i := range row {
		row[i] = decode.Value{State: decode.Null}
		if i < len(texts) && texts[i] != "-" {
			v, refused := decode.TextValue(rel.Columns[i].TypeOID, []byte(texts[i]))
			if refused != nil {
				t.Fatal(refused)
			}
			row[i] = v
		}
	}
	return row
}

// answers gives the images of all rows that a query finds.
func answers(t *testing.T, c *Client, m *Comparer, sql string) (images []Image) {
	t.Helper()
	err := c.Query(t.Context(), Query{Select: sql, OrderBy: m.OrderBy()}, func(row []byte) error {
		im, err := m.Answer(row, true)
		images = append(images, im)
		return err
	})
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return images
}

// What was sent compares as equal to what comes back, whatever form either of
// them has.
func TestComparerEveryType(t *testing.T) {
	sim, c, s := simulated(t, felderasim.Options{SQL: comparedSQL}, Config{})
	tab, rel := table(t, s, "every"), everyRelation()
	e, err := NewEncoder(tab, rel, Policy{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewComparer(e)
	if err != nil {
		t.Fatal(err)
	}
	if left := fmt.Sprint(m.Uncompared()); !strings.Contains(left, "odd") || len(m.Uncompared()) != 1 {
		t.Errorf("not compared: %v", left)
	}
	rows := [][]decode.Value{
		pgRow(t, rel, "1"),
		pgRow(t, rel, "2", "t", "-128", "32767", "-2147483648", "18446744073709551615", "0.1", "0.1", "1.500", "ab   ", "é\"\\\n", `\x00ff`,
			"2026-01-02", "03:04:05.000000", "2026-01-02 03:04:05.120", "2026-01-02 03:04:05.123456+05:30", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11",
			`{"z": [1.50, null, "x"], "a": {"b": 1e2, "a": -0.0}}`, `{1,NULL,3}`, `{"2026-01-02 03:04:05",NULL}`, `{"\\xdead",NULL}`, `{1.5,-0.00}`, `{"{\"b\": 1, \"a\": 2.0}","\"t\""}`,
			`{"b": 1.5, "a": null}`, `{"a": 1, "b": "\\x01ff", "c": "2026-01-02T03:04:05Z"}`),
		pgRow(t, rel, "3", "f", "0", "0", "0", "0", "1e-20", "-0", "-0.001", "", "", `\x`, "0001-01-01", "23:59:59.999999", "9999-12-31 23:59:59.999999",
			"0001-01-01 00:00:00+00", "00000000-0000-0000-0000-000000000000", `"text"`, `{}`, `{}`, `{}`, `{}`, `{}`, `{}`, `{}`),
		pgRow(t, rel, "4", "-", "-", "-", "-", "1", "16777216", "1e+300", "999999999.999", "-", "-", "-", "-", "-", "1969-12-31 23:59:59.999999", "-", "-", `123456789012345678901234567890.12345678`),
		pgRow(t, rel, "-9223372036854775808", "-", "-", "-", "-", "-", "3.4028235e+38", "0.30000000000000004"),
	}
	if _, err := c.Writer(tab).Send(t.Context(), fillFrom(t, e, rows)); err != nil {
		t.Fatal(err)
	}
	if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Count("every") == int64(len(rows)) }); err != nil {
		t.Fatal(err)
	}
	found := make(map[string]Image)
	for _, im := range answers(t, c, m, m.Select()) {
		found[string(im.Key)] = im
	}
	var keys [][]byte
	for _, row := range rows {
		want, err := m.Source(row, true)
		if err != nil {
			t.Fatal(err)
		}
		got, ok := found[string(want.Key)]
		if !ok || got.Sum != want.Sum {
			t.Errorf("%s: found %v, different in %v", m.KeyText(want.Key), ok, m.Different(&want, &got))
			for i, name := range m.Columns() {
				if ok && !bytes.Equal(got.Values[i], want.Values[i]) {
					t.Logf("%s: sent %q, came back %q", name, want.Values[i], got.Values[i])
				}
			}
		}
		keys = append(keys, want.Key)
	}
	if sql, err := m.SelectKeys(keys[1:3]); err != nil || len(answers(t, c, m, sql)) != 2 {
		t.Error(sql, err)
	}
}

func fillFrom(t *testing.T, e *Encoder, rows [][]decode.Value) *Array {
	t.Helper()
	a := &Array{}
	for _, row := range rows {
		if err := a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: e.rel, After: row}); err != nil {
			t.Fatal(err)
		}
	}
	return a
}

// A change of any column is a difference, and in that column alone.
func TestComparerSeesEveryColumn(t *testing.T) {
	_, _, s := simulated(t, felderasim.Options{SQL: comparedSQL}, Config{})
	rel := everyRelation()
	e, err := NewEncoder(table(t, s, "every"), rel, Policy{})
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewComparer(e)
	if err != nil {
		t.Fatal(err)
	}
	base := `"b":true,"t":1,"s":1,"i":1,"u":1,"r":1.5,"d":1.5,"n":1.5,"c":"a","v":"a","bin":"00","day":"2026-01-02","clock":"03:04:05","ts":"2026-01-02T03:04:05",` +
		`"tz":"2026-01-02T03:04:05Z","uid":"00000000-0000-0000-0000-000000000001","doc":"{\"a\":[1]}","arr":[1],"stamps":["2026-01-02T03:04:05"],"blobs":["00"],"sums":[1.50],` +
		`"docs":["1"],"m":{"a":1.00},"ro":{"a":1,"b":"00","c":"2026-01-02T03:04:05"}`
	image := func(members string) Image {
		t.Helper()
		im, err := m.Answer([]byte(`{"holdfast_rows":1,"id":1,`+members+`}`), true)
		if err != nil {
			t.Fatal(members, err)
		}
		return im
	}
	was := image(base)
	for _, c := range []struct{ column, from, to string }{
		{"b", `"b":true`, `"b":false`},
		{"t", `"t":1`, `"t":-1`},
		{"s", `"s":1`, `"s":null`},
		{"i", `"i":1`, `"i":2`},
		{"u", `"u":1`, `"u":18446744073709551615`},
		{"r", `"r":1.5`, `"r":1.5000001`},
		{"d", `"d":1.5`, `"d":1.5000000000000002`},
		{"n", `"n":1.5`, `"n":1.501`},
		{"c", `"c":"a"`, `"c":"a "`},
		{"v", `"v":"a"`, `"v":"A"`},
		{"v", `"v":"a"`, `"v":""`},
		{"v", `"v":"a"`, `"v":null`},
		{"bin", `"bin":"00"`, `"bin":""`},
		{"day", `"day":"2026-01-02"`, `"day":"2026-01-03"`},
		{"clock", `"clock":"03:04:05"`, `"clock":"03:04:05.000000001"`},
		{"ts", `"ts":"2026-01-02T03:04:05"`, `"ts":"2026-01-02T03:04:05.000001"`},
		{"tz", `"tz":"2026-01-02T03:04:05Z"`, `"tz":"2026-01-02T03:04:05+00:01"`},
		{"uid", `0001"`, `0002"`},
		{"doc", `[1]`, `[1,null]`},
		{"doc", `{\"a\":[1]}`, `\"1\"`},
		{"arr", `"arr":[1]`, `"arr":[1,null]`},
		{"stamps", `["2026-01-02T03:04:05"]`, `["2026-01-02T03:04:06"]`},
		{"blobs", `["00"]`, `["0000"]`},
		{"sums", `[1.50]`, `[1.51]`},
		{"docs", `["1"]`, `["\"1\""]`},
		{"m", `{"a":1.00}`, `{"a":1.01}`},
		{"m", `{"a":1.00}`, `{"b":1.00}`},
		{"ro", `"b":"00","c"`, `"b":"01","c"`},
		{"ro", `{"a":1,`, `{`},
	} {
		changed := strings.Replace(base, c.from, c.to, 1)
		if changed == base {
			t.Fatal(c)
		}
		now := image(changed)
		if got := m.Different(&was, &now); len(got) != 1 || got[0] != c.column || now.Sum == was.Sum {
			t.Errorf("%s to %s: different in %v", c.from, c.to, got)
		}
	}
	for _, c := range []struct{ from, to string }{
		{`"r":1.5`, `"r":1.50`},
		{`"d":1.5`, `"d":15e-1`},
		{`"n":1.5`, `"n":"1.500"`},
		{`"bin":"00"`, `"bin":[0]`},
		{`"clock":"03:04:05"`, `"clock":"03:04:05.000"`},
		{`"ts":"2026-01-02T03:04:05"`, `"ts":"2026-01-02 03:04:05.000000"`},
		{`"tz":"2026-01-02T03:04:05Z"`, `"tz":"2026-01-02T03:04:05"`},
		{`{\"a\":[1]}`, ` { \"a\" : [ 1.0e0 ] } `},
		{`{"a":1,"b":"00"`, `{"b":"00","a":1`},
		{`"m":{"a":1.00}`, `"m":{"a":"1"}`},
	} {
		if now := image(strings.Replace(base, c.from, c.to, 1)); now.Sum != was.Sum {
			t.Errorf("%s to %s: different in %v", c.from, c.to, m.Different(&was, &now))
		}
	}
	// What is no row of the table is an answer that counts for nothing.
	for _, row := range []string{
		"", "[]", "null", `{"id":1`, `{"id":"x"}`, `{"id":1,"b":1}`, `{"id":1,"r":"1"}`, `{"id":1,"n":[]}`, `{"id":1,"n":"1e"}`, `{"id":1,"v":1}`, `{"id":1,"bin":"0"}`, `{"id":1,"bin":[256]}`,
		`{"id":1,"bin":"zz"}`, `{"id":1,"day":1}`, `{"id":1,"day":"2026-02-30"}`, `{"id":1,"uid":"x"}`, `{"id":1,"doc":{"a":1}}`, `{"id":1,"doc":"{"}`, `{"id":1,"doc":"1 2"}`,
		`{"id":1,"arr":{}}`, `{"id":1,"arr":["1"]}`, `{"id":1,"ro":{"x":1}}`, `{"id":1,"m":[]}`, `{"id":1,"doc":"` + strings.Repeat("[", 200) + strings.Repeat("]", 200) + `"}`,
		`{"id":99999999999999999999}`, "ERROR: out of memory",
	} {
		if _, err := m.Answer([]byte(row), false); !errors.Is(err, ErrIncomplete) {
			t.Errorf("%q: %v", row, err)
		}
	}
}

// Keys of every type are found again by the literals that name them, and pages
// go on behind the last key.
func TestComparerKeys(t *testing.T) {
	for _, k := range []struct {
		typ    string
		oid    uint32
		values []string // in the order of the column's type
	}{
		{"BOOLEAN", 16, []string{"f", "t"}},
		{"INT", 23, []string{"-2147483648", "0", "7"}},
		{"BIGINT", 20, []string{"-9223372036854775808", "9223372036854775807"}},
		{"BIGINT UNSIGNED", 1700, []string{"0", "5", "18446744073709551615"}},
		{"DOUBLE", 701, []string{"-1e+300", "0.1", "0.30000000000000004"}},
		{"REAL", 700, []string{"0.1", "16777216"}},
		{"DECIMAL(20, 4)", 1700, []string{"-1.5000", "9.00", "10", "1234567890123456.7891", "1234567890123456.7892"}},
		{"VARCHAR", 25, []string{"", "A", "a", `a"b\`, "a'b", "é", "☃"}},
		{"CHAR(3)", 1042, []string{"a  ", "ab "}},
		{"VARBINARY", 17, []string{`\x`, `\x00`, `\x00ff`, `\xde27ad`}},
		{"DATE", 1082, []string{"0001-01-01", "2026-01-02", "9999-12-31"}},
		{"TIME", 1083, []string{"00:00:00", "03:04:05.000001"}},
		{"TIMESTAMP", 1114, []string{"0001-01-01 00:00:00", "2026-01-02 03:04:05.1", "9999-12-31 23:59:59.999999"}},
		{"TIMESTAMP WITH TIME ZONE", 1184, []string{"0001-01-01 00:00:00+00", "2026-01-02 03:04:05.1+01"}},
		{"UUID", 2950, []string{"00000000-0000-0000-0000-000000000001", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"}},
	} {
		for _, two := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,%t", k.typ, two), func(t *testing.T) {
				sql := `CREATE TABLE keyed (k ` + k.typ + ` NOT NULL PRIMARY KEY, x INT)`
				if two {
					sql = `CREATE TABLE keyed (x INT NOT NULL, k ` + k.typ + ` NOT NULL, PRIMARY KEY (k, x))`
				}
				sim, c, s := simulated(t, felderasim.Options{SQL: sql}, Config{})
				rel := &decode.Relation{
					ID: 1, Schema: "public", Name: "keyed", Identity: decode.IdentityDefault,
					Columns: []decode.Column{{Name: "k", TypeOID: k.oid, Key: true}, {Name: "x", TypeOID: 23, Key: two}},
				}
				e, err := NewEncoder(table(t, s, "keyed"), rel, Policy{})
				if err != nil {
					t.Fatal(err)
				}
				m, err := NewComparer(e)
				if err != nil {
					t.Fatal(err)
				}
				var rows [][]decode.Value
				for i, v := range k.values {
					rows = append(rows, pgRow(t, rel, v, "1"))
					if two && i%2 == 0 {
						rows = append(rows, pgRow(t, rel, v, "2"))
					}
				}
				if _, err := c.Writer(e.Table()).Send(t.Context(), fillFrom(t, e, rows)); err != nil {
					t.Fatal(err)
				}
				if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Count("keyed") == int64(len(rows)) }); err != nil {
					t.Fatal(err)
				}
				var after []byte
				for i, row := range rows {
					want, err := m.Source(row, true)
					if err != nil {
						t.Fatal(err)
					}
					one, err := m.SelectKeys([][]byte{want.Key})
					if err != nil {
						t.Fatal(err)
					}
					if got := answers(t, c, m, one); len(got) != 1 || !bytes.Equal(got[0].Key, want.Key) {
						t.Errorf("%s: %d rows by %s", m.KeyText(want.Key), len(got), one)
					}
					page, err := m.SelectPage(after, 1)
					if err != nil {
						t.Fatal(err)
					}
					got := answers(t, c, m, page)
					if len(got) != 1 || !bytes.Equal(got[0].Key, want.Key) {
						t.Fatalf("page %d is not %s: %s", i, m.KeyText(want.Key), page)
					}
					after = got[0].Key
				}
				if page, err := m.SelectPage(after, 1); err != nil || len(answers(t, c, m, page)) != 0 {
					t.Error("there is no end", err)
				}
			})
		}
	}
}

// What cannot be compared is said before anything is read: also a table whose
// key the daemon makes up.
func TestComparerRefuses(t *testing.T) {
	_, _, s := simulated(t, felderasim.Options{SQL: `CREATE TABLE bag (id BIGINT) WITH ('materialized' = 'true'); CREATE TABLE k (id INT ARRAY NOT NULL PRIMARY KEY)`}, Config{})
	_, _, made := simulated(t, felderasim.Options{SQL: `CREATE TABLE made (id BIGINT, holdfast_source VARCHAR NOT NULL, holdfast_partition INTEGER NOT NULL,
		holdfast_position BIGINT NOT NULL, holdfast_sequence BIGINT NOT NULL,
		PRIMARY KEY (holdfast_source, holdfast_partition, holdfast_position, holdfast_sequence))`}, Config{})
	e, err := NewEncoder(table(t, made, "made"), &decode.Relation{ID: 1, Name: "made", Identity: decode.IdentityFull, Columns: []decode.Column{{Name: "id", TypeOID: 20, Key: true}}}, Policy{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewComparer(e); err == nil || !strings.Contains(err.Error(), "change log") {
		t.Error(err)
	}
	for name, col := range map[string]decode.Column{"bag": {Name: "id", TypeOID: 20}, "k": {Name: "id", TypeOID: 1007, Element: 23, Key: true}} {
		e, err := NewEncoder(table(t, s, name), &decode.Relation{ID: 1, Name: name, Identity: decode.IdentityDefault, Columns: []decode.Column{col}}, Policy{})
		if err != nil {
			t.Fatal(err)
		}
		var refused *decode.Refusal
		if _, err := NewComparer(e); !errors.As(err, &refused) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzComparerAnswer: whatever an answer says, it is a row or an error.
func FuzzComparerAnswer(f *testing.F) {
	tab := &Table{Name: "t", spelling: "t", Materialized: true, key: []int{0}, Columns: []Column{
		{Name: "id", Key: true, Type: Type{Name: BigInt}},
		{Name: "doc", Type: typeOf(Variant)},
		{Name: "n", Type: decimal(6, 2)},
		{Name: "arr", Type: arrayOf(typeOf(Varbinary))},
		{Name: "ts", Type: typeOf(TimestampTZ)},
	}}
	rel := tab.Relation()
	e, err := NewEncoder(tab, rel, Policy{})
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(`{"id":1,"doc":"{\"a\":[1e2]}","n":1.5,"arr":["00"],"ts":"2026-01-02T03:04:05"}`))
	f.Add([]byte(`{"id":1,"doc":"\"\\ud800\"","n":"1","arr":[[1]],"ts":"x"}`))
	f.Fuzz(func(t *testing.T, row []byte) {
		m, err := NewComparer(e)
		if err != nil {
			t.Fatal(err)
		}
		im, err := m.Answer(row, true)
		if err != nil {
			return
		}
		if len(im.Values) != len(m.Columns()) || len(split(im.Key)) != 1 {
			t.Fatalf("%d values", len(im.Values))
		}
		_ = m.KeyText(im.Key)
		for i := range im.Values {
			_ = m.ValueText(i, im.Values[i])
		}
	})
}
