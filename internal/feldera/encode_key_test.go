package feldera

import (
	"errors"
	"strings"
	"testing"

	"holdfast/internal/decode"
)

// Cutting the digits of a key would make one row of two.
func TestKeysAreNeverAltered(t *testing.T) {
	lenient := Policy{Fraction: TruncateExcess, NonFinite: NullSpecial, OutOfRange: NullSpecial}
	for _, c := range []struct {
		typ      Type
		kind     decode.Kind
		old, now string
	}{
		{decimal(10, 2), decode.Number, "1.231", "1.239"},
		{typeOf(Timestamp), decode.Text, "2024-01-01 00:00:00.1234561", "2024-01-01 00:00:00.1234569"},
		{typeOf(Real), decode.Number, "0.1000000001", "0.1000000002"},
		{typeOf(Double), decode.Number, "NaN", "Infinity"},
		{typeOf(Date), decode.Text, "infinity", "-infinity"},
	} {
		table := &Table{Name: "t", spelling: "t", key: []int{0}, Columns: []Column{
			{Name: "k", Type: c.typ, Key: true}, {Name: "v", Type: c.typ},
		}}
		e, err := NewEncoder(table, table.Relation(), lenient)
		if err != nil {
			t.Fatal(err)
		}
		row := func(v string) []decode.Value { return []decode.Value{set(c.kind, v), null} }
		for _, ch := range []decode.OrderChange{
			{Op: decode.Insert, After: row(c.now)},
			{Op: decode.Update, Before: row(c.old), After: row(c.now)},
			{Op: decode.Delete, Before: row(c.old)},
		} {
			ch.Relation = e.rel
			var a Array
			err := a.Add(e, &ch)
			var refused *decode.Refusal
			if !errors.As(err, &refused) || strings.Contains(refused.Do, "truncate") || strings.Contains(refused.Do, "null") {
				t.Errorf("%s of a key %s %q: written as %s, refused as %v", ch.Op, c.typ.String(), c.now, a.Body(), err)
			}
		}
		var a Array
		if err := a.Add(e, &decode.OrderChange{Op: decode.Insert, Relation: e.rel, After: []decode.Value{set(c.kind, "1"), set(c.kind, c.now)}}); c.kind == decode.Number && err != nil {
			t.Errorf("the policy holds no more for other columns: %v", err)
		}
	}
}

// A key written in another way is the same key: the row stays where it is, and
// what did not change need not be known.
func TestSameKeyInOtherWords(t *testing.T) {
	for _, c := range []struct {
		typ      Type
		kind     decode.Kind
		old, now string
		moved    bool
	}{
		{decimal(10, 2), decode.Number, "1.0", "1.00", false},
		{decimal(10, 2), decode.Number, "10", "1", true},
		{typeOf(Double), decode.Number, "1e2", "100", false},
		{typeOf(Double), decode.Number, "0", "-0", true},
		{typeOf(Varchar), decode.Text, "1.0", "1.00", true},
		{typeOf(UUID), decode.Text, "A0EEBC99-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc999c0b4ef8bb6d6bb9bd380a11", false},
		{typeOf(Timestamp), decode.Text, "2024-01-01 00:00:00.10", "2024-01-01 00:00:00.1", false},
	} {
		table := &Table{Name: "t", spelling: "t", key: []int{0}, Columns: []Column{{Name: "k", Type: c.typ, Key: true}, {Name: "v", Type: typeOf(Varchar)}}}
		e, err := NewEncoder(table, table.Relation(), Policy{})
		if err != nil {
			t.Fatal(err)
		}
		var a Array
		err = a.Add(e, &decode.OrderChange{
			Op: decode.Update, Relation: e.rel,
			Before: []decode.Value{set(c.kind, c.old), {}}, After: []decode.Value{set(c.kind, c.now), unchanged},
		})
		if (err != nil) != c.moved || err == nil && !strings.Contains(string(a.Body()), `{"update":`) {
			t.Errorf("%s %q → %q: %s, %v", c.typ.String(), c.old, c.now, a.Body(), err)
		}
	}
}
