package wal

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/decode"
)

// The server versions that are known to do what is needed, as
// server_version_num / 10000. Logical decoding on a standby came with 16.
const (
	oldestVersion   = 14
	standbyVersion  = 16
	failoverVersion = 17
)

// serverFacts is what the server says about itself.
type serverFacts struct {
	version     int // server_version_num
	versionText string
	standby     bool
	walLevel    string
	// senderTimeout is this role's wal_sender_timeout in this database.
	senderTimeout time.Duration
	replicates    bool // the role may start replication
	mayCreate     bool // the role may create a publication
	slots         int  // in use
	maxSlots      int
	// keepSize is max_slot_wal_keep_size in MiB, -1 for no bound.
	keepSize int64
	// idleTimeout is idle_replication_slot_timeout, 0 where there is none.
	idleTimeout time.Duration
	synchronous string // synchronous_standby_names
	// wantsFailover: the slot is to be one that standbys mirror. peeks: it is to
	// be read over plain SQL.
	wantsFailover, peeks bool
}

func (f *serverFacts) major() int { return f.version / 10000 }

func (s *Source) readServer(ctx context.Context, conn *pgx.Conn) (*serverFacts, error) {
	f := &serverFacts{wantsFailover: s.cfg.Failover, peeks: s.cfg.Transport == TransportPeek}
	var senderTimeout, idleTimeout float64
	err := conn.QueryRow(ctx, `
		SELECT current_setting('server_version_num')::int, current_setting('server_version'), pg_is_in_recovery(), current_setting('wal_level'),
		       (SELECT setting::float8 FROM pg_settings WHERE name = 'wal_sender_timeout'),
		       EXISTS (SELECT FROM pg_roles WHERE rolname = current_user AND (rolreplication OR rolsuper))
		       OR EXISTS (SELECT FROM pg_roles r WHERE r.rolname IN ('rds_replication', 'cloudsqlsuperuser', 'azure_pg_admin')
		                  AND pg_has_role(current_user, r.oid, 'member')), -- what hosted servers have instead of the attribute
		       has_database_privilege(current_database(), 'CREATE'),
		       (SELECT count(*) FROM pg_replication_slots), current_setting('max_replication_slots')::int,
		       coalesce((SELECT setting::int8 FROM pg_settings WHERE name = 'max_slot_wal_keep_size'), -1),
		       coalesce((SELECT setting::float8 * CASE unit WHEN 'ms' THEN 0.001 WHEN 'min' THEN 60 ELSE 1 END
		                 FROM pg_settings WHERE name = 'idle_replication_slot_timeout'), 0),
		       current_setting('synchronous_standby_names')`,
	).Scan(&f.version, &f.versionText, &f.standby, &f.walLevel, &senderTimeout, &f.replicates, &f.mayCreate, &f.slots, &f.maxSlots,
		&f.keepSize, &idleTimeout, &f.synchronous)
	if err != nil {
		return nil, classify("ask for the server's settings", err)
	}
	f.senderTimeout = time.Duration(senderTimeout) * time.Millisecond
	f.idleTimeout = time.Duration(idleTimeout * float64(time.Second))
	return f, nil
}

// checkServer refuses a server that cannot do what is needed.
func (s *Source) checkServer(ctx context.Context, conn *pgx.Conn, r *ready) error {
	f, err := s.readServer(ctx, conn)
	if err != nil {
		return err
	}
	// A timed status asks for an answer, which is what keeps the stall time-out
	// from taking an idle wire for a dead one.
	r.statusEvery = min(10*time.Second, s.cfg.StallTimeout/3)
	limit := f.senderTimeout
	if r.senderTimeout = s.cfg.SenderTimeout; r.senderTimeout == 0 && limit == 0 {
		r.senderTimeout = defaultSenderTimeout
	}
	if r.senderTimeout > 0 {
		limit = r.senderTimeout
	}
	r.statusEvery = min(r.statusEvery, limit/4)
	return errors.Join(f.findings(conn.Config().User)...)
}

