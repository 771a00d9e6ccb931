package wal

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/sabotage"
)

const (
	// copyStatementTimeout bounds each statement of a read at the server,
	// copyLockTimeout the wait for its lock: whoever holds it holds up nobody
	// else meanwhile, but copyIdleTimeout bounds how long a pgsource that hangs
	// could keep the table from being truncated or altered.
	copyStatementTimeout = 30 * time.Second
	copyLockTimeout      = 5 * time.Second
	copyIdleTimeout      = 30 * time.Second
	// maxChunkRows bounds the rows of one chunk, maxChunkKeys the keys of one.
	maxChunkRows = 50_000
	maxChunkKeys = 500
	// firstFetch is how many rows are asked for before it is known how wide and
	// how slow they are.
	firstFetch = 50
	maxFetch   = 5_000
	// maxShapeFiles bounds the partitions whose files are remembered one by one.
	maxShapeFiles = 256
)

// chunk is what one read gave.
type chunk struct {
	job     *copyJob
	rel     *decode.Relation
	encoder *feldera.Encoder
	columns []string
	view    view
	// through is the server's position behind everything that the read sees.
	through uint64
	rows    []copiedRow
	bytes   int // of them in memory, and of their texts
	text    int
	// after is the cursor behind the last row, done the number of keys that were
	// looked at. last: there is nothing behind them.
	after []string
	done  int
	last  bool
	shape *tableShape
	// tuples and unknown say how many rows the table may have: those that the
	// server has counted, and the bytes of files in which it has not.
	tuples, unknown float64
	took            time.Duration

	// The deliverer's, guarded by its mu: requests whose evidence is to come, and
	// whether all rows have gone out. done is closed when both say so.
	sending int
	sentAll bool
	proven  *once
}

// reader reads chunks over a connection that it keeps.
type chunkReader struct {
	a    *attempt
	conn *pgx.Conn
	// tracked: merge knows what was delivered since; before that moment, which
	// the server's clock calls since, transactions had numbers below bound.
	tracked bool
	since   time.Time
	bound   uint64
	settled bool // none of those that were running then is
	// innocent are transactions of that time that have been seen to go on
	// working after it.
	innocent map[uint64]bool
	// plan is how the table of the last chunk is read, as long as the catalogue
	// has print for it.
	plan  *readPlan
	print string
}

// readPlan is how a table is read.
type readPlan struct {
	table   tableName
	rel     *decode.Relation
	encoder *feldera.Encoder
	columns []string
	// key are the columns of the index that chunks are read along, casts their
	// types; filter is the publication's condition for rows, "" for none.
	key, casts []string
	filter     string
	print      string // of the columns, the key and the filter
}

func (c *chunkReader) close(ctx context.Context) {
	if c.conn != nil {
		_ = c.conn.Close(context.WithoutCancel(ctx))
	}
	c.conn = nil
}

// errRestart: the table is another one than the chunks before were read from.
var errRestart = errors.New("the table was rewritten or altered since the last chunk")

// waiting is why a read has to wait for the source. It is no fault.
type waiting struct{ why, do string }

func (w *waiting) Error() string { return w.why }

// read reads one chunk of a job into the merge's window. The transaction at the
// source is over when it returns. The error is errReadAgain, errRestart,
// *waiting, a *decode.Refusal, or an outage.
//
//	open the window → BEGIN → LOCK TABLE → the snapshot and the position → rows
//
// The lock comes before the snapshot, since TRUNCATE and an ALTER that rewrites
// the table are not bound to snapshots: the read would find the new file with
// the old snapshot, and take the table for empty.
func (c *chunkReader) read(ctx context.Context, job *copyJob) (*chunk, error) {
	began := time.Now()
	if err := c.connect(ctx); err != nil {
		return nil, err
	}
	if !c.tracked {
		if err := c.track(ctx); err != nil {
			return nil, err
		}
	}
	m := c.a.merge
	m.open(c.a.ready.oids[job.table()])
	ch, err := c.inTransaction(ctx, job)
	if err == nil {
		crash.Here(crash.PgCopyRead)
		c.a.chunk.Store(ch) // before rows can be due
		err = m.fill(ch.columns, ch.rows, ch.through)
	}
	if err != nil {
		m.end()
		if errors.Is(err, errForgot) {
			c.tracked = false
		}
		return nil, err
	}
	ch.took = time.Since(began)
	return ch, nil
}

