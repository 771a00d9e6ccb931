package e2e

import (
	"fmt"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// A table from which others inherit is carried without their rows, by the copy,
// the stream and the comparison alike: changes of those come under their own
// names, and are published only where they are mapped. A partitioned table is
// carried with its partitions.
func TestPgsourceCarriesOnlyTheParent(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE TABLE animals (id bigint PRIMARY KEY, name text); CREATE TABLE dogs (PRIMARY KEY (id)) INHERITS (animals); CREATE TABLE puppies () INHERITS (dogs);
		CREATE TABLE parted (id bigint PRIMARY KEY, name text) PARTITION BY RANGE (id); CREATE TABLE parted1 PARTITION OF parted FOR VALUES FROM (0) TO (100);
		INSERT INTO animals VALUES (1, 'parent'); INSERT INTO dogs VALUES (2, 'child'); INSERT INTO puppies VALUES (3, 'grandchild'); INSERT INTO parted VALUES (1, 'part')`)
	var sql string
	for _, name := range []string{"animals", "dogs", "parted"} {
		sql += "CREATE TABLE " + name + " (id BIGINT NOT NULL PRIMARY KEY, name VARCHAR) WITH ('materialized' = 'true');"
	}
	sim := startSim(t, felderasim.Options{SQL: sql})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public.animals,public.parted"})
	wants(t, runPgsource(t, env, "publication", "sql"), 0, `FOR TABLE ONLY "public"."animals", ONLY "public"."parted"`)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	same := func(tables ...string) {
		t.Helper()
		for _, table := range tables {
			from := table
			if table != "parted" {
				from = "ONLY " + table
			}
			want, err := pg.Rows(t.Context(), `SELECT id, name FROM `+from+` ORDER BY id`)
			if err != nil {
				t.Fatal(err)
			}
			if got := rows(sim, table, "id", "name"); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s: %v, the source has %v", table, got, want)
			}
		}
	}
	waitSim(t, sim, "the rows are copied", func(v felderasim.View) bool { return v.Count("animals") > 0 && v.Count("parted") > 0 })
	execSQL(t, pg, `INSERT INTO animals VALUES (11, 'parent'); INSERT INTO dogs VALUES (12, 'child'); INSERT INTO puppies VALUES (13, 'grandchild'); INSERT INTO parted VALUES (11, 'part');
		UPDATE animals SET name = name || '!'; DELETE FROM animals WHERE id IN (1, 2)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	same("animals", "parted")
	wants(t, runVerb(t, env, "verify"), 0)
	wants(t, runVerb(t, env, "resync", "-all"), 0)
	awaitResyncs(t, d, "asked", 2)
	same("animals", "parted")

	// The child is mapped as a table of its own, by the statement that is said;
	// what it says to take one out takes out no other.
	stopClean(t, d)
	both := map[string]string{"PGSOURCE_TABLES": "public.animals,public.parted,public.dogs"}
	wants(t, runCheck(t, merged(env, both)), 65, `ALTER PUBLICATION "holdfast" ADD TABLE ONLY "public"."dogs"`)
	execSQL(t, pg, `ALTER PUBLICATION "holdfast" ADD TABLE ONLY "public"."dogs"`)
	wants(t, runCheck(t, merged(env, map[string]string{"PGSOURCE_TABLES": "public.parted,public.dogs"})), 65, `ALTER PUBLICATION "holdfast" DROP TABLE ONLY "public"."animals"`)
	if err := d.Restart(both); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	waitSim(t, sim, "the child's rows are copied", func(v felderasim.View) bool { return v.Count("dogs") > 0 })
	execSQL(t, pg, `INSERT INTO dogs VALUES (22, 'child'); INSERT INTO puppies VALUES (23, 'grandchild')`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	same("animals", "dogs", "parted")
}
