package wal

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// A partitioned table is carried under the name of its root. What the stream
// then does not say has to be looked for in the catalogue: which partitions
// there are, what their replica identities are (an old row is logged by that
// of the partition, and described by that of the root), and that one of them
// was emptied.

// partition is one table below a partitioned one.
type partition struct {
	oid      uint32
	name     string // quoted, with its schema
	leaf     bool
	identity string // pg_class.relreplident
	key      string // the columns of the identity index, for 'i'
	filenode uint32 // of a leaf
	// emptied: the leaf's file has no statistics, as after TRUNCATE or another
	// rewriting that counts no rows; VACUUM FULL and CLUSTER count them.
	emptied bool
	// made: it was created as a partition. One that was attached can have had
	// rows before.
	made bool
}

// treeLook is one look at what is below a table.
type treeLook struct {
	parts map[uint32]partition
	// view is what it sees, end the end of the last record in the WAL, which lies
	// behind the commit of all that it sees. A standby has no view.
	view *view
	end  uint64
}

// tree is what is known of one partitioned table. A table that is not
// partitioned has none.
type tree struct {
	mu    sync.Mutex
	parts map[uint32]partition
	// view is of the look from which parts is, nil on a standby.
	view *view
	// emptied are leaves that were found emptied, with the position at which the
	// stream must have brought the TRUNCATE of the root, if there was one.
	emptied map[uint32]uint64
	// truncates are the transactions that truncated the root, as far as the stream
	// has brought them: the last ones, in order of their commits.
	truncates []uint32
}

// maxTruncates bounds what is kept of a root's TRUNCATEs: those of more than two
// looks. Of more, the older ones are seen by the last look.
const maxTruncates = 64

// noteTruncate takes a transaction that truncates the root. It is called before
// the position of its commit counts as received.
func (t *tree) noteTruncate(xid uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.truncates) == maxTruncates {
		t.truncates = slices.Delete(t.truncates, 0, 1)
	}
	t.truncates = append(t.truncates, xid)
}

// present gives the partitions of the last look.
func (t *tree) present() map[uint32]partition {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.parts
}

// noteTruncates tells the trees of their roots' TRUNCATEs.
func (r *ready) noteTruncates(tx *transaction) {
	if len(tx.truncated) == 0 {
		return
	}
	for name, t := range r.trees {
		if tx.truncated[r.oids[name]] > 0 {
			t.noteTruncate(tx.xid)
		}
	}
}

// readTree reads what is below a table; nil for one that is not partitioned.
// File and statistics come from one row of the catalogue, as of one moment:
// pg_relation_filenode would look at a later one, where VACUUM FULL has just
// put another file beside statistics that this query does not see yet.
// The view is that of the query, and the position is asked for while it runs.
func readTree(ctx context.Context, conn *pgx.Conn, root uint32) (*treeLook, error) {
	rows, err := conn.Query(ctx, `
		SELECT c.oid, quote_ident(n.nspname) || '.' || quote_ident(c.relname), t.isleaf, c.relreplident::text,
		       coalesce((SELECT string_agg(a.attname, ',' ORDER BY a.attname) FROM pg_index i
		         JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey::int2[]) WHERE i.indrelid = c.oid AND i.indisreplident), ''),
		       c.relfilenode, c.reltuples < 0,
		       coalesce((SELECT h.xmin = a.xmin FROM pg_inherits h, pg_attribute a WHERE h.inhrelid = c.oid AND a.attrelid = c.oid AND a.attnum = -1), true),
		       CASE WHEN pg_is_in_recovery() THEN '' ELSE pg_current_snapshot()::text END,
		       CASE WHEN pg_is_in_recovery() THEN '0/0' ELSE pg_current_wal_insert_lsn()::text END,
		       current_setting('wal_block_size')::int8, pg_size_bytes(current_setting('wal_segment_size'))
		FROM pg_partition_tree($1::oid) t JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace`, root)
	if err != nil {
		return nil, classify("look up partitions", err)
	}
	found := &treeLook{parts: make(map[uint32]partition)}
	partitioned := false
	var seen, at string
	var block, segment uint64
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (p partition, err error) {
		return p, row.Scan(&p.oid, &p.name, &p.leaf, &p.identity, &p.key, &p.filenode, &p.emptied, &p.made, &seen, &at, &block, &segment)
	})
	if err != nil {
		return nil, classify("look up partitions", err)
	}
	for _, p := range list {
		partitioned = partitioned || p.oid != root || !p.leaf
		found.parts[p.oid] = p
	}
	if !partitioned {
		return nil, nil //nolint:nilnil // no tree is an answer
	}
	if seen == "" {
		return found, nil
	}
	v, err := parseView(seen)
	if err != nil {
		return nil, err
	}
	var end LSN
	if err := end.UnmarshalText([]byte(at)); err != nil {
		return nil, fmt.Errorf("read the server's position: %w", err)
	}
	found.view, found.end = &v, withoutHeader(uint64(end), block, segment)
	return found, nil
}

