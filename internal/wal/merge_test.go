package wal

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"holdfast/internal/decode"
)

// A small source, its stream and a destination, with a table of k (the key), v,
// and t, which is stored out of line: an update that leaves it alone does not
// carry it.

type mergeRow struct{ v, t int }

type mergeOp struct {
	op       decode.Op
	old, now int // keys
	row      mergeRow
	// partial: t is not in the change. moved: the row goes from old to now.
	partial, moved bool
}

type mergeTxn struct {
	xid       uint64
	ops       []mergeOp
	rows      map[int]*mergeRow // its view of the keys it has written; nil for deleted
	truncates bool
	logged    bool // its commit is in the WAL
	visible   bool
	tx        *transaction
}

// mergeWorld is one run. With broken set it does what a textbook would.
type mergeWorld struct {
	t      failer
	broken string

	nextXID   uint64
	completed uint64 // the highest xid that is visible
	rows      map[int]mergeRow
	open      []*mergeTxn // running, or logged and not visible
	stream    []*mergeTxn

	dest  map[int]mergeRow
	m     *merge
	at    int // of the stream, what is delivered
	acked int
	start int

	// The jobs: a whole table from a cursor on, then lists of keys.
	whole  bool
	cursor int
	lists  [][]int
	phase  string           // of the window: "", "open", "fenced", "filled"
	picked []int            // the keys that are read
	seen   map[int]mergeRow // what they had when the snapshot was taken
	counts map[string]int
	// version is the value of v that is written next: those of one key ascend.
	version int
}

// set gives a key its row at the destination. As long as nothing comes a second
// time, no reader sees an older row behind a newer one.
func (w *mergeWorld) set(k int, r mergeRow) {
	if was, ok := w.dest[k]; ok && r.v < was.v && w.counts["crash"] == 0 {
		w.t.Fatalf("key %d went back from version %d to %d", k, was.v, r.v)
	}
	w.dest[k] = r
}

type failer interface {
	Fatalf(format string, args ...any)
}

const mergeTable = 7

var mergeRel = &decode.Relation{ID: mergeTable, Name: "t", Identity: decode.IdentityDefault, Columns: []decode.Column{{Name: "k", Key: true}, {Name: "v"}, {Name: "t"}}}

func value(n int) decode.Value {
	return decode.Value{State: decode.Set, Kind: decode.Number, Bytes: []byte(strconv.Itoa(n))}
}

func rowValues(k int, r mergeRow) []decode.Value {
	return []decode.Value{value(k), value(r.v), value(r.t)}
}

func numberOf(v decode.Value) int {
	n, _ := strconv.Atoi(string(v.Bytes))
	return n
}

func newMergeWorld(t failer, keys int, ghosts bool) *mergeWorld {
	w := &mergeWorld{
		t: t, seen: make(map[int]mergeRow), nextXID: 1<<32 - 8, rows: make(map[int]mergeRow), dest: make(map[int]mergeRow), m: newMerge(1 << 20), cursor: -1, version: 100,
		counts: make(map[string]int),
	}
	w.completed = w.nextXID - 1
	for k := range keys {
		if k%2 == 0 {
			w.rows[k] = mergeRow{k, k}
		}
		if ghosts && k%3 == 0 {
			w.dest[k] = mergeRow{-1, -1}
		}
	}
	w.m.track()
	return w
}

func (w *mergeWorld) begin() *mergeTxn {
	tx := &mergeTxn{xid: w.nextXID, rows: make(map[int]*mergeRow)}
	tx.tx = &transaction{xid: uint32(tx.xid)}
	w.nextXID++
	w.open = append(w.open, tx)
	return tx
}

// free tells whether tx may write the key: nobody else has.
func (w *mergeWorld) free(tx *mergeTxn, k int) bool {
	for _, o := range w.open {
		if _, has := o.rows[k]; o != tx && (has || o.truncates) {
			return false
		}
	}
	return true
}

func (w *mergeWorld) get(tx *mergeTxn, k int) (mergeRow, bool) {
	if r, has := tx.rows[k]; has {
		if r == nil {
			return mergeRow{}, false
		}
		return *r, true
	}
	if tx.truncates {
		return mergeRow{}, false
	}
	r, ok := w.rows[k]
	return r, ok
}

