package wal

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"holdfast/internal/decode"
)

// stateAt gives a state whose bookmark is lsn, as this process would save it.
func stateAt(lsn LSN) *State {
	return &State{
		System: "7300000000000000001", Timeline: 1, Database: "shop", Slot: "holdfast", Publication: "holdfast",
		Acknowledged: lsn, Rows: lsn, Sent: lsn + sentStep, Incarnation: "i1", Writer: thisProcess(),
	}
}

func openFile(t *testing.T, path string) *FileStore {
	t.Helper()
	f := NewFileStore(path)
	if err := f.Acquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Release(t.Context()) })
	return f
}

func mustSave(t *testing.T, s StateStore, st *State) {
	t.Helper()
	if err := s.Save(t.Context(), st); err != nil {
		t.Fatal(err)
	}
}

// refusal fails the test unless err is one.
func refusal(t *testing.T, err error) *decode.Refusal {
	t.Helper()
	refused, ok := errors.AsType[*decode.Refusal](err)
	if !ok {
		t.Fatalf("error %v is no refusal", err)
	}
	return refused
}

// A crash between any two steps of a save, with the file in between written in
// part, leaves the old state or the new one, and the next process reads it.
func TestFileStoreCrashes(t *testing.T) {
	errCrash := errors.New("crash")
	for _, at := range []string{"write", "sync file", "rename", "sync folder"} {
		t.Run(at, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "state.json")
			f := openFile(t, path)
			mustSave(t, f, stateAt(100))
			f.step = func(name string) error {
				if name == at {
					return errCrash
				}
				return nil
			}
			if err := f.Save(t.Context(), stateAt(200)); !errors.Is(err, errCrash) {
				t.Fatalf("the save ended with %v", err)
			}
			if err := f.Release(t.Context()); err != nil { // as the kernel does
				t.Fatal(err)
			}
			next := openFile(t, path)
			st, err := next.Load(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			want := LSN(100)
			if at == "sync folder" {
				want = 200
			}
			if st.Acknowledged != want {
				t.Errorf("after a crash at %q it holds %s, want %s", at, st.Acknowledged, want)
			}
			mustSave(t, next, stateAt(300))
			if st, err = next.Load(t.Context()); err != nil || st.Acknowledged != 300 {
				t.Errorf("after the next save it holds %v, %v", st, err)
			}
		})
	}
}

// A power cut may lose what was not made durable: the file before it is renamed,
// the folder after.
func TestFileStoreSyncs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	f := openFile(t, path)
	var order []string
	f.step = func(name string) error {
		if name == "rename" {
			order = append(order, name)
		}
		return nil
	}
	f.sync = func(file *os.File) error {
		order = append(order, file.Name())
		return durably(file)
	}
	mustSave(t, f, stateAt(100))
	if want := []string{path + ".tmp", "rename", filepath.Dir(path)}; !slices.Equal(order, want) {
		t.Errorf("%q, want %q", order, want)
	}
	errDisk := errors.New("disk")
	for _, broken := range []string{path + ".tmp", filepath.Dir(path)} {
		f.sync = func(file *os.File) error {
			if file.Name() == broken {
				return errDisk
			}
			return durably(file)
		}
		if err := f.Save(t.Context(), stateAt(200)); !errors.Is(err, errDisk) {
			t.Errorf("a save that could not sync %s ended with %v", broken, err)
		}
	}
}

// A save that failed half-way does not keep the same process from saving again.
func TestFileStoreSavesAgainAfterAFailure(t *testing.T) {
	f := openFile(t, filepath.Join(t.TempDir(), "state.json"))
	mustSave(t, f, stateAt(100))
	fail := true
	f.step = func(name string) error {
		if fail && name == "sync folder" {
			return errors.New("no space left on device")
		}
		return nil
	}
	if err := f.Save(t.Context(), stateAt(200)); err == nil {
		t.Fatal("the save did not fail")
	}
	fail = false
	mustSave(t, f, stateAt(200))
}

