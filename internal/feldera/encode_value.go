package feldera

import (
	"bytes"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"

	"holdfast/internal/decode"
)

// planKind is how a value is written: the SQL types that share a form share a
// kind.
type planKind uint8

const (
	planBool planKind = iota + 1
	planInt
	planFloat
	planDecimal
	planText
	planBytes
	planDate
	planTime
	planTimestamp
	planTimestampTZ
	planUUID
	planVariant
	planArray
	planMap
	planStruct
)

// plan is a type prepared for writing values of it.
type plan struct {
	name     string // of the column; "" for parts of a type
	typ      *Type
	kind     planKind
	nullable bool
	// maxPos and maxNeg are an integer type's largest magnitudes on each side.
	maxPos, maxNeg uint64
	bits           int // of a float
	// exact is true where the source's type is not a float itself: then more
	// digits than the shortest ones mean another number.
	exact bool
	// elementOID is the type of a Postgres array's elements, 0 where the
	// source is something else.
	elementOID uint32
	precision  int // of a DECIMAL
	scale      int
	element    *plan // of an ARRAY or the value of a MAP
	key        *plan // of a MAP
	fields     []plan
}

// compile prepares a type. why is not "" where rows cannot carry it.
func compile(t *Type, depth int) (p plan, why string) {
	p = plan{typ: t, nullable: t.Nullable}
	if depth > maxTypeDepth {
		return p, "its type is nested too deep"
	}
	integer := func(bits int, signed bool) {
		p.kind = planInt
		if signed {
			p.maxPos, p.maxNeg = 1<<(bits-1)-1, 1<<(bits-1)
			return
		}
		p.maxPos = math.MaxUint64 >> (64 - bits)
	}
	switch t.Name {
	case Boolean:
		p.kind = planBool
	case TinyInt:
		integer(8, true)
	case SmallInt:
		integer(16, true)
	case Integer:
		integer(32, true)
	case BigInt:
		integer(64, true)
	case UTinyInt:
		integer(8, false)
	case USmallInt:
		integer(16, false)
	case UInteger:
		integer(32, false)
	case UBigInt:
		integer(64, false)
	case Real:
		p.kind, p.bits = planFloat, 32
	case Double:
		p.kind, p.bits = planFloat, 64
	case Decimal:
		if !t.Known {
			return p, "the schema does not say its precision and scale, without which digits could be lost in silence"
		}
		p.kind, p.precision, p.scale = planDecimal, t.Precision, t.Scale
	case Char, Varchar:
		p.kind = planText
	case Binary, Varbinary:
		p.kind = planBytes
	case Date:
		p.kind = planDate
	case Time:
		p.kind = planTime
	case Timestamp:
		p.kind = planTimestamp
	case TimestampTZ:
		p.kind = planTimestampTZ
	case UUID:
		p.kind = planUUID
	case Variant:
		p.kind = planVariant
	case ArrayOf:
		p.kind = planArray
		p.element, why = compilePart(t.Element, depth)
	case MapOf:
		p.kind = planMap
		if p.key, why = compilePart(t.MapKey, depth); why != "" {
			return p, why
		}
		if p.key.kind >= planVariant || p.key.kind == planBytes {
			return p, "the keys of its MAP have type " + t.MapKey.String() + ", which has no form as a JSON name"
		}
		p.element, why = compilePart(t.Element, depth)
	case Struct:
		p.kind = planStruct
		for i := range t.Fields {
			f, why := compile(&t.Fields[i].Type, depth+1)
			if why != "" {
				return p, "field " + t.Fields[i].Name + ": " + why
			}
			f.name = t.Fields[i].Name
			p.fields = append(p.fields, f)
		}
	default:
		return p, "its type " + t.String() + " has no form in input rows"
	}
	return p, why
}

func compilePart(t *Type, depth int) (*plan, string) {
	if t == nil {
		return nil, "its type is incomplete"
	}
	p, why := compile(t, depth+1)
	return &p, why
}

