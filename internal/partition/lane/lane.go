// Package lane is one assignment of one Kafka partition as a data structure:
// what was received, what was sent, what the destination has proven, and
// whether any of it may still be committed.
//
// It promises that a commit offset is only ever given out while the lane is
// alive, never lies above the first record that is not proven completed, and
// never goes back; that records leave in offset order with at most one range
// of unknown outcome; and that evidence which arrives after the lane's death
// changes nothing. The broker does not promise the last of these: it fences
// the member's generation, not who owns a partition, so a late commit of a
// partition that has moved on would be accepted.
//
// It performs no I/O, starts no goroutine, and is told the time. Its caller is
// internal/partition, which makes a lane when a partition is assigned and
// kills it when the partition is revoked or lost.
package lane

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
)

// State is where a lane is in its life. It only moves forward, except that a
// block can be lifted.
type State uint8

const (
	// Live: records are received, sent and committed.
	Live State = iota
	// Blocked: alive, but stopped in front of one offset. What lies before it
	// is still sent and committed.
	Blocked
	// Draining: nothing is received or sent any more; evidence for what was
	// sent still counts.
	Draining
	// Dead: nothing counts any more, and nothing is committed.
	Dead
)

// String gives the name used in health and logs.
func (s State) String() string {
	switch s {
	case Live:
		return "live"
	case Blocked:
		return "blocked"
	case Draining:
		return "draining"
	case Dead:
		return "dead"
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// ErrDead is returned by a lane that was killed, and by Take also once it is
// draining: its partition belongs to somebody else, or is about to.
var ErrDead = errors.New("the lane is over: its partition was revoked or lost")

// NoCommit is the value of Config.Committed for a partition for which the
// group has no committed offset.
const NoCommit int64 = -1

// Record is one record on its way through the lane. Key, Value and Headers are
// not copied.
type Record struct {
	Offset      int64
	LeaderEpoch int32
	Key         []byte
	Value       []byte // nil = tombstone
	Headers     []decode.Header
	// Time is the record's own timestamp, Received when it was handed over.
	Time     time.Time
	Received time.Time
	// Idle marks a control record: it moves the position and carries no row.
	Idle bool
}

// recordOverhead is what a queued record costs beside its key and value: its
// entries in queue and ledger, and the room that growing slices keep.
// TestHeldIsNotLessThanTheHeap measures it.
const recordOverhead = 224

// headerOverhead is what a header costs beside its name and value.
const headerOverhead = 40

func (r *Record) size() int64 {
	n := len(r.Key) + len(r.Value) + recordOverhead
	for i := range r.Headers {
		n += len(r.Headers[i].Key) + len(r.Headers[i].Value) + headerOverhead
	}
	return int64(n)
}

// Limits bounds what a lane holds. A lane is full from the moment it holds
// HighRecords or HighBytes until it holds no more than LowRecords and
// LowBytes: without the distance between the two, pausing and resuming would
// throw away and fetch again the same records all the time.
type Limits struct {
	HighRecords, LowRecords int
	HighBytes, LowBytes     int64
	// MaxUncommitted bounds the records that were taken and not yet committed:
	// while commits fail, sending stops at this number instead of growing the
	// ledger without end.
	MaxUncommitted int
}

func (l Limits) withDefaults() Limits {
	if l.HighRecords <= 0 {
		l.HighRecords = 100_000
	}
	if l.LowRecords <= 0 || l.LowRecords >= l.HighRecords {
		l.LowRecords = l.HighRecords / 2
	}
	if l.HighBytes <= 0 {
		l.HighBytes = 16 << 20
	}
	if l.LowBytes <= 0 || l.LowBytes >= l.HighBytes {
		l.LowBytes = l.HighBytes / 2
	}
	if l.MaxUncommitted <= 0 {
		l.MaxUncommitted = 1 << 20
	}
	return l
}

// Config describes one assignment.
type Config struct {
	Topic     string
	TopicID   [16]byte
	Partition int32
	// Epoch is one more than that of the owner who committed last, so that of
	// two owners the later one can be told.
	Epoch int64
	// Start is the offset of the first record to be received.
	Start int64
	// StartLeaderEpoch is the leader epoch committed with Start, -1 if unknown.
	StartLeaderEpoch int32
	// StartTime is the timestamp of the last record below Start; zero if
	// unknown.
	StartTime time.Time
	// StartRows is the offset behind the last record below Start that gave a
	// row; 0 if there is none, or it is not known.
	StartRows int64
	// Committed is the group's committed offset, or NoCommit.
	//
	// Whatever it is, nothing is sent until a commit of this lane has been
	// acknowledged, if only of Start again. Otherwise a note could outlive its
	// truth: A leaves a clean note; B takes over, sends, and crashes before it
	// commits; C finds A's clean note and does not wait for B's requests.
	Committed int64
	// NotBefore is the time from which records may be sent. It keeps clear of
	// requests that a previous owner may have left behind.
	NotBefore time.Time
	Limits    Limits
	// Progress is set for a lane whose rows the destination records in a
	// progress table: see [Progress]. nil for one whose completion is that of
	// its rows.
	Progress *Progress
}

// Block is why and where a lane stopped.
type Block struct {
	// At is the offset that is not sent; everything below it may be.
	At  int64
	Err error
}

// Lane is one assignment of one partition. Its methods are safe for
// concurrent use, with one restriction: Peek, Take, Return and Accept belong
// to one goroutine, the sender of the lane's table.
//
// Invariants, held after every call:
//
//	committed <= At(Completed) <= … <= At(Received) == the next offset expected
//	queue[:taken] is the one range whose outcome is unknown
//	block != nil: queue[taken:] lies below block.At
//	every range in inflight lies above the ones before it
//	state == Dead: no queue, no ranges, no commit
type Lane struct {
	topic     string
	topicID   [16]byte
	partition int32
	epoch     int64
	limits    Limits
	notBefore time.Time

	mu     sync.Mutex
	state  State // never Blocked: that is block != nil
	block  *Block
	ledger *ack.Ledger[int64]

	queue  []queued
	taken  int   // queue[:taken] was taken and is neither accepted nor returned
	bytes  int64 // of queue, the taken part included
	full   bool
	serial uint64 // of the last range taken

	inflight []*flight
	flying   int // records in inflight

	// progress is what is known of the lane's progress rows; nil where none are
	// written.
	progress *progress
	// committed is what the broker acknowledged last, or NoCommit.
	committed int64
	// announced is set when a commit of this lane was acknowledged, noted when
	// one with a clean note was.
	announced, noted bool
	// safe is the leader epoch and time that belong to At(Completed), told
	// those that belong to committed.
	safe, told mark
}

// mark is what is told about a position beside its number.
type mark struct {
	leaderEpoch int32
	time        time.Time // of the last record below it; zero when unknown
	rows        int64     // behind the last record below it that gave a row; 0 when unknown
	row         Row       // the progress row that was completed for rows
}

type queued struct {
	Record
	ticket ack.Ticket
}

// Range is what one Take took: records From <= offset < Next. It identifies
// the records when evidence for them arrives.
type Range struct {
	From, Next int64
	Records    int
	Bytes      int64
	// Rows is the offset behind the last record of it that gave a row, 0 if
	// none did. Take leaves it to the caller, who knows; Accept keeps it.
	Rows int64
	// Time is the timestamp of the first record.
	Time time.Time

	serial      uint64
	first, last ack.Ticket
	end         mark
}

// flight is an accepted range that is not yet completed.
type flight struct {
	Range
	rung ack.Rung
}

// New makes a live lane that expects the record at cfg.Start or above.
func New(cfg Config) *Lane {
	start := mark{leaderEpoch: cfg.StartLeaderEpoch, time: cfg.StartTime, rows: cfg.StartRows}
	var p *progress
	if cfg.Progress != nil {
		p = &progress{stage: Undecided, announce: cfg.Start}
		if cfg.Progress.Decided {
			p.stage, p.announce = Announcing, cfg.Progress.Announce
		}
		start.row = cfg.Progress.Row
	}
	return &Lane{
		progress: p,
		topic:    cfg.Topic, topicID: cfg.TopicID, partition: cfg.Partition,
		epoch: cfg.Epoch, limits: cfg.Limits.withDefaults(), notBefore: cfg.NotBefore,
		ledger:    ack.New(cfg.Start),
		committed: cfg.Committed,
		safe:      start, told: start,
	}
}

// Topic, Partition and TopicID are fixed for the lane's life.
func (l *Lane) Topic() string     { return l.topic }
func (l *Lane) Partition() int32  { return l.partition }
func (l *Lane) TopicID() [16]byte { return l.topicID }

// Epoch is the owner's: see Config.Epoch, and [Lane.Decide].
func (l *Lane) Epoch() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.epoch
}

// NotBefore is the time from which the lane gives out records.
func (l *Lane) NotBefore() time.Time { return l.notBefore }

// Receipt tells what became of received records.
type Receipt struct {
	Admitted   int
	Duplicates int // below the next expected offset: fetched twice, or handed over out of order
	Refused    int // the lane was blocked, draining or dead
	Full       bool
}

// Receive admits records in offset order. It never refuses for size: the
// client's cursor has passed them, so a record refused here would be lost
// until the next assignment. The caller stops fetching when Full is set;
// what exceeds the limit is what was on its way by then.
//
// Gaps are normal (compaction, control records, aborted transactions): only
// offsets that were received are ever counted. Offsets below the next one
// expected are dropped.
func (l *Lane) Receive(recs []Record) Receipt {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out Receipt
	for i := range recs {
		r := &recs[i]
		switch {
		case l.state != Live, l.block != nil && r.Offset >= l.block.At:
			out.Refused++
		case r.Offset < l.ledger.Last():
			out.Duplicates++
		case r.Idle:
			l.ledger.AdmitIdle(r.Offset + 1)
			out.Admitted++
		default:
			t, err := l.ledger.Admit(r.Offset + 1)
			if err != nil {
				out.Duplicates++
				continue
			}
			l.queue = append(l.queue, queued{Record: *r, ticket: t})
			l.bytes += r.size()
			out.Admitted++
		}
	}
	if len(l.queue) >= l.limits.HighRecords || l.bytes >= l.limits.HighBytes {
		l.full = true
	}
	out.Full = l.full
	return out
}

// Peek appends to buf up to limit records that may be sent now, without
// taking them. It gives none while a taken range has no outcome, before the
// lane may send, and beyond a block.
func (l *Lane) Peek(buf []Record, limit int, now time.Time) []Record {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.sendable(now) {
		return buf
	}
	for i := range l.queue[:min(limit, len(l.queue))] {
		buf = append(buf, l.queue[i].Record)
	}
	return buf
}

// Waiting tells how much Peek would give, and since when the oldest of it has
// been here.
func (l *Lane) Waiting(now time.Time) (records int, bytes int64, oldest time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.sendable(now) || len(l.queue) == 0 {
		return 0, 0, time.Time{}
	}
	return len(l.queue), l.bytes, l.queue[0].Received
}

func (l *Lane) sendable(now time.Time) bool {
	return l.state == Live && l.taken == 0 && l.announced && l.progress.claimed() && !now.Before(l.notBefore) &&
		l.ledger.Held()-len(l.queue) < l.limits.MaxUncommitted
}

// Take takes the first n records that Peek gave. From here until Accept or
// Return their outcome is unknown and nothing later is given out.
func (l *Lane) Take(n int) (Range, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.state != Live:
		return Range{}, ErrDead
	case l.taken != 0:
		return Range{}, fmt.Errorf("take %d records of %s[%d]: %d taken before have no outcome yet", n, l.topic, l.partition, l.taken)
	case n < 1 || n > len(l.queue):
		return Range{}, fmt.Errorf("take %d records of %s[%d]: %d are queued", n, l.topic, l.partition, len(l.queue))
	}
	l.taken = n
	l.serial++
	first, last := &l.queue[0], &l.queue[n-1]
	rg := Range{
		From: first.Offset, Next: last.Offset + 1, Records: n, Time: first.Time, serial: l.serial,
		first: first.ticket, last: last.ticket,
		end: mark{leaderEpoch: last.LeaderEpoch, time: last.Time},
	}
	for i := range l.queue[:n] {
		rg.Bytes += l.queue[i].size()
	}
	return rg, nil
}

