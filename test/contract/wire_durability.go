package main

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// withModel is an enterprise pipeline with a fault-tolerance model.
func withModel(m core.Model) func(*felderasim.Options) {
	return func(o *felderasim.Options) { o.Edition, o.Model = felderasim.Enterprise, m }
}

// byHand is withModel with a circuit and a checkpointer that move only when
// the clause says so.
func byHand(m core.Model) func(*felderasim.Options) {
	return func(o *felderasim.Options) { withModel(m)(o); o.Manual = true }
}

// checkpoint asks for one and gives its number.
func (p *probe) checkpoint() uint64 {
	var c struct {
		Seq         uint64 `json:"checkpoint_sequence_number"`
		Incarnation string `json:"incarnation_uuid"`
	}
	a := p.post("/checkpoint").is(http.StatusOK)
	p.has("the answer to checkpoint", a.members(), "checkpoint_sequence_number", "incarnation_uuid")
	a.into(&c)
	want(p, "incarnation_uuid", p.incarnation(), c.Incarnation)
	return c.Seq
}

// checkpointStatus is the answer of checkpoint_status.
type checkpointStatus struct {
	Success *uint64 `json:"success"`
	Failure *struct {
		Seq   uint64 `json:"sequence_number"`
		Error string `json:"error"`
		At    string `json:"failed_at"`
	} `json:"failure"`
}

func (p *probe) checkpointStatus() checkpointStatus {
	var s checkpointStatus
	p.get("/checkpoint_status?incarnation_uuid=" + url.QueryEscape(p.incarnation())).is(http.StatusOK).into(&s)
	return s
}

func (s checkpointStatus) reached(seq uint64) bool { return s.Success != nil && *s.Success >= seq }

// succeed waits for the success of a request.
func (p *probe) succeed(seq uint64) {
	p.until("the checkpoint succeeds", func() bool { return p.checkpointStatus().reached(seq) })
}

// checkpointEntry is an element of GET /checkpoints.
type checkpointEntry struct {
	Steps     uint64 `json:"steps"`
	Processed uint64 `json:"processed_records"`
}

func (p *probe) checkpoints() []checkpointEntry {
	var list []checkpointEntry
	p.get("/checkpoints").is(http.StatusOK).into(&list)
	return list
}

// stepped applies rows on a pipeline that is moved by hand.
func (p *probe) stepped(table string, elements ...string) string {
	tok := p.array(table, elements...).token()
	p.sim().Step(1)
	want(p, "the status after a step", "complete", p.status(tok).Status)
	return tok
}

