package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// This file is what stays to be said when pgsource stops since the source's
// tables have changed beside the stream. The stop is seen by whoever looks; an
// init system starts it again, and the next process finds nothing wrong any
// more, since it knows the tables only as they are then. So each such table is
// in the state until a resync has read it or a person has accepted it.

// DifferingTable is a table whose rows the pipeline has otherwise than the source,
// without a change in the stream that would mend it.
type DifferingTable struct {
	// Schema and Table are the source's.
	Schema string `json:"schema"`
	Table  string `json:"table"`
	// Why is what made it differ, cut off at maxDifferenceText bytes.
	Why     string    `json:"why"`
	Noticed time.Time `json:"noticed_at"`
	// Order is its number among State.Events: a resync that began with a lower
	// one does not mend it.
	Order uint64 `json:"order"`
}

// maxDifferenceText bounds what is kept of the reasons for one table.
const maxDifferenceText = 400

func (d *DifferingTable) table() tableName { return tableName{d.Schema, d.Table} }

func cutOff(why string) string {
	if len(why) > maxDifferenceText {
		return strings.ToValidUTF8(why[:maxDifferenceText], "") + "…"
	}
	return strings.ToValidUTF8(why, "�") // nothing else can be saved
}

// differ adds tables: there is one entry for each table, with the reasons in
// their order, as far as they fit.
func (st *State) differ(why string, tables ...tableName) {
	why = cutOff(why)
	list := slices.Clone(st.Differing)
	order, now := st.event(), time.Now().UTC()
	for _, t := range tables {
		i := slices.IndexFunc(list, func(d DifferingTable) bool { return d.table() == t })
		if i < 0 {
			list = append(list, DifferingTable{Schema: t.schema, Table: t.name, Why: why, Noticed: now, Order: order})
			continue
		}
		if d := &list[i]; !strings.Contains(d.Why, why) {
			d.Why = cutOff(d.Why + "; then: " + why)
		}
		list[i].Noticed, list[i].Order = now, order
	}
	st.Differing = list
}

// differing gives those of the tables that are carried. One that is not mapped
// any more stays in the state, for the case that it comes back.
func (s *Source) differing(st *State) []DifferingTable {
	carried := namesOfTables(s.cfg.Tables)
	return slices.DeleteFunc(slices.Clone(st.Differing), func(d DifferingTable) bool { return !slices.Contains(carried, d.table()) })
}

// differs notes that tables differ, and gives the refusal that says so back. A
// state that cannot be saved is no reason to go on: the refusal itself is then
// all that is said, and the log says that too.
func (s *Source) differs(ctx context.Context, refusal error, tables ...tableName) error {
	return s.differsAnd(ctx, func(*knownTable) {}, refusal, tables...)
}

// madeAnewUnderway is differs for a table that is another one than it was.
func (s *Source) madeAnewUnderway(ctx context.Context, name tableName, refusal error) error {
	return s.differsAnd(ctx, func(t *knownTable) { t.OID = 0 }, refusal, name)
}

// differsAnd has the next start take the tables as it finds them, since what is
// said once need not be said again, and saves what also changes in the same step.
func (s *Source) differsAnd(ctx context.Context, also func(*knownTable), refusal error, tables ...tableName) error {
	refused, ok := errors.AsType[*decode.Refusal](refusal)
	if !ok || len(tables) == 0 || s.keeper == nil { // a check keeps no state
		return refusal
	}
	err := s.keeper.update(ctx, func(next *State) bool {
		if next.System == "" {
			return false // nothing is known of the source yet
		}
		next.differ(refused.Why, tables...)
		next.takeAnew(tables, also)
		return true
	})
	if err != nil {
		s.log.WarnContext(ctx, "that tables differ from the source could not be noted in the state: later starts may not say it", "tables", fmt.Sprint(tables), "err", err)
		return refusal
	}
	if st, getErr := s.keeper.get(ctx); getErr == nil && st != nil {
		s.reportNotices(st)
	}
	return refusal
}

