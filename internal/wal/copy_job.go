package wal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// CopyKind says what rows are read from the source for.
type CopyKind string

// The kinds of copies. They differ in who asked for them, not in what is done.
const (
	// CopySnapshot: the rows that were in a table before its changes were
	// streamed.
	CopySnapshot CopyKind = "snapshot"
	// CopyResync: the destination lost rows, or is not believed.
	CopyResync CopyKind = "resync"
	// CopyRepair: keys that were found to differ.
	CopyRepair CopyKind = "repair"
)

// Copy is a job: rows of one table are read at the source, merged with the
// stream, and brought to the destination in chunks. It outlives the process.
type Copy struct {
	Kind         CopyKind
	Schema, Name string
	// Keys are the rows to look at, nil for all of the table. Each is the texts of
	// the columns of the Feldera table's PRIMARY KEY, in the order in which the
	// table declares the columns, as Postgres reads them. A key that the source
	// has becomes an upsert, any other a delete, unless the stream says otherwise.
	Keys [][]string
}

// The bounds of a job, and of all that wait: they are kept in the state.
const (
	maxJobKeys     = 1000
	maxJobKeyBytes = 64 << 10
	maxJobs        = 64
	maxJobsBytes   = 512 << 10
)

// ErrCopiesFull: as many jobs wait as the state can hold. It is worth another
// attempt when one of them is done.
var ErrCopiesFull = errors.New("too many copies wait")

// snapshotState is what the state keeps of copies.
type snapshotState struct {
	// Tables are the mapped tables that this state knows. One that is not among
	// them was mapped later: its rows have not been carried.
	Tables []knownTable `json:"tables"`
	// Jobs are those that are not done, in their order.
	Jobs []copyJob `json:"jobs,omitzero"`
	// Pending: the state was begun with a slot that pgsource made, or with one that
	// it found, and which tables are copied has not been noted yet. It outlives a
	// start that is refused, or killed, before that.
	Pending pendingPlan `json:"pending,omitzero"`
	// Last is the highest number of a job.
	Last uint64 `json:"last_job"`
	// Quiet: no rows of a job can be on their way. A start that finds it false
	// waits until those can be applied no more.
	Quiet bool `json:"quiet"`
}

// pendingPlan is what a state was begun with.
type pendingPlan string

const (
	pendingMade  pendingPlan = "slot made"
	pendingFound pendingPlan = "slot found"
)

// begunWith gives what a state that begins now knows of copies.
func begunWith(slotMade bool) *snapshotState {
	if slotMade {
		return &snapshotState{Quiet: true, Pending: pendingMade}
	}
	return &snapshotState{Quiet: true, Pending: pendingFound}
}

// knownTable is a mapped table.
type knownTable struct {
	Schema string `json:"schema"`
	Name   string `json:"name"`
	// OID is the table's own, 0 where no start has noted it: a table that is made
	// anew has its name and another one.
	OID uint32 `json:"oid,omitzero"`
	// Shape is what it was at the last look, as baseline.remembered gives it; ""
	// where the next start is to take what it finds.
	Shape string `json:"shape,omitzero"`
	// Copied: all of its rows were copied once. Otherwise that is under way, or was
	// not wanted.
	Copied bool `json:"copied"`
	// At is what the stream had received when the last copy was done, of all of its
	// rows or of a list of keys. Rows is how many the last one of all brought, and
	// those of keys since, deletes among them: no acknowledged position stands for
	// what they did.
	At   LSN   `json:"copied_at_lsn,omitzero"`
	Rows int64 `json:"rows,omitzero"`
}

// copied takes note of a copy that is done, of all rows or of a list of keys.
func (t *knownTable) copied(j *copyJob, received LSN) {
	t.At = received
	if j.Keys != nil {
		t.Rows += j.Rows
		return
	}
	t.Copied, t.Rows = true, j.Rows
}

