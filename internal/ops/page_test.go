package ops

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

// Thousands of partitions make a page that a person can still read.
func TestPageRowsAreBounded(t *testing.T) {
	registry := prometheus.NewRegistry()
	at := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "kafkasink_partition_position_offset", Help: "x"}, []string{"topic", "partition", "rung"})
	registry.MustRegister(at)
	for p := range 5 * maxPageRows {
		for i, rung := range []string{"received", "completed"} {
			at.WithLabelValues("orders", fmt.Sprint(p), rung).Set(float64(100 - 7*i))
		}
	}
	v := newView(ServerOptions{
		Health: newHealth(t, newClock(), prometheus.NewRegistry()), Gatherer: registry, Now: newClock().Now,
		Page: Page{Positions: "kafkasink_partition_position_offset", Unit: "records"},
	}, newClock().Now())
	if len(v.Lanes) != maxPageRows || v.LanesLeftOut != 4*maxPageRows {
		t.Errorf("%d lanes are shown and %d left out", len(v.Lanes), v.LanesLeftOut)
	}
	if diff := cmp.Diff([]string{"partition", "topic"}, v.LaneLabels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if got := v.Lanes[2].Labels[0]; got != "2" {
		t.Errorf("the third lane is partition %s: not in the order of numbers", got)
	}
	want := []rungView{{"received", "1000 lanes", "7\u202f000 records", true}, {"completed", "1000 lanes", "", false}}
	if diff := cmp.Diff(want, v.Rungs); diff != "" {
		t.Errorf("rungs (-want +got):\n%s", diff)
	}
}

func TestHistoryIsBoundedAndDrawsGaps(t *testing.T) {
	c := newClock()
	registry := prometheus.NewRegistry()
	lag := prometheus.NewGauge(prometheus.GaugeOpts{Name: "x_lag_bytes", Help: "Lag."})
	h := NewHistory([]Chart{{Metric: "x_lag_bytes", Title: "Lag"}, {Metric: "x_other", Title: "Never there"}}, registry, c.Now)
	h.sample() // not registered yet: nothing to draw
	if got := h.charts(); len(got) != 0 {
		t.Errorf("charts of nothing: %+v", got)
	}
	registry.MustRegister(lag)
	for i := range 2 * historyLength {
		lag.Set(float64(i % 11 * 1024))
		c.forward(historyEvery)
		h.sample()
	}
	charts := h.charts()
	if len(charts) != 1 || strings.Count(charts[0].Points, ",") != historyLength {
		t.Fatalf("charts %+v", charts)
	}
	if got := charts[0]; got.Least != "0 B" || got.Most != "10.0 KiB" || got.Help != "Lag." || got.Span != age((historyLength-1)*historyEvery) {
		t.Errorf("chart %s to %s in %s, %q", got.Least, got.Most, got.Span, got.Help)
	}
	if got := points([]float64{1, math.NaN(), 2}, 2); strings.Count(got, ",") != 2 {
		t.Errorf("a gap is drawn: %s", got)
	}
}

func TestFactsForPeople(t *testing.T) {
	now := newClock().Now()
	for _, tc := range []struct {
		name  string
		value float64
		want  string
	}{
		{"a_bytes", 1536, "1.5 KiB"},
		{"a_bytes", 1 << 50, "1024.0 TiB"},
		{"a_seconds", 90, "90 s"},
		{"a_seconds", 1e300, age(math.MaxInt64 / 2)},
		{"a_timestamp_seconds", 0, "never"},
		{"a_timestamp_seconds", float64(now.Add(-3 * time.Hour).Unix()), "3 h 0 min ago"},
		{"a_records", 1234567, "1\u202f234\u202f567"},
		{"a_records", -1234, "-1\u202f234"},
		{"a_ratio", 0.25, "0.25"},
		{"a_bytes", math.NaN(), "–"},
	} {
		if got := measured(tc.name, tc.value, now); got != tc.want {
			t.Errorf("%s %v is shown as %q, expected %q", tc.name, tc.value, got, tc.want)
		}
	}
	registry := prometheus.NewRegistry()
	status := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "slot_status", Help: "x"}, []string{"status"})
	registry.MustRegister(status)
	status.WithLabelValues("reserved").Set(0)
	status.WithLabelValues("lost").Set(1)
	families, err := gather(registry)
	if err != nil {
		t.Fatal(err)
	}
	if got := facts(families["slot_status"], now); len(got) != 1 || got[0].Value != "lost" {
		t.Errorf("the marked value: %+v", got)
	}
}
