// Package opstest helps the tests of packages that have metrics. It is not
// linked into the daemons.
package opstest

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

// LintMetrics fails the test for every metric of g that does not follow the
// naming conventions, except those named in exempt (which are not ours to
// name). A metric vector shows up only once it has a child.
func LintMetrics(tb testing.TB, g prometheus.Gatherer, exempt ...string) {
	tb.Helper()
	families, err := g.Gather()
	if err != nil {
		tb.Fatalf("gather the metrics: %v", err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		tb.Fatalf("lint the metrics: %v", err)
	}
	for _, p := range problems {
		if !slices.Contains(exempt, p.Metric) {
			tb.Errorf("metric %s: %s", p.Metric, p.Text)
		}
	}
}
