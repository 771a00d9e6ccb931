package wal

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"pgregory.net/rapid"

	"holdfast/internal/decode"
)

// fakeServer speaks just enough of the protocol to refuse or to end a login.
type fakeServer struct {
	addr string
	tls  *tls.Config // nil: the answer to SSLRequest is N
	// answer is what a start-up message gets; nil ends the connection.
	answer *pgproto3.ErrorResponse

	mu      sync.Mutex
	plain   []map[string]string // start-up messages that came unencrypted
	private []map[string]string // and those that came over TLS
}

func startFake(t *testing.T, f *fakeServer) *fakeServer {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f.addr = ln.Addr().String()
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer func() { _ = conn.Close() }()
				f.serve(conn)
			})
		}
	})
	t.Cleanup(func() { _ = ln.Close(); serving.Wait() })
	return f
}

func (f *fakeServer) serve(conn net.Conn) {
	encrypted := false
	for {
		var head [8]byte
		if _, err := io.ReadFull(conn, head[:]); err != nil {
			return
		}
		length, code := binary.BigEndian.Uint32(head[:]), binary.BigEndian.Uint32(head[4:])
		if code == 80877103 { // SSLRequest
			if f.tls == nil {
				_, _ = conn.Write([]byte("N"))
				continue
			}
			_, _ = conn.Write([]byte("S"))
			over := tls.Server(conn, f.tls)
			if over.Handshake() != nil {
				return
			}
			conn, encrypted = over, true
			continue
		}
		body := make([]byte, min(length, 1<<16)-8)
		if _, err := io.ReadFull(conn, body); err != nil {
			return
		}
		words := strings.Split(string(body), "\x00")
		params := map[string]string{}
		for i := 0; i+1 < len(words); i += 2 {
			params[words[i]] = words[i+1]
		}
		f.mu.Lock()
		if encrypted {
			f.private = append(f.private, params)
		} else {
			f.plain = append(f.plain, params)
		}
		f.mu.Unlock()
		if f.answer != nil {
			b, _ := f.answer.Encode(nil)
			_, _ = conn.Write(b)
		}
		return
	}
}

func (f *fakeServer) plaintext() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.plain)
}

// authority makes certificates for tests.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{cert: cert, key: key, file: filepath.Join(t.TempDir(), "ca.pem")}
	if err := os.WriteFile(a.file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return a
}

func (a *authority) serverTLS(t *testing.T, expires time.Duration, names ...string) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "server"}, DNSNames: names,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(expires),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
}

func dial(t *testing.T, dsn string) error {
	t.Helper()
	cfg, err := parseDSN(dsn, time.Minute)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err == nil {
		_ = conn.Close(ctx)
		t.Fatal("connected to a server that lets nobody in")
	}
	return connectFailure("connect to Postgres", cfg, err)
}

