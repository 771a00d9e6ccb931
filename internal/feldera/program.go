package feldera

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"holdfast/internal/decode"
)

// This file makes a pipeline's program fit its source: it writes CREATE TABLE
// statements in the engine's dialect, tells what a program lacks, and puts the
// statements into a pipeline through the manager. Its caller is the verb
// feldera-sql of cmd/pgsource.

// TableDef is a table that a program should declare.
type TableDef struct {
	// Target is the table as SQL writes it: in double quotes where it is not
	// all lower case.
	Target string
	// Relation is the source's shape with its type OIDs; nil for a table that
	// has no source.
	Relation *decode.Relation
	Columns  []ColumnDef
	// Key names the columns of the PRIMARY KEY, in order; empty for none.
	Key []string
	// Unique are the columns of the source's unique indexes. Under REPLICA
	// IDENTITY FULL a key has to have those of one.
	Unique [][]string
	// Notes become comment lines above the statement.
	Notes []string
	// Unusable says why the source cannot be carried as it is, with what mends
	// it; "" where it can.
	Unusable string
}

// ColumnDef is a column that a table should have.
type ColumnDef struct {
	// Name as the source spells it.
	Name string
	Type Type
	// SourceType is the source's type as its own SQL writes it.
	SourceType string
	// BaseOID is the source's Postgres type behind all domains; 0 = unknown.
	BaseOID uint32
	// Loose is true where the source sets no bounds, so that those of Type are
	// a choice and others are as good.
	Loose bool
	// Note becomes a comment above the column; "" for none.
	Note string
}

// DefaultProgressTable is the progress table's name where none is set.
const DefaultProgressTable = "holdfast_progress"

// ProgressTable is the table in which the daemons record how far the pipeline
// has got: see [ProgressRow] and ARCHITECTURE.md.
func ProgressTable(target string) TableDef {
	text := Type{Name: Varchar}
	number := Type{Name: UBigInt}
	return TableDef{
		Target: target,
		Notes:  []string{"how far each source has got in this pipeline; written by the daemons alone"},
		Columns: []ColumnDef{
			{Name: "source", Type: text, Note: "cluster and slot, or cluster and group"},
			{Name: "lane", Type: text, Note: "empty, or topic and partition"},
			{Name: "epoch", Type: Type{Name: BigInt}, Note: "raised by each new owner"},
			{Name: "slot", Type: Type{Name: BigInt}, Note: "0 and 1 in turn: the newer row proves the older one"},
			{Name: "position", Type: number, Note: "all rows up to this LSN, or below this offset, were in before this row"},
			{Name: "incarnation", Type: text, Note: "the pipeline process that they were in, and their step in it"},
			{Name: "step", Type: number},
			{Name: "fingerprint", Type: text, Note: "of the mapping"},
			{Name: "recorded_at", Type: Type{Name: Timestamp}, Note: "UTC"},
		},
		Key: []string{"source", "lane", "epoch", "slot"},
	}
}

// Name is the table's name as the engine knows it.
func (d *TableDef) Name() string { return foldSpelling(d.Target) }

// SQL is the statement with its comments, ended by a semicolon and a newline.
// No comment can end its line early, whatever the source's names are.
func (d *TableDef) SQL() string {
	var b strings.Builder
	if d.Relation != nil {
		fmt.Fprintf(&b, "-- source: %s\n", comment(d.Relation.String()))
	}
	for _, n := range d.Notes {
		fmt.Fprintf(&b, "-- %s\n", comment(n))
	}
	if d.Unusable != "" {
		fmt.Fprintf(&b, "-- NOT USABLE YET: %s\n", comment(d.Unusable))
	}
	fmt.Fprintf(&b, "CREATE TABLE %s (\n", identifier(d.Name()))
	for i := range d.Columns {
		c := &d.Columns[i]
		if c.Note != "" {
			fmt.Fprintf(&b, "    -- %s\n", comment(c.Note))
		}
		fmt.Fprintf(&b, "    %s", c.SQL())
		if i < len(d.Columns)-1 || len(d.Key) > 0 {
			b.WriteByte(',')
		}
		b.WriteByte('\n')
	}
	if len(d.Key) > 0 {
		names := make([]string, len(d.Key))
		for i, k := range d.Key {
			names[i] = identifier(k)
		}
		fmt.Fprintf(&b, "    PRIMARY KEY (%s)\n", strings.Join(names, ", "))
	}
	b.WriteString(") WITH ('materialized' = 'true');\n")
	return b.String()
}

// SQL is the column as it stands in CREATE TABLE.
func (c *ColumnDef) SQL() string {
	s := identifier(c.Name) + " " + c.Type.String()
	if !c.Type.Nullable {
		s += " NOT NULL"
	}
	return s
}

// maxComment bounds one comment line, in bytes.
const maxComment = 1000

