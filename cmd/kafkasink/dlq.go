package main

import (
	"context"
	"encoding/base64"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"holdfast/internal/ops"
	"holdfast/internal/partition"
)

// operateDLQ is operate for the verbs about the dead-letter topic.
func operateDLQ(ctx context.Context, call ops.Call, do func(ctx context.Context, o operation) error) error {
	return operate(ctx, call, func(ctx context.Context, o operation) error {
		if o.c.DLQTopic == "" {
			return ops.WithExitCode(ops.ExitConfig, errNeedsDLQ)
		}
		return do(ctx, o)
	})
}

func dlqListVerb() ops.Verb {
	var topic, class string
	var limit int
	return ops.Verb{
		Name: "dlq list", JSON: true, MoreHelp: helpKafkaSink,
		Help: "print a line for each dead letter, the oldest first",
		Flags: func(f *flag.FlagSet) {
			f.StringVar(&topic, "topic", "", "only those that came from this topic")
			f.StringVar(&class, "class", "", "only those of this class, such as malformed or rejected")
			f.IntVar(&limit, "limit", 1000, "print at most so many")
		},
		Run: func(ctx context.Context, call ops.Call) error {
			return operateDLQ(ctx, call, func(ctx context.Context, o operation) error {
				n := 0
				var failed error
				err := o.admin.DeadLetters(ctx, nil, func(d partition.DeadLetter) bool {
					if topic != "" && d.Topic != topic || class != "" && d.Class != class {
						return true
					}
					if n >= limit {
						failed = o.more(limit)
						return false
					}
					n++
					failed = o.printLetter(d)
					return failed == nil
				})
				if err == nil {
					err = failed
				}
				return err
			})
		},
	}
}

func (o operation) more(limit int) error {
	if o.call.JSON {
		return nil
	}
	return o.say("there are more than %d; -limit shows more", limit)
}

func (o operation) printLetter(d partition.DeadLetter) error {
	if o.call.JSON {
		return o.printJSON(d, true)
	}
	return o.say("%d:%d  %s  %s  %s  %s", d.Partition, d.Offset, stamp(d.Time), oneLine(d.Source, 300), oneLine(d.Class, 20), oneLine(d.Message, 200))
}

func dlqShowVerb() ops.Verb {
	return ops.Verb{
		Name: "dlq show", Args: "PARTITION:OFFSET", JSON: true, MoreHelp: helpKafkaSink,
		Help: "print one dead letter whole: headers, key and value",
		Run: func(ctx context.Context, call ops.Call) error {
			if len(call.Args) != 1 {
				return misuse("dlq show takes one argument, PARTITION:OFFSET as dlq list prints it")
			}
			number, offset, two := strings.Cut(call.Args[0], ":")
			p, err := strconv.ParseInt(number, 10, 32)
			at, err2 := strconv.ParseInt(offset, 10, 64)
			if !two || err != nil || err2 != nil || p < 0 || at < 0 {
				return misuse("the argument is not PARTITION:OFFSET")
			}
			return operateDLQ(ctx, call, func(ctx context.Context, o operation) error {
				d, err := o.admin.ShowDeadLetter(ctx, int32(p), at) //nolint:gosec // parsed as 32 bits, and not below 0
				if err != nil {
					return err
				}
				if call.JSON {
					return o.printJSON(d, false)
				}
				return o.printWhole(d)
			})
		},
	}
}

func (o operation) printWhole(d partition.DeadLetter) error {
	var b strings.Builder
	fmt.Fprintf(&b, "dead letter  %d:%d\ntime         %s\nfrom         %s\nclass        %s\nstage        %s\nwhy          %s\nredrives     %d\n",
		d.Partition, d.Offset, stamp(d.Time), oneLine(d.Source, 300), oneLine(d.Class, 20), oneLine(d.Stage, 20), oneLine(d.Message, 4000), d.Redrives)
	for _, h := range d.Headers {
		if !strings.HasPrefix(h.Key, "__connect.errors.") {
			fmt.Fprintf(&b, "header       %s: %s\n", oneLine(h.Key, 300), readable(h.Value))
		}
	}
	fmt.Fprintf(&b, "key          %s\nvalue        %s", readable(d.Key), readable(d.Value))
	return o.say("%s", b.String())
}

// readable gives bytes as text where they are text that a terminal can take,
// else in base64.
func readable(b []byte) string {
	if b == nil {
		return "(none)"
	}
	if text := string(b); utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' }) {
		return text
	}
	return "base64:" + base64.StdEncoding.EncodeToString(b)
}

func dlqRedriveVerb() ops.Verb {
	var dry, yes bool
	var most int
	return ops.Verb{
		Name: "dlq redrive", JSON: true, MoreHelp: helpKafkaSink,
		Help: "put dead letters back into the partitions that they came from, from where the last redrive ended. " +
			"An old record that is put back overwrites newer rows of its key",
		Flags: func(f *flag.FlagSet) {
			f.BoolVar(&dry, "dry-run", false, "only say what would be put back")
			f.BoolVar(&yes, "yes", false, "do it")
			f.IntVar(&most, "most", 3, "leave a record that was put back so often already")
		},
		Run: func(ctx context.Context, call ops.Call) error {
			if yes == dry {
				return misuse("dlq redrive takes either -yes or -dry-run")
			}
			return operateDLQ(ctx, call, func(ctx context.Context, o operation) error {
				var failed error
				out, err := o.admin.Redrive(ctx, o.topics, most, dry, func(d partition.DeadLetter, left string) {
					if !call.JSON && failed == nil {
						what := "put back"
						if left != "" {
							what = "left, " + left
						} else if dry {
							what = "would be put back"
						}
						failed = o.say("%d:%d  %s  %s", d.Partition, d.Offset, oneLine(d.Source, 300), what)
					}
				})
				if err != nil {
					return err
				}
				if call.JSON {
					return o.printJSON(out, false)
				}
				verb := "put back"
				if dry {
					verb = "to be put back"
				}
				return o.say("%d %s, %d left", out.Redriven, verb, out.Left)
			})
		},
	}
}
