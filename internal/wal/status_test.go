package wal

import (
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"holdfast/internal/ack"
)

// The first status update goes out without being asked for: a crash between
// bookmark and status leaves a slot behind what is completed, and a server at
// which nothing happens would keep its WAL for it.
func TestStatusIsSaidFirst(t *testing.T) {
	client, server := net.Pipe()
	defer func() { _ = server.Close() }()
	a := &attempt{
		s: &Source{cfg: Config{AckOn: ack.Completed}}, ready: &ready{statusEvery: time.Hour},
		ledger: ack.New(uint64(100)), bookmarked: 100, progress: newSignal(),
	}
	gone := newOnce()
	done := make(chan error, 1)
	go func() { done <- a.status(t.Context(), &stream{wire{conn: client}}, newSignal(), gone.ch) }()
	for _, when := range []string{"first", "last"} {
		var msg [5 + 34]byte
		if err := server.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(server, msg[:]); err != nil {
			t.Fatalf("no %s status: %v", when, err)
		}
		if flush := binary.BigEndian.Uint64(msg[5+9:]); msg[0] != 'd' || msg[5] != 'r' || flush != 100 {
			t.Errorf("the %s message is % x", when, msg)
		}
		gone.close()
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}
