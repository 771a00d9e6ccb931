package e2e

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// retentionMegabytes is how much WAL the test writes: RETENTION_MB, else 256.
func retentionMegabytes(t *testing.T) int {
	t.Helper()
	text := os.Getenv("RETENTION_MB")
	if text == "" {
		return 256
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 256 {
		t.Fatalf("RETENTION_MB is %q, and must be a number from 256", text)
	}
	return n
}

// retained gives the bytes of WAL that the slot holds back, and the slot's
// restart_lsn, both read from the server.
func retained(t *testing.T, pg *harness.Postgres) (bytes int64, restart uint64) {
	t.Helper()
	rows, err := pg.Rows(t.Context(), `SELECT (pg_current_wal_insert_lsn() - restart_lsn)::bigint, (restart_lsn - '0/0')::text FROM pg_replication_slots WHERE slot_name = 'holdfast'`)
	if err != nil || len(rows) != 1 {
		t.Fatalf("%v, %v", rows, err)
	}
	bytes, err = strconv.ParseInt(rows[0][0], 10, 64)
	if err == nil {
		restart, err = strconv.ParseUint(rows[0][1], 10, 64)
	}
	if err != nil {
		t.Fatal(err)
	}
	return bytes, restart
}

// Published tables are idle, and much WAL goes to another one: both positions
// of the slot follow, so what the server keeps is bounded by the distance of
// its checkpoints and not by what is written. While a published row is not
// completed they do not, and afterwards they catch up. With the destination
// dead, the server still shuts down.
func TestPgsourceRetainedWAL(t *testing.T) {
	t.Parallel()
	const (
		round = 32 // megabytes of WAL between two checkpoints
		mega  = 1 << 20
	)
	pg := startPostgres(t, map[string]string{"max_wal_size": "64MB", "min_wal_size": "32MB", "checkpoint_timeout": "1h"})
	sim := startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE TABLE other (t text); ALTER TABLE other ALTER t SET STORAGE EXTERNAL`)
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)

	var most int64
	fill := func(megabytes int) {
		t.Helper()
		for range megabytes / 8 {
			execSQL(t, pg, `INSERT INTO other SELECT repeat('x', 1024 * 1024) FROM generate_series(1, 8)`)
			bytes, _ := retained(t, pg)
			most = max(most, bytes)
		}
		execSQL(t, pg, `TRUNCATE other`)
	}
	// The slot's restart_lsn moves to the place of a record that the server
	// writes at each checkpoint, once the position behind it is confirmed.
	follows := func(lsn uint64) {
		t.Helper()
		awaitConfirmed(t, pg, lsn)
		harness.Await(t, patience, "restart_lsn reaches "+decode.FormatLSN(lsn), func(ctx context.Context) (any, bool) {
			if err := pg.Exec(ctx, `CHECKPOINT`); err != nil {
				return err, false
			}
			reached, err := harness.QueryValue[bool](ctx, pg, `SELECT restart_lsn >= $1::text::pg_lsn FROM pg_replication_slots WHERE slot_name = 'holdfast'`, decode.FormatLSN(lsn))
			return fmt.Sprint(reached, err), reached
		})
	}
	follows(currentLSN(t, pg))
	total := retentionMegabytes(t)
	began := currentLSN(t, pg)
	for range total / round {
		fill(round)
		follows(currentLSN(t, pg))
	}
	written := int64(currentLSN(t, pg) - began)
	if written < int64(total)*mega {
		t.Fatalf("only %d bytes of WAL were written", written)
	}
	if most > 2*round*mega {
		t.Errorf("the slot held back %d MB of WAL, with %d MB between two checkpoints", most/mega, round)
	}
	onDisk, err := harness.QueryValue[int64](t.Context(), pg, `SELECT sum(size)::bigint FROM pg_ls_waldir()`)
	if err != nil {
		t.Fatal(err)
	}
	// The server keeps max_wal_size, what is between two checkpoints, and files
	// for use again.
	if onDisk > 6*round*mega {
		t.Errorf("%d MB of WAL are on disk", onDisk/mega)
	}
	if n := sim.Counters().Requests; n != 0 {
		t.Errorf("%d requests for nothing", n)
	}
	t.Logf("%d MB of WAL were written; at most %d MB were held back, %d MB are on disk", written/mega, most/mega, onDisk/mega)

	// The other way round: the same numbers show it when WAL is held back.
	sim.HoldCompletion()
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'held', 1, true)`)
	held := currentLSN(t, pg)
	waitSim(t, sim, "the row is accepted", func(v felderasim.View) bool { return v.Counters().Records >= 1 })
	most = 0
	fill(3 * round)
	if _, restart := retained(t, pg); restart > held || most < 2*round*mega {
		t.Errorf("a row at %s is not completed, and restart_lsn is %s with %d bytes held back", decode.FormatLSN(held), decode.FormatLSN(restart), most)
	}
	sim.ReleaseCompletion()
	follows(currentLSN(t, pg))

	sim.Kill()
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'nobody takes it', 1, true)`)
	fill(8)
	stopping := time.Now()
	if err := pg.Stop(harness.Fast); err != nil {
		t.Fatalf("a fast shutdown with a dead destination is held up: %v", err)
	}
	took := time.Since(stopping)
	t.Logf("a fast shutdown with a dead destination took %v", took.Round(time.Millisecond))
	if took > 30*time.Second { // pgsource lets go after 5 s
		t.Errorf("it took %v", took)
	}
	sim.Restart(core.KeepNothing)
	if err := pg.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if got := fmt.Sprint(rows(sim, "orders", "id")); got != "[[2]]" {
		t.Errorf("the row that nobody took is not there: %s", got)
	}
}
