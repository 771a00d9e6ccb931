package wal

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"holdfast/internal/decode"
)

// pinned are the session settings that decide what pgoutput's text looks
// like, and those that could end a session of ours. Role, database and
// PGOPTIONS defaults would change them otherwise: the server takes the
// parameters of the start-up message last.
var pinned = map[string]string{
	"client_encoding":    "UTF8",
	"datestyle":          "ISO",
	"intervalstyle":      "postgres",
	"timezone":           "UTC",
	"extra_float_digits": "3",
	"bytea_output":       "hex",
	"statement_timeout":  "0",
	"lock_timeout":       "0",

	"idle_in_transaction_session_timeout": "0",
	"standard_conforming_strings":         "on",

	// To compile what reads the catalogue takes longer than to read it.
	"jit": "off",

	// A warning can say that changes are left out (see unpublishedThen).
	"client_min_messages": "warning",
}

// ofTheServer decide about the text of money and of the names of objects. They
// are as server, database and role have them, not as an earlier client of a
// pooler has set them.
var ofTheServer = []string{"lc_monetary", "search_path"}

// pooled are those of pinned that poolers take in a start-up message, and carry
// over to whichever session serves the client. PgBouncer refuses others.
var pooled = []string{"client_encoding", "datestyle", "timezone", "standard_conforming_strings"}

// defaultSenderTimeout is asked for where the server has no wal_sender_timeout
// at all: it would keep a dead client's slot for as long as TCP does.
const defaultSenderTimeout = time.Minute

// tcpProbes is how many keepalive probes may stay unanswered.
const tcpProbes = 3

// parseDSN reads a connection string without ever repeating any part of it.
// PG* variables fill in what it leaves out, as libpq has it. silence bounds
// how long a peer may leave TCP unanswered; 0 leaves that to the kernel.
func parseDSN(dsn string, silence time.Duration) (*pgconn.Config, error) {
	if why := ambiguous(dsn); why != "" {
		return nil, dsnRefused(why)
	}
	cfg, err := pgconn.ParseConfig(verifying(dsn))
	if err != nil {
		return nil, dsnRefused(dsnFault(err)) // the cause is left out: its redaction is best effort
	}
	tcp, why := takeOptions(cfg.RuntimeParams)
	if why != "" {
		return nil, dsnRefused(why)
	}
	cfg.DialFunc = tcp.dialer(cfg.ConnectTimeout, silence)
	cfg.MaxProtocolMessageBodyLen = maxWireMessage
	return cfg, nil
}

func dsnRefused(why string) error {
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: settingDSN, Why: why,
		Expected: "postgres://user:password@host:port/database?sslmode=verify-full, or the keyword form (host=… user=… dbname=…)",
	}
}

// CheckDSN tells whether the connection string of a setting can be parsed. The
// error names the setting, and does not contain the string.
func CheckDSN(setting, dsn string) error {
	_, err := parseDSN(dsn, 0)
	return ofSetting(setting, err)
}

// The settings that have a connection string. What is said of one that fails is
// written for the first.
const (
	settingDSN      = "PGSOURCE_DSN"
	settingStateDSN = "PGSOURCE_STATE_DSN"
)

// ofSetting lets an error of a connection name the setting whose connection it is.
func ofSetting(setting string, err error) error {
	if setting == settingDSN || err == nil {
		return err
	}
	named := strings.NewReplacer(settingDSN, setting, orPeek, "", directConnection, "the Postgres server itself: the lock on the state belongs to a session")
	if r, ok := errors.AsType[*decode.Refusal](err); ok {
		of := *r
		of.What, of.Why, of.Expected, of.Do = named.Replace(r.What), named.Replace(r.Why), named.Replace(r.Expected), named.Replace(r.Do)
		return &of
	}
	if o, ok := errors.AsType[*outage](err); ok {
		of := *o
		of.why, of.do = named.Replace(o.why), named.Replace(o.do)
		return &of
	}
	return err
}

// ambiguous says why a URL can be read in two ways, "" where it cannot. A
// password with a "/", "?" or "@" as it is would end the authority early, and
// the rest of it would be taken for a host or a database, which errors and
// logs may name.
func ambiguous(dsn string) string {
	_, rest, ok := strings.Cut(dsn, "://")
	if !ok || !isURL(dsn) {
		return ""
	}
	end := len(rest)
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		end = i
	}
	authority, rest := rest[:end], rest[end:]
	if strings.Contains(rest, "@") || strings.Count(authority, "@") > 1 {
		return "it is a URL with an @ that can be read in two ways: in the password and elsewhere write @ as %40, / as %2F, ? as %3F, # as %23, : as %3A"
	}
	if strings.Contains(rest, "#") {
		return "it is a URL with a #, which ends a URL: write it as %23"
	}
	return ""
}

