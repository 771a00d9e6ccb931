// Package life_test measures how fast both daemons come up and go down, as the
// processes that are shipped (no race detector), against a real PostgreSQL
// cluster, a real Kafka broker and the simulator of Feldera.
package life_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.uber.org/goleak"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	// patience bounds each wait for something that must happen.
	patience = 60 * time.Second

	// readyWithin is from the start of the process to 200 of /readyz, with all
	// peers up and the last stop in order.
	readyWithin = time.Second
	// secondSignalWithin is from the second signal to the end of the process.
	secondSignalWithin = 100 * time.Millisecond
	// drainTimeout is what the daemons are told, and drainSlack what ending may
	// take beyond it: leaving the group or the slot, and the endpoints' last
	// answers. It is generous for a machine that runs other tests.
	drainTimeout = 2 * time.Second
	drainSlack   = 3 * time.Second

	// rounds is how often the short times are measured. The best of them counts:
	// a busy machine makes a round slow, and nothing makes one fast.
	rounds = 5
)

const program = `CREATE TABLE orders (id BIGINT NOT NULL PRIMARY KEY, customer VARCHAR) WITH ('materialized' = 'true');
CREATE TABLE payments (id BIGINT NOT NULL PRIMARY KEY, customer VARCHAR) WITH ('materialized' = 'true');`

// subject is one daemon with its peers.
type subject struct {
	name   string
	sim    *felderasim.Sim
	env    map[string]string
	change func(t *testing.T, id int) // makes one row change at the source
	drain  string                     // the setting for the drain deadline
}

func (s *subject) start(t *testing.T, changes map[string]string) *harness.Daemon {
	t.Helper()
	env := map[string]string{"FELDERA_URL": s.sim.URL(), "FELDERA_PIPELINE": "p", "FELDERA_REQUEST_TIMEOUT": "1s", "FELDERA_REQUEST_LIFETIME": "1s"}
	for _, from := range []map[string]string{s.env, changes} {
		for name, value := range from {
			env[name] = value
		}
	}
	return harness.NeedDaemon(t, "./cmd/"+s.name, harness.BuildOptions{}, harness.DaemonOptions{Env: env, ListenVar: strings.ToUpper(s.name) + "_LISTEN"})
}

// pipeline gives a subject a pipeline of its own: what a second signal leaves open
// in it is no concern of the next one.
func pipeline(t *testing.T) *felderasim.Sim {
	t.Helper()
	sim, err := felderasim.New(felderasim.Options{SQL: program, Pipeline: "p", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := sim.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Close(); err != nil {
			t.Error(err)
		}
	})
	return sim
}

func subjects(t *testing.T) []*subject {
	t.Helper()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	if err := pg.Exec(t.Context(), "CREATE TABLE orders (id bigint PRIMARY KEY, customer text)"); err != nil {
		t.Fatal(err)
	}
	kafka := harness.NeedKafka(t, harness.KafkaOptions{})
	if err := kafka.CreateTopic(t.Context(), "payments", 3, nil); err != nil {
		t.Fatal(err)
	}
	return []*subject{
		{
			name: "pgsource", sim: pipeline(t), drain: "PGSOURCE_SHUTDOWN_TIMEOUT",
			env: map[string]string{
				"PGSOURCE_DSN": pg.DSN(), "PGSOURCE_TABLES": "public.orders", "PGSOURCE_CREATE": "true",
				"PGSOURCE_STATE": "file:" + filepath.Join(t.TempDir(), "state.json"), "PGSOURCE_SPILL_DIR": t.TempDir(),
			},
			change: func(t *testing.T, id int) {
				t.Helper()
				if err := pg.Exec(t.Context(), fmt.Sprintf("INSERT INTO orders VALUES (%d, 'x')", id)); err != nil {
					t.Fatal(err)
				}
			},
		},
		{
			name: "kafkasink", sim: pipeline(t), drain: "KAFKASINK_DRAIN_TIMEOUT",
			env: map[string]string{
				"KAFKASINK_BROKERS": strings.Join(kafka.Seeds, ","), "KAFKASINK_TOPICS": "payments=payments:json", "KAFKASINK_GROUP": "life",
			},
			change: func(t *testing.T, id int) {
				t.Helper()
				if err := kafka.Produce(t.Context(), &kgo.Record{Topic: "payments", Value: fmt.Appendf(nil, `{"id":%d,"customer":"x"}`, id)}); err != nil {
					t.Fatal(err)
				}
			},
		},
	}
}

