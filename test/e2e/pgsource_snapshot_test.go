package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// awaitCopies waits until the daemon has no copy under way, and at least one
// table that was copied.
func awaitCopies(t *testing.T, env map[string]string, tables int) {
	t.Helper()
	harness.Await(t, 2*patience, fmt.Sprintf("%d tables are copied", tables), func(context.Context) (any, bool) {
		st := showSnapshot(t, env) //nolint:contextcheck // the test's own context
		copied := 0
		for _, k := range st.State.Snapshot.Tables {
			if k.Copied {
				copied++
			}
		}
		return fmt.Sprintf("%+v", st.State.Snapshot), copied >= tables && len(st.State.Snapshot.Jobs) == 0
	})
}

type snapshotShown struct {
	State struct {
		Snapshot struct {
			Tables []struct {
				Name   string
				Copied bool
			}
			Jobs []struct {
				ID       int
				Name     string
				Rows     int
				After    []string
				Restarts int
			}
			Quiet bool
		}
	}
}

func showSnapshot(t *testing.T, env map[string]string) (shown snapshotShown) {
	t.Helper()
	got := runPgsource(t, env, "state", "show", "-json")
	if err := json.Unmarshal([]byte(got.Stdout), &shown); err != nil || got.ExitCode != 0 {
		t.Fatalf("exit code %d, %v:\n%s%s", got.ExitCode, err, got.Stdout, got.Stderr)
	}
	return shown
}

const manyOrders = `INSERT INTO orders SELECT i, 'customer ' || i, i / 100.0, mod(i, 2) = 0, CASE WHEN mod(i, 3) = 0 THEN NULL ELSE repeat('é"\', mod(i, 7)) END,
	decode(md5(i::text), 'hex'), timestamp '2026-01-01' + i * interval '1 second' FROM generate_series(1, %d) i`

// A table that had rows before the slot ends with all of them, and with the
// changes that came meanwhile; a restart copies nothing again.
func TestSnapshotOfExistingRows(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, fmt.Sprintf(manyOrders, 20_000))
	env := pgsourceEnv(pg, sim)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `UPDATE orders SET note = 'changed' WHERE id % 1000 = 7; DELETE FROM orders WHERE id % 1000 = 8; INSERT INTO items VALUES (1, 2, 'x')`)
	awaitCopies(t, env, 2)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	stopClean(t, d)
	before := sim.Counters()
	waitHealthy(t, startPgsource(t, env))
	execSQL(t, pg, `INSERT INTO items VALUES (2, 2, 'y')`)
	waitSim(t, sim, "the row behind the restart", func(v felderasim.View) bool { return v.Count("items") == 2 })
	if after := sim.Counters(); after.Records-before.Records > 1000 {
		t.Errorf("a restart copied again: %+v", after)
	}
}

// A state that was reset counts its tables as loaded; one run with "only" copies
// them all the same, though no slot is made.
func TestSnapshotLoadsAgain(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, fmt.Sprintf(manyOrders, 500))
	execSQL(t, pg, `INSERT INTO items VALUES (1, 2, 'x')`)
	env := merged(pgsourceEnv(pg, sim), map[string]string{"FELDERA_REQUEST_LIFETIME": "2s", "FELDERA_REQUEST_TIMEOUT": "2s"})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	awaitCopies(t, env, 2)
	stopClean(t, d)
	sim.Crash(core.KeepNothing)
	waitSim(t, sim, "the pipeline is empty", func(v felderasim.View) bool { return v.Count("orders") == 0 })

	says(t, runPgsource(t, env, "state", "reset", "-yes"), 0)
	says(t, runPgsource(t, merged(env, map[string]string{"PGSOURCE_SNAPSHOT": "only"})), 0)
	assertEqualTables(t, pg, sim)
	d = startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO items VALUES (2, 2, 'y')`)
	waitSim(t, sim, "the row behind the restart", func(v felderasim.View) bool { return v.Count("items") == 2 })
	stopClean(t, d)
}

// Every type of the matrix in rows that were there before: what is copied is
// what the stream brings, and verify says so.
func TestSnapshotCarriesEveryType(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, createEveryType(t, pg))
	sim := startSim(t, felderasim.Options{})
	sim.RemovePipeline()
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": `public."Every Type"`})
	says(t, verb(t, env, "-apply"), 0)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	awaitCopies(t, env, 1)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEveryType(t, pg, sim)
	wants(t, runVerb(t, env, "verify"), 0)
	// The same values by the stream.
	execSQL(t, pg, `UPDATE "Every Type" SET "Mixed Case" = 5`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEveryType(t, pg, sim)
	stopClean(t, d)
}