// append writes v as JSON. On a problem the bytes behind dst's old end are
// void.
func (p *plan) append(dst []byte, v *decode.Value, pol *Policy, a *Array) ([]byte, *problem) {
	if v.State != decode.Set {
		return p.appendNull(dst, v.State)
	}
	b := v.Bytes
	switch p.kind {
	case planBool:
		if v.Kind != decode.Bool {
			return dst, p.wrongKind(v)
		}
		return append(dst, b...), p.checkBool(b)
	case planInt:
		if v.Kind != decode.Number {
			return dst, p.wrongKind(v)
		}
		return p.appendInt(dst, b)
	case planFloat:
		if v.Kind != decode.Number {
			return dst, p.wrongKind(v)
		}
		return p.appendFloat(dst, b, pol, a)
	case planDecimal:
		if v.Kind != decode.Number && v.Kind != decode.Text {
			return dst, p.wrongKind(v)
		}
		return p.appendDecimal(dst, b, pol, a)
	case planText:
		return p.appendText(dst, v)
	case planBytes:
		return p.appendBytes(dst, v)
	case planDate, planTime, planTimestamp, planTimestampTZ:
		if v.Kind != decode.Text {
			return dst, p.wrongKind(v)
		}
		return p.appendTemporal(dst, b, pol, a)
	case planUUID:
		return p.appendUUID(dst, v)
	case planVariant:
		return p.appendVariant(dst, v, pol, a)
	case planArray, planMap, planStruct:
		if v.Kind == decode.Text && p.kind == planArray {
			return p.appendPgArray(dst, v, pol, a)
		}
		if v.Kind != decode.JSON {
			return dst, p.wrongKind(v)
		}
		return p.appendNested(dst, b, pol, a)
	}
	return dst, p.wrongKind(v)
}

func (p *plan) appendNull(dst []byte, s decode.State) ([]byte, *problem) {
	if p.nullable {
		return append(dst, "null"...), nil
	}
	why := "it is NULL"
	if s == decode.Absent {
		why = "the source gave no value"
	}
	return dst, &problem{
		reason: decode.ReasonValue, why: why, expected: "a value, since the column is NOT NULL",
		do: "declare the column nullable in the Feldera table; " + laterChange,
	}
}

// special applies a policy to a value that the type cannot express.
func (p *plan) special(dst []byte, b []byte, pol Special, how Alteration, a *Array) ([]byte, *problem) {
	if pol == NullSpecial && p.nullable {
		a.altered = append(a.altered, alteration{p.name, how})
		return append(dst, "null"...), nil
	}
	pr := cannot("the value "+shown(b)+" has no form in type "+p.typ.String(), p.expectation())
	pr.lenient = true
	pr.do = "set …_UNREPRESENTABLE=null, or change the Feldera column; " + laterChange
	if pol == NullSpecial {
		pr.do = "declare the column nullable in the Feldera table: without that …_UNREPRESENTABLE=null cannot apply; " + laterChange
	}
	return dst, pr
}

// expectation says what the type takes.
func (p *plan) expectation() string {
	switch p.kind {
	case planFloat:
		return "a finite number"
	case planDecimal:
		return "a finite number with at most " + strconv.Itoa(p.precision-p.scale) + " digits before the point and " + strconv.Itoa(p.scale) + " behind it"
	case planDate:
		return "a date as YYYY-MM-DD, in the years 0001 to 9999"
	case planTime:
		return "a time as HH:MM:SS[.fraction], below 24:00:00"
	case planTimestamp:
		return "a timestamp as YYYY-MM-DD HH:MM:SS[.ffffff][offset], in the years 0001 to 9999"
	case planTimestampTZ:
		return "a timestamp with its offset, in the years 0001 to 9999"
	case planInt:
		if p.maxNeg == 0 {
			return fmt.Sprintf("an integer from 0 to %d", p.maxPos)
		}
		return fmt.Sprintf("an integer from -%d to %d", p.maxNeg, p.maxPos)
	default:
		return "a value of type " + p.typ.String()
	}
}

// shown writes a value for a message, bounded.
func shown(b []byte) string { return strconv.Quote(clip(string(b[:min(len(b), 80)]), 80)) }

var kindNames = [...]string{decode.Text: "text", decode.Bool: "a boolean", decode.Number: "a number", decode.Hex: "binary data", decode.JSON: "JSON"}

func (p *plan) wrongKind(v *decode.Value) *problem {
	kind := "of an unknown kind"
	if int(v.Kind) < len(kindNames) {
		kind = kindNames[v.Kind]
	}
	pr := cannot("the value "+shown(v.Bytes)+" is "+kind+", the column's type is "+p.typ.String(), p.expectation())
	pr.do = "change the column's type in the Feldera table; " + laterChange
	return pr
}

func (p *plan) malformed(b []byte) *problem {
	return cannot("the value "+shown(b)+" is not of the form of its type "+p.typ.String(), p.expectation())
}

