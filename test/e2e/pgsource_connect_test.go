package e2e

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// certificates is an authority with what it has signed, as PEM.
type certificates struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
	n    int64
}

func newCertificates(t *testing.T) *certificates {
	t.Helper()
	c := &certificates{t: t}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "e2e authority"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	var err error
	if c.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &c.key.PublicKey, c.key)
	if err != nil {
		t.Fatal(err)
	}
	if c.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	c.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return c
}

// issue signs a certificate for a server or a user.
func (c *certificates) issue(common string, life time.Duration, ips []net.IP, names ...string) (cert, key []byte) {
	c.t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		c.t.Fatal(err)
	}
	c.n++
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		Subject: pkix.Name{CommonName: common}, DNSNames: names, IPAddresses: ips, SerialNumber: big.NewInt(1 + c.n),
		NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(life), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, c.cert, &private.PublicKey, c.key)
	if err != nil {
		c.t.Fatal(err)
	}
	plain, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		c.t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: plain})
}

func file(t *testing.T, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// oddPassword has what breaks careless quoting.
const oddPassword = `p@ss/w?rd #%:'"\& ☃`

// Every way to connect, against a real server with TLS, SCRAM and client
// certificates; and every way to fail, with its sentence. No password shows up
// anywhere.
func TestPgsourceConnections(t *testing.T) {
	t.Parallel()
	ca, stranger := newCertificates(t), newCertificates(t)
	serverCert, serverKey := ca.issue("db", time.Hour, nil, "localhost")
	pg := harness.NeedPostgres(t, harness.PostgresOptions{
		Settings: map[string]string{"ssl": "on", "ssl_cert_file": "server.crt", "ssl_key_file": "server.key", "ssl_ca_file": "ca.crt"},
		Files:    map[string][]byte{"server.crt": serverCert, "server.key": serverKey, "ca.crt": ca.pem},
		HBA: "hostssl all certified 127.0.0.1/32 cert\nhostssl all onlytls 127.0.0.1/32 scram-sha-256\n" +
			"host all keyword 127.0.0.1/32 reject\nhost replication unlisted 127.0.0.1/32 scram-sha-256\n" +
			"host all open,norepl 127.0.0.1/32 scram-sha-256\n",
	})
	quoted := "'" + strings.ReplaceAll(oddPassword, "'", "''") + "'"
	execSQL(t, pg, sourceTables+fmt.Sprintf(`
		CREATE ROLE certified LOGIN REPLICATION; CREATE ROLE onlytls LOGIN REPLICATION PASSWORD %[1]s; CREATE ROLE open LOGIN REPLICATION PASSWORD %[1]s;
		CREATE ROLE unlisted LOGIN REPLICATION PASSWORD %[1]s; CREATE ROLE norepl LOGIN PASSWORD %[1]s;
		ALTER ROLE open SET statement_timeout = '1ms'; ALTER ROLE open SET datestyle = 'German'; ALTER ROLE open SET search_path = 'nosuch';
		CREATE PUBLICATION holdfast FOR TABLE orders, items WITH (publish_via_partition_root = true)`, quoted))
	execSQL(t, pg, `SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`)
	sim := startSim(t, felderasim.Options{})

	port := pg.Addr()[strings.LastIndex(pg.Addr(), ":")+1:]
	caFile, strangerFile := file(t, "ca.pem", ca.pem), file(t, "stranger.pem", stranger.pem)
	clientCert, clientKey := ca.issue("certified", time.Hour, nil)
	certFile, keyFile := file(t, "client.pem", clientCert), file(t, "client.key", clientKey)
	lateCert, lateKey := ca.issue("certified", -time.Hour, nil)
	lateCertFile, lateKeyFile := file(t, "late.pem", lateCert), file(t, "late.key", lateKey)
	passfile := file(t, "pgpass", []byte("*:*:*:*:"+strings.NewReplacer(`\`, `\\`, `:`, `\:`).Replace(oddPassword)+"\n"))
	at := func(user, host, query string) string {
		return (&url.URL{Scheme: "postgres", User: url.UserPassword(user, oddPassword), Host: host + ":" + port, Path: "/postgres", RawQuery: query}).String()
	}
	closed := "127.0.0.1:1"

	for name, c := range map[string]struct {
		dsn  string
		env  map[string]string
		code int
		says string
		// orCode may come instead: TLS 1.3 does not promise that the server's
		// reason arrives before the end of the connection.
		orCode int
	}{
		"SCRAM without TLS":                {dsn: at("open", "127.0.0.1", "sslmode=disable"), says: "plaintext"},
		"SCRAM, allow":                     {dsn: at("open", "127.0.0.1", "sslmode=allow"), says: "plaintext"},
		"allow falls forward to TLS":       {dsn: at("onlytls", "127.0.0.1", "sslmode=allow"), says: "TLS"},
		"prefer takes TLS":                 {dsn: at("open", "127.0.0.1", "sslmode=prefer"), says: "TLS"},
		"require":                          {dsn: at("onlytls", "127.0.0.1", "sslmode=require&channel_binding=require"), says: "TLS"},
		"verify-ca, another name":          {dsn: at("onlytls", "127.0.0.1", "sslmode=verify-ca&sslrootcert="+caFile), says: "TLS"},
		"verify-full":                      {dsn: at("onlytls", "localhost", "sslmode=verify-full&sslrootcert="+caFile), says: "TLS"},
		"keyword form":                     {dsn: fmt.Sprintf(`host=localhost port=%s user=onlytls dbname=postgres sslrootcert=%s password='%s'`, port, caFile, strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(oddPassword)), says: "TLS"},
		"client certificate":               {dsn: "postgres://certified@localhost:" + port + "/postgres?sslmode=verify-full&sslrootcert=" + caFile + "&sslcert=" + certFile + "&sslkey=" + keyFile, says: "TLS"},
		"passfile":                         {dsn: "postgres://open@127.0.0.1:" + port + "/postgres?sslmode=disable&passfile=" + passfile},
		"PG variables":                     {dsn: "sslmode=disable", env: map[string]string{"PGHOST": "127.0.0.1", "PGPORT": port, "PGUSER": "open", "PGDATABASE": "postgres", "PGPASSFILE": passfile}, says: "PGHOST"},
		"PGPASSWORD":                       {dsn: "postgres://open@127.0.0.1:" + port + "/postgres?sslmode=disable", env: map[string]string{"PGPASSWORD": oddPassword}, says: "PGPASSWORD"},
		"DSN in a file":                    {env: map[string]string{"PGSOURCE_DSN_FILE": file(t, "dsn", []byte(at("open", "127.0.0.1", "sslmode=disable")+"\n"))}},
		"Unix socket":                      {dsn: pg.SocketDSN(), says: "Unix socket"},
		"second host":                      {dsn: strings.Replace(at("open", "127.0.0.1", "sslmode=disable&target_session_attrs=primary"), "127.0.0.1", closed+",127.0.0.1", 1), says: port},
		"settings cannot be bent":          {dsn: at("open", "127.0.0.1", "sslmode=disable"), env: map[string]string{"PGOPTIONS": "-c statement_timeout=1ms -c datestyle=SQL", "PGTZ": "Asia/Tokyo"}},
		"only by TLS":                      {dsn: at("onlytls", "127.0.0.1", "sslmode=disable"), code: 65, says: `hostssl "postgres" "onlytls"`},
		"the keyword replication":          {dsn: at("unlisted", "127.0.0.1", "sslmode=disable"), code: 65, says: "keyword replication does not cover"},
		"another authority":                {dsn: at("onlytls", "localhost", "sslmode=verify-full&sslrootcert="+strangerFile), code: 65, says: "authority that is not trusted"},
		"an authority alone verifies":      {dsn: at("onlytls", "localhost", "sslrootcert="+strangerFile), code: 65, says: "authority that is not trusted"},
		"another name":                     {dsn: at("onlytls", "127.0.0.1", "sslmode=verify-full&sslrootcert="+caFile), code: 65, says: "names localhost"},
		"no client certificate":            {dsn: "postgres://certified@localhost:" + port + "/postgres?sslmode=verify-full&sslrootcert=" + caFile, code: 65, says: "sslcert"},
		"client certificate expired":       {dsn: "postgres://certified@localhost:" + port + "/postgres?sslmode=verify-full&sslrootcert=" + caFile + "&sslcert=" + lateCertFile + "&sslkey=" + lateKeyFile, code: 65, orCode: 69, says: "expired"},
		"no REPLICATION":                   {dsn: at("norepl", "127.0.0.1", "sslmode=disable"), code: 65, says: `ALTER ROLE "norepl" REPLICATION`},
		"target is no standby":             {dsn: at("open", "127.0.0.1", "sslmode=disable&target_session_attrs=standby"), code: 69, says: "asks for a standby"},
		"wrong password in PGPASSWORD":     {dsn: "postgres://open@127.0.0.1:" + port + "/postgres?sslmode=disable", env: map[string]string{"PGPASSWORD": oddPassword + "x"}, code: 65, says: "password authentication failed"},
		"password that is not encoded":     {dsn: "postgres://open:" + `p@ss/w` + "@127.0.0.1:" + port + "/postgres", code: 78, says: "%40"},
		"authority that cannot be read":    {dsn: at("open", "127.0.0.1", "sslmode=verify-full&sslrootcert=/nosuch"), code: 78, says: "sslrootcert"},
		"wal_sender_timeout below a bound": {dsn: pg.SocketDSN(), env: map[string]string{"PGSOURCE_WAL_SENDER_TIMEOUT": "5ms"}, code: 78, says: "PGSOURCE_WAL_SENDER_TIMEOUT"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			env := merged(merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_DSN": c.dsn, "PGSOURCE_CREATE": "", "PGSOURCE_LISTEN": "127.0.0.1:0"}), c.env)
			got, err := harness.Run(ctx, harness.DaemonOptions{Program: build(t, "pgsource"), Args: []string{"check"}, Env: env})
			if err != nil {
				t.Fatal(err)
			}
			out := got.Stdout + got.Stderr
			if (got.ExitCode != c.code && (c.orCode == 0 || got.ExitCode != c.orCode)) || !strings.Contains(out, c.says) {
				t.Errorf("exit code %d (want %d), output (want %q):\n%s", got.ExitCode, c.code, c.says, out)
			}
			assertNoPassword(t, []byte(out))
		})
	}
}

// assertNoPassword looks for the password, for its encoded form, and for
// pieces that a misread connection string would let slip.
func assertNoPassword(t *testing.T, out []byte) {
	t.Helper()
	for _, secret := range []string{oddPassword, url.QueryEscape(oddPassword), url.PathEscape(oddPassword), "p@ss", "p%40ss", "w?rd", "w%3Frd", "ss/w"} {
		if bytes.Contains(out, []byte(secret)) {
			t.Errorf("a piece of the password (%q) is in the output:\n%s", secret, out)
		}
	}
}

// The password is odd, wrong at first, then right, then changed while
// pgsource runs: it is in no log line, no metric and no health page at any
// time, and the file is read again.
func TestPgsourcePasswordStaysSecret(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{Password: oddPassword})
	execSQL(t, pg, sourceTables)
	sim := startSim(t, felderasim.Options{})
	secret := file(t, "dsn", []byte(pg.DSN()))
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_DSN": "", "PGSOURCE_DSN_FILE": secret, "PGSOURCE_LOG_LEVEL": "debug",
	}))
	waitHealthy(t, d)
	execSQL(t, pg, `ALTER ROLE postgres PASSWORD 'other ☃'; SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots`)
	health(t, d, "the refused login is shown", func(_ int, body string) bool {
		return strings.Contains(body, "password authentication failed") && strings.Contains(body, "as it did before")
	})
	look := func() {
		for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
			_, body, err := d.Get(t.Context(), path)
			if err != nil {
				t.Fatal(err)
			}
			assertNoPassword(t, body)
		}
	}
	look()
	if err := os.WriteFile(secret, []byte(pg.DSNFor("postgres", "other ☃", "postgres", pg.Addr())), 0o600); err != nil {
		t.Fatal(err)
	}
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'rotated', 1, true)`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	look()
	assertNoPassword(t, []byte(strings.Join(d.Log().Tail(1<<20), "\n")))
}
