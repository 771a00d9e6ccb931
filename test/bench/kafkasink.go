package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/test/harness"
)

const (
	topic          = "orders"
	commitInterval = "100ms"
)

func measureKafkasink(ctx context.Context, o options, progress func(string, ...any)) (s series, err error) {
	s = series{
		Workload: fmt.Sprintf("Kafka: a backlog of %d JSON records of about 300 bytes in %d partitions, a real broker", o.records, partitions),
		Unit:     "records", Count: o.records,
		Notes: []string{
			"Each run reads the whole topic. The bare franz-go consumer belongs to no group, looks at no record and ends at the last offset; kafkasink",
			"joins a new group, and ends when the broker holds the last offset of every partition as committed (KAFKASINK_COMMIT_INTERVAL=" + commitInterval + ").",
			"Both times include the start of the process. paired: median of t(franz-go)/t(program).",
		},
	}
	program, err := harness.Build(ctx, "./cmd/kafkasink", harness.BuildOptions{})
	if err != nil {
		return s, err
	}
	self, err := os.Executable()
	if err != nil {
		return s, fmt.Errorf("find our own program: %w", err)
	}
	dir, err := os.MkdirTemp("", "hf-bench-")
	if err != nil {
		return s, fmt.Errorf("make a folder: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	feldera, err := startFeldera(ctx, dir)
	if err != nil {
		return s, err
	}
	defer feldera.proc.Close()
	kafka, err := harness.StartKafka(ctx, harness.KafkaOptions{})
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, kafka.Close()) }()
	if err := kafka.CreateTopic(ctx, topic, partitions, nil); err != nil {
		return s, err
	}
	own := []string{"-broker", kafka.Seeds[0], "-records", strconv.Itoa(o.records)}
	if _, err := runSelf(ctx, self, append([]string{"fill"}, own...)); err != nil {
		return s, err
	}
	ends, err := kafka.EndOffsets(ctx, topic)
	if err != nil {
		return s, err
	}
	client, err := kafka.Client()
	if err != nil {
		return s, err
	}
	defer client.Close()
	adm := kadm.NewClient(client)
	// The first commit of all makes the broker's topic of offsets, which takes
	// seconds and belongs to no run.
	var warm kadm.Offsets
	warm.AddOffset(topic, 0, 0, -1)
	err = harness.Eventually(ctx, "the broker to take commits", func(ctx context.Context) (any, bool) {
		err := adm.CommitAllOffsets(ctx, "bench-warm", warm)
		return err, err == nil
	})
	if err != nil {
		return s, err
	}
	progress("Kafka: %d records are in topic %s", o.records, topic)

	for round := range o.rounds {
		for _, run := range []func(context.Context) (result, error){
			func(ctx context.Context) (result, error) {
				r, err := runSelf(ctx, self, append([]string{"consume"}, own...))
				r.Program = "franz-go, bare"
				return r, err
			},
			func(ctx context.Context) (result, error) {
				group := "bench-" + strconv.Itoa(round)
				return feldera.subject(ctx, "kafkasink", program, []string{
					"KAFKASINK_BROKERS=" + kafka.Seeds[0], "KAFKASINK_TOPICS=" + topic + "=web_orders:json", "KAFKASINK_GROUP=" + group,
					"KAFKASINK_COMMIT_INTERVAL=" + commitInterval, "KAFKASINK_LISTEN=127.0.0.1:0",
				}, o.records, func(ctx context.Context) (bool, error) { return committed(ctx, adm, group, ends) })
			},
		} {
			bounded, cancel := context.WithTimeout(ctx, runTimeout)
			r, err := run(bounded)
			cancel()
			if err != nil {
				return s, err
			}
			r.Round = round + 1
			s.Runs = append(s.Runs, r)
			progress("round %d: %-14s %6.2f s", r.Round, r.Program, r.Seconds)
		}
	}
	return s, nil
}

// committed tells whether the broker holds every partition's end as committed.
func committed(ctx context.Context, adm *kadm.Client, group string, ends map[int32]int64) (bool, error) {
	offsets, err := adm.FetchOffsets(ctx, group)
	if err != nil {
		if kerr.IsRetriable(err) {
			return false, nil // a coordinator that still loads the group; the run is bounded
		}
		return false, err
	}
	for p, end := range ends {
		if o, ok := offsets.Lookup(topic, p); !ok || o.At < end {
			return false, nil
		}
	}
	return true, nil
}

// runSelf runs one of our own children to its end.
func runSelf(ctx context.Context, self string, args []string) (result, error) {
	c, err := startChild(args[0], self, args, nil)
	if err != nil {
		return result{}, err
	}
	took, err := c.until(ctx, nil)
	if err != nil {
		return result{}, err
	}
	used, err := c.used()
	return result{Seconds: took.Seconds(), usage: used}, err
}

// childFlags are the flags that "fill" and "consume" share.
func childFlags(name string, args []string) (broker string, records int, err error) {
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	fs.StringVar(&broker, "broker", "", "host:port")
	fs.IntVar(&records, "records", 0, "how many")
	return broker, records, fs.Parse(args)
}

// fillChild writes the records, in the order of their ids and round robin.
func fillChild(ctx context.Context, args []string, _ io.Writer) error {
	broker, records, err := childFlags("fill", args)
	if err != nil {
		return err
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(broker), kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.ProducerLinger(20*time.Millisecond))
	if err != nil {
		return fmt.Errorf("make Kafka client: %w", err)
	}
	defer client.Close()
	created := time.Date(2026, 1, 2, 3, 4, 5, 123456000, time.UTC)
	failed := make(chan error, 1)
	for id := range records {
		client.Produce(ctx, &kgo.Record{
			Topic: topic, Partition: int32(id % partitions), Key: strconv.AppendInt(nil, int64(id), 10), Value: orderJSON(id, created),
		}, func(_ *kgo.Record, err error) {
			if err != nil {
				select {
				case failed <- err: // the first one says it
				default:
				}
			}
		})
	}
	err = client.Flush(ctx)
	select {
	case first := <-failed:
		err = errors.Join(first, err)
	default:
	}
	if err != nil {
		return fmt.Errorf("produce %d records: %w", records, err)
	}
	return nil
}

func orderJSON(id int, created time.Time) []byte {
	b := make([]byte, 0, 320)
	b = fmt.Appendf(b, `{"id":%d,"customer":%d,"status":"shipped","amount":%d.%02d,"currency":"EUR","note":"%s","paid":%t,`,
		id, id%5000, id%1000, id%100, "order to be left with the neighbours, who are at home until seven in the evening; ring twice, the bell is hard to hear"+strings.Repeat(" ", id%8), id%2 == 0)
	return fmt.Appendf(b, `"created":"%s","updated":"2026-02-03 04:05:06.654321"}`, created.Add(time.Duration(id)*time.Second).Format("2006-01-02 15:04:05.000000"))
}

// consumeChild is the reference: it reads the topic to its end and looks at
// nothing.
func consumeChild(ctx context.Context, args []string, out io.Writer) error {
	broker, records, err := childFlags("consume", args)
	if err != nil {
		return err
	}
	from := map[int32]kgo.Offset{}
	for p := range int32(partitions) {
		from[p] = kgo.NewOffset().AtStart()
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(broker), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: from}))
	if err != nil {
		return fmt.Errorf("make Kafka client: %w", err)
	}
	defer client.Close()
	n := 0
	for n < records {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("read topic %s: %w", topic, err)
		}
		n += fetches.NumRecords()
	}
	_, err = fmt.Fprintf(out, "%d records\n", n)
	return err
}
