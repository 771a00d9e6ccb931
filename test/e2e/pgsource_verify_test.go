package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// plant writes into a table of the pipeline behind pgsource's back, and waits
// until a query would see it.
func plant(t *testing.T, sim *felderasim.Sim, table, array string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost,
		sim.URL()+"/v0/pipelines/p/ingress/"+table+"?format=json&update_format=insert_delete&array=true", strings.NewReader(array))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("planted %s: %d %s %v", array, resp.StatusCode, body, err)
	}
}

// verified is what "pgsource verify -json" says.
type verified struct {
	Equal     bool `json:"equal"`
	Undecided bool `json:"undecided"`
	Tables    []struct {
		Table       string `json:"table"`
		SourceRows  int64  `json:"source_rows"`
		TargetRows  int64  `json:"target_rows"`
		Suspects    int64  `json:"suspects"`
		Differences []struct {
			Kind    string `json:"kind"`
			Key     string `json:"key"`
			Columns []struct {
				Column string `json:"column"`
				Source string `json:"source"`
				Target string `json:"target"`
			} `json:"columns"`
		} `json:"differences"`
		More      bool `json:"more"`
		Unsettled []struct {
			Key string `json:"key"`
			Why string `json:"why"`
		} `json:"unsettled"`
		Left []struct {
			Column string `json:"column"`
			Why    string `json:"why"`
		} `json:"not_compared"`
	} `json:"tables"`
}

// differences gives all of them as "table kind key columns", sorted.
func (v *verified) differences() (all []string) {
	for _, tab := range v.Tables {
		for _, d := range tab.Differences {
			text := tab.Table + " " + d.Kind + " " + d.Key
			for _, c := range d.Columns {
				text += " " + c.Column
			}
			all = append(all, text)
		}
	}
	slices.Sort(all)
	return all
}

func (v *verified) unsettled() (all []string) {
	for _, tab := range v.Tables {
		for _, u := range tab.Unsettled {
			all = append(all, tab.Table+" "+u.Key+": "+u.Why)
		}
	}
	return all
}

