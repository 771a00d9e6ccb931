package wal

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// This file is about changes of the catalogue that change rows without a word in
// the stream, or which rows are in it: a column is dropped and another one made
// of the same name, names are exchanged, a label of an enum is renamed, the
// publication gets another row filter or column list. The rows that are there
// are then others at the source than what was delivered of them. While pgsource
// runs, the catalogue is held against what it was at the start.

// baseline is one mapped table as it was at the start.
type baseline struct {
	columns map[string]baseColumn
	// filter is the publication's row filter, "" for none.
	filter string
	entry  entry
	// texts decide how stored values read: labels of enums, attributes of
	// composite types, and settings of the server.
	texts map[textOf]string
	// parts are what is below a partitioned table at the start, nil for others.
	parts map[uint32]partition
	// waits is the copy that was under way when columns were first seen that older
	// rows lack; nil for none.
	waits *awaitedCopy
}

// entry is the table's place in the publication: the numbers that the server gave
// to both. A table that is taken out and put back has another number, and what was
// changed in between is in no stream. It is all zero where the publication has the
// table otherwise, as one of a schema or of all.
type entry struct {
	publication, number uint32
	// list is what else of it makes another one: a column list that is changed, as
	// a row filter that is, exchanges the entry in one step, and misses nothing.
	list string
}

// putBack tells whether the table was taken out of the publication and put back
// with the filter and the list that it had. A publication that was made anew has
// missed nothing without an error in the stream.
func (e entry) putBack(now entry) bool {
	return e.number != 0 && now.number != 0 && e.number != now.number && e.publication == now.publication && e.list == now.list
}

const whyPutBack = "it was taken out of the publication and put back (or in one statement exchanged for itself), so changes in between are not in the stream"

// awaitedCopy is a copy that may bring the columns, if it begins again.
type awaitedCopy struct {
	columns  string
	job      uint64
	restarts int
}

type baseColumn struct {
	number int16
	// has: the Feldera table has it. carried: the publication does. generated is
	// its expression, "" for none.
	has, carried bool
	generated    string
	// filled: rows that were there when it was made can have a value in it.
	filled bool
}

// The classes of texts that are no settings.
const (
	classEnum      = "enum"
	classComposite = "composite"
)

// textOf is a label, by its own OID, or a composite type, or a type that a
// setting has a part in.
type textOf struct {
	class string // classEnum, classComposite, or the setting
	oid   uint32 // the label's, or typ
	typ   uint32 // the type's
	name  string // of the type
}

// readBaselines looks at all mapped tables, which r knows by their OIDs. The
// server spells names in filters, expressions and types by the search_path, which
// another role or another client of a pooler can have set: it is the same here
// each time.
func (s *Source) readBaselines(ctx context.Context, conn *pgx.Conn, r *ready) (found map[tableName]*baseline, err error) {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return nil, classify("begin to look up the tables", err)
	}
	defer func() { err = errors.Join(err, endLook(ctx, tx)) }()
	if _, err := conn.Exec(ctx, `SELECT set_config('search_path', 'pg_catalog', true)`); err != nil {
		return nil, classify("set the search_path to look up the tables", err)
	}
	return s.lookUpBaselines(ctx, conn, r)
}

// endLook ends a transaction that has changed nothing.
func endLook(ctx context.Context, tx pgx.Tx) error {
	if err := tx.Rollback(ctx); err != nil && !errors.Is(err, pgx.ErrTxClosed) {
		return classify("end a look at the tables", err)
	}
	return nil
}

