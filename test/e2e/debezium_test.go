package e2e

import (
	"fmt"

	"github.com/google/go-cmp/cmp"

	"holdfast/test/felderasim"
)

// The row type as Debezium's Postgres connector describes it with its default
// settings: decimals as bytes, timestamps as microseconds.
const debeziumRow = `"type":"struct","optional":true,"name":"shop.public.orders.Value","fields":[
	{"type":"int64","optional":false,"field":"id"},{"type":"string","optional":false,"field":"customer"},
	{"type":"bytes","optional":true,"name":"org.apache.kafka.connect.data.Decimal","version":1,"parameters":{"scale":"2","connect.decimal.precision":"12"},"field":"amount"},
	{"type":"boolean","optional":false,"field":"paid"},{"type":"string","optional":true,"field":"note"},{"type":"bytes","optional":true,"field":"raw"},
	{"type":"int64","optional":true,"name":"io.debezium.time.MicroTimestamp","version":1,"field":"placed"}]`

const debeziumSchema = `{"type":"struct","optional":false,"name":"shop.public.orders.Envelope","version":2,"fields":[
	{` + debeziumRow + `,"field":"before"},{` + debeziumRow + `,"field":"after"},
	{"type":"struct","optional":false,"name":"io.debezium.connector.postgresql.Source","field":"source","fields":[
		{"type":"string","optional":false,"field":"connector"},{"type":"string","optional":false,"field":"table"},{"type":"int64","optional":true,"field":"lsn"}]},
	{"type":"string","optional":false,"field":"op"},{"type":"int64","optional":true,"field":"ts_ms"}]}`

const debeziumKeySchema = `{"type":"struct","optional":false,"name":"shop.public.orders.Key","fields":[{"type":"int64","optional":false,"field":"id"}]}`

func debeziumKey(id int) string {
	return fmt.Sprintf(`{"schema":%s,"payload":{"id":%d}}`, debeziumKeySchema, id)
}

func debeziumValue(op, before, after string) string {
	return fmt.Sprintf(`{"schema":%s,"payload":{"before":%s,"after":%s,"source":{"connector":"postgresql","table":"orders","lsn":24023128},"op":%q,"ts_ms":1714000000142}}`,
		debeziumSchema, before, after, op)
}

// sinkDebezium carries what Debezium writes for a snapshot, inserts, updates
// (one with a value that the log does not have), a change of key, deletes and a
// heartbeat, and ends with the same table.
func sinkDebezium(w *sinkWorld) {
	t := w.t
	d := w.start(map[string]string{"KAFKASINK_TOPICS": w.topic + "=orders:debezium-json"})
	row := func(id int, customer, amount, note string) string {
		return fmt.Sprintf(`{"id":%d,"customer":%q,"amount":%q,"paid":true,"note":%q,"raw":"AP8=","placed":1704164645123456}`, id, customer, amount, note)
	}
	const before = `{"id":%d,"customer":"","amount":null,"paid":false,"note":null,"raw":null,"placed":null}`
	w.produce(0,
		debeziumKey(1), debeziumValue("r", "null", row(1, "snapshot", "BN4=", "long text")), // 12.46
		debeziumKey(2), debeziumValue("c", "null", row(2, "created", "/w==", "b")), // -0.01
		debeziumKey(1), debeziumValue("u", "null", row(1, "updated", "AMg=", "__debezium_unavailable_value")), // 2.00
		"", `{"schema":null,"payload":{"ts_ms":1714000000142}}`,
		// The key of 2 becomes 3.
		debeziumKey(2), debeziumValue("d", fmt.Sprintf(before, 2), "null"),
		debeziumKey(2), "",
		debeziumKey(3), debeziumValue("c", "null", row(3, "moved", "/w==", "b")),
		debeziumKey(4), debeziumValue("c", "null", row(4, "gone", "AQ==", "")),
		debeziumKey(4), debeziumValue("d", fmt.Sprintf(before, 4), "null"),
		debeziumKey(4), "",
	)
	w.awaitCommitted(map[int32]int64{0: 10})
	want := [][]string{
		{"1", "updated", "2", "long text", "00ff", "2024-01-02 03:04:05.123456"},
		{"3", "moved", "-0.01", "b", "00ff", "2024-01-02 03:04:05.123456"},
	}
	if diff := cmp.Diff(want, rows(w.sim, "orders", "id", "customer", "amount", "note", "raw", "placed")); diff != "" {
		t.Errorf("the table (-want +got):\n%s", diff)
	}
	if n, err := d.Metric(t.Context(), "kafkasink_ignored_records_total", map[string]string{"kind": "heartbeat"}); err != nil || n != 1 {
		t.Errorf("ignored heartbeats %v, %v", n, err)
	}
	waitHealthy(t, d)
}

// sinkPatterns carries all topics whose name matches, those too that are made
// while it runs, and none other.
func sinkPatterns(w *sinkWorld) {
	t := w.t
	first := w.topic
	d := w.start(map[string]string{"KAFKASINK_TOPICS": `~"` + first + `(_[0-9]+)?"=orders:json`})
	w.produce(0, "1", order(1, "first"))
	w.awaitCommitted(map[int32]int64{0: 1})
	for _, name := range []string{first + "_2", first + "_other"} {
		if err := w.kafka.CreateTopic(t.Context(), name, 1, nil); err != nil {
			t.Fatal(err)
		}
		w.topic = name
		w.produce(0, "2", order(2, name))
	}
	w.topic = first + "_2"
	w.awaitCommitted(map[int32]int64{0: 1})
	w.topic = first
	w.produce(0, "3", order(3, "first"))
	w.awaitCommitted(map[int32]int64{0: 2})
	w.wantRows([]string{"1", "first", "1.5"}, []string{"2", first + "_2", "2.5"}, []string{"3", "first", "3.5"})
	waitHealthy(t, d)
}

// Columns take fields of other names, what stands beside the row, and parts of
// the key.
func sinkMapped(w *sinkWorld) {
	t := w.t
	w.sim = startSim(t, felderasim.Options{SQL: `CREATE TABLE orders (
		id BIGINT NOT NULL PRIMARY KEY, who VARCHAR, topic VARCHAR, part INT, pos BIGINT, headers VARIANT) WITH ('materialized' = 'true');`})
	w.start(map[string]string{
		"KAFKASINK_TOPICS":  w.topic + "=orders:op-json",
		"KAFKASINK_COLUMNS": w.topic + "/customer=who,*/@topic=topic,*/@partition=part,*/@offset=pos,*/@headers=headers,*/@key=id",
	})
	w.produce(1, "7", `{"customer":"ada","__op":"c"}`, "8", `{"customer":"bob","__op":"c"}`, "7", `{"customer":"eve","__op":"u"}`, "8", `{"__op":"d"}`)
	w.awaitCommitted(map[int32]int64{1: 4})
	want := [][]string{{"7", "eve", w.topic, "1", "2"}}
	if diff := cmp.Diff(want, rows(w.sim, "orders", "id", "who", "topic", "part", "pos")); diff != "" {
		t.Errorf("the table (-want +got):\n%s", diff)
	}
}
