package ops

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"holdfast/internal/config"
	"holdfast/internal/decode"
	"holdfast/internal/ops/opstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// clock is a time that only moves when a test says so.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) forward(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func newHealth(t *testing.T, c *clock, r prometheus.Registerer, readyWhen ...string) *Health {
	t.Helper()
	h, err := NewHealth(HealthOptions{Daemon: "pgsource", Now: c.Now, Registerer: r, ReadyWhen: readyWhen, LiveAfter: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestSinceChangesOnlyWithTheState(t *testing.T) {
	c := newClock()
	h := newHealth(t, c, prometheus.NewRegistry())
	zero := c.Now()
	for i, step := range []struct {
		set    Check
		status string
		since  time.Duration // after zero; step i is set i minutes after it
	}{
		{Check{OK: true, Message: "fine"}, StatusOK, 0},
		{Check{OK: true, Message: "still fine"}, StatusOK, 0},
		{Check{OK: false, Message: "down"}, StatusDegraded, 2 * time.Minute},
		{Check{OK: false, Message: "still down", Hint: "look"}, StatusDegraded, 2 * time.Minute},
		{Check{OK: false, Blocking: true, Message: "lost", Hint: "resync"}, StatusBlocked, 4 * time.Minute},
		{Check{OK: true, Blocking: true}, StatusOK, 5 * time.Minute},
	} {
		h.Set("slot", step.set)
		want := Report{Status: step.status, Phase: "connecting", Checks: []CheckReport{{
			"slot", step.set.OK, zero.Add(step.since), step.set.Message, step.set.Hint,
		}}}
		if diff := cmp.Diff(want, h.Report()); diff != "" {
			t.Errorf("step %d (-want +got):\n%s", i, diff)
		}
		c.forward(time.Minute)
	}
	h.Set("other thing", Check{OK: true})
	h.Remove("slot")
	if r := h.Report(); len(r.Checks) != 1 || r.Checks[0].Name != "other thing" {
		t.Errorf("after Remove: %+v", r)
	}
}

func TestBlockedPhaseIsUnhealthyWithoutACheck(t *testing.T) {
	h := newHealth(t, newClock(), prometheus.NewRegistry())
	h.SetPhase(PhaseBlocked)
	if s := h.Report().Status; s != StatusBlocked {
		t.Errorf("status %s", s)
	}
}

func TestNamesAreBoundedAndABlockingOneIsNotLost(t *testing.T) {
	h := newHealth(t, newClock(), prometheus.NewRegistry())
	for i := range 2 * maxChecks {
		h.Set(fmt.Sprintf("table %d", i), Check{OK: true})
		h.SetReady(fmt.Sprintf("table %d", i), true, "")
	}
	h.Set("table 99999", Check{Blocking: true, Message: strings.Repeat("ö", maxMessage)})
	h.SetReady("table 99999", false, "no")
	r := h.Report()
	last := r.Checks[len(r.Checks)-1]
	if r.Status != StatusBlocked || len(r.Checks) != maxChecks+1 || last.Name != overflowName || len(last.Message) > maxMessage {
		t.Errorf("status %s, %d checks, the last is %s with %d bytes", r.Status, len(r.Checks), last.Name, len(last.Message))
	}
	if ready := h.Readiness(); ready.Ready || ready.Reasons[0].Name != overflowName {
		t.Errorf("readiness %+v", ready)
	}
}

func TestReadiness(t *testing.T) {
	h := newHealth(t, newClock(), prometheus.NewRegistry())
	if h.Readiness().Ready {
		t.Error("ready without any condition")
	}
	h = newHealth(t, newClock(), prometheus.NewRegistry(), "source", "feldera")
	want := Readiness{Reasons: []Unready{{"source", "not yet"}, {"feldera", "not yet"}}}
	if diff := cmp.Diff(want, h.Readiness()); diff != "" {
		t.Errorf("at start (-want +got):\n%s", diff)
	}
	h.SetReady("source", true, "")
	h.SetReady("feldera", true, "")
	h.Set("lag", Check{OK: false, Blocking: true, Message: "far behind"})
	if r := h.Readiness(); !r.Ready || len(r.Reasons) != 0 {
		t.Errorf("all conditions hold: %+v", r)
	}
	h.SetReady("feldera", false, "connection refused")
	if diff := cmp.Diff(Readiness{Reasons: []Unready{{"feldera", "connection refused"}}}, h.Readiness()); diff != "" {
		t.Errorf("one fails (-want +got):\n%s", diff)
	}
	h.SetReady("feldera", true, "")
	h.Stopping()
	h.SetPhase(PhaseStreaming) // too late
	if h.Readiness().Ready || h.Phase() != PhaseStopping || h.Report().Status != StatusStopping {
		t.Errorf("stopping: %+v, %s", h.Readiness(), h.Phase())
	}
}

func TestLiveness(t *testing.T) {
	c := newClock()
	h := newHealth(t, c, prometheus.NewRegistry())
	c.forward(30 * time.Second)
	if !h.Liveness().Live {
		t.Error("dead at the limit")
	}
	c.forward(time.Nanosecond)
	if h.Liveness().Live {
		t.Error("alive above the limit")
	}
	h.Beat()
	if l := h.Liveness(); !l.Live || l.SinceBeatSeconds != 0 || l.LimitSeconds != 30 {
		t.Errorf("after a beat: %+v", l)
	}
}

func TestMetrics(t *testing.T) {
	v := VersionInfo{Version: "v1.2.3", Revision: "abc", GoVersion: "go1.26"}
	r, err := NewRegistry("pgsource", v)
	if err != nil {
		t.Fatal(err)
	}
	h := newHealth(t, newClock(), r)
	opstest.LintMetrics(t, r)
	for p := range phases - 1 { // stopping does not end
		h.SetPhase(p)
		families, err := r.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			if f.GetName() != "pgsource_phase" {
				continue
			}
			for _, m := range f.GetMetric() {
				got[m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
			}
		}
		want := map[string]float64{"connecting": 0, "snapshot": 0, "catchup": 0, "streaming": 0, "needs_resync": 0, "blocked": 0, "stopping": 0}
		want[p.String()] = 1
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("phase %s (-want +got):\n%s", p, diff)
		}
	}
	if _, err := NewHealth(HealthOptions{Daemon: "pgsource", Now: time.Now, Registerer: r}); err == nil {
		t.Error("a second phase metric was registered")
	}
	if _, err := NewHealth(HealthOptions{}); err == nil {
		t.Error("made without what is required")
	}
}

func TestVersionOf(t *testing.T) {
	got := versionOf(&debug.BuildInfo{
		GoVersion: "go1.26", Main: debug.Module{Version: "v1.0.0"},
		Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "0123456789abcdef"}, {Key: "vcs.modified", Value: "true"}},
	}).String()
	if want := "v1.0.0 (revision 0123456789ab, modified, go1.26)"; got != want {
		t.Errorf("%q, expected %q", got, want)
	}
	if got, want := versionOf(&debug.BuildInfo{}).String(), "(devel) (revision unknown, unknown)"; got != want {
		t.Errorf("%q, expected %q", got, want)
	}
	if Version().GoVersion == "unknown" {
		t.Error("the running binary does not know its Go version")
	}
}

