package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

func startPostgres(t *testing.T, settings map[string]string) *harness.Postgres {
	t.Helper()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{Settings: settings})
	if err := pg.Exec(t.Context(), sourceTables); err != nil {
		t.Fatal(err)
	}
	return pg
}

func pgsourceEnv(pg *harness.Postgres, sim *felderasim.Sim) map[string]string {
	return map[string]string{
		"PGSOURCE_DSN": pg.DSN(), "PGSOURCE_TABLES": "public.orders,public.items", "PGSOURCE_CREATE": "true",
		"FELDERA_URL": sim.URL(), "FELDERA_PIPELINE": "p",
		"PGSOURCE_STATE": "file:" + stateFile(pg),
		// A pgsource that was killed is outlived by this before the next one sends.
		"FELDERA_REQUEST_TIMEOUT": "5s", "FELDERA_REQUEST_LIFETIME": "5s",
	}
}

// stateFile is where the daemon of a cluster keeps its state.
func stateFile(pg *harness.Postgres) string { return filepath.Join(pg.Dir(), "pgsource.json") }

// differential builds pgsource so that each message of a server is also read by
// pglogrepl, and a difference ends it.
const differential = "differential"

func startPgsource(t *testing.T, env map[string]string) *harness.Daemon {
	t.Helper()
	if env["PGSOURCE_SPILL_DIR"] == "" {
		env = merged(env, map[string]string{"PGSOURCE_SPILL_DIR": t.TempDir()})
	}
	return harness.NeedDaemon(t, "./cmd/pgsource", harness.BuildOptions{Race: true, Tags: differential}, harness.DaemonOptions{Env: env, ListenVar: "PGSOURCE_LISTEN"})
}

func waitHealthy(t *testing.T, d *harness.Daemon) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := d.WaitHealthy(ctx); err != nil {
		t.Fatal(err)
	}
}

