package decode

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Format is how the records of a topic are written: an encoding and a shape.
type Format string

// The formats.
const (
	// FormatJSON: the value is a row, one JSON object.
	FormatJSON Format = "json"
	// FormatOpJSON: the same with one member that says what to do with it.
	FormatOpJSON Format = "op-json"
	// FormatDebeziumJSON: Debezium's envelope in JSON, with or without its
	// schema.
	FormatDebeziumJSON Format = "debezium-json"
	// FormatAvro, FormatOpAvro and FormatDebeziumAvro are the same in Avro.
	FormatAvro         Format = "avro"
	FormatOpAvro       Format = "op-avro"
	FormatDebeziumAvro Format = "debezium-avro"
)

// Formats gives all formats.
func Formats() []Format {
	return []Format{FormatJSON, FormatOpJSON, FormatDebeziumJSON, FormatAvro, FormatOpAvro, FormatDebeziumAvro}
}

// Avro tells whether the values are Avro.
func (f Format) Avro() bool { return f == FormatAvro || f == FormatOpAvro || f == FormatDebeziumAvro }

func (f Format) debezium() bool     { return f == FormatDebeziumJSON || f == FormatDebeziumAvro }
func (f Format) hasOperation() bool { return f == FormatOpJSON || f == FormatOpAvro }

// KeyFormat is how the keys of a topic's records are written.
type KeyFormat string

// The key formats.
const (
	// KeyAuto: JSON, or where a key is no JSON, its text. Where values are Avro:
	// Avro, if the key names its schema or has a schema given.
	KeyAuto KeyFormat = "auto"
	// KeyAvro: Avro, a record or one scalar.
	KeyAvro KeyFormat = "avro"
	// KeyJSON: JSON, an object or one scalar.
	KeyJSON KeyFormat = "json"
	// KeyText: text as it stands, also where it looks like JSON.
	KeyText KeyFormat = "text"
)

// KeyFormats gives all key formats.
func KeyFormats() []KeyFormat { return []KeyFormat{KeyAuto, KeyJSON, KeyText, KeyAvro} }

// TombstonePolicy says what a record without a value means.
type TombstonePolicy string

// The tombstone policies.
const (
	// TombstoneDelete deletes the row with the record's key.
	TombstoneDelete TombstonePolicy = "delete"
	// TombstoneIgnore passes over it.
	TombstoneIgnore TombstonePolicy = "ignore"
	// TombstoneStop refuses it.
	TombstoneStop TombstonePolicy = "stop"
)

// Passed is the closed set of records that need nothing of the destination. It
// is a metric label.
type Passed string

// What is passed over.
const (
	PassedTombstone   Passed = "tombstone"
	PassedTruncate    Passed = "truncate"
	PassedTransaction Passed = "transaction"
	PassedHeartbeat   Passed = "heartbeat"
	PassedSchema      Passed = "schema_change"
	PassedMessage     Passed = "message"
)

// ColumnSource says where a column's values come from.
type ColumnSource struct {
	// From is a field of the row, or what stands beside it: @topic, @partition,
	// @offset, @timestamp, @headers, @header.NAME, @key for a key that is one
	// value, and @key.FIELD.
	From string
	// Column of the table, as its relation spells it.
	Column string
}

// TopicConfig says how the records of one topic become changes of one table.
type TopicConfig struct {
	Format Format
	// Relation is the table; its key columns are the table's primary key.
	Relation *Relation
	// RefuseUnknown refuses fields that are no column instead of ignoring and
	// counting them.
	RefuseUnknown bool
	Columns       []ColumnSource
	// FieldTypes says what fields mean whose schema does not come with the
	// record, by field.
	FieldTypes map[string]string
	KeyFormat  KeyFormat // KeyAuto
	// Schemas finds the schemas that Avro messages name; nil where none can be
	// found.
	Schemas Schemas
	// ValueSchema and KeySchema are for Avro that names no schema; nil where it
	// does.
	ValueSchema, KeySchema *AvroSchema
	// OpField is the member with the operation, for FormatOpJSON and FormatOpAvro.
	OpField string
	// Tombstone is what a record without a value means (TombstoneDelete).
	Tombstone TombstonePolicy
	// RefuseControl refuses Debezium's messages that carry no row (transaction
	// boundaries, heartbeats, changes of schema), instead of passing over them.
	RefuseControl bool
	// IgnoreTruncate passes over truncations instead of refusing them.
	IgnoreTruncate bool
	// Unavailable is Debezium's unavailable.value.placeholder
	// ("__debezium_unavailable_value").
	Unavailable string
	// OnPassed is told of records that are passed over, OnUnknown of fields
	// that are no column. Both must be quick; either may be nil.
	OnPassed  func(Passed)
	OnUnknown func()
}

