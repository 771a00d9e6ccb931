package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// Fit says how well a Feldera column holds the values of a Postgres type.
type Fit string

// The fits.
const (
	// FitExact: every value arrives as it is.
	FitExact Fit = "exact"
	// FitPartly: values arrive as they are, or are refused by name.
	FitPartly Fit = "partly"
	// FitText: every value arrives, as the text that Postgres writes for it.
	FitText Fit = "text"
)

// typeRule is one row of the matrix of types: where the values of some
// Postgres types go. It is what the statements are made of and what
// docs/feldera.md shows; the encoder in internal/feldera has the last word.
type typeRule struct {
	names string   // as the documentation shows them
	oids  []uint32 // of pg_type.dat; empty for a class of types
	to    feldera.Type
	fit   Fit
	// note becomes a comment above each such column; "" for exact fits.
	note string
}

// The types that many rules go to.
var (
	typeText   = feldera.Type{Name: feldera.Varchar}
	typeBigInt = feldera.Type{Name: feldera.BigInt}
)

const yearsNote = "years 0001 to 9999; infinity and other years are refused, or become NULL with PGSOURCE_UNREPRESENTABLE=null"

const floatNote = "NaN and the infinities are refused, or become NULL with PGSOURCE_UNREPRESENTABLE=null"

const jsonNote = "a JSON null becomes NULL; duplicate names, lone surrogates and more than 100 levels are refused; VARCHAR takes any text"

// The digits chosen for numeric without a declared scale: enough before the
// point for any sum of money, enough behind it for most measurements. A value
// beyond either is refused by name, never cut, unless the policy says so.
const (
	maxPrecision = 38
	looseScale   = 10
)

const looseNote = "numeric without a precision: at most 28 digits before the point and 10 behind it, NaN and infinities not at all; other values are refused; " +
	"choose another DECIMAL(38, s), or VARCHAR to take every value as text"

// typeRules is the matrix of types.
var typeRules = []typeRule{
	{"boolean", []uint32{16}, feldera.Type{Name: feldera.Boolean}, FitExact, ""},
	{"smallint", []uint32{21}, feldera.Type{Name: feldera.SmallInt}, FitExact, ""},
	{"integer", []uint32{23}, feldera.Type{Name: feldera.Integer}, FitExact, ""},
	{"bigint", []uint32{20}, typeBigInt, FitExact, ""},
	{"oid, xid, cid", []uint32{26, 28, 29}, typeBigInt, FitExact, ""},
	{"xid8", []uint32{5069}, feldera.Type{Name: feldera.UBigInt}, FitExact, ""},
	{"real", []uint32{700}, feldera.Type{Name: feldera.Real}, FitPartly, floatNote},
	{"double precision", []uint32{701}, feldera.Type{Name: feldera.Double}, FitPartly, floatNote},
	ruleNumeric,
	ruleLooseNumeric,
	{"text, varchar, name, \"char\", xml, citext", []uint32{25, 1043, 19, 18, 142}, typeText, FitExact, ""},
	{"char(n)", []uint32{1042}, typeText, FitExact, ""},
	{"bytea", []uint32{17}, feldera.Type{Name: feldera.Varbinary}, FitExact, ""},
	{"uuid", []uint32{2950}, feldera.Type{Name: feldera.UUID}, FitExact, ""},
	{"date", []uint32{1082}, feldera.Type{Name: feldera.Date}, FitPartly, yearsNote},
	{"time", []uint32{1083}, feldera.Type{Name: feldera.Time}, FitPartly, "24:00:00 is refused, or becomes NULL with PGSOURCE_UNREPRESENTABLE=null"},
	{"time with time zone", []uint32{1266}, typeText, FitText, "as text, such as 04:05:06-08: Feldera has no such type"},
	{"timestamp", []uint32{1114}, feldera.Type{Name: feldera.Timestamp}, FitPartly, yearsNote},
	{"timestamp with time zone", []uint32{1184}, feldera.Type{Name: feldera.TimestampTZ}, FitPartly, yearsNote},
	{"interval", []uint32{1186}, typeText, FitText, "as text, such as 1 day 02:03:04: a Feldera table has no INTERVAL columns"},
	{"json", []uint32{114}, feldera.Type{Name: feldera.Variant}, FitPartly, jsonNote},
	{"jsonb", []uint32{3802}, feldera.Type{Name: feldera.Variant}, FitPartly, jsonNote},
	{"money", []uint32{790}, typeText, FitText, "as text in the server's lc_monetary, such as $1,234.50; cast it to numeric in the source to compute with it"},
	{"inet, cidr, macaddr, macaddr8", []uint32{869, 650, 829, 774}, typeText, FitText, "as text"},
	{"bit, bit varying", []uint32{1560, 1562}, typeText, FitText, "as text of 0 and 1"},
	{"point, line, lseg, box, path, polygon, circle", []uint32{600, 628, 601, 603, 602, 604, 718}, typeText, FitText, "as text, such as (1.5,-2)"},
	{"tsvector, tsquery, jsonpath", []uint32{3614, 3615, 4072}, typeText, FitText, "as text"},
	{"pg_lsn, tid, pg_snapshot, txid_snapshot", []uint32{3220, 27, 5038, 2970}, typeText, FitText, "as text"},
	{
		"regclass, regproc and the other reg types",
		[]uint32{24, 2202, 2203, 2204, 2205, 2206, 3734, 3769, 4089, 4096, 4191},
		typeText, FitText,
		"as the name of the object, which can depend on search_path",
	},
	{"int2vector, oidvector", []uint32{22, 30}, typeText, FitText, "as text, such as 1 2 3"},
	ruleEnum, ruleDomain, ruleArray, ruleArrayText, ruleRange, ruleComposite, ruleOther,
}

