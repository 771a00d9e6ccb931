package snapshot_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"holdfast/internal/decode"
	"holdfast/internal/wal"
	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

const (
	accounts        = `CREATE TABLE accounts (id int PRIMARY KEY, v int NOT NULL, note text); INSERT INTO accounts SELECT i, 0, repeat('x', 100) FROM generate_series(1, 300) i`
	accountsProgram = `CREATE TABLE accounts (id INT NOT NULL PRIMARY KEY, v INT NOT NULL, note VARCHAR) WITH ('materialized' = 'true')`
	accountsRows    = `SELECT id::text, v::text, coalesce(note, '-') FROM accounts`
)

func accountsTable() wal.Table {
	return wal.Table{Schema: "public", Name: "accounts", Target: "accounts"}
}

func (w *world) equalAccounts() {
	w.t.Helper()
	w.equal(accountsRows, "accounts", "id", "v", "note")
}

// streaming starts a Source that has nothing to copy, and waits until it
// streams.
func (w *world) streaming() {
	w.t.Helper()
	w.cfg.Snapshot = wal.SnapshotNever
	w.start()
	w.walsender()
	w.exec(`INSERT INTO accounts VALUES (1000, 0, 'first')`)
	w.row(1000, 0)
}

func (w *world) submit(keys ...string) uint64 {
	w.t.Helper()
	c := &wal.Copy{Kind: wal.CopyResync, Schema: "public", Name: "accounts"}
	for _, k := range keys {
		c.Keys = append(c.Keys, []string{k})
	}
	id, err := w.source.SubmitCopy(w.t.Context(), c)
	if err != nil {
		w.t.Fatal(err)
	}
	return id
}

func (w *world) awaitJob(id uint64) {
	w.t.Helper()
	w.await("the job is done", func(ctx context.Context) (any, bool) {
		ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		err := w.source.AwaitCopy(ctx, id)
		return err, err == nil
	})
}

// row waits until the destination has a value of v for an account; -1 for none.
func (w *world) row(id int64, v int64) {
	w.t.Helper()
	w.await(fmt.Sprintf("account %d has %d", id, v), func(context.Context) (any, bool) {
		got := int64(-1)
		for _, r := range w.sim.Rows("accounts") {
			if fmt.Sprint(r["id"]) == fmt.Sprint(id) {
				_, _ = fmt.Sscan(fmt.Sprint(r["v"]), &got)
			}
		}
		return got, got == v
	})
}

// midway asks for a copy of the table, or of keys, and stops it when its first
// chunk has gone out: 100 is the key of a row in one of the chunks that are read
// later. The function it gives lets it go on.
func (w *world) midway(keys ...string) (id uint64, proceed func()) {
	w.t.Helper()
	hang, err := w.sim.Inject(felderasim.Fault{Kind: felderasim.Hang, Endpoint: "completion_status", Count: -1})
	if err != nil {
		w.t.Fatal(err)
	}
	id = w.submit(keys...)
	w.await("the first chunk has gone out", func(context.Context) (any, bool) {
		n := w.metric("pgsource_snapshot_rows_total")
		return n, n > 0 && w.sim.FaultHits(hang) > 0
	})
	return id, func() { w.sim.ClearFault(hang) }
}

// A commit stands in the WAL, and the stream has brought it, before anybody
// sees it. A read in this gap has the row as it was before; to believe it would
// put that back for good.
func TestCommitThatIsNotVisibleBeforeTheRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, accounts, accountsProgram, accountsTable())
	w.streaming()
	w.awaitJob(w.submit())
	id, proceed := w.midway()
	release := w.stuck()
	done := w.commit(`UPDATE accounts SET v = 1 WHERE id = 100`)
	w.waiting(1)
	w.row(100, 1) // the stream has brought it
	proceed()
	w.await("the read is given up, or believed", func(ctx context.Context) (any, bool) {
		n := w.metric("pgsource_snapshot_chunks_total", "result=discarded")
		st, err := w.source.LoadState(ctx)
		return n, n >= 2 || (err == nil && len(st.Copies()) == 0)
	})
	w.row(100, 1)
	release()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	w.awaitJob(id)
	w.caughtUp()
	w.equalAccounts()
	w.row(100, 1)
}

