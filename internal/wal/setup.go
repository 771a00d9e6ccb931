package wal

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/sabotage"
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
	// identity is the server's; switchPoint is where the timeline of the
	// bookmark ended, where that is another one.
	identity    identity
	node        node
	switchPoint LSN
	// slotMade: the slot was made by prepare, so nothing was read from it
	// before.
	slotMade bool
	// schema is the pipeline's.
	schema *feldera.Schema
	// shapes are the mapped tables as the catalogue had them when the server
	// stood at the position at, or before.
	shapes map[tableName]*decode.Relation
	at     uint64
	// trees are the partitions of those that have any.
	trees map[tableName]*tree
	// baselines are what rows depend on beside the stream.
	baselines map[tableName]*baseline
	// looking is held by whoever compares them with the catalogue and changes them.
	looking chan struct{}
	// statusEvery is how often the server must hear from us, senderTimeout the
	// wal_sender_timeout to ask for, 0 for the server's own.
	statusEvery   time.Duration
	senderTimeout time.Duration
	// skip is the end of the transaction to pass over, 0 for none.
	skip   uint64
	tables map[tableName]*feldera.Table
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
	r := &ready{looking: make(chan struct{}, 1)}
	targets, err := s.describeDestination(ctx, r)
	if err != nil {
		s.reportFailure(CheckDestination, err)
		return nil, err
	}
	r.tables = targets
	s.cfg.Report(Status{Check: CheckDestination, OK: true, Message: "the pipeline has every table"})

	conn, err := s.connectAnywhere(ctx)
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

func (s *Source) reportFailure(check string, err error) { s.cfg.Report(failureStatus(check, err)) }

func failureStatus(check string, err error) Status {
	st := Status{Check: check, Message: err.Error()}
	var refused *decode.Refusal
	var hinted interface {
		error
		Hint() string
	}
	switch {
	case errors.As(err, &refused):
		st.Blocking, st.Hint = true, refused.Do
	case errors.As(err, &hinted):
		st.Hint = hinted.Hint()
	}
	return st
}

