package snapshot_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"holdfast/internal/decode"
	"holdfast/internal/wal"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// Chunks are read along keys of every kind: the cursor goes through the state as
// text, and the next chunk begins exactly behind it. Each table has more rows
// than a chunk, and keys that sort in another way than their bytes.
func TestSnapshotAlongEveryKindOfKey(t *testing.T) {
	t.Parallel()
	kinds := []struct {
		name, columns, key, feldera, keyFeldera, rows, texts string
	}{
		{"composite", "a int, b text", "a, b", "a INT NOT NULL, b VARCHAR NOT NULL", "a, b", "i % 7, 'b' || i", "a::text, b"},
		{"texts", `a text COLLATE "und-x-icu"`, "a", "a VARCHAR NOT NULL", "a", `CASE WHEN mod(i, 2) = 0 THEN 'ä' ELSE 'Z' END || chr(65 + mod(i, 50)) || i || ''' \ "'`, "a"},
		{"uuids", "a uuid", "a", "a UUID NOT NULL", "a", "md5(i::text)::uuid", "a::text"},
		{"numerics", "a numeric(12,3)", "a", "a DECIMAL(12, 3) NOT NULL", "a", "(i - 300) / 8.0", "a::text"},
		{"dates", "a date", "a", "a DATE NOT NULL", "a", "date '2000-02-28' + i * 3", "a::text"},
		{"bigints", "a bigint", "a", "a BIGINT NOT NULL", "a", "(i - 300)::bigint * 9007199254740993", "a::text"},
		{"MixedCase", `"A" int, "b c" text`, `"b c", "A"`, `"A" INT NOT NULL, "b c" VARCHAR NOT NULL`, `"A", "b c"`, "i, 'x' || mod(i, 5)", `"A"::text, "b c"`},
		{"parts", "a int, b int", "a, b", "a INT NOT NULL, b INT NOT NULL", "a, b", "i, mod(i, 3)", "a::text, b::text"},
	}
	var source, program strings.Builder
	var tables []wal.Table
	for _, k := range kinds {
		name := `"` + k.name + `"`
		partition := ""
		if k.name == "parts" {
			partition = " PARTITION BY HASH (a)"
		}
		fmt.Fprintf(&source, "CREATE TABLE %s (%s, note text, PRIMARY KEY (%s))%s;\n", name, k.columns, k.key, partition)
		if partition != "" {
			for n := range 3 {
				fmt.Fprintf(&source, "CREATE TABLE parts_%d PARTITION OF parts FOR VALUES WITH (MODULUS 3, REMAINDER %d);\n", n, n)
			}
		}
		fmt.Fprintf(&source, "INSERT INTO %s SELECT %s, repeat('n', 60) FROM generate_series(1, 400) i;\n", name, k.rows)
		fmt.Fprintf(&program, "CREATE TABLE %s (%s, note VARCHAR, PRIMARY KEY (%s)) WITH ('materialized' = 'true');\n", name, k.feldera, k.keyFeldera)
		tables = append(tables, wal.Table{Schema: "public", Name: k.name, Target: name})
	}
	w := newWorld(t, nil, source.String(), program.String(), tables...)
	w.start()
	w.copied()
	w.caughtUp()
	if n := w.metric("pgsource_snapshot_chunks_total", "result=copied"); n < 3*float64(len(kinds)) {
		t.Errorf("only %v chunks: the cursor was not put to the test", n)
	}
	for _, k := range kinds {
		var columns []string
		for _, c := range strings.Split(k.keyFeldera, ", ") {
			columns = append(columns, strings.Trim(c, `"`))
		}
		table := `"` + k.name + `"` // as SQL writes it: the name is not folded
		w.equal(fmt.Sprintf(`SELECT %s FROM %s`, k.texts, table), table, columns...)
		if got := w.sim.Count(table); got != 400 {
			t.Errorf("%s: %d rows", k.name, got)
		}
	}
}

// A list of keys brings what the source has of them and takes away the rest,
// also where the two sides differ about which keys are equal.
func TestListOfKeys(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, accounts, accountsProgram, accountsTable())
	w.streaming()
	w.awaitJob(w.submit())
	w.put(`[{"delete":{"id":1}},{"delete":{"id":2}},{"insert":{"id":3,"v":77}},{"insert":{"id":5001,"v":1}},{"insert":{"id":5002,"v":1}}]`)
	w.row(5002, 1)
	w.awaitJob(w.submit("1", "3", "5001", "5001", "6000", "-4"))
	w.row(1, 0)
	w.row(3, 0)
	w.row(5001, -1)
	w.row(2, -1)   // nobody asked for it
	w.row(5002, 1) // nor for this
	w.awaitJob(w.submit("2", "5002"))
	w.equalAccounts()

	for name, c := range map[string]*wal.Copy{
		"a table that is not mapped": {Kind: wal.CopyRepair, Schema: "public", Name: "other"},
		"no keys":                    {Kind: wal.CopyRepair, Schema: "public", Name: "accounts", Keys: [][]string{}},
		"too many keys":              {Kind: wal.CopyRepair, Schema: "public", Name: "accounts", Keys: make([][]string, 2000)},
	} {
		if _, err := w.source.SubmitCopy(t.Context(), c); err == nil {
			t.Errorf("%s: taken", name)
		} else if refused, ok := errors.AsType[*decode.Refusal](err); !ok {
			t.Errorf("%s: %v is no refusal (%v)", name, err, refused)
		}
	}
}

