package wal

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"holdfast/internal/decode"
)

// outage is a fault that waiting may mend. It says what a person can look at
// meanwhile.
type outage struct {
	what, why string
	do        string // "" where there is nothing to do but to wait
	err       error  // the cause, not part of the text; may be nil
	// soon: it is looked at again within a few seconds, however often it has
	// been already, since somebody else's acts end it and asking costs little.
	soon bool
}

// soonest is how long a wait for an outage that may end any time lasts at
// most.
const soonest = 3 * time.Second

// waitFor bounds the wait that backoff asks for after err.
func waitFor(err error, wait time.Duration) time.Duration {
	if out, ok := errors.AsType[*outage](err); ok && out.soon {
		return min(wait, soonest)
	}
	return wait
}

func (o *outage) Error() string { return o.what + ": " + o.why }

// Hint is what may help, for the check verb and for health.
func (o *outage) Hint() string { return o.do }

func (o *outage) Unwrap() error { return o.err }

// fault is what is known about one failed attempt to connect.
type fault struct {
	why, expected, do string
	// final: waiting does not mend it.
	final bool
	// login: it is about who we are, which may be in the middle of a rotation.
	login bool
	// unencrypted: the server has no TLS. Where plaintext is allowed too, the
	// attempt that follows is the one that counts.
	unencrypted bool
}

// connectFailure says why a connection could not be made: as a refusal when
// every attempt (one for each address and kind of encryption) failed for a
// reason that waiting does not mend, as an outage otherwise. The text has
// host, user and database and no other part of the connection string.
func connectFailure(operation string, cfg *pgconn.Config, err error) error {
	faults := make([]fault, 0, 2)
	var lines []string
	all := attempts(err)
	for _, attempt := range all {
		f := explain(cfg, attempt)
		if f.unencrypted && len(all) > 1 && plaintextAllowed(cfg) {
			continue
		}
		line := f.why
		if place := attemptPlace(attempt); place != "" {
			line = place + ": " + line
		}
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
			faults = append(faults, f)
		}
	}
	if len(faults) == 0 { // cannot be: ConnectConfig fails with at least one attempt
		return fmt.Errorf("%s: %w", operation, err)
	}
	operation += fmt.Sprintf(" as user %q to database %q", cfg.User, cfg.Database)
	first := faults[0]
	for _, f := range faults {
		if !f.final {
			return &outage{what: operation, why: strings.Join(lines, "; "), do: f.do, err: err}
		}
		if first.expected == "" {
			first = f
		}
	}
	r := &decode.Refusal{
		Reason: decode.ReasonSetup, What: operation, Why: strings.Join(lines, "; "), Expected: first.expected, Do: first.do,
	}
	if first.login {
		r.Err = errLogin
	}
	return r
}

func plaintextAllowed(cfg *pgconn.Config) bool {
	return cfg.TLSConfig == nil || slices.ContainsFunc(cfg.Fallbacks, func(f *pgconn.FallbackConfig) bool { return f.TLSConfig == nil })
}

// attempts takes the driver's error apart into those of its attempts.
func attempts(err error) []error {
	var joined interface{ Unwrap() []error }
	if errors.As(err, &joined) {
		var all []error
		for _, e := range joined.Unwrap() {
			all = append(all, attempts(e)...)
		}
		return all
	}
	return []error{err}
}

// attemptPlace gives the address of an attempt, which the driver has only in
// its text: "127.0.0.1:5432 (localhost): dial error: …".
func attemptPlace(err error) string {
	address, _, ok := strings.Cut(err.Error(), " (")
	if !ok || strings.ContainsAny(address, " `") {
		return ""
	}
	return address
}

