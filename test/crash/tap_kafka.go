package main

import (
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/twmb/franz-go/pkg/kmsg"

	"holdfast/test/harness"
)

// kafkaTap listens to what kafkasink says to the broker and checks every
// commit of an offset at the moment it is sent.
type kafkaTap struct {
	topic  string
	oracle *counterOracle

	mu        sync.Mutex
	committed map[int32]int64
	commits   int
	moves     int // offsets that were above the one committed before
	samples   int
	early     []string
	back      []string
}

func newKafkaTap(topic string, o *counterOracle) *kafkaTap {
	return &kafkaTap{topic: topic, oracle: o, committed: make(map[int32]int64)}
}

// connection makes the ears of one connection. Answers are of no interest: a
// commit counts when it is sent.
func (t *kafkaTap) connection() [2]func([]byte) {
	var buf []byte
	var ears [2]func([]byte)
	ears[harness.Up] = func(b []byte) {
		buf = append(buf, b...)
		for len(buf) >= 4 {
			size := int(binary.BigEndian.Uint32(buf))
			if len(buf) < 4+size {
				return
			}
			t.request(buf[4 : 4+size])
			buf = append(buf[:0], buf[4+size:]...)
		}
	}
	return ears
}

// request takes one request: API key, version, correlation id, client id, and
// in flexible versions tags; then the body.
func (t *kafkaTap) request(b []byte) {
	if len(b) < 10 || binary.BigEndian.Uint16(b) != 8 {
		return
	}
	req := kmsg.NewPtrOffsetCommitRequest()
	req.SetVersion(int16(binary.BigEndian.Uint16(b[2:])))
	client := int(int16(binary.BigEndian.Uint16(b[8:])))
	body := b[10+max(client, 0):]
	if req.IsFlexible() {
		body = body[1:] // no tags are ever sent here
	}
	if err := req.ReadFrom(body); err != nil {
		t.mu.Lock()
		t.early = append(t.early, fmt.Sprintf("a commit that cannot be read: %v", err))
		t.mu.Unlock()
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, topic := range req.Topics {
		// Newer versions name the topic by its id; the group has but this one.
		if topic.Topic != t.topic && topic.Topic != "" {
			continue
		}
		for _, p := range topic.Partitions {
			t.commits++
			if what := t.oracle.missing(p.Partition, p.Offset); what != "" {
				t.early = append(t.early, fmt.Sprintf("offset %d of partition %d committed, and %s", p.Offset, p.Partition, what))
			}
			if before := t.committed[p.Partition]; p.Offset < before {
				t.back = append(t.back, fmt.Sprintf("partition %d: offset %d after %d", p.Partition, p.Offset, before))
			}
			if p.Offset > t.committed[p.Partition] {
				t.moves++
			}
			t.committed[p.Partition] = max(t.committed[p.Partition], p.Offset)
			t.oracle.told(p.Partition, p.Offset)
		}
	}
}

func (t *kafkaTap) wrong() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.early)+len(t.back) > 0
}

// moved counts the offsets that were above the one committed before.
func (t *kafkaTap) moved() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.moves
}

// sampled takes the group's offsets as the broker has them.
func (t *kafkaTap) sampled(at map[int32]int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.samples++
	for p, offset := range at {
		if offset > t.committed[p] {
			t.early = append(t.early, fmt.Sprintf("the broker has offset %d of partition %d, and the members were heard to say %d", offset, p, t.committed[p]))
		}
	}
}

func (t *kafkaTap) faults() (early, back []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	early, back = t.early, t.back
	t.early, t.back = nil, nil
	return early, back
}
