package e2e

import (
	"fmt"
	"strings"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// A publication with row filters and column lists: a row that an update moves
// across the filter comes as an insert or goes as a delete, columns that are
// not listed and generated ones are not part of the stream, and a value that
// the server cannot send with a row that comes in stops by name.
func TestPgsourceFiltersAndLists(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE SCHEMA one; CREATE SCHEMA two;
		CREATE TABLE one.t (id bigint PRIMARY KEY, v int, hidden text, doubled int GENERATED ALWAYS AS (v * 2) STORED);
		CREATE TABLE two.t (id bigint, v int, big text, PRIMARY KEY (id, v)); ALTER TABLE two.t ALTER big SET STORAGE EXTERNAL;
		CREATE PUBLICATION chosen FOR TABLE one.t (id, v), two.t WHERE (v < 10)`)
	sim := startSim(t, felderasim.Options{SQL: `CREATE TABLE one_t (id BIGINT NOT NULL PRIMARY KEY, v INT);
		CREATE TABLE two_t (id BIGINT NOT NULL, v INT NOT NULL, big VARCHAR, PRIMARY KEY (id, v));
		CREATE TABLE bad (id BIGINT NOT NULL PRIMARY KEY, v INT, doubled INT)`})
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "one.t=one_t,two.t=two_t", "PGSOURCE_PUBLICATION": "chosen", "PGSOURCE_CREATE": "false"})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO one.t (id, v, hidden) VALUES (1, 1, 'secret'); UPDATE one.t SET hidden = 'other'; UPDATE one.t SET v = 3`)
	execSQL(t, pg, `INSERT INTO two.t VALUES (1, 5, 'in'), (2, 50, 'out'), (3, 6, 'leaves')`)
	execSQL(t, pg, `UPDATE two.t SET v = 7 WHERE id = 2; UPDATE two.t SET v = 70 WHERE id = 3; UPDATE two.t SET v = 8 WHERE id = 1; DELETE FROM two.t WHERE id = 3`)
	execSQL(t, pg, `ALTER TABLE one.t DROP COLUMN hidden CASCADE; UPDATE one.t SET v = 4`) // not listed, so no change of shape
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if got := fmt.Sprint(rows(sim, "one_t", "id", "v")); got != "[[1 4]]" {
		t.Errorf("one.t: %s", got)
	}
	if got := fmt.Sprint(rows(sim, "two_t", "id", "v", "big")); got != "[[1 8 in] [2 7 out]]" {
		t.Errorf("two.t: %s", got)
	}
	execSQL(t, pg, `INSERT INTO two.t VALUES (9, 90, repeat('x', 5000))`) // outside
	execSQL(t, pg, `UPDATE two.t SET v = 9 WHERE id = 9`)                 // comes in, without the value
	said := awaitEnd(t, d, 65)
	for _, part := range []string{"big", "two_t", "id=9", "REPLICA IDENTITY FULL", "LSN"} {
		if !strings.Contains(said, part) {
			t.Errorf("it does not say %q:\n%s", part, said)
		}
	}
	r := checkEnv(t, merged(env, map[string]string{"PGSOURCE_TABLES": "one.t=bad,two.t=two_t"}))
	if said := r.Stdout + r.Stderr; r.ExitCode != 65 || !strings.Contains(said, "doubled") || !strings.Contains(said, "NULL in every row") {
		t.Errorf("a generated column that Feldera has: exit code %d:\n%s", r.ExitCode, said)
	}
}
