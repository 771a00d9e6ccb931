package e2e

import (
	"context"
	"strings"
	"testing"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// The state in a table of the source database: the same rules as in a file.
func TestPgsourceStateInATable(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_STATE": "postgres:public.holdfast_state"})
	without := merged(env, map[string]string{"PGSOURCE_CREATE": "false", "PGSOURCE_LISTEN": "127.0.0.1:0"})
	if got := runPgsource(t, without); got.ExitCode != 65 || !strings.Contains(got.Stderr, "CREATE TABLE") {
		t.Errorf("without the table it ends with %d: %s", got.ExitCode, got.Stderr)
	}
	d := startPgsource(t, env)
	waitHealthy(t, d)
	for round := range 3 {
		execSQL(t, pg, `INSERT INTO orders SELECT coalesce(max(id), 0) + 1, 'before', 1, true FROM orders`)
		awaitConfirmed(t, pg, currentLSN(t, pg))
		slot := confirmed(t, pg)
		if st := showState(t, env); lsnOf(t, pg, st.State.Acknowledged) < slot || st.Store != `postgres:"public"."holdfast_state"` {
			t.Errorf("round %d: the state says %+v, the slot was at %s before", round, st.State, decode.FormatLSN(slot))
		}
		d.Kill()
		if err := d.Restart(nil); err != nil {
			t.Fatal(err)
		}
		waitHealthy(t, d)
	}
	assertEqualTables(t, pg, sim)
	if got := runPgsource(t, env, "check"); got.ExitCode != 0 || !strings.Contains(got.Stdout, "holds the bookmark") {
		t.Errorf("check ends with %d:\n%s", got.ExitCode, got.Stdout)
	}

	// A second process is told which session has it.
	second := runPgsource(t, merged(env, map[string]string{"PGSOURCE_LISTEN": "127.0.0.1:0"}))
	if second.ExitCode != 65 || !strings.Contains(second.Stderr, "another session holds it: process") || !strings.Contains(second.Stderr, "pg_terminate_backend") {
		t.Errorf("a second process ends with %d:\n%s", second.ExitCode, second.Stderr)
	}

	// A session that broke is made anew, and takes nothing from anybody.
	execSQL(t, pg, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'holdfast/state/%'`)
	execSQL(t, pg, `INSERT INTO orders VALUES (100, 'after', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	waitHealthy(t, d)

	// Another process has taken the row over, as after a long cut: this one
	// changes nothing any more and stops.
	execSQL(t, pg, `UPDATE holdfast_state SET owner = 'process 1 on another host'`)
	execSQL(t, pg, `INSERT INTO orders VALUES (101, 'after', 1, true)`)
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "another process has taken it over") {
		t.Errorf("it says %s", said)
	}

	// A gap is found as with a file. The server lets go of the slot a moment after
	// the process has ended.
	awaitSlotFree(t, pg)
	execSQL(t, pg, `SELECT pg_replication_slot_advance('holdfast', pg_current_wal_lsn())`)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "somebody advanced it") {
		t.Errorf("it says %s", said)
	}
	execSQL(t, pg, `UPDATE holdfast_state SET record = left(record, 100)`)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "cut off, damaged or no JSON") {
		t.Errorf("it says %s", said)
	}
	if got := runPgsource(t, env, "state", "reset", "-yes"); got.ExitCode != 0 || !strings.Contains(got.Stdout, "could not be read") {
		t.Errorf("reset ends with %d: %s%s", got.ExitCode, got.Stdout, got.Stderr)
	}
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
}

// The database of the state is another one, and goes away: rows go on into
// the pipeline, nothing is acknowledged, and it goes on when it is back.
func TestPgsourceStateDatabaseAway(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	other := harness.NeedPostgres(t, harness.PostgresOptions{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_STATE": "postgres:public.state", "PGSOURCE_STATE_DSN": other.DSN(),
	}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if err := other.Stop(harness.Immediate); err != nil {
		t.Fatal(err)
	}
	start := confirmed(t, pg)
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'held', 1, true)`)
	waitSim(t, sim, "the row is in the pipeline", func(v felderasim.View) bool { return v.Count("orders") == 2 })
	harness.Await(t, patience, "not ready", func(ctx context.Context) (any, bool) {
		status, body, err := d.Get(ctx, "/readyz")
		return string(body), err == nil && status == 503 && strings.Contains(string(body), "state store")
	})
	if got := confirmed(t, pg); got > start {
		t.Errorf("the LSN moved from %s to %s without a bookmark", decode.FormatLSN(start), decode.FormatLSN(got))
	}
	if err := other.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	waitHealthy(t, d)
}
