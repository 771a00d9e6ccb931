package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// usage is what a child has cost.
type usage struct {
	PeakBytes  int64   `json:"peak_rss_bytes"`
	CPUSeconds float64 `json:"cpu_seconds"` // user and system, by wait4
}

// child is a measured process. It is killed when this process dies.
type child struct {
	name    string
	cmd     *exec.Cmd
	output  tail
	started time.Time
	done    chan struct{} // closed when the child is gone
	err     error         // what Wait gave; read it after done
	ended   time.Time     // read it after done
	peak    int64         // VmHWM as last seen; owned by the goroutine that calls look
}

// startChild starts a process with exactly this environment.
func startChild(name, path string, args, env []string) (*child, error) {
	c := &child{name: name, done: make(chan struct{})}
	// No CommandContext: a measured process is ended by a signal of ours, and
	// never in the middle by the end of a context.
	c.cmd = exec.Command(path, args...)
	c.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "TMPDIR=" + os.TempDir()}, env...)
	c.cmd.Stdout, c.cmd.Stderr = &c.output, &c.output
	c.cmd.WaitDelay = 5 * time.Second
	// An own process group: Ctrl-C reaches only us, who then end it in order.
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	started := make(chan error, 1)
	go func() {
		// Pdeathsig is sent when the thread that forked ends: keep that thread.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		c.started = time.Now()
		err := c.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		c.err = c.cmd.Wait()
		c.ended = time.Now()
		close(c.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s (%s): %w", name, path, err)
	}
	return c, nil
}

// lookEvery is how often a run is looked at; it bounds what the end of a subject
// is measured late, and is seldom enough to cost nothing.
const lookEvery = 5 * time.Millisecond

// until looks at the child until cond holds, and gives the time from its start.
// A nil cond is the end of the process, with exit code 0; any other must hold
// before that. The child is killed when there is an error.
func (c *child) until(ctx context.Context, cond func(context.Context) (bool, error)) (took time.Duration, err error) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	defer func() {
		if err != nil {
			c.kill()
		}
	}()
	for {
		c.look()
		if cond != nil {
			if ok, err := cond(ctx); err != nil {
				return 0, fmt.Errorf("look at the work of %s: %w", c.name, err)
			} else if ok {
				return time.Since(c.started), nil
			}
		}
		select {
		case <-tick.C:
		case <-c.done:
			if cond == nil && c.err == nil {
				return c.ended.Sub(c.started), nil
			}
			return 0, fmt.Errorf("%s ended early (%s); its last lines:\n%s", c.name, c.cmd.ProcessState, &c.output)
		case <-ctx.Done():
			return 0, fmt.Errorf("wait for %s: %w; its last lines:\n%s", c.name, context.Cause(ctx), &c.output)
		}
	}
}

// stop asks the child to end, waits, and gives what it has cost.
func (c *child) stop(ctx context.Context) (usage, error) {
	c.look()
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return usage{}, fmt.Errorf("stop %s: %w", c.name, err)
	}
	if _, err := c.until(ctx, nil); err != nil {
		return usage{}, err
	}
	return c.used()
}

func (c *child) kill() {
	_ = c.cmd.Process.Kill() // it may be gone
	<-c.done
}

// used gives the cost of a child that is gone.
func (c *child) used() (usage, error) {
	state := c.cmd.ProcessState
	rusage, ok := state.SysUsage().(*syscall.Rusage)
	if !ok {
		return usage{}, fmt.Errorf("measure %s: this system gives no rusage", c.name)
	}
	u := usage{PeakBytes: rusage.Maxrss << 10, CPUSeconds: (state.UserTime() + state.SystemTime()).Seconds()}
	// wait4's peak begins with that of the process that forked, since a fork shares
	// its memory until exec. So it is the child's own only where it is above ours;
	// else the peak that the kernel shows for the child alone is taken, as seen at
	// the last look.
	var own syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &own); err != nil {
		return usage{}, fmt.Errorf("measure this process: %w", err)
	}
	if u.PeakBytes <= own.Maxrss<<10 && c.peak > 0 {
		u.PeakBytes = c.peak
	}
	return u, nil
}

// look reads the child's peak of resident memory. A child that has just ended
// shows none; the last one seen stands.
func (c *child) look() {
	status, err := os.ReadFile("/proc/" + strconv.Itoa(c.cmd.Process.Pid) + "/status")
	if err != nil {
		return
	}
	for line := range strings.Lines(string(status)) {
		if kib, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			if n, err := strconv.ParseInt(strings.Fields(kib)[0], 10, 64); err == nil {
				c.peak = max(c.peak, n<<10)
			}
		}
	}
}

// tail keeps the last bytes written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

const tailBytes = 4 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if over := len(t.b) - tailBytes; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.b))
}
