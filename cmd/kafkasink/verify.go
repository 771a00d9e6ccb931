package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"holdfast/internal/feldera"
	"holdfast/internal/ops"
	"holdfast/internal/partition"
)

// verify is what the verb was asked to do.
type verify struct {
	all     bool
	rows    bool
	wait    time.Duration
	timeout time.Duration
}

// verifyVerb holds the group's offsets, the progress table and the logs against
// each other. It takes part in nothing.
func verifyVerb() ops.Verb {
	ask := &verify{}
	return ops.Verb{
		Name: "verify", Args: "[TOPIC[:PARTITION]…]", JSON: true, MoreHelp: helpKafkaSink,
		Help: "hold the group's offsets, what the pipeline proves to hold and the logs against each other: exit code 0 they agree, 65 they differ, 69 not decided",
		Flags: func(f *flag.FlagSet) {
			f.BoolVar(&ask.all, "all", false, "print every partition, and not only those that need a line")
			f.BoolVar(&ask.rows, "rows", false, "also look for the last row of each partition in tables with identity columns; reads these tables as a whole")
			f.DurationVar(&ask.wait, "wait", 15*time.Second, "how long to look again at what looks wrong while the group has members")
			f.DurationVar(&ask.timeout, "timeout", 5*time.Minute, "give up after this")
		},
		Run: func(ctx context.Context, call ops.Call) error {
			if ask.wait < 0 || ask.timeout <= 0 {
				return misuse("-wait must not be negative, and -timeout has to be above 0")
			}
			return operate(ctx, call, func(ctx context.Context, o operation) error { return ask.run(ctx, o) })
		},
	}
}

func (v *verify) run(ctx context.Context, o operation) error {
	which, err := o.which()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, v.timeout, fmt.Errorf("no end within -timeout %v: %w", v.timeout, context.DeadlineExceeded))
	defer cancel()
	pipeline, err := feldera.New(felderaConfig(o.c))
	if err != nil {
		return ops.WithExitCode(ops.ExitConfig, err)
	}
	defer pipeline.CloseIdle()
	schema, err := pipeline.Describe(ctx)
	if err != nil {
		return err
	}
	opts := partition.VerifyOptions{
		Pipeline: pipeline, Start: partition.StartPolicy(o.c.Start), OnLoss: partition.LossPolicy(o.c.OnLoss), Wait: v.wait,
		Progress: partition.Progress{Open: func(source string) (*feldera.ProgressStore, error) {
			return pipeline.Progress(schema, o.c.ProgressTable, source, "")
		}},
	}
	if opts.Topics, err = v.topics(o, schema, which); err != nil {
		return err
	}
	if len(which) > 0 {
		opts.Only = func(topic string, partition int32) bool {
			return slices.ContainsFunc(which, func(a at) bool { return a.names(topic, partition) })
		}
	}
	report, err := o.admin.Verify(ctx, opts)
	if err != nil {
		return err
	}
	_, err = named(report.Partitions, func(p *partition.PartitionVerified) (string, int32) { return p.Topic, p.Partition }, which)
	if err != nil {
		return err
	}
	return v.say(o, report)
}

// topics gives those that are to be compared, with their tables.
func (v *verify) topics(o operation, schema *feldera.Schema, which []at) ([]partition.VerifyTopic, error) {
	var out []partition.VerifyTopic
	for _, m := range o.mapped {
		if len(which) > 0 && !slices.ContainsFunc(which, func(a at) bool { return a.topic == m.Topic }) {
			continue
		}
		table, err := schema.Table(m.Table)
		if err != nil {
			return nil, err
		}
		identity, err := table.Identity()
		if err != nil {
			return nil, err
		}
		t := partition.VerifyTopic{Topic: m.Topic, Table: table.Spelling()}
		if identity && v.rows {
			t.Rows = table
		}
		out = append(out, t)
	}
	if len(out) == 0 {
		return nil, errors.New("no topic matches KAFKASINK_TOPICS: there is nothing to compare")
	}
	return out, nil
}

// say prints what was found, and gives the exit code for it.
func (v *verify) say(o operation, r *partition.VerifyReport) error {
	worst := r.Worst()
	var err error
	if o.call.JSON {
		err = o.printJSON(struct {
			Agree     bool `json:"agree"`
			Undecided bool `json:"undecided"`
			*partition.VerifyReport
		}{worst != partition.Differs && worst != partition.Undecided, worst == partition.Undecided, r}, false)
	} else {
		err = v.print(o, r)
	}
	switch {
	case err != nil:
		return err
	case worst == partition.Differs:
		return ops.WithExitCode(ops.ExitRefused, nil)
	case worst == partition.Undecided:
		return ops.WithExitCode(ops.ExitUnavailable, nil)
	}
	return nil
}

