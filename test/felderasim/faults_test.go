package felderasim_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

const oneRow = `[{"insert":{"id":1}}]`

// lost sends a row to the bare front and wants the connection to break.
func lost(t *testing.T, c *client, body string) {
	t.Helper()
	if s, b, err := c.try(t.Context(), http.MethodPost, "/ingress/orders"+params, strings.NewReader(body)); err == nil {
		t.Fatalf("got %d %s, want a broken connection", s, b)
	}
}

func TestFaultsThatDoNotApply(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	for kind, status := range map[felderasim.FaultKind]int{
		felderasim.TooMany: 429, felderasim.Unauthorized: 401, felderasim.Forbidden: 403, felderasim.UnavailableBefore: 503,
	} {
		inject(t, sim, felderasim.Fault{Kind: kind})
		c.post("/ingress/orders"+params, oneRow, status)
	}
	inject(t, sim, felderasim.Fault{Kind: felderasim.Answer, Status: 418, Code: "Teapot", Message: "no"})
	equal(t, "answer", c.post("/ingress/orders"+params, oneRow, 418), `{"message":"no","error_code":"Teapot","details":null}`)
	inject(t, sim, felderasim.Fault{Kind: felderasim.DropRequest})
	lost(t, c.bare(sim), oneRow)
	if n := sim.Counters(); n.Records != 0 || n.FaultsInjected != 6 || n.Rejected != 6 {
		t.Fatalf("%+v", n)
	}
	c.send("orders", oneRow) // all were limited to one request
}

func TestFaultsAfterApplying(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	inject(t, sim, felderasim.Fault{Kind: felderasim.DropResponse})
	lost(t, c.bare(sim), oneRow)
	inject(t, sim, felderasim.Fault{Kind: felderasim.UnavailableAfter})
	c.post("/ingress/orders"+params, `[{"insert":{"id":2}}]`, 503)
	inject(t, sim, felderasim.Fault{Kind: felderasim.AnswerAfter, Status: 500, Code: "X"})
	c.post("/ingress/orders"+params, `[{"insert":{"id":3}}]`, 500)
	complete(t, sim)
	if sim.Count("orders") != 3 {
		t.Fatal(sim.Dump("orders"))
	}
	// The journal knows the tokens that the client never saw.
	for i, r := range sim.Requests() {
		if d := cmp.Diff([]string{"", "PipelineInteractionUnreachable", "X"}[i], r.Answer); d != "" {
			t.Fatal(d)
		}
		if r.Token == "" || !r.Done || r.Records != 1 || len(r.Faults) != 1 {
			t.Fatalf("%+v", r)
		}
	}
}

func TestFaultLimits(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	id := inject(t, sim, felderasim.Fault{Kind: felderasim.UnavailableBefore, Table: "ORDERS", Skip: 1, Count: 2})
	var got []int
	for range 4 {
		s, _, err := c.try(t.Context(), http.MethodPost, "/ingress/orders"+params, strings.NewReader("[]"))
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, s)
		c.send("events", "[]")
	}
	if d := cmp.Diff([]int{200, 503, 503, 200}, got); d != "" || sim.FaultHits(id) != 2 {
		t.Fatal(d)
	}
	inject(t, sim, felderasim.Fault{Kind: felderasim.UnavailableBefore, Endpoint: "*", Count: -1})
	for range 3 {
		c.post("/ingress/orders"+params, "[]", 503)
	}
	c.get("/stats", 503)
	c.get("", 503)
	if n := sim.ClearFault(""); n != 2 {
		t.Fatal(n)
	}
	c.get("", 200)
	if _, err := sim.Inject(felderasim.Fault{Kind: "nonsense"}); err == nil {
		t.Fatal("unknown kind")
	}
}

func TestFaultsOutliveTheManager(t *testing.T) {
	sim, c := start(t, felderasim.Options{IngressTimeout: 300 * time.Millisecond, CallTimeout: 50 * time.Millisecond})
	id := inject(t, sim, felderasim.Fault{Kind: felderasim.Hang})
	c.post("/ingress/orders"+params, oneRow, 503)
	if sim.Counters().Records != 0 {
		t.Fatal("a hanging request was applied")
	}
	sim.ClearFault(id)
	until(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 1 })
	inject(t, sim, felderasim.Fault{Kind: felderasim.Delay, Endpoint: "start_transaction", Delay: 200 * time.Millisecond})
	c.post("/start_transaction", "", 503)
	until(t, sim, func(v felderasim.View) bool { return v.Stats().Global.TransactionID == 1 })
}

