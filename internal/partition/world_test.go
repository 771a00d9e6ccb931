package partition

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

const (
	group = "holdfast"
	topic = "orders"
)

// world is a broker, a destination and any number of members, in a bubble
// with a fake clock. Every offset that is committed is checked, when the
// broker gets it, against what the destination has completed.
type world struct {
	t       *testing.T
	fake    bool
	network *kfake.VirtualNetwork
	cluster *kfake.Cluster
	writer  *kgo.Client
	engine  *engine
	log     *slog.Logger

	mu      sync.Mutex
	ids     map[[16]byte]string // topic names, for commits that name ids only
	commits []commitSeen
	members []*member
	highest map[place]int64 // committed, as the broker had it
	reruns  bool            // positions may go back: a topic was made anew, or truncated
	tool    bool            // an administrator's tool commits

	// most members may run at once, and pace is the unit of time, in a model.
	most int
	pace time.Duration
	back func() // ends a model's outage of the destination
}

type commitSeen struct {
	place
	offset int64
	member string
	note   note
}

// bubble runs a test with a world whose clock is fake.
//
// It is for one member. With several, a join that waits for another member's
// next heartbeat waits for time to pass, while a commit waits for the join on
// one of the client's mutexes, which stops a bubble's clock.
func bubble(t *testing.T, test func(w *world), seed ...kfake.Opt) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { inWorld(t, true, test, seed) })
}

// realTime runs a test with a world on the real clock, beside others.
func realTime(t *testing.T, test func(w *world), seed ...kfake.Opt) {
	t.Helper()
	t.Parallel()
	inWorld(t, false, test, seed)
}

func inWorld(t *testing.T, fake bool, test func(w *world), seed []kfake.Opt) {
	t.Helper()
	w := &world{t: t, fake: fake, network: &kfake.VirtualNetwork{}, engine: newEngine(t), ids: map[[16]byte]string{}, highest: map[place]int64{}}
	w.log = slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelInfo}))
	opts := append([]kfake.Opt{kfake.Ports(9092), kfake.ListenFn(w.network.Listen), kfake.GroupMinSessionTimeout(time.Second)}, seed...)
	var err error
	if w.cluster, err = kfake.NewCluster(opts...); err != nil {
		t.Fatal(err)
	}
	defer w.cluster.Close()
	w.cluster.Fault(kfake.Fault{
		Keys: []kmsg.Key{kmsg.OffsetCommit}, Observe: true, Count: -1,
		When: func(r kmsg.Request) bool { w.audit(r); return false },
	})
	w.writer, err = kgo.NewClient(kgo.SeedBrokers("localhost:9092"), kgo.Dialer(w.network.DialContext), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { w.writer.Close() }()
	for _, name := range []string{topic, "other"} {
		w.learn(name)
	}
	defer w.engine.stop()
	defer func() {
		// Where a test failed half-way, its members must still end.
		for _, m := range w.members {
			m.cancel()
			m.now()
			<-m.done
		}
	}()
	test(w)
}

// learn notes a topic's id. The cluster must not be asked from within audit.
func (w *world) learn(name string) {
	if info := w.cluster.TopicInfo(name); info != nil {
		w.mu.Lock()
		w.ids[info.TopicID] = name
		w.mu.Unlock()
	}
}

// audit is the oracle: committed <= completed at every instant, and never
// back, as the broker sees it.
func (w *world) audit(r kmsg.Request) {
	req, ok := r.(*kmsg.OffsetCommitRequest)
	if !ok || req.Group != group {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.tool {
		return
	}
	for _, t := range req.Topics {
		name := t.Topic
		if name == "" {
			name = w.ids[t.TopicID]
		}
		for _, p := range t.Partitions {
			at := place{name, p.Partition}
			seen := commitSeen{place: at, offset: p.Offset, member: req.MemberID}
			if p.Metadata != nil {
				seen.note, _ = parseNote(*p.Metadata, p.Offset)
				if len(*p.Metadata) > maxNote {
					w.t.Errorf("metadata of %d bytes", len(*p.Metadata))
				}
			}
			if missing, ok := w.engine.missing(at, p.Offset); ok {
				w.t.Errorf("offset %d of %s was committed although record %d is not completed", p.Offset, at, missing)
			}
			for _, old := range slices.Backward(w.commits) {
				if old.place == at && old.member == req.MemberID {
					if old.offset > p.Offset && !w.reruns {
						w.t.Errorf("commit of %s went back from %d to %d", at, old.offset, p.Offset)
					}
					break
				}
			}
			w.commits = append(w.commits, seen)
		}
	}
}

func (w *world) lastCommit(at place) (commitSeen, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range slices.Backward(w.commits) {
		if c.place == at {
			return c, true
		}
	}
	return commitSeen{}, false
}

// cleanly tells whether a clean note was committed at an offset.
func (w *world) cleanly(at place, offset int64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.commits, func(c commitSeen) bool { return c.place == at && c.offset == offset && c.note.Clean })
}

