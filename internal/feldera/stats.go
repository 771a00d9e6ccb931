package feldera

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"holdfast/internal/decode"
)

// Stats is the part of the pipeline's statistics that decisions rest on.
type Stats struct {
	// State is "Running", "Paused", … as the engine names it.
	State string
	// Incarnation identifies the process; another one after every restart.
	Incarnation string
	// StartTime is this process's, InitialStartTime the one kept across a
	// resume, both in Unix seconds. An incarnation that changed together with
	// InitialStartTime started from nothing.
	StartTime, InitialStartTime int64
	// InitiatedSteps and CompletedSteps read 0 until a process's first step.
	InitiatedSteps, CompletedSteps uint64
	// BufferedRecords are queued in memory and not yet ingested.
	BufferedRecords uint64
	Transaction     TransactionState
	// Checkpoint is what the checkpointer does: "idle", "delayed",
	// "in_progress", or "" where the build does not say.
	Checkpoint string
	// CheckpointDelays are the reasons of "delayed".
	CheckpointDelays []string
	// CheckpointsImpossible are the reasons why this pipeline can never make a
	// checkpoint; empty where it can.
	CheckpointsImpossible []string
	Inputs                []InputStats
	Outputs               []OutputStats
}

// InputStats is one input endpoint.
type InputStats struct {
	Endpoint, Table string
	BufferedRecords uint64
	ParseErrors     uint64
	FatalError      string
	Paused          bool
}

// OutputStats is one output endpoint. Steps is how far it has delivered; 0
// where the build does not say.
type OutputStats struct {
	Endpoint   string
	Steps      uint64
	FatalError string
}

// statsBody is the wire form. Every field may be missing.
type statsBody struct {
	GlobalMetrics struct {
		State             string  `json:"state"`
		TransactionStatus string  `json:"transaction_status"`
		TransactionID     int64   `json:"transaction_id"`
		TransactionMsecs  *int64  `json:"transaction_msecs"`
		TransactionRecs   *uint64 `json:"transaction_records"`
		Initiators        struct {
			TransactionID         *int64         `json:"transaction_id"`
			InitiatedByAPI        *string        `json:"initiated_by_api"`
			InitiatedByConnectors map[string]any `json:"initiated_by_connectors"`
		} `json:"transaction_initiators"`
		StartTime            int64  `json:"start_time"`
		InitialStartTime     int64  `json:"initial_start_time"`
		IncarnationUUID      string `json:"incarnation_uuid"`
		BufferedInputRecords uint64 `json:"buffered_input_records"`
		TotalInitiatedSteps  uint64 `json:"total_initiated_steps"`
		TotalCompletedSteps  uint64 `json:"total_completed_steps"`
	} `json:"global_metrics"`
	// These differ between versions; they inform and must not make the rest
	// unreadable.
	CheckpointActivity        jsontext.Value `json:"checkpoint_activity"`
	PermanentCheckpointErrors jsontext.Value `json:"permanent_checkpoint_errors"`
	SuspendError              jsontext.Value `json:"suspend_error"`
	Inputs                    []struct {
		EndpointName string `json:"endpoint_name"`
		Config       struct {
			Stream string `json:"stream"`
		} `json:"config"`
		Metrics struct {
			BufferedRecords uint64 `json:"buffered_records"`
			NumParseErrors  uint64 `json:"num_parse_errors"`
		} `json:"metrics"`
		FatalError jsontext.Value `json:"fatal_error"`
		Paused     bool           `json:"paused"`
	} `json:"inputs"`
	Outputs []struct {
		EndpointName string `json:"endpoint_name"`
		Metrics      struct {
			TotalProcessedSteps uint64 `json:"total_processed_steps"`
		} `json:"metrics"`
		FatalError jsontext.Value `json:"fatal_error"`
	} `json:"outputs"`
}

