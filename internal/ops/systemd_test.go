package ops

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

func TestServiceManagerIsTold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "40000")
	if err := socket.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	await := func(part string) {
		t.Helper()
		buf := make([]byte, 4096)
		for {
			n, err := socket.Read(buf)
			if err != nil {
				t.Fatalf("wait for %s: %v", part, err)
			}
			if strings.Contains(string(buf[:n]), part) {
				return
			}
		}
	}
	c := newClock()
	h := newHealth(t, c, prometheus.NewRegistry(), "source")
	serving, end := context.WithCancel(t.Context())
	work, stop := context.WithCancel(t.Context())
	var told sync.WaitGroup
	told.Go(func() { tellServiceManager(serving, work, h, slog.New(slog.DiscardHandler)) })
	await("READY=1")
	await("phase connecting\nWATCHDOG=1")
	h.SetPhase(PhaseBlocked)
	await("STATUS=blocked, phase blocked")
	c.forward(time.Hour) // the main loop hangs: the watchdog is not fed
	await("phase blocked")
	buf := make([]byte, 4096)
	n, err := socket.Read(buf)
	if err != nil || strings.Contains(string(buf[:n]), "WATCHDOG") {
		t.Errorf("a daemon that hangs says %q, %v", buf[:n], err)
	}
	stop()
	await("STOPPING=1")
	end()
	told.Wait()
}

// Without a service manager nothing is told and nothing runs.
func TestWithoutAServiceManager(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	tellServiceManager(t.Context(), t.Context(), newHealth(t, newClock(), prometheus.NewRegistry()), slog.New(slog.DiscardHandler))
}
