package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"holdfast/internal/config"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/ops"
	"holdfast/internal/wal"
)

// felderaSQL is what the verb feldera-sql was asked to do.
type felderaSQL struct {
	diff, apply, restart bool
	timeout              time.Duration
}

// maxApply bounds what -timeout can be set to.
const maxApply = 24 * time.Hour

// felderaSQLVerb writes the SQL that the pipeline needs for the source's
// tables, tells what it lacks, or puts it there.
func felderaSQLVerb() ops.Verb {
	var ask felderaSQL
	return ops.Verb{
		Name: "feldera-sql", Help: "write the CREATE TABLE statements that the pipeline needs, compare them with it, or apply them to it", JSON: true,
		Flags: func(f *flag.FlagSet) {
			f.BoolVar(&ask.diff, "diff", false, "compare with the pipeline's program: what it lacks, exit code 65 if anything")
			f.BoolVar(&ask.apply, "apply", false, "create the pipeline, or change the part of its program between the holdfast markers; compile and start it")
			f.BoolVar(&ask.restart, "restart", false, "with -apply: a running pipeline may be stopped for it. An open-source pipeline loses all its rows then")
			f.DurationVar(&ask.timeout, "timeout", 30*time.Minute, "with -apply: how long to wait for compilation and start")
		},
		MoreHelp: config.HelpPGSource,
		Run: func(ctx context.Context, call ops.Call) error {
			ctx, release := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
			defer release()
			return ask.run(ctx, call)
		},
	}
}

func (f felderaSQL) check(call ops.Call) error {
	var wrong string
	switch {
	case f.diff && f.apply:
		wrong = "-diff and -apply exclude each other"
	case f.restart && !f.apply:
		wrong = "-restart goes with -apply"
	case call.JSON && !f.diff:
		wrong = "-json goes with -diff"
	case f.timeout <= 0 || f.timeout > maxApply:
		wrong = fmt.Sprintf("-timeout has to be above 0 and at most %s", maxApply)
	default:
		return nil
	}
	return ops.WithExitCode(ops.ExitUsage, errors.New("feldera-sql: "+wrong))
}

func (f felderaSQL) run(ctx context.Context, call ops.Call) error {
	if err := f.check(call); err != nil {
		return err
	}
	environ := call.Environ
	if !f.diff && !f.apply {
		environ = withoutPipeline(environ)
	}
	c, err := load(environ)
	if err != nil {
		return err
	}
	if f.apply && c.Feldera.Pipeline == "" {
		// Said before Postgres is asked: it cannot work whatever is there.
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "feldera-sql -apply", Why: "FELDERA_PIPELINE is not set: a bare pipeline process has no program that could be changed",
			Expected: "the manager's address in FELDERA_URL and the pipeline's name in FELDERA_PIPELINE",
		}
	}
	tables, err := sourceTables(ctx, c)
	if err != nil {
		return unavailable(err)
	}
	defs, err := wal.DescribeTables(ctx, wal.DDLConfig{DSN: c.DSN.Value, Slot: c.Slot, Publication: c.Publication, Tables: tables})
	if err != nil {
		return unavailable(err)
	}
	defs = append(defs, feldera.ProgressTable(c.ProgressTable))
	switch {
	case f.diff:
		return f.compare(ctx, call, c, defs)
	case f.apply:
		return f.put(ctx, call, c, defs)
	}
	return printProgram(call, defs)
}

// withoutPipeline gives the environment with an address that leads nowhere
// where FELDERA_URL is not set: to print the statements no pipeline is asked,
// and there need not be one yet.
func withoutPipeline(environ []string) []string {
	for _, e := range environ {
		if value, ok := strings.CutPrefix(e, "FELDERA_URL="); ok && value != "" {
			return environ
		}
	}
	return append(slices.Clone(environ), "FELDERA_URL=https://pipeline.invalid")
}

// printProgram writes the statements to stdout, and to stderr what is wrong
// with them.
func printProgram(call ops.Call, defs []feldera.TableDef) error {
	if _, err := io.WriteString(call.Stdout, feldera.GenerateProgram(defs)); err != nil {
		return fmt.Errorf("print the statements: %w", err)
	}
	for i := range defs {
		if d := &defs[i]; d.Unusable != "" {
			_, _ = fmt.Fprintf(call.Stderr, "%s: source table %s: %s\n", daemon, d.Relation, d.Unusable) // it stands in the SQL too
		}
	}
	return nil
}

