package ops

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// historyEvery and historyLength give half an hour of history: what a
	// person who has just been woken up asks first is whether it gets worse.
	historyEvery  = 5 * time.Second
	historyLength = 360
)

// History samples a daemon's charts. Its memory is bounded by the number of
// charts.
type History struct {
	plan     []Chart
	gatherer prometheus.Gatherer
	now      func() time.Time

	mu      sync.Mutex
	samples [][]float64 // per chart, oldest first; NaN = nothing to read
	taken   []time.Time // when each sample was taken
	help    []string
}

// NewHistory makes a History without samples.
func NewHistory(charts []Chart, g prometheus.Gatherer, now func() time.Time) *History {
	return &History{plan: charts, gatherer: g, now: now, samples: make([][]float64, len(charts)), help: make([]string, len(charts))}
}

// Run samples until ctx ends.
func (h *History) Run(ctx context.Context) {
	turn := time.NewTicker(historyEvery)
	defer turn.Stop()
	for {
		h.sample()
		select {
		case <-turn.C:
		case <-ctx.Done():
			return
		}
	}
}

func (h *History) sample() {
	families, _ := gather(h.gatherer) // a gap, which the page explains
	h.mu.Lock()
	defer h.mu.Unlock()
	h.taken = keepLast(append(h.taken, h.now()))
	for i, c := range h.plan {
		value, ok := c.read(families)
		if !ok {
			value = math.NaN()
		}
		h.samples[i] = keepLast(append(h.samples[i], value))
		if f := families[c.Metric]; f != nil {
			h.help[i] = f.GetHelp()
		}
	}
}

func keepLast[T any](list []T) []T {
	if over := len(list) - historyLength; over > 0 {
		return append(list[:0], list[over:]...)
	}
	return list
}

// charts draws what was sampled. A chart that never had a value is left out.
func (h *History) charts() []chartView {
	h.mu.Lock()
	defer h.mu.Unlock()
	var list []chartView
	for i, c := range h.plan {
		least, most, last := math.Inf(1), math.Inf(-1), math.NaN()
		for _, v := range h.samples[i] {
			if !math.IsNaN(v) {
				least, most = min(least, v), max(most, v)
			}
			last = v
		}
		if math.IsInf(most, -1) {
			continue
		}
		now := h.now()
		list = append(list, chartView{
			Title: c.Title, Help: h.help[i], Value: measured(c.Metric, last, now),
			Least: measured(c.Metric, least, now), Most: measured(c.Metric, most, now),
			Points: points(h.samples[i], most), Span: age(now.Sub(h.taken[0])),
		})
	}
	return list
}

// points gives the polyline from 0 to most, the newest sample at the right.
func points(samples []float64, most float64) string {
	var b strings.Builder
	for i, v := range samples {
		if math.IsNaN(v) {
			continue
		}
		x := float64(chartWidth) * float64(historyLength-len(samples)+i) / float64(historyLength-1)
		y := float64(chartHeight) - 1
		if most > 0 {
			y -= (float64(chartHeight) - 2) * max(v, 0) / most
		}
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%.1f,%.1f", x, y)
	}
	return b.String()
}
