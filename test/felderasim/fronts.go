package felderasim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"holdfast/test/felderasim/core"
)

// front is which of the two servers a request came to.
type front string

const (
	managerFront front = "manager"
	bareFront    front = "bare"
)

func authAnswer(status int, code, message string) answer {
	// The manager carries these as a string body, without details.
	return answer{status: status, code: code, ctype: "text/plain; charset=utf-8", body: fmt.Appendf(nil, `{"message":%q,"error_code":%q}`, message, code)}
}

func errUnreachable(pipeline, why string) *core.APIError {
	return &core.APIError{
		Status: http.StatusServiceUnavailable, Code: "PipelineInteractionUnreachable",
		Message: "Error sending HTTP request to pipeline: " + why + ". Failed request: the pipeline may have received it.",
		Details: map[string]string{"pipeline_name": pipeline, "error": why},
	}
}

func errNotDeployed(status string) *core.APIError {
	return &core.APIError{
		Status: http.StatusServiceUnavailable, Code: "PipelineInteractionNotDeployed",
		Message: "Unable to interact with pipeline because the deployment status (" + status + ") indicates it is not (yet) fully provisioned " +
			"(i.e., it cannot be reached through the network)",
		Details: map[string]string{"status": status},
	}
}

// serveBare is the front of the pipeline process itself: no authentication,
// no time-outs, and no connection at all while it is down.
func (s *Sim) serveBare(w http.ResponseWriter, r *http.Request) {
	if strings.HasPrefix(r.URL.Path, "/sim/") {
		s.serveControl(w, r)
		return
	}
	c, ok := route(r.Method, r.URL.EscapedPath(), r.URL.Query())
	if !ok {
		http.NotFound(w, r)
		return
	}
	p := s.current()
	if !p.up {
		panic(http.ErrAbortHandler)
	}
	s.exchange(w, r, bareFront, p, c, 0)
}

func (s *Sim) current() *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc
}

// exchange runs one call with the faults that strike it. limit is the
// manager's time-out, 0 for none.
func (s *Sim) exchange(w http.ResponseWriter, r *http.Request, f front, p *process, c call, limit time.Duration) {
	faults := s.strike(c.endpoint, c.table)
	rec := s.record(f, c, r, faults)
	a := s.perform(r, f, p, c, limit, faults)
	s.finish(rec, a)
	if a.abort && f == managerFront && faults[DropRequest] == nil && faults[DropResponse] == nil && faults[CutBody] == nil {
		a = apiAnswer(errUnreachable(s.opts.Pipeline, "connection closed before message completed"))
	}
	a.write(w)
}

// perform has the process do the call, as the faults that strike it have it.
//
//nolint:contextcheck // the work lives as long as the simulator, not as its connection: see below
func (s *Sim) perform(r *http.Request, f front, p *process, c call, limit time.Duration, faults map[FaultKind]*activeFault) answer {
	cut := answer{abort: true}
	for _, k := range []FaultKind{TooMany, Unauthorized, Forbidden, UnavailableBefore, Answer} {
		if a, ok := faults[k]; ok {
			_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, s.opts.MaxBody)) // so that the client reads the answer, not a reset
			return faultAnswer(a)
		}
	}
	if _, ok := faults[DropRequest]; ok {
		return cut
	}
	if a, ok := faults[CrashBefore]; ok {
		s.Crash(a.Keep)
		return cut
	}
	if a, ok := faults[ApplyLate]; ok && c.endpoint == "ingress" {
		return s.putOff(r, p, c, a)
	}

	var expired <-chan time.Time
	if limit > 0 {
		t := time.NewTimer(limit)
		defer t.Stop()
		expired = t.C
	}
	pipe := newBodyPipe()
	defer pipe.finish(errAbandoned)
	// The process works on a request independently of the connection that
	// brought it: what the client has given up may still be applied.
	ctx, abandon := context.WithCancelCause(s.ctx)
	done := make(chan answer, 1)
	if !s.spawn(func() {
		defer abandon(nil)
		done <- s.work(ctx, p, c, pipe, faults)
	}) {
		abandon(errProcessDied)
		return cut
	}
	if c.endpoint == "ingress" {
		// The pump ends with the body, or when the connection is closed.
		s.spawn(func() { s.pump(r, pipe, faults[CutBody]) })
	}
	giveUp := func(cause error) {
		pipe.finish(cause)
		if s.opts.DropAbandoned {
			abandon(cause)
		}
	}
	select {
	case a := <-done:
		if x, ok := faults[HoldAnswer]; ok && !s.holdAnswer(r.Context(), p, x) {
			return cut
		}
		return s.after(a, f, c, faults)
	case <-expired:
		giveUp(errAbandoned)
		return apiAnswer(errUnreachable(s.opts.Pipeline, fmt.Sprintf("timeout (%ds) was reached", int(limit.Seconds()))))
	case <-r.Context().Done():
		giveUp(errAbandoned)
		return cut
	case <-p.dead:
		giveUp(errProcessDied)
		return cut
	}
}

