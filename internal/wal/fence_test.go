package wal

import "testing"

// What ended behind the point where its timeline did is not on the next one:
// it is neither waited for, nor passed over when something else ends there.
func TestPromotionForgetsWhatItLost(t *testing.T) {
	const ended = 100
	was := &State{
		Intent:  &storedIntent{Incarnation: "a", ID: 7, Through: 150},
		Refused: &RefusedTransaction{End: 120}, Skip: &SkippedTransaction{End: 101},
	}
	next := was.clone()
	next.forgetBehind(ended)
	if *next.Intent != (storedIntent{Incarnation: "a", ID: 7, Through: ended}) || next.Refused != nil || next.Skip != nil {
		t.Errorf("it keeps %+v, %+v, %+v", next.Intent, next.Refused, next.Skip)
	}
	if was.Intent.Through != 150 {
		t.Error("the state before was changed, although it is a value")
	}
	kept := &State{
		Intent:  &storedIntent{Through: ended},
		Refused: &RefusedTransaction{End: ended}, Skip: &SkippedTransaction{End: ended},
	}
	kept.forgetBehind(ended)
	if kept.Intent.Through != ended || kept.Refused == nil || kept.Skip == nil {
		t.Errorf("it forgets what the new timeline has: %+v", kept)
	}
}

// A transaction that was found open is a state of the source as soon as
// everything up to what may be in it is in it again.
func TestOpenedIsWhole(t *testing.T) {
	for _, c := range []struct {
		o    opened
		next uint64
		want bool
	}{
		{opened{}, 0, true},
		{opened{before: 10}, 0, false},
		{opened{before: 10, sum: &batch{end: 9}}, 0, false},
		{opened{before: 10, sum: &batch{end: 9}}, 10, false},
		{opened{before: 10, sum: &batch{end: 9}}, 11, true},
		{opened{before: 10, sum: &batch{end: 10}}, 0, true},
	} {
		if got := c.o.whole(c.next); got != c.want {
			t.Errorf("%+v before %d: whole is %t", c.o, c.next, got)
		}
	}
}
