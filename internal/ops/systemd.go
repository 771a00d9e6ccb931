package ops

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// statusEvery is how often the service manager is told the phase.
const statusEvery = 5 * time.Second

// tellServiceManager tells systemd, where it has asked for it (Type=notify),
// that the daemon is up, what it does, that it still turns, and that it stops.
// It returns when ctx ends; stopping is what began the stop.
//
// Up means that the listener is bound and the work has begun. A daemon whose
// peers are away is up: to restart it would not bring them back, and /readyz
// has the rest.
func tellServiceManager(ctx, stopping context.Context, health *Health, logger *slog.Logger) {
	sent, err := daemon.SdNotify(false, daemon.SdNotifyReady)
	if err != nil {
		logger.LogAttrs(ctx, slog.LevelWarn, "the service manager cannot be told anything", slog.Any("err", err))
	}
	if !sent || err != nil {
		return
	}
	every := statusEvery
	watchdog, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		logger.LogAttrs(ctx, slog.LevelWarn, "the service manager's watchdog is set in a way that cannot be read", slog.Any("err", err))
	}
	if watchdog > 0 {
		every = min(every, watchdog/2)
	}
	turn := time.NewTicker(every)
	defer turn.Stop()
	stop := stopping.Done()
	for {
		report := health.Report()
		state := fmt.Sprintf("STATUS=%s, phase %s", report.Status, report.Phase)
		if watchdog > 0 && health.Liveness().Live {
			state += "\n" + daemon.SdNotifyWatchdog
		}
		_, _ = daemon.SdNotify(false, state) // the next one says it again
		select {
		case <-turn.C:
		case <-stop:
			_, _ = daemon.SdNotify(false, daemon.SdNotifyStopping) // the signal came from it, most likely
			stop = nil
		case <-ctx.Done():
			return
		}
	}
}
