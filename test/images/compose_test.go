package images

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// composeFile is what is looked at of docker-compose.yml, as docker-compose itself
// reads it: names are put in place, forms are the long ones.
type composeFile struct {
	Services map[string]*service `json:"services"`
	Secrets  map[string]struct {
		File string `json:"file"`
	} `json:"secrets"`
	Volumes map[string]any `json:"volumes"`
}

type service struct {
	Image       string            `json:"image"`
	Build       any               `json:"build"`
	Environment map[string]string `json:"environment"`
	Healthcheck *struct {
		Test []string `json:"test"`
	} `json:"healthcheck"`
	Ports []any `json:"ports"`
	// Secrets are names or {source: name, …}; Volumes are "from:to:mode" or {source, target, …}.
	Secrets     []any    `json:"secrets"`
	Volumes     []any    `json:"volumes"`
	Tmpfs       []string `json:"tmpfs"`
	ReadOnly    bool     `json:"read_only"`
	CapDrop     []string `json:"cap_drop"`
	SecurityOpt []string `json:"security_opt"`
	Restart     string   `json:"restart"`
}

// readCompose lets docker-compose read the file.
func readCompose(t *testing.T) composeFile {
	t.Helper()
	program, args := "docker-compose", []string{"config"}
	if _, err := exec.LookPath(program); err != nil {
		program, args = "docker", []string{"compose", "config"}
	}
	var c composeFile
	if err := yaml.Unmarshal([]byte(need(t, nil, repository(t), program, args...)), &c); err != nil {
		t.Fatal(err)
	}
	return c
}

// secrets gives, by name in /run/secrets, the files that a service gets.
func (c composeFile) secrets(t *testing.T, name string) map[string]string {
	t.Helper()
	files := map[string]string{}
	for _, s := range c.Services[name].Secrets {
		source, _ := s.(string)
		if long, ok := s.(map[string]any); ok {
			source, _ = long["source"].(string)
		}
		file := c.Secrets[source].File
		if file == "" {
			t.Errorf("service %s wants secret %v, which is no file", name, s)
			continue
		}
		if !filepath.IsAbs(file) {
			file = filepath.Join(repository(t), file)
		}
		files[source] = file
	}
	return files
}

// runArguments gives what docker run needs to run the service's image as
// docker-compose.yml does.
func (c composeFile) runArguments(t *testing.T, name string) []string {
	t.Helper()
	var args []string
	for _, v := range slices.Sorted(maps.Keys(c.Services[name].Environment)) {
		args = append(args, "--env", v+"="+c.Services[name].Environment[v])
	}
	for secret, file := range c.secrets(t, name) {
		args = append(args, "--volume", file+":/run/secrets/"+secret+":ro")
	}
	for _, m := range c.Services[name].Tmpfs {
		args = append(args, "--tmpfs", m)
	}
	return args
}

// listen gives the port on which the service's daemon listens.
func (c composeFile) listen(t *testing.T, name string) string {
	t.Helper()
	port := map[string]string{"pgsource": "8081", "kafkasink": "8082"}[name]
	if len(published(c.Services[name].Ports)) == 0 {
		t.Errorf("service %s publishes no port", name)
	}
	return port
}

// published gives ports as "address:port:port".
func published(ports []any) []string {
	var list []string
	for _, p := range ports {
		switch p := p.(type) {
		case string: // the old docker-compose: "host:port:port/tcp"
			list = append(list, strings.TrimSuffix(p, "/tcp"))
		case map[string]any:
			host, _ := p["host_ip"].(string)
			from, _ := p["published"].(string)
			list = append(list, host+":"+from)
		}
	}
	return list
}

// pinned is an image with a version or a digest; "latest", or nothing, is none.
var pinned = regexp.MustCompile(`(:v?[0-9]+\.[0-9][0-9A-Za-z.-]*|@sha256:[0-9a-f]{64})$`)

