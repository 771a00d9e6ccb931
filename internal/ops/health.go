package ops

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Phase is what a daemon is doing as a whole.
type Phase uint8

// The phases, a closed set: they are the values of a metric's label.
const (
	PhaseConnecting Phase = iota // no data can flow yet
	PhaseSnapshot                // existing rows are being copied
	PhaseCatchup                 // streaming, far behind the source
	PhaseStreaming               // streaming
	// PhaseNeedsResync: streaming, and the destination lacks what was
	// acknowledged, or may.
	PhaseNeedsResync
	PhaseBlocked  // nothing goes on until a person has acted
	PhaseStopping // the last one: told to stop
	phases
)

// String gives the label's value.
func (p Phase) String() string {
	switch p {
	case PhaseConnecting:
		return "connecting"
	case PhaseSnapshot:
		return "snapshot"
	case PhaseCatchup:
		return "catchup"
	case PhaseStreaming:
		return "streaming"
	case PhaseNeedsResync:
		return "needs_resync"
	case PhaseBlocked:
		return "blocked"
	case PhaseStopping:
		return "stopping"
	default:
		return "invalid"
	}
}

const (
	// maxChecks bounds the named checks, and the ready conditions. Names
	// beyond it share the entry overflowName, so that nothing that blocks is
	// lost, whoever makes the names.
	maxChecks    = 256
	overflowName = "other"
	// maxMessage bounds each text of a check, in bytes.
	maxMessage = 2048
	// defaultLiveAfter is far above any pause of a healthy main loop.
	defaultLiveAfter = time.Minute
)

// Check is the state of one named thing that a person can look at.
type Check struct {
	OK bool
	// Blocking: while this is not OK, a person has to act; waiting does not
	// help. It makes /healthz answer 503.
	Blocking bool
	Message  string // what is so
	Hint     string // what to do about it, "" when OK
}

// HealthOptions says what a Health needs.
type HealthOptions struct {
	// Daemon is the prefix of the metric's name.
	Daemon string
	// Now gives the time. Required.
	Now func() time.Time
	// Registerer takes <daemon>_phase. Required.
	Registerer prometheus.Registerer
	// ReadyWhen names the conditions of readiness. Each is unmet until SetReady
	// says otherwise: a daemon is not ready before it has said why it is.
	ReadyWhen []string
	// LiveAfter is how long the main loop may go without Beat. 0 = one minute.
	LiveAfter time.Duration
}

// Health is what the daemon knows about itself, for the endpoints of Server.
// All methods may be called by many goroutines and none of them blocks.
type Health struct {
	now       func() time.Time
	liveAfter time.Duration
	phaseDesc *prometheus.Desc

	mu       sync.Mutex
	phase    Phase // stays PhaseStopping once it is
	checks   []*check
	ready    []*condition
	lastBeat time.Time
}

type check struct {
	name string
	Check
	since time.Time // of the last change of OK or Blocking
}

type condition struct {
	name string
	ok   bool
	why  string
}

// NewHealth makes a Health in the phase connecting, whose watchdog has just
// been fed.
func NewHealth(opts HealthOptions) (*Health, error) {
	if opts.Now == nil || opts.Registerer == nil || opts.Daemon == "" {
		return nil, errors.New("make the health registry: Daemon, Now and Registerer are required")
	}
	h := &Health{
		now:       opts.Now,
		liveAfter: opts.LiveAfter,
		phaseDesc: prometheus.NewDesc(opts.Daemon+"_phase",
			"What the daemon is doing: 1 for the phase it is in, 0 for the others. blocked needs a person.",
			[]string{"phase"}, nil),
		lastBeat: opts.Now(),
	}
	if h.liveAfter <= 0 {
		h.liveAfter = defaultLiveAfter
	}
	for _, name := range opts.ReadyWhen {
		h.SetReady(name, false, "not yet")
	}
	if err := opts.Registerer.Register(phaseCollector{h}); err != nil {
		return nil, fmt.Errorf("register the phase metric: %w", err)
	}
	return h, nil
}

// phaseCollector reads the phase once per scrape, so that no scrape sees two
// phases or none, which gauges that are set one after the other would show.
type phaseCollector struct{ h *Health }

func (c phaseCollector) Describe(ch chan<- *prometheus.Desc) { ch <- c.h.phaseDesc }

func (c phaseCollector) Collect(ch chan<- prometheus.Metric) {
	current := c.h.Phase()
	for p := range phases {
		value := 0.0
		if p == current {
			value = 1
		}
		ch <- prometheus.MustNewConstMetric(c.h.phaseDesc, prometheus.GaugeValue, value, p.String())
	}
}

// SetPhase changes the phase. After Stopping it does nothing: the goroutines
// that are still winding down do not know that their news is old.
func (h *Health) SetPhase(p Phase) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.phase != PhaseStopping && p < phases {
		h.phase = p
	}
}

// Phase gives the current phase.
func (h *Health) Phase() Phase {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.phase
}

// Stopping marks the first signal: from here on the daemon is not ready.
func (h *Health) Stopping() { h.SetPhase(PhaseStopping) }

