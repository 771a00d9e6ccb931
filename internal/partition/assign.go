package partition

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/partition/lane"
	"holdfast/internal/sabotage"
)

// adminTimeout bounds one look at the cluster.
const adminTimeout = 10 * time.Second

// fetchedOffset is what the coordinator said about one partition.
type fetchedOffset struct {
	topic     string // "" where the answer named the topic by id
	topicID   [16]byte
	partition int32
	offset    int64
	metadata  string
}

// onAssigned notes what is ours. The lanes are made when the committed
// offsets are known, by placeLanes, which the client calls next; until then
// no record can come.
//
// The client calls it at the end of every rebalance, also when nothing was
// added.
func (s *session) onAssigned(_ context.Context, client *kgo.Client, m map[string][]int32) {
	<-s.ready
	s.cfg.Metrics.rebalances.Inc()
	id, _ := client.GroupMetadata()
	s.mu.Lock()
	survivors := len(s.lanes) > 0 && s.memberID != "" && s.memberID != id
	s.memberID = id
	s.groupErr = nil
	for topic, parts := range m {
		for _, p := range parts {
			s.assigned[place{topic, p}] = true
		}
	}
	s.mu.Unlock()
	if survivors {
		// Joining, the group did not know the old member: it was expelled, and
		// whoever had its partitions since may have moved their positions.
		s.expelled(errors.New("the group gave this process a new member id while it held partitions"))
	}
}

// expelled ends the session for one that joins anew.
func (s *session) expelled(why error) {
	crash.Here(crash.KafkaLost)
	s.fatal(fmt.Errorf("%w: %w", errExpelled, why))
}

// onOffsetsFetched keeps the metadata of the committed offsets for placeLanes,
// which the client calls next on the same goroutine and which sees no metadata.
func (s *session) onOffsetsFetched(_ context.Context, _ *kgo.Client, resp *kmsg.OffsetFetchResponse) error {
	var out []fetchedOffset
	for gi := range resp.Groups {
		for ti := range resp.Groups[gi].Topics {
			t := &resp.Groups[gi].Topics[ti]
			for _, p := range t.Partitions {
				f := fetchedOffset{topic: t.Topic, topicID: t.TopicID, partition: p.Partition, offset: p.Offset}
				if p.Metadata != nil {
					f.metadata = *p.Metadata
				}
				out = append(out, f)
			}
		}
	}
	s.mu.Lock()
	s.fetched = out
	s.mu.Unlock()
	return nil
}

// situation is what is known about a partition that is being taken over.
type situation struct {
	place
	committed int64 // lane.NoCommit if there is none
	metadata  string
	topicID   [16]byte // as the cluster has it now
	start     int64    // the log's start and end; known only without a commit
	end       int64    // or when the topic was made anew
	// added: the group has offsets for other partitions of the topic, so this
	// one was added to it later.
	added  bool
	remade bool // the topic was found to be made anew, by policy read from its start
	owner  string
}

// placement is where a lane begins.
type placement struct {
	offset    int64
	committed int64
	epoch     int64
	// wait: the last owner may have requests that are still to be applied.
	wait  string
	gap   string // the reason of a gap that is passed over
	begin int64  // where the group began to deliver the partition
	note  note
	known bool // note is one of ours
}

