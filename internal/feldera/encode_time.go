package feldera

import (
	"bytes"
	"time"

	"holdfast/internal/decode"
)

// moment is a date, a time of day and an offset, as far as a text gave them.
type moment struct {
	year, month, day       int
	hour, minute, second   int
	fraction               []byte // digits, without the point
	hasDate, hasTime, zone bool
	offset                 int // seconds east of UTC
	midnight24             bool
}

// verdict is what the reading of a temporal text found.
type verdict uint8

const (
	readable   verdict = iota
	misshapen          // not of the form
	outOfYears         // of the form, and beyond what the engine holds
)

// appendTemporal writes DATE, TIME, TIMESTAMP and TIMESTAMP_TZ. What comes in
// is Postgres' ISO text or ISO 8601; what goes out is one form a type.
func (p *plan) appendTemporal(dst, b []byte, pol *Policy, a *Array) ([]byte, *problem) {
	var m moment
	switch p.read(b, &m) {
	case misshapen:
		return dst, p.malformed(b)
	case outOfYears:
		return p.special(dst, b, pol.OutOfRange, AlteredOutOfRange, a)
	case readable:
	}
	keep := 6
	if p.kind == planTime {
		keep = 9
	}
	for n := len(m.fraction); n > 0 && m.fraction[n-1] == '0'; n-- {
		m.fraction = m.fraction[:n-1]
	}
	if len(m.fraction) > keep {
		if pol.Fraction != TruncateExcess {
			return dst, &problem{
				reason: decode.ReasonValue, lenient: true, why: "the value " + shown(b) + " is finer than " + p.typ.String() + " keeps", expected: p.expectation(),
				do: "set …_DECIMAL_EXCESS=truncate, or change the Feldera column; " + laterChange,
			}
		}
		a.altered = append(a.altered, alteration{p.name, AlteredTruncated})
		m.fraction = m.fraction[:keep]
	}
	if m.zone && m.offset != 0 {
		t := time.Date(m.year, time.Month(m.month), m.day, m.hour, m.minute, m.second-m.offset, 0, time.UTC)
		if t.Year() < 1 || t.Year() > 9999 {
			return p.special(dst, b, pol.OutOfRange, AlteredOutOfRange, a)
		}
		m.year, m.month, m.day = t.Year(), int(t.Month()), t.Day()
		m.hour, m.minute, m.second = t.Hour(), t.Minute(), t.Second()
	}
	dst = append(dst, '"')
	if p.kind != planTime {
		dst = append(dst, byte('0'+m.year/1000), byte('0'+m.year/100%10)) //nolint:gosec // four digits
		dst = append(two(dst, m.year%100), '-')
		dst = append(two(dst, m.month), '-')
		dst = two(dst, m.day)
	}
	switch p.kind {
	case planTimestamp:
		dst = append(dst, ' ')
	case planTimestampTZ:
		dst = append(dst, 'T')
	default: // a date or a time alone: nothing to part
	}
	if p.kind != planDate {
		dst = append(two(dst, m.hour), ':')
		dst = append(two(dst, m.minute), ':')
		dst = two(dst, m.second)
		if len(m.fraction) > 0 {
			dst = append(append(dst, '.'), m.fraction...)
		}
	}
	if p.kind == planTimestampTZ {
		dst = append(dst, 'Z')
	}
	return append(dst, '"'), nil
}

func two(dst []byte, n int) []byte {
	return append(dst, byte('0'+n/10), byte('0'+n%10)) //nolint:gosec // two digits
}

// read takes b apart as the plan's type asks.
func (p *plan) read(b []byte, m *moment) verdict {
	beyond := false
	if p.kind != planTime {
		if string(b) == "infinity" || string(b) == "-infinity" {
			return outOfYears
		}
		var v verdict
		if b, v = readDate(b, m); v == misshapen {
			return v
		}
		// A year that is out of range does not excuse what stands behind it.
		beyond = v == outOfYears
		if len(b) == 0 {
			// A date alone is its midnight; with a zone asked for it is open.
			return readableIf(p.kind != planTimestampTZ, beyond)
		}
		if p.kind == planDate || b[0] != ' ' && b[0] != 'T' && b[0] != 't' {
			return misshapen
		}
		b = b[1:]
	}
	b, ok := readTime(b, m)
	if !ok {
		return misshapen
	}
	if p.kind != planTime && len(b) > 0 {
		if b, ok = readZone(b, m); !ok {
			return misshapen
		}
	}
	switch {
	case len(b) != 0, p.kind == planTimestampTZ && !m.zone:
		return misshapen
	}
	return readableIf(true, beyond || m.midnight24)
}

