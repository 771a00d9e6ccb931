package wal

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"holdfast/internal/feldera"
)

// Metrics are the numbers a Source keeps. Positions are LSNs as byte counts
// of WAL; differences between them are bytes.
type Metrics struct {
	slot     *slotMetrics
	peek     *peekMetrics
	verify   *verifyMetrics
	snapshot *snapshotMetrics
	resync   *resyncMetrics

	transactions prometheus.Counter
	rows         *prometheus.CounterVec
	sentBytes    prometheus.Counter
	truncates    prometheus.Counter
	// truncatesApplied counts the tables that were emptied, truncatedRows the
	// deletes that it took.
	truncatesApplied prometheus.Counter
	truncatedRows    *prometheus.CounterVec
	ignoredColumns   *prometheus.GaugeVec
	absentColumns    *prometheus.GaugeVec
	partitionChanges prometheus.Counter
	retries          *prometheus.CounterVec
	incarnations     prometheus.Counter
	buffered         prometheus.Gauge
	inFlight         prometheus.Gauge
	position         *prometheus.GaugeVec
	receivedLag      prometheus.Gauge
	acknowledgedLag  prometheus.Gauge
	lastCommit       prometheus.Gauge
	lastAcknowledge  prometheus.Gauge
	backpressure     prometheus.Counter
	stateSeconds     prometheus.Histogram
	stateFailures    prometheus.Counter
	spillBytes       prometheus.Gauge
	spillFiles       prometheus.Gauge
	spilled          prometheus.Counter
	spillFaults      *prometheus.CounterVec
	// transactionSince is when the open Feldera transaction of ours was begun,
	// in Unix nanoseconds; 0 while none is open.
	transactionSince *atomic.Int64
	destinationTx    *prometheus.CounterVec
	progressFound    *prometheus.CounterVec
	heldAlready      prometheus.Counter
	slotRetained     prometheus.Gauge
	// slotSafe has no label: as a vector it can be absent, which is what it is
	// on servers without max_slot_wal_keep_size.
	slotSafe   *prometheus.GaugeVec
	slotActive prometheus.Gauge
	slotStatus *prometheus.GaugeVec
}

