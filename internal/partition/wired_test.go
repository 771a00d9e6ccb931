package partition

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/test/felderasim"
)

// The Feldera client fits: rows of a topic arrive in a table of the simulator.
func TestWiredToFeldera(t *testing.T) {
	realTime(t, func(w *world) {
		t := w.t
		sim, err := felderasim.New(felderasim.Options{SQL: `CREATE TABLE orders (id BIGINT NOT NULL PRIMARY KEY, note VARCHAR) WITH ('materialized' = 'true');`})
		if err != nil {
			t.Fatal(err)
		}
		if err := sim.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := sim.Close(); err != nil {
				t.Error(err)
			}
		}()
		client, err := feldera.New(feldera.Config{URL: sim.URL(), Pipeline: "p", Logger: w.log})
		if err != nil {
			t.Fatal(err)
		}
		defer client.CloseIdle()
		schema, err := client.Await(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		table, err := schema.Table("orders")
		if err != nil {
			t.Fatal(err)
		}
		completions := client.NewCompletions(feldera.CompletionsOptions{})
		polling, stop := context.WithCancel(t.Context())
		var owned sync.WaitGroup
		owned.Go(func() { _ = completions.Run(polling) })
		defer owned.Wait()
		defer stop()

		w.mu.Lock()
		w.tool = true // the engine of these tests is not asked
		w.mu.Unlock()
		dest := ForTable(client.Writer(table), table, feldera.Policy{})
		if _, err := dest.Send(t.Context(), &fakeArray{}); err == nil {
			t.Error("an array of another destination was sent")
		}
		m := w.start(func(c *Config) {
			c.Poison, c.Watcher = PoisonSkip, completions
			c.Routes = []Route{{Topic: topic, Table: "orders", Destination: dest, Decoder: newDecoder(t, table)}}
		})
		w.produce(topic, 0, `{"id": 1, "note": "one"}`, `{"id": 2, "note": "two"}`, `{"id": "x"}`, `not JSON`, `{"id": 2, "note": "zwei"}`)
		gone := &kgo.Record{Topic: topic, Key: []byte("1")}
		if err := w.writer.ProduceSync(t.Context(), gone).FirstErr(); err != nil {
			t.Fatal(err)
		}
		w.eventually("committed", func() bool { return w.committed(first) == 6 })
		rows := sim.Dump("orders")
		if len(rows) != 1 || !slices.ContainsFunc(rows, func(r string) bool { return strings.Contains(r, "zwei") }) {
			t.Errorf("table holds %v", rows)
		}
		if got := m.metric("kafkasink_skipped_records_total"); got != 2 {
			t.Errorf("%v records skipped", got)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(1, topic))
}

// newDecoder makes a decoder of JSON rows.
func newDecoder(t *testing.T, table *feldera.Table) *decode.Topic {
	t.Helper()
	d, err := decode.NewTopic(decode.TopicConfig{Format: decode.FormatJSON, Relation: table.Relation()})
	if err != nil {
		t.Fatal(err)
	}
	return d
}