// Whatever is not what pgsource wrote is refused, with a sentence that says
// what to do, and is never taken for "no state".
func TestFileStoreRefuses(t *testing.T) {
	whole, err := encodeState(stateAt(100))
	if err != nil {
		t.Fatal(err)
	}
	replaced := func(old, now string) []byte {
		if !bytes.Contains(whole, []byte(old)) {
			t.Fatalf("%s is not in %s", old, whole)
		}
		return bytes.Replace(whole, []byte(old), []byte(now), 1)
	}
	for name, c := range map[string]struct {
		content []byte
		says    string
	}{
		"empty":         {nil, "it is empty"},
		"blank":         {[]byte("  \n"), "it is empty"},
		"zeroes":        {make([]byte, 300), "cut off, damaged or no JSON"},
		"not JSON":      {[]byte("bookmark=5"), "cut off, damaged or no JSON"},
		"foreign":       {[]byte(`{"format":"something","version":1}`), "not a state of pgsource"},
		"foreign array": {[]byte(`[1,2,3]`), "cut off, damaged or no JSON"},
		"newer":         {replaced(`"version":1`, `"version":2`), "written by a newer pgsource"},
		"version zero":  {replaced(`"version":1`, `"version":0`), "version 0"},
		"by hand":       {replaced(`"acknowledged_lsn":"0/64"`, `"acknowledged_lsn":"0/65"`), "checksum"},
		"two members":   {replaced(`"version":1`, `"version":1,"version":1`), "cut off, damaged or no JSON"},
		"large":         {bytes.Repeat([]byte(" "), maxStateBytes+2), "it is empty"},
		"large JSON":    {append(bytes.Repeat([]byte(" "), maxStateBytes), whole...), "larger than"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "state.json")
			if err := os.WriteFile(path, c.content, 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := openFile(t, path).Load(t.Context())
			if refused := refusal(t, err); !strings.Contains(refused.Why, c.says) || !strings.Contains(refused.Do, "state reset") || refused.Where != "file:"+path {
				t.Errorf("it says %v, want %q", err, c.says)
			}
		})
	}
	t.Run("cut at each byte", func(t *testing.T) {
		for n := range len(whole) - 1 { // the line break at the end is no part of it
			if _, err := decodeState(whole[:n]); err == nil {
				t.Fatalf("the first %d of %d bytes are taken for a whole state", n, len(whole))
			}
		}
	})
	t.Run("each byte changed", func(t *testing.T) {
		want, err := decodeState(whole)
		if err != nil {
			t.Fatal(err)
		}
		for n := range len(whole) - 1 {
			damaged := bytes.Clone(whole)
			damaged[n] ^= 0x20 // the case of letters, which JSON could be lenient about
			if got, err := decodeState(damaged); err == nil && !cmp.Equal(got, want) {
				t.Fatalf("with byte %d changed it reads as %+v", n, got)
			}
		}
	})
	t.Run("a folder", func(t *testing.T) {
		_, err := openFile(t, filepath.Join(t.TempDir(), "x")).Load(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "state.json")
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		_, err = openFile(t, path).Load(t.Context())
		if refused := refusal(t, err); !strings.Contains(refused.Why, "no regular file") {
			t.Errorf("it says %v", err)
		}
	})
	t.Run("no folder for it", func(t *testing.T) {
		err := NewFileStore(filepath.Join(t.TempDir(), "none", "state.json")).Acquire(t.Context())
		if refused := refusal(t, err); !strings.Contains(refused.Do, "mount") {
			t.Errorf("it says %v", err)
		}
	})
}