// No statement of a copy is compiled by the server: that takes seconds where the
// statement takes a millisecond. Here there is nothing that could compile, and
// the server says each time that it is asked to.
func TestCopyIsNotCompiled(t *testing.T) {
	t.Parallel()
	w := newWorld(t, map[string]string{"jit_provider": "no_such_library", "log_min_messages": "debug1"}, accounts, accountsProgram, accountsTable())
	w.start()
	w.copied()
	w.awaitJob(w.submit("1", "2", "5000"))
	w.equalAccounts()
	if asked := w.pg.Log().Grep(regexp.MustCompile("JIT provider")); len(asked) > 0 {
		t.Errorf("the server was asked to compile a statement: %s", asked)
	} else if len(w.pg.Log().Grep(regexp.MustCompile("DEBUG:"))) == 0 {
		t.Error("the server does not say enough for this test")
	}
}

// What cannot be copied is refused by name before anything streams, with what
// mends it.
func TestSnapshotRefuses(t *testing.T) {
	t.Parallel()
	const rows = ` INSERT INTO accounts VALUES (1, 1, 'x')`
	for name, c := range map[string]struct {
		source, program, says string
	}{
		"no key in Feldera": {
			`CREATE TABLE accounts (id int PRIMARY KEY, v int, note text); ALTER TABLE accounts REPLICA IDENTITY FULL;` + rows,
			`CREATE TABLE accounts (id INT, v INT, note VARCHAR) WITH ('materialized' = 'true')`, "no PRIMARY KEY",
		},
		"no index to read along": {
			`CREATE TABLE accounts (id int, v int, note text); CREATE UNIQUE INDEX ON accounts (id); ALTER TABLE accounts REPLICA IDENTITY FULL;` + rows,
			accountsProgram, "no unique index",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil, c.source, c.program, accountsTable())
			w.cfg.Snapshot = wal.SnapshotInitial
			w.start()
			err := w.end()
			if refused, ok := errors.AsType[*decode.Refusal](err); !ok || !strings.Contains(refused.Error(), c.says) || !strings.Contains(refused.Error(), "accounts") {
				t.Errorf("it ended with %v", err)
			}
			if w.sim.Count("accounts") != 0 {
				t.Error("rows were sent all the same")
			}
		})
	}
}

// The modes: what each of them copies, of a slot that it makes, and of tables that
// are added.
func TestSnapshotModes(t *testing.T) {
	t.Parallel()
	const (
		two        = `CREATE TABLE accounts (id int PRIMARY KEY, v int NOT NULL, note text); INSERT INTO accounts VALUES (1, 1, 'x'); CREATE TABLE more (id int PRIMARY KEY, v int NOT NULL, note text); INSERT INTO more VALUES (2, 2, 'y')`
		twoProgram = accountsProgram + `; CREATE TABLE more (id INT NOT NULL PRIMARY KEY, v INT NOT NULL, note VARCHAR) WITH ('materialized' = 'true')`
	)
	more := wal.Table{Schema: "public", Name: "more", Target: "more"}
	for name, c := range map[string]struct {
		mode   wal.SnapshotMode
		source string
		first  int64 // rows of accounts after the first start
	}{
		"auto, own slot":  {wal.SnapshotAuto, two, 1},
		"never, own slot": {wal.SnapshotNever, two, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil, c.source, twoProgram, accountsTable())
			w.cfg.Snapshot = c.mode
			w.start()
			w.copied()
			w.exec(`INSERT INTO accounts VALUES (100, 1, 'stream')`)
			w.row(100, 1)
			if got := w.sim.Count("accounts"); got != c.first+1 {
				t.Errorf("%d rows of accounts, want %d", got, c.first+1)
			}
			if err := w.finish(); err != nil {
				t.Fatal(err)
			}
			w.exec(`ALTER PUBLICATION holdfast ADD TABLE more`)
			w.cfg.Tables = append(w.cfg.Tables, more)
			w.start()
			w.copied()
			w.exec(`INSERT INTO more VALUES (100, 1, 'stream')`)
			want := int64(2)
			if c.mode == wal.SnapshotNever {
				want = 1
			}
			w.await("the added table is there", func(context.Context) (any, bool) {
				n := w.sim.Count("more")
				return n, n == want
			})
			if got := w.sim.Count("accounts"); got != c.first+1 {
				t.Errorf("after the second start %d rows of accounts, want %d", got, c.first+1)
			}
		})
	}
	t.Run("only", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, nil, two, twoProgram, accountsTable(), more)
		w.cfg.Snapshot = wal.SnapshotOnly
		w.start()
		err := w.end()
		if err != nil || w.sim.Count("accounts") != 1 || w.sim.Count("more") != 1 {
			t.Errorf("it ended with %v, %d and %d rows", err, w.sim.Count("accounts"), w.sim.Count("more"))
		}
		confirmed, err := w.pg.ConfirmedFlushLSN(t.Context(), "holdfast")
		if err != nil || confirmed == 0 {
			t.Errorf("confirmed %d, %v", confirmed, err)
		}
	})
}