func comment(s string) string { return clip(s, maxComment) }

// identifier writes a name so that the engine keeps it: bare only where
// folding would not change it and it is no word of the language.
func identifier(name string) string {
	if s := sqlName(name); s != name || !slices.Contains(strings.Fields(reservedWords), name) {
		return s
	}
	return `"` + name + `"`
}

// reservedWords are those that the dialect does not take as bare names. One
// too many costs a pair of quotes, one too few a program that does not compile.
const reservedWords = `
abs all allocate allow alter and any are array array_agg array_concat_agg array_max_cardinality as asensitive asof asymmetric at atomic
authorization avg begin begin_frame begin_partition between bigint binary bit blob boolean both by call called cardinality cascaded case cast
ceil ceiling char char_length character character_length check classifier clob close coalesce collate collect column commit condition connect
constraint contains convert corr corresponding count covar_pop covar_samp create cross cube cume_dist current current_catalog current_date
current_default_transform_group current_path current_role current_row current_schema current_time current_timestamp
current_transform_group_for_type current_user cursor cycle date datetime day deallocate dec decimal declare default define delete dense_rank
deref describe deterministic disallow disconnect distinct double drop dynamic each element else empty end end_exec end_frame end_partition
equals escape every except exec execute exists exp explain extend external extract false fetch filter first_value float floor for foreign
frame_row free friday from full function fusion geometry get global grant group grouping groups having hold hour identity if ilike import in
indicator initial inner inout insensitive insert int integer interned intersect intersection interval into is join json_array json_arrayagg
json_exists json_object json_objectagg json_query json_scope json_value lag language large last_value lateness lateral lead leading left like
like_regex limit ln local localtime localtimestamp lower map match match_number match_recognize matches materialized max measure measures
member merge method min minus minute mod modifies module monday month multiset national natural nchar nclob new next no none normalize not now
nth_value ntile null nullif number numeric occurrences_regex octet_length of offset old omit on one only open or order ordinal out outer over
overlaps overlay parameter partition pattern per percent percent_rank percentile_cont percentile_disc period permute portion position
position_regex power precedes precision prepare prev primary procedure qualify range rank reads real recursive ref references referencing
regr_avgx regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy release reset result return returns revoke right
rlike rollback rollup row row_number rows running safe_cast safe_offset safe_ordinal saturday savepoint scope scroll search second seek select
sensitive session_user set show signed similar skip smallint some specific specifictype sql sqlexception sqlstate sqlwarning sqrt start static
stddev_pop stddev_samp step stream string submultiset subset substring substring_regex succeeds sum sunday symmetric system system_time
system_user table tablesample text then thursday time timestamp timestampadd timestampdiff timezone_hour timezone_minute tinyint to trailing
translate translate_regex translation treat trigger trim trim_array true truncate try_cast tuesday type uescape union unique unknown unnest
unsigned update upper upsert user using uuid value value_of values var_pop var_samp varbinary varchar variant varying versioning view watermark
wednesday when whenever where width_bucket window with within without year`

// The lines between which a program is ours.
const (
	MarkerBegin = "-- holdfast:begin"
	MarkerEnd   = "-- holdfast:end"
)

// GenerateProgram writes the statements of all tables between the markers.
func GenerateProgram(tables []TableDef) string {
	var b strings.Builder
	b.WriteString(MarkerBegin + "\n-- Written by pgsource feldera-sql, which replaces what stands between these two markers.\n")
	for i := range tables {
		b.WriteString("\n" + tables[i].SQL())
	}
	b.WriteString("\n" + MarkerEnd + "\n")
	return b.String()
}

// MergeProgram puts a generated part (see GenerateProgram) into a program. It
// replaces what stands between the markers and keeps everything else byte by
// byte. A program with statements and without markers is somebody's own: it is
// refused, as is one that declares one of the tables a second time. Errors are
// *decode.Refusal.
func MergeProgram(current, generated string) (string, error) {
	refuse := func(why, expected, do string) error {
		return &decode.Refusal{Reason: decode.ReasonSetup, What: "change of the pipeline's program", Why: why, Expected: expected, Do: do}
	}
	begin, end, n := -1, -1, [2]int{}
	at := 0
	for line := range strings.Lines(current) {
		switch strings.TrimSpace(line) {
		case MarkerBegin:
			begin = at
			n[0]++
		case MarkerEnd:
			end = at + len(line)
			n[1]++
		}
		at += len(line)
	}
	switch {
	case n == [2]int{}:
		if !hasStatements(current) {
			return generated, nil
		}
		return "", refuse("it has statements and no part that belongs to pgsource",
			fmt.Sprintf("the lines %q and %q where the tables are to stand", MarkerBegin, MarkerEnd),
			"put these two lines at the beginning of the program, take out the tables that PGSOURCE_TABLES maps, and do it again")
	case n != [2]int{1, 1} || end <= begin:
		return "", refuse("its markers are not one begin and one end behind it",
			fmt.Sprintf("%q once, then %q once, each on a line of its own", MarkerBegin, MarkerEnd), "correct the markers in the program")
	}
	before, after := current[:begin], current[end:]
	ours := declaredTables(generated)
	for _, part := range []string{before, after} {
		for _, name := range declaredTables(part) {
			if slices.Contains(ours, name) {
				return "", refuse(fmt.Sprintf("it declares table %q outside the markers too", clip(name, 100)), "each table once",
					"take the statement out of the program, or the table out of PGSOURCE_TABLES")
			}
		}
	}
	merged := before + generated + after
	for _, name := range ours {
		if !slices.Contains(declaredTables(merged), name) {
			return "", refuse("a comment or a quote before the markers is not closed, so the tables between them would not be seen",
				"nothing open where the first marker stands", "close it in the program")
		}
	}
	return merged, nil
}

