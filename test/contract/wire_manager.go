package main

import (
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// impatient gives the manager time-outs that a test can wait for.
func impatient(o *felderasim.Options) {
	o.IngressTimeout, o.CallTimeout = 250*time.Millisecond, 250*time.Millisecond
}

// endpointClauses are the calls of contract §1.1.
func endpointClauses() []clause {
	return []clause{
		{
			id: "C1.1-INGRESS-token", section: "1.1", says: `POST /ingress/{table} answers 200 {"token":"…"} and nothing else`,
			run: func(p *probe) { p.complete(p.array("hfc_kv", p.kv(0, "a", 1)).token()) },
		},
		{
			id: "C1.1-COMPLETION-shape", section: "1.1", says: `GET /completion_status answers 200 {"status":…,"step":…} and nothing else`,
			run: func(p *probe) {
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.has("completion_status", p.completionOf(tok).is(http.StatusOK).members(), "status", "step")
				p.complete(tok)
			},
		},
		{
			id: "C1.1-STATS-shape", section: "1.1", says: "GET /stats answers 200 with global_metrics, inputs, outputs, suspend_error and checkpoint_activity",
			run: func(p *probe) {
				p.include("/stats", p.get("/stats").is(http.StatusOK).members(),
					"global_metrics", "inputs", "outputs", "suspend_error", "checkpoint_activity", "permanent_checkpoint_errors")
			},
		},
		{
			id: "C1.1-CHECKPOINTS-list", section: "1.1", says: "GET /checkpoints answers 200 with an array",
			run: func(p *probe) {
				var list []jsontext.Value
				p.get("/checkpoints").is(http.StatusOK).into(&list)
				if list == nil {
					p.failf("expected an array, got null")
				}
			},
		},
		{
			id: "C1.1-CHECKPOINT-STATUS-shape", section: "1.1", says: `GET /checkpoint_status answers 200 {"success":…,"failure":…} and nothing else`,
			run: func(p *probe) {
				p.has("checkpoint_status", p.get("/checkpoint_status").is(http.StatusOK).members(), "success", "failure")
			},
		},
		{
			id: "C1.1-STATUS-bare", section: "1.1", says: "GET /status of the process answers 200 with the runtime's status, desired status and details", needs: needBare,
			run: func(p *probe) {
				p.has("/status", p.process(http.MethodGet, "/status").is(http.StatusOK).members(),
					"runtime_status", "runtime_status_details", "runtime_desired_status", "storage_status_details")
			},
		},
		{
			id: "C1.1-PAUSE-bare", section: "1.1", says: "GET /pause and GET /start of the process answer 202 with a JSON string", needs: needBare | needExclusive,
			run: func(p *probe) {
				var word string
				p.after(p.resume)
				p.process(http.MethodGet, "/pause").is(http.StatusAccepted).into(&word)
				p.until("the pipeline is Paused", func() bool { return p.stats().Global.State == "Paused" })
				p.process(http.MethodGet, "/start").is(http.StatusAccepted).into(&word)
				p.until("the pipeline is Running", func() bool { return p.stats().Global.State == "Running" })
			},
		},
		{
			id: "C1.1-ENDPOINT-bare", section: "1.1", says: "GET /input_endpoints/{endpoint}/pause, /start and /stats of the process answer 200", needs: needBare | needExclusive,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				at := "/input_endpoints/" + p.endpoints("hfc_kv")[0].Name
				p.after(func() { p.process(http.MethodGet, at+"/start") })
				p.process(http.MethodGet, at+"/pause").is(http.StatusOK)
				p.process(http.MethodGet, at+"/stats").is(http.StatusOK)
				p.process(http.MethodGet, at+"/start").is(http.StatusOK)
			},
		},
		{
			id: "C1.1-SAME-PROCESS", section: "1.1", says: "the process and the manager's proxy speak of the same incarnation", needs: needBare | needManager,
			run: func(p *probe) {
				var s stats
				p.process(http.MethodGet, "/stats").is(http.StatusOK).into(&s)
				want(p, "the incarnation at the process", p.incarnation(), s.Global.Incarnation)
			},
		},
	}
}

