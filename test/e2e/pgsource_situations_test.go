package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// session opens a connection to a database of the cluster that lives as long as
// the test.
func session(t *testing.T, pg *harness.Postgres, database string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), pg.DSNFor("postgres", "", database, pg.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func execOn(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.PgConn().Exec(t.Context(), sql).ReadAll(); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// Rows of transactions that lie between each other in the WAL and end in
// another order than they began, commits that follow each other without a gap,
// and rows that are larger than their WAL records; a kill after each round, with
// part of it acknowledged: nothing is missing and nothing is old.
func TestPgsourceInterleavedTransactions(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"FELDERA_REQUEST_TIMEOUT": "1s", "FELDERA_REQUEST_LIFETIME": "1s"})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	one, two := session(t, pg, "postgres"), session(t, pg, "postgres")
	for round := range 4 {
		id := round * 10
		execOn(t, one, `BEGIN`)
		execOn(t, two, `BEGIN`)
		for i := range 3 {
			execOn(t, one, fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'one', 1, true)`, id+i))
			execOn(t, two, fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'two', 1, true, repeat('x', 2000000))`, id+5+i)) // 23 kB in the WAL
		}
		execOn(t, one, fmt.Sprintf(`UPDATE items SET sku = 'one %d'`, round))
		execOn(t, two, fmt.Sprintf(`INSERT INTO items VALUES (%d, %d, 'by two')`, id, id))
		execOn(t, two, `COMMIT`)
		execOn(t, one, `COMMIT`)
		acknowledged := currentLSN(t, pg)
		if round%2 == 0 {
			awaitConfirmed(t, pg, acknowledged)
		}
		for i := range 20 { // each ends where the next one begins
			execOn(t, one, fmt.Sprintf(`UPDATE orders SET customer = 'version %d' WHERE id = %d`, i, id))
		}
		d.Kill()
		if err := d.Restart(nil); err != nil {
			t.Fatal(err)
		}
		awaitConfirmed(t, pg, currentLSN(t, pg))
		assertEqualTables(t, pg, sim)
	}
}

// Another database of the cluster writes, and the one with the publication
// does not: its slot holds nothing back.
func TestPgsourceIdleBesideAnotherDatabase(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE DATABASE busy`)
	waitHealthy(t, startPgsource(t, pgsourceEnv(pg, sim)))
	busy := session(t, pg, "busy")
	execOn(t, busy, `CREATE TABLE other (t text)`)
	for range 3 {
		execOn(t, busy, `INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 5000)`)
		awaitConfirmed(t, pg, currentLSN(t, pg))
	}
	if n := sim.Counters().Requests; n != 0 {
		t.Errorf("%d requests for nothing", n)
	}
}

// Text that is no UTF-8, which a database without an encoding takes: the server
// cannot send it. What is before it is delivered, and it is named by its
// position and the server's words instead of being asked for without end.
func TestPgsourceUnreadableText(t *testing.T) {
	t.Parallel()
	pg, sim := harness.NeedPostgres(t, harness.PostgresOptions{}), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE DATABASE raw ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'`)
	raw := session(t, pg, "raw")
	execOn(t, raw, sourceTables)
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_DSN": pg.DSNFor("postgres", "", "raw", pg.Addr())}))
	waitHealthy(t, d)
	execOn(t, raw, `INSERT INTO orders VALUES (1, 'süß', 1, true)`)
	good := currentLSN(t, pg)
	execOn(t, raw, `INSERT INTO orders VALUES (2, convert_from('\xff'::bytea, 'SQL_ASCII'), 1, true)`)
	said := awaitEnd(t, d, 65)
	for _, part := range []string{"LSN behind ", "22021", "SQL_ASCII", "pg_replication_slot_advance"} {
		if !strings.Contains(said, part) {
			t.Errorf("it does not say %q:\n%s", part, said)
		}
	}
	if got := fmt.Sprint(rows(sim, "orders", "id", "customer")); got != "[[1 süß]]" {
		t.Errorf("orders %s", got)
	}
	if got := confirmed(t, pg); got < good-128 {
		t.Errorf("confirmed %d, the readable one ends at %d", got, good)
	}
}