// takeOver decides where to begin. A nil error with ok=false never happens:
// either there is a placement or a reason why not.
func takeOver(cfg *Config, at situation) (placement, error) {
	out := placement{offset: at.committed, committed: at.committed, epoch: 1}
	if at.committed == lane.NoCommit {
		switch {
		case at.remade:
			out.offset, out.gap = at.start, gapRecreated
		case cfg.Start == StartEarliest, cfg.Start == StartLatest && at.added:
			out.offset = at.start
		case cfg.Start == StartLatest:
			out.offset, out.begin = at.end, at.end
		default:
			return out, &decode.Refusal{
				Reason: decode.ReasonGap, What: "partition", Where: at.String(),
				Why:      fmt.Sprintf("group %q has no committed offset for it (the log has %d to %d): either it never ran, or its offsets expired", cfg.Group, at.start, at.end),
				Expected: "a committed offset, since KAFKASINK_START is stop",
				Do:       "set the group's offset for the partition, or set KAFKASINK_START=earliest|latest",
			}
		}
		return out, nil
	}
	n, err := parseNote(at.metadata, at.committed)
	if err != nil {
		if out.wait = err.Error(); !errors.Is(err, errMoved) {
			out.begin = at.committed // whoever set it wants nothing of before
		}
		return out, nil // metadata of others is normal; it only means to wait
	}
	out.note, out.known, out.epoch, out.begin = n, true, n.Epoch+1, n.Begin
	if (cfg.Progress == nil || n.Row == nil) && cfg.OnLoss == LossStop && n.Rows > 0 && n.Incarnation != "" && n.Incarnation != cfg.Incarnation {
		return out, &decode.Refusal{
			Reason: decode.ReasonGap, What: "pipeline", Where: at.String(),
			Why:      fmt.Sprintf("it restarted (incarnation %s, before %s): rows below offset %d may be missing from it", cfg.Incarnation, n.Incarnation, n.Rows),
			Expected: "the same incarnation, since KAFKASINK_ON_DESTINATION_LOSS is stop",
			Do:       fmt.Sprintf("compare the table with the topic, then set the offset from which to go on: kafkasink offsets reset %s:%d", at.topic, at.partition),
		}
	}
	// Where this session wrote the note itself, its senders know which of
	// their requests have no outcome, and wait for them.
	if !n.Clean && n.Owner != at.owner && !sabotage.On(sabotage.HandOverWithoutWait) {
		out.wait = fmt.Sprintf("the last owner (epoch %d) left no clean note", n.Epoch)
	}
	if id := topicIDText(at.topicID); n.TopicID != "" && id != "" && n.TopicID != id {
		if cfg.OnGap == GapStop {
			return out, recreated(at.place, at.committed, n.TopicID, id, at.start, at.end)
		}
		out.offset, out.committed, out.gap = at.start, lane.NoCommit, gapRecreated
		// They are the other topic's.
		out.note.Time, out.note.Rows, out.note.Row, out.begin = 0, 0, nil, 0
		out.note.GoneFrom, out.note.GoneTo = 0, 0
	}
	return out, nil
}

// placeLanes makes the lanes of newly assigned partitions and tells the client
// where to fetch. An error ends the group session, and the client tries again
// after a backoff.
func (s *session) placeLanes(ctx context.Context, offsets map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	<-s.ready
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	topics, err := s.admin.ListTopics(ctx, s.cfg.topics()...)
	if err != nil {
		return nil, s.cfg.explain("look up topics", err)
	}
	found, err := s.situations(ctx, topics, offsets)
	if err != nil {
		return nil, err
	}
	for _, at := range found {
		pl, err := takeOver(s.cfg, at)
		if err != nil {
			s.mu.Lock()
			s.refused[at.place] = err
			s.mu.Unlock()
			delete(offsets[at.topic], at.partition)
			s.log.ErrorContext(ctx, "partition not taken", slog.String("topic", at.topic), slog.Int64("partition", int64(at.partition)), slog.Any("err", err))
			s.cfg.Metrics.gaps.WithLabelValues(gapReason(err)).Inc()
			continue
		}
		if pl.gap != "" {
			s.cfg.Metrics.gaps.WithLabelValues(pl.gap).Inc()
			s.log.WarnContext(ctx, "topic was made anew; reading it from its start", slog.String("topic", at.topic),
				slog.Int64("partition", int64(at.partition)), slog.Int64("committed", at.committed), slog.Int64("offset", pl.offset))
		}
		if pl.offset != at.committed {
			offsets[at.topic][at.partition] = kgo.NewOffset().At(pl.offset).WithEpoch(-1)
		}
		s.place(ctx, at, pl, offsets[at.topic][at.partition].EpochOffset().Epoch)
	}
	wake(s.kick) // nothing is sent before the lane has written its note
	return offsets, nil
}

