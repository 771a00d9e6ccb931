package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os/signal"
	"syscall"
	"time"

	"holdfast/internal/ops"
	"holdfast/internal/wal"
)

// resync is what the verb was asked to do.
type resync struct {
	all  bool
	wait time.Duration
}

func (f *resync) flags(fs *flag.FlagSet) {
	fs.BoolVar(&f.all, "all", false, "all mapped tables")
	fs.DurationVar(&f.wait, "wait", takenWithin, "how long to wait for the pgsource that runs to take the request on; it stays where it is after that")
}

// takenWithin is how long a pgsource that runs may take to take a request on.
const takenWithin = 30 * time.Second

// resyncVerb asks the pgsource that runs for a resync.
func resyncVerb() ops.Verb {
	ask := &resync{}
	return ops.Verb{
		Name: "resync", Help: "ask the running pgsource to bring Feldera tables to what their source tables have: what is missing or stale is copied, what is too many deleted",
		Args: "TABLE…", JSON: true, Flags: ask.flags,
		Run: func(ctx context.Context, call ops.Call) error {
			ctx, release := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
			defer release()
			return ask.run(ctx, call)
		},
	}
}

func (f *resync) run(ctx context.Context, call ops.Call) error {
	given := *f
	names, err := tableArgs(&call, "resync", f.flags, func() { *f = given })
	switch {
	case err != nil:
	case f.all == (len(names) > 0):
		err = errors.New("resync takes the tables, or -all")
	case f.wait < 0 || f.wait > time.Hour:
		err = errors.New("-wait has to be from 0s to 1h")
	}
	if err != nil {
		return ops.WithExitCode(ops.ExitUsage, err)
	}
	return lookingFor(ctx, call, f.wait+stateTimeout, func(ctx context.Context, source *wal.Source) error {
		tables, err := source.FindTables(names)
		if err != nil {
			return ops.WithExitCode(ops.ExitUsage, err)
		}
		asked := make([]*wal.Request, 0, len(tables))
		for _, t := range tables {
			r, err := source.AskResync(ctx, t)
			if err != nil {
				return unavailable(err)
			}
			asked = append(asked, r)
		}
		return f.say(ctx, call, source, asked)
	})
}

// say waits until the requests are taken on and prints what became of them.
func (f *resync) say(ctx context.Context, call ops.Call, source *wal.Source, asked []*wal.Request) error {
	taken, err := awaitTaken(ctx, source, asked, f.wait)
	if err != nil {
		return unavailable(err)
	}
	if call.JSON {
		type line struct {
			Table string `json:"table"`
			ID    string `json:"request"`
		}
		lines := make([]line, len(asked))
		for i, r := range asked {
			lines[i] = line{r.Schema + "." + r.Name, r.ID}
		}
		return writeJSON(call.Stdout, struct {
			Taken    bool   `json:"taken"`
			Requests []line `json:"requests"`
		}{taken, lines})
	}
	text := ""
	for _, r := range asked {
		text += fmt.Sprintf("%s.%s: resync requested (%s)\n", r.Schema, r.Name, r.ID)
	}
	return write(call.Stdout, text+takenText(taken))
}

func takenText(taken bool) string {
	if taken {
		return "pgsource has taken it on; /healthz (check resync) and the metrics pgsource_resync_* show how far it is\n"
	}
	return "no pgsource has taken it on yet: the request is durable, and waits beside the state for one that streams\n"
}

// awaitTaken waits until none of the requests is left.
func awaitTaken(ctx context.Context, source *wal.Source, asked []*wal.Request, wait time.Duration) (bool, error) {
	const every = 200 * time.Millisecond
	deadline := time.Now().Add(wait)
	turn := time.NewTicker(every)
	defer turn.Stop()
	for {
		waits := false
		for _, r := range asked {
			still, err := source.Asked(ctx, r.ID)
			if err != nil {
				return false, err
			}
			waits = waits || still
		}
		if !waits || time.Now().After(deadline) {
			return !waits, nil
		}
		select {
		case <-turn.C:
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
}
