package feldera

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"

	"holdfast/internal/decode"
)

// This file gives an identity to rows that have none: a table may have, as its
// PRIMARY KEY and nothing else in it, the four columns below. The daemons fill
// them with where a row stands in its source, which is the same each time that
// it is sent: a row that comes again meets itself.
//
// The names are fixed, so that the table's declaration is all the setting there
// is: none that could name other columns than the table has, and one meaning for
// whoever reads the table. Both daemons use all four, so a table can have rows
// of both.

// The identity columns.
const (
	// identitySource is system identifier, slot and table; or topic and its id.
	identitySource = "holdfast_source"
	// identityPartition is 0 for Postgres.
	identityPartition = "holdfast_partition"
	// identityPosition is the end LSN of the commit, or the offset.
	identityPosition = "holdfast_position"
	// identitySequence counts the rows of the table in the transaction, or in
	// the record, from 1.
	identitySequence = "holdfast_sequence"
)

// identityTypes are the types that such a column may have; the first is the one
// that is proposed.
var identityTypes = map[string][]TypeName{
	identitySource:    {Varchar},
	identityPartition: {Integer, BigInt, UInteger, UBigInt},
	identityPosition:  {BigInt, UBigInt},
	identitySequence:  {BigInt, UBigInt},
}

// IdentityKey gives the names of the identity columns, in the order in which
// they are declared.
func IdentityKey() []string {
	return []string{identitySource, identityPartition, identityPosition, identitySequence}
}

// IdentityColumns gives the identity columns as they are declared.
func IdentityColumns() []ColumnDef {
	notes := map[string]string{
		identitySource:   "filled by the daemons: where the row stands in its source",
		identityPosition: "the commit's end LSN, or the offset",
		identitySequence: "among the table's rows of the transaction, or of the record",
	}
	cols := make([]ColumnDef, 0, len(identityTypes))
	for _, name := range IdentityKey() {
		cols = append(cols, ColumnDef{Name: name, Type: Type{Name: identityTypes[name][0]}, Note: notes[name]})
	}
	return cols
}

// isIdentity tells whether a column is an identity column by its name.
func isIdentity(name string) bool { return identityTypes[name] != nil }

// Identity tells whether the daemons fill the table's key. A table with some of
// the identity columns, and not exactly these as its PRIMARY KEY, is refused.
func (t *Table) Identity() (bool, error) {
	has := slices.ContainsFunc(t.Columns, func(c Column) bool { return isIdentity(c.Name) })
	if !has {
		return false, nil
	}
	if why := t.identityFault(); why != "" {
		declared := make([]string, 0, len(identityTypes))
		for _, c := range IdentityColumns() {
			declared = append(declared, c.SQL())
		}
		return false, &decode.Refusal{
			Reason: decode.ReasonSchema, What: "identity columns", Where: "table " + t.spelling, Why: why,
			Expected: "all four identity columns, each NOT NULL, and exactly them as PRIMARY KEY, in any order",
			Do: fmt.Sprintf("declare %s, PRIMARY KEY (%s); or take these columns out of the table, and declare the source's own key where it has one",
				strings.Join(declared, ", "), strings.Join(IdentityKey(), ", ")),
		}
	}
	return true, nil
}

// identityFault says what is wrong with the identity columns, "" for nothing.
func (t *Table) identityFault() string {
	for _, name := range IdentityKey() {
		i := slices.IndexFunc(t.Columns, func(c Column) bool { return c.Name == name })
		if i < 0 {
			return fmt.Sprintf("it has no column %q beside the other identity columns", name)
		}
		typ := &t.Columns[i].Type
		switch {
		case !slices.Contains(identityTypes[name], typ.Name):
			return fmt.Sprintf("its column %q is %s, not %s", name, typ, names(identityTypes[name]))
		case typ.Nullable:
			return fmt.Sprintf("its column %q may be NULL", name)
		}
	}
	have := t.KeyNames()
	if slices.Equal(slices.Sorted(slices.Values(have)), slices.Sorted(slices.Values(IdentityKey()))) {
		return ""
	}
	if len(have) == 0 {
		return "it has no PRIMARY KEY over them"
	}
	return fmt.Sprintf("its PRIMARY KEY is %s", list(have))
}

// identityColumn is one identity column of an encoder.
type identityColumn struct {
	name   string
	member []byte // `"name":`
	// limit is the highest number that the column takes.
	limit uint64
}

// identify prepares the identity columns of a table that has them.
func (e *Encoder) identify(sources []int) error {
	identity, err := e.table.Identity()
	if err != nil || !identity {
		return err
	}
	for i := range e.rel.Columns {
		if e.rel.Columns[i].Key && e.rel.Identity != decode.IdentityFull {
			return e.misfit("the source has a key, and the table's PRIMARY KEY is identity columns, under which an update would be one row more",
				"identity columns for sources without a key", "declare the source's own key as PRIMARY KEY, and take the identity columns out of the table")
		}
	}
	for i := range e.table.Columns {
		col := &e.table.Columns[i]
		if !col.Key {
			continue
		}
		if sources[i] >= 0 {
			return e.misfit(fmt.Sprintf("the source has a column %q, which the daemon fills", col.Name),
				"identity columns that the source does not have", "rename the source's column, or take the identity columns out of the table")
		}
		limit := uint64(math.MaxUint64)
		switch col.Type.Name {
		case BigInt:
			limit = math.MaxInt64
		case Integer:
			limit = math.MaxInt32
		case UInteger:
			limit = math.MaxUint32
		default: // BIGINT UNSIGNED, and the text
		}
		e.identity = append(e.identity, identityColumn{name: col.Name, member: append(appendString(nil, []byte(col.Name)), ':'), limit: limit})
	}
	return nil
}

