package feldera

import (
	"context"
	"errors"
	"fmt"
	"strings"
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

// transactionOf is an answer of /stats: the engine's transaction, and the one
// that was asked for over HTTP.
func transactionOf(status string, engine int64, phase string, asked int64) answer {
	return answer{status: 200, body: fmt.Sprintf(`{"global_metrics":{"state":"Running","transaction_status":%q,"transaction_id":%d,`+
		`"transaction_initiators":{"transaction_id":%d,"initiated_by_api":%q,"initiated_by_connectors":{}},"incarnation_uuid":"u1"}}`, status, engine, asked, phase)}
}

// A commit that was accepted begins with the pipeline's next step. Until then
// nothing is asked for: it could take the commit's place.
func TestBeginWaitsUntilTheCommitBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks := 0
		c, s := newScripted(t, Config{}, func(_ int, r seen) answer {
			switch {
			case r.path == "/start_transaction" && looks > 150:
				return answer{status: 200, body: `{"transaction_id":577}`}
			case r.path == "/start_transaction":
				t.Errorf("asked for after %d looks, while the commit before had not begun", looks)
			}
			if looks++; looks <= 150 { // more than one turn of looks
				return transactionOf("TransactionInProgress", 576, "Committed", 576)
			}
			return statsOf("u1", "Running")
		})
		c.Expect("u1")
		tx, err := c.Begin(t.Context(), nil, func(context.Context, Intent) error { return nil })
		if err != nil || tx.Intent() != (Intent{"u1", 577}) || len(s.requests("/start_transaction")) != 1 {
			t.Errorf("%+v, %v", tx, err)
		}
	})
}

// The process that was looked at ends, and the one after it answers the request:
// its transaction is on record before a row can be in it. What it does not have
// open was begun in the one before, and ended with that.
func TestBeginIsAnsweredByTheProcessAfter(t *testing.T) {
	for name, c := range map[string]struct {
		after answer
		last  Intent
	}{
		"it is open there":       {transactionOf("NoTransaction", 1, "Started", 1), Intent{"u2", 1}},
		"behind another commit":  {transactionOf("CommitInProgress", 3, "Started", 1), Intent{"u2", 1}},
		"another one is open":    {transactionOf("TransactionInProgress", 2, "Started", 2), Intent{"u1", 0}},
		"nothing is open there":  {statsOf("u1", "Running"), Intent{"u1", 0}},
		"it is committed though": {transactionOf("TransactionInProgress", 1, "Committed", 1), Intent{"u1", 0}},
	} {
		t.Run(name, func(t *testing.T) {
			c.after.body = strings.Replace(c.after.body, `"u1"`, `"u2"`, 1)
			begun := false
			cl, _ := newScripted(t, Config{}, func(_ int, r seen) answer {
				switch {
				case r.path == "/start_transaction":
					begun = true
					return answer{status: 200, body: `{"transaction_id":1}`}
				case begun:
					return c.after
				}
				return statsOf("u1", "Running")
			})
			cl.Expect("u1")
			var last Intent
			tx, err := cl.Begin(t.Context(), nil, func(_ context.Context, in Intent) error { last = in; return nil })
			var changed *IncarnationChanged
			if tx != nil || !errors.As(err, &changed) || changed.Was != "u1" || changed.Now != "u2" || last != c.last {
				t.Errorf("%+v, %v, on record %+v, want %+v", tx, err, last, c.last)
			}
		})
	}
}

// What an intent says of the transaction that is open.
func TestIntentMatches(t *testing.T) {
	for name, c := range map[string]struct {
		intent *Intent
		state  answer
		ours   bool
	}{
		"the same":                                           {&Intent{"u1", 7}, transactionOf("TransactionInProgress", 7, "Started", 7), true},
		"the same, while the one before commits":             {&Intent{"u1", 7}, transactionOf("CommitInProgress", 6, "Started", 7), true},
		"another number":                                     {&Intent{"u1", 6}, transactionOf("TransactionInProgress", 7, "Started", 7), false},
		"another incarnation":                                {&Intent{"u0", 7}, transactionOf("TransactionInProgress", 7, "Started", 7), false},
		"no number, without data":                            {&Intent{"u1", 0}, transactionOf("NoTransaction", 7, "Started", 7), true},
		"no number, while the one before commits":            {&Intent{"u1", 0}, transactionOf("CommitInProgress", 6, "Started", 7), true},
		"no number, with data":                               {&Intent{"u1", 0}, transactionOf("TransactionInProgress", 7, "Started", 7), false},
		"no number, of another incarnation, without data":    {&Intent{"u0", 0}, transactionOf("NoTransaction", 1, "Started", 1), true},
		"no number, of another incarnation, with data":       {&Intent{"u0", 0}, transactionOf("TransactionInProgress", 1, "Started", 1), false},
		"nothing on record":                                  {&Intent{}, transactionOf("NoTransaction", 1, "Started", 1), false},
		"the same, whose commit has not begun, is no longer": {&Intent{"u1", 7}, transactionOf("TransactionInProgress", 7, "Committed", 7), false},
	} {
		t.Run(name, func(t *testing.T) {
			cl, _ := newScripted(t, Config{}, func(int, seen) answer { return c.state })
			cl.Expect("u1")
			tx, err := cl.Resume(t.Context(), *c.intent)
			if err != nil || (tx != nil) != c.ours {
				t.Errorf("%+v, %v", tx, err)
			}
		})
	}
}
