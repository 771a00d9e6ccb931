package e2e

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// runVerb runs a verb of pgsource to its end.
func runVerb(t *testing.T, env map[string]string, args ...string) harness.RunResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	got, err := harness.Run(ctx, harness.DaemonOptions{Program: build(t, "pgsource"), Args: args, Env: merged(env, map[string]string{"PGSOURCE_LISTEN": "127.0.0.1:0"})})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// wants checks how a verb ended and what it said.
func wants(t *testing.T, got harness.RunResult, code int, parts ...string) {
	t.Helper()
	out := got.Stdout + got.Stderr
	if got.ExitCode != code {
		t.Errorf("exit code %d, want %d:\n%s", got.ExitCode, code, out)
	}
	for _, part := range parts {
		if !strings.Contains(out, part) {
			t.Errorf("it does not say %q:\n%s", part, out)
		}
	}
}

// refusedAt waits for the refusal of a transaction and gives its end LSN.
func refusedAt(t *testing.T, d *harness.Daemon) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	re := regexp.MustCompile(`level=ERROR.*ending at LSN ([0-9A-F]+/[0-9A-F]+)`)
	line, err := d.WaitLog(ctx, re)
	if err != nil {
		t.Fatal(err)
	}
	return re.FindStringSubmatch(line)[1]
}

