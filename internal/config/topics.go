package config

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"holdfast/internal/decode"
)

// everyTopic stands for all topics in the settings below.
const everyTopic = "*"

const (
	// maxFieldName is far above any real name.
	maxFieldName = 255
	// maxEntries bounds the settings below.
	maxEntries = 10_000
)

// FieldColumn says that a column of the table takes a field of the records of a
// topic under another name, or something that stands beside the row.
type FieldColumn struct {
	Topic  string // everyTopic for all
	Source string // see decode.ColumnSource
	// Column as the Feldera table spells it, without quotes.
	Column string
}

// String gives the entry as it can be written in KAFKASINK_COLUMNS.
func (f FieldColumn) String() string {
	return f.Topic + "/" + fieldName(f.Source) + "=" + canonical(f.Column)
}

// FieldColumns is the value of KAFKASINK_COLUMNS: no column of a topic twice,
// no field of a topic twice.
type FieldColumns []FieldColumn

// FieldType says what the values of a field mean.
type FieldType struct {
	Topic, Field, Type string
}

// String gives the entry as it can be written in KAFKASINK_FIELD_TYPES.
func (f FieldType) String() string { return f.Topic + "/" + fieldName(f.Field) + "=" + f.Type }

// FieldTypes is the value of KAFKASINK_FIELD_TYPES: no field of a topic twice.
type FieldTypes []FieldType

// TopicWord gives a topic a word.
type TopicWord struct {
	Topic, Word string
}

// String gives the entry as it can be written.
func (w TopicWord) String() string { return w.Topic + "=" + w.Word }

// KeyFormats is the value of KAFKASINK_KEY_FORMATS: no topic twice.
type KeyFormats []TopicWord

// Of gives what is set for a topic, by its own name or by *; "" for nothing.
func (k KeyFormats) Of(topic string) string {
	word := ""
	for _, w := range k {
		if w.Topic == topic {
			return w.Word
		}
		if w.Topic == everyTopic {
			word = w.Word
		}
	}
	return word
}

// UnmarshalText reads a list of topic/source=column.
func (f *FieldColumns) UnmarshalText(text []byte) error {
	var list FieldColumns
	columns, sources := map[[2]string]int{}, map[[2]string]int{}
	err := entries(text, func(s *scanner, entry int) error {
		topic, source, err := s.topicField(entry)
		if err != nil {
			return err
		}
		if why := decode.CheckColumnSource(source); why != nil {
			return wrong("has a source that is no field and none of the words that begin with @ in entry %d", entry)
		}
		column, err := s.name(entry, "column", strings.ToLower, maxFelderaName)
		if err != nil {
			return err
		}
		if first, twice := columns[[2]string{topic, column}]; twice {
			return wrong("has two sources for one column in entries %d and %d", first, entry)
		}
		if first, twice := sources[[2]string{topic, source}]; twice {
			return wrong("has the same source in entries %d and %d", first, entry)
		}
		columns[[2]string{topic, column}], sources[[2]string{topic, source}] = entry, entry
		list = append(list, FieldColumn{topic, source, column})
		return nil
	})
	if err == nil {
		*f = list
	}
	return err
}

// UnmarshalText reads a list of topic/field=type.
func (f *FieldTypes) UnmarshalText(text []byte) error {
	var list FieldTypes
	seen := map[[2]string]int{}
	err := entries(text, func(s *scanner, entry int) error {
		topic, field, err := s.topicField(entry)
		if err != nil {
			return err
		}
		typ := s.run(func(c rune) bool {
			return c < utf8.RuneSelf && (unicode.IsLetter(c) || unicode.IsDigit(c) || strings.ContainsRune("._-()", c))
		})
		if why := decode.CheckFieldType(typ); why != nil {
			return wrong("has a type that is not one of docs/formats.md in entry %d: %v", entry, why)
		}
		if first, twice := seen[[2]string{topic, field}]; twice {
			return wrong("has the same field in entries %d and %d", first, entry)
		}
		seen[[2]string{topic, field}] = entry
		list = append(list, FieldType{topic, field, typ})
		return nil
	})
	if err == nil {
		*f = list
	}
	return err
}

// UnmarshalText reads a list of topic=key format.
func (k *KeyFormats) UnmarshalText(text []byte) error {
	var list KeyFormats
	seen := map[string]int{}
	err := entries(text, func(s *scanner, entry int) error {
		topic, err := s.topicOrAll(entry)
		if err != nil {
			return err
		}
		if !s.take('=') {
			return wrong("has no = after the topic in entry %d", entry)
		}
		word := s.run(unicode.IsLetter)
		if !slices.Contains(keyFormats(), word) {
			return wrong("has a key format that is not one of %s in entry %d", alternatives(keyFormats()), entry)
		}
		if first, twice := seen[topic]; twice {
			return wrong("has the same topic in entries %d and %d", first, entry)
		}
		seen[topic] = entry
		list = append(list, TopicWord{topic, word})
		return nil
	})
	if err == nil {
		*k = list
	}
	return err
}

