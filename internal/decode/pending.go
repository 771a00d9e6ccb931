package decode

import "fmt"

// PendingError is the error of a decoder that needs a schema which is not here yet.
// It says nothing about the record: its partition waits, and the record is
// decoded again once Ready is closed.
type PendingError struct {
	// What is waited for: "schema 7".
	What string
	// Why it is not here, by the last attempt; nil before the first has ended.
	Why error
	// Ready is closed when it is worth looking again.
	Ready <-chan struct{}
}

func (p *PendingError) Error() string {
	if p.Why == nil {
		return fmt.Sprintf("waits for %s", p.What)
	}
	return fmt.Sprintf("waits for %s: %v", p.What, p.Why)
}
