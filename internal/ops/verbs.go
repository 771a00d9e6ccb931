package ops

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Call is what a verb is run with.
type Call struct {
	Environ []string // NAME=value, as os.Environ gives them
	Args    []string // what follows the flags
	JSON    bool     // -json was given
	Stdout  io.Writer
	Stderr  io.Writer
}

// Verb is one thing that a program can be asked to do.
type Verb struct {
	// Name is one word, or two of which the first is a subject with several
	// verbs, such as "offsets show".
	Name string
	Help string // one line
	Args string // for the usage line, such as "TABLE…"; "" = there are none
	JSON bool   // has -json
	// Flags adds flags of its own; may be nil.
	Flags func(*flag.FlagSet)
	// MoreHelp is printed after the usage; may be nil.
	MoreHelp func(io.Writer) error
	// Run writes results to call.Stdout and logs to call.Stderr. ExitCode
	// says what its error means for the process.
	Run func(ctx context.Context, call Call) error
}

// Program is a daemon's command line. The first verb is the one that is run
// when none is named.
type Program struct {
	Name    string
	Summary string // one line
	Verbs   []Verb
}

// Main runs the verb that args (without the program's name) ask for and gives
// the exit code. Results and asked-for help go to stdout, errors and the usage
// after a mistake to stderr.
func (p Program) Main(ctx context.Context, args, environ []string, stdout, stderr io.Writer) int {
	verb, rest, ok := p.find(args)
	if !ok {
		if isHelp(args[0]) {
			p.usage(stdout)
			return ExitOK
		}
		// A word that is no verb may be anything, so it is not repeated unless
		// it looks like a verb with a typing mistake.
		if isWord(args[0]) {
			_, _ = fmt.Fprintf(stderr, "%s: there is no verb %q\n\n", p.Name, args[0])
		} else {
			_, _ = fmt.Fprintf(stderr, "%s: the first argument is not a verb\n\n", p.Name)
		}
		p.usage(stderr)
		return ExitUsage
	}
	call := Call{Environ: environ, Stdout: stdout, Stderr: stderr}
	flags := flag.NewFlagSet(p.Name+" "+verb.Name, flag.ContinueOnError)
	flags.SetOutput(io.Discard) // its errors quote values, and come with a usage on stderr
	if verb.JSON {
		flags.BoolVar(&call.JSON, "json", false, "write the result as JSON")
	}
	if verb.Flags != nil {
		verb.Flags(flags)
	}
	switch err := flags.Parse(rest); {
	case errors.Is(err, flag.ErrHelp):
		if err := p.verbUsage(stdout, verb, flags); err != nil {
			return p.end(stderr, err)
		}
		return ExitOK
	case err != nil:
		_, _ = fmt.Fprintf(stderr, "%s %s: %s\n\n", p.Name, verb.Name, flagMistake(err))
		_ = p.verbUsage(stderr, Verb{Name: verb.Name, Help: verb.Help, Args: verb.Args}, flags) // stderr is gone: nobody to tell
		return ExitUsage
	}
	if call.Args = flags.Args(); len(call.Args) > 0 && verb.Args == "" {
		_, _ = fmt.Fprintf(stderr, "%s %s: it takes no arguments\n", p.Name, verb.Name)
		return ExitUsage
	}
	return p.end(stderr, verb.Run(ctx, call))
}

// find gives the verb and what follows it.
func (p Program) find(args []string) (verb Verb, rest []string, ok bool) {
	if len(args) == 0 {
		return p.Verbs[0], nil, true
	}
	if isHelp(args[0]) {
		return Verb{}, nil, false
	}
	name := args[0]
	if name == "-version" || name == "--version" {
		name = "version"
	}
	if strings.HasPrefix(name, "-") {
		return p.Verbs[0], args, true
	}
	for _, v := range p.Verbs {
		if v.Name == name {
			return v, args[1:], true
		}
		if subject, what, two := strings.Cut(v.Name, " "); two && subject == name && len(args) > 1 && args[1] == what {
			return v, args[2:], true
		}
	}
	return Verb{}, nil, false
}

// end prints what an error says, each of its lines on one of its own, and
// gives its code. What the log has said already is not printed again: the
// lines of a daemon that logs JSON stay JSON to the last.
func (p Program) end(stderr io.Writer, err error) int {
	if _, said := errors.AsType[*loggedError](err); err != nil && !said {
		for line := range strings.Lines(err.Error()) {
			if line = oneLine(line); line != "" {
				_, _ = fmt.Fprintf(stderr, "%s: %s\n", p.Name, line) // stderr is gone: the code still tells
			}
		}
	}
	return ExitCode(err)
}

