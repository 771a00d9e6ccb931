package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// A source table changes its shape under a running pgsource. What Feldera's
// table cannot take is decided before the first row of the new shape, with
// both shapes named; what is before it is delivered and confirmed. Each case
// has a table, a slot and a publication of its own.
func TestPgsourceSchemaDrift(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name, sql string
		env       map[string]string
		seed      bool     // a row of the old shape comes first
		says      []string // of a refusal; none: it goes on
		want      string   // the table's rows in the end
	}{
		{
			"added", `ALTER TABLE added ADD x timestamptz; INSERT INTO added VALUES (2, 2, 2, 'two', now())`, nil, true,
			[]string{"x TIMESTAMP WITH TIME ZONE", "PGSOURCE_EXTRA_COLUMNS=ignore", "it was (id int8 key, a int4, b numeric(10,2), c text)", "x timestamptz"},
			"[[1 1 1 one]]",
		},
		{
			"added_ignored", `ALTER TABLE added_ignored ADD x int DEFAULT 7; INSERT INTO added_ignored VALUES (2, 2, 2, 'two')`,
			map[string]string{"PGSOURCE_EXTRA_COLUMNS": "ignore"},
			true,
			nil, "[[1 1 1 one] [2 2 2 two]]",
		},
		{
			"renamed", `ALTER TABLE renamed RENAME a TO d; INSERT INTO renamed VALUES (2, 2, 2, 'two')`,
			map[string]string{"PGSOURCE_EXTRA_COLUMNS": "ignore"},
			false,
			[]string{"what a rename looks like", "d int4"},
			"[]",
		},
		{
			"renamed_stop", `ALTER TABLE renamed_stop RENAME a TO d; INSERT INTO renamed_stop VALUES (2, 2, 2, 'two')`, nil, true,
			[]string{"lacks the source's columns", "it was", "a int4"},
			"[[1 1 1 one]]",
		},
		{
			"dropped", `ALTER TABLE dropped DROP a; INSERT INTO dropped VALUES (2, 2, 'two')`, nil, true,
			nil, "[[1 1 1 one] [2 - 2 two]]",
		},
		{
			"dropped_needed", `ALTER TABLE dropped_needed DROP c; INSERT INTO dropped_needed VALUES (2, 2, 2)`, nil, true,
			[]string{"NOT NULL", "it was"},
			"[[1 1 1 one]]",
		},
		{
			"scale", `ALTER TABLE scale ALTER b TYPE numeric(12,4); INSERT INTO scale VALUES (2, 2, 2, 'two')`, nil, false,
			[]string{"is now numeric(12,4)", "DECIMAL(10,2)", "widen"},
			"[]",
		},
		{
			"scale_cut", `ALTER TABLE scale_cut ALTER b TYPE numeric(12,4); INSERT INTO scale_cut VALUES (2, 2, 2.0199, 'two')`,
			map[string]string{"PGSOURCE_DECIMAL_EXCESS": "truncate"},
			true,
			nil, "[[1 1 1 one] [2 2 2.01 two]]",
		},
		{
			"wider", `ALTER TABLE wider ALTER a TYPE bigint; INSERT INTO wider VALUES (2, 2, 2, 'two')`, nil, true,
			[]string{"column a is now int8", "BIGINT"},
			"[[1 1 1 one]]",
		},
		{
			"fits", `ALTER TABLE fits ALTER a TYPE smallint, ALTER c TYPE varchar(9), ALTER b TYPE numeric(9,1); INSERT INTO fits VALUES (2, 2, 2, 'two')`, nil, true,
			nil, "[[1 1 1 one] [2 2 2 two]]",
		},
		{
			"retyped", `ALTER TABLE retyped ALTER a TYPE text; INSERT INTO retyped VALUES (2, '2', 2, 'two')`, nil, true,
			[]string{"INTEGER", "a text"},
			"[[1 1 1 one]]",
		},
		{
			"rekeyed", `ALTER TABLE rekeyed DROP CONSTRAINT rekeyed_pkey, ADD PRIMARY KEY (id, c); INSERT INTO rekeyed VALUES (2, 2, 2, 'two')`, nil, true,
			[]string{"identifies rows by", "same key on both sides"},
			"[[1 1 1 one]]",
		},
		{ // none of the transaction is sent
			"inside", `BEGIN; INSERT INTO inside VALUES (2, 2, 2, 'two'); ALTER TABLE inside ADD x int; INSERT INTO inside VALUES (3, 3, 3, 'three', 3); COMMIT`, nil, true,
			[]string{"x INTEGER"},
			"[[1 1 1 one]]",
		},
		{
			"inside_ignored", `BEGIN; INSERT INTO inside_ignored VALUES (2, 2, 2, 'two'); ALTER TABLE inside_ignored ADD x int; INSERT INTO inside_ignored VALUES (3, 3, 3, 'three', 3);
				ALTER TABLE inside_ignored DROP x; INSERT INTO inside_ignored VALUES (4, 4, 4, 'four'); ALTER TABLE inside_ignored ALTER c TYPE varchar(20); UPDATE inside_ignored SET a = 0; COMMIT`,
			map[string]string{"PGSOURCE_EXTRA_COLUMNS": "ignore"},
			true, nil, "[[1 0 1 one] [2 0 2 two] [3 0 3 three] [4 0 4 four]]",
		},
	}
	pg := harness.NeedPostgres(t, harness.PostgresOptions{Settings: map[string]string{"max_replication_slots": "20", "max_wal_senders": "20"}})
	var program strings.Builder
	for _, c := range cases {
		execSQL(t, pg, fmt.Sprintf(`CREATE TABLE %s (id bigint PRIMARY KEY, a int, b numeric(10,2), c text NOT NULL)`, c.name))
		fmt.Fprintf(&program, "CREATE TABLE %s (id BIGINT NOT NULL PRIMARY KEY, a INT, b DECIMAL(10,2), c VARCHAR NOT NULL);\n", c.name)
	}
	sim := startSim(t, felderasim.Options{SQL: program.String()})
	// One after the other in groups: each daemon is a process.
	for _, c := range cases {
		d := startPgsource(t, merged(merged(pgsourceEnv(pg, sim), map[string]string{
			"PGSOURCE_TABLES": "public." + c.name, "PGSOURCE_SLOT": "slot_" + c.name, "PGSOURCE_PUBLICATION": "pub_" + c.name, "PGSOURCE_STATE": "none",
		}), c.env))
		waitHealthy(t, d)
		before := currentLSN(t, pg)
		if c.seed {
			execSQL(t, pg, `INSERT INTO `+c.name+` VALUES (1, 1, 1, 'one')`)
		}
		execSQL(t, pg, c.sql)
		after := currentLSN(t, pg)
		if len(c.says) == 0 {
			awaitSlot(t, pg, "slot_"+c.name, after)
		} else {
			said := awaitEnd(t, d, 65)
			for _, part := range append(c.says, "public."+c.name, "LSN", "pgsource skip ") {
				if !strings.Contains(said, part) {
					t.Errorf("%s: it does not say %q:\n%s", c.name, part, said)
				}
			}
			got, err := pg.ConfirmedFlushLSN(t.Context(), "slot_"+c.name)
			if err != nil || got >= after || c.seed && got <= before { // the seed is confirmed, and the change is not
				t.Errorf("%s: confirmed %d, before the seed %d, after it %d, %v", c.name, got, before, after, err)
			}
		}
		if got := fmt.Sprint(rows(sim, c.name, "id", "a", "b", "c")); got != c.want {
			t.Errorf("%s: the table holds %s, want %s", c.name, got, c.want)
		}
		switch c.name {
		case "added_ignored":
			metricIs(t, d, "pgsource_ignored_columns", c.name, 1)
			health(t, d, "the column is shown", func(_ int, body string) bool { return strings.Contains(body, "public.added_ignored: left out x") })
		case "fits":
			health(t, d, "that older rows do not come again is said", func(_ int, body string) bool {
				return strings.Contains(body, "public.fits: added or of another type since the start, and not sent again for older rows (pgsource resync): a, b, c")
			})
		case "dropped":
			metricIs(t, d, "pgsource_absent_columns", c.name, 1)
		}
		d.Close()
	}
}