// The same gap, and the process that has delivered the commit is gone: its
// successor cannot know what was delivered before it, and suspects.
func TestCommitThatIsNotVisibleBeforeTheProcess(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, accounts, accountsProgram, accountsTable())
	w.streaming()
	w.awaitJob(w.submit())
	// Both are known to run only: they do not hold up a read.
	idle, err := w.pg.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = idle.Close(context.WithoutCancel(t.Context())) }()
	if _, err := idle.Exec(t.Context(), `BEGIN; UPDATE accounts SET v = 5 WHERE id = 3`); err != nil {
		t.Fatal(err)
	}
	release := w.stuck()
	done := w.commit(`UPDATE accounts SET v = 1 WHERE id = 7`)
	w.waiting(1)
	w.row(7, 1)
	w.caughtUp()
	if err := w.finish(); err != nil {
		t.Fatal(err)
	}
	w.start()
	w.await("the state is read", func(ctx context.Context) (any, bool) {
		got, err := harness.QueryValue[bool](ctx, w.pg, `SELECT active FROM pg_replication_slots`)
		return err, err == nil && got
	})
	id := w.submit()
	w.await("the read waits, or is believed", func(ctx context.Context) (any, bool) {
		n := w.metric("pgsource_snapshot_chunks_total", "result=waited")
		st, err := w.source.LoadState(ctx)
		return n, n >= 2 || (err == nil && len(st.Copies()) == 0)
	})
	w.row(7, 1)
	release()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	w.awaitJob(id)
	w.row(7, 1)
	w.row(3, 0)
	if _, err := idle.Exec(t.Context(), `COMMIT`); err != nil {
		t.Fatal(err)
	}
	w.caughtUp()
	w.equalAccounts()
}

// reads waits until rows of a job have been read and wait for the stream.
func (w *world) reads() {
	w.t.Helper()
	w.await("a chunk was read", func(ctx context.Context) (any, bool) {
		got, err := harness.QueryValue[int64](ctx, w.pg, `SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'holdfast/%' AND query = 'SELECT pg_current_xact_id()'`)
		return fmt.Sprint(got, err), err == nil && got > 0
	})
}

// A commit that stands in the WAL before the read, is not visible to it, and
// comes through the stream behind it. By its position alone it would count as
// seen, and the old row would go out behind it.
func TestCommitThatIsNotVisibleAfterTheRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, accounts, accountsProgram, accountsTable())
	w.streaming()
	w.awaitJob(w.submit())
	id, proceed := w.midway()
	resume := w.hold(w.walsender())
	release := w.stuck()
	done := w.commit(`UPDATE accounts SET v = 1 WHERE id = 100`)
	w.waiting(1)
	proceed()
	w.reads()
	resume()
	w.await("the row has gone out", func(ctx context.Context) (any, bool) {
		st, err := w.source.LoadState(ctx)
		if err != nil {
			return err, false
		}
		for _, c := range st.Copies() {
			if c.ID == id && c.Rows < 100 {
				return c, false
			}
		}
		return nil, true
	})
	w.row(100, 1)
	release()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	w.awaitJob(id)
	w.caughtUp()
	w.row(100, 1)
	w.equalAccounts()
}

// A key that the read does not have, and that is inserted before the deletes of
// what is absent go out, is no ghost: neither where the insert comes behind the
// read, nor where it is in the WAL before it and not visible to it.
func TestInsertAfterTheReadIsNoGhost(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, accounts, accountsProgram, accountsTable())
	w.streaming()
	w.awaitJob(w.submit())
	// 1030 is a ghost, 1031, 1032 and 1033 are about to come, 7 is stale, 8 is missing.
	w.put(`[{"insert":{"id":1030,"v":3}},{"insert":{"id":7,"v":-5}},{"delete":{"id":8}}]`)
	w.row(1030, 3)
	w.row(8, -1)
	var keys []string // more than a chunk
	for i := range 100 {
		keys = append(keys, fmt.Sprint(i+1))
	}
	id, proceed := w.midway(append(keys, "1030", "1031", "1032", "1033")...)
	resume := w.hold(w.walsender())
	release := w.stuck()
	inserted := w.commit(`INSERT INTO accounts VALUES (1032, 1, 'not visible')`)
	moved := w.commit(`UPDATE accounts SET id = 1033 WHERE id = 290`)
	w.waiting(2)
	proceed()
	w.reads()
	later := w.commit(`INSERT INTO accounts VALUES (1031, 1, 'new')`)
	w.waiting(3)
	resume()
	w.awaitJob(id)
	release()
	for _, done := range []<-chan error{inserted, moved, later} {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	w.caughtUp()
	w.row(1031, 1)
	w.row(1030, -1)
	w.row(7, 0)
	w.equalAccounts()
}

