package main

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"
)

// report is what -json writes. Fields may be added, and keep their meaning.
type report struct {
	Started     time.Time `json:"started"`
	Go          string    `json:"go"`
	CPUs        int       `json:"cpus"`
	LoadAtStart string    `json:"load_at_start"`
	Series      []series  `json:"series"`
}

// series is one reference and its subjects, which took turns over the same data.
type series struct {
	Workload string    `json:"workload"`
	Unit     string    `json:"unit"`  // of Count: rows or records
	Count    int       `json:"count"` // that each run carries
	Notes    []string  `json:"notes"`
	Runs     []result  `json:"runs"` // round by round, the reference first
	Summary  []summary `json:"summary"`
}

// result is one run of one program.
type result struct {
	Program string  `json:"program"`
	Round   int     `json:"round"`
	Seconds float64 `json:"seconds"` // from the start of the process to the end of its work
	usage
}

// summary is one program over all rounds.
type summary struct {
	Program   string  `json:"program"`
	Median    float64 `json:"median_per_second"`
	Min       float64 `json:"min_per_second"`
	Max       float64 `json:"max_per_second"`
	Paired    float64 `json:"paired_ratio"` // median over rounds of the reference's time by this program's
	PeakBytes int64   `json:"peak_rss_bytes"`
	CPU       float64 `json:"cpu_seconds"` // median over rounds
}

// summarise fills Summary from Runs. The first program is the reference.
func (s *series) summarise() {
	s.Summary = nil
	seen := map[string]bool{}
	reference := map[int]float64{}
	for _, r := range s.Runs {
		if r.Program == s.Runs[0].Program {
			reference[r.Round] = r.Seconds
		}
	}
	for _, r := range s.Runs {
		if seen[r.Program] {
			continue
		}
		seen[r.Program] = true
		var rates, ratios, cpu []float64
		m := summary{Program: r.Program}
		for _, q := range s.Runs {
			if q.Program != r.Program {
				continue
			}
			rates = append(rates, float64(s.Count)/q.Seconds)
			ratios = append(ratios, reference[q.Round]/q.Seconds)
			cpu = append(cpu, q.CPUSeconds)
			m.PeakBytes = max(m.PeakBytes, q.PeakBytes)
		}
		m.Median, m.Min, m.Max = median(rates), slices.Min(rates), slices.Max(rates)
		m.Paired, m.CPU = median(ratios), median(cpu)
		s.Summary = append(s.Summary, m)
	}
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// print writes the table.
func (s *series) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintf(out, "\n%s\n", s.Workload)
	_, _ = fmt.Fprintf(w, "program\tmedian %s/s\tmin–max\tpaired\tpeak RSS MiB\tCPU s\t\n", s.Unit)
	for _, m := range s.Summary {
		_, _ = fmt.Fprintf(w, "%s\t%.0f\t%.0f–%.0f\t%.2f\t%.1f\t%.2f\t\n", m.Program, m.Median, m.Min, m.Max, m.Paired, float64(m.PeakBytes)/(1<<20), m.CPU)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, note := range s.Notes {
		if _, err := fmt.Fprintf(out, "  %s\n", note); err != nil {
			return err
		}
	}
	return nil
}
