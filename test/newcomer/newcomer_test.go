package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"holdfast/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// walk runs the script on this checkout, with the daemons in bin.
func walk(t *testing.T, bin string) (out string, err error) {
	t.Helper()
	dir, err := harness.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "test", "newcomer.sh"), "--fast")
	cmd.WaitDelay = 10 * time.Second
	cmd.Env = append(os.Environ(), "NEWCOMER_BIN="+bin)
	text, err := cmd.CombinedOutput()
	return string(text), err
}

// daemons makes a folder with both, through the script given: "$program" is the
// daemon.
func daemons(t *testing.T, script string) string {
	t.Helper()
	bin := t.TempDir()
	for _, name := range []string{"pgsource", "kafkasink"} {
		program, err := harness.Build(t.Context(), "./cmd/"+name, harness.BuildOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/usr/bin/env bash\nprogram="+program+"\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return bin
}

// A newcomer who does only what the programs say gets to a row in the pipeline,
// and out of each wrong setup.
func TestNewcomer(t *testing.T) {
	out, err := walk(t, daemons(t, `exec "$program" "$@"`))
	t.Log(out)
	if err != nil || !strings.Contains(out, "wrong setups were mended") {
		t.Fatalf("the path ends early: %v", err)
	}
}

// With programs that say what is wrong, and not what mends it, the path must
// not go on: the script knows no remedy by itself.
func TestNewcomerNeedsWhatIsSaid(t *testing.T) {
	out, err := walk(t, daemons(t, `"$program" "$@" > >(sed '/fix:/d') 2> >(sed 's/; allowed:.*//; s/; did you mean.*//' >&2)`))
	if err == nil || !strings.Contains(out, "the message does not suffice") {
		t.Fatalf("it went on without any remedy: %v\n%s", err, out)
	}
}