// copyJob is one Copy and how far it has got.
type copyJob struct {
	ID     uint64     `json:"id"`
	Kind   CopyKind   `json:"kind"`
	Schema string     `json:"schema"`
	Name   string     `json:"name"`
	Keys   [][]string `json:"keys,omitzero"`
	// After is the cursor: the key of the last row whose arrival is proven, in
	// the order of the index that is read; nil for none. Of a list of keys, Done
	// are the first ones that are.
	After []string `json:"after,omitzero"`
	Done  int      `json:"done,omitzero"`
	// Shape is what must not change between two chunks: the columns, and the
	// files that the rows are in.
	Shape *tableShape `json:"shape,omitzero"`
	// Settle: transactions below it must have ended before the first read, since
	// the stream may lack the beginning of those that wrote to the table before
	// it was published.
	Settle uint64 `json:"settle_xid,omitzero"`
	// Incarnation is the pipeline's process that has proven the cursor.
	Incarnation string    `json:"incarnation,omitzero"`
	Rows        int64     `json:"rows"`
	Total       int64     `json:"estimated_rows,omitzero"`
	Asked       time.Time `json:"asked_at"`
	// Restarts counts how often it has begun again.
	Restarts int `json:"restarts,omitzero"`
}

// tableShape is what a table's rows depend on beside its changes.
type tableShape struct {
	Columns string `json:"columns"` // a fingerprint, also of the key that is read along and the publication's filter
	// Files are the relfilenodes by the OID of table or partition; of very many
	// partitions, one fingerprint in Sum.
	Files map[string]uint32 `json:"files,omitzero"`
	Sum   string            `json:"sum,omitzero"`
}

func (j *copyJob) table() tableName { return tableName{j.Schema, j.Name} }

// beginAgain forgets what has got to the destination.
func (j *copyJob) beginAgain() {
	j.After, j.Done, j.Rows, j.Shape = nil, 0, 0, nil
	j.Restarts++
}

func (st *snapshotState) clone() *snapshotState {
	if st == nil {
		return &snapshotState{Quiet: true}
	}
	next := *st
	next.Tables, next.Jobs = slices.Clone(st.Tables), slices.Clone(st.Jobs)
	return &next
}

func (st *snapshotState) job(id uint64) *copyJob {
	for i := range st.Jobs {
		if st.Jobs[i].ID == id {
			return &st.Jobs[i]
		}
	}
	return nil
}

// know gives the entry of a table that the state knows.
func (st *snapshotState) know(t Table) *knownTable {
	if known := st.table(tableName{t.Schema, t.Name}); known != nil {
		return known
	}
	st.Tables = append(st.Tables, knownTable{Schema: t.Schema, Name: t.Name})
	return &st.Tables[len(st.Tables)-1]
}

// table gives what is known of a mapped table, to be changed in a clone only;
// nil for nothing.
func (st *snapshotState) table(name tableName) *knownTable {
	if st == nil {
		return nil
	}
	for i := range st.Tables {
		if t := &st.Tables[i]; t.Schema == name.schema && t.Name == name.name {
			return t
		}
	}
	return nil
}

// copyOf gives the copy of a table's existing rows that is not done, nil for none.
func (st *snapshotState) copyOf(name tableName) *copyJob {
	for i := range st.Jobs {
		if j := &st.Jobs[i]; j.Kind == CopySnapshot && j.table() == name {
			return j
		}
	}
	return nil
}

// valid refuses what this program would not have written.
func (st *snapshotState) valid() error {
	if st == nil {
		return nil
	}
	for i := range st.Jobs {
		j := &st.Jobs[i]
		if j.ID > st.Last || j.Done < 0 || j.Done > len(j.Keys) || len(j.Keys) > maxJobKeys || len(j.Schema) > maxStateText || len(j.Name) > maxStateText {
			return fmt.Errorf("job %d of it is none that was asked for", j.ID)
		}
	}
	return nil
}

// add takes a job on.
func (st *snapshotState) add(c *Copy, settle uint64) *copyJob {
	st.Last++
	st.Jobs = append(st.Jobs, copyJob{
		ID: st.Last, Kind: c.Kind, Schema: c.Schema, Name: c.Name, Keys: c.Keys, Settle: settle, Asked: time.Now().UTC(),
	})
	return &st.Jobs[len(st.Jobs)-1]
}

// SnapshotMode says which tables' existing rows are copied.
type SnapshotMode uint8

const (
	// SnapshotAuto: those of tables whose changes this state has followed from
	// the beginning: all when pgsource makes the slot, and later those that are
	// added. The default.
	SnapshotAuto SnapshotMode = iota
	// SnapshotInitial: also those of a slot that was there before the state.
	SnapshotInitial
	// SnapshotNever: none.
	SnapshotNever
	// SnapshotOnly: of all tables that were not copied before; then it ends.
	SnapshotOnly
)

