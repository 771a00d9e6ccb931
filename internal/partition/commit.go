package partition

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/partition/lane"
	"holdfast/internal/sabotage"
)

// commitTimeout bounds one commit. It includes waiting for a rebalance of the
// group that is under way.
const commitTimeout = 5 * time.Second

// verdict is what a commit's answer for a partition means.
type verdict uint8

const (
	committed  verdict = iota
	later              // a rebalance or the coordinator's move is under way: the next commit says it again
	fenced             // the group does not know this member any more
	topicGone          // the topic was deleted or made anew
	noteTooBig         // the metadata exceeds the broker's limit
	denied             // anything else: counted, said, and tried again
)

// judge classifies a commit's error code. The only place that does.
func judge(code int16) verdict {
	switch code {
	case 0:
		return committed
	case kerr.UnknownMemberID.Code, kerr.IllegalGeneration.Code, kerr.FencedInstanceID.Code, kerr.FencedMemberEpoch.Code, kerr.StaleMemberEpoch.Code:
		return fenced
	case kerr.RebalanceInProgress.Code, kerr.CoordinatorLoadInProgress.Code, kerr.CoordinatorNotAvailable.Code, kerr.NotCoordinator.Code, kerr.RequestTimedOut.Code:
		return later
	case kerr.UnknownTopicID.Code, kerr.UnknownTopicOrPartition.Code, kerr.InconsistentTopicID.Code:
		return topicGone
	case kerr.OffsetMetadataTooLarge.Code:
		return noteTooBig
	}
	return denied
}

// codeLabel gives an error code's name for a metric label: the protocol's own
// closed list.
func codeLabel(code int16) string {
	var e *kerr.Error
	if errors.As(kerr.ErrorForCode(code), &e) {
		return e.Message
	}
	return "UNKNOWN"
}

// commitLoop commits at the interval, and at once when a new partition's
// start is to be put on record.
func (s *session) commitLoop(ctx context.Context) {
	tick := time.NewTicker(s.cfg.CommitInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-s.kick:
		}
		s.commitMu.Lock()
		err := s.commit(ctx, s.everything(), false)
		s.commitMu.Unlock()
		s.mu.Lock()
		s.commitErr = err
		s.mu.Unlock()
		if err == nil || ctx.Err() != nil {
			continue
		}
		if missed, ok := s.limiter.ok("commit", 10*time.Second, time.Now()); ok {
			s.log.WarnContext(ctx, "commit did not succeed; the next one says it again", slog.Int("more_since_last_line", missed), slog.Any("err", err))
		}
	}
}

// entry is one partition's share of a commit.
type entry struct {
	h *held
	c lane.Commit
}

// commit tells the broker what the lanes may commit. The caller holds
// commitMu. The offsets are read with the lanes' liveness; a lane that dies
// before the request is written takes the request with it, and the others are
// asked again.
func (s *session) commit(ctx context.Context, hs []*held, final bool) error {
	for {
		entries := make(map[place]entry, len(hs))
		for _, h := range hs {
			c, ok := h.lane.ToCommit(final, time.Now())
			if next := h.lane.Next(); sabotage.On(sabotage.CommitPolled) && next > c.Offset {
				c.Offset, ok = next, true
			}
			if ok {
				entries[h.place] = entry{h, c}
			}
		}
		if len(entries) == 0 {
			return nil
		}
		err := s.commitOnce(ctx, entries)
		if !errors.Is(err, errLaneDied) {
			return err
		}
	}
}

func (s *session) commitOnce(ctx context.Context, entries map[place]entry) error {
	ctx, cancel := context.WithTimeout(ctx, commitTimeout)
	defer cancel()
	ctx = kgo.PreCommitFnContext(ctx, func(req *kmsg.OffsetCommitRequest) error { return s.lastLook(req, entries) })
	offsets := make(map[string]map[int32]kgo.EpochOffset)
	for p, e := range entries {
		if offsets[p.topic] == nil {
			offsets[p.topic] = make(map[int32]kgo.EpochOffset)
		}
		offsets[p.topic][p.partition] = kgo.EpochOffset{Epoch: e.c.LeaderEpoch, Offset: e.c.Offset}
	}
	crash.Here(crash.KafkaBeforeCommit)
	var req *kmsg.OffsetCommitRequest
	var resp *kmsg.OffsetCommitResponse
	var err error
	s.client.CommitOffsetsSync(ctx, offsets, func(_ *kgo.Client, rq *kmsg.OffsetCommitRequest, rs *kmsg.OffsetCommitResponse, e error) {
		req, resp, err = rq, rs, e
	})
	m := s.cfg.Metrics
	switch {
	case errors.Is(err, errExpelled):
		s.fatal(err)
		return err
	case errors.Is(err, errLaneDied):
		return err
	case err != nil:
		m.commits.WithLabelValues("unanswered").Inc()
		return s.cfg.explain(fmt.Sprintf("commit offsets of group %q", s.cfg.Group), err)
	case resp == nil:
		return fmt.Errorf("commit offsets of group %q: the client gave no answer", s.cfg.Group)
	}
	crash.Here(crash.KafkaAfterCommit)
	return s.settle(req, resp, entries)
}