// checkIdentities refuses partitions whose replica identity is another than
// the root's. The server logs the old row by the partition's and writes it in
// the root's form: under FULL above DEFAULT, every column outside the key
// would arrive as NULL.
func checkIdentities(root uint32, parts map[uint32]partition) error {
	top := parts[root]
	for _, p := range parts {
		if !p.leaf || p.identity == top.identity && (p.identity != "i" || p.key == top.key) {
			continue
		}
		do := map[string]string{"d": "DEFAULT", "f": "FULL", "n": "NOTHING", "i": "USING INDEX …, over " + top.key}[top.identity]
		return &decode.Refusal{
			Reason: decode.ReasonIdentity, What: "partition", Where: p.name,
			Why:      fmt.Sprintf("its replica identity is %s, that of %s is %s: old rows would arrive with values missing", identityName(p), top.name, identityName(top)),
			Expected: "one replica identity for the partitioned table and all its partitions; ALTER TABLE of the former does not reach the latter, and new ones begin with DEFAULT",
			Do:       fmt.Sprintf("ALTER TABLE %s REPLICA IDENTITY %s", p.name, do),
		}
	}
	return nil
}

func identityName(p partition) string {
	name := map[string]string{"d": "DEFAULT", "f": "FULL", "n": "NOTHING", "i": "an index over " + p.key}[p.identity]
	if name == "" {
		return p.identity
	}
	return name
}

// checkPartitions looks at one mapped table before streaming.
func (s *Source) checkPartitions(ctx context.Context, conn *pgx.Conn, r *ready, rel *decode.Relation) error {
	found, err := readTree(ctx, conn, rel.ID)
	if err != nil || found == nil {
		return err
	}
	var viaRoot bool
	err = conn.QueryRow(ctx, `SELECT pubviaroot FROM pg_publication WHERE pubname = $1`, s.cfg.Publication).Scan(&viaRoot)
	switch {
	case errors.Is(err, pgx.ErrNoRows): // it will be made with it
	case err != nil:
		return classify("look up the publication", err)
	case !viaRoot:
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "publication", Where: s.cfg.Publication,
			Why:      fmt.Sprintf("%s is partitioned, and the publication sends the rows of its partitions under their own names", rel),
			Expected: "rows under the name of the partitioned table",
			Do: fmt.Sprintf("ALTER PUBLICATION %s SET (publish_via_partition_root = true), which holds for changes made after it: changes that are in the WAL already keep the partitions' names, so make the slot anew if there are any; or list the partitions in PGSOURCE_TABLES by their own names, and not this one",
				quoteIdentifier(s.cfg.Publication)),
		}
	}
	if err := checkIdentities(rel.ID, found.parts); err != nil {
		return err
	}
	if r.trees == nil {
		r.trees = make(map[tableName]*tree)
	}
	r.trees[nameOf(rel)] = &tree{parts: found.parts, view: found.view}
	return nil
}

// partitionsUnchanged looks whether partitions came and went in a way that
// changed the table's rows without a word in the stream. What was found is the
// new state, so that each change is said once. received is how far the stream
// had come before.
func (s *Source) partitionsUnchanged(ctx context.Context, conn *pgx.Conn, name tableName, root uint32, t *tree, received uint64) error {
	now, err := readTree(ctx, conn, root)
	if err != nil {
		return err
	}
	if now == nil {
		now = &treeLook{parts: map[uint32]partition{}}
	}
	what := t.take(now, received)
	if err := checkIdentities(root, now.parts); err != nil {
		return s.differs(ctx, asGap(err), name)
	}
	if len(what) == 0 {
		return nil
	}
	if s.cfg.IgnorePartitions {
		s.cfg.Metrics.partitionChanges.Add(float64(len(what)))
		s.log.WarnContext(ctx, "rows of partitions came or went without changes in the stream, and that is ignored as PGSOURCE_PARTITIONS=ignore says",
			"table", name.String(), "changes", strings.Join(what, "; "))
		return nil
	}
	return s.differs(ctx, &decode.Refusal{
		Reason: decode.ReasonGap, What: "partitioned table", Where: name.String(), Why: strings.Join(what, "; "),
		Expected: "partitions that are created as such and whose rows go by DELETE or by TRUNCATE of the whole table",
		Do:       "start pgsource, then run: pgsource resync " + name.schema + "." + name.name + ", which deletes what the source does not have any more and adds what is missing; or set PGSOURCE_PARTITIONS=ignore, where partitions are dropped for good and Feldera may keep their rows",
	}, name)
}

