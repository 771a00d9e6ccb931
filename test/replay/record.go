package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/jackc/pglogrepl"

	"holdfast/internal/config"
	"holdfast/internal/decode"
	"holdfast/internal/wal"
	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// record records what the environment names: a slot, topics, or both.
func record(ctx context.Context, s *settings) error {
	ctx, cancel := context.WithTimeoutCause(ctx, s.timeout, fmt.Errorf("recording took longer than -timeout %s", s.timeout))
	defer cancel()
	if !s.env.has("PGSOURCE_DSN") && !s.env.has("KAFKASINK_BROKERS") {
		return errors.New("record: neither PGSOURCE_DSN nor KAFKASINK_BROKERS is set")
	}
	if _, err := os.Stat(filepath.Join(s.dir, manifestFile)); err == nil {
		return fmt.Errorf("record: %s has a recording already; name another folder", s.dir)
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return fmt.Errorf("record: %w", err)
	}
	m := &manifest{Version: tapeVersion, SHA256: map[string]string{}}
	if s.env.has("PGSOURCE_DSN") {
		if err := recordPostgres(ctx, s, m); err != nil {
			return fmt.Errorf("record the slot: %w", err)
		}
	}
	if s.env.has("KAFKASINK_BROKERS") {
		if err := recordKafka(ctx, s, m); err != nil {
			return fmt.Errorf("record the topics: %w", err)
		}
	}
	return m.save(s.dir)
}

func recordPostgres(ctx context.Context, s *settings, m *manifest) error {
	env := s.env.of("PGSOURCE_")
	needed := env
	if !env.has("FELDERA_URL") {
		needed = env.with(map[string]string{"FELDERA_URL": "http://127.0.0.1:1", "FELDERA_PIPELINE": "replay"}) // it is not asked
	}
	c, err := config.LoadPGSource(needed.list())
	if err != nil {
		return err //nolint:wrapcheck // names the settings
	}
	dsn, err := c.DSN.Value()
	if err == nil {
		err = wal.CheckDSN("PGSOURCE_DSN", dsn)
	}
	if err != nil {
		return err //nolint:wrapcheck // as above
	}
	src, err := openSource(ctx, dsn)
	if err != nil {
		return err
	}
	defer src.close(context.WithoutCancel(ctx))
	part, stream, err := recordStream(ctx, s, m, c, src)
	if err != nil {
		return err
	}
	program, err := harness.Build(ctx, "./cmd/pgsource", harness.BuildOptions{})
	if err != nil {
		return err
	}
	// The tables that the simulator stands in with.
	tables, err := harness.Run(ctx, harness.DaemonOptions{Program: program, Args: []string{"feldera-sql"}, Env: needed.with(map[string]string{"FELDERA_URL": "", "FELDERA_PIPELINE": ""})})
	if err != nil {
		return err
	}
	if tables.ExitCode != 0 {
		return fmt.Errorf("pgsource feldera-sql ended with code %d: %s", tables.ExitCode, tables.Stderr)
	}
	if err := recordText(s, m, programFile, tables.Stdout); err != nil {
		return err
	}
	// A play whose questions go to the source: what it answers is recorded.
	answers := newCatalogue()
	answers.ask = src.ask
	sim, err := startSim(ctx, tables.Stdout)
	if err != nil {
		return err
	}
	played := playPostgres(ctx, s, part, stream, answers, program, sim.env())
	if err := errors.Join(played, sim.Close()); err != nil {
		return fmt.Errorf("play it once, to record what pgsource asks: %w", err)
	}
	w, err := newTapeWriter(s.dir, catalogueFile, s.limit)
	if err != nil {
		return err
	}
	for _, a := range answers.added {
		line, err := jsonLine(a)
		if err == nil {
			err = w.write(line)
		}
		if err != nil {
			w.abandon()
			return err
		}
	}
	if err := w.finish(m); err != nil {
		return err
	}
	m.Postgres = part
	s.say("recorded slot %s: %d transactions, %d messages, from %s to %s; the slot was not moved", part.Slot, part.Commits, len(stream), part.From, part.To)
	return nil
}

func recordText(s *settings, m *manifest, name, text string) error {
	w, err := newTapeWriter(s.dir, name, s.limit)
	if err != nil {
		return err
	}
	if err := w.write([]byte(strings.TrimSuffix(text, "\n"))); err != nil {
		w.abandon()
		return err
	}
	return w.finish(m)
}

// mostChanges bounds what the server decodes for one recording, whose result it
// keeps until it is read.
const mostChanges = 200_000

