package runs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func open(t *testing.T, o Options) *Space {
	t.Helper()
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func drain(t interface{ Fatal(...any) }, r *Reader) (all []Record) {
	for {
		rec, ok, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			return all
		}
		all = append(all, rec)
	}
}

// What is sorted is what was added, in order, whatever the memory.
func TestSortsWhatWasAdded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		keys := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 0, 40), 0, 200).Draw(t, "keys")
		blow := rapid.IntRange(1, 200).Draw(t, "blow") // makes keys long, so that little fits
		s, err := Open(Options{Dir: dir, Memory: minMemory})
		if err != nil {
			t.Fatal(err)
		}
		w := s.NewSorter()
		var want []Record
		for i, k := range keys {
			rec := Record{Key: bytes.Repeat(k, blow)}
			rec.Sum[0] = byte(i % 3)
			want = append(want, rec)
			if err := w.Add(rec); err != nil {
				t.Fatal(err)
			}
		}
		slices.SortFunc(want, func(a, b Record) int { return compare(&a, &b) })
		r, err := w.Sort()
		if err != nil {
			t.Fatal(err)
		}
		got := drain(t, r)
		if len(got) != len(want) {
			t.Fatalf("%d records, want %d", len(got), len(want))
		}
		for i := range got {
			if compare(&got[i], &want[i]) != 0 {
				t.Fatalf("record %d is %x, want %x", i, got[i].Key, want[i].Key)
			}
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		if s.Used() != 0 {
			t.Fatalf("%d bytes are still counted", s.Used())
		}
	})
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// More runs than are merged at once, and the memory stays what it was told to
// be.
func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	s := open(t, Options{Memory: 128 << 10})
	w := s.NewSorter()
	const records = 600_000
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	var peak uint64
	key := make([]byte, 8)
	for i := range uint64(records) {
		binary.BigEndian.PutUint64(key, i*2654435761%(1<<40))
		if err := w.Add(Record{Key: key}); err != nil {
			t.Fatal(err)
		}
		if i%50_000 == 0 {
			runtime.GC()
			runtime.ReadMemStats(&after)
			peak = max(peak, after.HeapAlloc)
		}
		if len(w.runs) > 2*fanIn {
			t.Fatalf("%d runs", len(w.runs))
		}
	}
	r, err := w.Sort()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	n := 0
	var last []byte
	for {
		rec, ok, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			break
		}
		if bytes.Compare(last, rec.Key) > 0 {
			t.Fatal("out of order")
		}
		last = rec.Key
		if n++; n%100_000 == 0 {
			runtime.GC()
			runtime.ReadMemStats(&after)
			peak = max(peak, after.HeapAlloc)
		}
	}
	if n != records {
		t.Errorf("%d records came back, want %d", n, records)
	}
	// The readers of 128 runs have two blocks each; other tests run beside.
	if grown := int64(peak) - int64(before.HeapAlloc); grown > 40<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
}

func TestLimitOfDisk(t *testing.T) {
	t.Parallel()
	s := open(t, Options{Memory: minMemory, Limit: 200 << 10})
	w := s.NewSorter()
	var err error
	for i := 0; err == nil && i < 100_000; i++ {
		err = w.Add(Record{Key: fmt.Appendf(nil, "%020d", i)})
	}
	if !errors.Is(err, ErrFull) {
		t.Fatalf("no limit: %v", err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if s.Used() != 0 {
		t.Errorf("%d bytes are still counted", s.Used())
	}
	if err := s.NewSorter().Add(Record{Key: make([]byte, MaxKey+1)}); err == nil {
		t.Error("a key above the bound was taken")
	}
}

// Whatever byte of a file is changed, or wherever it is cut, nothing false is
// given.
func TestDamageIsNoticed(t *testing.T) {
	t.Parallel()
	made := func() (*Sorter, *run) {
		w := open(t, Options{Memory: minMemory}).NewSorter()
		for i := range 100 {
			if err := w.Add(Record{Key: fmt.Appendf(nil, "%05d", i*7%100)}); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.flush(); err != nil {
			t.Fatal(err)
		}
		return w, w.runs[0]
	}
	read := func(w *Sorter) error {
		r, err := w.Sort()
		for err == nil {
			var ok bool
			if _, ok, err = r.Next(); !ok {
				break
			}
		}
		if r != nil {
			err = errors.Join(err, r.Close())
		}
		return err
	}
	w, run := made()
	size := run.size
	if err := read(w); err != nil {
		t.Fatal(err)
	}
	for at := int64(0); at < size; at += 13 {
		w, run := made()
		b := make([]byte, 1)
		if _, err := run.file.ReadAt(b, at); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 0x40
		if _, err := run.file.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
		if err := read(w); !errors.Is(err, ErrDamaged) {
			t.Fatalf("byte %d changed: %v", at, err)
		}
	}
	w, run = made()
	if err := run.file.Truncate(size - 1); err != nil {
		t.Fatal(err)
	}
	if err := read(w); !errors.Is(err, ErrDamaged) {
		t.Fatalf("cut off: %v", err)
	}
}

// A file that got a name and no end is removed by the next one; one that was
// just made, or is not ours, stays.
func TestSweeps(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name string, age time.Duration) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		when := time.Now().Add(-age)
		if err := os.Chtimes(path, when, when); err != nil {
			t.Fatal(err)
		}
		return path
	}
	old, young, other := write(prefix+"1", time.Hour), write(prefix+"2", 0), write("other", time.Hour)
	open(t, Options{Dir: dir})
	for path, stays := range map[string]bool{old: false, young: true, other: true} {
		if _, err := os.Stat(path); (err == nil) != stays {
			t.Errorf("%s: %v", filepath.Base(path), err)
		}
	}
	if _, err := Open(Options{Dir: filepath.Join(dir, "missing")}); err == nil {
		t.Error("a directory that is not there was taken")
	}
}