// takeAnew forgets what the tables were.
func (st *State) takeAnew(tables []tableName, also func(*knownTable)) {
	if st.Snapshot == nil {
		return
	}
	st.Snapshot = st.Snapshot.clone()
	for i := range st.Snapshot.Tables {
		if t := &st.Snapshot.Tables[i]; slices.Contains(tables, tableName{t.Schema, t.Name}) {
			t.Shape = ""
			also(t)
		}
	}
}

// leftOutBefore gives a refusal of a start back, and notes the tables of which
// the publication leaves something out that a process before has carried: what was
// changed meanwhile is missing once it is mended. Tables that are new to the state
// miss nothing. strict is as for lacking.
func (s *Source) leftOutBefore(ctx context.Context, conn *pgx.Conn, r *ready, refusal error, strict bool) error {
	st, err := s.keeper.get(ctx)
	if _, ok := errors.AsType[*decode.Refusal](refusal); !ok || err != nil || st == nil {
		return refusal
	}
	without := s.lacking(ctx, conn, strict)
	for name, target := range r.tables {
		if known := st.Snapshot.table(name); known != nil && !slices.Contains(without, name) && s.listShortened(ctx, conn, name, target, known.Shape) {
			without = append(without, name)
		}
	}
	without = slices.DeleteFunc(without, func(name tableName) bool { return st.Snapshot.table(name) == nil })
	_ = s.differs(ctx, &decode.Refusal{Why: "the publication left out the table, an operation, or a column of its list while no pgsource ran"}, without...)
	return refusal
}

// lacking gives the tables of which the publication leaves out changes, where
// it is not as it should be: those that it lacks, or all where it lacks an
// operation or is gone. One that is in order was not a moment before, unless
// strict says that nobody has found that; then it gives none.
func (s *Source) lacking(ctx context.Context, conn *pgx.Conn, strict bool) []tableName {
	var whole bool
	err := conn.QueryRow(ctx, `SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate FROM pg_publication WHERE pubname = $1`, s.cfg.Publication).Scan(&whole)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && !whole {
		return namesOfTables(s.cfg.Tables)
	}
	missing, extra, compareErr := s.comparePublished(ctx, conn)
	if err != nil || compareErr != nil {
		return nil
	}
	if len(missing)+len(extra) == 0 && !strict {
		return namesOfTables(s.cfg.Tables)
	}
	return namesOfTables(missing)
}

// listShortened tells whether the publication's column list leaves out a column
// of the Feldera table now that it had by what the state knows of the table.
func (s *Source) listShortened(ctx context.Context, conn *pgx.Conn, name tableName, target *feldera.Table, line string) bool {
	published, err := readPublished(ctx, conn, s.cfg.Publication, Table{Schema: name.schema, Name: name.name})
	if err != nil || published == nil {
		return false
	}
	rows, err := conn.Query(ctx, `SELECT attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = $2 AND attnum > 0 AND NOT attisdropped`, name.schema, name.name)
	if err != nil {
		return false
	}
	columns, err := pgx.CollectRows(rows, pgx.RowTo[string])
	return err == nil && slices.ContainsFunc(columns, func(column string) bool {
		return target.Has(column) && wasCarried(line, column) && !slices.Contains(published, column)
	})
}

func namesOfTables(tables []Table) []tableName {
	names := make([]tableName, len(tables))
	for i, t := range tables {
		names[i] = tableName{t.Schema, t.Name}
	}
	return names
}

// describeDiffering words them for the check "state"; "" for none.
func describeDiffering(list []DifferingTable) string {
	const most = 4
	var said []string
	for i := range list[:min(len(list), most)] {
		d := &list[i]
		said = append(said, fmt.Sprintf("rows of %s differ from the source's since %s: %s", d.table(), d.Noticed.UTC().Format(time.RFC3339), d.Why))
	}
	if more := len(list) - len(said); more > 0 {
		said = append(said, fmt.Sprintf("and those of %d more tables, see: pgsource state show", more))
	}
	return strings.Join(said, "; ")
}

// resyncOf is the command that mends them.
func resyncOf(list []DifferingTable) string {
	if len(list) > maxNamed {
		return "pgsource resync -all"
	}
	run := "pgsource resync"
	for i := range list {
		run += " " + list[i].Schema + "." + list[i].Table
	}
	return run
}
