package wal

import (
	"maps"
	"strings"
	"testing"
)

// A leaf that was emptied owes it to a TRUNCATE of the root, which the stream
// brings, or to one of its own, which it does not bring: that is known when the
// stream has come past the look that found it.
func TestEmptiedPartitions(t *testing.T) {
	const root, a, b = 1, 2, 3
	leaves := func(fileA, fileB uint32, emptiedA, emptiedB bool) map[uint32]partition {
		return map[uint32]partition{
			root: {oid: root, name: "parts"},
			a:    {oid: a, name: "leaf_a", leaf: true, filenode: fileA, emptied: emptiedA, made: true},
			b:    {oid: b, name: "leaf_b", leaf: true, filenode: fileB, emptied: emptiedB, made: true},
		}
	}
	before, both, one := leaves(10, 11, true, true), leaves(20, 21, true, true), leaves(20, 11, true, true)
	counted := leaves(20, 21, true, false) // ANALYZE has been at the second one
	old, later := &view{xmin: 100, xmax: 105, running: []uint64{102}}, &view{xmin: 200, xmax: 200}
	const end = 1000

	// step is a look, after TRUNCATEs of the root were received.
	type step struct {
		truncates []uint32
		parts     map[uint32]partition
		received  uint64
		says      string // names of leaves that are said to have been truncated
	}
	for name, c := range map[string]struct {
		standby bool
		steps   []step
	}{
		"root, received before the look":        {false, []step{{[]uint32{105}, both, end, ""}, {nil, both, end, ""}}},
		"root, received after the look":         {false, []step{{nil, both, end - 1, ""}, {[]uint32{102}, both, end, ""}, {nil, both, end, ""}}},
		"root, and one of them has rows again":  {false, []step{{nil, counted, end - 1, ""}, {[]uint32{150}, counted, end, ""}}},
		"each by itself":                        {false, []step{{nil, both, end - 1, ""}, {nil, both, end, "leaf_a leaf_b"}, {nil, both, end, ""}}},
		"each by itself, the stream is there":   {false, []step{{nil, both, end, "leaf_a leaf_b"}}},
		"each by itself, the stream stands":     {false, []step{{nil, both, end - 1, ""}, {nil, both, end - 1, ""}, {nil, both, end + 5, "leaf_a leaf_b"}}},
		"a TRUNCATE that the look before saw":   {false, []step{{[]uint32{99, 104}, both, end - 1, ""}, {nil, both, end, "leaf_a leaf_b"}}},
		"one by itself":                         {false, []step{{nil, one, end - 1, ""}, {nil, one, end, "leaf_a"}}},
		"one by itself, and the other one next": {false, []step{{nil, one, end - 1, ""}, {nil, both, end, "leaf_a leaf_b"}}},
		"one by itself, long after the root":    {false, []step{{[]uint32{150}, both, end, ""}, {nil, leaves(30, 21, true, true), end, "leaf_a"}}},
		"a standby does not tell":               {true, []step{{nil, both, end, ""}, {nil, leaves(30, 21, true, true), end, "leaf_a"}}},
	} {
		t.Run(name, func(t *testing.T) {
			tr := &tree{parts: maps.Clone(before), view: old}
			if c.standby {
				tr.view = nil
			}
			for i, s := range c.steps {
				for _, xid := range s.truncates {
					tr.noteTruncate(xid)
				}
				now := &treeLook{parts: maps.Clone(s.parts), view: later, end: end}
				if c.standby {
					now.view = nil
				}
				said := strings.Join(tr.take(now, s.received), "\n")
				for _, leaf := range []string{"leaf_a", "leaf_b"} {
					if strings.Contains(said, leaf+" was truncated") != strings.Contains(s.says, leaf) {
						t.Errorf("look %d says %q, want it about %q", i+1, said, s.says)
					}
				}
			}
		})
	}
}

func TestTruncatesAreBounded(t *testing.T) {
	tr := &tree{view: &view{xmin: 1, xmax: 1}}
	for xid := range uint32(3 * maxTruncates) {
		tr.noteTruncate(xid)
	}
	if n := len(tr.truncates); n != maxTruncates || tr.truncates[n-1] != 3*maxTruncates-1 {
		t.Errorf("%d are kept, the last one %d", n, tr.truncates[n-1])
	}
}