// NewMetrics makes the metrics and registers them.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	m := &Metrics{
		slot:     newSlotMetrics(reg),
		peek:     newPeekMetrics(reg),
		verify:   newVerifyMetrics(reg),
		snapshot: newSnapshotMetrics(reg),
		resync:   newResyncMetrics(reg),

		transactions: counter("pgsource_transactions_total", "Transactions received whole, by their COMMIT."),
		rows: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_rows_total", Help: "Row changes accepted by Feldera, by source table and operation.",
		}, []string{"table", "op"}),
		sentBytes:        counter("pgsource_sent_bytes_total", "Bytes of request bodies accepted by Feldera."),
		truncates:        counter("pgsource_truncates_ignored_total", "TRUNCATEs that were let pass because PGSOURCE_TRUNCATE=ignore."),
		truncatesApplied: counter("pgsource_truncates_applied_total", "Feldera tables that were emptied after a TRUNCATE because PGSOURCE_TRUNCATE=delete_all."),
		truncatedRows: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_truncated_rows_total", Help: "Rows that were deleted from the Feldera table for a TRUNCATE.",
		}, []string{"table"}),
		ignoredColumns: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "pgsource_ignored_columns", Help: "Columns of the source table that are left out because PGSOURCE_EXTRA_COLUMNS=ignore.",
		}, []string{"table"}),
		absentColumns: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "pgsource_absent_columns", Help: "Columns of the Feldera table that the source table does not have: NULL in every row.",
		}, []string{"table"}),
		partitionChanges: counter("pgsource_partition_changes_ignored_total", "Changes of partitions that moved rows without the stream and were let pass because PGSOURCE_PARTITIONS=ignore."),
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_retries_total", Help: "Attempts that were repeated, by what was attempted.",
		}, []string{"target"}),
		incarnations:    counter("pgsource_destination_restarts_total", "Changes of the pipeline's incarnation that were noticed."),
		buffered:        gauge("pgsource_buffered_bytes", "Bytes of received changes held in memory."),
		inFlight:        gauge("pgsource_inflight_batches", "Batches accepted by Feldera and not yet completed."),
		receivedLag:     gauge("pgsource_received_lag_bytes", "WAL between the server's position and what was received."),
		acknowledgedLag: gauge("pgsource_acknowledged_lag_bytes", "WAL between the server's position and what was acknowledged to it."),
		lastCommit:      gauge("pgsource_last_commit_timestamp_seconds", "Commit time of the last transaction received."),
		lastAcknowledge: gauge("pgsource_last_acknowledged_timestamp_seconds", "When the acknowledged position last moved."),
		backpressure:    counter("pgsource_backpressure_disconnects_total", "Times the stream was closed on purpose because PGSOURCE_MEMORY_LIMIT was reached."),
		stateSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "pgsource_state_save_seconds", Help: "How long it took to make the bookmark durable; saves that failed are left out.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 4, 8),
		}),
		stateFailures: counter("pgsource_state_save_failures_total", "Saves of the bookmark that failed; each is repeated."),
		spillBytes:    gauge("pgsource_spill_bytes", "Bytes on disk of received changes that did not fit into memory."),
		spillFiles:    gauge("pgsource_spill_files", "Files of the spill."),
		spilled:       counter("pgsource_spilled_transactions_total", "Transactions that were moved to disk, in whole or in part."),
		spillFaults: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_spill_faults_total", Help: "Times the spill did not take or give back what it should: full, disk or damaged.",
		}, []string{"reason"}),
		transactionSince: new(atomic.Int64),
		destinationTx: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_destination_transactions_total", Help: "Transactions of the pipeline: begun, resumed after a crash, committed, or taken by somebody else's commit.",
		}, []string{"event"}),
		progressFound: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_progress_decisions_total", Help: "What the pipeline's progress table was found to say: fresh, equal, ahead (skipped), lost, remapped, reset or foreign.",
		}, []string{"found"}),
		heldAlready:  counter("pgsource_held_transactions_total", "Transactions that were not sent again, since the pipeline provably held them."),
		slotRetained: gauge("pgsource_slot_retained_bytes", "WAL that the slot keeps on the server's disk."),
		slotSafe: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "pgsource_slot_safe_wal_bytes", Help: "WAL that can be written before the slot is in danger; absent without max_slot_wal_keep_size.",
		}, nil),
		slotActive: gauge("pgsource_slot_active", "1 while a walsender, or a call with PGSOURCE_TRANSPORT=peek, uses the slot."),
		position: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "pgsource_position_bytes", Help: "The LSN up to which everything has reached the rung, as a byte position in the WAL; bookmarked is what the state store holds.",
		}, []string{"rung"}),
		slotStatus: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "pgsource_slot_status", Help: "1 for the slot's wal_status, 0 for the others.",
		}, []string{"status"}),
	}
	openSeconds := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "pgsource_destination_transaction_open_seconds", Help: "How long the pipeline's transaction that pgsource opened has been open; 0 while none is.",
	}, func() float64 {
		since := m.transactionSince.Load()
		if since == 0 {
			return 0
		}
		return time.Since(time.Unix(0, since)).Seconds()
	})
	for _, reason := range []string{"full", "disk", "damaged"} {
		m.spillFaults.WithLabelValues(reason)
	}
	for _, event := range []string{txBegun, txResumed, txCommitted, txTaken} {
		m.destinationTx.WithLabelValues(event)
	}
	for found := feldera.ProgressFresh; found <= feldera.ProgressForeign; found++ {
		m.progressFound.WithLabelValues(found.String())
	}
	reg.MustRegister(m.progressFound, m.heldAlready, m.absentColumns, m.partitionChanges, m.truncatesApplied, m.truncatedRows, openSeconds, m.spillBytes, m.spillFiles, m.spilled, m.spillFaults, m.destinationTx, m.transactions, m.ignoredColumns, m.rows, m.sentBytes, m.truncates, m.retries, m.incarnations, m.buffered, m.inFlight,
		m.position, m.receivedLag, m.acknowledgedLag, m.lastCommit, m.lastAcknowledge, m.backpressure, m.stateSeconds, m.stateFailures,
		m.slotRetained, m.slotSafe, m.slotActive, m.slotStatus)
	return m
}

// slotStatuses are Postgres' values of wal_status.
var slotStatuses = []string{"reserved", "extended", "unreserved", "lost"}

func (m *Metrics) setSlotStatus(status string) {
	for _, s := range slotStatuses {
		v := 0.0
		if s == status {
			v = 1
		}
		m.slotStatus.WithLabelValues(s).Set(v)
	}
}
