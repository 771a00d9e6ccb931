package main

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"holdfast/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds the whole demo; it takes a third of it.
const patience = 3 * time.Minute

// screen takes what the demo prints, and lets the test wait for it.
type screen struct {
	t  *testing.T
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.t.Log(strings.TrimSuffix(string(p), "\n"))
	return s.b.Write(p)
}

func (s *screen) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// started is a demo that runs beside the test.
type started struct {
	*screen
	end  context.CancelFunc // Ctrl-C
	code chan int
}

func start(t *testing.T, keep string) *started {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	s := &started{screen: &screen{t: t}, end: cancel, code: make(chan int, 1)}
	t.Setenv("TMPDIR", shortTempDir(t))
	go func() { s.code <- run(ctx, keep, s.screen) }()
	return s
}

// shortTempDir gives a folder in which a unix socket's path is short enough, and
// fails the test when something is left in it.
func shortTempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "hf-") //nolint:usetesting // that of t.TempDir lies in one that only we may enter
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil { // Postgres may run as another user
		t.Fatal(err)
	}
	t.Cleanup(func() {
		left, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil || len(left) > 0 {
			t.Errorf("left behind: %v (%v)", left, err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// await waits for text on the screen, and gives all of the screen.
func (s *started) await(text string) string {
	s.t.Helper()
	harness.Await(s.t, patience, text, func(context.Context) (any, bool) {
		select {
		case code := <-s.code:
			s.code <- code
			s.t.Fatalf("the demo ended with code %d without printing %q", code, text)
		default:
		}
		return nil, strings.Contains(s.text(), text)
	})
	return s.text()
}

// exit waits for the end of the demo.
func (s *started) exit() int {
	s.t.Helper()
	select {
	case code := <-s.code:
		return code
	case <-time.After(patience):
		s.t.Fatal("the demo does not end")
		return -1
	}
}

// gone fails the test when a process named by its number on the screen lives on.
func (s *started) gone() {
	s.t.Helper()
	pids := regexp.MustCompile(`process (\d+)`).FindAllStringSubmatch(s.text(), -1)
	if len(pids) == 0 {
		s.t.Error("the demo names no process")
	}
	for _, m := range pids {
		pid, err := strconv.Atoi(m[1])
		if err != nil || syscall.Kill(pid, 0) == nil {
			s.t.Errorf("process %s is still there", m[1])
		}
	}
}

func get(t *testing.T, url string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if err := res.Body.Close(); err != nil {
		t.Fatal(err)
	}
	return res.StatusCode
}

// The whole demo: both kills, the comparison, and then staying up, where every
// printed address answers until Ctrl-C.
func TestDemo(t *testing.T) {
	s := start(t, "1")
	text := s.await("kill -9 it")
	text = s.await("kafkasink   http://") + text
	head := strings.SplitN(s.text(), "\n", 3)
	if !strings.Contains(head[0], "Feldera is SIMULATED") || !strings.Contains(head[1], "kfake") {
		t.Errorf("the first lines do not say what is not real: %q", head[:2])
	}
	if n := strings.Count(s.text(), "EQUAL row by row"); n != 3 {
		t.Errorf("%d of 3 tables are equal", n)
	}
	if n := strings.Count(s.text(), "SIGKILL"); n != 2 {
		t.Errorf("%d kills, want 2", n)
	}
	pages := regexp.MustCompile(`http://\S+/(healthz|metrics)\b`).FindAllString(text, -1)
	if len(pages) < 4 {
		t.Errorf("only these addresses are printed: %v", pages)
	}
	for _, url := range pages {
		if status := get(t, url); status != http.StatusOK {
			t.Errorf("%s answers %d", url, status)
		}
	}
	curl := regexp.MustCompile(`curl -G (\S+) -d format=text --data-urlencode 'sql=([^']+)'`).FindStringSubmatch(text)
	if curl == nil {
		t.Fatal("no example query is printed")
	}
	if status := get(t, curl[1]+"?format=text&sql="+strings.NewReplacer(" ", "%20", "*", "%2A").Replace(curl[2])); status != http.StatusOK {
		t.Errorf("the example query answers %d", status)
	}
	s.end()
	if code := s.exit(); code != 0 {
		t.Errorf("exit code %d after Ctrl-C while staying up, want 0", code)
	}
	s.gone()
}

// Ctrl-C in the middle, with rows in flight and a daemon dead.
func TestDemoInterrupted(t *testing.T) {
	s := start(t, "")
	s.await("SIGKILL")
	s.end()
	if code := s.exit(); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	if !strings.Contains(s.text(), "interrupted before the end") {
		t.Error("it does not say that it was interrupted")
	}
	s.gone()
}

func TestDemoRefusesAKeepThatIsNone(t *testing.T) {
	s := start(t, "maybe")
	if code := s.exit(); code != 1 || !strings.Contains(s.text(), "set DEMO_KEEP=1") {
		t.Errorf("exit code %d:\n%s", code, s.text())
	}
}

// The comparison sees what is missing, what is too much and what differs.
func TestDifference(t *testing.T) {
	source := [][]string{{"1", "a"}, {"2", "b"}, {"3", "c"}, {"3", "c"}}
	onlyA, onlyB := difference(source, [][]string{{"3", "c"}, {"1", "a"}, {"2", "B"}})
	if got := strings.Join(onlyA, ";"); got != `["2" "b"];["3" "c"]` {
		t.Errorf("only at the source: %s", got)
	}
	if got := strings.Join(onlyB, ";"); got != `["2" "B"]` {
		t.Errorf("only at the destination: %s", got)
	}
}
