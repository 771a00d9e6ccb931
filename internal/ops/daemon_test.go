package ops

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"holdfast/internal/decode"
)

// runDaemon runs a daemon as its program does and gives the code and stderr.
func runDaemon(ctx context.Context, d Daemon) (code int, stderr string) {
	var out bytes.Buffer
	p := Program{Name: "pgsource", Verbs: []Verb{{Name: "run", Run: d.Run}}}
	code = p.Main(ctx, nil, nil, &out, &out)
	return code, out.String()
}

// What ended the daemon is in the log, in the log's own format, and nowhere
// else.
func TestTheEndIsLoggedInTheLogsFormat(t *testing.T) {
	refused := fmt.Errorf("all 3 partitions stopped: %w", &decode.Refusal{What: "slot", Where: "s", Why: "gone\nfor good", Do: "this"})
	for _, tc := range []struct {
		err  error
		code int
		says string
	}{
		{refused, ExitRefused, "run: all 3 partitions stopped: slot s: gone; for good; to mend it: this"},
		{errors.New("boom"), ExitUnexpected, "run: boom"},
		{WithExitCode(ExitConfig, errors.New("bad file")), ExitConfig, "run: bad file"},
	} {
		d := Daemon{
			Name: "pgsource", Listen: "127.0.0.1:0", LogLevel: "info", LogFormat: "json",
			Work: func(context.Context, Runtime) error { return tc.err },
		}
		code, stderr := runDaemon(t.Context(), d)
		if code != tc.code {
			t.Errorf("%v: exit code %d, expected %d", tc.err, code, tc.code)
		}
		var last struct {
			Level    string `json:"level"`
			Msg      string `json:"msg"`
			ExitCode int    `json:"exit_code"`
			Err      string `json:"err"`
		}
		for line := range strings.Lines(stderr) {
			if err := json.Unmarshal([]byte(line), &last); err != nil {
				t.Errorf("%v: a line that is no JSON: %s", tc.err, line)
			}
		}
		if last.Level != "ERROR" || last.Msg != "ended" || last.ExitCode != tc.code || last.Err != tc.says {
			t.Errorf("last line %+v, expected %q", last, tc.says)
		}
		d.LogFormat = "text"
		if _, stderr = runDaemon(t.Context(), d); strings.Count(stderr, tc.says) != 1 || strings.Contains(stderr, "pgsource: ") {
			t.Errorf("said twice or not at all:\n%s", stderr)
		}
	}
}

func TestTakenListenerNamesTheSetting(t *testing.T) {
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	d := Daemon{
		Name: "pgsource", Listen: l.Addr().String(), ListenSetting: "PGSOURCE_LISTEN", LogLevel: "info", LogFormat: "text",
		Work: func(context.Context, Runtime) error { t.Error("the work began"); return nil },
	}
	code, stderr := runDaemon(t.Context(), d)
	if code != ExitUnavailable || !strings.Contains(stderr, "set PGSOURCE_LISTEN to an address that is free") {
		t.Errorf("exit code %d, it says:\n%s", code, stderr)
	}
}

// A caller of Run still sees what the error is.
func TestTheLoggedErrorIsStillThere(t *testing.T) {
	refused := &decode.Refusal{What: "slot", Why: "gone"}
	d := Daemon{
		Name: "pgsource", Listen: "127.0.0.1:0", LogLevel: "error", LogFormat: "json",
		Work: func(context.Context, Runtime) error { return refused },
	}
	if err := d.Run(t.Context(), Call{Stderr: new(bytes.Buffer)}); !errors.Is(err, refused) {
		t.Errorf("error %v", err)
	}
}
