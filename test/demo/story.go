package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"
	"time"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
)

// tell plays the story: orders flow; each daemon is killed while what it sent is
// accepted and not completed; in the end both sides are equal.
func tell(ctx context.Context, w *world) error {
	ctx, cancel := context.WithTimeoutCause(ctx, storyTimeout, fmt.Errorf("the demo did not get to its end within %s", storyTimeout))
	defer cancel()
	telling, stop := context.WithCancelCause(ctx)
	var owned sync.WaitGroup
	owned.Go(func() {
		if err := w.monitor(telling, lookEvery); err != nil {
			stop(err) // the story ends with it: its own error is only that ctx has ended
		}
	})
	err := w.chapters(telling)
	cause := context.Cause(telling)
	stop(nil)
	owned.Wait()
	if err != nil && cause != nil {
		return errors.Join(cause, err)
	}
	return err
}

func (w *world) chapters(ctx context.Context) error {
	w.say.chapter("Orders flow through both paths")
	if err := w.flow(ctx, 16); err != nil {
		return err
	}
	if err := w.settle(ctx); err != nil {
		return err
	}
	w.say.chapter("pgsource is killed with transactions in flight")
	if err := w.killInFlight(ctx, daemon{"pgsource", w.pgsource}); err != nil {
		return err
	}
	w.say.chapter("kafkasink is killed with records in flight")
	if err := w.killInFlight(ctx, daemon{"kafkasink", w.kafkasink}); err != nil {
		return err
	}
	w.say.chapter("Source and destination are compared")
	made, got := w.traffic.made(), w.sim.Counters()
	w.say.line("demo", "the sources made %d row changes in %d transactions, and %d records: %d in all",
		made.rowChanges, made.transactions, made.records, made.rowChanges+made.records)
	w.say.line("demo", "Feldera took %d row changes: %d came again after the kills, and met the row that was there by its key",
		got.Records, got.Records-made.rowChanges-made.records)
	return w.compare(ctx)
}

// flow makes orders for a while, in that many rounds of three transactions and
// four web orders.
func (w *world) flow(ctx context.Context, rounds int) error {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	before := w.traffic.made()
	for range rounds {
		for range 3 {
			if err := w.traffic.transaction(ctx); err != nil {
				return err
			}
		}
		if err := w.traffic.records(ctx, 4); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	after := w.traffic.made()
	w.say.line("demo", "made %d transactions over two tables in Postgres, and %d records in Kafka", after.transactions-before.transactions, after.records-before.records)
	return nil
}

// settle waits until the sources have everything acknowledged, and says so.
func (w *world) settle(ctx context.Context) error {
	if err := w.awaitAcknowledged(ctx); err != nil {
		return err
	}
	now, err := w.look(ctx)
	if err != nil {
		return err
	}
	w.say.line("demo", "everything is acknowledged, read back from the sources: confirmed_flush_lsn %s, committed offsets %s", decode.FormatLSN(now.lsn), offsetsText(now.offsets))
	return nil
}

// killInFlight holds completion in Feldera, sends more, shows that nothing is
// acknowledged although all of it is accepted, kills d, goes on making orders
// without it, and lets it come back.
func (w *world) killInFlight(ctx context.Context, d daemon) error {
	w.sim.HoldCompletion()
	w.say.line("feldera", "from here on accepts rows and completes none (simulated: an output is stuck)")
	start, err := w.acknowledged(ctx)
	if err != nil {
		return err
	}
	requests, before := w.sim.Counters().Requests, w.traffic.made()
	if err := w.traffic.transaction(ctx); err != nil {
		return err
	}
	lsn, err := w.pg.CurrentLSN(ctx) // not below the end of that transaction
	if err != nil {
		return err
	}
	if err := w.flow(ctx, 6); err != nil {
		return err
	}
	if err := w.awaitInFlight(ctx, requests, before); err != nil {
		return err
	}
	if err := w.expectHeld(ctx, lsn, start); err != nil {
		return err
	}

	pid := d.Pid()
	d.Kill()
	w.say.line(d.name, "process %d: SIGKILL. What Feldera had accepted is neither completed nor acknowledged", pid)
	if err := w.flow(ctx, 3); err != nil {
		return err
	}
	if err := w.expectHeld(ctx, lsn, start); err != nil {
		return err
	}
	if err := d.Restart(nil); err != nil {
		return err
	}
	w.say.line(d.name, "started again as process %d", d.Pid())
	w.sim.ReleaseCompletion()
	w.say.line("feldera", "completes again")
	if err := w.healthy(ctx, d.name, d.Daemon); err != nil {
		return err
	}
	return w.settle(ctx)
}

// awaitInFlight waits until Feldera has accepted rows of both paths in requests
// after the one given, and says how many. It need not be all that was made since
// before: a daemon sends a bounded number of batches ahead of completion.
func (w *world) awaitInFlight(ctx context.Context, request int64, before volume) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	var rows, records int
	err := w.sim.WaitFor(ctx, func(v felderasim.View) bool {
		rows, records = 0, 0
		for _, r := range v.Requests() {
			switch {
			case r.Seq <= request || r.Status != http.StatusOK:
			case r.Table == "web_orders":
				records += r.Records
			default:
				rows += r.Records
			}
		}
		return rows > 0 && records > 0
	})
	if err != nil {
		return fmt.Errorf("wait until Feldera has accepted rows of both paths (now %d and %d): %w", rows, records, err)
	}
	made := w.traffic.made()
	w.say.line("feldera", "has accepted %d of %d row changes and %d of %d records, in memory only (a daemon sends at most 8 batches ahead)",
		rows, made.rowChanges-before.rowChanges, records, made.records-before.records)
	return nil
}

