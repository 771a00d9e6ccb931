package partition

import (
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"holdfast/internal/feldera"
	"holdfast/internal/partition/lane"
)

// Metrics are the consumer's metrics. Counters live as long as the Metrics;
// what describes the present is read from the consumer when it is scraped, so
// a partition that is not assigned, or whose lag is unknown, is absent.
//
// Labels: topics and tables come from the configuration, partitions are the
// assigned ones, and the rest are closed sets.
type Metrics struct {
	records     *prometheus.CounterVec // topic
	sent        *prometheus.CounterVec // table
	skipped     *prometheus.CounterVec // topic, reason
	deadLetters *prometheus.CounterVec // topic, reason
	stopped     *prometheus.CounterVec // topic, reason
	dropped     *prometheus.CounterVec // cause
	late        *prometheus.CounterVec // rung
	commits     *prometheus.CounterVec // outcome
	gaps        *prometheus.CounterVec // reason
	drains      *prometheus.CounterVec // outcome
	rebalances  prometheus.Counter
	fetchErrors prometheus.Counter
	// progressFound counts decisions about the progress table.
	progressFound                            *prometheus.CounterVec // found
	heldOffsets, rewoundOffsets, goneOffsets prometheus.Counter
	// letterFailures counts the attempts to write a dead letter that failed.
	letterFailures prometheus.Counter

	consumer atomic.Pointer[Consumer]

	mu     sync.Mutex
	paused map[cause]time.Duration // pauses that have ended

	lag, lagAge, headroomRecords, headroom, retentionLeft, pausedNow, committedAt, position, inflightRecords, inflightBytes, assigned, lanes, heldLanes, pausedSeconds, rejoins *prometheus.Desc
}

const namespace = "kafkasink"

func newMetrics() *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	}
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(namespace+"_"+name, help, labels, nil)
	}
	plain := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help})
	}
	m := &Metrics{
		progressFound:  counter("progress_decisions_total", "What the pipeline's progress table was found to say of a partition that was taken: fresh, equal, ahead (skipped), lost, remapped, reset or foreign.", "found"),
		heldOffsets:    plain("held_offsets_total", "Offsets passed over, since the pipeline held their rows although they were not committed."),
		rewoundOffsets: plain("rewound_offsets_total", "Offsets that were committed and are delivered again, since the pipeline had lost their rows."),
		goneOffsets:    plain("gone_offsets_total", "Offsets whose rows the pipeline had lost when retention had taken them from the log. They cannot be delivered again."),
		records:        counter("records_total", "Records received and admitted.", "topic"),
		sent:           counter("sent_rows_total", "Changes in arrays that Feldera accepted.", "table"),
		skipped:        counter("skipped_records_total", "Records passed over by the poison policy skip.", "topic", "reason"),
		deadLetters:    counter("dead_letter_records_total", "Records passed over after the dead-letter topic had acknowledged them.", "topic", "reason"),
		stopped:        counter("stopped_partitions_total", "Times that a partition stopped in front of a record or a gap, by reason.", "topic", "reason"),
		letterFailures: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "dead_letter_failures_total", Help: "Attempts to write to the dead-letter topic that failed. The partition waits and tries again.",
		}),
		dropped: counter("dropped_records_total", "Records not admitted: fetched twice, for a partition that stopped, or for one that is not assigned. None of them is lost; they are read again if they were not delivered.", "cause"),
		late:    counter("late_evidence_records_total", "Records whose evidence arrived after their partition was given up, by the rung they reached. It moved no position.", "rung"),
		commits: counter("commits_total", "Partition offsets committed, by outcome: ok, unanswered, or Kafka's error name.", "outcome"),
		gaps:    counter("gaps_total", "Times that a log no longer had what came next, or was another log.", "reason"),
		drains:  counter("drains_total", "Times that partitions were given up, by how the wait for evidence ended.", "outcome"),
		rebalances: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "rebalances_total", Help: "Assignments received from the consumer group.",
		}),
		fetchErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "fetch_errors_total", Help: "Errors that came from polling.",
		}),
		paused:          make(map[cause]time.Duration),
		lag:             desc("partition_lag_records", "Log end less committed offset. Absent while unknown.", "topic", "partition"),
		lagAge:          desc("partition_lag_seconds", "Age of the next record to commit, by its own timestamp; 0 when there is none. Absent while unknown.", "topic", "partition"),
		headroomRecords: desc("partition_retention_headroom_records", "Committed offset less the log's start: what retention can take before it takes what was not read. Absent where retention deletes nothing or is unknown.", "topic", "partition"),
		headroom:        desc("partition_retention_headroom_seconds", "The topic's retention.ms less the age of the next record to commit. Absent where age deletes nothing or is unknown.", "topic", "partition"),
		retentionLeft:   desc("partition_retention_left_seconds", "Time until retention reaches the committed offset, at the pace of the last minutes. Absent while it comes no nearer.", "topic", "partition"),
		pausedNow:       desc("partition_paused", "1 while the partition is not fetched, by cause.", "topic", "partition", "cause"),
		committedAt:     desc("partition_last_committed_timestamp_seconds", "Timestamp of the last record below the committed offset.", "topic", "partition"),
		position:        desc("partition_position_offset", "Next offset at each rung of evidence.", "topic", "partition", "rung"),
		inflightRecords: desc("inflight_records", "Records received and not completed."),
		inflightBytes:   desc("inflight_bytes", "Bytes of records received and not completed."),
		assigned:        desc("assigned_partitions", "Partitions assigned to this member."),
		lanes:           desc("partitions", "Assigned partitions by state.", "state"),
		heldLanes:       desc("held_partitions", "Partitions that stand in front of a record until something outside answers: what the decoder needs, or the dead-letter topic.", "cause"),
		pausedSeconds:   desc("paused_seconds_total", "Time that partitions were not fetched, summed over partitions.", "cause"),
		rejoins:         desc("expulsions_total", "Times that the group expelled this member and it joined anew."),
	}
	for found := feldera.ProgressFresh; found <= feldera.ProgressForeign; found++ {
		m.progressFound.WithLabelValues(found.String())
	}
	return m
}

