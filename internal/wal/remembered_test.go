package wal

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// plainBaseline is a table with an enum, a setting and two partitions.
func plainBaseline() *baseline {
	return &baseline{
		columns: map[string]baseColumn{
			"id":      {number: 1, has: true, carried: true, filled: true},
			"v":       {number: 2, has: true, carried: true},
			"g":       {number: 3, has: true, carried: true, generated: "id * 2", filled: true},
			"own":     {number: 4, carried: true},
			"skipped": {number: 5, has: true},
		},
		filter: "(id < 2)",
		entry:  entry{publication: 1, number: 2, list: "[1, 2]"},
		texts: map[textOf]string{
			{classEnum, 10, 9, "mood"}: "sad", {classEnum, 12, 9, "mood"}: "glad",
			{classComposite, 20, 20, "pair"}: "1,2", {"lc_monetary", 790, 790, "money"}: "C",
		},
		parts: map[uint32]partition{100: {oid: 100, name: "root", made: true}, 101: {oid: 101, name: "p1", leaf: true, made: true}, 102: {oid: 102, name: "p2", leaf: true}},
	}
}

// A process that finds the table as the one before left it has nothing to say;
// each change of what rows depend on is named, and what leaves rows alone is
// not.
func TestSinceTheProcessBefore(t *testing.T) {
	for name, c := range map[string]struct {
		change         func(b *baseline)
		changed, added string
	}{
		"nothing":          {change: func(*baseline) {}},
		"column made anew": {change: func(b *baseline) { b.columns["v"] = baseColumn{number: 6, has: true, carried: true} }, changed: `column "v" is another one`},
		"names exchanged": {
			change:  func(b *baseline) { b.columns["v"], b.columns["id"] = b.columns["id"], b.columns["v"] },
			changed: `column "id" is another one than it was: it was dropped and made anew, or names of columns were exchanged; column "v" is another one`,
		},
		"column renamed":            {change: func(b *baseline) { b.columns["w"] = b.columns["v"]; delete(b.columns, "v") }, added: "w"},
		"column dropped":            {change: func(b *baseline) { delete(b.columns, "v") }},
		"column added with a value": {change: func(b *baseline) { b.columns["x"] = baseColumn{number: 6, has: true, carried: true, filled: true} }, added: "x"},
		"column added, empty":       {change: func(b *baseline) { b.columns["x"] = baseColumn{number: 6, has: true, carried: true} }},
		"column that Feldera lacks": {change: func(b *baseline) { b.columns["x"] = baseColumn{number: 6, carried: true, filled: true} }},
		"Feldera got a column":      {change: func(b *baseline) { b.columns["own"] = baseColumn{number: 4, has: true, carried: true} }, added: "own"},
		"a column is published now": {change: func(b *baseline) { b.columns["skipped"] = baseColumn{number: 5, has: true, carried: true} }, added: "skipped"},
		"column list shortened":     {change: func(b *baseline) { b.columns["v"] = baseColumn{number: 2, has: true} }, changed: `leaves out column "v"`},
		"another expression": {change: func(b *baseline) {
			b.columns["g"] = baseColumn{number: 3, has: true, carried: true, generated: "id * 3"}
		}, changed: `generated column "g"`},
		"another filter":               {change: func(b *baseline) { b.filter = "(id < 3)" }, changed: "row filter is now (id < 3)"},
		"no filter":                    {change: func(b *baseline) { b.filter = "" }, changed: "row filter is now none"},
		"taken out and put back":       {change: func(b *baseline) { b.entry.number = 3 }, changed: "taken out of the publication and put back"},
		"another list of no matter":    {change: func(b *baseline) { b.entry.number, b.entry.list = 3, "[1, 2, 7]" }},
		"published as one of a schema": {change: func(b *baseline) { b.entry = entry{} }},
		"the publication made anew":    {change: func(b *baseline) { b.entry.publication, b.entry.number = 9, 10 }},
		"label renamed":                {change: func(b *baseline) { b.texts[textOf{classEnum, 10, 9, "mood"}] = "blue" }, changed: "labels of type mood were renamed"},
		"label added":                  {change: func(b *baseline) { b.texts[textOf{classEnum, 13, 9, "mood"}] = "new" }},
		"type made anew": {change: func(b *baseline) {
			delete(b.texts, textOf{classEnum, 10, 9, "mood"})
			delete(b.texts, textOf{classEnum, 12, 9, "mood"})
			b.texts[textOf{classEnum, 30, 29, "mood"}], b.texts[textOf{classEnum, 31, 29, "mood"}] = "blue", "glad"
		}},
		"label gone":            {change: func(b *baseline) { delete(b.texts, textOf{classEnum, 12, 9, "mood"}) }, changed: "labels of type mood were renamed"},
		"attributes":            {change: func(b *baseline) { b.texts[textOf{classComposite, 20, 20, "pair"}] = "1,2,3" }, changed: "composite type pair"},
		"setting":               {change: func(b *baseline) { b.texts[textOf{"lc_monetary", 790, 790, "money"}] = "de" }, changed: `lc_monetary, which is now "de"`},
		"partition gone":        {change: func(b *baseline) { delete(b.parts, 101) }, changed: "1 of its leaf partitions were detached"},
		"partition made":        {change: func(b *baseline) { b.parts[103] = partition{oid: 103, name: "p3", leaf: true, made: true} }},
		"partition attached":    {change: func(b *baseline) { b.parts[103] = partition{oid: 103, name: "p3", leaf: true} }, changed: "partition p3 was attached"},
		"a tree attached":       {change: func(b *baseline) { b.parts[103] = partition{oid: 103, name: "p3"} }, changed: "partition p3 was attached"},
		"everything is another": {change: func(b *baseline) { *b = baseline{columns: map[string]baseColumn{}} }, changed: "row filter is now none"},
	} {
		t.Run(name, func(t *testing.T) {
			line := plainBaseline().remembered()
			now := plainBaseline()
			c.change(now)
			changed, added := now.since(line)
			changed = append(changed, now.partsSince(line)...)
			if got := strings.Join(changed, "; "); !strings.Contains(got, c.changed) || (c.changed == "" && got != "") {
				t.Errorf("changed: %q, want %q", got, c.changed)
			}
			if got := strings.Join(added, ","); got != c.added {
				t.Errorf("added: %q, want %q", got, c.added)
			}
			if changed, added := now.since(""); changed != nil || added != nil || now.partsSince("") != nil {
				t.Errorf("of a table that is not known it says %v, %v", changed, added)
			}
		})
	}
}