// modelClauses are contract §6.1 and §6.2.
func modelClauses() []clause {
	crash := func(id string, m core.Model, says, expected string) clause {
		return clause{
			id: id, section: "6.2", says: says, needs: needFaults | needEnterprise, sim: withModel(m),
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "saved", 1))
				p.succeed(p.checkpoint())
				p.put("hfc_kv", p.kv(1, "after", 2))
				p.sim().HoldIngest("")
				p.array("hfc_kv", p.kv(2, "queued", 3)).token()
				p.sim().Crash(core.KeepByModel)
				p.sim().ReleaseIngest("")
				p.put("hfc_pair", p.kv(0, "x", 1))
				p.holds("hfc_kv", expected)
			},
		}
	}
	open := func(id string, m core.Model, says, expected string) clause {
		return clause{
			id: id, section: "4.2", says: says, needs: needFaults | needEnterprise, sim: withModel(m),
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "before", 1))
				p.succeed(p.checkpoint())
				p.begin()
				p.ingested(p.array("hfc_kv", p.kv(1, "inside", 2)).token())
				p.sim().Crash(core.KeepByModel)
				want(p, "transaction_status", "NoTransaction", p.stats().Global.TransactionStatus)
				p.holds("hfc_kv", expected)
			},
		}
	}
	return []clause{
		{
			id: "C6.1-CONFIG", section: "6.1", says: "runtime_config.fault_tolerance names the model; the open-source build has none", needs: needManager | needOpenSource,
			run: func(p *probe) {
				var d struct {
					Config struct {
						FT struct {
							Model *string `json:"model"`
						} `json:"fault_tolerance"`
					} `json:"runtime_config"`
				}
				p.get("").is(http.StatusOK).into(&d)
				if m := d.Config.FT.Model; m != nil && *m != "none" {
					p.failf("expected the model none, got %s", *m)
				}
			},
		},
		{
			id: "C6.1-STATS-OSS", section: "6.1", says: "in the open-source build /stats says that checkpoints are impossible: EnterpriseFeature", needs: needOpenSource,
			run: func(p *probe) {
				s := p.stats()
				if len(s.PermanentCheckpoint) != 1 || string(s.PermanentCheckpoint[0]) != `"EnterpriseFeature"` {
					p.failf(`expected permanent_checkpoint_errors ["EnterpriseFeature"], got %v`, s.PermanentCheckpoint)
				}
				want(p, "suspend_error", `{"Permanent":["EnterpriseFeature"]}`, document(s.SuspendError))
			},
		},
		{
			id: "C6.1-BARE-OSS", section: "6.1", says: "a bare open-source process answers 200 to checkpoint, and the failure shows in checkpoint_status", needs: needBare | needOpenSource,
			run: func(p *probe) {
				var c struct {
					Seq uint64 `json:"checkpoint_sequence_number"`
				}
				p.process(http.MethodPost, "/checkpoint").is(http.StatusOK).into(&c)
				p.until("the failure is reported", func() bool { f := p.checkpointStatus().Failure; return f != nil && f.Seq >= c.Seq })
				if s := p.checkpointStatus(); s.Success != nil || s.Failure.Error == "" || s.Failure.At == "" {
					p.failf("expected a failure with error and failed_at alone, got %+v", s)
				}
			},
		},
		{
			id: "C6.2-NONE", section: "6.2", says: "model none: a restart loses all rows", needs: needRestart | needManager | needOpenSource,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.restart()
				p.holds("hfc_kv", "")
			},
		},
		{
			id: "C6.2-NONE-crash", section: "6.2", says: "model none: so does a crash", needs: needFaults,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.sim().Crash(core.KeepByModel)
				p.holds("hfc_kv", "")
			},
		},
		crash("C6.2-AT-LEAST-ONCE", core.ModelAtLeastOnce, "at_least_once: after a crash the state is the last checkpoint; completed rows after it are lost", "0:saved/1"),
		crash("C6.2-EXACTLY-ONCE", core.ModelExactlyOnce, "exactly_once: ingested rows after the checkpoint are replayed; rows that were only queued are lost", "0:saved/1 1:after/2"),
		{
			id: "C6.2-EXACTLY-ONCE-none", section: "6.2", says: "exactly_once: rows that are complete survive a crash without any checkpoint", needs: needFaults | needEnterprise, sim: withModel(core.ModelExactlyOnce),
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.sim().Crash(core.KeepByModel)
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C6.2-QUEUED", section: "6.2", says: "200 and a token are no promise: queued rows without a step are lost in a crash also under exactly_once", needs: needFaults | needEnterprise, sim: withModel(core.ModelExactlyOnce),
			run: func(p *probe) {
				p.sim().HoldIngest("")
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				want(p, "the status", "inprogress without a step", p.status(tok).String())
				p.sim().Crash(core.KeepByModel)
				p.sim().ReleaseIngest("")
				p.completionOf(tok).refused(http.StatusGone, "PipelineRestarted")
				p.put("hfc_pair", p.kv(0, "x", 1))
				p.holds("hfc_kv", "")
			},
		},
		{
			id: "C6.2-TOKENS", section: "6.2", says: "tokens become 410 also where the rows survived", needs: needFaults | needEnterprise, sim: withModel(core.ModelExactlyOnce),
			run: func(p *probe) {
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.complete(tok)
				p.sim().Crash(core.KeepByModel)
				p.completionOf(tok).refused(http.StatusGone, "PipelineRestarted")
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C6.2-ENDPOINTS", section: "6.2", says: "endpoints that requests had created are there again after a replay", needs: needFaults | needEnterprise, sim: withModel(core.ModelExactlyOnce),
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				before := p.endpoints("hfc_kv")
				p.sim().Crash(core.KeepByModel)
				after := p.endpoints("hfc_kv")
				if len(before) != 1 || len(after) != 1 || before[0].Name != after[0].Name {
					p.failf("expected the endpoint %v, got %v", before, after)
				}
			},
		},
		open("C4.2-CRASH-at-least-once", core.ModelAtLeastOnce, "a crash inside a transaction under at_least_once loses what it had ingested", "0:before/1"),
		open("C4.2-CRASH-exactly-once", core.ModelExactlyOnce, "a crash inside a transaction under exactly_once commits what it had ingested: half a unit becomes visible", "0:before/1 1:inside/2"),
	}
}