// identityMembers writes the identity columns behind the others, or as the first.
func (e *Encoder) identityMembers(a *Array, pos *decode.Position, first bool) *problem {
	if pos.Source == "" || pos.Sequence == 0 || pos.Offset < 0 || pos.Partition < 0 {
		return &problem{
			reason: decode.ReasonIdentity, why: "it is not known where it stands in its source", expected: "a row with a place of its own",
			do: "report this: the daemon has to give every row of such a table its place",
		}
	}
	position := pos.LSN
	if pos.Topic != "" {
		position = uint64(pos.Offset)
	}
	for i := range e.identity {
		c := &e.identity[i]
		if i > 0 || !first {
			a.buf = append(a.buf, ',')
		}
		a.buf = append(a.buf, c.member...)
		var n uint64
		switch c.name {
		case identitySource:
			a.buf = appendString(a.buf, []byte(pos.Source))
			continue
		case identityPartition:
			n = uint64(pos.Partition)
		case identityPosition:
			n = position
		case identitySequence:
			n = pos.Sequence
		}
		if n > c.limit {
			p := cannot(fmt.Sprintf("its place %d is above what the column takes", n), fmt.Sprintf("at most %d", c.limit))
			p.column, p.do = c.name, "declare the column as BIGINT UNSIGNED; "+laterChange
			return p
		}
		a.buf = strconv.AppendUint(a.buf, n, 10)
	}
	return nil
}

// onlyInserts refuses what would have to find a row that is in the table.
func (e *Encoder) onlyInserts() *problem {
	if e.identity == nil {
		return nil
	}
	return &problem{
		reason:   decode.ReasonIdentity,
		why:      "the table identifies its rows by where each one stood in its source, so an update or delete, which stands elsewhere, does not tell which row it means",
		expected: "inserts alone, for a table whose PRIMARY KEY is identity columns",
		do:       "give the source a key and declare it as PRIMARY KEY in place of the identity columns; " + laterChange,
	}
}

// IdentityRows is what a table with identity columns has of one partition.
type IdentityRows struct {
	// Rows counts them. A record gives none, one or several.
	Rows uint64
	// First and Last are the lowest and the highest position, which are offsets.
	First, Last int64
}

// maxIdentityParts bounds the partitions of one source in a table.
const maxIdentityParts = 1_000_000

// IdentityRows counts the completed rows of a source in a table with identity
// columns, by partition. The engine looks at every row of the table for it. It
// sends nothing, and the answer is of the expected incarnation.
//
// Errors: *decode.Refusal, *[IncarnationChanged], or ctx's cause joined with
// the last reason.
func (c *Client) IdentityRows(ctx context.Context, t *Table, source string) (map[int32]IdentityRows, error) {
	col := func(name string) string { return QuoteName(name) }
	q := Query{
		Select: fmt.Sprintf("SELECT %[1]s AS part, COUNT(*) AS n, MIN(%[2]s) AS low, MAX(%[2]s) AS high FROM %[3]s WHERE %[4]s = %[5]s GROUP BY %[1]s",
			col(identityPartition), col(identityPosition), identifier(t.Name), col(identitySource), QuoteText(source)),
		MaxLine: 4 << 10,
	}
	var found map[int32]IdentityRows
	err := c.insist(ctx, "count the rows of table "+t.spelling, func() error {
		found = make(map[int32]IdentityRows)
		err := c.Query(ctx, q, func(line []byte) error {
			var row struct {
				Part *int32  `json:"part"`
				N    *uint64 `json:"n"`
				Low  *int64  `json:"low"`
				High *int64  `json:"high"`
			}
			if err := json.Unmarshal(line, &row); err != nil || row.Part == nil || row.N == nil || row.Low == nil || row.High == nil || len(found) >= maxIdentityParts {
				return &decode.Refusal{
					Reason: decode.ReasonMalformed, What: "rows with identity columns", Where: "table " + t.spelling,
					Why: "their count cannot be read: " + clip(string(line), maxMessage), Expected: "places that the daemons wrote: a partition and an offset",
					Do: "look at the rows of this source; delete those that are not of this program",
				}
			}
			found[*row.Part] = IdentityRows{Rows: *row.N, First: *row.Low, Last: *row.High}
			return nil
		})
		if err != nil {
			return err
		}
		now, err := c.Incarnation(ctx)
		if err != nil {
			return err
		}
		return c.sameIncarnation(now)
	})
	return found, err
}
