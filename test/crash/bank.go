package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/feldera"
	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// The bank: accounts in two tables, between which writers move money, in one
// table and across the two, in one transaction each. The sum of all balances
// never changes, so a part of a transaction shows in every state in which it
// is applied alone. Each account counts its changes, and each writer its
// transactions, so that a state of the past shows too.
const (
	accounts = 20 // in each of the two tables
	balance  = 1000
	total    = 2 * accounts * balance
	writers  = 3
)

// bankSource gives the source's tables. The ledger only grows, and has no key.
// Under at_least_once it has none in the pipeline either, so that what is
// applied twice counts twice; elsewhere the daemon gives its rows an identity.
func bankSource(v *variant) string {
	if v.progress {
		return bankSourceSQL
	}
	return bankSourceSQL + "; ALTER TABLE ledger REPLICA IDENTITY FULL"
}

const bankSourceSQL = `
CREATE TABLE left_accounts (id bigint PRIMARY KEY, balance bigint NOT NULL, version bigint NOT NULL);
CREATE TABLE right_accounts (id bigint PRIMARY KEY, balance bigint NOT NULL, version bigint NOT NULL);
CREATE TABLE writers (id bigint PRIMARY KEY, n bigint NOT NULL);
CREATE TABLE filler (id bigint PRIMARY KEY, note text, picture text, rate double precision);
CREATE TABLE ledger (id bigserial, writer bigint NOT NULL, n bigint NOT NULL);
CREATE TABLE added (id bigint PRIMARY KEY, v bigint NOT NULL, note text);
CREATE TABLE unpublished (id bigserial PRIMARY KEY, note text);
ALTER TABLE filler ALTER COLUMN picture SET STORAGE EXTERNAL`

// bankProgram is the pipeline's.
func bankProgram(v *variant) string {
	progress := feldera.ProgressTable("holdfast_progress")
	return bankTablesSQL + keyless(v, "ledger", "id", "writer", "n") + progress.SQL()
}

// keyless declares a table of numbers without a key of its own.
func keyless(v *variant, table string, columns ...string) string {
	def := feldera.TableDef{Target: table}
	for _, name := range columns {
		def.Columns = append(def.Columns, feldera.ColumnDef{Name: name, Type: feldera.Type{Name: feldera.BigInt}})
	}
	if v.progress {
		def.Key = feldera.IdentityKey()
		def.Columns = append(def.Columns, feldera.IdentityColumns()...)
	}
	return def.SQL()
}

const bankTablesSQL = `
CREATE TABLE left_accounts (id BIGINT NOT NULL PRIMARY KEY, balance BIGINT NOT NULL, version BIGINT NOT NULL) WITH ('materialized' = 'true');
CREATE TABLE right_accounts (id BIGINT NOT NULL PRIMARY KEY, balance BIGINT NOT NULL, version BIGINT NOT NULL) WITH ('materialized' = 'true');
CREATE TABLE writers (id BIGINT NOT NULL PRIMARY KEY, n BIGINT NOT NULL) WITH ('materialized' = 'true');
CREATE TABLE filler (id BIGINT NOT NULL PRIMARY KEY, note VARCHAR, picture VARCHAR, rate DOUBLE) WITH ('materialized' = 'true');
CREATE TABLE added (id BIGINT NOT NULL PRIMARY KEY, v BIGINT NOT NULL, note VARCHAR) WITH ('materialized' = 'true');
`

// bankTables are those that are always carried, with the one that has no key
// last; addedTable is carried at times.
var bankTables = []string{"left_accounts", "right_accounts", "writers", "filler", keylessTable}

const (
	keylessTable = "ledger"
	addedTable   = "added"
	addedRows    = 24 // of several chunks in all
)

// The rows of filler that nobody writes begin behind quietRow.
const (
	quietRow  = 100_000
	quietRows = 20
)

// bankRows fills the bank, in one transaction. The ledger stays empty: without
// a key its rows could not be copied.
var bankRows = fmt.Sprintf(`
BEGIN;
INSERT INTO left_accounts SELECT i, %[2]d, 0 FROM generate_series(1, %[1]d) i;
INSERT INTO right_accounts SELECT i, %[2]d, 0 FROM generate_series(1, %[1]d) i;
INSERT INTO writers SELECT i, 0 FROM generate_series(1, %[3]d) i;
INSERT INTO filler SELECT %[4]d + i, 'quiet', repeat('q', i) FROM generate_series(1, %[5]d) i;
INSERT INTO added SELECT i, 0, repeat('a', 60000) FROM generate_series(1, %[6]d) i;
COMMIT`, accounts, balance, writers, quietRow, quietRows, addedRows)

