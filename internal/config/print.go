package config

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

// Source says where the value of a setting came from.
type Source string

// The sources. A secret that is not set has the source default.
const (
	SourceEnv     Source = "env"
	SourceFile    Source = "file"
	SourceDefault Source = "default"
)

// Row is one setting with the value that is in force, as it may be shown:
// "[redacted]" for a secret that is set, "" for one that is not.
type Row struct {
	Name   string `json:"name"`
	Value  string `json:"value"`
	Source Source `json:"source"`
	Secret bool   `json:"secret"`
}

// Effective is the table of values in force. It holds no secret.
type Effective struct{ rows []Row }

// Rows gives a copy of the table, in the order of the reference page.
func (e Effective) Rows() []Row { return slices.Clone(e.rows) }

// Print writes the table for people, one setting a line.
func (e Effective) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "NAME\tSOURCE\tVALUE\n")
	for _, row := range e.rows {
		value := row.Value
		switch {
		case value == "":
			value = "(not set)"
		case strings.ContainsFunc(value, unicode.IsControl):
			value = strconv.Quote(value)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", row.Name, row.Source, value)
	}
	fmt.Fprintf(t, "fingerprint\t\t%s\n", e.Fingerprint())
	if err := t.Flush(); err != nil {
		return fmt.Errorf("print the configuration: %w", err)
	}
	return nil
}

// PrintJSON writes {"fingerprint":…,"settings":[…]} on one line. Fields stay
// as they are; new ones may appear.
func (e Effective) PrintJSON(w io.Writer) error {
	out := struct {
		Fingerprint string `json:"fingerprint"`
		Settings    []Row  `json:"settings"`
	}{e.Fingerprint(), e.rows}
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(out); err != nil {
		return fmt.Errorf("print the configuration as JSON: %w", err)
	}
	return nil
}

// Fingerprint is the same for two processes exactly when all their settings
// that are no secrets have the same effect: 12 hexadecimal digits, for the log
// line at the start.
func (e Effective) Fingerprint() string {
	h := sha256.New()
	for _, row := range e.rows {
		if !row.Secret {
			fmt.Fprintf(h, "%s=%q\n", row.Name, row.Value)
		}
	}
	return hex.EncodeToString(h.Sum(nil))[:12]
}

// show writes the value of a setting as it can be written in the environment;
// a secret as it may be shown.
func show(value reflect.Value) string {
	switch v := value.Interface().(type) {
	case Secret:
		if !v.IsSet() {
			return ""
		}
		return redacted
	case time.Duration:
		return formatDuration(v)
	case []string:
		return strings.Join(v, ",")
	case TableMappings:
		return joined(v)
	case TopicMappings:
		return joined(v)
	case FieldColumns:
		return joined(v)
	case FieldTypes:
		return joined(v)
	case KeyFormats:
		return joined(v)
	case SchemaFiles:
		return joined(v)
	case AvroSchemas:
		return joined(v)
	default:
		return fmt.Sprint(v)
	}
}

func joined[T fmt.Stringer](list []T) string {
	texts := make([]string, len(list))
	for i, one := range list {
		texts[i] = one.String()
	}
	return strings.Join(texts, ",")
}
