package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"holdfast/internal/feldera"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// resyncEnv reads as fast as it can.
func resyncEnv(pg *harness.Postgres, sim *felderasim.Sim) map[string]string {
	return merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_VERIFY_RATE": "0"})
}

// awaitResyncs waits until so many resyncs of this process are done.
func awaitResyncs(t *testing.T, d *harness.Daemon, cause string, n float64) {
	t.Helper()
	harness.Await(t, patience, fmt.Sprintf("%v resyncs are done", n), func(ctx context.Context) (any, bool) {
		got, err := d.Metric(ctx, "pgsource_resyncs_total", map[string]string{"cause": cause, "result": "done"})
		return fmt.Sprint(got, err), err == nil && got >= n
	})
}

// fillOrders puts rows with every column into the source.
func fillOrders(t *testing.T, pg *harness.Postgres, n int) {
	t.Helper()
	execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders SELECT i, 'c' || i, i / 8.0, i %% 2 = 0, NULLIF('n' || i, 'n7'), decode(md5(i::text), 'hex'), timestamp '2026-01-01' + i * interval '1 second'
		FROM generate_series(1, %d) i`, n))
}

// damage makes the pipeline's orders differ in every way.
func damage(t *testing.T, sim *felderasim.Sim) {
	t.Helper()
	plant(t, sim, "orders", `[{"delete":{"id":5}},{"insert":{"id":-7,"customer":"ghost","paid":true}},{"insert":{"id":9000000,"customer":"ghost","paid":true}},{"update":{"id":17,"amount":"0.01","note":null}}]`)
}

// A resync under traffic: what was missing, stale or too much is put right, and
// nothing that the traffic does meanwhile is lost.
func TestPgsourceResync(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := resyncEnv(pg, sim)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	fillOrders(t, pg, 3000)
	execSQL(t, pg, `INSERT INTO items SELECT i, i, 'sku' FROM generate_series(1, 50) i`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	stop := traffic(t, pg, 1500, 1900)
	defer stop()
	damage(t, sim)
	plant(t, sim, "items", `[{"insert":{"id":77,"order_id":1,"sku":"ghost"}}]`)
	wants(t, runVerb(t, env, "resync", "public.orders"), 0, "public.orders: resync requested", "has taken it on")
	awaitResyncs(t, d, "asked", 1)
	if got := runVerify(t, env, []int{65, 69}).differences(); !cmp.Equal(got, []string{"public.items ghost id=77"}) {
		t.Errorf("after a resync of orders alone: %v", got)
	}
	wants(t, runVerb(t, env, "resync", "-all", "-json"), 0, `"taken": true`)
	awaitResyncs(t, d, "asked", 3)
	stop()
	awaitConfirmed(t, pg, currentLSN(t, pg))
	runVerify(t, env, []int{0})
	assertEqualTables(t, pg, sim)
	if n := metric(t, d, "pgsource_resync_ghost_keys_total", map[string]string{"table": `"public"."orders"`}); n < 2 {
		t.Errorf("%v ghosts", n)
	}
	wants(t, runVerb(t, env, "resync"), 64, "-all")
	wants(t, runVerb(t, env, "resync", "nosuch"), 64, "public.orders")
	wants(t, runVerb(t, merged(env, map[string]string{"PGSOURCE_STATE": "none"}), "resync", "orders"), 65, "PGSOURCE_STATE")
}

// A repair brings the rows that were found to differ, and no others; also where
// the request waited for a pgsource that was down.
func TestPgsourceRepair(t *testing.T) {
	t.Parallel()
	for _, table := range []bool{false, true} {
		t.Run(fmt.Sprintf("state in a table %t", table), func(t *testing.T) {
			t.Parallel()
			pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
			env := resyncEnv(pg, sim)
			if table {
				env["PGSOURCE_STATE"] = "postgres:public.holdfast_state"
			}
			d := startPgsource(t, env)
			waitHealthy(t, d)
			fillOrders(t, pg, 500)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			damage(t, sim)
			wants(t, compared(t, env, "orders", "-repair"), 65, "repair of 4 rows requested", "has taken it on")
			harness.Await(t, patience, "4 rows were brought", func(ctx context.Context) (any, bool) {
				n, err := d.Metric(ctx, "pgsource_snapshot_rows_total", map[string]string{"table": `public.orders`, "kind": "repair"})
				return fmt.Sprint(n, err), n == 4
			})
			runVerify(t, env, []int{0}, "orders")
			assertEqualTables(t, pg, sim)

			// The pgsource that goes is the one that has found the difference.
			damage(t, sim)
			stopClean(t, d)
			wants(t, runVerb(t, env, "resync", "orders", "-wait", "1s"), 0, "no pgsource has taken it on yet")
			d = startPgsource(t, env)
			awaitResyncs(t, d, "asked", 1)
			runVerify(t, env, []int{0})
			assertEqualTables(t, pg, sim)
		})
	}
}

// Killed at each place of a resync, it goes on, and is done once.
func TestPgsourceResyncSurvivesCrashes(t *testing.T) {
	t.Parallel()
	for _, place := range []string{"pgsource.request-taken", "pgsource.resync-begun", "pgsource.copy-sent", "pgsource.resync-rows", "pgsource.resync-ghosts"} {
		t.Run(place, func(t *testing.T) {
			t.Parallel()
			pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
			env := merged(resyncEnv(pg, sim), map[string]string{"FELDERA_REQUEST_LIFETIME": "1s", "FELDERA_REQUEST_TIMEOUT": "1s", "PGSOURCE_SPILL_DIR": t.TempDir()})
			d := startPgsource(t, env)
			waitHealthy(t, d)
			fillOrders(t, pg, 400)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			stopClean(t, d)
			damage(t, sim)
			wants(t, runVerb(t, env, "resync", "orders", "-wait", "0s"), 0, "no pgsource has taken it on yet")
			awaitEnd(t, startCrashing(t, env, place), -1)
			execSQL(t, pg, `DELETE FROM orders WHERE id = 21; UPDATE orders SET note = 'meanwhile' WHERE id = 22`)
			d = startPgsource(t, env)
			awaitResyncs(t, d, "asked", 1)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			runVerify(t, env, []int{0})
			assertEqualTables(t, pg, sim)
			if left, err := filepath.Glob(stateFile(pg) + ".*request*"); err != nil || len(left) > 0 {
				t.Errorf("requests are left: %v %v", left, err)
			}
		})
	}
}

// Rows that were deleted while nothing watched, the slot being gone, are gone
// from the pipeline after a resync.
func TestPgsourceResyncAfterLostSlot(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := resyncEnv(pg, sim)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	fillOrders(t, pg, 300)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	stopClean(t, d)
	execSQL(t, pg, `SELECT pg_drop_replication_slot('holdfast')`)
	execSQL(t, pg, `DELETE FROM orders WHERE id BETWEEN 10 AND 40; UPDATE orders SET note = 'unseen', id = id + 5000 WHERE id BETWEEN 50 AND 60; INSERT INTO items VALUES (1, 1, 'unseen')`)
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	wants(t, runVerb(t, env, "state", "reset", "-yes"), 0)
	d = startPgsource(t, env)
	waitHealthy(t, d)
	if v := runVerify(t, env, []int{65}); len(v.differences()) != 31+2*11+1 {
		t.Errorf("%d differences", len(v.differences()))
	}
	wants(t, runVerb(t, env, "resync", "-all"), 0)
	awaitResyncs(t, d, "asked", 2)
	runVerify(t, env, []int{0})
	assertEqualTables(t, pg, sim)
}

// A pipeline that comes back empty, or as it was before, is healed without
// anybody asking, at both levels of delivery.
func TestPgsourceHealsLoss(t *testing.T) {
	t.Parallel()
	for _, delivery := range []string{"at_least_once", "effectively_once"} {
		for keep, name := range map[core.Keep]string{core.KeepNothing: "empty", core.KeepCheckpoint: "older"} {
			t.Run(delivery+", "+name, func(t *testing.T) {
				t.Parallel()
				def := feldera.ProgressTable(feldera.DefaultProgressTable)
				opts := felderasim.Options{SQL: program + def.SQL()}
				if keep == core.KeepCheckpoint {
					opts.Model, opts.Edition = core.ModelAtLeastOnce, felderasim.Enterprise
				}
				pg, sim := startPostgres(t, nil), startSim(t, opts)
				env := merged(resyncEnv(pg, sim), map[string]string{"PGSOURCE_DELIVERY": delivery, "FELDERA_REQUEST_LIFETIME": "1s", "FELDERA_REQUEST_TIMEOUT": "1s"})
				d := startPgsource(t, env)
				waitHealthy(t, d)
				fillOrders(t, pg, 300)
				execSQL(t, pg, `INSERT INTO items SELECT i, i, 'sku' FROM generate_series(1, 20) i`)
				awaitConfirmed(t, pg, currentLSN(t, pg))
				if keep == core.KeepCheckpoint {
					sim.PeriodicCheckpoint()
					waitSim(t, sim, "a checkpoint is there", func(v felderasim.View) bool { return len(v.Checkpoints()) > 0 })
				}
				execSQL(t, pg, `DELETE FROM orders WHERE id <= 30; UPDATE orders SET note = 'later' WHERE id BETWEEN 31 AND 40; INSERT INTO items VALUES (99, 9, 'later')`)
				awaitConfirmed(t, pg, currentLSN(t, pg))
				sim.Crash(keep)
				awaitResyncs(t, d, "loss", 2)
				waitHealthy(t, d)
				awaitConfirmed(t, pg, currentLSN(t, pg))
				runVerify(t, env, []int{0})
				assertEqualTables(t, pg, sim)
				wants(t, runVerb(t, env, "state", "show"), 0)
			})
		}
	}
}

// A table that somebody else feeds too is not touched, and what is no request is
// not taken for one.
func TestPgsourceResyncRefuses(t *testing.T) {
	t.Parallel()
	def := feldera.ProgressTable(feldera.DefaultProgressTable)
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{SQL: program + def.SQL()})
	env := resyncEnv(pg, sim)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	fillOrders(t, pg, 20)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	plant(t, sim, feldera.DefaultProgressTable, `[{"insert":{"source":"table:orders","lane":"kafkasink:c/g","epoch":1,"slot":0,"position":0,"incarnation":"x","step":0,"fingerprint":"feeds","recorded_at":"2026-01-01 00:00:00"}}]`)
	damage(t, sim)
	wants(t, runVerb(t, env, "resync", "orders"), 65, "kafkasink:c/g")
	wants(t, compared(t, env, "orders", "-repair"), 65, "kafkasink:c/g")
	for name, content := range map[string]string{".request-1": "", ".request-2": "{}", ".request-3": strings.Repeat("x", 1<<20)} {
		if err := os.WriteFile(stateFile(pg)+name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	harness.Await(t, patience, "what is no request is removed", func(context.Context) (any, bool) {
		left, err := filepath.Glob(stateFile(pg) + ".request-*")
		return fmt.Sprint(left, err), err == nil && len(left) == 0
	})
	if got := runVerify(t, env, []int{65}, "orders").differences(); len(got) != 4 {
		t.Errorf("rows were touched: %v", got)
	}
	waitHealthy(t, d)
}

// After a loss, a table without a key in Feldera cannot be resynced: it stays
// shown, the others are resynced, and neither that nor a restart ends pgsource.
func TestPgsourceResyncLeavesKeylessTablesOut(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{SQL: program + "CREATE TABLE log (id BIGINT, what VARCHAR) WITH ('materialized' = 'true');"})
	execSQL(t, pg, `CREATE TABLE log (id int8 PRIMARY KEY, what text); ALTER TABLE log REPLICA IDENTITY FULL`)
	env := merged(resyncEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "public.orders,public.log"})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'here', 1, true); INSERT INTO log VALUES (1, 'there')`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	sim.Crash(core.KeepNothing)
	shown := func(status int, body string) bool {
		return status == 503 && strings.Contains(body, "log") && (strings.Contains(body, "needs resync") || strings.Contains(body, "not resynced")) && sim.Count("orders") == 1
	}
	health(t, d, "the loss of the keyless table is shown, the other one is healed", shown)
	stop(t, d)
	d = startPgsource(t, env)
	health(t, d, "still shown after a restart", shown)
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'here', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
}

