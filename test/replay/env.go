package main

import (
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pglogrepl"
)

// lsn is written as Postgres does.
type lsn uint64

func (l lsn) String() string { return pglogrepl.LSN(l).String() }

// MarshalText writes it into a recording.
func (l lsn) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText reads it from a recording.
func (l *lsn) UnmarshalText(text []byte) error {
	at, err := pglogrepl.ParseLSN(string(text))
	*l = lsn(at)
	return err //nolint:wrapcheck // says what it is
}

// environment is a daemon's settings by name.
type environment map[string]string

// newEnvironment keeps what the daemons and the drivers read.
func newEnvironment(environ []string) environment {
	e := environment{}
	for _, v := range environ {
		name, value, _ := strings.Cut(v, "=")
		for _, prefix := range []string{"PGSOURCE_", "KAFKASINK_", "FELDERA_", "PG"} {
			if strings.HasPrefix(name, prefix) && value != "" {
				e[name] = value
			}
		}
	}
	return e
}

// has tells whether a setting is given, as itself or as a file.
func (e environment) has(name string) bool { return e[name] != "" || e[name+"_FILE"] != "" }

// with gives a copy with changes; an empty value takes a name out.
func (e environment) with(changes map[string]string) environment {
	c := maps.Clone(e)
	for name, value := range changes {
		if value == "" {
			delete(c, name)
			continue
		}
		c[name] = value
	}
	return c
}

// of keeps the settings of one daemon and of the destination.
func (e environment) of(prefix string) environment {
	c := maps.Clone(e)
	maps.DeleteFunc(c, func(name, _ string) bool {
		return !strings.HasPrefix(name, prefix) && !strings.HasPrefix(name, "FELDERA_")
	})
	return c
}

// list gives it as os.Environ does.
func (e environment) list() []string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(e)) {
		all = append(all, name+"="+e[name])
	}
	return all
}
