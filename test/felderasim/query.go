package felderasim

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"modernc.org/sqlite"

	"holdfast/test/felderasim/core"
)

// queryEngine answers ad-hoc queries from an SQLite database in memory that
// follows the tables. A table is copied when it is first asked for, and
// brought up to date before each query after that. It sees what the engine's
// ad-hoc queries see: the tables as of the last completed transaction.
//
// What differs from the engine: SQL is SQLite's, INSERT is not answered, and
// columns whose names differ only in case cannot be told apart.
type queryEngine struct {
	s    *Sim
	mu   sync.Mutex // one query at a time
	db   *sql.DB
	proc *process // whose tables db holds
	have map[string]bool
}

func newQueryEngine(s *Sim) *queryEngine { return &queryEngine{s: s} }

// decimalCollation is registered once per process: the driver keeps its
// collations in a table of its own.
var decimalCollation = sync.OnceValue(func() error {
	return sqlite.RegisterCollationUtf8("feldera_decimal", core.CompareDecimals)
})

func (q *queryEngine) close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.db == nil {
		return nil
	}
	db := q.db
	q.db = nil
	return db.Close()
}

// maxResult bounds the body of one answer.
const maxResult = 256 << 20

func (q *queryEngine) answer(ctx context.Context, p *process, v url.Values, fault *activeFault) answer {
	format := v.Get("format")
	setDefault(&format, "text")
	bad := func(err error) answer { return apiAnswer(core.ErrQuery(err.Error())) }
	switch format {
	case "text", "json":
	case "parquet", "arrow_ipc", "hash":
		return bad(fmt.Errorf("the simulator does not answer in format %s", format))
	default:
		return apiAnswer(&core.APIError{Status: http.StatusBadRequest, Code: "InvalidParam", Message: "Invalid parameter: unknown format " + format})
	}
	q.s.mu.Lock()
	st := q.s.engine.State()
	q.s.mu.Unlock()
	if st == core.StateRestoring {
		return apiAnswer(&core.APIError{
			Status: http.StatusServiceUnavailable, Code: "RestoreInProgress",
			Message: "Operation cannot be initiated now because the pipeline is being restored from a checkpoint.", Details: struct{}{},
		})
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	text, err := q.prepare(ctx, p, v.Get("sql"))
	if errors.Is(err, errProcessDied) {
		return answer{abort: true}
	}
	if err != nil {
		return bad(err)
	}
	rows, err := q.db.QueryContext(ctx, text)
	if err != nil {
		return bad(err)
	}
	defer rows.Close() // rows.Err is looked at
	var out resultWriter = &jsonResult{}
	ctype := "application/json"
	if format == "text" {
		out, ctype = &textResult{}, "text/plain; charset=utf-8"
	}
	body, err := q.run(rows, out, fault)
	if err != nil {
		return bad(err)
	}
	return answer{status: http.StatusOK, body: body, ctype: ctype}
}

// run writes the result. An error after the header is part of the body, as in
// the engine, which has answered 200 by then.
func (q *queryEngine) run(rows *sql.Rows, out resultWriter, fault *activeFault) ([]byte, error) {
	cols, err := rows.ColumnTypes()
	if err != nil {
		return nil, err
	}
	names, kinds := make([]string, len(cols)), make([]string, len(cols))
	vals, ptrs := make([]any, len(cols)), make([]any, len(cols))
	for i, c := range cols {
		names[i] = c.Name()
		kinds[i], _, _ = strings.Cut(c.DatabaseTypeName(), " ")
		ptrs[i] = &vals[i]
	}
	out.header(names)
	for n := 0; ; n++ {
		if fault != nil && n >= fault.Rows {
			return out.fail("Execution error: injected fault"), nil
		}
		if !rows.Next() {
			break
		}
		if err := rows.Scan(ptrs...); err != nil {
			return out.fail(err.Error()), nil
		}
		if why := unwritable(vals); why != "" {
			return out.fail(why), nil
		}
		if !out.row(kinds, vals) {
			return out.fail("the result is larger than the simulator answers"), nil
		}
	}
	if err := rows.Err(); err != nil {
		return out.fail(err.Error()), nil
	}
	return out.end(), nil
}

// prepare brings the tables that a query names up to date and gives the query
// in SQLite's words.
func (q *queryEngine) prepare(ctx context.Context, p *process, text string) (string, error) {
	if err := decimalCollation(); err != nil {
		return "", fmt.Errorf("register collation: %w", err)
	}
	if q.db == nil || q.proc != p {
		if q.db != nil {
			if err := q.db.Close(); err != nil {
				return "", fmt.Errorf("close query database: %w", err)
			}
		}
		db, err := sql.Open("sqlite", ":memory:")
		if err != nil {
			return "", fmt.Errorf("open query database: %w", err)
		}
		db.SetMaxOpenConns(1) // each connection would be a database of its own
		q.db, q.proc, q.have = db, p, map[string]bool{}
	}
	prog := q.s.engine.Program()
	toks, err := core.SQLTokens(text)
	if err != nil {
		return "", fmt.Errorf("SQL error: %w", err)
	}
	if len(toks) == 0 || toks[0].Quoted || !slices.Contains([]string{"select", "with", "values", ""}, toks[0].Name) {
		return "", errors.New("SQL error: the simulator answers SELECT only")
	}
	var tables []*core.TableDef
	text, err = rewrite(prog, text, toks, &tables, 0)
	if err != nil {
		return "", err
	}
	for _, t := range tables {
		if err := q.sync(ctx, p, prog, t); err != nil {
			return "", err
		}
	}
	return text, nil
}

// rewrite quotes the names of tables, puts views in place, and takes the type
// words off date and time literals.
func rewrite(prog *core.Program, text string, toks []core.SQLToken, tables *[]*core.TableDef, depth int) (string, error) {
	if depth > 16 {
		return "", errors.New("views are nested too deeply")
	}
	var b strings.Builder
	at := 0
	put := func(t core.SQLToken, s string) {
		b.WriteString(text[at:t.Start])
		b.WriteString(s)
		at = t.End
	}
	for i := 0; i < len(toks); i++ {
		t := toks[i]
		if t.Name == "" {
			continue
		}
		if text, last, ok := typedLiteral(toks[i:]); ok {
			put(t, text)
			i += last
			at = toks[i].End
			continue
		}
		afterFrom := i > 0 && (toks[i-1].Name == "from" || toks[i-1].Name == "join" || toks[i-1].Text == ",") && !toks[i-1].Literal
		if td := lookup(prog, t.Name); td != nil {
			if !td.Materialized && afterFrom {
				return "", notMaterialized(td.Name)
			}
			if afterFrom || i+1 < len(toks) && toks[i+1].Text == "." {
				put(t, sqliteName(prog, td))
			}
			if afterFrom && !slices.Contains(*tables, td) {
				*tables = append(*tables, td)
			}
			continue
		}
		if v := lookupView(prog, t.Name); v != nil && afterFrom {
			if !v.Materialized {
				return "", notMaterialized(v.Name)
			}
			vt, err := core.SQLTokens(v.Query)
			if err != nil {
				return "", err
			}
			inner, err := rewrite(&core.Program{Tables: allMaterialized(prog), Views: allViews(prog)}, v.Query, vt, tables, depth+1)
			if err != nil {
				return "", err
			}
			alias := ""
			if i+1 >= len(toks) || toks[i+1].Name == "" || isKeyword(toks[i+1].Name) && toks[i+1].Name != "as" {
				alias = " AS " + quoteIdent(v.Name)
			}
			put(t, "("+inner+")"+alias)
			continue
		}
		if !t.Quoted && i+1 < len(toks) && toks[i+1].Literal {
			kind := map[string]core.Kind{"timestamp": core.Timestamp, "date": core.Date, "time": core.Time}[t.Name]
			if canon, ok := kind.Canonical(toks[i+1].Text); ok && kind != 0 {
				put(t, "'"+canon+"'")
				at = toks[i+1].End
			}
		}
	}
	b.WriteString(text[at:])
	return b.String(), nil
}

// typedLiteral gives the text of a literal with a cast around it, CAST('1.50'
// AS DECIMAL(4, 2)) or arrow_cast('2026-01-02T03:04:05', 'Timestamp(…)'), as
// the copy has such values, and the index of its last token. Casts of other
// types SQLite knows itself.
func typedLiteral(toks []core.SQLToken) (text string, last int, ok bool) {
	is := func(i int, text string) bool {
		return i < len(toks) && !toks[i].Literal && !toks[i].Quoted && strings.EqualFold(toks[i].Text, text)
	}
	if toks[0].Quoted || len(toks) < 6 || !is(1, "(") || !toks[2].Literal {
		return "", 0, false
	}
	switch {
	case is(0, "cast") && is(3, "as") && (is(4, "decimal") || is(4, "bigint") && is(5, "unsigned")):
		depth := 1
		for last = 4; last < len(toks) && depth > 0; last++ {
			switch {
			case is(last, "("):
				depth++
			case is(last, ")"):
				depth--
			}
		}
		return "'" + strings.ReplaceAll(toks[2].Text, "'", "''") + "'", last - 1, depth == 0
	case is(0, "arrow_cast") && is(3, ",") && toks[4].Literal && is(5, ")"):
		kind := map[string]core.Kind{
			"Timestamp(Microsecond, None)": core.Timestamp, `Timestamp(Microsecond, Some("UTC"))`: core.TimestampTZ,
		}[toks[4].Text]
		if kind == 0 {
			return "", 0, false
		}
		canon, ok := kind.Canonical(toks[2].Text)
		return "'" + canon + "'", 5, ok
	}
	return "", 0, false
}

func notMaterialized(name string) error {
	return fmt.Errorf("table %q cannot be queried: it is not materialized; declare it with ('materialized' = 'true'), or a view as CREATE MATERIALIZED VIEW", name)
}

func isKeyword(s string) bool {
	return slices.Contains([]string{
		"where", "group", "order", "limit", "join", "left", "right", "inner", "outer", "cross", "full", "on", "union", "except", "intersect", "having", "offset", "as", "using", "natural", "window",
	}, s)
}

func lookup(prog *core.Program, name string) *core.TableDef {
	for _, t := range prog.Tables {
		if t.Name == name {
			return t
		}
	}
	return nil
}

func lookupView(prog *core.Program, name string) *core.ViewDef {
	for _, v := range prog.Views {
		if v.Name == name {
			return v
		}
	}
	return nil
}

// allMaterialized and allViews: inside a view, materialization does not
// matter.
func allMaterialized(prog *core.Program) []*core.TableDef { return prog.Tables }

func allViews(prog *core.Program) []*core.ViewDef {
	out := make([]*core.ViewDef, 0, len(prog.Views))
	for _, v := range prog.Views {
		c := *v
		c.Materialized = true
		out = append(out, &c)
	}
	return out
}

func quoteIdent(s string) string { return `"` + strings.ReplaceAll(s, `"`, `""`) + `"` }

// sqliteName is the quoted name of a table's copy. SQLite does not tell
// quoted names apart by case, so those that collide get a number.
func sqliteName(prog *core.Program, t *core.TableDef) string {
	for i, o := range prog.Tables {
		if o.Name != t.Name && strings.EqualFold(o.Name, t.Name) {
			for j, x := range prog.Tables {
				if x.Name == t.Name {
					i = j
				}
			}
			return quoteIdent(t.Name + "#" + strconv.Itoa(i))
		}
	}
	return quoteIdent(t.Name)
}

func sqliteType(k core.Kind) string {
	switch k {
	case core.Boolean, core.TinyInt, core.SmallInt, core.Integer, core.BigInt, core.UTinyInt, core.USmallInt, core.UInteger, core.Real, core.Double, core.Char, core.Varchar:
		return k.String()
	case core.Binary, core.Varbinary:
		return k.String() + " BLOB"
	case core.Decimal:
		return k.String() + " TEXT COLLATE feldera_decimal"
	case core.UBigInt:
		// Not by its name: "INT" in a declared type means a signed 64-bit
		// integer to SQLite, and makes a float of what is larger.
		return "UBIG TEXT COLLATE feldera_decimal"
	case core.Date, core.Time, core.Timestamp, core.TimestampTZ, core.UUID, core.Variant, core.Array, core.Map, core.Struct:
		return k.String() + " TEXT"
	}
	return "BLOB"
}

// sync copies a table, or what has changed in it, into the database.
func (q *queryEngine) sync(ctx context.Context, p *process, prog *core.Program, t *core.TableDef) error {
	s := q.s
	s.mu.Lock()
	if s.proc != p || !p.up {
		s.mu.Unlock()
		return errProcessDied
	}
	rows, _, full, _ := s.engine.Changes(quoteIdent(t.Name))
	s.mu.Unlock()
	if err := q.copy(ctx, prog, t, rows, full || !q.have[t.Name]); err != nil {
		// What was taken from the change log is lost: start over next time.
		err = errors.Join(fmt.Errorf("load table %s: %w", t.Name, err), q.db.Close())
		q.db = nil
		s.mu.Lock()
		s.engine.Unwatch()
		s.mu.Unlock()
		return err
	}
	q.have[t.Name] = true
	return nil
}

func (q *queryEngine) copy(ctx context.Context, prog *core.Program, t *core.TableDef, rows []core.Weighted, full bool) error {
	if !full && len(rows) == 0 {
		return nil
	}
	name := sqliteName(prog, t)
	data := name[:len(name)-1] + `$data"`
	tx, err := q.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // does nothing after Commit
	var cols, decls, marks []string
	for _, c := range t.Columns {
		cols = append(cols, quoteIdent(c.Name))
		decls = append(decls, quoteIdent(c.Name)+" "+sqliteType(c.Type.Kind))
		marks = append(marks, "?")
	}
	if full {
		stmts := []string{
			"DROP VIEW IF EXISTS " + name,
			"DROP TABLE IF EXISTS " + data,
			"CREATE TABLE " + data + ` ("$key" BLOB, ` + strings.Join(decls, ", ") + ")",
			"CREATE INDEX " + name[:len(name)-1] + `$key" ON ` + data + ` ("$key")`,
			"CREATE VIEW " + name + " AS SELECT " + strings.Join(cols, ", ") + " FROM " + data,
		}
		if len(t.PrimaryKey) > 0 {
			var key []string
			for _, i := range t.PrimaryKey {
				key = append(key, quoteIdent(t.Columns[i].Name))
			}
			stmts = append(stmts, "CREATE INDEX "+name[:len(name)-1]+`$pk" ON `+data+" ("+strings.Join(key, ", ")+")")
		}
		for _, st := range stmts {
			if _, err := tx.ExecContext(ctx, st); err != nil {
				return err
			}
		}
	}
	ins, err := tx.PrepareContext(ctx, "INSERT INTO "+data+" VALUES (?, "+strings.Join(marks, ", ")+")")
	if err != nil {
		return err
	}
	defer ins.Close() // ends with the transaction
	del, err := tx.PrepareContext(ctx, "DELETE FROM "+data+` WHERE "$key" = ?`)
	if err != nil {
		return err
	}
	defer del.Close() // ends with the transaction
	rr := core.NewRowReader(t)
	args := make([]any, len(t.Columns)+1)
	for _, w := range rows {
		key := []byte(w.Key)
		if !full {
			if _, err := del.ExecContext(ctx, key); err != nil {
				return err
			}
		}
		if w.Weight <= 0 {
			continue // a negative weight has no row to show
		}
		args[0] = key
		for i, c := range rr.Cells(w.Row) {
			args[i+1] = sqliteValue(t.Columns[i].Type, c)
		}
		for range w.Weight {
			if _, err := ins.ExecContext(ctx, args...); err != nil {
				return err
			}
		}
	}
	return tx.Commit()
}

func sqliteValue(t *core.Type, c core.Cell) any {
	if c.Null || !c.Known {
		return nil
	}
	switch t.Kind {
	case core.Array, core.Map, core.Struct:
		return arrowText(t, c.Raw)
	case core.Boolean:
		if c.Raw == "true" {
			return int64(1)
		}
		return int64(0)
	case core.TinyInt, core.SmallInt, core.Integer, core.BigInt, core.UTinyInt, core.USmallInt, core.UInteger:
		n, err := strconv.ParseInt(c.Raw, 10, 64)
		if err != nil {
			return c.Raw
		}
		return n
	case core.Real, core.Double:
		f, err := strconv.ParseFloat(c.Raw, 64)
		if err != nil {
			return c.Raw
		}
		return f
	case core.Binary, core.Varbinary:
		return []byte(c.Raw)
	default:
		return c.Raw
	}
}

// resultWriter writes a result in one of the formats.
type resultWriter interface {
	header(names []string)
	row(kinds []string, vals []any) bool // false: too large
	end() []byte
	fail(why string) []byte
}

// jsonResult is one JSON object per line.
type jsonResult struct {
	names []string
	b     bytes.Buffer
}

func (r *jsonResult) header(names []string) { r.names = names }

func (r *jsonResult) row(kinds []string, vals []any) bool {
	for i, v := range vals {
		if i == 0 {
			r.b.WriteByte('{')
		} else {
			r.b.WriteByte(',')
		}
		r.b.Write(core.QuoteJSON(r.names[i]))
		r.b.WriteByte(':')
		text, quoted := render(kinds[i], v)
		switch {
		case v == nil:
			r.b.WriteString("null")
		case quoted:
			r.b.Write(core.QuoteJSON(text))
		default:
			r.b.WriteString(text)
		}
	}
	r.b.WriteString("}\n")
	return r.b.Len() < maxResult
}

func (r *jsonResult) end() []byte { return r.b.Bytes() }

func (r *jsonResult) fail(why string) []byte {
	r.b.WriteString(`{"error":`)
	r.b.Write(core.QuoteJSON(why))
	r.b.WriteByte('}')
	return r.b.Bytes()
}

// textResult is a table drawn with characters.
type textResult struct {
	lines [][]string
	size  int
}

func (r *textResult) header(names []string) { r.lines = append(r.lines, names) }

func (r *textResult) row(kinds []string, vals []any) bool {
	line := make([]string, len(vals))
	for i, v := range vals {
		if v != nil {
			line[i], _ = render(kinds[i], v)
		}
		r.size += len(line[i]) + 3
	}
	r.lines = append(r.lines, line)
	return r.size < maxResult
}

func (r *textResult) draw() string {
	width := make([]int, len(r.lines[0]))
	for _, l := range r.lines {
		for i, c := range l {
			width[i] = max(width[i], utf8.RuneCountInString(c))
		}
	}
	var b strings.Builder
	rule := "+"
	for _, w := range width {
		rule += strings.Repeat("-", w+2) + "+"
	}
	for n, l := range r.lines {
		if n <= 1 {
			b.WriteString(rule + "\n")
		}
		b.WriteString("|")
		for i, c := range l {
			b.WriteString(" " + c + strings.Repeat(" ", width[i]-utf8.RuneCountInString(c)) + " |")
		}
		b.WriteString("\n")
	}
	if len(r.lines) == 1 {
		b.WriteString(rule + "\n")
	}
	b.WriteString(rule)
	return b.String()
}

func (r *textResult) end() []byte { return []byte(r.draw()) }

func (r *textResult) fail(why string) []byte {
	if len(r.lines) == 1 {
		return []byte("ERROR: " + why)
	}
	return []byte(r.draw() + "\nERROR: " + why)
}

// render gives a value as text, and whether JSON quotes it.
func render(kind string, v any) (text string, quoted bool) {
	switch x := v.(type) {
	case nil:
		return "", false
	case bool:
		return strconv.FormatBool(x), false
	case int64:
		if kind == "BOOLEAN" {
			return strconv.FormatBool(x != 0), false
		}
		return strconv.FormatInt(x, 10), false
	case float64:
		if math.IsInf(x, 0) || math.IsNaN(x) {
			return "null", false
		}
		s := strconv.FormatFloat(x, 'g', -1, 64)
		if kind == "REAL" {
			s = strconv.FormatFloat(x, 'g', -1, 32)
		}
		if !strings.ContainsAny(s, ".e") {
			s += ".0"
		}
		return s, false
	case []byte:
		return fmt.Sprintf("%x", x), true
	case string:
		switch kind {
		case "DECIMAL", "UBIG", "ARRAY", "MAP", "STRUCT":
			return x, false
		case "TIMESTAMP", "TIMESTAMP_TZ":
			return renderTimestamp(x), true
		}
		return x, true
	default:
		return fmt.Sprint(x), true
	}
}

// renderTimestamp writes 2026-01-02T03:04:05 with 0, 3 or 6 digits.
func renderTimestamp(s string) string {
	if len(s) < 26 || s[10] != ' ' {
		return s
	}
	frac, zone := s[20:26], s[26:]
	out := s[:10] + "T" + s[11:19]
	switch {
	case frac == "000000":
	case strings.HasSuffix(frac, "000"):
		out += "." + frac[:3]
	default:
		out += "." + frac
	}
	return out + zone
}