// expectHeld gives an error when a source was told that something after the hold
// was processed: nothing was. lsn is where the first transaction after it ends;
// below that the server may move, by WAL that has no rows for us.
func (w *world) expectHeld(ctx context.Context, lsn uint64, start acknowledged) error {
	now, err := w.acknowledged(ctx)
	if err != nil {
		return err
	}
	end, err := w.pg.CurrentLSN(ctx)
	if err != nil {
		return err
	}
	ends, err := w.broker.EndOffsets(ctx, topic)
	if err != nil {
		return err
	}
	if now.lsn >= lsn || now.records() != start.records() {
		return fmt.Errorf("acknowledged without completion: confirmed_flush_lsn %s with the transaction up to %s not completed, committed offsets %s, before %s",
			decode.FormatLSN(now.lsn), decode.FormatLSN(lsn), offsetsText(now.offsets), offsetsText(start.offsets))
	}
	w.say.line("postgres", "confirmed_flush_lsn stays at %s; the WAL ends at %s", decode.FormatLSN(now.lsn), decode.FormatLSN(end))
	w.say.line("kafka", "committed offsets stay at %s; the partitions end at %s", offsetsText(now.offsets), offsetsText(ends))
	return nil
}

// stay keeps everything up for a person to look at, with a few orders a second,
// until ctx ends. A daemon that ends meanwhile, by that person's hand, is started
// again.
func (w *world) stay(ctx context.Context) error {
	w.say.chapter("DEMO_KEEP: everything stays up, with a few orders a second, until Ctrl-C")
	w.say.line("postgres", "psql '%s'", w.pg.DSN())
	w.say.line("kafka", "broker %s, topic %s, group %s", w.broker.Seeds[0], topic, group)
	w.say.line("feldera", "%s (simulated), pipeline %s; an ad-hoc query:\ncurl -G %s/v0/pipelines/%s/query -d format=text --data-urlencode 'sql=SELECT status, count(*) AS n FROM orders GROUP BY status'",
		w.sim.URL(), pipeline, w.sim.URL(), pipeline)
	w.say.line("feldera", "hold completion, and let it go:\ncurl -d '{\"what\":\"completion\"}' %s/sim/hold\ncurl -d '{\"what\":\"completion\"}' %s/sim/release", w.sim.URL(), w.sim.URL())
	for _, d := range w.daemons() {
		w.say.line(d.name, "http://%s/healthz  http://%s/metrics  process %d: kill -9 it, it is started again", d.Addr(), d.Addr(), d.Pid())
	}
	staying, cancel := context.WithCancelCause(ctx)
	var owned sync.WaitGroup
	owned.Go(func() {
		if err := w.monitor(staying, stayEvery); err != nil {
			cancel(err)
		}
	})
	err := w.goOn(staying)
	cause := context.Cause(staying)
	cancel(nil)
	owned.Wait()
	select {
	case <-ctx.Done(): // so err only tells of it
		w.say.chapter("Ctrl-C: everything is stopped")
		return nil
	default:
		return errors.Join(cause, err)
	}
}

// goOn makes orders until ctx ends, or until the process that started the demo
// has: a go run that is ended by SIGTERM passes nothing on, and must not leave
// servers behind.
func (w *world) goOn(ctx context.Context) error {
	parent := os.Getppid()
	tick := time.NewTicker(400 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		if os.Getppid() != parent {
			return errors.New("whoever started the demo is gone")
		}
		if err := errors.Join(w.traffic.transaction(ctx), w.traffic.records(ctx, 1)); err != nil {
			return err
		}
		for _, d := range w.daemons() {
			code, ended := d.ExitCode()
			if !ended {
				continue
			}
			if code > 0 { // it has given up by itself; a signal would be -1
				return fmt.Errorf("%s ended with code %d; its last lines:\n%s", d.name, code, lastLines(d.Daemon))
			}
			if err := d.Restart(nil); err != nil {
				return err
			}
			w.say.line(d.name, "was ended from outside; started again as process %d", d.Pid())
		}
	}
}