// managerClauses are contract §1.2.
func managerClauses() []clause {
	return []clause{
		{
			id: "C1.2-HEALTHZ", section: "1.2", says: "GET /healthz answers 200 without a key", needs: needManager,
			run: func(p *probe) { p.send(p.ctx, http.MethodGet, p.w.root+"/healthz", "", nil, nil).is(http.StatusOK) },
		},
		{
			id: "C1.2-AUTH-CONFIG", section: "1.2", says: "GET /config/authentication answers 200 without a key", needs: needManager,
			run: func(p *probe) {
				p.send(p.ctx, http.MethodGet, p.w.root+"/config/authentication", "", nil, nil).is(http.StatusOK)
			},
		},
		{
			id: "C1.2-EDITION", section: "1.2", says: `GET /v0/config names the edition, "Open source" or "Enterprise"`, needs: needManager,
			run: func(p *probe) {
				var c struct {
					Edition string `json:"edition"`
				}
				p.manager(http.MethodGet, "/v0/config").is(http.StatusOK).into(&c)
				if c.Edition != "Open source" && c.Edition != "Enterprise" {
					p.failf(`expected the edition "Open source" or "Enterprise", got %q`, c.Edition)
				}
			},
		},
		{
			id: "C1.2-CLUSTER-HEALTHZ", section: "1.2", says: "GET /v0/cluster_healthz is a route", needs: needManager,
			run: func(p *probe) { p.manager(http.MethodGet, "/v0/cluster_healthz").is(http.StatusOK) },
		},
		{
			id: "C1.2-NO-ROUTE", section: "1.2", says: "GET /status and GET /metadata are routes of the process, not of the manager", needs: needManager,
			run: func(p *probe) {
				for _, path := range []string{"/status", "/metadata"} {
					if a := p.get(path); a.status/100 == 2 {
						p.failf("expected that the manager has no route %s, got %d", path, a.status)
					}
				}
			},
		},
		{
			id: "C1.2-PAUSE-RESUME", section: "1.2", says: "POST pause and POST resume answer 202 and are carried out", needs: needManager | needExclusive,
			run: func(p *probe) { p.pause(); p.resume() },
		},
		{
			id: "C1.2-STOP-START", section: "1.2", says: `POST stop?force=true and POST start answer 202 "Pipeline is forcefully stopping" and "Pipeline is starting"`, needs: needManager | needRestart,
			run: func(p *probe) {
				p.after(func() {
					if s, _ := p.deployment(); s != "Running" {
						p.start()
					}
				})
				p.post("/stop?force=true").is(http.StatusAccepted).text("Pipeline is forcefully stopping")
				p.until("the pipeline is Stopped", func() bool { s, _ := p.deployment(); return s == "Stopped" })
				p.post("/start").is(http.StatusAccepted).text("Pipeline is starting")
				p.until("the pipeline is Running", func() bool { s, _ := p.deployment(); return s == "Running" })
			},
		},
		{
			id: "C1.2-START-PAUSED", section: "1.2", says: "POST start?initial=paused starts a pipeline that is Paused", needs: needManager | needRestart,
			run: func(p *probe) {
				p.stop()
				p.after(p.resume)
				p.post("/start?initial=paused").is(http.StatusAccepted)
				p.until("the pipeline is Paused", func() bool { s, _ := p.deployment(); return s == "Paused" })
			},
		},
		{
			id: "C1.2-STOP-OSS", section: "1.2", says: "POST stop without force answers 501 EnterpriseFeature in the open-source build", needs: needManager | needOpenSource,
			run: func(p *probe) { p.post("/stop").refused(http.StatusNotImplemented, "EnterpriseFeature") },
		},
		{
			id: "C1.2-CHECKPOINT-OSS", section: "1.2", says: `POST checkpoint answers 501 EnterpriseFeature with details {"feature":"checkpoint"} in the open-source build`, needs: needManager | needOpenSource,
			run: func(p *probe) {
				e := p.post("/checkpoint").refused(http.StatusNotImplemented, "EnterpriseFeature")
				var d struct {
					Feature string `json:"feature"`
				}
				p.noErr("details", json.Unmarshal(e.Details, &d))
				want(p, "the feature", "checkpoint", d.Feature)
				want(p, "the message", "Cannot use enterprise-only feature (checkpoint) in Feldera community edition.", e.Message)
			},
		},
		{
			id: "C1.2-CHECKPOINT-SYNC-OSS", section: "1.2", says: "POST checkpoint/sync answers 501 EnterpriseFeature in the open-source build", needs: needManager | needOpenSource,
			run: func(p *probe) { p.post("/checkpoint/sync").refused(http.StatusNotImplemented, "EnterpriseFeature") },
		},
		{
			id: "C1.2-CLEAR", section: "1.2", says: "POST clear answers 202 for a stopped pipeline and wipes its storage", needs: needManager | needRestart | needFaults | needEnterprise, sim: withModel(core.ModelExactlyOnce),
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.stop()
				p.post("/clear").is(http.StatusAccepted)
				p.start()
				p.holds("hfc_kv", "")
			},
		},
		{
			id: "C1.2-TIMEOUT", section: "1.2", says: "a call that outlasts the proxy's time-out gets 503 PipelineInteractionUnreachable, whose message says that a timeout was reached", needs: needManager | needFaults, sim: impatient,
			run: func(p *probe) {
				p.inject(felderasim.Fault{Kind: felderasim.Hang, Endpoint: "stats"})
				e := p.get("/stats").refused(http.StatusServiceUnavailable, "PipelineInteractionUnreachable")
				if !strings.Contains(e.Message, "timeout (") || !strings.Contains(e.Message, "was reached") {
					p.failf("expected a message with %q, got %q", "timeout (Ns) was reached", e.Message)
				}
			},
		},
		{
			id: "C1.2-TIMEOUT-query", section: "1.2", says: "the proxy has no time-out for a query", needs: needManager | needFaults, sim: impatient,
			run: func(p *probe) {
				p.inject(felderasim.Fault{Kind: felderasim.Delay, Endpoint: "query", Delay: 400 * time.Millisecond})
				p.holds("hfc_kv", "")
			},
		},
		{
			id: "C1.2-503-APPLIED", section: "1.2", says: "a 503 for an ingress request does not say that it was not applied", needs: needManager | needFaults,
			run: func(p *probe) {
				p.inject(felderasim.Fault{Kind: felderasim.UnavailableAfter})
				p.array("hfc_kv", p.kv(0, "a", 1)).refused(http.StatusServiceUnavailable, "PipelineInteractionUnreachable")
				p.until("the row is there", func() bool { return p.rows("hfc_kv") == "0:a/1" })
			},
		},
		{
			id: "C1.2-503-LATE", section: "1.2", says: "a request that got 503 can be applied after later requests to the same table", needs: needManager | needFaults,
			run: func(p *probe) {
				p.inject(felderasim.Fault{Kind: felderasim.ApplyLate})
				p.array("hfc_kv", p.kv(0, "old", 1)).refused(http.StatusServiceUnavailable, "PipelineInteractionUnreachable")
				p.complete(p.array("hfc_kv", p.kv(0, "new", 2)).token())
				p.until("the old row has come back", func() bool { return p.rows("hfc_kv") == "0:old/1" })
			},
		},
		{
			id: "C1.2-TWICE-start", section: "1.2", says: "the manager's own retry makes start_transaction answer 409 although the client's transaction is open", needs: needManager | needFaults,
			run: func(p *probe) {
				p.inject(felderasim.Fault{Kind: felderasim.AppliedTwice, Endpoint: "start_transaction"})
				p.post("/start_transaction").refused(http.StatusConflict, "TransactionInProgress")
				if api := p.stats().Global.Initiators.API; api == nil || *api != "Started" {
					p.failf("expected that the API's transaction is Started, got none")
				}
				p.commit()
			},
		},
		{
			id: "C1.2-TWICE-commit", section: "1.2", says: "the manager's own retry makes commit_transaction answer 400 although the commit has begun", needs: needManager | needFaults,
			run: func(p *probe) {
				p.begin()
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.ingested(tok)
				p.inject(felderasim.Fault{Kind: felderasim.AppliedTwice, Endpoint: "commit_transaction"})
				p.post("/commit_transaction").refused(http.StatusBadRequest, "NoTransactionInProgress")
				p.complete(tok)
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C1.2-GZIP", section: "1.2", says: "Content-Encoding: gzip is not decoded: the body is parsed as garbage",
			run: func(p *probe) {
				p.touch("hfc_cut")
				body := gzipped("[" + p.kv(0, "a", 1) + "]")
				a := p.send(p.ctx, http.MethodPost, p.w.base+ingressPath("hfc_cut", arrayParams), p.w.key, http.Header{"Content-Encoding": {"gzip"}}, strings.NewReader(body))
				a.refused(http.StatusBadRequest, "ParseErrors")
				p.complete(p.ingress("hfc_cut", arrayParams, "").token())
				p.holds("hfc_cut", "")
			},
		},
		{
			id: "C1.2-CONTENT-TYPE", section: "1.2", says: "Content-Type is not looked at",
			run: func(p *probe) {
				p.touch("hfc_kv")
				for n, ctype := range []string{"text/csv", "application/octet-stream", "no type"} {
					a := p.send(p.ctx, http.MethodPost, p.w.base+ingressPath("hfc_kv", arrayParams), p.w.key, http.Header{"Content-Type": {ctype}}, strings.NewReader("["+p.kv(n, "a", n)+"]"))
					p.complete(a.token())
				}
				p.holds("hfc_kv", "0:a/0 1:a/1 2:a/2")
			},
		},
		{
			id: "C1.2-LARGE", section: "1.2", says: "an ingress body has no small size limit: 8 MiB in one array are taken",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, strings.Repeat("x", 8<<20), 1))
				got := p.query("SELECT COUNT(*) AS c FROM hfc_kv WHERE id = " + itoa(p.id(0)))
				want(p, "rows", "1", string(got[0]["c"]))
			},
		},
		{
			id: "C1.2-TOKEN-CONNECTOR", section: "1.2", says: "GET tables/{t}/connectors/api-ingress-…/completion_token gives a token of the endpoint", needs: needManager,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				_, connector, _ := strings.Cut(p.endpoints("hfc_kv")[0].Name, ".")
				tok := p.get("/tables/hfc_kv/connectors/" + connector + "/completion_token").token()
				p.complete(tok)
			},
		},
		{
			id: "C1.2-STOPPED", section: "1.2", says: "a stopped pipeline answers 503 PipelineInteractionNotDeployed to data-plane calls", needs: needManager | needRestart,
			run: func(p *probe) {
				p.stop()
				p.after(p.start)
				for _, a := range []answer{p.get("/stats"), p.array("hfc_pair", p.kv(0, "a", 1)), p.post("/start_transaction")} {
					a.refused(http.StatusServiceUnavailable, "PipelineInteractionNotDeployed")
				}
			},
		},
	}
}