// A table is dropped and another one made of its name while no pgsource runs,
// and published: the start says so once, and a resync brings the pipeline to
// what the new one has. Each start says that the rows differ, until they are
// resynced or a person has accepted it.
func TestPgsourceNoticesATableMadeAnewWhileDown(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := resyncEnv(pg, sim)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO items VALUES (1, 1, 'old'), (2, 1, 'old')`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	stopClean(t, d)
	const anew = `DROP TABLE items; CREATE TABLE items (id bigint PRIMARY KEY, order_id bigint NOT NULL, sku text NOT NULL); INSERT INTO items VALUES (2, 1, 'unpublished'); ALTER PUBLICATION holdfast ADD TABLE items`
	execSQL(t, pg, anew)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	said := awaitEnd(t, d, 65)
	for _, part := range []string{"another one made of its name", "pgsource resync public.items"} {
		if !strings.Contains(said, part) {
			t.Errorf("it does not say %q:\n%s", part, said)
		}
	}
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	awaitDiffering(t, d, 1)
	health(t, d, "the table and the remedy are named", func(status int, body string) bool {
		return status == 200 && strings.Contains(body, `rows of \"public\".\"items\" differ`) && strings.Contains(body, "pgsource resync public.items")
	})
	wants(t, runVerb(t, env, "resync", "public.items"), 0)
	awaitResyncs(t, d, "asked", 1)
	sameRows(t, pg, sim, "items", "id", "order_id", "sku")
	awaitDiffering(t, d, 0)

	execSQL(t, pg, anew)
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "made anew while pgsource was streaming") {
		t.Errorf("it says:\n%s", said)
	}
	for range 2 { // the second one finds nothing new, and says it too
		if err := d.Restart(nil); err != nil {
			t.Fatal(err)
		}
		waitHealthy(t, d)
		awaitDiffering(t, d, 1)
		d.Kill()
	}
	wants(t, runCheck(t, env), 65, "pgsource resync public.items")
	wants(t, runVerb(t, env, "state", "accept", "-yes"), 0, "count as equal to the source's now: public.items")
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	awaitDiffering(t, d, 0)
	stopClean(t, d)
}

// awaitDiffering waits until so many tables are said to differ.
func awaitDiffering(t *testing.T, d *harness.Daemon, n float64) {
	t.Helper()
	harness.Await(t, patience, fmt.Sprintf("%v tables are said to differ", n), func(ctx context.Context) (any, bool) {
		got, err := d.Metric(ctx, "pgsource_differing_tables", nil)
		return fmt.Sprint(got, err), err == nil && got == n
	})
}
