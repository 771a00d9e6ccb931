package e2e

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// peakMemory reads the highest resident memory of a process, in bytes.
func peakMemory(t *testing.T, pid int) int64 {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if kib, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			n, err := strconv.ParseInt(strings.Fields(kib)[0], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Fatal("the kernel shows no peak of memory")
	return 0
}

// spilled waits until the spill holds at least so many bytes.
func spilled(t *testing.T, d *harness.Daemon, least float64) {
	t.Helper()
	awaitMetric(t, d, "pgsource_spill_bytes", nil, func(n float64) bool { return n >= least })
}

func awaitMetric(t *testing.T, d *harness.Daemon, name string, labels map[string]string, cond func(float64) bool) {
	t.Helper()
	harness.Await(t, patience, name+" "+fmt.Sprint(labels), func(ctx context.Context) (any, bool) {
		n, err := d.Metric(ctx, name, labels)
		if err != nil {
			return err, false
		}
		return n, cond(n)
	})
}

func spillFiles(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "holdfast-spill-*", "segment-*"))
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// A transaction of 200 MB over two tables goes through a daemon that may hold
// 32 MiB, and one of a million small rows through one that may hold 64 MiB: its
// memory stays small, and not a row is visible before all are. The program is
// built as it is shipped, without the race detector's memory.
func TestPgsourceLargeTransactionInLittleMemory(t *testing.T) {
	t.Parallel()
	t.Run("many bytes", func(t *testing.T) { largeInLittle(t, 100_000, 1900, "32MiB") })
	t.Run("many rows", func(t *testing.T) { largeInLittle(t, 500_000, 1, "64MiB") })
}

// largeInLittle carries one transaction with rows for each of two tables, those
// of one with a note of that many bytes.
func largeInLittle(t *testing.T, rows, note int, limit string) {
	t.Helper()
	all := fmt.Sprint(2 * rows)
	pg := startPostgres(t, nil)
	var torn []string
	sim := startSim(t, felderasim.Options{Null: true, Observe: func(v felderasim.View) {
		if n := fmt.Sprint(v.Stats().Global.TotalCompletedRecords); n != "0" && n != all {
			torn = append(torn, n)
		}
	}})
	dir := t.TempDir()
	d := harness.NeedDaemon(t, "./cmd/pgsource", harness.BuildOptions{}, harness.DaemonOptions{ListenVar: "PGSOURCE_LISTEN", Env: merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_MEMORY_LIMIT": limit, "PGSOURCE_SPILL_DIR": dir, "PGSOURCE_SPILL_LIMIT": "1GiB",
	})})
	waitHealthy(t, d)
	execSQL(t, pg, fmt.Sprintf(`BEGIN;
		INSERT INTO orders SELECT i, 'large', 1, true, repeat('x', %d) FROM generate_series(1, %d) i;
		INSERT INTO items SELECT i, i, 'large' FROM generate_series(1, %[2]d) i; COMMIT`, note, rows))
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if n := fmt.Sprint(sim.Counters().Records); n != all {
		t.Errorf("%s records of %s", n, all)
	}
	if len(torn) > 0 {
		t.Errorf("the completed records were seen as %v, between none and all", torn)
	}
	const most = 128 << 20
	if peak := peakMemory(t, d.Pid()); peak > most {
		t.Errorf("%d MiB of memory at the peak for a transaction of %s rows and %d MB, want at most %d MiB", peak>>20, all, rows*note/1_000_000, most>>20)
	} else {
		t.Logf("%d MiB of memory at the peak for a transaction of %s rows and %d MB", peak>>20, all, rows*note/1_000_000)
	}
	if n, err := d.Metric(t.Context(), "pgsource_spilled_transactions_total", nil); err != nil || n < 1 {
		t.Errorf("%v transactions were spilled, %v", n, err)
	}
	awaitMetric(t, d, "pgsource_spill_bytes", nil, func(n float64) bool { return n == 0 })
	if files := spillFiles(t, dir); len(files) != 0 {
		t.Errorf("delivered, and %v is left", files)
	}
	if n, err := d.Metric(t.Context(), "pgsource_destination_transactions_total", map[string]string{"event": "committed"}); err != nil || n < 1 {
		t.Errorf("%v transactions of the pipeline, %v", n, err)
	}
}

