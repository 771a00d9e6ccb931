package felderasim_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

func TestS1Ingress(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	const body = `[{"insert":{"id":1,"amount":"12.50","ts":"2026-01-02 03:04:05.123456","raw":[222,173],"doc":{"a":1}}},
 {"update":{"id":1,"amount":null}},
 {"delete":{"id":2}}]`
	got := c.post("/ingress/orders"+params, body, 200)
	tok := token(t, got)
	equal(t, "answer", got, `{"token":"`+tok+`"}`)
	equal(t, "token", decodeToken(t, tok), `{"u":"`+sim.Incarnation()+`","e":0,"c":3}`)
	complete(t, sim)
	if d := cmp.Diff([]string{`{"id":1,"amount":null,"ts":"2026-01-02 03:04:05.123456","raw":[222,173],"doc":{"a":1},"note":null}`}, sim.Dump("orders")); d != "" {
		t.Fatal(d)
	}
	// The bare process has the same routes at its root.
	tok = c.bare(sim).send("orders", "[]")
	equal(t, "token", decodeToken(t, tok), `{"u":"`+sim.Incarnation()+`","e":0,"c":3}`)

	var gz bytes.Buffer
	w := gzip.NewWriter(&gz)
	_, _ = io.WriteString(w, "[]")
	_ = w.Close()
	equal(t, "gzip", errorCode(t, c.post("/ingress/orders"+params, gz.String(), 400)), "ParseErrors")
	equal(t, "csv by default", errorCode(t, c.post("/ingress/orders", "[]", 400)), "ParseErrors")
	c.post("/ingress/events?whatever=1", "name,7\n", 200)
	equal(t, "unknown table", errorCode(t, c.post("/ingress/nosuch?format=json", "", 404)), "ConfigError.UnknownInputStream")
	status, _, err := c.try(t.Context(), http.MethodPost, "/ingress/orders?format=json&update_format=redis", strings.NewReader("{}"))
	if err != nil || status != 503 {
		t.Fatal("a panic in the endpoint reaches the client as a lost connection, and through the manager as 503", status, err)
	}
}

func TestS2ConnectionLimit(t *testing.T) {
	_, c := start(t, felderasim.Options{})
	for i := range core.MaxEndpoints {
		c.post("/ingress/events?delimiter="+url.QueryEscape(string(rune(0x100+i))), "", 200)
	}
	equal(t, "429", c.post("/ingress/orders"+params, "[]", 429),
		`{"message":"The API connections limit has been exceded. Close some of the existing connections before opening new ones.","error_code":"ApiConnectionLimit","details":null}`)
}

func TestS3QueuedIsNotIngested(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	sim.HoldIngest("")
	tok := c.send("orders", `[{"insert":{"id":1}}]`)
	equal(t, "queued", c.status(tok), `{"status":"inprogress","step":null}`)
	if sim.Count("orders") != 0 {
		t.Fatal("queued rows are visible")
	}
	sim.ReleaseIngest("")
	complete(t, sim)
	equal(t, "complete", c.status(tok), `{"status":"complete","step":1}`)
}

func TestS3Manual(t *testing.T) {
	sim, c := start(t, felderasim.Options{Manual: true})
	tok := c.send("orders", `[{"insert":{"id":1}}]`)
	equal(t, "queued", c.status(tok), `{"status":"inprogress","step":null}`)
	if n := sim.Step(10); n != 1 {
		t.Fatal(n)
	}
	equal(t, "complete", c.status(tok), `{"status":"complete","step":1}`)
}

