package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The whole of it: traffic is recorded from real Postgres without moving its
// slot, the source is gone, and both daemons are played twice; the tables are
// equal to each other and to the source.
func TestReplayOfAPrivateStand(t *testing.T) {
	var out, errs bytes.Buffer
	if code := run(t.Context(), []string{"-timeout", "5m"}, nil, &out, &errs); code != 0 {
		t.Fatalf("exit code %d: %s\n%s", code, errs.String(), out.String())
	}
	t.Log(out.String())
	for _, line := range []string{
		"the slot was not moved", "EQUAL: the second play changed nothing in 3 tables",
		"EQUAL: table orders and its source", "EQUAL: table items and its source", "EQUAL: table web_orders and its source",
	} {
		if !strings.Contains(out.String(), line) {
			t.Errorf("it does not say %q", line)
		}
	}
}

func TestWrongUse(t *testing.T) {
	for name, args := range map[string][]string{
		"an unknown verb": {"-dir", "x", "rewind"}, "no folder": {"play"}, "a bad flag": {"-limit", "much"}, "no room": {"-limit", "0"},
	} {
		var errs bytes.Buffer
		if code := run(t.Context(), args, nil, &errs, &errs); code != 64 || errs.Len() == 0 {
			t.Errorf("%s: exit code %d, %q", name, code, errs.String())
		}
	}
	var errs bytes.Buffer
	if code := run(t.Context(), []string{"-dir", t.TempDir(), "record"}, nil, &errs, &errs); code != 1 || !strings.Contains(errs.String(), "PGSOURCE_DSN") {
		t.Errorf("nothing to record: exit code %d, %q", code, errs.String())
	}
}

// smallRecording makes a recording of two messages.
func smallRecording(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	m := &manifest{Version: tapeVersion, Postgres: &postgresPart{Slot: "holdfast", To: 16}, SHA256: map[string]string{}}
	w, err := newTapeWriter(dir, streamFile, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	for _, data := range []string{"first", "second"} {
		line, err := jsonLine(message{LSN: 16, Data: []byte(data)})
		if err == nil {
			err = w.write(line)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.finish(m), m.save(dir)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// A recording that is not what was recorded is refused by the file's name, and
// so is one that another version wrote, or that leads out of its folder.
func TestARecordingIsReadOnlyAsItWasRecorded(t *testing.T) {
	m, err := loadManifest(smallRecording(t))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	dir := smallRecording(t)
	if err := readLines(dir, m, streamFile, func(msg message) error { got = append(got, string(msg.Data)); return nil }); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"first", "second"}, got); diff != "" {
		t.Error(diff)
	}
	for name, c := range map[string]struct {
		file, from, to, says string
	}{
		"one byte":        {streamFile, "0/10", "0/11", streamFile + " is not what was recorded"},
		"another version": {manifestFile, `"version": 1`, `"version": 2`, "is of version 2"},
		"another folder":  {manifestFile, `"` + streamFile + `"`, `"../` + streamFile + `"`, "no file of the folder"},
		"no source":       {manifestFile, `"postgres"`, `"postgrez"`, "names no source"},
		"no manifest":     {manifestFile, "{", "", "read manifest.json"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := smallRecording(t)
			path := filepath.Join(dir, c.file)
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(strings.Replace(string(text), c.from, c.to, 1)), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := loadManifest(dir); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v, want %q", err, c.says)
			}
		})
	}
}

// What does not fit as a whole is left out as a whole.
func TestALimitLeavesNothingHalf(t *testing.T) {
	w, err := newTapeWriter(t.TempDir(), streamFile, 10)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.write([]byte("1234")); err != nil {
		t.Fatal(err)
	}
	if err := w.write([]byte("12"), []byte("12")); !errors.Is(err, errFull) {
		t.Errorf("6 bytes into 5: %v", err)
	}
	m := &manifest{SHA256: map[string]string{}}
	if err := w.finish(m); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(w.file.Name()); err != nil || string(text) != "1234\n" {
		t.Errorf("the file holds %q, %v", text, err)
	}
}

func begin(final lsn) []byte { return binary.BigEndian.AppendUint64([]byte("B"), uint64(final)) }

