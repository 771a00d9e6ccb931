package feldera

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
)

// What the pipeline refuses is named by its place in the array and by its key,
// also in a part of the array; where the answer has no text, no place is made up.
func TestSendRowsNamesTheRow(t *testing.T) {
	sim, c, s := simulated(t, felderasim.Options{}, Config{})
	tab := table(t, s, "orders")
	for _, silent := range []bool{false, true} {
		if _, err := sim.Inject(felderasim.Fault{Kind: felderasim.RefuseRow, Match: "n12", Silent: silent, Count: -1}); err != nil {
			t.Fatal(err)
		}
		a := fill(t, tab, order("10"), order("11"), order("12"), order("13"))
		for _, part := range []struct{ lo, hi, want int }{{0, 4, 2}, {1, 4, 2}, {2, 3, 2}, {0, 3, 2}} {
			_, err := c.Writer(tab).SendRows(t.Context(), a, part.lo, part.hi, "")
			refused, ok := errors.AsType[*ArrayRefusedError](err)
			if !ok || refused.Refusal.Reason != decode.ReasonRejected {
				t.Fatalf("%v", err)
			}
			want := part.want
			if silent {
				want = -1
			}
			if refused.Index != want {
				t.Errorf("silent %t, rows %d to %d: row %d is named, want %d", silent, part.lo, part.hi, refused.Index, want)
			}
		}
		if got := a.Key(2); got != "id=12" {
			t.Errorf("key %q", got)
		}
		if got := a.Key(99); got != "unknown" {
			t.Errorf("key of no row %q", got)
		}
		before := sim.Counters().Records
		if _, err := c.Writer(tab).SendRows(t.Context(), a, 0, 2, ""); err != nil {
			t.Fatal(err)
		}
		if n := sim.Counters().Records - before; n != 2 {
			t.Errorf("%d rows", n)
		}
		sim.ClearFault("")
	}
}

func TestKeyOfARow(t *testing.T) {
	for keyed, want := range map[bool]string{true: "id=7", false: "number 1 of the request, of a table without a key"} {
		if got := orderRows(t, ordersTable(keyed), "7").Key(0); got != want {
			t.Errorf("keyed %t: %q", keyed, got)
		}
	}
}

// A request that is never answered is to blame only where the pipeline runs, at
// once and all the time, and answers another request to the same table. Every
// outage is waited for.
func TestUnansweredIsNoOutage(t *testing.T) {
	never := answer{after: time.Hour}
	for name, tc := range map[string]struct {
		state func(n int) answer
		empty answer
		gives bool
	}{
		"at fault":                  {func(int) answer { return statsOf("u1", "Running") }, accepted("u1", 1), true},
		"at fault, splitter unwell": {func(int) answer { return statsOf("u1", "Running") }, answer{status: 400, body: `{"error_code":"ParseErrors"}`}, true},
		"nothing is answered":       {func(int) answer { return statsOf("u1", "Running") }, never, false},
		"nothing is taken":          {func(int) answer { return statsOf("u1", "Running") }, answer{status: 503, body: `{"error_code":"Initializing"}`}, false},
		// The first look is before the first request, then there are two for each.
		"paused now and then": {func(n int) answer { return statsOf("u1", []string{"Running", "Paused"}[n%3/2]) }, accepted("u1", 1), false},
		"away now and then":   {func(n int) answer { return []answer{statsOf("u1", "Running"), {refused: true}}[n%3/2] }, accepted("u1", 1), false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const limit, most = 3, 12
				empties := 0
				bodies := 0
				c, _ := newScripted(t, Config{UnansweredLimit: limit}, func(n int, s seen) answer {
					switch {
					case s.path == "/stats":
						return tc.state(n - 1)
					case s.body == "[]":
						empties++
						return tc.empty
					}
					if bodies++; bodies > most {
						return accepted("u1", 1) // the outage is over
					}
					return never
				})
				tab := ordersTable(true)
				a := orderRows(t, tab, "1", "2")
				_, err := c.Writer(tab).SendRows(t.Context(), a, 0, 2, "")
				stuck, gave := errors.AsType[*UnansweredError](err)
				switch {
				case gave != tc.gives:
					t.Fatalf("%v after %d requests", err, bodies)
				case gave && (stuck.Times != limit || bodies != limit || empties != 1 || !strings.Contains(err.Error(), "3 requests")):
					t.Errorf("%+v, %d requests, %d empty ones", stuck, bodies, empties)
				case !gave && (err != nil || bodies != most+1):
					t.Errorf("%v after %d requests", err, bodies)
				}
				// Send itself never gives up.
				bodies = 0
				if _, err := c.Writer(tab).Send(t.Context(), a); err != nil || bodies != most+1 {
					t.Errorf("Send: %v after %d requests", err, bodies)
				}
			})
		})
	}
}
