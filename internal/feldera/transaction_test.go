package feldera

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// The manager sends a start or a commit again by itself, and its second attempt
// may find the pipeline unreachable after the first one has worked.
func TestManagerGivesUpAfterItsFirstAttemptWorked(t *testing.T) {
	for _, code := range []string{"PipelineUnavailable", "PipelineInteractionNotDeployed"} {
		t.Run(code, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				open := false
				unavailable := answer{status: 503, body: `{"message":"m","error_code":"` + code + `","details":null}`}
				c, s := newScripted(t, Config{}, func(n int, r seen) answer {
					switch r.path {
					case "/start_transaction":
						open = true
						if n > 1 {
							return answer{status: 409, body: `{"message":"m","error_code":"TransactionInProgress","details":{}}`}
						}
						return unavailable
					case "/commit_transaction":
						open = false
						if n > 1 {
							t.Error("a second commit")
						}
						return unavailable
					}
					if !open {
						return statsOf("u1", "Running")
					}
					return answer{status: 200, body: `{"global_metrics":{"state":"Running","transaction_status":"TransactionInProgress","transaction_id":7,` +
						`"transaction_initiators":{"transaction_id":7,"initiated_by_api":"Started","initiated_by_connectors":{}},"incarnation_uuid":"u1"}}`}
				})
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
				defer cancel()
				tx, err := c.Begin(ctx, nil, func(context.Context, Intent) error { return nil })
				if err != nil {
					t.Fatal(err)
				}
				if tx.Intent() != (Intent{"u1", 7}) || tx.Resumed() {
					t.Errorf("%+v", tx)
				}
				if err := tx.Commit(ctx, nil); err != nil {
					t.Error(err)
				}
				if n := len(s.requests("/start_transaction")); n != 1 {
					t.Errorf("%d starts", n)
				}
			})
		})
	}
}
