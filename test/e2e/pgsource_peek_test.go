package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// pgoutputTap keeps the messages of pgoutput that pass a proxy, by either
// transport: as data of a replication stream, or as rows of a column "data".
type pgoutputTap struct {
	mu       sync.Mutex
	messages [][]byte
}

// ears are for one connection.
func (p *pgoutputTap) ears() [2]func([]byte) {
	var ears [2]func([]byte)
	var rest []byte
	answer := false // rows of an answer to a peek follow
	ears[harness.Up] = func([]byte) {}
	ears[harness.Down] = func(b []byte) {
		rest = append(rest, b...)
		for len(rest) >= 5 {
			n := 1 + int(binary.BigEndian.Uint32(rest[1:]))
			if len(rest) < n {
				return
			}
			kind, body := rest[0], rest[5:n]
			switch kind {
			case 'T':
				answer = bytes.HasPrefix(body, []byte("\x00\x01data\x00"))
			case 'd':
				if m, err := decode.ParseCopy(body); err == nil && m.Kind == decode.CopyXLogData {
					p.add(m.Data)
				}
			case 'D':
				if answer {
					p.add(body[6:]) // behind the number of columns and the length of the first
				}
			}
			rest = rest[n:]
		}
	}
	return ears
}

func (p *pgoutputTap) add(msg []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.messages = append(p.messages, slices.Clone(msg))
}

// log writes what was received, each transaction once, and descriptions only
// where they say something new: a new session of decoding begins with them.
func (p *pgoutputTap) log(t *testing.T) (lines []string, repeated int) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	d, known, last := decode.NewPgOutput(), map[string]string{}, uint64(0)
	var open []string
	for _, raw := range p.messages {
		m, err := d.Decode(raw)
		if err != nil {
			t.Fatalf("%x: %v", raw, err)
		}
		line := string(raw[:1]) + " " + hex.EncodeToString(raw[1:])
		switch m.Kind {
		case decode.MsgBegin:
			open = nil
		case decode.MsgRelation, decode.MsgType:
			key := string(raw[:5])
			if known[key] == line {
				continue
			}
			known[key] = line
		case decode.MsgCommit:
			if m.EndLSN <= last {
				open, repeated = nil, repeated+1
				continue
			}
			last = m.EndLSN
			lines = append(append(lines, open...), line)
			continue
		}
		open = append(open, line)
	}
	return lines, repeated
}

