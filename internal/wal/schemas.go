package wal

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// CheckTables is the check of the tables that a schema.* in PGSOURCE_TABLES
// stands for.
const CheckTables = "tables"

// ListTables gives the names of the tables of each schema: those that the
// publication has, where it exists, and else all that could be published, but
// for except. It changes nothing. Errors are *decode.Refusal where a person
// must act.
func ListTables(ctx context.Context, cfg DDLConfig, schemas []string, except *Table) (map[string][]string, error) {
	s := &Source{cfg: Config{DSN: cfg.DSN, Slot: cfg.Slot, Publication: cfg.Publication, Unlisted: except}}
	found := make(map[string][]string, len(schemas))
	err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		var exists bool
		if err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_publication WHERE pubname = $1)`, cfg.Publication).Scan(&exists); err != nil {
			return classify("look up the publication", err)
		}
		for _, schema := range schemas {
			names, err := s.tablesIn(ctx, conn, schema, exists)
			if err != nil {
				return err
			}
			found[schema] = names
		}
		return nil
	})
	return found, err
}

func (s *Source) tablesIn(ctx context.Context, conn *pgx.Conn, schema string, published bool) ([]string, error) {
	query, args := `SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT c.relispartition ORDER BY 1`, []any{schema}
	if published {
		query, args = `SELECT tablename::text FROM pg_publication_tables WHERE schemaname = $1 AND pubname = $2 ORDER BY 1`, []any{schema, s.cfg.Publication}
	}
	rows, err := conn.Query(ctx, query, args...)
	if err != nil {
		return nil, classify("look up the tables of schema "+schema, err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, classify("look up the tables of schema "+schema, err)
	}
	return slices.DeleteFunc(names, func(name string) bool {
		return s.cfg.Unlisted != nil && s.cfg.Unlisted.Schema == schema && s.cfg.Unlisted.Name == name
	}), nil
}

// noticeTables says which tables of a schema of which all are to be carried are
// not, because they came later and the publication does not have them. One that
// the publication gets stops pgsource: see checkPublished.
func (s *Source) noticeTables(ctx context.Context, conn *pgx.Conn) error {
	if len(s.cfg.Schemas) == 0 {
		return nil
	}
	var left []string
	for _, schema := range s.cfg.Schemas {
		names, err := s.tablesIn(ctx, conn, schema, false)
		if err != nil {
			return err
		}
		for _, name := range names {
			if !slices.ContainsFunc(s.cfg.Tables, func(t Table) bool { return t.Schema == schema && t.Name == name }) {
				left = append(left, tableName{schema, name}.String())
			}
		}
	}
	now := strings.Join(left, ", ")
	if was := s.leftOut.Swap(&now); was != nil && *was == now {
		return nil
	}
	if now == "" {
		s.cfg.Report(Status{Check: CheckTables, OK: true, Message: "every table of " + strings.Join(s.cfg.Schemas, ", ") + " is carried"})
		return nil
	}
	const most = 1000
	if len(now) > most {
		now = now[:most] + "…"
	}
	s.log.WarnContext(ctx, "tables of a schema of which all are to be carried are not in the publication", "tables", now)
	s.cfg.Report(Status{
		Check: CheckTables, Works: true, Message: "not carried, since the publication does not have them: " + now,
		Hint: fmt.Sprintf("make their Feldera tables, ALTER PUBLICATION %s ADD TABLE ONLY …, and restart pgsource; of one without a replica identity Postgres then refuses every UPDATE and DELETE; rows that are in them before are copied as far as PGSOURCE_SNAPSHOT says", quoteIdentifier(s.cfg.Publication)),
	})
	return nil
}
