package feldera

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/test/felderasim"
)

// piecewise is a transport that sends the bodies of ingress requests piece by
// piece, and calls atEnd, once, when all of a body but its end has gone out.
type piecewise struct {
	http.RoundTripper
	size  int
	atEnd func()
	// meet is where pieces of two requests meet, so that they alternate. nil
	// for a request that is alone.
	meet chan struct{}
}

func (p *piecewise) RoundTrip(r *http.Request) (*http.Response, error) {
	if strings.Contains(r.URL.Path, "/ingress/") {
		r = r.Clone(r.Context())
		r.ContentLength, r.GetBody = -1, nil
		r.Body = &pieces{ReadCloser: r.Body, size: p.size, atEnd: p.atEnd, meet: p.meet}
		p.atEnd = nil
	}
	return p.RoundTripper.RoundTrip(r)
}

type pieces struct {
	io.ReadCloser
	size  int
	atEnd func()
	meet  chan struct{}
}

func (p *pieces) Read(b []byte) (int, error) {
	if p.meet != nil {
		alone := time.NewTimer(time.Millisecond)
		defer alone.Stop()
		select {
		case p.meet <- struct{}{}:
		case <-p.meet:
		case <-alone.C:
		}
	}
	n, err := p.ReadCloser.Read(b[:min(len(b), p.size)])
	if err == io.EOF && p.atEnd != nil {
		p.atEnd()
		p.atEnd = nil
	}
	return n, err
}

// shared makes one more process that writes to the simulator's tables.
func shared(t *testing.T, sim *felderasim.Sim, tr *piecewise, cfg Config) *Client {
	t.Helper()
	cfg.URL, cfg.Pipeline, cfg.Shared = sim.URL(), "p", true
	cfg.BackoffInitial, cfg.BackoffMax = 1, 1
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	tr.RoundTripper = c.http.Transport
	t.Cleanup(c.CloseIdle)
	c.http.Transport = tr
	return c
}

// Another process's request is open when ours comes, and completes the mixture
// of both: it gets the errors, and ours, whose rows went with it, gets a 200.
func TestSimulatedSwallowedBody(t *testing.T) {
	t.Parallel()
	sim, _, s := simulated(t, felderasim.Options{}, Config{})
	tab := table(t, s, "orders")
	const begin, end = `[`, `]`
	var d net.Dialer
	conn, err := d.DialContext(t.Context(), "tcp", strings.TrimPrefix(sim.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	arrived := func(send string, bytes int64) {
		had := sim.Counters().Bytes
		if _, err := io.WriteString(conn, send); err != nil {
			t.Error(err)
		}
		if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Counters().Bytes >= had+bytes }); err != nil {
			t.Error(err)
		}
	}
	arrived(fmt.Sprintf("POST /v0/pipelines/p%s HTTP/1.1\r\nHost: sim\r\nContent-Length: %d\r\n\r\n%s", tab.ingressPath(), len(begin+end), begin), int64(len(begin)))

	a := fill(t, tab, order("1"), order("2"))
	body := int64(a.Bytes())
	var retries []string
	had := sim.Counters().Bytes
	tr := &piecewise{size: 1 << 20, atEnd: func() {
		if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Counters().Bytes == had+body }); err != nil {
			t.Error(err)
		}
		arrived(end, int64(len(end)))
	}}
	c := shared(t, sim, tr, Config{OnRetry: func(r Retry) { retries = append(retries, r.Err.Error()) }})
	if _, err := c.Writer(tab).Send(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Count("orders") == 2 }); err != nil {
		t.Errorf("the rows were accepted and are not there (%v)", err)
	}
	if len(retries) != 1 || !strings.Contains(retries[0], "parse errors meanwhile") {
		t.Errorf("tried again for %q", retries)
	}
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusBadRequest {
		t.Errorf("the other request got %s", answer.Status)
	}
}

// A caller that gives up while its request is under way still gets what came of
// it, the look at the endpoint included.
func TestSharedRequestIsNotCut(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c, s := newScripted(t, Config{Shared: true}, func(_ int, r seen) answer {
		if r.path == "/stats" {
			return statsOf("u1", "Running")
		}
		cancel()
		return accepted("u1", 1)
	})
	tab := ordersTable(true)
	if tok, err := c.Writer(tab).Send(ctx, orderRows(t, tab, "1")); err != nil || tok.Incarnation != "u1" {
		t.Errorf("%+v, %v", tok, err)
	}
	if n := len(s.requests("/stats")); n != 3 {
		t.Errorf("%d looks at /stats, want one for the incarnation, one before and one after", n)
	}
}

