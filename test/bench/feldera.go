package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"holdfast/test/harness"
)

// program is the pipeline: one table per path.
const program = `
CREATE TABLE orders (
  id BIGINT NOT NULL PRIMARY KEY, customer INT NOT NULL, status VARCHAR NOT NULL, amount DECIMAL(12, 2) NOT NULL, currency VARCHAR NOT NULL,
  note VARCHAR, paid BOOLEAN NOT NULL, created TIMESTAMP NOT NULL, updated TIMESTAMP NOT NULL);
CREATE TABLE web_orders (
  id BIGINT NOT NULL PRIMARY KEY, customer INT NOT NULL, status VARCHAR NOT NULL, amount DECIMAL(12, 2) NOT NULL, currency VARCHAR NOT NULL,
  note VARCHAR, paid BOOLEAN NOT NULL, created TIMESTAMP NOT NULL, updated TIMESTAMP NOT NULL);
`

const pipeline = "bench"

// nullFeldera is the simulator that counts and stores nothing, as a process.
type nullFeldera struct {
	url    string
	proc   *harness.Daemon
	client *http.Client
}

// startFeldera starts the simulator; its program file goes into dir.
func startFeldera(ctx context.Context, dir string) (*nullFeldera, error) {
	path, err := harness.Build(ctx, "./test/felderasim/cmd/felderasim", harness.BuildOptions{})
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "program.sql")
	if err := os.WriteFile(file, []byte(program), 0o600); err != nil {
		return nil, fmt.Errorf("write the simulator's program: %w", err)
	}
	proc, err := harness.StartDaemon(harness.DaemonOptions{
		Program: path, Args: []string{"-null", "-program", file, "-pipeline", pipeline, "-listen", "127.0.0.1:0"},
	})
	if err != nil {
		return nil, err
	}
	says := regexp.MustCompile(`^manager (\S+) `)
	line, err := proc.WaitLog(ctx, says)
	if err != nil {
		proc.Close()
		return nil, err
	}
	return &nullFeldera{
		url: says.FindStringSubmatch(line)[1], proc: proc,
		client: &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}},
	}, nil
}

// records gives how many rows the simulator has taken since its start.
func (f *nullFeldera) records(ctx context.Context) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, f.url+"/sim/counters", nil)
	if err != nil {
		return 0, fmt.Errorf("ask the simulator: %w", err)
	}
	res, err := f.client.Do(req)
	if err != nil {
		return 0, fmt.Errorf("ask the simulator: %w", err)
	}
	defer func() { _ = res.Body.Close() }()
	var counters struct {
		Records int `json:"records"`
	}
	if err := json.NewDecoder(io.LimitReader(res.Body, 1<<20)).Decode(&counters); err != nil {
		return 0, fmt.Errorf("read the simulator's counters: %w", err)
	}
	return counters.Records, nil
}

// subject runs a daemon until the source holds everything as acknowledged, then
// stops it, and wants the simulator to have taken all of count.
func (f *nullFeldera) subject(ctx context.Context, name, path string, env []string, count int, acknowledged func(context.Context) (bool, error)) (result, error) {
	before, err := f.records(ctx)
	if err != nil {
		return result{}, err
	}
	c, err := startChild(name, path, nil, append(env, "FELDERA_URL="+f.url, "FELDERA_PIPELINE="+pipeline))
	if err != nil {
		return result{}, err
	}
	took, err := c.until(ctx, acknowledged)
	if err != nil {
		return result{}, err
	}
	used, err := c.stop(ctx)
	if err != nil {
		return result{}, err
	}
	after, err := f.records(ctx)
	if err != nil {
		return result{}, err
	}
	if after-before < count {
		return result{}, fmt.Errorf("%s had everything acknowledged, but Feldera has taken %d of %d", name, after-before, count)
	}
	return result{Program: name, Seconds: took.Seconds(), usage: used}, nil
}
