package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
)

// checkFilter refuses a row filter that reads a column outside the replica
// identity: an old row comes with that alone, so Postgres refuses every update and
// delete of the table, to everybody, from the moment in which it is published with
// such a filter. Under FULL all columns are in the identity, and it takes no column
// list instead, whichever columns that has. rel is as catalogueRelation gives it. A
// table without an identity is another check's.
func (s *Source) checkFilter(ctx context.Context, conn *pgx.Conn, rel *decode.Relation) error {
	if !hasIdentity(rel) {
		return nil
	}
	filtered, listed, err := filterColumns(ctx, conn, s.cfg.Publication, rel)
	if err != nil {
		return err
	}
	setTable := fmt.Sprintf("ALTER PUBLICATION %s SET TABLE … ", quoteIdentifier(s.cfg.Publication))
	name := nameOf(rel).String()
	if rel.Identity == decode.IdentityFull {
		if !listed {
			return nil
		}
		return &decode.Refusal{
			Reason: decode.ReasonIdentity, What: "publication", Where: s.cfg.Publication,
			Why:      fmt.Sprintf("it has a column list for %s, whose replica identity is FULL, so Postgres refuses the table's updates and deletes at the source", rel),
			Expected: "no column list for a table whose replica identity is FULL",
			Do:       setTable + "without a list for " + name + "; or, where it has a primary key, ALTER TABLE " + name + " REPLICA IDENTITY DEFAULT",
		}
	}
	var outside []string
	for _, name := range filtered {
		if !slices.ContainsFunc(rel.Columns, func(c decode.Column) bool { return c.Key && c.Name == name }) {
			outside = append(outside, quoteIdentifier(name))
		}
	}
	if len(outside) == 0 {
		return nil
	}
	whole := "ALTER TABLE " + name + " REPLICA IDENTITY FULL, which a table that only takes inserts can have, too"
	if listed {
		whole = setTable + "without a column list for " + name + ", and " + whole
	}
	return &decode.Refusal{
		Reason: decode.ReasonIdentity, What: "publication", Where: s.cfg.Publication,
		Why:      fmt.Sprintf("its row filter for %s reads %s, outside the replica identity, so Postgres refuses the table's updates and deletes at the source", rel, strings.Join(outside, ", ")),
		Expected: "a row filter of columns of the replica identity alone",
		Do:       whole + "; or " + setTable + "with another WHERE for " + name + ", which changes the rows that are published",
	}
}

// filterColumns gives the columns that the row filter of a table reads, nil where
// there is none, as before PostgreSQL 15, and whether it has a column list. The server keeps a filter as a tree of
// nodes, in which a column is named by its number; what it records of the
// dependencies of a filter cannot be told from those of a column list.
func filterColumns(ctx context.Context, conn *pgx.Conn, publication string, rel *decode.Relation) (names []string, listed bool, err error) {
	const operation = "look up the columns of the row filter"
	err = conn.QueryRow(ctx, `
		SELECT to_jsonb(pr)->>'prattrs' IS NOT NULL, ARRAY(
			SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = pr.prrelid AND a.attnum IN (
				SELECT found[1]::int2 FROM regexp_matches(to_jsonb(pr)->>'prqual', ':varattno (\d+)', 'g') found
			) ORDER BY a.attnum)
		FROM pg_publication_rel pr JOIN pg_publication p ON p.oid = pr.prpubid WHERE p.pubname = $1 AND pr.prrelid = $2`, publication, rel.ID,
	).Scan(&listed, &names)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, false, classify(operation, err)
	}
	return names, listed, nil
}
