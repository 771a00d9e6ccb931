package e2e

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"holdfast/internal/feldera"
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

// watchCounts collects the distinct pairs of row counts that the pipeline shows
// until the test has what it waits for.
func watchCounts(t *testing.T, sim *felderasim.Sim, a, b string) (stop func() []string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	seen := make(chan []string, 1)
	go func() {
		var list []string
		_ = sim.WaitFor(ctx, func(v felderasim.View) bool { // it ends with ctx
			now := fmt.Sprintf("%d %d", v.Count(a), v.Count(b))
			if len(list) == 0 || list[len(list)-1] != now {
				list = append(list, now)
			}
			return false
		})
		seen <- list
	}()
	return func() []string { cancel(); return <-seen }
}

// What a TRUNCATE takes away, and all that its transaction brings, becomes
// visible at once; also when pgsource dies in the middle of it.
func TestPgsourceTruncateIsAtomic(t *testing.T) {
	t.Parallel()
	for _, place := range []string{"", "pgsource.transaction-open", "pgsource.sent", "pgsource.before-commit", "pgsource.after-commit"} {
		t.Run("die at "+place, func(t *testing.T) {
			t.Parallel()
			pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
			env := merged(pgsourceEnv(pg, sim), map[string]string{
				"PGSOURCE_TRUNCATE": "delete_all", "PGSOURCE_BATCH_ROWS": "100", "FELDERA_REQUEST_LIFETIME": "2s", "FELDERA_REQUEST_TIMEOUT": "2s",
			})
			d := startPgsource(t, env)
			waitHealthy(t, d)
			execSQL(t, pg, `INSERT INTO items SELECT n, n, 's' FROM generate_series(1, 950) n`)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			if place != "" {
				stopClean(t, d)
				d = startCrashing(t, env, place)
				waitHealthy(t, d)
			}
			stop := watchCounts(t, sim, "items", "orders")
			execSQL(t, pg, `BEGIN; INSERT INTO orders VALUES (1, 'with it', 1, true); INSERT INTO items VALUES (6000, 1, 'gone'); TRUNCATE items;
				INSERT INTO items SELECT n, 1, 'new' FROM generate_series(5001, 5250) n; COMMIT`)
			if place != "" {
				awaitEnd(t, d, -1)
				d = startPgsource(t, env)
			}
			awaitConfirmed(t, pg, currentLSN(t, pg))
			if seen := stop(); fmt.Sprint(seen) != "[950 0 250 1]" {
				t.Errorf("seen on the way: %v", seen)
			}
			assertEqualTables(t, pg, sim)
			if n := metric(t, d, "pgsource_truncates_applied_total", nil); n < 1 {
				t.Errorf("%v tables were emptied", n)
			}
		})
	}
}

// A transaction whose TRUNCATE goes with a row that is refused empties nothing;
// passed over, it leaves the table as it is, and the next one is carried out.
func TestPgsourceTruncateAndSkip(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TRUNCATE": "delete_all"})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO items VALUES (1, 1, 'x'), (2, 1, 'y')`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	execSQL(t, pg, `BEGIN; TRUNCATE items; INSERT INTO items VALUES (3, 1, 'z'); INSERT INTO orders VALUES (1, 'a', 'NaN', true); COMMIT`)
	said := awaitEnd(t, d, 65)
	if n := sim.Count("items"); n != 2 {
		t.Errorf("%d rows are left of a transaction that was refused", n)
	}
	lsn := skipLSN.FindStringSubmatch(said)
	if lsn == nil {
		t.Fatalf("it does not say how to go on:\n%s", said)
	}
	file := t.TempDir() + "/skipped.jsonl"
	says(t, runPgsource(t, env, "skip", "-yes", "-to", file, lsn[1]), 0, "written to")
	body, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(body), `"kind":"truncate"`) {
		t.Errorf("%v:\n%s", err, body)
	}
	waitHealthy(t, startPgsource(t, env))
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'b', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if n := sim.Count("items"); n != 2 {
		t.Errorf("%d rows are left of a table whose TRUNCATE was passed over", n)
	}
	execSQL(t, pg, `BEGIN; TRUNCATE items; INSERT INTO items VALUES (4, 1, 'w'); COMMIT; DELETE FROM orders WHERE id = 1`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

var skipLSN = regexp.MustCompile(`pgsource skip ([0-9A-F]+/[0-9A-F]+)`)

// All that was sent before a crash is sent again, the TRUNCATE in the middle of
// it too: both sides are equal behind it, with and without a progress table.
func TestPgsourceTruncateIsReplayed(t *testing.T) {
	t.Parallel()
	def := feldera.ProgressTable(feldera.DefaultProgressTable)
	for _, delivery := range []string{"at_least_once", "effectively_once"} {
		t.Run(delivery, func(t *testing.T) {
			t.Parallel()
			pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{SQL: program + def.SQL()})
			env := merged(pgsourceEnv(pg, sim), map[string]string{
				"PGSOURCE_TRUNCATE": "delete_all", "PGSOURCE_DELIVERY": delivery, "FELDERA_REQUEST_LIFETIME": "2s", "FELDERA_REQUEST_TIMEOUT": "2s",
			})
			d := startPgsource(t, env)
			waitHealthy(t, d)
			before := currentLSN(t, pg)
			awaitConfirmed(t, pg, before)
			stopClean(t, d)
			for i := range 3 {
				execSQL(t, pg, fmt.Sprintf(`INSERT INTO items SELECT %d + n, n, 's' FROM generate_series(1, 30) n`, 1000*i))
				execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'o', 1, true)`, i))
				execSQL(t, pg, fmt.Sprintf(`BEGIN; TRUNCATE items; INSERT INTO items VALUES (%d, 1, 'new'); COMMIT`, 10000+i))
			}
			execSQL(t, pg, `INSERT INTO items VALUES (1, 1, 'last'); UPDATE orders SET note = 'last'`)
			d = harness.NeedDaemon(t, "./cmd/pgsource", harness.BuildOptions{Race: true, Tags: "crashpoints"},
				harness.DaemonOptions{Env: merged(env, map[string]string{"CRASH_AT": "pgsource.after-commit:3:kill"}), ListenVar: "PGSOURCE_LISTEN"})
			awaitEnd(t, d, -1)
			stop := watchCounts(t, sim, "items", "orders")
			d = startPgsource(t, env)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			// From what was seen at the crash right to what is to be seen.
			if seen := stop(); len(seen) > 2 || seen[len(seen)-1] != "2 3" {
				t.Errorf("the past was seen: %v", seen)
			}
			assertEqualTables(t, pg, sim)
			// And once more from the start, behind all of it.
			d.Kill()
			d = startPgsource(t, env)
			execSQL(t, pg, `INSERT INTO items VALUES (2, 1, 'behind')`)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			assertEqualTables(t, pg, sim)
			waitHealthy(t, d)
		})
	}
}
