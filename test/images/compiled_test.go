//go:build compiled

package images

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// The stage of the Dockerfile that compiles, as "docker compose build" and "make
// images" use it. The engine reaches no registry, so what stands for the golang
// image is made here: this machine's Go and a shell, with the modules beside them
// as files. What is not held is the golang image itself.
func TestCompiledStage(t *testing.T) {
	e := needEngine(t)
	folder := buildContext(t, "cmd", "internal", "go.mod", "go.sum")
	standIn := goImage(t, e)
	for _, arch := range []string{"amd64", "arm64"} {
		image := "holdfast/pgsource:compiled-" + arch
		e.docker(t, "build", "--target", "pgsource", "--tag", image, "--platform", "linux/"+arch, "--network", "none",
			"--build-arg", "GO_IMAGE="+standIn, folder)
		checkImage(t, e, "pgsource", image, arch)
		if arch == runtime.GOARCH {
			if out := e.docker(t, "run", "--rm", "--network", "none", "--read-only", image, "version"); !strings.HasPrefix(out, "pgsource ") {
				t.Errorf("version prints %q", out)
			}
		}
	}
}

// goImage makes an image in which Go compiles this module without any network,
// and gives its name.
func goImage(t *testing.T, e *engine) string {
	t.Helper()
	folder := t.TempDir()
	goroot := strings.TrimSpace(need(t, nil, "", "go", "env", "GOROOT"))
	modules := strings.TrimSpace(need(t, nil, "", "go", "env", "GOMODCACHE"))
	// The machine's own cache has more than this module needs; it is the proxy
	// from which a small one is filled, and that is the proxy inside.
	small := filepath.Join(folder, "modules")
	need(t, map[string]string{
		"GOPROXY": "file://" + filepath.Join(modules, "cache", "download"), "GOSUMDB": "off", "GOMODCACHE": small,
		"GOFLAGS": "-modcacherw", // so that the test's folder can be removed
	}, repository(t), "go", "mod", "download")
	root := filepath.Join(folder, "root")
	script := `set -euo pipefail
mkdir -p "$2/usr/local" "$2/tmp" "$2/root" "$2/bin"
cp -a "$1" "$2/usr/local/go"
rm -rf "$2"/usr/local/go/{test,api,doc,misc}
mv "$3/cache/download" "$2/modules"
for file in /bin/sh $(ldd /bin/sh | grep -o '/[^ ]*'); do
	mkdir -p "$2$(dirname "$file")"
	cp -L "$file" "$2$file"
done`
	need(t, nil, "", "bash", "-c", script, "goimage", goroot, root, small)
	const name = "go-of-this-machine:1"
	need(t, e.env, "", "bash", "-c", `set -euo pipefail
tar -C "$1" -c . | "$2" import --change 'ENV PATH=/usr/local/go/bin:/bin GOPATH=/go GOPROXY=file:///modules GOSUMDB=off GOTOOLCHAIN=local' - "$3"`,
		"import", root, e.client, name)
	if err := os.RemoveAll(root); err != nil {
		t.Fatal(err)
	}
	return name
}
