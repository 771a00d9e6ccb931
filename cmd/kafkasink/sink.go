package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v4"

	"holdfast/internal/ack"
	"holdfast/internal/config"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/ops"
	"holdfast/internal/partition"
)

// The named checks of kafkasink.
const (
	checkDestination = "destination" // the pipeline takes and completes rows
	checkGroup       = "group"       // this process is a member of the group
	checkPartitions  = "partitions"  // every assigned partition goes on
	checkState       = "state"       // the destination still has what it acknowledged
	checkDelivery    = "delivery"    // which level of delivery holds, and why
	checkPipeline    = "pipeline"    // it answers, is the same process, and runs
)

// What the log calls the things that fail for a while. Writing and reading
// completion have the client's own names.
const (
	reachBrokers = "reach the brokers"
	lookPipeline = "look at the pipeline"
)

// sink wires consumers to one pipeline: one consumer per incarnation of it.
type sink struct {
	c        *config.KafkaSink
	rt       ops.Runtime
	pipeline *feldera.Client
	policy   feldera.Policy
	metrics  *partition.Metrics
	decoding *decoding
	// effective: the session's level of delivery is effectively_once.
	effective bool
	// topics are those of the session, by name.
	topics  config.TopicMappings
	repeats *ops.Repeats

	mu sync.Mutex
	// stalled is why completion may stand still, by the last look at the
	// pipeline; "" = no reason is known.
	stalled string
	// evidence is when something was last completed, or was first left waiting
	// with nothing before it.
	evidence time.Time
	waiting  bool
}

// retentionAlarm is the time left until retention overtakes a partition at
// which the check "partitions" says so.
const retentionAlarm = time.Hour

// completionPatience is how long accepted rows may wait for completion before
// the check "destination" says so.
const completionPatience = 30 * time.Second

const (
	// pipelineLook is the time between looks at the pipeline.
	pipelineLook = 10 * time.Second
	// stoppedLooks is how many looks in a row, a second apart, must find every
	// partition stopped before that is believed: a rebalance passes through it.
	stoppedLooks = 2
)

// watcher is feldera.Completions, and tells the sink that rows complete. With
// KAFKASINK_ACK_ON=durable it holds the evidence of completion back until a
// checkpoint holds the rows, so that no offset moves before.
type watcher struct {
	*feldera.Completions
	s          *sink
	over       func(what string)   // a failure of it has ended
	durability *feldera.Durability // nil unless acknowledging on durable
}

func (w watcher) Watch(tok feldera.Token, fn func(feldera.Evidence)) {
	w.Completions.Watch(tok, func(e feldera.Evidence) {
		w.over("read completion")
		if e.Err == nil && e.Rung == ack.Completed {
			w.s.mu.Lock()
			w.s.evidence = time.Now()
			w.s.mu.Unlock()
			w.s.showDestination(true, "rows are completed", "")
			if w.durability != nil {
				w.durability.Watch(e, func(proof feldera.Evidence) {
					if proof.Err == nil {
						proof.Rung = ack.Completed
					}
					fn(proof)
				})
				return
			}
		}
		fn(e)
	})
}

// destination is a table, and tells the log when writing it works again. It is
// used by pointer: consumers tell destinations apart by comparing them.
type destination struct {
	partition.Destination
	worked func()
}

func (d *destination) Send(ctx context.Context, a partition.Array) (feldera.Token, error) {
	tok, err := d.Destination.Send(ctx, a)
	if err == nil {
		d.worked()
	}
	return tok, err
}

// newSink makes a sink whose log lines are written under ctx.
func newSink(ctx context.Context, c *config.KafkaSink, rt ops.Runtime) (*sink, error) {
	s := &sink{c: c, rt: rt, repeats: rt.Repeats}
	metrics := feldera.NewMetrics(rt.Registry, daemon)
	cfg := felderaConfig(c)
	cfg.Logger, cfg.Observe = rt.Logger, metrics.Observe
	cfg.OnRetry = func(r feldera.Retry) {
		metrics.Retried(r)
		s.repeats.Failed(ctx, r.What, r.Err)
		s.showDestination(false, r.What+": "+r.Err.Error(), "it is tried again until it works; no offset moves meanwhile")
	}
	var err error
	if s.pipeline, err = feldera.New(cfg); err != nil {
		return nil, err
	}
	s.policy = feldera.Policy{OnAltered: metrics.Altered}
	if c.Unrepresentable == config.Null {
		s.policy.NonFinite, s.policy.OutOfRange = feldera.NullSpecial, feldera.NullSpecial
	}
	if c.DecimalExcess == config.Truncate {
		s.policy.Fraction = feldera.TruncateExcess
	}
	if s.metrics, err = partition.NewMetrics(rt.Registry); err != nil {
		return nil, err
	}
	if s.decoding, err = newDecoding(ctx, c, rt); err != nil {
		return nil, err
	}
	return s, nil
}

