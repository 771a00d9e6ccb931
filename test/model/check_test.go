package model

import (
	"fmt"
	"testing"
)

// clock is a toy: it counts up to 9 and back to 0; at 5 it may, by a fault,
// fall into a hole at 20.
type clock struct {
	wrongAt int
	wayOut  bool
}

func (clock) Start() int { return 0 }

func (c clock) Next(s int, yield func(Step[int])) {
	switch {
	case s == 20 && c.wayOut:
		yield(Step[int]{Action: "climb", Kind: "climb", To: 0})
	case s == 20:
	default:
		yield(Step[int]{Action: fmt.Sprint("tick ", s), Kind: "tick", To: (s + 1) % 10})
	}
	if s == 5 {
		yield(Step[int]{Action: "fall", Kind: "fall", Fault: true, To: 20})
	}
	if s == 2 {
		yield(Step[int]{Action: "jump", Kind: "jump", To: 7})
	}
}

func (c clock) Invariant(s int) string {
	if s == c.wrongAt {
		return "it is that late"
	}
	return ""
}

func (clock) Settled(s int) bool { return s == 9 }
func (clock) Show(s int) string  { return fmt.Sprint(s) }

func actions(c *Counterexample) (names []string) {
	for _, e := range c.Trace {
		names = append(names, e.Action)
	}
	return names
}

func TestExploreVisitsEverything(t *testing.T) {
	r, err := Explore(clock{wrongAt: -1, wayOut: true}, 100)
	if err != nil || r.Wrong != nil {
		t.Fatal(err, r.Wrong)
	}
	if r.States != 11 || r.Transitions != 13 || r.Kinds["tick"] != 10 || r.Kinds["fall"] != 1 {
		t.Errorf("%+v", r)
	}
	if n := r.Count(func(s int) bool { return s > 9 }); n != 1 {
		t.Errorf("%d", n)
	}
}

// The trace is a shortest one.
func TestExploreFindsShortestTrace(t *testing.T) {
	r, err := Explore(clock{wrongAt: 8}, 100)
	if err != nil || r.Wrong == nil {
		t.Fatal(err, r)
	}
	if got := fmt.Sprint(actions(r.Wrong)); got != "[start tick 0 tick 1 jump tick 7]" {
		t.Error(got)
	}
}

// A state out of which only nothing leads is found, although it is reached by
// a fault.
func TestExploreFindsDeadEnd(t *testing.T) {
	r, err := Explore(clock{wrongAt: -1}, 100)
	if err != nil || r.Wrong == nil {
		t.Fatal(err, r)
	}
	if got := fmt.Sprint(actions(r.Wrong)); got != "[start tick 0 tick 1 tick 2 tick 3 tick 4 fall]" {
		t.Error(got)
	}
}

func TestExploreKeepsItsLimit(t *testing.T) {
	if _, err := Explore(clock{wrongAt: -1}, 5); err == nil {
		t.Error("no error")
	}
}
