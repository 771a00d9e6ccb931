package decode

import (
	"encoding/binary"
	"fmt"
	"maps"
	"time"
	"unicode/utf8"
)

// Limits of what a Postgres server can send; more than that is not Postgres.
const (
	// maxColumns is Postgres' MaxTupleAttributeNumber.
	maxColumns = 1664
	// maxNameBytes is above NAMEDATALEN-1 (63) of every stock build.
	maxNameBytes = 1024
	// maxRelations bounds the relation cache of one decoder, maxTypes what it
	// remembers of types.
	maxRelations = 65536
	maxTypes     = 65536
)

// MessageKind is the first byte of a pgoutput message, protocol version 1.
type MessageKind byte

// The messages of pgoutput protocol version 1.
const (
	MsgBegin    MessageKind = 'B'
	MsgCommit   MessageKind = 'C'
	MsgOrigin   MessageKind = 'O'
	MsgRelation MessageKind = 'R'
	MsgType     MessageKind = 'Y'
	MsgInsert   MessageKind = 'I'
	MsgUpdate   MessageKind = 'U'
	MsgDelete   MessageKind = 'D'
	MsgTruncate MessageKind = 'T'
	MsgLogical  MessageKind = 'M'
)

// Message is one decoded pgoutput message. Which fields are meaningful
// depends on Kind. It is reused by the decoder that returned it.
type Message struct {
	Kind MessageKind

	// Begin and Commit. CommitLSN is the start of the commit record (Begin
	// calls it the final LSN), EndLSN the first byte after it: the only one of
	// the two that may be acknowledged. EndLSN is 0 in Begin.
	CommitLSN  uint64
	EndLSN     uint64
	CommitTime time.Time
	XID        uint32

	// Relation is set for MsgRelation.
	Relation *Relation
	// Change is set for MsgInsert, MsgUpdate and MsgDelete. Its Position is
	// the caller's to set: the message does not carry its commit's end.
	Change OrderChange
	// Truncated is set for MsgTruncate: the relations, all emptied at once.
	Truncated []*Relation

	// Transactional, Prefix and Content are set for MsgLogical.
	Transactional bool
	Prefix        string
	Content       []byte
}

// PgOutput decodes the messages of one pgoutput stream, protocol version 1
// with text values, in the order in which the server sent them: it keeps the
// relations that later messages refer to.
//
// It is not safe for concurrent use. What Decode returns aliases the message
// and the decoder, and is valid until the next call.
//
// The formats are those of the Postgres manual, "Logical Replication Message
// Formats"; the quirks named in comments were seen on servers.
type PgOutput struct {
	relations map[uint32]*Relation
	types     map[uint32]TypeName
	msg       Message
	before    []Value
	after     []Value
}

// NewPgOutput makes a decoder with an empty relation cache, as a fresh
// replication session starts with.
func NewPgOutput() *PgOutput {
	return &PgOutput{relations: make(map[uint32]*Relation), types: make(map[uint32]TypeName)}
}

// TypeName is a type by the name that a Type message gave it.
type TypeName struct{ Schema, Name string }

// Type gives what the stream has said of a type that is not built in. Of a
// domain it names the type behind it, as it was when the change was made:
// that still holds when the catalogue no longer has the domain.
func (d *PgOutput) Type(oid uint32) (t TypeName, ok bool) {
	t, ok = d.types[oid]
	return t, ok
}

// Clone gives a decoder that knows the relations and types that d knows: to read
// messages ahead without d noticing.
func (d *PgOutput) Clone() *PgOutput {
	return &PgOutput{relations: maps.Clone(d.relations), types: maps.Clone(d.types)}
}

var (
	bytesTrue  = []byte("true")
	bytesFalse = []byte("false")
)

// pgEpoch is 2000-01-01 UTC, the zero of Postgres timestamps, in Unix seconds.
const pgEpoch = 946_684_800

