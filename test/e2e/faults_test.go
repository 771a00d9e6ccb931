package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
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
	const length = 20 * time.Second
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	proxy := harness.NeedProxy(t, pg.Addr())
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_DSN":            pg.DSNFor("postgres", "", "postgres", proxy.Addr()),
		"FELDERA_REQUEST_TIMEOUT": "1s", "FELDERA_REQUEST_LIFETIME": "1s",
		"PGSOURCE_BATCH_ROWS": "200", "PGSOURCE_BATCH_BYTES": "256KiB", "PGSOURCE_MEMORY_LIMIT": "4MiB",
	}))
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
	kills, last := 0, uint64(0)
	for turn := time.NewTicker(100 * time.Millisecond); ctx.Err() == nil; {
		select {
		case <-turn.C:
		case <-ctx.Done():
			turn.Stop()
			continue
		}
		lsn := confirmed(t, pg)
		if lsn < last {
			t.Fatalf("confirmed_flush_lsn went back from %s to %s", decode.FormatLSN(last), decode.FormatLSN(lsn))
		}
		last = lsn
		switch n := random.IntN(20); {
		case n == 0:
			proxy.Cut()
		case n <= 3:
			fault := felderasim.Fault{Kind: kinds[random.IntN(len(kinds))], Status: 500, Code: "DbspPanic", Bytes: int64(random.IntN(200))}
			if _, err := sim.Inject(fault); err != nil {
				t.Fatal(err)
			}
		case n <= 5:
			d.Kill()
			kills++
			if err := d.Restart(nil); err != nil {
				t.Fatal(err)
			}
		case n == 6:
			sim.HoldCompletion()
		case n <= 9:
			sim.ReleaseCompletion()
		}
	}
	writers.Wait()
	sim.ReleaseCompletion()
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	orders, err := harness.QueryValue[int64](t.Context(), pg, `SELECT count(*) FROM orders`)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d kills, %d connections, %d requests of which %d failed, %d orders equal", kills, proxy.Connections(), sim.Counters().Requests, sim.Counters().Rejected, orders)
	if kills < 3 || orders == 0 || sim.Counters().FaultsInjected < 5 {
		t.Error("too little happened for this to prove anything")
	}
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
