package feldera

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"holdfast/internal/decode"
)

// Special says what happens to a value that a column's type cannot express.
type Special uint8

const (
	// RefuseSpecial refuses the change. The default.
	RefuseSpecial Special = iota
	// NullSpecial writes NULL where the column allows it, counted; the change
	// is refused where it does not.
	NullSpecial
)

// Excess says what happens to digits after the decimal point beyond those that
// a column keeps.
type Excess uint8

const (
	// RefuseExcess refuses the change. The default. Surplus zeros are no
	// excess: without them the value is the same.
	RefuseExcess Excess = iota
	// TruncateExcess cuts towards zero, as the engine would in silence, and
	// counts it.
	TruncateExcess
)

// Alteration is the closed set of ways in which a policy lets a value arrive
// changed. It is a metric label.
type Alteration string

// The alterations.
const (
	// AlteredTruncated: fractional digits were cut.
	AlteredTruncated Alteration = "truncated"
	// AlteredRounded: a REAL or DOUBLE column keeps the nearest float.
	AlteredRounded Alteration = "rounded"
	// AlteredNonFinite: NaN or an infinity became NULL.
	AlteredNonFinite Alteration = "non_finite_to_null"
	// AlteredOutOfRange: a date or time that the engine cannot hold became NULL.
	AlteredOutOfRange Alteration = "out_of_range_to_null"
	// AlteredJSONNull: JSON's null inside a VARIANT became SQL's NULL, which
	// the engine does not tell apart. No policy governs it.
	AlteredJSONNull Alteration = "json_null_to_null"
)

// Policy says what may happen to values and columns that do not fit. The zero
// value refuses everything that would not arrive as it was.
type Policy struct {
	// Fraction governs the digits that DECIMAL, TIME, TIMESTAMP, REAL and
	// DOUBLE columns do not keep. REAL and DOUBLE round instead of cutting.
	// Like the other two, it never applies to a column of the primary key: one
	// row would be made of two.
	Fraction Excess
	// NonFinite governs NaN and the infinities.
	NonFinite Special
	// OutOfRange governs dates outside the years 0001 to 9999, infinite dates
	// and 24:00:00.
	OutOfRange Special
	// IgnoreExtraColumns lets source columns pass unsent that the table lacks.
	IgnoreExtraColumns bool
	// OnAltered counts values that were altered, once the change is in the
	// array. It runs inside Add and must be quick. May be nil.
	OnAltered func(table, column string, how Alteration)
}

// Encoder turns the changes of one version of a relation into rows of one
// table. It is compiled once: matching by name, types and key have been
// checked. It is immutable and safe for concurrent use.
type Encoder struct {
	table  *Table
	rel    *decode.Relation
	policy Policy
	cols   []encColumn // those with a source, in the table's order
	keys   []int       // into cols; empty for a table without a primary key of its source's
	// identity are the columns that the daemon fills; nil where it fills none.
	identity []identityColumn
	// extra are the source columns that the table lacks and the policy ignores.
	extra []string
}

// encColumn is one column of the table with its source.
type encColumn struct {
	plan   plan
	source int    // into Relation.Columns and the rows parallel to it
	member []byte // `"name":`
	key    bool   // of the table's primary key
}

// exactly is the policy for columns of a key, whatever the encoder's is.
var exactly Policy

// append writes a value of the column.
func (c *encColumn) append(dst []byte, v *decode.Value, pol *Policy, a *Array) ([]byte, *problem) {
	if c.key {
		pol = &exactly
	}
	dst, p := c.plan.append(dst, v, pol, a)
	if p != nil {
		p.column = c.plan.name
		if c.key && p.lenient {
			p.why += "; in a PRIMARY KEY nothing is altered, since two rows could become one"
			p.do = "change the column's type in the Feldera table, or its PRIMARY KEY; " + laterChange
		}
	}
	return dst, p
}

