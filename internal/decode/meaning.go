package decode

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
	"unicode/utf8"
)

// meaning is what a value stands for beyond its plain type: a logical type of
// Avro, a semantic type of Kafka Connect or Debezium.
type meaning uint8

const (
	plain meaning = iota
	meansDate
	meansTimeMillis
	meansTimeMicros
	meansTimeNanos
	// A local timestamp has no time zone, an instant does.
	meansLocalMillis
	meansLocalMicros
	meansLocalNanos
	meansInstantMillis
	meansInstantMicros
	meansInstantNanos
	meansDecimal         // bytes: a big-endian integer in two's complement, with the type's scale
	meansVariableDecimal // a record of scale and value
	meansBits            // bytes: a little-endian bit string of the type's length
	meansJSON            // text that is JSON
	meansISODate         // text: a date or a time with a Z behind it, which is UTC and says nothing
	meansUUID            // 16 bytes
	meansDuration        // 12 bytes: months, days and milliseconds, little-endian
)

// meanings are the names by which types are known: Avro's logical types and the
// schema names of Kafka Connect and Debezium. They also stand in
// KAFKASINK_FIELD_TYPES.
//
// Sources: the Avro 1.12 specification; org.apache.kafka.connect.data; the
// chapter on data type mappings of Debezium's connectors.
var meanings = map[string]meaning{
	"date":                   meansDate,
	"time-millis":            meansTimeMillis,
	"time-micros":            meansTimeMicros,
	"time-nanos":             meansTimeNanos,
	"timestamp-millis":       meansInstantMillis,
	"timestamp-micros":       meansInstantMicros,
	"timestamp-nanos":        meansInstantNanos,
	"local-timestamp-millis": meansLocalMillis,
	"local-timestamp-micros": meansLocalMicros,
	"local-timestamp-nanos":  meansLocalNanos,
	"decimal":                meansDecimal,
	"bits":                   meansBits,
	"json":                   meansJSON,
	"uuid":                   meansUUID,
	"duration":               meansDuration,

	"org.apache.kafka.connect.data.Date":      meansDate,
	"org.apache.kafka.connect.data.Time":      meansTimeMillis,
	"org.apache.kafka.connect.data.Timestamp": meansInstantMillis,
	"org.apache.kafka.connect.data.Decimal":   meansDecimal,

	"io.debezium.time.Date":                 meansDate,
	"io.debezium.time.Time":                 meansTimeMillis,
	"io.debezium.time.MicroTime":            meansTimeMicros,
	"io.debezium.time.NanoTime":             meansTimeNanos,
	"io.debezium.time.Timestamp":            meansLocalMillis,
	"io.debezium.time.MicroTimestamp":       meansLocalMicros,
	"io.debezium.time.NanoTimestamp":        meansLocalNanos,
	"io.debezium.time.IsoDate":              meansISODate,
	"io.debezium.time.IsoTime":              meansISODate,
	"io.debezium.data.Json":                 meansJSON,
	"io.debezium.data.Bits":                 meansBits,
	"io.debezium.data.VariableScaleDecimal": meansVariableDecimal,
}

// shape is the plain type below a meaning.
type shape uint8

const (
	shapeAny shape = iota
	shapeInt
	shapeFloat
	shapeText
	shapeBytes
	shapeArray
	shapeMap
	shapeRecord
)

// fits tells whether a meaning can be had by a shape. A name on another type
// means nothing: Avro says that an unfitting logical type is to be ignored.
func (m meaning) fits(s shape) bool {
	switch m {
	case plain:
		return true
	case meansDate, meansTimeMillis, meansTimeMicros, meansTimeNanos, meansLocalMillis, meansLocalMicros, meansLocalNanos,
		meansInstantMillis, meansInstantMicros, meansInstantNanos:
		return s == shapeInt
	case meansDecimal, meansBits, meansDuration, meansUUID:
		return s == shapeBytes
	case meansVariableDecimal:
		return s == shapeRecord
	case meansJSON, meansISODate:
		return s == shapeText
	}
	return false
}

