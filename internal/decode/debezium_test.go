package decode

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The table that the messages below are about. Its columns stand for the types
// that Debezium's connectors have forms of their own for.
var debeziumRelation = &Relation{Name: "orders", Identity: IdentityDefault, Columns: []Column{
	{Name: "id", Key: true}, {Name: "customer"}, {Name: "amount"}, {Name: "due"}, {Name: "at"}, {Name: "doc"},
}}

func debeziumTopic(tb testHelper, rel *Relation, change func(*TopicConfig)) *Topic {
	tb.Helper()
	cfg := TopicConfig{Format: FormatDebeziumJSON, Relation: rel}
	if change != nil {
		change(&cfg)
	}
	d, err := NewTopic(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return d
}

// rowSchema is a row's type as Debezium's Postgres connector describes it with
// decimal.handling.mode=precise and time.precision.mode=adaptive.
const rowSchema = `"type":"struct","fields":[
	{"type":"int32","optional":false,"default":0,"field":"id"},
	{"type":"string","optional":true,"field":"customer"},
	{"type":"bytes","optional":true,"name":"org.apache.kafka.connect.data.Decimal","version":1,"parameters":{"scale":"2","connect.decimal.precision":"10"},"field":"amount"},
	{"type":"int32","optional":true,"name":"io.debezium.time.Date","version":1,"field":"due"},
	{"type":"int64","optional":true,"name":"io.debezium.time.MicroTimestamp","version":1,"field":"at"},
	{"type":"string","optional":true,"name":"io.debezium.data.Json","version":1,"field":"doc"}],
	"optional":true,"name":"shop.public.orders.Value"`

const envelopeSchema = `{"type":"struct","fields":[
	{` + rowSchema + `,"field":"before"},{` + rowSchema + `,"field":"after"},
	{"type":"struct","fields":[
		{"type":"string","optional":false,"field":"version"},{"type":"string","optional":false,"field":"connector"},
		{"type":"string","optional":false,"field":"name"},{"type":"int64","optional":false,"field":"ts_ms"},
		{"type":"string","optional":true,"name":"io.debezium.data.Enum","version":1,"parameters":{"allowed":"true,last,false,incremental"},"default":"false","field":"snapshot"},
		{"type":"string","optional":false,"field":"db"},{"type":"string","optional":false,"field":"schema"},{"type":"string","optional":false,"field":"table"},
		{"type":"int64","optional":true,"field":"txId"},{"type":"int64","optional":true,"field":"lsn"},{"type":"int64","optional":true,"field":"xmin"}],
		"optional":false,"name":"io.debezium.connector.postgresql.Source","field":"source"},
	{"type":"struct","fields":[{"type":"string","optional":false,"field":"id"},{"type":"int64","optional":false,"field":"total_order"},
		{"type":"int64","optional":false,"field":"data_collection_order"}],"optional":true,"name":"event.block","version":1,"field":"transaction"},
	{"type":"string","optional":false,"field":"op"},{"type":"int64","optional":true,"field":"ts_ms"}],
	"optional":false,"name":"shop.public.orders.Envelope","version":2}`

const keySchema = `{"type":"struct","fields":[{"type":"int32","optional":false,"default":0,"field":"id"}],"optional":false,"name":"shop.public.orders.Key"}`

const pgSource = `{"version":"3.0.5.Final","connector":"postgresql","name":"shop","ts_ms":1714000000000,"snapshot":"false","db":"shop","sequence":"[null,\"24023128\"]","ts_us":1714000000000000,"ts_ns":1714000000000000000,"schema":"public","table":"orders","txId":555,"lsn":24023128,"xmin":null}`

func payload(op, before, after, source string) string {
	return fmt.Sprintf(`{"before":%s,"after":%s,"source":%s,"transaction":null,"op":%q,"ts_ms":1714000000142,"ts_us":1714000000142000,"ts_ns":1714000000142000000}`,
		before, after, source, op)
}

func withSchema(schema, payload string) string {
	return `{"schema":` + schema + `,"payload":` + payload + `}`
}

// cells writes a row compactly: ? for absent, null, ~ for unchanged, and values
// with their kind's letter.
func cells(row []Value) string {
	if row == nil {
		return "-"
	}
	out := make([]string, len(row))
	for i, v := range row {
		switch v.State {
		case Absent:
			out[i] = "?"
		case Null:
			out[i] = "null"
		case Unchanged:
			out[i] = "~"
		case Set:
			out[i] = string("tbnhj"[v.Kind]) + ":" + string(v.Bytes)
		}
	}
	return strings.Join(out, " ")
}

func changed(ch *OrderChange) string {
	if ch == nil {
		return "nothing"
	}
	return fmt.Sprintf("%s %s > %s", ch.Op, cells(ch.Before), cells(ch.After))
}

func TestDebeziumEnvelopes(t *testing.T) {
	t.Parallel()
	one := `{"id":1,"customer":"ada","amount":"BN4=","due":19723,"at":1704164645123456,"doc":"{\"a\": [1]}"}`
	oneRow := `n:1 t:ada n:12.46 t:2024-01-01 t:2024-01-02T03:04:05.123456 j:{"a": [1]}`
	keyOnly := `{"id":1,"customer":"","amount":null,"due":null,"at":null,"doc":null}`
	key := withSchema(keySchema, `{"id":1}`)
	for name, c := range map[string]struct {
		key, value string // no value: a tombstone
		want       string
	}{
		"create":                         {key, withSchema(envelopeSchema, payload("c", "null", one, pgSource)), "insert - > " + oneRow},
		"snapshot read":                  {key, withSchema(envelopeSchema, payload("r", "null", one, pgSource)), "insert - > " + oneRow},
		"update, default identity":       {key, withSchema(envelopeSchema, payload("u", "null", one, pgSource)), "update - > " + oneRow},
		"update, full identity":          {key, withSchema(envelopeSchema, payload("u", one, one, pgSource)), "update n:1 ? ? ? ? ? > " + oneRow},
		"update of the key":              {key, payload("u", `{"id":7,"customer":"x"}`, `{"id":1,"customer":"x"}`, pgSource), "update n:7 ? ? ? ? ? > n:1 t:x ? ? ? ?"},
		"update of the key, not 0":       {key, payload("u", `{"id":0}`, `{"id":1}`, `{"connector":"mysql"}`), "update n:0 ? ? ? ? ? > n:1 ? ? ? ? ?"},
		"delete":                         {key, withSchema(envelopeSchema, payload("d", keyOnly, "null", pgSource)), "delete n:1 ? ? ? ? ? > -"},
		"delete of the key 0":            {`{"id":0}`, payload("d", `{"id":0}`, "null", pgSource), "delete n:0 ? ? ? ? ? > -"},
		"delete of the key 0, no key":    {"", payload("d", `{"id":0,"customer":"x"}`, "null", pgSource), "delete n:0 ? ? ? ? ? > -"},
		"delete of the key 0, MySQL":     {`{"uid":5}`, payload("d", `{"id":0}`, "null", `{"connector":"mysql"}`), "delete n:0 ? ? ? ? ? > -"},
		"delete, key in the record":      {key, payload("d", "null", "null", pgSource), "delete n:1 ? ? ? ? ? > -"},
		"tombstone":                      {key, "", "delete n:1 ? ? ? ? ? > -"},
		"tombstone, key without schema":  {`{"id":1}`, "", "delete n:1 ? ? ? ? ? > -"},
		"wrapped null":                   {key, `{"schema":null,"payload":null}`, "delete n:1 ? ? ? ? ? > -"},
		"without schema":                 {`{"id":1}`, payload("c", "null", `{"id":1,"customer":"ada","amount":"12.46"}`, pgSource), "insert - > n:1 t:ada t:12.46 ? ? ?"},
		"null schema":                    {key, withSchema("null", payload("c", "null", `{"id":1}`, pgSource)), "insert - > n:1 ? ? ? ? ?"},
		"unchanged TOAST":                {key, withSchema(envelopeSchema, payload("u", "null", `{"id":1,"customer":"__debezium_unavailable_value","amount":"BN4=","doc":"__debezium_unavailable_value"}`, pgSource)), "update - > n:1 ~ n:12.46 ? ? ~"},
		"TOAST text that contains it":    {key, payload("u", "null", `{"id":1,"customer":"x__debezium_unavailable_value"}`, pgSource), "update - > n:1 t:x__debezium_unavailable_value ? ? ? ?"},
		"unchanged TOAST, binary":        {key, payload("u", "null", `{"id":1,"customer":"`+base64.StdEncoding.EncodeToString([]byte(defaultPlaceholder))+`"}`, pgSource), "update - > n:1 ~ ? ? ? ?"},
		"unchanged TOAST, text array":    {key, payload("u", "null", `{"id":1,"doc":[ "__debezium_unavailable_value" ]}`, pgSource), "update - > n:1 ? ? ? ? ~"},
		"unchanged TOAST, hstore":        {key, payload("u", "null", `{"id":1,"doc":{"__debezium_unavailable_value":"__debezium_unavailable_value"}}`, pgSource), "update - > n:1 ? ? ? ? ~"},
		"unchanged TOAST, numbers":       {key, payload("u", "null", `{"id":1,"doc":[95,95,100,101,98,101,122,105,117,109,95,117,110,97,118,97,105,108,97,98,108,101,95,118,97,108,117,101]}`, pgSource), "update - > n:1 ? ? ? ? ~"},
		"unchanged TOAST, geometry":      {key, payload("u", "null", `{"id":1,"doc":{"wkb":"AQEAACDmEAAAAAAA/IPXl8EAAAD8g9eXwQ==","srid":4326}}`, pgSource), "update - > n:1 ? ? ? ? ~"},
		"SQL Server":                     {`{"id":1}`, payload("u", `{"id":1,"customer":"a"}`, `{"id":1,"customer":"b"}`, `{"version":"3.0.5.Final","connector":"sqlserver","name":"s","change_lsn":"00000027:00000758:0003","commit_lsn":"00000027:00000758:0005","event_serial_no":"2","db":"shop","schema":"dbo","table":"orders"}`), "update n:1 ? ? ? ? ? > n:1 t:b ? ? ? ?"},
		"MySQL":                          {`{"id":1}`, payload("d", `{"id":1,"customer":"a"}`, "null", `{"version":"3.0.5.Final","connector":"mysql","name":"m","server_id":223344,"gtid":null,"file":"mysql-bin.000003","pos":484,"row":0,"thread":null,"query":null,"db":"shop","table":"orders"}`), "delete n:1 ? ? ? ? ? > -"},
		"transaction boundary":           {`{"id":"571:53195829"}`, `{"status":"BEGIN","id":"571:53195829","event_count":null,"data_collections":null,"ts_ms":1486500577125}`, "nothing"},
		"transaction end":                {`{"id":"571:53195829"}`, `{"status":"END","id":"571:53195829","event_count":2,"data_collections":[{"data_collection":"s1.a","event_count":2}],"ts_ms":1486500577691}`, "nothing"},
		"heartbeat":                      {`{"serverName":"shop"}`, withSchema(`{"type":"struct","fields":[{"type":"int64","optional":false,"field":"ts_ms"}],"optional":false,"name":"io.debezium.connector.common.Heartbeat"}`, `{"ts_ms":1667000000000}`), "nothing"},
		"schema change":                  {`{"databaseName":"shop"}`, `{"source":{"connector":"mysql"},"ts_ms":1,"databaseName":"shop","schemaName":null,"ddl":"ALTER TABLE orders ADD x INT","tableChanges":[]}`, "nothing"},
		"logical message":                {`{"prefix":"p"}`, `{"op":"m","ts_ms":1,"source":` + pgSource + `,"message":{"prefix":"p","content":"aGk="}}`, "nothing"},
		"numeric decimals":               {key, withSchema(envelopeSchema, payload("c", "null", `{"id":1,"amount":12.460}`, pgSource)), "insert - > n:1 ? n:12.460 ? ? ?"},
		"before of one that was unknown": {key, payload("u", `{"id":1,"customer":"__debezium_unavailable_value"}`, `{"id":1,"customer":"b"}`, pgSource), "update n:1 ? ? ? ? ? > n:1 t:b ? ? ? ?"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := debeziumTopic(t, debeziumRelation, nil)
			for range 2 { // the second time with the schemas known
				rec := &Record{Key: []byte(c.key), Position: somewhere}
				if c.value != "" {
					rec.Value = []byte(c.value)
				}
				ch, err := d.Decode(rec)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(c.want, changed(ch)); diff != "" {
					t.Fatalf("(-want +got):\n%s", diff)
				}
			}
		})
	}
}

