package config

import (
	"fmt"
	"slices"
	"strings"

	"holdfast/internal/decode"
)

// Schemas gives the schemas of which every table is to be carried.
func (t TableMappings) Schemas() (schemas []string) {
	for _, m := range t {
		if m.All {
			schemas = append(schemas, m.Schema)
		}
	}
	return schemas
}

// Expand puts the tables that a schema has in the place of schema.*: found are
// their names by schema. A table that is listed by itself keeps its own
// mapping. Two tables for one Feldera table, or for two whose names differ in
// case only, are refused, and so is a schema without any.
func (t TableMappings) Expand(found map[string][]string) (TableMappings, error) {
	refuse := func(where, why, do string) error {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "PGSOURCE_TABLES", Where: where, Why: why,
			Expected: "a Feldera table of its own for each table of the schema", Do: do,
		}
	}
	list := slices.DeleteFunc(slices.Clone(t), func(m TableMapping) bool { return m.All })
	listed := make(map[[2]string]bool, len(list))
	targets := make(map[string]TableMapping, len(list))
	for _, m := range list {
		listed[[2]string{m.Schema, m.Name}] = true
		targets[strings.ToLower(strings.Trim(m.Target, `"`))] = m
	}
	for _, schema := range t.Schemas() {
		if len(found[schema]) == 0 {
			return nil, refuse(canonical(schema)+".*", "the schema has no table that can be carried", "create or publish them, or take the entry out")
		}
		for _, name := range found[schema] {
			if listed[[2]string{schema, name}] {
				continue
			}
			m := TableMapping{Schema: schema, Name: name, Target: canonical(name)}
			folded := strings.ToLower(name)
			if other, twice := targets[folded]; twice {
				return nil, refuse(m.String(), fmt.Sprintf("%s goes to a Feldera table of this name already", other),
					fmt.Sprintf("list one of them by itself, with a name of its own: %s.%s=other_name", canonical(schema), canonical(name)))
			}
			targets[folded] = m
			list = append(list, m)
		}
	}
	if len(list) > maxTargets {
		return nil, refuse("", fmt.Sprintf("it stands for %d tables, and one pipeline takes %d over HTTP", len(list), maxTargets), "list the tables by themselves, or run several pgsources with a publication each")
	}
	return list, nil
}
