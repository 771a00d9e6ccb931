package felderasim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"holdfast/test/felderasim/core"
)

// CompilePhase is a program_status on the way to a compiled program.
type CompilePhase string

// The phases that a compilation goes through, and how it can end.
const (
	Pending       CompilePhase = "Pending"
	CompilingSQL  CompilePhase = "CompilingSql"
	SQLCompiled   CompilePhase = "SqlCompiled"
	CompilingRust CompilePhase = "CompilingRust"
	Compiled      CompilePhase = "Success"
	SQLError      CompilePhase = "SqlError"
	RustError     CompilePhase = "RustError"
)

// managed is the manager's side of the pipeline: what there is besides the
// process. The zero value is a pipeline that was compiled long ago.
type managed struct {
	absent  bool
	changes int64 // versions since New
	// code is the program's text once it has been changed, phase its state
	// since then; "" for the program that New got.
	code  string
	phase CompilePhase
	sql   []sqlMessage
	rust  string // what the Rust compiler said, "" for nothing
	// hold keeps compilations in a phase; failRust ends the next in an error.
	hold     CompilePhase
	failRust string
	// wanted starts the pipeline once it is compiled.
	wanted  bool
	cleared bool
}

// sqlMessage is one entry of program_error.sql_compilation.messages.
type sqlMessage struct {
	StartLine   int     `json:"start_line_number"`
	StartColumn int     `json:"start_column"`
	EndLine     int     `json:"end_line_number"`
	EndColumn   int     `json:"end_column"`
	Warning     bool    `json:"warning"`
	Type        string  `json:"error_type"`
	Message     string  `json:"message"`
	Snippet     *string `json:"snippet"`
}

// maxProgram bounds the body of a change, in bytes.
const maxProgram = 16 << 20

// programChange is the body of PUT and PATCH.
type programChange struct {
	Name        *string `json:"name"`
	ProgramCode *string `json:"program_code"`
}

// RemovePipeline deletes the pipeline: the manager then knows none of its
// name, until somebody PUTs one.
func (s *Sim) RemovePipeline() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.killLocked("the pipeline was deleted")
	s.proc.err = ""
	s.pipe = managed{absent: true, changes: s.pipe.changes, hold: s.pipe.hold, failRust: s.pipe.failRust, cleared: true}
}

// HoldCompile keeps every compilation in a phase, once it gets there.
func (s *Sim) HoldCompile(phase CompilePhase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pipe.hold = phase
	s.notifyLocked()
}

// ReleaseCompile ends HoldCompile.
func (s *Sim) ReleaseCompile() { s.HoldCompile("") }

// FailRust lets the next compilation end in RustError with this text.
func (s *Sim) FailRust(stderr string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pipe.failRust = stderr
}

// ProgramCode is the program's text, as the manager has it.
func (s *Sim) ProgramCode() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.programCodeLocked()
}

// ProgramPhase is the state of the program's compilation.
func (s *Sim) ProgramPhase() CompilePhase {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.phaseLocked()
}

// Deployed tells whether the pipeline exists and has a process.
func (s *Sim) Deployed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.pipe.absent && s.proc.up
}

func (s *Sim) phaseLocked() CompilePhase {
	if s.pipe.phase == "" {
		return Compiled
	}
	return s.pipe.phase
}

func (s *Sim) programCodeLocked() string {
	if s.pipe.phase == "" {
		return s.engine.Program().Text
	}
	return s.pipe.code
}

// managePrograms handles what the manager answers from its database alone:
// making, changing and deleting the pipeline. It gives nil for all else.
func (s *Sim) managePrograms(r *http.Request, name string, whole bool) http.HandlerFunc {
	if !whole || name != s.opts.Pipeline {
		return nil
	}
	switch r.Method {
	case http.MethodPut, http.MethodPatch:
		return s.serveChange
	case http.MethodDelete:
		return func(w http.ResponseWriter, r *http.Request) {
			s.exchangeFixed(w, r, "pipeline_delete", s.deletePipeline)
		}
	}
	return nil
}

// known tells whether the manager has the pipeline.
func (s *Sim) known() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.pipe.absent
}

func (s *Sim) errUnknownPipeline(name string) *core.APIError {
	return &core.APIError{
		Status: http.StatusNotFound, Code: "UnknownPipelineName", Message: fmt.Sprintf("Unknown pipeline name '%s'", name),
		Details: map[string]string{"pipeline_name": name},
	}
}

