package feldera

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"holdfast/internal/decode"
)

// maxNesting bounds the depth of JSON inside a value. The engine's parser
// stops at 128 levels, the row, its envelope and the array included.
const maxNesting = 100

// appendVariant writes a value of any kind as inline JSON. Binary data becomes
// the string of its hexadecimal digits.
func (p *plan) appendVariant(dst []byte, v *decode.Value, pol *Policy, a *Array) ([]byte, *problem) {
	b := v.Bytes
	switch v.Kind {
	case decode.Text, decode.Hex:
		if out := appendString(dst, b); out != nil {
			return out, nil
		}
		return dst, cannot("the value "+shown(b)+" is not valid UTF-8", "text in UTF-8")
	case decode.Bool:
		return append(dst, b...), p.checkBool(b)
	case decode.Number:
		if nonFinite(b) {
			return p.special(dst, b, pol.NonFinite, AlteredNonFinite, a)
		}
		if !jsonNumber(b) {
			return dst, p.malformed(b)
		}
		return append(dst, b...), p.variantNumber(b)
	case decode.JSON:
		b = bytes.TrimSpace(b)
		if string(b) == "null" {
			if p.nullable {
				a.altered = append(a.altered, alteration{p.name, AlteredJSONNull})
			}
			return p.appendNull(dst, decode.Null)
		}
		if pr := p.checkJSON(b); pr != nil {
			return dst, pr
		}
		return append(dst, b...), nil
	}
	return dst, p.wrongKind(v)
}

// checkJSON refuses what different readers would read differently: duplicate
// names, invalid UTF-8, lone surrogates, left-over bytes, and depth beyond the
// engine's.
func (p *plan) checkJSON(b []byte) *problem {
	if err := validJSON(b); err != nil {
		pr := cannot("the JSON "+shown(b)+" is not acceptable: "+err.Error(), "valid JSON without duplicate names or lone surrogates")
		pr.do = "declare the column VARCHAR in the Feldera table; " + laterChange
		return pr
	}
	if n := nesting(b); n > maxNesting {
		return &problem{
			reason: decode.ReasonLimit, why: fmt.Sprintf("the JSON is nested %d levels deep", n),
			expected: fmt.Sprintf("at most %d levels", maxNesting), do: "declare the column VARCHAR in the table",
		}
	}
	if bytes.Contains(b, []byte(reservedName)) {
		pr := cannot("the JSON "+shown(b)+" has a member or text that the engine uses for numbers", "JSON without "+reservedName)
		pr.do = "declare the column VARCHAR in the Feldera table; " + laterChange
		return pr
	}
	if bad := numbersFit(b); bad != nil {
		return p.variantNumber(bad)
	}
	return nil
}

// reservedName is how the engine's reader marks a number: an object whose
// first member has this name is read as one.
const reservedName = "$serde_json::private::Number"

func validJSON(b []byte) error {
	dec := jsontext.NewDecoder(bytes.NewBuffer(b))
	if _, err := dec.ReadValue(); err != nil {
		return jsonCause(err)
	}
	return atEnd(dec)
}

func atEnd(dec *jsontext.Decoder) error {
	if _, err := dec.ReadToken(); !errors.Is(err, io.EOF) {
		return errors.New("bytes are left over behind it")
	}
	return nil
}

// jsonCause takes the library's name off its messages and bounds them.
func jsonCause(err error) error {
	return errors.New(clip(strings.TrimPrefix(err.Error(), "jsontext: "), 120))
}

// nesting counts the levels of valid JSON.
func nesting(b []byte) int {
	level, deepest, inString := 0, 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			level++
			deepest = max(deepest, level)
		case c == '}' || c == ']':
			level--
		}
	}
	return deepest
}

// appendByteArray checks a JSON array of bytes.
func (p *plan) appendByteArray(dst, b []byte) ([]byte, *problem) {
	dec := jsontext.NewDecoder(bytes.NewBuffer(b))
	if t, err := dec.ReadToken(); err != nil || t.Kind() != '[' {
		return dst, p.malformed(b)
	}
	dst = append(dst, '[')
	for n := 0; dec.PeekKind() == '0'; n++ {
		raw, err := dec.ReadValue()
		if err != nil {
			return dst, p.malformed(b)
		}
		if _, err := strconv.ParseUint(string(raw), 10, 8); err != nil {
			return dst, p.malformed(b)
		}
		if n > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, raw...)
	}
	if t, err := dec.ReadToken(); err != nil || t.Kind() != ']' || atEnd(dec) != nil {
		return dst, p.malformed(b)
	}
	return append(dst, ']'), nil
}

