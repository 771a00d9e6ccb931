package partition

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/decode"
	"holdfast/internal/partition/lane"
)

// The headers of a dead letter. The first eight have the names that Kafka
// Connect gives them, so that tools for its dead letters read ours.
const (
	headerErrors    = "__connect.errors."
	headerTopic     = headerErrors + "topic"
	headerPartition = headerErrors + "partition"
	headerOffset    = headerErrors + "offset"
	headerConnector = headerErrors + "connector.name" // the consumer group
	headerTask      = headerErrors + "task.id"        // the process
	headerStage     = headerErrors + "stage"
	headerClass     = headerErrors + "exception.class.name" // a reason of the closed set
	headerMessage   = headerErrors + "exception.message"
)

const (
	// letterTimeout bounds one attempt to write a dead letter.
	letterTimeout = 30 * time.Second
	// maxLetterBatch is far above what brokers are set to take.
	maxLetterBatch = 64 << 20
	// maxLetterMessage bounds the text of the reason.
	maxLetterMessage = 2 << 10
)

// deadLetters writes to the dead-letter topic. It has a client of its own: the
// consumer's is replaced when the group expels the member.
type deadLetters struct{ client *kgo.Client }

// newDeadLetters connects to nothing yet.
func newDeadLetters(ctx context.Context, cfg *Config) (*deadLetters, error) {
	opts, err := cfg.connection(ctx)
	if err != nil {
		return nil, err
	}
	client, err := kgo.NewClient(append(opts,
		kgo.DefaultProduceTopic(cfg.DLQTopic),
		// The offset moves behind a dead letter, so it must be as durable as
		// the topic can make it, and written once per attempt.
		kgo.RequiredAcks(kgo.AllISRAcks()),
		// The largest that a broker can be told to take: what was consumed
		// must not be too large for the client.
		kgo.ProducerBatchMaxBytes(maxLetterBatch),
		kgo.AllowIdempotentProduceCancellation(),
	)...)
	if err != nil {
		return nil, fmt.Errorf("make client for the dead-letter topic: %w", err)
	}
	return &deadLetters{client: client}, nil
}

// write has done called once, when every replica in sync has the record or the
// attempt failed. Until then ctx can give it up.
func (d *deadLetters) write(ctx context.Context, r *kgo.Record, done func(error)) {
	d.client.Produce(ctx, r, func(_ *kgo.Record, err error) { done(err) })
}

// close gives up what is on its way.
func (d *deadLetters) close() {
	if d != nil {
		d.client.Close()
	}
}

// letter makes the dead letter of a record: its bytes, headers and time as
// they were, and why it is here. Reasons of an earlier time give way to the
// new ones.
func (c *Config) letter(at place, r *lane.Record, why *decode.Refusal, where stage) *kgo.Record {
	out := &kgo.Record{Key: r.Key, Value: r.Value, Timestamp: r.Time}
	for _, h := range r.Headers {
		if !strings.HasPrefix(h.Key, headerErrors) {
			out.Headers = append(out.Headers, kgo.RecordHeader{Key: h.Key, Value: h.Value})
		}
	}
	for _, h := range [][2]string{
		{headerTopic, at.topic},
		{headerPartition, strconv.Itoa(int(at.partition))},
		{headerOffset, strconv.FormatInt(r.Offset, 10)},
		{headerConnector, c.Group},
		{headerTask, c.ClientID},
		{headerStage, string(where)},
		{headerClass, string(why.Reason)},
		{headerMessage, clipText(why.Error(), maxLetterMessage)},
	} {
		out.Headers = append(out.Headers, kgo.RecordHeader{Key: h[0], Value: []byte(h[1])})
	}
	return out
}

// clipText bounds a text and keeps it valid UTF-8.
func clipText(text string, limit int) string {
	if len(text) > limit {
		text = text[:limit]
		for len(text) > 0 && !utf8.ValidString(text) {
			text = text[:len(text)-1]
		}
		text += "…"
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
