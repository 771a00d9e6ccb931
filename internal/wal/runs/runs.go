// Package runs sorts more records than fit into memory: byte-sorted runs in
// files, merged while they are read. It compares bytes alone, so that what two
// systems give in orders of their own (collations differ) can be put side by
// side.
//
// Memory is bounded by [Options].Memory, disk by [Options].Limit. A file has no
// name for longer than it takes to make it, so that it is gone with the process,
// however that ends; what was caught between is removed by the next [Open].
// Every block has a checksum: what is read back is what was written, or an
// error.
//
// A Space is safe for concurrent use, its sorters and readers are not.
package runs

import (
	"bufio"
	"bytes"
	"container/heap"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// SumSize is the size of a record's sum.
const SumSize = 16

// Record is one entry: Key says where it stands, Sum goes with it.
type Record struct {
	Key []byte
	Sum [SumSize]byte
}

// MaxKey bounds a key in bytes.
const MaxKey = 1 << 20

const (
	prefix = "holdfast-runs-"
	// leftOver is how old a named file is that nobody will unlink any more.
	leftOver = time.Minute
	// blockSize is what one checksum stands for.
	blockSize = 32 << 10
	// fanIn is how many runs are merged at once: each has a buffer of a block.
	fanIn = 64
	// perRecord is the memory of a record beside its bytes.
	perRecord = 32
	// minMemory is below what a block and a key need.
	minMemory = 64 << 10
)

// Errors of a sort.
var (
	// ErrFull: Options.Limit is reached.
	ErrFull = errors.New("the files have reached their size limit")
	// ErrDamaged: a block is not what was written.
	ErrDamaged = errors.New("a block is not what was written to it")
)

// Options bound a Space.
type Options struct {
	// Dir is where the files lie; "" is the system's directory for temporary
	// files.
	Dir string
	// Memory bounds the records that one sorter holds, in bytes. 0 means 32 MiB.
	Memory int64
	// Limit bounds the bytes in files of all sorters together. 0 means 64 GiB.
	Limit int64
}

// Space is the room that sorters share.
type Space struct {
	opts Options

	mu   sync.Mutex
	used int64
}

// Open makes a Space and removes what a process that died has left in the
// directory.
func Open(o Options) (*Space, error) {
	if o.Dir == "" {
		o.Dir = os.TempDir()
	}
	if o.Memory <= 0 {
		o.Memory = 32 << 20
	}
	o.Memory = max(o.Memory, minMemory)
	if o.Limit <= 0 {
		o.Limit = 64 << 30
	}
	entries, err := os.ReadDir(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("look for files that were left behind: %w", err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() && time.Since(info.ModTime()) > leftOver {
			_ = os.Remove(filepath.Join(o.Dir, e.Name())) // somebody else's, then: it is in nobody's way
		}
	}
	return &Space{opts: o}, nil
}

// Used gives the bytes in files.
func (s *Space) Used() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}

func (s *Space) take(n int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used+n > s.opts.Limit {
		return fmt.Errorf("%w: %d bytes", ErrFull, s.opts.Limit)
	}
	s.used += n
	return nil
}

func (s *Space) give(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used -= n
}

// Sorter takes records in any order.
type Sorter struct {
	space *Space
	arena []byte // keys and sums, one after the other
	index []entry
	runs  []*run
	count int64
}

// entry is where a record lies in the arena.
type entry struct {
	at  int
	key int // length
}

// NewSorter makes a Sorter. Its owner calls Close, or Sort and closes the
// Reader.
func (s *Space) NewSorter() *Sorter { return &Sorter{space: s} }

// Count is the number of records added.
func (w *Sorter) Count() int64 { return w.count }

// Add takes one record; nothing of it is kept.
func (w *Sorter) Add(r Record) error {
	if len(r.Key) > MaxKey {
		return fmt.Errorf("a key has %d bytes, more than %d", len(r.Key), MaxKey)
	}
	need := len(r.Key) + SumSize
	if len(w.index) > 0 && int64(len(w.arena)+need+perRecord*(len(w.index)+1)) > w.space.opts.Memory {
		if err := w.flush(); err != nil {
			return err
		}
	}
	w.index = append(w.index, entry{len(w.arena), len(r.Key)})
	w.arena = append(append(w.arena, r.Key...), r.Sum[:]...)
	w.count++
	return nil
}

func (w *Sorter) record(e entry) (r Record) {
	r.Key = w.arena[e.at : e.at+e.key]
	copy(r.Sum[:], w.arena[e.at+e.key:])
	return r
}

func compare(a, b *Record) int {
	if n := bytes.Compare(a.Key, b.Key); n != 0 {
		return n
	}
	return bytes.Compare(a.Sum[:], b.Sum[:])
}

// sort orders what is in memory.
func (w *Sorter) sort() {
	slices.SortFunc(w.index, func(x, y entry) int {
		// Key and sum lie together, but a key that is another's beginning must
		// not be compared with the other's sum.
		if n := bytes.Compare(w.arena[x.at:x.at+x.key], w.arena[y.at:y.at+y.key]); n != 0 {
			return n
		}
		return bytes.Compare(w.arena[x.at+x.key:x.at+x.key+SumSize], w.arena[y.at+y.key:y.at+y.key+SumSize])
	})
}

// flush writes what is in memory as a run.
func (w *Sorter) flush() error {
	w.sort()
	out, err := w.space.newRun()
	if err != nil {
		return err
	}
	for _, e := range w.index {
		r := w.record(e)
		if err := out.add(&r); err != nil {
			return errors.Join(err, out.close())
		}
	}
	if err := out.finish(); err != nil {
		return errors.Join(err, out.close())
	}
	w.runs = append(w.runs, out)
	w.arena, w.index = w.arena[:0], w.index[:0]
	if len(w.runs) >= 2*fanIn {
		return w.compact()
	}
	return nil
}

// compact makes one run of the oldest ones, so that their number stays bounded.
func (w *Sorter) compact() error {
	part := &Reader{}
	for _, r := range w.runs[:fanIn] {
		part.sources = append(part.sources, r.reader())
	}
	if err := part.begin(); err != nil {
		return err
	}
	out, err := w.space.newRun()
	if err != nil {
		return err
	}
	for {
		r, ok, err := part.Next()
		if err == nil && ok {
			err = out.add(&r)
		}
		if err != nil {
			return errors.Join(err, out.close())
		}
		if !ok {
			break
		}
	}
	if err := out.finish(); err != nil {
		return errors.Join(err, out.close())
	}
	for _, r := range w.runs[:fanIn] {
		err = errors.Join(err, r.close())
	}
	w.runs = append(w.runs[fanIn:], out)
	return err
}

// Sort gives the records in ascending order of key, then sum. The sorter takes
// no more; what it has belongs to the Reader.
func (w *Sorter) Sort() (*Reader, error) {
	// What is in memory stays there where nothing else is: a small table needs
	// no disk.
	if len(w.runs) > 0 && len(w.index) > 0 {
		if err := w.flush(); err != nil {
			return nil, err
		}
		w.arena, w.index = nil, nil
	}
	r := &Reader{runs: w.runs}
	w.runs = nil
	w.sort()
	if len(w.index) > 0 {
		r.sources = append(r.sources, &memory{w: w})
	}
	for _, run := range r.runs {
		r.sources = append(r.sources, run.reader())
	}
	if err := r.begin(); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// Close gives everything back.
func (w *Sorter) Close() (err error) {
	for _, r := range w.runs {
		err = errors.Join(err, r.close())
	}
	w.runs, w.arena, w.index = nil, nil, nil
	return err
}

// source is a sorted sequence. What next gives is valid until the next call.
type source interface {
	next(r *Record) (ok bool, err error)
}

// memory is what never left it.
type memory struct {
	w *Sorter
	n int
}

func (m *memory) next(r *Record) (bool, error) {
	if m.n == len(m.w.index) {
		return false, nil
	}
	*r = m.w.record(m.w.index[m.n])
	m.n++
	return true, nil
}

// Reader gives records in order.
type Reader struct {
	runs    []*run
	sources []source
	heads   heads
}

// head is the first record of a source that was not given yet.
type head struct {
	src source
	rec Record
}

type heads []*head

func (h heads) Len() int           { return len(h) }
func (h heads) Less(i, j int) bool { return compare(&h[i].rec, &h[j].rec) < 0 }
func (h heads) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *heads) Push(x any)        { *h = append(*h, x.(*head)) } //nolint:errcheck,forcetypeassert // heap pushes what it popped
func (h *heads) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

func (r *Reader) begin() error {
	for _, s := range r.sources {
		one := &head{src: s}
		ok, err := one.advance()
		if err != nil {
			return err
		}
		if ok {
			r.heads = append(r.heads, one)
		}
	}
	heap.Init(&r.heads)
	return nil
}

// advance reads the source's next record into memory of the head's own.
func (h *head) advance() (bool, error) {
	var next Record
	ok, err := h.src.next(&next)
	if !ok || err != nil {
		return false, err
	}
	h.rec.Key = append(h.rec.Key[:0], next.Key...)
	h.rec.Sum = next.Sum
	return true, nil
}

// Next gives the next record, false behind the last one. The key is the
// caller's.
func (r *Reader) Next() (Record, bool, error) {
	if len(r.heads) == 0 {
		return Record{}, false, nil
	}
	first := r.heads[0]
	out := Record{Key: bytes.Clone(first.rec.Key), Sum: first.rec.Sum}
	ok, err := first.advance()
	switch {
	case err != nil:
		return Record{}, false, err
	case ok:
		heap.Fix(&r.heads, 0)
	default:
		heap.Pop(&r.heads)
	}
	return out, true, nil
}

// Close gives the files back.
func (r *Reader) Close() (err error) {
	for _, run := range r.runs {
		err = errors.Join(err, run.close())
	}
	r.runs, r.sources, r.heads = nil, nil, nil
	return err
}

// run is one sorted file: blocks of a checksum, a length, and whole records.
type run struct {
	space *Space
	file  *os.File
	size  int64
	block []byte // being filled
	head  [8]byte
	out   *bufio.Writer
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// newRun makes a file without a name.
func (s *Space) newRun() (*run, error) {
	f, err := os.CreateTemp(s.opts.Dir, prefix+"*") // 0600
	if err != nil {
		return nil, fmt.Errorf("make a file for a sort: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(fmt.Errorf("take the name off a file for a sort: %w", err), f.Close())
	}
	return &run{space: s, file: f, out: bufio.NewWriterSize(f, blockSize)}, nil
}

func (r *run) add(rec *Record) error {
	r.block = binary.AppendUvarint(r.block, uint64(len(rec.Key)))
	r.block = append(append(r.block, rec.Key...), rec.Sum[:]...)
	if len(r.block) < blockSize {
		return nil
	}
	return r.writeBlock()
}

func (r *run) writeBlock() error {
	if len(r.block) == 0 {
		return nil
	}
	n := int64(len(r.head) + len(r.block))
	if err := r.space.take(n); err != nil {
		return err
	}
	// The block's number is under the checksum: a block that lies elsewhere is
	// another one.
	binary.BigEndian.PutUint32(r.head[4:], uint32(len(r.block))) //nolint:gosec // a block and one key
	binary.BigEndian.PutUint32(r.head[:], sum(r.head[4:], r.block, r.size))
	r.size += n
	_, err := r.out.Write(r.head[:])
	if err == nil {
		_, err = r.out.Write(r.block)
	}
	r.block = r.block[:0]
	if err != nil {
		return fmt.Errorf("write a run: %w", err)
	}
	return nil
}

func sum(length, block []byte, offset int64) uint32 {
	var at [8]byte
	binary.BigEndian.PutUint64(at[:], uint64(offset)) //nolint:gosec // not negative
	return crc32.Update(crc32.Update(crc32.Checksum(at[:], castagnoli), castagnoli, length), castagnoli, block)
}

func (r *run) finish() error {
	if err := r.writeBlock(); err != nil {
		return err
	}
	if err := r.out.Flush(); err != nil {
		return fmt.Errorf("write a run: %w", err)
	}
	r.out, r.block = nil, nil
	return nil
}

func (r *run) close() error {
	r.space.give(r.size)
	r.size = 0
	return r.file.Close()
}

func (r *run) reader() *runReader {
	return &runReader{r: r, in: bufio.NewReaderSize(io.NewSectionReader(r.file, 0, r.size), blockSize)}
}

// runReader reads a run from its front.
type runReader struct {
	r      *run
	in     *bufio.Reader
	offset int64
	buf    []byte
	block  []byte // what is left of the present block
}

// maxBlock is the largest block that is written: one that is nearly full, and
// one more record.
const maxBlock = blockSize + MaxKey + SumSize + binary.MaxVarintLen64

func (r *runReader) next(rec *Record) (bool, error) {
	if len(r.block) == 0 {
		if r.offset == r.r.size {
			return false, nil
		}
		if err := r.readBlock(); err != nil {
			return false, err
		}
	}
	n, used := binary.Uvarint(r.block)
	if used <= 0 || n > MaxKey || len(r.block)-used < int(n)+SumSize {
		return false, fmt.Errorf("%w: a record does not end in its block", ErrDamaged)
	}
	r.block = r.block[used:]
	rec.Key = r.block[:n:n]
	copy(rec.Sum[:], r.block[n:])
	r.block = r.block[n+SumSize:]
	return true, nil
}

func (r *runReader) readBlock() error {
	var head [8]byte
	if _, err := io.ReadFull(r.in, head[:]); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	n := int(binary.BigEndian.Uint32(head[4:]))
	if n == 0 || n > maxBlock {
		return fmt.Errorf("%w: it claims %d bytes", ErrDamaged, n)
	}
	r.buf = slices.Grow(r.buf[:0], n)[:n]
	if _, err := io.ReadFull(r.in, r.buf); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if sum(head[4:], r.buf, r.offset) != binary.BigEndian.Uint32(head[:]) {
		return fmt.Errorf("%w: its checksum does not fit", ErrDamaged)
	}
	r.offset += int64(len(head) + n)
	r.block = r.buf
	return nil
}