// The rules that are not found by OID.
var (
	ruleNumeric = typeRule{
		"numeric(p, s)", nil,
		feldera.Type{Name: feldera.Decimal, Precision: maxPrecision, Scale: looseScale, Known: true},
		FitPartly,
		"NaN is refused, or becomes NULL with PGSOURCE_UNREPRESENTABLE=null",
	}
	ruleLooseNumeric = typeRule{"numeric", nil, ruleNumeric.to, FitPartly, looseNote}
	ruleEnum         = typeRule{"enums", nil, typeText, FitExact, ""}
	ruleDomain       = typeRule{"domains", nil, typeText, FitExact, ""}
	ruleArray        = typeRule{"arrays", nil, feldera.Type{Name: feldera.ArrayOf, Element: &feldera.Type{Name: feldera.Varchar}}, FitPartly, "an array with other dimensions than declared, or with indexes that do not begin at 1, is refused"}
	ruleArrayText    = typeRule{"arrays of box and of other types whose delimiter is no comma", nil, typeText, FitText, "as text: the elements are not separated by commas"}
	ruleRange        = typeRule{"ranges, multiranges", nil, typeText, FitText, "as text, such as [1,5)"}
	ruleComposite    = typeRule{"composite types", nil, typeText, FitText, "as text, such as (1,\"a b\")"}
	ruleOther        = typeRule{"types of extensions (hstore, ltree, geometry, …) and all others", nil, typeText, FitText, "as the text that Postgres writes"}
)

// TypeMatrix is the matrix of types as the Markdown table of docs/feldera.md.
func TypeMatrix() string {
	var b strings.Builder
	b.WriteString("| Postgres | Feldera | Fit | What to know |\n| --- | --- | --- | --- |\n")
	for _, r := range typeRules {
		to := r.to.String()
		switch r.names {
		case ruleNumeric.names:
			to = "DECIMAL(p,s)"
		case ruleDomain.names:
			to = "as the base type"
		case ruleArray.names:
			to = "the element's type, then ARRAY once for each dimension"
		}
		fmt.Fprintf(&b, "| %s | `%s` | %s | %s |\n", strings.ReplaceAll(r.names, "|", `\|`), to, r.fit, r.note)
	}
	return b.String()
}

// mapped is what becomes of one column.
type mapped struct {
	rule  typeRule
	typ   feldera.Type
	note  string
	loose bool
	// base is the type at the bottom, where it is built in and no array.
	base uint32
}

// column decides where a type's values go.
func (c pgTypes) column(oid uint32, modifier int32, dims, depth int) mapped {
	t := c[oid]
	switch {
	case depth > maxTypeDepth:
		return of(ruleOther)
	case oid == oidNumeric:
		return numeric(modifier)
	case t.kind == "d":
		if t.modifier >= 0 {
			modifier = t.modifier
		}
		return c.column(t.base, modifier, max(dims, t.dims), depth+1)
	case t.element != 0:
		return c.array(t, modifier, dims, depth)
	}
	for i := range typeRules {
		if slices.Contains(typeRules[i].oids, oid) {
			m := of(typeRules[i])
			m.base = oid
			return m
		}
	}
	switch {
	case t.kind == "e":
		return of(ruleEnum)
	case t.kind == "r" || t.kind == "m":
		return of(ruleRange)
	case t.kind == "c":
		return of(ruleComposite)
	case t.name == citext:
		return of(typeRule{citext, nil, typeText, FitExact, ""})
	}
	m := of(ruleOther)
	if t.name != "" {
		m.note = "type " + t.name + ": " + m.note
	}
	return m
}

