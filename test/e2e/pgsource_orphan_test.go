package e2e

import (
	"fmt"
	"strings"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// A transaction of the pipeline that nobody ends is shown, and ended by a person
// who names it; pgsource's own is not, unless that is said too.
func TestPgsourceEndsAnOpenTransaction(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := pgsourceEnv(pg, sim)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	verb := func(args ...string) []string { return append([]string{"feldera-transaction"}, args...) }
	wants(t, runVerb(t, env, verb("show")...), 0, "no transaction")
	wants(t, runVerb(t, env, verb("commit", "-yes", "1")...), 65, "not the one that is open")
	for _, wrong := range [][]string{verb(), verb("commit"), verb("show", "1"), verb("commit", "x"), verb("drop")} {
		wants(t, runVerb(t, env, wrong...), 64)
	}

	orphan, err := sim.StartTransaction()
	if err != nil {
		t.Fatal(err)
	}
	execSQL(t, pg, `INSERT INTO orders VALUES (100001, 'waits', 1, true)`)
	number := fmt.Sprint(orphan)
	wants(t, runVerb(t, env, verb("show")...), 0, "it is not this pgsource's", "commit -yes "+number)
	wants(t, runVerb(t, env, verb("show", "-json")...), 0, `"open": true`, `"ours": false`)
	wants(t, runVerb(t, env, verb("commit", number)...), 64, "nothing was done", "cannot be taken back")
	wants(t, runVerb(t, env, verb("commit", "-yes", fmt.Sprint(orphan+1))...), 65, "not the one that is open")
	wants(t, runVerb(t, env, verb("commit", "-yes", number)...), 0, "is committed")
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)

	insideTransaction(t, pg, sim, d)
	d.Kill()
	sim.ReleaseIngest("items")
	ours := fmt.Sprint(sim.Stats().Global.TransactionID)
	wants(t, runVerb(t, env, verb("show")...), 0, "this pgsource has opened it", "start pgsource")
	wants(t, runVerb(t, env, verb("commit", "-yes", ours)...), 64, "nothing was done", "-ours")
	// A reset of the state does not forget it.
	wants(t, runVerb(t, env, "state", "reset", "-yes"), 0, "this pgsource has opened it")
	wants(t, runVerb(t, env, verb("show")...), 0, "this pgsource has opened it")
	wants(t, runVerb(t, env, verb("commit", "-yes", "-ours", ours)...), 0, "is committed")
	wants(t, runVerb(t, env, verb("show")...), 0, "no transaction")
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// A state that is set up for another cluster keeps what it says of the
// pipeline's transaction, which the next start then ends; a state that cannot
// be read says that one is open that nobody knows.
func TestPgsourceResetKeepsTheTransaction(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := pgsourceEnv(pg, sim)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	insideTransaction(t, pg, sim, d)
	d.Kill()
	sim.ReleaseIngest("items")

	other := harness.NeedPostgres(t, harness.PostgresOptions{OwnIdentifier: true})
	execSQL(t, other, sourceTables)
	execSQL(t, other, `CREATE PUBLICATION holdfast FOR TABLE orders, items WITH (publish_via_partition_root = true)`)
	execSQL(t, other, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	moved := merged(env, map[string]string{"PGSOURCE_DSN": other.DSN()})
	wants(t, runVerb(t, moved, "state", "reset", "-yes"), 0, "this pgsource has opened it, and the next start commits it")
	if err := d.Restart(map[string]string{"PGSOURCE_DSN": other.DSN()}); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	execSQL(t, other, `INSERT INTO orders VALUES (5000, 'of the other cluster', 1, true)`)
	awaitConfirmed(t, other, currentLSN(t, other))
	if st := sim.Stats().Global; st.TransactionStatus != "NoTransaction" {
		t.Errorf("a transaction is open: %+v", st.TransactionStatus)
	}
	if got := fmt.Sprint(rows(sim, "orders", "id")); !strings.Contains(got, "[5000]") {
		t.Errorf("orders %s", got)
	}
}
