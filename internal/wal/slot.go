package wal

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
)

// slotState is one row of pg_replication_slots.
type slotState struct {
	name                   string
	plugin, database, here string
	temporary, active      bool
	activePID              int32
	status                 string // wal_status, "" where the server gives none
	confirmed              uint64
	restart                uint64 // the oldest WAL that it keeps, 0 when lost
	current                uint64 // the server's own position
	retained               int64
	safe                   *int64
	twoPhase               bool
	// failover and synced are of PostgreSQL 17, invalidation of 17 and, as a
	// conflict, of 16.
	failover, synced bool
	invalidation     string
	inactiveSince    string
	// syncState is that of its walsender as a synchronous standby.
	syncState string
	// spilledTransactions and spilledBytes are what decoding for it has cost
	// the server's disk.
	spilledTransactions, spilledBytes int64
}

// readSlot gives nil where there is no such slot. Columns that only newer
// servers have are read by name, so that one query serves all.
func readSlot(ctx context.Context, conn *pgx.Conn, name string) (*slotState, error) {
	st := slotState{name: name}
	var confirmed, restart, current string
	err := conn.QueryRow(ctx, `
		SELECT coalesce(plugin, ''), coalesce(database, ''), current_database(), temporary, active, coalesce(active_pid, 0), coalesce(wal_status, ''),
		       coalesce(confirmed_flush_lsn, '0/0')::text, coalesce(restart_lsn, '0/0')::text, at::text,
		       coalesce(pg_wal_lsn_diff(at, restart_lsn), 0)::int8, safe_wal_size,
		       coalesce((j->>'two_phase')::bool, false), coalesce((j->>'failover')::bool, false), coalesce((j->>'synced')::bool, false),
		       coalesce(j->>'invalidation_reason', CASE WHEN (j->>'conflicting')::bool THEN 'conflict' END, ''), coalesce(j->>'inactive_since', ''),
		       coalesce((SELECT sync_state FROM pg_stat_replication r WHERE r.pid = s.active_pid), ''),
		       coalesce((SELECT spill_txns FROM pg_stat_replication_slots p WHERE p.slot_name = s.slot_name), 0),
		       coalesce((SELECT spill_bytes FROM pg_stat_replication_slots p WHERE p.slot_name = s.slot_name), 0)
		FROM pg_replication_slots AS s, to_jsonb(s) AS j,
		     (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END AS at) AS position
		WHERE slot_name = $1`, name,
	).Scan(&st.plugin, &st.database, &st.here, &st.temporary, &st.active, &st.activePID, &st.status, &confirmed, &restart, &current, &st.retained, &st.safe,
		&st.twoPhase, &st.failover, &st.synced, &st.invalidation, &st.inactiveSince,
		&st.syncState, &st.spilledTransactions, &st.spilledBytes)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil //nolint:nilnil // absence is an answer
	}
	if err != nil {
		return nil, classify(fmt.Sprintf("look up slot %q", name), err)
	}
	for text, into := range map[*string]*uint64{&confirmed: &st.confirmed, &restart: &st.restart, &current: &st.current} {
		lsn, err := pglogrepl.ParseLSN(*text)
		if err != nil {
			return nil, fmt.Errorf("read the position of slot %q: %w", name, err)
		}
		*into = uint64(lsn)
	}
	return &st, nil
}

// lost tells whether the server has given the slot up.
func (st *slotState) lost() bool { return st.status == "lost" || st.invalidation != "" }

// behind is the WAL between what was confirmed and the server's position.
func (st *slotState) behind() int64 {
	return int64(st.current - min(st.current, st.confirmed)) //nolint:gosec // WAL of one server fits
}

// String says in a line what the slot is.
func (st *slotState) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "confirmed up to %s, %s behind the server", decode.FormatLSN(st.confirmed), BytesText(st.behind()))
	if st.status != "" {
		fmt.Fprintf(&b, ", wal_status %s", st.status)
	}
	fmt.Fprintf(&b, ", %s of WAL retained", BytesText(st.retained))
	if st.safe != nil && !st.lost() {
		fmt.Fprintf(&b, ", %s left before max_slot_wal_keep_size", BytesText(*st.safe))
	}
	if st.active {
		fmt.Fprintf(&b, ", in use by process %d", st.activePID)
	}
	if st.failover {
		b.WriteString(", failover slot")
	}
	if st.synced {
		b.WriteString(", mirrored from the primary")
	}
	return b.String()
}

