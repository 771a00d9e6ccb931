package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"holdfast/internal/feldera"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// effectively starts what effectively_once needs, but for the daemon.
func effectively(t *testing.T, opts felderasim.Options) (*harness.Postgres, *felderasim.Sim, map[string]string) {
	t.Helper()
	def := feldera.ProgressTable(feldera.DefaultProgressTable)
	opts.SQL = program + def.SQL()
	pg, sim := startPostgres(t, nil), startSim(t, opts)
	return pg, sim, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_DELIVERY": "effectively_once", "PGSOURCE_SPILL_DIR": t.TempDir(),
		"FELDERA_REQUEST_LIFETIME": "3s", "FELDERA_REQUEST_TIMEOUT": "3s",
	})
}

// startCrashing starts a pgsource that dies at the first visit of a place.
func startCrashing(t *testing.T, env map[string]string, place string) *harness.Daemon {
	t.Helper()
	return harness.NeedDaemon(t, "./cmd/pgsource", harness.BuildOptions{Race: true, Tags: "crashpoints"},
		harness.DaemonOptions{Env: merged(env, map[string]string{"CRASH_AT": place + ":1:kill"}), ListenVar: "PGSOURCE_LISTEN"})
}

// sentTo counts the requests to a table.
func sentTo(sim *felderasim.Sim, table string) (n int) {
	for _, r := range sim.Requests() {
		if strings.Trim(r.Table, `"`) == table && r.Records > 0 {
			n++
		}
	}
	return n
}

// metric reads a number of the daemon's.
func metric(t *testing.T, d *harness.Daemon, name string, labels map[string]string) float64 {
	t.Helper()
	n, err := d.Metric(t.Context(), name, labels)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func found(t *testing.T, d *harness.Daemon, what string) {
	t.Helper()
	harness.Await(t, patience, "the decision is "+what, func(ctx context.Context) (any, bool) {
		n, err := d.Metric(ctx, "pgsource_progress_decisions_total", map[string]string{"found": what})
		return fmt.Sprint(n, err), n == 1
	})
}

func TestPgsourceEffectivelyOnce(t *testing.T) {
	t.Parallel()
	pg, sim, env := effectively(t, felderasim.Options{})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	found(t, d, "fresh")
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'a', 1, true), (2, 'b', 2, false)`)
	execSQL(t, pg, `BEGIN; INSERT INTO items VALUES (1, 1, 'x'); UPDATE orders SET paid = true WHERE id = 2; COMMIT`)
	execSQL(t, pg, `UPDATE orders SET id = 20 WHERE id = 2`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)

	// The newest row stands for the last position that brought rows, and a
	// restart goes on from there.
	stopClean(t, d)
	newest := int64(0)
	for _, row := range sim.Rows(feldera.DefaultProgressTable) {
		if p, ok := row["position"].(uint64); ok {
			newest = max(newest, int64(p))
		}
	}
	if rows := lsnOf(t, pg, showState(t, env).State.Rows); newest != int64(rows) {
		t.Errorf("the newest progress row is %d, the state says %d", newest, rows)
	}
	orders := sentTo(sim, "orders")
	d = startPgsource(t, env)
	waitHealthy(t, d)
	found(t, d, "equal")
	if n := sentTo(sim, "orders"); n != orders {
		t.Errorf("%d requests were sent again", n-orders)
	}
	execSQL(t, pg, `DELETE FROM orders WHERE id = 1`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// The process dies when the pipeline has completed rows and progress row, and
// before it could note it: nothing is sent again.
func TestPgsourceSkipsWhatThePipelineHolds(t *testing.T) {
	t.Parallel()
	pg, sim, env := effectively(t, felderasim.Options{})
	d := startCrashing(t, env, "pgsource.completed")
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'a', 1, true)`)
	awaitEnd(t, d, -1)
	orders := sentTo(sim, "orders")
	if orders == 0 {
		t.Fatal("nothing was sent")
	}
	d = startPgsource(t, env)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	waitHealthy(t, d)
	found(t, d, "ahead")
	if n := metric(t, d, "pgsource_held_transactions_total", nil); n != 1 {
		t.Errorf("%v transactions were skipped", n)
	}
	if n := sentTo(sim, "orders"); n != orders {
		t.Errorf("%d requests were sent again", n-orders)
	}
	// What was skipped described the table: rows that come now need that.
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'b', 2, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// The process dies with a transaction of the pipeline open: the next one goes
// on in it, and what it shows is whole.
func TestPgsourceEffectivelyOnceInOpenTransaction(t *testing.T) {
	t.Parallel()
	for _, place := range []string{"pgsource.transaction-open", "pgsource.sent", "pgsource.after-commit"} {
		t.Run(place, func(t *testing.T) {
			t.Parallel()
			pg, sim, env := effectively(t, felderasim.Options{})
			d := startCrashing(t, env, place)
			waitHealthy(t, d)
			execSQL(t, pg, `BEGIN; INSERT INTO orders VALUES (1, 'a', 1, true); INSERT INTO items VALUES (1, 1, 'x'); COMMIT`)
			awaitEnd(t, d, -1)
			execSQL(t, pg, `UPDATE orders SET note = 'later' WHERE id = 1`)
			d = startPgsource(t, env)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			waitHealthy(t, d)
			assertEqualTables(t, pg, sim)
			stopClean(t, d)
			d = startPgsource(t, env)
			waitHealthy(t, d)
			found(t, d, "equal")
		})
	}
}

