package feldera

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"holdfast/internal/decode"
)

func TestQueryCountsItsRows(t *testing.T) {
	const empty = `{"holdfast_rows":0}`
	for _, c := range []struct {
		name, rows, count string
		seen              int
		ok                bool
	}{
		{"whole", "{\"id\":1,\"holdfast_rows\":2}\n{\"id\":2,\"holdfast_rows\":2}\n", "", 2, true},
		{"whole without a last newline", "{\"id\":1,\"holdfast_rows\":1}", "", 1, true},
		{"empty", "", empty, 0, true},
		{"empty by mistake", "", `{"holdfast_rows":3}`, 0, false},
		{"empty, and the count fails too", "", "", 0, false},
		{"a row short", "{\"id\":1,\"holdfast_rows\":2}\n", "", 1, false},
		{"a row too many", "{\"holdfast_rows\":1}\n{\"holdfast_rows\":1}\n", "", 1, false},
		{"rows of two minds", "{\"holdfast_rows\":2}\n{\"holdfast_rows\":3}\n", "", 1, false},
		{"an error in the body", "{\"holdfast_rows\":2}\n{\"error\":\"out of memory\"}\n", "", 1, false},
		{"text in the body", "ERROR: out of memory\n", "", 0, false},
		{"a row cut short", "{\"holdfast_rows\":2}\n{\"id\":", "", 1, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			cl, _ := newScripted(t, Config{}, func(n int, _ seen) answer {
				if n == 1 {
					return answer{status: 200, body: c.rows}
				}
				return answer{status: 200, body: c.count}
			})
			seen := 0
			err := cl.Query(t.Context(), Query{Select: "SELECT id FROM t"}, func([]byte) error { seen++; return nil })
			if (err == nil) != c.ok || seen != c.seen || (err != nil && !errors.Is(err, ErrIncomplete)) {
				t.Errorf("%d rows, %v", seen, err)
			}
		})
	}
}

func TestQueryIsBounded(t *testing.T) {
	long := `{"holdfast_rows":1,"v":"` + strings.Repeat("x", 200_000) + `"}`
	for name, q := range map[string]Query{
		"line": {MaxLine: 100_000}, "whole": {MaxBytes: 100_000},
	} {
		cl, _ := newScripted(t, Config{}, func(int, seen) answer { return answer{status: 200, body: long} })
		err := cl.Query(t.Context(), q, func([]byte) error { return nil })
		var refused *decode.Refusal
		if !errors.As(err, &refused) || refused.Reason != decode.ReasonLimit {
			t.Errorf("%s: %v", name, err)
		}
	}
	cl, _ := newScripted(t, Config{}, func(int, seen) answer { return answer{status: 200, body: long} })
	if err := cl.Query(t.Context(), Query{}, func(row []byte) error {
		if len(row) != len(long) {
			t.Errorf("%d bytes", len(row))
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

func TestQueryIsSortedOutside(t *testing.T) {
	cl, s := newScripted(t, Config{}, func(int, seen) answer { return answer{status: 200, body: `{"holdfast_rows":1}`} })
	if err := cl.Query(t.Context(), Query{Select: "SELECT id FROM t", OrderBy: "id"}, func([]byte) error { return nil }); err != nil {
		t.Fatal(err)
	}
	want := "format=json&sql=SELECT+q.%2A%2C+COUNT%28%2A%29+OVER+%28%29+AS+holdfast_rows+FROM+%28SELECT+id+FROM+t%29+AS+q+ORDER+BY+id"
	if got := s.requests("/query")[0].query; got != want {
		t.Error(got)
	}
}

func FuzzQueryLines(f *testing.F) {
	f.Add([]byte("{\"holdfast_rows\":1}\n\n{}\r\n"), int64(10), int64(100))
	f.Fuzz(func(t *testing.T, body []byte, maxLine, maxBytes int64) {
		if maxLine < 1 || maxBytes < 1 || maxBytes > 1<<20 {
			return
		}
		var got [][]byte
		err := lines(bytes.NewReader(body), maxLine, maxBytes, func(l []byte) error {
			if int64(len(l)) > maxLine {
				t.Fatalf("a line of %d bytes, the bound is %d", len(l), maxLine)
			}
			got = append(got, bytes.Clone(l))
			return nil
		})
		if err != nil {
			return
		}
		var want [][]byte
		for l := range bytes.SplitSeq(body, []byte("\n")) {
			if l = bytes.TrimSpace(l); len(l) > 0 {
				want = append(want, l)
			}
		}
		if len(want) != len(got) || !bytes.Equal(bytes.Join(want, []byte("\n")), bytes.Join(got, []byte("\n"))) {
			t.Fatalf("%q, want %q", got, want)
		}
	})
}
