package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// connectTimeout bounds one attempt to connect and start; queryTimeout one
// look at the catalogue. Creating a slot waits for every transaction that is
// writing, so it has a limit of its own.
const (
	connectTimeout    = 15 * time.Second
	queryTimeout      = 15 * time.Second
	createSlotTimeout = 2 * time.Minute
)

// ready is what prepare found: the source and the destination as they are
// now, fit for each other.
type ready struct {
	// confirmed is the slot's confirmed_flush_lsn: what the source was told.
	confirmed uint64
	// oids are the mapped tables' identities: a table that was dropped and made
	// again has its name and is another one, which the publication lacks.
	oids map[tableName]uint32
	// statusEvery is how often the server must hear from us.
	statusEvery time.Duration
	tables      map[tableName]*feldera.Table
}

// tableName is a source table's full name. It is a pair and not a text, since
// quoted names may contain dots.
type tableName struct{ schema, name string }

func (n tableName) String() string { return quoteIdentifier(n.schema) + "." + quoteIdentifier(n.name) }

func nameOf(rel *decode.Relation) tableName { return tableName{rel.Schema, rel.Name} }

// prepare looks at both sides, creates what it may, and refuses what cannot
// work, before anything streams. Errors that are no *decode.Refusal are worth
// another attempt.
func (s *Source) prepare(ctx context.Context) (*ready, error) {
	r := &ready{}
	targets, err := s.describeDestination(ctx)
	if err != nil {
		s.reportFailure(CheckDestination, err)
		return nil, err
	}
	r.tables = targets
	s.cfg.Report(Status{Check: CheckDestination, OK: true, Message: "the pipeline has every table"})

	conn, err := s.connect(ctx)
	if err != nil {
		s.reportFailure(CheckSource, err)
		return nil, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if err := s.prepareSource(ctx, conn, r); err != nil {
		s.reportFailure(CheckSource, err)
		return nil, err
	}
	return r, nil
}

func (s *Source) reportFailure(check string, err error) {
	st := Status{Check: check, Message: err.Error()}
	var refused *decode.Refusal
	if errors.As(err, &refused) {
		st.Blocking, st.Hint = true, refused.Do
	}
	s.cfg.Report(st)
}

// describeDestination finds the Feldera table of every source table.
func (s *Source) describeDestination(ctx context.Context) (map[tableName]*feldera.Table, error) {
	schema, err := s.cfg.Pipeline.Describe(ctx)
	if err != nil {
		return nil, fmt.Errorf("describe the pipeline: %w", err)
	}
	targets := make(map[tableName]*feldera.Table, len(s.cfg.Tables))
	for _, t := range s.cfg.Tables {
		target, err := schema.Table(t.Target)
		if err != nil {
			return nil, err
		}
		targets[tableName{t.Schema, t.Name}] = target
	}
	if s.cfg.AckOn == ack.Durable {
		if err := s.cfg.Pipeline.NewDurability(feldera.DurabilityOptions{}).Check(ctx); err != nil {
			return nil, fmt.Errorf("PGSOURCE_ACK_ON=durable: %w", err)
		}
	}
	now, err := s.cfg.Pipeline.Incarnation(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask the pipeline for its incarnation: %w", err)
	}
	if was := s.cfg.Pipeline.Expected(); was != now {
		return nil, &feldera.IncarnationChanged{Was: was, Now: now}
	}
	return targets, nil
}

// connect opens a connection for looking things up.
func (s *Source) connect(ctx context.Context) (*pgx.Conn, error) {
	dsn, err := s.cfg.DSN()
	if err != nil {
		return nil, fmt.Errorf("read PGSOURCE_DSN: %w", err)
	}
	if err := CheckDSN(dsn); err != nil {
		return nil, err
	}
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, CheckDSN("\x00") // cannot be: CheckDSN parsed it; still, never show the cause
	}
	cfg.RuntimeParams["application_name"] = applicationName(s.cfg.Slot)
	// The simple protocol quotes parameters into the text, which the driver
	// does only for these two settings.
	cfg.RuntimeParams["client_encoding"] = "UTF8"
	cfg.RuntimeParams["standard_conforming_strings"] = "on"
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, s.excuse(classify("connect to Postgres", err))
	}
	s.connected.Store(true)
	return conn, nil
}