// started is a server that runs until the test ends.
type started struct {
	*Server
	health *Health
	url    string
	stop   func() error // ends Serve and gives its error
}

func start(t *testing.T) *started {
	t.Helper()
	r, err := NewRegistry("pgsource", Version())
	if err != nil {
		t.Fatal(err)
	}
	h := newHealth(t, newClock(), r, "source")
	s, err := Listen(t.Context(), "127.0.0.1:0", ServerOptions{Daemon: "pgsource", Health: h, Gatherer: r, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx) }()
	var once sync.Once
	var result error
	stop := func() error {
		once.Do(func() {
			cancel()
			result = <-served
		})
		return result
	}
	t.Cleanup(func() { _ = stop() })
	return &started{s, h, "http://" + s.Addr().String(), stop}
}

func (s *started) get(t *testing.T, method, path string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.url+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestEndpoints(t *testing.T) {
	s := start(t)
	expect := func(path string, code int, parts ...string) {
		t.Helper()
		got, body := s.get(t, http.MethodGet, path)
		if got != code {
			t.Errorf("%s answers %d, expected %d", path, got, code)
		}
		for _, part := range parts {
			if !strings.Contains(body, part) {
				t.Errorf("%s lacks %s:\n%s", path, part, body)
			}
		}
	}
	expect("/healthz", 200, `{"status":"ok","phase":"connecting","checks":[]}`)
	expect("/readyz", 503, `{"ready":false,"reasons":[{"name":"source","why":"not yet"}]}`)
	expect("/livez", 200, `"live":true`)
	expect("/metrics", 200, `pgsource_phase{phase="connecting"} 1`, "pgsource_build_info{", "go_goroutines", "process_start_time_seconds")
	expect("/", 200, `<span class="badge ok">ok</span>`, "Phase <strong>connecting</strong>", "/healthz")
	expect("/status.json", 200, `"Phase":"connecting"`)
	expect("/nothing", 404)

	s.health.SetReady("source", true, "")
	s.health.SetPhase(PhaseStreaming)
	s.health.Set("lag", Check{OK: false, Message: "12 MiB behind"})
	expect("/readyz", 200, `{"ready":true,"reasons":[]}`)
	expect("/healthz", 200, `"status":"degraded"`, `"phase":"streaming"`, `{"name":"lag","ok":false,"since":"2030-01-02T03:04:05Z","message":"12 MiB behind","hint":""}`)

	s.health.Set("slot", Check{OK: false, Blocking: true, Message: "lost", Hint: "pgsource\nresync"})
	expect("/healthz", 503, `"status":"blocked"`)
	expect("/", 200, `<th scope="row">slot</th><td>failing</td>`, "lost<br><strong>To do:</strong> pgsource\nresync")

	s.health.Stopping()
	expect("/healthz", 503, `"status":"stopping"`)
	expect("/readyz", 503, `"name":"stopping"`)
	expect("/livez", 200)

	for _, path := range []string{"/healthz", "/readyz", "/livez", "/metrics", "/"} {
		if code, _ := s.get(t, http.MethodPost, path); code != http.StatusMethodNotAllowed {
			t.Errorf("POST %s answers %d", path, code)
		}
	}
	if err := s.stop(); err != nil {
		t.Errorf("Serve: %v", err)
	}
}

func TestATakenAddressIsAnError(t *testing.T) {
	s := start(t)
	_, err := Listen(t.Context(), s.Addr().String(), ServerOptions{Health: s.health, Gatherer: prometheus.NewRegistry(), Logger: slog.New(slog.DiscardHandler)})
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), s.Addr().String()) {
		t.Errorf("error %v", err)
	}
	if _, err := Listen(t.Context(), "127.0.0.1:0", ServerOptions{}); err == nil {
		t.Error("listens without what is required")
	}
}

