package core

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"math"
	"math/big"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"
	"unsafe"
)

// Values are held as canonical bytes, so that two values are equal exactly
// when their bytes are:
//
//	BOOLEAN, integers   "true", "-12"
//	REAL, DOUBLE        the shortest decimal that reads back the same
//	DECIMAL(p,s)        s fractional digits, no leading zeros, never "-0"
//	CHAR, VARCHAR       the text
//	BINARY, VARBINARY   the bytes
//	DATE                2026-01-02
//	TIME                03:04:05 with 0, 3, 6 or 9 fractional digits
//	TIMESTAMP           2026-01-02 03:04:05.123456, always six digits
//	TIMESTAMP_TZ        the same with a trailing Z
//	UUID                lower case with hyphens
//	VARIANT, ARRAY, MAP, STRUCT   compact JSON, object keys sorted

// Flavor is the dialect in which values are written.
type Flavor uint8

// The flavors that the simulator reads. CHex is "default" with binary data
// as a string of hexadecimal digits.
const (
	FlavorDefault Flavor = iota
	FlavorCHex
)

func str(b []byte) string {
	return unsafe.String(unsafe.SliceData(b), len(b)) // the string does not outlive the slice
}

var intRange = map[Kind]struct {
	name string
	min  int64
	max  uint64
}{
	TinyInt: {"i8", math.MinInt8, math.MaxInt8}, SmallInt: {"i16", math.MinInt16, math.MaxInt16},
	Integer: {"i32", math.MinInt32, math.MaxInt32}, BigInt: {"i64", math.MinInt64, math.MaxInt64},
	UTinyInt: {"u8", 0, math.MaxUint8}, USmallInt: {"u16", 0, math.MaxUint16},
	UInteger: {"u32", 0, math.MaxUint32}, UBigInt: {"u64", 0, math.MaxUint64},
}

func (t *Type) expected() string {
	switch t.Kind {
	case Boolean:
		return "a boolean"
	case TinyInt:
		return "i8"
	case SmallInt:
		return "i16"
	case Integer:
		return "i32"
	case BigInt:
		return "i64"
	case UTinyInt:
		return "u8"
	case USmallInt:
		return "u16"
	case UInteger:
		return "u32"
	case UBigInt:
		return "u64"
	case Real:
		return "f32"
	case Double:
		return "f64"
	case Decimal:
		return "a decimal number"
	case Binary, Varbinary, Array:
		return "a sequence"
	case Map:
		return "a map"
	case Struct:
		return "a struct"
	case UUID:
		return "a UUID string"
	default:
		return "a string"
	}
}

// appendValue reads the value of type t at b[i] and appends its canonical
// bytes to dst.
func (t *Type) appendValue(dst, b []byte, i int, fl Flavor, depth int) (out []byte, next int, null bool, err *valueError) {
	if i >= len(b) || depth > maxDepth {
		return dst, i, false, errSyntax
	}
	if b[i] == 'n' {
		if !hasWord(b, i, "null") {
			return dst, i, false, errSyntax
		}
		if !t.Nullable {
			return dst, i, false, invalidType(b, i, t.expected())
		}
		return dst, i + 4, true, nil
	}
	switch t.Kind {
	case Boolean:
		if hasWord(b, i, "true") {
			return append(dst, "true"...), i + 4, false, nil
		}
		if hasWord(b, i, "false") {
			return append(dst, "false"...), i + 5, false, nil
		}
		return dst, i, false, invalidType(b, i, t.expected())
	case TinyInt, SmallInt, Integer, BigInt, UTinyInt, USmallInt, UInteger, UBigInt:
		out, next, err = t.appendInt(dst, b, i)
		return out, next, false, err
	case Real, Double:
		out, next, err = t.appendFloat(dst, b, i)
		return out, next, false, err
	case Decimal:
		out, next, err = t.appendDecimal(dst, b, i)
		return out, next, false, err
	case Binary, Varbinary:
		out, next, err = t.appendBinary(dst, b, i, fl)
		return out, next, false, err
	case Char, Varchar, Date, Time, Timestamp, TimestampTZ:
		out, next, err = t.appendText(dst, b, i)
		return out, next, false, err
	case UUID:
		if b[i] == '[' {
			at := len(dst)
			if out, next, err = t.appendBinary(dst, b, i, FlavorDefault); err != nil {
				return dst, i, false, err
			}
			if len(out)-at != 16 {
				return dst, i, false, errAt(next, "invalid length %d, expected an array of length 16", len(out)-at)
			}
			var raw [16]byte
			copy(raw[:], out[at:])
			return appendUUID(out[:at], raw), next, false, nil
		}
		out, next, err = t.appendText(dst, b, i)
		return out, next, false, err
	case Variant:
		out, next, err = appendVariant(dst, b, i, depth)
		return out, next, false, err
	case Array:
		out, next, err = t.appendArray(dst, b, i, fl, depth)
		return out, next, false, err
	case Map:
		out, next, err = t.appendMap(dst, b, i, fl, depth)
		return out, next, false, err
	case Struct:
		out, next, err = t.appendStruct(dst, b, i, fl, depth)
		return out, next, false, err
	}
	return dst, i, false, errAt(i, "type %s cannot be ingested", t.Kind)
}