// excuse makes a refused login worth another attempt when the same process has
// been let in before: a password is being rotated, and its file will follow.
func (s *Source) excuse(err error) error {
	if errors.Is(err, errLogin) && s.connected.Load() {
		return fmt.Errorf("the server does not take the credentials that it took before; they are read and tried again: %s", err.Error()) // by text: it must no longer be a refusal
	}
	return err
}

// errLogin marks refusals of user or password.
var errLogin = errors.New("login refused")

// prepareSource checks the server and the tables, then sees to the
// publication and the slot, in this order: a slot decodes with the catalogue
// of the moment of each change, so a publication made after the slot is not
// there for the slot's first changes, and can never be added to them.
func (s *Source) prepareSource(ctx context.Context, conn *pgx.Conn, r *ready) error {
	qctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	if err := s.checkServer(qctx, conn, r); err != nil {
		return err
	}
	if err := s.checkTables(qctx, conn, r); err != nil {
		return err
	}
	if err := s.ensurePublication(qctx, conn); err != nil {
		return err
	}
	return s.ensureSlot(ctx, conn, r)
}

func (s *Source) checkServer(ctx context.Context, conn *pgx.Conn, r *ready) error {
	var walLevel, timeout string
	var replicates bool
	err := conn.QueryRow(ctx, `
		SELECT current_setting('wal_level'), current_setting('wal_sender_timeout'),
		       EXISTS (SELECT FROM pg_roles WHERE rolname = current_user AND (rolreplication OR rolsuper))
		       OR EXISTS (SELECT FROM pg_roles r WHERE r.rolname IN ('rds_replication', 'cloudsqlsuperuser', 'azure_pg_admin')
		                  AND pg_has_role(current_user, r.oid, 'member'))`, // what hosted servers have instead of the attribute
	).Scan(&walLevel, &timeout, &replicates)
	if err != nil {
		return classify("ask for the server's settings", err)
	}
	if walLevel != "logical" {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "server", Why: fmt.Sprintf("wal_level is %q", walLevel), Expected: "wal_level = logical",
			Do: "ALTER SYSTEM SET wal_level = 'logical'; then restart the Postgres server",
		}
	}
	if !replicates {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "role", Where: conn.Config().User, Why: "it may not replicate", Expected: "the REPLICATION attribute",
			Do: fmt.Sprintf("ALTER ROLE %s REPLICATION", quoteIdentifier(conn.Config().User)),
		}
	}
	var seconds float64
	err = conn.QueryRow(ctx, `SELECT extract(epoch FROM $1::interval)::float8`, intervalOf(timeout)).Scan(&seconds)
	if err != nil {
		return classify("read wal_sender_timeout", err)
	}
	// A timed status asks for an answer, which is what keeps the stall time-out
	// from taking an idle wire for a dead one.
	r.statusEvery = min(10*time.Second, s.cfg.StallTimeout/3)
	if seconds > 0 {
		r.statusEvery = min(r.statusEvery, time.Duration(seconds*float64(time.Second))/4)
	}
	return nil
}

// intervalOf makes a setting's value readable as an interval: "0" has no unit
// there, and "1min" or "500ms" are understood.
func intervalOf(setting string) string {
	if setting == "0" {
		return "0 s"
	}
	return setting
}

// checkTables holds every configured table against its Feldera table, as far
// as the catalogue tells: identity, columns, types.
func (s *Source) checkTables(ctx context.Context, conn *pgx.Conn, r *ready) error {
	for _, t := range s.cfg.Tables {
		rel, err := catalogueRelation(ctx, conn, t)
		if err != nil {
			return err
		}
		types, err := readTypes(ctx, conn, tableTypes(rel.ID))
		if err != nil {
			return err
		}
		s.types.add(types)
		s.types.resolve(rel)
		if r.oids == nil {
			r.oids = make(map[tableName]uint32)
		}
		r.oids[nameOf(rel)] = rel.ID
		if target := r.tables[nameOf(rel)]; !target.HasKey() && rel.Identity != decode.IdentityFull {
			return &decode.Refusal{
				Reason: decode.ReasonIdentity, What: "source table", Where: rel.String(),
				Why:      fmt.Sprintf("the Feldera table %s has no PRIMARY KEY, so an update or delete needs the whole old row, which the stream carries only under REPLICA IDENTITY FULL", target.Spelling()),
				Expected: "a key on the Feldera table, or whole old rows",
				Do: fmt.Sprintf("declare the PRIMARY KEY in Feldera; or ALTER TABLE %s.%s REPLICA IDENTITY FULL, which helps only changes made after it, and accept duplicates after a crash",
					quoteIdentifier(t.Schema), quoteIdentifier(t.Name)),
			}
		}
		if err := s.checkHidden(ctx, conn, rel, r.tables[nameOf(rel)]); err != nil {
			return err
		}
		if _, err := feldera.NewEncoder(r.tables[nameOf(rel)], rel, s.cfg.Policy); err != nil {
			return err
		}
	}
	return nil
}

