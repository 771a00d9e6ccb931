// Package decode turns the bytes of every source format into one change
// type, OrderChange, and does nothing else: it performs no I/O, keeps no
// clock, and imports no driver.
//
// Everything read here is treated as written by an enemy: lengths are checked
// before they are used, unknown kinds and left-over bytes are refused, and no
// allocation is sized by a number that the input merely claims.
//
// Its callers are internal/wal (pgoutput), internal/partition (Kafka records)
// and internal/feldera, which encodes an OrderChange without knowing which
// format it came from.
package decode

import (
	"fmt"
	"strconv"
)

// Op is the operation of a change.
type Op uint8

// The operations. The zero value is invalid on purpose: a forgotten Op must
// not pass for an insert.
const (
	// Insert carries After and is an upsert where the table has a key.
	Insert Op = iota + 1
	// Update carries After and, where the source gave one, Before.
	Update
	// Delete carries Before: at least the key columns.
	Delete
	// Truncate carries no row: every row of the relation is gone.
	Truncate
)

// String gives the name used in logs and metric labels.
func (o Op) String() string {
	switch o {
	case Insert:
		return "insert"
	case Update:
		return "update"
	case Delete:
		return "delete"
	case Truncate:
		return "truncate"
	}
	return "invalid(" + strconv.Itoa(int(o)) + ")"
}

// State tells what is known of one column of a row.
type State uint8

const (
	// Absent: the source said nothing about the column.
	Absent State = iota
	// Null: the source said NULL.
	Null
	// Unchanged: the source did not send the value because it did not change
	// (a TOASTed column of an UPDATE). It is never NULL and never stale: it is
	// whatever the destination already holds.
	Unchanged
	// Set: the column has the value in Value.Bytes.
	Set
)

// Kind tells how Value.Bytes is to be read. It is a property of the source's
// value, not of the destination's column.
type Kind uint8

const (
	// Text is UTF-8 text, unescaped. Dates, times, UUIDs and everything that
	// has no better kind come as Text.
	Text Kind = iota
	// Bool is exactly "true" or "false".
	Bool
	// Number is a decimal number in JSON's grammar, or one of "NaN",
	// "Infinity", "-Infinity".
	Number
	// Hex is binary data as hexadecimal digits, without a prefix.
	Hex
	// JSON is the text of one JSON value, verbatim and not yet validated.
	JSON
)

// Value is one column of one row. Bytes aliases the buffer that was decoded
// and is valid only as long as the decoder that returned it says.
type Value struct {
	State State
	Kind  Kind
	Bytes []byte
}

// Column describes one column of a Relation.
type Column struct {
	// Name as the source spells it, case preserved.
	Name string
	// Key is true for a column of the replica identity (Postgres) or of the
	// table's primary key (Kafka).
	Key bool
	// TypeOID and TypeModifier are Postgres'; zero for other sources. They
	// begin as the stream gives them, which for a column of a domain is the
	// domain's own OID; internal/wal puts the type at its bottom in its place
	// before the first row is decoded.
	TypeOID      uint32
	TypeModifier int32
	// Element is the type of an array's elements, behind all domains; 0 for a
	// column that is no array whose elements are parted by commas, and until
	// internal/wal has looked it up.
	Element uint32
}

// Identity is a relation's replica identity as Postgres names it. Sources
// other than Postgres use IdentityDefault.
type Identity byte

// The replica identities, with the letters of pg_class.relreplident.
const (
	IdentityDefault Identity = 'd'
	IdentityNothing Identity = 'n'
	IdentityFull    Identity = 'f'
	IdentityIndex   Identity = 'i'
)

// Relation is one version of a table's shape. It is immutable from its first
// row on (before that, the types of its columns are resolved) and shared by
// all changes that were made under it, so its address identifies the version.
type Relation struct {
	// ID is the relation's OID in Postgres, 0 elsewhere.
	ID uint32
	// Schema is the Postgres schema, "" where the source has none.
	Schema string
	// Name of the table as the source spells it.
	Name     string
	Identity Identity
	Columns  []Column
}

// String gives "schema.table", or "table" where there is no schema.
func (r *Relation) String() string {
	if r == nil {
		return "<no relation>"
	}
	if r.Schema == "" {
		return r.Name
	}
	return r.Schema + "." + r.Name
}

// Position is where a change stands in its source. Exactly one of the two
// halves, LSN or Kafka record, is used.
type Position struct {
	// LSN is the end LSN of the transaction's commit, for Postgres.
	LSN uint64
	// Topic, Partition and Offset locate a Kafka record.
	Topic     string
	Partition int32
	Offset    int64
	// Source names the source among all that can feed a table: system
	// identifier, slot and table; or topic and topic id. Sequence counts the
	// table's rows in the transaction, or the record's, from 1. Both are the same
	// each time that the change is read, and are left out where nobody asks.
	Source   string
	Sequence uint64
}

// String gives "LSN 0/16B3748" or "orders[3]@1042": the form used in errors.
func (p Position) String() string {
	if p.Topic != "" {
		return fmt.Sprintf("%s[%d]@%d", p.Topic, p.Partition, p.Offset)
	}
	return "LSN " + FormatLSN(p.LSN)
}

// FormatLSN writes a Postgres log position the way the server does.
func FormatLSN(lsn uint64) string {
	return fmt.Sprintf("%X/%X", uint32(lsn>>32), uint32(lsn)) //nolint:gosec // the two halves of a 64-bit position
}

// OrderChange is one change of one row, or the truncation of one table, in
// the one form that all source formats meet in. It is named after the first
// table it carried; it carries a row of any table.
//
// Before and After are parallel to Relation.Columns and are nil where the
// source gave no such row. A decoder may reuse the slices: they are valid
// until its next call.
type OrderChange struct {
	Op       Op
	Relation *Relation
	Before   []Value
	After    []Value
	Position Position
}
