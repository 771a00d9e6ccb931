package main

import (
	"strings"
	"testing"

	"holdfast/internal/wal"
)

// A reset forgets what was known to differ, so it names it once more.
func TestResetNamesWhatItForgets(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		before *wal.State
		names  string
	}{
		"none":   {},
		"equal":  {before: &wal.State{}},
		"differ": {before: &wal.State{Differing: []wal.DifferingTable{{Schema: "s", Table: "b"}, {Schema: "s", Table: "a"}}}, names: "s.a, s.b"},
	} {
		said := describeReset(&wal.Reset{Before: c.before, After: &wal.State{}, PipelineAsked: true})
		if c.names == "" && strings.Contains(said, "known to differ") || !strings.Contains(said, c.names) {
			t.Errorf("%s: %s", name, said)
		}
		if c.names != "" && !strings.Contains(said, "resync -all") {
			t.Errorf("%s: it does not say what to do: %s", name, said)
		}
	}
}