// A transaction is open from before, and rows that the pipeline holds are passed
// over in it: their acknowledgement waits for the claim, which is completed by the
// commit. What belongs in the transaction does not wait for that.
func TestPgsourcePassesOverInsideATransaction(t *testing.T) {
	t.Parallel()
	pg, sim, env := effectively(t, felderasim.Options{Edition: felderasim.Enterprise, Model: core.ModelExactlyOnce})
	env = merged(env, map[string]string{"PGSOURCE_IN_FLIGHT": "1", "PGSOURCE_BATCH_ROWS": "1"})
	// The bookmark is saved a moment after what it stands for, and the transaction is
	// to be opened in between.
	for try := range 8 {
		d := startCrashing(t, env, "pgsource.transaction-open")
		waitHealthy(t, d)
		for n := range 3 {
			execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'completed', 1, true)`, 10*try+n))
		}
		execSQL(t, pg, fmt.Sprintf(`BEGIN; INSERT INTO orders VALUES (%[1]d, 'in a transaction', 1, true); INSERT INTO items VALUES (%[1]d, 1, 'with this'); COMMIT`, 10*try+3))
		awaitEnd(t, d, -1)
		d = startPgsource(t, env)
		awaitConfirmed(t, pg, currentLSN(t, pg))
		assertEqualTables(t, pg, sim)
		passed := metric(t, d, "pgsource_progress_decisions_total", map[string]string{"found": "ahead"}) > 0
		stopClean(t, d)
		if passed {
			t.Logf("rows were passed over inside of a transaction at try %d", try+1)
			return
		}
	}
	t.Fatal("no transaction was opened between a completion and its bookmark")
}

// A transaction that brings no rows ends what is sent again after a crash: the
// progress row names the last rows, as the state does, and a pipeline that comes
// back with everything is not taken for one that lost something.
func TestPgsourceReplayEndsWithoutRows(t *testing.T) {
	t.Parallel()
	pg, sim, env := effectively(t, felderasim.Options{Edition: felderasim.Enterprise, Model: core.ModelExactlyOnce})
	env = merged(env, map[string]string{"PGSOURCE_TRUNCATE": "ignore", "PGSOURCE_BATCH_ROWS": "50", "PGSOURCE_ON_DESTINATION_LOSS": "stop"})
	d := startPgsource(t, env)
	// The position, and that it feeds two tables: it sends no row while one of
	// the three waits for completion, which is about to be held.
	waitSim(t, sim, "the claim is completed", func(v felderasim.View) bool {
		return v.Count(feldera.DefaultProgressTable) == 3 && v.Settled()
	})
	sim.HoldCompletion()
	before := sim.Counters().Records
	execSQL(t, pg, `INSERT INTO orders SELECT i, 'many', 1, true FROM generate_series(1, 200) i`)
	execSQL(t, pg, `TRUNCATE items`)
	waitSim(t, sim, "the rows are accepted", func(v felderasim.View) bool { return v.Counters().Records >= before+200 })
	d.Kill()
	sim.ReleaseCompletion()
	sim.Crash(core.KeepNothing) // so that the claim finds none of it, and all is sent again
	d = startPgsource(t, env)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if n := metric(t, d, "pgsource_destination_transactions_total", map[string]string{"event": "committed"}); n != 1 {
		t.Errorf("%v transactions: the TRUNCATE was not in one with the rows", n)
	}
	stopClean(t, d)
	sim.Crash(core.KeepJournal)
	d = startPgsource(t, env)
	waitHealthy(t, d)
	found(t, d, "equal")
	assertEqualTables(t, pg, sim)
}

// A pipeline that came back with everything is no loss, one that came back
// empty is, whether the daemon runs meanwhile or not.
func TestPgsourceTellsALossFromARestart(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		keep    core.Keep
		running bool
		found   string
		resyncs float64
	}{
		"kept, while down":       {core.KeepJournal, false, "equal", 0},
		"kept, while running":    {core.KeepJournal, true, "equal", 0},
		"emptied, while down":    {core.KeepNothing, false, "lost", 2},
		"emptied, while running": {core.KeepNothing, true, "lost", 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg, sim, env := effectively(t, felderasim.Options{Edition: felderasim.Enterprise, Model: core.ModelExactlyOnce})
			d := startPgsource(t, env)
			waitHealthy(t, d)
			execSQL(t, pg, `INSERT INTO orders VALUES (1, 'a', 1, true)`)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			if !c.running {
				stopClean(t, d)
			}
			sim.Crash(c.keep)
			if !c.running {
				d = startPgsource(t, env)
			}
			execSQL(t, pg, `INSERT INTO orders VALUES (2, 'b', 2, true)`)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			found(t, d, c.found)
			// What was lost is brought again, and nobody has to ask for it.
			awaitResyncs(t, d, "loss", c.resyncs)
			waitHealthy(t, d)
			stopClean(t, d)
			if n := len(showState(t, env).State.Notices); n != 0 {
				t.Errorf("%d notices", n)
			}
			assertEqualTables(t, pg, sim)
			d = startPgsource(t, env)
			waitHealthy(t, d)
			found(t, d, "equal")
		})
	}
}

// A pipeline that was never used is not taken for one that lost everything.
func TestPgsourceNeverUsedIsNoLoss(t *testing.T) {
	t.Parallel()
	pg, sim, env := effectively(t, felderasim.Options{})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	awaitConfirmed(t, pg, currentLSN(t, pg)) // an idle position
	stopClean(t, d)
	sim.Crash(core.KeepNothing)
	d = startPgsource(t, env)
	waitHealthy(t, d)
	found(t, d, "fresh")
	if st := showState(t, env); len(st.State.Notices) != 0 {
		t.Errorf("%+v", st)
	}
}

// What effectively_once cannot do without is refused by name before anything
// is sent.
func TestPgsourceEffectivelyOnceRefuses(t *testing.T) {
	t.Parallel()
	def := feldera.ProgressTable(feldera.DefaultProgressTable)
	for name, c := range map[string]struct {
		sql  string
		env  map[string]string
		code int
		says string
	}{
		"no progress table": {program, nil, 65, "CREATE TABLE holdfast_progress"},
		"no primary key": {
			strings.Replace(program, "id BIGINT NOT NULL PRIMARY KEY,\n  order_id", "id BIGINT NOT NULL,\n  order_id", 1) + def.SQL(),
			nil, 65, "table items: it has no PRIMARY KEY in Feldera",
		},
		"no state":       {program + def.SQL(), map[string]string{"PGSOURCE_STATE": "none"}, 78, "PGSOURCE_STATE keeps nothing"},
		"table by table": {program + def.SQL(), map[string]string{"PGSOURCE_ATOMICITY": "table"}, 78, "PGSOURCE_ATOMICITY lets what is sent again"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{SQL: c.sql})
			env := merged(merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_DELIVERY": "effectively_once"}), c.env)
			got := runPgsource(t, env)
			if said := got.Stdout + got.Stderr; got.ExitCode != c.code || !strings.Contains(said, c.says) {
				t.Errorf("it ends with %d and says:\n%s", got.ExitCode, said)
			}
			if n := sim.Counters().Requests; n != 0 {
				t.Errorf("%d requests went out", n)
			}
		})
	}
}

// With PGSOURCE_ON_DESTINATION_LOSS=stop a loss ends it by name, at each start,
// until a person has accepted it.
func TestPgsourceStopsOnDestinationLoss(t *testing.T) {
	t.Parallel()
	pg, sim, env := effectively(t, felderasim.Options{})
	env = merged(env, map[string]string{"PGSOURCE_ON_DESTINATION_LOSS": "stop"})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'a', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	sim.Crash(core.KeepNothing)
	awaitEnd(t, d, 65)
	got := runPgsource(t, env)
	if said := got.Stdout + got.Stderr; got.ExitCode != 65 || !strings.Contains(said, "PGSOURCE_ON_DESTINATION_LOSS is stop") || !strings.Contains(said, "the pipeline lost rows") {
		t.Errorf("it ends with %d and says:\n%s", got.ExitCode, said)
	}
	if got := runPgsource(t, env, "state", "show"); !strings.Contains(got.Stdout, "needs resync") {
		t.Errorf("%+v", got)
	}
	if got := runPgsource(t, env, "state", "accept", "-yes"); got.ExitCode != 0 {
		t.Errorf("%+v", got)
	}
	d = startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'b', 2, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if n := sim.Count("orders"); n != 1 {
		t.Errorf("%d orders", n)
	}
}

// Without a word about it, the level is the best that the pipeline and the
// settings allow, and the check says which, and why not more.
func TestPgsourceDeliveryByDefault(t *testing.T) {
	t.Parallel()
	def := feldera.ProgressTable(feldera.DefaultProgressTable)
	for name, c := range map[string]struct {
		sql  string
		env  map[string]string
		says string
	}{
		"all there":         {program + def.SQL(), nil, "effectively_once, recorded in holdfast_progress"},
		"no progress table": {program, nil, "at_least_once, since effectively_once cannot be held: progress table"},
		"no primary key": {
			strings.Replace(program, "id BIGINT NOT NULL PRIMARY KEY,\n  order_id", "id BIGINT NOT NULL,\n  order_id", 1) + def.SQL(),
			nil, "table items: it has no PRIMARY KEY",
		},
		"table by table": {program + def.SQL(), map[string]string{"PGSOURCE_ATOMICITY": "table"}, "would be seen table by table"},
		"said":           {program + def.SQL(), map[string]string{"PGSOURCE_DELIVERY": "at_least_once"}, "at_least_once, as set"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{SQL: c.sql})
			execSQL(t, pg, `ALTER TABLE items REPLICA IDENTITY FULL`)
			env := merged(merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_DELIVERY": ""}), c.env)
			d := startPgsource(t, env)
			waitHealthy(t, d)
			execSQL(t, pg, `INSERT INTO orders VALUES (1, 'a', 1, true)`)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			health(t, d, "the level is shown", func(status int, body string) bool { return status == 200 && strings.Contains(body, c.says) })
			if got := runPgsource(t, env, "check"); !strings.Contains(got.Stdout, c.says) {
				t.Errorf("check says:\n%s", got.Stdout)
			}
			assertEqualTables(t, pg, sim)
		})
	}
}

// A reset of the state is obeyed also where the first to find it dies before
// its claim: nothing that the pipeline holds from before is passed over. And
// what was acknowledged before the reset is not forgotten.
func TestPgsourceResetIsObeyed(t *testing.T) {
	t.Parallel()
	pg, sim, env := effectively(t, felderasim.Options{})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'a', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	stopClean(t, d)
	d = startCrashing(t, env, "pgsource.progress-completed")
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'b', 2, true)`)
	awaitEnd(t, d, -1)
	if got := runPgsource(t, env, "state", "reset", "-yes"); got.ExitCode != 0 {
		t.Fatalf("%+v", got)
	}
	d = startCrashing(t, env, "pgsource.epoch-noted")
	awaitEnd(t, d, -1)
	orders := sentTo(sim, "orders")
	d = startPgsource(t, env)
	found(t, d, "reset")
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if n := sentTo(sim, "orders"); n != orders+1 {
		t.Errorf("%d requests were sent again", n-orders)
	}
	assertEqualTables(t, pg, sim)
	stopClean(t, d)
	sim.Crash(core.KeepNothing)
	d = startPgsource(t, env)
	found(t, d, "lost")
	health(t, d, "it goes on behind the loss", func(_ int, body string) bool { return strings.Contains(body, `"phase":"needs_resync"`) })
	// Nor is it forgotten before anything else was acknowledged.
	stopClean(t, d)
	for _, args := range [][]string{{"state", "accept", "-yes"}, {"state", "reset", "-yes"}} {
		if got := runPgsource(t, env, args...); got.ExitCode != 0 {
			t.Fatalf("%+v", got)
		}
	}
	d = startPgsource(t, env)
	found(t, d, "reset")
	waitHealthy(t, d)
	sim.Crash(core.KeepNothing)
	found(t, d, "lost")
}
