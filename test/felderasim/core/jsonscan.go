package core

import (
	"bytes"
	"fmt"
	"strconv"
	"unicode/utf8"
)

// maxDepth is the nesting that the engine's JSON reader allows.
const maxDepth = 127

// A JSON scanner over a byte slice. Nothing here allocates in proportion to
// what the input claims, and every index is checked against the slice.

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// scanString finds the end of the string that starts at b[i].
func scanString(b []byte, i int) (raw []byte, escaped bool, next int, ok bool) {
	if i >= len(b) || b[i] != '"' {
		return nil, false, i, false
	}
	i++
	start := i
	for i < len(b) {
		switch c := b[i]; {
		case c == '"':
			return b[start:i], escaped, i + 1, true
		case c == '\\':
			escaped = true
			i += 2
		case c < 0x20:
			return nil, false, i, false
		default:
			i++
		}
	}
	return nil, false, len(b), false
}

// scanNumber finds the end of the JSON number that starts at b[i].
func scanNumber(b []byte, i int) (next int, float, ok bool) {
	if i < len(b) && b[i] == '-' {
		i++
	}
	if i >= len(b) || b[i] < '0' || b[i] > '9' {
		return i, false, false
	}
	if b[i] == '0' {
		i++
		if i < len(b) && b[i] >= '0' && b[i] <= '9' {
			return i, false, false
		}
	} else {
		for i < len(b) && b[i] >= '0' && b[i] <= '9' {
			i++
		}
	}
	if i < len(b) && b[i] == '.' {
		float = true
		i++
		n := i
		for i < len(b) && b[i] >= '0' && b[i] <= '9' {
			i++
		}
		if n == i {
			return i, true, false
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		float = true
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		n := i
		for i < len(b) && b[i] >= '0' && b[i] <= '9' {
			i++
		}
		if n == i {
			return i, true, false
		}
	}
	return i, float, true
}

func hasWord(b []byte, i int, w string) bool {
	return i+len(w) <= len(b) && string(b[i:i+len(w)]) == w
}

// skipValue finds the end of the JSON value that starts at b[i], checking its
// syntax on the way.
func skipValue(b []byte, i, depth int) (next int, ok bool) {
	if i >= len(b) || depth > maxDepth {
		return i, false
	}
	switch c := b[i]; {
	case c == '"':
		raw, esc, n, ok := scanString(b, i)
		if ok && esc {
			_, ok = unescape(nil, raw)
		}
		return n, ok
	case c == '-' || c >= '0' && c <= '9':
		n, _, ok := scanNumber(b, i)
		return n, ok
	case c == 't':
		return i + 4, hasWord(b, i, "true")
	case c == 'f':
		return i + 5, hasWord(b, i, "false")
	case c == 'n':
		return i + 4, hasWord(b, i, "null")
	case c == '[':
		i = skipSpace(b, i+1)
		if i < len(b) && b[i] == ']' {
			return i + 1, true
		}
		for {
			n, ok := skipValue(b, i, depth+1)
			if !ok {
				return n, false
			}
			i = skipSpace(b, n)
			if i >= len(b) {
				return i, false
			}
			if b[i] == ']' {
				return i + 1, true
			}
			if b[i] != ',' {
				return i, false
			}
			i = skipSpace(b, i+1)
		}
	case c == '{':
		i = skipSpace(b, i+1)
		if i < len(b) && b[i] == '}' {
			return i + 1, true
		}
		for {
			raw, esc, n, ok := scanString(b, i)
			if ok && esc {
				_, ok = unescape(nil, raw)
			}
			if !ok {
				return n, false
			}
			i = skipSpace(b, n)
			if i >= len(b) || b[i] != ':' {
				return i, false
			}
			i = skipSpace(b, i+1)
			if n, ok = skipValue(b, i, depth+1); !ok {
				return n, false
			}
			i = skipSpace(b, n)
			if i >= len(b) {
				return i, false
			}
			if b[i] == '}' {
				return i + 1, true
			}
			if b[i] != ',' {
				return i, false
			}
			i = skipSpace(b, i+1)
		}
	}
	return i, false
}

// unescape appends the content of a JSON string without its escapes. A lone
// surrogate is refused, as the engine refuses it.
func unescape(dst, raw []byte) ([]byte, bool) {
	for i := 0; i < len(raw); {
		n := bytes.IndexByte(raw[i:], '\\')
		if n < 0 {
			return append(dst, raw[i:]...), true
		}
		dst = append(dst, raw[i:i+n]...)
		i += n + 1
		if i >= len(raw) {
			return dst, false
		}
		c := raw[i]
		i++
		switch c {
		case '"', '\\', '/':
			dst = append(dst, c)
		case 'b':
			dst = append(dst, '\b')
		case 'f':
			dst = append(dst, '\f')
		case 'n':
			dst = append(dst, '\n')
		case 'r':
			dst = append(dst, '\r')
		case 't':
			dst = append(dst, '\t')
		case 'u':
			r, ok := hex4(raw, i)
			if !ok {
				return dst, false
			}
			i += 4
			switch {
			case r >= 0xD800 && r < 0xDC00:
				if i+1 >= len(raw) || raw[i] != '\\' || raw[i+1] != 'u' {
					return dst, false
				}
				low, ok := hex4(raw, i+2)
				if !ok || low < 0xDC00 || low > 0xDFFF {
					return dst, false
				}
				i += 6
				r = 0x10000 + (r-0xD800)<<10 + (low - 0xDC00)
			case r >= 0xDC00 && r <= 0xDFFF:
				return dst, false
			}
			dst = utf8.AppendRune(dst, r)
		default:
			return dst, false
		}
	}
	return dst, true
}

func hex4(b []byte, i int) (rune, bool) {
	if i+4 > len(b) {
		return 0, false
	}
	var r rune
	for _, c := range b[i : i+4] {
		switch {
		case c >= '0' && c <= '9':
			r = r<<4 | rune(c-'0')
		case c >= 'a' && c <= 'f':
			r = r<<4 | rune(c-'a'+10)
		case c >= 'A' && c <= 'F':
			r = r<<4 | rune(c-'A'+10)
		default:
			return 0, false
		}
	}
	return r, true
}

// appendQuoted writes s as a JSON string.
func appendQuoted(dst, s []byte) []byte {
	const hexDigits = "0123456789abcdef"
	dst = append(dst, '"')
	start := 0
	for i, c := range s {
		if c >= 0x20 && c != '"' && c != '\\' {
			continue
		}
		dst = append(dst, s[start:i]...)
		start = i + 1
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
	}
	return append(append(dst, s[start:]...), '"')
}

// valueError is a refusal of one value. end is the offset just after the last
// byte that was read, from which "line L column C" is made.
type valueError struct {
	text string
	end  int
}

func errAt(end int, format string, args ...any) *valueError {
	return &valueError{fmt.Sprintf(format, args...), end}
}

var errSyntax = &valueError{text: "expected value"}

// at writes the error the way the engine's JSON reader does, for a document
// that starts at offset start.
func (e *valueError) at(b []byte, start int) string {
	end := min(max(e.end, start), len(b))
	line, col := 1, 0
	for _, c := range b[start:end] {
		if c == '\n' {
			line++
			col = 0
		} else {
			col++
		}
	}
	return e.text + " at line " + strconv.Itoa(line) + " column " + strconv.Itoa(col)
}

// invalidType describes the JSON value at b[i] as "not what was expected".
func invalidType(b []byte, i int, expected string) *valueError {
	if i >= len(b) {
		return errSyntax
	}
	switch c := b[i]; {
	case c == '"':
		raw, _, n, ok := scanString(b, i)
		if !ok {
			return errSyntax
		}
		s, _ := unescape(nil, raw)
		return errAt(n, "invalid type: string %s, expected %s", strconv.Quote(string(s)), expected)
	case c == '-' || c >= '0' && c <= '9':
		n, float, ok := scanNumber(b, i)
		if !ok {
			return errSyntax
		}
		if float {
			return errAt(n, "invalid type: floating point `%s`, expected %s", b[i:n], expected)
		}
		return errAt(n, "invalid type: integer `%s`, expected %s", b[i:n], expected)
	case hasWord(b, i, "true"):
		return errAt(i+4, "invalid type: boolean `true`, expected %s", expected)
	case hasWord(b, i, "false"):
		return errAt(i+5, "invalid type: boolean `false`, expected %s", expected)
	case hasWord(b, i, "null"):
		return errAt(i+4, "invalid type: null, expected %s", expected)
	case c == '[':
		return errAt(i+1, "invalid type: sequence, expected %s", expected)
	case c == '{':
		return errAt(i+1, "invalid type: map, expected %s", expected)
	}
	return errSyntax
}

// QuoteJSON writes s as a JSON string.
func QuoteJSON(s string) []byte { return appendQuoted(nil, []byte(s)) }