func (p Program) usage(w io.Writer) {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n\nusage: %s [verb] [flags]\n\n", p.Name, p.Summary, p.Name)
	width := 12
	for _, v := range p.Verbs {
		width = max(width, len(v.Name))
	}
	for i, v := range p.Verbs {
		note := ""
		if i == 0 {
			note = " (the default)"
		}
		fmt.Fprintf(&b, "  %-*s %s%s\n", width, v.Name, v.Help, note)
	}
	fmt.Fprintf(&b, "  %-*s %s\n\n%s VERB -help tells more about a verb", width, "help", "print this", p.Name)
	if i := slices.IndexFunc(p.Verbs, func(v Verb) bool { return v.MoreHelp != nil }); i >= 0 {
		fmt.Fprintf(&b, "; %s %s -help lists all settings", p.Name, p.Verbs[i].Name)
	}
	b.WriteString(".\n")
	_, _ = io.WriteString(w, b.String()) // nobody reads: the code still tells
}

func (p Program) verbUsage(w io.Writer, v Verb, flags *flag.FlagSet) error {
	line := p.Name + " " + v.Name
	hasFlags := false
	flags.VisitAll(func(*flag.Flag) { hasFlags = true })
	if hasFlags {
		line += " [flags]"
	}
	if v.Args != "" {
		line += " " + v.Args
	}
	if _, err := fmt.Fprintf(w, "usage: %s\n\n%s\n", line, v.Help); err != nil {
		return fmt.Errorf("print the usage: %w", err)
	}
	if hasFlags {
		if _, err := fmt.Fprintln(w); err != nil {
			return fmt.Errorf("print the usage: %w", err)
		}
		flags.SetOutput(w)
		flags.PrintDefaults()
	}
	if v.MoreHelp == nil {
		return nil
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return fmt.Errorf("print the usage: %w", err)
	}
	return v.MoreHelp(w)
}

// flagMistake rewrites an error of package flag, which quotes what was given:
// the name of an unknown flag is kept if it looks like one, a value never.
func flagMistake(err error) string {
	if name, ok := strings.CutPrefix(err.Error(), "flag provided but not defined: -"); ok && isWord(name) {
		return fmt.Sprintf("there is no flag -%s", name)
	}
	return "a flag is unknown or has a value that it cannot have"
}

func isHelp(arg string) bool {
	return arg == "help" || arg == "-h" || arg == "-help" || arg == "--help"
}

func isWord(arg string) bool {
	return len(arg) <= 20 && !strings.ContainsFunc(arg, func(c rune) bool {
		return c != '-' && (c < 'a' || c > 'z')
	})
}

// Printer is a configuration that can show itself without its secrets.
type Printer interface {
	Print(w io.Writer) error
	PrintJSON(w io.Writer) error
}

// ConfigVerb prints the settings in force. help writes what each setting is.
func ConfigVerb(load func(environ []string) (Printer, error), help func(io.Writer) error) Verb {
	return Verb{
		Name: "config", Help: "print the settings in force and where each comes from", JSON: true, MoreHelp: help,
		Run: func(_ context.Context, call Call) error {
			c, err := load(call.Environ)
			if err != nil {
				return err
			}
			if call.JSON {
				return c.PrintJSON(call.Stdout)
			}
			return c.Print(call.Stdout)
		},
	}
}

// CheckVerb runs the preflights that prepare gives. An error of prepare is
// for what makes them impossible, such as a wrong configuration.
func CheckVerb(prepare func(ctx context.Context, call Call) ([]NamedCheck, error)) Verb {
	return Verb{
		Name: "check", Help: "look whether everything is set up as needed, and say what mends it", JSON: true,
		Run: func(ctx context.Context, call Call) error {
			checks, err := prepare(ctx, call)
			if err != nil {
				return err
			}
			if code := RunChecks(ctx, call.Stdout, call.JSON, checks); code != ExitOK {
				return WithExitCode(code, nil)
			}
			return nil
		},
	}
}

// HealthcheckVerb asks the running daemon for its health. It ends with 0 or 1
// and no other code, as container engines define it.
func HealthcheckVerb(address func(environ []string) (string, error)) Verb {
	return Verb{
		Name: "healthcheck", Help: "ask the running daemon whether it is healthy: exit code 0 or 1",
		Run: func(ctx context.Context, call Call) error {
			addr, err := address(call.Environ)
			if err == nil {
				err = Healthcheck(ctx, addr)
			}
			if err != nil {
				return WithExitCode(ExitUnexpected, err)
			}
			return nil
		},
	}
}

// VersionVerb prints what was built.
func VersionVerb(name string) Verb {
	return Verb{
		Name: "version", Help: "print the version", JSON: true,
		Run: func(_ context.Context, call Call) error {
			v := Version()
			if call.JSON {
				if err := json.NewEncoder(call.Stdout).Encode(v); err != nil {
					return fmt.Errorf("print the version: %w", err)
				}
				return nil
			}
			if _, err := fmt.Fprintf(call.Stdout, "%s %s\n", name, v); err != nil {
				return fmt.Errorf("print the version: %w", err)
			}
			return nil
		},
	}
}
