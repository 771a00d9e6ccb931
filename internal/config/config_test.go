package config

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write docs/configuration.md")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func minimalPG(more ...string) []string {
	return append([]string{
		"FELDERA_URL=http://feldera:8080",
		"PGSOURCE_DSN=postgres://u:p@db/shop",
		"PGSOURCE_TABLES=public.orders",
	}, more...)
}

func minimalKafka(more ...string) []string {
	return append([]string{
		"FELDERA_URL=http://feldera:8080",
		"KAFKASINK_BROKERS=k1:9092",
		"KAFKASINK_TOPICS=orders=orders:json",
	}, more...)
}

// loaders runs a test over both daemons.
func loaders() map[string]func([]string) (*Effective, error) {
	return map[string]func([]string) (*Effective, error){
		pgsourcePrefix: func(environ []string) (*Effective, error) {
			c, err := LoadPGSource(environ)
			if err != nil {
				return nil, err
			}
			return &c.Effective, nil
		},
		kafkasinkPrefix: func(environ []string) (*Effective, error) {
			c, err := LoadKafkaSink(environ)
			if err != nil {
				return nil, err
			}
			return &c.Effective, nil
		},
	}
}

func faultsOf(t *testing.T, err error) []string {
	t.Helper()
	f, ok := err.(*Faults) //nolint:errorlint // the API promises the type itself
	if !ok {
		t.Fatalf("error is %T (%v), expected *Faults", err, err)
	}
	lines := strings.Split(f.Error(), "\n")
	if f.Hint == "" {
		return lines
	}
	if last := lines[len(lines)-1]; last != f.Hint || !strings.HasSuffix(last, " run -help` lists all settings") {
		t.Errorf("last line %q, hint %q", last, f.Hint)
	}
	return lines[:len(lines)-1]
}

func TestDefaults(t *testing.T) {
	pg, err := LoadPGSource(minimalPG())
	if err != nil {
		t.Fatal(err)
	}
	want := &PGSource{
		Feldera: Feldera{URL: "http://feldera:8080", RequestTimeout: 25 * time.Second, RequestLifetime: 30 * time.Second, CheckpointInterval: 5 * time.Second},
		Slot:    "holdfast", Publication: "holdfast",
		Tables:    TableMappings{{Schema: "public", Name: "orders", Target: "orders"}},
		BatchRows: 10000, BatchBytes: 4 << 20, InFlight: 8, MemoryLimit: 256 << 20, SpillLimit: 4 << 30, Atomicity: Transaction,
		Snapshot: Auto, ChunkTime: 500 * time.Millisecond, ChunkBytes: 8 << 20, SnapshotLag: 256 << 20,
		Delivery: Auto, ProgressTable: "holdfast_progress", OnLoss: Heal,
		State: "auto", Transport: "stream", PeekInterval: time.Second,
		AckOn: Completed, OnRefusal: Exit, ExtraColumns: Stop, Unrepresentable: Refuse, DecimalExcess: Refuse, Truncate: Stop, Partitions: Stop,
		ShutdownTimeout: 30 * time.Second, StallTimeout: time.Minute, TakeoverAfter: 30 * time.Second, VerifyRate: 2000,
		Listen: "127.0.0.1:8081", LogLevel: "info", LogFormat: "text",
	}
	ignoreSecrets := cmp.FilterPath(func(p cmp.Path) bool {
		typ := p.Last().Type()
		return typ == reflect.TypeFor[Secret]() || typ == reflect.TypeFor[Effective]()
	}, cmp.Ignore())
	if diff := cmp.Diff(want, pg, ignoreSecrets); diff != "" {
		t.Errorf("pgsource (-want +got):\n%s", diff)
	}
	if dsn, err := pg.DSN.Value(); err != nil || dsn != "postgres://u:p@db/shop" {
		t.Errorf("DSN = %q, %v", dsn, err)
	}
	if pg.Feldera.APIKey.IsSet() {
		t.Error("API key is set")
	}

	kafka, err := LoadKafkaSink(minimalKafka())
	if err != nil {
		t.Fatal(err)
	}
	wantKafka := &KafkaSink{
		Feldera: want.Feldera, Brokers: []string{"k1:9092"}, Group: "holdfast", GroupProtocol: Classic,
		Topics:  TopicMappings{{Topic: "orders", Table: "orders", Format: FormatJSON}},
		OpField: "__op", Tombstones: "delete", ControlMessages: Ignore, Truncate: Stop, Unavailable: "__debezium_unavailable_value", RegistryTimeout: 5 * time.Second,
		Start: Earliest, OnGap: Stop, Poison: Stop, PoisonLimit: 100, PoisonWindow: time.Minute, Revoke: Drain, DrainTimeout: 20 * time.Second,
		CommitInterval: time.Second, BatchRows: 10000, BatchBytes: 4 << 20, InFlight: 8,
		LaneMemory: 16 << 20, MemoryLimit: 256 << 20, SessionTimeout: 45 * time.Second, RebalanceTimeout: time.Minute,
		Delivery: Auto, ProgressTable: "holdfast_progress", OnLoss: Heal,
		AckOn: Completed, OnRefusal: Exit, Unrepresentable: Refuse, DecimalExcess: Refuse, ExtraFields: Ignore,
		Listen: "127.0.0.1:8082", LogLevel: "info", LogFormat: "text",
	}
	if diff := cmp.Diff(wantKafka, kafka, ignoreSecrets); diff != "" {
		t.Errorf("kafkasink (-want +got):\n%s", diff)
	}
}

