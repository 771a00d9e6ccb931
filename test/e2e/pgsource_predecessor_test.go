package e2e

import (
	"regexp"
	"testing"
	"time"

	"holdfast/test/felderasim"
)

// A request that is applied after its sender was killed must not overtake what
// the next process sends: the row would keep a value of the past.
func TestPgsourceOutlivesItsPredecessorsRequests(t *testing.T) {
	t.Parallel()
	waits := regexp.MustCompile(`a request of the process before may still be applied`)
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'a', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))

	// Longer than a start and a replay take, shorter than the life of a request.
	if _, err := sim.Inject(felderasim.Fault{Kind: felderasim.Delay, Delay: 3 * time.Second}); err != nil {
		t.Fatal(err)
	}
	execSQL(t, pg, `UPDATE orders SET customer = 'first' WHERE id = 1`)
	waitSim(t, sim, "the request has arrived", func(v felderasim.View) bool { return v.Counters().FaultsInjected > 0 })
	d.Kill()
	execSQL(t, pg, `UPDATE orders SET customer = 'second' WHERE id = 1`)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	if _, err := d.WaitLog(t.Context(), waits); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)

	said := len(d.Log().Grep(waits))
	// After a stop in order there is nothing to wait for.
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	if code, err := d.Wait(t.Context()); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v", code, err)
	}
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	execSQL(t, pg, `UPDATE orders SET customer = 'third' WHERE id = 1`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if lines := d.Log().Grep(waits); len(lines) != said {
		t.Errorf("it waited after a stop in order: %s", lines[said:])
	}
}
