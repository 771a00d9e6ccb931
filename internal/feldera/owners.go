package feldera

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"holdfast/internal/decode"
)

// This file records who feeds a table. Whoever retracts rows that it did not
// see written (a TRUNCATE that is carried out, a resync, a repair) would take
// away those of anybody else, so it must be the only one. The pipeline is what
// all of them share, so that is where they say it: in rows of the progress
// table of a source of their own, which no decision about progress reads.
//
//	source "table:" and the table, lane the owner, epoch 1, slot 0
//
// Two that begin at the same moment cannot miss each other: each writes its row
// before it looks for others, and one of the two rows is completed last.

// ownerSource begins the source of such a row. The source of a daemon begins
// with the number of a Postgres cluster or the name of a Kafka cluster, neither
// of which has a colon.
const ownerSource = "table:"

// The words that stand in the column fingerprint of an owner's row.
const (
	ownerFeeds    = "feeds"
	ownerRetracts = "retracts"
)

// Owner is somebody who feeds a table.
type Owner struct {
	// Table as the engine knows it.
	Table string `json:"table"`
	// Name is pgsource, system identifier and slot, or kafkasink, cluster and
	// group.
	Name string `json:"owner"`
	// Retracts: it takes away rows that it did not write.
	Retracts bool `json:"retracts"`
	// Since is when it said so first in this pipeline.
	Since time.Time `json:"since"`
}

// PgsourceOwner is the name of a pgsource.
func PgsourceOwner(system, slot string) string { return "pgsource:" + system + "/" + slot }

// KafkasinkOwner is the name of all members of a group.
func KafkasinkOwner(cluster, group string) string { return "kafkasink:" + cluster + "/" + group }

// Owners is one owner's view of who feeds which table. It is safe for
// concurrent use.
type Owners struct {
	p    *ProgressStore
	name string
}

// Owners opens the record of owners in a progress table, for the owner of that
// name ("" only to look). The error is a *decode.Refusal where the program has
// no such table.
func (c *Client) Owners(s *Schema, progressTable, name string) (*Owners, error) {
	if len(name) > maxProgressName {
		return nil, fmt.Errorf("owners: the name has %d bytes, expected at most %d", len(name), maxProgressName)
	}
	p, err := c.Progress(s, progressTable, ownerSource, "")
	if err != nil {
		return nil, err
	}
	return &Owners{p: p, name: name}, nil
}

// Name gives the owner's.
func (o *Owners) Name() string { return o.name }

// List gives the owners of the tables, or of all tables where none is given,
// sorted by table and name. It sends nothing to the table: each owner waits
// until its row is completed before it sends anything else.
//
// Errors: *decode.Refusal, *[IncarnationChanged], or ctx's cause joined with
// the last reason.
func (o *Owners) List(ctx context.Context, tables ...*Table) (list []Owner, err error) {
	err = o.p.c.insist(ctx, "read the owners in the progress table", func() (err error) {
		list, err = o.list(ctx, tables)
		return err
	})
	slices.SortFunc(list, func(a, b Owner) int {
		return cmp.Or(cmp.Compare(a.Table, b.Table), cmp.Compare(a.Name, b.Name))
	})
	return list, err
}

// list makes one attempt. The incarnation is asked for behind the answer, since
// that says nothing of it: one of another incarnation is seen then.
func (o *Owners) list(ctx context.Context, tables []*Table) (list []Owner, err error) {
	err = o.p.query(ctx, func(row ProgressRow) {
		owner := Owner{
			Table: strings.TrimPrefix(row.Source, ownerSource), Name: row.Lane,
			Retracts: row.Fingerprint == ownerRetracts, Since: row.RecordedAt,
		}
		if len(tables) == 0 || slices.ContainsFunc(tables, func(t *Table) bool { return t.Name == owner.Table }) {
			list = append(list, owner)
		}
	})
	if err != nil {
		return nil, err
	}
	now, err := o.p.c.Incarnation(ctx)
	if err != nil {
		return nil, err
	}
	return list, o.p.c.sameIncarnation(now)
}

// Claim says that the owner feeds the tables, and returns when that is
// completed, or, where the open transaction of own is in the way, ingested.
// retracts says what makes it take away rows that it did not write, "" for
// nothing: such an owner and any other exclude each other, and whoever comes
// second is refused.
//
// Errors are those of List. After one that is no refusal the rows may be there.
func (o *Owners) Claim(ctx context.Context, own *Intent, retracts string, tables ...*Table) error {
	known, err := o.List(ctx, tables...)
	if err != nil {
		return err
	}
	var added []Owner
	for attempt := 1; ; attempt++ {
		if err := o.conflict(known, retracts); err != nil {
			// Where nobody was seen before, both have come at the same time, and
			// perhaps both go.
			return errors.Join(err, o.Remove(ctx, added...))
		}
		said := o.unsaid(known, retracts != "", tables)
		switch {
		case len(said) == 0:
			return nil
		case attempt > maxClaims:
			return &decode.Refusal{
				Reason: decode.ReasonSetup, What: "owner of a table", Where: fmt.Sprintf("table %s, owner %s", identifier(said[0].Table), o.name),
				Why:      fmt.Sprintf("the row that says so was written and completed %d times, and is not in the table %s", maxClaims, o.p.writer.table.spelling),
				Expected: "a table that nobody but the daemons writes to", Do: "find out who takes its rows away",
			}
		}
		within, err := o.within(ctx, own)
		if err != nil {
			return err
		}
		if err := o.write(ctx, decode.Insert, within, said); err != nil || within {
			return err // what is within is not seen yet: whoever retracts asks again
		}
		for _, w := range said {
			if w.Since.IsZero() {
				added = append(added, w)
			}
		}
		// Now what is there is seen, by whoever comes later too. A row that is not
		// there after all is written again: see mixing.
		if known, err = o.List(ctx, tables...); err != nil {
			return err
		}
	}
}

