package core

// Stats is the answer of GET /stats, as far as a client of ingress needs it.
type Stats struct {
	Global              GlobalStats     `json:"global_metrics"`
	SuspendError        any             `json:"suspend_error"`
	CheckpointActivity  map[string]any  `json:"checkpoint_activity"`
	PermanentCheckpoint []string        `json:"permanent_checkpoint_errors"`
	Inputs              []EndpointStats `json:"inputs"`
	Outputs             []any           `json:"outputs"`
}

// GlobalStats is global_metrics.
type GlobalStats struct {
	State                 string     `json:"state"`
	BootstrapInProgress   bool       `json:"bootstrap_in_progress"`
	TransactionStatus     string     `json:"transaction_status"`
	TransactionID         uint64     `json:"transaction_id"`
	TransactionMsecs      *int64     `json:"transaction_msecs"`
	TransactionRecords    *uint64    `json:"transaction_records"`
	CommitProgress        any        `json:"commit_progress"`
	TransactionInitiators Initiators `json:"transaction_initiators"`
	StartTime             int64      `json:"start_time"`
	IncarnationUUID       string     `json:"incarnation_uuid"`
	InitialStartTime      int64      `json:"initial_start_time"`
	BufferedInputRecords  uint64     `json:"buffered_input_records"`
	TotalInputRecords     uint64     `json:"total_input_records"`
	TotalProcessedRecords uint64     `json:"total_processed_records"`
	TotalCompletedRecords uint64     `json:"total_completed_records"`
	TotalInitiatedSteps   uint64     `json:"total_initiated_steps"`
	TotalCompletedSteps   uint64     `json:"total_completed_steps"`
	PipelineComplete      bool       `json:"pipeline_complete"`
}

// Initiators is transaction_initiators.
type Initiators struct {
	TransactionID         *uint64        `json:"transaction_id"`
	InitiatedByAPI        *string        `json:"initiated_by_api"`
	InitiatedByConnectors map[string]any `json:"initiated_by_connectors"`
}

// EndpointStats is an element of inputs.
type EndpointStats struct {
	EndpointName      string            `json:"endpoint_name"`
	Config            map[string]string `json:"config"`
	Metrics           EndpointMetrics   `json:"metrics"`
	FatalError        *string           `json:"fatal_error"`
	Paused            bool              `json:"paused"`
	Barrier           bool              `json:"barrier"`
	CompletedFrontier any               `json:"completed_frontier"`
}

// EndpointMetrics is the metrics of an input endpoint.
type EndpointMetrics struct {
	TotalBytes         uint64 `json:"total_bytes"`
	TotalRecords       uint64 `json:"total_records"`
	BufferedRecords    uint64 `json:"buffered_records"`
	BufferedBytes      uint64 `json:"buffered_bytes"`
	NumTransportErrors uint64 `json:"num_transport_errors"`
	NumParseErrors     uint64 `json:"num_parse_errors"`
	EndOfInput         bool   `json:"end_of_input"`
}

// Stats reports on the process.
func (e *Engine) Stats() Stats {
	g := GlobalStats{
		State: "Running", BootstrapInProgress: e.state == StateBootstrapping,
		TransactionStatus:     e.engineTxn,
		TransactionInitiators: Initiators{InitiatedByConnectors: map[string]any{}},
		StartTime:             e.startTime, IncarnationUUID: e.uuid, InitialStartTime: e.initialTime,
		BufferedInputRecords: e.buffered, TotalInputRecords: e.inputRecords,
		TotalProcessedRecords: e.processed, TotalCompletedRecords: e.delivered,
		TotalInitiatedSteps: e.initiated, TotalCompletedSteps: e.completed,
		PipelineComplete: e.inputRecords == e.delivered,
	}
	switch e.state {
	case StatePaused:
		g.State = "Paused"
	case StateTerminating, StateFailed:
		g.State = "Terminated"
	default:
	}
	if e.apiPhase != "" {
		id, phase := e.apiTxn, e.apiPhase
		g.TransactionInitiators.TransactionID, g.TransactionInitiators.InitiatedByAPI = &id, &phase
		g.TransactionID = id
	}
	if e.engineTxn != "NoTransaction" {
		g.TransactionID = e.runningTxn
		ms, n := e.now().Sub(e.txnSince).Milliseconds(), e.txnRecords
		g.TransactionMsecs, g.TransactionRecords = &ms, &n
	}
	if e.engineTxn == "CommitInProgress" {
		g.CommitProgress = map[string]uint64{"completed": 0, "in_progress": 1, "in_progress_processed_records": 0, "in_progress_total_records": e.txnRecords, "remaining": 0}
	}
	s := Stats{Global: g, Inputs: []EndpointStats{}, Outputs: []any{}, CheckpointActivity: map[string]any{"status": "idle"}}
	switch {
	case !e.cfg.Enterprise:
		s.SuspendError = map[string]any{"Permanent": []string{"EnterpriseFeature"}}
		s.PermanentCheckpoint = []string{"EnterpriseFeature"}
	case e.engineTxn != "NoTransaction":
		s.SuspendError = map[string]any{"Temporary": []string{"TransactionInProgress"}}
	}
	const stamp = "2006-01-02T15:04:05.000000Z"
	switch {
	case e.running != nil:
		s.CheckpointActivity = map[string]any{"status": "in_progress", "started_at": e.running.startedAt.UTC().Format(stamp)}
	case e.cfg.Enterprise && len(e.pending) > 0 && e.engineTxn != "NoTransaction":
		s.CheckpointActivity = map[string]any{"status": "delayed", "reasons": []string{"TransactionInProgress"}, "delayed_since": e.txnSince.UTC().Format(stamp)}
	}
	for _, ep := range e.endpoints {
		s.Inputs = append(s.Inputs, EndpointStats{
			EndpointName: ep.Name, Config: map[string]string{"stream": ep.Table.Name},
			Metrics: EndpointMetrics{
				TotalBytes: ep.totalBytes, TotalRecords: ep.totalRecords, BufferedRecords: ep.queuedRecords, BufferedBytes: ep.queuedBytes,
				NumTransportErrors: ep.transportErrs, NumParseErrors: ep.parseErrors,
			},
			FatalError: ep.fatal, Paused: ep.paused,
		})
	}
	return s
}