// One bad value for each kind of fault. The value never appears in the line.
func TestFaultsOfOneSetting(t *testing.T) {
	dir := t.TempDir()
	notPEM := filepath.Join(dir, "marker-not.pem")
	if err := os.WriteFile(notPEM, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ env, want string }{
		{"FELDERA_URL=ftp://marker", "FELDERA_URL does not begin with http:// or https://"},
		{"FELDERA_URL=http://user:marker@h", "FELDERA_URL carries a user or password"},
		{"FELDERA_URL=http://h?marker", "FELDERA_URL has a query"},
		{"FELDERA_URL=http:///marker", "FELDERA_URL has no host"},
		{"FELDERA_URL=http://h/%zzmarker", "FELDERA_URL is not a URL"},
		{"FELDERA_URL=10.0.0.1:8080", "FELDERA_URL does not begin with http:// or https://"},
		{"FELDERA_URL=", "FELDERA_URL is not set; allowed: an http or https URL without user, password, query or fragment, such as http://feldera:8080"},
		{"FELDERA_PIPELINE=mar/ker", "FELDERA_PIPELINE is not a name"},
		{"FELDERA_API_KEY=mar ker", "FELDERA_API_KEY has a character that cannot be sent"},
		{"FELDERA_CA_FILE=/marker/none", "FELDERA_CA_FILE names a file that cannot be opened (no such file or directory)"},
		{"FELDERA_CA_FILE=" + notPEM, "FELDERA_CA_FILE names a file without a PEM certificate"},
		{"FELDERA_REQUEST_TIMEOUT=25", "FELDERA_REQUEST_TIMEOUT is not a duration with a unit; allowed: a duration with a unit, such as 25s, from 1s to 10m"},
		{"FELDERA_REQUEST_TIMEOUT=1ms", "FELDERA_REQUEST_TIMEOUT is too small"},
		{"FELDERA_REQUEST_TIMEOUT=40s", "FELDERA_REQUEST_LIFETIME is less than FELDERA_REQUEST_TIMEOUT"},
		{"PGSOURCE_DSN=mysql://u:marker@h/d", "PGSOURCE_DSN is a URL of another kind"},
		{"PGSOURCE_DSN=marker", "PGSOURCE_DSN is neither a postgres URL nor a list of option=value"},
		{"PGSOURCE_DSN=password='marker", "PGSOURCE_DSN has a value with a quote"},
		{"PGSOURCE_DSN=postgres://u:mar%ker@h/d", "PGSOURCE_DSN is a URL with a % that is not followed"},
		{"PGSOURCE_DSN=postgres://u:mar ker@h/d", "PGSOURCE_DSN is a URL with a space in it"},
		{"PGSOURCE_DSN=", "PGSOURCE_DSN is not set, and PGSOURCE_DSN_FILE is not either"},
		{"PGSOURCE_DSN_FILE=/marker", "PGSOURCE_DSN is set and PGSOURCE_DSN_FILE too"},
		{"FELDERA_API_KEY_FILE=/marker", "FELDERA_API_KEY_FILE names a file that cannot be opened (no such file or directory)"},
		{"FELDERA_API_KEY_FILE=" + dir, "FELDERA_API_KEY_FILE names a file that cannot be read (is a directory)"},
		{"PGSOURCE_SLOT=Marker", "PGSOURCE_SLOT is not a name that a slot can have; allowed: 1 to 63 of a to z, 0 to 9 and _"},
		{"PGSOURCE_SLOT=" + strings.Repeat("a", 64), "PGSOURCE_SLOT is not a name"},
		{"PGSOURCE_PUBLICATION=" + strings.Repeat("a", 64), "PGSOURCE_PUBLICATION is too long"},
		{"PGSOURCE_CREATE=yes", "PGSOURCE_CREATE is neither true nor false; allowed: true or false"},
		{"PGSOURCE_BATCH_ROWS=marker", "PGSOURCE_BATCH_ROWS is not a whole number; allowed: a whole number from 1 to 1000000"},
		{"PGSOURCE_BATCH_ROWS=0", "PGSOURCE_BATCH_ROWS is too small"},
		{"PGSOURCE_BATCH_ROWS=1000001", "PGSOURCE_BATCH_ROWS is too large"},
		{"PGSOURCE_BATCH_BYTES=4000000", "PGSOURCE_BATCH_BYTES is not a size with a unit"},
		{"PGSOURCE_BATCH_BYTES=9223372036854775807MiB", "PGSOURCE_BATCH_BYTES is not a size"},
		{"PGSOURCE_BATCH_BYTES=-4MiB", "PGSOURCE_BATCH_BYTES is not a size"},
		{"PGSOURCE_MEMORY_LIMIT=2MiB", "PGSOURCE_BATCH_BYTES is above PGSOURCE_MEMORY_LIMIT"},
		{"PGSOURCE_DELIVERY=exactly_once", "PGSOURCE_DELIVERY is not one of the words it can be; allowed: auto, effectively_once or at_least_once"},
		{"PGSOURCE_SPILL_DIR=marker", "PGSOURCE_SPILL_DIR is not an absolute path; allowed: an absolute path without control characters, or off"},
		{"PGSOURCE_SPILL_LIMIT=1KiB", "PGSOURCE_SPILL_LIMIT is too small"},
		{"PGSOURCE_ATOMICITY=marker", "PGSOURCE_ATOMICITY is not one of the words it can be; allowed: transaction or table"},
		{"PGSOURCE_ON_REFUSAL=marker", "PGSOURCE_ON_REFUSAL is not one of the words it can be; allowed: exit or wait"},
		{"PGSOURCE_LISTEN=8081", "PGSOURCE_LISTEN is not host:port"},
		{"PGSOURCE_LISTEN=:http", "PGSOURCE_LISTEN has a port that is not a number"},
		{"PGSOURCE_TABLES=orders", "PGSOURCE_TABLES has no schema"},
		{"PGSOURCE_TABLES=public.a,public.a=marker", "PGSOURCE_TABLES has the same table in entries 1 and 2"},
		{"PGSOURCE_TABLES=public.a,other.a", "PGSOURCE_TABLES sends entries 1 and 2 to the same Feldera table"},
		{"PGSOURCE_TABLES=public.a,", "PGSOURCE_TABLES has no schema name"},
		{"PGSOURCE_TABLES=public.a b", "PGSOURCE_TABLES has something left over after entry 1"},
		{`PGSOURCE_TABLES=public."a`, "PGSOURCE_TABLES has a double quote without its end in entry 1"},
		{"PGSOURCE_TABLES=public.1a", "PGSOURCE_TABLES has a table name that needs double quotes"},
		{"PGSOURCE_TABLES=public." + strings.Repeat("a", 64), "PGSOURCE_TABLES has a table name longer than 63 bytes"},
		{"PGSOURCE_TABELS=marker", "PGSOURCE_TABELS is unknown; did you mean PGSOURCE_TABLES?"},
		{"FELDERA_APIKEY=marker", "FELDERA_APIKEY is unknown; did you mean FELDERA_API_KEY?"},
		{"FELDERA_PORT=8080", "FELDERA_PORT is unknown"},
		{"PGSOURCE_SLOT_FILE=marker", "PGSOURCE_SLOT_FILE is unknown; allowed: only secrets can be read from a file: set PGSOURCE_SLOT"},
		{"PGSOURCE_\x1b[31m=marker", `"PGSOURCE_\x1b[31m" is unknown`},
	} {
		t.Run(tc.env, func(t *testing.T) {
			name, _, _ := strings.Cut(tc.env, "=")
			environ := []string{tc.env} // the first of two counts
			for _, e := range minimalPG() {
				if !strings.HasPrefix(e, name+"=") {
					environ = append(environ, e)
				}
			}
			_, err := LoadPGSource(environ)
			checkFault(t, err, tc.want)
		})
	}
	for _, tc := range []struct{ env, want string }{
		{"KAFKASINK_BROKERS=k1", "KAFKASINK_BROKERS is not host:port, in entry 1; allowed: host:port"},
		{"KAFKASINK_BROKERS=a:1,u:marker@k:1", "KAFKASINK_BROKERS is more than host and port, in entry 2"},
		{"KAFKASINK_BROKERS=a:1,,b:1", "KAFKASINK_BROKERS has nothing in entry 2"},
		{"KAFKASINK_BROKERS=a:1,b:1,a:1", "KAFKASINK_BROKERS has the same in entries 1 and 3"},
		{"KAFKASINK_BROKERS=a:0", "KAFKASINK_BROKERS has a port that is not a number from 1 to 65535, in entry 1"},
		{"KAFKASINK_TOPICS=orders", "KAFKASINK_TOPICS has no = after the topic in entry 1"},
		{"KAFKASINK_TOPICS=orders=orders", "KAFKASINK_TOPICS has no :format after the table in entry 1"},
		{"KAFKASINK_TOPICS=orders=orders:marker", "KAFKASINK_TOPICS has a format that is not one of json, op-json"},
		{"KAFKASINK_TOPICS=a=a:json,a=b:json", "KAFKASINK_TOPICS has the same topic in entries 1 and 2"},
		{"KAFKASINK_TOPICS=..=a:json", "KAFKASINK_TOPICS has a topic name that no broker allows"},
		{"KAFKASINK_TOPICS==a:json", "KAFKASINK_TOPICS has no topic in entry 1"},
		{"KAFKASINK_TOPICS=a=a:json;b", "KAFKASINK_TOPICS has something left over after entry 1"},
		{"KAFKASINK_DRAIN_TIMEOUT=31s", "KAFKASINK_REBALANCE_TIMEOUT is less than twice KAFKASINK_DRAIN_TIMEOUT"},
		{"KAFKASINK_LANE_MEMORY=1GiB", "KAFKASINK_LANE_MEMORY is above KAFKASINK_MEMORY_LIMIT"},
		{"KAFKASINK_SASL_USER=marker", "KAFKASINK_SASL_MECHANISM is not set although KAFKASINK_SASL_USER or KAFKASINK_SASL_PASSWORD is"},
		{"KAFKASINK_SASL_PASSWORD=marker", "KAFKASINK_SASL_MECHANISM is not set although"},
		{"KAFKASINK_SASL_TOKEN=marker", "KAFKASINK_SASL_MECHANISM is not set although"},
		{"KAFKASINK_SASL_MECHANISM=oauthbearer", "KAFKASINK_SASL_TOKEN or KAFKASINK_SASL_TOKEN_URL is what oauthbearer takes"},
		{"KAFKASINK_SASL_MECHANISM=plain KAFKASINK_SASL_USER=u KAFKASINK_SASL_PASSWORD=p KAFKASINK_SASL_TOKEN=marker", "KAFKASINK_SASL_TOKEN is set although KAFKASINK_SASL_MECHANISM has no use for it"},
		{"KAFKASINK_SASL_MECHANISM=oauthbearer KAFKASINK_SASL_USER=u KAFKASINK_SASL_PASSWORD=p KAFKASINK_SASL_TOKEN_URL=http://login.example.com/marker", "KAFKASINK_SASL_TOKEN_URL would send the client's secret without TLS"},
		{"KAFKASINK_SERVER_NAME=marker", "KAFKASINK_SERVER_NAME is set although KAFKASINK_TLS is false"},
		{"KAFKASINK_TLS=true KAFKASINK_CLIENT_CERT_FILE=/marker", "KAFKASINK_CLIENT_CERT_FILE names a file that cannot be opened"},
		{"KAFKASINK_TLS=true KAFKASINK_CLIENT_KEY_FILE=/marker", "KAFKASINK_CLIENT_KEY_FILE names a file that cannot be opened"},
		{"KAFKASINK_POISON=dlq", "KAFKASINK_DLQ_TOPIC is not set although KAFKASINK_POISON is dlq"},
		{"KAFKASINK_DLQ_TOPIC=orders", "KAFKASINK_DLQ_TOPIC is one of KAFKASINK_TOPICS"},
		{"KAFKASINK_DLQ_TOPIC=mark/er", "KAFKASINK_DLQ_TOPIC is not a name that a topic can have"},
	} {
		t.Run(tc.env, func(t *testing.T) {
			_, err := LoadKafkaSink(append(strings.Fields(tc.env), minimalKafka()...))
			checkFault(t, err, tc.want)
		})
	}
}