// spawn runs f in a goroutine that Close waits for; false after Close.
func (s *Sim) spawn(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return false
	}
	s.owned.Go(f)
	return true
}

// pump moves the body from the connection into the pipe.
func (s *Sim) pump(r *http.Request, pipe *bodyPipe, cut *activeFault) {
	var total int64
	for {
		b := make([]byte, 64<<10)
		if cut != nil && cut.Bytes-total < int64(len(b)) {
			b = b[:max(0, cut.Bytes-total)]
			if len(b) == 0 {
				pipe.finish(errAbandoned)
				return
			}
		}
		n, err := r.Body.Read(b)
		total += int64(n)
		if n > 0 && !pipe.write(b[:n]) {
			return
		}
		switch {
		case errors.Is(err, io.EOF):
			pipe.finish(errBodyEnd)
			return
		case err != nil:
			pipe.finish(fmt.Errorf("payload error: %w", err))
			return
		}
	}
}

// work is what the process does with a call.
func (s *Sim) work(ctx context.Context, p *process, c call, pipe *bodyPipe, faults map[FaultKind]*activeFault) answer {
	if a, ok := faults[Delay]; ok {
		t := time.NewTimer(a.Delay)
		defer t.Stop()
		select {
		case <-t.C:
		case <-p.dead:
			return answer{abort: true}
		case <-ctx.Done():
			return answer{abort: true}
		}
	}
	if a, ok := faults[Hang]; ok {
		select {
		case <-a.ended:
		case <-p.dead:
			return answer{abort: true}
		case <-ctx.Done():
			return answer{abort: true}
		}
	}
	switch c.endpoint {
	case "ingress":
		leave := s.enter(c.table)
		a := s.ingest(ctx, p, c.table, c.query, pipe, rowRule{faults[RefuseRow], faults[StallRow], faults[CrashRow]})
		leave()
		if !a.abort {
			s.dueLate(c.table)
		}
		return a
	case "query":
		return s.queries.answer(ctx, p, c.query, faults[QueryError])
	}
	return s.answerCall(p, c)
}

// after applies the faults that strike once the request has been applied.
func (s *Sim) after(a answer, f front, c call, faults map[FaultKind]*activeFault) answer {
	if _, ok := faults[AppliedTwice]; ok && f == managerFront && c.method == http.MethodPost && c.endpoint != "ingress" {
		a = s.answerCall(s.current(), c)
	}
	if x, ok := faults[CrashAfter]; ok {
		s.Crash(x.Keep)
		return answer{abort: true, token: a.token, records: a.records, bytes: a.bytes}
	}
	for _, k := range []FaultKind{UnavailableAfter, AnswerAfter} {
		if x, ok := faults[k]; ok {
			b := faultAnswer(x)
			b.token, b.records, b.bytes = a.token, a.records, a.bytes
			return b
		}
	}
	if faults[DropResponse] != nil || faults[CutBody] != nil {
		a.abort = true
	}
	return a
}

