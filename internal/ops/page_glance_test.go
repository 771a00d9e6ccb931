package ops

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Many who look at once cost one reading a second, on the page and in its JSON
// alike, and the next second has a new one; a scrape is never answered from it.
func TestManyLooksShareOneReading(t *testing.T) {
	c := newClock()
	var readings atomic.Int64
	h := handler(ServerOptions{
		Daemon: "pgsource", Health: newHealth(t, c, prometheus.NewRegistry()), Now: c.Now, Logger: slog.New(slog.DiscardHandler),
		Gatherer: prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
			readings.Add(1)
			return nil, nil
		}),
	})
	look := func(path string) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, http.NoBody))
		if w.Code != http.StatusOK {
			t.Errorf("%s: %d", path, w.Code)
		}
	}
	var lookers sync.WaitGroup
	for range 50 {
		lookers.Go(func() { look("/"); look("/status.json") })
	}
	lookers.Wait()
	if got := readings.Load(); got != 1 {
		t.Errorf("100 looks in one moment read the metrics %d times", got)
	}
	c.forward(glanceAge - time.Millisecond)
	look("/")
	if got := readings.Load(); got != 1 {
		t.Errorf("the metrics were read again after less than %s", glanceAge)
	}
	c.forward(time.Millisecond)
	look("/")
	c.forward(-time.Hour) // the clock is set back
	look("/")
	if got := readings.Load(); got != 3 {
		t.Errorf("%d readings, want one after %s and one after the clock was set back", got, glanceAge)
	}
	look("/metrics")
	look("/metrics")
	if got := readings.Load(); got != 5 {
		t.Errorf("%d readings after two scrapes, want one for each", got)
	}
}