// The destination is away: pgsource goes on reading, into the spill, and
// leaves only when that is full too. A kill in between costs nothing, and what
// the dead process left on the disk is gone.
func TestPgsourceSpillsABacklog(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	dir := t.TempDir()
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_MEMORY_LIMIT": "1MiB", "PGSOURCE_BATCH_BYTES": "256KiB", "PGSOURCE_SPILL_DIR": dir, "PGSOURCE_SPILL_LIMIT": "8MiB",
	}))
	waitHealthy(t, d)
	sim.Pause()
	write := func(from, to int) {
		for i := from; i < to; i++ {
			execSQL(t, pg, fmt.Sprintf(`BEGIN; INSERT INTO orders SELECT i, 'backlog', 1, true, repeat('x', 400) FROM generate_series(%d, %d) i;
				INSERT INTO items SELECT i, i, 'x' FROM generate_series(%[1]d, %[2]d) i; COMMIT`, i*100, i*100+99))
		}
	}
	write(0, 80)
	spilled(t, d, 2<<20)
	end := currentLSN(t, pg)
	awaitMetric(t, d, "pgsource_position_bytes", map[string]string{"rung": "received"}, func(n float64) bool { return n >= float64(end) })
	d.Kill()
	left := spillFiles(t, dir)
	if len(left) == 0 {
		t.Fatal("nothing was in the spill when the process was killed")
	}
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	spilled(t, d, 2<<20)
	for _, path := range left {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s of the process that was killed is left", path)
		}
	}
	mark := d.Log().Mark()
	write(80, 300)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.Log().WaitSince(ctx, mark, regexp.MustCompile("closed on purpose.*PGSOURCE_MEMORY_LIMIT is reached.*PGSOURCE_SPILL_LIMIT is reached")); err != nil {
		t.Fatal(err)
	}
	if n, err := d.Metric(t.Context(), "pgsource_spill_bytes", nil); err != nil || n > 8<<20 {
		t.Errorf("%v bytes in the spill of 8 MiB, %v", n, err)
	}
	sim.Resume()
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	awaitMetric(t, d, "pgsource_spill_bytes", nil, func(n float64) bool { return n == 0 })
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	if code, err := d.Wait(ctx); err != nil || code != 0 {
		t.Errorf("exit code %d, %v", code, err)
	}
	if names, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(names) != 0 {
		t.Errorf("stopped, and %v is left, %v", names, err)
	}
}