func TestS4ParseErrors(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	got := c.post("/ingress/events"+params, `[{"insert":{"name":"a"}},{"insert":{"name":"b","n":"x"}}]`, 400)
	equal(t, "array", got, `{"message":"Errors parsing input data (1 errors):\n    Parse error (event #2): failed to deserialize JSON record: error parsing field 'n': invalid type: string \"x\", expected i32 at line 1 column 19\nInvalid fragment: '{\"name\":\"b\",\"n\":\"x\"}'",`+
		`"error_code":"ParseErrors","details":{"num_errors":1,"errors":[{"description":"failed to deserialize JSON record: error parsing field 'n': invalid type: string \"x\", expected i32 at line 1 column 19",`+
		`"event_number":2,"field":"n","invalid_bytes":null,"invalid_text":"{\"name\":\"b\",\"n\":\"x\"}","suggestion":null,"tag":"text_event_err"}]}}`)
	got = c.post("/ingress/events?format=json", "{\"insert\":{\"name\":\"a\"}}\n{\"insert\":{\"n\":1}}\n{\"insert\":{\"name\":\"c\"}}\n", 400)
	if strings.Contains(got, "token") {
		t.Fatal("no token with 400")
	}
	complete(t, sim)
	if d := cmp.Diff([]string{`{"name":"a","n":null} weight=1`, `{"name":"c","n":null} weight=1`}, sim.Dump("events")); d != "" {
		t.Fatal(d)
	}
	// A token for the survivors can still be had.
	name := sim.Stats().Inputs[1].EndpointName
	connector := strings.TrimPrefix(name, "events.")
	tok := token(t, c.get("/tables/events/connectors/"+connector+"/completion_token", 200))
	equal(t, "token", decodeToken(t, tok), `{"u":"`+sim.Incarnation()+`","e":1,"c":2}`)
	equal(t, "bare", c.bare(sim).get("/input_endpoints/"+name+"/completion_token", 200), `{"token":"`+tok+`"}`)
	equal(t, "unknown", errorCode(t, c.get("/tables/events/connectors/api-ingress-0/completion_token", 404)), "UnknownInputEndpoint")
}

func TestS5Rows(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	c.send("orders", `[{"insert":{"id":1,"amount":1.239,"raw":[7]}},{"insert":{"id":1,"note":"later wins"}},{"update":{"id":9,"note":"ignored"}}]`)
	c.send("events", `[{"delete":{"name":"x","n":1}}]`)
	complete(t, sim)
	if d := cmp.Diff([]map[string]any{{"id": int64(1), "amount": nil, "ts": nil, "raw": nil, "doc": nil, "note": "later wins"}}, sim.Rows("orders")); d != "" {
		t.Fatal(d)
	}
	if d := cmp.Diff([]map[string]any{{"name": "x", "n": int64(1), "$weight": int64(-1)}}, sim.Rows("events")); d != "" {
		t.Fatal(d)
	}
	if sim.Rows("nosuch") != nil || sim.Dump("nosuch") != nil || sim.Count("nosuch") != -1 {
		t.Fatal("unknown table")
	}
}

func TestS6QuotedTableInURL(t *testing.T) {
	sim, c := start(t, felderasim.Options{SQL: `CREATE TABLE "TaBle1" (id BIGINT NOT NULL); CREATE TABLE table1 (id BIGINT);`})
	c.send("%22TaBle1%22", `[{"insert":{"id":1}}]`)
	c.send("TABLE1", `[{"insert":{"id":2}}]`)
	complete(t, sim)
	if sim.Count(`"TaBle1"`) != 1 || sim.Count("table1") != 1 {
		t.Fatal(sim.Dump(`"TaBle1"`), sim.Dump("table1"))
	}
}

func TestS7PausedBlocks(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	sim.Pause()
	type result struct {
		status int
		body   string
		err    error
	}
	got := make(chan result, 1)
	go func() {
		s, b, err := c.try(t.Context(), http.MethodPost, "/ingress/orders"+params, strings.NewReader(`[{"insert":{"id":1}}]`))
		got <- result{s, b, err}
	}()
	until(t, sim, func(v felderasim.View) bool { return v.Counters().Requests == 1 })
	// force goes through, and a paused pipeline steps and completes it.
	tok := token(t, c.post("/ingress/orders"+params+"&force=true", `[{"insert":{"id":2}}]`, 200))
	until(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 1 })
	equal(t, "forced", c.status(tok), `{"status":"complete","step":1}`)
	select {
	case r := <-got:
		t.Fatalf("a paused pipeline answered %+v", r)
	default:
	}
	sim.Resume()
	if r := <-got; r.status != 200 {
		t.Fatalf("%+v", r)
	}
	complete(t, sim)
	if sim.Count("orders") != 2 {
		t.Fatal(sim.Dump("orders"))
	}
}

