package wal

import (
	"testing"
	"time"
)

// Silence is what two looks show of a walsender that waits for its client: one
// that is at work has not read what the client sent.
func TestSilenceOfAnOccupant(t *testing.T) {
	var c occupancy
	start := time.Now()
	waiting := occupant{pid: 1, reply: "12:00", waits: true}
	working, heard, other := waiting, waiting, waiting
	working.waits, heard.reply, other.began = false, "12:01", "later"
	for i, step := range []struct {
		o     occupant
		after time.Duration
		want  time.Duration
	}{
		{waiting, 0, 0},
		{waiting, 20 * time.Second, 20 * time.Second},
		{heard, 25 * time.Second, 0},
		{heard, 30 * time.Second, 5 * time.Second},
		{other, 31 * time.Second, 0},
		{working, 40 * time.Second, 0},
		{working, 80 * time.Second, 0},
		{waiting, 81 * time.Second, 0},
		{waiting, 90 * time.Second, 9 * time.Second},
	} {
		if got := c.silence(step.o, start.Add(step.after)); got != step.want {
			t.Errorf("look %d: silent for %v, want %v", i, got, step.want)
		}
	}
}
