package feldera

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"holdfast/internal/decode"
)

func rawToken(incarnation string, count int) string {
	return base64.RawURLEncoding.EncodeToString([]byte(fmt.Sprintf(`{"u":%q,"e":0,"c":%d}`, incarnation, count)))
}

func accepted(incarnation string, count int) answer {
	return answer{status: 200, body: `{"token":"` + rawToken(incarnation, count) + `"}`}
}

// orderRows gives an array of inserts with the given ids.
func orderRows(t *testing.T, table *Table, ids ...string) *Array {
	t.Helper()
	e, err := NewEncoder(table, table.Relation(), Policy{})
	if err != nil {
		t.Fatal(err)
	}
	a := &Array{}
	for _, id := range ids {
		if err := a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: e.rel, After: []decode.Value{num(id), null, num("1")}}); err != nil {
			t.Fatal(err)
		}
	}
	return a
}

// sent is what came of one Send.
type sent struct {
	tok     Token
	server  *scripted
	took    time.Duration
	retries []Retry
	err     error
}

// send runs one Send against a script and tells how long it took by the fake
// clock.
func send(t *testing.T, reply func(n int, s seen) answer) sent {
	t.Helper()
	var retries []Retry
	c, s := newScripted(t, Config{OnRetry: func(r Retry) { retries = append(retries, r) }}, reply)
	table := ordersTable(true)
	start := time.Now()
	tok, err := c.Writer(table).Send(t.Context(), orderRows(t, table, "1"))
	return sent{tok, s, time.Since(start), retries, err}
}

func TestSendAccepted(t *testing.T) {
	got := send(t, func(_ int, r seen) answer {
		if r.path == "/stats" {
			return statsOf("u1", "Running")
		}
		return accepted("u1", 1)
	})
	if got.err != nil || got.tok.Incarnation != "u1" {
		t.Fatal(got.tok, got.err)
	}
	// The incarnation is known before the first byte goes out.
	if diff := cmp.Diff([]string{"GET /stats", "POST /ingress/orders"}, got.server.paths()); diff != "" {
		t.Error(diff)
	}
	r := got.server.requests("/ingress/orders")[0]
	if r.query != "format=json&update_format=insert_delete&array=true" || r.body != `[{"insert":{"id":1,"note":null,"qty":1}}]` {
		t.Error(r.query, r.body)
	}
}

// What was certainly not applied goes out again at once, with backoff.
func TestSendRetriesWhatWasNotApplied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got := send(t, func(n int, r seen) answer {
			switch {
			case r.path == "/stats":
				return statsOf("u1", "Running")
			case n == 1:
				return answer{status: 503, body: `{"error_code":"Initializing"}`}
			case n == 2:
				return answer{refused: true}
			case n == 3:
				return answer{status: 429, header: map[string]string{"Retry-After": "7"}}
			}
			return accepted("u1", 1)
		})
		if got.err != nil || got.tok.Raw == "" {
			t.Fatal(got.err)
		}
		if got.took < 7*time.Second || got.took > 9*time.Second {
			t.Errorf("took %s", got.took)
		}
		if len(got.retries) != 3 || got.retries[2].Attempt != 3 || got.retries[2].Wait != 7*time.Second || got.retries[0].What != "write table orders" {
			t.Errorf("%+v", got.retries)
		}
		if n := len(got.server.requests("/stats")); n != 1 {
			t.Errorf("%d looks at /stats", n)
		}
	})
}

// An outcome that is not known is settled first: same incarnation, Running,
// and a request lifetime later still so.
func TestSendSettlesUncertainOutcomes(t *testing.T) {
	for name, first := range map[string]answer{
		"connection lost":    {status: 0},
		"time-out":           {after: time.Hour},
		"manager's time-out": {status: 503, body: `{"error_code":"PipelineInteractionUnreachable","message":"timeout (30s) was reached"}`},
		"failed pipeline":    {status: 500, body: `{"error_code":"DbspPanic"}`},
		"a 200 without JSON": {status: 200, body: "<html>"},
		"a 200 cut short":    {status: 200, body: `{"token":"eyJ1`},
		"an unusable token":  {status: 200, body: `{"token":"e30"}`},
		"bad gateway":        {status: 502, body: "<html>bad gateway</html>"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := send(t, func(n int, r seen) answer {
					switch {
					case r.path == "/stats":
						return statsOf("u1", "Running")
					case n == 1:
						return first
					}
					return accepted("u1", 1)
				})
				if got.err != nil {
					t.Fatal(got.err)
				}
				posts := got.server.requests("/ingress/orders")
				if len(posts) != 2 || posts[0].body != posts[1].body {
					t.Fatalf("%d posts", len(posts))
				}
				gap := posts[1].at.Sub(posts[0].at)
				if gap < 30*time.Second || gap > 60*time.Second {
					t.Errorf("sent again after %s", gap)
				}
				if want := []string{"GET /stats", "POST /ingress/orders", "GET /stats", "GET /stats", "POST /ingress/orders"}; cmp.Diff(want, got.server.paths()) != "" {
					t.Error(got.server.paths())
				}
				if len(got.retries) == 0 || got.retries[0].Err == nil {
					t.Error("nothing was reported")
				}
			})
		})
	}
}