// What came since the start is judged as it was when it was seen first, and
// watched from then on.
func TestBaselineFolds(t *testing.T) {
	b := plainBaseline()
	now := plainBaseline()
	look := func(wantAdded, wantChanged string) {
		t.Helper()
		if got := b.changed(now); !strings.Contains(got, wantChanged) || (wantChanged == "" && got != "") {
			t.Errorf("changed: %q, want %q", got, wantChanged)
		}
		if got := strings.Join(b.addedSince(now), ","); got != wantAdded {
			t.Errorf("added: %q, want %q", got, wantAdded)
		}
		b.fold(now)
	}
	look("", "")
	now.columns["x"] = baseColumn{number: 6, has: true, carried: true}
	look("", "")
	now.columns["x"] = baseColumn{number: 6, has: true, carried: true, filled: true} // SET DEFAULT
	look("", "")
	now.columns["y"], now.columns["z"] = now.columns["x"], baseColumn{number: 7, has: true, carried: true, filled: true} // a name for another, and one with a DEFAULT
	delete(now.columns, "x")
	look("y,z", "")
	look("", "")
	now.columns["skipped"] = baseColumn{number: 5, has: true, carried: true}
	look("skipped", "")
	look("", "")
	now.texts[textOf{classEnum, 13, 9, "mood"}] = "new"
	look("", "")
	now.entry.number, now.entry.list = 3, "[1, 2, 3]" // another list
	look("", "")
	now.entry = entry{}
	look("", "")
	now.entry = entry{publication: 1, number: 4}
	look("", "")
	now.entry.number = 5
	look("", "taken out of the publication and put back")
	look("", "")
	now.columns["x"] = baseColumn{number: 8, has: true, carried: true}
	look("", `column "x" is another one`)
	now.texts[textOf{classEnum, 13, 9, "mood"}] = "newer"
	look("", `label "new" of type mood is now "newer"`)
}

