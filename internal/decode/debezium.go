package decode

import (
	"bytes"
	"crypto/md5" //nolint:gosec // Java names UUIDs by it; nothing is secured
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// envelope is what is looked at of a Debezium message.
type envelope struct {
	before, after, source, op node
	hasBefore, hasAfter       bool
	hasSource, hasOp          bool
	members                   int
	hasStatus, hasID, hasTs   bool
	hasDDL                    bool
}

// envelope reads one message of Debezium.
//
//   - c and r carry the row as it is: an upsert.
//   - u carries the row as it is, and where the source gave it, the row as it
//     was, of which only the key is used: a source that logs no more than the
//     key fills the other columns with null, or with a default where they are
//     NOT NULL. A key that differs is a delete and an insert.
//   - d carries the row as it was: a delete by its key, or where the key is not
//     in it, by the record's.
//   - A source that changes a key by its own key sends d, a tombstone and c,
//     which need nothing more.
func (t *Topic) envelope(rec *Record, root node) (Passed, error) {
	e, err := t.openEnvelope(root)
	if err != nil {
		return "", err
	}
	if !e.hasOp {
		return t.control(&e)
	}
	v, err := t.values.value(e.op)
	if err != nil {
		return "", err
	}
	if v.State != Set {
		return "", errors.New("its op is null")
	}
	switch string(v.Bytes) {
	case "c", "r":
		if err := t.image(t.after, e.after, e.hasAfter, "after"); err != nil {
			return "", err
		}
		return "", t.carry(Insert, rec)
	case "u":
		return "", t.updated(rec, &e)
	case "d":
		return "", t.deleted(rec, &e)
	case "t":
		if t.cfg.IgnoreTruncate {
			return PassedTruncate, nil
		}
		return "", &Refusal{
			Reason: ReasonUnsupported, What: "truncate", Why: "the source truncated the table, and Feldera has no such change over HTTP",
			Do: "empty the Feldera table, then set KAFKASINK_TRUNCATE=ignore to go on",
		}
	case "m":
		return t.pass(PassedMessage)
	}
	return "", &Refusal{
		Reason: ReasonUnsupported, Why: fmt.Sprintf("its op is %.20q", v.Bytes), Expected: "c, r, u, d, t or m",
	}
}

func (t *Topic) openEnvelope(root node) (e envelope, err error) {
	t.walker = t.values.walk(root)
	for ; ; e.members++ {
		name, n, ok, err := t.values.next(&t.walker)
		if err != nil || !ok {
			return e, err
		}
		switch string(name) {
		case "before":
			e.before, e.hasBefore = n, !t.values.null(n)
		case "after":
			e.after, e.hasAfter = n, !t.values.null(n)
		case "source":
			e.source, e.hasSource = n, t.values.record(n)
		case "op":
			e.op, e.hasOp = n, true
		case "status":
			e.hasStatus = true
		case "id":
			e.hasID = true
		case "ts_ms":
			e.hasTs = true
		case "ddl", "tableChanges":
			e.hasDDL = true
		}
	}
}

// control recognises the messages that carry no row.
func (t *Topic) control(e *envelope) (Passed, error) {
	switch {
	case e.hasDDL && e.hasSource:
		return t.pass(PassedSchema)
	case e.hasStatus && e.hasID:
		return t.pass(PassedTransaction)
	case e.hasTs && e.members == 1:
		return t.pass(PassedHeartbeat)
	}
	return "", &Refusal{
		Reason: ReasonMalformed, Why: "it is no envelope of Debezium: it has no member op", Expected: t.expected(),
		Do: "if the topic carries plain rows, give it the format json, or op-json, in KAFKASINK_TOPICS",
	}
}

func (t *Topic) pass(p Passed) (Passed, error) {
	if t.cfg.RefuseControl {
		return "", &Refusal{
			Reason: ReasonUnsupported, Why: fmt.Sprintf("it carries no row (%s), and such messages are refused here", p),
			Do: "set KAFKASINK_CONTROL_MESSAGES=ignore, or take them out of the topic",
		}
	}
	return p, nil
}

// image reads a whole row into row.
func (t *Topic) image(row []Value, n node, has bool, name string) error {
	if err := t.isRow(n, has, name); err != nil {
		return err
	}
	if err := t.fill(row, n, everyColumn); err != nil {
		return err
	}
	t.unknown(row)
	return nil
}

func (t *Topic) isRow(n node, has bool, name string) error {
	switch {
	case !has:
		return fmt.Errorf("its member %s has no row", name)
	case !t.values.record(n):
		return &Refusal{
			Reason: ReasonUnsupported, Why: fmt.Sprintf("its member %s is %s", name, t.values.describe(n)), Expected: "a row",
			Do: "for MongoDB, have the connector apply ExtractNewDocumentState and give the topic the format json or op-json",
		}
	}
	return nil
}

// oldKey reads the key columns of the row as it was into before.
func (t *Topic) oldKey(e *envelope) error {
	if !e.hasBefore {
		return nil
	}
	if err := t.isRow(e.before, true, "before"); err != nil {
		return err
	}
	if err := t.fill(t.before, e.before, keyColumns); err != nil {
		return err
	}
	t.unknown(t.before)
	return nil
}

func (t *Topic) updated(rec *Record, e *envelope) error {
	if len(t.keys) == 0 {
		return t.keyless("update")
	}
	if err := t.image(t.after, e.after, e.hasAfter, "after"); err != nil {
		return err
	}
	if err := t.carry(Update, rec); err != nil || !e.hasBefore {
		return err
	}
	if err := t.oldKey(e); err != nil {
		return err
	}
	if err := t.madeUp(e); err != nil {
		return err
	}
	t.change.Before = t.before
	return nil
}

// madeUp refuses an old key that differs from the new one and may be none: the
// Postgres connector fills columns that it does not know with the zero of their
// type. Taken for real, it would delete a row that has nothing to do with this.
func (t *Topic) madeUp(e *envelope) error {
	differs := false
	for _, i := range t.keys {
		was, now := &t.before[i], &t.after[i]
		if was.State != Set || bytes.Equal(was.Bytes, now.Bytes) {
			continue
		}
		differs = true
		if !zero(was) {
			return nil
		}
	}
	if !differs || !t.fromPostgres(e) {
		return nil
	}
	return &Refusal{
		Reason: ReasonIdentity, What: "update",
		Why:      "its row before has an empty key that is not the one after; a Postgres connector writes this for columns that the log does not have",
		Expected: "the table's primary key in the source's replica identity",
		Do:       "set the source table's REPLICA IDENTITY to FULL or to its primary key",
	}
}

// zero tells whether a value can be what the Postgres connector puts for a
// column that it does not know and that is NOT NULL.
func zero(v *Value) bool {
	text := string(v.Bytes[:min(len(v.Bytes), 16)])
	return text == "" || text == "0" || text == "false" || strings.HasPrefix(text, "1970-01-01")
}

// madeUpDelete refuses the key of a deleted row that may be none, as madeUp
// does: the row would stay, and the one with the empty key go. The record's key
// has the columns of the source's key, so a zero that stands in it is true.
// Where a record with the row as it was has no key, the source logs whole rows.
func (t *Topic) madeUpDelete(rec *Record, e *envelope) error {
	doubt := func(i int) bool { return t.before[i].State == Set && zero(&t.before[i]) }
	if len(rec.Key) == 0 || !slices.ContainsFunc(t.keys, doubt) || !t.fromPostgres(e) {
		return nil
	}
	var pending *PendingError
	// A key that cannot be read confirms nothing.
	if err := t.key(rec, t.after, false); errors.As(err, &pending) {
		return err
	}
	for _, i := range t.keys {
		if doubt(i) && (t.after[i].State != Set || !bytes.Equal(t.after[i].Bytes, t.before[i].Bytes)) {
			return &Refusal{
				Reason: ReasonIdentity, What: "delete",
				Why:      fmt.Sprintf("its row before has an empty value in key column %q, which the record's key does not have; a Postgres connector writes this for columns that the log does not have", t.rel.Columns[i].Name),
				Expected: "the table's primary key in the record's key",
				Do:       "declare the Feldera table's PRIMARY KEY over the source's; or set the source table's REPLICA IDENTITY to FULL and have the connector put the key into message.key.columns",
			}
		}
	}
	return nil
}

func (t *Topic) fromPostgres(e *envelope) bool {
	if !e.hasSource {
		return true // it may be
	}
	c := t.values.walk(e.source)
	for {
		name, n, ok, err := t.values.next(&c)
		if err != nil || !ok {
			return true
		}
		if string(name) == "connector" {
			v, err := t.values.value(n)
			return err != nil || string(v.Bytes) == "postgresql"
		}
	}
}

func (t *Topic) deleted(rec *Record, e *envelope) error {
	if len(t.keys) == 0 {
		return t.keyless("delete")
	}
	if err := t.oldKey(e); err != nil {
		return err
	}
	if err := t.madeUpDelete(rec, e); err != nil {
		return err
	}
	if err := t.keysFromRecord(rec); err != nil {
		return err
	}
	return t.deleteByKey()
}

// defaultPlaceholder is what Debezium writes for a value that the log does not
// have, because it did not change: a TOASTed one of Postgres.
const defaultPlaceholder = "__debezium_unavailable_value"

// placeholder recognises a value that is not known, in the forms that it takes
// by the column's type. The value may be nothing but a placeholder: text that
// merely contains it is text.
//
// Source: Debezium's UnchangedToastedPlaceholder and its chapter on TOASTed
// values. Binary data is the placeholder's bytes, an array of numbers is them as
// numbers, arrays of text, binary data or UUIDs have one element, an hstore has
// it as name and value. Geometries are one fixed point each.
type placeholder struct {
	text   string
	base64 string
	hex    string
	inside map[string]bool // as JSON without spaces
	// No form is shorter or longer.
	shorter, longer int
}

// The points that stand for a geometry and a geography, as extended WKB.
var placeholderPoints = []string{
	"0101000020E6100000000000FC83D797C1000000FC83D797C1",
	"0101000020E61000000C21E7FDFF7F66401842CEFBFF7F5640",
}

func newPlaceholder(text string) *placeholder {
	p := &placeholder{
		text: text, base64: base64.StdEncoding.EncodeToString([]byte(text)), hex: hex.EncodeToString([]byte(text)),
		inside: make(map[string]bool), shorter: min(len(text), 40),
	}
	var numbers []byte
	for i := range len(text) {
		numbers = append(strconv.AppendInt(numbers, int64(int8(text[i])), 10), ',') //nolint:gosec // Java's bytes have a sign
	}
	quoted := strconv.Quote(text)
	sum := md5.Sum([]byte(text)) //nolint:gosec // see above
	sum[6], sum[8] = sum[6]&0x0f|0x30, sum[8]&0x3f|0x80
	id := hex.EncodeToString(sum[:])
	for _, form := range []string{
		"[" + quoted + "]", "[" + strings.TrimSuffix(string(numbers), ",") + "]", "{" + quoted + ":" + quoted + "}",
		`["` + p.base64 + `"]`, `["\\x` + p.hex + `"]`, `["` + p.hex + `"]`,
		`["` + id[:8] + "-" + id[8:12] + "-" + id[12:16] + "-" + id[16:20] + "-" + id[20:] + `"]`,
	} {
		p.inside[form] = true
		p.longer = max(p.longer, len(form))
	}
	p.longer = 2*p.longer + 256
	return p
}

func (p *placeholder) is(v *Value) bool {
	if len(v.Bytes) > p.longer || len(v.Bytes) < p.shorter {
		return false
	}
	switch v.Kind {
	case Text:
		text := string(v.Bytes)
		return text == p.text || text == p.base64 || text == p.hex
	case Hex:
		return string(v.Bytes) == p.hex
	case JSON:
		return string(v.Bytes) == p.text || p.inJSON(v.Bytes)
	case Bool, Number:
	}
	return false
}

func (p *placeholder) inJSON(b []byte) bool {
	if b[0] != '[' && b[0] != '{' {
		return false
	}
	compact := make([]byte, 0, len(b))
	for _, c := range b {
		if c != ' ' && c != '\n' && c != '\r' && c != '\t' {
			compact = append(compact, c)
		}
	}
	if p.inside[string(compact)] {
		return true
	}
	if b[0] != '{' || !bytes.Contains(compact, []byte(`"wkb":`)) {
		return false
	}
	for _, point := range placeholderPoints {
		raw, err := hex.DecodeString(point)
		if err != nil {
			return false
		}
		lower := strings.ToLower(point)
		if bytes.Contains(compact, []byte(`"`+base64.StdEncoding.EncodeToString(raw)+`"`)) ||
			bytes.Contains(compact, []byte(lower+`"`)) || bytes.Contains(compact, []byte(point+`"`)) {
			return true
		}
	}
	return false
}