func (t *Type) appendInt(dst, b []byte, i int) ([]byte, int, *valueError) {
	n, float, ok := scanNumber(b, i)
	if !ok || float {
		return dst, i, invalidType(b, i, t.expected())
	}
	neg := b[i] == '-'
	digits := b[i:n]
	if neg {
		digits = digits[1:]
	}
	var v uint64
	overflow := len(digits) > 20
	if !overflow {
		for _, c := range digits {
			hi := v
			v = v*10 + uint64(c-'0')
			if hi > math.MaxUint64/10 || v < hi {
				overflow = true
				break
			}
		}
	}
	rg := intRange[t.Kind]
	if neg && v == 0 {
		return append(dst, '0'), n, nil
	}
	switch {
	case overflow:
		return dst, i, errAt(n, "number out of range")
	case neg && v > uint64(-(rg.min+1))+1 && rg.min < 0, neg && rg.min == 0, !neg && v > rg.max: // min+1 cannot overflow
		return dst, i, errAt(n, "invalid value: integer `%s`, expected %s", b[i:n], rg.name)
	}
	return append(dst, b[i:n]...), n, nil
}

func (t *Type) appendFloat(dst, b []byte, i int) ([]byte, int, *valueError) {
	n, _, ok := scanNumber(b, i)
	if !ok {
		return dst, i, invalidType(b, i, t.expected())
	}
	bits := 64
	if t.Kind == Real {
		bits = 32
	}
	f, err := strconv.ParseFloat(str(b[i:n]), 64)
	if err != nil || math.IsInf(f, 0) {
		return dst, i, errAt(n, "number out of range")
	}
	if bits == 32 && math.IsInf(float64(float32(f)), 0) {
		return dst, i, errAt(n, "number out of range")
	}
	if f == 0 {
		f = 0 // -0 and 0 are one value
	}
	return strconv.AppendFloat(dst, f, 'g', -1, bits), n, nil
}

// appendDecimal reads a number, or a string that holds one. Digits beyond the
// scale are cut off, toward zero; a number that needs more than p-s digits
// before the point is refused.
func (t *Type) appendDecimal(dst, b []byte, i int) ([]byte, int, *valueError) {
	var num []byte
	var next int
	if b[i] == '"' {
		raw, esc, n, ok := scanString(b, i)
		if !ok {
			return dst, i, errSyntax
		}
		if esc {
			if raw, ok = unescape(nil, raw); !ok {
				return dst, i, errSyntax
			}
		}
		num, next = raw, n
	} else {
		n, _, ok := scanNumber(b, i)
		if !ok {
			return dst, i, invalidType(b, i, t.expected())
		}
		num, next = b[i:n], n
	}
	out, why := canonicalDecimal(dst, num, t.Precision, t.Scale)
	if why != "" {
		return dst, i, errAt(next, "%s", why)
	}
	return out, next, nil
}

