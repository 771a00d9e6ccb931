package wal

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

var updateTypes = flag.Bool("update-types", false, "write the table of types into docs/feldera.md")

// The documentation's table is the code's.
func TestTypeMatrixIsDocumented(t *testing.T) {
	t.Parallel()
	const begin, end = "<!-- types:begin -->\n", "<!-- types:end -->\n"
	path := filepath.Join("..", "..", "docs", "feldera.md")
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(raw), begin)
	stored, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatal("docs/feldera.md has no markers for the table of types")
	}
	if *updateTypes {
		if err := os.WriteFile(path, []byte(before+begin+TypeMatrix()+end+after), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(TypeMatrix(), stored); diff != "" {
		t.Errorf("docs/feldera.md is old; run go test ./internal/wal -run TestTypeMatrix -update-types (-code +stored):\n%s", diff)
	}
}

// A rule without a note must be exact, and the other way round; no OID may
// have two rules.
func TestTypeRulesAreConsistent(t *testing.T) {
	t.Parallel()
	seen := map[uint32]string{}
	for _, r := range typeRules {
		if (r.note == "") != (r.fit == FitExact) {
			t.Errorf("%s: fit %s with note %q", r.names, r.fit, r.note)
		}
		for _, oid := range r.oids {
			if first, twice := seen[oid]; twice {
				t.Errorf("OID %d is in %q and in %q", oid, first, r.names)
			}
			seen[oid] = r.names
		}
	}
}

func TestNumericModifiers(t *testing.T) {
	t.Parallel()
	modifier := func(precision, scale int) int32 { return int32(precision<<16|scale&0x7ff) + 4 }
	for _, c := range []struct {
		modifier int32
		want     string
		loose    bool
	}{
		{-1, "DECIMAL(38,10)", true},
		{modifier(12, 2), "DECIMAL(12,2)", false},
		{modifier(38, 38), "DECIMAL(38,38)", false},
		{modifier(38, 0), "DECIMAL(38,0)", false},
		{modifier(3, 5), "DECIMAL(5,5)", false},    // below 0.01, five digits behind the point
		{modifier(3, -2), "DECIMAL(5,0)", false},   // up to 99900
		{modifier(50, 10), "DECIMAL(38,10)", true}, // more than a DECIMAL has
		{modifier(50, 45), "DECIMAL(38,33)", true},
		{modifier(1000, 500), "DECIMAL(38,10)", true},
		{modifier(1000, -1000), "DECIMAL(38,0)", true},
	} {
		m := numeric(c.modifier)
		if got := m.typ.String(); got != c.want || m.loose != c.loose || m.note == "" {
			t.Errorf("modifier %d: %s loose %t note %q, want %s loose %t", c.modifier, got, m.loose, m.note, c.want, c.loose)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		got := numeric(rapid.Int32().Draw(t, "modifier")).typ
		if got.Precision < 1 || got.Precision > maxPrecision || got.Scale < 0 || got.Scale > got.Precision {
			t.Fatalf("%s is no type", got.String())
		}
	})
}

// sampleTypes are rows of pg_type.
var sampleTypes = pgTypes{
	1007: {name: "_int4", kind: "b", element: 23, delim: ","}, 23: {name: "int4", kind: "b", delim: ","},
	1020: {name: "_box", kind: "b", element: 603, delim: ";"}, 603: {name: "box", kind: "b", delim: ";"},
	3807: {name: "_jsonb", kind: "b", element: 3802, delim: ","}, 3802: {name: "jsonb", kind: "b", delim: ","},
	90001: {name: "positive", kind: "d", base: 23, modifier: -1, delim: ","},
	90002: {name: "amount", kind: "d", base: 1700, modifier: 12<<16 + 2 + 4, delim: ","}, 1700: {name: "numeric", kind: "b", delim: ","},
	90003: {name: "rate", kind: "d", base: 90002, modifier: -1, delim: ","},
	90004: {name: "_positive", kind: "b", element: 90001, delim: ","},
	90005: {name: "ints", kind: "d", base: 1007, modifier: -1, dims: 1, delim: ","},
	90006: {name: "_ints", kind: "b", element: 90005, delim: ","},
	90007: {name: "mood", kind: "e", delim: ","}, 90008: {name: "_mood", kind: "b", element: 90007, delim: ","},
	90009: {name: "loop", kind: "d", base: 90009, modifier: -1, delim: ","},
	90011: {name: "citext", kind: "b", delim: ","}, 90012: {name: "_citext", kind: "b", element: 90011, delim: ","},
	90013: {name: "mail", kind: "d", base: 90011, modifier: -1, delim: ","},
	90010: {name: "_amount", kind: "b", element: 90002, delim: ","},
	90014: {name: "citext", kind: "e", delim: ","}, // somebody's own
}

func TestDomainsAndArrays(t *testing.T) {
	t.Parallel()
	types := sampleTypes
	for _, c := range []struct {
		oid  uint32
		dims int
		want string
	}{
		{1007, 1, "INTEGER ARRAY"},
		{1007, 0, "INTEGER ARRAY"},
		{1007, 2, "INTEGER ARRAY ARRAY"},
		{1020, 1, "VARCHAR"},
		{3807, 1, "VARCHAR ARRAY"},
		{90001, 0, "INTEGER"},
		{90002, 0, "DECIMAL(12,2)"},
		{90003, 0, "DECIMAL(12,2)"},
		{90004, 1, "INTEGER ARRAY"},
		{90005, 0, "INTEGER ARRAY"},
		{90006, 1, "VARCHAR ARRAY"},
		{90008, 1, "VARCHAR ARRAY"},
		{90009, 0, "VARCHAR"},
		{90010, 1, "DECIMAL(12,2) ARRAY"},
		{12345678, 0, "VARCHAR"},
	} {
		m := types.column(c.oid, -1, c.dims, 0)
		if got := m.typ.String(); got != c.want {
			t.Errorf("%s with %d dimensions: %s, want %s", types.nameOf(c.oid), c.dims, got, c.want)
		}
	}
}

// What the stream calls a column's type becomes what its values are read as.
func TestTypesAreResolved(t *testing.T) {
	t.Parallel()
	types := sampleTypes
	for oid, want := range map[uint32]decode.Column{
		23: {TypeOID: 23, TypeModifier: -1}, 90001: {TypeOID: 23, TypeModifier: -1},
		90003: {TypeOID: 1700, TypeModifier: 12<<16 + 2 + 4},
		1007:  {TypeOID: 1007, TypeModifier: -1, Element: 23}, 90004: {TypeOID: 90004, TypeModifier: -1, Element: 23},
		90005: {TypeOID: 1007, TypeModifier: -1, Element: 23}, 90006: {TypeOID: 90006, TypeModifier: -1, Element: 1007},
		1020: {TypeOID: 1020, TypeModifier: -1}, 90008: {TypeOID: 90008, TypeModifier: -1, Element: 90007},
		90011: {TypeOID: 25, TypeModifier: -1}, 90012: {TypeOID: 90012, TypeModifier: -1, Element: 25},
		90013: {TypeOID: 25, TypeModifier: -1}, 90014: {TypeOID: 90014, TypeModifier: -1},
		90009: {TypeOID: 90009, TypeModifier: -1}, 55: {TypeOID: 55, TypeModifier: -1},
	} {
		col := decode.Column{TypeOID: oid, TypeModifier: -1}
		types.resolve(&col)
		if diff := cmp.Diff(want, col); diff != "" {
			t.Errorf("%s (-want +got):\n%s", types.nameOf(oid), diff)
		}
	}
}

func TestJudge(t *testing.T) {
	t.Parallel()
	def := func(identity decode.Identity, target string, key []string, columns ...string) *feldera.TableDef {
		d := &feldera.TableDef{Target: target, Key: key, Relation: &decode.Relation{Schema: "s", Name: "T", Identity: identity}}
		for _, c := range columns {
			d.Columns = append(d.Columns, feldera.ColumnDef{Name: c})
		}
		return d
	}
	for _, c := range []struct {
		name string
		def  *feldera.TableDef
		says []string // in Unusable; none = usable
	}{
		{"a key", def(decode.IdentityDefault, "t", []string{"id"}, "id"), nil},
		{"whole rows", def(decode.IdentityFull, "t", nil, "id"), nil},
		{"no key", def(decode.IdentityDefault, "t", nil, "id"), nil},
		{"identity nothing", def(decode.IdentityNothing, "t", []string{"id"}, "id"), nil},
		{"no key, and a name of ours", def(decode.IdentityDefault, "t", nil, "id", "Holdfast_Source"), []string{"Holdfast_Source", "rename"}},
		{"case alone", def(decode.IdentityDefault, "t", []string{"id"}, "id", "Id"), []string{"case alone"}},
		{"a name of theirs", def(decode.IdentityDefault, "Feldera_x", []string{"id"}, "id"), []string{"PGSOURCE_TABLES"}},
		{"no columns", def(decode.IdentityFull, "t", nil), []string{"no columns"}},
	} {
		judge(c.def, Table{Schema: "s", Name: "T"})
		if (c.def.Unusable == "") != (len(c.says) == 0) {
			t.Errorf("%s: %q", c.name, c.def.Unusable)
		}
		for _, part := range c.says {
			if !strings.Contains(c.def.Unusable, part) {
				t.Errorf("%s: %q does not say %q", c.name, c.def.Unusable, part)
			}
		}
	}
	for _, c := range []struct {
		def  *feldera.TableDef
		says []string
	}{
		{def(decode.IdentityDefault, "t", nil, "id"), []string{`ALTER TABLE "s"."T" ADD PRIMARY KEY`, "REPLICA IDENTITY FULL", "only inserts"}},
		{def(decode.IdentityNothing, "t", []string{"id"}, "id"), []string{"REPLICA IDENTITY DEFAULT", "only inserts"}},
	} {
		judge(c.def, Table{Schema: "s", Name: "T"})
		if !slices.Equal(c.def.Key, feldera.IdentityKey()) || len(c.def.Columns) != 5 {
			t.Errorf("%q %+v", c.def.Key, c.def.Columns)
		}
		for _, part := range c.says {
			if said := strings.Join(c.def.Notes, "\n"); !strings.Contains(said, part) {
				t.Errorf("%q does not say %q", said, part)
			}
		}
	}
	if d := def(decode.IdentityFull, "t", nil, "id"); len(d.Notes) != 0 {
		t.Error("notes from nowhere")
	} else if judge(d, Table{Schema: "s", Name: "T"}); len(d.Notes) != 1 || !strings.Contains(d.Notes[0], "count twice") {
		t.Errorf("%q", d.Notes)
	}
}

// What a table's name ends a line with does not begin a statement.
func TestCommentsStayOnTheirLine(t *testing.T) {
	for _, evil := range []string{"a\nDROP TABLE x", "a\r\nDROP TABLE x", "a\x00", "a\u0085b", "a\u2028b"} {
		got := sqlComment(refusedWrites([]unidentified{{name: quoteIdentifier("public") + "." + quoteIdentifier(evil)}}))
		if line, ok := strings.CutSuffix(got, "\n"); !ok || !strings.HasPrefix(line, "-- ") || strings.ContainsAny(line, "\n\r\x00\u0085\u2028") {
			t.Errorf("%q", got)
		}
	}
}
