package images

import (
	"context"
	"debug/buildinfo"
	"debug/elf"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
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
	compose := readCompose(t)
	folder := buildContext(t)
	need(t, nil, repository(t), "make", "--no-print-directory", "dist", "DIST="+filepath.Join(folder, "dist"))
	for _, arch := range []string{"amd64", "arm64"} {
		checkBinaries(t, filepath.Join(folder, "dist"), arch)
	}
	for _, name := range []string{"pgsource", "kafkasink"} {
		t.Run(name, func(t *testing.T) {
			image := "holdfast/" + name
			build := func(image, platform string) {
				e.docker(t, "build", "--target", name, "--tag", image, "--platform", platform,
					"--build-arg", "BINARIES=prebuilt", "--build-arg", "BASE=scratch", folder)
			}
			build(image, "linux/"+runtime.GOARCH)
			t.Run("what the image says", func(t *testing.T) { checkImage(t, e, name, image, runtime.GOARCH) })
			t.Run("for another architecture", func(t *testing.T) {
				other := map[string]string{"amd64": "arm64", "arm64": "amd64"}[runtime.GOARCH]
				build(image+":"+other, "linux/"+other)
				checkImage(t, e, name, image+":"+other, other)
				e.docker(t, "image", "rm", image+":"+other)
			})
			t.Run("version", func(t *testing.T) {
				out := e.docker(t, "run", "--rm", "--network", "none", "--read-only", "--cap-drop", "ALL", image, "version")
				if !strings.Contains(out, name) {
					t.Errorf("version prints %q, want the daemon's name in it", out)
				}
			})
			settings := compose.runArguments(t, name)
			t.Run("the settings of docker-compose.yml", func(t *testing.T) {
				e.docker(t, slices.Concat([]string{"run", "--rm", "--network", "none", "--read-only", "--cap-drop", "ALL"}, settings, []string{image, "config"})...)
			})
			t.Run("life", func(t *testing.T) { checkLife(t, e, compose, name, image, settings) })
		})
	}
}

// checkImage reads from the image what an operator relies on.
func checkImage(t *testing.T, e *engine, name, image, arch string) {
	t.Helper()
	if got := strings.TrimSpace(e.docker(t, "image", "inspect", "--format", "{{.Os}}/{{.Architecture}}", image)); got != "linux/"+arch {
		t.Errorf("the image is for %s, want linux/%s", got, arch)
	}
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
// connect to: it must come up, answer on /healthz and to the image's own health
// check, unprivileged and on a read-only root, and end in order at the first
// signal.
func checkLife(t *testing.T, e *engine, compose composeFile, name, image string, settings []string) {
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
	pid := strings.TrimSpace(e.docker(t, "inspect", "--format", "{{.State.Pid}}", container))
	if got := runsAs(t, pid); got != user {
		t.Errorf("the daemon runs as uid %s, want %s", got, user)
	}
	harness.Await(t, time.Minute, "the engine's own word that the container is healthy", func(ctx context.Context) (any, bool) {
		out, err := output(ctx, e.env, "", e.client, "inspect", "--format", "{{.State.Health.Status}}", container)
		return fmt.Sprint(out, err), strings.TrimSpace(out) == "healthy"
	})
	checkHealthz(t, pid, compose.listen(t, name))
	for change := range strings.Lines(e.docker(t, "diff", container)) {
		if !strings.Contains(change, " /run") { // where the engine mounts the secrets
			t.Errorf("the container changed its root: %s", change)
		}
	}
	e.docker(t, "stop", "--time", "40", container)
	if got := strings.TrimSpace(e.docker(t, "inspect", "--format", "{{.State.ExitCode}}", container)); got != "0" {
		t.Errorf("exit code after SIGTERM is %s, want 0", got)
	}
}

// checkHealthz asks for /healthz in the container's own network, by a process of
// the machine that enters it: there is no client in the image, and no network
// outside of it.
func checkHealthz(t *testing.T, pid, port string) {
	t.Helper()
	out := need(t, nil, "", "nsenter", "--target", pid, "--net", "bash", "-c",
		"exec 3<>/dev/tcp/127.0.0.1/"+port+" && printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&3 && cat <&3")
	if !strings.HasPrefix(out, "HTTP/1.0 200 ") || !strings.Contains(out, `"checks":[`) {
		t.Errorf("/healthz answers:\n%s", out)
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

// buildContext makes a folder with what a build reads: the files named, so that
// the checkout's own dist stays as it is.
func buildContext(t *testing.T, names ...string) string {
	t.Helper()
	root, folder := repository(t), t.TempDir()
	for _, name := range append(names, "Dockerfile", ".dockerignore") {
		need(t, nil, root, "cp", "-R", name, folder)
	}
	return folder
}

// checkBinaries holds that "make dist" made for an architecture what it says:
// both daemons, static, of this architecture, without the paths of whoever built
// them, with the sums beside them. That of the machine is run, too.
func checkBinaries(t *testing.T, dist, arch string) {
	t.Helper()
	need(t, nil, dist, "sha256sum", "--check", "--strict", "SHA256SUMS")
	sums, err := os.ReadFile(filepath.Join(dist, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	machine := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[arch]
	for _, name := range []string{"pgsource", "kafkasink"} {
		relative := "linux-" + arch + "/" + name
		path := filepath.Join(dist, relative)
		if !strings.Contains(string(sums), "  "+relative+"\n") {
			t.Errorf("SHA256SUMS has no %s", relative)
		}
		file, err := elf.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		if file.Machine != machine || file.Class != elf.ELFCLASS64 {
			t.Errorf("%s is for %s, %s", relative, file.Machine, file.Class)
		}
		for _, p := range file.Progs {
			if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
				t.Errorf("%s is not static: it has a %s segment", relative, p.Type)
			}
		}
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]string{"path": info.Path}
		for _, s := range info.Settings {
			if slices.Contains([]string{"-trimpath", "CGO_ENABLED", "GOARCH", "GOOS"}, s.Key) {
				got[s.Key] = s.Value
			}
		}
		want := map[string]string{"path": "holdfast/cmd/" + name, "-trimpath": "true", "CGO_ENABLED": "0", "GOARCH": arch, "GOOS": "linux"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s was built otherwise (-want +got):\n%s", relative, diff)
		}
		if arch == runtime.GOARCH {
			if out := need(t, nil, "", path, "version"); !strings.HasPrefix(out, name+" ") {
				t.Errorf("%s version prints %q", relative, out)
			}
		}
	}
}
