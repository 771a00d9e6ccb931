package e2e

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// major gives the version of the server.
func major(t *testing.T, pg *harness.Postgres) int {
	t.Helper()
	n, err := harness.QueryValue[int](t.Context(), pg, `SELECT current_setting('server_version_num')::int / 10000`)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// writeWAL fills n segments.
func writeWAL(t *testing.T, pg *harness.Postgres, n int) {
	t.Helper()
	for range n {
		execSQL(t, pg, `SELECT pg_logical_emit_message(false, 'filler', repeat('x', 100000))`)
		execSQL(t, pg, `SELECT pg_switch_wal()`)
	}
}

// The destination stands still while the server writes: the danger is shown
// before the slot is lost, and when it is, pgsource stops with what is lost.
func TestPgsourceSlotIsLost(t *testing.T) {
	t.Parallel()
	pg := startPostgres(t, map[string]string{"max_slot_wal_keep_size": "32MB", "max_wal_size": "32MB", "min_wal_size": "32MB", "checkpoint_timeout": "1h"})
	sim := startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_ON_REFUSAL": "wait", "PGSOURCE_SHUTDOWN_TIMEOUT": "1s"}))
	waitHealthy(t, d)
	sim.HoldCompletion()
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'held', 1, true)`)
	waitSim(t, sim, "the row is accepted", func(v felderasim.View) bool { return v.Counters().Records >= 1 })
	kept := confirmed(t, pg)

	writeWAL(t, pg, 2)
	health(t, d, "the slot is in danger", func(status int, body string) bool {
		return status == 200 && (strings.Contains(body, "will soon be lost") || strings.Contains(body, "about to remove"))
	})
	harness.Await(t, patience, "the lag in seconds grows while nothing is acknowledged", func(ctx context.Context) (any, bool) {
		lag, err := d.Metric(ctx, "pgsource_acknowledged_lag_seconds", nil)
		return fmt.Sprint(lag, err), err == nil && lag > 5
	})
	if lag, err := d.Metric(t.Context(), "pgsource_received_lag_seconds", nil); err != nil || lag > 1 {
		t.Errorf("received lag of %v seconds (%v), although everything was received", lag, err)
	}

	writeWAL(t, pg, 4)
	execSQL(t, pg, `CHECKPOINT`)
	health(t, d, "the slot is lost", func(status int, body string) bool {
		return status == 503 && strings.Contains(body, "lost") && strings.Contains(body, "pgsource resync -all")
	})
	if lost, err := d.Metric(t.Context(), "pgsource_slot_status", map[string]string{"status": "lost"}); err != nil || lost != 1 {
		harness.Await(t, patience, "the metric says that it is lost", func(ctx context.Context) (any, bool) {
			lost, err := d.Metric(ctx, "pgsource_slot_status", map[string]string{"status": "lost"})
			return fmt.Sprint(lost, err), err == nil && lost == 1
		})
	}
	d.Kill()

	// At the next start it is refused at once, by the server's reason.
	got := runCheck(t, pgsourceEnv(pg, sim))
	says := []string{"it is lost", "MiB of WAL", "pg_drop_replication_slot"}
	if major(t, pg) >= 17 {
		says = append(says, "max_slot_wal_keep_size")
	}
	for _, part := range says {
		if !strings.Contains(got.Stdout, part) {
			t.Errorf("check does not say %q:\n%s", part, got.Stdout)
		}
	}
	if got.ExitCode != 65 {
		t.Errorf("exit code %d", got.ExitCode)
	}
	t.Logf("held at %d:\n%s", kept, got.Stdout)
}

// runCheck runs pgsource check.
func runCheck(t *testing.T, env map[string]string, args ...string) harness.RunResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	got, err := harness.Run(ctx, harness.DaemonOptions{
		Program: build(t, "pgsource"), Args: append([]string{"check"}, args...), Env: merged(env, map[string]string{"PGSOURCE_LISTEN": "127.0.0.1:0"}),
	})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// A transaction that writes holds up the making of the slot: it is named,
// without its statements, and the slot is made when it has ended.
func TestPgsourceSlotWaitsForWriters(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, map[string]string{"max_prepared_transactions": "2"}), startSim(t, felderasim.Options{})
	writer, err := pg.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = writer.Close(context.WithoutCancel(t.Context())) }()
	if _, err := writer.Exec(t.Context(), `SET application_name = 'night job'`); err != nil {
		t.Fatal(err)
	}
	if _, err := writer.Exec(t.Context(), `BEGIN`); err != nil {
		t.Fatal(err)
	}
	if _, err := writer.Exec(t.Context(), `INSERT INTO items VALUES (1, 1, 'a secret value')`); err != nil {
		t.Fatal(err)
	}
	execSQL(t, pg, `CREATE TABLE unrelated (x int)`)
	prepared, err := pg.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = prepared.Close(context.WithoutCancel(t.Context())) }()
	for _, sql := range []string{`BEGIN`, `INSERT INTO unrelated VALUES (1)`, `PREPARE TRANSACTION 'left over'`} {
		if _, err := prepared.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	d := startPgsource(t, pgsourceEnv(pg, sim))
	health(t, d, "the transactions are named", func(_ int, body string) bool {
		return strings.Contains(body, "night job") && strings.Contains(body, "left over")
	})
	if _, err := writer.Exec(t.Context(), `COMMIT`); err != nil {
		t.Fatal(err)
	}
	execSQL(t, pg, `ROLLBACK PREPARED 'left over'`)
	waitHealthy(t, d)
	if said := strings.Join(d.Log().Tail(1000), "\n"); strings.Contains(said, "a secret value") {
		t.Errorf("a statement is in the log:\n%s", said)
	}
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'after', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
}

// A primary that shuts down is not held up by a transaction that the
// destination does not complete, and nothing is lost by letting go of it; the
// same for a crash of the server.
func TestPgsourceServerGoesAway(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, pgsourceEnv(pg, sim))
	waitHealthy(t, d)
	for round, mode := range []harness.StopMode{harness.Fast, harness.Immediate} {
		sim.HoldCompletion()
		before := sim.Counters().Records
		execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'in flight', 1, true)`, round))
		waitSim(t, sim, "the row is accepted", func(v felderasim.View) bool { return v.Counters().Records > before })
		began := time.Now()
		if err := pg.Stop(mode); err != nil {
			t.Fatalf("the server could not stop: %v", err)
		}
		t.Logf("the server stopped (round %d) in %v with a transaction that is not completed", round, time.Since(began).Round(time.Millisecond))
		health(t, d, "the lost server is shown", func(status int, body string) bool {
			return status == 200 && strings.Contains(body, "refused")
		})
		sim.ReleaseCompletion()
		if err := pg.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		waitHealthy(t, d)
		execSQL(t, pg, fmt.Sprintf(`INSERT INTO items VALUES (%d, 1, 'after')`, round))
		awaitConfirmed(t, pg, currentLSN(t, pg))
		assertEqualTables(t, pg, sim)
	}
}

