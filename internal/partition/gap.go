package partition

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/partition/lane"
)

// The reasons for which a log no longer has what comes next; metric labels.
const (
	gapRetention = "retention"  // the log's start has passed the position
	gapTruncated = "truncated"  // the log's end fell behind the position, or its tail was replaced
	gapRecreated = "recreated"  // the topic was made anew
	gapDeleted   = "deleted"    // the topic is gone
	gapNoOffset  = "no_offset"  // the group has no offset, and the policy wants one
	gapHealed    = "none_found" // the broker named a gap that was not there any more
)

// trouble is why a lane's partition is not fetched. It is under session.mu.
type trouble struct {
	err error
	// gap: what comes next is missing, and mendLoop has to decide. Otherwise
	// fetching is tried again at due.
	gap     bool
	blockAt int64 // of a gap: where the lane was blocked for it
	attempt int
	due     time.Time
	// resumed: fetching is being tried, and has not succeeded yet.
	resumed bool
}

// retryWait gives the wait before the next attempt: doubling from one second
// to a minute, with full jitter over its upper half.
func retryWait(attempt int) time.Duration {
	d := time.Second << min(attempt, 6)
	d = min(d, time.Minute)
	return d/2 + rand.N(d/2) //nolint:gosec // jitter
}

// fetchFailed takes in an error that came from a poll. The first one of a
// partition pauses it: the client asks again at once otherwise, tens of
// thousands of times a second.
func (s *session) fetchFailed(ctx context.Context, topic string, partition int32, err error) {
	if errors.Is(err, kgo.ErrClientClosed) || errors.Is(err, context.Canceled) || ctx.Err() != nil {
		return
	}
	s.cfg.Metrics.fetchErrors.Inc()
	if errors.Is(err, kerr.FencedInstanceID) { // to join anew would put the other one out, and so on
		s.fatal(s.cfg.explain(fmt.Sprintf("take part in group %q", s.cfg.Group), err))
		return
	}
	s.mu.Lock()
	h := s.lanes[place{topic, partition}]
	if h == nil {
		why := s.cfg.explain("consume topic "+topic, err)
		var session *kgo.ErrGroupSession
		if topic == "" || errors.As(err, &session) {
			why = s.cfg.explain(fmt.Sprintf("take part in group %q", s.cfg.Group), err)
			s.groupErr = why
		} else if s.routes[topic] != nil {
			s.topicErrs[topic] = why
		}
		s.mu.Unlock()
		if missed, ok := s.limiter.ok("poll", 10*time.Second, time.Now()); ok {
			s.log.WarnContext(ctx, "consuming failed; it is tried again", slog.String("topic", topic), slog.Int("more_since_last_line", missed), slog.Any("err", why))
		}
		return
	}
	s.mu.Unlock()

	var lost *kgo.ErrDataLoss
	var large *kgo.ErrDecompressTooLarge
	switch {
	case errors.As(err, &large):
		s.block(h, large.Offset, &decode.Refusal{
			Reason: decode.ReasonLimit, What: "batch", Where: fmt.Sprintf("%s@%d", h.place, large.Offset),
			Why:      "it decompresses to more than 128 MiB",
			Expected: "a smaller batch",
			Do:       fmt.Sprintf("set the group's offset to %d to leave the batch out", large.NextOffset),
			Err:      err,
		})
	case errors.As(err, &lost), errors.Is(err, kerr.OffsetOutOfRange), errors.Is(err, kerr.UnknownTopicID), errors.Is(err, kerr.UnknownTopicOrPartition):
		s.gapFound(h, err)
	default:
		s.mu.Lock()
		attempt := 1
		if h.trouble != nil {
			attempt = h.trouble.attempt + 1
		}
		h.trouble = &trouble{err: err, attempt: attempt, due: time.Now().Add(retryWait(attempt))}
		s.mu.Unlock()
		s.wakeMender()
		s.log.WarnContext(ctx, "fetching failed; the partition is paused and tried again", slog.String("topic", topic), slog.Int64("partition", int64(partition)),
			slog.Int("attempt", attempt), slog.Any("err", s.cfg.explain("fetch "+h.String(), err)))
	}
	s.applyPauses()
}