// lastLook is called by the client just before the request is written, after
// it has waited for a rebalance. It adds the notes.
//
// What it guards against: the offsets are read; a rebalance begins, and the
// client holds the commit until it is over; the group did not know the member
// and gave it a new id, while another member moved the positions on; the held
// commit goes out under the new id, and the group goes back.
func (s *session) lastLook(req *kmsg.OffsetCommitRequest, entries map[place]entry) error {
	s.mu.Lock()
	id := s.memberID
	s.mu.Unlock()
	if req.MemberID == "" || req.Generation < 0 || req.MemberID != id {
		return fmt.Errorf("%w: the commit would go out under another member id than the one the partitions were given to", errExpelled)
	}
	for ti := range req.Topics {
		t := &req.Topics[ti]
		for pi := range t.Partitions {
			e, ok := entries[place{t.Topic, t.Partitions[pi].Partition}]
			if !ok || !e.h.lane.Alive() {
				return errLaneDied
			}
			if s.noNotes {
				t.Partitions[pi].Metadata = nil
				continue
			}
			n := note{
				Offset: e.c.Offset, TopicID: topicIDText(e.h.lane.TopicID()), Incarnation: s.cfg.Incarnation,
				Epoch: e.h.lane.Epoch(), Owner: s.id, Clean: e.c.Clean, Rows: e.c.Rows,
			}
			if !e.c.Time.IsZero() {
				n.Time = e.c.Time.UnixMilli()
			}
			if e.c.Row.Known {
				n.Row = &noteRow{Epoch: e.c.Row.Epoch, Incarnation: e.c.Row.Incarnation}
			}
			if k := e.h.taking; k != nil {
				n.Begin, n.GoneFrom, n.GoneTo = k.begin, k.gone.From, k.gone.To
			}
			text := n.encode()
			t.Partitions[pi].Metadata = &text
		}
	}
	crash.Here(crash.KafkaLastLook)
	return nil
}

// settle takes in a commit's answer, partition by partition: the errors are
// nowhere else.
func (s *session) settle(req *kmsg.OffsetCommitRequest, resp *kmsg.OffsetCommitResponse, entries map[place]entry) error {
	names := make(map[[16]byte]string, len(req.Topics))
	for i := range req.Topics {
		names[req.Topics[i].TopicID] = req.Topics[i].Topic
	}
	m := s.cfg.Metrics
	var first, expelled error
	answered := 0
	for ti := range resp.Topics {
		name := resp.Topics[ti].Topic
		if name == "" {
			name = names[resp.Topics[ti].TopicID] // newer answers name topics by id only
		}
		for _, p := range resp.Topics[ti].Partitions {
			e, ok := entries[place{name, p.Partition}]
			if !ok {
				continue
			}
			answered++
			v := judge(p.ErrorCode)
			if v == committed {
				if err := e.h.lane.Committed(e.c); err != nil && !errors.Is(err, lane.ErrDead) {
					s.broken(err)
				}
				e.h.sender.poke() // it may wait for its first commit, or for room
				s.wakeTaking()    // or to claim what its first commit has noted
				m.commits.WithLabelValues("ok").Inc()
				continue
			}
			m.commits.WithLabelValues(codeLabel(p.ErrorCode)).Inc()
			why := fmt.Errorf("commit offset %d of %s in group %q: %w", e.c.Offset, e.h.place, s.cfg.Group, kerr.ErrorForCode(p.ErrorCode))
			if first == nil {
				first = why
			}
			switch v {
			case fenced:
				expelled = why
			case topicGone:
				s.gapFound(e.h, kerr.ErrorForCode(p.ErrorCode))
			case noteTooBig:
				if s.cfg.Progress != nil {
					s.fatal(&decode.Refusal{
						Reason: decode.ReasonSetup, What: "note", Where: fmt.Sprintf("%s, group %q", e.h.place, s.cfg.Group),
						Why:      "the brokers refuse the note beside the offset as too large, and the progress table cannot be used without it",
						Expected: fmt.Sprintf("offset.metadata.max.bytes of at least %d", maxNote),
						Do:       "raise it on the brokers, or set KAFKASINK_DELIVERY=at_least_once",
					})
					return why
				}
				s.noNotes = true
			case later, denied, committed:
			}
		}
	}
	switch {
	case errors.Is(expelled, kerr.FencedInstanceID):
		s.fatal(s.cfg.explain("commit offsets", expelled)) // to join anew would put the other one out
		return expelled
	case expelled != nil:
		s.expelled(expelled)
		return expelled
	}
	if first == nil && answered < len(entries) {
		return fmt.Errorf("commit offsets of group %q: the answer left out %d of %d partitions", s.cfg.Group, len(entries)-answered, len(entries))
	}
	if first == nil {
		s.mu.Lock()
		s.lastCommit = time.Now()
		s.mu.Unlock()
	}
	return first
}
