package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// walsender gives the process that serves the slot, 0 for none.
func walsender(t *testing.T, pg *harness.Postgres) int32 {
	t.Helper()
	pid, err := harness.QueryValue[int32](t.Context(), pg, `SELECT coalesce((SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'holdfast'), 0)`)
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// throughProxies gives the connection string of the cluster behind several
// proxies, tried in this order.
func throughProxies(pg *harness.Postgres, proxies ...*harness.Proxy) string {
	addrs := make([]string, len(proxies))
	for i, p := range proxies {
		addrs[i] = p.Addr()
	}
	return (&url.URL{
		Scheme: "postgres", User: url.User("postgres"), Host: strings.Join(addrs, ","), Path: "/postgres", RawQuery: "sslmode=disable&connect_timeout=2",
	}).String()
}

// The network swallows everything without a word, on one of two ways to the
// server: pgsource notices by the silence of the wire, comes back the other
// way, and ends its own walsender, which still waits at the dead end. The
// server by itself would wait for ten minutes.
func TestPgsourceSlotHeldByOwnZombie(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, map[string]string{"wal_sender_timeout": "10min"}), startSim(t, felderasim.Options{})
	first, second := harness.NeedProxy(t, pg.Addr()), harness.NeedProxy(t, pg.Addr())
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_DSN": throughProxies(pg, first, second), "PGSOURCE_STALL_TIMEOUT": "5s",
	}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	zombie := walsender(t, pg)

	began := time.Now()
	first.Stall()
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'behind the dead end', 1, true)`)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := d.WaitLog(ctx, regexp.MustCompile("nothing was heard from the server")); err != nil {
		t.Fatal(err)
	}
	t.Logf("the silence was noticed after %v, with PGSOURCE_STALL_TIMEOUT=5s", time.Since(began).Round(time.Millisecond))
	awaitConfirmed(t, pg, currentLSN(t, pg))
	t.Logf("the rows behind the dead end were confirmed after %v", time.Since(began).Round(time.Millisecond))
	assertEqualTables(t, pg, sim)
	if now := walsender(t, pg); now == zombie || now == 0 {
		t.Errorf("walsender %d, before %d", now, zombie)
	}
	if n, err := d.Metric(t.Context(), "pgsource_takeovers_total", nil); err != nil || n != 1 {
		t.Errorf("pgsource_takeovers_total is %v (%v)", n, err)
	}
}

// A second pgsource waits while the first one lives, however long that is, and
// takes the slot when the first one has been silent for long enough. The first
// one, when it wakes up, does not take it back.
func TestPgsourceSlotHeldByAnother(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, map[string]string{"wal_sender_timeout": "10min"}), startSim(t, felderasim.Options{})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TAKEOVER_AFTER": "15s"})
	first := startPgsource(t, merged(env, map[string]string{"PGSOURCE_STATE": "file:" + t.TempDir() + "/state.json"}))
	waitHealthy(t, first)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'by the first', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	holder := walsender(t, pg)

	// It has a state of its own: with the first one's it would not even start.
	second := startPgsource(t, merged(env, map[string]string{"PGSOURCE_STATE": "file:" + t.TempDir() + "/state.json"}))
	health(t, second, "the second one says who holds the slot", func(status int, body string) bool {
		return strings.Contains(body, "another pgsource") && strings.Contains(body, "holdfast/") && status == 200
	})
	// Watched for longer than TAKEOVER_AFTER: a pgsource that lives is not
	// ended, although it has nothing to do.
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); {
		execSQL(t, pg, `SELECT pg_sleep(0.5)`)
		if now := walsender(t, pg); now != holder {
			t.Fatalf("the walsender of the first one, %d, was ended while it lived (now %d)", holder, now)
		}
	}

	if err := first.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped := time.Now()
	waitHealthy(t, second)
	t.Logf("taken over %v after the first one fell silent", time.Since(stopped).Round(time.Millisecond))
	execSQL(t, pg, `INSERT INTO orders VALUES (2, 'by the second', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	taken := walsender(t, pg)

	if err := first.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if code, err := first.Wait(ctx); err != nil || code != 65 {
		t.Fatalf("the first one goes on although another has moved the slot: code %d, %v", code, err)
	}
	if now := walsender(t, pg); now != taken {
		t.Errorf("the walsender of the second one, %d, was ended (now %d)", taken, now)
	}
	assertEqualTables(t, pg, sim)
}

