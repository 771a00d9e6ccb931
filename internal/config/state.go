package config

import (
	"os"
	"path/filepath"
	"strings"
)

// The forms of PGSOURCE_STATE.
const (
	stateNone  = "none"
	stateAuto  = "auto"
	stateFile  = "file:"
	stateTable = "postgres:"
)

// stateFolder is where auto keeps state: what the images and a systemd unit
// with StateDirectory=holdfast provide.
const stateFolder = "/var/lib/holdfast"

// StatePlace is where a state is kept: in the file Path, in the table
// Schema.Table, or nowhere.
type StatePlace struct {
	Path          string
	Schema, Table string
	// ByDefault: nobody has chosen the place.
	ByDefault bool
}

// StatePlace reads PGSOURCE_STATE. auto looks whether the folder is there: a
// folder that was made for it is a choice too.
func (c *PGSource) StatePlace() StatePlace {
	if path, ok := strings.CutPrefix(c.State, stateFile); ok {
		return StatePlace{Path: path}
	}
	if name, ok := strings.CutPrefix(c.State, stateTable); ok {
		schema, table, err := stateTableName(name)
		if err == nil { // it was validated
			return StatePlace{Schema: schema, Table: table}
		}
	}
	if c.State == stateNone {
		return StatePlace{}
	}
	place := StatePlace{ByDefault: true}
	if info, err := os.Stat(stateFolder); err == nil && info.IsDir() {
		place.Path = filepath.Join(stateFolder, "pgsource-"+c.Slot+".json")
	}
	return place
}

func checkState(text string) error {
	if err := checkPrintable(text); err != nil {
		return err
	}
	if path, ok := strings.CutPrefix(text, stateFile); ok {
		switch {
		case !filepath.IsAbs(path):
			return wrong("names a file by a path that does not begin with /, so it would depend on the folder that pgsource is started in")
		case filepath.Clean(path) != path || path == "/":
			return wrong("names a file by a path that has . or .. or a superfluous / in it")
		}
		return nil
	}
	if name, ok := strings.CutPrefix(text, stateTable); ok {
		_, _, err := stateTableName(name)
		return err
	}
	if text != stateNone && text != stateAuto {
		return wrong("is none of the forms it can have")
	}
	return nil
}

// stateTableName reads schema.table, each folded to lower case unless it
// stands in double quotes.
func stateTableName(text string) (schema, table string, err error) {
	s := &scanner{rest: text}
	if schema, err = s.pgName(1, "schema"); err != nil {
		return "", "", wrong("has no readable schema before the table")
	}
	if !s.take('.') {
		return "", "", wrong("has no schema.table after postgres:")
	}
	if table, err = s.pgName(1, "table"); err != nil || !s.end() {
		return "", "", wrong("has no readable table after the schema")
	}
	return schema, table, nil
}
