package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"holdfast/internal/config"
	"holdfast/internal/ops"
	"holdfast/internal/partition"
)

const (
	// newTopicsLook is the time between looks for topics that match a pattern,
	// noTopicsLook that while there are none, or they cannot be looked for.
	newTopicsLook = 30 * time.Second
	noTopicsLook  = 5 * time.Second
	// topicsTimeout bounds one look.
	topicsTimeout = 10 * time.Second

	lookTopics = "look for topics"
)

// errTopicsChanged ends a session: there are topics that it does not carry.
var errTopicsChanged = errors.New("there are new topics that match KAFKASINK_TOPICS")

// findTopics gives the topics of KAFKASINK_TOPICS by name. Where there are
// patterns it waits until a topic matches; it gives nil when ctx has ended.
func (s *sink) findTopics(ctx context.Context) config.TopicMappings {
	if !s.c.Topics.HasPatterns() {
		return s.c.Topics
	}
	var found config.TopicMappings
	err := s.askBrokers(ctx, lookTopics, func() (err error) {
		if found, err = matchTopics(ctx, s.c, s.rt); err == nil && len(found) == 0 {
			err = errors.New("no topic matches KAFKASINK_TOPICS")
		}
		return err
	})
	if err != nil {
		return nil
	}
	return found
}

// askBrokers does something that the brokers have to answer, again and again
// until it succeeds. The error is that of ctx, which has ended.
func (s *sink) askBrokers(ctx context.Context, what string, do func() error) error {
	for {
		err := do()
		if err == nil {
			s.repeats.Worked(ctx, what)
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		s.repeats.Failed(ctx, what, err)
		s.rt.Health.Beat()
		s.rt.Health.Set(checkGroup, ops.Check{Message: err.Error(), Hint: "it is looked for again until it works"})
		s.rt.Health.SetReady(checkGroup, false, err.Error())
		timer := time.NewTimer(noTopicsLook)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// admin makes one look at the brokers with a client of its own.
func admin(ctx context.Context, c *config.KafkaSink, rt ops.Runtime, look func(context.Context, *partition.Admin) error) error {
	cfg, err := connection(c)
	if err != nil {
		return err
	}
	cfg.Logger = rt.Logger
	a, err := partition.NewAdmin(ctx, cfg)
	if err != nil {
		return err
	}
	defer a.Close()
	ctx, cancel := context.WithTimeout(ctx, topicsTimeout)
	defer cancel()
	return look(ctx, a)
}

// matchTopics makes one look at the brokers.
func matchTopics(ctx context.Context, c *config.KafkaSink, rt ops.Runtime) (found config.TopicMappings, err error) {
	err = admin(ctx, c, rt, func(ctx context.Context, a *partition.Admin) error {
		names, err := a.Topics(ctx)
		if err == nil {
			found = c.Topics.Expand(names, c.DLQTopic)
		}
		return err
	})
	return found, err
}

// watchTopics looks for topics that match a pattern and are not carried. It
// gives errTopicsChanged when there are some, else nil when ctx has ended. A
// look that fails says nothing that the consumer does not say.
func (s *sink) watchTopics(ctx context.Context) error {
	if !s.c.Topics.HasPatterns() {
		return nil
	}
	every := time.NewTicker(newTopicsLook)
	defer every.Stop()
	for {
		select {
		case <-every.C:
		case <-ctx.Done():
			return nil
		}
		found, err := matchTopics(ctx, s.c, s.rt)
		if err != nil {
			continue
		}
		for _, t := range found {
			if !slices.Contains(s.topics, t) {
				s.rt.Logger.InfoContext(ctx, "a new topic matches a pattern: the consumer starts again with it", "topic", t.Topic, "table", t.Table)
				return errTopicsChanged
			}
		}
	}
}
