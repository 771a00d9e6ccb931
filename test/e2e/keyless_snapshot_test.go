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
	says(t, runPgsource(t, env), 65, "public", "log", "where each one stood", "PGSOURCE_SNAPSHOT=never")
	d := startPgsource(t, merged(env, map[string]string{"PGSOURCE_SNAPSHOT": "never"}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO log VALUES ('behind', 1)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if n := sim.Count("log"); n != 1 {
		t.Errorf("%d rows", n)
	}
}
