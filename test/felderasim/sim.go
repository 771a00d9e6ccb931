package felderasim

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"holdfast/test/felderasim/core"
)

// Edition is the build of the engine.
type Edition string

// The editions, as GET /v0/config spells them.
const (
	OpenSource Edition = "Open source"
	Enterprise Edition = "Enterprise"
)

// Options say what pipeline is simulated. Only SQL is required.
type Options struct {
	// SQL is the pipeline's program: CREATE TABLE and CREATE VIEW statements.
	SQL string
	// Pipeline is its name, "p" by default.
	Pipeline string
	// Model is the fault-tolerance model, none by default. Any other needs
	// Edition Enterprise.
	Model core.Model
	// Edition is OpenSource by default.
	Edition Edition
	// Workers of the circuit, 8 by default: a step takes 10 000 records per
	// worker and endpoint.
	Workers int
	// APIKey, where it is set, must come as "Authorization: Bearer <APIKey>"
	// on the manager front. The "apikey:" prefix is part of it.
	APIKey string
	// ReadOnlyKey is a key whose role may only read.
	ReadOnlyKey string
	// Listen and ListenBare are the addresses of the two fronts,
	// "127.0.0.1:0" by default.
	Listen, ListenBare string
	// Logger gets one line per state change; nil is silent.
	Logger *slog.Logger
	// Null counts rows and issues tokens without storing anything.
	Null bool
	// MaxBody caps an ingress body in bytes, 256 MiB by default. The engine
	// has no such limit.
	MaxBody int64
	// IngressTimeout and CallTimeout are the manager's, 30 s and 10 s.
	IngressTimeout, CallTimeout time.Duration
	// CheckpointInterval begins checkpoints by itself; 0 does not.
	CheckpointInterval time.Duration
	// StepInterval is the least time between two steps, 0 by default.
	StepInterval time.Duration
	// Manual leaves every step and checkpoint phase to Step and
	// AdvanceCheckpoint.
	Manual bool
	// DropAbandoned throws away a request that its client has given up even
	// if the whole body had arrived. By default it is still applied.
	DropAbandoned bool
	// Observe, if set, is called under the simulator's lock after every change,
	// before anybody else can see it. It must not call the Sim.
	Observe func(View)
	// JournalSize is how many ingress requests Requests remembers, 4096 by
	// default.
	JournalSize int
}

// Sim is a simulated pipeline. Its methods may be called from any goroutine.
type Sim struct {
	opts Options
	log  *slog.Logger

	mu      sync.Mutex
	engine  *core.Engine
	proc    *process
	pipe    managed
	apiKey  string
	faults  []*activeFault
	faultID int
	late    []*lateRequest
	journal []Request
	seq     int64
	count   Counters
	atOnce  map[string]int64 // ingress requests at work, by table
	waiting bool
	changed chan struct{}

	wake    chan struct{}
	queries *queryEngine

	started  bool
	servers  []*http.Server
	addr     [2]net.Addr
	ctx      context.Context //nolint:containedctx // the life of the simulator's own goroutines, ended by Close
	cancel   context.CancelFunc
	owned    sync.WaitGroup // stepper, servers, jobs
	closeErr error
}

// process is one life of the pipeline process. A request holds on to the one
// it came to; when that has died, nothing of it is applied any more.
type process struct {
	dead    chan struct{} // closed by its crash
	up      bool          // false: stopped, there is no process to talk to
	err     string        // deployment_error of a stopped pipeline
	id      string        // deployment_id
	parsers map[*core.Endpoint]*sync.Mutex
}

// Counters are totals since New; crashes do not reset them.
type Counters struct {
	Requests       int64 `json:"requests"`        // ingress requests received
	Accepted       int64 `json:"accepted"`        // of them, answered 200 by the process
	Rejected       int64 `json:"rejected"`        // of them, answered otherwise
	Records        int64 `json:"records"`         // records queued
	Bytes          int64 `json:"bytes"`           // body bytes read
	Steps          int64 `json:"steps"`           // circuit steps
	Polls          int64 `json:"polls"`           // completion_status calls
	Crashes        int64 `json:"crashes"`         // processes that ended
	FaultsInjected int64 `json:"faults_injected"` // times a fault took effect
	Concurrent     int64 `json:"concurrent"`      // most ingress requests at one endpoint at once
}

