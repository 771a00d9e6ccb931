package harness_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"holdfast/test/harness"
)

func TestPostgresKeepsDataAndSlotOverACrash(t *testing.T) {
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	ctx := t.Context()
	if !strings.Contains(pg.Version, "PostgreSQL") {
		t.Errorf("version is %q", pg.Version)
	}
	must(t, pg.Exec(ctx, `CREATE TABLE orders (id int PRIMARY KEY, note text); INSERT INTO orders VALUES (1, 'one'), (2, NULL)`))
	must(t, pg.Exec(ctx, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`))
	before, err := pg.ConfirmedFlushLSN(ctx, "holdfast")
	must(t, err)
	current, err := pg.CurrentLSN(ctx)
	must(t, err)
	if before == 0 || before > current {
		t.Errorf("confirmed %d, current %d: want 0 < confirmed <= current", before, current)
	}

	must(t, pg.Restart(ctx, harness.Immediate))

	rows, err := pg.Rows(ctx, `SELECT id, note FROM orders ORDER BY id`)
	must(t, err)
	if diff := cmp.Diff([][]string{{"1", "one"}, {"2", "NULL"}}, rows); diff != "" {
		t.Errorf("rows after the crash (-want +got):\n%s", diff)
	}
	after, err := pg.ConfirmedFlushLSN(ctx, "holdfast")
	must(t, err)
	if after != before {
		t.Errorf("confirmed %d after the crash, %d before", after, before)
	}
	must(t, pg.Stop(harness.Fast))
	must(t, pg.Stop(harness.Fast)) // once more is no error
	if _, err := pg.Connect(ctx); err == nil {
		t.Error("a stopped server takes connections")
	}
}

func TestPostgresOptions(t *testing.T) {
	pg := harness.NeedPostgres(t, harness.PostgresOptions{
		Password: "it's s3cret",
		Settings: map[string]string{"wal_level": "replica", "wal_sender_timeout": "2s"},
	})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	level, err := harness.QueryValue[string](ctx, pg, `SELECT current_setting('wal_level')`)
	must(t, err)
	if level != "replica" {
		t.Errorf("wal_level is %q, want the one given", level)
	}
	conn, err := pgx.Connect(ctx, pg.DSN())
	must(t, err)
	must(t, conn.Close(ctx))
	for name, dsn := range map[string]string{
		"wrong password":                pg.DSNFor("postgres", "wrong", "postgres", pg.Addr()),
		"no password":                   pg.DSNFor("postgres", "", "postgres", pg.Addr()),
		"wrong password on replication": pg.DSNFor("postgres", "wrong", "postgres", pg.Addr()) + "&replication=database",
	} {
		if conn, err := pgx.Connect(ctx, dsn); err == nil {
			t.Errorf("%s: let in", name)
			must(t, conn.Close(ctx))
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
