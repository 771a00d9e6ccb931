package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"holdfast/internal/config"
	"holdfast/internal/ops"
	"holdfast/internal/wal"
)

// stateStore makes the store that PGSOURCE_STATE names; nil keeps none.
func stateStore(c *config.PGSource) wal.StateStore {
	switch place := c.StatePlace(); {
	case place.Path != "":
		return wal.NewFileStore(place.Path)
	case place.Table != "":
		o := wal.TableOptions{
			DSN: c.DSN.Value, Schema: place.Schema, Table: place.Table, Slot: c.Slot, Create: c.Create, SourceCluster: true,
		}
		if c.StateDSN.IsSet() {
			o.DSN, o.SourceCluster = c.StateDSN.Value, false
		}
		return wal.NewTableStore(o)
	}
	return nil
}

// stateVerb shows and changes what pgsource remembers.
func stateVerb() ops.Verb {
	return ops.Verb{
		Name: "state", Help: "show the bookmark (show), take the slot's present position for it (reset -yes), or clear its notices (accept -yes)",
		Args: "show|reset|accept", JSON: true,
		Run: func(ctx context.Context, call ops.Call) error {
			action, yes, err := stateArgs(&call)
			if err != nil {
				return err
			}
			return lookingFor(ctx, call, stateTimeout, func(ctx context.Context, source *wal.Source) error {
				switch {
				case action == "show":
					return showState(ctx, call, source)
				case !yes:
					return ops.WithExitCode(ops.ExitUsage, fmt.Errorf("state %s changes what pgsource believes: %s; say -yes", action, meaning[action]))
				case action == "reset":
					return resetState(ctx, call, source)
				default:
					return acceptState(ctx, call, source)
				}
			})
		},
	}
}

// stateTimeout bounds the verb: servers that do not answer.
const stateTimeout = time.Minute

// meaning says what the actions that change something mean.
var meaning = map[string]string{
	"reset": "the slot's present position becomes the bookmark, and whatever the stream has left out before it stays missing from the pipeline unless you have loaded it",
	"accept": "the notices are cleared and the pipeline that runs now counts as the one that holds everything up to the bookmark; " +
		"rows that it lacks are not sent again",
}

// stateArgs reads "show", "reset -yes", … with the flags in any place.
func stateArgs(call *ops.Call) (action string, yes bool, err error) {
	flags := flag.NewFlagSet("state", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.BoolVar(&yes, "yes", false, "")
	flags.BoolVar(&call.JSON, "json", call.JSON, "")
	usage := ops.WithExitCode(ops.ExitUsage, fmt.Errorf("state takes one of show [-json], reset -yes, accept -yes"))
	if len(call.Args) == 0 {
		return "", false, usage
	}
	action = call.Args[0]
	if _, ok := meaning[action]; !ok && action != "show" {
		return "", false, usage
	}
	if err := flags.Parse(call.Args[1:]); err != nil || flags.NArg() > 0 {
		return "", false, usage
	}
	return action, yes, nil
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("write the state: %w", err)
	}
	return nil
}

func showState(ctx context.Context, call ops.Call, source *wal.Source) error {
	st, err := source.LoadState(ctx)
	if err != nil {
		return err
	}
	if call.JSON {
		return writeJSON(call.Stdout, struct {
			Store string     `json:"store"`
			State *wal.State `json:"state"`
		}{source.StateWhere(), st})
	}
	text := fmt.Sprintf("%s holds nothing\n", source.StateWhere())
	if st != nil {
		text = describeState(source.StateWhere(), st)
	}
	if _, err := io.WriteString(call.Stdout, text); err != nil {
		return fmt.Errorf("write the state: %w", err)
	}
	return nil
}

