package wal

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// memoryFile is a segment in memory, with faults.
type memoryFile struct {
	mu     sync.Mutex
	data   []byte
	closed bool
	fault  func(p []byte, at int64) (int, error) // of a write; nil for none
}

func (f *memoryFile) WriteAt(p []byte, at int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fault != nil {
		n, err := f.fault(p, at)
		f.put(p[:n], at)
		return n, err
	}
	f.put(p, at)
	return len(p), nil
}

func (f *memoryFile) put(p []byte, at int64) {
	if need := int(at) + len(p); need > len(f.data) {
		f.data = append(f.data, make([]byte, need-len(f.data))...)
	}
	copy(f.data[at:], p)
}

func (f *memoryFile) ReadAt(p []byte, at int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return 0, os.ErrClosed
	}
	if at > int64(len(f.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.data[at:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memoryFile) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed, f.data = true, nil
	return nil
}

// memorySpill is a spill without a disk.
func memorySpill(limit int64) *spill {
	return &spill{
		path: "memory", limit: limit, segmentSize: max(limit/segmentsPerLimit, minBlock), nonce: 7,
		segments: make(map[*segment]struct{}), changed: func(int64, int) {},
		create: func(string) (segmentFile, error) { return new(memoryFile), nil },
		remove: func(string) error { return nil },
	}
}

func realSpill(t *testing.T, dir string, limit int64) *spill {
	t.Helper()
	sp, err := openSpill(dir, limit)
	if err != nil {
		t.Fatal(err)
	}
	return sp
}

func TestSpillKeepsBlocks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	sp := realSpill(t, dir, 200<<20)
	if info, err := os.Stat(sp.path); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the directory is %v, %v", info.Mode(), err)
	}
	var blocks [][]byte
	var at []extent
	for i := range 40 {
		b := bytes.Repeat([]byte{byte(i)}, i*20_000)
		e, err := sp.write(b)
		if err != nil {
			t.Fatal(err)
		}
		blocks, at = append(blocks, b), append(at, e)
	}
	_, files := sp.held()
	if names := filesIn(t, sp.path); len(names) != files+1 || files < 3 { // and the lock
		t.Errorf("%d files, counted %d: %v", len(names), files, names)
	}
	for _, name := range filesIn(t, sp.path) {
		if info, err := os.Stat(filepath.Join(sp.path, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s is %v, %v", name, info.Mode(), err)
		}
	}
	var r blockReader
	for i, e := range at {
		if got, err := r.read(e); err != nil || !bytes.Equal(got, blocks[i]) {
			t.Fatalf("block %d: %d bytes, %v, want %d", i, len(got), err, len(blocks[i]))
		}
	}
	for i, e := range at { // out of order, as a transaction may wait for long
		if i%2 == 0 {
			sp.release([]extent{e})
		}
	}
	if got, err := r.read(at[39]); err != nil || !bytes.Equal(got, blocks[39]) {
		t.Fatal("a block is gone that was not released:", err)
	}
	for i, e := range at {
		if i%2 == 1 {
			sp.release([]extent{e})
		}
	}
	if used, files := sp.held(); used != 0 || files != 0 || len(filesIn(t, sp.path)) != 1 {
		t.Errorf("%d bytes in %d files after everything was released: %v", used, files, filesIn(t, sp.path))
	}
	if _, err := sp.write([]byte("again")); err != nil {
		t.Error(err)
	}
	if err := sp.close(); err != nil {
		t.Error(err)
	}
	if left := filesIn(t, dir); len(left) != 0 {
		t.Errorf("closed, and %v is left", left)
	}
}