func metricIs(t *testing.T, d *harness.Daemon, name, table string, want float64) {
	t.Helper()
	if got, err := d.Metric(t.Context(), name, map[string]string{"table": "public." + table}); err != nil || got != want {
		t.Errorf("%s of %s is %v, %v", name, table, got, err)
	}
}

// A change of the catalogue leaves the rows that are there with other values, or
// lets rows out of the stream, without a change in it: pgsource stops with the
// resync that mends it, instead of going on beside rows that differ. Each case
// has a table, a slot and a publication of its own.
func TestPgsourceNoticesChangedRows(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name, sql string
		says      string
		want      string // the table's rows in the end, "" where some come before it is noticed
	}{
		{
			"unkeyed", `ALTER TABLE unkeyed DROP CONSTRAINT unkeyed_pkey; INSERT INTO unkeyed VALUES (1, 5, 'twice', 'sad')`,
			"no usable replica identity", "[[1 1 one sad] [2 2 two sad]]",
		},
		{
			"unkeyed_full", `ALTER TABLE unkeyed_full REPLICA IDENTITY FULL; ALTER TABLE unkeyed_full DROP CONSTRAINT unkeyed_full_pkey; INSERT INTO unkeyed_full VALUES (1, 5, 'twice', 'sad')`,
			"is not unique in it", "",
		},
		{
			"exchanged", `ALTER TABLE exchanged RENAME v TO x; ALTER TABLE exchanged RENAME n TO v; ALTER TABLE exchanged RENAME x TO n;
				ALTER TABLE exchanged ALTER n TYPE int USING 3, ALTER v TYPE text`,
			"is another one than it was", "[[1 1 one sad] [2 2 two sad]]",
		},
		{
			"exchanged_rows", `ALTER TABLE exchanged_rows DROP v; ALTER TABLE exchanged_rows ADD v text DEFAULT 'anew'; INSERT INTO exchanged_rows (id, n) VALUES (3, 3)`,
			"pgsource resync public.exchanged_rows", "[[1 1 one sad] [2 2 two sad]]",
		},
		{
			"made_anew", `ALTER TABLE made_anew DROP m; ALTER TABLE made_anew ADD m mood DEFAULT 'glad'; INSERT INTO made_anew (id) VALUES (3)`,
			"is another one than it was: it was dropped and made anew", "[[1 1 one sad] [2 2 two sad] [3 - - glad]]",
		},
		{
			"labelled", `CREATE TYPE other AS ENUM ('a', 'b'); ALTER TYPE other RENAME VALUE 'a' TO 'c'; ALTER TYPE mood2 ADD VALUE 'new'; ALTER TYPE mood2 RENAME VALUE 'sad' TO 'blue'`,
			"mood2 is now", "[[1 1 one sad] [2 2 two sad]]",
		},
		{
			"composed", `ALTER TYPE pair ADD ATTRIBUTE c int CASCADE`,
			"pair has other attributes", "[[1 1 one (sad,)] [2 2 two (sad,)]]",
		},
		{
			"priced", `ALTER DATABASE postgres SET lc_monetary = 'POSIX'`,
			"values of type money are written by lc_monetary, which is now", "[[1 1 one $1.50] [2 2 two $1.50]]",
		},
		{
			"listed", `ALTER PUBLICATION listed SET TABLE listed (id, n, m); UPDATE listed SET n = 7`,
			"column list leaves out column", "",
		},
		{
			"filtered", `ALTER PUBLICATION filtered SET TABLE filtered WHERE (id < 2); UPDATE filtered SET v = 'new'`,
			"row filter is now (id < 2) and was none", "[[1 1 new sad] [2 2 two sad]]",
		},
		{
			"renamed", `ALTER TABLE renamed RENAME v TO w; INSERT INTO renamed VALUES (3, 3, 'three', 'sad')`,
			"what a rename looks like", "[[1 1 one sad] [2 2 two sad]]",
		},
		{
			"put_back", `ALTER PUBLICATION put_back DROP TABLE put_back; INSERT INTO put_back VALUES (3, 3, 'unseen', 'sad'); ALTER PUBLICATION put_back ADD TABLE put_back`,
			"it was taken out of the publication and put back", "[[1 1 one sad] [2 2 two sad]]",
		},
	}
	pg := harness.NeedPostgres(t, harness.PostgresOptions{Settings: map[string]string{"max_replication_slots": "20", "max_wal_senders": "20"}})
	execSQL(t, pg, `CREATE TYPE mood AS ENUM ('sad', 'glad'); CREATE TYPE mood2 AS ENUM ('sad', 'glad'); CREATE DOMAIN feeling AS mood2; CREATE TYPE pair AS (a text, b int)`)
	var program strings.Builder
	for _, c := range cases {
		kind := "mood"
		switch c.name {
		case "labelled":
			kind = "feeling"
		case "composed":
			kind = "pair"
		case "priced":
			kind = "money"
		}
		execSQL(t, pg, fmt.Sprintf(`CREATE TABLE %s (id bigint PRIMARY KEY, n int, v text, m %s)`, c.name, kind))
		fmt.Fprintf(&program, "CREATE TABLE %s (id BIGINT NOT NULL PRIMARY KEY, n INT, v VARCHAR, m VARCHAR);\n", c.name)
	}
	sim := startSim(t, felderasim.Options{SQL: program.String()})
	newer := major(t, pg) >= 15
	for _, c := range cases {
		if !newer && (c.name == "listed" || c.name == "filtered") {
			continue // no column lists, no row filters
		}
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			env := merged(pgsourceEnv(pg, sim), map[string]string{
				"PGSOURCE_TABLES": "public." + c.name, "PGSOURCE_SLOT": "slot_" + c.name, "PGSOURCE_PUBLICATION": c.name,
				"PGSOURCE_STATE": "file:" + filepath.Join(t.TempDir(), "state.json"),
			})
			if c.name == "renamed" { // else the new name alone is reason enough
				env["PGSOURCE_EXTRA_COLUMNS"] = "ignore"
			}
			d := startPgsource(t, env)
			waitHealthy(t, d)
			mood := "sad"
			switch c.name {
			case "composed":
				mood = "(sad,)"
			case "priced":
				mood = "1.50"
			}
			execSQL(t, pg, fmt.Sprintf(`INSERT INTO %[1]s VALUES (1, 1, 'one', '%[2]s'), (2, 2, 'two', '%[2]s')`, c.name, mood))
			awaitSlot(t, pg, "slot_"+c.name, currentLSN(t, pg))
			execSQL(t, pg, c.sql)
			said := awaitEnd(t, d, 65)
			for _, part := range []string{c.says, "public." + c.name} {
				if !strings.Contains(said, part) {
					t.Errorf("it does not say %q:\n%s", part, said)
				}
			}
			if got := fmt.Sprint(rows(sim, c.name, "id", "n", "v", "m")); c.want != "" && got != c.want {
				t.Errorf("the table holds %s, want %s", got, c.want)
			}
			if c.name == "unkeyed" {
				return // stopped before anything differed
			}
			wants(t, runVerb(t, env, "state", "show"), 0, "differs        public."+c.name)
		})
	}
}

