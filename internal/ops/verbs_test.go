package ops

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"holdfast/internal/config"
	"holdfast/internal/decode"
)

// testProgram is pgsource's command line with a run verb that ends with err.
func testProgram(err error) Program {
	var force bool
	load := func(environ []string) (Printer, error) {
		c, err := config.LoadPGSource(environ)
		if err != nil {
			return nil, err
		}
		return c, nil
	}
	return Program{Name: "pgsource", Summary: "Postgres into Feldera", Verbs: []Verb{
		{Name: "run", Help: "carry changes until stopped", Run: func(_ context.Context, call Call) error {
			if _, loadErr := config.LoadPGSource(call.Environ); loadErr != nil {
				return loadErr
			}
			return err
		}},
		ConfigVerb(load, config.HelpPGSource),
		CheckVerb(func(_ context.Context, call Call) ([]NamedCheck, error) {
			c, err := config.LoadPGSource(call.Environ)
			if err != nil {
				return nil, err
			}
			return []NamedCheck{{Name: "dsn", Run: func(context.Context) (string, error) {
				return "", &decode.Refusal{What: "connection", Where: fmt.Sprint(c.DSN), Why: "no", Do: "this"}
			}}}, nil
		}),
		HealthcheckVerb(func(environ []string) (string, error) {
			c, err := config.LoadPGSource(environ)
			if err != nil {
				return "", err
			}
			return c.Listen, nil
		}),
		VersionVerb("pgsource"),
		{
			Name: "drop", Help: "drop things", Args: "TABLE…", Flags: func(f *flag.FlagSet) { f.BoolVar(&force, "yes", false, "do it") },
			Run: func(_ context.Context, call Call) error {
				_, err := fmt.Fprintln(call.Stdout, force, call.Args)
				return err
			},
		},
		{Name: "slot show", Help: "show it", Run: func(_ context.Context, call Call) error {
			_, err := fmt.Fprintln(call.Stdout, "shown")
			return err
		}},
	}}
}

func TestCommandLine(t *testing.T) {
	good := []string{"FELDERA_URL=http://h", "PGSOURCE_DSN=host=h", "PGSOURCE_TABLES=a.b", "PGSOURCE_LISTEN=127.0.0.1:1"}
	for _, tc := range []struct {
		name           string
		args           []string
		environ        []string
		err            error
		code           int
		stdout, stderr string // parts; "" = nothing may be written
	}{
		{"run is the default", nil, good, nil, 0, "", ""},
		{"run", []string{"run"}, good, errors.New("boom\nbang"), 1, "", "pgsource: boom\npgsource: bang\n"},
		{"refused", []string{"run"}, good, &decode.Refusal{What: "row", Why: "no key"}, 65, "", "pgsource: row: no key\n"},
		{"told to stop", []string{"run"}, good, ErrStopping, 0, "", "pgsource: stopping"},
		{"configuration", []string{"run"}, nil, nil, 78, "", "pgsource: FELDERA_URL is not set; allowed: an http"},
		{"config", []string{"config"}, good, nil, 0, "PGSOURCE_SLOT", ""},
		{"config as JSON", []string{"config", "-json"}, good, nil, 0, `{"fingerprint":"`, ""},
		{"config with faults", []string{"config"}, nil, nil, 78, "", "PGSOURCE_DSN is not set"},
		{"config help", []string{"config", "-help"}, nil, nil, 0, "PGSOURCE_STALL_TIMEOUT (duration, default 1m)", ""},
		{"check", []string{"check"}, good, nil, 65, "FAIL dsn: connection [redacted]: no\n     fix: this\n", ""},
		{"check as JSON", []string{"check", "-json"}, good, nil, 65, `"exit_code":65`, ""},
		{"check with faults", []string{"check"}, nil, nil, 78, "", "is not set"},
		{"healthcheck", []string{"healthcheck"}, good, nil, 1, "", "connection refused"},
		{"healthcheck with faults", []string{"healthcheck"}, nil, nil, 1, "", "is not set"},
		{"version", []string{"version"}, nil, nil, 0, "pgsource ", ""},
		{"--version", []string{"--version"}, nil, nil, 0, "pgsource ", ""},
		{"-version", []string{"-version", "-json"}, nil, nil, 0, `"go_version":"go`, ""},
		{"version as JSON", []string{"version", "-json"}, nil, nil, 0, `"go_version":"go`, ""},
		{"own flags", []string{"drop", "-yes", "a", "b"}, nil, nil, 0, "true [a b]\n", ""},
		{"help", []string{"help"}, nil, nil, 0, "usage: pgsource [verb] [flags]", ""},
		{"-h", []string{"-h"}, nil, nil, 0, "run          carry changes until stopped (the default)", ""},
		{"help is listed", []string{"help"}, nil, nil, 0, "  help         print this\n\npgsource VERB -help tells more about a verb; pgsource config -help lists all settings.\n", ""},
		{"verb help", []string{"drop", "-h"}, nil, nil, 0, "usage: pgsource drop [flags] TABLE…\n\ndrop things\n\n  -yes\n", ""},
		{"two words", []string{"slot", "show"}, nil, nil, 0, "shown\n", ""},
		{"half of two words", []string{"slot"}, nil, nil, 64, "", "there is no verb \"slot\""},
		{"another half", []string{"slot", "hide"}, nil, nil, 64, "", "there is no verb \"slot\""},
		{"unknown verb", []string{"chekc"}, nil, nil, 64, "", "pgsource: there is no verb \"chekc\"\n\npgsource: Postgres"},
		{"not a verb", []string{"Pa55word"}, nil, nil, 64, "", "pgsource: the first argument is not a verb"},
		{"unknown flag", []string{"version", "-yaml"}, nil, nil, 64, "", "pgsource version: there is no flag -yaml\n\nusage: pgsource version [flags]"},
		{"unknown flag of the default", []string{"-json"}, nil, nil, 64, "", "pgsource run: there is no flag -json"},
		{"wrong value", []string{"version", "-json=Pa55word"}, nil, nil, 64, "", "pgsource version: a flag is unknown or has a value that it cannot have"},
		{"argument too many", []string{"version", "Pa55word"}, nil, nil, 64, "", "pgsource version: it takes no arguments"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			if code := testProgram(tc.err).Main(t.Context(), tc.args, tc.environ, &stdout, &stderr); code != tc.code {
				t.Errorf("exit code %d, expected %d", code, tc.code)
			}
			for _, stream := range []struct{ name, got, want string }{{"stdout", stdout.String(), tc.stdout}, {"stderr", stderr.String(), tc.stderr}} {
				if !strings.Contains(stream.got, stream.want) || (stream.want == "" && stream.got != "") {
					t.Errorf("%s:\n%s\nexpected:\n%s", stream.name, stream.got, stream.want)
				}
				if strings.Contains(stream.got, "Pa55word") {
					t.Errorf("%s repeats what was typed:\n%s", stream.name, stream.got)
				}
			}
		})
	}
}

