package partition

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v4"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/internal/decode"
	"holdfast/internal/partition/lane"
)

// Admin looks at a group's offsets and at dead letters, and changes them, for
// an operator. It joins no group but that of Redrive. Its methods are for one
// goroutine.
type Admin struct {
	cfg    Config
	client *kgo.Client
	admin  *kadm.Client
}

// NewAdmin makes a client by the brokers, login, group and dead-letter topic of
// cfg. The caller closes it.
func NewAdmin(ctx context.Context, cfg Config) (*Admin, error) {
	opts, err := cfg.connection(ctx)
	if err != nil {
		return nil, fmt.Errorf("configure client: %w", err)
	}
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	return &Admin{cfg: cfg, client: client, admin: kadm.NewClient(client)}, nil
}

// Close closes the client.
func (a *Admin) Close() { a.client.Close() }

// GroupOffsets is what the group has committed.
type GroupOffsets struct {
	Group   string        `json:"group"`
	State   string        `json:"state"`
	Members int           `json:"members"`
	Offsets []GroupOffset `json:"offsets"`
}

// GroupOffset is the group's position on one partition.
type GroupOffset struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	// Committed is the next offset to read; -1 = none.
	Committed int64 `json:"committed"`
	LogStart  int64 `json:"log_start"`
	LogEnd    int64 `json:"log_end"`
	// Lag is what is there to be read: from Committed, or from the log's start
	// where it is above, or where nothing was committed.
	Lag int64 `json:"lag"`
	// Lost is how many offsets below the log's start were never committed.
	Lost int64 `json:"lost"`
	// What the note beside the offset says; Epoch is 0 where there is none.
	Epoch       int64     `json:"epoch"`
	Clean       bool      `json:"clean"`
	Time        time.Time `json:"time,omitzero"`
	Incarnation string    `json:"incarnation,omitempty"`
	TopicID     string    `json:"topic_id,omitempty"`
	// Recreated: the note is about another topic of the same name.
	Recreated bool `json:"recreated"`

	rows int64
	id   kadm.TopicID
}

// Cluster asks the brokers for the name that their cluster has given itself; ""
// where they have none.
func (a *Admin) Cluster(ctx context.Context) (string, error) {
	m, err := a.admin.BrokerMetadata(ctx)
	if err != nil {
		return "", a.cfg.explain("ask for the cluster's name", err)
	}
	return m.Cluster, nil
}

