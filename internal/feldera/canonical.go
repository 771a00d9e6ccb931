package feldera

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/go-json-experiment/json/jsontext"

	"holdfast/internal/decode"
)

// canon writes values in their one form. Its input is JSON in one of two
// dialects: what the encoder writes, and what the engine's queries answer,
// where binary data is a string of hexadecimal digits, a VARIANT a string with
// JSON in it, a decimal a number, and a timestamp has a T in its middle.
type canon struct {
	answer bool // of a query, as against what the encoder wrote
}

var errOtherForm = errors.New("the value is not of a form that its type has")

// value appends the form of a whole column: the mark, then the bytes.
func (c canon) value(dst []byte, p *plan, raw jsontext.Value) ([]byte, error) {
	if raw.Kind() == 'n' {
		return append(dst, nullMark), nil
	}
	dst = append(dst, valueMark)
	if p.kind < planVariant {
		return c.scalar(dst, p, raw)
	}
	return c.nested(dst, p, raw)
}

// scalar appends a value without quotes.
func (c canon) scalar(dst []byte, p *plan, raw jsontext.Value) ([]byte, error) {
	kind := raw.Kind()
	text := []byte(raw)
	if kind == '"' {
		var err error
		if text, err = jsontext.AppendUnquote(nil, raw); err != nil {
			return dst, jsonCause(err)
		}
	}
	switch p.kind {
	case planBool:
		if kind != 't' && kind != 'f' {
			return dst, errOtherForm
		}
		return append(dst, raw...), nil
	case planInt:
		if kind != '0' {
			return dst, errOtherForm
		}
		out, pr := p.appendInt(dst, text)
		return out, problemError(pr)
	case planFloat:
		f, err := strconv.ParseFloat(string(text), p.bits)
		if kind != '0' || err != nil {
			return dst, errOtherForm
		}
		return strconv.AppendFloat(dst, f+0, 'g', -1, p.bits), nil // the sum makes one zero of two
	case planDecimal:
		return c.decimal(dst, p, text)
	case planText:
		if kind != '"' {
			return dst, errOtherForm
		}
		return append(dst, text...), nil
	case planBytes:
		return c.binary(dst, raw, text)
	case planDate, planTime, planTimestamp, planTimestampTZ:
		if kind != '"' {
			return dst, errOtherForm
		}
		if c.answer && p.kind == planTimestampTZ && !bytes.HasSuffix(text, []byte("Z")) && !bytes.ContainsAny(text[min(len(text), 11):], "+-") {
			text = append(text, 'Z') // Arrow leaves out the zone where the column has none
		}
		return c.quoteless(dst, p, &decode.Value{State: decode.Set, Kind: decode.Text, Bytes: text})
	case planUUID:
		if kind != '"' {
			return dst, errOtherForm
		}
		return c.quoteless(dst, p, &decode.Value{State: decode.Set, Kind: decode.Text, Bytes: text})
	default:
		return dst, errOtherForm
	}
}

// quoteless appends what the encoder makes of a value, without its quotes.
// Nothing in it needs an escape.
func (canon) quoteless(dst []byte, p *plan, v *decode.Value) ([]byte, error) {
	var a Array
	out, pr := p.append(nil, v, &exactly, &a)
	if pr != nil {
		return dst, problemError(pr)
	}
	return append(dst, bytes.Trim(out, `"`)...), nil
}

func problemError(pr *problem) error {
	if pr == nil {
		return nil
	}
	return errors.New(pr.why)
}

// decimal appends a number with all the digits of the column's scale.
func (c canon) decimal(dst []byte, p *plan, text []byte) ([]byte, error) {
	if !jsonNumber(text) {
		return dst, errOtherForm
	}
	var a Array
	out, pr := p.appendDecimal(nil, text, &exactly, &a)
	if pr != nil {
		return dst, problemError(pr)
	}
	out = bytes.Trim(out, `"`)
	dst = append(dst, out...)
	if p.scale == 0 {
		return dst, nil
	}
	have := 0
	if point := bytes.IndexByte(out, '.'); point >= 0 {
		have = len(out) - point - 1
	} else {
		dst = append(dst, '.')
	}
	for range p.scale - have {
		dst = append(dst, '0')
	}
	return dst, nil
}

