package partition

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/partition/lane"
	"holdfast/internal/sabotage"
)

// stage is where a record failed, by the names that Kafka Connect writes into
// the header __connect.errors.stage. It is a closed set.
type stage string

const (
	stageDecode stage = "VALUE_CONVERTER" // its bytes, or the row they give
	stagePut    stage = "TASK_PUT"        // the pipeline refused the row
)

// verdictOn is what became of a record that cannot be delivered as it is.
type verdictOn uint8

const (
	passOver verdictOn = iota // by policy: the position may move behind it
	waitFor                   // nothing later is sent before it is settled
	stopAt                    // a person has to act
)

// stall is why a lane stands in front of a record for a while: the dead-letter
// topic has not answered yet, or something that the decoder needs is away. It
// is under sender.mu.
type stall struct {
	offset int64
	// err is nil while nothing has gone wrong yet: the first dead letter is on
	// its way.
	err     error
	what    holdCause
	attempt int
	until   time.Time // when it is tried again
	pending bool      // an answer is awaited, and wakes the sender
	cancel  context.CancelFunc
}

// holdCause is what a stalled lane waits for; a metric label.
type holdCause string

const (
	holdDecoder    holdCause = "decoder"     // what the decoder needs, such as a schema registry
	holdDeadLetter holdCause = "dead_letter" // the dead-letter topic
)

var holdCauses = []holdCause{holdDecoder, holdDeadLetter}

// stalled tells whether a lane must not be built from now, and for how long at
// most.
func (t *sender) stalled(h *held, now time.Time) (wait time.Duration, is bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case h.stall == nil:
		return 0, false
	case h.stall.pending:
		return untilPoked, true
	case h.stall.until.After(now):
		return h.stall.until.Sub(now), true
	}
	return 0, false
}

// moved ends the stall of a lane that got past it.
func (t *sender) moved(h *held, offset int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h.stall != nil && !h.stall.pending && h.stall.offset <= offset {
		h.stall = nil
	}
}

// setAside decides about a record for which err stands. It belongs to run's
// goroutine.
//
// An error that is no refusal says nothing about the record: something is away
// for now, so the lane waits and tries again. So does a refusal for how things
// are set up, such as a registry that does not let this user in: it is true of
// every record, and skipping them all would be loss.
func (t *sender) setAside(ctx context.Context, b *batch, h *held, r *lane.Record, err error, now time.Time) (verdictOn, error) {
	pos := decode.Position{Topic: h.topic, Partition: h.partition, Offset: r.Offset}
	var poison *decode.Refusal
	if !errors.As(err, &poison) || poison.Reason == decode.ReasonSetup {
		t.waitForDecoder(ctx, h, pos, err, now)
		return waitFor, nil
	}
	k := skip{place: h.place, offset: r.Offset, why: poison}
	switch t.s.cfg.Poison {
	case PoisonSkip:
	case PoisonDLQ:
		t.mu.Lock()
		k.deadLettered = h.letters[r.Offset]
		t.mu.Unlock()
		if k.deadLettered { // the breaker was asked before it was written
			b.skips = append(b.skips, k)
			return passOver, nil
		}
	case PoisonStop:
		return stopAt, t.stops(pos, err)
	}
	if t.s.breaker.tripped(h.topic, b.setAsideOf(h.topic), now) {
		return stopAt, t.tooMany(pos, err, poison)
	}
	if t.s.cfg.Poison == PoisonDLQ {
		at := stageDecode
		if poison.Reason == decode.ReasonRejected {
			at = stagePut
		}
		t.writeLetter(ctx, h, r, poison, at)
		return waitFor, nil
	}
	b.skips = append(b.skips, k)
	return passOver, nil
}

// setAsideOf counts the records of a topic in the batch that will be passed
// over.
func (b *batch) setAsideOf(topic string) int {
	n := 0
	for i := range b.skips {
		if b.skips[i].topic == topic {
			n++
		}
	}
	return n
}