// One after the other: they are measured.
func TestLife(t *testing.T) {
	for i, s := range subjects(t) {
		id := i * 1000
		row := func(t *testing.T) {
			t.Helper()
			id++
			s.change(t, id)
		}
		t.Run(s.name+" is ready at once", func(t *testing.T) { readyAtOnce(t, s) })
		t.Run(s.name+" ends within its deadline", func(t *testing.T) { endsWithinDeadline(t, s, row) })
		t.Run(s.name+" ends at the second signal", func(t *testing.T) { endsAtSecondSignal(t, s, row) })
	}
}

func readyAtOnce(t *testing.T, s *subject) {
	t.Helper()
	var took []time.Duration
	for range rounds {
		began := time.Now()
		d := s.start(t, nil)
		harness.Await(t, patience, s.name+" to be ready", func(ctx context.Context) (any, bool) {
			status, body, err := d.Get(ctx, "/readyz")
			return fmt.Sprintf("%d %s %v", status, body, err), status == http.StatusOK
		})
		took = append(took, time.Since(began))
		stop(t, d)
	}
	t.Logf("%s: from the start to ready (the first one made what it needs): %v", s.name, took)
	if best := slices.Min(took[1:]); best > readyWithin {
		t.Errorf("%s is ready after %v at best, and it should be within %v", s.name, best, readyWithin)
	}
}

// stop ends a daemon in order and gives how long that took.
func stop(t *testing.T, d *harness.Daemon) time.Duration {
	t.Helper()
	began := time.Now()
	if err := d.Terminate(); err != nil {
		t.Fatal(err)
	}
	return ended(t, d, began)
}

// ended waits for the end, wants the exit code 0, and gives the time since began.
func ended(t *testing.T, d *harness.Daemon, began time.Time) time.Duration {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	code, err := d.Wait(ctx)
	took := time.Since(began)
	if err != nil {
		t.Fatal(err)
	}
	if code != 0 {
		t.Fatalf("exit code %d after a signal", code)
	}
	return took
}

// inFlight starts a daemon that has a row accepted by a pipeline that completes
// nothing.
func inFlight(t *testing.T, s *subject, row func(*testing.T), changes map[string]string) *harness.Daemon {
	t.Helper()
	d := s.start(t, changes)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := d.WaitHealthy(ctx); err != nil {
		t.Fatal(err)
	}
	s.sim.HoldCompletion()
	defer func() {
		if t.Failed() {
			s.sim.ReleaseCompletion() // for the tests that come after
		}
	}()
	before := s.sim.Counters().Records
	row(t)
	if err := s.sim.WaitFor(ctx, func(v felderasim.View) bool { return v.Counters().Records > before }); err != nil {
		t.Fatalf("the row is not accepted: %v", err)
	}
	return d
}

// Without evidence the drain waits for its deadline, and no longer.
func endsWithinDeadline(t *testing.T, s *subject, row func(*testing.T)) {
	t.Helper()
	d := inFlight(t, s, row, map[string]string{s.drain: drainTimeout.String()})
	took := stop(t, d)
	s.sim.ReleaseCompletion()
	t.Logf("%s: from SIGTERM to the end, with a row that is never completed and a deadline of %v: %v", s.name, drainTimeout, took)
	if took < drainTimeout/2 || took > drainTimeout+drainSlack {
		t.Errorf("%s ended %v after SIGTERM; it should use its deadline of %v and end with it", s.name, took, drainTimeout)
	}
}

func endsAtSecondSignal(t *testing.T, s *subject, row func(*testing.T)) {
	t.Helper()
	var took []time.Duration
	for range rounds {
		d := inFlight(t, s, row, map[string]string{s.drain: "20s"})
		if err := d.Terminate(); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		if _, err := d.WaitLog(ctx, regexp.MustCompile("finishing what is in flight")); err != nil {
			t.Fatal(err)
		}
		cancel()
		took = append(took, stop(t, d))
		s.sim.ReleaseCompletion()
	}
	t.Logf("%s: from the second signal to the end: %v", s.name, took)
	if best := slices.Min(took); best > secondSignalWithin {
		t.Errorf("%s ended %v after the second signal at best, and it should within %v", s.name, best, secondSignalWithin)
	}
}