// explain finds the words for one failed attempt.
func explain(cfg *pgconn.Config, err error) fault {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return explainServer(cfg, pgErr)
	}
	if f, ok := explainTLS(err); ok {
		return f
	}
	text := err.Error()
	var dns *net.DNSError
	switch {
	case errors.As(err, &dns) && dns.IsNotFound:
		return fault{why: fmt.Sprintf("the host name %q is not known", dns.Name), do: "correct the host in PGSOURCE_DSN, or see to the name service"}
	case errors.As(err, &dns):
		return fault{why: fmt.Sprintf("the name service does not answer for host %q", dns.Name), do: "see to the name service of this machine"}
	case errors.Is(err, syscall.ECONNREFUSED):
		return fault{why: "the connection is refused: nothing listens there", do: "is the server running, does its listen_addresses have this address, is the port right?"}
	case errors.Is(err, syscall.ENOENT):
		return fault{why: "there is no such Unix socket", do: "is the server running on this machine, and is its unix_socket_directories the host in PGSOURCE_DSN?"}
	case errors.Is(err, syscall.EACCES):
		return fault{why: "this user may not use the Unix socket", do: "give the user access to the socket's folder"}
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return fault{why: "there is no route to the host", do: "see to the network between here and the server"}
	case errors.Is(err, pgconn.ErrStandbyConnection), errors.Is(err, pgconn.ErrReadOnlyConnection):
		return fault{why: "the server is a standby or read-only, and target_session_attrs asks for a primary", do: "wait for the failover to end, or name the primary among the hosts"}
	case errors.Is(err, pgconn.ErrPrimaryConnection), errors.Is(err, pgconn.ErrReadWriteConnection):
		return fault{why: "the server is a primary, and target_session_attrs asks for a standby", do: "name a standby among the hosts, or change target_session_attrs"}
	case isTimeout(err):
		return fault{why: "the server did not answer in time", do: "is the address right, and does a firewall drop the packets? A server that is starting or overloaded answers late too"}
	case strings.Contains(text, "channel binding"):
		return fault{final: true, login: true, why: "the server does not do the channel binding that channel_binding=require asks for", expected: "SCRAM over TLS", do: "use password_encryption = scram-sha-256 and TLS on the server"}
	case strings.Contains(text, "require_auth"):
		return fault{final: true, login: true, why: "the server asks for a kind of login that require_auth excludes", expected: "a method that require_auth allows", do: "change require_auth in PGSOURCE_DSN, or the server's pg_hba.conf"}
	case strings.Contains(text, "no GSSAPI provider"):
		return fault{final: true, login: true, why: "the server asks for a Kerberos login, which pgsource does not have", expected: "a login by password or certificate", do: "add a line to pg_hba.conf with scram-sha-256 or cert for this user"}
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		if cfg.TLSConfig != nil && strings.Contains(text, "receive message") {
			// TLS 1.3: the server judges the certificate after our part of the
			// handshake, and its alert may be overtaken by the end.
			return fault{
				why: "the server ended the connection behind the TLS handshake",
				do:  "does it accept the client certificate of sslcert (has it expired, is its authority in ssl_ca_file), and is it up? A server that restarts does this too",
			}
		}
		return fault{why: "the connection ended before the login was done", do: "is it a Postgres server, and is it up? A load balancer without a live server behind it does this, and so does a server that restarts"}
	}
	return fault{why: text}
}

func isTimeout(err error) bool {
	var netErr net.Error
	return errors.Is(err, context.DeadlineExceeded) || pgconn.Timeout(err) || (errors.As(err, &netErr) && netErr.Timeout())
}

func explainTLS(err error) (fault, bool) {
	f := fault{final: true, login: true, expected: "a server whose certificate fits what PGSOURCE_DSN asks for (sslmode, sslrootcert)"}
	var (
		unknown *x509.UnknownAuthorityError
		name    *x509.HostnameError
		invalid *x509.CertificateInvalidError
		unk     x509.UnknownAuthorityError
		nam     x509.HostnameError
		inv     x509.CertificateInvalidError
		roots   x509.SystemRootsError
		alert   tls.AlertError
		record  tls.RecordHeaderError
	)
	switch text := err.Error(); {
	case strings.Contains(text, "server refused TLS connection"):
		f.unencrypted = true
		f.why, f.expected = "the server does not speak TLS, and sslmode asks for it", "a server with ssl = on"
		f.do = "set ssl = on with a certificate on the server, or, where the network is trusted, sslmode=disable in PGSOURCE_DSN"
	case errors.As(err, &unknown), errors.As(err, &unk):
		f.why = "the server's certificate is signed by an authority that is not trusted"
		f.do = "set sslrootcert in PGSOURCE_DSN to the file of the authority that signed it"
	case errors.As(err, &name), errors.As(err, &nam):
		f.why = "the server's certificate is for another host (" + errText(name, nam) + ")"
		f.do = "use the host name that the certificate has, or sslmode=verify-ca, which does not compare names"
	case errors.As(err, &invalid), errors.As(err, &inv):
		if (invalid != nil && invalid.Reason == x509.Expired) || inv.Reason == x509.Expired {
			f.why, f.do = "the server's certificate, or one that signed it, has expired or is not valid yet", "renew the server's certificate, and see to the clocks of both machines"
			break
		}
		f.why, f.do = "the server's certificate is not valid for this use", "give the server a certificate for server authentication"
	case errors.As(err, &roots):
		f.why, f.do = "this system has no trusted authorities", "set sslrootcert in PGSOURCE_DSN"
	case errors.As(err, &alert):
		f.why, f.expected = "the server ended the TLS handshake: "+alert.Error(), "a client certificate that the server accepts, and a common TLS version"
		f.do = "see to sslcert and sslkey in PGSOURCE_DSN, and to ssl_ca_file on the server"
	case strings.Contains(text, "remote error: tls:"):
		_, why, _ := strings.Cut(text, "remote error: tls: ")
		f.why, f.expected = "the server ended the TLS handshake: "+why, "a client certificate that the server accepts, and a common TLS version"
		f.do = "see to sslcert and sslkey in PGSOURCE_DSN (has the certificate expired?), and to ssl_ca_file on the server"
	case errors.As(err, &record):
		return fault{why: "what answered does not speak TLS", do: "is the port that of a Postgres server?"}, true
	default:
		return fault{}, false
	}
	return f, true
}