// Decode reads one message, which must be complete. Errors are *Refusal: a
// message that cannot be read is never skipped, since what it said is lost.
func (d *PgOutput) Decode(msg []byte) (*Message, error) {
	if len(msg) == 0 {
		return nil, malformed("pgoutput message", "it is empty")
	}
	c := cursor{buf: msg[1:]}
	d.msg = Message{Kind: MessageKind(msg[0]), Truncated: d.msg.Truncated[:0]}
	var err error
	switch d.msg.Kind {
	case MsgBegin:
		d.msg.CommitLSN = c.uint64()
		d.msg.CommitTime = pgTime(c.uint64())
		d.msg.XID = c.uint32()
	case MsgCommit:
		flags := c.uint8()
		d.msg.CommitLSN = c.uint64()
		d.msg.EndLSN = c.uint64()
		d.msg.CommitTime = pgTime(c.uint64())
		switch {
		case flags != 0:
			err = malformed("commit", fmt.Sprintf("its flags are %#x, not 0", flags))
		case d.msg.EndLSN < d.msg.CommitLSN:
			err = malformed("commit", "it ends at LSN "+FormatLSN(d.msg.EndLSN)+", before it begins at "+FormatLSN(d.msg.CommitLSN))
		}
	case MsgOrigin:
		c.uint64()
		c.name()
	case MsgType:
		err = d.typeName(&c)
	case MsgRelation:
		err = d.relation(&c)
	case MsgInsert:
		err = d.insert(&c)
	case MsgUpdate:
		err = d.update(&c)
	case MsgDelete:
		err = d.delete(&c)
	case MsgTruncate:
		err = d.truncate(&c)
	case MsgLogical:
		flags := c.uint8()
		d.msg.Transactional = flags == 1
		if flags > 1 {
			err = malformed("logical message", fmt.Sprintf("its flags are %#x", flags))
		}
		c.uint64()
		d.msg.Prefix = c.name()
		d.msg.Content = c.bytes(c.length())
	default:
		return nil, &Refusal{
			Reason: ReasonUnsupported, What: "pgoutput message",
			Why:      fmt.Sprintf("its kind is %q", msg[0]),
			Expected: "a message of protocol version 1 (one of BCOYRIUDTM)",
		}
	}
	if c.badName {
		return nil, malformed("pgoutput message "+string(msg[0]), "a name in it is not UTF-8")
	}
	if c.short {
		return nil, malformed("pgoutput message "+string(msg[0]), fmt.Sprintf("it ends inside a field (%d bytes)", len(msg)))
	}
	if err != nil {
		return nil, err
	}
	if len(c.buf) != 0 {
		return nil, malformed("pgoutput message "+string(msg[0]), fmt.Sprintf("%d bytes are left over after its end", len(c.buf)))
	}
	return &d.msg, nil
}

func (d *PgOutput) typeName(c *cursor) error {
	oid := c.uint32()
	t := TypeName{Schema: c.name(), Name: c.name()}
	if c.short || len(c.buf) != 0 {
		return nil // reported by the caller
	}
	if t.Schema == "" {
		t.Schema = pgCatalog
	}
	if _, known := d.types[oid]; !known && len(d.types) >= maxTypes {
		return &Refusal{
			Reason: ReasonLimit, What: "type " + t.Schema + "." + t.Name,
			Why: fmt.Sprintf("the stream has named %d types", maxTypes), Expected: "fewer",
		}
	}
	if d.types == nil {
		d.types = make(map[uint32]TypeName)
	}
	d.types[oid] = t
	return nil
}

// pgCatalog is the schema that the protocol abbreviates to nothing.
const pgCatalog = "pg_catalog"

