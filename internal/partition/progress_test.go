package partition

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"holdfast/internal/partition/lane"
)

// The note carries what the next owner has to know of the progress table, also
// where every number of it is as long as it can be.
func TestNoteOfProgress(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		large := rapid.Int64Min(1 << 60)
		n := note{
			V: noteVersion, Offset: 1<<63 - 1, Epoch: 1<<63 - 1, Rows: large.Draw(t, "rows"), Time: 1 << 42, Owner: "0123456789abcdef",
			Incarnation: strings.Repeat("a", 36), TopicID: topicIDText([16]byte{1}), Begin: large.Draw(t, "begin"),
			GoneFrom: large.Draw(t, "from"), GoneTo: 1<<63 - 1,
			Row: &noteRow{Epoch: large.Draw(t, "row epoch"), Incarnation: strings.Repeat("b", rapid.IntRange(0, 36).Draw(t, "incarnation"))},
		}
		got, err := parseNote(n.encode(), n.Offset)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(n, got); diff != "" {
			t.Fatal(diff)
		}
		k := (&placement{note: got, known: true, epoch: 3, begin: got.Begin}).taking()
		if !k.noted.Known || k.noted.Epoch != 2 || k.noted.Produced != uint64(n.Rows) || k.noted.RowEpoch != n.Row.Epoch ||
			k.noted.RowIncarnation != n.Row.Incarnation || k.gone != (span{n.GoneFrom, n.GoneTo}) || k.begin != n.Begin {
			t.Fatalf("%+v", k)
		}
	})
}

// A name that does not fit is left out, and then none is believed for it; what
// nobody writes is no note.
func TestNoteOfProgressAsAnEnemyWritesIt(t *testing.T) {
	n := note{Offset: 9, Epoch: 2, Rows: 5, Row: &noteRow{Epoch: 2, Incarnation: strings.Repeat("x", maxNote)}}
	got, err := parseNote(n.encode(), 9)
	if err != nil || got.Row == nil || *got.Row != (noteRow{}) {
		t.Errorf("%+v, %v", got, err)
	}
	for _, text := range []string{
		`{"v":1,"offset":9,"epoch":2,"row":{"epoch":3,"incarnation":"i"}}`,
		`{"v":1,"offset":9,"epoch":2,"row":{"epoch":-1,"incarnation":"i"}}`,
		`{"v":1,"offset":9,"epoch":2,"begin":-1}`,
		`{"v":1,"offset":9,"epoch":2,"gone_from":5,"gone_to":4}`,
		`{"v":1,"offset":9,"epoch":2,"gone_from":-5,"gone_to":4}`,
		`{"v":1,"offset":9,"epoch":2,"row":"x"}`,
	} {
		if got, err := parseNote(text, 9); err == nil {
			t.Errorf("%s is believed: %+v", text, got)
		}
	}
	k := (&placement{note: note{Epoch: 4, Rows: 7}, known: true, epoch: 5}).taking()
	if k.noted.Known || k.noted.Produced != 0 || k.noted.Epoch != 4 {
		t.Errorf("a note without a row says %+v", k.noted)
	}
}

func TestSpanCoversBoth(t *testing.T) {
	for _, c := range []struct{ a, b, want span }{
		{span{}, span{3, 9}, span{3, 9}},
		{span{3, 9}, span{7, 12}, span{3, 12}},
		{span{20, 30}, span{3, 9}, span{3, 30}},
	} {
		if got := c.a.with(c.b); got != c.want {
			t.Errorf("%v with %v is %v", c.a, c.b, got)
		}
	}
}

// A partition is named by its topic's id, so that a topic that is made anew
// under its old name has no rows.
func TestLaneNames(t *testing.T) {
	one := lane.New(lane.Config{Topic: "orders", TopicID: [16]byte{1}, Partition: 7})
	two := lane.New(lane.Config{Topic: "orders", TopicID: [16]byte{2}, Partition: 7})
	none := lane.New(lane.Config{Topic: "orders", Partition: 7})
	if a, b := laneName(one), laneName(two); a == b || !strings.HasSuffix(a, "/7") {
		t.Errorf("%s, %s", a, b)
	}
	if got := laneName(none); got != "orders/7" {
		t.Error(got)
	}
}