// Slots that cannot serve are refused by name, with what mends it, and none is
// touched.
func TestPgsourceForeignSlots(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, map[string]string{"max_prepared_transactions": "2", "max_replication_slots": "5"}), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE PUBLICATION holdfast FOR TABLE orders, items WITH (publish_via_partition_root = true)`)
	execSQL(t, pg, `SELECT pg_create_physical_replication_slot('physical')`)
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('plugin', 'test_decoding')`)
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('twophase', 'pgoutput', false, true)`)
	execSQL(t, pg, `CREATE DATABASE elsewhere`)
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('fine', 'pgoutput')`)
	for name, c := range map[string]struct {
		change map[string]string
		code   int
		says   []string
	}{
		"fine":             {change: map[string]string{"PGSOURCE_SLOT": "fine", "PGSOURCE_CREATE": "false"}, says: []string{"confirmed up to", "wal_status reserved", "max_slot_wal_keep_size is -1"}},
		"physical":         {change: map[string]string{"PGSOURCE_SLOT": "physical"}, code: 65, says: []string{"physical slot"}},
		"another plug-in":  {change: map[string]string{"PGSOURCE_SLOT": "plugin"}, code: 65, says: []string{"test_decoding"}},
		"two_phase":        {change: map[string]string{"PGSOURCE_SLOT": "twophase"}, code: 65, says: []string{"two_phase is on", "pg_drop_replication_slot('twophase')"}},
		"another database": {change: map[string]string{"PGSOURCE_SLOT": "fine", "PGSOURCE_DSN": pg.DSNFor("postgres", "", "elsewhere", pg.Addr())}, code: 65, says: []string{`belongs to database "postgres"`}},
		"none":             {change: map[string]string{"PGSOURCE_SLOT": "nosuch", "PGSOURCE_CREATE": "false"}, code: 65, says: []string{"pg_create_logical_replication_slot('nosuch', 'pgoutput')"}},
		"failover": {
			change: map[string]string{"PGSOURCE_SLOT": "fine", "PGSOURCE_SLOT_FAILOVER": "true"}, code: map[bool]int{true: 0, false: 65}[major(t, pg) >= 17],
			says: []string{map[bool]string{true: "confirmed up to", false: "PostgreSQL 17 or newer"}[major(t, pg) >= 17]},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := runCheck(t, merged(pgsourceEnv(pg, sim), c.change))
			if got.ExitCode != c.code {
				t.Errorf("exit code %d, want %d", got.ExitCode, c.code)
			}
			for _, part := range c.says {
				if !strings.Contains(got.Stdout, part) {
					t.Errorf("check does not say %q:\n%s", part, got.Stdout)
				}
			}
		})
	}
}

