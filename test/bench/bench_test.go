package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

// TestMain lets the test binary stand for the program as its own child too.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && children[os.Args[1]] != nil {
		main()
		return
	}
	goleak.VerifyTestMain(m)
}

// The whole benchmark, small: both servers, every program once or twice.
func TestBenchMeasuresBothDaemons(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute) // building the programs counts too
	defer cancel()
	file := filepath.Join(t.TempDir(), "out.json")
	var out, errs bytes.Buffer
	code := run(ctx, []string{"-rounds", "2", "-rows", "5000", "-records", "4000", "-json", file}, &out, &errs)
	t.Log(out.String(), errs.String())
	if code != 0 {
		t.Fatalf("exit code %d", code)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range r.Series {
		if want := 2 * len(s.Summary); len(s.Runs) != want {
			t.Errorf("%s: %d runs, want %d: each program twice", s.Workload, len(s.Runs), want)
		}
		for _, q := range s.Runs {
			if q.Seconds <= 0 || q.CPUSeconds <= 0 || q.PeakBytes < 1<<20 {
				t.Errorf("%s: a run without a measure: %+v", s.Workload, q)
			}
		}
		for _, m := range s.Summary {
			got = append(got, m.Program)
			if !strings.Contains(out.String(), m.Program) {
				t.Errorf("%s is not in the table", m.Program)
			}
		}
	}
	if diff := cmp.Diff([]string{"pg_recvlogical", "pgsource", "pgsource, peek", "franz-go, bare", "kafkasink"}, got); diff != "" {
		t.Errorf("programs (-want +got):\n%s", diff)
	}
}

func TestSummaryPairsTheRounds(t *testing.T) {
	s := series{Count: 100, Runs: []result{
		{Program: "ref", Round: 1, Seconds: 1, usage: usage{PeakBytes: 7, CPUSeconds: 1}},
		{Program: "sub", Round: 1, Seconds: 2},
		{Program: "ref", Round: 2, Seconds: 4, usage: usage{PeakBytes: 9, CPUSeconds: 2}},
		{Program: "sub", Round: 2, Seconds: 4},
	}}
	s.summarise()
	want := []summary{
		{Program: "ref", Median: 62.5, Min: 25, Max: 100, Paired: 1, PeakBytes: 9, CPU: 1.5},
		{Program: "sub", Median: 37.5, Min: 25, Max: 50, Paired: 0.75},
	}
	if diff := cmp.Diff(want, s.Summary); diff != "" {
		t.Errorf("summary (-want +got):\n%s", diff)
	}
}

func TestRecordIsJSONOfTheSizeThatIsSaid(t *testing.T) {
	for _, id := range []int{0, 199_999} {
		b := orderJSON(id, time.Date(2026, 1, 2, 3, 4, 5, 123456000, time.UTC))
		if !json.Valid(b) || len(b) < 270 || len(b) > 330 {
			t.Errorf("%d bytes, valid %t: %s", len(b), json.Valid(b), b)
		}
	}
}

func TestWrongCommandLine(t *testing.T) {
	for _, args := range [][]string{{"-rounds", "0"}, {"-rows", "3"}, {"-records", "1"}, {"-only", "x"}, {"x"}, {"-nosuch"}} {
		var out, errs bytes.Buffer
		if code := run(t.Context(), args, &out, &errs); code != 2 || errs.Len() == 0 {
			t.Errorf("%v: exit code %d, %q", args, code, errs.String())
		}
	}
}
