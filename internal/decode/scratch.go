package decode

import "errors"

// errExpands ends the decoding of a record whose values would need far more
// memory than the record has: a hostile one, or one that nests very much.
var errExpands = errors.New("its values, written out, are many times the size of the record")

const (
	// scratchKept is how much of a scratch stays allocated between records.
	scratchKept = 64 << 10
	// scratchExtra is what a scratch may use beside what the record's size
	// grants it, which is so many times its size.
	scratchExtra                 = 640 << 10
	scratchOfJSON, scratchOfAvro = 2, 3
)

// scratch is where values are written that are not a part of the record as it
// stands: text without its escapes, dates, digits. It is bounded: a record
// never takes more of it than a few times its own size and scratchExtra.
//
// Values alias it, so it never moves: when the first piece is full there is a
// second one, as large as the limit, and the first stays as it is.
type scratch struct {
	kept []byte // the first piece, empty
	buf  []byte // the piece that is being written
	rest int    // size of the second piece; 0 once it is in use
	err  error  // errExpands, from the first write that found no room
}

// reset makes the scratch empty, for a record of so many bytes, that many times
// of which it may use.
func (s *scratch) reset(payload, times int) {
	if s.kept == nil {
		s.kept = make([]byte, 0, scratchKept)
	}
	s.buf, s.rest, s.err = s.kept[:0], times*payload+scratchExtra, nil
}

// room makes sure that n bytes can be written behind the value that begins at
// start, which may move to another piece; start is where it begins then.
func (s *scratch) room(start, n int) (newStart int, ok bool) {
	if len(s.buf)+n <= cap(s.buf) {
		return start, true
	}
	begun := s.buf[start:]
	if s.err != nil || len(begun)+n > s.rest {
		s.err = errExpands
		return start, false
	}
	s.buf = append(make([]byte, 0, s.rest), begun...)
	s.rest = 0
	return 0, true
}

// writer writes one value. Once an error is set nothing more is written.
type writer struct {
	s     *scratch
	start int
}

func (s *scratch) begin() writer { return writer{s, len(s.buf)} }

// reserve gives the buffer to append up to n bytes to.
func (w *writer) reserve(n int) bool {
	var ok bool
	w.start, ok = w.s.room(w.start, n)
	return ok
}

func (w *writer) bytes(b []byte) {
	if w.reserve(len(b)) {
		w.s.buf = append(w.s.buf, b...)
	}
}

func (w *writer) string(b string) {
	if w.reserve(len(b)) {
		w.s.buf = append(w.s.buf, b...)
	}
}

func (w *writer) byte(c byte) {
	if w.reserve(1) {
		w.s.buf = append(w.s.buf, c)
	}
}

// grow appends with f, which writes at most n bytes.
func (w *writer) grow(n int, f func([]byte) []byte) {
	if w.reserve(n) {
		w.s.buf = f(w.s.buf)
	}
}

// value ends the value.
func (w *writer) value(k Kind) (Value, error) {
	if w.s.err != nil {
		return Value{}, w.s.err
	}
	end := len(w.s.buf)
	return Value{State: Set, Kind: k, Bytes: w.s.buf[w.start:end:end]}, nil
}