// NewEncoder matches rel's columns to t's by name, folded as the engine folds,
// and checks whatever can be known before the first row: extra and missing
// columns, types that cannot fit, and the key. Errors are *decode.Refusal.
func NewEncoder(t *Table, rel *decode.Relation, p Policy) (*Encoder, error) {
	e := &Encoder{table: t, rel: rel, policy: p}
	sources, err := e.match()
	if err != nil {
		return nil, err
	}
	if err := e.identify(sources); err != nil {
		return nil, err
	}
	for i := range t.Columns {
		col := &t.Columns[i]
		source := sources[i]
		if e.identity != nil && col.Key {
			continue
		}
		if source < 0 {
			if col.Key {
				return nil, e.misfit(
					fmt.Sprintf("the source has no column for %q of the table's primary key", col.Name),
					"a source with the key columns "+list(t.KeyNames()), "add the column to the source, or change the table's PRIMARY KEY")
			}
			if !col.Type.Nullable {
				return nil, e.misfit(
					fmt.Sprintf("the source has no column %q, which is NOT NULL in the table", col.Name),
					"a source column "+col.Name+" "+col.Type.String(), "add the column to the source, or declare it nullable in the table")
			}
			continue
		}
		pl, why := compile(&col.Type, 0)
		if why != "" {
			return nil, e.misfit(fmt.Sprintf("column %q: %s", col.Name, why), "a type that can be written over HTTP", "change the column's type in the table")
		}
		pl.name = col.Name
		pl.from(&rel.Columns[source])
		if why, allowed := misfits(&rel.Columns[source], &col.Type); why != "" {
			return nil, e.misfit(fmt.Sprintf("column %q %s", col.Name, why),
				"values of type "+names(allowed), "change the column's type in the table, or cast it in the source")
		}
		member := append(appendString(nil, []byte(col.Name)), ':')
		if col.Key {
			e.keys = append(e.keys, len(e.cols))
		}
		e.cols = append(e.cols, encColumn{plan: pl, source: source, member: member, key: col.Key})
	}
	if len(e.cols) == 0 {
		return nil, e.misfit("source and table have no column in common", "columns of the same names", "rename the columns, or map the source to another table")
	}
	if err := e.checkKey(); err != nil {
		return nil, err
	}
	return e, nil
}

// Table is the table that the encoder writes to.
func (e *Encoder) Table() *Table { return e.table }

// Ignored gives the source columns that are not sent because the table lacks
// them.
func (e *Encoder) Ignored() []string { return slices.Clone(e.extra) }

// Missing gives the table's columns that the source does not have: NULL in
// every row.
func (e *Encoder) Missing() (missing []string) {
	for i := range e.table.Columns {
		name := e.table.Columns[i].Name
		if e.identity != nil && e.table.Columns[i].Key {
			continue
		}
		if !slices.ContainsFunc(e.cols, func(c encColumn) bool { return c.plan.name == name }) {
			missing = append(missing, name)
		}
	}
	return missing
}

// match gives for each column of the table the index of its source column, -1
// for none.
func (e *Encoder) match() ([]int, error) {
	sources := make([]int, len(e.table.Columns))
	for i := range sources {
		sources[i] = -1
	}
	var extra []int
	for i := range e.rel.Columns {
		at := e.table.find(e.rel.Columns[i].Name)
		if at < 0 {
			extra = append(extra, i)
			continue
		}
		if first := sources[at]; first >= 0 {
			return nil, e.misfit(
				fmt.Sprintf("the source columns %q and %q are both %q to the table", e.rel.Columns[first].Name, e.rel.Columns[i].Name, e.table.Columns[at].Name),
				"source columns that differ by more than case", "declare the columns quoted in the table, or leave one out of the publication")
		}
		sources[at] = i
	}
	lower := make(map[string]string, len(e.table.Columns))
	for i := range e.table.Columns {
		name := e.table.Columns[i].Name
		if first, twice := lower[strings.ToLower(name)]; twice {
			return nil, e.misfit(fmt.Sprintf("the table's columns %q and %q differ by case alone", first, name),
				"column names that differ by more than case, since the engine mixes these up on input", "rename one of them in the table")
		}
		lower[strings.ToLower(name)] = name
	}
	for _, i := range extra {
		e.extra = append(e.extra, e.rel.Columns[i].Name)
	}
	if len(extra) > 0 && !e.policy.IgnoreExtraColumns {
		adds := make([]string, len(extra))
		for n, i := range extra {
			adds[n] = sqlName(e.rel.Columns[i].Name) + " " + string(suggest(e.rel.Columns[i].TypeOID))
		}
		return nil, e.misfit("the table lacks the source's columns "+list(e.extra),
			"every source column in the table", "add to CREATE TABLE "+e.table.spelling+": "+strings.Join(adds, ", ")+"; or set PGSOURCE_EXTRA_COLUMNS=ignore or KAFKASINK_EXTRA_FIELDS=ignore")
	}
	return sources, nil
}