func (c *chunkReader) connect(ctx context.Context) error {
	if c.conn != nil && !c.conn.IsClosed() {
		return nil
	}
	conn, err := c.a.s.connect(ctx)
	if err != nil {
		return err
	}
	c.conn = conn
	return nil
}

// track begins to remember what the deliverer delivers, and then asks the
// server for the time and the next transaction's number: whatever was delivered
// before that is not remembered was committed before that time and has a lower
// number.
func (c *chunkReader) track(ctx context.Context) error {
	c.a.merge.track()
	bound, err := nextXID(ctx, c.conn)
	if err != nil {
		return err
	}
	if err := c.conn.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&c.since); err != nil {
		return classify("ask for the server's time", err)
	}
	c.tracked, c.bound, c.settled, c.innocent = true, bound, false, make(map[uint64]bool)
	return nil
}

func (c *chunkReader) inTransaction(ctx context.Context, job *copyJob) (ch *chunk, err error) {
	ctx, cancel := context.WithTimeout(ctx, 4*copyStatementTimeout)
	defer cancel()
	defer func() {
		end := "COMMIT"
		if err != nil {
			end = "ROLLBACK"
		}
		if c.conn == nil {
			return
		}
		if _, endErr := c.conn.Exec(ctx, end); endErr != nil {
			c.close(ctx) // whatever it holds ends with it
		}
	}()
	// A sort where none is wanted costs so much, in the planner's numbers, that
	// the server compiles the statement: for the small ones that have to sort
	// (catalogue, keys), that takes a thousand times as long as they do.
	partitioned := c.a.ready.trees[job.table()] != nil
	from := job.table().String()
	if !partitioned {
		from = "ONLY " + from // what inherits from it is published under its own name
	}
	lock := "LOCK TABLE " + from + " IN ACCESS SHARE MODE"
	if sabotage.On(sabotage.CopyLocksLate) {
		lock = "SELECT; " + lock
	}
	_, err = c.conn.Exec(ctx, fmt.Sprintf(`BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY;
		SET LOCAL statement_timeout = %d; SET LOCAL lock_timeout = %d; SET LOCAL idle_in_transaction_session_timeout = %d;
		SET LOCAL row_security = off; SET LOCAL enable_sort = off; SET LOCAL enable_bitmapscan = off; SET LOCAL jit = off;
		%s`,
		copyStatementTimeout.Milliseconds(), copyLockTimeout.Milliseconds(), copyIdleTimeout.Milliseconds(), lock), pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		return nil, copyFault("lock table "+job.table().String(), err)
	}
	if err := pinTransaction(ctx, c.conn); err != nil {
		return nil, err
	}
	ch = &chunk{job: job, proven: newOnce()}
	if err := c.fence(ctx, ch); err != nil {
		return nil, err
	}
	if err := c.describe(ctx, ch); err != nil {
		return nil, err
	}
	if job.Keys != nil {
		return ch, c.readKeys(ctx, ch, from)
	}
	return ch, c.readRange(ctx, ch, from)
}

// copyFault words an error of a read.
func copyFault(what string, err error) error {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch pgErr.Code {
		case "55P03":
			return &waiting{why: fmt.Sprintf("%s: somebody holds a lock on it (%s)", what, pgErr.Message), do: "look into pg_locks for who does; a commit that waits for a synchronous standby keeps its locks"}
		case "57014":
			return &outage{what: what, why: fmt.Sprintf("it took longer than %v", copyStatementTimeout), do: "look at the server's load, and whether the primary key's index is sound", err: err}
		case "42501":
			return &decode.Refusal{
				Reason: decode.ReasonSetup, What: what, Why: pgErr.Message, Expected: "a role that may read every row of the table",
				Do: "GRANT SELECT on it to the role of PGSOURCE_DSN; where row security holds, give the role BYPASSRLS; or set PGSOURCE_SNAPSHOT=never", Err: err,
			}
		}
	}
	return classify(what, err)
}

