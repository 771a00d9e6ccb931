package config

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// exitConfiguration is EX_CONFIG of sysexits.
const exitConfiguration = 78

// Fault is one thing that is wrong with the configuration. None of its texts
// carries a value that was read, of a secret or of anything else: a password
// typed into the wrong variable must not reach a log.
type Fault struct {
	Name    string // of the variable
	Wrong   string // "is not set"
	Allowed string // "a whole number from 1 to 10"; "" where nothing helps
}

// String gives the fault as one line.
func (f Fault) String() string {
	s := f.Name + " " + f.Wrong
	if f.Allowed != "" {
		s += "; allowed: " + f.Allowed
	}
	return s
}

// Faults is the error of LoadPGSource and LoadKafkaSink: everything that is
// wrong, at once, in the order of the settings, unknown names last.
type Faults struct {
	List []Fault
	// Hint says where all settings are listed, "" where that would not help.
	Hint string
}

// Error gives one line for each fault, and one for the hint.
func (f *Faults) Error() string {
	lines := make([]string, 0, len(f.List)+1)
	for _, one := range f.List {
		lines = append(lines, one.String())
	}
	if f.Hint != "" {
		lines = append(lines, f.Hint)
	}
	return strings.Join(lines, "\n")
}

// ExitCode is the code a process ends with for this error: 78.
func (f *Faults) ExitCode() int { return exitConfiguration }

// invalid is the error of every parser and validator of this package. Its
// texts are constants or made from constants and counts: never from input.
type invalid struct {
	wrong   string
	allowed string // "" = what the setting itself says
}

// Error gives the text for the rare place where no setting is known.
func (e *invalid) Error() string { return e.wrong }

// wrong makes an invalid; args may be counts and constants, never input.
func wrong(format string, args ...any) error {
	return &invalid{wrong: fmt.Sprintf(format, args...)}
}

// nearest gives the candidate with the smallest edit distance to name; of
// equals, the first in order. It is "" when none is near: more than a third of
// name would have to change, and whoever wrote it meant something else.
func nearest(name string, candidates []string) string {
	best, bestDistance := "", utf8.RuneCountInString(name)/3+1
	for _, c := range candidates {
		if d := distance(name, c); d < bestDistance {
			best, bestDistance = c, d
		}
	}
	return best
}

// distance is the optimal-string-alignment distance: inserts, deletes,
// replacements and swaps of neighbours cost one each.
func distance(a, b string) int {
	x, y := []rune(a), []rune(b)
	older, previous, current := make([]int, len(y)+1), make([]int, len(y)+1), make([]int, len(y)+1)
	for j := range previous {
		previous[j] = j
	}
	for i := 1; i <= len(x); i++ {
		current[0] = i
		for j := 1; j <= len(y); j++ {
			cost := 1
			if x[i-1] == y[j-1] {
				cost = 0
			}
			d := min(previous[j]+1, current[j-1]+1, previous[j-1]+cost)
			if i > 1 && j > 1 && x[i-1] == y[j-2] && x[i-2] == y[j-1] {
				d = min(d, older[j-2]+1)
			}
			current[j] = d
		}
		older, previous, current = previous, current, older
	}
	return previous[len(y)]
}

// alternatives writes "a", "a or b", "a, b or c".
func alternatives(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(slices.Clone(words[:last]), ", ") + " or " + words[last]
}
