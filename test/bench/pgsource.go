package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
	"holdfast/test/harness"
)

const (
	publication = "bench"
	baseSlot    = "bench_base"
	// runTimeout bounds one run; it takes seconds, or minutes for gigabytes.
	runTimeout = 15 * time.Minute
)

// pgBench is the server with its backlog.
type pgBench struct {
	pg   *harness.Postgres
	conn *pgx.Conn
	dsn  string // over the unix socket
	bin  string // the folder of pg_recvlogical
	end  uint64 // behind the last row of the backlog
}

func measurePgsource(ctx context.Context, o options, progress func(string, ...any)) (s series, err error) {
	transactions := o.rows / o.transaction
	s = series{
		Workload: fmt.Sprintf("Postgres: a backlog of %d transactions with %d inserts each, 9 columns, over the unix socket", transactions, o.transaction),
		Unit:     "rows", Count: transactions * o.transaction,
		Notes: []string{
			"Each run drains a fresh copy of the same slot. pg_recvlogical writes to /dev/null and ends at the last LSN; pgsource ends when the",
			"server's confirmed_flush_lsn has passed it; once by the replication protocol and once by plain SQL. All times include the start of the process. paired: median of t(pg_recvlogical)/t(program).",
		},
	}
	program, err := harness.Build(ctx, "./cmd/pgsource", harness.BuildOptions{})
	if err != nil {
		return s, err
	}
	dir, err := os.MkdirTemp("", "hf-bench-")
	if err != nil {
		return s, fmt.Errorf("make a folder: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	feldera, err := startFeldera(ctx, dir)
	if err != nil {
		return s, err
	}
	defer feldera.proc.Close()
	b := &pgBench{}
	b.pg, err = harness.StartPostgres(ctx, harness.PostgresOptions{Settings: map[string]string{
		"autovacuum": "off", "max_wal_size": "8GB", "checkpoint_timeout": "1h", "shared_buffers": "128MB",
	}})
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, b.pg.Close()) }()
	if err := b.fill(ctx, transactions, o.transaction, o.width); err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, b.conn.Close(context.WithoutCancel(ctx))) }()
	progress("%s: %d rows are behind slot %s", b.pg.Version, s.Count, baseSlot)

	pgsource := func(name string, settings ...string) func(context.Context, string) (result, error) {
		return func(ctx context.Context, slot string) (result, error) {
			return b.pgsource(ctx, feldera, name, program, slot, s.Count, settings)
		}
	}
	for round := range o.rounds {
		for _, run := range []func(context.Context, string) (result, error){
			b.recvlogical,
			pgsource("pgsource"),
			pgsource("pgsource, peek", "PGSOURCE_TRANSPORT=peek"),
		} {
			r, err := b.onCopy(ctx, "bench_run_"+strconv.Itoa(len(s.Runs)), run)
			if err != nil {
				return s, err
			}
			r.Round = round + 1
			s.Runs = append(s.Runs, r)
			progress("round %d: %-14s %6.2f s", r.Round, r.Program, r.Seconds)
		}
	}
	return s, nil
}

// fill parks the base slot, then makes the backlog behind it.
func (b *pgBench) fill(ctx context.Context, transactions, size, width int) error {
	var err error
	if b.conn, err = b.pg.Connect(ctx); err != nil {
		return err
	}
	var socket, port string
	err = b.conn.QueryRow(ctx, `SELECT current_setting('unix_socket_directories'), current_setting('port'), setting FROM pg_config WHERE name = 'BINDIR'`).Scan(&socket, &port, &b.bin)
	if err != nil {
		return fmt.Errorf("ask the server where it is: %w", err)
	}
	b.dsn = fmt.Sprintf("host=%s port=%s user=postgres dbname=postgres sslmode=disable", socket, port)
	for _, sql := range []string{
		`CREATE TABLE orders (
			id bigint PRIMARY KEY, customer int NOT NULL, status text NOT NULL, amount numeric(12, 2) NOT NULL, currency text NOT NULL,
			note text, paid boolean NOT NULL, created timestamptz NOT NULL, updated timestamptz NOT NULL)`,
		`CREATE PUBLICATION ` + publication + ` FOR TABLE orders`,
		`SELECT pg_create_logical_replication_slot('` + baseSlot + `', 'pgoutput')`,
		fmt.Sprintf(`DO $$ BEGIN FOR t IN 0..%d LOOP
			INSERT INTO orders SELECT i, i %% 5000, 'shipped', (i %% 100000) / 100.0, 'EUR',
				'order ' || i || ' is to be left with the neighbours, who are at home until seven in the evening' || repeat('x', %d - 100),
				i %% 2 = 0, '2026-01-02 03:04:05.123456+00'::timestamptz + i * interval '1 second', '2026-02-03 04:05:06.654321+00'
			FROM generate_series(t * %d + 1, (t + 1) * %d) i;
			COMMIT; END LOOP; END $$`, transactions-1, width, size, size),
	} {
		if _, err := b.conn.Exec(ctx, sql); err != nil {
			return errors.Join(fmt.Errorf("make the backlog: %w", err), b.conn.Close(ctx))
		}
	}
	if b.end, err = b.pg.CurrentLSN(ctx); err != nil {
		return errors.Join(err, b.conn.Close(ctx))
	}
	return nil
}