// Return gives a taken range back: its outcome is known to be that nothing
// was applied, or the caller has waited for long enough. The same records
// will be given out again, first. A dead lane has nothing to return to.
func (l *Lane) Return(rg Range) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.owns(rg); err != nil {
		return err
	}
	if l.state == Draining {
		clear(l.queue)
		l.queue, l.bytes = nil, 0
	}
	l.taken = 0
	if l.block != nil {
		l.trim()
	}
	return nil
}

// Accept records that the destination accepted the taken range; later records
// may go out. full tells whether the lane is still full.
func (l *Lane) Accept(rg Range) (full bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.owns(rg); err != nil {
		return false, err
	}
	if err := l.ledger.Mark(rg.first, rg.last, ack.Accepted); err != nil {
		return false, err
	}
	l.release(rg)
	l.inflight = append(l.inflight, &flight{Range: rg, rung: ack.Accepted})
	l.flying += rg.Records
	return l.full, nil
}

// Skip records that the taken range needs nothing of the destination: every
// record of it was skipped or carried no row. It counts as completed, which
// moves the position only once everything before it is.
func (l *Lane) Skip(rg Range) (full bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.owns(rg); err != nil {
		return false, err
	}
	if err := l.ledger.Mark(rg.first, rg.last, ack.Completed); err != nil {
		return false, err
	}
	l.release(rg)
	l.inflight = append(l.inflight, &flight{Range: rg, rung: ack.Completed})
	l.flying += rg.Records
	l.settle()
	return l.full, nil
}