// invalidations says what each of Postgres' reasons means and what would have
// kept the slot.
var invalidations = map[string]struct{ why, do string }{
	"":                       {"the server has removed WAL that it needs", "raise max_slot_wal_keep_size"},
	"wal_removed":            {"the server has removed WAL that it needs, since it kept more than max_slot_wal_keep_size", "raise max_slot_wal_keep_size"},
	"rows_removed":           {"the primary has removed rows that decoding on this standby needs", "set hot_standby_feedback = on and primary_slot_name on the standby"},
	"conflict":               {"it was in conflict with recovery on this standby: the primary has removed rows that decoding needs, or lowered wal_level", "set hot_standby_feedback = on and primary_slot_name on the standby"},
	"wal_level_insufficient": {"the primary's wal_level was lowered below logical", "set wal_level = logical on the primary"},
	"idle_timeout":           {"nobody read it for longer than idle_replication_slot_timeout", "raise idle_replication_slot_timeout above the longest planned pause, or set it to 0"},
}

// usable refuses a slot that cannot serve.
func (st *slotState) usable(name string) error {
	refused := func(reason decode.Reason, why, do string) error {
		return &decode.Refusal{
			Reason: reason, What: "slot", Where: name, Why: why,
			Expected: "a permanent logical slot of the plug-in pgoutput in this database", Do: do,
		}
	}
	switch {
	case st.plugin == "":
		return refused(decode.ReasonSetup, "it is a physical slot", "set PGSOURCE_SLOT to another name")
	case st.plugin != "pgoutput":
		return refused(decode.ReasonSetup, fmt.Sprintf("its plug-in is %q", st.plugin), "set PGSOURCE_SLOT to another name")
	case st.database != st.here:
		return refused(decode.ReasonSetup, fmt.Sprintf("it belongs to database %q, this is %q", st.database, st.here), "correct PGSOURCE_DSN or PGSOURCE_SLOT")
	case st.temporary:
		return refused(decode.ReasonSetup, "it is temporary", "set PGSOURCE_SLOT to another name")
	case st.twoPhase:
		// Prepared transactions would arrive at PREPARE, in messages that come
		// with two_phase only, and be held or doubled.
		return refused(decode.ReasonSetup, "its two_phase is on: it delivers prepared transactions before they are committed",
			fmt.Sprintf("if nothing else uses it: SELECT pg_drop_replication_slot(%s), make it anew without two_phase, then %s; or set PGSOURCE_SLOT to another name", quoteLiteral(name), wayBack))
	case st.lost():
		words, ok := invalidations[st.invalidation]
		if !ok {
			words.why = fmt.Sprintf("the server has invalidated it (%s)", st.invalidation)
			words.do = "look for the reason in the server's manual"
		}
		return refused(decode.ReasonGap,
			fmt.Sprintf("it is lost: %s; every change after %s, %s of WAL until now, is lost to it", words.why, decode.FormatLSN(st.confirmed), BytesText(st.behind())),
			fmt.Sprintf("make it anew: SELECT pg_drop_replication_slot(%s); SELECT pg_create_logical_replication_slot(%s, 'pgoutput'); then %s; to keep it from happening again, %s",
				quoteLiteral(name), quoteLiteral(name), wayBack, words.do))
	case st.synced && !st.failover:
		return refused(decode.ReasonSetup, "it is a mirror of the primary's slot", "read from the primary, or promote this server")
	}
	return nil
}

// createSlot makes the slot, where it was allowed to and never had one.
func (s *Source) createSlot(ctx context.Context, conn *pgx.Conn) (*slotState, error) {
	if s.slotSeen.Load() {
		return nil, s.slotDropped()
	}
	if !s.cfg.Create {
		return nil, s.noSlot(true) // without the publication it would not come to this
	}
	if !s.madePublication.Load() {
		return nil, s.orphanedPublication()
	}
	if err := s.makeSlot(ctx, conn); err != nil {
		return nil, err
	}
	qctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	slot, err := readSlot(qctx, conn, s.cfg.Slot)
	if err == nil && slot == nil {
		err = fmt.Errorf("create slot %q: it vanished at once", s.cfg.Slot)
	}
	if err != nil {
		return nil, err
	}
	existing := "copied beside it"
	if s.cfg.Snapshot == SnapshotNever {
		existing = "not copied: PGSOURCE_SNAPSHOT is never"
	} else if !s.wantsCopy(true, true) {
		existing = "not copied: no state is kept in which a copy could go on; set PGSOURCE_STATE before the first start"
	}
	s.log.WarnContext(ctx, "slot created: changes committed before it are not part of the stream", "slot", s.cfg.Slot, "lsn", decode.FormatLSN(slot.confirmed), "existing_rows", existing)
	return slot, nil
}

