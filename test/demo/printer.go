package main

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// printer writes the lines of the demo, whole ones only, from any goroutine.
type printer struct {
	mu    sync.Mutex
	out   io.Writer
	start time.Time
}

// line writes one line: when, who, what. A terminal that is gone is no reason to
// stop: the exit code still tells.
func (p *printer) line(who, format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	text := strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", "\n"+strings.Repeat(" ", 20))
	_, _ = fmt.Fprintf(p.out, "%6.1fs  %-10s  %s\n", time.Since(p.start).Seconds(), who, text)
}

// chapter writes a line that begins a part of the story.
func (p *printer) chapter(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = fmt.Fprintf(p.out, "\n%6.1fs  ── %s\n", time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}