// A spill that was damaged on the disk gives no wrong row: the slot has them
// all, and they are read again.
func TestPgsourceReadsAgainWhatTheSpillLost(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	dir := t.TempDir()
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_MEMORY_LIMIT": "1MiB", "PGSOURCE_BATCH_BYTES": "128KiB", "PGSOURCE_SPILL_DIR": dir,
	}))
	waitHealthy(t, d)
	sim.Pause()
	for i := range 40 {
		execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders SELECT i, 'backlog', 1, true, repeat('x', 400) FROM generate_series(%d, %d) i`, i*100, i*100+99))
	}
	end := currentLSN(t, pg)
	awaitMetric(t, d, "pgsource_position_bytes", map[string]string{"rung": "received"}, func(n float64) bool { return n >= float64(end) })
	files := spillFiles(t, dir)
	if len(files) == 0 {
		t.Fatal("nothing is in the spill")
	}
	for _, path := range files {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := 5000; i < len(b); i += 50_000 {
			b[i] ^= 1
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	sim.Resume()
	awaitConfirmed(t, pg, end)
	assertEqualTables(t, pg, sim)
	if n, err := d.Metric(t.Context(), "pgsource_spill_faults_total", map[string]string{"reason": "damaged"}); err != nil || n < 1 {
		t.Errorf("%v damaged blocks were noticed, %v", n, err)
	}
}

// A transaction above memory and spill is refused by name, with what mends it.
func TestPgsourceRefusesWhatNothingHolds(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		change map[string]string
		want   []string
	}{
		"no spill":        {map[string]string{"PGSOURCE_SPILL_DIR": "off"}, []string{"larger than 1048576 bytes", "PGSOURCE_SPILL_DIR"}},
		"a small spill":   {map[string]string{"PGSOURCE_SPILL_LIMIT": "1MiB"}, []string{"larger than the spill", "raise PGSOURCE_SPILL_LIMIT"}},
		"a spill nowhere": {map[string]string{"PGSOURCE_SPILL_DIR": "/proc/nowhere"}, []string{"PGSOURCE_SPILL_DIR", "cannot be used"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
			d := startPgsource(t, merged(merged(pgsourceEnv(pg, sim), map[string]string{
				"PGSOURCE_MEMORY_LIMIT": "1MiB", "PGSOURCE_BATCH_BYTES": "256KiB",
			}), tc.change))
			if name != "a spill nowhere" {
				waitHealthy(t, d)
				execSQL(t, pg, `INSERT INTO items VALUES (1, 1, 'before')`)
				execSQL(t, pg, `INSERT INTO orders SELECT i, 'large', 1, true, repeat('x', 2000) FROM generate_series(1, 5000) i`)
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if code, err := d.Wait(ctx); err != nil || code != 65 {
				t.Fatalf("exit code %d, %v", code, err)
			}
			log := strings.Join(d.Log().Tail(50), "\n")
			for _, want := range tc.want {
				if !strings.Contains(log, want) {
					t.Errorf("the log lacks %q", want)
				}
			}
			if n := sim.Count("orders"); n != 0 {
				t.Errorf("%d rows of it arrived", n)
			}
		})
	}
}

// settledSums watches whether each completed state has an item for every
// order: they are written together.
type settledSums struct {
	states int
	torn   []string
}

func (s *settledSums) observe(v felderasim.View) {
	if !v.Settled() {
		return
	}
	s.states++
	if orders, items := v.Count("orders"), v.Count("items"); orders != items {
		s.torn = append(s.torn, fmt.Sprintf("%d orders and %d items", orders, items))
	}
}

func (s *settledSums) check(t *testing.T) {
	t.Helper()
	if len(s.torn) > 0 || s.states == 0 {
		t.Errorf("torn in %d of %d completed states: %v", len(s.torn), s.states, s.torn[:min(len(s.torn), 5)])
	}
}

// pairs writes orders and their items in one transaction.
func pairs(t *testing.T, pg *harness.Postgres, from, to int) {
	t.Helper()
	execSQL(t, pg, fmt.Sprintf(`BEGIN; INSERT INTO orders SELECT i, 'pair', 1, true FROM generate_series(%d, %d) i;
		INSERT INTO items SELECT i, i, 'pair' FROM generate_series(%[1]d, %[2]d) i; COMMIT`, from, to))
}

// insideTransaction brings a daemon to where the pipeline's transaction is open
// with half of the rows in it: the other table takes nothing.
func insideTransaction(t *testing.T, pg *harness.Postgres, sim *felderasim.Sim, d *harness.Daemon) {
	t.Helper()
	pairs(t, pg, 1, 10)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	sim.HoldIngest("items")
	pairs(t, pg, 11, 1000)
	waitSim(t, sim, "half of the rows are in an open transaction", func(v felderasim.View) bool {
		g := v.Stats().Global
		return g.TransactionStatus == "TransactionInProgress" && v.Counters().Records >= 2020-20
	})
	if orders, items := sim.Count("orders"), sim.Count("items"); orders > 11 || items != 10 {
		t.Fatalf("%d orders and %d items are visible while the transaction is open", orders, items)
	}
}

// Killed inside the pipeline's open transaction, which nobody else can end:
// the next start knows it as its own, sends everything again into it, and
// commits. Nobody sees half of it.
func TestPgsourceKilledInsideATransaction(t *testing.T) {
	t.Parallel()
	sums := &settledSums{}
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{Observe: sums.observe})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_BATCH_ROWS": "300"}))
	waitHealthy(t, d)
	insideTransaction(t, pg, sim, d)
	health(t, d, "the transaction is shown as ours", func(_ int, body string) bool { return strings.Contains(body, "our transaction") })
	d.Kill()
	pairs(t, pg, 1001, 1500) // before the restart: it gets into the same one or the next
	sim.ReleaseIngest("items")
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	if n, err := d.Metric(t.Context(), "pgsource_destination_transactions_total", map[string]string{"event": "resumed"}); err != nil || n != 1 {
		t.Errorf("%v transactions were taken up again, %v", n, err)
	}
	if st := sim.Stats().Global; st.TransactionStatus != "NoTransaction" {
		t.Errorf("left %s", st.TransactionStatus)
	}
	sums.check(t)
}

// A signal inside the open transaction: it is brought to its end first.
func TestPgsourceStoppedInsideATransaction(t *testing.T) {
	t.Parallel()
	sums := &settledSums{}
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{Observe: sums.observe})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_BATCH_ROWS": "300", "PGSOURCE_SHUTDOWN_TIMEOUT": "50s"}))
	waitHealthy(t, d)
	insideTransaction(t, pg, sim, d)
	end := currentLSN(t, pg)
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.WaitLog(ctx, regexp.MustCompile("signal")); err != nil {
		t.Fatal(err)
	}
	sim.ReleaseIngest("items")
	if code, err := d.Wait(ctx); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v", code, err)
	}
	if got := confirmed(t, pg); got < end {
		t.Errorf("stopped at %s, before the transaction that it was in ended (%s)", decode.FormatLSN(got), decode.FormatLSN(end))
	}
	assertEqualTables(t, pg, sim)
	sums.check(t)
}

// Somebody else's transaction is waited for, shown, and left alone.
func TestPgsourceWaitsForAForeignTransaction(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	if _, err := sim.StartTransaction(); err != nil {
		t.Fatal(err)
	}
	before := confirmed(t, pg)
	pairs(t, pg, 1, 100)
	health(t, d, "the foreign transaction is shown", func(_ int, body string) bool { return strings.Contains(body, "somebody else's transaction 1") })
	if n := sim.Counters().Records; n != 0 {
		t.Errorf("%d rows were sent into somebody else's transaction", n)
	}
	if now := confirmed(t, pg); now > before+1<<20 {
		t.Errorf("confirmed moved to %s", decode.FormatLSN(now))
	}
	if err := sim.CommitTransaction(); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// Somebody else commits our transaction in the middle: what is visible then is
// not ours to prevent; everything is sent again, as one.
func TestPgsourceTransactionTakenByAnother(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	insideTransaction(t, pg, sim, d)
	if err := sim.CommitTransaction(); err != nil {
		t.Fatal(err)
	}
	waitSim(t, sim, "it is committed", func(v felderasim.View) bool { return v.Stats().Global.TransactionStatus == "NoTransaction" })
	sim.ReleaseIngest("items")
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	if n, err := d.Metric(t.Context(), "pgsource_destination_transactions_total", map[string]string{"event": "taken"}); err != nil || n != 1 {
		t.Errorf("%v were taken, %v", n, err)
	}
}

// The pipeline crashes while the transaction is open: it is gone with the
// incarnation, and everything is sent again in another one.
func TestPgsourceTransactionLostWithThePipeline(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_BATCH_ROWS": "300"}))
	waitHealthy(t, d)
	sim.HoldIngest("items")
	pairs(t, pg, 1, 1000)
	waitSim(t, sim, "half of the rows are in an open transaction", func(v felderasim.View) bool {
		return v.Stats().Global.TransactionStatus == "TransactionInProgress" && v.Counters().Records >= 2000
	})
	sim.Crash(core.KeepNothing)
	sim.ReleaseIngest("items")
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// A row that is refused at the end of a large transaction is found before the
// first row is sent: a transaction of the pipeline cannot be taken back.
func TestPgsourceRefusesALargeTransactionWhole(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_BATCH_ROWS": "100"}))
	waitHealthy(t, d)
	execSQL(t, pg, `ALTER TABLE orders ALTER amount TYPE numeric`)
	execSQL(t, pg, `BEGIN; INSERT INTO orders SELECT i, 'large', 1, true FROM generate_series(1, 1000) i;
		INSERT INTO items SELECT i, i, 'large' FROM generate_series(1, 1000) i; INSERT INTO orders VALUES (2000, 'bad', 'NaN', true); COMMIT`)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if code, err := d.Wait(ctx); err != nil || code != 65 {
		t.Fatalf("exit code %d, %v", code, err)
	}
	if c, st := sim.Counters(), sim.Stats().Global; c.Records != 0 || st.TransactionStatus != "NoTransaction" || st.TransactionID != 0 {
		t.Errorf("%d rows were sent, %s, transaction %d", c.Records, st.TransactionStatus, st.TransactionID)
	}
}

// Without a state no transaction is opened, since a crash would leave it open
// for ever; that is said.
func TestPgsourceAtomicityIsSaid(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		change map[string]string
		want   string
		opened float64
	}{
		"transaction": {nil, "become visible together", 1},
		"table":       {map[string]string{"PGSOURCE_ATOMICITY": "table"}, "as PGSOURCE_ATOMICITY=table says", 0},
		"no state":    {map[string]string{"PGSOURCE_STATE": "none"}, "since no state is kept", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
			d := startPgsource(t, merged(merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_BATCH_ROWS": "100"}), tc.change))
			waitHealthy(t, d)
			pairs(t, pg, 1, 1000)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			assertEqualTables(t, pg, sim)
			health(t, d, "the atomicity is said", func(_ int, body string) bool { return strings.Contains(body, tc.want) })
			if n, err := d.Metric(t.Context(), "pgsource_destination_transactions_total", map[string]string{"event": "begun"}); err != nil || n != tc.opened {
				t.Errorf("%v transactions of the pipeline, want %v, %v", n, tc.opened, err)
			}
			for _, r := range sim.Requests() {
				if r.Records > 100 {
					t.Errorf("a request of %d rows, with at most 100 wanted", r.Records)
				}
			}
		})
	}
}

// A server that shuts down is let go of although the destination completes
// nothing, within seconds.
func TestPgsourceLetsADyingServerGo(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	sim.HoldCompletion()
	pairs(t, pg, 1, 10)
	waitSim(t, sim, "the rows are accepted", func(v felderasim.View) bool { return v.Counters().Records >= 20 })
	mark := d.Log().Mark()
	if err := pg.Stop(harness.Fast); err != nil { // fails when it takes too long
		t.Fatalf("a fast shutdown is held up: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.Log().WaitSince(ctx, mark, regexp.MustCompile("let go of it")); err != nil {
		t.Fatal(err)
	}
	sim.ReleaseCompletion()
	if err := pg.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// A kill with rows accepted and not completed, then a row that is refused: what
// may have been sent before the kill goes into one transaction of the pipeline
// again, and that is not left open behind the refusal.
func TestPgsourceRefusalEndsTheReplay(t *testing.T) {
	t.Parallel()
	sums := &settledSums{}
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{Observe: sums.observe})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	pairs(t, pg, 1, 10)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	sim.HoldCompletion()
	for i := range 5 {
		pairs(t, pg, 100*i+100, 100*i+199)
	}
	waitSim(t, sim, "all is accepted", func(v felderasim.View) bool { return v.Counters().Records >= 1020 })
	d.Kill()
	execSQL(t, pg, `ALTER TABLE orders ALTER amount TYPE numeric; INSERT INTO orders VALUES (2000, 'bad', 'NaN', true)`)
	sim.ReleaseCompletion()
	before := sim.Counters().Requests
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if code, err := d.Wait(ctx); err != nil || code != 65 {
		t.Fatalf("exit code %d, %v", code, err)
	}
	if n := sim.Counters().Requests - before; n == 0 {
		t.Error("nothing was sent again")
	}
	if st := sim.Stats().Global; st.TransactionStatus != "NoTransaction" || st.TransactionID != 0 {
		t.Errorf("left %s, transaction %d", st.TransactionStatus, st.TransactionID)
	}
	if orders, items := sim.Count("orders"), sim.Count("items"); orders != 510 || items != 510 {
		t.Errorf("%d orders, %d items", orders, items)
	}
	sums.check(t)
}

// Killed twice: right after the pipeline's transaction was asked for, when its
// number is not known yet, and again with rows in it. It stays known as ours.
func TestPgsourceKilledTwiceInsideATransaction(t *testing.T) {
	t.Parallel()
	sums := &settledSums{}
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{Observe: sums.observe})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	pairs(t, pg, 1, 10)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if _, err := sim.Inject(felderasim.Fault{Kind: felderasim.DropResponse, Endpoint: "start_transaction"}); err != nil {
		t.Fatal(err)
	}
	sim.HoldIngest("items")
	pairs(t, pg, 11, 100)
	waitSim(t, sim, "a transaction is asked for", func(v felderasim.View) bool { return v.Stats().Global.TransactionID == 2 })
	d.Kill()
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitSim(t, sim, "half of the rows are in it", func(v felderasim.View) bool {
		return v.Stats().Global.TransactionStatus == "TransactionInProgress" && v.Counters().Records >= 200
	})
	d.Kill()
	sim.ReleaseIngest("items")
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	sums.check(t)
}

// A request to begin a transaction is on its way when the pipeline's process
// ends, and arrives at the one that comes after it, before or after pgsource
// was killed too. The transaction that it opens there has no number on record
// and another incarnation: it is taken for ours all the same, since nothing
// would complete before it ends, and nobody else would end it.
func TestPgsourceBeginsALateTransaction(t *testing.T) {
	for _, delivery := range []string{"at_least_once", "effectively_once"} {
		for name, killed := range map[string]bool{"pgsource lives": false, "pgsource is killed": true} {
			t.Run(delivery+", "+name, func(t *testing.T) {
				t.Parallel()
				pg, sim, env := effectively(t, felderasim.Options{})
				d := startPgsource(t, merged(env, map[string]string{"PGSOURCE_DELIVERY": delivery}))
				waitHealthy(t, d)
				if _, err := sim.Inject(felderasim.Fault{Kind: felderasim.CrashBefore, Endpoint: "start_transaction", Keep: core.KeepNothing}); err != nil {
					t.Fatal(err)
				}
				pairs(t, pg, 1, 100)
				waitSim(t, sim, "the pipeline has crashed", func(v felderasim.View) bool { return v.Counters().Crashes == 1 })
				if killed {
					d.Kill()
				}
				if _, err := sim.StartTransaction(); err != nil { // as the manager does that passes the request on
					t.Fatal(err)
				}
				if killed {
					if err := d.Restart(nil); err != nil {
						t.Fatal(err)
					}
				}
				pairs(t, pg, 101, 200)
				awaitConfirmed(t, pg, currentLSN(t, pg))
				assertEqualTables(t, pg, sim)
				takenUpAndEnded(t, d, sim)
			})
		}
	}
}

// The pipeline's process ends between pgsource's look at it and its request to
// begin a transaction, which the process after it answers: what pgsource sends
// goes into a transaction that it knows, also when it is killed right then.
func TestPgsourceBeginsInTheProcessAfter(t *testing.T) {
	for _, delivery := range []string{"at_least_once", "effectively_once"} {
		t.Run(delivery, func(t *testing.T) {
			t.Parallel()
			pg, sim, env := effectively(t, felderasim.Options{})
			var begun atomic.Int32
			between := inFrontOf(t, sim, func(r *http.Request) {
				if strings.HasSuffix(r.URL.Path, "/start_transaction") && begun.Add(1) == 1 {
					sim.Kill()
					sim.Restart(core.KeepNothing)
				}
			})
			d := startPgsource(t, merged(env, map[string]string{"PGSOURCE_DELIVERY": delivery, "FELDERA_URL": between}))
			waitHealthy(t, d)
			pairs(t, pg, 1, 100)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			pairs(t, pg, 101, 200)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			assertEqualTables(t, pg, sim)
			takenUpAndEnded(t, d, sim)
		})
	}
}

// A request to commit is on its way when the pipeline's process ends, and the
// manager may pass it on to the one that comes after: until it can do so no more,
// pgsource opens nothing there that it could commit in the middle.
func TestPgsourceOutlivesALateCommit(t *testing.T) {
	const life = 14 * time.Second // longer than it takes to see that the pipeline is another process
	for _, delivery := range []string{"at_least_once", "effectively_once"} {
		t.Run(delivery, func(t *testing.T) {
			t.Parallel()
			pg, sim, env := effectively(t, felderasim.Options{})
			var mu sync.Mutex
			var given, next time.Time // when the commit was given up, and the first change after it
			between := inFrontOf(t, sim, func(r *http.Request) {
				mu.Lock()
				lost := given.IsZero() && strings.HasSuffix(r.URL.Path, "/commit_transaction")
				switch {
				case lost:
					given = time.Now()
				case !given.IsZero() && next.IsZero() && r.Method == http.MethodPost && (strings.Contains(r.URL.Path, "/ingress/") || strings.HasSuffix(r.URL.Path, "_transaction")):
					next = time.Now()
				}
				mu.Unlock()
				if lost {
					sim.Kill()
					sim.Restart(core.KeepNothing)
					panic(http.ErrAbortHandler) // without an answer
				}
			})
			d := startPgsource(t, merged(env, map[string]string{"PGSOURCE_DELIVERY": delivery, "FELDERA_URL": between, "FELDERA_REQUEST_LIFETIME": life.String()}))
			waitHealthy(t, d)
			pairs(t, pg, 1, 100)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			assertEqualTables(t, pg, sim)
			mu.Lock()
			defer mu.Unlock()
			if after := next.Sub(given); given.IsZero() || after < life {
				t.Errorf("the pipeline got the next change %v behind a commit without an answer", after)
			}
		})
	}
}

// inFrontOf gives the address of what passes requests on to a simulator, after
// each was shown to first.
func inFrontOf(t *testing.T, sim *felderasim.Sim, first func(*http.Request)) string {
	t.Helper()
	target, err := url.Parse(sim.URL())
	if err != nil {
		t.Fatal(err)
	}
	pass := httputil.NewSingleHostReverseProxy(target)
	between := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		first(r)
		pass.ServeHTTP(w, r)
	}))
	t.Cleanup(between.Close)
	return between.URL
}

// takenUpAndEnded: one open transaction of the pipeline was taken up, and none is
// left.
func takenUpAndEnded(t *testing.T, d *harness.Daemon, sim *felderasim.Sim) {
	t.Helper()
	if n, err := d.Metric(t.Context(), "pgsource_destination_transactions_total", map[string]string{"event": "resumed"}); err != nil || n != 1 {
		t.Errorf("%v transactions were taken up, %v", n, err)
	}
	if st := sim.Stats().Global; st.TransactionStatus != "NoTransaction" {
		t.Errorf("left %s", st.TransactionStatus)
	}
}