// fence takes the snapshot of the read and lets the merge judge it.
func (c *chunkReader) fence(ctx context.Context, ch *chunk) error {
	var seen, at, walFile string
	var block, segment uint64
	err := c.conn.QueryRow(ctx, `
		SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text, pg_walfile_name(pg_current_wal_insert_lsn()),
		       current_setting('wal_block_size')::int8, pg_size_bytes(current_setting('wal_segment_size'))`).Scan(&seen, &at, &walFile, &block, &segment)
	if err != nil {
		return copyFault("take a snapshot", err)
	}
	if ch.view, err = parseView(seen); err != nil {
		return err
	}
	var through LSN
	if err := through.UnmarshalText([]byte(at)); err != nil {
		return fmt.Errorf("read the server's position: %w", err)
	}
	ch.through = withoutHeader(uint64(through), block, segment)
	if timeline := fmt.Sprintf("%08X", c.a.ready.identity.timeline); !strings.HasPrefix(walFile, timeline) {
		return &outage{what: "take a snapshot", why: "the connection goes to a server of another timeline than the stream's", soon: true}
	}
	if ch.job.Settle > 0 && ch.view.xmin < ch.job.Settle && !sabotage.On(sabotage.CopySettlesAtOnce) {
		return c.unsettled(ctx)
	}
	if err := c.a.merge.fence(ch.view); err != nil {
		return err
	}
	if c.settled || sabotage.On(sabotage.CopySuspectsNobody) {
		return nil
	}
	return c.suspects(ctx, ch)
}

// withoutHeader gives the end of the last record for the position of the next
// one: at the beginning of a page the two differ by the page's header, and the
// stream does not come past the former until something else is written.
func withoutHeader(at, block, segment uint64) uint64 {
	const short, long = 24, 40 // SizeOfXLogShortPHD, SizeOfXLogLongPHD
	switch {
	case segment > 0 && at%segment == long:
		return at - long
	case block > 0 && at%block == short:
		return at - short
	}
	return at
}

// unsettled names what a first read waits for.
func (c *chunkReader) unsettled(ctx context.Context) error {
	why := "transactions that were writing when the table was published have not ended"
	if names, err := c.a.s.slotBlockers(ctx); err == nil && names != "" {
		why += ": " + names
	}
	return &waiting{why: why, do: "commit or end them: the stream may lack what they wrote to the table before it was published"}
}

// suspects looks at transactions which the read does not see, which this
// process has not delivered, and which began before it remembers. Each of them
// can be one that was delivered before, by the process before, and is not
// visible yet: then the rows would put back what was before it. It is cleared
// when it is seen to have gone on after that time, since it was not committed
// then.
func (c *chunkReader) suspects(ctx context.Context, ch *chunk) error {
	if ch.view.xmin >= c.bound {
		c.settled = true
		return nil
	}
	var list []string
	add := func(xid uint64) {
		if xid < c.bound && !c.innocent[xid] && !c.a.merge.received(&ch.view, xid) && len(list) < maxRunning {
			list = append(list, fmt.Sprint(xid))
		}
	}
	for _, xid := range ch.view.running {
		add(xid)
	}
	for xid := ch.view.xmax; xid < c.bound; xid++ {
		add(xid)
	}
	if len(list) == 0 {
		return nil
	}
	rows, err := c.conn.Query(ctx, `
		WITH suspect AS (SELECT x::xid8 AS xid, (x::numeric % 4294967296)::text::xid AS short FROM unnest($1::text[]) AS x),
		     busy AS (SELECT backend_xid, state IS NULL OR state = 'disabled' OR state IN ('active', 'fastpath function call') AND query_start <= $2::timestamptz AS busy
		              FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND datid IS NOT NULL)
		SELECT s.xid::text, coalesce((SELECT NOT b.busy FROM busy b WHERE b.backend_xid = s.short),
		         EXISTS (SELECT FROM pg_prepared_xacts p WHERE p.transaction = s.short) AND NOT EXISTS (SELECT FROM busy b WHERE b.busy))
		FROM suspect s`, "{"+strings.Join(list, ",")+"}", c.since)
	if err != nil {
		return copyFault("look for transactions whose commit is not visible", err)
	}
	type verdict struct {
		xid   string
		clear bool
	}
	verdicts, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (v verdict, err error) { return v, row.Scan(&v.xid, &v.clear) })
	if err != nil {
		return copyFault("look for transactions whose commit is not visible", err)
	}
	var held []string
	for _, v := range verdicts {
		if !v.clear {
			held = append(held, v.xid)
			continue
		}
		var xid uint64
		if _, err := fmt.Sscan(v.xid, &xid); err == nil {
			c.innocent[xid] = true
		}
	}
	if len(held) == 0 {
		return nil
	}
	slices.Sort(held)
	return &waiting{
		why: fmt.Sprintf("transactions %s may have been delivered by the process before and are not visible yet", strings.Join(held[:min(len(held), maxBlockers)], ", ")),
		do:  "it ends with them; a commit can be held by a synchronous standby that is away. GRANT pg_read_all_stats lets pgsource tell apart those that only run",
	}
}