func TestFaultHang(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	id := inject(t, sim, felderasim.Fault{Kind: felderasim.Hang})
	got := make(chan int, 1)
	go func() {
		s, _, _ := c.try(t.Context(), http.MethodPost, "/ingress/orders"+params, strings.NewReader(oneRow))
		got <- s
	}()
	until(t, sim, func(v felderasim.View) bool { return v.Counters().FaultsInjected == 1 })
	sim.ClearFault(id)
	if s := <-got; s != 200 {
		t.Fatal(s)
	}
}

// The order that makes a client lose: the first try is applied after the
// second.
func TestFaultApplyLate(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	inject(t, sim, felderasim.Fault{Kind: felderasim.ApplyLate})
	c.post("/ingress/orders"+params, `[{"insert":{"id":1,"note":"late"}}]`, 503)
	complete(t, sim)
	if sim.Count("orders") != 0 {
		t.Fatal("too early")
	}
	c.send("events", "[]") // another table does not set it off
	c.send("orders", `[{"insert":{"id":1,"note":"retry"}}]`)
	until(t, sim, func(v felderasim.View) bool { return v.Stats().Global.TotalCompletedRecords == 2 })
	if got := sim.Dump("orders"); len(got) != 1 || !strings.Contains(got[0], "late") {
		t.Fatal(got)
	}
	inject(t, sim, felderasim.Fault{Kind: felderasim.ApplyLate, Delay: 10 * time.Millisecond})
	lost(t, c.bare(sim), `[{"insert":{"id":2}}]`)
	until(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 2 })
	inject(t, sim, felderasim.Fault{Kind: felderasim.ApplyLate})
	lost(t, c.bare(sim), `[{"insert":{"id":3}}]`)
	if n := sim.ApplyLateNow(); n != 1 {
		t.Fatal(n)
	}
	until(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 3 })
	// It dies with the process it was sent to.
	inject(t, sim, felderasim.Fault{Kind: felderasim.ApplyLate})
	lost(t, c.bare(sim), `[{"insert":{"id":4}}]`)
	sim.Crash(core.KeepNothing)
	sim.ApplyLateNow()
	complete(t, sim)
	if sim.Count("orders") != 0 {
		t.Fatal(sim.Dump("orders"))
	}
}

func TestFaultCutBody(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	inject(t, sim, felderasim.Fault{Kind: felderasim.CutBody, Bytes: 30})
	lost(t, c.bare(sim), `[{"insert":{"id":1}},{"insert":{"id":2}}]`)
	// What was cut off is in the way of the next request, once.
	equal(t, "poisoned", errorCode(t, c.post("/ingress/orders"+params, oneRow, 400)), "ParseErrors")
	c.send("orders", oneRow)
	inject(t, sim, felderasim.Fault{Kind: felderasim.CutBody, Bytes: 40})
	if _, _, err := c.bare(sim).try(t.Context(), http.MethodPost, "/ingress/events?format=json", strings.NewReader("{\"insert\":{\"name\":\"a\"}}\n{\"insert\":{\"name\":\"b\"}}")); err == nil {
		t.Fatal("the connection was not cut")
	}
	complete(t, sim)
	if sim.Count("orders") != 1 || sim.Count("events") != 1 {
		t.Fatal("complete chunks stay, incomplete ones do not count", sim.Dump("orders"), sim.Dump("events"))
	}
	if in := sim.Stats().Inputs; in[0].FatalError == nil || in[0].Metrics.NumTransportErrors != 1 {
		t.Fatalf("%+v", in[0])
	}
}

func TestFaultCrash(t *testing.T) {
	sim, c := start(t, felderasim.Options{Edition: felderasim.Enterprise, Model: core.ModelExactlyOnce})
	c.send("orders", oneRow)
	complete(t, sim)
	inject(t, sim, felderasim.Fault{Kind: felderasim.CrashBefore})
	c.post("/ingress/orders"+params, `[{"insert":{"id":2}}]`, 503)
	if sim.Count("orders") != 1 {
		t.Fatal("the journal keeps what was ingested")
	}
	sim.HoldIngest("")
	inject(t, sim, felderasim.Fault{Kind: felderasim.CrashAfter, Keep: core.KeepNothing})
	lost(t, c.bare(sim), `[{"insert":{"id":3}}]`)
	if sim.Count("orders") != 0 || sim.Counters().Crashes != 2 {
		t.Fatal(sim.Counters())
	}
}