// wantsCopy tells whether a table that a state does not know is copied. first
// says that the state begins now.
func (s *Source) wantsCopy(first, slotMade bool) bool {
	switch s.cfg.Snapshot {
	case SnapshotNever:
		return false
	case SnapshotInitial, SnapshotOnly:
		return true
	case SnapshotAuto:
	}
	if _, none := s.cfg.State.(noStore); none {
		return false // a restart in the middle would not know of it
	}
	return !first || slotMade
}

// planCopies compares the mapped tables with those that the state knows, and
// takes on a job for each one whose existing rows are to be carried.
func (s *Source) planCopies(ctx context.Context, conn *pgx.Conn, r *ready) error {
	for {
		if planned, err := s.tryPlanCopies(ctx, conn, r); planned || err != nil {
			return err
		}
	}
}

// tryPlanCopies is planCopies; false where a job was taken on meanwhile, which
// the plan would lose.
func (s *Source) tryPlanCopies(ctx context.Context, conn *pgx.Conn, r *ready) (planned bool, err error) {
	st, err := s.keeper.get(ctx)
	if err != nil || st == nil {
		return true, err
	}
	next, wanted := s.plannedTables(st.Snapshot)
	past := next.identify(r, s.cfg.IgnorePartitions)
	empty, err := s.checkCopies(ctx, conn, r, next, wanted)
	if err != nil {
		return false, err
	}
	var settle uint64
	if len(wanted) > 0 {
		if settle, err = nextXID(ctx, conn); err != nil {
			return false, err
		}
	}
	for _, t := range wanted {
		if empty[tableName{t.Schema, t.Name}] {
			next.know(t).Copied = true // nothing was in it before the slot
			continue
		}
		next.add(&Copy{Kind: CopySnapshot, Schema: t.Schema, Name: t.Name}, settle)
	}
	err = s.keeper.must(ctx, func(to *State) bool {
		was := to.Snapshot
		if planned = was.last() == st.Snapshot.last(); !planned {
			return false
		}
		to.Snapshot = next
		to.Resyncs = withoutJobs(to.Resyncs, was, next)
		past.note(to)
		return was == nil || was.Pending != next.Pending || !slices.Equal(was.Tables, next.Tables) || len(was.Jobs) != len(next.Jobs) || was.Last != next.Last
	})
	if err == nil && planned {
		s.sayGivenUp(ctx, st.Snapshot, next)
		if st.Snapshot != nil && st.Snapshot.Pending == pendingFound && len(wanted) == 0 {
			s.log.WarnContext(ctx, "the slot was there before the state: existing rows of the tables are not copied, since whoever made it is taken to have loaded them", "slot", s.cfg.Slot, "otherwise", "pgsource resync -all, or PGSOURCE_SNAPSHOT=only")
		}
		s.copies.changed()
		s.showCopies(nil, 0, 0)
	}
	if err == nil && planned {
		past.say(ctx, s)
		err = past.refusal()
	}
	return planned && err == nil, err
}

// sayGivenUp names the copies that a plan has taken out.
func (s *Source) sayGivenUp(ctx context.Context, was, next *snapshotState) {
	if was == nil {
		return
	}
	for i := range was.Jobs {
		if j := &was.Jobs[i]; next.job(j.ID) == nil {
			s.log.WarnContext(ctx, "a copy is given up: its table is not carried any more, has lost its key in Feldera, or is not to be copied",
				"kind", string(j.Kind), "table", j.table().String(), "rows", j.Rows, "keys", len(j.Keys))
		}
	}
}

// last is the number of the job taken on last, 0 for none.
func (st *snapshotState) last() uint64 {
	if st == nil {
		return 0
	}
	return st.Last
}