// checkFault expects exactly one fault, beginning with want, and that the
// value "marker" is not repeated.
func checkFault(t *testing.T, err error, want string) {
	t.Helper()
	if err == nil {
		t.Fatal("accepted")
	}
	lines := faultsOf(t, err)
	if len(lines) != 1 || !strings.HasPrefix(lines[0], want) {
		t.Errorf("faults:\n%s\nexpected one that begins with:\n%s", err, want)
	}
	if strings.Contains(strings.ToLower(err.Error()), "marker") {
		t.Errorf("the value is repeated: %s", err)
	}
}

func TestAllFaultsAtOnceInTheOrderOfTheTable(t *testing.T) {
	_, err := LoadKafkaSink([]string{
		"KAFKASINK_WHAT=1", "FELDERA_REQUEST_TIMEOUT=soon", "KAFKASINK_LOG_FORMAT=xml", "KAFKASINK_TLS=1",
		"KAFKASINK_SASL_MECHANISM=plain", "FELDERA_NEW=1",
	})
	want := []string{
		"FELDERA_URL", "FELDERA_REQUEST_TIMEOUT", "KAFKASINK_BROKERS", "KAFKASINK_TOPICS", "KAFKASINK_TLS",
		"KAFKASINK_SASL_USER", "KAFKASINK_SASL_PASSWORD", "KAFKASINK_LOG_FORMAT", "FELDERA_NEW", "KAFKASINK_WHAT",
	}
	var got []string
	for _, line := range faultsOf(t, err) {
		name, _, _ := strings.Cut(line, " ")
		got = append(got, name)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("names (-want +got):\n%s\n%v", diff, err)
	}
	if code := err.(interface{ ExitCode() int }).ExitCode(); code != 78 { //nolint:errcheck // asserted above
		t.Errorf("exit code %d", code)
	}
}