// Each failure has a sentence of its own, says what to do, and is final only
// where waiting does not help.
func TestConnectFailures(t *testing.T) {
	t.Parallel()
	says := func(code, message string) *pgproto3.ErrorResponse {
		return &pgproto3.ErrorResponse{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: code, Message: message}
	}
	ca, stranger := newAuthority(t), newAuthority(t)
	good := ca.serverTLS(t, time.Hour, "db.test", "127.0.0.1.nip")
	for name, c := range map[string]struct {
		server *fakeServer
		dsn    string // HOST stands for the address
		final  bool
		why    string
		do     string
		plain  int // start-up messages that may come unencrypted
	}{
		"wrong password":        {server: &fakeServer{answer: says("28P01", `password authentication failed for user "u"`)}, dsn: "postgres://u:secret@HOST/d?sslmode=disable", final: true, why: "password authentication failed", do: "PASSWORD", plain: 1},
		"no entry":              {server: &fakeServer{answer: says("28000", `no pg_hba.conf entry for host "127.0.0.1", user "u", database "d", no encryption`)}, dsn: "postgres://u:secret@HOST/d?sslmode=disable", final: true, why: "no pg_hba.conf entry", do: `hostssl "d" "u"`, plain: 1},
		"no entry, both ways":   {server: &fakeServer{tls: good, answer: says("28000", `no pg_hba.conf entry for host "127.0.0.1", user "u", database "d"`)}, dsn: "postgres://u:secret@HOST/d", final: true, why: "no pg_hba.conf entry", plain: 1},
		"certificate demanded":  {server: &fakeServer{tls: good, answer: says("28000", `connection requires a valid client certificate`)}, dsn: "postgres://u@HOST/d?sslmode=require", final: true, why: "client certificate", do: "sslcert"},
		"no role":               {server: &fakeServer{answer: says("28000", `role "u" does not exist`)}, dsn: "postgres://u@HOST/d?sslmode=disable", final: true, why: "does not exist", do: "CREATE ROLE", plain: 1},
		"no REPLICATION, old":   {server: &fakeServer{answer: says("42501", `must be superuser or replication role to start walsender`)}, dsn: "postgres://u@HOST/d?sslmode=disable", final: true, why: "walsender", do: `ALTER ROLE "u" REPLICATION`, plain: 1},
		"no REPLICATION":        {server: &fakeServer{answer: says("42501", `permission denied to start WAL sender`)}, dsn: "postgres://u@HOST/d?sslmode=disable", final: true, why: "WAL sender", do: `ALTER ROLE "u" REPLICATION`, plain: 1},
		"no CONNECT":            {server: &fakeServer{answer: says("42501", `permission denied for database "d"`)}, dsn: "postgres://u@HOST/d?sslmode=disable", final: true, why: "permission denied", do: `GRANT CONNECT ON DATABASE "d" TO "u"`, plain: 1},
		"no database":           {server: &fakeServer{answer: says("3D000", `database "d" does not exist`)}, dsn: "postgres://u@HOST/d?sslmode=disable", final: true, why: "does not exist", do: "database's name", plain: 1},
		"senders exhausted":     {server: &fakeServer{answer: says("53300", `number of requested standby connections exceeds max_wal_senders (currently 10)`)}, dsn: "postgres://u@HOST/d?sslmode=disable", why: "max_wal_senders", do: "raise max_wal_senders", plain: 1},
		"too many connections":  {server: &fakeServer{answer: says("53300", `sorry, too many clients already`)}, dsn: "postgres://u@HOST/d?sslmode=disable", why: "too many", do: "max_connections", plain: 1},
		"starting":              {server: &fakeServer{answer: says("57P03", `the database system is starting up`)}, dsn: "postgres://u@HOST/d?sslmode=disable", why: "starting up", do: "wait", plain: 1},
		"pooler":                {server: &fakeServer{answer: says("08P01", `unsupported startup parameter: replication`)}, dsn: "postgres://u@HOST/d?sslmode=disable", final: true, why: "pooler", do: "not the pooler's", plain: 1},
		"hangs up":              {server: &fakeServer{}, dsn: "postgres://u@HOST/d?sslmode=disable", why: "ended before the login", do: "load balancer", plain: 1},
		"no TLS, require":       {server: &fakeServer{}, dsn: "postgres://u:secret@HOST/d?sslmode=require", final: true, why: "does not speak TLS", do: "ssl = on"},
		"no TLS, verify-ca":     {server: &fakeServer{}, dsn: "postgres://u:secret@HOST/d?sslmode=verify-ca&sslrootcert=CA", final: true, why: "does not speak TLS", do: "ssl = on"},
		"no TLS, verify-full":   {server: &fakeServer{}, dsn: "postgres://u:secret@HOST/d?sslmode=verify-full", final: true, why: "does not speak TLS", do: "ssl = on"},
		"no TLS, authority":     {server: &fakeServer{}, dsn: "postgres://u:secret@HOST/d?sslrootcert=CA", final: true, why: "does not speak TLS", do: "ssl = on"},
		"no TLS, authority, kv": {server: &fakeServer{}, dsn: "host=127.0.0.1 port=PORT user=u password=secret sslrootcert=CA", final: true, why: "does not speak TLS", do: "ssl = on"},
		"no TLS, prefer":        {server: &fakeServer{answer: says("28P01", "password authentication failed")}, dsn: "postgres://u:secret@HOST/d?sslmode=prefer", final: true, why: "password authentication failed", do: "PASSWORD", plain: 1},
		"TLS, allow":            {server: &fakeServer{tls: good, answer: says("28P01", "password authentication failed")}, dsn: "postgres://u:secret@HOST/d?sslmode=allow", final: true, why: "password authentication failed", plain: 1},
		"TLS, prefer":           {server: &fakeServer{tls: good, answer: says("28P01", "password authentication failed")}, dsn: "postgres://u:secret@HOST/d?sslmode=prefer", final: true, why: "password authentication failed"},
		"other authority":       {server: &fakeServer{tls: stranger.serverTLS(t, time.Hour, "db.test")}, dsn: "postgres://u:secret@HOST/d?sslmode=verify-ca&sslrootcert=CA", final: true, why: "authority that is not trusted", do: "sslrootcert"},
		"other host":            {server: &fakeServer{tls: good}, dsn: "postgres://u:secret@HOST/d?sslmode=verify-full&sslrootcert=CA", final: true, why: "another host", do: "host name"},
		"other host is fine":    {server: &fakeServer{tls: good, answer: says("28P01", "password authentication failed")}, dsn: "postgres://u:secret@HOST/d?sslmode=verify-ca&sslrootcert=CA", final: true, why: "password authentication failed"},
		"expired":               {server: &fakeServer{tls: ca.serverTLS(t, -time.Minute, "db.test")}, dsn: "postgres://u:secret@HOST/d?sslmode=verify-ca&sslrootcert=CA", final: true, why: "expired", do: "renew"},
		"unknown host":          {dsn: "postgres://u:secret@nosuch.invalid/d?sslmode=disable", why: "nosuch.invalid"},
		"refused":               {dsn: "postgres://u:secret@127.0.0.1:1/d?sslmode=disable", why: "refused", do: "listen_addresses"},
		"no socket":             {dsn: "host=/nosuch user=u dbname=d", why: "Unix socket", do: "unix_socket_directories"},
		"one of two is down":    {server: &fakeServer{answer: says("3D000", `database "d" does not exist`)}, dsn: "postgres://u:secret@127.0.0.1:1,HOST/d?sslmode=disable", why: "refused", do: "listen_addresses", plain: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := strings.ReplaceAll(c.dsn, "CA", ca.file)
			if c.server != nil {
				startFake(t, c.server)
				_, port, _ := net.SplitHostPort(c.server.addr)
				dsn = strings.ReplaceAll(strings.ReplaceAll(dsn, "HOST", c.server.addr), "PORT", port)
			}
			err := dial(t, dsn)
			refused, final := errors.AsType[*decode.Refusal](err)
			do := ""
			if final {
				do = refused.Do
			} else if out, ok := errors.AsType[*outage](err); ok {
				do = out.Hint()
			}
			if final != c.final || !strings.Contains(err.Error(), c.why) || !strings.Contains(do, c.do) {
				t.Errorf("final %t (want %t), hint %q (want %q): %v (want %q)", final, c.final, do, c.do, err, c.why)
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("the password is in the error: %v", err)
			}
			if c.server != nil && c.server.plaintext() > c.plain {
				t.Errorf("%d start-up messages came in plaintext, at most %d may", c.server.plaintext(), c.plain)
			}
		})
	}
}

