package partition

import (
	"context"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"holdfast/internal/partition/lane"
)

// retention is how long a topic keeps its records.
type retention struct {
	// age and bytes are its limits; 0 = none.
	age   time.Duration
	bytes int64
}

// bounded tells whether records go away at all but by compaction.
func (r retention) bounded() bool { return r.age > 0 || r.bytes > 0 }

// parseRetention reads a topic's configuration. Values that are not numbers
// count as no limit: they are the broker's to judge.
func parseRetention(policy, ms, bytes string) retention {
	if !strings.Contains(policy, "delete") && policy != "" {
		return retention{}
	}
	var out retention
	if n, err := strconv.ParseInt(ms, 10, 64); err == nil && n > 0 && n < int64(maxRetention/time.Millisecond) {
		out.age = time.Duration(n) * time.Millisecond
	}
	if n, err := strconv.ParseInt(bytes, 10, 64); err == nil && n > 0 {
		out.bytes = n
	}
	return out
}

// maxRetention is where a limit stops to be one; it keeps a duration from
// overflowing.
const maxRetention = 100 * 365 * 24 * time.Hour

// RetentionStatus is how far a partition's position is from being overtaken by
// its topic's retention.
type RetentionStatus struct {
	// Limit is retention.ms; 0 where age is no reason to delete.
	Limit time.Duration
	// Records is how many offsets lie between the log's start and the
	// committed offset; below 0 so many were lost.
	Records int64
	// Headroom is Limit less the age of the next record to commit; it means
	// something only where Limit is above 0.
	Headroom time.Duration
	// Left is how long it takes retention to reach the position at the pace of
	// the last minutes; meaningless unless Approaching.
	Left        time.Duration
	Approaching bool
}

// sample is a position beside the log's start at one instant.
type sample struct {
	at               time.Time
	start, committed int64
	age              time.Duration // of the next record to commit; 0 when there is none
}

// maxSamples bounds what is kept of a partition: at the usual interval, the
// last five minutes.
const maxSamples = 30

// course is how a position moves against retention. It is under session.mu.
type course struct{ samples []sample }

func (c *course) add(s sample) {
	if n := len(c.samples); n > 0 && s.committed < c.samples[n-1].committed {
		c.samples = c.samples[:0] // it was set back: another course
	}
	if len(c.samples) >= maxSamples {
		c.samples = append(c.samples[:0], c.samples[1:]...)
	}
	c.samples = append(c.samples, s)
}

// status works out the headroom as of the last sample.
func (c *course) status(r retention) *RetentionStatus {
	if len(c.samples) == 0 || !r.bounded() {
		return nil
	}
	first, last := c.samples[0], c.samples[len(c.samples)-1]
	out := &RetentionStatus{Limit: r.age, Records: last.committed - last.start}
	took := last.at.Sub(first.at)
	approach := func(nanoseconds float64) {
		left := time.Duration(max(min(nanoseconds, float64(maxRetention)), 0))
		if !out.Approaching || left < out.Left {
			out.Left, out.Approaching = left, true
		}
	}
	if r.age > 0 {
		out.Headroom = r.age - last.age
		// A position that stands still ages by a second each second.
		if growth := last.age - first.age; last.age > 0 && took > 0 && growth > 0 {
			approach(float64(out.Headroom) * (float64(took) / float64(growth)))
		}
	}
	// The log's start moves by retention of any kind, in whole segments.
	if closer := (last.start - first.start) - (last.committed - first.committed); took > 0 && closer > 0 && last.start > first.start {
		approach(float64(out.Records) * (float64(took) / float64(closer)))
	}
	return out
}

// retentionEvery is the time between looks at the topics' configuration.
const retentionEvery = 5 * time.Minute

// lookAtRetention reads the topics' configuration. A user who may not, or a
// cluster that does not answer, leaves retention unknown.
func (s *session) lookAtRetention(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	described, err := s.admin.DescribeTopicConfigs(ctx, s.cfg.topics()...)
	if err != nil {
		s.log.DebugContext(ctx, "retention of the topics is not known", slog.Any("err", s.cfg.explain("describe the topics' configuration", err)))
		return
	}
	found := make(map[string]retention, len(described))
	for _, d := range described {
		if d.Err != nil {
			s.log.DebugContext(ctx, "retention of a topic is not known", slog.String("topic", d.Name), slog.Any("err", d.Err))
			continue
		}
		values := make(map[string]string, len(d.Configs))
		for _, v := range d.Configs {
			values[v.Key] = v.MaybeValue()
		}
		found[d.Name] = parseRetention(values["cleanup.policy"], values["retention.ms"], values["retention.bytes"])
	}
	s.mu.Lock()
	s.retention = found
	s.mu.Unlock()
}

// sampleRetention notes where each lane is. The caller holds s.mu and has just
// brought s.ends up to date.
func (s *session) sampleRetention(now time.Time) {
	for p := range s.courses {
		if s.lanes[p] == nil {
			delete(s.courses, p)
		}
	}
	for p, h := range s.lanes {
		b, known := s.ends[p]
		snap := h.lane.Snapshot()
		if !known || snap.Committed == lane.NoCommit {
			delete(s.courses, p)
			continue
		}
		if s.courses[p] == nil {
			s.courses[p] = new(course)
		}
		s.courses[p].add(sample{at: now, start: b.start, committed: snap.Committed, age: lagAge(&snap, b.end, now)})
	}
}

// lagAge is the age of the next record to commit: 0 where there is none. Where
// that record has not been received yet, the age of the last committed one is
// as near as one can get; it errs towards too old.
func lagAge(snap *lane.Snapshot, end int64, now time.Time) time.Duration {
	if snap.Committed >= end {
		return 0
	}
	at := snap.NextTime
	if at.IsZero() {
		at = snap.CommittedTime
	}
	if at.IsZero() {
		return 0
	}
	return max(now.Sub(at), 0)
}
