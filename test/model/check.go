// Package model holds a small model of Holdfast's rules (what may be
// acknowledged, sent, skipped and believed, and when) and a checker that walks
// through every state that the model can reach, in a bounded scope: a log of a
// few units, a few faults of each kind.
//
// The model is not the program. It shows whether the rules suffice: that no
// order of sends, answers, crashes, restarts of the pipeline, late requests,
// rebalances and checkpoints loses a unit without anybody noticing, shows half
// a transaction, or ends in a state that nothing leads out of. The decision
// about the progress table is not modelled but called: feldera.Decide.
//
//	check.go        the checker, which knows nothing of Holdfast
//	destination.go  the pipeline: queues, steps, one transaction, checkpoints
//	world.go        source, daemon, network; the scope; the broken rules
//	actions.go      what can happen
//	invariants.go   what must hold
//
// Each rule can be broken by name, and a test expects a counterexample for
// each: a rule that can be broken without one is not needed, or not checked.
package model

import (
	"fmt"
	"strings"
)

// Step is one thing that happens in a state.
type Step[S comparable] struct {
	// Action names it, with its object: "send 2 to A".
	Action string
	// Kind is the closed name that is counted: "send".
	Kind string
	// Fault marks what a schedule without faults leaves out.
	Fault bool
	To    S
	// Wrong says which rule the step itself breaks, "" for none.
	Wrong string
}

// System is a finite transition system.
type System[S comparable] interface {
	Start() S
	// Next gives every step that is possible in s.
	Next(s S, yield func(Step[S]))
	// Invariant says what is wrong with s, "" if nothing is.
	Invariant(s S) string
	// Settled tells whether s is an end that a schedule without faults may
	// come to rest in.
	Settled(s S) bool
	// Show writes s in one line.
	Show(s S) string
}

// Event is one step of a trace.
type Event struct{ Action, State string }

// Counterexample is a shortest way from the start to something wrong.
type Counterexample struct {
	Wrong string
	Trace []Event
}

// String writes the actions one a line, and the states around the last one.
func (c *Counterexample) String() string {
	var b strings.Builder
	last := len(c.Trace) - 1
	for i, e := range c.Trace {
		fmt.Fprintf(&b, "%3d  %s\n", i, e.Action)
		if i >= last-1 {
			fmt.Fprintf(&b, "       = %s\n", e.State)
		}
	}
	fmt.Fprintf(&b, "     WRONG: %s", c.Wrong)
	return b.String()
}

// Report is what an exploration found.
type Report[S comparable] struct {
	States, Transitions, Depth int
	// Kinds counts the transitions by kind.
	Kinds map[string]int
	// Wrong is nil where everything reachable is right.
	Wrong *Counterexample

	states []S
}

// Count gives the number of reachable states with a property.
func (r *Report[S]) Count(has func(S) bool) int {
	n := 0
	for i := range r.states {
		if has(r.states[i]) {
			n++
		}
	}
	return n
}

// node is how a state was reached first, which is by a shortest way.
type node struct {
	parent int32
	depth  int32
}

// Explore visits every reachable state, breadth first, so that the first
// thing wrong has a shortest trace. Where nothing is wrong it then asks of
// every state whether a schedule without faults leads from it to a settled
// one. More than limit states is an error of the scope.
func Explore[S comparable](sys System[S], limit int) (*Report[S], error) {
	r := &Report[S]{Kinds: map[string]int{}}
	index := map[S]int32{}
	var nodes []node
	// faultless holds, for each state in turn, the states that one step
	// without a fault leads to.
	var faultless []int32
	var from []int32 // from[i] is where the steps of state i begin

	add := func(s S, parent int32) int32 {
		if i, known := index[s]; known {
			return i
		}
		i := int32(len(nodes))
		depth := int32(0)
		if parent >= 0 {
			depth = nodes[parent].depth + 1
		}
		index[s] = i
		r.states = append(r.states, s)
		nodes = append(nodes, node{parent, depth})
		return i
	}
	start := sys.Start()
	add(start, -1)
	if wrong := sys.Invariant(start); wrong != "" {
		r.Wrong = trace(sys, r.states, nodes, 0, wrong, nil)
		return r, nil
	}
	for i := int32(0); int(i) < len(r.states); i++ {
		from = append(from, int32(len(faultless)))
		r.Depth = int(nodes[i].depth)
		sys.Next(r.states[i], func(step Step[S]) {
			if r.Wrong != nil {
				return
			}
			r.Transitions++
			r.Kinds[step.Kind]++
			if step.Wrong != "" {
				r.Wrong = trace(sys, r.states, nodes, i, step.Wrong, &step)
				return
			}
			known := len(nodes)
			to := add(step.To, i)
			if int(to) == known {
				if wrong := sys.Invariant(step.To); wrong != "" {
					r.Wrong = trace(sys, r.states, nodes, i, wrong, &step)
					return
				}
			}
			if !step.Fault {
				faultless = append(faultless, to)
			}
		})
		if r.Wrong != nil {
			break
		}
		if len(nodes) > limit {
			return nil, fmt.Errorf("more than %d states: the scope is too large", limit)
		}
	}
	r.States = len(nodes)
	if r.Wrong == nil {
		from = append(from, int32(len(faultless)))
		if i := stuck(sys, r.states, from, faultless); i >= 0 {
			r.Wrong = trace(sys, r.states, nodes, i, "no schedule without faults leads from here to an end", nil)
		}
	}
	return r, nil
}

// stuck gives the first state from which no settled state can be reached
// without a fault, -1 if there is none: backwards from the settled ones.
func stuck[S comparable](sys System[S], states []S, from, faultless []int32) int32 {
	n := len(states)
	// The edges turned round, laid out like from and faultless.
	into := make([]int32, n+1)
	for _, to := range faultless {
		into[to+1]++
	}
	for i := range n {
		into[i+1] += into[i]
	}
	back := make([]int32, len(faultless))
	fill := append([]int32(nil), into[:n]...)
	for i := range n {
		for _, to := range faultless[from[i]:from[i+1]] {
			back[fill[to]] = int32(i)
			fill[to]++
		}
	}
	good := make([]bool, n)
	var work []int32
	for i := range n {
		if sys.Settled(states[i]) {
			good[i] = true
			work = append(work, int32(i))
		}
	}
	for len(work) > 0 {
		i := work[len(work)-1]
		work = work[:len(work)-1]
		for _, before := range back[into[i]:into[i+1]] {
			if !good[before] {
				good[before] = true
				work = append(work, before)
			}
		}
	}
	for i := range n {
		if !good[i] {
			return int32(i)
		}
	}
	return -1
}

// trace tells how state i was reached, and the step that was wrong there.
func trace[S comparable](sys System[S], states []S, nodes []node, i int32, wrong string, last *Step[S]) *Counterexample {
	var path []int32
	for at := i; at >= 0; at = nodes[at].parent {
		path = append(path, at)
	}
	c := &Counterexample{Wrong: wrong}
	c.Trace = append(c.Trace, Event{"start", sys.Show(states[path[len(path)-1]])})
	for k := len(path) - 2; k >= 0; k-- {
		// The name of a step is not kept: it is found again.
		name := "?"
		sys.Next(states[path[k+1]], func(step Step[S]) {
			if name == "?" && step.To == states[path[k]] {
				name = step.Action
			}
		})
		c.Trace = append(c.Trace, Event{name, sys.Show(states[path[k]])})
	}
	if last != nil {
		c.Trace = append(c.Trace, Event{last.Action, sys.Show(last.To)})
	}
	return c
}
