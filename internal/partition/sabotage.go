package partition

import (
	"context"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/partition/lane"
)

// This file is what wrong builds do that takes more than a line. Nothing of it
// is called, or is in the binary, but in a build with the tag sabotage.

// late is how much too late they do it.
const late = 4 * time.Second

// commitLater commits an offset of a partition that was given up.
func (s *session) commitLater(ctx context.Context, h *held, offset int64) {
	time.AfterFunc(late, func() {
		ctx, cancel := context.WithTimeout(ctx, commitTimeout)
		defer cancel()
		member, generation := s.client.GroupMetadata()
		req := kmsg.NewPtrOffsetCommitRequest()
		req.Group, req.MemberID, req.Generation = s.cfg.Group, member, generation
		topic := kmsg.NewOffsetCommitRequestTopic()
		topic.Topic, topic.TopicID = h.topic, h.lane.TopicID()
		p := kmsg.NewOffsetCommitRequestTopicPartition()
		p.Partition, p.Offset = h.partition, offset
		topic.Partitions = append(topic.Partitions, p)
		req.Topics = append(req.Topics, topic)
		_, _ = req.RequestWith(ctx, s.client)
	})
}

// keepNote has a lane take its first commit for done, which would replace the
// note of the owner before.
func keepNote(l *lane.Lane, now time.Time) {
	if c, first := l.ToCommit(false, now); first {
		_ = l.Committed(c)
	}
}

// writeLetterLater lets the lane go on and writes the letter afterwards.
func (t *sender) writeLetterLater(h *held, r *lane.Record, why *decode.Refusal, at stage) {
	letter := t.s.cfg.letter(h.place, r, why, at)
	t.mu.Lock()
	h.stall.cancel()
	h.stall = nil
	if h.letters == nil {
		h.letters = make(map[int64]bool)
	}
	h.letters[r.Offset] = true
	t.mu.Unlock()
	t.poke()
	time.AfterFunc(late, func() {
		crash.Here(crash.KafkaBeforeDLQ)
		t.s.letters.write(t.s.life, letter, func(error) {})
	})
}
