package partition

import (
	"context"
	"log/slog"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// maxBatchBytes is what one batch of records may decompress to.
const maxBatchBytes = 128 << 20

// connection gives the options that any client to the brokers needs.
func (c *Config) connection(ctx context.Context) ([]kgo.Opt, error) {
	opts := []kgo.Opt{
		kgo.SeedBrokers(c.Brokers...),
		kgo.ClientID(c.ClientID),
		kgo.SoftwareNameAndVersion("holdfast-kafkasink", clientVersion(c.Version)),
		kgo.MetadataMaxAge(30 * time.Second),
		kgo.BrokerMaxReadBytes(100 << 20),
		kgo.WithLogger(driverLog{ctx: ctx, log: c.Logger}),
	}
	if c.TLS != nil {
		opts = append(opts, kgo.DialTLSConfig(c.TLS))
	}
	if c.SASL != nil {
		m, err := c.SASL.mechanism()
		if err != nil {
			return nil, err
		}
		opts = append(opts, kgo.SASL(m))
	}
	return append(opts, c.Options...), nil
}

// consumerOptions gives the options of the group member. Each is there for a
// trap: see the comments.
func (s *session) consumerOptions(ctx context.Context) ([]kgo.Opt, error) {
	opts, err := s.cfg.connection(ctx)
	if err != nil {
		return nil, err
	}
	if s.cfg.InstanceID != "" {
		opts = append(opts, kgo.InstanceID(s.cfg.InstanceID))
	}
	balancers := kgo.Balancers(kgo.CooperativeStickyBalancer())
	if s.cfg.ServerSide {
		// The client takes the brokers' assignment only beside one of its
		// eager balancers, whose name it sends as the assignor to use.
		opts, balancers = append(opts, kgo.ServerSideBalancer()), kgo.Balancers(kgo.StickyBalancer())
	}
	return append(opts,
		kgo.ConsumerGroup(s.cfg.Group),
		kgo.ConsumeTopics(s.cfg.topics()...),
		kgo.DisableAutoCommit(),
		// Polls and the callbacks below exclude each other, so no record of a
		// partition is handed over after its revocation.
		kgo.BlockRebalanceOnPoll(),
		kgo.OnPartitionsAssigned(s.onAssigned),
		kgo.OnPartitionsRevoked(s.onRevoked),
		kgo.OnPartitionsLost(s.onLost),
		kgo.OnOffsetsFetched(s.onOffsetsFetched),
		kgo.AdjustFetchOffsetsFn(s.placeLanes),
		balancers,
		kgo.SessionTimeout(s.cfg.SessionTimeout),
		kgo.HeartbeatInterval(s.cfg.HeartbeatInterval),
		kgo.RebalanceTimeout(s.cfg.RebalanceTimeout),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		// Control records carry no row, but the position behind the last of
		// them must be committed, or the lag of an idle topic never gets to 0.
		kgo.KeepControlRecords(),
		// Start and reset are both explicit: each is copied from the other
		// otherwise. placeLanes replaces the start; a position outside the log
		// is an error, never a silent jump.
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()),
		kgo.ConsumeResetOffset(kgo.NoResetOffset()),
		// A resumed partition waits for the fetch in flight to end.
		kgo.FetchMaxWait(500*time.Millisecond),
		kgo.FetchMaxBytes(16<<20),
		kgo.FetchMaxPartitionBytes(int32(max(min(s.cfg.LaneMemory/4, 1<<20), 1<<10))),
		kgo.MaxDecompressBatchBytes(maxBatchBytes),
		kgo.WithHooks(s.member),
	), nil
}

// driverLog hands the client library's log to ours, one level lower: what it
// calls information is detail here, and what it calls an error it is retrying.
type driverLog struct {
	ctx context.Context //nolint:containedctx // the library's logger interface has no context
	log *slog.Logger
}

func (d driverLog) Level() kgo.LogLevel {
	switch {
	case d.log.Enabled(d.ctx, slog.LevelDebug):
		return kgo.LogLevelInfo
	case d.log.Enabled(d.ctx, slog.LevelWarn):
		return kgo.LogLevelWarn
	}
	return kgo.LogLevelError
}

func (d driverLog) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	l := slog.LevelDebug
	switch level {
	case kgo.LogLevelError:
		l = slog.LevelWarn
	case kgo.LogLevelWarn:
		l = slog.LevelInfo
	case kgo.LogLevelInfo, kgo.LogLevelDebug, kgo.LogLevelNone:
	}
	d.log.Log(d.ctx, l, "kafka client", slog.String("detail", msg), slog.Group("client", keyvals...))
}