// What is wrong with the connection to the state's database names its setting,
// and advises nothing that is of the source's.
func TestStateConnectionFailures(t *testing.T) {
	t.Parallel()
	answers := map[string]*pgproto3.ErrorResponse{
		"password": {Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "28P01", Message: "password authentication failed"},
		"pooler":   {Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "08P01", Message: "unsupported startup parameter: extra_float_digits"},
		"wait":     nil, // hangs up
	}
	for name, answer := range answers {
		server := &fakeServer{answer: answer}
		startFake(t, server)
		for _, shared := range []bool{false, true} {
			dsn := "postgres://u:secret@" + server.addr + "/d?sslmode=disable"
			_, err := NewTableStore(TableOptions{DSN: func() (string, error) { return dsn, nil }, Schema: "s", Table: "t", Slot: "x", SourceCluster: shared}).connect(t.Context())
			if err == nil {
				t.Fatalf("%s: connected", name)
			}
			said := err.Error()
			if out, ok := errors.AsType[*outage](err); ok {
				said += " " + out.Hint()
			} else if strings.Contains(said, "PGSOURCE_STATE_DSN") == shared {
				t.Errorf("%s, in the source's cluster %t: %s", name, shared, said)
			}
			if !shared && (strings.Contains(said, "PGSOURCE_DSN") || strings.Contains(said, "PGSOURCE_TRANSPORT") || strings.Contains(said, "replication protocol")) {
				t.Errorf("%s: it speaks of the source: %s", name, said)
			}
		}
	}
	if err := CheckDSN("PGSOURCE_STATE_DSN", "postgres://u:p@ss/w@h/d"); err == nil || !strings.HasPrefix(err.Error(), "PGSOURCE_STATE_DSN: ") {
		t.Errorf("%v", err)
	}
}

