package config

import (
	"fmt"
	"strings"
	"testing"
)

func TestExpandSchemas(t *testing.T) {
	many := make([]string, maxTargets+1)
	for i := range many {
		many[i] = fmt.Sprintf("t%d", i)
	}
	for _, c := range []struct {
		tables string
		found  map[string][]string
		want   string // or, with a !, of the refusal
	}{
		{"public.a", nil, "public.a=a"},
		{"public.*", map[string][]string{"public": {"a", "B c"}}, `public.a=a public."B c"="B c"`},
		{`public.*, public.b=other, "Sales".*`, map[string][]string{"public": {"a", "b"}, "Sales": {"b"}}, `public.b=other public.a=a "Sales".b=b`},
		{"one.*,two.*", map[string][]string{"one": {"a"}, "two": {"a"}}, "!two.a=other_name"},
		{"one.*", map[string][]string{"one": {"a", "A"}}, "!goes to a Feldera table of this name already"},
		{`one.*,two.b="A"`, map[string][]string{"one": {"a"}}, "!goes to a Feldera table of this name already"},
		{"one.*", map[string][]string{"two": {"a"}}, "!has no table that can be carried"},
		{"one.*", map[string][]string{"one": many}, "!101 tables"},
	} {
		var tables TableMappings
		if err := tables.UnmarshalText([]byte(c.tables)); err != nil {
			t.Fatalf("%s: %v", c.tables, err)
		}
		got, err := tables.Expand(c.found)
		if part, refused := strings.CutPrefix(c.want, "!"); refused {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v, want %q", c.tables, err, part)
			}
			continue
		}
		var parts []string
		for _, m := range got {
			parts = append(parts, m.String())
		}
		if said := strings.Join(parts, " "); err != nil || said != c.want {
			t.Errorf("%s: %s, %v, want %s", c.tables, said, err, c.want)
		}
	}
	var tables TableMappings
	if err := tables.UnmarshalText([]byte(`a.*,"b c".*,a."*"`)); err != nil || fmt.Sprint(tables) != `[a.* "b c".* a."*"="*"]` {
		t.Errorf("%v, %v", tables, err)
	}
	for _, wrong := range []string{"a.*=b", "a.*,a.*", "*.a", "*", "a.b*"} {
		if err := tables.UnmarshalText([]byte(wrong)); err == nil {
			t.Errorf("%s: no fault", wrong)
		}
	}
}
