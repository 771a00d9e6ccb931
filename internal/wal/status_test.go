package wal

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"slices"
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

// A status update tells one position in each of its three fields, and nothing
// else than it was given: the server takes the second for what it may forget.
func TestStatusUpdate(t *testing.T) {
	client, server := net.Pipe()
	defer func() { _ = server.Close() }()
	// The time is also that from which the write may take so long.
	now := time.Now()
	for _, asks := range []byte{0, 1} {
		sent := make(chan error, 1)
		go func() { sent <- (&stream{wire{conn: client}}).sendStatus(0x16_B374D848, now, asks == 1) }()
		position := []byte{0, 0, 0, 0x16, 0xB3, 0x74, 0xD8, 0x48}
		want := slices.Concat([]byte{'d', 0, 0, 0, 4 + 34, 'r'}, position, position, position,
			binary.BigEndian.AppendUint64(nil, uint64(now.Sub(postgresEpoch).Microseconds())), []byte{asks})
		got := make([]byte, len(want))
		if _, err := io.ReadFull(server, got); err != nil {
			t.Fatal(err)
		}
		if err := <-sent; err != nil || !bytes.Equal(got, want) {
			t.Errorf("%v\n% x, want\n% x", err, got, want)
		}
	}
}