func errText(p *x509.HostnameError, v x509.HostnameError) string {
	if p != nil {
		v = *p
	}
	if v.Certificate == nil {
		return "it was asked for as " + v.Host
	}
	names := append(slices.Clone(v.Certificate.DNSNames), ipTexts(v.Certificate.IPAddresses)...)
	if len(names) > 5 {
		names = append(names[:5], "…")
	}
	return fmt.Sprintf("it was asked for as %s and names %s", v.Host, strings.Join(names, ", "))
}

func ipTexts(ips []net.IP) []string {
	texts := make([]string, len(ips))
	for i, ip := range ips {
		texts[i] = ip.String()
	}
	return texts
}

// What is said of a pooler, and is not true of every connection: see ofSetting.
const (
	directConnection = "the Postgres server itself: the replication protocol needs a direct connection"
	orPeek           = "; or set PGSOURCE_TRANSPORT=peek, which reads over plain SQL"
)

// explainServer finds the words for what the server said while a connection
// was made. The codes are Postgres' (appendix A of its manual).
func explainServer(cfg *pgconn.Config, e *pgconn.PgError) fault {
	said := fmt.Sprintf("%s (SQLSTATE %s)", e.Message, e.Code)
	f := fault{why: said, final: true}
	user, database := quoteIdentifier(cfg.User), quoteIdentifier(cfg.Database)
	switch {
	case strings.Contains(e.Message, "unsupported startup parameter"), strings.Contains(e.Message, "extended query protocol not supported"),
		strings.HasPrefix(e.Message, "no such database:"):
		f.why = "a connection pooler answered, such as PgBouncer: " + said
		f.expected = directConnection
		f.do = "put the server's own host and port into PGSOURCE_DSN, not the pooler's" + orPeek
	case e.Code == "28P01":
		f.login, f.expected = true, "a user and password that the server takes"
		f.do = "correct the password in PGSOURCE_DSN (or in the file of PGSOURCE_DSN_FILE), or ALTER ROLE " + user + " PASSWORD '…'"
	case e.Code == "28000" && strings.Contains(e.Message, "pg_hba.conf"):
		f.login, f.expected = true, "a line of pg_hba.conf that lets this user in from this address"
		f.do = fmt.Sprintf("add to pg_hba.conf: hostssl %s %s ADDRESS scram-sha-256 (a line for the keyword replication does not cover logical replication; with sslmode=disable the line must begin with host), then SELECT pg_reload_conf()", database, user)
	case e.Code == "28000" && strings.Contains(e.Message, "certificate"):
		f.login, f.expected = true, "a client certificate that the server accepts for this user"
		f.do = "set sslcert and sslkey in PGSOURCE_DSN; its common name must be the user's, or be mapped to it in pg_ident.conf"
	case e.Code == "28000":
		f.login, f.expected = true, "a role that exists and may log in"
		f.do = "CREATE ROLE " + user + " LOGIN REPLICATION, or ALTER ROLE " + user + " LOGIN"
	case e.Code == "3D000":
		f.expected, f.do = "a database that exists", "correct the database's name in PGSOURCE_DSN"
	case e.Code == "42501" && (strings.Contains(e.Message, "walsender") || strings.Contains(e.Message, "WAL sender") || strings.Contains(e.Message, "replication")):
		f.expected, f.do = "a role with REPLICATION", "ALTER ROLE "+user+" REPLICATION"
	case e.Code == "42501":
		f.expected, f.do = "a role that may connect to this database", "GRANT CONNECT ON DATABASE "+database+" TO "+user
	case e.Code == "53300" && strings.Contains(e.Message, "max_wal_senders"):
		f.final, f.do = false, "raise max_wal_senders (needs a restart of the server), or end another replication connection"
	case e.Code == "53300":
		f.final, f.do = false, "raise max_connections or the role's or database's CONNECTION LIMIT, or end other connections"
	case e.Code == "57P03", strings.HasPrefix(e.Code, "57P"):
		f.final, f.do = false, "wait until the server has started"
	case strings.HasPrefix(e.Code, "42"), strings.HasPrefix(e.Code, "22"), strings.HasPrefix(e.Code, "0A"):
		f.expected, f.do = "a server that takes the session's settings", "see to the option options (PGOPTIONS) in PGSOURCE_DSN; PostgreSQL 14 or newer is needed"
	default:
		f.final = false
	}
	return f
}

