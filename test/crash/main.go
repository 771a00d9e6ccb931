// Command crash is the crash matrix: it runs the real daemons, built with
// named places, against a real Postgres, a real Kafka and the simulator of
// Feldera, lets each fault happen at each place, and checks every
// acknowledgement at the moment at which it is sent. With -soak, random faults
// happen at no place in particular instead. The last line is the result.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"holdfast/internal/crash"
)

func main() {
	var opts options
	var points, faults string
	flag.Uint64Var(&opts.seed, "seed", uint64(time.Now().UnixNano()), "of everything that is random")
	flag.StringVar(&points, "points", "", "only places whose name contains one of these, separated by commas")
	flag.StringVar(&faults, "faults", "", "only faults whose name contains one of these, separated by commas")
	length := flag.Duration("soak", 0, "no matrix, but random faults for so long")
	flag.Parse()
	opts.points, opts.faults = list(points), list(faults)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	dir, err := os.MkdirTemp("", "holdfast-crash-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	opts.dir, opts.out = dir, os.Stdout
	run := runMatrix
	if *length > 0 {
		run = func(ctx context.Context, opts options) (*result, error) { return soak(ctx, opts, *length) }
	}
	r, err := run(ctx, opts)
	if err != nil {
		fmt.Fprintln(os.Stderr, "crash matrix:", err)
		os.Exit(1)
	}
	_ = os.RemoveAll(dir)
	if *length > 0 {
		fmt.Printf("soak: %d storms, %d kinds of faults, lost %d, torn %d, regressed %d, double-applied %d\n", r.runs, r.faults, r.lost, r.torn, r.regressed, r.doubleApplied)
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
	seed           uint64
	points, faults []string // nil = all
	dir            string   // for files of the runs
	out            io.Writer
}

func matches(name string, only []string) bool {
	return only == nil || slices.ContainsFunc(only, func(part string) bool { return strings.Contains(name, part) })
}

// runMatrix runs every fault at every place that was asked for.
func runMatrix(ctx context.Context, opts options) (*result, error) {
	random := rand.New(rand.NewPCG(opts.seed, 1))
	fmt.Fprintf(opts.out, "seed %d\n", opts.seed)
	r := &result{}
	used := map[string]bool{}
	for _, side := range []struct {
		prefix string
		open   func(context.Context, string, *rand.Rand) (world, error)
	}{{"pgsource.", openBank}, {"kafkasink.", openCounters}} {
		if err := runSide(ctx, opts, r, used, random, side.prefix, side.open); err != nil {
			return r, err
		}
	}
	r.faults = len(used)
	return r, ctx.Err()
}

// runSide runs the places of one daemon.
func runSide(ctx context.Context, opts options, r *result, used map[string]bool, random *rand.Rand, prefix string, open func(context.Context, string, *rand.Rand) (world, error)) error {
	var w world
	defer func() {
		if w != nil {
			fmt.Fprintln(opts.out, w.numbers())
			w.close()
		}
	}()
	for _, p := range crash.Points {
		if !strings.HasPrefix(string(p), prefix) || !matches(string(p), opts.points) {
			continue
		}
		hit := false
		for _, f := range faults {
			if !matches(f.name, opts.faults) || ctx.Err() != nil {
				continue
			}
			if w == nil {
				var err error
				if w, err = open(ctx, opts.dir, random); err != nil {
					return err
				}
			}
			name := string(p) + ", " + f.name
			began := time.Now()
			reached, err := crashCase{p, f}.run(ctx, w)
			if !reached {
				r.unreached = append(r.unreached, name)
			}
			hit = hit || reached
			used[f.name] = true
			r.runs++
			r.collect(opts.out, name, w, err)
			fmt.Fprintf(opts.out, "%s: %s, %v\n", name, map[bool]string{true: "reached", false: "NOT REACHED"}[reached], time.Since(began).Round(time.Millisecond))
			if err != nil { // what follows in this world would only repeat it
				w.close()
				w = nil
			}
		}
		if hit {
			r.points++
		}
	}
	return nil
}