// checkKey compares the table's primary key with the source's.
func (e *Encoder) checkKey() error {
	if !e.table.HasKey() || e.identity != nil || (e.rel.Identity != decode.IdentityDefault && e.rel.Identity != decode.IdentityIndex) {
		return nil // FULL marks every column, NOTHING none
	}
	var source []string
	for i := range e.rel.Columns {
		if !e.rel.Columns[i].Key {
			continue
		}
		name := e.rel.Columns[i].Name
		if at := e.table.find(name); at >= 0 {
			name = e.table.Columns[at].Name
		}
		source = append(source, name)
	}
	want := e.table.KeyNames()
	if len(source) == 0 {
		return nil
	}
	slices.Sort(source)
	sorted := slices.Sorted(slices.Values(want))
	if slices.Equal(source, sorted) {
		return nil
	}
	return e.misfit(
		fmt.Sprintf("the source identifies rows by %s, the table by %s", list(source), list(want)),
		"the same key on both sides: else a delete or an upsert meets another row",
		"declare PRIMARY KEY ("+strings.Join(source, ", ")+") on the Feldera table; or, for later changes only, set the source's REPLICA IDENTITY to FULL or to an index over "+list(want))
}

func (e *Encoder) misfit(why, expected, do string) *decode.Refusal {
	return &decode.Refusal{
		Reason: decode.ReasonSchema, What: fmt.Sprintf("mapping of %s to table %s", e.rel, e.table.spelling),
		Why: why, Expected: expected, Do: do,
	}
}

// list writes names for a message, bounded.
func list(names []string) string {
	quoted := make([]string, 0, len(names))
	for i, n := range names {
		if i == 20 {
			quoted = append(quoted, "…")
			break
		}
		quoted = append(quoted, strconv.Quote(clip(n, 100)))
	}
	return "(" + strings.Join(quoted, ", ") + ")"
}

func names(types []TypeName) string {
	s := make([]string, len(types))
	for i, t := range types {
		s[i] = string(t)
	}
	return strings.Join(s, ", ")
}