func (l *Lane) owns(rg Range) error {
	if l.state == Dead {
		return ErrDead
	}
	if l.taken == 0 || rg.serial != l.serial {
		return fmt.Errorf("range %d..%d of %s[%d] is not the one whose outcome is unknown", rg.From, rg.Next, l.topic, l.partition)
	}
	return nil
}

// release drops the taken records from the queue.
func (l *Lane) release(rg Range) {
	clear(l.queue[:l.taken]) // the values would keep their fetch buffers alive
	l.queue = l.queue[l.taken:]
	if len(l.queue) == 0 {
		l.queue = nil
	}
	l.taken = 0
	l.bytes -= rg.Bytes
	if len(l.queue) <= l.limits.LowRecords && l.bytes <= l.limits.LowBytes {
		l.full = false
	}
}

// Mark records evidence for an accepted range. On a dead lane it returns
// ErrDead and changes nothing: the completion came too late to count.
//
// The sequence it guards against: the request is accepted; the partition is
// revoked and given to another member, which commits 10; the completion for
// offset 3 arrives here. Were it counted, the next commit would say 3, the
// broker would take it since the member's generation is current, and the
// group would have gone back.
func (l *Lane) Mark(rg Range, r ack.Rung) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == Dead {
		return ErrDead
	}
	for _, f := range l.inflight {
		if f.serial != rg.serial {
			continue
		}
		if l.progress != nil && f.Rows > 0 && r > ack.Ingested {
			r = ack.Ingested // what completes it is the progress row behind it
		}
		if err := l.ledger.Mark(rg.first, rg.last, r); err != nil {
			return err
		}
		f.rung = max(f.rung, r)
		l.settle()
		return nil
	}
	return nil // completed before
}

