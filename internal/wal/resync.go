package wal

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/prometheus/client_golang/prometheus"

	"holdfast/internal/crash"
	"holdfast/internal/decode"
	"holdfast/internal/sabotage"
	"holdfast/internal/wal/runs"
)

// A resync brings one Feldera table to what its source table has, while the
// stream runs. It is made of copies alone, which the merge holds against the
// stream, so that no row of an earlier moment wins over a later change:
//
//	rows     a copy of the whole table: what is missing or stale is put right
//	ghosts   the keys of both sides are read and compared; those that only the
//	         pipeline has are given to copies of lists of keys, which delete a
//	         key that the source has not and bring the row of one that it has
//
// Nothing is deleted because one read did not find it. A resync is in the state
// from when it is taken on until it is done, and goes on after a crash with the
// stage that it was in. A table that somebody else feeds too is not touched:
// their rows would be taken for ghosts.

// resyncState is one resync in the state.
type resyncState struct {
	// ID is that of the request, or one of our own.
	ID     string `json:"id"`
	Schema string `json:"schema"`
	Name   string `json:"name"`
	// Cause says who asked: a person, or a loss of the pipeline.
	Cause string    `json:"cause"`
	Asked time.Time `json:"asked_at"`
	// Job is its copy, 0 before that is taken on. Began is when that was, for
	// people, and Order its number among State.Events: losses with a lower one are
	// mended by it. By the times, a clock that is put back behind the beginning
	// would date a later loss before it, and nobody would mend that. The Order of a
	// version that did not count is 0: it mends nothing.
	Job   uint64    `json:"job,omitzero"`
	Began time.Time `json:"began_at,omitzero"`
	Order uint64    `json:"order,omitzero"`
	// Ghosts: the rows are there, the keys that are too many are looked for. It is
	// written in one with the end of Job, so that a job that is gone in another way
	// is not taken for done.
	Ghosts bool `json:"ghosts,omitzero"`
}

// rowsCopied gives the resyncs when a copy is done.
func rowsCopied(list []resyncState, job uint64) []resyncState {
	for i := range list {
		if list[i].Job == job && !list[i].Ghosts {
			list = slices.Clone(list)
			list[i].Ghosts = true
			return list
		}
	}
	return list
}

// withoutJobs gives the resyncs when the copies of was that are not in next are
// given up: a resync that needs one of them begins again.
func withoutJobs(list []resyncState, was, next *snapshotState) []resyncState {
	if was == nil {
		return list
	}
	list = slices.Clone(list)
	for i := range was.Jobs {
		j := &was.Jobs[i]
		if j.Kind != CopyResync || next.job(j.ID) != nil {
			continue
		}
		for k := range list {
			if list[k].table() == j.table() {
				list[k].beginAgain()
			}
		}
	}
	return list
}

// beginAgain forgets what a resync has done.
func (r *resyncState) beginAgain() { r.Job, r.Began, r.Order, r.Ghosts = 0, time.Time{}, 0, false }

// The causes of a resync.
const (
	causeAsked = "asked"
	causeLoss  = "loss"
)

const (
	// maxResyncs bounds the resyncs that wait, where there are not more tables.
	maxResyncs = 64
	// maxStateResyncs is above what any number of tables leads to.
	maxStateResyncs = 100_000
)

func (r *resyncState) table() tableName { return tableName{r.Schema, r.Name} }

// stage names what a resync does.
func (r *resyncState) stage() string {
	switch {
	case r.Ghosts:
		return stageGhosts
	case r.Job != 0:
		return stageRows
	}
	return stageWaiting
}

// The stages, as a metric's label.
const (
	stageWaiting = "waiting"
	stageRows    = "rows"
	stageGhosts  = "ghosts"
)

// resyncMetrics are the numbers of resyncs and repairs.
type resyncMetrics struct {
	tables    *prometheus.GaugeVec
	differing prometheus.Gauge
	ended     *prometheus.CounterVec
	ghosts    *prometheus.CounterVec
	requests  *prometheus.CounterVec
}