// checkHidden refuses a table of which the stream leaves out a column that the
// Feldera table has: a generated one, or one that the publication's column
// list does not name. It would be NULL there without a word.
func (s *Source) checkHidden(ctx context.Context, conn *pgx.Conn, rel *decode.Relation, target *feldera.Table) error {
	published, err := readPublished(ctx, conn, s.cfg.Publication, Table{Schema: rel.Schema, Name: rel.Name})
	if err != nil {
		return err
	}
	rows, err := conn.Query(ctx, `
		SELECT attname, attgenerated <> '' FROM pg_attribute WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped ORDER BY attnum`, rel.ID)
	if err != nil {
		return classify("look up the columns of "+rel.String(), err)
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		var generated bool
		if err := rows.Scan(&name, &generated); err != nil {
			return fmt.Errorf("read the columns of %s: %w", rel, err)
		}
		why := "it is generated, and the stream does not carry it"
		switch {
		case published != nil && slices.Contains(published, name), published == nil && !generated:
			continue
		case published != nil:
			why = "the publication's column list leaves it out"
		}
		for _, c := range target.Columns {
			if strings.EqualFold(c.Name, name) {
				return &decode.Refusal{
					Reason: decode.ReasonSchema, What: "column", Where: rel.String() + "." + name,
					Why:      why + "; the Feldera table's column of this name would be NULL in every row",
					Expected: "every column of the Feldera table in the stream",
					Do:       "compute it in a Feldera view and take it out of the table, or publish it",
				}
			}
		}
	}
	if err := rows.Err(); err != nil {
		return classify("look up the columns of "+rel.String(), err)
	}
	return nil
}

// checkUnchanged looks whether the source is still what prepare found: the
// same tables, and a publication of exactly these. What changes while we
// stream makes the server leave out rows, and its positions pass over them.
func (s *Source) checkUnchanged(ctx context.Context, conn *pgx.Conn, r *ready) error {
	if err := s.withoutCreating().ensurePublication(ctx, conn); err != nil {
		return asGap(err)
	}
	for name, oid := range r.oids {
		var now *uint32
		err := conn.QueryRow(ctx, `SELECT (SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE n.nspname = $1 AND c.relname = $2)`, name.schema, name.name).Scan(&now)
		if err != nil {
			return classify("look up table "+name.String(), err)
		}
		if now == nil || *now != oid {
			return &decode.Refusal{
				Reason: decode.ReasonGap, What: "source table", Where: name.String(), Why: "it was dropped, renamed or made anew while pgsource was streaming",
				Expected: "the table that it started with",
				Do:       "changes made to the new table before it is published are lost to the stream: see that the publication has it, load it again, and restart",
			}
		}
	}
	return nil
}

// asGap says of a refusal what it means while streaming: something was left
// out already.
func asGap(err error) error {
	refused, ok := errors.AsType[*decode.Refusal](err)
	if !ok {
		return err
	}
	gap := *refused
	gap.Reason = decode.ReasonGap
	gap.Why += "; it was changed while pgsource was streaming, and changes made since then are missing"
	return &gap
}

