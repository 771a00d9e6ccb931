package partition

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"holdfast/internal/ack"
	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/partition/lane"
	"holdfast/internal/sabotage"
)

// sender carries the records of all lanes of one table into it. One goroutine,
// run, does everything but taking in evidence; so there is one request in
// flight per table, and none while the outcome of an earlier one is unknown.
type sender struct {
	s    *session
	name string
	dest Destination
	wake chan struct{}

	// Used by run alone.
	array Array
	buf   []lane.Record
	open  *batch    // sent, and the outcome is unknown
	hold  time.Time // when the outcome of open can no longer change
	// halves is what is left of a refused batch, the next to be built last. It
	// is bounded by the logarithm of the batch's records.
	halves  [][]share
	suspect suspect

	mu    sync.Mutex
	lanes []*held
	// inflight counts arrays that were accepted and not completed.
	inflight int
	// current is the batch whose request is under way; cancel ends its retries.
	current *batch
	cancel  context.CancelCauseFunc
	blocked error

	// wakers wait for what the decoders of stalled lanes need. run waits for
	// them.
	wakers sync.WaitGroup
}

// batch is what one array carries.
type batch struct {
	parts []part
	rows  int
	skips []skip
}

// part is one lane's share of a batch.
type part struct {
	h  *held
	rg lane.Range
}

// skip is a record that is passed over by policy. It is counted when the
// position may move past it, not when it is seen: a batch can be built twice.
type skip struct {
	place
	offset       int64
	why          *decode.Refusal
	deadLettered bool
}

func newSender(s *session, name string, dest Destination) *sender {
	return &sender{s: s, name: name, dest: dest, wake: make(chan struct{}, 1), array: dest.NewArray()}
}

// poke has run look again.
func (t *sender) poke() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// join adds a lane. A table that is blocked blocks it too.
func (t *sender) join(h *held) {
	t.mu.Lock()
	t.lanes = append(t.lanes, h)
	blocked := t.blocked
	t.mu.Unlock()
	if blocked != nil {
		h.lane.BlockSending(blocked)
	}
	t.poke()
}

// leave removes a lane that was killed. A request that carries rows of it is
// not tried again: the sequence that would go wrong is that the request times
// out, the partition moves, its new owner writes newer rows, and the retry
// puts the older ones over them.
func (t *sender) leave(h *held) {
	t.mu.Lock()
	t.lanes = slices.DeleteFunc(t.lanes, func(o *held) bool { return o == h })
	if t.current != nil && slices.ContainsFunc(t.current.parts, func(p part) bool { return p.h == h }) {
		t.cancel(errLaneDied)
	}
	if h.stall != nil && h.stall.cancel != nil {
		h.stall.cancel()
	}
	h.stall = nil
	t.mu.Unlock()
	t.poke()
}

var (
	errLaneDied = errors.New("a partition in the request was given up")
	errStale    = errors.New("the group's session may have run out")
)

// run sends until ctx ends. An error means that the session cannot go on.
func (t *sender) run(ctx context.Context) error {
	defer t.wakers.Wait()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		wait, err := t.turn(ctx)
		if err != nil {
			return err
		}
		if wait == 0 {
			if ctx.Err() != nil {
				return nil
			}
			continue
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return nil
		case <-t.wake:
		case <-timer.C:
		}
	}
}

// untilPoked is the wait of a turn that only a poke can end.
const untilPoked = time.Hour

// turn does the next thing there is to do, and says how long to wait before
// the next: 0 means not at all.
func (t *sender) turn(ctx context.Context) (time.Duration, error) {
	now := time.Now()
	if t.open != nil {
		if left := t.hold.Sub(now); left > 0 {
			return left, nil
		}
		t.giveBack(t.open)
		t.open = nil
	}
	t.mu.Lock()
	full := t.blocked != nil || t.inflight >= t.s.cfg.InFlight
	t.mu.Unlock()
	if full || t.s.member.remaining(now) <= 0 {
		return untilPoked, nil
	}
	var b *batch
	var err error
	if n := len(t.halves); n > 0 {
		shares := t.halves[n-1]
		t.halves = t.halves[:n-1]
		b, err = t.buildHalf(ctx, shares, now)
	} else {
		ready, wait := t.ready(now)
		if len(ready) == 0 {
			return wait, nil
		}
		b, err = t.build(ctx, ready, now)
	}
	if err != nil || b == nil {
		return 0, err
	}
	if t.array.Rows() == 0 {
		return 0, t.pass(b)
	}
	return 0, t.send(ctx, b)
}

// waiting is what a lane has ready.
type waiting struct {
	h       *held
	records int
}

