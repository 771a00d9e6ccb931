package snapshot_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/internal/crash"
	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// The size of TestSnapshotUnderLoad: small by itself, "make snapshot" makes it
// large.
var (
	seedFlag  = flag.Uint64("seed", 1, "the first seed")
	seedsFlag = flag.Int("seeds", 1, "how many seeds are run, one after the other")
	rowsFlag  = flag.Int("rows", 5_000, "rows of the table before the slot")
	killsFlag = flag.Int("kills", 3, "how often pgsource is killed in one run")
)

const (
	loadSource = `
CREATE TABLE big (id bigint PRIMARY KEY, v int NOT NULL, note text, picture text);
ALTER TABLE big ALTER COLUMN picture SET STORAGE EXTERNAL;
CREATE TABLE side (id bigint PRIMARY KEY, v int NOT NULL);
INSERT INTO big SELECT i, 0, 'note ' || i, CASE WHEN mod(i, 50) = 0 THEN repeat(md5(i::text), 80) ELSE md5(i::text) END FROM generate_series(1, %d) i;
INSERT INTO side SELECT i, 0 FROM generate_series(1, %d / 4) i`
	loadProgram = `
CREATE TABLE big (id BIGINT NOT NULL PRIMARY KEY, v INT NOT NULL, note VARCHAR, picture VARCHAR) WITH ('materialized' = 'true');
CREATE TABLE side (id BIGINT NOT NULL PRIMARY KEY, v INT NOT NULL) WITH ('materialized' = 'true');`
)

// small tells whether the run is one among many others, and is to be over soon.
func small() bool { return *rowsFlag < 50_000 }

// loadWriters change both tables at once.
const loadWriters = 4

// Rows are inserted, changed, moved and deleted by several sessions, one table is
// truncated, and pgsource is killed again and again, while the tables are
// copied: in the end both sides have the same rows.
func TestSnapshotUnderLoad(t *testing.T) {
	for i := range *seedsFlag {
		seed := *seedFlag + uint64(i)
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { underLoad(t, seed) })
	}
}

func underLoad(t *testing.T, seed uint64) {
	t.Helper()
	random := rand.New(rand.NewPCG(seed, 0))
	began := time.Now()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	if err := pg.Exec(t.Context(), fmt.Sprintf(loadSource, *rowsFlag, *rowsFlag)); err != nil {
		t.Fatal(err)
	}
	sim, err := felderasim.New(felderasim.Options{SQL: loadProgram})
	if err != nil {
		t.Fatal(err)
	}
	if err := sim.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := sim.Close(); err != nil {
			t.Error(err)
		}
	}()
	env := map[string]string{
		"PGSOURCE_DSN": pg.DSN(), "PGSOURCE_TABLES": "public.big,public.side", "PGSOURCE_CREATE": "true", "PGSOURCE_TRUNCATE": "delete_all",
		"FELDERA_URL": sim.URL(), "FELDERA_PIPELINE": "p", "FELDERA_REQUEST_TIMEOUT": "5s", "FELDERA_REQUEST_LIFETIME": "5s", // which each start behind a kill waits out
		"PGSOURCE_STATE": "file:" + filepath.Join(t.TempDir(), "state.json"), "PGSOURCE_SPILL_DIR": t.TempDir(),
		// Some hundred chunks at most, so that kills come between them.
		"PGSOURCE_SNAPSHOT_CHUNK_BYTES": fmt.Sprintf("%dKiB", max(64, *rowsFlag/256)), "PGSOURCE_SNAPSHOT_CHUNK_TIME": "100ms",
	}
	if small() {
		env["FELDERA_REQUEST_TIMEOUT"], env["FELDERA_REQUEST_LIFETIME"] = "2s", "2s"
	}
	d := harness.NeedDaemon(t, "./cmd/pgsource", harness.BuildOptions{Tags: "crashpoints"}, harness.DaemonOptions{Env: env, ListenVar: "PGSOURCE_LISTEN"})

	writing, stop := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	var done atomic.Int64
	defer writers.Wait()
	defer stop()
	for n := range loadWriters {
		own := rand.New(rand.NewPCG(seed, uint64(n+1)))
		writers.Go(func() {
			if err := loadWriter(writing, pg, own, &done); err != nil && writing.Err() == nil {
				t.Error(err)
			}
		})
	}
	reached := loadKills(t, d, random)
	if err := pg.Exec(t.Context(), `TRUNCATE side`); err != nil {
		t.Fatal(err)
	}
	awaitLoadCopied(t, d, env)
	stop()
	writers.Wait()
	if code, ended := d.ExitCode(); ended {
		t.Fatalf("the daemon ended with %d", code)
	}
	lsn, err := pg.CurrentLSN(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	harness.Await(t, 2*patience, "everything is acknowledged", func(ctx context.Context) (any, bool) {
		got, err := pg.ConfirmedFlushLSN(ctx, "holdfast")
		return fmt.Sprint(got, err), err == nil && got >= lsn
	})
	rows := loadEqual(t, pg, sim, "big", "id", "v", "note", "picture") + loadEqual(t, pg, sim, "side", "id", "v")
	t.Logf("seed %d: %d rows before, %d changes meanwhile, %d rows in the end, killed at %s, %v", seed, *rowsFlag+*rowsFlag/4, done.Load(), rows,
		strings.Join(reached, ", "), time.Since(began).Round(time.Millisecond))
}

