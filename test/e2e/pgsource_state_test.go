package e2e

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// savedState is what `pgsource state show -json` prints, as far as tests look.
type savedState struct {
	Store string `json:"store"`
	State *struct {
		Acknowledged string `json:"acknowledged_lsn"`
		Rows         string `json:"rows_lsn"`
		Sent         string `json:"sent_lsn"`
		Timeline     int    `json:"timeline"`
		Incarnation  string `json:"incarnation"`
		Notices      []struct {
			Kind string `json:"kind"`
		} `json:"notices"`
		Refused *struct {
			End string `json:"end_lsn"`
		} `json:"refused"`
	} `json:"state"`
}

// runPgsource runs pgsource to its end, with arguments.
func runPgsource(t *testing.T, env map[string]string, args ...string) harness.RunResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	got, err := harness.Run(ctx, harness.DaemonOptions{Program: build(t, "pgsource"), Args: args, Env: env})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func showState(t *testing.T, env map[string]string) savedState {
	t.Helper()
	got := runPgsource(t, env, "state", "show", "-json")
	var st savedState
	if err := json.Unmarshal([]byte(got.Stdout), &st); err != nil || got.ExitCode != 0 {
		t.Fatalf("exit code %d, %v:\n%s%s", got.ExitCode, err, got.Stdout, got.Stderr)
	}
	return st
}

// lsnOf reads a position in Postgres' notation.
func lsnOf(t *testing.T, pg *harness.Postgres, text string) uint64 {
	t.Helper()
	n, err := harness.QueryValue[int64](t.Context(), pg, `SELECT ($1::pg_lsn - '0/0')::int8`, text)
	if err != nil {
		t.Fatal(err)
	}
	return uint64(n)
}

// stopClean ends a daemon by a signal and expects a clean end.
func stopClean(t *testing.T, d *harness.Daemon) {
	t.Helper()
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	awaitEnd(t, d, 0)
}

// running starts a pair with one row confirmed.
func running(t *testing.T) (*harness.Postgres, *felderasim.Sim, *harness.Daemon, map[string]string) {
	t.Helper()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := pgsourceEnv(pg, sim)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	return pg, sim, d, env
}

