package wal

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"holdfast/internal/decode"
)

// spill keeps on disk what was received and does not fit into memory until it
// is delivered: blocks of undecoded messages, in segment files.
//
// It is a cache and never a position: nothing in it is acknowledged because it
// is there, nothing is synced, and whatever a process left behind is removed.
// What is read back is checked; a block that is not what was written is never
// delivered, since Postgres still has it.
//
// The files lie in a directory of the process's own, with a lock that ends
// with the process: that is how the next one knows what it may remove.
//
// It is safe for concurrent use. In pgsource one goroutine writes, the reader,
// and one reads, the deliverer.
type spill struct {
	path        string
	limit       int64
	segmentSize int64
	// nonce is in every block's header: a block of another life is no block of
	// this one, wherever a file system may have kept it.
	nonce uint64
	lock  *os.File
	root  *os.Root
	// create and remove are the root's; tests put faults into them.
	create func(name string) (segmentFile, error)
	remove func(name string) error
	// changed is told of every change of the number of bytes and files.
	changed func(bytes int64, files int)

	mu       sync.Mutex
	segments map[*segment]struct{}
	current  *segment // the one that is written to; nil before the first block
	next     uint32
	used     int64
}

// segmentFile is what a segment needs of a file.
type segmentFile interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
}

// segment is one file. It is removed when every block in it was released.
type segment struct {
	owner  *spill
	number uint32
	name   string
	file   segmentFile
	size   int64
	live   int // blocks that were not released yet
}

// extent is where one block lies.
type extent struct {
	seg    *segment
	offset int64
	length int64 // of the payload
}

// blockHeader is the checksum of all that follows it, the length, the nonce,
// the segment's number and the offset in it.
const blockHeader = 4 + 8 + 8 + 4 + 8

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

const (
	spillPrefix   = "holdfast-spill-"
	spillLock     = "lock"
	segmentPrefix = "segment-"
	// segmentsPerLimit sets how fine the space comes back, and how many files
	// are open at most.
	segmentsPerLimit = 64
	minSegmentSize   = 1 << 20
	maxSegmentSize   = 1 << 30
	// unlockedFor is how old a directory without a lock must be before it is
	// taken for a dead process's: a living one makes its lock at once.
	unlockedFor = time.Minute
)

// defaultSpillDirs are tried one after the other where nothing is set: the
// images' volume, and the place for temporary files that is a disk by custom.
var defaultSpillDirs = []string{"/var/lib/holdfast", "/var/tmp"}

// The faults of a spill.
var (
	// errSpillFull: PGSOURCE_SPILL_LIMIT is reached.
	errSpillFull = errors.New("PGSOURCE_SPILL_LIMIT is reached")
	// errSpillDamaged: a block is not what was written. Nothing of it is used;
	// the slot still has it.
	errSpillDamaged = errors.New("a block of the spill is not what was written to it")
)

// openSpill removes what dead processes left in dir and makes a directory of
// this process's own in it.
func openSpill(dir string, limit int64) (*spill, error) {
	if err := sweepSpills(dir, time.Now()); err != nil {
		return nil, err
	}
	path, err := os.MkdirTemp(dir, spillPrefix+"*") // 0700
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, errors.Join(err, os.Remove(path))
	}
	s := &spill{
		path: path, root: root, limit: limit,
		segmentSize: min(max(limit/segmentsPerLimit, minSegmentSize), maxSegmentSize),
		segments:    make(map[*segment]struct{}),
		changed:     func(int64, int) {},
	}
	s.create = func(name string) (segmentFile, error) {
		return root.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	}
	s.remove = root.Remove
	var nonce [8]byte
	_, _ = rand.Read(nonce[:]) // never fails
	s.nonce = binary.BigEndian.Uint64(nonce[:])
	if s.lock, err = root.OpenFile(spillLock, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err == nil {
		if err = lockFile(s.lock); err == nil {
			return s, nil
		}
	}
	return nil, errors.Join(err, s.close())
}

func lockFile(f *os.File) error {
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
}

// sweepSpills removes the directories of processes that have died. A directory
// that is locked, not ours, or not a directory at all is left alone.
func sweepSpills(dir string, now time.Time) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), spillPrefix) || !e.IsDir() {
			continue
		}
		info, err := e.Info() // of the entry itself, not of what a link points to
		if err != nil {
			continue // removed meanwhile
		}
		if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
			continue
		}
		sweepSpill(filepath.Join(dir, e.Name()), now.Sub(info.ModTime()))
	}
	return nil
}

