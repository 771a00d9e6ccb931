package partition

import (
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/twmb/franz-go/pkg/kadm"

	"holdfast/internal/feldera"
)

// The moment that a real broker and a real pipeline cannot be made to show: what
// moves between two readings of one look, and what each order of readings says.

const (
	lookedTopic = "orders"
	lookedTable = "orders"
)

// lookedAt builds a look at one partition.
type lookedAt struct {
	id            [16]byte
	before, after kadm.Offset
	start, end    int64
	members       int
	rows          []feldera.ProgressRow
	err           error
}

func (l *lookedAt) compare(t *testing.T) PartitionVerified {
	t.Helper()
	listed := func(at int64) kadm.ListedOffsets {
		return kadm.ListedOffsets{lookedTopic: {0: {Topic: lookedTopic, Offset: at, Err: l.err}}}
	}
	fetched := func(o kadm.Offset) kadm.OffsetResponses {
		return kadm.OffsetResponses{lookedTopic: {0: {Offset: o}}}
	}
	seen := &look{
		members: l.members, starts: listed(l.start), ends: listed(l.end), before: fetched(l.before), after: fetched(l.after),
		incarnation: "now", lanes: map[string][]feldera.ProgressRow{laneNameOf(l.id, lookedTopic, 0): l.rows},
		topics: kadm.TopicDetails{lookedTopic: {Topic: lookedTopic, ID: l.id, Partitions: kadm.PartitionDetails{0: {}}}}, epochsKnown: true,
	}
	o := VerifyOptions{Topics: []VerifyTopic{{Topic: lookedTopic, Table: lookedTable}}, store: &feldera.ProgressStore{}}
	r := o.compare("g", seen)
	if len(r.Partitions) != 1 {
		t.Fatalf("%+v", r)
	}
	return r.Partitions[0]
}

func committedAt(n note) kadm.Offset {
	return kadm.Offset{Topic: lookedTopic, At: n.Offset, LeaderEpoch: -1, Metadata: n.encode()}
}

func progressOf(epoch int64, positions ...uint64) (rows []feldera.ProgressRow) {
	for slot, at := range positions {
		rows = append(rows, feldera.ProgressRow{
			Epoch: epoch, Slot: int64(slot), Position: at, Incarnation: "now", Fingerprint: mappingOf(lookedTopic, lookedTable),
		})
	}
	return rows
}

func TestVerifyMakesNoFalseAlarmOfWhatMoves(t *testing.T) {
	row := &noteRow{Epoch: 3, Incarnation: "now"}
	ten := note{Offset: 10, Rows: 10, Epoch: 3, Owner: "a", Row: row}
	for name, c := range map[string]struct {
		l    lookedAt
		want []string
	}{
		"nothing moves": {lookedAt{before: committedAt(ten), after: committedAt(ten), rows: progressOf(3, 5, 10), end: 10}, nil},
		// Between the commit and the rows the owner goes on.
		"rows go on": {lookedAt{before: committedAt(ten), after: committedAt(note{Offset: 30, Rows: 30, Epoch: 3, Owner: "a", Row: row}), rows: progressOf(3, 20, 30), end: 40, members: 1}, nil},
		// Between the commit and the rows another owner takes the partition: its
		// claim takes the rows of before away, and has an epoch above the note's.
		"another owner takes over": {lookedAt{
			before: committedAt(ten), after: committedAt(note{Offset: 10, Rows: 10, Epoch: 4, Owner: "b", Row: row}), rows: progressOf(4, 10), end: 10, members: 1,
		}, nil},
		// The epoch is above the one of the later commit too: nobody of this group.
		"a foreign owner": {lookedAt{before: committedAt(ten), after: committedAt(ten), rows: progressOf(4, 10), end: 10}, []string{findForeign}},
		// Between the commit and the rows a person sets the offset, and its owner
		// claims it: the rows say less than the first commit.
		"a reset in between": {lookedAt{
			before: committedAt(ten), after: committedAt(note{Offset: 4, Epoch: 4, Owner: "b"}), rows: progressOf(4, 4), end: 10, members: 1,
		}, []string{findMoving}},
		"a reset by another program in between": {lookedAt{
			before: committedAt(ten), after: kadm.Offset{Topic: lookedTopic, At: 12, LeaderEpoch: -1}, rows: progressOf(3, 10), end: 20,
		}, []string{findMoving}},
		"a topic made anew in between": {lookedAt{
			id: [16]byte{2}, before: committedAt(note{Offset: 10, Rows: 10, Epoch: 3, TopicID: topicIDText([16]byte{1}), Row: row}),
			after: committedAt(note{Offset: 10, Rows: 10, Epoch: 4, TopicID: topicIDText([16]byte{2}), Row: row}), end: 10,
		}, []string{findMoving}},
		"the rows are gone":    {lookedAt{before: committedAt(ten), after: committedAt(ten), end: 10}, []string{findLost}},
		"no leader":            {lookedAt{before: committedAt(ten), after: committedAt(ten), rows: progressOf(3, 10), err: errors.New("LEADER_NOT_AVAILABLE")}, []string{findUnreadable}},
		"ahead, with a member": {lookedAt{before: committedAt(ten), after: committedAt(ten), rows: progressOf(3, 10, 20), end: 20, members: 1}, nil},
		"ahead, without":       {lookedAt{before: committedAt(ten), after: committedAt(ten), rows: progressOf(3, 10, 20), end: 20}, []string{findAhead}},
		// Where a log begins above the commit and below what the pipeline holds,
		// nothing is lost.
		"retention behind what is held": {lookedAt{before: committedAt(ten), after: committedAt(ten), rows: progressOf(3, 10, 20), start: 20, end: 20, members: 1}, nil},
		"retention above it":            {lookedAt{before: committedAt(ten), after: committedAt(ten), rows: progressOf(3, 10, 20), start: 21, end: 25}, []string{findAhead, findRetention}},
	} {
		t.Run(name, func(t *testing.T) {
			got := c.l.compare(t)
			var names []string
			for _, f := range got.Findings {
				names = append(names, f.Name)
			}
			if diff := cmp.Diff(c.want, names); diff != "" {
				t.Errorf("%s\n%+v", diff, got)
			}
		})
	}
}

// What not all of the last looks have found is undecided.
func TestVerifyUnsettled(t *testing.T) {
	r := &VerifyReport{Partitions: []PartitionVerified{
		{Topic: "a", Findings: []Finding{{Name: findLost, Effect: Differs, Says: "lost"}}},
		{Topic: "b", Findings: []Finding{{Name: findLost, Effect: Differs, Says: "lost"}, {Name: findAhead, Effect: Harmless}}},
	}}
	r.unsettle(map[verifiedKey]int{{place{"a", 0}, findLost}: verifySame, {place{"b", 0}, findLost}: verifySame - 1})
	if got := []Effect{r.Partitions[0].Worst(), r.Partitions[1].Worst(), r.Partitions[1].Findings[1].Effect, r.Worst()}; !slices.Equal(got, []Effect{Differs, Undecided, Harmless, Differs}) {
		t.Errorf("%v", got)
	}
}
