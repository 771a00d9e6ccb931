package decode

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// wire builds pgoutput messages field by field.
type wire []byte

func (w wire) u8(b byte) wire     { return append(w, b) }
func (w wire) u16(v uint16) wire  { return binary.BigEndian.AppendUint16(w, v) }
func (w wire) u32(v uint32) wire  { return binary.BigEndian.AppendUint32(w, v) }
func (w wire) u64(v uint64) wire  { return binary.BigEndian.AppendUint64(w, v) }
func (w wire) str(s string) wire  { return append(append(w, s...), 0) }
func (w wire) text(s string) wire { return append(w.u8('t').u32(uint32(len(s))), s...) }

func relationMsg(id uint32, identity byte, cols ...Column) wire {
	w := wire{'R'}.u32(id).str("public").str("orders").u8(identity).u16(uint16(len(cols)))
	for _, c := range cols {
		var flags byte
		if c.Key {
			flags = 1
		}
		w = w.u8(flags).str(c.Name).u32(c.TypeOID).u32(uint32(c.TypeModifier))
	}
	return w
}

var orderColumns = []Column{
	{Name: "id", Key: true, TypeOID: oidInt8, TypeModifier: -1},
	{Name: "note", TypeOID: 25, TypeModifier: -1},
	{Name: "paid", TypeOID: oidBool, TypeModifier: -1},
	{Name: "raw", TypeOID: oidBytea, TypeModifier: -1},
}

