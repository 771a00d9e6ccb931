package core

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Kind is a column type of Feldera's SQL.
type Kind uint8

// The types a table column may have. Wire names are in kindNames.
const (
	Boolean Kind = iota + 1
	TinyInt
	SmallInt
	Integer
	BigInt
	UTinyInt
	USmallInt
	UInteger
	UBigInt
	Real
	Double
	Decimal
	Char
	Varchar
	Binary
	Varbinary
	Date
	Time
	Timestamp
	TimestampTZ
	UUID
	Variant
	Array
	Map
	Struct
)

var kindNames = map[Kind]string{
	Boolean: "BOOLEAN", TinyInt: "TINYINT", SmallInt: "SMALLINT", Integer: "INTEGER", BigInt: "BIGINT",
	UTinyInt: "UTINYINT", USmallInt: "USMALLINT", UInteger: "UINTEGER", UBigInt: "UBIGINT",
	Real: "REAL", Double: "DOUBLE", Decimal: "DECIMAL", Char: "CHAR", Varchar: "VARCHAR",
	Binary: "BINARY", Varbinary: "VARBINARY", Date: "DATE", Time: "TIME", Timestamp: "TIMESTAMP",
	TimestampTZ: "TIMESTAMP_TZ", UUID: "UUID", Variant: "VARIANT", Array: "ARRAY", Map: "MAP", Struct: "STRUCT",
}

// String gives the wire name used in the schema JSON.
func (k Kind) String() string {
	if n, ok := kindNames[k]; ok {
		return n
	}
	return "invalid(" + strconv.Itoa(int(k)) + ")"
}

// Type is the type of a column or of a part of one.
type Type struct {
	Kind     Kind
	Nullable bool
	// Precision and Scale are digits for DECIMAL; Precision is the declared
	// length for CHAR, VARCHAR, BINARY and VARBINARY, 0 where none was given.
	Precision, Scale int
	// Elem is the element of an ARRAY, Key and Value those of a MAP.
	Elem, Key, Value *Type
	// Fields of a STRUCT.
	Fields []*Column
}

// Column is one column of a table, or one field of a STRUCT.
type Column struct {
	// Name as the engine canonicalises it: lower case unless it was quoted.
	Name string
	// CaseSensitive is true when the name was quoted.
	CaseSensitive bool
	Type          *Type
	// Default is the text of the DEFAULT expression, "" for none. Only
	// literals are understood.
	Default string
	// Lateness is the text of the LATENESS expression, "" for none.
	Lateness string
}

// TableDef is one CREATE TABLE.
type TableDef struct {
	Name          string
	CaseSensitive bool
	Columns       []*Column
	// PrimaryKey lists indexes into Columns; empty means the table is a
	// multiset.
	PrimaryKey []int
	// Materialized tables can be selected from. A table with a primary key
	// is materialized by itself, unless LATENESS is on its key.
	Materialized bool
	// DeclaredMaterialized is what the WITH clause said: it is what the
	// schema JSON reports.
	DeclaredMaterialized bool
	Properties           map[string]string
}

// ViewDef is one CREATE VIEW. The engine never evaluates it; ad-hoc queries
// over a materialized one are answered by the query engine around the core.
type ViewDef struct {
	Name          string
	CaseSensitive bool
	Materialized  bool
	Query         string
}

// Program is the SQL program of a pipeline.
type Program struct {
	Text   string
	Tables []*TableDef
	Views  []*ViewDef
}

// ParseProgram reads the subset of Feldera's DDL that the simulator knows:
// CREATE TABLE with every column type that can be ingested, and CREATE VIEW,
// which is recorded but not compiled. Anything else is an error that names
// the offending text and its line.
func ParseProgram(text string) (*Program, error) {
	toks, err := lexSQL(text)
	if err != nil {
		return nil, fmt.Errorf("parse SQL program: %w", err)
	}
	p := &ddlParser{text: text, toks: toks}
	prog := &Program{Text: text}
	for {
		for p.accept(";") {
		}
		if p.peek().kind == tokEOF {
			break
		}
		if err := p.statement(prog); err != nil {
			return nil, fmt.Errorf("parse SQL program: %w", err)
		}
	}
	seen := map[string]bool{}
	for _, t := range prog.Tables {
		if seen[t.Name] {
			return nil, fmt.Errorf("parse SQL program: table %q is declared twice", t.Name)
		}
		seen[t.Name] = true
	}
	return prog, nil
}

