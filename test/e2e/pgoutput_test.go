package e2e

import (
	"context"
	"flag"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
	"holdfast/test/decodecheck"
	"holdfast/test/harness"
)

var updateSessions = flag.Bool("update-sessions", false, "write what the server sends into internal/decode/testdata/pgoutput")

// The decoder reads what a real server sends as pglogrepl does, in every shape
// that a table, a row and a transaction can have. The messages are stored for
// the decoder's own tests.
func TestDecoderOnARealServer(t *testing.T) {
	t.Parallel()
	cases := []struct{ name, ddl, sql, kinds string }{
		{
			"keyed", `CREATE TABLE keyed (id bigint PRIMARY KEY, v text, n int)`,
			`INSERT INTO keyed VALUES (1, 'a', NULL), (2, '', 0), (3, E'q"\\\n☃', -1); UPDATE keyed SET v = 'b' WHERE id = 1; UPDATE keyed SET id = 10 WHERE id = 2; DELETE FROM keyed WHERE id = 3`, "BCRIUD",
		},
		{
			"full", `CREATE TABLE full_id (id bigint, v text); ALTER TABLE full_id REPLICA IDENTITY FULL`,
			`INSERT INTO full_id VALUES (1, 'a'), (1, 'a'), (2, NULL); UPDATE full_id SET v = 'b' WHERE id = 2; DELETE FROM full_id WHERE id = 1`, "BCRIUD",
		},
		{
			"indexed", `CREATE TABLE indexed (id bigint PRIMARY KEY, v int NOT NULL, w text); CREATE UNIQUE INDEX by_v ON indexed (v) INCLUDE (w); ALTER TABLE indexed REPLICA IDENTITY USING INDEX by_v`,
			`INSERT INTO indexed VALUES (1, 10, 'x'); UPDATE indexed SET id = 2; UPDATE indexed SET v = 11; DELETE FROM indexed`, "BCRIUD",
		},
		{"nothing", `CREATE TABLE nothing (id bigint); ALTER TABLE nothing REPLICA IDENTITY NOTHING`, `INSERT INTO nothing VALUES (1)`, "BCRI"},
		{
			"toast", `CREATE TABLE toast (id bigint PRIMARY KEY, big text, v int); ALTER TABLE toast ALTER big SET STORAGE EXTERNAL;
			CREATE TABLE toast_full (id bigint PRIMARY KEY, big text, v int); ALTER TABLE toast_full ALTER big SET STORAGE EXTERNAL; ALTER TABLE toast_full REPLICA IDENTITY FULL`,
			`INSERT INTO toast VALUES (1, repeat('x', 2100), 1); UPDATE toast SET v = 2; UPDATE toast SET id = 2; UPDATE toast SET big = 'short';
			INSERT INTO toast_full VALUES (1, repeat('y', 2100), 1); UPDATE toast_full SET v = 2; UPDATE toast_full SET id = 2`, "BCRIU",
		},
		{
			"types", `CREATE TYPE mood AS ENUM ('ok'); CREATE DOMAIN small AS integer; CREATE DOMAIN amount AS numeric(12,2); CREATE TYPE pair AS (a int, b text);
			CREATE TABLE typed (id bigint PRIMARY KEY, b boolean, i2 smallint, r real, d double precision, n numeric, y bytea, j json, jb jsonb, t timestamptz, iv interval, u uuid,
			m mood, s small, a amount, p pair, ia int[], sa small[], ma mood[], rg int4range, o oid, x xid, x8 xid8, c char(4), tz timetz)`,
			`INSERT INTO typed VALUES (1, true, -1, 'NaN', '-Infinity', 'NaN', '\x00ff', '{"a": 1, "a": 2}', '{"b": 1e400}', 'infinity', '1 year -2 days', gen_random_uuid(),
			'ok', 3, 1.5, '(1,"x y")', '[0:1]={1,NULL}', '{1,2}', '{ok}', '[1,5)', 4294967295, '4294967295', '18446744073709551615', 'ab', '04:05:06.7-08:30'); UPDATE typed SET b = false, d = 1e-45`, "BCRYIU",
		},
		{
			"truncates", `CREATE TABLE mother (id bigserial PRIMARY KEY); CREATE TABLE child (id bigint PRIMARY KEY REFERENCES mother); CREATE TABLE alone (id bigint PRIMARY KEY)`,
			`INSERT INTO mother VALUES (1); INSERT INTO child VALUES (1); INSERT INTO alone VALUES (1); TRUNCATE alone; TRUNCATE mother, alone RESTART IDENTITY CASCADE`, "BCRIT",
		},
		{
			"rooted", `CREATE TABLE rooted (id bigint PRIMARY KEY, v text) PARTITION BY RANGE (id); CREATE TABLE rooted1 PARTITION OF rooted FOR VALUES FROM (0) TO (10);
			CREATE TABLE rooted2 (v text, id bigint PRIMARY KEY); ALTER TABLE rooted ATTACH PARTITION rooted2 FOR VALUES FROM (10) TO (20)`,
			`INSERT INTO rooted VALUES (1, 'a'), (11, 'b'); UPDATE rooted SET id = 12 WHERE id = 1; DELETE FROM rooted WHERE id = 11; TRUNCATE rooted`, "BCRIDT",
		},
		{
			"leaves", `CREATE TABLE leafed (id bigint PRIMARY KEY, v text) PARTITION BY RANGE (id); CREATE TABLE leafed1 PARTITION OF leafed FOR VALUES FROM (0) TO (10);
			CREATE TABLE leafed2 (v text, id bigint PRIMARY KEY); ALTER TABLE leafed ATTACH PARTITION leafed2 FOR VALUES FROM (10) TO (20)`,
			`INSERT INTO leafed VALUES (1, 'a'), (11, 'b'); UPDATE leafed SET id = 12 WHERE id = 1; TRUNCATE leafed`, "BCRIDT",
		},
		{
			"changing", `CREATE TABLE changing (id bigint PRIMARY KEY, a int, b text)`,
			`INSERT INTO changing VALUES (1, 1, 'x'); ALTER TABLE changing ADD c numeric(8,3); INSERT INTO changing VALUES (2, 2, 'y', 2.5); ALTER TABLE changing DROP a; UPDATE changing SET b = 'z';
			ALTER TABLE changing RENAME b TO "B b"; ALTER TABLE changing REPLICA IDENTITY FULL; DELETE FROM changing`, "BCRIUD",
		},
		{
			"quoted", `CREATE SCHEMA "Ünïcode ""S"; CREATE TABLE "Ünïcode ""S"."T.x" ("Id" bigint PRIMARY KEY, "select" text, "größe" int)`,
			`INSERT INTO "Ünïcode ""S"."T.x" VALUES (1, 'a', 2)`, "BCRI",
		},
		{"filtered", `CREATE TABLE filtered (id bigint PRIMARY KEY, v int, hidden text)`, `INSERT INTO filtered VALUES (1, 1, 'h'), (2, 20, 'h'); UPDATE filtered SET v = 30 WHERE id = 1; UPDATE filtered SET v = 2 WHERE id = 2; DELETE FROM filtered WHERE id = 1`, "BCRID"},
		{"messages", `CREATE TABLE told (id bigint PRIMARY KEY)`, `SELECT pg_logical_emit_message(true, 'p', 'in'), pg_logical_emit_message(false, 'q', 'out'); INSERT INTO told VALUES (1)`, "BCRIM"},
		{
			"origin", `CREATE TABLE from_afar (id bigint PRIMARY KEY); SELECT pg_replication_origin_create('afar')`,
			`SELECT pg_replication_origin_session_setup('afar'); SELECT pg_replication_origin_xact_setup('0/1', now()); INSERT INTO from_afar VALUES (1)`, "BCROI",
		},
	}
	pg := harness.NeedPostgres(t, harness.PostgresOptions{Settings: map[string]string{"max_replication_slots": "30"}})
	dir, err := harness.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		if c.name == "filtered" && major(t, pg) < 15 {
			continue // row filters and column lists are younger
		}
		execSQL(t, pg, c.ddl)
		with := "FOR ALL TABLES WITH (publish_via_partition_root = true)"
		switch c.name {
		case "leaves":
			with = "FOR ALL TABLES"
		case "filtered":
			with = "FOR TABLE filtered (id, v) WHERE (id < 100 AND v < 10)"
		}
		if c.name == "filtered" {
			execSQL(t, pg, `ALTER TABLE filtered REPLICA IDENTITY FULL`)
			with = "FOR TABLE filtered WHERE (v < 10)"
		}
		execSQL(t, pg, `CREATE PUBLICATION pub_`+c.name+` `+with)
		execSQL(t, pg, `SELECT pg_create_logical_replication_slot('`+c.name+`', 'pgoutput')`)
		execSQL(t, pg, c.sql)
		messages := sent(t, pg, c.name)
		d, kinds := decode.NewPgOutput(), map[byte]bool{}
		for i, raw := range messages {
			m, err := d.Decode(raw)
			if err != nil {
				t.Fatalf("%s: message %d (%c): %v", c.name, i, raw[0], err)
			}
			if err := decodecheck.Compare(raw, m); err != nil {
				t.Errorf("%s: message %d (%c): %v", c.name, i, raw[0], err)
			}
			kinds[raw[0]] = true
		}
		for _, k := range c.kinds {
			if !kinds[byte(k)] {
				t.Errorf("%s: no message %c among %d", c.name, k, len(messages))
			}
		}
		if len(kinds) != len(c.kinds) {
			t.Errorf("%s: messages %v, want %s", c.name, kinds, strings.Join(strings.Split(c.kinds, ""), " "))
		}
		if *updateSessions {
			if err := decodecheck.Save(filepath.Join(dir, "internal", "decode", "testdata", "pgoutput", c.name+".hex"), messages); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// sent gives what a slot has to send, in a session like pgsource's.
func sent(t *testing.T, pg *harness.Postgres, slot string) (messages [][]byte) {
	t.Helper()
	conn, err := pg.Connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	if _, err := conn.Exec(t.Context(), `SET bytea_output = hex`); err != nil {
		t.Fatal(err)
	}
	rows, err := conn.Query(t.Context(), `SELECT data FROM pg_logical_slot_peek_binary_changes($1::text::name, NULL, NULL, 'proto_version', '1', 'publication_names', 'pub_' || $1::text, 'messages', 'true')`, slot)
	if err == nil {
		messages, err = pgx.CollectRows(rows, pgx.RowTo[[]byte])
	}
	if err != nil {
		t.Fatal(err)
	}
	return messages
}