// recordStream writes the slot's messages, whole transactions only, without
// moving the slot.
func recordStream(ctx context.Context, s *settings, m *manifest, c *config.PGSource, src *source) (*postgresPart, []message, error) {
	conn := src.plain
	part := &postgresPart{Slot: c.Slot, Publication: c.Publication, Tables: s.env["PGSOURCE_TABLES"], Parameters: map[string]string{}}
	for _, name := range []string{"server_version", "server_encoding", "client_encoding", "integer_datetimes", "standard_conforming_strings", "DateStyle", "IntervalStyle", "TimeZone", "is_superuser", "session_authorization"} {
		if v := conn.ParameterStatus(name); v != "" {
			part.Parameters[name] = v
		}
	}
	about := conn.ExecParams(ctx, `SELECT current_database(), current_user, coalesce(confirmed_flush_lsn, '0/0')::text, active::text FROM pg_replication_slots WHERE slot_name = $1`,
		[][]byte{[]byte(c.Slot)}, nil, nil, nil).Read()
	if about.Err != nil {
		return nil, nil, fmt.Errorf("look up slot %q: %w", c.Slot, about.Err)
	}
	if len(about.Rows) != 1 {
		return nil, nil, fmt.Errorf("there is no slot %q", c.Slot)
	}
	if string(about.Rows[0][3]) == "true" {
		return nil, nil, fmt.Errorf("slot %q is in use, and a slot has one reader: stop its pgsource, or leave it blocked, for as long as it is recorded", c.Slot)
	}
	part.Database, part.User = string(about.Rows[0][0]), string(about.Rows[0][1])
	if err := part.From.UnmarshalText(about.Rows[0][2]); err != nil {
		return nil, nil, fmt.Errorf("read the slot's position: %w", err)
	}
	part.To = part.From
	w, err := newTapeWriter(s.dir, streamFile, s.limit)
	if err != nil {
		return nil, nil, err
	}
	defer w.abandon() // again, where it is finished: no harm
	rows := conn.ExecParams(ctx, `SELECT lsn::text, data FROM pg_logical_slot_peek_binary_changes($1, NULL, $3::int, 'proto_version', '1', 'publication_names', $2)`,
		[][]byte{[]byte(c.Slot), []byte(`"` + strings.ReplaceAll(c.Publication, `"`, `""`) + `"`), []byte(strconv.Itoa(mostChanges))}, nil, nil, []int16{0, 1})
	all, err := collect(rows, part, w)
	if errors.Is(err, errFull) {
		s.say("the limit of %d MiB is reached: what comes behind the last whole transaction is left out", s.limit>>20)
		err = nil
	}
	if err != nil {
		return nil, nil, err
	}
	if part.Commits == 0 {
		return nil, nil, fmt.Errorf("slot %q has no whole transaction of these tables to record: make some traffic first", c.Slot)
	}
	return part, all, w.finish(m)
}

// collect writes transaction by transaction.
func collect(rows resultReader, part *postgresPart, w *tapeWriter) ([]message, error) {
	decoder := decode.NewPgOutput()
	var all, open []message
	var lines [][]byte
	var failed error
	for rows.NextRow() {
		if failed != nil {
			continue // the rest of the answer has to be read all the same
		}
		v := rows.Values()
		at, err := pglogrepl.ParseLSN(string(v[0]))
		if err != nil {
			failed = err
			continue
		}
		msg := message{LSN: lsn(at), Data: append([]byte(nil), v[1]...)}
		decoded, err := decoder.Decode(msg.Data)
		if err != nil {
			failed = fmt.Errorf("the server sent what cannot be decoded, at %s: %w", msg.LSN, err)
			continue
		}
		line, err := jsonLine(msg)
		if err != nil {
			failed = err
			continue
		}
		open, lines = append(open, msg), append(lines, line)
		if decode.MessageKind(msg.Data[0]) == decode.MsgCommit {
			if failed = w.write(lines...); failed == nil {
				all, part.To = append(all, open...), lsn(decoded.EndLSN)
				part.Commits++
			}
			open, lines = nil, nil
		}
	}
	if _, err := rows.Close(); err != nil {
		return nil, fmt.Errorf("read the slot: %w", err)
	}
	return all, failed
}

// sim is the simulator where no Feldera is named.
type sim struct{ *felderasim.Sim }

func startSim(ctx context.Context, program string) (*sim, error) {
	inner, err := felderasim.New(felderasim.Options{SQL: program, Pipeline: "replay"})
	if err == nil {
		err = inner.Start(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("start the simulator of Feldera: %w", err)
	}
	return &sim{inner}, nil
}

// env names the simulator as the destination. It applies nothing late, so
// nobody has to wait for that.
func (s *sim) env() environment {
	return environment{
		"FELDERA_URL": s.URL(), "FELDERA_PIPELINE": "replay", "FELDERA_REQUEST_TIMEOUT": "1s", "FELDERA_REQUEST_LIFETIME": "1s",
		"FELDERA_API_KEY": "", "FELDERA_API_KEY_FILE": "", "FELDERA_CA_FILE": "",
	}
}