// Table finds a table by the name written in a URL: unquoted names are folded
// to lower case, quoted ones are taken exactly.
func (p *Program) Table(name string) *TableDef {
	canon := CanonicalName(name)
	for _, t := range p.Tables {
		if t.Name == canon {
			return t
		}
	}
	return nil
}

// CanonicalName folds an identifier as the engine does.
func CanonicalName(name string) string {
	if len(name) >= 2 && name[0] == '"' && name[len(name)-1] == '"' {
		return strings.ReplaceAll(name[1:len(name)-1], `""`, `"`)
	}
	return strings.ToLower(name)
}

type tokKind uint8

const (
	tokEOF tokKind = iota
	tokIdent
	tokQuoted
	tokString
	tokNumber
	tokPunct
)

type token struct {
	kind tokKind
	text string // unquoted content
	pos  int    // byte offset in the program
	end  int
}

func lexSQL(s string) ([]token, error) {
	var out []token
	i := 0
	for i < len(s) {
		c := s[i]
		switch {
		case c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f':
			i++
		case strings.HasPrefix(s[i:], "--") || strings.HasPrefix(s[i:], "//"):
			if n := strings.IndexByte(s[i:], '\n'); n >= 0 {
				i += n
			} else {
				i = len(s)
			}
		case strings.HasPrefix(s[i:], "/*"):
			n := strings.Index(s[i+2:], "*/")
			if n < 0 {
				return nil, fmt.Errorf("line %d: comment is not closed", lineOf(s, i))
			}
			i += n + 4
		case c == '"' || c == '\'':
			start := i
			i++
			var b strings.Builder
			closed := false
			for i < len(s) {
				if s[i] == c {
					if i+1 < len(s) && s[i+1] == c {
						b.WriteByte(c)
						i += 2
						continue
					}
					closed = true
					i++
					break
				}
				b.WriteByte(s[i])
				i++
			}
			if !closed {
				return nil, fmt.Errorf("line %d: quote %q is not closed", lineOf(s, start), string(c))
			}
			k := tokString
			if c == '"' {
				k = tokQuoted
			}
			out = append(out, token{k, b.String(), start, i})
		case c >= '0' && c <= '9':
			start := i
			for i < len(s) && (s[i] >= '0' && s[i] <= '9' || s[i] == '.' || s[i] == 'e' || s[i] == 'E') {
				i++
			}
			out = append(out, token{tokNumber, s[start:i], start, i})
		default:
			r, n := utf8.DecodeRuneInString(s[i:])
			if r == '_' || unicode.IsLetter(r) {
				start := i
				for i < len(s) {
					r, n = utf8.DecodeRuneInString(s[i:])
					if r != '_' && r != '$' && !unicode.IsLetter(r) && !unicode.IsDigit(r) {
						break
					}
					i += n
				}
				out = append(out, token{tokIdent, s[start:i], start, i})
				continue
			}
			out = append(out, token{tokPunct, s[i : i+n], i, i + n})
			i += n
		}
	}
	out = append(out, token{tokEOF, "", len(s), len(s)})
	return out, nil
}

func lineOf(s string, pos int) int { return 1 + strings.Count(s[:pos], "\n") }

type ddlParser struct {
	text string
	toks []token
	i    int
}

func (p *ddlParser) peek() token { return p.toks[p.i] }

func (p *ddlParser) next() token {
	t := p.toks[p.i]
	if t.kind != tokEOF {
		p.i++
	}
	return t
}

