//go:build crashpoints

package crash

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// What a daemon is told in the environment: CRASH_AT is
// "point:visit:action", CRASH_LOG a file that gets a line for the first visit
// of each place, and one when the armed place acts.
const (
	envAt  = "CRASH_AT"
	envLog = "CRASH_LOG"
)

// The actions.
const (
	actKill = "kill" // SIGKILL: nothing runs any more, no deferred call and no buffer
	actStop = "stop" // SIGSTOP: everything stands still until somebody sends SIGCONT
	actNote = "note" // only a line in the log, for whoever acts from outside
)

// stopTakes is more than a signal takes to stop the process.
const stopTakes = 20 * time.Millisecond

var (
	setup  sync.Once
	armed  Point
	visit  int64
	action string
	log    *os.File
	visits atomic.Int64
	seen   sync.Map
)

// Here marks a visit, and acts at the one that was armed.
func Here(p Point) {
	setup.Do(arm)
	if _, before := seen.LoadOrStore(p, true); !before {
		note("seen", p)
	}
	if p != armed || visits.Add(1) != visit {
		return
	}
	// The line is written before the act: a file that a process wrote survives
	// its SIGKILL.
	note("acts", p)
	switch action {
	case actKill:
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // nothing after this place may happen
	case actStop:
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		// The process stands still a moment after the signal was sent, and what comes
		// behind the place must not happen in between.
		<-time.After(stopTakes)
	case actNote:
	}
}

func arm() {
	if path := os.Getenv(envLog); path != "" {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			panic(fmt.Sprintf("%s: %v", envLog, err))
		}
		log = f
	}
	at := os.Getenv(envAt)
	if at == "" {
		return
	}
	parts := strings.Split(at, ":")
	if len(parts) != 3 {
		panic(envAt + " is not point:visit:action")
	}
	n, err := strconv.ParseInt(parts[1], 10, 64)
	if err != nil || n < 1 {
		panic(envAt + " has no visit")
	}
	armed, visit, action = Point(parts[0]), n, parts[2]
}

func note(what string, p Point) {
	if log != nil {
		_, _ = fmt.Fprintf(log, "%s %s\n", what, p)
	}
}