// compared runs the verb verify, which looks as often as it has to.
func compared(t *testing.T, env map[string]string, args ...string) harness.RunResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*patience)
	defer cancel()
	r, err := harness.Run(ctx, harness.DaemonOptions{
		Program: build(t, "pgsource"), Args: append([]string{"verify"}, args...), Env: merged(env, map[string]string{"PGSOURCE_LISTEN": "127.0.0.1:0"}),
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// runVerify runs the verb; the exit code has to be one of codes.
func runVerify(t *testing.T, env map[string]string, codes []int, args ...string) *verified {
	t.Helper()
	r := compared(t, env, append([]string{"-json"}, args...)...)
	var v verified
	if err := json.Unmarshal([]byte(r.Stdout), &v); err != nil || !slices.Contains(codes, r.ExitCode) {
		t.Fatalf("exit code %d, want one of %d (%v):\n%s%s", r.ExitCode, codes, err, r.Stdout, r.Stderr)
	}
	return &v
}

// traffic changes orders at random, on several connections, until the function
// that it gives is called: inserts, updates, deletes, changes of key, and rows
// that come and go and come back as they were.
func traffic(t *testing.T, pg *harness.Postgres, first, last int) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for n := range 3 {
		running.Go(func() {
			random := rand.New(rand.NewPCG(uint64(n), 7))
			conn, err := pgx.Connect(ctx, pg.DSN())
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
			for ctx.Err() == nil {
				id, other := first+random.IntN(last-first), first+random.IntN(last-first)
				sql := []string{
					`INSERT INTO orders VALUES ($1, 'new', $2::int, true) ON CONFLICT (id) DO UPDATE SET note = 'again ' || $2::int`,
					`UPDATE orders SET amount = $2::int, note = 'n' || $2::int WHERE id = $1`,
					`DELETE FROM orders WHERE id = $1 AND $2::int >= 0`,
					`UPDATE orders SET id = $2::int WHERE id = $1 AND NOT EXISTS (SELECT FROM orders WHERE id = $2::int)`,
					`INSERT INTO orders VALUES ($1, 'back', 1, true) ON CONFLICT (id) DO NOTHING`,
				}[random.IntN(5)]
				if strings.Contains(sql, "'back'") {
					_, err = conn.Exec(ctx, sql, id)
				} else {
					_, err = conn.Exec(ctx, sql, id, other)
				}
				var pgErr interface{ SQLState() string }
				if errors.As(err, &pgErr) && (pgErr.SQLState() == "23505" || pgErr.SQLState() == "40P01") {
					continue // two connections met
				}
				if err != nil && ctx.Err() == nil {
					t.Errorf("%s: %v", sql, err)
					return
				}
			}
		})
	}
	return func() { cancel(); running.Wait() }
}

// runs gives how often something is tried: few times by default.
func verifyRuns() int {
	if n, err := strconv.Atoi(os.Getenv("VERIFY_RUNS")); err == nil && n > 0 {
		return n
	}
	return 2
}

func verifyRows() int {
	if n, err := strconv.Atoi(os.Getenv("VERIFY_ROWS")); err == nil && n > 100 {
		return n
	}
	return 5000
}

// Under traffic nothing is called different that is not, and what was planted
// is found: each kind, with its key and the columns, and nothing else.
func TestPgsourceVerify(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := pgsourceEnv(pg, sim)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	n := verifyRows()
	execSQL(t, pg, fmt.Sprintf(`INSERT INTO orders SELECT i, 'c' || i, i / 7.0, i %% 2 = 0, NULLIF('n' || i, 'n7'), decode(md5(i::text), 'hex'), timestamp '2026-01-01' + i * interval '1 second 1 microsecond'
		FROM generate_series(1, %d) i`, n))
	execSQL(t, pg, `INSERT INTO items SELECT i, i, 'sku' FROM generate_series(1, 50) i`)
	harness.Await(t, 10*patience, "the rows are in the pipeline", func(context.Context) (any, bool) { return sim.Count("orders"), sim.Count("orders") == int64(n) })
	awaitConfirmed(t, pg, currentLSN(t, pg))
	v := runVerify(t, env, []int{0})
	if got := []int64{v.Tables[0].SourceRows, v.Tables[0].TargetRows, v.Tables[1].SourceRows, v.Tables[0].Suspects}; !slices.Equal(got, []int64{int64(n), int64(n), 50, 0}) {
		t.Errorf("rows: %v", got)
	}

	stop := traffic(t, pg, n/2, n/2+400)
	defer stop()
	for run := range verifyRuns() {
		// Exit code 69 would be keys that do not come to rest; at this pace there
		// can be some, but never a difference.
		v := runVerify(t, env, []int{0, 69})
		if len(v.differences()) > 0 {
			t.Fatalf("run %d: false alarm: %v", run, v.differences())
		}
		t.Logf("run %d: %d rows looked at again, unsettled %v", run, v.Tables[0].Suspects, v.unsettled())
	}

	plant(t, sim, "orders", `[{"delete":{"id":5}},{"insert":{"id":-7,"customer":"ghost","paid":true}},{"update":{"id":17,"amount":"0.01","note":null}}]`)
	plant(t, sim, "items", `[{"insert":{"id":50,"order_id":50,"sku":"SKU"}}]`)
	want := []string{"public.items stale id=50 sku", "public.orders ghost id=-7", "public.orders missing id=5", "public.orders stale id=17 amount note"}
	if diff := cmp.Diff(want, runVerify(t, env, []int{65}).differences()); diff != "" {
		t.Errorf("planted faults:\n%s", diff)
	}
	// Names are taken with and without the schema, flags stand in any place, and
	// values are shown only where they were asked for.
	if got := runVerify(t, env, []int{65}, "items").Tables; len(got) != 1 || got[0].Differences[0].Columns[0].Source != "" {
		t.Errorf("%+v", got)
	}
	wants(t, compared(t, env, "public.items", "-values"), 65, `stale      id=50  differs in sku (source "sku", pipeline "SKU")`)
	wants(t, compared(t, env, "-most", "1", "orders"), 65, "DIFFERENT in more than 1 rows")
	wants(t, compared(t, env, "nosuch"), 64, "public.orders", "public.items")
	wants(t, compared(t, env, "orders", "-sample", "2"), 64, "-sample")
	if v := runVerify(t, env, []int{0, 65, 69}, "orders", "-sample", "0.1"); v.Tables[0].SourceRows == 0 || len(v.differences()) > 3 {
		t.Errorf("a sample: %+v", v)
	}
	stop()

	// Without a pgsource nothing is proven of what differs, and what is equal is.
	stopClean(t, d)
	execSQL(t, pg, `UPDATE orders SET note = 'unseen' WHERE id = 1`)
	v = runVerify(t, env, []int{69}, "orders", "-wait", "1s")
	if len(v.differences()) > 0 || !strings.Contains(strings.Join(v.unsettled(), "\n"), "public.orders id=1: the acknowledged position") {
		t.Errorf("%v, unsettled %v", v.differences(), v.unsettled())
	}
	// What cannot be reached is neither equal nor different.
	wants(t, compared(t, merged(env, map[string]string{"FELDERA_URL": "http://127.0.0.1:1"})), 69)
	wants(t, compared(t, merged(env, map[string]string{"PGSOURCE_DSN": "postgres://nobody@127.0.0.1:1/x"})), 69)
}

// An answer that breaks off, or that is an error inside of a 200, is no
// evidence that rows are missing.
func TestPgsourceVerifyBrokenAnswers(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := pgsourceEnv(pg, sim)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO orders SELECT i, 'c', i, true FROM generate_series(1, 100) i`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	for _, rows := range []int{0, 1, 99} {
		if _, err := sim.Inject(felderasim.Fault{Kind: felderasim.QueryError, Endpoint: "query", Rows: rows}); err != nil {
			t.Fatal(err)
		}
		if v := runVerify(t, env, []int{0}); v.Tables[0].TargetRows < 100 {
			t.Errorf("%d rows", v.Tables[0].TargetRows)
		}
	}
	if _, err := sim.Inject(felderasim.Fault{Kind: felderasim.QueryError, Endpoint: "query", Rows: 1, Count: -1}); err != nil {
		t.Fatal(err)
	}
	wants(t, compared(t, env), 69, "injected fault")
	sim.ClearFault("")
}

// Keys of every type: a row of each is equal, one that is taken away is found
// missing, and one that is put there a ghost.
func TestPgsourceVerifyKeys(t *testing.T) {
	t.Parallel()
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	execSQL(t, pg, `CREATE EXTENSION citext; CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy'); CREATE DOMAIN small AS integer CHECK (VALUE < 100);
		CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)`)
	keys := []struct{ pg, feldera, values, ghost, gone string }{
		{"bigint", "BIGINT", "('-9223372036854775808'), (0), (7)", `77`, `7`},
		{"small", "BIGINT", "(1), (2)", `3000000000`, `2`}, // the ghost is no value of the source's type
		{"boolean", "BOOLEAN", "(false)", `true`, `false`},
		{"numeric", "DECIMAL(20, 3)", "(1.50), (10), (2)", `"2.001"`, `"10"`},
		{"numeric", "VARCHAR", "(1.50), (10)", `"1.5"`, `"1.50"`},
		{"double precision", "DOUBLE", "(0.1), (1e300)", `0.2`, `0.1`},
		{"text", "VARCHAR", `(''), ('a'), ('B'), ('b'), ('ä'), ('it''s "so"\')`, `"A"`, `"it's \"so\"\\"`},
		{`text COLLATE "C"`, "VARCHAR", `('a'), ('B')`, `"A"`, `"a"`},
		{"text COLLATE loose", "VARCHAR", `('Abc'), ('b')`, `"aBC"`, `"b"`},
		{"citext", "VARCHAR", `('Abc'), ('b')`, `"aBC"`, `"b"`},
		{"char(4)", "CHAR(4)", `('a'), ('ab')`, `"a"`, `"ab  "`},
		{"bytea", "VARBINARY", `('\x'), ('\x00ff')`, `[1]`, `[0,255]`},
		{"date", "DATE", `('0001-01-01'), ('2026-01-02')`, `"2026-01-03"`, `"2026-01-02"`},
		{"time", "TIME", `('03:04:05.1')`, `"03:04:05.2"`, `"03:04:05.1"`},
		{"timestamp", "TIMESTAMP", `('2026-01-02 03:04:05.000001')`, `"2026-01-02 03:04:05"`, `"2026-01-02 03:04:05.000001"`},
		{"timestamptz", "TIMESTAMP WITH TIME ZONE", `('2026-01-02 03:04:05.5+02')`, `"2026-01-02T03:04:05.5Z"`, `"2026-01-02T01:04:05.5Z"`},
		{"uuid", "UUID", `('A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11')`, `"00000000-0000-0000-0000-000000000000"`, `"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"`},
		{"mood", "VARCHAR", `('sad'), ('ok')`, `"unknown"`, `"ok"`},
		{"interval", "VARCHAR", `('1 day')`, `"24:00:00"`, `"1 day"`},
		{"timestamptz", "VARCHAR", `('2026-01-02 03:04:05.5+02')`, `"2026-01-02 03:04:05.5+02"`, `"2026-01-02 01:04:05.5+00"`},
	}
	var program, tables []string
	for i, k := range keys {
		execSQL(t, pg, fmt.Sprintf(`CREATE TABLE k%d (k %s PRIMARY KEY, n integer); CREATE TABLE c%d (n integer, k %s, PRIMARY KEY (k, n))`, i, k.pg, i, k.pg))
		program = append(program, fmt.Sprintf(`CREATE TABLE k%d (k %s NOT NULL PRIMARY KEY, n INT); CREATE TABLE c%d (n INT NOT NULL, k %s NOT NULL, PRIMARY KEY (n, k))`, i, k.feldera, i, k.feldera))
		tables = append(tables, fmt.Sprintf("public.k%d,public.c%d", i, i))
	}
	sim := startSim(t, felderasim.Options{SQL: strings.Join(program, ";\n")})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_TABLES": strings.Join(tables, ",")})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	for i, k := range keys {
		execSQL(t, pg, fmt.Sprintf(`INSERT INTO k%d SELECT *, 1 FROM (VALUES %s) AS v; INSERT INTO c%d SELECT 1, * FROM (VALUES %s) AS v; INSERT INTO c%d SELECT 2, * FROM (VALUES %s) AS v`,
			i, casts(k.values, k.pg), i, casts(k.values, k.pg), i, casts(k.values, k.pg)))
	}
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if v := runVerify(t, env, []int{0}); len(v.Tables) != 2*len(keys) {
		t.Errorf("%d tables", len(v.Tables))
	}
	for i, k := range keys {
		plant(t, sim, fmt.Sprintf("k%d", i), fmt.Sprintf(`[{"insert":{"k":%s,"n":1}},{"delete":{"k":%s}}]`, k.ghost, k.gone))
		plant(t, sim, fmt.Sprintf("c%d", i), fmt.Sprintf(`[{"insert":{"k":%s,"n":2}},{"delete":{"k":%s,"n":2}}]`, k.ghost, k.gone))
	}
	v := runVerify(t, env, []int{65})
	for _, tab := range v.Tables {
		i, _ := strconv.Atoi(tab.Table[len("public.k"):])
		var kinds []string
		for _, diff := range tab.Differences {
			kinds = append(kinds, diff.Kind)
		}
		slices.Sort(kinds)
		if !slices.Equal(kinds, []string{"ghost", "missing"}) {
			t.Errorf("%s, key %s as %s: %+v", tab.Table, keys[i].pg, keys[i].feldera, tab.Differences)
		}
	}
	if got := v.unsettled(); len(got) > 0 {
		t.Errorf("unsettled: %v", got)
	}
}

// casts gives rows of VALUES with their casts.
func casts(values, typ string) string {
	typ, _, _ = strings.Cut(typ, " COLLATE")
	rows := strings.Split(strings.Trim(values, "()"), "), (")
	return "((" + strings.Join(rows, ")::"+typ+"), ((") + ")::" + typ + ")"
}

// A commit that waits for a synchronous standby is in the pipeline, and the
// source does not show it: that is no difference, however long it stands.
func TestPgsourceVerifyHiddenCommit(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := pgsourceEnv(pg, sim)
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO items VALUES (1, 1, 'x'), (2, 2, 'x'), (3, 3, 'x')`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if err := pg.HoldCommits(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var waiting sync.WaitGroup
	waiting.Go(func() {
		// It commits, and nobody tells it so before the setting is taken back.
		if err := pg.Exec(ctx, `BEGIN; INSERT INTO items VALUES (9, 9, 'hidden'); DELETE FROM items WHERE id = 1; UPDATE items SET sku = 'y' WHERE id = 2; COMMIT`); err != nil && ctx.Err() == nil {
			t.Error(err)
		}
	})
	defer func() { cancel(); waiting.Wait() }()
	waitSim(t, sim, "the hidden rows are in the pipeline", func(v felderasim.View) bool {
		return strings.Contains(strings.Join(v.Dump("items"), "\n"), "hidden")
	})
	v := runVerify(t, env, []int{69}, "items")
	if got := v.unsettled(); len(v.differences()) > 0 || len(got) != 3 || !strings.Contains(got[0], "synchronous standby") {
		t.Errorf("%v, unsettled %v", v.differences(), got)
	}
	if err := pg.ReleaseCommits(t.Context()); err != nil {
		t.Fatal(err)
	}
	waiting.Wait()
	if v := runVerify(t, env, []int{0}, "items"); v.Tables[0].SourceRows != 3 {
		t.Errorf("%+v", v.Tables[0])
	}
}

// The daemon compares by itself, says what it found, and that it is well again.
func TestPgsourceVerifiesOnASchedule(t *testing.T) {
	t.Parallel()
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{})
	env := merged(pgsourceEnv(pg, sim), map[string]string{"PGSOURCE_VERIFY_INTERVAL": "1s", "PGSOURCE_VERIFY_RATE": "0"})
	d := startPgsource(t, env)
	waitHealthy(t, d)
	execSQL(t, pg, `INSERT INTO items SELECT i, i, 'sku' FROM generate_series(1, 20) i`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	health(t, d, "both are equal", func(_ int, body string) bool { return strings.Contains(body, "source and pipeline were equal at") })
	plant(t, sim, "items", `[{"delete":{"id":3}}]`)
	health(t, d, "the difference is shown, and holds nothing up", func(status int, body string) bool {
		return status == http.StatusOK && strings.Contains(body, "source and pipeline differ in 1 rows of public.items (missing id=3)")
	})
	if n := metric(t, d, "pgsource_verify_differences", map[string]string{"table": "public.items", "kind": "missing"}); n != 1 {
		t.Errorf("%v differences", n)
	}
	plant(t, sim, "items", `[{"insert":{"id":3,"order_id":3,"sku":"sku"}}]`)
	health(t, d, "both are equal again", func(_ int, body string) bool { return strings.Contains(body, "source and pipeline were equal at") })
	stopClean(t, d)
}