// plannedTables gives the state with the tables as they are mapped now, and the
// tables whose existing rows are to be carried and are not yet.
func (s *Source) plannedTables(was *snapshotState) (next *snapshotState, wanted []Table) {
	next = was.clone()
	pending := next.Pending
	next.Pending = ""
	mapped := func(schema, name string) bool {
		return slices.ContainsFunc(s.cfg.Tables, func(t Table) bool { return t.Schema == schema && t.Name == name })
	}
	// A table that comes back has changed meanwhile, unseen.
	next.Tables = slices.DeleteFunc(next.Tables, func(t knownTable) bool { return !mapped(t.Schema, t.Name) })
	next.Jobs = slices.DeleteFunc(next.Jobs, func(j copyJob) bool {
		return !mapped(j.Schema, j.Name) || (j.Kind == CopySnapshot && s.cfg.Snapshot == SnapshotNever)
	})
	old := was == nil // a state of a version that made no copies
	for _, t := range s.cfg.Tables {
		at := slices.IndexFunc(next.Tables, func(k knownTable) bool { return k.Schema == t.Schema && k.Name == t.Name })
		busy := slices.ContainsFunc(next.Jobs, func(j copyJob) bool { return j.Kind == CopySnapshot && j.Schema == t.Schema && j.Name == t.Name })
		want := at < 0 && !old && s.wantsCopy(pending != "", pending == pendingMade)
		if s.cfg.Snapshot == SnapshotOnly {
			want = !busy && (at < 0 || !next.Tables[at].Copied)
		}
		if at < 0 {
			next.Tables = append(next.Tables, knownTable{Schema: t.Schema, Name: t.Name})
		}
		if want {
			wanted = append(wanted, t)
		}
	}
	return next, wanted
}

