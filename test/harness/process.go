package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// logLines is how many of the last lines of a child are kept.
	logLines = 4000
	// logLineBytes is where a line is cut; a child cannot grow the log by
	// writing no newline.
	logLineBytes = 16 << 10
)

// Log keeps the last lines that a child wrote to stdout and stderr, and lets any
// number of goroutines wait for a line. All methods are safe for concurrent use.
type Log struct {
	mu      sync.Mutex
	lines   []string      // the last logLines lines, oldest first
	dropped int           // lines that fell out before lines[0]
	partial []byte        // the line that has no newline yet
	changed chan struct{} // closed and replaced when a line is added or the child has ended
	ended   bool
}

func newLog() *Log { return &Log{changed: make(chan struct{})} }

// begin makes waiting work again for the next child that writes here; the lines
// of the one before stay.
func (l *Log) begin() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = false
}

// Write takes the child's output; os/exec calls it.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	added := false
	for rest := p; len(rest) > 0; {
		line, after, complete := bytes.Cut(rest, []byte{'\n'})
		if room := logLineBytes - len(l.partial); len(line) > room {
			line = line[:max(room, 0)]
		}
		l.partial = append(l.partial, line...)
		if complete {
			l.add(string(l.partial))
			l.partial = l.partial[:0]
			added = true
		}
		rest = after
	}
	if added {
		l.wake()
	}
	return len(p), nil
}

func (l *Log) add(line string) {
	if len(l.lines) == logLines {
		copy(l.lines, l.lines[1:])
		l.lines = l.lines[:logLines-1]
		l.dropped++
	}
	l.lines = append(l.lines, line)
}

func (l *Log) wake() {
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *Log) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.partial) > 0 {
		l.add(string(l.partial))
		l.partial = nil
	}
	l.ended = true
	l.wake()
}

// Mark gives the place behind the last line, for [Log.WaitSince].
func (l *Log) Mark() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dropped + len(l.lines)
}

// Tail gives the last n lines.
func (l *Log) Tail(n int) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), l.lines[max(0, len(l.lines)-n):]...)
}

// Grep gives the kept lines that match.
func (l *Log) Grep(re *regexp.Regexp) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var found []string
	for _, line := range l.lines {
		if re.MatchString(line) {
			found = append(found, line)
		}
	}
	return found
}

// Wait gives the first kept line that matches, waiting for it if need be. It
// ends with an error when ctx does (30 s without a deadline) and when the child
// has ended without such a line.
func (l *Log) Wait(ctx context.Context, re *regexp.Regexp) (string, error) {
	return l.WaitSince(ctx, 0, re)
}

// WaitSince is [Log.Wait] for lines behind mark only.
func (l *Log) WaitSince(ctx context.Context, mark int, re *regexp.Regexp) (string, error) {
	ctx, cancel := withDefaultTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		l.mu.Lock()
		for _, line := range l.lines[min(max(mark-l.dropped, 0), len(l.lines)):] {
			if re.MatchString(line) {
				l.mu.Unlock()
				return line, nil
			}
		}
		mark = l.dropped + len(l.lines)
		changed, ended := l.changed, l.ended
		l.mu.Unlock()
		if ended {
			return "", fmt.Errorf("wait for log line %q: the process ended without it; its last lines:\n%s", re, strings.Join(l.Tail(20), "\n"))
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return "", fmt.Errorf("wait for log line %q: %w; the last lines are:\n%s", re, context.Cause(ctx), strings.Join(l.Tail(20), "\n"))
		}
	}
}

// Process is one child process. It is killed when this process dies, and it is
// always waited for. All methods are safe for concurrent use.
type Process struct {
	name string
	log  *Log
	cmd  *exec.Cmd
	done chan struct{} // closed when the child is gone and its output is read
	err  error         // what Wait gave; read it after done
}

// processSpec says what to run. Env is the whole environment.
type processSpec struct {
	name   string
	path   string
	args   []string
	env    []string
	dir    string
	user   *credential    // nil = as this process
	onLoss syscall.Signal // sent by the kernel when this process dies
}

type credential struct {
	name     string
	uid, gid uint32
}