// canonicalDecimal appends num with exactly scale fractional digits. why is
// empty on success.
func canonicalDecimal(dst, num []byte, precision, scale int) (out []byte, why string) {
	s := num
	neg := false
	if len(s) > 0 && (s[0] == '-' || s[0] == '+') {
		neg = s[0] == '-'
		s = s[1:]
	}
	exp := 0
	if e := indexExp(s); e >= 0 {
		x, err := strconv.Atoi(string(s[e+1:]))
		if err != nil || x > 10000 || x < -10000 {
			return dst, "invalid decimal number " + strconv.Quote(string(num))
		}
		exp, s = x, s[:e]
	}
	// digits, and how many of them stand before the point
	var buf [64]byte
	digits := buf[:0]
	before := -1
	for _, c := range s {
		switch {
		case c == '.' && before < 0:
			before = len(digits)
		case c >= '0' && c <= '9':
			if len(digits) > 4096 {
				return dst, "decimal number is too long"
			}
			digits = append(digits, c)
		default:
			return dst, "invalid decimal number " + strconv.Quote(string(num))
		}
	}
	if len(digits) == 0 {
		return dst, "invalid decimal number " + strconv.Quote(string(num))
	}
	if before < 0 {
		before = len(digits)
	}
	before += exp
	for len(digits) > 0 && digits[0] == '0' {
		digits = digits[1:]
		before--
	}
	if len(digits) == 0 {
		before = 0
	}
	if before > precision-scale {
		return dst, "decimal number " + string(num) + " does not fit DECIMAL(" + strconv.Itoa(precision) + ", " + strconv.Itoa(scale) + ")"
	}
	digit := func(k int) byte { // k counts from the first significant digit
		if k < 0 || k >= len(digits) {
			return '0'
		}
		return digits[k]
	}
	zero := true
	for k := 0; k < before+scale && k < len(digits); k++ {
		zero = zero && digits[k] == '0'
	}
	if neg && !zero {
		dst = append(dst, '-')
	}
	if before <= 0 {
		dst = append(dst, '0')
	} else {
		for k := range before {
			dst = append(dst, digit(k))
		}
	}
	if scale > 0 {
		dst = append(dst, '.')
		for k := range scale {
			dst = append(dst, digit(before+k))
		}
	}
	return dst, ""
}

func indexExp(s []byte) int {
	for i, c := range s {
		if c == 'e' || c == 'E' {
			return i
		}
	}
	return -1
}

func (t *Type) appendBinary(dst, b []byte, i int, fl Flavor) ([]byte, int, *valueError) {
	if fl == FlavorCHex {
		raw, _, n, ok := scanString(b, i)
		if !ok {
			return dst, i, invalidType(b, i, "a hex string")
		}
		raw = trimHexPrefix(raw)
		at := len(dst)
		dst = append(dst, make([]byte, hex.DecodedLen(len(raw)))...)
		if _, err := hex.Decode(dst[at:], raw); err != nil {
			return dst[:at], i, errAt(n, "invalid hex string: %v", err)
		}
		return dst, n, nil
	}
	if b[i] != '[' {
		return dst, i, invalidType(b, i, "an array of bytes")
	}
	j := skipSpace(b, i+1)
	if j < len(b) && b[j] == ']' {
		return dst, j + 1, nil
	}
	for {
		n, float, ok := scanNumber(b, j)
		if !ok || float {
			return dst, i, invalidType(b, j, "u8")
		}
		v, err := strconv.ParseUint(str(b[j:n]), 10, 8)
		if err != nil {
			return dst, i, errAt(n, "invalid value: integer `%s`, expected u8", b[j:n])
		}
		dst = append(dst, byte(v))
		j = skipSpace(b, n)
		if j >= len(b) {
			return dst, i, errSyntax
		}
		if b[j] == ']' {
			return dst, j + 1, nil
		}
		if b[j] != ',' {
			return dst, i, errSyntax
		}
		j = skipSpace(b, j+1)
	}
}

func trimHexPrefix(raw []byte) []byte {
	if len(raw) >= 2 && (raw[0] == '\\' || raw[0] == '0') && (raw[1] == 'x' || raw[1] == 'X') {
		return raw[2:]
	}
	return raw
}

