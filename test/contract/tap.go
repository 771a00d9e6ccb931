package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// passed is one exchange that a tap has seen.
type passed struct {
	began, ended time.Time
	method, path string // path below the upstream's root, without its query
	body         string
	status       int // 0: the upstream gave no answer
}

// tap stands between a client and a server and writes down what passes. spoil,
// where it is set, may change an answer: with it the tap is a server that
// breaks the contract.
type tap struct {
	upstream string
	client   *http.Client
	server   *http.Server
	url      string
	done     sync.WaitGroup
	spoil    func(r *http.Request, status int, body []byte) (int, []byte)

	mu     sync.Mutex
	seen   []passed
	closed bool // no handler begins any more
}

// newTap starts a tap; end stops it and waits for it.
func newTap(ctx context.Context, upstream string, spoil func(*http.Request, int, []byte) (int, []byte)) (t *tap, end func(), err error) {
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	t = &tap{upstream: upstream, client: newHTTP(), url: "http://" + ln.Addr().String(), spoil: spoil}
	t.server = &http.Server{Handler: http.HandlerFunc(t.serve), ReadHeaderTimeout: 10 * time.Second}
	t.done.Go(func() {
		if err := t.server.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			panic(err) // nothing but Close ends it
		}
	})
	return t, func() {
		t.mu.Lock()
		t.closed = true
		t.mu.Unlock()
		_ = t.server.Close() // its connections are of no more use
		t.done.Wait()
		t.client.CloseIdleConnections()
	}, nil
}

func (t *tap) serve(w http.ResponseWriter, r *http.Request) {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		panic(http.ErrAbortHandler)
	}
	t.done.Add(1)
	t.mu.Unlock()
	defer t.done.Done()
	began := time.Now()
	body, err := io.ReadAll(io.LimitReader(r.Body, maxAnswer))
	if err != nil {
		panic(http.ErrAbortHandler) // the client has gone away
	}
	note := passed{began: began, method: r.Method, path: r.URL.Path, body: string(body)}
	req, err := http.NewRequestWithContext(r.Context(), r.Method, t.upstream+r.URL.RequestURI(), bytes.NewReader(body))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	req.Header = r.Header.Clone()
	resp, err := t.client.Do(req)
	if err != nil {
		t.note(note)
		panic(http.ErrAbortHandler)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		t.note(note)
		panic(http.ErrAbortHandler)
	}
	note.status = resp.StatusCode
	if t.spoil != nil {
		note.status, answer = t.spoil(r, note.status, answer)
	}
	t.note(note)
	w.Header().Set("Content-Type", resp.Header.Get("Content-Type"))
	w.WriteHeader(note.status)
	_, _ = w.Write(answer) // the client may be gone
}

func (t *tap) note(p passed) {
	p.ended = time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.seen = append(t.seen, p)
}

// requests gives what went to one call, oldest first: its path ends so.
func (t *tap) requests(suffix string) []passed {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []passed
	for _, s := range t.seen {
		if strings.HasSuffix(s.path, suffix) {
			out = append(out, s)
		}
	}
	slices.SortStableFunc(out, func(a, b passed) int { return a.began.Compare(b.began) })
	return out
}