// Topic decodes the records of one topic into changes of one table.
//
// In rows, members are matched to columns by name: exactly, or without regard
// to case where the column's name is lower case, which is how Feldera folds
// unquoted names. Numbers keep their digits.
//
// It is not safe for concurrent use. What Decode returns aliases the record
// and the decoder, and is valid until the next call.
type Topic struct {
	cfg     TopicConfig
	rel     *Relation
	keys    []int // columns of the primary key
	columns map[string]target
	// fromKey are the columns that take a part of the key also where there is a
	// value; keyScalar is the one that takes a key that is one value, -1 for
	// none.
	fromKey   map[string]int
	keyScalar int
	beside    []besideColumn

	values encoding
	walker walker   // of values: there is one walk at a time
	keyed  encoding // nil where keys are text
	// keyedAvro reads keys that are Avro where keyed reads those that are not;
	// nil where there are none.
	keyedAvro encoding
	scratch   scratch

	after, before []Value
	change        OrderChange
	unavailable   *placeholder
	foldName      []byte
}

// target is where a field goes.
type target struct {
	column int
	hint   *connectType // nil: the field's own schema says, or nothing does
}

// besideColumn is a column that takes what stands beside the row.
type besideColumn struct {
	column int
	from   string
	header string
}

// The words that begin with @ in ColumnSource.From.
const (
	besideTopic     = "@topic"
	besidePartition = "@partition"
	besideOffset    = "@offset"
	besideTimestamp = "@timestamp"
	besideHeaders   = "@headers"
	besideHeader    = "@header."
	besideKey       = "@key"
	besideKeyField  = "@key."
)

// CheckColumnSource tells what is wrong with the text of a ColumnSource.From.
func CheckColumnSource(from string) error {
	switch {
	case from == "":
		return errors.New("it is empty")
	case !strings.HasPrefix(from, "@"), from == besideTopic, from == besidePartition, from == besideOffset, from == besideTimestamp,
		from == besideHeaders, from == besideKey:
		return nil
	case len(from) > len(besideHeader) && strings.HasPrefix(from, besideHeader), len(from) > len(besideKeyField) && strings.HasPrefix(from, besideKeyField):
		return nil
	}
	return errors.New("it begins with @ and is none of @topic, @partition, @offset, @timestamp, @headers, @header.NAME, @key, @key.FIELD")
}

// CheckFieldType tells what is wrong with the text of a field's type.
func CheckFieldType(text string) error {
	_, err := parseFieldType(text)
	return err
}