// What happens to the slot while no pgsource runs is found at the next start,
// and said with both positions, before anything is read: nothing else would
// ever show the rows in between.
func TestPgsourceNoticesGapsWhileDown(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		sql  []string
		says []string
	}{
		"slot advanced": {
			[]string{`INSERT INTO orders VALUES (5, 'lost', 1, true)`, `SELECT pg_replication_slot_advance('holdfast', pg_current_wal_lsn())`},
			[]string{"somebody advanced it", "bytes of WAL", "state reset"},
		},
		"slot made anew": {
			[]string{`SELECT pg_drop_replication_slot('holdfast')`, `INSERT INTO orders VALUES (5, 'lost', 1, true)`, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`},
			[]string{"made it anew", "bytes of WAL"},
		},
		"slot dropped": {
			[]string{`SELECT pg_drop_replication_slot('holdfast')`},
			[]string{"was dropped", "lost to the stream"},
		},
		"slot and publication dropped": {
			[]string{`SELECT pg_drop_replication_slot('holdfast')`, `DROP PUBLICATION holdfast`},
			[]string{"was dropped", "lost to the stream"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg, sim, d, env := running(t)
			stopClean(t, d)
			bookmark := showState(t, env).State.Acknowledged
			for _, sql := range c.sql {
				execSQL(t, pg, sql)
			}
			if got := runPgsource(t, env, "check"); got.ExitCode != 65 || !strings.Contains(got.Stdout, bookmark) {
				t.Errorf("check ends with %d and says:\n%s", got.ExitCode, got.Stdout)
			}
			requests := sim.Counters().Requests
			if err := d.Restart(nil); err != nil {
				t.Fatal(err)
			}
			said := awaitEnd(t, d, 65)
			for _, part := range append(c.says, bookmark) {
				if !strings.Contains(said, part) {
					t.Errorf("it does not say %q:\n%s", part, said)
				}
			}
			if n := sim.Counters().Requests; n != requests {
				t.Errorf("%d requests went out behind the gap", n-requests)
			}
		})
	}
}

// After a gap a person loads the tables and lets pgsource go on from where the
// slot is.
func TestPgsourceStateReset(t *testing.T) {
	t.Parallel()
	pg, sim, d, env := running(t)
	if got := runPgsource(t, env, "state", "reset", "-yes"); got.ExitCode != 65 || !strings.Contains(got.Stderr, "another process holds it: process") {
		t.Errorf("beside a running daemon it ends with %d: %s", got.ExitCode, got.Stderr)
	}
	stopClean(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (5, 'lost', 1, true)`)
	execSQL(t, pg, `SELECT pg_replication_slot_advance('holdfast', pg_current_wal_lsn())`)
	if got := runPgsource(t, env, "state", "reset"); got.ExitCode != 64 || !strings.Contains(got.Stderr, "-yes") {
		t.Errorf("without -yes it ends with %d: %s", got.ExitCode, got.Stderr)
	}
	got := runPgsource(t, env, "state", "reset", "-yes")
	if got.ExitCode != 0 || !strings.Contains(got.Stdout, "stays missing") || !strings.Contains(got.Stdout, decode.FormatLSN(confirmed(t, pg))) {
		t.Errorf("it ends with %d and says:\n%s%s", got.ExitCode, got.Stdout, got.Stderr)
	}
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (6, 'after', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if n := sim.Count("orders"); n != 2 {
		t.Errorf("the destination holds %d orders, want those before and after the gap", n)
	}
}

// A crash between the save of the bookmark and the status update leaves the
// slot behind: pgsource begins at the bookmark and tells the server at once.
// Nothing is sent a second time.
func TestPgsourceBookmarkAheadOfTheSlot(t *testing.T) {
	t.Parallel()
	pg, sim, d, env := running(t)
	execSQL(t, pg, `SELECT pg_copy_logical_replication_slot('holdfast', 'early')`)
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'told', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	stopClean(t, d)
	execSQL(t, pg, `SELECT pg_drop_replication_slot('holdfast')`)
	execSQL(t, pg, `SELECT pg_copy_logical_replication_slot('early', 'holdfast')`)
	execSQL(t, pg, `SELECT pg_drop_replication_slot('early')`)
	bookmark := lsnOf(t, pg, showState(t, env).State.Acknowledged)
	if slot := confirmed(t, pg); slot >= bookmark {
		t.Fatalf("the slot is at %s, the bookmark at %s: the test has set up nothing", decode.FormatLSN(slot), decode.FormatLSN(bookmark))
	}
	records := sim.Counters().Records
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	awaitConfirmed(t, pg, bookmark)
	execSQL(t, pg, `INSERT INTO orders VALUES (3, 'new', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if n := sim.Counters().Records - records; n != 1 {
		t.Errorf("%d records were sent, want the new one", n)
	}
	assertEqualTables(t, pg, sim)
}

// A pipeline that restarts while no pgsource runs is noticed at the next
// start, and stays noticed over further ones, as long as nothing could heal it
// and no person has cleared it.
func TestPgsourceNoticesARestartWhileDown(t *testing.T) {
	t.Parallel()
	_, sim, d, env := running(t)
	stopClean(t, d)
	sim.Crash(core.KeepNothing)
	sim.HoldCompletion() // no resync comes to an end
	if got := runPgsource(t, env, "check"); got.ExitCode != 65 || !strings.Contains(got.Stdout, "may be missing") {
		t.Errorf("check ends with %d and says:\n%s", got.ExitCode, got.Stdout)
	}
	for range 2 {
		if err := d.Restart(nil); err != nil {
			t.Fatal(err)
		}
		health(t, d, "the loss is shown", func(status int, body string) bool {
			return strings.Contains(body, `"phase":"needs_resync"`) && (strings.Contains(body, `needs resync: \"public\".\"items\"`) && strings.Contains(body, "may be missing") || strings.Contains(body, "is being resynced"))
		})
		d.Kill()
	}
	if n := len(showState(t, env).State.Notices); n != 1 {
		t.Errorf("%d notices, want 1", n)
	}
	if got := runPgsource(t, env, "state", "accept", "-yes"); got.ExitCode != 0 || !strings.Contains(got.Stdout, "1 notices cleared") {
		t.Errorf("it ends with %d: %s%s", got.ExitCode, got.Stdout, got.Stderr)
	}
	sim.ReleaseCompletion()
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
}