// bankOracle watches every completed state of the destination and keeps what
// a reader could have seen.
type bankOracle struct {
	mu            sync.Mutex
	versions      map[string]int64   // of each account and writer, as last seen
	held          [writers + 1]int64 // the highest transaction of each writer that was ever completed
	states        int
	torn, regress []string
	double        []string
	// excuse is why a state may be torn at the moment; coming is that of the next
	// incarnation.
	excuse, coming excuse
	// open: a transaction was open in the state that was looked at last. opened: one
	// was in this incarnation.
	open, opened bool
	expected     map[string]int
	// seen is the state that was looked at last.
	seen struct {
		incarnation string
		steps       int64
	}
	// recorded is the highest position of a progress row that was ever completed.
	recorded uint64
	// losing: the next incarnation begins with less than this one has; lossy:
	// also with less than was acknowledged.
	losing, lossy bool
	// acked is the last transaction of each writer that was acknowledged; now the
	// last that this incarnation has held, or one that kept what this one began with.
	acked, now [writers + 1]int64
	// lostUpTo is the last transaction of each writer that was acknowledged on the
	// word of a pipeline which lost it.
	lostUpTo [writers + 1]int64
	// hasLost: a pipeline has lost what was acknowledged at some time.
	hasLost bool
}

func newBankOracle() *bankOracle {
	return &bankOracle{versions: make(map[string]int64), expected: make(map[string]int), excuse: firstCopy}
}

// excuse is a reason for which states may be torn, and what ends it: the shorter
// it holds, the more is found out.
type excuse struct {
	why string // "" = there is none
	end excuseEnd
}

type excuseEnd int

const (
	// endsAtRest: when the two sides were found equal.
	endsAtRest excuseEnd = iota
	// endsWhole: at the first whole state behind a transaction of the incarnation.
	endsWhole
	// endsHealed: when the state of pgsource says that the accounts are healed.
	endsHealed
)

// firstCopy explains states of tables that are being filled.
var firstCopy = excuse{"a table whose copy is not done has a part of its rows", endsAtRest}

// committedOpen explains what a transaction leaves that was open when a pipeline
// ended which comes back from its journal: it is committed as far as it was
// filled, and what a pgsource that lives sends for it still lands outside of one.
// pgsource sends all of it again in one transaction, so the first whole state
// behind a transaction ends it. Where none was open, nothing is excused.
var committedOpen = excuse{"a pipeline that comes back from its journal commits what was open, as is its way", endsWhole}

// sentOutside is the same of a pipeline that comes back from its last checkpoint,
// which has nothing of what was open.
var sentOutside = excuse{"what pgsource sends for a transaction that has ended with the pipeline's process lands outside of one", endsWhole}

// lostRows explains states of a pipeline that came back with less: rows that were
// acknowledged are missing or old, and what comes next is applied beside them,
// until the resync of the accounts has read every row again. From the moment at
// which pgsource says that none of them is at risk and nothing is to be copied,
// each state is whole. If it never says that any is at risk, everything that was
// lost is sent again, and the excuse ends at rest.
var lostRows = excuse{"a pipeline that lost rows lacks them until they are sent again", endsHealed}

