package main

import (
	"flag"
	"testing"

	"holdfast/internal/config"
	"holdfast/internal/ops"
	"holdfast/internal/ops/opstest"
	"holdfast/internal/wal"
)

var update = flag.Bool("update", false, "write docs/metrics.md anew")

// What is promised of the metrics, in docs/metrics.md and on the status page.
func TestMetricsReference(t *testing.T) {
	opstest.Daemon(t, registered(t).Registry, daemon, "../../docs/metrics.md", page(nil).Families(), *update)
}

// registered makes a daemon that is never run, with all its metrics.
func registered(t *testing.T) ops.Runtime {
	t.Helper()
	c, err := config.LoadPGSource([]string{"PGSOURCE_DSN=postgres://u@db/d", "PGSOURCE_TABLES=public.orders", "FELDERA_URL=http://feldera", "FELDERA_PIPELINE=p"})
	if err != nil {
		t.Fatal(err)
	}
	rt, err := ops.LookingRuntime(daemon)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := newSource(t.Context(), c, rt, func(*reporter) ([]wal.Table, error) { return sourceTables(t.Context(), c) }); err != nil {
		t.Fatal(err)
	}
	return rt
}
