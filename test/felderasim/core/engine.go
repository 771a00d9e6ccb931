package core

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"sort"
	"strconv"
	"time"
)

// Model is a pipeline's fault-tolerance model.
type Model string

// The models of contract §6.1.
const (
	ModelNone        Model = "none"
	ModelAtLeastOnce Model = "at_least_once"
	ModelExactlyOnce Model = "exactly_once"
)

// State is what the pipeline process is doing.
type State string

// The states. Only Running and Paused have a circuit.
const (
	StateRunning       State = "Running"
	StatePaused        State = "Paused"
	StateInitializing  State = "Initializing"
	StateRestoring     State = "Restoring"
	StateBootstrapping State = "Bootstrapping"
	StateSuspended     State = "Suspended"
	StateTerminating   State = "Terminating"
	StateFailed        State = "Failed"
)

// Keep says what survives a crash.
type Keep string

// What a new incarnation starts from. ByModel is what the pipeline's model
// gives: nothing, the last checkpoint, or checkpoint and journal.
const (
	KeepByModel    Keep = ""
	KeepNothing    Keep = "nothing"
	KeepCheckpoint Keep = "checkpoint"
	KeepJournal    Keep = "journal"
)

// Limits of the engine.
const (
	// MaxEndpoints is how many HTTP endpoints may ever be created.
	MaxEndpoints = 100
	// MaxQueuedRecords pauses the reader of an endpoint.
	MaxQueuedRecords = 100_000
	// MaxQueuedBytes does so as well.
	MaxQueuedBytes = 1000 * MaxQueuedRecords
	// BatchPerWorker times the workers is what one step takes per endpoint.
	BatchPerWorker = 10_000
	// maxLabels bounds the completion tokens that are remembered.
	maxLabels = 1_000_000
)

// Config is what an Engine is made of.
type Config struct {
	Program    *Program
	Model      Model // "" = none
	Enterprise bool
	Workers    int // 0 = 8
	// Null parses and counts bodies but stores no rows.
	Null bool
	// NewUUID names incarnations and checkpoints; nil counts up from a fixed
	// one, so that runs repeat.
	NewUUID func() string
	// Now is the clock of start_time and the like; nil stands still.
	Now func() time.Time
}

// Engine is a pipeline: what it keeps on disk, and the process that runs now.
type Engine struct {
	cfg   Config
	uuids int

	// What a crash leaves: storage.
	resume *checkpoint // what a restart resumes from, nil for nothing
	listed []*checkpoint
	// journal has every step since resume, and nothing unless the model is
	// exactly_once. As in the engine, only a checkpoint shortens it.
	journal     []journalStep
	initialTime int64 // initial_start_time, seconds
	lastStart   int64 // every start_time is later than the last

	// The tests' thumbs on the scales; they outlive a crash.
	holdAllIngest  bool
	holdTable      map[string]bool
	holdCompletion bool
	holdCommit     bool
	holdCheckpoint bool

	proc
}

// proc is the state of one process: gone with a crash.
type proc struct {
	uuid      string
	startTime int64
	state     State
	tables    map[string]*tableState
	endpoints []*Endpoint // by id
	byName    map[string]*Endpoint
	slots     int // endpoints that hold one of the MaxEndpoints

	// total_completed_steps <= total_initiated_steps. completed stands still
	// while a transaction is open or outputs are held.
	initiated, completed uint64
	base                 uint64 // step count that was resumed from
	stepped              bool   // false: the counters still read 0
	inputRecords         uint64
	buffered             uint64
	processed            uint64 // records of completed transactions
	delivered            uint64 // processed, as far as outputs have got

	// Transactions. apiPhase is what the API asked for; engineTxn is what the
	// circuit does.
	nextTxn    uint64
	apiPhase   string // "", "Started", "Committed"
	apiTxn     uint64
	engineTxn  string // "NoTransaction", "TransactionInProgress", "CommitInProgress"
	runningTxn uint64
	txnOps     []tableOps
	txnRecords uint64
	txnSince   time.Time

	// Checkpoints of this process.
	nextSeq uint64
	pending []uint64
	running *checkpoint
	phase   int // of running: 0 writing, 1 listed
	success *uint64
	failure *CheckpointFailure
}

