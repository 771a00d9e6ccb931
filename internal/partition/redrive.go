package partition

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/decode"
)

// headerRedrives counts how often a record was put back into its topic.
const headerRedrives = "__holdfast.redrive.count"

// redriveGroup is added to the group's name for the offsets of redrive.
const redriveGroup = "-redrive"

// redriveIdle ends a read of the dead-letter topic to which nothing comes,
// although its log says that there is more.
const redriveIdle = 30 * time.Second

// DeadLetter is one record of the dead-letter topic.
type DeadLetter struct {
	Partition int32          `json:"partition"`
	Offset    int64          `json:"offset"`
	Time      time.Time      `json:"time"`
	Topic     string         `json:"source_topic"`
	Source    string         `json:"source"` // topic[partition]@offset
	Class     string         `json:"class"`
	Stage     string         `json:"stage"`
	Message   string         `json:"message"`
	Redrives  int            `json:"redrives"`
	Key       []byte         `json:"key"`   // null where there is none
	Value     []byte         `json:"value"` // null for a tombstone
	Headers   []LetterHeader `json:"headers"`

	record *kgo.Record
	at     int32 // the source's partition, -1 if unknown
}

// LetterHeader is one header of a dead letter.
type LetterHeader struct {
	Key   string `json:"key"`
	Value []byte `json:"value"`
}

func deadLetter(r *kgo.Record) DeadLetter {
	d := DeadLetter{Partition: r.Partition, Offset: r.Offset, Time: r.Timestamp, Key: r.Key, Value: r.Value, record: r, at: -1}
	last := make(map[string][]byte, len(r.Headers))
	for _, h := range r.Headers {
		d.Headers = append(d.Headers, LetterHeader(h))
		last[h.Key] = h.Value
	}
	text := func(name string) string { return clipText(string(last[name]), maxLetterMessage) }
	d.Topic, d.Class, d.Stage, d.Message = text(headerTopic), text(headerClass), text(headerStage), text(headerMessage)
	d.Source = fmt.Sprintf("%s[%s]@%s", d.Topic, text(headerPartition), text(headerOffset))
	if n, err := strconv.ParseInt(text(headerPartition), 10, 32); err == nil && n >= 0 {
		d.at = int32(n)
	}
	if n, err := strconv.Atoi(text(headerRedrives)); err == nil {
		d.Redrives = n
	}
	return d
}

// again makes the record as it was, with one more redrive counted.
func (d *DeadLetter) again(partitions int32) *kgo.Record {
	r := &kgo.Record{Topic: d.Topic, Partition: d.at, Key: d.record.Key, Value: d.record.Value, Timestamp: d.record.Timestamp}
	if d.at >= partitions {
		r.Partition %= partitions
	}
	for _, h := range d.record.Headers {
		if !strings.HasPrefix(h.Key, headerErrors) && h.Key != headerRedrives {
			r.Headers = append(r.Headers, h)
		}
	}
	r.Headers = append(r.Headers, kgo.RecordHeader{Key: headerRedrives, Value: []byte(strconv.Itoa(d.Redrives + 1))})
	return r
}

// DeadLetters gives each dead letter to see, partition by partition and in
// order, up to the ends of the log as they are at the call. from says where to
// begin on each partition; a partition that is absent is read from its start.
// see returns false to end the reading.
func (a *Admin) DeadLetters(ctx context.Context, from map[int32]int64, see func(DeadLetter) bool) error {
	starts, ends, err := a.letterBounds(ctx)
	if err != nil {
		return err
	}
	at, left := make(map[int32]kgo.Offset), make(map[int32]int64)
	for n, end := range ends {
		start := max(starts[n], from[n])
		if start < end {
			at[n], left[n] = kgo.NewOffset().At(start), end
		}
	}
	if len(left) == 0 {
		return nil
	}
	opts, err := a.cfg.connection(ctx)
	if err != nil {
		return err
	}
	client, err := kgo.NewClient(append(opts,
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{a.cfg.DLQTopic: at}), kgo.ConsumeResetOffset(kgo.NoResetOffset()),
		kgo.FetchMaxWait(500*time.Millisecond), kgo.FetchMaxBytes(16<<20), kgo.MaxDecompressBatchBytes(maxBatchBytes), kgo.KeepControlRecords(),
	)...)
	if err != nil {
		return fmt.Errorf("make client: %w", err)
	}
	defer client.Close()
	for len(left) > 0 {
		polled, cancel := context.WithTimeout(ctx, redriveIdle)
		fetches := client.PollRecords(polled, 500)
		cancel()
		for _, e := range fetches.Errors() {
			if ctx.Err() == nil && errors.Is(e.Err, context.DeadlineExceeded) {
				return fmt.Errorf("read the dead-letter topic %s: nothing came for %v, although %d partitions are not read to their end", a.cfg.DLQTopic, redriveIdle, len(left))
			}
			return a.cfg.explain(fmt.Sprintf("read the dead-letter topic %s[%d]", a.cfg.DLQTopic, e.Partition), e.Err)
		}
		for it := fetches.RecordIter(); !it.Done(); {
			r := it.Next()
			end, ok := left[r.Partition]
			if ok && r.Offset >= end-1 { // the last one can be gone meanwhile
				delete(left, r.Partition)
			}
			if !ok || r.Offset >= end {
				continue
			}
			if !r.Attrs.IsControl() && !see(deadLetter(r)) {
				return nil
			}
		}
	}
	return nil
}