// compare prints what the pipeline's program lacks.
func (f felderaSQL) compare(ctx context.Context, call ops.Call, c *config.PGSource, defs []feldera.TableDef) error {
	client, err := felderaClient(c, nil)
	if err != nil {
		return err
	}
	defer client.CloseIdle()
	schema, err := client.Describe(ctx)
	if err != nil {
		return unavailable(err)
	}
	diffs := feldera.Differences(schema, defs, policyOf(c))
	if call.JSON {
		enc := json.NewEncoder(call.Stdout)
		enc.SetEscapeHTML(false)
		err = enc.Encode(struct {
			OK          bool                 `json:"ok"`
			Differences []feldera.Difference `json:"differences"`
		}{len(diffs) == 0, append([]feldera.Difference{}, diffs...)})
	} else {
		err = printDifferences(call.Stdout, diffs, len(defs))
	}
	if err != nil {
		return fmt.Errorf("print the differences: %w", err)
	}
	if len(diffs) > 0 {
		return ops.WithExitCode(ops.ExitRefused, nil)
	}
	return nil
}

func printDifferences(w io.Writer, diffs []feldera.Difference, tables int) error {
	if len(diffs) == 0 {
		_, err := fmt.Fprintf(w, "no difference: the program can take all %d tables\n", tables)
		return err
	}
	for _, d := range diffs {
		where := "table " + d.Table
		if d.Column != "" {
			where += fmt.Sprintf(", column %q", d.Column)
		}
		if _, err := fmt.Fprintf(w, "%s: %s\n", where, d.Text); err != nil {
			return err
		}
		if d.SQL == "" {
			continue
		}
		what := "declare: "
		if d.Kind == feldera.DifferenceTable {
			what = "add:\n"
		}
		if _, err := fmt.Fprintf(w, "  %s%s\n", what, d.SQL); err != nil {
			return err
		}
	}
	return nil
}

// put makes the pipeline run a program with the tables.
func (f felderaSQL) put(ctx context.Context, call ops.Call, c *config.PGSource, defs []feldera.TableDef) error {
	say := func(line string) { _, _ = fmt.Fprintf(call.Stderr, "%s: %s\n", daemon, line) } // stderr is gone: the result still tells
	client, err := felderaClient(c, func(r feldera.Retry) {
		say(fmt.Sprintf("%s: attempt %d has failed, trying again: %v", r.What, r.Attempt, r.Err))
	})
	if err != nil {
		return err
	}
	defer client.CloseIdle()
	ctx, cancel := context.WithTimeoutCause(ctx, f.timeout, fmt.Errorf("it took longer than the %s of -timeout; what was begun goes on in Feldera", f.timeout))
	defer cancel()
	if err := client.ApplyProgram(ctx, defs, feldera.ApplyOptions{Restart: f.restart, Say: say}); err != nil {
		return unavailable(err)
	}
	if _, err := fmt.Fprintf(call.Stdout, "pipeline %q runs with %d tables\n", c.Feldera.Pipeline, len(defs)); err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}

// unavailable gives the exit code for something that could not be reached.
func unavailable(err error) error {
	if ops.ExitCode(err) != ops.ExitUnexpected {
		return err
	}
	return ops.WithExitCode(ops.ExitUnavailable, err)
}

func felderaClient(c *config.PGSource, onRetry func(feldera.Retry)) (*feldera.Client, error) {
	cfg := feldera.Config{
		URL: c.Feldera.URL, Pipeline: c.Feldera.Pipeline, CAFile: c.Feldera.CAFile,
		RequestTimeout: c.Feldera.RequestTimeout, RequestLifetime: c.Feldera.RequestLifetime, OnRetry: onRetry,
	}
	if c.Feldera.APIKey.IsSet() {
		cfg.APIKey = c.Feldera.APIKey.Value
	}
	return feldera.New(cfg)
}

// policyOf is the policy that run gives to the encoders, as far as it decides
// whether a table fits.
func policyOf(c *config.PGSource) feldera.Policy {
	return feldera.Policy{IgnoreExtraColumns: c.ExtraColumns == config.Ignore}
}
