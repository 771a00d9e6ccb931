package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// BuildOptions says how a command is built.
type BuildOptions struct {
	Race bool
	Tags string // as for go build -tags
}

// Build builds a command of this module ("./cmd/pgsource") into [CacheDir] and
// gives the path of the program. Go's own caches make it quick when nothing has
// changed; processes that build at the same time wait for each other.
func Build(ctx context.Context, command string, opts BuildOptions) (string, error) {
	ctx, cancel := withDefaultTimeout(ctx, 5*time.Minute)
	defer cancel()
	root, err := ModuleRoot()
	if err != nil {
		return "", err
	}
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	args := []string{"build"}
	if opts.Race {
		args = append(args, "-race")
	}
	if opts.Tags != "" {
		args = append(args, "-tags", opts.Tags)
	}
	dir := filepath.Join(cache, "bin-"+shortHash(root+"\n"+strings.Join(args, " ")))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make folder of built commands: %w", err)
	}
	program := filepath.Join(dir, filepath.Base(command))
	release, err := lockFile(ctx, program+".lock")
	if err != nil {
		return "", err
	}
	defer release()
	_, err = output(ctx, processSpec{
		name: "go build " + command, path: "go", dir: root, env: os.Environ(),
		args: append(args, "-o", program, command),
	})
	if err != nil {
		return "", err
	}
	return program, nil
}

// DaemonOptions says what to run and with which settings.
type DaemonOptions struct {
	// Program is the path that [Build] gave.
	Program string
	// Args are the arguments; none starts the daemon's default verb.
	Args []string
	// Env is the daemon's configuration. It gets nothing else of the caller's
	// environment but PATH, HOME and TMPDIR, and LISTEN as said next.
	Env map[string]string
	// ListenVar is the name of the variable for the HTTP listener
	// ("PGSOURCE_LISTEN"); the harness sets it to a port of its own, which stays
	// the same over [Daemon.Restart]. Empty = no listener.
	ListenVar string
	// Dir is the working folder; empty is the caller's.
	Dir string
}

// Daemon is a command of this module, running as a child process.
type Daemon struct {
	*Process

	opts    DaemonOptions
	addr    string
	release func()
	log     *Log
	client  *http.Client
}

// StartDaemon starts the program and returns at once; see [Daemon.WaitHealthy]
// and [Process.WaitLog]. The caller must Close it.
func StartDaemon(opts DaemonOptions) (*Daemon, error) {
	d := &Daemon{opts: opts, release: func() {}, log: newLog()}
	// No connection is kept: a daemon that was killed and started again must not
	// be asked over a dead one.
	d.client = &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	if opts.ListenVar != "" {
		port, release, err := ReservePort()
		if err != nil {
			return nil, err
		}
		d.addr, d.release = loopback(port), release
	}
	if err := d.run(); err != nil {
		d.release()
		return nil, err
	}
	return d, nil
}

// NeedDaemon is [Build] and [StartDaemon] for tests: it fails the test when the
// daemon cannot be started, kills it at the end, and shows its log when the test
// failed. opts.Program is set from what was built.
func NeedDaemon(tb testing.TB, command string, build BuildOptions, opts DaemonOptions) *Daemon {
	tb.Helper()
	program, err := Build(tb.Context(), command, build)
	if err != nil {
		tb.Fatal(err)
	}
	opts.Program = program
	d, err := StartDaemon(opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		d.Close()
		showLog(tb, filepath.Base(command), d.log)
	})
	return d
}

func (d *Daemon) run() error {
	env := []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "TMPDIR=" + os.TempDir()}
	if d.opts.ListenVar != "" {
		env = append(env, d.opts.ListenVar+"="+d.addr)
	}
	for _, name := range slices.Sorted(maps.Keys(d.opts.Env)) {
		env = append(env, name+"="+d.opts.Env[name])
	}
	proc, err := startProcess(processSpec{
		name: filepath.Base(d.opts.Program), path: d.opts.Program, args: d.opts.Args,
		env: env, dir: d.opts.Dir, onLoss: syscall.SIGKILL,
	}, d.log)
	if err != nil {
		return err
	}
	d.Process = proc
	return nil
}

// Restart starts the program again, with the same settings and the changes given
// (an empty value removes a variable). It must have ended; see [Process.Kill].
func (d *Daemon) Restart(changes map[string]string) error {
	if _, ended := d.ExitCode(); !ended {
		return fmt.Errorf("restart %s: it still runs", d.name)
	}
	d.opts.Env = maps.Clone(d.opts.Env)
	for name, value := range changes {
		if value == "" {
			delete(d.opts.Env, name)
			continue
		}
		if d.opts.Env == nil {
			d.opts.Env = map[string]string{}
		}
		d.opts.Env[name] = value
	}
	return d.run()
}

// Close kills the daemon, waits until it is gone and gives its port back. It may
// be called twice.
func (d *Daemon) Close() {
	d.Kill()
	d.release()
}

// Addr gives the host:port of the daemon's listener.
func (d *Daemon) Addr() string { return d.addr }

// maxPage bounds what is read of an answer.
const maxPage = 16 << 20