// is tells whether the next tokens are these keywords or punctuation marks.
func (p *ddlParser) is(words ...string) bool {
	for n, w := range words {
		if p.i+n >= len(p.toks) {
			return false
		}
		t := p.toks[p.i+n]
		switch t.kind {
		case tokIdent:
			if !strings.EqualFold(t.text, w) {
				return false
			}
		case tokPunct:
			if t.text != w {
				return false
			}
		default:
			return false
		}
	}
	return true
}

func (p *ddlParser) accept(words ...string) bool {
	if p.is(words...) {
		p.i += len(words)
		return true
	}
	return false
}

func (p *ddlParser) expect(word string) error {
	if p.accept(word) {
		return nil
	}
	return p.errorf("expected %q", word)
}

func (p *ddlParser) errorf(format string, args ...any) error {
	t := p.peek()
	found := t.text
	if t.kind == tokEOF {
		found = "the end of the program"
	}
	return fmt.Errorf("line %d: %s, found %q", lineOf(p.text, t.pos), fmt.Sprintf(format, args...), found)
}

func (p *ddlParser) ident() (name string, quoted bool, err error) {
	t := p.peek()
	switch t.kind {
	case tokIdent:
		p.i++
		return strings.ToLower(t.text), false, nil
	case tokQuoted:
		p.i++
		return t.text, true, nil
	default:
		return "", false, p.errorf("expected a name")
	}
}

func (p *ddlParser) statement(prog *Program) error {
	if !p.accept("create") {
		return p.errorf("only CREATE TABLE and CREATE VIEW are understood")
	}
	if p.accept("table") {
		t, err := p.table()
		if err != nil {
			return err
		}
		prog.Tables = append(prog.Tables, t)
		return nil
	}
	v := &ViewDef{}
	for !p.is("view") {
		switch {
		case p.accept("materialized"):
			v.Materialized = true
		case p.accept("local"), p.accept("recursive"):
		default:
			return p.errorf("only CREATE TABLE and CREATE VIEW are understood")
		}
	}
	p.i++
	var err error
	if v.Name, v.CaseSensitive, err = p.ident(); err != nil {
		return err
	}
	for !p.is("as") {
		if t := p.peek(); t.kind == tokEOF || t.text == ";" {
			return p.errorf("expected AS in CREATE VIEW")
		}
		p.i++
	}
	p.i++
	start := p.peek().pos
	for p.peek().kind != tokEOF && !p.is(";") {
		p.i++
	}
	v.Query = strings.TrimSpace(p.text[start:p.peek().pos])
	prog.Views = append(prog.Views, v)
	return nil
}

func (p *ddlParser) table() (*TableDef, error) {
	t := &TableDef{Properties: map[string]string{}}
	var err error
	if p.accept("if", "not", "exists") {
		return nil, p.errorf("IF NOT EXISTS is not part of Feldera's DDL")
	}
	if t.Name, t.CaseSensitive, err = p.ident(); err != nil {
		return nil, err
	}
	if err = p.expect("("); err != nil {
		return nil, err
	}
	var keyNames []string
	for {
		if err = p.tableItem(t, &keyNames); err != nil {
			return nil, err
		}
		if p.accept(",") {
			continue
		}
		if err = p.expect(")"); err != nil {
			return nil, err
		}
		break
	}
	if p.accept("with") {
		if err = p.properties(t.Properties); err != nil {
			return nil, err
		}
	}
	if p.peek().kind != tokEOF && !p.is(";") {
		return nil, p.errorf("expected \";\" after table %q", t.Name)
	}
	for _, k := range keyNames {
		at := -1
		for i, c := range t.Columns {
			if c.Name == k {
				at = i
			}
		}
		if at < 0 {
			return nil, fmt.Errorf("table %q: primary key column %q is not declared", t.Name, k)
		}
		if t.Columns[at].Type.Nullable {
			return nil, fmt.Errorf("table %q: primary key column %q must be declared NOT NULL", t.Name, k)
		}
		t.PrimaryKey = append(t.PrimaryKey, at)
	}
	t.DeclaredMaterialized = strings.EqualFold(t.Properties["materialized"], "true")
	t.Materialized = t.DeclaredMaterialized
	if len(t.PrimaryKey) > 0 {
		late := false
		for _, i := range t.PrimaryKey {
			late = late || t.Columns[i].Lateness != ""
		}
		t.Materialized = t.Materialized || !late
	}
	if len(t.Columns) == 0 {
		return nil, fmt.Errorf("table %q has no columns", t.Name)
	}
	return t, nil
}

