package feldera

import (
	"fmt"
	"slices"

	"holdfast/internal/decode"
)

// What Postgres' types can go into, decided before the first row. A type that
// is not listed, such as an extension's, an enum or a range, is its text to
// the stream, and goes where text goes: that it may look like a number is no
// promise that it is one.

var (
	intTypes   = []TypeName{TinyInt, SmallInt, Integer, BigInt, UTinyInt, USmallInt, UInteger, UBigInt}
	textTypes  = []TypeName{Char, Varchar, Variant}
	numeric    = append(append([]TypeName{Decimal, Real, Double}, intTypes...), textTypes...)
	temporal   = []TypeName{Date, Time, Timestamp, TimestampTZ, UUID, Decimal}
	textual    = append(append([]TypeName(nil), textTypes...), temporal...)
	structured = []TypeName{Variant, Char, Varchar, ArrayOf, MapOf, Struct, Binary, Varbinary}
)

// pgTypes gives for an OID of pg_type.dat the types that take its values, the
// first being the best.
var pgTypes = map[uint32][]TypeName{
	16:   {Boolean, Char, Varchar, Variant},
	17:   {Varbinary, Binary, Variant},
	18:   textual,
	19:   textual,
	20:   best(BigInt, numeric),
	21:   best(SmallInt, numeric),
	23:   best(Integer, numeric),
	25:   best(Varchar, textual),
	26:   best(BigInt, numeric),
	28:   best(BigInt, numeric),
	29:   best(BigInt, numeric),
	114:  structured,
	700:  best(Real, numeric),
	701:  best(Double, numeric),
	1042: best(Char, textual),
	1043: best(Varchar, textual),
	1082: {Date, Timestamp, Char, Varchar, Variant},
	1083: {Time, Char, Varchar, Variant},
	1114: {Timestamp, Char, Varchar, Variant},
	1184: {TimestampTZ, Timestamp, Char, Varchar, Variant},
	1186: {Varchar, Char, Variant},
	1266: {Varchar, Char, Variant},
	1700: best(Decimal, numeric),
	2950: {UUID, Char, Varchar, Variant},
	3802: structured,
	5069: best(UBigInt, numeric),
}

func best(first TypeName, rest []TypeName) []TypeName {
	return append([]TypeName{first}, rest...)
}

// fits gives the types that take values of a Postgres type; nil where only the
// values themselves can tell, as for a source that is not Postgres.
func fits(oid uint32) []TypeName {
	if t, ok := pgTypes[oid]; ok || oid == 0 {
		return t
	}
	return textTypes
}

// misfits says why a column cannot go into a type, with the types that it can
// go into; "" where it can.
func misfits(col *decode.Column, t *Type) (why string, allowed []TypeName) {
	if col.Element == 0 {
		allowed = fits(col.TypeOID)
		if allowed == nil || slices.Contains(allowed, t.Name) {
			return "", nil
		}
		return fmt.Sprintf("has Postgres type OID %d, which %s cannot hold as it is", col.TypeOID, t), allowed
	}
	if t.Name != ArrayOf {
		if slices.Contains(textTypes, t.Name) {
			return "", nil
		}
		return fmt.Sprintf("is an array, which %s cannot hold", t), append([]TypeName{ArrayOf}, textTypes...)
	}
	part := t
	for part.Name == ArrayOf && part.Element != nil {
		part = part.Element
	}
	allowed = fits(col.Element)
	if allowed == nil || slices.Contains(allowed, part.Name) {
		return "", nil
	}
	return fmt.Sprintf("is an array of Postgres type OID %d, which elements of type %s cannot hold as they are", col.Element, part), allowed
}

// suggest gives the type to declare for a column that a table lacks.
func suggest(oid uint32) TypeName {
	t, ok := pgTypes[oid]
	switch {
	case !ok || oid == 18 || oid == 19 || oid == 1042:
		return Varchar
	case t[0] == Decimal:
		return "DECIMAL(38, 10)"
	case t[0] == TimestampTZ:
		return "TIMESTAMP WITH TIME ZONE"
	}
	return t[0]
}

// from tells the plan of a column what its source is.
func (p *plan) from(col *decode.Column) {
	p.elementOID = col.Element
	oid := col.TypeOID
	for part := p; part != nil; part = part.element {
		if part.kind == planArray && col.Element != 0 {
			oid = col.Element
		}
		// A float4 written into a DOUBLE is its shortest text; a float8
		// written into a REAL has digits of its own.
		part.exact = oid != 0 && oid != oidFloat4 && (oid != oidFloat8 || part.bits == 32)
	}
}

const (
	oidFloat4 = 700
	oidFloat8 = 701
)