// produce writes one record a value to one partition.
func (w *world) produce(topic string, partition int32, values ...string) {
	w.t.Helper()
	for _, v := range values {
		r := &kgo.Record{Topic: topic, Partition: partition, Value: []byte(v)}
		if err := w.writer.ProduceSync(w.t.Context(), r).FirstErr(); err != nil {
			w.t.Fatal(err)
		}
		w.engine.produced(place{topic, partition}, r.Offset, v)
	}
}

// produceTogether writes records in as few batches as it takes.
func (w *world) produceTogether(topic string, partition int32, values ...string) {
	w.t.Helper()
	var rs []*kgo.Record
	for _, v := range values {
		rs = append(rs, &kgo.Record{Topic: topic, Partition: partition, Value: []byte(v)})
	}
	if err := w.writer.ProduceSync(w.t.Context(), rs...).FirstErr(); err != nil {
		w.t.Fatal(err)
	}
	for _, r := range rs {
		w.engine.produced(place{topic, partition}, r.Offset, string(r.Value))
	}
}

// fill writes n good records.
func (w *world) fill(topic string, partition int32, n int) {
	w.t.Helper()
	w.produce(topic, partition, slices.Repeat([]string{"row"}, n)...)
}

// committed gives the group's committed offset at the broker, -1 if none.
func (w *world) committed(at place) int64 {
	info := w.cluster.GroupInfo(group)
	if info == nil {
		return -1
	}
	c, ok := info.Commits[at.topic][at.partition]
	if !ok {
		return -1
	}
	return c.Offset
}

// eventually waits, in the bubble's time, until cond holds.
func (w *world) eventually(what string, cond func() bool) {
	w.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(3 * time.Minute)
	if !w.fake {
		deadline = time.Now().Add(30 * time.Second)
	}
	for !cond() {
		w.forward()
		if time.Now().After(deadline) {
			w.t.Fatalf("never: %s", what)
		}
		<-tick.C
	}
}

// forward checks that no committed offset went back at the broker.
func (w *world) forward() {
	info := w.cluster.GroupInfo(group)
	if info == nil || w.reruns {
		return
	}
	for name, parts := range info.Commits {
		for p, c := range parts {
			at := place{name, p}
			if c.Offset < w.highest[at] {
				w.t.Errorf("committed offset of %s went back from %d to %d", at, w.highest[at], c.Offset)
			}
			w.highest[at] = c.Offset
		}
	}
}

// pass lets time go by.
func (w *world) pass(d time.Duration) {
	timer := time.NewTimer(d)
	<-timer.C
	if w.fake {
		synctest.Wait()
	}
}

// member is a running consumer.
type member struct {
	*Consumer
	w       *world
	reg     *prometheus.Registry
	line    *line
	cancel  context.CancelFunc
	endWith context.CancelCauseFunc
	stopNow chan struct{}
	now     func() // closes stopNow
	done    chan struct{}
	err     error
}