func (p *ddlParser) tableItem(t *TableDef, keys *[]string) error {
	if p.accept("constraint") {
		if _, _, err := p.ident(); err != nil {
			return err
		}
	}
	switch {
	case p.accept("primary", "key"):
		if len(*keys) > 0 {
			return p.errorf("table %q has two primary keys", t.Name)
		}
		names, err := p.nameList()
		*keys = names
		return err
	case p.accept("foreign", "key"):
		if _, err := p.nameList(); err != nil {
			return err
		}
		return p.references()
	}
	c := &Column{}
	var err error
	if c.Name, c.CaseSensitive, err = p.ident(); err != nil {
		return err
	}
	for _, o := range t.Columns {
		if o.Name == c.Name {
			return p.errorf("column %q is declared twice in table %q", c.Name, t.Name)
		}
	}
	if c.Type, err = p.columnType(); err != nil {
		return err
	}
	for {
		switch {
		case p.accept("not", "null"):
			c.Type.Nullable = false
		case p.accept("null"):
		case p.accept("primary", "key"):
			if len(*keys) > 0 {
				return p.errorf("table %q has two primary keys", t.Name)
			}
			*keys = []string{c.Name}
		case p.accept("foreign", "key"), p.is("references"):
			if err := p.references(); err != nil {
				return err
			}
		case p.accept("default"):
			c.Default = p.expression()
			if _, err := literalValue(c); err != nil {
				return fmt.Errorf("table %q column %q: %w", t.Name, c.Name, err)
			}
		case p.accept("lateness"):
			c.Lateness = p.expression()
		case p.accept("watermark"):
			p.expression()
		default:
			t.Columns = append(t.Columns, c)
			return nil
		}
	}
}

// expression takes the text up to the next clause of the column.
func (p *ddlParser) expression() string {
	start := p.peek().pos
	end := start
	depth := 0
	for {
		t := p.peek()
		if t.kind == tokEOF {
			break
		}
		if t.kind == tokPunct {
			if depth == 0 && (t.text == "," || t.text == ")") {
				break
			}
			switch t.text {
			case "(":
				depth++
			case ")":
				depth--
			}
		}
		if depth == 0 && end > start && (p.is("not", "null") || p.is("primary", "key") || p.is("lateness") || p.is("watermark") || p.is("default")) {
			break
		}
		end = t.end
		p.i++
	}
	return strings.TrimSpace(p.text[start:end])
}

func (p *ddlParser) references() error {
	if err := p.expect("references"); err != nil {
		return err
	}
	if _, _, err := p.ident(); err != nil {
		return err
	}
	if p.is("(") {
		_, err := p.nameList()
		return err
	}
	return nil
}

func (p *ddlParser) nameList() ([]string, error) {
	if err := p.expect("("); err != nil {
		return nil, err
	}
	var out []string
	for {
		n, _, err := p.ident()
		if err != nil {
			return nil, err
		}
		out = append(out, n)
		if p.accept(",") {
			continue
		}
		return out, p.expect(")")
	}
}

func (p *ddlParser) properties(into map[string]string) error {
	if err := p.expect("("); err != nil {
		return err
	}
	for {
		k := p.next()
		if k.kind != tokString {
			p.i--
			return p.errorf("expected a quoted property name")
		}
		if err := p.expect("="); err != nil {
			return err
		}
		v := p.next()
		if v.kind != tokString {
			p.i--
			return p.errorf("expected a quoted property value")
		}
		into[k.text] = v.text
		if p.accept(",") {
			continue
		}
		return p.expect(")")
	}
}