func TestServeStopsThoughItsContextEndedBefore(t *testing.T) {
	s, err := Listen(t.Context(), "127.0.0.1:0", ServerOptions{Health: newHealth(t, newClock(), prometheus.NewRegistry()), Gatherer: prometheus.NewRegistry(), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Serve(ctx); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("Close after Serve: %v", err)
	}
	if c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.Addr().String()); err == nil {
		_ = c.Close()
		t.Error("the address is still bound")
	}
}

// pipes is a listener whose connections are the ends of pipes.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}
func (p *pipes) Close() error { close(p.closed); return nil }
func (*pipes) Addr() net.Addr { return &net.TCPAddr{} }

func TestConnectionsAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inner := &pipes{conns: make(chan net.Conn, 3), closed: make(chan struct{})}
		for range 3 {
			client, server := net.Pipe()
			defer client.Close()
			inner.conns <- server
		}
		l := limitConnections(inner, 1)
		accepted, ended := make(chan net.Conn, 3), make(chan error, 1)
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					ended <- err
					return
				}
				accepted <- c
			}
		}()
		synctest.Wait() // everything that can happen has happened
		if len(accepted) != 1 {
			t.Fatalf("%d are open with room for one", len(accepted))
		}
		first := <-accepted
		_ = first.Close()
		_ = first.Close() // frees no second slot
		synctest.Wait()
		if len(accepted) != 1 {
			t.Fatalf("%d are open after one was closed", len(accepted))
		}
		_ = l.Close() // Accept is waiting for a slot: it has to wake up
		if err := <-ended; !errors.Is(err, net.ErrClosed) {
			t.Errorf("Accept ends with %v", err)
		}
		second := <-accepted
		_ = second.Close()
		_ = (<-inner.conns).Close()
	})
}

