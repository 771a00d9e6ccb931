package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// Random SIGKILLs, cut connections and failing requests under concurrent
// writers: in the end the tables are equal, and meanwhile the confirmed
// position never goes back and never passes a row that was not completed.
func TestPgsourceUnderFaults(t *testing.T) {
	t.Parallel()
	pgsourceUnderFaults(t, nil)
}

// The same when the slot is read over plain SQL.
func TestPgsourcePeekUnderFaults(t *testing.T) {
	t.Parallel()
	pgsourceUnderFaults(t, map[string]string{"PGSOURCE_TRANSPORT": "peek", "PGSOURCE_PEEK_INTERVAL": "100ms"})
}

func pgsourceUnderFaults(t *testing.T, settings map[string]string) {
	t.Helper()
	const length = 20 * time.Second
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	proxy := harness.NeedProxy(t, pg.Addr())
	d := startPgsource(t, merged(merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_DSN":            pg.DSNFor("postgres", "", "postgres", proxy.Addr()),
		"FELDERA_REQUEST_TIMEOUT": "1s", "FELDERA_REQUEST_LIFETIME": "1s",
		"PGSOURCE_BATCH_ROWS": "200", "PGSOURCE_BATCH_BYTES": "256KiB", "PGSOURCE_MEMORY_LIMIT": "4MiB",
	}), settings))
	waitHealthy(t, d)

	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	var writers sync.WaitGroup
	for w := range 3 {
		writers.Go(func() { write(ctx, t, pg, rand.New(rand.NewPCG(seed, uint64(w)))) })
	}
	random := rand.New(rand.NewPCG(seed, 99))
	kinds := []felderasim.FaultKind{
		felderasim.DropRequest, felderasim.DropResponse, felderasim.UnavailableBefore, felderasim.UnavailableAfter,
		felderasim.CutBody, felderasim.TooMany, felderasim.AnswerAfter,
	}
	kills, sampled := 0, sampleEvidence(t.Context(), t, pg, sim)
	for turn := time.NewTicker(100 * time.Millisecond); ctx.Err() == nil; {
		select {
		case <-turn.C:
		case <-ctx.Done():
			turn.Stop()
			continue
		}
		switch n := random.IntN(20); {
		case n == 0:
			proxy.Cut()
		case n <= 2:
			fault := felderasim.Fault{Kind: kinds[random.IntN(len(kinds))], Status: 500, Code: "DbspPanic", Bytes: int64(random.IntN(200))}
			if _, err := sim.Inject(fault); err != nil {
				t.Fatal(err)
			}
		case n == 3: // each start waits before it sends, and there is to be movement in between
			d.Kill()
			kills++
			if err := d.Restart(nil); err != nil {
				t.Fatal(err)
			}
		case n == 4:
			sim.HoldCompletion()
		case n <= 8:
			sim.ReleaseCompletion()
		}
	}
	writers.Wait()
	sim.ReleaseCompletion()
	awaitConfirmed(t, pg, currentLSN(t, pg)) // the catching up is looked at too
	samples, moves, took := sampled()
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	orders, err := harness.QueryValue[int64](t.Context(), pg, `SELECT count(*) FROM orders`)
	if err != nil {
		t.Fatal(err)
	}
	if moves < 2 {
		t.Errorf("confirmed_flush_lsn moved %d times: too little for this to prove anything", moves)
	}
	if rate := float64(samples) / took.Seconds(); rate < 50 {
		t.Errorf("%d samples of confirmed_flush_lsn in %s, which is %.0f a second: want 50 or more", samples, took, rate)
	}
	t.Logf("%d samples of confirmed_flush_lsn in %s, which moved %d times; %d kills, %d connections, %d requests of which %d failed, %d orders equal", samples, took, moves, kills, proxy.Connections(), sim.Counters().Requests, sim.Counters().Rejected, orders)
	if kills < 3 || orders == 0 || sim.Counters().FaultsInjected < 5 {
		t.Error("too little happened for this to prove anything")
	}
}