// hasStatements tells whether a text is more than blanks and comments.
func hasStatements(sql string) bool {
	for range sqlWords(sql) {
		return true
	}
	return false
}

// declaredTables gives the folded names of all CREATE TABLE statements.
func declaredTables(sql string) []string {
	var names []string
	var last [2]string
	for w := range sqlWords(sql) {
		if last[0] == "create" && last[1] == "table" {
			names = append(names, foldSpelling(w))
		}
		last = [2]string{last[1], strings.ToLower(w)}
	}
	return names
}

// sqlWords gives the words, quoted names and other single characters of a SQL
// text, without comments; a string literal is given as one word. It never
// fails: what is not closed reaches to the end.
func sqlWords(s string) func(yield func(string) bool) {
	wordByte := func(c byte) bool {
		return c == '_' || c == '$' || c >= 0x80 || c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
	}
	upTo := func(from int, end string) int {
		if n := strings.Index(s[from:], end); n >= 0 {
			return from + n + len(end)
		}
		return len(s)
	}
	return func(yield func(string) bool) {
		for i := 0; i < len(s); {
			start := i
			switch c := s[i]; {
			case c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f':
				i++
				continue
			case strings.HasPrefix(s[i:], "--"):
				i = upTo(i, "\n")
				continue
			case strings.HasPrefix(s[i:], "/*"):
				i = upTo(i+2, "*/")
				continue
			case c == '\'' || c == '"':
				for i = upTo(i+1, string(c)); i < len(s) && s[i] == c; {
					i = upTo(i+1, string(c)) // a doubled quote stands for one
				}
			case wordByte(c):
				for i < len(s) && wordByte(s[i]) {
					i++
				}
			default:
				i++
			}
			if !yield(s[start:i]) {
				return
			}
		}
	}
}

// DifferenceKind is the closed set of ways in which a program does not fit.
type DifferenceKind string

// The kinds.
const (
	DifferenceTable    DifferenceKind = "missing_table"
	DifferenceColumn   DifferenceKind = "missing_column"
	DifferenceType     DifferenceKind = "type"
	DifferenceNotNull  DifferenceKind = "not_null"
	DifferenceNoSource DifferenceKind = "no_source"
	DifferenceKey      DifferenceKind = "key"
	DifferenceUnusable DifferenceKind = "unusable"
	DifferenceOther    DifferenceKind = "other"
)

// Difference is one thing that a program needs before it can take its source.
type Difference struct {
	Table  string         `json:"table"`
	Column string         `json:"column,omitempty"`
	Kind   DifferenceKind `json:"kind"`
	// Source and Pipeline are the two sides, in the words of each.
	Source   string `json:"source,omitempty"`
	Pipeline string `json:"pipeline,omitempty"`
	// SQL is the statement or the column to declare; "" where there is none.
	SQL  string `json:"sql,omitempty"`
	Text string `json:"text"`
}

// Differences tells what the program's tables lack to take the sources. Only
// what would stop pgsource, or let it lose or double something, is a
// difference: a wider type and a column that may be NULL are none. Columns
// that the policy ignores are left out.
func Differences(s *Schema, want []TableDef, p Policy) []Difference {
	var out []Difference
	for i := range want {
		d := &want[i]
		found := d.differences(s, p)
		for n := range found {
			found[n].Table = identifier(d.Name())
		}
		out = append(out, found...)
	}
	return out
}

