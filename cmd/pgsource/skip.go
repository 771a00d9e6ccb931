package main

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"

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
				done, changed, err := source.Skip(ctx, end, path, func(r *wal.RefusedTransaction) error {
					if err := write(call.Stdout, fmt.Sprintf("%s\nIts changes will be missing from the pipeline, but for those that the pipeline is said to have already.\n", r.Why)); err != nil {
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
				return write(call.Stdout, skipText(done, changed))
			})
		},
	}
}

// skipText says what is left out, and how its tables are put right. The source
// has the transaction's rows: what a resync brings is what the source has by
// then, also where a part of the transaction was in the pipeline already.
func skipText(done *wal.SkippedTransaction, changed map[string]int) string {
	names := slices.Sorted(maps.Keys(changed))
	total := 0
	var tables, verb strings.Builder
	for i, name := range names {
		total += changed[name]
		if i > 0 {
			tables.WriteString(", ")
		}
		fmt.Fprintf(&tables, "%s: %d", name, changed[name])
		verb.WriteByte(' ')
		if strings.ContainsFunc(name, func(r rune) bool { return r != '.' && r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) }) {
			name = "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
		}
		verb.WriteString(name)
	}
	return fmt.Sprintf("transaction %d with %d changes (%s) was written to %s; the next start of pgsource passes over it.\n"+
		"To bring its tables to what the source has, once that is something Feldera takes: start pgsource, then run: pgsource resync%s\n",
		done.XID, total, tables.String(), done.File, verb.String())
}