func execSQL(t *testing.T, pg *harness.Postgres, sql string) {
	t.Helper()
	if err := pg.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func confirmed(t *testing.T, pg *harness.Postgres) uint64 {
	t.Helper()
	lsn, err := pg.ConfirmedFlushLSN(t.Context(), "holdfast")
	if err != nil {
		t.Fatal(err)
	}
	return lsn
}

func currentLSN(t *testing.T, pg *harness.Postgres) uint64 {
	t.Helper()
	lsn, err := pg.CurrentLSN(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return lsn
}

// awaitSlotFree waits until nobody reads the only slot.
func awaitSlotFree(t *testing.T, pg *harness.Postgres) {
	t.Helper()
	harness.Await(t, patience, "the slot is free", func(ctx context.Context) (any, bool) {
		active, err := harness.QueryValue[bool](ctx, pg, `SELECT active FROM pg_replication_slots`)
		return err, err == nil && !active
	})
}

// awaitConfirmed waits until the server's confirmed_flush_lsn, read back from
// it, has reached lsn.
func awaitConfirmed(t *testing.T, pg *harness.Postgres, lsn uint64) {
	t.Helper()
	awaitSlot(t, pg, "holdfast", lsn)
}

func awaitSlot(t *testing.T, pg *harness.Postgres, slot string, lsn uint64) {
	t.Helper()
	harness.Await(t, patience, "confirmed_flush_lsn reaches "+decode.FormatLSN(lsn), func(ctx context.Context) (any, bool) {
		got, err := pg.ConfirmedFlushLSN(ctx, slot)
		if err != nil {
			return err, false
		}
		if got >= lsn {
			t.Logf("confirmed_flush_lsn read back from the server: %s", decode.FormatLSN(got))
		}
		return decode.FormatLSN(got), got >= lsn
	})
}

// assertEqualTables compares both tables of the source with the destination's.
func assertEqualTables(t *testing.T, pg *harness.Postgres, sim *felderasim.Sim) {
	t.Helper()
	orders, err := pg.Rows(t.Context(), `SELECT id, customer, coalesce(trim_scale(amount)::text, '-'), paid::text, coalesce(note, '-'), coalesce(encode(raw, 'hex'), '-'),
		coalesce(to_char(placed, 'YYYY-MM-DD HH24:MI:SS.US'), '-') FROM orders ORDER BY id`)
	if err != nil {
		t.Fatal(err)
	}
	items, err := pg.Rows(t.Context(), `SELECT id, order_id, sku FROM items ORDER BY id`)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(orders, rows(sim, "orders", "id", "customer", "amount", "paid", "note", "raw", "placed"), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("orders: source and destination differ (-source +destination):\n%s", shorten(diff))
	}
	if diff := cmp.Diff(items, rows(sim, "items", "id", "order_id", "sku"), cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("items: source and destination differ (-source +destination):\n%s", shorten(diff))
	}
}

func shorten(s string) string {
	if len(s) > 4000 {
		return s[:4000] + "…"
	}
	return s
}

func TestPgsourceCarriesEveryOperation(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	waitHealthy(t, startPgsource(t, pgsourceEnv(pg, sim)))

	execSQL(t, pg, `INSERT INTO orders VALUES
		(1, 'ada', 12.50, true, E'line\nbreak "quoted" \\ ☃', '\x00ff', '2026-01-02 03:04:05.123456'),
		(2, 'bob', NULL, false, NULL, NULL, NULL),
		(3, 'cy', -0.01, true, '', '\x', '0001-01-01 00:00:00')`)
	execSQL(t, pg, `BEGIN; INSERT INTO items VALUES (1, 1, 'a'), (2, 1, 'b'); UPDATE orders SET amount = 99999.99 WHERE id = 2; COMMIT`)
	execSQL(t, pg, `UPDATE orders SET id = 30 WHERE id = 3`) // a key change leaves no ghost
	execSQL(t, pg, `DELETE FROM items WHERE id = 1`)
	execSQL(t, pg, `BEGIN; INSERT INTO orders VALUES (9, 'x', 1, true); SAVEPOINT a; INSERT INTO orders VALUES (10, 'y', 1, true); ROLLBACK TO a; COMMIT`)
	execSQL(t, pg, `BEGIN; INSERT INTO orders VALUES (11, 'z', 1, true); ROLLBACK`)
	// Large enough to be stored out of line, then an update that leaves it
	// alone: the server does not send it again, and it must stay.
	execSQL(t, pg, `ALTER TABLE orders ALTER note SET STORAGE EXTERNAL; INSERT INTO orders VALUES (12, 'toast', 1, true, repeat('long', 5000))`)
	execSQL(t, pg, `UPDATE orders SET amount = 2 WHERE id = 12`)

	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// The catalogue's odd keys: columns that an index only includes are no part of
// the identity, and FULL makes every column one.
func TestPgsourceIdentities(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `ALTER TABLE items DROP CONSTRAINT items_pkey, ADD PRIMARY KEY (id) INCLUDE (sku); ALTER TABLE orders REPLICA IDENTITY FULL`)
	waitHealthy(t, startPgsource(t, pgsourceEnv(pg, sim)))
	execSQL(t, pg, `ALTER TABLE orders ALTER note SET STORAGE EXTERNAL; INSERT INTO orders VALUES (1, 'a', 1, true, repeat('long', 5000)), (2, 'b', 2, true, NULL)`)
	execSQL(t, pg, `INSERT INTO items VALUES (1, 1, 'x'), (2, 1, 'y')`)
	execSQL(t, pg, `UPDATE orders SET id = 10 WHERE id = 1; UPDATE items SET sku = 'z', id = 20 WHERE id = 2; DELETE FROM orders WHERE id = 2`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// The destination takes everything and completes nothing: the LSN stays where
// it is, the connection lives on beyond wal_sender_timeout, and once
// completion comes, the LSN moves.
func TestPgsourceWaitsForCompletion(t *testing.T) {
	t.Parallel()
	const senderTimeout = 3 * time.Second
	pg := startPostgres(t, map[string]string{"wal_sender_timeout": "3s"})
	sim := startSim(t, felderasim.Options{})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	walSender, err := harness.QueryValue[int32](t.Context(), pg, `SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'holdfast'`)
	if err != nil {
		t.Fatal(err)
	}

	sim.HoldCompletion()
	start := currentLSN(t, pg)
	held := confirmed(t, pg)
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'held', 1, true)`)
	waitSim(t, sim, "the held row is accepted", func(v felderasim.View) bool { return v.Counters().Records >= 2 })

	// Watch for longer than the server waits for a silent client. Other WAL
	// makes the server send keepalives, whose positions must not overtake.
	for end := time.Now().Add(2*senderTimeout + time.Second); time.Now().Before(end); {
		execSQL(t, pg, `SELECT pg_logical_emit_message(false, 'other', 'wal')`)
		execSQL(t, pg, `SELECT pg_sleep(0.1)`)
		if got := confirmed(t, pg); got > start {
			t.Fatalf("confirmed_flush_lsn moved to %s with the transaction after %s not completed", decode.FormatLSN(got), decode.FormatLSN(start))
		}
	}
	if got, err := harness.QueryValue[int32](t.Context(), pg, `SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'holdfast'`); err != nil || got != walSender {
		t.Fatalf("the replication connection did not outlive wal_sender_timeout: walsender %d, before %d (%v)", got, walSender, err)
	}
	t.Logf("confirmed_flush_lsn stood at %s (held since %s) for %v without completion", decode.FormatLSN(confirmed(t, pg)), decode.FormatLSN(held), 2*senderTimeout)

	sim.ReleaseCompletion()
	awaitConfirmed(t, pg, currentLSN(t, pg))
}

// Killed between the request and its completion, many times: nothing is
// missing in the end.
func TestPgsourceKilledBeforeCompletion(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	for round := range 5 {
		sim.HoldCompletion()
		before, start := sim.Counters().Accepted, confirmed(t, pg)
		execSQL(t, pg, fmt.Sprintf(`BEGIN; INSERT INTO orders SELECT i, 'round', i, true FROM generate_series(%d, %d) i;
			INSERT INTO items SELECT i, i, 'sku' FROM generate_series(%d, %d) i; COMMIT`, round*100, round*100+99, round*100, round*100+99))
		waitSim(t, sim, "the round is accepted", func(v felderasim.View) bool { return v.Counters().Accepted >= before+2 })
		d.Kill()
		if got := confirmed(t, pg); got > currentLSN(t, pg) || got < start {
			t.Fatalf("confirmed %s", decode.FormatLSN(got))
		}
		sim.ReleaseCompletion()
		if round%2 == 1 {
			execSQL(t, pg, fmt.Sprintf(`DELETE FROM items WHERE id = %d; UPDATE orders SET id = id + 100000 WHERE id = %d`, round*100, round*100))
		}
		if err := d.Restart(nil); err != nil {
			t.Fatal(err)
		}
		waitHealthy(t, d)
		awaitConfirmed(t, pg, currentLSN(t, pg))
		assertEqualTables(t, pg, sim)
	}
}

// The pipeline process dies with rows accepted and not completed: they are
// delivered again, and the loss of what was confirmed is said.
func TestPgsourceSaysThatThePipelineRestarted(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'confirmed', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	sim.HoldCompletion()
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'accepted', 1, true)`)
	waitSim(t, sim, "the second row is accepted", func(v felderasim.View) bool { return v.Counters().Records >= 2 })
	sim.Crash(core.KeepNothing)
	sim.ReleaseCompletion()
	awaitConfirmed(t, pg, currentLSN(t, pg))
	waitSim(t, sim, "the unconfirmed row is delivered again, and the confirmed one copied", func(v felderasim.View) bool { return v.Count("orders") == 2 })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.WaitLog(ctx, regexp.MustCompile("may be lost from the pipeline")); err != nil {
		t.Errorf("the loss is not said: %v", err)
	}
	waitHealthy(t, d)
}

// A stop waits for what is in flight, and confirms it.
func TestPgsourceStopsClean(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	sim.HoldCompletion()
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'in flight', 1, true)`)
	end := currentLSN(t, pg)
	waitSim(t, sim, "the row is accepted", func(v felderasim.View) bool { return v.Counters().Records == 1 })
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.WaitLog(ctx, regexp.MustCompile("finishing what is in flight")); err != nil {
		t.Fatal(err)
	}
	sim.ReleaseCompletion()
	if code, err := d.Wait(ctx); err != nil || code != 0 {
		t.Fatalf("exit code %d, %v", code, err)
	}
	if got := confirmed(t, pg); got < end {
		t.Fatalf("what completed during the stop was not confirmed: %s, want %s", decode.FormatLSN(got), decode.FormatLSN(end))
	}
	if n := sim.Counters().Accepted; n != 1 {
		t.Fatalf("%d requests", n)
	}
}

// The destination is away for longer than memory lasts: pgsource leaves on
// purpose, and comes back.
func TestPgsourceLeavesWhenMemoryIsFull(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_MEMORY_LIMIT": "1MiB", "PGSOURCE_BATCH_BYTES": "256KiB", "PGSOURCE_SPILL_DIR": "off",
	}))
	waitHealthy(t, d)
	sim.Kill()
	for i := range 40 {
		execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders SELECT i, 'backlog', 1, true, repeat('x', 400) FROM generate_series(%d, %d) i`, i*100, i*100+99))
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.WaitLog(ctx, regexp.MustCompile("closed on purpose")); err != nil {
		t.Fatal(err)
	}
	sim.Restart(core.KeepNothing)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// An idle publication in a busy database does not hold WAL back.