// ready gives the lanes to build an array from: those with records, fewest
// first, if there is enough for one or the oldest has waited long enough.
// Otherwise none, and the time until that changes by itself.
func (t *sender) ready(now time.Time) ([]waiting, time.Duration) {
	t.mu.Lock()
	lanes := slices.Clone(t.lanes)
	t.mu.Unlock()
	var out []waiting
	var rows int
	var bytes int64
	var oldest time.Time
	wait := untilPoked
	pressed := false
	for _, h := range lanes {
		n, size, since := h.lane.Waiting(now)
		if n > 0 {
			if early, is := t.stalled(h, now); is {
				wait = min(wait, early)
				continue
			}
		}
		if n == 0 {
			if early := h.lane.NotBefore().Sub(now); early > 0 {
				wait = min(wait, early)
			}
			continue
		}
		// A lane that is full will not get more by waiting.
		_, full := h.lane.Held()
		pressed = pressed || full
		rows, bytes = rows+n, bytes+size
		if oldest.IsZero() || since.Before(oldest) {
			oldest = since
		}
		out = append(out, waiting{h, n})
	}
	if len(out) == 0 {
		return nil, wait
	}
	if age := now.Sub(oldest); age < t.s.cfg.BatchAge && rows < t.s.cfg.BatchRows && bytes < int64(t.s.cfg.BatchBytes) && !pressed {
		return nil, min(wait, t.s.cfg.BatchAge-age)
	}
	// With the fewest first, what a small lane leaves of its share goes to the
	// larger ones behind it.
	slices.SortStableFunc(out, func(a, b waiting) int { return cmp.Compare(a.records, b.records) })
	return out, 0
}

// build fills the array from the lanes and takes from each what it gave. A nil
// batch means that something changed meanwhile and it is to be tried again.
func (t *sender) build(ctx context.Context, ready []waiting, now time.Time) (*batch, error) {
	t.array.Reset()
	b := &batch{}
	rowsLeft := t.s.cfg.BatchRows
	for i, w := range ready {
		lanesLeft := len(ready) - i
		bytesLeft := t.s.cfg.BatchBytes - t.array.Bytes()
		if rowsLeft <= 0 || bytesLeft <= 0 && t.array.Rows() > 0 {
			break
		}
		limit := t.array.Bytes() + max(bytesLeft/lanesLeft, 1)
		n, err := t.addFrom(ctx, b, share{w.h, max(rowsLeft/lanesLeft, 1)}, limit, now)
		if err != nil {
			return nil, t.dropped(b, err)
		}
		rowsLeft -= n
	}
	return t.built(b), nil
}

// buildHalf builds an array of a part of one that was refused. Lanes that may
// not send now are left out.
func (t *sender) buildHalf(ctx context.Context, shares []share, now time.Time) (*batch, error) {
	t.array.Reset()
	b := &batch{}
	for _, sh := range shares {
		if _, is := t.stalled(sh.h, now); is {
			continue
		}
		if _, err := t.addFrom(ctx, b, sh, math.MaxInt, now); err != nil {
			return nil, t.dropped(b, err)
		}
	}
	return t.built(b), nil
}

// addFrom adds a lane's share to the array and takes it.
func (t *sender) addFrom(ctx context.Context, b *batch, sh share, bytes int, now time.Time) (int, error) {
	n, rows, stop := t.fill(ctx, b, sh.h, sh.records, bytes, now)
	if n > 0 {
		rg, err := sh.h.lane.Take(n)
		if err != nil {
			return 0, err
		}
		rg.Rows = rows
		b.parts = append(b.parts, part{sh.h, rg})
	}
	if stop != nil {
		t.s.block(sh.h, stop.offset, stop.err)
	}
	return n, nil
}

// dropped gives up a batch under construction. Where a lane died while its
// records were being added, they cannot be taken out of the array again.
func (t *sender) dropped(b *batch, err error) error {
	t.giveBack(b)
	if errors.Is(err, lane.ErrDead) {
		return nil
	}
	return err
}

func (t *sender) built(b *batch) *batch {
	if b.rows = t.array.Rows(); len(b.parts) == 0 {
		return nil
	}
	return b
}

// halt is a record that stops its lane.
type halt struct {
	offset int64
	err    error
}

// fill adds records of one lane to the array, up to limit records or until
// the array has bytes bytes, and says how many were used up, and the offset
// behind the last one that gave a row, 0 if none did.
func (t *sender) fill(ctx context.Context, b *batch, h *held, limit, bytes int, now time.Time) (used int, rows int64, stop *halt) {
	t.buf = h.lane.Peek(t.buf[:0], limit, now)
	defer func() { clear(t.buf) }() // the values would keep their fetch buffers alive
	for i := range t.buf {
		if i > 0 && t.array.Bytes() >= bytes {
			break
		}
		r := &t.buf[i]
		before := t.array.Rows()
		if err := t.add(h, r); err != nil {
			switch verdict, err := t.setAside(ctx, b, h, r, err, now); verdict {
			case passOver:
			case waitFor:
				return used, rows, nil
			case stopAt:
				return used, rows, &halt{r.Offset, err}
			}
		}
		if t.array.Rows() > before {
			rows = r.Offset + 1
		}
		t.moved(h, r.Offset)
		used++
	}
	return used, rows, nil
}