// describeDestination finds the Feldera table of every source table.
func (s *Source) describeDestination(ctx context.Context, r *ready) (map[tableName]*feldera.Table, error) {
	targets, err := s.findTargets(ctx, r)
	if err != nil {
		return nil, err
	}
	if err := s.checkProgress(ctx, r.schema, targets); err != nil {
		return nil, err
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

// findTargets finds the tables, and what else of the pipeline's schema.
func (s *Source) findTargets(ctx context.Context, r *ready) (map[tableName]*feldera.Table, error) {
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
	r.schema = schema
	return targets, nil
}

// prepareSource checks the server and the tables, then sees to the
// publication and the slot, in this order: a slot decodes with the catalogue
// of the moment of each change, so a publication made after the slot is not
// there for the slot's first changes, and can never be added to them.
func (s *Source) prepareSource(ctx context.Context, conn *pgx.Conn, r *ready) error {
	qctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	if err := s.checkServer(qctx, conn, r); err != nil {
		return s.unlessElsewhere(qctx, conn, err)
	}
	st, err := s.keeper.get(qctx)
	if err != nil {
		return err
	}
	if err := s.fence(qctx, st, r); err != nil {
		return err
	}
	if err := s.settle(qctx, conn, r); err != nil {
		return err
	}
	if err := s.checkTables(qctx, conn, r); err != nil {
		return s.leftOutBefore(qctx, conn, r, err, true)
	}
	// Whether a table is empty can take long to find out, where it was not.
	if err := s.checkBeforeMaking(ctx, conn, st, r); err != nil {
		return err
	}
	qctx, cancelRest := context.WithTimeout(ctx, queryTimeout)
	defer cancelRest()
	if err := s.ensurePublication(qctx, conn); err != nil {
		return s.leftOutBefore(qctx, conn, r, err, false)
	}
	if err := s.ensureSlot(ctx, conn, r); err != nil {
		return err
	}
	lctx, done := context.WithTimeout(ctx, queryTimeout) // a slot can take longer than qctx
	defer done()
	if r.baselines, err = s.readBaselines(lctx, conn, r); err != nil {
		return err
	}
	for name, t := range r.trees {
		r.baselines[name].parts = t.parts // no other goroutine has it yet
	}
	if err := s.remember(ctx, r); err != nil {
		return err
	}
	if err := s.planCopies(ctx, conn, r); err != nil {
		return err
	}
	r.skip, err = s.skipping(ctx)
	return err
}

// checkTables holds every configured table against its Feldera table, as far
// as the catalogue tells: identity, columns, types.
func (s *Source) checkTables(ctx context.Context, conn *pgx.Conn, r *ready) error {
	for _, t := range s.cfg.Tables {
		rel, err := catalogueRelation(ctx, conn, s.cfg.Publication, t)
		if err != nil {
			return err
		}
		types, err := readTypes(ctx, conn, tableTypes(rel.ID))
		if err != nil {
			return err
		}
		s.types.add(types)
		s.types.resolve(rel)
		if err := s.checkFilter(ctx, conn, rel); err != nil {
			return err
		}
		if err := s.leaveUnpublished(ctx, conn, rel); err != nil {
			return err
		}
		if r.oids == nil {
			r.oids, r.shapes = make(map[tableName]uint32), make(map[tableName]*decode.Relation)
		}
		r.oids[nameOf(rel)], r.shapes[nameOf(rel)] = rel.ID, rel
		if err := checkIdentity(rel, r.tables[nameOf(rel)]); err != nil {
			return err
		}
		if err := s.checkPartitions(ctx, conn, r, rel); err != nil {
			return err
		}
		if err := checkUnique(ctx, conn, rel, r.tables[nameOf(rel)].KeyNames()); err != nil {
			return err
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

// leaveUnpublished takes the columns out of rel that the publication's column
// list does not name: the stream has a table without them. A list without the
// whole key is refused: the source would refuse its updates and deletes.
func (s *Source) leaveUnpublished(ctx context.Context, conn *pgx.Conn, rel *decode.Relation) error {
	published, err := readPublished(ctx, conn, s.cfg.Publication, Table{Schema: rel.Schema, Name: rel.Name})
	if err != nil || published == nil {
		return err
	}
	kept := rel.Columns[:0]
	for _, c := range rel.Columns {
		switch {
		case slices.Contains(published, c.Name):
			kept = append(kept, c)
		case c.Key:
			return &decode.Refusal{
				Reason: decode.ReasonIdentity, What: "publication", Where: s.cfg.Publication,
				Why:      fmt.Sprintf("its column list for %s leaves out %q of the replica identity, so Postgres refuses the table's updates and deletes", rel, c.Name),
				Expected: "a column list with every column of the replica identity",
				Do:       fmt.Sprintf("ALTER PUBLICATION %s SET TABLE … with %s in the list of %s", quoteIdentifier(s.cfg.Publication), quoteIdentifier(c.Name), rel),
			}
		}
	}
	rel.Columns = kept
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
		case !generated:
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
// received is how far the stream had come before.
func (s *Source) checkUnchanged(ctx context.Context, conn *pgx.Conn, r *ready, received uint64) error {
	if err := s.withoutCreating().ensurePublication(ctx, conn); err != nil {
		return s.differs(ctx, asGap(err), s.lacking(ctx, conn, false)...)
	}
	for name, oid := range r.oids {
		var now uint32
		var identity string
		err := conn.QueryRow(ctx, `SELECT c.oid, c.relreplident::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE n.nspname = $1 AND c.relname = $2`, name.schema, name.name).Scan(&now, &identity)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return classify("look up table "+name.String(), err)
		}
		if now != oid {
			return s.madeAnewUnderway(ctx, name, &decode.Refusal{
				Reason: decode.ReasonGap, What: "source table", Where: name.String(), Why: "it was dropped, renamed or made anew while pgsource was streaming",
				Expected: "the table that it started with",
				Do:       "changes made to the new table before it is published are lost to the stream: see that the publication has it, start pgsource, then run: pgsource resync " + name.schema + "." + name.name,
			})
		}
		if t := r.trees[name]; t != nil {
			if err := s.partitionsUnchanged(ctx, conn, name, oid, t, received); err != nil {
				return err
			}
		}
		if shape := r.shapes[name]; shape != nil {
			current := *shape
			current.Identity = decode.Identity(identity[0])
			if err := checkUnique(ctx, conn, &current, r.tables[name].KeyNames()); err != nil {
				return s.differs(ctx, asGap(err), name)
			}
		}
	}
	return s.rowsUnchanged(ctx, conn, r)
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

// catalogueRelation describes a table as a Relation message would, but for a
// column list. Generated columns are part of it where the publication carries
// them, which it can from PostgreSQL 18 on; "" is for none.
func catalogueRelation(ctx context.Context, conn *pgx.Conn, publication string, t Table) (*decode.Relation, error) {
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
	published, err := readPublished(ctx, conn, publication, t)
	if err != nil {
		return nil, err
	}
	rows, err := conn.Query(ctx, `
		SELECT attname, atttypid, atttypmod FROM pg_attribute
		WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped AND (attgenerated = '' OR attname = ANY ($2)) ORDER BY attnum`, rel.ID, published)
	if err != nil {
		return nil, classify("look up the columns of "+rel.String(), err)
	}
	defer rows.Close()
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
		rel.Columns = append(rel.Columns, col)
	}
	if err := rows.Err(); err != nil {
		return nil, classify("look up the columns of "+rel.String(), err)
	}
	return rel, nil
}

func (s *Source) ensurePublication(ctx context.Context, conn *pgx.Conn) error {
	var inserts, updates, deletes, truncates bool
	err := conn.QueryRow(ctx, `SELECT pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication WHERE pubname = $1`,
		s.cfg.Publication).Scan(&inserts, &updates, &deletes, &truncates)
	if errors.Is(err, pgx.ErrNoRows) {
		list, err := withoutIdentity(ctx, conn, s.cfg.Tables)
		if err != nil {
			return err
		}
		if !s.cfg.Create {
			do := "set PGSOURCE_CREATE=true, or run: " + s.publicationStatement()
			if len(list) > 0 {
				do = refusedWrites(list) + "; then " + do
			}
			return &decode.Refusal{
				Reason: decode.ReasonSetup, What: "publication", Where: s.cfg.Publication, Why: "the database has none of this name",
				Expected: "a publication of the tables in PGSOURCE_TABLES, made before the slot", Do: do,
			}
		}
		if _, err := conn.Exec(ctx, s.publicationStatement()); err != nil {
			return classify(fmt.Sprintf("create publication %q", s.cfg.Publication), err)
		}
		s.madePublication.Store(true)
		s.log.InfoContext(ctx, "publication created", "publication", s.cfg.Publication, "tables", len(s.cfg.Tables))
		if len(list) > 0 {
			s.log.WarnContext(ctx, "tables are published that have no usable replica identity: Postgres refuses every UPDATE and DELETE of them from now on", "tables", namesOf(list))
		}
		return nil
	}
	if err != nil {
		return classify("look up the publication", err)
	}
	findings := s.checkPublished(ctx, conn)
	if !inserts || !updates || !deletes || !truncates {
		do, err := publishAdvice(ctx, conn, s.cfg.Tables,
			fmt.Sprintf("ALTER PUBLICATION %s SET (publish = 'insert, update, delete, truncate')", quoteIdentifier(s.cfg.Publication)))
		if err != nil {
			return err
		}
		findings = append([]error{&decode.Refusal{
			Reason: decode.ReasonSetup, What: "publication", Where: s.cfg.Publication,
			Why:      fmt.Sprintf("it leaves out operations (insert %t, update %t, delete %t, truncate %t)", inserts, updates, deletes, truncates),
			Expected: "all four, or changes are lost without a trace", Do: do,
		}}, findings...)
	}
	return errors.Join(findings...)
}

// only names a table in a statement about a publication. Without ONLY that
// means the tables that inherit from it too, each under its own name. Partitions
// are part of their root all the same.
func only(name tableName) string { return "ONLY " + name.String() }

// publicationStatement creates the publication. Rows of partitions arrive
// under the name of the table that was configured.
func (s *Source) publicationStatement() string {
	names := make([]string, len(s.cfg.Tables))
	for i, t := range s.cfg.Tables {
		names[i] = only(tableName{t.Schema, t.Name})
	}
	return fmt.Sprintf("CREATE PUBLICATION %s FOR TABLE %s WITH (publish_via_partition_root = true)",
		quoteIdentifier(s.cfg.Publication), strings.Join(names, ", "))
}

// checkPublished compares the publication with the configured tables. Both
// differences are refused: a table that is not published would be silently
// stale, a published one that is not mapped would have to be thrown away.
func (s *Source) checkPublished(ctx context.Context, conn *pgx.Conn) []error {
	absent, extra, err := s.comparePublished(ctx, conn)
	if err != nil {
		return []error{err}
	}
	missing, add := make([]string, len(absent)), make([]string, len(absent))
	for i, t := range absent {
		name := tableName{t.Schema, t.Name}
		missing[i], add[i] = name.String(), only(name)
	}
	var findings []error
	if len(missing) > 0 {
		do, err := publishAdvice(ctx, conn, absent,
			fmt.Sprintf("ALTER PUBLICATION %s ADD TABLE %s", quoteIdentifier(s.cfg.Publication), strings.Join(add, ", ")))
		if err != nil {
			return []error{err}
		}
		findings = append(findings, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "publication", Where: s.cfg.Publication,
			Why:      "it does not publish " + strings.Join(missing, ", "),
			Expected: "every table of PGSOURCE_TABLES (a partitioned one under its own name: publish_via_partition_root)",
			Do:       do + "; rows that are in the table already are copied beside the stream, as far as PGSOURCE_SNAPSHOT says",
		})
	}
	if len(extra) > 0 {
		slices.SortFunc(extra, func(x, y tableName) int { return strings.Compare(x.String(), y.String()) })
		names, drop := make([]string, len(extra)), make([]string, len(extra))
		for i, name := range extra {
			names[i], drop[i] = name.String(), only(name)
		}
		findings = append(findings, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "publication", Where: s.cfg.Publication,
			Why:      "it also publishes " + strings.Join(names, ", "),
			Expected: "only tables that PGSOURCE_TABLES maps",
			Do:       fmt.Sprintf("add them to PGSOURCE_TABLES (where it has their schema.*: make their Feldera tables, and restart), or ALTER PUBLICATION %s DROP TABLE %s", quoteIdentifier(s.cfg.Publication), strings.Join(drop, ", ")),
		})
	}
	return findings
}

// comparePublished gives the mapped tables that the publication lacks, and the
// published ones that are not mapped.
func (s *Source) comparePublished(ctx context.Context, conn *pgx.Conn) (absent []Table, extra []tableName, err error) {
	rows, err := conn.Query(ctx, `SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = $1`, s.cfg.Publication)
	if err != nil {
		return nil, nil, classify("look up the published tables", err)
	}
	published, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (n tableName, err error) {
		return n, row.Scan(&n.schema, &n.name)
	})
	if err != nil {
		return nil, nil, classify("look up the published tables", err)
	}
	rest := make(map[tableName]bool, len(published))
	for _, name := range published {
		rest[name] = true
	}
	for _, t := range s.cfg.Tables {
		name := tableName{t.Schema, t.Name}
		if !rest[name] {
			absent = append(absent, t)
		}
		delete(rest, name)
	}
	return absent, slices.Collect(maps.Keys(rest)), nil
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
		r.slotMade = true
	}
	if err := slot.usable(s.cfg.Slot); err != nil {
		return err
	}
	if slot.active {
		// Whoever waits for a slot has not read from it: what its present user
		// confirms meanwhile is no gap.
		return s.occupied(ctx)
	}
	if err := s.sameSlot(slot); err != nil {
		return err
	}
	r.confirmed, r.at = slot.confirmed, slot.current
	return nil
}

// sameSlot refuses a slot that cannot serve, or that somebody has moved since
// this process last told it a position: what lies between is lost to the
// stream, and nothing else would show it.
func (s *Source) sameSlot(slot *slotState) error {
	if err := slot.usable(s.cfg.Slot); err != nil {
		return err
	}
	if s.slotSeen.Load() && !sabotage.On(sabotage.TrustSlot) {
		if err := s.notMoved(slot.confirmed); err != nil {
			return err
		}
	}
	s.tells(slot.confirmed)
	s.slotSeen.Store(true)
	return nil
}

// tells raises told: a look and the stream do so at once.
func (s *Source) tells(lsn uint64) {
	for {
		was := s.told.Load()
		if lsn <= was || s.told.CompareAndSwap(was, lsn) {
			return
		}
	}
}

// notMoved refuses a position of a slot that this process has seen before where
// it is above all that it was told.
func (s *Source) notMoved(confirmed uint64) error {
	told := s.told.Load()
	if confirmed <= told {
		return nil
	}
	return &decode.Refusal{
		Reason: decode.ReasonGap, What: "slot", Where: s.cfg.Slot,
		Why: fmt.Sprintf("it stands at %s, and pgsource has told it no more than %s: somebody advanced it or made it anew, and the changes between (%d bytes of WAL) are lost to the stream",
			decode.FormatLSN(confirmed), decode.FormatLSN(told), confirmed-told),
		Expected: "a slot that only this pgsource moves",
		Do:       "find out who did it; then " + s.startOver(),
	}
}

// slotDropped is for a slot that this pgsource knows and the server does not
// have. It is never made anew: that would hide what is lost.
func (s *Source) slotDropped() error {
	told := decode.FormatLSN(s.told.Load())
	return &decode.Refusal{
		Reason: decode.ReasonGap, What: "slot", Where: s.cfg.Slot,
		Why:      "it was dropped, or this server was promoted without it: every change after " + told + " is lost to the stream",
		Expected: "the slot that holds the WAL since the last acknowledged position " + told,
		Do: fmt.Sprintf("find out who dropped it; run: SELECT pg_create_logical_replication_slot(%s, 'pgoutput'); then %s",
			quoteLiteral(s.cfg.Slot), s.startOver()),
	}
}

// wayBack says how to go on from the slot's present position, and to bring the
// tables to what the source has.
const wayBack = "run: pgsource state reset -yes, start pgsource, then run: pgsource resync -all"

// startOver is wayBack for this source, which may keep no state.
func (s *Source) startOver() string {
	if _, none := s.cfg.State.(noStore); none {
		return "load the tables again by other means (pgsource resync does it where PGSOURCE_STATE keeps a state), and restart"
	}
	return wayBack
}

// CheckTables is a preflight: every source table fits its Feldera table.
func (s *Source) CheckTables(ctx context.Context) error {
	targets, err := s.describeDestination(ctx, &ready{})
	if err != nil {
		return err
	}
	return s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return s.checkTables(ctx, conn, &ready{tables: targets})
	})
}

