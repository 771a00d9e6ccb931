package core

import (
	"net/http"
	"slices"
	"time"
)

// CheckpointInfo is an entry of GET /checkpoints.
type CheckpointInfo struct {
	UUID             string  `json:"uuid"`
	Identifier       *string `json:"identifier"`
	Fingerprint      uint64  `json:"fingerprint"`
	Size             uint64  `json:"size"`
	Steps            uint64  `json:"steps"`
	ProcessedRecords uint64  `json:"processed_records"`
}

// CheckpointFailure is the failure part of checkpoint_status.
type CheckpointFailure struct {
	SequenceNumber uint64 `json:"sequence_number"`
	Error          string `json:"error"`
	FailedAt       string `json:"failed_at"`
}

// CheckpointStatus is the answer of GET /checkpoint_status.
type CheckpointStatus struct {
	Success *uint64            `json:"success"`
	Failure *CheckpointFailure `json:"failure"`
}

// checkpoint is a state of the pipeline as it was when the checkpoint
// started. Its tables are never changed.
type checkpoint struct {
	CheckpointInfo
	tables    map[string]*tableState
	endpoints []endpointState
	startedAt time.Time
}

type endpointState struct {
	spelling       string
	cfg            ParserConfig
	records, bytes uint64 // ingested
}

// RequestCheckpoint asks for a checkpoint and gives its sequence number. The
// request is answered by whatever checkpoint finishes next, be it one that is
// being written already.
func (e *Engine) RequestCheckpoint() (uint64, *APIError) {
	if err := e.Ready(); err != nil {
		return 0, err
	}
	seq := e.nextSeq
	e.nextSeq++
	e.pending = append(e.pending, seq)
	return seq, nil
}

// StartPeriodicCheckpoint begins a checkpoint that nobody asked for, as the
// interval does. It tells whether one could begin.
func (e *Engine) StartPeriodicCheckpoint() bool {
	if !e.cfg.Enterprise || e.running != nil || e.engineTxn != "NoTransaction" || e.holdCheckpoint {
		return false
	}
	e.startCheckpoint()
	return true
}

// WantsCheckpoint tells whether AdvanceCheckpoint would do anything.
func (e *Engine) WantsCheckpoint() bool {
	switch {
	case e.holdCheckpoint:
		return false
	case len(e.pending) > 0 && !e.cfg.Enterprise:
		return true
	case e.running != nil:
		return e.phase == 0 || e.outputsReached(e.running)
	default:
		return len(e.pending) > 0 && e.engineTxn == "NoTransaction"
	}
}

func (e *Engine) outputsReached(c *checkpoint) bool {
	return e.delivered >= c.ProcessedRecords
}

// AdvanceCheckpoint moves the checkpoint by one phase:
//
//	nothing runs, one is asked for → its content is fixed, it runs
//	operator state is written      → it is listed by GET /checkpoints
//	outputs are delivered          → it is the resume point, the journal is
//	                                 truncated, and every request that is
//	                                 pending is credited with it, also those
//	                                 that came after it had started
//
// It gives false when nothing could move.
func (e *Engine) AdvanceCheckpoint() bool {
	if !e.WantsCheckpoint() {
		return false
	}
	switch {
	case !e.cfg.Enterprise:
		e.failure = &CheckpointFailure{
			SequenceNumber: e.pending[len(e.pending)-1],
			Error:          "Cannot checkpoint or suspend: this feature is only available in the Enterprise edition.",
			FailedAt:       e.now().UTC().Format("2006-01-02T15:04:05.000000Z"),
		}
		e.pending = nil
	case e.running == nil:
		e.startCheckpoint()
	case e.phase == 0:
		e.phase = 1
		e.listed = append(e.listed, e.running)
	default:
		e.finishCheckpoint()
	}
	return true
}

func (e *Engine) startCheckpoint() {
	steps := e.initiated
	if !e.stepped {
		steps = e.base
	}
	c := &checkpoint{
		CheckpointInfo: CheckpointInfo{
			UUID: e.newUUID(), Fingerprint: fingerprint(e.cfg.Program.Text), Steps: steps, ProcessedRecords: e.processed,
		},
		tables:    map[string]*tableState{},
		startedAt: e.now(),
	}
	for name, t := range e.tables {
		c.tables[name] = t.clone()
		c.Size += 4096 + 64*uint64(len(t.rows)+len(t.bag))
	}
	for _, ep := range e.endpoints {
		c.endpoints = append(c.endpoints, endpointState{ep.spelling, ep.cfg, ep.ingested, ep.totalBytes - ep.queuedBytes})
	}
	e.running, e.phase = c, 0
}

func (e *Engine) finishCheckpoint() {
	c := e.running
	e.running = nil
	e.resume = c
	// Only the newest is of use; a few older ones stay listed, as on disk.
	if n := len(e.listed); n > 2 {
		e.listed = slices.Delete(e.listed, 0, n-2)
	}
	e.journal = slices.DeleteFunc(e.journal, func(js journalStep) bool { return js.step <= c.Steps })
	for _, seq := range e.pending {
		if e.success == nil || *e.success < seq {
			s := seq
			e.success = &s
		}
	}
	e.pending = nil
}

// CheckpointStatus reports on the requests of this process. A request for
// another incarnation is refused.
func (e *Engine) CheckpointStatus(incarnation string) (CheckpointStatus, *APIError) {
	if incarnation != "" && incarnation != e.uuid {
		return CheckpointStatus{}, errIncarnationMismatch(incarnation, e.uuid)
	}
	return CheckpointStatus{Success: e.success, Failure: e.failure}, nil
}

// Checkpoints lists the checkpoints whose operator state is written. The last
// one may not be a resume point yet.
func (e *Engine) Checkpoints() []CheckpointInfo {
	out := make([]CheckpointInfo, 0, len(e.listed))
	for _, c := range e.listed {
		out = append(out, c.CheckpointInfo)
	}
	return out
}

// ErrEnterprise is the manager's answer to an enterprise-only call in the
// open-source edition.
func ErrEnterprise(feature string) *APIError {
	return &APIError{
		Status: http.StatusNotImplemented, Code: "EnterpriseFeature",
		Message: "Cannot use enterprise-only feature (" + feature + ") in Feldera community edition.",
		Details: map[string]string{"feature": feature},
	}
}