// add decodes a record and adds its row, if it has one, to the array.
func (t *sender) add(h *held, r *lane.Record) error {
	if why := h.condemned[r.Offset]; why != nil {
		return why
	}
	pos := decode.Position{Topic: h.topic, Partition: h.partition, Offset: r.Offset}
	ch, err := h.route.Decoder.Decode(&decode.Record{Key: r.Key, Value: r.Value, Headers: r.Headers, Time: r.Time, Position: pos})
	if err == nil && ch != nil {
		ch.Position.Source, ch.Position.Sequence = h.source, 1 // a record gives one row
		err = t.array.Add(ch)
	}
	return err
}

// giveBack returns what a batch took. Its records come again, first.
func (t *sender) giveBack(b *batch) {
	for _, p := range b.parts {
		// A lane that died has nothing to be returned to.
		if err := p.h.lane.Return(p.rg); err != nil && !errors.Is(err, lane.ErrDead) {
			t.s.broken(err)
		}
	}
	t.s.changed.ring()
	t.poke()
}

// pass completes a batch that needs nothing of the destination.
func (t *sender) pass(b *batch) error {
	for _, p := range b.parts {
		if _, err := p.h.lane.Skip(p.rg); err != nil && !errors.Is(err, lane.ErrDead) {
			return err
		}
	}
	t.passed(b)
	t.reportSkips(b)
	t.s.changed.ring()
	t.s.applyPauses()
	return nil
}

// send makes the request for the array and takes in its outcome.
func (t *sender) send(ctx context.Context, b *batch) error {
	crash.Here(crash.KafkaDecoded)
	sctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if !t.begin(b, cancel) {
		t.giveBack(b)
		return nil
	}
	crash.Here(crash.KafkaBeforeSend)
	stale := t.watchSession(sctx, cancel)
	tok, err := t.dest.Send(sctx, t.array)
	stale.Stop()
	t.mu.Lock()
	t.current, t.cancel = nil, nil
	if err == nil {
		t.inflight++
	}
	t.mu.Unlock()

	var refused *decode.Refusal
	var changed *feldera.IncarnationChanged
	switch {
	case err == nil:
		t.accepted(b, tok)
		return nil
	case errors.As(err, &changed):
		return changed
	case errors.As(err, &refused) && refused.Reason == decode.ReasonRejected:
		// Known to be not applied: an array is all or nothing.
		t.isolate(b, refused)
		t.giveBack(b)
		return nil
	case errors.As(err, &refused):
		t.block(refused)
		if errors.Is(err, feldera.ErrOutcomeOpen) {
			t.keepOpen(b) // a lane that drains meanwhile must not call itself clean
			return nil
		}
		t.giveBack(b)
		return nil
	case sctx.Err() != nil || t.s.atOnce():
		// The last attempt may still be applied. What was taken stays taken,
		// so no lane of it can be drained clean or send anything later, until
		// one request lifetime has passed.
		t.keepOpen(b)
		if ctx.Err() == nil && sctx.Err() != nil {
			t.s.log.WarnContext(ctx, "request given up with its outcome unknown; the table waits before it sends again",
				slog.String("table", t.name), slog.Duration("wait", max(t.s.cfg.RequestLifetime, 0)),
				slog.String("why", context.Cause(sctx).Error()), slog.Any("err", err))
		}
		return nil
	}
	return fmt.Errorf("send to table %q: %w", t.name, err)
}

// keepOpen keeps what b took until its request can no longer be applied.
func (t *sender) keepOpen(b *batch) {
	t.open = b
	t.hold = time.Now().Add(max(t.s.cfg.RequestLifetime, 0))
}

// begin makes b the request under way, if every lane in it may still send.
//
// A lane that is killed after this finds current set and cancels it; one that
// was killed before is seen here. A lane that drains after this waits for the
// outcome, since its records are taken.
func (t *sender) begin(b *batch, cancel context.CancelCauseFunc) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.s.member.remaining(time.Now()) <= 0 {
		return false
	}
	for _, p := range b.parts {
		if !p.h.lane.Sending() {
			return false
		}
	}
	t.current, t.cancel = b, cancel
	return true
}

// watchSession cancels the request's retries when the group's session may
// have run out.
func (t *sender) watchSession(ctx context.Context, cancel context.CancelCauseFunc) *time.Timer {
	var timer *time.Timer
	var mu sync.Mutex
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(max(t.s.member.remaining(time.Now()), 0), func() {
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() != nil {
			return // the request ended, or Stop came while this was waiting to run
		}
		left := t.s.member.remaining(time.Now())
		if left <= 0 {
			cancel(errStale)
			return
		}
		timer.Reset(left)
	})
	return timer
}

