// Package images tests what is shipped for containers: docker-compose.yml and
// the images of both daemons, built and run on a Docker engine that the test
// starts for itself. The engine has its own folder and socket and no network,
// reaches no registry, and touches no engine that the machine has. It needs
// root; where it cannot start, the test fails and says why.
package images

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"holdfast/test/harness"
)

// engine is a private Docker engine and a client for it.
type engine struct {
	daemon *harness.Daemon
	client string // path of a docker command that builds with BuildKit
	env    map[string]string
}

// needEngine installs Docker where it is missing, starts an engine, and stops it
// at the end of the test.
func needEngine(t *testing.T) *engine {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("start a Docker engine: needs root; run the image tests as root, or all others with make test-unit test-integration")
	}
	need(t, nil, repository(t), "bash", "test/setup.sh", "images")
	dockerd, err := exec.LookPath("dockerd")
	if err != nil {
		t.Fatalf("find dockerd: %v", err)
	}
	dir, err := shortTempDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove the engine's folder: %v", err)
		}
	})
	socket := "unix://" + filepath.Join(dir, "socket")
	e := &engine{env: map[string]string{
		"DOCKER_HOST":     socket,
		"DOCKER_CONFIG":   filepath.Join(dir, "config"), // nobody's logins and contexts
		"DOCKER_BUILDKIT": "1",
	}}
	e.daemon, err = harness.StartDaemon(harness.DaemonOptions{Program: dockerd, Dir: dir, Args: []string{
		"--host", socket,
		"--data-root", filepath.Join(dir, "data"),
		"--exec-root", filepath.Join(dir, "run"),
		"--pidfile", filepath.Join(dir, "pid"),
		// No bridge and no packet filter: nothing here needs a network, and the
		// machine's own is not to be changed.
		"--bridge=none", "--iptables=false", "--ip6tables=false",
		// The driver that works on every file system; the images are small.
		"--storage-driver=vfs",
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.stop(t) })
	e.client = buildKitClient(t, e.env)
	harness.Await(t, time.Minute, "an answer of dockerd", func(ctx context.Context) (any, bool) {
		if code, ended := e.daemon.ExitCode(); ended {
			t.Fatalf("dockerd ended with code %d:\n%s", code, strings.Join(e.daemon.Log().Tail(30), "\n"))
		}
		out, err := output(ctx, e.env, "", e.client, "version", "--format", "{{.Server.Version}}")
		return fmt.Sprint(out, err), err == nil
	})
	return e
}

// shortTempDir is for a socket, whose path is limited to about 100 bytes: that of
// testing's own folder has the test's name in it.
func shortTempDir() (string, error) { return os.MkdirTemp("", "hf-docker-") }

// stop ends the engine in order, so that it unmounts what it mounted, and waits.
func (e *engine) stop(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := e.daemon.Terminate(); err != nil {
		t.Error(err)
	}
	if _, err := e.daemon.Wait(ctx); err != nil {
		t.Error(err)
	}
	e.daemon.Close()
	if t.Failed() {
		t.Logf("the last lines of dockerd:\n%s", strings.Join(e.daemon.Log().Tail(30), "\n"))
	}
}

// buildKitClient finds a docker command that builds with BuildKit: one that has
// the buildx plug-in, or one from before version 23, which needs none.
func buildKitClient(t *testing.T, env map[string]string) string {
	t.Helper()
	var why []string
	for _, path := range []string{"docker", "/usr/bin/docker"} {
		if _, err := output(t.Context(), env, "", path, "buildx", "version"); err == nil {
			return path
		}
		version, err := output(t.Context(), env, "", path, "--version") // "Docker version 20.10.24…, build …"
		if err == nil {
			number, _, _ := strings.Cut(strings.TrimPrefix(version, "Docker version "), ".")
			if major, err := strconv.Atoi(number); err == nil && major < 23 {
				return path
			}
		}
		why = append(why, fmt.Sprintf("%s: %s %v, and no buildx", path, strings.TrimSpace(version), err))
	}
	t.Fatalf("find a docker command that builds with BuildKit: %s", strings.Join(why, "; "))
	return ""
}

// docker runs a docker command that must succeed, and gives what it printed to
// stdout.
func (e *engine) docker(t *testing.T, args ...string) string {
	t.Helper()
	return need(t, e.env, "", e.client, args...)
}

// need runs a program that must succeed and gives its stdout.
func need(t *testing.T, env map[string]string, dir, program string, args ...string) string {
	t.Helper()
	out, err := output(t.Context(), env, dir, program, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// output runs a program to its end, in the caller's environment and env, and
// gives its stdout. The error has the end of what it wrote.
func output(ctx context.Context, env map[string]string, dir, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir, cmd.WaitDelay = dir, 5*time.Second
	cmd.Env = os.Environ()
	for name, value := range env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		lines := strings.Split(strings.TrimSpace(out.String()+"\n"+errs.String()), "\n")
		return out.String(), fmt.Errorf("%s %s: %w\n%s", program, strings.Join(args, " "), err, strings.Join(lines[max(0, len(lines)-30):], "\n"))
	}
	return out.String(), nil
}

func repository(t *testing.T) string {
	t.Helper()
	root, err := harness.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	return root
}
