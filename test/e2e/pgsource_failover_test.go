package e2e

import (
	"context"
	"strings"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// failover is a running pgsource that reaches its primary through a proxy, and
// a standby with a copy of its slot.
type failover struct {
	pg, standby *harness.Postgres
	sim         *felderasim.Sim
	d           *harness.Daemon
	env         map[string]string
	proxy       *harness.Proxy
}

func startFailover(t *testing.T) *failover {
	t.Helper()
	f := &failover{pg: startPostgres(t, nil), sim: startSim(t, felderasim.Options{})}
	f.proxy = harness.NeedProxy(t, f.pg.Addr())
	f.env = merged(pgsourceEnv(f.pg, f.sim), map[string]string{
		"PGSOURCE_DSN": f.pg.DSNFor("postgres", "", "postgres", f.proxy.Addr()), "PGSOURCE_STATE": "file:" + t.TempDir() + "/state.json",
	})
	f.d = startPgsource(t, f.env)
	waitHealthy(t, f.d)
	execSQL(t, f.pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
	awaitConfirmed(t, f.pg, currentLSN(t, f.pg))
	stopClean(t, f.d)
	f.standby = f.pg.NeedStandby(t)
	if err := f.d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, f.d)
	return f
}

// promote ends the primary in order and puts the standby in its place.
func (f *failover) promote(t *testing.T) {
	t.Helper()
	if err := f.pg.Stop(harness.Fast); err != nil {
		t.Fatal(err)
	}
	f.switchOver(t)
}

func (f *failover) switchOver(t *testing.T) {
	t.Helper()
	if err := f.standby.Promote(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.proxy.SetTarget(f.standby.Addr())
	f.proxy.Cut()
}

// loseStandby makes the standby miss what comes now.
func (f *failover) loseStandby(t *testing.T) {
	t.Helper()
	if err := f.standby.AwaitReplayed(t.Context(), currentLSN(t, f.pg)); err != nil {
		t.Fatal(err)
	}
	if err := f.standby.Stop(harness.Fast); err != nil {
		t.Fatal(err)
	}
}

// failOver promotes the standby that missed something. The primary ends first:
// a standby that starts beside it catches up before it is promoted.
func (f *failover) failOver(t *testing.T) {
	t.Helper()
	if err := f.pg.Stop(harness.Immediate); err != nil {
		t.Fatal(err)
	}
	if err := f.standby.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.switchOver(t)
}

// A standby that has everything is promoted under a running pgsource: it goes
// on at the bookmark on the new timeline, although the copy of the slot is
// older, and sends nothing twice.
func TestPgsourceFollowsAPromotion(t *testing.T) {
	t.Parallel()
	f := startFailover(t)
	execSQL(t, f.pg, `INSERT INTO orders VALUES (2, 'on the old primary', 1, true)`)
	awaitConfirmed(t, f.pg, currentLSN(t, f.pg))
	if err := f.standby.AwaitReplayed(t.Context(), currentLSN(t, f.pg)); err != nil {
		t.Fatal(err)
	}
	records := f.sim.Counters().Records
	f.promote(t)
	execSQL(t, f.standby, `INSERT INTO orders VALUES (3, 'on the new primary', 1, true)`)
	awaitConfirmed(t, f.standby, currentLSN(t, f.standby))
	assertEqualTables(t, f.standby, f.sim)
	if n := f.sim.Counters().Records - records; n != 1 {
		t.Errorf("%d records were sent after the promotion, want the new one", n)
	}
	waitHealthy(t, f.d)
	if st := showState(t, f.env).State; st.Timeline != 2 || len(st.Notices) != 0 {
		t.Errorf("the state says %+v", st)
	}
	// And over a restart.
	stopClean(t, f.d)
	if err := f.d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, f.d)
}

// A standby that was behind is promoted: the pipeline holds a row that it
// never had, and other rows have its positions. That stops pgsource, running
// or not.
func TestPgsourceRefusesAPromotionThatLostRows(t *testing.T) {
	t.Parallel()
	f := startFailover(t)
	f.loseStandby(t)
	execSQL(t, f.pg, `INSERT INTO orders VALUES (2, 'lost with the primary', 1, true)`)
	awaitConfirmed(t, f.pg, currentLSN(t, f.pg))
	f.failOver(t)
	execSQL(t, f.standby, `INSERT INTO orders SELECT i, 'on the new primary', 1, true FROM generate_series(3, 500) i`)
	for range 2 {
		said := awaitEnd(t, f.d, 65)
		for _, part := range []string{"the pipeline holds changes that this server never had", "timeline 1 ended at", "bytes of WAL"} {
			if !strings.Contains(said, part) {
				t.Errorf("it does not say %q:\n%s", part, said)
			}
		}
		if err := f.d.Restart(nil); err != nil {
			t.Fatal(err)
		}
	}
	awaitEnd(t, f.d, 65)
	bookmark := showState(t, f.env).State.Acknowledged
	if got := runPgsource(t, f.env, "check"); got.ExitCode != 65 || !strings.Contains(got.Stdout, bookmark) || !strings.Contains(got.Stdout, "timeline 1 ended at") {
		t.Errorf("check ends with %d and says:\n%s", got.ExitCode, got.Stdout)
	}
	if n := f.sim.Count("orders"); n != 2 {
		t.Errorf("the destination holds %d orders: something was read from the other server", n)
	}
}

// A row that was sent and not acknowledged is lost with the primary: pgsource
// goes on from the bookmark, which the standby has, and says that the pipeline
// may hold rows that the source does not.
func TestPgsourceSaysWhatAPromotionMayHaveLost(t *testing.T) {
	t.Parallel()
	f := startFailover(t)
	f.loseStandby(t)
	f.sim.HoldCompletion()
	execSQL(t, f.pg, `INSERT INTO orders VALUES (2, 'lost with the primary', 1, true)`)
	waitSim(t, f.sim, "the row is in the pipeline", func(v felderasim.View) bool { return v.Counters().Records >= 2 })
	f.failOver(t)
	health(t, f.d, "it is shown", func(status int, body string) bool {
		return status == 503 && strings.Contains(body, "may have been sent before that it never had") && strings.Contains(body, `"phase":"streaming"`)
	})
	f.sim.ReleaseCompletion()
	execSQL(t, f.standby, `INSERT INTO orders VALUES (3, 'on the new primary', 1, true)`)
	awaitConfirmed(t, f.standby, currentLSN(t, f.standby))
	if n := f.sim.Count("orders"); n != 3 {
		t.Errorf("the destination holds %d orders, want the lost one beside the others", n)
	}
	if st := showState(t, f.env).State; len(st.Notices) != 1 || st.Notices[0].Kind != "timeline" {
		t.Errorf("the state says %+v", st)
	}
}

// Primary and pgsource are lost with rows of a transaction in the pipeline's open
// one. The standby never had it, so its end never comes: the pipeline's transaction ends
// with what the new timeline has, and not when that has grown as long.
func TestPgsourceEndsTheTransactionOfALostTimeline(t *testing.T) {
	t.Parallel()
	f := startFailover(t)
	f.sim.HoldCompletion() // nothing is acknowledged behind the row that both have
	execSQL(t, f.pg, `INSERT INTO orders VALUES (2, 'on both', 1, true)`)
	waitSim(t, f.sim, "the row is in the pipeline", func(v felderasim.View) bool { return v.Counters().Records >= 2 })
	f.loseStandby(t)
	f.sim.HoldIngest("items")
	pairs(t, f.pg, 10_000, 14_000)
	waitSim(t, f.sim, "rows are in an open transaction", func(v felderasim.View) bool {
		return v.Stats().Global.TransactionStatus == "TransactionInProgress" && v.Counters().Records > 4002
	})
	f.d.Kill()
	lost := currentLSN(t, f.pg)
	f.failOver(t)
	f.sim.ReleaseIngest("items")
	f.sim.ReleaseCompletion()
	if err := f.d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	execSQL(t, f.standby, `INSERT INTO orders VALUES (3, 'on the new primary', 1, true)`)
	end := currentLSN(t, f.standby)
	if end >= lost {
		t.Fatalf("the new timeline is at %d, behind what was lost (%d): this test shows nothing", end, lost)
	}
	awaitConfirmed(t, f.standby, end)
	if st := f.sim.Stats().Global; st.TransactionStatus != "NoTransaction" {
		t.Errorf("left %s", st.TransactionStatus)
	}
	if st := showState(t, f.env).State; len(st.Notices) != 1 || st.Notices[0].Kind != "timeline" {
		t.Errorf("the state says %+v", st)
	}
}

// The primary takes no new connection for a while, and with two hosts in the DSN
// each look comes to its standby meanwhile, which has neither the slot nor all
// rows. The stream is well, so it goes on; and when that is cut too, pgsource waits
// for the primary instead of asking the standby for a slot.
func TestPgsourceIsNotMisledByASecondHost(t *testing.T) {
	t.Parallel()
	f := startFailover(t)
	second := harness.NeedProxy(t, f.standby.Addr())
	execSQL(t, f.standby, `SELECT pg_drop_replication_slot('holdfast')`) // a standby has none that it was not given
	stopClean(t, f.d)
	f.env["PGSOURCE_DSN"] = f.pg.DSNFor("postgres", "", "postgres", f.proxy.Addr()+","+second.Addr())
	wants(t, runCheck(t, f.env), 0, "names several hosts", "add target_session_attrs=primary")
	if err := f.d.Restart(map[string]string{"PGSOURCE_DSN": f.env["PGSOURCE_DSN"]}); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, f.d)
	f.proxy.Refuse()
	before := second.Connections()
	harness.Await(t, patience, "looks come to the standby", func(context.Context) (any, bool) {
		if code, ended := f.d.ExitCode(); ended {
			t.Fatalf("it ended with %d:\n%s", code, strings.Join(f.d.Log().Tail(5), "\n"))
		}
		n := second.Connections()
		return n, n >= before+2 // the first of two has been dealt with
	})
	execSQL(t, f.pg, `INSERT INTO orders VALUES (2, 'on the stream that stays', 1, true)`)
	awaitConfirmed(t, f.pg, currentLSN(t, f.pg))

	f.proxy.Cut()
	health(t, f.d, "it waits for the primary", func(_ int, body string) bool {
		return strings.Contains(body, "a standby answers, and pgsource reads from a primary")
	})
	execSQL(t, f.pg, `INSERT INTO orders VALUES (3, 'while nothing streams', 1, true)`)
	if err := f.proxy.Accept(); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, f.pg, currentLSN(t, f.pg))
	assertEqualTables(t, f.pg, f.sim)
	waitHealthy(t, f.d)
}
