// Package page_test looks at the daemons' status page as a person does: in a
// real browser.
package page_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/prometheus/client_golang/prometheus"

	"holdfast/internal/decode"
	"holdfast/internal/ops"
)

var update = flag.Bool("update", false, "write the screenshots of docs/images anew")

// patience is for a browser on a busy machine.
const patience = 90 * time.Second

// world is a daemon's endpoints without a daemon behind them.
type world struct {
	url       string
	health    *ops.Health
	repeats   *ops.Repeats
	position  *prometheus.GaugeVec
	committed prometheus.Gauge
}

func newWorld(t *testing.T) *world {
	t.Helper()
	registry, err := ops.NewRegistry("pgsource", ops.Version())
	if err != nil {
		t.Fatal(err)
	}
	health, err := ops.NewHealth(ops.HealthOptions{Daemon: "pgsource", Now: time.Now, Registerer: registry, ReadyWhen: []string{"source"}})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{
		health:  health,
		repeats: ops.NewRepeats(slog.New(slog.DiscardHandler), time.Now),
		position: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "pgsource_position_bytes", Help: "The LSN of each rung.",
		}, []string{"rung"}),
		committed: prometheus.NewGauge(prometheus.GaugeOpts{Name: "pgsource_acknowledged_lag_bytes", Help: "WAL that is not acknowledged."}),
	}
	registry.MustRegister(w.position, w.committed)
	page := ops.Page{
		Positions: "pgsource_position_bytes", Unit: "bytes", FormatPosition: decode.FormatLSN,
		Charts:   []ops.Chart{{Metric: "pgsource_acknowledged_lag_bytes", Title: "Not acknowledged yet"}},
		Facts:    []string{"pgsource_phase"},
		Settings: []ops.SettingRow{{Name: "PGSOURCE_SLOT", Value: "holdfast", Source: "default"}, {Name: "PGSOURCE_DSN", Value: "[redacted]", Source: "env"}},
	}
	history := ops.NewHistory(page.Charts, registry, time.Now)
	server, err := ops.Listen(t.Context(), "127.0.0.1:0", ops.ServerOptions{
		Daemon: "pgsource", Health: health, Gatherer: registry, Logger: slog.New(slog.DiscardHandler),
		Page: page, History: history, Repeats: w.repeats,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(ctx) })
	serving.Go(func() { history.Run(ctx) })
	t.Cleanup(func() { cancel(); serving.Wait() })
	w.url = "http://" + server.Addr().String() + "/"

	for i, rung := range []string{"received", "accepted", "ingested", "completed", "acknowledged"} {
		w.position.WithLabelValues(rung).Set(float64(0x1_7A00_0000 - i*0x2000))
	}
	w.committed.Set(32 << 10)
	health.SetPhase(ops.PhaseStreaming)
	health.SetReady("source", true, "")
	health.Set("source", ops.Check{OK: true, Message: "streaming from slot \"holdfast\""})
	health.Set("destination", ops.Check{OK: true, Message: "rows are completed"})
	return w
}

// block puts the world into the state that needs a person.
func (w *world) block() {
	w.health.SetPhase(ops.PhaseBlocked)
	w.health.SetReady("source", false, "blocked: a person has to act")
	w.health.Set("refusal", ops.Check{
		Blocking: true,
		Message:  "table \"public\".\"orders\": <script>alert('x')</script> has a column that Feldera has not",
		Hint:     "add the column to the Feldera table, or set PGSOURCE_EXTRA_COLUMNS=ignore",
	})
	w.repeats.Failed(context.Background(), "destination", fmt.Errorf("connection refused"))
	w.repeats.Failed(context.Background(), "destination", fmt.Errorf("connection refused"))
}

// browser is one tab of a headless Chromium that collects what the page says
// to its console.
type browser struct {
	ctx context.Context //nolint:containedctx // it is how chromedp names a tab

	mu       sync.Mutex
	complain []string
}

func newBrowser(t *testing.T) *browser {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatal("chromium is needed: run test/setup.sh page")
	}
	opts := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox)
	alloc, stop := chromedp.NewExecAllocator(context.WithoutCancel(t.Context()), opts...)
	ctx, cancel := chromedp.NewContext(alloc)
	tab := ctx
	t.Cleanup(func() {
		cancel()
		stop()
		chromedp.FromContext(tab).Allocator.Wait() // until the browser is gone, with its profile
	})
	ctx, end := context.WithTimeout(ctx, patience)
	t.Cleanup(end)
	b := &browser{ctx: ctx}
	chromedp.ListenTarget(ctx, func(event any) {
		b.mu.Lock()
		defer b.mu.Unlock()
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			b.complain = append(b.complain, e.ExceptionDetails.Error())
		case *runtime.EventConsoleAPICalled:
			b.complain = append(b.complain, fmt.Sprint(e.Type, e.Args))
		case *log.EventEntryAdded:
			b.complain = append(b.complain, e.Entry.Text)
		}
	})
	b.run(t, log.Enable(), runtime.Enable())
	return b
}

func (b *browser) run(t *testing.T, actions ...chromedp.Action) {
	t.Helper()
	if err := chromedp.Run(b.ctx, actions...); err != nil {
		t.Fatalf("drive the browser: %v", err)
	}
}

// await waits until the element shows the text.
func (b *browser) await(t *testing.T, selector, text string) {
	t.Helper()
	js := fmt.Sprintf(`(document.querySelector(%q)?.innerText || "").includes(%q)`, selector, text)
	if err := chromedp.Run(b.ctx, chromedp.Poll(js, nil, chromedp.WithPollingInterval(50*time.Millisecond), chromedp.WithPollingTimeout(patience/2))); err != nil {
		var html string
		_ = chromedp.Run(b.ctx, chromedp.Text("body", &html, chromedp.ByQuery))
		t.Fatalf("wait for %q in %s: %v\nthe page says:\n%s", text, selector, err, html)
	}
}

