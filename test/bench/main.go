// Command bench measures both daemons on this machine, each beside the plainest
// program that reads the same data: pgsource, by either of its transports, beside
// pg_recvlogical, which drains a slot into /dev/null, and kafkasink beside a bare
// franz-go consumer. Reference and subjects take turns over the same backlog, so
// that the paired ratio means something where the absolute figures are only this
// machine's.
//
// It promises that a subject's time ends when the source itself, asked from
// outside, holds everything as acknowledged, and that the destination then has
// counted at least as many rows. The destination is the Feldera simulator, which
// parses and counts rows without storing them, in a process of its own; so this
// measures the connectors and not Feldera. Nothing is a gate: it exits 1 only
// when something could not be measured.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends us at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// options are the flags.
type options struct {
	rounds, rows, transaction, width, records int
	only, json                                string
}

const (
	// rowsPerTransaction is that of the Postgres workload.
	rowsPerTransaction = 500
	// partitions is that of the Kafka workload.
	partitions = 4
)

// run is main without the process around it: 0 when everything was measured, 2
// for a wrong command line, 1 otherwise. Started as one of its own children it
// does that part instead.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 && children[args[0]] != nil {
		if err := children[args[0]](ctx, args[1:], stdout); err != nil {
			_, _ = fmt.Fprintf(stderr, "bench %s: %v\n", args[0], err)
			return 1
		}
		return 0
	}
	var o options
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.IntVar(&o.rounds, "rounds", 5, "how often reference and subject take turns")
	fs.IntVar(&o.rows, "rows", 400*rowsPerTransaction, "rows of the Postgres backlog")
	fs.IntVar(&o.transaction, "transaction", rowsPerTransaction, "rows of one Postgres transaction: as many as -rows for a single one")
	fs.IntVar(&o.width, "width", 0, "least characters of each row's note, for large transactions of fewer rows")
	fs.IntVar(&o.records, "records", 200_000, "records of the Kafka backlog, about 300 bytes each, over 4 partitions")
	fs.StringVar(&o.only, "only", "", "measure one daemon only: pgsource or kafkasink")
	fs.StringVar(&o.json, "json", "", "write every run into this `file` too, for machines")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	if fs.NArg() > 0 || o.rounds < 1 || o.transaction < 1 || o.rows < o.transaction || o.records < partitions || o.only != "" && o.only != "pgsource" && o.only != "kafkasink" {
		_, _ = fmt.Fprintln(stderr, "bench: there are no arguments; -rounds is at least 1, -rows at least -transaction, -records at least 4, and -only is pgsource or kafkasink")
		return 2
	}
	if err := bench(ctx, o, stdout); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted; everything is stopped and removed")
		}
		_, _ = fmt.Fprintf(stderr, "bench: %v\n", err)
		return 1
	}
	return 0
}

// children are the parts that run as child processes of this program, so that
// they can be measured alone, and so that this process stays small.
var children = map[string]func(ctx context.Context, args []string, out io.Writer) error{
	"consume": consumeChild,
	"fill":    fillChild,
}

func bench(ctx context.Context, o options, out io.Writer) error {
	began := time.Now()
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return fmt.Errorf("read the load of the machine: %w", err)
	}
	r := report{Go: runtime.Version(), CPUs: runtime.NumCPU(), LoadAtStart: strings.Join(strings.Fields(string(load))[:3], " "), Started: began.UTC()}
	_, _ = fmt.Fprintf(out, "%d CPUs, %s, load at start %s. Feldera is SIMULATED: its simulator counts rows without storing them, in its own process on the same CPUs.\n", r.CPUs, r.Go, r.LoadAtStart)
	progress := func(format string, args ...any) {
		_, _ = fmt.Fprintf(out, "%6.1fs  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	for _, part := range []struct {
		name    string
		measure func(context.Context, options, func(string, ...any)) (series, error)
	}{{"pgsource", measurePgsource}, {"kafkasink", measureKafkasink}} {
		if o.only != "" && o.only != part.name {
			continue
		}
		s, err := part.measure(ctx, o, progress)
		if err != nil {
			return fmt.Errorf("measure %s: %w", part.name, err)
		}
		r.Series = append(r.Series, s)
	}
	for i := range r.Series {
		r.Series[i].summarise()
		if err := r.Series[i].print(out); err != nil {
			return fmt.Errorf("print the results: %w", err)
		}
	}
	if o.json != "" {
		text, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return fmt.Errorf("write the results as JSON: %w", err)
		}
		if err := os.WriteFile(o.json, append(text, '\n'), 0o600); err != nil {
			return fmt.Errorf("write -json: %w", err)
		}
	}
	_, _ = fmt.Fprintf(out, "\n%.0f seconds in all\n", time.Since(began).Seconds())
	return nil
}
