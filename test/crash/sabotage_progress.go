package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"holdfast/internal/crash"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// This file has the scenarios of wrong builds that break a rule of the progress
// table. Each holds the order of events that the rule is for.

// haltAt starts the daemon, calls provoke when it is up, and waits until it
// stands still at a place.
func (r *rig) haltAt(ctx context.Context, p crash.Point, provoke func(context.Context) error) error {
	dir, err := os.MkdirTemp(r.dir, "halt-")
	if err != nil {
		return err
	}
	log := filepath.Join(dir, "log")
	if err := r.daemon.Restart(map[string]string{"CRASH_AT": string(p) + ":1:" + actStop, "CRASH_LOG": log}); err != nil {
		return err
	}
	limit, cancel := context.WithTimeout(ctx, r.patience)
	defer cancel()
	if provoke != nil {
		if err := r.ready(limit); err != nil {
			return err
		}
		if err := provoke(limit); err != nil {
			return err
		}
	}
	return r.eventually(limit, "the daemon stands still at "+string(p), func(context.Context) (any, bool) {
		text, _ := os.ReadFile(log)
		return string(text), strings.Contains(string(text), "acts "+string(p))
	})
}

// claimMeetsAnotherProcess lets the pipeline come back with nothing between the
// moment at which a daemon that starts has read the progress table, and its
// claim of it: the claim lands there, and stands for what the process before had.
func claimMeetsAnotherProcess(ctx context.Context, w world) error {
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	defer release()
	limit, cancel := context.WithTimeout(ctx, b.patience)
	defer cancel()
	if err := b.pg.Exec(ctx, onlyWriter); err != nil {
		return err
	}
	if err := b.rest(limit); err != nil {
		return err
	}
	if err := b.stopDaemon(ctx); err != nil {
		return err
	}
	if err := b.haltAt(ctx, crash.PgEpochNoted, nil); err != nil {
		return err
	}
	// At once: a daemon that has heard nothing for a while looks who is there.
	before := b.sim.Incarnation()
	b.crashDestination(ctx, core.KeepNothing)
	if err := b.goOn(); err != nil {
		return err
	}
	// Which process it was meant for can be read before the next attempt comes.
	if err := b.sim.WaitFor(limit, func(v felderasim.View) bool { return v.Count("holdfast_progress") > 0 }); err != nil {
		return err
	}
	if !slices.ContainsFunc(b.sim.Rows("holdfast_progress"), func(row map[string]any) bool { return row["incarnation"] == before }) {
		return errNotTried
	}
	release()
	b.patience /= 3 // copies come within seconds, or never
	return b.settle(ctx)
}

// errNotTried says that the events did not come in the order that a scenario is
// for.
var errNotTried = errors.New("the events did not come in the order that the scenario is for")

// sentTo counts the requests that brought rows of a table to a process.
func sentTo(sim *felderasim.Sim, table, incarnation string) (n int) {
	for _, r := range sim.Requests() {
		if r.Incarnation == incarnation && core.CanonicalName(r.Table) == core.CanonicalName(table) && r.Records > 0 {
			n++
		}
	}
	return n
}

// recordsOf gives how many rows the n-th request with rows of a table had.
func recordsOf(sim *felderasim.Sim, table string, n int) int {
	for _, r := range sim.Requests() {
		if core.CanonicalName(r.Table) != core.CanonicalName(table) || r.Records == 0 {
			continue
		}
		if n--; n < 0 {
			return r.Records
		}
	}
	return 0
}

// rowsSent gives how many rows of a table were accepted.
func rowsSent(sim *felderasim.Sim, table string) (n int) {
	for _, r := range sim.Requests() {
		if core.CanonicalName(r.Table) == core.CanonicalName(table) {
			n += r.Records
		}
	}
	return n
}

// transfer moves money from one table to the other.
const transfer = `BEGIN;
UPDATE left_accounts SET balance = balance - 7, version = version + 1 WHERE id = 1;
UPDATE right_accounts SET balance = balance + 7, version = version + 1 WHERE id = 1;
UPDATE writers SET n = n + 1 WHERE id = 1;
COMMIT`

