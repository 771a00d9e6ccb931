// Command newcomer is the stand of test/newcomer.sh: a private Postgres, an
// in-process Kafka broker and a simulator of Feldera with an empty pipeline, as a
// newcomer finds them before anything is set up. It prints the addresses as
// shell assignments, one a line, then READY, and ends when its input does.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

func main() {
	if err := stand(context.Background(), os.Stdin, os.Stdout); err != nil {
		_, _ = fmt.Fprintln(os.Stderr, "newcomer:", err)
		os.Exit(1)
	}
}

// program has the table of the topic.
const program = "CREATE TABLE payments (id BIGINT NOT NULL PRIMARY KEY, amount DECIMAL(12, 2)) WITH ('materialized' = 'true');"

func stand(ctx context.Context, in io.Reader, out io.Writer) (err error) {
	pg, err := harness.StartPostgres(ctx, harness.PostgresOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.Close()) }()
	broker, err := harness.StartFakeKafka(harness.FakeKafkaOptions{Topics: map[string]int32{"payments": 2}})
	if err != nil {
		return err
	}
	defer broker.Close()
	// One pipeline that nobody has made yet, and one with the topic's table.
	empty, err := startSim(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, empty.Close()) }()
	empty.RemovePipeline()
	topics, err := startSim(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, topics.Close()) }()
	for _, sql := range []string{
		"CREATE TABLE orders (id bigint PRIMARY KEY, customer text)",
		"CREATE TABLE visits (at timestamp, page text)", // nothing identifies a row
		"CREATE ROLE plain LOGIN",                       // may not replicate
	} {
		if err := pg.Exec(ctx, sql); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	_, err = fmt.Fprintf(out, "STAND_DSN='%s'\nSTAND_PLAIN_DSN='%s'\nSTAND_BROKER='%s'\nSTAND_FELDERA='%s'\nSTAND_FELDERA_TOPICS='%s'\nREADY\n",
		pg.DSN(), pg.DSNFor("plain", "", "postgres", pg.Addr()), broker.Seeds[0], empty.URL(), topics.URL())
	if err != nil {
		return fmt.Errorf("print the addresses: %w", err)
	}
	_, err = io.Copy(io.Discard, in)
	return err //nolint:wrapcheck // its own words
}

func startSim(ctx context.Context) (*felderasim.Sim, error) {
	sim, err := felderasim.New(felderasim.Options{SQL: program, Pipeline: "shop", Logger: slog.New(slog.DiscardHandler)})
	if err == nil {
		err = sim.Start(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("start the simulator of Feldera: %w", err)
	}
	return sim, nil
}
