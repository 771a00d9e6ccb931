package wal

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/fnv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/decode"
)

const (
	// tablePace bounds the transactions that the bookmark costs. In the
	// source's own cluster each of them is WAL, which moves the server's
	// position, which would be saved again: positions without rows are saved
	// seldom there.
	tablePace     = 250 * time.Millisecond
	tableIdlePace = 10 * time.Second
	// lockPatience is how long Acquire waits for a lock that somebody holds: a
	// predecessor that was killed has it until the server has noticed.
	lockPatience = 10 * time.Second
)

// TableStore keeps States in a Postgres table, one row for each slot.
//
// Two things keep a second writer out: a session's advisory lock, which tells
// a second process who holds the row, and the owner in the row, a random name
// that each process writes when it takes the row over and asks for in every
// save. The lock goes with a broken connection; the owner does not, so a
// process that was cut off and came back late changes nothing.
type TableStore struct {
	dsn                 func() (string, error)
	schema, table, slot string
	create              bool
	// shared: the table is in the source's cluster.
	shared bool
	owner  string
	taken  bool
	conn   *pgx.Conn
}

// TableOptions says where a TableStore keeps its row.
type TableOptions struct {
	DSN           func() (string, error)
	Schema, Table string
	Slot          string // the row's key
	// Create allows the table to be made.
	Create bool
	// SourceCluster: the table is in the cluster that is read from.
	SourceCluster bool
}

// NewTableStore makes a store in a table. It connects to nothing.
func NewTableStore(o TableOptions) *TableStore {
	return &TableStore{
		dsn: o.DSN, schema: o.Schema, table: o.Table, slot: o.Slot, create: o.Create, shared: o.SourceCluster,
		owner: thisProcess() + " " + rand.Text(),
	}
}

// Where gives postgres: and the table's name.
func (t *TableStore) Where() string { return "postgres:" + t.name() }

func (t *TableStore) name() string { return quoteIdentifier(t.schema) + "." + quoteIdentifier(t.table) }

// Pace is slower than a file's.
func (t *TableStore) Pace() (rows, idle time.Duration) {
	if t.shared {
		return tablePace, tableIdlePace
	}
	return tablePace, tablePace
}

// Acquire connects, takes the lock and makes the row ours.
func (t *TableStore) Acquire(ctx context.Context) error {
	if t.taken && t.conn != nil && !t.conn.IsClosed() {
		return nil
	}
	conn, err := t.connect(ctx)
	if err != nil {
		return err
	}
	if err := t.take(ctx, conn); err != nil {
		_ = conn.Close(context.WithoutCancel(ctx))
		return err
	}
	t.conn = conn
	return nil
}

func (t *TableStore) connect(ctx context.Context) (*pgx.Conn, error) {
	dsn, err := t.dsn()
	if err != nil {
		return nil, fmt.Errorf("read the connection string of the state: %w", err)
	}
	setting := settingStateDSN
	if t.shared {
		setting = settingDSN
	}
	base, err := pinnedConfig(dsn, stateSilence, "holdfast/state/"+t.slot)
	if err != nil {
		return nil, ofSetting(setting, err)
	}
	// Whatever the role's default: a bookmark that a crash of the server takes
	// back would be below what the slot was told.
	base.RuntimeParams["synchronous_commit"] = "on"
	conn, err := openPlain(ctx, base)
	if err != nil {
		return nil, ofSetting(setting, connectFailure("connect to the database of the state", base, err))
	}
	return conn, nil
}

// stateSilence is how long the wire to the state's database may be dead.
const stateSilence = time.Minute

// lockKey makes one number of a row's name: 64 bits, so that two rows of one
// database do not meet by chance.
func (t *TableStore) lockKey() int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte("holdfast\x00" + t.name() + "\x00" + t.slot)) // never fails
	return int64(h.Sum64())                                             //nolint:gosec // any 64 bits do
}

