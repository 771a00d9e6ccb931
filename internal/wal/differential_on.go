//go:build differential

package wal

import (
	"holdfast/internal/decode"
	"holdfast/test/decodecheck"
)

// alike holds what the decoder made of a message against pglogrepl's reading of
// it, in the daemons of the end-to-end tests. Origins, logical messages and the
// rows of transactions that a person has passed over are not decoded there; the
// recorded sessions of internal/decode have them. A difference ends the process.
func alike(msg []byte, m *decode.Message) {
	if err := decodecheck.Compare(msg, m); err != nil {
		panic("the decoder reads a message otherwise than pglogrepl: " + err.Error())
	}
}