func newResyncMetrics(reg prometheus.Registerer) *resyncMetrics {
	m := &resyncMetrics{
		tables: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "pgsource_resync_tables", Help: "Tables that are being resynced, by stage: waiting, rows (the source's are copied) or ghosts (keys that only the pipeline has are looked for).",
		}, []string{"stage"}),
		differing: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "pgsource_differing_tables", Help: "Tables whose rows are known to differ from the source's, since it changed beside the stream, until a resync has read them or a person has accepted it.",
		}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_resyncs_total", Help: "Resyncs that ended, by cause (asked, loss) and result (done, refused).",
		}, []string{"cause", "result"}),
		ghosts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_resync_ghost_keys_total", Help: "Keys that only the pipeline had when a resync looked, by source table; the source is asked for each again before it is deleted.",
		}, []string{"table"}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "pgsource_requests_total", Help: "Requests of the verbs resync and verify -repair, by kind and result (taken, refused).",
		}, []string{"kind", "result"}),
	}
	for _, stage := range []string{stageWaiting, stageRows, stageGhosts} {
		m.tables.WithLabelValues(stage)
	}
	for _, cause := range []string{causeAsked, causeLoss} {
		m.ended.WithLabelValues(cause, "done")
		m.ended.WithLabelValues(cause, "refused")
	}
	for _, kind := range []CopyKind{CopyResync, CopyRepair} {
		m.requests.WithLabelValues(string(kind), "taken")
		m.requests.WithLabelValues(string(kind), "refused")
	}
	reg.MustRegister(m.tables, m.differing, m.ended, m.ghosts, m.requests)
	return m
}

const (
	// resyncTurn is how often requests are looked for.
	resyncTurn = 2 * time.Second
	// refusedTurn is how long resyncs wait where a refusal could not be noted.
	refusedTurn = time.Minute
)

// resyncs takes requests on and works on resyncs, one at a time, until ctx ends.
func (s *Source) resyncs(ctx context.Context) {
	turn := time.NewTicker(resyncTurn)
	defer turn.Stop()
	var notBefore time.Time // after a refusal that was not noted
	for {
		if s.streams.Load() {
			if err := s.takeRequests(ctx); err != nil && ctx.Err() == nil {
				s.log.WarnContext(ctx, "requests could not be looked at, trying again", "err", err)
			}
			if time.Now().After(notBefore) {
				if !s.workOnResync(ctx) {
					notBefore = time.Now().Add(refusedTurn)
				}
			}
		}
		select {
		case <-turn.C:
		case <-ctx.Done():
			return
		}
	}
}

// takeRequests puts into the state what requests ask for, and takes them away.
// A crash between the two repeats that: a resync has the request's ID, and to
// look at keys twice does no harm.
func (s *Source) takeRequests(ctx context.Context) error {
	list, err := s.keeper.requests(ctx)
	if err != nil {
		return err
	}
	for _, r := range list {
		err := s.takeRequest(ctx, r)
		var refused *decode.Refusal
		switch {
		case errors.Is(err, ErrCopiesFull):
			return nil // it waits
		case errors.As(err, &refused):
			s.log.ErrorContext(ctx, "a request is refused", "kind", r.Kind, "table", r.Schema+"."+r.Name, "by", r.By, "err", err)
			s.cfg.Metrics.resync.requests.WithLabelValues(r.Kind, "refused").Inc()
		case err != nil:
			return err
		default:
			s.log.InfoContext(ctx, "a request is taken on", "kind", r.Kind, "table", r.Schema+"."+r.Name, "keys", len(r.Keys), "by", r.By)
			s.cfg.Metrics.resync.requests.WithLabelValues(r.Kind, "taken").Inc()
		}
		crash.Here(crash.PgRequestTaken)
		if err := s.keeper.dropRequest(ctx, r.ID); err != nil {
			return err
		}
	}
	return nil
}