type tableState struct {
	def    *TableDef
	rows   map[string]Row  // by key, for a table with one
	bag    map[Row]int64   // weights, for a table without; never 0
	count  uint64          // records applied
	dirty  map[string]bool // keys or rows changed since Changes; nil = not watched
	reload bool            // dirty has overflowed
}

type tableOps struct {
	table *tableState
	ops   []Op
}

// Endpoint is one HTTP ingress endpoint. ID, Name, Table and Parser do not
// change; the rest belongs to the Engine.
type Endpoint struct {
	ID     uint64
	Name   string
	Table  *TableDef
	Parser *Parser

	cfg            ParserConfig
	spelling       string
	table          *tableState
	queue          []Entry
	queuedRecords  uint64
	queuedBytes    uint64
	totalRecords   uint64 // received
	totalBytes     uint64
	ingested       uint64 // taken by the circuit
	parseErrors    uint64
	transportErrs  uint64
	fatal          *string
	paused         bool
	holdsSlot      bool
	labels         []label // by count, ascending
	firstUnlabeled int
}

// label is a completion token that was issued: the step count at which the
// endpoint's first count records had been ingested.
type label struct {
	count uint64
	step  uint64
	known bool
}

type journalStep struct {
	step    uint64
	batches []journalBatch
	inTxn   bool // part of a transaction
	commits bool // the last step of one
}

type journalBatch struct {
	spelling string
	cfg      ParserConfig
	ops      []Op
	records  uint64
	bytes    uint64
}

// New makes an engine whose first process is running and empty.
func New(cfg Config) (*Engine, error) {
	if cfg.Program == nil || len(cfg.Program.Tables) == 0 {
		return nil, fmt.Errorf("make engine: the program declares no table")
	}
	switch cfg.Model {
	case "":
		cfg.Model = ModelNone
	case ModelNone, ModelAtLeastOnce, ModelExactlyOnce:
	default:
		return nil, fmt.Errorf("make engine: fault-tolerance model %q is not one of none, at_least_once, exactly_once", cfg.Model)
	}
	if cfg.Model != ModelNone && !cfg.Enterprise {
		return nil, fmt.Errorf("make engine: model %q needs the enterprise edition, as in the engine", cfg.Model)
	}
	if cfg.Workers <= 0 {
		cfg.Workers = 8
	}
	e := &Engine{cfg: cfg, holdTable: map[string]bool{}}
	e.boot()
	return e, nil
}

func (e *Engine) now() time.Time {
	if e.cfg.Now != nil {
		return e.cfg.Now()
	}
	return time.Unix(1787000000, 0).UTC()
}

func (e *Engine) newUUID() string {
	if e.cfg.NewUUID != nil {
		return e.cfg.NewUUID()
	}
	e.uuids++
	return fmt.Sprintf("019a0000-0000-7000-8000-%012x", e.uuids-1)
}

// boot starts an empty process.
func (e *Engine) boot() {
	// Two processes never share a start_time: a real restart takes longer
	// than the second in which it is given.
	start := max(e.now().Unix(), e.lastStart+1)
	e.lastStart = start
	e.initialTime = start
	e.proc = proc{
		uuid: e.newUUID(), startTime: start, state: StateRunning,
		tables: map[string]*tableState{}, byName: map[string]*Endpoint{},
		engineTxn: "NoTransaction",
	}
	for _, t := range e.cfg.Program.Tables {
		e.tables[t.Name] = newTableState(t)
	}
}

func newTableState(t *TableDef) *tableState {
	s := &tableState{def: t}
	if len(t.PrimaryKey) > 0 {
		s.rows = map[string]Row{}
	} else {
		s.bag = map[Row]int64{}
	}
	return s
}

func (t *tableState) clone() *tableState {
	return &tableState{def: t.def, rows: maps.Clone(t.rows), bag: maps.Clone(t.bag), count: t.count}
}

// maxDirty bounds the change log of a table; beyond it a reader starts over.
const maxDirty = 100_000

func (t *tableState) touch(k string) {
	if t.dirty == nil || t.reload {
		return
	}
	if len(t.dirty) >= maxDirty {
		t.reload = true
		t.dirty = map[string]bool{}
		return
	}
	t.dirty[k] = true
}