// Changes that stand in the WAL before the read, are not visible to it, and are
// delivered before its rows go out: a value that the stream leaves out, since it
// did not change, is completed from the copy, which goes out; both keys of a
// change of the key are the stream's, and so is what was deleted.
func TestChangesBetweenTheReadAndTheRows(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, `CREATE TABLE accounts (id int PRIMARY KEY, v int NOT NULL, note text); ALTER TABLE accounts ALTER COLUMN note SET STORAGE EXTERNAL;
		INSERT INTO accounts SELECT i, 0, repeat('x', CASE i WHEN 100 THEN 5000 ELSE 100 END) FROM generate_series(1, 300) i`,
		accountsProgram, accountsTable())
	w.streaming()
	id, proceed := w.midway()
	resume := w.hold(w.walsender())
	release := w.stuck()
	toasted := w.commit(`UPDATE accounts SET v = 1 WHERE id = 100`)
	moved := w.commit(`UPDATE accounts SET id = 2101 WHERE id = 101`)
	deleted := w.commit(`DELETE FROM accounts WHERE id = 102`)
	w.waiting(3)
	proceed()
	w.reads()
	resume()
	w.await("rows behind them have gone out", func(ctx context.Context) (any, bool) {
		st, err := w.source.LoadState(ctx)
		if err != nil {
			return err, false
		}
		for _, c := range st.Copies() {
			if c.ID == id && c.Rows < 103 {
				return c, false
			}
		}
		return nil, true
	})
	release()
	for _, done := range []<-chan error{toasted, moved, deleted} {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	w.awaitJob(id)
	w.caughtUp()
	w.equalAccounts()
}

// A key that only the pipeline had when both sides were read is asked for again
// before it is deleted: here its row has come between the two reads.
func TestInsertBetweenTheReadsOfAResync(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, accounts, accountsProgram, accountsTable())
	w.streaming()
	w.awaitJob(w.submit())
	w.put(`[{"insert":{"id":1030,"v":3}}]`)
	w.row(1030, 3)
	hang, err := w.sim.Inject(felderasim.Fault{Kind: felderasim.Hang, Endpoint: "query", Count: -1})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.source.AskResync(t.Context(), accountsTable()); err != nil {
		t.Fatal(err)
	}
	w.await("the source's keys were read", func(context.Context) (any, bool) {
		n := w.sim.FaultHits(hang)
		return n, n > 0
	})
	w.exec(`INSERT INTO accounts VALUES (1031, 1, 'new')`)
	w.row(1031, 1)
	w.sim.ClearFault(hang)
	w.await("the resync is done", func(context.Context) (any, bool) {
		n := w.metric("pgsource_resyncs_total", "result=done")
		return n, n == 1
	})
	if n := w.metric("pgsource_resync_ghost_keys_total"); n != 2 {
		t.Errorf("%v keys were looked at again, want the ghost and the row that came: the test proves nothing", n)
	}
	w.row(1030, -1)
	w.row(1031, 1)
	w.equalAccounts()
}

// The lock is taken before the snapshot: a table that is rewritten between the
// two has, for the old snapshot, no rows, and the files that it had before.
func TestRewriteWhileTheReadWaitsForItsLock(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, accounts, accountsProgram, accountsTable())
	w.streaming()
	id, proceed := w.midway()
	conn, err := w.pg.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	if _, err := conn.Exec(t.Context(), `BEGIN; ALTER TABLE accounts ALTER COLUMN v TYPE int USING v + 1000`); err != nil {
		t.Fatal(err)
	}
	proceed()
	w.await("the read waits for its lock", func(ctx context.Context) (any, bool) {
		got, err := harness.QueryValue[int64](ctx, w.pg, `SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'holdfast/%' AND wait_event_type = 'Lock'`)
		return fmt.Sprint(got, err), err == nil && got > 0
	})
	if _, err := conn.Exec(t.Context(), `COMMIT`); err != nil {
		t.Fatal(err)
	}
	w.awaitJob(id)
	w.caughtUp()
	w.equalAccounts()
}

// partly starts a Source and stops its copy when some of the rows are proven. The
// function it gives lets it go on.
func (w *world) partly() (proceed func()) {
	w.t.Helper()
	hang, err := w.sim.Inject(felderasim.Fault{Kind: felderasim.Hang, Endpoint: "completion_status", Skip: 20, Count: -1})
	if err != nil {
		w.t.Fatal(err)
	}
	w.start()
	w.await("some rows are copied", func(ctx context.Context) (any, bool) {
		st, err := w.source.LoadState(ctx)
		if err != nil || st == nil || len(st.Copies()) == 0 {
			return err, false
		}
		return st.Copies()[0].Rows, st.Copies()[0].Rows > 0 && w.sim.FaultHits(hang) > 0
	})
	return func() { w.sim.ClearFault(hang) }
}