// length reads an optional "(n)" or "(n, m)".
func (p *ddlParser) length() (n, m int, given bool, err error) {
	if !p.accept("(") {
		return 0, 0, false, nil
	}
	t := p.next()
	if n, err = strconv.Atoi(t.text); err != nil || t.kind != tokNumber {
		p.i--
		return 0, 0, false, p.errorf("expected a number")
	}
	if p.accept(",") {
		t = p.next()
		if m, err = strconv.Atoi(t.text); err != nil || t.kind != tokNumber {
			p.i--
			return 0, 0, false, p.errorf("expected a number")
		}
	}
	return n, m, true, p.expect(")")
}

// columnType reads a type. Parts are nullable unless they say NOT NULL.
func (p *ddlParser) columnType() (*Type, error) {
	t := &Type{Nullable: true}
	word := p.peek()
	if word.kind != tokIdent {
		return nil, p.errorf("expected a type")
	}
	p.i++
	var err error
	switch strings.ToUpper(word.text) {
	case "BOOLEAN", "BOOL":
		t.Kind = Boolean
	case "TINYINT":
		t.Kind = TinyInt
	case "SMALLINT", "INT2":
		t.Kind = SmallInt
	case "INT", "INTEGER", "INT4", "SIGNED":
		t.Kind = Integer
	case "BIGINT", "INT8", "INT64":
		t.Kind = BigInt
	case "UNSIGNED":
		t.Kind = UInteger
	case "REAL", "FLOAT4", "FLOAT32":
		t.Kind = Real
	case "DOUBLE", "FLOAT8", "FLOAT64", "FLOAT":
		t.Kind = Double
		p.accept("precision")
	case "DECIMAL", "NUMERIC", "DEC", "NUMBER":
		t.Kind = Decimal
		var given bool
		t.Precision, t.Scale, given, err = p.length()
		if err == nil && !given {
			t.Precision = 38
		}
		if err == nil && (t.Precision < 1 || t.Precision > 38 || t.Scale < 0 || t.Scale > t.Precision) {
			err = p.errorf("DECIMAL(%d,%d) is not a valid type", t.Precision, t.Scale)
		}
	case "CHAR", "CHARACTER":
		t.Kind = Char
		if p.accept("varying") {
			t.Kind = Varchar
		}
		t.Precision, _, _, err = p.length()
	case "VARCHAR":
		t.Kind = Varchar
		t.Precision, _, _, err = p.length()
	case "STRING", "TEXT":
		t.Kind = Varchar
	case "BINARY":
		t.Kind = Binary
		if p.accept("varying") {
			t.Kind = Varbinary
		}
		t.Precision, _, _, err = p.length()
	case "VARBINARY":
		t.Kind = Varbinary
		t.Precision, _, _, err = p.length()
	case "BYTEA":
		t.Kind = Varbinary
	case "DATE":
		t.Kind = Date
	case "TIME":
		t.Kind = Time
		_, _, _, err = p.length()
	case "TIMESTAMP", "DATETIME":
		t.Kind = Timestamp
		if _, _, _, err = p.length(); err == nil && p.accept("with", "time", "zone") {
			t.Kind = TimestampTZ
		}
	case "UUID":
		t.Kind = UUID
	case "VARIANT":
		t.Kind = Variant
	case "ARRAY":
		t.Kind = Array
		t.Elem, err = p.typeArgs1()
	case "MAP":
		t.Kind = Map
		if err = p.expect("<"); err != nil {
			break
		}
		if t.Key, err = p.partType(); err != nil {
			break
		}
		if err = p.expect(","); err != nil {
			break
		}
		if t.Value, err = p.partType(); err != nil {
			break
		}
		err = p.expect(">")
		t.Key.Nullable = false
	case "ROW":
		t.Kind = Struct
		t.Fields, err = p.fields()
	default:
		p.i--
		return nil, p.errorf("unknown type")
	}
	if err != nil {
		return nil, err
	}
	if p.accept("unsigned") {
		switch t.Kind {
		case TinyInt:
			t.Kind = UTinyInt
		case SmallInt:
			t.Kind = USmallInt
		case Integer:
			t.Kind = UInteger
		case BigInt:
			t.Kind = UBigInt
		default:
			return nil, p.errorf("%s cannot be UNSIGNED", t.Kind)
		}
	}
	for p.accept("array") {
		t = &Type{Kind: Array, Nullable: true, Elem: t}
	}
	return t, nil
}

