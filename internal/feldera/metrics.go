package feldera

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are the numbers of one daemon's exchange with Feldera. Its methods
// fit [Config.Observe], [Config.OnRetry] and [Policy.OnAltered].
type Metrics struct {
	duration *prometheus.HistogramVec
	retries  *prometheus.CounterVec
	altered  *prometheus.CounterVec
}

// NewMetrics makes the metrics under the daemon's prefix and registers them.
func NewMetrics(reg prometheus.Registerer, daemon string) *Metrics {
	m := &Metrics{
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: daemon + "_feldera_request_duration_seconds", Help: "Requests to Feldera, by endpoint and outcome.",
			Buckets: []float64{.001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}, []string{"endpoint", "outcome"}),
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: daemon + "_feldera_retries_total", Help: "Requests to Feldera that were repeated, by the class of the failure.",
		}, []string{"class"}),
		altered: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: daemon + "_values_altered_total", Help: "Values that a policy let arrive changed, by table, column and how.",
		}, []string{"table", "column", "how"}),
	}
	reg.MustRegister(m.duration, m.retries, m.altered)
	return m
}

// Observe counts one finished request.
func (m *Metrics) Observe(endpoint, outcome string, d time.Duration) {
	m.duration.WithLabelValues(endpoint, outcome).Observe(d.Seconds())
}

// Retried counts one failed attempt that is repeated.
func (m *Metrics) Retried(r Retry) { m.retries.WithLabelValues(Classify(r.Err).String()).Inc() }

// Altered counts one value that was altered. Tables and columns are those of
// the pipeline's program, so the labels are bounded by it.
func (m *Metrics) Altered(table, column string, how Alteration) {
	m.altered.WithLabelValues(table, column, string(how)).Inc()
}
