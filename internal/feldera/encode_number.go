package feldera

import (
	"bytes"
	"strconv"

	"holdfast/internal/decode"
)

// number is the shape of a number in JSON's grammar: its digits between the
// first and the last that is not 0, and where the point stands. Two texts are
// the same number when sign, digits and place are.
type number struct {
	// text holds the digits, with or without a point between them.
	text []byte
	neg  bool
	// count is the number of digits, 0 for zero.
	count int
	// top is the place of the first digit: 0 for the units, 1 for the tens, -1
	// for the tenths.
	top int
}

// maxPlace bounds the place of a digit. Nothing that a column holds comes near
// it, so what is beyond compares as beyond.
const maxPlace = 1 << 20

// shape takes a number apart. b must be in JSON's grammar.
func shape(b []byte) (n number) {
	if len(b) > 0 && b[0] == '-' {
		n.neg, b = true, b[1:]
	}
	exp := 0
	if e := bytes.IndexAny(b, "eE"); e >= 0 {
		var digits []byte
		digits, b = b[e+1:], b[:e]
		minus := digits[0] == '-'
		for _, c := range bytes.TrimLeft(digits, "+-") {
			exp = min(exp*10+int(c-'0'), maxPlace)
		}
		if minus {
			exp = -exp
		}
	}
	point := bytes.IndexByte(b, '.')
	if point < 0 {
		point = len(b)
	}
	first, last := -1, -1
	for i, c := range b {
		if c == '.' || c == '0' {
			continue
		}
		if first < 0 {
			first = i
		}
		last = i
	}
	if first < 0 {
		return number{neg: n.neg}
	}
	n.text, n.count = b[first:last+1], last+1-first
	n.top = point - 1 - first
	if first > point {
		n.top++ // the point itself is no place
	}
	if first < point && last > point {
		n.count--
	}
	n.top += exp
	return n
}

// same tells whether two numbers are one. Zero has no sign here.
func (n number) same(o number) bool {
	if n.count != o.count || n.count > 0 && (n.top != o.top || n.neg != o.neg) {
		return false
	}
	for i, j := 0, 0; i < len(n.text); i, j = i+1, j+1 {
		if n.text[i] == '.' {
			i++
		}
		if o.text[j] == '.' {
			j++
		}
		if n.text[i] != o.text[j] {
			return false
		}
	}
	return true
}

// last is the place of the last digit.
func (n number) last() int { return n.top - n.count + 1 }

// maxIntDigits is how many digits the largest integer has.
const maxIntDigits = 20

// appendWhole writes a number that has no fraction and at most 20 digits as a
// plain integer; false where it has or is longer.
func (n number) appendWhole(dst []byte) ([]byte, bool) {
	if n.count == 0 {
		return append(dst, '0'), true
	}
	if n.last() < 0 || n.top >= maxIntDigits {
		return dst, false
	}
	if n.neg {
		dst = append(dst, '-')
	}
	for _, c := range n.text {
		if c != '.' {
			dst = append(dst, c)
		}
	}
	for range n.last() {
		dst = append(dst, '0')
	}
	return dst, true
}

// appendInt writes an integer as a bare number: the engine refuses strings,
// and takes all 64 bits of numbers. Other ways to write an integer (10.00,
// 1e3) are written plainly; a fraction is refused.
func (p *plan) appendInt(dst, b []byte) ([]byte, *problem) {
	i, neg := 0, false
	if len(b) > 0 && b[0] == '-' {
		i, neg = 1, true
	}
	start := i
	var mag uint64
	over := false
	for ; i < len(b) && b[i]-'0' <= 9; i++ {
		d := uint64(b[i] - '0')
		over = over || mag > (1<<64-1-d)/10
		mag = mag*10 + d
	}
	if i < len(b) {
		if !jsonNumber(b) {
			return dst, p.malformed(b)
		}
		var plain [24]byte
		n := shape(b)
		whole, ok := n.appendWhole(plain[:0])
		switch {
		case ok:
			return p.appendInt(dst, whole)
		case n.last() < 0:
			return dst, p.malformed(b)
		}
		return dst, p.outOfRange(b)
	}
	if i == start || (b[start] == '0' && i-start > 1) {
		return dst, p.malformed(b)
	}
	limit := p.maxPos
	if neg {
		limit = p.maxNeg
	}
	if over || mag > limit && mag != 0 {
		return dst, p.outOfRange(b)
	}
	if mag == 0 {
		return append(dst, '0'), nil
	}
	return append(dst, b...), nil
}

