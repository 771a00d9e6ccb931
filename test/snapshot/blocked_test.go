package snapshot_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"holdfast/internal/decode"
	"holdfast/internal/wal"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// A row among those that are copied which the pipeline refuses, never answers,
// or ends at each time it comes, and one that cannot be carried: it is named by
// its table and key, alone, instead of being tried for ever. Once it is mended,
// the copy goes on.
func TestRowThatStopsACopy(t *testing.T) {
	t.Parallel()
	const (
		source  = `CREATE TABLE accounts (id int PRIMARY KEY, v int NOT NULL, note text, day date); INSERT INTO accounts SELECT i, 0, repeat('x', 100) FROM generate_series(1, 300) i`
		program = `CREATE TABLE accounts (id INT NOT NULL PRIMARY KEY, v INT NOT NULL, note VARCHAR, day DATE) WITH ('materialized' = 'true')`
		evil    = `UPDATE accounts SET note = 'evil' WHERE id = 77`
		mend    = `UPDATE accounts SET note = 'good', day = NULL WHERE id = 77`
	)
	for name, c := range map[string]struct {
		fault  felderasim.Fault
		poison string
		says   []string
	}{
		"refused":     {felderasim.Fault{Kind: felderasim.RefuseRow}, evil, []string{"row id=77,", "which the pipeline refuses"}},
		"not named":   {felderasim.Fault{Kind: felderasim.RefuseRow, Silent: true}, evil, []string{"row id=77,", "which the pipeline refuses"}},
		"unanswered":  {felderasim.Fault{Kind: felderasim.StallRow}, evil, []string{"row id=77,", "got no answer from a pipeline that runs"}},
		"ends it":     {felderasim.Fault{Kind: felderasim.CrashRow, Keep: core.KeepNothing}, evil, []string{"row id=77,", "5 times in a row", "came back as another process"}},
		"not carried": {felderasim.Fault{}, `UPDATE accounts SET day = 'infinity' WHERE id = 77`, []string{"key id=77", `column "day"`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, nil, source+`; `+c.poison, program, accountsTable())
			w.request = time.Second
			if c.fault.Kind != "" {
				c.fault.Match, c.fault.Count = "evil", -1
				if _, err := w.sim.Inject(c.fault); err != nil {
					t.Fatal(err)
				}
			}
			w.start()
			err := w.end()
			refused, ok := errors.AsType[*decode.Refusal](err)
			if !ok {
				t.Fatalf("it ended with %v", err)
			}
			for _, part := range append(c.says, `snapshot of public.accounts`, "mend the row at the source") {
				if !strings.Contains(refused.Error(), part) {
					t.Errorf("it does not say %q: %v", part, refused)
				}
			}
			w.exec(mend)
			w.start()
			w.copied()
			w.caughtUp()
			w.equalAccounts()
		})
	}
}

// A stop while the outcome of a request of copied rows is open: it may still be
// applied, so the state does not say that all is quiet, and the next start waits.
func TestStopWithCopiedRowsOnTheirWay(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil, accounts, accountsProgram, accountsTable())
	file := filepath.Join(t.TempDir(), "state.json")
	w.cfg.State = wal.NewFileStore(file)
	drop, err := w.sim.Inject(felderasim.Fault{Kind: felderasim.DropRequest, Table: "accounts", Count: -1})
	if err != nil {
		t.Fatal(err)
	}
	w.start()
	w.await("rows are on their way", func(context.Context) (any, bool) {
		n := w.sim.FaultHits(drop)
		return n, n > 0
	})
	if err := w.finish(); err != nil {
		t.Fatal(err)
	}
	state, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(state), fmt.Sprintf("%q:false", "quiet")) {
		t.Errorf("the state says that no copied row can be on its way: %s", state)
	}
	w.sim.ClearFault(drop)
	w.start()
	w.copied()
	w.caughtUp()
	w.equalAccounts()
}