// Where nothing is right, one check says all of it at once, each with the
// statement that mends it; and the statements do mend it.
func TestPgsourceCheckFindsEverything(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, map[string]string{"max_replication_slots": "1", "wal_sender_timeout": "0", "synchronous_standby_names": "*", "synchronous_commit": "local"}), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE ROLE reader LOGIN; CREATE TABLE stray (id int PRIMARY KEY)`)
	execSQL(t, pg, `SELECT pg_create_physical_replication_slot('taken')`)
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_DSN": pg.DSNFor("reader", "", "postgres", pg.Addr())})

	first := runCheck(t, env)
	for _, part := range []string{
		`ALTER ROLE "reader" REPLICATION`, `GRANT CREATE ON DATABASE "postgres" TO "reader"`, `does not own table "public"."orders"`, `does not own table "public"."items"`,
		"all 1 replication slots are in use", "CREATE PUBLICATION",
	} {
		if !strings.Contains(first.Stdout, part) {
			t.Errorf("check does not say %q:\n%s", part, first.Stdout)
		}
	}
	if first.ExitCode != 65 {
		t.Errorf("exit code %d", first.ExitCode)
	}

	execSQL(t, pg, `ALTER ROLE reader REPLICATION; CREATE PUBLICATION holdfast FOR TABLE items, stray WITH (publish = 'insert'); SELECT pg_drop_replication_slot('taken')`)
	second := runCheck(t, env, "-json")
	for _, part := range []string{
		`"exit_code":65`, `wal_sender_timeout is 0`, `synchronous_standby_names has a *`, `ALTER PUBLICATION \"holdfast\" SET (publish`, `ADD TABLE ONLY \"public\".\"orders\"`,
		`DROP TABLE ONLY \"public\".\"stray\"`, `pg_create_logical_replication_slot('holdfast', 'pgoutput')`,
	} {
		if !strings.Contains(second.Stdout, part) {
			t.Errorf("check -json does not say %q:\n%s", part, second.Stdout)
		}
	}

	// What it says mends it, word for word.
	for _, statement := range regexp.MustCompile(`ALTER PUBLICATION "holdfast" (SET \(publish = '[a-z, ]+'\)|ADD TABLE [ONLYa-z"., ]+|DROP TABLE [ONLYa-z"., ]+)`).FindAllString(runCheck(t, env).Stdout, -1) {
		execSQL(t, pg, statement)
	}
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	if third := runCheck(t, env); third.ExitCode != 0 {
		t.Errorf("exit code %d after everything was mended:\n%s", third.ExitCode, third.Stdout)
	}
	waitHealthy(t, startPgsource(t, env))
}