// A transaction that can never be delivered is passed over when a person says
// so: that one, whole, once, and written down before.
func TestPgsourceSkip(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `ALTER TABLE orders ALTER amount TYPE numeric`)
	dir := t.TempDir()
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_STATE": "file:" + filepath.Join(dir, "state.json")})
	wants(t, runVerb(t, env, "skip", "0/1"), 65, "holds nothing")
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'good', 1, true)`)
	execSQL(t, pg, `BEGIN; INSERT INTO items VALUES (7, 2, 'of the bad one'); INSERT INTO orders VALUES (2, 'bad', 'NaN', true, NULL, '\x00ff'); COMMIT`)
	execSQL(t, pg, `INSERT INTO orders VALUES (3, 'after', 3, true)`)
	end := refusedAt(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if code, err := d.Wait(ctx); err != nil || code != 65 {
		t.Fatalf("exit code %d, %v", code, err)
	}

	letter := filepath.Join(dir, "letter.jsonl")
	wants(t, runVerb(t, env, "skip"), 64)
	wants(t, runVerb(t, env, "skip", "-yes", "nonsense"), 64)
	wants(t, runVerb(t, env, "skip", "-yes", "-to", letter, "0/1"), 65, "another one", end)
	wants(t, runVerb(t, env, "skip", "-to", letter, end), 64, "missing from the pipeline", "nothing was done", "NaN")
	wants(t, runVerb(t, merged(env, map[string]string{"PGSOURCE_STATE": "none"}), "skip", "-yes", "-to", letter, end), 65, "none is kept")
	wants(t, runVerb(t, env, "skip", "-yes", "-to", filepath.Join(dir, "nosuch", "letter"), end), 1, "no such file")
	if _, err := os.Stat(letter); err == nil {
		t.Fatal("a file was left by a skip that was not done")
	}
	if err := os.WriteFile(letter, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	wants(t, runVerb(t, env, "skip", "-yes", "-to", letter, end), 1, "exists")
	if err := os.Remove(letter); err != nil {
		t.Fatal(err)
	}
	before := confirmed(t, pg)
	wants(t, runVerb(t, env, "skip", "-yes", "-to", letter, end), 0, "with 2 changes (public.items: 1, public.orders: 1)", letter, "pgsource resync public.items public.orders")
	if after := confirmed(t, pg); after != before {
		t.Errorf("skip moved the slot from %d to %d", before, after)
	}
	wants(t, runVerb(t, env, "skip", "-yes", "-to", letter+"2", end), 65, "marked already")
	wants(t, runVerb(t, env, "state", "show"), 0, "is passed over", letter)
	assertLetter(t, letter, end)

	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if diff := cmp.Diff([][]string{{"1", "good"}, {"3", "after"}}, rows(sim, "orders", "id", "customer")); diff != "" {
		t.Errorf("orders (-want +got):\n%s", diff)
	}
	if got := rows(sim, "items", "id"); len(got) != 0 {
		t.Errorf("a part of the transaction was delivered: items %v", got)
	}
	if n, err := d.Metric(t.Context(), "pgsource_skipped_transactions_total", nil); err != nil || n != 1 {
		t.Errorf("%v transactions passed over (%v)", n, err)
	}
	if _, err := d.WaitLog(ctx, regexp.MustCompile("transaction passed over")); err != nil {
		t.Error(err)
	}
	wants(t, runVerb(t, env, "skip", "-yes", "-to", letter+"3", end), 65) // a daemon runs

	// The same again while the daemon stands blocked; the next start forgets
	// the mark that it has passed.
	d.Kill()
	if err := d.Restart(map[string]string{"PGSOURCE_ON_REFUSAL": "wait"}); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	if got := runVerb(t, env, "state", "show"); strings.Contains(got.Stdout, "passed over") {
		t.Errorf("the mark outlives its transaction:\n%s", got.Stdout)
	}
	execSQL(t, pg, `INSERT INTO orders VALUES (4, 'bad too', 'NaN', true)`)
	execSQL(t, pg, `INSERT INTO orders VALUES (5, 'after that', 5, true)`)
	health(t, d, "it stands blocked", func(status int, body string) bool {
		return status == 503 && strings.Contains(body, `"phase":"blocked"`)
	})
	var second string
	for _, line := range d.Log().Grep(regexp.MustCompile(`ending at LSN`)) {
		if m := regexp.MustCompile(`ending at LSN ([0-9A-F]+/[0-9A-F]+)`).FindStringSubmatch(line); m[1] != end {
			second = m[1]
		}
	}
	wants(t, runVerb(t, env, "skip", "-yes", "-to", letter+"4", second), 0, "with 1 changes")
	d.Kill()
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if diff := cmp.Diff([][]string{{"1", "good"}, {"3", "after"}, {"5", "after that"}}, rows(sim, "orders", "id", "customer")); diff != "" {
		t.Errorf("orders (-want +got):\n%s", diff)
	}
}

// assertLetter looks whether the file has the whole transaction, decoded and as
// the server sent it, and nothing of another.
func assertLetter(t *testing.T, path, end string) {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	kinds := map[string]int{}
	var raw []byte
	for line := range strings.Lines(string(content)) {
		var l struct {
			Kind, Table, Raw string
			EndLSN           string `json:"end_lsn"`
			Rows             int
			After            map[string]any
		}
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		kinds[l.Kind]++
		switch {
		case l.Kind == "transaction" || l.Kind == "end":
			if l.EndLSN != end {
				t.Errorf("line %s", line)
			}
		case l.Kind == "insert" && l.Table == "public.orders":
			if l.After["id"] != "2" || l.After["amount"] != "NaN" || l.After["note"] != nil || l.After["customer"] != "bad" {
				t.Errorf("row %v", l.After)
			}
			if raw, err = base64.StdEncoding.DecodeString(l.Raw); err != nil || len(raw) == 0 || raw[0] != 'I' {
				t.Errorf("raw %x, %v", raw, err)
			}
		}
	}
	if kinds["transaction"] != 1 || kinds["end"] != 1 || kinds["insert"] != 2 {
		t.Errorf("lines %v:\n%s", kinds, content)
	}
}

// The slot is shown to people and to programs, and dropped only when nobody
// reads it and somebody says yes.
func TestPgsourceSlotVerbs(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := pgsourceEnv(pg, sim)
	wants(t, runVerb(t, env, "slot", "show"), 0, "no slot of this name")
	wants(t, runVerb(t, env, "slot", "drop", "-yes"), 65, "none of this name")
	wants(t, runVerb(t, env, "slot"), 64, "show")
	wants(t, runVerb(t, env, "slot", "create"), 64)
	wants(t, runVerb(t, env, "slot", "show", "other"), 64)
	wants(t, runVerb(t, env, "publication"), 64)

	// What "publication sql" prints is what an owner needs.
	for line := range strings.Lines(runVerb(t, env, "publication", "sql").Stdout) {
		execSQL(t, pg, strings.TrimSuffix(strings.TrimSpace(line), ";"))
	}
	env["PGSOURCE_CREATE"] = "false"
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'x', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))

	var shown struct {
		Slot struct {
			Usable, Active bool
			Application    string `json:"active_application"`
			Confirmed      string `json:"confirmed_flush_lsn"`
			Status         string `json:"wal_status"`
		}
	}
	got := runVerb(t, env, "slot", "show", "-json")
	if err := json.Unmarshal([]byte(got.Stdout), &shown); err != nil {
		t.Fatalf("%v:\n%s", err, got.Stdout)
	}
	if !shown.Slot.Usable || !shown.Slot.Active || !strings.HasPrefix(shown.Slot.Application, "holdfast/") || shown.Slot.Status != "reserved" || shown.Slot.Confirmed == "" {
		t.Errorf("%+v", shown)
	}
	wants(t, runVerb(t, env, "slot", "show"), 0, "in use", "holdfast/", "confirmed")
	wants(t, runVerb(t, env, "slot", "drop", "-yes"), 65, "in use", "stop that process")

	d.Kill()
	harness.Await(t, patience, "the server notices", func(ctx context.Context) (any, bool) {
		active, err := harness.QueryValue[bool](ctx, pg, `SELECT active FROM pg_replication_slots`)
		return active, err == nil && !active
	})
	execSQL(t, pg, `INSERT INTO orders SELECT i, 'unread', 1, true, repeat('x', 1000) FROM generate_series(10, 2000) i`)
	wants(t, runVerb(t, env, "slot", "drop"), 64, "forgets every change", "MiB of WAL", "nothing was done")
	if n, err := harness.QueryValue[int](t.Context(), pg, `SELECT count(*)::int FROM pg_replication_slots`); err != nil || n != 1 {
		t.Fatalf("%d slots (%v)", n, err)
	}
	wants(t, runVerb(t, env, "slot", "drop", "-yes"), 0, "dropped")
	if n, err := harness.QueryValue[int](t.Context(), pg, `SELECT count(*)::int FROM pg_replication_slots`); err != nil || n != 0 {
		t.Fatalf("%d slots (%v)", n, err)
	}
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'test_decoding')`)
	wants(t, runVerb(t, env, "slot", "drop", "-yes"), 65, "none that pgsource could have used")
}
