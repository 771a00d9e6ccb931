package opstest

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// Metric is what a registry promises of one family, whether it has values yet
// or not.
type Metric struct {
	Name, Type, Help string
	Labels           []string
}

// descText is how a Desc writes itself, the only way in which it says anything.
var descText = regexp.MustCompile(`^Desc\{fqName: ("(?:[^"\\]|\\.)*"), help: ("(?:[^"\\]|\\.)*"), (?:unit: "[^"]*", )?constLabels: \{(.*?)\}, variableLabels: \{(.*?)\}`)

// Metrics lists the families of a registry whose names begin with prefix, by
// name. What the Go runtime and the process have is not ours.
func Metrics(tb testing.TB, r *prometheus.Registry, prefix string) []Metric {
	tb.Helper()
	ch := make(chan *prometheus.Desc)
	go func() { r.Describe(ch); close(ch) }()
	// A family without values has only a description, which has no type: then
	// the conventions of names have to do.
	families, err := r.Gather()
	if err != nil {
		tb.Fatalf("gather the metrics: %v", err)
	}
	types := make(map[string]string, len(families))
	for _, f := range families {
		types[f.GetName()] = strings.ToLower(f.GetType().String())
	}
	var list []Metric
	for desc := range ch {
		parts := descText.FindStringSubmatch(desc.String())
		if parts == nil {
			tb.Fatalf("a description that cannot be read: %s", desc)
		}
		m := Metric{Name: unquote(tb, parts[1]), Help: unquote(tb, parts[2])}
		if !strings.HasPrefix(m.Name, prefix) {
			continue
		}
		for _, label := range strings.Split(parts[3], ",") {
			if name, _, found := strings.Cut(label, "="); found {
				m.Labels = append(m.Labels, name)
			}
		}
		for _, label := range strings.Split(parts[4], ",") {
			if label != "" {
				m.Labels = append(m.Labels, strings.Trim(label, "{} "))
			}
		}
		switch known := types[m.Name]; {
		case known != "":
			m.Type = known
		case strings.HasSuffix(m.Name, "_total"):
			m.Type = "counter"
		case strings.HasSuffix(m.Name, "_duration_seconds"):
			m.Type = "histogram"
		default:
			m.Type = "gauge"
		}
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b Metric) int { return strings.Compare(a.Name, b.Name) })
	return list
}

func unquote(tb testing.TB, text string) string {
	tb.Helper()
	var s string
	if _, err := fmt.Sscanf(text, "%q", &s); err != nil {
		tb.Fatalf("unquote %s: %v", text, err)
	}
	return s
}

// Daemon holds the metrics of a daemon that was made and not run against what is
// promised of them: they follow the naming conventions, the part of the reference
// page at path that carries the daemon's name lists them (with update it is
// written anew), and the status page, which reads the families shown, shows none
// that the registry has not.
func Daemon(tb testing.TB, r *prometheus.Registry, daemon, path string, shown []string, update bool) {
	tb.Helper()
	metrics := Metrics(tb, r, daemon+"_")
	Reference(tb, path, daemon, metrics, update)
	LintMetrics(tb, r)
	for _, name := range shown {
		if !slices.ContainsFunc(metrics, func(m Metric) bool { return m.Name == name }) {
			tb.Errorf("the status page shows %s, which is not in the registry", name)
		}
	}
}

// Reference compares the part of a page between the two comments that carry
// name with the metrics; with update it writes them there.
func Reference(tb testing.TB, path, name string, metrics []Metric, update bool) {
	tb.Helper()
	var b strings.Builder
	b.WriteString("\n| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n")
	for _, m := range metrics {
		labels := make([]string, len(m.Labels))
		for i, l := range m.Labels {
			labels[i] = "`" + l + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.Name, m.Type, strings.Join(labels, ", "), strings.ReplaceAll(m.Help, "|", "\\|"))
	}
	b.WriteString("\n")
	page, err := os.ReadFile(path) //nolint:gosec // a test names it
	if err != nil {
		tb.Fatal(err)
	}
	begin, end := "<!-- "+name+" begins -->\n", "<!-- "+name+" ends -->"
	head, rest, okBegin := strings.Cut(string(page), begin)
	got, tail, okEnd := strings.Cut(rest, end)
	if !okBegin || !okEnd {
		tb.Fatalf("%s has no place for %s", path, name)
	}
	switch {
	case got == b.String():
	case update:
		if err := os.WriteFile(path, []byte(head+begin+b.String()+end+tail), 0o600); err != nil { //nolint:gosec // a test names it
			tb.Fatal(err)
		}
	default:
		tb.Errorf("%s does not say what the registry of %s says; write it anew with: go test -p 1 ./cmd/... -update", path, name)
	}
}
