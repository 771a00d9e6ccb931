package main

import (
	"flag"
	"slices"
	"testing"

	"holdfast/internal/config"
	"holdfast/internal/ops"
	"holdfast/internal/ops/opstest"
)

var update = flag.Bool("update", false, "write docs/metrics.md anew")

// The reference page says what the registry has, and the status page shows
// nothing that the registry has not.
func TestMetricsReference(t *testing.T) {
	rt := registered(t)
	metrics := opstest.Metrics(t, rt.Registry, daemon+"_")
	opstest.Reference(t, "../../docs/metrics.md", daemon, metrics, *update)
	opstest.LintMetrics(t, rt.Registry)
	p := page(nil)
	names := append([]string{p.Positions}, p.Facts...)
	for _, c := range p.Charts {
		names = append(names, c.Metric)
	}
	for _, c := range p.Counts {
		names = append(names, c.Metric)
	}
	for _, name := range names {
		if !slices.ContainsFunc(metrics, func(m opstest.Metric) bool { return m.Name == name }) {
			t.Errorf("the status page shows %s, which is not in the registry", name)
		}
	}
}

// registered makes a daemon that is never run, with all its metrics.
func registered(t *testing.T) ops.Runtime {
	t.Helper()
	c, err := config.LoadKafkaSink([]string{"KAFKASINK_BROKERS=kafka:9092", "KAFKASINK_TOPICS=orders=orders:json", "FELDERA_URL=http://feldera", "FELDERA_PIPELINE=p"})
	if err != nil {
		t.Fatal(err)
	}
	rt, err := ops.LookingRuntime(daemon)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newSink(t.Context(), c, rt); err != nil {
		t.Fatal(err)
	}
	return rt
}
