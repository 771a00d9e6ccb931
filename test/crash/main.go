// Command crash is the crash matrix: it runs the real daemons, built with
// named places, against a real Postgres, a real Kafka and the simulator of
// Feldera, lets each fault happen at each place, and checks every
// acknowledgement at the moment at which it is sent. With -soak, random faults
// happen at no place in particular instead; with -sabotage, wrong builds must
// be found out. The last line is the result.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	var opts options
	var points, faults, variants string
	flag.Uint64Var(&opts.seed, "seed", uint64(time.Now().UnixNano()), "of everything that is random")
	flag.StringVar(&points, "points", "", "only places whose name contains one of these, separated by commas")
	flag.StringVar(&faults, "faults", "", "only faults whose name contains one of these, separated by commas")
	flag.StringVar(&variants, "variants", "", "only variants whose name contains one of these, separated by commas")
	length := flag.Duration("soak", 0, "no matrix, but random faults for so long")
	wrong := flag.Bool("sabotage", false, "no matrix, but wrong builds, which must be found out")
	only := flag.String("only", "", "only wrong builds whose name contains one of these, separated by commas")
	flag.Parse()
	opts.points, opts.faults, opts.variants = list(points), list(faults), list(variants)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	dir, err := os.MkdirTemp("", "holdfast-crash-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	opts.dir, opts.out = dir, os.Stdout
	if *wrong {
		green, err := runSabotage(ctx, opts, list(*only), 3)
		_ = os.RemoveAll(dir)
		if err != nil {
			fmt.Fprintln(os.Stderr, "sabotage:", err)
		}
		if err != nil || green > 0 {
			os.Exit(1)
		}
		return
	}
	run := runMatrix
	if *length > 0 {
		run = func(ctx context.Context, opts options) (*result, error) { return soak(ctx, opts, *length) }
	}
	began := time.Now()
	r, err := run(ctx, opts)
	_ = os.RemoveAll(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "crash matrix:", err)
		os.Exit(1)
	}
	r.details(began)
	if *length > 0 {
		fmt.Printf("soak: %d storms, %d kinds of faults, lost %d, torn %d, regressed %d, double-applied %d\n", r.runs, len(r.faults), r.lost, r.torn, r.regressed, r.doubleApplied)
	} else {
		fmt.Println(r.line())
	}
	if !r.green() {
		os.Exit(1)
	}
}

func list(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}

// options say what is run.
type options struct {
	seed                     uint64
	points, faults, variants []string    // nil = all
	cases                    []crashCase // of the matrix, instead of all that the plan gives
	dir                      string      // for files of the runs
	out                      io.Writer
}
