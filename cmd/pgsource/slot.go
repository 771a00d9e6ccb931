package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"strings"
	"time"

	"holdfast/internal/ops"
	"holdfast/internal/wal"
)

// slotTimeout bounds the verbs that look at the server.
const slotTimeout = time.Minute

// looking runs a verb on a source that is never run.
func looking(ctx context.Context, call ops.Call, do func(ctx context.Context, source *wal.Source) error) error {
	return lookingFor(ctx, call, slotTimeout, do)
}

func lookingFor(ctx context.Context, call ops.Call, timeout time.Duration, do func(ctx context.Context, source *wal.Source) error) error {
	c, err := load(call.Environ)
	if err != nil {
		return err
	}
	rt, err := ops.LookingRuntime(daemon)
	if err != nil {
		return err
	}
	source, closing, err := newSource(ctx, c, rt, func(*reporter) ([]wal.Table, error) { return sourceTables(ctx, c) })
	if err != nil {
		return err
	}
	defer closing()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return do(ctx, source)
}

// actionArgs reads the action of a verb and the flags behind it, which the
// flags of the verb itself cannot be.
func actionArgs(call *ops.Call, verb, usage string, actions []string, more func(*flag.FlagSet)) (action string, rest []string, err error) {
	wrong := ops.WithExitCode(ops.ExitUsage, fmt.Errorf("%s takes one of: %s", verb, usage))
	if len(call.Args) == 0 {
		return "", nil, wrong
	}
	known := false
	for _, a := range actions {
		known = known || a == call.Args[0]
	}
	flags := flag.NewFlagSet(verb, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.BoolVar(&call.JSON, "json", call.JSON, "")
	if more != nil {
		more(flags)
	}
	if !known || flags.Parse(call.Args[1:]) != nil {
		return "", nil, wrong
	}
	return call.Args[0], flags.Args(), nil
}

// slotVerb shows and drops the slot.
func slotVerb() ops.Verb {
	return ops.Verb{
		Name: "slot", Help: "show the replication slot (show), or drop it for good (drop -yes)", Args: "show|drop", JSON: true,
		Run: func(ctx context.Context, call ops.Call) error {
			var yes bool
			action, rest, err := actionArgs(&call, "slot", "show [-json], drop -yes", []string{"show", "drop"},
				func(f *flag.FlagSet) { f.BoolVar(&yes, "yes", false, "") })
			if err != nil {
				return err
			}
			if len(rest) > 0 {
				return ops.WithExitCode(ops.ExitUsage, fmt.Errorf("slot %s takes no arguments: the slot is that of PGSOURCE_SLOT", action))
			}
			return looking(ctx, call, func(ctx context.Context, source *wal.Source) error {
				if action == "show" {
					return showSlot(ctx, call, source)
				}
				return dropSlot(ctx, call, source, yes)
			})
		},
	}
}

func showSlot(ctx context.Context, call ops.Call, source *wal.Source) error {
	slot, err := source.ShowSlot(ctx)
	if err != nil {
		return err
	}
	if call.JSON {
		return writeJSON(call.Stdout, struct {
			Slot *wal.Slot `json:"slot"`
		}{slot})
	}
	text := "the server has no slot of this name\n"
	if slot != nil {
		text = describeSlot(slot)
	}
	return write(call.Stdout, text)
}

func write(w io.Writer, text string) error {
	if _, err := io.WriteString(w, text); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

func describeSlot(s *wal.Slot) string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-14s %s\n", name, fmt.Sprintf(format, args...))
	}
	line("slot", "%q of plug-in %s in database %q", s.Name, s.Plugin, s.Database)
	line("confirmed", "%s   %s behind the server, which is at %s", s.Confirmed, wal.BytesText(s.BehindBytes), s.Server)
	line("retained", "%s of WAL on the server's disk, from %s on", wal.BytesText(s.RetainedBytes), s.Restart)
	switch {
	case s.SafeBytes != nil:
		line("wal_status", "%s, %s left before max_slot_wal_keep_size", s.WALStatus, wal.BytesText(*s.SafeBytes))
	default:
		line("wal_status", "%s", s.WALStatus)
	}
	if s.Active {
		line("in use", "by process %d: application %q, user %q, from %s, last heard of at %s", s.ActivePID, s.ActiveName, s.ActiveUser, s.ActiveFrom, s.ActiveLastReply)
	} else {
		line("in use", "by nobody%s", map[bool]string{true: " since " + s.InactiveSince}[s.InactiveSince != ""])
	}
	line("failover", "%t, mirrored from a primary: %t", s.Failover, s.Synced)
	line("spilled", "%s on the server's disk while decoding", wal.BytesText(s.SpilledBytes))
	if !s.Usable {
		line("NOT USABLE", "%s", s.Why)
		line("fix", "%s", s.Do)
	}
	return b.String()
}

func dropSlot(ctx context.Context, call ops.Call, source *wal.Source, yes bool) error {
	err := source.DropSlot(ctx, func(s *wal.Slot) error {
		lost := fmt.Sprintf("slot %q stands at %s. Without it the server forgets every change after that, %s of WAL until now, and %s of WAL are freed. A new slot starts at its own creation, so the tables must then be brought to what the source has: pgsource state reset -yes, start, pgsource resync -all.\n",
			s.Name, s.Confirmed, wal.BytesText(s.BehindBytes), wal.BytesText(s.RetainedBytes))
		if err := write(call.Stdout, lost); err != nil {
			return err
		}
		if !yes {
			return ops.WithExitCode(ops.ExitUsage, fmt.Errorf("nothing was done: say slot drop -yes to drop it"))
		}
		return nil
	})
	if err != nil {
		return err
	}
	return write(call.Stdout, "dropped. The publication and the state are left as they are.\n")
}

// publicationVerb prints what an owner runs where pgsource may not create.
func publicationVerb() ops.Verb {
	return ops.Verb{
		Name: "publication", Help: "print the statements that make publication and slot (sql), for who owns the tables", Args: "sql",
		Run: func(ctx context.Context, call ops.Call) error {
			if _, rest, err := actionArgs(&call, "publication", "sql", []string{"sql"}, nil); err != nil || len(rest) > 0 {
				return ops.WithExitCode(ops.ExitUsage, fmt.Errorf("publication takes: sql"))
			}
			return looking(ctx, call, func(ctx context.Context, source *wal.Source) error {
				statements, err := source.SetupSQL(ctx)
				if err != nil {
					return err
				}
				return write(call.Stdout, strings.Join(statements, ";\n")+";\n")
			})
		},
	}
}
