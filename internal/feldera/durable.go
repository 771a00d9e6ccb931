package feldera

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/go-json-experiment/json"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/internal/sabotage"
)

// DurabilityOptions tune the checkpoints. Zero values mean the defaults.
type DurabilityOptions struct {
	// MinInterval is the least time between two checkpoints that are asked
	// for. Default: the client's CheckpointInterval.
	MinInterval time.Duration
	// Poll is how often a running checkpoint is asked about. Default 100 ms.
	Poll time.Duration
	// Patience is how long a checkpoint may neither succeed nor fail before it
	// is asked for anew. Default 10 minutes: an open transaction delays
	// checkpoints for as long as it lasts.
	Patience time.Duration
}

// Durability makes checkpoints until rows that were completed are on disk.
//
// One successful checkpoint is no proof: a request that arrives while another
// checkpoint is being written is credited with that one, whose content was
// fixed before. So rows count as durable when two requests have succeeded, one
// after the other, both made after the rows were completed: only one
// checkpoint runs at a time, hence the one that satisfied the second began
// after the one that satisfied the first had ended, and that ended after the
// first was asked for. The second request of one pair is the first of the
// next.
type Durability struct {
	c    *Client
	opts DurabilityOptions
	wake chan struct{}

	mu sync.Mutex
	// waiting are the rows for which no request was made yet. Their number is
	// bounded by the callers, which stop sending.
	waiting []waiter
}

type waiter struct {
	ev Evidence
	fn func(Evidence)
}

// NewDurability makes a checkpointer. Its owner calls Check once and Run.
func (c *Client) NewDurability(opts DurabilityOptions) *Durability {
	opts.MinInterval = orDefault(max(opts.MinInterval, 0), c.cfg.CheckpointInterval)
	opts.Poll = orDefault(max(opts.Poll, 0), 100*time.Millisecond)
	opts.Patience = orDefault(max(opts.Patience, 0), 10*time.Minute)
	return &Durability{c: c, opts: opts, wake: make(chan struct{}, 1)}
}

// Check tells whether this pipeline can make checkpoints at all: one attempt.
// The error is a *decode.Refusal where it cannot.
func (d *Durability) Check(ctx context.Context) error {
	s, err := d.c.Stats(ctx)
	if err != nil {
		return fmt.Errorf("check for checkpoints: %w", err)
	}
	if len(s.CheckpointsImpossible) == 0 {
		return nil
	}
	return &decode.Refusal{
		Reason: decode.ReasonUnsupported, What: "acknowledging on durable", Where: d.c.where(),
		Why:      "the pipeline cannot make checkpoints: " + strings.Join(s.CheckpointsImpossible, ", "),
		Expected: "a build of Feldera with checkpoints, and a pipeline with storage and fault tolerance",
		Do:       "acknowledge on completed, or enable checkpoints",
	}
}

// Await is Check for as long as the pipeline does not answer it. Errors:
// *decode.Refusal, or ctx's cause joined with the last reason.
func (d *Durability) Await(ctx context.Context) error {
	r := d.c.retrier("check for checkpoints")
	for {
		err := d.Check(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return r.ended(ctx)
		}
		if final := d.c.transient(err); final != nil {
			return final
		}
		if err := r.wait(ctx, err); err != nil {
			return err
		}
	}
}

// Watch calls fn once with the rung Durable, or once with Err. ev is evidence
// of the rung Completed: then no transaction holds the rows back any more. fn
// runs on the goroutine of Run and must not block. Nothing is called once Run
// has returned.
func (d *Durability) Watch(ev Evidence, fn func(Evidence)) {
	d.mu.Lock()
	d.waiting = append(d.waiting, waiter{ev, fn})
	d.mu.Unlock()
	select {
	case d.wake <- struct{}{}:
	default: // a wake-up is pending already
	}
}