// noSlot is the refusal where no slot is to be made. Where there is a publication
// already, PGSOURCE_CREATE makes no slot either: see orphanedPublication.
func (s *Source) noSlot(publication bool) error {
	do := "set PGSOURCE_CREATE=true, or "
	if publication {
		do = ""
	}
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "slot", Where: s.cfg.Slot, Why: "the server has none of this name",
		Expected: "a logical slot of the plug-in pgoutput in this database",
		Do: do + fmt.Sprintf("run: SELECT pg_create_logical_replication_slot(%s, 'pgoutput'); a new slot holds only changes made after it",
			quoteLiteral(s.cfg.Slot)),
	}
}

// orphanedPublication is the refusal to make a slot beside a publication that
// somebody else, or an earlier start, has made: it would hide a gap.
func (s *Source) orphanedPublication() error {
	return &decode.Refusal{
		Reason: decode.ReasonGap, What: "slot", Where: s.cfg.Slot,
		Why:      "the publication is there and the slot is not: it was dropped, or this server was promoted without it",
		Expected: "the slot that an earlier start made; a new one does not have what was committed before it",
		Do: fmt.Sprintf("run: SELECT pg_create_logical_replication_slot(%s, 'pgoutput'); at a first start with a publication of your own that is all; else %s",
			quoteLiteral(s.cfg.Slot), s.startOver()),
	}
}

// slotPatience is how long the creation of a slot may be silent: after that,
// what it waits for is said.
const slotPatience = 5 * time.Second

// makeSlot creates the slot. The server first waits for every transaction that
// was writing when it was asked, in any database, so there is a limit, and
// those transactions are named meanwhile.
func (s *Source) makeSlot(ctx context.Context, conn *pgx.Conn) error {
	cctx, cancel := context.WithTimeout(ctx, createSlotTimeout)
	defer cancel()
	watching, stop := context.WithCancel(cctx)
	var watcher sync.WaitGroup
	var blockers string // written by the watcher, read after it has ended
	watcher.Go(func() {
		wait := slotPatience
		for sleep(watching, wait) == nil {
			s.cfg.Beat()
			if found, err := s.slotBlockers(watching); err == nil && found != "" {
				blockers = found
				s.cfg.Report(Status{
					Check: CheckSlot, Message: "making the slot waits for transactions that write: " + found,
					Hint: "commit or end them, with SELECT pg_terminate_backend(PID) where nobody else can",
				})
				s.log.WarnContext(watching, "making the slot waits for transactions that write", "slot", s.cfg.Slot, "transactions", found)
			}
			wait = min(2*wait, 30*time.Second)
		}
	})
	create := `SELECT pg_create_logical_replication_slot($1, 'pgoutput')`
	if s.cfg.Failover {
		create = `SELECT pg_create_logical_replication_slot($1, 'pgoutput', failover => true)`
	}
	_, err := conn.Exec(cctx, create, s.cfg.Slot)
	stop()
	watcher.Wait()
	switch {
	case err == nil:
		s.madeSlot.Store(true)
		return nil
	case cctx.Err() != nil && ctx.Err() == nil:
		if blockers == "" {
			blockers = "none that this role may see; look at pg_stat_activity and pg_prepared_xacts, and on a standby run SELECT pg_log_standby_snapshot() on its primary"
		}
		return &outage{
			what: fmt.Sprintf("create slot %q", s.cfg.Slot),
			why:  fmt.Sprintf("it waits for every transaction that was writing, and %v were not enough: %s", createSlotTimeout, blockers),
			do:   "commit or end the transactions that are named", err: err,
		}
	default:
		return classify(fmt.Sprintf("create slot %q", s.cfg.Slot), err)
	}
}

// maxBlockers bounds how many transactions are named.
const maxBlockers = 5

