package images

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"holdfast/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// user is the unprivileged user that the images run as, and owns their state.
const user = "65532"

func TestImages(t *testing.T) {
	e := needEngine(t)
	compose := composeConfig(t)
	checkCompose(t, compose)
	folder := buildContext(t)
	for _, name := range []string{"pgsource", "kafkasink"} {
		t.Run(name, func(t *testing.T) {
			image := "holdfast/" + name
			e.docker(t, "build", "--target", name, "--tag", image,
				"--build-arg", "BINARIES=prebuilt", "--build-arg", "BASE=scratch", folder)
			t.Run("what the image says", func(t *testing.T) { checkImage(t, e, name, image) })
			t.Run("version", func(t *testing.T) {
				out := e.docker(t, "run", "--rm", "--network", "none", "--read-only", "--cap-drop", "ALL", image, "version")
				if !strings.Contains(out, name) {
					t.Errorf("version prints %q, want the daemon's name in it", out)
				}
			})
			settings := compose.environment(name)
			t.Run("the settings of docker-compose.yml", func(t *testing.T) {
				e.docker(t, slices.Concat([]string{"run", "--rm", "--network", "none"}, settings, []string{image, "config"})...)
			})
			t.Run("life", func(t *testing.T) { checkLife(t, e, name, image, settings) })
		})
	}
}

// checkImage reads from the image what an operator relies on.
func checkImage(t *testing.T, e *engine, name, image string) {
	t.Helper()
	var got struct {
		User        string
		Entrypoint  []string
		Cmd         []string
		Healthcheck struct{ Test []string }
		Volumes     map[string]struct{}
	}
	if err := json.Unmarshal([]byte(e.docker(t, "image", "inspect", "--format", "{{json .Config}}", image)), &got); err != nil {
		t.Fatal(err)
	}
	program := "/usr/local/bin/" + name
	want := got
	want.User = user + ":" + user
	want.Entrypoint, want.Cmd = []string{program}, nil
	want.Healthcheck.Test = []string{"CMD", program, "healthcheck"}
	want.Volumes = map[string]struct{}{"/var/lib/holdfast": {}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("image settings (-want +got):\n%s", diff)
	}
}

// checkLife runs the daemon as docker-compose.yml does, but with nothing to
// connect to: it must come up and answer its own health check, unprivileged and
// on a read-only root, and end in order at the first signal.
func checkLife(t *testing.T, e *engine, name, image string, settings []string) {
	t.Helper()
	container := e.docker(t, slices.Concat([]string{"run", "--detach", "--network", "none", "--read-only", "--cap-drop", "ALL"}, settings, []string{image})...)
	container = strings.TrimSpace(container)
	defer func() {
		if t.Failed() {
			out, err := exec.CommandContext(context.Background(), e.client, "--host", e.env["DOCKER_HOST"], "logs", container).CombinedOutput()
			t.Logf("what the container wrote (%v):\n%s", err, out)
		}
	}()
	harness.Await(t, 30*time.Second, "the health check inside the container", func(ctx context.Context) (any, bool) {
		_, err := output(ctx, e.env, "", e.client, "exec", container, "/usr/local/bin/"+name, "healthcheck")
		return err, err == nil
	})
	if got := strings.TrimSpace(e.docker(t, "inspect", "--format", "{{.State.Pid}}", container)); runsAs(t, got) != user {
		t.Errorf("the daemon runs as uid %s, want %s", runsAs(t, got), user)
	}
	e.docker(t, "stop", "--time", "40", container)
	if got := strings.TrimSpace(e.docker(t, "inspect", "--format", "{{.State.ExitCode}}", container)); got != "0" {
		t.Errorf("exit code after SIGTERM is %s, want 0", got)
	}
}

func runsAs(t *testing.T, pid string) string {
	t.Helper()
	status, err := os.ReadFile(filepath.Join("/proc", pid, "status"))
	if err != nil {
		t.Fatal(err)
	}
	uid := regexp.MustCompile(`(?m)^Uid:\s+(\d+)`).FindSubmatch(status)
	if uid == nil {
		t.Fatalf("no uid in %s", status)
	}
	return string(uid[1])
}

// buildContext makes a folder with what a build with BINARIES=prebuilt reads, so
// that the checkout's own dist stays as it is.
func buildContext(t *testing.T) string {
	t.Helper()
	root, folder := repository(t), t.TempDir()
	need(t, nil, root, "make", "--no-print-directory", "dist", "DIST="+filepath.Join(folder, "dist"))
	for _, name := range []string{"Dockerfile", ".dockerignore"} {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// composeFile is the canonical form of docker-compose.yml, by service the lines
// of its part.
type composeFile map[string][]string

// composeConfig lets docker-compose read the file, and takes its canonical form
// apart: services are indented by two spaces.
func composeConfig(t *testing.T) composeFile {
	t.Helper()
	program, args := "docker-compose", []string{"config"}
	if _, err := exec.LookPath(program); err != nil {
		program, args = "docker", []string{"compose", "config"}
	}
	out := need(t, nil, repository(t), program, args...)
	services := composeFile{}
	part, service := "", ""
	for lines := bufio.NewScanner(strings.NewReader(out)); lines.Scan(); {
		line := lines.Text()
		name, isName := strings.CutSuffix(line, ":")
		switch indent := len(line) - len(strings.TrimLeft(line, " ")); {
		case indent == 0:
			part, service = name, ""
		case part == "services" && indent == 2 && isName:
			service = strings.TrimSpace(name)
			services[service] = nil
		case service != "":
			services[service] = append(services[service], line)
		}
	}
	return services
}

// environment gives the service's variables as arguments of docker run.
func (c composeFile) environment(service string) []string {
	var args []string
	inside := false
	for _, line := range c[service] {
		switch {
		case strings.HasPrefix(line, "      ") && inside:
			name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			args = append(args, "--env", name+"="+strings.Trim(value, `'"`))
		default:
			inside = line == "    environment:"
		}
	}
	return args
}

// checkCompose holds what a reader of docker-compose.yml is promised.
func checkCompose(t *testing.T, services composeFile) {
	t.Helper()
	for _, name := range []string{"postgres", "kafka", "feldera", "pgsource", "kafkasink"} {
		if len(services[name]) == 0 {
			t.Errorf("docker-compose.yml has no service %s", name)
		}
	}
	for _, name := range []string{"postgres", "kafka", "feldera"} { // the images bring the daemons' own
		if !slices.Contains(services[name], "    healthcheck:") {
			t.Errorf("service %s has no health check", name)
		}
	}
	for _, name := range []string{"pgsource", "kafkasink"} {
		if len(services.environment(name)) == 0 {
			t.Errorf("service %s has no settings", name)
		}
	}
	// The old docker-compose writes a port as "host:port:port", the new one as a
	// block with host_ip and published.
	short := regexp.MustCompile(`^\s+- [0-9.]*:?\d+:\d+(/tcp)?$`)
	for name, lines := range services {
		published, bound := 0, 0
		for _, line := range lines {
			switch {
			case strings.Contains(line, "published:"):
				published++
			case strings.Contains(line, "host_ip: 127.0.0.1"):
				bound++
			case short.MatchString(line) && !strings.Contains(line, " 127.0.0.1:"):
				t.Errorf("service %s publishes %q to others than this machine", name, strings.TrimSpace(line))
			}
		}
		if published != bound {
			t.Errorf("service %s publishes %d ports, %d of them on 127.0.0.1", name, published, bound)
		}
	}
}
