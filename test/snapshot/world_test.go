// Package snapshot_test runs copies of existing rows against a real PostgreSQL
// server and the simulator of Feldera: in the process, where a test holds the
// order of events in its hands, and with pgsource as a process that is killed.
package snapshot_test

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"

	"holdfast/internal/feldera"
	"holdfast/internal/wal"
	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

func TestMain(m *testing.M) {
	flag.Parse()
	goleak.VerifyTestMain(m)
}

// world is a source, a destination and what runs between them.
type world struct {
	t   *testing.T
	pg  *harness.Postgres
	sim *felderasim.Sim
	cfg wal.Config
	// request is the time-out of a request, and its life.
	request time.Duration

	source   *wal.Source
	log      *testLog
	registry *prometheus.Registry
	stop     context.CancelFunc
	ended    chan error
}

// newWorld makes both sides. tables are pairs of a Postgres table, as its
// quoted full name, and a Feldera table. Two semicolons end a transaction.
func newWorld(t *testing.T, settings map[string]string, source, program string, tables ...wal.Table) *world {
	t.Helper()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{Settings: settings})
	w := &world{t: t, pg: pg, request: 5 * time.Second}
	for part := range strings.SplitSeq(source, ";;") { // a slot is made in a transaction of its own
		w.exec(part)
	}
	sim, err := felderasim.New(felderasim.Options{SQL: program, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := sim.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Close(); err != nil {
			t.Errorf("close the simulator: %v", err)
		}
	})
	w.sim = sim
	w.cfg = wal.Config{
		DSN: func() (string, error) { return pg.DSN(), nil }, Slot: "holdfast", Publication: "holdfast", Tables: tables, Create: true,
		BatchRows: 1000, BatchBytes: 1 << 20, InFlight: 4, MemoryLimit: 64 << 20, StallTimeout: time.Minute, ShutdownTimeout: 10 * time.Second,
		State: wal.NewFileStore(filepath.Join(t.TempDir(), "state.json")),
		// Many chunks.
		ChunkTime: 200 * time.Millisecond, ChunkBytes: 16 << 10,
		Truncate: wal.TruncateDeleteAll,
	}
	return w
}

func (w *world) exec(sql string) {
	w.t.Helper()
	if err := w.pg.Exec(w.t.Context(), sql); err != nil {
		w.t.Fatalf("%s: %v", sql, err)
	}
}

// make makes a Source of the configuration.
func (w *world) make() *wal.Source {
	w.t.Helper()
	client, err := feldera.New(feldera.Config{URL: w.sim.URL(), Pipeline: "p", RequestTimeout: w.request, RequestLifetime: w.request, UnansweredLimit: wal.PoisonAttempts})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(client.CloseIdle)
	cfg := w.cfg
	cfg.Pipeline = client
	w.registry = prometheus.NewRegistry()
	cfg.Metrics = wal.NewMetrics(w.registry)
	w.log = &testLog{t: w.t}
	cfg.Logger = slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelInfo}))
	source, err := wal.New(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return source
}

// testLog keeps what a Source says, and shows it with the test's.
type testLog struct {
	t *testing.T

	mu   sync.Mutex
	said strings.Builder
}

func (l *testLog) Write(p []byte) (int, error) {
	l.t.Log(strings.TrimSpace(string(p)))
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.said.Write(p)
}

func (l *testLog) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.said.String(), text)
}

// start runs a Source until finish, or the end of the test.
func (w *world) start() {
	w.t.Helper()
	w.source = w.make()
	ctx, stop := context.WithCancel(w.t.Context())
	w.stop, w.ended = stop, make(chan error, 1)
	source, ended := w.source, w.ended
	go func() { ended <- source.Run(ctx) }()
	w.t.Cleanup(func() {
		if w.stop != nil {
			_ = w.finish() // the test has failed already, or does not ask
		}
	})
}

// finish ends the Source and gives its error.
func (w *world) finish() error {
	w.t.Helper()
	w.stop()
	return w.end()
}

// end waits until the Source has ended by itself.
func (w *world) end() error {
	w.t.Helper()
	w.stop = nil
	select {
	case err := <-w.ended:
		return err
	case <-time.After(patience):
		w.t.Fatal("the source does not end")
	}
	return nil
}

// await waits for a condition while the Source runs.
func (w *world) await(what string, cond func(ctx context.Context) (seen any, done bool)) {
	w.t.Helper()
	ended := false
	harness.Await(w.t, patience, what, func(ctx context.Context) (any, bool) {
		select {
		case err := <-w.ended:
			w.ended <- err
			ended = true
			return err, true
		default:
		}
		return cond(ctx)
	})
	if ended {
		w.t.Fatalf("while waiting until %s the source ended: %v", what, w.end())
	}
}