// NewTopic makes a decoder. Errors are *Refusal and say what of the
// configuration does not fit the table.
func NewTopic(cfg TopicConfig) (*Topic, error) {
	t := &Topic{
		cfg: cfg, rel: cfg.Relation, keyScalar: -1,
		columns: make(map[string]target, len(cfg.Relation.Columns)), fromKey: make(map[string]int),
		after: make([]Value, len(cfg.Relation.Columns)), before: make([]Value, len(cfg.Relation.Columns)),
	}
	index := make(map[string]int, len(cfg.Relation.Columns))
	for i := range t.rel.Columns {
		index[t.rel.Columns[i].Name] = i
		t.columns[t.rel.Columns[i].Name] = target{column: i}
		if t.rel.Columns[i].Key {
			t.keys = append(t.keys, i)
		}
	}
	if len(t.keys) == 1 {
		t.keyScalar = t.keys[0]
	}
	for _, c := range cfg.Columns {
		i, ok := index[c.Column]
		if !ok {
			return nil, t.misfit(fmt.Sprintf("the table has no column %q for %s", c.Column, c.From), "a column of the table")
		}
		if err := t.source(c.From, i); err != nil {
			return nil, err
		}
	}
	for field, text := range cfg.FieldTypes {
		hint, err := parseFieldType(text)
		if err != nil {
			return nil, t.misfit(fmt.Sprintf("the type of field %q: %v", field, err), "a type of docs/formats.md")
		}
		to, ok := t.columns[field]
		if !ok {
			return nil, t.misfit(fmt.Sprintf("a type is given for field %q, which goes to no column", field), "a field that is carried")
		}
		to.hint = hint
		t.columns[field] = to
	}
	orElse(&t.cfg.KeyFormat, KeyAuto)
	orElse(&t.cfg.Tombstone, TombstoneDelete)
	orElse(&t.cfg.Unavailable, defaultPlaceholder)
	t.unavailable = newPlaceholder(t.cfg.Unavailable)
	return t, t.encodings(index)
}

func orElse[T ~string](v *T, otherwise T) {
	if *v == "" {
		*v = otherwise
	}
}

// source takes in where one column comes from.
func (t *Topic) source(from string, column int) error {
	if err := CheckColumnSource(from); err != nil {
		return t.misfit(fmt.Sprintf("the source %q of column %q: %v", from, t.rel.Columns[column].Name, err), "")
	}
	switch {
	case from == besideKey:
		t.fromKey[""], t.keyScalar = column, column
	case strings.HasPrefix(from, besideKeyField):
		t.fromKey[from[len(besideKeyField):]] = column
	case strings.HasPrefix(from, "@"):
		b := besideColumn{column: column, from: from}
		if strings.HasPrefix(from, besideHeader) {
			b.from, b.header = besideHeader, from[len(besideHeader):]
		}
		t.beside = append(t.beside, b)
	default:
		t.columns[from] = target{column: column}
	}
	return nil
}

// encodings makes what reads values and keys.
func (t *Topic) encodings(columns map[string]int) error {
	_, payload := columns["payload"]
	newJSON := func() encoding { return &jsonEncoding{scratch: &t.scratch, wrapped: !payload} }
	newAvro := func(s *AvroSchema) encoding {
		return &avroEncoding{scratch: &t.scratch, schemas: t.cfg.Schemas, fixed: s}
	}
	switch {
	case !slices.Contains(Formats(), t.cfg.Format):
		return t.misfit(fmt.Sprintf("the format %q is not known", t.cfg.Format), "")
	case t.cfg.Format.hasOperation() && t.cfg.OpField == "":
		return t.misfit("the name of the field with the operation is not given", "")
	case t.cfg.Format.Avro():
		t.values = newAvro(t.cfg.ValueSchema)
	default:
		t.values = newJSON()
	}
	switch t.cfg.KeyFormat {
	case KeyAuto, KeyJSON:
		t.keyed = newJSON()
		if t.cfg.KeyFormat == KeyAuto && t.cfg.Format.Avro() {
			t.keyedAvro = newAvro(t.cfg.KeySchema)
		}
	case KeyAvro:
		t.keyed = newAvro(t.cfg.KeySchema)
	case KeyText:
	default:
		return t.misfit(fmt.Sprintf("the key format %q is not known", t.cfg.KeyFormat), "")
	}
	return nil
}

func (t *Topic) misfit(why, expected string) *Refusal {
	return &Refusal{Reason: ReasonSetup, What: fmt.Sprintf("mapping to table %s", t.rel), Why: why, Expected: expected}
}

