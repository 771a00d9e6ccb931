package partition

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/decode"
)

// Preflight is one look at the cluster before anything is consumed. An error
// that is a *decode.Refusal says that the cluster was reached and is not as
// needed, with what mends it; any other that it could not be reached.
type Preflight struct {
	Name string
	Run  func(ctx context.Context) error
}

// Preflights gives the checks for a configuration. Each connects by itself,
// joins no group and changes nothing.
func Preflights(cfg Config) []Preflight {
	with := func(look func(context.Context, *Config, *kadm.Client) error) func(context.Context) error {
		return func(ctx context.Context) error {
			if err := cfg.prepare(); err != nil {
				return fmt.Errorf("configure consumer: %w", err)
			}
			opts, err := cfg.connection(ctx)
			if err != nil {
				return fmt.Errorf("configure client: %w", err)
			}
			dialed := &membership{cfg: &cfg}
			client, err := kgo.NewClient(append(opts, kgo.WithHooks(dialed))...)
			if err != nil {
				return fmt.Errorf("make client: %w", err)
			}
			defer client.Close()
			err = look(ctx, &cfg, kadm.NewClient(client))
			// A look that ends by its time says nothing; the last dial says why.
			if why := dialed.dialErr(); err != nil && why != nil && !errors.As(err, new(*decode.Refusal)) {
				return cfg.explain("reach the brokers "+strings.Join(cfg.Brokers, ","), why)
			}
			return err
		}
	}
	return []Preflight{
		{"kafka brokers", with(checkBrokers)},
		{"kafka topics", with(checkTopics)},
		{"kafka group", with(checkGroup)},
		{"kafka dead letters", with(checkDeadLetters)},
	}
}

// checkDeadLetters looks for the dead-letter topic. Whether it may be written
// is only known by writing.
func checkDeadLetters(ctx context.Context, cfg *Config, admin *kadm.Client) error {
	if cfg.DLQTopic == "" {
		return nil
	}
	topics, err := admin.ListTopics(ctx, cfg.DLQTopic)
	if err != nil {
		return cfg.explain("look up the dead-letter topic", err)
	}
	return topicFault(topics, cfg.DLQTopic)
}

func checkBrokers(ctx context.Context, cfg *Config, admin *kadm.Client) error {
	found, err := admin.BrokerMetadata(ctx)
	switch {
	case err != nil:
		return cfg.explain("reach the brokers", err)
	case len(found.Brokers) == 0:
		return fmt.Errorf("reach the brokers: %s named no brokers", strings.Join(cfg.Brokers, ","))
	}
	// Each by the address that it gives, which may be another than ours.
	versions, err := admin.ApiVersions(ctx)
	if err != nil {
		return cfg.explain("reach each broker", err)
	}
	for _, b := range versions {
		if b.Err != nil {
			at := found.Brokers[slices.IndexFunc(found.Brokers, func(d kadm.BrokerDetail) bool { return d.NodeID == b.NodeID })]
			return cfg.explain("reach each broker", cfg.explainDial(at, b.Err))
		}
	}
	return nil
}

func checkTopics(ctx context.Context, cfg *Config, admin *kadm.Client) error {
	topics, err := admin.ListTopics(ctx, cfg.topics()...)
	switch {
	case errors.Is(err, kerr.TopicAuthorizationFailed): // of one of them; which one is not said
		return topicDenied(strings.Join(cfg.topics(), ", "), err)
	case err != nil:
		return cfg.explain("look up topics", err)
	}
	var faults []error
	for _, name := range cfg.topics() {
		if fault := topicFault(topics, name); fault != nil {
			faults = append(faults, fault)
		}
	}
	if len(faults) > 0 {
		return errors.Join(faults...)
	}
	// Listing a log's end takes the right to read, or at least to describe.
	ends, err := admin.ListEndOffsets(ctx, cfg.topics()...)
	if err != nil {
		return cfg.explain("list the logs' ends", err)
	}
	if err := ends.Error(); err != nil {
		return fmt.Errorf("list the logs' ends: %w", err)
	}
	return nil
}

func checkGroup(ctx context.Context, cfg *Config, admin *kadm.Client) error {
	denied := func(err error) error {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "consumer group", Where: cfg.Group, Why: "this user may not use it",
			Do: fmt.Sprintf("grant it (kafka-acls --add --allow-principal User:… --operation Read --operation Describe --group %s)", cfg.Group), Err: err,
		}
	}
	described, err := admin.DescribeGroups(ctx, cfg.Group)
	if err == nil {
		err = described[cfg.Group].Err
	}
	switch {
	case errors.Is(err, kerr.GroupAuthorizationFailed):
		return denied(err)
	case errors.Is(err, kerr.GroupIDNotFound): // it is made by the first member
	case err != nil:
		return cfg.explain(fmt.Sprintf("describe group %q", cfg.Group), err)
	}
	g := described[cfg.Group]
	if g.ProtocolType != "" && g.ProtocolType != "consumer" {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "consumer group", Where: cfg.Group,
			Why: fmt.Sprintf("it is used by clients of type %q", g.ProtocolType), Expected: "a group of consumers", Do: "set KAFKASINK_GROUP to another group",
		}
	}
	if g.State == "Stable" && g.Protocol != "" && g.Protocol != "cooperative-sticky" {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "consumer group", Where: cfg.Group,
			Why:      fmt.Sprintf("its members balance by %q, and a member that balances otherwise is not let in", g.Protocol),
			Expected: "a group of this program's own, which balances by cooperative-sticky", Do: "set KAFKASINK_GROUP to another group, or stop the other members",
		}
	}
	if _, err := admin.FetchOffsets(ctx, cfg.Group); errors.Is(err, kerr.GroupAuthorizationFailed) {
		return denied(err)
	} else if err != nil && !errors.Is(err, kerr.GroupIDNotFound) {
		return cfg.explain(fmt.Sprintf("look up the offsets of group %q", cfg.Group), err)
	}
	return nil
}
