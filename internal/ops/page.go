package ops

import (
	"bytes"
	"cmp"
	"embed"
	"encoding/json"
	"fmt"
	"html/template"
	"maps"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Page says what the status page of a daemon shows beside its checks. All of
// it is read from the daemon's own metrics, so the page and /metrics cannot
// disagree.
type Page struct {
	// Positions is the family of gauges with the label "rung": what has reached
	// which rung of evidence. Labels beside it tell lanes apart.
	Positions string
	// Unit is what the difference of two positions counts: "bytes", "records".
	Unit string
	// FormatPosition writes a position for people; nil = as a number.
	FormatPosition func(uint64) string
	// Charts are shown with their history.
	Charts []Chart
	// Counts are families of counters that are shown as a table, one row for
	// each set of labels.
	Counts []Count
	// Facts are families of gauges that are shown with their last value.
	Facts []string
	// Settings are the settings in force, without secrets.
	Settings []SettingRow
}

// Families names the metrics that the page reads, for a test that the daemon has
// them.
func (p Page) Families() []string {
	names := append([]string{p.Positions}, p.Facts...)
	for _, c := range p.Charts {
		names = append(names, c.Metric)
	}
	for _, c := range p.Counts {
		names = append(names, c.Metric)
	}
	return names
}

// Chart is a number over time. The series of the family are added up, or the
// highest counts.
type Chart struct {
	Metric  string
	Title   string
	Highest bool
}

// Count is a table of counters.
type Count struct{ Metric, Title string }

// SettingRow is one setting as it may be shown.
type SettingRow struct{ Name, Value, Source string }

// SettingRows makes the rows of the page from the rows of a configuration.
func SettingRows[T any](rows []T, row func(T) SettingRow) []SettingRow {
	list := make([]SettingRow, len(rows))
	for i, r := range rows {
		list[i] = row(r)
	}
	return list
}

// rungs are the rungs of evidence in the order of the picture.
var rungs = []string{"received", "accepted", "ingested", "completed", "durable", "acknowledged"}

const (
	// maxPageRows bounds each table of the page: a member may have thousands
	// of partitions, and the page is for a person.
	maxPageRows = 200
	// chartWidth and chartHeight are the coordinates of a sparkline.
	chartWidth, chartHeight = 240, 40
)

//go:embed page
var pageFiles embed.FS

var pageTemplate = template.Must(template.New("page.html").ParseFS(pageFiles, "page/page.html"))

// view is what the template shows.
type view struct {
	Daemon, Version, Status, Phase string
	Now, Up                        string
	Ready                          bool
	Unready                        []Unready
	Checks                         []checkView
	Rungs                          []rungView
	Lanes                          []laneView
	LanesLeftOut                   int
	LaneLabels                     []string
	Unit                           string
	Charts                         []chartView
	Counts                         []countView
	Facts                          []factView
	Failures                       []failureView
	Settings                       []SettingRow
	Fault                          string
}

type checkView struct {
	CheckReport
	Age string
}

type rungView struct {
	Name, Position string
	// Waiting is what has reached this rung and not the next one: "" at the
	// last.
	Waiting string
	Behind  bool
}

type laneView struct {
	Labels    []string
	Positions []string
}

type chartView struct {
	Title, Value, Least, Most, Help string
	Points                          string // of an SVG polyline
	Span                            string
}

type countView struct {
	Title   string
	Labels  []string
	Rows    []countRow
	LeftOut int
}

type countRow struct {
	Labels []string
	Value  string
}

type factView struct{ Name, Value, Help string }

type failureView struct {
	What, Text, First, Last string
	Count                   int
}

// pageHandler answers with the page, its assets and the same as JSON.
func pageHandler(mux *http.ServeMux, opts ServerOptions) {
	started := opts.Now()
	opts.Gatherer = &glance{from: opts.Gatherer, now: opts.Now}
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		var b bytes.Buffer
		if err := pageTemplate.Execute(&b, newView(opts, started)); err != nil {
			http.Error(w, "the page cannot be made; see /healthz", http.StatusInternalServerError)
			opts.Logger.ErrorContext(r.Context(), "make the status page", "err", err)
			return
		}
		h := w.Header()
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		h.Set("Referrer-Policy", "no-referrer")
		_, _ = w.Write(b.Bytes()) // the client is gone: nobody to tell
	})
	for name, contentType := range map[string]string{"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml"} {
		body, err := pageFiles.ReadFile("page/" + name)
		if err != nil {
			panic(err) // embedded in this binary
		}
		mux.HandleFunc("GET /"+name, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", contentType)
			_, _ = w.Write(body) // as above
		})
	}
	mux.HandleFunc("GET /status.json", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(newView(opts, started)) // as above
	})
}

