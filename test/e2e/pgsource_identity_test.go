package e2e

import (
	"fmt"
	"strings"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// Keys move, in chains and in circles, and values that are stored out of line
// are not sent again: under every replica identity that can be carried, the
// destination ends as the source.
func TestPgsourceRowIdentity(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	tables := []struct{ name, ddl string }{
		{"by_key", `CREATE TABLE by_key (id bigint PRIMARY KEY DEFERRABLE INITIALLY IMMEDIATE, v text, big text)`},
		{"by_full", `CREATE TABLE by_full (id bigint, v text, big text, UNIQUE (id)); ALTER TABLE by_full REPLICA IDENTITY FULL`},
		{"by_index", `CREATE TABLE by_index (id bigint NOT NULL, v text, big text, other bigserial PRIMARY KEY); CREATE UNIQUE INDEX by_index_id ON by_index (id) INCLUDE (v);
			ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_id`},
		{"Mixed Name", `CREATE SCHEMA "Other One"; CREATE TABLE "Other One"."Mixed Name" (id bigint PRIMARY KEY, v text, big text)`},
	}
	// A deferrable key identifies nothing to replication.
	tables[0].ddl = strings.Replace(tables[0].ddl, " DEFERRABLE INITIALLY IMMEDIATE", "", 1)
	var program string
	for _, c := range tables {
		execSQL(t, pg, c.ddl)
		other := ""
		if c.name == "by_index" {
			other = ", other BIGINT"
		}
		program += fmt.Sprintf("CREATE TABLE %s (id BIGINT NOT NULL PRIMARY KEY, v VARCHAR, big VARCHAR%s);", quoted(c.name), other)
	}
	sim := startSim(t, felderasim.Options{SQL: program})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_TABLES": `public.by_key,public.by_full,public.by_index,"Other One"."Mixed Name"="Mixed Name"`, "PGSOURCE_BATCH_AGE": "100ms",
	}))
	waitHealthy(t, d)
	execSQL(t, pg, `SET search_path = public, "Other One"`)
	for _, c := range tables {
		name := quoted(c.name)
		if c.name == "Mixed Name" {
			name = `"Other One".` + name
		}
		big := `(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 400) n)`
		execSQL(t, pg, `ALTER TABLE `+name+` ALTER big SET STORAGE EXTERNAL`)
		execSQL(t, pg, `INSERT INTO `+name+` (id, v, big) SELECT n, 'v' || n, CASE WHEN n % 2 = 0 THEN `+big+` || n END FROM generate_series(1, 10) n`)
		// The unchanged value stays, in one batch with the row's insert too.
		execSQL(t, pg, `UPDATE `+name+` SET v = v || '!' WHERE id <= 6`)
		execSQL(t, pg, `UPDATE `+name+` SET big = NULL WHERE id = 2; UPDATE `+name+` SET v = 'again' WHERE id = 2; UPDATE `+name+` SET big = `+big+` WHERE id = 2`)
		// A chain and a circle of keys, in one transaction, with rows whose
		// values are inline.
		execSQL(t, pg, `BEGIN; UPDATE `+name+` SET id = 100 WHERE id = 1; UPDATE `+name+` SET id = 1 WHERE id = 3; UPDATE `+name+` SET id = 3 WHERE id = 5; UPDATE `+name+` SET id = 5 WHERE id = 100;
			DELETE FROM `+name+` WHERE id = 7; INSERT INTO `+name+` (id, v) VALUES (7, 'anew'); UPDATE `+name+` SET id = 77 WHERE id = 7; UPDATE `+name+` SET v = 'moved' WHERE id = 77; COMMIT`)
		if c.name == "by_full" { // the one identity under which the value is known when the key moves
			execSQL(t, pg, `UPDATE by_full SET id = 40, v = 'with it' WHERE id = 4`)
		}
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	for _, c := range tables[:3] {
		sameRows(t, pg, sim, c.name, "id", "v", "big")
	}
	want, err := pg.Rows(t.Context(), `SELECT id, v, coalesce(big, '-') FROM "Other One"."Mixed Name" ORDER BY id`)
	if err != nil {
		t.Fatal(err)
	}
	if got := rows(sim, `"Mixed Name"`, "id", "v", "big"); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("Mixed Name: %s", shorten(fmt.Sprint(got)))
	}

	// The key moves and the value that is stored out of line is not sent: it
	// cannot be had any more, so this stops, by name.
	before := len(rows(sim, "by_key", "id"))
	execSQL(t, pg, `UPDATE by_key SET id = 1000 WHERE id = 10`)
	said := awaitEnd(t, d, 65)
	for _, part := range []string{"big", "by_key", "REPLICA IDENTITY FULL", "LSN", "id=1000", "pgsource skip "} {
		if !strings.Contains(said, part) {
			t.Errorf("it does not say %q:\n%s", part, said)
		}
	}
	if got := len(rows(sim, "by_key", "id")); got != before {
		t.Errorf("%d rows, before %d", got, before)
	}
}

