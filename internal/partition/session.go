package partition

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/partition/lane"
)

// place is a partition of a topic.
type place struct {
	topic     string
	partition int32
}

func (p place) String() string { return fmt.Sprintf("%s[%d]", p.topic, p.partition) }

// session is one membership in the group: one client, and everything that
// hangs on it. It is used once.
//
// Lock order: commitMu, pauseMu, mu, sender.mu, a lane's own. None of them is
// held while a request to Feldera or (but for commitMu) to a broker is under
// way.
type session struct {
	cfg    *Config
	log    *slog.Logger
	id     string // the owner named in notes
	client *kgo.Client
	admin  *kadm.Client
	member *membership
	// ready is closed when client and admin are set: the client joins the group
	// while it is being made, and its callbacks may come before it is returned.
	ready chan struct{}
	// life outlasts the context of run: work that must end in order is done
	// under it. It ends when run does.
	life context.Context //nolint:containedctx // the client's callbacks have none of ours
	// fail ends the poll loop; fatal is what others call.
	fail context.CancelCauseFunc

	routes  map[string]*Route
	senders map[Destination]*sender
	// order is senders in the order of the routes.
	order []*sender

	// commitMu serialises all commits: interval, revocation, shutdown. A lane
	// is killed by revocation only while it is held, so no commit of the lane
	// is on its way when the partition is given up.
	commitMu sync.Mutex
	noNotes  bool // the broker refuses our metadata; under commitMu

	breaker *breaker
	letters *deadLetters // nil unless the policy is dlq
	// recorder is set once the progress table is open; never where none is used.
	recorder atomic.Pointer[recorder]

	pauseMu sync.Mutex
	paused  map[place]pause // what the client was told; under pauseMu
	over    bool            // the total is above its limit; under pauseMu

	mu sync.Mutex
	// assigned holds what the assigned callback named and no later callback
	// took away. Only what is in it gets a lane.
	assigned map[place]bool
	// lanes holds the live and the draining.
	lanes map[place]*held
	// refused holds assigned partitions that get no lane, with the reason.
	refused map[place]error
	// memberID is the group's name for this process while the lanes were
	// made. A commit under another one is a commit of a stranger's positions.
	memberID string
	// remade holds topics that were made anew and are to be read from their
	// start by policy.
	remade map[string]bool
	// notBefore is when records of a partition may be sent, as the lane that
	// was last made for it was told. The session's own note is no reason to
	// wait, but neither an end to a wait that was under way.
	notBefore map[place]time.Time
	// fetched holds what the coordinator said with the last offset fetch.
	fetched    []fetchedOffset
	ends       map[place]logBounds
	retention  map[string]retention // by topic; absent while unknown
	courses    map[place]*course
	groupErr   error
	topicErrs  map[string]error
	brokersErr error            // of the last look at the cluster
	missing    map[string]error // topics that are not as needed, by the last look that succeeded
	commitErr  error
	lastCommit time.Time
	end        error    // why the session ends, unless asked to
	actions    []func() // to be done between a poll and AllowRebalance
	interrupt  context.CancelFunc

	in      []lane.Record // of the poll loop
	changed bell          // rung when a lane drains or dies
	kick    chan struct{}
	mend    chan struct{}
	limiter repeats
}

// held is a lane and what the session keeps beside it.
type held struct {
	place
	lane   *lane.Lane
	route  *Route
	sender *sender
	// source names the topic among all that can feed the table.
	source string

	// The rest is under session.mu.

	// trouble is why fetching stopped, until it is mended.
	trouble *trouble
	// waits tells why nothing is sent before lane.NotBefore.
	waits string
	// taking is nil where no progress rows are written. It has its own rules.
	taking *taking

	// condemned are records that the pipeline refused when they stood alone. It
	// belongs to the sender's goroutine.
	condemned map[int64]*decode.Refusal
	// stall, and letters, the records that are in the dead-letter topic, are
	// under sender.mu. Both are forgotten as the lane passes them.
	stall   *stall
	letters map[int64]bool
	// awaits is what the decoder waited for last; under sender.mu.
	awaits <-chan struct{}
}

