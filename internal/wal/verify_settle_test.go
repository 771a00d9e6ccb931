package wal

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// testSettler makes one for a table orders with a key and a text.
func testSettler(t *testing.T) *settler {
	t.Helper()
	program := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"inputs": [{"name": "orders", "primary_key": ["id"], "fields": [
			{"name": "id", "columntype": {"type": "BIGINT", "nullable": false}}, {"name": "note", "columntype": {"type": "VARCHAR", "nullable": true}}]}]}`))
	}))
	defer program.Close()
	c, err := feldera.New(feldera.Config{URL: program.URL, Logger: slog.New(slog.DiscardHandler)})
	must(t, err)
	schema, err := c.Describe(t.Context())
	must(t, err)
	table, err := schema.Table("orders")
	must(t, err)
	rel := &decode.Relation{ID: 1, Schema: "public", Name: "orders", Columns: []decode.Column{{Name: "id", TypeOID: 20, Key: true}, {Name: "note", TypeOID: 25}}}
	enc, err := feldera.NewEncoder(table, rel, feldera.Policy{})
	must(t, err)
	st := &sourceTable{name: nameOf(rel), rel: rel, jobNames: enc.KeyColumns(), keyNames: []string{`"id"`}}
	st.cmp, err = feldera.NewComparer(enc)
	must(t, err)
	v := &verifier{s: testSource(t, noStore{}), o: &VerifyOptions{Most: 10, Found: func(*Difference) {}}, src: st}
	return newSettler(v)
}

// A commit that is held back after the first read of the first look is in the
// pipeline at that look already, and only its later reads see who waits. It is no
// difference, however long it waits; what waits no more is one.
func TestCommitHeldBackWithinTheFirstLook(t *testing.T) {
	s := testSettler(t)
	image := func(note string) feldera.Image {
		id, refused := decode.TextValue(20, []byte("1"))
		text, alsoRefused := decode.TextValue(25, []byte(note))
		if refused != nil || alsoRefused != nil {
			t.Fatal(refused, alsoRefused)
		}
		im, err := s.v.src.cmp.Source([]decode.Value{id, text}, true)
		must(t, err)
		return im
	}
	row, there := &sourceRow{image: image("old"), version: "1"}, image("new")
	k := &suspect{key: row.image.Key}
	calm, held := &sourceLook{waiting: map[string]bool{}}, &sourceLook{waiting: map[string]bool{"7@now": true}}
	look := func(before, after *sourceLook) bool {
		t.Helper()
		proven, err := s.judge(k, row, row, &there, before, after)
		must(t, err)
		return proven
	}
	for n := range 4 {
		before := held
		if n == 0 {
			before = calm
		}
		if look(before, held) {
			t.Fatalf("look %d takes a row for stale whose new version is not visible yet", n)
		}
	}
	if !strings.Contains(k.why, "synchronous standby") {
		t.Errorf("it says %q", k.why)
	}
	if !look(held, calm) {
		t.Errorf("nobody waits any more, and it says %q", k.why)
	}
}

// A table that cannot be compared is not equal for that.
func TestComparisonThatIsRefusedIsUndecided(t *testing.T) {
	s := testSource(t, noStore{})
	s.showReport(&Report{Tables: []TableReport{{Table: "public.orders", Refused: "it has no PRIMARY KEY"}}})
	for result, want := range map[string]float64{verifyEqual: 0, verifyUndecided: 1} {
		var m dto.Metric
		must(t, s.cfg.Metrics.verify.runs.WithLabelValues(result).Write(&m))
		if got := m.GetCounter().GetValue(); got != want {
			t.Errorf("%v runs are %s", got, result)
		}
	}
}