// A prepared transaction comes when it is committed, behind what was committed
// meanwhile, over a kill too; one that is rolled back never comes.
func TestPgsourcePreparedTransactions(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, map[string]string{"max_prepared_transactions": "2"}), startSim(t, felderasim.Options{})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	one := session(t, pg, "postgres")
	execOn(t, one, `BEGIN`)
	execOn(t, one, `INSERT INTO orders VALUES (1, 'prepared', 1, true)`)
	execOn(t, one, `PREPARE TRANSACTION 'kept'`)
	execOn(t, one, `BEGIN`)
	execOn(t, one, `INSERT INTO orders VALUES (2, 'given up', 1, true)`)
	execOn(t, one, `PREPARE TRANSACTION 'gone'`)
	execSQL(t, pg, `INSERT INTO orders VALUES (3, 'meanwhile', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if got := fmt.Sprint(rows(sim, "orders", "id")); got != "[[3]]" {
		t.Errorf("orders %s while two transactions are prepared", got)
	}
	d.Kill()
	execOn(t, one, `COMMIT PREPARED 'kept'`)
	execOn(t, one, `ROLLBACK PREPARED 'gone'`)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// The publication is dropped and made anew while changes that were made without
// it are in the WAL: the server reads them with the catalogue of their time, in
// which it is not there. pgsource says that instead of trying without end.
func TestPgsourcePublicationMadeAnew(t *testing.T) {
	t.Parallel()
	for _, transport := range []string{"stream", "peek"} {
		t.Run(transport, func(t *testing.T) { publicationMadeAnew(t, transport) })
	}
}

func publicationMadeAnew(t *testing.T, transport string) {
	t.Helper()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `ALTER ROLE postgres SET client_min_messages = error`) // what hides warnings is overruled
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TRANSPORT": transport}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	stopClean(t, d)
	execSQL(t, pg, `DROP PUBLICATION holdfast`)
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'without', 1, true)`)
	execSQL(t, pg, `CREATE PUBLICATION holdfast FOR TABLE orders, items WITH (publish_via_partition_root = true)`)
	execSQL(t, pg, `INSERT INTO orders VALUES (3, 'after', 1, true)`)
	before := confirmed(t, pg)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	said := awaitEnd(t, d, 65)
	for _, part := range []string{"holdfast", "publication", "make the slot again"} {
		if !strings.Contains(said, part) {
			t.Errorf("it does not say %q:\n%s", part, said)
		}
	}
	if got := confirmed(t, pg); got > before+4096 {
		t.Errorf("the slot moved from %d to %d, past what cannot be read", before, got)
	}
	if n := sim.Count("orders"); n != 1 {
		t.Errorf("%d orders", n)
	}
}

