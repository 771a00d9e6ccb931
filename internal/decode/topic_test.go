package decode

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestOperations(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		field, key, value, want string
	}{
		"insert":                     {"__op", "", `{"id":1,"customer":"a","__op":"c"}`, "insert - > n:1 t:a ? ? ? ?"},
		"update":                     {"__op", "", `{"__op":"UPDATE","id":1}`, "insert - > n:1 ? ? ? ? ?"},
		"delete":                     {"__op", "", `{"id":1,"customer":"a","__op":"d"}`, "delete n:1 t:a ? ? ? ? > -"},
		"delete, key in the record":  {"__op", `{"id":1}`, `{"__op":"delete"}`, "delete n:1 ? ? ? ? ? > -"},
		"delete, key is null":        {"__op", `1`, `{"__op":"d","id":null}`, "delete n:1 ? ? ? ? ? > -"},
		"MongoDB, extracted":         {"__deleted", `{"id":"64b"}`, `{"id":"64b","customer":"a","__deleted":"false"}`, "insert - > t:64b t:a ? ? ? ?"},
		"MongoDB, extracted, gone":   {"__deleted", `{"id":"64b"}`, `{"__deleted":"true","id":"64b"}`, "delete t:64b ? ? ? ? ? > -"},
		"a boolean":                  {"__deleted", "", `{"id":1,"__deleted":true}`, "delete n:1 ? ? ? ? ? > -"},
		"unchanged TOAST, extracted": {"__op", "", `{"id":1,"customer":"__debezium_unavailable_value","__op":"u"}`, "update - > n:1 ~ ? ? ? ?"},
		"with Connect's schema":      {"__op", "", withSchema(`{"type":"struct","fields":[{"type":"int32","name":"io.debezium.time.Date","field":"due"},{"type":"string","field":"__op"}]}`, `{"id":1,"due":1,"__op":"r"}`), "insert - > n:1 ? ? t:1970-01-02 ? ?"},
	} {
		d := debeziumTopic(t, debeziumRelation, func(c2 *TopicConfig) { c2.Format, c2.OpField = FormatOpJSON, c.field })
		ch, err := d.Decode(&Record{Key: []byte(c.key), Value: []byte(c.value), Position: somewhere})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := changed(ch); got != c.want {
			t.Errorf("%s: got %s, want %s", name, got, c.want)
		}
	}
	keyless := &Relation{Name: "log", Columns: []Column{{Name: "id"}}}
	for name, c := range map[string]struct {
		rel        *Relation
		value, why string
	}{
		"no operation":      {debeziumRelation, `{"id":1}`, `no field "__op"`},
		"null operation":    {debeziumRelation, `{"id":1,"__op":null}`, `no field "__op"`},
		"unknown operation": {debeziumRelation, `{"id":1,"__op":"merge"}`, `is "merge"`},
		"no key":            {debeziumRelation, `{"__op":"d"}`, `"id" is missing`},
		"keyless delete":    {keyless, `{"id":1,"__op":"d"}`, "no primary key"},
	} {
		d := debeziumTopic(t, c.rel, func(c *TopicConfig) { c.Format, c.OpField = FormatOpJSON, "__op" })
		_, err := d.Decode(&Record{Value: []byte(c.value), Position: somewhere})
		var refusal *Refusal
		if !errors.As(err, &refusal) || !strings.Contains(refusal.Why, c.why) {
			t.Errorf("%s: %v, want %q", name, err, c.why)
		}
	}
}