// maxLate bounds the bodies that wait for a retry.
const maxLate = 256

// putOff takes the whole body and answers as if the request were lost; it is
// applied later.
func (s *Sim) putOff(r *http.Request, p *process, c call, f *activeFault) answer {
	body, err := io.ReadAll(io.LimitReader(r.Body, s.opts.MaxBody))
	if err != nil {
		return answer{abort: true}
	}
	l := &lateRequest{table: core.CanonicalName(c.table), spelling: c.table, query: c.query, body: body, proc: p, afterOne: f.Delay == 0}
	if f.Delay == 0 {
		s.mu.Lock()
		if len(s.late) < maxLate {
			s.late = append(s.late, l)
		} else {
			s.log.WarnContext(r.Context(), "too many late requests are held, one is dropped", "table", l.table)
		}
		s.mu.Unlock()
	} else {
		s.spawn(func() {
			t := time.NewTimer(f.Delay)
			defer t.Stop()
			select {
			case <-t.C:
				s.applyLate(l)
			case <-p.dead:
			case <-s.ctx.Done():
			}
		})
	}
	return answer{abort: true}
}

// serveManager is the front of the pipeline manager.
func (s *Sim) serveManager(w http.ResponseWriter, r *http.Request) {
	switch {
	case strings.HasPrefix(r.URL.Path, "/sim/"):
		s.serveControl(w, r)
		return
	case r.URL.Path == "/healthz" && r.Method == http.MethodGet:
		jsonAnswer(http.StatusOK, map[string]string{"status": "healthy"}).write(w)
		return
	case r.URL.Path == "/config/authentication" && r.Method == http.MethodGet:
		jsonAnswer(http.StatusOK, map[string]any{"NoAuth": map[string]any{}}).write(w)
		return
	}
	s.manage(r)(w, r)
}

// manage finds what the manager does with a request.
func (s *Sim) manage(r *http.Request) http.HandlerFunc {
	fixed := func(a answer) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, 1<<20)) // so that the client reads the answer, not a reset
			a.write(w)
		}
	}
	rest, ok := strings.CutPrefix(r.URL.EscapedPath(), "/v0/")
	if !ok {
		return http.NotFound
	}
	if a, ok := s.authorize(r); !ok {
		return fixed(a)
	}
	parts := strings.SplitN(rest, "/", 3)
	switch {
	case rest == "config" && r.Method == http.MethodGet:
		return fixed(jsonAnswer(http.StatusOK, map[string]any{"edition": string(s.opts.Edition), "version": simVersion, "revision": "simulator", "telemetry": "", "runtime_revision": "simulator"}))
	case rest == "cluster_healthz" && r.Method == http.MethodGet:
		return fixed(jsonAnswer(http.StatusOK, map[string]any{"all_healthy": true}))
	case rest == "pipelines" && r.Method == http.MethodGet:
		list := []any{}
		if s.known() {
			list = append(list, s.pipelineJSON(r.URL.Query().Get("selector")))
		}
		return fixed(jsonAnswer(http.StatusOK, list))
	case parts[0] != "pipelines" || len(parts) < 2:
		return http.NotFound
	}
	name, err := url.PathUnescape(parts[1])
	if h := s.managePrograms(r, name, len(parts) == 2); err == nil && h != nil {
		return h
	}
	if err != nil || name != s.opts.Pipeline || !s.known() {
		return fixed(apiAnswer(s.errUnknownPipeline(name)))
	}
	if len(parts) == 2 {
		if r.Method != http.MethodGet {
			return http.NotFound
		}
		return func(w http.ResponseWriter, r *http.Request) {
			s.exchangeFixed(w, r, "pipeline", func() answer {
				return jsonAnswer(http.StatusOK, s.pipelineJSON(r.URL.Query().Get("selector")))
			})
		}
	}
	return s.managePipeline(r, parts[2])
}

