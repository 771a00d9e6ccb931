//go:build snapshotload

package snapshot_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// benchRows is the size of TestSnapshotCosts; "make snapshot-bench" sets it.
var benchRows = flag.Int("bench-rows", 60_000, "rows that TestSnapshotCosts copies")

// What a copy costs: the resident memory of pgsource does not grow with the
// table, and a change gets to be acknowledged nearly as soon as without it. The
// numbers are printed; the bounds are wide, since this is no quiet machine.
func TestSnapshotCosts(t *testing.T) {
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	load := `CREATE TABLE big (id bigint PRIMARY KEY, v int NOT NULL, note text, picture text); CREATE TABLE side (id bigint PRIMARY KEY, v int NOT NULL);
		INSERT INTO big SELECT i, 0, 'note ' || i, md5(i::text) FROM generate_series(1, %d) i`
	if err := pg.Exec(t.Context(), fmt.Sprintf(load, *benchRows)); err != nil {
		t.Fatal(err)
	}
	if err := pg.Exec(t.Context(), `VACUUM ANALYZE big`); err != nil {
		t.Fatal(err)
	}
	sim, err := felderasim.New(felderasim.Options{SQL: loadProgram, Null: true, Workers: 2})
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
	d := harness.NeedDaemon(t, "./cmd/pgsource", harness.BuildOptions{}, harness.DaemonOptions{ListenVar: "PGSOURCE_LISTEN", Env: map[string]string{
		"PGSOURCE_DSN": pg.DSN(), "PGSOURCE_TABLES": "public.big,public.side", "PGSOURCE_CREATE": "true",
		"FELDERA_URL": sim.URL(), "FELDERA_PIPELINE": "p",
		"PGSOURCE_STATE": "file:" + filepath.Join(t.TempDir(), "state.json"), "PGSOURCE_SPILL_DIR": t.TempDir(), "PGSOURCE_BATCH_AGE": "5ms",
	}})
	began := time.Now()
	copied := func() (rows float64) {
		rows, _ = d.Metric(t.Context(), "pgsource_snapshot_rows_total", map[string]string{"table": "public.big"})
		return rows
	}
	harness.Await(t, patience, "the copy runs", func(context.Context) (any, bool) { n := copied(); return n, n > 0 })
	first := resident(t, d)
	var during []time.Duration
	peak := first
	var lastAt time.Time
	for n := 0; copied() < float64(*benchRows); n++ {
		if n < 200 || n%20 == 0 {
			during = append(during, latency(t, pg, d, n))
		}
		peak, lastAt = max(peak, resident(t, d)), time.Now()
	}
	if lastAt.IsZero() {
		t.Fatal("the copy was over before anything was measured: more rows")
	}
	rate := float64(*benchRows) / time.Since(began).Seconds()
	var after []time.Duration
	for n := range len(during) {
		after = append(after, latency(t, pg, d, 1_000_000+n))
	}
	with, without := median(during), median(after)
	t.Logf("%d rows copied, %.0f rows/s; resident memory %d MiB at first, %d MiB at most; a change was acknowledged after %v with the copy and %v without (medians of %d)",
		*benchRows, rate, first>>20, peak>>20, with.Round(time.Millisecond), without.Round(time.Millisecond), len(during))
	if limit := int64(256+128) << 20; peak > limit {
		t.Errorf("resident memory rose to %d MiB", peak>>20)
	}
	if with > 4*without+250*time.Millisecond {
		t.Errorf("the copy holds the stream up: %v with it, %v without", with, without)
	}
}

// latency gives how long a change takes to be acknowledged to the server.
func latency(t *testing.T, pg *harness.Postgres, d *harness.Daemon, n int) time.Duration {
	t.Helper()
	began := time.Now()
	if err := pg.Exec(t.Context(), fmt.Sprintf(`INSERT INTO side VALUES (%d, 1) ON CONFLICT (id) DO UPDATE SET v = 2`, n)); err != nil {
		t.Fatal(err)
	}
	// The position of its commit is not above this one.
	lsn, err := pg.CurrentLSN(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	harness.Await(t, patience, "the change is acknowledged", func(ctx context.Context) (any, bool) {
		select {
		case <-d.Done():
			return "the daemon ended", false
		default:
		}
		got, err := pg.ConfirmedFlushLSN(ctx, "holdfast")
		return fmt.Sprint(got, err), err == nil && got >= lsn
	})
	return time.Since(began)
}

func median(list []time.Duration) time.Duration {
	slices.Sort(list)
	return list[len(list)/2]
}

// resident gives the memory of the daemon that is in RAM.
func resident(t *testing.T, d *harness.Daemon) int64 {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.Pid()))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if text, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(text), " kB"), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatal("no VmRSS")
	return 0
}