// loadKills kills the daemon: at the places of a copy, and at any time. It
// gives the places.
func loadKills(t *testing.T, d *harness.Daemon, random *rand.Rand) (reached []string) {
	t.Helper()
	for n := range *killsFlag {
		p := crash.CopyPoints[(n+random.IntN(len(crash.CopyPoints)))%len(crash.CopyPoints)]
		arm := map[string]string{"CRASH_AT": fmt.Sprintf("%s:%d:kill", p, 1+random.IntN(4))}
		wait := patience
		if n%4 == 3 { // at any time
			arm["CRASH_AT"], wait = "", time.Duration(200+random.IntN(3000))*time.Millisecond
			p = "any time"
		}
		d.Kill()
		if err := d.Restart(arm); err != nil {
			t.Fatal(err)
		}
		select {
		case <-d.Done():
			if code, _ := d.ExitCode(); code > 0 && code < 128 {
				t.Fatalf("killed at %s: it ended by itself with %d", strings.Join(append(reached, string(p)), ", "), code)
			}
			reached = append(reached, string(p))
		case <-time.After(wait):
			if wait < patience {
				reached = append(reached, string(p))
			}
		}
	}
	d.Kill()
	if err := d.Restart(map[string]string{"CRASH_AT": ""}); err != nil {
		t.Fatal(err)
	}
	return reached
}

