package e2e

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"holdfast/internal/feldera"
	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// keylessProgram has a table whose key the daemons fill, and one without a key.
func keylessProgram() string {
	def := feldera.TableDef{
		Target: "log", Key: feldera.IdentityKey(),
		Columns: append([]feldera.ColumnDef{
			{Name: "word", Type: feldera.Type{Name: feldera.Varchar, Nullable: true}}, {Name: "n", Type: feldera.Type{Name: feldera.BigInt, Nullable: true}},
		}, feldera.IdentityColumns()...),
	}
	return def.SQL() + "CREATE TABLE bag (word VARCHAR, n BIGINT) WITH ('materialized' = 'true');\n"
}

// counted gives how often each row of a table is there.
func counted(sim *felderasim.Sim, table string) map[string]int {
	n := make(map[string]int)
	for _, row := range sim.Rows(table) {
		n[fmt.Sprint(row["word"], " ", row["n"])]++
	}
	return n
}

// keylessTables are a table that takes inserts alone, and the same with whole
// old rows.
const keylessTables = `CREATE TABLE log (word text, n bigint); CREATE TABLE bag (word text, n bigint); ALTER TABLE bag REPLICA IDENTITY FULL`

func keylessEnv(pg *harness.Postgres, sim *felderasim.Sim) map[string]string {
	return merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_TABLES": "public.bag,public.log", "PGSOURCE_BATCH_ROWS": "50",
		"FELDERA_REQUEST_LIFETIME": "2s", "FELDERA_REQUEST_TIMEOUT": "2s",
	})
}

// A pgsource that is killed sends rows again. Under identity columns they meet
// themselves, equal rows of the source stay as many as they are, and a table
// without any key shows that the rows did come twice.
func TestPgsourceIdentityThroughACrash(t *testing.T) {
	t.Parallel()
	for _, place := range []string{"pgsource.sent", "pgsource.after-commit", "pgsource.completed"} {
		t.Run(place, func(t *testing.T) {
			t.Parallel()
			pg, sim := harness.NeedPostgres(t, harness.PostgresOptions{}), startSim(t, felderasim.Options{SQL: keylessProgram()})
			execSQL(t, pg, keylessTables)
			env := keylessEnv(pg, sim)
			d := startCrashing(t, env, place)
			waitHealthy(t, d)
			// Equal rows in one transaction, which takes several requests, and more in others.
			execSQL(t, pg, `BEGIN; INSERT INTO bag VALUES ('x', 1), ('x', 1); INSERT INTO log SELECT 'x', n % 3 FROM generate_series(1, 130) n; COMMIT`)
			awaitEnd(t, d, -1)
			execSQL(t, pg, `INSERT INTO log VALUES ('x', 1), ('x', 1); INSERT INTO log VALUES ('x', 1)`)
			d = startPgsource(t, env)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			execSQL(t, pg, `INSERT INTO log VALUES ('later', NULL)`)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			if got, want := fmt.Sprint(counted(sim, "log")), fmt.Sprint(map[string]int{"x 0": 43, "x 1": 47, "x 2": 43, "later <nil>": 1}); got != want {
				t.Errorf("%s, expected %s", got, want)
			}
			if n := sim.Counters().Records; n <= 2+130+4 {
				t.Errorf("nothing was sent twice: %d records", n)
			}
			if place != "pgsource.sent" && sim.Count("bag") <= 2 {
				t.Errorf("a table without any key has %d rows although they were sent twice", sim.Count("bag"))
			}
			// Their places are those of the source.
			row := sim.Rows("log")[0]
			system, err := harness.QueryValue[string](t.Context(), pg, `SELECT system_identifier::text FROM pg_control_system()`)
			if err != nil {
				t.Fatal(err)
			}
			if row["holdfast_source"] != system+"/holdfast/public.log" {
				t.Errorf("%v", row)
			}
			waitHealthy(t, d)
			// Nothing can change a row, and nobody is told so too late: Postgres itself refuses.
			if err := pg.Exec(t.Context(), `UPDATE log SET n = 2`); err == nil || !strings.Contains(err.Error(), "replica identity") {
				t.Errorf("an update of a published table without identity: %v", err)
			}
		})
	}
}