// writeInt writes an integer that stands for a date, a time or a timestamp.
// The result is text in ISO 8601's form; years outside of 0000 to 9999 have
// more digits or a sign.
func (m meaning) writeInt(w *writer, n int64) {
	w.grow(48, func(dst []byte) []byte {
		switch m {
		case meansDate:
			return appendDate(dst, n)
		case meansTimeMillis:
			return appendClock(dst, n, 3)
		case meansTimeMicros:
			return appendClock(dst, n, 6)
		case meansTimeNanos:
			return appendClock(dst, n, 9)
		case meansLocalMillis, meansInstantMillis:
			dst = appendTimestamp(dst, n, 3)
		case meansLocalMicros, meansInstantMicros:
			dst = appendTimestamp(dst, n, 6)
		case meansLocalNanos, meansInstantNanos:
			dst = appendTimestamp(dst, n, 9)
		default:
			return strconv.AppendInt(dst, n, 10)
		}
		if m == meansInstantMillis || m == meansInstantMicros || m == meansInstantNanos {
			dst = append(dst, 'Z')
		}
		return dst
	})
}

// maxHours is beyond the times that any source has: MySQL's go to 838:59:59 on
// either side.
const maxHours = 839

// check refuses numbers that stand for nothing.
func (m meaning) check(n int64) error {
	var digits int
	switch m {
	case meansDate:
		if n > math.MaxInt32 || n < math.MinInt32 {
			return fmt.Errorf("the date %d days from the epoch is out of range", n)
		}
		return nil
	case meansTimeMillis:
		digits = 3
	case meansTimeMicros:
		digits = 6
	case meansTimeNanos:
		digits = 9
	default:
		return nil
	}
	if limit := maxHours * 3600 * pow10[digits]; n > limit || n < -limit {
		return fmt.Errorf("the number %d is no time", n)
	}
	return nil
}

// temporal is true for what writeInt gives as text.
func (m meaning) temporal() bool { return m >= meansDate && m <= meansInstantNanos }

const (
	daysPerEra  = 146_097 // 400 years
	daysToEpoch = 719_468 // from 0000-03-01
	secondsADay = 86_400
)

// appendDate writes the date that lies days after 1970-01-01, in the proleptic
// Gregorian calendar. It counts in years that begin with March, so that the
// leap day is the last.
func appendDate(dst []byte, days int64) []byte {
	days += daysToEpoch
	era, day := floorDiv(days, daysPerEra)
	yearOfEra := (day - day/1460 + day/36_524 - day/146_096) / 365
	dayOfYear := day - (365*yearOfEra + yearOfEra/4 - yearOfEra/100)
	month := (5*dayOfYear + 2) / 153
	dayOfMonth := dayOfYear - (153*month+2)/5 + 1
	year := yearOfEra + era*400
	if month += 3; month > 12 {
		month -= 12
		year++
	}
	if year < 0 {
		dst = append(dst, '-')
		year = -year
	}
	for limit := int64(1000); limit > year && limit > 1; limit /= 10 {
		dst = append(dst, '0')
	}
	dst = strconv.AppendInt(dst, year, 10)
	return appendTwo(append(appendTwo(append(dst, '-'), month), '-'), dayOfMonth)
}

func appendTwo(dst []byte, n int64) []byte {
	return append(dst, byte('0'+n/10), byte('0'+n%10)) //nolint:gosec // two digits
}

// appendClock writes a time of day from a count of 10^-digits seconds. What is
// no time of day, such as MySQL's -838:59:59, is written in the same form.
func appendClock(dst []byte, n int64, digits int) []byte {
	seconds, fraction := floorDiv(n, pow10[digits])
	if seconds < 0 {
		dst = append(dst, '-')
		// Of the same distance from zero: borrow a second for the fraction.
		if seconds = -seconds; fraction > 0 {
			seconds--
			fraction = pow10[digits] - fraction
		}
	}
	hours := seconds / 3600
	if hours < 10 {
		dst = append(dst, '0')
	}
	dst = strconv.AppendInt(dst, hours, 10)
	return appendMinutes(dst, seconds%3600, fraction, digits)
}

