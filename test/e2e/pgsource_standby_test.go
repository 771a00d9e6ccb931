package e2e

import (
	"context"
	"strings"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// A standby serves as the source from PostgreSQL 16 on: the publication is the
// primary's, the slot the standby's, and its position moves too when nothing
// is published. Older standbys are refused, with what to use instead.
func TestPgsourceReadsAStandby(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, map[string]string{"hot_standby_feedback": "on"}), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE TABLE other (t text)`)
	standby := pg.NeedStandby(t)
	if err := standby.AwaitReplayed(t.Context(), currentLSN(t, pg)); err != nil {
		t.Fatal(err)
	}
	env := merged(pgsourceEnv(standby, sim), map[string]string{"PGSOURCE_STATE": "file:" + t.TempDir() + "/state.json"})
	if major(t, pg) < 16 {
		got := runCheck(t, env)
		wants(t, got, 65, "it is a standby", "decodes on a primary only", "target_session_attrs=primary")
		return
	}

	// A first start finds that only the primary can make the publication.
	wants(t, runCheck(t, env), 65, "a standby cannot make it", "on the primary run: CREATE PUBLICATION")
	execSQL(t, pg, `CREATE PUBLICATION holdfast FOR TABLE orders, items WITH (publish_via_partition_root = true)`)
	if err := standby.AwaitReplayed(t.Context(), currentLSN(t, pg)); err != nil {
		t.Fatal(err)
	}
	made := make(chan error, 1)
	go func() { // it waits for a record that only the primary writes
		made <- standby.Exec(t.Context(), `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	}()
	harness.Await(t, patience, "the standby makes the slot", func(ctx context.Context) (any, bool) {
		select {
		case err := <-made:
			return err, err == nil
		default:
			return pg.Exec(ctx, `SELECT pg_log_standby_snapshot()`), false
		}
	})
	env["PGSOURCE_CREATE"] = "false"
	wants(t, runCheck(t, env), 0, "it is a standby")
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'by way of the standby', 1, true); INSERT INTO items VALUES (1, 1, 'x')`)
	awaitConfirmed(t, standby, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	execSQL(t, pg, `INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 1000)`)
	awaitConfirmed(t, standby, currentLSN(t, pg))
	if said := strings.Join(d.Log().Tail(1000), "\n"); strings.Contains(said, "level=ERROR") {
		t.Errorf("errors in the log:\n%s", said)
	}
}
