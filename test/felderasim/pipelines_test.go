package felderasim_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"holdfast/test/felderasim"
)

type pipelineJSON struct {
	Code    *string `json:"program_code"`
	Version int     `json:"program_version"`
	Status  string  `json:"program_status"`
	Info    *struct {
		Schema struct {
			Inputs []struct{ Name string } `json:"inputs"`
		} `json:"schema"`
	} `json:"program_info"`
	Error struct {
		SQL *struct {
			Exit     int `json:"exit_code"`
			Messages []struct {
				Line    int    `json:"start_line_number"`
				Message string `json:"message"`
			} `json:"messages"`
		} `json:"sql_compilation"`
		Rust *struct{ Stderr string } `json:"rust_compilation"`
	} `json:"program_error"`
	Deployment string `json:"deployment_status"`
	Desired    string `json:"deployment_desired_status"`
	Storage    string `json:"storage_status"`
}

func (c *client) pipeline(query string) (p pipelineJSON) {
	c.t.Helper()
	if err := json.Unmarshal([]byte(c.get(query, 200)), &p); err != nil {
		c.t.Fatal(err)
	}
	return p
}

func programBody(sql string) string { return fmt.Sprintf(`{"name":"p","program_code":%q}`, sql) }

const otherSQL = "CREATE TABLE other (id BIGINT NOT NULL PRIMARY KEY);"

// compiled waits until the program is in a phase.
func compiled(t *testing.T, sim *felderasim.Sim, phase felderasim.CompilePhase) {
	t.Helper()
	poll(t, func() bool { return sim.ProgramPhase() == phase })
}

func TestPipelineIsMadeCompiledAndStarted(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	sim.RemovePipeline()
	for _, path := range []string{"", "/stats", "/start_transaction"} {
		method := http.MethodGet
		if path == "/start_transaction" {
			method = http.MethodPost
		}
		if code := errorCode(t, c.do(method, path, "", 404)); code != "UnknownPipelineName" {
			t.Errorf("%s: %s", path, code)
		}
	}
	c.do(http.MethodPatch, "", `{"program_code":"x"}`, 404)
	c.do(http.MethodPut, "", `{"program_code":"x"}`, 400)
	c.do(http.MethodPut, "", `{`, 400)

	sim.HoldCompile(felderasim.Pending)
	c.do(http.MethodPut, "", programBody(otherSQL), 201)
	if p := c.pipeline(""); p.Status != "Pending" || p.Info != nil || *p.Code != otherSQL || p.Deployment != "Stopped" || p.Version != 2 {
		t.Errorf("%+v", p)
	}
	c.post("/start", "", 202) // goes on when it is compiled
	if p := c.pipeline("?selector=status"); p.Desired != "Running" || p.Code != nil || p.Deployment != "Stopped" {
		t.Errorf("%+v", p)
	}
	for _, phase := range []felderasim.CompilePhase{felderasim.CompilingSQL, felderasim.SQLCompiled, felderasim.CompilingRust} {
		sim.HoldCompile(phase)
		compiled(t, sim, phase)
		if p := c.pipeline(""); (p.Info != nil) != (phase != felderasim.CompilingSQL) {
			t.Errorf("in phase %s the program has a schema: %t", phase, p.Info != nil)
		}
	}
	sim.ReleaseCompile()
	compiled(t, sim, felderasim.Compiled)
	until(t, sim, func(felderasim.View) bool { return true })
	poll(t, sim.Deployed)
	if p := c.pipeline(""); p.Status != "Success" || p.Info == nil || p.Info.Schema.Inputs[0].Name != "other" || p.Deployment != "Running" {
		t.Errorf("%+v", p)
	}
	c.send("other", `[{"insert":{"id":1}}]`)
	complete(t, sim)
	if n := sim.Count("other"); n != 1 {
		t.Errorf("%d rows", n)
	}
}

func TestProgramChangesOnlyWhileStopped(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	before := c.pipeline("")
	if code := errorCode(t, c.do(http.MethodPatch, "", programBody(otherSQL), 400)); code != "UpdateRestrictedToStopped" {
		t.Error(code)
	}
	if code := errorCode(t, c.do(http.MethodDelete, "", "", 400)); code != "DeleteRestrictedToFullyStopped" {
		t.Error(code)
	}
	c.post("/stop?force=true", "", 202)
	c.do(http.MethodPatch, "", programBody(*before.Code), 200)
	if p := c.pipeline(""); p.Version != before.Version || p.Status != "Success" {
		t.Errorf("the same program is compiled again: %+v", p)
	}
	c.do(http.MethodPatch, "", programBody(otherSQL), 200)
	compiled(t, sim, felderasim.Compiled)
	if p := c.pipeline(""); p.Version != before.Version+1 || p.Deployment != "Stopped" {
		t.Errorf("%+v", p)
	}
	if code := errorCode(t, c.do(http.MethodDelete, "", "", 400)); code != "DeleteRestrictedToClearedStorage" {
		t.Error(code)
	}
	c.post("/clear", "", 202)
	if p := c.pipeline(""); p.Storage != "Cleared" {
		t.Errorf("%+v", p)
	}
	c.do(http.MethodDelete, "", "", 200)
	c.get("", 404)
}

func TestProgramThatDoesNotCompile(t *testing.T) {
	sim, c := start(t, felderasim.Options{})
	c.post("/stop?force=true", "", 202)
	c.do(http.MethodPatch, "", programBody("CREATE TABLE x (\n a NOSUCHTYPE);"), 200)
	compiled(t, sim, felderasim.SQLError)
	p := c.pipeline("")
	if p.Info != nil || p.Error.SQL == nil || p.Error.SQL.Exit == 0 || p.Error.SQL.Messages[0].Line != 2 || !strings.Contains(p.Error.SQL.Messages[0].Message, "unknown type") {
		t.Errorf("%+v", p.Error.SQL)
	}
	if code := errorCode(t, c.post("/start", "", 400)); code != "CannotStartWithCompilationError" {
		t.Error(code)
	}
	sim.FailRust("error[E0308]")
	c.do(http.MethodPatch, "", programBody(otherSQL), 200)
	compiled(t, sim, felderasim.RustError)
	if p := c.pipeline(""); p.Error.Rust == nil || p.Error.Rust.Stderr != "error[E0308]" || p.Info == nil {
		t.Errorf("%+v", p)
	}
	// A newer program takes over from one that is still being compiled.
	sim.HoldCompile(felderasim.CompilingRust)
	c.do(http.MethodPatch, "", programBody(otherSQL+" "), 200)
	compiled(t, sim, felderasim.CompilingRust)
	c.do(http.MethodPatch, "", programBody("CREATE TABLE third (id BIGINT NOT NULL PRIMARY KEY);"), 200)
	compiled(t, sim, felderasim.CompilingRust)
	sim.ReleaseCompile()
	compiled(t, sim, felderasim.Compiled)
	c.post("/start", "", 202)
	if p := c.pipeline(""); p.Info.Schema.Inputs[0].Name != "third" || p.Deployment != "Running" {
		t.Errorf("%+v", p)
	}
}
