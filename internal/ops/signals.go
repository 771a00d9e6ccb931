package ops

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// ErrStopping is the cause with which Context ends its context on the first
// signal: "we were told to stop", as opposed to an ended parent.
var ErrStopping = errors.New("stopping, as a signal asked for")

// Context gives a context that ends with the cause ErrStopping on the first
// SIGTERM or SIGINT, and a channel that is closed on the second, when what is
// in flight is to be left alone. A third signal has its default effect: the
// process dies. release gives the signals back and waits for the goroutine
// behind it; call it once, when the daemon has stopped.
func Context(parent context.Context, logger *slog.Logger) (ctx context.Context, stopNow <-chan struct{}, release func()) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	return watch(parent, logger, signals, func() { signal.Stop(signals) })
}

// watch is Context with the signals handed in.
func watch(parent context.Context, logger *slog.Logger, signals <-chan os.Signal, giveBack func()) (context.Context, <-chan struct{}, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	stopNow, released := make(chan struct{}), make(chan struct{})
	var owned sync.WaitGroup
	owned.Go(func() {
		defer giveBack()
		select {
		case s := <-signals:
			logger.LogAttrs(ctx, slog.LevelInfo, "stopping: finishing what is in flight; a second signal stops at once", slog.String("signal", s.String()))
			cancel(ErrStopping)
		case <-released:
			return
		}
		select {
		case s := <-signals:
			logger.LogAttrs(ctx, slog.LevelWarn, "stopping at once: what is in flight will be sent again after the next start", slog.String("signal", s.String()))
			close(stopNow)
		case <-released:
		}
	})
	var once sync.Once
	return ctx, stopNow, func() {
		once.Do(func() {
			close(released)
			owned.Wait()
			cancel(nil)
		})
	}
}