func (s *Source) takeRequest(ctx context.Context, r *Request) error {
	t, err := s.mapped(r.Schema, r.Name)
	if err != nil {
		return err
	}
	if err := s.soleFor(ctx, t, r.Kind); err != nil {
		return err
	}
	if r.Kind == string(CopyRepair) {
		return s.submitKeys(ctx, CopyRepair, t, r.Keys, func(key []string) {
			s.log.ErrorContext(ctx, "a row of the pipeline has a key that no row of the source can have, and is not repaired: delete it by other means",
				"table", tableName{t.Schema, t.Name}.String(), "key", strings.Join(key, ","))
		})
	}
	return s.addResync(ctx, &resyncState{ID: r.ID, Schema: t.Schema, Name: t.Name, Cause: causeAsked, Asked: r.Asked})
}

// mapped gives the mapped table of a name.
func (s *Source) mapped(schema, name string) (Table, error) {
	for _, t := range s.cfg.Tables {
		if t.Schema == schema && t.Name == name {
			return t, nil
		}
	}
	return Table{}, &decode.Refusal{
		Reason: decode.ReasonSetup, What: "table", Where: schema + "." + name, Why: "it is not in PGSOURCE_TABLES", Expected: "one of the tables that are carried",
	}
}

// soleFor refuses what puts rows right, and takes some away, in a table without
// a key of the source's own, and in one that somebody else feeds too. Where
// nobody records that, nobody knows.
func (s *Source) soleFor(ctx context.Context, t Table, what string) error {
	schema, err := s.cfg.Pipeline.Describe(ctx)
	if err != nil {
		return fmt.Errorf("describe the pipeline: %w", err)
	}
	target, err := schema.Table(t.Target)
	if err != nil {
		return err
	}
	if err := refuseKeyless(what, target, tableName{t.Schema, t.Name}); err != nil {
		return err
	}
	st, err := s.LoadedState(ctx)
	if err != nil || st == nil {
		return err
	}
	owners, err := s.openOwners(schema, st.System)
	if err != nil || owners == nil {
		return err
	}
	return owners.Sole(ctx, target, what+" of "+tableName{t.Schema, t.Name}.String())
}

// LoadedState gives the state that Run has, or what the store holds.
func (s *Source) LoadedState(ctx context.Context) (*State, error) {
	if s.keeper != nil {
		return s.keeper.get(ctx)
	}
	return s.LoadState(ctx)
}

// addResync takes a resync on, unless the same one is there already, or one of
// the table that has not begun.
func (s *Source) addResync(ctx context.Context, r *resyncState) error {
	full := false
	err := s.keeper.must(ctx, func(next *State) bool {
		full = false
		for i := range next.Resyncs {
			was := &next.Resyncs[i]
			if was.ID == r.ID || (was.table() == r.table() && was.Job == 0) {
				return false
			}
		}
		if full = len(next.Resyncs) >= max(maxResyncs, 2*len(s.cfg.Tables)); full {
			return false
		}
		next.Resyncs = append(slices.Clone(next.Resyncs), *r)
		return true
	})
	if err == nil && full {
		return ErrCopiesFull
	}
	s.showResyncs(ctx)
	return err
}

// updateResync changes a resync durably; nil takes it out.
func (s *Source) updateResync(ctx context.Context, id string, change func(*resyncState)) error {
	err := s.keeper.must(ctx, func(next *State) bool {
		i := slices.IndexFunc(next.Resyncs, func(r resyncState) bool { return r.ID == id })
		if i < 0 {
			return false
		}
		next.Resyncs = slices.Clone(next.Resyncs)
		if change == nil {
			next.Resyncs = slices.Delete(next.Resyncs, i, i+1)
			return true
		}
		change(&next.Resyncs[i])
		return true
	})
	s.showResyncs(ctx)
	return err
}

// showResyncs shows how many tables are in which stage.
func (s *Source) showResyncs(ctx context.Context) {
	st, err := s.keeper.get(ctx)
	if err != nil || st == nil {
		return
	}
	count := map[string]int{stageWaiting: 0, stageRows: 0, stageGhosts: 0}
	for i := range st.Resyncs {
		count[st.Resyncs[i].stage()]++
	}
	for stage, n := range count {
		s.cfg.Metrics.resync.tables.WithLabelValues(stage).Set(float64(n))
	}
}