// Decode reads one record. A nil change without an error is a record that needs
// nothing of the destination. Errors are *Refusal with the position in Where,
// or *PendingError.
func (t *Topic) Decode(rec *Record) (*OrderChange, error) {
	clear(t.after)
	clear(t.before)
	t.scratch.reset(len(rec.Key)+len(rec.Value), t.times())
	t.change = OrderChange{Relation: t.rel, Position: rec.Position}
	passed, err := t.decode(rec)
	switch {
	case err != nil:
		return nil, t.refuse(rec, err)
	case passed != "":
		if t.cfg.OnPassed != nil {
			t.cfg.OnPassed(passed)
		}
		return nil, nil //nolint:nilnil // a record that needs nothing
	}
	return &t.change, nil
}

// times is how many times a record's size its values may take. Checking JSON
// takes memory of its own.
func (t *Topic) times() int {
	if t.cfg.Format.Avro() {
		return scratchOfAvro
	}
	return scratchOfJSON
}

func (t *Topic) decode(rec *Record) (Passed, error) {
	if rec.Value == nil {
		return t.tombstone(rec)
	}
	root, err := t.values.open(rec, partValue)
	if err != nil {
		return "", err
	}
	if t.values.empty(root) {
		return t.tombstone(rec) // {"schema":null,"payload":null}
	}
	if !t.values.record(root) {
		return "", fmt.Errorf("it is %s, not %s", t.values.describe(root), t.expected())
	}
	switch {
	case t.cfg.Format.debezium():
		return t.envelope(rec, root)
	case t.cfg.Format.hasOperation():
		return "", t.withOperation(rec, root)
	}
	if err := t.fill(t.after, root, everyColumn); err != nil {
		return "", err
	}
	return "", t.upsert(rec)
}

// upsert makes a change of a row that the source took out of an envelope, or
// never had in one. A column that the source does not know leaves an update of
// the others.
func (t *Topic) upsert(rec *Record) error {
	op := Insert
	if t.unknown(t.after) && len(t.keys) > 0 {
		op = Update
	}
	return t.carry(op, rec)
}

// carry makes a change with the row in after.
func (t *Topic) carry(op Op, rec *Record) error {
	t.change.Op, t.change.After = op, t.after
	return t.complete(rec)
}

// unknown marks the values that Debezium put for those that it does not know,
// and tells whether there are any.
func (t *Topic) unknown(row []Value) bool {
	found := false
	for i := range row {
		if row[i].State == Set && t.unavailable.is(&row[i]) {
			row[i], found = Value{State: Unchanged}, true
		}
	}
	return found
}

// complete fills the columns of after that take what stands beside the row.
func (t *Topic) complete(rec *Record) error {
	if len(t.fromKey) > 0 {
		if err := t.key(rec, t.after, true); err != nil {
			return inKey(err)
		}
	}
	for i := range t.beside {
		b := &t.beside[i]
		to := &t.after[b.column]
		if to.State != Absent {
			return fmt.Errorf("column %q is given by the row and by %s", t.rel.Columns[b.column].Name, b.from)
		}
		var err error
		if *to, err = t.metadata(b, rec); err != nil {
			return err
		}
	}
	return nil
}

// metadata gives what stands beside the row.
func (t *Topic) metadata(b *besideColumn, rec *Record) (Value, error) {
	w := t.scratch.begin()
	switch b.from {
	case besideTopic:
		w.string(rec.Position.Topic)
		return w.value(Text)
	case besidePartition:
		w.grow(20, func(dst []byte) []byte { return strconv.AppendInt(dst, int64(rec.Position.Partition), 10) })
		return w.value(Number)
	case besideOffset:
		w.grow(20, func(dst []byte) []byte { return strconv.AppendInt(dst, rec.Position.Offset, 10) })
		return w.value(Number)
	case besideTimestamp:
		if rec.Time.IsZero() {
			return Value{State: Null}, nil
		}
		meansInstantMillis.writeInt(&w, rec.Time.UnixMilli())
		return w.value(Text)
	case besideHeader:
		v, ok := rec.Header(b.header)
		switch {
		case !ok || v == nil:
			return Value{State: Null}, nil
		case utf8.Valid(v):
			return Value{State: Set, Kind: Text, Bytes: v}, nil
		}
		writeHex(&w, v)
		return w.value(Hex)
	case besideHeaders:
		return t.headers(&w, rec)
	}
	return Value{}, fmt.Errorf("column source %q is not known", b.from)
}