// nested writes the parts of one ARRAY, MAP or ROW.
type nested struct {
	dec *jsontext.Decoder
	pol *Policy
	a   *Array
	top *plan
}

// appendNested checks JSON against the type, part by part, and writes it as
// the type's parts are written.
func (p *plan) appendNested(dst, b []byte, pol *Policy, a *Array) ([]byte, *problem) {
	if n := nesting(b); n > maxNesting {
		return dst, &problem{
			reason: decode.ReasonLimit, why: fmt.Sprintf("the JSON is nested %d levels deep", n),
			expected: fmt.Sprintf("at most %d levels", maxNesting),
		}
	}
	n := nested{dec: jsontext.NewDecoder(bytes.NewBuffer(b)), pol: pol, a: a, top: p}
	dst, pr := n.value(dst, p, p.name)
	if pr == nil {
		if err := atEnd(n.dec); err != nil {
			pr = cannot("the JSON "+shown(b)+" is not acceptable: "+err.Error(), "one value of type "+p.typ.String())
		}
	}
	return dst, pr
}

// value writes the next value of the input. path names it in problems.
func (n *nested) value(dst []byte, p *plan, path string) ([]byte, *problem) {
	switch kind := n.dec.PeekKind(); {
	case kind == 'n':
		if _, err := n.dec.ReadToken(); err != nil {
			return dst, n.broken(err, path)
		}
		dst, pr := p.appendNull(dst, decode.Null)
		return dst, at(pr, path)
	case kind == '[' && p.kind == planArray:
		return n.array(dst, p, path)
	case kind == '{' && p.kind == planMap:
		return n.mapping(dst, p, path)
	case kind == '{' && p.kind == planStruct:
		return n.members(dst, p, path)
	}
	raw, err := n.dec.ReadValue()
	if err != nil {
		return dst, n.broken(err, path)
	}
	v := decode.Value{State: decode.Set, Bytes: raw}
	switch raw[0] {
	case '"':
		if v.Bytes, err = jsontext.AppendUnquote(nil, raw); err != nil {
			return dst, n.broken(err, path)
		}
		v.Kind = decode.Text
		if p.kind == planBytes && bytes.HasPrefix(v.Bytes, []byte(`\x`)) {
			v.Kind, v.Bytes = decode.Hex, v.Bytes[2:] // bytea inside JSON, as Postgres writes it
		}
	case 't', 'f':
		v.Kind = decode.Bool
	case '{', '[':
		v.Kind = decode.JSON
		if p.kind >= planArray {
			return dst, at(p.malformed(raw), path)
		}
	default:
		v.Kind = decode.Number
	}
	dst, pr := p.append(dst, &v, n.pol, n.a)
	return dst, at(pr, path)
}

func (n *nested) array(dst []byte, p *plan, path string) ([]byte, *problem) {
	if _, err := n.dec.ReadToken(); err != nil {
		return dst, n.broken(err, path)
	}
	dst = append(dst, '[')
	var pr *problem
	for i := 0; n.dec.PeekKind() != ']'; i++ {
		if i > 0 {
			dst = append(dst, ',')
		}
		if dst, pr = n.value(dst, p.element, path); pr != nil {
			return dst, pr
		}
	}
	return n.close(dst, ']', path)
}

func (n *nested) mapping(dst []byte, p *plan, path string) ([]byte, *problem) {
	if _, err := n.dec.ReadToken(); err != nil {
		return dst, n.broken(err, path)
	}
	dst = append(dst, '{')
	seen := make(map[string]bool)
	for i := 0; n.dec.PeekKind() != '}'; i++ {
		if i > 0 {
			dst = append(dst, ',')
		}
		name, err := n.dec.ReadToken()
		if err != nil {
			return dst, n.broken(err, path)
		}
		var pr *problem
		mark := len(dst)
		if dst, pr = n.mapKey(dst, p.key, name.String()); pr != nil {
			return dst, at(pr, path)
		}
		// Names that differ can be one key: 1 and 1.0, a UUID in two cases, an
		// instant in two zones. The engine keeps the last of them.
		key := p.key.canonical(dst[mark+1 : len(dst)-1])
		if seen[key] {
			return dst, at(cannot("the key "+shown([]byte(name.String()))+" of its "+p.typ.String()+" is given twice, perhaps written in two ways", "each key once"), path)
		}
		seen[key] = true
		dst = append(dst, ':')
		if dst, pr = n.value(dst, p.element, path); pr != nil {
			return dst, pr
		}
	}
	return n.close(dst, '}', path)
}

