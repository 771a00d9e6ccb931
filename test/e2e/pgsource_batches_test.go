package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// As many batches as PGSOURCE_IN_FLIGHT says are accepted without being completed,
// and no more; what is received meanwhile waits.
func TestPgsourceInFlight(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_IN_FLIGHT": "3", "PGSOURCE_BATCH_ROWS": "1"}))
	waitHealthy(t, d)
	before := sim.Counters().Records
	sim.HoldCompletion()
	for i := range 20 {
		execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'one', 1, true)`, i))
	}
	harness.Await(t, patience, "everything is received, and three batches are in flight", func(ctx context.Context) (any, bool) {
		received, err := d.Metric(ctx, "pgsource_transactions_total", nil)
		flying, flyingErr := d.Metric(ctx, "pgsource_inflight_batches", nil)
		return fmt.Sprint(received, flying, err, flyingErr), err == nil && flyingErr == nil && received == 20 && flying == 3
	})
	if n := sim.Counters().Records - before; n != 3 {
		t.Errorf("%d rows are accepted", n)
	}
	sim.ReleaseCompletion()
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// PGSOURCE_BATCH_AGE is how long the oldest transaction of a batch waits for
// others: those that come meanwhile go with it, and do not hold it up.
func TestPgsourceBatchAge(t *testing.T) {
	t.Parallel()
	const age = 2 * time.Second
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_BATCH_AGE": age.String()}))
	waitHealthy(t, d)
	before, requests, began, n := sim.Counters().Records, sim.Counters().Requests, time.Now(), 0
	harness.Await(t, patience, "the first request, while rows go on to come", func(ctx context.Context) (any, bool) {
		n++
		err := pg.Exec(ctx, fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'one', 1, true)`, n))
		return fmt.Sprint(n, err), sim.Counters().Records > before
	})
	took, rows := time.Since(began), sim.Counters().Records-before
	if took < age || rows < 2 || sim.Counters().Requests != requests+1 {
		t.Errorf("%d rows came in %d requests after %v", rows, sim.Counters().Requests-requests, took)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}