func TestPgsourceIdlePublicationAdvances(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE TABLE other (t text)`)
	waitHealthy(t, startPgsource(t, pgsourceEnv(pg, sim)))
	for range 5 {
		execSQL(t, pg, `INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 1000)`)
		awaitConfirmed(t, pg, currentLSN(t, pg))
	}
	if n := sim.Counters().Requests; n != 0 {
		t.Fatalf("%d requests for nothing", n)
	}
	// The primary can shut down: it waits for its walsender to be caught up.
	if err := pg.Stop(harness.Fast); err != nil {
		t.Fatalf("a fast shutdown is held up: %v", err)
	}
	if err := pg.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'after', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// Every wrong setting gives one sentence that says what to do, and the exit
// code that service managers know.
func TestPgsourceBadInput(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{Password: "right horse"})
	execSQL(t, pg, sourceTables)
	replica := startPostgres(t, map[string]string{"wal_level": "replica"})
	sim := startSim(t, felderasim.Options{})
	good := pgsourceEnv(pg, sim)
	for name, c := range map[string]struct {
		change map[string]string
		args   []string
		code   int
		says   string
	}{
		"DSN that is none":      {change: map[string]string{"PGSOURCE_DSN": "postgres://user:hunter2@:::/x"}, code: 78, says: "PGSOURCE_DSN"},
		"no DSN":                {change: map[string]string{"PGSOURCE_DSN": ""}, code: 78, says: "PGSOURCE_DSN"},
		"misspelt setting":      {change: map[string]string{"PGSOURCE_TABELS": "x"}, code: 78, says: "PGSOURCE_TABLES"},
		"wrong password":        {change: map[string]string{"PGSOURCE_DSN": pg.DSNFor("postgres", "wrong horse", "postgres", pg.Addr())}, code: 65, says: "password authentication failed"},
		"unknown database":      {change: map[string]string{"PGSOURCE_DSN": pg.DSNFor("postgres", "right horse", "nosuch", pg.Addr())}, code: 65, says: "nosuch"},
		"wal_level replica":     {change: map[string]string{"PGSOURCE_DSN": replica.DSN()}, code: 65, says: "ALTER SYSTEM SET wal_level"},
		"missing publication":   {change: map[string]string{"PGSOURCE_CREATE": "false"}, code: 65, says: "CREATE PUBLICATION"},
		"unknown source table":  {change: map[string]string{"PGSOURCE_TABLES": "public.nosuch=orders"}, code: 65, says: "public.nosuch"},
		"unknown Feldera table": {change: map[string]string{"PGSOURCE_TABLES": "public.orders=ordres"}, code: 65, says: "orders"},
		"unknown pipeline":      {change: map[string]string{"FELDERA_PIPELINE": "nosuch"}, code: 65, says: "nosuch"},
		"check finds it too":    {change: map[string]string{"PGSOURCE_CREATE": "false"}, args: []string{"check"}, code: 65, says: "CREATE PUBLICATION"},
		"check, nobody there":   {change: map[string]string{"FELDERA_URL": "http://127.0.0.1:1"}, args: []string{"check"}, code: 69, says: "127.0.0.1:1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			// Each with a state of its own: two at once would refuse each other's.
			env := merged(merged(good, map[string]string{"PGSOURCE_STATE": "file:" + filepath.Join(t.TempDir(), "state.json"), "PGSOURCE_LISTEN": "127.0.0.1:0"}), c.change)
			if name == "check, nobody there" {
				env["PGSOURCE_DSN"] = "postgres://postgres@127.0.0.1:1/postgres"
			}
			got, err := harness.Run(ctx, harness.DaemonOptions{Program: build(t, "pgsource"), Args: c.args, Env: env})
			if err != nil {
				t.Fatal(err)
			}
			out := got.Stdout + got.Stderr
			if got.ExitCode != c.code || !strings.Contains(out, c.says) {
				t.Errorf("exit code %d (want %d), output (want %q):\n%s", got.ExitCode, c.code, c.says, out)
			}
			for _, secret := range []string{"horse", "hunter2"} {
				if strings.Contains(out, secret) {
					t.Errorf("a password is in the output:\n%s", out)
				}
			}
		})
	}
	slots, err := pg.Rows(t.Context(), `SELECT slot_name FROM pg_replication_slots`)
	if err != nil || len(slots) != 0 {
		t.Errorf("slots were left behind by configurations that were refused: %v %v", slots, err)
	}
}

// Feldera is not there at the start: pgsource stays up, is not ready, says
// why, and goes on when it comes.
func TestPgsourceWaitsForFeldera(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	sim.Kill()
	d := startPgsource(t, pgsourceEnv(pg, sim))
	harness.Await(t, patience, "readyz says why", func(ctx context.Context) (any, bool) {
		status, body, err := d.Get(ctx, "/readyz")
		if err != nil {
			return err, false
		}
		return string(body), status == 503 && strings.Contains(string(body), "destination") && strings.Contains(string(body), "pipeline")
	})
	if status, _, err := d.Get(t.Context(), "/livez"); err != nil || status != 200 {
		t.Fatalf("livez: %d %v", status, err)
	}
	sim.Restart(core.KeepNothing)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'late', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// A row that cannot be carried stops pgsource by name, and loses nothing: what
// came before it is confirmed, and it is read again after the mend.
func TestPgsourceRefusesByName(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `ALTER TABLE orders ALTER amount TYPE numeric`)
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'good', 1, true)`)
	before := currentLSN(t, pg)
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'bad', 'NaN', true)`)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	code, err := d.Wait(ctx)
	if err != nil || code != 65 {
		t.Fatalf("exit code %d, %v", code, err)
	}
	said := strings.Join(d.Log().Tail(5), "\n")
	for _, part := range []string{"orders", "amount", "NaN", "LSN"} {
		if !strings.Contains(said, part) {
			t.Errorf("the refusal does not say %q:\n%s", part, said)
		}
	}
	if got := confirmed(t, pg); got < before-64 && got > currentLSN(t, pg) {
		t.Errorf("confirmed %s", decode.FormatLSN(got))
	}
	if err := d.Restart(map[string]string{"PGSOURCE_UNREPRESENTABLE": "null"}); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if got := rows(sim, "orders", "id", "amount"); len(got) != 2 || got[1][1] != "-" {
		t.Errorf("destination holds %v", got)
	}
}