// binary appends the digits of binary data.
func (canon) binary(dst []byte, raw jsontext.Value, text []byte) ([]byte, error) {
	if raw.Kind() == '"' {
		text = bytes.TrimPrefix(text, []byte(`\x`))
		if len(text)%2 != 0 {
			return dst, errOtherForm
		}
		for _, c := range text {
			d := unhex[c]
			if d > 15 {
				return dst, errOtherForm
			}
			dst = append(dst, hexDigits[d])
		}
		return dst, nil
	}
	dec := jsontext.NewDecoder(bytes.NewBuffer(raw))
	if t, err := dec.ReadToken(); err != nil || t.Kind() != '[' {
		return dst, errOtherForm
	}
	for dec.PeekKind() == '0' {
		part, err := dec.ReadValue()
		if err != nil {
			return dst, jsonCause(err)
		}
		n, err := strconv.ParseUint(string(part), 10, 8)
		if err != nil {
			return dst, errOtherForm
		}
		dst = append(dst, hexDigits[n>>4], hexDigits[n&15])
	}
	if t, err := dec.ReadToken(); err != nil || t.Kind() != ']' {
		return dst, errOtherForm
	}
	return dst, nil
}

// nested appends a VARIANT, ARRAY, MAP or ROW as JSON in one form.
func (c canon) nested(dst []byte, p *plan, raw jsontext.Value) ([]byte, error) {
	if nesting(raw) > maxNesting {
		return dst, fmt.Errorf("it is nested more than %d levels deep", maxNesting)
	}
	if raw.Kind() == 'n' {
		return append(dst, "null"...), nil
	}
	switch p.kind {
	case planVariant:
		if c.answer {
			if raw.Kind() != '"' {
				return dst, errOtherForm
			}
			text, err := jsontext.AppendUnquote(nil, raw)
			if err != nil {
				return dst, jsonCause(err)
			}
			if nesting(text) > maxNesting {
				return dst, fmt.Errorf("it is nested more than %d levels deep", maxNesting)
			}
			raw = text
		}
		dec := jsontext.NewDecoder(bytes.NewBuffer(raw))
		dst, err := c.free(dst, dec)
		if err == nil {
			err = atEnd(dec)
		}
		return dst, err
	case planArray:
		return c.array(dst, p, raw)
	case planMap, planStruct:
		return c.members(dst, p, raw)
	default:
		mark := len(dst)
		dst, err := c.scalar(dst, p, raw)
		if err != nil {
			return dst, err
		}
		text := bytes.Clone(dst[mark:])
		if dst = appendString(dst[:mark], text); dst == nil {
			return nil, errors.New("it is not valid UTF-8")
		}
		return dst, nil
	}
}

func (c canon) array(dst []byte, p *plan, raw jsontext.Value) ([]byte, error) {
	dec := jsontext.NewDecoder(bytes.NewBuffer(raw))
	if t, err := dec.ReadToken(); err != nil || t.Kind() != '[' {
		return dst, errOtherForm
	}
	dst = append(dst, '[')
	for n := 0; dec.PeekKind() != ']'; n++ {
		part, err := dec.ReadValue()
		if err != nil {
			return dst, jsonCause(err)
		}
		if n > 0 {
			dst = append(dst, ',')
		}
		if dst, err = c.nested(dst, p.element, part); err != nil {
			return dst, err
		}
	}
	return append(dst, ']'), nil
}

// member is one of an object whose members are put in order.
type member struct{ name, value []byte }

// object appends members in the order of their names.
func object(dst []byte, members []member) []byte {
	slices.SortFunc(members, func(a, b member) int { return bytes.Compare(a.name, b.name) })
	dst = append(dst, '{')
	for i, m := range members {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(append(append(dst, m.name...), ':'), m.value...)
	}
	return append(dst, '}')
}