func of(r typeRule) mapped { return mapped{rule: r, typ: r.to, note: r.note} }

// numeric gives the DECIMAL for a modifier. Since Postgres 15 a scale may be
// negative or above the precision.
func numeric(modifier int32) mapped {
	if modifier < 4 {
		m := of(ruleLooseNumeric)
		m.loose, m.base = true, oidNumeric
		return m
	}
	precision, scale := numericModifier(modifier)
	whole := max(precision-scale, 0)
	scale = max(scale, 0)
	m := of(ruleNumeric)
	m.base = oidNumeric
	m.typ.Precision, m.typ.Scale = max(whole+scale, 1), scale
	if whole+scale > maxPrecision {
		m.typ.Precision = maxPrecision
		m.typ.Scale = min(scale, max(looseScale, maxPrecision-whole))
		m.loose = true // no DECIMAL holds it all; which part is a choice
		m.note = fmt.Sprintf("the source declares %d digits before the point and %d behind it, a DECIMAL has 38 in all: values beyond are refused; VARCHAR takes every value as text", whole, scale)
	}
	return m
}

// array makes an ARRAY of what the element's type becomes. Elements that are
// JSON or arrays themselves (of a domain) go as their text.
func (c pgTypes) array(t pgType, modifier int32, dims, depth int) mapped {
	if delim := c[t.element].delim; delim != "" && delim != "," {
		return of(ruleArrayText)
	}
	element, modifier := c.base(t.element, modifier)
	in := c.column(element, modifier, 0, depth+1)
	m := of(ruleArray)
	m.loose = in.loose
	if in.note != "" {
		m.note += "; in elements: " + in.note
	}
	part := in.typ
	if part.Name == feldera.Variant || part.Name == feldera.ArrayOf {
		part = typeText
		m.note = ruleArray.note + "; in elements: as the text that Postgres writes"
	}
	part.Nullable = true
	for range max(dims, 1) {
		inner := part
		part = feldera.Type{Name: feldera.ArrayOf, Element: &inner, Nullable: true}
	}
	m.typ = part
	return m
}

// numericModifier takes the modifier of a numeric with a declared precision
// apart.
func numericModifier(modifier int32) (precision, scale int) {
	modifier -= 4
	return int(modifier >> 16 & 0xffff), int(modifier&0x7ff^0x400) - 0x400 // 11 bits with a sign
}

// DDLConfig says which tables are to be described.
type DDLConfig struct {
	// DSN gives the connection string.
	DSN func() (string, error)
	// Slot only names the connection at the server.
	Slot string
	// Publication is looked at where it exists: a column that it leaves out is
	// declared so that it may be NULL.
	Publication string
	Tables      []Table
}

// DescribeTables reads the source's catalogue and gives the Feldera table for
// each configured table, in the configured order. A table that pgsource would
// refuse for its identity is given all the same, as Unusable with both
// remedies. It changes nothing. Errors are *decode.Refusal where a person must
// act.
func DescribeTables(ctx context.Context, cfg DDLConfig) ([]feldera.TableDef, error) {
	if cfg.DSN == nil || len(cfg.Tables) == 0 {
		return nil, errors.New("wal: DSN and Tables are required")
	}
	s := &Source{cfg: Config{DSN: cfg.DSN, Slot: cfg.Slot}}
	var defs []feldera.TableDef
	err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		for _, t := range cfg.Tables {
			d, err := describeTable(ctx, conn, cfg.Publication, t)
			if err != nil {
				return err
			}
			defs = append(defs, *d)
		}
		return nil
	})
	return defs, err
}