// A connection string that can be read in two ways is refused: half a
// password would be taken for a host or a database, and be named.
func TestParseDSNRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ dsn, why string }{
		"slash in the password":     {"postgres://u:hunter/2@db/shop", "%2F"},
		"question mark":             {"postgres://u:hunter?2@db/shop", "%3F"},
		"two at signs":              {"postgres://u:hunter@2@db/shop", "%40"},
		"number sign":               {"postgres://u:12#hunter@db/shop", "%23"},
		"colon":                     {"postgres://u:1:hunter@db:54:32/shop", ""},
		"space in a keyword value":  {"host=db password=hunter 2=3 user=u", "quoted"},
		"unknown option":            {"postgres://u@db/shop?hunter2=1", "libpq"},
		"missing key of a pair":     {"postgres://u@db/shop?sslcert=/hunter2", "go together"},
		"sslmode":                   {"postgres://u@db/shop?sslmode=hunter2", "sslmode is none of"},
		"authority that is none":    {"postgres://u@db/shop?sslrootcert=/nosuch/hunter2", "no such file"},
		"attributes":                {"postgres://u@db/shop?target_session_attrs=hunter2", "target_session_attrs is none of"},
		"ports":                     {"host=a,b port=1,2,3", "another number of ports"},
		"port":                      {"host=a port=hunter2", "port"},
		"revocation list":           {"postgres://u@db/shop?sslcrl=/hunter2", "sslcrl"},
		"encryption by GSS":         {"postgres://u@db/shop?gssencmode=require", "gssencmode"},
		"replication from outside":  {"postgres://u@db/shop?replication=true", "replication"},
		"keepalive that is no time": {"postgres://u@db/shop?keepalives_idle=hunter2", "keepalives_idle"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := parseDSN(c.dsn, 0)
			if err == nil || !strings.Contains(err.Error(), c.why) {
				t.Fatalf("%v, want %q", err, c.why)
			}
			if strings.Contains(err.Error(), "hunter") {
				t.Errorf("a value is in the error: %v", err)
			}
		})
	}
}

