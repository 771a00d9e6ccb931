// Package wal carries the changes of a Postgres database into Feldera: it
// reads a logical replication slot, buffers each transaction from BEGIN to
// COMMIT, delivers it whole, and confirms a transaction's end LSN to the
// server only when Feldera's completion tokens say that its rows were
// processed.
//
// What it promises: at least once, in commit order per table, while the
// pipeline keeps its state. A crash at any point replays what was not
// confirmed; tables with a PRIMARY KEY converge. The rows of one transaction
// become visible at the same instant where the intent to open a transaction of
// the pipeline can be made durable.
//
// The goroutines of one run, each waited for by [Source.Run]:
//
//	reader     one connection's stream → transactions → queue; never waits for
//	           the destination. With [TransportPeek] it asks instead of being
//	           sent, and acknowledges too
//	status     one connection's status updates: on progress, on request, on a
//	           timer
//	deliverer  queue → batches of whole transactions → Feldera
//	poller     completion tokens → ledger (feldera.Completions)
//	copier     existing rows, beside the stream, while there are any to copy
//	watcher    slot, publication and tables, over its own connection, and the
//	           pipeline's state
//
// The caller is cmd/pgsource.
package wal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// Table maps one source table to one Feldera table.
type Table struct {
	Schema, Name string
	Target       string
}

// Status is what one named check of the source has to say.
type Status struct {
	Check string
	OK    bool
	// Blocking means that a person has to act: waiting does not mend it.
	Blocking bool
	// Works: it is not OK and holds nothing up.
	Works   bool
	Message string
	Hint    string
}

// The checks that a Source reports.
const (
	CheckSource      = "source"      // the replication connection streams
	CheckDestination = "destination" // the pipeline takes and completes rows
	CheckPipeline    = "pipeline"    // the pipeline answers and runs
	CheckSlot        = "slot"        // the slot holds the WAL that is needed
	CheckSchema      = "schema"      // the tables' shapes fit; what is left out
	CheckState       = "state"       // nothing of the source's past is in doubt
	CheckResync      = "resync"      // the destination still has what was acknowledged
	CheckStore       = "state store" // positions can be made durable
	CheckSpill       = "spill"       // what does not fit into memory has a place
	CheckAtomicity   = "atomicity"   // what of a transaction becomes visible together
	CheckSnapshot    = "snapshot"    // existing rows are copied, or need not be
	CheckDelivery    = "delivery"    // which level of delivery holds, and why
	CheckProgress    = "progress"    // what the progress table said at the start
	CheckVerify      = "verify"      // what the last comparison of source and pipeline found
	CheckOwners      = "owners"      // who else feeds the tables
)

// The phases that a Source goes through.
const (
	PhaseConnecting = "connecting"
	PhaseStreaming  = "streaming"
	// PhaseNeedsResync: changes are carried, and the pipeline lacks rows that
	// were acknowledged, or may.
	PhaseNeedsResync = "needs resync"
)

