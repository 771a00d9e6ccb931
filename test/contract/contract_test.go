package main

import (
	"bytes"
	"context"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"holdfast/test/felderasim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// runAll runs clauses against a target and gives what came of it and the
// lines of those that did not pass.
func runAll(t *testing.T, target target, list []clause) (summary, []string) {
	t.Helper()
	var out bytes.Buffer
	r, err := newRunner(t.Context(), target, &out)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	sum := r.run(t.Context(), list)
	var bad []string
	for line := range strings.Lines(out.String()) {
		if !strings.HasPrefix(line, "ok ") {
			bad = append(bad, strings.TrimSpace(line))
		}
	}
	return sum, bad
}

// Every clause can be tried on the simulator, and holds there.
func TestSimulator(t *testing.T) {
	sum, bad := runAll(t, target{}, clauses())
	for _, line := range bad {
		t.Error(line)
	}
	if sum.failed != 0 || sum.untestable != 0 || sum.passed != len(clauses()) {
		t.Error(sum)
	}
}

// A real pipeline is one that the suite has not started, may not break, and
// finds as it was left by the last run. Against it every clause that can be
// tried holds, twice; what cannot is said to be untestable; and no row stays.
func TestRealTarget(t *testing.T) {
	for name, c := range map[string]struct {
		target   func(*felderasim.Sim) target
		testable need
	}{
		"manager": {
			func(s *felderasim.Sim) target {
				return target{url: s.URL(), pipeline: "p", bareURL: s.BareURL(), key: simKey("k"), readOnlyKey: simKey("r")}
			},
			needManager | needBare | needAuth | needReadOnly | needOpenSource,
		},
		"manager that is all ours": {
			func(s *felderasim.Sim) target {
				return target{url: s.URL() + "/", pipeline: "p", key: simKey("k"), allow: needExclusive | needRestart}
			},
			needManager | needAuth | needOpenSource | needExclusive | needRestart,
		},
		"bare process": {
			func(s *felderasim.Sim) target { return target{url: s.BareURL()} },
			needBare,
		},
	} {
		t.Run(name, func(t *testing.T) {
			sim, err := felderasim.New(felderasim.Options{
				SQL: programSQL, APIKey: simKey("k"), ReadOnlyKey: simKey("r"),
				IngressTimeout: 2 * time.Second, CallTimeout: 2 * time.Second,
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := sim.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := sim.Close(); err != nil {
					t.Error(err)
				}
			}()
			untestable := 0
			for _, c2 := range clauses() {
				if c2.needs&^c.testable != 0 {
					untestable++
				}
			}
			for range 2 {
				sum, bad := runAll(t, c.target(sim), clauses())
				for _, line := range bad {
					if strings.HasPrefix(line, "FAIL") {
						t.Error(line)
					}
				}
				if sum.failed != 0 || sum.untestable != untestable {
					t.Errorf("%s; expected %d untestable here", sum, untestable)
				}
			}
			for _, table := range []string{"hfc_types", "hfc_types_bag", "hfc_kv", "hfc_pair", "hfc_strict", "hfc_composite", "hfc_cut", "hfc_bag", "hfc_hidden", `"HfcQuoted"`} {
				if rows := sim.Dump(table); len(rows) != 0 {
					t.Errorf("%d rows are left in %s, the first is %s", len(rows), table, rows[0])
				}
			}
		})
	}
}

// Ids are unique, requirements are met by some simulator, and each clause says
// where it comes from.
func TestClauses(t *testing.T) {
	list := clauses()
	if len(list) < 60 {
		t.Errorf("%d clauses", len(list))
	}
	form := regexp.MustCompile(`^(C[1-9](\.[0-9])?|K)-[A-Za-z0-9_-]+$`)
	section := regexp.MustCompile(`^([1-9](\.[0-9])?|client)$`)
	seen := map[string]bool{}
	for _, c := range list {
		if seen[c.id] {
			t.Errorf("%s stands twice", c.id)
		}
		seen[c.id] = true
		if !form.MatchString(c.id) || !section.MatchString(c.section) || c.says == "" || c.run == nil {
			t.Errorf("%q, section %q, says %q", c.id, c.section, c.says)
		}
		if c.needs&needOpenSource != 0 && c.needs&needEnterprise != 0 {
			t.Errorf("%s needs both editions", c.id)
		}
	}
}

// The program's output and exit codes are what "make contract" promises.
func TestCommand(t *testing.T) {
	run := func(env map[string]string, args ...string) (int, string, string) {
		t.Helper()
		var stdout, stderr bytes.Buffer
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		code := command(ctx, args, func(k string) string { return env[k] }, &stdout, &stderr)
		return code, stdout.String(), stderr.String()
	}
	code, out, _ := run(nil, "-run", "^C5-(FORM|COUNT)$")
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if code != exitHolds || len(lines) != 3 || lines[2] != "contract: 2 clauses, 2 passed, 0 failed, 0 untestable here" || !strings.HasPrefix(lines[0], "ok   C5-") {
		t.Errorf("%d %q", code, out)
	}
	if code, out, _ := run(nil, "-sql"); code != exitHolds || out != programSQL {
		t.Errorf("%d %q", code, out)
	}
	if code, out, _ := run(nil, "-list"); code != exitHolds || strings.Count(out, "\n") != len(clauses()) {
		t.Errorf("%d, %d lines", code, strings.Count(out, "\n"))
	}
	for _, args := range [][]string{{"-run", "("}, {"-run", "no such clause"}, {"-nonsense"}, {"word"}} {
		if code, _, _ := run(nil, args...); code != exitUsage {
			t.Errorf("%v: exit code %d", args, code)
		}
	}
	for _, env := range []map[string]string{{"FELDERA_PIPELINE": "p"}, {"FELDERA_URL": "http://127.0.0.1:1", "FELDERA_ALLOW": "everything"}} {
		if code, _, _ := run(env); code != exitUsage {
			t.Errorf("%v: exit code %d", env, code)
		}
	}
	code, _, errText := run(map[string]string{"FELDERA_URL": "http://127.0.0.1:1", "FELDERA_PIPELINE": "p", "FELDERA_API_KEY": simKey("z")})
	if code != exitUnreachable || errText == "" || strings.Contains(errText, "zzz") {
		t.Errorf("%d %q", code, errText)
	}
}

// A pipeline that runs another program is told so before any clause.
func TestWrongProgram(t *testing.T) {
	sim, err := felderasim.New(felderasim.Options{SQL: "CREATE TABLE t (id BIGINT NOT NULL PRIMARY KEY);"})
	if err != nil {
		t.Fatal(err)
	}
	if err := sim.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer sim.Close()
	_, err = newRunner(t.Context(), target{url: sim.URL(), pipeline: "p"}, &bytes.Buffer{})
	if err == nil || !strings.Contains(err.Error(), "make contract-sql") {
		t.Error(err)
	}
}

// What a failing clause has started ends with it, its cleanups all run, and a
// panic is a failure like any other.
func TestProve(t *testing.T) {
	sim, err := simulate(t.Context(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer sim.close()
	var ran []string
	why := prove(t.Context(), sim, clause{id: "X", run: func(p *probe) {
		p.owned.Go(func() { <-p.ctx.Done(); ran = append(ran, "background") })
		p.closers = append(p.closers, func() { ran = append(ran, "closer") })
		p.after(func() { ran = append(ran, "first") })
		p.after(func() { p.failf("expected cleanup, got nothing") })
		p.after(func() { ran = append(ran, "last") })
		p.failf("expected %d, got %d", 1, 2)
		ran = append(ran, "beyond")
	}})
	if why != "expected 1, got 2" || !slices.Equal(ran, []string{"last", "first", "background", "closer"}) {
		t.Errorf("%q, %v", why, ran)
	}
	why = prove(t.Context(), sim, clause{id: "X", run: func(*probe) { panic("boom") }})
	if !strings.Contains(why, "boom") {
		t.Errorf("%q", why)
	}
}