// loadWriter changes rows until ctx ends.
func loadWriter(ctx context.Context, pg *harness.Postgres, random *rand.Rand, done *atomic.Int64) error {
	conn, err := pg.Connect(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	pace := 3 * time.Millisecond
	if small() {
		pace = 20 * time.Millisecond
	}
	pause := time.NewTicker(pace)
	defer pause.Stop()
	for n := 0; ; n++ {
		id := 1 + random.IntN(*rowsFlag*11/10)
		sql := map[int]string{
			0: fmt.Sprintf(`INSERT INTO big VALUES (%d, %d, 'new', 'new') ON CONFLICT (id) DO UPDATE SET v = excluded.v`, id, n),
			1: fmt.Sprintf(`UPDATE big SET v = %d WHERE id = %d`, n, id), // a TOASTed picture is not sent
			2: fmt.Sprintf(`UPDATE big SET v = %d WHERE id BETWEEN %d AND %d`, n, id, id+20),
			3: fmt.Sprintf(`UPDATE big SET picture = repeat('%d', 3000) WHERE id = %d`, n%10, id),
			4: fmt.Sprintf(`DELETE FROM big WHERE id = %d`, id),
			5: fmt.Sprintf(`UPDATE big SET id = %d, picture = 'moved' WHERE id = %d AND NOT EXISTS (SELECT FROM big WHERE id = %d)`, *rowsFlag*2+random.IntN(1<<30), id, id+1<<30),
			6: fmt.Sprintf(`BEGIN; UPDATE big SET v = %d WHERE id = %d; UPDATE side SET v = %d WHERE id = %d; COMMIT`, n, id, n, id/4),
			7: fmt.Sprintf(`INSERT INTO side VALUES (%d, %d) ON CONFLICT (id) DO UPDATE SET v = excluded.v`, id, n),
			8: fmt.Sprintf(`BEGIN; UPDATE big SET v = -1 WHERE id = %d; ROLLBACK`, id),
		}[random.IntN(9)]
		// A deadlock ends one of two, and that is all.
		if _, err := conn.Exec(ctx, sql); err != nil && !strings.Contains(err.Error(), "40P01") && !strings.Contains(err.Error(), "23505") {
			return fmt.Errorf("%s: %w", sql, err)
		} else if err != nil {
			if _, err := conn.Exec(ctx, `ROLLBACK`); err != nil {
				return err
			}
		}
		done.Add(1)
		select {
		case <-pause.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// awaitLoadCopied waits until the verb says that all is copied.
func awaitLoadCopied(t *testing.T, d *harness.Daemon, env map[string]string) {
	t.Helper()
	program, err := harness.Build(t.Context(), "./cmd/pgsource", harness.BuildOptions{Tags: "crashpoints"})
	if err != nil {
		t.Fatal(err)
	}
	harness.Await(t, 4*patience, "both tables are copied", func(ctx context.Context) (any, bool) {
		select {
		case <-d.Done():
			return "the daemon ended", true // which the comparison then finds
		default:
		}
		got, err := harness.Run(ctx, harness.DaemonOptions{Program: program, Args: []string{"snapshot", "status", "-json"}, Env: env})
		if err != nil {
			return err, false
		}
		var shown struct {
			Tables []struct{ Copied bool }
			Jobs   []any
		}
		if err := json.Unmarshal([]byte(got.Stdout), &shown); err != nil {
			return got.Stdout + got.Stderr, false
		}
		copied := 0
		for _, table := range shown.Tables {
			if table.Copied {
				copied++
			}
		}
		return got.Stdout, copied == 2 && len(shown.Jobs) == 0
	})
}

// loadEqual compares a table row by row and gives the number of rows.
func loadEqual(t *testing.T, pg *harness.Postgres, sim *felderasim.Sim, table string, columns ...string) int {
	t.Helper()
	want, err := pg.Rows(t.Context(), fmt.Sprintf(`SELECT %s FROM %s`, strings.Join(columns, ", "), table))
	if err != nil {
		t.Fatal(err)
	}
	there := make(map[string]string, len(want))
	for _, row := range want {
		there[row[0]] = strings.Join(row[1:], "|")
	}
	differ := 0
	say := func(format string, args ...any) {
		if differ++; differ <= 20 {
			t.Errorf(format, args...)
		}
	}
	for _, row := range sim.Rows(table) {
		var texts []string
		for _, c := range columns {
			texts = append(texts, fmt.Sprint(row[c]))
		}
		id, got := texts[0], strings.Join(texts[1:], "|")
		if source, ok := there[id]; !ok {
			say("%s: key %s is a ghost", table, id)
		} else if source != got {
			say("%s: key %s is stale: %.60q, in the source %.60q", table, id, got, source)
		}
		delete(there, id)
	}
	for id := range there {
		say("%s: key %s is missing", table, id)
	}
	if differ > 20 {
		t.Errorf("%s: %d differences in all", table, differ)
	}
	return len(want)
}