// tooMany is the refusal of a record that would be one too many to set aside.
func (t *sender) tooMany(pos decode.Position, err error, poison *decode.Refusal) error {
	return &decode.Refusal{
		Reason: poison.Reason, What: "record", Where: fmt.Sprintf("%s for table %q", pos, t.name),
		Why: fmt.Sprintf("it cannot be delivered, and %d records of topic %s were set aside within %v: that many point to a fault of producer, schema or mapping, not of single records",
			t.s.cfg.PoisonLimit, pos.Topic, t.s.cfg.PoisonWindow),
		Expected: "at most KAFKASINK_POISON_LIMIT of them within KAFKASINK_POISON_WINDOW",
		Do:       "look at the reason below; mend it and restart, or raise KAFKASINK_POISON_LIMIT", Err: err,
	}
}

func (t *sender) waitForDecoder(ctx context.Context, h *held, pos decode.Position, err error, now time.Time) {
	t.mu.Lock()
	attempt := 1
	if h.stall != nil && h.stall.offset == pos.Offset && h.stall.what == holdDecoder {
		attempt = h.stall.attempt + 1
	}
	why := fmt.Errorf("record %s for table %q: %w", pos, t.name, err)
	st := &stall{offset: pos.Offset, err: why, what: holdDecoder, attempt: attempt, until: now.Add(retryWait(attempt))}
	h.stall = st
	t.mu.Unlock()
	var pending *decode.PendingError
	if errors.As(err, &pending) {
		t.wakeWhen(ctx, h, pending.Ready)
		if pending.Why == nil {
			return // it is on its way
		}
	}
	t.sayHeld(h, why, attempt)
}

// wakeWhen has the lane looked at again as soon as what its decoder waits for
// is there, before the stall has run out by its time.
func (t *sender) wakeWhen(ctx context.Context, h *held, ready <-chan struct{}) {
	t.mu.Lock()
	known := h.awaits == ready
	h.awaits = ready
	t.mu.Unlock()
	if known {
		return // by an earlier stall of the lane
	}
	t.wakers.Go(func() {
		select {
		case <-ready:
		case <-ctx.Done():
			return
		}
		t.mu.Lock()
		if h.stall != nil && h.stall.what == holdDecoder {
			h.stall.until = time.Time{}
		}
		t.mu.Unlock()
		t.poke()
	})
}

func (t *sender) sayHeld(h *held, why error, attempt int) {
	if missed, ok := t.s.limiter.ok("held", 10*time.Second, time.Now()); ok {
		t.s.log.WarnContext(t.s.life, "partition held; it is tried again, and its offset does not move meanwhile",
			slog.String("topic", h.topic), slog.Int64("partition", int64(h.partition)), slog.Int("attempt", attempt),
			slog.Int("more_since_last_line", missed), slog.Any("err", why))
	}
}

// writeLetter sends the record to the dead-letter topic. Its answer comes on
// the client's goroutine; until it is there, and says that every replica in
// sync has the record, the lane stands in front of it.
func (t *sender) writeLetter(ctx context.Context, h *held, r *lane.Record, why *decode.Refusal, at stage) {
	ctx, cancel := context.WithTimeout(ctx, letterTimeout)
	offset := r.Offset
	t.mu.Lock()
	if !h.lane.Sending() { // it was given up: leave has come and gone, or will find nothing to cancel
		t.mu.Unlock()
		cancel()
		return
	}
	st := &stall{offset: offset, what: holdDeadLetter, attempt: 1, pending: true, cancel: cancel}
	if old := h.stall; old != nil && old.offset == offset && old.what == holdDeadLetter {
		st.attempt, st.err = old.attempt+1, old.err
	}
	h.stall = st
	t.mu.Unlock()
	if sabotage.On(sabotage.LetterLater) {
		t.writeLetterLater(h, r, why, at)
		return
	}
	crash.Here(crash.KafkaBeforeDLQ)
	t.s.letters.write(ctx, t.s.cfg.letter(h.place, r, why, at), func(err error) {
		cancel()
		t.mu.Lock()
		if h.stall != st { // the lane was given up
			t.mu.Unlock()
			return
		}
		if err == nil {
			h.stall = nil
			crash.Here(crash.KafkaAfterDLQ)
			if h.letters == nil {
				h.letters = make(map[int64]bool)
			}
			h.letters[offset] = true
		} else {
			st.err = t.s.cfg.explain(fmt.Sprintf("write record %s@%d to the dead-letter topic %s", h.place, offset, t.s.cfg.DLQTopic), err)
			st.pending, st.until = false, time.Now().Add(retryWait(st.attempt))
		}
		t.mu.Unlock()
		if err != nil {
			t.s.cfg.Metrics.letterFailures.Inc()
			t.sayHeld(h, st.err, st.attempt)
		}
		t.poke()
	})
}