// Partitions under their own names are tables of their own, each with its
// identity. One that comes or goes is a table that the publication has more or
// less: that is noticed. The name of the root is refused.
func TestPgsourcePartitionsUnderTheirOwnNames(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ sql, says string }{
		"detached": {`ALTER TABLE parts DETACH PARTITION p1`, `does not publish \"public\".\"p1\"`},
		"dropped":  {`DROP TABLE p1`, `does not publish \"public\".\"p1\"`},
		"made":     {`CREATE TABLE p4 PARTITION OF parts FOR VALUES FROM (40) TO (50)`, `also publishes \"public\".\"p4\"`},
		"attached": {`ALTER TABLE parts ATTACH PARTITION spare FOR VALUES FROM (30) TO (40)`, `also publishes \"public\".\"spare\"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := harness.NeedPostgres(t, harness.PostgresOptions{})
			execSQL(t, pg, partitioned+`; ALTER TABLE p1 REPLICA IDENTITY FULL; CREATE PUBLICATION holdfast FOR TABLE parts`)
			execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
			var program string
			for _, table := range []string{"parts", "p0", "p1", "leaf_2a"} {
				program += `CREATE TABLE ` + table + ` (id BIGINT NOT NULL PRIMARY KEY, v VARCHAR);`
			}
			sim := startSim(t, felderasim.Options{SQL: program})
			proxy := harness.NeedProxy(t, pg.Addr())
			env := merged(pgsourceEnv(pg, sim), map[string]string{
				"PGSOURCE_TABLES": "public.p0,public.p1,public.p2a=leaf_2a", "PGSOURCE_DSN": pg.DSNFor("postgres", "", "postgres", proxy.Addr()),
			})
			if r := checkEnv(t, merged(env, map[string]string{"PGSOURCE_TABLES": "public.parts"})); r.ExitCode != 65 || !strings.Contains(r.Stdout, "publish_via_partition_root") {
				t.Errorf("the root's name: exit code %d:\n%s", r.ExitCode, r.Stdout)
			}
			d := startPgsource(t, env)
			waitHealthy(t, d)
			execSQL(t, pg, `INSERT INTO parts SELECT n, 'v' || n FROM generate_series(1, 29, 4) n`)
			// Rows that move between partitions, within one transaction.
			execSQL(t, pg, `BEGIN; UPDATE parts SET id = 2 WHERE id = 13; UPDATE parts SET id = 12 WHERE id = 1; UPDATE parts SET v = 'x' WHERE id = 17; DELETE FROM parts WHERE id = 25; COMMIT`)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			for table, target := range map[string]string{"p0": "p0", "p1": "p1", "p2a": "leaf_2a"} {
				want, err := pg.Rows(t.Context(), `SELECT id, v FROM `+table+` ORDER BY id`)
				if err != nil {
					t.Fatal(err)
				}
				if got := fmt.Sprint(rows(sim, target, "id", "v")); got != fmt.Sprint(want) {
					t.Errorf("%s: %s, want %s", table, got, fmt.Sprint(want))
				}
			}
			execSQL(t, pg, c.sql)
			proxy.Cut() // the next connection looks first
			if said := awaitEnd(t, d, 65); !strings.Contains(said, c.says) {
				t.Errorf("it says %s, want %q", said, c.says)
			}
		})
	}
}

// schema.* is what the schema has at the start, or the publication where there
// is one. A table that comes later is said, and once it is published it stops
// pgsource, which carries it after a restart. The state's own table is none.
func TestPgsourceCarriesASchema(t *testing.T) {
	t.Parallel()
	pg := startPostgres(t, nil)
	sim := startSim(t, felderasim.Options{SQL: program + `CREATE TABLE later (id BIGINT NOT NULL PRIMARY KEY)`})
	proxy := harness.NeedProxy(t, pg.Addr())
	env := merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_TABLES": "public.*", "PGSOURCE_STATE": "postgres:public.state", "PGSOURCE_DSN": pg.DSNFor("postgres", "", "postgres", proxy.Addr()),
	})
	proxy.Refuse() // the source is away when it is asked for its tables
	d := startPgsource(t, env)
	health(t, d, "the source is waited for", func(status int, body string) bool { return status == 200 && strings.Contains(body, "refused") })
	if err := proxy.Accept(); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	execSQL(t, pg, `BEGIN; INSERT INTO orders VALUES (1, 'a', 1, true); INSERT INTO items VALUES (1, 1, 'x'); COMMIT`)
	waitSim(t, sim, "the rows are there", func(v felderasim.View) bool { return v.Count("orders") == 1 && v.Count("items") == 1 })
	if r := checkEnv(t, env); r.ExitCode != 0 {
		t.Errorf("check ends with %d:\n%s", r.ExitCode, r.Stdout)
	}

	execSQL(t, pg, `CREATE TABLE later (id bigint PRIMARY KEY)`)
	health(t, d, "the new table is said", func(status int, body string) bool {
		return status == 200 && strings.Contains(body, "not carried, since the publication does not have them") && strings.Contains(body, "later")
	})
	execSQL(t, pg, `ALTER PUBLICATION holdfast ADD TABLE later`)
	proxy.Cut()
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "also publishes") || !strings.Contains(said, "later") {
		t.Errorf("it says %s", said)
	}
	execSQL(t, pg, `INSERT INTO later VALUES (1)`)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitSim(t, sim, "the new table is carried", func(v felderasim.View) bool { return v.Count("later") == 1 })

	execSQL(t, pg, `CREATE SCHEMA other; CREATE TABLE other.orders (id bigint PRIMARY KEY); ALTER PUBLICATION holdfast ADD TABLE other.orders`)
	r := checkEnv(t, merged(env, map[string]string{"PGSOURCE_TABLES": "public.*,other.*"}))
	if said := r.Stdout + r.Stderr; r.ExitCode != 65 || !strings.Contains(said, "other.orders=other_name") {
		t.Errorf("names that clash: exit code %d:\n%s", r.ExitCode, said)
	}
}
