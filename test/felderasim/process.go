package felderasim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"holdfast/test/felderasim/core"
)

// answer is what the process says to a call.
type answer struct {
	status  int
	body    []byte
	ctype   string
	abort   bool // the connection is cut instead
	code    string
	token   string
	records int
	bytes   int64
}

func apiAnswer(e *core.APIError) answer {
	return answer{status: e.Status, body: e.JSON(), ctype: "application/json", abort: e.Abort, code: e.Code}
}

func jsonAnswer(status int, v any) answer {
	b, err := json.Marshal(v)
	if err != nil {
		return apiAnswer(&core.APIError{Status: http.StatusInternalServerError, Code: "Internal", Message: err.Error()})
	}
	return answer{status: status, body: b, ctype: "application/json"}
}

func (a answer) write(w http.ResponseWriter) {
	if a.abort {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", a.ctype)
	w.WriteHeader(a.status)
	_, _ = w.Write(a.body) // the client may be gone; nothing to be done
}

// call is one request to the pipeline process.
type call struct {
	endpoint string // the name faults match
	method   string
	table    string // of ingress, as spelled
	arg      string // of input_endpoints: the endpoint's name
	query    url.Values
}

// route finds the process call behind a method and an escaped path.
func route(method, escaped string, q url.Values) (call, bool) {
	parts := strings.Split(strings.Trim(escaped, "/"), "/")
	c := call{method: method, query: q}
	for i, p := range parts {
		u, err := url.PathUnescape(p)
		if err != nil {
			return c, false
		}
		parts[i] = u
	}
	switch {
	case len(parts) == 2 && parts[0] == "ingress" && method == http.MethodPost:
		c.endpoint, c.table = "ingress", parts[1]
		return c, true
	case len(parts) == 3 && parts[0] == "input_endpoints" && method == http.MethodGet:
		switch parts[2] {
		case "completion_token", "pause", "start", "stats":
			c.endpoint, c.arg = "endpoint_"+parts[2], parts[1]
			if parts[2] == "completion_token" {
				c.endpoint = "completion_token"
			}
			return c, true
		}
	case len(parts) == 1:
		want := http.MethodGet
		switch parts[0] {
		case "start_transaction", "commit_transaction", "checkpoint":
			want = http.MethodPost
		case "completion_status", "checkpoint_status", "checkpoints", "query", "stats", "status", "start", "pause", "metadata":
		default:
			return c, false
		}
		if method == want {
			c.endpoint = parts[0]
			return c, true
		}
	}
	return c, false
}

// answerCall runs every call but ingress and query. It does not block.
func (s *Sim) answerCall(p *process, c call) answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p != s.proc || !p.up {
		return answer{abort: true}
	}
	e := s.engine
	fail := func(err *core.APIError) answer { return apiAnswer(err) }
	if err := e.Ready(); err != nil && c.endpoint != "status" && c.endpoint != "metadata" {
		return fail(err)
	}
	switch c.endpoint {
	case "completion_status":
		s.count.Polls++
		if !c.query.Has("token") {
			return fail(&core.APIError{
				Status: http.StatusBadRequest, Code: "MissingUrlEncodedParam",
				Message: "Missing URL-encoded parameter 'token'.", Details: map[string]string{"param": "token"},
			})
		}
		st, err := e.CompletionStatus(c.query.Get("token"))
		if err != nil {
			return fail(err)
		}
		return jsonAnswer(http.StatusOK, st)
	case "completion_token":
		t, err := e.EndpointToken(c.arg)
		if err != nil {
			return fail(err)
		}
		return jsonAnswer(http.StatusOK, map[string]string{"token": t})
	case "endpoint_pause", "endpoint_start":
		if err := e.PauseEndpoint(c.arg, c.endpoint == "endpoint_pause"); err != nil {
			return fail(err)
		}
		s.notifyLocked()
		return jsonAnswer(http.StatusOK, nil)
	case "endpoint_stats":
		for _, in := range e.Stats().Inputs {
			if in.EndpointName == c.arg {
				return jsonAnswer(http.StatusOK, in)
			}
		}
		return fail(e.PauseEndpoint(c.arg, false))
	case "start_transaction":
		id, err := e.StartTransaction()
		if err != nil {
			return fail(err)
		}
		s.notifyLocked()
		return jsonAnswer(http.StatusOK, map[string]uint64{"transaction_id": id})
	case "commit_transaction":
		if err := e.CommitTransaction(); err != nil {
			return fail(err)
		}
		s.notifyLocked()
		return jsonAnswer(http.StatusOK, "Transaction commit initiated")
	case "checkpoint":
		seq, err := e.RequestCheckpoint()
		if err != nil {
			return fail(err)
		}
		s.notifyLocked()
		return jsonAnswer(http.StatusOK, struct {
			Seq  uint64 `json:"checkpoint_sequence_number"`
			UUID string `json:"incarnation_uuid"`
		}{seq, e.Incarnation()})
	case "checkpoint_status":
		st, err := e.CheckpointStatus(c.query.Get("incarnation_uuid"))
		if err != nil {
			return fail(err)
		}
		return jsonAnswer(http.StatusOK, st)
	case "checkpoints":
		return jsonAnswer(http.StatusOK, e.Checkpoints())
	case "stats":
		return jsonAnswer(http.StatusOK, e.Stats())
	case "status":
		return jsonAnswer(http.StatusOK, map[string]any{
			"runtime_status": string(e.State()), "runtime_status_details": "", "runtime_desired_status": "Running", "storage_status_details": nil,
		})
	case "metadata":
		return jsonAnswer(http.StatusOK, e.Program().Schema())
	case "pause", "start":
		if c.endpoint == "pause" {
			e.SetState(core.StatePaused)
		} else {
			e.SetState(core.StateRunning)
		}
		s.notifyLocked()
		word := map[string]string{"pause": "Pipeline is pausing", "start": "Pipeline is resuming"}[c.endpoint]
		return jsonAnswer(http.StatusAccepted, word)
	}
	return answer{status: http.StatusNotFound, ctype: "text/plain"}
}

