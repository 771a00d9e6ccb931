package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/config"
	"holdfast/internal/feldera"
	"holdfast/test/harness"
)

// resultReader is what is read of a query's answer.
type resultReader interface {
	NextRow() bool
	Values() [][]byte
	Close() (pgconn.CommandTag, error)
}

// playTwice plays a recording two times and holds the tables of the second time
// against those of the first.
func playTwice(ctx context.Context, s *settings) error {
	m, err := loadManifest(s.dir)
	if err != nil {
		return err
	}
	destination := s.env
	if !s.env.has("FELDERA_URL") {
		program, err := simProgram(s, m)
		if err != nil {
			return err
		}
		simulated, err := startSim(ctx, program)
		if err != nil {
			return err
		}
		defer func() { _ = simulated.Close() }() // nothing is kept in it
		destination = s.env.with(simulated.env())
		s.say("FELDERA_URL is not set: the destination is the SIMULATOR of Feldera")
	}
	_, err = playInto(ctx, s, m, destination)
	return err
}

// simProgram is the simulator's program: the tables of the recorded slot, and
// what -program says.
func simProgram(s *settings, m *manifest) (string, error) {
	program := ""
	for _, path := range []string{s.program, filepath.Join(s.dir, programFile)} {
		if path == "" || path != s.program && m.SHA256[programFile] == "" {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("read the program: %w", err)
		}
		program += string(text) + "\n"
	}
	if program == "" {
		return "", errors.New("only topics were recorded, whose tables nothing here knows: set FELDERA_URL and FELDERA_PIPELINE, or name the tables with -program")
	}
	return program, nil
}

// playInto plays twice into a destination and gives the tables' states.
func playInto(ctx context.Context, s *settings, m *manifest, destination environment) (map[string]state, error) {
	tables, err := tablesOf(m, destination)
	if err != nil {
		return nil, err
	}
	client, err := client(destination)
	if err != nil {
		return nil, err
	}
	defer client.CloseIdle()
	var first map[string]state
	for time := range 2 {
		if err := playOnce(ctx, s, m, destination, time); err != nil {
			return nil, fmt.Errorf("play %d: %w", time+1, err)
		}
		now, err := states(ctx, client, tables)
		if err != nil {
			return nil, fmt.Errorf("after play %d: %w", time+1, err)
		}
		for _, t := range tables {
			s.say("after play %d: table %s has %d rows, digest %s", time+1, t, now[t].rows, now[t].digest[:16])
		}
		if first == nil {
			first = now
			continue
		}
		var differ []string
		for _, t := range tables {
			if now[t] != first[t] {
				differ = append(differ, fmt.Sprintf("%s (%d rows, then %d)", t, first[t].rows, now[t].rows))
			}
		}
		if len(differ) > 0 {
			return nil, fmt.Errorf("NOT EQUAL after the second play: %s", strings.Join(differ, ", "))
		}
		s.say("EQUAL: the second play changed nothing in %d tables", len(tables))
	}
	return first, nil
}

func playOnce(ctx context.Context, s *settings, m *manifest, destination environment, time int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, s.timeout, fmt.Errorf("it took longer than -timeout %s", s.timeout))
	defer cancel()
	if m.Postgres != nil {
		program, err := harness.Build(ctx, "./cmd/pgsource", harness.BuildOptions{})
		if err != nil {
			return err
		}
		answers := newCatalogue()
		if err := readLines(s.dir, m, catalogueFile, func(a answer) error { answers.put(a); return nil }); err != nil {
			return err
		}
		var stream []message
		if err := readLines(s.dir, m, streamFile, func(msg message) error { stream = append(stream, msg); return nil }); err != nil {
			return err
		}
		if err := playPostgres(ctx, s, m.Postgres, stream, answers, program, destination); err != nil {
			return err
		}
	}
	if m.Kafka != nil {
		return playKafka(ctx, s, m, destination, time)
	}
	return nil
}