func (p *plan) checkBool(b []byte) *problem {
	if string(b) == "true" || string(b) == "false" {
		return nil
	}
	return p.malformed(b)
}

func (p *plan) outOfRange(b []byte) *problem {
	return cannot("the value "+shown(b)+" is out of the range of "+p.typ.String(), p.expectation())
}

// nonFinite is true for the three numbers that JSON cannot write.
func nonFinite(b []byte) bool {
	switch string(b) {
	case "NaN", "Infinity", "-Infinity":
		return true
	}
	return false
}

// jsonNumber checks JSON's grammar of a number.
func jsonNumber(b []byte) bool {
	i := 0
	if i < len(b) && b[i] == '-' {
		i++
	}
	digits := func() bool {
		start := i
		for i < len(b) && b[i]-'0' <= 9 {
			i++
		}
		return i > start
	}
	lead := i
	if !digits() || (b[lead] == '0' && i-lead > 1) {
		return false
	}
	if i < len(b) && b[i] == '.' {
		i++
		if !digits() {
			return false
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		if !digits() {
			return false
		}
	}
	return i == len(b)
}

// maxExponent bounds the exponent of a number that becomes a DECIMAL: beyond
// it every non-zero value is out of range anyway.
const maxExponent = 4 * maxDecimalDigits

// appendDecimal writes a DECIMAL as a string, digit by digit. The engine would
// cut surplus fractional digits in silence: here that is a policy.
func (p *plan) appendDecimal(dst, b []byte, pol *Policy, a *Array) ([]byte, *problem) {
	if nonFinite(b) {
		return p.special(dst, b, pol.NonFinite, AlteredNonFinite, a)
	}
	// The number is b[intAt:intEnd] '.' b[fracAt:fracEnd].
	i, neg := 0, false
	if len(b) > 0 && b[0] == '-' {
		i, neg = 1, true
	}
	intAt := i
	for i < len(b) && b[i]-'0' <= 9 {
		i++
	}
	whole, frac := b[intAt:i], b[i:i]
	if len(whole) == 0 || (whole[0] == '0' && len(whole) > 1) {
		return dst, p.malformed(b)
	}
	if i < len(b) && b[i] == '.' {
		i++
		at := i
		for i < len(b) && b[i]-'0' <= 9 {
			i++
		}
		if frac = b[at:i]; len(frac) == 0 {
			return dst, p.malformed(b)
		}
	}
	if i < len(b) {
		if !jsonNumber(b) {
			return dst, p.malformed(b)
		}
		if allZero(whole) && allZero(frac) {
			return append(dst, `"0"`...), nil
		}
		exp, err := strconv.Atoi(string(b[i+1:]))
		if err != nil || exp > maxExponent || exp < -maxExponent {
			return dst, p.outOfRange(b)
		}
		whole, frac = shift(whole, frac, exp)
	}
	for len(whole) > 1 && whole[0] == '0' {
		whole = whole[1:]
	}
	if (len(whole) != 1 || whole[0] != '0') && len(whole) > p.precision-p.scale {
		return dst, p.outOfRange(b)
	}
	if len(frac) > p.scale {
		kept := frac[:p.scale]
		if !allZero(frac[p.scale:]) {
			if pol.Fraction != TruncateExcess {
				return dst, &problem{
					reason: decode.ReasonValue, lenient: true,
					why: "the value " + shown(b) + " has more digits behind the point than " + p.typ.String() + " keeps", expected: p.expectation(),
					do: "set …_DECIMAL_EXCESS=truncate, or widen the Feldera column; " + laterChange,
				}
			}
			a.altered = append(a.altered, alteration{p.name, AlteredTruncated})
		}
		frac = kept
	}
	dst = append(dst, '"')
	if neg && (!allZero(whole) || !allZero(frac)) {
		dst = append(dst, '-')
	}
	dst = append(dst, whole...)
	if len(frac) > 0 {
		dst = append(append(dst, '.'), frac...)
	}
	return append(dst, '"'), nil
}

// shift moves the point by exp places to the right. Numbers with an exponent
// are rare in this form, so it may allocate; exp is bounded by the caller.
func shift(whole, frac []byte, exp int) (w, f []byte) {
	digits := append(append(make([]byte, 0, len(whole)+len(frac)), whole...), frac...)
	point := len(whole) + exp
	switch {
	case point <= 0:
		return []byte("0"), append(bytes.Repeat([]byte("0"), -point), digits...)
	case point >= len(digits):
		return append(digits, bytes.Repeat([]byte("0"), point-len(digits))...), nil
	}
	return digits[:point], digits[point:]
}

func allZero(b []byte) bool {
	for _, c := range b {
		if c != '0' {
			return false
		}
	}
	return true
}

// appendText writes CHAR and VARCHAR. Numbers, booleans and JSON arrive as
// their text; binary data has no text.
func (p *plan) appendText(dst []byte, v *decode.Value) ([]byte, *problem) {
	switch v.Kind {
	case decode.Text, decode.Number, decode.Bool, decode.JSON:
		if out := appendString(dst, v.Bytes); out != nil {
			return out, nil
		}
		pr := cannot("the value "+shown(v.Bytes)+" is not valid UTF-8", "text in UTF-8")
		pr.do = "make the Feldera column VARBINARY and send binary data; " + laterChange
		return dst, pr
	case decode.Hex:
	}
	return dst, p.wrongKind(v)
}

// plainByte marks the bytes that stand for themselves in a JSON string and are
// ASCII.
var plainByte = func() (t [256]bool) {
	for c := ' '; c < 0x80; c++ {
		t[c] = c != '"' && c != '\\'
	}
	return t
}()

const hexDigits = "0123456789abcdef"

// appendString writes b as a JSON string. It gives nil where b is not valid
// UTF-8: nothing is replaced.
func appendString(dst, b []byte) []byte {
	dst = append(dst, '"')
	start := 0
	for i := 0; i < len(b); {
		c := b[i]
		if plainByte[c] {
			i++
			continue
		}
		if c >= utf8.RuneSelf {
			r, n := utf8.DecodeRune(b[i:])
			if r == utf8.RuneError && n == 1 {
				return nil
			}
			i += n
			continue
		}
		dst = append(dst, b[start:i]...)
		switch c {
		case '"', '\\':
			dst = append(dst, '\\', c)
		case '\n':
			dst = append(dst, '\\', 'n')
		case '\r':
			dst = append(dst, '\\', 'r')
		case '\t':
			dst = append(dst, '\\', 't')
		default:
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		}
		i++
		start = i
	}
	dst = append(dst, b[start:]...)
	return append(dst, '"')
}

// appendBytes writes binary data as the array of its bytes, the one form that
// the default flavor takes.
func (p *plan) appendBytes(dst []byte, v *decode.Value) ([]byte, *problem) {
	b := v.Bytes
	switch v.Kind {
	case decode.JSON:
		return p.appendByteArray(dst, b)
	case decode.Hex:
	case decode.Text, decode.Bool, decode.Number:
		return dst, p.wrongKind(v)
	default:
		return dst, p.wrongKind(v)
	}
	if len(b)%2 != 0 {
		return dst, cannot("its hexadecimal digits are odd in number", "two digits a byte")
	}
	dst = append(dst, '[')
	for i := 0; i < len(b); i += 2 {
		hi, lo := unhex[b[i]], unhex[b[i+1]]
		if hi > 15 || lo > 15 {
			return dst, cannot("its binary data "+shown(b)+" is not hexadecimal", "hexadecimal digits")
		}
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(hi<<4|lo), 10)
	}
	return append(dst, ']'), nil
}

