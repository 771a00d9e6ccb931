package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/crash"
	"holdfast/internal/feldera"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// The counters: each partition has keys of its own, and each record sets its
// key to the next number. So a record that is missing, late or applied again
// after a later one shows in the state.
const (
	partitions = 4
	keys       = 8 // of each partition
	counters   = "counters"
	events     = "events" // each record another row, in a table without a key of its own
	deadTopic  = "counters-dead"
	group      = "crash"
)

func counterProgram(v *variant) string {
	progress := feldera.ProgressTable("holdfast_progress")
	return "CREATE TABLE counters (k BIGINT NOT NULL PRIMARY KEY, n BIGINT NOT NULL) WITH ('materialized' = 'true');\n" + keyless(v, events, "n") + progress.SQL()
}

// counterOracle watches every completed state of the destination, and knows
// what was produced.
type counterOracle struct {
	progress bool              // a record is proven by a progress row beside its own row
	topics   map[string]string // by their ids, as the progress table names them

	mu       sync.Mutex
	seen     map[int64]int64 // the number of each key, as last seen
	held     map[int64]int64 // the highest that was ever completed
	there    map[int64]bool  // the events that ever were in a completed state
	produced map[lane][]counted
	// offsets are those of each key's numbers, from 1 on.
	offsets   [partitions * keys][]int64
	committed [partitions]int64 // as last told to the broker
	states    int
	state     struct {
		incarnation string
		steps       int64
	}
	// loose: a member ended without order since everything last came to rest.
	// What it had delivered and not committed is delivered again, from its first
	// version on.
	loose bool
	// losing: the next incarnation begins with less than this one has.
	losing bool
	// recorded is how far the progress rows of each partition ever were.
	recorded map[lane]int64
	regress  []string
	double   []string
	expected map[string]int
}

// counted is a record: the next number of a key, or an event.
type counted struct{ offset, key, n int64 }

func newCounterOracle(progress bool) *counterOracle {
	return &counterOracle{
		progress: progress, topics: make(map[string]string), seen: make(map[int64]int64), held: make(map[int64]int64), there: make(map[int64]bool),
		produced: make(map[lane][]counted), recorded: make(map[lane]int64), expected: make(map[string]int),
	}
}

// observe looks at one state. It is called under the simulator's lock.
func (o *counterOracle) observe(v felderasim.View) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !v.Settled() {
		o.state.steps = -1
		return
	}
	incarnation, steps := v.Incarnation(), v.Counters().Steps
	if incarnation == o.state.incarnation && steps == o.state.steps {
		return
	}
	if incarnation != o.state.incarnation && o.losing {
		clear(o.seen) // the pipeline itself went back; from there it only goes on
		o.losing = false
	}
	o.state.incarnation, o.state.steps = incarnation, steps
	o.states++
	for _, row := range v.Rows("holdfast_progress") {
		name, is := row["lane"].(string)
		if !is {
			panic("a progress row without a lane")
		}
		topicID, p, _ := strings.Cut(name, "/")
		if n, err := strconv.Atoi(p); err == nil && o.topics[topicID] != "" {
			l := lane{o.topics[topicID], int32(n)}
			o.recorded[l] = max(o.recorded[l], number(row["position"]))
		}
	}
	for _, row := range v.Changed(events) {
		o.there[number(row["n"])] = true
	}
	for _, row := range v.Rows("counters") {
		k, n := number(row["k"]), number(row["n"])
		if before := o.seen[k]; n < before {
			o.wentBack(k, before, n)
		}
		o.seen[k] = n
		o.held[k] = max(o.held[k], n)
	}
}

// wentBack judges a key that a reader has seen go back. A replay of what was
// not committed is no promise broken; one of what was committed is.
func (o *counterOracle) wentBack(k, before, n int64) {
	p := k % partitions
	what := fmt.Sprintf("key %d went from %d back to %d", k, before, n)
	switch at := o.offsets[k]; {
	case !o.loose:
		o.regress = append(o.regress, what+", and no member had ended without order")
	case int(n) > len(at) || at[n-1] < o.committed[p]:
		o.regress = append(o.regress, fmt.Sprintf("%s, whose offset is below the committed %d of partition %d", what, o.committed[p], p))
	default:
		o.expected["a key went back to what was not committed, behind a kafkasink that ended without order"]++
	}
}

