package ops

import (
	"fmt"
	"runtime/debug"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// VersionInfo says what was built, as far as the binary knows.
type VersionInfo struct {
	Version   string `json:"version"`    // the module's version, "(devel)" for a plain build
	Revision  string `json:"revision"`   // of the source, "unknown" where it was not recorded
	Modified  bool   `json:"modified"`   // the source differed from the revision
	GoVersion string `json:"go_version"` // of the compiler
}

// Version reads what the Go tool recorded in the running binary.
func Version() VersionInfo {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return versionOf(&debug.BuildInfo{})
	}
	return versionOf(info)
}

func versionOf(info *debug.BuildInfo) VersionInfo {
	v := VersionInfo{Version: info.Main.Version, Revision: "unknown", GoVersion: info.GoVersion}
	if v.Version == "" {
		v.Version = "(devel)"
	}
	if v.GoVersion == "" {
		v.GoVersion = "unknown"
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	return v
}

// String gives "v1.2.3 (revision 0123456789ab, modified, go1.26)".
func (v VersionInfo) String() string {
	revision := v.Revision
	if len(revision) > 12 {
		revision = revision[:12]
	}
	parts := []string{"revision " + revision}
	if v.Modified {
		parts = append(parts, "modified")
	}
	return v.Version + " (" + strings.Join(append(parts, v.GoVersion), ", ") + ")"
}

// NewRegistry makes the registry of one daemon, with the metrics that every
// daemon has: those of the Go runtime and of the process, and
// <daemon>_build_info. daemon is the prefix of the daemon's own metrics.
func NewRegistry(daemon string, v VersionInfo) (*prometheus.Registry, error) {
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: daemon + "_build_info",
		Help: "Always 1; the labels say what was built.",
		ConstLabels: prometheus.Labels{
			"version": v.Version, "revision": v.Revision, "go_version": v.GoVersion,
		},
	})
	info.Set(1)
	r := prometheus.NewRegistry()
	for _, c := range []prometheus.Collector{
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		info,
	} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("register the metrics that every daemon has: %w", err)
		}
	}
	return r, nil
}
