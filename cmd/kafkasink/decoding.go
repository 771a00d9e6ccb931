package main

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"holdfast/internal/config"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/ops"
)

// decoding is what the decoders of all topics share.
type decoding struct {
	ignoredRecords *prometheus.CounterVec // topic, kind
	ignoredFields  *prometheus.CounterVec // topic
}

func newDecoding(reg prometheus.Registerer) (*decoding, error) {
	d := &decoding{
		ignoredRecords: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: daemon, Name: "ignored_records_total", Help: "Records that need nothing of the destination, by what they are. Counted when they are read: a batch that is built twice counts them twice.",
		}, []string{"topic", "kind"}),
		ignoredFields: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: daemon, Name: "ignored_fields_total", Help: "Fields of records that are no column of the table. Counted when they are read.",
		}, []string{"topic"}),
	}
	for _, c := range []prometheus.Collector{d.ignoredRecords, d.ignoredFields} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics of decoding: %w", err)
		}
	}
	return d, nil
}

// decoder makes the decoder of one topic.
func (s *sink) decoder(topic config.TopicMapping, table *feldera.Table) (*decode.Topic, error) {
	cfg := s.c.Decoding(topic)
	cfg.Relation = table.Relation()
	fields := s.decoding.ignoredFields.WithLabelValues(topic.Topic)
	cfg.OnUnknown = fields.Inc
	cfg.OnPassed = func(kind decode.Passed) {
		s.decoding.ignoredRecords.WithLabelValues(topic.Topic, string(kind)).Inc()
	}
	d, err := decode.NewTopic(cfg)
	if err != nil {
		return nil, ops.WithExitCode(ops.ExitConfig, fmt.Errorf("topic %s: %w", topic.Topic, err))
	}
	return d, nil
}