// Config is what a Source needs. All fields are required unless said
// otherwise.
type Config struct {
	// DSN gives the connection string; it is asked for at each connection, so
	// that a rotated password is picked up.
	DSN         func() (string, error)
	Slot        string
	Publication string
	Tables      []Table
	// Schemas are those of which every table was to be in Tables, for a look at
	// what came later. Unlisted is a table in them that is none to be carried:
	// that of the state; nil for none.
	Schemas  []string
	Unlisted *Table
	// Create allows the publication and then the slot to be created when they
	// are absent, once per process.
	Create bool
	// Failover makes a slot that is created one that standbys mirror, which
	// needs PostgreSQL 17.
	Failover bool

	// Transport is how the slot is read; PeekInterval the longest pause between
	// two looks at it with TransportPeek.
	Transport    Transport
	PeekInterval time.Duration

	// BatchRows and BatchBytes (of pgoutput) close a batch; a transaction is
	// never split, so one that is larger makes a batch of its own.
	BatchRows  int
	BatchBytes int
	// BatchAge is how long the oldest transaction of a batch may wait for
	// company. 0 sends at once.
	BatchAge time.Duration
	// InFlight bounds the batches that are accepted but not completed.
	InFlight int
	// MemoryLimit bounds the bytes of pgoutput held in memory: transactions
	// being assembled and transactions waiting for delivery.
	MemoryLimit int64
	// SpillLimit bounds the bytes on disk of what does not fit into memory; 0 is
	// no spill. SpillDir is where they lie; "" is one of defaultSpillDirs where
	// one can be used, and no spill where none can.
	SpillLimit int64
	SpillDir   string
	// TableAtomicity lets the rows of one transaction become visible table by
	// table and request by request. By default they become visible together, in
	// a transaction of the pipeline where it takes more than one request.
	TableAtomicity bool
	// ProgressTable is the pipeline's table in which progress is recorded, so
	// that a restart sends nothing twice that it need not, and finds out what was
	// lost; "" uses none. It needs State and a pipeline with transactions.
	ProgressTable string
	// ProgressIfPossible delivers at least once where the pipeline or the
	// settings do not allow to record progress, and says why.
	ProgressIfPossible bool
	// StopOnLoss ends Run with a refusal when the pipeline lost acknowledged
	// rows, or may have; otherwise it goes on, and says that a resync is needed.
	StopOnLoss bool
	// OwnersTable is the pipeline's table in which is recorded who feeds which
	// table, where the pipeline has it; "" records nothing.
	OwnersTable string
	// Snapshot says which tables' existing rows are copied. ChunkTime and
	// ChunkBytes bound one read of them, SnapshotLag the WAL that may be
	// unacknowledged while one is begun; 0 is no bound.
	Snapshot    SnapshotMode
	ChunkTime   time.Duration
	ChunkBytes  int
	SnapshotLag int64
	// StallTimeout is how long the wire may be silent before the connection
	// counts as dead.
	StallTimeout time.Duration
	// SenderTimeout is the wal_sender_timeout that replication connections ask
	// for; 0 leaves it to the server, unless that has none.
	SenderTimeout time.Duration
	// TakeoverAfter is how long another pgsource that holds the slot may be
	// silent before its session is ended; 0 never ends it.
	TakeoverAfter time.Duration
	// VerifyInterval is how often source and pipeline are compared, 0 for never;
	// VerifyRate bounds the rows a second that are read of each side, 0 for no
	// bound.
	VerifyInterval time.Duration
	VerifyRate     int
	// ShutdownTimeout bounds the wait for evidence after a stop.
	ShutdownTimeout time.Duration
	// Truncate says what becomes of a TRUNCATE.
	Truncate TruncatePolicy
	// IgnorePartitions lets changes of partitions pass, counted, that move rows
	// into or out of a partitioned table without the stream.
	IgnorePartitions bool

	// AckOn is the rung on which a position is acknowledged: ack.Completed
	// (also when it is left 0) or ack.Durable.
	AckOn ack.Rung

	Policy   feldera.Policy
	Pipeline *feldera.Client
	// Intents keeps what is needed to know a Feldera transaction as ours after
	// a crash. nil keeps it in State.
	Intents IntentStore
	// State keeps the bookmark. nil keeps it in memory: the guarantees about
	// what happens while pgsource is down then do not hold.
	State StateStore
	// StateByDefault: nobody has chosen State, which the check says if it keeps
	// nothing.
	StateByDefault bool

	Logger  *slog.Logger
	Metrics *Metrics
	// Report is told of every check's state, Phase of every phase, Beat at
	// every turn of the deliverer. They may be nil and must not block.
	Report func(Status)
	Phase  func(string)
	Beat   func()
	// StopNow ends the wait for evidence after a stop. It may be nil.
	StopNow <-chan struct{}
}