// observe looks at one state. It is called under the simulator's lock.
func (o *bankOracle) observe(v felderasim.View) {
	o.mu.Lock()
	defer o.mu.Unlock()
	incarnation, steps := v.Incarnation(), v.Counters().Steps
	if incarnation != o.seen.incarnation {
		o.seen.incarnation, o.seen.steps = incarnation, -1
		o.cameBack()
	}
	o.open = v.InTransaction()
	o.opened = o.opened || o.open
	if !v.Settled() {
		o.seen.steps = -1
		return
	}
	if steps == o.seen.steps {
		return
	}
	o.seen.steps = steps
	sum, rows := int64(0), 0
	for _, table := range []string{"left_accounts", "right_accounts"} {
		for _, row := range v.Rows(table) {
			rows++
			sum += number(row["balance"])
			o.see(fmt.Sprintf("%s %d", table, number(row["id"])), number(row["version"]))
		}
	}
	for _, row := range v.Rows("writers") {
		id, n := number(row["id"]), number(row["n"])
		o.see(fmt.Sprintf("writer %d", id), n)
		o.held[id] = max(o.held[id], n)
		o.now[id] = max(o.now[id], n)
	}
	for _, row := range v.Rows("holdfast_progress") {
		o.recorded = max(o.recorded, uint64(number(row["position"])))
	}
	o.states++
	switch {
	case rows == 2*accounts && sum == total:
		if o.excuse.end == endsWhole && o.opened {
			o.excuse = excuse{}
		}
	case rows == 0 && o.excuse.end != endsWhole && o.excuse.why != "": // nothing is there yet
	case o.excuse.why != "":
		o.expected["a state was torn: "+o.excuse.why]++
	default:
		o.torn = append(o.torn, fmt.Sprintf("%d accounts hold %d, expected %d and %d", rows, sum, 2*accounts, total))
	}
}

// cameBack takes note of a new incarnation. The caller holds mu.
func (o *bankOracle) cameBack() {
	if o.losing {
		clear(o.versions) // the pipeline itself went back; from there it only goes on
		o.now = [writers + 1]int64{}
		if o.lossy {
			o.loses()
		}
	}
	switch {
	case o.coming.why == "":
	case o.coming.end == endsWhole && (!o.open || o.excuse.why != ""): // nothing was open, or more is excused already
	case o.excuse.why != "" && o.excuse.end == endsAtRest:
	default:
		o.excuse = o.coming
	}
	o.coming, o.losing, o.lossy, o.opened = excuse{}, false, false, false
}

func (o *bankOracle) see(what string, version int64) {
	if before, ok := o.versions[what]; ok && version < before {
		o.regress = append(o.regress, fmt.Sprintf("%s went from version %d back to %d", what, before, version))
	}
	o.versions[what] = version
}

// faults gives what was found since the last call.
func (o *bankOracle) faults() (torn, regress, double []string, expected map[string]int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	torn, regress, double, expected = o.torn, o.regress, o.double, o.expected
	o.torn, o.regress, o.double, o.expected = nil, nil, nil, make(map[string]int)
	return torn, regress, double, expected
}

// comesBack prepares for a pipeline that comes back with what it keeps; coming is
// why its states may be torn. losing: it has less than it had; lossy: also of
// what was acknowledged.
func (o *bankOracle) comesBack(coming excuse, losing, lossy bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.coming, o.losing, o.lossy = coming, losing, lossy
}

// heals tells whether states are excused until the accounts are healed.
func (o *bankOracle) heals() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.excuse.end == endsHealed && o.excuse.why != ""
}

// healed says that they are.
func (o *bankOracle) healed() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.excuse.end == endsHealed {
		o.excuse = excuse{}
	}
}

// rests says that everything is equal: no state may be torn from here on.
func (o *bankOracle) rests() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.excuse = excuse{}
}

// loses takes note that the pipeline came back without what was acknowledged. The
// caller holds mu.
func (o *bankOracle) loses() {
	o.hasLost, o.lostUpTo, o.now = true, o.acked, [writers + 1]int64{}
}

// acknowledged takes a transaction of a writer at the moment at which it is
// acknowledged. Evidence can be older than a loss: a transaction is completed
// and pgsource keeps its position; the pipeline comes back without it; only then
// the server is told. Nobody sends it again, so it is lost as much as what was
// acknowledged before. What this pipeline has held, or a later one of the same
// writer, was sent to it and is not.
func (o *bankOracle) acknowledged(writer int, n int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.acked[writer] = max(o.acked[writer], n)
	if o.hasLost && n > o.now[writer] {
		o.lostUpTo[writer] = max(o.lostUpTo[writer], n)
	}
}

// lost gives the last transaction of each writer that was acknowledged and lost
// with a pipeline at some time.
func (o *bankOracle) lost() [writers + 1]int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.lostUpTo
}

// expect counts something that is not promised.
func (o *bankOracle) expect(what string, n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.expected[what] += n
}

func (o *bankOracle) wrong() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.torn)+len(o.regress) > 0
}

