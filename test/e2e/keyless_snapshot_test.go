package e2e

import (
	"strings"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// Rows that were there before have no place in the WAL: to copy them is refused.
func TestPgsourceIdentityIsNotCopied(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE TABLE log (word text, n bigint); INSERT INTO log VALUES ('before', 1)`)
	sim := startSim(t, felderasim.Options{SQL: strings.Split(keylessProgram(), "CREATE TABLE bag")[0]})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public.log"})
	why := []string{"public", "log", "where each one stood", "PGSOURCE_SNAPSHOT=never"}
	says(t, runPgsource(t, env, "check"), 65, why...)
	says(t, runPgsource(t, env), 65, why...)
	nothingMade(t, pg)
	d := startPgsource(t, merged(env, map[string]string{"PGSOURCE_SNAPSHOT": "never"}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO log VALUES ('behind', 1)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if n := sim.Count("log"); n != 1 {
		t.Errorf("%d rows", n)
	}
}

// What cannot be copied is said by the check, of every table at once, and refused
// before publication and slot are made: a slot that was left behind would keep
// WAL, and a publication would have Postgres refuse updates.
func TestPgsourceMakesNothingForACopyItRefuses(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true);
		CREATE ROLE reader LOGIN REPLICATION; GRANT CREATE ON DATABASE postgres TO reader; ALTER TABLE orders OWNER TO reader; ALTER TABLE items OWNER TO reader;
		REVOKE SELECT ON orders, items FROM reader`)
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_DSN": pg.DSNFor("reader", "", "postgres", pg.Addr())})
	why := []string{`GRANT SELECT ON "public"."orders" TO "reader"`, `GRANT SELECT ON "public"."items" TO "reader"`}
	wants(t, runPgsource(t, env, "check"), 65, why...)
	wants(t, runPgsource(t, env), 65, "GRANT SELECT ON", "orders", "items")
	nothingMade(t, pg)

	execSQL(t, pg, strings.Join(why, "; "))
	wants(t, runPgsource(t, env, "check"), 0, "tables whose rows are yet to be copied, and can be: 1")
	d := startPgsource(t, env)
	waitHealthy(t, d)
	waitSim(t, sim, "the row is copied", func(v felderasim.View) bool { return v.Count("orders") == 1 })
	awaitConfirmed(t, pg, currentLSN(t, pg))
	wants(t, runPgsource(t, env, "check"), 0, "the next start has no rows to copy")
}

// nothingMade fails where the server has a publication or a slot.
func nothingMade(t *testing.T, pg *harness.Postgres) {
	t.Helper()
	left, err := pg.Rows(t.Context(), `SELECT 'publication ' || pubname FROM pg_publication UNION ALL SELECT 'slot ' || slot_name FROM pg_replication_slots`)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
