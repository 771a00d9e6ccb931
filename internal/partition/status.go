package partition

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"holdfast/internal/decode"
	"holdfast/internal/partition/lane"
)

// Status is the consumer's state at one instant, for health and the status
// page.
type Status struct {
	Group string
	// Assigned counts the partitions assigned, taken or not.
	Assigned int
	// Joined: the group has given this process a member id.
	Joined bool
	// Contact is when the group's coordinator was last known to count this
	// process as a member; zero if never. Current is false when that is too
	// long ago to start a request.
	Contact time.Time
	Current bool
	// GroupErr, CommitErr, BrokersErr and TopicErrs are what last went wrong
	// and has not gone right since. BrokersErr says that no broker answered;
	// a topic that is missing is a *decode.Refusal in TopicErrs.
	BrokersErr error
	GroupErr   error
	CommitErr  error
	TopicErrs  map[string]error
	LastCommit time.Time
	// Expulsions counts the times that the group expelled this member.
	Expulsions int64
	Partitions []PartitionStatus
	Tables     []TableStatus
}

// PartitionStatus is one assigned partition.
type PartitionStatus struct {
	lane.Snapshot
	Table string
	// NotTaken: the partition is assigned, and was refused for the reason in
	// Block; nothing of it is read.
	NotTaken bool
	// Paused is why the partition is not fetched: lane, memory, blocked,
	// fetch, or "".
	Paused string
	// FetchErr is why fetching failed; it is being tried again.
	FetchErr error
	// Waits is why nothing is sent before NotBefore, or before the partition is
	// claimed in the progress table.
	Waits string
	// Until is the offset that was committed when the pipeline was found to have
	// lost rows, while less is committed again; 0 for none.
	Until int64
	// GoneFrom and GoneTo, which is excluded, bound the offsets that the pipeline
	// lost when retention had taken them; 0 for none.
	GoneFrom, GoneTo int64
	// Held is why the partition stands in front of a record until something
	// outside answers; it is being tried again.
	Held   error
	heldBy holdCause
	// Lag is the log's end less the committed offset, in offsets; meaningless
	// unless LagKnown. LogStart and LogEnd are as known as it is.
	Lag, LogStart, LogEnd int64
	LagKnown              bool
	// LagAge is the age of the next record to commit, 0 when there is none; it
	// is as known as Lag is.
	LagAge time.Duration
	// Retention is how far the topic's retention is; nil while unknown, or
	// where it deletes nothing.
	Retention *RetentionStatus
}

// TableStatus is one destination.
type TableStatus struct {
	Table string
	// InFlight arrays are accepted and not completed.
	InFlight int
	// Sending: a request is under way.
	Sending bool
	// Blocked is why the table stopped, or nil.
	Blocked error
}

// Blocked gives what needs a person: partitions and tables that stopped.
func (s *Status) Blocked() []error {
	var out []error
	seen := map[error]bool{}
	for i := range s.Tables {
		if err := s.Tables[i].Blocked; err != nil {
			seen[err] = true
			out = append(out, err)
		}
	}
	for i := range s.Partitions {
		if b := s.Partitions[i].Block; b != nil && !seen[b.Err] {
			out = append(out, b.Err)
		}
	}
	return out
}

// AllStopped tells that nothing can go on before a person has acted: there are
// partitions, each of them was stopped by a refusal, and nothing is in flight.
// why is the first of the refusals. A rebalance can make it true for an
// instant, so believe it when it is true twice.
func (s *Status) AllStopped() (why error, all bool) {
	if s.Assigned == 0 || s.Assigned != len(s.Partitions) {
		return nil, false
	}
	for i := range s.Tables {
		if s.Tables[i].InFlight > 0 || s.Tables[i].Sending {
			return nil, false
		}
	}
	for i := range s.Partitions {
		p := &s.Partitions[i]
		var refused *decode.Refusal
		if p.Block == nil || p.QueuedRecords > 0 || !errors.As(p.Block.Err, &refused) {
			return nil, false
		}
		if why == nil {
			why = p.Block.Err
		}
	}
	return why, true
}

// Snapshot gives the state now. It is safe for concurrent use.
func (c *Consumer) Snapshot() Status {
	st := Status{Group: c.cfg.Group, Expulsions: c.restarts.Load()}
	s := c.current.Load()
	if s == nil {
		return st
	}
	now := time.Now()
	st.Contact, st.Current = s.member.contact(), s.member.remaining(now) > 0

	s.mu.Lock()
	st.Assigned = len(s.assigned)
	st.Joined = s.memberID != ""
	st.BrokersErr = s.brokersErr
	st.GroupErr, st.CommitErr, st.LastCommit = s.groupErr, s.commitErr, s.lastCommit
	st.TopicErrs = make(map[string]error, len(s.topicErrs))
	for t, err := range s.topicErrs {
		st.TopicErrs[t] = err
	}
	for t, err := range s.missing {
		st.TopicErrs[t] = err
	}
	for p, h := range s.lanes {
		ps := PartitionStatus{Snapshot: h.lane.Snapshot(), Table: h.route.Table}
		if h.trouble != nil {
			ps.FetchErr = h.trouble.err
		}
		if now.Before(h.lane.NotBefore()) {
			ps.Waits = h.waits
		}
		if k := h.taking; k != nil {
			ps.GoneFrom, ps.GoneTo = k.gone.From, k.gone.To
			if k.until > ps.Committed {
				ps.Until = k.until
			}
			if ps.Waits == "" && ps.State == lane.Live && h.lane.Stage() != lane.Claimed {
				ps.Waits = "it is found out what the pipeline holds of it"
			}
		}
		h.sender.mu.Lock()
		if h.stall != nil && h.stall.err != nil {
			ps.Held, ps.heldBy = h.stall.err, h.stall.what
		}
		h.sender.mu.Unlock()
		if b, ok := s.ends[p]; ok && ps.Committed != lane.NoCommit {
			ps.LogStart, ps.LogEnd, ps.LagKnown = b.start, b.end, true
			// A commit below the log's start has nothing to read there.
			ps.Lag = max(b.end-max(ps.Committed, b.start), 0)
			ps.LagAge = lagAge(&ps.Snapshot, b.end, now)
		}
		if c := s.courses[p]; c != nil {
			ps.Retention = c.status(s.retention[p.topic])
		}
		st.Partitions = append(st.Partitions, ps)
	}
	for p, why := range s.refused {
		st.Partitions = append(st.Partitions, PartitionStatus{
			Snapshot: lane.Snapshot{Topic: p.topic, Partition: p.partition, State: lane.Blocked, Committed: lane.NoCommit, Block: &lane.Block{Err: why}},
			Table:    s.routes[p.topic].Table, NotTaken: true,
		})
	}
	s.mu.Unlock()

	for i := range st.Partitions {
		st.Partitions[i].Paused = string(s.pausedFor(place{st.Partitions[i].Topic, st.Partitions[i].Partition}))
	}
	slices.SortFunc(st.Partitions, func(a, b PartitionStatus) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	for _, t := range s.order {
		t.mu.Lock()
		st.Tables = append(st.Tables, TableStatus{Table: t.name, InFlight: t.inflight, Sending: t.current != nil, Blocked: t.blocked})
		t.mu.Unlock()
	}
	return st
}
