package feldera

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
)

// A failed checkpoint is asked for again, and does not count as the first of a
// pair.
func TestFailedCheckpoints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var retries []Retry
		seq := -1
		c, _ := newScripted(t, Config{OnRetry: func(r Retry) { retries = append(retries, r) }}, func(_ int, r seen) answer {
			switch {
			case r.path == "/checkpoint":
				seq++
				return answer{status: 200, body: fmt.Sprintf(`{"checkpoint_sequence_number":%d,"incarnation_uuid":"u1"}`, seq)}
			case r.path == "/stats":
				return statsOf("u1", "Running")
			case seq == 0:
				return answer{status: 200, body: `{"success":null,"failure":{"sequence_number":0,"error":"disk full","failed_at":""}}`}
			}
			return answer{status: 200, body: fmt.Sprintf(`{"success":%d,"failure":{"sequence_number":0,"error":"disk full","failed_at":""}}`, seq)}
		})
		c.Expect("u1")
		d := c.NewDurability(DurabilityOptions{})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		got := make(chan Evidence, 1)
		d.Watch(Evidence{Token: tokenNo("orders", 1), Rung: ack.Completed, Step: 5}, func(ev Evidence) { got <- ev })
		go func() { ended <- d.Run(ctx) }()
		if ev := <-got; ev.Err != nil || ev.Rung != ack.Durable || ev.Step != 5 {
			t.Errorf("%+v", ev)
		}
		if seq != 2 || len(retries) != 1 || !errors.Is(retries[0].Err, errCheckpoint) {
			t.Errorf("%d requests, %+v", seq+1, retries)
		}
		// With nothing to prove, nothing is asked for.
		sleep(ctx, time.Hour)
		if seq != 2 {
			t.Errorf("%d requests", seq+1)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// A checkpoint that never ends is asked for anew, with what is known of it;
// nothing is proven by it meanwhile.
func TestCheckpointThatNeverEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var retries []Retry
		seq, forgotten := -1, 0
		start := time.Now()
		c, _ := newScripted(t, Config{OnRetry: func(r Retry) { retries = append(retries, r) }}, func(_ int, r seen) answer {
			switch {
			case r.path == "/checkpoint":
				if seq++; seq == 0 {
					forgotten = seq // no answer about it will ever come
				}
				return answer{status: 200, body: fmt.Sprintf(`{"checkpoint_sequence_number":%d,"incarnation_uuid":"u1"}`, seq)}
			case r.path == "/stats":
				return answer{status: 200, body: `{"global_metrics":{"state":"Running","incarnation_uuid":"u1"},"checkpoint_activity":{"status":"delayed","reasons":["TransactionInProgress"]}}`}
			case seq == forgotten:
				return answer{status: 200, body: `{"success":null,"failure":null}`}
			}
			return answer{status: 200, body: fmt.Sprintf(`{"success":%d,"failure":null}`, seq)}
		})
		c.Expect("u1")
		d := c.NewDurability(DurabilityOptions{})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		got := make(chan Evidence, 1)
		d.Watch(Evidence{Token: tokenNo("orders", 1), Rung: ack.Completed, Step: 5}, func(ev Evidence) { got <- ev })
		go func() { ended <- d.Run(ctx) }()
		if ev := <-got; ev.Err != nil || ev.Rung != ack.Durable {
			t.Errorf("%+v", ev)
		}
		// Number 0 proves nothing; 1 and 2 are the pair.
		if took := time.Since(start); seq != 2 || took < 10*time.Minute || took > 11*time.Minute {
			t.Errorf("%d requests in %s", seq+1, took)
		}
		if len(retries) != 1 || !errors.Is(retries[0].Err, errCheckpoint) || !strings.Contains(retries[0].Err.Error(), "TransactionInProgress") {
			t.Errorf("%+v", retries)
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// Rows of a former incarnation are in no checkpoint of the present one.
func TestDurableOfAnotherIncarnation(t *testing.T) {
	ev := Evidence{Token: tokenNo("orders", 1), Rung: ack.Completed, Step: 5}
	var changed *IncarnationChanged
	if got := proven(ev, "u2"); !errors.As(got.Err, &changed) || changed.Was != "u1" || changed.Now != "u2" {
		t.Errorf("%+v", got)
	}
	if got := proven(ev, "u1"); got.Err != nil || got.Rung != ack.Durable {
		t.Errorf("%+v", got)
	}
}

// A pipeline that is away for a moment says nothing about its checkpoints.
func TestDurabilityAwaits(t *testing.T) {
	for reasons, refuse := range map[string]bool{`[]`: false, `["EnterpriseFeature"]`: true} {
		synctest.Test(t, func(t *testing.T) {
			c, s := newScripted(t, Config{}, func(n int, _ seen) answer {
				if n <= 2 {
					return answer{status: 503, body: `{"message":"m","error_code":"PipelineUnavailable","details":null}`}
				}
				return answer{status: 200, body: `{"global_metrics":{"state":"Running","incarnation_uuid":"u1"},"permanent_checkpoint_errors":` + reasons + `}`}
			})
			err := c.NewDurability(DurabilityOptions{}).Await(t.Context())
			var refused *decode.Refusal
			if errors.As(err, &refused) != refuse || (err != nil) != refuse || len(s.requests("/stats")) != 3 {
				t.Errorf("%s: %v after %d looks", reasons, err, len(s.requests("/stats")))
			}
		})
	}
}

// Two checkpoints are asked for no closer to each other than the client's
// interval, which is 5 s where nobody says otherwise.
func TestCheckpointInterval(t *testing.T) {
	for want, cfg := range map[time.Duration]Config{
		5 * time.Second: {},
		time.Minute:     {CheckpointInterval: time.Minute},
	} {
		synctest.Test(t, func(t *testing.T) {
			var asked []time.Time
			c, _ := newScripted(t, cfg, func(_ int, r seen) answer {
				switch r.path {
				case "/checkpoint":
					asked = append(asked, time.Now())
					return answer{status: 200, body: fmt.Sprintf(`{"checkpoint_sequence_number":%d,"incarnation_uuid":"u1"}`, len(asked))}
				case "/stats":
					return statsOf("u1", "Running")
				}
				return answer{status: 200, body: fmt.Sprintf(`{"success":%d,"failure":null}`, len(asked))}
			})
			c.Expect("u1")
			d := c.NewDurability(DurabilityOptions{})
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			got := make(chan Evidence, 1)
			d.Watch(Evidence{Token: tokenNo("orders", 1), Rung: ack.Completed, Step: 5}, func(ev Evidence) { got <- ev })
			go func() { ended <- d.Run(ctx) }()
			<-got
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			if len(asked) != 2 || asked[1].Sub(asked[0]) != want {
				t.Errorf("asked at %v, want two, %s apart", asked, want)
			}
		})
	}
}
