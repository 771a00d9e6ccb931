package partition

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v4"

	"holdfast/internal/feldera"
)

// Consumer is one member of the consumer group.
type Consumer struct {
	cfg     Config
	current atomic.Pointer[session]
	// restarts counts sessions that ended because the group had expelled the
	// member.
	restarts atomic.Int64
}

// New checks the configuration, all faults at once, and connects to nothing.
func New(cfg Config) (*Consumer, error) {
	if err := cfg.prepare(); err != nil {
		return nil, fmt.Errorf("configure consumer: %w", err)
	}
	if cfg.Metrics == nil {
		cfg.Metrics = newMetrics()
	}
	c := &Consumer{cfg: cfg}
	cfg.Metrics.consumer.Store(c)
	return c, nil
}

// errExpelled ends a session whose member the group no longer knows.
var errExpelled = errors.New("the consumer group no longer knows this member")

// Run consumes until ctx ends: then it stops polling, waits for the evidence
// of what was sent (up to DrainTimeout, or until StopNow), commits, leaves the
// group and returns nil. It returns an error when consumption cannot go on:
// a *feldera.IncarnationChanged, after which the caller makes a new Consumer
// that starts at the committed offsets, or a broken invariant. Nothing is
// committed on the way out then. It ends so, too, when the cause of ctx's end
// is a *feldera.IncarnationChanged.
//
// Partitions that cannot go on do not end Run: see Snapshot.
//
// When the group expels the member, Run kills every lane, takes a new client
// and joins anew, so that every position is read again from the group. The
// client library would otherwise keep fetching from where it was: in a
// cooperative group, a member that is expelled and gets the same partition
// back sees no change of its assignment, although another member may have
// moved the position in between.
func (c *Consumer) Run(ctx context.Context) error {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval, wait.MaxElapsedTime = 200*time.Millisecond, 15*time.Second, 0
	for {
		began := time.Now()
		s := newSession(&c.cfg)
		c.current.Store(s)
		err := s.run(ctx)
		if errors.Is(err, errExpelled) && ctx.Err() != nil {
			// It was told to stop anyway; what was not committed is read again.
			c.cfg.Logger.WarnContext(ctx, "expelled from the consumer group while stopping: nothing more is committed",
				slog.String("group", c.cfg.Group), slog.Any("err", err))
			return nil //nolint:nilerr // a stop that was asked for is no failure
		}
		if !errors.Is(err, errExpelled) {
			var changed *feldera.IncarnationChanged
			if err != nil && !errors.As(err, &changed) {
				return fmt.Errorf("consume as group %q: %w", c.cfg.Group, err)
			}
			return err
		}
		c.restarts.Add(1)
		if time.Since(began) > time.Minute {
			wait.Reset()
		}
		pause := wait.NextBackOff()
		c.cfg.Logger.WarnContext(ctx, "expelled from the consumer group; joining anew from the committed offsets",
			slog.String("group", c.cfg.Group), slog.Int64("attempt", c.restarts.Load()), slog.Duration("wait", pause), slog.Any("err", err))
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
	}
}