// rowsMeetAnotherProcess lets the pipeline's process end behind the begin of a
// transaction that has nothing in it yet: what belongs into it must not be sent
// to the process that comes after, where none is open.
func rowsMeetAnotherProcess(ctx context.Context, w world) error {
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	defer release()
	if err := b.stopDaemon(ctx); err != nil {
		return err
	}
	was := b.sim.Incarnation()
	before := sentTo(b.sim, "left_accounts", was)
	err = b.haltAt(ctx, crash.PgTxOpen, func(ctx context.Context) error { return b.pg.Exec(ctx, transfer) })
	if err != nil {
		return err
	}
	b.oracle.comesBack(excuse{}, false, false) // nothing is in it, so nothing of it may be seen
	b.sim.Crash(core.KeepJournal)
	if sentTo(b.sim, "left_accounts", was) > before { // it was sent before the process stood still
		return errNotTried
	}
	if err := b.standStill(ctx, 500*time.Millisecond); err != nil { // who has heard nothing for so long looks
		return err
	}
	watch(ctx, w, 2*time.Second)
	release()
	return b.settle(ctx)
}

// committedBySomebody lets somebody else commit a transaction whose rows the
// pipeline still has queued, and the daemon end: what the next one finds must
// not say that they are in.
func committedBySomebody(ctx context.Context, w world) error {
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	defer release()
	limit, cancel := context.WithTimeout(ctx, b.patience)
	defer cancel()
	b.sim.HoldIngest("writers")
	defer b.sim.ReleaseIngest("")
	sent := func() int { return sentTo(b.sim, "writers", b.sim.Incarnation()) }
	before := sent()
	// A half of it shows nothing that a reader could miss.
	err = b.pg.Exec(ctx, "BEGIN; UPDATE left_accounts SET version = version + 1 WHERE id = 1; UPDATE writers SET n = n + 1 WHERE id = 1; COMMIT")
	if err != nil {
		return err
	}
	err = b.eventually(limit, "the rows are queued", func(context.Context) (any, bool) { return sent(), sent() > before })
	if err != nil {
		return err
	}
	watch(ctx, w, time.Second) // for a row that a right build does not send yet
	if err := b.sim.CommitTransaction(); err != nil {
		return err
	}
	err = b.sim.WaitFor(limit, func(v felderasim.View) bool { return v.Settled() && !v.InTransaction() })
	if err != nil {
		return err
	}
	b.daemon.Kill()
	before = sent()
	if err := b.daemon.Restart(nil); err != nil {
		return err
	}
	err = b.eventually(limit, "the next daemon sends the rows again", func(context.Context) (any, bool) {
		return sent(), sent() > before || w.wrong()
	})
	if err != nil || w.wrong() {
		return err
	}
	b.sim.ReleaseIngest("")
	release()
	return b.settle(ctx)
}

// checkpointOfBefore lets a checkpoint succeed that was begun before the rows
// came, behind a request for one that came after them; then the pipeline comes
// back from it.
func checkpointOfBefore(ctx context.Context, w world) error {
	b, release, err := quiet(ctx, w)
	if err != nil {
		return err
	}
	defer release()
	limit, cancel := context.WithTimeout(ctx, b.patience)
	defer cancel()
	defer b.sim.ReleaseCheckpoint()
	err = harness.Eventually(limit, "a checkpoint begins", func(context.Context) (any, bool) { return nil, b.sim.HoldBegunCheckpoint() })
	if err != nil {
		return err
	}
	asked, err := b.sim.Inject(felderasim.Fault{Kind: felderasim.Delay, Endpoint: "checkpoint", Count: -1}) // by nothing: it counts them
	if err != nil {
		return err
	}
	if err := b.pg.Exec(ctx, onlyWriter); err != nil {
		return err
	}
	err = b.eventually(limit, "the daemon asks for a checkpoint", func(context.Context) (any, bool) { return nil, b.sim.FaultHits(asked) > 0 })
	if err != nil {
		return err
	}
	moved := b.tap.moved()
	success := func(v felderasim.View) uint64 {
		if s := v.CheckpointStatus().Success; s != nil {
			return *s + 1
		}
		return 0
	}
	var had uint64
	err = b.sim.WaitFor(limit, func(v felderasim.View) bool { had = success(v); return true })
	if err != nil {
		return err
	}
	b.sim.ReleaseCheckpoint()
	if err := b.sim.WaitFor(limit, func(v felderasim.View) bool { return success(v) > had }); err != nil {
		return err
	}
	b.sim.HoldCheckpoint() // or the next one has them
	few, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_ = harness.Eventually(few, "a status that a right build does not send", func(context.Context) (any, bool) { return nil, b.tap.moved() > moved })
	b.crashDestination(ctx, core.KeepCheckpoint)
	b.sim.ClearFault(asked)
	b.sim.ReleaseCheckpoint()
	release()
	return b.settle(ctx)
}