// situations looks up what takeOver needs to know.
func (s *session) situations(ctx context.Context, topics kadm.TopicDetails, offsets map[string]map[int32]kgo.Offset) ([]situation, error) {
	s.mu.Lock()
	metadata := make(map[place]fetchedOffset, len(s.fetched))
	for _, f := range s.fetched {
		for name, d := range topics {
			if f.topic == name || f.topic == "" && f.topicID == d.ID {
				metadata[place{name, f.partition}] = f
			}
		}
	}
	var out []situation
	var bounds, added bool
	for topic, parts := range offsets {
		for p, o := range parts {
			at := situation{place: place{topic, p}, committed: o.EpochOffset().Offset, topicID: topics[topic].ID, remade: s.remade[topic], owner: s.id}
			if !s.assigned[at.place] {
				continue // nobody assigned it: it gets no lane, and its records are dropped
			}
			f, ok := metadata[at.place]
			switch {
			case at.committed < 0 || ok && f.offset < 0:
				at.committed = lane.NoCommit
				bounds = true
				added = added || s.cfg.Start == StartLatest
			case ok && f.offset == at.committed:
				at.metadata = f.metadata
				if n, err := parseNote(at.metadata, at.committed); err == nil && n.TopicID != topicIDText(at.topicID) {
					bounds = true
				}
			}
			out = append(out, at)
		}
	}
	s.mu.Unlock()

	if bounds {
		starts, ends, err := s.listBounds(ctx)
		if err != nil {
			return nil, err
		}
		for i := range out {
			if out[i].start, out[i].end, err = boundsOf(starts, ends, out[i].place); err != nil {
				return nil, err
			}
		}
	}
	if added {
		committed, err := s.admin.FetchOffsets(ctx, s.cfg.Group)
		if err != nil {
			return nil, s.cfg.explain("look up the group's offsets", err)
		}
		for i := range out {
			for _, o := range committed[out[i].topic] {
				out[i].added = out[i].added || o.Err == nil && o.At >= 0
			}
		}
	}
	return out, nil
}

// listBounds lists the logs' starts and ends.
func (s *session) listBounds(ctx context.Context) (starts, ends kadm.ListedOffsets, err error) {
	if starts, err = s.admin.ListStartOffsets(ctx, s.cfg.topics()...); err != nil {
		return nil, nil, s.cfg.explain("list the logs' starts", err)
	}
	if ends, err = s.admin.ListEndOffsets(ctx, s.cfg.topics()...); err != nil {
		return nil, nil, s.cfg.explain("list the logs' ends", err)
	}
	return starts, ends, nil
}

func boundsOf(starts, ends kadm.ListedOffsets, p place) (start, end int64, err error) {
	from, ok := starts.Lookup(p.topic, p.partition)
	to, ok2 := ends.Lookup(p.topic, p.partition)
	if !ok || !ok2 {
		return 0, 0, fmt.Errorf("list the log of %s: the brokers gave no bounds for it", p)
	}
	if err := errors.Join(from.Err, to.Err); err != nil {
		return 0, 0, fmt.Errorf("list the log of %s: %w", p, err)
	}
	return from.Offset, to.Offset, nil
}