// records tells whether a progress row that stands for a position was ever
// completed.
func (o *bankOracle) records(position uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.recorded >= position
}

// holds tells whether a transaction of a writer was ever part of a completed
// state.
func (o *bankOracle) holds(writer int, n int64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.held[writer] >= n
}

func number(v any) int64 {
	switch n := v.(type) {
	case int64:
		return n
	case int32:
		return int64(n)
	case uint64:
		return int64(n)
	case json.Number:
		i, err := n.Int64()
		if err == nil {
			return i
		}
	}
	panic(fmt.Sprintf("the simulator gives %T where a number is expected", v))
}

// bankWriter is one client of the bank.
type bankWriter struct {
	id     int
	random *rand.Rand
	n      int64
	// large makes every so many transactions large enough to be spilled.
	large int
	// added tells whether the table that is carried at times is.
	added *atomic.Bool
}

// writerPause is how long a writer leaves a server in peace that refused it.
const writerPause = 100 * time.Millisecond

// run writes transactions until ctx ends; gate holds it while somebody wants
// to compare.
func (w *bankWriter) run(ctx context.Context, pg *harness.Postgres, gate *gate) {
	var conn *pgx.Conn
	pause := time.NewTimer(0)
	defer pause.Stop()
	defer func() {
		if conn != nil {
			_ = conn.Close(context.WithoutCancel(ctx))
		}
	}()
	for {
		if !gate.enter(ctx) {
			return
		}
		err := func() error {
			defer gate.leave()
			if conn == nil || conn.IsClosed() {
				var err error
				if conn, err = pg.Connect(ctx); err != nil {
					return err
				}
				// A commit whose answer was lost may have happened.
				if err := conn.QueryRow(ctx, "SELECT n FROM writers WHERE id = $1", w.id).Scan(&w.n); err != nil {
					return err
				}
			}
			return w.transaction(ctx, conn)
		}()
		if err != nil && ctx.Err() == nil {
			// The server is being restarted, or two writers met: again, on a new
			// connection. A server that recovers needs its processor for that.
			if conn != nil {
				_ = conn.Close(ctx)
			}
			conn = nil
			pause.Reset(writerPause)
			select {
			case <-pause.C:
			case <-ctx.Done():
			}
		}
	}
}

func (w *bankWriter) transaction(ctx context.Context, conn *pgx.Conn) error {
	pick := func() (string, int) {
		return []string{"left_accounts", "right_accounts"}[w.random.IntN(2)], w.random.IntN(accounts) + 1
	}
	var sql strings.Builder
	// Writers think, or two cores do nothing else.
	fmt.Fprintf(&sql, "BEGIN; SELECT pg_sleep(%f);", 0.02+0.06*w.random.Float64())
	move := func() {
		from, a := pick()
		to, b := pick()
		amount := w.random.IntN(50)
		fmt.Fprintf(&sql, "UPDATE %s SET balance = balance - %d, version = version + 1 WHERE id = %d;", from, amount, a)
		fmt.Fprintf(&sql, "UPDATE %s SET balance = balance + %d, version = version + 1 WHERE id = %d;", to, amount, b)
	}
	move()
	switch w.random.IntN(8) {
	case 0: // a part that is taken back
		sql.WriteString("SAVEPOINT s;")
		move()
		sql.WriteString("ROLLBACK TO s;")
	case 1:
		key := w.random.IntN(200)
		fmt.Fprintf(&sql, "INSERT INTO filler VALUES (%d, 'n', repeat('p', %d)) ON CONFLICT (id) DO UPDATE SET note = filler.note || 'x';", key, w.random.IntN(9000))
	case 2:
		fmt.Fprintf(&sql, "DELETE FROM filler WHERE id = %d;", w.random.IntN(200))
	case 3: // the picture is not sent with it
		fmt.Fprintf(&sql, "UPDATE filler SET note = 'y' WHERE id = %d;", w.random.IntN(200))
	case 4:
		sql.WriteString("INSERT INTO unpublished (note) VALUES (repeat('u', 500));")
	case 5: // the note is not sent with it
		if w.added.Load() {
			fmt.Fprintf(&sql, "UPDATE added SET v = v + 1 WHERE id = %d;", w.random.IntN(addedRows)+1)
		}
	}
	if w.large > 0 && w.random.IntN(w.large) == 0 {
		base := 1000 * (w.id + 1)
		fmt.Fprintf(&sql, "INSERT INTO filler SELECT %d + i, 'large', repeat('l', 2000) FROM generate_series(1, 400) i ON CONFLICT (id) DO UPDATE SET note = filler.note || '+', picture = excluded.picture;", base)
		move()
	}
	fmt.Fprintf(&sql, "UPDATE writers SET n = %d WHERE id = %d;", w.n+1, w.id)
	if w.random.IntN(8) == 0 {
		fmt.Fprintf(&sql, "INSERT INTO ledger (writer, n) VALUES (%d, %d);", w.id, w.n+1)
	}
	if w.random.IntN(12) == 0 {
		_, err := conn.Exec(ctx, sql.String()+"ROLLBACK")
		return err
	}
	if _, err := conn.Exec(ctx, sql.String()+"COMMIT"); err != nil {
		return err
	}
	w.n++
	return nil
}

