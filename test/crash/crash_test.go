package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"holdfast/internal/crash"
	"holdfast/internal/sabotage"
	"holdfast/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A selection of the matrix that fits into every run of the tests: at steps
// between two rungs, a SIGKILL, an answer that is lost, and a pipeline that
// goes back, under each of the levels of delivery; and, over plain SQL, one run
// for each way to copy rows, and a loss that is healed.
func TestSelection(t *testing.T) {
	for name, opts := range map[string]options{
		"pgsource": {
			variants: []string{"pgsource effectively", "pgsource at_least"}, points: []string{"pgsource.sent", "pgsource.completed", "pgsource.after-bookmark"},
			faults: []string{"SIGKILL", "response lost", "journal"},
		},
		"kafkasink": {variants: []string{"kafkasink"}, points: []string{"kafkasink.accepted", "kafkasink.progress-sent", "kafkasink.before-commit", "kafkasink.after-dlq"}, faults: []string{"SIGKILL"}},
		"copies": {points: []string{"copy-sent", "copy-proven", "request-taken", "resync-ghosts"}, faults: []string{"SIGKILL", "nothing"}, cases: []crashCase{
			selected(peeking, crash.PgCopySent, byAddition, "SIGKILL"),
			selected(peeking, crash.PgCopyProven, byResync, "SIGKILL"),
			selected(peeking, crash.PgRequestTaken, byRepair, "SIGKILL"),
			selected(peeking, crash.PgResyncGhosts, byResync, "destination back with nothing"),
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			opts.seed, opts.dir, opts.out = uint64(time.Now().UnixNano()), t.TempDir(), &testOutput{t: t}
			r, err := runMatrix(t.Context(), opts)
			if err != nil {
				t.Fatal(err)
			}
			t.Log(r.line())
			if !r.green() || len(r.hits) != len(opts.points) || len(r.faults) != len(opts.faults) {
				t.Errorf("%s; not reached %q, also wrong %q", r.first, r.unreached, r.other)
			}
		})
	}
}

// selected is one run of the matrix.
func selected(variant string, p crash.Point, by way, fault string) crashCase {
	return crashCase{variant: variantNamed(variant), point: p, by: by, fault: faultNamed(fault), visit: 1}
}

type testOutput struct{ t *testing.T }

func (o *testOutput) Write(p []byte) (int, error) {
	o.t.Log(string(bytes.TrimSuffix(p, []byte("\n"))))
	return len(p), nil
}

// The plan meets every pair, and the same seed makes the same one.
func TestPlan(t *testing.T) {
	for seed := range uint64(20) {
		cases := plan(seed, nil, nil)
		if missing := uncovered(cases); len(missing) > 0 {
			t.Errorf("seed %d: %d pairs never meet, such as %s", seed, len(missing), missing[0])
		}
		again := plan(seed, nil, nil)
		for i := range cases {
			if cases[i] != again[i] {
				t.Fatalf("seed %d: run %d is %v and %v", seed, i, cases[i], again[i])
			}
		}
		killed, met, lived := map[crash.Point]int{}, map[string]int{}, map[string]int{}
		for _, c := range cases {
			met[c.fault.name]++
			if c.alive {
				lived[c.fault.name]++
			}
			if c.fault.name == "SIGKILL" {
				killed[c.point]++
			}
		}
		for i := range faults {
			if f := &faults[i]; f.both {
				if n, of := lived[f.name], met[f.name]; n < of/3 || n > of*2/3 {
					t.Errorf("seed %d: the daemon goes on in %d of %d runs of %q", seed, n, of, f.name)
				}
			}
		}
		for _, p := range crash.Points {
			if killed[p] == 0 {
				t.Errorf("seed %d: no SIGKILL at %s", seed, p)
			}
		}
	}
	if n := len(crash.Points); n < 25 {
		t.Errorf("%d places", n)
	}
	if n := len(faults); n < 7 {
		t.Errorf("%d faults", n)
	}
	// A plan that leaves something out is found out.
	cases := plan(1, nil, nil)
	if missing := uncovered(cases[:len(cases)-1]); len(missing) == 0 {
		t.Error("a run is missing, and no pair")
	}
	if a, b := plan(1, nil, nil), plan(2, nil, nil); len(a) == len(b) {
		same := true
		for i := range a {
			same = same && a[i] == b[i]
		}
		if same {
			t.Error("two seeds make the same plan")
		}
	}
}

// Nothing of the places and of the broken rules is in a build that is not told
// to have them.
func TestReleaseBuildHasNoPlaces(t *testing.T) {
	for _, command := range []string{"./cmd/pgsource", "./cmd/kafkasink"} {
		for _, tags := range []string{"", "crashpoints,sabotage"} {
			path, err := harness.Build(t.Context(), command, harness.BuildOptions{Tags: tags})
			if err != nil {
				t.Fatal(err)
			}
			program, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, text := range []string{"CRASH_AT", "SABOTAGE", string(sabotage.AckOnAccepted), string(sabotage.RetryAtOnce), "internal/sabotage"} {
				if got := bytes.Contains(program, []byte(text)); got != (tags != "") {
					t.Errorf("%s built with tags %q has %q: %v", command, tags, text, got)
				}
			}
		}
	}
}

// Three wrong builds are found out; "make sabotage" has all of them.
func TestSabotage(t *testing.T) {
	opts := options{seed: uint64(time.Now().UnixNano()), dir: t.TempDir(), out: &testOutput{t: t}}
	green, err := runSabotage(t.Context(), opts, []string{"S1 ", "S19 ", "S22 "}, 3)
	if err != nil || green != 0 {
		t.Errorf("%d stay green, %v", green, err)
	}
}

