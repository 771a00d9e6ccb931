package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/config"
	"holdfast/internal/partition"
	"holdfast/test/harness"
)

// recordKafka reads the topics from their beginning to where they end now. It
// joins no group and commits nothing.
func recordKafka(ctx context.Context, s *settings, m *manifest) error {
	env := s.env.of("KAFKASINK_")
	if !env.has("FELDERA_URL") {
		env = env.with(map[string]string{"FELDERA_URL": "http://127.0.0.1:1", "FELDERA_PIPELINE": "replay"}) // it is not asked
	}
	c, err := config.LoadKafkaSink(env.list())
	if err != nil {
		return err //nolint:wrapcheck // names the settings
	}
	opts := []kgo.Opt{kgo.SeedBrokers(c.Brokers...), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.FetchMaxWait(200 * time.Millisecond)}
	if c.SASLMechanism != "" {
		return errors.New("KAFKASINK_SASL_MECHANISM is set, and replay cannot log in: record over a listener without a login")
	}
	if c.TLS {
		tls, err := partition.TLSConfig(partition.TLSFiles{CA: c.CAFile, Cert: c.ClientCertFile, Key: c.ClientKeyFile, ServerName: c.ServerName})
		if err != nil {
			return err //nolint:wrapcheck // names the setting
		}
		opts = append(opts, kgo.DialTLSConfig(tls))
	}
	var topics []string
	for _, t := range c.Topics {
		if t.Topic == "" {
			return errors.New("KAFKASINK_TOPICS has a pattern: name the topics to record")
		}
		topics = append(topics, t.Topic)
	}
	look, err := kgo.NewClient(opts...)
	if err != nil {
		return fmt.Errorf("connect to the brokers: %w", err)
	}
	starts, ends, err := bounds(ctx, look, topics)
	look.Close()
	if err != nil {
		return err
	}
	part := &kafkaPart{Topics: map[string]int32{}}
	from, left := map[string]map[int32]kgo.Offset{}, map[string]map[int32]int64{}
	pending := 0
	ends.Each(func(o kadm.ListedOffset) {
		part.Topics[o.Topic]++
		start, _ := starts.Lookup(o.Topic, o.Partition)
		if o.Offset <= start.Offset {
			return
		}
		if from[o.Topic] == nil {
			from[o.Topic], left[o.Topic] = map[int32]kgo.Offset{}, map[int32]int64{}
		}
		from[o.Topic][o.Partition], left[o.Topic][o.Partition] = kgo.NewOffset().AtStart(), o.Offset
		pending++
	})
	w, err := newTapeWriter(s.dir, recordsFile, s.limit)
	if err != nil {
		return err
	}
	defer w.abandon() // again, where it is finished: no harm
	// Control records, and offsets that compaction has left out, are no records
	// but count as read.
	reader, err := kgo.NewClient(append(opts, kgo.ConsumePartitions(from), kgo.KeepControlRecords())...)
	if err != nil {
		return fmt.Errorf("connect to the brokers: %w", err)
	}
	defer reader.Close()
	for pending > 0 {
		fetches := reader.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("read the topics: %w", err)
		}
		for it := fetches.RecordIter(); !it.Done(); {
			r := it.Next()
			end, open := left[r.Topic][r.Partition]
			if !open || r.Offset >= end {
				continue
			}
			if !r.Attrs.IsControl() {
				if err := writeRecord(w, r); errors.Is(err, errFull) {
					s.say("the limit of %d MiB is reached: the rest of the topics is left out", s.limit>>20)
					m.Kafka = part
					return w.finish(m)
				} else if err != nil {
					return err
				}
				part.Records++
			}
			if r.Offset+1 >= end {
				delete(left[r.Topic], r.Partition)
				pending--
			}
		}
	}
	if part.Records == 0 {
		return errors.New("the topics have no record")
	}
	m.Kafka = part
	s.say("recorded %d records of %d topics; no offset was committed", part.Records, len(part.Topics))
	return w.finish(m)
}