// managePipeline handles /v0/pipelines/{p}/what.
func (s *Sim) managePipeline(r *http.Request, what string) http.HandlerFunc {
	oss := s.opts.Edition == OpenSource
	control := func(endpoint string, f func() answer) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { s.exchangeFixed(w, r, endpoint, f) }
	}
	if r.Method == http.MethodPost {
		switch what {
		case "start":
			return control("start", func() answer { return s.startPipeline(r.URL.Query().Get("initial") == "paused") })
		case "stop":
			return control("stop", func() answer {
				if r.URL.Query().Get("force") != "true" {
					if oss {
						return apiAnswer(core.ErrEnterprise("stop without force"))
					}
					s.suspend()
					return jsonAnswer(http.StatusAccepted, "Pipeline is stopping")
				}
				s.stop()
				return jsonAnswer(http.StatusAccepted, "Pipeline is forcefully stopping")
			})
		case "clear":
			return control("clear", func() answer {
				if s.current().up {
					return apiAnswer(&core.APIError{Status: http.StatusBadRequest, Code: "StorageStatusImmutableUnlessStopped", Message: "The storage can only be cleared while the pipeline is stopped."})
				}
				s.clearStorage()
				return jsonAnswer(http.StatusAccepted, "Pipeline storage is being cleared")
			})
		case "checkpoint", "checkpoint/sync":
			if oss {
				return control("checkpoint", func() answer { return apiAnswer(core.ErrEnterprise(strings.ReplaceAll(what, "/", " "))) })
			}
		}
	}
	method, path := r.Method, what
	switch {
	case method == http.MethodPost && what == "pause":
		method = http.MethodGet
	case method == http.MethodPost && what == "resume":
		method, path = http.MethodGet, "start"
	case method == http.MethodGet && (what == "pause" || what == "start" || what == "status" || what == "metadata"):
		return http.NotFound // not routes of the manager
	case method == http.MethodGet && strings.HasPrefix(what, "tables/"):
		parts := strings.Split(what, "/")
		if len(parts) != 5 || parts[2] != "connectors" || parts[4] != "completion_token" {
			return http.NotFound
		}
		table, err := url.PathUnescape(parts[1])
		if err != nil {
			return http.NotFound
		}
		path = "input_endpoints/" + url.PathEscape(core.CanonicalName(table)) + "." + parts[3] + "/completion_token"
	}
	c, ok := route(method, path, r.URL.Query())
	if !ok || c.endpoint == "endpoint_pause" || c.endpoint == "endpoint_start" || c.endpoint == "endpoint_stats" {
		return http.NotFound
	}
	limit := s.opts.CallTimeout
	switch c.endpoint {
	case "ingress":
		limit = s.opts.IngressTimeout
	case "query":
		limit = 0
	case "checkpoint":
		limit = 120 * time.Second
	}
	return func(w http.ResponseWriter, r *http.Request) {
		p := s.current()
		if !p.up {
			_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, 1<<20)) // so that the client reads the answer, not a reset
			apiAnswer(errNotDeployed("Stopped")).write(w)
			return
		}
		s.exchange(w, r, managerFront, p, c, limit)
	}
}

// exchangeFixed answers a call that the manager handles by itself.
func (s *Sim) exchangeFixed(w http.ResponseWriter, r *http.Request, endpoint string, f func() answer) {
	faults := s.strike(endpoint, "")
	_, _ = io.Copy(io.Discard, io.LimitReader(r.Body, 1<<20)) // so that the client reads the answer, not a reset
	for k, x := range faults {
		switch k {
		case TooMany, Unauthorized, Forbidden, UnavailableBefore, Answer:
			faultAnswer(x).write(w)
			return
		case DropRequest:
			panic(http.ErrAbortHandler)
		case Delay:
			t := time.NewTimer(x.Delay)
			defer t.Stop()
			select {
			case <-t.C:
			case <-r.Context().Done():
				panic(http.ErrAbortHandler)
			}
		default:
		}
	}
	a := f()
	if faults[DropResponse] != nil {
		a.abort = true
	}
	if x, ok := faults[UnavailableAfter]; ok {
		a = faultAnswer(x)
	}
	a.write(w)
}

