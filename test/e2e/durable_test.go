package e2e

import (
	"strings"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

func enterprise() felderasim.Options {
	return felderasim.Options{Model: core.ModelAtLeastOnce, Edition: felderasim.Enterprise}
}

// With PGSOURCE_ACK_ON=durable the LSN waits for a checkpoint: completed rows
// that no checkpoint holds are not confirmed, and are delivered again when the
// pipeline comes back from its last one.
func TestPgsourceDurable(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, enterprise())
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_ACK_ON": "durable", "FELDERA_CHECKPOINT_INTERVAL": "200ms"}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'durable', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))

	sim.HoldCheckpoint()
	start := currentLSN(t, pg)
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'completed', 1, true)`)
	waitSim(t, sim, "the row is completed", func(v felderasim.View) bool { return v.Count("orders") == 2 })
	for range 50 {
		execSQL(t, pg, `SELECT pg_sleep(0.02)`)
		if got := confirmed(t, pg); got > start {
			t.Fatalf("the LSN moved to %d, past %d, without a checkpoint", got, start)
		}
	}
	sim.Crash(core.KeepCheckpoint)
	sim.ReleaseCheckpoint()
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// While no checkpoint succeeds, what is completed waits, and takes memory. There
// is an end to it: then nothing more is sent, and it is said why.
func TestPgsourceWaitsForCheckpoints(t *testing.T) {
	t.Parallel()
	const most = 512 // for each batch that may be in flight
	pg, sim := startPostgres(t, nil), startSim(t, enterprise())
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_ACK_ON": "durable", "FELDERA_CHECKPOINT_INTERVAL": "200ms", "PGSOURCE_IN_FLIGHT": "1", "PGSOURCE_BATCH_ROWS": "1",
	}))
	waitHealthy(t, d)
	sim.HoldCheckpoint()
	execSQL(t, pg, `DO $$ BEGIN FOR i IN 1..800 LOOP INSERT INTO orders VALUES (i, 'one of many', 1, true); COMMIT; END LOOP; END $$`)
	health(t, d, "it waits for a checkpoint", func(_ int, body string) bool {
		return strings.Contains(body, "are completed and in no checkpoint") && strings.Contains(body, "storage, permissions")
	})
	if n := sim.Count("orders"); n < most || n > most+2 {
		t.Errorf("%d rows are there, and %d may wait", n, most)
	}
	sim.ReleaseCheckpoint()
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	waitHealthy(t, d)
}

// A pipeline without checkpoints is refused at start, with the reason.
func TestDurableIsRefusedWithoutCheckpoints(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_ACK_ON": "durable"}))
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "PGSOURCE_ACK_ON=durable") {
		t.Errorf("it says %s", said)
	}
}
