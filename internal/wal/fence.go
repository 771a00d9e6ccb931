package wal

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/decode"
)

// identity says which server a position belongs to.
type identity struct {
	system   string // the cluster's identifier, kept by its standbys and clones
	timeline uint32 // raised by each promotion
	database string
}

// answering is what a server says of itself when it is asked who it is.
type answering struct {
	identity
	// end is where the WAL ends that it has on its disk. A standby gives 0: it
	// may rightly be behind what another server of its timeline has sent, and
	// what it did replay before it was restarted.
	end LSN
}

// errOtherServer ends an attempt: the server that answers is another one than
// that which the attempt began with, most likely a promoted standby. Positions
// that were received may not exist there, so the ledger is dropped, and reading
// begins again at the bookmark, if the other server has that.
var errOtherServer = errors.New("another server answers")

// identify asks a replication connection who it is connected to.
//
// Whether it is a standby is asked first: one that is promoted in between gives
// its position as a standby, and would then be taken for a primary that is too
// short.
func identify(ctx context.Context, conn *pgconn.PgConn) (answering, error) {
	standby, err := inRecovery(ctx, conn)
	if err != nil {
		return answering{}, err
	}
	sys, err := pglogrepl.IdentifySystem(ctx, conn)
	if err != nil {
		return answering{}, classify("identify the server", err)
	}
	if sys.SystemID == "" || sys.Timeline <= 0 {
		return answering{}, fmt.Errorf("identify the server: it says system %q, timeline %d", sys.SystemID, sys.Timeline)
	}
	now := answering{identity: identity{system: sys.SystemID, timeline: uint32(sys.Timeline), database: sys.DBName}}
	if !standby {
		now.end = LSN(sys.XLogPos)
	}
	return now, nil
}

// inRecovery asks a replication connection whether the server is a standby.
func inRecovery(ctx context.Context, conn *pgconn.PgConn) (bool, error) {
	const operation = "ask whether the server is a standby"
	results, err := conn.Exec(ctx, `SELECT pg_is_in_recovery()`).ReadAll()
	if err != nil {
		return false, classify(operation, err)
	}
	if len(results) != 1 || len(results[0].Rows) != 1 || len(results[0].Rows[0]) != 1 {
		return false, fmt.Errorf("%s: it gives no row of one column", operation)
	}
	return string(results[0].Rows[0][0]) == "t", nil
}

// sameServer asks the very connection that is to stream whether it goes to the
// server that prepare has found, behind a proxy or a list of hosts it may not,
// and whether that still has what it has sent up to from.
func (r *ready) sameServer(ctx context.Context, conn *pgconn.PgConn, from uint64) error {
	now, err := identify(ctx, conn)
	if err != nil {
		return err
	}
	if err := r.same(now.identity); err != nil {
		return err
	}
	return now.reaches(LSN(from))
}

// reaches refuses a server whose WAL ends below a position that it has sent
// before: on one timeline a primary comes to that only by being put back to an
// earlier state. Its commits until it has written that much again would be
// passed over, since they end below what the server is told.
//
// A crash is no such thing. A position is sent, in a keepalive too, when the
// WAL up to it is on the server's disk, and recovery ends at the last of that,
// or where the rest of a record is missing, and then writes a checkpoint behind
// it before anybody is let in.
func (now answering) reaches(lsn LSN) error {
	if now.end == 0 || now.end >= lsn {
		return nil
	}
	return &decode.Refusal{
		Reason: decode.ReasonGap, What: "server", Where: "timeline " + strconv.FormatUint(uint64(now.timeline), 10),
		Why: fmt.Sprintf("its WAL ends at %s, and it has sent everything up to %s (%d bytes more) on this timeline before: it was put back to an earlier state, from a disk snapshot or a backup. What it commits now gets positions that pgsource has passed already",
			now.end, lsn, lsn-now.end),
		Expected: "a server that has everything up to the position at which reading goes on",
		Do:       "if another server has it, put that one into PGSOURCE_DSN; else see that the slot is there, then " + wayBack,
	}
}

// same compares the server that answers with the one that prepare has found.
func (r *ready) same(now identity) error {
	if now != r.identity {
		return fmt.Errorf("%w: it was system %s, timeline %d, and is system %s, timeline %d",
			errOtherServer, r.identity.system, r.identity.timeline, now.system, now.timeline)
	}
	return nil
}