func (t *tableState) apply(ops []Op) {
	for _, op := range ops {
		t.count++
		if t.rows == nil {
			w := t.bag[op.Row] + 1
			if op.Kind == OpDelete {
				w -= 2
			}
			if w == 0 {
				delete(t.bag, op.Row)
			} else {
				t.bag[op.Row] = w
			}
			t.touch(string(op.Row))
			continue
		}
		switch op.Kind {
		case OpInsert:
			t.rows[op.Key] = op.Row
		case OpDelete:
			delete(t.rows, op.Key)
		case OpUpdate:
			old, ok := t.rows[op.Key]
			if !ok {
				continue
			}
			t.rows[op.Key] = mergeRow(old, op.Row)
		}
		t.touch(op.Key)
	}
}

// Incarnation is the uuid of the process.
func (e *Engine) Incarnation() string { return e.uuid }

// State is what the process is doing.
func (e *Engine) State() State { return e.state }

// SetState forces a state. Only Running and Paused accept data.
func (e *Engine) SetState(s State) { e.state = s }

// Program is the SQL program.
func (e *Engine) Program() *Program { return e.cfg.Program }

// Ready gives the answer of a process that is not ready, nil if it is.
func (e *Engine) Ready() *APIError {
	if e.state == StateRestoring || e.state == StateBootstrapping {
		return nil // refused call by call
	}
	return errState(e.state)
}

// Open finds or creates the endpoint of a table spelling and a format.
func (e *Engine) Open(spelling string, pc ParserConfig) (*Endpoint, *APIError) {
	if err := e.Ready(); err != nil {
		return nil, err
	}
	name := endpointName(spelling, pc)
	if ep, ok := e.byName[name]; ok {
		return ep, nil
	}
	if e.state == StateRestoring || e.state == StateBootstrapping {
		return nil, errState(e.state)
	}
	if e.cfg.Program.Table(spelling) == nil {
		return nil, errUnknownTable(name, spelling)
	}
	if e.slots >= MaxEndpoints {
		return nil, ErrConnectionLimit()
	}
	e.slots++
	ep := e.addEndpoint(spelling, pc)
	ep.holdsSlot = true
	return ep, nil
}

func (e *Engine) addEndpoint(spelling string, pc ParserConfig) *Endpoint {
	def := e.cfg.Program.Table(spelling)
	ep := &Endpoint{
		ID: uint64(len(e.endpoints)), Name: endpointName(spelling, pc), Table: def,
		Parser: newParser(def, pc, e.cfg.Null), cfg: pc, spelling: spelling, table: e.tables[def.Name],
	}
	e.endpoints = append(e.endpoints, ep)
	e.byName[ep.Name] = ep
	return ep
}

// Full tells whether backpressure keeps the endpoint from reading.
func (e *Engine) Full(ep *Endpoint) bool {
	return ep.queuedRecords >= MaxQueuedRecords || ep.queuedBytes >= MaxQueuedBytes
}

// Reading tells whether a request to the endpoint may read its body now. The
// answer is an error when the process has ended or failed.
func (e *Engine) Reading(ep *Endpoint, force bool) (bool, *APIError) {
	if e.state == StateTerminating || e.state == StateFailed {
		return false, errState(e.state)
	}
	if force {
		return true, nil
	}
	return e.state == StateRunning && !ep.paused && !e.Full(ep), nil
}

// Push queues one chunk's records.
func (e *Engine) Push(ep *Endpoint, en Entry) {
	ep.queue = append(ep.queue, en)
	n := uint64(en.Records)
	ep.queuedRecords += n
	ep.queuedBytes += uint64(en.Bytes)
	ep.totalRecords += n
	ep.totalBytes += uint64(en.Bytes)
	e.inputRecords += n
	e.buffered += n
}

// ParseErrors counts parse errors of an endpoint.
func (e *Engine) ParseErrors(ep *Endpoint, n int) { ep.parseErrors += uint64(n) }

// TransportError records a request that broke off.
func (e *Engine) TransportError(ep *Endpoint, why string) {
	ep.transportErrs++
	if ep.fatal == nil {
		ep.fatal = &why
	}
}

