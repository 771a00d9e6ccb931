package main

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"strings"

	"holdfast/internal/ops"
	"holdfast/internal/wal"
)

// transactionVerb shows and ends the pipeline's open transaction: one that
// nobody ends stops everything in the pipeline.
func transactionVerb() ops.Verb {
	return ops.Verb{
		Name: "feldera-transaction", Help: "show the pipeline's open transaction (show), or commit one that nobody ends (commit -yes NUMBER)", Args: "show|commit", JSON: true,
		Run: func(ctx context.Context, call ops.Call) error {
			var yes, ours bool
			action, rest, err := actionArgs(&call, "feldera-transaction", "show [-json], commit -yes [-ours] NUMBER", []string{"show", "commit"}, func(f *flag.FlagSet) {
				f.BoolVar(&yes, "yes", false, "")
				f.BoolVar(&ours, "ours", false, "")
			})
			if err != nil {
				return err
			}
			return looking(ctx, call, func(ctx context.Context, source *wal.Source) error {
				if action == "show" && len(rest) == 0 {
					return showTransaction(ctx, call, source)
				}
				if len(rest) != 1 {
					return ops.WithExitCode(ops.ExitUsage, fmt.Errorf("feldera-transaction commit takes the number that show gives"))
				}
				id, err := strconv.ParseInt(rest[0], 10, 64)
				if err != nil || action == "show" || id < 0 {
					return ops.WithExitCode(ops.ExitUsage, fmt.Errorf("feldera-transaction commit takes the number that show gives, and show takes none"))
				}
				return commitTransaction(ctx, call, source, id, yes, ours)
			})
		},
	}
}

func showTransaction(ctx context.Context, call ops.Call, source *wal.Source) error {
	shown, err := source.ShowFelderaTransaction(ctx)
	if err != nil {
		return err
	}
	if call.JSON {
		return writeJSON(call.Stdout, struct {
			Transaction *wal.FelderaTransaction `json:"transaction"`
		}{shown})
	}
	return write(call.Stdout, describeTransaction(shown))
}

func describeTransaction(tx *wal.FelderaTransaction) string {
	var b strings.Builder
	fmt.Fprintf(&b, "incarnation %s: %s\n", tx.Incarnation, tx.Text)
	switch {
	case !tx.Open:
	case len(tx.Connectors) > 0:
		b.WriteString("input connectors of the pipeline hold it, and end it\n")
	case tx.Ours:
		fmt.Fprintf(&b, "this pgsource has opened it, by its state, for the transactions up to LSN %s: start pgsource, which sends what is missing and commits it\n", tx.Through)
	default:
		fmt.Fprintf(&b, "it is not this pgsource's, by its state. If whoever opened it does not live any more, end it: pgsource feldera-transaction commit -yes %d\n", tx.ID)
	}
	return b.String()
}

func commitTransaction(ctx context.Context, call ops.Call, source *wal.Source, id int64, yes, ours bool) error {
	err := source.CommitFelderaTransaction(ctx, id, func(tx *wal.FelderaTransaction) error {
		if err := write(call.Stdout, describeTransaction(tx)+"A commit makes visible what is in it, all of it or not: it cannot be taken back, nor rolled back. A client that is still sending into it goes on outside of it.\n"); err != nil {
			return err
		}
		switch {
		case tx.Ours && !ours:
			return ops.WithExitCode(ops.ExitUsage, fmt.Errorf("nothing was done: a part of a transaction of the source would become visible; start pgsource instead, or, if it is not to be started again, say -ours too"))
		case !yes:
			return ops.WithExitCode(ops.ExitUsage, fmt.Errorf("nothing was done: say feldera-transaction commit -yes %d to commit it", id))
		}
		return nil
	})
	if err != nil {
		return err
	}
	return write(call.Stdout, fmt.Sprintf("transaction %d is committed\n", id))
}