// A stream that is taken up in the middle begins with the first transaction
// that was committed after it, and says again what an earlier one has said about
// its tables.
func TestAStreamIsTakenUpInTheMiddle(t *testing.T) {
	s := &pgServer{part: &postgresPart{To: 40}, stream: []message{
		{10, begin(10)},
		{10, []byte("R\x00\x00\x00\x07first")},
		{10, []byte("I old")},
		{10, []byte("C")},
		{20, begin(20)},
		{20, []byte("R\x00\x00\x00\x07second")},
		{20, []byte("C")},
		{30, begin(30)},
		{30, []byte("I new")},
		{30, []byte("C")},
	}}
	for start, want := range map[lsn][]string{
		0:  {"B", "R\x00\x00\x00\x07first", "I old", "C", "B", "R\x00\x00\x00\x07second", "C", "B", "I new", "C", "k"},
		25: {"B", "R\x00\x00\x00\x07second", "I new", "C", "k"},
		31: {"k"},
	} {
		var got []string
		err := s.send(start, make(chan struct{}), func(_ bool, bodies ...[]byte) error {
			for _, b := range bodies {
				if b[0] == 'w' {
					b = b[25:]
				}
				if b[0] == 'B' || b[0] == 'k' {
					b = b[:1]
				}
				got = append(got, string(b))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("from %s (-want +got):\n%s", start, diff)
		}
	}
}

// While it is recorded nothing that pgsource might ask changes the source, and
// when it is played nobody is asked.
func TestTheSourceIsOnlyLookedAt(t *testing.T) {
	c := newCatalogue()
	asked := 0
	c.ask = func(_ context.Context, replication bool, query string) (answer, error) {
		asked++
		return answer{Replication: replication, Query: query, Tag: "SELECT 0"}, nil
	}
	for range 2 {
		if a, err := c.answer(t.Context(), false, "SELECT 1"); err != nil || a.Tag != "SELECT 0" {
			t.Fatalf("%+v, %v", a, err)
		}
	}
	if _, err := c.answer(t.Context(), false, " CREATE PUBLICATION p"); err == nil || asked != 1 {
		t.Errorf("it was let through (asked %d times): %v", asked, err)
	}
	c.ask = nil
	if _, err := c.answer(t.Context(), true, "SELECT 1"); err == nil || !strings.Contains(err.Error(), "record anew") {
		t.Errorf("an unknown query is answered: %v", err)
	}
	if got := len(c.added); got != 1 {
		t.Errorf("%d answers were noted", got)
	}
}

// A slot that somebody reads cannot be recorded, and says so; nor does anything
// remain that looks like a recording.
func TestASlotInUseIsRefused(t *testing.T) {
	pg := harness.NeedPostgres(t, harness.PostgresOptions{})
	if err := pg.Exec(t.Context(), "CREATE TABLE orders (id bigint PRIMARY KEY)"); err != nil {
		t.Fatal(err)
	}
	simulated, err := startSim(t.Context(), "CREATE TABLE orders (id BIGINT NOT NULL PRIMARY KEY)")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = simulated.Close() })
	env := simulated.env().with(map[string]string{"PGSOURCE_DSN": pg.DSN(), "PGSOURCE_TABLES": "public.orders", "PGSOURCE_CREATE": "true", "PGSOURCE_STATE": "none", "PGSOURCE_SPILL_DIR": t.TempDir()})
	harness.NeedDaemon(t, "./cmd/pgsource", harness.BuildOptions{}, harness.DaemonOptions{Env: env, ListenVar: "PGSOURCE_LISTEN"})
	harness.Await(t, time.Minute, "the slot to be streamed", func(ctx context.Context) (any, bool) { // the session that makes it has it for a moment, too
		active, err := harness.QueryValue[bool](ctx, pg, "SELECT EXISTS (SELECT FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid)")
		return err, active
	})
	dir := t.TempDir()
	var errs bytes.Buffer
	code := run(t.Context(), []string{"-dir", dir, "record"}, env.with(map[string]string{"FELDERA_URL": "", "FELDERA_PIPELINE": ""}).list(), &errs, &errs)
	if code != 1 || !strings.Contains(errs.String(), "is in use") {
		t.Errorf("exit code %d: %s", code, errs.String())
	}
	if _, err := loadManifest(dir); err == nil {
		t.Error("it left a recording")
	}
}

// Equal states are equal rows, in whatever order; one changed value shows.
func TestStatesTellTablesApart(t *testing.T) {
	of := func(rows ...string) state {
		simulated, err := startSim(t.Context(), "CREATE TABLE t (id BIGINT NOT NULL PRIMARY KEY, v VARCHAR) WITH ('materialized' = 'true')")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = simulated.Close() }()
		insert(t, simulated, rows)
		c, err := client(simulated.env().with(map[string]string{"FELDERA_API_KEY": ""}))
		if err != nil {
			t.Fatal(err)
		}
		defer c.CloseIdle()
		all, err := states(t.Context(), c, []string{"t"})
		if err != nil {
			t.Fatal(err)
		}
		return all["t"]
	}
	a := of(`{"insert":{"id":1,"v":"x"}}`, `{"insert":{"id":2,"v":null}}`)
	if b := of(`{"insert":{"id":2,"v":null}}`, `{"insert":{"id":1,"v":"x"}}`); a != b || a.rows != 2 {
		t.Errorf("the order counts: %v, %v", a, b)
	}
	if b := of(`{"insert":{"id":1,"v":"x"}}`, `{"insert":{"id":2,"v":"null"}}`); a == b {
		t.Error("another value does not count")
	}
}

// insert puts rows into the simulator over its HTTP interface, and waits until
// they can be read.
func insert(t *testing.T, s *sim, rows []string) {
	t.Helper()
	url := s.URL() + "/v0/pipelines/replay/ingress/t?format=json&update_format=insert_delete&array=true"
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader("["+strings.Join(rows, ",")+"]"))
	if err != nil {
		t.Fatal(err)
	}
	res, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		t.Fatalf("insert: %s", res.Status)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.WaitFor(ctx, func(v felderasim.View) bool { return v.Count("t") == int64(len(rows)) }); err != nil {
		t.Fatal(err)
	}
}