// missing tells which record below an offset was in no completed state; "" =
// none.
func (o *counterOracle) missing(l lane, offset int64) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	list := o.produced[l]
	n := 0
	for n < len(list) && list[n].offset < offset {
		c := list[n]
		if o.progress && o.recorded[l] <= c.offset {
			return fmt.Sprintf("no progress row for offset %d is completed", c.offset)
		}
		switch {
		case l.topic == events && !o.there[c.n]:
			return fmt.Sprintf("event %d, at offset %d, is in no completed state", c.n, c.offset)
		case l.topic == counters && o.held[c.key] < c.n:
			return fmt.Sprintf("number %d of key %d, at offset %d, is in no completed state", c.n, c.key, c.offset)
		}
		n++
	}
	o.produced[l] = slices.Delete(list, 0, n)
	return ""
}

// told takes an offset that was committed.
func (o *counterOracle) told(l lane, offset int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if l.topic == counters {
		o.committed[l.partition] = offset
	}
}

// counterWorld is a kafkasink, or two, with everything around it.
type counterWorld struct {
	rig

	variant *variant
	kafka   *harness.Kafka
	tap     *kafkaTap
	oracle  *counterOracle
	client  *kgo.Client
	second  *harness.Daemon // another member; nil before it is needed

	mu       sync.Mutex
	n        [partitions * keys]int64 // of each key, as last produced
	poison   int
	produced int
	events   int
	twice    int // events that are there more often than once, as last seen
}

func openCounters(ctx context.Context, opts worldOptions) (_ world, err error) {
	w := &counterWorld{rig: rig{dir: opts.dir, patience: patience}, variant: opts.variant, oracle: newCounterOracle(opts.variant.progress)}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	w.tap = newKafkaTap(w.oracle)
	if w.proxy, err = harness.StartProxy(""); err != nil {
		return nil, err
	}
	w.proxy.Tap(w.tap.connection)
	w.kafka, err = harness.StartKafka(ctx, harness.KafkaOptions{
		Listeners: map[string]string{"TAPPED": "PLAINTEXT"}, Through: map[string]*harness.Proxy{"TAPPED": w.proxy},
	})
	if err != nil {
		return nil, err
	}
	if err = w.kafka.CreateTopic(ctx, counters, partitions, nil); err != nil {
		return nil, err
	}
	if err = w.kafka.CreateTopic(ctx, events, partitions, nil); err != nil {
		return nil, err
	}
	if err = w.kafka.CreateTopic(ctx, deadTopic, 1, nil); err != nil {
		return nil, err
	}
	if err = w.learnTopicIDs(ctx); err != nil {
		return nil, err
	}
	w.sim, err = felderasim.New(felderasim.Options{
		CheckpointInterval: time.Second,
		SQL:                counterProgram(opts.variant), Edition: felderasim.Enterprise, Model: core.ModelExactlyOnce, Observe: w.oracle.observe,
	})
	if err != nil {
		return nil, err
	}
	if err = w.sim.Start(ctx); err != nil {
		return nil, err
	}
	program, err := opts.build(ctx)
	if err != nil {
		return nil, err
	}
	env := opts.daemonEnv(map[string]string{
		"KAFKASINK_BROKERS": w.proxy.Addr(), "KAFKASINK_GROUP": group, "KAFKASINK_TOPICS": counters + "=counters:json," + events + "=events:json",
		"KAFKASINK_POISON": "dlq", "KAFKASINK_DLQ_TOPIC": deadTopic, "KAFKASINK_POISON_LIMIT": "100000",
		"KAFKASINK_COMMIT_INTERVAL": "100ms", "KAFKASINK_SESSION_TIMEOUT": "3s", "KAFKASINK_DRAIN_TIMEOUT": "2s",
		"KAFKASINK_BATCH_ROWS": "50", "KAFKASINK_START": "earliest",
		"FELDERA_URL": w.sim.URL(), "FELDERA_PIPELINE": "p",
		"FELDERA_REQUEST_TIMEOUT": "4s", "FELDERA_REQUEST_LIFETIME": "4s",
	})
	w.daemon, err = harness.StartDaemon(harness.DaemonOptions{Program: program, ListenVar: "KAFKASINK_LISTEN", Env: env})
	if err != nil {
		return nil, err
	}
	w.client, err = w.kafka.Client(kgo.DefaultProduceTopic(counters), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		return nil, err
	}
	if err = w.produce(ctx, 1); err != nil {
		return nil, err
	}
	if err = w.settle(ctx); err != nil {
		return nil, fmt.Errorf("first records: %w", err)
	}
	w.second, err = harness.StartDaemon(harness.DaemonOptions{Program: program, ListenVar: "KAFKASINK_LISTEN", Env: env})
	if err != nil {
		return nil, err
	}
	w.second.Kill()
	writing, stop := context.WithCancel(context.WithoutCancel(ctx))
	w.stopWriters, w.patience = stop, opts.patienceOr()
	w.write(writing, w.writer)
	w.write(writing, w.sample)
	return w, nil
}