// What only newer servers have: a slot that standbys mirror (17), and one that
// is lost because nobody read it for too long (18). Older ones refuse the
// first by name.
func TestPgsourceSlotOfNewerServers(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_SLOT_FAILOVER": "true"})
	version := major(t, pg)
	if version < 17 {
		wants(t, runVerb(t, env, "run"), 65, "PostgreSQL 17 or newer", "PGSOURCE_SLOT_FAILOVER=false")
		return
	}
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'x', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if failover, err := harness.QueryValue[bool](t.Context(), pg, `SELECT failover FROM pg_replication_slots WHERE slot_name = 'holdfast'`); err != nil || !failover {
		t.Errorf("the slot is no failover slot (%v)", err)
	}
	wants(t, runVerb(t, env, "slot", "show"), 0, "failover       true")
	if version < 18 {
		return
	}
	d.Kill()
	execSQL(t, pg, `ALTER SYSTEM SET idle_replication_slot_timeout = '1s'`)
	execSQL(t, pg, `SELECT pg_reload_conf()`)
	wants(t, runCheck(t, env), 0, "idle_replication_slot_timeout is 1s")
	harness.Await(t, patience, "the server gives the idle slot up", func(ctx context.Context) (any, bool) {
		if err := pg.Exec(ctx, `CHECKPOINT`); err != nil {
			return err, false
		}
		reason, err := harness.QueryValue[string](ctx, pg, `SELECT coalesce(invalidation_reason, '') FROM pg_replication_slots`)
		return reason, err == nil && reason == "idle_timeout"
	})
	wants(t, runCheck(t, env), 65, "nobody read it for longer than idle_replication_slot_timeout", "raise idle_replication_slot_timeout")
	wants(t, runVerb(t, env, "slot", "show"), 0, "NOT USABLE")
}

// A server without wal_sender_timeout would keep a dead client's slot for as
// long as TCP does: pgsource brings a limit of its own, to which it keeps.
func TestPgsourceServerEndsASilentOne(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, map[string]string{"wal_sender_timeout": "0"}), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_WAL_SENDER_TIMEOUT": "4s"}))
	waitHealthy(t, d)
	holder := walsender(t, pg)
	for end := time.Now().Add(6 * time.Second); time.Now().Before(end); {
		execSQL(t, pg, `SELECT pg_sleep(0.2)`)
		if now := walsender(t, pg); now != holder {
			t.Fatalf("an idle connection did not outlive the limit of 4s: walsender %d, before %d", now, holder)
		}
	}
	if err := d.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	harness.Await(t, patience, "the server ends the connection", func(ctx context.Context) (any, bool) {
		active, err := harness.QueryValue[bool](ctx, pg, `SELECT active FROM pg_replication_slots`)
		return active, err == nil && !active
	})
	t.Logf("the server freed the slot %v after pgsource fell silent, with PGSOURCE_WAL_SENDER_TIMEOUT=4s", time.Since(began).Round(time.Millisecond))
	if err := d.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'after', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// A process that stands still reads nothing, so its socket fills. The server
// that has to remove WAL then ends the walsender, which first writes its last
// word into that socket: it waits for the client, and the checkpoint waits for
// it, with wal_sender_timeout out of play. It is over as soon as the process
// goes on or is gone, and the slot that is lost by then is said.
func TestPgsourceFrozenWhileWALIsRemoved(t *testing.T) {
	t.Parallel()
	for _, killed := range []bool{false, true} {
		t.Run(fmt.Sprintf("killed=%v", killed), func(t *testing.T) {
			t.Parallel()
			// No checkpoint but the one that is asked for: it has to find the socket full.
			pg := startPostgres(t, map[string]string{"max_slot_wal_keep_size": "32MB", "max_wal_size": "2GB", "checkpoint_timeout": "1h"})
			sim := startSim(t, felderasim.Options{})
			env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_ON_REFUSAL": "wait", "PGSOURCE_WAL_SENDER_TIMEOUT": "1h"})
			d := startPgsource(t, env)
			waitHealthy(t, d)
			holder := walsender(t, pg)
			if err := d.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			execSQL(t, pg, `INSERT INTO orders SELECT i, repeat(md5(i::text), 40), 1, true FROM generate_series(1, 40000) i`)
			awaitStandstill(t, pg, holder)
			writeWAL(t, pg, 4)

			checkpoint := make(chan error, 1)
			go func() { checkpoint <- pg.Exec(t.Context(), `CHECKPOINT`) }()
			awaitWalsender(t, pg, holder, "ClientWrite")
			began := time.Now()
			if killed {
				d.Kill()
			} else if err := d.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			select {
			case err := <-checkpoint:
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("the checkpoint ended %v after the process did not stand still any more", time.Since(began).Round(time.Millisecond))
			case <-time.After(patience):
				t.Fatal("the checkpoint still waits for the walsender")
			}
			if killed {
				if err := d.Restart(nil); err != nil {
					t.Fatal(err)
				}
			}
			health(t, d, "the slot is lost", func(status int, body string) bool {
				return status == 503 && strings.Contains(body, "lost") && strings.Contains(body, "pgsource resync -all")
			})
		})
	}
}

