package partition

import "strings"

// clientVersion makes a version fit what brokers take for the name of client
// software: letters, digits, dots and dashes, beginning and ending with a
// letter or a digit. Anything else, such as "(devel)", is answered with
// INVALID_REQUEST, and the client never gets any further.
func clientVersion(version string) string {
	fit := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '.', r == '-':
			return r
		}
		return '-'
	}, version)
	if fit = strings.Trim(fit, ".-"); fit == "" {
		return "unknown"
	}
	return fit
}
