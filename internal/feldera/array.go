package feldera

import (
	"errors"

	"holdfast/internal/decode"
)

// Array is one JSON array of row changes under construction: the unit that the
// engine takes whole or not at all, in one step. It holds changes of one
// table. It is reusable and not safe for concurrent use; while a [Writer]
// sends it, it is the writer's.
type Array struct {
	// Quiet keeps [Policy].OnAltered from being called: for changes that are
	// encoded to see whether they can be, and encoded again to be sent.
	Quiet bool

	table *Table
	// buf is '[' and the elements, without the ']'.
	buf []byte
	// ends are the offsets in buf behind each change. A change can have two
	// elements, a delete and an insert, which are never parted.
	ends     []int
	elements int
	// altered holds the alterations of the change being encoded.
	altered []alteration
	scratch []byte
}

type alteration struct {
	column string
	how    Alteration
}

// Add encodes one change with e. On an error the array is as before. Errors
// are *decode.Refusal, but for a change or encoder that does not belong here,
// which is a mistake of the caller. Nothing of ch is kept.
func (a *Array) Add(e *Encoder, ch *decode.OrderChange) error { return a.add(e, ch, false) }

// AddGone encodes, in place of a change, deletes of the rows that it is about:
// for a table with a key, from which all that there is is taken away later.
func (a *Array) AddGone(e *Encoder, ch *decode.OrderChange) error { return a.add(e, ch, true) }

func (a *Array) add(e *Encoder, ch *decode.OrderChange, gone bool) error {
	if ch.Relation != e.rel {
		return errOtherRelation
	}
	if a.table == nil {
		a.table = e.table
	}
	if a.table != e.table {
		return errors.New("encode: the array holds rows of table " + a.table.spelling + ", not of " + e.table.spelling)
	}
	if len(a.buf) == 0 {
		a.buf = append(a.buf, '[')
	}
	mark, elements := len(a.buf), a.elements
	a.altered = a.altered[:0]
	if p := e.encode(a, ch, gone); p != nil {
		a.buf, a.elements = a.buf[:mark], elements
		if mark == 1 {
			a.table = nil
		}
		return e.refusal(ch, p)
	}
	a.ends = append(a.ends, len(a.buf))
	if e.policy.OnAltered != nil && !a.Quiet {
		for _, alt := range a.altered {
			e.policy.OnAltered(e.table.Name, alt.column, alt.how)
		}
	}
	return nil
}

func (a *Array) openElement(head string) {
	if a.elements > 0 {
		a.buf = append(a.buf, ',')
	}
	a.elements++
	a.buf = append(a.buf, head...)
}

func (a *Array) closeElement() { a.buf = append(a.buf, '}', '}') }

// Rows is the number of changes in the array.
func (a *Array) Rows() int { return len(a.ends) }

// Records is the number of elements in the array, which is what the engine
// counts: a change of key is two.
func (a *Array) Records() int { return a.elements }

// Bytes is the length of Body.
func (a *Array) Bytes() int { return max(len(a.buf), 1) + 1 }

// BytesOf is the length of the request that [Writer.SendRows] makes of the
// changes lo to below hi.
func (a *Array) BytesOf(lo, hi int) int { return len(a.slice(lo, hi)) }

// Footprint is the memory that the array keeps across a Reset, in bytes.
func (a *Array) Footprint() int { return cap(a.buf) + cap(a.scratch) + 8*cap(a.ends) }

// Body is the array's text. It aliases the array until the next Add or Reset.
func (a *Array) Body() []byte {
	if len(a.buf) == 0 {
		return []byte("[]")
	}
	// One byte past the end, which the next Add overwrites.
	body := append(a.buf, ']') //nolint:gocritic // the array goes on without the bracket
	a.buf = body[:len(body)-1]
	return body
}

// Reset empties the array and keeps its memory.
func (a *Array) Reset() {
	a.table = nil
	a.buf, a.ends, a.altered, a.elements = a.buf[:0], a.ends[:0], a.altered[:0], 0
}

// Mark is a state of an array that it can be taken back to.
type Mark struct {
	table                  *Table
	buf, changes, elements int
}

// Mark gives the state now.
func (a *Array) Mark() Mark { return Mark{a.table, len(a.buf), len(a.ends), a.elements} }

// TakeBack drops the changes that were added since m was taken of this array,
// with no Reset in between. What they altered by policy stays counted.
func (a *Array) TakeBack(m Mark) {
	a.table, a.elements = m.table, m.elements
	a.buf, a.ends = a.buf[:m.buf], a.ends[:m.changes]
}

// slice gives the body that holds the changes from lo to below hi.
func (a *Array) slice(lo, hi int) []byte {
	if lo == 0 && hi == len(a.ends) {
		return a.Body()
	}
	start := 1
	if lo > 0 {
		start = a.ends[lo-1] + 1 // behind the comma
	}
	a.scratch = append(append(append(a.scratch[:0], '['), a.buf[start:a.ends[hi-1]]...), ']')
	return a.scratch
}