// authorize checks the API key. Reading is GET, but for the calls that the
// manager counts as writing.
func (s *Sim) authorize(r *http.Request) (answer, bool) {
	s.mu.Lock()
	key := s.apiKey
	s.mu.Unlock()
	if key == "" {
		return answer{}, true
	}
	given, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	switch {
	case given == key:
		return answer{}, true
	case s.opts.ReadOnlyKey != "" && given == s.opts.ReadOnlyKey:
		path := r.URL.Path
		if r.Method == http.MethodGet && !strings.HasSuffix(path, "/query") && !strings.HasSuffix(path, "/completion_token") {
			return answer{}, true
		}
		return authAnswer(http.StatusForbidden, "InsufficientPermissions", "The role of this API key does not allow the operation"), false
	}
	return authAnswer(http.StatusUnauthorized, "AuthenticationFailed", "Authorization failed: the API key is not valid"), false
}

// stop ends the process as the manager's forced stop does: no error is left.
func (s *Sim) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.killLocked("the pipeline was stopped")
	s.proc.err = ""
	s.pipe.wanted = false
}

// suspend takes a checkpoint of everything ingested and stops.
func (s *Sim) suspend() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.engine.RequestCheckpoint(); err == nil {
		for s.engine.AdvanceCheckpoint() {
			continue
		}
	}
	s.killLocked("the pipeline was suspended")
	s.proc.err = ""
}

// simVersion is the engine version whose contract is simulated.
const simVersion = "0.337.0"

// pipelineJSON is the pipeline as the manager lists it.
func (s *Sim) pipelineJSON(selector string) map[string]any {
	s.mu.Lock()
	defer s.mu.Unlock()
	status, resources := string(s.engine.State()), "Provisioned"
	var deployErr any
	var runtime any = status
	desired := "Running"
	switch s.engine.State() {
	case core.StatePaused:
		desired = "Paused"
	case core.StateRestoring:
		status = "Initializing"
	case core.StateFailed, core.StateTerminating:
		status = "Unavailable"
	default:
	}
	if !s.proc.up {
		status, resources, runtime, desired = "Stopped", "Stopped", nil, "Stopped"
		if s.proc.err != "" {
			deployErr = map[string]any{"message": s.proc.err, "error_code": "RunnerDeploymentShutdown", "details": nil}
		}
	}
	model := s.opts.Model
	setDefault(&model, core.ModelNone)
	out := map[string]any{
		"id": "019a0000-0000-7000-8000-00000000beef", "name": s.opts.Pipeline, "description": "simulated", "version": 1, "refresh_version": 1,
		"platform_version": simVersion, "program_status": "Success",
		"deployment_id": s.proc.id, "deployment_status": status, "deployment_desired_status": desired,
		"deployment_resources_status": resources, "deployment_runtime_status": runtime, "deployment_error": deployErr,
		"storage_status": "InUse",
	}
	if selector == "" || selector == "all" {
		workers := s.opts.Workers
		setDefault(&workers, 8)
		out["program_code"] = s.engine.Program().Text
		out["program_info"] = map[string]any{"schema": s.engine.Program().Schema()}
		out["runtime_config"] = map[string]any{
			"workers": workers, "storage": map[string]any{"backend": map[string]string{"name": "default"}},
			"fault_tolerance": map[string]any{"model": model, "checkpoint_interval_secs": 60},
		}
	}
	s.programJSONLocked(out, selector == "" || selector == "all")
	return out
}

// readAll is for control requests: small bodies only.
func readAll(r *http.Request) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	return bytes.TrimSpace(b), err
}