// Stats reads the pipeline's statistics: one attempt.
func (c *Client) Stats(ctx context.Context) (*Stats, error) {
	var b statsBody
	asked := time.Now()
	cl := call{endpoint: epStats, path: "/stats", limit: maxLargeBody}
	if err := c.getJSON(ctx, cl, &b); err != nil {
		return nil, err
	}
	g := &b.GlobalMetrics
	if g.IncarnationUUID == "" {
		return nil, &decode.Refusal{
			Reason: decode.ReasonUnsupported, What: "pipeline", Where: c.where(),
			Why: "its statistics carry no incarnation_uuid", Expected: "a Feldera that reports it (0.330 or later)",
			Do: "upgrade Feldera: without it a restart that loses rows cannot be seen",
		}
	}
	c.hears(clip(g.IncarnationUUID, maxIncarnation), asked)
	s := &Stats{
		State: g.State, Incarnation: clip(g.IncarnationUUID, maxIncarnation),
		StartTime: g.StartTime, InitialStartTime: g.InitialStartTime,
		InitiatedSteps: g.TotalInitiatedSteps, CompletedSteps: g.TotalCompletedSteps,
		BufferedRecords: g.BufferedInputRecords,
		Transaction: TransactionState{
			Incarnation: clip(g.IncarnationUUID, maxIncarnation),
			Status:      g.TransactionStatus, ID: g.TransactionID,
		},
	}
	b.checkpoints(s)
	if g.Initiators.InitiatedByAPI != nil {
		s.Transaction.API = *g.Initiators.InitiatedByAPI
		if id := g.Initiators.TransactionID; id != nil {
			s.Transaction.ID = *id // the other one is of the transaction before while that commits
		}
	}
	for name := range g.Initiators.InitiatedByConnectors {
		s.Transaction.Connectors = append(s.Transaction.Connectors, clip(name, 100))
	}
	if g.TransactionMsecs != nil && *g.TransactionMsecs > 0 {
		s.Transaction.Since = time.Now().Add(-time.Duration(min(*g.TransactionMsecs, maxAgeMillis)) * time.Millisecond)
	}
	if g.TransactionRecs != nil {
		s.Transaction.Records = *g.TransactionRecs
	}
	for _, in := range b.Inputs {
		s.Inputs = append(s.Inputs, InputStats{
			Endpoint: clip(in.EndpointName, maxEndpoint), Table: clip(in.Config.Stream, maxEndpoint),
			BufferedRecords: in.Metrics.BufferedRecords, ParseErrors: in.Metrics.NumParseErrors,
			FatalError: text(in.FatalError), Paused: in.Paused,
		})
	}
	for _, out := range b.Outputs {
		s.Outputs = append(s.Outputs, OutputStats{
			Endpoint: clip(out.EndpointName, 200), Steps: out.Metrics.TotalProcessedSteps, FatalError: text(out.FatalError),
		})
	}
	return s, nil
}

// maxAgeMillis keeps a claimed age within a time.Duration: a hundred years.
const maxAgeMillis = 100 * 365 * 24 * 3600 * 1000

// maxEndpoint bounds the name of an endpoint or table, in bytes.
const maxEndpoint = 1000

// maxIncarnation bounds an incarnation's length, in bytes.
const maxIncarnation = 128

// text gives a JSON string's text, another value's JSON, and "" for null.
func text(v jsontext.Value) string {
	var s *string
	if json.Unmarshal(v, &s) != nil {
		return clip(string(v), maxMessage)
	}
	if s == nil {
		return ""
	}
	return clip(*s, maxMessage)
}

// checkpoints fills in what the body says about checkpoints.
func (b *statsBody) checkpoints(s *Stats) {
	var activity struct {
		Status  string           `json:"status"`
		Reasons []jsontext.Value `json:"reasons"`
	}
	if json.Unmarshal(b.CheckpointActivity, &activity) == nil {
		s.Checkpoint = clip(activity.Status, 100)
		s.CheckpointDelays = reasons(activity.Reasons)
	}
	var permanent []jsontext.Value
	if json.Unmarshal(b.PermanentCheckpointErrors, &permanent) == nil {
		s.CheckpointsImpossible = reasons(permanent)
	}
	var suspend struct {
		Permanent []jsontext.Value `json:"Permanent"`
	}
	if len(s.CheckpointsImpossible) == 0 && json.Unmarshal(b.SuspendError, &suspend) == nil {
		s.CheckpointsImpossible = reasons(suspend.Permanent)
	}
}

