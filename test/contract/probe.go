package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"holdfast/test/felderasim"
)

// The parameters of the two ways to send JSON that the clauses use most.
const (
	arrayParams  = "format=json&update_format=insert_delete&array=true"
	singleParams = "format=json&update_format=insert_delete"
)

// probe is what a clause has in hand. Its methods end the clause by failf when
// what they need does not come about. They run on the clause's goroutine,
// except where a comment says otherwise.
type probe struct {
	ctx   context.Context //nolint:containedctx // the life of one clause
	w     *world
	base  int64 // ids are base+n
	top   int64 // highest n used
	owned sync.WaitGroup

	mu      sync.Mutex
	reason  string
	cleanup []func()
	touched []string
	closers []func() // run when all that the clause started has ended
}

func newProbe(ctx context.Context, w *world) *probe {
	// Positive, with room for the ids of one clause, and exact in any JSON
	// reader: two runs meet with a chance of one in a thousand million.
	return &probe{ctx: ctx, w: w, base: (1 + rand.Int64N(1<<32)) << 18}
}

func (p *probe) fail(why string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reason == "" {
		p.reason = clip(why)
	}
}

func (p *probe) why() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reason
}

// id gives the nth key of this clause.
func (p *probe) id(n int) int64 {
	p.top = max(p.top, int64(n))
	return p.base + int64(n)
}

// after runs f when the clause is over, last first, if the target stays.
func (p *probe) after(f func()) { p.cleanup = append(p.cleanup, f) }

// cleanUp runs the cleanups, each in a goroutine so that one that fails does
// not end the rest, and takes the clause's rows out of a target that stays.
func (p *probe) cleanUp() {
	if p.w.passing {
		return
	}
	todo := slices.Clone(p.cleanup)
	slices.Reverse(todo)
	todo = append(todo, p.removeRows)
	for _, f := range todo {
		var turn sync.WaitGroup
		turn.Go(f)
		turn.Wait()
	}
}

func (p *probe) removeRows() {
	for _, table := range p.touched {
		var del []string
		switch table {
		case "hfc_bag":
			for _, r := range p.query(fmt.Sprintf("SELECT id, note FROM hfc_bag WHERE id >= %d AND id <= %d", p.base, p.base+p.top)) {
				del = append(del, fmt.Sprintf(`{"delete":{"id":%s,"note":%s}}`, r["id"], r["note"]))
			}
		default:
			for n := range p.top + 1 {
				del = append(del, fmt.Sprintf(`{"delete":{"id":%d}}`, p.base+n))
			}
		}
		if len(del) > 0 {
			p.complete(p.array(table, del...).token())
		}
	}
}

// touch notes that the clause writes to a table, in any spelling, whose rows
// can be found again when it is over.
func (p *probe) touch(table string) {
	if !strings.HasPrefix(table, `"`) {
		table = strings.ToLower(table)
	}
	removable := []string{"hfc_types", "hfc_kv", "hfc_pair", "hfc_strict", "hfc_cut", "hfc_bag", `"HfcQuoted"`}
	if slices.Contains(removable, table) && !slices.Contains(p.touched, table) {
		p.touched = append(p.touched, table)
	}
}

// answer is what came back.
type answer struct {
	p      *probe
	what   string
	status int
	header http.Header
	body   []byte
	err    error
}

// send makes one request to any address. It may be called from any goroutine.
func (p *probe) send(ctx context.Context, method, address, key string, header http.Header, body io.Reader) answer {
	a := answer{p: p, what: method + " " + strings.TrimPrefix(strings.TrimPrefix(address, p.w.base), p.w.bare)}
	a.what, _, _ = strings.Cut(a.what, "?")
	a.status, a.header, a.body, a.err = p.w.exchange(ctx, method, address, key, header, body)
	return a
}

// call makes one request below the pipeline's base and demands an answer.
func (p *probe) call(method, path, body string) answer {
	a := p.send(p.ctx, method, p.w.base+path, p.w.key, nil, strings.NewReader(body))
	a.came()
	return a
}

func (p *probe) get(path string) answer  { return p.call(http.MethodGet, path, "") }
func (p *probe) post(path string) answer { return p.call(http.MethodPost, path, "") }

// manager makes a request below the manager's root.
func (p *probe) manager(method, path string) answer {
	a := p.send(p.ctx, method, p.w.root+path, p.w.key, nil, nil)
	a.came()
	return a
}