func (a *Admin) letterBounds(ctx context.Context) (starts, ends map[int32]int64, err error) {
	topics, err := a.admin.ListTopics(ctx, a.cfg.DLQTopic)
	if err != nil {
		return nil, nil, a.cfg.explain("look up the dead-letter topic", err)
	}
	if fault := topicFault(topics, a.cfg.DLQTopic); fault != nil {
		return nil, nil, fault
	}
	starts, ends = make(map[int32]int64), make(map[int32]int64)
	for i, list := range []func(context.Context, ...string) (kadm.ListedOffsets, error){a.admin.ListStartOffsets, a.admin.ListEndOffsets} {
		listed, err := list(ctx, a.cfg.DLQTopic)
		if err == nil {
			err = listed.Error()
		}
		if err != nil {
			return nil, nil, a.cfg.explain("list the bounds of the dead-letter topic", err)
		}
		into := []map[int32]int64{starts, ends}[i]
		listed.Each(func(o kadm.ListedOffset) { into[o.Partition] = o.Offset })
	}
	return starts, ends, nil
}

// Redriven tells what a redrive did, or would do.
type Redriven struct {
	// Redriven records are in their topics again.
	Redriven int `json:"redriven"`
	// Left were put back too often already, or name no topic of ours; they
	// stay in the dead-letter topic, and the next redrive passes them.
	Left int `json:"left"`
}

// Redrive puts dead letters back into the partition that they came from, from
// where the last redrive ended up to the end of the topic as it is at the
// call. It commits behind a record when the record is acknowledged by every
// replica in sync, so a redrive that was ended goes on where it was, and
// repeats at most the records of one step.
//
// Records that were put back most times already, or that are not of one of the
// topics, are left. see is told about each record and what becomes of it, ""
// meaning that it is redriven. With dry nothing is written or committed.
//
// Two redrives at once would repeat each other's records: one that finds that
// somebody else has committed since ends with a *decode.Refusal before it
// writes more. A commit that comes late moves the offset back, and what was put
// back since is put back once more; nothing is left out.
func (a *Admin) Redrive(ctx context.Context, topics []string, most int, dry bool, see func(d DeadLetter, left string)) (Redriven, error) {
	var out Redriven
	group := a.cfg.Group + redriveGroup
	done, err := a.redriveOffsets(ctx, group)
	if err != nil {
		return out, err
	}
	partitions := make(map[string]int32)
	found, err := a.admin.ListTopics(ctx, topics...)
	if err != nil {
		return out, a.cfg.explain("look up topics", err)
	}
	for _, name := range topics {
		if fault := topicFault(found, name); fault != nil {
			return out, fault
		}
		partitions[name] = int32(len(found[name].Partitions)) //nolint:gosec // a number of partitions
	}
	from := make(map[int32]int64, len(done))
	for n, o := range done {
		from[n] = o.at
	}
	step := &redriveStep{a: a, group: group, known: done, id: fmt.Sprintf("%016x", rand.Uint64())} //nolint:gosec // a name, not a secret
	if !dry {
		if err := step.open(ctx); err != nil {
			return out, err
		}
		defer step.close()
	}
	var failed error
	err = a.DeadLetters(ctx, from, func(d DeadLetter) bool {
		left := ""
		switch {
		case d.Redrives >= most:
			left = fmt.Sprintf("it was put back %d times already", d.Redrives)
		case !slices.Contains(topics, d.Topic):
			left = "its topic is none of KAFKASINK_TOPICS"
		case d.at < 0:
			left = "it does not say which partition it came from"
		}
		if left != "" {
			out.Left++
		} else {
			out.Redriven++
		}
		see(d, left)
		if dry {
			return true
		}
		var again *kgo.Record
		if left == "" {
			again = d.again(partitions[d.Topic])
		}
		failed = step.add(ctx, d, again)
		return failed == nil
	})
	if err = errors.Join(err, failed); err == nil && !dry {
		err = step.flush(ctx)
	}
	return out, err
}