// checkBeforeMaking refuses a copy that cannot be made before publication and
// slot are: they would be left behind, and from then on the slot keeps WAL, and
// Postgres refuses updates of published tables that have no identity.
//
// A table that is empty here and has rows when the slot is made is refused after
// that all the same.
func (s *Source) checkBeforeMaking(ctx context.Context, conn *pgx.Conn, st *State, r *ready) error {
	if !s.cfg.Create {
		return nil
	}
	var publication, slot bool
	err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_publication WHERE pubname = $1), EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $2)`,
		s.cfg.Publication, s.cfg.Slot).Scan(&publication, &slot)
	if err != nil {
		return classify("look up publication and slot", err)
	}
	if publication {
		return nil // nothing is made beside it
	}
	_, err = s.checkPlanned(ctx, conn, st, r, !slot)
	return err
}

// checkPlanned refuses what cannot be copied of what planCopies would plan, and
// says how much that is. makes says that the slot is yet to be made.
func (s *Source) checkPlanned(ctx context.Context, conn *pgx.Conn, st *State, r *ready, makes bool) (string, error) {
	was := begunWith(makes)
	if st != nil {
		was = st.Snapshot
	}
	next, wanted := s.plannedTables(was)
	ahead := *r
	ahead.slotMade = makes
	empty, err := s.checkCopies(ctx, conn, &ahead, next, wanted)
	if err != nil {
		return "", err
	}
	n := len(next.Jobs)
	for _, t := range wanted {
		if !empty[tableName{t.Schema, t.Name}] {
			n++
		}
	}
	if n == 0 {
		return "the next start has no rows to copy", nil
	}
	return fmt.Sprintf("tables whose rows are yet to be copied, and can be: %d", n), nil
}

// checkCopies refuses, before anything streams, copies that cannot be made, all
// of them at once. empty are tables that had no row when the slot was made: there
// is nothing to copy.
func (s *Source) checkCopies(ctx context.Context, conn *pgx.Conn, r *ready, st *snapshotState, wanted []Table) (empty map[tableName]bool, err error) {
	tables := slices.Clone(wanted)
	// A table that has lost its key since: its resync is refused where it goes on,
	// and takes nobody else down.
	st.Jobs = slices.DeleteFunc(st.Jobs, func(j copyJob) bool {
		return j.Kind != CopySnapshot && refuseKeyless(string(j.Kind), r.tables[j.table()], j.table()) != nil
	})
	for i := range st.Jobs {
		tables = append(tables, Table{Schema: st.Jobs[i].Schema, Name: st.Jobs[i].Name})
	}
	empty = make(map[tableName]bool)
	var standby bool
	if len(tables) > 0 {
		if err := conn.QueryRow(ctx, `SELECT pg_is_in_recovery()`).Scan(&standby); err != nil {
			return nil, classify("ask whether the server is a standby", err)
		}
	}
	var findings []error
	for _, t := range tables {
		name := tableName{t.Schema, t.Name}
		err := checkReadable(ctx, conn, name)
		if err == nil && r.slotMade {
			empty[name], err = isEmpty(ctx, conn, name, r.trees[name] != nil)
		}
		if err == nil && !empty[name] {
			err = s.checkCopy(ctx, conn, r, name, standby)
		}
		if _, refused := errors.AsType[*decode.Refusal](err); err != nil && !refused {
			return nil, err
		}
		if err != nil && len(findings) < maxCopyFindings {
			findings = append(findings, err)
		}
	}
	return empty, errors.Join(findings...)
}

// maxCopyFindings bounds how many tables a refusal names.
const maxCopyFindings = 20

// checkReadable refuses a table of which the role may not read every row. Rights
// on all columns are not enough: the table has to be locked.
func checkReadable(ctx context.Context, conn *pgx.Conn, name tableName) error {
	var may, hidden bool
	err := conn.QueryRow(ctx, `SELECT has_table_privilege($1, 'SELECT'), row_security_active($1)`, name.String()).Scan(&may, &hidden)
	role := quoteIdentifier(conn.Config().User)
	r := &decode.Refusal{Reason: decode.ReasonSetup, What: "snapshot", Where: "source table " + name.String()}
	switch {
	case err != nil:
		return classify("look up the rights on "+name.String(), err)
	case !may:
		r.Why, r.Expected = "the role may not read it, which streaming does not need and copying its rows does", "SELECT on every table that is copied"
		r.Do = fmt.Sprintf("GRANT SELECT ON %s TO %s; or set PGSOURCE_SNAPSHOT=never", name, role)
		return r
	case hidden:
		r.Why, r.Expected = "row security holds for the role, and would hide rows from the copy", "a role that sees every row of the tables that are copied"
		r.Do = fmt.Sprintf("ALTER ROLE %s BYPASSRLS; or set PGSOURCE_SNAPSHOT=never", role)
		return r
	}
	return nil
}

// isEmpty tells whether a table has no row. A row that comes into it later, or
// is not visible yet, comes through a slot that was made before: making it has
// waited for whoever was writing then.
func isEmpty(ctx context.Context, conn *pgx.Conn, name tableName, partitioned bool) (empty bool, err error) {
	from := name.String()
	if !partitioned {
		from = "ONLY " + from
	}
	// Row security would hide rows instead of refusing them.
	_, err = conn.Exec(ctx, fmt.Sprintf(`BEGIN READ ONLY; SET LOCAL row_security = off; SET LOCAL lock_timeout = %d`, copyLockTimeout.Milliseconds()), pgx.QueryExecModeSimpleProtocol)
	if err == nil {
		err = conn.QueryRow(ctx, `SELECT NOT EXISTS (SELECT FROM `+from+`)`).Scan(&empty)
	}
	if _, endErr := conn.Exec(ctx, `ROLLBACK`); err == nil {
		err = endErr
	}
	if err != nil {
		return false, copyFault("look into table "+name.String(), err)
	}
	return empty, nil
}

func (s *Source) checkCopy(ctx context.Context, conn *pgx.Conn, r *ready, name tableName, standby bool) error {
	refuse := func(why, expected, do string) error {
		return &decode.Refusal{Reason: decode.ReasonSetup, What: "snapshot", Where: "source table " + name.String(), Why: why, Expected: expected, Do: do}
	}
	if standby {
		return refuse("the server is a standby, whose snapshots do not tell which transactions they see", "the primary while existing rows are copied",
			"read from the primary until the copy is done; or set PGSOURCE_SNAPSHOT=never")
	}
	if err := refuseKeyless(string(CopySnapshot), r.tables[name], name); err != nil {
		return err
	}
	_, _, err := chunkOrder(ctx, conn, r.shapes[name], nil) // whether there is one
	return err
}

// refuseKeyless refuses a copy into a table in which the stream does not find
// the rows that it brings.
func refuseKeyless(what string, target *feldera.Table, name tableName) error {
	refuse := func(why, expected, do string) error {
		return &decode.Refusal{Reason: decode.ReasonSetup, What: what, Where: "source table " + name.String(), Why: why, Expected: expected, Do: do}
	}
	otherwise := "load the rows by other means and set PGSOURCE_SNAPSHOT=never"
	if what != string(CopySnapshot) {
		otherwise = "load the rows by other means and say pgsource state accept -yes"
	}
	if !target.HasKey() {
		return refuse(fmt.Sprintf("the Feldera table %s has no PRIMARY KEY, so its existing rows cannot be copied beside the stream: a row that both bring would count twice", target.Spelling()),
			"a PRIMARY KEY in Feldera for every table that is copied", "declare it; or "+otherwise)
	}
	switch identity, err := target.Identity(); {
	case err != nil:
		return err
	case identity:
		return refuse("the Feldera table identifies rows by where each one stood in the WAL, and rows that were there before have no such place",
			"a PRIMARY KEY of the source's own in Feldera for every table that is copied", otherwise)
	}
	return nil
}

// nextXID gives the number of the next transaction: every one that has begun
// to write has a lower one.
func nextXID(ctx context.Context, conn *pgx.Conn) (uint64, error) {
	var current string
	var age int64
	err := conn.QueryRow(ctx, `SELECT pg_current_snapshot()::text, age('3'::xid)::int8`).Scan(&current, &age)
	if err != nil {
		return 0, classify("ask for the next transaction's number", err)
	}
	v, err := parseView(current)
	if err != nil {
		return 0, err
	}
	return v.widen(uint32(age + 3)), nil //nolint:gosec // the number's lower half
}

// copiesInDoubt tells whether another incarnation of the pipeline may lack what
// copies did. A progress row for a position behind the copy proves that it is
// there wherever the row is. A copy that is under way begins again with another
// incarnation, but where what it brought was proven durable it goes on behind its
// cursor, also in a pipeline that came back empty.
func (s *Source) copiesInDoubt(st *State) bool {
	if st.Snapshot == nil {
		return false
	}
	recorded := s.effectivelyOnce() && st.Progress != nil && !st.Progress.Pending
	return slices.ContainsFunc(st.Snapshot.Tables, func(t knownTable) bool {
		return t.Rows > 0 && (!recorded || st.Progress.Produced <= t.At)
	}) || !recorded && s.cfg.AckOn == ack.Durable && slices.ContainsFunc(st.Snapshot.Jobs, func(j copyJob) bool { return j.Rows > 0 })
}

// copies is what those who ask for copies and those who make them share.
type copies struct {
	mu   sync.Mutex
	wake chan struct{} // closed at the next change
}

// changed tells everybody who waits to look again.
func (c *copies) changed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.wake != nil {
		close(c.wake)
	}
	c.wake = nil
}

// next is closed at the next change after the call.
func (c *copies) next() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.wake == nil {
		c.wake = make(chan struct{})
	}
	return c.wake
}

// SubmitCopy takes a job on; when it returns, the job is durable where the
// state is, and is worked on behind those before it as soon as the stream runs.
// It may be called by any goroutine while Run runs and the first connection was
// made; several jobs for one table are done one after the other.
//
// Errors: ErrCopiesFull; a *decode.Refusal for a table that cannot be copied;
// ctx's.
func (s *Source) SubmitCopy(ctx context.Context, c *Copy) (id uint64, err error) {
	return s.submit(ctx, c, func(*State, uint64) {})
}

// submit is SubmitCopy; note puts into the state, in one with the job, what it is
// taken on for.
func (s *Source) submit(ctx context.Context, c *Copy, note func(next *State, id uint64)) (id uint64, err error) {
	if err := s.copyable(c); err != nil {
		return 0, err
	}
	own := *c
	own.Keys = make([][]string, len(c.Keys))
	for i, key := range c.Keys {
		own.Keys[i] = slices.Clone(key)
	}
	if c.Keys == nil {
		own.Keys = nil
	}
	var full error
	err = s.keeper.must(ctx, func(next *State) bool {
		if next.System == "" {
			full = errors.New("the source has not been connected to yet")
			return false
		}
		st := next.Snapshot.clone()
		bytes := keyBytes(own.Keys)
		for i := range st.Jobs {
			bytes += keyBytes(st.Jobs[i].Keys)
		}
		if full = nil; len(st.Jobs) >= max(maxJobs, len(s.cfg.Tables)+1) || bytes > maxJobsBytes {
			full = ErrCopiesFull
			return false
		}
		id = st.add(&own, 0).ID
		next.Snapshot = st
		note(next, id)
		return true
	})
	if err = errors.Join(err, full); err != nil {
		return 0, err
	}
	s.copies.changed()
	return id, nil
}

func keyBytes(keys [][]string) (n int) {
	for _, key := range keys {
		for _, part := range key {
			n += len(part) + 4
		}
	}
	return n
}

// copyable refuses a job that cannot be done.
func (s *Source) copyable(c *Copy) error {
	refuse := func(why, expected, do string) error {
		return &decode.Refusal{Reason: decode.ReasonSetup, What: string(c.Kind), Where: "table " + tableName{c.Schema, c.Name}.String(), Why: why, Expected: expected, Do: do}
	}
	switch {
	case c.Kind != CopySnapshot && c.Kind != CopyResync && c.Kind != CopyRepair:
		return fmt.Errorf("broken invariant: a copy of kind %q", c.Kind)
	case !slices.ContainsFunc(s.cfg.Tables, func(t Table) bool { return t.Schema == c.Schema && t.Name == c.Name }):
		return refuse("PGSOURCE_TABLES does not map it", "a mapped table", "correct the name, or map the table")
	case len(c.Keys) > maxJobKeys || keyBytes(c.Keys) > maxJobKeyBytes:
		return refuse(fmt.Sprintf("it names %d keys of %d bytes", len(c.Keys), keyBytes(c.Keys)), fmt.Sprintf("at most %d keys of %d bytes in one job", maxJobKeys, maxJobKeyBytes), "ask in several jobs")
	case c.Keys != nil && len(c.Keys) == 0:
		return refuse("it names no key", "keys, or all of the table", "")
	}
	return nil
}

// AwaitCopy waits until a job is not in the state any more: the evidence for its
// last row has come, or it was given up, since its table is not carried any more
// or has lost its key.
func (s *Source) AwaitCopy(ctx context.Context, id uint64) error {
	for {
		changed := s.copies.next()
		st, err := s.keeper.get(ctx)
		if err != nil {
			return err
		}
		if st == nil || st.Snapshot == nil || st.Snapshot.job(id) == nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// CopyProgress is how far one job has got.
type CopyProgress struct {
	ID       uint64    `json:"id"`
	Kind     CopyKind  `json:"kind"`
	Table    string    `json:"table"`
	Keys     int       `json:"keys,omitempty"` // of a list
	Rows     int64     `json:"rows"`
	Total    int64     `json:"estimated_rows,omitempty"`
	Percent  float64   `json:"percent"`
	After    []string  `json:"cursor,omitempty"`
	Asked    time.Time `json:"asked_at"`
	Restarts int       `json:"restarts,omitempty"`
}

// Copies gives the jobs that a state says are not done, in their order.
func (st *State) Copies() []CopyProgress {
	if st == nil || st.Snapshot == nil {
		return nil
	}
	list := make([]CopyProgress, 0, len(st.Snapshot.Jobs))
	for i := range st.Snapshot.Jobs {
		j := &st.Snapshot.Jobs[i]
		list = append(list, CopyProgress{
			ID: j.ID, Kind: j.Kind, Table: j.table().String(), Keys: len(j.Keys), Rows: j.Rows, Total: j.Total, Percent: j.percent(),
			After: j.After, Asked: j.Asked, Restarts: j.Restarts,
		})
	}
	return list
}

// CopiedTable is a mapped table and whether its existing rows were copied.
type CopiedTable struct {
	Table  string `json:"table"`
	Copied bool   `json:"copied"`
}

// CopiedTables gives the mapped tables that a state knows.
func (st *State) CopiedTables() []CopiedTable {
	if st == nil || st.Snapshot == nil {
		return nil
	}
	list := make([]CopiedTable, 0, len(st.Snapshot.Tables))
	for _, t := range st.Snapshot.Tables {
		list = append(list, CopiedTable{tableName{t.Schema, t.Name}.String(), t.Copied})
	}
	return list
}

// percent estimates how much of the job is done. It is 100 for none that is
// listed.
func (j *copyJob) percent() float64 {
	done, total := float64(j.Rows), float64(j.Total)
	if j.Keys != nil {
		done, total = float64(j.Done), float64(len(j.Keys))
	}
	if total <= 0 {
		return 0
	}
	return min(99.9, 100*done/total)
}

// oidKey is how an OID stands in a shape.
func oidKey(oid uint32) string { return strconv.FormatUint(uint64(oid), 10) }
