package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// awaitEnd waits until the daemon has ended with a code, and gives its last
// lines.
func awaitEnd(t *testing.T, d *harness.Daemon, want int) string {
	t.Helper()
	return awaitEndWithin(t, d, want, patience)
}

func awaitEndWithin(t *testing.T, d *harness.Daemon, want int, limit time.Duration) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	code, err := d.Wait(ctx)
	said := strings.Join(d.Log().Tail(5), "\n")
	if err != nil || code != want {
		t.Fatalf("exit code %d, want %d, %v:\n%s", code, want, err, said)
	}
	return said
}

// A transaction that shares a batch with a later, refused one is delivered as
// it was written, although the table's columns swapped their names in between
// and it does not bring its own description. The later one is refused for that:
// rows that were there before have their values exchanged, which is not in the
// stream.
func TestPgsourceRowsKeepTheirOwnRelation(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE TABLE pairs (id bigint PRIMARY KEY, a int, b int)`)
	sim := startSim(t, felderasim.Options{SQL: `CREATE TABLE pairs (id BIGINT NOT NULL PRIMARY KEY, a INT, b INT)`})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public.pairs", "PGSOURCE_BATCH_AGE": "2s"}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO pairs VALUES (1, 10, 20)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	execSQL(t, pg, `INSERT INTO pairs VALUES (2, 100, 200)`)
	execSQL(t, pg, `BEGIN; ALTER TABLE pairs RENAME a TO c; ALTER TABLE pairs RENAME b TO a; ALTER TABLE pairs RENAME c TO b; INSERT INTO pairs VALUES (3, 1, 2); COMMIT`)
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "columns b, a stand in another order") || !strings.Contains(said, "pgsource resync public.pairs") {
		t.Errorf("it says %s", said)
	}
	got := fmt.Sprint(rows(sim, "pairs", "id", "a", "b"))
	if want := "[[1 10 20] [2 100 200]]"; got != want {
		t.Errorf("the table holds %s, want %s", got, want)
	}
}

// Rows of partitions arrive under the name of their root, also when one moves
// from partition to partition.
func TestPgsourcePartitions(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE TABLE parts (id bigint, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id);
		CREATE TABLE low PARTITION OF parts FOR VALUES FROM (0) TO (10); CREATE TABLE high PARTITION OF parts FOR VALUES FROM (10) TO (100)`)
	sim := startSim(t, felderasim.Options{SQL: `CREATE TABLE parts (id BIGINT NOT NULL PRIMARY KEY, v VARCHAR)`})
	waitHealthy(t, startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public.parts"})))
	execSQL(t, pg, `INSERT INTO parts VALUES (1, 'a'), (2, 'b'), (20, 'c')`)
	execSQL(t, pg, `UPDATE parts SET id = 30 WHERE id = 1; DELETE FROM parts WHERE id = 20`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if got := fmt.Sprint(rows(sim, "parts", "id", "v")); got != "[[2 b] [30 a]]" {
		t.Errorf("the table holds %s", got)
	}
}

// Somebody changes the source behind pgsource's back so that the stream leaves
// changes out: it stops and says what is lost, instead of passing over them.
func TestPgsourceNoticesGaps(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		sql     []string
		cut     bool
		says    string
		differs []string // what the state says of tables afterwards
	}{
		"slot made anew":      {[]string{`SELECT pg_drop_replication_slot('holdfast')`, `INSERT INTO orders VALUES (5, 'lost', 1, true)`, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`}, true, "made it anew", nil},
		"slot dropped":        {[]string{`SELECT pg_drop_replication_slot('holdfast')`}, true, "was dropped", nil},
		"table left out":      {[]string{`ALTER PUBLICATION holdfast DROP TABLE items`}, false, "does not publish", []string{"items"}},
		"table made anew":     {[]string{`DROP TABLE items`, `CREATE TABLE items (id bigint PRIMARY KEY, order_id bigint NOT NULL, sku text NOT NULL)`}, false, "items", []string{"items"}},
		"operations left out": {[]string{`ALTER PUBLICATION holdfast SET (publish = 'insert')`}, false, "leaves out operations", []string{"orders", "items"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
			proxy := harness.NeedProxy(t, pg.Addr())
			env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_DSN": pg.DSNFor("postgres", "", "postgres", proxy.Addr())})
			d := startPgsource(t, env)
			waitHealthy(t, d)
			execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			if c.cut {
				proxy.Refuse()
				proxy.Cut()
				awaitSlotFree(t, pg)
			}
			for _, sql := range c.sql {
				execSQL(t, pg, sql)
			}
			if c.cut {
				if err := proxy.Accept(); err != nil {
					t.Fatal(err)
				}
			}
			if said := awaitEnd(t, d, 65); !strings.Contains(said, c.says) {
				t.Errorf("it says %s, want %q", said, c.says)
			}
			shown := runVerb(t, env, "state", "show")
			for _, table := range []string{"orders", "items"} {
				if says := strings.Contains(shown.Stdout, "differs        public."+table); says != slices.Contains(c.differs, table) {
					t.Errorf("that %s differs: %v\n%s", table, says, shown.Stdout)
				}
			}
		})
	}
}

// After the pipeline has come back empty, pgsource notices without any traffic,
// and loads the tables at risk again by itself: it stays ready, and is healthy
// with the row that nobody sent anew.
func TestPgsourceAfterAnotherIncarnation(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'confirmed', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	sim.Crash(core.KeepNothing)
	health(t, d, "the loss is noticed while idle, and mended", func(status int, body string) bool {
		return status == 200 && strings.Contains(body, `"phase":"streaming"`) && strings.Contains(body, `was resynced at`)
	})
	if n := sim.Count("orders"); n != 1 {
		t.Errorf("the pipeline has %d orders, want 1", n)
	}
	harness.Await(t, patience, "ready again", func(ctx context.Context) (any, bool) {
		status, body, err := d.Get(ctx, "/readyz")
		return fmt.Sprint(string(body), err), err == nil && status == 200
	})
}

// A transaction that somebody else has opened in the pipeline freezes every
// completion: health says whose fault it is not, and what to do.
func TestPgsourceShowsForeignTransaction(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	if _, err := sim.StartTransaction(); err != nil {
		t.Fatal(err)
	}
	start := currentLSN(t, pg)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'frozen', 1, true)`)
	health(t, d, "the transaction is shown", func(_ int, body string) bool {
		return strings.Contains(body, "blocked: transaction 1 open") && strings.Contains(body, "pgsource feldera-transaction show")
	})
	if got := confirmed(t, pg); got > start {
		t.Errorf("the LSN moved to %d inside the transaction", got)
	}
	if err := sim.CommitTransaction(); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	waitHealthy(t, d)
}

// A refusal under PGSOURCE_ON_REFUSAL=wait is phase blocked, and the second
// signal stops a daemon whose destination hangs.
func TestPgsourceBlockedAndStopped(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_ON_REFUSAL": "wait"}))
	waitHealthy(t, d)
	execSQL(t, pg, `TRUNCATE items`)
	health(t, d, "blocked", func(status int, body string) bool {
		return status == 503 && strings.Contains(body, `"phase":"blocked"`) && strings.Contains(body, "TRUNCATE")
	})
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	awaitEnd(t, d, 0)
	if err := d.Restart(map[string]string{"PGSOURCE_TRUNCATE": "ignore"}); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	sim.Pause()
	before := sim.Counters().Requests
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'hangs', 1, true)`)
	waitSim(t, sim, "the request is under way", func(v felderasim.View) bool { return v.Counters().Requests > before })
	for range 2 {
		if err := d.Terminate(); err != nil {
			t.Fatal(err)
		}
		harness.Await(t, patience, "it knows", func(ctx context.Context) (any, bool) {
			status, _, err := d.Get(ctx, "/readyz")
			return err, err != nil || status == 503
		})
	}
	awaitEnd(t, d, 0)
}