func TestANameIsOfferedOnlyWhenItIsNear(t *testing.T) {
	for name, want := range map[string]string{
		"KAFKASINK_BROKER":      "KAFKASINK_BROKER is unknown; did you mean KAFKASINK_BROKERS?",
		"KAFKASINK_LOGLEVEL":    "KAFKASINK_LOGLEVEL is unknown; did you mean KAFKASINK_LOG_LEVEL?",
		"KAFKASINK_CONCURRENCY": "KAFKASINK_CONCURRENCY is unknown",
		"FELDERA_NEW":           "FELDERA_NEW is unknown",
		"FELDERA_TOKEN":         "FELDERA_TOKEN is unknown",
		"FELDERA_":              "FELDERA_ is unknown",
	} {
		_, err := LoadKafkaSink(minimalKafka(name + "=1"))
		if lines := faultsOf(t, err); len(lines) != 1 || lines[0] != want {
			t.Errorf("faults %q, expected %q", lines, want)
		}
	}
}

func TestOtherNamesAreNotLookedAt(t *testing.T) {
	others := []string{
		"HOME=/", "PGPASSWORD=x", "PGSOURCES=1", "=C:=x", "noequals",
		// Kubernetes adds these for services named feldera, feldera-api, pgsource and kafkasink.
		"FELDERA_SERVICE_HOST=10.0.0.1", "FELDERA_SERVICE_PORT=8080", "FELDERA_SERVICE_PORT_HTTP_API=8080",
		"FELDERA_PORT=tcp://10.0.0.1:8080", "FELDERA_PORT_8080_TCP=tcp://10.0.0.1:8080",
		"FELDERA_PORT_8080_TCP_PROTO=tcp", "FELDERA_PORT_8080_TCP_PORT=8080", "FELDERA_PORT_8080_TCP_ADDR=10.0.0.1",
		"FELDERA_API_SERVICE_HOST=10.0.0.2", "FELDERA_API_PORT=tcp://10.0.0.2:80",
		"PGSOURCE_SERVICE_HOST=10.0.0.3", "KAFKASINK_PORT_8082_TCP_ADDR=10.0.0.4",
	}
	if _, err := LoadPGSource(minimalPG(append(others, "KAFKASINK_NONSENSE=1")...)); err != nil {
		t.Errorf("pgsource: %v", err)
	}
	if _, err := LoadKafkaSink(minimalKafka(append(others, "PGSOURCE_NONSENSE=1")...)); err != nil {
		t.Errorf("kafkasink: %v", err)
	}
}

