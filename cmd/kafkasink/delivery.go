package main

import (
	"context"
	"fmt"

	"holdfast/internal/config"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/ops"
	"holdfast/internal/partition"
)

// This file is about the level of delivery, and about what the pipeline lost.

// canRecord tells why the pipeline does not allow effectively_once, by name
// and with what mends it; nil where it does.
func (s *sink) canRecord(schema *feldera.Schema) error {
	if _, err := s.pipeline.Progress(schema, s.c.ProgressTable, s.c.Group, ""); err != nil {
		return err
	}
	for _, topic := range s.topics {
		table, err := schema.Table(topic.Table)
		if err != nil {
			return err
		}
		if !table.HasKey() {
			return &decode.Refusal{
				Reason: decode.ReasonSetup, What: "KAFKASINK_DELIVERY=effectively_once", Where: "table " + table.Spelling(),
				Why:      "it has no PRIMARY KEY in Feldera, so rows that are sent again after a crash count twice",
				Expected: "a PRIMARY KEY: one of the rows, or identity columns",
				Do:       "declare it; or set KAFKASINK_DELIVERY=at_least_once and accept duplicates",
			}
		}
	}
	return nil
}

// delivery finds the session's level of delivery. It gives nil for
// at_least_once, and a refusal where effectively_once was asked for by name
// and the pipeline does not allow it.
func (s *sink) delivery(ctx context.Context, schema *feldera.Schema) (*partition.Progress, error) {
	why := error(nil)
	if s.c.Delivery != config.AtLeastOnce {
		why = s.canRecord(schema)
	}
	s.effective = why == nil && s.c.Delivery != config.AtLeastOnce
	message := s.levelText(why)
	switch {
	case why != nil && s.c.Delivery == config.EffectivelyOnce:
		return nil, fmt.Errorf("KAFKASINK_DELIVERY=effectively_once: %w", why)
	case why != nil:
		s.rt.Logger.WarnContext(ctx, "delivery at least once: the pipeline does not allow more", "err", why)
	default:
		s.rt.Logger.InfoContext(ctx, "level of delivery", "level", message)
	}
	s.rt.Health.Set(checkDelivery, ops.Check{OK: true, Message: message})
	if !s.effective {
		return nil, nil //nolint:nilnil // absence is the answer
	}
	return &partition.Progress{Open: func(source string) (*feldera.ProgressStore, error) {
		return s.pipeline.Progress(schema, s.c.ProgressTable, source, "")
	}}, nil
}

// levelText says which level holds, and why not more.
func (s *sink) levelText(why error) string {
	switch {
	case why != nil:
		return "at_least_once, since effectively_once cannot be held: " + why.Error()
	case s.c.Delivery == config.AtLeastOnce:
		return "at_least_once, as set"
	}
	return "effectively_once, recorded in " + s.c.ProgressTable
}

// restarted says what another incarnation of the pipeline means. With
// effectively_once the progress table tells what is lost, in the next session;
// otherwise nobody can, which ends the daemon where it is to stop.
func (s *sink) restarted(ctx context.Context, changed *feldera.IncarnationChanged) error {
	if s.effective {
		s.rt.Logger.WarnContext(ctx, "the pipeline is another incarnation: what it holds is found out before anything is sent", "was", changed.Was, "now", changed.Now)
		return nil
	}
	why := fmt.Sprintf("the pipeline restarted (incarnation %s, before %s): rows whose offsets were committed may be missing from it", changed.Now, changed.Was)
	s.rt.Logger.ErrorContext(ctx, "the pipeline is another incarnation: uncommitted records are delivered again, committed ones may be lost",
		"was", changed.Was, "now", changed.Now)
	if s.c.OnLoss == config.Stop {
		return &decode.Refusal{
			Reason: decode.ReasonGap, What: "pipeline", Where: "group " + s.c.Group, Why: why,
			Expected: "the same incarnation, since KAFKASINK_ON_DESTINATION_LOSS is stop",
			Do:       "compare the tables with the topics, then set the offsets from which to go on: kafkasink offsets reset",
		}
	}
	s.rt.Health.Set(checkState, ops.Check{
		Blocking: true, Message: why,
		Hint: "compare the tables with the topics; if rows are missing, reset the group's offsets to where they begin, then restart kafkasink to clear this",
	})
	return nil
}

// showLoss says what the pipeline lost: offsets that cannot be delivered again
// until a person has seen to them, others while they are delivered again.
func (s *sink) showLoss(st *partition.Status) {
	if !s.effective {
		return
	}
	c := ops.Check{OK: true, Message: "the pipeline holds what was committed"}
	gone, again := 0, 0
	for i := range st.Partitions {
		p := &st.Partitions[i]
		switch {
		case p.GoneTo > p.GoneFrom:
			if gone++; gone == 1 {
				c = ops.Check{
					Blocking: true,
					Message: fmt.Sprintf("the pipeline lost rows of %s[%d], and retention had taken offsets %d to %d (%d of them) from the log: what they changed, deletes included, is missing from table %s",
						p.Topic, p.Partition, p.GoneFrom, p.GoneTo-1, p.GoneTo-p.GoneFrom, p.Table),
					Hint: fmt.Sprintf("load what is missing from where the topic has it from, then set the offset once more to clear this: kafkasink offsets reset -to OFFSET -yes %s:%d", p.Topic, p.Partition),
				}
			}
		case p.Until > 0:
			if again++; again == 1 && gone == 0 {
				c = ops.Check{
					Message: fmt.Sprintf("the pipeline lost rows: %s[%d] is delivered again, and is at offset %d of %d", p.Topic, p.Partition, p.Committed, p.Until),
					Hint:    "wait; the group's offsets went back on purpose",
				}
			}
		}
	}
	if more := gone - 1; more > 0 {
		c.Message += fmt.Sprintf("; and %d more partitions", more)
	} else if more := again - 1; gone == 0 && more > 0 {
		c.Message += fmt.Sprintf("; and %d more partitions", more)
	}
	s.rt.Health.Set(checkState, c)
}