// sweepSpill removes one directory if no process has its lock. What cannot be
// removed stays for the next start: it takes space and nothing else.
func sweepSpill(path string, age time.Duration) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return
	}
	defer func() { _ = root.Close() }() // nothing was written through it
	lock, err := root.OpenFile(spillLock, os.O_RDWR, 0)
	switch {
	case err == nil:
		defer func() { _ = lock.Close() }() // gives the lock back
		if lockFile(lock) != nil {
			return // its process lives
		}
	case !errors.Is(err, os.ErrNotExist) || age < unlockedFor:
		return // a process that is just making its lock
	}
	removeSpill(root, path)
}

// removeSpill removes a spill's files, and then the directory if nothing else
// is in it.
func removeSpill(root *os.Root, path string) {
	d, err := root.Open(".")
	if err != nil {
		return
	}
	names, _ := d.Readdirnames(-1)
	_ = d.Close() // was only read
	for _, name := range names {
		if name == spillLock || strings.HasPrefix(name, segmentPrefix) {
			_ = root.Remove(name) // what stays is looked at again by the next start
		}
	}
	_ = os.Remove(path)
}

// close removes everything and ends the lock.
func (s *spill) close() error {
	s.reset()
	removeSpill(s.root, s.path)
	var err error
	if s.lock != nil {
		err = s.lock.Close()
	}
	return errors.Join(err, s.root.Close())
}

// reset drops every block. No extent that was given out may be used after it.
func (s *spill) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for seg := range s.segments {
		s.drop(seg)
	}
	s.current = nil
	s.tell()
}

// write keeps one block. On an error nothing has changed: what may be on disk
// of it is overwritten by the next one.
func (s *spill) write(payload []byte) (extent, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	need := int64(len(payload)) + blockHeader
	if s.used+need > s.limit {
		return extent{}, errSpillFull
	}
	seg, err := s.room(need)
	if err != nil {
		return extent{}, err
	}
	e := extent{seg: seg, offset: seg.size, length: int64(len(payload))}
	head := e.header()
	binary.BigEndian.PutUint32(head[:], crc32.Update(crc32.Checksum(head[4:], castagnoli), castagnoli, payload))
	if err := seg.writeAt(head[:], seg.size); err != nil {
		return extent{}, err
	}
	if err := seg.writeAt(payload, seg.size+blockHeader); err != nil {
		return extent{}, err
	}
	seg.size += need
	seg.live++
	s.used += need
	s.tell()
	return e, nil
}

func (seg *segment) writeAt(p []byte, at int64) error {
	n, err := seg.file.WriteAt(p, at)
	if err == nil && n != len(p) {
		err = io.ErrShortWrite
	}
	if err != nil {
		return fmt.Errorf("write to the spill %s: %w", seg.owner.path, err)
	}
	return nil
}

// room gives the segment for a block of need bytes.
func (s *spill) room(need int64) (*segment, error) {
	if s.current != nil && (s.current.size == 0 || s.current.size+need <= s.segmentSize) {
		return s.current, nil
	}
	seg := &segment{owner: s, number: s.next, name: fmt.Sprintf("%s%08d", segmentPrefix, s.next)}
	var err error
	if seg.file, err = s.create(seg.name); err != nil {
		return nil, fmt.Errorf("make a file in the spill %s: %w", s.path, err)
	}
	s.next++
	s.segments[seg] = struct{}{}
	if old := s.current; old != nil && old.live == 0 {
		s.drop(old)
	}
	s.current = seg
	return seg, nil
}

// header gives a block's header with an empty checksum.
func (e extent) header() [blockHeader]byte {
	var h [blockHeader]byte
	binary.BigEndian.PutUint64(h[4:], uint64(e.length)) //nolint:gosec // not negative
	binary.BigEndian.PutUint64(h[12:], e.seg.owner.nonce)
	binary.BigEndian.PutUint32(h[20:], e.seg.number)
	binary.BigEndian.PutUint64(h[24:], uint64(e.offset)) //nolint:gosec // not negative
	return h
}

// blockReader reads blocks into one buffer.
type blockReader struct{ buf []byte }

// read gives a block's payload, which is valid until the next call. It fails
// with errSpillDamaged when the block is not what write was given.
func (r *blockReader) read(e extent) ([]byte, error) {
	n := int(e.length) + blockHeader
	if cap(r.buf) < n {
		r.buf = make([]byte, n)
	}
	buf := r.buf[:n]
	if _, err := e.seg.file.ReadAt(buf, e.offset); err != nil {
		return nil, fmt.Errorf("%w: %s at %d in %s: %w", errSpillDamaged, e.seg.name, e.offset, e.seg.owner.path, err)
	}
	want := e.header()
	if string(buf[4:blockHeader]) != string(want[4:]) || crc32.Checksum(buf[4:], castagnoli) != binary.BigEndian.Uint32(buf) {
		return nil, fmt.Errorf("%w: %s at %d in %s: its checksum is wrong", errSpillDamaged, e.seg.name, e.offset, e.seg.owner.path)
	}
	return buf[blockHeader:], nil
}