// What a reader of docker-compose.yml is promised.
func TestCompose(t *testing.T) {
	c := readCompose(t)
	for _, name := range []string{"postgres", "kafka", "feldera", "pgsource", "kafkasink", "prometheus", "grafana", "postgres-rows", "kafka-rows"} {
		if c.Services[name] == nil {
			t.Fatalf("docker-compose.yml has no service %s", name)
		}
	}
	file, err := os.ReadFile(filepath.Join(repository(t), "docker-compose.yml"))
	if err != nil {
		t.Fatal(err)
	}
	for name, s := range c.Services {
		own := s.Build != nil
		if !own && !pinned.MatchString(s.Image) {
			t.Errorf("service %s has the image %s, whose version is not pinned", name, s.Image)
		}
		if s.Restart != "no" && !own && s.Healthcheck == nil && !strings.HasSuffix(name, "-rows") { // the generators serve nobody
			t.Errorf("service %s has no health check", name)
		}
		for _, p := range published(s.Ports) {
			if !strings.HasPrefix(p, "127.0.0.1:") {
				t.Errorf("service %s publishes %s to others than this machine", name, p)
			}
		}
		for variable, value := range s.Environment {
			if strings.Contains(variable, "PASSWORD") && !strings.HasPrefix(value, "/run/secrets/") || strings.Contains(variable, "DSN") && !strings.HasPrefix(value, "/run/secrets/") {
				t.Errorf("service %s has a secret in its environment: %s", name, variable)
			}
			if secret, ok := strings.CutPrefix(value, "/run/secrets/"); ok && c.secrets(t, name)[secret] == "" {
				t.Errorf("service %s reads %s, which is not mounted", name, value)
			}
		}
		for _, v := range s.Volumes {
			checkMount(t, c, name, v)
		}
	}
	for _, name := range []string{"pgsource", "kafkasink"} {
		s := c.Services[name]
		if !s.ReadOnly || !slices.Equal(s.CapDrop, []string{"ALL"}) || !slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
			t.Errorf("service %s is less locked up than it could be", name)
		}
	}
	// The two files with Postgres' password agree, and no secret is in the file
	// itself.
	password := secretText(t, c, "postgres-password")
	if dsn := secretText(t, c, "pgsource-dsn"); !strings.Contains(dsn, "://postgres:"+password+"@postgres:5432/") {
		t.Error("the password in pgsource-dsn is not that of postgres-password, or it goes elsewhere")
	}
	if strings.Contains(string(file), ":"+password+"@") {
		t.Error("docker-compose.yml has a password in it")
	}
}

func secretText(t *testing.T, c composeFile, name string) string {
	t.Helper()
	text, err := os.ReadFile(c.Secrets[name].File)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// checkMount holds that what is mounted is a volume of the file, or is there.
func checkMount(t *testing.T, c composeFile, name string, v any) {
	t.Helper()
	source := ""
	switch v := v.(type) {
	case string:
		source, _, _ = strings.Cut(v, ":")
	case map[string]any:
		source, _ = v["source"].(string)
	}
	if _, ok := c.Volumes[source]; ok {
		return
	}
	if _, err := os.Stat(source); err != nil {
		t.Errorf("service %s mounts %v: %v", name, v, err)
	}
}

// What is provisioned in Grafana fits together: the dashboard lies where its
// provider looks, the data source is the Prometheus of the file, and the
// dashboard asks for no other.
func TestGrafanaProvisioning(t *testing.T) {
	c := readCompose(t)
	read := func(path string, into any) {
		text, err := os.ReadFile(filepath.Join(repository(t), "deploy", "grafana", path))
		if err == nil {
			err = yaml.UnmarshalStrict(text, into)
		}
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
	}
	var sources struct {
		APIVersion  int `json:"apiVersion"`
		Datasources []struct {
			Name      string `json:"name"`
			UID       string `json:"uid"`
			Type      string `json:"type"`
			Access    string `json:"access"`
			URL       string `json:"url"`
			IsDefault bool   `json:"isDefault"`
		} `json:"datasources"`
	}
	read("provisioning/datasources/prometheus.yml", &sources)
	if len(sources.Datasources) != 1 || !sources.Datasources[0].IsDefault || sources.Datasources[0].Type != "prometheus" || sources.Datasources[0].URL != "http://prometheus:9090" {
		t.Errorf("data sources %+v", sources)
	}
	var providers struct {
		APIVersion int `json:"apiVersion"`
		Providers  []struct {
			Name    string            `json:"name"`
			Type    string            `json:"type"`
			Options map[string]string `json:"options"`
		} `json:"providers"`
	}
	read("provisioning/dashboards/holdfast.yml", &providers)
	if len(providers.Providers) != 1 || providers.Providers[0].Type != "file" {
		t.Fatalf("providers %+v", providers)
	}
	folder, mounted := providers.Providers[0].Options["path"], false
	for _, v := range c.Services["grafana"].Volumes {
		text, _ := v.(string)
		if long, ok := v.(map[string]any); ok {
			from, _ := long["source"].(string)
			to, _ := long["target"].(string)
			text = from + ":" + to
		}
		mounted = mounted || strings.Contains(text, "/deploy/grafana/holdfast.json:"+folder+"/")
	}
	if !mounted {
		t.Errorf("the dashboard is not mounted into %s, where its provider looks", folder)
	}
	if home := c.Services["grafana"].Environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]; !strings.HasPrefix(home, folder+"/") {
		t.Errorf("Grafana's home is %s, not the dashboard in %s", home, folder)
	}
}