// gapFound stops a lane behind what it received, until mendLoop has looked.
func (s *session) gapFound(h *held, err error) {
	at, counts := h.lane.BlockReceiving(fmt.Errorf("%s: nothing can be read at offset %d; the log's bounds are being looked up: %w", h.place, h.lane.Next(), err))
	if counts {
		s.mu.Lock()
		h.trouble = &trouble{err: err, gap: true, blockAt: at, due: time.Now()}
		s.mu.Unlock()
		s.wakeMender()
	}
	s.applyPauses()
}

func (s *session) wakeMender() {
	select {
	case s.mend <- struct{}{}:
	default:
	}
}

// mendLoop decides about gaps and resumes what is to be tried again.
func (s *session) mendLoop(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		next := s.mendDue(ctx)
		timer.Reset(next)
		select {
		case <-ctx.Done():
			return
		case <-s.mend:
		case <-timer.C:
		}
	}
}

// mendDue does what is due and gives the time until the next is.
func (s *session) mendDue(ctx context.Context) time.Duration {
	now := time.Now()
	next := time.Hour
	var gaps []*held
	s.mu.Lock()
	for _, h := range s.lanes {
		t := h.trouble
		switch {
		case t == nil:
		case t.due.After(now):
			next = min(next, t.due.Sub(now))
		case t.gap:
			gaps = append(gaps, h)
		case !t.resumed:
			t.resumed, t.due = true, now.Add(time.Minute)
			next = min(next, time.Minute)
		default:
			h.trouble = nil // a minute without another error
		}
	}
	s.mu.Unlock()
	for _, h := range gaps {
		if wait := s.mendGap(ctx, h); wait > 0 {
			next = min(next, wait)
		}
	}
	s.applyPauses()
	return next
}

// facts are what is known about a gap.
type facts struct {
	place
	next       int64 // the offset that should come next
	err        error // what the client or the broker said
	oldID      [16]byte
	newID      [16]byte
	deleted    bool
	start, end int64
}

// remedy is what to do about a gap.
type remedy struct {
	reason string
	// why is set when the partition stops.
	why error
	// to is where to go on; below facts.next it takes a new lane.
	to int64
}

// diagnose decides about a gap.
func diagnose(policy GapPolicy, f facts) remedy {
	var lost *kgo.ErrDataLoss
	oldID, newID := topicIDText(f.oldID), topicIDText(f.newID)
	gap := func(why, do string) *decode.Refusal {
		return &decode.Refusal{
			Reason: decode.ReasonGap, What: "partition", Where: fmt.Sprintf("%s@%d", f.place, f.next),
			Why: why, Expected: fmt.Sprintf("a record at offset %d or later that follows what was read", f.next), Do: do, Err: f.err,
		}
	}
	const goOn = "find out what was lost, then set KAFKASINK_ON_GAP=continue to go on, or reload the table from its source"
	switch {
	case f.deleted:
		return remedy{reason: gapDeleted, why: gap("the topic does not exist any more", "create the topic again, or take it out of KAFKASINK_TOPICS")}
	case oldID != "" && newID != "" && oldID != newID:
		r := remedy{reason: gapRecreated, to: f.start}
		if policy == GapStop {
			r.why = recreated(f.place, f.next, oldID, newID, f.start, f.end)
		}
		return r
	case errors.As(f.err, &lost):
		r := remedy{reason: gapTruncated, to: max(min(lost.ResetTo, f.next), f.start)}
		if policy == GapStop {
			r.why = gap(fmt.Sprintf("the broker lost the log's tail: it was read up to offset %d and now differs from offset %d on (the log has %d to %d)", lost.ConsumedTo, lost.ResetTo, f.start, f.end), goOn)
		}
		return r
	case f.next < f.start:
		r := remedy{reason: gapRetention, to: f.start}
		if policy == GapStop {
			r.why = gap(fmt.Sprintf("retention removed %d offsets that were not read yet, %d to %d (the log has %d to %d)", f.start-f.next, f.next, f.start-1, f.start, f.end), goOn)
		}
		return r
	case f.next > f.end:
		r := remedy{reason: gapTruncated, to: f.start}
		if policy == GapStop {
			r.why = gap(fmt.Sprintf("the log ends at %d, %d below what was read: it was truncated (the log has %d to %d)", f.end, f.next-f.end, f.start, f.end), goOn)
		}
		return r
	}
	return remedy{reason: gapHealed, to: f.next}
}

