package decode

// node is one value of a message as it stands in it: exactly its bytes, and
// what its schema says about it.
type node struct {
	raw  []byte
	con  *connectType // JSON: nil where no schema tells
	avro *avroType    // Avro: never nil
}

// walker walks over the members of a record.
type walker struct {
	src   []byte
	pos   int
	con   *connectType
	avro  *avroType
	field int // of avro, the next
}

// encoding is how messages are written as bytes: JSON or Avro. The shapes of
// messages (rows, rows with an operation, Debezium's envelope) are read through
// it. What it gives is valid until the next open of the same encoding.
type encoding interface {
	// open checks one message, key or value, and gives its root. Errors are
	// *Refusal without a place, *PendingError, or say what is wrong with the bytes.
	open(rec *Record, part part) (node, error)
	null(n node) bool
	// empty tells that a root is null although the record has a value, which
	// means the same as a record without one.
	empty(n node) bool
	// record tells whether n has members to walk over.
	record(n node) bool
	walk(n node) walker
	// next gives the next member of a walk; ok is false after the last.
	next(c *walker) (name []byte, n node, ok bool, err error)
	// value gives a value in the form of a column.
	value(n node) (Value, error)
	// describe says what n is, for a message: "a JSON array".
	describe(n node) string
}

// part is one of the two halves of a record.
type part uint8

const (
	partValue part = iota
	partKey
)

func (p part) of(rec *Record) []byte {
	if p == partKey {
		return rec.Key
	}
	return rec.Value
}