// Whatever the password is made of: percent-encoded in a URL or quoted in the
// keyword form, it arrives as it is.
func TestParseDSNPasswords(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		password := rapid.StringMatching(`[ -~§ü☃]{1,20}`).Draw(t, "password")
		forms := []string{
			"postgres://u:" + strings.ReplaceAll(url.QueryEscape(password), "+", "%20") + "@db:5433/shop?sslmode=disable",
			"host=db port=5433 dbname=shop user=u sslmode=disable password='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(password) + "'",
		}
		for _, dsn := range forms {
			cfg, err := parseDSN(dsn, 0)
			if err != nil {
				t.Fatal(err)
			}
			if cfg.Password != password || cfg.Host != "db" || cfg.Database != "shop" || cfg.Port != 5433 {
				t.Fatalf("%q: password %q, host %q, database %q", dsn, cfg.Password, cfg.Host, cfg.Database)
			}
		}
	})
}

func TestParseDSNOptions(t *testing.T) {
	authority := newAuthority(t).file
	passfile := filepath.Join(t.TempDir(), "pgpass")
	if err := os.WriteFile(passfile, []byte("# comment\ndb:5432:shop:u:from the file\\:\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := parseDSN("postgres://u@db/shop?sslmode=disable&keepalives=1&keepalives_idle=7&tcp_user_timeout=9000&application_name=x&passfile="+url.QueryEscape(passfile), 0)
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Password != "from the file:" {
		t.Errorf("password %q is not that of passfile", cfg.Password)
	}
	if len(cfg.RuntimeParams) != 0 {
		t.Errorf("options of libpq became parameters of the session: %v", cfg.RuntimeParams)
	}

	for _, name := range []string{"PGHOST", "PGUSER", "PGSSLMODE", "PGSSLROOTCERT", "PGPASSFILE", "PGOPTIONS", "PGTZ", "PGDATABASE"} {
		t.Setenv(name, "")
	}
	t.Setenv("PGUSER", "u")
	t.Setenv("PGHOST", "db")
	t.Setenv("PGDATABASE", "shop")
	t.Setenv("PGPASSFILE", passfile)
	t.Setenv("PGTZ", "Asia/Tokyo")
	t.Setenv("PGOPTIONS", "-c datestyle=German")
	s := &Source{cfg: Config{DSN: func() (string, error) { return "sslmode=disable", nil }, StallTimeout: time.Minute, Slot: strings.Repeat("s", 63)}, tag: newTag()}
	base, err := s.connectionConfig()
	if err != nil {
		t.Fatal(err)
	}
	if base.Host != "db" || base.User != "u" || base.Database != "shop" || base.Password != "from the file:" {
		t.Errorf("PG* variables do not fill in: host %q user %q database %q", base.Host, base.User, base.Database)
	}
	if base.RuntimeParams["timezone"] != "UTC" || base.RuntimeParams["datestyle"] != "ISO" {
		t.Errorf("the session is not pinned: %v", base.RuntimeParams)
	}

	// An authority without a mode asks for the server to be verified.
	t.Setenv("PGSSLROOTCERT", authority)
	for dsn, want := range map[string]string{
		"postgres://u@db.test/shop":                   "verify-full",
		"host=db.test user=u":                         "verify-full",
		"postgres://u@db.test/shop?sslmode=require":   "verify-ca",
		"host=db.test user=u sslmode='require'":       "verify-ca",
		"host=db.test password='sslmode=x' user=u":    "verify-full",
		"host=db.test password=\\'sslmode=x user=u":   "verify-full",
		"postgres://u@db.test/shop?connect_timeout=2": "verify-full",
	} {
		cfg, err := parseDSN(dsn, 0)
		if err != nil {
			t.Fatal(err)
		}
		got := "unverified"
		switch {
		case cfg.TLSConfig == nil:
			got = "plaintext"
		case !cfg.TLSConfig.InsecureSkipVerify:
			got = "verify-full"
		case cfg.TLSConfig.VerifyPeerCertificate != nil:
			got = "verify-ca"
		}
		if got != want || slices.ContainsFunc(cfg.Fallbacks, func(f *pgconn.FallbackConfig) bool { return f.TLSConfig == nil }) {
			t.Errorf("%q: %s, want %s without plaintext", dsn, got, want)
		}
	}
}