func (p *ddlParser) typeArgs1() (*Type, error) {
	if err := p.expect("<"); err != nil {
		return nil, err
	}
	t, err := p.partType()
	if err != nil {
		return nil, err
	}
	return t, p.expect(">")
}

func (p *ddlParser) partType() (*Type, error) {
	t, err := p.columnType()
	if err == nil && p.accept("not", "null") {
		t.Nullable = false
	} else if err == nil {
		p.accept("null")
	}
	return t, err
}

func (p *ddlParser) fields() ([]*Column, error) {
	if err := p.expect("("); err != nil {
		return nil, err
	}
	var out []*Column
	for {
		c := &Column{}
		var err error
		if c.Name, c.CaseSensitive, err = p.ident(); err != nil {
			return nil, err
		}
		if c.Type, err = p.columnType(); err != nil {
			return nil, err
		}
		// Unlike a column, a field is NOT NULL unless it says otherwise.
		if c.Type.Nullable = p.accept("null"); !c.Type.Nullable {
			p.accept("not", "null")
		}
		out = append(out, c)
		if p.accept(",") {
			continue
		}
		return out, p.expect(")")
	}
}

// literalValue turns the text of a DEFAULT literal into JSON for the column.
func literalValue(c *Column) ([]byte, error) {
	s := c.Default
	if strings.EqualFold(s, "null") {
		return []byte("null"), nil
	}
	for _, prefix := range []string{"timestamp", "date", "time"} {
		if len(s) > len(prefix) && strings.EqualFold(s[:len(prefix)], prefix) {
			s = strings.TrimSpace(s[len(prefix):])
			break
		}
	}
	switch {
	case len(s) >= 2 && s[0] == '\'' && s[len(s)-1] == '\'':
		return appendQuoted(nil, []byte(strings.ReplaceAll(s[1:len(s)-1], "''", "'"))), nil
	case strings.EqualFold(s, "true"), strings.EqualFold(s, "false"):
		return []byte(strings.ToLower(s)), nil
	default:
		n, _, ok := scanNumber([]byte(s), 0)
		if !ok || n != len(s) {
			return nil, fmt.Errorf("DEFAULT %s: only literals are understood", c.Default)
		}
		return []byte(s), nil
	}
}

// SQLToken is a piece of a SQL text, for those who rewrite one.
type SQLToken struct {
	// Name is the canonical name if the token is an identifier, else "".
	Name string
	// Quoted is true for an identifier in double quotes.
	Quoted bool
	// Literal is true for a string literal; Text is then its content.
	Literal bool
	Text    string
	// Start and End are byte offsets.
	Start, End int
}

// SQLTokens takes a SQL text apart.
func SQLTokens(text string) ([]SQLToken, error) {
	toks, err := lexSQL(text)
	if err != nil {
		return nil, err
	}
	out := make([]SQLToken, 0, len(toks))
	for _, t := range toks {
		s := SQLToken{Text: t.text, Start: t.pos, End: t.end}
		switch t.kind {
		case tokIdent:
			s.Name = strings.ToLower(t.text)
		case tokQuoted:
			s.Name, s.Quoted = t.text, true
		case tokString:
			s.Literal = true
		case tokEOF:
			continue
		default:
		}
		out = append(out, s)
	}
	return out, nil
}

// Canonical turns the text form of a value of this kind into canonical form;
// ok is false where it has none.
func (k Kind) Canonical(text string) (canon string, ok bool) {
	t := Type{Kind: k}
	out, why := t.canonicalText(nil, text)
	return string(out), why == ""
}