// write does something to key k in tx, and to key other where it moves a row.
func (w *mergeWorld) write(tx *mergeTxn, what string, k, other, t int) {
	v := w.version
	if tx.logged || !w.free(tx, k) || !w.free(tx, other) {
		return
	}
	row, there := w.get(tx, k)
	switch {
	case what == "truncate":
		if len(w.open) > 1 || w.phase == "fenced" { // it needs the table for itself
			return
		}
		tx.truncates, tx.rows, tx.ops = true, make(map[int]*mergeRow), append(tx.ops, mergeOp{op: decode.Truncate})
	case what == "insert" && !there:
		r := mergeRow{v, t}
		tx.rows[k], tx.ops = &r, append(tx.ops, mergeOp{op: decode.Insert, now: k, row: r})
	case what == "delete" && there:
		tx.rows[k], tx.ops = nil, append(tx.ops, mergeOp{op: decode.Delete, old: k})
	case what == "update" && there:
		r := mergeRow{v, row.t}
		tx.rows[k], tx.ops = &r, append(tx.ops, mergeOp{op: decode.Update, now: k, row: r, partial: true})
	case what == "toast" && there:
		r := mergeRow{v, t}
		tx.rows[k], tx.ops = &r, append(tx.ops, mergeOp{op: decode.Update, now: k, row: r})
	case what == "move" && there && other != k:
		if _, taken := w.get(tx, other); taken {
			return
		}
		r := mergeRow{v, t}
		tx.rows[k], tx.rows[other] = nil, &r
		tx.ops = append(tx.ops, mergeOp{op: decode.Update, old: k, now: other, row: r, moved: true})
	default:
		return
	}
	w.counts[what]++
	w.version++
}

func (w *mergeWorld) log(tx *mergeTxn) {
	if !tx.logged {
		tx.logged = true
		w.stream = append(w.stream, tx)
	}
}

func (w *mergeWorld) show(tx *mergeTxn) {
	if !tx.logged || tx.visible {
		return
	}
	tx.visible = true
	if tx.truncates {
		clear(w.rows)
	}
	for k, r := range tx.rows {
		if r == nil {
			delete(w.rows, k)
		} else {
			w.rows[k] = *r
		}
	}
	w.completed = max(w.completed, tx.xid)
	w.open = slices.DeleteFunc(w.open, func(o *mergeTxn) bool { return o == tx })
}

// deliver gives the next transaction to the destination, as the deliverer does.
func (w *mergeWorld) deliver() {
	if w.at == len(w.stream) {
		return
	}
	tx := w.stream[w.at]
	for _, o := range tx.ops {
		if o.op == decode.Truncate {
			w.m.truncated(tx.tx, mergeTable)
			clear(w.dest)
			continue
		}
		if w.m.wants(tx.tx, mergeTable) {
			w.note(tx, o)
		}
		w.apply(o)
	}
	w.at++
}

func (w *mergeWorld) note(tx *mergeTxn, o mergeOp) {
	w.counts["noted"]++
	ch := decode.OrderChange{Op: o.op, Relation: mergeRel}
	var old, now string
	if o.op == decode.Delete || (o.moved && w.broken != "old key") {
		old = strconv.Itoa(o.old)
	}
	if o.op != decode.Delete {
		now = strconv.Itoa(o.now)
		ch.After = rowValues(o.now, o.row)
		if o.partial && w.broken != "toast" {
			ch.After[2] = decode.Value{State: decode.Unchanged}
		}
	}
	w.m.change(tx.tx, &ch, old, now)
}

func (w *mergeWorld) apply(o mergeOp) {
	if o.op == decode.Delete || o.moved {
		delete(w.dest, o.old)
	}
	switch {
	case o.op == decode.Delete:
	case o.partial:
		if r, ok := w.dest[o.now]; ok {
			w.set(o.now, mergeRow{o.row.v, r.t})
		}
	default:
		w.set(o.now, o.row)
	}
}

func (w *mergeWorld) snapshot() view {
	v := view{xmax: w.completed + 1}
	for _, tx := range w.open {
		if tx.xid < v.xmax {
			v.running = append(v.running, tx.xid)
		}
	}
	slices.Sort(v.running)
	v.xmin = v.xmax
	if len(v.running) > 0 {
		v.xmin = v.running[0]
	}
	return v
}

// done tells whether every job is.
func (w *mergeWorld) done() bool { return w.whole && len(w.lists) == 0 }

// read takes the next step of a read of at most limit rows.
func (w *mergeWorld) read(limit int) {
	switch w.phase {
	case "":
		if !w.done() {
			w.m.open(mergeTable)
			w.phase = "open"
		}
	case "open":
		w.fence(limit)
	case "fenced":
		w.fill()
	case "filled":
		n, err := w.m.left()
		if err != nil {
			w.t.Fatalf("left: %v", err)
		}
		if n > 0 {
			return
		}
		if w.whole {
			w.lists = w.lists[1:]
		} else if w.whole = len(w.picked) < limit; len(w.picked) > 0 {
			w.cursor = w.picked[len(w.picked)-1]
		}
		w.m.end()
		w.phase = ""
		w.counts["chunk"]++
	}
}

