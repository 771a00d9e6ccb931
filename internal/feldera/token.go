package feldera

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"

	"github.com/go-json-experiment/json"
)

// Token is the receipt for accepted rows. It is opaque but for the incarnation
// that made it.
type Token struct {
	// Raw is sent back to the pipeline as it came.
	Raw string
	// Incarnation is the process that accepted the rows.
	Incarnation string

	// lane and seq order the tokens of one writer: what a later one covers, an
	// earlier one of the same lane is covered by too.
	lane string
	seq  uint64
}

// maxToken bounds a token's length, in bytes.
const maxToken = 4096

// parseToken reads the incarnation out of a raw token.
func parseToken(raw string) (Token, error) {
	if raw == "" || len(raw) > maxToken {
		return Token{}, fmt.Errorf("completion token has %d bytes, expected 1 to %d", len(raw), maxToken)
	}
	plain, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(raw, "="))
	if err != nil {
		return Token{}, errors.New("completion token is not base64url")
	}
	var t struct {
		U string `json:"u"`
	}
	if err := json.Unmarshal(plain, &t); err != nil {
		return Token{}, errors.New("completion token does not hold a JSON object")
	}
	if t.U == "" || len(t.U) > maxIncarnation || clip(t.U, maxIncarnation) != t.U {
		return Token{}, errors.New("completion token names no incarnation")
	}
	return Token{Raw: raw, Incarnation: t.U}, nil
}