func TestColumnsFromElsewhere(t *testing.T) {
	t.Parallel()
	rel := &Relation{Name: "t", Identity: IdentityDefault, Columns: []Column{
		{Name: "id", Key: true}, {Name: "topic"}, {Name: "part"}, {Name: "pos"}, {Name: "at"}, {Name: "h"}, {Name: "hs"}, {Name: "name"},
	}}
	columns := []ColumnSource{
		{"@key.ID", "id"}, {"@topic", "topic"}, {"@partition", "part"}, {"@offset", "pos"}, {"@timestamp", "at"}, {"@header.x", "h"}, {"@headers", "hs"}, {"Given Name", "name"},
	}
	d := debeziumTopic(t, rel, func(c *TopicConfig) { c.Format, c.Columns = FormatJSON, columns })
	rec := &Record{
		Key: []byte(`{"ID":7,"other":1}`), Value: []byte(`{"Given Name":"a"}`), Position: somewhere, Time: time.UnixMilli(1),
		Headers: []Header{{"x", []byte("first")}, {"b\"", []byte{255}}, {"n", nil}, {"x", []byte("é")}},
	}
	ch, err := d.Decode(rec)
	if err != nil {
		t.Fatal(err)
	}
	want := `insert - > n:7 t:orders n:3 n:42 t:1970-01-01T00:00:00.001Z t:é j:[{"key":"x","value":"first"},{"key":"b\"","value":"\\xff"},{"key":"n","value":null},{"key":"x","value":"é"}] t:a`
	if got := changed(ch); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	// Without a time and headers; and a header that is no text.
	for want, rec := range map[string]*Record{
		"insert - > n:7 t: n:0 n:0 null null j:[] ?":                            {Key: []byte(`{"ID":7}`), Value: []byte(`{}`)},
		`insert - > n:7 t: n:0 n:0 null h:ff j:[{"key":"x","value":"\\xff"}] ?`: {Key: []byte(`{"ID":7}`), Value: []byte(`{}`), Headers: []Header{{"x", []byte{255}}}},
		"delete n:7 ? ? ? ? ? ? ? > -":                                          {Key: []byte(`{"ID":7}`)},
	} {
		ch, err := d.Decode(rec)
		if err != nil || changed(ch) != want {
			t.Errorf("got %s, %v; want %s", changed(ch), err, want)
		}
	}
	for name, rec := range map[string]*Record{
		"a column twice": {Key: []byte(`{"ID":7}`), Value: []byte(`{"pos":1}`)},
		"the key twice":  {Key: []byte(`{"ID":7}`), Value: []byte(`{"id":1}`)},
		"no key":         {Value: []byte(`{}`)},
		"a broken key":   {Key: []byte(`{"ID":`), Value: []byte(`{}`)},
		"a header's name": {
			Key: []byte(`{"ID":7}`), Value: []byte(`{}`), Headers: []Header{{"\xff", nil}},
		},
	} {
		var refusal *Refusal
		if _, err := d.Decode(rec); !errors.As(err, &refusal) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestKeyFormats(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		format    KeyFormat
		key, want string
	}{
		{KeyText, "007", "delete t:007 ? ? ? ? ? > -"},
		{KeyText, `{"id":1}`, `delete t:{"id":1} ? ? ? ? ? > -`},
		{KeyAuto, "007", "delete t:007 ? ? ? ? ? > -"},
		{KeyAuto, "7", "delete n:7 ? ? ? ? ? > -"},
		{KeyJSON, `"7"`, "delete t:7 ? ? ? ? ? > -"},
		{KeyJSON, "007", ""},
		{KeyJSON, "x", ""},
		{KeyText, "\xff", ""},
		{KeyText, "", ""},
		{KeyAvro, "7", ""},
	} {
		d := debeziumTopic(t, debeziumRelation, func(tc *TopicConfig) { tc.Format, tc.KeyFormat = FormatJSON, c.format })
		ch, err := d.Decode(&Record{Key: []byte(c.key), Position: somewhere})
		if c.want == "" {
			var refusal *Refusal
			if !errors.As(err, &refusal) {
				t.Errorf("%s %q: %s, %v", c.format, c.key, changed(ch), err)
			}
			continue
		}
		if err != nil || changed(ch) != c.want {
			t.Errorf("%s %q: %s, %v; want %s", c.format, c.key, changed(ch), err, c.want)
		}
	}
}

func TestTopicMisfits(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*TopicConfig){
		"format":           func(c *TopicConfig) { c.Format = "xml" },
		"key format":       func(c *TopicConfig) { c.KeyFormat = "xml" },
		"operation field":  func(c *TopicConfig) { c.Format = FormatOpJSON },
		"column":           func(c *TopicConfig) { c.Columns = []ColumnSource{{"a", "nowhere"}} },
		"source":           func(c *TopicConfig) { c.Columns = []ColumnSource{{"@nothing", "id"}} },
		"field type":       func(c *TopicConfig) { c.FieldTypes = map[string]string{"id": "int"} },
		"field of no type": func(c *TopicConfig) { c.FieldTypes = map[string]string{"nowhere": "date"} },
	} {
		cfg := TopicConfig{Format: FormatJSON, Relation: debeziumRelation}
		change(&cfg)
		_, err := NewTopic(cfg)
		var refusal *Refusal
		if !errors.As(err, &refusal) || refusal.Reason != ReasonSetup {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A Connect schema in front of plain rows is used; a table with a column
// "payload" takes the message as it stands.
func TestWrappedRows(t *testing.T) {
	t.Parallel()
	value := []byte(withSchema(`{"type":"struct","fields":[{"type":"int32","name":"io.debezium.time.Date","field":"due"}]}`, `{"id":1,"due":1}`))
	d := debeziumTopic(t, debeziumRelation, func(c *TopicConfig) { c.Format = FormatJSON })
	if ch, err := d.Decode(&Record{Value: value}); err != nil || changed(ch) != "insert - > n:1 ? ? t:1970-01-02 ? ?" {
		t.Errorf("%s, %v", changed(ch), err)
	}
	d = debeziumTopic(t, &Relation{Name: "t", Columns: []Column{{Name: "payload"}}}, func(c *TopicConfig) { c.Format = FormatJSON })
	if ch, err := d.Decode(&Record{Value: value}); err != nil || changed(ch) != `insert - > j:{"id":1,"due":1}` {
		t.Errorf("%s, %v", changed(ch), err)
	}
}
