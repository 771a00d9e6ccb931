package ops

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
)

// NewLogger makes the daemon's logger. level is debug, info, warn or error,
// format is text or json. Values that hide themselves (config.Secret) come out
// as "[redacted]" in both formats, alone or inside other values. Durations are
// written with their unit in both.
func NewLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	opts := &slog.HandlerOptions{ReplaceAttr: replaceAttr}
	var lowest slog.Level
	switch level {
	case "debug", "info", "warn", "error":
		if err := lowest.UnmarshalText([]byte(level)); err != nil {
			return nil, fmt.Errorf("make the logger: %w", err)
		}
		opts.Level = lowest
	default:
		return nil, fmt.Errorf("make the logger: level %q is not debug, info, warn or error", level)
	}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	}
	return nil, fmt.Errorf("make the logger: format %q is not text or json", format)
}

// replaceAttr has a value print itself where the handlers would look inside
// it: a type that formats itself may do so to hide something. Errors are left
// to the handlers, which call Error.
func replaceAttr(_ []string, a slog.Attr) slog.Attr {
	switch a.Value.Kind() {
	case slog.KindDuration:
		a.Value = slog.StringValue(a.Value.Duration().String())
	case slog.KindAny:
		if f, ok := a.Value.Any().(fmt.Formatter); ok {
			if _, isError := f.(error); !isError {
				a.Value = slog.StringValue(fmt.Sprint(f))
			}
		}
	case slog.KindBool, slog.KindFloat64, slog.KindInt64, slog.KindString, slog.KindTime, slog.KindUint64, slog.KindGroup, slog.KindLogValuer:
	}
	return a
}

const (
	repeatFirst = 10 * time.Second // until a failure that goes on is said again
	repeatMost  = 10 * time.Minute // most time between two such lines
	repeatKinds = 64               // most different failures that are counted
	repeatText  = 512              // most bytes of an error's text that tell it from another
)

// Repeats keeps a failure that goes on from filling the log: it says a failure
// at once when it is new, then at growing intervals with how often it has
// happened, and once when it is over. It may be used by many goroutines.
type Repeats struct {
	logger *slog.Logger
	now    func() time.Time

	mu sync.Mutex
	// failures has at most repeatKinds entries; the one that was seen longest
	// ago makes room.
	failures map[repeatKey]*repeated
}

// repeatKey tells failures apart. The text has its digits replaced, since
// ports, times and counts differ from one failure to the next of its kind.
type repeatKey struct{ what, text string }

type repeated struct {
	count       int
	text        string // as it was last seen
	first, last time.Time
	next        time.Time // when it may be said again
	interval    time.Duration
}

// NewRepeats makes a Repeats that writes to logger and reads the time from
// now.
func NewRepeats(logger *slog.Logger, now func() time.Time) *Repeats {
	return &Repeats{logger: logger, now: now, failures: map[repeatKey]*repeated{}}
}

// Failed counts one failure of what (a constant, such as "send to feldera")
// and logs it if it is due.
func (r *Repeats) Failed(ctx context.Context, what string, err error, attrs ...slog.Attr) {
	text := "<nil>"
	if err != nil {
		text = err.Error()
	}
	key := repeatKey{what, kindOf(text)}
	now := r.now()

	r.mu.Lock()
	f := r.failures[key]
	isNew := f == nil
	if isNew {
		r.makeRoom()
		f = &repeated{first: now, next: now, interval: repeatFirst}
		r.failures[key] = f
	}
	f.count++
	f.text = bounded(text)
	f.last = now
	due := !now.Before(f.next)
	if due {
		f.next = now.Add(f.interval)
		f.interval = min(2*f.interval, repeatMost)
	}
	count, first := f.count, f.first
	r.mu.Unlock()

	if !due {
		return
	}
	all := append([]slog.Attr{slog.String("what", what), slog.Any("err", err)}, attrs...)
	if isNew {
		r.logger.LogAttrs(ctx, slog.LevelWarn, "failing", all...)
		return
	}
	all = append(all, slog.Int("repeated", count), slog.Time("since", first))
	r.logger.LogAttrs(ctx, slog.LevelWarn, "still failing", all...)
}

// Worked ends all failures of what; it logs only if there were any.
func (r *Repeats) Worked(ctx context.Context, what string, attrs ...slog.Attr) {
	r.mu.Lock()
	count := 0
	var first time.Time
	for key, f := range r.failures {
		if key.what != what {
			continue
		}
		if count == 0 || f.first.Before(first) {
			first = f.first
		}
		count += f.count
		delete(r.failures, key)
	}
	r.mu.Unlock()
	if count == 0 {
		return
	}
	all := append([]slog.Attr{slog.String("what", what), slog.Int("failures", count), slog.Duration("failed_for", r.now().Sub(first))}, attrs...)
	r.logger.LogAttrs(ctx, slog.LevelInfo, "works again", all...)
}

// RepeatedFailure is one failure that goes on.
type RepeatedFailure struct {
	What, Text  string // as it was last seen
	Count       int
	First, Last time.Time
}

// List gives the failures that go on, the one seen last first.
func (r *Repeats) List() []RepeatedFailure {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := make([]RepeatedFailure, 0, len(r.failures))
	for key, f := range r.failures {
		list = append(list, RepeatedFailure{key.what, f.text, f.count, f.first, f.last})
	}
	slices.SortFunc(list, func(a, b RepeatedFailure) int { return b.Last.Compare(a.Last) })
	return list
}

// makeRoom forgets the failure that was seen longest ago, when the map is
// full. The caller holds the lock.
func (r *Repeats) makeRoom() {
	if len(r.failures) < repeatKinds {
		return
	}
	var oldest repeatKey
	var seen *repeated
	for key, f := range r.failures {
		if seen == nil || f.last.Before(seen.last) {
			oldest, seen = key, f
		}
	}
	delete(r.failures, oldest)
}

// kindOf gives the part of an error's text that is the same for all of its
// kind: every run of digits becomes one #.
func kindOf(text string) string {
	var b strings.Builder
	digit := false
	for _, c := range text {
		if b.Len() >= repeatText {
			break
		}
		if unicode.IsDigit(c) {
			if !digit {
				b.WriteByte('#')
			}
			digit = true
			continue
		}
		digit = false
		b.WriteRune(c)
	}
	return b.String()
}