// staleRow lets a member stand still in front of a progress row until another
// one has taken its partitions and gone on, and then lets it send that row: the
// next owner must not take it for the newest.
func staleRow(ctx context.Context, w world) error {
	k, ok := w.(*counterWorld)
	if !ok {
		panic("the scenario needs a group")
	}
	release := sync.OnceFunc(k.gate.hold())
	defer release()
	limit, cancel := context.WithTimeout(ctx, k.patience)
	defer cancel()
	if err := k.rest(limit); err != nil {
		return err
	}
	if err := k.stopDaemon(ctx); err != nil {
		return err
	}
	k.unclean()
	err := k.haltAt(ctx, crash.KafkaBeforeProgress, func(ctx context.Context) error {
		if err := has(ctx, k.daemon, 2*partitions); err != nil {
			return err
		}
		// Ingested all at once, so that one array has the rows of all partitions.
		for _, table := range []string{counters, events} {
			k.sim.HoldIngest(table)
		}
		defer k.sim.ReleaseIngest("")
		before := rowsSent(k.sim, counters)
		if err := k.produce(ctx, partitions); err != nil {
			return err
		}
		return k.eventually(ctx, "the records are queued", func(context.Context) (any, bool) {
			n := rowsSent(k.sim, counters) - before
			return n, n >= partitions
		})
	})
	if err != nil {
		return err
	}
	if err := k.second.Restart(nil); err != nil {
		return err
	}
	if err := has(limit, k.second, 2*partitions); err != nil {
		return err
	}
	// An owner writes its rows into two places in turn. The newest of two partitions
	// stands in the one, that of the others in the other: where the stale one lands.
	for _, records := range []int{partitions, partitions / 2} {
		if err := k.produce(ctx, records); err != nil {
			return err
		}
		if err := k.rest(limit); err != nil {
			return err
		}
	}
	incarnation := k.sim.Incarnation()
	before := sentTo(k.sim, "holdfast_progress", incarnation)
	if err := k.goOn(); err != nil {
		return err
	}
	err = harness.Eventually(limit, "the stale row is sent", func(context.Context) (any, bool) {
		return nil, sentTo(k.sim, "holdfast_progress", incarnation) > before || w.wrong()
	})
	if err != nil {
		return err
	}
	if rows := recordsOf(k.sim, "holdfast_progress", before); rows < partitions {
		return fmt.Errorf("%w: the array that came late has %d rows", errNotTried, rows)
	}
	if err := k.second.Terminate(); err != nil {
		return err
	}
	if _, err := k.second.Wait(limit); err != nil {
		return err
	}
	if err := has(limit, k.daemon, 2*partitions); err != nil {
		return err
	}
	release()
	if err := k.flow(ctx); err != nil {
		return err
	}
	lost, err := k.daemon.Metric(limit, "kafkasink_progress_decisions_total", map[string]string{"found": "lost"})
	if err != nil {
		return err
	}
	if lost > 0 {
		return errors.New("the next owner calls lost what the pipeline holds: it goes by a row of the owner before")
	}
	return k.settle(ctx)
}

// has waits until a member has so many partitions.
func has(ctx context.Context, d *harness.Daemon, n float64) error {
	return harness.Eventually(ctx, fmt.Sprintf("a member has %v partitions", n), func(ctx context.Context) (any, bool) {
		got, err := d.Metric(ctx, "kafkasink_assigned_partitions", nil)
		return fmt.Sprint(got, err), err == nil && got == n
	})
}
