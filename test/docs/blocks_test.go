// Package docs_test runs what README.md and docs/ tell a reader to type: every
// shell block is run against private servers, or stands in a list with the
// reason why it cannot be run here. One that is in neither fails the test.
package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"holdfast/test/harness"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// block is one fenced block of a page.
type block struct {
	file string
	line int
	info string // the word after the fence
	text string
	// output is the block of text right behind it, "" for none: what the reader
	// is told to see.
	output string
}

// name tells blocks apart, and survives that a page grows: the page and the
// first line without its comment.
func (b block) name() string {
	first, _, _ := strings.Cut(b.text, "\n")
	first, _, _ = strings.Cut(first, " #")
	return b.file + ": " + strings.TrimSpace(first)
}

// shells are the words that make a block one to type.
var shells = map[string]bool{"sh": true, "bash": true, "shell": true, "console": true, "": true}

// blocks reads a page.
func blocks(t *testing.T, root, file string) []block {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		t.Fatal(err)
	}
	return parse(file, string(page))
}

func parse(file, page string) []block {
	var all []block
	var open *block
	gap := true // there is text between the last block and here
	for n, line := range strings.Split(page, "\n") {
		info, fence := strings.CutPrefix(strings.TrimSpace(line), "```")
		switch {
		case fence && open == nil:
			open = &block{file: file, line: n + 1, info: strings.TrimSpace(info)}
		case fence:
			if last := len(all) - 1; open.info == "text" && last >= 0 && !gap && all[last].output == "" && shells[all[last].info] {
				all[last].output = open.text
			} else {
				all = append(all, *open)
			}
			open, gap = nil, false
		case open != nil:
			open.text += line + "\n"
		case strings.TrimSpace(line) != "":
			gap = true
		}
	}
	return all
}

// shown is the pattern of an output that a page shows: a line of "…" stands for
// any lines, a "…" in a line for anything in it, and blanks for any blanks.
func shown(output string) *regexp.Regexp {
	var b strings.Builder
	b.WriteString(`(?m)`)
	for _, line := range strings.Split(strings.TrimSuffix(output, "\n"), "\n") {
		if strings.TrimSpace(line) == "…" {
			b.WriteString(`(?:.*\n)*?`)
			continue
		}
		words := strings.Fields(line)
		for i, w := range words {
			words[i] = strings.ReplaceAll(regexp.QuoteMeta(w), "…", ".*")
		}
		b.WriteString(`^\s*` + strings.Join(words, `\s+`) + `\s*\n`)
	}
	return regexp.MustCompile(b.String())
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := harness.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestEveryBlock is the one list: each block is run, or it is said why not.
func TestEveryBlock(t *testing.T) {
	dir := root(t)
	pages := []string{"README.md"}
	found, err := filepath.Glob(filepath.Join(dir, "docs", "*.md"))
	if err != nil || len(found) == 0 {
		t.Fatalf("the pages: %v, %v", found, err)
	}
	for _, path := range found {
		pages = append(pages, "docs/"+filepath.Base(path))
	}
	w := newWorld(t)
	seen := map[string]bool{}
	for _, page := range pages {
		for _, b := range blocks(t, dir, page) {
			if !shells[b.info] {
				continue
			}
			name := b.name()
			if seen[name] {
				t.Errorf("%s:%d: a second block begins as another one does: %s", b.file, b.line, name)
			}
			seen[name] = true
			how, run := runs[name]
			why, not := notRun[name]
			switch {
			case run == not:
				t.Errorf("%s:%d: this block is neither run nor listed with the reason why not (or both); add it to runs or notRun in test/docs: %q", b.file, b.line, name)
			case not:
				t.Logf("%s:%d is not run: %s", b.file, b.line, why)
			default:
				t.Run(name, func(t *testing.T) { how(t, w, b) })
			}
		}
	}
	for name := range runs {
		if !seen[name] {
			t.Errorf("no page has the block %q", name)
		}
	}
	for name := range notRun {
		if !seen[name] {
			t.Errorf("no page has the block %q", name)
		}
	}
}

func TestBlocksAreFound(t *testing.T) {
	got := parse("x.md", "a\n```sh\none  # why\ntwo\n```\n\n```text\nout …\n```\n\n```text\nalone\n```\n\ntext\n\n```sql\nSELECT\n```\n  ```\nbare\n  ```\n")
	if len(got) != 4 || got[0].name() != "x.md: one" || got[0].output != "out …\n" || got[0].line != 2 || got[1].info != "text" || got[2].info != "sql" || got[3].text != "bare\n" {
		t.Errorf("%+v", got)
	}
	for output, wants := range map[string]map[string]bool{
		"ok  feldera:  …\n…\nend\n": {"x\n ok feldera: is there\na\nb\nend\n": true, "ok feldera: there\nend\n": true, "ok feldera\nend\n": false, "ok postgres\nend\n": false, "ok feldera: x\nEND\n": false},
	} {
		for text, want := range wants {
			if got := shown(output).MatchString(text); got != want {
				t.Errorf("%q shows %q: %v", output, text, got)
			}
		}
	}
}