// members appends a MAP or a ROW. A ROW's field that is not there is NULL.
func (c canon) members(dst []byte, p *plan, raw jsontext.Value) ([]byte, error) {
	dec := jsontext.NewDecoder(bytes.NewBuffer(raw))
	if t, err := dec.ReadToken(); err != nil || t.Kind() != '{' {
		return dst, errOtherForm
	}
	var all []member
	seen := make([]bool, len(p.fields))
	for dec.PeekKind() != '}' {
		token, err := dec.ReadToken()
		if err != nil {
			return dst, jsonCause(err)
		}
		name := token.String()
		part, err := dec.ReadValue()
		if err != nil {
			return dst, jsonCause(err)
		}
		of := p.element
		if p.kind == planStruct {
			i := p.field(name)
			if i < 0 {
				return dst, fmt.Errorf("it has a member %q that its type has not", clip(name, 100))
			}
			of, seen[i], name = &p.fields[i], true, p.fields[i].name
		}
		value, err := c.nested(nil, of, part)
		if err != nil {
			return dst, err
		}
		quoted := appendString(nil, []byte(name))
		if quoted == nil {
			return dst, errors.New("a name in it is not valid UTF-8")
		}
		all = append(all, member{quoted, value})
	}
	for i := range seen {
		if !seen[i] {
			all = append(all, member{appendString(nil, []byte(p.fields[i].name)), []byte("null")})
		}
	}
	return object(dst, all), nil
}

// free appends JSON of any shape: members in order, numbers by what they are.
func (c canon) free(dst []byte, dec *jsontext.Decoder) ([]byte, error) {
	switch dec.PeekKind() {
	case '[':
		if _, err := dec.ReadToken(); err != nil {
			return dst, jsonCause(err)
		}
		dst = append(dst, '[')
		for n := 0; dec.PeekKind() != ']'; n++ {
			if n > 0 {
				dst = append(dst, ',')
			}
			var err error
			if dst, err = c.free(dst, dec); err != nil {
				return dst, err
			}
		}
		if _, err := dec.ReadToken(); err != nil {
			return dst, jsonCause(err)
		}
		return append(dst, ']'), nil
	case '{':
		if _, err := dec.ReadToken(); err != nil {
			return dst, jsonCause(err)
		}
		var all []member
		for dec.PeekKind() != '}' {
			token, err := dec.ReadToken()
			if err != nil {
				return dst, jsonCause(err)
			}
			name := appendString(nil, []byte(token.String()))
			if name == nil {
				return dst, errors.New("a name in it is not valid UTF-8")
			}
			value, err := c.free(nil, dec)
			if err != nil {
				return dst, err
			}
			all = append(all, member{name, value})
		}
		if _, err := dec.ReadToken(); err != nil {
			return dst, jsonCause(err)
		}
		return object(dst, all), nil
	default: // a scalar, or no value at all
	}
	raw, err := dec.ReadValue()
	if err != nil {
		return dst, jsonCause(err)
	}
	switch raw.Kind() {
	case '0':
		return shape(raw).appendForm(dst), nil
	case '"':
		text, err := jsontext.AppendUnquote(nil, raw)
		if err != nil {
			return dst, jsonCause(err)
		}
		if out := appendString(dst, text); out != nil {
			return out, nil
		}
		return dst, errors.New("it is not valid UTF-8")
	default:
		return append(dst, raw...), nil
	}
}

// appendForm writes a number in a form that only depends on what it is: its
// digits, and the place of the first of them.
func (n number) appendForm(dst []byte) []byte {
	if n.count == 0 {
		return append(dst, '0')
	}
	if n.neg {
		dst = append(dst, '-')
	}
	for _, c := range n.text {
		if c != '.' {
			dst = append(dst, c)
		}
	}
	return strconv.AppendInt(append(dst, 'e'), int64(n.last()), 10)
}