// findings gives everything about the server that has to be mended.
func (f *serverFacts) findings(user string) []error {
	var all []error
	add := func(what, where, why, expected, do string) {
		all = append(all, &decode.Refusal{Reason: decode.ReasonSetup, What: what, Where: where, Why: why, Expected: expected, Do: do})
	}
	switch {
	case f.major() < oldestVersion:
		add("server", "", "it is PostgreSQL "+f.versionText, fmt.Sprintf("PostgreSQL %d or newer", oldestVersion), "upgrade the server")
	case f.standby && f.major() < standbyVersion:
		add("server", "", "it is a standby, and PostgreSQL "+f.versionText+" decodes on a primary only",
			fmt.Sprintf("a primary, or a standby of PostgreSQL %d or newer", standbyVersion), "put the primary into PGSOURCE_DSN; with several hosts, add target_session_attrs=primary")
	case f.standby && f.peeks:
		add("server", "", "it is a standby, and PGSOURCE_TRANSPORT is peek: plain SQL does not tell which timeline a standby follows",
			"a primary", "put the primary into PGSOURCE_DSN, or set PGSOURCE_TRANSPORT=stream")
	}
	if f.walLevel != "logical" {
		add("server", "", fmt.Sprintf("wal_level is %q", f.walLevel), "wal_level = logical", "ALTER SYSTEM SET wal_level = 'logical'; then restart the Postgres server")
	}
	if f.wantsFailover && f.major() < failoverVersion {
		add("server", "", "it is PostgreSQL "+f.versionText+", and PGSOURCE_SLOT_FAILOVER is true", fmt.Sprintf("PostgreSQL %d or newer for failover slots", failoverVersion), "set PGSOURCE_SLOT_FAILOVER=false, or upgrade the server")
	}
	if !f.replicates {
		add("role", user, "it may not replicate", "the REPLICATION attribute", fmt.Sprintf("ALTER ROLE %s REPLICATION", quoteIdentifier(user)))
	}
	return all
}

// notes gives what is no fault and may become one.
func (f *serverFacts) notes(s *Source) []string {
	var all []string
	if f.standby {
		all = append(all, "it is a standby: the publication is made on its primary, and making a slot waits for the primary's next snapshot record (SELECT pg_log_standby_snapshot() there)")
	}
	if f.keepSize < 0 {
		all = append(all, "max_slot_wal_keep_size is -1: while pgsource is down, the slot keeps WAL until the server's disk is full")
	}
	if f.idleTimeout > 0 {
		all = append(all, fmt.Sprintf("idle_replication_slot_timeout is %s: the slot is lost when pgsource is down for longer", f.idleTimeout))
	}
	if f.senderTimeout == 0 && s.cfg.SenderTimeout == 0 && !f.peeks {
		all = append(all, fmt.Sprintf("wal_sender_timeout is 0: pgsource asks for %s on its own connection", defaultSenderTimeout))
	}
	if strings.Contains(f.synchronous, "*") {
		all = append(all, "synchronous_standby_names has a *, which makes pgsource a synchronous standby: commits wait for Feldera; name the standbys instead")
	}
	return all
}

// CheckServer is a preflight: the server answers and can replicate. It says
// what it found, and what may become a fault.
func (s *Source) CheckServer(ctx context.Context) (string, error) {
	var said string
	err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		f, err := s.readServer(ctx, conn)
		if err != nil {
			return err
		}
		all := append([]string{"PostgreSQL " + f.versionText + " " + describeConnection(conn.PgConn(), &conn.Config().Config)}, f.notes(s)...)
		if note := hostsNote(&conn.Config().Config); note != "" {
			all = append(all, note)
		}
		said = strings.Join(all, "; ")
		return errors.Join(f.findings(conn.Config().User)...)
	})
	return said, err
}