func (d *TableDef) differences(s *Schema, p Policy) []Difference {
	var out []Difference
	if d.Unusable != "" {
		out = append(out, Difference{Kind: DifferenceUnusable, Source: d.Relation.String(), Text: d.Unusable})
	}
	t, ok := s.tables[d.Name()]
	if !ok {
		return append(out, Difference{Kind: DifferenceTable, SQL: d.SQL(), Text: "the program has no such table"})
	}
	identity, err := t.Identity()
	switch wanted := slices.Equal(d.Key, IdentityKey()); {
	case err != nil:
		return append(out, Difference{Kind: DifferenceKey, Pipeline: list(t.KeyNames()), SQL: d.SQL(), Text: err.Error()})
	case identity && !wanted:
		text := "the table has identity columns as its PRIMARY KEY, and the source has a key of its own"
		if len(d.Key) == 0 {
			text = "the table has identity columns as its PRIMARY KEY, which take inserts alone, and the source publishes updates and deletes"
		}
		return append(out, Difference{Kind: DifferenceKey, Source: list(d.Key), Pipeline: list(t.KeyNames()), SQL: d.SQL(), Text: text})
	}
	sourced := make([]bool, len(t.Columns))
	for i := range d.Columns {
		c := &d.Columns[i]
		at := t.find(c.Name)
		if at < 0 {
			if d.Relation == nil || !p.IgnoreExtraColumns {
				out = append(out, Difference{Column: c.Name, Kind: DifferenceColumn, Source: c.SourceType, SQL: c.SQL(), Text: "the table has no such column"})
			}
			continue
		}
		sourced[at] = true
		if identity && t.Columns[at].Key {
			continue // it was looked at as a whole
		}
		have := &t.Columns[at].Type
		both := Difference{Column: c.Name, Source: c.SourceType, Pipeline: have.String(), SQL: c.SQL()}
		if !c.heldBy(have) {
			both.Kind = DifferenceType
			both.Text = fmt.Sprintf("the source has %s, which needs %s; the table has %s", orWord(c.SourceType, c.Type.String()), c.Type.String(), have.String())
			out = append(out, both)
		}
		if c.Type.Nullable && !have.Nullable {
			both.Kind, both.Text = DifferenceNotNull, "it can be NULL in the source and is NOT NULL in the table"
			out = append(out, both)
		}
	}
	for i := range t.Columns {
		if c := &t.Columns[i]; !sourced[i] && !c.Type.Nullable {
			out = append(out, Difference{
				Column: c.Name, Kind: DifferenceNoSource, Pipeline: c.Type.String() + " NOT NULL",
				Text: "the table has it as NOT NULL and the source has no such column",
			})
		}
	}
	if diff := d.keyDifference(t); diff != nil {
		out = append(out, *diff)
	}
	if len(out) == 0 && d.Relation != nil {
		// The encoder has the last word.
		if _, err := NewEncoder(t, d.Relation, p); err != nil {
			out = append(out, Difference{Kind: DifferenceOther, Text: err.Error()})
		}
	}
	return out
}

