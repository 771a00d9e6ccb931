package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"holdfast/internal/decode"
	"holdfast/test/harness"
)

const (
	// lookEvery is how often the monitor looks in the story, and stayEvery while
	// the demo stays up.
	lookEvery = 500 * time.Millisecond
	stayEvery = 10 * time.Second
)

// seen is one look at everything from outside.
type seen struct {
	acknowledged
	rows map[string]int64 // in Feldera, by table
}

var tables = []string{"orders", "order_items", "web_orders"}

// look reads the sources first and the destination after them: so what it calls
// acknowledged is never newer than the rows beside it.
func (w *world) look(ctx context.Context) (seen, error) {
	acked, err := w.acknowledged(ctx)
	if err != nil {
		return seen{}, err
	}
	s := seen{acknowledged: acked, rows: map[string]int64{}}
	for _, t := range tables {
		s.rows[t] = w.sim.Count(t)
	}
	return s, nil
}

// monitor prints what has moved, until ctx ends; that is no error.
func (w *world) monitor(ctx context.Context, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	var last seen
	for first := true; ; first = false {
		now, err := w.look(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("look at the positions: %w", err)
		case !first:
			w.printMoves(last, now)
		}
		last = now
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

func (w *world) printMoves(last, now seen) {
	if !maps.Equal(last.rows, now.rows) {
		var texts []string
		for _, t := range tables {
			texts = append(texts, fmt.Sprintf("%s %d (%+d)", t, now.rows[t], now.rows[t]-last.rows[t]))
		}
		w.say.line("feldera", "rows arrived: %s", strings.Join(texts, ", "))
	}
	if now.lsn != last.lsn {
		w.say.line("postgres", "confirmed_flush_lsn %s → %s (+%d bytes of WAL may be forgotten)", decode.FormatLSN(last.lsn), decode.FormatLSN(now.lsn), now.lsn-last.lsn)
	}
	if !maps.Equal(now.offsets, last.offsets) {
		w.say.line("kafka", "committed offsets %s → %s", offsetsText(last.offsets), offsetsText(now.offsets))
	}
}

// offsetsText writes offsets by partition: "0:12 1:9 2:11".
func offsetsText(offsets map[int32]int64) string {
	var texts []string
	for _, p := range slices.Sorted(maps.Keys(offsets)) {
		texts = append(texts, fmt.Sprintf("%d:%d", p, offsets[p]))
	}
	return strings.Join(texts, " ")
}

func lastLines(d *harness.Daemon) string { return strings.Join(d.Log().Tail(12), "\n") }