func keyFormats() []string {
	var words []string
	for _, f := range decode.KeyFormats() {
		words = append(words, string(f))
	}
	return words
}

// entries reads a list whose entries are read by one.
func entries(text []byte, one func(s *scanner, entry int) error) error {
	s := &scanner{rest: string(text)}
	for entry := 1; ; entry++ {
		if entry > maxEntries {
			return wrong("has more than %d entries", maxEntries)
		}
		if err := one(s, entry); err != nil {
			return err
		}
		if s.more() {
			continue
		}
		if !s.end() {
			return wrong("has something left over after entry %d", entry)
		}
		return nil
	}
}

// topicField reads topic/field and the = behind it.
func (s *scanner) topicField(entry int) (topic, field string, err error) {
	if topic, err = s.topicOrAll(entry); err != nil {
		return "", "", err
	}
	if !s.take('/') {
		return "", "", wrong("has no / after the topic in entry %d", entry)
	}
	s.skipSpace()
	if strings.HasPrefix(s.rest, `"`) {
		var ok bool
		if field, ok = s.quoted(); !ok {
			return "", "", wrong("has a double quote without its end in entry %d", entry)
		}
	} else {
		field = s.run(plainFieldRune)
	}
	switch {
	case field == "" || len(field) > maxFieldName:
		return "", "", wrong("has no field, or one that needs double quotes, or one of more than %d bytes, in entry %d", maxFieldName, entry)
	case !utf8.ValidString(field) || strings.ContainsFunc(field, unicode.IsControl):
		return "", "", wrong("has a field with a control character or a byte that is not UTF-8 in entry %d", entry)
	case !s.take('='):
		return "", "", wrong("has no = after the field in entry %d", entry)
	}
	return topic, field, nil
}

func plainFieldRune(c rune) bool {
	return unicode.IsLetter(c) || unicode.IsDigit(c) || strings.ContainsRune("_$@.-", c)
}

// fieldName writes a field as topicField reads it.
func fieldName(name string) string {
	if !strings.ContainsFunc(name, func(c rune) bool { return c == utf8.RuneError || !plainFieldRune(c) }) {
		return name
	}
	return `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
}

func (s *scanner) topicOrAll(entry int) (string, error) {
	if s.take('*') {
		return everyTopic, nil
	}
	return s.topicName(entry)
}

// companions checks that the settings about topics name topics that are
// carried.
func (c *KafkaSink) companions(r *reading) {
	check := func(setting, topic string) {
		r.require(topic == everyTopic || c.carries(topic), setting, "names a topic that is not one of KAFKASINK_TOPICS", "topics of KAFKASINK_TOPICS, or *", "KAFKASINK_TOPICS")
	}
	for _, f := range c.Columns {
		check("KAFKASINK_COLUMNS", f.Topic)
	}
	for _, f := range c.FieldTypes {
		check("KAFKASINK_FIELD_TYPES", f.Topic)
	}
	for _, f := range c.KeyFormats {
		check("KAFKASINK_KEY_FORMATS", f.Topic)
	}
}

// Decoding gives what the settings say about the records of one topic. The
// caller adds the table and what is to be told of.
func (c *KafkaSink) Decoding(t TopicMapping) decode.TopicConfig {
	cfg := decode.TopicConfig{
		Format: decode.Format(t.Format), RefuseUnknown: c.ExtraFields == Stop, OpField: c.OpField,
		KeyFormat: decode.KeyFormat(c.KeyFormats.Of(t.Topic)), Tombstone: decode.TombstonePolicy(c.Tombstones),
		RefuseControl: c.ControlMessages == Stop, IgnoreTruncate: c.Truncate == Ignore, Unavailable: c.Unavailable,
		FieldTypes: make(map[string]string),
	}
	// What is said of a topic by its name goes before what is said of all.
	for _, topic := range []string{t.Topic, everyTopic} {
		for _, f := range c.Columns {
			known := slices.ContainsFunc(cfg.Columns, func(s decode.ColumnSource) bool { return s.From == f.Source || s.Column == f.Column })
			if f.Topic == topic && !known {
				cfg.Columns = append(cfg.Columns, decode.ColumnSource{From: f.Source, Column: f.Column})
			}
		}
		for _, f := range c.FieldTypes {
			if _, known := cfg.FieldTypes[f.Field]; f.Topic == topic && !known {
				cfg.FieldTypes[f.Field] = f.Type
			}
		}
	}
	return cfg
}