// appendText reads a JSON string and turns its content into canonical form.
func (t *Type) appendText(dst, b []byte, i int) ([]byte, int, *valueError) {
	raw, esc, n, ok := scanString(b, i)
	if !ok {
		return dst, i, invalidType(b, i, t.expected())
	}
	if t.Kind == Char || t.Kind == Varchar {
		if !esc {
			return append(dst, raw...), n, nil
		}
		if dst, ok = unescape(dst, raw); !ok {
			return dst, i, errSyntax
		}
		return dst, n, nil
	}
	if esc {
		if raw, ok = unescape(nil, raw); !ok {
			return dst, i, errSyntax
		}
	}
	out, why := t.canonicalText(dst, string(raw))
	if why != "" {
		return dst, i, errAt(n, "%s", why)
	}
	return out, n, nil
}

// canonicalText turns the text form of a value, as JSON strings and CSV
// fields carry it, into canonical form. why is empty on success.
func (t *Type) canonicalText(dst []byte, s string) (out []byte, why string) {
	switch t.Kind {
	case Char, Varchar:
		return append(dst, s...), ""
	case Date:
		d := strings.TrimSpace(s)
		if _, err := time.Parse("2006-01-02", d); err != nil || len(d) != 10 {
			return dst, "invalid date string " + strconv.Quote(s)
		}
		return append(dst, d...), ""
	case Time:
		at, ok := parseClock(strings.TrimSpace(s))
		if !ok {
			return dst, "invalid time string " + strconv.Quote(s)
		}
		return appendClock(dst, at), ""
	case Timestamp:
		at, ok := parseTimestamp(strings.TrimSpace(s))
		if !ok {
			return dst, "invalid timestamp string " + strconv.Quote(s) + ": expected 'YYYY-MM-DD HH:MM:SS.f' or RFC 3339"
		}
		return at.AppendFormat(dst, "2006-01-02 15:04:05.000000"), ""
	case TimestampTZ:
		at, ok := parseRFC3339(strings.TrimSpace(s))
		if !ok {
			return dst, "invalid timestamp string " + strconv.Quote(s) + ": expected RFC 3339"
		}
		return at.AppendFormat(dst, "2006-01-02 15:04:05.000000Z"), ""
	case UUID:
		raw, ok := parseUUID(s)
		if !ok {
			return dst, "UUID parsing failed: invalid string " + strconv.Quote(s)
		}
		return appendUUID(dst, raw), ""
	default:
		return dst, "a " + t.Kind.String() + " is not written as a string"
	}
}

// parseClock reads HH:MM:SS with up to nine fractional digits.
func parseClock(s string) (time.Duration, bool) {
	if len(s) < 8 || s[2] != ':' || s[5] != ':' {
		return 0, false
	}
	h, ok1 := digits2(s[0:2])
	m, ok2 := digits2(s[3:5])
	sec, ok3 := digits2(s[6:8])
	if !ok1 || !ok2 || !ok3 || h > 23 || m > 59 || sec > 59 {
		return 0, false
	}
	ns := 0
	if len(s) > 8 {
		if s[8] != '.' || len(s) == 9 || len(s) > 18 {
			return 0, false
		}
		for k := 9; k < 18; k++ {
			ns *= 10
			if k < len(s) {
				if s[k] < '0' || s[k] > '9' {
					return 0, false
				}
				ns += int(s[k] - '0')
			}
		}
	}
	return time.Duration(h)*time.Hour + time.Duration(m)*time.Minute + time.Duration(sec)*time.Second + time.Duration(ns), true
}

func digits2(s string) (int, bool) {
	if s[0] < '0' || s[0] > '9' || s[1] < '0' || s[1] > '9' {
		return 0, false
	}
	return int(s[0]-'0')*10 + int(s[1]-'0'), true
}

func appendClock(dst []byte, at time.Duration) []byte {
	t := time.Unix(0, 0).UTC().Add(at)
	switch ns := at % time.Second; {
	case ns == 0:
		return t.AppendFormat(dst, "15:04:05")
	case ns%time.Millisecond == 0:
		return t.AppendFormat(dst, "15:04:05.000")
	case ns%time.Microsecond == 0:
		return t.AppendFormat(dst, "15:04:05.000000")
	default:
		return t.AppendFormat(dst, "15:04:05.000000000")
	}
}