func describeTable(ctx context.Context, conn *pgx.Conn, publication string, t Table) (*feldera.TableDef, error) {
	rel := &decode.Relation{Schema: t.Schema, Name: t.Name}
	if _, err := catalogueRelation(ctx, conn, publication, t); err != nil {
		return nil, err // it is no table
	}
	var identity string
	err := conn.QueryRow(ctx, `
		SELECT c.oid, c.relreplident::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = $2`, t.Schema, t.Name).Scan(&rel.ID, &identity)
	if err != nil {
		return nil, classify("look up table "+rel.String(), err)
	}
	rel.Identity = decode.Identity(identity[0])
	types, err := readTypes(ctx, conn, tableTypes(rel.ID))
	if err != nil {
		return nil, err
	}
	key, err := readKey(ctx, conn, rel)
	if err != nil {
		return nil, err
	}
	published, err := readPublished(ctx, conn, publication, t)
	if err != nil {
		return nil, err
	}
	d := &feldera.TableDef{Target: t.Target, Relation: rel, Key: key}
	if err := readColumns(ctx, conn, d, types, published); err != nil {
		return nil, err
	}
	judge(d, t)
	if d.Unique, err = readUnique(ctx, conn, rel); err != nil {
		return nil, err
	}
	found, err := readTree(ctx, conn, rel.ID)
	if err != nil || found == nil {
		return d, err
	}
	if refused, ok := errors.AsType[*decode.Refusal](checkIdentities(rel.ID, found.parts)); ok && d.Unusable == "" {
		d.Unusable = refused.Where + ": " + refused.Why + "; " + refused.Do
	}
	return d, nil
}

// readKey gives the columns that identify a row in the stream: those of the
// identity index, else of the primary key, in the index's order. Columns that
// an index only includes are no part of it.
func readKey(ctx context.Context, conn *pgx.Conn, rel *decode.Relation) ([]string, error) {
	which := "i.indisprimary AND i.indimmediate" // a deferrable key identifies nothing to replication
	if rel.Identity == decode.IdentityIndex {
		which = "i.indisreplident"
	}
	rows, err := conn.Query(ctx, `
		SELECT a.attname FROM pg_index i
		CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, n)
		JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
		WHERE i.indrelid = $1 AND k.n <= i.indnkeyatts AND `+which+` ORDER BY k.n`, rel.ID)
	if err == nil {
		var key []string
		if key, err = pgx.CollectRows(rows, pgx.RowTo[string]); err == nil {
			return key, nil
		}
	}
	return nil, classify("look up the key of "+rel.String(), err)
}

// readPublished gives the columns that the publication carries, nil for all:
// it does not exist, does not have the table, or the server is older than
// column lists. A generated column counts from PostgreSQL 18 on: before that
// none is published, whatever the view of an early 15 says.
func readPublished(ctx context.Context, conn *pgx.Conn, publication string, t Table) ([]string, error) {
	rows, err := conn.Query(ctx, `
		SELECT a.attname FROM pg_publication_tables p
		JOIN pg_attribute a ON a.attrelid = format('%I.%I', p.schemaname, p.tablename)::regclass AND a.attnum > 0 AND NOT a.attisdropped
		WHERE p.pubname = $1 AND p.schemaname = $2 AND p.tablename = $3 AND jsonb_typeof(to_jsonb(p)->'attnames') = 'array'
		  AND to_jsonb(p)->'attnames' ? a.attname::text AND (a.attgenerated = '' OR current_setting('server_version_num')::int >= 180000)`,
		publication, t.Schema, t.Name)
	if err == nil {
		var names []string
		if names, err = pgx.CollectRows(rows, pgx.RowTo[string]); err == nil && len(names) == 0 {
			return nil, nil
		}
		if err == nil {
			return names, nil
		}
	}
	return nil, classify("look up the published columns", err)
}

