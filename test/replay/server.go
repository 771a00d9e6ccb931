package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgproto3"

	"holdfast/internal/decode"
)

// pgServer speaks as much of Postgres' protocol as pgsource uses: it answers
// queries from the catalogue and START_REPLICATION from the recorded stretch, and
// listens to what is confirmed. It listens on 127.0.0.1 only and knows no
// password.
type pgServer struct {
	listener  net.Listener
	part      *postgresPart
	stream    []message
	catalogue *catalogue
	ctx       context.Context //nolint:containedctx // the life of the server
	cancel    context.CancelFunc
	owned     sync.WaitGroup

	mu        sync.Mutex
	confirmed lsn
	early     error         // the first thing that was wrong
	changed   chan struct{} // closed and made anew at each change
}

// maxClientMessage bounds a message of pgsource: a query about many tables.
const maxClientMessage = 16 << 20

func startServer(ctx context.Context, part *postgresPart, stream []message, c *catalogue) (*pgServer, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("listen for pgsource: %w", err)
	}
	s := &pgServer{listener: l, part: part, stream: stream, catalogue: c, confirmed: part.From, changed: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancel(ctx)
	s.owned.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // closed
			}
			s.owned.Go(func() {
				stop := context.AfterFunc(s.ctx, func() { _ = conn.Close() })
				defer stop()
				defer func() { _ = conn.Close() }()
				if err := s.serve(conn); err != nil && s.ctx.Err() == nil {
					s.fail(err)
				}
			})
		}
	})
	return s, nil
}

func (s *pgServer) close() {
	s.cancel()
	_ = s.listener.Close() // nobody waits for what it says
	s.owned.Wait()
}

// dsn is what pgsource is given.
func (s *pgServer) dsn() string {
	return fmt.Sprintf("postgres://%s@%s/%s?sslmode=disable", s.part.User, s.listener.Addr(), s.part.Database)
}

func (s *pgServer) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.early == nil {
		s.early = err
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// confirm takes what pgsource confirms; it never goes back.
func (s *pgServer) confirm(at lsn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.confirmed = max(s.confirmed, at)
	close(s.changed)
	s.changed = make(chan struct{})
}

// awaitConfirmed waits until everything is confirmed, done is closed, something
// was wrong, or ctx ends.
func (s *pgServer) awaitConfirmed(ctx context.Context, done <-chan struct{}) error {
	for {
		s.mu.Lock()
		at, err, changed := s.confirmed, s.early, s.changed
		s.mu.Unlock()
		if err != nil {
			return err
		}
		if at >= s.part.To {
			return nil
		}
		select {
		case <-changed:
		case <-done:
			return errors.New("pgsource ended before it had confirmed everything")
		case <-ctx.Done():
			return fmt.Errorf("pgsource has confirmed up to %s of %s: %w", at, s.part.To, context.Cause(ctx))
		}
	}
}

func (s *pgServer) serve(conn net.Conn) error {
	b := pgproto3.NewBackend(conn, conn)
	b.SetMaxBodyLen(maxClientMessage)
	replication := false
	for started := false; !started; {
		m, err := b.ReceiveStartupMessage()
		if err != nil {
			return nil //nolint:nilerr // a client that goes before it has said anything
		}
		switch m := m.(type) {
		case *pgproto3.SSLRequest, *pgproto3.GSSEncRequest:
			if _, err := conn.Write([]byte{'N'}); err != nil {
				return nil //nolint:nilerr // it is gone
			}
		case *pgproto3.StartupMessage:
			replication, started = m.Parameters["replication"] == "database", true
		default:
			return nil // a request to cancel: nothing here lasts
		}
	}
	b.Send(&pgproto3.AuthenticationOk{})
	for name, value := range s.part.Parameters {
		b.Send(&pgproto3.ParameterStatus{Name: name, Value: value})
	}
	b.Send(&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{0, 0, 0, 1}})
	b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	for {
		if err := b.Flush(); err != nil {
			return nil //nolint:nilerr // pgsource left
		}
		m, err := b.Receive()
		if err != nil {
			return nil //nolint:nilerr // as above
		}
		switch m := m.(type) {
		case *pgproto3.Query:
			if replication && strings.HasPrefix(m.String, "START_REPLICATION") {
				return s.replicate(b, m.String)
			}
			if err := s.answer(b, replication, m.String); err != nil {
				return err
			}
		case *pgproto3.Terminate:
			return nil
		default:
			return fmt.Errorf("pgsource sent a %T, which this server does not know", m)
		}
	}
}

func (s *pgServer) answer(b *pgproto3.Backend, replication bool, query string) error {
	a, err := s.catalogue.answer(s.ctx, replication, query)
	if err == nil && strings.Contains(query, slotQuery) {
		s.mu.Lock()
		confirmed := s.confirmed
		s.mu.Unlock()
		a, err = patchSlot(a, confirmed, s.part.To)
	}
	if err != nil {
		answer{Error: &refusedQuery{"0A000", err.Error()}}.send(b)
		return errors.Join(err, b.Flush())
	}
	a.send(b)
	return nil
}

var startCommand = regexp.MustCompile(`^START_REPLICATION SLOT "([^"]+)" LOGICAL ([0-9A-Fa-f]+/[0-9A-Fa-f]+)`)

