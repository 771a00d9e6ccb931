package wal

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// snapshotMetrics are the numbers of copies.
type snapshotMetrics struct {
	rows      *prometheus.CounterVec
	chunks    *prometheus.CounterVec
	percent   *prometheus.GaugeVec
	seconds   prometheus.Histogram
	jobs      prometheus.Gauge
	paused    prometheus.Gauge
	rate      prometheus.Gauge
	remaining prometheus.Gauge
}

func newSnapshotMetrics(reg prometheus.Registerer) *snapshotMetrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	m := &snapshotMetrics{
		rows: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_snapshot_rows_total", Help: "Rows that were read from the source's tables beside the stream and accepted by Feldera, by what for: snapshot, resync or repair.",
		}, []string{"table", "kind"}),
		chunks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_snapshot_chunks_total", Help: "Reads of a chunk of a table: copied; discarded, since a commit was in the stream and not visible yet; waited; failed; or restarted, since the table was rewritten or altered.",
		}, []string{"result"}),
		percent: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "pgsource_snapshot_percent", Help: "How much of a table is copied, estimated by the server's statistics; 100 when it is done.",
		}, []string{"table"}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "pgsource_snapshot_read_seconds", Help: "How long the transaction at the source was open to read one chunk.", Buckets: []float64{.01, .03, .1, .3, 1, 3, 10, 30},
		}),
		jobs:      gauge("pgsource_snapshot_jobs", "Copies that are not done: snapshots, resyncs and repairs."),
		paused:    gauge("pgsource_snapshot_paused", "1 while a copy waits because the stream is behind."),
		rate:      gauge("pgsource_snapshot_rows_per_second", "Rows per second that the copy under way brings, over the last chunks."),
		remaining: gauge("pgsource_snapshot_remaining_seconds", "Estimated time until the copy under way is done."),
	}
	for _, result := range []string{"copied", "discarded", "waited", "failed", "restarted"} {
		m.chunks.WithLabelValues(result)
	}
	reg.MustRegister(m.rows, m.chunks, m.percent, m.seconds, m.jobs, m.paused, m.rate, m.remaining)
	return m
}

// copyPace measures how fast rows are copied.
type copyPace struct {
	job   uint64
	since time.Time
	rows  int64
	rate  float64 // rows per second, smoothed
	said  time.Time
}

// sayEvery is how often the log tells of a copy under way.
const sayEvery = 10 * time.Second

func (p *copyPace) add(ch *chunk) {
	now := time.Now()
	if p.job != ch.job.ID {
		*p = copyPace{job: ch.job.ID, since: now.Add(-ch.took), said: p.said}
	}
	spent := max(now.Sub(p.since), time.Millisecond).Seconds()
	rate := float64(len(ch.rows)) / spent
	if p.rate == 0 {
		p.rate = rate
	} else {
		p.rate += (rate - p.rate) / 8
	}
	p.since = now
	p.rows += int64(len(ch.rows))
}

// estimate gives the rate and the time that is left, 0 where it is not known.
func (p *copyPace) estimate(j *copyJob) (rate float64, remaining time.Duration) {
	if p.rate <= 0 || j.Total <= j.Rows {
		return p.rate, 0
	}
	return p.rate, time.Duration(float64(j.Total-j.Rows) / p.rate * float64(time.Second))
}

// due tells whether the log is to say how far the copy is.
func (p *copyPace) due() bool {
	if time.Since(p.said) < sayEvery {
		return false
	}
	p.said = time.Now()
	return true
}

// showCopies shows in metrics and health how far the job under way is; nil for
// none.
func (s *Source) showCopies(j *copyJob, rate float64, remaining time.Duration) {
	m := s.cfg.Metrics.snapshot
	jobs := 0
	if st := s.keeper.st.Load(); st != nil && st.Snapshot != nil {
		jobs = len(st.Snapshot.Jobs)
	}
	m.jobs.Set(float64(jobs))
	m.rate.Set(rate)
	m.remaining.Set(remaining.Seconds())
	if j == nil {
		m.paused.Set(0)
		s.cfg.Report(Status{Check: CheckSnapshot, OK: true, Message: "no copy of existing rows is under way"})
		return
	}
	m.percent.WithLabelValues(j.table().String()).Set(j.percent())
	message := fmt.Sprintf("%s of %s: %.1f %%, %d rows", j.Kind, j.table(), j.percent(), j.Rows)
	if rate > 0 {
		message += fmt.Sprintf(", %.0f rows/s", rate)
	}
	if remaining > 0 {
		message += fmt.Sprintf(", about %s left", remaining.Round(time.Second))
	}
	if jobs > 1 {
		message += fmt.Sprintf("; %d more wait", jobs-1)
	}
	s.cfg.Report(Status{Check: CheckSnapshot, OK: true, Message: message})
}