// place makes the lane.
func (s *session) place(ctx context.Context, at situation, pl placement, leaderEpoch int32) {
	now := time.Now()
	cfg := lane.Config{
		Topic: at.topic, TopicID: at.topicID, Partition: at.partition, Epoch: pl.epoch,
		Start: pl.offset, StartLeaderEpoch: leaderEpoch, Committed: pl.committed, NotBefore: now,
		StartTime: pl.note.time(), StartRows: pl.note.Rows,
		Limits: lane.Limits{HighRecords: s.cfg.LaneRecords, HighBytes: s.cfg.LaneMemory},
	}
	if pl.wait != "" && s.cfg.RequestLifetime > 0 {
		cfg.NotBefore = now.Add(s.cfg.RequestLifetime)
	}
	s.mu.Lock()
	if until := s.notBefore[at.place]; pl.wait == "" && pl.note.Owner == s.id && until.After(now) {
		cfg.NotBefore, pl.wait = until, "an owner before this session left no clean note"
	}
	s.notBefore[at.place] = cfg.NotBefore
	s.mu.Unlock()
	var k *taking
	if s.cfg.Progress != nil {
		k = pl.taking()
		cfg.Progress = &lane.Progress{Row: lane.Row{Known: k.noted.Known, Epoch: k.noted.RowEpoch, Incarnation: k.noted.RowIncarnation}}
	}
	l := lane.New(cfg)
	if sabotage.On(sabotage.CleanNoteKept) && pl.note.Clean {
		keepNote(l, now)
	}
	s.enter(l, pl.wait, k)
	s.wakeTaking()
	attrs := []any{
		slog.String("topic", at.topic), slog.Int64("partition", int64(at.partition)), slog.Int64("offset", pl.offset),
		slog.Int64("epoch", pl.epoch), slog.Duration("wait", cfg.NotBefore.Sub(now)),
	}
	if pl.wait != "" {
		attrs = append(attrs, slog.String("wait_for", pl.wait))
	}
	s.log.InfoContext(ctx, "partition taken", attrs...)
	if (s.cfg.Progress == nil || pl.note.Row == nil) && pl.known && pl.note.Incarnation != "" && s.cfg.Incarnation != "" && pl.note.Incarnation != s.cfg.Incarnation {
		s.log.WarnContext(ctx, "the pipeline is another incarnation than the one that completed the rows below the committed offset",
			slog.String("topic", at.topic), slog.Int64("partition", int64(at.partition)), slog.Int64("offset", at.committed),
			slog.String("was", pl.note.Incarnation), slog.String("now", s.cfg.Incarnation))
	}
}

// sourceOf names a topic among all that can feed a table. The id tells it from
// one that had its name before, whose offsets were the same. The group is no
// part of it: the record is the same one, whoever reads it.
func sourceOf(topic string, id [16]byte, cluster string) string {
	if id == noTopicID {
		return topic + "@" + cluster
	}
	return topic + "@" + topicIDText(id)
}

// taking is what the note says for the decision about the progress table.
func (pl *placement) taking() *taking {
	k := &taking{noted: feldera.Noted{Epoch: pl.epoch - 1}, begin: pl.begin, gone: span{pl.note.GoneFrom, pl.note.GoneTo}}
	if pl.known {
		pl.note.completed(&k.noted)
	}
	return k
}

// enter makes a lane the partition's own, in place of one that was there.
func (s *session) enter(l *lane.Lane, waits string, k *taking) *held {
	route := s.routes[l.Topic()]
	h := &held{
		place: place{l.Topic(), l.Partition()}, lane: l, route: route, sender: s.senders[route.Destination], source: sourceOf(l.Topic(), l.TopicID(), s.cfg.Cluster),
		waits: waits, taking: k,
	}
	s.mu.Lock()
	old := s.lanes[h.place]
	s.mu.Unlock()
	if old != nil {
		s.bury(old)
	}
	s.mu.Lock()
	s.lanes[h.place] = h
	delete(s.refused, h.place)
	s.mu.Unlock()
	h.sender.join(h)
	return h
}

// onRevoked gives partitions up in order. The client calls it with an empty
// map at the end of every session.
func (s *session) onRevoked(_ context.Context, _ *kgo.Client, m map[string][]int32) {
	<-s.ready
	hs := s.disown(m)
	if len(hs) == 0 {
		return
	}
	wait := s.cfg.DrainTimeout
	if s.cfg.Revoke == RevokeAbandon {
		wait = 0
	}
	s.retire(hs, wait, "revoked")
}

