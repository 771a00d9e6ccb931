package partition

import (
	"time"
)

// cause is why fetching of a partition is paused. It is a metric label.
type cause string

const (
	causeLane    cause = "lane"    // the partition's own queue is full
	causeMemory  cause = "memory"  // all queues together are full
	causeBlocked cause = "blocked" // the lane stopped for good
	causeFetch   cause = "fetch"   // fetching failed, and is tried again later
)

var causes = []cause{causeLane, causeMemory, causeBlocked, causeFetch}

// pause is one partition that the client was told to pause.
type pause struct {
	why   cause
	since time.Time
}

// applyPauses makes the client's pauses what the lanes ask for. It is called
// after anything that may change them, from any goroutine: what to tell the
// client is worked out from the lanes as they are, under one lock, so that a
// late caller cannot undo what was decided for a partition's next lane.
//
// The client keeps a partition paused across revocation and a new assignment;
// a partition without a lane is therefore resumed here.
func (s *session) applyPauses() {
	s.pauseMu.Lock()
	defer s.pauseMu.Unlock()
	now := time.Now()

	s.mu.Lock()
	var total int64
	want := make(map[place]cause, len(s.paused))
	for p, h := range s.lanes {
		bytes, full := h.lane.Held()
		total += bytes
		switch {
		case h.lane.Blocked() != nil:
			want[p] = causeBlocked
		case h.trouble != nil && !h.trouble.resumed:
			want[p] = causeFetch
		case full:
			want[p] = causeLane
		}
	}
	// The distance between the two marks keeps the client from throwing away
	// and fetching again the same records all the time.
	if total >= s.cfg.MemoryLimit {
		s.over = true
	} else if total <= s.cfg.MemoryLimit/2 {
		s.over = false
	}
	if s.over {
		for p := range s.lanes {
			if want[p] == "" {
				want[p] = causeMemory
			}
		}
	}
	s.mu.Unlock()

	stop, resume := map[string][]int32{}, map[string][]int32{}
	for p, why := range want {
		old, was := s.paused[p]
		if was && old.why == why {
			continue
		}
		if was {
			s.cfg.Metrics.addPaused(old.why, now.Sub(old.since))
		} else {
			stop[p.topic] = append(stop[p.topic], p.partition)
		}
		s.paused[p] = pause{why: why, since: now}
	}
	for p, old := range s.paused {
		if want[p] != "" {
			continue
		}
		s.cfg.Metrics.addPaused(old.why, now.Sub(old.since))
		resume[p.topic] = append(resume[p.topic], p.partition)
		delete(s.paused, p)
	}
	if len(stop) > 0 {
		s.client.PauseFetchPartitions(stop)
	}
	if len(resume) > 0 {
		s.client.ResumeFetchPartitions(resume)
	}
}

// pausedFor gives the cause for which a partition is paused, or "".
func (s *session) pausedFor(p place) cause {
	s.pauseMu.Lock()
	defer s.pauseMu.Unlock()
	return s.paused[p].why
}

// pausedSeconds gives the time of the pauses that have not ended, by cause.
func (s *session) pausedSeconds(now time.Time) map[cause]time.Duration {
	s.pauseMu.Lock()
	defer s.pauseMu.Unlock()
	out := make(map[cause]time.Duration, len(causes))
	for _, p := range s.paused {
		out[p.why] += now.Sub(p.since)
	}
	return out
}
