package main

import (
	"bytes"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"holdfast/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A selection of the matrix that fits into every run of the tests: at each
// step between two rungs, a SIGKILL, and an answer that is lost.
func TestSelection(t *testing.T) {
	for name, opts := range map[string]options{
		"pgsource":  {points: []string{"pgsource.mid-buffer", "pgsource.sent", "pgsource.completed", "pgsource.before-bookmark", "pgsource.after-status"}, faults: []string{"SIGKILL", "response lost"}},
		"kafkasink": {points: []string{"kafkasink.accepted", "kafkasink.before-commit", "kafkasink.revoked", "kafkasink.after-dlq"}, faults: []string{"SIGKILL"}},
	} {
		t.Run(name, func(t *testing.T) {
			opts.seed, opts.dir, opts.out = uint64(time.Now().UnixNano()), t.TempDir(), &testOutput{t: t}
			r, err := runMatrix(t.Context(), opts)
			if err != nil {
				t.Fatal(err)
			}
			t.Log(r.line())
			if r.lost > 0 || len(r.unreached)+len(r.other) > 0 || r.runs != len(opts.points)*len(opts.faults) {
				t.Errorf("not reached %q, also wrong %q", r.unreached, r.other)
			}
		})
	}
}

type testOutput struct{ t *testing.T }

func (o *testOutput) Write(p []byte) (int, error) {
	o.t.Log(string(bytes.TrimSuffix(p, []byte("\n"))))
	return len(p), nil
}

// Nothing of the places is in a build that is not told to have them.
func TestReleaseBuildHasNoPlaces(t *testing.T) {
	for _, command := range []string{"./cmd/pgsource", "./cmd/kafkasink"} {
		for tags, want := range map[string]bool{"": false, "crashpoints": true} {
			path, err := harness.Build(t.Context(), command, harness.BuildOptions{Tags: tags})
			if err != nil {
				t.Fatal(err)
			}
			program, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if got := bytes.Contains(program, []byte("CRASH_AT")); got != want {
				t.Errorf("%s built with tags %q knows places: %v", command, tags, got)
			}
		}
	}
}
