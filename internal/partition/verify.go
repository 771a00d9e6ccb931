package partition

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// This file holds what the group has committed, what the pipeline proves to
// hold and what the logs have against each other, without taking part in
// anything. verify_look.go reads, in an order that makes no false alarm;
// verify_find.go says what follows.

// VerifyOptions says what is compared.
type VerifyOptions struct {
	// Topics are the ones that are looked at.
	Topics []VerifyTopic
	// Only leaves out the partitions for which it is false; nil for none.
	Only func(topic string, partition int32) bool
	// Pipeline is asked for its incarnation, which becomes the expected one.
	Pipeline *feldera.Client
	// Progress opens the group's part of the progress table. Where that is refused
	// (the pipeline has no such table), what can be is compared without.
	Progress Progress
	// Start and OnLoss are the group's policies: what a finding comes to goes by
	// them.
	Start  StartPolicy
	OnLoss LossPolicy
	// Wait is how long a partition that looks wrong is looked at again while the
	// group has members, before it is called so.
	Wait time.Duration

	cluster string
	store   *feldera.ProgressStore // nil where there is none
	why     string                 // why there is none
}

// VerifyTopic is a topic and the table that its rows go to.
type VerifyTopic struct {
	Topic string
	// Table as the engine spells it.
	Table string
	// Rows is the table where its identity columns are to be held against the
	// offsets; nil where they are not.
	Rows *feldera.Table
}

// Effect is what a finding means for the rows.
type Effect string

// The effects, the worst first.
const (
	// Differs: rows are missing, or will be, or a person has to act.
	Differs Effect = "differs"
	// Undecided: it cannot be told.
	Undecided Effect = "undecided"
	// Harmless: the next start deals with it, and no row is missing for it.
	Harmless Effect = "harmless"
)

// Finding is one way in which a partition's positions do not agree.
type Finding struct {
	// Name is one of a closed list: see docs/operations.md.
	Name   string `json:"name"`
	Effect Effect `json:"effect"`
	// From and To, which is excluded, bound the offsets that it is about; both
	// are 0 where it is about none.
	From int64 `json:"from"`
	To   int64 `json:"to"`
	// Says is one sentence; Do is what follows for a person, "" for nothing.
	Says string `json:"says"`
	Do   string `json:"do,omitempty"`
}

// PartitionVerified is what was found out about one partition. Positions are
// next offsets; -1 is none.
type PartitionVerified struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Table     string `json:"table"`
	// Committed is the group's offset, Rows the offset behind the last record
	// below it that gave a row, by the note beside it; 0 = none did, or unknown.
	Committed int64 `json:"committed"`
	Rows      int64 `json:"rows"`
	// Held is what the progress table proves: the pipeline holds all rows of
	// records below it.
	Held int64 `json:"held"`
	// Proven: Held stands for everything that was committed.
	Proven   bool  `json:"proven"`
	LogStart int64 `json:"log_start"`
	LogEnd   int64 `json:"log_end"`
	// Epoch is the owner's by the note, RecordedEpoch the highest one in the
	// progress table; 0 = none.
	Epoch         int64 `json:"epoch"`
	RecordedEpoch int64 `json:"recorded_epoch"`
	// TableRows counts the rows of a table with identity columns that are this
	// partition's; -1 where they were not asked for.
	TableRows int64     `json:"table_rows"`
	Findings  []Finding `json:"findings"`
}

// Worst gives the worst effect among the findings, "" where there are none.
func (p *PartitionVerified) Worst() (worst Effect) {
	for i := range p.Findings {
		worst = worseOf(worst, p.Findings[i].Effect)
	}
	return worst
}

func worseOf(a, b Effect) Effect {
	rank := map[Effect]int{"": 0, Harmless: 1, Undecided: 2, Differs: 3}
	if rank[b] > rank[a] {
		return b
	}
	return a
}

// StrayProgress are progress rows of a partition that none of the topics has.
type StrayProgress struct {
	// Lane is the topic's id, or its name where brokers give none, and the
	// partition.
	Lane string `json:"lane"`
	// Topic is the name that the brokers know the id by; "" where they know none.
	Topic string `json:"topic,omitempty"`
	Rows  int    `json:"rows"`
	// Position is the highest that one of the rows names.
	Position uint64 `json:"position"`
}

// VerifyReport is the result of [Admin.Verify].
type VerifyReport struct {
	Group string `json:"group"`
	// State and Members are the group's, as of the last look.
	State   string `json:"state"`
	Members int    `json:"members"`
	// Incarnation of the pipeline that was compared.
	Incarnation string `json:"incarnation"`
	// Progress tells whether the progress table was compared; Why, why not.
	Progress bool   `json:"progress"`
	Why      string `json:"why,omitempty"`
	// LeaderEpochs tells whether the commits' leader epochs were held against the
	// logs; brokers may be too old for it, or refuse it.
	LeaderEpochs bool `json:"leader_epochs"`
	// Looks is how often everything was read.
	Looks int `json:"looks"`
	// Findings are about the group as a whole.
	Findings   []Finding           `json:"findings"`
	Partitions []PartitionVerified `json:"partitions"`
	Strays     []StrayProgress     `json:"strays"`
}