func decoderWithOrders(t *testing.T) *PgOutput {
	t.Helper()
	d := NewPgOutput()
	if _, err := d.Decode(relationMsg(7, 'd', orderColumns...)); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestTransactionBoundaries(t *testing.T) {
	t.Parallel()
	d := NewPgOutput()
	m, err := d.Decode(wire{'B'}.u64(0x1_0000_0010).u64(1_000_000).u32(42))
	if err != nil {
		t.Fatal(err)
	}
	if m.CommitLSN != 0x1_0000_0010 || m.XID != 42 || !m.CommitTime.Equal(time.Date(2000, 1, 1, 0, 0, 1, 0, time.UTC)) {
		t.Fatalf("begin: %+v", m)
	}
	m, err = d.Decode(wire{'C'}.u8(0).u64(10).u64(20).u64(0))
	if err != nil {
		t.Fatal(err)
	}
	if m.CommitLSN != 10 || m.EndLSN != 20 {
		t.Fatalf("commit: %+v", m)
	}
}

func TestRowsOfEveryKind(t *testing.T) {
	t.Parallel()
	null, unchanged := Value{State: Null}, Value{State: Unchanged}
	set := func(k Kind, s string) Value { return Value{State: Set, Kind: k, Bytes: []byte(s)} }
	insert := wire{'I'}.u32(7).u8('N').u16(4).text("1").text("a").text("t").text(`\x00ff`)
	for name, c := range map[string]struct {
		msg           wire
		op            Op
		before, after []Value
	}{
		"insert": {insert, Insert, nil, []Value{set(Number, "1"), set(Text, "a"), set(Bool, "true"), set(Hex, "00ff")}},
		"insert of nulls": {
			wire{'I'}.u32(7).u8('N').u16(4).text("1").u8('n').u8('n').u8('n'), Insert, nil,
			[]Value{set(Number, "1"), null, null, null},
		},
		"update without old row": {
			wire{'U'}.u32(7).u8('N').u16(4).text("1").u8('u').text("f").u8('n'), Update, nil,
			[]Value{set(Number, "1"), unchanged, set(Bool, "false"), null},
		},
		"update of the key": {
			// The NULLs outside the key say nothing about the old row.
			wire{'U'}.u32(7).u8('K').u16(4).text("1").u8('n').u8('n').u8('n').u8('N').u16(4).text("2").u8('u').u8('n').u8('n'), Update,
			[]Value{set(Number, "1"), {}, {}, {}},
			[]Value{set(Number, "2"), unchanged, null, null},
		},
		"update with a full old row": {
			wire{'U'}.u32(7).u8('O').u16(4).text("1").text("x").u8('n').u8('n').u8('N').u16(4).text("1").u8('u').u8('n').u8('n'), Update,
			[]Value{set(Number, "1"), set(Text, "x"), null, null},
			[]Value{set(Number, "1"), unchanged, null, null},
		},
		"delete by key": {
			wire{'D'}.u32(7).u8('K').u16(4).text("1").u8('n').u8('n').u8('n'), Delete,
			[]Value{set(Number, "1"), {}, {}, {}},
			nil,
		},
		"delete of a full row": {
			wire{'D'}.u32(7).u8('O').u16(4).text("1").text("").u8('n').u8('n'), Delete,
			[]Value{set(Number, "1"), set(Text, ""), null, null},
			nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, err := decoderWithOrders(t).Decode(c.msg)
			if err != nil {
				t.Fatal(err)
			}
			if m.Change.Op != c.op || m.Change.Relation.String() != "public.orders" {
				t.Fatalf("%v of %v", m.Change.Op, m.Change.Relation)
			}
			if diff := cmp.Diff(c.before, m.Change.Before); diff != "" {
				t.Errorf("before (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.after, m.Change.After); diff != "" {
				t.Errorf("after (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTruncateOfSeveralRelations(t *testing.T) {
	t.Parallel()
	d := decoderWithOrders(t)
	if _, err := d.Decode(relationMsg(8, 'f')); err != nil {
		t.Fatal(err)
	}
	m, err := d.Decode(wire{'T'}.u32(2).u8(3).u32(7).u32(8))
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Truncated) != 2 || m.Truncated[0].ID != 7 || m.Truncated[1].ID != 8 {
		t.Fatalf("truncated %v", m.Truncated)
	}
}

// Each relation message makes a new version: changes decoded under the old
// one keep it.
func TestRelationIsVersioned(t *testing.T) {
	t.Parallel()
	d := decoderWithOrders(t)
	m, err := d.Decode(wire{'I'}.u32(7).u8('N').u16(4).text("1").u8('n').u8('n').u8('n'))
	if err != nil {
		t.Fatal(err)
	}
	old := m.Change.Relation
	if _, err := d.Decode(relationMsg(7, 'd', orderColumns[:1]...)); err != nil {
		t.Fatal(err)
	}
	if m, err = d.Decode(wire{'I'}.u32(7).u8('N').u16(1).text("2")); err != nil {
		t.Fatal(err)
	}
	if m.Change.Relation == old || len(old.Columns) != 4 || len(m.Change.Relation.Columns) != 1 {
		t.Fatal("the relation's versions are mixed up")
	}
}

func TestHostileMessagesAreRefused(t *testing.T) {
	t.Parallel()
	huge := uint32(0xFFFF_FFF0)
	for name, msg := range map[string]wire{
		"empty":                         {},
		"unknown kind":                  {'z'},
		"stream start of version 2":     wire{'S'}.u32(1).u8(1),
		"begin cut short":               wire{'B'}.u64(1),
		"commit with flags":             wire{'C'}.u8(1).u64(10).u64(20).u64(0),
		"commit that ends before it":    wire{'C'}.u8(0).u64(20).u64(10).u64(0),
		"truncate with unknown flags":   wire{'T'}.u32(1).u8(4).u32(7),
		"truncate of unknown relation":  wire{'T'}.u32(1).u8(0).u32(99),
		"relation with nameless column": wire{'R'}.u32(1).str("s").str("t").u8('d').u16(1).u8(0).str("").u32(1).u32(1),
		"relation without a name":       wire{'R'}.u32(1).str("s").str("").u8('d').u16(0),
		"relation with a column twice":  wire{'R'}.u32(1).str("s").str("t").u8('d').u16(2).u8(0).str("a").u32(1).u32(1).u8(0).str("a").u32(1).u32(1),
		"name that is not UTF-8":        wire{'R'}.u32(1).str("s").str("\xff").u8('d').u16(0),
		"key tuple that is cut":         wire{'U'}.u32(7).u8('K').u16(4).text("1").u8('n'),
		"both old tuples":               wire{'U'}.u32(7).u8('K').u16(4).text("1").u8('n').u8('n').u8('n').u8('O').u16(4).text("1").u8('n').u8('n').u8('n'),
		"insert of an old row":          wire{'I'}.u32(7).u8('O').u16(4).text("1").u8('n').u8('n').u8('n'),
		"two new rows":                  wire{'I'}.u32(7).u8('N').u16(4).text("1").u8('n').u8('n').u8('n').u8('N').u16(4).text("1").u8('n').u8('n').u8('n'),
		"left over bytes":               wire{'B'}.u64(1).u64(1).u32(1).u8(0),
		"unknown relation":              wire{'I'}.u32(99).u8('N').u16(0),
		"unknown tuple tag":             wire{'I'}.u32(7).u8('X').u16(4),
		"unknown column tag":            wire{'I'}.u32(7).u8('N').u16(4).u8('z').u8('n').u8('n').u8('n'),
		"binary column":                 wire{'I'}.u32(7).u8('N').u16(4).u8('b').u32(1).u8(1).u8('n').u8('n').u8('n'),
		"wrong column count":            wire{'I'}.u32(7).u8('N').u16(3).u8('n').u8('n').u8('n'),
		"column longer than message":    wire{'I'}.u32(7).u8('N').u16(4).u8('t').u32(0x7FFF_FFFF),
		"negative column length":        wire{'I'}.u32(7).u8('N').u16(4).u8('t').u32(huge),
		"boolean that is none":          wire{'I'}.u32(7).u8('N').u16(4).text("1").u8('n').text("yes").u8('n'),
		"bytea in escape form":          wire{'I'}.u32(7).u8('N').u16(4).text("1").u8('n').u8('n').text("abc"),
		"truncate count too high":       wire{'T'}.u32(huge).u8(0).u32(7),
		"truncate count too low":        wire{'T'}.u32(0).u8(0).u32(7),
		"relation with many columns":    wire{'R'}.u32(1).str("s").str("t").u8('d').u16(0xFFFF),
		"relation with few bytes":       wire{'R'}.u32(1).str("s").str("t").u8('d').u16(3).u8(0),
		"relation of unknown identity":  wire{'R'}.u32(1).str("s").str("t").u8('q').u16(0),
		"name without end":              append(wire{'R'}.u32(1), strings.Repeat("a", 5000)...),
		"update without new row":        wire{'U'}.u32(7).u8('K').u16(4).text("1").u8('n').u8('n').u8('n'),
		"delete of a new row":           wire{'D'}.u32(7).u8('N').u16(4).text("1").u8('n').u8('n').u8('n'),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, err := decoderWithOrders(t).Decode(msg)
			var refusal *Refusal
			if !errors.As(err, &refusal) {
				t.Fatalf("decoded to %+v, error %v", m, err)
			}
			if refusal.Why == "" || refusal.Reason == "" {
				t.Fatalf("the refusal does not say why: %q", refusal.Error())
			}
		})
	}
}

// A type that is not built in is named before the relation that uses it.
func TestTypesAreRemembered(t *testing.T) {
	t.Parallel()
	d := NewPgOutput()
	for _, msg := range []wire{wire{'Y'}.u32(900).str("").str("int4"), wire{'Y'}.u32(901).str("public").str("mood"), wire{'Y'}.u32(901).str("public").str("mood")} {
		if _, err := d.Decode(msg); err != nil {
			t.Fatal(err)
		}
	}
	for oid, want := range map[uint32]TypeName{900: {"pg_catalog", "int4"}, 901: {"public", "mood"}} {
		if got, ok := d.Type(oid); !ok || got != want {
			t.Errorf("type %d is %v %t", oid, got, ok)
		}
	}
	if got, ok := d.Type(902); ok {
		t.Errorf("a type that was never named: %v", got)
	}
	if _, err := d.Decode(wire{'Y'}.u32(902).str("public").str("x").u8(0)); err == nil {
		t.Error("left-over bytes pass")
	}
	if _, ok := d.Type(902); ok {
		t.Error("a message that was refused is remembered")
	}
}

func TestTruncatedIDs(t *testing.T) {
	t.Parallel()
	ids, err := TruncatedIDs(wire{'T'}.u32(2).u8(3).u32(7).u32(8))
	if err != nil || len(ids) != 2 || ids[0] != 7 || ids[1] != 8 {
		t.Errorf("%v %v", ids, err)
	}
	for _, bad := range []wire{{}, {'I'}, {'T'}, wire{'T'}.u32(2).u8(0).u32(7), wire{'T'}.u32(0).u8(0), wire{'T'}.u32(0xFFFF_FFFF).u8(0).u32(7)} {
		if ids, err := TruncatedIDs(bad); err == nil {
			t.Errorf("%q gives %v", []byte(bad), ids)
		}
	}
}

func TestCopyEnvelope(t *testing.T) {
	t.Parallel()
	m, err := ParseCopy(wire{'k'}.u64(77).u64(0).u8(1))
	if err != nil || m.WALEnd != 77 || !m.ReplyRequested {
		t.Fatalf("%+v %v", m, err)
	}
	m, err = ParseCopy(append(wire{'w'}.u64(1).u64(2).u64(3), "data"...))
	if err != nil || string(m.Data) != "data" || m.WALEnd != 2 {
		t.Fatalf("%+v %v", m, err)
	}
	for _, bad := range []wire{{}, {'k'}, {'w', 1}, {'x'}, wire{'k'}.u64(77).u64(0).u8(1).u8(0)} {
		if _, err := ParseCopy(bad); err == nil {
			t.Errorf("accepted %q", []byte(bad))
		}
	}
}

func BenchmarkPgOutputInsert(b *testing.B) {
	d := NewPgOutput()
	if _, err := d.Decode(relationMsg(7, 'd', orderColumns...)); err != nil {
		b.Fatal(err)
	}
	msg := wire{'I'}.u32(7).u8('N').u16(4).text("123456").text("a note of some length").text("t").text(`\x00ff`)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := d.Decode(msg); err != nil {
			b.Fatal(err)
		}
	}
}

// What a decoder keeps of relations and types is bounded, and names what comes
// beyond; one that it knows can be described again.
func TestDescriptionsAreBounded(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		most int
		msg  func(id uint32) wire
	}{
		"relations": {maxRelations, func(id uint32) wire { return relationMsg(id, 'd', orderColumns[0]) }},
		"types":     {maxTypes, func(id uint32) wire { return wire{'Y'}.u32(id).str("public").str("mood") }},
	} {
		d := NewPgOutput()
		for id := range uint32(c.most) {
			if _, err := d.Decode(c.msg(id + 1)); err != nil {
				t.Fatalf("%s, number %d: %v", name, id+1, err)
			}
		}
		_, err := d.Decode(c.msg(uint32(c.most) + 1))
		var refused *Refusal
		if !errors.As(err, &refused) || refused.Reason != ReasonLimit {
			t.Errorf("%s, one more: %v", name, err)
		}
		if _, err := d.Decode(c.msg(1)); err != nil {
			t.Errorf("%s, the first one again: %v", name, err)
		}
	}
}
