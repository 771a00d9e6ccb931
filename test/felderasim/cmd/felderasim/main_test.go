package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRun(t *testing.T) {
	sqlFile := filepath.Join(t.TempDir(), "program.sql")
	if err := os.WriteFile(sqlFile, []byte("CREATE TABLE orders (id BIGINT NOT NULL PRIMARY KEY);"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pr, pw := io.Pipe()
	code := make(chan int, 1)
	go func() {
		c := run(ctx, []string{"-listen", "127.0.0.1:0", "-program", sqlFile, "-pipeline", "demo", "-edition", "enterprise", "-model", "exactly_once"}, pw, io.Discard)
		_ = pw.Close()
		code <- c
	}()
	lines := bufio.NewScanner(pr)
	if !lines.Scan() || !strings.Contains(lines.Text(), "SIMULATOR, not Feldera") {
		t.Fatalf("first line: %q", lines.Text())
	}
	if !lines.Scan() {
		t.Fatal("no second line")
	}
	m := regexp.MustCompile(`^manager (http://\S+) pipeline demo bare http://\S+$`).FindStringSubmatch(lines.Text())
	if m == nil {
		t.Fatalf("second line: %q", lines.Text())
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, m[1]+"/v0/pipelines/demo/stats", nil)
	if err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{DisableKeepAlives: true}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status)
	}
	cancel()
	if c := <-code; c != 0 {
		t.Fatalf("exit code %d", c)
	}
}

func TestRunRefusals(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want int
	}{
		{[]string{"-nosuch"}, 2},
		{[]string{}, 2},
		{[]string{"-program", "x", "-edition", "free"}, 2},
		{[]string{"-program", filepath.Join(t.TempDir(), "missing.sql")}, 1},
	} {
		var out, errs bytes.Buffer
		if got := run(t.Context(), tc.args, &out, &errs); got != tc.want || errs.Len() == 0 {
			t.Errorf("%v: exit code %d, want %d; stderr %q", tc.args, got, tc.want, errs.String())
		}
	}
}