// describe finds out how the table is read, as of the read. What the catalogue
// has for it is looked at in one query each time; only where that has changed it
// is read anew.
func (c *chunkReader) describe(ctx context.Context, ch *chunk) error {
	s, job := c.a.s, ch.job
	oid := c.a.ready.oids[job.table()]
	var print string
	err := c.conn.QueryRow(ctx, `
		SELECT md5(concat_ws('|', c.oid, n.nspname, c.relname, c.relkind, c.relreplident,
		  (SELECT string_agg(concat_ws(',', attnum, attname, atttypid, atttypmod, attnotnull, attgenerated, attisdropped), ';' ORDER BY attnum)
		   FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0),
		  (SELECT string_agg(concat_ws(',', indexrelid, indisvalid, indisunique, indisreplident), ';' ORDER BY indexrelid) FROM pg_index WHERE indrelid = c.oid),
		  (SELECT to_jsonb(p)::text FROM pg_publication_tables p WHERE p.pubname = $2 AND p.schemaname = n.nspname AND p.tablename = c.relname)))
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $1`, oid, s.cfg.Publication).Scan(&print)
	if err != nil {
		return copyFault("look up table "+job.table().String(), err)
	}
	if c.plan == nil || c.plan.table != job.table() || c.print != print {
		if c.plan, err = c.makePlan(ctx, job); err != nil {
			c.plan = nil
			return err
		}
		c.print = print
	}
	p := c.plan
	ch.rel, ch.encoder, ch.columns = p.rel, p.encoder, p.columns
	ch.shape = &tableShape{Columns: p.print}
	if err := c.files(ctx, ch); err != nil {
		return err
	}
	if job.Shape != nil && !job.Shape.same(ch.shape) && !sabotage.On(sabotage.CopyAfterRewrite) {
		return errRestart
	}
	return nil
}

func (c *chunkReader) makePlan(ctx context.Context, job *copyJob) (*readPlan, error) {
	s, p := c.a.s, &readPlan{table: job.table()}
	rel, err := catalogueRelation(ctx, c.conn, s.cfg.Publication, Table{Schema: job.Schema, Name: job.Name})
	if err != nil {
		return nil, err
	}
	if rel.ID != c.a.ready.oids[job.table()] {
		return nil, &outage{what: "read table " + job.table().String(), why: "it was made anew", soon: true} // the watcher will refuse it
	}
	types, err := readTypes(ctx, c.conn, tableTypes(rel.ID))
	if err != nil {
		return nil, err
	}
	s.types.add(types)
	s.types.resolve(rel)
	if err := s.leaveUnpublished(ctx, c.conn, rel); err != nil {
		return nil, err
	}
	if p.encoder, err = feldera.NewEncoder(c.a.ready.tables[job.table()], rel, s.cfg.Policy); err != nil {
		return nil, err
	}
	p.rel = rel
	sum := sha256.New()
	for i := range rel.Columns {
		col := &rel.Columns[i]
		p.columns = append(p.columns, col.Name)
		fmt.Fprintf(sum, "%q %d %d\n", col.Name, col.TypeOID, col.TypeModifier)
	}
	if p.key, p.casts, err = chunkOrder(ctx, c.conn, rel, p.encoder.KeyColumns()); err != nil {
		return nil, err
	}
	if p.filter, err = c.rowFilter(ctx, job); err != nil {
		return nil, err
	}
	fmt.Fprintf(sum, "%q\n", p.key) // a cursor along other columns means something else
	if p.filter != "" {
		fmt.Fprintf(sum, "%q\n", p.filter) // another one lets rows pass that are behind the cursor
	}
	p.print = hex.EncodeToString(sum.Sum(nil)[:8])
	return p, nil
}

