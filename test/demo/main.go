// Command demo shows Holdfast at work on one machine: a private Postgres and an
// in-process Kafka broker as sources, a simulator of Feldera as destination, and
// pgsource and kafkasink as the processes they are. It drives orders through both
// paths, kills each daemon while rows are in flight, and compares source and
// destination row by row at the end.
//
// It promises to exit 0 only when every table was found equal after the source
// had been told that all of it was processed, and to leave no process and no
// folder behind, also after Ctrl-C. It does not show Feldera itself, nor a real
// Kafka broker, and says so first.
//
// With DEMO_KEEP=1 in the environment it stays up afterwards, prints every
// address, and goes on with a few orders a second until Ctrl-C.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The first signal cleans up; a second one, while that lasts, ends us at once.
	// The children die with us either way.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Getenv("DEMO_KEEP"), os.Stdout))
}

// storyTimeout bounds the demo up to the comparison, once everything is built
// and started. It takes less than half of it.
const storyTimeout = 2 * time.Minute

// run is main without the process around it: 0 when all was equal, 1 otherwise,
// with the reason printed. The end of ctx is Ctrl-C.
func run(ctx context.Context, keep string, out io.Writer) int {
	say := &printer{out: out, start: time.Now()}
	say.line("demo", "Feldera is SIMULATED here: test/felderasim answers as a pipeline does and keeps tables in memory.")
	say.line("demo", "The Kafka broker is kfake, franz-go's in-process broker. Postgres, pgsource and kafkasink are real.")
	if err := perform(ctx, keep, say); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted before the end; everything is stopped and removed")
		}
		say.line("demo", "FAILED: %v", err)
		return 1
	}
	say.line("demo", "done: everything is stopped and removed")
	return 0
}

// perform starts the world, tells the story in it, and takes it down again.
func perform(ctx context.Context, keep string, say *printer) (err error) {
	stay := false
	if keep != "" {
		if stay, err = strconv.ParseBool(keep); err != nil {
			return errors.New("DEMO_KEEP is neither true nor false: set DEMO_KEEP=1 to stay up at the end, or leave it out")
		}
	}
	w, err := startWorld(ctx, say)
	defer func() {
		if closing := w.close(context.WithoutCancel(ctx)); closing != nil {
			err = errors.Join(err, fmt.Errorf("clean up: %w", closing))
		}
	}()
	if err != nil {
		return err
	}
	if err := tell(ctx, w); err != nil {
		return err
	}
	if stay {
		if err := w.stay(ctx); err != nil {
			return err
		}
	}
	// After Ctrl-C there still is an orderly stop to be shown.
	return w.stopDaemons(context.WithoutCancel(ctx))
}