// parseTimestamp reads "YYYY-MM-DD HH:MM:SS[.f]" or RFC 3339; digits below a
// microsecond are dropped.
func parseTimestamp(s string) (time.Time, bool) {
	if len(s) >= 19 && s[10] == ' ' {
		if at, ok := parseClock(s[11:]); ok {
			day, err := time.Parse("2006-01-02", s[:10])
			if err != nil {
				return time.Time{}, false
			}
			return day.Add(at).Truncate(time.Microsecond), true
		}
	}
	return parseRFC3339(s)
}

func parseRFC3339(s string) (time.Time, bool) {
	if len(s) > 10 && (s[10] == ' ' || s[10] == 't') {
		s = s[:10] + "T" + s[11:]
	}
	at, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return time.Time{}, false
	}
	at = at.UTC().Truncate(time.Microsecond)
	return at, at.Year() >= 1 && at.Year() <= 9999
}

func parseUUID(s string) (raw [16]byte, ok bool) {
	s = strings.TrimPrefix(s, "urn:uuid:")
	if len(s) == 38 && s[0] == '{' && s[37] == '}' {
		s = s[1:37]
	}
	if len(s) == 36 {
		if s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
			return raw, false
		}
		s = s[:8] + s[9:13] + s[14:18] + s[19:23] + s[24:]
	}
	if len(s) != 32 {
		return raw, false
	}
	_, err := hex.Decode(raw[:], []byte(s))
	return raw, err == nil
}

func appendUUID(dst []byte, raw [16]byte) []byte {
	dst = hex.AppendEncode(dst, raw[:4])
	for _, part := range [][]byte{raw[4:6], raw[6:8], raw[8:10], raw[10:]} {
		dst = append(dst, '-')
		dst = hex.AppendEncode(dst, part)
	}
	return dst
}

func (t *Type) appendArray(dst, b []byte, i int, fl Flavor, depth int) ([]byte, int, *valueError) {
	if b[i] != '[' {
		return dst, i, invalidType(b, i, t.expected())
	}
	dst = append(dst, '[')
	j := skipSpace(b, i+1)
	if j < len(b) && b[j] == ']' {
		return append(dst, ']'), j + 1, nil
	}
	for n := 0; ; n++ {
		if n > 0 {
			dst = append(dst, ',')
		}
		var err *valueError
		if dst, j, err = t.Elem.appendNested(dst, b, j, fl, depth+1); err != nil {
			return dst, i, err
		}
		j = skipSpace(b, j)
		if j >= len(b) {
			return dst, i, errSyntax
		}
		if b[j] == ']' {
			return append(dst, ']'), j + 1, nil
		}
		if b[j] != ',' {
			return dst, i, errSyntax
		}
		j = skipSpace(b, j+1)
	}
}

// appendNested appends a value as JSON, for use inside ARRAY, MAP and ROW.
func (t *Type) appendNested(dst, b []byte, i int, fl Flavor, depth int) ([]byte, int, *valueError) {
	raw, next, null, err := t.appendValue(nil, b, i, fl, depth)
	if err != nil {
		return dst, i, err
	}
	if null {
		return append(dst, "null"...), next, nil
	}
	return t.AppendJSON(dst, raw), next, nil
}

type member struct {
	key string
	val []byte
}

// appendMembers writes an object with its keys sorted; of equal keys the last
// one wins.
func appendMembers(dst []byte, ms []member) []byte {
	sort.SliceStable(ms, func(a, c int) bool { return ms[a].key < ms[c].key })
	dst = append(dst, '{')
	first := true
	for n, m := range ms {
		if n+1 < len(ms) && ms[n+1].key == m.key {
			continue
		}
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = appendQuoted(dst, []byte(m.key))
		dst = append(dst, ':')
		dst = append(dst, m.val...)
	}
	return append(dst, '}')
}