func TestDebeziumRefusals(t *testing.T) {
	t.Parallel()
	keyless := &Relation{Name: "log", Columns: []Column{{Name: "id"}}}
	for name, c := range map[string]struct {
		rel        *Relation
		change     func(*TopicConfig)
		key, value string
		reason     Reason
		why        string
	}{
		"no row":                 {nil, nil, `{"id":1}`, payload("c", "null", "null", pgSource), ReasonMalformed, "after has no row"},
		"op unknown":             {nil, nil, `{"id":1}`, payload("x", "null", `{"id":1}`, pgSource), ReasonUnsupported, `op is "x"`},
		"op null":                {nil, nil, `{"id":1}`, `{"op":null,"after":{"id":1}}`, ReasonMalformed, "op is null"},
		"plain row":              {nil, nil, `{"id":1}`, `{"id":1,"customer":"a"}`, ReasonMalformed, "no member op"},
		"array":                  {nil, nil, `{"id":1}`, `[1]`, ReasonMalformed, "JSON array"},
		"truncate":               {nil, nil, `null`, payload("t", "null", "null", pgSource), ReasonUnsupported, "truncated"},
		"control refused":        {nil, func(c *TopicConfig) { c.RefuseControl = true }, `{}`, `{"ts_ms":1}`, ReasonUnsupported, "heartbeat"},
		"MongoDB's own":          {nil, nil, `{"id":"1"}`, payload("c", "null", `"{\"_id\": 1}"`, `{"connector":"mongodb"}`), ReasonUnsupported, "after is a JSON string"},
		"no key at all":          {nil, nil, `{"x":1}`, payload("d", "null", "null", pgSource), ReasonMalformed, `"id" is missing`},
		"old key made up":        {nil, nil, `{"id":5}`, payload("u", `{"id":0,"customer":"a"}`, `{"id":5,"customer":"a"}`, pgSource), ReasonIdentity, "empty key"},
		"deleted key made up":    {nil, nil, `{"uid":5}`, payload("d", `{"uid":5,"id":0,"customer":null}`, "null", pgSource), ReasonIdentity, `key column "id"`},
		"deleted text made up":   {nil, nil, `{"uid":5}`, payload("d", `{"uid":5,"id":"","customer":null}`, "null", pgSource), ReasonIdentity, `key column "id"`},
		"keyless update":         {keyless, nil, `{"id":5}`, payload("u", `{"id":5}`, `{"id":5}`, pgSource), ReasonIdentity, "no primary key"},
		"keyless delete":         {keyless, nil, `{"id":5}`, payload("d", `{"id":5}`, "null", pgSource), ReasonIdentity, "no primary key"},
		"keyless tombstone":      {keyless, nil, `{"id":5}`, "", ReasonIdentity, "no primary key"},
		"tombstone refused":      {nil, func(c *TopicConfig) { c.Tombstone = TombstoneStop }, `{"id":5}`, "", ReasonUnsupported, "tombstones are refused"},
		"date that is no number": {nil, nil, `{"id":1}`, withSchema(envelopeSchema, payload("c", "null", `{"id":1,"due":"x"}`, pgSource)), ReasonMalformed, "whole number"},
		"date beyond 32 bits":    {nil, nil, `{"id":1}`, withSchema(envelopeSchema, payload("c", "null", `{"id":1,"due":99999999999}`, pgSource)), ReasonMalformed, "out of range"},
		"decimal without base64": {nil, nil, `{"id":1}`, withSchema(envelopeSchema, payload("c", "null", `{"id":1,"amount":"?"}`, pgSource)), ReasonMalformed, "base64"},
		"decimal without bytes":  {nil, nil, `{"id":1}`, withSchema(envelopeSchema, payload("c", "null", `{"id":1,"amount":""}`, pgSource)), ReasonMalformed, "no bytes"},
		"decimal without scale":  {nil, nil, `{"id":1}`, withSchema(strings.ReplaceAll(envelopeSchema, `"scale"`, `"size"`), payload("c", "null", `{"id":1}`, pgSource)), ReasonMalformed, `"scale"`},
		"schema of no kind":      {nil, nil, `{"id":1}`, withSchema(`{"type":"mystery"}`, payload("c", "null", `{"id":1}`, pgSource)), ReasonMalformed, "mystery"},
		"schema that is a text":  {nil, nil, `{"id":1}`, withSchema(`"int32"`, payload("c", "null", `{"id":1}`, pgSource)), ReasonMalformed, "not an object"},
		"schema too large":       {nil, nil, `{"id":1}`, withSchema(`{"type":"struct","doc":"`+strings.Repeat("x", maxConnectSchema)+`","fields":[]}`, payload("c", "null", `{"id":1}`, pgSource)), ReasonLimit, "bytes"},
		"schema of many fields":  {nil, nil, `{"id":1}`, withSchema(`{"type":"struct","fields":[`+strings.Repeat(`{"type":"int8","field":"f"},`, 5000)+`{"type":"int8","field":"f"}]}`, payload("c", "null", `{"id":1}`, pgSource)), ReasonMalformed, "twice"},
		"duplicate in after":     {nil, nil, `{"id":1}`, payload("c", "null", `{"id":1,"id":2}`, pgSource), ReasonMalformed, "duplicate"},
		"folded twice":           {nil, nil, `{"id":1}`, payload("c", "null", `{"id":1,"ID":2}`, pgSource), ReasonMalformed, "given twice"},
		"trailing bytes":         {nil, nil, `{"id":1}`, payload("c", "null", `{"id":1}`, pgSource) + "x", ReasonMalformed, "left over"},
		"unknown field":          {nil, func(c *TopicConfig) { c.RefuseUnknown = true }, `{"id":1}`, payload("c", "null", `{"id":1,"new":2}`, pgSource), ReasonSchema, `"new"`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rel := c.rel
			if rel == nil {
				rel = debeziumRelation
			}
			d := debeziumTopic(t, rel, c.change)
			rec := &Record{Key: []byte(c.key), Position: somewhere}
			if c.value != "" {
				rec.Value = []byte(c.value)
			}
			ch, err := d.Decode(rec)
			var refusal *Refusal
			if !errors.As(err, &refusal) {
				t.Fatalf("%s, error %v", changed(ch), err)
			}
			if refusal.Reason != c.reason || !strings.Contains(refusal.Why, c.why) || refusal.Where != "orders[3]@42" || refusal.What == "" {
				t.Fatalf("the refusal says %s: %q", refusal.Reason, refusal.Error())
			}
		})
	}
}