// redriven is an offset of the redrive group, and who committed it.
type redriven struct {
	at int64
	by string
}

func (a *Admin) redriveOffsets(ctx context.Context, group string) (map[int32]redriven, error) {
	committed, err := a.fetchOffsets(ctx, group)
	if err != nil {
		return nil, err
	}
	out := make(map[int32]redriven)
	for n, o := range committed[a.cfg.DLQTopic] {
		if o.Err == nil && o.At >= 0 {
			out[n] = redriven{o.At, o.Metadata}
		}
	}
	return out, nil
}

// redriveStep writes records and commits behind them, some at a time.
type redriveStep struct {
	a      *Admin
	group  string
	client *kgo.Client
	known  map[int32]redriven // the offsets as they were last seen or committed
	id     string

	records []*kgo.Record
	offsets kadm.Offsets
	n       int
}

// redriveMost is how many dead letters are written between two commits, and so
// the most that are repeated after a redrive that was ended.
const redriveMost = 100

func (s *redriveStep) open(ctx context.Context) error {
	opts, err := s.a.cfg.connection(ctx)
	if err != nil {
		return err
	}
	s.client, err = kgo.NewClient(append(opts,
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.RequiredAcks(kgo.AllISRAcks()), kgo.ProducerBatchMaxBytes(maxLetterBatch),
	)...)
	if err != nil {
		return fmt.Errorf("make client: %w", err)
	}
	return nil
}

func (s *redriveStep) close() { s.client.Close() }

// add takes a dead letter, and the record to write for it, or nil.
func (s *redriveStep) add(ctx context.Context, d DeadLetter, again *kgo.Record) error {
	if again != nil {
		s.records = append(s.records, again)
	}
	s.offsets.Delete(s.a.cfg.DLQTopic, d.Partition)
	s.offsets.Add(kadm.Offset{Topic: s.a.cfg.DLQTopic, Partition: d.Partition, At: d.Offset + 1, LeaderEpoch: -1, Metadata: s.id})
	if s.n++; s.n < redriveMost {
		return nil
	}
	return s.flush(ctx)
}

func (s *redriveStep) flush(ctx context.Context) error {
	if s.n == 0 {
		return nil
	}
	now, err := s.a.redriveOffsets(ctx, s.group)
	if err != nil {
		return err
	}
	if !maps.Equal(now, s.known) {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "consumer group", Where: s.group, Why: "somebody else moved its offsets while dead letters were put back",
			Expected: "one redrive at a time", Do: "let the other one end, and ask again",
		}
	}
	if err := s.client.ProduceSync(ctx, s.records...).FirstErr(); err != nil {
		return s.a.cfg.explain("put dead letters back", err)
	}
	res, err := s.a.admin.CommitOffsets(ctx, s.group, s.offsets)
	if err == nil {
		err = res.Error()
	}
	if err != nil {
		return s.a.cfg.explain(fmt.Sprintf("commit the offsets of group %q, behind records that are in their topics already", s.group), err)
	}
	s.offsets.Each(func(o kadm.Offset) { s.known[o.Partition] = redriven{o.At, s.id} })
	s.records, s.offsets, s.n = nil, nil, 0
	return nil
}

// ShowDeadLetter gives the dead letter at a position.
func (a *Admin) ShowDeadLetter(ctx context.Context, partition int32, offset int64) (DeadLetter, error) {
	var out *DeadLetter
	starts, ends, err := a.letterBounds(ctx)
	if err != nil {
		return DeadLetter{}, err
	}
	from := make(map[int32]int64)
	for n, end := range ends {
		from[n] = end // no other partition is read
	}
	from[partition] = offset
	err = a.DeadLetters(ctx, from, func(d DeadLetter) bool {
		if d.Offset == offset {
			out = &d
		}
		return false
	})
	if err != nil {
		return DeadLetter{}, err
	}
	if out == nil {
		return DeadLetter{}, &decode.Refusal{
			Reason: decode.ReasonGap, What: "dead letter", Where: fmt.Sprintf("%s[%d]@%d", a.cfg.DLQTopic, partition, offset), Why: "there is none",
			Expected: fmt.Sprintf("an offset from %d to below %d", starts[partition], ends[partition]), Do: "ask dlq list for the ones there are",
		}
	}
	return *out, nil
}