// parityWork changes rows in every way that a stream can tell of.
func parityWork(t *testing.T, pg *harness.Postgres, from int) {
	t.Helper()
	id := func(n int) int { return from + n }
	execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders SELECT i, 'c' || i, i, true, repeat('long', 3000), '\x00ff', '2026-01-02 03:04:05.123456' FROM generate_series(%d, %d) i`, id(0), id(9)))
	execSQL(t, pg, fmt.Sprintf(`UPDATE orders SET amount = -1 WHERE id BETWEEN %d AND %d`, id(0), id(3))) // the long value is not sent again
	execSQL(t, pg, fmt.Sprintf(`UPDATE orders SET id = %d, note = 'short' WHERE id = %d; DELETE FROM orders WHERE id = %d`, id(100), id(1), id(2)))
	execSQL(t, pg, fmt.Sprintf(`BEGIN; INSERT INTO items SELECT i, i, 'sku' FROM generate_series(%d, %d) i; UPDATE orders SET paid = false WHERE id = %d;
		SELECT pg_logical_emit_message(true, 'p', 'in'), pg_logical_emit_message(false, 'q', 'out'); SAVEPOINT a; INSERT INTO items VALUES (%d, 1, 'undone'); ROLLBACK TO a;
		DELETE FROM items WHERE id = %d; COMMIT`, id(0), id(9), id(0), id(50), id(1)))
	execSQL(t, pg, `INSERT INTO other VALUES ('of no publication')`)
	execSQL(t, pg, fmt.Sprintf(`BEGIN; INSERT INTO orders VALUES (%d, 'never', 1, true); ROLLBACK`, id(60)))
	execSQL(t, pg, `TRUNCATE items`)
	execSQL(t, pg, fmt.Sprintf(`ALTER TABLE items ALTER sku TYPE varchar(%d); INSERT INTO items VALUES (%d, 1, 'new shape')`, 100+from/1000, id(70)))
	// Larger than an answer and than the memory.
	execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders SELECT i, repeat('x', 40), i, true FROM generate_series(%d, %d) i`, id(100_000), id(160_000)))
	// Two that overlap: the one that began later commits first.
	ctx := t.Context()
	early, err := pg.Connect(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = early.Close(context.WithoutCancel(ctx)) }()
	do := func(sql string) {
		t.Helper()
		if _, err := early.PgConn().Exec(ctx, sql).ReadAll(); err != nil {
			t.Fatal(err)
		}
	}
	do(fmt.Sprintf(`BEGIN; INSERT INTO orders VALUES (%d, 'began first', 1, true)`, id(80)))
	execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'committed first', 1, true)`, id(81)))
	do(fmt.Sprintf(`UPDATE orders SET customer = 'still open' WHERE id = %d; COMMIT`, id(80)))
	for i := range 30 { // small ones
		execSQL(t, pg, fmt.Sprintf(`INSERT INTO items VALUES (%d, 1, 's'); UPDATE items SET sku = 't' WHERE id = %d`, id(1000+i), id(1000+i)))
	}
}

// One workload, read by both transports from two slots: the same messages with
// the same positions in the same order, and the same tables in the end. First
// what waits in the slots, then live.
func TestPgsourcePeekParity(t *testing.T) {
	t.Parallel()
	pg := startPostgres(t, nil)
	execSQL(t, pg, `CREATE TABLE other (t text); ALTER TABLE orders ALTER note SET STORAGE EXTERNAL`)
	execSQL(t, pg, `CREATE PUBLICATION holdfast FOR TABLE orders, items WITH (publish_via_partition_root = true)`)
	transports := []string{"stream", "peek"}
	for _, slot := range transports {
		execSQL(t, pg, `SELECT pg_create_logical_replication_slot('`+slot+`', 'pgoutput')`)
	}
	parityWork(t, pg, 0)
	taps, sims, daemons := map[string]*pgoutputTap{}, map[string]*felderasim.Sim{}, map[string]*harness.Daemon{}
	for _, slot := range transports {
		taps[slot], sims[slot] = new(pgoutputTap), startSim(t, felderasim.Options{})
		proxy := harness.NeedProxy(t, pg.Addr())
		proxy.Tap(taps[slot].ears)
		daemons[slot] = startPgsource(t, merged(pgsourceEnv(pg, sims[slot]), map[string]string{
			"PGSOURCE_DSN": pg.DSNFor("postgres", "", "postgres", proxy.Addr()), "PGSOURCE_SLOT": slot, "PGSOURCE_TRANSPORT": slot,
			"PGSOURCE_STATE": "file:" + t.TempDir() + "/state.json", "PGSOURCE_TRUNCATE": "delete_all", "PGSOURCE_MEMORY_LIMIT": "4MiB", "PGSOURCE_BATCH_BYTES": "1MiB",
		}))
	}
	compare := func(round string) {
		t.Helper()
		end := currentLSN(t, pg)
		for _, slot := range transports {
			awaitSlot(t, pg, slot, end)
			assertEqualTables(t, pg, sims[slot])
		}
		streamed, _ := taps["stream"].log(t)
		peeked, repeated := taps["peek"].log(t)
		t.Logf("%s: %d messages by stream, %d by peek; %d transactions were repeated in answers", round, len(streamed), len(peeked), repeated)
		for i := range max(len(streamed), len(peeked)) {
			if i >= len(streamed) || i >= len(peeked) || streamed[i] != peeked[i] {
				t.Fatalf("%s: message %d of %d and %d differs:\n%.300s\n%.300s", round, i, len(streamed), len(peeked), at(streamed, i), at(peeked, i))
			}
		}
	}
	compare("backlog")
	parityWork(t, pg, 1_000_000)
	compare("live")
	new, repeated := metric(t, daemons["peek"], "pgsource_peek_messages_total", map[string]string{"kind": "new"}), metric(t, daemons["peek"], "pgsource_peek_messages_total", map[string]string{"kind": "repeated"})
	if new < 120_000 || repeated > 2*new {
		t.Errorf("%v new messages, %v repeated ones", new, repeated)
	}
	if n := metric(t, daemons["peek"], "pgsource_spilled_transactions_total", nil); n < 1 {
		t.Errorf("%v transactions were spilled: memory did not hold", n)
	}
}

func at(lines []string, i int) string {
	if i >= len(lines) {
		return "(none)"
	}
	return lines[i]
}

// An idle publication in a busy database does not hold WAL back, nothing is sent
// for it, and the server's shutdown or crash is no trouble: a slot's position
// that it had not written down yet is told again.
func TestPgsourcePeekIdlePublication(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE TABLE other (t text)`)
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TRANSPORT": "peek"}))
	waitHealthy(t, d)
	kept := func(ctx context.Context) (uint64, error) {
		return harness.QueryValue[uint64](ctx, pg, `SELECT (restart_lsn - '0/0')::int8 FROM pg_replication_slots WHERE slot_name = 'holdfast'`)
	}
	for range 3 {
		execSQL(t, pg, `INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 1000)`)
		wrote := currentLSN(t, pg)
		awaitConfirmed(t, pg, wrote)
		harness.Await(t, patience, "the slot lets go of WAL", func(ctx context.Context) (any, bool) {
			if err := pg.Exec(ctx, `CHECKPOINT`); err != nil { // which logs what restarts need
				return err, false
			}
			at, err := kept(ctx)
			return fmt.Sprint(at, err), err == nil && at >= wrote
		})
	}
	if n := sim.Counters().Requests; n != 0 {
		t.Fatalf("%d requests for nothing", n)
	}
	if err := pg.Restart(t.Context(), harness.Fast); err != nil {
		t.Fatalf("a fast shutdown is held up: %v", err)
	}
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'after', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if err := pg.Restart(t.Context(), harness.Immediate); err != nil {
		t.Fatal(err)
	}
	execSQL(t, pg, `INSERT INTO items VALUES (1, 1, 'after the crash')`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	if n := sim.Counters().Records; n != 2 {
		t.Errorf("%d records were sent, want the two", n)
	}
	_, page, err := d.Get(t.Context(), "/status.json")
	if err != nil || !strings.Contains(string(page), "PGSOURCE_TRANSPORT=peek") {
		t.Errorf("the status page does not show the transport: %v\n%s", err, page)
	}
}

