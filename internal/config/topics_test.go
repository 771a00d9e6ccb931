package config

import (
	"encoding"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"holdfast/internal/decode"
)

func TestTopicCompanions(t *testing.T) {
	t.Parallel()
	environ := slices.DeleteFunc(minimalKafka(), func(e string) bool { return strings.HasPrefix(e, "KAFKASINK_TOPICS=") })
	c, err := LoadKafkaSink(append(environ,
		"KAFKASINK_TOPICS=orders=orders:json, shop.items = \"Items\" : debezium-json",
		"KAFKASINK_COLUMNS=orders/cust_id = Customer, */@offset=kafka_offset, shop.items/@header.trace-id=trace, orders/\"a b\"\"c\"=\"X\",shop.items/@offset=o",
		"KAFKASINK_FIELD_TYPES=shop.items/price=decimal(2),*/due=io.debezium.time.Date,shop.items/due=date",
		"KAFKASINK_KEY_FORMATS=*=json,orders=text",
		"KAFKASINK_TOMBSTONES=ignore", "KAFKASINK_CONTROL_MESSAGES=stop", "KAFKASINK_TRUNCATE=ignore", "KAFKASINK_EXTRA_FIELDS=stop"))
	if err != nil {
		t.Fatal(err)
	}
	common := decode.TopicConfig{
		RefuseUnknown: true, OpField: "__op", Tombstone: decode.TombstoneIgnore, RefuseControl: true, IgnoreTruncate: true,
		Unavailable: "__debezium_unavailable_value",
	}
	orders, items := common, common
	orders.Format, orders.KeyFormat = decode.FormatJSON, decode.KeyText
	orders.Columns = []decode.ColumnSource{{From: "cust_id", Column: "customer"}, {From: `a b"c`, Column: "X"}, {From: "@offset", Column: "kafka_offset"}}
	orders.FieldTypes = map[string]string{"due": "io.debezium.time.Date"}
	items.Format, items.KeyFormat = decode.FormatDebeziumJSON, decode.KeyJSON
	items.Columns = []decode.ColumnSource{{From: "@header.trace-id", Column: "trace"}, {From: "@offset", Column: "o"}}
	items.FieldTypes = map[string]string{"price": "decimal(2)", "due": "date"}
	for i, want := range []decode.TopicConfig{orders, items} {
		if diff := cmp.Diff(want, c.Decoding(c.Topics[i])); diff != "" {
			t.Errorf("topic %s (-want +got):\n%s", c.Topics[i].Topic, diff)
		}
	}
}

func TestAvroNeedsSchemas(t *testing.T) {
	t.Parallel()
	environ := slices.DeleteFunc(minimalKafka(), func(e string) bool { return strings.HasPrefix(e, "KAFKASINK_TOPICS=") })
	environ = append(environ, "KAFKASINK_TOPICS=orders=orders:avro")
	if _, err := LoadKafkaSink(environ); err == nil || !strings.Contains(err.Error(), "KAFKASINK_REGISTRY_URL is not set although a topic is Avro") {
		t.Errorf("error %v", err)
	}
	for _, enough := range []string{
		"KAFKASINK_REGISTRY_URL=http://r:8081", "KAFKASINK_SCHEMA_FILES=89791762-2336-4186-9674-299b90a802e2=/a,7=/b,c", "KAFKASINK_AVRO_SCHEMAS=orders/value=/a",
	} {
		c, err := LoadKafkaSink(append(slices.Clone(environ), enough))
		if err != nil {
			t.Errorf("%s: %v", enough, err)
			continue
		}
		want := SchemaFiles{
			{Ref: decode.SchemaRef{Kind: decode.SchemaGUID, GUID: [16]byte{0x89, 0x79, 0x17, 0x62, 0x23, 0x36, 0x41, 0x86, 0x96, 0x74, 0x29, 0x9b, 0x90, 0xa8, 0x02, 0xe2}}, Path: "/a"},
			{Ref: decode.SchemaRef{Kind: decode.SchemaID, ID: 7}, Path: "/b"},
			{Path: "c"},
		}
		if strings.Contains(enough, "FILES") {
			if diff := cmp.Diff(want, c.SchemaFiles); diff != "" {
				t.Error(diff)
			}
		}
	}
}