// exactDigits is how many digits a float has at most when it is written out
// exactly.
const exactDigits = 767

// appendFloat writes REAL and DOUBLE. The engine rounds to the nearest float
// in silence. Here a number passes only when the column gives it back: when it
// is what a reader of the column sees (the shortest text of the float), or the
// float's exact value. Where the source may have been a float itself, and may
// have written it with more digits than are needed, those digits pass as well.
// Anything else lost something, and goes by the policy for excess digits.
func (p *plan) appendFloat(dst, b []byte, pol *Policy, a *Array) ([]byte, *problem) {
	if nonFinite(b) {
		return p.special(dst, b, pol.NonFinite, AlteredNonFinite, a)
	}
	if !jsonNumber(b) {
		return dst, p.malformed(b)
	}
	// Decimals of so few digits, and so near to 1, always come back.
	sure, reproducible := 15, 17
	if p.bits == 32 {
		sure, reproducible = 6, 9
	}
	if len(b) <= sure && bytes.IndexByte(b, 'e') < 0 && bytes.IndexByte(b, 'E') < 0 {
		return append(dst, b...), nil
	}
	f, err := strconv.ParseFloat(string(b), p.bits)
	if err != nil {
		return dst, p.outOfRange(b)
	}
	n := shape(b)
	if f == 0 {
		if n.count > 0 {
			return dst, p.outOfRange(b) // it is too near to zero
		}
		return append(dst, b...), nil
	}
	var buf [32]byte
	if n.same(shape(strconv.AppendFloat(buf[:0], f, 'e', -1, p.bits))) {
		return append(dst, b...), nil
	}
	if !p.exact && n.count <= reproducible && n.same(shape(strconv.AppendFloat(buf[:0], f, 'e', n.count-1, p.bits))) {
		return append(dst, b...), nil
	}
	if n.count <= exactDigits && n.same(shape(strconv.AppendFloat(nil, f, 'e', exactDigits-1, 64))) {
		return append(dst, b...), nil
	}
	if pol.Fraction == TruncateExcess {
		a.altered = append(a.altered, alteration{p.name, AlteredRounded})
		return append(dst, b...), nil
	}
	return dst, &problem{
		reason: decode.ReasonValue, lenient: true,
		why: "the value " + shown(b) + " has more digits than " + p.typ.String() + " keeps", expected: "a number that the column gives back as it was",
		do: "set …_DECIMAL_EXCESS=truncate to have it rounded, or make the Feldera column a DECIMAL or an integer; " + laterChange,
	}
}

const (
	// variantDigits is how many digits a number inside a VARIANT keeps, and
	// how many places before the point it can have; variantPlace is the last
	// place behind the point. The engine keeps such numbers as decimals,
	// whatever their form: it rounds what has more digits and takes what is
	// smaller for 0, both in silence (crates/fxp/src/dynamic.rs).
	variantDigits = 38
	variantPlace  = -255
)

// fitsVariant tells whether a number inside a VARIANT stays what it is. b must
// be in JSON's grammar.
func fitsVariant(b []byte) bool {
	if len(b) <= variantDigits && bytes.IndexByte(b, 'e') < 0 && bytes.IndexByte(b, 'E') < 0 {
		return true
	}
	n := shape(b)
	return n.count <= variantDigits && n.top < variantDigits && (n.count == 0 || n.last() >= variantPlace)
}

// variantNumber checks a number for a VARIANT.
func (p *plan) variantNumber(b []byte) *problem {
	if fitsVariant(b) {
		return nil
	}
	pr := cannot("the number "+shown(b)+" has no exact form in type "+p.typ.String(),
		"a number with at most "+strconv.Itoa(variantDigits)+" digits, none of them beyond "+strconv.Itoa(-variantPlace)+" places behind the point")
	pr.do = "declare the column VARCHAR in the Feldera table; " + laterChange
	return pr
}

// numbersFit gives the first number inside valid JSON that a VARIANT would
// change, nil for none.
func numbersFit(b []byte) (bad []byte) {
	inString := false
	for i := 0; i < len(b); i++ {
		c := b[i]
		switch {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '-' || c-'0' <= 9:
			start := i
			for i < len(b) && numberByte[b[i]] {
				i++
			}
			if !fitsVariant(b[start:i]) {
				return b[start:i]
			}
			i--
		}
	}
	return nil
}

// numberByte marks the bytes of a JSON number.
var numberByte = func() (t [256]bool) {
	for _, c := range []byte("+-.0123456789eE") {
		t[c] = true
	}
	return t
}()