func isURL(dsn string) bool {
	return strings.HasPrefix(dsn, "postgres://") || strings.HasPrefix(dsn, "postgresql://")
}

// verifying adds sslmode=verify-full where a certificate authority is given
// and no mode is: whoever names an authority wants the server to be checked
// against it, and libpq's default mode would not.
func verifying(dsn string) string {
	names := optionNames(dsn)
	given := func(option, variable string) bool { return slices.Contains(names, option) || os.Getenv(variable) != "" }
	if !given("sslrootcert", "PGSSLROOTCERT") || given("sslmode", "PGSSLMODE") || slices.Contains(names, "ssl") || given("service", "PGSERVICE") {
		return dsn
	}
	switch {
	case !isURL(dsn):
		return dsn + " sslmode=verify-full"
	case strings.Contains(dsn, "?"):
		return dsn + "&sslmode=verify-full"
	default:
		return dsn + "?sslmode=verify-full"
	}
}

// optionNames gives the names of the options that a connection string has. It
// is lenient: what it cannot read, the driver refuses.
func optionNames(dsn string) []string {
	var names []string
	if isURL(dsn) {
		_, query, _ := strings.Cut(dsn, "?")
		values, err := url.ParseQuery(query)
		if err != nil {
			return nil
		}
		for name := range values {
			names = append(names, name)
		}
		return names
	}
	for rest := dsn; ; {
		name, after, ok := strings.Cut(rest, "=")
		if !ok {
			return names
		}
		names = append(names, strings.TrimSpace(name))
		after = strings.TrimLeft(after, " \t\r\n\v\f")
		quoted := strings.HasPrefix(after, "'")
		i := 0
		if quoted {
			i = 1
		}
		for ; i < len(after); i++ {
			switch c := after[i]; {
			case c == '\\':
				i++
			case quoted && c == '\'', !quoted && strings.IndexByte(" \t\r\n\v\f", c) >= 0:
				goto ended
			}
		}
	ended:
		rest = after[min(i+1, len(after)):]
	}
}

// dsnFault says what is wrong with a connection string that the driver does
// not take, in words of our own: the driver's contain parts of it.
func dsnFault(err error) string {
	text := err.Error()
	for _, fault := range []struct{ part, why string }{
		{"failed to parse as URL", "it is not a URL that can be parsed"},
		{"failed to parse as keyword/value", "it is no list of option=value: values with spaces stand in single quotes, and ' and \\ in them are written \\' and \\\\"},
		{"invalid port", "the port is no number from 1 to 65535; in a URL, a : in the password is written %3A"},
		{"could not match", "it names several hosts and another number of ports"},
		{"unable to read CA file", "the file of sslrootcert cannot be read"},
		{"unable to add CA to cert pool", "the file of sslrootcert has no PEM certificate"},
		{"unable to read sslkey", "the file of sslkey cannot be read"},
		{"unable to read cert", "the file of sslcert cannot be read"},
		{`both "sslcert" and "sslkey" are required`, "sslcert and sslkey go together"},
		{"failed to decode sslkey", "the file of sslkey is no PEM key"},
		{"unable to find sslpassword", "the key of sslkey is encrypted: sslpassword is missing"},
		{"unable to decrypt key", "the key of sslkey does not open with sslpassword"},
		{"unable to load cert", "sslcert and sslkey do not belong together, or one of them is no PEM file"},
		{"sslmode is invalid", "sslmode is none of disable, allow, prefer, require, verify-ca, verify-full"},
		{"invalid sslcertmode", "sslcertmode is none of disable, allow, require"},
		{"target_session_attrs", "target_session_attrs is none of any, read-write, read-only, primary, standby, prefer-standby"},
		{"invalid connect_timeout", "connect_timeout is no number of seconds"},
		{"protocol_version", "min_protocol_version or max_protocol_version is none of 3.0, 3.2, latest"},
		{"channel_binding", "channel_binding is none of disable, prefer, require"},
		{"require_auth", "require_auth has a method that is not known"},
		{"failed to read service", "the service file cannot be read or lacks the service"},
	} {
		if !strings.Contains(text, fault.part) {
			continue
		}
		// Why a file cannot be read is no secret; its name may be a part of
		// the string that was misread.
		if missing, ok := errors.AsType[*fs.PathError](err); ok {
			return fault.why + ": " + missing.Err.Error()
		}
		return fault.why
	}
	return "it cannot be parsed"
}