// catalogueRelation describes a table as a Relation message would.
func catalogueRelation(ctx context.Context, conn *pgx.Conn, t Table) (*decode.Relation, error) {
	rel := &decode.Relation{Schema: t.Schema, Name: t.Name}
	var kind, identity string
	err := conn.QueryRow(ctx, `
		SELECT c.oid, c.relkind::text, c.relreplident::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = $2`, t.Schema, t.Name,
	).Scan(&rel.ID, &kind, &identity)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "source table", Where: rel.String(), Why: "the database has no such table",
			Expected: "a table that exists; names are case sensitive", Do: "correct PGSOURCE_TABLES or create the table",
		}
	}
	if err != nil {
		return nil, classify("look up table "+rel.String(), err)
	}
	if kind != "r" && kind != "p" {
		return nil, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "source table", Where: rel.String(), Why: fmt.Sprintf("it is no table (relkind %q)", kind),
			Expected: "an ordinary or a partitioned table",
		}
	}
	rel.Identity = decode.Identity(identity[0])
	key, err := readKey(ctx, conn, rel)
	if err != nil {
		return nil, err
	}
	rows, err := conn.Query(ctx, `
		SELECT attname, atttypid, atttypmod FROM pg_attribute
		WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum`, rel.ID)
	if err != nil {
		return nil, classify("look up the columns of "+rel.String(), err)
	}
	defer rows.Close()
	keyed := false
	for rows.Next() {
		var col decode.Column
		if err := rows.Scan(&col.Name, &col.TypeOID, &col.TypeModifier); err != nil {
			return nil, fmt.Errorf("read the columns of %s: %w", rel, err)
		}
		switch rel.Identity {
		case decode.IdentityFull:
			col.Key = true
		case decode.IdentityDefault, decode.IdentityIndex:
			col.Key = slices.Contains(key, col.Name)
		case decode.IdentityNothing:
		}
		keyed = keyed || col.Key
		rel.Columns = append(rel.Columns, col)
	}
	if err := rows.Err(); err != nil {
		return nil, classify("look up the columns of "+rel.String(), err)
	}
	if !keyed {
		return nil, &decode.Refusal{
			Reason: decode.ReasonIdentity, What: "source table", Where: rel.String(),
			Why:      "it has no usable replica identity, so Postgres would refuse its updates and deletes once it is published",
			Expected: "a primary key, or REPLICA IDENTITY FULL",
			Do: fmt.Sprintf("ALTER TABLE %s.%s REPLICA IDENTITY FULL, or give it a primary key",
				quoteIdentifier(t.Schema), quoteIdentifier(t.Name)),
		}
	}
	return rel, nil
}

func (s *Source) ensurePublication(ctx context.Context, conn *pgx.Conn) error {
	var inserts, updates, deletes, truncates bool
	err := conn.QueryRow(ctx, `SELECT pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication WHERE pubname = $1`,
		s.cfg.Publication).Scan(&inserts, &updates, &deletes, &truncates)
	if errors.Is(err, pgx.ErrNoRows) {
		if !s.cfg.Create {
			return &decode.Refusal{
				Reason: decode.ReasonSetup, What: "publication", Where: s.cfg.Publication, Why: "the database has none of this name",
				Expected: "a publication of the tables in PGSOURCE_TABLES, made before the slot",
				Do:       "set PGSOURCE_CREATE=true, or run: " + s.publicationStatement(),
			}
		}
		if _, err := conn.Exec(ctx, s.publicationStatement()); err != nil {
			return classify(fmt.Sprintf("create publication %q", s.cfg.Publication), err)
		}
		s.madePublication.Store(true)
		s.log.InfoContext(ctx, "publication created", "publication", s.cfg.Publication, "tables", len(s.cfg.Tables))
		return nil
	}
	if err != nil {
		return classify("look up the publication", err)
	}
	if !inserts || !updates || !deletes || !truncates {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "publication", Where: s.cfg.Publication,
			Why:      fmt.Sprintf("it leaves out operations (insert %t, update %t, delete %t, truncate %t)", inserts, updates, deletes, truncates),
			Expected: "all four, or changes are lost without a trace",
			Do:       fmt.Sprintf("ALTER PUBLICATION %s SET (publish = 'insert, update, delete, truncate')", quoteIdentifier(s.cfg.Publication)),
		}
	}
	return s.checkPublished(ctx, conn)
}

// publicationStatement creates the publication. Rows of partitions arrive
// under the name of the table that was configured.
func (s *Source) publicationStatement() string {
	names := make([]string, len(s.cfg.Tables))
	for i, t := range s.cfg.Tables {
		names[i] = quoteIdentifier(t.Schema) + "." + quoteIdentifier(t.Name)
	}
	return fmt.Sprintf("CREATE PUBLICATION %s FOR TABLE %s WITH (publish_via_partition_root = true)",
		quoteIdentifier(s.cfg.Publication), strings.Join(names, ", "))
}