func newView(opts ServerOptions, started time.Time) view {
	now := opts.Now()
	report, ready := opts.Health.Report(), opts.Health.Readiness()
	v := view{
		Daemon: opts.Daemon, Version: Version().String(), Status: report.Status, Phase: report.Phase,
		Now: now.UTC().Format(time.RFC3339), Up: age(now.Sub(started)),
		Ready: ready.Ready, Unready: ready.Reasons, Unit: opts.Page.Unit, Settings: opts.Page.Settings,
	}
	for _, c := range report.Checks {
		v.Checks = append(v.Checks, checkView{c, age(now.Sub(c.Since))})
	}
	if opts.Repeats != nil {
		for _, f := range opts.Repeats.List() {
			v.Failures = append(v.Failures, failureView{f.What, f.Text, age(now.Sub(f.First)) + " ago", age(now.Sub(f.Last)) + " ago", f.Count})
		}
	}
	byName, err := gather(opts.Gatherer)
	if err != nil {
		v.Fault = "some metrics could not be read: " + bounded(err.Error())
	}
	v.positions(&opts.Page, byName[opts.Page.Positions])
	for _, c := range opts.Page.Counts {
		if f := byName[c.Metric]; f != nil {
			v.Counts = append(v.Counts, newCount(c.Title, f))
		}
	}
	for _, name := range opts.Page.Facts {
		if f := byName[name]; f != nil {
			v.Facts = append(v.Facts, facts(f, now)...)
		}
	}
	if opts.History != nil {
		v.Charts = opts.History.charts()
	}
	return v
}

// positions fills in the picture of the rungs, and one row for each lane where
// there are several.
func (v *view) positions(page *Page, f *dto.MetricFamily) {
	format := page.FormatPosition
	if format == nil {
		format = func(n uint64) string { return grouped(float64(n)) }
	}
	lanes := make(map[string]map[string]float64) // labels → rung → position
	labels := make(map[string][]string)
	for _, m := range f.GetMetric() {
		var key, rung string
		var values []string
		for _, l := range m.GetLabel() {
			if l.GetName() == "rung" {
				rung = l.GetValue()
				continue
			}
			if len(lanes) == 0 {
				v.LaneLabels = append(v.LaneLabels, l.GetName())
			}
			key += "\x00" + l.GetValue()
			values = append(values, l.GetValue())
		}
		if lanes[key] == nil {
			lanes[key], labels[key] = make(map[string]float64), values
		}
		lanes[key][rung] = valueOf(m)
	}
	if len(lanes) == 0 {
		v.LaneLabels = nil
		return
	}
	var shown []string // rungs that occur
	for _, rung := range rungs {
		for _, at := range lanes {
			if _, ok := at[rung]; ok {
				shown = append(shown, rung)
				break
			}
		}
	}
	for i, rung := range shown {
		r := rungView{Name: rung}
		if len(lanes) == 1 {
			for _, at := range lanes {
				r.Position = format(uint64(max(at[rung], 0)))
			}
		} else {
			r.Position = fmt.Sprintf("%d lanes", len(lanes))
		}
		if i+1 < len(shown) {
			waiting := 0.0
			for _, at := range lanes {
				// A lane that has nothing on a rung yet has everything before it.
				if next, ok := at[shown[i+1]]; ok {
					waiting += max(at[rung]-next, 0)
				}
			}
			r.Waiting, r.Behind = quantity(waiting, page.Unit), waiting > 0
		}
		v.Rungs = append(v.Rungs, r)
	}
	if len(v.LaneLabels) == 0 {
		return
	}
	keys := slices.SortedFunc(maps.Keys(lanes), func(a, b string) int { return natural(labels[a], labels[b]) })
	if len(keys) > maxPageRows {
		v.LanesLeftOut = len(keys) - maxPageRows
		keys = keys[:maxPageRows]
	}
	for _, key := range keys {
		l := laneView{Labels: labels[key]}
		for _, rung := range shown {
			at, ok := lanes[key][rung]
			if !ok {
				l.Positions = append(l.Positions, "–")
				continue
			}
			l.Positions = append(l.Positions, format(uint64(max(at, 0))))
		}
		v.Lanes = append(v.Lanes, l)
	}
}

// natural orders label values; numbers by their value.
func natural(a, b []string) int {
	return slices.CompareFunc(a, b, func(x, y string) int {
		n, errN := strconv.Atoi(x)
		m, errM := strconv.Atoi(y)
		if errN == nil && errM == nil {
			return cmp.Compare(n, m)
		}
		return cmp.Compare(x, y)
	})
}