// authClauses are contract §1.3.
func authClauses() []clause {
	return []clause{
		{
			id: "C1.3-NO-KEY", section: "1.3", says: "without a key the manager answers 401 AuthenticationFailed, without details", needs: needAuth,
			run: func(p *probe) {
				p.send(p.ctx, http.MethodGet, p.w.base+"/stats", "", nil, nil).refusedPlain(http.StatusUnauthorized, "AuthenticationFailed")
			},
		},
		{
			id: "C1.3-WRONG-KEY", section: "1.3", says: "a wrong key is answered like none", needs: needAuth,
			run: func(p *probe) {
				p.send(p.ctx, http.MethodGet, p.w.base+"/stats", simKey("x"), nil, nil).refusedPlain(http.StatusUnauthorized, "AuthenticationFailed")
			},
		},
		{
			id: "C1.3-PREFIX", section: "1.3", says: `the prefix "apikey:" is part of the key`, needs: needAuth,
			run: func(p *probe) {
				p.send(p.ctx, http.MethodGet, p.w.base+"/stats", strings.TrimPrefix(p.w.key, "apikey:"), nil, nil).is(http.StatusUnauthorized)
			},
		},
		{
			id: "C1.3-INGRESS-NO-KEY", section: "1.3", says: "a refused key applies nothing of an ingress request", needs: needAuth,
			run: func(p *probe) {
				p.touch("hfc_kv")
				a := p.send(p.ctx, http.MethodPost, p.w.base+ingressPath("hfc_kv", arrayParams), "", nil, strings.NewReader("["+p.kv(0, "a", 1)+"]"))
				a.refusedPlain(http.StatusUnauthorized, "AuthenticationFailed")
				p.put("hfc_kv", p.kv(1, "b", 2))
				p.holds("hfc_kv", "1:b/2")
			},
		},
		{
			id: "C1.3-ROLE-ingress", section: "1.3", says: "a key that may only read gets 403 InsufficientPermissions for ingress, without details", needs: needReadOnly,
			run: func(p *probe) {
				p.send(p.ctx, http.MethodPost, p.w.base+ingressPath("hfc_kv", arrayParams), p.w.readOnlyKey, nil, strings.NewReader("[]")).
					refusedPlain(http.StatusForbidden, "InsufficientPermissions")
			},
		},
		{
			id: "C1.3-ROLE-query", section: "1.3", says: "a query counts as writing", needs: needReadOnly,
			run: func(p *probe) {
				p.send(p.ctx, http.MethodGet, p.w.base+"/query?format=json&sql="+url.QueryEscape("SELECT 1 AS one"), p.w.readOnlyKey, nil, nil).
					refusedPlain(http.StatusForbidden, "InsufficientPermissions")
			},
		},
		{
			id: "C1.3-ROLE-read", section: "1.3", says: "completion_status and stats count as reading", needs: needReadOnly,
			run: func(p *probe) {
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.send(p.ctx, http.MethodGet, p.w.base+"/stats", p.w.readOnlyKey, nil, nil).is(http.StatusOK)
				p.send(p.ctx, http.MethodGet, p.w.base+"/completion_status?token="+url.QueryEscape(tok), p.w.readOnlyKey, nil, nil).is(http.StatusOK)
				p.complete(tok)
			},
		},
	}
}