// Worst gives the worst effect of all findings, "" where there are none.
func (r *VerifyReport) Worst() (worst Effect) {
	for i := range r.Findings {
		worst = worseOf(worst, r.Findings[i].Effect)
	}
	for i := range r.Partitions {
		worst = worseOf(worst, r.Partitions[i].Worst())
	}
	return worst
}

const (
	// verifyPause is the time between two looks.
	verifyPause = time.Second
	// verifySame is how many looks in a row must find the same of a partition
	// before that is believed.
	verifySame = 2
	// verifyLooks bounds the looks behind the end of the wait.
	verifyLooks = 5
)

// Verify holds the group's offsets, the progress table and the logs against
// each other. It joins no group, commits nothing, and sends nothing to the
// pipeline.
//
// While the group has members everything moves. What looks wrong then is looked
// at again for as long as the options say, and is called so only when the last
// two looks agree on it; what changes at each look is undecided. Without members
// the second look decides.
//
// Errors: *decode.Refusal for what a person has to mend before anything can be
// compared; *feldera.IncarnationChanged where the pipeline restarts at each look;
// any other says that brokers or pipeline do not answer.
func (a *Admin) Verify(ctx context.Context, o VerifyOptions) (*VerifyReport, error) {
	if err := a.openProgress(ctx, &o); err != nil {
		return nil, err
	}
	began := time.Now()
	same := make(map[verifiedKey]int)
	late := 0
	for n := 1; ; n++ {
		seen, err := a.lookAgain(ctx, &o)
		if err != nil {
			return nil, err
		}
		r := o.compare(a.cfg.Group, seen)
		r.Looks = n
		now := make(map[verifiedKey]int)
		settled := true
		for i := range r.Partitions {
			p := &r.Partitions[i]
			for _, f := range p.Findings {
				if f.Effect == Harmless {
					continue
				}
				k := verifiedKey{place{p.Topic, p.Partition}, f.Name}
				now[k] = same[k] + 1
				settled = settled && now[k] >= verifySame
			}
		}
		same = now
		over := r.Members == 0 || time.Since(began) >= o.Wait
		switch {
		case len(now) == 0, settled && over:
			return r, nil
		case over:
			late++
		}
		if late > verifyLooks {
			r.unsettle(same)
			return r, nil
		}
		timer := time.NewTimer(verifyPause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, context.Cause(ctx)
		}
	}
}

// openProgress opens the group's part of the progress table, or says why there
// is none.
func (a *Admin) openProgress(ctx context.Context, o *VerifyOptions) (err error) {
	if o.cluster, err = a.Cluster(ctx); err != nil {
		return err
	}
	if o.cluster == "" {
		o.why = "the brokers give no cluster id, so that no progress row is of this group"
		return nil
	}
	o.store, err = o.Progress.Open(progressSource(o.cluster, a.cfg.Group))
	var refused *decode.Refusal
	if errors.As(err, &refused) {
		o.why, err = refused.Error(), nil
	}
	return err
}

// verifiedKey names a finding about a partition.
type verifiedKey struct {
	place
	name string
}

// lookAgain makes one look, and another where the pipeline was restarted in the
// middle of it.
func (a *Admin) lookAgain(ctx context.Context, o *VerifyOptions) (*look, error) {
	for n := 1; ; n++ {
		seen, err := a.look(ctx, o)
		var changed *feldera.IncarnationChanged
		if !errors.As(err, &changed) || n == verifyLooks {
			return seen, err
		}
		o.Pipeline.Expect(changed.Now)
	}
}

// unsettle calls undecided what not all of the last looks have found.
func (r *VerifyReport) unsettle(same map[verifiedKey]int) {
	for i := range r.Partitions {
		p := &r.Partitions[i]
		for j := range p.Findings {
			f := &p.Findings[j]
			if f.Effect == Differs && same[verifiedKey{place{p.Topic, p.Partition}, f.Name}] < verifySame {
				f.Effect = Undecided
				f.Says = "it changes at each look, so that it may be of the moment: " + f.Says
			}
		}
	}
}

// sortVerified brings what was found into its order.
func (r *VerifyReport) sortVerified() {
	slices.SortFunc(r.Partitions, func(a, b PartitionVerified) int {
		return cmp.Or(cmp.Compare(a.Topic, b.Topic), cmp.Compare(a.Partition, b.Partition))
	})
	slices.SortFunc(r.Strays, func(a, b StrayProgress) int { return cmp.Compare(a.Lane, b.Lane) })
}