func (s *Source) lookUpBaselines(ctx context.Context, conn *pgx.Conn, r *ready) (map[tableName]*baseline, error) {
	found := make(map[tableName]*baseline, len(r.oids))
	byOID := make(map[uint32]*baseline, len(r.oids))
	oids := make([]int64, 0, len(r.oids))
	targets := make(map[uint32]*feldera.Table, len(r.oids))
	for name, oid := range r.oids {
		b := &baseline{columns: make(map[string]baseColumn), texts: make(map[textOf]string)}
		found[name], byOID[oid], targets[oid] = b, b, r.tables[name]
		oids = append(oids, int64(oid))
	}
	slices.Sort(oids) // the same query each time: a recording is asked by its text
	listed, err := s.readListed(ctx, conn, found)
	if err != nil {
		return nil, err
	}
	entries := entriesOf(found)
	names := make(map[uint32]tableName, len(r.oids))
	for name, oid := range r.oids {
		names[oid] = name
	}
	rows, err := conn.Query(ctx, `
		SELECT a.attrelid, a.attname, a.attnum, CASE WHEN a.attgenerated <> '' THEN coalesce(pg_get_expr(d.adbin, d.adrelid), '') ELSE '' END,
		       a.atthasmissing OR a.atthasdef OR a.attidentity <> '' OR EXISTS (SELECT FROM pg_class root, pg_partition_tree(root.oid) t, pg_attribute leaf
		         WHERE root.oid = a.attrelid AND root.relkind = 'p' AND leaf.attrelid = t.relid AND leaf.attname = a.attname AND leaf.atthasmissing)
		FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
		WHERE a.attrelid = ANY ($1::int8[]::oid[]) AND a.attnum > 0 AND NOT a.attisdropped`, oids)
	if err != nil {
		return nil, classify("look up the tables' columns", err)
	}
	var oid uint32
	var name string
	var col baseColumn
	_, err = pgx.ForEachRow(rows, []any{&oid, &name, &col.number, &col.generated, &col.filled}, func() error {
		col.has = targets[oid].Has(name)
		list := listed[names[oid]]
		col.carried = list == nil || slices.Contains(list, name)
		byOID[oid].columns[name] = col
		return nil
	})
	if err != nil {
		return nil, classify("look up the tables' columns", err)
	}
	// A column that came between the two looks would seem not to be published, and
	// at the next look as if it had just been taken into the list.
	again, err := s.readListed(ctx, conn, found)
	if err != nil {
		return nil, err
	}
	if !maps.EqualFunc(listed, again, slices.Equal[[]string]) || !maps.Equal(entries, entriesOf(found)) {
		return nil, &outage{what: "look at the tables", why: "they are being changed", soon: true}
	}
	return found, readTexts(ctx, conn, oids, targets, byOID)
}

func entriesOf(found map[tableName]*baseline) map[tableName]entry {
	entries := make(map[tableName]entry, len(found))
	for name, b := range found {
		entries[name] = b.entry
	}
	return entries
}

// readListed gives the columns of each published table, nil where the server has
// no column lists, and enters the row filters and the tables' places.
func (s *Source) readListed(ctx context.Context, conn *pgx.Conn, found map[tableName]*baseline) (map[tableName][]string, error) {
	rows, err := conn.Query(ctx, `
		SELECT schemaname, tablename, coalesce(to_jsonb(p)->>'rowfilter', ''),
		       CASE WHEN jsonb_typeof(to_jsonb(p)->'attnames') = 'array' THEN ARRAY(SELECT jsonb_array_elements_text(to_jsonb(p)->'attnames')) END,
		       coalesce(e.publication, 0), coalesce(e.number, 0), coalesce(e.list, '')
		FROM pg_publication_tables p LEFT JOIN LATERAL (
			SELECT pr.prpubid AS publication, pr.oid AS number, to_jsonb(pr)->>'prattrs' AS list FROM pg_publication_rel pr
			JOIN pg_publication pub ON pub.oid = pr.prpubid JOIN pg_class c ON c.oid = pr.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE pub.pubname = p.pubname AND n.nspname = p.schemaname AND c.relname = p.tablename
		) e ON true WHERE p.pubname = $1`, s.cfg.Publication)
	if err != nil {
		return nil, classify("look up the published tables", err)
	}
	listed := make(map[tableName][]string, len(found))
	var name tableName
	var filter string
	var columns []string
	var place entry
	_, err = pgx.ForEachRow(rows, []any{&name.schema, &name.name, &filter, &columns, &place.publication, &place.number, &place.list}, func() error {
		if b := found[name]; b != nil {
			b.filter, b.entry, listed[name] = filter, place, slices.Clone(columns)
		}
		return nil
	})
	if err != nil {
		return nil, classify("look up the published tables", err)
	}
	return listed, nil
}