// PauseEndpoint pauses or starts one endpoint.
func (e *Engine) PauseEndpoint(name string, paused bool) *APIError {
	ep, ok := e.byName[name]
	if !ok {
		return errUnknownEndpoint(name)
	}
	ep.paused = paused
	return nil
}

type tokenJSON struct {
	U string `json:"u"`
	E uint64 `json:"e"`
	C uint64 `json:"c"`
}

// Token issues a completion token for everything the endpoint has received.
func (e *Engine) Token(ep *Endpoint) string {
	c := ep.totalRecords
	if n := len(ep.labels); n == 0 || ep.labels[n-1].count < c {
		l := label{count: c}
		if ep.ingested >= c {
			l.known, l.step = true, e.initiated
		}
		if len(ep.labels) >= maxLabels {
			const drop = maxLabels / 10
			ep.labels = append(ep.labels[:0], ep.labels[drop:]...)
			ep.firstUnlabeled = max(0, ep.firstUnlabeled-drop)
		}
		ep.labels = append(ep.labels, l)
		if l.known && ep.firstUnlabeled == len(ep.labels)-1 {
			ep.firstUnlabeled = len(ep.labels)
		}
	}
	return EncodeToken(e.uuid, ep.ID, c)
}

// EncodeToken writes a completion token.
func EncodeToken(incarnation string, endpoint, count uint64) string {
	b, err := json.Marshal(tokenJSON{incarnation, endpoint, count})
	if err != nil {
		return "" // a struct of a string and two numbers always encodes
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

// EndpointToken issues a token for an endpoint by name.
func (e *Engine) EndpointToken(name string) (string, *APIError) {
	ep, ok := e.byName[name]
	if !ok {
		return "", errUnknownEndpoint(name)
	}
	return e.Token(ep), nil
}

// Completion is the answer to a completion_status request.
type Completion struct {
	Status string  `json:"status"` // "inprogress" or "complete"
	Step   *uint64 `json:"step"`
}

// CompletionStatus tells how far the records behind a token have come.
func (e *Engine) CompletionStatus(token string) (Completion, *APIError) {
	var t tokenJSON
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil {
		return Completion{}, errInvalidParam("invalid completion token: not base64url: " + err.Error())
	}
	if err := json.Unmarshal(raw, &t); err != nil || t.U == "" {
		return Completion{}, errInvalidParam("invalid completion token: not a token")
	}
	if t.U != e.uuid {
		return Completion{}, errRestarted(t.U, e.uuid)
	}
	if t.E >= uint64(len(e.endpoints)) {
		return Completion{}, errUnknownEndpointID(t.E)
	}
	ep := e.endpoints[t.E]
	i := sort.Search(len(ep.labels), func(i int) bool { return ep.labels[i].count >= t.C })
	if i == len(ep.labels) || !ep.labels[i].known {
		return Completion{Status: "inprogress"}, nil
	}
	step := ep.labels[i].step
	c := Completion{Status: "inprogress", Step: &step}
	if e.completed >= step {
		c.Status = "complete"
	}
	return c, nil
}

// StartTransaction registers an API transaction and gives its id.
func (e *Engine) StartTransaction() (uint64, *APIError) {
	if err := e.ready503(); err != nil {
		return 0, err
	}
	if e.apiPhase != "" { // also between a commit's answer and its beginning
		return 0, errTransactionInProgress()
	}
	e.nextTxn++
	e.apiTxn = e.nextTxn
	e.apiPhase = "Started"
	return e.apiTxn, nil
}

func (e *Engine) ready503() *APIError {
	if e.state == StateRestoring || e.state == StateBootstrapping {
		return errState(e.state)
	}
	return e.Ready()
}

// CommitTransaction asks for the open API transaction to be committed. If the
// circuit has not begun it yet, it simply vanishes.
func (e *Engine) CommitTransaction() *APIError {
	if err := e.Ready(); err != nil {
		return err
	}
	if e.apiPhase != "Started" {
		return errNoTransaction()
	}
	if e.engineTxn != "TransactionInProgress" || e.runningTxn != e.apiTxn {
		e.apiPhase, e.apiTxn = "", 0
		return nil
	}
	e.apiPhase = "Committed"
	return nil
}

// HoldIngest freezes queues between "queued" and "ingested": those of one
// table, or with "" of all.
func (e *Engine) HoldIngest(table string, hold bool) {
	if table == "" {
		e.holdAllIngest = hold
		if !hold {
			clear(e.holdTable)
		}
		return
	}
	e.holdTable[CanonicalName(table)] = hold
}

// HoldCompletion freezes outputs: steps go on, nothing completes.
func (e *Engine) HoldCompletion(hold bool) {
	e.holdCompletion = hold
	e.advanceCompletion()
}

// HoldCommit keeps a commit in progress.
func (e *Engine) HoldCommit(hold bool) { e.holdCommit = hold }

// HoldCheckpoint keeps a checkpoint from starting or moving on.
func (e *Engine) HoldCheckpoint(hold bool) { e.holdCheckpoint = hold }

func (e *Engine) held(ep *Endpoint) bool {
	return e.holdAllIngest || e.holdTable[ep.Table.Name]
}

// WantsStep tells whether a step would do anything.
func (e *Engine) WantsStep() bool {
	switch e.state {
	case StateRunning, StatePaused:
	default:
		return false
	}
	if e.engineTxn == "CommitInProgress" {
		return !e.holdCommit
	}
	if e.apiPhase == "Committed" {
		return true
	}
	for _, ep := range e.endpoints {
		if len(ep.queue) > 0 && !e.held(ep) {
			return true
		}
	}
	return false
}

// Step runs one step of the circuit, or finishes a commit. It does nothing
// where WantsStep says so.
func (e *Engine) Step() {
	if !e.WantsStep() {
		return
	}
	if e.engineTxn == "CommitInProgress" {
		e.finishCommit()
		return
	}
	e.beginStep()
	if e.apiPhase == "Started" && e.engineTxn == "NoTransaction" {
		e.engineTxn, e.runningTxn = "TransactionInProgress", e.apiTxn
		e.txnRecords, e.txnSince = 0, e.now()
	}
	inTxn := e.engineTxn == "TransactionInProgress"
	js := journalStep{step: e.initiated, inTxn: inTxn}
	limit := uint64(BatchPerWorker * e.cfg.Workers)
	for _, ep := range e.endpoints {
		if len(ep.queue) == 0 || e.held(ep) {
			continue
		}
		var taken, bytes uint64
		n := 0
		for n < len(ep.queue) && taken < limit {
			taken += uint64(ep.queue[n].Records)
			bytes += uint64(ep.queue[n].Bytes)
			n++
		}
		var ops []Op
		if n == 1 {
			ops = ep.queue[0].Ops
		} else {
			for _, en := range ep.queue[:n] {
				ops = append(ops, en.Ops...)
			}
		}
		clear(ep.queue[:n])
		ep.queue = ep.queue[n:]
		if len(ep.queue) == 0 {
			ep.queue = nil
		}
		ep.queuedRecords -= taken
		ep.queuedBytes -= bytes
		e.buffered -= taken
		e.ingest(ep, ops, taken, inTxn)
		if e.cfg.Model == ModelExactlyOnce {
			js.batches = append(js.batches, journalBatch{ep.spelling, ep.cfg, ops, taken, bytes})
		}
	}
	if e.apiPhase == "Committed" {
		// The initiators are cleared as the commit begins, so that the next
		// transaction may be asked for while this one commits.
		js.commits = true
		e.engineTxn = "CommitInProgress"
		e.apiPhase, e.apiTxn = "", 0
		e.txnSince = e.now()
	}
	if e.cfg.Model == ModelExactlyOnce {
		// In the journal before any counter says "completed".
		e.journal = append(e.journal, js)
	}
	e.advanceCompletion()
}

// beginStep counts a step. Until a process has made its first one, its
// counters read zero, also when it was resumed.
func (e *Engine) beginStep() {
	if !e.stepped {
		e.stepped = true
		e.initiated = e.base
		e.completed = e.base
	}
	e.initiated++
}

// ingest hands records to the circuit: applied at once, or kept until the
// transaction commits.
func (e *Engine) ingest(ep *Endpoint, ops []Op, records uint64, inTxn bool) {
	ep.ingested += records
	if inTxn {
		e.txnOps = append(e.txnOps, tableOps{ep.table, ops})
		e.txnRecords += records
	} else {
		ep.table.apply(ops)
		e.processed += records
	}
	for ep.firstUnlabeled < len(ep.labels) && ep.labels[ep.firstUnlabeled].count <= ep.ingested {
		l := &ep.labels[ep.firstUnlabeled]
		l.known, l.step = true, e.initiated
		ep.firstUnlabeled++
	}
	e.forgetLabels(ep)
}

// forgetLabels drops completed labels but the newest: an old token is then
// answered by the nearest one at or above its count.
func (e *Engine) forgetLabels(ep *Endpoint) {
	n := 0
	for n+1 < ep.firstUnlabeled && ep.labels[n+1].known && ep.labels[n+1].step <= e.completed {
		n++
	}
	if n > 0 {
		ep.labels = append(ep.labels[:0], ep.labels[n:]...)
		ep.firstUnlabeled -= n
	}
}

func (e *Engine) finishCommit() {
	for _, to := range e.txnOps {
		to.table.apply(to.ops)
	}
	e.processed += e.txnRecords
	e.txnOps, e.txnRecords = nil, 0
	e.engineTxn, e.runningTxn = "NoTransaction", 0
	e.advanceCompletion()
}

// advanceCompletion moves the completed counters as far as transactions and
// outputs allow.
func (e *Engine) advanceCompletion() {
	if e.holdCompletion || e.engineTxn != "NoTransaction" || !e.stepped {
		return
	}
	e.completed = e.initiated
	e.delivered = e.processed
}

// Settled tells whether every step is completed.
func (e *Engine) Settled() bool {
	return e.engineTxn == "NoTransaction" && (!e.stepped || e.completed == e.initiated)
}

// InTransaction tells whether a transaction is open, or was begun and waits for
// the next step.
func (e *Engine) InTransaction() bool {
	return e.engineTxn != "NoTransaction" || e.apiPhase == "Started"
}

// Crash ends the process and starts a new incarnation from what keep names.
// What was only queued is lost in every case.
func (e *Engine) Crash(keep Keep) {
	if keep == KeepByModel {
		switch e.cfg.Model {
		case ModelExactlyOnce:
			keep = KeepJournal
		case ModelAtLeastOnce:
			keep = KeepCheckpoint
		case ModelNone:
			keep = KeepNothing
		}
	}
	initial := e.initialTime
	e.boot()
	if keep == KeepNothing {
		e.resume, e.listed, e.journal = nil, nil, nil
		return
	}
	if e.resume == nil && (keep != KeepJournal || len(e.journal) == 0) {
		e.listed, e.journal = nil, nil
		return
	}
	e.initialTime = initial
	if c := e.resume; c != nil {
		for name, t := range c.tables {
			e.tables[name] = t.clone()
		}
		e.base = c.Steps
		e.processed, e.delivered = c.ProcessedRecords, c.ProcessedRecords
		e.inputRecords = c.ProcessedRecords
		for _, ep := range c.endpoints {
			n := e.addEndpoint(ep.spelling, ep.cfg)
			n.totalRecords, n.totalBytes, n.ingested = ep.records, ep.bytes, ep.records
		}
	}
	// A listed checkpoint that never became the resume point is gone.
	e.listed = slices.DeleteFunc(e.listed, func(c *checkpoint) bool { return c != e.resume })
	if keep != KeepJournal {
		e.journal = nil
		return
	}
	for _, js := range e.journal {
		e.replay(js)
	}
	if len(e.txnOps) > 0 || e.engineTxn != "NoTransaction" {
		// The open transaction is committed at the end of the journal, however
		// much of it was there.
		if n := len(e.journal); n > 0 {
			e.journal[n-1].commits = true
		}
		e.finishCommit()
	}
}

func (e *Engine) replay(js journalStep) {
	e.beginStep()
	if js.inTxn {
		e.engineTxn = "TransactionInProgress"
	}
	for _, b := range js.batches {
		ep, ok := e.byName[endpointName(b.spelling, b.cfg)]
		if !ok {
			ep = e.addEndpoint(b.spelling, b.cfg)
		}
		ep.totalRecords += b.records
		ep.totalBytes += b.bytes
		e.inputRecords += b.records
		e.ingest(ep, b.ops, b.records, js.inTxn)
	}
	if js.commits {
		e.finishCommit()
		return
	}
	e.advanceCompletion()
}

// Endpoints gives the endpoints in order of their ids.
func (e *Engine) Endpoints() []*Endpoint { return slices.Clone(e.endpoints) }

// Count is the number of rows of a table: distinct keys, or the sum of the
// weights. -1 for an unknown table.
func (e *Engine) Count(table string) int64 {
	t := e.table(table)
	if t == nil {
		return -1
	}
	if t.rows != nil {
		return int64(len(t.rows))
	}
	var n int64
	for _, w := range t.bag {
		n += w
	}
	return n
}

func (e *Engine) table(name string) *tableState { return e.tables[CanonicalName(name)] }

// Weighted is a row with its weight, 1 for a table with a primary key.
type Weighted struct {
	Key    string
	Row    Row
	Weight int64
}

// Contents gives the rows of a table as of the last completed transaction, in
// no order. ok is false for an unknown table.
func (e *Engine) Contents(table string) (rows []Weighted, def *TableDef, ok bool) {
	t := e.table(table)
	if t == nil {
		return nil, nil, false
	}
	rows = make([]Weighted, 0, len(t.rows)+len(t.bag))
	for k, r := range t.rows {
		rows = append(rows, Weighted{k, r, 1})
	}
	for r, w := range t.bag {
		rows = append(rows, Weighted{string(r), r, w})
	}
	return rows, t.def, true
}

// Changes gives what changed in a table since the last call, and begins to
// watch it: the first call, and one after too many changes, gives everything
// with full set. A row with weight 0 is gone.
func (e *Engine) Changes(table string) (rows []Weighted, def *TableDef, full, ok bool) {
	t := e.table(table)
	if t == nil {
		return nil, nil, false, false
	}
	if t.dirty == nil || t.reload {
		t.dirty, t.reload = map[string]bool{}, false
		rows, def, ok = e.Contents(table)
		return rows, def, true, ok
	}
	for k := range t.dirty {
		w := Weighted{Key: k}
		if t.rows != nil {
			if r, ok := t.rows[k]; ok {
				w.Row, w.Weight = r, 1
			}
		} else {
			w.Row, w.Weight = Row(k), t.bag[Row(k)]
		}
		rows = append(rows, w)
	}
	clear(t.dirty)
	return rows, t.def, false, true
}

// Dump gives a table in a form that can be compared: one JSON object per row,
// sorted. Rows of a table without a primary key carry their weight as
// " weight=N".
func (e *Engine) Dump(table string) []string {
	rows, def, ok := e.Contents(table)
	if !ok {
		return nil
	}
	return DumpRows(def, rows)
}

// DumpRows is Dump for rows that Contents gave.
func DumpRows(def *TableDef, rows []Weighted) []string {
	out := make([]string, 0, len(rows))
	rr := NewRowReader(def)
	for _, w := range rows {
		out = append(out, rr.dump(w))
	}
	sort.Strings(out)
	return out
}

func (r *RowReader) dump(w Weighted) string {
	s := string(r.JSON(nil, w.Row))
	if len(r.t.PrimaryKey) == 0 {
		s += " weight=" + strconv.FormatInt(w.Weight, 10)
	}
	return s
}

// SortRows puts rows into the order of Dump.
func SortRows(def *TableDef, rows []Weighted) {
	rr := NewRowReader(def)
	keys := make(map[Row]string, len(rows))
	for _, w := range rows {
		keys[w.Row] = rr.dump(w)
	}
	sort.Slice(rows, func(i, j int) bool { return keys[rows[i].Row] < keys[rows[j].Row] })
}

func fingerprint(text string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(text))
	return h.Sum64() >> 11 // exact in a JSON number
}

// Unwatch ends what Changes began, for every table.
func (e *Engine) Unwatch() {
	for _, t := range e.tables {
		t.dirty, t.reload = nil, false
	}
}
