package ops

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
	"unicode"

	"holdfast/internal/decode"
)

const (
	defaultCheckTimeout = 10 * time.Second
	healthcheckTimeout  = 5 * time.Second
	maxHealthBody       = 1 << 20
)

// NamedCheck is one preflight.
type NamedCheck struct {
	Name string // a few words
	// Timeout bounds Run through its context. 0 = ten seconds.
	Timeout time.Duration
	// Run gives what it found to be right, or an error: a decode.Refusal when
	// it looked and something is wrong, any other when it could not look. It
	// must end soon after its context. Several findings, joined by errors.Join,
	// make a line each.
	Run func(ctx context.Context) (message string, err error)
}

// CheckResult is one line of RunChecks.
type CheckResult struct {
	Name    string `json:"name"`
	OK      bool   `json:"ok"`
	Message string `json:"message"`
	Fix     string `json:"fix"` // what mends it, "" when OK or not known
}

// rank orders the exit codes of checks: the highest wins.
var rank = map[int]int{ExitOK: 0, ExitUnavailable: 1, ExitRefused: 2, ExitConfig: 3}

// RunChecks runs all checks, one after the other, whatever fails, and writes a
// line for each as it ends, or all as one JSON object. The exit code is
// ExitOK, ExitConfig when a check found the configuration wrong, ExitRefused
// when one found something wrong, ExitUnavailable when one could not look; of
// several the first in this order, since what is wrong stays wrong while what
// was not reached may come back.
func RunChecks(ctx context.Context, w io.Writer, asJSON bool, checks []NamedCheck) (exitCode int) {
	results := make([]CheckResult, 0, len(checks))
	for _, c := range checks {
		found, code := runCheck(ctx, c)
		results = append(results, found...)
		if rank[code] > rank[exitCode] {
			exitCode = code
		}
		if !asJSON {
			for _, result := range found {
				writeResult(w, result)
			}
		}
	}
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false)
		_ = enc.Encode(struct {
			OK       bool          `json:"ok"`
			ExitCode int           `json:"exit_code"`
			Checks   []CheckResult `json:"checks"`
		}{exitCode == ExitOK, exitCode, results}) // nobody reads: the code still tells
	}
	return exitCode
}

func runCheck(ctx context.Context, c NamedCheck) (results []CheckResult, exitCode int) {
	ctx, cancel := context.WithTimeoutCause(ctx, cmp.Or(c.Timeout, defaultCheckTimeout),
		fmt.Errorf("check %q took longer than %s", c.Name, cmp.Or(c.Timeout, defaultCheckTimeout)))
	defer cancel()
	message, err := c.Run(ctx)
	if err == nil {
		return []CheckResult{{Name: c.Name, OK: true, Message: bounded(message)}}, ExitOK
	}
	for _, finding := range findings(err) {
		result, code := oneFinding(ctx, c, finding)
		results = append(results, result)
		if rank[code] > rank[exitCode] {
			exitCode = code
		}
	}
	return results, exitCode
}

// maxFindings bounds the lines that one check makes.
const maxFindings = 50

// findings takes apart what was joined. It goes no deeper than that: an error
// that wraps several has a text of its own about them.
func findings(err error) []error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok || errors.Join(joined.Unwrap()...).Error() != err.Error() {
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, findings(e)...)
	}
	if len(all) > maxFindings {
		all = append(all[:maxFindings-1], fmt.Errorf("and %d more", len(all)-maxFindings+1))
	}
	return all
}

func oneFinding(ctx context.Context, c NamedCheck, err error) (CheckResult, int) {
	result := CheckResult{Name: c.Name, Message: err.Error()}
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		result.Message = context.Cause(ctx).Error() + ": " + result.Message
	}
	code := ExitUnavailable
	var hinted interface {
		error
		Hint() string
	}
	refusal, refused := errors.AsType[*decode.Refusal](err)
	switch {
	case refused:
		code = ExitRefused
		result.Fix = refusal.Do
		if refusal.Do != "" { // it has a line of its own
			result.Message = strings.Replace(result.Message, "; to mend it: "+refusal.Do, "", 1)
		}
	case errors.As(err, &hinted):
		result.Fix = hinted.Hint()
	}
	if own, ok := errors.AsType[coded](err); ok && own.ExitCode() == ExitConfig {
		code = ExitConfig
	}
	result.Message, result.Fix = bounded(result.Message), bounded(result.Fix)
	return result, code
}

func writeResult(w io.Writer, r CheckResult) {
	mark := "ok  "
	if !r.OK {
		mark = "FAIL"
	}
	line := fmt.Sprintf("%s %s: %s\n", mark, r.Name, oneLine(r.Message))
	if r.Fix != "" {
		line += fmt.Sprintf("     fix: %s\n", oneLine(r.Fix))
	}
	_, _ = io.WriteString(w, line) // nobody reads: the exit code still tells
}

// oneLine makes a text fit into one line of a terminal: line breaks become
// "; ", other control characters become spaces.
func oneLine(text string) string {
	var parts []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			parts = append(parts, line)
		}
	}
	return strings.Map(func(c rune) rune {
		if unicode.IsControl(c) {
			return ' '
		}
		return c
	}, strings.Join(parts, "; "))
}

// Healthcheck asks /healthz of the daemon that listens on addr, for images
// without a client of their own. addr is what the daemon listens on; a
// wildcard there means loopback here. The error says which checks are not ok.
func Healthcheck(ctx context.Context, addr string) error {
	hosts, port, err := reachable(addr)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, healthcheckTimeout)
	defer cancel()
	// Without a proxy: the answer has to come from this very process.
	transport := &http.Transport{DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	client := &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	for _, host := range hosts {
		var reached bool
		if reached, err = askHealth(ctx, client, "http://"+net.JoinHostPort(host, port)+"/healthz"); reached {
			return err
		}
	}
	return err
}

// reachable gives the hosts under which a listener on addr can be asked, in
// the order to try them.
func reachable(addr string) (hosts []string, port string, err error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, "", fmt.Errorf("ask for health: the address is not host:port: %w", err)
	}
	switch ip := net.ParseIP(host); {
	case host == "", ip != nil && ip.IsUnspecified():
		// A listener on [::] or on no host usually takes both kinds; which
		// loopback exists in a container differs.
		if ip != nil && ip.To4() != nil {
			return []string{"127.0.0.1"}, port, nil
		}
		return []string{"127.0.0.1", "::1"}, port, nil
	}
	return []string{host}, port, nil
}

func askHealth(ctx context.Context, client *http.Client, url string) (reached bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return false, fmt.Errorf("ask for health: %w", err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return false, fmt.Errorf("ask for health: %w", err)
	}
	defer func() { _ = resp.Body.Close() }() // the answer has been read
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxHealthBody))
	if err != nil {
		return true, fmt.Errorf("read the answer about health: %w", err)
	}
	if resp.StatusCode == http.StatusOK {
		return true, nil
	}
	var report Report
	if err := json.Unmarshal(body, &report); err != nil || report.Status == "" {
		return true, fmt.Errorf("unhealthy: %s answers %d", url, resp.StatusCode)
	}
	parts := []string{fmt.Sprintf("unhealthy: status %s, phase %s", report.Status, report.Phase)}
	for _, c := range report.Checks {
		if !c.OK {
			parts = append(parts, c.Name+": "+c.Message)
		}
	}
	return true, errors.New(oneLine(bounded(strings.Join(parts, "; "))))
}
