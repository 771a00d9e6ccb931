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

// A request to commit without an answer may still come, and would commit the
// next transaction in the middle. It is outlived in front of a pipeline that
// answers at the beginning and at the end of its lifetime, whichever process that
// is; a call that ends before says that it has not been.
func TestCommitIsOutlived(t *testing.T) {
	const life = time.Minute
	open := transactionOf("TransactionInProgress", 7, "Started", 7)
	none := statsOf("u1", "Running")
	cases := map[string]struct {
		commit answer
		// look gives the answer to a look, by the time since the request; before it
		// the transaction is open.
		look  func(since time.Duration) answer
		gives time.Duration // up: the caller's patience
		// what is wanted
		ends     string // a part of the error, "" for none
		open     bool
		took     time.Duration // at least
		requests int
	}{
		"it was applied": {
			look: func(time.Duration) answer { return none },
			took: life, requests: 1,
		},
		"it was not, and is repeated": {
			look: func(since time.Duration) answer {
				if since < 2*life {
					return open
				}
				return none
			},
			took: 2 * life, requests: 2,
		},
		"the pipeline stands still in between": {
			look: func(since time.Duration) answer {
				if since > life/2 && since < 3*life {
					return answer{refused: true}
				}
				return none
			},
			took: 4 * life, requests: 1,
		},
		"another process answers": {
			look: func(time.Duration) answer { return statsOf("u2", "Running") },
			ends: "incarnation changed from u1 to u2", took: life, requests: 1,
		},
		"the caller ends before": {
			look:  func(time.Duration) answer { return open },
			gives: life / 2, ends: "may still be applied", open: true, requests: 1,
		},
		"the key is withdrawn meanwhile": {
			look: func(time.Duration) answer {
				return answer{status: 401, body: `{"message":"m","error_code":"Unauthorized","details":{}}`}
			},
			ends: "may still be applied", open: true, requests: 1,
		},
		"nothing was sent, and another process has another one open": {
			commit: answer{refused: true},
			look: func(time.Duration) answer {
				other := transactionOf("TransactionInProgress", 7, "Started", 7)
				other.body = strings.Replace(other.body, `"u1"`, `"u2"`, 1)
				return other
			},
			ends: "incarnation changed from u1 to u2", requests: 1,
		},
		"nothing was sent, and somebody else has committed it": {
			commit: answer{refused: true}, look: func(time.Duration) answer { return none }, requests: 1,
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var asked time.Time
				cl, s := newScripted(t, Config{RequestLifetime: life}, func(_ int, r seen) answer {
					switch {
					case r.path == "/commit_transaction":
						if asked.IsZero() {
							asked = time.Now()
						}
						return c.commit
					case asked.IsZero():
						return open
					}
					return c.look(time.Since(asked))
				})
				cl.Expect("u1")
				ctx := t.Context()
				if c.gives > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.gives)
					defer cancel()
				}
				tx, err := cl.Resume(ctx, Intent{"u1", 7})
				if err != nil || tx == nil {
					t.Fatal(tx, err)
				}
				err = tx.Commit(ctx, nil)
				if (err == nil) != (c.ends == "") || (err != nil && !strings.Contains(err.Error(), c.ends)) || errors.Is(err, ErrOutcomeOpen) != c.open {
					t.Errorf("it ends with %v", err)
				}
				if took := time.Since(asked); took < c.took {
					t.Errorf("it ends %v behind the request, and not after %v", took, c.took)
				}
				if n := len(s.requests("/commit_transaction")); n != c.requests {
					t.Errorf("%d requests to commit", n)
				}
			})
		})
	}
}

// A request to begin without an answer opens a transaction late, behind the look
// that was to find it: it is taken for ours for as long as it has no data.
func TestBeginFindsWhatComesLate(t *testing.T) {
	for name, c := range map[string]struct {
		late answer
		last Intent
		open bool // what it gives in the end is no transaction
	}{
		"without data":                 {transactionOf("NoTransaction", 7, "Started", 7), Intent{"u1", 7}, false},
		"while the one before commits": {transactionOf("CommitInProgress", 6, "Started", 7), Intent{"u1", 7}, false},
		"with data of others":          {transactionOf("TransactionInProgress", 7, "Started", 7), Intent{"u1", 0}, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				looks := 0
				cl, s := newScripted(t, Config{}, func(_ int, r seen) answer {
					if r.path == "/start_transaction" {
						looks = 100
						return answer{}
					}
					if looks++; looks > 102 { // one look when it is sent, one when its time is over
						return c.late
					}
					return statsOf("u1", "Running")
				})
				cl.Expect("u1")
				var last Intent
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				tx, err := cl.Begin(ctx, &Intent{"u1", 5}, func(_ context.Context, in Intent) error { last = in; return nil })
				if last != c.last || (tx == nil) != c.open {
					t.Errorf("%+v, %v, on record %+v", tx, err, last)
				}
				if tx != nil && (tx.Intent() != c.last || tx.Resumed()) {
					t.Errorf("%+v, and nothing of ours is in it", tx)
				}
				if n := len(s.requests("/start_transaction")); n != 1 {
					t.Errorf("%d requests to begin", n)
				}
			})
		})
	}
}

// What Begin gives back says whether its request may still open a transaction.
func TestBeginSaysWhatIsOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl, _ := newScripted(t, Config{}, func(_ int, r seen) answer {
			if r.path == "/start_transaction" {
				return answer{}
			}
			return statsOf("u1", "Running")
		})
		cl.Expect("u1")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := cl.Begin(ctx, nil, func(context.Context, Intent) error { return nil }); !errors.Is(err, ErrOutcomeOpen) {
			t.Errorf("it ends with %v", err)
		}
		broken := errors.New("no disk")
		if _, err := cl.Begin(t.Context(), nil, func(context.Context, Intent) error { return broken }); !errors.Is(err, broken) || errors.Is(err, ErrOutcomeOpen) {
			t.Errorf("it ends with %v", err)
		}
	})
}