// forced is a clause about the answer in a state that only a simulator can be
// put into.
func forced(id, section string, st core.State, status int, code string, says string) clause {
	return clause{
		id: id, section: section, says: says, needs: needFaults,
		run: func(p *probe) {
			p.sim().SetState(st)
			p.array("hfc_kv", p.kv(0, "a", 1)).refused(status, code)
			p.sim().Resume()
			p.holds("hfc_kv", "")
		},
	}
}

// errorClauses are the table of contract §1.4, so far as no other group has
// the row.
func errorClauses() []clause {
	badConfig := func(id, params, code, says string) clause {
		return clause{
			id: id, section: "1.4", says: says,
			run: func(p *probe) {
				p.ingress("hfc_kv", params, "["+p.kv(0, "a", 1)+"]").refused(http.StatusBadRequest, code)
			},
		}
	}
	return []clause{
		{
			id: "C1.4-ParseErrors", section: "1.4", says: "a bad record gets 400 ParseErrors",
			run: func(p *probe) { p.array("hfc_kv", `{"insert":{"id":"x"}}`).bad(1) },
		},
		{
			id: "C1.4-InvalidParam", section: "1.4", says: `a malformed token gets 400 InvalidParam, whose message begins "Invalid parameter: invalid completion token:"`,
			run: func(p *probe) {
				e := p.completionOf("not a token").refused(http.StatusBadRequest, "InvalidParam")
				if !strings.HasPrefix(e.Message, "Invalid parameter: invalid completion token:") {
					p.failf("expected a message that begins %q, got %q", "Invalid parameter: invalid completion token:", e.Message)
				}
			},
		},
		badConfig("C1.4-ParserConfig-update", "format=json&update_format=nonsense", "ConfigError.ParserConfigParseError", "an unknown update_format gets 400 ConfigError.ParserConfigParseError"),
		badConfig("C1.4-ParserConfig-flavor", "format=json&json_flavor=nonsense", "ConfigError.ParserConfigParseError", "an unknown json_flavor gets 400 ConfigError.ParserConfigParseError"),
		badConfig("C1.4-ParserConfig-array", "format=json&array=TRUE", "ConfigError.ParserConfigParseError", "array=TRUE, not in lower case, gets 400 ConfigError.ParserConfigParseError"),
		badConfig("C1.4-InputFormatNotSupported", "format=json&update_format=snowflake", "ConfigError.InputFormatNotSupported", "update_format=snowflake gets 400 ConfigError.InputFormatNotSupported"),
		badConfig("C1.4-UnknownInputFormat", "format=nonsense", "ConfigError.UnknownInputFormat", "an unknown format gets 400 ConfigError.UnknownInputFormat"),
		{
			id: "C1.4-IncarnationUuidMismatch", section: "1.4", says: "checkpoint_status of another incarnation gets 400 IncarnationUuidMismatch with both in details",
			run: func(p *probe) {
				const foreign = "019a0000-0000-7000-8000-000000000001"
				e := p.get("/checkpoint_status?incarnation_uuid="+foreign).refused(http.StatusBadRequest, "IncarnationUuidMismatch")
				var d struct{ Requested, Expected string }
				p.noErr("details", json.Unmarshal(e.Details, &d, json.MatchCaseInsensitiveNames(true)))
				want(p, "details.requested", foreign, d.Requested)
				want(p, "details.expected", p.incarnation(), d.Expected)
			},
		},
		{
			id: "C1.4-UnknownInputStream", section: "1.4", says: "an unknown table gets 404 ConfigError.UnknownInputStream that names the endpoint and the table",
			run: func(p *probe) {
				e := p.ingress("hfc_nowhere", arrayParams, "[]").refused(http.StatusNotFound, "ConfigError.UnknownInputStream")
				var d struct {
					Config struct {
						Endpoint string `json:"endpoint_name"`
						Stream   string `json:"stream_name"`
					} `json:"config_error"`
				}
				p.noErr("details", json.Unmarshal(e.Details, &d))
				want(p, "details.config_error.stream_name", "hfc_nowhere", d.Config.Stream)
				if !endpointName.MatchString(d.Config.Endpoint) {
					p.failf("expected details.config_error.endpoint_name like hfc_nowhere.api-ingress-<16 hex>, got %q", d.Config.Endpoint)
				}
			},
		},
		{
			id: "C1.4-UnknownInputEndpoint", section: "1.4", says: "a completion token of an unknown connector gets 404 UnknownInputEndpoint",
			run: func(p *probe) {
				path := "/input_endpoints/hfc_kv.nonsense/completion_token"
				if p.w.root != "" {
					path = "/tables/hfc_kv/connectors/nonsense/completion_token"
				}
				p.get(path).refused(http.StatusNotFound, "UnknownInputEndpoint")
			},
		},
		{
			id: "C1.4-UnknownPipelineName", section: "1.4", says: "an unknown pipeline gets 404 UnknownPipelineName", needs: needManager,
			run: func(p *probe) {
				p.manager(http.MethodGet, "/v0/pipelines/hfc-nowhere").refused(http.StatusNotFound, "UnknownPipelineName")
				p.manager(http.MethodPost, "/v0/pipelines/hfc-nowhere/ingress/hfc_kv?"+arrayParams).refused(http.StatusNotFound, "UnknownPipelineName")
			},
		},
		forced("C1.4-Terminating", "1.4", core.StateTerminating, http.StatusGone, "Terminating", "while the process shuts down ingress gets 410 Terminating"),
		forced("C1.4-Initializing", "1.4", core.StateInitializing, http.StatusServiceUnavailable, "Initializing", "while the pipeline initializes ingress gets 503 Initializing"),
		forced("C1.4-Suspended", "1.4", core.StateSuspended, http.StatusServiceUnavailable, "Suspended", "when the pipeline is suspended ingress gets 503 Suspended"),
		forced("C1.4-RestoreInProgress", "1.4", core.StateRestoring, http.StatusServiceUnavailable, "RestoreInProgress", "while the pipeline restores a new endpoint gets 503 RestoreInProgress"),
		forced("C1.4-BootstrapInProgress", "1.4", core.StateBootstrapping, http.StatusServiceUnavailable, "BootstrapInProgress", "while the pipeline bootstraps a new endpoint gets 503 BootstrapInProgress"),
		forced("C1.4-FAILED", "1.4", core.StateFailed, http.StatusInternalServerError, "DbspPanic", "a failed pipeline answers ingress with 500 and the controller's error"),
		{
			id: "C1.4-DETAILS-null", section: "1.4", says: "an error that is a unit variant has details null", needs: needFaults,
			run: func(p *probe) {
				p.sim().SetState(core.StateInitializing)
				e := p.get("/stats").refused(http.StatusServiceUnavailable, "Initializing")
				want(p, "details", "null", string(e.Details))
			},
		},
	}
}