// start runs a consumer with short times.
func (w *world) start(change func(*Config)) *member {
	w.t.Helper()
	w.engine.members.Add(1)
	m := &member{w: w, reg: prometheus.NewRegistry(), line: &line{network: w.network}, stopNow: make(chan struct{}), done: make(chan struct{})}
	metrics, err := NewMetrics(m.reg)
	if err != nil {
		w.t.Fatal(err)
	}
	table := w.engine.table("orders")
	cfg := Config{
		Brokers: []string{"localhost:9092"}, Group: group,
		Routes:          []Route{{Topic: topic, Table: "orders", Destination: table, Decoder: plainDecoder{}}},
		Watcher:         w.engine,
		Incarnation:     "one",
		InFlight:        100,
		DrainTimeout:    10 * time.Second,
		RequestLifetime: 30 * time.Second,
		StopNow:         m.stopNow, Logger: w.log, Metrics: metrics,
		Options: []kgo.Opt{kgo.Dialer(m.line.dial)},
	}
	if !w.fake {
		cfg.HeartbeatInterval, cfg.SessionTimeout, cfg.RebalanceTimeout = 100*time.Millisecond, 10*time.Second, 10*time.Second
		cfg.DrainTimeout, cfg.RequestLifetime, cfg.CommitInterval = 2*time.Second, 3*time.Second, 100*time.Millisecond
	}
	if change != nil {
		change(&cfg)
	}
	if m.Consumer, err = New(cfg); err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(w.t.Context())
	m.cancel, m.endWith = func() { cancel(nil) }, cancel
	m.now = sync.OnceFunc(func() { close(m.stopNow) })
	w.members = append(w.members, m)
	go func() {
		defer close(m.done)
		m.err = m.Run(ctx)
	}()
	return m
}

// stop ends the consumer in order and waits for it.
func (m *member) stop() error {
	m.cancel()
	<-m.done
	return m.err
}

// owns tells how many partitions the member has lanes for.
func (m *member) owns() int {
	n := 0
	for _, p := range m.Snapshot().Partitions {
		if !p.NotTaken {
			n++
		}
	}
	return n
}

func (m *member) partition(at place) (PartitionStatus, bool) {
	for _, p := range m.Snapshot().Partitions {
		if p.Topic == at.topic && p.Partition == at.partition {
			return p, true
		}
	}
	return PartitionStatus{}, false
}

