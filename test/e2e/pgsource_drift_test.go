package e2e

import (
	"fmt"
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
		if c.seed {
			execSQL(t, pg, `INSERT INTO `+c.name+` VALUES (1, 1, 1, 'one')`)
		}
		before := currentLSN(t, pg)
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
			if err != nil || got >= after || c.seed && got < before-256 { // the seed's commit record is shorter than that
				t.Errorf("%s: confirmed %d, before the change %d, after it %d, %v", c.name, got, before, after, err)
			}
		}
		if got := fmt.Sprint(rows(sim, c.name, "id", "a", "b", "c")); got != c.want {
			t.Errorf("%s: the table holds %s, want %s", c.name, got, c.want)
		}
		switch c.name {
		case "added_ignored":
			metricIs(t, d, "pgsource_ignored_columns", c.name, 1)
			health(t, d, "the column is shown", func(_ int, body string) bool { return strings.Contains(body, "public.added_ignored: left out x") })
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
