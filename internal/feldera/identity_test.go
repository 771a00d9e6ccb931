package feldera

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
)

const identitySQL = `
CREATE TABLE log (
	word VARCHAR, n INT,
	holdfast_source VARCHAR NOT NULL, holdfast_partition INTEGER NOT NULL, holdfast_position BIGINT NOT NULL, holdfast_sequence BIGINT NOT NULL,
	PRIMARY KEY (holdfast_source, holdfast_partition, holdfast_position, holdfast_sequence)
) WITH ('materialized' = 'true');
CREATE TABLE wide (
	HOLDFAST_SEQUENCE BIGINT UNSIGNED NOT NULL, HOLDFAST_POSITION BIGINT UNSIGNED NOT NULL, HOLDFAST_PARTITION BIGINT NOT NULL, HOLDFAST_SOURCE VARCHAR NOT NULL,
	word VARCHAR, PRIMARY KEY (HOLDFAST_SEQUENCE, HOLDFAST_SOURCE, HOLDFAST_POSITION, HOLDFAST_PARTITION)
) WITH ('materialized' = 'true');
`

// sendAll sends one array to the table and waits until it is completed.
func sendAll(t *testing.T, c *Client, tab *Table, a *Array) {
	t.Helper()
	tok, err := c.Writer(tab).Send(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.awaitCompleted(t.Context(), "test", []Token{tok}); err != nil {
		t.Fatal(err)
	}
}

// A row that is sent again meets itself; rows that are equal and stand in
// different places stay apart, in whichever of the four columns they differ.
func TestIdentityMakesReplayConverge(t *testing.T) {
	sim, c, s := simulated(t, felderasim.Options{SQL: identitySQL}, Config{})
	tab := table(t, s, "log")
	if identity, err := tab.Identity(); !identity || err != nil {
		t.Fatal(identity, err)
	}
	rel := tab.Relation()
	if len(rel.Columns) != 2 || rel.Columns[0].Key || rel.Columns[1].Key {
		t.Fatalf("%+v", rel)
	}
	e, err := NewEncoder(tab, rel, Policy{})
	if err != nil {
		t.Fatal(err)
	}
	if missing := e.Missing(); len(missing) != 0 {
		t.Error(missing)
	}
	places := []decode.Position{
		{LSN: 1 << 40, Source: `7/"s"/public.log`, Sequence: 1},
		{LSN: 1 << 40, Source: `7/"s"/public.log`, Sequence: 2},
		{LSN: 1<<40 + 1, Source: `7/"s"/public.log`, Sequence: 1},
		{LSN: 1 << 40, Source: `7/other/public.log`, Sequence: 1},
		{Topic: "log", Partition: 0, Offset: 0, Source: "log@a1", Sequence: 1},
		{Topic: "log", Partition: 1, Offset: 0, Source: "log@a1", Sequence: 1},
		{Topic: "log", Partition: 1, Offset: 1, Source: "log@a1", Sequence: 1},
		{Topic: "log", Partition: 1, Offset: 1, Source: "log@a2", Sequence: 1},
	}
	for round := range 3 {
		var a Array
		for _, pos := range places {
			ch := decode.OrderChange{Op: decode.Insert, Relation: rel, After: []decode.Value{txt("same"), num("1")}, Position: pos}
			if err := a.Add(e, &ch); err != nil {
				t.Fatal(err)
			}
		}
		sendAll(t, c, tab, &a)
		if n := sim.Count("log"); n != int64(len(places)) {
			t.Fatalf("round %d: %d rows, expected %d", round, n, len(places))
		}
	}
	for _, row := range sim.Rows("log") {
		if row["word"] != "same" || fmt.Sprint(row["n"]) != "1" {
			t.Errorf("%v", row)
		}
	}
}

// A table of this kind can be emptied, since its key is one like others.
func TestIdentityTableIsEmptied(t *testing.T) {
	for _, name := range []string{"log", "wide"} {
		sim, c, s := simulated(t, felderasim.Options{SQL: identitySQL}, Config{})
		tab := table(t, s, name)
		rel := tab.Relation()
		e, err := NewEncoder(tab, rel, Policy{})
		if err != nil {
			t.Fatal(err)
		}
		var a Array
		for n := range 25 {
			row := make([]decode.Value, len(rel.Columns))
			for i := range row {
				row[i] = num(fmt.Sprint(n))
			}
			row[0] = txt("w")
			pos := decode.Position{LSN: 1<<62 + uint64(n%2), Source: "7/'s/public.log", Sequence: uint64(n) + 1}
			if err := a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: rel, After: row, Position: pos}); err != nil {
				t.Fatal(err)
			}
		}
		sendAll(t, c, tab, &a)
		if n := sim.Count(name); n != 25 {
			t.Fatalf("%d rows", n)
		}
		m, err := c.NewEmptier(tab)
		if err != nil {
			t.Fatal(err)
		}
		for {
			var page Array
			n, err := m.Page(t.Context(), 10, &page)
			if err != nil {
				t.Fatal(err)
			}
			if n == 0 {
				break
			}
			sendAll(t, c, tab, &page)
		}
		if n := sim.Count(name); n != 0 {
			t.Errorf("%s: %d rows are left", name, n)
		}
	}
}