// readTexts reads what decides how the values of the tables' columns read, with
// the types behind domains, arrays, ranges and composite types.
func readTexts(ctx context.Context, conn *pgx.Conn, oids []int64, targets map[uint32]*feldera.Table, byOID map[uint32]*baseline) error {
	rows, err := conn.Query(ctx, `
		WITH RECURSIVE used (rel, col, oid) AS (
			SELECT attrelid, attname, atttypid FROM pg_attribute WHERE attrelid = ANY ($1::int8[]::oid[]) AND attnum > 0 AND NOT attisdropped
			UNION
			SELECT used.rel, used.col, behind.oid FROM used JOIN pg_type t ON t.oid = used.oid
			CROSS JOIN LATERAL (
				SELECT t.typbasetype AS oid UNION ALL SELECT t.typelem
				UNION ALL SELECT rngsubtype FROM pg_range WHERE t.typtype IN ('r', 'm') AND (rngtypid = t.oid OR rngmultitypid = t.oid)
				UNION ALL SELECT atttypid FROM pg_attribute WHERE t.typtype = 'c' AND attrelid = t.typrelid AND attnum > 0 AND NOT attisdropped
			) behind WHERE behind.oid <> 0
		)
		SELECT used.rel, used.col, 'enum', e.oid, e.enumtypid, format_type(e.enumtypid, NULL), e.enumlabel::text FROM used JOIN pg_enum e ON e.enumtypid = used.oid
		UNION ALL
		SELECT used.rel, used.col, 'composite', t.oid, t.oid, format_type(t.oid, NULL), (SELECT coalesce(string_agg(a.attnum::text, ',' ORDER BY a.attnum), '')
			FROM pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped)
		FROM used JOIN pg_type t ON t.oid = used.oid WHERE t.typtype = 'c'
		UNION ALL
		SELECT used.rel, used.col, s.name, used.oid, used.oid, format_type(used.oid, NULL), s.reset_val FROM used JOIN pg_settings s
		ON s.name = CASE WHEN used.oid = 'money'::regtype THEN 'lc_monetary'
			WHEN used.oid = ANY ('{regclass,regproc,regprocedure,regoper,regoperator,regtype,regconfig,regdictionary,regcollation}'::regtype[]) THEN 'search_path' END`, oids)
	if err != nil {
		return classify("look up the types of the tables' columns", err)
	}
	var oid uint32
	var column, text string
	var of textOf
	_, err = pgx.ForEachRow(rows, []any{&oid, &column, &of.class, &of.oid, &of.typ, &of.name, &text}, func() error {
		if targets[oid].Has(column) {
			byOID[oid].texts[of] = text
		}
		return nil
	})
	if err != nil {
		return classify("look up the types of the tables' columns", err)
	}
	return nil
}

// changed says what is different now of what the rows that were delivered
// depended on, "" for nothing.
func (b *baseline) changed(now *baseline) string {
	for _, name := range slices.Sorted(maps.Keys(b.columns)) {
		was := b.columns[name]
		col, still := now.columns[name]
		switch {
		case !was.has:
		case !still: // dropped or renamed, which the stream tells
		case col.number != was.number:
			return fmt.Sprintf("column %q is another one than it was: it was dropped and made anew, or names of columns were exchanged", name)
		case was.carried && !col.carried:
			return fmt.Sprintf("the publication's column list leaves out column %q now, so it is NULL in the Feldera table in every row that changes", name)
		case was.carried && was.generated != col.generated && was.generated != "" && col.generated != "":
			return fmt.Sprintf("the generated column %q has another expression", name)
		}
	}
	if b.filter != now.filter {
		return fmt.Sprintf("the publication's row filter is now %s and was %s: rows that only one of the two lets through are not in the stream", orNone(now.filter), orNone(b.filter))
	}
	for of, was := range b.texts {
		text, still := now.texts[of]
		switch {
		case !still || text == was:
		case of.class == classEnum:
			return fmt.Sprintf("label %s of type %s is now %s", strconv.Quote(was), of.name, strconv.Quote(text))
		case of.class == classComposite:
			return fmt.Sprintf("the composite type %s has other attributes", of.name)
		default:
			return fmt.Sprintf("values of type %s are written by %s, which is now %s and was %s", of.name, of.class, strconv.Quote(text), strconv.Quote(was))
		}
	}
	if b.entry.putBack(now.entry) {
		return whyPutBack
	}
	return ""
}

func orNone(filter string) string {
	if filter == "" {
		return "none"
	}
	const most = 200
	if len(filter) > most {
		return strings.ToValidUTF8(filter[:most], "") + "…"
	}
	return filter
}

// addedSince gives the columns that rows from before lack: what came with values
// for them, or had another name, or was not published.
func (b *baseline) addedSince(now *baseline) (added []string) {
	numbers := make(map[int16]bool, len(b.columns))
	for _, col := range b.columns {
		numbers[col.number] = true
	}
	for name, col := range now.columns {
		was, had := b.columns[name]
		if col.has && (!had && (col.filled || numbers[col.number]) || had && !was.carried && col.carried) {
			added = append(added, name)
		}
	}
	slices.Sort(added)
	return added
}