// What is said where the publication is not there in the catalogue of the time
// of a change.
const (
	publishedThen = "the publication to exist at every position of the slot"
	publishAnew   = "a publication that is made after the slot does not help the slot's earlier changes: drop the slot, make the publication, make the slot again, then " + wayBack
)

// unpublishedThen gives the refusal for the warning with which PostgreSQL 18 and
// later say that they leave changes out, since the publication is not there in
// the catalogue of their time; nil for any other notice. Older servers end with
// an error there. The text may be translated and its code stands for other things
// too, so the warning is known by the server's function that gives it.
func unpublishedThen(operation string, m *pgproto3.NoticeResponse) error {
	if m.Routine != "LoadPublications" || m.SeverityUnlocalized != "WARNING" {
		return nil
	}
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: operation, Why: fmt.Sprintf("the server leaves changes out: %s (SQLSTATE %s)", m.Message, m.Code),
		Expected: publishedThen, Do: publishAnew,
	}
}

// classify turns an error of the server into a refusal where trying again
// cannot help, and names the operation otherwise. The codes are Postgres'
// (appendix A of its manual).
func classify(operation string, err error) error {
	var already *decode.Refusal
	if errors.As(err, &already) {
		return err
	}
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return fmt.Errorf("%s: %w", operation, err)
	}
	r := &decode.Refusal{Reason: decode.ReasonSetup, What: operation, Why: fmt.Sprintf("%s (SQLSTATE %s)", pgErr.Message, pgErr.Code)}
	switch pgErr.Code {
	case "25006":
		r.Expected, r.Do = "a server that can be written to for this", "run it on the primary; a standby gets it from there"
	case "22021":
		r.Expected = "text in the encoding that the database says it has: one with SQL_ASCII takes any bytes, and the server cannot send those as UTF-8"
		r.Do = "mend the rows at the source, which helps later changes; what is in the WAL already can only be passed over: " +
			"SELECT pg_replication_slot_advance to behind the transaction, then " + wayBack
	case "42501":
		r.Expected, r.Do = "a role with REPLICATION that may do this", "grant what is missing, or let an owner create the publication and the slot beforehand"
	case "42704":
		if strings.HasPrefix(pgErr.Message, "replication slot ") {
			r.Reason, r.Expected = decode.ReasonGap, "the slot that holds the WAL since the last acknowledged position"
			r.Do = "find out who dropped it; a new slot starts at its own creation: make it, then " + wayBack
			break
		}
		r.Expected, r.Do = publishedThen, publishAnew
	case "53400":
		if strings.Contains(pgErr.Message, "temporary file") {
			r.Reason, r.Expected, r.Do = decode.ReasonLimit, "room for it in temporary files of the server", "raise temp_file_limit, or work_mem, for this role"
			break
		}
		r.Expected, r.Do = "a free replication slot", "raise max_replication_slots (needs a restart of the server), or drop a slot that nobody uses: SELECT slot_name, active FROM pg_replication_slots"
	case "55006":
		return &outage{what: operation, why: pgErr.Message, do: "another process uses it, perhaps another pgsource", err: err}
	case "55000":
		switch {
		case strings.HasPrefix(pgErr.Message, "cannot read from logical replication slot "), strings.HasPrefix(pgErr.Message, "can no longer access replication slot "):
			r.Reason, r.Why = decode.ReasonGap, "the server has invalidated the slot: "+r.Why
			if pgErr.Detail != "" {
				r.Why += "; " + pgErr.Detail
			}
			r.Do = "make the slot anew, then " + wayBack + "; raise max_slot_wal_keep_size"
		case strings.Contains(pgErr.Detail, "being synchronized") || strings.Contains(pgErr.Detail, "being synced"):
			r.Expected, r.Do = "a slot of the server's own", "this standby only mirrors the slot: use the primary, or promote this server"
		default:
			r.Do = "look at the slot in pg_replication_slots (wal_status, plugin, database)"
		}
	case "58P01":
		r.Reason, r.Do = decode.ReasonGap, "the server has removed WAL that the slot needs: make the slot anew, then "+wayBack
	default:
		// Syntax, names, types, features, encodings: what was asked cannot be
		// done, now or later.
		if class := pgErr.Code[:min(2, len(pgErr.Code))]; class != "42" && class != "22" && class != "0A" && class != "2B" {
			return fmt.Errorf("%s: %w", operation, err)
		}
	}
	return r
}
