package wal

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"holdfast/internal/decode"
)

// This file is what follows from a loss of the destination: rows that were
// acknowledged to Postgres, which will not send them again, and that the
// pipeline does not hold, or may not. Only reading the tables once more mends
// that, so such a notice names the tables, and each of them needs a resync.

// atRisk tells whether what a notice is of may be missing from the pipeline.
func (n *Notice) atRisk() bool { return n.Kind == NoticeLoss || n.Kind == NoticeIncarnation }

// NeedsResync gives the tables, as schema.table, from which the pipeline lost
// rows or may have, and since when; sorted, nil for none.
func (st *State) NeedsResync() []AtRisk {
	if st == nil {
		return nil
	}
	last := make(map[string]AtRisk)
	for i := range st.Notices {
		n := &st.Notices[i]
		if !n.atRisk() {
			continue
		}
		for _, t := range n.Tables {
			if at, seen := last[t]; !seen || n.Order >= at.order {
				last[t] = AtRisk{Table: t, Noticed: n.Noticed, order: n.Order}
			}
		}
	}
	out := slices.Collect(maps.Values(last))
	slices.SortFunc(out, func(a, b AtRisk) int { return strings.Compare(a.Table, b.Table) })
	return out
}

// AtRisk is a table that needs a resync.
type AtRisk struct {
	Table string
	// Noticed is when its last loss was noticed.
	Noticed time.Time
	// order is that loss's number: a resync that began with a lower one does not
	// mend it.
	order uint64
}

// resynced takes a table, as schema.table, out of the notices and the differing
// tables that came before the beginning of its resync, by their numbers; a notice
// without tables that are at risk is over. When it returns nil, that is durable.
func (s *Source) resynced(ctx context.Context, table string, began uint64) error {
	err := s.keeper.must(ctx, func(next *State) bool {
		list := next.Notices[:0:0]
		changed := false
		if left := slices.DeleteFunc(slices.Clone(next.Differing), func(d DifferingTable) bool { return d.Order < began && d.table().String() == table }); len(left) != len(next.Differing) {
			next.Differing, changed = left, true
		}
		for _, n := range next.Notices {
			if n.atRisk() && n.Order < began && slices.Contains(n.Tables, table) {
				changed = true
				n.Tables = slices.DeleteFunc(slices.Clone(n.Tables), func(t string) bool { return t == table })
				if len(n.Tables) == 0 {
					continue
				}
			}
			list = append(list, n)
		}
		next.Notices = list
		return changed
	})
	if err != nil {
		return err
	}
	st, err := s.keeper.get(ctx)
	if err != nil {
		return err
	}
	s.reportNotices(st)
	return nil
}

// tableNames gives the mapped tables as notices name them.
func (s *Source) tableNames() []string {
	names := make([]string, 0, len(s.cfg.Tables))
	for _, t := range s.cfg.Tables {
		names = append(names, tableName{t.Schema, t.Name}.String())
	}
	slices.Sort(names)
	return names
}

// describe says what a notice is of.
func (n *Notice) describe() string {
	switch n.Kind {
	case NoticeIncarnation:
		return fmt.Sprintf("the pipeline restarted (incarnation %s, before %s): rows confirmed to Postgres before, up to LSN %s, may be missing from it", n.Now, n.Was, n.To)
	case NoticeLoss:
		return fmt.Sprintf("the pipeline lost rows that were confirmed to Postgres, between LSN %s and %s: its progress table says so (incarnation %s)", n.From, n.To, n.Now)
	case NoticeTimeline:
		return fmt.Sprintf("a standby was promoted at LSN %s (timeline %s, before %s), and rows up to LSN %s may have been sent before that it never had: they may be in the pipeline and not in the source",
			n.From, n.Now, n.Was, n.To)
	}
	return fmt.Sprintf("%s: up to LSN %s", n.Kind, n.To)
}

// reportNotices shows what no person and no resync has looked after yet: in
// the check "resync" what the pipeline lost or may have, in the check "state"
// everything else.
func (s *Source) reportNotices(st *State) {
	var losses, others []Notice
	for i := range st.Notices {
		if n := st.Notices[i]; n.atRisk() {
			losses = append(losses, n)
		} else {
			others = append(others, n)
		}
	}
	differ := s.differing(st)
	s.cfg.Metrics.resync.differing.Set(float64(len(differ)))
	s.showPast(others, differ)
	more := ""
	if at := st.NeedsResync(); len(at) > 0 {
		more = "needs resync: " + listTables(at) + ": "
	}
	s.showNotices(CheckResync, more, losses)
	if before := s.lossStands.Swap(len(losses) > 0); before != (len(losses) > 0) && s.streams.Load() {
		s.phaseStreaming()
	}
}

