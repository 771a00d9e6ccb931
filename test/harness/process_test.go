package harness

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestLogIsBoundedAndKeepsTheLastLines(t *testing.T) {
	l := newLog()
	for i := range logLines + 10 {
		fmt.Fprintf(l, "line %d\n", i)
	}
	fmt.Fprint(l, strings.Repeat("x", 3*logLineBytes), "\n")
	tail := l.Tail(2 * logLines)
	if len(tail) != logLines {
		t.Fatalf("kept %d lines, want %d", len(tail), logLines)
	}
	if got := tail[len(tail)-2]; got != fmt.Sprintf("line %d", logLines+9) {
		t.Errorf("the line before the last is %q", got)
	}
	if got := len(tail[len(tail)-1]); got != logLineBytes {
		t.Errorf("a long line has %d bytes, want it cut at %d", got, logLineBytes)
	}
}

func TestLogWaitSeesOldAndNewLines(t *testing.T) {
	l := newLog()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	fmt.Fprint(l, "ready\nhalf a li")
	if _, err := l.Wait(ctx, regexp.MustCompile(`^ready$`)); err != nil {
		t.Error(err)
	}
	mark := l.Mark()
	found := make(chan error, 1)
	go func() {
		line, err := l.WaitSince(ctx, mark, regexp.MustCompile(`^half a line$`))
		if err == nil && line != "half a line" {
			err = fmt.Errorf("got %q", line)
		}
		found <- err
	}()
	fmt.Fprint(l, "ne\n")
	if err := <-found; err != nil {
		t.Error(err)
	}
	l.end()
	_, err := l.WaitSince(ctx, mark, regexp.MustCompile(`ready`))
	if err == nil || !strings.Contains(err.Error(), "ended without it") {
		t.Errorf("waiting for a line before the mark, after the end: %v", err)
	}
}