// learnTopicIDs finds out by what ids commits and progress rows name the topics.
func (w *counterWorld) learnTopicIDs(ctx context.Context) error {
	client, err := w.kafka.Client()
	if err != nil {
		return err
	}
	defer client.Close()
	// A topic is made before every broker that is asked knows it.
	limit, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return harness.Eventually(limit, "the broker names the topics", func(ctx context.Context) (any, bool) {
		topics, err := kadm.NewClient(client).ListTopics(ctx, counters, events)
		if err != nil {
			return err, false
		}
		for _, name := range []string{counters, events} {
			id := topics[name].ID
			if id == (kadm.TopicID{}) {
				return topics, false
			}
			w.tap.topics[id], w.oracle.topics[hex.EncodeToString(id[:])] = name, name
		}
		return nil, true
	})
}

// writer produces until ctx ends.
func (w *counterWorld) writer(ctx context.Context) {
	turn := time.NewTicker(20 * time.Millisecond)
	defer turn.Stop()
	for w.gate.enter(ctx) {
		_ = w.produce(ctx, 4) // the broker is being restarted: the client has its own patience
		w.gate.leave()
		select {
		case <-turn.C:
		case <-ctx.Done():
			return
		}
	}
}

// produce sets some keys to their next numbers. A record whose answer is lost
// is not produced again: the client is idempotent.
func (w *counterWorld) produce(ctx context.Context, records int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.produceEvent(ctx); err != nil {
		return err
	}
	for range records {
		key := w.produced % (partitions * keys)
		w.produced++
		partition := int32(key % partitions)
		n := w.n[key] + 1
		r := &kgo.Record{Partition: partition, Key: fmt.Appendf(nil, "%d", key), Value: fmt.Appendf(nil, `{"k":%d,"n":%d}`, key, n)}
		if err := w.client.ProduceSync(context.WithoutCancel(ctx), r).FirstErr(); err != nil {
			return err
		}
		w.n[key] = n
		w.oracle.mu.Lock()
		w.oracle.offsets[key] = append(w.oracle.offsets[key], r.Offset)
		l := lane{counters, partition}
		w.oracle.produced[l] = append(w.oracle.produced[l], counted{r.Offset, int64(key), n})
		w.oracle.mu.Unlock()
	}
	return nil
}

// produceEvent adds a record that is like no other.
func (w *counterWorld) produceEvent(ctx context.Context) error {
	r := &kgo.Record{Topic: events, Partition: int32(w.events % partitions), Value: fmt.Appendf(nil, `{"n":%d}`, w.events)}
	if err := w.client.ProduceSync(context.WithoutCancel(ctx), r).FirstErr(); err != nil {
		return err
	}
	l := lane{events, r.Partition}
	w.oracle.mu.Lock()
	w.oracle.produced[l] = append(w.oracle.produced[l], counted{r.Offset, 0, int64(w.events)})
	w.oracle.mu.Unlock()
	w.events++
	return nil
}

func (w *counterWorld) close() {
	// A writer waits for its record to be acknowledged, and where a run was ended
	// while the broker was down nobody will: the client ends that.
	if w.stopWriters != nil {
		w.stopWriters()
	}
	if w.client != nil {
		w.client.Close()
	}
	w.rig.close()
	if w.second != nil {
		w.second.Close()
	}
	if w.kafka != nil {
		_ = w.kafka.Close()
	}
}

func (w *counterWorld) killSource(ctx context.Context) error {
	w.kafka.Kill()
	// A daemon that lives on looks for the broker while there is none.
	if err := w.goOn(); err != nil {
		return err
	}
	return w.kafka.Start(ctx)
}

func (w *counterWorld) crashDestination(_ context.Context, keep core.Keep) {
	if keep != core.KeepJournal {
		w.oracle.mu.Lock()
		w.oracle.losing = true
		w.oracle.mu.Unlock()
		w.tap.mayGoBack(true)
	}
	w.sim.Crash(keep)
}

func (w *counterWorld) unclean() {
	w.oracle.mu.Lock()
	defer w.oracle.mu.Unlock()
	w.oracle.loose = true
}

func (w *counterWorld) alone() { w.second.Kill() }