func orWord(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

// keyDifference compares the keys. Under REPLICA IDENTITY FULL every key works
// that the source holds unique.
func (d *TableDef) keyDifference(t *Table) *Difference {
	want := make([]string, len(d.Key))
	for i, k := range d.Key {
		want[i] = k
		if at := t.find(k); at >= 0 {
			want[i] = t.Columns[at].Name
		}
	}
	have := t.KeyNames()
	switch full := d.Relation != nil && d.Relation.Identity == decode.IdentityFull; {
	case full && len(have) > 0 && !Identifies(have, d.Unique):
		return &Difference{
			Kind: DifferenceKey, Source: "no unique index", Pipeline: list(have),
			Text: fmt.Sprintf("the table identifies rows by %s, over which the source has no unique index: its rows would overwrite each other", list(have)),
		}
	case len(want) == 0, full && len(have) > 0:
		return nil
	case slices.Equal(slices.Sorted(slices.Values(want)), slices.Sorted(slices.Values(have))):
		return nil
	}
	sql := make([]string, len(d.Key))
	for i, k := range d.Key {
		sql[i] = identifier(k)
	}
	diff := &Difference{
		Kind: DifferenceKey, Source: list(d.Key), Pipeline: list(have), SQL: "PRIMARY KEY (" + strings.Join(sql, ", ") + ")",
		Text: fmt.Sprintf("the source identifies rows by %s, the table by %s", list(want), list(have)),
	}
	if len(have) == 0 {
		diff.Pipeline = "no key"
		diff.Text = fmt.Sprintf("the source identifies rows by %s, the table has no PRIMARY KEY: rows that are sent again would count twice", list(want))
	}
	return diff
}

// Identifies tells whether a key has all columns of one of the unique indexes,
// so that no two rows of the source are one under it.
func Identifies(key []string, unique [][]string) bool {
	return slices.ContainsFunc(unique, func(index []string) bool {
		return !slices.ContainsFunc(index, func(column string) bool {
			return !slices.ContainsFunc(key, func(k string) bool { return strings.EqualFold(k, column) })
		})
	})
}

// heldBy tells whether a column of type have takes every value of the source
// that the wanted type takes.
func (c *ColumnDef) heldBy(have *Type) bool {
	if allowed := fits(c.BaseOID); allowed != nil && !slices.Contains(allowed, have.Name) {
		return false
	}
	return holds(have, &c.Type, c.Loose, c.BaseOID != 0 && fits(c.BaseOID) != nil)
}

// HeldBy tells whether the table's column of this name takes every value of the
// source; true where it has none.
func (c *ColumnDef) HeldBy(t *Table, p Policy) bool {
	at := t.find(c.Name)
	if at < 0 {
		return true
	}
	have, want := &t.Columns[at].Type, *c
	if p.Fraction == TruncateExcess && !t.Columns[at].Key && have.Name == Decimal && want.Type.Name == Decimal && want.Type.Scale > have.Scale {
		want.Type.Precision -= want.Type.Scale - have.Scale
		want.Type.Scale = have.Scale
	}
	return want.heldBy(have)
}

// holds is heldBy for a type or a part of one. known means that the encoder's
// own list has allowed the pair.
func holds(have, want *Type, loose, known bool) bool {
	low, high, isInt := integerRange(have.Name)
	wantLow, wantHigh, wantInt := integerRange(want.Name)
	switch {
	case isInt && wantInt:
		return low <= wantLow && high >= wantHigh
	case have.Name == Decimal && want.Name == Decimal:
		return have.Known && (loose || have.Scale >= want.Scale && have.Precision-have.Scale >= want.Precision-want.Scale)
	case have.Name == Decimal && wantInt:
		return have.Known && float64(have.Precision-have.Scale) >= math.Ceil(math.Log10(wantHigh))
	case have.Name == Real && want.Name == Double:
		return false // digits would be lost in silence
	case have.Name == ArrayOf && want.Name == ArrayOf:
		return have.Element != nil && want.Element != nil && holds(have.Element, want.Element, loose, false)
	case have.Name == want.Name, have.Name == Varchar, have.Name == Char && want.Name == Varchar:
		return true
	}
	return known || have.Name == Variant
}

// integerRange gives an integer type's least and greatest value, as near as a
// float64 has them: the comparison of two types needs no more.
func integerRange(t TypeName) (low, high float64, ok bool) {
	var bits int
	signed := true
	switch t {
	case TinyInt:
		bits = 8
	case SmallInt:
		bits = 16
	case Integer:
		bits = 32
	case BigInt:
		bits = 64
	case UTinyInt:
		bits, signed = 8, false
	case USmallInt:
		bits, signed = 16, false
	case UInteger:
		bits, signed = 32, false
	case UBigInt:
		bits, signed = 64, false
	default:
		return 0, 0, false
	}
	if signed {
		return -math.Exp2(float64(bits - 1)), math.Exp2(float64(bits-1)) - 1, true
	}
	return 0, math.Exp2(float64(bits)) - 1, true
}

// epPipeline is the manager's own description of the pipeline, and the change
// of it.
const epPipeline = "pipeline"

// The manager's names that ApplyProgram acts on.
const (
	statusSuccess     = "Success"
	deploymentStopped = "Stopped"
	deploymentPaused  = "Paused"
	deploymentWaiting = "AwaitingApproval"

	codeNotStopped  = "UpdateRestrictedToStopped"
	codeNotCleared  = "EditRestrictedToClearedStorage"
	codeUnsupported = "UnsupportedPipelineAction"
)

const (
	// maxProgram bounds a program, in bytes, beyond anything that compiles.
	maxProgram = 8 << 20
	// maxPoll is the longest wait between two looks at the manager.
	maxPoll = 2 * time.Second
)

// PipelineInfo is a pipeline as the manager describes it.
type PipelineInfo struct {
	// Code is the program's text, "" where only the status was asked for.
	Code string
	// ProgramVersion counts the changes of the program.
	ProgramVersion int64
	// ProgramStatus is Pending, CompilingSql, SqlCompiled, CompilingRust,
	// Success, SqlError, RustError or SystemError.
	ProgramStatus string
	// CompileErrors is what the compilers said, bounded; "" for nothing.
	CompileErrors string
	// Deployment and Desired are Stopped, Provisioning, Running, ….
	Deployment, Desired string
	// DeploymentError is why the last run ended, "" for no error.
	DeploymentError string
}

type pipelineBody struct {
	ProgramCode     string         `json:"program_code"`
	ProgramVersion  int64          `json:"program_version"`
	ProgramStatus   any            `json:"program_status"`
	ProgramError    jsontext.Value `json:"program_error"`
	Deployment      string         `json:"deployment_status"`
	Desired         string         `json:"deployment_desired_status"`
	DeploymentError *struct {
		Message string `json:"message"`
	} `json:"deployment_error"`
}

// Pipeline asks the manager for the pipeline: one attempt. whole asks for the
// program and the compilers' messages too. The pipeline is nil where the
// manager has none of this name.
func (c *Client) Pipeline(ctx context.Context, whole bool) (*PipelineInfo, error) {
	if !c.viaManager() {
		return nil, c.noManager()
	}
	cl := call{endpoint: epPipeline, path: "?selector=status", limit: maxLargeBody}
	if whole {
		cl.path = "?selector=all"
	}
	var b pipelineBody
	err := c.getJSON(ctx, cl, &b)
	if e, ok := errors.AsType[*Error](err); ok && e.Code == codeUnknownPipeline {
		return nil, nil //nolint:nilnil // absence is an answer
	}
	if err != nil {
		return nil, c.managed("read the pipeline", err)
	}
	return b.info(), nil
}

func (b *pipelineBody) info() *PipelineInfo {
	p := &PipelineInfo{
		Code: b.ProgramCode, ProgramVersion: b.ProgramVersion, ProgramStatus: programStatus(b.ProgramStatus),
		CompileErrors: compileErrors(b.ProgramError), Deployment: clip(b.Deployment, 100), Desired: clip(b.Desired, 100),
	}
	if b.DeploymentError != nil {
		p.DeploymentError = clip(b.DeploymentError.Message, maxMessage)
		if p.DeploymentError == "" {
			p.DeploymentError = "an error without a message"
		}
	}
	return p
}

const (
	// maxCompileErrors is how many messages of the SQL compiler are shown.
	maxCompileErrors = 5
	// maxCompilerText bounds what is shown of the Rust compiler's output; its
	// end has the reason.
	maxCompilerText = 1500
)

// compileErrors gives the compilers' errors in a few lines. The shape differs
// between versions; what cannot be read is left out.
func compileErrors(raw jsontext.Value) string {
	var b struct {
		SQL *struct {
			Messages []struct {
				Line    int64  `json:"start_line_number"`
				Column  int64  `json:"start_column"`
				Warning bool   `json:"warning"`
				Type    string `json:"error_type"`
				Message string `json:"message"`
			} `json:"messages"`
		} `json:"sql_compilation"`
		Rust *struct {
			Exit   int64  `json:"exit_code"`
			Stderr string `json:"stderr"`
		} `json:"rust_compilation"`
		System *string `json:"system_error"`
	}
	if len(raw) == 0 || json.Unmarshal(raw, &b, tolerant) != nil {
		return ""
	}
	var lines []string
	if b.SQL != nil {
		for _, m := range b.SQL.Messages {
			if m.Warning {
				continue
			}
			if len(lines) == maxCompileErrors {
				lines = append(lines, "…")
				break
			}
			lines = append(lines, fmt.Sprintf("line %d, column %d: %s: %s", m.Line, m.Column, clip(m.Type, 100), clip(m.Message, maxMessage)))
		}
	}
	if b.Rust != nil && b.Rust.Exit != 0 {
		text := b.Rust.Stderr
		lines = append(lines, "Rust compiler: "+clip(text[max(0, len(text)-maxCompilerText):], maxCompilerText))
	}
	if b.System != nil {
		lines = append(lines, clip(*b.System, maxMessage))
	}
	return strings.Join(lines, "\n")
}

func (c *Client) noManager() error {
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "change of the pipeline's program", Where: c.where(),
		Why: "it is a bare pipeline process, which has no program that could be changed", Expected: "the manager's address and the pipeline's name",
		Do: "set FELDERA_URL to the manager and FELDERA_PIPELINE to the name, or compile the printed statements by other means",
	}
}

