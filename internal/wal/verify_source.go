package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// sourceTable reads one source table for a comparison, in the form in which
// the stream would carry its rows: the same texts, in the same session
// settings, through the same encoder.
type sourceTable struct {
	name tableName
	rel  *decode.Relation
	cmp  *feldera.Comparer
	// list, from and filter are parts of the queries; filter is the condition
	// under which the publication carries a row, "" for none.
	list, from, filter string
	// order are the columns by which pages are read, in the order of an index;
	// orderTypes the types to cast their texts to. The table has no two rows that
	// are alike in them, by their own equality, and no NULL.
	order      []int // into rel.Columns
	orderNames []string
	orderTypes []string
	// keyNames and keyTypes are those of the Feldera table's PRIMARY KEY.
	keyNames, keyTypes []string
	// jobNames are the key's columns as copy jobs have them: in the order of the
	// Feldera table's declaration, not quoted.
	jobNames []string
	// coarse says why the source takes keys for one that differ in bytes, "" where
	// it does not.
	coarse string
}

// sourceColumn is what the catalogue says of a column, beside its Relation.
type sourceColumn struct {
	name    string
	typ     string // to cast a text to
	notNull bool
	// coarse: equality of the type, or of the column's collation, is not that
	// of the bytes that the pipeline gets.
	coarse string
}

// openSourceTable looks a table up.
func (s *Source) openSourceTable(ctx context.Context, conn *pgx.Conn, t Table, target *feldera.Table) (*sourceTable, error) {
	rel, err := catalogueRelation(ctx, conn, s.cfg.Publication, t)
	if err != nil {
		return nil, err
	}
	types, err := readTypes(ctx, conn, tableTypes(rel.ID))
	if err != nil {
		return nil, err
	}
	if err := s.leaveUnpublished(ctx, conn, rel); err != nil {
		return nil, err
	}
	columns, err := readSourceColumns(ctx, conn, rel, types)
	if err != nil {
		return nil, err
	}
	for i := range rel.Columns {
		types.resolve(&rel.Columns[i])
	}
	policy := s.cfg.Policy
	policy.OnAltered = nil // what is altered here is not delivered
	enc, err := feldera.NewEncoder(target, rel, policy)
	if err != nil {
		return nil, err
	}
	st := &sourceTable{name: nameOf(rel), rel: rel, jobNames: enc.KeyColumns()}
	if st.cmp, err = feldera.NewComparer(enc); err != nil {
		return nil, err
	}
	names := make([]string, len(rel.Columns))
	for i := range rel.Columns {
		names[i] = quoteIdentifier(rel.Columns[i].Name)
	}
	st.list = strings.Join(names, ", ")
	if err := st.readSet(ctx, conn, s.cfg.Publication); err != nil {
		return nil, err
	}
	inKey := make([]string, 0, len(target.KeyNames()))
	for _, i := range st.cmp.KeyColumns() {
		c := columns[rel.Columns[i].Name]
		st.keyNames, st.keyTypes = append(st.keyNames, quoteIdentifier(c.name)), append(st.keyTypes, c.typ)
		inKey = append(inKey, c.name)
		if c.coarse != "" && st.coarse == "" {
			st.coarse = fmt.Sprintf("column %q: %s", c.name, c.coarse)
		}
	}
	order, err := readOrder(ctx, conn, rel, inKey)
	if err != nil {
		return nil, err
	}
	for _, name := range order {
		c := columns[name]
		if !c.notNull {
			return nil, st.unordered(fmt.Sprintf("column %q of its key can be NULL, which no row of the pipeline's key can be", name))
		}
		st.order = append(st.order, slices.IndexFunc(rel.Columns, func(col decode.Column) bool { return col.Name == name }))
		st.orderNames, st.orderTypes = append(st.orderNames, quoteIdentifier(name)), append(st.orderTypes, c.typ)
	}
	if len(st.order) == 0 {
		return nil, st.unordered("it has no unique index over columns of the Feldera table's PRIMARY KEY (" + strings.Join(inKey, ", ") + ")")
	}
	return st, nil
}