// onCopy does one run on a copy of the base slot, and drops it when the server
// has seen the end of the run's connection.
func (b *pgBench) onCopy(ctx context.Context, slot string, run func(context.Context, string) (result, error)) (r result, err error) {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	if _, err := b.conn.Exec(ctx, `SELECT pg_copy_logical_replication_slot($1, $2)`, baseSlot, slot); err != nil {
		return r, fmt.Errorf("copy slot %s: %w", baseSlot, err)
	}
	if r, err = run(ctx, slot); err != nil {
		return r, err
	}
	err = harness.Eventually(ctx, "the end of the connection to slot "+slot, func(ctx context.Context) (any, bool) {
		_, err := b.conn.Exec(ctx, `SELECT pg_drop_replication_slot($1)`, slot)
		return err, err == nil
	})
	return r, err
}

// recvlogical is the reference.
func (b *pgBench) recvlogical(ctx context.Context, slot string) (result, error) {
	const name = "pg_recvlogical"
	c, err := startChild(name, filepath.Join(b.bin, name), []string{
		"--dbname=" + b.dsn, "--slot=" + slot, "--start", "--no-loop", "--file=/dev/null", "--endpos=" + decode.FormatLSN(b.end),
		"--option=proto_version=1", "--option=publication_names=" + publication,
	}, nil)
	if err != nil {
		return result{}, err
	}
	took, err := c.until(ctx, nil)
	if err != nil {
		return result{}, err
	}
	used, err := c.used()
	return result{Program: name, Seconds: took.Seconds(), usage: used}, err
}

// pgsource is one run of the subject, with settings of its own.
func (b *pgBench) pgsource(ctx context.Context, feldera *nullFeldera, name, program, slot string, count int, settings []string) (result, error) {
	env := append([]string{
		"PGSOURCE_DSN=" + b.dsn, "PGSOURCE_TABLES=public.orders", "PGSOURCE_PUBLICATION=" + publication,
		"PGSOURCE_SLOT=" + slot, "PGSOURCE_LISTEN=127.0.0.1:0", "PGSOURCE_STATE=file:" + filepath.Join(b.pg.Dir(), slot+".json"),
	}, settings...)
	// A slot without a state may have had another reader, whose requests a first
	// start would wait for.
	begin := exec.CommandContext(ctx, program, "state", "reset", "-yes")
	begin.Env = append(slices.Clone(env), "FELDERA_URL="+feldera.url, "FELDERA_PIPELINE="+pipeline)
	if out, err := begin.CombinedOutput(); err != nil {
		return result{}, fmt.Errorf("begin the state: %w: %s", err, out)
	}
	return feldera.subject(ctx, name, program, env, count, func(ctx context.Context) (bool, error) { return b.confirmed(ctx, slot) })
}

// confirmed tells whether the server holds the whole backlog as acknowledged.
func (b *pgBench) confirmed(ctx context.Context, slot string) (done bool, err error) {
	err = b.conn.QueryRow(ctx, `SELECT confirmed_flush_lsn >= $2::text::pg_lsn FROM pg_replication_slots WHERE slot_name = $1`, slot, decode.FormatLSN(b.end)).Scan(&done)
	return done, err
}
