package feldera

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/go-json-experiment/json"

	"holdfast/internal/decode"
)

// Schema holds the input tables of one compiled program. It is immutable.
type Schema struct {
	tables map[string]*Table // by folded name
	where  string
}

// Table is one input table. It is immutable, and safe to share.
type Table struct {
	// Name as the engine knows it: lower case unless declared quoted.
	Name string
	// Columns in the order of declaration.
	Columns []Column
	// Materialized tables can be read by ad-hoc queries. Tables with a primary
	// key are materialized by themselves.
	Materialized bool
	// AppendOnly tables are declared to get inserts alone.
	AppendOnly bool

	key      []int // into Columns, in the order of the PRIMARY KEY clause
	spelling string
}

// Column is one column of a table.
type Column struct {
	// Name as the engine knows it: lower case unless declared quoted.
	Name string
	// Quoted columns match their exact name only.
	Quoted bool
	Type   Type
	// Key is true for a column of the PRIMARY KEY.
	Key bool
}

// TypeName is a SQL type by the name that the program's schema gives it.
type TypeName string

// The types that rows can carry.
const (
	Boolean     TypeName = "BOOLEAN"
	TinyInt     TypeName = "TINYINT"
	SmallInt    TypeName = "SMALLINT"
	Integer     TypeName = "INTEGER"
	BigInt      TypeName = "BIGINT"
	UTinyInt    TypeName = "UTINYINT"
	USmallInt   TypeName = "USMALLINT"
	UInteger    TypeName = "UINTEGER"
	UBigInt     TypeName = "UBIGINT"
	Real        TypeName = "REAL"
	Double      TypeName = "DOUBLE"
	Decimal     TypeName = "DECIMAL"
	Char        TypeName = "CHAR"
	Varchar     TypeName = "VARCHAR"
	Binary      TypeName = "BINARY"
	Varbinary   TypeName = "VARBINARY"
	Date        TypeName = "DATE"
	Time        TypeName = "TIME"
	Timestamp   TypeName = "TIMESTAMP"
	TimestampTZ TypeName = "TIMESTAMP_TZ"
	UUID        TypeName = "UUID"
	Variant     TypeName = "VARIANT"
	ArrayOf     TypeName = "ARRAY"
	MapOf       TypeName = "MAP"
	Struct      TypeName = "STRUCT"
)

// maxTypeDepth bounds the nesting of a column's type.
const maxTypeDepth = 32

// aliases are other spellings of the same types.
var aliases = map[TypeName]TypeName{
	"INT": Integer, "UINT": UInteger, "FLOAT": Real, "ROW": Struct,
	"TINYINT UNSIGNED": UTinyInt, "SMALLINT UNSIGNED": USmallInt,
	"INTEGER UNSIGNED": UInteger, "INT UNSIGNED": UInteger, "BIGINT UNSIGNED": UBigInt,
	"TIMESTAMPTZ": TimestampTZ, "TIMESTAMP_WITH_TIME_ZONE": TimestampTZ,
}

// Type is the type of a column, or of a part of one.
type Type struct {
	Name     TypeName
	Nullable bool
	// Precision and Scale are meaningful for DECIMAL. Known tells whether the
	// schema gave both.
	Precision, Scale int
	Known            bool
	// Element is the element of an ARRAY or the value of a MAP.
	Element *Type
	// MapKey is the key of a MAP.
	MapKey *Type
	// Fields are the members of a STRUCT, in order.
	Fields []Column
}

// String gives the type as SQL writes it.
func (t *Type) String() string {
	switch t.Name {
	case Decimal:
		if t.Known {
			return fmt.Sprintf("DECIMAL(%d,%d)", t.Precision, t.Scale)
		}
	case ArrayOf:
		if t.Element != nil {
			return t.Element.String() + " ARRAY"
		}
	case MapOf:
		if t.Element != nil && t.MapKey != nil {
			return fmt.Sprintf("MAP<%s, %s>", t.MapKey, t.Element)
		}
	case Struct:
		parts := make([]string, len(t.Fields))
		for i := range t.Fields {
			parts[i] = sqlName(t.Fields[i].Name) + " " + t.Fields[i].Type.String()
			if t.Fields[i].Type.Nullable {
				parts[i] += " NULL" // a field is NOT NULL without it
			}
		}
		return "ROW(" + strings.Join(parts, ", ") + ")"
	case UTinyInt, USmallInt, UInteger, UBigInt:
		return strings.TrimPrefix(string(t.Name), "U") + " UNSIGNED"
	case TimestampTZ:
		return "TIMESTAMP WITH TIME ZONE"
	default: // SQL writes it as it is named
	}
	return string(t.Name)
}