// checkpointClauses are contract §6.3 and §6.4.
func checkpointClauses() []clause {
	alo := withModel(core.ModelAtLeastOnce)
	hand := byHand(core.ModelAtLeastOnce)
	return []clause{
		{
			id: "C6.3-REQUEST", section: "6.3", says: `POST checkpoint answers 200 {"checkpoint_sequence_number":N,"incarnation_uuid":"…"} of this process`, needs: needEnterprise, sim: alo,
			run: func(p *probe) { p.succeed(p.checkpoint()) },
		},
		{
			id: "C6.3-SEQUENCE", section: "6.3", says: "numbers count from 0 in each process", needs: needEnterprise | needRestart | needManager, sim: alo,
			run: func(p *probe) {
				for range 2 {
					p.restart()
					for n := range uint64(3) {
						want(p, "the number", n, p.checkpoint())
					}
					p.succeed(2)
				}
			},
		},
		{
			id: "C6.3-ASYNCHRONOUS", section: "6.3", says: "the answer comes before the checkpoint: success follows later", needs: needEnterprise | needFaults, sim: alo,
			run: func(p *probe) {
				p.sim().HoldCheckpoint()
				seq := p.checkpoint()
				p.stays("no success is reported", func() bool { return p.checkpointStatus().Success == nil })
				p.sim().ReleaseCheckpoint()
				p.succeed(seq)
			},
		},
		{
			id: "C6.3-SUCCESS-largest", section: "6.3", says: "success is the largest number that succeeded", needs: needEnterprise, sim: alo,
			run: func(p *probe) {
				p.checkpoint()
				seq := p.checkpoint()
				p.succeed(seq)
				want(p, "success", seq, *p.checkpointStatus().Success)
			},
		},
		{
			id: "C6.3-LIST", section: "6.3", says: "GET /checkpoints lists uuid, identifier, fingerprint, size, steps and processed_records", needs: needEnterprise, sim: alo,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.succeed(p.checkpoint())
				var list []map[string]jsontext.Value
				p.get("/checkpoints").is(http.StatusOK).into(&list)
				if len(list) == 0 {
					p.failf("expected an entry, got none")
				}
				p.include("the entry", list[len(list)-1], "uuid", "identifier", "fingerprint", "size", "steps", "processed_records")
			},
		},
		{
			id: "C6.3-STEPS", section: "6.3", says: "an entry that began after a token was complete has steps at or above the token's step", needs: needEnterprise, sim: alo,
			run: func(p *probe) {
				step := p.complete(p.array("hfc_kv", p.kv(0, "a", 1)).token())
				p.succeed(p.checkpoint())
				p.succeed(p.checkpoint())
				if !slices.ContainsFunc(p.checkpoints(), func(c checkpointEntry) bool { return c.Steps >= step }) {
					p.failf("expected an entry with at least %d steps, got %+v", step, p.checkpoints())
				}
			},
		},
		{
			id: "C6.3-CONTENT", section: "6.3", says: "a checkpoint's content is fixed when it starts", needs: needEnterprise | needFaults, sim: hand,
			run: func(p *probe) {
				p.stepped("hfc_kv", p.kv(0, "before", 1))
				seq := p.checkpoint()
				p.sim().AdvanceCheckpoint() // it starts
				p.stepped("hfc_kv", p.kv(1, "after", 2))
				p.sim().AdvanceCheckpoint()
				p.sim().AdvanceCheckpoint()
				want(p, "success reached", true, p.checkpointStatus().reached(seq))
				p.sim().Crash(core.KeepCheckpoint)
				p.holds("hfc_kv", "0:before/1")
			},
		},
		{
			id: "C6.3-COALESCED", section: "6.3", says: "a request is credited with a checkpoint that was already running: its success does not cover rows completed before the request", needs: needEnterprise | needFaults, sim: hand,
			run: func(p *probe) {
				p.stepped("hfc_kv", p.kv(0, "before", 1))
				want(p, "a periodic checkpoint starts", true, p.sim().PeriodicCheckpoint())
				p.stepped("hfc_kv", p.kv(1, "complete", 2))
				seq := p.checkpoint()
				p.sim().AdvanceCheckpoint()
				p.sim().AdvanceCheckpoint()
				want(p, "success reached", true, p.checkpointStatus().reached(seq))
				p.sim().Crash(core.KeepCheckpoint)
				p.holds("hfc_kv", "0:before/1")
			},
		},
		{
			id: "C6.3-LISTED-early", section: "6.3", says: "an entry is listed before it is the resume point", needs: needEnterprise | needFaults, sim: hand,
			run: func(p *probe) {
				p.stepped("hfc_kv", p.kv(0, "a", 1))
				p.checkpoint()
				p.sim().AdvanceCheckpoint()
				want(p, "entries while it is written", 0, len(p.checkpoints()))
				p.sim().AdvanceCheckpoint()
				want(p, "entries when the operators are written", 1, len(p.checkpoints()))
				if s := p.checkpointStatus().Success; s != nil {
					p.failf("expected no success yet, got %d", *s)
				}
				p.sim().Crash(core.KeepCheckpoint)
				p.holds("hfc_kv", "")
			},
		},
		{
			id: "C6.3-OUTPUTS", section: "6.3", says: "a checkpoint waits until outputs have its records", needs: needEnterprise | needFaults, sim: alo,
			run: func(p *probe) {
				p.sim().HoldCompletion()
				p.ingested(p.array("hfc_kv", p.kv(0, "a", 1)).token())
				seq := p.checkpoint()
				p.until("the entry is listed", func() bool { return len(p.checkpoints()) == 1 })
				p.stays("no success is reported", func() bool { return p.checkpointStatus().Success == nil })
				want(p, "checkpoint_activity", "in_progress", p.stats().CheckpointActivity.Status)
				p.sim().ReleaseCompletion()
				p.succeed(seq)
			},
		},
		{
			id: "C6.3-QUEUED", section: "6.3", says: "rows that are queued and not ingested are not in a checkpoint", needs: needEnterprise | needFaults, sim: alo,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "in", 1))
				p.sim().HoldIngest("")
				p.array("hfc_kv", p.kv(1, "queued", 2)).token()
				p.succeed(p.checkpoint())
				p.sim().Crash(core.KeepCheckpoint)
				p.sim().ReleaseIngest("")
				p.put("hfc_pair", p.kv(0, "x", 1))
				p.holds("hfc_kv", "0:in/1")
			},
		},
		{
			id: "C6.3-DELAYED", section: "6.3", says: "an open transaction delays checkpoints: checkpoint_activity delayed with the reason TransactionInProgress", needs: needEnterprise | needExclusive, sim: alo,
			run: func(p *probe) {
				p.begin()
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.ingested(tok)
				seq := p.checkpoint()
				p.until("the checkpoint is delayed", func() bool { return p.stats().CheckpointActivity.Status == "delayed" })
				if r := p.stats().CheckpointActivity.Reasons; !slices.Contains(r, "TransactionInProgress") {
					p.failf("expected the reason TransactionInProgress, got %v", r)
				}
				p.stays("the checkpoint does not succeed", func() bool { return !p.checkpointStatus().reached(seq) })
				p.commit()
				p.complete(tok)
				p.succeed(seq)
			},
		},
		{
			id: "C6.3-SUSPEND-ERROR", section: "6.3", says: "suspend_error is Temporary TransactionInProgress meanwhile", needs: needEnterprise | needExclusive, sim: alo,
			run: func(p *probe) {
				p.begin()
				p.ingested(p.array("hfc_kv", p.kv(0, "a", 1)).token())
				want(p, "suspend_error", `{"Temporary":["TransactionInProgress"]}`, document(p.stats().SuspendError))
			},
		},
		{
			id: "C6.3-IDLE", section: "6.3", says: "without a checkpoint checkpoint_activity is idle, and permanent_checkpoint_errors is null", needs: needEnterprise | needFaults, sim: alo,
			run: func(p *probe) {
				s := p.stats()
				want(p, "checkpoint_activity", "idle", s.CheckpointActivity.Status)
				want(p, "permanent_checkpoint_errors", 0, len(s.PermanentCheckpoint))
			},
		},
		{
			id: "C6.3-OTHER-INCARNATION", section: "6.3", says: "after a restart a poll with the old incarnation gets 400 IncarnationUuidMismatch", needs: needEnterprise | needRestart | needManager, sim: alo,
			run: func(p *probe) {
				old := p.incarnation()
				p.succeed(p.checkpoint())
				p.restart()
				p.get("/checkpoint_status?incarnation_uuid="+old).refused(http.StatusBadRequest, "IncarnationUuidMismatch")
				if s := p.checkpointStatus().Success; s != nil {
					p.failf("expected no success in a new process, got %d", *s)
				}
			},
		},
		{
			id: "C6.3-FAILURE-kept", section: "6.3", says: "failure is never cleared", needs: needBare | needOpenSource | needFaults,
			run: func(p *probe) {
				p.process(http.MethodPost, "/checkpoint").is(http.StatusOK)
				p.until("the failure is reported", func() bool { return p.checkpointStatus().Failure != nil })
				p.put("hfc_kv", p.kv(0, "a", 1))
				if p.checkpointStatus().Failure == nil {
					p.failf("expected the failure still, got null")
				}
			},
		},
		{
			id: "C6.4-R1", section: "6.4", says: "R1 holds: two checkpoints, one after the other, cover rows completed before, also when another was running", needs: needEnterprise | needFaults, sim: hand,
			run: func(p *probe) {
				p.stepped("hfc_kv", p.kv(0, "before", 1))
				p.sim().PeriodicCheckpoint()
				p.stepped("hfc_kv", p.kv(1, "complete", 2))
				for range 2 {
					seq := p.checkpoint()
					for !p.checkpointStatus().reached(seq) && p.sim().AdvanceCheckpoint() {
						continue
					}
					want(p, "success reached", true, p.checkpointStatus().reached(seq))
				}
				p.sim().Crash(core.KeepCheckpoint)
				p.holds("hfc_kv", "0:before/1 1:complete/2")
			},
		},
		{
			id: "C6.4-R2", section: "6.4", says: "R2 holds: once an entry has steps at or above the token's, the success of one more request covers the rows", needs: needEnterprise | needFaults, sim: hand,
			run: func(p *probe) {
				p.stepped("hfc_kv", p.kv(0, "before", 1))
				p.sim().PeriodicCheckpoint()
				tok := p.stepped("hfc_kv", p.kv(1, "complete", 2))
				step := p.complete(tok)
				covers := func(c checkpointEntry) bool { return c.Steps >= step }
				for !slices.ContainsFunc(p.checkpoints(), covers) {
					if !p.sim().AdvanceCheckpoint() {
						p.sim().PeriodicCheckpoint()
					}
				}
				seq := p.checkpoint()
				for !p.checkpointStatus().reached(seq) && p.sim().AdvanceCheckpoint() {
					continue
				}
				want(p, "success reached", true, p.checkpointStatus().reached(seq))
				p.sim().Crash(core.KeepCheckpoint)
				p.holds("hfc_kv", "0:before/1 1:complete/2")
			},
		},
		{
			id: "C6.4-STEPS-reused", section: "6.4", says: "step numbers go on from the checkpoint after a resume, so that the same number means different rows in two incarnations", needs: needEnterprise | needFaults, sim: alo,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.succeed(p.checkpoint())
				lost := p.complete(p.array("hfc_kv", p.kv(1, "lost", 2)).token())
				p.sim().Crash(core.KeepCheckpoint)
				want(p, "the step of other rows", lost, p.complete(p.array("hfc_pair", p.kv(0, "other", 1)).token()))
			},
		},
	}
}

