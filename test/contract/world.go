package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/go-json-experiment/json"

	"holdfast/test/felderasim"
)

// target is the real pipeline to hold to the contract; url "" means the
// simulator.
type target struct {
	url, pipeline, bareURL, key, readOnlyKey string
	allow                                    need
}

// world is one pipeline and the ways to it.
type world struct {
	has need
	// base is what the calls of the pipeline are below, at the manager or at
	// the process; root is the manager's address, "" where there is none.
	base, root string
	// pipeline is the name at the manager, "" where there is none.
	pipeline string
	// bare is the process's address, "" where it cannot be reached.
	bare string
	// address is what the client under test is given together with pipeline.
	address          string
	key, readOnlyKey string
	// sim is nil for a real target.
	sim *felderasim.Sim
	// passing: it is one clause's alone and ends with it, so that nothing has
	// to be put back.
	passing bool
	end     func()
	http    *http.Client
	// patience bounds every wait for something that must come.
	patience time.Duration
}

// The simulator's keys. They are as long as real ones.
const simPipeline = "p"

func simKey(letter string) string { return "apikey:" + strings.Repeat(letter, 128) }

// maxAnswer bounds every body that is read.
const maxAnswer = 64 << 20

func newHTTP() *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			Proxy: http.ProxyFromEnvironment, DisableCompression: true, MaxIdleConnsPerHost: 16,
			IdleConnTimeout: 10 * time.Second, MaxResponseHeaderBytes: 64 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// simulate starts a simulator, with front between it and the clauses where
// that is not nil.
func simulate(ctx context.Context, alter func(*felderasim.Options), front func(string) (string, func())) (*world, error) {
	opts := felderasim.Options{SQL: programSQL, Pipeline: simPipeline, APIKey: simKey("k"), ReadOnlyKey: simKey("r")}
	if alter != nil {
		alter(&opts)
	}
	sim, err := felderasim.New(opts)
	if err != nil {
		return nil, err
	}
	if err := sim.Start(ctx); err != nil {
		return nil, errors.Join(err, sim.Close())
	}
	w := &world{
		has:  needFaults | needExclusive | needRestart | needManager | needBare | needAuth | needReadOnly,
		root: sim.URL(), bare: sim.BareURL(), pipeline: opts.Pipeline,
		key: opts.APIKey, readOnlyKey: opts.ReadOnlyKey, sim: sim, http: newHTTP(), patience: 20 * time.Second,
	}
	end := func() {}
	if front != nil {
		w.root, end = front(sim.URL())
	}
	w.end = func() {
		end()
		_ = sim.Close() // it was only cut off from its clients
	}
	w.has |= needOpenSource
	if opts.Edition == felderasim.Enterprise {
		w.has ^= needOpenSource | needEnterprise
	}
	w.address = w.root
	w.base = w.root + "/v0/pipelines/" + opts.Pipeline
	return w, nil
}

// reach looks at a real target: it must answer, run the program, and it says
// what can be asked of it.
func reach(ctx context.Context, t target) (*world, error) {
	w := &world{
		has: t.allow, address: strings.TrimRight(t.url, "/"), pipeline: t.pipeline, bare: strings.TrimRight(t.bareURL, "/"),
		key: t.key, readOnlyKey: t.readOnlyKey, http: newHTTP(), end: func() {}, patience: time.Minute,
	}
	w.base = w.address
	if t.pipeline == "" {
		w.bare = w.address
	} else {
		w.root = w.address
		w.base = w.root + "/v0/pipelines/" + url.PathEscape(t.pipeline)
		w.has |= needManager
	}
	if w.bare != "" {
		w.has |= needBare
	}
	if t.key != "" && w.root != "" {
		w.has |= needAuth
	}
	if t.readOnlyKey != "" && w.root != "" {
		w.has |= needReadOnly
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var s stats
	if err := w.get(ctx, w.base+"/stats", &s); err != nil {
		return nil, fmt.Errorf("ask the pipeline for its statistics: %w", err)
	}
	if s.Global.State != "Running" {
		return nil, fmt.Errorf("the pipeline is %s, expected Running", s.Global.State)
	}
	if len(s.PermanentCheckpoint) == 0 {
		w.has |= needEnterprise
	}
	if w.root != "" {
		var cfg struct {
			Edition string `json:"edition"`
		}
		if err := w.get(ctx, w.root+"/v0/config", &cfg); err != nil {
			return nil, fmt.Errorf("ask the manager for its edition: %w", err)
		}
		if cfg.Edition == "Open source" {
			w.has |= needOpenSource
		}
		var p struct {
			Info struct {
				Schema schemaJSON `json:"schema"`
			} `json:"program_info"`
		}
		if err := w.get(ctx, w.base, &p); err != nil {
			return nil, fmt.Errorf("read the pipeline's program: %w", err)
		}
		if _, ok := p.Info.Schema.input("hfc_types"); !ok {
			return nil, errors.New("the pipeline has no table hfc_types; it must run the program of: make contract-sql")
		}
	}
	return w, nil
}

func (w *world) close() {
	w.http.CloseIdleConnections()
	w.end()
}

// get reads a JSON answer before there is a clause to fail.
func (w *world) get(ctx context.Context, address string, into any) error {
	status, _, body, err := w.exchange(ctx, http.MethodGet, address, w.key, nil, nil)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return fmt.Errorf("HTTP %d %s", status, clip(body))
	}
	return json.Unmarshal(body, into)
}

// exchange sends one request and reads the whole answer.
func (w *world) exchange(ctx context.Context, method, address, key string, header http.Header, body io.Reader) (int, http.Header, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, address, body)
	if err != nil {
		return 0, nil, nil, errors.New("the address cannot be used in a request")
	}
	for k, v := range header {
		req.Header[k] = v
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := w.http.Do(req)
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err // without the address
		}
		return 0, nil, nil, err
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	if _, err := b.ReadFrom(io.LimitReader(resp.Body, maxAnswer+1)); err != nil {
		return resp.StatusCode, resp.Header, b.Bytes(), fmt.Errorf("read the answer: %w", err)
	}
	if b.Len() > maxAnswer {
		return resp.StatusCode, resp.Header, nil, fmt.Errorf("the answer is larger than %d bytes", maxAnswer)
	}
	return resp.StatusCode, resp.Header, b.Bytes(), nil
}

// clip shortens a text that a server wrote for one line of a report.
func clip[T ~string | ~[]byte](b T) string {
	s := strings.Join(strings.Fields(strings.ToValidUTF8(string(b), "?")), " ")
	if len(s) > 300 {
		s = strings.ToValidUTF8(s[:300], "") + "…"
	}
	return s
}