// CheckDestination is a preflight: the pipeline answers and has the tables.
func (s *Source) CheckDestination(ctx context.Context) error {
	_, err := s.describeDestination(ctx, &ready{})
	return err
}

// CheckCopies is a preflight: the existing rows that the next start would copy
// can be copied. It changes nothing.
func (s *Source) CheckCopies(ctx context.Context) (string, error) {
	const later = "not looked at: the checks \"feldera\" and \"tables\" come first"
	targets, err := s.findTargets(ctx, &ready{})
	if err != nil {
		return later, nil //nolint:nilerr // the check of the destination says it
	}
	st, err := s.cfg.State.Load(ctx)
	if err != nil {
		return "not looked at: the check \"state\" comes first", nil //nolint:nilerr // it says it
	}
	said := ""
	err = s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		r := &ready{tables: targets}
		if err := s.checkTables(ctx, conn, r); err != nil {
			said = later
			return nil //nolint:nilerr // the check of the tables says it
		}
		first, err := s.firstStart(ctx, conn)
		if err != nil {
			return err
		}
		said, err = s.checkPlanned(ctx, conn, st, r, first)
		return err
	})
	return said, err
}

func (s *Source) withoutCreating() *Source {
	looking := &Source{cfg: s.cfg, log: s.log, tag: s.tag}
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