// A paused pipeline can apply what it has read of a body when it resumes. So
// the lifetime begins when it is seen Running, and again when it was not at
// the end.
func TestSendWaitsForRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		got := send(t, func(n int, r seen) answer {
			switch {
			case r.path == "/stats" && time.Since(start) > time.Second && time.Since(start) < 100*time.Second:
				return statsOf("u1", "Paused")
			case r.path == "/stats":
				return statsOf("u1", "Running")
			case n == 1:
				return answer{after: time.Hour}
			}
			return accepted("u1", 1)
		})
		if got.err != nil {
			t.Fatal(got.err)
		}
		posts := got.server.requests("/ingress/orders")
		if gap := posts[1].at.Sub(start); gap < 130*time.Second {
			t.Errorf("sent again %s after the start, the pipeline ran from 100s on", gap)
		}
	})
}

func TestSendSeesAnotherIncarnation(t *testing.T) {
	for name, reply := range map[string]func(n int, r seen) answer{
		"in the token": func(_ int, r seen) answer {
			if r.path == "/stats" {
				return statsOf("u1", "Running")
			}
			return accepted("u2", 1)
		},
		"after an uncertain outcome": func(n int, r seen) answer {
			switch {
			case r.path == "/stats" && n == 1:
				return statsOf("u1", "Running")
			case r.path == "/stats":
				return statsOf("u2", "Running")
			}
			return answer{}
		},
		"during the lifetime": func(n int, r seen) answer {
			switch {
			case r.path == "/stats" && n <= 2:
				return statsOf("u1", "Running")
			case r.path == "/stats":
				return statsOf("u2", "Running")
			}
			return answer{}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := send(t, reply)
				var changed *IncarnationChanged
				if !errors.As(got.err, &changed) || changed.Was != "u1" || changed.Now != "u2" {
					t.Errorf("got %v", got.err)
				}
				if n := len(got.server.requests("/ingress/orders")); n != 1 {
					t.Errorf("%d posts", n)
				}
			})
		})
	}
}

func TestSendRefusals(t *testing.T) {
	for _, c := range []struct {
		name   string
		a      answer
		reason decode.Reason
		parts  []string
	}{
		{"a bad row", parseErrorsOf(`{"id":1,"note":null,"qty":1}`), decode.ReasonRejected, []string{"table orders", `column "qty"`, `{"id":1,`, "error parsing field"}},
		{"no such table", answer{status: 404, body: `{"error_code":"ConfigError.UnknownInputStream"}`}, decode.ReasonSchema, []string{"no such table"}},
		{"a bad key", answer{status: 401, body: `{"error_code":"AuthenticationFailed"}`}, decode.ReasonSetup, []string{"API key"}},
		{"a weak key", answer{status: 403, body: `{"error_code":"InsufficientPermissions"}`}, decode.ReasonSetup, []string{"role Write"}},
		{"a proxy's limit", answer{status: 413, body: "<html>"}, decode.ReasonLimit, []string{"batch size"}},
		{"no such pipeline", answer{status: 404, body: `{"error_code":"UnknownPipelineName"}`}, decode.ReasonSetup, []string{"no such pipeline", `"p"`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := send(t, func(_ int, r seen) answer {
				if r.path == "/stats" {
					return statsOf("u1", "Running")
				}
				return c.a
			})
			var refused *decode.Refusal
			if !errors.As(got.err, &refused) || refused.Reason != c.reason {
				t.Fatalf("got %v", got.err)
			}
			for _, part := range c.parts {
				if !strings.Contains(refused.Error(), part) {
					t.Errorf("%q is not in: %v", part, refused)
				}
			}
		})
	}
}