func TestMappings(t *testing.T) {
	var tables TableMappings
	err := tables.UnmarshalText([]byte("Public.Orders , public.\"Items\",\n  sales.\"a\"\"b,c=d\" = \"X.y:z\",s.öÄ=PlainName, s.t$1=\"lower\""))
	want := TableMappings{
		{Schema: "public", Name: "orders", Target: "orders"},
		{Schema: "public", Name: "Items", Target: `"Items"`},
		{Schema: "sales", Name: `a"b,c=d`, Target: `"X.y:z"`},
		{Schema: "s", Name: "öÄ", Target: "plainname"},
		{Schema: "s", Name: "t$1", Target: "lower"},
	}
	if diff := cmp.Diff(want, tables); err != nil || diff != "" {
		t.Errorf("tables: %v (-want +got):\n%s", err, diff)
	}
	var topics TopicMappings
	err = topics.UnmarshalText([]byte("shop.orders-1=\"a:b\":json , t_2 = Orders : json"))
	wantTopics := TopicMappings{
		{Topic: "shop.orders-1", Table: `"a:b"`, Format: "json"},
		{Topic: "t_2", Table: "orders", Format: "json"},
	}
	if diff := cmp.Diff(wantTopics, topics); err != nil || diff != "" {
		t.Errorf("topics: %v (-want +got):\n%s", err, diff)
	}
}