// nextResync gives the resync to work on, nil for none. After a loss each table
// at risk gets one, unless one has begun since.
func (s *Source) nextResync(ctx context.Context) (*resyncState, error) {
	st, err := s.keeper.get(ctx)
	if err != nil || st == nil {
		return nil, err
	}
	if !s.cfg.StopOnLoss {
		for _, at := range st.NeedsResync() {
			if err := s.resyncAfterLoss(ctx, st, &at); err != nil {
				return nil, err
			}
		}
		if st, err = s.keeper.get(ctx); err != nil {
			return nil, err
		}
	}
	if len(st.Resyncs) == 0 {
		return nil, nil //nolint:nilnil // nothing to do is an answer
	}
	r := st.Resyncs[0]
	return &r, nil
}

// resyncAfterLoss takes a resync of a table at risk on. A table that cannot be
// resynced has its notice stay.
func (s *Source) resyncAfterLoss(ctx context.Context, st *State, at *AtRisk) error {
	for i := range st.Resyncs {
		r := &st.Resyncs[i]
		if r.table().String() == at.Table && (r.Job == 0 || r.Order > at.order) {
			return nil
		}
	}
	for _, t := range s.cfg.Tables {
		name := tableName{t.Schema, t.Name}
		if name.String() != at.Table || slices.Contains(s.unhealable(), name) {
			continue
		}
		s.log.WarnContext(ctx, "the pipeline lost rows of this table, or may have: it is resynced", "table", at.Table)
		err := s.addResync(ctx, &resyncState{ID: newRequest("", "", "", nil).ID, Schema: t.Schema, Name: t.Name, Cause: causeLoss, Asked: time.Now().UTC()})
		if err != nil && !errors.Is(err, ErrCopiesFull) {
			return err
		}
	}
	return nil
}

// workOnResync brings resyncs to their end, one after the other; false where a
// refusal could not be noted.
func (s *Source) workOnResync(ctx context.Context) bool {
	for ctx.Err() == nil && s.streams.Load() {
		r, err := s.nextResync(ctx)
		if err != nil || r == nil {
			return true
		}
		err = s.resyncTable(ctx, r)
		var refused *decode.Refusal
		switch {
		case err == nil:
			s.cfg.Metrics.resync.ended.WithLabelValues(r.Cause, "done").Inc()
			continue
		case errors.As(err, &refused):
			if !s.refuseResync(ctx, r, refused) {
				return false
			}
			continue // the others do not wait for it
		case ctx.Err() == nil:
			s.log.WarnContext(ctx, "a resync is interrupted, and goes on", "table", r.table().String(), "stage", r.stage(), "err", err)
			s.cfg.Metrics.retries.WithLabelValues("resync").Inc()
		}
		return true
	}
	return true
}

// refuseResync gives a resync up that cannot be made; false where the state
// could not be told. After a loss the notice goes on saying that it is needed.
func (s *Source) refuseResync(ctx context.Context, r *resyncState, why *decode.Refusal) bool {
	s.cfg.Metrics.resync.ended.WithLabelValues(r.Cause, "refused").Inc()
	s.log.ErrorContext(ctx, "a table is not resynced", "table", r.table().String(), "err", why)
	s.cfg.Report(Status{Check: CheckResync, Blocking: r.Cause == causeLoss, Works: true, Message: fmt.Sprintf("table %s is not resynced: %v", r.table(), why), Hint: why.Do})
	if r.Cause == causeLoss {
		s.refusedMu.Lock()
		s.refusedResyncs = append(s.refusedResyncs, r.table()) // until the next start
		s.refusedMu.Unlock()
	}
	err := s.updateResync(ctx, r.ID, nil)
	if err != nil && ctx.Err() == nil {
		s.log.WarnContext(ctx, "a resync that is refused could not be taken out of the state", "err", err)
	}
	return err == nil
}