// A refusal that comes while an outcome is awaited says that it is open: the
// next owner of the rows has to wait for the request.
func TestRefusalOfAnUnsettledRequest(t *testing.T) {
	for name, c := range map[string]struct {
		lost bool
		open bool
	}{"the answer was lost": {true, true}, "the answer was a refusal": {false, false}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				weak := answer{status: 401, body: `{"error_code":"AuthenticationFailed"}`}
				looks := 0
				got := send(t, func(_ int, r seen) answer {
					switch {
					case r.path == "/stats":
						if looks++; looks > 1 {
							return weak
						}
						return statsOf("u1", "Running")
					case c.lost:
						return answer{status: 502, body: "<html>bad gateway</html>"}
					}
					return weak
				})
				var refused *decode.Refusal
				if !errors.As(got.err, &refused) || refused.Reason != decode.ReasonSetup {
					t.Fatalf("got %v", got.err)
				}
				if errors.Is(got.err, ErrOutcomeOpen) != c.open {
					t.Errorf("open %v: %v", !c.open, got.err)
				}
			})
		})
	}
}

// The end of the context counts between attempts, and the last reason is kept.
func TestSendEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stop := errors.New("told to stop")
		ctx, cancel := context.WithCancelCause(t.Context())
		c, s := newScripted(t, Config{}, func(n int, r seen) answer {
			if r.path == "/stats" {
				return statsOf("u1", "Running")
			}
			if n == 2 {
				cancel(stop) // while the request is out: it is not cut
				return answer{status: 503, after: 3 * time.Second, body: `{"error_code":"Suspended"}`}
			}
			return answer{status: 503, body: `{"error_code":"Suspended"}`}
		})
		table := ordersTable(true)
		start := time.Now()
		_, err := c.Writer(table).Send(ctx, orderRows(t, table, "1"))
		if !errors.Is(err, stop) || !strings.Contains(err.Error(), "Suspended") {
			t.Errorf("got %v", err)
		}
		if took := time.Since(start); took < 3*time.Second || len(s.requests("/ingress/orders")) != 2 {
			t.Errorf("took %s, %v", took, s.paths())
		}
	})
}

// A Send that ended before its request was settled leaves that to the next
// one: newer rows must not be overtaken by what may still be applied.
func TestNextSendSettlesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := newScripted(t, Config{}, func(n int, r seen) answer {
			switch {
			case r.path == "/stats":
				return statsOf("u1", "Running")
			case n == 1:
				return answer{}
			}
			return accepted("u1", n)
		})
		table := ordersTable(true)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.Writer(table).Send(ctx, orderRows(t, table, "1")); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		for _, id := range []string{"2", "3"} {
			if _, err := c.Writer(table).Send(t.Context(), orderRows(t, table, id)); err != nil {
				t.Fatal(err)
			}
		}
		posts := s.requests("/ingress/orders")
		if len(posts) != 3 {
			t.Fatalf("%d posts", len(posts))
		}
		if first, second := posts[1].at.Sub(posts[0].at), posts[2].at.Sub(posts[1].at); first < 30*time.Second || second != 0 {
			t.Errorf("gaps %s and %s", first, second)
		}
	})
}

// One request a table at a time, also over two writers of one table.
func TestOneRequestInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var inFlight, most atomic.Int32
		c, s := newScripted(t, Config{}, nil)
		c.Expect("u1")
		s.reply = func(int, seen) answer {
			if n := inFlight.Add(1); n > most.Load() {
				most.Store(n)
			}
			return answer{status: 200, body: accepted("u1", 1).body, after: time.Second, done: func() { inFlight.Add(-1) }}
		}
		done := make(chan error)
		for range 8 {
			table := ordersTable(true)
			go func() {
				_, err := c.Writer(table).Send(t.Context(), &Array{})
				done <- err
			}()
		}
		for range 8 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if most.Load() != 1 {
			t.Errorf("%d requests at once", most.Load())
		}
	})
}

// Bisecting finds exactly the bad rows, and applies the good ones in order.
func TestSendSplit(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 40).Draw(rt, "rows")
		var bad []int
		ids := make([]string, n)
		for i := range ids {
			ids[i] = fmt.Sprint(100 + i)
			if rapid.IntRange(0, 5).Draw(rt, "bad") == 0 {
				bad = append(bad, i)
			}
		}
		var applied []string
		c, _ := newScripted(t, Config{}, func(_ int, r seen) answer {
			if r.path == "/stats" {
				return statsOf("u1", "Running")
			}
			if err := validJSON([]byte(r.body)); err != nil {
				rt.Fatal(err)
			}
			var refused []string
			for _, i := range bad {
				if strings.Contains(r.body, `"id":`+ids[i]+`,`) {
					refused = append(refused, `{"id":`+ids[i]+`,"note":null,"qty":1}`)
				}
			}
			if len(refused) > 0 {
				return parseErrorsOf(refused...)
			}
			for _, id := range ids {
				if strings.Contains(r.body, `"id":`+id+`,`) {
					applied = append(applied, id)
				}
			}
			return accepted("u1", len(applied))
		})
		table := ordersTable(true)
		_, rejected, err := c.Writer(table).SendSplit(t.Context(), orderRows(t, table, ids...))
		if err != nil {
			rt.Fatal(err)
		}
		var good []string
		var found []int
		for _, r := range rejected {
			found = append(found, r.Index)
		}
		for i, id := range ids {
			if !slices.Contains(bad, i) {
				good = append(good, id)
			}
		}
		if diff := cmp.Diff(bad, found); diff != "" {
			rt.Fatal(diff)
		}
		if diff := cmp.Diff(good, applied); diff != "" {
			rt.Fatal(diff)
		}
	})
}