// readSet finds which rows of the table the stream carries: not those of tables
// that inherit from it, which are published under their own names, and those
// that the publication's filter lets pass.
func (st *sourceTable) readSet(ctx context.Context, conn *pgx.Conn, publication string) error {
	var partitioned bool
	err := conn.QueryRow(ctx, `
		SELECT EXISTS (SELECT FROM pg_partitioned_table WHERE partrelid = $1),
		       coalesce((SELECT to_jsonb(p)->>'rowfilter' FROM pg_publication_tables p WHERE p.pubname = $2 AND p.schemaname = $3 AND p.tablename = $4), '')`,
		st.rel.ID, publication, st.name.schema, st.name.name).Scan(&partitioned, &st.filter)
	if err != nil {
		return classify("look up what is published of "+st.rel.String(), err)
	}
	st.from = st.name.String()
	if !partitioned {
		st.from = "ONLY " + st.from
	}
	return nil
}

// where joins conditions, and the publication's with them.
func (st *sourceTable) where(condition string) string {
	switch {
	case st.filter == "" && condition == "":
		return ""
	case st.filter == "":
		return " WHERE " + condition
	case condition == "":
		return " WHERE (" + st.filter + ")"
	}
	return " WHERE (" + st.filter + ") AND " + condition
}

func (st *sourceTable) unordered(why string) error {
	return &decode.Refusal{
		Reason: decode.ReasonIdentity, What: "source table", Where: st.rel.String(), Why: why,
		Expected: "a unique index by which the table can be read in pages", Do: "give the table a primary key over the Feldera table's",
	}
}

// readSourceColumns reads what a Relation does not say. types are not resolved
// in rel yet.
func readSourceColumns(ctx context.Context, conn *pgx.Conn, rel *decode.Relation, types pgTypes) (map[string]sourceColumn, error) {
	bases := make([]int64, len(rel.Columns))
	names := make([]string, len(rel.Columns))
	for i, c := range rel.Columns {
		base, _ := types.base(c.TypeOID, c.TypeModifier)
		bases[i], names[i] = int64(base), c.Name
	}
	// A cast to a domain would check its constraints, and one with a modifier
	// would cut the text to another key.
	rows, err := conn.Query(ctx, `
		SELECT a.attname, format_type(b.base::oid, -1), a.attnotnull, coalesce(NOT c.collisdeterministic, false), t.typname::text
		FROM unnest($2::int8[], $3::text[]) AS b (base, name)
		JOIN pg_attribute a ON a.attrelid = $1 AND a.attname = b.name AND NOT a.attisdropped
		JOIN pg_type t ON t.oid = b.base::oid
		LEFT JOIN pg_collation c ON c.oid = a.attcollation`, rel.ID, bases, names)
	if err != nil {
		return nil, classify("look up the columns of "+rel.String(), err)
	}
	defer rows.Close()
	columns := make(map[string]sourceColumn)
	for rows.Next() {
		var c sourceColumn
		var fuzzy bool
		var typ string
		if err := rows.Scan(&c.name, &c.typ, &c.notNull, &fuzzy, &typ); err != nil {
			return nil, fmt.Errorf("read the columns of %s: %w", rel, err)
		}
		switch {
		case fuzzy:
			c.coarse = "its collation is not deterministic, so texts that differ can be one key"
		case coarseTypes[typ] != "":
			c.coarse = coarseTypes[typ]
		}
		columns[c.name] = c
	}
	if err := rows.Err(); err != nil {
		return nil, classify("look up the columns of "+rel.String(), err)
	}
	return columns, nil
}

// coarseTypes are types whose equality is not that of their texts. numeric is
// not one of them, nor are times with a zone and floats: the pipeline's types
// for them have one form of each value, and a text column for them has the
// form that Postgres writes, which the encoder and the comparison take as it is.
var coarseTypes = map[string]string{
	"citext":   "citext takes texts for one that differ in case",
	"interval": "intervals of 24 hours and of a day are one key",
	"timetz":   "times of two zones can be one key",
}

