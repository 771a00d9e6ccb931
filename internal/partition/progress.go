package partition

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"

	"holdfast/internal/ack"
	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/partition/lane"
)

// Progress has the partitions' progress recorded in the pipeline's progress
// table: rows are completed by the progress row behind them, a partition that
// is taken begins where the pipeline provably is, and what it lost is noticed.
type Progress struct {
	// Open gives a source's part of the table. The source's name is made of the
	// cluster's id and the group.
	Open func(source string) (*feldera.ProgressStore, error)
}

// recorder is a session's part for the progress table. One goroutine, taking,
// decides about partitions and claims them; another, recording, writes a row
// behind what is ingested. A claim waits for its completion, and rows of other
// partitions do not wait for that.
//
// The order of events for a partition, of which test/model has every
// interleaving: the life of the predecessor's requests is over; rows are read;
// it is decided; a commit that moves nothing notes the epoch; the claim is sent;
// it is completed; records are sent.
type recorder struct {
	s      *session
	store  *feldera.ProgressStore
	source string
	// take and record have their goroutines look again.
	take, record chan struct{}
}

// maxTogether bounds the partitions whose rows share an array.
const maxTogether = 500

// taking is what a lane's owner keeps of the progress table. The goroutine
// "taking" owns it until the lane is claimed, then "recording" does, but for
// what is under mu.
type taking struct {
	noted feldera.Noted
	// begin is where the group began to deliver the partition; a loss never
	// goes back behind it.
	begin int64
	// given up: no decision is possible, and the lane is blocked for that; or
	// another lane takes its place.
	givenUp bool
	row     *feldera.ProgressLane
	// until is the offset that was committed when the pipeline was found to
	// have lost rows; 0 for no loss.
	until int64
	// gone are offsets that the pipeline lost when retention had taken them; a
	// person has to see to them.
	gone span

	mu sync.Mutex
	// evidence of ingested ranges, by their Next; at most what is in flight.
	evidence map[int64]feldera.Evidence
}

// span is a range of offsets, To excluded; empty where both are 0.
type span struct{ From, To int64 }

func (a span) empty() bool { return a.To <= a.From }

// with gives the range that covers both.
func (a span) with(b span) span {
	if a.empty() {
		return b
	}
	return span{min(a.From, b.From), max(a.To, b.To)}
}

// openRecorder opens the source's part of the table.
func (s *session) openRecorder() (*recorder, error) {
	if s.cfg.Cluster == "" {
		return nil, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "progress table", Where: "group " + s.cfg.Group,
			Why: "the brokers give no cluster id, so rows of this group could not be told from those of the same group elsewhere",
			Do:  "set KAFKASINK_DELIVERY=at_least_once",
		}
	}
	r := &recorder{s: s, source: progressSource(s.cfg.Cluster, s.cfg.Group), take: make(chan struct{}, 1), record: make(chan struct{}, 1)}
	var err error
	r.store, err = s.cfg.Progress.Open(r.source)
	return r, err
}

