package main

import (
	"context"
	"flag"
	"fmt"
	"time"

	"holdfast/internal/ops"
	"holdfast/internal/wal"
)

// skipTimeout bounds the reading of a transaction that may be large.
const skipTimeout = 30 * time.Minute

// skipVerb passes over one transaction, by the LSN that the daemon named.
func skipVerb() ops.Verb {
	var yes bool
	var path string
	return ops.Verb{
		Name: "skip", Help: "write the transaction that stopped pgsource to a file and pass over it at the next start", Args: "LSN",
		Flags: func(f *flag.FlagSet) {
			f.BoolVar(&yes, "yes", false, "do it; without it only what would be done is said")
			f.StringVar(&path, "to", "", "the file to write the transaction to, which must not exist (default skipped-LSN.jsonl)")
		},
		Run: func(ctx context.Context, call ops.Call) error {
			var end wal.LSN
			if len(call.Args) != 1 || end.UnmarshalText([]byte(call.Args[0])) != nil {
				return ops.WithExitCode(ops.ExitUsage, fmt.Errorf("skip takes the end LSN of the transaction that stopped pgsource, as it said it, such as 16/B374D848"))
			}
			if path == "" {
				path = fmt.Sprintf("skipped-%X-%X.jsonl", uint64(end)>>32, uint64(end)&0xFFFFFFFF)
			}
			return lookingFor(ctx, call, skipTimeout, func(ctx context.Context, source *wal.Source) error {
				done, rows, err := source.Skip(ctx, end, path, func(r *wal.RefusedTransaction) error {
					if err := write(call.Stdout, fmt.Sprintf("%s\nIts changes will be missing from the pipeline for good.\n", r.Why)); err != nil {
						return err
					}
					if !yes {
						return ops.WithExitCode(ops.ExitUsage, fmt.Errorf("nothing was done: say skip -yes %s to write it to %s and pass over it", end, path))
					}
					return nil
				})
				if err != nil {
					return err
				}
				return write(call.Stdout, fmt.Sprintf("transaction %d with %d changes was written to %s; the next start of pgsource passes over it.\n", done.XID, rows, done.File))
			})
		},
	}
}