// mapKey writes a key of a MAP, which is a string to JSON whatever its type.
func (n *nested) mapKey(dst []byte, p *plan, name string) ([]byte, *problem) {
	v := decode.Value{State: decode.Set, Kind: decode.Text, Bytes: []byte(name)}
	switch p.kind {
	case planInt, planFloat:
		v.Kind = decode.Number
	case planBool:
		v.Kind = decode.Bool
	default: // the key stays the text that it is
	}
	mark := len(dst)
	// A key cannot be NULL, whatever a policy makes of such values.
	pol := Policy{Fraction: n.pol.Fraction}
	dst, pr := p.append(dst, &v, &pol, n.a)
	if pr == nil && dst[mark] != '"' {
		dst = append(dst, `""`...)
		copy(dst[mark+1:], dst[mark:len(dst)-2])
		dst[mark], dst[len(dst)-1] = '"', '"'
	}
	return dst, pr
}

// canonical gives the one form in which keys of the type compare, from the
// form in which they are written.
func (p *plan) canonical(written []byte) string {
	switch p.kind {
	case planFloat:
		if f, err := strconv.ParseFloat(string(written), p.bits); err == nil {
			return strconv.FormatFloat(f+0, 'g', -1, p.bits) // the sum makes one zero of two
		}
	case planDecimal:
		if bytes.IndexByte(written, '.') >= 0 {
			written = bytes.TrimRight(bytes.TrimRight(written, "0"), ".")
		}
	default: // they are written in one form
	}
	return string(written)
}

func (n *nested) members(dst []byte, p *plan, path string) ([]byte, *problem) {
	if _, err := n.dec.ReadToken(); err != nil {
		return dst, n.broken(err, path)
	}
	dst = append(dst, '{')
	seen := make([]bool, len(p.fields))
	first := true
	for n.dec.PeekKind() != '}' {
		token, err := n.dec.ReadToken()
		if err != nil {
			return dst, n.broken(err, path)
		}
		name := token.String()
		i := p.field(name)
		if i < 0 {
			return dst, at(cannot("it has a member "+strconv.Quote(clip(name, 100))+" that its type "+p.typ.String()+" has not", "the type's fields alone"), path)
		}
		if seen[i] {
			return dst, at(cannot("field "+strconv.Quote(p.fields[i].name)+" is given twice", "each field once"), path)
		}
		seen[i] = true
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = append(appendString(dst, []byte(p.fields[i].name)), ':')
		var pr *problem
		if dst, pr = n.value(dst, &p.fields[i], path+"."+p.fields[i].name); pr != nil {
			return dst, pr
		}
	}
	for i := range seen {
		if !seen[i] && !p.fields[i].nullable {
			_, pr := p.fields[i].appendNull(nil, decode.Absent)
			return dst, at(pr, path+"."+p.fields[i].name)
		}
	}
	return n.close(dst, '}', path)
}

// field finds a member by name: exactly, or without regard to case where the
// field was not declared quoted.
func (p *plan) field(name string) int {
	lower := strings.ToLower(name)
	folded := -1
	for i := range p.fields {
		if p.fields[i].name == name {
			return i
		}
		if !p.typ.Fields[i].Quoted && p.fields[i].name == lower {
			folded = i
		}
	}
	return folded
}

func (n *nested) close(dst []byte, end byte, path string) ([]byte, *problem) {
	if _, err := n.dec.ReadToken(); err != nil {
		return dst, n.broken(err, path)
	}
	return append(dst, end), nil
}

func (n *nested) broken(err error, path string) *problem {
	return at(cannot("its JSON is not valid: "+jsonCause(err).Error(), "a value of type "+n.top.typ.String()), path)
}

// at puts the path of a part in front of a problem's reason, once.
func at(p *problem, path string) *problem {
	if p != nil && strings.Contains(path, ".") && !strings.HasPrefix(p.why, "in ") {
		p.why = "in " + path + ": " + p.why
	}
	return p
}
