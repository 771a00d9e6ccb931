package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/feldera"
	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// named tells which of the words are missing from a text.
func named(t *testing.T, said string, words ...string) {
	t.Helper()
	for _, word := range words {
		if !strings.Contains(said, word) {
			t.Errorf("it does not say %q:\n%s", word, said)
		}
	}
}

// ownersOf reads the record of owners as its verb gives it: table and owner.
func ownersOf(t *testing.T, env map[string]string) map[string]string {
	t.Helper()
	got := runPgsource(t, env, "owners", "show", "-json")
	var list struct{ Owners []feldera.Owner }
	if err := json.Unmarshal([]byte(got.Stdout), &list); err != nil || got.ExitCode != 0 {
		t.Fatalf("exit code %d, %v:\n%s%s", got.ExitCode, err, got.Stdout, got.Stderr)
	}
	out := make(map[string]string)
	for _, o := range list.Owners {
		out[o.Table] = strings.TrimPrefix(out[o.Table]+","+o.Name, ",")
	}
	return out
}

// A pgsource that empties tables and a kafkasink on one of them: whoever comes
// second is refused by name, until the first one is gone and was taken out.
// Both without emptying may share it.
func TestOneOwnerOfATable(t *testing.T) {
	t.Parallel()
	def := feldera.ProgressTable(feldera.DefaultProgressTable)
	pg, sim := startPostgres(t, nil), startSim(t, felderasim.Options{SQL: program + def.SQL()})
	kafka := harness.NeedFakeKafka(t, harness.FakeKafkaOptions{Topics: map[string]int32{"more": 1}})
	env := pgsourceEnv(pg, sim)
	sinkEnv := map[string]string{
		"KAFKASINK_BROKERS": strings.Join(kafka.Seeds, ","), "KAFKASINK_TOPICS": "more=orders:json", "KAFKASINK_COMMIT_INTERVAL": "100ms",
		"FELDERA_URL": sim.URL(), "FELDERA_PIPELINE": "p", "FELDERA_REQUEST_TIMEOUT": "1s", "FELDERA_REQUEST_LIFETIME": "1s",
	}
	startSink := func() *harness.Daemon {
		return harness.NeedDaemon(t, "./cmd/kafkasink", harness.BuildOptions{Race: true}, harness.DaemonOptions{Env: sinkEnv, ListenVar: "KAFKASINK_LISTEN"})
	}

	source, sink := startPgsource(t, env), startSink()
	waitHealthy(t, source)
	waitHealthy(t, sink)
	execSQL(t, pg, `INSERT INTO orders VALUES (1, 'a', 1, true); INSERT INTO items VALUES (1, 1, 'x')`)
	awaitConfirmed(t, pg, currentLSN(t, pg))
	if err := kafka.Produce(t.Context(), &kgo.Record{Topic: "more", Key: []byte("1001"), Value: []byte(order(1001, "k"))}); err != nil {
		t.Fatal(err)
	}
	waitSim(t, sim, "both have brought a row", func(v felderasim.View) bool { return v.Count("orders") == 2 })
	both := ownersOf(t, env)
	if !strings.HasPrefix(both["items"], "pgsource:") || !strings.HasSuffix(both["items"], "/holdfast") || strings.Contains(both["items"], ",") {
		t.Errorf("%v", both)
	}
	mine, sinkName, _ := strings.Cut(both["orders"], ",")
	if !strings.HasPrefix(mine, "kafkasink:") {
		mine, sinkName = sinkName, mine
	}
	if !strings.HasPrefix(mine, "kafkasink:") || sinkName != both["items"] {
		t.Fatalf("%v", both)
	}
	sinkName, sourceName := mine, both["items"]

	// To empty the table now would take away rows of the sink.
	stopClean(t, source)
	emptying := merged(env, map[string]string{"PGSOURCE_TRUNCATE": "delete_all"})
	source = startPgsource(t, emptying)
	named(t, awaitEnd(t, source, 65), "table orders", sinkName, sourceName, "PGSOURCE_TRUNCATE=delete_all", "owners remove "+sinkName)

	// The sink is given up for good.
	stopClean(t, sink)
	says(t, runPgsource(t, env, "owners", "remove", sinkName), 64, "nothing was done")
	says(t, runPgsource(t, env, "owners", "remove", "pgsource:0/none", "-yes"), 65, sinkName)
	says(t, runPgsource(t, env, "owners", "remove", sinkName, "orders", "-yes"), 0, "removed")
	source = startPgsource(t, emptying)
	waitHealthy(t, source)
	if now := ownersOf(t, env); now["orders"] != sourceName {
		t.Errorf("%v", now)
	}
	// And is refused when it comes back all the same.
	named(t, awaitEnd(t, startSink(), 65), "table orders", sinkName, sourceName, "takes away rows")

	// What comes after the start is seen before the table is emptied.
	client, err := feldera.New(feldera.Config{URL: sim.URL(), Pipeline: "p"})
	if err != nil {
		t.Fatal(err)
	}
	defer client.CloseIdle()
	schema, err := client.Describe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	third, err := client.Owners(schema, feldera.DefaultProgressTable, feldera.PgsourceOwner("42", "third"))
	if err != nil {
		t.Fatal(err)
	}
	items, err := schema.Table("items")
	if err != nil {
		t.Fatal(err)
	}
	if err := third.Remove(t.Context(), feldera.Owner{Table: "items", Name: sourceName}); err != nil {
		t.Fatal(err)
	}
	if err := third.Claim(t.Context(), nil, "", items); err != nil {
		t.Fatal(err)
	}
	execSQL(t, pg, `TRUNCATE items`)
	named(t, awaitEnd(t, source, 65), "table items", "pgsource:42/third", "LSN")
	if n := sim.Count("items"); n != 1 {
		t.Errorf("%d rows are left", n)
	}
}