// witness is who is asked for a server's identity.
type witness struct {
	identify func(ctx context.Context) (answering, error)
	node     func(ctx context.Context) (node, error)
	// history gives the file of a timeline's history.
	history func(ctx context.Context, timeline uint32) ([]byte, error)
	close   func()
}

// witness connects to the server: by the replication protocol, which has
// commands for it, or over plain SQL where that is the transport.
func (s *Source) witness(ctx context.Context) (*witness, error) {
	if s.cfg.Transport == TransportPeek {
		conn, err := s.connectAnywhere(ctx)
		if err != nil {
			return nil, err
		}
		return &witness{
			identify: func(ctx context.Context) (answering, error) { return identifySQL(ctx, conn) },
			node:     func(ctx context.Context) (node, error) { return readNode(ctx, conn.PgConn()) },
			history:  func(ctx context.Context, timeline uint32) ([]byte, error) { return historySQL(ctx, conn, timeline) },
			close:    func() { _ = conn.Close(context.WithoutCancel(ctx)) },
		}, nil
	}
	conn, err := s.connectReplication(ctx, 0)
	if err != nil {
		return nil, err
	}
	return &witness{
		identify: func(ctx context.Context) (answering, error) { return identify(ctx, conn) },
		node:     func(ctx context.Context) (node, error) { return readNode(ctx, conn) },
		history: func(ctx context.Context, timeline uint32) ([]byte, error) {
			history, err := pglogrepl.TimelineHistory(ctx, conn, int32(timeline)) //nolint:gosec // came as an int32
			if err != nil {
				return nil, classify("read the history of timeline "+strconv.FormatUint(uint64(timeline), 10), err)
			}
			return history.Content, nil
		},
		close: func() { _ = conn.Close(context.WithoutCancel(ctx)) },
	}, nil
}

// identitySQL asks for what a server says of itself in five columns of text:
// system, timeline in hex (of the WAL that is being written; the control file's
// can be old for minutes after a promotion), database, whether the server is a
// standby, which has no such timeline, and the end of what it has of WAL on its
// disk.
const identitySQL = `(SELECT system_identifier FROM pg_control_system())::text,
	(SELECT CASE WHEN pg_is_in_recovery() THEN '' ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END), current_database()::text, pg_is_in_recovery()::text,
	(SELECT CASE WHEN pg_is_in_recovery() THEN '0/0' ELSE pg_current_wal_flush_lsn() END)::text`

// readIdentity reads what identitySQL gives.
func readIdentity(system, timeline, database, standby, end string) (answering, error) {
	if standby != "false" {
		return answering{}, fmt.Errorf("%w: it is a standby, whose timeline plain SQL does not tell", errOtherServer)
	}
	id, err := strconv.ParseUint(timeline, 16, 32)
	if err != nil || id == 0 || system == "" {
		return answering{}, fmt.Errorf("identify the server: it says system %q, timeline %q", system, timeline)
	}
	lsn, err := parseLSN(end)
	if err == nil && lsn == 0 { // which is a standby's
		err = errors.New("it says that its WAL ends at 0/0")
	}
	if err != nil {
		return answering{}, fmt.Errorf("identify the server: %w", err)
	}
	return answering{identity{system: system, timeline: uint32(id), database: database}, LSN(lsn)}, nil
}

// identifySQL asks a plain connection who it is connected to.
func identifySQL(ctx context.Context, conn *pgx.Conn) (answering, error) {
	var system, timeline, database, standby, end string
	err := conn.QueryRow(ctx, "SELECT "+identitySQL).Scan(&system, &timeline, &database, &standby, &end)
	if err != nil {
		return answering{}, classify("identify the server", err)
	}
	return readIdentity(system, timeline, database, standby, end)
}

