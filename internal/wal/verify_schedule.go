package wal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"holdfast/internal/decode"
)

// verifyMetrics are the numbers of the comparisons that the daemon makes by
// itself.
type verifyMetrics struct {
	runs        *prometheus.CounterVec
	differences *prometheus.GaugeVec
	unsettled   *prometheus.GaugeVec
	rows        *prometheus.CounterVec
	last        prometheus.Gauge
	seconds     prometheus.Gauge
}

// The results of a comparison, as a metric's label.
const (
	verifyEqual     = "equal"
	verifyDifferent = "different"
	verifyUndecided = "undecided"
	verifyFailed    = "failed"
)

func newVerifyMetrics(reg prometheus.Registerer) *verifyMetrics {
	m := &verifyMetrics{
		runs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_verify_runs_total", Help: "Comparisons of source and pipeline that PGSOURCE_VERIFY_INTERVAL asked for, by what they found.",
		}, []string{"result"}),
		differences: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "pgsource_verify_differences", Help: "Rows that the last comparison has proven to differ, by source table and kind; at most 1000 of a table.",
		}, []string{"table", "kind"}),
		unsettled: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "pgsource_verify_unsettled_keys", Help: "Keys that the last comparison could not decide about, by source table.",
		}, []string{"table"}),
		rows: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_verify_read_rows_total", Help: "Rows that comparisons have read, by side: source or destination.",
		}, []string{"side"}),
		last:    prometheus.NewGauge(prometheus.GaugeOpts{Name: "pgsource_verify_last_timestamp_seconds", Help: "When the last comparison ended that was not cut short by a fault; 0 before the first."}),
		seconds: prometheus.NewGauge(prometheus.GaugeOpts{Name: "pgsource_verify_duration_seconds", Help: "How long the last comparison took."}),
	}
	for _, result := range []string{verifyEqual, verifyDifferent, verifyUndecided, verifyFailed} {
		m.runs.WithLabelValues(result)
	}
	reg.MustRegister(m.runs, m.differences, m.unsettled, m.rows, m.last, m.seconds)
	return m
}

// verifyRegularly compares all tables every VerifyInterval, at most VerifyRate
// rows a second, until ctx ends. A comparison that takes longer than the
// interval is followed by the next one.
func (s *Source) verifyRegularly(ctx context.Context) {
	turn := time.NewTicker(s.cfg.VerifyInterval)
	defer turn.Stop()
	for {
		select {
		case <-turn.C:
		case <-ctx.Done():
			return
		}
		if s.streams.Load() {
			s.verifyOnce(ctx)
		}
	}
}

// verifyDir gives the directory for what does not fit into memory: where the
// spill is, since that is a disk.
func (s *Source) verifyDir() string {
	if s.spill != nil {
		return filepath.Dir(s.spill.path)
	}
	return os.TempDir()
}

const (
	// verifyMemory bounds the records of one side that are in memory while the
	// daemon compares.
	verifyMemory = 16 << 20
	// verifyDiskShare is the part of SpillLimit that the comparison may use.
	verifyDiskShare = 4
	// minVerifyDisk is what it may use whatever SpillLimit is.
	minVerifyDisk = 1 << 30
)

// verifyOnce compares once and shows what was found.
func (s *Source) verifyOnce(ctx context.Context) {
	m := s.cfg.Metrics.verify
	began := time.Now()
	report, err := s.Verify(ctx, VerifyOptions{
		RowsPerSecond: s.cfg.VerifyRate, Dir: s.verifyDir(), Memory: verifyMemory, Disk: max(s.cfg.SpillLimit/verifyDiskShare, minVerifyDisk),
		Found: func(d *Difference) {
			s.log.ErrorContext(ctx, "source and pipeline differ", "table", d.Table, "kind", string(d.Kind), "key", d.Key)
		},
	})
	m.seconds.Set(time.Since(began).Seconds())
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		m.runs.WithLabelValues(verifyFailed).Inc()
		s.log.WarnContext(ctx, "source and pipeline could not be compared", "err", err)
		st := Status{Check: CheckVerify, Works: true, Message: "the last comparison of source and pipeline failed: " + err.Error()}
		if refused, ok := errors.AsType[*decode.Refusal](err); ok {
			st.Hint = refused.Do
		}
		s.cfg.Report(st)
		return
	}
	s.showReport(report)
	m.last.Set(float64(time.Now().UnixMilli()) / 1e3)
}

// showReport puts what a comparison found into metrics and the check "verify".
func (s *Source) showReport(report *Report) {
	m := s.cfg.Metrics.verify
	result := verifyEqual
	var worst []string
	rows, unsettled, refused := int64(0), 0, 0
	for i := range report.Tables {
		t := &report.Tables[i]
		rows += t.SourceRows
		unsettled += len(t.Unsettled)
		if t.Refused != "" {
			refused++
		}
		m.rows.WithLabelValues("source").Add(float64(t.SourceRows))
		m.rows.WithLabelValues("destination").Add(float64(t.TargetRows))
		m.unsettled.WithLabelValues(t.Table).Set(float64(len(t.Unsettled)))
		for _, kind := range []DifferenceKind{DifferenceMissing, DifferenceGhost, DifferenceStale, DifferenceUnsendable} {
			n := 0
			for j := range t.Differences {
				if t.Differences[j].Kind == kind {
					n++
				}
			}
			m.differences.WithLabelValues(t.Table, string(kind)).Set(float64(n))
		}
		if n := len(t.Differences); n > 0 {
			worst = append(worst, fmt.Sprintf("%d rows of %s (%s %s)", n, t.Table, t.Differences[0].Kind, t.Differences[0].Key))
		}
	}
	st := Status{Check: CheckVerify, OK: true, Works: true, Message: fmt.Sprintf("source and pipeline were equal at %s: %d rows of %d tables", time.Now().UTC().Format(time.RFC3339), rows, len(report.Tables))}
	switch {
	case len(worst) > 0:
		result, st.OK = verifyDifferent, false
		slices.Sort(worst)
		if more := len(worst) - maxNamed; more > 0 {
			worst = append(worst[:maxNamed], fmt.Sprintf("and rows of %d more tables", more))
		}
		st.Message = "source and pipeline differ in " + strings.Join(worst, ", ")
		st.Hint = "pgsource verify lists the rows"
	case unsettled > 0:
		result = verifyUndecided
		st.Message += fmt.Sprintf(", but for %d keys that did not come to rest", unsettled)
	}
	if refused > 0 {
		if result == verifyEqual {
			result = verifyUndecided
		}
		st.Message += fmt.Sprintf("; %d tables cannot be compared, pgsource verify says why", refused)
	}
	m.runs.WithLabelValues(result).Inc()
	s.cfg.Report(st)
}