// What cannot be identified is refused before anything streams, with the
// statement that mends it.
func TestPgsourceRefusesIdentities(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE TABLE nothing (id bigint PRIMARY KEY); ALTER TABLE nothing REPLICA IDENTITY NOTHING;
		CREATE TABLE keyless (id bigint); CREATE TABLE late (id bigint PRIMARY KEY DEFERRABLE);
		CREATE TABLE loose (id bigint, v text); ALTER TABLE loose REPLICA IDENTITY FULL; CREATE UNIQUE INDEX ON loose (id) WHERE v IS NOT NULL;
		CREATE TABLE deferred (id bigint PRIMARY KEY DEFERRABLE); ALTER TABLE deferred REPLICA IDENTITY FULL;
		CREATE TABLE other (id bigint, v text, PRIMARY KEY (id, v)); CREATE TABLE bag (id bigint PRIMARY KEY);
		CREATE TABLE listed (id bigint PRIMARY KEY, v text); CREATE PUBLICATION listing FOR TABLE listed (v);
		CREATE TABLE leafy (id bigint PRIMARY KEY, v text) PARTITION BY RANGE (id); CREATE TABLE leafy1 PARTITION OF leafy FOR VALUES FROM (0) TO (10);
		ALTER TABLE leafy REPLICA IDENTITY FULL;
		CREATE TABLE rooted (id bigint PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE rooted1 PARTITION OF rooted FOR VALUES FROM (0) TO (10);
		CREATE PUBLICATION leaves FOR TABLE rooted`)
	key, keyed := `(id BIGINT NOT NULL PRIMARY KEY, v VARCHAR);`, []string{"nothing", "keyless", "late", "loose", "deferred", "other", "listed", "leafy", "rooted"}
	program := "CREATE TABLE bag (id BIGINT NOT NULL);"
	for _, name := range keyed {
		program += "CREATE TABLE " + name + " " + key
	}
	sim := startSim(t, felderasim.Options{SQL: program})
	for name, says := range map[string]string{
		"nothing": "ALTER TABLE", "keyless": "primary key", "late": "REPLICA IDENTITY FULL", "loose": "CREATE UNIQUE INDEX",
		"deferred": "not deferrable",
		"other":    "PRIMARY KEY (id, v)", "bag": "REPLICA IDENTITY FULL", "listed": "column list", "leafy": `ALTER TABLE public.leafy1 REPLICA IDENTITY FULL`,
		"rooted": "publish_via_partition_root = true",
	} {
		env := map[string]string{"PGSOURCE_TABLES": "public." + name}
		if publication := map[string]string{"listed": "listing", "rooted": "leaves"}[name]; publication != "" {
			env["PGSOURCE_PUBLICATION"] = publication
		}
		r := checkEnv(t, merged(pgsourceEnv(pg, sim), env))
		if said := r.Stdout + r.Stderr; r.ExitCode != 65 || !strings.Contains(said, says) {
			t.Errorf("%s: exit code %d, want %q in:\n%s", name, r.ExitCode, says, said)
		}
	}
}