// eachMember walks the object at b[i].
func eachMember(b []byte, i int, visit func(key string, at int) (next int, err *valueError)) (int, *valueError) {
	j := skipSpace(b, i+1)
	if j < len(b) && b[j] == '}' {
		return j + 1, nil
	}
	for {
		raw, esc, n, ok := scanString(b, j)
		if !ok {
			return i, errSyntax
		}
		if esc {
			if raw, ok = unescape(nil, raw); !ok {
				return i, errSyntax
			}
		}
		j = skipSpace(b, n)
		if j >= len(b) || b[j] != ':' {
			return i, errSyntax
		}
		next, err := visit(string(raw), skipSpace(b, j+1))
		if err != nil {
			return i, err
		}
		j = skipSpace(b, next)
		if j >= len(b) {
			return i, errSyntax
		}
		if b[j] == '}' {
			return j + 1, nil
		}
		if b[j] != ',' {
			return i, errSyntax
		}
		j = skipSpace(b, j+1)
	}
}

func (t *Type) appendMap(dst, b []byte, i int, fl Flavor, depth int) ([]byte, int, *valueError) {
	if b[i] != '{' {
		return dst, i, invalidType(b, i, t.expected())
	}
	var ms []member
	next, err := eachMember(b, i, func(key string, at int) (int, *valueError) {
		k, why := t.Key.canonicalKey(key)
		if why != "" {
			return at, errAt(at, "%s", why)
		}
		val, n, err := t.Value.appendNested(nil, b, at, fl, depth+1)
		if err == nil {
			ms = append(ms, member{k, val})
		}
		return n, err
	})
	if err != nil {
		return dst, i, err
	}
	return appendMembers(dst, ms), next, nil
}

// canonicalKey reads the string form of a MAP key.
func (t *Type) canonicalKey(key string) (canon, why string) {
	switch t.Kind {
	case Char, Varchar:
		return key, ""
	case Date, Time, Timestamp, TimestampTZ, UUID:
		out, why := t.canonicalText(nil, key)
		return string(out), why
	default:
		out, next, null, err := t.appendValue(nil, []byte(key), 0, FlavorDefault, 0)
		if err != nil || null || next != len(key) {
			return "", "invalid map key " + strconv.Quote(key) + ", expected " + t.expected()
		}
		return string(out), ""
	}
}

func (t *Type) appendStruct(dst, b []byte, i int, fl Flavor, depth int) ([]byte, int, *valueError) {
	vals := make([][]byte, len(t.Fields))
	var next int
	var err *valueError
	switch b[i] {
	case '{':
		next, err = eachMember(b, i, func(key string, at int) (int, *valueError) {
			for k, f := range t.Fields {
				if key == f.Name || !f.CaseSensitive && strings.ToLower(key) == f.Name {
					val, n, err := f.Type.appendNested(nil, b, at, fl, depth+1)
					vals[k] = val
					return n, err
				}
			}
			n, ok := skipValue(b, at, depth+1)
			if !ok {
				return at, errSyntax
			}
			return n, nil
		})
	default:
		return dst, i, invalidType(b, i, t.expected())
	}
	if err != nil {
		return dst, i, err
	}
	dst = append(dst, '{')
	for k, f := range t.Fields {
		if vals[k] == nil {
			if !f.Type.Nullable {
				return dst, i, errAt(next, "missing field `%s`", f.Name)
			}
			vals[k] = []byte("null")
		}
		if k > 0 {
			dst = append(dst, ',')
		}
		dst = appendQuoted(dst, []byte(f.Name))
		dst = append(dst, ':')
		dst = append(dst, vals[k]...)
	}
	return append(dst, '}'), next, nil
}

