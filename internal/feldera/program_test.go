package feldera

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// sourceOrders is a table that simSQL's items differs from in every way.
func sourceOrders(target string) TableDef {
	return TableDef{
		Target: target,
		Relation: &decode.Relation{Schema: "public", Name: "orders", Identity: decode.IdentityDefault, ID: 1, Columns: []decode.Column{
			{Name: "id", Key: true, TypeOID: 20}, {Name: "note", TypeOID: 25}, {Name: "qty", TypeOID: 23},
		}},
		Columns: []ColumnDef{
			{Name: "id", Type: Type{Name: BigInt}, SourceType: "bigint", BaseOID: 20},
			{Name: "note", Type: Type{Name: Varchar, Nullable: true}, SourceType: "text", BaseOID: 25},
			{Name: "qty", Type: Type{Name: Integer}, SourceType: "integer", BaseOID: 23},
		},
		Key: []string{"id"},
	}
}

func TestTableSQL(t *testing.T) {
	d := sourceOrders(`"Orders"`)
	d.Notes, d.Unusable = []string{"a note\nCREATE TABLE evil (a INT);"}, "mend it"
	d.Relation.Name = "or\nders"
	d.Columns[1].Name, d.Columns[1].Note = `value`, "partly\r\n-- holdfast:end"
	d.Columns[2].Name = `q"Ty`
	want := `-- source: public.or ders
-- a note CREATE TABLE evil (a INT);
-- NOT USABLE YET: mend it
CREATE TABLE "Orders" (
    id BIGINT NOT NULL,
    -- partly  -- holdfast:end
    "value" VARCHAR,
    "q""Ty" INTEGER NOT NULL,
    PRIMARY KEY (id)
) WITH ('materialized' = 'true');
`
	if diff := cmp.Diff(want, d.SQL()); diff != "" {
		t.Error(diff)
	}
	prog, err := core.ParseProgram(GenerateProgram([]TableDef{d, ProgressTable(DefaultProgressTable)}))
	if err != nil {
		t.Fatal(err)
	}
	if len(prog.Tables) != 2 || prog.Tables[0].Name != "Orders" || len(prog.Tables[1].PrimaryKey) != 4 {
		t.Errorf("%+v", prog.Tables)
	}
}