// awaitWalsender waits until the walsender waits for what is named.
func awaitWalsender(t *testing.T, pg *harness.Postgres, pid int32, event string) {
	t.Helper()
	harness.Await(t, patience, "the walsender waits in "+event, func(ctx context.Context) (any, bool) {
		now, err := harness.QueryValue[string](ctx, pg, fmt.Sprintf(`SELECT coalesce((SELECT wait_event FROM pg_stat_activity WHERE pid = %d), 'nothing')`, pid))
		return now, err == nil && now == event
	})
}

// awaitStandstill waits until the walsender cannot write any more: it waits for
// its socket, and has waited for the same byte for two seconds, since the kernel
// makes its buffers larger before they are full.
func awaitStandstill(t *testing.T, pg *harness.Postgres, pid int32) {
	t.Helper()
	var at string
	var since time.Time
	harness.Await(t, patience, "the walsender stands still", func(ctx context.Context) (any, bool) {
		now, err := harness.QueryValue[string](ctx, pg, fmt.Sprintf(`SELECT coalesce((SELECT a.wait_event || ' ' || r.sent_lsn FROM pg_stat_activity a JOIN pg_stat_replication r USING (pid) WHERE pid = %d), 'nothing')`, pid))
		if err != nil || now != at || !strings.HasPrefix(now, "WalSenderWriteData ") {
			at, since = now, time.Now()
			return fmt.Sprint(now, err), false
		}
		return now, time.Since(since) > 2*time.Second
	})
}

// Role, database and PGOPTIONS ask for other text formats, another zone and
// time-outs that would end a session: the stream looks the same.
func TestPgsourceSessionIsPinned(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{SQL: program + textsProgram})
	execSQL(t, pg, textsSource+`CREATE ROLE bent LOGIN REPLICATION SUPERUSER`)
	for name, value := range map[string]string{
		"datestyle": "'German, DMY'", "intervalstyle": "sql_standard", "bytea_output": "escape", "extra_float_digits": "-15", "timezone": "'Asia/Tokyo'",
		"statement_timeout": "'50ms'", "lock_timeout": "'1ms'", "idle_in_transaction_session_timeout": "'1ms'", "client_encoding": "'LATIN1'",
	} {
		execSQL(t, pg, "ALTER ROLE bent SET "+name+" = "+value)
	}
	execSQL(t, pg, `ALTER DATABASE postgres SET datestyle = 'SQL, DMY'`)
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_TABLES": textsTables,
		"PGSOURCE_DSN":    pg.DSNFor("bent", "", "postgres", pg.Addr()), "PGOPTIONS": "-c datestyle=Postgres -c bytea_output=escape -c statement_timeout=50ms", "PGTZ": "America/Lima",
	}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'süß ☃', 0.10, true, E'ÿ', '\x00ff27', '2026-02-01 03:04:05.000006'), (2, 'b', -1, false, NULL, '\x', '0001-12-31 23:59:59')`)
	execSQL(t, pg, textsStreamed)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	assertTexts(t, sim)
}

// A table whose values have another text under other settings of the session, with
// one row that is copied and one that is streamed.
const (
	textsProgram  = `CREATE TABLE texts (id BIGINT NOT NULL PRIMARY KEY, d DOUBLE, r REAL, i VARCHAR, z TIMESTAMP) WITH ('materialized' = 'true');`
	textsTables   = "public.orders,public.items,public.texts"
	textsSource   = `CREATE TABLE texts (id bigint PRIMARY KEY, d double precision, r real, i interval, z timestamptz); INSERT INTO texts VALUES (1, ` + textsValues + `);`
	textsStreamed = `INSERT INTO texts VALUES (2, ` + textsValues + `)`
	textsValues   = `0.30000000000000004, 0.10000001, '1 year 2 days 03:04:05.6', '2026-02-01 03:04:05.6+09'`
)

func assertTexts(t *testing.T, sim *felderasim.Sim) {
	t.Helper()
	harness.Await(t, patience, "both rows are there", func(context.Context) (any, bool) { n := sim.Count("texts"); return n, n == 2 })
	for _, row := range sim.Rows("texts") {
		got := fmt.Sprintf("%v %v %v %v", row["d"], row["r"], row["i"], row["z"])
		if want := "0.30000000000000004 0.10000001 1 year 2 days 03:04:05.6 2026-01-31 18:04:05.600000"; got != want {
			t.Errorf("row %v is %s, expected %s", row["id"], got, want)
		}
	}
}