// showPast shows the check "state". Tables that are known to differ hold nothing
// up: what is wrong in them is older than the rows that come, and most were said
// by a stop already.
func (s *Source) showPast(list []Notice, differ []DifferingTable) {
	switch {
	case len(differ) == 0:
		s.showNotices(CheckState, "", list)
	case len(list) > 0:
		s.showNotices(CheckState, describeDiffering(differ)+"; ", list)
	default:
		s.noticed.Store(CheckState, true)
		hint := "run: " + resyncOf(differ) + ", which clears this; or, where nothing differs (pgsource verify) or that cannot be, stop pgsource, run: pgsource state accept -yes, and start it again"
		if _, none := s.cfg.State.(noStore); none {
			hint = "empty the tables and load them by other means; restart pgsource to clear this"
		}
		s.cfg.Report(Status{Check: CheckState, Works: true, Message: describeDiffering(differ), Hint: hint})
	}
}

func (s *Source) showNotices(check, prefix string, list []Notice) {
	if len(list) == 0 {
		if _, shown := s.noticed.LoadAndDelete(check); shown {
			s.cfg.Report(Status{Check: check, OK: true, Message: "nothing is in doubt"})
		}
		return
	}
	s.noticed.Store(check, true)
	heals := check == CheckResync && !s.cfg.StopOnLoss && s.cfg.Snapshot != SnapshotOnly
	message := prefix + list[len(list)-1].describe()
	if more := len(list) - 1; more > 0 {
		message += fmt.Sprintf("; and %d earlier ones, see: pgsource state show", more)
	}
	_, none := s.cfg.State.(noStore)
	hint := "compare the tables with the source (pgsource verify); if they differ, "
	if check == CheckState && !none {
		hint += "run: pgsource resync -all; then "
	} else {
		hint += "empty them and load them by other means; then "
	}
	if none {
		hint += "restart pgsource to clear this"
	} else {
		hint += "stop pgsource, run: pgsource state accept -yes, and start it again to clear this"
	}
	if heals {
		hint = "each table is resynced by itself; pgsource_resync_tables says how far it is. Where that cannot be, the log and this check say why: " + hint
	}
	// What heals holds nothing up; a table whose resync is refused says so itself.
	s.cfg.Report(Status{Check: check, Blocking: !heals || len(s.unhealable()) > 0, Works: heals, Message: message, Hint: hint})
}

// maxNamed bounds the tables that one message names.
const maxNamed = 8

func listTables(at []AtRisk) string {
	names := make([]string, 0, maxNamed)
	for _, a := range at[:min(len(at), maxNamed)] {
		names = append(names, a.Table)
	}
	text := strings.Join(names, ", ")
	if more := len(at) - len(names); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// phaseStreaming says that changes are carried, or that they are and that this
// does not suffice.
func (s *Source) phaseStreaming() {
	s.streams.Store(true)
	if s.lossStands.Load() {
		s.cfg.Phase(PhaseNeedsResync)
		return
	}
	s.cfg.Phase(PhaseStreaming)
}

func (s *Source) phaseConnecting() {
	s.streams.Store(false)
	s.cfg.Phase(PhaseConnecting)
}

// stopOnLoss gives the refusal with which a loss ends a pgsource that is not to
// go on behind one; nil where there is none, or it may go on.
func (s *Source) stopOnLoss(st *State) error {
	at := st.NeedsResync()
	if !s.cfg.StopOnLoss || len(at) == 0 {
		return nil
	}
	var why *Notice
	for i := range st.Notices {
		if n := &st.Notices[i]; n.atRisk() {
			why = n
		}
	}
	return &decode.Refusal{
		Reason: decode.ReasonGap, What: "pipeline", Where: "tables " + listTables(at), Why: why.describe(),
		Expected: "a pipeline that keeps what it has completed, since PGSOURCE_ON_DESTINATION_LOSS is stop",
		Do:       "set PGSOURCE_ON_DESTINATION_LOSS=heal for a start, which resyncs the tables; or compare them with the source (pgsource verify), and where nothing differs run: pgsource state accept -yes",
	}
}