func (s *Sim) serveChange(w http.ResponseWriter, r *http.Request) {
	var c programChange
	body, err := io.ReadAll(io.LimitReader(r.Body, maxProgram))
	if err == nil {
		err = json.Unmarshal(body, &c)
	}
	s.exchangeFixed(w, r, "pipeline_change", func() answer {
		if err == nil && r.Method == http.MethodPut && (c.Name == nil || c.ProgramCode == nil) {
			err = errors.New("missing field `name` or `program_code`")
		}
		if err != nil {
			return answer{status: http.StatusBadRequest, ctype: "text/plain; charset=utf-8", body: []byte("Json deserialize error: " + err.Error())}
		}
		return s.change(r.Method, c)
	})
}

// change is PUT and PATCH: a program can be changed only while the pipeline is
// stopped, and is then compiled anew.
func (s *Sim) change(method string, c programChange) answer {
	s.mu.Lock()
	created := s.pipe.absent
	switch {
	case created && method == http.MethodPatch:
		s.mu.Unlock()
		return apiAnswer(s.errUnknownPipeline(s.opts.Pipeline))
	case c.Name != nil && *c.Name != s.opts.Pipeline:
		s.mu.Unlock()
		return apiAnswer(&core.APIError{
			Status: http.StatusBadRequest, Code: "SimulatorLimit", Message: "the simulator has one pipeline, whose name does not change",
		})
	case !created && (s.proc.up || s.pipe.wanted):
		s.mu.Unlock()
		return apiAnswer(&core.APIError{
			Status: http.StatusBadRequest, Code: "UpdateRestrictedToStopped",
			Message: "Pipeline can only be updated while stopped. Stop it first by invoking '/stop'.",
		})
	}
	if created {
		s.pipe.absent = false
	}
	changed := c.ProgramCode != nil && (created || *c.ProgramCode != s.programCodeLocked())
	if changed {
		s.pipe.changes++
		s.pipe.code, s.pipe.phase, s.pipe.sql, s.pipe.rust = *c.ProgramCode, Pending, nil, ""
	}
	version := s.pipe.changes
	s.notifyLocked()
	s.mu.Unlock()
	if changed {
		s.spawn(func() { s.compile(version) })
	}
	status := http.StatusOK
	if created {
		status = http.StatusCreated
	}
	return jsonAnswer(status, s.pipelineJSON(""))
}

// compile takes one version of the program through its phases, as far as it is
// let, and gives up when there is a newer one. A new program starts from
// nothing: the simulator carries neither rows nor what Hold… had frozen from
// one program to the next.
func (s *Sim) compile(version int64) {
	var engine *core.Engine
	for {
		s.mu.Lock()
		if s.pipe.changes != version || s.pipe.absent {
			s.mu.Unlock()
			return
		}
		if s.pipe.hold == s.pipe.phase {
			ch := s.changeLocked()
			s.mu.Unlock()
			select {
			case <-ch:
				continue
			case <-s.ctx.Done():
				return
			}
		}
		done := s.compileStepLocked(&engine)
		s.notifyLocked()
		s.mu.Unlock()
		if done {
			return
		}
	}
}

// compileStepLocked moves the compilation on by one phase.
func (s *Sim) compileStepLocked(engine **core.Engine) (done bool) {
	switch s.pipe.phase {
	case Pending:
		s.pipe.phase = CompilingSQL
	case CompilingSQL:
		e, err := s.newEngine(s.pipe.code)
		if err != nil {
			s.pipe.phase, s.pipe.wanted = SQLError, false
			line := lineIn(err.Error())
			s.pipe.sql = []sqlMessage{{StartLine: line, StartColumn: 1, EndLine: line, EndColumn: 1, Type: "Error parsing SQL", Message: err.Error()}}
			return true
		}
		*engine = e
		s.pipe.phase = SQLCompiled
	case SQLCompiled:
		s.pipe.phase = CompilingRust
	case CompilingRust:
		if s.pipe.failRust != "" {
			s.pipe.phase, s.pipe.rust, s.pipe.failRust, s.pipe.wanted = RustError, s.pipe.failRust, "", false
			return true
		}
		s.engine, s.pipe.phase = *engine, Compiled
		if s.pipe.wanted {
			s.bringUpLocked()
		}
		return true
	case Compiled, SQLError, RustError:
		return true
	}
	return false
}