// CheckReplication is a preflight: a replication connection can be made, which
// pg_hba.conf, a pooler or max_wal_senders may forbid although others work.
func (s *Source) CheckReplication(ctx context.Context) (string, error) {
	if s.cfg.Transport == TransportPeek {
		return s.checkPeek(ctx)
	}
	cfg, err := s.connectionConfig()
	if err != nil {
		return "", err
	}
	cfg.RuntimeParams["replication"] = "database"
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	conn, err := pgconn.ConnectConfig(ctx, cfg)
	if err != nil {
		return "", connectFailure("connect for replication", cfg, err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	id, err := pglogrepl.IdentifySystem(ctx, conn)
	if err != nil {
		return "", classify("IDENTIFY_SYSTEM", err)
	}
	return fmt.Sprintf("system %s, timeline %d, at %s", id.SystemID, id.Timeline, decode.FormatLSN(uint64(id.XLogPos))), nil
}

// checkPeek is CheckReplication for TransportPeek: the server can be identified
// over plain SQL, and this role may call what is to be called.
func (s *Source) checkPeek(ctx context.Context) (said string, err error) {
	err = s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		id, err := identifySQL(ctx, conn)
		if err != nil {
			return err
		}
		said = fmt.Sprintf("not needed with PGSOURCE_TRANSPORT=peek; system %s, timeline %d", id.system, id.timeline)
		for _, function := range []string{"pg_logical_slot_peek_binary_changes(name,pg_lsn,integer,text[])", "pg_replication_slot_advance(name,pg_lsn)"} {
			var may bool
			if err := conn.QueryRow(ctx, `SELECT has_function_privilege($1, 'EXECUTE')`, function).Scan(&may); err != nil {
				return classify("look up the rights on "+function, err)
			}
			if !may {
				user := conn.Config().User
				return &decode.Refusal{
					Reason: decode.ReasonSetup, What: "role", Where: user, Why: "it may not call " + function, Expected: "the right to, beside REPLICATION",
					Do: fmt.Sprintf("GRANT EXECUTE ON FUNCTION %s TO %s", function, quoteIdentifier(user)),
				}
			}
		}
		return nil
	})
	return said, err
}

// describeConnection says how the server was reached, without a secret.
func describeConnection(conn *pgconn.PgConn, cfg *pgconn.Config) string {
	var b strings.Builder
	how := "in plaintext"
	switch c := conn.Conn().(type) {
	case *net.UnixConn:
		fmt.Fprintf(&b, "over the Unix socket %s", c.RemoteAddr())
		how = ""
	case *tls.Conn:
		fmt.Fprintf(&b, "at %s", c.RemoteAddr())
		state := c.ConnectionState()
		how = "over " + tls.VersionName(state.Version)
		switch {
		case len(state.VerifiedChains) > 0:
			how += ", certificate and host name verified"
		case cfg.TLSConfig != nil && cfg.TLSConfig.VerifyPeerCertificate != nil:
			how += ", certificate verified, host name not"
		default:
			how += ", certificate not verified"
		}
	default:
		fmt.Fprintf(&b, "at %s", c.RemoteAddr())
	}
	fmt.Fprintf(&b, " as user %q to database %q", cfg.User, cfg.Database)
	if how != "" {
		b.WriteString(" " + how)
	}
	if names := libpqVariables(os.Environ()); len(names) > 0 {
		fmt.Fprintf(&b, " (%s set in the environment)", strings.Join(names, ", "))
	}
	return b.String()
}

// libpqVariables gives the names of libpq's variables that are set.
func libpqVariables(environ []string) []string {
	var names []string
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		if value != "" && slices.Contains(pgVariables, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// pgVariables are those that the driver reads.
var pgVariables = []string{
	"PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGPASSWORD", "PGPASSFILE", "PGAPPNAME", "PGCONNECT_TIMEOUT", "PGSSLMODE", "PGSSLKEY",
	"PGSSLCERT", "PGSSLCERTMODE", "PGSSLSNI", "PGSSLROOTCERT", "PGSSLPASSWORD", "PGSSLNEGOTIATION", "PGTARGETSESSIONATTRS", "PGSERVICE",
	"PGSERVICEFILE", "PGTZ", "PGOPTIONS", "PGMINPROTOCOLVERSION", "PGMAXPROTOCOLVERSION", "PGCHANNELBINDING", "PGREQUIREAUTH",
}

// CheckPublication is a preflight: the publication exists and publishes
// exactly what is mapped, or may be created. It creates nothing.
func (s *Source) CheckPublication(ctx context.Context) (string, error) {
	said := "it publishes exactly the mapped tables"
	err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		first, err := s.firstStart(ctx, conn)
		if err != nil {
			return err
		}
		if first {
			said = "there is none yet: the first start makes it"
			list, err := withoutIdentity(ctx, conn, s.cfg.Tables)
			if err != nil {
				return err
			}
			create := s.publicationStatement()
			if len(list) > 0 {
				said += ". " + refusedWrites(list)
				create = refusedWrites(list) + "; then run: " + create
			}
			return errors.Join(s.creationFindings(ctx, conn, create)...)
		}
		return s.withoutCreating().ensurePublication(ctx, conn)
	})
	return said, err
}