// replicate sends what was committed after the position asked for, as a server
// does, then keeps the connection until the client ends it.
func (s *pgServer) replicate(b *pgproto3.Backend, command string) error {
	parts := startCommand.FindStringSubmatch(command)
	if parts == nil || parts[1] != s.part.Slot {
		return fmt.Errorf("pgsource starts with %q, and the recording is of slot %q", command, s.part.Slot)
	}
	at, err := pglogrepl.ParseLSN(parts[2])
	if err != nil {
		return fmt.Errorf("read the position of %q: %w", command, err)
	}
	s.mu.Lock()
	start := max(lsn(at), s.confirmed) // as the server: never before the slot
	s.mu.Unlock()

	var writing sync.Mutex // the sender and the answers to status updates
	send := func(flush bool, bodies ...[]byte) error {
		writing.Lock()
		defer writing.Unlock()
		for _, body := range bodies {
			b.Send(&pgproto3.CopyData{Data: body})
		}
		if !flush {
			return nil
		}
		return b.Flush() //nolint:wrapcheck // only whether it worked is of interest
	}
	b.Send(&pgproto3.CopyBothResponse{})
	if err := b.Flush(); err != nil {
		return nil
	}
	reached := make(chan struct{}) // closed when everything was sent
	var sender sync.WaitGroup
	defer sender.Wait()
	stop := make(chan struct{})
	defer close(stop)
	failed := make(chan error, 1)
	sender.Go(func() {
		defer close(reached)
		if err := s.send(start, stop, send); err != nil {
			failed <- err
		}
	})
	for {
		m, err := b.Receive()
		if err != nil {
			select {
			case err := <-failed:
				return err
			default:
				return nil
			}
		}
		switch m := m.(type) {
		case *pgproto3.CopyData:
			if len(m.Data) != 34 || m.Data[0] != 'r' {
				return fmt.Errorf("pgsource sent %d bytes of kind %q instead of a status update", len(m.Data), m.Data[:min(1, len(m.Data))])
			}
			s.confirm(lsn(binary.BigEndian.Uint64(m.Data[9:]))) // what it has flushed
			if m.Data[33] == 1 {
				select {
				case <-reached:
					err = send(true, keepalive(s.part.To))
				default:
					err = send(true, keepalive(start)) // nothing may be said of what was not sent
				}
			}
		case *pgproto3.CopyDone:
			err = func() error {
				writing.Lock()
				defer writing.Unlock()
				b.Send(&pgproto3.CopyDone{})
				b.Send(&pgproto3.CommandComplete{CommandTag: []byte("COPY 0")})
				b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
				return b.Flush()
			}()
		case *pgproto3.Terminate:
			return nil
		}
		if err != nil {
			return nil
		}
	}
}

// send streams the transactions that were committed after start. What an earlier
// one said about tables is said again inside the first one that is sent, as a
// server would say it in a session of its own.
func (s *pgServer) send(start lsn, stop <-chan struct{}, send func(flush bool, bodies ...[]byte) error) error {
	relations := map[string][]byte{} // by kind and id, of transactions that are passed over
	passing := false
	var order []string
	size := 0
	for _, m := range s.stream {
		select {
		case <-stop:
			return nil
		default:
		}
		kind := decode.MessageKind(0)
		if len(m.Data) > 0 {
			kind = decode.MessageKind(m.Data[0])
		}
		if kind == decode.MsgBegin {
			if len(m.Data) < 9 {
				return errors.New("the recording has a BEGIN that is cut short")
			}
			passing = lsn(binary.BigEndian.Uint64(m.Data[1:])) < start
		}
		if passing {
			if (kind == decode.MsgRelation || kind == decode.MsgType) && len(m.Data) >= 5 {
				id := string(m.Data[:5])
				if relations[id] == nil {
					order = append(order, id)
				}
				relations[id] = m.Data
			}
			continue
		}
		bodies := [][]byte{xlogData(m)}
		if kind == decode.MsgBegin {
			for _, id := range order {
				bodies = append(bodies, xlogData(message{m.LSN, relations[id]}))
			}
			order = nil
		}
		size += len(m.Data)
		if err := send(size > 1<<16, bodies...); err != nil {
			return nil //nolint:nilerr // pgsource left
		}
		if size > 1<<16 {
			size = 0
		}
	}
	if err := send(true, keepalive(s.part.To)); err != nil {
		return nil //nolint:nilerr // as above
	}
	return nil
}

var postgresEpoch = time.Date(2000, time.January, 1, 0, 0, 0, 0, time.UTC)

func xlogData(m message) []byte {
	b := make([]byte, 25, 25+len(m.Data))
	b[0] = 'w'
	binary.BigEndian.PutUint64(b[1:], uint64(m.LSN))
	binary.BigEndian.PutUint64(b[9:], uint64(m.LSN))
	binary.BigEndian.PutUint64(b[17:], uint64(time.Since(postgresEpoch).Microseconds()))
	return append(b, m.Data...)
}

func keepalive(at lsn) []byte {
	b := make([]byte, 18)
	b[0] = 'k'
	binary.BigEndian.PutUint64(b[1:], uint64(at))
	binary.BigEndian.PutUint64(b[9:], uint64(time.Since(postgresEpoch).Microseconds()))
	return b
}
