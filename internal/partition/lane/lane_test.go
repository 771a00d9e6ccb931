package lane

import (
	"errors"
	"testing"
	"time"

	"holdfast/internal/ack"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// newLane makes a lane that has announced itself.
func newLane(start int64, limits Limits) *Lane {
	l := New(Config{Topic: "orders", Partition: 3, Epoch: 1, Start: start, Committed: start, StartLeaderEpoch: -1, Limits: limits})
	if err := l.Committed(Commit{Offset: start}); err != nil {
		panic(err)
	}
	return l
}

func recs(offsets ...int64) []Record {
	out := make([]Record, 0, len(offsets))
	for _, o := range offsets {
		out = append(out, Record{Offset: o, LeaderEpoch: 7, Value: []byte("{}"), Time: t0.Add(time.Duration(o) * time.Second), Received: t0})
	}
	return out
}

// take takes n records or fails.
func take(t *testing.T, l *Lane, n int) Range {
	t.Helper()
	if got := l.Peek(nil, n, t0); len(got) != n {
		t.Fatalf("peek gave %d records, want %d", len(got), n)
	}
	rg, err := l.Take(n)
	if err != nil {
		t.Fatal(err)
	}
	return rg
}

func accept(t *testing.T, l *Lane, rg Range) {
	t.Helper()
	if _, err := l.Accept(rg); err != nil {
		t.Fatal(err)
	}
}

func evidence(t *testing.T, l *Lane, rg Range, r ack.Rung) {
	t.Helper()
	if err := l.Mark(rg, r); err != nil {
		t.Fatal(err)
	}
}

func wantCommit(t *testing.T, l *Lane, offset int64) Commit {
	t.Helper()
	c, ok := l.ToCommit(false, t0)
	if !ok || c.Offset != offset {
		t.Fatalf("to commit: %+v %v, want offset %d", c, ok, offset)
	}
	return c
}

func TestGapsAndDuplicates(t *testing.T) {
	l := newLane(10, Limits{})
	got := l.Receive(recs(10, 12, 12, 11, 40))
	if got.Admitted != 3 || got.Duplicates != 2 {
		t.Fatalf("receipt %+v", got)
	}
	rg := take(t, l, 3)
	accept(t, l, rg)
	if _, ok := l.ToCommit(false, t0); ok {
		t.Fatal("accepted is not evidence of completion")
	}
	evidence(t, l, rg, ack.Completed)
	c := wantCommit(t, l, 41)
	if c.LeaderEpoch != 7 || !c.Time.Equal(t0.Add(40*time.Second)) {
		t.Fatalf("commit %+v", c)
	}
	if got := l.Receive(recs(41)); got.Admitted != 1 {
		t.Fatalf("receipt %+v", got)
	}
	if got := l.Receive(recs(40)); got.Duplicates != 1 {
		t.Fatalf("receipt %+v", got)
	}
}

func TestOutOfOrderCompletionHoldsTheLine(t *testing.T) {
	l := newLane(0, Limits{})
	l.Receive(recs(0, 1, 2, 3))
	first := take(t, l, 2)
	if got := l.Peek(nil, 10, t0); len(got) != 0 {
		t.Fatal("records were given out while an outcome is unknown")
	}
	accept(t, l, first)
	second := take(t, l, 2)
	accept(t, l, second)
	evidence(t, l, second, ack.Completed)
	if c, ok := l.ToCommit(false, t0); ok {
		t.Fatalf("commit %+v passes a range without evidence", c)
	}
	evidence(t, l, first, ack.Completed)
	wantCommit(t, l, 4)
}

func TestControlRecordsAdvanceBehindRows(t *testing.T) {
	l := newLane(0, Limits{})
	l.Receive([]Record{{Offset: 0, Idle: true}})
	wantCommit(t, l, 1)
	l.Receive(recs(1))
	l.Receive([]Record{{Offset: 2, Idle: true}})
	wantCommit(t, l, 1)
	rg := take(t, l, 1)
	accept(t, l, rg)
	evidence(t, l, rg, ack.Completed)
	wantCommit(t, l, 3)
}

func TestSkippedCountsOnlyInOrder(t *testing.T) {
	l := newLane(0, Limits{})
	l.Receive(recs(0, 1))
	first := take(t, l, 1)
	accept(t, l, first)
	if _, err := l.Skip(take(t, l, 1)); err != nil {
		t.Fatal(err)
	}
	if c, ok := l.ToCommit(false, t0); ok {
		t.Fatalf("commit %+v passes a record in flight", c)
	}
	evidence(t, l, first, ack.Completed)
	wantCommit(t, l, 2)
}

func TestLateCompletionAfterDeath(t *testing.T) {
	l := newLane(0, Limits{})
	l.Receive(recs(0, 1))
	rg := take(t, l, 1)
	accept(t, l, rg)
	left := l.Kill()
	if left.From != 0 || left.Next != 2 || left.InFlight != 1 || !left.Any() {
		t.Fatalf("left behind %+v", left)
	}
	if err := l.Mark(rg, ack.Completed); !errors.Is(err, ErrDead) {
		t.Fatalf("mark on a dead lane: %v", err)
	}
	if c, ok := l.ToCommit(true, t0); ok {
		t.Fatalf("a dead lane gave out %+v", c)
	}
	if err := l.Committed(Commit{Offset: 0}); !errors.Is(err, ErrDead) {
		t.Fatalf("committed on a dead lane: %v", err)
	}
	if got := l.Receive(recs(2)); got.Refused != 1 {
		t.Fatalf("receipt %+v", got)
	}
}

func TestDrain(t *testing.T) {
	l := newLane(0, Limits{})
	l.Receive(recs(0, 1, 2))
	rg := take(t, l, 1)
	l.Drain()
	if l.Drained() {
		t.Fatal("drained with a request whose outcome is unknown")
	}
	if _, err := l.Take(1); !errors.Is(err, ErrDead) {
		t.Fatalf("take while draining: %v", err)
	}
	accept(t, l, rg)
	if c, ok := l.ToCommit(true, t0); ok {
		t.Fatalf("to commit %+v", c)
	}
	evidence(t, l, rg, ack.Completed)
	if !l.Drained() {
		t.Fatal("not drained")
	}
	c, ok := l.ToCommit(true, t0)
	if !ok || c.Offset != 1 || !c.Clean {
		t.Fatalf("to commit %+v %v", c, ok)
	}
	if err := l.Committed(c); err != nil {
		t.Fatal(err)
	}
	if _, ok := l.ToCommit(true, t0); ok {
		t.Fatal("the clean note was given twice")
	}
}

func TestDrainReturnsAndNotesClean(t *testing.T) {
	l := newLane(5, Limits{})
	l.Receive(recs(5))
	rg := take(t, l, 1)
	l.Drain()
	if err := l.Return(rg); err != nil {
		t.Fatal(err)
	}
	c, ok := l.ToCommit(true, t0)
	if !ok || c.Offset != 5 || !c.Clean {
		t.Fatalf("to commit %+v %v", c, ok)
	}
	if s := l.Snapshot(); s.QueuedRecords != 0 || s.QueuedBytes != 0 {
		t.Fatalf("snapshot %+v", s)
	}
}

func TestNoCleanNoteBeforeTheWaitIsOver(t *testing.T) {
	l := New(Config{Topic: "t", Start: 7, Committed: 7, NotBefore: t0.Add(time.Second)})
	if err := l.Committed(wantCommit(t, l, 7)); err != nil {
		t.Fatal(err)
	}
	l.Drain()
	if c, ok := l.ToCommit(true, t0); ok || c.Clean {
		t.Fatalf("to commit %+v %v", c, ok)
	}
	if c, ok := l.ToCommit(true, t0.Add(time.Second)); !ok || !c.Clean {
		t.Fatalf("to commit %+v %v", c, ok)
	}
}

func TestBlock(t *testing.T) {
	l := newLane(0, Limits{})
	l.Receive(recs(0, 1, 2, 3))
	why := errors.New("why")
	if !l.Block(2, why) || l.Block(3, why) {
		t.Fatal("the lowest block counts")
	}
	if got := l.Peek(nil, 10, t0); len(got) != 2 {
		t.Fatalf("peek gave %d records", len(got))
	}
	rg := take(t, l, 2)
	accept(t, l, rg)
	evidence(t, l, rg, ack.Completed)
	wantCommit(t, l, 2)
	if n, _, _ := l.Waiting(t0); n != 0 {
		t.Fatalf("%d records wait behind a block", n)
	}
	if s := l.Snapshot(); s.State != Blocked || s.Block.At != 2 {
		t.Fatalf("snapshot %+v", s)
	}
	l.Unblock(1)
	if l.Blocked() == nil {
		t.Fatal("another offset lifted the block")
	}
	if s := l.Snapshot(); s.QueuedRecords != 0 || s.QueuedBytes != 0 {
		t.Fatalf("what waits behind the block is kept: %+v", s)
	}
	if got := l.Receive(recs(4)); got.Refused != 1 {
		t.Fatalf("receipt %+v", got)
	}
}

func TestUnblock(t *testing.T) {
	l := newLane(0, Limits{})
	l.Receive(recs(0))
	at, counts := l.BlockReceiving(errors.New("why"))
	if at != 1 || !counts {
		t.Fatalf("blocked at %d, %v", at, counts)
	}
	if got := l.Receive(recs(1)); got.Refused != 1 {
		t.Fatalf("receipt %+v", got)
	}
	l.Unblock(1)
	l.Receive(recs(5))
	take(t, l, 2)
}

func TestBlockSendingStandsBeforeTheUnknownOutcome(t *testing.T) {
	l := newLane(0, Limits{})
	l.Receive(recs(0, 1, 2))
	rg := take(t, l, 2)
	if at, counts := l.BlockSending(errors.New("why")); at != 0 || !counts {
		t.Fatalf("blocked at %d, %v", at, counts)
	}
	if err := l.Return(rg); err != nil {
		t.Fatal(err)
	}
	if got := l.Peek(nil, 9, t0); len(got) != 0 {
		t.Fatalf("peek gave %+v", got)
	}
}

func TestNothingIsSentBeforeTheFirstCommitOrTooEarly(t *testing.T) {
	for _, committed := range []int64{NoCommit, 100} {
		l := New(Config{Topic: "t", Start: 100, Committed: committed, NotBefore: t0.Add(time.Second)})
		l.Receive(recs(100))
		now := t0.Add(time.Minute)
		if len(l.Peek(nil, 1, now)) != 0 {
			t.Fatal("sent before the lane was announced")
		}
		c := wantCommit(t, l, 100)
		if c.Clean {
			t.Fatal("the announcement is clean")
		}
		if err := l.Committed(c); err != nil {
			t.Fatal(err)
		}
		if c, ok := l.ToCommit(false, t0); ok {
			t.Fatalf("announced twice: %+v", c)
		}
		if len(l.Peek(nil, 1, t0)) != 0 {
			t.Fatal("sent too early")
		}
		if len(l.Peek(nil, 1, now)) != 1 {
			t.Fatal("not sent")
		}
	}
}

func TestHysteresisAndUncommittedLimit(t *testing.T) {
	l := newLane(0, Limits{HighRecords: 4, LowRecords: 1, MaxUncommitted: 4})
	if l.Receive(recs(0, 1, 2)).Full || !l.Receive(recs(3)).Full {
		t.Fatal("full at the wrong number")
	}
	rg := take(t, l, 2)
	if full, err := l.Accept(rg); err != nil || !full {
		t.Fatalf("full %v, %v: above the low mark", full, err)
	}
	second := take(t, l, 2)
	if full, err := l.Accept(second); err != nil || full {
		t.Fatalf("full %v, %v: at the low mark", full, err)
	}
	l.Receive(recs(4))
	if len(l.Peek(nil, 1, t0)) != 0 {
		t.Fatal("sending goes on although nothing is committed")
	}
	evidence(t, l, rg, ack.Completed)
	if err := l.Committed(wantCommit(t, l, 2)); err != nil {
		t.Fatal(err)
	}
	take(t, l, 1)
}

func TestReturnedRecordsComeAgainFirst(t *testing.T) {
	l := newLane(0, Limits{})
	l.Receive(recs(0, 1, 2))
	rg := take(t, l, 2)
	if err := l.Return(rg); err != nil {
		t.Fatal(err)
	}
	if err := l.Return(rg); err == nil {
		t.Fatal("a range was returned twice")
	}
	if _, err := l.Accept(rg); err == nil {
		t.Fatal("a returned range was accepted")
	}
	again := l.Peek(nil, 3, t0)
	if len(again) != 3 || again[0].Offset != 0 {
		t.Fatalf("peek %+v", again)
	}
}

func TestCommitBelowOrAboveIsRefused(t *testing.T) {
	l := newLane(3, Limits{})
	l.Receive(recs(3))
	if err := l.Committed(Commit{Offset: 4}); err == nil {
		t.Fatal("committed what is not completed")
	}
	if err := l.Committed(Commit{Offset: 2}); err == nil {
		t.Fatal("committed below the start")
	}
}
