package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// sameRows compares a table of the source with the destination's, by all its
// columns as text and in the order of the first.
func sameRows(t *testing.T, pg *harness.Postgres, sim *felderasim.Sim, table string, columns ...string) {
	t.Helper()
	selected := make([]string, len(columns))
	for i, c := range columns {
		selected[i] = fmt.Sprintf(`coalesce(%s::text, '-')`, quoted(c))
	}
	want, err := pg.Rows(t.Context(), fmt.Sprintf(`SELECT %s FROM %s ORDER BY %s`, strings.Join(selected, ", "), quoted(table), quoted(columns[0])))
	if err != nil {
		t.Fatal(err)
	}
	target := table
	if strings.ToLower(table) != table {
		target = quoted(table)
	}
	got := rows(sim, target, columns...)
	if fmt.Sprint(want) != fmt.Sprint(got) {
		t.Errorf("%s: source and destination differ (-source +destination):\n%s", table, shorten(cmp.Diff(want, got)))
	}
}

// TRUNCATE with delete_all: everything that was there before it goes, rows of
// the same transaction before it included, and everything after it stays,
// whatever the batches are.
func TestPgsourceTruncateDeletesAll(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE TABLE parent (id bigserial PRIMARY KEY, v text);
		CREATE TABLE child (id bigint PRIMARY KEY, parent bigint REFERENCES parent ON DELETE CASCADE, v text);
		CREATE TABLE other (id bigint PRIMARY KEY, v text);
		CREATE TABLE "Wide Key" (a text, d date, n numeric(10,2), u uuid, ts timestamp, b boolean, y bytea, tm time, r real, v text, PRIMARY KEY (a, d, n, u, ts, b, y, tm, r))`)
	sim := startSim(t, felderasim.Options{SQL: `
		CREATE TABLE parent (id BIGINT NOT NULL PRIMARY KEY, v VARCHAR); CREATE TABLE child (id BIGINT NOT NULL PRIMARY KEY, parent BIGINT, v VARCHAR);
		CREATE TABLE other (id BIGINT NOT NULL PRIMARY KEY, v VARCHAR);
		CREATE TABLE "Wide Key" (a VARCHAR NOT NULL, d DATE NOT NULL, n DECIMAL(10,2) NOT NULL, u UUID NOT NULL, ts TIMESTAMP NOT NULL, b BOOLEAN NOT NULL,
			y VARBINARY NOT NULL, tm TIME NOT NULL, r REAL NOT NULL, v VARCHAR, PRIMARY KEY (a, d, n, u, ts, b, y, tm, r))`})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_TABLES": `public.parent,public.child,public.other,public."Wide Key"`, "PGSOURCE_TRUNCATE": "delete_all",
		"PGSOURCE_BATCH_ROWS": "500", "PGSOURCE_BATCH_AGE": "200ms",
	}))
	waitHealthy(t, d)
	same := func() {
		t.Helper()
		awaitConfirmed(t, pg, currentLSN(t, pg))
		sameRows(t, pg, sim, "parent", "id", "v")
		sameRows(t, pg, sim, "child", "id", "parent", "v")
		sameRows(t, pg, sim, "other", "id", "v")
		if n, want := sim.Count(`"Wide Key"`), count(t, pg, `"Wide Key"`); n != want {
			t.Errorf("the table with the wide key has %d rows, the source %d", n, want)
		}
	}
	execSQL(t, pg, `INSERT INTO parent (v) SELECT 'p' || n FROM generate_series(1, 1234) n; INSERT INTO child SELECT id, id, v FROM parent; INSERT INTO other VALUES (1, 'stays')`)
	execSQL(t, pg, `INSERT INTO "Wide Key" SELECT E'a"\\ ☃' || n, date '0001-01-01' + n, -n / 4.0, ('00000000-0000-0000-0000-' || lpad(n::text, 12, '0'))::uuid,
		timestamp '2026-01-02 03:04:05.000001' + n * interval '1 us', n % 2 = 0, decode(lpad(to_hex(n), 8, '0'), 'hex'), time '00:00:00.000001' * 1 + n * interval '1 us', n / 3.0, 'v' FROM generate_series(1, 700) n`)
	same()
	// All in one batch, and the tables in one message.
	execSQL(t, pg, `INSERT INTO other VALUES (2, 'before')`)
	execSQL(t, pg, `BEGIN; INSERT INTO parent (v) VALUES ('gone'); INSERT INTO other VALUES (3, 'with it'); TRUNCATE parent RESTART IDENTITY CASCADE;
		INSERT INTO parent (v) VALUES ('first of the new'); INSERT INTO child VALUES (7, 1, 'new'); COMMIT`)
	execSQL(t, pg, `INSERT INTO child VALUES (8, 1, 'later'); UPDATE parent SET v = 'changed'; TRUNCATE "Wide Key"`)
	same()
	if n := sim.Count("parent"); n != 1 {
		t.Errorf("parent has %d rows", n)
	}
	// Twice in one transaction, then nothing after it; and an empty table.
	execSQL(t, pg, `BEGIN; INSERT INTO other VALUES (4, 'a'); TRUNCATE other; INSERT INTO other VALUES (4, 'b'), (5, 'c'); TRUNCATE other; COMMIT`)
	execSQL(t, pg, `TRUNCATE other`)
	execSQL(t, pg, `BEGIN; TRUNCATE other; INSERT INTO other VALUES (4, 'd'); DELETE FROM other; ROLLBACK`)
	execSQL(t, pg, `BEGIN; TRUNCATE child; SAVEPOINT s; TRUNCATE other; INSERT INTO other VALUES (9, 'undone'); ROLLBACK TO s; INSERT INTO other VALUES (6, 'e'); COMMIT`)
	same()
	if n, err := d.Metric(t.Context(), "pgsource_truncated_rows_total", map[string]string{"table": "parent"}); err != nil || n != 1234 {
		t.Errorf("%v rows were deleted from parent, %v", n, err)
	}
}

func count(t *testing.T, pg *harness.Postgres, table string) int64 {
	t.Helper()
	n, err := harness.QueryValue[int64](t.Context(), pg, `SELECT count(*) FROM `+table)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Killed between the pages of a TRUNCATE, and after it: the next start does it
// again and ends at the same table. Nothing of the transaction is acknowledged
// before.
func TestPgsourceTruncateSurvivesACrash(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TRUNCATE": "delete_all", "PGSOURCE_BATCH_ROWS": "50"}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO items SELECT n, n, 's' FROM generate_series(1, 1000) n`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	before := currentLSN(t, pg)
	sim.HoldCompletion()
	execSQL(t, pg, `BEGIN; TRUNCATE items; INSERT INTO items VALUES (5000, 1, 'new'); COMMIT; INSERT INTO orders VALUES (1, 'after', 1, true)`)
	waitSim(t, sim, "the first page is deleted", func(v felderasim.View) bool { return v.Counters().Requests > 0 && v.Counters().Records >= 1050 })
	d.Kill()
	if got := confirmed(t, pg); got > before {
		t.Errorf("confirmed %d inside a TRUNCATE, before it %d", got, before)
	}
	sim.ReleaseCompletion()
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// A table whose rows have no key cannot be emptied: that stops. Ignored
// TRUNCATEs are counted, and leave the rows.
func TestPgsourceTruncateLimits(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE TABLE a (id bigint PRIMARY KEY, v text); CREATE TABLE bag (v text); ALTER TABLE bag REPLICA IDENTITY FULL`)
	sim := startSim(t, felderasim.Options{SQL: `CREATE TABLE a (id BIGINT NOT NULL PRIMARY KEY, v VARCHAR); CREATE TABLE bag (v VARCHAR) WITH ('materialized' = 'true')`})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": `public.a,public.bag`, "PGSOURCE_TRUNCATE": "delete_all"}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO a VALUES (1, 'a'); INSERT INTO bag VALUES ('x')`)
	execSQL(t, pg, `TRUNCATE a, bag`) // neither is emptied
	said := awaitEnd(t, d, 65)
	for _, part := range []string{"no PRIMARY KEY", "public.bag", "LSN", "PGSOURCE_TRUNCATE=ignore"} {
		if !strings.Contains(said, part) {
			t.Errorf("it does not say %q:\n%s", part, said)
		}
	}
	if a, bag := sim.Count("a"), sim.Count("bag"); a != 1 || bag != 1 {
		t.Errorf("%d and %d rows are left", a, bag)
	}
	if err := d.Restart(map[string]string{"PGSOURCE_TRUNCATE": "ignore"}); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	harness.Await(t, patience, "the TRUNCATE is counted", func(ctx context.Context) (any, bool) {
		n, err := d.Metric(ctx, "pgsource_truncates_ignored_total", nil)
		return fmt.Sprint(n, err), err == nil && n == 1
	})
	if a, bag := sim.Count("a"), sim.Count("bag"); a != 1 || bag != 1 {
		t.Errorf("%d and %d rows are left", a, bag)
	}
}
