package config

import (
	"regexp"
	"strings"
)

// maxPattern bounds the text of a pattern, and maxMatches the topics that all
// patterns may match.
const (
	maxPattern = 1024
	maxMatches = 10_000
)

// HasPatterns tells whether the topics depend on what the brokers have.
func (t TopicMappings) HasPatterns() bool {
	for _, m := range t {
		if m.Pattern != "" {
			return true
		}
	}
	return false
}

// Expand gives the topics by name: those that are named, whether they exist or
// not, and of names those that a pattern matches, each by the first pattern
// that does. A topic that is named is not matched by a pattern; except is never
// matched.
func (t TopicMappings) Expand(names []string, except string) TopicMappings {
	taken := map[string]bool{except: true}
	var out TopicMappings
	for _, m := range t {
		if m.Pattern == "" {
			taken[m.Topic] = true
			out = append(out, m)
		}
	}
	for _, m := range t {
		if m.Pattern == "" {
			continue
		}
		matches := m.matcher()
		for _, name := range names {
			if !taken[name] && len(out) < maxMatches && matches(name) {
				taken[name] = true
				out = append(out, TopicMapping{Topic: name, Table: m.Table, Format: m.Format})
			}
		}
	}
	return out
}

// matcher gives what tells whether a whole name matches the pattern.
func (m TopicMapping) matcher() func(string) bool {
	r, err := compilePattern(m.Pattern)
	if err != nil { // it was compiled when it was read
		return func(string) bool { return false }
	}
	return r.MatchString
}

func compilePattern(pattern string) (*regexp.Regexp, error) {
	if _, err := regexp.Compile(pattern); err != nil { // a)|(b is none, although it would be in a group
		return nil, err
	}
	return regexp.Compile(`\A(?:` + pattern + `)\z`)
}

// pattern reads ~"regular expression".
func (s *scanner) pattern(entry int) (string, error) {
	s.skipSpace()
	if !strings.HasPrefix(s.rest, `"`) {
		return "", wrong("has a pattern that is not in double quotes in entry %d", entry)
	}
	pattern, ok := s.quoted()
	switch {
	case !ok:
		return "", wrong("has a double quote without its end in entry %d", entry)
	case pattern == "" || len(pattern) > maxPattern:
		return "", wrong("has a pattern that is empty or longer than %d bytes in entry %d", maxPattern, entry)
	}
	if _, err := compilePattern(pattern); err != nil {
		return "", wrong("has a pattern that is no regular expression of RE2 in entry %d", entry)
	}
	return pattern, checkPrintable(pattern)
}