// What String writes, UnmarshalText reads back to the same.
func FuzzTables(f *testing.F) {
	f.Add("public.orders")
	f.Add(`a."B""c"=D,x.y="z"`)
	f.Fuzz(func(t *testing.T, text string) {
		var list, again TableMappings
		if list.UnmarshalText([]byte(text)) != nil {
			return
		}
		if err := again.UnmarshalText([]byte(joined(list))); err != nil {
			t.Fatalf("%q → %q: %v", text, joined(list), err)
		}
		if diff := cmp.Diff(list, again); diff != "" {
			t.Fatalf("%q → %q:\n%s", text, joined(list), diff)
		}
	})
}

// What String writes, UnmarshalText reads back to the same.
func FuzzTopics(f *testing.F) {
	f.Add("orders=orders:json")
	f.Add(`a.b="X:""y":json, c = d : json`)
	f.Add(`~"a.*|""b"=c:json`)
	f.Fuzz(func(t *testing.T, text string) {
		var list, again TopicMappings
		if list.UnmarshalText([]byte(text)) != nil {
			return
		}
		if err := again.UnmarshalText([]byte(joined(list))); err != nil {
			t.Fatalf("%q → %q: %v", text, joined(list), err)
		}
		if diff := cmp.Diff(list, again); diff != "" {
			t.Fatalf("%q → %q:\n%s", text, joined(list), diff)
		}
	})
}

func TestTooManyTables(t *testing.T) {
	var entries, topics []string
	for i := range maxTargets + 1 {
		name := "t" + strings.Repeat("x", i)
		if len(name) > maxPGName {
			name = "u" + name[maxPGName:]
		}
		entries = append(entries, "s."+name)
		topics = append(topics, "k"+name+"="+name+":json")
	}
	var tables TableMappings
	if err := tables.UnmarshalText([]byte(strings.Join(entries[:maxTargets], ","))); err != nil {
		t.Errorf("%d tables: %v", maxTargets, err)
	}
	if err := tables.UnmarshalText([]byte(strings.Join(entries, ","))); err == nil || !strings.Contains(err.Error(), "100") {
		t.Errorf("%d tables: %v", len(entries), err)
	}
	var list TopicMappings
	if err := list.UnmarshalText([]byte(strings.Join(topics, ","))); err == nil || !strings.Contains(err.Error(), "100") {
		t.Errorf("%d topics: %v", len(topics), err)
	}
}