// take makes a look the new state, and tells what changed the table's rows
// without the stream since the one before.
func (t *tree) take(now *treeLook, received uint64) (what []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var emptied []partition
	left := 0
	for oid, old := range t.parts {
		p, still := now.parts[oid]
		switch {
		case !old.leaf:
		case !still:
			what = append(what, fmt.Sprintf("partition %s was detached or dropped, and its rows stay in Feldera", old.name))
		default:
			left++
			if p.filenode != old.filenode && p.emptied {
				emptied = append(emptied, p)
			}
		}
	}
	for oid, p := range now.parts {
		if _, had := t.parts[oid]; !had && !p.made {
			what = append(what, fmt.Sprintf("%s was attached, and rows that were in it before are not part of the stream", p.name))
		}
	}
	alone, waits := t.alone(emptied, left, now, received)
	for _, p := range alone {
		what = append(what, fmt.Sprintf("partition %s was truncated or rewritten by itself, which the stream does not tell", p.name))
	}
	parts := maps.Clone(now.parts)
	for oid := range waits {
		parts[oid] = t.parts[oid] // found again at the next look
	}
	t.parts, t.emptied = parts, waits
	if len(waits) == 0 {
		t.view = now.view
		t.truncates = slices.DeleteFunc(t.truncates, func(xid uint32) bool { return t.view != nil && t.view.sees(t.view.widen(xid)) })
	}
	slices.Sort(what)
	const most = 20
	if len(what) > most {
		what = append(what[:most], fmt.Sprintf("and %d more", len(what)-most))
	}
	return what
}

// alone tells which of the leaves that were emptied were not emptied by a
// TRUNCATE of the root, and for which that is not known yet:
//
//	TRUNCATE commits → the catalogue shows it → the stream has brought all up to
//	a position that was asked for after that → a TRUNCATE of the root, by a
//	transaction that the look before did not see, was in it or there was none
//
// A leaf that was truncated alone besides is not told from it.
func (t *tree) alone(emptied []partition, left int, now *treeLook, received uint64) (alone []partition, waits map[uint32]uint64) {
	if t.view == nil || now.view == nil {
		// A standby. All at once is taken for a TRUNCATE of the root.
		if len(emptied) == left {
			return nil, nil
		}
		return emptied, nil
	}
	if slices.ContainsFunc(t.truncates, func(xid uint32) bool { return !t.view.sees(t.view.widen(xid)) }) {
		return nil, nil
	}
	for _, p := range emptied {
		at, known := t.emptied[p.oid]
		if !known {
			at = now.end
		}
		if received >= at {
			alone = append(alone, p)
			continue
		}
		if waits == nil {
			waits = make(map[uint32]uint64)
		}
		waits[p.oid] = at
	}
	return alone, waits
}

// checkUnique refuses, under REPLICA IDENTITY FULL, a Feldera key over columns
// that the source does not hold unique: rows that differ in the source would
// be one in Feldera. Under the other identities the stream itself says what
// the key is, and the encoder compares.
func checkUnique(ctx context.Context, conn *pgx.Conn, rel *decode.Relation, key []string) error {
	if rel.Identity != decode.IdentityFull || len(key) == 0 {
		return nil
	}
	indexes, err := readUnique(ctx, conn, rel)
	if err != nil {
		return err
	}
	if feldera.Identifies(key, indexes) {
		return nil
	}
	columns := strings.Join(key, ", ")
	return &decode.Refusal{
		Reason: decode.ReasonIdentity, What: "source table", Where: rel.String(),
		Why:      "the Feldera table's PRIMARY KEY (" + columns + ") is not unique in it, so rows of the source would overwrite each other",
		Expected: "a unique index over columns of the Feldera table's PRIMARY KEY, which is not deferrable",
		Do:       fmt.Sprintf("CREATE UNIQUE INDEX ON %s (%s); or declare another key, or none, in Feldera", nameOf(rel), columns),
	}
}

// readUnique gives the columns of each unique index that holds for all rows and
// at every moment. A deferrable one lets two rows have one key until the end of
// their transaction, and there the second of them would take the place of the
// first.
func readUnique(ctx context.Context, conn *pgx.Conn, rel *decode.Relation) ([][]string, error) {
	rows, err := conn.Query(ctx, `
		SELECT array_agg(a.attname::text) FROM pg_index i
		CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, n)
		JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
		WHERE i.indrelid = $1 AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL AND k.n <= i.indnkeyatts
		GROUP BY i.indexrelid`, rel.ID)
	if err != nil {
		return nil, classify("look up the unique indexes of "+rel.String(), err)
	}
	indexes, err := pgx.CollectRows(rows, pgx.RowTo[[]string])
	if err != nil {
		return nil, classify("look up the unique indexes of "+rel.String(), err)
	}
	return indexes, nil
}