// Each mistake of the list is made, or has a reason why it cannot be; and each
// test of a package that finds one out exists.
func TestWrongBuildsAreComplete(t *testing.T) {
	made := map[string]bool{}
	for i := range wrongBuilds {
		b := &wrongBuilds[i]
		made[b.id] = true
		ways := 0
		for _, is := range []bool{b.scenario != nil, b.point != "", b.pkg != ""} {
			if is {
				ways++
			}
		}
		if ways != 1 || (b.pkg == "") == (b.variant == "") {
			t.Errorf("%s: %d ways to find it out", b.name(), ways)
		}
		if b.variant != "" {
			_ = variantNamed(b.variant)
		}
	}
	for n := 1; n <= 22; n++ {
		id := fmt.Sprintf("S%d", n)
		if _, cannot := withoutCounterpart[id]; made[id] == cannot {
			t.Errorf("%s: made %v, cannot be made %v", id, made[id], cannot)
		}
	}
}

// docs/guarantees.md says how each wrong build was found out.
func TestGuaranteesNameEveryWrongBuild(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "guarantees.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for i := range wrongBuilds {
		if row := "\n| " + wrongBuilds[i].what + " | "; !bytes.Contains(page, []byte(row)) {
			t.Errorf("there is no row for %s", wrongBuilds[i].name())
		} else {
			rows++
		}
	}
	_, table, _ := strings.Cut(string(page), "| wrong build |")
	if n := strings.Count(table, "\n| ") - 1; n != rows {
		t.Errorf("%d rows, and %d wrong builds", n, rows)
	}
}

// Every wrong build that runs in a world says by what it is to be found out.
func TestEveryWrongBuildIsFoundOutBySomething(t *testing.T) {
	for i := range wrongBuilds {
		b := &wrongBuilds[i]
		if _, err := regexp.Compile(b.sees); err != nil || (b.pkg == "") == (b.sees == "") {
			t.Errorf("%s: is to be found out by %q: %v", b.name(), b.sees, err)
		}
	}
}

// What excuses a torn state ends as early as it can be told.
func TestWhatExcusesATornState(t *testing.T) {
	for name, c := range map[string]struct {
		before, coming excuse
		open           bool
		want           excuse
	}{
		"everything kept, nothing open":                  {coming: committedOpen},
		"everything kept, a transaction open":            {coming: committedOpen, open: true, want: committedOpen},
		"a checkpoint of all that counts, nothing open":  {coming: sentOutside},
		"a checkpoint of all that counts, one open":      {coming: sentOutside, open: true, want: sentOutside},
		"everything kept, behind a loss":                 {before: lostRows, coming: committedOpen, open: true, want: lostRows},
		"rows lost":                                      {coming: lostRows, want: lostRows},
		"rows lost behind what was open":                 {before: committedOpen, coming: lostRows, want: lostRows},
		"rows lost in the first copy":                    {before: firstCopy, coming: lostRows, want: firstCopy},
		"kept what was acknowledged, a transaction open": {open: true},
	} {
		t.Run(name, func(t *testing.T) {
			o := newBankOracle()
			o.excuse, o.open, o.opened = c.before, c.open, true
			o.comesBack(c.coming, false, false)
			o.cameBack()
			if o.excuse != c.want || o.opened {
				t.Errorf("%+v, opened %v", o.excuse, o.opened)
			}
			o.healed()
			if got := o.heals(); got {
				t.Error("excused behind the healing")
			}
		})
	}
}

// A row of a table without a key may be missing where its transaction was
// acknowledged on the word of a pipeline that lost it, and nowhere else.
func TestWhatALossMayTake(t *testing.T) {
	for name, c := range map[string]struct {
		happens func(*bankOracle)
		want    int64
	}{
		"completed, not acknowledged": {func(o *bankOracle) { o.held[1], o.now[1] = 5, 5; o.acknowledged(1, 3); o.loses() }, 3},
		"acknowledged, nothing lost":  {func(o *bankOracle) { o.held[1], o.now[1] = 5, 5; o.acknowledged(1, 5) }, 0},
		"acknowledged behind the loss on older evidence": {func(o *bankOracle) {
			o.held[1], o.now[1] = 5, 5
			o.loses()
			o.acknowledged(1, 5)
		}, 5},
		"acknowledged behind the loss, delivered again": {func(o *bankOracle) {
			o.held[1], o.now[1] = 5, 5
			o.loses()
			o.now[1] = 5
			o.acknowledged(1, 5)
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			o := newBankOracle()
			c.happens(o)
			if got := o.lost()[1]; got != c.want {
				t.Errorf("up to %d, expected %d", got, c.want)
			}
		})
	}
}

// The comparison that the whole matrix rests on finds each kind of difference.
func TestRowsOfTheLedgerAreKnown(t *testing.T) {
	for row, want := range map[string]bool{`{"id":7,"n":5,"writer":2}`: true, `{"id":7,"n":6,"writer":2}`: false, `{"id":7,"n":1,"writer":1}`: false, `{"id":7,"n":1,"writer":0}`: false} {
		if got := lostOfLedger(row, [writers + 1]int64{2: 5}); got != want {
			t.Errorf("%s may be lost: %v", row, got)
		}
	}
	if got, err := canonical(`{"b":1, "a":2}`); err != nil || strings.ReplaceAll(got, " ", "") != `{"a":2,"b":1}` {
		t.Errorf("%s %v", got, err)
	}
}