func TestS7ManagerTimesOutWhileThePipelineGoesOn(t *testing.T) {
	for _, drop := range []bool{false, true} {
		sim, c := start(t, felderasim.Options{IngressTimeout: 300 * time.Millisecond, DropAbandoned: drop})
		sim.Pause()
		body := c.post("/ingress/orders"+params, `[{"insert":{"id":1}}]`, 503)
		equal(t, "code", errorCode(t, body), "PipelineInteractionUnreachable")
		if !strings.Contains(body, "timeout (0s) was reached") {
			t.Fatal(body)
		}
		sim.Resume()
		if drop {
			c.send("orders", `[{"insert":{"id":2}}]`)
			complete(t, sim)
			if d := cmp.Diff(1, len(sim.Dump("orders"))); d != "" {
				t.Fatal(sim.Dump("orders"))
			}
			continue
		}
		// The abandoned request is applied after all.
		until(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 1 })
	}
}

func TestS7ClientGivesUp(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	sim.Pause()
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan error, 1)
	go func() {
		_, _, err := c.bare(sim).try(ctx, http.MethodPost, "/ingress/orders"+params, strings.NewReader(`[{"insert":{"id":1}}]`))
		got <- err
	}()
	until(t, sim, func(v felderasim.View) bool { return v.Counters().Requests == 1 })
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	until(t, sim, func(v felderasim.View) bool { r := v.Requests(); return r[0].Done })
	if r := sim.Requests()[0]; r.Status != 0 {
		t.Fatalf("%+v", r)
	}
	// Whether its body had arrived is not known: it may be applied now.
	sim.Resume()
	complete(t, sim)
}

func TestS7Backpressure(t *testing.T) {
	sim, c := start(t, felderasim.Options{IngressTimeout: 300 * time.Millisecond})
	sim.HoldIngest("")
	var b strings.Builder
	for range core.MaxQueuedRecords {
		b.WriteString(`{"insert":{"name":"x"}}` + "\n")
	}
	c.bare(sim).post("/ingress/events?format=json&force=true", b.String(), 200)
	// Full: the next request is not read, and the manager gives up on it.
	c.post("/ingress/events?format=json", `{"insert":{"name":"y"}}`, 503)
	c.bare(sim).post("/ingress/events?format=json&force=true", `{"insert":{"name":"z"}}`, 200)
	sim.ReleaseIngest("")
	until(t, sim, func(v felderasim.View) bool { return v.Count("events") == core.MaxQueuedRecords+2 })
}

func TestS8CompletionStatus(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	sim.HoldCompletion()
	tok := c.send("orders", `[{"insert":{"id":1}}]`)
	until(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 1 })
	equal(t, "held", c.status(tok), `{"status":"inprogress","step":1}`)
	sim.ReleaseCompletion()
	equal(t, "released", c.status(tok), `{"status":"complete","step":1}`)
	was := sim.Incarnation()
	sim.Crash(core.KeepByModel)
	now := sim.Incarnation()
	text := `Completion token was created by a previous incarnation of the pipeline (incarnation uuid: ` + was + `) and is not valid for the current incarnation (` + now + `). ` +
		`This indicates that the pipeline was suspended and resumed from a checkpoint or restarted after a failure.`
	equal(t, "410", c.get("/completion_status?token="+tok, 410), `{"message":"`+text+`","error_code":"PipelineRestarted","details":{"error":"`+text+`"}}`)
	tok = core.EncodeToken(now, 9, 1)
	equal(t, "410", c.get("/completion_status?token="+tok, 410),
		`{"message":"completion token specifies input endpoint id 9, which doesn't exist; this indicates that the endpoint was deleted after the token was generated","error_code":"UnknownEndpointInCompletionToken","details":{"endpoint_id":9}}`)
	got := c.get("/completion_status?token=%21", 400)
	if !strings.HasPrefix(got, `{"message":"Invalid parameter: invalid completion token: `) || errorCode(t, got) != "InvalidParam" {
		t.Fatal(got)
	}
	equal(t, "no token", errorCode(t, c.get("/completion_status", 400)), "MissingUrlEncodedParam")
}

