package config

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"holdfast/internal/decode"
)

const (
	// maxPGName is NAMEDATALEN - 1: Postgres cuts longer names without an error.
	maxPGName = 63
	// maxTopicName is the broker's limit.
	maxTopicName = 249
	// maxFelderaName is far above any real name; it keeps URLs short.
	maxFelderaName = 255
	// maxTargets is how many tables a pipeline accepts from HTTP clients: each
	// table that was ever written to holds one of its 100 endpoints for ever.
	maxTargets = 100
)

// TableMapping says which Feldera table a Postgres table goes to.
type TableMapping struct {
	// Schema and Name are spelled as in the catalogue: no quotes, and folded
	// to lower case where they were written without quotes.
	Schema string
	Name   string
	// Target is the Feldera table in its canonical SQL spelling: lower case
	// without quotes, or in double quotes where the name needs them.
	Target string
	// All stands for every table of Schema, as the source has them at the start;
	// Name and Target are "".
	All bool
}

// String gives the mapping as it can be written in PGSOURCE_TABLES.
func (m TableMapping) String() string {
	if m.All {
		return canonical(m.Schema) + ".*"
	}
	return canonical(m.Schema) + "." + canonical(m.Name) + "=" + m.Target
}

// TableMappings is the value of PGSOURCE_TABLES: at least one mapping, no
// table twice, no target twice (one table has one owner).
type TableMappings []TableMapping

// TopicMapping says which Feldera table the records of a topic go to.
type TopicMapping struct {
	// Topic is "" where there is a Pattern.
	Topic string
	// Pattern is a regular expression for the whole names of topics.
	Pattern string
	// Table is the Feldera table in its canonical SQL spelling.
	Table string
	// Format of the records; one of formats.
	Format string
}

// String gives the mapping as it can be written in KAFKASINK_TOPICS.
func (m TopicMapping) String() string {
	if m.Pattern != "" {
		return `~"` + strings.ReplaceAll(m.Pattern, `"`, `""`) + `"=` + m.Table + ":" + m.Format
	}
	return m.Topic + "=" + m.Table + ":" + m.Format
}

// TopicMappings is the value of KAFKASINK_TOPICS: at least one mapping, no
// topic twice. Several topics may go to one table.
type TopicMappings []TopicMapping

// FormatJSON is a record whose value is one JSON object.
const FormatJSON = string(decode.FormatJSON)

// topicFormats are the formats that a topic can have.
func topicFormats() []string {
	var words []string
	for _, f := range decode.Formats() {
		words = append(words, string(f))
	}
	return words
}

// UnmarshalText reads a list of schema.table or schema.table=target.
func (t *TableMappings) UnmarshalText(text []byte) error {
	s := &scanner{rest: string(text)}
	var (
		list    TableMappings
		sources = map[[2]string]int{}
		targets = map[string]int{}
	)
	for entry := 1; ; entry++ {
		m, err := s.tableMapping(entry)
		if err != nil {
			return err
		}
		if first, twice := sources[[2]string{m.Schema, m.Name}]; twice {
			return wrong("has the same table in entries %d and %d", first, entry)
		}
		if first, twice := targets[m.Target]; twice && !m.All {
			return wrong("sends entries %d and %d to the same Feldera table, which can have one source only", first, entry)
		}
		if len(targets) == maxTargets {
			return wrong("has more than %d Feldera tables, which is as many as one pipeline takes over HTTP", maxTargets)
		}
		sources[[2]string{m.Schema, m.Name}] = entry
		if !m.All {
			targets[m.Target] = entry
		}
		list = append(list, m)
		if !s.more() {
			break
		}
	}
	if !s.end() {
		return wrong("has something left over after entry %d", len(list))
	}
	*t = list
	return nil
}

func (s *scanner) tableMapping(entry int) (m TableMapping, err error) {
	if m.Schema, err = s.pgName(entry, "schema"); err != nil {
		return m, err
	}
	if !s.take('.') {
		return m, wrong("has no schema or something unreadable after the first name in entry %d", entry)
	}
	if s.take('*') {
		m.All = true
		return m, nil
	}
	if m.Name, err = s.pgName(entry, "table"); err != nil {
		return m, err
	}
	if !s.take('=') {
		m.Target = canonical(m.Name)
		return m, nil
	}
	m.Target, err = s.felderaName(entry)
	return m, err
}

// UnmarshalText reads a list of topic=table:format.
func (t *TopicMappings) UnmarshalText(text []byte) error {
	s := &scanner{rest: string(text)}
	var (
		list    TopicMappings
		topics  = map[string]int{}
		targets = map[string]bool{}
	)
	for entry := 1; ; entry++ {
		m, err := s.topicMapping(entry)
		if err != nil {
			return err
		}
		name := m.Topic
		if m.Pattern != "" {
			name = "~" + m.Pattern // no topic begins so
		}
		if first, twice := topics[name]; twice {
			return wrong("has the same topic in entries %d and %d", first, entry)
		}
		topics[name], targets[m.Table] = entry, true
		if len(targets) > maxTargets {
			return wrong("has more than %d Feldera tables, which is as many as one pipeline takes over HTTP", maxTargets)
		}
		list = append(list, m)
		if !s.more() {
			break
		}
	}
	if !s.end() {
		return wrong("has something left over after entry %d", len(list))
	}
	*t = list
	return nil
}

