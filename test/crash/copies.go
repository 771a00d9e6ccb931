package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"holdfast/test/harness"
)

// This file brings a pgsource to the places of copies: a table is added, whose
// rows were there before; or rows of the pipeline are made to differ, and a
// resync or a repair is asked for. Each leaves something that only the copy can
// put right, so that the comparison at the end tells whether it did.

const (
	// askAgain is how long a daemon has to come to a place before it is asked for
	// the same once more.
	askAgain = 10 * time.Second
	// verbLimit bounds a verb.
	verbLimit = 30 * time.Second
)

// prepare sees to it that the next daemon has something to copy. No daemon runs,
// and everything that was written to the table that is carried at times is
// acknowledged.
func (w *bankWorld) prepare(ctx context.Context, c crashCase, env map[string]string) error {
	if err := w.acceptNotices(ctx); err != nil {
		return err
	}
	env["PGSOURCE_TABLES"] = w.settings["PGSOURCE_TABLES"]
	if c.by == byAddition || w.adds {
		if err := w.leaveOut(ctx, c.by == byAddition); err != nil {
			return err
		}
	}
	switch c.by {
	case byAddition:
		return w.add(ctx, env)
	case byResync:
		if err := w.damage(ctx); err != nil {
			return err
		}
		return w.askForResync(ctx)
	case byRepair:
		return w.damage(ctx)
	}
	return nil
}

// add has the next daemon carry one table more, and the writers write into it.
// Its rows have changed while no stream had them.
func (w *bankWorld) add(ctx context.Context, env map[string]string) error {
	for _, sql := range []string{"UPDATE added SET v = v + 1", "ALTER PUBLICATION holdfast ADD TABLE " + addedTable} {
		if err := w.pg.Exec(ctx, sql); err != nil {
			return err
		}
	}
	env["PGSOURCE_TABLES"] += ",public." + addedTable
	w.adds, w.copying = true, true
	w.added.Store(true)
	return nil
}

// leaveOut takes the table that is carried at times out, where it is carried.
// Where it comes back at once, a daemon runs without it before: one that knows a
// table as copied does not copy it again.
func (w *bankWorld) leaveOut(ctx context.Context, comesBack bool) error {
	if !w.adds {
		return nil
	}
	w.adds = false
	if err := w.pg.Exec(ctx, "ALTER PUBLICATION holdfast DROP TABLE "+addedTable); err != nil {
		return err
	}
	if !comesBack {
		return nil
	}
	if err := w.daemon.Restart(map[string]string{"CRASH_AT": "", "PGSOURCE_TABLES": w.settings["PGSOURCE_TABLES"]}); err != nil {
		return err
	}
	limit, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	err := harness.Eventually(limit, "a daemon streams without the added table", func(ctx context.Context) (any, bool) {
		status, body, err := w.daemon.Get(ctx, "/readyz")
		return fmt.Sprintf("%d %s %v", status, body, err), err == nil && status == http.StatusOK
	})
	if err != nil {
		return err
	}
	return w.stopDaemon(ctx)
}

// damage makes rows of the pipeline differ in every way, of which no writer of
// the source will ever tell. Rows without a meaning for the sum are used.
func (w *bankWorld) damage(ctx context.Context) error {
	missing, stale, ghost := quietRow+1, quietRow+2, quietRow+quietRows+1
	body := fmt.Sprintf(`[{"delete":{"id":%d}},{"insert":{"id":%d,"note":"stale","picture":null,"rate":1.5}},{"insert":{"id":%d,"note":"ghost","picture":null,"rate":null}}]`,
		missing, stale, ghost)
	ctx, cancel := context.WithTimeout(ctx, verbLimit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.sim.URL()+"/v0/pipelines/p/ingress/filler?format=json&update_format=insert_delete&array=true", strings.NewReader(body))
	if err != nil {
		return err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	if text, err := io.ReadAll(answer.Body); err != nil || answer.StatusCode != http.StatusOK {
		return fmt.Errorf("make rows of the pipeline differ: %d %s %w", answer.StatusCode, text, err)
	}
	w.copying = true
	return nil
}

// verb runs a verb of the daemon to its end.
func (w *bankWorld) verb(ctx context.Context, args ...string) (harness.RunResult, error) {
	ctx, cancel := context.WithTimeout(ctx, verbLimit)
	defer cancel()
	return harness.Run(ctx, harness.DaemonOptions{Program: w.program, Args: args, Env: w.settings})
}

// askForResync asks for a resync of the table whose rows differ, and of one that
// moves money.
func (w *bankWorld) askForResync(ctx context.Context) error {
	w.asked = time.Now()
	result, err := w.verb(ctx, "resync", "-wait", "0s", "public.filler", "public.left_accounts")
	if err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("pgsource resync: %+v", result)
	}
	return err
}

// askForRepair compares the table whose rows differ with the source, while the
// daemon runs, which is asked to put them right.
func (w *bankWorld) askForRepair(ctx context.Context) {
	w.asked = time.Now()
	if w.stopVerb != nil {
		w.stopVerb()
		w.verbs.Wait()
	}
	ctx, w.stopVerb = context.WithCancel(context.WithoutCancel(ctx))
	w.verbs.Go(func() {
		// The daemon may die meanwhile, or Feldera: then it is asked again.
		_, _ = w.verb(ctx, "verify", "-repair", "-rate", "0", "-wait", askAgain.String(), "public.filler")
	})
}