func (s *sink) showDestination(ok bool, message, hint string) {
	s.rt.Health.Beat() // waiting for Feldera is no hang
	s.rt.Health.Set(checkDestination, ops.Check{OK: ok, Message: message, Hint: hint})
	s.rt.Health.SetReady(checkDestination, ok, message)
}

// run consumes until ctx ends or a person has to act. A change of the
// pipeline's incarnation ends one session and begins the next, at the offsets
// that were committed.
func (s *sink) run(ctx context.Context) error {
	// Schemas are asked for across sessions, and until the last drain is over.
	asking, stopAsking := context.WithCancel(context.WithoutCancel(ctx))
	var asker sync.WaitGroup
	asker.Go(func() { s.decoding.run(asking) })
	defer asker.Wait()
	defer stopAsking()
	retry := backoff.NewExponentialBackOff(backoff.WithMaxInterval(15*time.Second), backoff.WithMaxElapsedTime(0))
	for {
		s.rt.Health.SetPhase(ops.PhaseConnecting)
		began := time.Now()
		err := s.session(ctx)
		if errors.Is(err, errTopicsChanged) && ctx.Err() == nil {
			continue
		}
		var changed *feldera.IncarnationChanged
		if !errors.As(err, &changed) || ctx.Err() != nil {
			return err
		}
		if err := s.restarted(ctx, changed); err != nil {
			return err
		}
		s.pipeline.Expect(changed.Now)
		if time.Since(began) > time.Minute {
			retry.Reset()
		}
		timer := time.NewTimer(retry.NextBackOff())
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
	}
}

// session consumes under one incarnation of the pipeline. It owns the poller
// of completions, the consumer and the goroutine that shows their state.
func (s *sink) session(ctx context.Context) error {
	s.rt.Health.SetReady(checkPipeline, false, "it has not been looked at yet")
	schema, err := s.pipeline.Await(ctx)
	if err != nil {
		return err
	}
	over := func(what string) { s.repeats.Worked(ctx, what) }
	over("wait for the pipeline")
	if s.topics = s.findTopics(ctx); s.topics == nil {
		return nil // told to stop
	}
	routes, err := s.routes(schema, over)
	if err != nil {
		return err
	}
	cluster, err := s.askedCluster(ctx, schema)
	if err == nil {
		err = s.own(ctx, schema, cluster)
	}
	if err != nil {
		if ctx.Err() != nil {
			return nil //nolint:nilerr // told to stop
		}
		return err
	}
	s.showDestination(true, "the pipeline has every table", "")
	progress, err := s.delivery(ctx, schema)
	if err != nil {
		return err
	}

	completions := s.pipeline.NewCompletions(feldera.CompletionsOptions{})
	var durability *feldera.Durability
	if s.c.AckOn == config.Durable {
		durability = s.pipeline.NewDurability(feldera.DurabilityOptions{})
		if err := durability.Await(ctx); err != nil {
			return fmt.Errorf("KAFKASINK_ACK_ON=durable: %w", err)
		}
		over("check for checkpoints")
	}
	cfg, err := s.consumerConfig(routes, watcher{completions, s, over, durability}, s.pipeline.Expected())
	if err != nil {
		return err
	}
	cfg.Cluster, cfg.Progress = cluster, progress
	consumer, err := partition.New(cfg)
	if err != nil {
		return err
	}
	// The poller outlives a stop: the consumer drains after it. It ends when
	// the consumer has.
	polling, stopPolling := context.WithCancelCause(context.WithoutCancel(ctx))
	consuming, stopConsuming := context.WithCancelCause(ctx)
	var owned sync.WaitGroup
	owned.Go(func() {
		if err := completions.Run(polling); err != nil && polling.Err() == nil {
			stopConsuming(err)
		}
	})
	if durability != nil {
		owned.Go(func() {
			if err := durability.Run(polling); err != nil && polling.Err() == nil {
				stopConsuming(err)
			}
		})
	}
	owned.Go(func() {
		if err := s.show(polling, consumer); err != nil {
			stopConsuming(err)
		}
	})
	owned.Go(func() {
		if err := s.watchTopics(polling); err != nil {
			stopConsuming(err)
		}
	})
	owned.Go(func() {
		if err := s.watchPipeline(polling); err != nil {
			stopConsuming(err)
		}
	})
	owned.Go(func() {
		select {
		case <-s.rt.StopNow:
			// The requests in flight are not cut by a context: without this
			// the exit takes up to their time-out.
			s.pipeline.Halt()
		case <-polling.Done():
		}
	})
	err = consumer.Run(consuming)
	stopPolling(nil)
	owned.Wait()
	cause := context.Cause(consuming)
	stopConsuming(nil)
	if err == nil && ctx.Err() == nil {
		return cause
	}
	return err
}

