package main

import (
	"context"
	"flag"
	"fmt"
	"strings"
	"time"

	"holdfast/internal/feldera"
	"holdfast/internal/ops"
	"holdfast/internal/wal"
)

// ownersVerb shows who feeds which table, and takes out who is gone.
func ownersVerb() ops.Verb {
	return ops.Verb{
		Name: "owners", Help: "show who feeds the pipeline's tables (show), or take out one that is gone for good (remove OWNER [TABLE…] -yes)",
		Args: "show|remove", JSON: true,
		Run: func(ctx context.Context, call ops.Call) error {
			var yes bool
			const usage = "show [-json], remove OWNER [TABLE…] -yes"
			action, rest, err := actionArgs(&call, "owners", usage, []string{"show", "remove"},
				func(f *flag.FlagSet) { f.BoolVar(&yes, "yes", false, "") })
			if err != nil {
				return err
			}
			// Flags may stand behind the names too.
			names := rest[:0]
			for _, arg := range rest {
				switch arg {
				case "-yes", "--yes":
					yes = true
				default:
					names = append(names, arg)
				}
			}
			if (action == "show") != (len(names) == 0) {
				return ops.WithExitCode(ops.ExitUsage, fmt.Errorf("owners takes one of: %s", usage))
			}
			return looking(ctx, call, func(ctx context.Context, source *wal.Source) error {
				if action == "show" {
					return showOwners(ctx, call, source)
				}
				return removeOwner(ctx, call, source, names[0], names[1:], yes)
			})
		},
	}
}

func showOwners(ctx context.Context, call ops.Call, source *wal.Source) error {
	list, err := source.Owners(ctx)
	if err != nil {
		return unavailable(err)
	}
	if call.JSON {
		return writeJSON(call.Stdout, struct {
			Owners []feldera.Owner `json:"owners"`
		}{append([]feldera.Owner{}, list...)})
	}
	if len(list) == 0 {
		return write(call.Stdout, "nobody has said that it feeds a table of this pipeline\n")
	}
	return write(call.Stdout, describeOwners(list))
}

func describeOwners(list []feldera.Owner) string {
	var b strings.Builder
	for _, o := range list {
		fmt.Fprintf(&b, "%-24s %s, since %s", o.Table, o.Name, o.Since.UTC().Format(time.RFC3339))
		if o.Retracts {
			b.WriteString(", takes away rows that it did not write")
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func removeOwner(ctx context.Context, call ops.Call, source *wal.Source, name string, tables []string, yes bool) error {
	gone, err := source.RemoveOwner(ctx, name, tables, func(gone []feldera.Owner) error {
		if yes {
			return nil
		}
		return ops.WithExitCode(ops.ExitUsage, fmt.Errorf(
			"nothing was done: others may then take away rows that %s wrote into %d tables; if it is gone for good, or will never run again, say: owners remove %s -yes", name, len(gone), name))
	})
	if err != nil {
		return unavailable(err)
	}
	return write(call.Stdout, describeOwners(gone)+"removed: rows of these tables may now be taken away by whoever else feeds them\n")
}
