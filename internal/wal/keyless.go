package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// This file is about source tables without a key. Feldera can have them in
// three ways: not at all; as a bag of equal rows, which needs whole old rows
// (REPLICA IDENTITY FULL) and counts a row twice that is sent twice; or, if rows
// are only ever inserted, under identity columns, which say where a row stood
// in the WAL and so are the same each time that it is sent.

// sourceOf names a relation among all that can feed a table. The slot is part
// of it: two slots of one table can have different rows of a transaction, by
// the row filters of their publications, and would count them alike.
func (a *attempt) sourceOf(rel *decode.Relation) string {
	return a.ready.identity.system + "/" + a.s.cfg.Slot + "/" + rel.String()
}

// countAnew begins a transaction: its rows are counted for each table by
// itself. Rows of other tables must not matter: which of those the stream has
// can differ from one reading to the next, when the publication was changed
// while the transaction ran.
func (d *deliverer) countAnew() {
	for _, out := range d.outputs {
		out.sequence = 0
	}
}

// checkIdentity holds what identifies a row in the source against what does in
// Feldera, before streaming.
func checkIdentity(rel *decode.Relation, target *feldera.Table) error {
	identity, err := target.Identity()
	if err != nil {
		return err
	}
	var key []string
	for i := range rel.Columns {
		if rel.Columns[i].Key {
			key = append(key, rel.Columns[i].Name)
		}
	}
	name := nameOf(rel).String()
	full := "ALTER TABLE " + name + " REPLICA IDENTITY FULL"
	nothing := "if its rows are only ever inserted, ALTER TABLE " + name + " REPLICA IDENTITY NOTHING, after which Postgres itself refuses updates and deletes of it"
	refuse := func(why, expected, do string) error {
		return &decode.Refusal{Reason: decode.ReasonIdentity, What: "source table", Where: rel.String(), Why: why, Expected: expected, Do: do}
	}
	keys := strings.Join(feldera.IdentityKey(), ", ")
	switch {
	case identity && rel.Identity == decode.IdentityFull:
		return refuse(fmt.Sprintf("its updates and deletes are published, and the Feldera table %s identifies rows by where each one stood in the WAL; the old row that comes with an update stands elsewhere, and does not tell which of several equal rows it means", target.Spelling()),
			"a source table that takes inserts alone, for a PRIMARY KEY of identity columns",
			nothing+"; or take the identity columns out of the Feldera table and accept that rows which are sent again after a crash count twice")
	case identity && len(key) > 0:
		return refuse(fmt.Sprintf("it has a key, (%s), and the Feldera table %s identifies rows by where each one stood in the WAL, under which an update would be one row more", strings.Join(key, ", "), target.Spelling()),
			"identity columns for tables without a key alone",
			fmt.Sprintf("declare PRIMARY KEY (%s) in Feldera in place of the identity columns; or, %s", strings.Join(key, ", "), nothing))
	case identity:
		return nil
	case len(key) == 0:
		return refuse("it has no usable replica identity, so Postgres would refuse its updates and deletes once it is published",
			"a primary key; REPLICA IDENTITY FULL; or, for a table that only takes inserts, a Feldera table with identity columns",
			fmt.Sprintf("%s, or give it a primary key; or, if its rows are only ever inserted, declare in Feldera PRIMARY KEY (%s), as pgsource feldera-sql prints it", full, keys))
	case !target.HasKey() && rel.Identity != decode.IdentityFull:
		return refuse(fmt.Sprintf("the Feldera table %s has no PRIMARY KEY, so an update or delete needs the whole old row, which the stream carries only under REPLICA IDENTITY FULL", target.Spelling()),
			"a key on the Feldera table, or whole old rows",
			fmt.Sprintf("declare the PRIMARY KEY in Feldera; or %s, which helps only changes made after it, and accept duplicates after a crash", full))
	}
	return nil
}

// unidentified is a table of which Postgres refuses every UPDATE and DELETE from
// the moment in which a publication of updates and deletes has it, and does so to
// whoever writes it.
type unidentified struct {
	name string // quoted, with its schema
	why  string // behind the name
	do   string
}

// namesOf joins the tables' names.
func namesOf(list []unidentified) string {
	names := make([]string, len(list))
	for i, u := range list {
		names[i] = u.name
	}
	return strings.Join(names, ", ")
}

// withoutIdentity gives those of the tables whose rows nothing identifies in the
// stream: there is no replica identity, or it is FULL and has generated columns,
// which PostgreSQL 18 and later do not take where they are not published. Tables
// that do not exist are another check's.
func withoutIdentity(ctx context.Context, conn *pgx.Conn, tables []Table) ([]unidentified, error) {
	var list []unidentified
	for _, t := range tables {
		rel, err := catalogueRelation(ctx, conn, "", t)
		if _, refused := errors.AsType[*decode.Refusal](err); refused {
			continue
		}
		if err != nil {
			return nil, err
		}
		name := quoteIdentifier(t.Schema) + "." + quoteIdentifier(t.Name)
		if !hasIdentity(rel) {
			list = append(list, unidentified{name, "has no replica identity", "give it a primary key, or ALTER TABLE … REPLICA IDENTITY FULL"})
			continue
		}
		if rel.Identity != decode.IdentityFull {
			continue
		}
		var refused bool
		err = conn.QueryRow(ctx, `SELECT current_setting('server_version_num')::int >= 180000
			AND EXISTS (SELECT FROM pg_attribute WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped AND attgenerated <> '')`, rel.ID).Scan(&refused)
		if err != nil {
			return nil, classify("look up the generated columns of "+rel.String(), err)
		}
		if refused {
			list = append(list, unidentified{name, "has generated columns in its REPLICA IDENTITY FULL", "give it a primary key and ALTER TABLE … REPLICA IDENTITY DEFAULT"})
		}
	}
	return list, nil
}

// hasIdentity tells whether Postgres can publish updates and deletes of it.
func hasIdentity(rel *decode.Relation) bool {
	if rel.Identity == decode.IdentityFull {
		return true // of a table without columns too
	}
	for i := range rel.Columns {
		if rel.Columns[i].Key {
			return true
		}
	}
	return false
}

// publishAdvice is what publishes the tables, behind what that does to writers
// of those without a replica identity.
func publishAdvice(ctx context.Context, conn *pgx.Conn, tables []Table, do string) (string, error) {
	list, err := withoutIdentity(ctx, conn, tables)
	if err != nil || len(list) == 0 {
		return do, err
	}
	return refusedWrites(list) + "; then " + do, nil
}

// refusedWrites says what publishing such tables does.
func refusedWrites(list []unidentified) string {
	var which, mend []string
	for _, u := range list {
		which = append(which, u.name+" "+u.why)
		if !slices.Contains(mend, u.do) {
			mend = append(mend, u.do)
		}
	}
	return fmt.Sprintf("BEFORE that, know that %s: once it is published, Postgres refuses every UPDATE and DELETE of it at the source; if its rows are ever updated or deleted, first %s",
		strings.Join(which, ", "), strings.Join(mend, "; "))
}
