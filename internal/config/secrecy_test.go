package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// needle draws a text that cannot be in any output by chance.
func needle(t *rapid.T) string { return rapid.StringMatching(`Zq[A-Za-z0-9]{12}qZ`).Draw(t, "needle") }

// printed gives v in every way that a program prints things.
func printed(t *rapid.T, v any) string {
	var b bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%t", "%T"} {
		fmt.Fprintf(&b, verb+"\n", v)
	}
	fmt.Fprintln(&b, v)
	for _, h := range []slog.Handler{slog.NewTextHandler(&b, nil), slog.NewJSONHandler(&b, nil)} {
		slog.New(h).Info("configuration", slog.Any("config", v), slog.Group("g", slog.Any("config", v)))
	}
	if err := json.NewEncoder(&b).Encode(v); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

type holder struct {
	Secret  Secret
	private Secret // fmt does not call the methods of a value it reaches here
	Pointer *Secret
	Map     map[string]Secret
	Slice   []Secret
}

func TestASecretIsNeverPrinted(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		value := needle(t)
		path := filepath.Join(dir, "secret")
		if err := os.WriteFile(path, []byte(value), 0o600); err != nil {
			t.Fatal(err)
		}
		for _, s := range []Secret{NewSecret(value), fileSecret("X_FILE", path)} {
			for _, v := range []any{s, &s, holder{s, s, &s, map[string]Secret{"a": s}, []Secret{s}}, []any{s}, fmt.Errorf("x: %v", s)} {
				if out := printed(t, v); leaks(out, value) {
					t.Fatalf("%T leaks:\n%s", v, out)
				}
			}
			// By their names, too: Format stands before String and GoString in
			// fmt, and MarshalJSON before MarshalText in encoders.
			text, err := s.MarshalText()
			if out := s.String() + s.GoString() + string(text) + s.LogValue().String(); err != nil || leaks(out, value) {
				t.Fatalf("a method leaks: %s, %v", out, err)
			}
			if got, err := s.Value(); err != nil || got != value {
				t.Fatalf("value %q, %v", got, err)
			}
		}
	})
}

// leaks also looks for the value in hexadecimal, which %x would give.
func leaks(out, value string) bool {
	return strings.Contains(out, value) || strings.Contains(strings.ToLower(out), fmt.Sprintf("%x", value))
}

// A secret in each secret setting, valid or not, from the environment or from
// a file; and by mistake in any one other setting. Whatever comes out, faults
// or tables, does not show it.
func TestNoOutputShowsASecret(t *testing.T) {
	dir := t.TempDir()
	accepted := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		value := needle(t)
		path := filepath.Join(dir, "secret")
		if err := os.WriteFile(path, []byte(rapid.SampledFrom([]string{"", "host=h password="}).Draw(t, "start")+value+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		place := func(name string) string {
			return rapid.SampledFrom([]string{
				name + "=" + value, name + "=host=h password=" + value, name + "=postgres://u:" + value + "@h/d",
				name + "=" + value + "\x00", name + "_FILE=" + path, name + "_FILE=" + value, name + "=",
			}).Draw(t, name)
		}
		for prefix, load := range loaders() {
			environ := minimalKafka("KAFKASINK_SASL_MECHANISM=plain", "KAFKASINK_SASL_USER=u")
			secrets := []string{"FELDERA_API_KEY", "KAFKASINK_SASL_PASSWORD"}
			if prefix == pgsourcePrefix {
				environ = []string{"FELDERA_URL=http://h", "PGSOURCE_TABLES=a.b"}
				secrets = []string{"FELDERA_API_KEY", "PGSOURCE_DSN"}
			}
			for _, name := range secrets {
				environ = append(environ, place(name))
			}
			// A password in the wrong variable. Only settings whose values are
			// not free text: a table or slot that is called like a password
			// is a valid one, and is shown.
			misplaced := rapid.SampledFrom([]string{
				"FELDERA_REQUEST_TIMEOUT=" + value, "FELDERA_URL=http://u:" + value + "@h", "FELDERA_URL=" + value,
				"FELDERA_CA_FILE=" + value, prefix + "BATCH_ROWS=" + value, prefix + "BATCH_BYTES=" + value,
				prefix + "TLS=" + value, prefix + "CREATE=" + value, prefix + "LOG_LEVEL=" + value,
				prefix + "LISTEN=" + value, prefix + "BROKERS=u:" + value + "@k:1", prefix + "TOPICS=" + value,
				prefix + "TABLES=" + value, prefix + "UNKNOWN=" + value,
			}).Draw(t, "misplaced")
			if rapid.Bool().Draw(t, "misplace") {
				environ = append([]string{misplaced}, environ...)
			}

			var out bytes.Buffer
			effective, err := load(environ)
			if err != nil {
				var faults *Faults
				if !errors.As(err, &faults) {
					t.Fatalf("%T: %v", err, err)
				}
				out.WriteString(printed(t, err) + err.Error())
			} else {
				accepted[prefix]++
				out.WriteString(printed(t, effective) + effective.Fingerprint())
				_ = effective.Print(&out)
				_ = effective.PrintJSON(&out)
			}
			if pg, err := LoadPGSource(environ); err == nil {
				out.WriteString(printed(t, pg) + printed(t, *pg))
			}
			if kafka, err := LoadKafkaSink(environ); err == nil {
				out.WriteString(printed(t, kafka) + printed(t, *kafka))
			}
			if leaks(out.String(), value) {
				t.Fatalf("environment %q leaks:\n%s", environ, &out)
			}
		}
	})
	for prefix := range loaders() {
		if accepted[prefix] == 0 {
			t.Errorf("no environment of %s was accepted, so no table was looked at", prefix)
		}
	}
}