// files reads in which files the rows are, and about how many there are.
func (c *chunkReader) files(ctx context.Context, ch *chunk) error {
	rows, err := c.conn.Query(ctx, `SELECT c.oid, c.relfilenode, c.reltuples::float8, pg_relation_size(c.oid)::float8
		FROM pg_class c WHERE c.oid = $1 AND c.relkind = 'r' OR c.oid IN (SELECT relid FROM pg_partition_tree($1::oid) WHERE isleaf) ORDER BY c.oid`, ch.rel.ID)
	if err != nil {
		return copyFault("look up the table's files", err)
	}
	defer rows.Close()
	ch.shape.Files = make(map[string]uint32)
	sum := sha256.New()
	var tuples, unknown float64 // rows, and bytes of files whose rows were never counted
	for rows.Next() {
		var oid, file uint32
		var n, size float64
		if err := rows.Scan(&oid, &file, &n, &size); err != nil {
			return fmt.Errorf("read the table's files: %w", err)
		}
		if n < 0 {
			n, unknown = 0, unknown+size
		}
		tuples += n
		fmt.Fprintf(sum, "%d %d\n", oid, file)
		if len(ch.shape.Files) <= maxShapeFiles {
			ch.shape.Files[oidKey(oid)] = file
		}
	}
	if err := rows.Err(); err != nil {
		return copyFault("look up the table's files", err)
	}
	if len(ch.shape.Files) == 0 {
		return fmt.Errorf("broken invariant: table %s has no file", ch.rel)
	}
	if len(ch.shape.Files) > maxShapeFiles {
		ch.shape.Files, ch.shape.Sum = nil, hex.EncodeToString(sum.Sum(nil)[:8])
	}
	ch.tuples, ch.unknown = tuples, unknown
	return nil
}

// total estimates the rows of the table.
func (ch *chunk) total() int64 {
	const tupleHeader = 28
	if len(ch.rows) == 0 {
		return int64(ch.tuples)
	}
	return int64(ch.tuples + ch.unknown/(float64(ch.text)/float64(len(ch.rows))+tupleHeader))
}

// same tells whether rows that were read under one shape are those of the
// other. A partition that came or went is the stream's matter.
func (t *tableShape) same(now *tableShape) bool {
	if t.Columns != now.Columns || t.Sum != now.Sum {
		return false
	}
	for oid, file := range t.Files {
		if f, still := now.Files[oid]; still && f != file {
			return false
		}
	}
	return true
}

// chunkOrder gives the columns of the index that chunks are read along, with
// their types as casts: a unique one whose columns have no NULL, in Postgres'
// default order. One over nothing but columns of the destination's key is taken
// before the primary key, since a row must not move along it unseen:
//
//	cursor → UPDATE that leaves out values takes a row from in front of the cursor
//	behind it → the destination ignores that, since it has not got the row → no
//	chunk comes to it
//
// Along the destination's key the same is a change of key, which is whole.
func chunkOrder(ctx context.Context, conn *pgx.Conn, rel *decode.Relation, key []string) (columns, casts []string, err error) {
	rows, err := conn.Query(ctx, `
		SELECT array_agg(a.attname::text ORDER BY k.n), array_agg(quote_ident(n.nspname) || '.' || quote_ident(t.typname) ORDER BY k.n)
		FROM pg_index i
		CROSS JOIN LATERAL unnest(i.indkey::int2[], i.indoption::int2[], i.indcollation::oid[]) WITH ORDINALITY AS k (attnum, opt, coll, n)
		LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
		LEFT JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_namespace n ON n.oid = t.typnamespace
		WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL AND k.n <= i.indnkeyatts
		GROUP BY i.indexrelid, i.indisprimary, i.indisreplident
		HAVING bool_and(a.attnotnull AND coalesce(k.opt, 0) = 0 AND coalesce(k.coll, 0) = coalesce(a.attcollation, 0))
		ORDER BY bool_and(a.attname = ANY ($2::text[])) DESC, i.indisprimary DESC, i.indisreplident DESC, i.indexrelid LIMIT 1`, rel.ID, key)
	if err != nil {
		return nil, nil, copyFault("look up the unique indexes of "+rel.String(), err)
	}
	type index struct{ columns, casts []string }
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (x index, err error) { return x, row.Scan(&x.columns, &x.casts) })
	switch {
	case err != nil:
		return nil, nil, copyFault("look up the unique indexes of "+rel.String(), err)
	case len(list) == 0:
		return nil, nil, &decode.Refusal{
			Reason: decode.ReasonIdentity, What: "snapshot", Where: "source table " + rel.String(),
			Why:      "it has no unique index in Postgres' default order over columns that are NOT NULL, so it cannot be read piece by piece",
			Expected: "a primary key, or such an index", Do: "give it a primary key; or set PGSOURCE_SNAPSHOT=never and load its rows by other means",
		}
	}
	return list[0].columns, list[0].casts, nil
}