// The count of a process that is gone is no measure for the next one: a request
// that was swallowed there must not pass because the numbers are the same.
func TestMixingOfAnotherIncarnation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		incarnation, counts := "u1", []int{3, 3}
		c, s := newScripted(t, Config{Shared: true}, func(_ int, r seen) answer {
			if r.path != "/stats" {
				return accepted(incarnation, 1)
			}
			n := counts[0]
			counts = counts[min(1, len(counts)-1):]
			return answer{status: 200, body: fmt.Sprintf(`{"global_metrics":{"state":"Running","incarnation_uuid":%q},"inputs":[`+
				`{"endpoint_name":"orders.api-ingress-0123456789abcdef","config":{"stream":"orders"},"metrics":{"num_parse_errors":%d}},`+
				`{"endpoint_name":"orders2.api-ingress-0123456789abcdef","config":{"stream":"orders2"},"metrics":{"num_parse_errors":%d}}]}`, incarnation, n, len(counts))}
		})
		c.Expect("u1")
		tab := ordersTable(true)
		for _, now := range []struct {
			incarnation string
			counts      []int
			total       int
		}{
			{"u1", []int{3, 3}, 1},
			{"u1", []int{3}, 2},
			{"u2", []int{0, 3}, 4}, // before, and after: it has grown to what the old one had
			{"u2", []int{3}, 5},
			{"u2", []int{4, 4}, 7},
		} {
			incarnation, counts = now.incarnation, now.counts
			c.Expect(incarnation)
			if _, err := c.Writer(tab).Send(t.Context(), orderRows(t, tab, "1")); err != nil {
				t.Fatal(err)
			}
			if n := len(s.requests("/ingress/orders")); n != now.total {
				t.Errorf("%s, counts %v: %d posts so far, want %d", now.incarnation, now.counts, n, now.total)
			}
		}
	})
}

// Members of a group write to one table at once, their bodies mixed piece by
// piece: no row is lost, none set aside, and none is wrong.
func TestSimulatedMembersMixed(t *testing.T) {
	t.Parallel()
	sim, _, s := simulated(t, felderasim.Options{}, Config{})
	tab := table(t, s, "orders")
	const members, rounds, rows = 3, 12, 4
	total := 0
	var mu sync.Mutex
	mixed, foreign := 0, 0
	never := func() bool { mu.Lock(); defer mu.Unlock(); return mixed+foreign == 0 }
	var wg sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	meet := make(chan struct{})
	for m := range members {
		c := shared(t, sim, &piecewise{size: 40, meet: meet}, Config{OnRetry: func(r Retry) {
			mu.Lock()
			defer mu.Unlock()
			switch e := asError(r.Err); {
			case e != nil && e.blame == blameOther:
				foreign++
			case strings.Contains(r.Err.Error(), "parse errors meanwhile"):
				mixed++
			}
		}})
		wg.Go(func() {
			for round := 0; round < rounds || never() && ctx.Err() == nil; round++ {
				var a Array
				e, err := NewEncoder(tab, tab.Relation(), Policy{})
				if err != nil {
					t.Error(err)
					return
				}
				for row := range rows {
					ch := insertOf(e, fmt.Sprint(1_000_000*m+10*round+row))
					if err := a.Add(e, ch); err != nil {
						t.Error(err)
						return
					}
				}
				_, rejected, err := c.Writer(tab).SendSplit(ctx, &a)
				if err != nil || len(rejected) > 0 {
					t.Errorf("member %d: set aside %+v, %v", m, rejected, err)
					return
				}
				mu.Lock()
				total += rows
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	if err := waitFor(t, sim, func(v felderasim.View) bool { return v.Count("orders") == int64(total) }); err != nil {
		t.Errorf("%d rows of %d are there", sim.Count("orders"), total)
	}
	for _, row := range sim.Rows("orders") {
		if row["note"] != fmt.Sprintf("n%v", row["id"]) {
			t.Errorf("a wrong row: %v", row)
		}
	}
	t.Logf("%d requests were refused for another's bytes, %d were answered with 200 and not believed", foreign, mixed)
	if foreign+mixed == 0 {
		t.Error("nothing was ever mixed")
	}
}

// What others break while nobody is sending must not hold a request back for
// ever: the count is taken anew right before it is sent again.
func TestMixingOfLongAgo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		c, s := newScripted(t, Config{Shared: true, BackoffInitial: time.Second, BackoffMax: time.Second}, func(_ int, r seen) answer {
			if r.path != "/stats" {
				return accepted("u1", 1)
			}
			// A stranger's broken body five times a second.
			return answer{status: 200, body: fmt.Sprintf(`{"global_metrics":{"state":"Running","incarnation_uuid":"u1"},"inputs":[`+
				`{"endpoint_name":"orders.api-ingress-0123456789abcdef","metrics":{"num_parse_errors":%d}}]}`, time.Since(begin)/(200*time.Millisecond))}
		})
		tab := ordersTable(true)
		if _, err := c.Writer(tab).Send(t.Context(), orderRows(t, tab, "1")); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Minute)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := c.Writer(tab).Send(ctx, orderRows(t, tab, "2")); err != nil {
			t.Fatal(err)
		}
		if n := len(s.requests("/ingress/orders")); n > 3 {
			t.Errorf("%d posts", n)
		}
	})
}
