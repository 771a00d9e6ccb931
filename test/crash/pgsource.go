package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"

	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// bankWorld is a pgsource with a bank as its source.
type bankWorld struct {
	rig

	variant  *variant
	program  string
	settings map[string]string
	pg       *harness.Postgres
	tap      *postgresTap
	oracle   *bankOracle
	// admin asks the server without a proxy; nil before the first question and
	// after one that failed. It belongs to settle.
	admin *pgx.Conn
	// lost: the pipeline has lost what was acknowledged, and nobody has mended it
	// yet. copying: something is to be copied.
	lost, copying bool
	// lostAt is when a pipeline came back without what was acknowledged.
	lostAt atomic.Int64
	// adds: the table that is carried at times is; added: writers write into it.
	adds  bool
	added atomic.Bool
	// asked is when a verb asked the daemon for something; verbs are those that
	// run beside it, which stopVerb ends.
	asked    time.Time
	verbs    sync.WaitGroup
	stopVerb context.CancelFunc
	// twice and gone are rows of the ledger, as of the last comparison.
	twice, gone int
}

// errFirstStart says that a daemon does not come up in a world that is new.
var errFirstStart = errors.New("the first start fails")

// openBank starts everything, with rows that are copied already.
func openBank(ctx context.Context, opts worldOptions) (_ world, err error) {
	w := &bankWorld{rig: rig{dir: opts.dir, patience: patience}, variant: opts.variant, oracle: newBankOracle()}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.pg, err = harness.StartPostgres(ctx, harness.PostgresOptions{Settings: map[string]string{"max_connections": "50", "jit": "off"}}); err != nil {
		return nil, err
	}
	for _, sql := range []string{bankSource(opts.variant), bankRows} {
		if err = w.pg.Exec(ctx, sql); err != nil {
			return nil, err
		}
	}
	w.sim, err = felderasim.New(felderasim.Options{
		SQL: bankProgram(opts.variant), Edition: felderasim.Enterprise, Model: core.ModelExactlyOnce, Observe: w.oracle.observe,
		CheckpointInterval: time.Second,
	})
	if err != nil {
		return nil, err
	}
	if err = w.sim.Start(ctx); err != nil {
		return nil, err
	}
	if w.proxy, err = harness.StartProxy(w.pg.Addr()); err != nil {
		return nil, err
	}
	w.tap = newPostgresTap(w.oracle, opts.variant)
	w.proxy.Tap(w.tap.connection)
	if w.program, err = opts.build(ctx); err != nil {
		return nil, err
	}
	// The first run of a daemon makes its slot and copies what was there before:
	// without that a crash proves nothing.
	w.copying = true
	w.settings = opts.daemonEnv(w.env())
	w.daemon, err = harness.StartDaemon(harness.DaemonOptions{Program: w.program, ListenVar: "PGSOURCE_LISTEN", Env: w.settings})
	if err != nil {
		return nil, err
	}
	if err = w.ready(ctx); err != nil {
		return nil, errors.Join(errFirstStart, err)
	}
	if err = w.settle(ctx); err != nil {
		return nil, fmt.Errorf("first rows: %w", err)
	}
	writing, stop := context.WithCancel(context.WithoutCancel(ctx))
	w.stopWriters, w.patience = stop, opts.patienceOr()
	random := opts.random()
	for id := 1; id <= writers; id++ {
		writer := &bankWriter{id: id, random: rand.New(rand.NewPCG(random.Uint64(), 0)), large: 25, added: &w.added}
		w.write(writing, func(ctx context.Context) { writer.run(ctx, w.pg, &w.gate) })
	}
	w.write(writing, w.sample)
	return w, nil
}

func (w *bankWorld) env() map[string]string {
	return map[string]string{
		"PGSOURCE_DSN":    w.pg.DSNFor("postgres", "", "postgres", w.proxy.Addr()),
		"PGSOURCE_TABLES": "public.left_accounts,public.right_accounts,public.writers,public.filler,public.ledger",
		"PGSOURCE_CREATE": "true",
		"PGSOURCE_STATE":  "file:" + w.stateFile(),
		"FELDERA_URL":     w.sim.URL(), "FELDERA_PIPELINE": "p",
		"FELDERA_REQUEST_TIMEOUT": "4s", "FELDERA_REQUEST_LIFETIME": "4s", "FELDERA_CHECKPOINT_INTERVAL": "300ms",
		"PGSOURCE_MEMORY_LIMIT": "4MiB", "PGSOURCE_BATCH_ROWS": "200", "PGSOURCE_BATCH_BYTES": "256KiB",
		"PGSOURCE_STALL_TIMEOUT": "5s", "PGSOURCE_SHUTDOWN_TIMEOUT": "5s", "PGSOURCE_SPILL_DIR": w.dir,
		"PGSOURCE_SNAPSHOT_CHUNK_BYTES": "512KiB", // so that the larger tables have several
		"PGSOURCE_VERIFY_RATE":          "0",
	}
}