// stops gives the reason for which a record stops its partition, with its
// position and with all there is to do about it.
func (t *sender) stops(pos decode.Position, err error) error {
	if poison, ok := err.(*decode.Refusal); ok { //nolint:errorlint // one inside another error is not ours to amend
		const aside = "set KAFKASINK_POISON=dlq to keep such records in a topic of their own, or skip to leave them out, counted"
		amended := *poison
		if amended.Do != "" {
			amended.Do += "; or " + aside
		} else {
			amended.Do = aside
		}
		err = &amended
		if strings.Contains(amended.Where, pos.String()) { // said already
			if strings.Contains(amended.Where, "table ") {
				return err
			}
			return fmt.Errorf("table %q: %w", t.name, err)
		}
	}
	return fmt.Errorf("record %s for table %q: %w", pos, t.name, err)
}

// share is how much of a lane's queue, from its front, an array is built of.
type share struct {
	h       *held
	records int
}

// isolate has the array of a refused batch built again in halves, in order,
// until the refused record stands alone: then the policy decides about it, and
// the others go on. It is the same as halving the array, but that each half is
// an array of its own to every lane: what stops, is given up, or has no
// outcome stays true to its part.
//
// A record that stands alone is sent once more before it is believed to be
// bad: what another member left of a request that was cut stands in front of
// the next body at the same table, and makes a good row be refused.
func (t *sender) isolate(b *batch, why *decode.Refusal) {
	var shares []share
	total := 0
	for _, p := range b.parts {
		shares = append(shares, share{p.h, p.rg.Records})
		total += p.rg.Records
	}
	if total > 1 {
		first, second := halve(shares, total/2)
		t.halves = append(t.halves, second, first)
		return
	}
	t.halves = append(t.halves, shares)
	at, h := b.parts[0].rg.From, b.parts[0].h
	if t.suspect != (suspect{h, at}) {
		t.suspect = suspect{h, at}
		return
	}
	t.suspect = suspect{}
	amended := *why
	amended.Where = fmt.Sprintf("%s, record %s", why.Where, decode.Position{Topic: h.topic, Partition: h.partition, Offset: at})
	if h.condemned == nil {
		h.condemned = make(map[int64]*decode.Refusal)
	}
	h.condemned[at] = &amended
}

// suspect is the record that was refused when it stood alone.
type suspect struct {
	h      *held
	offset int64
}

// halve parts shares behind the first n records.
func halve(shares []share, n int) (first, second []share) {
	for i, sh := range shares {
		if n >= sh.records {
			n -= sh.records
			first = append(first, sh)
			continue
		}
		if n > 0 {
			first = append(first, share{sh.h, n})
			sh.records -= n
		}
		second = append(append(second, sh), shares[i+1:]...)
		break
	}
	return first, second
}

// passed forgets what was remembered about records that the lane is past.
func (t *sender) passed(b *batch) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range b.parts {
		for o := range p.h.letters {
			if o < p.rg.Next {
				delete(p.h.letters, o)
			}
		}
		for o := range p.h.condemned {
			if o < p.rg.Next {
				delete(p.h.condemned, o)
			}
		}
	}
}

// breaker counts the records that were set aside, per topic, and says when
// they are too many. It is safe for concurrent use.
type breaker struct {
	limit  int
	window time.Duration

	mu     sync.Mutex
	topics map[string][]time.Time // of the last ones, at most limit each, oldest first
}

// tripped tells whether one more record of the topic would be too many, beside
// those that were counted and pending ones that were not yet.
func (k *breaker) tripped(topic string, pending int, now time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.recent(topic, now))+pending >= k.limit
}

// count notes one.
func (k *breaker) count(topic string, now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.topics == nil {
		k.topics = make(map[string][]time.Time)
	}
	k.topics[topic] = append(k.recent(topic, now), now)
}

func (k *breaker) recent(topic string, now time.Time) []time.Time {
	all := k.topics[topic]
	old := 0
	for old < len(all) && (now.Sub(all[old]) >= k.window || len(all)-old > k.limit) {
		old++
	}
	if old > 0 {
		all = append(all[:0], all[old:]...)
		k.topics[topic] = all
	}
	return all
}