// programBody is what a description is read from: the manager's answer for a
// pipeline, or a process's metadata file.
type programBody struct {
	ProgramStatus any            `json:"program_status"`
	ProgramInfo   *programInfo   `json:"program_info"`
	Schema        *programSchema `json:"schema"`
	Inputs        []tableBody    `json:"inputs"`
}

type programInfo struct {
	Schema *programSchema `json:"schema"`
}

type programSchema struct {
	Inputs []tableBody `json:"inputs"`
}

type tableBody struct {
	Name          string              `json:"name"`
	CaseSensitive bool                `json:"case_sensitive"`
	Fields        []fieldBody         `json:"fields"`
	Materialized  bool                `json:"materialized"`
	PrimaryKey    []string            `json:"primary_key"`
	Properties    map[string]propBody `json:"properties"`
}

type propBody struct {
	Value string `json:"value"`
}

// fieldBody is a column, whose type stands under columntype, or a member of a
// STRUCT, whose type can stand beside its name instead.
type fieldBody struct {
	Name          string    `json:"name"`
	CaseSensitive bool      `json:"case_sensitive"`
	ColumnType    *typeBody `json:"columntype"`
	typeBody
}

type typeBody struct {
	Type      *string     `json:"type"`
	Nullable  bool        `json:"nullable"`
	Precision *int64      `json:"precision"`
	Scale     *int64      `json:"scale"`
	Component *typeBody   `json:"component"`
	Fields    []fieldBody `json:"fields"`
	Key       *typeBody   `json:"key"`
	Value     *typeBody   `json:"value"`
}

// Describe reads the program's input tables: one attempt. Its errors tell by
// [Classify] whether trying again may work: a program that is still being
// compiled is worth another attempt, one that did not compile is not.
func (c *Client) Describe(ctx context.Context) (*Schema, error) {
	path := "/metadata"
	if c.viaManager() {
		path = ""
	}
	cl := call{endpoint: epDescribe, path: path, limit: maxLargeBody, method: http.MethodGet}
	body, err := c.roundTrip(ctx, cl)
	if err != nil {
		var e *Error
		if errors.As(err, &e) && Classify(err) == ClassStopOperator {
			if !c.viaManager() && e.Status == http.StatusNotFound {
				return nil, c.noMetadata()
			}
			return nil, e.refusal(c)
		}
		return nil, err // it begins with the request's name
	}
	s, err := c.parseSchema(body)
	if err != nil {
		var refused *decode.Refusal
		if errors.As(err, &refused) {
			return nil, refused
		}
		return nil, c.badAnswer(cl, body, err)
	}
	return s, nil
}

func (c *Client) noMetadata() *decode.Refusal {
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "schema", Where: c.where(),
		Why: "the process offers no metadata", Expected: "the program's schema under /metadata",
		Do: "start the pipeline process with --metadata-file, or name the pipeline and give the manager's address",
	}
}

// errCompiling is worth another attempt.
var errCompiling = errors.New("the program is not compiled yet")

// parseSchema reads a description. Bodies come from outside: any shape must
// end in a schema or an error.
func (c *Client) parseSchema(body []byte) (*Schema, error) {
	var b programBody
	if err := json.Unmarshal(body, &b); err != nil {
		return nil, err
	}
	inputs := b.Inputs
	switch {
	case b.ProgramInfo != nil && b.ProgramInfo.Schema != nil:
		inputs = b.ProgramInfo.Schema.Inputs
	case b.Schema != nil:
		inputs = b.Schema.Inputs
	case inputs != nil:
	case !c.viaManager():
		return nil, c.noMetadata()
	default:
		status := programStatus(b.ProgramStatus)
		if strings.HasSuffix(status, "Error") {
			return nil, &decode.Refusal{
				Reason: decode.ReasonSetup, What: "schema", Where: c.where(),
				Why: "the program did not compile: its status is " + status,
				Do:  "mend the pipeline's SQL program",
			}
		}
		return nil, fmt.Errorf("%w (status %q)", errCompiling, status)
	}
	s := &Schema{tables: make(map[string]*Table, len(inputs)), where: c.where()}
	for i := range inputs {
		t, err := inputs[i].table()
		if err != nil {
			return nil, fmt.Errorf("table %q: %w", clip(inputs[i].Name, 100), err)
		}
		s.tables[t.Name] = t
	}
	return s, nil
}