// errBodyEnd ends a bodyPipe whose body was complete.
var errBodyEnd = io.EOF

// wait blocks until ok, called under the lock, gives true.
func (s *Sim) wait(ctx context.Context, p *process, ok func() (bool, *core.APIError)) (*core.APIError, error) {
	for {
		s.mu.Lock()
		if p != s.proc || !p.up {
			s.mu.Unlock()
			return nil, errProcessDied
		}
		done, aerr := ok()
		if done || aerr != nil {
			s.mu.Unlock()
			return aerr, nil
		}
		ch := s.changeLocked()
		s.mu.Unlock()
		select {
		case <-ch:
		case <-p.dead:
			return nil, errProcessDied
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// ingest is the process's side of POST /ingress/{table}: it reads the body as
// long as the pipeline lets it, queues chunk by chunk, and answers at the
// body's end.
func (s *Sim) ingest(ctx context.Context, p *process, spelling string, q url.Values, body *bodyPipe, rule rowRule) answer {
	pc, aerr := core.ParserConfigFromQuery(spelling, q)
	if aerr != nil {
		return apiAnswer(aerr)
	}
	force := q.Get("force") == "true"
	s.mu.Lock()
	if p != s.proc || !p.up {
		s.mu.Unlock()
		return answer{abort: true}
	}
	ep, aerr := s.engine.Open(spelling, pc)
	if aerr != nil {
		s.mu.Unlock()
		return apiAnswer(aerr)
	}
	lock := s.parserLock(p, ep)
	s.mu.Unlock()

	var errs core.ParseErrors
	a := answer{}
	for {
		aerr, err := s.wait(ctx, p, func() (bool, *core.APIError) {
			if st := s.engine.State(); st == core.StateRestoring || st == core.StateBootstrapping || st == core.StateInitializing {
				return false, nil // an endpoint that exists already blocks
			}
			return s.engine.Reading(ep, force)
		})
		switch {
		case err != nil:
			a.abort = true
			return a
		case aerr != nil:
			return apiAnswer(aerr)
		}
		chunk, err := body.next()
		if err != nil && !errors.Is(err, errBodyEnd) {
			s.do(func(e *core.Engine) {
				if p == s.proc {
					e.TransportError(ep, err.Error())
				}
			})
			return apiAnswer(&core.APIError{
				Status: http.StatusInternalServerError, Code: "InputTransportError",
				Message: fmt.Sprintf("FATAL error on input endpoint '%s': %v", ep.Name, err), Details: map[string]any{"endpoint_name": ep.Name, "fatal": true},
			})
		}
		a.bytes += int64(len(chunk))
		if a.bytes > s.opts.MaxBody {
			return apiAnswer(&core.APIError{
				Status: http.StatusRequestEntityTooLarge, Code: "SimulatorLimit",
				Message: fmt.Sprintf("the body exceeds the simulator's own limit of %d bytes (Options.MaxBody); the engine has none", s.opts.MaxBody),
			})
		}
		if rule.crashes(chunk) {
			s.Crash(rule.crash.Keep)
			a.abort = true
			return a
		}
		if rule.stalls(ctx, p, chunk) {
			a.abort = true
			return a
		}
		end := err != nil
		// The parser's lock is held until its entries are queued, so that
		// requests to one endpoint keep their order chunk by chunk.
		lock.Lock()
		had := errs.Num
		ep.Parser.Refuse, ep.Parser.Silent = rule.refuses()
		entries, aerr := ep.Parser.Feed(chunk, end, &errs)
		s.mu.Lock()
		alive := p == s.proc && p.up
		if alive && aerr == nil {
			for _, en := range entries {
				s.engine.Push(ep, en)
				a.records += en.Records
			}
			s.engine.ParseErrors(ep, errs.Num-had) // counted as they come, not when the request ends
			if end && errs.Num == 0 {
				a.token = s.engine.Token(ep)
			}
			s.count.Records += int64(sum(entries))
			s.count.Bytes += int64(len(chunk))
			s.notifyLocked()
		}
		s.mu.Unlock()
		lock.Unlock()
		switch {
		case !alive:
			a.abort = true
			return a
		case aerr != nil:
			return apiAnswer(aerr)
		case !end:
			continue
		}
		if e := errs.Err(); e != nil {
			r := apiAnswer(e)
			r.records, r.bytes = a.records, a.bytes
			return r
		}
		r := jsonAnswer(http.StatusOK, map[string]string{"token": a.token})
		r.token, r.records, r.bytes = a.token, a.records, a.bytes
		return r
	}
}

func sum(entries []core.Entry) int {
	n := 0
	for _, e := range entries {
		n += e.Records
	}
	return n
}