// metric sums a metric over the labels that match.
func (m *member) metric(name string, labels ...string) float64 {
	m.w.t.Helper()
	families, err := m.reg.Gather()
	if err != nil {
		m.w.t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, s := range f.GetMetric() {
			match := 0
			for _, l := range s.GetLabel() {
				if slices.Contains(labels, l.GetName()+"="+l.GetValue()) {
					match++
				}
			}
			if match == len(labels) {
				sum += s.GetCounter().GetValue() + s.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// hangHeartbeats has the broker answer no heartbeat until the returned func
// is called.
func (w *world) hangHeartbeats() (end func()) {
	var over atomic.Bool
	w.cluster.ControlKey(int16(kmsg.Heartbeat), func(kmsg.Request) (kmsg.Response, error, bool) {
		w.cluster.KeepControl()
		return nil, nil, !over.Load()
	})
	return func() { over.Store(true) }
}

// line is a member's network, which can be cut.
type line struct {
	network *kfake.VirtualNetwork
	mu      sync.Mutex
	down    bool
	open    map[net.Conn]bool
}

func (l *line) dial(ctx context.Context, network, host string) (net.Conn, error) {
	l.mu.Lock()
	down := l.down
	l.mu.Unlock()
	if down {
		return nil, &net.OpError{Op: "dial", Net: network, Err: errors.New("the line is cut")}
	}
	c, err := l.network.DialContext(ctx, network, host)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		l.open = map[net.Conn]bool{}
	}
	l.open[c] = true
	return c, nil
}

func (l *line) cut(down bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = down
	if down {
		for c := range l.open {
			_ = c.Close()
		}
		clear(l.open)
	}
}

// plainDecoder makes a row of every value but these: "bad" is poison, "odd"
// fails without saying that the record is to blame until mended is set, "none"
// needs nothing. A row of "reject" is refused by the pipeline.
type plainDecoder struct{ mended *atomic.Bool }

func (d plainDecoder) Decode(rec *decode.Record) (*decode.OrderChange, error) {
	value, pos := rec.Value, rec.Position
	if string(value) == "odd" && d.mended != nil && d.mended.Load() {
		value = []byte("row")
	}
	switch string(value) {
	case "bad":
		return nil, &decode.Refusal{Reason: decode.ReasonMalformed, What: "record value", Where: pos.String(), Why: "it is bad"}
	case "odd":
		return nil, errors.New("the registry is away")
	case "none":
		return nil, nil
	}
	return &decode.OrderChange{Op: decode.Insert, Position: pos, After: []decode.Value{{State: decode.Set, Bytes: value}}}, nil
}

// engine is the destination of all tables: it knows what arrived and what is
// completed.
type engine struct {
	members atomic.Int32 // consumers that were started
	t       *testing.T
	work    sync.WaitGroup

	mu          sync.Mutex
	incarnation string
	tables      map[string]*table
	// want are the offsets that need the destination; done those completed.
	want, done map[place]map[int64]bool
	values     map[place][]string
	rows       map[place][]int64 // every row that arrived, in order
	watching   []watch
	holding    bool // completions wait
	tokens     int
}

type watch struct {
	tok  feldera.Token
	fn   func(feldera.Evidence)
	rows []decode.Position
}

func newEngine(t *testing.T) *engine {
	t.Helper()
	return &engine{t: t, incarnation: "one", tables: map[string]*table{}, want: map[place]map[int64]bool{}, done: map[place]map[int64]bool{}, rows: map[place][]int64{}, values: map[place][]string{}}
}

func (e *engine) table(name string) *table {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.tables[name] == nil {
		e.tables[name] = &table{engine: e, name: name}
	}
	return e.tables[name]
}

func (e *engine) produced(at place, offset int64, value string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.want[at] == nil {
		e.want[at] = map[int64]bool{}
	}
	e.values[at] = append(e.values[at], value)
	e.want[at][offset] = value == "row" || value == "bad" || value == "odd" || value == "reject"
}

// length and value tell what was produced to a partition without gaps.
func (e *engine) length(at place) int64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return int64(len(e.values[at]))
}

func (e *engine) value(at place, offset int64) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.values[at][offset]
}

// forgive says that an offset needs no completion: it is skipped by policy.
func (e *engine) forgive(at place, offsets ...int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, o := range offsets {
		e.want[at][o] = false
	}
}

// reset forgets a partition: its log is another one.
func (e *engine) reset(topic string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for at := range maps.Clone(e.want) {
		if at.topic == topic {
			delete(e.want, at)
			delete(e.done, at)
			delete(e.rows, at)
		}
	}
}

// missing gives the lowest offset below limit that needs completion and has
// none.
func (e *engine) missing(at place, limit int64) (int64, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for o := range limit {
		if e.want[at][o] && !e.done[at][o] {
			return o, true
		}
	}
	return 0, false
}

func (e *engine) arrived(at place) []int64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.rows[at])
}

// Watch implements Watcher.
func (e *engine) Watch(tok feldera.Token, fn func(feldera.Evidence)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range e.watching {
		if e.watching[i].tok.Raw == tok.Raw {
			e.watching[i].fn = fn
		}
	}
	if !e.holding {
		e.work.Go(e.complete)
	}
}

// hold stops completions; release lets them go on.
func (e *engine) hold() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.holding = true
}

func (e *engine) release() {
	e.mu.Lock()
	e.holding = false
	e.mu.Unlock()
	e.complete()
}

// complete completes everything that is watched, the latest first: evidence
// comes in any order.
func (e *engine) complete() { e.completeIf(func() bool { return true }) }

// completeIf completes those that want says.
func (e *engine) completeIf(want func() bool) {
	e.mu.Lock()
	var ready []watch
	e.watching = slices.DeleteFunc(e.watching, func(w watch) bool {
		done := w.fn != nil && want()
		if done {
			ready = append(ready, w)
			for _, p := range w.rows {
				at := place{p.Topic, p.Partition}
				if e.done[at] == nil {
					e.done[at] = map[int64]bool{}
				}
				e.done[at][p.Offset] = true
			}
		}
		return done
	})
	e.mu.Unlock()
	for _, w := range slices.Backward(ready) {
		w.fn(feldera.Evidence{Token: w.tok, Rung: ack.Ingested, Step: 1})
		w.fn(feldera.Evidence{Token: w.tok, Rung: ack.Completed, Step: 1})
	}
}

