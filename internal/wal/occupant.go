package wal

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ownGrace is how long this process waits for an earlier walsender of its own
// to notice that nobody is there any more.
const ownGrace = time.Second

// occupant is whoever uses the slot, as the server sees it.
type occupant struct {
	pid                       int32
	application, user, client string
	began                     string // of its session, which tells it from a later one with its pid
	// reply is the time that its last status update carries: a pgsource that
	// lives sends one at least every ten seconds, also when nothing happens. It
	// is "" where none came yet, and where this role may not see it.
	reply string
	// calls: it is an ordinary session in a call of a function, such as a peek.
	calls bool
	// waits: the walsender waits for its client or for WAL. It reads the
	// client's updates before it does, so what reply says is up to date. One
	// that is at work on a large transaction lets them lie, for up to half of
	// wal_sender_timeout.
	waits bool
}

// occupancy remembers since when an occupant has been silent. Its methods may
// be called by several goroutines.
type occupancy struct {
	mu    sync.Mutex
	last  occupant
	since time.Time
}

// silence tells for how long we have seen nothing of o. It is measured by our
// clock between two looks, so that the server's clock and the occupant's do
// not matter.
func (c *occupancy) silence(o occupant, now time.Time) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if o != c.last || !o.waits {
		c.last, c.since = o, now
	}
	return now.Sub(c.since)
}

// occupied says who uses the slot, and ends the session if it is a dead
// pgsource: one of this process, whose connection is gone, or another that has
// been silent for TakeoverAfter. A pgsource that lives is never ended, however
// long somebody waits for the slot; so two of them cannot end each other in
// turn. The error is always worth another attempt.
func (s *Source) occupied(ctx context.Context) error {
	var answer error
	err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		o, err := readOccupant(ctx, conn, s.cfg.Slot)
		if err != nil {
			return err
		}
		answer = s.judge(ctx, conn, o)
		return nil
	})
	if err != nil {
		return err
	}
	return answer
}

// readOccupant gives the zero value where nobody uses the slot.
func readOccupant(ctx context.Context, conn *pgx.Conn, slot string) (o occupant, err error) {
	err = conn.QueryRow(ctx, `
		SELECT s.active_pid, coalesce(a.application_name, ''), coalesce(a.usename, ''), coalesce(host(a.client_addr), 'this machine or an unknown one'),
		       coalesce(a.backend_start::text, ''), coalesce(r.reply_time::text, ''), r.pid IS NULL, coalesce(a.wait_event_type IN ('Activity', 'Client'), false)
		FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid LEFT JOIN pg_stat_replication r ON r.pid = s.active_pid
		WHERE s.slot_name = $1 AND s.active`, slot,
	).Scan(&o.pid, &o.application, &o.user, &o.client, &o.began, &o.reply, &o.calls, &o.waits)
	if errors.Is(err, pgx.ErrNoRows) {
		return occupant{}, nil
	}
	if err != nil {
		return occupant{}, classify("look up who uses the slot", err)
	}
	return o, nil
}

func (s *Source) judge(ctx context.Context, conn *pgx.Conn, o occupant) error {
	busy := func(why, do string) error {
		return &outage{what: fmt.Sprintf("slot %q is in use", s.cfg.Slot), why: why, do: do, soon: true}
	}
	if o.pid == 0 {
		return busy("it was a moment ago, and is free now", "")
	}
	who := fmt.Sprintf("by process %d (application %q, user %q, from %s)", o.pid, o.application, o.user, o.client)
	own := strings.HasPrefix(o.application, applicationPrefix+s.tag+"/")
	if own {
		o.waits = true // it is gone, whatever its walsender does
	}
	silent := s.occupancy.silence(o, time.Now())
	grace := s.cfg.TakeoverAfter
	switch {
	case !strings.HasPrefix(o.application, applicationPrefix):
		return busy(who+", which is no pgsource", "one slot has one reader: stop the other one, or set PGSOURCE_SLOT to a slot of its own")
	case own:
		who, grace = who+": an earlier connection of this pgsource", ownGrace
	case o.calls:
		// A call says nothing until it ends, so its silence proves nothing, and
		// it lets go of the slot when it ends, whether anybody waits for it or not.
		return busy(who+": another pgsource that peeks at it", "stop the other one: one slot has one pgsource. If there is none any more, the call ends by itself")
	case grace == 0:
		return busy(who+": another pgsource, or one that is gone and the server does not know it yet", "stop the other one; if there is none, the server ends it after wal_sender_timeout, or run SELECT pg_terminate_backend("+fmt.Sprint(o.pid)+")")
	case o.reply == "":
		return busy(who+": another pgsource, of which nothing was heard yet or this role may not see what was", fmt.Sprintf("stop one of the two; "+
			"for a dead one to be told from a live one here, GRANT pg_read_all_stats TO %s; the server ends a dead one after wal_sender_timeout", quoteIdentifier(conn.Config().User)))
	default:
		who += ": another pgsource"
	}
	if silent < grace {
		return busy(fmt.Sprintf("%s, last heard of by the server at %s", who, o.reply),
			fmt.Sprintf("if it lives, stop one of the two: one slot has one pgsource. If it stays silent for %v, it is ended", grace))
	}
	var ended bool
	err := conn.QueryRow(ctx, `
		SELECT pg_terminate_backend(a.pid)
		FROM pg_replication_slots s JOIN pg_stat_activity a ON a.pid = s.active_pid LEFT JOIN pg_stat_replication r ON r.pid = a.pid
		WHERE s.slot_name = $1 AND a.pid = $2 AND a.backend_start::text = $3 AND a.application_name = $4 AND coalesce(r.reply_time::text, '') = $5`,
		s.cfg.Slot, o.pid, o.began, o.application, o.reply).Scan(&ended)
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return busy(who+", which has just moved", "")
	case errors.As(err, &pgErr) && pgErr.Code == "42501":
		return busy(who+", silent, and this role may not end it", fmt.Sprintf("GRANT pg_signal_backend TO %s; or let %s run SELECT pg_terminate_backend(%d)",
			quoteIdentifier(conn.Config().User), quoteIdentifier(o.user), o.pid))
	case err != nil:
		return classify("end a silent replication connection", err)
	}
	s.cfg.Metrics.slot.takeovers.Inc()
	s.log.WarnContext(ctx, "ended a silent replication connection that held the slot", "slot", s.cfg.Slot,
		"pid", o.pid, "application_name", o.application, "client", o.client, "silent_for", silent, "signalled", ended)
	return busy(who+", silent, and was ended", "")
}