func (w *mergeWorld) giveUp() {
	w.m.end()
	w.phase = ""
}

func (w *mergeWorld) fence(limit int) {
	if slices.ContainsFunc(w.open, func(tx *mergeTxn) bool { return tx.truncates }) {
		return // LOCK TABLE waits
	}
	// What this process has not delivered itself and is not visible holds the
	// read up.
	if w.broken != "before" && slices.ContainsFunc(w.stream[:w.start], func(tx *mergeTxn) bool { return !tx.visible }) {
		w.counts["held up"]++
		w.giveUp()
		return
	}
	v := w.snapshot()
	if w.broken == "bracket" { // what stands in the WAL before the read counts as seen
		v = view{xmin: w.nextXID, xmax: w.nextXID}
		for _, tx := range w.open {
			if !tx.logged {
				v.running = append(v.running, tx.xid)
			}
		}
		slices.Sort(v.running)
	}
	if err := w.m.fence(v); errors.Is(err, errReadAgain) {
		w.counts["again"]++
		if w.broken != "before" {
			w.giveUp()
			return
		}
		w.m.win.view, w.m.win.phase = v, windowFenced
	} else if err != nil {
		w.t.Fatalf("fence: %v", err)
	}
	w.m.win.through = uint64(len(w.stream))
	if w.broken == "early" {
		w.m.win.through = 0
	}
	w.seen = maps.Clone(w.rows)
	if w.whole {
		w.picked = w.lists[0]
	} else {
		w.picked = nil
		for _, k := range slices.Sorted(maps.Keys(w.seen)) {
			if k > w.cursor && len(w.picked) < limit {
				w.picked = append(w.picked, k)
			}
		}
	}
	w.phase = "fenced"
}

func (w *mergeWorld) fill() {
	var rows []copiedRow
	for _, k := range w.picked {
		row := copiedRow{key: strconv.Itoa(k), values: []decode.Value{value(k)}, absent: true}
		if r, ok := w.seen[k]; ok {
			row.values, row.absent = rowValues(k, r), false
		}
		rows = append(rows, row)
	}
	if w.broken == "ghost" { // an absence is believed whatever the stream brings
		for _, row := range rows {
			if row.absent {
				delete(w.dest, numberOf(row.values[0]))
			}
		}
	}
	if err := w.m.fill([]string{"k", "v", "t"}, rows, w.m.win.through); err != nil {
		w.t.Fatalf("fill: %v", err)
	}
	w.phase = "filled"
}

// send lets rows go out where they are due.
func (w *mergeWorld) send(rows int) {
	if !w.m.due(uint64(w.at)) {
		return
	}
	out, columns := w.m.next(rows, 1<<20, func(string) bool { return false }, 0)
	if len(columns) != 3 {
		w.t.Fatalf("columns %q", columns)
	}
	for _, row := range out {
		k := numberOf(row.values[0])
		if row.absent {
			delete(w.dest, k)
			w.counts["deleted"]++
		} else {
			w.set(k, mergeRow{numberOf(row.values[1]), numberOf(row.values[2])})
			w.counts["sent"]++
		}
	}
}

// crash begins again at what was acknowledged: what was delivered behind it
// comes a second time.
func (w *mergeWorld) crash(back int) {
	w.at = max(w.acked, w.at-back)
	w.acked, w.start = w.at, w.at
	w.m, w.phase = newMerge(1<<20), ""
	w.m.track()
	w.counts["crash"]++
}

// finish lets everything come to its end, and compares.
func (w *mergeWorld) finish() {
	for len(w.open) > 0 {
		w.log(w.open[0])
		w.show(w.open[0])
	}
	for range 1000 {
		w.deliver()
		w.send(3)
		w.read(3)
	}
	if !w.done() || w.at != len(w.stream) {
		w.t.Fatalf("it does not come to its end: %d of %d delivered, whole %t, %d lists left, phase %q", w.at, len(w.stream), w.whole, len(w.lists), w.phase)
	}
	if diff := cmp.Diff(w.rows, w.dest, cmp.AllowUnexported(mergeRow{})); diff != "" {
		w.t.Fatalf("source and destination differ (-source +destination):\n%s", diff)
	}
}