// onLost gives partitions up at once: they are somebody else's by now.
func (s *session) onLost(_ context.Context, _ *kgo.Client, m map[string][]int32) {
	<-s.ready
	crash.Here(crash.KafkaLost)
	for _, h := range s.disown(m) {
		s.givenUp(h, s.bury(h), "lost", "none")
		s.cfg.Metrics.drains.WithLabelValues("lost").Inc()
	}
	s.applyPauses()
}

// disown takes partitions out of the assignment and gives their lanes.
func (s *session) disown(m map[string][]int32) []*held {
	s.mu.Lock()
	defer s.mu.Unlock()
	var hs []*held
	for topic, parts := range m {
		for _, n := range parts {
			p := place{topic, n}
			delete(s.assigned, p)
			delete(s.refused, p)
			delete(s.ends, p)
			if h := s.lanes[p]; h != nil {
				hs = append(hs, h)
			}
		}
	}
	return hs
}

// retire drains lanes for at most wait, commits them and kills them. The
// client's heartbeats go on meanwhile.
func (s *session) retire(hs []*held, wait time.Duration, why string) {
	if len(hs) == 0 {
		return
	}
	if why == "revoked" {
		crash.Here(crash.KafkaRevoke)
	}
	for _, h := range hs {
		h.lane.Drain()
		h.sender.poke()
	}
	outcome := s.awaitDrained(hs, wait)
	if why == "revoked" {
		crash.Here(crash.KafkaDrain)
	}
	s.commitMu.Lock()
	err := s.commit(s.life, hs, true)
	for _, h := range hs {
		left := s.bury(h)
		s.givenUp(h, left, why, outcome)
		if sabotage.On(sabotage.CommitAfterRevoke) {
			s.commitLater(s.life, h, left.From)
		}
	}
	s.commitMu.Unlock()
	s.cfg.Metrics.drains.WithLabelValues(outcome).Inc()
	if err != nil {
		s.log.WarnContext(s.life, "last commit before giving partitions up did not succeed; the next owner reads some records again", slog.Any("err", err))
	}
	s.applyPauses()
}

// givenUp says which offsets a lane leaves for the next owner to read again:
// from committed up to received.
func (s *session) givenUp(h *held, left lane.Abandoned, why, drain string) {
	level := slog.LevelInfo
	if left.InFlight > 0 {
		level = slog.LevelWarn
	}
	s.log.Log(s.life, level, "partition given up", slog.String("topic", h.topic), slog.Int64("partition", int64(h.partition)),
		slog.String("why", why), slog.String("drain", drain), slog.Int64("committed", left.From), slog.Int64("completed", left.Completed),
		slog.Int64("received", left.Next), slog.Int("in_flight_records", left.InFlight))
}

// awaitDrained waits until the lanes have drained, and says how it ended.
func (s *session) awaitDrained(hs []*held, wait time.Duration) string {
	if wait <= 0 {
		wait = 0
	}
	deadline := time.NewTimer(wait)
	defer deadline.Stop()
	for {
		changed := s.changed.next()
		open := false
		for _, h := range hs {
			open = open || !h.lane.Drained()
		}
		if !open {
			return "clean"
		}
		if wait == 0 {
			return "abandoned"
		}
		select {
		case <-changed:
		case <-deadline.C:
			return "deadline"
		case <-s.cfg.StopNow:
			return "abandoned"
		}
	}
}

// bury kills a lane, takes it out of everything that knows it, and gives what
// it leaves behind.
func (s *session) bury(h *held) lane.Abandoned {
	left := h.lane.Kill()
	s.mu.Lock()
	if s.lanes[h.place] == h {
		delete(s.lanes, h.place)
	}
	s.mu.Unlock()
	h.sender.leave(h)
	s.changed.ring()
	return left
}