// With `only` a table that was copied is not copied again, and nobody resyncs it:
// where the pipeline has lost it before the last one was done, that is no end to
// be called good.
func TestSnapshotOnlyAfterALoss(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, `CREATE TABLE accounts (id int PRIMARY KEY, v int NOT NULL, note text); INSERT INTO accounts VALUES (1, 1, 'x'); CREATE TABLE more (id int PRIMARY KEY, v int NOT NULL, note text); INSERT INTO more SELECT i, 0, repeat('x', 100) FROM generate_series(1, 5000) i`,
		accountsProgram+`; CREATE TABLE more (id INT NOT NULL PRIMARY KEY, v INT NOT NULL, note VARCHAR) WITH ('materialized' = 'true')`,
		accountsTable(), wal.Table{Schema: "public", Name: "more", Target: "more"})
	w.cfg.Snapshot = wal.SnapshotOnly
	hang, err := w.sim.Inject(felderasim.Fault{Kind: felderasim.Hang, Endpoint: "completion_status", Skip: 20, Count: -1})
	if err != nil {
		t.Fatal(err)
	}
	w.start()
	w.await("the first table is copied, and the other one is not", func(ctx context.Context) (any, bool) {
		st, err := w.source.LoadState(ctx)
		if err != nil || st == nil {
			return err, false
		}
		list := st.Copies()
		return list, len(list) == 1 && list[0].Table == `"public"."more"` && w.sim.FaultHits(hang) > 0
	})
	w.sim.Crash(core.KeepNothing)
	w.sim.ClearFault(hang)
	err = w.end()
	refused, ok := errors.AsType[*decode.Refusal](err)
	if !ok || refused.Reason != decode.ReasonGap || !strings.Contains(refused.Where, `"public"."accounts"`) {
		t.Errorf("it ended with %v", err)
	}
	if got := w.sim.Count("more"); got != 5000 {
		t.Errorf("%d rows of more", got)
	}
}

// A transaction that writes to a table before it is published, and commits
// behind that, is in the stream only in part: the first chunk waits for it.
func TestTableAddedUnderAnOpenTransaction(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, accounts+`; CREATE TABLE more (id int PRIMARY KEY, v int NOT NULL, note text)`,
		accountsProgram+`; CREATE TABLE more (id INT NOT NULL PRIMARY KEY, v INT NOT NULL, note VARCHAR) WITH ('materialized' = 'true')`, accountsTable())
	w.start()
	w.copied()
	if err := w.finish(); err != nil {
		t.Fatal(err)
	}
	conn, err := w.pg.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	if _, err := conn.Exec(t.Context(), `BEGIN; INSERT INTO more VALUES (1, 1, 'before')`); err != nil {
		t.Fatal(err)
	}
	w.exec(`ALTER PUBLICATION holdfast ADD TABLE more`)
	w.cfg.Tables = append(w.cfg.Tables, wal.Table{Schema: "public", Name: "more", Target: "more"})
	w.start()
	w.await("the first read waits, or does not", func(ctx context.Context) (any, bool) {
		n := w.metric("pgsource_snapshot_chunks_total", "result=waited")
		st, err := w.source.LoadState(ctx)
		return n, n >= 2 || (err == nil && len(st.CopiedTables()) == 2 && len(st.Copies()) == 0)
	})
	if _, err := conn.Exec(t.Context(), `INSERT INTO more VALUES (2, 2, 'behind'); COMMIT`); err != nil {
		t.Fatal(err)
	}
	w.copied()
	w.caughtUp()
	w.equal(`SELECT id::text, v::text, note FROM more`, "more", "id", "v", "note")
}