// checkPublished compares the publication with the configured tables. Both
// differences are refused: a table that is not published would be silently
// stale, a published one that is not mapped would have to be thrown away.
func (s *Source) checkPublished(ctx context.Context, conn *pgx.Conn) error {
	rows, err := conn.Query(ctx, `SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = $1`, s.cfg.Publication)
	if err != nil {
		return classify("look up the published tables", err)
	}
	published, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (n tableName, err error) {
		return n, row.Scan(&n.schema, &n.name)
	})
	if err != nil {
		return classify("look up the published tables", err)
	}
	extra := make(map[tableName]bool, len(published))
	for _, name := range published {
		extra[name] = true
	}
	var missing []string
	for _, t := range s.cfg.Tables {
		name := tableName{t.Schema, t.Name}
		if !extra[name] {
			missing = append(missing, quoteIdentifier(t.Schema)+"."+quoteIdentifier(t.Name))
		}
		delete(extra, name)
	}
	if len(missing) > 0 {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "publication", Where: s.cfg.Publication,
			Why:      "it does not publish " + strings.Join(missing, ", "),
			Expected: "every table of PGSOURCE_TABLES (a partitioned one under its own name: publish_via_partition_root)",
			Do:       fmt.Sprintf("ALTER PUBLICATION %s ADD TABLE %s; rows that are in the table already are not part of the stream", quoteIdentifier(s.cfg.Publication), strings.Join(missing, ", ")),
		}
	}
	if len(extra) > 0 {
		var names []string
		for name := range extra {
			names = append(names, quoteIdentifier(name.schema)+"."+quoteIdentifier(name.name))
		}
		sort.Strings(names)
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "publication", Where: s.cfg.Publication,
			Why:      "it also publishes " + strings.Join(names, ", "),
			Expected: "only tables that PGSOURCE_TABLES maps",
			Do:       "add them to PGSOURCE_TABLES, or take them out with ALTER PUBLICATION … DROP TABLE",
		}
	}
	return nil
}

func (s *Source) ensureSlot(ctx context.Context, conn *pgx.Conn, r *ready) error {
	qctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	slot, err := readSlot(qctx, conn, s.cfg.Slot)
	if err != nil {
		return err
	}
	if slot == nil {
		if slot, err = s.createSlot(ctx, conn); err != nil {
			return err
		}
	}
	if err := s.sameSlot(slot); err != nil {
		return err
	}
	r.confirmed = slot.confirmed
	return nil
}

// sameSlot refuses a slot that cannot serve, or that somebody has moved since
// this process last told it a position: what lies between is lost to the
// stream, and nothing else would show it.
func (s *Source) sameSlot(slot *slotState) error {
	if err := slot.usable(s.cfg.Slot); err != nil {
		return err
	}
	told := s.told.Load()
	if s.slotSeen.Load() && slot.confirmed > told {
		return &decode.Refusal{
			Reason: decode.ReasonGap, What: "slot", Where: s.cfg.Slot,
			Why: fmt.Sprintf("it stands at %s, and pgsource has told it no more than %s: somebody advanced it or made it anew, and the changes between are lost to the stream",
				decode.FormatLSN(slot.confirmed), decode.FormatLSN(told)),
			Expected: "a slot that only this pgsource moves", Do: "find out who did it, load the tables again, and restart",
		}
	}
	s.told.Store(max(told, slot.confirmed))
	s.slotSeen.Store(true)
	return nil
}