// programStatus gives the status' name, which is a string or an object with
// the name as its only key.
func programStatus(v any) string {
	switch v := v.(type) {
	case string:
		return clip(v, 100)
	case map[string]any:
		return clip(strings.Join(slices.Sorted(maps.Keys(v)), ","), 100)
	}
	return ""
}

func (b *tableBody) table() (*Table, error) {
	if b.Name == "" || len(b.Fields) == 0 {
		return nil, errors.New("it has no name or no columns")
	}
	t := &Table{
		Name: fold(b.Name, b.CaseSensitive), Materialized: b.Materialized || len(b.PrimaryKey) > 0,
		AppendOnly: strings.EqualFold(b.Properties["append_only"].Value, "true"),
	}
	t.spelling = t.Name
	if strings.ToLower(t.Name) != t.Name {
		t.spelling = `"` + t.Name + `"`
	}
	for i := range b.Fields {
		col, err := b.Fields[i].column(0)
		if err != nil {
			return nil, fmt.Errorf("column %q: %w", clip(b.Fields[i].Name, 100), err)
		}
		t.Columns = append(t.Columns, col)
	}
	for _, name := range b.PrimaryKey {
		i := t.find(name)
		if i < 0 {
			return nil, fmt.Errorf("its primary key names %q, which is no column", clip(name, 100))
		}
		if t.Columns[i].Key {
			return nil, fmt.Errorf("its primary key names %q twice", clip(name, 100))
		}
		t.Columns[i].Key = true
		t.key = append(t.key, i)
	}
	return t, nil
}

func (b *fieldBody) column(depth int) (Column, error) {
	if b.Name == "" {
		return Column{}, errors.New("it has no name")
	}
	from := &b.typeBody
	if b.ColumnType != nil {
		from = b.ColumnType
	}
	typ, err := from.typ(depth)
	return Column{Name: fold(b.Name, b.CaseSensitive), Quoted: b.CaseSensitive, Type: typ}, err
}

func (b *typeBody) typ(depth int) (Type, error) {
	if depth > maxTypeDepth {
		return Type{}, fmt.Errorf("its type is nested more than %d levels deep", maxTypeDepth)
	}
	t := Type{Name: Struct, Nullable: b.Nullable} // a type without a name is a STRUCT
	if b.Type != nil {
		t.Name = TypeName(strings.ToUpper(clip(*b.Type, 100)))
	}
	if same, ok := aliases[t.Name]; ok {
		t.Name = same
	}
	if b.Precision != nil && b.Scale != nil && *b.Precision > 0 && *b.Precision <= maxDecimalDigits &&
		*b.Scale >= 0 && *b.Scale <= *b.Precision {
		t.Precision, t.Scale, t.Known = int(*b.Precision), int(*b.Scale), true
	}
	part := func(p *typeBody) (*Type, error) {
		if p == nil {
			return nil, fmt.Errorf("its type %s is incomplete", t.Name)
		}
		inner, err := p.typ(depth + 1)
		return &inner, err
	}
	var err error
	switch t.Name {
	case ArrayOf:
		t.Element, err = part(b.Component)
	case MapOf:
		if t.MapKey, err = part(b.Key); err == nil {
			t.Element, err = part(b.Value)
		}
	case Struct:
		if len(b.Fields) == 0 {
			return t, errors.New("its type is a STRUCT without fields")
		}
		for i := range b.Fields {
			col, err := b.Fields[i].column(depth + 1)
			if err != nil {
				return t, fmt.Errorf("field %q: %w", clip(b.Fields[i].Name, 100), err)
			}
			t.Fields = append(t.Fields, col)
		}
	default: // it has no parts
	}
	return t, err
}

// maxDecimalDigits is above every precision that the engine has.
const maxDecimalDigits = 1000

// fold gives the name by which the engine compares: exact for a name that was
// declared quoted, lower case otherwise.
func fold(name string, quoted bool) string {
	if quoted {
		return name
	}
	return strings.ToLower(name)
}

// foldSpelling folds a name as a user writes it: "Quoted" is exact, everything
// else lower case.
func foldSpelling(name string) string {
	if len(name) >= 2 && name[0] == '"' && name[len(name)-1] == '"' {
		return strings.ReplaceAll(name[1:len(name)-1], `""`, `"`)
	}
	return strings.ToLower(name)
}

// Names gives the tables' names, sorted.
func (s *Schema) Names() []string { return slices.Sorted(maps.Keys(s.tables)) }