// sqlName writes a column's name so that SQL keeps it.
func sqlName(name string) string {
	for i := 0; i < len(name); i++ {
		c := name[i]
		if c != '_' && (c < 'a' || c > 'z') && (i == 0 || c < '0' || c > '9') {
			return `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
		}
	}
	return name
}

// problem is why one change cannot be encoded. It is made on the way out of
// the hot path only.
type problem struct {
	reason   decode.Reason
	column   string
	why      string
	expected string
	do       string
	// lenient is true where a policy would let the value pass, altered.
	lenient bool
}

// laterChange ends the advice about a value: the change that carries it is in
// the log already, and every retry meets it again.
const laterChange = "a later change of the row does not mend this one"

func cannot(why, expected string) *problem {
	return &problem{reason: decode.ReasonValue, why: why, expected: expected}
}

// encode appends the elements of ch to a, or with gone, deletes of its rows.
func (e *Encoder) encode(a *Array, ch *decode.OrderChange, gone bool) *problem {
	for _, row := range [2][]decode.Value{ch.Before, ch.After} {
		if row != nil && len(row) != len(e.rel.Columns) {
			return &problem{reason: decode.ReasonMalformed, why: fmt.Sprintf("a row of it has %d columns, the relation %d", len(row), len(e.rel.Columns))}
		}
	}
	if gone {
		return e.gone(a, ch)
	}
	switch ch.Op {
	case decode.Insert:
		if e.identity != nil {
			return e.insertIdentified(a, ch)
		}
		return e.insert(a, ch.After, nil)
	case decode.Update:
		if p := e.onlyInserts(); p != nil {
			return p
		}
		return e.update(a, ch)
	case decode.Delete:
		if p := e.onlyInserts(); p != nil {
			return p
		}
		return e.delete(a, ch.Before)
	case decode.Truncate:
		return &problem{reason: decode.ReasonUnsupported, why: "a truncation is no row", expected: "a caller that deals with truncation", do: "set PGSOURCE_TRUNCATE=ignore"}
	}
	return &problem{reason: decode.ReasonMalformed, why: "its operation is " + ch.Op.String()}
}

// insert writes the whole row. An Unchanged column is taken from fill, where
// the source gave the old row. An Absent one is NULL: the source's image of
// the row is whole and has no such field.
func (e *Encoder) insert(a *Array, row, fill []decode.Value) *problem {
	if p := e.openInsert(a, row, fill); p != nil {
		return p
	}
	a.closeElement()
	return nil
}

// insertIdentified is insert for a table whose key the daemon fills.
func (e *Encoder) insertIdentified(a *Array, ch *decode.OrderChange) *problem {
	if p := e.openInsert(a, ch.After, nil); p != nil {
		return p
	}
	if p := e.identityMembers(a, &ch.Position, false); p != nil {
		return p
	}
	a.closeElement()
	return nil
}

func (e *Encoder) openInsert(a *Array, row, fill []decode.Value) *problem {
	if row == nil {
		return &problem{reason: decode.ReasonMalformed, why: "it carries no new row"}
	}
	a.openElement(`{"insert":{`)
	for i := range e.cols {
		c := &e.cols[i]
		v := &row[c.source]
		if v.State == decode.Unchanged {
			if v = e.old(fill, c.source); v == nil {
				return e.unknown(c)
			}
		}
		if p := e.member(a, c, v, i == 0); p != nil {
			return p
		}
	}
	return nil
}

// gone writes deletes of the old row, where there is one, and of the new one.
func (e *Encoder) gone(a *Array, ch *decode.OrderChange) *problem {
	if e.identity != nil {
		if ch.Op != decode.Insert {
			return e.onlyInserts()
		}
		a.openElement(`{"delete":{`)
		if p := e.identityMembers(a, &ch.Position, true); p != nil {
			return p
		}
		a.closeElement()
		return nil
	}
	if len(e.keys) == 0 || (ch.Before == nil && ch.After == nil) {
		return &problem{reason: decode.ReasonIdentity, why: "it does not say which row it is about", expected: "a table with a PRIMARY KEY"}
	}
	if ch.Before != nil {
		if p := e.deleteKey(a, ch.Before); p != nil {
			return p
		}
	}
	if ch.After == nil {
		return nil
	}
	row := ch.After
	for _, k := range e.keys {
		source := e.cols[k].source
		if old := e.old(ch.Before, source); row[source].State == decode.Unchanged && old != nil {
			row = slices.Clone(row)
			row[source] = *old
		}
	}
	return e.deleteKey(a, row)
}

// old gives the column's value in the old row for one that the new row leaves
// out as unchanged, nil where it is not known. NULL is not: a value that is
// stored out of line is none, so the old row is not whole.
func (e *Encoder) old(row []decode.Value, source int) *decode.Value {
	if row == nil {
		return nil
	}
	v := &row[source]
	if v.State == decode.Set {
		return v
	}
	return nil
}

func (e *Encoder) unknown(c *encColumn) *problem {
	do := "for later changes only: " + e.fullIdentity()
	if !e.table.HasKey() {
		do = "declare a PRIMARY KEY on the Feldera table; " + do
	}
	return &problem{
		reason: decode.ReasonIdentity, column: c.plan.name,
		why:      "the source did not send the column's value because it did not change, and the whole row is needed here",
		expected: "the old row with the change", do: do,
	}
}

// fullIdentity is the statement that makes a source send old rows.
func (e *Encoder) fullIdentity() string {
	name := sqlName(e.rel.Name)
	if e.rel.Schema != "" {
		name = sqlName(e.rel.Schema) + "." + name
	}
	return "ALTER TABLE " + name + " REPLICA IDENTITY FULL"
}

// member writes `"name":value`.
func (e *Encoder) member(a *Array, c *encColumn, v *decode.Value, first bool) *problem {
	if !first {
		a.buf = append(a.buf, ',')
	}
	a.buf = append(a.buf, c.member...)
	var p *problem
	a.buf, p = c.append(a.buf, v, &e.policy, a)
	return p
}

func (e *Encoder) update(a *Array, ch *decode.OrderChange) *problem {
	if ch.After == nil {
		return &problem{reason: decode.ReasonMalformed, why: "it carries no new row"}
	}
	if len(e.keys) == 0 {
		if p := e.deleteWhole(a, ch.Before); p != nil {
			return p
		}
		return e.insert(a, ch.After, ch.Before)
	}
	moved, p := e.keyChanged(a, ch)
	if p != nil {
		return p
	}
	if moved {
		// Old first: the two keys are different rows to the engine, and within
		// one array the order is kept.
		if p := e.deleteKey(a, ch.Before); p != nil {
			return p
		}
		return e.insert(a, ch.After, ch.Before)
	}
	for i := range e.cols {
		source := e.cols[i].source
		if ch.After[source].State == decode.Unchanged && e.old(ch.Before, source) == nil {
			return e.partial(a, ch)
		}
	}
	return e.insert(a, ch.After, ch.Before)
}

// partial writes the known columns of an existing row. The engine ignores it
// in silence where the row does not exist, so it is used only for what it is
// right for: a column that the source did not change.
func (e *Encoder) partial(a *Array, ch *decode.OrderChange) *problem {
	a.openElement(`{"update":{`)
	first := true
	for i := range e.cols {
		c := &e.cols[i]
		v := &ch.After[c.source]
		if v.State == decode.Unchanged {
			old := e.old(ch.Before, c.source)
			switch {
			case old != nil:
				v = old
			case slices.Contains(e.keys, i):
				return e.unknown(c)
			default:
				continue
			}
		}
		if p := e.member(a, c, v, first); p != nil {
			return p
		}
		first = false
	}
	a.closeElement()
	return nil
}

// keyChanged tells whether an update moves the row to another key.
func (e *Encoder) keyChanged(a *Array, ch *decode.OrderChange) (bool, *problem) {
	if ch.Before == nil {
		return false, nil
	}
	for _, k := range e.keys {
		c := &e.cols[k]
		was, now := &ch.Before[c.source], &ch.After[c.source]
		if was.State != decode.Set || now.State != decode.Set || bytes.Equal(was.Bytes, now.Bytes) {
			continue
		}
		// Different text can be the same key (1.0 and 1.00, upper-case UUIDs):
		// what the engine would be sent decides.
		mark := len(a.buf)
		var p *problem
		if a.buf, p = c.append(a.buf, was, &e.policy, a); p == nil {
			middle := len(a.buf)
			if a.buf, p = c.append(a.buf, now, &e.policy, a); p == nil {
				same := c.plan.oneKey(a.buf[mark:middle], a.buf[middle:])
				a.buf = a.buf[:mark]
				if same {
					continue
				}
				return true, nil
			}
		}
		a.buf = a.buf[:mark]
		return false, p
	}
	return false, nil
}

// oneKey tells whether two values, as they are written, are one key to the
// engine. Zeros of both signs are not taken for one: to delete the old and
// insert the new is right whether or not they are.
func (p *plan) oneKey(a, b []byte) bool {
	switch {
	case bytes.Equal(a, b):
		return true
	case p.kind == planDecimal:
		return p.canonical(bytes.Trim(a, `"`)) == p.canonical(bytes.Trim(b, `"`))
	case p.kind == planFloat:
		x, errX := strconv.ParseFloat(string(a), p.bits)
		y, errY := strconv.ParseFloat(string(b), p.bits)
		return errX == nil && errY == nil && math.Float64bits(x) == math.Float64bits(y)
	}
	return false
}

func (e *Encoder) delete(a *Array, before []decode.Value) *problem {
	if len(e.keys) > 0 {
		return e.deleteKey(a, before)
	}
	return e.deleteWhole(a, before)
}

// deleteKey writes a delete by primary key.
func (e *Encoder) deleteKey(a *Array, before []decode.Value) *problem {
	a.openElement(`{"delete":{`)
	for n, k := range e.keys {
		c := &e.cols[k]
		if before == nil || before[c.source].State != decode.Set {
			return &problem{
				reason: decode.ReasonIdentity, column: c.plan.name,
				why: "it does not carry the row's old key", expected: "every column of the key with a value",
				do: "declare the Feldera table's PRIMARY KEY over columns that the source's key has; for later changes only: " + e.fullIdentity(),
			}
		}
		if p := e.member(a, c, &before[c.source], n == 0); p != nil {
			return p
		}
	}
	a.closeElement()
	return nil
}

// deleteWhole writes a delete from a table without a key: the engine finds the
// row by all its values, and takes away one that never was there.
func (e *Encoder) deleteWhole(a *Array, before []decode.Value) *problem {
	// Only under FULL does Postgres send the old row. Anything less would
	// delete a row that does not exist.
	partial := before == nil || (e.rel.ID != 0 && e.rel.Identity != decode.IdentityFull)
	for i := range e.cols {
		if partial {
			break
		}
		state := before[e.cols[i].source].State
		partial = state != decode.Set && state != decode.Null
	}
	if partial {
		return &problem{
			reason: decode.ReasonIdentity, why: "the table has no primary key, and the change does not carry the whole old row",
			expected: "the whole old row with every update and delete", do: "declare a PRIMARY KEY on the Feldera table; for later changes only: " + e.fullIdentity(),
		}
	}
	a.openElement(`{"delete":{`)
	for i := range e.cols {
		if p := e.member(a, &e.cols[i], &before[e.cols[i].source], i == 0); p != nil {
			return p
		}
	}
	a.closeElement()
	return nil
}

// refusal makes the error for a person out of a problem.
func (e *Encoder) refusal(ch *decode.OrderChange, p *problem) *decode.Refusal {
	where := "table " + e.table.spelling
	if key := e.describeKey(ch); key != "" {
		where += ", key " + key
	}
	if p.column != "" {
		where += fmt.Sprintf(", column %q", p.column)
	}
	if ch.Position != (decode.Position{}) {
		where += ", " + ch.Position.String()
	}
	if p.do == "" && p.reason == decode.ReasonValue {
		p.do = "change the column's type in the Feldera table; " + laterChange
	}
	return &decode.Refusal{
		Reason: p.reason, What: ch.Op.String(), Where: where, Why: p.why, Expected: p.expected, Do: p.do,
	}
}

// describeKey writes the row's key for a message, bounded.
func (e *Encoder) describeKey(ch *decode.OrderChange) string {
	row := ch.After
	if row == nil {
		row = ch.Before
	}
	if len(row) != len(e.rel.Columns) {
		return ""
	}
	var parts []string
	for i := range e.rel.Columns {
		if len(parts) == 8 {
			break
		}
		if e.rel.Columns[i].Key && row[i].State == decode.Set && e.rel.Identity != decode.IdentityFull {
			parts = append(parts, e.rel.Columns[i].Name+"="+clip(string(row[i].Bytes[:min(len(row[i].Bytes), 64)]), 64))
		}
	}
	if len(parts) == 0 {
		for _, k := range e.keys {
			if v := row[e.cols[k].source]; v.State == decode.Set {
				parts = append(parts, e.cols[k].plan.name+"="+clip(string(v.Bytes[:min(len(v.Bytes), 64)]), 64))
			}
		}
	}
	return clip(strings.Join(parts, ","), maxFragment)
}

// errOtherRelation is a mistake of the caller, not of the data.
var errOtherRelation = errors.New("encode: the change was made under another version of the relation than the encoder")