// What cannot be told apart, or found again, is refused by name.
func TestIdentityRefuses(t *testing.T) {
	_, _, s := simulated(t, felderasim.Options{SQL: identitySQL}, Config{})
	tab := table(t, s, "log")
	rel := tab.Relation()
	e, err := NewEncoder(tab, rel, Policy{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewComparer(e); err == nil || !strings.Contains(err.Error(), "where each row stands") {
		t.Errorf("a comparison by such a key: %v", err)
	}
	row, good := []decode.Value{txt("w"), num("1")}, decode.Position{LSN: 5, Source: "7/s/public.log", Sequence: 1}
	for name, c := range map[string]struct {
		ch   decode.OrderChange
		says []string
	}{
		"update":         {decode.OrderChange{Op: decode.Update, Before: row, After: row, Position: good}, []string{"inserts alone", "LSN 0/5", "does not tell which row"}},
		"delete":         {decode.OrderChange{Op: decode.Delete, Before: row, Position: good}, []string{"inserts alone", "LSN 0/5", "does not tell which row"}},
		"no source":      {decode.OrderChange{Op: decode.Insert, After: row, Position: decode.Position{LSN: 5, Sequence: 1}}, []string{"where it stands"}},
		"no sequence":    {decode.OrderChange{Op: decode.Insert, After: row, Position: decode.Position{LSN: 5, Source: "7"}}, []string{"where it stands"}},
		"a large number": {decode.OrderChange{Op: decode.Insert, After: row, Position: decode.Position{LSN: 1 << 63, Source: "7", Sequence: 1}}, []string{"holdfast_position", "BIGINT UNSIGNED"}},
	} {
		c.ch.Relation = rel
		var a Array
		err := a.Add(e, &c.ch)
		refused, ok := errors.AsType[*decode.Refusal](err)
		if !ok || a.Rows() != 0 || string(a.Body()) != "[]" && string(a.Body()) != "[" {
			t.Errorf("%s: %v, %s", name, err, a.Body())
			continue
		}
		for _, part := range c.says {
			if !strings.Contains(refused.Error()+refused.Do, part) {
				t.Errorf("%s: it does not say %q: %v %s", name, part, refused, refused.Do)
			}
		}
	}
	// Sources that do not go with such a table.
	for name, c := range map[string]struct {
		rel  decode.Relation
		says string
	}{
		"a key of its own":     {decode.Relation{ID: 1, Name: "log", Identity: decode.IdentityDefault, Columns: []decode.Column{{Name: "word", Key: true}, {Name: "n"}}}, "the source's own key"},
		"a column of our name": {decode.Relation{ID: 1, Name: "log", Identity: decode.IdentityNothing, Columns: []decode.Column{{Name: "word"}, {Name: "Holdfast_Position"}}}, "holdfast_position"},
	} {
		_, err := NewEncoder(tab, &c.rel, Policy{})
		if refused, ok := errors.AsType[*decode.Refusal](err); !ok || !strings.Contains(refused.Error()+refused.Do, c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Whole old rows do not make a key of them: that is refused row by row.
	if _, err := NewEncoder(tab, &decode.Relation{ID: 1, Name: "log", Identity: decode.IdentityFull, Columns: []decode.Column{{Name: "word", Key: true}, {Name: "n", Key: true}}}, Policy{}); err != nil {
		t.Error(err)
	}
}

// A declaration that is not exactly this one is refused with what is wrong and
// both ways out.
func TestIdentityDeclarations(t *testing.T) {
	const all = "holdfast_source VARCHAR NOT NULL, holdfast_partition INTEGER NOT NULL, holdfast_position BIGINT NOT NULL, holdfast_sequence BIGINT NOT NULL"
	const key = "PRIMARY KEY (holdfast_source, holdfast_partition, holdfast_position, holdfast_sequence)"
	for name, c := range map[string]struct{ sql, says string }{
		"one is missing":   {"holdfast_source VARCHAR NOT NULL PRIMARY KEY, w VARCHAR", `no column "holdfast_partition"`},
		"no key":           {all + ", w VARCHAR", "no PRIMARY KEY"},
		"another key":      {all + ", w VARCHAR NOT NULL PRIMARY KEY", `PRIMARY KEY is ("w")`},
		"part of the key":  {all + ", w VARCHAR, PRIMARY KEY (holdfast_source, holdfast_position)", `PRIMARY KEY is ("holdfast_source", "holdfast_position")`},
		"more than it":     {all + ", w VARCHAR NOT NULL, " + strings.Replace(key, ")", ", w)", 1), `"w"`},
		"a number as text": {strings.Replace(all, "holdfast_position BIGINT", "holdfast_position VARCHAR", 1) + ", " + key, `"holdfast_position" is VARCHAR, not BIGINT`},
		"too narrow":       {strings.Replace(all, "holdfast_sequence BIGINT", "holdfast_sequence INTEGER", 1) + ", " + key, `"holdfast_sequence" is INTEGER`},
		"may be NULL":      {strings.Replace(all, "holdfast_partition INTEGER NOT NULL", "holdfast_partition INTEGER", 1) + ", w VARCHAR NOT NULL PRIMARY KEY", `"holdfast_partition" may be NULL`},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, s := simulated(t, felderasim.Options{SQL: "CREATE TABLE t (" + c.sql + ");"}, Config{})
			tab := table(t, s, "t")
			identity, err := tab.Identity()
			refused, ok := errors.AsType[*decode.Refusal](err)
			if identity || !ok || refused.Where != "table t" {
				t.Fatal(identity, err)
			}
			for _, part := range []string{c.says, "PRIMARY KEY (holdfast_source, holdfast_partition, holdfast_position, holdfast_sequence)", "take these columns out"} {
				if !strings.Contains(refused.Error()+refused.Do, part) {
					t.Errorf("it does not say %q: %v %s", part, refused, refused.Do)
				}
			}
			if _, err := NewEncoder(tab, &decode.Relation{Name: "t", Columns: []decode.Column{{Name: "w"}}}, Policy{}); err == nil {
				t.Error("it was taken all the same")
			}
		})
	}
	for _, name := range []string{"log", "wide"} {
		_, _, s := simulated(t, felderasim.Options{SQL: identitySQL}, Config{})
		if identity, err := table(t, s, name).Identity(); !identity || err != nil {
			t.Error(name, identity, err)
		}
	}
}

// feldera-sql -diff compares with such a table, and with one that should not be
// one.
func TestIdentityDifferences(t *testing.T) {
	_, _, s := simulated(t, felderasim.Options{SQL: identitySQL + `
		CREATE TABLE bag (word VARCHAR, n INT) WITH ('materialized' = 'true');
		CREATE TABLE half (word VARCHAR, n INT, holdfast_source VARCHAR) WITH ('materialized' = 'true');`}, Config{})
	text := ColumnDef{Name: "word", Type: Type{Name: Varchar, Nullable: true}}
	number := ColumnDef{Name: "n", Type: Type{Name: Integer, Nullable: true}}
	def := func(target string, identity decode.Identity, key ...string) TableDef {
		rel := &decode.Relation{ID: 1, Schema: "public", Name: "log", Identity: identity, Columns: []decode.Column{{Name: "word"}, {Name: "n"}}}
		d := TableDef{Target: target, Relation: rel, Columns: []ColumnDef{text, number}, Key: key}
		for i := range rel.Columns {
			rel.Columns[i].Key = identity == decode.IdentityFull || slices.Contains(key, rel.Columns[i].Name)
		}
		if slices.Equal(key, IdentityKey()) {
			d.Columns = append(d.Columns, IdentityColumns()...)
		}
		return d
	}
	for name, c := range map[string]struct {
		def  TableDef
		want []string // kinds
		says string
	}{
		"fits":                 {def("log", decode.IdentityDefault, IdentityKey()...), nil, ""},
		"NOTHING fits":         {def("log", decode.IdentityNothing, IdentityKey()...), nil, ""},
		"no identity columns":  {def("bag", decode.IdentityDefault, IdentityKey()...), []string{"missing_column", "missing_column", "missing_column", "missing_column", "key"}, "would count twice"},
		"some of them":         {def("half", decode.IdentityDefault, IdentityKey()...), []string{"key"}, "all four identity columns"},
		"a source with a key":  {def("log", decode.IdentityDefault, "word"), []string{"key"}, "a key of its own"},
		"one with whole rows":  {def("log", decode.IdentityFull), []string{"key"}, "inserts alone"},
		"whole rows and a bag": {def("bag", decode.IdentityFull), nil, ""},
	} {
		var kinds []string
		said := ""
		for _, d := range Differences(s, []TableDef{c.def}, Policy{}) {
			kinds, said = append(kinds, string(d.Kind)), said+d.Text+d.SQL+"\n"
		}
		if !slices.Equal(kinds, c.want) || !strings.Contains(said, c.says) {
			t.Errorf("%s: %q\n%s", name, kinds, said)
		}
	}
}