// recreated is the refusal of a topic that is not the one it was.
func recreated(p place, next int64, oldID, newID string, start, end int64) *decode.Refusal {
	return &decode.Refusal{
		Reason: decode.ReasonGap, What: "partition", Where: fmt.Sprintf("%s@%d", p, next),
		Why:      fmt.Sprintf("the topic was deleted and made anew: its id was %s and is %s, and its offsets start over (the log has %d to %d)", oldID, newID, start, end),
		Expected: "the topic that was read before",
		Do:       "set KAFKASINK_ON_GAP=continue to read the new topic from its start, or reset the group's offsets",
	}
}

// gapReason gives the metric label of a refusal at assignment.
func gapReason(err error) string {
	var r *decode.Refusal
	if errors.As(err, &r) && r.Expected == "the topic that was read before" {
		return gapRecreated
	}
	return gapNoOffset
}

// mendGap looks at the cluster and acts. It returns the wait before it is to
// be tried again, 0 if it is done.
func (s *session) mendGap(ctx context.Context, h *held) time.Duration {
	s.mu.Lock()
	t := h.trouble
	s.mu.Unlock()
	if t == nil || !h.lane.Alive() {
		return 0
	}
	f, err := s.lookUp(ctx, h, t.err)
	if err != nil {
		s.mu.Lock()
		t.attempt++
		wait := retryWait(t.attempt)
		t.due = time.Now().Add(wait)
		s.mu.Unlock()
		h.lane.Block(t.blockAt, fmt.Errorf("%s: nothing can be read at offset %d, and the log's bounds could not be looked up (tried again): %w", h.place, f.next, errors.Join(t.err, err)))
		return wait
	}
	r := diagnose(s.cfg.OnGap, f)
	s.cfg.Metrics.gaps.WithLabelValues(r.reason).Inc()
	attrs := []any{
		slog.String("topic", h.topic), slog.Int64("partition", int64(h.partition)), slog.String("reason", r.reason),
		slog.Int64("from", f.next), slog.Int64("to", r.to), slog.Int64("log_start", f.start), slog.Int64("log_end", f.end), slog.Any("err", t.err),
	}
	if r.why != nil {
		s.forgive(h, t)
		s.block(h, t.blockAt, r.why)
		s.log.ErrorContext(ctx, "gap in the log; the partition stops", attrs...)
		return 0
	}
	s.log.WarnContext(ctx, "gap in the log; going on by policy", attrs...)
	switch {
	case r.reason == gapRecreated:
		s.startOver(h.topic)
	case r.to >= f.next:
		s.between(func() {
			if s.forgive(h, t) {
				h.lane.Unblock(t.blockAt)
				s.seek(h.place, r.to)
			}
		})
	default:
		// Below what was received, this lane would take every record for one
		// fetched twice.
		s.between(func() {
			if !s.forgive(h, t) {
				return
			}
			cfg := lane.Config{
				Topic: h.topic, TopicID: f.newID, Partition: h.partition, Epoch: h.lane.Epoch() + 1,
				Start: r.to, StartLeaderEpoch: -1, Committed: lane.NoCommit, NotBefore: h.lane.NotBefore(),
				Limits: lane.Limits{HighRecords: s.cfg.LaneRecords, HighBytes: s.cfg.LaneMemory},
			}
			var k *taking
			if h.taking != nil {
				// Other records stand at these offsets now, so that nothing which is
				// remembered of the old ones counts.
				cfg.Progress = &lane.Progress{}
				k = &taking{noted: feldera.Noted{Epoch: h.lane.Epoch()}, begin: min(h.taking.begin, r.to), gone: h.taking.gone}
			}
			s.enter(lane.New(cfg), h.waits, k)
			s.seek(h.place, r.to)
			wake(s.kick)
			s.wakeTaking()
		})
	}
	return 0
}