// process makes a request to the bare pipeline process.
func (p *probe) process(method, path string) answer {
	a := p.send(p.ctx, method, p.w.bare+path, "", nil, nil)
	a.came()
	return a
}

func ingressPath(table, params string) string {
	path := "/ingress/" + url.PathEscape(table)
	if params != "" {
		path += "?" + params
	}
	return path
}

// ingress sends a body to a table, whose name is written as in SQL.
func (p *probe) ingress(table, params, body string) answer {
	p.touch(table)
	return p.call(http.MethodPost, ingressPath(table, params), body)
}

// array sends elements as one JSON array.
func (p *probe) array(table string, elements ...string) answer {
	return p.ingress(table, arrayParams, "["+strings.Join(elements, ",")+"]")
}

// single sends records one after the other.
func (p *probe) single(table string, records ...string) answer {
	return p.ingress(table, singleParams, strings.Join(records, "\n"))
}

// put applies elements and waits until they are completed.
func (p *probe) put(table string, elements ...string) {
	p.complete(p.array(table, elements...).token())
}

// came demands that there is an answer.
func (a answer) came() {
	if a.err != nil {
		a.p.failf("expected an answer to %s, got %v", a.what, a.err)
	}
}

// is demands a status.
func (a answer) is(status int) answer {
	a.came()
	if a.status != status {
		a.p.failf("expected %d to %s, got %d %s", status, a.what, a.status, clip(a.body))
	}
	return a
}

// into reads the body as JSON.
func (a answer) into(v any) {
	if err := json.Unmarshal(a.body, v); err != nil {
		a.p.failf("expected JSON from %s, got %s (%v)", a.what, clip(a.body), err)
	}
}

// members reads the body as one JSON object.
func (a answer) members() map[string]jsontext.Value {
	var m map[string]jsontext.Value
	a.into(&m)
	return m
}

// has demands exactly these members of a JSON object.
func (p *probe) has(what string, m map[string]jsontext.Value, want ...string) {
	var got []string
	for k := range m {
		got = append(got, k)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		p.failf("expected the members %v in %s, got %v", want, what, got)
	}
}

// include demands at least these members.
func (p *probe) include(what string, m map[string]jsontext.Value, want ...string) {
	for _, k := range want {
		if _, ok := m[k]; !ok {
			p.failf("expected a member %q in %s, got none", k, what)
		}
	}
}

// text demands that the body is exactly this JSON string.
func (a answer) text(want string) {
	var got string
	a.into(&got)
	if got != want {
		a.p.failf("expected the text %q from %s, got %q", want, a.what, got)
	}
}

// token demands 200 with a token and nothing else.
func (a answer) token() string {
	a.is(http.StatusOK)
	a.p.has("the answer to "+a.what, a.members(), "token")
	var t struct {
		Token string `json:"token"`
	}
	a.into(&t)
	if t.Token == "" {
		a.p.failf("expected a token from %s, got an empty one", a.what)
	}
	return t.Token
}

// apiError is an error body.
type apiError struct {
	Message string         `json:"message"`
	Code    string         `json:"error_code"`
	Details jsontext.Value `json:"details"`
}

// refused demands an error answer with its envelope: message, error_code and
// details, no more.
func (a answer) refused(status int, code string) apiError {
	a.is(status)
	a.p.has("the error from "+a.what, a.members(), "message", "error_code", "details")
	return a.errorIs(code)
}

// refusedPlain is refused for the manager's errors that have no details.
func (a answer) refusedPlain(status int, code string) apiError {
	a.is(status)
	a.p.has("the error from "+a.what, a.members(), "message", "error_code")
	return a.errorIs(code)
}

func (a answer) errorIs(code string) apiError {
	var e apiError
	a.into(&e)
	if e.Code != code {
		a.p.failf("expected error_code %s from %s, got %s", code, a.what, e.Code)
	}
	if e.Message == "" {
		a.p.failf("expected a message beside %s, got none", code)
	}
	return e
}

// parseErrors is details of a ParseErrors answer.
type parseErrors struct {
	Num    int `json:"num_errors"`
	Errors []struct {
		Description string  `json:"description"`
		Event       *uint64 `json:"event_number"`
		Field       *string `json:"field"`
		Text        *string `json:"invalid_text"`
		Tag         *string `json:"tag"`
	} `json:"errors"`
}