// maxClaims is how often a row is written that is not there afterwards.
const maxClaims = 5

// unsaid gives the rows that are missing or say something else.
func (o *Owners) unsaid(known []Owner, retracts bool, tables []*Table) (said []Owner) {
	for _, t := range tables {
		mine := Owner{Table: t.Name, Name: o.name, Retracts: retracts}
		i := slices.IndexFunc(known, func(k Owner) bool { return k.Table == mine.Table && k.Name == mine.Name })
		if i >= 0 {
			if known[i].Retracts == retracts {
				continue
			}
			mine.Since = known[i].Since
		}
		said = append(said, mine)
	}
	return said
}

// within tells whether the transaction of own is open, so that nothing
// completes before the caller has committed it.
func (o *Owners) within(ctx context.Context, own *Intent) (within bool, err error) {
	if own == nil {
		return false, nil
	}
	err = o.p.c.insist(ctx, "look at the pipeline's transaction", func() error {
		st, err := o.p.c.TransactionState(ctx)
		within = err == nil && st.API == apiStarted && own.matches(&st)
		return err
	})
	return within, err
}

// conflict refuses to share a table where one of those who feed it retracts.
func (o *Owners) conflict(owners []Owner, retracts string) error {
	for i := range owners {
		if owner := &owners[i]; owner.Name != o.name && (retracts != "" || owner.Retracts) {
			return o.refuse(owner, retracts)
		}
	}
	return nil
}

// Sole refuses to retract rows from a table that somebody else feeds too. what
// is about to do so. The caller asks right before it, since others can come at
// any time; what they send between the answer and the retraction is theirs to
// lose.
func (o *Owners) Sole(ctx context.Context, t *Table, what string) error {
	owners, err := o.List(ctx, t)
	if err != nil {
		return err
	}
	return o.conflict(owners, what)
}

func (o *Owners) refuse(other *Owner, retracts string) error {
	why := fmt.Sprintf("%s feeds it too, since %s", other.Name, other.Since.UTC().Format(time.RFC3339))
	if retracts != "" {
		why += fmt.Sprintf(", and %s would take away rows that %s wrote, or that it is about to write", retracts, other.Name)
	}
	if other.Retracts {
		why += fmt.Sprintf(", and takes away rows that %s wrote", o.name)
	}
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "owner of a table", Where: fmt.Sprintf("table %s, owner %s", identifier(other.Table), o.name),
		Why: why, Expected: "one source alone for a table from which rows are taken away that it did not write",
		Do: fmt.Sprintf("give one of the two a Feldera table of its own; or, if %s is gone for good, run: pgsource owners remove %s -yes", other.Name, other.Name),
	}
}

// OthersText says in one line who else feeds the tables than self, bounded.
func OthersText(list []Owner, self string) string {
	const most = 10
	var parts []string
	for _, o := range list {
		if o.Name != self {
			parts = append(parts, fmt.Sprintf("table %s is fed by %s too", o.Table, o.Name))
		}
	}
	switch {
	case len(parts) == 0:
		return "no other owner feeds the tables"
	case len(parts) > most:
		parts = append(parts[:most], fmt.Sprintf("and %d more", len(parts)-most))
	}
	return strings.Join(parts, "; ")
}

// Remove takes owners out of the record: those that are gone for good. One that
// runs says it again at its next start only. Errors are those of List.
func (o *Owners) Remove(ctx context.Context, owners ...Owner) error {
	if len(owners) == 0 {
		return nil
	}
	return o.write(ctx, decode.Delete, false, owners)
}

// write inserts or deletes the rows of owners and waits until that is completed,
// or ingested, within a transaction of our own.
func (o *Owners) write(ctx context.Context, op decode.Op, within bool, owners []Owner) error {
	var incarnation string
	const what = "record the owners in the progress table"
	err := o.p.c.insist(ctx, what, func() (err error) {
		if incarnation, err = o.p.c.Incarnation(ctx); err == nil {
			err = o.p.c.sameIncarnation(incarnation)
		}
		return err
	})
	if err != nil {
		return err
	}
	var a Array
	for i := range owners {
		ch := decode.OrderChange{Op: op, Relation: o.p.rel}
		if values := owners[i].row(incarnation).values(); op == decode.Delete {
			ch.Before = values
		} else {
			ch.After = values
		}
		if err := a.Add(o.p.enc, &ch); err != nil {
			return err
		}
	}
	tok, err := o.p.writer.SendOnly(ctx, &a, incarnation)
	switch {
	case err != nil:
		return err
	case within:
		return o.p.c.awaitIngested(ctx, what, []Token{tok})
	}
	return o.p.c.awaitCompleted(ctx, what, []Token{tok})
}

func (w *Owner) row(incarnation string) *ProgressRow {
	r := &ProgressRow{
		Source: ownerSource + w.Table, Lane: w.Name, Epoch: 1, Incarnation: incarnation,
		Fingerprint: ownerFeeds, RecordedAt: w.Since,
	}
	if w.Retracts {
		r.Fingerprint = ownerRetracts
	}
	if w.Since.IsZero() {
		r.RecordedAt = time.Now()
	}
	return r
}