// Table finds an input table by its name as SQL would write it: `orders` and
// `Orders` are the same table, `"Orders"` is another. The error is a
// *decode.Refusal with the names that come near.
func (s *Schema) Table(name string) (*Table, error) {
	if t, ok := s.tables[foldSpelling(name)]; ok {
		return t, nil
	}
	r := &decode.Refusal{
		Reason: decode.ReasonSchema, What: fmt.Sprintf("table %q", clip(name, 100)), Where: s.where,
		Why: "the program has no such input table", Do: "add it to the pipeline's program (for tables of Postgres, run: pgsource feldera-sql -apply), or correct the name in PGSOURCE_TABLES or KAFKASINK_TOPICS",
	}
	if near := s.near(foldSpelling(name)); len(near) > 0 {
		r.Expected = "one of the program's tables, perhaps " + strings.Join(near, " or ")
	} else if len(s.tables) == 0 {
		r.Expected = "a program with input tables; it has none"
	} else {
		names := s.Names()
		r.Expected = "one of " + strings.Join(names[:min(len(names), 20)], ", ")
	}
	return nil, r
}

// near gives up to three tables whose names are close, spelled as they must be
// written.
func (s *Schema) near(name string) []string {
	type candidate struct {
		spelling string
		distance int
	}
	var found []candidate
	for _, t := range s.tables {
		if d := distance(strings.ToLower(t.Name), strings.ToLower(name)); d <= 2 {
			found = append(found, candidate{t.spelling, d})
		}
	}
	slices.SortFunc(found, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(a.distance, b.distance), cmp.Compare(a.spelling, b.spelling))
	})
	var out []string
	for _, c := range found[:min(len(found), 3)] {
		out = append(out, c.spelling)
	}
	return out
}

// distance is the edit distance of two names, at most 100 where either is long.
func distance(a, b string) int {
	if len(a) > 100 || len(b) > 100 {
		return 100
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			diagonal, row[j] = row[j], min(row[j]+1, row[j-1]+1, diagonal+cost)
		}
	}
	return row[len(b)]
}

// Spelling is the one way in which the table is written in addresses and
// queries: another spelling would be another endpoint, without order between
// the two.
func (t *Table) Spelling() string { return t.spelling }

// HasKey tells whether the table has a primary key.
func (t *Table) HasKey() bool { return len(t.key) > 0 }

// KeyNames gives the primary key's columns in the order of its declaration.
func (t *Table) KeyNames() []string {
	names := make([]string, len(t.key))
	for i, k := range t.key {
		names[i] = t.Columns[k].Name
	}
	return names
}

// find gives the index of the column that a source's name means, -1 for none:
// an exact match first, then one without regard to case among the unquoted.
func (t *Table) find(name string) int {
	lower := strings.ToLower(name)
	folded := -1
	for i := range t.Columns {
		if t.Columns[i].Name == name {
			return i
		}
		if !t.Columns[i].Quoted && t.Columns[i].Name == lower {
			folded = i
		}
	}
	return folded
}

// Relation gives the table's own columns and key as the shape of a source, for
// formats that decode straight to the table: without the columns that the
// daemon fills, and then without a key. Each call makes a new one.
func (t *Table) Relation() *decode.Relation {
	rel := &decode.Relation{Name: t.Name, Identity: decode.IdentityDefault, Columns: make([]decode.Column, 0, len(t.Columns))}
	identity, err := t.Identity()
	for i := range t.Columns {
		if identity && err == nil && t.Columns[i].Key {
			continue
		}
		rel.Columns = append(rel.Columns, decode.Column{Name: t.Columns[i].Name, Key: t.Columns[i].Key})
	}
	return rel
}

// ingressPath is the table's one address below the pipeline's.
func (t *Table) ingressPath() string {
	return "/ingress/" + url.PathEscape(t.spelling) + "?format=json&update_format=insert_delete&array=true"
}

// Has tells whether the table has a column for a source's column of this name.
func (t *Table) Has(name string) bool { return t.find(name) >= 0 }

// Shape writes the table's columns for a message, bounded.
func (t *Table) Shape() string {
	const most = 40
	parts := make([]string, 0, min(len(t.Columns), most+1))
	for i := range t.Columns {
		if i == most {
			parts = append(parts, "…")
			break
		}
		c := &t.Columns[i]
		text := sqlName(c.Name) + " " + c.Type.String()
		if !c.Type.Nullable {
			text += " NOT NULL"
		}
		parts = append(parts, text)
	}
	return "(" + strings.Join(parts, ", ") + ")"
}