// newSession makes a session that is connected to nothing.
func newSession(cfg *Config) *session {
	s := &session{
		cfg: cfg, log: cfg.Logger, id: fmt.Sprintf("%016x", rand.Uint64()), //nolint:gosec // a name, not a secret
		routes:  make(map[string]*Route, len(cfg.Routes)),
		senders: make(map[Destination]*sender),
		paused:  make(map[place]pause), assigned: make(map[place]bool), lanes: make(map[place]*held),
		refused: make(map[place]error), remade: make(map[string]bool), ends: make(map[place]logBounds), courses: make(map[place]*course),
		topicErrs: make(map[string]error), notBefore: make(map[place]time.Time),
		ready: make(chan struct{}),
		kick:  make(chan struct{}, 1), mend: make(chan struct{}, 1),
	}
	s.changed.init()
	s.breaker = cfg.breaker
	s.member = &membership{cfg: cfg, session: cfg.SessionTimeout, margin: cfg.SessionMargin, renewed: s.wakeSenders}
	for i := range cfg.Routes {
		r := &cfg.Routes[i]
		s.routes[r.Topic] = r
		if s.senders[r.Destination] == nil {
			t := newSender(s, r.Table, r.Destination)
			s.senders[r.Destination] = t
			s.order = append(s.order, t)
		}
	}
	return s
}

// run is the session's whole life.
func (s *session) run(ctx context.Context) error {
	life, endLife := context.WithCancel(context.WithoutCancel(ctx))
	defer endLife()
	s.life = life
	polling, fail := context.WithCancelCause(ctx)
	s.fail = fail
	defer fail(nil)

	opts, err := s.consumerOptions(life)
	if err != nil {
		return fmt.Errorf("configure client: %w", err)
	}
	if s.client, err = kgo.NewClient(opts...); err != nil {
		return fmt.Errorf("make client: %w", err)
	}
	s.admin = kadm.NewClient(s.client)
	if s.cfg.Poison == PoisonDLQ {
		if s.letters, err = newDeadLetters(life, s.cfg); err != nil {
			s.client.CloseAllowingRebalance()
			return err
		}
	}
	close(s.ready)

	var work sync.WaitGroup
	for _, t := range s.order {
		work.Go(func() {
			if err := t.run(life); err != nil {
				s.fatal(err)
			}
		})
	}
	work.Go(func() { s.commitLoop(life) })
	if s.cfg.Progress != nil {
		work.Go(func() { s.runRecorder(life) })
	}
	work.Go(func() { s.mendLoop(life) })
	work.Go(func() { s.watchEnds(life) })
	work.Go(func() { s.watchCluster(life) })

	for polling.Err() == nil {
		s.poll(polling)
	}
	s.client.AllowRebalance()

	var changed *feldera.IncarnationChanged
	if errors.As(context.Cause(ctx), &changed) {
		s.fatal(changed) // there is nothing to wait for, and nothing to commit on
	}
	if s.ending() == nil {
		s.log.InfoContext(ctx, "stopping: waiting for what was sent", slog.Duration("limit", s.cfg.DrainTimeout))
		s.retire(s.everything(), s.cfg.DrainTimeout, "shutdown")
	}
	for _, h := range s.everything() {
		s.bury(h)
	}
	endLife()
	// A request in flight is never cut, so this takes up to one request
	// time-out where the destination hangs.
	work.Wait()
	s.letters.close()

	crash.Here(crash.KafkaShutdown)
	// Close waits for the group to be left and has no bound of its own; a
	// leave that was given up makes it immediate.
	leaving, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	if err := s.client.LeaveGroupContext(leaving); err != nil {
		s.log.WarnContext(leaving, "left the group without its answer; its partitions wait for the session time-out", slog.Any("err", s.cfg.explain("leave group", err)))
	}
	cancel()
	s.client.CloseAllowingRebalance()
	return s.ending()
}

// fatal ends the session. Its lanes die at once, and commit nothing: also
// where a drain is under way.
func (s *session) fatal(err error) {
	s.mu.Lock()
	if s.end == nil {
		s.end = err
	}
	s.mu.Unlock()
	for _, h := range s.everything() {
		s.givenUp(h, s.bury(h), "session ended", "none")
	}
	s.fail(err)
}

// atOnce tells that a stop must not wait for anything any more.
func (s *session) atOnce() bool {
	select {
	case <-s.cfg.StopNow:
		return true
	default:
		return false
	}
}

// broken ends the session for an invariant that does not hold.
func (s *session) broken(err error) { s.fatal(fmt.Errorf("broken invariant: %w", err)) }

// ending is why the session ends; nil for a shutdown that was asked for.
func (s *session) ending() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.end
}

