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

// snapshotVerb tells how far the copies of existing rows have got.
func snapshotVerb() ops.Verb {
	return ops.Verb{
		Name: "snapshot", Help: "tell how far the copies of existing rows have got (status)", Args: "status", JSON: true,
		Run: func(ctx context.Context, call ops.Call) error {
			flags := flag.NewFlagSet("snapshot", flag.ContinueOnError)
			flags.SetOutput(io.Discard)
			flags.BoolVar(&call.JSON, "json", call.JSON, "")
			if len(call.Args) == 0 || call.Args[0] != "status" || flags.Parse(call.Args[1:]) != nil || flags.NArg() > 0 {
				return ops.WithExitCode(ops.ExitUsage, fmt.Errorf("snapshot takes: status [-json]"))
			}
			return lookingFor(ctx, call, stateTimeout, func(ctx context.Context, source *wal.Source) error {
				return showSnapshot(ctx, call, source)
			})
		},
	}
}

func showSnapshot(ctx context.Context, call ops.Call, source *wal.Source) error {
	st, err := source.LoadState(ctx)
	if err != nil {
		return err
	}
	jobs, tables := st.Copies(), st.CopiedTables()
	if call.JSON {
		return writeJSON(call.Stdout, struct {
			Tables []wal.CopiedTable  `json:"tables"`
			Jobs   []wal.CopyProgress `json:"jobs"`
		}{append([]wal.CopiedTable{}, tables...), append([]wal.CopyProgress{}, jobs...)})
	}
	var b strings.Builder
	for _, j := range jobs {
		fmt.Fprintf(&b, "%s of %s: %.1f %%, %d rows", j.Kind, j.Table, j.Percent, j.Rows)
		if j.Total > 0 {
			fmt.Fprintf(&b, " of about %d", j.Total)
		}
		if j.Keys > 0 {
			fmt.Fprintf(&b, ", %d keys", j.Keys)
		}
		if len(j.After) > 0 {
			fmt.Fprintf(&b, ", behind the key (%s)", strings.Join(j.After, ", "))
		}
		if j.Restarts > 0 {
			fmt.Fprintf(&b, ", begun again %d times", j.Restarts)
		}
		fmt.Fprintf(&b, ", asked for %s\n", j.Asked.UTC().Format(time.RFC3339))
	}
	for _, t := range tables {
		what := "not copied"
		if t.Copied {
			what = "copied"
		}
		fmt.Fprintf(&b, "%s: %s\n", t.Table, what)
	}
	if b.Len() == 0 {
		fmt.Fprintf(&b, "%s knows of no copies\n", source.StateWhere())
	}
	return write(call.Stdout, b.String())
}
