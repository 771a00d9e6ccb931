package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"

	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// bankWorld is a pgsource with a bank as its source.
type bankWorld struct {
	rig
	pg     *harness.Postgres
	tap    *postgresTap
	oracle *bankOracle
}

// openBank starts everything but the daemon.
func openBank(ctx context.Context, dir string, random *rand.Rand) (_ world, err error) {
	w := &bankWorld{rig: rig{dir: dir, random: random}, oracle: newBankOracle()}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.pg, err = harness.StartPostgres(ctx, harness.PostgresOptions{Settings: map[string]string{"max_connections": "50"}}); err != nil {
		return nil, err
	}
	if err = w.pg.Exec(ctx, bankSource); err != nil {
		return nil, err
	}
	w.sim, err = felderasim.New(felderasim.Options{
		SQL: bankProgram, Edition: felderasim.Enterprise, Model: core.ModelExactlyOnce, Observe: w.oracle.observe,
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
	w.tap = newPostgresTap(w.oracle)
	w.proxy.Tap(w.tap.connection)
	program, err := harness.Build(ctx, "./cmd/pgsource", harness.BuildOptions{Tags: "crashpoints"})
	if err != nil {
		return nil, err
	}
	w.daemon, err = harness.StartDaemon(harness.DaemonOptions{Program: program, ListenVar: "PGSOURCE_LISTEN", Env: w.env()})
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
	w.stopWriters = stop
	for id := 1; id <= writers; id++ {
		writer := &bankWriter{id: id, random: rand.New(rand.NewPCG(random.Uint64(), 0)), large: 25}
		w.write(writing, func(ctx context.Context) { writer.run(ctx, w.pg, &w.gate) })
	}
	return w, nil
}

func (w *bankWorld) env() map[string]string {
	return map[string]string{
		"PGSOURCE_DSN":    w.pg.DSNFor("postgres", "", "postgres", w.proxy.Addr()),
		"PGSOURCE_TABLES": "public.left_accounts,public.right_accounts,public.writers,public.filler",
		"PGSOURCE_CREATE": "true",
		"PGSOURCE_STATE":  "file:" + filepath.Join(w.pg.Dir(), "pgsource.json"),
		"FELDERA_URL":     w.sim.URL(), "FELDERA_PIPELINE": "p",
		"FELDERA_REQUEST_TIMEOUT": "2s", "FELDERA_REQUEST_LIFETIME": "2s",
		"PGSOURCE_MEMORY_LIMIT": "4MiB", "PGSOURCE_BATCH_ROWS": "200", "PGSOURCE_BATCH_BYTES": "256KiB",
		"PGSOURCE_STALL_TIMEOUT": "5s", "PGSOURCE_SHUTDOWN_TIMEOUT": "5s", "PGSOURCE_SPILL_DIR": w.dir,
	}
}

func (w *bankWorld) close() {
	w.rig.close()
	if w.pg != nil {
		_ = w.pg.Close()
	}
}

func (w *bankWorld) killSource(ctx context.Context) error {
	return w.pg.Restart(ctx, harness.Immediate)
}

func (w *bankWorld) provoke(_ context.Context, p crash.Point) error {
	switch p {
	case crash.PgReconnect:
		w.proxy.Cut()
	case crash.PgShutdown, crash.PgShutdownLastWord:
		return w.terminate()
	}
	return nil
}

func (w *bankWorld) settle(ctx context.Context) error {
	release := w.gate.hold()
	defer release()
	limit, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var end uint64
	err := harness.Eventually(limit, "the server says where its WAL ends", func(ctx context.Context) (any, bool) {
		var err error
		end, err = w.pg.CurrentLSN(ctx)
		return err, err == nil
	})
	if err != nil {
		return err
	}
	err = harness.Eventually(limit, "confirmed_flush_lsn reaches "+decode.FormatLSN(end), func(ctx context.Context) (any, bool) {
		at, err := w.pg.ConfirmedFlushLSN(ctx, "holdfast")
		if err != nil {
			return err, false
		}
		return decode.FormatLSN(at), at >= end
	})
	if err != nil {
		return w.noProgress(ctx, err)
	}
	diff, err := difference(limit, w.pg, w.sim)
	if err != nil {
		return err
	}
	if diff != "" {
		return &lostError{diff}
	}
	w.oracle.excuseTorn(false)
	return nil
}

func (w *bankWorld) fromJournal() {
	w.oracle.excuseTorn(true)
	w.sim.Crash(core.KeepJournal)
}

func (w *bankWorld) findings() findings {
	var f findings
	f.early, f.back, f.invented = w.tap.faults()
	f.torn, f.regress = w.oracle.faults()
	return f
}

func (w *bankWorld) numbers() string {
	w.oracle.mu.Lock()
	defer w.oracle.mu.Unlock()
	w.tap.mu.Lock()
	defer w.tap.mu.Unlock()
	return fmt.Sprintf("pgsource: %d completed states were looked at, %d status updates checked; %d states were torn by a pipeline that came back from its journal, as is its way",
		w.oracle.states, w.tap.updates, w.oracle.excused)
}