// settle forgets the ranges at the front that are completed.
func (l *Lane) settle() {
	n := 0
	for n < len(l.inflight) && l.inflight[n].rung >= ack.Completed {
		end := l.inflight[n].end
		if end.rows = l.inflight[n].Rows; end.rows == 0 {
			end.rows = l.safe.rows
		}
		end.row = l.safe.row
		l.safe = end
		l.flying -= l.inflight[n].Records
		n++
	}
	if n > 0 {
		l.inflight = append(l.inflight[:0:0], l.inflight[n:]...)
	}
}

// Commit is what may be told to the broker about a lane.
type Commit struct {
	// Offset is the next offset to read: everything below it is proven.
	Offset int64
	// LeaderEpoch belongs to the last record below Offset; -1 if unknown.
	LeaderEpoch int32
	// Time is that record's timestamp; zero if unknown.
	Time time.Time
	// Rows is the offset behind the last record below Offset that gave a row;
	// 0 if there is none, or it is not known.
	Rows int64
	// Row names the progress row that was completed for Rows.
	Row Row
	// Clean: nothing that was sent, by this owner or one before it, is without
	// an outcome, so the next owner need not wait for requests that may still
	// be applied.
	Clean bool
}

// ToCommit gives the offset to commit, if the lane is alive and there is
// something new to say. Liveness and position are read under one lock: a
// snapshot that outlives the lane is refused by Alive before it is sent.
//
// final asks for the note of a draining lane: it is given again at the same
// offset when it can now say Clean. A lane that is over before it was allowed
// to send cannot: what it waited for may still be on its way.
func (l *Lane) ToCommit(final bool, now time.Time) (Commit, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == Dead {
		return Commit{}, false
	}
	if l.progress != nil && l.progress.stage != Claimed {
		return l.announcement()
	}
	c := Commit{
		Offset: l.ledger.At(ack.Completed), LeaderEpoch: l.safe.leaderEpoch, Time: l.safe.time, Rows: l.safe.rows, Row: l.safe.row,
		Clean: l.state == Draining && l.settled() && !now.Before(l.notBefore),
	}
	switch {
	case final && c.Clean && !l.noted, l.state == Live && !l.announced:
		return c, true
	case l.progress != nil && !l.progress.named:
		return c, true
	}
	return c, c.Offset > l.committed
}

