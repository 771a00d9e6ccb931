package docs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// patience bounds each wait for something that must happen.
const patience = 90 * time.Second

// world is what stands for the reader's systems: a real Postgres, an in-process
// Kafka broker, and the simulator of Feldera.
type world struct {
	pg     *harness.Postgres
	kafka  *harness.FakeKafka
	sim    *felderasim.Sim
	bin    string // the folder with both daemons, first in PATH
	listen map[string]string
}

const pipeline = `
CREATE TABLE orders (id BIGINT NOT NULL PRIMARY KEY, customer VARCHAR, amount DECIMAL(12, 2)) WITH ('materialized' = 'true');
CREATE TABLE items (id BIGINT NOT NULL PRIMARY KEY, sku VARCHAR) WITH ('materialized' = 'true');
CREATE TABLE payments (id BIGINT NOT NULL PRIMARY KEY, amount DECIMAL(12, 2)) WITH ('materialized' = 'true');
`

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{
		pg:     harness.NeedPostgres(t, harness.PostgresOptions{}),
		kafka:  harness.NeedFakeKafka(t, harness.FakeKafkaOptions{Topics: map[string]int32{"orders": 4, "payments": 2}}),
		sim:    newSim(t, pipeline),
		bin:    t.TempDir(),
		listen: map[string]string{},
	}
	if err := w.pg.Exec(t.Context(), `CREATE TABLE orders (id bigint PRIMARY KEY, customer text, amount numeric(12,2)); CREATE TABLE items (id bigint PRIMARY KEY, sku text)`); err != nil {
		t.Fatal(err)
	}
	for _, daemon := range []string{"pgsource", "kafkasink"} {
		program, err := harness.Build(t.Context(), "./cmd/"+daemon, harness.BuildOptions{})
		if err != nil {
			t.Fatal(err)
		}
		w.listen[daemon] = freeAddress(t)
		// The daemon under its name, that notes the process of one that runs, so
		// that the test can end it as the reader would.
		w.shim(t, daemon, `[ "${1:-run}" != run ] || echo $$ >"$HOLDFAST_RUNNING"
exec `+program+` "$@"`)
	}
	return w
}

func newSim(t *testing.T, program string) *felderasim.Sim {
	t.Helper()
	sim, err := felderasim.New(felderasim.Options{SQL: program, Pipeline: "shop", Logger: slog.New(slog.DiscardHandler)})
	if err == nil {
		err = sim.Start(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sim.Close(); err != nil {
			t.Error(err)
		}
	})
	return sim
}

func freeAddress(t *testing.T) string {
	t.Helper()
	port, release, err := harness.ReservePort()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}