func TestHealthcheck(t *testing.T) {
	s := start(t)
	if err := Healthcheck(t.Context(), s.Addr().String()); err != nil {
		t.Errorf("healthy: %v", err)
	}
	_, port, _ := net.SplitHostPort(s.Addr().String())
	for _, wildcard := range []string{":" + port, "0.0.0.0:" + port, "[::]:" + port} {
		if err := Healthcheck(t.Context(), wildcard); err != nil {
			t.Errorf("%s: %v", wildcard, err)
		}
	}
	s.health.Set("slot", Check{Blocking: true, Message: "lost"})
	if err := Healthcheck(t.Context(), s.Addr().String()); err == nil || err.Error() != "unhealthy: status blocked, phase connecting; slot: lost" {
		t.Errorf("unhealthy: %v", err)
	}
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	if err := Healthcheck(t.Context(), s.Addr().String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("gone: %v", err)
	}
	if err := Healthcheck(t.Context(), "nonsense"); err == nil {
		t.Error("no address: accepted")
	}
}

type hinted struct{}

func (hinted) Error() string { return "dial db: connection refused" }
func (hinted) Hint() string  { return "start it" }

func TestRunChecks(t *testing.T) {
	ok := NamedCheck{Name: "wal_level", Run: func(context.Context) (string, error) { return "logical", nil }}
	wrong := NamedCheck{Name: "slot", Run: func(context.Context) (string, error) {
		return "", fmt.Errorf("look at the slot: %w", &decode.Refusal{Reason: decode.ReasonSetup, What: "slot", Where: `"holdfast"`, Why: "it belongs to another plug-in", Do: "SELECT pg_drop_replication_slot('holdfast')"})
	}}
	away := NamedCheck{Name: "feldera", Run: func(context.Context) (string, error) { return "", hinted{} }}
	misconfigured := NamedCheck{Name: "settings", Run: func(context.Context) (string, error) {
		return "", &config.Faults{List: []config.Fault{{Name: "A", Wrong: "is\x1b bad"}, {Name: "B", Wrong: "is too"}}}
	}}
	for _, tc := range []struct {
		name   string
		checks []NamedCheck
		code   int
		text   string
	}{
		{"none", nil, ExitOK, ""},
		{"good", []NamedCheck{ok}, ExitOK, "ok   wal_level: logical\n"},
		{"all run", []NamedCheck{away, wrong, ok}, ExitRefused, "FAIL feldera: dial db: connection refused\n     fix: start it\n" +
			"FAIL slot: look at the slot: slot \"holdfast\": it belongs to another plug-in\n     fix: SELECT pg_drop_replication_slot('holdfast')\nok   wal_level: logical\n"},
		{"unreachable", []NamedCheck{ok, away}, ExitUnavailable, "ok   wal_level: logical\nFAIL feldera: dial db: connection refused\n     fix: start it\n"},
		{"configuration", []NamedCheck{misconfigured}, ExitConfig, "FAIL settings: A is  bad; B is too\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var out bytes.Buffer
			if code := RunChecks(t.Context(), &out, false, tc.checks); code != tc.code {
				t.Errorf("exit code %d, expected %d", code, tc.code)
			}
			if diff := cmp.Diff(tc.text, out.String()); diff != "" {
				t.Errorf("output (-want +got):\n%s", diff)
			}
		})
	}
	var out bytes.Buffer
	if code := RunChecks(t.Context(), &out, true, []NamedCheck{ok, wrong}); code != ExitRefused {
		t.Errorf("exit code %d", code)
	}
	want := `{"ok":false,"exit_code":65,"checks":[{"name":"wal_level","ok":true,"message":"logical","fix":""},` +
		`{"name":"slot","ok":false,"message":"look at the slot: slot \"holdfast\": it belongs to another plug-in","fix":"SELECT pg_drop_replication_slot('holdfast')"}]}` + "\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("JSON (-want +got):\n%s", diff)
	}
}

func TestEachCheckHasItsOwnTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := func(ctx context.Context) (string, error) {
			<-ctx.Done()
			return "", fmt.Errorf("connect: %w", ctx.Err())
		}
		began := time.Now()
		var out bytes.Buffer
		code := RunChecks(t.Context(), &out, false, []NamedCheck{
			{Name: "a", Timeout: 3 * time.Second, Run: hang},
			{Name: "b", Run: hang},
			{Name: "c", Run: func(context.Context) (string, error) { return "fine", nil }},
		})
		want := "FAIL a: check \"a\" took longer than 3s: connect: context deadline exceeded\n" +
			"FAIL b: check \"b\" took longer than 10s: connect: context deadline exceeded\nok   c: fine\n"
		if diff := cmp.Diff(want, out.String()); diff != "" || code != ExitUnavailable || time.Since(began) != 13*time.Second {
			t.Errorf("code %d after %s (-want +got):\n%s", code, time.Since(began), diff)
		}
	})
}

func TestExitCodes(t *testing.T) {
	refusal := &decode.Refusal{What: "row", Why: "no key"}
	stopped, cancel := context.WithCancelCause(t.Context())
	cancel(ErrStopping)
	for _, tc := range []struct {
		name      string
		err       error
		code      int
		afterStop int // with a context that a signal ended
	}{
		{"nil", nil, 0, 0},
		{"plain", errors.New("x"), 1, 1},
		{"stopping", fmt.Errorf("run: %w", ErrStopping), 0, 0},
		{"cancelled", fmt.Errorf("run: %w", context.Canceled), 1, 0},
		{"cancelled while retrying", errors.Join(context.Canceled, errors.New("connection refused")), 1, 0},
		{"deadline", context.DeadlineExceeded, 1, 1},
		{"refusal", fmt.Errorf("run: %w", refusal), 65, 65},
		{"refusal at the stop", errors.Join(context.Canceled, refusal), 65, 65},
		{"faults", &config.Faults{}, 78, 78},
		{"own code", WithExitCode(ExitBroken, errors.New("acknowledged above completed")), 70, 70},
		{"own code around a refusal", WithExitCode(ExitUnavailable, refusal), 69, 69},
		{"joined", errors.Join(errors.New("x"), WithExitCode(ExitUsage, nil)), 64, 64},
	} {
		if got := ExitCode(tc.err); got != tc.code {
			t.Errorf("%s: %d, expected %d", tc.name, got, tc.code)
		}
		if got := ExitCode(AfterStop(stopped, tc.err)); got != tc.afterStop {
			t.Errorf("%s after a stop: %d, expected %d", tc.name, got, tc.afterStop)
		}
		if got := ExitCode(AfterStop(t.Context(), tc.err)); got != tc.code {
			t.Errorf("%s without a stop: %d, expected %d", tc.name, got, tc.code)
		}
	}
}