// managed turns an answer that waiting cannot mend into a refusal.
func (c *Client) managed(operation string, err error) error {
	e, ok := errors.AsType[*Error](err)
	if !ok || Classify(err) != ClassStopOperator {
		return fmt.Errorf("%s: %w", operation, err)
	}
	r := e.refusal(c)
	r.What = operation
	switch e.Code {
	case codeNotStopped:
		r.Why = "the manager changes a program only while its pipeline is stopped, and somebody has started it meanwhile"
		r.Do = "do it again"
	case codeNotCleared:
		r.Why = "this version of Feldera changes a program only when the pipeline's storage is cleared"
		r.Do = "clear the pipeline's storage (POST …/clear; what it holds is lost) and do it again"
	case codeUnknownPipeline:
		r.Why, r.Do = "somebody has deleted the pipeline meanwhile", "do it again"
	}
	return r
}

// ApplyOptions say what ApplyProgram may do.
type ApplyOptions struct {
	// Restart allows a running pipeline to be stopped, which loses what it
	// holds where the build makes no checkpoint.
	Restart bool
	// Say gets one line per thing that happens. It must not be nil.
	Say func(line string)
}

// ApplyProgram makes the pipeline run a program with these tables: it creates
// the pipeline or changes the part of its program between the markers, waits
// until it is compiled, starts it, and waits until it runs. Everything else in
// the program is kept. Doing it again changes nothing.
//
// It waits as long as ctx lets it; what it has asked of the manager goes on
// after that. Errors that a person must mend are *decode.Refusal. One caller
// at a time: the manager offers no way to notice another's change in between.
func (c *Client) ApplyProgram(ctx context.Context, tables []TableDef, opts ApplyOptions) error {
	if !c.viaManager() {
		return c.noManager()
	}
	for i := range tables {
		if d := &tables[i]; d.Unusable != "" {
			return &decode.Refusal{
				Reason: decode.ReasonSchema, What: "source table", Where: d.Relation.String(), Why: d.Unusable,
				Expected: "sources that can be carried", Do: "mend it as said, or take the table out of PGSOURCE_TABLES",
			}
		}
	}
	generated := GenerateProgram(tables)
	var before *PipelineInfo
	err := c.await(ctx, "read the pipeline", func(ctx context.Context) (done bool, err error) {
		before, err = c.Pipeline(ctx, true)
		return err == nil, err
	})
	if err != nil {
		return err
	}
	if before == nil {
		opts.Say("creating the pipeline")
		if err := c.writeProgram(ctx, http.MethodPut, generated); err != nil {
			return err
		}
	} else if err := c.changeProgram(ctx, before, generated, opts); err != nil {
		return err
	}
	if err := c.awaitCompiled(ctx, opts.Say); err != nil {
		return err
	}
	return c.awaitRunning(ctx, opts.Say)
}

