package wal

import (
	"strings"
	"testing"

	"holdfast/internal/decode"
)

// A primary has what it has sent on its timeline; one that has less was put
// back. A standby may rightly be behind.
func TestServerReaches(t *testing.T) {
	for _, c := range []struct {
		end, sent LSN
		want      bool
	}{{100, 0, true}, {100, 99, true}, {100, 100, true}, {100, 101, false}, {0, 101, true}} {
		err := answering{identity{"1", 7, "d"}, c.end}.reaches(c.sent)
		if (err == nil) != c.want {
			t.Errorf("%+v: %v", c, err)
		}
		if err == nil {
			continue
		}
		refused := refusal(t, err)
		for _, part := range []string{"ends at 0/64", "up to 0/65 (1 bytes more)", "earlier state"} {
			if refused.Reason != decode.ReasonGap || refused.Where != "timeline 7" || !strings.Contains(refused.Why, part) {
				t.Errorf("%+v lacks %q", refused, part)
			}
		}
	}
}

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