func (d *PgOutput) relation(c *cursor) error {
	rel := &Relation{ID: c.uint32()}
	rel.Schema = c.name()
	rel.Name = c.name()
	rel.Identity = Identity(c.uint8())
	n := int(c.uint16())
	if c.short {
		return nil // reported by the caller
	}
	if rel.Schema == "" {
		rel.Schema = pgCatalog
	}
	switch rel.Identity {
	case IdentityDefault, IdentityNothing, IdentityFull, IdentityIndex:
	default:
		return malformed("relation "+rel.String(), fmt.Sprintf("its replica identity is %q", byte(rel.Identity)))
	}
	if rel.Name == "" {
		return malformed("relation", fmt.Sprintf("number %d has no name", rel.ID))
	}
	// A column takes at least 11 bytes: flags, a name of one, type, modifier.
	if n > maxColumns || n*11 > len(c.buf) {
		return malformed("relation "+rel.String(), fmt.Sprintf("it claims %d columns in %d bytes", n, len(c.buf)))
	}
	rel.Columns = make([]Column, n)
	seen := make(map[string]bool, n)
	for i := range rel.Columns {
		col := &rel.Columns[i]
		flags := c.uint8()
		col.Key = flags == 1
		if flags > 1 {
			return malformed("relation "+rel.String(), fmt.Sprintf("the flags of a column are %#x", flags))
		}
		col.Name = c.name()
		col.TypeOID = c.uint32()
		col.TypeModifier = int32(c.uint32()) //nolint:gosec // -1 is sent as 0xFFFFFFFF
		if !c.short && (col.Name == "" || seen[col.Name]) {
			return malformed("relation "+rel.String(), fmt.Sprintf("it has a column without a name, or two named %q", col.Name))
		}
		seen[col.Name] = true
	}
	if c.short {
		return nil
	}
	if len(d.relations) >= maxRelations {
		if _, known := d.relations[rel.ID]; !known {
			return &Refusal{
				Reason: ReasonLimit, What: "relation " + rel.String(),
				Why: fmt.Sprintf("the stream has described %d relations", maxRelations), Expected: "fewer",
			}
		}
	}
	d.relations[rel.ID] = rel
	d.msg.Relation = rel
	return nil
}

// known finds the relation of a change. A change without one means that the
// server and we disagree about the stream: nothing of it can be trusted.
func (d *PgOutput) known(c *cursor) (*Relation, error) {
	id := c.uint32()
	if c.short {
		return nil, nil //nolint:nilnil // reported by the caller
	}
	rel, ok := d.relations[id]
	if !ok {
		return nil, malformed("pgoutput change", fmt.Sprintf("relation %d was never described in this session", id))
	}
	return rel, nil
}

func (d *PgOutput) insert(c *cursor) error {
	rel, err := d.known(c)
	if err != nil || rel == nil {
		return err
	}
	if tag := c.uint8(); tag != 'N' && !c.short {
		return malformed("insert into "+rel.String(), fmt.Sprintf("its tuple is tagged %q, not 'N'", tag))
	}
	if d.after, err = c.tuple(rel, d.after[:0], false); err != nil {
		return err
	}
	d.msg.Change = OrderChange{Op: Insert, Relation: rel, After: d.after}
	return nil
}

func (d *PgOutput) update(c *cursor) error {
	rel, err := d.known(c)
	if err != nil || rel == nil {
		return err
	}
	ch := OrderChange{Op: Update, Relation: rel}
	tag := c.uint8()
	if tag == 'K' || tag == 'O' {
		if d.before, err = c.tuple(rel, d.before[:0], tag == 'K'); err != nil {
			return err
		}
		ch.Before = d.before
		tag = c.uint8()
	}
	if tag != 'N' && !c.short {
		return malformed("update of "+rel.String(), fmt.Sprintf("its new tuple is tagged %q, not 'N'", tag))
	}
	if d.after, err = c.tuple(rel, d.after[:0], false); err != nil {
		return err
	}
	ch.After = d.after
	d.msg.Change = ch
	return nil
}

func (d *PgOutput) delete(c *cursor) error {
	rel, err := d.known(c)
	if err != nil || rel == nil {
		return err
	}
	tag := c.uint8()
	if tag != 'K' && tag != 'O' && !c.short {
		return malformed("delete from "+rel.String(), fmt.Sprintf("its tuple is tagged %q, neither 'K' nor 'O'", tag))
	}
	if d.before, err = c.tuple(rel, d.before[:0], tag == 'K'); err != nil {
		return err
	}
	d.msg.Change = OrderChange{Op: Delete, Relation: rel, Before: d.before}
	return nil
}

// TruncatedIDs gives the OIDs of the relations that a Truncate message
// empties, without knowing the relations.
func TruncatedIDs(msg []byte) ([]uint32, error) {
	if len(msg) == 0 || MessageKind(msg[0]) != MsgTruncate {
		return nil, malformed("truncate", "it is another message")
	}
	c := cursor{buf: msg[1:]}
	n, err := c.truncateCount()
	if err != nil {
		return nil, err
	}
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = c.uint32()
	}
	return ids, nil
}

