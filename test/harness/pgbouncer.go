package harness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// PgBouncer is a connection pooler in front of a cluster: it speaks the protocol
// of ordinary sessions, refuses that of replication and the settings that it
// does not know, and, in its mode "transaction", gives each transaction to
// whichever of its sessions is free.
type PgBouncer struct {
	dir     string
	port    int
	release func()
	proc    *Process
	log     *Log
}

// StartPgBouncer starts a pooler with so many sessions of the server for each
// database and user. mode is its pool_mode. The caller must Close it.
func StartPgBouncer(ctx context.Context, pg *Postgres, mode string, sessions int) (*PgBouncer, error) {
	ctx, cancel := withDefaultTimeout(ctx, 30*time.Second)
	defer cancel()
	path, err := exec.LookPath("pgbouncer")
	if err != nil {
		path = "/usr/sbin/pgbouncer"
		if _, err := os.Stat(path); err != nil {
			return nil, errors.New("find pgbouncer: it is neither in PATH nor in /usr/sbin; run test/setup.sh (Debian: apt-get install pgbouncer)")
		}
	}
	p := &PgBouncer{log: newLog()}
	u, err := postgresUser() // it refuses to run as root, too
	if err != nil {
		return nil, err
	}
	if p.dir, err = tempDirFor(u, "hf-pgb-"); err != nil {
		return nil, err
	}
	if p.port, p.release, err = ReservePort(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(p.dir))
	}
	users := filepath.Join(p.dir, "users")
	conf := fmt.Sprintf("[databases]\n* = host=127.0.0.1 port=%d\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = %d\nunix_socket_dir =\nauth_type = trust\nauth_file = %s\npool_mode = %s\ndefault_pool_size = %d\n",
		pg.port, p.port, users, mode, sessions)
	for name, content := range map[string]string{"users": "\"postgres\" \"\"\n", "pgbouncer.ini": conf} {
		if err := os.WriteFile(filepath.Join(p.dir, name), []byte(content), 0o644); err != nil {
			return nil, errors.Join(fmt.Errorf("write %s: %w", name, err), p.Close())
		}
	}
	p.proc, err = startProcess(processSpec{
		name: "pgbouncer", path: path, args: []string{filepath.Join(p.dir, "pgbouncer.ini")}, env: serverEnv(), dir: p.dir, user: u, onLoss: syscall.SIGKILL,
	}, p.log)
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	err = Eventually(ctx, "pgbouncer answers", func(ctx context.Context) (any, bool) {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", p.Addr())
		if err != nil {
			return err, false
		}
		return nil, conn.Close() == nil
	})
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// NeedPgBouncer is [StartPgBouncer] for tests: it fails the test when the pooler
// does not start, and closes it at the end.
func NeedPgBouncer(tb testing.TB, pg *Postgres, mode string, sessions int) *PgBouncer {
	tb.Helper()
	p, err := StartPgBouncer(tb.Context(), pg, mode, sessions)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := p.Close(); err != nil {
			tb.Errorf("close pgbouncer: %v", err)
		}
		showLog(tb, "pgbouncer", p.log)
	})
	return p
}

// Addr is its host:port.
func (p *PgBouncer) Addr() string { return loopback(p.port) }

// Log is what it wrote.
func (p *PgBouncer) Log() *Log { return p.log }

// Close ends it.
func (p *PgBouncer) Close() error {
	var err error
	if p.proc != nil {
		err = p.proc.stop(syscall.SIGTERM)
	}
	p.release()
	return errors.Join(err, os.RemoveAll(p.dir))
}
