package wal

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// slotMetrics are the numbers about the slot and the connection to it.
type slotMetrics struct {
	lag       *lag
	takeovers prometheus.Counter
	skipped   prometheus.Counter
	growth    prometheus.Gauge
	left      *prometheus.GaugeVec // no label: absent where there is nothing to run out
	// looked is when a look at the slot last worked, in Unix nanoseconds; 0 before
	// any was begun.
	looked atomic.Int64
	// spilledTransactions and spilledBytes are the server's own counts.
	spilledTransactions, spilledBytes atomic.Int64
}

func newSlotMetrics(reg prometheus.Registerer) *slotMetrics {
	m := &slotMetrics{
		lag: &lag{now: time.Now},
		takeovers: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "pgsource_takeovers_total", Help: "Silent replication connections of a pgsource that were ended because they held the slot.",
		}),
		skipped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "pgsource_skipped_transactions_total", Help: "Transactions that were passed over because of pgsource skip; one that is read again after a crash counts again.",
		}),
		growth: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "pgsource_slot_retained_bytes_per_second", Help: "How fast the WAL that the slot keeps grows, over the last five minutes; negative while it shrinks.",
		}),
		left: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "pgsource_slot_time_left_seconds", Help: "When the slot reaches max_slot_wal_keep_size at this pace; absent while it does not get nearer.",
		}, nil),
	}
	reg.MustRegister(m.takeovers, m.skipped, m.growth, m.left,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "pgsource_received_lag_seconds", Help: "Age, by the server's clock, of the oldest WAL that the server had at a look and that was not received; looks are ten seconds apart.",
		}, func() float64 { return m.lag.received().Seconds() }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "pgsource_acknowledged_lag_seconds", Help: "Age, by the server's clock, of the oldest commit or WAL that was not acknowledged; 0 when all is.",
		}, func() float64 { return m.lag.acknowledged().Seconds() }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "pgsource_slot_look_age_seconds", Help: "Time since slot, publication and tables were last looked at with success; looks are ten seconds apart. What the other metrics of the slot show is as old.",
		}, func() float64 {
			at := m.looked.Load()
			if at == 0 {
				return 0
			}
			return time.Since(time.Unix(0, at)).Seconds()
		}),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "pgsource_server_spilled_transactions_total", Help: "Transactions that the server wrote to its own disk while decoding for this slot, as pg_stat_replication_slots has it.",
		}, func() float64 { return float64(m.spilledTransactions.Load()) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "pgsource_server_spilled_bytes_total", Help: "Bytes that the server wrote to its own disk while decoding for this slot; raise logical_decoding_work_mem where it grows fast.",
		}, func() float64 { return float64(m.spilledBytes.Load()) }))
	return m
}

// peekMetrics are the numbers about a slot that is read over plain SQL.
type peekMetrics struct {
	seconds  *prometheus.HistogramVec
	messages *prometheus.CounterVec
}

func newPeekMetrics(reg prometheus.Registerer) *peekMetrics {
	m := &peekMetrics{
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "pgsource_peek_seconds", Help: "How long calls to the server took with PGSOURCE_TRANSPORT=peek, by call: peek, with the answer read, and advance.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 10),
		}, []string{"call"}),
		messages: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_peek_messages_total", Help: "Messages of pgoutput in answers to peeks: new, or repeated since they were received before and are not acknowledged.",
		}, []string{"kind"}),
	}
	for _, call := range []string{"peek", "advance"} {
		m.seconds.WithLabelValues(call)
	}
	for _, kind := range []string{"new", "repeated"} {
		m.messages.WithLabelValues(kind)
	}
	reg.MustRegister(m.seconds, m.messages)
	return m
}