// Nothing moves before it is completed; what is completed during a stop is told;
// what was read and is not acknowledged is not sent twice by the same process.
func TestPgsourcePeekWaitsForCompletion(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TRANSPORT": "peek", "PGSOURCE_PEEK_INTERVAL": "20ms", "PGSOURCE_IN_FLIGHT": "100"}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	sim.HoldCompletion()
	start := currentLSN(t, pg)
	for i := range 20 {
		execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'held', 1, true); SELECT pg_logical_emit_message(false, 'other', 'wal')`, 10+i))
		waitSim(t, sim, "the row is accepted", func(v felderasim.View) bool { return v.Counters().Records == int64(i)+2 })
		if got := confirmed(t, pg); got > start {
			t.Fatalf("confirmed_flush_lsn moved to %s with the transaction after %s not completed", decode.FormatLSN(got), decode.FormatLSN(start))
		}
	}
	end := currentLSN(t, pg)
	if n := metric(t, d, "pgsource_peek_messages_total", map[string]string{"kind": "repeated"}); n < 100 {
		t.Errorf("%v messages were repeated: this test shows nothing", n)
	}
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.WaitLog(ctx, regexp.MustCompile("finishing what is in flight")); err != nil {
		t.Fatal(err)
	}
	sim.ReleaseCompletion()
	awaitEnd(t, d, 0)
	if got := confirmed(t, pg); got < end-8192 {
		t.Errorf("what completed during the stop was not confirmed: %s, want about %s", decode.FormatLSN(got), decode.FormatLSN(end))
	}
	if n := sim.Counters().Records; n != 21 {
		t.Errorf("%d records were sent, want each once", n)
	}
	assertEqualTables(t, pg, sim)
}

// Through a pooler that gives each transaction to another session, with
// defaults of the role that would spoil the text of every value, and a time-out
// for statements. The replication protocol does not get through, and the
// refusal says what does.
func TestPgsourcePeekThroughAPooler(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{SQL: program + textsProgram})
	execSQL(t, pg, `ALTER ROLE postgres SET datestyle = 'German'; ALTER ROLE postgres SET bytea_output = 'escape'; ALTER ROLE postgres SET intervalstyle = 'sql_standard';
		ALTER ROLE postgres SET extra_float_digits = 0; ALTER ROLE postgres SET timezone = 'Asia/Kolkata'; ALTER ROLE postgres SET default_transaction_isolation = 'serializable'`)
	execSQL(t, pg, textsSource)
	execSQL(t, pg, `INSERT INTO orders SELECT -i, 'before the slot', i / 7.0, true, E'tab\t', '\x00ff5c', '2026-12-31 23:59:59.123456' FROM generate_series(1, 500) i`)
	pooler := harness.NeedPgBouncer(t, pg, "transaction", 3)
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_DSN": pg.DSNFor("postgres", "", "postgres", pooler.Addr()), "PGSOURCE_TABLES": textsTables})
	wants(t, runCheck(t, env), 65, "a connection pooler answered", "PGSOURCE_TRANSPORT=peek")

	env["PGSOURCE_TRANSPORT"] = "peek"
	d := startPgsource(t, env)
	waitHealthy(t, d)
	wants(t, runCheck(t, env), 0, "not needed with PGSOURCE_TRANSPORT=peek")
	for round := range 3 {
		execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders SELECT i, 'a "quoted" \ one', i / 7.0, true, E'tab\t', '\x00ff5c', '2026-12-31 23:59:59.123456' FROM generate_series(%d, %d) i;
			INSERT INTO items SELECT i, i, 's' FROM generate_series(%d, %d) i`, round*1000, round*1000+499, round*1000, round*1000+499))
		execSQL(t, pg, fmt.Sprintf(`UPDATE orders SET id = id + 500 WHERE id %% 7 = 3 AND id BETWEEN %d AND %d; DELETE FROM items WHERE id %% 5 = 1`, round*1000, round*1000+499))
		if round == 1 {
			d.Kill()
			if err := d.Restart(nil); err != nil {
				t.Fatal(err)
			}
		}
		awaitConfirmed(t, pg, currentLSN(t, pg))
		assertEqualTables(t, pg, sim)
	}
	execSQL(t, pg, textsStreamed)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertTexts(t, sim)
	// Other reads of rows behind the pooler have the same text.
	if got := runVerb(t, env, "verify"); got.ExitCode != 0 {
		t.Errorf("verify ends with %d:\n%s%s", got.ExitCode, got.Stdout, got.Stderr)
	}
	stopClean(t, d)
	if n := walsender(t, pg); n != 0 {
		t.Errorf("process %d uses the slot after the stop", n)
	}
}

