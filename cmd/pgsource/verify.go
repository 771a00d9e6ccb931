package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"holdfast/internal/ops"
	"holdfast/internal/wal"
)

// verify is what the verb was asked to do.
type verify struct {
	sample float64
	values bool
	repair bool
	most   int
	rate   int
	wait   time.Duration
	dir    string
	disk   int64
}

func (f *verify) flags(fs *flag.FlagSet) {
	fs.Float64Var(&f.sample, "sample", 1, "compare this fraction of the keys, the same ones on both sides; above 0, at most 1")
	fs.BoolVar(&f.values, "values", false, "show the values that differ, and not only the columns' names")
	fs.BoolVar(&f.repair, "repair", false, "ask the running pgsource to bring the rows that differ to what the source has")
	fs.IntVar(&f.most, "most", 1000, "list at most so many differences of a table, and end its comparison there")
	fs.IntVar(&f.rate, "rate", 0, "read at most so many rows a second of each side; 0 is no bound")
	fs.DurationVar(&f.wait, "wait", 2*time.Minute, "how long to wait each time for the acknowledged position to pass what was read of the source")
	fs.StringVar(&f.dir, "dir", "", "where keys and hashes lie that do not fit into memory (default the system's directory for temporary files)")
	fs.Int64Var(&f.disk, "disk", 64<<30, "bytes that they may take there")
}

func (f *verify) check() error {
	switch {
	case !(f.sample > 0 && f.sample <= 1):
		return errors.New("-sample has to be above 0 and at most 1")
	case f.most < 1 || f.most > 1_000_000:
		return errors.New("-most has to be from 1 to 1000000")
	case f.rate < 0, f.disk <= 0, f.wait <= 0:
		return errors.New("-rate must not be negative, -disk and -wait have to be above 0")
	}
	return nil
}

// verifyVerb compares the source's tables with the pipeline's.
func verifyVerb() ops.Verb {
	ask := &verify{}
	return ops.Verb{
		Name: "verify", Help: "compare the source's tables with the pipeline's, by key and while changes flow: exit code 0 equal, 65 different, 69 not decided",
		Args: "TABLE…", JSON: true, Flags: ask.flags,
		Run: func(ctx context.Context, call ops.Call) error {
			ctx, release := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
			defer release()
			return ask.run(ctx, call)
		},
	}
}

// tableArgs gives the names among the arguments; flags, which add registers and
// keep restores, may stand between and behind them.
func tableArgs(call *ops.Call, name string, add func(*flag.FlagSet), keep func()) (names []string, err error) {
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.BoolVar(&call.JSON, "json", call.JSON, "")
	add(fs)
	keep() // to register a flag is to set it to its default
	for rest := call.Args; len(rest) > 0; {
		if !strings.HasPrefix(rest[0], "-") {
			names, rest = append(names, rest[0]), rest[1:]
			continue
		}
		if err := fs.Parse(rest); err != nil {
			return nil, fmt.Errorf("%s: a flag is unknown or has a value that it cannot have", name)
		}
		rest = fs.Args()
	}
	return names, nil
}

func (f *verify) run(ctx context.Context, call ops.Call) error {
	given := *f
	names, err := tableArgs(&call, "verify", f.flags, func() { *f = given })
	if err == nil {
		err = f.check()
	}
	if err != nil {
		return ops.WithExitCode(ops.ExitUsage, err)
	}
	return lookingFor(ctx, call, verifyTimeout, func(ctx context.Context, source *wal.Source) error {
		tables, err := source.FindTables(names)
		if err != nil {
			return ops.WithExitCode(ops.ExitUsage, err)
		}
		if f.repair {
			if err := source.CanAsk(); err != nil {
				return err
			}
		}
		report, err := source.Verify(ctx, wal.VerifyOptions{
			Tables: tables, Sample: f.sample, Values: f.values, Most: f.most, RowsPerSecond: f.rate, Wait: f.wait, Dir: f.dir, Disk: f.disk,
			Progress: verifyProgress(call.Stderr),
		})
		if err != nil {
			return unavailable(err)
		}
		var repair *repairAsked
		if f.repair {
			if repair, err = askRepair(ctx, source, report); err != nil {
				return unavailable(err)
			}
		}
		return f.say(call, report, repair)
	})
}

// verifyTimeout bounds a comparison of tables that may be large.
const verifyTimeout = 7 * 24 * time.Hour

// verifyProgress writes a line now and then.
func verifyProgress(w io.Writer) func(wal.VerifyProgress) {
	const every = 10 * time.Second
	said := time.Now()
	return func(p wal.VerifyProgress) {
		if time.Since(said) < every {
			return
		}
		said = time.Now()
		_, _ = fmt.Fprintf(w, "%s: %s: %s: %d rows\n", daemon, p.Table, p.Stage, p.Rows) // stderr is gone: the result still tells
	}
}