// A key change at the source arrives as delete, tombstone and create.
func TestDebeziumKeyChange(t *testing.T) {
	t.Parallel()
	d := debeziumTopic(t, debeziumRelation, nil)
	var got []string
	for _, r := range [][2]string{
		{`{"id":1}`, payload("d", `{"id":1,"customer":""}`, "null", pgSource)},
		{`{"id":1}`, ""},
		{`{"id":2}`, payload("c", "null", `{"id":2,"customer":"a"}`, pgSource)},
	} {
		rec := &Record{Key: []byte(r[0]), Position: somewhere}
		if r[1] != "" {
			rec.Value = []byte(r[1])
		}
		ch, err := d.Decode(rec)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, changed(ch))
	}
	want := []string{"delete n:1 ? ? ? ? ? > -", "delete n:1 ? ? ? ? ? > -", "insert - > n:2 t:a ? ? ? ?"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestDebeziumPoliciesPass(t *testing.T) {
	t.Parallel()
	var passed []Passed
	d := debeziumTopic(t, debeziumRelation, func(c *TopicConfig) {
		c.Tombstone, c.IgnoreTruncate = TombstoneIgnore, true
		c.OnPassed = func(p Passed) { passed = append(passed, p) }
	})
	for _, value := range []string{"", payload("t", "null", "null", pgSource), `{"ts_ms":1}`} {
		rec := &Record{Key: []byte(`x`), Position: somewhere}
		if value != "" {
			rec.Value = []byte(value)
		}
		if ch, err := d.Decode(rec); ch != nil || err != nil {
			t.Fatalf("%s, %v", changed(ch), err)
		}
	}
	if diff := cmp.Diff([]Passed{PassedTombstone, PassedTruncate, PassedHeartbeat}, passed); diff != "" {
		t.Error(diff)
	}
}

// Every type that Debezium and Kafka Connect have a name for, as JSON.
func TestConnectTypes(t *testing.T) {
	t.Parallel()
	named := func(typ, name, rest string) string {
		return fmt.Sprintf(`{"type":%q,"optional":true,"name":%q,"version":1%s}`, typ, name, rest)
	}
	for name, c := range map[string]struct{ schema, value, want string }{
		"int64":                 {`{"type":"int64"}`, `9007199254740993`, "n:9007199254740993"},
		"double":                {`{"type":"double"}`, `1.5e300`, "n:1.5e300"},
		"double NaN":            {`{"type":"double"}`, `"NaN"`, "n:NaN"},
		"float infinity":        {`{"type":"float"}`, `"-Infinity"`, "n:-Infinity"},
		"text NaN":              {`{"type":"string"}`, `"NaN"`, "t:NaN"},
		"boolean":               {`{"type":"boolean"}`, `true`, "b:true"},
		"bytes":                 {`{"type":"bytes"}`, `"AP9h"`, "h:00ff61"},
		"no bytes":              {`{"type":"bytes"}`, `""`, "h:"},
		"decimal":               {named("bytes", "org.apache.kafka.connect.data.Decimal", `,"parameters":{"scale":"4"}`), `"/w=="`, "n:-0.0001"},
		"decimal scale 0":       {named("bytes", "org.apache.kafka.connect.data.Decimal", `,"parameters":{"scale":"0"}`), `"AMg="`, "n:200"},
		"decimal scale below 0": {named("bytes", "org.apache.kafka.connect.data.Decimal", `,"parameters":{"scale":"-2"}`), `"AQ=="`, "n:100"},
		"decimal of 38 digits":  {named("bytes", "org.apache.kafka.connect.data.Decimal", `,"parameters":{"scale":"10"}`), `"SztMqFqGxHoJiiI/////8w=="`, "n:9999999999999999999999999999.9999999987"},
		"decimal -2^127":        {named("bytes", "org.apache.kafka.connect.data.Decimal", `,"parameters":{"scale":"0"}`), `"gAAAAAAAAAAAAAAAAAAAAA=="`, "n:-170141183460469231731687303715884105728"},
		"variable decimal":      {`{"type":"struct","fields":[{"type":"int32","field":"scale"},{"type":"bytes","field":"value"}],"name":"io.debezium.data.VariableScaleDecimal"}`, `{"scale":3,"value":"MDk="}`, "n:12.345"},
		"Date":                  {named("int32", "io.debezium.time.Date", ""), `-719162`, "t:0001-01-01"},
		"Date before year 0":    {named("int32", "io.debezium.time.Date", ""), `-719894`, "t:-0002-12-31"},
		"Date of year 12345":    {named("int32", "io.debezium.time.Date", ""), `3789755`, "t:12345-12-31"},
		"Date of 1900":          {named("int32", "org.apache.kafka.connect.data.Date", ""), `-25509`, "t:1900-02-28"},
		"Date of a leap day":    {named("int32", "io.debezium.time.Date", ""), `11016`, "t:2000-02-29"},
		"Time":                  {named("int32", "io.debezium.time.Time", ""), `45296789`, "t:12:34:56.789"},
		"connect Time":          {named("int32", "org.apache.kafka.connect.data.Time", ""), `0`, "t:00:00:00"},
		"MicroTime":             {named("int64", "io.debezium.time.MicroTime", ""), `86400000000`, "t:24:00:00"},
		"MicroTime below 0":     {named("int64", "io.debezium.time.MicroTime", ""), `-3020399000001`, "t:-838:59:59.000001"},
		"NanoTime":              {named("int64", "io.debezium.time.NanoTime", ""), `1`, "t:00:00:00.000000001"},
		"Timestamp":             {named("int64", "io.debezium.time.Timestamp", ""), `-1`, "t:1969-12-31T23:59:59.999"},
		"MicroTimestamp":        {named("int64", "io.debezium.time.MicroTimestamp", ""), `1704164645000000`, "t:2024-01-02T03:04:05"},
		"NanoTimestamp":         {named("int64", "io.debezium.time.NanoTimestamp", ""), `1704164645000000120`, "t:2024-01-02T03:04:05.000000120"},
		"connect Timestamp":     {named("int64", "org.apache.kafka.connect.data.Timestamp", ""), `1704164645120`, "t:2024-01-02T03:04:05.120Z"},
		"ZonedTimestamp":        {named("string", "io.debezium.time.ZonedTimestamp", ""), `"2024-01-02T03:04:05.5Z"`, "t:2024-01-02T03:04:05.5Z"},
		"ZonedTime":             {named("string", "io.debezium.time.ZonedTime", ""), `"03:04:05Z"`, "t:03:04:05Z"},
		"IsoDate":               {named("string", "io.debezium.time.IsoDate", ""), `"2024-01-02Z"`, "t:2024-01-02"},
		"IsoTimestamp":          {named("string", "io.debezium.time.IsoTimestamp", ""), `"2024-01-02T03:04:05Z"`, "t:2024-01-02T03:04:05Z"},
		"Year":                  {named("int32", "io.debezium.time.Year", ""), `2024`, "n:2024"},
		"Json":                  {named("string", "io.debezium.data.Json", ""), `"{\"a\":\"\\u00e9\"}"`, `j:{"a":"\u00e9"}`},
		"Enum":                  {named("string", "io.debezium.data.Enum", `,"parameters":{"allowed":"a,b"}`), `"a"`, "t:a"},
		"Uuid":                  {named("string", "io.debezium.data.Uuid", ""), `"09e19fc7-3d7e-4b0e-9d43-7d1c9dbd1c1a"`, "t:09e19fc7-3d7e-4b0e-9d43-7d1c9dbd1c1a"},
		"Bits":                  {named("bytes", "io.debezium.data.Bits", `,"parameters":{"length":"10"}`), `"BQI="`, "t:1000000101"},
		"Interval":              {named("int64", "io.debezium.time.MicroDuration", ""), `36`, "n:36"},
		"array of text":         {`{"type":"array","items":{"type":"string"}}`, `["a" , null]`, `j:["a" , null]`},
		"array of dates":        {`{"type":"array","items":` + named("int32", "io.debezium.time.Date", "") + `}`, `[0, null,1 ]`, `j:["1970-01-01",null,"1970-01-02"]`},
		"array of nothing":      {`{"type":"array","items":` + named("int32", "io.debezium.time.Date", "") + `}`, `[ ]`, `j:[]`},
		"array of decimals":     {`{"type":"array","items":` + named("bytes", "org.apache.kafka.connect.data.Decimal", `,"parameters":{"scale":"1"}`) + `}`, `["ZA=="]`, `j:[10.0]`},
		"array of binary data":  {`{"type":"array","items":{"type":"bytes"}}`, `["AP8="]`, `j:["\\x00ff"]`},
		"map of timestamps":     {`{"type":"map","keys":{"type":"string"},"values":` + named("int64", "io.debezium.time.Timestamp", "") + `}`, `{"a": 0}`, `j:{"a":"1970-01-01T00:00:00"}`},
		"struct":                {`{"type":"struct","fields":[{"type":"bytes","field":"wkb"},{"type":"int32","optional":true,"field":"srid"}],"name":"io.debezium.data.geometry.Geometry"}`, `{"wkb":"AQ==","srid":null}`, `j:{"wkb":"\\x01","srid":null}`},
		"null":                  {named("int64", "io.debezium.time.Timestamp", ""), `null`, "null"},
		"name on another type":  {named("string", "io.debezium.time.Date", ""), `"x"`, "t:x"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := debeziumTopic(t, &Relation{Name: "t", Columns: []Column{{Name: "v"}}}, nil)
			row := `{"type":"struct","fields":[` + strings.TrimSuffix(c.schema, "}") + `,"field":"v"}]`
			value := withSchema(`{"type":"struct","fields":[`+row+`,"field":"after"},{"type":"string","field":"op"}]}`, `{"after":{"v":`+c.value+`},"op":"c"}`)
			ch, err := d.Decode(&Record{Value: []byte(value), Position: somewhere})
			if err != nil {
				t.Fatal(err)
			}
			if got := cells(ch.After); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

// What a message's own schema would say can be said by a setting.
func TestFieldTypes(t *testing.T) {
	t.Parallel()
	rel := &Relation{Name: "t", Columns: []Column{{Name: "a", Key: true}, {Name: "b"}, {Name: "c"}, {Name: "d"}, {Name: "e"}}}
	d := debeziumTopic(t, rel, func(c *TopicConfig) {
		c.Columns = []ColumnSource{{"price", "d"}}
		c.FieldTypes = map[string]string{
			"a": "io.debezium.time.MicroTimestamp", "b": "date", "c": "bytes", "price": "decimal(3)", "e": "bits(4)",
		}
	})
	ch, err := d.Decode(&Record{Value: []byte(payload("c", "null", `{"a":1000001,"b":1,"c":"YQ==","price":"MDk=","e":"Cg=="}`, pgSource)), Position: somewhere})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := cells(ch.After), "t:1970-01-01T00:00:01.000001 t:1970-01-02 h:61 n:12.345 t:1010"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	ch, err = d.Decode(&Record{Key: []byte(`{"a":0}`), Position: somewhere})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := changed(ch), "delete t:1970-01-01T00:00:00 ? ? ? ? > -"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, bad := range []string{"", "int", "decimal", "decimal(x)", "decimal(-1)", "decimal(1", "date(3)", "bits"} {
		if CheckFieldType(bad) == nil {
			t.Errorf("the type %q is taken", bad)
		}
	}
}

func FuzzDebeziumJSON(f *testing.F) {
	f.Add([]byte(`{"id":1}`), []byte(withSchema(envelopeSchema, payload("u", `{"id":1}`, `{"id":1,"customer":"a","amount":"BN4=","due":1}`, pgSource))))
	f.Add([]byte(`{"id":1}`), []byte(payload("d", `{"id":1}`, "null", pgSource)))
	f.Add([]byte(withSchema(keySchema, `{"id":1}`)), []byte(`{"ts_ms":1}`))
	f.Fuzz(func(t *testing.T, key, value []byte) {
		d := debeziumTopic(t, debeziumRelation, nil)
		for _, v := range [][]byte{value, nil} {
			ch, err := d.Decode(&Record{Key: key, Value: v, Position: somewhere})
			var refusal *Refusal
			if err != nil && !errors.As(err, &refusal) {
				t.Fatalf("error of another type: %v", err)
			}
			if ch == nil {
				continue
			}
			if ch.Op == Delete && ch.Before[0].State != Set {
				t.Fatalf("a delete without a key: %s", changed(ch))
			}
			if ch.Op != Delete && ch.After == nil {
				t.Fatalf("%v without a row", ch.Op)
			}
		}
	})
}