func appendMinutes(dst []byte, seconds, fraction int64, digits int) []byte {
	dst = appendTwo(append(dst, ':'), seconds/60)
	dst = appendTwo(append(dst, ':'), seconds%60)
	if fraction == 0 {
		return dst
	}
	dst = append(dst, '.')
	for limit := pow10[digits-1]; limit > fraction && limit > 1; limit /= 10 {
		dst = append(dst, '0')
	}
	return strconv.AppendInt(dst, fraction, 10)
}

// appendTimestamp writes a timestamp from a count of 10^-digits seconds since
// the epoch.
func appendTimestamp(dst []byte, n int64, digits int) []byte {
	seconds, fraction := floorDiv(n, pow10[digits])
	days, seconds := floorDiv(seconds, secondsADay)
	dst = append(appendDate(dst, days), 'T')
	return appendMinutes(appendTwo(dst, seconds/3600), seconds%3600, fraction, digits)
}

var pow10 = [...]int64{1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000}

// floorDiv rounds towards minus infinity, so that the rest is never negative.
func floorDiv(n, by int64) (quotient, rest int64) {
	quotient, rest = n/by, n%by
	if rest < 0 {
		quotient, rest = quotient-1, rest+by
	}
	return quotient, rest
}

const (
	// maxUnscaled bounds the bytes of a decimal: printing one takes more than
	// linear time. It is 2,466 digits; Feldera's DECIMAL holds 38.
	maxUnscaled = 1024
	// maxScale is the largest that Postgres' numeric has.
	maxScale = 16_383
)

// writeDecimal writes unscaled × 10^-scale with all its digits, trailing zeros
// included.
func writeDecimal(w *writer, unscaled []byte, scale int) error {
	switch {
	case len(unscaled) == 0:
		return errors.New("its decimal has no bytes")
	case len(unscaled) > maxUnscaled:
		return fmt.Errorf("its decimal has %d bytes, more than %d", len(unscaled), maxUnscaled)
	case scale > maxScale || scale < -maxScale:
		return fmt.Errorf("its decimal has the scale %d, beyond %d", scale, maxScale)
	}
	var room [24]byte
	digits := room[:0]
	negative := unscaled[0]&0x80 != 0
	if len(unscaled) <= 8 {
		n := int64(int8(unscaled[0])) //nolint:gosec // the sign is extended on purpose
		for _, c := range unscaled[1:] {
			n = n<<8 | int64(c)
		}
		digits = strconv.AppendInt(digits, n, 10)
	} else {
		n := new(big.Int).SetBytes(unscaled)
		if negative {
			n.Sub(n, new(big.Int).Lsh(big.NewInt(1), uint(8*len(unscaled))))
		}
		digits = n.Append(digits, 10)
	}
	if negative {
		digits = digits[1:]
		w.byte('-')
	}
	switch {
	case scale <= 0:
		w.bytes(digits)
		if digits[0] != '0' {
			w.zeros(-scale)
		}
	case len(digits) > scale:
		w.bytes(digits[:len(digits)-scale])
		w.byte('.')
		w.bytes(digits[len(digits)-scale:])
	default:
		w.string("0.")
		w.zeros(scale - len(digits))
		w.bytes(digits)
	}
	return nil
}

func (w *writer) zeros(n int) {
	const some = "0000000000000000000000000000000000000000"
	for ; n > 0; n -= len(some) {
		w.string(some[:min(n, len(some))])
	}
}