// fold takes in what came since, so that it is judged as it was when it was seen
// first (a DEFAULT that a column gets later changes no row), and watched from
// then on. What went stays, since what comes under its name is another.
func (b *baseline) fold(now *baseline) {
	maps.Copy(b.columns, now.columns)
	maps.Copy(b.texts, now.texts)
	b.entry = now.entry
}

// keepUp takes a table as a look without a fault has found it into the state, for
// the next start to compare with, and then into what the next look compares
// with. Columns that older rows lack make it one that differs, since no stream
// brings what is in them; that is no reason to stop, as nothing is wrong with the
// rows that come. What cannot be saved is tried again at the next look.
func (s *Source) keepUp(ctx context.Context, r *ready, name tableName, was, now *baseline) {
	now.parts = was.parts
	if t := r.trees[name]; t != nil {
		now.parts = t.present()
	}
	added, line := was.addedSince(now), now.remembered()
	st, err := s.keeper.get(ctx)
	if err != nil || st == nil || st.System == "" {
		return
	}
	known := st.Snapshot.table(name)
	switch {
	case known == nil: // no state is kept
		was.fold(now)
		return
	case known.Shape == "": // it is said already that it is another
		return
	case len(added) == 0 && known.Shape == line:
		was.fold(now)
		return
	}
	why, noted := whyAdded(added), false
	brought := false
	if len(added) > 0 {
		waiting, again := was.awaitCopy(st.Snapshot.copyOf(name), strings.Join(added, "\x00"))
		if waiting {
			return
		}
		brought = again
	}
	err = s.keeper.update(ctx, func(next *State) bool {
		if known := next.Snapshot.table(name); known == nil || known.Shape == "" {
			return false
		}
		next.Snapshot = next.Snapshot.clone()
		next.Snapshot.table(name).Shape = line
		if len(added) > 0 && !brought {
			next.differ(why, name)
		}
		noted = true
		return true
	})
	if err != nil {
		s.log.WarnContext(ctx, "the shape of a table could not be noted in the state, and is at the next look", "table", name.String(), "err", err)
		return
	}
	if !noted {
		return
	}
	was.fold(now)
	if len(added) == 0 || brought {
		return
	}
	s.sayAdded(ctx, name, why)
	if st, err := s.keeper.get(ctx); err == nil && st != nil {
		s.reportNotices(st)
	}
}

// awaitCopy tells whether a copy of the table is still to show if it brings the
// columns, and whether it does: one that reads on begins again with them, and one
// whose last rows are read already does not.
func (b *baseline) awaitCopy(job *copyJob, columns string) (waiting, brought bool) {
	switch {
	case job == nil:
		b.waits = nil
		return false, false
	case b.waits == nil || b.waits.job != job.ID || b.waits.columns != columns:
		b.waits = &awaitedCopy{columns: columns, job: job.ID, restarts: job.Restarts}
		return true, false
	case job.Restarts == b.waits.restarts:
		return true, false
	default:
		b.waits = nil
		return false, true
	}
}

// rowsUnchanged refuses changes of the catalogue that leave Feldera with other
// rows than the source has, without a change in the stream.
func (s *Source) rowsUnchanged(ctx context.Context, conn *pgx.Conn, r *ready) error {
	// One look at a time: the watcher's and that of a new connection can meet, and
	// the older one of two would hold what it has read against what the newer one
	// has left.
	select {
	case r.looking <- struct{}{}:
		defer func() { <-r.looking }()
	case <-ctx.Done():
		return ctx.Err()
	}
	now, err := s.readBaselines(ctx, conn, r)
	if err != nil {
		return err
	}
	for name, was := range r.baselines {
		if why := was.changed(now[name]); why != "" {
			return s.differs(ctx, &decode.Refusal{
				Reason: decode.ReasonGap, What: "source table", Where: name.String(),
				Why:      why + "; the rows that were there before are others now, without a change in the stream",
				Expected: "columns, types, row filter and column list as they were when pgsource started",
				Do:       "start pgsource, then run: pgsource resync " + name.schema + "." + name.name,
			}, name)
		}
	}
	for name, was := range r.baselines {
		s.keepUp(ctx, r, name, was, now[name])
	}
	return nil
}