// runRecorder works with the progress table until ctx ends.
func (s *session) runRecorder(ctx context.Context) {
	r, err := s.openRecorder()
	if err != nil {
		s.fatal(err)
		return
	}
	s.recorder.Store(r)
	var running sync.WaitGroup
	running.Go(func() { r.recording(ctx) })
	r.taking(ctx)
	running.Wait()
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// wakeTaking has lanes looked at that were made or have announced their epoch.
func (s *session) wakeTaking() {
	if r := s.recorder.Load(); r != nil {
		wake(r.take)
	}
}

// ended ends the session for an error of the progress table.
func (r *recorder) ended(ctx context.Context, err error) {
	var changed *feldera.IncarnationChanged
	switch {
	case errors.As(err, &changed):
		r.s.fatal(changed)
	case ctx.Err() == nil:
		r.s.fatal(err)
	}
}

// taking decides about lanes and claims them, until ctx ends.
func (r *recorder) taking(ctx context.Context) {
	for {
		undecided, unclaimed, next := r.toTake(time.Now())
		var err error
		switch {
		case len(undecided) > 0:
			err = r.decide(ctx, undecided)
		case len(unclaimed) > 0:
			err = r.claim(ctx, unclaimed)
		default:
			timer := time.NewTimer(next)
			select {
			case <-ctx.Done():
				timer.Stop()
				return
			case <-r.take:
			case <-timer.C:
			}
			timer.Stop()
			continue
		}
		if err != nil {
			r.ended(ctx, err)
			return
		}
	}
}

// toTake gives the lanes that can be decided about, those that can be claimed,
// and the time until there are more by themselves.
func (r *recorder) toTake(now time.Time) (undecided, unclaimed []*held, next time.Duration) {
	next = untilPoked
	for _, h := range r.s.everything() {
		if h.taking.givenUp {
			continue
		}
		switch h.lane.Stage() {
		case lane.Undecided:
			if left := h.lane.NotBefore().Sub(now); left > 0 {
				next = min(next, left)
			} else if len(undecided) < maxTogether {
				undecided = append(undecided, h)
			}
		case lane.Unclaimed:
			if len(unclaimed) < maxTogether {
				unclaimed = append(unclaimed, h)
			}
		case lane.Announcing, lane.Claimed:
		}
	}
	return undecided, unclaimed, next
}

// laneName names a lane's partition in the progress table.
func laneName(l *lane.Lane) string { return laneNameOf(l.TopicID(), l.Topic(), l.Partition()) }

// laneNameOf names a partition in the progress table: by the topic's id, since
// the same name may be another topic by now.
func laneNameOf(topicID [16]byte, topic string, partition int32) string {
	id := topicIDText(topicID)
	if id == "" {
		id = topic
	}
	return fmt.Sprintf("%s/%d", id, partition)
}

// progressSource names a group among all that write to a progress table.
func progressSource(cluster, group string) string { return cluster + "/" + group }

// mapping is the fingerprint of where the rows of the lane's topic go.
func (h *held) mapping() string { return mappingOf(h.topic, h.route.Table) }

// mappingOf is the fingerprint of where a topic's rows go. table is as the
// engine spells it.
func mappingOf(topic, table string) string { return feldera.Fingerprint(topic, table) }

func offsetText(position uint64) string { return fmt.Sprintf("offset %d", position) }

// decide finds out what the pipeline holds of the lanes, and follows from it.
func (r *recorder) decide(ctx context.Context, hs []*held) error {
	found, err := r.store.Read(ctx, nil)
	var refused *decode.Refusal
	if errors.As(err, &refused) {
		for _, h := range hs {
			r.giveUp(h, refused)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("find out what the pipeline holds: %w", err)
	}
	logs := sync.OnceValue(func() logStarts {
		starts, ends, err := r.s.listBounds(ctx)
		return logStarts{starts, ends, err}
	})
	var again error
	for _, h := range hs {
		dec := feldera.Decide(found.Lanes[laneName(h.lane)], h.taking.noted, found.Incarnation, h.mapping())
		err := r.heed(ctx, h, &dec, logs)
		var unknown *boundsError
		if errors.As(err, &unknown) {
			again = unknown.err
		} else if err != nil {
			return err
		}
	}
	wake(r.s.kick)
	if again == nil || ctx.Err() != nil {
		return nil
	}
	r.s.log.WarnContext(ctx, "the logs' bounds could not be looked up; it is tried again", slog.Any("err", again))
	timer := time.NewTimer(retryWait(1))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return nil
}

// logStarts is what was found out about the logs' bounds.
type logStarts struct {
	starts, ends kadm.ListedOffsets
	err          error
}

// boundsError says that a lane stays undecided, since its log's bounds are not
// known.
type boundsError struct{ err error }

func (e *boundsError) Error() string { return e.err.Error() }

// giveUp stops a lane that nothing can be decided about.
func (r *recorder) giveUp(h *held, why *decode.Refusal) {
	h.taking.givenUp = true
	at, counts := h.lane.BlockSending(why)
	if counts {
		r.s.cfg.Metrics.stopped.WithLabelValues(h.topic, reasonOf(why)).Inc()
		r.s.log.ErrorContext(r.s.life, "partition stopped", slog.String("topic", h.topic), slog.Int64("partition", int64(h.partition)),
			slog.Int64("offset", at), slog.Any("err", why))
	}
	r.s.applyPauses()
}

// heed follows from a decision: the lane goes on where it stands, is made anew
// where the pipeline is, or stops.
func (r *recorder) heed(ctx context.Context, h *held, dec *feldera.Decision, logs func() logStarts) error {
	s := r.s
	start, rows := h.lane.Begins()
	reason := dec.Reason(offsetText)
	s.cfg.Metrics.progressFound.WithLabelValues(dec.Found.String()).Inc()
	level := slog.LevelInfo
	switch dec.Found {
	case feldera.ProgressForeign, feldera.ProgressLost:
		level = slog.LevelError
	case feldera.ProgressRemapped, feldera.ProgressReset:
		level = slog.LevelWarn
	default:
	}
	s.log.Log(ctx, level, "progress of the pipeline", slog.String("topic", h.topic), slog.Int64("partition", int64(h.partition)),
		slog.String("found", dec.Found.String()), slog.Int64("offset", start), slog.Int64("epoch", dec.Epoch), slog.String("reason", reason))

	held := int64(dec.Held) //nolint:gosec // this program wrote it from an int64, or it is refused below
	if held < 0 {
		r.giveUp(h, &decode.Refusal{Reason: decode.ReasonMalformed, What: "progress row", Where: h.String(), Why: "its position is no offset", Do: "look at the rows of source " + r.source})
		return nil
	}
	position := dec.Held
	switch dec.Found {
	case feldera.ProgressForeign:
		r.giveUp(h, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "progress table", Where: fmt.Sprintf("%s, source %s", h.place, r.source),
			Why: reason, Expected: "the epoch in the note beside the committed offset, or one below: a group has one progress",
			Do: "stop whoever else writes as this group; where the group's offsets were put back to an older copy, set them on purpose: kafkasink offsets reset",
		})
		return nil
	case feldera.ProgressLost:
		return r.lost(h, dec, reason, logs)
	case feldera.ProgressAhead:
		if held > start {
			s.cfg.Metrics.heldOffsets.Add(float64(held - start))
			row := lane.Row{Known: true, Epoch: h.taking.noted.RowEpoch, Incarnation: h.taking.noted.RowIncarnation}
			return r.move(h, dec, destinationOf{to: held, announce: start, row: row, rows: rows, gone: h.taking.gone})
		}
	case feldera.ProgressReset:
		position = uint64(start) //nolint:gosec // an offset
		h.taking.begin = 0
	case feldera.ProgressFresh:
		position = uint64(rows) //nolint:gosec // an offset
	case feldera.ProgressEqual, feldera.ProgressRemapped:
		position = h.taking.noted.Produced
	}
	row, err := r.store.Lane(laneName(h.lane), dec, position)
	if err != nil {
		return err
	}
	h.taking.row = row.Under(h.mapping())
	h.lane.Decide(dec.Epoch) // where it does not, the lane is over
	return nil
}

// lost rewinds a lane to what the pipeline holds, or stops it.
func (r *recorder) lost(h *held, dec *feldera.Decision, reason string, logs func() logStarts) error {
	s := r.s
	held := int64(dec.Held) //nolint:gosec // looked at by heed
	committed, _ := h.lane.Begins()
	to := max(held, min(h.taking.begin, committed))
	if s.cfg.OnLoss == LossStop {
		r.giveUp(h, &decode.Refusal{
			Reason: decode.ReasonGap, What: "pipeline", Where: fmt.Sprintf("%s, table %s", h.place, h.route.Table),
			Why:      fmt.Sprintf("%s: the group has committed offset %d, and the pipeline holds what lies below %d", reason, committed, to),
			Expected: "a pipeline that keeps what it has completed, since KAFKASINK_ON_DESTINATION_LOSS is stop",
			Do:       fmt.Sprintf("set KAFKASINK_ON_DESTINATION_LOSS=heal to deliver again from offset %d, or set the group's offset: kafkasink offsets reset", to),
		})
		return nil
	}
	now := logs()
	if now.err != nil {
		return &boundsError{now.err}
	}
	start, _, err := boundsOf(now.starts, now.ends, h.place)
	if err != nil {
		return &boundsError{err}
	}
	return r.rewind(h, dec, to, start, committed)
}

// rewind makes the lane anew at what the pipeline holds, or at the log's start
// where retention has taken what comes next. The group's offset goes back with
// its first commit.
func (r *recorder) rewind(h *held, dec *feldera.Decision, to, logStart, committed int64) error {
	s := r.s
	gone := h.taking.gone
	from := max(to, min(logStart, committed))
	attrs := []any{
		slog.String("topic", h.topic), slog.Int64("partition", int64(h.partition)), slog.Int64("from", from), slog.Int64("committed", committed),
		slog.Uint64("held", dec.Held), slog.Int64("log_start", logStart),
	}
	if from > to {
		gone = gone.with(span{to, from})
		s.cfg.Metrics.goneOffsets.Add(float64(from - to))
		s.log.ErrorContext(s.life, "the pipeline lost rows that retention has taken from the log: these offsets cannot be delivered again, deletes included; the rest is",
			append(attrs, slog.Int64("gone_from", to), slog.Int64("gone_to", from-1))...)
	} else {
		s.log.WarnContext(s.life, "the pipeline lost rows: the partition is delivered again, and the group's offset goes back", attrs...)
	}
	s.cfg.Metrics.rewoundOffsets.Add(float64(committed - from))
	epoch, incarnation := dec.Completed()
	return r.move(h, dec, destinationOf{
		to: from, announce: from, row: lane.Row{Known: true, Epoch: epoch, Incarnation: incarnation},
		rows: int64(dec.Held), until: committed, gone: gone, //nolint:gosec // looked at by heed
	})
}

// destinationOf is where a lane is made anew: it reads from to, and its first
// commit is of announce, with row and rows in its note.
type destinationOf struct {
	to, announce int64
	row          lane.Row
	rows         int64
	until        int64
	gone         span
}

// move makes a lane anew at another offset.
func (r *recorder) move(h *held, dec *feldera.Decision, d destinationOf) error {
	s := r.s
	hold, err := r.store.Lane(laneName(h.lane), dec, dec.Held)
	if err != nil {
		return err
	}
	h.taking.givenUp = true // the new lane takes its place
	s.between(func() {
		s.mu.Lock()
		own := s.lanes[h.place] == h
		s.mu.Unlock()
		if !own || !h.lane.Sending() {
			return
		}
		old := h.lane
		committed := old.Snapshot().Committed
		if d.announce != committed {
			committed = lane.NoCommit // nothing is acknowledged of the new lane
		}
		l := lane.New(lane.Config{
			Topic: h.topic, TopicID: old.TopicID(), Partition: h.partition, Epoch: dec.Epoch,
			Start: d.to, StartLeaderEpoch: -1, StartRows: d.rows, Committed: committed, NotBefore: old.NotBefore(),
			Limits:   lane.Limits{HighRecords: s.cfg.LaneRecords, HighBytes: s.cfg.LaneMemory},
			Progress: &lane.Progress{Row: d.row, Decided: true, Announce: d.announce},
		})
		s.enter(l, h.waits, &taking{begin: h.taking.begin, row: hold.Under(h.mapping()), until: d.until, gone: d.gone})
		s.seek(h.place, d.to)
		wake(s.kick)
	})
	return nil
}

// claim writes the first rows of lanes whose epochs are noted.
func (r *recorder) claim(ctx context.Context, hs []*held) error {
	rows := make([]*feldera.ProgressLane, 0, len(hs))
	for _, h := range hs {
		rows = append(rows, h.taking.row)
	}
	incarnation := r.s.cfg.Incarnation
	tok, err := r.store.SendClaim(ctx, incarnation, rows...)
	if err == nil {
		crash.Here(crash.KafkaClaimSent)
		err = r.store.AwaitClaim(ctx, false, tok)
	}
	if err != nil {
		return fmt.Errorf("claim partitions in the progress table: %w", err)
	}
	crash.Here(crash.KafkaClaimed)
	for _, h := range hs {
		err := h.lane.Claim(int64(h.taking.row.Position()), incarnation) //nolint:gosec // an offset
		if err != nil && !errors.Is(err, lane.ErrDead) {
			return err
		}
		h.sender.poke()
	}
	wake(r.s.kick)
	return nil
}

// ingested notes evidence for a range, on the watcher's goroutine.
func (r *recorder) ingested(h *held, rg lane.Range, e feldera.Evidence) {
	if rg.Rows == 0 {
		return
	}
	h.taking.mu.Lock()
	if h.taking.evidence == nil {
		h.taking.evidence = make(map[int64]feldera.Evidence)
	}
	h.taking.evidence[rg.Next] = e
	h.taking.mu.Unlock()
	wake(r.record)
}

// step is one lane's share of an array of progress rows.
type step struct {
	h    *held
	next int64
}

// recording writes rows behind what is ingested, until ctx ends.
func (r *recorder) recording(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.record:
		}
		for {
			steps, advances := r.due()
			if len(steps) == 0 {
				break
			}
			if err := r.write(ctx, steps, advances); err != nil {
				r.ended(ctx, err)
				return
			}
		}
	}
}