// Source carries one slot's changes into one pipeline.
type Source struct {
	cfg Config
	log *slog.Logger
	// tag tells this process' sessions at the server from those of others.
	tag       string
	occupancy occupancy
	looks     looks
	courseMu  sync.Mutex // guards course
	course    slope
	// slotSeen: this process has seen the slot. It is never created a second
	// time, since that would hide a gap.
	slotSeen atomic.Bool
	// told is the highest position that the slot was known to have or was told
	// by this process. A slot above it was moved by somebody else.
	told atomic.Uint64
	// madePublication: this process has made the publication. Only then may it
	// make the slot: where there is a publication and no slot, a slot was lost.
	madePublication atomic.Bool
	// madeSlot: this process has made the slot, so nobody has sent anything of
	// it before.
	madeSlot atomic.Bool
	// began is when this process began, as far as requests of the one before
	// are concerned; alone is set once those can no longer be applied.
	began time.Time
	alone atomic.Bool
	// requestOpen: a request to begin or to commit a transaction of the pipeline was
	// given up without a known outcome. It is of the one attempt that runs.
	requestOpen bool
	// node is the server that streams, or that streamed last; nil before.
	node atomic.Pointer[node]
	// connected: the server has let this process in once.
	connected atomic.Bool
	// pooler: what answers is a pooler that does not take every setting at the
	// start of a session.
	pooler atomic.Bool
	// atLeastOnce: progress is not recorded, since that is not possible here.
	atLeastOnce atomic.Bool
	// restarted: the pipeline has restarted since an attempt of this process has
	// claimed the progress table.
	restarted atomic.Bool
	// lossStands: a table needs a resync. streams: changes are carried. noticed
	// holds the checks that show a notice.
	lossStands, streams atomic.Bool
	noticed             sync.Map
	// leftOut are the tables of Schemas that are not carried, as said last.
	leftOut atomic.Pointer[string]
	// types are the types of the mapped tables' columns.
	types  typeCache
	copies copies
	// struggle remembers what fails again and again; current is the attempt
	// that runs.
	struggle struggle
	current  atomic.Pointer[attempt]
	// refusedResyncs are tables whose resync after a loss was refused; refusedMu
	// guards it.
	refusedMu      sync.Mutex
	refusedResyncs []tableName
	// keeper holds the state. It is set by Run before anything else happens.
	keeper *keeper
	// spill is set while Run runs; nil for none.
	spill *spill
}

// New makes a Source. It connects to nothing.
func New(cfg Config) (*Source, error) {
	switch {
	case cfg.DSN == nil, cfg.Slot == "", cfg.Publication == "", len(cfg.Tables) == 0:
		return nil, errors.New("wal: DSN, Slot, Publication and Tables are required")
	case cfg.Pipeline == nil, cfg.Logger == nil, cfg.Metrics == nil:
		return nil, errors.New("wal: Pipeline, Logger and Metrics are required")
	case cfg.BatchRows <= 0, cfg.BatchBytes <= 0, cfg.InFlight <= 0, cfg.MemoryLimit <= 0:
		return nil, errors.New("wal: BatchRows, BatchBytes, InFlight and MemoryLimit must be positive")
	case cfg.SpillLimit < 0:
		return nil, errors.New("wal: SpillLimit must not be negative")
	case cfg.Transport == TransportPeek && cfg.PeekInterval <= 0:
		return nil, errors.New("wal: PeekInterval must be positive")
	case cfg.StallTimeout <= 0, cfg.ShutdownTimeout < 0:
		return nil, errors.New("wal: StallTimeout must be positive, ShutdownTimeout not negative")
	}
	switch cfg.AckOn {
	case 0:
		cfg.AckOn = ack.Completed
	case ack.Completed, ack.Durable:
	default:
		return nil, fmt.Errorf("wal: AckOn %v is neither completed nor durable", cfg.AckOn)
	}
	if cfg.State == nil {
		cfg.State = noStore{}
	}
	cfg.ChunkTime = cmp.Or(max(cfg.ChunkTime, 0), 500*time.Millisecond)
	cfg.ChunkBytes = cmp.Or(max(cfg.ChunkBytes, 0), 8<<20)
	if cfg.Report == nil {
		cfg.Report = func(Status) {}
	}
	if cfg.Phase == nil {
		cfg.Phase = func(string) {}
	}
	if cfg.Beat == nil {
		cfg.Beat = func() {}
	}
	return &Source{began: time.Now(), cfg: cfg, log: cfg.Logger, tag: newTag()}, nil
}