// reasons gives the names of reasons that come as strings or as objects.
func reasons(list []jsontext.Value) []string {
	var out []string
	for _, r := range list[:min(len(list), 16)] {
		out = append(out, text(r))
	}
	return out
}

// Stalled says why accepted rows may stay uncompleted: a transaction that
// freezes all completion, a pipeline that does not run, an output that has not
// delivered. It is "" where nothing of the kind is seen.
func (s *Stats) Stalled() string {
	switch {
	case s.Transaction.Open():
		return s.Transaction.String()
	case s.State != stateRunning:
		return fmt.Sprintf("the pipeline is %s", s.State)
	case s.CompletedSteps >= s.InitiatedSteps:
		return ""
	}
	var behind []string
	for _, o := range s.Outputs {
		if o.FatalError != "" || o.Steps <= s.CompletedSteps {
			behind = append(behind, o.Endpoint)
		}
		if len(behind) == 5 {
			break
		}
	}
	if len(behind) == 0 {
		return ""
	}
	return "outputs that have not delivered yet: " + strings.Join(behind, ", ")
}

// stateRunning is the engine's name for a pipeline that takes input.
const stateRunning = "Running"

// Incarnation reads the pipeline's present incarnation: one attempt. It
// becomes the expected one when none is set yet.
func (c *Client) Incarnation(ctx context.Context) (string, error) {
	asked := time.Now()
	s, err := c.Stats(ctx)
	if err != nil {
		return "", fmt.Errorf("read the incarnation: %w", err)
	}
	_ = c.sameIncarnation(s.Incarnation) // the caller asks, and compares
	c.hears(s.Incarnation, asked)        // it may be expected only now
	return s.Incarnation, nil
}

// Expected is the incarnation that every token must be of, "" while none was
// seen.
func (c *Client) Expected() string {
	c.incMu.Lock()
	defer c.incMu.Unlock()
	return c.expected
}

// RequestLifetime is how long a request that somebody has given up can still be
// applied.
func (c *Client) RequestLifetime() time.Duration { return c.cfg.RequestLifetime }

// Expect makes an incarnation the expected one. Its caller has dealt with what
// the change from the old one lost: see [IncarnationChanged].
func (c *Client) Expect(incarnation string) {
	c.incMu.Lock()
	defer c.incMu.Unlock()
	if c.expected != incarnation {
		c.heard.Store(0)
	}
	c.expected = incarnation
}

// adopt sets the expected incarnation if none is set, and gives the one that
// then holds.
func (c *Client) adopt(incarnation string) string {
	c.incMu.Lock()
	defer c.incMu.Unlock()
	if c.expected == "" {
		c.expected = incarnation
	}
	return c.expected
}

// sameIncarnation compares now with the expected incarnation.
func (c *Client) sameIncarnation(now string) error {
	if was := c.adopt(now); was != now {
		return &IncarnationChanged{Was: was, Now: now}
	}
	return nil
}

// hears notes that an incarnation has answered what it was asked at a time, if it
// is the expected one.
func (c *Client) hears(incarnation string, asked time.Time) {
	c.incMu.Lock()
	defer c.incMu.Unlock()
	if c.expected == incarnation {
		c.heard.Store(asked.UnixNano())
	}
}

// heardOf tells whether the expected incarnation has answered a request that was
// made within the time. A clock that was put back says no.
func (c *Client) heardOf(within time.Duration) bool {
	since := time.Since(time.Unix(0, c.heard.Load()))
	return since >= 0 && since < within
}
