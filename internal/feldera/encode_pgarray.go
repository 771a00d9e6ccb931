package feldera

import (
	"holdfast/internal/decode"
)

// appendPgArray writes a Postgres array literal, such as {1,NULL,3} or
// {"a,b","c\"d"}, into an ARRAY. Its dimensions must be those of the type. An
// array whose indexes do not begin at 1 is refused: the ARRAY would have other
// indexes. Elements are parted by commas; a type with another delimiter (box)
// never gets here, as its arrays go into text alone.
func (p *plan) appendPgArray(dst []byte, v *decode.Value, pol *Policy, a *Array) ([]byte, *problem) {
	b := v.Bytes
	if len(b) > 0 && b[0] == '[' {
		pr := cannot("the array "+shown(b)+" has indexes that do not begin at 1", "an array with the default indexes")
		pr.do = "declare the column VARCHAR in the table"
		return dst, pr
	}
	if leaf := p.leaf(); leaf.kind == planVariant && p.elementOID == 0 {
		// What its elements are cannot be told from the text.
		return dst, p.wrongKind(v)
	}
	r := pgArray{rest: b, pol: pol, a: a, oid: p.elementOID}
	dst, pr := r.level(dst, p)
	if pr == nil && (r.broken || len(r.rest) > 0) {
		pr = p.malformed(b)
	}
	if pr != nil && r.broken {
		pr = p.malformed(b)
	}
	return dst, pr
}

// leaf gives the type behind all dimensions.
func (p *plan) leaf() *plan {
	for p.kind == planArray {
		p = p.element
	}
	return p
}

// pgArray reads one literal from its front.
type pgArray struct {
	rest   []byte
	oid    uint32 // of the elements' type, 0 where it is not known
	pol    *Policy
	a      *Array
	broken bool
	buf    []byte // of an element with escapes
}

// take reads the byte c if it is next.
func (r *pgArray) take(c byte) bool {
	if len(r.rest) == 0 || r.rest[0] != c {
		return false
	}
	r.rest = r.rest[1:]
	return true
}

// level reads one pair of braces. The depth of the calls is that of the type.
func (r *pgArray) level(dst []byte, p *plan) ([]byte, *problem) {
	if !r.take('{') {
		r.broken = true
		return dst, nil
	}
	dst = append(dst, '[')
	if r.take('}') {
		return append(dst, ']'), nil
	}
	for {
		var pr *problem
		switch {
		case len(r.rest) > 0 && r.rest[0] == '{' && p.element.kind == planArray:
			dst, pr = r.level(dst, p.element)
		case p.element.kind == planArray:
			r.broken = true // fewer dimensions than the type has
		default:
			dst, pr = r.element(dst, p.element)
		}
		if pr != nil || r.broken {
			return dst, pr
		}
		if r.take('}') {
			return append(dst, ']'), nil
		}
		if !r.take(',') {
			r.broken = true
			return dst, nil
		}
		dst = append(dst, ',')
	}
}

func (r *pgArray) element(dst []byte, p *plan) ([]byte, *problem) {
	text, quoted := r.text()
	if r.broken {
		return dst, nil
	}
	if !quoted && string(text) == "NULL" {
		return p.appendNull(dst, decode.Null)
	}
	if r.oid != 0 {
		v, refused := decode.TextValue(r.oid, text)
		if refused != nil {
			return dst, p.malformed(text)
		}
		return p.append(dst, &v, r.pol, r.a)
	}
	v := decode.Value{State: decode.Set, Kind: decode.Text, Bytes: text}
	switch p.kind {
	case planInt, planFloat, planDecimal:
		v.Kind = decode.Number
	case planBool:
		v.Kind = decode.Bool
		switch string(text) {
		case "t":
			v.Bytes = []byte("true")
		case "f":
			v.Bytes = []byte("false")
		}
	case planBytes:
		if len(text) >= 2 && text[0] == '\\' && text[1] == 'x' {
			v.Kind, v.Bytes = decode.Hex, text[2:]
		}
	case planMap, planStruct:
		v.Kind = decode.JSON
	default: // Postgres writes it as the text that the type reads
	}
	return p.append(dst, &v, r.pol, r.a)
}

// text reads one element's text, which is valid until the next call.
func (r *pgArray) text() (text []byte, quoted bool) {
	if r.take('"') {
		r.buf = r.buf[:0]
		for i := 0; i < len(r.rest); i++ {
			switch c := r.rest[i]; c {
			case '"':
				r.rest = r.rest[i+1:]
				return r.buf, true
			case '\\':
				if i++; i < len(r.rest) {
					r.buf = append(r.buf, r.rest[i])
				}
			default:
				r.buf = append(r.buf, c)
			}
		}
		r.broken = true
		return nil, true
	}
	for i, c := range r.rest {
		switch c {
		case ',', '}':
			text, r.rest = r.rest[:i], r.rest[i:]
			r.broken = i == 0 // an empty text would be quoted
			return text, false
		case '{', '"', '\\':
			r.broken = true
			return nil, false
		}
	}
	r.broken = true
	return nil, false
}