func TestPatterns(t *testing.T) {
	t.Parallel()
	environ := slices.DeleteFunc(minimalKafka(), func(e string) bool { return strings.HasPrefix(e, "KAFKASINK_TOPICS=") })
	c, err := LoadKafkaSink(append(environ, `KAFKASINK_TOPICS=~"shop\.(orders|items)_[0-9]{1,3}"=orders:debezium-json, shop.orders_7=special:json , ~"shop\..*"=rest:json`,
		"KAFKASINK_COLUMNS=shop.orders_3/a=b", "KAFKASINK_DLQ_TOPIC=shop.dead"))
	if err != nil {
		t.Fatal(err)
	}
	if !c.Topics.HasPatterns() {
		t.Error("no patterns")
	}
	got := c.Topics.Expand([]string{"shop.dead", "shop.items_1", "shop.items_1234", "shop.orders_3", "shop.orders_7", "xshop.orders_3", "shop"}, c.DLQTopic)
	want := TopicMappings{
		{Topic: "shop.orders_7", Table: "special", Format: "json"},
		{Topic: "shop.items_1", Table: "orders", Format: "debezium-json"},
		{Topic: "shop.orders_3", Table: "orders", Format: "debezium-json"},
		{Topic: "shop.items_1234", Table: "rest", Format: "json"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for setting, fault := range map[string]string{
		`~shop.*=a:json`:          "has a pattern that is not in double quotes in entry 1",
		`~"shop.*=a:json`:         "has a double quote without its end in entry 1",
		`~""=a:json`:              "has a pattern that is empty",
		`~"("=a:json`:             "has a pattern that is no regular expression",
		`~"a)|(b"=a:json`:         "has a pattern that is no regular expression",
		`~"a"=a:json,~"a"=b:json`: "has the same topic in entries 1 and 2",
		"~\"a\x01\"=a:json":       "control character",
		`~"` + strings.Repeat("a", 2000) + `"=a:json`: "longer than 1024 bytes",
	} {
		_, err := LoadKafkaSink(append(slices.Clone(environ), "KAFKASINK_TOPICS="+setting))
		if err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("%.40s: %v, want %q", setting, err, fault)
		}
	}
}

func TestTopicCompanionFaults(t *testing.T) {
	t.Parallel()
	for setting, want := range map[string]string{
		"KAFKASINK_COLUMNS=orders":                              "KAFKASINK_COLUMNS has no / after the topic in entry 1",
		"KAFKASINK_COLUMNS=orders/a":                            "KAFKASINK_COLUMNS has no = after the field in entry 1",
		"KAFKASINK_COLUMNS=orders/=b":                           "KAFKASINK_COLUMNS has no field",
		"KAFKASINK_COLUMNS=orders/@ofset=b":                     "KAFKASINK_COLUMNS has a source that is no field",
		"KAFKASINK_COLUMNS=orders/a=b,orders/c=b":               "KAFKASINK_COLUMNS has two sources for one column in entries 1 and 2",
		"KAFKASINK_COLUMNS=orders/a=b,orders/a=c":               "KAFKASINK_COLUMNS has the same source in entries 1 and 2",
		"KAFKASINK_COLUMNS=ordres/a=b":                          "KAFKASINK_COLUMNS names a topic that is not one of KAFKASINK_TOPICS",
		"KAFKASINK_COLUMNS=orders/\"a=b":                        "KAFKASINK_COLUMNS has a double quote without its end in entry 1",
		"KAFKASINK_COLUMNS=orders/a=b;":                         "KAFKASINK_COLUMNS has something left over after entry 1",
		"KAFKASINK_FIELD_TYPES=orders/a=int":                    "KAFKASINK_FIELD_TYPES has a type that is not one of docs/formats.md in entry 1",
		"KAFKASINK_FIELD_TYPES=orders/a=decimal":                "KAFKASINK_FIELD_TYPES has a type that is not one of docs/formats.md in entry 1: it needs its scale",
		"KAFKASINK_FIELD_TYPES=orders/a=date,orders/a=date":     "KAFKASINK_FIELD_TYPES has the same field in entries 1 and 2",
		"KAFKASINK_KEY_FORMATS=orders=xml":                      "KAFKASINK_KEY_FORMATS has a key format that is not one of auto",
		"KAFKASINK_KEY_FORMATS=orders:text":                     "KAFKASINK_KEY_FORMATS has no = after the topic in entry 1",
		"KAFKASINK_KEY_FORMATS=orders=text,orders=json":         "KAFKASINK_KEY_FORMATS has the same topic in entries 1 and 2",
		"KAFKASINK_SCHEMA_FILES=x=/a":                           "KAFKASINK_SCHEMA_FILES has a name before the = that is neither an id nor a GUID in entry 1",
		"KAFKASINK_SCHEMA_FILES=4294967296=/a":                  "KAFKASINK_SCHEMA_FILES has a name before the = that is neither",
		"KAFKASINK_SCHEMA_FILES=7=/a,7=/b":                      "KAFKASINK_SCHEMA_FILES has the same schema in entries 1 and 2",
		"KAFKASINK_SCHEMA_FILES=7=":                             "KAFKASINK_SCHEMA_FILES has no file in entry 1",
		"KAFKASINK_AVRO_SCHEMAS=orders/head=/a":                 "KAFKASINK_AVRO_SCHEMAS has neither value nor key after the topic in entry 1",
		"KAFKASINK_AVRO_SCHEMAS=*/key=/a":                       "KAFKASINK_AVRO_SCHEMAS has no topic in entry 1",
		"KAFKASINK_AVRO_SCHEMAS=orders/key=/a,orders/key=/b":    "KAFKASINK_AVRO_SCHEMAS has the same topic and part in entries 1 and 2",
		"KAFKASINK_AVRO_SCHEMAS=ordres/key=/a":                  "KAFKASINK_AVRO_SCHEMAS names a topic that is not one of KAFKASINK_TOPICS",
		"KAFKASINK_REGISTRY_USER=u":                             "KAFKASINK_REGISTRY_USER is set without KAFKASINK_REGISTRY_PASSWORD",
		"KAFKASINK_REGISTRY_TOKEN=t":                            "KAFKASINK_REGISTRY_URL is not set although other settings of the registry are",
		"KAFKASINK_TOMBSTONES=keep":                             "KAFKASINK_TOMBSTONES is not one of the words it can be",
		"KAFKASINK_KEY_FORMATS=" + strings.Repeat("a=text,", 2): "KAFKASINK_KEY_FORMATS has the same topic",
	} {
		t.Run(setting, func(t *testing.T) {
			t.Parallel()
			_, err := LoadKafkaSink(append(minimalKafka(), setting))
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want %q", err, want)
			}
		})
	}
}