func (t *TableStore) take(ctx context.Context, conn *pgx.Conn) error {
	if err := t.ensureTable(ctx, conn); err != nil {
		return err
	}
	deadline := time.Now().Add(lockPatience)
	for {
		var locked bool
		if err := conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1)`, t.lockKey()).Scan(&locked); err != nil {
			return classify("lock the state", err)
		}
		if locked {
			return t.own(ctx, conn)
		}
		if time.Now().After(deadline) {
			break // the owner in the row decides, or the holder is named
		}
		if err := sleep(ctx, lockPatience/20); err != nil {
			return err
		}
	}
	if t.taken {
		// Most likely our own session, which broke and which the server still
		// believes in: it ends. If not, the owner in the row says so.
		if err := t.stillOwner(ctx, conn); err != nil {
			return err
		}
		return errors.New("lock the state: a session from before still holds the lock")
	}
	return t.held(ctx, conn)
}

// own writes our name into the row, once the lock is ours.
func (t *TableStore) own(ctx context.Context, conn *pgx.Conn) error {
	if t.taken {
		return t.stillOwner(ctx, conn)
	}
	if _, err := conn.Exec(ctx, `UPDATE `+t.name()+` SET owner = $1 WHERE slot = $2`, t.owner, t.slot); err != nil {
		return classify("take the state", err)
	}
	t.taken = true
	return nil
}

// stillOwner refuses when another process took the row while we were cut off.
// A row that is gone is written again by the next save: what it said is still
// known here.
func (t *TableStore) stillOwner(ctx context.Context, conn *pgx.Conn) error {
	var owner *string
	if err := conn.QueryRow(ctx, `SELECT (SELECT owner FROM `+t.name()+` WHERE slot = $1)`, t.slot).Scan(&owner); err != nil {
		return classify("look up the owner of the state", err)
	}
	if owner != nil && *owner != t.owner {
		return t.usurped("another process has taken it over: " + *owner)
	}
	return nil
}

// errUsurped marks the refusals of a store that somebody else has.
var errUsurped = errors.New("somebody else has the state")

func (t *TableStore) usurped(why string) error {
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "state", Where: t.Where(), Why: why, Expected: "one pgsource for one state",
		Do:  "stop the other one, or give this one a PGSOURCE_STATE (and a PGSOURCE_SLOT) of its own",
		Err: errUsurped,
	}
}

// held refuses a row that another session has locked, naming that session.
func (t *TableStore) held(ctx context.Context, conn *pgx.Conn) error {
	var pid int32
	var application, client string
	err := conn.QueryRow(ctx, `
		SELECT l.pid, coalesce(a.application_name, ''), coalesce(host(a.client_addr), 'the local socket')
		FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
		WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
		  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
		  AND l.classid::int8 = ($1::int8 >> 32) & 4294967295 AND l.objid::int8 = $1::int8 & 4294967295`, t.lockKey(),
	).Scan(&pid, &application, &client)
	who := "another session holds it"
	if err == nil {
		who = fmt.Sprintf("another session holds it: process %d of the server, application %q from %s", pid, application, client)
	}
	refusal := t.usurped(who)
	if refused, ok := errors.AsType[*decode.Refusal](refusal); ok && err == nil {
		refused.Do += fmt.Sprintf("; a session whose client is gone is ended by: SELECT pg_terminate_backend(%d)", pid)
	}
	return refusal
}

func (t *TableStore) ensureTable(ctx context.Context, conn *pgx.Conn) error {
	var there bool
	if err := conn.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, t.name()).Scan(&there); err != nil {
		return classify("look up the table of the state", err)
	}
	if there {
		return nil
	}
	if !t.create {
		return t.missing()
	}
	if _, err := conn.Exec(ctx, t.statement()); err != nil {
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && (pgErr.Code == "42P07" || pgErr.Code == "23505") {
			return nil // somebody else was quicker
		}
		return classify("create the table of the state", err)
	}
	return nil
}

func (t *TableStore) statement() string {
	return "CREATE TABLE " + t.name() + " (slot text PRIMARY KEY, owner text NOT NULL, record text NOT NULL)"
}

func (t *TableStore) missing() error {
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "state", Where: t.Where(), Why: "the table does not exist, or its schema may not be used",
		Expected: "a table that this role may read and write", Do: "set PGSOURCE_CREATE=true, or run: " + t.statement(),
	}
}

// Load reads the row: over the store's connection, or one of its own where the
// store is not taken.
func (t *TableStore) Load(ctx context.Context) (*State, error) {
	conn := t.conn
	if conn == nil {
		var err error
		if conn, err = t.connect(ctx); err != nil {
			return nil, err
		}
		defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
		var there bool
		if err := conn.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, t.name()).Scan(&there); err != nil || !there {
			return nil, err
		}
	}
	var size *int64
	var record *string
	err := conn.QueryRow(ctx, `SELECT octet_length(record), CASE WHEN octet_length(record) <= $2 THEN record END FROM `+t.name()+` WHERE slot = $1`,
		t.slot, maxStateBytes).Scan(&size, &record)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil //nolint:nilnil // absence is an answer
	}
	if err != nil {
		return nil, classify("read the state", err)
	}
	if record == nil {
		return nil, refuseState(t.Where(), unreadable("it is larger than %d bytes", maxStateBytes))
	}
	st, err := decodeState([]byte(*record))
	if err != nil {
		return nil, refuseState(t.Where(), err)
	}
	return st, nil
}

// Save writes the row, if it is still ours.
func (t *TableStore) Save(ctx context.Context, st *State) error {
	b, err := encodeState(st)
	if err != nil {
		return err
	}
	if !t.taken {
		return errors.New("broken invariant: the state is saved without its lock")
	}
	if t.conn == nil || t.conn.IsClosed() {
		if err := t.Acquire(ctx); err != nil {
			return notFinal(err)
		}
	}
	tag, err := t.conn.Exec(ctx, `
		INSERT INTO `+t.name()+` AS old (slot, owner, record) VALUES ($1, $2, $3)
		ON CONFLICT (slot) DO UPDATE SET record = excluded.record WHERE old.owner = excluded.owner`, t.slot, t.owner, string(b))
	if err != nil {
		// What it has done is open; the session may be too. The next one begins
		// with a connection of its own.
		_ = t.conn.Close(context.WithoutCancel(ctx))
		return fmt.Errorf("save the state in %s: %w", t.name(), err)
	}
	if tag.RowsAffected() != 1 {
		return t.usurped("another process has taken it over")
	}
	return nil
}

// notFinal makes an error worth another attempt unless somebody else has the
// state: a store that worked before is mended without pgsource being stopped.
func notFinal(err error) error {
	if errors.Is(err, errUsurped) {
		return err
	}
	if refused, ok := errors.AsType[*decode.Refusal](err); ok {
		return errors.New(refused.Error())
	}
	return err
}

// Check looks whether the table is there and may be written to.
func (t *TableStore) Check(ctx context.Context) error {
	conn, err := t.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	var allowed *bool
	err = conn.QueryRow(ctx, `SELECT has_table_privilege(to_regclass($1), 'SELECT') AND has_table_privilege(to_regclass($1), 'INSERT') AND has_table_privilege(to_regclass($1), 'UPDATE')`,
		t.name()).Scan(&allowed)
	switch {
	case err != nil:
		return classify("look up the table of the state", err)
	case allowed == nil && t.create:
		return nil
	case allowed == nil:
		return t.missing()
	case !*allowed:
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "state", Where: t.Where(), Why: "this role may not read and write the table", Expected: "SELECT, INSERT and UPDATE",
			Do: "GRANT SELECT, INSERT, UPDATE ON " + t.name() + " TO " + quoteIdentifier(conn.Config().User),
		}
	}
	return nil
}

// Release ends the session, and the lock with it.
func (t *TableStore) Release(ctx context.Context) error {
	if t.conn == nil {
		return nil
	}
	err := t.conn.Close(ctx)
	t.conn, t.taken = nil, false
	return err
}