// What this role may not see of another pgsource is no silence: the one that
// lives is not ended, although the role may end sessions.
func TestPgsourceSlotHeldOutOfSight(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE ROLE one LOGIN REPLICATION; CREATE ROLE two LOGIN REPLICATION; GRANT pg_signal_backend TO two;
		CREATE PUBLICATION holdfast FOR TABLE orders, items WITH (publish_via_partition_root = true)`)
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	as := func(role string) map[string]string {
		return merged(pgsourceEnv(pg, sim), map[string]string{
			"PGSOURCE_DSN": pg.DSNFor(role, "", "postgres", pg.Addr()), "PGSOURCE_CREATE": "false", "PGSOURCE_TAKEOVER_AFTER": "15s",
			"PGSOURCE_STATE": "file:" + t.TempDir() + "/state.json",
		})
	}
	waitHealthy(t, startPgsource(t, as("one")))
	holder := walsender(t, pg)
	second := startPgsource(t, as("two"))
	health(t, second, "the second one says what it cannot see", func(_ int, body string) bool {
		return strings.Contains(body, "another pgsource") && strings.Contains(body, "pg_read_all_stats TO")
	})
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); { // longer than TAKEOVER_AFTER
		execSQL(t, pg, `SELECT pg_sleep(0.5)`)
		if now := walsender(t, pg); now != holder {
			t.Fatalf("the walsender of the first one, %d, was ended while it lived (now %d)", holder, now)
		}
	}
}

// Whoever is no pgsource is never ended, only named.
func TestPgsourceSlotHeldByAStranger(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE PUBLICATION holdfast FOR TABLE orders, items`)
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	cfg, err := pgconn.ParseConfig(pg.DSN() + "&replication=database&application_name=stranger")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pgconn.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	err = pglogrepl.StartReplication(t.Context(), conn, "holdfast", 0, pglogrepl.StartReplicationOptions{
		Mode: pglogrepl.LogicalReplication, PluginArgs: []string{"proto_version '1'", "publication_names 'holdfast'"},
	})
	if err != nil {
		t.Fatal(err)
	}
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_CREATE": "false"}))
	health(t, d, "the stranger is named", func(_ int, body string) bool {
		return strings.Contains(body, "stranger") && strings.Contains(body, "no pgsource")
	})
	if err := conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
}

// Nobody is let in any more while the stream goes on: the slot is not watched then,
// which the log, the check and a metric say, and nothing stops for it.
func TestPgsourceSaysThatItCannotLook(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	execSQL(t, pg, `CREATE ROLE app LOGIN REPLICATION PASSWORD 'app'; CREATE PUBLICATION holdfast FOR TABLE orders, items WITH (publish_via_partition_root = true)`)
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_DSN": pg.DSNFor("app", "app", "postgres", pg.Addr()), "PGSOURCE_CREATE": "false", "PGSOURCE_SNAPSHOT": "never",
	}))
	waitHealthy(t, d)
	age := func(what string, cond func(seconds float64) bool) {
		t.Helper()
		harness.Await(t, patience, what, func(ctx context.Context) (any, bool) {
			seconds, err := d.Metric(ctx, "pgsource_slot_look_age_seconds", nil)
			return fmt.Sprint(seconds, err), err == nil && cond(seconds)
		})
	}
	health(t, d, "the slot is looked at", func(_ int, body string) bool { return strings.Contains(body, "reserved") })
	execSQL(t, pg, `ALTER ROLE app CONNECTION LIMIT 0`)
	health(t, d, "it says that it cannot look", func(status int, body string) bool {
		return status == 200 && strings.Contains(body, "could not be looked at since") && strings.Contains(body, "too many connections for role") && strings.Contains(body, `"phase":"streaming"`)
	})
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'unwatched', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	age("its age grows", func(seconds float64) bool { return seconds > 15 })
	if status, body, err := d.Get(t.Context(), "/readyz"); err != nil || status != 200 {
		t.Errorf("it is not ready: %d %s %v", status, body, err)
	}
	execSQL(t, pg, `ALTER ROLE app CONNECTION LIMIT -1`)
	age("it looks again", func(seconds float64) bool { return seconds < 11 })
	health(t, d, "the check is in order again", func(_ int, body string) bool { return !strings.Contains(body, "could not be looked at") })
	log := strings.Join(d.Log().Tail(1000), "\n")
	if n := strings.Count(log, "msg=failing what=slot"); n != 1 {
		t.Errorf("the log says %d times that it fails:\n%s", n, log)
	}
	if !strings.Contains(log, `msg="works again" what=slot`) {
		t.Errorf("the log does not say that it works again:\n%s", log)
	}
}

// The slot is dropped and made anew between the look at it and START_REPLICATION,
// which would then begin behind what came in between, without a word.
func TestPgsourceNoticesAGapAtTheLastMoment(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	proxy := harness.NeedProxy(t, pg.Addr())
	var armed atomic.Bool
	done := make(chan error, 1)
	proxy.Tap(func() (taps [2]func([]byte)) {
		taps[harness.Up] = func(b []byte) {
			if !bytes.Contains(b, []byte("START_REPLICATION")) || !armed.CompareAndSwap(true, false) {
				return
			}
			done <- harness.Eventually(t.Context(), "the slot is made anew", func(ctx context.Context) (any, bool) {
				// The walsender before may not have noticed yet that its connection is cut.
				err := pg.Exec(ctx, `SELECT pg_drop_replication_slot('holdfast')`)
				return err, err == nil
			})
			for _, sql := range []string{`INSERT INTO orders VALUES (2, 'in the gap', 1, true)`, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`} {
				if err := pg.Exec(t.Context(), sql); err != nil {
					t.Error(err)
				}
			}
		}
		return taps
	})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_DSN": throughProxies(pg, proxy)}))
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	armed.Store(true)
	proxy.Cut()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	awaitEnd(t, d, 65)
}