func bounds(ctx context.Context, client *kgo.Client, topics []string) (starts, ends kadm.ListedOffsets, err error) {
	admin := kadm.NewClient(client)
	if starts, err = admin.ListStartOffsets(ctx, topics...); err == nil {
		err = starts.Error()
	}
	if err == nil {
		if ends, err = admin.ListCommittedOffsets(ctx, topics...); err == nil {
			err = ends.Error()
		}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("look where the topics end: %w", err)
	}
	return starts, ends, nil
}

func writeRecord(w *tapeWriter, r *kgo.Record) error {
	out := tapeRecord{Topic: r.Topic, Partition: r.Partition, Offset: r.Offset, Time: r.Timestamp.UnixMilli(), Key: r.Key, Value: r.Value}
	for _, h := range r.Headers {
		out.Headers = append(out.Headers, header{h.Key, h.Value})
	}
	line, err := jsonLine(out)
	if err != nil {
		return err
	}
	return w.write(line)
}

// playKafka fills an in-process broker with the recorded records, in their
// order, and lets kafkasink read them as a group of their own. Offsets begin at 0
// there and have no gaps.
func playKafka(ctx context.Context, s *settings, m *manifest, destination environment, time int) error {
	broker, err := harness.StartFakeKafka(harness.FakeKafkaOptions{Topics: m.Kafka.Topics})
	if err != nil {
		return err
	}
	defer broker.Close()
	want := map[string]map[int32]int64{}
	var batch []*kgo.Record
	flush := func() error {
		err := broker.Produce(ctx, batch...)
		batch = batch[:0]
		return err
	}
	err = readLines(s.dir, m, recordsFile, func(r tapeRecord) error {
		if want[r.Topic] == nil {
			want[r.Topic] = map[int32]int64{}
		}
		want[r.Topic][r.Partition]++
		batch = append(batch, r.kafka())
		if len(batch) < 1000 {
			return nil
		}
		return flush()
	})
	if err == nil && len(batch) > 0 {
		err = flush()
	}
	if err != nil {
		return err
	}
	program, err := harness.Build(ctx, "./cmd/kafkasink", harness.BuildOptions{})
	if err != nil {
		return err
	}
	group := fmt.Sprintf("replay-%d", time)
	env := s.env.with(destination).of("KAFKASINK_").with(map[string]string{
		"KAFKASINK_BROKERS": broker.Seeds[0], "KAFKASINK_GROUP": group, "KAFKASINK_TLS": "", "KAFKASINK_CA_FILE": "",
		"KAFKASINK_CLIENT_CERT_FILE": "", "KAFKASINK_CLIENT_KEY_FILE": "", "KAFKASINK_SERVER_NAME": "",
		"KAFKASINK_LISTEN": "", "KAFKASINK_START": "earliest", "KAFKASINK_ON_REFUSAL": "exit", "KAFKASINK_INSTANCE_ID": "",
	})
	d, err := harness.StartDaemon(harness.DaemonOptions{Program: program, Env: env, ListenVar: "KAFKASINK_LISTEN"})
	if err != nil {
		return err
	}
	defer d.Close()
	return finish(ctx, d, "kafkasink", func() error {
		return harness.Eventually(ctx, "kafkasink to commit every record", func(ctx context.Context) (any, bool) {
			if code, ended := d.ExitCode(); ended {
				return fmt.Sprintf("it ended with code %d", code), false
			}
			got, err := broker.CommittedOffsets(ctx, group)
			if err != nil {
				return err, false
			}
			for topic, partitions := range want {
				for p, offset := range partitions {
					if got[topic][p] < offset {
						return fmt.Sprintf("%s[%d] is at %d of %d", topic, p, got[topic][p], offset), false
					}
				}
			}
			return nil, true
		})
	})
}

func (r *tapeRecord) kafka() *kgo.Record {
	out := &kgo.Record{Topic: r.Topic, Partition: r.Partition, Key: r.Key, Value: r.Value, Timestamp: time.UnixMilli(r.Time)}
	for _, h := range r.Headers {
		out.Headers = append(out.Headers, kgo.RecordHeader{Key: h.Key, Value: h.Value})
	}
	return out
}