// headers writes all headers as an array of objects, since a name can stand
// more than once. A value that is not text is written as \x and hexadecimal
// digits.
func (t *Topic) headers(w *writer, rec *Record) (Value, error) {
	w.byte('[')
	for i := range rec.Headers {
		if i > 0 {
			w.byte(',')
		}
		h := &rec.Headers[i]
		w.string(`{"key":`)
		if err := writeQuoted(w, []byte(h.Key)); err != nil {
			return Value{}, fmt.Errorf("a header's name: %w", err)
		}
		w.string(`,"value":`)
		switch {
		case h.Value == nil:
			w.string("null")
		case utf8.Valid(h.Value):
			if err := writeQuoted(w, h.Value); err != nil {
				return Value{}, err
			}
		default:
			w.string(`"\\x`)
			writeHex(w, h.Value)
			w.byte('"')
		}
		w.byte('}')
	}
	w.byte(']')
	return w.value(JSON)
}

func (t *Topic) tombstone(rec *Record) (Passed, error) {
	switch t.cfg.Tombstone {
	case TombstoneIgnore:
		return PassedTombstone, nil
	case TombstoneStop:
		return "", &Refusal{
			Reason: ReasonUnsupported, What: "tombstone", Why: "it has no value, and tombstones are refused here",
			Do: "set KAFKASINK_TOMBSTONES=delete or ignore",
		}
	case TombstoneDelete:
	}
	if len(t.keys) == 0 {
		return "", &Refusal{
			Reason: ReasonIdentity, What: "tombstone",
			Why:      fmt.Sprintf("table %s has no primary key, so a delete by key has nothing to match", t.rel),
			Expected: "a table with a PRIMARY KEY, or a topic without tombstones", Do: "set KAFKASINK_TOMBSTONES=ignore",
		}
	}
	if err := t.key(rec, t.before, false); err != nil {
		return "", inKey(err)
	}
	return "", t.deleteByKey()
}

// deleteByKey makes a delete of what before has in the key columns.
func (t *Topic) deleteByKey() error {
	for _, i := range t.keys {
		if t.before[i].State != Set {
			return inKey(fmt.Errorf("key column %q is missing or null", t.rel.Columns[i].Name))
		}
	}
	t.change.Op, t.change.Before = Delete, t.before
	return nil
}

// keyError marks an error as one of the record's key.
type keyError struct{ error }

func (e keyError) Unwrap() error { return e.error }

func inKey(err error) error { return keyError{err} }

// key reads the record's key into row: into the columns that its fields name,
// or with mapped set, into those alone that take a part of the key.
func (t *Topic) key(rec *Record, row []Value, mapped bool) error {
	trimmed := bytes.TrimLeft(rec.Key, " \t\r\n")
	if len(trimmed) == 0 {
		return errors.New("the record has no key")
	}
	if t.keyed == nil {
		return t.scalarKey(row, Value{State: Set, Kind: Text, Bytes: rec.Key}, utf8.Valid(rec.Key))
	}
	keyed := t.keyed
	if t.keyedAvro != nil && t.avroKey(rec) {
		keyed = t.keyedAvro
	}
	root, err := keyed.open(rec, partKey)
	if err != nil {
		if keyed != t.keyedAvro && t.cfg.KeyFormat == KeyAuto && trimmed[0] != '"' && trimmed[0] != '{' && utf8.Valid(rec.Key) {
			return t.scalarKey(row, Value{State: Set, Kind: Text, Bytes: rec.Key}, true)
		}
		return err // meant as JSON and broken, or no text at all
	}
	if keyed.record(root) {
		return t.keyFields(keyed, row, root, mapped)
	}
	v, err := keyed.value(root)
	if err != nil {
		return err
	}
	if v.Kind == JSON {
		return fmt.Errorf("it is %s", keyed.describe(root))
	}
	return t.scalarKey(row, v, true)
}

