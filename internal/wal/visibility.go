package wal

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// view is a snapshot of the server as pg_current_snapshot gives it: which
// transactions a read sees. Whether a commit stands before a position in the
// WAL does not tell that: its record is there before anybody sees its rows, and
// with a synchronous standby that is away the two are hours apart.
type view struct {
	xmin, xmax uint64   // below xmin all are seen or rolled back, from xmax on none is
	running    []uint64 // between the two, in ascending order: those that are not seen
}

// maxRunning bounds what is read of a snapshot; a server runs as many
// transactions at most as it has connections and prepared transactions.
const maxRunning = 1 << 20

// parseView reads the text of a pg_snapshot, such as 10:20:10,14,15.
func parseView(text string) (view, error) {
	var v view
	bad := func() (view, error) {
		return view{}, fmt.Errorf("a snapshot is not of the form xmin:xmax:xip,…: %.100q", text)
	}
	parts := strings.Split(text, ":")
	if len(parts) != 3 {
		return bad()
	}
	var err error
	if v.xmin, err = strconv.ParseUint(parts[0], 10, 64); err != nil {
		return bad()
	}
	if v.xmax, err = strconv.ParseUint(parts[1], 10, 64); err != nil || v.xmax < v.xmin {
		return bad()
	}
	if parts[2] == "" {
		return v, nil
	}
	list := strings.Split(parts[2], ",")
	if len(list) > maxRunning {
		return bad()
	}
	for _, text := range list {
		xid, err := strconv.ParseUint(text, 10, 64)
		if err != nil || xid < v.xmin || xid >= v.xmax {
			return bad()
		}
		v.running = append(v.running, xid)
	}
	slices.Sort(v.running)
	return v, nil
}

// widen gives the 64 bits of a transaction's number of which the stream has
// the lower 32: the one of that kind that is next to the snapshot. Two live
// transactions are never 2^31 apart.
func (v *view) widen(xid uint32) uint64 {
	const epoch, half = 1 << 32, 1 << 31
	full := v.xmax&^(epoch-1) | uint64(xid)
	switch {
	case full > v.xmax+half && full >= epoch:
		full -= epoch
	case full+half < v.xmax:
		full += epoch
	}
	return full
}

// sees tells whether a read with this snapshot sees what a committed
// transaction did.
func (v *view) sees(xid uint64) bool {
	if xid >= v.xmax {
		return false
	}
	_, running := slices.BinarySearch(v.running, xid)
	return !running
}
