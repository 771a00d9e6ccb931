package ops

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// glanceAge is how old what the page shows may be. Whoever looks while metrics
// are being read waits for that reading and shares it.
const glanceAge = time.Second

// glance lets all who look at the page share one reading of the metrics a
// second: a reading of thousands of partitions costs milliseconds, and how often
// a page is asked for is for its visitors to say. /metrics is not read through
// it: what a scraper gets is as old as its request, and it has a bound of its own.
type glance struct {
	from prometheus.Gatherer
	now  func() time.Time

	mu       sync.Mutex // held while reading
	taken    time.Time  // zero = nothing was read yet
	families []*dto.MetricFamily
	err      error
}

// Gather gives what was read less than glanceAge ago, or reads. The families
// are shared: nobody may change them.
func (g *glance) Gather() ([]*dto.MetricFamily, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	// A clock that was set back must not keep an old reading alive.
	if age := g.now().Sub(g.taken); g.taken.IsZero() || age >= glanceAge || age < 0 {
		g.families, g.err = g.from.Gather()
		g.taken = g.now()
	}
	return g.families, g.err //nolint:wrapcheck // the registry's own words
}