// tcpOptions are libpq's options of the TCP connection, which the driver
// takes for parameters of the session.
type tcpOptions struct {
	off                   bool // keepalives=0
	idle, interval, abort time.Duration
	count                 int
}

// takeOptions takes out of the driver's session parameters what is none: the
// options of libpq that the driver does not know. What would change the
// connection and cannot be honoured is refused rather than ignored, and so is
// what nobody knows: it may be a piece of a password that was not quoted.
func takeOptions(params map[string]string) (tcp tcpOptions, why string) {
	seconds := func(value string) time.Duration {
		n, err := strconv.Atoi(value)
		if err != nil || n < 0 || n > 1<<20 {
			why = "one of keepalives_idle, keepalives_interval, keepalives_count and tcp_user_timeout is no number in its range"
		}
		return time.Duration(n) * time.Second
	}
	for name, value := range params {
		known := true
		switch name {
		case "application_name", "fallback_application_name", "load_balance_hosts", "sslcompression", "client_encoding", "timezone":
			// Ours are set instead, or there is nothing to do.
		case "options":
			continue
		case "keepalives":
			tcp.off = value == "0"
		case "keepalives_idle":
			tcp.idle = seconds(value)
		case "keepalives_interval":
			tcp.interval = seconds(value)
		case "keepalives_count":
			tcp.count = int(seconds(value) / time.Second)
		case "tcp_user_timeout":
			tcp.abort = seconds(value) / 1000
		case "gssencmode":
			if value == "require" {
				return tcp, "gssencmode=require asks for GSS encryption, which pgsource does not have; use TLS"
			}
		case "sslcrl", "sslcrldir", "ssl_min_protocol_version", "ssl_max_protocol_version", "requirepeer", "requiressl",
			"sslkeylogfile", "krbsrvname", "gsslib", "gssdelegation", "replication", "hostaddr", "passcommand":
			return tcp, "it has the option " + name + ", which pgsource cannot honour"
		default:
			known = false
		}
		if !known {
			return tcp, "it has an option that libpq does not have (session settings go into options='-c name=value'); a password with spaces must be quoted or percent-encoded"
		}
		delete(params, name)
	}
	return tcp, why
}

// dialer makes the function that opens TCP connections. silence is how long
// the peer may leave sent bytes or probes unanswered; 0 leaves that to the
// kernel. The options of the connection string win.
func (o tcpOptions) dialer(timeout, silence time.Duration) pgconn.DialFunc {
	d := &net.Dialer{Timeout: timeout}
	abort := silence
	if o.abort > 0 {
		abort = o.abort
	}
	if o.off {
		d.KeepAlive = -1
	} else {
		d.KeepAliveConfig = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 15 * time.Second, Count: tcpProbes}
		if silence > 0 {
			probe := max(silence/(tcpProbes+1), time.Second)
			d.KeepAliveConfig.Idle, d.KeepAliveConfig.Interval = min(probe, 15*time.Second), min(probe, 15*time.Second)
		}
		if o.idle > 0 {
			d.KeepAliveConfig.Idle = o.idle
		}
		if o.interval > 0 {
			d.KeepAliveConfig.Interval = o.interval
		}
		if o.count > 0 {
			d.KeepAliveConfig.Count = o.count
		}
	}
	if abort > 0 {
		d.Control = func(network, _ string, c syscall.RawConn) error {
			if !strings.HasPrefix(network, "tcp") {
				return nil
			}
			var err error
			if controlErr := c.Control(func(fd uintptr) { err = setUserTimeout(fd, abort) }); controlErr != nil {
				return controlErr
			}
			return err
		}
	}
	return d.DialContext
}

// connectionConfig reads the connection string anew, so that a rotated secret
// is picked up.
func (s *Source) connectionConfig() (*pgconn.Config, error) {
	dsn, err := s.cfg.DSN()
	if err != nil {
		return nil, fmt.Errorf("read PGSOURCE_DSN: %w", err)
	}
	return pinnedConfig(dsn, s.cfg.StallTimeout, s.applicationName())
}