// provokeCopies brings the daemon to places of copies.
func (w *bankWorld) provokeCopies(ctx context.Context, c crashCase) error {
	if time.Since(w.asked) < askAgain {
		return nil
	}
	switch c.by {
	case byResync:
		return w.askForResync(ctx)
	case byRepair:
		if status, _, err := w.daemon.Get(ctx, "/readyz"); err == nil && status == http.StatusOK {
			// A daemon that has just noticed a loss has put right what differed.
			if err := w.damage(ctx); err != nil {
				return err
			}
			w.askForRepair(ctx)
		}
	}
	return nil
}

// bankState is what the state says of copies and losses.
type bankState struct {
	Record struct {
		Notices  []bankNotice            `json:"notices"`
		Resyncs  []struct{ Name string } `json:"resyncs"`
		Snapshot *struct {
			Jobs []struct{ Name string } `json:"jobs"`
		} `json:"snapshot"`
	} `json:"record"`

	requests int // of verbs, which wait beside it
}

type bankNotice struct {
	Tables  []string  `json:"tables"`
	Noticed time.Time `json:"noticed_at"`
}

func (w *bankWorld) readState() (*bankState, error) {
	text, err := os.ReadFile(w.stateFile())
	if err != nil {
		return nil, err
	}
	st := new(bankState)
	if err := json.Unmarshal(text, st); err != nil {
		return nil, err
	}
	waiting, err := filepath.Glob(w.stateFile() + ".request-*")
	st.requests = len(waiting)
	return st, err
}

// busy tells what is still to be copied; "" for nothing.
func (st *bankState) busy() string {
	switch {
	case st.requests > 0:
		return fmt.Sprintf("%d requests wait", st.requests)
	case len(st.Record.Resyncs) > 0:
		return fmt.Sprintf("resyncs of %v", st.Record.Resyncs)
	case st.Record.Snapshot != nil && len(st.Record.Snapshot.Jobs) > 0:
		return fmt.Sprintf("copies of %v", st.Record.Snapshot.Jobs)
	}
	return ""
}

// atRisk gives the tables that notices name.
func (st *bankState) atRisk() (tables []string) {
	for _, n := range st.Record.Notices {
		tables = append(tables, n.Tables...)
	}
	slices.Sort(tables)
	return slices.Compact(tables)
}

// mustHeal tells whether a table that a notice names is resynced: not the one that
// has no key, and not the one that is carried at times where it is not.
func (w *bankWorld) mustHeal(table string) bool {
	return table != w.quoted(keylessTable) && (w.adds || table != w.quoted(addedTable))
}

// acceptNotices accepts notices of tables that are not resynced, for the daemon
// that starts next.
func (w *bankWorld) acceptNotices(ctx context.Context) error {
	st, err := w.readState()
	if err != nil {
		return err
	}
	if st.busy() != "" || len(st.atRisk()) == 0 || slices.ContainsFunc(st.atRisk(), w.mustHeal) {
		return nil
	}
	result, err := w.verb(ctx, "state", "accept", "-yes")
	if err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("pgsource state accept: %+v", result)
	}
	return err
}

// quoted gives a table's name as the state spells it.
func (w *bankWorld) quoted(table string) string { return `"public"."` + table + `"` }

// heal waits until copies have put right what a stream does not: rows that were
// lost with a pipeline, that were made to differ, or that were in a table before
// it was added. Every row has to be equal then, and the notice of a loss over
// but for the table that has no key, whose rows nobody can bring a second time
// without counting them twice.
func (w *bankWorld) heal(ctx context.Context) (d differences, err error) {
	var looked time.Time
	err = w.eventually(ctx, "copies make the two sides equal", func(ctx context.Context) (any, bool) {
		st, err := w.readState()
		switch {
		case err != nil:
			return err, false
		case st.busy() != "":
			return st.busy(), false
		case w.lost && slices.ContainsFunc(st.atRisk(), w.mustHeal):
			return fmt.Sprintf("notices name %v", st.atRisk()), false
		case time.Since(looked) < 500*time.Millisecond:
			return d.what, false
		}
		looked = time.Now()
		d, err = difference(ctx, w.pg, w.sim, w.tables(), w.oracle.lost())
		return fmt.Sprint(d.what, " ", err), err == nil && d.what == ""
	})
	if err != nil {
		return d, &lostError{fmt.Sprintf("%s; and copies do not put it right: %v", d.what, w.noProgress(context.WithoutCancel(ctx), err))}
	}
	switch {
	case w.lost && d.gone > w.gone:
		err = harness.Eventually(ctx, "the notice names the table that cannot be resynced", func(context.Context) (any, bool) {
			st, err := w.readState()
			if err != nil {
				return err, false
			}
			return st.atRisk(), slices.Contains(st.atRisk(), w.quoted(keylessTable))
		})
		if err != nil {
			return d, &lostError{fmt.Sprintf("%d rows of the table without a key were lost with the pipeline, and nobody says so: %v", d.gone-w.gone, err)}
		}
		w.oracle.expect("the pipeline lost rows: every table with a key was resynced, and the notice names the one without", 1)
	case w.lost:
		w.oracle.expect("the pipeline lost rows: every table with a key was resynced, and the one without lacks none", 1)
	}
	return d, nil
}