// A request of unknown outcome can reach the next process too, by way of a
// manager that is still connecting: what is sent there begins with older rows
// again and must not be overtaken by it.
func TestNewIncarnationSettlesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		incarnation := "u1"
		var lost time.Time
		c, s := newScripted(t, Config{}, func(n int, r seen) answer {
			switch {
			case r.path == "/stats":
				return statsOf(incarnation, "Running")
			case n == 1:
				incarnation, lost = "u2", time.Now()
				return answer{}
			}
			return accepted("u2", 1)
		})
		tab := ordersTable(true)
		var changed *IncarnationChanged
		if _, err := c.Writer(tab).Send(t.Context(), orderRows(t, tab, "2")); !errors.As(err, &changed) {
			t.Fatal(err)
		}
		c.Expect("u2")
		for _, id := range []string{"1", "2"} {
			if _, err := c.Writer(tab).Send(t.Context(), orderRows(t, tab, id)); err != nil {
				t.Fatal(err)
			}
		}
		posts := s.requests("/ingress/orders")
		if gap := posts[1].at.Sub(lost); gap < 30*time.Second {
			t.Errorf("sent %s after a request that may still be applied", gap)
		}
		if gap := posts[2].at.Sub(posts[1].at); gap > time.Second {
			t.Errorf("waited %s although the outcome was known", gap)
		}
	})
}

// Rows that belong in a transaction of one process do not go out to the one that
// comes after it: where that process was not heard of a moment ago, or refused the
// last attempt, it is looked at first.
func TestSendOnlyMeetsNoOtherProcess(t *testing.T) {
	for name, c := range map[string]struct {
		idle    time.Duration // since it was heard of
		slow    time.Duration // how long that answer took to be read
		refuses bool          // the first attempt
		next    string        // who answers then
		posts   int
		looks   int
	}{
		"heard of a moment ago":        {idle: time.Millisecond, next: "u1", posts: 1},
		"heard of long ago":            {idle: time.Second, next: "u1", posts: 1, looks: 1},
		"replaced meanwhile":           {idle: time.Second, next: "u2", looks: 1},
		"refuses once":                 {refuses: true, next: "u1", posts: 2, looks: 1},
		"refuses, and is replaced":     {refuses: true, next: "u2", posts: 1, looks: 1},
		"an old answer, and replaced":  {slow: time.Second, idle: time.Millisecond, next: "u2", looks: 1},
		"replaced between two answers": {idle: time.Millisecond, next: "u2", posts: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				now := "u1"
				cl, s := newScripted(t, Config{}, func(n int, r seen) answer {
					switch {
					case r.path == "/stats":
						if n == 1 {
							time.Sleep(c.slow) //nolint:forbidigo // of the fake clock
						}
						return statsOf(now, "Running")
					case c.refuses && n == 1:
						now = c.next
						return answer{refused: true}
					}
					return accepted(now, 1)
				})
				if _, err := cl.Incarnation(t.Context()); err != nil {
					t.Fatal(err)
				}
				time.Sleep(c.idle) //nolint:forbidigo // of the fake clock
				if !c.refuses {
					now = c.next
				}
				table := ordersTable(true)
				_, err := cl.Writer(table).SendOnly(t.Context(), orderRows(t, table, "1"), "u1")
				changed, gone := errors.AsType[*IncarnationChanged](err)
				if gone != (c.next != "u1") || (gone && changed.Now != "u2") || (!gone && err != nil) {
					t.Errorf("it ends with %v", err)
				}
				if posts, looks := len(s.requests("/ingress/orders")), len(s.requests("/stats"))-1; posts != c.posts || looks != c.looks {
					t.Errorf("%d requests and %d looks", posts, looks)
				}
			})
		})
	}
}