func describeState(where string, st *wal.State) string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-14s %s\n", name, fmt.Sprintf(format, args...))
	}
	line("store", "%s", where)
	line("acknowledged", "%s   the bookmark: nothing above it was told to the server", st.Acknowledged)
	line("rows", "%s   the last acknowledged position that brought rows", st.Rows)
	line("sent", "%s   no row above it was sent; runs ahead", st.Sent)
	line("slot", "%q, publication %q, database %q", st.Slot, st.Publication, st.Database)
	line("cluster", "system identifier %s, timeline %d", st.System, st.Timeline)
	line("incarnation", "%s", st.Incarnation)
	if st.Intent != nil {
		line("transaction", "Feldera transaction %d of incarnation %s was ours", st.Intent.ID, st.Intent.Incarnation)
	}
	if st.Refused != nil {
		line("refused", "%s: %s", st.Refused.Refused.UTC().Format(time.RFC3339), st.Refused.Why)
	}
	if st.Skip != nil {
		line("skip", "the transaction ending at %s is passed over; its rows are in %s", st.Skip.End, st.Skip.File)
	}
	line("saved", "%s, save %d, by %s", st.Saved.UTC().Format(time.RFC3339Nano), st.Sequence, st.Writer)
	for _, n := range st.Notices {
		line("notice", "%s %s after %s, noticed %s: up to %s is in doubt", n.Kind, n.Now, n.Was, n.Noticed.UTC().Format(time.RFC3339), n.To)
	}
	for i := range st.Differing {
		d := &st.Differing[i]
		line("differs", "%s.%s, noticed %s: %s", d.Schema, d.Table, d.Noticed.UTC().Format(time.RFC3339), d.Why)
	}
	for _, t := range st.NeedsResync() {
		line("needs resync", "%s, since %s", t.Table, t.Noticed.UTC().Format(time.RFC3339))
	}
	return b.String()
}

func resetState(ctx context.Context, call ops.Call, source *wal.Source) error {
	done, err := source.ResetState(ctx)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(call.Stdout, describeReset(done)); err != nil {
		return fmt.Errorf("write the state: %w", err)
	}
	return nil
}

// describeReset says what was done, and what nobody will say any more.
func describeReset(done *wal.Reset) string {
	var b strings.Builder
	switch {
	case done.Unreadable != nil:
		fmt.Fprintf(&b, "replaced a state that could not be read: %v\n", done.Unreadable)
	case done.Before == nil:
		b.WriteString("there was no state before\n")
	default:
		fmt.Fprintf(&b, "the bookmark was %s of cluster %s, timeline %d\n", done.Before.Acknowledged, done.Before.System, done.Before.Timeline)
	}
	fmt.Fprintf(&b, "the bookmark is now %s: %s\n", done.After.Acknowledged, meaning["reset"])
	if names := doubtful(done.Before); len(names) > 0 {
		fmt.Fprintf(&b, "these tables were known to differ from the source, or may: %s; the state says so no more, so have them read anew behind the next start: pgsource resync -all\n", strings.Join(names, ", "))
	}
	if tx := done.Transaction; tx != nil {
		fmt.Fprintf(&b, "%s: this pgsource has opened it, and the next start commits it, with what is in it then\n", tx.Text)
	}
	if tx := done.Foreign; tx != nil {
		fmt.Fprintf(&b, "%s. The state does not name it: if nobody ends it, run: pgsource feldera-transaction commit -yes %d\n", tx.Text, tx.ID)
	}
	if !done.PipelineAsked {
		b.WriteString("the pipeline did not answer: whatever incarnation runs at the next start counts as the one that holds everything\n")
	}
	return b.String()
}

// doubtful gives the tables whose rows a state says may not be the source's.
func doubtful(st *wal.State) []string {
	if st == nil {
		return nil
	}
	var names []string
	for i := range st.Differing {
		names = append(names, st.Differing[i].Schema+"."+st.Differing[i].Table)
	}
	for _, t := range st.NeedsResync() {
		names = append(names, t.Table)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func acceptState(ctx context.Context, call ops.Call, source *wal.Source) error {
	done, err := source.AcceptState(ctx)
	if err != nil {
		return err
	}
	text := "there was nothing to accept\n"
	if len(done.Notices) > 0 || done.Now != "" {
		text = fmt.Sprintf("%d notices cleared: %s\n", len(done.Notices), meaning["accept"])
	}
	if len(done.Differing) > 0 {
		names := make([]string, len(done.Differing))
		for i, d := range done.Differing {
			names[i] = d.Schema + "." + d.Table
		}
		differ := "these tables count as equal to the source's now: " + strings.Join(names, ", ") + "\n"
		if len(done.Notices) == 0 && done.Now == "" {
			text = ""
		}
		text += differ
	}
	if done.Now != "" {
		text += fmt.Sprintf("the incarnation is now %s, before %s\n", done.Now, done.Was)
	}
	if _, err := io.WriteString(call.Stdout, text); err != nil {
		return fmt.Errorf("write the state: %w", err)
	}
	return nil
}