// pinnedConfig reads a connection string for a session that is as we need it.
func pinnedConfig(dsn string, silence time.Duration, application string) (*pgconn.Config, error) {
	cfg, err := parseDSN(dsn, silence)
	if err != nil {
		return nil, err
	}
	for k, v := range pinned {
		cfg.RuntimeParams[k] = v
	}
	cfg.RuntimeParams["application_name"] = application
	return cfg, nil
}

// connect opens a connection for looking things up, to the server that streams
// where one does: see node.
func (s *Source) connect(ctx context.Context) (*pgx.Conn, error) {
	conn, err := s.connectAnywhere(ctx)
	if err != nil {
		return nil, err
	}
	return s.besideStream(ctx, conn)
}

// connectAnywhere opens a connection to whichever server answers. Behind a pooler
// that does not take all the settings that are pinned, it does without the others:
// what reads rows or messages over it calls pinTransaction.
func (s *Source) connectAnywhere(ctx context.Context) (*pgx.Conn, error) {
	base, err := s.connectionConfig()
	if err != nil {
		return nil, err
	}
	if s.pooler.Load() {
		asPooled(base)
	}
	conn, err := openPlain(ctx, base)
	if err != nil && s.cfg.Transport == TransportPeek && !s.pooler.Load() && unknownSetting(err) {
		s.pooler.Store(true)
		asPooled(base)
		conn, err = openPlain(ctx, base)
	}
	if err != nil {
		return nil, s.excuse(connectFailure("connect to Postgres", base, err))
	}
	if s.pooler.Load() {
		conn.PgConn().CustomData()[unpinned] = true
	}
	s.connected.Store(true)
	return conn, nil
}

// unpinned marks a connection that began without some of the settings.
const unpinned = "unpinned"

// asPooled leaves the settings out that a pooler does not take.
func asPooled(cfg *pgconn.Config) {
	for name := range pinned {
		if !slices.Contains(pooled, name) {
			delete(cfg.RuntimeParams, name)
		}
	}
}

// unknownSetting tells whether a pooler has refused a setting: its words, since
// it gives no code of its own.
func unknownSetting(err error) bool {
	return slices.ContainsFunc(attempts(err), func(err error) bool {
		pgErr, ok := errors.AsType[*pgconn.PgError](err)
		return ok && strings.Contains(pgErr.Message, "unsupported startup parameter")
	})
}

// pinTransaction makes up, in the transaction that is open on conn, for the
// settings with which it did not begin. Without them the text of values would
// be as role, database or an earlier client of the pooler want it.
func pinTransaction(ctx context.Context, conn *pgx.Conn) error {
	if conn.PgConn().CustomData()[unpinned] == nil {
		return nil
	}
	if _, err := conn.Exec(ctx, pinTextSQL); err != nil {
		return classify("set what the text of values looks like", err)
	}
	return nil
}

// pinSQL sets everything that is pinned for the transaction that is open,
// pinTextSQL what decides about the text of values. transaction_timeout is of
// PostgreSQL 17. client_connection_check_interval makes a server on Linux (others
// may refuse it) look whether we are still there while it decodes, which it
// would otherwise do to the end for a client that was killed.
var (
	pinSQL = setLocalSQL(func(string) bool { return true }) +
		", (SELECT set_config('transaction_timeout', '0', true) WHERE current_setting('transaction_timeout', true) IS NOT NULL)" +
		", (SELECT set_config('client_connection_check_interval', '5s', true) WHERE version() LIKE '%linux%')"
	pinTextSQL = setLocalSQL(func(name string) bool { return !strings.HasSuffix(name, "_timeout") })
)

func setLocalSQL(which func(name string) bool) string {
	var settings []string
	for _, name := range slices.Sorted(maps.Keys(pinned)) {
		if which(name) {
			settings = append(settings, fmt.Sprintf("set_config(%s, %s, true)", quoteLiteral(name), quoteLiteral(pinned[name])))
		}
	}
	for _, name := range ofTheServer {
		settings = append(settings, fmt.Sprintf("set_config(%s, (SELECT reset_val FROM pg_settings WHERE name = %s), true)", quoteLiteral(name), quoteLiteral(name)))
	}
	return "SELECT " + strings.Join(settings, ", ")
}

