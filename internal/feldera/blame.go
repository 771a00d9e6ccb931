package feldera

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"holdfast/internal/decode"
)

// blame says whose bytes the parse errors of an ingress answer are about.
//
// The engine's splitter belongs to the endpoint, and every process that writes
// the table shares it. What another request left there, of a process that died
// in the middle of a body or of one that is still sending, is put in front of
// ours, and the errors about the mixture are given to whoever completes it.
type blame uint8

const (
	// blameOpen: the answer does not show every error with its text.
	blameOpen blame = iota
	// blameOwn: every error is about a row of this body, or about all of it.
	blameOwn
	// blameOther: an error is about text that this body does not have.
	blameOther
)

// heads are the beginnings of an element, as an [Array] writes them.
var heads = [...][]byte{[]byte(`{"insert":`), []byte(`{"update":`), []byte(`{"delete":`)}

// blamed compares the texts that the parser complains about with body. total
// is how many errors it had: it lists only the last of very many.
//
// That a text merely occurs in the body is not enough: a stray "7" of another
// client occurs in most. It must be a whole row, in a row's place. A text that
// holds another's bytes can then not pass. It would be the other's beginning F
// with a part P of our body behind it. Is F not within a string, it leaves a
// bracket open which our balanced body cannot close: P is all of our body, and
// the whole is longer than it. Is it within a string, our first quote ends
// that string, and a bare word follows (`…[{"` insert): such a text is no JSON
// and cannot be a row in a body that is. The engine gives an error's text as
// it was sent and uncut.
func blamed(body []byte, total int, rows []rowFault) blame {
	if len(rows) == 0 || total > len(rows) {
		return blameOpen
	}
	at := 0
	for _, row := range rows {
		if row.InvalidText == nil || *row.InvalidText == "" {
			return blameOpen
		}
		text := []byte(*row.InvalidText)
		if bytes.Equal(text, body) {
			continue
		}
		// Errors come in the order of the rows, so that one pass finds them all.
		next := findRow(body, at, text)
		if next < 0 {
			return blameOther
		}
		at = next
	}
	return blameOwn
}

// findRow gives the offset behind the first row from at on that is text, -1
// where there is none.
func findRow(body []byte, at int, text []byte) int {
	if len(text) < 2 || text[0] != '{' || text[len(text)-1] != '}' {
		return -1
	}
	for {
		i := bytes.Index(body[at:], text)
		if i < 0 {
			return -1
		}
		start, end := at+i, at+i+len(text)
		if end < len(body) && body[end] == '}' {
			for _, head := range heads {
				if bytes.HasSuffix(body[:start], head) {
					return end
				}
			}
		}
		at = start + 1
	}
}

const (
	// enoughOpen is how many refusals in a row that do not show their texts
	// are believed: the first one has emptied the splitter.
	enoughOpen = 2
	// enoughOther is how many refusals in a row, all about the same text that
	// is not ours, end the attempts: then something is between us and the
	// engine, or a client repeats itself, and a person has to look.
	enoughOther = 8
)

// doubts counts the refusals in a row of one body that are not believed yet.
type doubts struct {
	open, other int
	text        string // of other
}

// weigh says whether a refusal counts. final is not nil where it does, or
// where no further attempt is to be made; else why says what is doubtful.
func (d *doubts) weigh(w *Writer, e *Error) (final *decode.Refusal, why error) {
	switch e.blame {
	case blameOwn:
		return w.rejected(e), nil
	case blameOpen:
		d.other = 0
		if d.open++; d.open >= enoughOpen {
			return w.rejected(e), nil
		}
		return nil, fmt.Errorf("refused without saying which rows, perhaps for a request that was cut before: %w", e)
	case blameOther:
	}
	d.open = 0
	if text := e.foreign(); text != d.text {
		d.other, d.text = 0, text
	}
	if d.other++; d.other >= enoughOther {
		return w.disturbed(e), nil
	}
	return nil, fmt.Errorf("refused for bytes that were not sent by this request: %w", e)
}

// foreign is what tells one text that is not ours from another, bounded.
func (e *Error) foreign() string {
	var b strings.Builder
	for _, row := range e.rows {
		if row.InvalidText != nil {
			b.WriteString(*row.InvalidText + "\n")
		}
	}
	return b.String()
}

// disturbed is the refusal for a table whose endpoint never gets clean. Its
// reason is not the one of refused rows: no row may be set aside for it.
func (w *Writer) disturbed(e *Error) *decode.Refusal {
	r := w.rejected(e)
	r.Reason = decode.ReasonSetup
	r.Why = fmt.Sprintf("%d times in a row the pipeline refused the request for the same text, which is not of this request; %s", enoughOther, r.Why)
	r.Expected = "an endpoint that no other client sends broken bodies to"
	r.Do = "find the client that writes to the table's endpoint with the same parameters, and stop it"
	return r
}

// asError gives the exchange that failed, nil where err is something else.
func asError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return nil
}
