package config

import (
	"fmt"
	"io"
	"strings"
)

// section is one group of settings as the help and the page show it.
type section struct {
	title, intro string
	settings     []Setting
}

func sections() (feldera, pgsource, kafkasink section, err error) {
	feldera = section{title: "Both daemons: the pipeline", intro: "Read by pgsource and by kafkasink."}
	pgsource = section{title: "pgsource", intro: "Read by pgsource, which does not look at `KAFKASINK_…`."}
	kafkasink = section{title: "kafkasink", intro: "Read by kafkasink, which does not look at `PGSOURCE_…`."}
	if feldera.settings, err = settingsOf(new(Feldera)); err != nil {
		return feldera, pgsource, kafkasink, err
	}
	if pgsource.settings, err = settingsOf(new(PGSource)); err != nil {
		return feldera, pgsource, kafkasink, err
	}
	kafkasink.settings, err = settingsOf(new(KafkaSink))
	return feldera, pgsource, kafkasink, err
}

// HelpPGSource writes every setting of pgsource for `pgsource config -help`.
func HelpPGSource(w io.Writer) error {
	feldera, pgsource, _, err := sections()
	if err != nil {
		return err
	}
	return help(w, feldera, pgsource)
}

// HelpKafkaSink writes every setting of kafkasink for `kafkasink config -help`.
func HelpKafkaSink(w io.Writer) error {
	feldera, _, kafkasink, err := sections()
	if err != nil {
		return err
	}
	return help(w, feldera, kafkasink)
}

func help(w io.Writer, list ...section) error {
	var b strings.Builder
	b.WriteString("Settings are environment variables. One that is set to nothing counts as not set.\n")
	for _, sec := range list {
		for _, s := range sec.settings {
			fmt.Fprintf(&b, "\n%s (%s%s)\n", s.Name, s.Type, note(s))
			fmt.Fprintf(&b, "    %s\n", s.Help)
			fmt.Fprintf(&b, "    allowed: %s\n", s.Allowed())
			if s.Secret {
				fmt.Fprintf(&b, "    or %s%s: the file that holds it\n", s.Name, fileSuffix)
			}
		}
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("print the settings: %w", err)
	}
	return nil
}

func note(s Setting) string {
	switch {
	case s.Required:
		return ", required"
	case s.Default != "":
		return ", default " + s.Default
	}
	return ""
}

// Markdown gives the reference page, docs/configuration.md.
func Markdown() (string, error) {
	feldera, pgsource, kafkasink, err := sections()
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(`# Configuration

This page is generated from the table of settings in ` + "`internal/config`" + `; a test compares the two.

Both daemons are configured by environment variables and by nothing else.

- A variable that is set to nothing counts as not set.
- Everything that is wrong is reported at once, one line for each fault, and the process ends with code 78. No line carries a value.
- A name that begins with one of the daemon's prefixes and is none of the settings is a fault; a known name is offered where one is near. What Kubernetes adds for services (` + "`FELDERA_SERVICE_HOST`, `FELDERA_PORT_8080_TCP`" + `, …) is ignored.
- A secret can be given as ` + "`NAME_FILE`" + ` instead: the file that holds it. One line break at its end is cut. Both at once is a fault. The file is read again at each connect, so a secret can be rotated without a restart.
- Durations and sizes need their unit: ` + "`500ms`, `30s`, `5m`; `512KiB`, `64MiB`, `1GiB`" + `.
- ` + "`pgsource config` and `kafkasink config`" + ` print the values in force with where each came from, secrets redacted; ` + "`-json`" + ` for machines.
`)
	for _, sec := range []section{feldera, pgsource, kafkasink} {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n", sec.title, sec.intro)
		b.WriteString("| Name | Type | Default | Allowed | Meaning |\n| --- | --- | --- | --- | --- |\n")
		for _, s := range sec.settings {
			byDefault := "not set"
			switch {
			case s.Required:
				byDefault = "required"
			case s.Default != "":
				byDefault = "`" + s.Default + "`"
			}
			meaning := s.Help
			if s.Default == "" && s.OneOf == nil {
				meaning += " Example: `" + s.Example + "`"
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", s.Name, s.Type, byDefault, cell(s.Allowed()), cell(meaning))
		}
	}
	return b.String(), nil
}

// cell makes a text fit into one cell of a Markdown table.
func cell(text string) string { return strings.ReplaceAll(text, "|", `\|`) }