// unhealable gives the tables whose resync after a loss was refused.
func (s *Source) unhealable() []tableName {
	s.refusedMu.Lock()
	defer s.refusedMu.Unlock()
	return slices.Clone(s.refusedResyncs)
}

// resyncTable works on one resync until it is done.
func (s *Source) resyncTable(ctx context.Context, r *resyncState) error {
	t, err := s.mapped(r.Schema, r.Name)
	if err != nil {
		return err
	}
	if err := s.soleFor(ctx, t, "a resync"); err != nil {
		return err
	}
	name := r.table().String()
	if !r.Ghosts {
		if r.Job == 0 {
			if err := s.beginResync(ctx, r); err != nil {
				return err
			}
			crash.Here(crash.PgResyncBegun)
		}
		s.reportResync(r, "its rows are copied")
		if err := s.awaitCopies(ctx, func(j *copyJob) bool { return j.ID == r.Job }); err != nil {
			return err
		}
		if err := s.stillGood(ctx, r); err != nil {
			return err
		}
		crash.Here(crash.PgResyncRows)
	}
	s.reportResync(r, "keys that only the pipeline has are looked for")
	ghosts, err := s.findGhosts(ctx, t)
	if err != nil {
		return err
	}
	// Those of a process before may be among them, too.
	err = s.awaitCopies(ctx, func(j *copyJob) bool { return j.Kind == CopyResync && j.table() == r.table() })
	if err != nil {
		return err
	}
	if err := s.stillGood(ctx, r); err != nil {
		return err
	}
	crash.Here(crash.PgResyncGhosts)
	if err := s.resynced(ctx, name, r.Order); err != nil {
		return err
	}
	s.log.InfoContext(ctx, "table resynced", "table", name, "ghost_keys", ghosts, "took", time.Since(r.Began).Round(time.Millisecond).String())
	s.cfg.Report(Status{Check: CheckResync, OK: true, Message: fmt.Sprintf("table %s was resynced at %s; %d keys that only the pipeline had", name, time.Now().UTC().Format(time.RFC3339), ghosts)})
	if err := s.updateResync(ctx, r.ID, nil); err != nil {
		return err
	}
	st, err := s.keeper.get(ctx)
	if err == nil && len(st.NeedsResync()) > 0 {
		s.reportNotices(st)
	}
	return err
}

// stillGood sees, when no copy of a resync is left, whether they were done; one
// that was given up makes it begin again. Nothing else proves it: a job that is
// not in the state is not for that reason done.
func (s *Source) stillGood(ctx context.Context, r *resyncState) error {
	st, err := s.keeper.get(ctx)
	if err != nil {
		return err
	}
	for i := range st.Resyncs {
		if st.Resyncs[i].ID == r.ID && (st.Resyncs[i].Ghosts || sabotage.On(sabotage.CopyJobGoneIsDone)) {
			return nil
		}
	}
	if err := s.updateResync(ctx, r.ID, (*resyncState).beginAgain); err != nil {
		return err
	}
	return fmt.Errorf("a copy for the resync of table %s was given up before it was done: the resync begins again", r.table())
}

func (s *Source) reportResync(r *resyncState, what string) {
	s.cfg.Report(Status{
		Check: CheckResync, Works: true, Message: fmt.Sprintf("table %s is being resynced (%s, asked at %s): %s", r.table(), r.Cause, r.Asked.UTC().Format(time.RFC3339), what),
		Hint: "it ends by itself; pgsource snapshot status shows how far it is",
	})
}

// beginResync takes the copy of all rows on.
func (s *Source) beginResync(ctx context.Context, r *resyncState) error {
	began, order := time.Now().UTC(), uint64(0)
	job, err := s.submit(ctx, &Copy{Kind: CopyResync, Schema: r.Schema, Name: r.Name}, func(next *State, id uint64) {
		order = next.event()
		next.Resyncs = slices.Clone(next.Resyncs)
		for i := range next.Resyncs {
			if to := &next.Resyncs[i]; to.ID == r.ID {
				to.Job, to.Began, to.Order = id, began, order
			}
		}
	})
	if err != nil {
		return err
	}
	r.Job, r.Began, r.Order = job, began, order
	s.showResyncs(ctx)
	return nil
}