// Offsets reads the group's offsets for all partitions of the topics.
func (a *Admin) Offsets(ctx context.Context, topics []string) (GroupOffsets, error) {
	out := GroupOffsets{Group: a.cfg.Group}
	var err error
	if out.State, out.Members, err = a.members(ctx); err != nil {
		return out, err
	}
	found, err := a.describedTopics(ctx, topics)
	if err != nil {
		return out, err
	}
	starts, err := a.admin.ListStartOffsets(ctx, topics...)
	if err != nil {
		return out, a.cfg.explain("list the logs' starts", err)
	}
	ends, err := a.admin.ListEndOffsets(ctx, topics...)
	if err != nil {
		return out, a.cfg.explain("list the logs' ends", err)
	}
	committed, err := a.fetchOffsets(ctx, a.cfg.Group)
	if err != nil {
		return out, err
	}
	for _, name := range topics {
		for n := range found[name].Partitions {
			o := GroupOffset{Topic: name, Partition: n, Committed: lane.NoCommit, id: found[name].ID}
			if o.LogStart, o.LogEnd, err = boundsOf(starts, ends, place{name, n}); err != nil {
				return out, err
			}
			if c, ok := committed.Lookup(name, n); ok && c.Err == nil && c.At >= 0 {
				o.Committed = c.At
				if saved, err := parseNote(c.Metadata, c.At); err == nil {
					o.Epoch, o.Clean, o.Time, o.Incarnation, o.TopicID, o.rows = saved.Epoch, saved.Clean, saved.time(), saved.Incarnation, saved.TopicID, saved.Rows
					now := topicIDText(o.id)
					o.Recreated = saved.TopicID != "" && now != "" && saved.TopicID != now
				}
			}
			from := max(o.Committed, o.LogStart)
			o.Lag = max(o.LogEnd-from, 0)
			if o.Committed != lane.NoCommit {
				o.Lost = max(o.LogStart-o.Committed, 0)
			}
			out.Offsets = append(out.Offsets, o)
		}
	}
	slices.SortFunc(out.Offsets, func(a, b GroupOffset) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	return out, nil
}

// describedTopics looks topics up. One that is missing is a refusal.
func (a *Admin) describedTopics(ctx context.Context, names []string) (kadm.TopicDetails, error) {
	found, err := a.admin.ListTopics(ctx, names...)
	if err != nil {
		return nil, a.cfg.explain("look up topics", err)
	}
	for _, name := range names {
		if fault := topicFault(found, name); fault != nil {
			return nil, fault
		}
	}
	return found, nil
}

// fetchOffsets reads all that a group has committed. A group that the brokers do
// not know has committed nothing.
func (a *Admin) fetchOffsets(ctx context.Context, group string) (found kadm.OffsetResponses, err error) {
	err = coordinated(ctx, func() (err error) {
		if found, err = a.admin.FetchOffsets(ctx, group); errors.Is(err, kerr.GroupIDNotFound) {
			return nil
		}
		return a.cfg.explain(fmt.Sprintf("look up the offsets of group %q", group), err)
	})
	return found, err
}

// coordinated asks a group's coordinator, until there is one. A cluster that had
// no group before makes its topic for them on the first question, and has no
// coordinator meanwhile.
func coordinated(ctx context.Context, ask func() error) error {
	again := backoff.NewExponentialBackOff(backoff.WithInitialInterval(200*time.Millisecond), backoff.WithMaxInterval(2*time.Second), backoff.WithMaxElapsedTime(20*time.Second))
	return backoff.Retry(func() error {
		err := ask()
		if err != nil && !errors.Is(err, kerr.CoordinatorNotAvailable) && !errors.Is(err, kerr.CoordinatorLoadInProgress) {
			return backoff.Permanent(err)
		}
		return err
	}, backoff.WithContext(again, ctx))
}

// members tells the group's state and how many members it has. A group that
// the brokers do not know is empty.
func (a *Admin) members(ctx context.Context) (state string, n int, err error) {
	err = coordinated(ctx, func() (err error) {
		state, n, err = a.askMembers(ctx)
		return err
	})
	return state, n, err
}

func (a *Admin) askMembers(ctx context.Context) (state string, n int, err error) {
	newer, err := a.admin.DescribeConsumerGroups(ctx, a.cfg.Group)
	if g, ok := newer[a.cfg.Group]; err == nil && ok && g.Err == nil {
		return g.State, len(g.Members), nil
	}
	older, err := a.admin.DescribeGroups(ctx, a.cfg.Group)
	if err == nil {
		err = older[a.cfg.Group].Err
	}
	if err != nil && !errors.Is(err, kerr.GroupIDNotFound) {
		return "", 0, a.cfg.explain(fmt.Sprintf("describe group %q", a.cfg.Group), err)
	}
	return older[a.cfg.Group].State, len(older[a.cfg.Group].Members), nil
}

// ResetTo says where to set offsets. Exactly one of its fields is used.
type ResetTo struct {
	Earliest, Latest bool
	Time             time.Time // the first record that is not older
	Offset           int64     // this one, where the others are zero
}

// Reset is one offset that is to be changed.
type Reset struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	From      int64  `json:"from"` // -1 = none
	To        int64  `json:"to"`
	// Skipped offsets were not committed and will not be read; Again ones were
	// and will be.
	Skipped int64 `json:"skipped"`
	Again   int64 `json:"again"`

	was GroupOffset
}

