package config

import (
	"cmp"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/caarlos0/env/v11"
)

const (
	pgsourcePrefix  = "PGSOURCE_"
	kafkasinkPrefix = "KAFKASINK_"
	felderaPrefix   = "FELDERA_"
	fileSuffix      = "_FILE"
)

// Setting is one row of the table: what can be said of a setting without
// reading a value. All texts are as a person writes them.
type Setting struct {
	Name     string   `json:"name"` // of the environment variable
	Type     string   `json:"type"` // "text", "duration", "size", …
	Default  string   `json:"default"`
	Required bool     `json:"required"`
	Secret   bool     `json:"secret"` // can also be given as Name + "_FILE"
	OneOf    []string `json:"one_of,omitempty"`
	Min      string   `json:"min,omitempty"`
	Max      string   `json:"max,omitempty"`
	Example  string   `json:"example,omitempty"`
	Help     string   `json:"help"`

	form  string
	field string // name of the Go field: all that a ParseError tells
	index int    // of the Go field
}

// settingsOf gives the table of one group of settings, in the order of its
// fields. group is a pointer to a struct. The error is a mistake in the tags.
func settingsOf(group any) ([]Setting, error) {
	params, err := env.GetFieldParamsWithOptions(group, env.Options{Environment: map[string]string{}})
	if err != nil {
		return nil, fmt.Errorf("read the tags of %T: %w", group, err)
	}
	byName := make(map[string]env.FieldParams, len(params))
	for _, p := range params {
		byName[p.Key] = p
	}
	var list []Setting
	for i, typ := 0, reflect.TypeOf(group).Elem(); i < typ.NumField(); i++ {
		field := typ.Field(i)
		name, _, _ := strings.Cut(field.Tag.Get("env"), ",")
		p, ok := byName[name]
		if !ok {
			continue
		}
		s := Setting{
			Name:     p.Key,
			Default:  p.DefaultValue,
			Required: p.Required,
			Min:      field.Tag.Get("min"),
			Max:      field.Tag.Get("max"),
			Example:  field.Tag.Get("example"),
			Help:     field.Tag.Get("help"),
			form:     field.Tag.Get("form"),
			field:    field.Name,
			index:    i,
		}
		if words := field.Tag.Get("oneof"); words != "" {
			s.OneOf = strings.Split(words, "|")
		}
		if s.Type, err = typeName(s, field.Type); err != nil {
			return nil, err
		}
		s.Secret = field.Type == reflect.TypeFor[Secret]()
		if s.Example == "" {
			s.Example = cmp.Or(s.Default, strings.Join(s.OneOf[:min(1, len(s.OneOf))], ""))
		}
		list = append(list, s)
	}
	return list, nil
}

// typeName gives the word for a setting's type.
func typeName(s Setting, t reflect.Type) (string, error) {
	switch t {
	case reflect.TypeFor[bool]():
		return "bool", nil
	case reflect.TypeFor[int]():
		return "int", nil
	case reflect.TypeFor[time.Duration]():
		return "duration", nil
	case reflect.TypeFor[Size]():
		return "size", nil
	case reflect.TypeFor[Secret]():
		return "secret", nil
	case reflect.TypeFor[[]string](), reflect.TypeFor[TableMappings](), reflect.TypeFor[TopicMappings](),
		reflect.TypeFor[FieldColumns](), reflect.TypeFor[FieldTypes](), reflect.TypeFor[KeyFormats](),
		reflect.TypeFor[SchemaFiles](), reflect.TypeFor[AvroSchemas]():
		return "list", nil
	case reflect.TypeFor[string]():
		switch {
		case s.OneOf != nil:
			return "enum", nil
		case s.form == "url", s.form == "tokenurl":
			return "url", nil
		case s.form == "cafile", s.form == "keyfile":
			return "file", nil
		}
		return "text", nil
	}
	return "", fmt.Errorf("read the tags of %s: settings of type %s are not known", s.Name, t)
}

// Allowed says in words what a value has to be.
func (s Setting) Allowed() string {
	switch s.Type {
	case "bool":
		return "true or false"
	case "int":
		return "a whole number" + s.bounds()
	case "duration":
		return "a duration with a unit, such as " + cmp.Or(s.Default, s.Min) + "," + s.bounds()
	case "size":
		return "a size with a unit, such as " + cmp.Or(s.Default, s.Min) + "," + s.bounds()
	case "enum":
		return alternatives(s.OneOf)
	}
	if form, ok := forms()[s.form]; ok {
		return form.allowed
	}
	switch s.field {
	case "Tables":
		return "schema.table, schema.table=feldera_table or schema.*, several separated by commas"
	case "Topics":
		return "topic=feldera_table:format or ~\"regex\"=feldera_table:format, several separated by commas; the format is " + alternatives(topicFormats())
	case "Columns":
		return "topic/source=column, several separated by commas"
	case "FieldTypes":
		return "topic/field=type, several separated by commas"
	case "SchemaFiles":
		return "id=file, guid=file or file, several separated by commas"
	case "AvroSchemas":
		return "topic/value=file or topic/key=file, several separated by commas"
	case "KeyFormats":
		return "topic=format, several separated by commas; the format is " + alternatives(keyFormats())
	}
	return "text"
}

func (s Setting) bounds() string { return " from " + s.Min + " to " + s.Max }

// check looks at a value that was parsed: bounds, words and form.
func (s Setting) check(value reflect.Value) error {
	switch v := value.Interface().(type) {
	case int:
		return s.checkBounds(int64(v), func(text string) (int64, error) {
			n, err := strconv.ParseInt(text, 10, 64)
			return n, err
		})
	case time.Duration:
		return s.checkBounds(int64(v), func(text string) (int64, error) {
			d, err := parseDuration(text)
			return int64(d), err
		})
	case Size:
		return s.checkBounds(int64(v), func(text string) (int64, error) {
			n, err := parseSize(text)
			return int64(n), err
		})
	case string:
		return s.checkText(v)
	case []string:
		for i, one := range v {
			if err := s.checkText(one); err != nil {
				return wrong("%v, in entry %d", err, i+1)
			}
		}
	case Secret:
		// Only a value that is at hand: a file's is checked as it is loaded.
		text, err := v.Value()
		if err != nil || !v.IsSet() {
			return err
		}
		return s.checkText(text)
	}
	return nil
}

func (s Setting) checkBounds(value int64, parse func(string) (int64, error)) error {
	for _, bound := range []struct {
		text, wrong string
		outside     func(bound int64) bool
	}{
		{s.Min, "is too small", func(b int64) bool { return value < b }},
		{s.Max, "is too large", func(b int64) bool { return value > b }},
	} {
		limit, err := parse(bound.text)
		if err != nil {
			return fmt.Errorf("read the bounds of %s: %w", s.Name, err)
		}
		if bound.outside(limit) {
			return wrong("%s", bound.wrong)
		}
	}
	return nil
}

func (s Setting) checkText(text string) error {
	if text == "" {
		return nil // not set; `required` is the reader's business
	}
	if s.OneOf != nil {
		for _, word := range s.OneOf {
			if text == word {
				return nil
			}
		}
		return wrong("is not one of the words it can be")
	}
	if form, ok := forms()[s.form]; ok {
		return form.check(text)
	}
	return nil
}