func TestS9TransactionOverHTTP(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	equal(t, "commit", c.post("/commit_transaction", "", 400), `{"message":"This operation requires an active transaction, but none is currently in progress","error_code":"NoTransactionInProgress","details":{}}`)
	equal(t, "start", c.post("/start_transaction", "", 200), `{"transaction_id":1}`)
	equal(t, "start", c.post("/start_transaction", "", 409), `{"message":"Cannot perform this operation while there is a transaction in progress","error_code":"TransactionInProgress","details":{}}`)
	a, b := c.send("orders", `[{"insert":{"id":1}}]`), c.send("events", `[{"insert":{"name":"x"}}]`)
	until(t, sim, func(v felderasim.View) bool {
		n := v.Stats().Global.TransactionRecords
		return n != nil && *n == 2
	})
	if got := c.status(a); !strings.HasPrefix(got, `{"status":"inprogress","step":`) || strings.Contains(got, "null") {
		t.Fatal(got)
	}
	if sim.Count("orders") != 0 {
		t.Fatal("an open transaction is not visible")
	}
	equal(t, "commit", c.post("/commit_transaction", "", 200), `"Transaction commit initiated"`)
	complete(t, sim)
	for _, tok := range []string{a, b} {
		if got := c.status(tok); !strings.HasPrefix(got, `{"status":"complete"`) {
			t.Fatal(got)
		}
	}
}

func TestS9StrangersTransaction(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	if _, err := sim.StartTransaction(); err != nil {
		t.Fatal(err)
	}
	tok := c.send("orders", `[{"insert":{"id":1}}]`)
	until(t, sim, func(v felderasim.View) bool {
		return v.Stats().Global.TransactionStatus == "TransactionInProgress"
	})
	equal(t, "frozen", c.status(tok), `{"status":"inprogress","step":1}`)
	c.post("/start_transaction", "", 409)
	if err := sim.CommitTransaction(); err != nil {
		t.Fatal(err)
	}
	complete(t, sim)
	if sim.CommitTransaction() == nil {
		t.Fatal("there was nothing to commit")
	}
}

func TestS10Crash(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	c.send("orders", `[{"insert":{"id":1}}]`)
	complete(t, sim)
	was := sim.Stats().Global
	sim.Crash(core.KeepByModel)
	now := sim.Stats().Global
	if sim.Count("orders") != 0 || now.IncarnationUUID == was.IncarnationUUID || now.InitialStartTime == was.InitialStartTime {
		t.Fatalf("%+v", now)
	}
	tok := c.send("orders", `[{"insert":{"id":2}}]`)
	if !strings.Contains(decodeToken(t, tok), now.IncarnationUUID) {
		t.Fatal("the token is not of the new incarnation")
	}
}

func TestS10RequestsInFlightAreCut(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	sim.Pause()
	results := make(chan int, 2)
	for _, cl := range []*client{c, c.bare(sim)} {
		go func() {
			s, _, _ := cl.try(t.Context(), http.MethodPost, "/ingress/orders"+params, strings.NewReader(`[{"insert":{"id":1}}]`))
			results <- s
		}()
	}
	until(t, sim, func(v felderasim.View) bool { return v.Counters().Requests == 2 })
	sim.Crash(core.KeepNothing)
	if a, b := <-results, <-results; a+b != 503 {
		t.Fatal("the bare connection is cut, the manager says 503", a, b)
	}
	c.send("orders", `[]`)
	complete(t, sim)
	if sim.Count("orders") != 0 {
		t.Fatal("a request of the old process reached the new one")
	}
}

