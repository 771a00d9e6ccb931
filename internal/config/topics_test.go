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
	f.Fuzz(func(t *testing.T, text string) {
		again(t, text, func(l *FieldColumns) string { return joined(*l) })
		again(t, text, func(l *FieldTypes) string { return joined(*l) })
		again(t, text, func(l *KeyFormats) string { return joined(*l) })
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