// awaitCopies waits until no job that is meant is left.
func (s *Source) awaitCopies(ctx context.Context, meant func(*copyJob) bool) error {
	for {
		changed := s.copies.next()
		st, err := s.keeper.get(ctx)
		if err != nil {
			return err
		}
		if st.Snapshot == nil || !slices.ContainsFunc(st.Snapshot.Jobs, func(j copyJob) bool { return meant(&j) }) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// submitKeys gives keys to copies, as many at once as the state can hold, and
// waits for room. Texts that the source's types do not take are passed to odd and
// left out.
func (s *Source) submitKeys(ctx context.Context, kind CopyKind, t Table, keys [][]string, odd func([]string)) error {
	castable, err := s.castable(ctx, t, keys)
	if err != nil {
		return err
	}
	for i, ok := range castable {
		if !ok {
			odd(keys[i])
		}
	}
	var good [][]string
	for i, key := range keys {
		if castable[i] {
			good = append(good, key)
		}
	}
	for len(good) > 0 {
		n, bytes := 0, 0
		for n < len(good) && n < maxJobKeys && (n == 0 || bytes+keyBytes(good[n:n+1]) <= maxJobKeyBytes) {
			bytes += keyBytes(good[n : n+1])
			n++
		}
		changed := s.copies.next()
		_, err := s.SubmitCopy(ctx, &Copy{Kind: kind, Schema: t.Schema, Name: t.Name, Keys: good[:n]})
		if errors.Is(err, ErrCopiesFull) {
			select {
			case <-changed:
				continue
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if err != nil {
			return err
		}
		good = good[n:]
	}
	return nil
}

// castable tells of each key whether the source's types take its texts: what
// they do not take, no row of the source has, and no copy can ask for.
func (s *Source) castable(ctx context.Context, t Table, keys [][]string) ([]bool, error) {
	ok := make([]bool, len(keys))
	err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		src, err := s.findSourceTable(ctx, conn, t)
		if err != nil {
			return err
		}
		casts, err := src.jobCasts(ctx, conn)
		if err != nil {
			return err
		}
		return tryCasts(ctx, conn, casts, keys, ok)
	})
	return ok, err
}

// findSourceTable looks a mapped table up on both sides.
func (s *Source) findSourceTable(ctx context.Context, conn *pgx.Conn, t Table) (*sourceTable, error) {
	schema, err := s.cfg.Pipeline.Describe(ctx)
	if err != nil {
		return nil, fmt.Errorf("describe the pipeline: %w", err)
	}
	target, err := schema.Table(t.Target)
	if err != nil {
		return nil, err
	}
	return s.openSourceTable(ctx, conn, t, target)
}

// jobKey gives the texts of an image's key as a copy job names them: in the
// order in which the Feldera table declares its columns.
func (st *sourceTable) jobKey(key []byte) ([]string, error) {
	texts, err := st.cmp.SourceKey(key)
	if err != nil {
		return nil, err
	}
	out := make([]string, len(texts))
	for i, name := range st.jobNames {
		out[i] = texts[slices.Index(st.keyNames, quoteIdentifier(name))]
	}
	return out, nil
}

// jobCasts gives the types to which a copy casts the texts of a key.
func (st *sourceTable) jobCasts(ctx context.Context, conn *pgx.Conn) ([]string, error) {
	casts := make([]string, len(st.jobNames))
	for i, name := range st.jobNames {
		err := conn.QueryRow(ctx, `SELECT quote_ident(n.nspname) || '.' || quote_ident(t.typname) FROM pg_attribute a
			JOIN pg_type t ON t.oid = a.atttypid JOIN pg_namespace n ON n.oid = t.typnamespace WHERE a.attrelid = $1 AND a.attname = $2 AND NOT a.attisdropped`,
			st.rel.ID, name).Scan(&casts[i])
		if err != nil {
			return nil, classify("look up the key's types", err)
		}
	}
	return casts, nil
}

// valueFault tells whether the server refused a value, by its form, its range
// or the constraint of a domain.
func valueFault(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (strings.HasPrefix(pgErr.Code, "22") || pgErr.Code == "23514")
}

// tryCasts halves a list that the server refuses until the culprits stand alone.
func tryCasts(ctx context.Context, conn *pgx.Conn, casts []string, keys [][]string, ok []bool) error {
	if len(keys) == 0 {
		return nil
	}
	rows := make([]string, 0, len(keys))
	for _, key := range keys {
		if len(key) == len(casts) {
			rows = append(rows, "("+literals(key, casts)+")")
		}
	}
	_, err := conn.Exec(ctx, "SELECT count(*) FROM (VALUES "+strings.Join(rows, ", ")+") AS v")
	switch {
	case err == nil && len(rows) == len(keys):
		for i := range ok {
			ok[i] = true
		}
		return nil
	case err != nil && !valueFault(err):
		return classify("look at the types of keys", err)
	case len(keys) == 1:
		return nil
	}
	middle := len(keys) / 2
	if err := tryCasts(ctx, conn, casts, keys[:middle], ok[:middle]); err != nil {
		return err
	}
	return tryCasts(ctx, conn, casts, keys[middle:], ok[middle:])
}

// ghostBatch is how many keys are handed to copies together.
const ghostBatch = 1000

// findGhosts reads the keys of both sides and gives those that only the
// pipeline has to copies; it gives their number.
func (s *Source) findGhosts(ctx context.Context, t Table) (ghosts int64, err error) {
	space, err := runs.Open(runs.Options{Dir: s.verifyDir(), Memory: verifyMemory, Limit: max(s.cfg.SpillLimit, minVerifyDisk)})
	if err != nil {
		return 0, err
	}
	conn, err := s.connect(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	o := &VerifyOptions{RowsPerSecond: s.cfg.VerifyRate, Most: defaultMost, Wait: defaultWait, Progress: func(VerifyProgress) {}, Found: func(*Difference) {}}
	v := &verifier{s: s, o: o, conn: conn, space: space, seed: maphash.MakeSeed(), seen: make(map[string]bool), keysOnly: true}
	v.report.Table = t.Schema + "." + t.Name
	if v.src, err = s.findSourceTable(ctx, conn, t); err != nil {
		return 0, err
	}
	source, destination := space.NewSorter(), space.NewSorter()
	defer func() { err = errors.Join(err, source.Close(), destination.Close()) }()
	if _, err := v.readSource(ctx, source); err != nil {
		return 0, err
	}
	if err := v.readDestination(ctx, destination); err != nil {
		return 0, err
	}
	var batch [][]string
	name := tableName{t.Schema, t.Name}.String()
	give := func() error {
		// Somebody may have come since: right before what takes rows away.
		if err := s.soleFor(ctx, t, "a resync"); err != nil {
			return err
		}
		s.cfg.Metrics.resync.ghosts.WithLabelValues(name).Add(float64(len(batch)))
		ghosts += int64(len(batch))
		err := s.submitKeys(ctx, CopyResync, t, batch, func(key []string) {
			s.log.ErrorContext(ctx, "a row of the pipeline has a key that no row of the source can have, and stays: delete it by other means", "table", name, "key", strings.Join(key, ","))
		})
		batch = nil
		return err
	}
	err = v.sideBySide(source, destination, func(key []byte, here, there *group) error {
		if here != nil || there == nil {
			return nil
		}
		texts, err := v.src.jobKey(key)
		if err != nil {
			return err
		}
		if batch = append(batch, texts); len(batch) == ghostBatch {
			return give()
		}
		return nil
	})
	if err == nil && len(batch) > 0 {
		err = give()
	}
	return ghosts, err
}