// What an earlier client of a pooler has set does not decide about the text of
// names and money either.
func TestPgsourcePeekIgnoresAnothersSettings(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE SCHEMA other; CREATE TABLE other.names (id bigint PRIMARY KEY, name regclass)`)
	sim := startSim(t, felderasim.Options{SQL: `CREATE TABLE names (id BIGINT NOT NULL PRIMARY KEY, name VARCHAR)`})
	pooler := harness.NeedPgBouncer(t, pg, "transaction", 1)
	dsn := pg.DSNFor("postgres", "", "postgres", pooler.Addr())
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": "other.names=names", "PGSOURCE_DSN": dsn, "PGSOURCE_TRANSPORT": "peek"}))
	waitHealthy(t, d)
	conn, err := pgconn.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), `SET search_path = other`).ReadAll(); err != nil {
		t.Fatal(err)
	}
	execSQL(t, pg, `INSERT INTO other.names VALUES (1, 'other.names')`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if got := fmt.Sprint(rows(sim, "names", "id", "name")); got != "[[1 other.names]]" {
		t.Errorf("the table holds %s", got)
	}
}

// A call that fails in the middle leaves a session of the server behind that
// believes to have described its relations (seen on PostgreSQL 14). A pooler
// gives that session to pgsource, which must not read the rows without.
func TestPgsourcePeekAfterAnInterruptedCall(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TRANSPORT": "peek"})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	stopClean(t, d)
	execSQL(t, pg, `INSERT INTO orders SELECT i, 'c', i, true FROM generate_series(1, 5000) i; INSERT INTO items VALUES (1, 1, 's')`)
	pooler := harness.NeedPgBouncer(t, pg, "transaction", 1)
	conn, err := pgconn.Connect(t.Context(), pg.DSNFor("postgres", "", "postgres", pooler.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	_, err = conn.Exec(t.Context(), `BEGIN; SET LOCAL work_mem = '64kB'; SET LOCAL temp_file_limit = 0;
		SELECT count(*) FROM pg_logical_slot_peek_binary_changes('holdfast', NULL, NULL, 'proto_version', '1', 'publication_names', 'holdfast')`).ReadAll()
	if err == nil || !strings.Contains(err.Error(), "temporary file size exceeds") {
		t.Fatalf("the call was to fail in the middle: %v", err)
	}
	if _, err := conn.Exec(t.Context(), `ROLLBACK`).ReadAll(); err != nil { // or the pooler would end the session
		t.Fatal(err)
	}
	if err := conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.Restart(map[string]string{"PGSOURCE_DSN": pg.DSNFor("postgres", "", "postgres", pooler.Addr())}); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
	left := strings.Contains(strings.Join(d.Log().Tail(1000), "\n"), "left out the description of relation")
	t.Logf("the server left descriptions out: %t", left)
	if major(t, pg) == 14 && !left {
		t.Error("this server was to leave descriptions out: the test shows nothing")
	}
	stopClean(t, d)

	// An answer that the server may not collect is refused with what mends it.
	execSQL(t, pg, `INSERT INTO orders SELECT i, repeat('c', 300), i, true FROM generate_series(10001, 15000) i`)
	execSQL(t, pg, `ALTER ROLE postgres SET work_mem = '64kB'; ALTER ROLE postgres SET temp_file_limit = '512kB'`)
	if err := d.Restart(map[string]string{"PGSOURCE_DSN": pg.DSN()}); err != nil {
		t.Fatal(err)
	}
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "raise temp_file_limit") {
		t.Errorf("it says:\n%s", said)
	}
}

// The slot belongs to one reader here too: while somebody else has it, pgsource
// says who and waits; when somebody has moved it, it stops with what is lost.
func TestPgsourcePeekSharesNoSlot(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	slot := strings.Repeat("long_", 12) + "abc" // as long as a name can be
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TRANSPORT": "peek", "PGSOURCE_SLOT": slot})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
	awaitSlot(t, pg, slot, currentLSN(t, pg))
	wants(t, runVerb(t, env, "slot", "drop", "-yes"), 65, "which reads it from time to time", "stop that pgsource first")

	ctx := t.Context()
	conn, err := pgconn.Connect(ctx, pg.DSN()+"&replication=database&application_name=intruder")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	harness.Await(t, patience, "another reader gets the slot", func(ctx context.Context) (any, bool) {
		err := pglogrepl.StartReplication(ctx, conn, slot, 0, pglogrepl.StartReplicationOptions{PluginArgs: []string{"proto_version '1'", "publication_names 'holdfast'"}})
		return err, err == nil
	})
	health(t, d, "it says who has the slot", func(_ int, body string) bool {
		return strings.Contains(body, "intruder") && strings.Contains(body, "which is no pgsource")
	})
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'meanwhile', 1, true)`)
	_ = conn.Close(ctx)
	awaitSlot(t, pg, slot, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)

	// One transaction that cannot be completed, so that the slot stays behind
	// it, and somebody who moves the slot over it.
	sim.HoldCompletion()
	execSQL(t, pg, `INSERT INTO orders VALUES (3, 'held', 1, true)`)
	waitSim(t, sim, "the row is accepted", func(v felderasim.View) bool { return v.Counters().Records >= 3 })
	harness.Await(t, patience, "somebody moves the slot", func(ctx context.Context) (any, bool) {
		err := pg.Exec(ctx, `SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())`, slot)
		return err, err == nil
	})
	sim.ReleaseCompletion() // what it could tell now would hide the gap
	if said := awaitEnd(t, d, 65); !strings.Contains(said, "somebody advanced it or made it anew") {
		t.Errorf("it says:\n%s", said)
	}
}