// accepted records that the destination has the batch in its queue, and has
// its completion watched.
func (t *sender) accepted(b *batch, tok feldera.Token) {
	crash.Here(crash.KafkaAccepted)
	for _, p := range b.parts {
		if _, err := p.h.lane.Accept(p.rg); err != nil {
			t.late(err, "accepted", p.rg.Records)
		}
		if sabotage.On(sabotage.AckOnAccepted) {
			_ = p.h.lane.Mark(p.rg, ack.Completed)
		}
	}
	t.suspect = suspect{}
	t.passed(b)
	t.reportSkips(b)
	b.skips = nil // the watcher keeps the batch until its evidence, which can be a checkpoint away
	t.s.cfg.Metrics.sent.WithLabelValues(t.name).Add(float64(b.rows))
	t.s.cfg.Watcher.Watch(tok, func(e feldera.Evidence) { t.evidence(b, e) })
	t.s.applyPauses()
}

// evidence takes in what became of an accepted batch. It runs on the
// watcher's goroutine and does not block.
func (t *sender) evidence(b *batch, e feldera.Evidence) {
	var changed *feldera.IncarnationChanged
	switch {
	case errors.As(e.Err, &changed):
		t.s.fatal(changed)
		return
	case e.Err != nil:
		t.mu.Lock()
		t.inflight-- // it is the last that is heard of the batch
		t.mu.Unlock()
		t.block(fmt.Errorf("completion of rows of table %q: %w", t.name, e.Err))
		return
	}
	for _, p := range b.parts {
		if err := p.h.lane.Mark(p.rg, e.Rung); err != nil {
			t.late(err, e.Rung.String(), p.rg.Records)
		}
	}
	if e.Rung == ack.Ingested {
		crash.Here(crash.KafkaIngested)
		if r := t.s.recorder.Load(); r != nil {
			for _, p := range b.parts {
				r.ingested(p.h, p.rg, e)
			}
		}
	}
	if e.Rung >= ack.Completed {
		crash.Here(crash.KafkaCompleted)
		t.mu.Lock()
		t.inflight--
		t.mu.Unlock()
		t.poke()
		t.s.changed.ring()
	}
}

// late counts evidence for a dead lane; any other error is a broken invariant.
func (t *sender) late(err error, rung string, records int) {
	if !errors.Is(err, lane.ErrDead) {
		t.s.broken(err)
		return
	}
	t.s.cfg.Metrics.late.WithLabelValues(rung).Add(float64(records))
}

// block stops the table: all its lanes, and those that join later.
func (t *sender) block(why error) {
	t.mu.Lock()
	first := t.blocked == nil
	if first {
		t.blocked = why
	}
	lanes := slices.Clone(t.lanes)
	t.mu.Unlock()
	for _, h := range lanes {
		h.lane.BlockSending(why)
	}
	if first {
		t.s.log.ErrorContext(t.s.life, "table stopped", slog.String("table", t.name), slog.Any("err", why))
	}
	t.s.applyPauses()
}

// reportSkips counts the records that were passed over by policy.
func (t *sender) reportSkips(b *batch) {
	now := time.Now()
	for _, k := range b.skips {
		t.s.breaker.count(k.topic, now)
		counter, kind := t.s.cfg.Metrics.skipped, "skip"
		if k.deadLettered {
			counter, kind = t.s.cfg.Metrics.deadLetters, "dead letter"
		}
		counter.WithLabelValues(k.topic, string(k.why.Reason)).Inc()
		if missed, ok := t.s.limiter.ok(kind, time.Second, now); ok {
			t.s.log.WarnContext(t.s.life, "record set aside", slog.String("topic", k.topic), slog.Int64("partition", int64(k.partition)),
				slog.Int64("offset", k.offset), slog.String("reason", string(k.why.Reason)), slog.Bool("dead_letter", k.deadLettered),
				slog.Int("more_since_last_line", missed), slog.Any("err", k.why))
		}
	}
}

// reasonOf gives an error's label: its reason, or "other" for one that has none.
func reasonOf(err error) string {
	var r *decode.Refusal
	if errors.As(err, &r) {
		return string(r.Reason)
	}
	return "other"
}

// block stops one lane in front of a record.
func (s *session) block(h *held, offset int64, why error) {
	if h.lane.Block(offset, why) {
		s.cfg.Metrics.stopped.WithLabelValues(h.topic, reasonOf(why)).Inc()
		s.log.ErrorContext(s.life, "partition stopped", slog.String("topic", h.topic), slog.Int64("partition", int64(h.partition)),
			slog.Int64("offset", offset), slog.Any("err", why))
	}
	s.applyPauses()
}