// holdAnswer holds an answer to a commit.
func (w *counterWorld) holdAnswer(p crash.Point, n int) (there func() bool, letGo func(), err error) {
	if p != crash.KafkaMidCommit {
		return nil, nil, fmt.Errorf("nobody holds an answer at %s", p)
	}
	there, letGo = w.tap.hold(n)
	return there, letGo, nil
}

// sample reads the group's offsets from the broker itself, again and again: it
// must never have more than the members were heard to say, nor less than it has
// confirmed. A broker was seen to come up, to answer without an error that the
// group has no offset at all, and to have them all a moment later: that it has
// none counts when it says so again and again.
func (w *counterWorld) sample(ctx context.Context) {
	const again = 10
	none := 0
	turn := time.NewTicker(500 * time.Millisecond)
	defer turn.Stop()
	for {
		select {
		case <-turn.C:
		case <-ctx.Done():
			return
		}
		limit, cancel := context.WithTimeout(ctx, 5*time.Second)
		confirmed := w.tap.confirmed()
		at, err := w.kafka.CommittedOffsets(limit, group)
		cancel()
		if err != nil { // it is being restarted
			continue
		}
		if none++; len(at) > 0 || none >= again {
			none = 0
			w.tap.sampled(at, confirmed)
		}
	}
}

func (w *counterWorld) prepare(context.Context, crashCase, map[string]string) error { return nil }

// provoke makes the daemon pass the places of a rebalance, of a dead letter
// and of a shutdown.
func (w *counterWorld) provoke(ctx context.Context, c crashCase) error {
	switch c.point {
	case crash.KafkaBeforeDLQ, crash.KafkaAfterDLQ:
		w.mu.Lock()
		defer w.mu.Unlock()
		w.poison++
		r := &kgo.Record{Partition: int32(w.poison % partitions), Value: fmt.Appendf(nil, "poison %d", w.poison)}
		return w.client.ProduceSync(ctx, r).FirstErr()
	case crash.KafkaRevoke, crash.KafkaDrain:
		w.unclean() // the second one is killed at times
		// Only who has them all has one to give.
		assigned, err := w.daemon.Metric(ctx, "kafkasink_assigned_partitions", nil)
		_, gone := w.second.ExitCode()
		switch {
		case err != nil: // not up yet
		case assigned == 2*partitions && gone: // of both topics
			return w.second.Restart(nil)
		case assigned > 0 && assigned < 2*partitions && !gone:
			w.second.Kill() // both joined at once
		}
	case crash.KafkaLost:
		// Only who has some has some to lose.
		if n, err := w.daemon.Metric(ctx, "kafkasink_assigned_partitions", nil); err != nil || n == 0 {
			return nil // not up yet
		}
		w.unclean()
		if err := w.daemon.Signal(syscall.SIGSTOP); err != nil {
			return err
		}
		return w.standStill(ctx, standstill)
	case crash.KafkaShutdown:
		return w.terminate(ctx)
	}
	return nil
}

// otherMember starts the second member, or ends it.
func (w *counterWorld) otherMember(ctx context.Context, inOrder bool) error {
	if _, gone := w.second.ExitCode(); gone {
		return w.second.Restart(nil)
	}
	if !inOrder {
		w.second.Kill()
		return nil
	}
	if err := w.second.Terminate(); err != nil {
		return err
	}
	limit, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	_, err := w.second.Wait(limit)
	return err
}

// flow waits until offsets are committed again while records come.
func (w *counterWorld) flow(ctx context.Context) error {
	if w.second != nil {
		w.second.Kill()
	}
	return w.rig.flow(ctx, w.tap.moved, enough)
}

func (w *counterWorld) settle(ctx context.Context) error {
	if w.second != nil {
		w.second.Kill()
	}
	release := w.gate.hold()
	defer release()
	limit, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	if err := w.rest(limit); err != nil {
		return err
	}
	if err := w.compareNow(limit); err != nil {
		return err
	}
	w.tap.mayGoBack(false)
	w.oracle.mu.Lock()
	w.oracle.loose = false
	w.oracle.mu.Unlock()
	return nil
}