func TestDSNForms(t *testing.T) {
	for _, good := range []string{
		"postgres://u:p@h:5432/d?sslmode=require", "postgresql:///d?host=/run/postgresql", "postgres://a:1,b:2/d",
		"postgres://u:p%40@[::1]/d", "host=h user=u password='a b\\'c' dbname=d", "host = h  port= 5432", `password=a\ b host=h`, "host=''",
	} {
		if err := checkDSN(good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for _, bad := range []string{"postgres://", "host=h junk", "=x", `host=a\`, "host=h\x00", " "} {
		if err := checkDSN(bad); err == nil {
			t.Errorf("%q: accepted", bad)
		}
	}
}

func TestSecretFromAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dsn")
	write := func(content string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	environ := []string{"FELDERA_URL=http://h", "PGSOURCE_TABLES=a.b", "PGSOURCE_DSN_FILE=" + path}
	for _, content := range []string{"host=one\n", "host=one\r\n", "host=one"} {
		write(content)
		c, err := LoadPGSource(environ)
		if err != nil {
			t.Fatalf("%q: %v", content, err)
		}
		if v, err := c.DSN.Value(); err != nil || v != "host=one" {
			t.Errorf("%q: value %q, %v", content, v, err)
		}
		rows := c.Rows()
		if i := slices.IndexFunc(rows, func(r Row) bool { return r.Name == "PGSOURCE_DSN" }); i < 0 || rows[i].Source != SourceFile || rows[i].Value != redacted {
			t.Errorf("rows %+v", rows)
		}
	}
	c, err := LoadPGSource(environ)
	if err != nil {
		t.Fatal(err)
	}
	write("host=two\n")
	if v, err := c.DSN.Value(); err != nil || v != "host=two" {
		t.Errorf("after rotation: %q, %v", v, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := c.DSN.Value(); err == nil || strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "PGSOURCE_DSN_FILE") {
		t.Errorf("file gone: %v", err)
	}
	for content, want := range map[string]string{
		"host=one\n\n":                 "PGSOURCE_DSN has a control character", // only one is cut
		"\n":                           "PGSOURCE_DSN_FILE names a file that is empty",
		strings.Repeat("x", 65537):     "PGSOURCE_DSN_FILE names a file that is larger than 64KiB",
		"not a connection string\n":    "PGSOURCE_DSN is neither",
		"host=one\npassword=marker\n":  "PGSOURCE_DSN has a control character",
		"host=one\x00password=marker ": "PGSOURCE_DSN has a control character",
	} {
		write(content)
		_, err := LoadPGSource(environ)
		checkFault(t, err, want)
	}
}

// The table itself: every default and example is accepted, every setting has
// a help text, and enough is known to describe it.
func TestTable(t *testing.T) {
	feldera, pgsource, kafkasink, err := sections()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, sec := range []section{feldera, pgsource, kafkasink} {
		for _, s := range sec.settings {
			if seen[s.Name] {
				t.Errorf("%s is there twice", s.Name)
			}
			seen[s.Name] = true
			if s.Help == "" || s.Example == "" || s.Allowed() == "" || s.Allowed() == "text" {
				t.Errorf("%s: help %q, example %q, allowed %q", s.Name, s.Help, s.Example, s.Allowed())
			}
			if (s.Type == "int" || s.Type == "duration" || s.Type == "size") && (s.Min == "" || s.Max == "") {
				t.Errorf("%s has no bounds", s.Name)
			}
			if _, ok := forms()[s.form]; s.form != "" && !ok {
				t.Errorf("%s: form %q does not exist", s.Name, s.form)
			}
			if d, err := time.ParseDuration(s.Default); s.Type == "duration" && (err != nil || formatDuration(d) != s.Default) {
				t.Errorf("%s: the page shows the default %s, the printed settings %s (%v)", s.Name, s.Default, formatDuration(d), err)
			}
			if s.Required && s.Default != "" {
				t.Errorf("%s is required and has a default", s.Name)
			}
			if s.Type == "file" {
				continue // the example's file is not on this machine
			}
			for prefix, base := range map[string][]string{pgsourcePrefix: minimalPG(), kafkasinkPrefix: minimalKafka("KAFKASINK_SASL_MECHANISM=plain", "KAFKASINK_SASL_USER=u", "KAFKASINK_SASL_PASSWORD=p")} {
				if !strings.HasPrefix(s.Name, prefix) && !strings.HasPrefix(s.Name, felderaPrefix) {
					continue
				}
				switch s.Name {
				case "KAFKASINK_REGISTRY_USER", "KAFKASINK_REGISTRY_PASSWORD":
					base = append(base, "KAFKASINK_REGISTRY_URL=https://r:8081", "KAFKASINK_REGISTRY_USER=u", "KAFKASINK_REGISTRY_PASSWORD=p")
				case "KAFKASINK_REGISTRY_TOKEN":
					base = append(base, "KAFKASINK_REGISTRY_URL=https://r:8081")
				case "KAFKASINK_SERVER_NAME":
					base = append(base, "KAFKASINK_TLS=true")
				case "KAFKASINK_SASL_TOKEN", "KAFKASINK_SASL_TOKEN_URL":
					base = minimalKafka("KAFKASINK_SASL_MECHANISM=oauthbearer", "KAFKASINK_SASL_USER=u", "KAFKASINK_SASL_PASSWORD=p")
				case "PGSOURCE_STATE_DSN":
					base = append(base, "PGSOURCE_STATE=postgres:ops.state")
				}
				if _, err := loaders()[prefix](append([]string{s.Name + "=" + s.Example}, base...)); err != nil {
					t.Errorf("example of %s: %v", s.Name, err)
				}
			}
		}
	}
}

// Every number and text in a row can be fed back and gives the same table.
func TestPrintedValuesAreReadBack(t *testing.T) {
	pg, err := LoadPGSource(minimalPG("PGSOURCE_BATCH_AGE=1500ms", "PGSOURCE_STALL_TIMEOUT=1h", "PGSOURCE_BATCH_BYTES=1536KiB",
		"PGSOURCE_TRUNCATE=ignore", "PGSOURCE_LISTEN=:0"))
	if err != nil {
		t.Fatal(err)
	}
	environ := []string{"PGSOURCE_DSN=host=other"}
	for _, row := range pg.Rows() {
		if !row.Secret {
			environ = append(environ, row.Name+"="+row.Value)
		}
	}
	again, err := LoadPGSource(environ)
	if err != nil {
		t.Fatal(err)
	}
	withKey, err := LoadPGSource(append(environ, "FELDERA_API_KEY=k"))
	if err != nil {
		t.Fatal(err)
	}
	if withKey.Fingerprint() != again.Fingerprint() {
		t.Error("the fingerprint depends on a secret")
	}
	if pg.Fingerprint() != again.Fingerprint() {
		t.Errorf("fingerprints differ:\n%v\n%v", pg.Rows(), again.Rows())
	}
	other, err := LoadPGSource(minimalPG("PGSOURCE_IN_FLIGHT=9"))
	if err != nil {
		t.Fatal(err)
	}
	if other.Fingerprint() == pg.Fingerprint() || len(other.Fingerprint()) != 12 {
		t.Errorf("fingerprint %q does not depend on the settings", other.Fingerprint())
	}
}

func TestPrint(t *testing.T) {
	c, err := LoadKafkaSink(minimalKafka("KAFKASINK_BATCH_AGE=60s", "FELDERA_API_KEY=hunter2"))
	if err != nil {
		t.Fatal(err)
	}
	var text, machine bytes.Buffer
	if err := c.Print(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"FELDERA_API_KEY                env      [redacted]\n",
		"KAFKASINK_BATCH_AGE            env      1m\n",
		"KAFKASINK_SASL_PASSWORD        default  (not set)\n",
		"KAFKASINK_TOPICS               env      orders=orders:json\n",
		"KAFKASINK_MEMORY_LIMIT         default  256MiB\n",
		c.Fingerprint(),
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no line %q in\n%s", want, &text)
		}
	}
	if err := c.PrintJSON(&machine); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Fingerprint string
		Settings    []Row
	}
	if err := json.Unmarshal(machine.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c.Rows(), got.Settings); diff != "" || got.Fingerprint != c.Fingerprint() {
		t.Errorf("JSON (-rows +json):\n%s", diff)
	}
}

func TestHelpNamesEverySetting(t *testing.T) {
	var pg, kafka bytes.Buffer
	if err := HelpPGSource(&pg); err != nil {
		t.Fatal(err)
	}
	if err := HelpKafkaSink(&kafka); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"FELDERA_URL", "PGSOURCE_DSN_FILE", "PGSOURCE_STALL_TIMEOUT"} {
		if !strings.Contains(pg.String(), name) {
			t.Errorf("pgsource help lacks %s", name)
		}
	}
	if strings.Contains(pg.String(), "KAFKASINK_") || strings.Contains(kafka.String(), "PGSOURCE_") {
		t.Error("one daemon's help shows the other's settings")
	}
}

func TestReferencePage(t *testing.T) {
	page, err := Markdown()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("..", "..", "docs", "configuration.md")
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	stored, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(page, string(stored)); diff != "" {
		t.Errorf("docs/configuration.md is old; run go test ./internal/config -run TestReferencePage -update (-want +stored):\n%s", diff)
	}
}

func TestDistance(t *testing.T) {
	for _, tc := range []struct {
		a, b string
		want int
	}{{"", "abc", 3}, {"abc", "abc", 0}, {"TABELS", "TABLES", 1}, {"SLOTS", "SLOT", 1}, {"abcd", "bacde", 2}, {"kitten", "sitting", 3}} {
		if got, back := distance(tc.a, tc.b), distance(tc.b, tc.a); got != tc.want || back != tc.want {
			t.Errorf("distance(%q, %q) = %d and %d, expected %d", tc.a, tc.b, got, back, tc.want)
		}
	}
}

func TestSizeAndDurationAreReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := Size(rapid.Int64Min(0).Draw(t, "size"))
		if again, err := parseSize(size.String()); err != nil || again != size {
			t.Fatalf("%d → %s → %d, %v", size, size, again, err)
		}
		d := time.Duration(rapid.Int64().Draw(t, "duration"))
		if again, err := parseDuration(formatDuration(d)); err != nil || again != d {
			t.Fatalf("%d → %s → %d, %v", d, formatDuration(d), again, err)
		}
	})
}

// effectively_once is refused where it cannot hold.
func TestEffectivelyOnceNeeds(t *testing.T) {
	for _, tc := range []struct{ state, atomicity, want string }{
		{"none", "transaction", "PGSOURCE_STATE keeps nothing"},
		{"postgres:ops.state", "table", "PGSOURCE_ATOMICITY lets what is sent again after a crash be seen table by table"},
		{"postgres:ops.state", "transaction", ""},
		{"file:/var/lib/holdfast/s.json", "transaction", ""},
	} {
		_, err := LoadPGSource(minimalPG("PGSOURCE_DELIVERY=effectively_once", "PGSOURCE_STATE="+tc.state, "PGSOURCE_ATOMICITY="+tc.atomicity))
		if (err == nil) != (tc.want == "") || (err != nil && !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%+v: %v", tc, err)
		}
	}
}
