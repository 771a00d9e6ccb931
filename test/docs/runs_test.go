package docs_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"
	"sigs.k8s.io/yaml"

	"holdfast/test/harness"
)

// runs says how a block is run, by block.name.
var runs = map[string]func(t *testing.T, w *world, b block){
	"README.md: make demo": makeTargets,
	"README.md: docker compose exec postgres psql -U postgres shop -c \"INSERT INTO orders (customer, amount, status) VALUES ('you', 42.00, 'mine')\"": composeRow,
	"README.md: export PGSOURCE_DSN='postgres://holdfast:…@db:5432/shop?sslmode=verify-full'":                                                          ownPostgres,
	"README.md: export KAFKASINK_BROKERS='kafka:9092' KAFKASINK_TOPICS='orders=orders:json'":                                                           ownKafka,
	"docs/operations.md: pgsource skip 16/B374D848":                                                                                                    skipTransaction,
	"docs/operations.md: pgsource feldera-transaction show":                                                                                            endTransaction,
	"docs/operations.md: pgsource verify":                                                                                                              verifyTables,
	"docs/operations.md: pgsource resync public.orders":                                                                                                verifyTables,
	"docs/operations.md: kafkasink offsets reset -to 1043 orders:3":                                                                                    resetOffsets,
	"docs/operations.md: kafkasink verify":                                                                                                             verifyOffsets,
	"docs/operations.md: make replay":                                                                                                                  makeTargets,
	"docs/operations.md: export PGSOURCE_DSN='postgres://holdfast:…@db:5432/shop' PGSOURCE_TABLES='public.orders,public.items'":                        replayOwn,
	"docs/formats.md: KAFKASINK_COLUMNS='orders/cust_id=customer,orders/@key=id,*/@offset=kafka_offset'":                                               validSettings,
	"docs/formats.md: KAFKASINK_FIELD_TYPES='orders/due=io.debezium.time.Date,orders/price=decimal(2)'":                                                validSettings,
}

// notRun are the blocks that cannot be run here, with the reason.
var notRun = map[string]string{
	"docs/operations.md: kafka-topics --create --topic orders-dead --partitions 1 --replication-factor 3 --config min.insync.replicas=2 --config retention.ms=-1": "it needs Kafka's own command and three brokers; the tests of dead letters make such a topic over the protocol",
}

// makeTargets runs none of the targets: each has a test of its own (test/demo,
// test/replay, test/images), and make test runs this one. That they exist, make
// itself says.
func makeTargets(t *testing.T, w *world, b block) {
	t.Helper()
	for line := range strings.Lines(b.text) {
		target := strings.Fields(line)
		if len(target) < 2 || target[0] != "make" {
			t.Errorf("%q is no target", line)
			continue
		}
		if out, err := exec.CommandContext(t.Context(), "make", "-n", "-C", root(t), target[1]).CombinedOutput(); err != nil {
			t.Errorf("make %s: %v\n%s", target[1], err, out)
		}
	}
}

// ownPostgres follows the reader from nothing to streaming.
func ownPostgres(t *testing.T, w *world, b block) {
	t.Helper()
	text := put(t, b.text, "postgres://holdfast:…@db:5432/shop?sslmode=verify-full", w.pg.DSN(), "http://feldera:8080", w.sim.URL())
	s := w.start(t, t.TempDir(), text, map[string]string{"PGSOURCE_STATE": "file:" + filepath.Join(t.TempDir(), "state.json")})
	s.ready(w.listen["pgsource"])
	w.exec(t, "INSERT INTO orders VALUES (1, 'reader', 1)")
	s.awaitRow(w.sim, "orders", 1)
	// check ran before there was a publication, and said how to make one.
	s.mustSay("CREATE PUBLICATION")
	s.interrupt()
	s.check(b)
}

func ownKafka(t *testing.T, w *world, b block) {
	t.Helper()
	text := put(t, b.text, "kafka:9092", w.kafka.Seeds[0], "http://feldera:8080", w.sim.URL())
	s := w.start(t, t.TempDir(), text, nil)
	s.ready(w.listen["kafkasink"])
	if err := w.kafka.Produce(t.Context(), &kgo.Record{Topic: "orders", Value: []byte(`{"id":2,"customer":"reader"}`)}); err != nil {
		t.Fatal(err)
	}
	s.awaitRow(w.sim, "orders", 2)
	s.interrupt()
	s.check(b)
}