// readOrder gives the columns of the index by which the table is read: unique,
// over nothing but columns of the key, the primary key before others.
func readOrder(ctx context.Context, conn *pgx.Conn, rel *decode.Relation, key []string) ([]string, error) {
	rows, err := conn.Query(ctx, `
		SELECT array_agg(a.attname::text ORDER BY k.n) FROM pg_index i
		CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, n)
		JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
		WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL AND k.n <= i.indnkeyatts
		GROUP BY i.indexrelid, i.indisprimary, i.indnkeyatts
		HAVING bool_and(a.attname = ANY ($2::text[]))
		ORDER BY i.indisprimary DESC, bool_and(a.attnotnull) DESC, i.indnkeyatts LIMIT 1`, rel.ID, key)
	if err != nil {
		return nil, classify("look up the unique indexes of "+rel.String(), err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[[]string])
	if err != nil {
		return nil, classify("look up the unique indexes of "+rel.String(), err)
	}
	if len(found) == 0 {
		return nil, nil
	}
	return found[0], nil
}

// sourceNow is the position of the source at the moment of a query. A commit is
// in the WAL before it is visible, so what a snapshot sees lies before it.
const sourceNow = `CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END`

// snapshot runs fn in a read-only transaction of one snapshot, and gives a
// position behind everything that it saw.
func snapshot(ctx context.Context, conn *pgx.Conn, fn func(ctx context.Context, tx pgx.Tx) error) (position uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, verifyPageTimeout)
	defer cancel()
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return 0, classify("begin to read", err)
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) //nolint:errcheck // it has only read
	if err := pinTransaction(ctx, conn); err != nil {
		return 0, err
	}
	// Rows that a policy hides would be called missing: reading fails instead.
	if _, err := tx.Exec(ctx, "SET LOCAL row_security = off"); err != nil {
		return 0, classify("begin to read", err)
	}
	if err := fn(ctx, tx); err != nil {
		return 0, err
	}
	var at string
	if err := tx.QueryRow(ctx, "SELECT ("+sourceNow+")::text").Scan(&at); err != nil {
		return 0, classify("ask for the server's position", err)
	}
	lsn, err := pglogrepl.ParseLSN(at)
	if err != nil {
		return 0, fmt.Errorf("read the server's position: %w", err)
	}
	return uint64(lsn), nil
}

// sourcePage is what one page was.
type sourcePage struct {
	// last names the last row, nil for the last page.
	last     []string
	position uint64
}

// page hands the images of at most limit rows behind after to fn, and with them
// why a row cannot be sent; the image has its key alone then, or nothing.
func (st *sourceTable) page(ctx context.Context, conn *pgx.Conn, after []string, limit int, fn func(*feldera.Image, *decode.Refusal) error) (page sourcePage, err error) {
	condition := ""
	var args []any
	if after != nil {
		marks := make([]string, len(after))
		for i, text := range after {
			marks[i] = fmt.Sprintf("$%d::%s", i+1, st.orderTypes[i])
			args = append(args, text)
		}
		condition = "(" + strings.Join(st.orderNames, ", ") + ") > (" + strings.Join(marks, ", ") + ")"
	}
	sql := "SELECT " + st.list + " FROM " + st.from + st.where(condition) + " ORDER BY " + strings.Join(st.orderNames, ", ") + fmt.Sprintf(" LIMIT %d", limit)
	page.position, err = snapshot(ctx, conn, func(ctx context.Context, tx pgx.Tx) error {
		rows, err := tx.Query(ctx, sql, args...)
		if err != nil {
			return classify("read "+st.rel.String(), err)
		}
		defer rows.Close()
		n := 0
		last := make([]string, len(st.order))
		for rows.Next() {
			raw := rows.RawValues()
			n++
			for i, at := range st.order {
				last[i] = string(raw[at])
			}
			im, refused, err := st.image(raw, false)
			if err != nil {
				return err
			}
			if err := fn(im, refused); err != nil {
				return err
			}
		}
		if err := rows.Err(); err != nil {
			return classify("read "+st.rel.String(), err)
		}
		if n == limit {
			page.last = last
		}
		return nil
	})
	return page, err
}

// image makes the image of a row of texts.
func (st *sourceTable) image(raw [][]byte, values bool) (*feldera.Image, *decode.Refusal, error) {
	row := make([]decode.Value, len(st.rel.Columns))
	for i := range row {
		if raw[i] == nil {
			row[i] = decode.Value{State: decode.Null}
			continue
		}
		v, refused := decode.TextValue(st.rel.Columns[i].TypeOID, raw[i])
		if refused != nil {
			return nil, nil, fmt.Errorf("column %q of %s: %w", st.rel.Columns[i].Name, st.rel, refused)
		}
		row[i] = v
	}
	im, err := st.cmp.Source(row, values)
	if refused, ok := errors.AsType[*decode.Refusal](err); ok {
		return &im, refused, nil
	}
	return &im, nil, err
}

// sourceRow is what the source has of a key at one moment.
type sourceRow struct {
	image feldera.Image
	// version names the row's version: as long as it is the same, nobody has
	// changed the row.
	version    string
	unsendable *decode.Refusal
}