// historySQL reads a timeline's history as a file, which needs more rights than
// the command of the replication protocol does.
func historySQL(ctx context.Context, conn *pgx.Conn, timeline uint32) ([]byte, error) {
	file := fmt.Sprintf("pg_wal/%08X.history", timeline)
	var content string
	err := conn.QueryRow(ctx, `SELECT pg_read_file($1)`, file).Scan(&content)
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "42501" {
		return nil, &decode.Refusal{
			Reason: decode.ReasonGap, What: "server", Where: "timeline " + strconv.FormatUint(uint64(timeline), 10),
			Why:      "it was promoted since the last start, and this role may not read where the timeline before it ended (" + file + "), so nobody can tell whether it has everything up to the bookmark",
			Expected: "a role that may, or a replication connection, over which any role with REPLICATION can ask",
			Do:       "start pgsource once with PGSOURCE_TRANSPORT=stream over a direct connection; or GRANT EXECUTE ON FUNCTION pg_read_file(text) TO the role for this start, and REVOKE it afterwards",
		}
	}
	if err != nil {
		return nil, classify("read the history of timeline "+strconv.FormatUint(uint64(timeline), 10), err)
	}
	return []byte(content), nil
}

// fence compares the server with the one that the state is about, before
// anything is read from it. st is nil where there is none yet. It changes
// nothing.
func (s *Source) fence(ctx context.Context, st *State, r *ready) error {
	server, err := s.witness(ctx)
	if err != nil {
		return err
	}
	defer server.close()
	qctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	now, err := server.identify(qctx)
	if err != nil {
		return err
	}
	r.identity = now.identity
	if r.node, err = server.node(qctx); err != nil {
		return err
	}
	if st == nil {
		return nil
	}
	if err := st.sameCluster(r.identity, s.cfg.State.Where()); err != nil {
		return err
	}
	if st.Timeline == r.identity.timeline {
		// told is above the bookmark where no state is kept.
		return now.reaches(max(st.Acknowledged, LSN(s.told.Load())))
	}
	r.switchPoint, err = server.promoted(qctx, st, r.identity.timeline)
	return err
}

// sameCluster refuses positions that are another cluster's or database's.
func (st *State) sameCluster(now identity, where string) error {
	if st.System == now.system && st.Database == now.database {
		return nil
	}
	why := fmt.Sprintf("the server is another cluster: its system identifier is %s, and the bookmark %s is a position of %s", now.system, st.Acknowledged, st.System)
	if st.System == now.system {
		why = fmt.Sprintf("the connection goes to database %q, and the bookmark %s is about %q", now.database, st.Acknowledged, st.Database)
	}
	return &decode.Refusal{
		Reason: decode.ReasonGap, What: "state", Where: where, Why: why,
		Expected: "the cluster and database in which the slot was read before; a dump that was restored and an upgraded server are other clusters, whose positions mean something else",
		Do:       "correct PGSOURCE_DSN or PGSOURCE_STATE; or, when the move was meant, make publication and slot there, then " + wayBack,
	}
}

// promoted decides whether a server of another timeline holds everything that
// was acknowledged: the bookmark's timeline must be an ancestor of its own that
// ended at or behind the bookmark. A standby that was promoted earlier than
// that never had the last of what the pipeline holds, and has other changes at
// the same positions instead.
func (w *witness) promoted(ctx context.Context, st *State, now uint32) (LSN, error) {
	refuse := func(why string) error {
		return &decode.Refusal{
			Reason: decode.ReasonGap, What: "server", Where: "timeline " + strconv.FormatUint(uint64(now), 10), Why: why,
			Expected: "a server that has everything up to the bookmark",
			Do:       "see that the slot is there, then " + wayBack + "; let promotions wait for the slot (synchronized_standby_slots) to avoid this",
		}
	}
	if now < st.Timeline {
		return 0, refuse(fmt.Sprintf("it is an older timeline than %d, on which the bookmark %s lies: the former primary came back, or a backup was restored", st.Timeline, st.Acknowledged))
	}
	history, err := w.history(ctx, now)
	if err != nil {
		return 0, err
	}
	ended, err := switchPoint(history, st.Timeline)
	switch {
	case err != nil:
		return 0, fmt.Errorf("read the history of timeline %d: %w", now, err)
	case ended == 0:
		return 0, refuse(fmt.Sprintf("its history does not contain timeline %d, on which the bookmark %s lies", st.Timeline, st.Acknowledged))
	case st.Acknowledged > ended:
		return 0, refuse(fmt.Sprintf("timeline %d ended at %s, and the bookmark is %s: the pipeline holds changes that this server never had (%d bytes of WAL), and changes made here since are at the same positions",
			st.Timeline, ended, st.Acknowledged, st.Acknowledged-ended))
	}
	return ended, nil
}