// The same, and partitions that come and go, while no pgsource runs: the next
// start names each table with the reason, and stops once; columns that older
// rows lack are no reason to stop. All of them are said until a resync, which
// mends them. What changes no row is not said.
func TestPgsourceNoticesChangesWhileDown(t *testing.T) {
	t.Parallel()
	cases := []struct{ name, sql, says string }{
		{"exchanged", `ALTER TABLE exchanged RENAME n TO x; ALTER TABLE exchanged RENAME k TO n; ALTER TABLE exchanged RENAME x TO k`, `column "k" is another one`},
		{"made_anew", `ALTER TABLE made_anew DROP v; ALTER TABLE made_anew ADD v text DEFAULT 'anew'`, `column "v" is another one`},
		{"labelled", `ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'`, "mood were renamed"},
		{"filtered", `ALTER PUBLICATION holdfast SET TABLE exchanged, made_anew, labelled, filtered WHERE (id < 2), defaulted, renamed, empty_column, grown, parts, put_back, relisted (id, n, k, v), untouched; UPDATE filtered SET v = 'new'`, "row filter is now (id < 2)"},
		{"put_back", `ALTER PUBLICATION holdfast DROP TABLE put_back; INSERT INTO put_back VALUES (3, 30, 300, 'unseen'); ALTER PUBLICATION holdfast ADD TABLE put_back`, "it was taken out of the publication and put back"},
		{"relisted", `ANALYZE relisted`, ""}, // it has a column list by what is done to filtered, of every column
		{"parts", `ALTER TABLE parts DETACH PARTITION p1; CREATE TABLE p2 PARTITION OF parts FOR VALUES FROM (20) TO (30); ALTER TABLE parts ATTACH PARTITION spare FOR VALUES FROM (30) TO (40)`, "partition public.spare was attached"},
		{"defaulted", `ALTER TABLE defaulted ADD x int DEFAULT 7`, ""},
		{"renamed", `ALTER TABLE renamed RENAME k TO x`, ""},
		{"empty_column", `ALTER TABLE empty_column ADD x int; VACUUM FULL empty_column`, ""},
		{"grown", `ALTER TYPE growing ADD VALUE 'more' BEFORE 'some'`, ""},
		{"untouched", `CREATE INDEX ON untouched (v); ALTER TABLE untouched ALTER v SET NOT NULL`, ""},
	}
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	if major(t, pg) < 15 {
		cases = slices.DeleteFunc(cases, func(c struct{ name, sql, says string }) bool { return c.name == "filtered" })
	}
	execSQL(t, pg, `CREATE TYPE mood AS ENUM ('sad', 'glad'); CREATE TYPE growing AS ENUM ('none', 'some');
		CREATE TABLE parts (id bigint, n int, k int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id);
		CREATE TABLE p0 PARTITION OF parts FOR VALUES FROM (0) TO (2); CREATE TABLE p1 PARTITION OF parts FOR VALUES FROM (2) TO (20);
		CREATE TABLE spare (id bigint PRIMARY KEY, n int, k int, v text); INSERT INTO spare VALUES (30, 1, 2, 'spare')`)
	var program strings.Builder
	var mapped []string
	for _, c := range cases {
		mapped = append(mapped, "public."+c.name)
		fmt.Fprintf(&program, "CREATE TABLE %s (id BIGINT NOT NULL PRIMARY KEY, n INT, k INT, v VARCHAR, x INT);\n", c.name)
		kind := map[string]string{"labelled": "mood", "grown": "growing"}[c.name]
		if kind == "" {
			kind = "text"
		}
		if c.name != "parts" {
			execSQL(t, pg, fmt.Sprintf(`CREATE TABLE %s (id bigint PRIMARY KEY, n int, k int, v %s)`, c.name, kind))
		}
	}
	sim := startSim(t, felderasim.Options{SQL: program.String()})
	env := merged(resyncEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": strings.Join(mapped, ",")})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	for _, c := range cases {
		v := map[string]string{"labelled": "'sad'", "grown": "'some'", "untouched": "'v'"}[c.name]
		if v == "" {
			v = "NULL"
		}
		execSQL(t, pg, fmt.Sprintf(`INSERT INTO %[1]s VALUES (1, 10, 100, %[2]s), (2, 20, 200, %[2]s)`, c.name, v))
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	stopClean(t, d)
	for range 2 { // a start without changes says nothing
		if err := d.Restart(nil); err != nil {
			t.Fatal(err)
		}
		waitHealthy(t, d)
		awaitDiffering(t, d, 0)
		stopClean(t, d)
	}

	for _, c := range cases {
		for sql := range strings.SplitSeq(c.sql, "; ") {
			execSQL(t, pg, sql)
		}
	}
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	said := awaitEnd(t, d, 65)
	shown := runVerb(t, env, "state", "show")
	differing := 0.0
	for _, c := range cases {
		if c.says != "" && (!strings.Contains(shown.Stdout, c.says) || !strings.Contains(said, " public."+c.name)) {
			t.Errorf("%s: it does not say %q:\n%s\n%s", c.name, c.says, said, shown.Stdout)
		}
		differs := c.says != "" || c.name == "defaulted" || c.name == "renamed"
		if strings.Contains(shown.Stdout, "differs        public."+c.name+",") != differs {
			t.Errorf("%s: the state says:\n%s", c.name, shown.Stdout)
		}
		if differs {
			differing++
		}
	}
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	awaitDiffering(t, d, differing)
	wants(t, runVerb(t, env, "resync", "-all"), 0)
	awaitDiffering(t, d, 0)
	for _, c := range cases {
		columns := []string{"id", "n", "k", "v"}
		switch c.name {
		case "defaulted":
			columns = append(columns, "x")
		case "renamed":
			columns[2] = "x"
		}
		if c.name != "filtered" {
			sameRows(t, pg, sim, c.name, columns...)
		}
	}

	// While it runs, a column that comes with values is said at the next look.
	execSQL(t, pg, `ALTER TABLE untouched ADD x int DEFAULT 7`)
	awaitDiffering(t, d, 1)
	health(t, d, "the column is named", func(status int, body string) bool {
		return status == 200 && strings.Contains(body, `columns \"x\" came later`)
	})
	stopClean(t, d)
	resyncMends(t, d, env, "public.untouched")
	sameRows(t, pg, sim, "untouched", "id", "n", "k", "v", "x")
}

// A column that comes between two queries of one look at the catalogue would seem
// to be one that the publication leaves out, and at the next look as if the
// publication had just taken it in, so that older rows lacked it: the look is made
// again instead.
func TestPgsourceLooksAgainAtATableThatChanges(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE TABLE moving (id bigint PRIMARY KEY, v text)`)
	sim := startSim(t, felderasim.Options{SQL: `CREATE TABLE moving (id BIGINT NOT NULL PRIMARY KEY, v VARCHAR, x INT)`})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public.moving"}))
	waitHealthy(t, d)

	conn, err := pg.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	watching, err := pg.Connect(t.Context()) // what a transaction sees of others' queries does not change
	if err != nil {
		t.Fatal(err)
	}
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// The second query of a look is the only one that reads it.
	if _, err := tx.Exec(t.Context(), `LOCK TABLE pg_attrdef IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, patience, "a look is between two queries", func(ctx context.Context) (any, bool) {
		var query string
		err := watching.QueryRow(ctx, `SELECT coalesce(string_agg(query, ''), '') FROM pg_stat_activity WHERE wait_event_type = 'Lock'`).Scan(&query)
		return fmt.Sprint(query, err), strings.Contains(query, "atthasmissing")
	})
	if _, err := tx.Exec(t.Context(), `ALTER TABLE moving ADD x int`); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, patience, "the column is known as one that is published", func(context.Context) (any, bool) {
		state, err := os.ReadFile(stateFile(pg))
		return fmt.Sprint(string(state), err), strings.Contains(string(state), "=3fp")
	})
	if n := metric(t, d, "pgsource_differing_tables", nil); n != 0 {
		t.Errorf("%v tables are said to differ", n)
	}
	execSQL(t, pg, `INSERT INTO moving VALUES (1, 'one', 1)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	sameRows(t, pg, sim, "moving", "id", "v", "x")
	stopClean(t, d)
}

// A publication that leaves a table out while no pgsource runs is refused; what
// was missed meanwhile stays said when it is mended. A table that is new to
// pgsource has missed nothing.
func TestPgsourceNoticesWhatWasLeftOutWhileDown(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := merged(resyncEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public.orders"})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	stopClean(t, d)
	execSQL(t, pg, `ALTER PUBLICATION holdfast SET TABLE items; UPDATE orders SET customer = 'missed'`)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "does not publish") {
		t.Errorf("it says %s", said)
	}
	execSQL(t, pg, `ALTER PUBLICATION holdfast SET TABLE orders`)
	if err := d.Restart(map[string]string{"PGSOURCE_TABLES": "public.orders,public.items"}); err != nil {
		t.Fatal(err)
	}
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "does not publish") {
		t.Errorf("it says %s", said)
	}
	execSQL(t, pg, `ALTER PUBLICATION holdfast ADD TABLE items`)
	resyncMends(t, d, env, "public.orders")
	assertEqualTables(t, pg, sim)
	stopClean(t, d)
	if major(t, pg) < 15 {
		return // no column lists
	}

	execSQL(t, pg, `ALTER PUBLICATION holdfast SET TABLE orders (id, customer, amount, paid), items; UPDATE orders SET note = 'missed'`)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "column list leaves it out") {
		t.Errorf("it says %s", said)
	}
	execSQL(t, pg, `ALTER PUBLICATION holdfast SET TABLE orders, items`)
	wants(t, runVerb(t, env, "state", "show"), 0, "differs        public.orders,")
	resyncMends(t, d, env, "public.orders")
	assertEqualTables(t, pg, sim)
}

// resyncMends starts pgsource again, which says that one table differs, and
// resyncs it, after which none does.
func resyncMends(t *testing.T, d *harness.Daemon, env map[string]string, table string) {
	t.Helper()
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	awaitDiffering(t, d, 1)
	wants(t, runVerb(t, env, "resync", table), 0)
	awaitDiffering(t, d, 0)
}