// truncateCount reads a Truncate message up to its list of relations, which
// then is as long as it says.
func (c *cursor) truncateCount() (int, error) {
	n := int64(c.uint32())
	flags := c.uint8() // CASCADE = 1, RESTART IDENTITY = 2: the same to a destination
	switch {
	case c.short:
		return 0, malformed("truncate", "it is cut short")
	case flags > 3:
		return 0, malformed("truncate", fmt.Sprintf("its flags are %#x", flags))
	case n == 0 || n*4 != int64(len(c.buf)):
		return 0, malformed("truncate", fmt.Sprintf("it claims %d relations in %d bytes", n, len(c.buf)))
	}
	return int(n), nil
}

func (d *PgOutput) truncate(c *cursor) error {
	n, err := c.truncateCount()
	if err != nil {
		return err
	}
	for range n {
		rel, err := d.known(c)
		if err != nil {
			return err
		}
		d.msg.Truncated = append(d.msg.Truncated, rel)
	}
	return nil
}

// tuple reads one row. keyOnly marks a 'K' tuple: the server sends NULL for
// every column outside the key there, which says nothing about the row.
func (c *cursor) tuple(rel *Relation, dst []Value, keyOnly bool) ([]Value, error) {
	n := int(c.uint16())
	if c.short {
		return dst, nil
	}
	if n != len(rel.Columns) {
		return dst, malformed("row of "+rel.String(), fmt.Sprintf("it has %d columns, the relation %d", n, len(rel.Columns)))
	}
	for i := range n {
		col := &rel.Columns[i]
		var v Value
		switch tag := c.uint8(); tag {
		case 'n':
			v.State = Null
		case 'u':
			v.State = Unchanged
		case 't':
			raw := c.bytes(c.length())
			if c.short {
				return dst, nil
			}
			var refused *Refusal
			if v, refused = TextValue(col.TypeOID, raw); refused != nil {
				refused.Where = rel.String() + "." + col.Name
				return dst, refused
			}
		default:
			if c.short {
				return dst, nil
			}
			return dst, malformed("row of "+rel.String(), fmt.Sprintf("column %q is tagged %q, none of n, u, t", col.Name, tag))
		}
		if keyOnly && !col.Key {
			v = Value{State: Absent}
		}
		dst = append(dst, v)
	}
	return dst, nil
}

// Type OIDs from Postgres' pg_type.dat that have a better kind than Text.
const (
	oidBool    = 16
	oidBytea   = 17
	oidInt8    = 20
	oidInt2    = 21
	oidInt4    = 23
	oidOid     = 26
	oidXid     = 28
	oidCid     = 29
	oidJSON    = 114
	oidFloat4  = 700
	oidFloat8  = 701
	oidNumeric = 1700
	oidJSONB   = 3802
	oidXid8    = 5069
)

// TextValue classifies a value of a type in Postgres' text form. Numbers pass as they
// stand: with the session settings that internal/wal pins, Postgres writes
// them in JSON's grammar, apart from NaN and the infinities.
func TextValue(typeOID uint32, raw []byte) (Value, *Refusal) {
	v := Value{State: Set, Kind: Text, Bytes: raw}
	switch typeOID {
	case oidBool:
		v.Kind = Bool
		switch string(raw) {
		case "t":
			v.Bytes = bytesTrue
		case "f":
			v.Bytes = bytesFalse
		default:
			return v, &Refusal{Reason: ReasonMalformed, What: "boolean", Why: "its text is neither t nor f"}
		}
	case oidInt2, oidInt4, oidInt8, oidOid, oidXid, oidCid, oidXid8, oidFloat4, oidFloat8, oidNumeric:
		v.Kind = Number
	case oidBytea:
		if len(raw) < 2 || raw[0] != '\\' || raw[1] != 'x' {
			return v, &Refusal{
				Reason: ReasonMalformed, What: "bytea", Why: `its text does not begin with \x`,
				Expected: "bytea_output=hex, which the session pins",
			}
		}
		v.Kind, v.Bytes = Hex, raw[2:]
	case oidJSON, oidJSONB:
		v.Kind = JSON
	}
	return v, nil
}

