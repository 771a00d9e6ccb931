package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// result counts what the oracles of all runs have found. Several worlds write
// into it at once.
type result struct {
	mu   sync.Mutex
	out  io.Writer
	runs int
	// hits counts, for each place, the runs that came to it.
	hits                                 map[string]int
	faults                               map[string]int
	alive                                map[string]int // the runs of each fault in which the daemon lived on
	lost, torn, regressed, doubleApplied int
	unreached                            []string
	other                                []string
	// expected counts what docs/guarantees.md does not promise and what was
	// seen, by name.
	expected map[string]int
	// first is what was found first; the runs of a wrong build end with it.
	first string
}

func newResult(out io.Writer) *result {
	return &result{out: out, hits: map[string]int{}, faults: map[string]int{}, alive: map[string]int{}, expected: map[string]int{}}
}

func (r *result) green() bool {
	return r.runs > 0 && r.lost+r.torn+r.regressed+r.doubleApplied == 0 && len(r.unreached)+len(r.other) == 0
}

// line is the last line of the matrix.
func (r *result) line() string {
	return fmt.Sprintf("crash matrix: %d points, %d faults, %d runs, lost %d, torn %d, regressed %d, double-applied %d",
		len(r.hits), len(r.faults), r.runs, r.lost, r.torn, r.regressed, r.doubleApplied)
}

// details says how often each place was come to, and what was expected.
func (r *result) details(began time.Time) {
	fmt.Fprintln(r.out, "runs that came to each place:")
	for _, p := range slices.Sorted(maps.Keys(r.hits)) {
		fmt.Fprintf(r.out, "  %3d %s\n", r.hits[p], p)
	}
	fmt.Fprintln(r.out, "runs in which each fault happened:")
	for _, f := range slices.Sorted(maps.Keys(r.faults)) {
		text := ""
		if n := r.alive[f]; n > 0 {
			text = fmt.Sprintf(", in %d of them to a daemon that went on", n)
		}
		fmt.Fprintf(r.out, "  %3d %s%s\n", r.faults[f], f, text)
	}
	for _, what := range slices.Sorted(maps.Keys(r.expected)) {
		fmt.Fprintf(r.out, "expected, since it is not promised: %d times %s\n", r.expected[what], what)
	}
	for _, what := range r.unreached {
		fmt.Fprintf(r.out, "never reached: %s\n", what)
	}
	for _, what := range r.other {
		fmt.Fprintf(r.out, "also wrong: %s\n", what)
	}
	fmt.Fprintf(r.out, "took %v and %v of processor time\n", time.Since(began).Round(time.Second), processorTime().Round(time.Second))
}

// processorTime is what this process and its children have used.
func processorTime() time.Duration {
	sum := time.Duration(0)
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var u syscall.Rusage
		if err := syscall.Getrusage(who, &u); err == nil {
			sum += time.Duration(u.Utime.Nano() + u.Stime.Nano())
		}
	}
	return sum
}

// collect takes what the oracles found in one run; err is what ended it.
func (r *result) collect(name string, w world, err error) {
	f := w.findings()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lost += len(f.early)
	r.torn += len(f.torn)
	r.regressed += len(f.regress) + len(f.back)
	r.doubleApplied += len(f.double)
	r.other = append(r.other, f.invented...)
	for what, n := range f.expected {
		r.expected[what] += n
	}
	for _, kind := range []struct {
		what string
		list []string
	}{
		{"acknowledged too early", f.early},
		{"acknowledged position went back", f.back},
		{"position out of nowhere", f.invented},
		{"torn", f.torn},
		{"regressed", f.regress},
		{"applied twice", f.double},
	} {
		for i, text := range kind.list {
			r.found(kind.what + ": " + text)
			if i == 3 {
				fmt.Fprintf(r.out, "%s: %s: %d more\n", name, kind.what, len(kind.list)-i)
				break
			}
			fmt.Fprintf(r.out, "%s: %s: %s\n", name, kind.what, text)
		}
	}
	if err == nil {
		return
	}
	r.found(err.Error())
	fmt.Fprintf(r.out, "%s: %v\n", name, err)
	if lines := w.common().daemon.Log().Tail(25); len(lines) > 0 {
		fmt.Fprintf(r.out, "its last lines:\n  %s\n", strings.Join(lines, "\n  "))
	}
	if _, lost := errors.AsType[*lostError](err); lost {
		r.lost++
	} else {
		r.other = append(r.other, name+": "+err.Error())
	}
}

func (r *result) found(what string) {
	if r.first == "" {
		r.first = what
	}
}
