package feldera

import (
	"encoding/binary"
	"errors"

	"holdfast/internal/decode"
)

// AppendKey appends the primary key of a row in a form in which two keys are
// equal exactly when the engine takes them for one: 1.0 and 1.00 of a DECIMAL
// are. A column that row does not have is taken from fill, which may be nil.
//
// Errors are *decode.Refusal where a column of the key has no value, or one
// that the table cannot hold.
func (e *Encoder) AppendKey(dst []byte, row, fill []decode.Value) ([]byte, error) {
	if len(e.keys) == 0 {
		return dst, errors.New("broken invariant: table " + e.table.spelling + " has no key")
	}
	var unused Array // nothing in a key is altered, so nothing of it is counted
	for _, k := range e.keys {
		c := &e.cols[k]
		v := &row[c.source]
		if v.State != decode.Set && fill != nil {
			v = &fill[c.source]
		}
		if v.State != decode.Set {
			return dst, &decode.Refusal{
				Reason: decode.ReasonIdentity, What: "row", Where: "table " + e.table.spelling + ", column " + c.plan.name,
				Why: "it does not carry the column of the key", Expected: "every column of the key with a value", Do: e.fullIdentity(),
			}
		}
		mark := len(dst)
		dst = append(dst, 0, 0, 0, 0) // the length, so that two columns cannot pass for two others
		var p *problem
		if dst, p = c.append(dst, v, &exactly, &unused); p != nil {
			return dst[:mark], e.refusal(&decode.OrderChange{Op: decode.Update, Relation: e.rel, After: row}, p)
		}
		if c.plan.kind == planFloat || c.plan.kind == planDecimal {
			written := dst[mark+4:]
			if n := len(written); n >= 2 && written[0] == '"' && written[n-1] == '"' {
				written = written[1 : n-1]
			}
			dst = append(dst[:mark+4], c.plan.canonical(written)...)
		}
		binary.BigEndian.PutUint32(dst[mark:], uint32(len(dst)-mark-4)) //nolint:gosec // a value is below 1 GiB
	}
	return dst, nil
}

// KeyColumns gives the names of the source columns that the table's primary key
// is taken from, in the order of the table's columns; nil for a table without
// one.
func (e *Encoder) KeyColumns() []string {
	var names []string
	for _, k := range e.keys {
		names = append(names, e.rel.Columns[e.cols[k].source].Name)
	}
	return names
}