func readableIf(ok, beyond bool) verdict {
	switch {
	case !ok:
		return misshapen
	case beyond:
		return outOfYears
	}
	return readable
}

// digits reads exactly n digits.
func digits(b []byte, n int) (value int, rest []byte, ok bool) {
	if len(b) < n {
		return 0, b, false
	}
	for _, c := range b[:n] {
		if c-'0' > 9 {
			return 0, b, false
		}
		value = value*10 + int(c-'0')
	}
	return value, b[n:], true
}

// readDate reads YYYY-MM-DD and recognises what lies outside of four-digit
// years: more digits, a sign, a year 0, " BC" at the end.
func readDate(b []byte, m *moment) ([]byte, verdict) {
	beyond, bc, minus := false, false, false
	if bytes.HasSuffix(b, []byte(" BC")) {
		b, beyond, bc = b[:len(b)-3], true, true
	}
	if len(b) > 0 && (b[0] == '-' || b[0] == '+') {
		minus, b, beyond = b[0] == '-', b[1:], true
	}
	n := 0
	for n < len(b) && n < 10 && b[n]-'0' <= 9 {
		n++
	}
	if n < 4 {
		return b, misshapen
	}
	var ok bool
	if m.year, b, ok = digits(b, n); !ok {
		return b, misshapen
	}
	beyond = beyond || n > 4 || m.year == 0
	switch { // to the year by which leap years are counted
	case bc:
		m.year = 1 - m.year
	case minus:
		m.year = -m.year
	}
	if len(b) == 0 || b[0] != '-' {
		return b, misshapen
	}
	if m.month, b, ok = digits(b[1:], 2); !ok || m.month < 1 || m.month > 12 || len(b) == 0 || b[0] != '-' {
		return b, misshapen
	}
	if m.day, b, ok = digits(b[1:], 2); !ok || m.day < 1 || m.day > daysIn(m.year, m.month) {
		return b, misshapen
	}
	m.hasDate = true
	if beyond {
		return b, outOfYears
	}
	return b, readable
}

func daysIn(year, month int) int {
	switch month {
	case 4, 6, 9, 11:
		return 30
	case 2:
		// The year 0 is 1 BC, and a leap year as well.
		if year%4 == 0 && (year%100 != 0 || year%400 == 0) {
			return 29
		}
		return 28
	}
	return 31
}

// readTime reads HH:MM:SS[.fraction], or HH:MM.
func readTime(b []byte, m *moment) ([]byte, bool) {
	var ok bool
	if m.hour, b, ok = digits(b, 2); !ok || len(b) == 0 || b[0] != ':' {
		return b, false
	}
	if m.minute, b, ok = digits(b[1:], 2); !ok {
		return b, false
	}
	if len(b) > 0 && b[0] == ':' {
		if m.second, b, ok = digits(b[1:], 2); !ok {
			return b, false
		}
		if len(b) > 0 && b[0] == '.' {
			n := 1
			for n < len(b) && b[n]-'0' <= 9 {
				n++
			}
			if n == 1 {
				return b, false
			}
			m.fraction, b = b[1:n], b[n:]
		}
	}
	m.hasTime = true
	if m.hour == 24 && m.minute == 0 && m.second == 0 && allZero(m.fraction) {
		m.midnight24 = true
		return b, true
	}
	return b, m.hour < 24 && m.minute < 60 && m.second < 60
}

// readZone reads Z, +HH, +HH:MM, +HHMM or +HH:MM:SS, which Postgres writes for
// historic zones.
func readZone(b []byte, m *moment) ([]byte, bool) {
	m.zone = true
	switch b[0] {
	case 'Z', 'z':
		return b[1:], true
	case '+', '-':
	default:
		return b, false
	}
	sign := 1
	if b[0] == '-' {
		sign = -1
	}
	hours, b, ok := digits(b[1:], 2)
	if !ok || hours > 23 {
		return b, false
	}
	m.offset = hours * 3600
	unit := 60
	for len(b) > 0 && unit > 0 {
		if b[0] == ':' {
			b = b[1:]
		} else if unit == 1 {
			return b, false
		}
		var part int
		if part, b, ok = digits(b, 2); !ok || part > 59 {
			return b, false
		}
		m.offset += part * unit
		unit /= 60
	}
	m.offset *= sign
	return b, true
}