// changeProgram replaces the generated part of an existing pipeline's program.
func (c *Client) changeProgram(ctx context.Context, before *PipelineInfo, generated string, opts ApplyOptions) error {
	merged, err := MergeProgram(before.Code, generated)
	if err != nil {
		if r, ok := errors.AsType[*decode.Refusal](err); ok {
			r.Where = c.where()
		}
		return err
	}
	if merged == before.Code {
		opts.Say("the program has these tables already")
		return nil
	}
	if len(merged) > maxProgram {
		return &decode.Refusal{
			Reason: decode.ReasonLimit, What: "change of the pipeline's program", Where: c.where(),
			Why: fmt.Sprintf("the program would have %d bytes", len(merged)), Expected: fmt.Sprintf("at most %d", maxProgram),
		}
	}
	was, now := declaredTables(before.Code), declaredTables(merged)
	for _, name := range was {
		if !slices.Contains(now, name) {
			opts.Say(fmt.Sprintf("table %s is no longer declared: it is not in PGSOURCE_TABLES", identifier(clip(name, 100))))
		}
	}
	for _, name := range now {
		if !slices.Contains(was, name) {
			opts.Say(fmt.Sprintf("table %s is new", identifier(clip(name, 100))))
		}
	}
	if before.Deployment != deploymentStopped {
		if !opts.Restart {
			return &decode.Refusal{
				Reason: decode.ReasonSetup, What: "change of the pipeline's program", Where: c.where(),
				Why:      fmt.Sprintf("the pipeline is %s, and a program can be changed only while it is stopped; an open-source pipeline loses all rows when it is stopped", before.Deployment),
				Expected: "a stopped pipeline, or the word to restart it",
				Do:       "repeat it with -restart; where the build makes no checkpoint, pgsource then resyncs its tables by itself, and what others feed has to be loaded again",
			}
		}
		if err := c.stopPipeline(ctx, opts.Say); err != nil {
			return err
		}
	}
	opts.Say("changing the program")
	return c.writeProgram(ctx, http.MethodPatch, merged)
}

// writeProgram sends a program. Sending it twice is the same as once, so an
// answer that is lost is simply asked for again.
func (c *Client) writeProgram(ctx context.Context, method, code string) error {
	body := map[string]any{"program_code": code}
	if method == http.MethodPut {
		body["name"] = c.cfg.Pipeline
		body["description"] = "tables of pgsource"
	}
	raw, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("write the program: %w", err)
	}
	return c.command(ctx, "write the program", call{method: method, body: raw})
}

// command repeats a request, which must be harmless to repeat, until it has
// been answered.
func (c *Client) command(ctx context.Context, what string, cl call) error {
	cl.endpoint, cl.mutates, cl.limit = epPipeline, true, maxLargeBody
	return c.await(ctx, what, func(ctx context.Context) (bool, error) {
		if _, err := c.roundTrip(ctx, cl); err != nil {
			return false, c.managed(what, err)
		}
		return true, nil
	})
}