func startProcess(spec processSpec, log *Log) (*Process, error) {
	p := &Process{name: spec.name, log: log, done: make(chan struct{})}
	// No CommandContext: a child outlives the context that bounded its start, and
	// is ended by Signal, Kill or the death of this process.
	p.cmd = exec.Command(spec.path, spec.args...)
	p.cmd.Env, p.cmd.Dir = spec.env, spec.dir
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.WaitDelay = 5 * time.Second // a grandchild that keeps the pipe open must not hold Wait for ever
	p.cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig: spec.onLoss,
		// An own process group: Ctrl-C on a terminal reaches the demo only, which
		// then ends its children in order.
		Setpgid: true,
	}
	if spec.user != nil {
		p.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: spec.user.uid, Gid: spec.user.gid}
	}
	log.begin()
	started := make(chan error, 1)
	go func() {
		// The kernel sends Pdeathsig when the *thread* that forked ends. So the
		// thread is kept: it is locked to this goroutine until the child is gone.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		if err != nil {
			log.end()
			started <- err
			return
		}
		started <- nil
		p.err = p.cmd.Wait()
		log.end()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s (%s): %w", spec.name, spec.path, err)
	}
	return p, nil
}

// Log gives what the child has written.
func (p *Process) Log() *Log { return p.log }

// Pid gives the child's process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the child is gone.
func (p *Process) Done() <-chan struct{} { return p.done }

// WaitLog gives the first line of the log that matches; see [Log.Wait].
func (p *Process) WaitLog(ctx context.Context, re *regexp.Regexp) (string, error) {
	line, err := p.log.Wait(ctx, re)
	if err != nil {
		return "", fmt.Errorf("%s: %w", p.name, err)
	}
	return line, nil
}

// Signal sends sig; a child that is gone is no error.
func (p *Process) Signal(sig syscall.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("send %s to %s: %w", sig, p.name, err)
	}
	return nil
}

// Kill ends the child with SIGKILL and waits until it is gone.
func (p *Process) Kill() {
	_ = p.Signal(syscall.SIGKILL)
	<-p.done
}

// Terminate asks the child with SIGTERM to end, without waiting for it.
func (p *Process) Terminate() error { return p.Signal(syscall.SIGTERM) }

// ExitCode gives the exit code, and -1 for a child that a signal ended; ok is
// false while it runs.
func (p *Process) ExitCode() (code int, ok bool) {
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode(), true
	default:
		return 0, false
	}
}

// Wait waits until the child is gone and gives its exit code, as [Process.ExitCode].
func (p *Process) Wait(ctx context.Context) (int, error) {
	ctx, cancel := withDefaultTimeout(ctx, 60*time.Second)
	defer cancel()
	select {
	case <-p.done:
		code, _ := p.ExitCode()
		return code, nil
	case <-ctx.Done():
		return 0, fmt.Errorf("wait for the end of %s: %w; its last lines:\n%s", p.name, context.Cause(ctx), strings.Join(p.log.Tail(20), "\n"))
	}
}

// stopWithin is how long a server may take to stop in order.
const stopWithin = 30 * time.Second

// stop sends sig and waits; a child that is still there after stopWithin is
// killed, which is reported. It takes no context: the end of the caller's must
// not leave a server behind.
func (p *Process) stop(sig syscall.Signal) error {
	if err := p.Signal(sig); err != nil {
		return err
	}
	timer := time.NewTimer(stopWithin)
	defer timer.Stop()
	select {
	case <-p.done:
		return nil
	case <-timer.C:
		p.Kill()
		return fmt.Errorf("stop %s with %s: still there after %s, killed; its last lines:\n%s", p.name, sig, stopWithin, strings.Join(p.log.Tail(20), "\n"))
	}
}

// output runs a helper program to its end and gives what it printed. The error
// has the last lines of it.
func output(ctx context.Context, spec processSpec) (string, error) {
	cmd := exec.CommandContext(ctx, spec.path, spec.args...)
	cmd.Env, cmd.Dir = spec.env, spec.dir
	cmd.WaitDelay = 5 * time.Second
	if spec.user != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: spec.user.uid, Gid: spec.user.gid}}
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		return "", fmt.Errorf("run %s: %w\n%s", spec.name, err, strings.Join(lines[max(0, len(lines)-20):], "\n"))
	}
	return string(out), nil
}