func (w *bankWorld) stateFile() string { return filepath.Join(w.pg.Dir(), "pgsource.json") }

// tables gives those that are carried.
func (w *bankWorld) tables() []string {
	if w.adds {
		return append([]string{addedTable}, bankTables...)
	}
	return bankTables
}

func (w *bankWorld) close() {
	if w.stopVerb != nil {
		w.stopVerb()
	}
	w.verbs.Wait()
	w.rig.close()
	if w.pg != nil {
		_ = w.pg.Close()
	}
}

func (w *bankWorld) killSource(ctx context.Context) error {
	if err := w.pg.Stop(harness.Immediate); err != nil {
		return err
	}
	// A daemon that lives on looks for the server while there is none.
	if err := w.goOn(); err != nil {
		return err
	}
	return w.pg.Start(ctx)
}

func (w *bankWorld) unclean() {}

// alone does nothing: a slot has one reader.
func (w *bankWorld) alone() {}

// holdAnswer holds an answer of the pipeline to rows that it has applied.
func (w *bankWorld) holdAnswer(p crash.Point, n int) (there func() bool, letGo func(), err error) {
	if p != crash.PgBeforeAnswer {
		return nil, nil, fmt.Errorf("nobody holds an answer at %s", p)
	}
	id, err := w.sim.Inject(felderasim.Fault{Kind: felderasim.HoldAnswer, Skip: n - 1})
	if err != nil {
		return nil, nil, err
	}
	return func() bool { return w.sim.AnswersHeld(id) > 0 }, func() { w.sim.ClearFault(id) }, nil
}

// otherMember does nothing: a slot has one reader.
func (w *bankWorld) otherMember(context.Context, bool) error { return nil }

func (w *bankWorld) provoke(ctx context.Context, c crashCase) error {
	if c.by != "" {
		return w.provokeCopies(ctx, c)
	}
	switch c.point {
	case crash.PgReconnect:
		// Only who has come as far as to stream connects anew: one that is cut off
		// while it looks at the server begins from the start, again and again.
		if status, _, err := w.daemon.Get(ctx, "/readyz"); err == nil && status == http.StatusOK {
			w.proxy.Cut()
		}
	case crash.PgShutdown, crash.PgShutdownLastWord:
		return w.terminate(ctx)
	}
	return nil
}

// sample reads the slot's position from the server itself, again and again: the
// server must never have more than the daemon was heard to say.
func (w *bankWorld) sample(ctx context.Context) {
	var conn *pgx.Conn
	defer func() {
		if conn != nil {
			_ = conn.Close(context.WithoutCancel(ctx))
		}
	}()
	var noticed time.Time // the loss that pgsource has given notice of
	turn := time.NewTicker(50 * time.Millisecond)
	defer turn.Stop()
	for {
		select {
		case <-turn.C:
		case <-ctx.Done():
			return
		}
		w.watchHealing(&noticed)
		var err error
		if conn == nil || conn.IsClosed() {
			if conn, err = w.pg.Connect(ctx); err != nil {
				conn = nil
				continue // it is being restarted
			}
		}
		at, err := position(ctx, conn, confirmedSQL)
		if err != nil {
			_ = conn.Close(ctx)
			conn = nil
			continue
		}
		w.tap.sampled(at)
	}
}

// watchHealing ends what a loss excuses when pgsource says that the accounts are
// healed: it has named them behind the loss, and now names them no more and has
// nothing to copy.
func (w *bankWorld) watchHealing(noticed *time.Time) {
	if !w.oracle.heals() {
		return
	}
	lostAt := time.Unix(0, w.lostAt.Load())
	st, err := w.readState()
	if err != nil {
		return // it is just being replaced
	}
	names := func(since time.Time) bool {
		return slices.ContainsFunc(st.Record.Notices, func(n bankNotice) bool {
			return n.Noticed.After(since) && (slices.Contains(n.Tables, w.quoted("left_accounts")) || slices.Contains(n.Tables, w.quoted("right_accounts")))
		})
	}
	switch {
	case names(lostAt):
		*noticed = lostAt
	case noticed.Equal(lostAt) && !names(time.Time{}) && st.busy() == "" && w.lostAt.Load() == lostAt.UnixNano():
		w.oracle.healed()
	}
}

const (
	confirmedSQL = "SELECT coalesce(max(confirmed_flush_lsn), '0/0')::text FROM pg_replication_slots WHERE slot_name = 'holdfast'"
	endSQL       = "SELECT pg_current_wal_insert_lsn()::text"
)

func position(ctx context.Context, conn *pgx.Conn, sql string) (uint64, error) {
	var text string
	if err := conn.QueryRow(ctx, sql).Scan(&text); err != nil {
		return 0, err
	}
	lsn, err := pglogrepl.ParseLSN(text)
	return uint64(lsn), err
}