func (l *Lane) settled() bool { return l.taken == 0 && len(l.inflight) == 0 }

// Committed records that the broker acknowledged the commit. A commit below
// one that was acknowledged before, or above what is proven, is a broken
// invariant and an error. On a dead lane it changes nothing.
func (l *Lane) Committed(c Commit) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == Dead {
		return ErrDead
	}
	if l.progress != nil && l.progress.stage == Announcing {
		if c.Offset != l.progress.announce {
			return fmt.Errorf("commit of %s[%d]: the first one is of offset %d, not %d", l.topic, l.partition, l.progress.announce, c.Offset)
		}
		l.progress.stage = Unclaimed
	} else if err := l.ledger.Confirm(c.Offset, ack.Completed); err != nil {
		return fmt.Errorf("commit of %s[%d]: %w", l.topic, l.partition, err)
	}
	if p := l.progress; p != nil && p.stage == Claimed {
		p.named = p.named || c.Row == p.claim
	}
	l.committed = c.Offset
	l.told = mark{leaderEpoch: c.LeaderEpoch, time: c.Time, rows: c.Rows, row: c.Row}
	l.announced = true
	l.noted = l.noted || c.Clean
	return nil
}

// Alive tells whether the lane may still commit.
func (l *Lane) Alive() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state != Dead
}

// Sending tells whether the lane may still send what it has taken.
func (l *Lane) Sending() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state == Live
}

// Held tells how many bytes the lane keeps, and whether fetching should be
// paused for the lane's own limits.
func (l *Lane) Held() (bytes int64, full bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.bytes, l.full
}

// Next gives the offset of the next record expected.
func (l *Lane) Next() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ledger.Last()
}

// Block stops the lane in front of an offset, for the reason err. Records
// below at are still sent and completions still commit; the record at it and
// everything later are not, and are dropped. Of several blocks the lowest
// counts, of equal ones the last. It tells whether this one does.
func (l *Lane) Block(at int64, err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stop(at, err)
}

// BlockSending stops the lane in front of the first record without an
// outcome: the taken range if there is one, else the next to be sent.
func (l *Lane) BlockSending(err error) (at int64, counts bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at = l.ledger.Last()
	if len(l.queue) > 0 {
		at = l.queue[0].Offset
	}
	return at, l.stop(at, err)
}

// BlockReceiving stops the lane behind what was received: nothing more is
// admitted until Unblock.
func (l *Lane) BlockReceiving(err error) (at int64, counts bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at = l.ledger.Last()
	return at, l.stop(at, err)
}

func (l *Lane) stop(at int64, err error) bool {
	if l.state == Dead || l.block != nil && l.block.At < at {
		return false
	}
	l.block = &Block{At: at, Err: err}
	l.trim()
	return true
}