// lossClauses are contract §6.5.
func lossClauses() []clause {
	alo := withModel(core.ModelAtLeastOnce)
	return []clause{
		{
			id: "C6.5-GLOBAL", section: "6.5", says: "global_metrics has the fields by which a restart is told",
			run: func(p *probe) {
				var g map[string]jsontext.Value
				p.noErr("global_metrics", json.Unmarshal(p.get("/stats").is(http.StatusOK).members()["global_metrics"], &g))
				p.include("global_metrics", g, "state", "incarnation_uuid", "start_time", "initial_start_time", "total_processed_records",
					"total_initiated_steps", "total_completed_steps", "total_completed_records", "total_input_records", "buffered_input_records",
					"pipeline_complete", "bootstrap_in_progress")
			},
		},
		{
			id: "C6.5-TRANSACTION-FIELDS", section: "6.5", says: "global_metrics has the fields of transactions",
			run: func(p *probe) {
				var g map[string]jsontext.Value
				p.noErr("global_metrics", json.Unmarshal(p.get("/stats").is(http.StatusOK).members()["global_metrics"], &g))
				p.include("global_metrics", g, "transaction_status", "transaction_id", "transaction_msecs", "transaction_records", "commit_progress", "transaction_initiators")
			},
		},
		{
			id: "C6.5-INPUTS", section: "6.5", says: "inputs[] has an entry with its fields for every endpoint, api-ingress ones included",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				var list []map[string]jsontext.Value
				p.noErr("inputs", json.Unmarshal(p.get("/stats").is(http.StatusOK).members()["inputs"], &list))
				i := slices.IndexFunc(list, func(m map[string]jsontext.Value) bool {
					return strings.HasPrefix(text(m["endpoint_name"]), "hfc_kv.api-ingress-")
				})
				if i < 0 {
					p.failf("expected an input hfc_kv.api-ingress-…, got none")
				}
				p.include("the input", list[i], "endpoint_name", "config", "metrics", "fatal_error", "paused", "barrier", "completed_frontier")
				var m map[string]jsontext.Value
				p.noErr("metrics", json.Unmarshal(list[i]["metrics"], &m))
				p.include("metrics", m, "total_bytes", "total_records", "buffered_records", "buffered_bytes", "num_transport_errors", "num_parse_errors", "end_of_input")
			},
		},
		{
			id: "C6.5-STREAM", section: "6.5", says: "inputs[].config.stream names the table",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				want(p, "config.stream", "hfc_kv", p.endpoints("hfc_kv")[0].Config.Stream)
			},
		},
		{
			id: "C6.5-FRONTIER", section: "6.5", says: "an HTTP endpoint has no completed_frontier",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				var list []map[string]jsontext.Value
				p.noErr("inputs", json.Unmarshal(p.get("/stats").is(http.StatusOK).members()["inputs"], &list))
				for _, in := range list {
					if strings.Contains(text(in["endpoint_name"]), ".api-ingress-") {
						want(p, "completed_frontier", "null", string(in["completed_frontier"]))
					}
				}
			},
		},
		{
			id: "C6.5-COUNTERS", section: "6.5", says: "received and processed records are counted", needs: needExclusive,
			run: func(p *probe) {
				before := p.stats().Global
				p.put("hfc_kv", p.kv(0, "a", 1), p.kv(1, "b", 2))
				after := p.stats().Global
				want(p, "total_input_records", before.Input+2, after.Input)
				want(p, "total_processed_records", before.Processed+2, after.Processed)
			},
		},
		{
			id: "C6.5-BUFFERED", section: "6.5", says: "buffered_input_records counts what is queued and not ingested, and pipeline_complete is false meanwhile", needs: needFaults,
			run: func(p *probe) {
				p.sim().HoldIngest("")
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				g := p.stats().Global
				want(p, "buffered_input_records", 1, g.Buffered)
				want(p, "pipeline_complete", false, g.Complete)
				p.sim().ReleaseIngest("")
				p.complete(tok)
				want(p, "pipeline_complete", true, p.stats().Global.Complete)
			},
		},
		{
			id: "C6.5-INCARNATION", section: "6.5", says: "incarnation_uuid is another one after a restart", needs: needRestart | needManager,
			run: func(p *probe) {
				before := p.incarnation()
				p.restart()
				if p.incarnation() == before {
					p.failf("expected another incarnation, got %s again", before)
				}
			},
		},
		{
			id: "C6.5-FROM-NOTHING", section: "6.5", says: "started from nothing: initial_start_time changes too and equals start_time", needs: needRestart | needManager | needOpenSource,
			run: func(p *probe) {
				before := p.stats().Global
				p.restart()
				after := p.stats().Global
				if after.InitialStartTime == before.InitialStartTime || after.InitialStartTime != after.StartTime {
					p.failf("expected a new initial_start_time equal to start_time, got %d and %d after %d", after.InitialStartTime, after.StartTime, before.InitialStartTime)
				}
			},
		},
		{
			id: "C6.5-RESUMED", section: "6.5", says: "resumed from a checkpoint: initial_start_time is kept and start_time is not", needs: needEnterprise | needFaults, sim: alo,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.succeed(p.checkpoint())
				before := p.stats().Global
				p.sim().Crash(core.KeepCheckpoint)
				after := p.stats().Global
				want(p, "initial_start_time", before.InitialStartTime, after.InitialStartTime)
				if after.StartTime == before.StartTime || after.Incarnation == before.Incarnation {
					p.failf("expected another start_time and incarnation, got %d and %s", after.StartTime, after.Incarnation)
				}
			},
		},
		{
			id: "C6.5-PROCESSED", section: "6.5", says: "total_processed_records is restored from the checkpoint, the step counters read 0 until the first step", needs: needEnterprise | needFaults, sim: alo,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1), p.kv(1, "b", 2))
				p.succeed(p.checkpoint())
				p.sim().Crash(core.KeepCheckpoint)
				g := p.stats().Global
				want(p, "total_processed_records", 2, g.Processed)
				want(p, "total_initiated_steps", 0, g.Initiated)
				want(p, "total_completed_steps", 0, g.Completed)
			},
		},
		{
			id: "C6.5-DEPLOYMENT-ID", section: "6.5", says: "deployment_id changes with each stop and start", needs: needRestart | needManager,
			run: func(p *probe) {
				_, before := p.deployment()
				p.restart()
				if _, after := p.deployment(); after == before || after == "" {
					p.failf("expected another deployment_id than %q, got %q", before, after)
				}
			},
		},
		{
			id: "C6.5-CRASHED", section: "6.5", says: "a crashed process is not restarted: the pipeline goes to Stopped with a deployment_error until somebody starts it", needs: needFaults | needManager,
			run: func(p *probe) {
				p.sim().Kill()
				m := p.get("?selector=status").is(http.StatusOK).members()
				want(p, "deployment_status", `"Stopped"`, string(m["deployment_status"]))
				if string(m["deployment_error"]) == "null" {
					p.failf("expected a deployment_error, got null")
				}
				p.array("hfc_kv", p.kv(0, "a", 1)).refused(http.StatusServiceUnavailable, "PipelineInteractionNotDeployed")
				p.start()
				p.put("hfc_kv", p.kv(0, "a", 1))
			},
		},
		{
			id: "C6.5-STOPPED-clean", section: "6.5", says: "a pipeline that was stopped on purpose has no deployment_error", needs: needRestart | needManager,
			run: func(p *probe) {
				p.stop()
				p.after(p.start)
				want(p, "deployment_error", "null", string(p.get("?selector=status").is(http.StatusOK).members()["deployment_error"]))
			},
		},
	}
}