// Whatever the names are, a table is equal to itself, and a line that somebody
// has damaged is no panic.
func TestRememberedIsEqualToItself(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		b := &baseline{columns: make(map[string]baseColumn), texts: make(map[textOf]string), filter: rapid.String().Draw(rt, "filter")}
		for i, name := range rapid.SliceOfDistinct(rapid.String(), func(s string) string { return s }).Draw(rt, "columns") {
			b.columns[name] = baseColumn{
				number: int16(i + 1), has: rapid.Bool().Draw(rt, "has"), carried: rapid.Bool().Draw(rt, "carried"), filled: rapid.Bool().Draw(rt, "filled"),
				generated: rapid.String().Draw(rt, "generated"),
			}
		}
		for i, label := range rapid.SliceOf(rapid.String()).Draw(rt, "labels") {
			b.texts[textOf{classEnum, uint32(i), uint32(i % 3), fmt.Sprint(i % 3)}] = label
		}
		line := b.remembered()
		changed, added := b.since(line)
		if changed = append(changed, b.partsSince(line)...); len(changed)+len(added) > 0 {
			rt.Errorf("%q: %v, %v", line, changed, added)
		}
		damaged := []byte(line + " c e l c= e=: l= w")
		if at := rapid.IntRange(0, len(damaged)-1).Draw(rt, "at"); true {
			damaged[at] = rapid.Byte().Draw(rt, "byte")
		}
		b.since(string(damaged))
		b.partsSince(string(damaged))
	})
}

// The line stays short: the state is saved with each acknowledgement.
func TestRememberedIsShort(t *testing.T) {
	b := &baseline{columns: make(map[string]baseColumn)}
	for i := range 1600 {
		b.columns[strings.Repeat("x", 60)+fmt.Sprint(i)] = baseColumn{number: int16(i + 1), has: true, carried: true, generated: strings.Repeat("y", 1000)}
	}
	line := b.remembered()
	if per := len(line) / 1600; per > 32 {
		t.Errorf("%d bytes for each column", per)
	}
	if tokens := strings.Fields(line); !slices.IsSorted(tokens) || len(tokens) != 1600 {
		t.Errorf("%d tokens", len(tokens))
	}
}

// Columns that come while the table is copied are the copy's to bring, if it
// begins again, and differ if it ends without.
func TestColumnsThatComeDuringACopy(t *testing.T) {
	b := &baseline{}
	look := func(job *copyJob, columns string, wantWaiting, wantBrought bool) {
		t.Helper()
		if waiting, brought := b.awaitCopy(job, columns); waiting != wantWaiting || brought != wantBrought {
			t.Errorf("waiting %v, brought %v, want %v, %v", waiting, brought, wantWaiting, wantBrought)
		}
	}
	look(nil, "x", false, false)
	look(&copyJob{ID: 1, Restarts: 2}, "x", true, false)
	look(&copyJob{ID: 1, Restarts: 2}, "x", true, false)
	look(nil, "x", false, false) // its last rows had been read
	look(&copyJob{ID: 2}, "x", true, false)
	look(&copyJob{ID: 2, Restarts: 1}, "x", false, true)
	look(&copyJob{ID: 2, Restarts: 1}, "x", true, false) // a later column of that name
	look(&copyJob{ID: 2, Restarts: 1}, "x\x00y", true, false)
	look(&copyJob{ID: 3, Restarts: 9}, "x\x00y", true, false) // another copy
	look(&copyJob{ID: 3, Restarts: 10}, "x\x00y", false, true)
}

// Another filter or list is another place in the publication: only that is said of
// it. What a process of an older build has left names no place, and is no reason to
// stop.
func TestPlaceInThePublication(t *testing.T) {
	was, now := plainBaseline(), plainBaseline()
	now.filter, now.entry.number = "(id < 3)", 3
	if changed, _ := now.since(was.remembered()); len(changed) != 1 || !strings.Contains(changed[0], "row filter is now") {
		t.Errorf("another filter: %q", changed)
	}
	if why := was.changed(now); !strings.Contains(why, "row filter is now") {
		t.Errorf("another filter, while it runs: %q", why)
	}
	now = plainBaseline()
	now.entry.number = 3
	place := " r:" + was.entry.token()
	older := strings.Replace(was.remembered(), place, "", 1)
	if older == was.remembered() {
		t.Fatalf("no place in %q", older)
	}
	for _, line := range []string{older, older + " r", older + " r:", older + " r:1/x/y", older + " r:1/2"} {
		if changed, added := now.since(line); len(changed)+len(added) > 0 {
			t.Errorf("%q: %q, %q", line, changed, added)
		}
	}
}
