package feldera

import (
	"testing"

	"holdfast/internal/decode"
)

// Two rows have one key exactly when the engine takes them for one.
func TestAppendKey(t *testing.T) {
	t.Parallel()
	table := &Table{Name: "t", spelling: "t", key: []int{0, 1}, Columns: []Column{
		{Name: "a", Type: decimal(10, 2), Key: true}, {Name: "b", Type: typeOf(Varchar), Key: true}, {Name: "c", Type: typeOf(Varchar)},
	}}
	e, err := NewEncoder(table, table.Relation(), Policy{})
	if err != nil {
		t.Fatal(err)
	}
	key := func(a, b string) string {
		k, err := e.AppendKey(nil, []decode.Value{num(a), txt(b), null}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return string(k)
	}
	if key("1.5", "x") != key("1.50", "x") {
		t.Error("1.5 and 1.50 are one number")
	}
	for _, other := range [][2]string{{"1.5", "X"}, {"1.51", "x"}, {"1.5", "x "}, {"-1.5", "x"}} {
		if key("1.5", "x") == key(other[0], other[1]) {
			t.Errorf("%q is another key", other)
		}
	}
	// The parts of a key cannot run into each other.
	if key("1", "1x") == key("11", "x") {
		t.Error("(1, 1x) and (11, x) are two keys")
	}
	filled, err := e.AppendKey(nil, []decode.Value{num("2"), {State: decode.Unchanged}, null}, []decode.Value{num("1"), txt("x"), null})
	if err != nil || string(filled) != key("2", "x") {
		t.Errorf("a part that did not change comes from the old row: %q, %v", filled, err)
	}
	for _, row := range [][]decode.Value{{num("1"), null, null}, {num("1"), {}, null}, {num("1.234"), txt("x"), null}} {
		if k, err := e.AppendKey([]byte("before"), row, nil); err == nil {
			t.Errorf("%v has a key: %q", row, k)
		}
	}
	if got := e.KeyColumns(); len(got) != 2 || got[0] != "a" || got[1] != "b" {
		t.Errorf("key columns %q", got)
	}
	keyless := &Table{Name: "t", spelling: "t", Columns: []Column{{Name: "a", Type: typeOf(Varchar)}}}
	if e, err = NewEncoder(keyless, keyless.Relation(), Policy{}); err != nil {
		t.Fatal(err)
	}
	if _, err := e.AppendKey(nil, []decode.Value{txt("x")}, nil); err == nil {
		t.Error("a table without a key gave one")
	}
}