// topicName reads the name of a topic.
func (s *scanner) topicName(entry int) (string, error) {
	name := s.run(func(c rune) bool {
		return c < utf8.RuneSelf && (unicode.IsLetter(c) || unicode.IsDigit(c) || c == '.' || c == '_' || c == '-')
	})
	switch {
	case name == "":
		return "", wrong("has no topic in entry %d", entry)
	case len(name) > maxTopicName || name == "." || name == "..":
		return "", wrong("has a topic name that no broker allows in entry %d", entry)
	}
	return name, nil
}

func (s *scanner) topicMapping(entry int) (m TopicMapping, err error) {
	if s.take('~') {
		m.Pattern, err = s.pattern(entry)
	} else {
		m.Topic, err = s.topicName(entry)
	}
	if err != nil {
		return m, err
	}
	if !s.take('=') {
		return m, wrong("has no = after the topic in entry %d", entry)
	}
	if m.Table, err = s.felderaName(entry); err != nil {
		return m, err
	}
	if !s.take(':') {
		return m, wrong("has no :format after the table in entry %d", entry)
	}
	m.Format = s.run(func(c rune) bool { return unicode.IsLetter(c) || unicode.IsDigit(c) || c == '-' || c == '_' })
	if !slices.Contains(topicFormats(), m.Format) {
		return m, wrong("has a format that is not one of %s in entry %d", alternatives(topicFormats()), entry)
	}
	return m, nil
}

// scanner reads the lists above. White space may stand around every part, so
// that a list can be written over several lines.
type scanner struct{ rest string }

func (s *scanner) skipSpace() { s.rest = strings.TrimLeft(s.rest, " \t\r\n") }

func (s *scanner) end() bool { s.skipSpace(); return s.rest == "" }

func (s *scanner) more() bool { return s.take(',') }

func (s *scanner) take(c byte) bool {
	s.skipSpace()
	if s.rest == "" || s.rest[0] != c {
		return false
	}
	s.rest = s.rest[1:]
	return true
}

func (s *scanner) run(in func(rune) bool) string {
	s.skipSpace()
	end := strings.IndexFunc(s.rest, func(c rune) bool { return c == utf8.RuneError || !in(c) })
	if end < 0 {
		end = len(s.rest)
	}
	word := s.rest[:end]
	s.rest = s.rest[end:]
	return word
}

// name reads an SQL identifier: quoted as it stands, unquoted folded by fold.
func (s *scanner) name(entry int, what string, fold func(string) string, limit int) (string, error) {
	s.skipSpace()
	var name string
	if strings.HasPrefix(s.rest, `"`) {
		var ok bool
		if name, ok = s.quoted(); !ok {
			return "", wrong("has a double quote without its end in entry %d", entry)
		}
	} else {
		name = fold(s.run(func(c rune) bool { return unicode.IsLetter(c) || unicode.IsDigit(c) || c == '_' || c == '$' }))
		if name != "" && (name[0] == '$' || (name[0] >= '0' && name[0] <= '9')) {
			return "", wrong("has a %s name that needs double quotes in entry %d", what, entry)
		}
	}
	switch {
	case name == "":
		return "", wrong("has no %s name, or one that needs double quotes, in entry %d", what, entry)
	case len(name) > limit:
		return "", wrong("has a %s name longer than %d bytes in entry %d", what, limit, entry)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		return "", wrong("has a %s name with a control character or a byte that is not UTF-8 in entry %d", what, entry)
	}
	return name, nil
}

// quoted reads a name in double quotes, in which "" stands for one quote.
func (s *scanner) quoted() (string, bool) {
	var b strings.Builder
	rest := s.rest[1:]
	for {
		before, after, found := strings.Cut(rest, `"`)
		if !found {
			return "", false
		}
		b.WriteString(before)
		if !strings.HasPrefix(after, `"`) {
			s.rest = after
			return b.String(), true
		}
		b.WriteByte('"')
		rest = after[1:]
	}
}

// pgName folds as Postgres does with UTF-8: ASCII letters only.
func (s *scanner) pgName(entry int, what string) (string, error) {
	return s.name(entry, what, foldASCII, maxPGName)
}

func (s *scanner) felderaName(entry int) (string, error) {
	name, err := s.name(entry, "Feldera table", strings.ToLower, maxFelderaName)
	return canonical(name), err
}

func foldASCII(name string) string {
	return strings.Map(func(c rune) rune {
		if c >= 'A' && c <= 'Z' {
			return c + ('a' - 'A')
		}
		return c
	}, name)
}

// canonical writes a name so that each table has exactly one spelling: bare
// where an unquoted name would be folded to the same, else in double quotes.
func canonical(name string) string {
	bare := name != ""
	for i := range len(name) {
		c := name[i]
		letter := c == '_' || (c >= 'a' && c <= 'z')
		if !letter && (i == 0 || c < '0' || c > '9') {
			bare = false
			break
		}
	}
	if bare {
		return name
	}
	return `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
}
