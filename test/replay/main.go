// Command replay records a stretch of real traffic to files and plays it against
// a destination, twice, through the daemons as they are: pgsource reads the
// recorded pgoutput messages from a small server here that speaks Postgres'
// protocol, kafkasink reads the recorded records from an in-process broker.
// Whatever the tables hold after the first time they must hold after the second.
//
// It promises: recording moves no slot and no offset and writes nothing to the
// source; what is played is what was recorded, by its checksums; every file and
// every wait is bounded; 0 is only returned when the tables were equal. It does not
// promise that the files are harmless: they hold rows in clear (mode 0600).
//
//	go run ./test/replay                  both, on private servers with made traffic
//	go run ./test/replay -dir D record    from PGSOURCE_… and KAFKASINK_…
//	go run ./test/replay -dir D play      into FELDERA_…, or the simulator without it
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

// settings are the command line and what it means.
type settings struct {
	dir     string
	limit   int64 // bytes of one recording
	timeout time.Duration
	program string // file with the simulator's SQL, for topics
	env     environment
	out     io.Writer
}

func (s *settings) say(format string, args ...any) {
	_, _ = fmt.Fprintf(s.out, format+"\n", args...) // a closed terminal is nobody to tell
}

// run is main without the process: 0 for equal tables, 64 for a wrong command
// line, 1 for anything else.
func run(ctx context.Context, args, environ []string, stdout, stderr io.Writer) int {
	s := &settings{env: newEnvironment(environ), out: stdout}
	flags := flag.NewFlagSet("replay", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&s.dir, "dir", "", "`folder` of the recording")
	mib := flags.Int64("limit", 256, "`MiB` that a recording of one source may take")
	flags.StringVar(&s.program, "program", "", "`file` with the simulator's SQL program, beside the tables of a recorded slot")
	flags.DurationVar(&s.timeout, "timeout", 10*time.Minute, "how long one recording or one play may take")
	if err := flags.Parse(args); err != nil {
		return 64
	}
	s.limit = *mib << 20
	var err error
	switch verb := flags.Arg(0); {
	case flags.NArg() > 1 || s.limit <= 0:
		err = errUsage
	case verb == "" && s.dir == "":
		err = onPrivateStand(ctx, s)
	case verb == "" && s.dir != "":
		if err = record(ctx, s); err == nil {
			err = playTwice(ctx, s)
		}
	case verb == "record" && s.dir != "":
		err = record(ctx, s)
	case verb == "play" && s.dir != "":
		err = playTwice(ctx, s)
	default:
		err = errUsage
	}
	switch {
	case errors.Is(err, errUsage):
		_, _ = fmt.Fprintln(stderr, "replay:", err)
		return 64
	case err != nil:
		_, _ = fmt.Fprintln(stderr, "replay:", err)
		return 1
	}
	return 0
}

var errUsage = errors.New("use: replay [-dir FOLDER [-limit MIB] [-timeout D] [-program FILE] [record|play]]")
