package config

import (
	"encoding/hex"
	"strconv"
	"strings"
	"unicode"

	"holdfast/internal/decode"
)

// SchemaFile names a file with an Avro schema, and by what records know it.
type SchemaFile struct {
	// Ref is the zero value for a file that is known by its fingerprint alone.
	Ref  decode.SchemaRef
	Path string
}

// String gives the entry as it can be written in KAFKASINK_SCHEMA_FILES.
func (f SchemaFile) String() string {
	switch f.Ref.Kind {
	case decode.SchemaID:
		return strconv.FormatUint(uint64(f.Ref.ID), 10) + "=" + f.Path
	case decode.SchemaGUID:
		return f.Ref.GUIDText() + "=" + f.Path
	case decode.SchemaFingerprint:
	}
	return f.Path
}

// SchemaFiles is the value of KAFKASINK_SCHEMA_FILES: no id twice.
type SchemaFiles []SchemaFile

// AvroSchema names the file with the schema of a topic's values or keys.
type AvroSchema struct {
	Topic string
	Key   bool
	Path  string
}

// String gives the entry as it can be written in KAFKASINK_AVRO_SCHEMAS.
func (s AvroSchema) String() string {
	if s.Key {
		return s.Topic + "/key=" + s.Path
	}
	return s.Topic + "/value=" + s.Path
}

// AvroSchemas is the value of KAFKASINK_AVRO_SCHEMAS: no topic's values or keys
// twice.
type AvroSchemas []AvroSchema

// Of gives the file for a topic's values or keys, "" for none.
func (s AvroSchemas) Of(topic string, key bool) string {
	for _, one := range s {
		if one.Topic == topic && one.Key == key {
			return one.Path
		}
	}
	return ""
}

// pathWord reads what may be a path, or a name in front of one.
func (s *scanner) pathWord() string {
	return s.run(func(c rune) bool { return c != ',' && c != '=' && !unicode.IsSpace(c) && !unicode.IsControl(c) })
}

// UnmarshalText reads a list of id=file, guid=file or file.
func (f *SchemaFiles) UnmarshalText(text []byte) error {
	var list SchemaFiles
	seen := map[decode.SchemaRef]int{}
	err := entries(text, func(s *scanner, entry int) error {
		one := SchemaFile{Path: s.pathWord()}
		if s.take('=') {
			var ok bool
			if one.Ref, ok = schemaName(one.Path); !ok {
				return wrong("has a name before the = that is neither an id nor a GUID in entry %d", entry)
			}
			one.Path = s.pathWord()
			if first, twice := seen[one.Ref]; twice {
				return wrong("has the same schema in entries %d and %d", first, entry)
			}
			seen[one.Ref] = entry
		}
		if one.Path == "" {
			return wrong("has no file in entry %d", entry)
		}
		list = append(list, one)
		return nil
	})
	if err == nil {
		*f = list
	}
	return err
}

// schemaName reads an id or a GUID.
func schemaName(text string) (decode.SchemaRef, bool) {
	if id, err := strconv.ParseUint(text, 10, 32); err == nil {
		return decode.SchemaRef{Kind: decode.SchemaID, ID: uint32(id)}, true
	}
	ref := decode.SchemaRef{Kind: decode.SchemaGUID}
	b, err := hex.DecodeString(strings.ReplaceAll(text, "-", ""))
	if err != nil || len(b) != len(ref.GUID) {
		return ref, false
	}
	copy(ref.GUID[:], b)
	return ref, strings.EqualFold(text, ref.GUIDText())
}

// UnmarshalText reads a list of topic/value=file or topic/key=file.
func (a *AvroSchemas) UnmarshalText(text []byte) error {
	var list AvroSchemas
	seen := map[string]int{}
	err := entries(text, func(s *scanner, entry int) error {
		topic, part, err := s.topicField(entry)
		if err != nil {
			return err
		}
		one := AvroSchema{Topic: topic, Key: part == "key", Path: s.pathWord()}
		switch {
		case part != "key" && part != "value":
			return wrong("has neither value nor key after the topic in entry %d", entry)
		case topic == everyTopic:
			return wrong("has no topic in entry %d", entry)
		case one.Path == "":
			return wrong("has no file in entry %d", entry)
		}
		name := topic + "/" + part
		if first, twice := seen[name]; twice {
			return wrong("has the same topic and part in entries %d and %d", first, entry)
		}
		seen[name] = entry
		list = append(list, one)
		return nil
	})
	if err == nil {
		*a = list
	}
	return err
}

// schemas checks what the settings about schemas say together.
func (c *KafkaSink) schemas(r *reading) {
	for _, s := range c.AvroSchemas {
		r.require(c.carries(s.Topic), "KAFKASINK_AVRO_SCHEMAS", "names a topic that is not one of KAFKASINK_TOPICS", "topics of KAFKASINK_TOPICS", "KAFKASINK_TOPICS")
	}
	for _, t := range c.Topics {
		r.require(!decode.Format(t.Format).Avro() || c.RegistryURL != "" || len(c.SchemaFiles) > 0 || c.AvroSchemas.Of(t.Topic, false) != "",
			"KAFKASINK_REGISTRY_URL", "is not set although a topic is Avro, and no file has its schema",
			"a URL, or files in KAFKASINK_SCHEMA_FILES or KAFKASINK_AVRO_SCHEMAS", "KAFKASINK_TOPICS", "KAFKASINK_SCHEMA_FILES", "KAFKASINK_AVRO_SCHEMAS")
	}
	user := c.RegistryUser != ""
	r.require(user == c.RegistryPassword.IsSet(), "KAFKASINK_REGISTRY_USER", "is set without KAFKASINK_REGISTRY_PASSWORD, or the other way round",
		"both or neither", "KAFKASINK_REGISTRY_PASSWORD")
	r.require(!user || !c.RegistryToken.IsSet(), "KAFKASINK_REGISTRY_TOKEN", "is set although KAFKASINK_REGISTRY_USER is", "one of the two", "KAFKASINK_REGISTRY_USER")
	login := user || c.RegistryToken.IsSet() || c.RegistryCAFile != ""
	r.require(!login || c.RegistryURL != "", "KAFKASINK_REGISTRY_URL", "is not set although other settings of the registry are", "a URL",
		"KAFKASINK_REGISTRY_USER", "KAFKASINK_REGISTRY_TOKEN", "KAFKASINK_REGISTRY_CA_FILE")
	r.require(c.RegistryCAFile == "" || !isPlainHTTP(c.RegistryURL), "KAFKASINK_REGISTRY_CA_FILE", "is set although KAFKASINK_REGISTRY_URL is not https",
		"only together with an https URL", "KAFKASINK_REGISTRY_URL")
}

// carries tells whether a topic is one of KAFKASINK_TOPICS, or matches one.
func (c *KafkaSink) carries(topic string) bool {
	for _, t := range c.Topics {
		if t.Topic == topic || (t.Pattern != "" && t.matcher()(topic)) {
			return true
		}
	}
	return false
}