// sourceLook is what one look at keys found.
type sourceLook struct {
	rows     map[string]*sourceRow // by image key
	position uint64
	// waiting are sessions whose commit may be in the WAL, and with it in the
	// pipeline, and not visible yet: they wait for a synchronous standby, or do
	// not show what they wait for.
	waiting map[string]bool
	hidden  bool // some of waiting are only not shown
}

// keys looks keys up. Those that are not there are left out.
func (st *sourceTable) keys(ctx context.Context, conn *pgx.Conn, keys [][]byte) (*sourceLook, error) {
	look := &sourceLook{rows: make(map[string]*sourceRow)}
	var err error
	look.position, err = snapshot(ctx, conn, func(ctx context.Context, tx pgx.Tx) error {
		if err := st.lookup(ctx, tx, keys, look); err != nil {
			return err
		}
		return look.readWaiting(ctx, tx)
	})
	return look, err
}

// keysAtOnce is how many keys one query names.
const keysAtOnce = 500

func (st *sourceTable) lookup(ctx context.Context, tx pgx.Tx, keys [][]byte, look *sourceLook) error {
	for part := range slices.Chunk(keys, keysAtOnce) {
		if err := st.lookupPart(ctx, tx, part, look); err != nil {
			return err
		}
	}
	return nil
}

// lookupPart looks a few keys up. A key that only the pipeline has can be none
// that the source's type could hold: the source then has no row of it.
func (st *sourceTable) lookupPart(ctx context.Context, tx pgx.Tx, keys [][]byte, look *sourceLook) error {
	err := pgx.BeginFunc(ctx, tx, func(sub pgx.Tx) error { return st.query(ctx, sub, keys, look) }) // a savepoint
	if err == nil || !valueFault(err) {
		if err != nil {
			return classify("read rows of "+st.rel.String()+" by key", err)
		}
		return nil
	}
	if len(keys) == 1 {
		return nil
	}
	middle := len(keys) / 2
	if err := st.lookupPart(ctx, tx, keys[:middle], look); err != nil {
		return err
	}
	return st.lookupPart(ctx, tx, keys[middle:], look)
}

func (st *sourceTable) query(ctx context.Context, tx pgx.Tx, keys [][]byte, look *sourceLook) error {
	var args []any
	tuples := make([]string, len(keys))
	for n, key := range keys {
		texts, err := st.cmp.SourceKey(key)
		if err != nil {
			return err
		}
		marks := make([]string, len(texts))
		for i, text := range texts {
			args = append(args, text)
			marks[i] = fmt.Sprintf("$%d::%s", len(args), st.keyTypes[i])
		}
		tuples[n] = "(" + strings.Join(marks, ", ") + ")"
	}
	left := strings.Join(st.keyNames, ", ")
	if len(st.keyNames) > 1 {
		left = "(" + left + ")"
	}
	rows, err := tx.Query(ctx, "SELECT "+st.list+", tableoid::text || '/' || ctid::text || '/' || xmin::text FROM "+st.from+
		st.where(left+" IN ("+strings.Join(tuples, ", ")+")"), args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		raw := rows.RawValues()
		im, refused, err := st.image(raw[:len(raw)-1], true)
		if err != nil {
			return err
		}
		look.rows[string(im.Key)] = &sourceRow{image: *im, version: string(raw[len(raw)-1]), unsendable: refused}
	}
	return rows.Err()
}

// readWaiting finds the sessions behind whose commits the snapshot may be.
func (look *sourceLook) readWaiting(ctx context.Context, tx pgx.Tx) error {
	look.waiting = make(map[string]bool)
	rows, err := tx.Query(ctx, `
		SELECT pid::text || coalesce('@' || coalesce(xact_start, query_start)::text, ''), state IS NULL
		FROM pg_stat_activity
		WHERE wait_event = 'SyncRep'
		   OR query = '<insufficient privilege>' AND current_setting('synchronous_standby_names') <> ''`)
	if err != nil {
		return classify("look for commits that are not visible yet", err)
	}
	defer rows.Close()
	for rows.Next() {
		var session string
		var hidden bool
		if err := rows.Scan(&session, &hidden); err != nil {
			return fmt.Errorf("look for commits that are not visible yet: %w", err)
		}
		look.waiting[session] = true
		look.hidden = look.hidden || hidden
	}
	if err := rows.Err(); err != nil {
		return classify("look for commits that are not visible yet", err)
	}
	return nil
}