// bad demands 400 ParseErrors with this number of errors.
func (a answer) bad(n int) parseErrors {
	e := a.refused(http.StatusBadRequest, "ParseErrors")
	var d parseErrors
	if err := json.Unmarshal(e.Details, &d); err != nil || len(d.Errors) == 0 {
		a.p.failf("expected details.num_errors and details.errors, got %s", clip(e.Details))
	}
	if d.Num != n {
		a.p.failf("expected num_errors %d from %s, got %d", n, a.what, d.Num)
	}
	return d
}

// want demands equality.
func want[T comparable](p *probe, what string, expected, got T) {
	if expected != got {
		p.failf("expected %s %v, got %v", what, expected, got)
	}
}

// completion is the answer of completion_status.
type completion struct {
	Status string  `json:"status"`
	Step   *uint64 `json:"step"`
}

func (c completion) String() string {
	if c.Step == nil {
		return c.Status + " without a step"
	}
	return fmt.Sprintf("%s at step %d", c.Status, *c.Step)
}

func (p *probe) completionOf(token string) answer {
	return p.get("/completion_status?token=" + url.QueryEscape(token))
}

func (p *probe) status(token string) completion {
	var c completion
	p.completionOf(token).is(http.StatusOK).into(&c)
	return c
}

// ingested waits until a token has a step.
func (p *probe) ingested(token string) uint64 {
	var c completion
	p.until("the rows are ingested", func() bool { c = p.status(token); return c.Step != nil })
	return *c.Step
}

// complete waits until a token is complete and gives its step.
func (p *probe) complete(token string) uint64 {
	var c completion
	p.until("the rows are complete", func() bool { c = p.status(token); return c.Status == "complete" })
	if c.Step == nil {
		p.failf("expected a step of a complete token, got %s", c)
	}
	return *c.Step
}

// stays demands that something keeps holding, for many times as long as an
// idle engine needs for a step. It can miss a breach, and never invents one.
func (p *probe) stays(what string, cond func() bool) {
	timer := time.NewTimer(100 * time.Millisecond)
	defer timer.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if !cond() {
			p.failf("expected that %s, got otherwise", what)
		}
		select {
		case <-tick.C:
		case <-timer.C:
			return
		case <-p.ctx.Done():
			p.failf("expected that %s, got %v", what, context.Cause(p.ctx))
		}
	}
}

// until polls for something that must come.
func (p *probe) until(what string, cond func() bool) {
	deadline := time.NewTimer(p.w.patience)
	defer deadline.Stop()
	pause := time.Millisecond
	for !cond() {
		wait := time.NewTimer(pause)
		select {
		case <-wait.C:
		case <-deadline.C:
			p.failf("expected that %s, got nothing of it within %s", what, p.w.patience)
		case <-p.ctx.Done():
			p.failf("expected that %s, got %v", what, context.Cause(p.ctx))
		}
		pause = min(pause*2, 100*time.Millisecond)
	}
}

// background sends a request that may hang, and gives its answer later. The
// answer must be received, or the clause be over.
func (p *probe) background(table, params, body string) <-chan answer {
	p.touch(table)
	out := make(chan answer, 1)
	p.owned.Go(func() {
		out <- p.send(p.ctx, http.MethodPost, p.w.base+ingressPath(table, params), p.w.key, nil, strings.NewReader(body))
	})
	return out
}

// pending demands that no answer comes for a while.
func (p *probe) pending(what string, ch <-chan answer) {
	timer := time.NewTimer(150 * time.Millisecond)
	defer timer.Stop()
	select {
	case a := <-ch:
		p.failf("expected that %s gets no answer, got %d %s %v", what, a.status, clip(a.body), a.err)
	case <-timer.C:
	case <-p.ctx.Done():
		p.failf("expected that %s gets no answer, got %v", what, context.Cause(p.ctx))
	}
}

// receive waits for the answer of background.
func (p *probe) receive(ch <-chan answer) answer {
	select {
	case a := <-ch:
		a.came()
		return a
	case <-p.ctx.Done():
		p.failf("expected an answer, got %v", context.Cause(p.ctx))
		return answer{}
	}
}

