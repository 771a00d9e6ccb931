package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// retractsByTruncate is what takes away rows, whoever wrote them.
const retractsByTruncate = "PGSOURCE_TRUNCATE=delete_all"

// openOwners opens the record of who feeds which table; nil where the pipeline
// has none.
func (s *Source) openOwners(schema *feldera.Schema, system string) (*feldera.Owners, error) {
	if s.cfg.OwnersTable == "" {
		return nil, nil //nolint:nilnil // no record is an answer
	}
	if _, err := schema.Table(s.cfg.OwnersTable); err != nil {
		return nil, nil //nolint:nilnil,nilerr // the program has no such table: no record
	}
	return s.cfg.Pipeline.Owners(schema, s.cfg.OwnersTable, feldera.PgsourceOwner(system, s.cfg.Slot))
}

// own says in the pipeline that this pgsource feeds the tables, before a row is
// sent. Where it is to take away rows whoever wrote them, nobody else may feed
// the table, and the other way round: whoever comes second is refused.
func (d *deliverer) own(work context.Context) error {
	s := d.a.s
	owners, err := s.openOwners(d.a.ready.schema, d.a.ready.identity.system)
	if err != nil {
		return err
	}
	retracts := ""
	if d.cfg.Truncate == TruncateDeleteAll {
		retracts = retractsByTruncate
	}
	if owners == nil {
		st := Status{Check: CheckOwners, OK: true, Message: "who feeds the tables is not recorded, since the pipeline has no table for it"}
		if retracts != "" {
			st.OK, st.Works = false, true
			st.Message += ": " + retracts + " takes away the rows of others too"
			st.Hint = "declare the table of PGSOURCE_PROGRESS_TABLE in the pipeline: pgsource feldera-sql prints it"
		}
		d.cfg.Report(st)
		return nil
	}
	var own *feldera.Intent
	if d.opened != nil {
		in := d.opened.tx.Intent()
		own = &in
	}
	tables := make([]*feldera.Table, 0, len(d.a.ready.tables))
	for _, t := range d.a.ready.tables {
		tables = append(tables, t)
	}
	slices.SortFunc(tables, func(a, b *feldera.Table) int { return strings.Compare(a.Name, b.Name) })
	var list []feldera.Owner
	err = d.patiently(func() (err error) {
		if err := owners.Claim(work, own, retracts, tables...); err != nil {
			return err
		}
		list, err = owners.List(work, tables...)
		return err
	})
	if refused, ok := errors.AsType[*decode.Refusal](err); ok {
		d.cfg.Report(Status{Check: CheckOwners, Blocking: true, Message: refused.Error(), Hint: refused.Do})
	}
	if err != nil {
		return fmt.Errorf("say who feeds the tables: %w", err)
	}
	d.owners = owners
	d.cfg.Report(Status{Check: CheckOwners, OK: true, Message: feldera.OthersText(list, owners.Name())})
	return nil
}

// sole refuses to take away rows from a table that somebody else feeds too,
// right before what is about to. Where nothing is recorded nobody knows.
func (d *deliverer) sole(work context.Context, table *feldera.Table, what string) error {
	if d.owners == nil {
		return nil
	}
	return d.patiently(func() error { return d.owners.Sole(work, table, what) })
}

// Owners gives who feeds the pipeline's tables, of all that it has.
func (s *Source) Owners(ctx context.Context) ([]feldera.Owner, error) {
	owners, err := s.recordedOwners(ctx)
	if err != nil {
		return nil, err
	}
	return owners.List(ctx)
}

// RemoveOwner takes an owner out of the record, for some tables or, where none
// is named, for all. sure is told what it has and has to agree. It gives what
// was removed.
func (s *Source) RemoveOwner(ctx context.Context, name string, tables []string, sure func([]feldera.Owner) error) ([]feldera.Owner, error) {
	owners, err := s.recordedOwners(ctx)
	if err != nil {
		return nil, err
	}
	list, err := owners.List(ctx)
	if err != nil {
		return nil, err
	}
	gone := slices.DeleteFunc(slices.Clone(list), func(o feldera.Owner) bool {
		return o.Name != name || len(tables) > 0 && !slices.Contains(tables, o.Table)
	})
	if len(gone) == 0 {
		names := make([]string, 0, len(list))
		for _, o := range list {
			names = append(names, fmt.Sprintf("%s of %s", o.Name, o.Table))
		}
		return nil, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "owner", Where: name, Why: "it is not recorded for these tables",
			Expected: "one of: " + strings.Join(names[:min(len(names), 20)], ", "), Do: "run: pgsource owners show",
		}
	}
	if err := sure(gone); err != nil {
		return nil, err
	}
	return gone, owners.Remove(ctx, gone...)
}

// recordedOwners opens the record for a verb, which owns nothing.
func (s *Source) recordedOwners(ctx context.Context) (*feldera.Owners, error) {
	schema, err := s.cfg.Pipeline.Describe(ctx)
	if err != nil {
		return nil, fmt.Errorf("describe the pipeline: %w", err)
	}
	return s.cfg.Pipeline.Owners(schema, s.cfg.OwnersTable, "")
}