// unhex gives a hexadecimal digit's value, 255 for other bytes.
var unhex = func() (t [256]byte) {
	for i := range t {
		t[i] = 255
	}
	for i := range byte(10) {
		t['0'+i] = i
	}
	for i := range byte(6) {
		t['a'+i], t['A'+i] = 10+i, 10+i
	}
	return t
}()

// appendUUID takes the forms with and without hyphens, and gives the one with.
func (p *plan) appendUUID(dst []byte, v *decode.Value) ([]byte, *problem) {
	b := v.Bytes
	if v.Kind != decode.Text && v.Kind != decode.Hex {
		return dst, p.wrongKind(v)
	}
	if len(b) != 36 && len(b) != 32 {
		return dst, p.malformed(b)
	}
	dst = append(dst, '"')
	n := 0
	for i, c := range b {
		if len(b) == 36 && (i == 8 || i == 13 || i == 18 || i == 23) {
			if c != '-' {
				return dst, p.malformed(b)
			}
			continue
		}
		d := unhex[c]
		if d > 15 {
			return dst, p.malformed(b)
		}
		if n == 8 || n == 12 || n == 16 || n == 20 {
			dst = append(dst, '-')
		}
		dst = append(dst, hexDigits[d])
		n++
	}
	return append(dst, '"'), nil
}