// copied waits until no copy is under way.
func (w *world) copied() {
	w.t.Helper()
	w.await("everything is copied", func(ctx context.Context) (any, bool) {
		st, err := w.source.LoadState(ctx)
		if err != nil || st == nil {
			return err, false
		}
		return fmt.Sprintf("%+v", st.Copies()), len(st.CopiedTables()) > 0 && len(st.Copies()) == 0
	})
}

// caughtUp waits until everything that is committed at the source is
// acknowledged.
func (w *world) caughtUp() {
	w.t.Helper()
	lsn, err := w.pg.CurrentLSN(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	w.await("the stream has caught up", func(ctx context.Context) (any, bool) {
		got, err := w.pg.ConfirmedFlushLSN(ctx, "holdfast")
		return fmt.Sprint(got, err), err == nil && got >= lsn
	})
}

// metric gives the sum of a metric's samples that have the labels.
func (w *world) metric(name string, labels ...string) (sum float64) {
	w.t.Helper()
	families, err := w.registry.Gather()
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			if has(m, labels) {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

func has(m *dto.Metric, labels []string) bool {
	for _, want := range labels {
		if !slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool { return l.GetName()+"="+l.GetValue() == want }) {
			return false
		}
	}
	return true
}

// equal compares a table by texts: sql gives the rows of the source, columns
// are the destination's. Both are sorted here, byte by byte.
func (w *world) equal(sql, table string, columns ...string) {
	w.t.Helper()
	if diff := w.difference(sql, table, columns...); diff != "" {
		w.t.Fatalf("%s: source and destination differ (-source +destination):\n%.4000s", table, diff)
	}
}

func (w *world) difference(sql, table string, columns ...string) string {
	w.t.Helper()
	want, err := w.pg.Rows(w.t.Context(), sql)
	if err != nil {
		w.t.Fatal(err)
	}
	var got [][]string
	for _, row := range w.sim.Rows(table) {
		texts := make([]string, len(columns))
		for i, c := range columns {
			texts[i] = "-"
			if row[c] != nil {
				texts[i] = fmt.Sprint(row[c])
			}
		}
		got = append(got, texts)
	}
	order := func(a, b []string) int { return slices.Compare(a, b) }
	slices.SortFunc(want, order)
	slices.SortFunc(got, order)
	return cmp.Diff(want, got, cmpopts.EquateEmpty())
}

// walsender gives the process that sends the stream, once there is one.
func (w *world) walsender() int {
	w.t.Helper()
	pid := 0
	w.await("the stream runs", func(ctx context.Context) (any, bool) {
		var err error
		// The session that makes the slot holds it too, before its position stands: a
		// row that is written then is no part of the stream.
		pid, err = harness.QueryValue[int](ctx, w.pg, `SELECT coalesce((SELECT r.pid FROM pg_replication_slots s
			JOIN pg_stat_replication r ON r.pid = s.active_pid WHERE s.slot_name = 'holdfast' AND r.state IN ('catchup', 'streaming')), 0)`)
		return err, err == nil && pid > 0
	})
	return pid
}

// hold stops a process of the server; the function it gives lets it go on.
func (w *world) hold(pid int) (release func()) {
	w.t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		w.t.Fatal(err)
	}
	held := true
	release = func() {
		if held {
			held = false
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
	}
	w.t.Cleanup(release)
	return release
}

// stuck makes every commit wait, from now on, for a standby that is not there;
// the function it gives ends that.
func (w *world) stuck() (release func()) {
	w.t.Helper()
	if err := w.pg.HoldCommits(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
	return func() {
		if err := w.pg.ReleaseCommits(w.t.Context()); err != nil {
			w.t.Fatal(err)
		}
	}
}

// commit runs a statement in a session of its own and gives what it returns
// with, when it does.
func (w *world) commit(sql string) <-chan error {
	w.t.Helper()
	done := make(chan error, 1)
	conn, err := w.pg.Connect(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	go func() {
		_, err := conn.Exec(w.t.Context(), sql)
		_ = conn.Close(context.WithoutCancel(w.t.Context()))
		done <- err
	}()
	return done
}

// waiting waits until so many sessions wait for the standby that is not there.
func (w *world) waiting(n int64) {
	w.t.Helper()
	w.await("the commit is in the WAL and waits", func(ctx context.Context) (any, bool) {
		got, err := harness.QueryValue[int64](ctx, w.pg, `SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`)
		return fmt.Sprint(got, err), err == nil && got >= n
	})
}

// put writes into the destination past everybody.
func (w *world) put(changes string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), http.MethodPost,
		w.sim.URL()+"/v0/pipelines/p/ingress/accounts?format=json&update_format=insert_delete&array=true", strings.NewReader(changes))
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		w.t.Fatalf("the destination answered %s", answer.Status)
	}
}