func filesIn(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// A start removes what dead processes left, and nothing else: not what a
// living one holds, not what is not a spill, not what a link points to.
func TestSpillSweepsTheDead(t *testing.T) {
	t.Parallel()
	dir, elsewhere := t.TempDir(), t.TempDir()
	living := realSpill(t, dir, 1<<20)
	kept, err := living.write([]byte("kept"))
	if err != nil {
		t.Fatal(err)
	}
	dead := realSpill(t, dir, 1<<20)
	if _, err := dead.write([]byte("row data")); err != nil {
		t.Fatal(err)
	}
	// A process that dies lets go of its lock and removes nothing.
	if err := errors.Join(dead.lock.Close(), dead.root.Close()); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"holdfast-spill-young", "holdfast-spill-old", "somebody-else"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(filepath.Join(dir, "holdfast-spill-old"), old, old); err != nil {
		t.Fatal(err)
	}
	precious := filepath.Join(elsewhere, segmentPrefix+"1")
	if err := errors.Join(os.WriteFile(precious, nil, 0o600), os.Chtimes(elsewhere, old, old), os.Symlink(elsewhere, filepath.Join(dir, "holdfast-spill-link"))); err != nil {
		t.Fatal(err)
	}

	sp := realSpill(t, dir, 1<<20)
	got := strings.Join(filesIn(t, dir), " ")
	for _, gone := range []string{filepath.Base(dead.path), "holdfast-spill-old"} {
		if strings.Contains(got, gone) {
			t.Errorf("%s is left: %s", gone, got)
		}
	}
	for _, there := range []string{filepath.Base(living.path), filepath.Base(sp.path), "holdfast-spill-young", "somebody-else", "holdfast-spill-link"} {
		if !strings.Contains(got, there) {
			t.Errorf("%s is gone: %s", there, got)
		}
	}
	if _, err := os.Stat(precious); err != nil {
		t.Error("a file behind a link was removed:", err)
	}
	var r blockReader
	if b, err := r.read(kept); err != nil || string(b) != "kept" {
		t.Errorf("the living one's block: %q, %v", b, err)
	}
	if err := errors.Join(living.close(), sp.close()); err != nil {
		t.Error(err)
	}
}

// Whatever happens to a block on disk, it is noticed, and never read as rows.
func TestSpillNoticesDamage(t *testing.T) {
	t.Parallel()
	damage := map[string]func(f *memoryFile, e, other extent){
		"a flipped bit":    func(f *memoryFile, e, _ extent) { f.data[e.offset+blockHeader+3] ^= 1 },
		"a flipped length": func(f *memoryFile, e, _ extent) { f.data[e.offset+11] ^= 1 },
		"a cut file":       func(f *memoryFile, e, _ extent) { f.data = f.data[:e.offset+blockHeader+5] },
		"an emptied file":  func(f *memoryFile, _, _ extent) { f.data = nil },
		"zeroes":           func(f *memoryFile, e, _ extent) { clear(f.data[e.offset:]) },
		"another whole block": func(f *memoryFile, e, other extent) {
			copy(f.data[e.offset:], f.data[other.offset:other.offset+other.length+blockHeader])
		},
		"another life's block": func(f *memoryFile, e, _ extent) {
			was := memorySpill(1 << 20)
			was.nonce++
			for range 2 {
				if _, err := was.write([]byte("block of rows")); err != nil {
					panic(err)
				}
			}
			for seg := range was.segments {
				old, ok := seg.file.(*memoryFile)
				if !ok {
					panic("no file in memory")
				}
				copy(f.data, old.data)
			}
		},
	}
	for name, harm := range damage {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sp := memorySpill(1 << 20)
			first, err := sp.write([]byte("rows of block"))
			if err != nil {
				t.Fatal(err)
			}
			second, err := sp.write([]byte("block of rows"))
			if err != nil {
				t.Fatal(err)
			}
			f, ok := second.seg.file.(*memoryFile)
			if !ok {
				t.Fatal("no file in memory")
			}
			harm(f, second, first)
			var r blockReader
			if b, err := r.read(second); !errors.Is(err, errSpillDamaged) {
				t.Errorf("read %q, %v", b, err)
			}
		})
	}
}