// maxVerifyLines bounds the partitions, and the strays, that are written as text.
const maxVerifyLines = 200

func (v *verify) print(o operation, r *partition.VerifyReport) error {
	state := r.State
	if state == "" {
		state = "not known to the brokers"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "group %s: %s, %d members; pipeline incarnation %s\n", r.Group, state, r.Members, oneLine(r.Incarnation, 80))
	if err := o.say("%s", strings.TrimSuffix(b.String(), "\n")); err != nil {
		return err
	}
	var lines []*partition.PartitionVerified
	count := map[partition.Effect]int{}
	proven := 0
	for i := range r.Partitions {
		p := &r.Partitions[i]
		count[p.Worst()]++
		if p.Proven {
			proven++
		}
		if v.all || len(p.Findings) > 0 {
			lines = append(lines, p)
		}
	}
	more := max(len(lines)-maxVerifyLines, 0)
	lines = lines[:len(lines)-more]
	if err := o.table(verifyRows(lines)); err != nil {
		return err
	}
	b.Reset()
	say := func(where string, f *partition.Finding) {
		fmt.Fprintf(&b, "%s: %s (%s): %s\n", where, f.Name, f.Effect, oneLine(f.Says, maxVerifyText))
		if f.Do != "" {
			fmt.Fprintf(&b, "  do: %s\n", oneLine(f.Do, maxVerifyText))
		}
	}
	for _, p := range lines {
		for i := range p.Findings {
			say(fmt.Sprintf("%s[%d]", p.Topic, p.Partition), &p.Findings[i])
		}
	}
	for i := range r.Findings {
		say("group "+r.Group, &r.Findings[i])
	}
	if more > 0 {
		fmt.Fprintf(&b, "… and %d more partitions: -json has them\n", more)
	}
	verifyStrays(&b, r.Strays)
	if !r.Progress {
		fmt.Fprintf(&b, "the progress table was not compared: %s\n", oneLine(r.Why, maxVerifyText))
	}
	if !r.LeaderEpochs {
		b.WriteString("leader epochs were not compared: the brokers do not answer for them\n")
	}
	fmt.Fprintf(&b, "%d partitions: %d differ, %d not decided, %d agree; of %d the pipeline proves to hold what was committed. Rows themselves are not compared%s.\n",
		len(r.Partitions), count[partition.Differs], count[partition.Undecided], count[partition.Harmless]+count[""], proven, v.exceptRows())
	verdict := "they agree"
	switch r.Worst() {
	case partition.Differs:
		verdict = "DIFFERENT"
	case partition.Undecided:
		verdict = "not decided"
	case partition.Harmless:
	}
	b.WriteString(verdict)
	return o.say("%s", b.String())
}

// maxVerifyText bounds a sentence, in characters.
const maxVerifyText = 2000

func (v *verify) exceptRows() string {
	if v.rows {
		return " but for the last one of each partition, in tables with identity columns"
	}
	return ""
}

func verifyRows(lines []*partition.PartitionVerified) [][]string {
	if len(lines) == 0 {
		return nil
	}
	rows := [][]string{{"TOPIC", "PARTITION", "COMMITTED", "HELD", "LOG START", "LOG END", "FOUND"}}
	for _, p := range lines {
		names := make([]string, 0, len(p.Findings))
		for i := range p.Findings {
			names = append(names, p.Findings[i].Name)
		}
		if len(names) == 0 {
			names = append(names, "-")
		}
		rows = append(rows, []string{
			p.Topic, strconv.Itoa(int(p.Partition)), orNone(p.Committed), orNone(p.Held), orNone(p.LogStart), orNone(p.LogEnd), strings.Join(names, ","),
		})
	}
	return rows
}

// verifyStrays writes about progress rows of partitions that are none of these.
func verifyStrays(b *strings.Builder, strays []partition.StrayProgress) {
	for i, s := range strays {
		if i == maxVerifyLines {
			fmt.Fprintf(b, "… and %d more partitions with progress rows: -json has them\n", len(strays)-i)
			return
		}
		what := "no topic has this id: it was deleted, or made anew"
		if s.Topic != "" {
			what = fmt.Sprintf("it is topic %s, which is none of KAFKASINK_TOPICS", s.Topic)
		}
		fmt.Fprintf(b, "%d progress rows of %s, up to offset %d, are not compared: %s. They do no harm, and may be deleted once the group is done with it\n",
			s.Rows, oneLine(s.Lane, 120), s.Position, oneLine(what, 300))
	}
}
