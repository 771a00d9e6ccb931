package feldera

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"holdfast/internal/decode"
)

// progress is a pipeline's view of one endpoint: up to which count the rows
// are ingested and completed.
type progress struct {
	mu                  sync.Mutex
	ingested, completed int
	// fail answers instead, where it is set.
	fail func(n int) *answer
}

func (p *progress) set(ingested, completed int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ingested, p.completed = ingested, completed
}

func (p *progress) reply(n int, r seen) answer {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.path == "/stats" {
		return statsOf("u2", "Running")
	}
	if p.fail != nil {
		if a := p.fail(n); a != nil {
			return *a
		}
	}
	q, _ := url.ParseQuery(r.query)
	for c := 1; c <= 100; c++ {
		if q.Get("token") != rawToken("u1", c) {
			continue
		}
		switch {
		case c <= p.completed:
			return answer{status: 200, body: fmt.Sprintf(`{"status":"complete","step":%d}`, c)}
		case c <= p.ingested:
			return answer{status: 200, body: fmt.Sprintf(`{"status":"inprogress","step":%d}`, c)}
		}
		return answer{status: 200, body: `{"status":"inprogress","step":null}`}
	}
	return answer{status: 400, body: `{"error_code":"InvalidParam","message":"Invalid parameter: invalid completion token: "}`}
}

func tokenNo(lane string, n int) Token {
	return Token{Raw: rawToken("u1", n), Incarnation: "u1", lane: lane, seq: uint64(n)}
}

// watching runs a poller and collects what it says.
type watching struct {
	mu   sync.Mutex
	said []string
}

func (w *watching) note(name string) func(Evidence) {
	return func(ev Evidence) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if ev.Err != nil {
			w.said = append(w.said, name+" "+ev.Err.Error())
			return
		}
		w.said = append(w.said, fmt.Sprintf("%s %s %d", name, ev.Rung, ev.Step))
	}
}

func (w *watching) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.said
	w.said = nil
	return out
}

// wantCanceled waits for the end of Run, which came by its context.
func wantCanceled(t *testing.T, ended <-chan error) {
	t.Helper()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Run ended with %v", err)
	}
}

func TestCompletions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p progress
		c, s := newScripted(t, Config{}, p.reply)
		cs := c.NewCompletions(CompletionsOptions{})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- cs.Run(ctx) }()

		// Nothing outstanding: nothing is asked, however long.
		sleep(ctx, time.Hour)
		if n := len(s.paths()); n != 0 {
			t.Fatalf("%d questions without a token", n)
		}
		var w watching
		for i := 1; i <= 4; i++ {
			cs.Watch(tokenNo("orders", i), w.note(fmt.Sprint(i)))
		}
		expect := func(ingested, completed int, want ...string) {
			t.Helper()
			p.set(ingested, completed)
			sleep(ctx, time.Second)
			if diff := cmp.Diff(want, w.take()); diff != "" {
				t.Error(diff)
			}
		}
		expect(0, 0)
		if n := len(s.paths()); n > 30 {
			t.Errorf("%d questions in the first second: the pause does not grow", n)
		}
		expect(1, 0, "1 ingested 1")
		expect(2, 1, "1 completed 1", "2 ingested 2")
		// The newest token stands for all before it.
		before := len(s.paths())
		expect(4, 4, "2 completed 2", "3 ingested 4", "3 completed 4", "4 ingested 4", "4 completed 4")
		if n := len(s.paths()) - before; n != 1 {
			t.Errorf("%d questions for three tokens of one table", n)
		}
		if n := cs.Outstanding(); n != 0 {
			t.Errorf("%d outstanding", n)
		}
		cancel()
		wantCanceled(t, ended)
	})
}

// A token comes after another one was sent, and is watched before it.
func TestCompletionsInSendingOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p progress
		p.set(1, 1)
		c, _ := newScripted(t, Config{}, p.reply)
		cs := c.NewCompletions(CompletionsOptions{})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		var w watching
		cs.Watch(tokenNo("orders", 2), w.note("2"))
		cs.Watch(tokenNo("orders", 1), w.note("1"))
		go func() { ended <- cs.Run(ctx) }()
		sleep(ctx, time.Second)
		if diff := cmp.Diff([]string{"1 ingested 1", "1 completed 1"}, w.take()); diff != "" {
			t.Error(diff)
		}
		cancel()
		wantCanceled(t, ended)
	})
}

func TestCompletionsAreRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p progress
		p.set(1, 1)
		p.fail = func(n int) *answer {
			switch n {
			case 1:
				return &answer{status: 503, body: `{"error_code":"PipelineInteractionUnreachable"}`}
			case 2:
				return &answer{status: 200, body: `{"status":"complete","step":null}`}
			case 3:
				return &answer{status: 200, body: `{"status":"surprise","step":3}`}
			case 4:
				return &answer{}
			}
			return nil
		}
		var retries []Retry
		c, _ := newScripted(t, Config{OnRetry: func(r Retry) { retries = append(retries, r) }}, p.reply)
		cs := c.NewCompletions(CompletionsOptions{})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		var w watching
		cs.Watch(tokenNo("orders", 1), w.note("1"))
		go func() { ended <- cs.Run(ctx) }()
		sleep(ctx, time.Minute)
		cancel()
		wantCanceled(t, ended)
		if diff := cmp.Diff([]string{"1 ingested 1", "1 completed 1"}, w.take()); diff != "" {
			t.Error(diff)
		}
		if len(retries) != 4 || retries[3].Attempt != 4 || retries[0].What != "read completion" {
			t.Errorf("%+v", retries)
		}
	})
}