// stopPipeline stops with a checkpoint where the build makes one, by force
// where it does not.
func (c *Client) stopPipeline(ctx context.Context, say func(string)) error {
	say("stopping the pipeline")
	err := c.command(ctx, "stop the pipeline", call{method: http.MethodPost, path: "/stop?force=false"})
	if e, ok := errors.AsType[*Error](err); ok && (e.Code == codeEnterprise || e.Code == codeUnsupported) {
		say("this pipeline makes no checkpoint: what it holds is lost with the stop; pgsource resyncs its tables by itself, and what others feed has to be loaded again")
		err = c.command(ctx, "stop the pipeline", call{method: http.MethodPost, path: "/stop?force=true"})
	}
	if err != nil {
		return err
	}
	return c.await(ctx, "wait until the pipeline has stopped", func(ctx context.Context) (bool, error) {
		p, err := c.mustPipeline(ctx, false)
		return err == nil && p.Deployment == deploymentStopped, err
	})
}

// mustPipeline is Pipeline for one that is known to exist.
func (c *Client) mustPipeline(ctx context.Context, whole bool) (*PipelineInfo, error) {
	p, err := c.Pipeline(ctx, whole)
	if err == nil && p == nil {
		err = &decode.Refusal{
			Reason: decode.ReasonSetup, What: "change of the pipeline's program", Where: c.where(),
			Why: "somebody has deleted the pipeline meanwhile", Do: "do it again",
		}
	}
	return p, err
}

// awaitCompiled waits for the end of the compilation and says each phase.
func (c *Client) awaitCompiled(ctx context.Context, say func(string)) error {
	last := ""
	return c.await(ctx, "wait for the compilation", func(ctx context.Context) (bool, error) {
		p, err := c.mustPipeline(ctx, false)
		if err != nil {
			return false, err
		}
		if p.ProgramStatus != last {
			last = p.ProgramStatus
			say("program: " + last)
		}
		if !strings.HasSuffix(last, "Error") {
			return last == statusSuccess, nil
		}
		if p, err = c.mustPipeline(ctx, true); err != nil {
			return false, err
		}
		why := "the program did not compile (" + last + ")"
		if p.CompileErrors != "" {
			why += ":\n" + p.CompileErrors
		}
		return false, &decode.Refusal{
			Reason: decode.ReasonRejected, What: "program", Where: c.where(), Why: why,
			Do: "mend the statements outside the markers if they are to blame, and do it again",
		}
	})
}

// awaitRunning starts a stopped pipeline and waits until it runs.
func (c *Client) awaitRunning(ctx context.Context, say func(string)) error {
	refuse := func(why, do string) error {
		return &decode.Refusal{Reason: decode.ReasonSetup, What: "start of the pipeline", Where: c.where(), Why: why, Do: do}
	}
	var first *PipelineInfo
	err := c.await(ctx, "read the pipeline", func(ctx context.Context) (done bool, err error) {
		first, err = c.mustPipeline(ctx, false)
		return err == nil, err
	})
	if err != nil {
		return err
	}
	if first.Deployment == deploymentStopped && first.Desired != stateRunning {
		if first.DeploymentError != "" {
			say("its last run ended with: " + first.DeploymentError)
		}
		say("starting the pipeline")
		if err := c.command(ctx, "start the pipeline", call{method: http.MethodPost, path: "/start?initial=running&dismiss_error=true"}); err != nil {
			return err
		}
	}
	last := ""
	return c.await(ctx, "wait until the pipeline runs", func(ctx context.Context) (bool, error) {
		p, err := c.mustPipeline(ctx, false)
		if err != nil {
			return false, err
		}
		if p.Deployment != last {
			last = p.Deployment
			say("pipeline: " + last)
		}
		switch {
		case last == stateRunning:
			return true, nil
		case last == deploymentPaused:
			return false, refuse("somebody has paused the pipeline", "resume it")
		case last == deploymentWaiting:
			return false, refuse("the changed program has to be approved before its rows are computed anew", "approve it (POST …/approve, or in the web console)")
		case last == deploymentStopped && p.DeploymentError != "":
			return false, refuse("it ended with: "+p.DeploymentError, "look at the pipeline's log")
		case last == deploymentStopped && p.Desired == deploymentStopped:
			return false, refuse("somebody has stopped it", "do it again")
		}
		return false, nil
	})
}

// await asks again and again until done, a refusal, or ctx's end. Faults that
// waiting can mend are reported by OnRetry, and the last one is kept.
func (c *Client) await(ctx context.Context, what string, ask func(context.Context) (done bool, err error)) error {
	retry := c.retrier(what)
	pause := c.cfg.BackoffInitial
	for {
		done, err := ask(ctx)
		if done {
			return nil
		}
		if _, refused := errors.AsType[*decode.Refusal](err); refused || Classify(err) == ClassStopOperator {
			return err
		}
		switch {
		case ctx.Err() != nil:
			if err != nil {
				retry.last = err
			}
			return retry.ended(ctx)
		case err != nil:
			if err := retry.wait(ctx, err); err != nil {
				return err
			}
		default:
			if !sleep(ctx, pause) {
				return retry.ended(ctx)
			}
			pause = min(pause*3/2, maxPoll)
		}
	}
}