// What plain SQL cannot do is refused before anything is read: a role without
// REPLICATION or without the functions, and a standby.
func TestPgsourcePeekRefuses(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, map[string]string{"hot_standby_feedback": "on"}), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE ROLE plain LOGIN; CREATE ROLE limited LOGIN REPLICATION; REVOKE EXECUTE ON FUNCTION pg_replication_slot_advance(name, pg_lsn) FROM PUBLIC;
		CREATE PUBLICATION holdfast FOR TABLE orders, items WITH (publish_via_partition_root = true)`)
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TRANSPORT": "peek", "PGSOURCE_CREATE": "false"})
	as := func(role string) map[string]string {
		return merged(env, map[string]string{"PGSOURCE_DSN": pg.DSNFor(role, "", "postgres", pg.Addr())})
	}
	wants(t, runCheck(t, as("plain")), 65, "it may not replicate", "ALTER ROLE")
	wants(t, runCheck(t, as("limited")), 65, "it may not call pg_replication_slot_advance", "GRANT EXECUTE ON FUNCTION")
	execSQL(t, pg, `GRANT EXECUTE ON FUNCTION pg_replication_slot_advance(name, pg_lsn) TO limited`)
	wants(t, runCheck(t, as("limited")), 0)
	standby := pg.NeedStandby(t)
	if err := standby.AwaitReplayed(t.Context(), currentLSN(t, pg)); err != nil {
		t.Fatal(err)
	}
	wants(t, runCheck(t, merged(env, map[string]string{"PGSOURCE_DSN": standby.DSN()})), 65, "it is a standby")
}

// After a promotion the new timeline's history decides whether the server has
// everything. Plain SQL shows it to few roles: the others are refused, and one
// start by the replication protocol settles it.
func TestPgsourcePeekFollowsAPromotion(t *testing.T) {
	t.Parallel()
	f := startFailover(t)
	stopClean(t, f.d)
	execSQL(t, f.pg, `CREATE ROLE reader LOGIN REPLICATION`)
	if err := f.standby.AwaitReplayed(t.Context(), currentLSN(t, f.pg)); err != nil {
		t.Fatal(err)
	}
	reader := f.pg.DSNFor("reader", "", "postgres", f.proxy.Addr())
	if err := f.d.Restart(map[string]string{"PGSOURCE_TRANSPORT": "peek", "PGSOURCE_DSN": reader}); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, f.d)
	execSQL(t, f.pg, `INSERT INTO orders VALUES (2, 'on the old primary', 1, true)`)
	awaitConfirmed(t, f.pg, currentLSN(t, f.pg))
	if err := f.standby.AwaitReplayed(t.Context(), currentLSN(t, f.pg)); err != nil {
		t.Fatal(err)
	}
	f.promote(t)
	execSQL(t, f.standby, `INSERT INTO orders VALUES (3, 'on the new primary', 1, true)`)
	if said := awaitEnd(t, f.d, 65); !strings.Contains(said, "may not read where the timeline before it ended") || !strings.Contains(said, "PGSOURCE_TRANSPORT=stream") {
		t.Errorf("it says:\n%s", said)
	}
	if err := f.d.Restart(map[string]string{"PGSOURCE_TRANSPORT": "stream"}); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, f.standby, currentLSN(t, f.standby))
	stopClean(t, f.d)
	execSQL(t, f.standby, `INSERT INTO orders VALUES (4, 'peeked at on the new timeline', 1, true)`)
	if err := f.d.Restart(map[string]string{"PGSOURCE_TRANSPORT": "peek"}); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, f.standby, currentLSN(t, f.standby))
	assertEqualTables(t, f.standby, f.sim)
	if n := f.sim.Counters().Records; n != 4 {
		t.Errorf("%d records were sent, want each once", n)
	}
}

// After a kill, what may have been sent before is sent again as one, when all of
// it is received. That may be more than one answer has.
func TestPgsourcePeekReplaysMoreThanAnAnswer(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_TRANSPORT": "peek", "PGSOURCE_BATCH_ROWS": "100000", "PGSOURCE_BATCH_BYTES": "32MiB",
	}))
	waitHealthy(t, d)
	sim.HoldCompletion()
	const many = 50_100
	execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders SELECT i, 'c', i, true FROM generate_series(1, %d) i`, many))
	waitSim(t, sim, "the first one is accepted", func(v felderasim.View) bool { return v.Counters().Records >= many })
	execSQL(t, pg, `INSERT INTO orders VALUES (100001, 'behind', 1, true)`)
	// No more is asked for before something is acknowledged, but for a replay.
	d.Kill()
	sim.ReleaseCompletion()
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	assertEqualTables(t, pg, sim)
}

