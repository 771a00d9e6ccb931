package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
)

// The exit codes.
const (
	exitHolds       = 0
	exitBroken      = 1
	exitUsage       = 64
	exitUnreachable = 69
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := command(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

const usage = `usage: contract [-sql | -list] [-run REGEXP]

  FELDERA_URL            the manager's address, or that of a bare pipeline process;
                         empty: the simulator is started
  FELDERA_PIPELINE       the pipeline at the manager; empty: FELDERA_URL is a bare process
  FELDERA_BARE_URL       the same pipeline's process, where it can be reached beside the manager
  FELDERA_API_KEY        the manager's key, with its prefix "apikey:"
  FELDERA_READ_ONLY_KEY  a key whose role may only read
  FELDERA_ALLOW          what may be done to a real pipeline, separated by blanks:
                         exclusive  take it for ourselves: pause it, open transactions
                         restart    stop and start it: an open-source pipeline loses its state

`

// command is main without the process around it.
func command(ctx context.Context, args []string, env func(string) string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("contract", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.Usage = func() {
		_, _ = fmt.Fprint(stderr, usage)
		fs.PrintDefaults()
	}
	printSQL := fs.Bool("sql", false, "print the SQL program that the pipeline must run")
	list := fs.Bool("list", false, "print the clauses with their sections and requirements")
	only := fs.String("run", "", "run only the clauses whose id matches this expression")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return exitHolds
		}
		return exitUsage
	}
	if fs.NArg() > 0 {
		fs.Usage()
		return exitUsage
	}
	pattern, err := regexp.Compile(*only)
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "contract: -run: %v\n", err)
		return exitUsage
	}
	var chosen []clause
	for _, c := range clauses() {
		if pattern.MatchString(c.id) {
			chosen = append(chosen, c)
		}
	}
	if len(chosen) == 0 {
		// A run of nothing must not look like one that holds.
		_, _ = fmt.Fprintf(stderr, "contract: -run: no clause has an id that matches %q\n", *only)
		return exitUsage
	}
	switch {
	case *printSQL:
		_, _ = io.WriteString(stdout, programSQL)
		return exitHolds
	case *list:
		for _, c := range chosen {
			_, _ = fmt.Fprintf(stdout, "%-26s §%-6s %-24s %s\n", c.id, c.section, c.needs, c.says)
		}
		return exitHolds
	}
	t := target{
		url: env("FELDERA_URL"), pipeline: env("FELDERA_PIPELINE"), bareURL: env("FELDERA_BARE_URL"),
		key: env("FELDERA_API_KEY"), readOnlyKey: env("FELDERA_READ_ONLY_KEY"),
	}
	for _, word := range strings.Fields(env("FELDERA_ALLOW")) {
		switch word {
		case "exclusive":
			t.allow |= needExclusive
		case "restart":
			t.allow |= needRestart
		default:
			_, _ = fmt.Fprintf(stderr, "contract: FELDERA_ALLOW: %q is neither exclusive nor restart\n", word)
			return exitUsage
		}
	}
	if t.url == "" && (t.pipeline != "" || t.bareURL != "") {
		_, _ = fmt.Fprintln(stderr, "contract: FELDERA_URL is missing; without it the simulator is used, and then nothing else may be set")
		return exitUsage
	}
	r, err := newRunner(ctx, t, stdout)
	if err != nil {
		_, _ = fmt.Fprintf(stderr, "contract: %v\n", err)
		return exitUnreachable
	}
	defer r.close()
	sum := r.run(ctx, chosen)
	_, _ = fmt.Fprintln(stdout, sum)
	if sum.failed > 0 {
		return exitBroken
	}
	return exitHolds
}