// settings are what a reader of docs/operations.md has set.
func (w *world) settings(t *testing.T, state string) map[string]string {
	t.Helper()
	return map[string]string{
		"PGSOURCE_DSN": w.pg.DSN(), "PGSOURCE_TABLES": "public.orders,public.items", "PGSOURCE_STATE": "file:" + state, "PGSOURCE_CREATE": "true",
		"KAFKASINK_BROKERS": w.kafka.Seeds[0], "KAFKASINK_TOPICS": "orders=orders:json",
		"FELDERA_URL": w.sim.URL(), "FELDERA_PIPELINE": "shop",
	}
}

// skipTransaction lets pgsource meet a value that no pipeline takes, and passes
// over it as the page says.
func skipTransaction(t *testing.T, w *world, b block) {
	t.Helper()
	dir := t.TempDir()
	env := w.settings(t, filepath.Join(dir, "state.json"))
	env["PGSOURCE_SNAPSHOT"] = "never" // a copy would find the bad row too, in the table
	w.anew(t)
	first := w.start(t, dir, "pgsource", env)
	first.ready(w.listen["pgsource"])
	w.exec(t, "INSERT INTO orders VALUES (10, 'before', 1)")
	w.exec(t, "INSERT INTO orders VALUES (11, 'bad', 'NaN')")
	w.exec(t, "INSERT INTO orders VALUES (12, 'after', 1)")
	if code := first.wait(); code != 65 {
		t.Fatalf("exit code %d, want 65 for a refusal", code)
	}
	at := regexp.MustCompile(`pgsource skip [^"]*?([0-9A-F]+/[0-9A-F]+)|LSN ([0-9A-F]+/[0-9A-F]+)`).FindStringSubmatch(first.text())
	if at == nil {
		t.Fatalf("the refusal names no LSN:\n%s", first.text())
	}
	s := w.start(t, dir, put(t, b.text, "16/B374D848", at[1]+at[2]), env)
	s.awaitRow(w.sim, "orders", 12)
	s.interrupt()
	s.check(b)
	letter, err := os.ReadFile(filepath.Join(dir, "bad.jsonl"))
	if err != nil || !strings.Contains(string(letter), "NaN") {
		t.Errorf("bad.jsonl: %v\n%s", err, letter)
	}
	w.exec(t, "DELETE FROM orders WHERE id = 11")
}

// endTransaction leaves a transaction of somebody else open, and commits it as
// the page says.
func endTransaction(t *testing.T, w *world, b block) {
	t.Helper()
	sim := newSim(t, pipeline)
	api := sim.URL() + "/v0/pipelines/shop"
	for _, body := range []struct{ path, rows string }{
		{"/start_transaction", ""}, {"/ingress/orders?format=json&update_format=insert_delete&array=true", `[{"insert":{"id":1,"customer":"nobody"}}]`},
	} {
		if out, err := exec.CommandContext(t.Context(), "curl", "-sSf", "-X", "POST", "-d", body.rows, api+body.path).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", body.path, err, out)
		}
	}
	env := w.settings(t, filepath.Join(t.TempDir(), "state.json"))
	env["FELDERA_URL"] = sim.URL()
	harness.Await(t, patience, "the transaction to be open", func(context.Context) (any, bool) {
		show := w.start(t, t.TempDir(), "pgsource feldera-transaction show", env)
		show.wait()
		return show.text(), strings.Contains(show.text(), "1")
	})
	s := w.start(t, t.TempDir(), put(t, b.text, "commit 7 ", "commit 1 ", "-yes 7 ", "-yes 1 "), env)
	if code := s.wait(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	s.check(b)
	harness.Await(t, patience, "the transaction to be committed", func(context.Context) (any, bool) {
		n := sim.Count("orders")
		return n, n == 1
	})
}

