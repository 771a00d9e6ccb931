package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"holdfast/test/harness"
)

// claim is one item of a list in docs/guarantees.md.
type claim struct {
	heading, text string
	tests         []string // as folder.TestName
}

var namedTest = regexp.MustCompile("`([a-z0-9/_]+)\\.(Test[A-Za-z0-9_]+)`")

// claims reads the lists of a page.
func claims(page string) (all []claim) {
	var heading string
	for line := range strings.Lines(page) {
		if text, is := strings.CutPrefix(line, "## "); is {
			heading = strings.TrimSpace(text)
		}
		text, is := strings.CutPrefix(line, "- ")
		if !is {
			continue
		}
		c := claim{heading: heading, text: strings.TrimSpace(text)}
		for _, m := range namedTest.FindAllStringSubmatch(text, -1) {
			c.tests = append(c.tests, m[1]+"."+m[2])
		}
		all = append(all, c)
	}
	return all
}

// unheld gives the promises without a test, and the tests that do not exist.
func unheld(page string, exists func(test string) bool) (wrong []string) {
	for _, c := range claims(page) {
		if len(c.tests) == 0 && c.heading != "Not promised" {
			wrong = append(wrong, "no test holds: "+c.text)
		}
	}
	for _, m := range namedTest.FindAllStringSubmatch(page, -1) {
		if test := m[1] + "." + m[2]; !exists(test) {
			wrong = append(wrong, "there is no "+test)
		}
	}
	return wrong
}

// Every promise names tests that hold it, and they exist.
func TestGuaranteesAreHeld(t *testing.T) {
	root, err := harness.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(root, "docs", "guarantees.md"))
	if err != nil {
		t.Fatal(err)
	}
	sources := map[string]string{}
	exists := func(test string) bool {
		folder, name, _ := strings.Cut(test, ".")
		if _, read := sources[folder]; !read {
			files, err := filepath.Glob(filepath.Join(root, folder, "*_test.go"))
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range files {
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				sources[folder] += string(text)
			}
		}
		return strings.Contains(sources[folder], "\nfunc "+name+"(t *testing.T)")
	}
	for _, what := range unheld(string(page), exists) {
		t.Error(what)
	}
	if n := len(claims(string(page))); n < 30 {
		t.Errorf("%d sentences were found", n)
	}
}

// A promise without a test, and a test that is none, are found.
func TestUnheldGuaranteesAreFound(t *testing.T) {
	page := "## Promised\n\n- held — `a/b.TestA`\n- not held\n- gone — `a/b.TestB`\n\n## Not promised\n\n- that\n"
	wrong := unheld(page, func(test string) bool { return test == "a/b.TestA" })
	if len(wrong) != 2 || wrong[0] != "no test holds: not held" || wrong[1] != "there is no a/b.TestB" {
		t.Errorf("%q", wrong)
	}
}
