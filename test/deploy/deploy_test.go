// Package deploy_test holds the files under deploy/ against the daemons: what
// they set are settings, what they name exists, and they are as locked up as
// they say.
package deploy_test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"holdfast/internal/config"
	"holdfast/test/harness"
)

const root = "../../deploy"

// load reads a daemon's settings as the daemon would.
func load(daemon string, environ []string) (listen string, err error) {
	if daemon == "pgsource" {
		c, err := config.LoadPGSource(environ)
		if err != nil {
			return "", err
		}
		return c.Listen, nil
	}
	c, err := config.LoadKafkaSink(environ)
	if err != nil {
		return "", err
	}
	return c.Listen, nil
}

// Every field of the manifests is one that Kubernetes knows (strict decoding
// into its own types), the settings are valid, and ports, probes, selectors
// and mounts fit together.
func TestKubernetes(t *testing.T) {
	for _, daemon := range []string{"pgsource", "kafkasink"} {
		t.Run(daemon, func(t *testing.T) {
			file, err := os.ReadFile(filepath.Join(root, "kubernetes", daemon+".yaml"))
			if err != nil {
				t.Fatal(err)
			}
			var secret corev1.Secret
			var service corev1.Service
			var pod corev1.PodTemplateSpec
			var claims []corev1.PersistentVolumeClaim
			for _, doc := range bytes.Split(file, []byte("\n---\n")) {
				var kind struct {
					Kind string `json:"kind"`
				}
				if err := yaml.Unmarshal(doc, &kind); err != nil {
					t.Fatal(err)
				}
				var into any
				var set appsv1.StatefulSet
				var deployment appsv1.Deployment
				switch kind.Kind {
				case "Secret":
					into = &secret
				case "Service":
					into = &service
				case "StatefulSet":
					into = &set
				case "Deployment":
					into = &deployment
				default:
					t.Fatalf("kind %q", kind.Kind)
				}
				if err := yaml.UnmarshalStrict(doc, into); err != nil {
					t.Fatalf("%s: %v", kind.Kind, err)
				}
				switch kind.Kind {
				case "StatefulSet":
					pod, claims = set.Spec.Template, set.Spec.VolumeClaimTemplates
					if *set.Spec.Replicas != 1 {
						t.Error("more than one reader of a slot")
					}
				case "Deployment":
					pod = deployment.Spec.Template
				}
			}
			checkPod(t, daemon, pod, secret, service, claims)
		})
	}
}

func checkPod(t *testing.T, daemon string, pod corev1.PodTemplateSpec, secret corev1.Secret, service corev1.Service, claims []corev1.PersistentVolumeClaim) {
	t.Helper()
	if len(pod.Spec.Containers) != 1 {
		t.Fatalf("%d containers", len(pod.Spec.Containers))
	}
	c := pod.Spec.Containers[0]
	// The files of the secret stand for those that are mounted.
	dir := t.TempDir()
	for name, value := range secret.StringData {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(value), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var environ []string
	for _, e := range c.Env {
		environ = append(environ, e.Name+"="+strings.ReplaceAll(e.Value, "/secrets/", dir+"/"))
	}
	listen, err := load(daemon, environ)
	if err != nil {
		t.Fatalf("the settings: %v", err)
	}
	port := fmt.Sprint(c.Ports[0].ContainerPort)
	if !strings.HasSuffix(listen, ":"+port) || fmt.Sprint(service.Spec.Ports[0].Port) != port || pod.Annotations["prometheus.io/port"] != port {
		t.Errorf("the daemon listens on %s, the pod has port %s, the service %d, the scraper %s", listen, port, service.Spec.Ports[0].Port, pod.Annotations["prometheus.io/port"])
	}
	for key, value := range service.Spec.Selector {
		if pod.Labels[key] != value {
			t.Errorf("the service selects %s=%s, the pod has %q", key, value, pod.Labels[key])
		}
	}
	if p := c.ReadinessProbe.HTTPGet; p.Path != "/readyz" || p.Port.StrVal != c.Ports[0].Name {
		t.Errorf("readiness probe %+v", p)
	}
	if p := c.LivenessProbe.HTTPGet; p.Path != "/livez" || p.Port.StrVal != c.Ports[0].Name {
		t.Errorf("liveness probe %+v", p)
	}
	s := c.SecurityContext
	if !*s.ReadOnlyRootFilesystem || *s.AllowPrivilegeEscalation || !*pod.Spec.SecurityContext.RunAsNonRoot || len(s.Capabilities.Drop) != 1 || s.Capabilities.Drop[0] != "ALL" {
		t.Error("the container is less locked up than it could be")
	}
	if *pod.Spec.EnableServiceLinks || *pod.Spec.AutomountServiceAccountToken {
		t.Error("the pod gets variables or a token that it has no use for")
	}
	volumes := map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		volumes[v.Name] = true
		if v.Secret != nil && v.Secret.SecretName != secret.Name {
			t.Errorf("volume %s has secret %s, the manifest makes %s", v.Name, v.Secret.SecretName, secret.Name)
		}
	}
	for _, v := range claims {
		volumes[v.Name] = true
	}
	for _, m := range c.VolumeMounts {
		if !volumes[m.Name] {
			t.Errorf("mount %s has no volume", m.Name)
		}
	}
}

// The units parse, systemd finds them locked up, and their example settings
// are valid.
func TestSystemd(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Fatal("systemd-analyze is needed: run test/setup.sh deploy")
	}
	for _, daemon := range []string{"pgsource", "kafkasink"} {
		t.Run(daemon, func(t *testing.T) {
			program, err := harness.Build(t.Context(), "./cmd/"+daemon, harness.BuildOptions{})
			if err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(filepath.Join(root, "systemd", daemon+".service"))
			if err != nil {
				t.Fatal(err)
			}
			unit := filepath.Join(t.TempDir(), daemon+".service")
			if err := os.WriteFile(unit, bytes.ReplaceAll(text, []byte("/usr/local/bin/"+daemon), []byte(program)), 0o600); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.CommandContext(t.Context(), analyze, "verify", unit).CombinedOutput(); err != nil || len(bytes.TrimSpace(out)) > 0 {
				t.Errorf("verify: %v\n%s", err, out)
			}
			// 0 is perfect, 10 is open; above the threshold it fails.
			if out, err := exec.CommandContext(t.Context(), analyze, "security", "--offline=true", "--threshold=20", unit).CombinedOutput(); err != nil {
				t.Errorf("security: %v\n%s", err, out)
			}
			settings, err := os.ReadFile(filepath.Join(root, "systemd", daemon+".env"))
			if err != nil {
				t.Fatal(err)
			}
			var environ []string
			for _, line := range strings.Split(string(settings), "\n") {
				if line != "" && !strings.HasPrefix(line, "#") {
					environ = append(environ, line)
				}
			}
			if _, err := load(daemon, environ); err != nil {
				t.Errorf("the example settings: %v", err)
			}
		})
	}
}
