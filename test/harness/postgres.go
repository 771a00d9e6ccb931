package harness

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// PostgresOptions says how a private cluster differs from the usual one.
type PostgresOptions struct {
	// Settings are put last into postgresql.conf and so win over the harness's
	// own: {"wal_level": "replica"}, {"wal_sender_timeout": "2s"}, ….
	Settings map[string]string
	// Password, if not empty, is that of user postgres, and TCP connections,
	// replication ones too, must give it by SCRAM. Without it nobody is asked.
	Password string
	// HBA, if not empty, is what pg_hba.conf says about TCP connections.
	HBA string
	// Files are put into the data folder, readable for the server alone:
	// certificates and keys.
	Files map[string][]byte
	// OwnIdentifier makes the cluster by an initdb of its own. Without it all
	// clusters are copies of one, with one system identifier.
	OwnIdentifier bool
}

// Postgres is a private cluster: own folder, own port on 127.0.0.1, unix socket,
// wal_level logical, user and database "postgres". It starts with the folder's
// content, so [Postgres.Restart] and [Postgres.Stop] keep data and slots.
// Methods are safe for concurrent use, except those that start and stop.
type Postgres struct {
	// Version is what the server program calls itself: "postgres (PostgreSQL) 15.18 …".
	Version string

	bin     string // folder of the server programs
	dir     string // holds data/ and the socket
	port    int
	release func() // gives the port back
	opts    PostgresOptions
	user    *credential
	log     *Log
	proc    *Process // nil while stopped
}

// StopMode says how a cluster is stopped.
type StopMode syscall.Signal

// The ways to stop: Fast ends sessions and writes a checkpoint, waiting for WAL
// senders as a shutdown of a real primary does; Immediate is a crash, with
// recovery at the next start.
const (
	Fast      = StopMode(syscall.SIGINT)
	Immediate = StopMode(syscall.SIGQUIT)
)

// StartPostgres makes a private cluster and waits until it answers. The caller
// must Close it.
func StartPostgres(ctx context.Context, opts PostgresOptions) (*Postgres, error) {
	ctx, cancel := withDefaultTimeout(ctx, 90*time.Second)
	defer cancel()
	bin, err := postgresBin()
	if err != nil {
		return nil, err
	}
	pg := &Postgres{bin: bin, opts: opts, log: newLog()}
	if pg.user, err = postgresUser(); err != nil {
		return nil, err
	}
	template, version, err := postgresTemplate(ctx, bin, pg.user)
	if err != nil {
		return nil, err
	}
	pg.Version = version
	if pg.dir, err = tempDirFor(pg.user, "hf-pg-"); err != nil {
		return nil, err
	}
	if pg.port, pg.release, err = ReservePort(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(pg.dir))
	}
	if opts.OwnIdentifier {
		template = filepath.Join(pg.dir, "own")
		if err := initdb(ctx, bin, pg.user, template); err != nil {
			return nil, errors.Join(err, pg.Close())
		}
	}
	if err := pg.prepare(ctx, template); err != nil {
		return nil, errors.Join(err, pg.Close())
	}
	if err := pg.Start(ctx); err != nil {
		return nil, errors.Join(err, pg.Close())
	}
	if opts.Password != "" {
		if err := pg.requirePassword(ctx); err != nil {
			return nil, errors.Join(err, pg.Close())
		}
	}
	return pg, nil
}

// NeedPostgres is [StartPostgres] for tests: it fails the test when the cluster
// does not start, closes it at the end, and shows its log when the test failed.
func NeedPostgres(tb testing.TB, opts PostgresOptions) *Postgres {
	tb.Helper()
	pg, err := StartPostgres(tb.Context(), opts)
	if err != nil {
		tb.Fatal(err)
	}
	closeAtEnd(tb, pg)
	return pg
}

func closeAtEnd(tb testing.TB, pg *Postgres) {
	tb.Helper()
	tb.Cleanup(func() {
		if err := pg.Close(); err != nil {
			tb.Errorf("close Postgres: %v", err)
		}
		showLog(tb, "postgres", pg.log)
	})
}

func postgresBin() (string, error) {
	if path, err := exec.LookPath("postgres"); err == nil {
		if _, err := os.Stat(filepath.Join(filepath.Dir(path), "initdb")); err == nil {
			return filepath.Dir(path), nil
		}
	}
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if err != nil {
		return "", fmt.Errorf("look for initdb: %w", err)
	}
	if len(found) == 0 {
		return "", errors.New("find Postgres server programs: neither postgres nor initdb in PATH or /usr/lib/postgresql/*/bin; run test/setup.sh (Debian: apt-get install postgresql)")
	}
	major := func(path string) int {
		n, _ := strconv.Atoi(strings.Split(path, "/")[4])
		return n
	}
	return filepath.Dir(slices.MaxFunc(found, func(a, b string) int { return major(a) - major(b) })), nil
}