// creationFindings gives what would keep a first start from making the
// publication. create is what somebody else has to run then.
func (s *Source) creationFindings(ctx context.Context, conn *pgx.Conn, create string) []error {
	f, err := s.readServer(ctx, conn)
	if err != nil {
		return []error{err}
	}
	var all []error
	user := conn.Config().User
	if f.standby {
		all = append(all, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "publication", Where: s.cfg.Publication, Why: "there is none, and a standby cannot make it",
			Expected: "a publication that the primary has", Do: "on the primary run: " + create,
		})
		return all
	}
	if !f.mayCreate {
		all = append(all, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "role", Where: user, Why: "it may not create a publication in this database", Expected: "CREATE on the database",
			Do: fmt.Sprintf("GRANT CREATE ON DATABASE %s TO %s; or let an owner run: %s", quoteIdentifier(conn.Config().Database), quoteIdentifier(user), create),
		})
	}
	for _, t := range s.cfg.Tables {
		var owns bool
		err := conn.QueryRow(ctx, `SELECT pg_has_role(c.relowner, 'USAGE') FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE n.nspname = $1 AND c.relname = $2`, t.Schema, t.Name).Scan(&owns)
		switch {
		case errors.Is(err, pgx.ErrNoRows): // the check of the tables says so
		case err != nil:
			return append(all, classify("look up the owner of a table", err))
		case !owns:
			name := tableName{t.Schema, t.Name}
			all = append(all, &decode.Refusal{
				Reason: decode.ReasonSetup, What: "role", Where: user, Why: "it does not own table " + name.String() + ", and only an owner can publish it",
				Expected: "ownership of every mapped table, or a publication that is there already",
				Do:       "let the owner run: " + create,
			})
		}
	}
	return all
}

// CheckSlotState is a preflight: the slot exists and can serve, or may be
// created. It creates nothing.
func (s *Source) CheckSlotState(ctx context.Context) (string, error) {
	said := ""
	err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		first, err := s.firstStart(ctx, conn)
		if err != nil {
			return err
		}
		f, err := s.readServer(ctx, conn)
		if err != nil {
			return err
		}
		if first {
			said = "there is none yet: the first start makes it"
			return f.roomForSlot(s.cfg.Slot)
		}
		slot, err := readSlot(ctx, conn, s.cfg.Slot)
		if err != nil {
			return err
		}
		if slot == nil {
			if s.cfg.Create {
				return s.orphanedPublication() // else it were a first start
			}
			var publication bool
			if err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_publication WHERE pubname = $1)`, s.cfg.Publication).Scan(&publication); err != nil {
				return classify("look up the publication", err)
			}
			return s.noSlot(publication)
		}
		said = slot.String()
		return slot.usable(s.cfg.Slot)
	})
	return said, err
}

// roomForSlot refuses a server on which no slot can be made.
func (f *serverFacts) roomForSlot(name string) error {
	if f.slots < f.maxSlots {
		return nil
	}
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "slot", Where: name, Why: fmt.Sprintf("it is still to be made, and all %d replication slots are in use", f.maxSlots),
		Expected: "a free replication slot", Do: "raise max_replication_slots (needs a restart of the server), or drop a slot that nobody uses: SELECT slot_name, active FROM pg_replication_slots",
	}
}

// firstStart tells whether a start would create publication and slot.
func (s *Source) firstStart(ctx context.Context, conn *pgx.Conn) (bool, error) {
	if !s.cfg.Create {
		return false, nil
	}
	var found int
	err := conn.QueryRow(ctx, `SELECT (SELECT count(*) FROM pg_publication WHERE pubname = $1) + (SELECT count(*) FROM pg_replication_slots WHERE slot_name = $2)`,
		s.cfg.Publication, s.cfg.Slot).Scan(&found)
	if err != nil {
		return false, classify("look up publication and slot", err)
	}
	return found == 0, nil
}

// BytesText writes a number of bytes for people.
func BytesText(n int64) string {
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB"}
	v, i := math.Abs(float64(n)), 0
	for v >= 1024 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	if n < 0 {
		v = -v
	}
	if i == 0 {
		return fmt.Sprintf("%d bytes", n)
	}
	return fmt.Sprintf("%.1f %s", v, units[i])
}
