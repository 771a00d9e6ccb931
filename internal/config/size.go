package config

import (
	"math"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes.
type Size int64

// units of a Size, largest first, so that the first that divides is the best.
var units = [...]struct {
	name  string
	bytes int64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}}

// String gives the size in the largest unit that divides it: "64MiB".
func (s Size) String() string {
	if s == 0 {
		return "0B"
	}
	for _, u := range units {
		if int64(s)%u.bytes == 0 {
			return strconv.FormatInt(int64(s)/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10) + "B" // not reached: 1 divides all
}

// parseSize reads a whole number with its unit.
func parseSize(text string) (Size, error) {
	for _, u := range units {
		digits, ok := strings.CutSuffix(text, u.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || n < 0 || digits[0] == '+' || n > math.MaxInt64/u.bytes {
			return 0, wrong("is not a size")
		}
		return Size(n * u.bytes), nil
	}
	return 0, wrong("is not a size with a unit")
}

// parseDuration reads a duration with its unit.
func parseDuration(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0, wrong("is not a duration with a unit")
	}
	return d, nil
}

// formatDuration writes a duration without the zero parts that
// time.Duration.String leaves at the end: "1m", not "1m0s".
func formatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
