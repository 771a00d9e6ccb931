package felderasim_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"holdfast/test/felderasim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const ordersSQL = `
CREATE TABLE orders (
	id BIGINT NOT NULL PRIMARY KEY,
	amount DECIMAL(12, 2),
	ts TIMESTAMP,
	raw VARBINARY,
	doc VARIANT,
	note VARCHAR
) WITH ('materialized' = 'true');
CREATE TABLE events (name VARCHAR NOT NULL, n INT) WITH ('materialized' = 'true');
CREATE TABLE hidden (name VARCHAR);
`

const params = "?format=json&update_format=insert_delete&array=true"

// wait is the deadline of everything that a test waits for.
const wait = 20 * time.Second

type client struct {
	t    *testing.T
	base string
	key  string
	http *http.Client
}

func start(t *testing.T, opts felderasim.Options) (*felderasim.Sim, *client) {
	t.Helper()
	if opts.SQL == "" {
		opts.SQL = ordersSQL
	}
	sim, err := felderasim.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := sim.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{}
	t.Cleanup(func() {
		tr.CloseIdleConnections()
		if err := sim.Close(); err != nil {
			t.Error(err)
		}
	})
	name := opts.Pipeline
	if name == "" {
		name = "p"
	}
	return sim, &client{t: t, base: sim.URL() + "/v0/pipelines/" + name, http: &http.Client{Transport: tr, Timeout: wait}}
}

func (c *client) bare(sim *felderasim.Sim) *client {
	return &client{t: c.t, base: sim.BareURL(), http: c.http}
}

// try sends a request; err is that of the connection.
func (c *client) try(ctx context.Context, method, path string, body io.Reader) (int, string, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		c.t.Fatal(err)
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

func (c *client) do(method, path, body string, want int) string {
	c.t.Helper()
	status, got, err := c.try(c.t.Context(), method, path, strings.NewReader(body))
	if err != nil {
		c.t.Fatalf("%s %s: %v", method, path, err)
	}
	if status != want {
		c.t.Fatalf("%s %s: status %d, want %d: %s", method, path, status, want, got)
	}
	return got
}

func (c *client) get(path string, want int) string {
	c.t.Helper()
	return c.do(http.MethodGet, path, "", want)
}

func (c *client) post(path, body string, want int) string {
	c.t.Helper()
	return c.do(http.MethodPost, path, body, want)
}

// send posts an array to a table and gives the token.
func (c *client) send(table, body string) string {
	c.t.Helper()
	return token(c.t, c.post("/ingress/"+table+params, body, 200))
}

func token(t *testing.T, body string) string {
	t.Helper()
	var v struct{ Token string }
	if err := json.Unmarshal([]byte(body), &v); err != nil || v.Token == "" {
		t.Fatalf("no token in %q: %v", body, err)
	}
	return v.Token
}

func decodeToken(t *testing.T, tok string) string {
	t.Helper()
	b, err := base64.RawURLEncoding.DecodeString(tok)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func (c *client) status(tok string) string {
	c.t.Helper()
	return c.get("/completion_status?token="+url.QueryEscape(tok), 200)
}

// complete waits until the simulator has completed everything it received.
func complete(t *testing.T, sim *felderasim.Sim) {
	t.Helper()
	until(t, sim, func(v felderasim.View) bool { return v.Stats().Global.PipelineComplete })
}

func until(t *testing.T, sim *felderasim.Sim, cond func(felderasim.View) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), wait, errors.New("the simulator did not get there in time"))
	defer cancel()
	if err := sim.WaitFor(ctx, cond); err != nil {
		t.Fatal(err)
	}
}

func inject(t *testing.T, sim *felderasim.Sim, f felderasim.Fault) string {
	t.Helper()
	id, err := sim.Inject(f)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// equal compares an answer with what the contract says, byte by byte.
func equal(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Fatalf("%s:\n got %s\nwant %s", what, got, want)
	}
}

func errorCode(t *testing.T, body string) string {
	t.Helper()
	var v struct {
		Code string `json:"error_code"`
	}
	if err := json.NewDecoder(bytes.NewReader([]byte(body))).Decode(&v); err != nil {
		t.Fatalf("not an error body: %q", body)
	}
	return v.Code
}

// poll asks a condition that has no event until it holds.
func poll(t *testing.T, cond func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal("the condition did not come true in time")
		}
	}
}