// slotBlockers names the oldest transactions that have written, "" where there
// are none. Their statements are left out: they may contain data.
func (s *Source) slotBlockers(ctx context.Context) (string, error) {
	var lines []string
	err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, `
			SELECT 'process ' || pid || coalesce(' of ' || quote_ident(usename), '') || coalesce(' in ' || quote_ident(datname), '') ||
			       CASE WHEN application_name <> '' THEN ' (' || application_name || ')' ELSE '' END ||
			       coalesce(', ' || state, '') || coalesce(', open for ' || date_trunc('second', clock_timestamp() - xact_start), '') AS line, xact_start AS began
			FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()
			UNION ALL
			SELECT 'prepared transaction ' || quote_literal(gid) || ' of ' || quote_ident(owner) || ' in ' || quote_ident(database) ||
			       ', prepared ' || date_trunc('second', clock_timestamp() - prepared) || ' ago: COMMIT PREPARED or ROLLBACK PREPARED it', prepared
			FROM pg_prepared_xacts
			ORDER BY began NULLS LAST LIMIT $1`, maxBlockers)
		if err != nil {
			return classify("look for what blocks the slot", err)
		}
		lines, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (line string, err error) {
			var began *time.Time
			return line, row.Scan(&line, &began)
		})
		return err
	})
	return strings.Join(lines, "; "), err
}

// Slot is what the verb "slot show" tells.
type Slot struct {
	Name            string `json:"name"`
	Usable          bool   `json:"usable"`
	Why             string `json:"why_not,omitempty"`
	Do              string `json:"fix,omitempty"`
	Plugin          string `json:"plugin"`
	Database        string `json:"database"`
	WALStatus       string `json:"wal_status"`
	Invalidation    string `json:"invalidation_reason,omitempty"`
	Confirmed       LSN    `json:"confirmed_flush_lsn"`
	Restart         LSN    `json:"restart_lsn"`
	Server          LSN    `json:"server_lsn"`
	BehindBytes     int64  `json:"behind_bytes"`
	RetainedBytes   int64  `json:"retained_bytes"`
	SafeBytes       *int64 `json:"safe_wal_bytes,omitempty"`
	TwoPhase        bool   `json:"two_phase"`
	Failover        bool   `json:"failover"`
	Synced          bool   `json:"synced"`
	InactiveSince   string `json:"inactive_since,omitempty"`
	SpilledBytes    int64  `json:"spilled_bytes"`
	Active          bool   `json:"active"`
	ActivePID       int32  `json:"active_pid,omitempty"`
	ActiveName      string `json:"active_application,omitempty"`
	ActiveUser      string `json:"active_user,omitempty"`
	ActiveFrom      string `json:"active_from,omitempty"`
	ActiveLastReply string `json:"active_last_reply,omitempty"`
}

// ShowSlot looks at the slot. It gives nil where the server has none of this
// name.
func (s *Source) ShowSlot(ctx context.Context) (*Slot, error) {
	var shown *Slot
	err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		st, err := readSlot(ctx, conn, s.cfg.Slot)
		if err != nil || st == nil {
			return err
		}
		shown, err = showSlotState(ctx, conn, st)
		return err
	})
	return shown, err
}

func showSlotState(ctx context.Context, conn *pgx.Conn, st *slotState) (*Slot, error) {
	shown := &Slot{
		Name: st.name, Usable: true, Plugin: st.plugin, Database: st.database, WALStatus: st.status, Invalidation: st.invalidation,
		Confirmed: LSN(st.confirmed), Restart: LSN(st.restart), Server: LSN(st.current), BehindBytes: st.behind(), RetainedBytes: st.retained,
		SafeBytes: st.safe, TwoPhase: st.twoPhase, Failover: st.failover, Synced: st.synced, InactiveSince: st.inactiveSince,
		SpilledBytes: st.spilledBytes, Active: st.active, ActivePID: st.activePID,
	}
	if refused, ok := errors.AsType[*decode.Refusal](st.usable(st.name)); ok {
		shown.Usable, shown.Why, shown.Do = false, refused.Why, refused.Do
	}
	if st.active {
		o, err := readOccupant(ctx, conn, st.name)
		if err != nil {
			return nil, err
		}
		shown.ActiveName, shown.ActiveUser, shown.ActiveFrom, shown.ActiveLastReply = o.application, o.user, o.client, o.reply
	}
	return shown, nil
}