// routes finds the table of every topic. over is told when a failure of
// something has ended.
func (s *sink) routes(schema *feldera.Schema, over func(what string)) ([]partition.Route, error) {
	destinations := make(map[string]partition.Destination)
	var routes []partition.Route
	for _, topic := range s.topics {
		table, err := schema.Table(topic.Table)
		if err != nil {
			return nil, err
		}
		if _, err := table.Identity(); err != nil {
			return nil, err
		}
		to := destinations[table.Spelling()]
		if to == nil {
			writing := "write table " + table.Spelling() // as the client calls it
			to = &destination{partition.ForTable(s.pipeline.Writer(table), table, s.policy), func() { over(writing) }}
			destinations[table.Spelling()] = to
		}
		rows, err := s.decoder(topic, table)
		if err != nil {
			return nil, err
		}
		routes = append(routes, partition.Route{Topic: topic.Topic, Table: table.Spelling(), Destination: to, Decoder: rows})
	}
	return routes, nil
}

func (s *sink) consumerConfig(routes []partition.Route, watcher partition.Watcher, incarnation string) (partition.Config, error) {
	c := s.c
	cfg, err := connection(c)
	if err != nil {
		return cfg, err
	}
	cfg.Routes, cfg.Watcher, cfg.Incarnation = routes, watcher, incarnation
	cfg.Start, cfg.OnGap = partition.StartPolicy(c.Start), partition.GapPolicy(c.OnGap)
	cfg.Poison, cfg.PoisonLimit, cfg.PoisonWindow = partition.PoisonPolicy(c.Poison), c.PoisonLimit, c.PoisonWindow
	cfg.OnLoss = partition.LossPolicy(c.OnLoss)
	cfg.Revoke = partition.RevokePolicy(c.Revoke)
	cfg.DrainTimeout, cfg.RebalanceTimeout, cfg.SessionTimeout = c.DrainTimeout, c.RebalanceTimeout, c.SessionTimeout
	cfg.CommitInterval, cfg.RequestLifetime = c.CommitInterval, c.Feldera.RequestLifetime
	cfg.BatchRows, cfg.BatchBytes, cfg.BatchAge, cfg.InFlight = c.BatchRows, int(c.BatchBytes), c.BatchAge, c.InFlight
	cfg.LaneMemory, cfg.MemoryLimit = int64(c.LaneMemory), int64(c.MemoryLimit)
	cfg.StopNow, cfg.Logger, cfg.Metrics = s.rt.StopNow, s.rt.Logger, s.metrics
	return cfg, nil
}

// showEvery is how often the consumer's state is looked at; joinEvery is that
// until it has joined, for the first second: readiness need not wait for a turn.
const (
	showEvery = time.Second
	joinEvery = 25 * time.Millisecond
)

// show turns the consumer's state into health, once a second. It is also what
// feeds the watchdog: Snapshot takes every lock of the consumer, so a consumer
// that hangs with one held starves it. It gives an error when nothing can go
// on before a person has acted, else nil when ctx has ended.
func (s *sink) show(ctx context.Context, consumer *partition.Consumer) error {
	every := time.NewTicker(joinEvery)
	defer every.Stop()
	stopped, joining := 0, int(showEvery/joinEvery)
	for {
		select {
		case <-every.C:
		case <-ctx.Done():
			return nil
		}
		st := consumer.Snapshot()
		s.rt.Health.Beat()
		if joining > 0 {
			if joining--; !st.Joined && joining > 0 {
				continue
			}
			joining = 0
			every.Reset(showEvery)
		}
		s.logTrouble(ctx, &st)
		s.showGroup(&st)
		s.showPartitions(&st)
		s.showCompletion(&st)
		s.showLoss(&st)
		why, all := st.AllStopped()
		if !all {
			stopped = 0
			continue
		}
		if stopped++; stopped == stoppedLooks {
			return fmt.Errorf("all %d partitions stopped: %w", st.Assigned, why)
		}
	}
}

