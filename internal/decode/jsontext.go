package decode

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
)

// maxJSONDepth bounds the nesting of one value. Feldera's own parser stops at
// 128 levels, the row and its envelope included.
const maxJSONDepth = 100

// maxMessageDepth bounds the nesting of a message: a value and what it may be
// wrapped in.
const maxMessageDepth = maxJSONDepth + 4

// jsonCheck checks JSON before anything is read of it, so that the functions
// below can walk it without looking at its grammar again. Beyond the grammar it
// refuses invalid UTF-8, lone surrogates, left-over bytes, names that stand
// twice in one object, and deep nesting: each of them would make the message
// mean different things to different readers.
//
// The names of the objects that are open at a time are kept as eight bytes
// each, which is less than a name takes in the message; a map of them would be
// many times that.
type jsonCheck struct {
	dec    jsontext.Decoder
	src    bytes.Buffer
	frames []int32 // where each open object's names begin; -1 for an array
	names  []span
	plain  []byte // names without their escapes
}

// span is a part of the message, or of jsonCheck.plain.
type span struct{ start, end uint32 }

// inPlain marks a span of jsonCheck.plain.
const inPlain = 1 << 31

// maxJSON is far above what a broker lets through, and what a span can say.
const maxJSON = inPlain - 1

func (c *jsonCheck) check(src []byte) error {
	if len(src) > maxJSON {
		return errors.New("it is too large")
	}
	c.src = *bytes.NewBuffer(src) // read in place; the decoder never writes to it
	c.dec.Reset(&c.src, jsontext.AllowDuplicateNames(true))
	if _, err := c.dec.ReadValue(); err != nil {
		return syntaxError(err)
	}
	if _, err := c.dec.ReadToken(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("bytes are left over after the value's end at byte %d", c.dec.InputOffset())
	}
	return c.scan(src)
}

// scan looks at the names and the depth of valid JSON.
func (c *jsonCheck) scan(src []byte) error {
	c.frames, c.names, c.plain = c.frames[:0], c.names[:0], c.plain[:0]
	for i := 0; i < len(src); {
		switch src[i] {
		case '{':
			c.frames = append(c.frames, int32(len(c.names))) //nolint:gosec // bounded by maxJSON
			i++
		case '[':
			c.frames = append(c.frames, -1)
			i++
		case '}':
			base := c.frames[len(c.frames)-1]
			if err := c.twice(src, c.names[base:]); err != nil {
				return err
			}
			c.names = c.names[:base]
			c.frames = c.frames[:len(c.frames)-1]
			i++
		case ']':
			c.frames = c.frames[:len(c.frames)-1]
			i++
		case '"':
			end := skipString(src, i)
			next := skipSpace(src, end)
			if next < len(src) && src[next] == ':' {
				if err := c.name(src, i, end); err != nil {
					return err
				}
			}
			i = next
		default:
			i++
		}
		if len(c.frames) > maxMessageDepth {
			return fmt.Errorf("it is nested more than %d levels deep", maxMessageDepth)
		}
	}
	return nil
}

func (c *jsonCheck) name(src []byte, start, end int) error {
	s := span{uint32(start + 1), uint32(end - 1)} //nolint:gosec // bounded by maxJSON
	if bytes.IndexByte(src[start:end], '\\') >= 0 {
		at := len(c.plain)
		if need := at + end - start; need > cap(c.plain) {
			c.plain = append(make([]byte, 0, max(need, 2*cap(c.plain))), c.plain...)
		}
		var err error
		if c.plain, err = jsontext.AppendUnquote(c.plain, src[start:end]); err != nil {
			return syntaxError(err)
		}
		s = span{uint32(at) | inPlain, uint32(len(c.plain)) | inPlain} //nolint:gosec // not longer than the message
	}
	if len(c.names) == cap(c.names) {
		// Twice as large each time: append's smaller steps leave more behind.
		c.names = append(make([]span, 0, max(2*cap(c.names), 64)), c.names...)
	}
	c.names = append(c.names, s)
	return nil
}

func (c *jsonCheck) text(src []byte, s span) []byte {
	if s.start&inPlain != 0 {
		return c.plain[s.start&^inPlain : s.end&^inPlain]
	}
	return src[s.start:s.end]
}

// twice finds a name that stands twice. It may reorder the names.
func (c *jsonCheck) twice(src []byte, names []span) error {
	const few = 8
	if len(names) > few {
		slices.SortFunc(names, func(a, b span) int { return bytes.Compare(c.text(src, a), c.text(src, b)) })
	}
	for i := 1; i < len(names); i++ {
		from := 0
		if len(names) > few {
			from = i - 1
		}
		for _, earlier := range names[from:i] {
			if name := c.text(src, names[i]); bytes.Equal(name, c.text(src, earlier)) {
				return fmt.Errorf("it has the duplicate name %.100q in one object", name)
			}
		}
	}
	return nil
}

// The functions below walk valid JSON.

func skipSpace(src []byte, i int) int {
	for i < len(src) && (src[i] == ' ' || src[i] == '\n' || src[i] == '\r' || src[i] == '\t') {
		i++
	}
	return i
}

// skipString gives the end of the string that begins at i.
func skipString(src []byte, i int) int {
	for i++; i < len(src); i++ {
		switch src[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return i
}

// endsScalar marks what a number or a word ends before.
var endsScalar = func() (t [256]bool) {
	for _, c := range []byte("{}[]\",: \n\r\t") {
		t[c] = true
	}
	return t
}()

// skipValue gives the end of the value that begins at i.
func skipValue(src []byte, i int) int {
	level := 0
	for i < len(src) {
		switch src[i] {
		case '{', '[':
			level++
			i++
		case '}', ']':
			if level == 0 {
				return i // the end of what the value is in
			}
			level--
			i++
		case '"':
			i = skipString(src, i)
		case ',', ':', ' ', '\n', '\r', '\t':
			if level == 0 {
				return i
			}
			i++
			continue
		default:
			for i < len(src) && !endsScalar[src[i]] {
				i++
			}
		}
		if level == 0 {
			return i
		}
	}
	return i
}

// syntaxError makes the parser's message ours: without its package prefix,
// and never with more of the input than it quotes.
func syntaxError(err error) error {
	if errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("it is empty")
	}
	return errors.New("it is not valid JSON: " + strings.TrimPrefix(err.Error(), "jsontext: "))
}

func kindName(c byte) string {
	switch c {
	case 'n':
		return "null"
	case 't', 'f':
		return "boolean"
	case '"':
		return "string"
	case '[':
		return "array"
	case '{':
		return "object"
	}
	return "number"
}

// depth counts the levels of nesting of a valid JSON value.
func depth(raw []byte) int {
	level, deepest := 0, 0
	for i := 0; i < len(raw); {
		switch raw[i] {
		case '"':
			i = skipString(raw, i)
			continue
		case '{', '[':
			level++
			deepest = max(deepest, level)
		case '}', ']':
			level--
		}
		i++
	}
	return deepest
}