func readColumns(ctx context.Context, conn *pgx.Conn, d *feldera.TableDef, types pgTypes, published []string) error {
	rel := d.Relation
	rows, err := conn.Query(ctx, `
		SELECT attname, atttypid, atttypmod, attndims, attnotnull, attgenerated <> '', format_type(atttypid, atttypmod)
		FROM pg_attribute WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped ORDER BY attnum`, rel.ID)
	if err != nil {
		return classify("look up the columns of "+rel.String(), err)
	}
	defer rows.Close()
	var left []string
	for rows.Next() {
		var col decode.Column
		var dims int
		var notNull, generated bool
		var typeText string
		if err := rows.Scan(&col.Name, &col.TypeOID, &col.TypeModifier, &dims, &notNull, &generated, &typeText); err != nil {
			return fmt.Errorf("read the columns of %s: %w", rel, err)
		}
		if !utf8.ValidString(col.Name) || strings.ContainsFunc(col.Name, unicode.IsControl) {
			return &decode.Refusal{
				Reason: decode.ReasonSchema, What: "source table", Where: rel.String(),
				Why:      "the name of its column " + strconv.QuoteToASCII(col.Name) + " has a control character or is not UTF-8",
				Expected: "names that can be written on one line", Do: "rename the column",
			}
		}
		carried := published == nil || slices.Contains(published, col.Name)
		if generated && (published == nil || !carried) {
			left = append(left, col.Name)
			continue
		}
		m := types.column(col.TypeOID, col.TypeModifier, dims, 0)
		def := feldera.ColumnDef{Name: col.Name, Type: m.typ, SourceType: typeText, BaseOID: m.base, Loose: m.loose, Note: m.note}
		def.Type.Nullable = !notNull
		switch {
		case generated:
			def.Type.Nullable = true
			def.Note = join("a generated column, which the publication carries", def.Note)
		case !carried && !slices.Contains(d.Key, col.Name):
			def.Type.Nullable = true
			def.Note = join("not in the publication's column list, so always NULL", def.Note)
		}
		d.Columns = append(d.Columns, def)
		if !generated {
			types.resolve(&col)
			col.Key = rel.Identity == decode.IdentityFull || rel.Identity != decode.IdentityNothing && slices.Contains(d.Key, col.Name)
			rel.Columns = append(rel.Columns, col)
		}
	}
	if err := rows.Err(); err != nil {
		return classify("look up the columns of "+rel.String(), err)
	}
	if len(left) > 0 {
		d.Notes = append(d.Notes, "generated columns are not published, so they are left out: "+strings.Join(left, ", "))
	}
	return nil
}

func join(a, b string) string {
	if b == "" {
		return a
	}
	return a + "; " + b
}

// identifyRows gives the table identity columns.
func identifyRows(d *feldera.TableDef) {
	d.Notes = append(d.Notes, "its rows are identified by where each one stands in the WAL: only inserts can be carried, and once it is published, Postgres refuses updates and deletes of it")
	d.Key = feldera.IdentityKey()
	for _, c := range d.Columns {
		if slices.Contains(d.Key, strings.ToLower(c.Name)) {
			d.Unusable = fmt.Sprintf("its column %q has a name that Holdfast fills where there is no key; rename it", c.Name)
		}
	}
	d.Columns = append(d.Columns, feldera.IdentityColumns()...)
}

// judge says what cannot work with the table as a whole.
func judge(d *feldera.TableDef, t Table) {
	name := quoteIdentifier(t.Schema) + "." + quoteIdentifier(t.Name)
	addKey := "ALTER TABLE " + name + " ADD PRIMARY KEY (…)"
	full := "ALTER TABLE " + name + " REPLICA IDENTITY FULL"
	identity, keyless := d.Relation.Identity, false
	switch {
	case identity == decode.IdentityFull && len(d.Key) == 0:
		d.Notes = append(d.Notes,
			"no primary key: Feldera counts equal rows, and rows that are sent again after a crash count twice. Either "+addKey+
				" in the source and write this again, or add here a PRIMARY KEY over columns that are unique and NOT NULL; or, if rows are only ever inserted, "+
				"ALTER TABLE "+name+" REPLICA IDENTITY NOTHING and write this again")
	case identity == decode.IdentityNothing && len(d.Key) > 0:
		d.Notes = append(d.Notes, "its replica identity is NOTHING, so its primary key identifies nothing in the stream; if rows are updated or deleted, ALTER TABLE "+name+
			" REPLICA IDENTITY DEFAULT and write this again")
		keyless = true
	case len(d.Key) == 0 && identity != decode.IdentityFull:
		d.Notes = append(d.Notes, "no key: if rows are updated or deleted, either "+addKey+" or "+full+" and write this again")
		keyless = true
	}
	lower := make(map[string]string, len(d.Columns))
	for i := range d.Columns {
		c := &d.Columns[i]
		if first, twice := lower[strings.ToLower(c.Name)]; twice {
			d.Unusable = fmt.Sprintf("its columns %q and %q differ by case alone, which Feldera mixes up on input; rename one", first, c.Name)
		}
		lower[strings.ToLower(c.Name)] = c.Name
	}
	if strings.HasPrefix(strings.ToLower(d.Name()), "feldera") {
		d.Unusable = "Feldera keeps names that begin with feldera to itself; map the table to another name in PGSOURCE_TABLES"
	}
	if len(d.Columns) == 0 {
		d.Unusable = "it has no columns"
	}
	if keyless {
		identifyRows(d)
	}
}