// maxHistory bounds what is looked at of a timeline history: a line for each
// promotion.
const maxHistory = 1 << 20

// switchPoint finds where a timeline ended in the history of a later one: 0
// where it is not in it. A line is: timeline, white space, LSN, white space,
// reason; # begins a comment.
func switchPoint(history []byte, timeline uint32) (LSN, error) {
	if len(history) > maxHistory {
		return 0, fmt.Errorf("it has %d bytes", len(history))
	}
	for line := range strings.Lines(string(history)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		id, err := strconv.ParseUint(fields[0], 10, 32)
		if err != nil || len(fields) < 2 {
			return 0, errors.New("a line of it is not: timeline, LSN, reason")
		}
		if uint32(id) != timeline {
			continue
		}
		var ended LSN
		if err := ended.UnmarshalText([]byte(fields[1])); err != nil {
			return 0, err
		}
		return ended, nil
	}
	return 0, nil
}

// remember makes durable what prepare has found: at a first start the slot's
// position, later that the timeline is another one.
func (s *Source) remember(ctx context.Context, r *ready) error {
	first := false
	err := s.keeper.must(ctx, func(next *State) bool {
		if first = next.System == ""; first {
			*next = State{
				System: r.identity.system, Timeline: r.identity.timeline, Database: r.identity.database,
				Slot: s.cfg.Slot, Publication: s.cfg.Publication,
				Acknowledged: LSN(r.confirmed), Sent: LSN(r.confirmed), Incarnation: s.cfg.Pipeline.Expected(),
				Snapshot: begunWith(r.slotMade),
			}
			if !r.slotMade {
				next.Rows = next.Acknowledged
			}
			return true
		}
		changed := next.Incarnation == ""
		if next.Progress != nil && !s.effectivelyOnce() {
			next.Progress, changed = nil, true // no row stands for what comes now
		}
		if changed {
			next.Incarnation = s.cfg.Pipeline.Expected()
		}
		if next.Timeline != r.identity.timeline {
			if sent := s.keeper.exactlySent(next.Acknowledged); sent > r.switchPoint {
				next.notice(Notice{
					Kind: NoticeTimeline, Was: strconv.FormatUint(uint64(next.Timeline), 10), Now: strconv.FormatUint(uint64(r.identity.timeline), 10),
					From: r.switchPoint, To: sent, Noticed: time.Now().UTC(),
				})
			}
			s.log.WarnContext(ctx, "the server was promoted: reading goes on at the bookmark, which its timeline has",
				"was", next.Timeline, "now", r.identity.timeline, "switched_at", r.switchPoint.String(), "lsn", next.Acknowledged.String())
			next.Timeline, changed = r.identity.timeline, true
			next.forgetBehind(r.switchPoint)
			next.copyAgain()
		}
		return changed
	})
	if err != nil {
		return err
	}
	st, err := s.keeper.get(ctx)
	if err != nil {
		return err
	}
	if first {
		s.log.InfoContext(ctx, "no state yet: begun with the slot's position, so nobody can tell whether the slot was moved before", "store", s.cfg.State.Where(), "slot", s.cfg.Slot, "lsn", decode.FormatLSN(r.confirmed))
	}
	r.confirmed = max(r.confirmed, uint64(st.Acknowledged))
	s.reportNotices(st)
	return nil
}

// copyAgain lets copies that are under way begin again: rows that they have
// brought may be ones that the promoted standby never had.
func (st *State) copyAgain() {
	if st.Snapshot == nil || len(st.Snapshot.Jobs) == 0 {
		return
	}
	st.Snapshot = st.Snapshot.clone()
	for i := range st.Snapshot.Jobs {
		st.Snapshot.Jobs[i].beginAgain()
	}
}

// forgetBehind drops what the state says of transactions behind the point where
// their timeline ended: this server does not have them, and has or will have
// others at their positions. To wait for their end would leave the pipeline's
// open transaction open until so much else has been written, and to pass over
// one would pass over whatever ends there.
func (st *State) forgetBehind(ended LSN) {
	if st.Intent != nil && st.Intent.Through > ended {
		in := *st.Intent
		in.Through = ended
		st.Intent = &in
	}
	if st.Refused != nil && st.Refused.End > ended {
		st.Refused = nil
	}
	if st.Skip != nil && st.Skip.End > ended {
		st.Skip = nil
	}
}