// PlanReset works out what a reset would change, without changing anything.
// It refuses while the group has members: they would go on from where they
// are, and commit over it.
func (a *Admin) PlanReset(ctx context.Context, now GroupOffsets, to ResetTo) ([]Reset, error) {
	if now.Members > 0 {
		return nil, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "consumer group", Where: now.Group,
			Why: fmt.Sprintf("it has %d members (%s), which would go on from where they are", now.Members, now.State),
			Do:  "stop them, wait until the group is empty (a static member, or one that was killed, counts until its session time-out), and ask again",
		}
	}
	var at kadm.ListedOffsets
	if !to.Time.IsZero() {
		var topics []string
		for i := range now.Offsets {
			if !slices.Contains(topics, now.Offsets[i].Topic) {
				topics = append(topics, now.Offsets[i].Topic)
			}
		}
		var err error
		if at, err = a.admin.ListOffsetsAfterMilli(ctx, to.Time.UnixMilli(), topics...); err != nil {
			return nil, a.cfg.explain("list offsets by time", err)
		}
	}
	var plan []Reset
	for _, o := range now.Offsets {
		r := Reset{Topic: o.Topic, Partition: o.Partition, From: o.Committed, To: to.Offset, was: o}
		switch {
		case to.Earliest:
			r.To = o.LogStart
		case to.Latest:
			r.To = o.LogEnd
		case !to.Time.IsZero():
			found, ok := at.Lookup(o.Topic, o.Partition)
			if !ok || found.Err != nil {
				return nil, fmt.Errorf("list the offset of %s[%d] at %v: %w", o.Topic, o.Partition, to.Time, cmp.Or(found.Err, errors.New("the brokers gave none")))
			}
			if r.To = found.Offset; r.To < 0 {
				r.To = o.LogEnd // nothing is as new
			}
		}
		if r.To < o.LogStart || r.To > o.LogEnd {
			return nil, &decode.Refusal{
				Reason: decode.ReasonGap, What: "offset", Where: fmt.Sprintf("%s[%d]@%d", o.Topic, o.Partition, r.To),
				Why: "the log has no such offset", Expected: fmt.Sprintf("one from %d to %d", o.LogStart, o.LogEnd), Do: "name another offset, or name the partition it is for",
			}
		}
		from := max(o.Committed, o.LogStart)
		r.Skipped, r.Again = max(r.To-from, 0), max(from-r.To, 0)
		plan = append(plan, r)
	}
	return plan, nil
}

// resetOwner stands for the session in the note of a reset.
const resetOwner = "reset"

// Reset carries the plan out. The brokers refuse it when a member has joined
// since.
//
// The note raises the epoch by one, as a new owner's would, and keeps what the
// last one says about being clean: whether requests are still on their way is
// not changed by where reading goes on.
func (a *Admin) Reset(ctx context.Context, plan []Reset) error {
	var offsets kadm.Offsets
	for _, r := range plan {
		n := note{Offset: r.To, TopicID: topicIDText(r.was.id), Incarnation: r.was.Incarnation, Epoch: r.was.Epoch + 1, Owner: resetOwner, Clean: r.was.Clean}
		if r.To >= r.From { // what lies below is what was below
			n.Rows = r.was.rows
		}
		o := kadm.Offset{Topic: r.Topic, TopicID: r.was.id, Partition: r.Partition, At: r.To, LeaderEpoch: -1}
		if r.was.Epoch > 0 {
			o.Metadata = n.encode()
		}
		offsets.Add(o)
	}
	res, err := a.admin.CommitOffsets(ctx, a.cfg.Group, offsets)
	if err == nil {
		err = res.Error()
	}
	if errors.Is(err, kerr.UnknownMemberID) {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "consumer group", Where: a.cfg.Group, Why: "a member has joined it meanwhile",
			Do: "stop it and ask again", Err: err,
		}
	}
	if err != nil {
		return a.cfg.explain(fmt.Sprintf("set the offsets of group %q", a.cfg.Group), err)
	}
	return nil
}