// Set changes the check with that name, or adds it.
func (h *Health) Set(name string, c Check) {
	c.Message, c.Hint = bounded(c.Message), bounded(c.Hint)
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.checks, func(old *check) bool { return old.name == name })
	if i < 0 && len(h.checks) >= maxChecks && name != overflowName {
		name = overflowName
		i = slices.IndexFunc(h.checks, func(old *check) bool { return old.name == name })
	}
	if i < 0 {
		h.checks = append(h.checks, &check{name: name, Check: c, since: h.now()})
		return
	}
	old := h.checks[i]
	if old.OK != c.OK || old.Blocking != c.Blocking {
		old.since = h.now()
	}
	old.Check = c
}

// Remove forgets a check whose subject is gone, such as a partition that now
// belongs to another member.
func (h *Health) Remove(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.checks = slices.DeleteFunc(h.checks, func(c *check) bool { return c.name == name })
}

// SetReady changes one condition of readiness, or adds it. why is shown while
// it is not ok.
func (h *Health) SetReady(name string, ok bool, why string) {
	why = bounded(why)
	h.mu.Lock()
	defer h.mu.Unlock()
	i := slices.IndexFunc(h.ready, func(c *condition) bool { return c.name == name })
	if i < 0 && len(h.ready) >= maxChecks && name != overflowName {
		name = overflowName
		i = slices.IndexFunc(h.ready, func(c *condition) bool { return c.name == name })
	}
	if i < 0 {
		h.ready = append(h.ready, &condition{name, ok, why})
		return
	}
	h.ready[i].ok, h.ready[i].why = ok, why
}

// Beat feeds the watchdog. The main loop calls it each time it turns, also
// when there is nothing to do.
func (h *Health) Beat() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lastBeat = h.now()
}

// The values of Report.Status.
const (
	StatusOK       = "ok"
	StatusDegraded = "degraded" // a check is not ok, and the daemon goes on or tries to
	StatusBlocked  = "blocked"  // a person has to act
	StatusStopping = "stopping"
)

// Report is the body of /healthz. Fields stay as they are; new ones may
// appear.
type Report struct {
	Status string        `json:"status"`
	Phase  string        `json:"phase"`
	Checks []CheckReport `json:"checks"`
}

// CheckReport is one check of a Report.
type CheckReport struct {
	Name    string    `json:"name"`
	OK      bool      `json:"ok"`
	Since   time.Time `json:"since"`
	Message string    `json:"message"`
	Hint    string    `json:"hint"`
}

// Report gives the state of everything, in the order in which the checks were
// first set.
func (h *Health) Report() Report {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := Report{Status: StatusOK, Phase: h.phase.String(), Checks: make([]CheckReport, 0, len(h.checks))}
	blocked := h.phase == PhaseBlocked
	for _, c := range h.checks {
		r.Checks = append(r.Checks, CheckReport{c.name, c.OK, c.since, c.Message, c.Hint})
		if !c.OK {
			r.Status = StatusDegraded
			blocked = blocked || c.Blocking
		}
	}
	if blocked {
		r.Status = StatusBlocked
	}
	if h.phase == PhaseStopping {
		r.Status = StatusStopping
	}
	return r
}

// Readiness is the body of /readyz.
type Readiness struct {
	Ready   bool      `json:"ready"`
	Reasons []Unready `json:"reasons"` // empty when ready
}

// Unready is one reason for not being ready.
type Unready struct {
	Name string `json:"name"`
	Why  string `json:"why"`
}

// Readiness tells whether all conditions hold and no stop was asked for.
func (h *Health) Readiness() Readiness {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := Readiness{Reasons: []Unready{}}
	if h.phase == PhaseStopping {
		r.Reasons = append(r.Reasons, Unready{"stopping", "a signal asked for it"})
	}
	if len(h.ready) == 0 {
		r.Reasons = append(r.Reasons, Unready{"start", "nothing has been reported yet"})
	}
	for _, c := range h.ready {
		if !c.ok {
			r.Reasons = append(r.Reasons, Unready{c.name, c.why})
		}
	}
	r.Ready = len(r.Reasons) == 0
	return r
}

// Liveness is the body of /livez.
type Liveness struct {
	Live             bool    `json:"live"`
	SinceBeatSeconds float64 `json:"since_beat_seconds"`
	LimitSeconds     float64 `json:"limit_seconds"`
}

// Liveness tells whether the main loop still turns. It asks nobody else: no
// outage elsewhere gets the daemon restarted.
func (h *Health) Liveness() Liveness {
	h.mu.Lock()
	defer h.mu.Unlock()
	since := h.now().Sub(h.lastBeat)
	return Liveness{Live: since <= h.liveAfter, SinceBeatSeconds: since.Seconds(), LimitSeconds: h.liveAfter.Seconds()}
}

// bounded cuts a text to maxMessage bytes and to valid UTF-8.
func bounded(text string) string {
	if len(text) > maxMessage {
		text = text[:maxMessage-len("…")] + "…"
	}
	return strings.ToValidUTF8(text, "?")
}
