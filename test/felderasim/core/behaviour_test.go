package core

import (
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestS1TokenAndFormats(t *testing.T) {
	r := newRig(t, Config{})
	tok := r.ok("orders", `[{"insert":{"id":1}},{"update":{"id":1,"qty":null}},{"delete":{"id":2}}]`)
	if want := "eyJ1IjoiMDE5YTAwMDAtMDAwMC03MDAwLTgwMDAtMDAwMDAwMDAwMDAwIiwiZSI6MCwiYyI6M30"; tok != want {
		t.Fatalf("token %s, want %s", tok, want)
	}
	// Without format it is CSV; what is not known is ignored.
	if _, err := r.send("events", "wait=true&idempotency_key=x", "a,1\nb,\n"); err != nil {
		t.Fatal(err)
	}
	r.steps()
	r.dump("events", `{"name":"a","n":1} weight=1`, `{"name":"b","n":null} weight=1`)
	r.fails("ParseErrors", "orders", "", `[{"insert":{"id":1}}]`)
	// gzip is not decoded: it is garbage.
	r.fails("ParseErrors", "orders", arrayQuery, "\x1f\x8b\x08\x00\x00\x00\x00\x00")
	for query, code := range map[string]string{
		"format=xml":                                          "ConfigError.UnknownInputFormat",
		"format=json&update_format=nonsense":                  "ConfigError.ParserConfigParseError",
		"format=json&update_format=snowflake":                 "ConfigError.InputFormatNotSupported",
		"format=json&array=True":                              "ConfigError.ParserConfigParseError",
		"format=json&json_flavor=nonsense":                    "ConfigError.ParserConfigParseError",
		"format=json&update_format=insert_delete&lines=three": "ConfigError.ParserConfigParseError",
	} {
		if e := r.failure(code, "orders", query, "[]"); e.Status != 400 {
			t.Errorf("%s: status %d", query, e.Status)
		}
	}
	// weighted and redis panic under a lock: the endpoint is broken for good.
	e := r.failure("DbspPanic", "orders", "format=json&update_format=weighted", "{}")
	if !e.Abort {
		t.Error("weighted must end the connection")
	}
}

func TestS1UnknownTable(t *testing.T) {
	r := newRig(t, Config{})
	e := r.failure("ConfigError.UnknownInputStream", "nosuch", "format=json", "")
	name := endpointName("nosuch", ParserConfig{Format: "json", Update: InsertDelete, Flavor: "default", Delimiter: ','})
	wantJSON(t, "404", e, `{"message":"invalid controller configuration: Input endpoint '`+name+`' specifies unknown table 'nosuch'",`+
		`"error_code":"ConfigError.UnknownInputStream","details":{"config_error":{"endpoint_name":"`+name+`","stream_name":"nosuch"}}}`)
	if e.Status != 404 {
		t.Errorf("status %d", e.Status)
	}
}

func TestS2Endpoints(t *testing.T) {
	r := newRig(t, Config{})
	r.ok("orders", "[]")
	r.ok("ORDERS", "[]") // another spelling, another endpoint
	r.ok("orders", "[]") // the first again
	if _, err := r.send("orders", "format=json&array=false", ""); err != nil {
		t.Fatal(err)
	}
	var names []string
	for i, ep := range r.Endpoints() {
		if ep.ID != uint64(i) {
			t.Errorf("endpoint %d has id %d", i, ep.ID)
		}
		head, hash, _ := strings.Cut(ep.Name, ".api-ingress-")
		if len(hash) != 16 {
			t.Errorf("endpoint name %q", ep.Name)
		}
		names = append(names, head)
	}
	if d := cmp.Diff([]string{"orders", "ORDERS", "orders"}, names); d != "" {
		t.Fatal(d)
	}
	for i := len(names); i < 100; i++ {
		if _, err := r.send("orders", "format=csv&delimiter="+url.QueryEscape(string(rune(0x100+i))), ""); err != nil {
			t.Fatalf("endpoint %d: %v", i+1, err)
		}
	}
	e := r.failure("ApiConnectionLimit", "events", arrayQuery, "[]")
	wantJSON(t, "429", e, `{"message":"The API connections limit has been exceded. Close some of the existing connections before opening new ones.","error_code":"ApiConnectionLimit","details":null}`)
	if e.Status != 429 {
		t.Errorf("status %d", e.Status)
	}
	r.ok("orders", "[]") // those that exist go on
}

func TestS3StepsTakeWholeEntries(t *testing.T) {
	r := newRig(t, Config{}) // one worker: 10 000 records a step
	big := r.ok("orders", inserts(0, 25_000))
	small := r.ok("events", `[{"insert":{"name":"x"}}]`)
	if got := r.Count("orders"); got != 0 {
		t.Fatalf("queued rows are visible: %d", got)
	}
	if r.status(big) != inProgressNull || r.status(small) != inProgressNull {
		t.Fatal("queued is not ingested")
	}
	r.Step()
	if r.Count("orders") != 25_000 || r.Count("events") != 1 {
		t.Fatal("an array is one entry, and all endpoints go in the same step")
	}
	// Records of NDJSON are entries of their own: 15 000 of them are two
	// steps, cut between two records.
	lines := strings.NewReplacer("[", "", "]", "", "},{", "}}\n{{").Replace(inserts(100_000, 15_000))
	lines = strings.ReplaceAll(strings.ReplaceAll(lines, "}}}", "}}"), "{{", "{")
	if _, err := r.send("orders", "format=json", lines); err != nil {
		t.Fatal(err)
	}
	r.Step()
	if got := r.Count("orders"); got != 35_000 {
		t.Fatalf("after one step %d rows, want 35000", got)
	}
	if n := r.steps(); n != 1 || r.Count("orders") != 40_000 {
		t.Fatalf("%d more steps, %d rows", n, r.Count("orders"))
	}
}

func TestS3HoldIngest(t *testing.T) {
	r := newRig(t, Config{})
	r.HoldIngest("orders", true)
	a, b := r.ok("orders", inserts(1, 1)), r.ok("events", `[{"insert":{"name":"x"}}]`)
	r.steps()
	if r.status(a) != inProgressNull || r.status(b) != done(1) {
		t.Fatalf("%s %s", r.status(a), r.status(b))
	}
	r.HoldIngest("", false)
	r.steps()
	if r.status(a) != done(2) {
		t.Fatal(r.status(a))
	}
}

func TestS4ArrayIsAllOrNothing(t *testing.T) {
	r := newRig(t, Config{})
	r.ok("orders", inserts(1, 1))
	e := r.failure("ParseErrors", "orders", arrayQuery, `[{"insert":{"id":5,"qty":1}},{"insert":{"id":2,"qty":"x"}},{"insert":{"qty":3}}]`)
	wantJSON(t, "400", e, `{"message":"Errors parsing input data (2 errors):\n`+
		`    Parse error (event #3): failed to deserialize JSON record: error parsing field 'qty': invalid type: string \"x\", expected i32 at line 1 column 17\nInvalid fragment: '{\"id\":2,\"qty\":\"x\"}'\n`+
		"    Parse error (event #4): failed to deserialize JSON record: missing field `id` at line 1 column 9\\nInvalid fragment: '{\\\"qty\\\":3}'\","+
		`"error_code":"ParseErrors","details":{"num_errors":2,"errors":[`+
		`{"description":"failed to deserialize JSON record: error parsing field 'qty': invalid type: string \"x\", expected i32 at line 1 column 17","event_number":3,"field":"qty","invalid_bytes":null,"invalid_text":"{\"id\":2,\"qty\":\"x\"}","suggestion":null,"tag":"text_event_err"},`+
		"{\"description\":\"failed to deserialize JSON record: missing field `id` at line 1 column 9\",\"event_number\":4,\"field\":null,\"invalid_bytes\":null,\"invalid_text\":\"{\\\"qty\\\":3}\",\"suggestion\":null,\"tag\":\"text_event_err\"}"+
		`]}}`)
	r.steps()
	r.dump("orders", `{"id":1,"qty":1,"note":null}`)
	// event_number counts from the endpoint's creation, not the request's.
	e = r.failure("ParseErrors", "orders", arrayQuery, `[{"insert":{"id":"x"}}]`)
	if !strings.Contains(e.Message, "(event #5)") {
		t.Fatal(e.Message)
	}
	// An unknown verb is an error of the document.
	e = r.failure("ParseErrors", "orders", arrayQuery, `[{"upsert":{"id":7}}]`)
	if !strings.Contains(string(e.JSON()), `"event_number":null,"field":null`) || !strings.Contains(string(e.JSON()), `"tag":"text_envelope_err"`) {
		t.Fatal(string(e.JSON()))
	}
}

func TestS4LinesKeepTheGoodOnes(t *testing.T) {
	r := newRig(t, Config{})
	r.fails("ParseErrors", "orders", "format=json", "{\"insert\":{\"id\":1}}\n{\"insert\":{\"id\":\"x\"}}\n{\"insert\":{\"id\":3}}\n")
	// In an object with several verbs, what came before the error stays.
	r.ok("orders", `[{"insert":{"id":9}}]`)
	r.steps()
	r.fails("ParseErrors", "orders", "format=json", `{"delete":{"id":9},"insert":{"id":"x"}}`)
	r.steps()
	r.dump("orders", `{"id":1,"qty":null,"note":null}`, `{"id":3,"qty":null,"note":null}`)
	// Malformed text: what stands before it stays.
	r.fails("ParseErrors", "orders", "format=json", "{\"insert\":{\"id\":4}} {\"insert\":{\"id\":5}")
	r.steps()
	if r.Count("orders") != 3 {
		t.Fatal(r.Dump("orders"))
	}
	// A thousand errors are listed, all are counted.
	e := r.failure("ParseErrors", "orders", "format=json", strings.Repeat("{\"x\":1}\n", 1500))
	if !strings.HasPrefix(e.Message, "Errors parsing input data (reporting 1000 out of 1500 total errors):") || !strings.Contains(string(e.JSON()), `"num_errors":1500`) {
		t.Fatal(e.Message[:100])
	}
}

// A request that was cut leaves the beginning of its chunk in the endpoint,
// and the next request's body is put after it.
func TestS4CutBodyPoisonsTheNextRequest(t *testing.T) {
	r := newRig(t, Config{})
	r.ok("orders", "[]")
	ep := r.Endpoints()[0]
	var errs ParseErrors
	if entries, _ := ep.Parser.Feed([]byte(`[{"insert":{"id":1}},{"ins`), false, &errs); len(entries) > 0 || ep.Parser.Pending() == 0 {
		t.Fatal("an incomplete array was taken")
	}
	r.fails("ParseErrors", "orders", arrayQuery, `[{"insert":{"id":1}}]`)
	r.ok("orders", `[{"insert":{"id":1}}]`)
	r.steps()
	r.dump("orders", `{"id":1,"qty":null,"note":null}`)
}

func TestS5PrimaryKey(t *testing.T) {
	r := newRig(t, Config{})
	r.ok("orders", `[{"insert":{"id":1,"qty":1,"note":"a"}},{"insert":{"id":1,"qty":2,"note":"b"}},`+
		`{"update":{"id":1,"qty":null}},{"update":{"id":7,"qty":1}},{"insert":{"id":2,"qty":5}},{"delete":{"id":2,"qty":"not looked at"}},{"delete":{"id":3}}]`)
	r.steps()
	r.dump("orders", `{"id":1,"qty":null,"note":"b"}`)
	r.fails("ParseErrors", "orders", arrayQuery, `[{"update":{"qty":1}}]`) // all key columns are needed
	r.fails("ParseErrors", "orders", arrayQuery, `[{"delete":{"qty":1}}]`)
	// Key order is the key's, not the columns'; positional keys follow it.
	r.ok("lines", `[{"insert":{"a":1,"b":2,"qty":3}},{"insert":[4,5,6]},{"delete":[5,4]},{"update":{"b":2,"a":1,"qty":9}}]`)
	r.steps()
	r.dump("lines", `{"a":1,"b":2,"qty":9}`)
}

func TestS5NoPrimaryKey(t *testing.T) {
	r := newRig(t, Config{})
	r.ok("events", `[{"insert":{"name":"a","n":1}},{"insert":{"n":1,"name":"a"}},{"delete":{"name":"b"}},{"delete":{"name":"b"}},{"insert":{"name":"c"}},{"delete":{"name":"c"}}]`)
	r.steps()
	r.dump("events", `{"name":"a","n":1} weight=2`, `{"name":"b","n":null} weight=-2`)
	e := r.failure("ParseErrors", "events", arrayQuery, `[{"update":{"name":"a"}}]`)
	if !strings.Contains(e.Message, "update operation is not supported on this stream") {
		t.Fatal(e.Message)
	}
}

func TestS5UpdateFormats(t *testing.T) {
	r := newRig(t, Config{})
	for query, body := range map[string]string{
		"format=json&update_format=raw":                 `{"id":1} [2,3,"x"]`,
		"format=json&update_format=raw&array=true":      `[{"id":3},[4,null,null]]`,
		"format=json&update_format=debezium":            `{"payload":{"op":"u","before":null,"after":{"id":5}}}`,
		"format=json&update_format=debezium&array=true": `[{"payload":{"op":"c","after":{"id":6}},"schema":{}}]`,
	} {
		if _, err := r.send("orders", query, body); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	r.steps() // endpoints of different formats keep no order among each other
	if _, err := r.send("orders", "format=json&update_format=debezium", `{"payload":{"op":"r","before":{"id":6},"after":null}}`); err != nil {
		t.Fatal(err)
	}
	r.steps()
	if got := r.Count("orders"); got != 5 {
		t.Fatal(r.Dump("orders"))
	}
	for _, bad := range []string{`{"op":"c","after":{"id":9}}`, `{"payload":{"after":{"id":9}}}`, `{"payload":{"op":"x","after":{"id":9}}}`} {
		r.fails("ParseErrors", "orders", "format=json&update_format=debezium", bad)
	}
	if _, err := r.send("orders", arrayQuery, `[{"table":"orders","insert":{"id":9}},{},{"insert":null}]`); err != nil {
		t.Fatal(err)
	}
}

func TestS7PauseAndBackpressure(t *testing.T) {
	r := newRig(t, Config{Workers: 8})
	tok := r.ok("orders", inserts(0, MaxQueuedRecords))
	ep := r.Endpoints()[0]
	reading := func(force bool) bool {
		t.Helper()
		ok, err := r.Reading(ep, force)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	if reading(false) || !reading(true) {
		t.Fatal("a full queue pauses the reader, force does not mind")
	}
	// A paused pipeline processes what it has.
	r.SetState(StatePaused)
	r.steps()
	if r.status(tok) != done(1) {
		t.Fatal(r.status(tok))
	}
	if reading(false) || !reading(true) {
		t.Fatal("pause")
	}
	r.SetState(StateRunning)
	if !reading(false) {
		t.Fatal("running")
	}
	for state, code := range map[State]string{
		StateInitializing: "Initializing", StateSuspended: "Suspended", StateTerminating: "Terminating", StateRestoring: "RestoreInProgress", StateBootstrapping: "BootstrapInProgress",
	} {
		r.SetState(state)
		e := r.failure(code, "events", arrayQuery, "[]")
		if want := map[bool]int{true: 410, false: 503}[state == StateTerminating]; e.Status != want {
			t.Errorf("%s: status %d", state, e.Status)
		}
		if state == StateInitializing {
			wantJSON(t, "503", e, `{"message":"Operation failed because the pipeline has not finished initializing.","error_code":"Initializing","details":null}`)
		}
	}
}

func TestS8CompletionStatus(t *testing.T) {
	r := newRig(t, Config{})
	empty := r.ok("orders", "[]")
	if r.status(empty) != done(0) {
		t.Fatal(r.status(empty)) // nothing to wait for: labelled at once
	}
	r.HoldCompletion(true)
	tok := r.ok("orders", inserts(1, 3))
	if r.status(tok) != inProgressNull {
		t.Fatal(r.status(tok))
	}
	r.steps()
	if r.status(tok) != inProgress(1) {
		t.Fatal(r.status(tok))
	}
	later := r.ok("events", `[{"insert":{"name":"x"}}]`)
	r.steps()
	if r.status(later) != inProgress(2) {
		t.Fatal(r.status(later))
	}
	if g := r.Stats().Global; g.TotalInitiatedSteps != 2 || g.TotalCompletedSteps != 0 || g.TotalProcessedRecords != 4 || g.TotalCompletedRecords != 0 {
		t.Fatalf("%+v", g)
	}
	r.HoldCompletion(false)
	if r.status(tok) != done(1) || r.status(later) != done(2) {
		t.Fatal(r.status(tok), r.status(later))
	}
	// Tokens of other things.
	for tok, want := range map[string]string{
		EncodeToken(firstUUID, 9, 1): `{"message":"completion token specifies input endpoint id 9, which doesn't exist; this indicates that the endpoint was deleted after the token was generated","error_code":"UnknownEndpointInCompletionToken","details":{"endpoint_id":9}}`,
		EncodeToken(firstUUID, 0, 9): inProgressNull, // a count that was never issued
		EncodeToken("A", 0, 1): `{"message":"Completion token was created by a previous incarnation of the pipeline (incarnation uuid: A) and is not valid for the current incarnation (` + firstUUID + `). ` +
			`This indicates that the pipeline was suspended and resumed from a checkpoint or restarted after a failure.","error_code":"PipelineRestarted","details":{"error":"Completion token was created by a previous incarnation of the pipeline (incarnation uuid: A) and is not valid for the current incarnation (` + firstUUID + `). ` +
			`This indicates that the pipeline was suspended and resumed from a checkpoint or restarted after a failure."}}`,
	} {
		if d := cmp.Diff(want, r.status(tok)); d != "" {
			t.Errorf("token %s (-want +got):\n%s", tok, d)
		}
	}
	_, err := r.CompletionStatus("!!!")
	if err == nil || err.Status != 400 || err.Code != "InvalidParam" || !strings.HasPrefix(err.Message, "Invalid parameter: invalid completion token: ") {
		t.Fatal(err)
	}
	// Padding is not accepted.
	if _, err := r.CompletionStatus(later + "="); err == nil || err.Code != "InvalidParam" {
		t.Fatal(err)
	}
	// Old tokens keep answering complete.
	for i := range 50 {
		r.ok("orders", inserts(10+i, 1))
		r.steps()
	}
	if got := r.status(tok); !strings.HasPrefix(got, `{"status":"complete"`) {
		t.Fatal(got)
	}
	if n := len(r.Endpoints()[0].labels); n > 3 {
		t.Fatalf("%d labels are kept", n)
	}
}

func TestS9Transactions(t *testing.T) {
	r := newRig(t, Config{})
	if err := r.CommitTransaction(); err == nil {
		t.Fatal("commit without start")
	} else {
		wantJSON(t, "400", err, `{"message":"This operation requires an active transaction, but none is currently in progress","error_code":"NoTransactionInProgress","details":{}}`)
	}
	before := r.ok("events", `[{"insert":{"name":"before"}}]`)
	r.steps()

	id, err := r.StartTransaction()
	if err != nil || id != 1 {
		t.Fatal(id, err)
	}
	if _, err := r.StartTransaction(); err == nil {
		t.Fatal("double start")
	} else {
		wantJSON(t, "409", err, `{"message":"Cannot perform this operation while there is a transaction in progress","error_code":"TransactionInProgress","details":{}}`)
	}
	// Requested, but no step has been: the engine knows nothing of it.
	g := r.Stats().Global
	if g.TransactionStatus != "NoTransaction" || g.TransactionID != 1 || *g.TransactionInitiators.InitiatedByAPI != "Started" || *g.TransactionInitiators.TransactionID != 1 {
		t.Fatalf("%+v", g)
	}
	a, b := r.ok("orders", inserts(1, 1)), r.ok("events", `[{"insert":{"name":"x"}}]`)
	r.steps()
	if r.Stats().Global.TransactionStatus != "TransactionInProgress" {
		t.Fatal("the transaction opens with the first step")
	}
	if r.status(a) != inProgress(2) || r.status(b) != inProgress(2) || r.status(before) != done(1) {
		t.Fatal(r.status(a), r.status(b), r.status(before))
	}
	r.dump("orders")
	r.dump("events", `{"name":"before","n":null} weight=1`)
	c := r.ok("orders", inserts(2, 1)) // the batch that goes with the commit
	if err := r.CommitTransaction(); err != nil {
		t.Fatal(err)
	}
	// Accepted, but no step has been: the API is its initiator until the commit begins.
	if _, err := r.StartTransaction(); err == nil || err.Code != "TransactionInProgress" {
		t.Fatal("a transaction took the place of a commit", err)
	}
	r.HoldCommit(true)
	r.Step()
	if got := r.Stats().Global; got.TransactionStatus != "CommitInProgress" || got.TransactionInitiators.InitiatedByAPI != nil {
		t.Fatalf("%+v", got)
	}
	late := r.ok("orders", inserts(3, 1))
	if r.WantsStep() || r.status(late) != inProgressNull {
		t.Fatal("nothing is ingested while committing")
	}
	// The next one may be asked for while this one commits.
	if id, err := r.StartTransaction(); err != nil || id != 2 {
		t.Fatal(id, err)
	}
	// It has not begun, so this commit makes it vanish.
	if err := r.CommitTransaction(); err != nil {
		t.Fatal(err)
	}
	r.dump("orders")
	r.HoldCommit(false)
	r.Step()
	r.dump("orders", `{"id":1,"qty":1,"note":null}`, `{"id":2,"qty":1,"note":null}`)
	r.steps()
	for _, tok := range []string{a, b, c, late} {
		if !strings.HasPrefix(r.status(tok), `{"status":"complete"`) {
			t.Fatal(r.status(tok))
		}
	}
	// A start that never steps vanishes with its commit; what was queued goes
	// in as ordinary steps.
	if id, err := r.StartTransaction(); err != nil || id != 3 {
		t.Fatal(id, err)
	}
	r.ok("orders", inserts(4, 1))
	if err := r.CommitTransaction(); err != nil {
		t.Fatal(err)
	}
	r.Step()
	if r.Stats().Global.TransactionStatus != "NoTransaction" || r.Count("orders") != 4 {
		t.Fatal("the transaction did not vanish")
	}
}

func TestS9CommitTakesOneMoreBatch(t *testing.T) {
	r := newRig(t, Config{}) // 10 000 a step
	if _, err := r.StartTransaction(); err != nil {
		t.Fatal(err)
	}
	r.ok("orders", inserts(0, 1))
	r.Step()
	r.ok("orders", inserts(10_000, 10_000))
	r.ok("orders", inserts(20_000, 10_000)) // falls outside
	if err := r.CommitTransaction(); err != nil {
		t.Fatal(err)
	}
	r.Step()
	r.Step()
	if got := r.Count("orders"); got != 10_001 {
		t.Fatalf("%d rows were committed", got)
	}
	r.steps()
	if got := r.Count("orders"); got != 20_001 {
		t.Fatal(got)
	}
}

func TestS10CrashByModel(t *testing.T) {
	for _, tc := range []struct {
		model Model
		want  []string
	}{
		{ModelNone, nil},
		{ModelAtLeastOnce, []string{`{"id":1,"qty":1,"note":null}`}},
		{ModelExactlyOnce, []string{`{"id":1,"qty":1,"note":null}`, `{"id":2,"qty":1,"note":null}`, `{"id":3,"qty":1,"note":null}`}},
	} {
		t.Run(string(tc.model), func(t *testing.T) {
			r := newRig(t, Config{Model: tc.model, Enterprise: tc.model != ModelNone})
			tok := r.ok("orders", inserts(1, 1))
			r.steps()
			if _, err := r.RequestCheckpoint(); err != nil {
				t.Fatal(err)
			}
			for r.AdvanceCheckpoint() {
				continue
			}
			r.ok("orders", inserts(2, 1))
			r.steps()
			// An open transaction, and then something that is only queued.
			if _, err := r.StartTransaction(); err != nil {
				t.Fatal(err)
			}
			r.ok("orders", inserts(3, 1))
			r.steps()
			r.HoldIngest("", true)
			r.ok("orders", inserts(4, 1))
			was := r.Stats().Global
			r.Crash(KeepByModel)
			r.HoldIngest("", false)
			r.dump("orders", tc.want...)
			now := r.Stats().Global
			if now.IncarnationUUID == was.IncarnationUUID || now.StartTime <= was.StartTime {
				t.Fatal("a new process has a new uuid and start time")
			}
			if (now.InitialStartTime == was.InitialStartTime) != (tc.model != ModelNone) {
				t.Fatal("initial_start_time is kept exactly when something survived")
			}
			if now.TransactionStatus != "NoTransaction" || now.TransactionID != 0 {
				t.Fatalf("%+v", now)
			}
			if _, err := r.CompletionStatus(tok); err == nil || err.Code != "PipelineRestarted" {
				t.Fatal(err)
			}
			if id, err := r.StartTransaction(); err != nil || id != 1 {
				t.Fatal("transaction ids begin at 1 in each process", id, err)
			}
		})
	}
}

func TestS10StepsContinueFromTheCheckpoint(t *testing.T) {
	r := newRig(t, Config{Model: ModelAtLeastOnce, Enterprise: true})
	for i := range 3 {
		r.ok("orders", inserts(i, 1))
		r.steps()
	}
	_, _ = r.RequestCheckpoint()
	for r.AdvanceCheckpoint() {
		continue
	}
	r.Crash(KeepByModel)
	if g := r.Stats().Global; g.TotalInitiatedSteps != 0 || g.TotalCompletedSteps != 0 || g.TotalProcessedRecords != 3 {
		t.Fatalf("counters read 0 until the first step: %+v", g)
	}
	tok := r.ok("orders", inserts(9, 1))
	r.steps()
	if r.status(tok) != done(4) {
		t.Fatal(r.status(tok))
	}
}

func TestS11CheckpointPhases(t *testing.T) {
	r := newRig(t, Config{Model: ModelAtLeastOnce, Enterprise: true})
	r.ok("orders", inserts(1, 3))
	r.steps()
	r.HoldIngest("", true)
	r.ok("orders", inserts(10, 1)) // queued: not in it
	if !r.StartPeriodicCheckpoint() {
		t.Fatal("no checkpoint began")
	}
	r.HoldIngest("", false)
	r.steps()
	// A request that comes now is credited with the one that runs.
	seq, err := r.RequestCheckpoint()
	if err != nil || seq != 0 {
		t.Fatal(seq, err)
	}
	wantJSON(t, "not yet", r.Checkpoints(), `[]`)
	r.HoldCompletion(true)
	r.ok("orders", inserts(20, 1))
	r.steps()
	r.AdvanceCheckpoint()
	info := r.Checkpoints()
	if len(info) != 1 || info[0].Steps != 1 || info[0].ProcessedRecords != 3 || info[0].Identifier != nil {
		t.Fatalf("%+v", info)
	}
	// Listed, but a crash now would not resume from it.
	if r.resume != nil {
		t.Fatal("listed is not the resume point")
	}
	st, err := r.CheckpointStatus(r.Incarnation())
	if err != nil {
		t.Fatal(err)
	}
	wantJSON(t, "status", st, `{"success":null,"failure":null}`)
	r.AdvanceCheckpoint()
	st, _ = r.CheckpointStatus("")
	wantJSON(t, "status", st, `{"success":0,"failure":null}`)
	if _, err := r.CheckpointStatus("A"); err == nil {
		t.Fatal("a foreign incarnation is refused")
	} else {
		wantJSON(t, "400", err, `{"message":"Incarnation UUID mismatch (A in request, expected `+firstUUID+`)","error_code":"IncarnationUuidMismatch","details":{"requested":"A","expected":"`+firstUUID+`"}}`)
	}
	// Its content is what was ingested when it started, although its success
	// was reported to a request that came after id 10 was ingested.
	r.Crash(KeepByModel)
	if r.Count("orders") != 3 {
		t.Fatal(r.Dump("orders"))
	}
	if seq, _ := r.RequestCheckpoint(); seq != 0 {
		t.Fatal("sequence numbers begin at 0 in each process", seq)
	}
}

func TestS11WaitsForOutputs(t *testing.T) {
	r := newRig(t, Config{Enterprise: true})
	r.HoldCompletion(true)
	r.ok("orders", inserts(1, 1))
	r.steps()
	_, _ = r.RequestCheckpoint()
	for r.AdvanceCheckpoint() {
		continue
	}
	if st, _ := r.CheckpointStatus(""); st.Success != nil || len(r.Checkpoints()) != 1 {
		t.Fatal("a checkpoint succeeds only once its outputs are delivered")
	}
	r.HoldCompletion(false)
	if !r.AdvanceCheckpoint() {
		t.Fatal("it should finish now")
	}
}

func TestS11DelayedByTransaction(t *testing.T) {
	r := newRig(t, Config{Enterprise: true})
	if _, err := r.StartTransaction(); err != nil {
		t.Fatal(err)
	}
	r.ok("orders", inserts(1, 1))
	r.steps()
	_, _ = r.RequestCheckpoint()
	if r.AdvanceCheckpoint() || r.StartPeriodicCheckpoint() {
		t.Fatal("no checkpoint during a transaction")
	}
	s := r.Stats()
	if toJSON(t, s.SuspendError) != `{"Temporary":["TransactionInProgress"]}` || s.CheckpointActivity["status"] != "delayed" {
		t.Fatalf("%v %v", s.SuspendError, s.CheckpointActivity)
	}
	if err := r.CommitTransaction(); err != nil {
		t.Fatal(err)
	}
	r.steps()
	for r.AdvanceCheckpoint() {
		continue
	}
	if st, _ := r.CheckpointStatus(""); st.Success == nil {
		t.Fatal("the checkpoint should have been taken")
	}
}

func TestS11OpenSource(t *testing.T) {
	r := newRig(t, Config{})
	if seq, err := r.RequestCheckpoint(); seq != 0 || err != nil {
		t.Fatal(seq, err)
	}
	st, _ := r.CheckpointStatus("")
	if st.Failure != nil {
		t.Fatal("the failure shows up later")
	}
	r.AdvanceCheckpoint()
	st, _ = r.CheckpointStatus("")
	if st.Success != nil || st.Failure == nil || st.Failure.SequenceNumber != 0 {
		t.Fatalf("%+v", st)
	}
	if _, err := New(Config{Program: program(t, testSQL), Model: ModelExactlyOnce}); err == nil {
		t.Fatal("fault tolerance needs the enterprise edition")
	}
	wantJSON(t, "501", ErrEnterprise("checkpoint"), `{"message":"Cannot use enterprise-only feature (checkpoint) in Feldera community edition.","error_code":"EnterpriseFeature","details":{"feature":"checkpoint"}}`)
}

func TestS13Stats(t *testing.T) {
	r := newRig(t, Config{})
	body := `[{"insert":{"id":1}}]`
	tok := r.ok("orders", body)
	r.fails("ParseErrors", "orders", arrayQuery, `[{"insert":{}}]`)
	r.steps()
	if r.status(tok) != done(1) {
		t.Fatal(r.status(tok))
	}
	name := r.Endpoints()[0].Name
	wantJSON(t, "stats", r.Stats(), `{"global_metrics":{"state":"Running","bootstrap_in_progress":false,"transaction_status":"NoTransaction","transaction_id":0,`+
		`"transaction_msecs":null,"transaction_records":null,"commit_progress":null,`+
		`"transaction_initiators":{"transaction_id":null,"initiated_by_api":null,"initiated_by_connectors":{}},`+
		`"start_time":1787000000,"incarnation_uuid":"`+firstUUID+`","initial_start_time":1787000000,`+
		`"buffered_input_records":0,"total_input_records":1,"total_processed_records":1,"total_completed_records":1,`+
		`"total_initiated_steps":1,"total_completed_steps":1,"pipeline_complete":true},`+
		`"suspend_error":{"Permanent":["EnterpriseFeature"]},"checkpoint_activity":{"status":"idle"},"permanent_checkpoint_errors":["EnterpriseFeature"],`+
		`"inputs":[{"endpoint_name":"`+name+`","config":{"stream":"orders"},`+
		`"metrics":{"total_bytes":21,"total_records":1,"buffered_records":0,"buffered_bytes":0,"num_transport_errors":0,"num_parse_errors":1,"end_of_input":false},`+
		`"fatal_error":null,"paused":false,"barrier":false,"completed_frontier":null}],"outputs":[]}`)
	enterprise := newRig(t, Config{Enterprise: true}).Stats()
	if enterprise.SuspendError != nil || enterprise.PermanentCheckpoint != nil {
		t.Fatalf("%+v", enterprise)
	}
}

func TestChangesFollowATable(t *testing.T) {
	r := newRig(t, Config{})
	r.ok("orders", inserts(1, 2))
	r.steps()
	rows, _, full, ok := r.Changes("orders")
	if len(rows) != 2 || !full || !ok {
		t.Fatal(rows, full, ok)
	}
	r.ok("orders", `[{"delete":{"id":1}},{"insert":{"id":5}}]`)
	r.steps()
	rows, _, full, _ = r.Changes("orders")
	if len(rows) != 2 || full {
		t.Fatal(rows, full)
	}
	r.ok("orders", inserts(100, maxDirty+1))
	r.steps()
	if rows, _, full, _ = r.Changes("orders"); !full || len(rows) != maxDirty+3 {
		t.Fatal(len(rows), full)
	}
	if _, _, _, ok := r.Changes("nosuch"); ok {
		t.Fatal("unknown table")
	}
}
