package harness_test

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"

	"holdfast/test/harness"
)

const sampleDaemon = "./test/harness/testdata/daemon"

func TestDaemonLife(t *testing.T) {
	t.Setenv("SECRET_OF_THE_CALLER", "leaked")
	d := harness.NeedDaemon(t, sampleDaemon, harness.BuildOptions{}, harness.DaemonOptions{
		Env: map[string]string{"SAMPLE_WORD": "hello"}, ListenVar: "SAMPLE_LISTEN",
	})
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	must(t, d.WaitHealthy(ctx))
	line, err := d.WaitLog(ctx, regexp.MustCompile(`starting with hello`))
	must(t, err)
	if strings.Contains(line, "leaked") {
		t.Errorf("the caller's environment reached the daemon: %q", line)
	}
	rows, err := d.Metric(ctx, "sample_rows_total", map[string]string{"table": "orders"})
	if err != nil || rows != 42 {
		t.Errorf("metric: %v, %v, want 42", rows, err)
	}
	if _, err := d.Metric(ctx, "sample_rows_total", map[string]string{"table": "other"}); !errors.Is(err, harness.ErrNoMetric) {
		t.Errorf("metric that is not there: %v", err)
	}
	if _, ok := d.ExitCode(); ok {
		t.Error("a running daemon has an exit code")
	}

	must(t, d.Terminate())
	code, err := d.Wait(ctx)
	if err != nil || code != 0 {
		t.Errorf("after SIGTERM: code %d, %v, want 0", code, err)
	}
	mark := d.Log().Mark()
	must(t, d.Restart(map[string]string{"SAMPLE_WORD": "again"}))
	_, err = d.Log().WaitSince(ctx, mark, regexp.MustCompile(`starting with again`))
	must(t, err)
	must(t, d.WaitHealthy(ctx))
	d.Kill()
	if code, ok := d.ExitCode(); !ok || code != -1 {
		t.Errorf("after SIGKILL: code %d, %v, want -1 and true", code, ok)
	}
	if err := d.WaitHealthy(ctx); err == nil || !strings.Contains(err.Error(), "has ended") {
		t.Errorf("health of an ended daemon: %v", err)
	}
}

func TestRunTellsOutputAndExitCode(t *testing.T) {
	program, err := harness.Build(t.Context(), sampleDaemon, harness.BuildOptions{})
	must(t, err)
	res, err := harness.Run(t.Context(), harness.DaemonOptions{Program: program, Args: []string{"version"}})
	must(t, err)
	if res.ExitCode != 64 || !strings.HasPrefix(res.Stdout, "daemon of") || res.Stderr != "" {
		t.Errorf("got %+v", res)
	}
}

func TestBuildTellsWhatTheCompilerSaid(t *testing.T) {
	_, err := harness.Build(t.Context(), "./test/harness/testdata/no-such-command", harness.BuildOptions{})
	if err == nil || !strings.Contains(err.Error(), "no-such-command") {
		t.Errorf("got %v", err)
	}
}

func TestEventuallySaysWhatItSawLast(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := harness.Eventually(ctx, "the moon", func(context.Context) (any, bool) { return "clouds", false })
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "wait for the moon") || !strings.Contains(err.Error(), "last seen: clouds") {
		t.Errorf("got %v", err)
	}
}

func TestReservePortGivesAPortOnce(t *testing.T) {
	seen := map[int]bool{}
	for range 50 {
		port, release, err := harness.ReservePort()
		must(t, err)
		defer release()
		if seen[port] {
			t.Errorf("port %d was given twice", port)
		}
		seen[port] = true
	}
}
