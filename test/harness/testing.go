package harness

import (
	"strings"
	"testing"
)

// shownLines is how much of a child's log a failed test shows.
const shownLines = 150

// showLog writes the end of a child's log into that of a failed test.
func showLog(tb testing.TB, name string, log *Log) {
	tb.Helper()
	if tb.Failed() {
		tb.Logf("the last lines of %s:\n%s", name, strings.Join(log.Tail(shownLines), "\n"))
	}
}