// openPlain opens a connection for queries by the simple protocol.
func openPlain(ctx context.Context, base *pgconn.Config) (*pgx.Conn, error) {
	cfg, err := pgx.ParseConfig("host=localhost sslmode=disable")
	if err != nil {
		return nil, fmt.Errorf("broken invariant: %w", err)
	}
	cfg.Config = *base
	// The simple protocol quotes parameters into the text, which the driver
	// does only with client_encoding and standard_conforming_strings as pinned.
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	return pgx.ConnectConfig(ctx, cfg)
}

// connectReplication opens a connection on which the server answers the
// commands of the replication protocol. The caller closes it.
func (s *Source) connectReplication(ctx context.Context, senderTimeout time.Duration) (*pgconn.PgConn, error) {
	cfg, err := s.connectionConfig()
	if err != nil {
		return nil, err
	}
	cfg.RuntimeParams["replication"] = "database"
	if senderTimeout > 0 {
		cfg.RuntimeParams["wal_sender_timeout"] = strconv.FormatInt(senderTimeout.Milliseconds(), 10)
	}
	cfg.BuildFrontend = boundedFrontend
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, s.excuse(connectFailure("connect for replication", cfg, err))
	}
	return conn, nil
}

// boundedFrontend makes a reader of messages that refuses those which no
// Postgres sends.
func boundedFrontend(r io.Reader, w io.Writer) *pgproto3.Frontend {
	f := pgproto3.NewFrontend(r, w)
	f.SetMaxBodyLen(maxWireMessage)
	return f
}

// reachStream opens the connection that is to stream, if the server is the one
// that prepare has found, and has what it has sent up to from: see sameServer. From then on everything else is looked at
// on that server. The caller closes it, or hands it to startStream.
func (s *Source) reachStream(ctx context.Context, r *ready, from uint64) (*pgconn.PgConn, error) {
	conn, err := s.connectReplication(ctx, r.senderTimeout)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	if err = r.sameServer(ctx, conn, from); err == nil {
		err = s.streamsHere(ctx, conn, r)
	}
	if err != nil {
		_ = conn.Close(context.WithoutCancel(ctx)) // ctx may be what ended it
		return nil, err
	}
	return conn, nil
}

// startStream starts replication at start.
func (s *Source) startStream(ctx context.Context, conn *pgconn.PgConn, start uint64) (*stream, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	err := pglogrepl.StartReplication(ctx, conn, quoteIdentifier(s.cfg.Slot), pglogrepl.LSN(start), pglogrepl.StartReplicationOptions{
		Mode: pglogrepl.LogicalReplication,
		PluginArgs: []string{
			"proto_version '1'",
			"publication_names " + quoteLiteral(quoteIdentifier(s.cfg.Publication)),
		},
	})
	if err == nil {
		var hijacked *pgconn.HijackedConn
		if hijacked, err = conn.Hijack(); err == nil {
			return &stream{wire{conn: hijacked.Conn, frontend: hijacked.Frontend}}, nil
		}
	}
	_ = conn.Close(context.WithoutCancel(ctx)) // ctx may be what ended it
	if inUse, ok := errors.AsType[*pgconn.PgError](err); ok && inUse.Code == "55006" {
		return nil, s.occupied(ctx)
	}
	return nil, classify(fmt.Sprintf("start replication from slot %q at %s", s.cfg.Slot, decode.FormatLSN(start)), err)
}

// excuse makes a refused login worth another attempt when the same process has
// been let in before: a password or a certificate is being rotated, or a
// server is being moved, and its file will follow.
func (s *Source) excuse(err error) error {
	if errors.Is(err, errLogin) && s.connected.Load() {
		refused, _ := errors.AsType[*decode.Refusal](err)
		return &outage{
			what: "the server does not let pgsource in as it did before; credentials are read and tried again",
			why:  refused.What + ": " + refused.Why, do: refused.Do, // by text: it must no longer be a refusal
		}
	}
	return err
}

// errLogin marks refusals of who we are: user, password, certificate, address.
var errLogin = errors.New("login refused")

// newTag makes the name of one process among those that may use a slot.
func newTag() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// applicationPrefix begins the application_name of every pgsource.
const applicationPrefix = "holdfast/"

// applicationName tells which slot and which process a session belongs to. The
// server cuts it at 63 bytes, so what tells processes apart stands in front.
func (s *Source) applicationName() string { return applicationPrefix + s.tag + "/" + s.cfg.Slot }

func quoteIdentifier(s string) string { return `"` + strings.ReplaceAll(s, `"`, `""`) + `"` }

func quoteLiteral(s string) string { return `'` + strings.ReplaceAll(s, `'`, `''`) + `'` }
