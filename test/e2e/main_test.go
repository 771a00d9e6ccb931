// Package e2e runs both daemons as processes, against a real PostgreSQL
// cluster, a real Kafka broker and the simulator of Feldera, and looks at them
// only from outside: through the servers, the endpoints and the exit codes.
package e2e

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"go.uber.org/goleak"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds each wait for something that must happen. It is far above
// what anything takes, and is only spent by a failure.
const patience = 60 * time.Second

// program is the pipeline of most tests.
const program = `
CREATE TABLE orders (
  id BIGINT NOT NULL PRIMARY KEY,
  customer VARCHAR NOT NULL,
  amount DECIMAL(12, 2),
  paid BOOLEAN NOT NULL,
  note VARCHAR,
  raw VARBINARY,
  placed TIMESTAMP
) WITH ('materialized' = 'true');
CREATE TABLE items (
  id BIGINT NOT NULL PRIMARY KEY,
  order_id BIGINT NOT NULL,
  sku VARCHAR NOT NULL
) WITH ('materialized' = 'true');
`

// sourceTables are the same tables in Postgres.
const sourceTables = `
CREATE TABLE orders (
  id bigint PRIMARY KEY, customer text NOT NULL, amount numeric(12,2), paid boolean NOT NULL,
  note text, raw bytea, placed timestamp);
CREATE TABLE items (id bigint PRIMARY KEY, order_id bigint NOT NULL, sku text NOT NULL);
`

func startSim(t *testing.T, opts felderasim.Options) *felderasim.Sim {
	t.Helper()
	if opts.SQL == "" {
		opts.SQL = program
	}
	opts.Logger = slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
	sim, err := felderasim.New(opts)
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
	return sim
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(string(p))
	return len(p), nil
}

// waitSim waits for a condition on the simulator.
func waitSim(t *testing.T, sim *felderasim.Sim, what string, cond func(felderasim.View) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := sim.WaitFor(ctx, cond); err != nil {
		t.Fatalf("waiting until %s: %v (counters %+v)", what, err, sim.Counters())
	}
}

// merged gives base with changes; an empty value takes the name out.
func merged(base, changes map[string]string) map[string]string {
	env := make(map[string]string, len(base)+len(changes))
	for k, v := range base {
		env[k] = v
	}
	for k, v := range changes {
		env[k] = v
		if v == "" {
			delete(env, k)
		}
	}
	return env
}

// build gives the program of a daemon, built once, with the race detector.
func build(t *testing.T, name string) string {
	t.Helper()
	tags := map[string]string{"pgsource": differential}[name]
	path, err := harness.Build(t.Context(), "./cmd/"+name, harness.BuildOptions{Race: true, Tags: tags})
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// health waits until /healthz says what the test waits for.
func health(t *testing.T, d *harness.Daemon, what string, cond func(status int, body string) bool) {
	t.Helper()
	harness.Await(t, patience, what, func(ctx context.Context) (any, bool) {
		status, body, err := d.Health(ctx)
		if err != nil {
			return err, false
		}
		return fmt.Sprintf("%d %s", status, body), cond(status, string(body))
	})
}
