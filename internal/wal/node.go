package wal

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/decode"
)

// This file is about which of several servers a connection has come to. With a
// list of hosts, or a balancer, each connection finds its own:
//
//	the stream runs on the primary → the primary refuses one connection (too many
//	clients, a time-out) → the driver goes on to the next host, a standby → that
//	has no slot, an older catalogue and older rows
//
// System identifier and timeline are the same on both.

// node is one running server: whether it is a standby, and when it was started,
// which no two servers of a cluster have in common to the microsecond. A server
// that restarts is another one by this; that ends the stream too, and the next
// connection that is to stream says anew which it is.
type node struct {
	identity identity
	standby  bool
	started  string
	// streams: the stream goes over a connection to it now. Where none does, it may
	// have been restarted, and only its kind counts.
	streams bool
}

const nodeSQL = `SELECT pg_is_in_recovery()::text, (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::int8::text`

// readNode asks a plain connection or one for replication, which takes a
// statement of SQL before the stream begins.
func readNode(ctx context.Context, conn *pgconn.PgConn) (node, error) {
	const operation = "ask which server answers"
	results, err := conn.Exec(ctx, nodeSQL).ReadAll()
	if err != nil {
		return node{}, classify(operation, err)
	}
	if len(results) != 1 || len(results[0].Rows) != 1 || len(results[0].Rows[0]) != 2 {
		return node{}, fmt.Errorf("%s: it does not give one row of two values", operation)
	}
	row := results[0].Rows[0]
	return node{standby: string(row[0]) == "true", started: string(row[1])}, nil
}

// other says why a connection is of no use beside the one that streams; nil
// where both are on one server.
func (n *node) other(now node) error {
	switch {
	case n.started != "" && n.started == now.started:
		return nil // a standby that was promoted too: a stream of 16 and newer goes on over that
	case n.standby != now.standby:
		kinds := map[bool]string{true: "a standby", false: "a primary"}
		return elsewhere(fmt.Sprintf("%s answers, and pgsource reads from %s", kinds[now.standby], kinds[n.standby]))
	case n.streams:
		return elsewhere("another server answers than the one that streams, or it has restarted")
	default:
		return nil
	}
}

func elsewhere(why string) error {
	return &outage{
		what: "look at the server that streams", why: why,
		do: "where PGSOURCE_DSN names several hosts, or a balancer, let it lead to one server only: target_session_attrs=primary (standby, where the slot is a standby's)",
	}
}

// besideStream closes a connection that has come to another server than the one
// that streams. Before anything has streamed, any server will do.
func (s *Source) besideStream(ctx context.Context, conn *pgx.Conn) (*pgx.Conn, error) {
	n := s.node.Load()
	if n == nil {
		return conn, nil
	}
	qctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	now, err := readNode(qctx, conn.PgConn())
	if err == nil {
		err = n.other(now)
	}
	if err != nil {
		_ = conn.Close(context.WithoutCancel(ctx))
		return nil, err
	}
	return conn, nil
}

// settle takes the server that prepare has found for the one that is to stream;
// conn, over which the rest is looked at, must be on it too. A primary in place of
// a standby is taken for one that was promoted where its timeline tells so. A
// standby in place of the primary is never taken: it may have come to the timeline
// of another that was promoted, which has the slot.
func (s *Source) settle(ctx context.Context, conn *pgx.Conn, r *ready) error {
	now, err := readNode(ctx, conn.PgConn())
	if err != nil {
		return err
	}
	if err := r.node.other(now); err != nil {
		return err
	}
	now.identity = r.identity
	if was := s.node.Load(); was != nil && (now.standby || was.identity == now.identity) {
		if err := (&node{standby: was.standby, started: was.started}).other(now); err != nil {
			return err
		}
	}
	s.node.Store(&now)
	return nil
}

// unlessElsewhere makes the refusal of a server an outage where it is about a
// standby and this process has streamed from a primary, or the other way round.
func (s *Source) unlessElsewhere(ctx context.Context, conn *pgx.Conn, err error) error {
	was := s.node.Load()
	if was == nil {
		return err
	}
	if _, refused := errors.AsType[*decode.Refusal](err); !refused {
		return err
	}
	now, nodeErr := readNode(ctx, conn.PgConn())
	if nodeErr != nil {
		return err
	}
	if other := (&node{standby: was.standby, started: was.started}).other(now); other != nil {
		return other
	}
	return err
}

// streamsHere takes the server at the other end of a connection that is to
// stream for the one that everything else is to be on. It may have restarted
// since prepare; a primary does not become a standby, or the other way round,
// without another timeline.
func (s *Source) streamsHere(ctx context.Context, conn *pgconn.PgConn, r *ready) error {
	now, err := readNode(ctx, conn)
	if err != nil {
		return err
	}
	if err := (&node{standby: r.node.standby, started: r.node.started}).other(now); err != nil {
		return err
	}
	now.identity, now.streams = r.identity, true
	s.node.Store(&now)
	return nil
}

// streamsNowhere lets looks go to a server that has restarted since. The stream
// can be away for long, with a queue in front of a slow destination, and the slot
// is to be watched then of all times.
func (s *Source) streamsNowhere() {
	if n := s.node.Load(); n != nil && n.streams {
		last := *n
		last.streams = false
		s.node.Store(&last)
	}
}

// hostsNote says what is wrong with a list of hosts that any server will do for,
// "" where nothing is.
func hostsNote(cfg *pgconn.Config) string {
	hosts := []string{cfg.Host}
	several := false
	for _, f := range cfg.Fallbacks { // one for each way to encrypt, too
		several = several || f.Host != cfg.Host || f.Port != cfg.Port
		hosts = append(hosts, f.Host)
	}
	if !several || cfg.ValidateConnect != nil {
		return ""
	}
	return fmt.Sprintf("PGSOURCE_DSN names several hosts (%s) and does not say which of them to take, so a connection can come to a standby while the primary is busy: add target_session_attrs=primary (or standby, where the slot is a standby's)",
		strings.Join(compactHosts(hosts), ", "))
}

func compactHosts(hosts []string) []string {
	const most = 5
	var out []string
	for i, host := range hosts {
		if i > 0 && host == hosts[i-1] {
			continue
		}
		if len(out) == most {
			return append(out, "…")
		}
		out = append(out, host)
	}
	return out
}