// A write that fails leaves everything as it was, and the next one works: a
// full disk, a short write, a file that cannot be made.
func TestSpillSurvivesFailedWrites(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]func(p []byte, at int64) (int, error){
		"no space":             func([]byte, int64) (int, error) { return 0, syscall.ENOSPC },
		"no space in a middle": func(p []byte, _ int64) (int, error) { return len(p) / 2, syscall.ENOSPC },
		"a short write":        func(p []byte, _ int64) (int, error) { return len(p) / 2, nil },
		"no space for rows": func(p []byte, _ int64) (int, error) {
			if len(p) == blockHeader {
				return len(p), nil
			}
			return 1, syscall.EIO
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sp := memorySpill(1 << 20)
			before, err := sp.write([]byte("before"))
			if err != nil {
				t.Fatal(err)
			}
			f, ok := before.seg.file.(*memoryFile)
			if !ok {
				t.Fatal("no file in memory")
			}
			used, _ := sp.held()
			f.fault = fault
			if _, err := sp.write([]byte("these rows are not written")); err == nil || errors.Is(err, errSpillFull) {
				t.Fatalf("wrote through a fault: %v", err)
			}
			if now, _ := sp.held(); now != used {
				t.Errorf("%d bytes are counted after a write that failed, before %d", now, used)
			}
			f.fault = nil
			after, err := sp.write([]byte("after"))
			if err != nil {
				t.Fatal(err)
			}
			var r blockReader
			for want, e := range map[string]extent{"before": before, "after": after} {
				if b, err := r.read(e); err != nil || string(b) != want {
					t.Errorf("read %q, %v, want %q", b, err, want)
				}
			}
		})
	}
	sp := memorySpill(1 << 20)
	sp.create = func(string) (segmentFile, error) { return nil, syscall.EMFILE }
	if _, err := sp.write([]byte("x")); !errors.Is(err, syscall.EMFILE) {
		t.Errorf("got %v", err)
	}
	if used, files := sp.held(); used != 0 || files != 0 {
		t.Errorf("%d bytes in %d files", used, files)
	}
}

func TestSpillIsBounded(t *testing.T) {
	t.Parallel()
	sp := memorySpill(1 << 20)
	block := make([]byte, 10_000)
	var at []extent
	for {
		e, err := sp.write(block)
		if errors.Is(err, errSpillFull) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		at = append(at, e)
	}
	if used, _ := sp.held(); used > 1<<20 || len(at) < 100 {
		t.Errorf("%d bytes of 1 MiB after %d blocks", used, len(at))
	}
	sp.release(at[:10])
	if _, err := sp.write(block); err != nil {
		t.Errorf("after room was made: %v", err)
	}
}

// What the spill does not take stays in memory, in the right order, and goes
// there when it can.
func TestAssemblerThroughSpillFaults(t *testing.T) {
	t.Parallel()
	sp := memorySpill(1 << 30)
	failing := false
	sp.create = func(string) (segmentFile, error) {
		return &memoryFile{fault: func(p []byte, _ int64) (int, error) {
			if failing {
				return len(p) / 3, syscall.ENOSPC
			}
			return len(p), nil
		}}, nil
	}
	a := newAssembler(1<<20, new(buffers), sp)
	if _, err := a.add(beginMsg(1), time.Now()); err != nil {
		t.Fatal(err)
	}
	var want []string
	for i := range 3000 {
		failing = i/300%2 == 1
		msg := fmt.Sprintf("I%05d%s", i, strings.Repeat("x", 500))
		want = append(want, msg)
		if _, err := a.add([]byte(msg), time.Now()); err != nil {
			t.Fatal(err)
		}
		if failing && i%300 == 299 && (a.spillErr == nil || a.open.memory < 100_000) {
			t.Fatalf("row %d: %d bytes in memory, fault %v", i, a.open.memory, a.spillErr)
		}
		if !failing && i%300 == 299 && a.open.memory > 200_000 {
			t.Fatalf("row %d: %d bytes in memory", i, a.open.memory)
		}
	}
	tx, err := a.add(commitMsg(9), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	got, err := read(tx)
	if err != nil || strings.Join(got, ",") != strings.Join(want, ",") {
		t.Fatalf("%d messages, %v, want %d", len(got), err, len(want))
	}
	a.open = tx
	a.drop()
	if used, files := sp.held(); used != 0 || files != 0 {
		t.Errorf("%d bytes in %d files after the connection ended", used, files)
	}
}
