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
)

// A role that may stream and not read every row of a table is refused by name,
// before anything streams, with what mends it: rows that are hidden from a copy
// would be missing, and nobody would notice.
func TestSnapshotNeedsToSeeEveryRow(t *testing.T) {
	t.Parallel()
	const role = `; CREATE ROLE reader LOGIN REPLICATION; CREATE PUBLICATION holdfast FOR TABLE accounts;; SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput');; SELECT 1`
	for name, c := range map[string]struct {
		grant, says, mend string
	}{
		"no right":         {``, `GRANT SELECT ON "public"."accounts" TO "reader"`, `GRANT SELECT ON accounts TO reader`},
		"right on columns": {`; GRANT SELECT (id, v, note) ON accounts TO reader`, `GRANT SELECT ON "public"."accounts" TO "reader"`, `GRANT SELECT ON accounts TO reader`},
		"row security": {
			`; GRANT SELECT ON accounts TO reader; ALTER TABLE accounts ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON accounts USING (id < 10)`,
			`ALTER ROLE "reader" BYPASSRLS`, `ALTER ROLE reader BYPASSRLS`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil, accounts+role+c.grant, accountsProgram, accountsTable())
			w.cfg.Snapshot = wal.SnapshotInitial
			w.cfg.DSN = func() (string, error) { return w.pg.DSNFor("reader", "", "postgres", w.pg.Addr()), nil }
			w.start()
			err := w.end()
			refused, ok := errors.AsType[*decode.Refusal](err)
			if !ok || !strings.Contains(refused.Where, `"public"."accounts"`) || !strings.Contains(refused.Do, c.says) || !strings.Contains(refused.Do, "PGSOURCE_SNAPSHOT=never") {
				t.Fatalf("it ended with %v", err)
			}
			if n := w.sim.Count("accounts"); n != 0 {
				t.Errorf("%d rows were sent all the same", n)
			}
			w.exec(c.mend)
			w.start()
			w.copied()
			w.equalAccounts()
		})
	}
}

// A slot that was there before pgsource: with PGSOURCE_SNAPSHOT=initial the rows
// from before it are copied too, by default none are, since nobody knows whether
// they were loaded. What the slot has retained comes in both cases.
func TestSnapshotOfAnAdoptedSlot(t *testing.T) {
	t.Parallel()
	const adopted = accounts + `;; CREATE PUBLICATION holdfast FOR TABLE accounts;; SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput');;
		UPDATE accounts SET v = 1 WHERE id BETWEEN 10 AND 20; DELETE FROM accounts WHERE id = 30; INSERT INTO accounts VALUES (2000, 1, 'retained')`
	for mode, want := range map[wal.SnapshotMode]int64{wal.SnapshotAuto: 12, wal.SnapshotInitial: 300} {
		t.Run(fmt.Sprint(mode), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil, adopted, accountsProgram, accountsTable())
			w.cfg.Create, w.cfg.Snapshot = false, mode
			w.start()
			w.await("the slot has caught up", func(context.Context) (any, bool) {
				n := w.sim.Count("accounts")
				return n, n == want
			})
			w.copiedAs(mode == wal.SnapshotInitial)
			if said := w.log.has("existing rows of the tables are not copied"); said != (mode == wal.SnapshotAuto) {
				t.Errorf("that nothing is copied is said: %t", said)
			}
			w.caughtUp()
			if mode == wal.SnapshotInitial {
				w.equalAccounts()
			}
			// A restart copies nothing twice.
			if err := w.finish(); err != nil {
				t.Fatal(err)
			}
			w.start()
			w.walsender()
			w.exec(`INSERT INTO accounts VALUES (3000, 1, 'later')`)
			w.row(3000, 1)
			if n := w.metric("pgsource_snapshot_rows_total"); n != 0 {
				t.Errorf("%v rows were copied after a restart", n)
			}
			if n := w.sim.Count("accounts"); n != want+1 {
				t.Errorf("%d rows, want %d", n, want+1)
			}
		})
	}
}

// copiedAs waits until no copy is under way, and the state says that the rows
// were copied, or not.
func (w *world) copiedAs(copied bool) {
	w.t.Helper()
	w.await("no copy is under way", func(ctx context.Context) (any, bool) {
		st, err := w.source.LoadState(ctx)
		if err != nil || st == nil {
			return err, false
		}
		list := st.CopiedTables()
		return list, len(st.Copies()) == 0 && len(list) == 1 && list[0].Copied == copied
	})
}

// Over plain SQL the stream is read by asking; a copy beside it works alike, with
// changes that come as soon as it has begun.
func TestSnapshotOverPlainSQL(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, `CREATE TABLE accounts (id int PRIMARY KEY, v int NOT NULL, note text); ALTER TABLE accounts ALTER COLUMN note SET STORAGE EXTERNAL;
		INSERT INTO accounts SELECT i, 0, repeat('x', CASE WHEN i % 10 = 0 THEN 4000 ELSE 100 END) FROM generate_series(1, 1000) i`, accountsProgram, accountsTable())
	w.cfg.Transport, w.cfg.PeekInterval = wal.TransportPeek, 50*time.Millisecond
	w.start()
	for n := int64(0); n < 500; n++ {
		w.exec(fmt.Sprintf(`UPDATE accounts SET v = %d WHERE id %% 100 = %d; DELETE FROM accounts WHERE id = %d; UPDATE accounts SET id = id + 5000 WHERE id = %d; INSERT INTO accounts VALUES (%d, 0, 'new')`,
			n, n*10%100, 900-n, 20+n, 2000+n))
		w.row(2000+n, 0)
		st, err := w.source.LoadState(t.Context())
		if err == nil && st != nil && len(st.CopiedTables()) > 0 && len(st.Copies()) == 0 {
			break
		}
	}
	w.copied()
	w.caughtUp()
	w.equalAccounts()
}

// What the stream brings goes out beside a copy whose rows nobody has proven
// yet, by either transport.
func TestStreamBesideACopyThatIsNotProven(t *testing.T) {
	t.Parallel()
	for name, transport := range map[string]wal.Transport{"stream": wal.TransportStream, "peek": wal.TransportPeek} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil, accounts, accountsProgram, accountsTable())
			w.cfg.Transport, w.cfg.PeekInterval = transport, 50*time.Millisecond
			w.cfg.Snapshot = wal.SnapshotNever
			w.start()
			w.await("a position is acknowledged", func(ctx context.Context) (any, bool) {
				st, err := w.source.LoadState(ctx)
				return err, err == nil && st != nil
			})
			_, proceed := w.midway()
			for n := range int64(3) { // fewer than the batches that may be under way
				w.exec(fmt.Sprintf(`INSERT INTO accounts VALUES (%d, 0, 'new')`, 2000+n))
				w.row(2000+n, 0)
			}
			proceed()
			w.copied()
			w.caughtUp()
			w.equalAccounts()
		})
	}
}
