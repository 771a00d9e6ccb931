package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/feldera"
	"holdfast/test/harness"
)

// standTables are the tables of the private source, and standTopics its topic's
// table at the destination.
const (
	standTables = `CREATE TABLE orders (id bigint PRIMARY KEY, customer text NOT NULL, amount numeric(12,2), paid boolean NOT NULL);
CREATE TYPE mood AS ENUM ('sad', 'happy');
CREATE TABLE items (order_id bigint, line int, mood mood, note text, PRIMARY KEY (order_id, line));`
	standTopics = `CREATE TABLE web_orders (id BIGINT NOT NULL PRIMARY KEY, customer VARCHAR) WITH ('materialized' = 'true');
`
)

// onPrivateStand records made traffic from private servers, stops these, and
// plays what was recorded into the simulator. The tables must be those of the
// source, too.
func onPrivateStand(ctx context.Context, s *settings) (err error) {
	dir, err := os.MkdirTemp("", "hf-replay-")
	if err != nil {
		return fmt.Errorf("make a folder: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	s.say("on a private stand: Postgres is real, the Kafka broker is kfake, Feldera is SIMULATED")
	s.dir, s.program = filepath.Join(dir, "recording"), filepath.Join(dir, "topics.sql")
	if err := os.WriteFile(s.program, []byte(standTopics), 0o600); err != nil {
		return fmt.Errorf("write the program: %w", err)
	}
	want, err := recordStand(ctx, s)
	if err != nil {
		return err
	}
	s.say("the source is stopped; from here on only the recording is read")
	m, err := loadManifest(s.dir)
	if err != nil {
		return err
	}
	program, err := simProgram(s, m)
	if err != nil {
		return err
	}
	simulated, err := startSim(ctx, program)
	if err != nil {
		return err
	}
	defer func() { _ = simulated.Close() }() // nothing is kept in it
	destination := s.env.with(simulated.env())
	if _, err := playInto(ctx, s, m, destination); err != nil {
		return err
	}
	return compareWithSource(ctx, s, destination, want)
}

// recordStand makes traffic and records it, then ends the servers. It gives
// what the tables of the source hold, as texts.
func recordStand(ctx context.Context, s *settings) (want map[string][]string, err error) {
	pg, err := harness.StartPostgres(ctx, harness.PostgresOptions{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, pg.Close()) }()
	broker, err := harness.StartFakeKafka(harness.FakeKafkaOptions{Topics: map[string]int32{"web": 3}})
	if err != nil {
		return nil, err
	}
	defer broker.Close()
	s.env = environment{
		"PGSOURCE_DSN": pg.DSN(), "PGSOURCE_TABLES": "public.orders,public.items",
		"KAFKASINK_BROKERS": broker.Seeds[0], "KAFKASINK_TOPICS": "web=web_orders:json",
	}
	for _, sql := range []string{
		standTables,
		"CREATE PUBLICATION holdfast FOR TABLE orders, items",
		"SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')",
	} {
		if err := pg.Exec(ctx, sql); err != nil {
			return nil, fmt.Errorf("%s: %w", sql, err)
		}
	}
	before, err := pg.ConfirmedFlushLSN(ctx, "holdfast")
	if err != nil {
		return nil, err
	}
	web, err := makeTraffic(ctx, pg, broker)
	if err != nil {
		return nil, err
	}
	if err := record(ctx, s); err != nil {
		return nil, err
	}
	after, err := pg.ConfirmedFlushLSN(ctx, "holdfast")
	if err == nil && after != before {
		err = fmt.Errorf("recording moved the slot from %s to %s", lsn(before), lsn(after))
	}
	if err != nil {
		return nil, err
	}
	want = map[string][]string{"web_orders": web}
	for table, sql := range map[string]string{
		"orders": "SELECT id, customer, coalesce(trim_scale(amount)::text, 'NULL'), paid::text FROM orders",
		"items":  "SELECT order_id, line, coalesce(mood::text, 'NULL'), coalesce(note, 'NULL') FROM items",
	} {
		rows, err := pg.Rows(ctx, sql)
		if err != nil {
			return nil, err
		}
		for _, row := range rows {
			want[table] = append(want[table], strings.Join(row, "|"))
		}
	}
	return want, nil
}

const standOrders = 120

// makeTraffic changes keys, leaves large values alone, rolls back, and brings
// a transaction over two tables that is larger than one request; in the topic,
// most records are new versions and some are tombstones. It gives the rows that
// the topic means.
func makeTraffic(ctx context.Context, pg *harness.Postgres, broker *harness.FakeKafka) (web []string, err error) {
	statements := []string{
		"ALTER TABLE items ALTER note SET STORAGE EXTERNAL",
		"BEGIN; INSERT INTO orders SELECT n, 'bulk ' || n, n, false FROM generate_series(100001, 103000) n; INSERT INTO items SELECT n, 1, 'happy', NULL FROM generate_series(100001, 103000) n; COMMIT",
	}
	for id := 1; id <= standOrders; id++ {
		statements = append(statements, fmt.Sprintf("BEGIN; INSERT INTO orders VALUES (%d, E'customer %d \\'☃', %d.%02d, false); INSERT INTO items VALUES (%d, 1, 'sad', repeat('long', 2000)), (%d, 2, NULL, NULL); COMMIT", id, id, id, id%100, id, id))
		switch id % 5 {
		case 1:
			statements = append(statements, fmt.Sprintf("UPDATE items SET mood = 'happy' WHERE order_id = %d", id))
		case 2:
			statements = append(statements, fmt.Sprintf("UPDATE orders SET id = %d, paid = true WHERE id = %d", 1000+id, id))
		case 3:
			statements = append(statements, fmt.Sprintf("BEGIN; DELETE FROM items WHERE order_id = %d; DELETE FROM orders WHERE id = %d; COMMIT", id, id))
		case 4:
			statements = append(statements, fmt.Sprintf("BEGIN; DELETE FROM orders WHERE id = %d; ROLLBACK", id))
		}
	}
	for _, sql := range statements {
		if err := pg.Exec(ctx, sql); err != nil {
			return nil, fmt.Errorf("%s: %w", sql, err)
		}
	}
	last := map[int]string{}
	var records []*kgo.Record
	for n := range 3 * standOrders {
		id := n * 7 % standOrders
		r := &kgo.Record{Topic: "web", Partition: int32(id % 3), Key: fmt.Appendf(nil, "%d", id), Headers: []kgo.RecordHeader{{Key: "n", Value: fmt.Append(nil, n)}}}
		delete(last, id)
		if n%11 != 10 {
			r.Value, last[id] = fmt.Appendf(nil, `{"id":%d,"customer":"version %d"}`, id, n), fmt.Sprintf("%d|version %d", id, n)
		}
		records = append(records, r)
	}
	for _, row := range last {
		web = append(web, row)
	}
	return web, broker.Produce(ctx, records...)
}

// compareWithSource holds the destination's rows against the source's.
func compareWithSource(ctx context.Context, s *settings, destination environment, want map[string][]string) error {
	client, err := client(destination)
	if err != nil {
		return err
	}
	defer client.CloseIdle()
	for table, columns := range map[string]string{"orders": "id, customer, amount, paid", "items": "order_id, line, mood, note", "web_orders": "id, customer"} {
		var got []string
		err := client.Query(ctx, feldera.Query{Select: "SELECT " + columns + " FROM " + table}, func(row []byte) error {
			var members map[string]any
			d := json.NewDecoder(strings.NewReader(string(row)))
			d.UseNumber()
			if err := d.Decode(&members); err != nil {
				return fmt.Errorf("read a row: %w", err)
			}
			var texts []string
			for _, c := range strings.Split(columns, ", ") {
				text := "NULL"
				if members[c] != nil {
					text = fmt.Sprint(members[c])
				}
				if c == "amount" && strings.Contains(text, ".") {
					text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
				}
				texts = append(texts, text)
			}
			got = append(got, strings.Join(texts, "|"))
			return nil
		})
		if err != nil {
			return fmt.Errorf("read table %s: %w", table, err)
		}
		source := want[table]
		slices.Sort(got)
		slices.Sort(source)
		if !slices.Equal(got, source) {
			return fmt.Errorf("NOT EQUAL: table %s has %d rows, its source %d; for example %s", table, len(got), len(source), example(got, source))
		}
		s.say("EQUAL: table %s and its source, row by row: %d rows", table, len(got))
	}
	return nil
}

// example is the first row that is on one side only.
func example(got, want []string) string {
	for i := range max(len(got), len(want)) {
		switch {
		case i >= len(got):
			return "only at the source: " + want[i]
		case i >= len(want):
			return "only at the destination: " + got[i]
		case got[i] != want[i]:
			return "destination " + got[i] + ", source " + want[i]
		}
	}
	return "none"
}