// repairAsked is what became of -repair.
type repairAsked struct {
	Keys  int  `json:"keys"`
	Taken bool `json:"taken"`
}

func askRepair(ctx context.Context, source *wal.Source, report *wal.Report) (*repairAsked, error) {
	asked, err := source.AskRepair(ctx, report)
	if err != nil {
		return nil, err
	}
	done := &repairAsked{}
	for _, r := range asked {
		done.Keys += len(r.Keys)
	}
	done.Taken, err = awaitTaken(ctx, source, asked, takenWithin)
	return done, err
}

func (r *repairAsked) text(report *wal.Report) string {
	text := fmt.Sprintf("repair of %d rows requested; ", r.Keys)
	if r.Keys == 0 {
		text = "nothing to repair\n"
	} else {
		text += takenText(r.Taken)
	}
	for i := range report.Tables {
		if t := &report.Tables[i]; t.More {
			text += fmt.Sprintf("%s differs in more rows than were listed: pgsource resync %s brings all of it\n", t.Table, t.Table)
		}
	}
	return text
}

// say prints what was found, and gives the exit code for it.
func (f *verify) say(call ops.Call, report *wal.Report, repair *repairAsked) error {
	different, undecided := report.Different(), report.Undecided()
	var err error
	if call.JSON {
		err = writeJSON(call.Stdout, struct {
			Equal     bool              `json:"equal"`
			Undecided bool              `json:"undecided"`
			Sample    float64           `json:"sample"`
			Repair    *repairAsked      `json:"repair,omitempty"`
			Tables    []wal.TableReport `json:"tables"`
		}{!different && !undecided, undecided, f.sample, repair, report.Tables})
	} else {
		text := describeReport(report, f.sample)
		if repair != nil {
			text += repair.text(report)
		}
		err = write(call.Stdout, text)
	}
	switch {
	case err != nil:
		return err
	case different:
		return ops.WithExitCode(ops.ExitRefused, nil)
	case undecided:
		return ops.WithExitCode(ops.ExitUnavailable, nil)
	}
	return nil
}

func describeReport(report *wal.Report, sample float64) string {
	var b strings.Builder
	for i := range report.Tables {
		describeTable(&b, &report.Tables[i], sample)
	}
	return b.String()
}

func describeTable(b *strings.Builder, t *wal.TableReport, sample float64) {
	what := "equal"
	switch {
	case len(t.Differences) > 0:
		what = fmt.Sprintf("DIFFERENT in %d rows", len(t.Differences))
		if t.More {
			what = fmt.Sprintf("DIFFERENT in more than %d rows", len(t.Differences))
		}
	case t.Refused != "":
		fmt.Fprintf(b, "%s (Feldera table %s): not compared: %s\n", t.Table, t.Target, t.Refused)
		return
	case len(t.Unsettled) > 0:
		what = "not decided"
	}
	fmt.Fprintf(b, "%s (Feldera table %s): %s; %d rows in the source, %d in the pipeline, %d looked at again, %.1f s\n",
		t.Table, t.Target, what, t.SourceRows, t.TargetRows, t.Suspects, t.Seconds)
	if sample < 1 {
		fmt.Fprintf(b, "  only a sample of the keys was compared: %g\n", sample)
	}
	for _, l := range t.Left {
		fmt.Fprintf(b, "  not compared: column %q: %s\n", l.Column, l.Why)
	}
	for _, d := range t.Differences {
		fmt.Fprintf(b, "  %-10s %s", d.Kind, d.Key)
		for n, c := range d.Columns {
			sep := ","
			if n == 0 {
				sep = "  differs in"
			}
			fmt.Fprintf(b, "%s %s", sep, c.Column)
			if c.Source != "" || c.Target != "" {
				fmt.Fprintf(b, " (source %s, pipeline %s)", c.Source, c.Target)
			}
		}
		if d.Why != "" {
			fmt.Fprintf(b, "  %s", d.Why)
		}
		b.WriteByte('\n')
	}
	for n, u := range t.Unsettled {
		if n == maxUnsettledLines {
			fmt.Fprintf(b, "  … and %d more keys that did not come to rest\n", len(t.Unsettled)-n)
			break
		}
		fmt.Fprintf(b, "  %-10s %s  %s\n", "unsettled", u.Key, u.Why)
	}
}

// maxUnsettledLines bounds the undecided keys that are written as text.
const maxUnsettledLines = 100