// DropSlot drops the slot for good; sure is told what is lost and has to
// agree. It refuses a slot that is in use, and one that is no slot of ours by
// its kind.
func (s *Source) DropSlot(ctx context.Context, sure func(*Slot) error) error {
	return s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		st, err := readSlot(ctx, conn, s.cfg.Slot)
		if err != nil {
			return err
		}
		if st == nil {
			return &decode.Refusal{Reason: decode.ReasonSetup, What: "slot", Where: s.cfg.Slot, Why: "the server has none of this name", Expected: "a slot to drop"}
		}
		shown, err := showSlotState(ctx, conn, st)
		if err != nil {
			return err
		}
		reader, err := s.connectedReader(ctx, conn)
		switch {
		case err != nil:
			return err
		case !st.active && reader != 0:
			return &decode.Refusal{
				Reason: decode.ReasonSetup, What: "slot", Where: s.cfg.Slot,
				Why:      fmt.Sprintf("process %d of the server serves a pgsource of this slot, which reads it from time to time (PGSOURCE_TRANSPORT=peek)", reader),
				Expected: "a slot that nobody reads",
				Do:       fmt.Sprintf("stop that pgsource first; where it is stopped and a pooler keeps its session, run: SELECT pg_terminate_backend(%d)", reader),
			}
		case st.active:
			return &decode.Refusal{
				Reason: decode.ReasonSetup, What: "slot", Where: s.cfg.Slot,
				Why:      fmt.Sprintf("it is in use by process %d (application %q, user %q, from %s)", shown.ActivePID, shown.ActiveName, shown.ActiveUser, shown.ActiveFrom),
				Expected: "a slot that nobody reads", Do: "stop that process first",
			}
		case !st.lost() && !shown.Usable:
			return &decode.Refusal{
				Reason: decode.ReasonSetup, What: "slot", Where: s.cfg.Slot, Why: "it is none that pgsource could have used: " + shown.Why,
				Expected: "a slot of pgsource", Do: fmt.Sprintf("correct PGSOURCE_SLOT; if it has to go, run: SELECT pg_drop_replication_slot(%s)", quoteLiteral(s.cfg.Slot)),
			}
		}
		if err := sure(shown); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, `SELECT pg_drop_replication_slot($1)`, s.cfg.Slot); err != nil {
			return classify(fmt.Sprintf("drop slot %q", s.cfg.Slot), err)
		}
		return nil
	})
}

// connectedReader gives a session of another pgsource of this slot that is no
// walsender, 0 where there is none: one that peeks uses the slot only while a
// call runs.
func (s *Source) connectedReader(ctx context.Context, conn *pgx.Conn) (pid int32, err error) {
	err = conn.QueryRow(ctx, `
		SELECT coalesce(min(pid), 0) FROM pg_stat_activity
		WHERE application_name ~ $1 AND application_name NOT LIKE $2 AND backend_type = 'client backend'`,
		"^"+applicationPrefix+"[0-9a-f]{8}/"+cutName(s.cfg.Slot)+"$", applicationPrefix+s.tag+"/%").Scan(&pid)
	if err != nil {
		return 0, classify("look for readers of the slot", err)
	}
	return pid, nil
}

// cutName is what the server leaves of a slot's name in an application_name.
func cutName(slot string) string {
	const most = 63 - len(applicationPrefix) - len("01234567/")
	return slot[:min(len(slot), most)]
}

// SetupSQL gives the statements that an owner of the tables runs, in this
// order, where pgsource itself may not create publication and slot. What the
// first one does to writers stands in front of it as a comment of SQL.
func (s *Source) SetupSQL(ctx context.Context) ([]string, error) {
	create := s.publicationStatement()
	err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		list, err := withoutIdentity(ctx, conn, s.cfg.Tables)
		if len(list) > 0 {
			create = sqlComment(refusedWrites(list)) + create
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	slot := fmt.Sprintf("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", quoteLiteral(s.cfg.Slot))
	if s.cfg.Failover {
		slot = fmt.Sprintf("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', failover => true)", quoteLiteral(s.cfg.Slot))
	}
	return []string{create, slot}, nil
}

// sqlComment makes one line of the text, whatever names of tables are in it:
// what stands behind a line's end would be a statement.
func sqlComment(text string) string {
	return "-- " + strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == '\u2028' || r == '\u2029' {
			return '?'
		}
		return r
	}, text) + "\n"
}