// trim drops what waits behind the block: it will not be sent by this
// assignment, and kept it would take its share of the memory from lanes that
// go on.
func (l *Lane) trim() {
	keep := l.taken
	for keep < len(l.queue) && l.queue[keep].Offset < l.block.At {
		keep++
	}
	for i := keep; i < len(l.queue); i++ {
		l.bytes -= l.queue[i].size()
	}
	clear(l.queue[keep:])
	l.queue = l.queue[:keep]
	if len(l.queue) <= l.limits.LowRecords && l.bytes <= l.limits.LowBytes {
		l.full = false
	}
}

// Unblock lifts the block at an offset, if that is the one that stands.
func (l *Lane) Unblock(at int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.block != nil && l.block.At == at {
		l.block = nil
	}
}

// Blocked gives the block, or nil.
func (l *Lane) Blocked() *Block {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.block
}

// Drain stops receiving and sending and drops what was not taken: the next
// owner reads it again. Evidence still counts.
func (l *Lane) Drain() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != Live {
		return
	}
	l.state = Draining
	for i := l.taken; i < len(l.queue); i++ {
		l.bytes -= l.queue[i].size()
	}
	clear(l.queue[l.taken:])
	l.queue = l.queue[:l.taken]
	l.full = false
}

// Drained tells whether everything that was sent has completed.
func (l *Lane) Drained() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state == Dead || l.settled()
}

// Abandoned is what a lane leaves behind: records From <= offset < Next were
// received and not committed, and will be read again by the next owner.
type Abandoned struct {
	From, Next int64
	// Completed is what could have been committed of it.
	Completed int64
	// InFlight records were sent and have no evidence of completion.
	InFlight int
}

// Any tells whether anything was left behind.
func (a Abandoned) Any() bool { return a.Next > a.From }

// Kill ends the lane and returns what it leaves behind. The second Kill
// changes nothing.
func (l *Lane) Kill() Abandoned {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := Abandoned{
		From: l.ledger.Acknowledged(), Next: l.ledger.Last(), Completed: l.ledger.At(ack.Completed),
		InFlight: l.taken + l.flying,
	}
	l.state = Dead
	l.queue, l.inflight, l.taken, l.flying, l.bytes, l.full = nil, nil, 0, 0, 0, false
	return left
}

// Snapshot is a lane's state for health and metrics.
type Snapshot struct {
	Topic     string
	TopicID   [16]byte
	Partition int32
	Epoch     int64
	State     State
	// The positions are next offsets. Committed is NoCommit while there is none.
	Received, Accepted, Ingested, Completed, Committed int64
	// CommittedTime is the timestamp of the last record below Committed; zero
	// if unknown.
	CommittedTime time.Time
	// NextTime is the timestamp of the first record that is received and not
	// completed; zero if there is none.
	NextTime time.Time
	// QueuedRecords and QueuedBytes wait to be sent or for the outcome of
	// being sent; InFlightRecords were accepted and are not yet completed.
	QueuedRecords, InFlightRecords int
	QueuedBytes, InFlightBytes     int64
	Full                           bool
	Block                          *Block
	NotBefore                      time.Time
}

// Snapshot gives the state at one instant.
func (l *Lane) Snapshot() Snapshot {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Snapshot{
		Topic: l.topic, TopicID: l.topicID, Partition: l.partition, Epoch: l.epoch, State: l.state,
		Received: l.ledger.Last(), Accepted: l.ledger.At(ack.Accepted), Ingested: l.ledger.At(ack.Ingested),
		Completed: l.ledger.At(ack.Completed), Committed: l.committed, CommittedTime: l.told.time,
		QueuedRecords: len(l.queue), QueuedBytes: l.bytes, InFlightRecords: l.flying,
		Full: l.full, Block: l.block, NotBefore: l.notBefore,
	}
	for _, f := range l.inflight {
		s.InFlightBytes += f.Bytes
	}
	switch {
	case len(l.inflight) > 0:
		s.NextTime = l.inflight[0].Time
	case len(l.queue) > 0:
		s.NextTime = l.queue[0].Time
	}
	if s.State == Live && s.Block != nil {
		s.State = Blocked
	}
	return s
}