// TRUNCATE goes by its setting, and the rows of its own transaction keep their
// places whether or not it is carried out before them.
func TestPgsourceIdentityAndTruncate(t *testing.T) {
	t.Parallel()
	pg, sim := harness.NeedPostgres(t, harness.PostgresOptions{}), startSim(t, felderasim.Options{SQL: keylessProgram()})
	execSQL(t, pg, keylessTables)
	env := merged(keylessEnv(pg, sim), map[string]string{"PGSOURCE_TRUNCATE": "delete_all"})
	d := startCrashing(t, env, "pgsource.completed")
	execSQL(t, pg, `CREATE TABLE warm (id bigint)`)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO log SELECT 'gone', n FROM generate_series(1, 120) n`)
	awaitEnd(t, d, -1)
	execSQL(t, pg, `BEGIN; INSERT INTO log VALUES ('gone', 1); TRUNCATE log; INSERT INTO log VALUES ('left', 1), ('left', 1); COMMIT; INSERT INTO log VALUES ('left', 1)`)
	d = startPgsource(t, env)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if got := fmt.Sprint(counted(sim, "log")); got != "map[left 1:3]" {
		t.Error(got)
	}
	var sequences []string
	for _, row := range sim.Rows("log") {
		sequences = append(sequences, fmt.Sprint(row["holdfast_sequence"]))
	}
	if slices.Sort(sequences); fmt.Sprint(sequences) != "[1 2 3]" {
		t.Errorf("%v", sequences)
	}
	stopClean(t, d)
}

// What cannot be held is refused before anything streams, and what is in the
// WAL already when its row is met; both by name and with what mends it.
func TestPgsourceIdentityRefuses(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE TABLE plain (word text, n bigint); CREATE TABLE whole (word text, n bigint); ALTER TABLE whole REPLICA IDENTITY FULL;
		CREATE TABLE keyed (word text PRIMARY KEY, n bigint); CREATE TABLE named (word text, holdfast_position bigint);
		CREATE TABLE silent (word text PRIMARY KEY, n bigint); ALTER TABLE silent REPLICA IDENTITY NOTHING`)
	right := strings.Split(keylessProgram(), "CREATE TABLE bag")[0]
	wrong := strings.Replace(right, "holdfast_sequence)", "holdfast_sequence, n)", 1)
	wrong = strings.Replace(wrong, "n BIGINT", "n BIGINT NOT NULL", 1)
	for name, c := range map[string]struct {
		table, program string
		says           []string
	}{
		"another key":    {"plain", wrong, []string{"table log", "its PRIMARY KEY is", "PRIMARY KEY (holdfast_source, holdfast_partition, holdfast_position, holdfast_sequence)", "take these columns out"}},
		"whole old rows": {"whole", right, []string{"public.whole", "REPLICA IDENTITY NOTHING", "take the identity columns out"}},
		"a key":          {"keyed", right, []string{"public.keyed", "PRIMARY KEY (word)", "REPLICA IDENTITY NOTHING"}},
		"a column":       {"named", strings.Replace(right, "n BIGINT", "m BIGINT", 1), []string{"holdfast_position", "rename"}},
		"no columns":     {"plain", "CREATE TABLE log (word VARCHAR NOT NULL PRIMARY KEY, n BIGINT);", []string{"public.plain", "REPLICA IDENTITY FULL", "holdfast_source"}},
	} {
		t.Run(name, func(t *testing.T) {
			sim := startSim(t, felderasim.Options{SQL: c.program})
			env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public." + c.table + "=log"})
			says(t, checkEnv(t, env), 65, c.says...)
			says(t, runPgsource(t, env), 65, c.says...)
			if n := sim.Counters().Requests; n != 0 {
				t.Errorf("%d requests went out", n)
			}
		})
	}
	t.Run("in the log", func(t *testing.T) {
		sim := startSim(t, felderasim.Options{SQL: right})
		execSQL(t, pg, `CREATE PUBLICATION holdfast FOR TABLE whole WITH (publish_via_partition_root = true)`)
		execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
		for _, one := range []string{`INSERT INTO whole VALUES ('a', 1)`, `UPDATE whole SET n = 2`, `ALTER TABLE whole REPLICA IDENTITY NOTHING`} {
			execSQL(t, pg, one)
		}
		env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public.whole=log"})
		says(t, runPgsource(t, env), 65, "update", "table log", "LSN", "does not tell which row", "pgsource skip")
		if got := fmt.Sprint(counted(sim, "log")); got != "map[a 1:1]" {
			t.Error(got)
		}
	})
}