// NewMetrics makes the metrics and registers them. They can be used by several
// Consumers one after the other.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	m := newMetrics()
	if err := reg.Register(m); err != nil {
		return nil, fmt.Errorf("register consumer metrics: %w", err)
	}
	return m, nil
}

func (m *Metrics) addPaused(why cause, d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused[why] += d
}

func (m *Metrics) counters() []prometheus.Collector {
	return []prometheus.Collector{m.records, m.sent, m.skipped, m.deadLetters, m.stopped, m.letterFailures, m.dropped, m.late, m.commits, m.gaps, m.drains, m.rebalances, m.fetchErrors, m.progressFound, m.heldOffsets, m.rewoundOffsets, m.goneOffsets}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.counters() {
		c.Describe(ch)
	}
	for _, d := range []*prometheus.Desc{m.lag, m.lagAge, m.headroomRecords, m.headroom, m.retentionLeft, m.pausedNow, m.committedAt, m.position, m.inflightRecords, m.inflightBytes, m.assigned, m.lanes, m.heldLanes, m.pausedSeconds, m.rejoins} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.counters() {
		c.Collect(ch)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	paused := make(map[cause]time.Duration, len(causes))
	var st Status
	if c := m.consumer.Load(); c != nil {
		st = c.Snapshot()
		if s := c.current.Load(); s != nil {
			paused = s.pausedSeconds(time.Now())
		}
		ch <- prometheus.MustNewConstMetric(m.rejoins, prometheus.CounterValue, float64(c.restarts.Load()))
	}
	m.mu.Lock()
	for why, d := range m.paused {
		paused[why] += d
	}
	m.mu.Unlock()
	for _, why := range causes {
		ch <- prometheus.MustNewConstMetric(m.pausedSeconds, prometheus.CounterValue, paused[why].Seconds(), string(why))
	}

	var records int
	var bytes int64
	holds := make(map[holdCause]int, len(holdCauses))
	states := map[string]int{lane.Live.String(): 0, lane.Blocked.String(): 0, lane.Draining.String(): 0}
	for i := range st.Partitions {
		p := &st.Partitions[i]
		records += p.QueuedRecords + p.InFlightRecords
		bytes += p.QueuedBytes + p.InFlightBytes
		states[p.State.String()]++
		if p.Held != nil {
			holds[p.heldBy]++
		}
		if p.NotTaken {
			continue
		}
		number := strconv.Itoa(int(p.Partition))
		if p.LagKnown {
			gauge(m.lag, float64(p.Lag), p.Topic, number)
			gauge(m.lagAge, p.LagAge.Seconds(), p.Topic, number)
		}
		if p.Paused != "" {
			gauge(m.pausedNow, 1, p.Topic, number, p.Paused)
		}
		if r := p.Retention; r != nil {
			gauge(m.headroomRecords, float64(r.Records), p.Topic, number)
			if r.Limit > 0 {
				gauge(m.headroom, r.Headroom.Seconds(), p.Topic, number)
			}
			if r.Approaching {
				gauge(m.retentionLeft, r.Left.Seconds(), p.Topic, number)
			}
		}
		if !p.CommittedTime.IsZero() {
			gauge(m.committedAt, float64(p.CommittedTime.UnixMilli())/1000, p.Topic, number)
		}
		for rung, at := range map[string]int64{"received": p.Received, "accepted": p.Accepted, "ingested": p.Ingested, "completed": p.Completed} {
			gauge(m.position, float64(at), p.Topic, number, rung)
		}
		if p.Committed != lane.NoCommit {
			gauge(m.position, float64(p.Committed), p.Topic, number, "acknowledged")
		}
	}
	gauge(m.inflightRecords, float64(records))
	gauge(m.inflightBytes, float64(bytes))
	gauge(m.assigned, float64(st.Assigned))
	for _, why := range holdCauses {
		gauge(m.heldLanes, float64(holds[why]), string(why))
	}
	for state, n := range states {
		gauge(m.lanes, float64(n), state)
	}
}
