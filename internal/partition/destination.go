package partition

import (
	"context"
	"fmt"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// Decoder turns a record into a change. A nil change without an error is a
// record that needs nothing of the destination. An error that is a
// *decode.Refusal makes the record poison; any other error stops the
// partition, whatever the policy, since it says nothing about the record.
// The change is valid until the next call.
type Decoder interface {
	Decode(rec *decode.Record) (*decode.OrderChange, error)
}

// Array is one request body under construction.
type Array interface {
	// Add appends a change, wholly or not at all. A *decode.Refusal makes the
	// record poison.
	Add(ch *decode.OrderChange) error
	Rows() int
	Bytes() int
	Reset()
}

// Destination is one table. Its methods are called by one goroutine. It must be
// comparable, such as a pointer: routes of one table share it.
type Destination interface {
	// NewArray makes the array that is filled, sent and reset in turn.
	NewArray() Array
	// Send blocks until the array is accepted, retrying by itself. It returns
	// a *decode.Refusal when the table or the array is refused, a
	// *feldera.IncarnationChanged, or an error of ctx. The outcome may be
	// unknown in the last case, and where a refusal is joined with
	// feldera.ErrOutcomeOpen.
	Send(ctx context.Context, a Array) (feldera.Token, error)
}

// Watcher follows completion tokens. fn is called on the watcher's goroutine:
// once at Ingested, once at Completed, or once with an error.
type Watcher interface {
	Watch(tok feldera.Token, fn func(feldera.Evidence))
}

// maxEncoders bounds how many versions of a relation are kept compiled.
const maxEncoders = 64

// ForTable makes a Destination of a Feldera table. The encoder is compiled
// from the relation that the decoder gives and kept per relation, by its
// address.
func ForTable(w *feldera.Writer, t *feldera.Table, p feldera.Policy) Destination {
	return &tableDestination{writer: w, table: t, policy: p, encoders: make(map[*decode.Relation]*feldera.Encoder)}
}

type tableDestination struct {
	writer   *feldera.Writer
	table    *feldera.Table
	policy   feldera.Policy
	encoders map[*decode.Relation]*feldera.Encoder
}

func (d *tableDestination) NewArray() Array { return &tableArray{dest: d} }

func (d *tableDestination) Send(ctx context.Context, a Array) (feldera.Token, error) {
	own, ok := a.(*tableArray)
	if !ok || own.dest != d {
		return feldera.Token{}, fmt.Errorf("send array: it was made by another destination than the one it is sent to")
	}
	return d.writer.Send(ctx, &own.array)
}

func (d *tableDestination) encoder(rel *decode.Relation) (*feldera.Encoder, error) {
	if e, ok := d.encoders[rel]; ok {
		return e, nil
	}
	e, err := feldera.NewEncoder(d.table, rel, d.policy)
	if err != nil {
		return nil, err
	}
	if len(d.encoders) >= maxEncoders {
		clear(d.encoders)
	}
	d.encoders[rel] = e
	return e, nil
}

type tableArray struct {
	dest  *tableDestination
	array feldera.Array
}

func (a *tableArray) Add(ch *decode.OrderChange) error {
	e, err := a.dest.encoder(ch.Relation)
	if err != nil {
		return err
	}
	return a.array.Add(e, ch)
}

func (a *tableArray) Rows() int  { return a.array.Rows() }
func (a *tableArray) Bytes() int { return a.array.Bytes() }
func (a *tableArray) Reset()     { a.array.Reset() }