func (b *browser) quiet(t *testing.T) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.complain) > 0 {
		t.Errorf("the console says: %s", strings.Join(b.complain, "\n"))
	}
}

// screenshot keeps a picture for the documents, when asked to.
func (b *browser) screenshot(t *testing.T, name string) {
	t.Helper()
	if !*update {
		return
	}
	var png []byte
	b.run(t, chromedp.FullScreenshot(&png, 100))
	if err := os.WriteFile(filepath.Join("..", "..", "docs", "images", name+".png"), png, 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestPageShowsAndFollowsTheState(t *testing.T) {
	w, b := newWorld(t), newBrowser(t)
	b.run(t, chromedp.EmulateViewport(1100, 900), chromedp.Navigate(w.url))
	b.await(t, "h1", "ok")
	b.await(t, "#checks", "rows are completed")
	b.await(t, "#evidence", "1/7A000000")
	b.await(t, "#evidence", "8.0 KiB waiting")
	b.await(t, "#charts", "32.0 KiB")
	b.screenshot(t, "page-ok")

	// The page is not loaded again: a mark in its window stays.
	b.run(t, chromedp.Evaluate(`window.same = true`, nil))
	w.position.WithLabelValues("acknowledged").Set(0x1_79FF_A000)
	b.await(t, "#evidence li:last-child", "1/79FFA000")
	w.block()
	b.await(t, "h1", "blocked")
	b.await(t, "#checks", "To do: add the column to the Feldera table")
	b.await(t, "#checks", "<script>alert('x')</script>") // as text
	b.await(t, "#failures", "connection refused")
	var same bool
	b.run(t, chromedp.Evaluate(`window.same === true`, &same))
	if !same {
		t.Error("the page was loaded again instead of updated")
	}
	b.screenshot(t, "page-blocked")
	b.run(t, emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "dark"}}))
	var background string
	b.run(t, chromedp.Evaluate(`getComputedStyle(document.body).backgroundColor`, &background))
	if background != "rgb(13, 17, 23)" {
		t.Errorf("the dark page's background is %s", background)
	}
	b.screenshot(t, "page-dark")
	b.quiet(t)
}

// A reader who opened the settings by keyboard keeps them open, and the focus,
// while the page goes on.
func TestPageKeepsWhatTheReaderOpened(t *testing.T) {
	w, b := newWorld(t), newBrowser(t)
	b.run(t, chromedp.Navigate(w.url))
	b.await(t, "h1", "ok")
	b.run(t, chromedp.Focus("#settings summary", chromedp.ByQuery), chromedp.KeyEvent(kb.Enter))
	b.await(t, "#settings", "PGSOURCE_DSN")
	w.block()
	b.await(t, "h1", "blocked")
	b.await(t, "#settings", "PGSOURCE_DSN")
	var focused string
	b.run(t, chromedp.Evaluate(`document.activeElement.tagName`, &focused))
	if focused != "SUMMARY" {
		t.Errorf("the focus went to %s", focused)
	}
	b.quiet(t)
}

func TestPageIsWholeWithoutScript(t *testing.T) {
	w, b := newWorld(t), newBrowser(t)
	w.block()
	b.run(t, emulation.SetScriptExecutionDisabled(true), chromedp.Navigate(w.url))
	var body string
	b.run(t, chromedp.Text("body", &body, chromedp.ByQuery))
	for _, want := range []string{"blocked", "To do: add the column", "1/7A000000", "connection refused", "Not acknowledged yet"} {
		if !strings.Contains(body, want) {
			t.Errorf("without its script the page does not say %q:\n%s", want, body)
		}
	}
}

func TestPageFitsAPhone(t *testing.T) {
	w, b := newWorld(t), newBrowser(t)
	w.block()
	b.run(t, chromedp.EmulateViewport(360, 740, chromedp.EmulateMobile), chromedp.Navigate(w.url))
	b.await(t, "h1", "blocked")
	var wide int
	b.run(t, chromedp.Evaluate(`document.documentElement.scrollWidth`, &wide))
	if wide > 360 {
		t.Errorf("the page is %d pixels wide on a phone of 360", wide)
	}
	b.screenshot(t, "page-phone")
	b.quiet(t)
}

// A page whose daemon is gone says that it is old.
func TestPageSaysWhenItIsStale(t *testing.T) {
	w, b := newWorld(t), newBrowser(t)
	b.run(t, chromedp.Navigate(w.url))
	b.await(t, "h1", "ok")
	b.run(t, chromedp.Evaluate(`window.fetch = () => Promise.reject(new Error("gone"))`, nil))
	b.await(t, "#stale", "what is shown is old")
	b.quiet(t)
}

// Nothing on the page changes anything: it takes GET only, and is not framed.
func TestPageIsReadOnly(t *testing.T) {
	w := newWorld(t)
	for _, path := range []string{"", "status.json", "page.js", "page.css", "icon.svg"} {
		for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete} {
			req, err := http.NewRequestWithContext(t.Context(), method, w.url+path, strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusMethodNotAllowed {
				t.Errorf("%s /%s answers %s", method, path, resp.Status)
			}
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if policy := resp.Header.Get("Content-Security-Policy"); !strings.Contains(policy, "frame-ancestors 'none'") || strings.Contains(policy, "unsafe") {
		t.Errorf("content security policy %q", policy)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"<form", "<button", "style=", "onclick"} {
		if strings.Contains(string(body), bad) {
			t.Errorf("the page has %s", bad)
		}
	}
}
