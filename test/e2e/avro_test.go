package e2e

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/avro"
	"github.com/twmb/franz-go/pkg/kgo"
)

// schemaRegistry answers for the schemas that it has, as long as it is up.
type schemaRegistry struct {
	*httptest.Server
	mu      sync.Mutex
	schemas map[int]string
	down    bool
}

func newSchemaRegistry(t *testing.T, schemas map[int]string) *schemaRegistry {
	t.Helper()
	r := &schemaRegistry{schemas: schemas}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.mu.Lock()
		defer r.mu.Unlock()
		var id int
		if _, err := fmt.Sscanf(req.URL.Path, "/schemas/ids/%d", &id); err != nil || r.down {
			w.WriteHeader(http.StatusBadGateway)
			fmt.Fprint(w, "<html>bad gateway</html>")
			return
		}
		text, ok := r.schemas[id]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"error_code":40403,"message":"Schema not found"}`)
			return
		}
		if err := json.NewEncoder(w).Encode(map[string]string{"schema": text}); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *schemaRegistry) set(down bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.down = down
}

// avroMessage writes a value in Confluent's wire format.
func avroMessage(t *testing.T, id int, schema string, v any) []byte {
	t.Helper()
	s, err := avro.Parse(schema)
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.AppendEncode(binary.BigEndian.AppendUint32([]byte{0}, uint32(id)), v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The order's row as Debezium writes it in Avro.
const avroRow = `{"type":"record","name":"Value","namespace":"shop.orders","fields":[
	{"name":"id","type":"long"},{"name":"customer","type":"string"},
	{"name":"amount","type":["null",{"type":"bytes","scale":2,"precision":12,"connect.version":1,"connect.parameters":{"scale":"2"},"connect.name":"org.apache.kafka.connect.data.Decimal","logicalType":"decimal"}],"default":null},
	{"name":"paid","type":"boolean"},{"name":"note","type":["null","string"],"default":null},{"name":"raw","type":["null","bytes"],"default":null},
	{"name":"placed","type":["null",{"type":"long","connect.version":1,"connect.name":"io.debezium.time.MicroTimestamp"}],"default":null}],
	"connect.name":"shop.orders.Value"}`

const avroEnvelope = `{"type":"record","name":"Envelope","namespace":"shop.orders","fields":[
	{"name":"before","type":["null",` + avroRow + `],"default":null},{"name":"after","type":["null","Value"],"default":null},
	{"name":"source","type":{"type":"record","name":"Source","namespace":"io.debezium.connector.postgresql","fields":[
		{"name":"connector","type":"string"},{"name":"lsn","type":["null","long"],"default":null}]}},
	{"name":"op","type":"string"},{"name":"ts_ms","type":["null","long"],"default":null}],"connect.version":2,"connect.name":"shop.orders.Envelope"}`

const avroKey = `{"type":"record","name":"Key","namespace":"shop.orders","fields":[{"name":"id","type":"long"}]}`

func avroOrder(id int, customer string) map[string]any {
	return map[string]any{
		"id": int64(id), "customer": customer, "amount": big.NewRat(int64(100*id+50), 100), "paid": true, "note": nil,
		"raw": []byte{0, 255}, "placed": int64(1704164645123456),
	}
}

// sinkAvro carries rows in Avro. The registry goes away in the middle: the
// partition that needs a schema then waits, and the other goes on.
func sinkAvro(w *sinkWorld) {
	t := w.t
	newer := strings.Replace(avroRow, `{"name":"paid"`, `{"name":"added","type":["null","string"],"default":null},{"name":"paid"`, 1)
	reg := newSchemaRegistry(t, map[int]string{7: avroRow, 8: newer, 9: `"long"`})
	d := w.start(map[string]string{"KAFKASINK_TOPICS": w.topic + "=orders:avro", "KAFKASINK_REGISTRY_URL": reg.URL})
	send := func(partition int32, schema int, ids ...int) {
		text := map[int]string{7: avroRow, 8: newer}[schema]
		for _, id := range ids {
			row := avroOrder(id, fmt.Sprintf("schema %d", schema))
			row["added"] = "x"
			err := w.kafka.Produce(t.Context(), &kgo.Record{
				Topic: w.topic, Partition: partition, Key: avroMessage(t, 9, `"long"`, int64(id)), Value: avroMessage(t, schema, text, row),
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	send(0, 7, 1, 2)
	send(1, 7, 3)
	w.awaitCommitted(map[int32]int64{0: 2, 1: 1})

	reg.set(true)
	send(0, 8, 4, 5) // an unknown schema
	health(t, d, "the registry's outage is said", func(status int, body string) bool {
		return status == http.StatusOK && strings.Contains(body, "schema 8") && strings.Contains(body, "502")
	})
	send(1, 7, 6, 7)
	w.awaitCommitted(map[int32]int64{0: 2, 1: 3}) // partition 0 stands still, partition 1 goes on
	reg.set(false)
	w.awaitCommitted(map[int32]int64{0: 4, 1: 3})

	if err := w.kafka.Produce(t.Context(), &kgo.Record{Topic: w.topic, Partition: 0, Key: avroMessage(t, 9, `"long"`, int64(1))}); err != nil {
		t.Fatal(err)
	}
	w.awaitCommitted(map[int32]int64{0: 5, 1: 3})
	var want [][]string
	for id := 2; id <= 7; id++ {
		schema := 7
		if id == 4 || id == 5 {
			schema = 8
		}
		want = append(want, []string{fmt.Sprint(id), fmt.Sprintf("schema %d", schema), fmt.Sprintf("%d.5", id), "00ff", "2024-01-02 03:04:05.123456"})
	}
	if diff := cmp.Diff(want, rows(w.sim, "orders", "id", "customer", "amount", "raw", "placed")); diff != "" {
		t.Errorf("the table (-want +got):\n%s", diff)
	}
	waitHealthy(t, d)
	health(t, d, "the registry is well again", func(status int, body string) bool {
		return status == http.StatusOK && !strings.Contains(body, "502")
	})
	if n, err := d.Metric(t.Context(), "kafkasink_schema_fetches_total", map[string]string{"outcome": "failed"}); err != nil || n < 1 {
		t.Errorf("failed fetches %v, %v", n, err)
	}
}

// sinkDebeziumAvro is sinkDebezium in Avro, keys included.
func sinkDebeziumAvro(w *sinkWorld) {
	t := w.t
	reg := newSchemaRegistry(t, map[int]string{1: avroKey, 2: avroEnvelope})
	w.start(map[string]string{"KAFKASINK_TOPICS": w.topic + "=orders:debezium-avro", "KAFKASINK_REGISTRY_URL": reg.URL})
	send := func(id int, op string, before, after map[string]any) {
		r := &kgo.Record{Topic: w.topic, Partition: 2, Key: avroMessage(t, 1, avroKey, map[string]any{"id": int64(id)})}
		if op != "" {
			v := map[string]any{"before": nil, "after": nil, "source": map[string]any{"connector": "postgresql", "lsn": int64(1)}, "op": op, "ts_ms": time.Now().UnixMilli()}
			if before != nil {
				v["before"] = before
			}
			if after != nil {
				v["after"] = after
			}
			r.Value = avroMessage(t, 2, avroEnvelope, v)
		}
		if err := w.kafka.Produce(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	noted := avroOrder(1, "created")
	noted["note"] = "long text"
	toasted := avroOrder(1, "updated")
	toasted["note"] = "__debezium_unavailable_value"
	send(1, "c", nil, noted)
	send(1, "u", nil, toasted)
	send(2, "r", nil, avroOrder(2, "snapshot"))
	send(2, "d", avroOrder(2, ""), nil)
	send(2, "", nil, nil)
	send(3, "c", nil, avroOrder(3, "moved"))
	w.awaitCommitted(map[int32]int64{2: 6})
	want := [][]string{{"1", "updated", "1.5", "long text"}, {"3", "moved", "3.5", "-"}}
	if diff := cmp.Diff(want, rows(w.sim, "orders", "id", "customer", "amount", "note")); diff != "" {
		t.Errorf("the table (-want +got):\n%s", diff)
	}
}