func newCount(title string, f *dto.MetricFamily) countView {
	c := countView{Title: title}
	for i, m := range f.GetMetric() {
		if i == 0 {
			for _, l := range m.GetLabel() {
				c.Labels = append(c.Labels, l.GetName())
			}
		}
		if len(c.Rows) >= maxPageRows {
			c.LeftOut++
			continue
		}
		row := countRow{Value: grouped(valueOf(m))}
		for _, l := range m.GetLabel() {
			row.Labels = append(row.Labels, l.GetValue())
		}
		c.Rows = append(c.Rows, row)
	}
	slices.SortStableFunc(c.Rows, func(a, b countRow) int { return natural(a.Labels, b.Labels) })
	return c
}

// facts gives a gauge for people. Of a family that marks one of several values
// with 1, that value is the fact.
func facts(f *dto.MetricFamily, now time.Time) []factView {
	marks, marked := len(f.GetMetric()) > 1, ""
	for _, m := range f.GetMetric() {
		value := valueOf(m)
		marks = marks && len(m.GetLabel()) == 1 && (value == 0 || value == 1)
		if value == 1 && len(m.GetLabel()) == 1 {
			marked = m.GetLabel()[0].GetValue()
		}
	}
	if marks {
		return []factView{{f.GetName(), cmp.Or(marked, "–"), f.GetHelp()}}
	}
	var list []factView
	for _, m := range f.GetMetric() {
		name := f.GetName()
		for _, l := range m.GetLabel() {
			name += " " + l.GetValue()
		}
		if len(list) == maxPageRows {
			break
		}
		list = append(list, factView{name, measured(f.GetName(), valueOf(m), now), f.GetHelp()})
	}
	return list
}

func valueOf(m *dto.Metric) float64 {
	switch {
	case m.GetGauge() != nil:
		return m.GetGauge().GetValue()
	case m.GetCounter() != nil:
		return m.GetCounter().GetValue()
	case m.GetUntyped() != nil:
		return m.GetUntyped().GetValue()
	}
	return math.NaN()
}

// measured writes a value in the unit that the metric's name tells.
func measured(name string, value float64, now time.Time) string {
	switch {
	case math.IsNaN(value) || math.IsInf(value, 0):
		return "–"
	case strings.HasSuffix(name, "_timestamp_seconds"):
		if value <= 0 {
			return "never"
		}
		return age(now.Sub(time.UnixMicro(int64(value*1e6)))) + " ago"
	case strings.HasSuffix(name, "_seconds"), strings.HasSuffix(name, "_seconds_total"):
		return age(time.Duration(min(value, math.MaxInt64/2e9) * float64(time.Second)))
	case strings.HasSuffix(name, "_bytes"), strings.HasSuffix(name, "_bytes_total"):
		return quantity(value, "bytes")
	}
	return grouped(value)
}

// quantity writes a number with its unit; bytes in powers of 1024.
func quantity(value float64, unit string) string {
	if unit != "bytes" {
		return strings.TrimSpace(grouped(value) + " " + unit)
	}
	for _, prefix := range []string{"B", "KiB", "MiB", "GiB"} {
		if math.Abs(value) < 1024 {
			if prefix == "B" {
				return fmt.Sprintf("%.0f B", value)
			}
			return fmt.Sprintf("%.1f %s", value, prefix)
		}
		value /= 1024
	}
	return fmt.Sprintf("%.1f TiB", value)
}

// grouped writes a number with its thousands apart.
func grouped(value float64) string {
	if value != math.Trunc(value) || math.Abs(value) >= 1e15 {
		return strconv.FormatFloat(value, 'g', 6, 64)
	}
	digits := strconv.FormatInt(int64(math.Abs(value)), 10)
	var b strings.Builder
	if value < 0 {
		b.WriteByte('-')
	}
	for i, c := range digits {
		if i > 0 && (len(digits)-i)%3 == 0 {
			b.WriteString("\u202f") // a narrow space that does not break
		}
		b.WriteRune(c)
	}
	return b.String()
}

// age writes how long something took or is ago, in at most two units.
func age(d time.Duration) string {
	switch {
	case d < 0:
		return "0 s"
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%d d %d h", int(d.Hours())/24, int(d.Hours())%24)
}

// read gives the chart's number; false where the family has none.
func (c Chart) read(families map[string]*dto.MetricFamily) (float64, bool) {
	f := families[c.Metric]
	if len(f.GetMetric()) == 0 {
		return 0, false
	}
	sum, most := 0.0, math.Inf(-1)
	for _, m := range f.GetMetric() {
		value := valueOf(m)
		sum += value
		most = max(most, value)
	}
	if c.Highest {
		return most, !math.IsNaN(most)
	}
	return sum, !math.IsNaN(sum)
}

// gather reads all metrics by name; with an error, those that could be read.
func gather(g prometheus.Gatherer) (map[string]*dto.MetricFamily, error) {
	families, err := g.Gather()
	byName := make(map[string]*dto.MetricFamily, len(families))
	for _, f := range families {
		byName[f.GetName()] = f
	}
	return byName, err //nolint:wrapcheck // the registry's own words
}