// poll hands over one poll's records without blocking. Callbacks of the group
// wait from the poll's return until AllowRebalance.
func (s *session) poll(ctx context.Context) {
	pctx, cancel := context.WithCancel(ctx)
	s.mu.Lock()
	s.interrupt = cancel
	if len(s.actions) > 0 {
		cancel()
	}
	s.mu.Unlock()
	fetches := s.client.PollRecords(pctx, s.cfg.PollRecords)
	cancel()

	now := time.Now()
	// Records and errors can come together: the records count, since the
	// client's cursor is past them.
	fetches.EachPartition(func(p kgo.FetchTopicPartition) {
		if len(p.Records) > 0 {
			s.receive(p, now)
		}
		if p.Err != nil {
			s.fetchFailed(ctx, p.Topic, p.Partition, p.Err)
		}
	})
	s.mu.Lock()
	actions := s.actions
	s.actions = nil
	s.mu.Unlock()
	for _, act := range actions {
		act()
	}
	s.applyPauses()
	s.client.AllowRebalance()
}

// between has act done by the poll loop while no callback can run.
func (s *session) between(act func()) {
	s.mu.Lock()
	s.actions = append(s.actions, act)
	if s.interrupt != nil {
		s.interrupt()
	}
	s.mu.Unlock()
}

// receive gives one partition's records to its lane.
func (s *session) receive(p kgo.FetchTopicPartition, now time.Time) {
	s.mu.Lock()
	h := s.lanes[place{p.Topic, p.Partition}]
	if h != nil && h.trouble != nil && !h.trouble.gap {
		h.trouble = nil // it is fetched again
	}
	delete(s.topicErrs, p.Topic)
	s.mu.Unlock()
	m := s.cfg.Metrics
	if h == nil {
		// Records only ever enter a lane that an assignment made: one made
		// here, by a record that was polled before a revocation, would outlive
		// the partition's ownership.
		m.dropped.WithLabelValues("no_lane").Add(float64(len(p.Records)))
		return
	}
	in := s.in[:0]
	for _, r := range p.Records {
		in = append(in, lane.Record{
			Offset: r.Offset, LeaderEpoch: r.LeaderEpoch, Key: r.Key, Value: r.Value, Headers: headers(r),
			Time: r.Timestamp, Received: now, Idle: r.Attrs.IsControl(),
		})
	}
	got := h.lane.Receive(in)
	clear(in) // the values would keep their fetch buffers alive
	s.in = in
	m.records.WithLabelValues(p.Topic).Add(float64(got.Admitted))
	if got.Duplicates > 0 {
		m.dropped.WithLabelValues("duplicate").Add(float64(got.Duplicates))
	}
	if got.Refused > 0 {
		m.dropped.WithLabelValues("stopped").Add(float64(got.Refused))
	}
	if got.Admitted > 0 {
		crash.Here(crash.KafkaPolled)
		h.sender.poke()
	}
}

// headers gives a record's headers in the form that decoders take.
func headers(r *kgo.Record) []decode.Header {
	if len(r.Headers) == 0 {
		return nil
	}
	out := make([]decode.Header, len(r.Headers))
	for i, h := range r.Headers {
		out[i] = decode.Header{Key: h.Key, Value: h.Value}
	}
	return out
}

// everything gives all lanes.
func (s *session) everything() []*held {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*held, 0, len(s.lanes))
	for _, h := range s.lanes {
		out = append(out, h)
	}
	return out
}

func (s *session) wakeSenders() {
	for _, t := range s.order {
		t.poke()
	}
}

// bell tells any number of waiters that something changed.
type bell struct {
	mu sync.Mutex
	ch chan struct{}
}

func (b *bell) init() { b.ch = make(chan struct{}) }

// next gives a channel that is closed at the next ring. It is taken before
// the condition is looked at, so that no ring in between is missed.
func (b *bell) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ch
}

func (b *bell) ring() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.ch)
	b.ch = make(chan struct{})
}

// repeats lets one line a second through and counts the rest.
type repeats struct {
	mu      sync.Mutex
	until   map[string]time.Time
	swallow map[string]int
}

// ok tells whether a line of this kind may be written, and how many were not
// written since the last one. The kinds are few and fixed.
func (r *repeats) ok(kind string, every time.Duration, now time.Time) (int, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.until == nil {
		r.until, r.swallow = make(map[string]time.Time), make(map[string]int)
	}
	if now.Before(r.until[kind]) {
		r.swallow[kind]++
		return 0, false
	}
	r.until[kind] = now.Add(every)
	n := r.swallow[kind]
	r.swallow[kind] = 0
	return n, true
}