// postgresUser gives the user that the server runs as, nil for our own: the
// server refuses to run as root.
func postgresUser() (*credential, error) {
	if os.Getuid() != 0 {
		return nil, nil //nolint:nilnil // nil stands for "as this process"
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, errU := strconv.ParseUint(u.Uid, 10, 32)
		gid, errG := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(errU, errG); err != nil {
			return nil, fmt.Errorf("read ids of user %s: %w", name, err)
		}
		return &credential{name: name, uid: uint32(uid), gid: uint32(gid)}, nil
	}
	return nil, errors.New("find a user for Postgres: it refuses to run as root, and there is neither a user postgres nor a user nobody")
}

// tempDirFor makes a temporary folder that belongs to the user. Its path is
// short, since a unix socket's is limited to about 100 bytes.
func tempDirFor(u *credential, prefix string) (string, error) {
	dir, err := os.MkdirTemp("", prefix)
	if err != nil {
		return "", fmt.Errorf("make temporary folder: %w", err)
	}
	if u != nil {
		if err := os.Chown(dir, int(u.uid), int(u.gid)); err != nil {
			return "", errors.Join(fmt.Errorf("give temporary folder to user %s: %w", u.name, err), os.RemoveAll(dir))
		}
	}
	return dir, nil
}

// postgresTemplate gives a folder that initdb has made with these programs, from
// the cache if it is there. initdb runs as the server's user in a temporary
// folder, since that user may not be able to enter our cache.
func postgresTemplate(ctx context.Context, bin string, u *credential) (dir, version string, err error) {
	version, err = output(ctx, processSpec{name: "postgres --version", path: filepath.Join(bin, "postgres"), args: []string{"--version"}})
	if err != nil {
		return "", "", err
	}
	version = strings.TrimSpace(version)
	name := "postgres-" + strings.Trim(regexp.MustCompile(`[^0-9A-Za-z.]+`).ReplaceAllString(version, "-"), "-")
	dir, err = cached(ctx, name, func(part string) error {
		work, err := tempDirFor(u, "hf-initdb-")
		if err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(work) }()
		if err := initdb(ctx, bin, u, work); err != nil {
			return err
		}
		return copyTree(ctx, filepath.Join(work, "data"), filepath.Join(part, "data"), nil)
	})
	return dir, version, err
}

// initdb makes a cluster in the folder data of dir, as the server's user.
func initdb(ctx context.Context, bin string, u *credential, dir string) error {
	_, err := output(ctx, processSpec{
		name: "initdb", path: filepath.Join(bin, "initdb"), user: u, env: serverEnv(),
		args: []string{"-D", filepath.Join(dir, "data"), "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"},
	})
	return err
}

// serverEnv is the environment of the servers: nothing of the caller's settings
// (PGHOST, KAFKA_OPTS, a locale) reaches them.
func serverEnv() []string {
	return []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.TempDir(), "TMPDIR=" + os.TempDir(), "LC_ALL=C", "TZ=UTC"}
}

// copyTree copies with cp, which does it in the kernel, and gives the copy to u.
func copyTree(ctx context.Context, from, to string, u *credential) error {
	if _, err := output(ctx, processSpec{name: "cp", path: "cp", args: []string{"-R", "--preserve=mode", "--reflink=auto", from, to}, env: serverEnv()}); err != nil {
		return fmt.Errorf("copy %s: %w", from, err)
	}
	if u == nil {
		return nil
	}
	return filepath.WalkDir(to, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, int(u.uid), int(u.gid))
	})
}

func (pg *Postgres) data() string { return filepath.Join(pg.dir, "data") }

func (pg *Postgres) prepare(ctx context.Context, template string) error {
	if err := copyTree(ctx, filepath.Join(template, "data"), pg.data(), pg.user); err != nil {
		return err
	}
	if err := os.Chmod(pg.data(), 0o700); err != nil {
		return fmt.Errorf("close the data folder to others: %w", err)
	}
	if err := pg.addFiles(); err != nil {
		return err
	}
	settings := map[string]string{
		"listen_addresses":        "127.0.0.1",
		"port":                    strconv.Itoa(pg.port),
		"unix_socket_directories": pg.dir,
		"wal_level":               "logical",
		"max_wal_senders":         "20",
		"max_replication_slots":   "20",
		"max_connections":         "100",
		"shared_buffers":          "32MB",
		"fsync":                   "off",
		"full_page_writes":        "off",
		"password_encryption":     "scram-sha-256",
		"log_line_prefix":         "%m [%p] %a ",
		"timezone":                "UTC",
		"log_timezone":            "UTC",
	}
	maps.Copy(settings, pg.opts.Settings)
	var conf strings.Builder
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&conf, "%s = '%s'\n", name, strings.ReplaceAll(settings[name], "'", "''"))
	}
	f, err := os.OpenFile(filepath.Join(pg.data(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("open postgresql.conf: %w", err)
	}
	_, err = f.WriteString("\n" + conf.String())
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write postgresql.conf: %w", err)
	}
	return nil
}