// A secret in every place that a verb and the logger can see: none of what
// they write shows it.
func TestNoVerbShowsASecret(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		secret := rapid.StringMatching(`Zq[A-Za-z0-9]{12}qZ`).Draw(t, "secret")
		place := rapid.SampledFrom([]string{"", "PGSOURCE_BATCH_ROWS=", "FELDERA_URL=http://u:", "PGSOURCE_UNKNOWN=", "PGSOURCE_DSN_FILE="}).Draw(t, "place")
		environ := []string{
			"FELDERA_URL=http://h", "PGSOURCE_TABLES=a.b", "PGSOURCE_LISTEN=127.0.0.1:1",
			"PGSOURCE_DSN=postgres://u:" + secret + "@h/d", "FELDERA_API_KEY=" + secret,
		}
		if place != "" {
			environ = append([]string{place + secret}, environ...)
		}
		var out bytes.Buffer
		verb := rapid.SampledFrom([]string{"run", "config", "check", "healthcheck", "version", secret}).Draw(t, "verb")
		flags := rapid.SampledFrom([][]string{nil, {"-json"}, {"-json=" + secret}, {secret}, {"-" + secret}}).Draw(t, "flags")
		testProgram(nil).Main(context.Background(), append([]string{verb}, flags...), environ, &out, &out)

		s := config.NewSecret(secret)
		c, err := config.LoadPGSource(environ)
		for _, format := range []string{"text", "json"} {
			logger, makeErr := NewLogger(&out, "debug", format)
			if makeErr != nil {
				t.Fatal(makeErr)
			}
			logger.Info("starting", slog.Any("secret", s), slog.Any("pointer", &s), slog.Any("config", c), slog.Any("err", err),
				slog.Group("g", slog.Any("secret", s)), slog.Any("many", []config.Secret{s}), slog.Any("in", struct{ S config.Secret }{s}))
			NewRepeats(logger, newClock().Now).Failed(context.Background(), "load", fmt.Errorf("connect with %v: %w", s, io.EOF), slog.Any("secret", s))
		}
		if strings.Contains(out.String(), secret) {
			t.Fatalf("the secret is shown:\n%s", &out)
		}
	})
}
