package felderasim

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	"holdfast/test/felderasim/core"
)

// FaultKind is what goes wrong with a request.
type FaultKind string

// The kinds of faults.
const (
	// Delay holds the request for Fault.Delay before the process looks at
	// it. The manager's time-out runs meanwhile; what its client gave up is
	// still applied afterwards.
	Delay FaultKind = "delay"
	// Hang holds it until the fault is cleared.
	Hang FaultKind = "hang"
	// DropRequest cuts the connection before anything is applied.
	DropRequest FaultKind = "drop_request"
	// DropResponse applies the request and cuts the connection then.
	DropResponse FaultKind = "drop_response"
	// UnavailableBefore answers 503 without applying anything.
	UnavailableBefore FaultKind = "unavailable_before"
	// UnavailableAfter applies the request and answers 503.
	UnavailableAfter FaultKind = "unavailable_after"
	// ApplyLate answers 503 (on the bare front it cuts the connection) at
	// once, and applies the request later: after the next request to the same
	// table has been applied, or after Fault.Delay if that is set.
	ApplyLate FaultKind = "apply_late"
	// CutBody reads Fault.Bytes of the body and cuts the connection. What the
	// process had of an incomplete chunk stays in the endpoint.
	CutBody FaultKind = "cut_body"
	// TooMany answers 429 without applying anything.
	TooMany FaultKind = "too_many"
	// Unauthorized answers 401, Forbidden 403.
	Unauthorized FaultKind = "unauthorized"
	Forbidden    FaultKind = "forbidden"
	// Answer answers Fault.Status, Code and Message without applying
	// anything; AnswerAfter applies the request first.
	Answer      FaultKind = "answer"
	AnswerAfter FaultKind = "answer_after"
	// HoldAnswer applies the request and holds its answer until the fault is
	// cleared; AnswersHeld counts those that wait.
	HoldAnswer FaultKind = "hold_answer"
	// AppliedTwice makes the manager send a non-streaming POST twice, as it
	// does when its first try broke off: the second answer is the client's.
	AppliedTwice FaultKind = "applied_twice"
	// QueryError puts an error into the body of a query that was already
	// answered 200, after Fault.Rows rows.
	QueryError FaultKind = "query_error"
	// CrashBefore and CrashAfter crash the process, to what Fault.Keep names,
	// before or after the request is applied; the request gets no answer from
	// it: the bare front cuts the connection, the manager says 503.
	CrashBefore FaultKind = "crash_before"
	CrashAfter  FaultKind = "crash_after"
	// RefuseRow makes every row with the text Fault.Match a parse error, as a
	// rule of the pipeline beside the columns' types would; with Fault.Silent the
	// answer does not say which. StallRow never answers a request in one piece of
	// whose body the text is, and answers every other one. CrashRow crashes the
	// process, to what Fault.Keep names, at such a request.
	RefuseRow FaultKind = "refuse_row"
	StallRow  FaultKind = "stall_row"
	CrashRow  FaultKind = "crash_row"
)

var faultKinds = []FaultKind{
	Delay, Hang, DropRequest, DropResponse, UnavailableBefore, UnavailableAfter, ApplyLate, CutBody, TooMany,
	Unauthorized, Forbidden, Answer, AnswerAfter, HoldAnswer, AppliedTwice, QueryError, CrashBefore, CrashAfter,
	RefuseRow, StallRow, CrashRow,
}

// Fault is one thing that goes wrong, for the requests it matches.
type Fault struct {
	Kind FaultKind `json:"kind"`
	// Endpoint is the call it strikes: "ingress" (default), "query", "stats",
	// "completion_status", "start_transaction", "commit_transaction",
	// "checkpoint", "checkpoint_status", "checkpoints", "pipeline", …, or "*".
	Endpoint string `json:"endpoint,omitempty"`
	// Table limits it to one table, as its name is written in a URL.
	Table string `json:"table,omitempty"`
	// Skip lets that many matching requests pass first.
	Skip int `json:"skip,omitempty"`
	// Count is how many requests it strikes: 0 means one, negative all.
	Count int `json:"count,omitempty"`
	// Delay for the kinds Delay and ApplyLate.
	Delay time.Duration `json:"delay_ns,omitempty"`
	// Status, Code, Message and Details for Answer.
	Status  int             `json:"status,omitempty"`
	Code    string          `json:"code,omitempty"`
	Message string          `json:"message,omitempty"`
	Details json.RawMessage `json:"details,omitempty"`
	// Rows for QueryError, Bytes for CutBody.
	Rows  int   `json:"rows,omitempty"`
	Bytes int64 `json:"bytes,omitempty"`
	// Match for RefuseRow, StallRow and CrashRow, Silent for the first.
	Match  string `json:"match,omitempty"`
	Silent bool   `json:"silent,omitempty"`
	// Keep for the crashes.
	Keep core.Keep `json:"keep,omitempty"`
}

type activeFault struct {
	Fault
	id    string
	hits  int
	held  int           // answers, of HoldAnswer
	ended chan struct{} // closed when it is cleared
}

// lateRequest was abandoned with its body complete; it is applied when due.
type lateRequest struct {
	table    string // canonical
	spelling string
	query    map[string][]string
	body     []byte
	proc     *process
	afterOne bool // after the next request to the table
}