// restart makes it another incarnation; everything watched is told.
func (e *engine) restart(incarnation string) {
	e.mu.Lock()
	was := e.incarnation
	e.incarnation = incarnation
	told := e.watching
	e.watching = nil
	e.mu.Unlock()
	for _, w := range told {
		w.fn(feldera.Evidence{Token: w.tok, Err: &feldera.IncarnationChanged{Was: was, Now: incarnation}})
	}
}

func (e *engine) stop() { e.work.Wait() }

// table is one table of the engine. Its hooks are called for each request.
type table struct {
	engine *engine
	name   string

	mu       sync.Mutex
	requests int
	busy     int
	// before runs when a request begins; an error is the request's answer.
	before func(ctx context.Context, n int) error
	starts []time.Time
}

func (t *table) NewArray() Array { return &fakeArray{} }

func (t *table) set(before func(ctx context.Context, n int) error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.before = before
}

func (t *table) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.requests
}

func (t *table) Send(ctx context.Context, a Array) (feldera.Token, error) {
	t.mu.Lock()
	// Each member has a sender of its own, and they know nothing of each other.
	if t.busy++; t.busy > int(max(t.engine.members.Load(), 1)) {
		t.engine.t.Error("two requests at once for one table")
	}
	t.requests++
	t.starts = append(t.starts, time.Now())
	n, before := t.requests, t.before
	t.mu.Unlock()
	defer func() {
		t.mu.Lock()
		t.busy--
		t.mu.Unlock()
	}()
	if before != nil {
		if err := before(ctx, n); err != nil {
			return feldera.Token{}, err
		}
	}
	e := t.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tokens++
	tok := feldera.Token{Raw: strconv.Itoa(e.tokens), Incarnation: e.incarnation}
	sent, ok := a.(*fakeArray)
	if !ok {
		t.engine.t.Errorf("sent %T", a)
		return feldera.Token{}, errors.New("not an array of this table")
	}
	if sent.rejects {
		return feldera.Token{}, &decode.Refusal{Reason: decode.ReasonRejected, What: "rows", Where: "table " + t.name, Why: "the pipeline says no"}
	}
	rows := slices.Clone(sent.rows)
	for _, p := range rows {
		at := place{p.Topic, p.Partition}
		e.rows[at] = append(e.rows[at], p.Offset)
	}
	e.watching = append(e.watching, watch{tok: tok, rows: rows})
	return tok, nil
}

// until blocks a request until its context ends, as one does whose
// destination is away.
func until(ctx context.Context, _ int) error {
	<-ctx.Done()
	return fmt.Errorf("the destination is away: %w", context.Cause(ctx))
}

type fakeArray struct {
	rows    []decode.Position
	rejects bool // one of the rows is refused
}

func (a *fakeArray) Add(ch *decode.OrderChange) error {
	if string(ch.After[0].Bytes) == "huge" {
		return &decode.Refusal{Reason: decode.ReasonValue, What: "insert", Where: ch.Position.String(), Why: "no column can hold it"}
	}
	a.rejects = a.rejects || string(ch.After[0].Bytes) == "reject"
	a.rows = append(a.rows, ch.Position)
	return nil
}
func (a *fakeArray) Rows() int  { return len(a.rows) }
func (a *fakeArray) Bytes() int { return 2 + 100*len(a.rows) }
func (a *fakeArray) Reset()     { a.rows, a.rejects = a.rows[:0], false }

// ascending checks the order of what arrived: strictly up, but for replays
// that begin again at an offset that had arrived before.
func (w *world) ascending(at place, replays int) {
	w.t.Helper()
	rows := w.engine.arrived(at)
	back := 0
	for i := 1; i < len(rows); i++ {
		if rows[i] > rows[i-1] {
			continue
		}
		back++
		if !slices.Contains(rows[:i], rows[i]) {
			w.t.Errorf("%s: row %d arrived after %d for the first time", at, rows[i], rows[i-1])
		}
	}
	if back > replays {
		w.t.Errorf("%s: %d replays, want at most %d: %v", at, back, replays, rows)
	}
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimRight(string(p), "\n"))
	return len(p), nil
}

var _ io.Writer = testWriter{}

// named gives the topic of an id.
func (w *world) named(id [16]byte) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ids[id]
}

func rejection() error {
	return &decode.Refusal{Reason: decode.ReasonRejected, What: "rows", Why: "the pipeline says no"}
}