// An ALTER that rewrites the table brings no changes: rows that were copied
// before have to be read again.
func TestRewriteBetweenTwoChunks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, `CREATE TABLE accounts (id int PRIMARY KEY, v int NOT NULL, note text); INSERT INTO accounts SELECT i, 0, repeat('x', 100) FROM generate_series(1, 5000) i`,
		accountsProgram, accountsTable())
	proceed := w.partly()
	w.exec(`ALTER TABLE accounts ALTER COLUMN v TYPE int USING v + 1000`)
	proceed()
	w.copied()
	w.caughtUp()
	if n := w.metric("pgsource_snapshot_chunks_total", "result=restarted"); n == 0 {
		t.Error("the copy did not begin again: the test proves nothing")
	}
	w.equalAccounts()
}

// Another row filter lets rows pass that are behind the cursor already: they have
// to be read again. It could as well have left out rows that are copied, which no
// copy takes away: that the table may differ is said first, and stays said.
func TestRowFilterBetweenTwoChunks(t *testing.T) {
	t.Parallel()
	const before, after = "id % 2 = 0", "id % 2 = 0 OR id < 1000"
	w := newWorld(t, nil, `CREATE TABLE accounts (id int PRIMARY KEY, v int NOT NULL, note text); INSERT INTO accounts SELECT i, 0, repeat('x', 100) FROM generate_series(1, 10000) i;;
		CREATE PUBLICATION holdfast FOR TABLE accounts WHERE (`+before+`);; SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')`,
		accountsProgram, accountsTable())
	w.cfg.Snapshot = wal.SnapshotInitial
	w.cfg.ShutdownTimeout = time.Second
	proceed := w.partly()
	if err := w.finish(); err != nil {
		t.Fatal(err)
	}
	w.exec(`ALTER PUBLICATION holdfast SET TABLE accounts WHERE (` + after + `)`)
	proceed()
	w.start()
	var refused *decode.Refusal
	if err := w.end(); !errors.As(err, &refused) || !strings.Contains(refused.Why, "row filter") {
		t.Fatalf("the first start after it ends with %v", err)
	}
	w.start()
	w.copied()
	if n := w.metric("pgsource_differing_tables"); n != 1 {
		t.Errorf("%v tables are said to differ", n)
	}
	w.caughtUp()
	w.equal(`SELECT id::text, v::text, note FROM accounts WHERE `+after, "accounts", "id", "v", "note")
}

// The cursor is one along the columns of an index: along those of another it means
// something else, and rows in front of it would be passed over.
func TestAnotherKeyBetweenTwoChunks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, `CREATE TABLE accounts (id int PRIMARY KEY, v int NOT NULL UNIQUE, note text); ALTER TABLE accounts REPLICA IDENTITY FULL;
		INSERT INTO accounts SELECT i, 5001 - i, repeat('x', 100) FROM generate_series(1, 5000) i`,
		`CREATE TABLE accounts (id INT NOT NULL, v INT NOT NULL, note VARCHAR, PRIMARY KEY (id, v)) WITH ('materialized' = 'true')`, accountsTable())
	w.cfg.ShutdownTimeout = time.Second
	proceed := w.partly()
	if err := w.finish(); err != nil {
		t.Fatal(err)
	}
	w.exec(`ALTER TABLE accounts DROP CONSTRAINT accounts_pkey`)
	proceed()
	w.start()
	w.copied()
	w.caughtUp()
	w.equalAccounts()
}

// A row can move along the index that chunks are read along without a change of
// its key in the destination. Where the change leaves out values, the destination
// ignores it until the row is there, so chunks are read along that key.
func TestRowThatMovesBehindTheCursor(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, `CREATE TABLE accounts (id int NOT NULL UNIQUE, v int PRIMARY KEY, note text); ALTER TABLE accounts REPLICA IDENTITY USING INDEX accounts_id_key;
		ALTER TABLE accounts ALTER note SET STORAGE EXTERNAL; INSERT INTO accounts SELECT i, i, CASE WHEN i = 5000 THEN repeat('y', 5000) ELSE repeat('x', 100) END FROM generate_series(1, 5000) i`,
		accountsProgram, accountsTable())
	proceed := w.partly()
	w.exec(`UPDATE accounts SET v = 0 WHERE id = 5000`)
	proceed()
	w.copied()
	w.caughtUp()
	w.equalAccounts()
}
