package wal

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"holdfast/internal/decode"
)

// What is put is given, oldest first, until it is dropped; by a store that is
// taken and by one that is not.
func TestRequestsInFiles(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "state[1]*.json") // no pattern is made of it
	taken, other := NewFileStore(path), NewFileStore(path)
	if err := taken.Acquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Release(context.WithoutCancel(t.Context())) }()
	first := newRequest(string(CopyRepair), "public", "orders", [][]string{{"1", "a\"\n"}, {`\x00ff`, "☃"}})
	second := newRequest(string(CopyResync), "public", `It"ems`, nil)
	for _, r := range []*Request{second, first} {
		if err := other.PutRequest(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	if err := other.PutRequest(t.Context(), first); err == nil {
		t.Log("a request that is there was put again: the same bytes")
	}
	for _, s := range []*FileStore{taken, other} {
		list, err := s.Requests(t.Context())
		if err != nil || len(list) != 2 || list[0].ID != first.ID || list[1].Name != `It"ems` || list[0].Keys[0][1] != "a\"\n" || list[1].Keys != nil {
			t.Fatalf("%+v, %v", list, err)
		}
	}
	for range 2 { // one that is not there is no error
		if err := taken.DropRequest(t.Context(), first.ID); err != nil {
			t.Fatal(err)
		}
	}
	if list, err := other.Requests(t.Context()); err != nil || len(list) != 1 || list[0].ID != second.ID {
		t.Fatalf("%+v, %v", list, err)
	}
	if err := taken.DropRequest(t.Context(), "../x"); err == nil {
		t.Error("a path was taken for an ID")
	}
}

// Nothing but what this program wrote is a request, whatever lies there; the
// store that is taken removes the rest, the other one leaves it alone.
func TestForeignRequestFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "state.json")
	good, err := encodeRequest(newRequest(string(CopyResync), "public", "orders", nil))
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"empty": "", "text": "hello", "other": string(good), "cut": string(good[:len(good)/2]), "big": strings.Repeat(" ", maxRequestBytes+10),
		"changed": strings.Replace(string(good), "orders", "secret", 1), "version": strings.Replace(string(good), `"version":1`, `"version":2`, 1),
	} {
		if err := os.WriteFile(path+".request-"+name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(path+".request-folder", 0o700); err != nil {
		t.Fatal(err)
	}
	count := func() int {
		left, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		return len(left)
	}
	s, before := NewFileStore(path), count()
	if list, err := s.Requests(t.Context()); err != nil || len(list) > 0 || count() != before {
		t.Fatalf("%v, %v, %d of %d files are left", list, err, count(), before)
	}
	if err := s.Acquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Release(context.WithoutCancel(t.Context())) }()
	if list, err := s.Requests(t.Context()); err != nil || len(list) > 0 || count() != 2 { // the folder and the lock
		t.Fatalf("%v, %v, %d files are left", list, err, count())
	}
}

func TestRequestsAreBounded(t *testing.T) {
	t.Parallel()
	keys := make([][]string, 2)
	keys[0] = []string{strings.Repeat("x", maxRequestBytes)}
	var refused *decode.Refusal
	if _, err := encodeRequest(newRequest(string(CopyRepair), "public", "orders", keys)); !errors.As(err, &refused) || refused.Reason != decode.ReasonLimit {
		t.Errorf("%v", err)
	}
	s := testSource(t, noStore{})
	if _, err := s.AskResync(t.Context(), Table{"public", "orders", "orders"}); !errors.As(err, &refused) {
		t.Errorf("asked where nothing is kept: %v", err)
	}
}

func FuzzDecodeRequest(f *testing.F) {
	good, err := encodeRequest(newRequest(string(CopyRepair), "public", "orders", [][]string{{"1"}}))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"format":"holdfast-pgsource-request","version":1,"checksum":"","record":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRequest(b)
		if err == nil && !validRequestID(r.ID) {
			t.Fatalf("%+v", r)
		}
	})
}