// Get asks the daemon for a page.
func (d *Daemon) Get(ctx context.Context, path string) (status int, body []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+d.addr+path, nil)
	if err != nil {
		return 0, nil, fmt.Errorf("get %s of %s: %w", path, d.name, err)
	}
	res, err := d.client.Do(req)
	if err != nil {
		return 0, nil, fmt.Errorf("get %s of %s: %w", path, d.name, err)
	}
	body, err = io.ReadAll(io.LimitReader(res.Body, maxPage))
	if err := errors.Join(err, res.Body.Close()); err != nil {
		return 0, nil, fmt.Errorf("read %s of %s: %w", path, d.name, err)
	}
	return res.StatusCode, body, nil
}

// Health gives the status and body of /healthz.
func (d *Daemon) Health(ctx context.Context) (status int, body []byte, err error) {
	return d.Get(ctx, "/healthz")
}

// WaitHealthy waits until /readyz and /healthz both answer 200. It ends early
// when the daemon does.
func (d *Daemon) WaitHealthy(ctx context.Context) error {
	exited := fmt.Errorf("%s has ended", d.name)
	waiting, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-d.Done():
			cancel(exited)
		case <-stop:
		}
	}()
	err := Eventually(waiting, d.name+" to be ready and healthy", func(ctx context.Context) (any, bool) {
		for _, path := range []string{"/readyz", "/healthz"} {
			status, body, err := d.Get(ctx, path)
			if err != nil {
				return err, false
			}
			if status != http.StatusOK {
				return fmt.Sprintf("%s: %d %s", path, status, body), false
			}
		}
		return "healthy", true
	})
	close(stop)
	<-watched
	if err != nil {
		return fmt.Errorf("%w; its last lines:\n%s", err, strings.Join(d.log.Tail(20), "\n"))
	}
	return nil
}

// ErrNoMetric says that a page of metrics has no series of that name and labels.
var ErrNoMetric = errors.New("no such metric")

// Metric reads /metrics and gives the value of one series: that of the only one
// which has at least the given labels. Of a histogram or summary it gives the
// count.
func (d *Daemon) Metric(ctx context.Context, name string, labels map[string]string) (float64, error) {
	status, body, err := d.Get(ctx, "/metrics")
	if err != nil {
		return 0, err
	}
	if status != http.StatusOK {
		return 0, fmt.Errorf("get /metrics of %s: status %d", d.name, status)
	}
	value, err := metricValue(string(body), name, labels)
	if err != nil {
		return 0, fmt.Errorf("metric of %s: %w", d.name, err)
	}
	return value, nil
}

func metricValue(page, name string, labels map[string]string) (float64, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(page))
	if err != nil {
		return 0, fmt.Errorf("parse page: %w", err)
	}
	family, ok := families[name]
	if !ok {
		return 0, fmt.Errorf("%s: %w", name, ErrNoMetric)
	}
	var found []*dto.Metric
	for _, m := range family.GetMetric() {
		if hasLabels(m, labels) {
			found = append(found, m)
		}
	}
	switch len(found) {
	case 0:
		return 0, fmt.Errorf("%s%v: %w", name, labels, ErrNoMetric)
	case 1:
		return sample(found[0]), nil
	default:
		return 0, fmt.Errorf("%s%v: %d series have these labels; give more of them", name, labels, len(found))
	}
}

func hasLabels(m *dto.Metric, labels map[string]string) bool {
	for name, value := range labels {
		if !slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool { return l.GetName() == name && l.GetValue() == value }) {
			return false
		}
	}
	return true
}

func sample(m *dto.Metric) float64 {
	switch {
	case m.GetCounter() != nil:
		return m.GetCounter().GetValue()
	case m.GetGauge() != nil:
		return m.GetGauge().GetValue()
	case m.GetHistogram() != nil:
		return float64(m.GetHistogram().GetSampleCount())
	case m.GetSummary() != nil:
		return float64(m.GetSummary().GetSampleCount())
	default:
		return m.GetUntyped().GetValue()
	}
}

// RunResult is what a command printed and how it ended.
type RunResult struct {
	Stdout, Stderr string
	ExitCode       int
}

// Run runs a command to its end, as [StartDaemon] would but with stdout and
// stderr apart: for verbs. An exit code is a result and not an error.
func Run(ctx context.Context, opts DaemonOptions) (RunResult, error) {
	ctx, cancel := withDefaultTimeout(ctx, 60*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, opts.Program, opts.Args...)
	cmd.Dir, cmd.WaitDelay = opts.Dir, 5*time.Second
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "TMPDIR=" + os.TempDir()}
	for _, name := range slices.Sorted(maps.Keys(opts.Env)) {
		cmd.Env = append(cmd.Env, name+"="+opts.Env[name])
	}
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && (!ok || ctx.Err() != nil) {
		return RunResult{}, fmt.Errorf("run %s %v: %w\n%s", filepath.Base(opts.Program), opts.Args, errors.Join(err, context.Cause(ctx)), errs.String())
	}
	return RunResult{Stdout: out.String(), Stderr: errs.String(), ExitCode: cmd.ProcessState.ExitCode()}, nil
}
