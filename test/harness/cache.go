package harness

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// CacheDir gives, and makes, the folder for what is slow to make and the same
// for every run: $HOLDFAST_CACHE, or "holdfast" in the user's cache folder. It
// is outside the checkout, may be deleted at any time between runs, and is never
// a source of truth.
func CacheDir() (string, error) {
	dir := os.Getenv("HOLDFAST_CACHE")
	if dir == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			user = filepath.Join(os.TempDir(), "holdfast-cache-"+strconv.Itoa(os.Getuid()))
		}
		dir = filepath.Join(user, "holdfast")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make cache folder (set HOLDFAST_CACHE to another): %w", err)
	}
	return dir, nil
}

// lockFile takes an exclusive lock that other processes respect, and gives the
// function that releases it. The kernel releases it too when this process dies.
func lockFile(ctx context.Context, path string) (release func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	err = Eventually(ctx, "lock on "+path, func(context.Context) (any, bool) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		return err, err == nil
	})
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// cached gives the folder "name" of the cache, made by fill when it is not
// there. fill writes into a folder beside it that is renamed when fill has
// succeeded, so a folder with the final name is always complete; a crash leaves
// at most a folder that the next filler removes.
func cached(ctx context.Context, name string, fill func(dir string) error) (string, error) {
	root, err := CacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(root, name)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	release, err := lockFile(ctx, dir+".lock")
	if err != nil {
		return "", err
	}
	defer release()
	if _, err := os.Stat(dir); err == nil {
		return dir, nil // another process filled it while we waited for the lock
	}
	part := dir + ".part"
	if err := os.RemoveAll(part); err != nil {
		return "", fmt.Errorf("clear an unfinished cache folder: %w", err)
	}
	if err := os.Mkdir(part, 0o755); err != nil {
		return "", fmt.Errorf("make cache folder: %w", err)
	}
	if err := fill(part); err != nil {
		return "", err
	}
	if err := os.Rename(part, dir); err != nil {
		return "", fmt.Errorf("finish cache folder: %w", err)
	}
	return dir, nil
}

// portRange is below the range from which Linux takes the local port of an
// outgoing connection (32768 and up): a reserved port cannot be taken by a
// connection between the moment it is chosen and the moment its server binds it.
const (
	portFirst = 20000
	portCount = 12000
)

// ReservePort gives a TCP port of 127.0.0.1 that nothing listens on and that no
// other harness, in this process or another, is given until release is called.
// A server that is stopped and started again therefore finds its port free.
func ReservePort() (port int, release func(), err error) {
	root, err := CacheDir()
	if err != nil {
		return 0, nil, err
	}
	dir := filepath.Join(root, "ports")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return 0, nil, fmt.Errorf("make folder of reserved ports: %w", err)
	}
	first := rand.IntN(portCount)
	for i := range portCount {
		port := portFirst + (first+i)%portCount
		if f := tryPort(dir, port); f != nil {
			return port, func() { _ = f.Close() }, nil
		}
	}
	return 0, nil, fmt.Errorf("reserve a port of 127.0.0.1: all of %d-%d are taken", portFirst, portFirst+portCount-1)
}

// tryPort gives the locked file that stands for the port, or nil. The lock is
// one of the open file, so it excludes this process's other reservations too.
func tryPort(dir string, port int) *os.File {
	f, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(port)), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil
	}
	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
		// No process is started meanwhile. Else: the port is listened on here; a
		// process is forked beside, with a copy of the socket until it executes its
		// program; the port is closed here; whoever reserved it cannot bind it yet.
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
		ln, err := net.Listen("tcp", loopback(port))
		if err == nil && ln.Close() == nil {
			return f
		}
	}
	_ = f.Close()
	return nil
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// ModuleRoot gives the folder of the checkout that this process runs in: the
// nearest one upwards whose go.mod is module holdfast.
func ModuleRoot() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the checkout: %w", err)
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(strings.TrimSpace(string(mod)), "module holdfast\n") {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("find the checkout: no go.mod of module holdfast in %s or above; run this inside the checkout", start)
		}
	}
}

// withDefaultTimeout bounds ctx by d when it has no deadline of its own: no wait
// of this package is unbounded.
func withDefaultTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, d)
}
