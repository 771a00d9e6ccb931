package ops

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"holdfast/internal/decode"
)

// Daemon is what the run verb of every daemon does around its work: logger,
// metrics, health, listener, signals, and what becomes of a refusal.
type Daemon struct {
	Name   string
	Listen string // host:port of the endpoints
	// ListenSetting is the name of the setting that Listen came from, for the
	// message that the address is taken; "" = not said.
	ListenSetting string
	LogLevel      string
	LogFormat     string
	Fingerprint   string // of the effective configuration
	// ReadyWhen names the conditions of readiness (Health.SetReady).
	ReadyWhen []string
	// WaitOnRefusal keeps the process up in phase blocked when its work ends
	// with a refusal, until a signal; otherwise the error is returned.
	WaitOnRefusal bool
	// Work is the daemon itself. It returns when ctx ends, or earlier with what
	// ended it, and leaves no goroutine behind.
	Work func(ctx context.Context, rt Runtime) error
	// Page says what the status page shows.
	Page Page
	// WhileBlocked, if set, runs until ctx ends while the daemon waits after a
	// refusal: what must go on being looked at.
	WhileBlocked func(ctx context.Context)
	// LongestStep is how long Work may go without Health.Beat, beside what
	// every daemon may; /livez allows for it.
	LongestStep time.Duration
}

// Runtime is what Work gets.
type Runtime struct {
	Logger   *slog.Logger
	Registry *prometheus.Registry
	Health   *Health
	// Repeats counts the failures that go on; the status page shows them.
	Repeats *Repeats
	// StopNow is closed on the second signal.
	StopNow <-chan struct{}
}

const (
	// liveAfter is above the longest single step of either daemon: creating a
	// slot waits for two minutes.
	liveAfter = 3 * time.Minute
	// waitingBeat feeds the watchdog while a blocked daemon waits.
	waitingBeat = 10 * time.Second
)

// Run runs the daemon until a signal or a failure. The listener is bound
// before Work is called, and answers until Work has returned. What ended the
// daemon is the last line of its log, with the exit code; Program prints the
// error no second time.
func (d Daemon) Run(ctx context.Context, call Call) error {
	logger, err := NewLogger(call.Stderr, d.LogLevel, d.LogFormat)
	if err != nil {
		return err
	}
	if err := d.run(ctx, logger); err != nil {
		logger.LogAttrs(ctx, slog.LevelError, "ended", slog.Int("exit_code", ExitCode(err)), slog.String("err", oneLine(err.Error())))
		return &loggedError{err}
	}
	return nil
}

func (d Daemon) run(ctx context.Context, logger *slog.Logger) error {
	registry, err := NewRegistry(d.Name, Version())
	if err != nil {
		return err
	}
	health, err := NewHealth(HealthOptions{
		Daemon: d.Name, Now: time.Now, Registerer: registry, ReadyWhen: d.ReadyWhen, LiveAfter: liveAfter + d.LongestStep,
	})
	if err != nil {
		return err
	}
	repeats := NewRepeats(logger, time.Now)
	history := NewHistory(d.Page.Charts, registry, time.Now)
	server, err := Listen(ctx, d.Listen, ServerOptions{
		Daemon: d.Name, Health: health, Gatherer: registry, Logger: logger, Page: d.Page, History: history, Repeats: repeats,
	})
	if err != nil {
		if d.ListenSetting != "" {
			err = fmt.Errorf("%w; set %s to an address that is free", err, d.ListenSetting)
		}
		return WithExitCode(ExitUnavailable, err)
	}
	logger.LogAttrs(ctx, slog.LevelInfo, "starting", slog.String("version", Version().String()),
		slog.String("listen", server.Addr().String()), slog.String("configuration", d.Fingerprint))

	work, stopNow, release := Context(ctx, logger)
	defer release()
	defer context.AfterFunc(work, health.Stopping)()
	serving, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	work, fail := context.WithCancelCause(work)
	var served sync.WaitGroup
	served.Go(func() {
		if err := server.Serve(serving); err != nil {
			fail(err) // nobody can look any more: that is no state to go on in
		}
	})
	served.Go(func() { history.Run(serving) })
	served.Go(func() { tellServiceManager(serving, work, health, logger) })
	err = d.Work(work, Runtime{Logger: logger, Registry: registry, Health: health, Repeats: repeats, StopNow: stopNow})
	if cause := context.Cause(work); err == nil && cause != nil && !errors.Is(cause, ErrStopping) && ctx.Err() == nil {
		err = cause
	}
	if _, refused := errors.AsType[*decode.Refusal](err); refused && d.WaitOnRefusal && work.Err() == nil {
		d.block(work, health, logger, err)
		err = nil
	}
	stopServing()
	served.Wait()
	fail(nil)
	if err = AfterStop(work, err); err != nil {
		return fmt.Errorf("run: %w", err)
	}
	logger.LogAttrs(ctx, slog.LevelInfo, "stopped")
	return nil
}

// block shows a refusal until a signal comes.
func (d Daemon) block(work context.Context, health *Health, logger *slog.Logger, err error) {
	refused, _ := errors.AsType[*decode.Refusal](err)
	health.SetPhase(PhaseBlocked)
	health.Set("refusal", Check{Blocking: true, Message: err.Error(), Hint: refused.Do})
	for _, name := range d.ReadyWhen {
		health.SetReady(name, false, "blocked: a person has to act")
	}
	logger.LogAttrs(work, slog.LevelError, "blocked until a person has acted; then restart", slog.Any("err", err))
	var looking sync.WaitGroup
	defer looking.Wait()
	if d.WhileBlocked != nil {
		looking.Go(func() { d.WhileBlocked(work) })
	}
	beat := time.NewTicker(waitingBeat)
	defer beat.Stop()
	for {
		health.Beat()
		select {
		case <-beat.C:
		case <-work.Done():
			return
		}
	}
}

// LookingRuntime is a Runtime for verbs that look and do not run: it logs
// nothing and nobody scrapes it.
func LookingRuntime(daemon string) (Runtime, error) {
	registry := prometheus.NewRegistry()
	health, err := NewHealth(HealthOptions{Daemon: daemon, Now: time.Now, Registerer: registry})
	if err != nil {
		return Runtime{}, err
	}
	logger := slog.New(slog.DiscardHandler)
	return Runtime{Logger: logger, Registry: registry, Health: health, Repeats: NewRepeats(logger, time.Now)}, nil
}
