package decode

import "time"

// Record is one record of a Kafka topic as a decoder needs it. Nothing of it is
// copied or changed, and nothing of it is kept beyond the next call.
type Record struct {
	// Key and Value are nil where the record has none; a record without a value
	// is a tombstone.
	Key, Value []byte
	Headers    []Header
	// Time is the record's timestamp, zero where it has none.
	Time     time.Time
	Position Position
}

// Header is one header of a Record. A name can stand more than once.
type Header struct {
	Key   string
	Value []byte
}

// Header gives the value of the last header of that name.
func (r *Record) Header(name string) ([]byte, bool) {
	for i := len(r.Headers) - 1; i >= 0; i-- {
		if r.Headers[i].Key == name {
			return r.Headers[i].Value, true
		}
	}
	return nil, false
}
