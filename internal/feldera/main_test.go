package feldera

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// answer is what a scripted pipeline says to one request. A status of 0 is a
// connection that breaks after the request was sent.
type answer struct {
	status int
	body   string
	header map[string]string
	// after holds the answer back; the request's context can end first.
	after time.Duration
	// done is called when the answer goes out. May be nil.
	done func()
	// refused breaks the connection before anything was sent.
	refused bool
}

// scripted is a transport that answers by a function. It needs no sockets, so
// that it works with the fake clock of testing/synctest.
type scripted struct {
	mu    sync.Mutex
	seen  []seen
	reply func(n int, s seen) answer // n counts the requests of one path, from 1
	count map[string]int
}

type seen struct {
	method, path, query, body, auth string
	at                              time.Time
}

func (s *scripted) RoundTrip(req *http.Request) (*http.Response, error) {
	var body []byte
	if req.Body != nil {
		var err error
		if body, err = io.ReadAll(req.Body); err != nil {
			return nil, err
		}
		_ = req.Body.Close()
	}
	s.mu.Lock()
	got := seen{
		req.Method, strings.TrimPrefix(req.URL.Path, "/v0/pipelines/p"), req.URL.RawQuery, string(body),
		req.Header.Get("Authorization"), time.Now(),
	}
	s.seen = append(s.seen, got)
	if s.count == nil {
		s.count = make(map[string]int)
	}
	s.count[got.path]++
	n := s.count[got.path]
	s.mu.Unlock()
	a := s.reply(n, got)
	if a.refused {
		return nil, errors.New("dial tcp: connection refused")
	}
	if trace := httptrace.ContextClientTrace(req.Context()); trace != nil && trace.GotConn != nil {
		trace.GotConn(httptrace.GotConnInfo{})
	}
	if a.after > 0 {
		t := time.NewTimer(a.after)
		defer t.Stop()
		select {
		case <-t.C:
		case <-req.Context().Done():
			return nil, req.Context().Err()
		}
	}
	if a.done != nil {
		a.done()
	}
	if a.status == 0 {
		return nil, errors.New("connection reset by peer")
	}
	h := make(http.Header)
	for k, v := range a.header {
		h.Set(k, v)
	}
	return &http.Response{
		StatusCode: a.status, Header: h, Body: io.NopCloser(bytes.NewReader([]byte(a.body))), Request: req,
	}, nil
}

// paths gives the methods and paths of all requests so far.
func (s *scripted) paths() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for _, r := range s.seen {
		out = append(out, r.method+" "+r.path)
	}
	return out
}

func (s *scripted) requests(path string) []seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []seen
	for _, r := range s.seen {
		if r.path == path {
			out = append(out, r)
		}
	}
	return out
}

// newScripted makes a client of pipeline "p" at a scripted manager.
func newScripted(tb testing.TB, cfg Config, reply func(n int, s seen) answer) (*Client, *scripted) {
	tb.Helper()
	if cfg.URL == "" {
		cfg.URL, cfg.Pipeline = "http://feldera.test", "p"
	}
	c, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	s := &scripted{reply: reply}
	c.http.Transport = s
	return c, s
}

// statsOf is a /stats answer.
func statsOf(incarnation, state string) answer {
	return answer{status: 200, body: `{"global_metrics":{"state":"` + state + `","transaction_status":"NoTransaction","transaction_id":0,` +
		`"transaction_initiators":{"transaction_id":null,"initiated_by_api":null,"initiated_by_connectors":{}},"incarnation_uuid":"` + incarnation + `"}}`}
}