// rowFilter gives the condition under which the publication carries rows, "" for
// none. It is of PostgreSQL 15.
func (c *chunkReader) rowFilter(ctx context.Context, job *copyJob) (filter string, err error) {
	err = c.conn.QueryRow(ctx, `SELECT coalesce((SELECT to_jsonb(p)->>'rowfilter' FROM pg_publication_tables p
		WHERE p.pubname = $1 AND p.schemaname = $2 AND p.tablename = $3), '')`, c.a.s.cfg.Publication, job.Schema, job.Name).Scan(&filter)
	if err != nil {
		return "", copyFault("look up the publication's row filter", err)
	}
	return filter, nil
}

func quoteAll(prefix string, names []string) []string {
	quoted := make([]string, len(names))
	for i, n := range names {
		quoted[i] = prefix + quoteIdentifier(n)
	}
	return quoted
}

// literals writes texts as values of their types.
func literals(texts, casts []string) string {
	parts := make([]string, len(texts))
	for i, text := range texts {
		parts[i] = quoteLiteral(text) + "::" + casts[i]
	}
	return strings.Join(parts, ", ")
}

// readRange reads rows behind the job's cursor until time, bytes or rows are
// used up.
func (c *chunkReader) readRange(ctx context.Context, ch *chunk, from string) error {
	key, casts, filter := c.plan.key, c.plan.casts, c.plan.filter
	order := strings.Join(quoteAll("", key), ", ")
	var conditions []string
	if filter != "" {
		conditions = append(conditions, "("+filter+")")
	}
	if after := ch.job.After; after != nil {
		if len(after) != len(key) {
			return errRestart // another key than the cursor's
		}
		conditions = append(conditions, "("+order+") > ("+literals(after, casts)+")")
	}
	where := ""
	if len(conditions) > 0 {
		where = " WHERE " + strings.Join(conditions, " AND ")
	}
	columns := strings.Join(append(quoteAll("", ch.columns), quoteAll("", key)...), ", ")
	_, err := c.conn.Exec(ctx, fmt.Sprintf("DECLARE chunk NO SCROLL CURSOR FOR SELECT %s FROM %s%s ORDER BY %s LIMIT %d", columns, from, where, order, maxChunkRows),
		pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		return copyFault("read table "+ch.rel.String(), err)
	}
	cfg := &c.a.s.cfg
	deadline := time.Now().Add(cfg.ChunkTime)
	ask := firstFetch
	for {
		began, before := time.Now(), len(ch.rows)
		got, full, err := c.fetch(ctx, ch, fmt.Sprintf("FETCH %d FROM chunk", ask), key, cfg.ChunkBytes)
		switch {
		case err != nil:
			return err
		case full:
			return nil
		case got < ask:
			ch.last = len(ch.rows) < maxChunkRows
			return nil
		case len(ch.rows) >= maxChunkRows:
			return nil
		}
		left := time.Until(deadline)
		if left <= 0 {
			return nil
		}
		// As many as fit into the rest of both, by what the last ones took.
		byTime := int(float64(len(ch.rows)-before) * float64(left) / float64(max(time.Since(began), time.Millisecond)))
		byBytes := int(int64(cfg.ChunkBytes-ch.bytes) * int64(len(ch.rows)) / int64(max(ch.bytes, 1)))
		ask = max(1, min(byTime, byBytes, maxFetch, maxChunkRows-len(ch.rows)))
	}
}

