package wal

import (
	"context"
)

// Intent is the record by which a Feldera transaction that this pgsource
// opened is known as its own after a crash. The interface of a pipeline gives
// a transaction no owner: without the record it would be a stranger's, and
// everything would wait for it for ever.
type Intent struct {
	// Incarnation is the pipeline process in which it was opened.
	Incarnation string
	// ID is the transaction's; 0 while it is about to be asked for.
	ID int64
	// Through is the end LSN of the last Postgres transaction that belongs in
	// it. Some rows of any transaction up to it may be in it already: it must
	// not be committed before all of them are.
	Through uint64
}

// IntentStore keeps the last intent. Its methods are called by one goroutine
// at a time.
type IntentStore interface {
	// Intent gives the one that was recorded last, the zero Intent for none.
	Intent() Intent
	// RecordIntent keeps in, in place of the one before, and returns when it is
	// as durable as the store can make it. Its error stops what was to be
	// opened. The zero Intent takes the record away.
	RecordIntent(ctx context.Context, in Intent) error
}

// intentsLast tells whether a recorded intent outlives the process. Where it
// does not, no transaction is opened: a crash would leave it open, nobody could
// know whose it is, and the whole pipeline would stand still.
func (c *Config) intentsLast() bool {
	if k, ok := c.Intents.(*keeper); ok {
		_, none := k.store.(noStore)
		return !none
	}
	return true
}
