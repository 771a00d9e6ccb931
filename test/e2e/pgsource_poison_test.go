package e2e

import (
	"fmt"
	"strings"
	"testing"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// A transaction that ends the pipeline each time it is sent is found, alone,
// and named with its LSN and table, instead of being sent for ever. Where
// transactions become visible table by table, what came before it is
// acknowledged, although it shared the first batches with it; where a replay is
// one transaction of the pipeline, it waits with it.
func TestPgsourceNamesWhatEndsThePipeline(t *testing.T) {
	t.Parallel()
	for _, atomicity := range []string{"transaction", "table"} {
		t.Run(atomicity, func(t *testing.T) {
			t.Parallel()
			namesWhatEndsThePipeline(t, atomicity)
		})
	}
}

func namesWhatEndsThePipeline(t *testing.T, atomicity string) {
	t.Helper()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{
		"PGSOURCE_BATCH_AGE": "1s", "PGSOURCE_ATOMICITY": atomicity, "FELDERA_REQUEST_TIMEOUT": "2s", "FELDERA_REQUEST_LIFETIME": "2s",
	}))
	waitHealthy(t, d)
	id, err := sim.Inject(felderasim.Fault{Kind: felderasim.CrashBefore, Table: "items", Count: -1, Keep: core.KeepNothing})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders VALUES (%d, 'good', 1, true)`, i))
	}
	good := currentLSN(t, pg)
	execSQL(t, pg, `INSERT INTO items VALUES (1, 1, 'poison')`)
	poison := currentLSN(t, pg)
	execSQL(t, pg, `INSERT INTO orders VALUES (9, 'behind it', 1, true)`)
	said := awaitEndWithin(t, d, 65, 3*patience) // five attempts, with a backoff and the life of a request before each
	for _, part := range []string{"tables items (1 rows)", "times in a row", "LSN", "row id=1 of table items"} {
		if !strings.Contains(said, part) {
			t.Errorf("it does not say %q:\n%s", part, said)
		}
	}
	if strings.Contains(said, "one of") {
		t.Errorf("it is not alone:\n%s", said)
	}
	if got := confirmed(t, pg); got >= poison || (atomicity == "table" && got < good-64) {
		t.Errorf("confirmed %d, the good ones end at %d and the poison at %d", got, good, poison)
	}
	if st := showState(t, pgsourceEnv(pg, sim)); st.State.Refused == nil || !strings.Contains(said, "pgsource skip "+st.State.Refused.End) {
		t.Errorf("it cannot be skipped: the state says %+v", st.State.Refused)
	}
	// Once it does no harm, everything goes on.
	sim.ClearFault(id)
	if err := d.Restart(nil); err != nil {
		t.Fatal(err)
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if n := sim.Count("items"); n != 1 {
		t.Errorf("%d items", n)
	}
}

// A table whose endpoint answers nothing, although the pipeline says that it
// runs, is an outage: it is named, with what waits for it, and waited for.
func TestPgsourceOutlivesASilentEndpoint(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	d := startPgsource(t, merged(pgsourceEnv(pg, sim), map[string]string{"FELDERA_REQUEST_TIMEOUT": "1s", "FELDERA_REQUEST_LIFETIME": "1s"}))
	waitHealthy(t, d)
	id := inject(t, sim, felderasim.Fault{Kind: felderasim.DropRequest, Table: "items", Count: -1})
	start := confirmed(t, pg)
	execSQL(t, pg, `INSERT INTO items VALUES (1, 1, 'waits')`)
	health(t, d, "what waits is named", func(_ int, body string) bool {
		return strings.Contains(body, "tables items (1 rows)") && strings.Contains(body, "5 requests with these rows")
	})
	health(t, d, "it is an outage", func(status int, body string) bool {
		return status == 200 && strings.Contains(body, "an empty request to the table is not answered either")
	})
	if got := confirmed(t, pg); got > currentLSN(t, pg) || got < start {
		t.Errorf("confirmed %d", got)
	}
	sim.ClearFault(id)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	waitHealthy(t, d)
	assertEqualTables(t, pg, sim)
}