// Inject adds a fault and gives its id.
func (s *Sim) Inject(f Fault) (string, error) {
	if !slices.Contains(faultKinds, f.Kind) {
		return "", fmt.Errorf("inject fault: unknown kind %q", f.Kind)
	}
	setDefault(&f.Endpoint, "ingress")
	setDefault(&f.Count, 1)
	if (f.Kind == Answer || f.Kind == AnswerAfter) && (f.Status < 200 || f.Status > 599) {
		return "", fmt.Errorf("inject fault: status %d is not an answer", f.Status)
	}
	if (f.Kind == RefuseRow || f.Kind == StallRow || f.Kind == CrashRow) && f.Match == "" {
		return "", fmt.Errorf("inject fault: %s needs a text to match", f.Kind)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faultID++
	a := &activeFault{Fault: f, id: strconv.Itoa(s.faultID), ended: make(chan struct{})}
	s.faults = append(s.faults, a)
	return a.id, nil
}

// ClearFault removes a fault; with "" all of them, and gives how many there
// were.
func (s *Sim) ClearFault(id string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.faults)
	s.faults = slices.DeleteFunc(s.faults, func(a *activeFault) bool {
		if id != "" && a.id != id {
			return false
		}
		close(a.ended)
		return true
	})
	s.notifyLocked()
	return n - len(s.faults)
}

// FaultHits is how many requests a fault has struck.
func (s *Sim) FaultHits(id string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.faults {
		if a.id == id {
			return a.hits
		}
	}
	return 0
}

// AnswersHeld is how many answers a fault of the kind HoldAnswer has held: what
// asked for them is applied.
func (s *Sim) AnswersHeld(id string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return View{s}.AnswersHeld(id)
}

// AnswersHeld is Sim.AnswersHeld.
func (v View) AnswersHeld(id string) int {
	for _, a := range v.s.faults {
		if a.id == id {
			return a.held
		}
	}
	return 0
}

// holdAnswer waits until the fault is cleared, and tells whether the answer is
// still of use then.
func (s *Sim) holdAnswer(ctx context.Context, p *process, a *activeFault) bool {
	s.mu.Lock()
	a.held++
	s.notifyLocked()
	s.mu.Unlock()
	select {
	case <-a.ended:
		return true
	case <-p.dead:
	case <-ctx.Done():
	case <-s.ctx.Done():
	}
	return false
}

// strike gives the faults that hit a request, each kind at most once.
func (s *Sim) strike(endpoint, table string) map[FaultKind]*activeFault {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out map[FaultKind]*activeFault
	for _, a := range s.faults {
		if a.Endpoint != "*" && a.Endpoint != endpoint || a.Table != "" && core.CanonicalName(a.Table) != core.CanonicalName(table) {
			continue
		}
		if _, dup := out[a.Kind]; dup {
			continue
		}
		if a.Skip > 0 {
			a.Skip--
			continue
		}
		if a.Count >= 0 && a.hits >= a.Count {
			continue
		}
		a.hits++
		s.count.FaultsInjected++
		if out == nil {
			out = map[FaultKind]*activeFault{}
		}
		out[a.Kind] = a
	}
	if out != nil {
		s.notifyLocked()
	}
	return out
}

// ApplyLateNow applies every request that ApplyLate or an abandoning client
// left behind for later, and gives how many there were.
func (s *Sim) ApplyLateNow() int {
	s.mu.Lock()
	late := s.late
	s.late = nil
	s.mu.Unlock()
	for _, l := range late {
		s.applyLate(l)
	}
	return len(late)
}

// dueLate applies the requests that waited for one to this table.
func (s *Sim) dueLate(table string) {
	s.mu.Lock()
	var due []*lateRequest
	s.late = slices.DeleteFunc(s.late, func(l *lateRequest) bool {
		if !l.afterOne || l.table != core.CanonicalName(table) {
			return false
		}
		due = append(due, l)
		return true
	})
	s.mu.Unlock()
	for _, l := range due {
		s.applyLate(l)
	}
}

// applyLate gives a late request to the process it was sent to, if that one
// still lives.
func (s *Sim) applyLate(l *lateRequest) {
	p := newBodyPipe()
	p.write(l.body)
	p.finish(errBodyEnd)
	a := s.ingest(s.ctx, l.proc, l.spelling, l.query, p, rowRule{})
	s.log.Info("late request applied", "table", l.table, "status", a.status)
}

func faultAnswer(f *activeFault) answer {
	switch f.Kind {
	case TooMany:
		return apiAnswer(core.ErrConnectionLimit())
	case Unauthorized:
		return authAnswer(401, "AuthenticationFailed", "Authorization failed: the API key is not valid")
	case Forbidden:
		return authAnswer(403, "InsufficientPermissions", "The role of this API key does not allow the operation")
	case UnavailableBefore, UnavailableAfter:
		return apiAnswer(errUnreachable("", "injected fault"))
	default:
		e := &core.APIError{Status: f.Status, Code: f.Code, Message: f.Message}
		if len(f.Details) > 0 {
			e.Details = f.Details
		}
		return apiAnswer(e)
	}
}

// rowRule are the faults of a request that depend on its rows; nil for none.
type rowRule struct{ refuse, stall, crash *activeFault }

// refuses gives what the parser needs.
func (r rowRule) refuses() (rule func(row []byte) bool, silent bool) {
	if r.refuse == nil {
		return nil, false
	}
	return func(row []byte) bool { return bytes.Contains(row, []byte(r.refuse.Match)) }, r.refuse.Silent
}

// stalls waits, where chunk has the text, until the fault, the process or ctx
// ends, and says that it did.
func (r rowRule) stalls(ctx context.Context, p *process, chunk []byte) bool {
	if r.stall == nil || !bytes.Contains(chunk, []byte(r.stall.Match)) {
		return false
	}
	select {
	case <-r.stall.ended:
	case <-p.dead:
	case <-ctx.Done():
	}
	return true
}

// crashes tells whether chunk has the text at which the process crashes.
func (r rowRule) crashes(chunk []byte) bool {
	return r.crash != nil && bytes.Contains(chunk, []byte(r.crash.Match))
}