// addFiles writes the options' files into the data folder.
func (pg *Postgres) addFiles() error {
	files := maps.Clone(pg.opts.Files)
	if pg.opts.HBA != "" {
		if files == nil {
			files = make(map[string][]byte)
		}
		files["pg_hba.conf"] = []byte("local all,replication all trust\n" + pg.opts.HBA)
	}
	for name, content := range files {
		path := filepath.Join(pg.data(), name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
		if pg.user != nil {
			if err := os.Chown(path, int(pg.user.uid), int(pg.user.gid)); err != nil {
				return fmt.Errorf("give %s to user %s: %w", name, pg.user.name, err)
			}
		}
	}
	return nil
}

// Start starts a cluster that was stopped, on the same port, and waits until it
// takes connections.
func (pg *Postgres) Start(ctx context.Context) error {
	if pg.proc != nil {
		return errors.New("start Postgres: it runs already")
	}
	ctx, cancel := withDefaultTimeout(ctx, 60*time.Second)
	defer cancel()
	mark := pg.log.Mark()
	proc, err := startProcess(processSpec{
		name: "postgres", path: filepath.Join(pg.bin, "postgres"), args: []string{"-D", pg.data()},
		env: serverEnv(), dir: pg.data(), user: pg.user, onLoss: syscall.SIGQUIT,
	}, pg.log)
	if err != nil {
		return err
	}
	pg.proc = proc
	if _, err := pg.log.WaitSince(ctx, mark, regexp.MustCompile(`database system is ready to accept (read-only )?connections`)); err != nil {
		return fmt.Errorf("start Postgres: %w", errors.Join(err, pg.Stop(Immediate)))
	}
	return nil
}

// Stop stops the cluster and waits until it is gone; data, slots and port stay.
// One that is stopped already is no error.
func (pg *Postgres) Stop(mode StopMode) error {
	if pg.proc == nil {
		return nil
	}
	proc := pg.proc
	pg.proc = nil
	return proc.stop(syscall.Signal(mode))
}

// Snapshot copies the files of a cluster that is stopped, as a snapshot of its
// disk does.
func (pg *Postgres) Snapshot(ctx context.Context) error {
	if pg.proc != nil {
		return errors.New("copy a cluster: it runs")
	}
	ctx, cancel := withDefaultTimeout(ctx, 60*time.Second)
	defer cancel()
	return copyTree(ctx, pg.data(), pg.snapshot(), pg.user)
}

// PutBack makes the files of a cluster that is stopped what [Postgres.Snapshot]
// has copied.
func (pg *Postgres) PutBack() error {
	if pg.proc != nil {
		return errors.New("put a cluster back: it runs")
	}
	if err := os.RemoveAll(pg.data()); err != nil {
		return fmt.Errorf("put a cluster back: %w", err)
	}
	if err := os.Rename(pg.snapshot(), pg.data()); err != nil {
		return fmt.Errorf("put a cluster back: %w", err)
	}
	return nil
}

func (pg *Postgres) snapshot() string { return filepath.Join(pg.dir, "snapshot") }

// Restart is Stop and Start.
func (pg *Postgres) Restart(ctx context.Context, mode StopMode) error {
	return errors.Join(pg.Stop(mode), pg.Start(ctx))
}

// Close stops the cluster at once, waits until it is gone and removes it. It may
// be called twice.
func (pg *Postgres) Close() error {
	err := pg.Stop(Immediate)
	if pg.release != nil {
		pg.release()
		pg.release = nil
	}
	return errors.Join(err, os.RemoveAll(pg.dir))
}

// Log gives what the server has written, over restarts.
func (pg *Postgres) Log() *Log { return pg.log }

// Dir gives the cluster's folder, for files that are to live as long as it.
func (pg *Postgres) Dir() string { return pg.dir }

// Addr gives host:port, for a [Proxy].
func (pg *Postgres) Addr() string { return loopback(pg.port) }

// DSN gives the URL of database postgres as user postgres over TCP.
func (pg *Postgres) DSN() string {
	return pg.DSNFor("postgres", pg.opts.Password, "postgres", pg.Addr())
}

// DSNFor gives a URL over TCP for another user, password, database or address
// (that of a proxy). An empty password is left out.
func (pg *Postgres) DSNFor(user, password, database, addr string) string {
	u := url.URL{Scheme: "postgres", User: url.User(user), Host: addr, Path: "/" + database, RawQuery: "sslmode=disable"}
	if password != "" {
		u.User = url.UserPassword(user, password)
	}
	return u.String()
}

// SocketDSN gives a connection string over the unix socket.
func (pg *Postgres) SocketDSN() string {
	return fmt.Sprintf("host=%s port=%d user=postgres dbname=postgres", pg.dir, pg.port)
}

// Connect opens a connection as user postgres over the unix socket, which never
// asks for a password. The caller closes it.
func (pg *Postgres) Connect(ctx context.Context) (*pgx.Conn, error) {
	cfg, err := pgx.ParseConfig("sslmode=disable user=postgres database=postgres application_name=harness host=" + pg.dir + " port=" + strconv.Itoa(pg.port))
	if err != nil {
		return nil, fmt.Errorf("read own connection string: %w", err)
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to Postgres: %w", err)
	}
	return conn, nil
}

func (pg *Postgres) with(ctx context.Context, fn func(*pgx.Conn) error) error {
	conn, err := pg.Connect(ctx)
	if err != nil {
		return err
	}
	err = fn(conn)
	return errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
}

// Exec runs statements on a connection of its own. Without arguments there may
// be several, separated by semicolons, and they are one transaction.
func (pg *Postgres) Exec(ctx context.Context, sql string, args ...any) error {
	return pg.with(ctx, func(conn *pgx.Conn) error {
		if len(args) == 0 {
			_, err := conn.PgConn().Exec(ctx, sql).ReadAll()
			return err
		}
		_, err := conn.Exec(ctx, sql, args...)
		return err
	})
}

// Rows runs a query and gives every row as text, null as "NULL": the form that
// tests compare.
func (pg *Postgres) Rows(ctx context.Context, sql string, args ...any) (rows [][]string, err error) {
	err = pg.with(ctx, func(conn *pgx.Conn) error {
		res, err := conn.Query(ctx, sql, append([]any{pgx.QueryResultFormats{pgx.TextFormatCode}}, args...)...)
		if err != nil {
			return err
		}
		defer res.Close()
		for res.Next() {
			row := make([]string, 0, len(res.RawValues()))
			for _, v := range res.RawValues() {
				if v == nil {
					row = append(row, "NULL")
				} else {
					row = append(row, string(v))
				}
			}
			rows = append(rows, row)
		}
		return res.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("query %q: %w", sql, err)
	}
	return rows, nil
}

// QueryValue runs a query that gives one row of one column.
func QueryValue[T any](ctx context.Context, pg *Postgres, sql string, args ...any) (value T, err error) {
	err = pg.with(ctx, func(conn *pgx.Conn) error { return conn.QueryRow(ctx, sql, args...).Scan(&value) })
	if err != nil {
		return value, fmt.Errorf("query %q: %w", sql, err)
	}
	return value, nil
}

// ConfirmedFlushLSN gives what the server holds as acknowledged for the slot:
// the outside view that tests compare with what the destination has.
func (pg *Postgres) ConfirmedFlushLSN(ctx context.Context, slot string) (uint64, error) {
	return pg.lsn(ctx, `SELECT (confirmed_flush_lsn - '0/0')::text FROM pg_replication_slots WHERE slot_name = $1`, slot)
}

// CurrentLSN gives the position behind the last WAL record written.
func (pg *Postgres) CurrentLSN(ctx context.Context) (uint64, error) {
	return pg.lsn(ctx, `SELECT (pg_current_wal_lsn() - '0/0')::text`)
}

func (pg *Postgres) lsn(ctx context.Context, sql string, args ...any) (uint64, error) {
	text, err := QueryValue[string](ctx, pg, sql, args...)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("query %q: %w", sql, err)
	}
	return n, nil
}

// requirePassword sets the password over the unix socket, then asks for it on
// every TCP connection.
func (pg *Postgres) requirePassword(ctx context.Context) error {
	if err := pg.Exec(ctx, `ALTER ROLE postgres PASSWORD '`+strings.ReplaceAll(pg.opts.Password, "'", "''")+`'`); err != nil {
		return fmt.Errorf("set the password of user postgres: %w", err)
	}
	hba := "local all,replication all trust\nhost all,replication all 127.0.0.1/32 scram-sha-256\n"
	if err := os.WriteFile(filepath.Join(pg.data(), "pg_hba.conf"), []byte(hba), 0o600); err != nil {
		return fmt.Errorf("write pg_hba.conf: %w", err)
	}
	if err := pg.Restart(ctx, Fast); err != nil {
		return fmt.Errorf("apply pg_hba.conf: %w", err)
	}
	return nil
}
