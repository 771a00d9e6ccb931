// Command felderasim runs the Feldera simulator as a process of its own, for
// the demo and for tests that want one to kill. It is not Feldera, and says
// so in its first line.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run is main without the process around it: 0 for a clean end, 2 for a wrong
// command line, 1 for anything else.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("felderasim", flag.ContinueOnError)
	fs.SetOutput(stderr)
	listen := fs.String("listen", "127.0.0.1:8080", "address of the manager front")
	bare := fs.String("listen-bare", "127.0.0.1:0", "address of the bare process front")
	program := fs.String("program", "", "`file` with the SQL program (required)")
	pipeline := fs.String("pipeline", "p", "name of the pipeline")
	model := fs.String("model", "none", "fault-tolerance model: none, at_least_once or exactly_once")
	edition := fs.String("edition", "oss", "edition: oss or enterprise")
	key := fs.String("api-key", "", "API key to demand on the manager front")
	workers := fs.Int("workers", 8, "workers of the circuit")
	interval := fs.Duration("checkpoint-interval", 0, "begin a checkpoint this often (enterprise); 0 does not")
	null := fs.Bool("null", false, "count rows instead of storing them")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	_, _ = fmt.Fprintln(stdout, "felderasim: this is a SIMULATOR, not Feldera: for tests and demonstrations only, nothing is kept when it ends")
	editions := map[string]felderasim.Edition{"oss": felderasim.OpenSource, "enterprise": felderasim.Enterprise}
	ed, ok := editions[*edition]
	if !ok || *program == "" || fs.NArg() > 0 {
		_, _ = fmt.Fprintln(stderr, "felderasim: -program is required, -edition is oss or enterprise, and there are no arguments")
		return 2
	}
	sqlText, err := os.ReadFile(*program)
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "felderasim: read -program: %v\n", err)
		return 1
	}
	sim, err := felderasim.New(felderasim.Options{
		SQL: string(sqlText), Pipeline: *pipeline, Model: core.Model(*model), Edition: ed, Workers: *workers,
		APIKey: *key, Listen: *listen, ListenBare: *bare, CheckpointInterval: *interval, Null: *null,
		Logger: slog.New(slog.NewTextHandler(stderr, nil)),
	})
	if err == nil {
		err = sim.Start(ctx)
	}
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "felderasim: %v\n", err)
		return 1
	}
	_, _ = fmt.Fprintf(stdout, "manager %s pipeline %s bare %s\n", sim.URL(), *pipeline, sim.BareURL())
	<-ctx.Done()
	if err := sim.Close(); err != nil {
		_, _ = fmt.Fprintf(stderr, "felderasim: %v\n", err)
		return 1
	}
	return 0
}