func TestClientDiesMidBody(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	pr, pw := io.Pipe()
	got := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, _, err := c.try(ctx, http.MethodPost, "/ingress/events?format=json", pr)
		got <- err
	}()
	if _, err := io.WriteString(pw, "{\"insert\":{\"name\":\"a\"}}\n{\"insert\":{\"na"); err != nil {
		t.Fatal(err)
	}
	until(t, sim, func(v felderasim.View) bool { return v.Count("events") == 1 })
	cancel()
	_ = pw.CloseWithError(context.Canceled)
	if err := <-got; err == nil {
		t.Fatal("want an error")
	}
	until(t, sim, func(v felderasim.View) bool {
		in := v.Stats().Inputs
		return len(in) == 1 && in[0].Metrics.NumTransportErrors == 1
	})
	if sim.Count("events") != 1 {
		t.Fatal(sim.Dump("events"))
	}
}

func TestBodyLimit(t *testing.T) {
	_, c := start(t, felderasim.Options{MaxBody: 1000})
	equal(t, "413", errorCode(t, c.post("/ingress/orders"+params, "["+strings.Repeat(" ", 2000)+"]", 413)), "SimulatorLimit")
}

func TestNullCountsOnly(t *testing.T) {
	sim, c := start(t, felderasim.Options{Null: true})
	tok := c.send("orders", `[{"insert":{"id":1}},{"insert":{"nonsense":[1,2]}}]`)
	equal(t, "token", decodeToken(t, tok), `{"u":"`+sim.Incarnation()+`","e":0,"c":2}`)
	complete(t, sim)
	equal(t, "status", c.status(tok), `{"status":"complete","step":1}`)
	if sim.Count("orders") != 0 || sim.Counters().Records != 2 {
		t.Fatal(sim.Counters())
	}
}

func TestConcurrentSendersAreSeen(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	sim.Pause()
	done := make(chan int, 2)
	for range 2 {
		go func() {
			s, _, _ := c.try(t.Context(), http.MethodPost, "/ingress/orders"+params, strings.NewReader("[]"))
			done <- s
		}()
	}
	until(t, sim, func(v felderasim.View) bool { return v.Counters().Requests == 2 })
	poll(t, func() bool { return sim.Counters().Concurrent == 2 })
	sim.Resume()
	if a, b := <-done, <-done; a != 200 || b != 200 {
		t.Fatal(a, b)
	}
}

func TestRequestsAreBounded(t *testing.T) {
	sim, c := start(t, felderasim.Options{JournalSize: 3})
	for range 5 {
		c.send("orders", "[]")
	}
	r := sim.Requests()
	if len(r) != 3 || r[0].Seq != 3 || r[2].Seq != 5 || !r[2].Done || r[2].Status != 200 {
		t.Fatalf("%+v", r)
	}
}

func TestPeriodicCheckpoints(t *testing.T) {
	sim, c := start(t, felderasim.Options{Edition: felderasim.Enterprise, Model: core.ModelAtLeastOnce, CheckpointInterval: 5 * time.Millisecond, StepInterval: time.Millisecond})
	c.send("orders", oneRow)
	until(t, sim, func(v felderasim.View) bool {
		cs := v.Checkpoints()
		return len(cs) > 0 && cs[len(cs)-1].ProcessedRecords == 1
	})
}

