package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// inject adds a fault and gives its name.
func inject(t *testing.T, sim *felderasim.Sim, f felderasim.Fault) string {
	t.Helper()
	id, err := sim.Inject(f)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// blockedSaying waits for the refusal that ends a daemon, and checks each part of
// its last words.
func blockedSaying(t *testing.T, d *harness.Daemon, parts ...string) {
	t.Helper()
	said := awaitEnd(t, d, 65)
	for _, part := range parts {
		if !strings.Contains(said, part) {
			t.Errorf("it does not say %q:\n%s", part, said)
		}
	}
}

// skipRefused passes over the transaction that stopped pgsource.
func skipRefused(t *testing.T, env map[string]string) {
	t.Helper()
	st := showState(t, env)
	if st.State.Refused == nil {
		t.Fatal("the state names no refused transaction")
	}
	wants(t, runVerb(t, env, "skip", "-yes", "-to", filepath.Join(t.TempDir(), "letter"), st.State.Refused.End), 0, "was written to")
}

// A row that the pipeline refuses, in the middle of a batch: what is before it
// is delivered and acknowledged, the row is named by its key where the pipeline
// says which, and its transaction can be passed over.
func TestPgsourceNamesTheRefusedRow(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		silent bool
		env    map[string]string
		says   []string
	}{
		"named":          {false, nil, []string{"row id=6,", "table orders"}},
		"not named":      {true, nil, []string{"one of 3 rows, the first one id=5, the last one id=7,", "table orders"}},
		"table by table": {false, map[string]string{"PGSOURCE_ATOMICITY": "table"}, []string{"row id=6,", "table orders"}},
		"with progress":  {false, map[string]string{"PGSOURCE_DELIVERY": "effectively_once"}, []string{"row id=6,"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg, sim, env := effectively(t, felderasim.Options{})
			env = merged(merged(env, map[string]string{"PGSOURCE_BATCH_AGE": "2s", "PGSOURCE_DELIVERY": ""}), c.env)
			d := startPgsource(t, env)
			waitHealthy(t, d)
			inject(t, sim, felderasim.Fault{Kind: felderasim.RefuseRow, Match: "evil", Silent: c.silent, Count: -1})
			for i := range 4 {
				execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'good', 1, true)`, i))
			}
			good := currentLSN(t, pg)
			execSQL(t, pg, `INSERT INTO orders VALUES (5, 'fine', 1, true), (6, 'evil', 1, true), (7, 'fine', 1, true)`)
			execSQL(t, pg, `INSERT INTO orders VALUES (8, 'behind', 1, true)`)
			blockedSaying(t, d, append(c.says, "LSN ", "the row breaks a rule", "pgsource skip ")...)
			if got := confirmed(t, pg); got < good-128 {
				t.Errorf("what is before the refused one is not acknowledged: %d, want about %d", got, good)
			}
			if got := fmt.Sprint(rows(sim, "orders", "id")); got != "[[0] [1] [2] [3]]" {
				t.Errorf("orders %s", got)
			}
			skipRefused(t, env)
			if err := d.Restart(nil); err != nil {
				t.Fatal(err)
			}
			awaitConfirmed(t, pg, currentLSN(t, pg))
			if got := fmt.Sprint(rows(sim, "orders", "id")); got != "[[0] [1] [2] [3] [8]]" {
				t.Errorf("orders %s", got)
			}
		})
	}
}

// A refusal when rows of the same transaction are in the pipeline's transaction
// already, which cannot be taken back: it stays open, that is said, and it ends
// when the rule is mended or the transaction passed over.
func TestPgsourceRefusedInsideATransaction(t *testing.T) {
	t.Parallel()
	two := `BEGIN; INSERT INTO orders VALUES (10, 'in already', 1, true); INSERT INTO items VALUES (10, 10, 'evil'); COMMIT`
	large := `BEGIN; INSERT INTO items SELECT i, i, CASE i WHEN 240 THEN 'evil' ELSE 'x' END FROM generate_series(1, 250) i; COMMIT`
	for name, c := range map[string]struct {
		sql  string
		mend bool
		says []string
		want [][]string // ids of the items of 240 and above, and of the orders, in the end
	}{
		"two tables, passed over": {two, false, []string{"row id=10,", "table items", "rows of this transaction, or of later ones, for table orders already"}, [][]string{{"1"}, {"10"}, {"11"}}},
		"two tables, mended":      {two, true, []string{"row id=10,", "stays open"}, [][]string{{"1"}, {"10"}, {"11"}}},
		"requests, passed over":   {large, false, []string{"row id=240,", "for table items already"}, [][]string{{"1"}, {"11"}}},
		"requests, mended":        {large, true, []string{"row id=240,", "stays open"}, [][]string{{"1"}, {"11"}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
			env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_BATCH_ROWS": "100", "PGSOURCE_BATCH_AGE": "1s"})
			d := startPgsource(t, env)
			waitHealthy(t, d)
			id := inject(t, sim, felderasim.Fault{Kind: felderasim.RefuseRow, Match: "evil", Count: -1})
			execSQL(t, pg, `INSERT INTO orders VALUES (1, 'before', 1, true)`)
			execSQL(t, pg, c.sql)
			execSQL(t, pg, `INSERT INTO orders VALUES (11, 'behind', 1, true)`)
			blockedSaying(t, d, c.says...)
			if st := sim.Stats().Global; st.TransactionStatus == "NoTransaction" {
				t.Error("what cannot be taken back was committed in parts")
			}
			// Once more, and it is the same.
			if err := d.Restart(nil); err != nil {
				t.Fatal(err)
			}
			blockedSaying(t, d, c.says[0])
			if st := sim.Stats().Global; st.TransactionStatus == "NoTransaction" {
				t.Error("what cannot be taken back was committed in parts by a restart")
			}
			if c.mend {
				sim.ClearFault(id)
			} else {
				skipRefused(t, env)
			}
			if err := d.Restart(nil); err != nil {
				t.Fatal(err)
			}
			awaitConfirmed(t, pg, currentLSN(t, pg))
			if st := sim.Stats().Global; st.TransactionStatus != "NoTransaction" {
				t.Errorf("a transaction is open: %+v", st.TransactionStatus)
			}
			if c.mend {
				assertEqualTables(t, pg, sim)
				return
			}
			if diff := cmp.Diff(c.want, rows(sim, "orders", "id")); diff != "" {
				t.Errorf("orders (-want +got):\n%s", diff)
			}
			for _, row := range rows(sim, "items", "id", "sku") {
				if row[1] == "evil" {
					t.Errorf("a refused row is there: %v", row)
				}
			}
			// What is in of it, and what is not, is put right by a resync once the
			// row is mended.
			execSQL(t, pg, `UPDATE items SET sku = 'good' WHERE sku = 'evil'`)
			wants(t, runVerb(t, env, "resync", "public.items", "public.orders"), 0)
			awaitResyncs(t, d, "asked", 2)
			awaitConfirmed(t, pg, currentLSN(t, pg))
			assertEqualTables(t, pg, sim)
		})
	}
}

// Refused in the first request of a transaction of the pipeline: nothing of it
// is in, and the transaction is ended.
func TestPgsourceRefusedBeforeAnythingIsIn(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_BATCH_AGE": "2s"})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	inject(t, sim, felderasim.Fault{Kind: felderasim.RefuseRow, Match: "evil", Count: -1})
	execSQL(t, pg, `BEGIN; INSERT INTO items VALUES (1, 1, 'x'); INSERT INTO orders VALUES (1, 'good', 1, true); COMMIT`)
	execSQL(t, pg, `BEGIN; INSERT INTO items VALUES (2, 2, 'evil'); INSERT INTO orders VALUES (2, 'of the bad one', 1, true); COMMIT`)
	execSQL(t, pg, `INSERT INTO orders VALUES (3, 'behind', 1, true)`)
	blockedSaying(t, d, "row id=2,", "table items")
	if st := sim.Stats().Global; st.TransactionStatus != "NoTransaction" {
		t.Errorf("a transaction is open: %+v", st.TransactionStatus)
	}
	if got := fmt.Sprint(rows(sim, "orders", "id"), rows(sim, "items", "id")); got != "[[1]] [[1]]" {
		t.Errorf("orders and items %s", got)
	}
	skipRefused(t, env)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if got := fmt.Sprint(rows(sim, "orders", "id"), rows(sim, "items", "id")); got != "[[1] [3]] [[1]]" {
		t.Errorf("orders and items %s", got)
	}
}

// A request that the running pipeline never answers, while it answers others,
// is found, alone, and refused by its rows. What is before it is acknowledged.
func TestPgsourceBlocksWhatIsNeverAnswered(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"FELDERA_REQUEST_TIMEOUT": "1s", "FELDERA_REQUEST_LIFETIME": "1s", "PGSOURCE_BATCH_AGE": "2s"})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	inject(t, sim, felderasim.Fault{Kind: felderasim.StallRow, Match: "stuck", Count: -1})
	execSQL(t, pg, `INSERT INTO items VALUES (1, 1, 'good')`)
	good := currentLSN(t, pg)
	execSQL(t, pg, `INSERT INTO items VALUES (2, 1, 'stuck'), (3, 1, 'fine')`)
	execSQL(t, pg, `INSERT INTO items VALUES (4, 1, 'behind')`)
	blockedSaying(t, d, "one of 2 rows, the first one id=2, the last one id=3,", "table items", "5 requests", "FELDERA_REQUEST_TIMEOUT", "pgsource skip ")
	if got := confirmed(t, pg); got < good-128 {
		t.Errorf("what is before it is not acknowledged: %d, want about %d", got, good)
	}
	skipRefused(t, env)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if got := fmt.Sprint(rows(sim, "items", "id")); got != "[[1] [4]]" {
		t.Errorf("items %s", got)
	}
}
