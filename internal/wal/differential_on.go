//go:build differential

package wal

import (
	"holdfast/internal/decode"
	"holdfast/test/decodecheck"
)

// alike holds what the decoder made of a message against pglogrepl's reading of
// it, in the daemons of the end-to-end tests: all that their servers send is
// compared. A difference ends the process.
func alike(msg []byte, m *decode.Message) {
	if err := decodecheck.Compare(msg, m); err != nil {
		panic("the decoder reads a message otherwise than pglogrepl: " + err.Error())
	}
}