// New makes a simulator; Start opens its listeners.
func New(opts Options) (*Sim, error) {
	prog, err := core.ParseProgram(opts.SQL)
	if err != nil {
		return nil, fmt.Errorf("make simulator: %w", err)
	}
	setDefault(&opts.Pipeline, "p")
	setDefault(&opts.Edition, OpenSource)
	setDefault(&opts.Listen, "127.0.0.1:0")
	setDefault(&opts.ListenBare, "127.0.0.1:0")
	setDefault(&opts.MaxBody, 256<<20)
	setDefault(&opts.IngressTimeout, 30*time.Second)
	setDefault(&opts.CallTimeout, 10*time.Second)
	setDefault(&opts.JournalSize, 4096)
	if opts.Edition != OpenSource && opts.Edition != Enterprise {
		return nil, fmt.Errorf("make simulator: edition %q is neither %q nor %q", opts.Edition, OpenSource, Enterprise)
	}
	log := opts.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	e, err := core.New(core.Config{
		Program: prog, Model: opts.Model, Enterprise: opts.Edition == Enterprise,
		Workers: opts.Workers, Null: opts.Null, NewUUID: uuidV7, Now: time.Now,
	})
	if err != nil {
		return nil, fmt.Errorf("make simulator: %w", err)
	}
	s := &Sim{
		opts: opts, log: log, engine: e, apiKey: opts.APIKey,
		proc:    newProcess(),
		changed: make(chan struct{}), wake: make(chan struct{}, 1),
	}
	s.queries = newQueryEngine(s)
	return s, nil
}

func newProcess() *process {
	return &process{dead: make(chan struct{}), up: true, id: uuidV7(), parsers: map[*core.Endpoint]*sync.Mutex{}}
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// uuidV7 makes a time-ordered UUID, as the engine does per process.
func uuidV7() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	ms := time.Now().UnixMilli()
	for i := range 6 {
		b[i] = byte(ms >> (8 * (5 - i)))
	}
	b[6] = b[6]&0x0f | 0x70
	b[8] = b[8]&0x3f | 0x80
	h := hex.EncodeToString(b[:])
	return strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
}

// Start opens the listeners and starts the stepper. It may be called once;
// Close ends what it started, also when ctx of the caller is long gone.
func (s *Sim) Start(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.started {
		return errors.New("start simulator: it was started before")
	}
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	for i, l := range []struct {
		addr    string
		handler http.Handler
	}{{s.opts.Listen, s.tracked(s.serveManager)}, {s.opts.ListenBare, s.tracked(s.serveBare)}} {
		ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", l.addr)
		if err != nil {
			s.cancel()
			for _, srv := range s.servers {
				err = errors.Join(err, srv.Close())
			}
			return fmt.Errorf("start simulator: listen on %s: %w", l.addr, err)
		}
		srv := &http.Server{
			Handler: l.handler, ReadHeaderTimeout: 30 * time.Second,
			ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		}
		s.servers = append(s.servers, srv)
		s.addr[i] = ln.Addr()
		s.owned.Go(func() {
			if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
				s.log.ErrorContext(s.ctx, "front has ended", "err", err)
			}
		})
	}
	s.started = true
	if !s.opts.Manual {
		s.owned.Go(s.stepper)
	}
	return nil
}

// tracked makes Close wait for a handler.
func (s *Sim) tracked(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		if s.ctx.Err() != nil {
			s.mu.Unlock()
			panic(http.ErrAbortHandler)
		}
		s.owned.Add(1)
		s.mu.Unlock()
		defer s.owned.Done()
		h(w, r)
	}
}

// URL is the base URL of the manager front, without a trailing slash. It is
// "" before Start.
func (s *Sim) URL() string { return s.url(0) }

// BareURL is the base URL of the bare process front.
func (s *Sim) BareURL() string { return s.url(1) }

func (s *Sim) url(i int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.addr[i] == nil {
		return ""
	}
	return "http://" + s.addr[i].String()
}

// Close cuts every connection, ends every goroutine and waits for them. It
// may be called more than once.
func (s *Sim) Close() error {
	s.mu.Lock()
	if !s.started {
		s.mu.Unlock()
		return s.queries.close()
	}
	s.cancel()
	s.killLocked("the simulator was closed")
	servers := s.servers
	s.servers = nil
	s.mu.Unlock()
	for _, srv := range servers {
		s.closeErr = errors.Join(s.closeErr, srv.Close())
	}
	s.owned.Wait()
	return errors.Join(s.closeErr, s.queries.close())
}

