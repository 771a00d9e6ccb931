package harness

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Brokers is what the real and the in-process broker have in common: addresses,
// and what tests do to a broker from outside. Every call has a connection of its
// own, so that it sees the broker and not a client's memory of it.
type Brokers struct {
	// Seeds are the host:port of the brokers.
	Seeds []string
	// Options are put before those of every client, for TLS or SASL.
	Options []kgo.Opt
}

// Client makes a client; the caller closes it.
func (b *Brokers) Client(opts ...kgo.Opt) (*kgo.Client, error) {
	all := append([]kgo.Opt{kgo.SeedBrokers(b.Seeds...), kgo.ClientID("harness")}, b.Options...)
	client, err := kgo.NewClient(append(all, opts...)...)
	if err != nil {
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	return client, nil
}

func (b *Brokers) admin(fn func(*kadm.Client) error) error {
	client, err := b.Client()
	if err != nil {
		return err
	}
	defer client.Close()
	return fn(kadm.NewClient(client))
}

// CreateTopic makes a topic with one replica and the given topic settings (may
// be nil).
func (b *Brokers) CreateTopic(ctx context.Context, topic string, partitions int32, settings map[string]string) error {
	values := map[string]*string{}
	for name, value := range settings {
		values[name] = &value
	}
	return b.admin(func(adm *kadm.Client) error {
		res, err := adm.CreateTopic(ctx, partitions, 1, values, topic)
		if err := errors.Join(err, res.Err); err != nil {
			return fmt.Errorf("create topic %q: %w %s", topic, err, res.ErrMessage)
		}
		return nil
	})
}

// CreateTopicOn makes a topic of one partition on the brokers of the given
// numbers, the first of which leads it.
func (b *Brokers) CreateTopicOn(ctx context.Context, topic string, settings map[string]string, nodes ...int32) error {
	req := kmsg.NewPtrCreateTopicsRequest()
	req.TimeoutMillis = 20_000
	t := kmsg.NewCreateTopicsRequestTopic()
	t.Topic, t.NumPartitions, t.ReplicationFactor = topic, -1, -1
	t.ReplicaAssignment = []kmsg.CreateTopicsRequestTopicReplicaAssignment{{Partition: 0, Replicas: nodes}}
	for name, value := range settings {
		t.Configs = append(t.Configs, kmsg.CreateTopicsRequestTopicConfig{Name: name, Value: &value})
	}
	req.Topics = append(req.Topics, t)
	client, err := b.Client()
	if err != nil {
		return err
	}
	defer client.Close()
	res, err := req.RequestWith(ctx, client)
	if err == nil && len(res.Topics) == 1 {
		err = kerr.ErrorForCode(res.Topics[0].ErrorCode)
	}
	if err != nil {
		return fmt.Errorf("create topic %q on brokers %v: %w", topic, nodes, err)
	}
	return nil
}

// PartitionState gives the leader and the replicas in sync of a partition.
func (b *Brokers) PartitionState(ctx context.Context, topic string, partition int32) (leader int32, inSync []int32, err error) {
	err = b.admin(func(adm *kadm.Client) error {
		topics, err := adm.ListTopics(ctx, topic)
		if err != nil {
			return err
		}
		d := topics[topic].Partitions[partition]
		leader, inSync = d.Leader, d.ISR
		return topics[topic].Err
	})
	if err != nil {
		return 0, nil, fmt.Errorf("look up %s[%d]: %w", topic, partition, err)
	}
	return leader, inSync, nil
}

// DeleteTopic deletes a topic, and waits until a new one of that name can be
// made: the broker forgets it a moment after it has answered.
func (b *Brokers) DeleteTopic(ctx context.Context, topic string) error {
	return b.admin(func(adm *kadm.Client) error {
		res, err := adm.DeleteTopic(ctx, topic)
		if err := errors.Join(err, res.Err); err != nil {
			return fmt.Errorf("delete topic %q: %w", topic, err)
		}
		return Eventually(ctx, "the end of topic "+topic, func(ctx context.Context) (any, bool) {
			topics, err := adm.ListTopics(ctx, topic)
			if err != nil {
				return err, false
			}
			return topics[topic].Err, errors.Is(topics[topic].Err, kerr.UnknownTopicOrPartition)
		})
	})
}

// DeleteRecords makes the log of a partition start at offset, as retention does.
func (b *Brokers) DeleteRecords(ctx context.Context, topic string, partition int32, offset int64) error {
	return b.admin(func(adm *kadm.Client) error {
		var offsets kadm.Offsets
		offsets.AddOffset(topic, partition, offset, -1)
		res, err := adm.DeleteRecords(ctx, offsets)
		if err := errors.Join(err, res.Error()); err != nil {
			return fmt.Errorf("delete records of %s[%d] below %d: %w", topic, partition, offset, err)
		}
		return nil
	})
}

// Produce writes records, to the partition that each one names, and waits until
// all are written. The records carry their offsets then.
func (b *Brokers) Produce(ctx context.Context, records ...*kgo.Record) error {
	client, err := b.Client(kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		return err
	}
	defer client.Close()
	if err := client.ProduceSync(ctx, records...).FirstErr(); err != nil {
		return fmt.Errorf("produce %d records: %w", len(records), err)
	}
	return nil
}

// CommittedOffsets reads from the broker what a group has committed, by topic and
// partition: the outside view that tests compare with what the destination has.
// A partition without a commit is absent.
func (b *Brokers) CommittedOffsets(ctx context.Context, group string) (map[string]map[int32]int64, error) {
	committed := map[string]map[int32]int64{}
	err := b.admin(func(adm *kadm.Client) error {
		offsets, err := adm.FetchOffsets(ctx, group)
		if err != nil {
			return err
		}
		var bad error
		offsets.Each(func(o kadm.OffsetResponse) {
			bad = errors.Join(bad, o.Err)
			if o.Err != nil || o.At < 0 {
				return
			}
			if committed[o.Topic] == nil {
				committed[o.Topic] = map[int32]int64{}
			}
			committed[o.Topic][o.Partition] = o.At
		})
		return bad
	})
	if err != nil {
		return nil, fmt.Errorf("read committed offsets of group %q: %w", group, err)
	}
	return committed, nil
}

// CommitMetadata reads the note that stands beside a group's committed offset.
func (b *Brokers) CommitMetadata(ctx context.Context, group, topic string, partition int32) (string, error) {
	var note string
	err := b.admin(func(adm *kadm.Client) error {
		offsets, err := adm.FetchOffsets(ctx, group)
		if err != nil {
			return err
		}
		o, _ := offsets.Lookup(topic, partition)
		note = o.Metadata
		return o.Err
	})
	if err != nil {
		return "", fmt.Errorf("read commit metadata of group %q for %s[%d]: %w", group, topic, partition, err)
	}
	return note, nil
}

// EndOffsets gives the offset behind the last record of each partition.
func (b *Brokers) EndOffsets(ctx context.Context, topic string) (map[int32]int64, error) {
	ends := map[int32]int64{}
	err := b.admin(func(adm *kadm.Client) error {
		offsets, err := adm.ListEndOffsets(ctx, topic)
		if err := errors.Join(err, offsets.Error()); err != nil {
			return err
		}
		offsets.Each(func(o kadm.ListedOffset) { ends[o.Partition] = o.Offset })
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read end offsets of topic %q: %w", topic, err)
	}
	return ends, nil
}

// GroupType gives the protocol of a group as the broker names it: "classic" or
// "consumer".
func (b *Brokers) GroupType(ctx context.Context, group string) (string, error) {
	var typ string
	err := b.admin(func(adm *kadm.Client) error {
		groups, err := adm.ListGroups(ctx)
		typ = groups[group].GroupType
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read the type of group %q: %w", group, err)
	}
	return typ, nil
}

// Commit sets a group's offset and note, as an administrator's tool does.
func (b *Brokers) Commit(ctx context.Context, group, topic string, partition int32, offset int64, note string) error {
	return b.admin(func(adm *kadm.Client) error {
		var offsets kadm.Offsets
		offsets.Add(kadm.Offset{Topic: topic, Partition: partition, At: offset, LeaderEpoch: -1, Metadata: note})
		res, err := adm.CommitOffsets(ctx, group, offsets)
		if err := errors.Join(err, res.Error()); err != nil {
			return fmt.Errorf("commit offset %d of %s[%d] in group %q: %w", offset, topic, partition, group, err)
		}
		return nil
	})
}