// playPostgres lets pgsource read the stretch once and waits until it has
// confirmed all of it. It has a state of its own each time, so that it begins
// at the beginning.
func playPostgres(ctx context.Context, s *settings, part *postgresPart, stream []message, answers *catalogue, program string, destination environment) (err error) {
	server, err := startServer(ctx, part, stream, answers)
	if err != nil {
		return err
	}
	defer server.close()
	dir, err := os.MkdirTemp("", "hf-replay-")
	if err != nil {
		return fmt.Errorf("make a folder for pgsource: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	env := s.env.with(destination).of("PGSOURCE_").with(map[string]string{
		"PGSOURCE_DSN": server.dsn(), "PGSOURCE_DSN_FILE": "", "PGSOURCE_STATE_DSN": "", "PGSOURCE_STATE_DSN_FILE": "",
		"PGSOURCE_SLOT": part.Slot, "PGSOURCE_PUBLICATION": part.Publication, "PGSOURCE_TABLES": part.Tables,
		"PGSOURCE_STATE": "file:" + filepath.Join(dir, "state.json"), "PGSOURCE_SPILL_DIR": dir,
		"PGSOURCE_CREATE": "", "PGSOURCE_LISTEN": "", "PGSOURCE_ON_REFUSAL": "exit",
		// What is known to be in the pipeline would not be sent a second time.
		"PGSOURCE_DELIVERY": "at_least_once",
	})
	d, err := harness.StartDaemon(harness.DaemonOptions{Program: program, Env: env, ListenVar: "PGSOURCE_LISTEN"})
	if err != nil {
		return err
	}
	defer d.Close()
	return finish(ctx, d, "pgsource", func() error { return server.awaitConfirmed(ctx, d.Done()) })
}

// finish waits for a daemon to have done everything and stops it in order.
func finish(ctx context.Context, d *harness.Daemon, name string, done func() error) error {
	if err := done(); err != nil {
		return fmt.Errorf("%w; the last lines of %s:\n%s", err, name, strings.Join(d.Log().Tail(10), "\n"))
	}
	if err := d.Terminate(); err != nil {
		return err
	}
	code, err := d.Wait(ctx)
	if err != nil {
		return err
	}
	if code != 0 {
		return fmt.Errorf("%s ended with code %d; its last lines:\n%s", name, code, strings.Join(d.Log().Tail(10), "\n"))
	}
	return nil
}

// tablesOf names the destination's tables, by the daemons' own settings.
func tablesOf(m *manifest, env environment) ([]string, error) {
	var tables []string
	if m.Postgres != nil {
		c, err := config.LoadPGSource(env.of("PGSOURCE_").with(map[string]string{
			"PGSOURCE_DSN": "postgres://u@h/d", "PGSOURCE_DSN_FILE": "", "PGSOURCE_TABLES": m.Postgres.Tables, "PGSOURCE_STATE_DSN": "", "PGSOURCE_STATE_DSN_FILE": "", "PGSOURCE_STATE": "none",
		}).list())
		if err != nil {
			return nil, err //nolint:wrapcheck // names the settings
		}
		for _, t := range c.Tables {
			tables = append(tables, t.Target)
		}
	}
	if m.Kafka != nil {
		c, err := config.LoadKafkaSink(env.of("KAFKASINK_").with(map[string]string{"KAFKASINK_BROKERS": "h:1"}).list())
		if err != nil {
			return nil, err //nolint:wrapcheck // as above
		}
		for _, t := range c.Topics {
			tables = append(tables, t.Table)
		}
	}
	slices.Sort(tables)
	return slices.Compact(tables), nil
}

func client(env environment) (*feldera.Client, error) {
	// The settings of the destination are those of either daemon.
	c, err := config.LoadPGSource(env.of("FELDERA_").with(map[string]string{"PGSOURCE_DSN": "postgres://u@h/d", "PGSOURCE_TABLES": "public.t"}).list())
	if err != nil {
		return nil, err //nolint:wrapcheck // names the settings
	}
	cfg := feldera.Config{
		URL: c.Feldera.URL, Pipeline: c.Feldera.Pipeline, CAFile: c.Feldera.CAFile, Logger: slog.New(slog.DiscardHandler),
		RequestTimeout: c.Feldera.RequestTimeout, RequestLifetime: c.Feldera.RequestLifetime,
	}
	if c.Feldera.APIKey.IsSet() {
		cfg.APIKey = c.Feldera.APIKey.Value
	}
	client, err := feldera.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("read the destination: %w", err)
	}
	return client, nil
}

// state is what a table holds: equal states are equal multisets of rows.
type state struct {
	rows   uint64
	digest string
}

// states reads every table as the last completed transaction left it.
func states(ctx context.Context, client *feldera.Client, tables []string) (map[string]state, error) {
	all := map[string]state{}
	for _, table := range tables {
		// The sum of the rows' hashes: no order, and no memory for the rows.
		sum, one := new(big.Int), new(big.Int)
		st := state{}
		err := client.Query(ctx, feldera.Query{Select: "SELECT * FROM " + table, Timeout: 5 * time.Minute}, func(row []byte) error {
			h := sha256.Sum256(row)
			sum.Add(sum, one.SetBytes(h[:]))
			st.rows++
			return nil
		})
		if err != nil {
			return nil, fmt.Errorf("read table %s of the pipeline (it must be materialized): %w", table, err)
		}
		digest := sha256.Sum256(sum.Bytes())
		st.digest = hex.EncodeToString(digest[:])
		all[table] = st
	}
	return all, nil
}