var endpointName = regexp.MustCompile(`^[^.]+\.api-ingress-[0-9a-f]{16}$`)

// schemaJSON is program_info.schema.
type schemaJSON struct {
	Inputs []relationJSON `json:"inputs"`
}

type relationJSON struct {
	Name          string      `json:"name"`
	CaseSensitive bool        `json:"case_sensitive"`
	Fields        []fieldJSON `json:"fields"`
	Materialized  bool        `json:"materialized"`
	PrimaryKey    []string    `json:"primary_key"`
}

type fieldJSON struct {
	Name          string   `json:"name"`
	CaseSensitive bool     `json:"case_sensitive"`
	Type          typeJSON `json:"columntype"`
}

type typeJSON struct {
	Type      string      `json:"type"`
	Nullable  bool        `json:"nullable"`
	Precision *int        `json:"precision"`
	Scale     *int        `json:"scale"`
	Component *typeJSON   `json:"component"`
	Fields    []fieldJSON `json:"fields"`
	Key       *typeJSON   `json:"key"`
	Value     *typeJSON   `json:"value"`
}

func (s *schemaJSON) input(name string) (relationJSON, bool) {
	i := slices.IndexFunc(s.Inputs, func(r relationJSON) bool { return r.Name == name })
	if i < 0 {
		return relationJSON{}, false
	}
	return s.Inputs[i], true
}