// Run carries changes until ctx ends or a person has to act.
//
// It returns nil after a stop by ctx: what was in flight has then been waited
// for, within ShutdownTimeout, and what completed has been confirmed. It
// returns a *decode.Refusal when something cannot be mended by waiting;
// everything delivered before has then been confirmed too, and nothing after.
// Every other fault is retried for as long as it takes.
func (s *Source) Run(ctx context.Context) error {
	s.phaseConnecting()
	var err error
	if s.keeper, err = s.openKeeper(ctx); err != nil {
		return stopped(ctx, err)
	}
	defer s.keeper.close(ctx)
	if st, err := s.keeper.get(ctx); err == nil {
		if err := s.stopOnLoss(st); err != nil {
			return err
		}
	}
	if s.cfg.Intents == nil {
		s.cfg.Intents = s.keeper
	}
	sp, err := s.openSpill()
	if err != nil {
		return err
	}
	if sp != nil {
		s.spill = sp
		defer s.closeSpill(ctx)
	}
	if s.cfg.VerifyInterval > 0 {
		defer s.beside(ctx, s.verifyRegularly)()
	}
	if s.cfg.Snapshot != SnapshotOnly {
		defer s.beside(ctx, s.resyncs)()
	}
	retry := newBackOff()
	for {
		s.phaseConnecting()
		ready, err := s.prepareUntilReady(ctx)
		if err == nil {
			var acknowledged bool
			if acknowledged, err = s.attempt(ctx, ready); acknowledged {
				retry.Reset()
			}
		}
		var changed *feldera.IncarnationChanged
		var again *replayError
		switch {
		case err == nil || ctx.Err() != nil:
			return stopped(ctx, err)
		case errors.As(err, &changed):
			if err := s.destinationRestarted(ctx, changed); err != nil {
				return stopped(ctx, err)
			}
		case errors.Is(err, errOtherServer):
			s.log.WarnContext(ctx, "the attempt is over, the next one begins at the bookmark", "err", err)
		case errors.As(err, &again):
			s.readAgain(ctx, again)
		default:
			s.recordRefused(ctx, err)
			return err
		}
		if err := sleep(ctx, retry.NextBackOff()); err != nil {
			return stopped(ctx, err)
		}
	}
}

// beside runs fn in a goroutine of its own; the function that it gives ends and
// awaits it.
func (s *Source) beside(ctx context.Context, fn func(context.Context)) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { fn(ctx) })
	return func() { cancel(); running.Wait() }
}

// replayError is a fault after which everything that is not acknowledged is read
// from the slot again, in the same process.
type replayError struct{ err error }

func (e *replayError) Error() string { return e.err.Error() }

func (e *replayError) Unwrap() error { return e.err }

// readAgain says that it happens.
func (s *Source) readAgain(ctx context.Context, why *replayError) {
	s.cfg.Metrics.retries.WithLabelValues("attempt").Inc()
	s.log.ErrorContext(ctx, "everything that is not acknowledged is read from the slot and delivered again", "err", why.err)
	s.cfg.Report(Status{Check: CheckSource, Message: "reading again what is not acknowledged: " + why.Error()})
}

// prepareUntilReady repeats prepare until it succeeds, is refused, or ctx
// ends.
func (s *Source) prepareUntilReady(ctx context.Context) (*ready, error) {
	retry := newBackOff()
	for attempt := 1; ; attempt++ {
		s.cfg.Beat()
		r, err := s.prepare(ctx)
		if err == nil {
			return r, nil
		}
		var refused *decode.Refusal
		var changed *feldera.IncarnationChanged
		if errors.As(err, &refused) || errors.As(err, &changed) || ctx.Err() != nil {
			return nil, err
		}
		wait := waitFor(err, retry.NextBackOff())
		s.cfg.Metrics.retries.WithLabelValues("prepare").Inc()
		s.log.WarnContext(ctx, "not ready yet, trying again", "err", err, "attempt", attempt, "wait", wait)
		if err := sleep(ctx, wait); err != nil {
			return nil, err
		}
	}
}

// stopped maps the end of a run: a stop that was asked for is no error, a
// refusal always is.
func stopped(ctx context.Context, err error) error {
	var refused *decode.Refusal
	if errors.As(err, &refused) {
		return err
	}
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the stop is what ended it
	}
	return err
}

// newBackOff makes the one backoff of this package: up to 15 s on average, with
// nearly full jitter (0.2 to 1.8 times that), and without end, since a daemon has
// nothing better to do than to come back.
func newBackOff() *backoff.ExponentialBackOff {
	return backoff.NewExponentialBackOff(
		backoff.WithInitialInterval(200*time.Millisecond),
		backoff.WithRandomizationFactor(0.8),
		backoff.WithMaxInterval(15*time.Second),
		backoff.WithMaxElapsedTime(0),
	)
}

// sleep waits for d, or returns ctx's error if that ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// signal is an event that carries nothing but "look again". Setting it twice
// before anybody looks is one event.
type signal chan struct{}

func newSignal() signal { return make(signal, 1) }

func (s signal) set() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// once closes a channel at most once.
type once struct {
	sync.Once
	ch chan struct{}
}

func newOnce() *once { return &once{ch: make(chan struct{})} }

func (o *once) close() { o.Do(func() { close(o.ch) }) }