// row is one row of a query, as raw JSON by column.
type row map[string]jsontext.Value

// query runs a SELECT and gives its rows.
func (p *probe) query(sql string) []row {
	a := p.get("/query?format=json&sql=" + url.QueryEscape(sql)).is(http.StatusOK)
	var out []row
	for line := range strings.Lines(string(a.body)) {
		if strings.TrimSpace(line) == "" {
			continue
		}
		var r row
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			p.failf("expected one JSON object a line from the query, got %s", clip(line))
		}
		out = append(out, r)
	}
	return out
}

// rows gives the rows of this clause in a table as "n:note/n", in the order of
// their ids. It suits tables with the columns id, note, n.
func (p *probe) rows(table string) string {
	var out []string
	for _, r := range p.query(fmt.Sprintf("SELECT id, note, n FROM %s WHERE id >= %d AND id < %d ORDER BY id", table, p.base, p.base+1<<18)) {
		var v struct {
			ID int64 `json:"id"`
		}
		b, err := json.Marshal(r)
		if err == nil {
			err = json.Unmarshal(b, &v)
		}
		if err != nil {
			p.failf("expected rows of %s, got %v", table, err)
		}
		out = append(out, fmt.Sprintf("%d:%s/%s", v.ID-p.base, strings.Trim(string(r["note"]), `"`), r["n"]))
	}
	return strings.Join(out, " ")
}

// holds demands the rows of this clause.
func (p *probe) holds(table, expected string) { want(p, "the rows of "+table, expected, p.rows(table)) }

// bag gives this clause's rows of hfc_bag as "n:note×count".
func (p *probe) bag() string {
	var out []string
	sql := fmt.Sprintf("SELECT id, note, COUNT(*) AS c FROM hfc_bag WHERE id >= %d AND id < %d GROUP BY id, note ORDER BY id, note", p.base, p.base+1<<18)
	for _, r := range p.query(sql) {
		var id int64
		if err := json.Unmarshal(r["id"], &id); err != nil {
			p.failf("expected rows of hfc_bag, got %v", err)
		}
		out = append(out, fmt.Sprintf("%d:%s×%s", id-p.base, strings.Trim(string(r["note"]), `"`), r["c"]))
	}
	return strings.Join(out, " ")
}

// kv writes an insert for a table with the columns id, note, n.
func (p *probe) kv(id int, note string, n int) string {
	return fmt.Sprintf(`{"insert":{"id":%d,"note":"%s","n":%d}}`, p.id(id), note, n)
}

// stats is the part of /stats that clauses look at.
type stats struct {
	Global struct {
		State             string `json:"state"`
		TransactionStatus string `json:"transaction_status"`
		TransactionID     int64  `json:"transaction_id"`
		Initiators        struct {
			ID  *int64  `json:"transaction_id"`
			API *string `json:"initiated_by_api"`
		} `json:"transaction_initiators"`
		StartTime        int64  `json:"start_time"`
		InitialStartTime int64  `json:"initial_start_time"`
		Incarnation      string `json:"incarnation_uuid"`
		Buffered         uint64 `json:"buffered_input_records"`
		Input            uint64 `json:"total_input_records"`
		Processed        uint64 `json:"total_processed_records"`
		Initiated        uint64 `json:"total_initiated_steps"`
		Completed        uint64 `json:"total_completed_steps"`
		Complete         bool   `json:"pipeline_complete"`
	} `json:"global_metrics"`
	SuspendError        jsontext.Value   `json:"suspend_error"`
	CheckpointActivity  activity         `json:"checkpoint_activity"`
	PermanentCheckpoint []jsontext.Value `json:"permanent_checkpoint_errors"`
	Inputs              []inputStats     `json:"inputs"`
}

type activity struct {
	Status  string   `json:"status"`
	Reasons []string `json:"reasons"`
}

type inputStats struct {
	Name   string `json:"endpoint_name"`
	Config struct {
		Stream string `json:"stream"`
	} `json:"config"`
	Metrics struct {
		Records   uint64 `json:"total_records"`
		Buffered  uint64 `json:"buffered_records"`
		Transport uint64 `json:"num_transport_errors"`
		Parse     uint64 `json:"num_parse_errors"`
	} `json:"metrics"`
	Fatal  *string `json:"fatal_error"`
	Paused bool    `json:"paused"`
}