func (r relationJSON) field(p *probe, name string) fieldJSON {
	i := slices.IndexFunc(r.Fields, func(f fieldJSON) bool { return f.Name == name })
	if i < 0 {
		p.failf("expected a column %q in table %q, got none", name, r.Name)
	}
	return r.Fields[i]
}

// table reads one input table of the schema, from the manager, or from the
// process where there is no manager.
func (p *probe) table(name string) relationJSON {
	var s schemaJSON
	if p.w.root == "" {
		p.get("/metadata").is(http.StatusOK).into(&s)
	} else {
		var d struct {
			Info struct {
				Schema schemaJSON `json:"schema"`
			} `json:"program_info"`
		}
		p.get("").is(http.StatusOK).into(&d)
		s = d.Info.Schema
	}
	r, ok := s.input(name)
	if !ok {
		p.failf("expected a table %q in program_info.schema.inputs, got none", name)
	}
	return r
}

// schemaClauses are contract §1.5.
func schemaClauses() []clause {
	return []clause{
		{
			id: "C1.5-PIPELINE", section: "1.5", says: "GET /v0/pipelines/{p} has the fields that a client reads", needs: needManager,
			run: func(p *probe) {
				m := p.get("").is(http.StatusOK).members()
				p.include("the pipeline", m, "id", "name", "version", "refresh_version", "platform_version", "runtime_config", "program_code", "program_status",
					"program_info", "deployment_id", "deployment_status", "deployment_desired_status", "deployment_resources_status",
					"deployment_runtime_status", "deployment_error", "storage_status")
				want(p, "deployment_status", `"Running"`, string(m["deployment_status"]))
				want(p, "program_status", `"Success"`, string(m["program_status"]))
			},
		},
		{
			id: "C1.5-SELECTOR", section: "1.5", says: "selector=status leaves program_info out, on one pipeline and in the list", needs: needManager,
			run: func(p *probe) {
				one := p.get("?selector=status").is(http.StatusOK).members()
				var list []map[string]jsontext.Value
				p.manager(http.MethodGet, "/v0/pipelines?selector=status").is(http.StatusOK).into(&list)
				for _, m := range append(list, one) {
					if v, ok := m["program_info"]; ok && string(v) != "null" {
						p.failf("expected no program_info with selector=status, got %s", clip(v))
					}
					p.include("the status", m, "name", "deployment_status")
				}
			},
		},
		{
			id: "C1.5-LIST", section: "1.5", says: "GET /v0/pipelines lists the pipelines, by default with everything", needs: needManager,
			run: func(p *probe) {
				var list []map[string]jsontext.Value
				p.manager(http.MethodGet, "/v0/pipelines").is(http.StatusOK).into(&list)
				i := slices.IndexFunc(list, func(m map[string]jsontext.Value) bool { return string(m["name"]) == `"`+p.w.pipeline+`"` })
				if i < 0 {
					p.failf("expected the pipeline in the list, got none of its name")
				}
				p.include("the listed pipeline", list[i], "program_info", "runtime_config")
			},
		},
		{
			id: "C1.5-FOLDED", section: "1.5", says: "an unquoted table is listed in lower case with case_sensitive false",
			run: func(p *probe) { want(p, "case_sensitive", false, p.table("hfc_kv").CaseSensitive) },
		},
		{
			id: "C1.5-QUOTED", section: "1.5", says: "a quoted table or column is listed as written with case_sensitive true",
			run: func(p *probe) {
				t := p.table("HfcQuoted")
				want(p, "case_sensitive of the table", true, t.CaseSensitive)
				want(p, "case_sensitive of the column", true, t.field(p, "Must").CaseSensitive)
				want(p, "case_sensitive of an unquoted column", false, t.field(p, "id").CaseSensitive)
			},
		},
		{
			id: "C1.5-PRIMARY-KEY", section: "1.5", says: "primary_key is an array of column names",
			run: func(p *probe) {
				want(p, "primary_key", "id", strings.Join(p.table("hfc_kv").PrimaryKey, ","))
				key := p.table("hfc_composite").PrimaryKey
				slices.Sort(key)
				want(p, "primary_key", "k1,k2", strings.Join(key, ","))
			},
		},
		{
			id: "C1.5-NO-KEY", section: "1.5", says: "primary_key of a table without one is null",
			run: func(p *probe) {
				if key := p.table("hfc_bag").PrimaryKey; key != nil {
					p.failf("expected null, got %v", key)
				}
			},
		},
		{
			id: "C1.5-MATERIALIZED", section: "1.5", says: "materialized is true where it was declared and false by default",
			run: func(p *probe) {
				want(p, "materialized of hfc_bag", true, p.table("hfc_bag").Materialized)
				want(p, "materialized of hfc_hidden", false, p.table("hfc_hidden").Materialized)
			},
		},
		{
			id: "C1.5-NULLABLE", section: "1.5", says: "columntype.nullable is false for NOT NULL columns only",
			run: func(p *probe) {
				t := p.table("hfc_strict")
				want(p, "nullable of must", false, t.field(p, "must").Type.Nullable)
				want(p, "nullable of may", true, t.field(p, "may").Type.Nullable)
			},
		},
		{
			id: "C1.5-TYPE-NAMES", section: "1.5", says: "every type has its wire name",
			run: func(p *probe) {
				t := p.table("hfc_types")
				for col, name := range map[string]string{
					"id": "BIGINT", "t_boolean": "BOOLEAN", "t_tinyint": "TINYINT", "t_smallint": "SMALLINT", "t_integer": "INTEGER", "t_bigint": "BIGINT",
					"t_utinyint": "UTINYINT", "t_usmallint": "USMALLINT", "t_uinteger": "UINTEGER", "t_ubigint": "UBIGINT",
					"t_real": "REAL", "t_double": "DOUBLE", "t_decimal": "DECIMAL", "t_char": "CHAR", "t_varchar": "VARCHAR",
					"t_date": "DATE", "t_time": "TIME", "t_timestamp": "TIMESTAMP", "t_timestamp_tz": "TIMESTAMP_TZ",
					"t_binary": "BINARY", "t_varbinary": "VARBINARY", "t_uuid": "UUID", "t_variant": "VARIANT",
					"t_array": "ARRAY", "t_map": "MAP", "t_row": "STRUCT",
				} {
					want(p, "the type of "+col, name, t.field(p, col).Type.Type)
				}
			},
		},
		{
			id: "C1.5-DECIMAL", section: "1.5", says: "DECIMAL carries precision and scale",
			run: func(p *probe) {
				f := p.table("hfc_types").field(p, "t_decimal").Type
				if f.Precision == nil || f.Scale == nil || *f.Precision != 12 || *f.Scale != 2 {
					p.failf("expected precision 12 and scale 2, got %v and %v", f.Precision, f.Scale)
				}
			},
		},
		{
			id: "C1.5-NESTED", section: "1.5", says: "ARRAY carries component, MAP key and value, ROW fields",
			run: func(p *probe) {
				t := p.table("hfc_types")
				a, m, r := t.field(p, "t_array").Type, t.field(p, "t_map").Type, t.field(p, "t_row").Type
				if a.Component == nil || a.Component.Type != "BIGINT" {
					p.failf("expected component BIGINT, got %+v", a.Component)
				}
				if m.Key == nil || m.Value == nil || m.Key.Type != "VARCHAR" || m.Value.Type != "BIGINT" {
					p.failf("expected key VARCHAR and value BIGINT, got %+v and %+v", m.Key, m.Value)
				}
				if len(r.Fields) != 2 || r.Fields[0].Name != "a" || r.Fields[1].Name != "b" {
					p.failf("expected the fields a and b, got %+v", r.Fields)
				}
			},
		},
		{
			id: "C1.5-METADATA-bare", section: "1.5", says: "GET /metadata of the process, where it was started with it, is the same schema", needs: needBare | needManager,
			run: func(p *probe) {
				var s schemaJSON
				p.process(http.MethodGet, "/metadata").is(http.StatusOK).into(&s)
				got, _ := s.input("hfc_types")
				a, _ := json.Marshal(p.table("hfc_types"))
				b, _ := json.Marshal(got)
				want(p, "the schema of hfc_types", string(a), string(b))
			},
		},
	}
}