func (s *Sim) newEngine(code string) (*core.Engine, error) {
	prog, err := core.ParseProgram(code)
	if err != nil {
		return nil, err
	}
	return core.New(core.Config{
		Program: prog, Model: s.opts.Model, Enterprise: s.opts.Edition == Enterprise,
		Workers: s.opts.Workers, Null: s.opts.Null, NewUUID: uuidV7, Now: time.Now,
	})
}

var lineNumber = regexp.MustCompile(`line (\d+)`)

// lineIn finds the line that a parser's error names, 1 where it names none.
func lineIn(text string) int {
	if m := lineNumber.FindStringSubmatch(text); m != nil {
		if n, err := strconv.Atoi(m[1]); err == nil {
			return n
		}
	}
	return 1
}

// startPipeline is POST start. A program that is still being compiled starts
// when it is done.
func (s *Sim) startPipeline(paused bool) answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch phase := s.phaseLocked(); {
	case strings.HasSuffix(string(phase), "Error"):
		return apiAnswer(&core.APIError{
			Status: http.StatusBadRequest, Code: "CannotStartWithCompilationError",
			Message: "Cannot process `/start` if the `program_status` is `SqlError`, `RustError` or `SystemError`. Make changes to fix the error, which will trigger recompilation.",
		})
	case phase != Compiled:
		s.pipe.wanted = true
	default:
		s.bringUpLocked()
		if paused {
			s.engine.SetState(core.StatePaused)
		} else if s.engine.State() == core.StatePaused {
			s.engine.SetState(core.StateRunning)
		}
	}
	s.notifyLocked()
	return jsonAnswer(http.StatusAccepted, "Pipeline is starting")
}

func (s *Sim) bringUpLocked() {
	s.pipe.wanted, s.pipe.cleared = false, false
	s.restartLocked(core.KeepByModel)
}

func (s *Sim) deletePipeline() answer {
	s.mu.Lock()
	refused := func(code, message string) answer {
		s.mu.Unlock()
		return apiAnswer(&core.APIError{Status: http.StatusBadRequest, Code: code, Message: message})
	}
	switch {
	case s.pipe.absent:
		s.mu.Unlock()
		return apiAnswer(s.errUnknownPipeline(s.opts.Pipeline))
	case s.proc.up || s.pipe.wanted:
		return refused("DeleteRestrictedToFullyStopped", "Cannot delete a pipeline which is not fully stopped. Stop the pipeline first fully by invoking the '/stop' endpoint.")
	case !s.pipe.cleared:
		return refused("DeleteRestrictedToClearedStorage", "Cannot delete pipeline unless its storage is cleared. Clear storage first using `/clear`.")
	}
	s.mu.Unlock()
	s.RemovePipeline()
	return answer{status: http.StatusOK, ctype: "text/plain; charset=utf-8"}
}

// clearStorage is POST clear of a stopped pipeline.
func (s *Sim) clearStorage() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.engine.Crash(core.KeepNothing)
	s.pipe.cleared = true
	s.notifyLocked()
}

// programJSONLocked adds what is known of the program to a pipeline's JSON.
func (s *Sim) programJSONLocked(out map[string]any, whole bool) {
	phase := s.phaseLocked()
	out["program_status"] = string(phase)
	out["program_version"] = 1 + s.pipe.changes
	out["version"], out["refresh_version"] = 1+s.pipe.changes, 1+s.pipe.changes
	if s.pipe.wanted {
		out["deployment_desired_status"] = "Running"
	}
	if s.pipe.cleared {
		out["storage_status"] = "Cleared"
	}
	if !whole {
		return
	}
	out["program_code"] = s.programCodeLocked()
	failure := map[string]any{"sql_compilation": nil, "rust_compilation": nil, "system_error": nil}
	out["program_error"] = failure
	switch phase {
	case Pending, CompilingSQL:
		out["program_info"] = nil
		return
	case SQLError:
		out["program_info"] = nil
		failure["sql_compilation"] = map[string]any{"exit_code": 1, "messages": s.pipe.sql}
		return
	case RustError:
		failure["rust_compilation"] = map[string]any{"exit_code": 101, "stdout": "", "stderr": s.pipe.rust}
	case SQLCompiled, CompilingRust, Compiled:
	}
	if phase != Compiled {
		// The schema is known before the binary is; the engine comes with it.
		if prog, err := core.ParseProgram(s.pipe.code); err == nil {
			out["program_info"] = map[string]any{"schema": prog.Schema()}
		}
	}
	failure["sql_compilation"] = map[string]any{"exit_code": 0, "messages": []sqlMessage{}}
}
