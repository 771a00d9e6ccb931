package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
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
)

// sink wires consumers to one pipeline: one consumer per incarnation of it.
type sink struct {
	c        *config.KafkaSink
	rt       ops.Runtime
	pipeline *feldera.Client
	policy   feldera.Policy
	metrics  *partition.Metrics

	mu sync.Mutex
	// evidence is when something was last completed, or was first left waiting
	// with nothing before it.
	evidence time.Time
	waiting  bool
}

// completionPatience is how long accepted rows may wait for completion before
// the check "destination" says so.
const completionPatience = 30 * time.Second

// watcher is feldera.Completions, and tells the sink that rows complete.
type watcher struct {
	*feldera.Completions
	s *sink
}

func (w watcher) Watch(tok feldera.Token, fn func(feldera.Evidence)) {
	w.Completions.Watch(tok, func(e feldera.Evidence) {
		if e.Err == nil && e.Rung == ack.Completed {
			w.s.mu.Lock()
			w.s.evidence = time.Now()
			w.s.mu.Unlock()
			w.s.destination(true, "rows are completed", "")
		}
		fn(e)
	})
}

func newSink(c *config.KafkaSink, rt ops.Runtime) (*sink, error) {
	s := &sink{c: c, rt: rt}
	metrics := feldera.NewMetrics(rt.Registry, daemon)
	cfg := feldera.Config{
		URL: c.Feldera.URL, Pipeline: c.Feldera.Pipeline, CAFile: c.Feldera.CAFile,
		RequestTimeout: c.Feldera.RequestTimeout, RequestLifetime: c.Feldera.RequestLifetime,
		Logger: rt.Logger, Observe: metrics.Observe,
		OnRetry: func(r feldera.Retry) {
			metrics.Retried(r)
			s.destination(false, r.What+": "+r.Err.Error(), "it is tried again until it works; no offset moves meanwhile")
		},
	}
	if c.Feldera.APIKey.IsSet() {
		cfg.APIKey = c.Feldera.APIKey.Value
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
	return s, nil
}

func (s *sink) destination(ok bool, message, hint string) {
	s.rt.Health.Beat() // waiting for Feldera is no hang
	s.rt.Health.Set(checkDestination, ops.Check{OK: ok, Message: message, Hint: hint})
	s.rt.Health.SetReady(checkDestination, ok, message)
}

// run consumes until ctx ends or a person has to act. A change of the
// pipeline's incarnation ends one session and begins the next, at the offsets
// that were committed.
func (s *sink) run(ctx context.Context) error {
	retry := backoff.NewExponentialBackOff(backoff.WithMaxInterval(15*time.Second), backoff.WithMaxElapsedTime(0))
	for {
		s.rt.Health.SetPhase(ops.PhaseConnecting)
		began := time.Now()
		err := s.session(ctx)
		var changed *feldera.IncarnationChanged
		if !errors.As(err, &changed) || ctx.Err() != nil {
			return err
		}
		s.rt.Logger.ErrorContext(ctx, "the pipeline is another incarnation: uncommitted records are delivered again, committed ones may be lost",
			"was", changed.Was, "now", changed.Now)
		s.rt.Health.Set(checkState, ops.Check{
			Blocking: true,
			Message:  fmt.Sprintf("the pipeline restarted (incarnation %s, before %s): rows whose offsets were committed may be missing from it", changed.Now, changed.Was),
			Hint:     "compare the tables with the topics; if rows are missing, reset the group's offsets to where they begin, then restart kafkasink to clear this",
		})
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
	schema, err := s.pipeline.Await(ctx)
	if err != nil {
		return err
	}
	routes, err := s.routes(schema)
	if err != nil {
		return err
	}
	s.destination(true, "the pipeline has every table", "")

	completions := s.pipeline.NewCompletions(feldera.CompletionsOptions{})
	cfg, err := s.consumerConfig(routes, watcher{completions, s}, s.pipeline.Expected())
	if err != nil {
		return err
	}
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
	owned.Go(func() { s.show(polling, consumer) })
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

// routes finds the table of every topic.
func (s *sink) routes(schema *feldera.Schema) ([]partition.Route, error) {
	destinations := make(map[string]partition.Destination)
	var routes []partition.Route
	for _, topic := range s.c.Topics {
		table, err := schema.Table(topic.Table)
		if err != nil {
			return nil, err
		}
		to := destinations[table.Spelling()]
		if to == nil {
			to = partition.ForTable(s.pipeline.Writer(table), table, s.policy)
			destinations[table.Spelling()] = to
		}
		rows := decode.NewJSONRows(table.Relation())
		rows.RefuseUnknown = s.c.ExtraFields == config.Stop
		routes = append(routes, partition.Route{Topic: topic.Topic, Table: table.Spelling(), Destination: to, Decoder: rows})
	}
	return routes, nil
}

func (s *sink) consumerConfig(routes []partition.Route, watcher partition.Watcher, incarnation string) (partition.Config, error) {
	c := s.c
	cfg := partition.Config{
		Brokers: c.Brokers, Group: c.Group, ClientID: daemon, Version: ops.Version().Version,
		Routes: routes, Watcher: watcher, Incarnation: incarnation,
		Start: partition.StartPolicy(c.Start), OnGap: partition.GapPolicy(c.OnGap),
		Poison: partition.PoisonPolicy(c.Poison), Revoke: partition.RevokePolicy(c.Revoke),
		DrainTimeout: c.DrainTimeout, RebalanceTimeout: c.RebalanceTimeout, SessionTimeout: c.SessionTimeout,
		CommitInterval: c.CommitInterval, RequestLifetime: c.Feldera.RequestLifetime,
		BatchRows: c.BatchRows, BatchBytes: int(c.BatchBytes), BatchAge: c.BatchAge, InFlight: c.InFlight,
		LaneMemory: int64(c.LaneMemory), MemoryLimit: int64(c.MemoryLimit),
		StopNow: s.rt.StopNow, Logger: s.rt.Logger, Metrics: s.metrics,
	}
	if c.TLS {
		cfg.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
		if c.CAFile != "" {
			pem, err := os.ReadFile(c.CAFile)
			if err != nil {
				return cfg, ops.WithExitCode(ops.ExitConfig, fmt.Errorf("read KAFKASINK_CA_FILE: %w", err))
			}
			cfg.TLS.RootCAs = x509.NewCertPool()
			if !cfg.TLS.RootCAs.AppendCertsFromPEM(pem) {
				return cfg, ops.WithExitCode(ops.ExitConfig, errors.New("KAFKASINK_CA_FILE holds no certificate in PEM form"))
			}
		}
	}
	if c.SASLMechanism != "" {
		cfg.SASL = &partition.SASL{Mechanism: c.SASLMechanism, User: c.SASLUser, Password: c.SASLPassword.Value}
	}
	return cfg, nil
}

// show turns the consumer's state into health, once a second. It is also what
// feeds the watchdog: Snapshot takes every lock of the consumer, so a consumer
// that hangs with one held starves it.
func (s *sink) show(ctx context.Context, consumer *partition.Consumer) {
	every := time.NewTicker(time.Second)
	defer every.Stop()
	for {
		select {
		case <-every.C:
		case <-ctx.Done():
			return
		}
		st := consumer.Snapshot()
		s.rt.Health.Beat()
		s.showGroup(&st)
		s.showPartitions(&st)
		s.showCompletion(&st)
	}
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
	since := s.evidence
	s.mu.Unlock()
	if n > 0 && time.Since(since) > completionPatience {
		s.destination(false, fmt.Sprintf("%d arrays are accepted but not completed, without any completion since %s", n, since.UTC().Format(time.RFC3339)),
			"look in the pipeline's /stats for an open transaction, a stuck output or a paused state; no offset moves meanwhile")
	}
}

func (s *sink) showGroup(st *partition.Status) {
	c := ops.Check{OK: st.Joined && st.Current, Message: fmt.Sprintf("member of group %s with %d partitions", st.Group, st.Assigned)}
	switch {
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
	if len(blocked) == 0 {
		completing := ops.Check{OK: true, Message: "every partition goes on"}
		for i := range st.Partitions {
			if p := &st.Partitions[i]; p.Waits != "" {
				completing.Message = fmt.Sprintf("%s[%d] waits: %s", p.Topic, p.Partition, p.Waits)
			}
		}
		s.rt.Health.Set(checkPartitions, completing)
		return
	}
	c := ops.Check{Blocking: true, Message: fmt.Sprintf("%d stopped: %v", len(blocked), blocked[0])}
	var refused *decode.Refusal
	if errors.As(blocked[0], &refused) {
		c.Hint = refused.Do
	}
	s.rt.Health.Set(checkPartitions, c)
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

func (noDecoder) Decode(_, _ []byte, _ decode.Position) (*decode.OrderChange, error) {
	return nil, errOnlyLooking
}