func TestS10ExactlyOnceCommitsTheOpenTransaction(t *testing.T) {
	sim, c := start(t, felderasim.Options{Edition: felderasim.Enterprise, Model: core.ModelExactlyOnce})
	c.post("/start_transaction", "", 200)
	c.send("orders", `[{"insert":{"id":1}}]`)
	until(t, sim, func(v felderasim.View) bool { return v.Stats().Global.BufferedInputRecords == 0 })
	sim.HoldIngest("")
	c.send("orders", `[{"insert":{"id":2}}]`)
	sim.Kill()
	c.post("/start", "", 202)
	if d := cmp.Diff([]string{`{"id":1,"amount":null,"ts":null,"raw":null,"doc":null,"note":null}`}, sim.Dump("orders")); d != "" {
		t.Fatal(d)
	}
}

func TestS11Checkpoint(t *testing.T) {
	sim, c := start(t, felderasim.Options{Edition: felderasim.Enterprise, Model: core.ModelAtLeastOnce})
	c.send("orders", `[{"insert":{"id":1}}]`)
	complete(t, sim)
	equal(t, "post", c.post("/checkpoint", "", 200), `{"checkpoint_sequence_number":0,"incarnation_uuid":"`+sim.Incarnation()+`"}`)
	until(t, sim, func(v felderasim.View) bool { return v.CheckpointStatus().Success != nil })
	equal(t, "status", c.get("/checkpoint_status?incarnation_uuid="+sim.Incarnation(), 200), `{"success":0,"failure":null}`)
	var list []map[string]any
	if err := json.Unmarshal([]byte(c.get("/checkpoints", 200)), &list); err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	for _, k := range []string{"uuid", "identifier", "fingerprint", "size", "steps", "processed_records"} {
		if _, ok := list[0][k]; !ok {
			t.Errorf("no %s in %v", k, list[0])
		}
	}
	c.send("orders", `[{"insert":{"id":2}}]`)
	complete(t, sim)
	sim.Crash(core.KeepByModel)
	if sim.Count("orders") != 1 {
		t.Fatal(sim.Dump("orders"))
	}
	equal(t, "mismatch", errorCode(t, c.get("/checkpoint_status?incarnation_uuid=A", 400)), "IncarnationUuidMismatch")
}

func TestS11CoalescedOverHTTP(t *testing.T) {
	sim, c := start(t, felderasim.Options{Edition: felderasim.Enterprise, Model: core.ModelAtLeastOnce, Manual: true})
	sim.PeriodicCheckpoint() // running, and empty
	tok := c.send("orders", `[{"insert":{"id":1}}]`)
	sim.Step(1)
	equal(t, "token", c.status(tok), `{"status":"complete","step":1}`)
	c.post("/checkpoint", "", 200)
	for sim.AdvanceCheckpoint() {
		continue
	}
	equal(t, "status", c.get("/checkpoint_status", 200), `{"success":0,"failure":null}`)
	sim.Crash(core.KeepByModel)
	if sim.Count("orders") != 0 {
		t.Fatal("one checkpoint request is not proof: the one that was running had nothing in it")
	}
}

func TestS11OpenSource(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	equal(t, "501", c.post("/checkpoint", "", 501), `{"message":"Cannot use enterprise-only feature (checkpoint) in Feldera community edition.","error_code":"EnterpriseFeature","details":{"feature":"checkpoint"}}`)
	bare := c.bare(sim)
	equal(t, "bare", bare.post("/checkpoint", "", 200), `{"checkpoint_sequence_number":0,"incarnation_uuid":"`+sim.Incarnation()+`"}`)
	until(t, sim, func(v felderasim.View) bool { return v.CheckpointStatus().Failure != nil })
	if got := bare.get("/checkpoint_status", 200); !strings.HasPrefix(got, `{"success":null,"failure":{"sequence_number":0,"error":`) {
		t.Fatal(got)
	}
	equal(t, "checkpoints", c.get("/checkpoints", 200), `[]`)
}