// appendVariant writes any JSON value compactly with its object keys sorted.
func appendVariant(dst, b []byte, i, depth int) ([]byte, int, *valueError) {
	if i >= len(b) || depth > maxDepth {
		return dst, i, errSyntax
	}
	switch b[i] {
	case '{':
		var ms []member
		next, err := eachMember(b, i, func(key string, at int) (int, *valueError) {
			val, n, err := appendVariant(nil, b, at, depth+1)
			if err == nil {
				ms = append(ms, member{key, val})
			}
			return n, err
		})
		if err != nil {
			return dst, i, err
		}
		return appendMembers(dst, ms), next, nil
	case '[':
		dst = append(dst, '[')
		j := skipSpace(b, i+1)
		if j < len(b) && b[j] == ']' {
			return append(dst, ']'), j + 1, nil
		}
		for n := 0; ; n++ {
			if n > 0 {
				dst = append(dst, ',')
			}
			var err *valueError
			if dst, j, err = appendVariant(dst, b, j, depth+1); err != nil {
				return dst, i, err
			}
			j = skipSpace(b, j)
			if j >= len(b) {
				return dst, i, errSyntax
			}
			if b[j] == ']' {
				return append(dst, ']'), j + 1, nil
			}
			if b[j] != ',' {
				return dst, i, errSyntax
			}
			j = skipSpace(b, j+1)
		}
	case '"':
		raw, esc, n, ok := scanString(b, i)
		if ok && esc {
			raw, ok = unescape(nil, raw)
		}
		if !ok {
			return dst, i, errSyntax
		}
		return appendQuoted(dst, raw), n, nil
	default:
		n, ok := skipValue(b, i, depth)
		if !ok {
			return dst, i, errSyntax
		}
		if c := b[i]; c != '-' && (c < '0' || c > '9') {
			return append(dst, b[i:n]...), n, nil
		}
		number, ok := variantNumber(b[i:n])
		if !ok {
			return dst, i, errAt(n, "decimal value %s is out of range", b[i:n])
		}
		return append(dst, number...), n, nil
	}
}

const (
	// variantDigits and variantScale are what a number inside a VARIANT keeps:
	// the engine holds it as a decimal (crates/fxp/src/dynamic.rs).
	variantDigits = 38
	variantScale  = 255
)

// variantNumber is the number that a VARIANT keeps of one: rounded to its
// digits, half to even, 0 where it is too small. ok is false where it is too
// large. What needs no change comes back as it was written.
func variantNumber(b []byte) (out []byte, ok bool) {
	mantissa, exp := b, 0
	if e := bytes.IndexAny(b, "eE"); e >= 0 {
		var err error
		if exp, err = strconv.Atoi(string(b[e+1:])); err != nil {
			exp = math.MaxInt32 // too many digits to read; the sign tells
			if b[e+1] == '-' {
				exp = -exp
			}
		}
		mantissa = b[:e]
	}
	whole, fraction, _ := bytes.Cut(bytes.TrimPrefix(mantissa, []byte("-")), []byte("."))
	digits := bytes.TrimLeft(slices.Concat(whole, fraction), "0")
	exp -= len(fraction)
	if kept := bytes.TrimRight(digits, "0"); len(kept) < len(digits) {
		exp += len(digits) - len(kept)
		digits = kept
	}
	switch {
	case len(digits) == 0:
		return b, true
	case len(digits)+exp > variantDigits:
		return nil, false
	case len(digits) <= variantDigits && exp >= -variantScale:
		return b, true
	case exp < -variantScale-len(digits):
		return []byte("0"), true
	}
	sig, _ := new(big.Int).SetString(string(digits), 10)
	if n := len(digits) - variantDigits; n > 0 {
		unit := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(n)), nil)
		quotient, rest := new(big.Int).QuoRem(sig, unit, new(big.Int))
		half := rest.Lsh(rest, 1).Cmp(unit)
		if half > 0 || half == 0 && quotient.Bit(0) == 1 {
			quotient.Add(quotient, big.NewInt(1))
		}
		sig, exp = quotient, exp+n
	}
	if exp < -variantScale {
		return []byte("0"), true
	}
	sign := ""
	if b[0] == '-' {
		sign = "-"
	}
	return fmt.Appendf(nil, "%s%se%d", sign, sig, exp), true
}

// AppendJSON writes a canonical value as JSON: DECIMAL, dates and times as
// strings, binary data as an array of integers.
func (t *Type) AppendJSON(dst, raw []byte) []byte {
	switch t.Kind {
	case Boolean, TinyInt, SmallInt, Integer, BigInt, UTinyInt, USmallInt, UInteger, UBigInt,
		Real, Double, Variant, Array, Map, Struct:
		return append(dst, raw...)
	case Binary, Varbinary:
		dst = append(dst, '[')
		for n, c := range raw {
			if n > 0 {
				dst = append(dst, ',')
			}
			dst = strconv.AppendUint(dst, uint64(c), 10)
		}
		return append(dst, ']')
	case Char, Varchar, Decimal, Date, Time, Timestamp, TimestampTZ, UUID:
		return appendQuoted(dst, raw)
	}
	return dst
}