// Records that were sealed properly and that no pgsource would have written.
func TestStateOfNobody(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*State)
		says   string
	}{
		"no cluster":      {func(st *State) { st.System = "" }, "which slot of which cluster"},
		"no timeline":     {func(st *State) { st.Timeline = 0 }, "which slot of which cluster"},
		"rows beyond":     {func(st *State) { st.Rows = st.Acknowledged + 1 }, "above acknowledged_lsn"},
		"a long name":     {func(st *State) { st.Database = strings.Repeat("x", maxStateText+1) }, "too long"},
		"too many notice": {func(st *State) { st.Notices = make([]Notice, maxNotices+1) }, "notices"},
	} {
		st := stateAt(100)
		c.change(st)
		b, err := encodeState(st)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeState(b); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}

// The second process is told who holds the state; the first goes on.
func TestFileStoreTwoProcesses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	first := openFile(t, path)
	mustSave(t, first, stateAt(100))
	second := NewFileStore(path)
	err := second.Acquire(t.Context())
	if refused := refusal(t, err); !strings.Contains(refused.Why, fmt.Sprintf("process %d ", os.Getpid())) || !strings.Contains(refused.Do, "stop the other") {
		t.Errorf("it says %v", err)
	}
	if st, err := second.Load(t.Context()); err != nil || st.Acknowledged != 100 {
		t.Errorf("a look gives %v, %v", st, err)
	}
	if err := second.Save(t.Context(), stateAt(200)); err == nil {
		t.Error("it saves without the lock")
	}
	mustSave(t, first, stateAt(300))
	if err := first.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := second.Acquire(t.Context()); err != nil {
		t.Errorf("after the first is gone: %v", err)
	}
	if err := second.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// Where the file system's locks do not work, the content tells: a file that
// somebody else has written is not written over, one that is gone is.
func TestFileStoreNoticesAnotherWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	f := openFile(t, path)
	mustSave(t, f, stateAt(100))
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	mustSave(t, f, stateAt(200))

	other := stateAt(150)
	other.Writer = "process 1 on another host"
	b, err := encodeState(other)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if refused := refusal(t, f.Save(t.Context(), stateAt(300))); !strings.Contains(refused.Why, "somebody else") {
		t.Errorf("it says %v", refused)
	}
	if there, err := os.ReadFile(path); err != nil || !bytes.Equal(there, b) {
		t.Errorf("the other's state was written over: %s, %v", there, err)
	}
}

// What is written is read back, whatever is in it.
func TestStateRoundTrip(t *testing.T) {
	lsn := rapid.Custom(func(t *rapid.T) LSN { return LSN(rapid.Uint64().Draw(t, "lsn")) })
	text := rapid.StringN(0, 60, maxStateText)
	rapid.Check(t, func(t *rapid.T) {
		st := &State{
			Sequence: rapid.Uint64().Draw(t, "sequence"), System: rapid.StringMatching(`[0-9]{1,20}`).Draw(t, "system"),
			Timeline: rapid.Uint32Min(1).Draw(t, "timeline"), Database: text.Draw(t, "database"), Slot: "s", Publication: text.Draw(t, "publication"),
			Acknowledged: lsn.Draw(t, "acknowledged"), Sent: lsn.Draw(t, "sent"), Incarnation: text.Draw(t, "incarnation"),
		}
		st.Rows = LSN(rapid.Uint64Max(uint64(st.Acknowledged)).Draw(t, "rows"))
		if rapid.Bool().Draw(t, "intent") {
			st.Intent = &storedIntent{Incarnation: "i", ID: rapid.Int64().Draw(t, "id"), Through: lsn.Draw(t, "through")}
		}
		for range rapid.IntRange(0, maxNotices+3).Draw(t, "notices") {
			st.notice(Notice{Kind: NoticeIncarnation, Was: "a", Now: "b", To: lsn.Draw(t, "to")})
		}
		b, err := encodeState(st)
		if err != nil {
			t.Fatal(err)
		}
		got, err := decodeState(b)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(st, got); diff != "" {
			t.Fatalf("(-written +read):\n%s", diff)
		}
	})
}