// What String writes, UnmarshalText reads back to the same.
func FuzzTopicCompanions(f *testing.F) {
	f.Add(`orders/cust_id=customer, */"a b"="X",t/@header.x=y`)
	f.Add(`orders/a=decimal(2)`)
	f.Add(`*=text,a=json`)
	f.Add(`7=/a, 89791762-2336-4186-9674-299b90a802e2=b,/c`)
	f.Add(`a/value=/x.avsc,a/key = y`)
	f.Fuzz(func(t *testing.T, text string) {
		again(t, text, func(l *FieldColumns) string { return joined(*l) })
		again(t, text, func(l *FieldTypes) string { return joined(*l) })
		again(t, text, func(l *KeyFormats) string { return joined(*l) })
		again(t, text, func(l *SchemaFiles) string { return joined(*l) })
		again(t, text, func(l *AvroSchemas) string { return joined(*l) })
	})
}

func again[L any, P interface {
	*L
	encoding.TextUnmarshaler
}](t *testing.T, text string, write func(*L) string,
) {
	t.Helper()
	var once, twice L
	if P(&once).UnmarshalText([]byte(text)) != nil {
		return
	}
	if err := P(&twice).UnmarshalText([]byte(write(&once))); err != nil {
		t.Fatalf("%q → %q: %v", text, write(&once), err)
	}
	if diff := cmp.Diff(fmt.Sprint(once), fmt.Sprint(twice)); diff != "" {
		t.Fatalf("%q → %q:\n%s", text, write(&once), diff)
	}
}