func (w *counterWorld) rest(ctx context.Context) error {
	ends := map[string]map[int32]int64{}
	err := harness.Eventually(ctx, "the broker says where the log ends", func(ctx context.Context) (any, bool) {
		var err error
		for _, topic := range []string{counters, events} {
			if ends[topic], err = w.kafka.EndOffsets(ctx, topic); err != nil {
				return err, false
			}
		}
		return nil, true
	})
	if err != nil {
		return err
	}
	err = harness.Eventually(ctx, fmt.Sprintf("the committed offsets reach %v", ends), func(ctx context.Context) (any, bool) {
		at, err := w.kafka.CommittedOffsets(ctx, group)
		if err != nil {
			return err, false
		}
		for topic := range ends {
			for p, end := range ends[topic] {
				if end > 0 && at[topic][p] < end {
					return at, false
				}
			}
		}
		return nil, true
	})
	if err != nil {
		return w.noProgress(context.WithoutCancel(ctx), err)
	}
	return nil
}

func (w *counterWorld) variantOf() *variant { return w.variant }

func (w *counterWorld) wrong() bool {
	w.oracle.mu.Lock()
	regressed := len(w.oracle.regress) > 0
	w.oracle.mu.Unlock()
	return regressed || w.tap.wrong()
}

// compareNow holds every key and every dead letter against what was produced.
func (w *counterWorld) compareNow(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	got := make(map[int64]int64)
	for _, row := range w.sim.Rows("counters") {
		got[number(row["k"])] = number(row["n"])
	}
	for key, n := range w.n {
		if got[int64(key)] != n {
			return &lostError{fmt.Sprintf("key %d is at %d, produced was %d", key, got[int64(key)], n)}
		}
	}
	if err := w.compareEvents(); err != nil {
		return err
	}
	ends, err := w.kafka.EndOffsets(ctx, deadTopic)
	if err != nil {
		return err
	}
	reader, err := w.kafka.Client(kgo.ConsumeTopics(deadTopic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		return err
	}
	defer reader.Close()
	letters := make(map[string]int)
	for read := int64(0); read < ends[0]; {
		fetches := reader.PollFetches(ctx)
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("read the dead letters: %w", err)
		}
		fetches.EachRecord(func(r *kgo.Record) {
			letters[string(r.Value)]++
			read = r.Offset + 1
		})
	}
	for i := 1; i <= w.poison; i++ {
		if what := fmt.Sprintf("poison %d", i); letters[what] == 0 {
			return &lostError{what + " is not among the dead letters, although its offset was passed"}
		}
	}
	for what := range letters {
		if !strings.HasPrefix(what, "poison ") {
			return &lostError{"a good record is among the dead letters: " + what}
		}
	}
	return nil
}

// compareEvents counts how often each event is there. The caller holds mu.
func (w *counterWorld) compareEvents() error {
	times := make([]int64, w.events)
	twice := 0
	for _, row := range w.sim.Rows(events) {
		n, weight := number(row["n"]), int64(1)
		if it, ok := row["$weight"]; ok {
			weight = number(it)
		}
		if n < 0 || n >= int64(len(times)) || weight < 1 {
			return &lostError{fmt.Sprintf("event %d is there %d times, and %d were produced", n, weight, len(times))}
		}
		times[n] += weight
	}
	for n, t := range times {
		if t == 0 {
			return &lostError{fmt.Sprintf("event %d is not there", n)}
		}
		twice += int(t - 1)
	}
	more := twice - w.twice
	w.twice = twice
	if more <= 0 {
		return nil
	}
	w.oracle.mu.Lock()
	defer w.oracle.mu.Unlock()
	if w.variant.progress {
		w.oracle.double = append(w.oracle.double, fmt.Sprintf("%d events are there once more than they should be", more))
	} else {
		w.oracle.expected["a row of a table without a key was applied once more, under at_least_once"] += more
	}
	return nil
}

func (w *counterWorld) findings() findings {
	var f findings
	var refused int
	f.early, f.back, f.healed, refused = w.tap.faults()
	w.oracle.mu.Lock()
	defer w.oracle.mu.Unlock()
	f.regress, f.double, f.expected = w.oracle.regress, w.oracle.double, w.oracle.expected
	if f.healed > 0 {
		f.expected["an offset went back to what a pipeline that lost rows still held"] = f.healed
	}
	if refused > 0 {
		f.expected["a member that the group had put out sent a lower offset, and the broker refused it"] = refused
	}
	w.oracle.regress, w.oracle.double, w.oracle.expected = nil, nil, make(map[string]int)
	return f
}

func (w *counterWorld) numbers() string {
	w.oracle.mu.Lock()
	defer w.oracle.mu.Unlock()
	w.tap.mu.Lock()
	defer w.tap.mu.Unlock()
	return fmt.Sprintf("%s: %d completed states were looked at, %d commits checked, the group's offsets were read %d times",
		w.variant, w.oracle.states, w.tap.commits, w.tap.samples)
}
