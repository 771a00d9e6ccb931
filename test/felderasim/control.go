package felderasim

import (
	"encoding/json"
	"net/http"

	"holdfast/test/felderasim/core"
)

// controlRequest is the body of every POST under /sim/; each takes the fields
// it needs.
type controlRequest struct {
	// What and Table for hold and release: "ingest", "completion", "commit",
	// "checkpoint".
	What  string `json:"what"`
	Table string `json:"table"`
	// Keep for crash and restart.
	Keep core.Keep `json:"keep"`
	// State for state.
	State core.State `json:"state"`
	// Do for transaction: "start", "commit".
	Do string `json:"do"`
	// N for step.
	N int `json:"n"`
	// ID for clear; "" clears all faults.
	ID string `json:"id"`
	// APIKey for apikey.
	APIKey string `json:"api_key"`
}

// serveControl is the control surface:
//
//	POST /sim/fault       a Fault                      → {"id":"1"}
//	POST /sim/clear       {"id":"1"}                   → {"cleared":1}
//	POST /sim/hold        {"what":"ingest","table":""}
//	POST /sim/release     the same
//	POST /sim/pause, /sim/resume
//	POST /sim/state       {"state":"Initializing"}
//	POST /sim/crash       {"keep":"nothing"}           a new incarnation at once
//	POST /sim/kill                                     down until restart
//	POST /sim/restart     {"keep":"checkpoint"}
//	POST /sim/transaction {"do":"start"}               a stranger's
//	POST /sim/step        {"n":1}                      → {"steps":1}
//	POST /sim/checkpoint                               a periodic one begins
//	POST /sim/late                                     → {"applied":1}
//	POST /sim/apikey      {"api_key":"apikey:…"}
//	GET  /sim/dump?table=orders, /sim/requests, /sim/counters
func (s *Sim) serveControl(w http.ResponseWriter, r *http.Request) {
	raw, err := readAll(r)
	if err != nil {
		http.Error(w, "read control request: "+err.Error(), http.StatusBadRequest)
		return
	}
	what := r.URL.Path[len("/sim/"):]
	if r.Method == http.MethodGet {
		switch what {
		case "dump":
			d := s.Dump(r.URL.Query().Get("table"))
			if d == nil {
				http.Error(w, "no such table", http.StatusNotFound)
				return
			}
			jsonAnswer(http.StatusOK, d).write(w)
		case "requests":
			jsonAnswer(http.StatusOK, s.Requests()).write(w)
		case "counters":
			jsonAnswer(http.StatusOK, s.Counters()).write(w)
		default:
			http.NotFound(w, r)
		}
		return
	}
	if r.Method != http.MethodPost {
		http.Error(w, "use GET or POST", http.StatusMethodNotAllowed)
		return
	}
	var c controlRequest
	var f Fault
	var target any = &c
	if what == "fault" {
		target = &f
	}
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, target); err != nil {
			http.Error(w, "control request is not JSON: "+err.Error(), http.StatusBadRequest)
			return
		}
	}
	a, ok := s.control(what, c, f)
	if !ok {
		http.NotFound(w, r)
		return
	}
	a.write(w)
}

func (s *Sim) control(what string, c controlRequest, f Fault) (answer, bool) {
	done := jsonAnswer(http.StatusOK, struct{}{})
	bad := func(text string) (answer, bool) {
		return jsonAnswer(http.StatusBadRequest, map[string]string{"error": text}), true
	}
	switch what {
	case "fault":
		id, err := s.Inject(f)
		if err != nil {
			return bad(err.Error())
		}
		return jsonAnswer(http.StatusOK, map[string]string{"id": id}), true
	case "clear":
		return jsonAnswer(http.StatusOK, map[string]int{"cleared": s.ClearFault(c.ID)}), true
	case "hold", "release":
		hold := what == "hold"
		var do func(e *core.Engine)
		switch c.What {
		case "ingest":
			do = func(e *core.Engine) { e.HoldIngest(c.Table, hold) }
		case "completion":
			do = func(e *core.Engine) { e.HoldCompletion(hold) }
		case "commit":
			do = func(e *core.Engine) { e.HoldCommit(hold) }
		case "checkpoint":
			do = func(e *core.Engine) { e.HoldCheckpoint(hold) }
		default:
			return bad("what must be ingest, completion, commit or checkpoint")
		}
		s.do(do)
	case "pause":
		s.Pause()
	case "resume":
		s.Resume()
	case "state":
		s.SetState(c.State)
	case "crash":
		s.Crash(c.Keep)
	case "kill":
		s.Kill()
	case "restart":
		s.Restart(c.Keep)
	case "transaction":
		switch c.Do {
		case "start":
			id, err := s.StartTransaction()
			if err != nil {
				return bad(err.Error())
			}
			return jsonAnswer(http.StatusOK, map[string]uint64{"transaction_id": id}), true
		case "commit":
			if err := s.CommitTransaction(); err != nil {
				return bad(err.Error())
			}
		default:
			return bad("do must be start or commit")
		}
	case "step":
		return jsonAnswer(http.StatusOK, map[string]int{"steps": s.Step(max(1, c.N))}), true
	case "checkpoint":
		return jsonAnswer(http.StatusOK, map[string]bool{"started": s.PeriodicCheckpoint()}), true
	case "late":
		return jsonAnswer(http.StatusOK, map[string]int{"applied": s.ApplyLateNow()}), true
	case "apikey":
		s.SetAPIKey(c.APIKey)
	default:
		return answer{}, false
	}
	return done, true
}
