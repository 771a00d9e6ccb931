package main

import (
	"bytes"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// lie is one way in which a server breaks the contract, and the clauses that
// must notice.
type lie struct {
	name    string
	spoil   func(r *http.Request, status int, body []byte) (int, []byte)
	notices []string
}

// on makes a spoiler of the answers to one call with one status.
func on(call string, status int, change func(body []byte) (int, []byte)) func(*http.Request, int, []byte) (int, []byte) {
	return func(r *http.Request, got int, body []byte) (int, []byte) {
		if got != status || !strings.Contains(r.URL.Path, "/"+call) {
			return got, body
		}
		return change(body)
	}
}

func replace(old, with string) func([]byte) (int, []byte) {
	return func(b []byte) (int, []byte) { return http.StatusOK, bytes.ReplaceAll(b, []byte(old), []byte(with)) }
}

// withStatus changes the status alone.
func withStatus(status int) func([]byte) (int, []byte) {
	return func(b []byte) (int, []byte) { return status, b }
}

// edit changes an object's members and keeps the status.
func edit(status int, change func(m map[string]jsontext.Value)) func([]byte) (int, []byte) {
	return func(b []byte) (int, []byte) {
		var m map[string]jsontext.Value
		if json.Unmarshal(b, &m) != nil {
			return status, b
		}
		change(m)
		out, err := json.Marshal(m)
		if err != nil {
			return status, b
		}
		return status, out
	}
}

func lies() []lie {
	return []lie{
		{
			"a token with padding", on("ingress/", 200, replace(`"}`, `="}`)),
			[]string{"C5-FORM", "C5-INCARNATION", "C1.1-INGRESS-token"},
		},
		{
			"200 for a bad array", on("ingress/", 400, func([]byte) (int, []byte) { return 200, []byte(`{"token":"eyJ1IjoiYSIsImUiOjAsImMiOjF9"}`) }),
			[]string{"C1.4-ParseErrors", "C2.3-ARRAY-nothing", "C2.4-BIGINT-refuses", "C3-BAG-UPDATE"},
		},
		{
			"complete too early", on("completion_status", 200, func([]byte) (int, []byte) { return 200, []byte(`{"status":"complete","step":1}`) }),
			[]string{"C5-STATES", "C5-OUTPUTS", "C5-NEVER-ISSUED", "C4.2-FREEZES", "K-EVIDENCE-INGESTED", "K-EVIDENCE-QUEUED"},
		},
		{
			"a step before there is one", on("completion_status", 200, replace(`"step":null`, `"step":1`)),
			[]string{"C5-STATES", "C4.2-COMMITTING", "K-EVIDENCE-QUEUED"},
		},
		{
			"errors without details", on("", 400, edit(400, func(m map[string]jsontext.Value) { delete(m, "details") })),
			[]string{"C1.4-InvalidParam", "C1.4-ParseErrors", "C4.2-COMMIT-none"},
		},
		{
			"another error code", on("ingress/", 404, edit(404, func(m map[string]jsontext.Value) { m["error_code"] = jsontext.Value(`"NotFound"`) })),
			[]string{"C1.4-UnknownInputStream", "C2.4-TABLE-QUOTED-case"},
		},
		{
			"409 taken for 400", on("start_transaction", 409, withStatus(400)),
			[]string{"C4.2-START-twice", "C4.2-START-twice-message"},
		},
		{
			"another incarnation in /stats", on("stats", 200, func(b []byte) (int, []byte) {
				return 200, regexp.MustCompile(`"incarnation_uuid":"[^"]*"`).ReplaceAll(b, []byte(`"incarnation_uuid":"019a0000-0000-7000-8000-000000000009"`))
			}),
			[]string{"C5-INCARNATION", "K-SEND-TOKEN"},
		},
		{
			"410 for a token taken for 200", on("completion_status", 410, func([]byte) (int, []byte) { return 200, []byte(`{"status":"complete","step":1}`) }),
			[]string{"C5-FOREIGN", "C5-RESTART", "C5-UNKNOWN-ENDPOINT", "C6.2-TOKENS", "K-INCARNATION-WATCH"},
		},
		{
			"a row twice", on("query", 200, func(b []byte) (int, []byte) { return 200, append(b, b...) }),
			[]string{"C1.6-JSON", "C3-PK-UPSERT", "C2.2-INSERT", "K-QUERY", "K-QUERY-COUNT"},
		},
		{
			"a checkpoint that succeeds at once", on("checkpoint_status", 200, func([]byte) (int, []byte) { return 200, []byte(`{"success":99,"failure":null}`) }),
			[]string{"C6.3-ASYNCHRONOUS", "C6.3-OUTPUTS", "C6.3-DELAYED", "C6.4-R1", "K-DURABLE-COALESCED"},
		},
		{
			"a wrong type in the schema", on("pipelines/p", 200, replace(`"type":"DECIMAL"`, `"type":"DOUBLE"`)),
			[]string{"C1.5-TYPE-NAMES", "K-DESCRIBE-TYPES", "K-ENCODE-DECIMAL-refuses"},
		},
		{
			"no authentication", func(r *http.Request, status int, body []byte) (int, []byte) {
				if status == 401 {
					return 200, []byte("{}")
				}
				return status, body
			},
			[]string{"C1.3-NO-KEY", "C1.3-WRONG-KEY", "C1.3-PREFIX"},
		},
	}
}

// A clause that cannot fail proves nothing: in front of a server that breaks
// the contract in one point the clauses about that point fail, and behind an
// honest one they do not.
func TestClausesCanFail(t *testing.T) {
	honest := lie{name: "honest"}
	for _, l := range lies() {
		honest.notices = append(honest.notices, l.notices...)
	}
	for _, l := range append(lies(), honest) {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			var list []clause
			for _, c := range clauses() {
				if slices.Contains(l.notices, c.id) {
					list = append(list, c)
				}
			}
			slices.Sort(l.notices)
			if want := slices.Compact(l.notices); len(list) != len(want) {
				t.Fatalf("%d clauses, expected those of %v", len(list), want)
			}
			for _, c := range list {
				var out bytes.Buffer
				r := &runner{out: &out, hurry: true, front: func(upstream string) (string, func()) {
					p, end, err := newTap(t.Context(), upstream, l.spoil)
					if err != nil {
						t.Fatal(err)
					}
					return p.url, end
				}}
				sum := r.run(t.Context(), []clause{c})
				r.close()
				expected := 1
				if l.spoil == nil {
					expected = 0
				}
				if sum.failed != expected || sum.untestable != 0 {
					t.Errorf("expected %d failures, got %s", expected, out.String())
				}
			}
		})
	}
}
