package page_test

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/chromedp/chromedp"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// While existing rows are copied the page of a real pgsource says of which table,
// how far it is, at what pace and for how long still; and then that it is done.
func TestPageShowsACopy(t *testing.T) {
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	for _, sql := range []string{
		`CREATE TABLE orders (id int PRIMARY KEY, customer text)`,
		`INSERT INTO orders SELECT i, 'customer ' || i FROM generate_series(1, 20000) i`, `ANALYZE orders`,
	} {
		if err := pg.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	sim, err := felderasim.New(felderasim.Options{SQL: `CREATE TABLE orders (id INT NOT NULL PRIMARY KEY, customer VARCHAR) WITH ('materialized' = 'true')`})
	if err != nil {
		t.Fatal(err)
	}
	if err := sim.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := sim.Close(); err != nil {
			t.Error(err)
		}
	}()
	d := harness.NeedDaemon(t, "./cmd/pgsource", harness.BuildOptions{}, harness.DaemonOptions{ListenVar: "PGSOURCE_LISTEN", Env: map[string]string{
		"PGSOURCE_DSN": pg.DSN(), "PGSOURCE_TABLES": "public.orders", "PGSOURCE_CREATE": "true", "FELDERA_URL": sim.URL(), "FELDERA_PIPELINE": "p",
		"PGSOURCE_STATE": "file:" + filepath.Join(t.TempDir(), "state.json"), "PGSOURCE_SPILL_DIR": t.TempDir(), "PGSOURCE_SNAPSHOT_CHUNK_BYTES": "64KiB",
	}})
	percent := func(ctx context.Context) float64 {
		n, _ := d.Metric(ctx, "pgsource_snapshot_percent", map[string]string{"table": `"public"."orders"`})
		return n
	}
	// Some chunks arrive, and then none, so that there is time to look.
	harness.Await(t, patience, "a part of the table is copied", func(ctx context.Context) (any, bool) {
		n := percent(ctx)
		return n, n > 10
	})
	sim.HoldCompletion()
	if n := percent(t.Context()); n >= 100 {
		t.Fatal("the copy was over before it stood still: more rows")
	}
	b := newBrowser(t)
	b.run(t, chromedp.EmulateViewport(1100, 900), chromedp.Navigate("http://"+d.Addr()+"/"))
	b.await(t, "#checks", `snapshot of "public"."orders"`)
	for _, fact := range []string{`pgsource_snapshot_percent "public"."orders"`, "pgsource_snapshot_rows_per_second", "pgsource_snapshot_remaining_seconds"} {
		b.await(t, "#facts", fact)
	}
	b.await(t, "body", "Existing rows copied")
	b.screenshot(t, "page-copying")
	sim.ReleaseCompletion()
	harness.Await(t, patience, "the copy is done", func(ctx context.Context) (any, bool) {
		n := percent(ctx)
		return n, n == 100
	})
	b.await(t, "#checks", "no copy of existing rows is under way")
	b.quiet(t)
}