// Whatever the names are: the statement has one table, with these names.
func TestTableSQLKeepsNames(t *testing.T) {
	name := rapid.StringOfN(rapid.Rune(), 1, 12, 63).Filter(func(s string) bool {
		return clip(s, 100) == s && strings.TrimSpace(s) != "" && !strings.ContainsRune(s, '\uFFFD')
	})
	rapid.Check(t, func(t *rapid.T) {
		table := name.Draw(t, "table")
		columns := rapid.SliceOfNDistinct(name, 1, 5, strings.ToLower).Draw(t, "columns")
		d := TableDef{Target: identifier(table), Relation: &decode.Relation{Name: name.Draw(t, "source")}, Key: columns[:1]}
		for _, c := range columns {
			d.Columns = append(d.Columns, ColumnDef{Name: c, Type: Type{Name: Varchar}, Note: name.Draw(t, "note")})
		}
		merged, err := MergeProgram("CREATE TABLE a_table_of_mine (i INT);\n"+MarkerBegin+"\n"+MarkerEnd, GenerateProgram([]TableDef{d}))
		if err != nil {
			t.Fatal(err)
		}
		again, err := MergeProgram(merged, GenerateProgram([]TableDef{d}))
		if err != nil || again != merged {
			t.Fatalf("a second merge changes the program or fails: %v", err)
		}
		prog, err := core.ParseProgram(merged)
		if err != nil {
			t.Fatalf("%v in\n%s", err, merged)
		}
		if len(prog.Tables) != 2 || prog.Tables[1].Name != table {
			t.Fatalf("table %q became %+v", table, prog.Tables[1])
		}
		for i, c := range prog.Tables[1].Columns {
			if c.Name != columns[i] {
				t.Fatalf("column %q became %q", columns[i], c.Name)
			}
		}
		if diff := cmp.Diff([]string{"a_table_of_mine", table}, declaredTables(merged)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestMergeProgram(t *testing.T) {
	generated := GenerateProgram([]TableDef{sourceOrders("orders")})
	block := MarkerBegin + "\nCREATE TABLE old (a INT);\n" + MarkerEnd + "\n"
	for _, c := range []struct{ name, current, want, refused string }{
		{name: "nothing", current: "", want: generated},
		{name: "blanks and comments", current: " \n-- a comment\n/* another */\n", want: generated},
		{name: "ours", current: block, want: generated},
		{name: "between", current: "-- mine\nCREATE TABLE x (a INT);\n" + block + "CREATE VIEW v AS SELECT * FROM orders;", want: "-- mine\nCREATE TABLE x (a INT);\n" + generated + "CREATE VIEW v AS SELECT * FROM orders;"},
		{name: "carriage returns", current: MarkerBegin + "\r\n" + MarkerEnd + "\r\nCREATE VIEW v AS SELECT 1;", want: generated + "CREATE VIEW v AS SELECT 1;"},
		{name: "end without a newline", current: MarkerBegin + "\n" + MarkerEnd, want: generated},
		{name: "their own", current: "CREATE VIEW v AS SELECT 1;", refused: "no part that belongs to pgsource"},
		{name: "begin alone", current: MarkerBegin, refused: "markers"},
		{name: "end first", current: MarkerEnd + "\n" + MarkerBegin, refused: "markers"},
		{name: "twice", current: block + block, refused: "markers"},
		{name: "an open comment", current: "/* mine\n" + block, refused: "not closed"},
		{name: "a table twice", current: block + "create /* x */ table ORDERS (a INT);", refused: `"orders"`},
		{name: "another table of the same letters", current: block + `CREATE TABLE "ORDERS" (a INT);`, want: generated + `CREATE TABLE "ORDERS" (a INT);`},
		{name: "a table in a text", current: block + "CREATE VIEW v AS SELECT 'CREATE TABLE orders' AS \"create table orders\"; -- CREATE TABLE orders", want: generated + "CREATE VIEW v AS SELECT 'CREATE TABLE orders' AS \"create table orders\"; -- CREATE TABLE orders"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := MergeProgram(c.current, generated)
			if c.refused != "" {
				if _, ok := errors.AsType[*decode.Refusal](err); !ok || !strings.Contains(err.Error(), c.refused) {
					t.Errorf("got %v", err)
				}
				return
			}
			if diff := cmp.Diff(c.want, got); err != nil || diff != "" {
				t.Errorf("%v\n%s", err, diff)
			}
		})
	}
}

func FuzzMergeProgram(f *testing.F) {
	generated := GenerateProgram([]TableDef{sourceOrders("orders")})
	for _, s := range []string{"", MarkerBegin + "\n" + MarkerEnd, "CREATE TABLE x (a INT);\n" + generated, `"'/*--`, "/*", "'"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, current string) {
		merged, err := MergeProgram(current, generated)
		if err != nil {
			return
		}
		if again, err := MergeProgram(merged, generated); err != nil || again != merged {
			t.Fatalf("a second merge changes the program: %v", err)
		}
		if n := strings.Count("\n"+strings.Join(declaredTables(merged), "\n")+"\n", "\norders\n"); n > 1 {
			t.Fatal("the table is declared twice")
		}
	})
}

func TestDifferences(t *testing.T) {
	_, c, schema := simulated(t, felderasim.Options{}, Config{})
	_ = c
	kinds := func(d TableDef, p Policy) []string {
		var out []string
		for _, x := range Differences(schema, []TableDef{d}, p) {
			if x.Table != d.Target || x.Text == "" {
				t.Errorf("%+v", x)
			}
			out = append(out, strings.Trim(string(x.Kind)+" "+x.Column, " "))
		}
		return out
	}
	for _, tc := range []struct {
		name   string
		change func(d *TableDef)
		policy Policy
		want   []string
	}{
		{name: "the same"},
		{name: "no such table", change: func(d *TableDef) { d.Target = "ordres" }, want: []string{"missing_table"}},
		{name: "a column more", change: func(d *TableDef) {
			d.Columns = append(d.Columns, ColumnDef{Name: "more", Type: Type{Name: Date, Nullable: true}})
		}, want: []string{"missing_column more"}},
		{name: "a column more that is ignored", policy: Policy{IgnoreExtraColumns: true}, change: func(d *TableDef) {
			d.Columns = append(d.Columns, ColumnDef{Name: "more", Type: Type{Name: Date, Nullable: true}})
		}},
		{name: "wider than the table", change: func(d *TableDef) { d.Columns[2].Type.Name, d.Columns[2].BaseOID = BigInt, 20 }, want: []string{"type qty"}},
		{name: "narrower than the table", change: func(d *TableDef) { d.Columns[2].Type.Name, d.Columns[2].BaseOID = SmallInt, 21 }},
		{name: "another type", change: func(d *TableDef) { d.Columns[2].Type.Name, d.Columns[2].BaseOID = Boolean, 16 }, want: []string{"type qty"}},
		{name: "NULL in the source", change: func(d *TableDef) { d.Columns[2].Type.Nullable = true }, want: []string{"not_null qty"}},
		{name: "a NOT NULL column without source", change: func(d *TableDef) { d.Columns = d.Columns[:2] }, want: []string{"no_source qty"}},
		{name: "another key", change: func(d *TableDef) { d.Key = []string{"id", "qty"} }, want: []string{"key"}},
		{name: "another key, whole rows", change: func(d *TableDef) {
			d.Key, d.Relation.Identity, d.Unique = []string{"id", "qty"}, decode.IdentityFull, [][]string{{"id", "qty"}, {"ID"}}
		}},
		{name: "a key that is not unique, whole rows", change: func(d *TableDef) {
			d.Key, d.Relation.Identity, d.Unique = []string{"id", "qty"}, decode.IdentityFull, [][]string{{"id", "qty"}}
		}, want: []string{"key"}},
		{name: "unusable", change: func(d *TableDef) { d.Unusable = "mend it" }, want: []string{"unusable"}},
		{name: "what only the encoder sees", change: func(d *TableDef) {
			d.Relation.Columns = append(d.Relation.Columns, decode.Column{Name: "ID"})
		}, want: []string{"other"}},
	} {
		d := sourceOrders("orders")
		if tc.change != nil {
			tc.change(&d)
		}
		if diff := cmp.Diff(tc.want, kinds(d, tc.policy)); diff != "" {
			t.Errorf("%s: %s", tc.name, diff)
		}
	}
	keyless := sourceOrders(`"Events"`)
	keyless.Columns = []ColumnDef{{Name: "name", Type: Type{Name: Varchar}}, {Name: "n", Type: Type{Name: Integer, Nullable: true}}}
	keyless.Relation.Columns = []decode.Column{{Name: "name", Key: true}, {Name: "n"}}
	keyless.Key = []string{"name"}
	if diff := cmp.Diff([]string{"key"}, kinds(keyless, Policy{})); diff != "" {
		t.Error(diff)
	}
}

func TestHolds(t *testing.T) {
	decimal := func(p, s int) *Type { return &Type{Name: Decimal, Precision: p, Scale: s, Known: true} }
	named := func(n TypeName) *Type { return &Type{Name: n} }
	array := func(of *Type) *Type { return &Type{Name: ArrayOf, Element: of} }
	for _, c := range []struct {
		have, want   *Type
		loose, known bool
		holds        bool
	}{
		{decimal(14, 4), decimal(12, 2), false, true, true},
		{decimal(12, 2), decimal(12, 4), false, true, false},
		{decimal(12, 4), decimal(12, 2), false, true, false}, // fewer digits before the point
		{decimal(5, 1), decimal(38, 10), true, true, true},
		{named(Decimal), decimal(12, 2), false, true, false},
		{decimal(10, 0), named(Integer), false, true, true},
		{decimal(9, 0), named(Integer), false, true, false},
		{decimal(19, 0), named(BigInt), false, true, true},
		{named(UBigInt), named(BigInt), false, true, false},
		{named(BigInt), named(UInteger), false, true, true},
		{named(BigInt), named(UBigInt), false, false, false},
		{named(Real), named(Double), false, true, false},
		{named(Double), named(Real), false, true, true},
		{named(Varchar), named(Date), false, true, true},
		{named(Date), named(Varchar), false, false, false},
		{named(Timestamp), named(TimestampTZ), false, true, true},
		{array(named(BigInt)), array(named(Integer)), false, false, true},
		{array(named(SmallInt)), array(named(Integer)), false, false, false},
		{array(array(named(Integer))), array(named(Integer)), false, false, false},
		{named(Varchar), array(named(Integer)), false, false, true},
		{&Type{Name: ArrayOf}, array(named(Integer)), false, false, false},
	} {
		if got := holds(c.have, c.want, c.loose, c.known); got != c.holds {
			t.Errorf("%s holds %s: %t", c.have, c.want, got)
		}
	}
}

// said collects the lines of one ApplyProgram.
type said struct {
	mu    sync.Mutex
	lines []string
}

func (s *said) say(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = append(s.lines, line)
}

func (s *said) has(part string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.lines, func(l string) bool { return strings.Contains(l, part) })
}

func apply(t *testing.T, c *Client, restart bool, tables ...TableDef) (*said, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s := &said{}
	return s, c.ApplyProgram(ctx, tables, ApplyOptions{Restart: restart, Say: s.say})
}

func TestApplyProgram(t *testing.T) {
	sim, c, _ := simulated(t, felderasim.Options{}, Config{})
	sim.RemovePipeline()
	if p, err := c.Pipeline(t.Context(), true); p != nil || err != nil {
		t.Fatal(p, err)
	}
	s, err := apply(t, c, false, sourceOrders("orders"))
	if err != nil || !s.has("creating") || !s.has("pipeline: Running") {
		t.Fatal(err, s.lines)
	}
	first := sim.ProgramCode()
	if s, err = apply(t, c, false, sourceOrders("orders")); err != nil || !s.has("already") || sim.ProgramCode() != first {
		t.Fatal(err, s.lines)
	}

	// A running pipeline is not stopped unless that was said.
	incarnation := sim.Incarnation()
	_, err = apply(t, c, false, sourceOrders("orders"), sourceOrders("more"))
	if _, refused := errors.AsType[*decode.Refusal](err); !refused || !strings.Contains(err.Error(), "-restart") {
		t.Fatal(err)
	}
	if sim.Incarnation() != incarnation || sim.ProgramCode() != first || !sim.Deployed() {
		t.Fatal("a refusal has changed something")
	}
	if s, err = apply(t, c, true, sourceOrders("orders"), sourceOrders("more")); err != nil || !s.has("what it holds is lost") || !s.has("table more is new") {
		t.Fatal(err, s.lines)
	}
	if s, err = apply(t, c, true, sourceOrders("more")); err != nil || !s.has("table orders is no longer declared") {
		t.Fatal(err, s.lines)
	}

	// A stopped one is changed and started without more ado.
	sim.Kill()
	if s, err = apply(t, c, false, sourceOrders("orders")); err != nil || !s.has("its last run ended with") || !sim.Deployed() {
		t.Fatal(err, s.lines)
	}
	sim.Pause()
	if _, err = apply(t, c, false, sourceOrders("orders")); err == nil || !strings.Contains(err.Error(), "paused") {
		t.Fatal(err)
	}
}

// A build with checkpoints is stopped with one, and nothing is said to be lost.
func TestApplyProgramWithCheckpoints(t *testing.T) {
	sim, c, _ := simulated(t, felderasim.Options{Edition: felderasim.Enterprise, Model: core.ModelExactlyOnce}, Config{})
	sim.RemovePipeline()
	if s, err := apply(t, c, false, sourceOrders("orders")); err != nil {
		t.Fatal(err, s.lines)
	}
	if s, err := apply(t, c, true, sourceOrders("more")); err != nil || s.has("lost") || !s.has("stopping") {
		t.Fatal(err, s.lines)
	}
}

func TestApplyProgramRefusals(t *testing.T) {
	bad := sourceOrders("orders")
	bad.Unusable = "mend it"
	badSQL := sourceOrders("orders")
	badSQL.Columns[0].Type.Name = "NOSUCHTYPE"
	for _, c := range []struct {
		name   string
		tables []TableDef
		before func(*felderasim.Sim)
		says   []string
	}{
		{"unusable", []TableDef{bad}, nil, []string{"mend it"}},
		{"a program of theirs", []TableDef{sourceOrders("orders")}, func(*felderasim.Sim) {}, []string{"no part that belongs", `pipeline "p"`}},
		{"SQL that does not compile", []TableDef{badSQL}, (*felderasim.Sim).RemovePipeline, []string{"SqlError", "line 6", "unknown type"}},
		{"Rust that does not compile", []TableDef{sourceOrders("orders")}, func(s *felderasim.Sim) {
			s.FailRust(strings.Repeat("noise\n", 10000) + "error[E0425]")
			s.RemovePipeline()
		}, []string{"RustError", "error[E0425]"}},
		{"a change that the manager refuses", []TableDef{sourceOrders("orders")}, func(s *felderasim.Sim) {
			s.RemovePipeline()
			_, _ = s.Inject(felderasim.Fault{Kind: felderasim.Answer, Endpoint: "pipeline_change", Status: 400, Code: "EditRestrictedToClearedStorage", Message: "no"})
		}, []string{"clear the pipeline's storage"}},
		{"a role that may not", []TableDef{sourceOrders("orders")}, func(s *felderasim.Sim) {
			s.RemovePipeline()
			_, _ = s.Inject(felderasim.Fault{Kind: felderasim.Forbidden, Endpoint: "pipeline_change"})
		}, []string{"role"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			sim, client, _ := simulated(t, felderasim.Options{}, Config{})
			if c.before != nil {
				c.before(sim)
			}
			_, err := apply(t, client, false, c.tables...)
			if _, refused := errors.AsType[*decode.Refusal](err); !refused {
				t.Fatalf("got %v", err)
			}
			for _, part := range c.says {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%v\ndoes not say %q", err, part)
				}
			}
			if len(err.Error()) > 4000 {
				t.Errorf("the error has %d bytes", len(err.Error()))
			}
		})
	}
	bare, err := New(Config{URL: "http://process.test"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := apply(t, bare, false); err == nil || !strings.Contains(err.Error(), "bare pipeline process") {
		t.Error(err)
	}
	if _, err := bare.Pipeline(t.Context(), false); err == nil {
		t.Error("a bare process has no manager")
	}
}

// Answers that get lost are asked for again; the end of the context ends the
// wait with the last reason.
func TestApplyProgramRidesOutFaults(t *testing.T) {
	sim, c, _ := simulated(t, felderasim.Options{}, Config{})
	sim.RemovePipeline()
	for _, f := range []felderasim.Fault{
		{Kind: felderasim.DropResponse, Endpoint: "pipeline_change", Count: 2},
		{Kind: felderasim.UnavailableBefore, Endpoint: "start", Count: 2},
		{Kind: felderasim.DropRequest, Endpoint: "pipeline", Count: 3},
	} {
		if _, err := sim.Inject(f); err != nil {
			t.Fatal(err)
		}
	}
	if s, err := apply(t, c, false, sourceOrders("orders")); err != nil {
		t.Fatal(err, s.lines)
	}
	sim.RemovePipeline()
	sim.HoldCompile(felderasim.SQLCompiled)
	ctx, cancel := context.WithCancelCause(t.Context())
	s := &said{}
	err := c.ApplyProgram(ctx, []TableDef{sourceOrders("orders")}, ApplyOptions{Say: func(line string) {
		s.say(line)
		if strings.Contains(line, "SqlCompiled") {
			cancel(errors.New("enough"))
		}
	}})
	if err == nil || !strings.Contains(err.Error(), "enough") || !strings.Contains(err.Error(), "compilation") {
		t.Fatal(err)
	}
}

// What a start can lead to, beyond what the simulator does.
func TestApplyProgramStartOutcomes(t *testing.T) {
	code := GenerateProgram([]TableDef{sourceOrders("orders")})
	for _, c := range []struct{ name, status, want string }{
		{"waits for approval", `"deployment_status":"AwaitingApproval","deployment_desired_status":"Running"`, "approve"},
		{"fails", `"deployment_status":"Stopped","deployment_desired_status":"Stopped","deployment_error":{"message":"out of memory","error_code":"x"}`, "out of memory"},
		{"is stopped by another", `"deployment_status":"Stopped","deployment_desired_status":"Stopped"`, "somebody has stopped it"},
		{"never gets there", `"deployment_status":"Provisioning","deployment_desired_status":"Running"`, "too long"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				started := false
				client, _ := newScripted(t, Config{}, func(_ int, s seen) answer {
					status := `"deployment_status":"Stopped","deployment_desired_status":"Stopped"`
					switch {
					case s.path == "/start":
						started = true
						return answer{status: 202}
					case started:
						status = c.status
					}
					return answer{status: 200, body: fmt.Sprintf(`{"program_code":%q,"program_status":"Success",%s}`, code, status)}
				})
				ctx, cancel := context.WithTimeoutCause(t.Context(), time.Hour, errors.New("too long"))
				defer cancel()
				err := client.ApplyProgram(ctx, []TableDef{sourceOrders("orders")}, ApplyOptions{Say: func(string) {}})
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("got %v", err)
				}
			})
		})
	}
}

func FuzzCompileErrors(f *testing.F) {
	f.Add([]byte(`{"sql_compilation":{"exit_code":1,"messages":[{"start_line_number":3,"start_column":1,"warning":false,"error_type":"x","message":"y"}]},"rust_compilation":{"exit_code":1,"stderr":"z"},"system_error":"w"}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if n := len(compileErrors(raw)); n > 8000 {
			t.Fatalf("%d bytes", n)
		}
	})
}