// createSlot makes the slot, where it was allowed to and never had one.
func (s *Source) createSlot(ctx context.Context, conn *pgx.Conn) (*slotState, error) {
	if s.slotSeen.Load() {
		return nil, s.slotDropped()
	}
	if !s.cfg.Create {
		return nil, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "slot", Where: s.cfg.Slot, Why: "the server has none of this name",
			Expected: "a logical slot of the plug-in pgoutput in this database",
			Do: fmt.Sprintf("set PGSOURCE_CREATE=true, or run: SELECT pg_create_logical_replication_slot(%s, 'pgoutput'); a new slot holds only changes made after it",
				quoteLiteral(s.cfg.Slot)),
		}
	}
	if !s.madePublication.Load() {
		return nil, &decode.Refusal{
			Reason: decode.ReasonGap, What: "slot", Where: s.cfg.Slot,
			Why:      "the publication is there and the slot is not: it was dropped, or this server was promoted without it",
			Expected: "the slot that an earlier start made; a new one does not have what was committed before it",
			Do: fmt.Sprintf("load the tables again and then run: SELECT pg_create_logical_replication_slot(%s, 'pgoutput'); at a first start with a publication of your own, run it as well",
				quoteLiteral(s.cfg.Slot)),
		}
	}
	cctx, cancel := context.WithTimeout(ctx, createSlotTimeout)
	defer cancel()
	if _, err := conn.Exec(cctx, `SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, s.cfg.Slot); err != nil {
		if cctx.Err() != nil && ctx.Err() == nil {
			return nil, fmt.Errorf("create slot %q: it waits for every transaction that was writing, %v were not enough; look for old ones in pg_stat_activity", s.cfg.Slot, createSlotTimeout)
		}
		return nil, classify(fmt.Sprintf("create slot %q", s.cfg.Slot), err)
	}
	slot, err := readSlot(cctx, conn, s.cfg.Slot)
	if err == nil && slot == nil {
		err = fmt.Errorf("create slot %q: it vanished at once", s.cfg.Slot)
	}
	if err != nil {
		return nil, err
	}
	s.log.WarnContext(ctx, "slot created: changes committed before it are not part of the stream", "slot", s.cfg.Slot, "lsn", decode.FormatLSN(slot.confirmed))
	return slot, nil
}

func (s *Source) slotDropped() error {
	return &decode.Refusal{
		Reason: decode.ReasonGap, What: "slot", Where: s.cfg.Slot, Why: "it was dropped while pgsource was running",
		Expected: "the slot that holds the WAL since the last acknowledged position " + decode.FormatLSN(s.told.Load()),
		Do:       "find out who dropped it; a new slot starts at its own creation, so the tables must be loaded again",
	}
}

// slotState is one row of pg_replication_slots.
type slotState struct {
	plugin, database, here string
	temporary              bool
	active                 bool
	status                 string // wal_status, "" where the server gives none
	confirmed              uint64
	current                uint64 // the server's own position
	retained               int64
	safe                   *int64
}

// readSlot gives nil where there is no such slot.
func readSlot(ctx context.Context, conn *pgx.Conn, name string) (*slotState, error) {
	var st slotState
	var confirmed, current string
	err := conn.QueryRow(ctx, `
		SELECT coalesce(plugin, ''), coalesce(database, ''), current_database(), temporary, active, coalesce(wal_status, ''),
		       coalesce(confirmed_flush_lsn, '0/0')::text, at::text, coalesce(pg_wal_lsn_diff(at, restart_lsn), 0)::int8, safe_wal_size
		FROM pg_replication_slots,
		     (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END AS at) AS position
		WHERE slot_name = $1`, name,
	).Scan(&st.plugin, &st.database, &st.here, &st.temporary, &st.active, &st.status, &confirmed, &current, &st.retained, &st.safe)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil //nolint:nilnil // absence is an answer
	}
	if err != nil {
		return nil, classify(fmt.Sprintf("look up slot %q", name), err)
	}
	lsn, err := pglogrepl.ParseLSN(confirmed)
	at, errAt := pglogrepl.ParseLSN(current)
	if err = errors.Join(err, errAt); err != nil {
		return nil, fmt.Errorf("read the position of slot %q: %w", name, err)
	}
	st.confirmed, st.current = uint64(lsn), uint64(at)
	return &st, nil
}

// usable refuses a slot that cannot serve.
func (st *slotState) usable(name string) error {
	refused := func(reason decode.Reason, why, do string) error {
		return &decode.Refusal{
			Reason: reason, What: "slot", Where: name, Why: why,
			Expected: "a permanent logical slot of the plug-in pgoutput in this database", Do: do,
		}
	}
	switch {
	case st.plugin == "":
		return refused(decode.ReasonSetup, "it is a physical slot", "set PGSOURCE_SLOT to another name")
	case st.plugin != "pgoutput":
		return refused(decode.ReasonSetup, fmt.Sprintf("its plug-in is %q", st.plugin), "set PGSOURCE_SLOT to another name")
	case st.database != st.here:
		return refused(decode.ReasonSetup, fmt.Sprintf("it belongs to database %q, this is %q", st.database, st.here), "correct PGSOURCE_DSN or PGSOURCE_SLOT")
	case st.temporary:
		return refused(decode.ReasonSetup, "it is temporary", "set PGSOURCE_SLOT to another name")
	case st.status == "lost":
		return refused(decode.ReasonGap, fmt.Sprintf("the server has removed WAL that it needs (wal_status lost); changes after %s are lost to it", decode.FormatLSN(st.confirmed)),
			fmt.Sprintf("load the tables again, then: SELECT pg_drop_replication_slot(%s); and start with PGSOURCE_CREATE=true; raise max_slot_wal_keep_size", quoteLiteral(name)))
	}
	return nil
}

// CheckServer is a preflight: the server answers and can replicate.
func (s *Source) CheckServer(ctx context.Context) error {
	return s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error { return s.checkServer(ctx, conn, &ready{}) })
}

// CheckTables is a preflight: every source table fits its Feldera table.
func (s *Source) CheckTables(ctx context.Context) error {
	targets, err := s.describeDestination(ctx)
	if err != nil {
		return err
	}
	return s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return s.checkTables(ctx, conn, &ready{tables: targets})
	})
}

// CheckPublication is a preflight: the publication exists and publishes
// exactly what is mapped, or may be created. It creates nothing.
func (s *Source) CheckPublication(ctx context.Context) error {
	return s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		if first, err := s.firstStart(ctx, conn); first || err != nil {
			return err
		}
		return s.withoutCreating().ensurePublication(ctx, conn)
	})
}

// CheckSlotState is a preflight: the slot exists and can serve, or may be
// created. It creates nothing.
func (s *Source) CheckSlotState(ctx context.Context) error {
	return s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		if first, err := s.firstStart(ctx, conn); first || err != nil {
			return err
		}
		return s.withoutCreating().ensureSlot(ctx, conn, &ready{})
	})
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

// CheckDestination is a preflight: the pipeline answers and has the tables.
func (s *Source) CheckDestination(ctx context.Context) error {
	_, err := s.describeDestination(ctx)
	return err
}

func (s *Source) withoutCreating() *Source {
	looking := &Source{cfg: s.cfg, log: s.log}
	looking.cfg.Create = false
	return looking
}

func (s *Source) look(ctx context.Context, fn func(context.Context, *pgx.Conn) error) error {
	conn, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	qctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	return fn(qctx, conn)
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
		var connectErr *pgconn.ConnectError
		if errors.As(err, &connectErr) {
			// Its text names host, user and database, never the password.
			return fmt.Errorf("%s: %w", operation, err)
		}
		return fmt.Errorf("%s: %w", operation, err)
	}
	r := &decode.Refusal{Reason: decode.ReasonSetup, What: operation, Why: fmt.Sprintf("%s (SQLSTATE %s)", pgErr.Message, pgErr.Code)}
	switch pgErr.Code {
	case "28P01", "28000":
		r.Err = errLogin
		r.Expected, r.Do = "a user and password that the server takes", "correct PGSOURCE_DSN (or the file of PGSOURCE_DSN_FILE), or the server's pg_hba.conf"
	case "3D000":
		r.Expected, r.Do = "a database that exists", "correct the database's name in PGSOURCE_DSN"
	case "42501":
		r.Expected, r.Do = "a role with REPLICATION that may do this", "grant what is missing, or let an owner create the publication and the slot beforehand"
	case "42704":
		if strings.HasPrefix(pgErr.Message, "replication slot ") {
			r.Reason, r.Expected = decode.ReasonGap, "the slot that holds the WAL since the last acknowledged position"
			r.Do = "find out who dropped it; a new slot starts at its own creation, so the tables must be loaded again"
			break
		}
		r.Expected = "the publication to exist at every position of the slot"
		r.Do = "a publication that is made after the slot does not help the slot's earlier changes: drop the slot, make the publication, make the slot again and load the tables"
	case "53400":
		r.Do = "raise max_replication_slots, or drop a slot that nobody uses"
	case "55006":
		return fmt.Errorf("%s: another process uses the slot, perhaps another pgsource: %s", operation, pgErr.Message)
	case "55000":
		if strings.HasPrefix(pgErr.Message, "cannot read from logical replication slot ") {
			r.Reason, r.Why = decode.ReasonGap, "the server has removed WAL that the slot needs: "+r.Why
			r.Do = "load the tables again with a new slot; raise max_slot_wal_keep_size"
			break
		}
		r.Do = "look at the slot in pg_replication_slots (wal_status, plugin, database)"
	case "58P01":
		r.Reason, r.Do = decode.ReasonGap, "the server has removed WAL that the slot needs: load the tables again with a new slot"
	default:
		// Syntax, names, types, features, encodings: what was asked cannot be
		// done, now or later.
		if class := pgErr.Code[:2]; class != "42" && class != "22" && class != "0A" && class != "2B" {
			return fmt.Errorf("%s: %w", operation, err)
		}
	}
	return r
}