// forgive ends a trouble, if it is still the lane's and the lane still the
// partition's.
func (s *session) forgive(h *held, t *trouble) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lanes[h.place] != h || h.trouble != t {
		return false
	}
	h.trouble = nil
	return true
}

// seek moves the client's fetch position. Only the poll loop calls it, while
// no callback can run.
func (s *session) seek(p place, offset int64) {
	s.client.SetOffsets(map[string]map[int32]kgo.EpochOffset{p.topic: {p.partition: {Epoch: -1, Offset: offset}}})
}

// startOver has the client forget a topic and take it again under its new id.
// The lanes die first: a commit under the old name would land on the new
// topic.
func (s *session) startOver(topic string) {
	s.mu.Lock()
	s.remade[topic] = true
	s.mu.Unlock()
	for _, h := range s.everything() {
		if h.topic == topic {
			s.bury(h)
		}
	}
	s.client.PurgeTopicsFromClient(topic)
	s.client.AddConsumeTopics(topic)
}

// lookUp finds out about a gap.
func (s *session) lookUp(ctx context.Context, h *held, cause error) (facts, error) {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	f := facts{place: h.place, next: h.lane.Next(), err: cause, oldID: h.lane.TopicID()}
	topics, err := s.admin.ListTopics(ctx, h.topic)
	if err != nil {
		return f, s.cfg.explain("look up topic "+h.topic, err)
	}
	d, ok := topics[h.topic]
	switch {
	case !ok, errors.Is(d.Err, kerr.UnknownTopicOrPartition):
		f.deleted = true
		return f, nil
	case d.Err != nil:
		return f, fmt.Errorf("look up topic %s: %w", h.topic, d.Err)
	}
	f.newID = d.ID
	starts, err := s.admin.ListStartOffsets(ctx, h.topic)
	if err != nil {
		return f, s.cfg.explain("list the start of "+h.String(), err)
	}
	ends, err := s.admin.ListEndOffsets(ctx, h.topic)
	if err != nil {
		return f, s.cfg.explain("list the end of "+h.String(), err)
	}
	f.start, f.end, err = boundsOf(starts, ends, h.place)
	return f, err
}

// logBounds is a log's start and end when they were looked at.
type logBounds struct{ start, end int64 }

// watchEnds looks at the logs' bounds for the lag.
func (s *session) watchEnds(ctx context.Context) {
	tick := time.NewTicker(min(time.Second, s.cfg.LagInterval))
	defer tick.Stop()
	var last, looked time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			if now.Sub(looked) >= retentionEvery {
				looked = now
				s.lookAtRetention(ctx)
			}
			s.mu.Lock()
			missing := false
			for p := range s.lanes {
				if _, ok := s.ends[p]; !ok {
					missing = true
				}
			}
			idle := len(s.lanes) == 0
			s.mu.Unlock()
			if idle || !missing && now.Sub(last) < s.cfg.LagInterval {
				continue
			}
			last = now
			s.lookAtEnds(ctx)
		}
	}
}

func (s *session) lookAtEnds(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	starts, ends, err := s.listBounds(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		clear(s.ends) // unknown is absent, not old
		return
	}
	for p := range s.lanes {
		start, end, err := boundsOf(starts, ends, p)
		if err != nil {
			delete(s.ends, p)
			continue
		}
		s.ends[p] = logBounds{start, end}
	}
	s.sampleRetention(time.Now())
}
