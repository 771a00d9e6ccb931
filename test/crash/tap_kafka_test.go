package main

import (
	"encoding/binary"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"holdfast/test/harness"
)

// wire is one connection to a broker as the tap hears it.
type wire struct {
	ears [2]func([]byte)
	id   uint32
}

// say sends one commit of an offset of the counters and gives the id by which it
// is answered.
func (w *wire) say(offset int64) uint32 { return w.sayOf(counters, offset) }

func (w *wire) sayOf(topic string, offset int64) uint32 {
	req := kmsg.NewPtrOffsetCommitRequest()
	req.SetVersion(8)
	req.Group, req.Generation, req.MemberID = group, 1, "one"
	p := kmsg.NewOffsetCommitRequestTopicPartition()
	p.Offset = offset
	t := kmsg.NewOffsetCommitRequestTopic()
	t.Topic, t.Partitions = topic, append(t.Partitions, p)
	req.Topics = append(req.Topics, t)
	w.id++
	w.ears[harness.Up](kmsg.NewRequestFormatter().AppendRequest(nil, req, int32(w.id)))
	return w.id
}

func (w *wire) answer(id uint32, code int16) {
	resp := kmsg.NewPtrOffsetCommitResponse()
	resp.SetVersion(8)
	p := kmsg.NewOffsetCommitResponseTopicPartition()
	p.ErrorCode = code
	t := kmsg.NewOffsetCommitResponseTopic()
	t.Topic, t.Partitions = counters, append(t.Partitions, p)
	resp.Topics = append(resp.Topics, t)
	body := append([]byte{0}, resp.AppendTo(nil)...) // no tags
	b := binary.BigEndian.AppendUint32(nil, uint32(4+len(body)))
	b = binary.BigEndian.AppendUint32(b, id)
	w.ears[harness.Down](append(b, body...))
}

// TestKafkaTapGoingBack holds the rule that a lower offset is a fault where the
// broker takes it, and none where it refuses it, as it must for a member that
// stood still with a commit in its hands while another took its partitions.
func TestKafkaTapGoingBack(t *testing.T) {
	start := func() (*kafkaTap, *wire) {
		tap := newKafkaTap(newCounterOracle(false))
		w := &wire{ears: tap.connection()}
		w.answer(w.say(100), 0)
		return tap, w
	}
	for name, c := range map[string]struct {
		happens       func(*kafkaTap, *wire)
		back, refused int
	}{
		"further":  {func(_ *kafkaTap, w *wire) { w.answer(w.say(101), 0) }, 0, 0},
		"accepted": {func(_ *kafkaTap, w *wire) { w.answer(w.say(99), 0) }, 1, 0},
		"refused":  {func(_ *kafkaTap, w *wire) { w.answer(w.say(99), kerr.UnknownMemberID.Code) }, 0, 1},
		"accepted from another connection": {func(tap *kafkaTap, _ *wire) {
			w := &wire{ears: tap.connection()}
			w.answer(w.say(99), 0)
		}, 1, 0},
		"no answer, and the broker took it": {func(tap *kafkaTap, w *wire) {
			w.say(99)
			tap.sampled(map[string]map[int32]int64{counters: {0: 99}}, tap.confirmed())
		}, 1, 0},
		"no answer, and the broker did not take it": {func(tap *kafkaTap, w *wire) {
			w.say(99)
			tap.sampled(map[string]map[int32]int64{counters: {0: 100}}, tap.confirmed())
		}, 0, 0},
		"the broker has none any more": {func(tap *kafkaTap, _ *wire) {
			tap.sampled(nil, tap.confirmed())
		}, 1, 0},
		"allowed, behind a pipeline that lost rows": {func(tap *kafkaTap, w *wire) {
			tap.mayGoBack(true)
			w.answer(w.say(99), 0)
			tap.sampled(map[string]map[int32]int64{counters: {0: 99}}, tap.confirmed())
		}, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			tap, w := start()
			c.happens(tap, w)
			early, back, _, refused := tap.faults()
			if len(early) != 0 || len(back) != c.back || refused != c.refused {
				t.Errorf("early %v, back %v (want %d), refused %d (want %d)", early, back, c.back, refused, c.refused)
			}
		})
	}
}

// TestKafkaTapHolds holds that the answer by which the broker takes offsets is
// held, and no other.
func TestKafkaTapHolds(t *testing.T) {
	tap := newKafkaTap(newCounterOracle(false))
	w := &wire{ears: tap.connection()}
	there, letGo := tap.hold(2)
	w.answer(w.say(100), 0)
	w.answer(w.say(101), kerr.RebalanceInProgress.Code)
	if there() {
		t.Fatal("held too early")
	}
	here := tap.held.here
	id, passed := w.say(101), make(chan struct{})
	go func() {
		defer close(passed)
		w.answer(id, 0)
	}()
	<-here
	if !there() || tap.confirmed()[lane{counters, 0}] != 101 {
		t.Errorf("held %v, the broker has %v", there(), tap.confirmed())
	}
	letGo()
	<-passed
	w.answer(w.say(102), 0)
}

// TestKafkaTapEvents holds that offsets of the topic without keys need their
// rows in a completed state too, and a progress row where there are any.
func TestKafkaTapEvents(t *testing.T) {
	first := lane{events, 0}
	for name, c := range map[string]struct {
		progress bool
		there    bool
		recorded int64
		early    int
	}{
		"not there":           {early: 1},
		"there":               {there: true},
		"there, not recorded": {progress: true, there: true, recorded: 4, early: 1},
		"recorded, not there": {progress: true, recorded: 5, early: 1},
		"there and recorded":  {progress: true, there: true, recorded: 5},
	} {
		t.Run(name, func(t *testing.T) {
			o := newCounterOracle(c.progress)
			o.produced[first] = []counted{{offset: 4, n: 7}}
			o.there[7], o.recorded[first] = c.there, c.recorded
			tap := newKafkaTap(o)
			w := &wire{ears: tap.connection()}
			w.answer(w.sayOf(events, 5), 0)
			if early, back, _, _ := tap.faults(); len(early) != c.early || len(back) != 0 {
				t.Errorf("early %v, back %v", early, back)
			}
		})
	}
}