// verifyTables compares while pgsource runs; nothing is to differ.
func verifyTables(t *testing.T, w *world, b block) {
	t.Helper()
	dir := t.TempDir()
	env := w.settings(t, filepath.Join(dir, "state.json"))
	w.anew(t)
	w.exec(t, "TRUNCATE orders, items")
	sim := newSim(t, pipeline)
	env["FELDERA_URL"] = sim.URL()
	running := w.start(t, dir, "pgsource", env)
	running.ready(w.listen["pgsource"])
	w.exec(t, "INSERT INTO orders SELECT n, 'x', n FROM generate_series(1, 200) n; INSERT INTO items VALUES (1, 'a')")
	running.awaitRow(sim, "orders", 200)
	running.awaitRow(sim, "items", 1)
	for line := range strings.Lines(b.text) {
		s := w.start(t, dir, line, env)
		if code := s.wait(); code != 0 {
			t.Errorf("%s ended with code %d", strings.TrimSpace(line), code)
		}
	}
	running.interrupt()
}

// resetOffsets stands on a partition with so many records.
func resetOffsets(t *testing.T, w *world, b block) {
	t.Helper()
	var records []*kgo.Record
	for n := range 1050 {
		records = append(records, &kgo.Record{Topic: "orders", Partition: 3, Value: fmt.Appendf(nil, `{"id":%d}`, 100+n)})
	}
	if err := w.kafka.Produce(t.Context(), records...); err != nil {
		t.Fatal(err)
	}
	s := w.start(t, t.TempDir(), b.text, w.settings(t, "none"))
	if code := s.wait(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	s.check(b)
	got, err := w.kafka.CommittedOffsets(t.Context(), "holdfast")
	if err != nil || got["orders"][3] != 1043 {
		t.Errorf("the group stands at %v, %v", got["orders"], err)
	}
}

// verifyOffsets compares beside a running kafkasink; nothing is to differ.
func verifyOffsets(t *testing.T, w *world, b block) {
	t.Helper()
	sim := newSim(t, pipeline)
	env := w.settings(t, "none")
	env["FELDERA_URL"], env["KAFKASINK_GROUP"] = sim.URL(), "verified"
	running := w.start(t, t.TempDir(), "kafkasink", env)
	running.ready(w.listen["kafkasink"])
	if err := w.kafka.Produce(t.Context(), &kgo.Record{Topic: "orders", Partition: 2, Value: []byte(`{"id":7001,"customer":"reader"}`)}); err != nil {
		t.Fatal(err)
	}
	running.awaitRow(sim, "orders", 7001)
	for line := range strings.Lines(b.text) {
		s := w.start(t, t.TempDir(), line, env)
		if code := s.wait(); code != 0 {
			t.Errorf("%s ended with code %d", strings.TrimSpace(line), code)
		}
	}
	running.interrupt()
}

// replayOwn records from the reader's systems and plays into another pipeline.
func replayOwn(t *testing.T, w *world, b block) {
	t.Helper()
	w.anew(t)
	w.exec(t, "CREATE PUBLICATION holdfast FOR TABLE orders, items")
	w.exec(t, "SELECT pg_create_logical_replication_slot('holdfast', 'pgoutput')")
	w.exec(t, "INSERT INTO orders VALUES (9001, 'replayed', 1); UPDATE orders SET amount = 2 WHERE id = 9001; INSERT INTO items VALUES (9001, 'b')")
	if err := w.kafka.Produce(t.Context(), &kgo.Record{Topic: "payments", Value: []byte(`{"id":1,"amount":"3.50"}`)}, &kgo.Record{Topic: "payments", Value: []byte(`{"id":1,"amount":"4.50"}`)}); err != nil {
		t.Fatal(err)
	}
	staging := newSim(t, pipeline)
	folder := filepath.Join(t.TempDir(), "monday")
	text := put(t, b.text, "postgres://holdfast:…@db:5432/shop", w.pg.DSN(), "kafka:9092", w.kafka.Seeds[0], "http://staging:8080", staging.URL(), "/var/tmp/monday", folder)
	s := w.start(t, root(t), text, map[string]string{"GOFLAGS": os.Getenv("GOFLAGS"), "PGSOURCE_LISTEN": "127.0.0.1:0"})
	if code := s.wait(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	s.mustSay("EQUAL: the second play changed nothing in 3 tables")
	if n := staging.Count("payments"); n != 1 {
		t.Errorf("%d payments", n)
	}
}

// validSettings holds that a setting as the page shows it is one.
func validSettings(t *testing.T, w *world, b block) {
	t.Helper()
	env := w.settings(t, "none")
	env["KAFKASINK_TOPICS"] = "orders=orders:debezium-json"
	s := w.start(t, t.TempDir(), "export "+strings.TrimSpace(b.text)+"\nkafkasink config", env)
	if code := s.wait(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// composeRow runs the line behind docker compose up, on the tables, the program
// and the settings of docker-compose.yml. What stands for Docker is a command
// that hands psql to the private server.
func composeRow(t *testing.T, _ *world, b block) {
	t.Helper()
	c := readCompose(t)
	w := newWorldWith(t, c.sourceTable, c.program)
	s := w.start(t, t.TempDir(), "pgsource", c.pgsource(t, w))
	s.ready(w.listen["pgsource"])
	w.exec(t, c.transaction) // one turn of the row generator
	w.shim(t, "docker", `[ "$1 $2 $3 $4" = "compose exec postgres psql" ] || { echo "docker $*: not here" >&2; exit 1; }
shift 4
[ "$1 $2 $3" = "-U postgres shop" ] || { echo "psql $*: not here" >&2; exit 1; }
shift 3
exec psql -X '`+w.pg.DSN()+`' "$@"`)
	lines := strings.SplitN(strings.TrimSpace(b.text), "\n", 2)
	insert := w.start(t, t.TempDir(), lines[0], nil)
	if code := insert.wait(); code != 0 {
		t.Errorf("the insert ended with code %d", code)
	}
	s.await("the row in the view", func(context.Context) (any, bool) {
		look := w.start(t, t.TempDir(), put(t, lines[1], "http://127.0.0.1:8080", w.sim.URL()), nil)
		code := look.wait()
		return look.text(), code == 0 && strings.Contains(look.text(), "mine") && strings.Contains(look.text(), "42")
	})
	s.interrupt()
}

// compose is what the demo of docker-compose.yml is made of.
type compose struct {
	sourceTable, transaction, program string
	environment                       map[string]string
}

func readCompose(t *testing.T) compose {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root(t), "docker-compose.yml"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Services map[string]struct {
			Command     []string          `json:"command"`
			Environment map[string]string `json:"environment"`
		} `json:"services"`
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	inside := func(service, pattern string) string {
		found := regexp.MustCompile(pattern).FindStringSubmatch(strings.Join(file.Services[service].Command, "\n"))
		if found == nil {
			t.Fatalf("service %s has nothing like %s", service, pattern)
		}
		return strings.ReplaceAll(found[1], "$$", "$")
	}
	c := compose{
		sourceTable: inside("postgres-schema", `(?s)(CREATE TABLE.*)`),
		transaction: inside("postgres-rows", `(?s)"(BEGIN;.*?COMMIT)"`),
		environment: file.Services["pgsource"].Environment,
	}
	var pipeline struct {
		Program string `json:"program_code"`
	}
	if err := json.Unmarshal([]byte(inside("feldera-pipeline", `(?s)<<'JSON'\n(.*?)\nJSON`)), &pipeline); err != nil {
		t.Fatal(err)
	}
	c.program = pipeline.Program
	return c
}

// pgsource gives the daemon's settings with the private servers in place of the
// services.
func (c compose) pgsource(t *testing.T, w *world) map[string]string {
	t.Helper()
	env := map[string]string{}
	for name, value := range c.environment {
		env[name] = value
	}
	for name, want := range map[string]string{"PGSOURCE_DSN_FILE": "/run/secrets/pgsource-dsn", "FELDERA_URL": "http://feldera:8080", "PGSOURCE_STATE": "file:/var/lib/holdfast/pgsource.json"} {
		if env[name] != want {
			t.Fatalf("%s is %q, want %q", name, env[name], want)
		}
	}
	delete(env, "PGSOURCE_DSN_FILE")
	env["PGSOURCE_DSN"], env["FELDERA_URL"], env["PGSOURCE_STATE"] = w.pg.DSN(), w.sim.URL(), "file:"+filepath.Join(t.TempDir(), "pgsource.json")
	return env
}

// newWorldWith is a world of its own with other tables.
func newWorldWith(t *testing.T, source, program string) *world {
	t.Helper()
	w := newWorld(t)
	w.exec(t, "DROP TABLE orders, items")
	w.exec(t, source)
	w.sim = newSim(t, program)
	return w
}
