package core

// The JSON form of a program's schema, as the manager reports it in
// program_info.schema.

// SchemaJSON is program_info.schema.
type SchemaJSON struct {
	Inputs  []RelationJSON `json:"inputs"`
	Outputs []RelationJSON `json:"outputs"`
}

// RelationJSON is one table or view.
type RelationJSON struct {
	Name          string         `json:"name"`
	CaseSensitive bool           `json:"case_sensitive"`
	Fields        []FieldJSON    `json:"fields"`
	Materialized  bool           `json:"materialized"`
	Properties    map[string]any `json:"properties"`
	PrimaryKey    []string       `json:"primary_key"`
}

// FieldJSON is one column.
type FieldJSON struct {
	Name          string   `json:"name"`
	CaseSensitive bool     `json:"case_sensitive"`
	ColumnType    TypeJSON `json:"columntype"`
	Lateness      *string  `json:"lateness,omitempty"`
	Default       *string  `json:"default,omitempty"`
	Unused        bool     `json:"unused"`
}

// TypeJSON is the type of a column or of a part of one.
type TypeJSON struct {
	Type      string      `json:"type"`
	Nullable  bool        `json:"nullable"`
	Precision *int        `json:"precision,omitempty"`
	Scale     *int        `json:"scale,omitempty"`
	Component *TypeJSON   `json:"component,omitempty"`
	Fields    []FieldJSON `json:"fields,omitempty"`
	Key       *TypeJSON   `json:"key,omitempty"`
	Value     *TypeJSON   `json:"value,omitempty"`
}

// Schema gives the schema as the manager reports it. The columns of views are
// left out: nothing here compiles them.
func (p *Program) Schema() SchemaJSON {
	s := SchemaJSON{Inputs: []RelationJSON{}, Outputs: []RelationJSON{}}
	for _, t := range p.Tables {
		r := RelationJSON{
			Name: t.Name, CaseSensitive: t.CaseSensitive,
			Fields: fieldsJSON(t.Columns), Materialized: t.DeclaredMaterialized, Properties: map[string]any{},
		}
		for k, v := range t.Properties {
			r.Properties[k] = map[string]string{"value": v}
		}
		for _, i := range t.PrimaryKey {
			r.PrimaryKey = append(r.PrimaryKey, t.Columns[i].Name)
		}
		s.Inputs = append(s.Inputs, r)
	}
	for _, v := range p.Views {
		s.Outputs = append(s.Outputs, RelationJSON{
			Name: v.Name, CaseSensitive: v.CaseSensitive, Fields: []FieldJSON{},
			Materialized: v.Materialized, Properties: map[string]any{},
		})
	}
	return s
}

func fieldsJSON(cols []*Column) []FieldJSON {
	out := make([]FieldJSON, 0, len(cols))
	for _, c := range cols {
		f := FieldJSON{Name: c.Name, CaseSensitive: c.CaseSensitive, ColumnType: c.Type.json()}
		if c.Lateness != "" {
			f.Lateness = &c.Lateness
		}
		if c.Default != "" {
			f.Default = &c.Default
		}
		out = append(out, f)
	}
	return out
}

func (t *Type) json() TypeJSON {
	j := TypeJSON{Type: t.Kind.String(), Nullable: t.Nullable}
	switch t.Kind {
	case Decimal:
		j.Precision, j.Scale = &t.Precision, &t.Scale
	case Char, Varchar, Binary, Varbinary:
		n := t.Precision
		if n == 0 {
			n = -1 // the compiler's way to say "no declared length"
		}
		j.Precision = &n
	case Array:
		e := t.Elem.json()
		j.Component = &e
	case Map:
		k, v := t.Key.json(), t.Value.json()
		j.Key, j.Value = &k, &v
	case Struct:
		j.Fields = fieldsJSON(t.Fields)
	default:
	}
	return j
}
