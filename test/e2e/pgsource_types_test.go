package e2e

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// checkEnv runs "pgsource check" and gives what it says.
func checkEnv(t *testing.T, env map[string]string) harness.RunResult {
	t.Helper()
	r, err := harness.Run(t.Context(), harness.DaemonOptions{Program: build(t, "pgsource"), Args: []string{"check"}, Env: env})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// A type that is made, used and gone while pgsource runs: its values are read
// as what they are, whether the catalogue still has it when they are decoded
// or not.
func TestPgsourceTypesThatComeAndGo(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE TABLE typed (id bigint PRIMARY KEY, n integer, b boolean, tags text)`)
	sim := startSim(t, felderasim.Options{SQL: `CREATE TABLE typed (id BIGINT NOT NULL PRIMARY KEY, n INT, b BOOLEAN, tags VARCHAR)`})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public.typed"})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO typed VALUES (1, 1, true, 'a')`)
	execSQL(t, pg, `CREATE DOMAIN small AS integer CHECK (VALUE < 100); CREATE DOMAIN yes AS boolean; CREATE TYPE mood AS ENUM ('ok')`)
	execSQL(t, pg, `BEGIN; ALTER TABLE typed ALTER n TYPE small, ALTER b TYPE yes; INSERT INTO typed VALUES (2, 2, false, 'b'); COMMIT`)
	execSQL(t, pg, `ALTER TABLE typed ALTER tags TYPE mood USING 'ok'; INSERT INTO typed VALUES (3, 3, NULL, 'ok')`)
	execSQL(t, pg, `ALTER TYPE mood ADD VALUE 'so so'`) // no new description of the table follows
	execSQL(t, pg, `INSERT INTO typed VALUES (4, 4, true, 'so so')`)
	awaitConfirmed(t, pg, currentLSN(t, pg))

	// The domains are gone before their rows are read.
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	awaitEnd(t, d, 0)
	execSQL(t, pg, `CREATE DOMAIN brief AS integer; CREATE DOMAIN no AS boolean; ALTER TABLE typed ALTER n TYPE brief, ALTER b TYPE no;
		INSERT INTO typed VALUES (5, 5, true, 'ok')`)
	execSQL(t, pg, `ALTER TABLE typed ALTER n TYPE integer, ALTER b TYPE boolean; DROP DOMAIN brief, no; INSERT INTO typed VALUES (6, 6, false, 'ok')`)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	want := [][]string{{"1", "1", "true", "a"}, {"2", "2", "false", "b"}, {"3", "3", "-", "ok"}, {"4", "4", "true", "so so"}, {"5", "5", "true", "ok"}, {"6", "6", "false", "ok"}}
	if diff := cmp.Diff(want, rows(sim, "typed", "id", "n", "b", "tags")); diff != "" {
		t.Error(diff)
	}
}

// A column that no Feldera type of the table can take as it is is refused
// before anything streams, by name.
func TestPgsourceRefusesTypesBeforeStreaming(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE EXTENSION hstore; CREATE EXTENSION seg; CREATE TYPE pair AS (a integer, b text); CREATE TYPE mood AS ENUM ('ok');
		CREATE DOMAIN words AS text[];
		CREATE TABLE h (id bigint PRIMARY KEY, v hstore); CREATE TABLE c (id bigint PRIMARY KEY, v pair); CREATE TABLE r (id bigint PRIMARY KEY, v int4range);
		CREATE TABLE a (id bigint PRIMARY KEY, v integer[]); CREATE TABLE e (id bigint PRIMARY KEY, v mood); CREATE TABLE b (id bigint PRIMARY KEY, v box[]);
		CREATE TABLE w (id bigint PRIMARY KEY, v words); CREATE TABLE i (id bigint PRIMARY KEY, v interval); CREATE TABLE m (id bigint PRIMARY KEY, v money);
		CREATE TABLE s (id bigint PRIMARY KEY, v seg)`)
	key := `(id BIGINT NOT NULL PRIMARY KEY, v `
	sim := startSim(t, felderasim.Options{SQL: `CREATE TABLE h ` + key + `MAP<VARCHAR, VARCHAR>); CREATE TABLE c ` + key + `ROW(a INT, b VARCHAR));
		CREATE TABLE r ` + key + `INT ARRAY); CREATE TABLE a ` + key + `DATE ARRAY); CREATE TABLE e ` + key + `INT);
		CREATE TABLE b ` + key + `VARCHAR ARRAY); CREATE TABLE w ` + key + `INT ARRAY); CREATE TABLE i ` + key + `BIGINT); CREATE TABLE m ` + key + `DECIMAL(20, 2));
		CREATE TABLE s ` + key + `DOUBLE)`})
	for _, table := range strings.Split("h c r a e b w i m s", " ") {
		r := checkEnv(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public." + table}))
		if said := r.Stdout + r.Stderr; r.ExitCode != 65 || !strings.Contains(said, `column "v"`) || !strings.Contains(said, "public."+table) {
			t.Errorf("%s: exit code %d:\n%s", table, r.ExitCode, said)
		}
	}
}