// A transaction that the server cannot give holds up none that was committed
// before it, and is named by what is before it: an answer with both fails whole.
func TestPgsourcePeekFindsWhatCannotBeRead(t *testing.T) {
	t.Parallel()
	pg, sim := harness.NeedPostgres(t, harness.PostgresOptions{}), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE DATABASE raw ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'`)
	raw := session(t, pg, "raw")
	execOn(t, raw, sourceTables)
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_TRANSPORT": "peek", "PGSOURCE_DSN": pg.DSNFor("postgres", "", "raw", pg.Addr()),
	}))
	waitHealthy(t, d)
	stopClean(t, d)
	for i := range 20 {
		execOn(t, raw, fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'süß', 1, true)`, i+1))
	}
	good := currentLSN(t, pg)
	execOn(t, raw, `INSERT INTO orders VALUES (100, convert_from('\xff'::bytea, 'SQL_ASCII'), 1, true)`)
	execOn(t, raw, `INSERT INTO orders VALUES (101, 'behind', 1, true)`)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	said := awaitEnd(t, d, 65)
	for _, part := range []string{"LSN behind ", "22021", "SQL_ASCII"} {
		if !strings.Contains(said, part) {
			t.Errorf("it does not say %q:\n%s", part, said)
		}
	}
	if got := len(rows(sim, "orders", "id")); got != 20 {
		t.Errorf("%d orders are delivered, want the 20 before it", got)
	}
	if got := confirmed(t, pg); got < good-128 || got > currentLSN(t, pg) {
		t.Errorf("confirmed %d, the readable ones end at %d", got, good)
	}
}