// avroKey tells whether a key is Avro. No text and no JSON begins as a frame
// does.
func (t *Topic) avroKey(rec *Record) bool {
	if t.cfg.KeySchema != nil {
		return true
	}
	_, _, err := unframe(rec, partKey)
	return err == nil
}

func (t *Topic) scalarKey(row []Value, v Value, valid bool) error {
	switch {
	case !valid:
		return errors.New("it is not UTF-8")
	case t.keyScalar < 0:
		return fmt.Errorf("it is one value, and the table's key has %d columns", len(t.keys))
	}
	return t.set(row, t.keyScalar, v)
}

func (t *Topic) keyFields(keyed encoding, row []Value, root node, mapped bool) error {
	c := keyed.walk(root)
	for {
		name, n, ok, err := keyed.next(&c)
		if err != nil || !ok {
			return err
		}
		i, known := t.fromKey[string(name)]
		if !known && mapped {
			continue
		}
		to := target{column: i}
		if !known {
			if to, known = t.column(name); !known {
				continue
			}
		}
		if n.con == nil {
			n.con = to.hint
		}
		v, err := keyed.value(n)
		if err == nil {
			err = t.set(row, to.column, v)
		}
		if err != nil {
			return fmt.Errorf("field %.100q: %w", name, err)
		}
	}
}

func (t *Topic) set(row []Value, column int, v Value) error {
	if row[column].State != Absent {
		return fmt.Errorf("column %q is given twice", t.rel.Columns[column].Name)
	}
	row[column] = v
	return nil
}

// which says which columns a row is read for.
type which uint8

const (
	everyColumn which = iota
	keyColumns
)

// fill reads the members of n into row.
func (t *Topic) fill(row []Value, n node, of which) error {
	t.walker = t.values.walk(n)
	for {
		name, v, ok, err := t.values.next(&t.walker)
		if err != nil || !ok {
			return err
		}
		if err := t.member(row, name, v, of); err != nil {
			return err
		}
	}
}

func (t *Topic) member(row []Value, name []byte, n node, of which) error {
	to, known := t.column(name)
	if !known {
		if of == keyColumns {
			return nil
		}
		if t.cfg.RefuseUnknown {
			return &Refusal{
				Reason: ReasonSchema, Why: fmt.Sprintf("member %.100q is no column of the table", name),
				Expected: "members that are columns alone", Do: "add the column to the table, or set KAFKASINK_EXTRA_FIELDS=ignore",
			}
		}
		if t.cfg.OnUnknown != nil {
			t.cfg.OnUnknown()
		}
		return nil
	}
	if of == keyColumns && !t.rel.Columns[to.column].Key {
		return nil
	}
	if n.con == nil {
		n.con = to.hint
	}
	v, err := t.values.value(n)
	if err == nil {
		err = t.set(row, to.column, v)
	}
	if err != nil {
		return inColumn(t.rel.Columns[to.column].Name, err)
	}
	return nil
}

func inColumn(name string, err error) error {
	if errors.Is(err, errExpands) {
		return err
	}
	return fmt.Errorf("column %q: %w", name, err)
}

// maxFolded is longer than any column's name is: no longer one is folded.
const maxFolded = 4096

// column finds where a field goes.
func (t *Topic) column(name []byte) (target, bool) {
	if to, ok := t.columns[string(name)]; ok {
		return to, true
	}
	if len(name) > maxFolded {
		return target{}, false
	}
	t.foldName = append(t.foldName[:0], name...)
	ascii := true
	for i, c := range t.foldName {
		if c >= 'A' && c <= 'Z' {
			t.foldName[i] = c + ('a' - 'A')
		}
		ascii = ascii && c < utf8.RuneSelf
	}
	if !ascii {
		to, ok := t.columns[strings.ToLower(string(name))]
		return to, ok
	}
	to, ok := t.columns[string(t.foldName)]
	return to, ok
}

