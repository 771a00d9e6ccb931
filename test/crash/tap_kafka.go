package main

import (
	"encoding/binary"
	"fmt"
	"maps"
	"sync"

	"github.com/twmb/franz-go/pkg/kmsg"

	"holdfast/test/harness"
)

// kafkaTap listens to what kafkasink says to the broker and checks every
// commit of an offset at the moment it is sent.
type kafkaTap struct {
	// topics names those that are watched by their ids; set before there is a
	// connection.
	topics map[[16]byte]string
	oracle *counterOracle

	mu sync.Mutex
	// committed is the highest offset that was heard of each partition, has the
	// one that the broker has confirmed last.
	committed, has map[lane]int64
	commits        int
	moves          int // offsets that were above the one committed before
	samples        int
	early          []string
	back           []string
	refused        int // commits that would have gone back, and that the broker refused
	// backwards: the pipeline lost rows, so offsets may go back to be read again;
	// healed counts those that did.
	backwards bool
	healed    int
	// held is the answer that is held, or is to be; nil for none.
	held *heldAnswer
}

// heldAnswer is an answer to a commit that a member does not get yet.
type heldAnswer struct {
	before int           // answers that pass first
	here   chan struct{} // closed when it has come
	letGo  chan struct{} // closed when it may pass
}

func newKafkaTap(o *counterOracle) *kafkaTap {
	return &kafkaTap{topics: make(map[[16]byte]string), oracle: o, committed: make(map[lane]int64), has: make(map[lane]int64)}
}

// lane is a partition of one of the topics that are watched.
type lane struct {
	topic     string
	partition int32
}

func (l lane) String() string { return fmt.Sprintf("partition %d of %s", l.partition, l.topic) }

// sent is a commit whose answer is awaited.
type sent struct {
	version int16
	offsets map[lane]int64
	// lower names the partitions whose offset is below what the group had.
	lower map[lane]string
}

// connection makes the ears of one connection. What is committed is judged when
// it is sent, and counts as what the group has when it is answered: a commit
// can be lost on its way.
//
// Whether an offset goes back is for the broker to say. A member stands still
// with a commit in its hands; the group gives its partitions to another one,
// which commits further; the first wakes up and sends what it held. It cannot
// know better, and the broker refuses the generation. Only a lower offset that
// is accepted is a fault; one that has no answer shows in what the broker has.
func (t *kafkaTap) connection() [2]func([]byte) {
	var mu sync.Mutex // the two ears listen at the same time
	open := map[uint32]sent{}
	var ears [2]func([]byte)
	ears[harness.Up] = frames(func(b []byte) {
		if len(b) < 10 || binary.BigEndian.Uint16(b) != 8 {
			return
		}
		s := t.request(b)
		mu.Lock()
		defer mu.Unlock()
		open[binary.BigEndian.Uint32(b[4:])] = s
	})
	ears[harness.Down] = frames(func(b []byte) {
		if len(b) < 4 {
			return
		}
		id := binary.BigEndian.Uint32(b)
		mu.Lock()
		s, ours := open[id]
		delete(open, id)
		mu.Unlock()
		if ours && t.answer(b[4:], s) {
			t.pass()
		}
	})
	return ears
}

// frames cuts one direction of a connection into messages.
func frames(message func([]byte)) func([]byte) {
	var buf []byte
	return func(b []byte) {
		buf = append(buf, b...)
		for len(buf) >= 4 {
			size := int(binary.BigEndian.Uint32(buf))
			if len(buf) < 4+size {
				return
			}
			message(buf[4 : 4+size])
			buf = append(buf[:0], buf[4+size:]...)
		}
	}
}

