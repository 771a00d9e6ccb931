package feldera

// What Postgres' own types can go into, decided before the first row. Types
// that are not listed are decided value by value: an extension's text may well
// be a number.

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
}

func best(first TypeName, rest []TypeName) []TypeName {
	return append([]TypeName{first}, rest...)
}

// fits gives the types that take values of a Postgres type; nil where only the
// values themselves can tell.
func fits(oid uint32) []TypeName { return pgTypes[oid] }

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
