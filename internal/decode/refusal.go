package decode

import (
	"fmt"
	"strings"
)

// Reason is the closed set of causes for which something is refused. It is a
// metric label, so it never carries text from the input.
type Reason string

// The reasons. A new one is added here and nowhere else.
const (
	// ReasonMalformed: bytes that are not what the format allows.
	ReasonMalformed Reason = "malformed"
	// ReasonUnsupported: valid, but something this program does not handle.
	ReasonUnsupported Reason = "unsupported"
	// ReasonValue: a value that the destination's column cannot hold.
	ReasonValue Reason = "value"
	// ReasonSchema: source and destination table do not fit each other.
	ReasonSchema Reason = "schema"
	// ReasonIdentity: a change without a usable key.
	ReasonIdentity Reason = "identity"
	// ReasonLimit: larger than a configured limit.
	ReasonLimit Reason = "limit"
	// ReasonRejected: the destination refused it.
	ReasonRejected Reason = "rejected"
	// ReasonSetup: a server or object is not set up as needed.
	ReasonSetup Reason = "setup"
	// ReasonGap: the source no longer has what must come next.
	ReasonGap Reason = "gap"
)

// Refusal is an error that retrying cannot mend: a person has to act. It says
// what was refused, where it stands, why, what was expected and what to do.
// Empty parts are left out of the message. It never carries a secret.
type Refusal struct {
	Reason   Reason
	What     string // "insert", "publication", …
	Where    string // table, key, column, LSN or topic[partition]@offset
	Why      string
	Expected string
	Do       string // the action or statement that mends it
	Err      error  // the cause, where there is one
}

// Error gives one sentence with all the parts, such as "slot holdfast: the
// server has none of this name; to mend it: …".
func (r *Refusal) Error() string {
	var b strings.Builder
	b.WriteString(r.What)
	if r.Where != "" {
		if strings.Contains(r.Where, " ") {
			b.WriteString(",") // more than a name: "insert, table orders, key id=1: …"
		}
		b.WriteString(" " + r.Where)
	}
	b.WriteString(": ")
	b.WriteString(r.Why)
	if r.Expected != "" {
		fmt.Fprintf(&b, "; expected %s", r.Expected)
	}
	if r.Do != "" {
		fmt.Fprintf(&b, "; to mend it: %s", r.Do)
	}
	if r.Err != nil {
		fmt.Fprintf(&b, " (%v)", r.Err)
	}
	return b.String()
}

// Unwrap gives the cause.
func (r *Refusal) Unwrap() error { return r.Err }