func TestLSNText(t *testing.T) {
	for _, text := range []string{"0/0", "16/B374D848", "FFFFFFFF/FFFFFFFF"} {
		var l LSN
		if err := l.UnmarshalText([]byte(text)); err != nil || l.String() != text {
			t.Errorf("%s: %s, %v", text, l, err)
		}
	}
	for _, text := range []string{"", "0", "/", "0/", "0/g", "0/b", "00/0", "1FFFFFFFF/0", "0/0 ", "-1/0", "+1/0", "0/0/0"} {
		var l LSN
		if err := l.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is read as %s", text, l)
		}
	}
}

// The switch point of a timeline, from files as the server writes them.
func TestSwitchPoint(t *testing.T) {
	history := "1\t0/3000148\tno recovery target specified\n\n# a comment\n2\t0/5000060\tbefore 2026-01-01\n"
	for _, c := range []struct {
		history  string
		timeline uint32
		want     LSN
		fails    bool
	}{
		{history, 1, 0x3000148, false},
		{history, 2, 0x5000060, false},
		{history, 3, 0, false},
		{"", 1, 0, false},
		{"x\t0/1\n", 1, 0, true},
		{"1\n", 1, 0, true},
		{"1\tnowhere\n", 1, 0, true},
		{strings.Repeat("#\n", maxHistory), 1, 0, true},
	} {
		got, err := switchPoint([]byte(c.history), c.timeline)
		if got != c.want || (err != nil) != c.fails {
			t.Errorf("timeline %d of %.40q: %s, %v; want %s", c.timeline, c.history, got, err, c.want)
		}
	}
}

func FuzzDecodeState(f *testing.F) {
	whole, err := encodeState(stateAt(100))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	f.Add([]byte(`{"format":"holdfast-pgsource-state","version":1,"checksum":"","record":{}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		st, err := decodeState(b)
		if err != nil {
			return
		}
		again, err := encodeState(st)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := decodeState(again); err != nil || !cmp.Equal(back, st) {
			t.Fatalf("%+v is read back as %+v, %v", st, back, err)
		}
	})
}

// A state that this program takes on it can read again: as many keys as wait at
// most, of bytes that JSON writes as six each, and notices that name many tables.
func TestLargestStateIsReadAgain(t *testing.T) {
	st := stateAt(100)
	st.Snapshot = &snapshotState{}
	for id := uint64(1); id*maxJobKeyBytes <= maxJobsBytes; id++ {
		job := copyJob{ID: id, Kind: CopyRepair, Schema: "public", Name: "orders", Keys: [][]string{{strings.Repeat("\x01", maxJobKeyBytes-4)}}}
		st.Snapshot.Jobs, st.Snapshot.Last = append(st.Snapshot.Jobs, job), id
	}
	var tables []string
	for n := range 5000 {
		name := fmt.Sprintf("table_with_a_name_of_some_length_%05d", n)
		tables = append(tables, tableName{"public", name}.String())
		st.Snapshot.Tables = append(st.Snapshot.Tables, knownTable{Schema: "public", Name: name, Copied: true, At: 1, Rows: 1})
	}
	for range maxNotices {
		st.notice(Notice{Kind: NoticeIncarnation, Tables: tables})
	}
	b, err := encodeState(st)
	if err != nil {
		t.Fatal(err)
	}
	again, err := decodeState(b)
	if err != nil {
		t.Fatalf("%d bytes: %v", len(b), err)
	}
	if len(again.NeedsResync()) != len(tables) || len(again.Snapshot.Jobs) != len(st.Snapshot.Jobs) {
		t.Errorf("%d tables at risk, %d jobs", len(again.NeedsResync()), len(again.Snapshot.Jobs))
	}
	st.Notices[0].Was = strings.Repeat("x", maxStateBytes)
	if _, err := encodeState(st); err == nil {
		t.Error("what is not read again is written")
	}
}