func TestS12Manager(t *testing.T) {
	sim, c := start(t, felderasim.Options{APIKey: "apikey:secret", ReadOnlyKey: "apikey:reader"})
	root := &client{t: t, base: sim.URL(), http: c.http}
	root.get("/healthz", 200)
	for _, key := range []string{"", "apikey:wrong", "secret"} {
		c.key = key
		body := c.post("/ingress/orders"+params, "[]", 401)
		equal(t, "401", errorCode(t, body), "AuthenticationFailed")
		if strings.Contains(body, "details") {
			t.Fatal(body)
		}
	}
	c.key = "apikey:reader"
	c.get("/stats", 200)
	equal(t, "403", errorCode(t, c.post("/ingress/orders"+params, "[]", 403)), "InsufficientPermissions")
	c.key, root.key = "apikey:secret", "apikey:secret"
	c.send("orders", "[]")
	if !strings.Contains(root.get("/v0/config", 200), `"edition":"Open source"`) {
		t.Fatal("edition")
	}
	equal(t, "404", errorCode(t, root.get("/v0/pipelines/nosuch/stats", 404)), "UnknownPipelineName")
	var p struct {
		Name             string `json:"name"`
		ProgramStatus    string `json:"program_status"`
		DeploymentStatus string `json:"deployment_status"`
		ProgramInfo      struct {
			Schema core.SchemaJSON `json:"schema"`
		} `json:"program_info"`
	}
	if err := json.Unmarshal([]byte(c.get("", 200)), &p); err != nil {
		t.Fatal(err)
	}
	if p.Name != "p" || p.ProgramStatus != "Success" || p.DeploymentStatus != "Running" || len(p.ProgramInfo.Schema.Inputs) != 3 {
		t.Fatalf("%+v", p)
	}
	if strings.Contains(root.get("/v0/pipelines?selector=status", 200), "program_info") {
		t.Fatal("selector=status has no program_info")
	}
	equal(t, "501", errorCode(t, c.post("/stop", "", 501)), "EnterpriseFeature")
	equal(t, "stop", c.post("/stop?force=true", "", 202), `"Pipeline is forcefully stopping"`)
	body := c.post("/ingress/orders"+params, "[]", 503)
	equal(t, "503", errorCode(t, body), "PipelineInteractionNotDeployed")
	if !strings.HasPrefix(body, `{"message":"Unable to interact with pipeline because the deployment status (Stopped) indicates it is not (yet) fully provisioned`) {
		t.Fatal(body)
	}
	if _, _, err := c.bare(sim).try(t.Context(), http.MethodGet, "/stats", nil); err == nil {
		t.Fatal("there is no process to talk to")
	}
	equal(t, "start", c.post("/start?initial=running", "", 202), `"Pipeline is starting"`)
	c.send("orders", "[]")
	c.post("/pause", "", 202)
	if sim.Stats().Global.State != "Paused" {
		t.Fatal("not paused")
	}
	c.post("/resume", "", 202)
	sim.SetAPIKey("apikey:rotated")
	c.get("/stats", 401)
}

func TestS12RetryByTheManager(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	id := inject(t, sim, felderasim.Fault{Kind: felderasim.AppliedTwice, Endpoint: "start_transaction"})
	equal(t, "start", errorCode(t, c.post("/start_transaction", "", 409)), "TransactionInProgress")
	if sim.FaultHits(id) != 1 || *sim.Stats().Global.TransactionInitiators.InitiatedByAPI != "Started" {
		t.Fatal("the first try did work")
	}
	inject(t, sim, felderasim.Fault{Kind: felderasim.AppliedTwice, Endpoint: "commit_transaction"})
	equal(t, "commit", errorCode(t, c.post("/commit_transaction", "", 400)), "NoTransactionInProgress")
	inject(t, sim, felderasim.Fault{Kind: felderasim.AppliedTwice})
	c.send("orders", `[{"insert":{"id":1}}]`) // ingress is streaming: never retried
	if n := sim.Counters().Records; n != 1 {
		t.Fatal(n)
	}
}

