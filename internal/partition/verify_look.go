package partition

import (
	"context"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kadm"

	"holdfast/internal/feldera"
	"holdfast/internal/partition/lane"
)

// look is everything as it was read once. Nothing of it is of one moment, so the
// order in which it was read counts: of each pair that is compared, the side that
// may not be above the other one is read first.
//
//  1. The logs' starts. A log's start only grows, so an offset that was committed
//     later is below it only if retention has passed the group.
//  2. The commits. What a commit says was completed is completed, so the progress
//     rows and the rows that are read next show it, or have lost it.
//  3. The progress rows, and the rows of tables with identity columns.
//  4. The commits again. An owner notes its epoch in a commit before it sends a
//     row with it, so no row of 3 has an epoch above that of this commit, unless
//     its owner is none of this group's memory. A commit that has gone back since
//     2 was set by a person, or by an owner that heals a loss: nothing that is
//     made of both is believed then.
//  5. The topics, the logs' ends and the ends of the leader epochs. A log's end
//     only grows, so nothing committed or recorded before is above it, unless the
//     log was cut or is another one.
type look struct {
	state         string
	members       int
	starts, ends  kadm.ListedOffsets
	before, after kadm.OffsetResponses
	incarnation   string
	lanes         map[string][]feldera.ProgressRow
	rows          map[string]map[int32]feldera.IdentityRows // by topic
	topics        kadm.TopicDetails
	epochs        kadm.OffsetsForLeaderEpochs
	epochsKnown   bool
	unlisted      error             // why brokers gave no bounds for some of the logs
	names         map[string]string // of topics that only progress rows name, by the id's text
}

// look reads everything once.
func (a *Admin) look(ctx context.Context, o *VerifyOptions) (*look, error) {
	names := make([]string, 0, len(o.Topics))
	for _, t := range o.Topics {
		names = append(names, t.Topic)
	}
	seen := &look{}
	var err error
	if seen.state, seen.members, err = a.members(ctx); err != nil {
		return nil, err
	}
	if seen.topics, err = a.describedTopics(ctx, names); err != nil {
		return nil, err
	}
	if seen.starts, err = seen.listed(ctx, a.admin.ListStartOffsets, names); err != nil {
		return nil, a.cfg.explain("list the logs' starts", err)
	}
	if seen.before, err = a.fetchOffsets(ctx, a.cfg.Group); err != nil {
		return nil, err
	}
	if err := a.lookAtPipeline(ctx, o, seen); err != nil {
		return nil, err
	}
	if seen.after, err = a.fetchOffsets(ctx, a.cfg.Group); err != nil {
		return nil, err
	}
	if seen.topics, err = a.describedTopics(ctx, names); err != nil {
		return nil, err
	}
	if seen.ends, err = seen.listed(ctx, a.admin.ListEndOffsets, names); err != nil {
		return nil, a.cfg.explain("list the logs' ends", err)
	}
	a.lookAtEpochs(ctx, o, seen)
	return seen, a.nameStrays(ctx, seen)
}

// listed asks for one side of the logs. What some of the brokers do not answer,
// and partitions without a leader, are left out: those are unreadable, and the
// others are compared. The client library asks for them for half a minute, which
// is cut short.
func (l *look) listed(ctx context.Context, list func(context.Context, ...string) (kadm.ListedOffsets, error), topics []string) (kadm.ListedOffsets, error) {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	found, err := list(ctx, topics...)
	var some *kadm.ShardErrors
	if errors.As(err, &some) {
		l.unlisted, err = err, nil
	}
	return found, err
}

// lookAtPipeline reads what the pipeline has.
func (a *Admin) lookAtPipeline(ctx context.Context, o *VerifyOptions, seen *look) error {
	if o.store != nil {
		found, err := o.store.Look(ctx)
		if err != nil {
			return fmt.Errorf("find out what the pipeline holds: %w", err)
		}
		seen.incarnation, seen.lanes = found.Incarnation, found.Lanes
	} else {
		now, err := o.Pipeline.Incarnation(ctx)
		if err != nil {
			return err
		}
		seen.incarnation = now
		if was := o.Pipeline.Expected(); was != now {
			return &feldera.IncarnationChanged{Was: was, Now: now}
		}
	}
	seen.rows = make(map[string]map[int32]feldera.IdentityRows)
	for _, t := range o.Topics {
		if t.Rows == nil {
			continue
		}
		found, err := o.Pipeline.IdentityRows(ctx, t.Rows, sourceOf(t.Topic, seen.topics[t.Topic].ID, o.cluster))
		if err != nil {
			return err
		}
		seen.rows[t.Topic] = found
	}
	return nil
}

// lookAtEpochs asks where the leader epochs of the commits end. Brokers that do
// not answer that leave it out: the rest is compared all the same.
func (a *Admin) lookAtEpochs(ctx context.Context, o *VerifyOptions, seen *look) {
	var ask kadm.OffsetForLeaderEpochRequest
	for _, t := range o.Topics {
		for n := range seen.topics[t.Topic].Partitions {
			if c, ok := seen.before.Lookup(t.Topic, n); ok && c.Err == nil && c.At > 0 && c.LeaderEpoch >= 0 && o.wanted(t.Topic, n) {
				ask.Add(t.Topic, n, c.LeaderEpoch)
			}
		}
	}
	if len(ask) == 0 {
		seen.epochsKnown = true
		return
	}
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	var err error
	if seen.epochs, err = a.admin.OffsetForLeaderEpoch(ctx, ask); err == nil {
		seen.epochsKnown = true
	}
}

// nameStrays finds the names of topics that progress rows name by an id which
// none of the looked at topics has. Nobody needs more than a name, so a user who
// may not see one gets none.
func (a *Admin) nameStrays(ctx context.Context, seen *look) error {
	known := make(map[string]bool)
	for name, d := range seen.topics {
		for n := range d.Partitions {
			known[laneNameOf(d.ID, name, n)] = true
		}
	}
	stray := false
	for name := range seen.lanes {
		stray = stray || !known[name]
	}
	if !stray {
		return nil
	}
	all, err := a.admin.ListTopics(ctx)
	if err != nil {
		return a.cfg.explain("list the topics", err)
	}
	seen.names = make(map[string]string, len(all))
	for name, d := range all {
		seen.names[topicIDText(d.ID)] = name
	}
	return nil
}

// wanted tells whether a partition is one of those to be compared.
func (o *VerifyOptions) wanted(topic string, partition int32) bool {
	return o.Only == nil || o.Only(topic, partition)
}

// commitSight is a group's commit for one partition as one reading has it.
type commitSight struct {
	offset      int64 // lane.NoCommit for none
	leaderEpoch int32
	note        note
	// ours: the note is one of this program, and belongs to the offset. moved: it
	// is one, and belongs to another offset.
	ours, moved bool
	err         error
}

func commitOf(all kadm.OffsetResponses, at place) commitSight {
	c, ok := all.Lookup(at.topic, at.partition)
	switch {
	case ok && c.Err != nil:
		return commitSight{offset: lane.NoCommit, err: c.Err}
	case !ok || c.At < 0:
		return commitSight{offset: lane.NoCommit}
	}
	out := commitSight{offset: c.At, leaderEpoch: c.LeaderEpoch}
	n, err := parseNote(c.Metadata, c.At)
	out.note, out.ours, out.moved = n, err == nil, errors.Is(err, errMoved)
	if err != nil {
		out.note = note{}
	}
	return out
}