// request takes one commit: API key, version, correlation id, client id, and in
// flexible versions tags; then the body.
func (t *kafkaTap) request(b []byte) sent {
	req := kmsg.NewPtrOffsetCommitRequest()
	req.SetVersion(int16(binary.BigEndian.Uint16(b[2:])))
	out := sent{req.GetVersion(), map[lane]int64{}, map[lane]string{}}
	client := int(int16(binary.BigEndian.Uint16(b[8:])))
	body := b[10+max(client, 0):]
	if req.IsFlexible() {
		body = body[1:] // no tags are ever sent here
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := req.ReadFrom(body); err != nil {
		t.early = append(t.early, fmt.Sprintf("a commit that cannot be read: %v", err))
		return out
	}
	for _, it := range req.Topics {
		topic, ours := t.watched(it.Topic, it.TopicID)
		if !ours {
			continue
		}
		for _, p := range it.Partitions {
			t.commits++
			l := lane{topic, p.Partition}
			out.offsets[l] = p.Offset
			if lower := t.judge(l, p.Offset); lower != "" {
				out.lower[l] = lower
			}
		}
	}
	return out
}

// watched gives the name of a topic, if it is one of those that are watched.
// Newer versions of the protocol name it by its id.
func (t *kafkaTap) watched(name string, id [16]byte) (topic string, ours bool) {
	if name == "" {
		name = t.topics[id]
	}
	return name, name == counters || name == events
}

// judge holds an offset that is about to be committed against the evidence, and
// says where it is below what the group has.
func (t *kafkaTap) judge(p lane, offset int64) (lower string) {
	if what := t.oracle.missing(p, offset); what != "" {
		t.early = append(t.early, fmt.Sprintf("offset %d of %s committed, and %s", offset, p, what))
	}
	switch has := t.has[p]; {
	case offset >= has:
	case t.backwards:
		t.healed++
	default:
		lower = fmt.Sprintf("%s: offset %d after %d", p, offset, has)
	}
	if offset > t.committed[p] {
		t.moves++
	}
	t.committed[p] = max(t.committed[p], offset)
	if t.backwards {
		t.committed[p] = offset
	}
	return lower
}

// hold holds the n-th answer by which the broker takes offsets: the broker has
// them, and the member does not know.
func (t *kafkaTap) hold(n int) (there func() bool, letGo func()) {
	h := &heldAnswer{before: n - 1, here: make(chan struct{}), letGo: make(chan struct{})}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.held = h
	there = func() bool {
		select {
		case <-h.here:
			return true
		default:
			return false
		}
	}
	return there, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.held == h {
			t.held = nil
		}
		close(h.letGo)
	}
}

// pass lets an answer pass, at once or when it is let go.
func (t *kafkaTap) pass() {
	t.mu.Lock()
	h := t.held
	if h == nil || h.before > 0 {
		if h != nil {
			h.before--
		}
		t.mu.Unlock()
		return
	}
	t.held = nil
	t.mu.Unlock()
	close(h.here)
	<-h.letGo
}

// answer takes the answer to a commit, and tells whether the broker has taken
// offsets.
func (t *kafkaTap) answer(b []byte, s sent) (taken bool) {
	resp := kmsg.NewPtrOffsetCommitResponse()
	resp.SetVersion(s.version)
	if resp.IsFlexible() && len(b) > 0 {
		b = b[1:] // the tags of the head
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := resp.ReadFrom(b); err != nil {
		t.early = append(t.early, fmt.Sprintf("the answer to a commit that cannot be read: %v", err))
		return false
	}
	for _, it := range resp.Topics {
		topic, _ := t.watched(it.Topic, it.TopicID)
		for _, p := range it.Partitions {
			l := lane{topic, p.Partition}
			offset, ours := s.offsets[l]
			lower := s.lower[l]
			switch {
			case !ours:
			case p.ErrorCode == 0:
				t.has[l], taken = offset, true
				t.oracle.told(l, offset)
				if lower != "" {
					t.back = append(t.back, lower)
				}
			case lower != "":
				t.refused++
			}
		}
	}
	return taken
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

// confirmed tells what the broker has confirmed by now; nil where that may go back.
func (t *kafkaTap) confirmed() map[lane]int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.backwards {
		return nil
	}
	return maps.Clone(t.has)
}

// sampled takes the group's offsets as the broker has them, and what it had
// confirmed before it was asked.
func (t *kafkaTap) sampled(at map[string]map[int32]int64, confirmed map[lane]int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.samples++
	for p, offset := range confirmed {
		if has := at[p.topic][p.partition]; has < offset && !t.backwards {
			t.back = append(t.back, fmt.Sprintf("%s: the broker has %d after it had confirmed %d", p, has, offset))
		}
	}
	for topic := range at {
		for n, offset := range at[topic] {
			p := lane{topic, n}
			if offset > t.committed[p] && !t.backwards {
				t.early = append(t.early, fmt.Sprintf("the broker has offset %d of %s, and the members were heard to say %d", offset, p, t.committed[p]))
			}
		}
	}
}

// mayGoBack allows offsets to go back, or not any more.
func (t *kafkaTap) mayGoBack(may bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.backwards = may
}

func (t *kafkaTap) faults() (early, back []string, healed, refused int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	early, back, healed, refused = t.early, t.back, t.healed, t.refused
	t.early, t.back, t.healed, t.refused = nil, nil, 0, 0
	return early, back, healed, refused
}