// writeBits writes a bit string as Postgres does, the first bit first. Debezium
// sends it little-endian, so the last bit of the string is the lowest of the
// first byte.
func writeBits(w *writer, b []byte, length int) error {
	if length < 1 || (length+7)/8 < len(b) {
		return fmt.Errorf("its bit string has %d bytes and a length of %d", len(b), length)
	}
	if length > 8*maxUnscaled {
		return fmt.Errorf("its bit string has a length of %d, more than %d", length, 8*maxUnscaled)
	}
	for i := length - 1; i >= 0; i-- {
		bit := byte('0')
		if i/8 < len(b) && b[i/8]>>(i%8)&1 != 0 {
			bit = '1'
		}
		w.byte(bit)
	}
	return nil
}

// writeUUID writes 16 bytes in the form with hyphens.
func writeUUID(w *writer, b []byte) {
	w.grow(36, func(dst []byte) []byte {
		for i, part := range [][]byte{b[:4], b[4:6], b[6:8], b[8:10], b[10:16]} {
			if i > 0 {
				dst = append(dst, '-')
			}
			dst = hex.AppendEncode(dst, part)
		}
		return dst
	})
}

// writeDuration writes Avro's duration in ISO 8601's form.
func writeDuration(w *writer, b []byte) {
	part := func(i int) int64 {
		return int64(b[i]) | int64(b[i+1])<<8 | int64(b[i+2])<<16 | int64(b[i+3])<<24
	}
	w.grow(64, func(dst []byte) []byte {
		dst = strconv.AppendInt(append(dst, 'P'), part(0), 10)
		dst = strconv.AppendInt(append(dst, 'M'), part(4), 10)
		dst = append(dst, 'D', 'T')
		dst = strconv.AppendInt(dst, part(8)/1000, 10)
		if ms := part(8) % 1000; ms != 0 {
			dst = append(dst, '.', byte('0'+ms/100), byte('0'+ms/10%10), byte('0'+ms%10))
		}
		return append(dst, 'S')
	})
}

// writeHex writes binary data as digits.
func writeHex(w *writer, b []byte) {
	w.grow(2*len(b), func(dst []byte) []byte { return hex.AppendEncode(dst, b) })
}

// nonFinite is true for the three texts that stand for floating-point numbers
// that JSON has no numbers for.
func nonFinite(text string) bool {
	return text == "NaN" || text == "Infinity" || text == "-Infinity"
}

// writeQuoted writes text as a JSON string.
func writeQuoted(w *writer, b []byte) error {
	if !utf8.Valid(b) {
		return errors.New("it has text that is not UTF-8")
	}
	w.byte('"')
	start := 0
	for i := 0; i < len(b); i++ {
		c := b[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		w.bytes(b[start:i])
		start = i + 1
		switch c {
		case '"', '\\':
			w.byte('\\')
			w.byte(c)
		default:
			const digits = "0123456789abcdef"
			w.string(`\u00`)
			w.byte(digits[c>>4])
			w.byte(digits[c&15])
		}
	}
	w.bytes(b[start:])
	w.byte('"')
	return nil
}

// parseFieldType reads the text of a type: a name of meanings, "bytes", or one
// of both with a number in parentheses: decimal(2), bits(8).
func parseFieldType(text string) (*connectType, error) {
	name, arg, has := strings.Cut(text, "(")
	n := 0
	if has {
		var err error
		if n, err = strconv.Atoi(strings.TrimSuffix(arg, ")")); err != nil || !strings.HasSuffix(arg, ")") || n < 0 {
			return nil, errors.New("it is not of the form name(number)")
		}
	}
	m, known := meanings[name]
	switch {
	case name == "bytes":
		return &connectType{shape: shapeBytes}, nil
	case !known:
		return nil, errors.New("it is the name of no type")
	case (m == meansDecimal || m == meansBits) && !has:
		return nil, errors.New("it needs its scale or length in parentheses: decimal(2), bits(8)")
	case m != meansDecimal && m != meansBits && has:
		return nil, errors.New("its type takes no number")
	}
	t := &connectType{means: m, scale: n, length: n}
	for _, s := range []shape{shapeInt, shapeBytes, shapeText, shapeRecord} {
		if m.fits(s) {
			t.shape = s
		}
	}
	return t, nil
}
