package partition

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

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
		kgo.Balancers(kgo.CooperativeStickyBalancer()),
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
		kgo.MaxDecompressBatchBytes(128<<20),
		kgo.WithHooks(s.member),
	), nil
}

// mechanism makes the client's SASL mechanism.
func (s *SASL) mechanism() (sasl.Mechanism, error) {
	if s.User == "" || s.Password == nil {
		return nil, errors.New("SASL needs a user and a password")
	}
	ask := func() (string, error) {
		pass, err := s.Password()
		if err != nil {
			return "", fmt.Errorf("read SASL password: %w", err)
		}
		return pass, nil
	}
	scramAuth := func(context.Context) (scram.Auth, error) {
		pass, err := ask()
		return scram.Auth{User: s.User, Pass: pass}, err
	}
	switch strings.ToLower(s.Mechanism) {
	case "plain":
		return plain.Plain(func(context.Context) (plain.Auth, error) {
			pass, err := ask()
			return plain.Auth{User: s.User, Pass: pass}, err
		}), nil
	case "scram-sha-256":
		return scram.Sha256(scramAuth), nil
	case "scram-sha-512":
		return scram.Sha512(scramAuth), nil
	}
	return nil, fmt.Errorf("SASL mechanism %q is not plain, scram-sha-256 or scram-sha-512", s.Mechanism)
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

// explain names the operation that failed and, for a connection that was cut
// or never made, says so first: the client library's own message asks whether
// SASL is missing, which sends people after the wrong thing when a broker is
// merely restarting.
func (c *Config) explain(doing string, err error) error {
	var early *kgo.ErrFirstReadEOF
	var network net.Error
	switch {
	case errors.As(err, &early), errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%s: a broker of %s closed the connection, as one does that restarts, or that expects TLS or SASL; the client library says: %w", doing, strings.Join(c.Brokers, ","), err)
	case errors.As(err, &network):
		return fmt.Errorf("%s: no answer from a broker of %s: %w", doing, strings.Join(c.Brokers, ","), err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}
