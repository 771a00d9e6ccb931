package felderasim

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"holdfast/test/felderasim/core"
)

// The engine's queries answer through Arrow, whose JSON is another one than
// that of input rows: binary data inside of an ARRAY or a ROW is a string of
// hexadecimal digits, a VARIANT a string with JSON in it, and a MAP with other
// keys than text has no form: the answer, whose status was 200, ends with an
// error.

// unwritableMark stands in front of what Arrow cannot write. No JSON begins
// with it.
const unwritableMark = "\x00"

// unwritable gives the error that ends the answer at this row, "" for none.
func unwritable(vals []any) string {
	for _, v := range vals {
		if text, ok := v.(string); ok && strings.HasPrefix(text, unwritableMark) {
			return strings.TrimPrefix(text, unwritableMark)
		}
	}
	return ""
}

// arrowText writes a value that is held as compact JSON.
func arrowText(t *core.Type, raw string) string {
	var b bytes.Buffer
	if err := arrowValue(&b, t, jsontext.Value(raw)); err != nil {
		return unwritableMark + err.Error()
	}
	return b.String()
}

func arrowValue(b *bytes.Buffer, t *core.Type, raw jsontext.Value) error {
	if raw.Kind() == 'n' {
		b.WriteString("null")
		return nil
	}
	text := string(raw)
	if raw.Kind() == '"' {
		unquoted, err := jsontext.AppendUnquote(nil, raw)
		if err != nil {
			return err
		}
		text = string(unquoted)
	}
	switch t.Kind {
	case core.Array, core.Map, core.Struct:
		return arrowParts(b, t, raw)
	case core.Binary, core.Varbinary:
		var digits []byte
		for _, n := range strings.FieldsFunc(string(raw), func(r rune) bool { return strings.ContainsRune("[], ", r) }) {
			one, err := strconv.ParseUint(n, 10, 8)
			if err != nil {
				return err
			}
			digits = append(digits, byte(one))
		}
		b.WriteString(`"` + hex.EncodeToString(digits) + `"`)
	case core.Decimal:
		b.WriteString(text)
	case core.Timestamp, core.TimestampTZ:
		b.Write(core.QuoteJSON(renderTimestamp(text)))
	case core.Variant:
		b.Write(core.QuoteJSON(string(raw)))
	default:
		b.WriteString(string(raw))
	}
	return nil
}

func arrowParts(b *bytes.Buffer, t *core.Type, raw jsontext.Value) error {
	if t.Kind == core.Map && t.Key.Kind != core.Char && t.Key.Kind != core.Varchar {
		return fmt.Errorf("Json error: Only UTF8 keys supported by JSON MapArray Writer: got %s", t.Key.Kind) //nolint:staticcheck // the engine's words
	}
	dec := jsontext.NewDecoder(bytes.NewReader(raw))
	open, err := dec.ReadToken()
	if err != nil {
		return err
	}
	b.WriteString(open.String())
	for n := 0; dec.PeekKind() != ']' && dec.PeekKind() != '}'; n++ {
		if n > 0 {
			b.WriteByte(',')
		}
		part := t.Elem
		if t.Kind != core.Array {
			name, err := dec.ReadToken()
			if err != nil {
				return err
			}
			b.Write(core.QuoteJSON(name.String()))
			b.WriteByte(':')
			part = t.Value
			for _, f := range t.Fields {
				if f.Name == name.String() {
					part = f.Type
				}
			}
		}
		value, err := dec.ReadValue()
		if err != nil {
			return err
		}
		if err := arrowValue(b, part, value); err != nil {
			return err
		}
	}
	end, err := dec.ReadToken()
	if err == nil {
		b.WriteString(end.String())
	}
	return err
}
