package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"holdfast/internal/config"
	"holdfast/internal/decode"
	"holdfast/internal/ops"
	"holdfast/internal/partition"
)

// operation is what the verbs share that look at the brokers by themselves.
type operation struct {
	call   ops.Call
	c      *config.KafkaSink
	mapped config.TopicMappings // the topics of KAFKASINK_TOPICS by name, with their tables
	topics []string
	admin  *partition.Admin
}

// operate runs a verb with a connection to the brokers. A signal ends it.
func operate(ctx context.Context, call ops.Call, do func(ctx context.Context, o operation) error) error {
	ctx, release := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer release()
	c, err := config.LoadKafkaSink(call.Environ)
	if err != nil {
		return err
	}
	cfg, err := connection(c)
	if err != nil {
		return err
	}
	rt, err := ops.LookingRuntime(daemon)
	if err != nil {
		return err
	}
	cfg.Logger = rt.Logger
	o := operation{call: call, c: c}
	if o.admin, err = partition.NewAdmin(ctx, cfg); err != nil {
		return err
	}
	defer o.admin.Close()
	topics := c.Topics
	if topics.HasPatterns() {
		names, err := o.admin.Topics(ctx)
		if err != nil {
			return ops.WithExitCode(ops.ExitUnavailable, err)
		}
		topics = topics.Expand(names, c.DLQTopic)
	}
	o.mapped = topics
	for _, t := range topics {
		o.topics = append(o.topics, t.Topic)
	}
	err = do(ctx, o)
	var refused *decode.Refusal
	var coded interface{ ExitCode() int }
	if err != nil && !errors.As(err, &refused) && !errors.As(err, &coded) {
		return ops.WithExitCode(ops.ExitUnavailable, err) // it could not be asked, or did not answer
	}
	return err
}

func misuse(format string, args ...any) error {
	return ops.WithExitCode(ops.ExitUsage, fmt.Errorf(format, args...))
}

// printJSON writes one value, on one line where line is set.
func (o operation) printJSON(v any, line bool) error {
	enc := json.NewEncoder(o.call.Stdout)
	if !line {
		enc.SetIndent("", "  ")
	}
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}

// table writes rows in columns.
func (o operation) table(rows [][]string) error {
	w := tabwriter.NewWriter(o.call.Stdout, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		if _, err := fmt.Fprintln(w, strings.Join(r, "\t")); err != nil {
			return fmt.Errorf("print the result: %w", err)
		}
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}

func (o operation) say(format string, args ...any) error {
	if _, err := fmt.Fprintf(o.call.Stdout, format+"\n", args...); err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}

// at is a partition that an argument named; partition is -1 for all of them.
type at struct {
	topic     string
	partition int32
}

// which reads arguments that are TOPIC or TOPIC:PARTITION.
func (o operation) which() ([]at, error) {
	var out []at
	for _, arg := range o.call.Args {
		topic, number, one := strings.Cut(arg, ":")
		a := at{topic, -1}
		if one {
			n, err := strconv.ParseInt(number, 10, 32)
			if err != nil || n < 0 {
				return nil, misuse("an argument is not TOPIC or TOPIC:PARTITION")
			}
			a.partition = int32(n)
		}
		known := false
		for _, t := range o.topics {
			known = known || t == topic
		}
		if !known {
			return nil, misuse("an argument names a topic that is none of KAFKASINK_TOPICS")
		}
		out = append(out, a)
	}
	return out, nil
}

// names tells whether the argument names a partition.
func (a at) names(topic string, partition int32) bool {
	return topic == a.topic && (a.partition < 0 || a.partition == partition)
}

// named keeps what the arguments name; without arguments, everything. place
// gives the topic and the partition of one.
func named[T any](all []T, place func(*T) (string, int32), which []at) ([]T, error) {
	if len(which) == 0 {
		return all, nil
	}
	var out []T
	found := make([]bool, len(which))
	for i := range all {
		match := false
		for j, a := range which {
			if a.names(place(&all[i])) {
				found[j], match = true, true
			}
		}
		if match {
			out = append(out, all[i])
		}
	}
	for j, ok := range found {
		if !ok {
			return nil, misuse("an argument names a partition that topic %s does not have", which[j].topic)
		}
	}
	return out, nil
}

func orNone(offset int64) string {
	if offset < 0 {
		return "-"
	}
	return strconv.FormatInt(offset, 10)
}

var errNeedsDLQ = errors.New("set KAFKASINK_DLQ_TOPIC: the verbs of dlq are about that topic")

// oneLine keeps text from outside on its line of the terminal.
func oneLine(text string, limit int) string {
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return ' '
		}
		return r
	}, text)
	if runes := []rune(text); len(runes) > limit {
		text = string(runes[:limit]) + "…"
	}
	return text
}

// stamp gives a time, or "-" for none.
func stamp(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}

func helpKafkaSink(w io.Writer) error { return config.HelpKafkaSink(w) }