// States that are not this pgsource's, or not whole, stop it with a sentence.
func TestPgsourceRefusesForeignStates(t *testing.T) {
	t.Parallel()
	pg, _, d, env := running(t)
	stopClean(t, d)
	whole, err := os.ReadFile(stateFile(pg))
	if err != nil {
		t.Fatal(err)
	}
	other := harness.NeedPostgres(t, harness.PostgresOptions{OwnIdentifier: true})
	execSQL(t, other, sourceTables)
	execSQL(t, other, `CREATE PUBLICATION holdfast FOR TABLE orders, items; SELECT 1`)
	execSQL(t, other, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	dir := t.TempDir()
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return "file:" + path
	}
	for name, c := range map[string]struct {
		change map[string]string
		says   string
	}{
		"another cluster":     {map[string]string{"PGSOURCE_DSN": other.DSN(), "PGSOURCE_STATE": write("other", whole)}, "the server is another cluster"},
		"another slot":        {map[string]string{"PGSOURCE_SLOT": "second", "PGSOURCE_STATE": write("slot", whole)}, "it is about slot"},
		"another publication": {map[string]string{"PGSOURCE_PUBLICATION": "second", "PGSOURCE_STATE": write("publication", whole)}, "it is about publication"},
		"cut off":             {map[string]string{"PGSOURCE_STATE": write("cut", whole[:len(whole)/2])}, "cut off, damaged or no JSON"},
		"empty":               {map[string]string{"PGSOURCE_STATE": write("empty", nil)}, "it is empty"},
		"no folder":           {map[string]string{"PGSOURCE_STATE": "file:" + dir + "/none/state.json"}, "there is no folder"},
	} {
		t.Run(name, func(t *testing.T) {
			env := merged(merged(env, c.change), map[string]string{"PGSOURCE_LISTEN": "127.0.0.1:0"})
			got := runPgsource(t, env)
			if got.ExitCode != 65 || !strings.Contains(got.Stderr, c.says) || !strings.Contains(got.Stderr, "to mend it") {
				t.Errorf("exit code %d, want %q:\n%s", got.ExitCode, c.says, got.Stderr)
			}
		})
	}
	t.Run("second process", func(t *testing.T) {
		if err := d.Restart(nil); err != nil {
			t.Fatal(err)
		}
		waitHealthy(t, d)
		got := runPgsource(t, merged(env, map[string]string{"PGSOURCE_LISTEN": "127.0.0.1:0"}))
		if got.ExitCode != 65 || !strings.Contains(got.Stderr, "another process holds it: process") {
			t.Errorf("exit code %d:\n%s", got.ExitCode, got.Stderr)
		}
	})
	t.Run("no state is kept, said so", func(t *testing.T) {
		stopClean(t, d)
		if err := d.Restart(map[string]string{"PGSOURCE_STATE": "none"}); err != nil {
			t.Fatal(err)
		}
		health(t, d, "it says so", func(status int, body string) bool {
			return status == 200 && strings.Contains(body, "no state is kept")
		})
	})
}

// The disk of the state is full: rows go on into the pipeline, nothing is
// acknowledged, health says why, and it ends by itself when there is room.
func TestPgsourceStateStoreFails(t *testing.T) {
	t.Parallel()
	pg, sim, d, env := running(t)
	temp := stateFile(pg) + ".tmp"
	if err := os.Symlink("/dev/full", temp); err != nil {
		t.Fatal(err)
	}
	start := confirmed(t, pg)
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'held', 1, true)`)
	waitSim(t, sim, "the row is in the pipeline", func(v felderasim.View) bool { return v.Count("orders") == 2 })
	health(t, d, "the store fails", func(_ int, body string) bool {
		return strings.Contains(body, `"name":"state store","ok":false`) && strings.Contains(body, "no space left on device")
	})
	mark := d.Log().Mark()
	harness.Await(t, patience, "not ready", func(ctx context.Context) (any, bool) {
		status, body, err := d.Get(ctx, "/readyz")
		return string(body), err == nil && status == 503 && strings.Contains(string(body), "state store")
	})
	// A connection that begins anew is told what it was told before, too.
	execSQL(t, pg, `SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots`)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.Log().WaitSince(ctx, mark, regexp.MustCompile("msg=streaming")); err != nil {
		t.Fatal(err)
	}
	if got := confirmed(t, pg); got > start {
		t.Errorf("the LSN moved from %s to %s without a bookmark", decode.FormatLSN(start), decode.FormatLSN(got))
	}
	// It stops in bounded time all the same, and says what it could not do.
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	awaitEnd(t, d, 0)
	if got := confirmed(t, pg); got > start {
		t.Errorf("the LSN moved from %s to %s at the stop", decode.FormatLSN(start), decode.FormatLSN(got))
	}
	if found := d.Log().Grep(regexp.MustCompile("last position could not be saved")); len(found) != 1 {
		t.Errorf("the log says %v", found)
	}
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	harness.Await(t, patience, "the start waits for the store", func(ctx context.Context) (any, bool) {
		status, body, err := d.Get(ctx, "/readyz")
		return string(body), err == nil && status == 503 && strings.Contains(string(body), "no space left")
	})
	if err := os.Remove(temp); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	slot := confirmed(t, pg) // before the bookmark: both may move between the looks
	if got := showState(t, env).State; lsnOf(t, pg, got.Acknowledged) < slot {
		t.Errorf("the bookmark is %s, the slot was at %s before", got.Acknowledged, decode.FormatLSN(slot))
	}
}
