package e2e

import (
	"fmt"
	"path/filepath"
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

// Generated columns, stored and (from PostgreSQL 18 on) virtual: the stream does
// not carry them, so they are no part of the Feldera table, neither with the rows
// that were there before nor when one comes or goes; a Feldera table that has one
// is refused.
func TestPgsourceGeneratedColumns(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	kinds := []string{"STORED"}
	if major(t, pg) >= 18 {
		kinds = append(kinds, "VIRTUAL")
	}
	for _, kind := range kinds {
		name := "gen_" + strings.ToLower(kind)
		t.Run(kind, func(t *testing.T) {
			execSQL(t, pg, fmt.Sprintf(`CREATE TABLE %[1]s (doubled int GENERATED ALWAYS AS (v * 2) %[2]s, id bigint PRIMARY KEY, v int);
				INSERT INTO %[1]s (id, v) VALUES (1, 1), (2, 2)`, name, kind))
			sim := startSim(t, felderasim.Options{SQL: fmt.Sprintf(`CREATE TABLE %s (id BIGINT NOT NULL PRIMARY KEY, v INT);
				CREATE TABLE bad (id BIGINT NOT NULL PRIMARY KEY, v INT, doubled INT)`, name)})
			env := merged(pgsourceEnv(pg, sim), map[string]string{
				"PGSOURCE_TABLES": "public." + name, "PGSOURCE_SLOT": name, "PGSOURCE_PUBLICATION": name,
				"PGSOURCE_STATE": "file:" + filepath.Join(t.TempDir(), "state.json"),
			})
			printed := runVerb(t, env, "feldera-sql")
			wants(t, printed, 0, "generated columns are not published, so they are left out: doubled")
			if strings.Contains(printed.Stdout, "doubled INT") {
				t.Errorf("it declares the generated column:\n%s", printed.Stdout)
			}
			wants(t, checkEnv(t, merged(env, map[string]string{"PGSOURCE_TABLES": "public." + name + "=bad"})), 65, "doubled", "generated", "NULL in every row")
			d := startPgsource(t, env)
			waitHealthy(t, d)
			awaitCopies(t, env, 1)
			execSQL(t, pg, fmt.Sprintf(`INSERT INTO %[1]s (id, v) VALUES (3, 3); UPDATE %[1]s SET v = 20 WHERE id = 2; DELETE FROM %[1]s WHERE id = 1`, name))
			execSQL(t, pg, fmt.Sprintf(`ALTER TABLE %[1]s ADD more int GENERATED ALWAYS AS (v + 1) %[2]s; UPDATE %[1]s SET v = 30 WHERE id = 3`, name, kind))
			execSQL(t, pg, fmt.Sprintf(`ALTER TABLE %[1]s DROP doubled; UPDATE %[1]s SET id = 4 WHERE id = 3`, name))
			awaitSlot(t, pg, name, currentLSN(t, pg))
			sameRows(t, pg, sim, name, "id", "v")
			wants(t, runVerb(t, env, "verify"), 0)
			stopClean(t, d)

			// As a part of a whole old row they are refused by PostgreSQL 18, to
			// whoever writes: that is said before, and is so.
			execSQL(t, pg, fmt.Sprintf(`DROP PUBLICATION %[1]s; ALTER TABLE %[1]s REPLICA IDENTITY FULL`, name))
			got := runVerb(t, env, "publication", "sql")
			wants(t, got, 0, "CREATE PUBLICATION")
			said := strings.Contains(got.Stdout, "has generated columns in its REPLICA IDENTITY FULL: once it is published, Postgres refuses")
			execSQL(t, pg, fmt.Sprintf(`CREATE PUBLICATION %[1]s FOR TABLE %[1]s`, name))
			err := pg.Exec(t.Context(), fmt.Sprintf(`UPDATE %s SET v = 0`, name))
			if refused := err != nil; said != refused {
				t.Errorf("Postgres says %v, and publication sql:\n%s", err, got.Stdout)
			}
		})
	}
}

// From PostgreSQL 18 on a publication can carry stored generated columns: then
// they are columns like others, those of the rows that were there before too.
func TestPgsourcePublishedGeneratedColumns(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE TABLE gen (doubled int GENERATED ALWAYS AS (v * 2) STORED, id bigint PRIMARY KEY, v int); INSERT INTO gen (id, v) VALUES (1, 1), (2, 2)`)
	sim := startSim(t, felderasim.Options{SQL: `CREATE TABLE gen (id BIGINT NOT NULL PRIMARY KEY, v INT, doubled INT)`})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public.gen"})
	publish := `CREATE PUBLICATION holdfast FOR TABLE gen WITH (publish_via_partition_root, publish_generated_columns = stored)`
	if major(t, pg) < 18 {
		if err := pg.Exec(t.Context(), publish); err == nil || !strings.Contains(err.Error(), "publish_generated_columns") {
			t.Errorf("an older server takes it: %v", err)
		}
		wants(t, checkEnv(t, env), 65, "doubled", "generated", "NULL in every row")
		return
	}
	execSQL(t, pg, publish)
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	wants(t, runVerb(t, env, "feldera-sql"), 0, "doubled INTEGER")
	d := startPgsource(t, merged(env, map[string]string{"PGSOURCE_SNAPSHOT": "initial"}))
	waitHealthy(t, d)
	awaitCopies(t, env, 1)
	execSQL(t, pg, `INSERT INTO gen (id, v) VALUES (3, 3); UPDATE gen SET v = 20 WHERE id = 2`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	sameRows(t, pg, sim, "gen", "id", "v", "doubled")
	wants(t, runVerb(t, env, "verify"), 0)
	execSQL(t, pg, `ALTER TABLE gen ALTER doubled SET EXPRESSION AS (v * 3)`)
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "has another expression") || !strings.Contains(said, "pgsource resync public.gen") {
		t.Errorf("it says %s", said)
	}
}

// A row filter over a column outside the replica identity makes Postgres refuse
// updates and deletes, to everybody, and so does a column list under REPLICA
// IDENTITY FULL: that is said with the statements that mend it, which do.
func TestPgsourceRefusesFiltersOutsideTheIdentity(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE TABLE outside (id bigint PRIMARY KEY, v int, "W" text);
		CREATE TABLE inside (id bigint, v int, "W" text, PRIMARY KEY (id, v)); CREATE TABLE whole (id bigint PRIMARY KEY, v int, "W" text);
		ALTER TABLE whole REPLICA IDENTITY FULL; INSERT INTO outside VALUES (1, 1, 'a');
		CREATE PUBLICATION holdfast FOR TABLE outside (id, v, "W") WHERE (id > 0 AND "W" IS NOT NULL AND v < 10), inside (id, v, "W") WHERE (v < 10), whole WHERE ("W" IS NOT NULL)`)
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	sim := startSim(t, felderasim.Options{SQL: `CREATE TABLE outside (id BIGINT NOT NULL PRIMARY KEY, v INT, "W" VARCHAR);
		CREATE TABLE inside (id BIGINT NOT NULL, v INT NOT NULL, "W" VARCHAR, PRIMARY KEY (id, v)); CREATE TABLE whole (id BIGINT NOT NULL PRIMARY KEY, v INT, "W" VARCHAR)`})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public.inside,public.whole,public.outside", "PGSOURCE_CREATE": "false"})
	if err := pg.Exec(t.Context(), `UPDATE outside SET v = 2`); err == nil {
		t.Fatal("Postgres takes the update: there is nothing to say")
	}
	parts := []string{`row filter for public.outside reads "v", "W", outside the replica identity`, `without a column list for "public"."outside", and ALTER TABLE "public"."outside" REPLICA IDENTITY FULL`}
	wants(t, runCheck(t, env), 65, parts...)
	d := startPgsource(t, env)
	said := awaitEnd(t, d, 65)
	if !strings.Contains(said, "outside the replica identity") {
		t.Errorf("the start says:\n%s", said)
	}
	execSQL(t, pg, `ALTER TABLE "public"."outside" REPLICA IDENTITY FULL`)
	if err := pg.Exec(t.Context(), `UPDATE outside SET v = 2`); err == nil {
		t.Fatal("Postgres takes the update: there is nothing to say")
	}
	wants(t, runCheck(t, env), 65, "a column list for public.outside, whose replica identity is FULL", `without a list for "public"."outside"`)
	execSQL(t, pg, `ALTER PUBLICATION "holdfast" SET TABLE outside WHERE (id > 0 AND "W" IS NOT NULL AND v < 10), inside (id, v, "W") WHERE (v < 10), whole WHERE ("W" IS NOT NULL)`)
	execSQL(t, pg, `UPDATE outside SET v = 2; UPDATE inside SET v = 3; DELETE FROM whole`)
	wants(t, runCheck(t, env), 0)
}
