package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
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
	// lost: the pipeline has lost what it had completed, and nobody has mended
	// it yet.
	lost   bool
	lostAt time.Time
	// since is the last row of the ledger that a loss may have taken.
	since int64
	twice int // as of the last comparison
}

// openBank starts everything but the daemon.
func openBank(ctx context.Context, opts worldOptions) (_ world, err error) {
	w := &bankWorld{rig: rig{dir: opts.dir, patience: patience}, variant: opts.variant, oracle: newBankOracle()}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.pg, err = harness.StartPostgres(ctx, harness.PostgresOptions{Settings: map[string]string{"max_connections": "50"}}); err != nil {
		return nil, err
	}
	if err = w.pg.Exec(ctx, bankSource(opts.variant)); err != nil {
		return nil, err
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
	w.tap = newPostgresTap(w.oracle, opts.variant.progress)
	w.proxy.Tap(w.tap.connection)
	if w.program, err = opts.build(ctx); err != nil {
		return nil, err
	}
	w.settings = opts.daemonEnv(w.env())
	w.daemon, err = harness.StartDaemon(harness.DaemonOptions{Program: w.program, ListenVar: "PGSOURCE_LISTEN", Env: w.settings})
	if err != nil {
		return nil, err
	}
	if err = w.ready(ctx); err != nil {
		return nil, fmt.Errorf("first start: %w", err)
	}
	if err = w.pg.Exec(ctx, bankRows); err != nil {
		return nil, err
	}
	// The first runs of a daemon make its slot: without that a crash proves
	// nothing.
	if err = w.settle(ctx); err != nil {
		return nil, fmt.Errorf("first rows: %w", err)
	}
	writing, stop := context.WithCancel(context.WithoutCancel(ctx))
	w.stopWriters, w.patience = stop, opts.patienceOr()
	random := opts.random()
	for id := 1; id <= writers; id++ {
		writer := &bankWriter{id: id, random: rand.New(rand.NewPCG(random.Uint64(), 0)), large: 25}
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
		// The tables are empty when the slot is made; how existing rows are copied
		// is test/snapshot's.
		"PGSOURCE_SNAPSHOT": "never",
		"FELDERA_URL":       w.sim.URL(), "FELDERA_PIPELINE": "p",
		"FELDERA_REQUEST_TIMEOUT": "4s", "FELDERA_REQUEST_LIFETIME": "4s",
		"PGSOURCE_MEMORY_LIMIT": "4MiB", "PGSOURCE_BATCH_ROWS": "200", "PGSOURCE_BATCH_BYTES": "256KiB",
		"PGSOURCE_STALL_TIMEOUT": "5s", "PGSOURCE_SHUTDOWN_TIMEOUT": "5s", "PGSOURCE_SPILL_DIR": w.dir,
	}
}

func (w *bankWorld) stateFile() string { return filepath.Join(w.pg.Dir(), "pgsource.json") }

func (w *bankWorld) close() {
	w.rig.close()
	if w.pg != nil {
		_ = w.pg.Close()
	}
}

func (w *bankWorld) killSource(ctx context.Context) error {
	return w.pg.Restart(ctx, harness.Immediate)
}

func (w *bankWorld) unclean() {}

// otherMember does nothing: a slot has one reader.
func (w *bankWorld) otherMember(context.Context, bool) error { return nil }

func (w *bankWorld) provoke(ctx context.Context, p crash.Point) error {
	switch p {
	case crash.PgReconnect:
		w.proxy.Cut()
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
	turn := time.NewTicker(50 * time.Millisecond)
	defer turn.Stop()
	for {
		select {
		case <-turn.C:
		case <-ctx.Done():
			return
		}
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
	limit, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	if err := w.rest(limit); err != nil {
		return err
	}
	diff, twice, err := difference(limit, w.pg, w.sim, w.since)
	if err == nil && diff != "" && w.lost {
		diff, twice, err = w.mend(limit, diff)
	}
	if err != nil {
		return err
	}
	if diff != "" {
		return &lostError{diff}
	}
	if more := twice - w.twice; more > 0 {
		w.oracle.mu.Lock()
		if w.variant.progress {
			w.oracle.double = append(w.oracle.double, fmt.Sprintf("%d rows of the ledger are there once more than they should be", more))
		} else {
			w.oracle.expected["a row of a table without a key was applied once more, under at_least_once"] += more
		}
		w.oracle.mu.Unlock()
	}
	w.twice, w.lost = twice, false
	w.oracle.comesBack("", false)
	return nil
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
	err = harness.Eventually(ctx, "confirmed_flush_lsn reaches "+decode.FormatLSN(end), func(ctx context.Context) (any, bool) {
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

// mend is for a pipeline that has lost what was acknowledged. The daemon has to
// load it again, or to have said so: then the rows are sent again by touching
// them.
func (w *bankWorld) mend(ctx context.Context, diff string) (string, int, error) {
	healed, twice := false, 0
	silent := harness.Eventually(ctx, "the tables are equal again, or the state gives notice of the loss", func(ctx context.Context) (any, bool) {
		var now string
		var err error
		if now, twice, err = difference(ctx, w.pg, w.sim, w.since); err == nil && now == "" {
			healed = true
			return nil, true
		}
		return w.noticed()
	})
	if silent != nil {
		return "", 0, &lostError{diff + "; and nobody noticed: " + silent.Error()}
	}
	if healed {
		w.oracle.mu.Lock()
		defer w.oracle.mu.Unlock()
		w.oracle.expected["the pipeline lost rows, and pgsource loaded them again"]++
		return "", twice, nil
	}
	w.oracle.mu.Lock()
	w.oracle.expected["the pipeline lost rows, and pgsource gave notice"]++
	w.oracle.mu.Unlock()
	if err := w.stopDaemon(ctx); err != nil {
		return "", 0, err
	}
	accepted, err := harness.Run(ctx, harness.DaemonOptions{Program: w.program, Args: []string{"state", "accept", "-yes"}, Env: w.settings})
	if err != nil || accepted.ExitCode != 0 {
		return "", 0, fmt.Errorf("accept the notice: %w, %+v", err, accepted)
	}
	if err := w.daemon.Restart(nil); err != nil {
		return "", 0, err
	}
	for _, sql := range []string{
		"UPDATE left_accounts SET version = version + 1; UPDATE right_accounts SET version = version + 1; UPDATE writers SET n = n",
		// A changed picture is sent, an unchanged one is not. What was deleted
		// since the checkpoint is back, and goes by being put in and deleted.
		"INSERT INTO filler SELECT i, 'mended' FROM generate_series(0, 6000) i ON CONFLICT (id) DO UPDATE SET picture = filler.picture || ''",
		"DELETE FROM filler WHERE note = 'mended'",
	} {
		if err := w.pg.Exec(ctx, sql); err != nil {
			return "", 0, err
		}
	}
	if err := w.rest(ctx); err != nil {
		return "", 0, err
	}
	return difference(ctx, w.pg, w.sim, w.since)
}

func (w *bankWorld) crashDestination(ctx context.Context, keep core.Keep) {
	switch {
	case keep == core.KeepJournal:
		w.oracle.comesBack("a pipeline that comes back from its journal commits what was open, as is its way", false)
		w.sim.Crash(keep)
	case keep == core.KeepCheckpoint && w.variant.durable:
		told := w.tap.told()
		w.oracle.comesBack("", true)
		w.sim.Crash(keep)
		w.tap.holdAgainst(told, w.sim.Rows("writers"))
	default:
		w.lost, w.lostAt = true, time.Now()
		release := w.gate.hold()
		w.since = w.ledgerEnd(ctx)
		release()
		w.oracle.comesBack("a pipeline that lost rows lacks them until they are sent again", true)
		w.sim.Crash(keep)
	}
}

// noticed tells whether the state gives notice of what the pipeline lost last.
func (w *bankWorld) noticed() (seen any, is bool) {
	text, err := os.ReadFile(w.stateFile())
	if err != nil {
		return err, false
	}
	var st struct {
		Record struct {
			Notices []struct {
				Noticed time.Time `json:"noticed_at"`
			} `json:"notices"`
		} `json:"record"`
	}
	err = json.Unmarshal(text, &st)
	n := len(st.Record.Notices)
	return fmt.Sprintf("%s %v", text, err), err == nil && n > 0 && st.Record.Notices[n-1].Noticed.After(w.lostAt)
}

// ledgerEnd gives the ledger's last row, which a loss can take.
func (w *bankWorld) ledgerEnd(ctx context.Context) int64 {
	n, err := harness.QueryValue[int64](ctx, w.pg, "SELECT coalesce(max(id), 0) FROM ledger")
	if err != nil {
		panic(fmt.Sprintf("a server that nobody stopped does not answer: %v", err))
	}
	return n
}

func (w *bankWorld) variantOf() *variant { return w.variant }

func (w *bankWorld) wrong() bool {
	return w.tap.wrong() || w.oracle.wrong()
}

func (w *bankWorld) compareNow(ctx context.Context) error {
	diff, _, err := difference(ctx, w.pg, w.sim, w.since)
	if err == nil && diff != "" {
		err = &lostError{diff}
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