// pgTime converts Postgres' microseconds since 2000. All 64 bits of them are a
// time: as a Duration, what lies three centuries off would be another one.
func pgTime(us uint64) time.Time {
	n := int64(us) //nolint:gosec // a signed count on the wire
	return time.Unix(pgEpoch+n/1e6, n%1e6*1e3).UTC()
}

func malformed(what, why string) *Refusal {
	return &Refusal{Reason: ReasonMalformed, What: what, Why: why}
}

// cursor reads a message field by field. A read past the end gives zero
// values and sets short, so that callers check once, before they use a count
// or return.
type cursor struct {
	buf   []byte
	short bool
	// badName: a name is not UTF-8. It sets short too, so that nobody goes on.
	badName bool
}

func (c *cursor) take(n int) []byte {
	if n < 0 || n > len(c.buf) {
		c.short = true
		c.buf = nil
		return nil
	}
	b := c.buf[:n:n]
	c.buf = c.buf[n:]
	return b
}

func (c *cursor) uint8() byte {
	if b := c.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (c *cursor) uint16() uint16 {
	if b := c.take(2); b != nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (c *cursor) uint32() uint32 {
	if b := c.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (c *cursor) uint64() uint64 {
	if b := c.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

// length reads the 32-bit length of a value; a negative one is out of range
// for take.
func (c *cursor) length() int { return int(int32(c.uint32())) } //nolint:gosec // signed on the wire

func (c *cursor) bytes(n int) []byte { return c.take(n) }

// name reads a NUL-terminated string.
func (c *cursor) name() string {
	for i := 0; i < len(c.buf) && i <= maxNameBytes; i++ {
		if c.buf[i] == 0 {
			b := c.take(i + 1)
			if !utf8.Valid(b) {
				c.short, c.badName = true, true
			}
			return string(b[:i])
		}
	}
	c.short = true
	c.buf = nil
	return ""
}

// CopyKind is the first byte of a CopyData message on a replication stream.
type CopyKind byte

// The CopyData messages that a walsender sends.
const (
	CopyXLogData  CopyKind = 'w'
	CopyKeepalive CopyKind = 'k'
)

// CopyMessage is one CopyData message of a replication stream.
type CopyMessage struct {
	Kind CopyKind
	// WALEnd is the server's position: for a keepalive, what the walsender has
	// sent or passed over.
	WALEnd uint64
	// Data is the plug-in's message, for CopyXLogData. It aliases the input.
	Data []byte
	// ServerTime is the server's clock when it sent the message.
	ServerTime time.Time
	// ReplyRequested asks for a status update at once, for CopyKeepalive.
	ReplyRequested bool
}

// ParseCopy reads the envelope of a replication message. The row position of
// XLogData is left out on purpose: nothing may be derived from it.
func ParseCopy(data []byte) (CopyMessage, error) {
	if len(data) == 0 {
		return CopyMessage{}, malformed("replication message", "it is empty")
	}
	c := cursor{buf: data[1:]}
	m := CopyMessage{Kind: CopyKind(data[0])}
	switch m.Kind {
	case CopyXLogData:
		c.uint64() // start of the data in the WAL
		m.WALEnd = c.uint64()
		m.ServerTime = pgTime(c.uint64())
		m.Data = c.buf
	case CopyKeepalive:
		m.WALEnd = c.uint64()
		m.ServerTime = pgTime(c.uint64())
		m.ReplyRequested = c.uint8() != 0
		if !c.short && len(c.buf) != 0 {
			return m, malformed("keepalive", fmt.Sprintf("%d bytes are left over", len(c.buf)))
		}
	default:
		return m, &Refusal{
			Reason: ReasonUnsupported, What: "replication message", Why: fmt.Sprintf("its kind is %q", data[0]),
			Expected: "XLogData or keepalive",
		}
	}
	if c.short {
		return m, malformed("replication message "+string(data[0]), "it is cut short")
	}
	return m, nil
}
