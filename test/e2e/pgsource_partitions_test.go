package e2e

import (
	"fmt"
	"strings"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

const partitioned = `CREATE TABLE parts (id bigint PRIMARY KEY, v text) PARTITION BY RANGE (id);
	CREATE TABLE p0 PARTITION OF parts FOR VALUES FROM (0) TO (10); CREATE TABLE p1 PARTITION OF parts FOR VALUES FROM (10) TO (20);
	CREATE TABLE p2 PARTITION OF parts FOR VALUES FROM (20) TO (30) PARTITION BY RANGE (id); CREATE TABLE p2a PARTITION OF p2 FOR VALUES FROM (20) TO (30);
	CREATE TABLE spare (v text, gone int, id bigint NOT NULL PRIMARY KEY); ALTER TABLE spare DROP COLUMN gone`

// Rows of partitions that have other column orders, dropped columns and levels
// between, of partitions that are made later, and rows that move between them.
// A TRUNCATE of the whole is in the stream, whatever the catalogue then shows.
func TestPgsourcePartitionShapes(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, partitioned+`; ALTER TABLE parts ATTACH PARTITION spare FOR VALUES FROM (30) TO (40)`)
	sim := startSim(t, felderasim.Options{SQL: `CREATE TABLE parts (id BIGINT NOT NULL PRIMARY KEY, v VARCHAR)`})
	proxy := harness.NeedProxy(t, pg.Addr())
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_TABLES": "public.parts", "PGSOURCE_TRUNCATE": "delete_all", "PGSOURCE_DSN": pg.DSNFor("postgres", "", "postgres", proxy.Addr()),
	}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO parts SELECT n, 'v' || n FROM generate_series(1, 39) n`)
	execSQL(t, pg, `UPDATE parts SET id = 5 + id * 0 WHERE id = 5; BEGIN; DELETE FROM parts WHERE id IN (6, 36); UPDATE parts SET id = 6 WHERE id = 35; UPDATE parts SET id = 36 WHERE id = 25; UPDATE parts SET v = 'x' WHERE id = 36; COMMIT`)
	execSQL(t, pg, `CREATE TABLE p4 PARTITION OF parts FOR VALUES FROM (40) TO (50); INSERT INTO parts VALUES (41, 'new partition')`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	sameRows(t, pg, sim, "parts", "id", "v")
	execSQL(t, pg, `BEGIN; TRUNCATE parts; INSERT INTO parts VALUES (1, 'after'), (31, 'after'); COMMIT`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	sameRows(t, pg, sim, "parts", "id", "v")
	// A new connection looks at the catalogue before it streams: the new
	// partition and the emptied files are no offence.
	// The second one comes when the stream has passed what the first one saw.
	for i := range 2 {
		proxy.Cut()
		execSQL(t, pg, fmt.Sprintf(`INSERT INTO parts VALUES (%d, 'later')`, 2+i))
		awaitConfirmed(t, pg, currentLSN(t, pg))
		sameRows(t, pg, sim, "parts", "id", "v")
	}
}

// Rows that come and go with their partition are not in the stream: that is
// noticed, and says which.
func TestPgsourceNoticesPartitions(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ sql, says string }{
		"detached":  {`ALTER TABLE parts DETACH PARTITION p1`, "partition public.p1 was detached or dropped"},
		"dropped":   {`DROP TABLE p2`, "partition public.p2a was detached or dropped"},
		"attached":  {`ALTER TABLE parts ATTACH PARTITION spare FOR VALUES FROM (30) TO (40)`, "public.spare was attached"},
		"truncated": {`TRUNCATE p0`, "partition public.p0 was truncated"},
		// As the catalogue shows a TRUNCATE of the whole, but not in the stream.
		"all truncated": {`TRUNCATE p0, p1, p2a, p2`, "partition public.p2a was truncated or rewritten by itself"},
		"identity":      {`ALTER TABLE p0 REPLICA IDENTITY FULL`, "its replica identity is FULL"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg := harness.NeedPostgres(t, harness.PostgresOptions{})
			execSQL(t, pg, partitioned)
			sim := startSim(t, felderasim.Options{SQL: `CREATE TABLE parts (id BIGINT NOT NULL PRIMARY KEY, v VARCHAR)`})
			proxy := harness.NeedProxy(t, pg.Addr())
			env := merged(pgsourceEnv(pg, sim), map[string]string{
				"PGSOURCE_TABLES": "public.parts", "PGSOURCE_DSN": pg.DSNFor("postgres", "", "postgres", proxy.Addr()),
			})
			d := startPgsource(t, env)
			waitHealthy(t, d)
			execSQL(t, pg, `INSERT INTO parts SELECT n, 'v' || n FROM generate_series(0, 29) n`)
			execSQL(t, pg, `VACUUM FULL p1`) // another file, and the same rows
			awaitConfirmed(t, pg, currentLSN(t, pg))
			execSQL(t, pg, c.sql)
			proxy.Cut() // the next connection looks first: no need to wait for the clock
			if said := awaitEnd(t, d, 65); !strings.Contains(said, c.says) {
				t.Errorf("it says %s, want %q", said, c.says)
			}
			if name == "all truncated" {
				// What is said to mend it does.
				execSQL(t, pg, `INSERT INTO parts VALUES (3, 'meanwhile')`)
				if err := d.Restart(nil); err != nil {
					t.Fatal(err)
				}
				waitHealthy(t, d)
				awaitDiffering(t, d, 1)
				wants(t, runVerb(t, env, "resync", "public.parts"), 0)
				awaitResyncs(t, d, "asked", 1)
				awaitDiffering(t, d, 0)
				awaitConfirmed(t, pg, currentLSN(t, pg))
				sameRows(t, pg, sim, "parts", "id", "v")
			}
			if name != "dropped" {
				return
			}
			// What a person has accepted is the new state; and it can be let
			// pass from the start.
			if err := d.Restart(map[string]string{"PGSOURCE_PARTITIONS": "ignore"}); err != nil {
				t.Fatal(err)
			}
			waitHealthy(t, d)
			execSQL(t, pg, `DROP TABLE p1`)
			proxy.Cut()
			execSQL(t, pg, `INSERT INTO parts VALUES (5, 'goes on') ON CONFLICT (id) DO UPDATE SET v = 'goes on'`)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			if n, err := d.Metric(t.Context(), "pgsource_partition_changes_ignored_total", nil); err != nil || n != 1 {
				t.Errorf("%v changes were ignored, %v", n, err)
			}
		})
	}
}