// ask asks the server for a position, on a connection that is kept.
func (w *bankWorld) ask(ctx context.Context, sql string) (uint64, error) {
	if w.admin == nil {
		conn, err := w.pg.Connect(ctx)
		if err != nil {
			return 0, err
		}
		w.admin = conn
	}
	at, err := position(ctx, w.admin, sql)
	if err != nil {
		w.hangUp(ctx)
	}
	return at, err
}

func (w *bankWorld) hangUp(ctx context.Context) {
	if w.admin != nil {
		_ = w.admin.Close(context.WithoutCancel(ctx))
		w.admin = nil
	}
}

// flow waits until positions are acknowledged again while writers write.
func (w *bankWorld) flow(ctx context.Context) error {
	if w.variant.durable { // each takes two checkpoints
		return w.rig.flow(ctx, w.tap.moved, 1)
	}
	return w.rig.flow(ctx, w.tap.moved, enough)
}

func (w *bankWorld) settle(ctx context.Context) error {
	release := w.gate.hold()
	defer release()
	defer w.hangUp(ctx)
	patience := w.patience
	if w.lost || w.copying {
		patience *= 2 // tables are read again, one after the other
	}
	limit, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := w.rest(limit); err != nil {
		return err
	}
	var d differences
	var err error
	if w.lost || w.copying {
		d, err = w.heal(limit)
	} else {
		d, err = difference(limit, w.pg, w.sim, w.tables(), w.oracle.lost())
	}
	if err != nil {
		return err
	}
	if d.what != "" {
		return &lostError{d.what}
	}
	if !w.lost && d.gone > w.gone {
		return &lostError{fmt.Sprintf("%d rows of the table without a key are gone, and no pipeline has lost any since they were compared last", d.gone-w.gone)}
	}
	w.countTwice(d.twice - w.twice)
	w.twice, w.gone, w.lost, w.copying = d.twice, d.gone, false, false
	w.added.Store(false) // so that all of it is acknowledged when it is left out
	w.oracle.rests()
	return nil
}

// countTwice judges rows of the ledger that are there once more.
func (w *bankWorld) countTwice(more int) {
	if more <= 0 {
		return
	}
	if !w.variant.progress {
		w.oracle.expect("a row of a table without a key was applied once more, under at_least_once", more)
		return
	}
	w.oracle.mu.Lock()
	defer w.oracle.mu.Unlock()
	w.oracle.double = append(w.oracle.double, fmt.Sprintf("%d rows of the ledger are there once more than they should be", more))
}

func (w *bankWorld) rest(ctx context.Context) error {
	var end uint64
	err := harness.Eventually(ctx, "the server says where its WAL ends", func(ctx context.Context) (any, bool) {
		var err error
		end, err = w.ask(ctx, endSQL)
		return err, err == nil
	})
	if err != nil {
		return err
	}
	err = w.eventually(ctx, "confirmed_flush_lsn reaches "+decode.FormatLSN(end), func(ctx context.Context) (any, bool) {
		at, err := w.ask(ctx, confirmedSQL)
		if err != nil {
			return err, false
		}
		return decode.FormatLSN(at), at >= end
	})
	if err != nil {
		return w.noProgress(context.WithoutCancel(ctx), err)
	}
	return nil
}

func (w *bankWorld) crashDestination(ctx context.Context, keep core.Keep) {
	switch {
	case keep == core.KeepJournal:
		w.oracle.comesBack(committedOpen, false, false)
		w.sim.Crash(keep)
	case keep == core.KeepCheckpoint && w.variant.durable && !w.lost: // behind a loss the last checkpoint can be one of that
		told := w.tap.told()
		w.oracle.comesBack(sentOutside, true, false)
		w.sim.Crash(keep)
		w.tap.holdAgainst(told, w.sim.Rows("writers"))
	default:
		w.lost = true
		w.oracle.comesBack(lostRows, true, true)
		w.lostAt.Store(time.Now().UnixNano())
		w.sim.Crash(keep)
	}
}

func (w *bankWorld) variantOf() *variant { return w.variant }

func (w *bankWorld) wrong() bool {
	return w.tap.wrong() || w.oracle.wrong()
}

func (w *bankWorld) compareNow(ctx context.Context) error {
	d, err := difference(ctx, w.pg, w.sim, w.tables(), w.oracle.lost())
	if err == nil && d.what != "" {
		err = &lostError{d.what}
	}
	return err
}

func (w *bankWorld) findings() findings {
	var f findings
	f.early, f.back, f.invented = w.tap.faults()
	f.torn, f.regress, f.double, f.expected = w.oracle.faults()
	return f
}

func (w *bankWorld) numbers() string {
	w.oracle.mu.Lock()
	defer w.oracle.mu.Unlock()
	w.tap.mu.Lock()
	defer w.tap.mu.Unlock()
	return fmt.Sprintf("%s: %d completed states were looked at, %d status updates checked, the slot was read %d times",
		w.variant, w.oracle.states, w.tap.updates, w.tap.samples)
}
