package deploy_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// metricName finds our metrics in an expression.
var metricName = regexp.MustCompile(`\b(?:pgsource|kafkasink)_[a-z_]+\b`)

// known are the metrics of the reference page, which a test of each daemon
// compares with its registry.
func known(t *testing.T) []string {
	t.Helper()
	page, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| (\\w+)").FindAllStringSubmatch(string(page), -1) {
		names = append(names, row[1])
		if row[2] == "histogram" {
			names = append(names, row[1]+"_bucket", row[1]+"_sum", row[1]+"_count")
		}
	}
	if len(names) < 40 {
		t.Fatalf("the reference page has %d metrics", len(names))
	}
	return names
}

func checkExpression(t *testing.T, where, expr string, names []string) {
	t.Helper()
	used := metricName.FindAllString(expr, -1)
	if len(used) == 0 && !strings.Contains(expr, "up{") {
		t.Errorf("%s: %s has no metric of ours", where, expr)
	}
	for _, name := range used {
		if !slices.Contains(names, name) {
			t.Errorf("%s: there is no metric %s", where, name)
		}
	}
}

func promtool(t *testing.T, args ...string) {
	t.Helper()
	path, err := exec.LookPath("promtool")
	if err != nil {
		t.Fatal("promtool is needed: run test/setup.sh deploy")
	}
	cmd := exec.CommandContext(t.Context(), path, args...)
	cmd.Dir = filepath.Join(root, "prometheus")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// Every alert is of metrics that there are, fires when it should (by its rule
// test) and has a section in the runbook.
func TestAlerts(t *testing.T) {
	promtool(t, "check", "config", "prometheus.yml")
	promtool(t, "test", "rules", "holdfast.rules.test.yml")
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert       string            `json:"alert"`
				Expr        string            `json:"expr"`
				Labels      map[string]string `json:"labels"`
				Annotations map[string]string `json:"annotations"`
			} `json:"rules"`
		} `json:"groups"`
	}
	file, err := os.ReadFile(filepath.Join(root, "prometheus", "holdfast.rules.yml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(file, &rules); err != nil {
		t.Fatal(err)
	}
	tests, err := os.ReadFile(filepath.Join(root, "prometheus", "holdfast.rules.test.yml"))
	if err != nil {
		t.Fatal(err)
	}
	runbook, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	names, alerts := known(t), 0
	for _, group := range rules.Groups {
		for _, r := range group.Rules {
			alerts++
			checkExpression(t, r.Alert, r.Expr, names)
			if !strings.Contains(string(tests), `alertname="`+r.Alert+`"`) {
				t.Errorf("%s has no test that it fires", r.Alert)
			}
			if !strings.Contains(string(runbook), "### "+r.Alert+"\n") {
				t.Errorf("%s has no section in docs/operations.md", r.Alert)
			}
			if r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
				t.Errorf("%s says too little", r.Alert)
			}
		}
	}
	if alerts == 0 {
		t.Fatal("no alerts")
	}
}

// Every panel of the dashboard is of metrics that there are.
func TestDashboard(t *testing.T) {
	file, err := os.ReadFile(filepath.Join(root, "grafana", "holdfast.json"))
	if err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Panels []struct {
			Title   string `json:"title"`
			Type    string `json:"type"`
			Targets []struct {
				Expr string `json:"expr"`
			} `json:"targets"`
		} `json:"panels"`
	}
	if err := json.Unmarshal(file, &dashboard); err != nil {
		t.Fatal(err)
	}
	names, expressions := known(t), 0
	var all strings.Builder
	all.WriteString("groups:\n  - name: panels\n    rules:\n")
	for _, p := range dashboard.Panels {
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q shows nothing", p.Title)
		}
		for _, target := range p.Targets {
			expressions++
			checkExpression(t, p.Title, target.Expr, names)
			expr := strings.ReplaceAll(strings.ReplaceAll(target.Expr, "$__rate_interval", "1m"), "$instance", ".*")
			line, err := json.Marshal(expr)
			if err != nil {
				t.Fatal(err)
			}
			all.WriteString("      - {record: panel, expr: " + string(line) + ", labels: {n: \"" + strings.Repeat("x", expressions) + "\"}}\n")
		}
	}
	// As rules, so that promtool parses each expression.
	path := filepath.Join(t.TempDir(), "panels.yml")
	if err := os.WriteFile(path, []byte(all.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	promtool(t, "check", "rules", "--lint=none", path)
	if expressions < 20 {
		t.Errorf("%d expressions", expressions)
	}
}