func TestCompletionsEndByLoss(t *testing.T) {
	for name, c := range map[string]struct {
		fail answer
		want []string
	}{
		"another incarnation": {
			answer{status: 410, body: `{"error_code":"PipelineRestarted"}`},
			[]string{
				"1 the pipeline's incarnation changed from u1 to u2: accepted rows may be lost",
				"2 the pipeline's incarnation changed from u1 to u2: accepted rows may be lost",
			},
		},
		"a forgotten endpoint": {
			answer{status: 410, body: `{"error_code":"UnknownEndpointInCompletionToken"}`},
			[]string{
				"1 the pipeline's incarnation changed from u1 to u2: accepted rows may be lost",
				"2 the pipeline's incarnation changed from u1 to u2: accepted rows may be lost",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := progress{fail: func(int) *answer { return &c.fail }}
				cl, s := newScripted(t, Config{}, p.reply)
				cs := cl.NewCompletions(CompletionsOptions{})
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error)
				var w watching
				cs.Watch(tokenNo("orders", 1), w.note("1"))
				cs.Watch(tokenNo("orders", 2), w.note("2"))
				go func() { ended <- cs.Run(ctx) }()
				sleep(ctx, time.Minute)
				cancel()
				wantCanceled(t, ended)
				if diff := cmp.Diff(c.want, w.take()); diff != "" {
					t.Error(diff)
				}
				if n := len(s.requests("/completion_status")); n != 1 {
					t.Errorf("asked %d times about what is gone", n)
				}
			})
		})
	}
}

// A token that the pipeline does not understand is its own matter; a key that
// it does not take, everyone's.
func TestCompletionsEndByRefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p progress
		p.set(1, 1)
		c, _ := newScripted(t, Config{}, p.reply)
		cs := c.NewCompletions(CompletionsOptions{})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		var got []Evidence
		cs.Watch(Token{Raw: "nonsense", Incarnation: "u1"}, func(ev Evidence) { got = append(got, ev) })
		var w watching
		cs.Watch(tokenNo("orders", 1), w.note("1"))
		go func() { ended <- cs.Run(ctx) }()
		sleep(ctx, time.Minute)
		var refused *decode.Refusal
		if len(got) != 1 || !errors.As(got[0].Err, &refused) {
			t.Errorf("%+v", got)
		}
		if diff := cmp.Diff([]string{"1 ingested 1", "1 completed 1"}, w.take()); diff != "" {
			t.Error(diff)
		}
		p.mu.Lock()
		p.fail = func(int) *answer { return &answer{status: 403, body: `{"error_code":"InsufficientPermissions"}`} }
		p.mu.Unlock()
		cs.Watch(tokenNo("orders", 2), w.note("2"))
		cs.Watch(tokenNo("items", 3), w.note("3"))
		sleep(ctx, time.Minute)
		if said := w.take(); len(said) != 2 || !strings.Contains(said[0], "role Write") || !strings.HasPrefix(said[1], "3 ") {
			t.Errorf("%v", said)
		}
		cancel()
		wantCanceled(t, ended)
	})
}

// What a token of the new process has reached says nothing about the rows of
// the old one, although they were sent before it: its owner may go on with a
// new incarnation while the old tokens are still watched.
func TestCompletionsOfTwoIncarnations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := newScripted(t, Config{}, func(_ int, r seen) answer {
			switch q, _ := url.ParseQuery(r.query); {
			case r.path == "/stats":
				return statsOf("u2", "Running")
			case q.Get("token") == rawToken("u2", 1):
				return answer{status: 200, body: `{"status":"complete","step":1}`}
			}
			return answer{status: 410, body: `{"error_code":"PipelineRestarted"}`}
		})
		cs := c.NewCompletions(CompletionsOptions{})
		got := make(chan Evidence, 10)
		note := func(ev Evidence) { got <- ev }
		cs.Watch(tokenNo("orders", 1), note)
		cs.Watch(Token{Raw: rawToken("u2", 1), Incarnation: "u2", lane: "orders", seq: 2}, note)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- cs.Run(ctx) }()
		synctest.Wait()
		sleep(ctx, time.Minute)
		cancel()
		wantCanceled(t, ended)
		close(got)
		lost, completed := 0, 0
		for ev := range got {
			var changed *IncarnationChanged
			switch {
			case errors.As(ev.Err, &changed) && ev.Token.Incarnation == "u1":
				lost++
			case ev.Err == nil && ev.Token.Incarnation == "u2":
				completed++ // ingested, and completed
			default:
				t.Errorf("a token of %s: %s, %v", ev.Token.Incarnation, ev.Rung, ev.Err)
			}
		}
		if lost != 1 || completed != 2 {
			t.Errorf("%d lost, %d pieces of evidence", lost, completed)
		}
	})
}
