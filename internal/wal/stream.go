package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"holdfast/internal/decode"
)

const (
	// maxWireMessage bounds one message from the server. Postgres cannot send
	// a row above 1 GiB.
	maxWireMessage = 1 << 30
	// statusCoalesce is the least time between two status updates that nobody
	// asked for: confirming each transaction makes the server save the slot
	// each time, and was seen to triple the commit latency of its writers.
	statusCoalesce = 20 * time.Millisecond
	// statusTimeout bounds the write of one status update.
	statusTimeout = 10 * time.Second
)

// errMemory ends a connection on purpose: see reader.
var errMemory = errors.New("PGSOURCE_MEMORY_LIMIT is reached")

// errShuttingDown ends a connection that a server which is shutting down waits
// for: see shutdownWatch.
var errShuttingDown = errors.New("the server seems to be shutting down and waits until everything is confirmed, which the destination does not allow yet: let go of it")

// errServerDone ends a connection that the server has ended in good order,
// as it does for a shutdown.
var errServerDone = errors.New("the server ended the stream")

// stream is one replication connection after START_REPLICATION.
//
// One goroutine reads (read), one writes (status, finish); the two share the
// socket, which allows it, and nothing else but the deadline.
type stream struct{ wire }

// wire is a connection whose messages we read and write ourselves, with the one
// deadline that ends its reads.
type wire struct {
	conn     net.Conn
	frontend *pgproto3.Frontend

	mu sync.Mutex // guards the read deadline
	// interrupted makes interrupt final. Without it: interrupt sets a past
	// deadline; the reader, busy with a message, then refreshes it; the next
	// read blocks for the whole stall timeout although a stop was asked for.
	interrupted bool
	refreshed   time.Time
}

// read takes the next message of the stream. It returns errServerDone when
// the server has ended it, and a time-out when the wire was silent for
// longer than stall or interrupt was called.
func (s *stream) read(stall time.Duration) (decode.CopyMessage, error) {
	for {
		if err := s.refreshDeadline(stall); err != nil {
			return decode.CopyMessage{}, err
		}
		msg, err := s.frontend.Receive()
		if err != nil {
			return decode.CopyMessage{}, err
		}
		switch m := msg.(type) {
		case *pgproto3.CopyData:
			return decode.ParseCopy(m.Data)
		case *pgproto3.ErrorResponse:
			return decode.CopyMessage{}, classify("stream", pgconn.ErrorResponseToPgError(m))
		case *pgproto3.CopyDone, *pgproto3.CommandComplete:
			// The server's goodbye before a shutdown. A walsender that decodes
			// ends the command without ending the copy first.
			return decode.CopyMessage{}, errServerDone
		case *pgproto3.NoticeResponse:
			if err := unpublishedThen("stream", m); err != nil {
				return decode.CopyMessage{}, err
			}
		case *pgproto3.ParameterStatus, *pgproto3.NotificationResponse:
		default:
			return decode.CopyMessage{}, &decode.Refusal{
				Reason: decode.ReasonMalformed, What: "replication stream", Why: fmt.Sprintf("the server sent a %T", msg),
				Expected: "CopyData",
			}
		}
	}
}

// refreshDeadline moves the read deadline, at most once a second: a deadline
// per message costs more than reading the message.
func (w *wire) refreshDeadline(stall time.Duration) error {
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.interrupted || now.Sub(w.refreshed) < time.Second {
		return nil
	}
	w.refreshed = now
	return w.conn.SetReadDeadline(now.Add(stall))
}

// interrupt makes the reader return soon, now and for good. Writing goes on.
func (w *wire) interrupt() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.interrupted = true
	_ = w.conn.SetReadDeadline(time.Unix(1, 0)) // an error means that the connection is gone, which ends the read too
}

// sendStatus tells the server that everything up to lsn may be forgotten. It
// encodes the message itself: write, flush and apply all carry lsn, since
// anything else has been seen to confirm more than was meant.
func (s *stream) sendStatus(lsn uint64, now time.Time, replyRequested bool) error {
	var buf [5 + 34]byte
	buf[0] = 'd'
	binary.BigEndian.PutUint32(buf[1:], 4+34)
	body := buf[5:]
	body[0] = 'r'
	binary.BigEndian.PutUint64(body[1:], lsn)
	binary.BigEndian.PutUint64(body[9:], lsn)
	binary.BigEndian.PutUint64(body[17:], lsn)
	binary.BigEndian.PutUint64(body[25:], uint64(now.Sub(postgresEpoch).Microseconds())) //nolint:gosec // signed on the wire
	if replyRequested {
		body[33] = 1
	}
	return s.write(buf[:], now)
}

// sayGoodbye ends our side and waits, within a bound, until the server has
// ended its: then it has read everything that was sent before. Where it ends
// with an error of the server, which is a *pgconn.PgError, it may not have.
func (s *stream) sayGoodbye(now time.Time) error {
	if err := s.sendDone(now); err != nil {
		return err
	}
	if err := s.conn.SetReadDeadline(now.Add(statusTimeout)); err != nil {
		return err
	}
	for {
		msg, err := s.frontend.Receive()
		if err != nil {
			return fmt.Errorf("wait for the server to end the stream: %w", err)
		}
		switch m := msg.(type) {
		case *pgproto3.CopyDone, *pgproto3.CommandComplete:
			return nil
		case *pgproto3.ErrorResponse:
			return fmt.Errorf("wait for the server to end the stream: %w", pgconn.ErrorResponseToPgError(m))
		}
	}
}

// sendDone ends our side of the stream.
func (s *stream) sendDone(now time.Time) error { return s.write([]byte{'c', 0, 0, 0, 4}, now) }

func (w *wire) write(b []byte, now time.Time) error {
	if err := w.conn.SetWriteDeadline(now.Add(statusTimeout)); err != nil {
		return err
	}
	_, err := w.conn.Write(b)
	return err
}

var postgresEpoch = time.Date(2000, time.January, 1, 0, 0, 0, 0, time.UTC)

// shutdownWatch notices a server that shuts down. It waits for its walsenders
// to be caught up, and meanwhile asks for a status again as soon as it has got
// one, without sending any data. While the destination does not complete what
// was sent, that would last for ever: the primary could not stop.
type shutdownWatch struct {
	asked int
	since time.Time
}

const (
	// shutdownAsks and shutdownPatience: a healthy server asks once in half
	// its wal_sender_timeout.
	shutdownAsks     = 20
	shutdownPatience = 5 * time.Second
)

// keepalive tells whether it is time to let go. The watch starts anew with
// each message that carries data.
func (w *shutdownWatch) keepalive(m decode.CopyMessage, now time.Time) bool {
	if !m.ReplyRequested {
		return false
	}
	if w.asked == 0 {
		w.since = now
	}
	w.asked++
	took := now.Sub(w.since)
	if took > 4*shutdownPatience { // too slow for the burst that this looks for
		w.asked, w.since = 1, now
		return false
	}
	return w.asked >= shutdownAsks && took >= shutdownPatience
}