// shim puts a command into PATH.
func (w *world) shim(t *testing.T, name, script string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(w.bin, name), []byte("#!/usr/bin/env bash\nset -euo pipefail\n"+script+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
}

// put replaces the addresses of a page by the world's. Each must be in the text.
func put(t *testing.T, text string, pairs ...string) string {
	t.Helper()
	for i := 0; i < len(pairs); i += 2 {
		if !strings.Contains(text, pairs[i]) {
			t.Fatalf("the block has no %q:\n%s", pairs[i], text)
		}
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// shell is a block that runs.
type shell struct {
	t       *testing.T
	cmd     *exec.Cmd
	running string
	done    chan struct{}
	err     error // after done

	mu  sync.Mutex
	out bytes.Buffer
}

// Write takes what is printed, stdout and stderr alike.
func (s *shell) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out.Write(p)
}

func (s *shell) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out.String()
}

// start runs text as a reader types it: line by line, whatever the line before
// it returned; the exit code is the last one's. env is what the page lets the
// reader have set before.
func (w *world) start(t *testing.T, dir, text string, env map[string]string) *shell {
	t.Helper()
	s := &shell{t: t, running: filepath.Join(t.TempDir(), "running"), done: make(chan struct{})}
	s.cmd = exec.Command("bash", "-c", text)
	s.cmd.Dir, s.cmd.Stdout, s.cmd.Stderr, s.cmd.WaitDelay = dir, s, s, 10*time.Second
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	s.cmd.Env = []string{
		"PATH=" + w.bin + ":" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "HOLDFAST_RUNNING=" + s.running,
		"PGSOURCE_LISTEN=" + w.listen["pgsource"], "KAFKASINK_LISTEN=" + w.listen["kafkasink"],
		"FELDERA_REQUEST_TIMEOUT=2s", "FELDERA_REQUEST_LIFETIME=2s", // a wait that the simulator does not need
		"PGSOURCE_SPILL_DIR=" + t.TempDir(),
	}
	for name, value := range env {
		s.cmd.Env = append(s.cmd.Env, name+"="+value)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { s.err = s.cmd.Wait(); close(s.done) }()
	t.Cleanup(func() {
		_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL) // all of the block, where something is left
		<-s.done
		if t.Failed() {
			t.Logf("the block printed:\n%s", s.text())
		}
	})
	return s
}

// wait waits for the end of the block and gives its exit code.
func (s *shell) wait() int {
	s.t.Helper()
	select {
	case <-s.done:
	case <-time.After(2 * patience):
		s.t.Fatalf("the block does not end:\n%s", s.text())
	}
	if exit, ok := errors.AsType[*exec.ExitError](s.err); ok {
		return exit.ExitCode()
	}
	if s.err != nil {
		s.t.Fatal(s.err)
	}
	return 0
}

// interrupt ends the daemon that the block runs, as Ctrl-C would, and wants the
// block to end well.
func (s *shell) interrupt() {
	s.t.Helper()
	text, err := os.ReadFile(s.running)
	if err != nil {
		s.t.Fatalf("the block runs no daemon: %v", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err == nil {
		err = syscall.Kill(pid, syscall.SIGTERM)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	if code := s.wait(); code != 0 {
		s.t.Errorf("the block ended with code %d", code)
	}
}

// check holds what was printed against what the page shows.
func (s *shell) check(b block) {
	s.t.Helper()
	if b.output != "" && !shown(b.output).MatchString(s.text()) {
		s.t.Errorf("%s:%d shows\n%s\nand the block printed\n%s", b.file, b.line, b.output, s.text())
	}
}

func (s *shell) mustSay(what string) {
	s.t.Helper()
	if !strings.Contains(s.text(), what) {
		s.t.Errorf("the block does not print %q", what)
	}
}

// await waits for a condition, and no longer than the block runs.
func (s *shell) await(what string, cond func(ctx context.Context) (any, bool)) {
	s.t.Helper()
	harness.Await(s.t, patience, what, func(ctx context.Context) (any, bool) {
		seen, ok := cond(ctx)
		select {
		case <-s.done:
			if !ok {
				s.t.Fatalf("the block has ended before %s:\n%s", what, s.text())
			}
		default:
		}
		return seen, ok
	})
}

func (w *world) exec(t *testing.T, sql string) {
	t.Helper()
	if err := w.pg.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// awaitRow waits until a table of the pipeline has a row with that id.
func (s *shell) awaitRow(sim *felderasim.Sim, table string, id int) {
	s.t.Helper()
	s.await(fmt.Sprintf("row %d in table %s", id, table), func(context.Context) (any, bool) {
		for _, row := range sim.Rows(table) {
			if fmt.Sprint(row["id"]) == strconv.Itoa(id) {
				return nil, true
			}
		}
		return sim.Count(table), false
	})
}

// ready waits until a daemon of the block is ready.
func (s *shell) ready(address string) {
	s.t.Helper()
	s.await("the daemon to be ready", func(ctx context.Context) (any, bool) {
		out, err := exec.CommandContext(ctx, "curl", "-sf", "http://"+address+"/readyz").CombinedOutput()
		return string(out), err == nil
	})
}

// anew takes slot and publication away, once nobody reads the slot.
func (w *world) anew(t *testing.T) {
	t.Helper()
	harness.Await(t, patience, "nobody to read the slot", func(ctx context.Context) (any, bool) {
		free, err := harness.QueryValue[bool](ctx, w.pg, "SELECT count(*) FILTER (WHERE active) = 0 FROM pg_replication_slots")
		return err, free
	})
	w.exec(t, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
	w.exec(t, "DROP PUBLICATION IF EXISTS holdfast")
}