// Run makes checkpoints while there is something to make durable, until ctx
// ends; it returns ctx's cause. It is called once.
func (d *Durability) Run(ctx context.Context) error {
	// first holds what was waiting when the last successful request was made,
	// the next success proves it. asked holds what was waiting when the
	// request in hand was made.
	var first, asked []waiter
	r := d.c.retrier("checkpoint")
	for {
		asked = append(asked, d.take()...)
		if len(first)+len(asked) == 0 {
			select {
			case <-d.wake:
				continue
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		expected := d.c.Expected()
		err := d.checkpoint(ctx, expected)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err == nil:
			r = d.c.retrier("checkpoint")
			if sabotage.On(sabotage.SingleCheckpoint) {
				first, asked = append(first, asked...), nil
			}
			for _, w := range first {
				w.fn(proven(w.ev, expected))
			}
			first, asked = asked, nil
			if !sleep(ctx, d.opts.MinInterval) {
				return context.Cause(ctx)
			}
		default:
			if final := d.c.transient(err); final != nil {
				for _, w := range append(append(first, asked...), d.take()...) {
					w.fn(Evidence{Token: w.ev.Token, Err: final})
				}
				first, asked = nil, nil
				continue
			}
			if r.wait(ctx, err) != nil {
				return context.Cause(ctx)
			}
		}
	}
}

func (d *Durability) take() []waiter {
	d.mu.Lock()
	defer d.mu.Unlock()
	taken := d.waiting
	d.waiting = nil
	return taken
}

// proven is the evidence for rows that a pair of checkpoints of an incarnation
// covers. Rows that another one accepted are not in them: their owner went on
// to expect the new incarnation while they waited here.
func proven(ev Evidence, incarnation string) Evidence {
	if ev.Token.Incarnation != incarnation {
		return Evidence{Token: ev.Token, Err: &IncarnationChanged{Was: ev.Token.Incarnation, Now: incarnation}}
	}
	return Evidence{Token: ev.Token, Rung: ack.Durable, Step: ev.Step}
}

// checkpoint asks for one checkpoint and waits for its end.
func (d *Durability) checkpoint(ctx context.Context, expected string) error {
	seq, err := d.request(ctx, expected)
	if err != nil {
		return err
	}
	r := d.c.retrier("read checkpoint")
	deadline := time.Now().Add(d.opts.Patience)
	for {
		done, err := d.finished(ctx, expected, seq)
		switch {
		case done || (err != nil && ctx.Err() != nil):
			return err
		case err == nil && !time.Now().Before(deadline):
			return d.silent(ctx, seq)
		case err == nil:
			if !sleep(ctx, d.opts.Poll) {
				return context.Cause(ctx)
			}
			continue
		case d.c.transient(err) != nil:
			return err
		}
		if err := r.wait(ctx, err); err != nil {
			return err
		}
	}
}

// silent is the error for a checkpoint of which nothing more is heard: with
// what delays it, where the pipeline says so.
func (d *Durability) silent(ctx context.Context, seq uint64) error {
	err := fmt.Errorf("%w: checkpoint %d has neither succeeded nor failed within %s", errCheckpoint, seq, d.opts.Patience)
	s, statsErr := d.c.Stats(ctx)
	switch {
	case statsErr != nil:
		return err // it says enough
	case len(s.CheckpointDelays) > 0:
		return fmt.Errorf("%w; it is delayed: %s", err, strings.Join(s.CheckpointDelays, ", "))
	case s.Checkpoint != "":
		return fmt.Errorf("%w; the pipeline's checkpointer is %s", err, s.Checkpoint)
	}
	return err
}

// request asks for a checkpoint. A repetition by the manager does no harm: it
// only asks for one more.
func (d *Durability) request(ctx context.Context, expected string) (uint64, error) {
	cl := call{endpoint: epCheckpoint, method: http.MethodPost, path: "/checkpoint", limit: maxSmallBody, timeout: checkpointTimeout}
	body, err := d.c.roundTrip(ctx, cl)
	if err != nil {
		return 0, err
	}
	var b struct {
		Sequence    *uint64 `json:"checkpoint_sequence_number"`
		Incarnation string  `json:"incarnation_uuid"`
	}
	if err := json.Unmarshal(body, &b); err != nil {
		return 0, d.c.badAnswer(cl, body, err)
	}
	if b.Sequence == nil {
		return 0, d.c.badAnswer(cl, body, errors.New("checkpoint_sequence_number is missing"))
	}
	if b.Incarnation != "" && b.Incarnation != expected {
		return 0, &IncarnationChanged{Was: expected, Now: clip(b.Incarnation, maxIncarnation)}
	}
	return *b.Sequence, nil
}

// checkpointTimeout is above the manager's 120 s.
const checkpointTimeout = 125 * time.Second

// errCheckpoint is a checkpoint that failed; another one may succeed.
var errCheckpoint = errors.New("the checkpoint failed")

// finished asks whether the checkpoint of a request has ended. Sequence
// numbers begin anew in each process, so that the incarnation goes with the
// question; and because builds exist that ignore it there, the statistics are
// asked before a success is believed.
func (d *Durability) finished(ctx context.Context, expected string, seq uint64) (bool, error) {
	var b struct {
		Success *uint64 `json:"success"`
		Failure *struct {
			Sequence uint64 `json:"sequence_number"`
			Error    string `json:"error"`
		} `json:"failure"`
	}
	cl := call{endpoint: epCheckpointStatus, path: "/checkpoint_status?incarnation_uuid=" + url.QueryEscape(expected), limit: maxSmallBody, timeout: statusTimeout}
	if err := d.c.getJSON(ctx, cl, &b); err != nil {
		return false, err
	}
	if b.Success != nil && *b.Success >= seq {
		s, err := d.c.Stats(ctx)
		if err != nil {
			return false, err
		}
		return true, d.c.sameIncarnation(s.Incarnation)
	}
	if b.Failure != nil && b.Failure.Sequence >= seq {
		return true, fmt.Errorf("%w: %s", errCheckpoint, d.c.excerpt([]byte(b.Failure.Error), maxMessage))
	}
	return false, nil
}
