package core

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testSQL = `
CREATE TABLE orders (id BIGINT NOT NULL PRIMARY KEY, qty INT, note VARCHAR) WITH ('materialized' = 'true');
CREATE TABLE lines (a INT NOT NULL, b INT NOT NULL, qty INT, PRIMARY KEY (b, a));
CREATE TABLE events (name VARCHAR NOT NULL, n INT);
`

// arrayQuery is how the daemons send.
const arrayQuery = "format=json&update_format=insert_delete&array=true"

// rig drives an engine step by step.
type rig struct {
	t *testing.T
	*Engine
}

func newRig(t *testing.T, cfg Config) *rig {
	t.Helper()
	if cfg.Program == nil {
		cfg.Program = program(t, testSQL)
	}
	if cfg.Workers == 0 {
		cfg.Workers = 1
	}
	e, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &rig{t, e}
}

func program(t *testing.T, sql string) *Program {
	t.Helper()
	p, err := ParseProgram(sql)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// send does what one ingress request does, all of its body at once.
func (r *rig) send(table, query, body string) (string, *APIError) {
	r.t.Helper()
	q, err := url.ParseQuery(query)
	if err != nil {
		r.t.Fatal(err)
	}
	pc, aerr := ParserConfigFromQuery(table, q)
	if aerr != nil {
		return "", aerr
	}
	ep, aerr := r.Open(table, pc)
	if aerr != nil {
		return "", aerr
	}
	var errs ParseErrors
	for _, part := range []struct {
		data string
		end  bool
	}{{body, false}, {"", true}} {
		entries, aerr := ep.Parser.Feed([]byte(part.data), part.end, &errs)
		if aerr != nil {
			return "", aerr
		}
		for _, en := range entries {
			r.Push(ep, en)
		}
	}
	if aerr := errs.Err(); aerr != nil {
		r.ParseErrors(ep, errs.Num)
		return "", aerr
	}
	return r.Token(ep), nil
}

// ok sends an array and gives the token.
func (r *rig) ok(table, body string) string {
	r.t.Helper()
	tok, err := r.send(table, arrayQuery, body)
	if err != nil {
		r.t.Fatalf("send to %s: %v", table, err)
	}
	return tok
}

// fails sends and wants this error code.
func (r *rig) fails(code, table, query, body string) {
	r.t.Helper()
	_ = r.failure(code, table, query, body) // it has looked at the code
}

// failure sends, wants this error code and gives the whole error.
func (r *rig) failure(code, table, query, body string) *APIError {
	r.t.Helper()
	_, err := r.send(table, query, body)
	if err == nil || err.Code != code {
		r.t.Fatalf("send %s to %s: got %v, want %s", body, table, err, code)
	}
	return err
}

// steps runs everything there is to run and gives how many steps it took.
func (r *rig) steps() int {
	n := 0
	for ; r.WantsStep(); n++ {
		r.Step()
	}
	return n
}

// status gives the JSON of completion_status.
func (r *rig) status(tok string) string {
	r.t.Helper()
	c, err := r.CompletionStatus(tok)
	if err != nil {
		return string(err.JSON())
	}
	return toJSON(r.t, c)
}

func (r *rig) dump(table string, want ...string) {
	r.t.Helper()
	if want == nil {
		want = []string{}
	}
	if d := cmp.Diff(want, r.Dump(table)); d != "" {
		r.t.Fatalf("table %s (-want +got):\n%s", table, d)
	}
}

func toJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func wantJSON(t *testing.T, what string, got any, want string) {
	t.Helper()
	if e, ok := got.(*APIError); ok {
		got = json.RawMessage(e.JSON())
	}
	if d := cmp.Diff(want, toJSON(t, got)); d != "" {
		t.Fatalf("%s (-want +got):\n%s", what, d)
	}
}

// inserts is an array of n rows for orders, from first on.
func inserts(first, n int) string {
	parts := make([]string, n)
	for i := range parts {
		parts[i] = fmt.Sprintf(`{"insert":{"id":%d,"qty":1}}`, first+i)
	}
	return "[" + strings.Join(parts, ",") + "]"
}

const (
	inProgressNull = `{"status":"inprogress","step":null}`
	firstUUID      = "019a0000-0000-7000-8000-000000000000"
)

func inProgress(step int) string { return fmt.Sprintf(`{"status":"inprogress","step":%d}`, step) }
func done(step int) string       { return fmt.Sprintf(`{"status":"complete","step":%d}`, step) }