func (p *probe) stats() stats {
	var s stats
	p.get("/stats").is(http.StatusOK).into(&s)
	return s
}

// endpoints gives the endpoints whose name begins with a table string as it
// was written in a URL.
func (p *probe) endpoints(spelling string) []inputStats {
	var out []inputStats
	for _, in := range p.stats().Inputs {
		if strings.HasPrefix(in.Name, spelling+".api-ingress-") {
			out = append(out, in)
		}
	}
	return out
}

// counted sums a number over the endpoints of a spelling.
func (p *probe) counted(spelling string, f func(inputStats) uint64) uint64 {
	var n uint64
	for _, in := range p.endpoints(spelling) {
		n += f(in)
	}
	return n
}

// sim gives the simulator; clauses that use it need faults.
func (p *probe) sim() *felderasim.Sim {
	if p.w.sim == nil {
		p.failf("expected a simulator, got a real target: the clause does not say that it needs faults")
	}
	return p.w.sim
}

// inject makes the next matching requests fail.
func (p *probe) inject(f felderasim.Fault) {
	if _, err := p.sim().Inject(f); err != nil {
		p.failf("expected a fault of kind %s, got %v", f.Kind, err)
	}
}

// begin opens a transaction, which is committed when the clause is over, if it
// is still open then.
func (p *probe) begin() int64 {
	var t struct {
		ID int64 `json:"transaction_id"`
	}
	a := p.post("/start_transaction").is(http.StatusOK)
	p.has("the answer to start_transaction", a.members(), "transaction_id")
	a.into(&t)
	p.after(func() {
		if api := p.stats().Global.Initiators.API; api != nil && *api == "Started" {
			p.commit()
		}
	})
	return t.ID
}

func (p *probe) commit() {
	p.post("/commit_transaction").is(http.StatusOK).text("Transaction commit initiated")
}

// noTransaction waits until the engine has none.
func (p *probe) noTransaction() {
	p.until("the transaction has ended", func() bool { return p.stats().Global.TransactionStatus == "NoTransaction" })
}

// pause pauses the pipeline until the clause is over.
func (p *probe) pause() {
	p.command("pause", "pause")
	p.after(p.resume)
	p.until("the pipeline is Paused", func() bool { return p.stats().Global.State == "Paused" })
}

func (p *probe) resume() {
	p.command("resume", "start")
	p.until("the pipeline is Running", func() bool { return p.stats().Global.State == "Running" })
}

// command gives an order to the pipeline, by the manager's word for it or by
// the process's.
func (p *probe) command(manager, process string) answer {
	if p.w.root == "" {
		return p.get("/" + process).is(http.StatusAccepted)
	}
	return p.post("/" + manager).is(http.StatusAccepted)
}

// deployment reads the pipeline as the manager lists it.
func (p *probe) deployment() (status, id string) {
	var d struct {
		Status string `json:"deployment_status"`
		ID     string `json:"deployment_id"`
	}
	p.get("?selector=status").is(http.StatusOK).into(&d)
	return d.Status, d.ID
}

// stop stops the pipeline by force.
func (p *probe) stop() {
	p.post("/stop?force=true").is(http.StatusAccepted)
	p.until("the pipeline is Stopped", func() bool { s, _ := p.deployment(); return s == "Stopped" })
}

// start starts a stopped pipeline and waits until it answers.
func (p *probe) start() {
	p.post("/start").is(http.StatusAccepted)
	p.until("the pipeline is Running", func() bool {
		s, _ := p.deployment()
		return s == "Running" && p.get("/stats").status == http.StatusOK
	})
}

// restart makes a new incarnation.
func (p *probe) restart() { p.stop(); p.start() }

// incarnation is the running process.
func (p *probe) incarnation() string { return p.stats().Global.Incarnation }

// noErr ends the clause on an error that must not be.
func (p *probe) noErr(what string, err error) {
	if err != nil {
		p.failf("expected no error from %s, got %v", what, err)
	}
}

// errAs demands an error of a type.
func errAs[E error](p *probe, what string, err error) E {
	var e E
	if !errors.As(err, &e) {
		p.failf("expected %T from %s, got %v", e, what, err)
	}
	return e
}

// mustBe is errAs for those who need no more than the type.
func mustBe[E error](p *probe, what string, err error) { _ = errAs[E](p, what, err) }