// logTrouble says, at growing intervals, what the consumer waits for and the
// client library only mentions in passing.
func (s *sink) logTrouble(ctx context.Context, st *partition.Status) {
	say := func(what string, err error) {
		if err != nil {
			s.repeats.Failed(ctx, what, err)
		} else {
			s.repeats.Worked(ctx, what)
		}
	}
	say(reachBrokers, st.BrokersErr)
	for _, t := range s.topics {
		say("consume topic "+t.Topic, st.TopicErrs[t.Topic])
	}
}

// watchPipeline looks at the pipeline, at once and every pipelineLook, since
// while there are no rows nothing else would notice that it is paused or gone.
// It gives a *feldera.IncarnationChanged when it is another process, else nil
// when ctx has ended.
func (s *sink) watchPipeline(ctx context.Context) error {
	every := time.NewTicker(pipelineLook)
	defer every.Stop()
	for {
		stats, err := s.pipeline.Stats(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil && stats.Incarnation != s.pipeline.Expected() {
			return &feldera.IncarnationChanged{Was: s.pipeline.Expected(), Now: stats.Incarnation}
		}
		s.showPipeline(ctx, stats, err)
		select {
		case <-every.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// foreignTransaction is what can be done about a transaction that somebody else
// has opened. Nobody but whoever did knows whether it is whole.
const foreignTransaction = "whoever opened it must commit it, with POST …/commit_transaction; no offset moves meanwhile"

func (s *sink) showPipeline(ctx context.Context, stats *feldera.Stats, err error) {
	c := ops.Check{OK: true, Message: "it answers and runs"}
	stalled := ""
	if err == nil {
		stalled = stats.Stalled()
	}
	switch {
	case err != nil && feldera.Classify(err) == feldera.ClassStopOperator:
		c = ops.Check{Blocking: true, Message: err.Error(), Hint: whatToDo(err, "correct FELDERA_URL, FELDERA_PIPELINE or FELDERA_API_KEY")}
	case err != nil:
		c = ops.Check{Message: err.Error(), Hint: "it is looked at again; is the pipeline running, and reachable at FELDERA_URL?"}
	case stats.State != "Running":
		c = ops.Check{Message: "the pipeline is " + stats.State, Hint: "start or resume it; no offset moves meanwhile"}
	case stats.Transaction.Open():
		c = ops.Check{Message: "blocked: " + stats.Transaction.String(), Hint: foreignTransaction}
	default:
		c.Message += ", incarnation " + stats.Incarnation
	}
	if c.OK {
		s.repeats.Worked(ctx, lookPipeline)
	} else {
		if err == nil {
			err = errors.New(c.Message)
		}
		s.repeats.Failed(ctx, lookPipeline, err)
	}
	s.mu.Lock()
	s.stalled = stalled
	s.mu.Unlock()
	s.rt.Health.Set(checkPipeline, c)
	s.rt.Health.SetReady(checkPipeline, c.OK, c.Message)
}

// showCompletion says when accepted rows have waited for completion too long.
func (s *sink) showCompletion(st *partition.Status) {
	n := 0
	for _, t := range st.Tables {
		n += t.InFlight
	}
	s.mu.Lock()
	if n > 0 && !s.waiting {
		s.evidence = time.Now()
	}
	s.waiting = n > 0
	since, stalled := s.evidence, s.stalled
	s.mu.Unlock()
	patience := completionPatience
	if s.c.AckOn == config.Durable {
		// Checkpoints come once a minute by default, and it takes two.
		patience = max(10*patience, 4*s.c.Feldera.CheckpointInterval)
	}
	if n > 0 && time.Since(since) > patience {
		message := fmt.Sprintf("%d arrays are accepted but not completed, without any completion since %s", n, since.UTC().Format(time.RFC3339))
		if stalled != "" {
			message += ": " + stalled
		}
		s.showDestination(false, message,
			"look in the pipeline's /stats for an open transaction, a stuck output or a paused state; no offset moves meanwhile")
	}
}

func (s *sink) showGroup(st *partition.Status) {
	c := ops.Check{OK: st.Joined && st.Current, Message: fmt.Sprintf("member of group %s with %d partitions", st.Group, st.Assigned)}
	topic, topicErr := firstFault(st.TopicErrs)
	switch {
	case st.BrokersErr != nil && !c.OK:
		c = ops.Check{Message: st.BrokersErr.Error(), Hint: "it is tried again until it works; are the brokers up, and KAFKASINK_BROKERS, KAFKASINK_TLS and the login right?"}
	case topicErr != nil && !st.Joined:
		c = ops.Check{Message: fmt.Sprintf("waits for topic %s before it joins group %s: %v", topic, st.Group, topicErr), Hint: whatToDo(topicErr, "it is tried again until it works")}
	case st.GroupErr != nil:
		c = ops.Check{Message: st.GroupErr.Error(), Hint: "look at the brokers and at the group's other members"}
	case !st.Joined:
		c.Message, c.Hint = "joining group "+st.Group, "if this lasts: are the brokers reachable?"
	case !st.Current:
		c.Message = "the group's coordinator was last heard of at " + st.Contact.UTC().Format(time.RFC3339)
		c.Hint = "nothing is sent until it answers again"
	case st.CommitErr != nil:
		c = ops.Check{Message: "commit offsets: " + st.CommitErr.Error(), Hint: "it is tried again; records are not lost"}
	}
	if c.OK {
		s.rt.Health.SetPhase(ops.PhaseStreaming)
	}
	s.rt.Health.Set(checkGroup, c)
	s.rt.Health.SetReady(checkGroup, c.OK, c.Message)
}

func (s *sink) showPartitions(st *partition.Status) {
	blocked := st.Blocked()
	topic, topicErr := firstFault(st.TopicErrs)
	if len(blocked) == 0 && topicErr != nil {
		s.rt.Health.Set(checkPartitions, ops.Check{
			Message: fmt.Sprintf("nothing is read of topic %s: %v", topic, topicErr), Hint: whatToDo(topicErr, "it is tried again until it works"),
		})
		return
	}
	if len(blocked) == 0 {
		completing := ops.Check{OK: true, Message: "every partition goes on"}
		for i := range st.Partitions {
			switch p := &st.Partitions[i]; {
			case p.Held != nil:
				s.rt.Health.Set(checkPartitions, ops.Check{
					Message: fmt.Sprintf("%s[%d] is held: %v", p.Topic, p.Partition, p.Held),
					Hint:    whatToDo(p.Held, "it is tried again until it works; its offset does not move meanwhile"),
				})
				return
			case p.Retention != nil && p.Retention.Approaching && p.Retention.Left < retentionAlarm:
				s.rt.Health.Set(checkPartitions, ops.Check{
					Message: fmt.Sprintf("retention of topic %s reaches the offset of partition %d in about %v", p.Topic, p.Partition, p.Retention.Left.Round(time.Minute)),
					Hint:    "raise the topic's retention.ms or retention.bytes now; then find out why the destination is slow",
				})
				return
			case p.Waits != "":
				completing.Message = fmt.Sprintf("%s[%d] waits: %s", p.Topic, p.Partition, p.Waits)
			}
		}
		s.rt.Health.Set(checkPartitions, completing)
		return
	}
	s.rt.Health.Set(checkPartitions, ops.Check{
		Blocking: true, Message: fmt.Sprintf("%d stopped: %v", len(blocked), blocked[0]), Hint: whatToDo(blocked[0], ""),
	})
}

// firstFault gives the fault of the topic that is first in order, so that the
// same one is shown each time.
func firstFault(faults map[string]error) (topic string, err error) {
	for name, fault := range faults {
		if err == nil || name < topic {
			topic, err = name, fault
		}
	}
	return topic, err
}

// whatToDo gives what a refusal says that mends it, otherwise for other errors.
func whatToDo(err error, otherwise string) string {
	var refused *decode.Refusal
	if errors.As(err, &refused) {
		return refused.Do
	}
	return otherwise
}

// noDestination and noDecoder stand in a configuration that is only looked at.
type (
	noDestination struct{}
	noDecoder     struct{}
)

var errOnlyLooking = errors.New("this configuration is only looked at")

func (noDestination) NewArray() partition.Array { return nil }

func (noDestination) Send(context.Context, partition.Array) (feldera.Token, error) {
	return feldera.Token{}, errOnlyLooking
}

func (noDecoder) Decode(*decode.Record) (*decode.OrderChange, error) {
	return nil, errOnlyLooking
}