// fetch reads the rows of one statement, each with the columns that it is read
// along behind it. It keeps those that fit into limit, and at least the first; full
// says that it has left some. got is how many there were.
func (c *chunkReader) fetch(ctx context.Context, ch *chunk, sql string, order []string, limit int) (got int, full bool, err error) {
	results := c.conn.PgConn().Exec(ctx, sql) // the simple protocol: texts as the stream has them
	for results.NextResult() {
		rows := results.ResultReader()
		for rows.NextRow() {
			got++
			if full = full || (len(ch.rows) > 0 && ch.bytes >= limit); full {
				continue
			}
			if addErr := ch.add(rows.Values(), order); addErr != nil && err == nil {
				err, full = addErr, true
			}
		}
		if _, closeErr := rows.Close(); closeErr != nil && err == nil {
			err = copyFault("read table "+ch.rel.String(), closeErr)
		}
	}
	if closeErr := results.Close(); closeErr != nil && err == nil {
		err = copyFault("read table "+ch.rel.String(), closeErr)
	}
	return got, full, err
}

// add takes one row, whose texts are the driver's: its columns, and those that
// it is read along.
func (ch *chunk) add(texts [][]byte, order []string) error {
	n, keys := len(ch.rel.Columns), len(order)
	if len(texts) != n+keys {
		return fmt.Errorf("broken invariant: a row of %s has %d columns", ch.rel, len(texts))
	}
	values, err := ch.values(ch.rel.Columns, texts[:n])
	var key []byte
	if err == nil {
		key, err = ch.encoder.AppendKey(nil, values, nil)
	}
	if refused, ok := errors.AsType[*decode.Refusal](err); ok {
		return ch.about(keyed(refused, order, texts[n:]))
	}
	if err != nil {
		return err
	}
	ch.after = make([]string, keys)
	for i, text := range texts[n:] {
		ch.after[i] = string(text)
	}
	ch.rows = append(ch.rows, copiedRow{key: string(key), values: values})
	ch.bytes += rowBytes(values) + len(key)
	return nil
}

// values reads the texts of columns, which are copied.
func (ch *chunk) values(columns []decode.Column, texts [][]byte) ([]decode.Value, error) {
	size := 0
	for _, text := range texts {
		size += len(text)
	}
	own := make([]byte, 0, size)
	ch.text += size
	values := make([]decode.Value, len(texts))
	for i, text := range texts {
		if text == nil {
			values[i].State = decode.Null
			continue
		}
		at := len(own)
		own = append(own, text...)
		var refused *decode.Refusal
		if values[i], refused = decode.TextValue(columns[i].TypeOID, own[at:len(own):len(own)]); refused != nil {
			refused.Where = ch.rel.String() + "." + columns[i].Name
			return nil, refused
		}
	}
	return values, nil
}

// readKeys looks at the next keys of the job's list. A key that the source does
// not have, as it is written, is absent: also where the source has another one
// that it takes for equal, which the destination does not.
func (c *chunkReader) readKeys(ctx context.Context, ch *chunk, from string) error {
	names := ch.encoder.KeyColumns()
	casts := make([]string, len(names))
	keyColumns := make([]decode.Column, len(names))
	for i, name := range names {
		at := slices.IndexFunc(ch.rel.Columns, func(col decode.Column) bool { return col.Name == name })
		keyColumns[i] = ch.rel.Columns[at]
		err := c.conn.QueryRow(ctx, `SELECT quote_ident(n.nspname) || '.' || quote_ident(t.typname) FROM pg_attribute a
			JOIN pg_type t ON t.oid = a.atttypid JOIN pg_namespace n ON n.oid = t.typnamespace WHERE a.attrelid = $1 AND a.attname = $2 AND NOT a.attisdropped`,
			ch.rel.ID, name).Scan(&casts[i])
		if err != nil {
			return copyFault("look up the key's types", err)
		}
	}
	if filter := c.plan.filter; filter != "" {
		from = "(SELECT * FROM " + from + " WHERE " + filter + ")"
	}
	list := ch.job.Keys[ch.job.Done:]
	list = list[:min(len(list), maxChunkKeys)]
	var values, joins, asked []string
	for i, key := range list {
		if len(key) != len(names) {
			return &decode.Refusal{
				Reason: decode.ReasonSetup, What: string(ch.job.Kind), Where: "table " + ch.rel.String(), Why: fmt.Sprintf("a key of it has %d columns", len(key)),
				Expected: "the columns " + strings.Join(names, ", "),
			}
		}
		values = append(values, fmt.Sprintf("(%d, %s)", i, literals(key, casts)))
	}
	columns := []string{"n"}
	for i, name := range names {
		k := fmt.Sprintf("k%d", i)
		columns = append(columns, k)
		asked = append(asked, "k."+k)
		joins = append(joins, fmt.Sprintf("t.%s = k.%s", quoteIdentifier(name), k))
	}
	sql := fmt.Sprintf("SELECT k.n, %s, t.%s IS NOT NULL, %s FROM (VALUES %s) AS k (%s) LEFT JOIN %s AS t ON %s ORDER BY k.n",
		strings.Join(asked, ", "), quoteIdentifier(names[0]), strings.Join(quoteAll("t.", ch.columns), ", "),
		strings.Join(values, ", "), strings.Join(columns, ", "), from, strings.Join(joins, " AND "))
	return c.fetchKeys(ctx, ch, sql, keyColumns, len(list))
}