func TestControlAPI(t *testing.T) {
	sim, c := start(t, felderasim.Options{Edition: felderasim.Enterprise})
	ctl := &client{t: t, base: sim.BareURL() + "/sim", http: c.http}
	equal(t, "fault", ctl.post("/fault", `{"kind":"unavailable_before","table":"orders","count":1}`, 200), `{"id":"1"}`)
	c.post("/ingress/orders"+params, oneRow, 503)
	equal(t, "clear", ctl.post("/clear", `{"id":"1"}`, 200), `{"cleared":1}`)
	ctl.post("/hold", `{"what":"ingest","table":"orders"}`, 200)
	ctl.post("/hold", `{"what":"completion"}`, 200)
	ctl.post("/hold", `{"what":"commit"}`, 200)
	ctl.post("/hold", `{"what":"checkpoint"}`, 200)
	tok := c.send("orders", oneRow)
	equal(t, "held", c.status(tok), `{"status":"inprogress","step":null}`)
	ctl.post("/release", `{"what":"ingest","table":"orders"}`, 200)
	until(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 1 })
	equal(t, "held", c.status(tok), `{"status":"inprogress","step":1}`)
	ctl.post("/release", `{"what":"completion"}`, 200)
	equal(t, "released", c.status(tok), `{"status":"complete","step":1}`)
	equal(t, "dump", ctl.get("/dump?table=orders", 200), `["{\"id\":1,\"amount\":null,\"ts\":null,\"raw\":null,\"doc\":null,\"note\":null}"]`)
	equal(t, "start", ctl.post("/transaction", `{"do":"start"}`, 200), `{"transaction_id":1}`)
	ctl.post("/transaction", `{"do":"start"}`, 400)
	ctl.post("/transaction", `{"do":"commit"}`, 200)
	was := sim.Incarnation()
	ctl.post("/crash", `{"keep":"nothing"}`, 200)
	if sim.Incarnation() == was {
		t.Fatal("no crash")
	}
	ctl.post("/kill", "", 200)
	c.get("/stats", 503)
	ctl.post("/restart", "", 200)
	c.get("/stats", 200)
	ctl.post("/pause", "", 200)
	ctl.post("/resume", "", 200)
	ctl.post("/state", `{"state":"Initializing"}`, 200)
	equal(t, "initializing", c.get("/stats", 503), `{"message":"Operation failed because the pipeline has not finished initializing.","error_code":"Initializing","details":null}`)
	ctl.post("/state", `{"state":"Running"}`, 200)
	ctl.post("/release", `{"what":"checkpoint"}`, 200)
	ctl.post("/step", `{"n":2}`, 200)
	ctl.post("/checkpoint", "", 200)
	ctl.post("/late", "", 200)
	ctl.post("/apikey", `{"api_key":"apikey:x"}`, 200)
	c.get("/stats", 401)
	var counters felderasim.Counters
	if err := json.Unmarshal([]byte(ctl.get("/counters", 200)), &counters); err != nil || counters.Requests != 2 {
		t.Fatal(counters, err)
	}
	ctl.get("/requests", 200)
	for _, bad := range []string{"/hold", "/transaction", "/fault"} {
		ctl.post(bad, `{"what":"?","do":"?","kind":"?"}`, 400)
	}
	ctl.post("/nosuch", "", 404)
	ctl.post("/crash", "{", 400)
}

func TestStartRefusals(t *testing.T) {
	for _, o := range []felderasim.Options{
		{SQL: "nonsense"},
		{SQL: ordersSQL, Model: core.ModelExactlyOnce},
		{SQL: ordersSQL, Edition: "free"},
		{SQL: "CREATE VIEW v AS SELECT 1;"},
	} {
		if _, err := felderasim.New(o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
	sim, _ := start(t, felderasim.Options{})
	if err := sim.Start(t.Context()); err == nil {
		t.Fatal("started twice")
	}
	other, err := felderasim.New(felderasim.Options{SQL: ordersSQL, Listen: strings.TrimPrefix(sim.URL(), "http://")})
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(t.Context()); err == nil {
		t.Fatal("the port is taken")
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
}

// Bodies larger than what fits between client and process.
func TestLargeBody(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	var b bytes.Buffer
	for i := range 40_000 {
		fmt.Fprintf(&b, "%s{\"insert\":{\"id\":%d,\"note\":\"0123456789012345678901234567890123456789\"}}", map[bool]string{true: "[", false: ","}[i == 0], i)
	}
	b.WriteString("]")
	c.send("orders", b.String())
	complete(t, sim)
	if sim.Count("orders") != 40_000 {
		t.Fatal(sim.Count("orders"))
	}
}

// The answer of a request that is applied is held, until the fault ends or the
// process does.
func TestFaultHoldsTheAnswer(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	for _, crashes := range []bool{false, true} {
		id, err := sim.Inject(felderasim.Fault{Kind: felderasim.HoldAnswer})
		if err != nil {
			t.Fatal(err)
		}
		status := make(chan int)
		go func() {
			s, _, _ := c.try(context.WithoutCancel(t.Context()), http.MethodPost, "/ingress/orders"+params, strings.NewReader(oneRow))
			status <- s
		}()
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		if err := sim.WaitFor(ctx, func(v felderasim.View) bool { return v.Count("orders") == 1 && v.AnswersHeld(id) == 1 }); err != nil {
			t.Fatal(err)
		}
		want := 200
		if crashes {
			want = 503
			sim.Crash(core.KeepNothing)
		} else {
			sim.ClearFault(id)
		}
		if got := <-status; got != want {
			t.Errorf("answered %d, want %d", got, want)
		}
	}
}