// stepper is the circuit's thread: it steps as long as there is something to
// do, then waits to be woken.
func (s *Sim) stepper() {
	var interval <-chan time.Time
	if s.opts.CheckpointInterval > 0 {
		t := time.NewTicker(s.opts.CheckpointInterval)
		defer t.Stop()
		interval = t.C
	}
	pace := time.NewTimer(0)
	defer pace.Stop()
	for {
		// The interval is looked at in every round: a busy circuit has its
		// checkpoints too.
		idle := !s.advance()
		select {
		case <-interval:
			s.PeriodicCheckpoint()
			idle = false
		case <-s.ctx.Done():
			return
		default:
		}
		if idle {
			select {
			case <-s.wake:
			case <-interval:
				s.PeriodicCheckpoint()
			case <-s.ctx.Done():
				return
			}
		}
		if s.opts.StepInterval > 0 {
			pace.Reset(s.opts.StepInterval)
			select {
			case <-pace.C:
			case <-s.ctx.Done():
				return
			}
		}
	}
}

// advance runs one step and one phase of a checkpoint, if there are any.
func (s *Sim) advance() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.proc.up {
		return false
	}
	did := false
	if s.engine.WantsStep() {
		s.engine.Step()
		s.count.Steps++
		did = true
	}
	if s.engine.AdvanceCheckpoint() {
		did = true
	}
	if did {
		s.notifyLocked()
	}
	return did
}

// notifyLocked tells everyone who waits that something has changed.
func (s *Sim) notifyLocked() {
	if s.opts.Observe != nil {
		s.opts.Observe(View{s})
	}
	if s.waiting {
		s.waiting = false
		close(s.changed)
		s.changed = make(chan struct{})
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// changeLocked gives a channel that the next change closes.
func (s *Sim) changeLocked() <-chan struct{} {
	s.waiting = true
	return s.changed
}

// Step runs up to n steps by hand and gives how many there were to run.
func (s *Sim) Step(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	done := 0
	for ; done < n && s.proc.up && s.engine.WantsStep(); done++ {
		s.engine.Step()
		s.count.Steps++
	}
	s.notifyLocked()
	return done
}

// AdvanceCheckpoint moves a checkpoint on by one phase by hand.
func (s *Sim) AdvanceCheckpoint() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notifyLocked()
	return s.proc.up && s.engine.AdvanceCheckpoint()
}

// PeriodicCheckpoint begins a checkpoint that nobody asked for.
func (s *Sim) PeriodicCheckpoint() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer s.notifyLocked()
	return s.proc.up && s.engine.StartPeriodicCheckpoint()
}

// do runs f on the engine and tells those who wait.
func (s *Sim) do(f func(e *core.Engine)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.engine)
	s.notifyLocked()
}

// HoldIngest freezes the queues of a table, or of all with "", between
// accepted and ingested.
func (s *Sim) HoldIngest(table string) { s.do(func(e *core.Engine) { e.HoldIngest(table, true) }) }

// ReleaseIngest ends HoldIngest; "" ends it for all tables.
func (s *Sim) ReleaseIngest(table string) { s.do(func(e *core.Engine) { e.HoldIngest(table, false) }) }

// HoldCompletion freezes outputs: rows are ingested, nothing completes.
func (s *Sim) HoldCompletion() { s.do(func(e *core.Engine) { e.HoldCompletion(true) }) }

// ReleaseCompletion ends HoldCompletion.
func (s *Sim) ReleaseCompletion() { s.do(func(e *core.Engine) { e.HoldCompletion(false) }) }

// HoldCommit keeps a transaction that is committing in that state.
func (s *Sim) HoldCommit() { s.do(func(e *core.Engine) { e.HoldCommit(true) }) }

// ReleaseCommit ends HoldCommit.
func (s *Sim) ReleaseCommit() { s.do(func(e *core.Engine) { e.HoldCommit(false) }) }

// HoldCheckpoint keeps checkpoints from starting or moving on.
func (s *Sim) HoldCheckpoint() { s.do(func(e *core.Engine) { e.HoldCheckpoint(true) }) }

// HoldBegunCheckpoint begins a checkpoint that nobody asked for and keeps it,
// and any other, from moving on: what comes now is not in it. It tells whether
// one could begin.
func (s *Sim) HoldBegunCheckpoint() (begun bool) {
	s.do(func(e *core.Engine) {
		if begun = s.proc.up && e.StartPeriodicCheckpoint(); begun {
			e.HoldCheckpoint(true)
		}
	})
	return begun
}

// ReleaseCheckpoint ends HoldCheckpoint and HoldBegunCheckpoint.
func (s *Sim) ReleaseCheckpoint() { s.do(func(e *core.Engine) { e.HoldCheckpoint(false) }) }

