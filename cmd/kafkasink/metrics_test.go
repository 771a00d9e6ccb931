package main

import (
	"flag"
	"testing"

	"holdfast/internal/config"
	"holdfast/internal/ops"
	"holdfast/internal/ops/opstest"
)

var update = flag.Bool("update", false, "write docs/metrics.md anew")

// What is promised of the metrics, in docs/metrics.md and on the status page.
func TestMetricsReference(t *testing.T) {
	opstest.Daemon(t, registered(t).Registry, daemon, "../../docs/metrics.md", page(nil).Families(), *update)
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