func TestS13Query(t *testing.T) {
	sim, c := start(t, felderasim.Options{SQL: ordersSQL + `CREATE MATERIALIZED VIEW big AS SELECT id, amount FROM orders WHERE amount > 9; CREATE VIEW plain AS SELECT 1;`})
	q := func(sql, format string, want int) string {
		t.Helper()
		return c.get("/query?format="+format+"&sql="+url.QueryEscape(sql), want)
	}
	equal(t, "empty", q("SELECT * FROM orders", "json", 200), "")
	c.send("orders", `[{"insert":{"id":1,"amount":"9.50","ts":"2026-01-02 03:04:05.120","raw":[222,173],"doc":{"a":1},"note":"é"}},{"insert":{"id":2,"amount":"10"}}]`)
	c.send("events", `[{"insert":{"name":"x","n":1}},{"insert":{"name":"x","n":1}},{"delete":{"name":"gone"}}]`)
	complete(t, sim)
	equal(t, "json", q("SELECT * FROM orders ORDER BY id", "json", 200),
		`{"id":1,"amount":9.50,"ts":"2026-01-02T03:04:05.120","raw":"dead","doc":"{\"a\":1}","note":"é"}`+"\n"+`{"id":2,"amount":10.00,"ts":null,"raw":null,"doc":null,"note":null}`+"\n")
	equal(t, "decimals compare as numbers", q("select id from ORDERS o where o.amount > 9.6", "json", 200), `{"id":2}`+"\n")
	equal(t, "timestamp literal", q("select id from orders where ts >= TIMESTAMP '2026-01-02 03:04:05'", "json", 200), `{"id":1}`+"\n")
	equal(t, "weights", q("SELECT count(*) AS n FROM events", "json", 200), `{"n":2}`+"\n")
	equal(t, "view", q("SELECT id FROM big ORDER BY id", "json", 200), `{"id":1}`+"\n"+`{"id":2}`+"\n")
	equal(t, "text", q("SELECT id, note FROM orders ORDER BY id", "text", 200), "+----+------+\n| id | note |\n+----+------+\n| 1  | é    |\n| 2  |      |\n+----+------+")
	// It follows the table, and sees nothing of an open transaction.
	c.send("orders", `[{"delete":{"id":1}},{"update":{"id":2,"note":"changed"}}]`)
	complete(t, sim)
	c.post("/start_transaction", "", 200)
	c.send("orders", `[{"insert":{"id":3}}]`)
	until(t, sim, func(v felderasim.View) bool { return v.Stats().Global.BufferedInputRecords == 0 })
	equal(t, "snapshot", q("SELECT id, note FROM orders", "json", 200), `{"id":2,"note":"changed"}`+"\n")
	c.post("/commit_transaction", "", 200)
	complete(t, sim)
	equal(t, "after commit", q("SELECT count(*) AS n FROM orders", "json", 200), `{"n":2}`+"\n")
	// Errors before the first row are 400.
	for _, sql := range []string{"SELECT * FROM hidden", "SELECT * FROM plain", "SELECT nosuch FROM orders", "SELECT * FROM nosuch", "DELETE FROM orders", "SELECT 'open", ""} {
		equal(t, sql, errorCode(t, q(sql, "json", 400)), "AdHocQueryError")
	}
	// An error in the middle is in the 200 body.
	inject(t, sim, felderasim.Fault{Kind: felderasim.QueryError, Endpoint: "query", Rows: 1})
	equal(t, "error inside", q("SELECT id FROM orders ORDER BY id", "json", 200), `{"id":2}`+"\n"+`{"error":"Execution error: injected fault"}`)
	inject(t, sim, felderasim.Fault{Kind: felderasim.QueryError, Endpoint: "query"})
	equal(t, "error inside", q("SELECT id FROM orders", "text", 200), "ERROR: Execution error: injected fault")
	// A new process has new tables.
	sim.Crash(core.KeepNothing)
	equal(t, "after a crash", q("SELECT count(*) AS n FROM orders", "json", 200), `{"n":0}`+"\n")
	sim.SetState(core.StateRestoring)
	equal(t, "restoring", errorCode(t, q("SELECT 1", "json", 503)), "RestoreInProgress")
}

func TestS13StatsOverHTTP(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	complete(t, sim)
	var s core.Stats
	if err := json.Unmarshal([]byte(c.get("/stats", 200)), &s); err != nil {
		t.Fatal(err)
	}
	if s.Global.IncarnationUUID != sim.Incarnation() || s.Global.State != "Running" || s.Global.StartTime == 0 {
		t.Fatalf("%+v", s.Global)
	}
}