// Pause pauses the pipeline: ingress bodies are not read until Resume.
func (s *Sim) Pause() { s.SetState(core.StatePaused) }

// Resume ends Pause, and any other state set by SetState.
func (s *Sim) Resume() { s.SetState(core.StateRunning) }

// SetState forces a state of the process, such as Initializing.
func (s *Sim) SetState(st core.State) {
	s.do(func(e *core.Engine) { e.SetState(st) })
	s.log.Info("pipeline state changed", "state", string(st))
}

// SetAPIKey changes the key that the manager front accepts; "" accepts all.
func (s *Sim) SetAPIKey(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.apiKey = key
}

// StartTransaction opens an API transaction as a stranger would.
func (s *Sim) StartTransaction() (id uint64, err error) {
	s.do(func(e *core.Engine) {
		var aerr *core.APIError
		if id, aerr = e.StartTransaction(); aerr != nil {
			err = aerr
		}
	})
	return id, err
}

// CommitTransaction commits the open API transaction, whoever opened it.
func (s *Sim) CommitTransaction() (err error) {
	s.do(func(e *core.Engine) {
		if aerr := e.CommitTransaction(); aerr != nil {
			err = aerr
		}
	})
	return err
}

// Crash ends the process and brings a new incarnation up at once, from what
// keep names. Requests in flight are cut; what was only queued is lost.
func (s *Sim) Crash(keep core.Keep) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.killLocked("the pipeline process was killed")
	s.restartLocked(keep)
}

// Kill ends the process and leaves it down, as a crash under the manager
// does: it answers 503 until somebody starts the pipeline.
func (s *Sim) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.killLocked("the pipeline process was killed")
}

// Restart brings a killed pipeline up again, from what keep names. On a
// running one it does nothing.
func (s *Sim) Restart(keep core.Keep) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.restartLocked(keep)
}

func (s *Sim) killLocked(why string) {
	if !s.proc.up {
		return
	}
	close(s.proc.dead)
	s.proc = &process{dead: s.proc.dead, err: why, id: s.proc.id}
	s.count.Crashes++
	s.log.Info("pipeline process ended", "reason", why, "incarnation", s.engine.Incarnation())
	s.notifyLocked()
}

func (s *Sim) restartLocked(keep core.Keep) {
	if s.proc.up {
		return
	}
	s.engine.Crash(keep)
	s.proc = newProcess()
	s.log.Info("pipeline process started", "keep", string(keep), "incarnation", s.engine.Incarnation())
	s.notifyLocked()
}

// parserLock is the lock under which an endpoint parses and queues.
func (s *Sim) parserLock(p *process, ep *core.Endpoint) *sync.Mutex {
	l, ok := p.parsers[ep]
	if !ok {
		l = &sync.Mutex{}
		p.parsers[ep] = l
	}
	return l
}

// errProcessDied ends a request whose process is gone.
var errProcessDied = errors.New("the pipeline process has ended")

// errAbandoned ends a request whose client is gone.
var errAbandoned = errors.New("the client has gone away")

// bodyPipe carries a request body from the connection to the process. What it
// holds stands for the socket buffers between them: it arrives even if the
// client goes away.
type bodyPipe struct {
	mu     sync.Mutex
	cond   sync.Cond
	chunks [][]byte
	size   int
	end    error // set once: io.EOF for a complete body
}

// pipeSize is what fits between the client and a process that does not read.
const pipeSize = 1 << 20

func newBodyPipe() *bodyPipe {
	p := &bodyPipe{}
	p.cond.L = &p.mu
	return p
}

// write blocks while the pipe is full; false means that it was ended.
func (p *bodyPipe) write(b []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.size >= pipeSize && p.end == nil {
		p.cond.Wait()
	}
	if p.end != nil {
		return false
	}
	p.chunks = append(p.chunks, b)
	p.size += len(b)
	p.cond.Broadcast()
	return true
}

// finish ends the pipe; the first call counts.
func (p *bodyPipe) finish(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.end == nil {
		p.end = err
	}
	p.cond.Broadcast()
}

// next gives the next chunk, or the error that ended the body.
func (p *bodyPipe) next() ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.chunks) == 0 && p.end == nil {
		p.cond.Wait()
	}
	if len(p.chunks) == 0 {
		return nil, p.end
	}
	b := p.chunks[0]
	p.chunks[0] = nil
	p.chunks = p.chunks[1:]
	p.size -= len(b)
	p.cond.Broadcast()
	return b, nil
}