func TestSignals(t *testing.T) {
	var out lockedBuffer
	logger, err := NewLogger(&out, "info", "text")
	if err != nil {
		t.Fatal(err)
	}
	signals, back := make(chan os.Signal, 2), make(chan struct{})
	ctx, stopNow, release := watch(t.Context(), logger, signals, func() { close(back) })
	if ctx.Err() != nil {
		t.Fatal("ended before any signal")
	}
	signals <- syscall.SIGTERM
	<-ctx.Done()
	if cause := context.Cause(ctx); !errors.Is(cause, ErrStopping) {
		t.Errorf("cause %v", cause)
	}
	select {
	case <-stopNow:
		t.Fatal("the first signal stops at once")
	default:
	}
	signals <- syscall.SIGINT
	<-stopNow
	<-back // from here on a signal has its default effect
	release()
	release()
	for _, want := range []string{"a second signal stops at once\" signal=terminated", "stopping at once: what is in flight will be sent again after the next start\" signal=interrupt"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the log lacks %q:\n%s", want, out.String())
		}
	}

	// Without a signal: release ends the context, with no cause of ours.
	ctx, _, release = watch(t.Context(), logger, signals, func() {})
	release()
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) || errors.Is(cause, ErrStopping) {
		t.Errorf("cause %v", cause)
	}
}

func TestARealSignal(t *testing.T) {
	ctx, _, release := Context(t.Context(), slog.New(slog.DiscardHandler))
	defer release()
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
	if cause := context.Cause(ctx); !errors.Is(cause, ErrStopping) {
		t.Errorf("cause %v", cause)
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestLogger(t *testing.T) {
	var out bytes.Buffer
	logger, err := NewLogger(&out, "warn", "json")
	if err != nil {
		t.Fatal(err)
	}
	logger.InfoContext(t.Context(), "not shown")
	logger.WarnContext(t.Context(), "shown", slog.Duration("wait", 1500*time.Millisecond), slog.Any("err", errors.New("boom")), slog.Group("g", slog.Duration("d", time.Minute)))
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatalf("%v in %s", err, &out)
	}
	delete(line, "time")
	want := map[string]any{"level": "WARN", "msg": "shown", "wait": "1.5s", "err": "boom", "g": map[string]any{"d": "1m0s"}}
	if diff := cmp.Diff(want, line); diff != "" {
		t.Errorf("line (-want +got):\n%s", diff)
	}
	for _, bad := range [][2]string{{"verbose", "text"}, {"info", "xml"}, {"INFO", "text"}} {
		if _, err := NewLogger(io.Discard, bad[0], bad[1]); err == nil {
			t.Errorf("%v: accepted", bad)
		}
	}
}

func TestRepeats(t *testing.T) {
	c := newClock()
	var out bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: func(g []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return replaceAttr(g, a)
	}}))
	r := NewRepeats(logger, c.Now)
	lines := func() []string {
		got := strings.Split(strings.TrimSpace(out.String()), "\n")
		out.Reset()
		return got
	}
	// One failure a second for an hour, each from another port.
	said := 0
	for i := range 3600 {
		r.Failed(t.Context(), "send", fmt.Errorf("dial from port %d: refused", 40000+i), slog.String("table", "orders"))
		c.forward(time.Second)
		said += strings.Count(out.String(), "\n")
		if i == 0 {
			if got := lines()[0]; got != `level=WARN msg=failing what=send err="dial from port 40000: refused" table=orders` {
				t.Errorf("first line: %s", got)
			}
		}
		out.Reset()
	}
	// At once, after 10s, 30s, 70s, 150s, 310s, 630s, then every 10 minutes.
	if said != 11 {
		t.Errorf("said %d times", said)
	}
	// Another failure of the same is said at once.
	r.Failed(t.Context(), "send", errors.New("401"))
	if got := lines()[0]; got != "level=WARN msg=failing what=send err=401" {
		t.Errorf("another failure: %s", got)
	}
	r.Worked(t.Context(), "poll") // never failed: nothing to say
	r.Worked(t.Context(), "send", slog.String("table", "orders"))
	r.Worked(t.Context(), "send")
	if diff := cmp.Diff([]string{`level=INFO msg="works again" what=send failures=3601 failed_for=1h0m0s table=orders`}, lines()); diff != "" {
		t.Errorf("the end (-want +got):\n%s", diff)
	}
	// Very many different failures: bounded.
	for i := range 10 * repeatKinds {
		r.Failed(t.Context(), "send", errors.New(strings.Repeat("x", i)))
	}
	r.Failed(t.Context(), "send", nil)
	if len(r.failures) > repeatKinds {
		t.Errorf("%d failures are kept", len(r.failures))
	}
}