// differences are what a comparison of the two sides has found.
type differences struct {
	what string // "" = equal
	// twice is how many rows of the ledger are there more often than once.
	twice int
	// gone is how many rows of the ledger are not there that were lost with a
	// pipeline.
	gone int
}

// difference compares every row of the two sides. The ledger has no key, so
// what was acknowledged and lost with a pipeline does not come back: of each
// writer the rows up to a transaction may be missing, and no others.
func difference(ctx context.Context, pg *harness.Postgres, sim *felderasim.Sim, tables []string, lostUpTo [writers + 1]int64) (d differences, err error) {
	for _, table := range tables {
		source, err := pg.Rows(ctx, "SELECT to_jsonb(t)::text FROM "+table+" t")
		if err != nil {
			return d, err
		}
		want := make([]string, len(source))
		for i, row := range source {
			if want[i], err = canonical(row[0]); err != nil {
				return d, err
			}
		}
		var got []string
		for _, row := range sim.Dump(table) {
			row, weight, weighted := strings.Cut(row, " weight=")
			if weighted {
				n, err := strconv.Atoi(weight)
				if err != nil {
					return d, err
				}
				if n < 1 {
					d.what = fmt.Sprintf("%s: a row has weight %s: %s", table, weight, row)
					return d, nil
				}
				d.twice += n - 1
			}
			if row, err = canonical(row); err != nil {
				return d, err
			}
			got = append(got, row)
		}
		slices.Sort(want)
		slices.Sort(got)
		if table == keylessTable { // a row is itself by its number, wherever it stood
			once := slices.Compact(slices.Clone(got))
			d.twice += len(got) - len(once)
			got = once
			want = slices.DeleteFunc(want, func(row string) bool {
				_, there := slices.BinarySearch(got, row)
				gone := !there && lostOfLedger(row, lostUpTo)
				if gone {
					d.gone++
				}
				return gone
			})
		}
		for i := range max(len(want), len(got)) {
			switch {
			case i >= len(want):
				d.what = fmt.Sprintf("%s: a row too many in the destination: %.200s", table, got[i])
			case i >= len(got):
				d.what = fmt.Sprintf("%s: a row is missing in the destination: %.200s", table, want[i])
			case want[i] != got[i]:
				d.what = fmt.Sprintf("%s: source %.200s, destination %.200s", table, want[i], got[i])
			default:
				continue
			}
			return d, nil
		}
	}
	return d, nil
}

// lostOfLedger tells whether a row of the ledger is of a transaction that was
// acknowledged and may have been lost with a pipeline.
func lostOfLedger(row string, lostUpTo [writers + 1]int64) bool {
	var r struct {
		Writer int
		N      int64
	}
	if err := json.Unmarshal([]byte(row), &r); err != nil {
		panic(fmt.Sprintf("a row of the ledger that is none: %v", err))
	}
	return r.Writer >= 0 && r.Writer <= writers && r.N <= lostUpTo[r.Writer]
}

// canonical writes a JSON object with its keys in order.
func canonical(text string) (string, error) {
	var row map[string]any
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&row); err != nil {
		return "", err
	}
	maps.DeleteFunc(row, func(name string, _ any) bool { return strings.HasPrefix(name, "holdfast_") }) // identity columns
	out, err := json.Marshal(row)
	return string(out), err
}