// due gives the rows that can be sent now.
func (r *recorder) due() (steps []step, advances []feldera.Advance) {
	for _, h := range r.s.everything() {
		if len(steps) == maxTogether {
			break
		}
		position, next, ok := h.lane.Recordable()
		if !ok {
			continue
		}
		h.taking.mu.Lock()
		proof, known := h.taking.evidence[next]
		h.taking.mu.Unlock()
		if !known {
			continue // its evidence is on its way here
		}
		steps = append(steps, step{h, next})
		advances = append(advances, feldera.Advance{Lane: h.taking.row, Position: uint64(position), Data: []feldera.Evidence{proof}}) //nolint:gosec // an offset
	}
	return steps, advances
}

// write sends the rows of several lanes in one array.
func (r *recorder) write(ctx context.Context, steps []step, advances []feldera.Advance) error {
	crash.Here(crash.KafkaBeforeProgress)
	tok, err := r.store.Write(ctx, advances...)
	if err != nil {
		return fmt.Errorf("write progress rows: %w", err)
	}
	crash.Here(crash.KafkaProgressSent)
	for _, st := range steps {
		st.h.lane.Recorded(st.next)
		st.h.taking.mu.Lock()
		for next := range st.h.taking.evidence {
			if next <= st.next {
				delete(st.h.taking.evidence, next)
			}
		}
		st.h.taking.mu.Unlock()
	}
	r.s.cfg.Watcher.Watch(tok, func(e feldera.Evidence) { r.completed(steps, e) })
	return nil
}

// completed takes in what became of progress rows. It runs on the watcher's
// goroutine and does not block.
func (r *recorder) completed(steps []step, e feldera.Evidence) {
	var changed *feldera.IncarnationChanged
	switch {
	case errors.As(e.Err, &changed):
		r.s.fatal(changed)
		return
	case e.Err != nil:
		r.s.fatal(fmt.Errorf("completion of progress rows: %w", e.Err))
		return
	case e.Rung < ack.Completed:
		return
	}
	crash.Here(crash.KafkaProgressCompleted)
	for _, st := range steps {
		if err := st.h.lane.Proven(st.next, e.Token.Incarnation); err != nil {
			st.h.sender.late(err, ack.Completed.String(), 0)
		}
		st.h.sender.poke()
	}
	r.s.changed.ring()
}
