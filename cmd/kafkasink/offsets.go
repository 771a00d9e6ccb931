package main

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"time"

	"holdfast/internal/ops"
	"holdfast/internal/partition"
)

func offsetsShowVerb() ops.Verb {
	return ops.Verb{
		Name: "offsets show", Args: "[TOPIC[:PARTITION]…]", JSON: true, MoreHelp: helpKafkaSink,
		Help: "print what the group has committed, next to what the logs have",
		Run: func(ctx context.Context, call ops.Call) error {
			return operate(ctx, call, func(ctx context.Context, o operation) error {
				now, err := o.offsets(ctx)
				if err != nil {
					return err
				}
				if call.JSON {
					return o.printJSON(now, false)
				}
				return o.printOffsets(now)
			})
		},
	}
}

// offsets reads those that the arguments name.
func (o operation) offsets(ctx context.Context) (partition.GroupOffsets, error) {
	which, err := o.which()
	if err != nil {
		return partition.GroupOffsets{}, err
	}
	now, err := o.admin.Offsets(ctx, o.topics)
	if err != nil {
		return now, err
	}
	now.Offsets, err = named(now.Offsets, func(o *partition.GroupOffset) (string, int32) { return o.Topic, o.Partition }, which)
	return now, err
}

func (o operation) printOffsets(now partition.GroupOffsets) error {
	state := now.State
	if state == "" {
		state = "not known to the brokers"
	}
	if err := o.say("group %s: %s, %d members", now.Group, state, now.Members); err != nil {
		return err
	}
	rows := [][]string{{"TOPIC", "PARTITION", "COMMITTED", "LOG START", "LOG END", "LAG", "LOST", "EPOCH", "CLEAN", "LAST RECORD"}}
	for i := range now.Offsets {
		p := &now.Offsets[i]
		row := []string{
			p.Topic, strconv.Itoa(int(p.Partition)), orNone(p.Committed), strconv.FormatInt(p.LogStart, 10), strconv.FormatInt(p.LogEnd, 10),
			strconv.FormatInt(p.Lag, 10), strconv.FormatInt(p.Lost, 10), "-", "-", stamp(p.Time),
		}
		if p.Epoch > 0 {
			row[7], row[8] = strconv.FormatInt(p.Epoch, 10), strconv.FormatBool(p.Clean)
		}
		if p.Recreated {
			row[9] += " (the topic was made anew since)"
		}
		rows = append(rows, row)
	}
	return o.table(rows)
}

func offsetsResetVerb() ops.Verb {
	var to string
	var yes bool
	return ops.Verb{
		Name: "offsets reset", Args: "[TOPIC[:PARTITION]…]", JSON: true, MoreHelp: helpKafkaSink,
		Help: "set the group's offsets; without -yes only say what would change. The group must have no members",
		Flags: func(f *flag.FlagSet) {
			f.StringVar(&to, "to", "", "earliest, latest, a time such as 2026-01-31T08:00:00Z (the first record that is not older), or an offset")
			f.BoolVar(&yes, "yes", false, "do it")
		},
		Run: func(ctx context.Context, call ops.Call) error {
			target, err := resetTo(to)
			if err != nil {
				return err
			}
			return operate(ctx, call, func(ctx context.Context, o operation) error { return o.reset(ctx, target, yes) })
		},
	}
}

func resetTo(text string) (partition.ResetTo, error) {
	switch text {
	case "earliest":
		return partition.ResetTo{Earliest: true}, nil
	case "latest":
		return partition.ResetTo{Latest: true}, nil
	}
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && n >= 0 {
		return partition.ResetTo{Offset: n}, nil
	}
	if t, err := time.Parse(time.RFC3339, text); err == nil && t.Unix() > 0 {
		return partition.ResetTo{Time: t}, nil
	}
	return partition.ResetTo{}, misuse("-to has to be earliest, latest, a time such as 2026-01-31T08:00:00Z, or an offset")
}

func (o operation) reset(ctx context.Context, to partition.ResetTo, yes bool) error {
	now, err := o.offsets(ctx)
	if err != nil {
		return err
	}
	plan, err := o.admin.PlanReset(ctx, now, to)
	if err != nil {
		return err
	}
	if yes {
		if err := o.admin.Reset(ctx, plan); err != nil {
			return err
		}
	}
	if o.call.JSON {
		return o.printJSON(struct {
			Group string            `json:"group"`
			Done  bool              `json:"done"`
			Reset []partition.Reset `json:"reset"`
		}{now.Group, yes, plan}, false)
	}
	rows := [][]string{{"TOPIC", "PARTITION", "COMMITTED", "SET TO", "EFFECT"}}
	for i := range plan {
		r := &plan[i]
		effect := "none"
		switch {
		case r.Skipped > 0:
			effect = fmt.Sprintf("%d offsets are never read", r.Skipped)
		case r.Again > 0:
			effect = fmt.Sprintf("%d offsets are read again", r.Again)
		}
		rows = append(rows, []string{r.Topic, strconv.Itoa(int(r.Partition)), orNone(r.From), strconv.FormatInt(r.To, 10), effect})
	}
	if err := o.table(rows); err != nil {
		return err
	}
	if yes {
		return o.say("done")
	}
	return o.say("nothing was changed; -yes does it")
}