// release gives up blocks. Their extents may not be used any more.
func (s *spill) release(extents []extent) {
	if len(extents) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range extents {
		if _, mine := s.segments[e.seg]; !mine {
			continue // of before a reset
		}
		e.seg.live--
		if e.seg.live == 0 {
			s.drop(e.seg)
			if s.current == e.seg {
				s.current = nil
			}
		}
	}
	s.tell()
}

// drop removes a segment. An error leaves a file that is removed with the
// directory, at the latest by the next start.
func (s *spill) drop(seg *segment) {
	delete(s.segments, seg)
	s.used -= seg.size
	_ = seg.file.Close() // what was in it is not wanted any more
	_ = s.remove(seg.name)
}

// tell says how much is held; its caller holds mu.
func (s *spill) tell() { s.changed(s.used, len(s.segments)) }

func (s *spill) held() (bytes int64, files int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used, len(s.segments)
}

// openSpill makes the spill of a run, and nil where there is none. Without a
// setting it lies where it can: then its absence is said and nothing else. A
// directory that was asked for must work.
func (s *Source) openSpill() (*spill, error) {
	if s.cfg.SpillLimit == 0 {
		s.cfg.Report(Status{Check: CheckSpill, OK: true, Message: "off: every transaction has to fit into PGSOURCE_MEMORY_LIMIT"})
		return nil, nil //nolint:nilnil // no spill is a state of its own
	}
	dirs := defaultSpillDirs
	if s.cfg.SpillDir != "" {
		dirs = []string{s.cfg.SpillDir}
	}
	var why error
	for _, dir := range dirs {
		sp, err := openSpill(dir, s.cfg.SpillLimit)
		if err == nil {
			sp.changed = s.showSpill
			s.showSpill(0, 0)
			s.cfg.Report(Status{Check: CheckSpill, OK: true, Message: fmt.Sprintf("up to %d bytes in %s; pgsource_spill_bytes says how many it holds", s.cfg.SpillLimit, sp.path)})
			return sp, nil
		}
		why = errors.Join(why, err)
	}
	if s.cfg.SpillDir != "" {
		return nil, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "PGSOURCE_SPILL_DIR", Where: s.cfg.SpillDir, Why: "it cannot be used: " + why.Error(),
			Expected: "a directory that pgsource may make files in, not in memory (tmpfs)",
			Do:       "make it writable, mount a volume there, or set PGSOURCE_SPILL_DIR=off",
		}
	}
	s.log.Warn("no spill: what does not fit into memory closes the stream, and a transaction larger than PGSOURCE_MEMORY_LIMIT is refused; set PGSOURCE_SPILL_DIR",
		"err", why)
	s.cfg.Report(Status{
		Check: CheckSpill, Works: true, Message: "off, since there is no place for it: every transaction has to fit into PGSOURCE_MEMORY_LIMIT",
		Hint: "set PGSOURCE_SPILL_DIR to a directory on a writable volume, or to off to accept this",
	})
	return nil, nil //nolint:nilnil // as above
}

func (s *Source) closeSpill(ctx context.Context) {
	if err := s.spill.close(); err != nil {
		s.log.WarnContext(ctx, "the spill could not be removed: the next start does it", "dir", s.spill.path, "err", err)
	}
	s.spill = nil
}

// spillFault gives the metric's label of an error of the spill.
func spillFault(err error) string {
	switch {
	case errors.Is(err, errSpillFull):
		return "full"
	case errors.Is(err, errSpillDamaged):
		return "damaged"
	}
	return "disk"
}

// showSpill shows how much the spill holds.
func (s *Source) showSpill(bytes int64, files int) {
	s.cfg.Metrics.spillBytes.Set(float64(bytes))
	s.cfg.Metrics.spillFiles.Set(float64(files))
}

// CheckSpillDir looks whether the spill could be used. It changes nothing.
func (s *Source) CheckSpillDir() error {
	if s.cfg.SpillLimit == 0 || s.cfg.SpillDir == "" {
		return nil
	}
	const writable, searchable = 2, 1
	info, err := os.Stat(s.cfg.SpillDir)
	switch {
	case err == nil && !info.IsDir():
		err = errors.New("it is no directory")
	case err == nil:
		err = syscall.Access(s.cfg.SpillDir, writable|searchable)
	}
	if err != nil {
		return fmt.Errorf("PGSOURCE_SPILL_DIR: %s cannot be used: %w; make it writable, mount a volume there, or set PGSOURCE_SPILL_DIR=off", s.cfg.SpillDir, err)
	}
	return nil
}
