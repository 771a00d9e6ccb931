package harness_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"holdfast/test/harness"
)

// echo is a server that sends back what it gets.
func echo(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(conn, conn)
				_ = conn.Close()
			}()
		}
	}()
	t.Cleanup(func() { _ = ln.Close(); <-done })
	return ln.Addr().String()
}

func dial(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	to, err := net.ResolveTCPAddr("tcp", addr)
	must(t, err)
	conn, err := net.DialTCP("tcp", nil, to)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// say sends text and reads that much back within the time.
func say(conn net.Conn, text string, within time.Duration) (string, error) {
	if _, err := io.WriteString(conn, text); err != nil {
		return "", err
	}
	if err := conn.SetReadDeadline(time.Now().Add(within)); err != nil {
		return "", err
	}
	buf := make([]byte, len(text))
	n, err := io.ReadFull(conn, buf)
	return string(buf[:n]), err
}

func TestProxyForwardsAndCounts(t *testing.T) {
	p := harness.NeedProxy(t, echo(t))
	conn := dial(t, p.Addr())
	got, err := say(conn, "hello", 10*time.Second)
	if err != nil || got != "hello" {
		t.Fatalf("got %q, %v", got, err)
	}
	if up, down := p.Bytes(harness.Up), p.Bytes(harness.Down); up != 5 || down != 5 {
		t.Errorf("counted %d up, %d down, want 5 and 5", up, down)
	}
	must(t, conn.CloseWrite())
	if rest, err := io.ReadAll(conn); err != nil || len(rest) != 0 {
		t.Errorf("after an orderly end: %q, %v", rest, err)
	}
}

func TestProxyCutsAndTakesNewConnections(t *testing.T) {
	p := harness.NeedProxy(t, echo(t))
	conn := dial(t, p.Addr())
	_, err := say(conn, "x", 10*time.Second)
	must(t, err)
	p.Cut()
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after a cut: %v, want a reset", err)
	}
	_, err = say(dial(t, p.Addr()), "x", 10*time.Second)
	must(t, err)
	p.Refuse()
	if conn, err := net.Dial("tcp", p.Addr()); err == nil {
		_ = conn.Close()
		t.Error("a refusing proxy took a connection")
	}
	must(t, p.Accept())
	_, err = say(dial(t, p.Addr()), "x", 10*time.Second)
	must(t, err)
	if n := p.Connections(); n != 3 {
		t.Errorf("counted %d connections, want 3", n)
	}
}

func TestProxyStallsAndResumes(t *testing.T) {
	p := harness.NeedProxy(t, echo(t))
	conn := dial(t, p.Addr())
	_, err := say(conn, "x", 10*time.Second)
	must(t, err)
	p.Stall()
	if _, err := say(conn, "held", 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("a stalled proxy answered: %v", err)
	}
	p.Resume()
	must(t, conn.SetReadDeadline(time.Now().Add(10*time.Second)))
	buf := make([]byte, 4)
	if _, err := io.ReadFull(conn, buf); err != nil || string(buf) != "held" {
		t.Errorf("after the stall: %q, %v", buf, err)
	}
}

// What is frozen stays so, whatever its client does; other connections work.
func TestProxyFreezes(t *testing.T) {
	p := harness.NeedProxy(t, echo(t))
	old := dial(t, p.Addr())
	_, err := say(old, "x", 10*time.Second)
	must(t, err)
	p.Freeze()
	p.Resume()
	if _, err := say(old, "lost", 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("a frozen connection answered: %v", err)
	}
	up := p.Bytes(harness.Up)
	_, err = say(dial(t, p.Addr()), "new", 10*time.Second)
	must(t, err)
	if n := p.Bytes(harness.Up) - up; n != 3 {
		t.Errorf("%d bytes passed, of a new connection that said 3", n)
	}
}

func TestProxyCutsAfterSoManyBytes(t *testing.T) {
	p := harness.NeedProxy(t, echo(t))
	p.CutAfter(harness.Down, 3)
	got, err := say(dial(t, p.Addr()), "hello", 10*time.Second)
	if err == nil || len(got) > 3 {
		t.Errorf("got %q, %v: want at most 3 bytes and an error", got, err)
	}
	if n := p.Bytes(harness.Down); n != 3 {
		t.Errorf("forwarded %d bytes, want 3", n)
	}
	// The limit is used up: the next connection is whole.
	_, err = say(dial(t, p.Addr()), "hello", 10*time.Second)
	must(t, err)
}

func TestProxyClosesWhileStalled(t *testing.T) {
	p, err := harness.StartProxy(echo(t))
	must(t, err)
	conn := dial(t, p.Addr())
	_, err = say(conn, "x", 10*time.Second)
	must(t, err)
	p.Stall()
	_, _ = io.WriteString(conn, "held")
	closed := make(chan struct{})
	go func() { p.Close(); close(closed) }()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	select {
	case <-closed:
	case <-ctx.Done():
		t.Fatal("Close waits for a stalled connection")
	}
}