func (c *chunkReader) fetchKeys(ctx context.Context, ch *chunk, sql string, keyColumns []decode.Column, asked int) error {
	seen := make(map[string]bool)
	put := func(row copiedRow) {
		if !seen[row.key] {
			seen[row.key] = true
			ch.rows = append(ch.rows, row)
			ch.bytes += rowBytes(row.values) + len(row.key)
		}
	}
	full := false
	last := -1 // the number of the key looked at last
	take := func(texts [][]byte) error {
		n := len(keyColumns)
		if len(texts) != 2+n+len(ch.columns) {
			return fmt.Errorf("broken invariant: a row of %s has %d columns", ch.rel, len(texts))
		}
		var number int
		if _, err := fmt.Sscan(string(texts[0]), &number); err != nil {
			return fmt.Errorf("read the number of a key: %w", err)
		}
		if full = full || (number != last && len(ch.rows) > 0 && ch.bytes >= c.a.s.cfg.ChunkBytes); full {
			return nil
		}
		last = number
		names := ch.encoder.KeyColumns()
		about := func(err error) error {
			if refused, ok := errors.AsType[*decode.Refusal](err); ok {
				return ch.about(keyed(refused, names, texts[1:1+n]))
			}
			return err
		}
		absent, err := ch.absentRow(keyColumns, texts[1:1+n])
		if err != nil {
			return about(err)
		}
		present := bytes.Equal(texts[1+n], []byte("t")) && (!sabotage.On(sabotage.CopyGhostUnasked) || ch.job.Kind != CopyResync)
		if present {
			values, err := ch.values(ch.rel.Columns, texts[2+n:])
			if err != nil {
				return about(err)
			}
			key, err := ch.encoder.AppendKey(nil, values, nil)
			if err != nil {
				return about(err)
			}
			put(copiedRow{key: string(key), values: values})
			if string(key) == absent.key {
				return nil
			}
		}
		put(absent)
		return nil
	}
	results := c.conn.PgConn().Exec(ctx, sql)
	var err error
	for results.NextResult() {
		rows := results.ResultReader()
		for rows.NextRow() {
			if err == nil {
				err = take(rows.Values())
			}
		}
		if _, closeErr := rows.Close(); closeErr != nil && err == nil {
			err = copyFault("read keys of table "+ch.rel.String(), closeErr)
		}
	}
	if closeErr := results.Close(); closeErr != nil && err == nil {
		err = copyFault("read keys of table "+ch.rel.String(), closeErr)
	}
	if err != nil {
		return err
	}
	ch.done = ch.job.Done + asked
	if full {
		ch.done = ch.job.Done + last + 1
	}
	ch.last = ch.done >= len(ch.job.Keys)
	return nil
}

// absentRow makes the row of a key that is not there: the other columns are
// absent.
func (ch *chunk) absentRow(keyColumns []decode.Column, texts [][]byte) (copiedRow, error) {
	parts, err := ch.values(keyColumns, texts)
	if err != nil {
		return copiedRow{}, err
	}
	values := make([]decode.Value, len(ch.rel.Columns))
	for i := range keyColumns {
		at := slices.IndexFunc(ch.rel.Columns, func(col decode.Column) bool { return col.Name == keyColumns[i].Name })
		values[at] = parts[i]
	}
	key, err := ch.encoder.AppendKey(nil, values, nil)
	if err != nil {
		return copiedRow{}, err
	}
	return copiedRow{key: string(key), values: values, absent: true}, nil
}
