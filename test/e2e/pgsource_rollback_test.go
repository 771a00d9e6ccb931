package e2e

import (
	"regexp"
	"strings"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// putBack makes the server what it was when pg.Snapshot was called, by a crash.
func putBack(t *testing.T, pg *harness.Postgres) {
	t.Helper()
	if err := pg.Stop(harness.Immediate); err != nil {
		t.Fatal(err)
	}
	if err := pg.PutBack(); err != nil {
		t.Fatal(err)
	}
	if err := pg.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
}

var positions = regexp.MustCompile(`its WAL ends at ([0-9A-F/]+), and it has sent everything up to ([0-9A-F/]+) `)

// The server's volume is put back to an earlier snapshot: same cluster, same
// timeline, a slot that is not ahead, and WAL that ends below what the pipeline
// holds. What is committed there from now on would be passed over until it has
// written that much again. pgsource stops, running or not, and the way that it
// names brings the tables to what that server has.
func TestPgsourceNoticesAServerThatWasPutBack(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		transport string
		running   bool
	}{"stopped": {"stream", false}, "running": {"stream", true}, "stopped, peek": {"peek", false}, "running, peek": {"peek", true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg, sim, env := effectively(t, felderasim.Options{})
			env["PGSOURCE_TRANSPORT"] = c.transport
			d := startPgsource(t, env)
			waitHealthy(t, d)
			execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			if err := pg.Stop(harness.Fast); err != nil {
				t.Fatal(err)
			}
			if err := pg.Snapshot(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := pg.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			execSQL(t, pg, `INSERT INTO orders SELECT i, repeat('gone', 50), 1, true FROM generate_series(2, 2000) i`)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			if !c.running {
				stopClean(t, d)
			}
			bookmark := lsnOf(t, pg, showState(t, env).State.Acknowledged)
			putBack(t, pg)
			if !c.running {
				wants(t, runPgsource(t, env, "check"), 65, "it was put back to an earlier state", showState(t, env).State.Acknowledged)
				if err := d.Restart(nil); err != nil {
					t.Fatal(err)
				}
			}
			said := awaitEnd(t, d, 65)
			for _, part := range []string{"it was put back to an earlier state", "on this timeline", "pgsource state reset -yes"} {
				if !strings.Contains(said, part) {
					t.Errorf("it does not say %q:\n%s", part, said)
				}
			}
			found := positions.FindStringSubmatch(said)
			if found == nil {
				t.Fatalf("it names no positions:\n%s", said)
			}
			if ends, sent := lsnOf(t, pg, found[1]), lsnOf(t, pg, found[2]); ends >= bookmark || sent < bookmark {
				t.Errorf("it says %s, and the bookmark is %d", found[0], bookmark)
			}

			wants(t, runPgsource(t, env, "state", "reset", "-yes"), 0)
			execSQL(t, pg, `INSERT INTO orders VALUES (3000, 'meanwhile', 1, true)`)
			if err := d.Restart(nil); err != nil {
				t.Fatal(err)
			}
			waitHealthy(t, d)
			wants(t, runVerb(t, env, "resync", "-all"), 0)
			awaitResyncs(t, d, "asked", 2)
			execSQL(t, pg, `INSERT INTO orders VALUES (3001, 'after', 1, true)`)
			end := currentLSN(t, pg)
			if end >= bookmark {
				t.Fatalf("the server is at %d, behind the bookmark %d that it had: this test shows nothing", end, bookmark)
			}
			awaitConfirmed(t, pg, end)
			assertEqualTables(t, pg, sim)
		})
	}
}