// act draws one step of the world.
func (w *mergeWorld) act(draw func(n int, what string) int) {
	const keys = 8
	pick := func() *mergeTxn {
		if len(w.open) == 0 {
			return w.begin()
		}
		return w.open[draw(len(w.open), "transaction")]
	}
	switch draw(20, "step") {
	case 0, 1:
		if len(w.open) < 4 {
			w.begin()
		}
	case 2, 3, 4, 5, 6:
		what := []string{"insert", "insert", "delete", "update", "update", "update", "toast", "move", "truncate"}[draw(9, "what")]
		w.write(pick(), what, 1+draw(keys, "key"), 1+draw(keys, "other"), draw(1000, "t"))
	case 7, 8, 9:
		w.log(pick())
	case 10, 11:
		w.show(pick())
	case 12, 13, 14:
		w.deliver()
	case 15, 16, 17:
		w.read(1 + draw(4, "limit"))
	case 18:
		w.send(1 + draw(3, "rows"))
	case 19:
		switch draw(6, "rare") {
		case 0:
			w.crash(draw(4, "back"))
		case 1, 2:
			w.acked = max(w.acked, w.at-draw(3, "behind"))
		}
	}
}

// Whatever a source does while it is read, and wherever the process dies: in
// the end the destination has what the source has.
func TestMergeAgainstSource(t *testing.T) {
	t.Parallel()
	counts := make(map[string]int)
	rapid.Check(t, func(t *rapid.T) {
		w := newMergeWorld(t, 9, rapid.Bool().Draw(t, "ghosts"))
		w.lists = [][]int{{1, 2, 3}, {4, 5, 6}, {7, 8, 9}}
		for range rapid.IntRange(20, 150).Draw(t, "steps") {
			w.act(func(n int, what string) int { return rapid.IntRange(0, n-1).Draw(t, what) })
		}
		w.finish()
		for what, n := range w.counts {
			counts[what] += n
		}
	})
	for _, what := range []string{"insert", "delete", "update", "toast", "move", "truncate", "noted", "again", "held up", "chunk", "sent", "deleted", "crash"} {
		if counts[what] == 0 {
			t.Errorf("nothing happened that is called %q: the test proves nothing about it (%v)", what, counts)
		}
	}
}

// Each rule is needed: without it some run ends with another table than the
// source's.
func TestMergeWithoutARule(t *testing.T) {
	t.Parallel()
	for broken, does := range map[string]string{
		"bracket": "takes a commit that stands in the WAL for one that the read has seen",
		"before":  "believes rows although a transaction that was delivered before is not visible to the read",
		"early":   "sends rows before the stream has passed the read",
		"ghost":   "deletes keys that the read does not have, whatever the stream brings",
		"toast":   "takes an update without the unchanged column for a whole row",
		"old key": "forgets the old key of a row that moves",
	} {
		t.Run(broken, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(20000) {
				random := rand.New(rand.NewPCG(seed, 1))
				var found differs
				w := newMergeWorld(&found, 9, seed%2 == 0)
				w.broken = broken
				w.lists = [][]int{{1, 2, 3}, {4, 5, 6}, {7, 8, 9}}
				if found.in(func() {
					for range 150 {
						w.act(func(n int, _ string) int { return random.IntN(n) })
					}
					w.finish()
				}) {
					t.Logf("a merge that %s: found by seed %d: %s", does, seed, found.why)
					return
				}
			}
			t.Errorf("a merge that %s is not found out", does)
		})
	}
}

// differs is a failer that is expected to fail.
type differs struct{ why string }

func (d *differs) Fatalf(format string, args ...any) {
	d.why = fmt.Sprintf(format, args...)
	panic(d)
}

func (d *differs) in(fn func()) (failed bool) {
	defer func() {
		if r := recover(); r != nil {
			if r != any(d) {
				panic(r)
			}
			failed = true
		}
	}()
	fn()
	return false
}

func TestViews(t *testing.T) {
	t.Parallel()
	v, err := parseView("8589934590:8589934602:8589934590,8589934600")
	if err != nil {
		t.Fatal(err)
	}
	for xid, sees := range map[uint64]bool{1: true, 8589934589: true, 8589934590: false, 8589934591: true, 8589934600: false, 8589934601: true, 8589934602: false, 8589934700: false} {
		if v.sees(xid) != sees {
			t.Errorf("transaction %d: seen %t", xid, !sees)
		}
		if got := v.widen(uint32(xid)); xid > 1 && got != xid {
			t.Errorf("transaction %d was widened to %d", xid, got)
		}
	}
	young := view{xmin: 700, xmax: 710}
	if got := young.widen(4294967290); got != 4294967290 {
		t.Errorf("below the first epoch there is none: %d", got)
	}
	for _, text := range []string{"", "1:2", "2:1:", "1:2:x", "1:5:7", "1:5:0", "-1:5:", "1:2:3:4", "a:b:c"} {
		if _, err := parseView(text); err == nil {
			t.Errorf("%q was taken for a snapshot", text)
		}
	}
}