// queryClauses are contract §1.6.
func queryClauses() []clause {
	sql := func(q string) string { return url.QueryEscape(q) }
	return []clause{
		{
			id: "C1.6-JSON", section: "1.6", says: "format=json answers one JSON object a line",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1), p.kv(1, "b", 2))
				p.holds("hfc_kv", "0:a/1 1:b/2")
			},
		},
		{
			id: "C1.6-TEXT", section: "1.6", says: "the default format is text",
			run: func(p *probe) {
				q := "/query?sql=" + sql("SELECT 42 AS answer")
				a, b := p.get(q).is(http.StatusOK), p.get(q+"&format=text").is(http.StatusOK)
				want(p, "the default answer", string(b.body), string(a.body))
				if !strings.Contains(string(a.body), "| 42") {
					p.failf("expected a drawn table with 42, got %s", clip(a.body))
				}
			},
		},
		{
			id: "C1.6-ERROR-before", section: "1.6", says: "an error before the first row gets 400 AdHocQueryError",
			run: func(p *probe) {
				p.get("/query?format=json&sql="+sql("SELECT nonsense FROM hfc_kv")).refused(http.StatusBadRequest, "AdHocQueryError")
			},
		},
		{
			id: "C1.6-ERROR-inside", section: "1.6", says: "an error after the first bytes stands in the body of a 200", needs: needFaults,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1), p.kv(1, "b", 2))
				p.inject(felderasim.Fault{Kind: felderasim.QueryError, Endpoint: "query", Rows: 1})
				a := p.get("/query?format=json&sql=" + sql("SELECT id FROM hfc_kv")).is(http.StatusOK)
				lines := strings.Split(strings.TrimSpace(string(a.body)), "\n")
				if len(lines) != 2 || !strings.Contains(lines[1], `"error"`) {
					p.failf("expected one row and an error in the body, got %s", clip(a.body))
				}
			},
		},
		{
			id: "C1.6-NOT-MATERIALIZED", section: "1.6", says: "a table that is not materialized cannot be selected",
			run: func(p *probe) {
				p.get("/query?format=json&sql="+sql("SELECT id FROM hfc_hidden")).refused(http.StatusBadRequest, "AdHocQueryError")
			},
		},
		{
			id: "C1.6-VIEW", section: "1.6", says: "a materialized view can be selected",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.holds("hfc_view", "0:a/1")
			},
		},
		{
			id: "C1.6-SNAPSHOT", section: "1.6", says: "a query sees the last completed transaction: not what an open one has ingested", needs: needExclusive,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "old", 1))
				p.begin()
				tok := p.array("hfc_kv", p.kv(0, "new", 2)).token()
				p.ingested(tok)
				p.holds("hfc_kv", "0:old/1")
				p.commit()
				p.complete(tok)
				p.holds("hfc_kv", "0:new/2")
			},
		},
		{
			id: "C1.6-RESTORING", section: "1.6", says: "a query fails with RestoreInProgress while the pipeline restores", needs: needFaults,
			run: func(p *probe) {
				p.sim().SetState(core.StateRestoring)
				p.get("/query?format=json&sql="+sql("SELECT id FROM hfc_kv")).refused(http.StatusServiceUnavailable, "RestoreInProgress")
			},
		},
		{
			id: "C1.6-COMPLETE-SEEN", section: "1.6", says: "rows whose token is complete are seen by the next query",
			run: func(p *probe) {
				for n := range 10 {
					p.put("hfc_kv", p.kv(0, "a", n))
					p.holds("hfc_kv", "0:a/"+itoa(int64(n)))
				}
			},
		},
	}
}