// operations are the words that say what to do with a row. "true" and "false"
// are for a field such as __deleted.
var operations = map[string]Op{
	"c": Insert, "r": Insert, "u": Insert, "i": Insert, "insert": Insert, "create": Insert, "read": Insert, "update": Insert, "upsert": Insert, "false": Insert,
	"d": Delete, "delete": Delete, "remove": Delete, "true": Delete,
}

// withOperation reads a row with a member that says what to do with it. Updates
// carry the whole row, as inserts do.
func (t *Topic) withOperation(rec *Record, root node) error {
	var word []byte
	t.walker = t.values.walk(root)
	for {
		name, n, ok, err := t.values.next(&t.walker)
		if err != nil {
			return err
		}
		if !ok {
			break
		}
		if string(name) == t.cfg.OpField {
			v, err := t.values.value(n)
			if err != nil {
				return err
			}
			if v.State == Set {
				word = v.Bytes
			}
			continue
		}
		if err := t.member(t.after, name, n, everyColumn); err != nil {
			return err
		}
	}
	if word == nil {
		return fmt.Errorf("it has no field %q that says what to do", t.cfg.OpField)
	}
	op, ok := operations[strings.ToLower(string(word[:min(len(word), 20)]))]
	if !ok {
		return fmt.Errorf("its field %q is %.40q, which is no operation: insert, update, delete or their first letters", t.cfg.OpField, word)
	}
	if op == Insert {
		return t.upsert(rec)
	}
	if len(t.keys) == 0 {
		return t.keyless("delete")
	}
	t.after, t.before = t.before, t.after
	if err := t.keysFromRecord(rec); err != nil {
		return err
	}
	return t.deleteByKey()
}

// keysFromRecord completes the key columns of before from the record's key,
// where the value did not have all of them.
func (t *Topic) keysFromRecord(rec *Record) error {
	whole := !slices.ContainsFunc(t.keys, func(i int) bool { return t.before[i].State != Set })
	if whole || len(rec.Key) == 0 {
		return nil
	}
	clear(t.before)
	if err := t.key(rec, t.before, false); err != nil {
		return inKey(err)
	}
	return nil
}

func (t *Topic) keyless(what string) error {
	return &Refusal{
		Reason: ReasonIdentity, What: what,
		Why:      fmt.Sprintf("table %s has no primary key, and a record does not prove that it carries the whole old row", t.rel),
		Expected: "a table with a PRIMARY KEY, or a topic of inserts alone", Do: "declare a PRIMARY KEY on the Feldera table",
	}
}

func (t *Topic) expected() string {
	in, object := "JSON", "JSON object"
	if t.cfg.Format.Avro() {
		in, object = "Avro", "Avro record"
	}
	switch {
	case t.cfg.Format.debezium():
		return "an envelope of Debezium in " + in
	case t.cfg.Format.hasOperation():
		return fmt.Sprintf("one %s, a row of table %s with a field %q", object, t.rel, t.cfg.OpField)
	}
	return fmt.Sprintf("one %s, a row of table %s", object, t.rel)
}

// refuse makes the error for a person out of what went wrong.
func (t *Topic) refuse(rec *Record, err error) error {
	what, expected := "record value", t.expected()
	if rec.Value == nil {
		what = "tombstone"
	}
	var ofKey keyError
	if errors.As(err, &ofKey) {
		what, expected = what+" key", "a key with the columns of the table's primary key"
		if rec.Value != nil {
			what = "record key"
		}
	}
	var refused *Refusal
	var pending *PendingError
	switch {
	case errors.As(err, &pending):
		return pending
	case errors.As(err, &refused):
		out := *refused
		if out.What == "" {
			out.What = what
		}
		out.Where = rec.Position.String()
		return &out
	case errors.Is(err, errExpands):
		return &Refusal{
			Reason: ReasonLimit, What: what, Where: rec.Position.String(), Why: err.Error(),
			Expected: fmt.Sprintf("at most %d times its size and %d KiB", t.times(), scratchExtra>>10),
		}
	}
	return &Refusal{Reason: ReasonMalformed, What: what, Where: rec.Position.String(), Why: err.Error(), Expected: expected}
}