// Publishing a table without a replica identity makes Postgres refuse its
// updates and deletes, to whoever writes it. Whatever leads there says so
// first, of this table and no other, and what is said is what happens.
func TestPgsourceSaysWhatPublishingRefuses(t *testing.T) {
	t.Parallel()
	pg, sim := harness.NeedPostgres(t, harness.PostgresOptions{}), startSim(t, felderasim.Options{SQL: keylessProgram()})
	execSQL(t, pg, keylessTables)
	execSQL(t, pg, `INSERT INTO bag VALUES ('a', 1); INSERT INTO log VALUES ('a', 1)`)
	env := merged(keylessEnv(pg, sim), map[string]string{"PGSOURCE_SNAPSHOT": "never"})
	const caution = `BEFORE that, know that "public"."log" has no replica identity: once it is published, Postgres refuses every UPDATE and DELETE of it at the source`
	one := func(got harness.RunResult, code int, parts ...string) {
		t.Helper()
		wants(t, got, code, parts...)
		if strings.Contains(got.Stdout+got.Stderr, `"public"."bag" has no replica identity`) {
			t.Errorf("it says it of a table with whole old rows:\n%s", got.Stdout)
		}
	}
	one(runCheck(t, env), 0, "the first start makes it. "+caution)
	by := merged(env, map[string]string{"PGSOURCE_CREATE": "false"})
	one(runCheck(t, by), 65, caution, `; then set PGSOURCE_CREATE=true, or run: CREATE PUBLICATION`)
	got := runVerb(t, by, "publication", "sql")
	one(got, 0, "-- "+caution)
	if lines := strings.Split(strings.TrimSpace(got.Stdout), "\n"); len(lines) != 3 || !strings.HasPrefix(lines[1], "CREATE PUBLICATION") {
		t.Errorf("publication sql is not a comment and two statements:\n%s", got.Stdout)
	}
	execSQL(t, pg, `CREATE PUBLICATION holdfast FOR TABLE bag WITH (publish = 'insert', publish_via_partition_root)`)
	one(runCheck(t, by), 65, caution, "; then ALTER PUBLICATION \"holdfast\" ADD TABLE ONLY \"public\".\"log\"; rows", "; then ALTER PUBLICATION \"holdfast\" SET (publish =")
	execSQL(t, pg, `UPDATE log SET n = 2; DROP PUBLICATION holdfast`)

	d := startPgsource(t, env)
	waitHealthy(t, d)
	if said := d.Log().Grep(regexp.MustCompile(`Postgres refuses every UPDATE and DELETE of them from now on.*public.*log`)); len(said) != 1 {
		t.Errorf("the log says it %d times: %v", len(said), said)
	}
	execSQL(t, pg, `UPDATE bag SET n = 2`)
	if err := pg.Exec(t.Context(), `UPDATE log SET n = 3`); err == nil || !strings.Contains(err.Error(), "replica identity") {
		t.Errorf("an update of the published table: %v", err)
	}
	stopClean(t, d)
}

// sinkIdentity: rows without a key, through a kill between completion and
// commit. They are sent twice and are there once.
func sinkIdentity(w *sinkWorld) {
	t := w.t
	w.sim = startSim(t, felderasim.Options{SQL: keylessProgram()})
	changes := map[string]string{"KAFKASINK_TOPICS": w.topic + "=log:json", "KAFKASINK_COMMIT_INTERVAL": "1m"}
	d := harness.NeedDaemon(t, "./cmd/kafkasink", harness.BuildOptions{Race: true, Tags: "crashpoints"}, harness.DaemonOptions{
		Env: merged(merged(w.env(), changes), map[string]string{"CRASH_AT": "kafkasink.completed:1:kill"}), ListenVar: "KAFKASINK_LISTEN",
	})
	waitHealthy(t, d)
	for p := range int32(3) {
		for range 10 {
			w.produce(p, "", `{"word":"same","n":1}`)
		}
	}
	awaitEnd(t, d, -1)
	sent := w.sim.Counters().Records
	if sent == 0 {
		t.Fatal("nothing was sent")
	}
	if len(w.committed()) != 0 {
		t.Errorf("committed %v", w.committed())
	}
	d = w.start(map[string]string{"KAFKASINK_TOPICS": w.topic + "=log:json"})
	w.awaitCommitted(map[int32]int64{0: 10, 1: 10, 2: 10})
	if got := fmt.Sprint(counted(w.sim, "log")); got != "map[same 1:30]" {
		t.Error(got)
	}
	if all := w.sim.Counters().Records; all < 30+sent {
		t.Errorf("nothing was sent twice: %d records after %d", all, sent)
	}
	for _, row := range w.sim.Rows("log")[:1] {
		if s := fmt.Sprint(row["holdfast_source"]); !regexp.MustCompile("^" + w.topic + "@[0-9a-f]{32}$").MatchString(s) {
			t.Errorf("source %q", s)
		}
	}
	// A record that means a row which is there already cannot be carried.
	w.produce(0, "k", "")
	health(t, d, "the tombstone stops its partition", func(_ int, body string) bool {
		return strings.Contains(body, "tombstone") && strings.Contains(body, w.topic+"[0]@10")
	})
}

// A table that has the columns and not the key is refused at the start.
func TestKafkasinkIdentityRefuses(t *testing.T) {
	t.Parallel()
	kafka := harness.NeedFakeKafka(t, harness.FakeKafkaOptions{Topics: map[string]int32{"log": 1}})
	sql := keylessProgram()
	sim := startSim(t, felderasim.Options{SQL: sql[:strings.Index(sql, ",\n    PRIMARY KEY")] + ") WITH ('materialized' = 'true');"})
	env := map[string]string{
		"KAFKASINK_BROKERS": strings.Join(kafka.Seeds, ","), "KAFKASINK_TOPICS": "log=log:json", "FELDERA_URL": sim.URL(), "FELDERA_PIPELINE": "p",
	}
	for _, args := range [][]string{nil, {"check"}} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		got, err := harness.Run(ctx, harness.DaemonOptions{Program: build(t, "kafkasink"), Args: args, Env: env})
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		says(t, got, 65, "table log", "no PRIMARY KEY", "PRIMARY KEY (holdfast_source, holdfast_partition, holdfast_position, holdfast_sequence)")
	}
}