// sampleEvidence reads the slot's position from the server as often as it can
// and holds it against what the pipeline has completed: it never goes back, and
// never passes a marker that is not in a completed state. A marker is the next
// number in one row, committed alone, so that its position is known: behind it,
// once it is there. The function that it gives ends it, and tells how many looks
// there were, how often the position moved, and for how long.
func sampleEvidence(ctx context.Context, t *testing.T, pg *harness.Postgres, sim *felderasim.Sim) (end func() (samples, moves int, took time.Duration)) {
	t.Helper()
	const markers = 1_000_000 // the row
	type marker struct {
		number int64
		end    uint64 // at or above the commit's end
	}
	began := time.Now()
	var mu sync.Mutex
	var open []marker // in commit order: those not yet seen behind the slot's position
	sctx, stop := context.WithCancel(ctx)
	var work sync.WaitGroup
	work.Go(func() {
		conn, err := pg.Connect(sctx)
		if err != nil {
			t.Errorf("connect: %v", err)
			return
		}
		defer func() { _ = conn.Close(context.WithoutCancel(sctx)) }()
		for n := int64(1); sctx.Err() == nil; n++ {
			if _, err := conn.Exec(sctx, fmt.Sprintf(`INSERT INTO items VALUES (%d, %d, 'marker') ON CONFLICT (id) DO UPDATE SET order_id = EXCLUDED.order_id`, markers, n)); err != nil {
				continue // the end of the test
			}
			var text string
			if err := conn.QueryRow(sctx, `SELECT pg_sleep(0.02)::text || (pg_current_wal_insert_lsn() - '0/0')::text`).Scan(&text); err != nil {
				continue
			}
			lsn, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				t.Errorf("read a position: %v", err)
				return
			}
			mu.Lock()
			open = append(open, marker{n, lsn})
			mu.Unlock()
		}
	})
	samples, moves := 0, 0
	work.Go(func() {
		conn, err := pg.Connect(sctx)
		if err != nil {
			t.Errorf("connect: %v", err)
			return
		}
		defer func() { _ = conn.Close(context.WithoutCancel(sctx)) }()
		for last := uint64(0); sctx.Err() == nil; samples++ {
			var text string
			err := conn.QueryRow(sctx, `SELECT pg_sleep(0.005)::text || (confirmed_flush_lsn - '0/0')::text FROM pg_replication_slots WHERE slot_name = 'holdfast'`).Scan(&text)
			if err != nil {
				continue
			}
			lsn, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				t.Errorf("read a position: %v", err)
				return
			}
			// The bookmark is read after the position, so it can only be above.
			if bookmark := savedBookmark(t, pg); bookmark < lsn {
				t.Errorf("confirmed_flush_lsn is %s, and the bookmark %s", decode.FormatLSN(lsn), decode.FormatLSN(bookmark))
			}
			if lsn < last {
				t.Errorf("confirmed_flush_lsn went back from %s to %s", decode.FormatLSN(last), decode.FormatLSN(lsn))
			}
			if lsn == last {
				continue
			}
			last, moves = lsn, moves+1
			// The position was read first, so whatever it covers must be there.
			there := int64(0)
			for _, row := range sim.Rows("items") {
				if row["id"] == int64(markers) {
					there, _ = row["order_id"].(int64)
				}
			}
			mu.Lock()
			for len(open) > 0 && open[0].end <= lsn {
				if there < open[0].number {
					t.Errorf("confirmed_flush_lsn is %s, and the pipeline has not completed a row committed before %s", decode.FormatLSN(lsn), decode.FormatLSN(open[0].end))
				}
				open = open[1:]
			}
			mu.Unlock()
		}
	})
	return func() (int, int, time.Duration) {
		stop()
		work.Wait()
		return samples, moves, time.Since(began)
	}
}

// savedBookmark reads the state file as it is on the disk.
func savedBookmark(t *testing.T, pg *harness.Postgres) uint64 {
	t.Helper()
	b, err := os.ReadFile(stateFile(pg))
	if err != nil {
		t.Error(err)
		return 0
	}
	var saved struct {
		Record struct {
			LSN string `json:"acknowledged_lsn"`
		} `json:"record"`
	}
	var high, low uint64
	err = json.Unmarshal(b, &saved)
	if err == nil {
		_, err = fmt.Sscanf(saved.Record.LSN, "%X/%X", &high, &low)
	}
	if err != nil {
		t.Errorf("read the state: %v", err)
	}
	return high<<32 | low
}

// write runs random transactions of every kind until ctx ends.
func write(ctx context.Context, t *testing.T, pg *harness.Postgres, random *rand.Rand) {
	t.Helper()
	conn, err := pg.Connect(ctx)
	if err != nil {
		t.Errorf("connect: %v", err)
		return
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	key := func() int { return random.IntN(300) }
	for ctx.Err() == nil {
		sql := "BEGIN; SELECT pg_sleep(0.01);" // writers think, or two cores do nothing else
		for range random.IntN(6) + 1 {
			switch random.IntN(6) {
			case 0, 1:
				sql += fmt.Sprintf("INSERT INTO orders VALUES (%d, 'c%d', %d.25, true, repeat('n', %d)) ON CONFLICT (id) DO UPDATE SET amount = excluded.amount;", key(), key(), key(), random.IntN(4000))
			case 2:
				sql += fmt.Sprintf("UPDATE orders SET amount = coalesce(amount, 0) + 1 WHERE id = %d;", key())
			case 3:
				sql += fmt.Sprintf("DELETE FROM orders WHERE id = %d;", key())
			case 4:
				from, to := key(), key()
				sql += fmt.Sprintf("UPDATE orders SET id = %d WHERE id = %d AND NOT EXISTS (SELECT FROM orders WHERE id = %d);", to, from, to)
			case 5:
				sql += fmt.Sprintf("INSERT INTO items VALUES (%d, %d, 's') ON CONFLICT (id) DO UPDATE SET sku = items.sku || 'x';", key(), key())
			}
		}
		end := "COMMIT"
		if random.IntN(10) == 0 {
			end = "ROLLBACK"
		}
		if _, err := conn.Exec(ctx, sql+end); err != nil && ctx.Err() == nil {
			// Two writers may meet; the transaction is then gone as a whole.
			if _, err := conn.Exec(ctx, "ROLLBACK"); err != nil && ctx.Err() == nil {
				t.Errorf("writer: %v", err)
				return
			}
		}
	}
}
