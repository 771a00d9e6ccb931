package core

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net/http"
	"net/url"
	"strings"
	"unicode/utf8"
)

// UpdateFormat is how a JSON body says what happened to a row.
type UpdateFormat string

// The update formats.
const (
	InsertDelete UpdateFormat = "insert_delete"
	Raw          UpdateFormat = "raw"
	Debezium     UpdateFormat = "debezium"
	WeightedFmt  UpdateFormat = "weighted"
	Redis        UpdateFormat = "redis"
	Snowflake    UpdateFormat = "snowflake"
)

// ParserConfig is the parsed format configuration of an ingress request. Two
// requests with the same table spelling and an equal ParserConfig share an
// endpoint.
type ParserConfig struct {
	Format     string // "csv" or "json"
	Update     UpdateFormat
	Array      bool
	Flavor     string
	LinesOne   bool // lines=single
	Delimiter  rune
	HasHeaders bool
}

// ParserConfigFromQuery reads the parameters of an ingress request. What it
// does not know it ignores, as the engine does.
func ParserConfigFromQuery(table string, q url.Values) (ParserConfig, *APIError) {
	pc := ParserConfig{Format: "csv", Delimiter: ','}
	if f, ok := q["format"]; ok {
		pc.Format = f[0]
	}
	name := func() string { return endpointName(table, pc) }
	config := func() string { return q.Encode() }
	switch pc.Format {
	case "csv":
		if d := q.Get("delimiter"); d != "" {
			pc.Delimiter, _ = utf8.DecodeRuneInString(d)
		}
		pc.HasHeaders = q.Get("headers") == "true"
		return pc, nil
	case "json":
	case "parquet", "avro", "raw":
		return pc, errFormatNotSupported(name(), "the simulator does not read "+pc.Format)
	default:
		return pc, errUnknownFormat(name(), pc.Format)
	}
	pc.Update, pc.Flavor = InsertDelete, "default"
	if u, ok := q["update_format"]; ok {
		pc.Update = UpdateFormat(u[0])
	}
	switch pc.Update {
	case InsertDelete, Raw, Debezium, WeightedFmt, Redis:
	case Snowflake:
		return pc, errFormatNotSupported(name(), "Snowflake is not supported for JSON input streams")
	default:
		return pc, errParserConfig(name(), fmt.Sprintf("unknown variant `%s`, expected one of `insert_delete`, `weighted`, `debezium`, `snowflake`, `raw`, `redis`", pc.Update), config())
	}
	if a, ok := q["array"]; ok {
		switch a[0] {
		case "true":
			pc.Array = true
		case "false":
		default:
			return pc, errParserConfig(name(), "provided string was not `true` or `false`", config())
		}
	}
	if l, ok := q["lines"]; ok {
		switch l[0] {
		case "single":
			pc.LinesOne = true
		case "multiple":
		default:
			return pc, errParserConfig(name(), fmt.Sprintf("unknown variant `%s`, expected `multiple` or `single`", l[0]), config())
		}
	}
	if f, ok := q["json_flavor"]; ok {
		pc.Flavor = f[0]
	}
	switch pc.Flavor {
	case "default", "c_hex":
	case "debezium_mysql", "debezium_postgres", "kafka_connect_json_converter", "snowflake", "pandas", "blockchain", "postgres":
		return pc, errFormatNotSupported(name(), "the simulator does not read json_flavor="+pc.Flavor)
	default:
		return pc, errParserConfig(name(), fmt.Sprintf("unknown variant `%s` for json_flavor", pc.Flavor), config())
	}
	return pc, nil
}

func endpointName(table string, pc ParserConfig) string {
	h := fnv.New64a()
	_, _ = fmt.Fprintf(h, "%+v", pc)
	return fmt.Sprintf("%s.api-ingress-%016x", table, h.Sum64())
}

// ParseError is one entry of the details of a ParseErrors answer.
type ParseError struct {
	Description  string  `json:"description"`
	EventNumber  *uint64 `json:"event_number"`
	Field        *string `json:"field"`
	InvalidBytes []byte  `json:"invalid_bytes"`
	InvalidText  *string `json:"invalid_text"`
	Suggestion   *string `json:"suggestion"`
	Tag          *string `json:"tag"`
}

func (e *ParseError) message() string {
	var b strings.Builder
	b.WriteString("Parse error")
	if e.EventNumber != nil {
		fmt.Fprintf(&b, " (event #%d)", *e.EventNumber)
	}
	b.WriteString(": " + e.Description)
	if e.InvalidText != nil {
		fmt.Fprintf(&b, "\nInvalid fragment: '%s'", *e.InvalidText)
	}
	if e.Suggestion != nil {
		b.WriteString("\n" + *e.Suggestion)
	}
	return b.String()
}

// maxReportedErrors is how many parse errors an answer lists.
const maxReportedErrors = 1000

// ParseErrors collects the parse errors of one request. It keeps the last
// 1000 and the true count.
type ParseErrors struct {
	Num  int
	List []*ParseError
}

// Add appends errors.
func (p *ParseErrors) Add(errs ...*ParseError) {
	p.Num += len(errs)
	p.List = append(p.List, errs...)
	if n := len(p.List) - maxReportedErrors; n > 0 {
		p.List = append(p.List[:0], p.List[n:]...)
	}
}

// Err gives the answer, nil when there was no error.
func (p *ParseErrors) Err() *APIError {
	if p.Num == 0 {
		return nil
	}
	var b strings.Builder
	if p.Num > len(p.List) {
		fmt.Fprintf(&b, "Errors parsing input data (reporting %d out of %d total errors):", len(p.List), p.Num)
	} else {
		fmt.Fprintf(&b, "Errors parsing input data (%d errors):", len(p.List))
	}
	for _, e := range p.List {
		b.WriteString("\n    " + e.message())
	}
	return &APIError{
		Status: http.StatusBadRequest, Code: "ParseErrors", Message: b.String(),
		Details: struct {
			Num  int           `json:"num_errors"`
			List []*ParseError `json:"errors"`
		}{p.Num, p.List},
	}
}

// OpKind is what an Op does to a row.
type OpKind uint8

// The operations of a queue entry.
const (
	OpInsert OpKind = iota + 1
	OpDelete
	OpUpdate
)

// Op is one change to one table. Key is "" for a table without a primary key.
type Op struct {
	Kind OpKind
	Key  string
	Row  Row
}

// Entry is one element of an endpoint's queue: what one chunk of a body held.
// The circuit takes entries whole.
type Entry struct {
	Ops     []Op
	Records int
	Bytes   int
}

// Parser splits bodies into chunks and parses chunks into entries. One belongs
// to each endpoint, and with it the bytes of a chunk that is not complete yet:
// as in the engine, requests to one endpoint share them, so what a request
// that was cut left behind is put before the next request's body.
//
// The caller serialises its use, per endpoint.
type Parser struct {
	cfg   ParserConfig
	codec *codec
	hasPK bool
	null  bool
	last  uint64 // events seen since the endpoint was created
	split splitter
	bad   bool
	// Refuse, where it is set, is a rule of the pipeline beside the columns'
	// types: rows for which it says true are parse errors. Silent leaves their
	// text out of the errors, which the engine's answer allows.
	Refuse func(row []byte) bool
	Silent bool
}

func newParser(t *TableDef, pc ParserConfig, null bool) *Parser {
	fl := FlavorDefault
	if pc.Flavor == "c_hex" {
		fl = FlavorCHex
	}
	p := &Parser{cfg: pc, codec: newCodec(t, fl), hasPK: len(t.PrimaryKey) > 0, null: null}
	p.split.lines = pc.Format == "csv" || pc.LinesOne
	return p
}

// Pending is how many bytes of an incomplete chunk are held.
func (p *Parser) Pending() int { return len(p.split.buf) - p.split.start }

// Discard forgets an incomplete chunk.
func (p *Parser) Discard() { p.split.reset() }

// Feed takes the next bytes of a body and gives the entries of every chunk
// they complete. end says that the body is over. An *APIError means that the
// endpoint is broken for good.
func (p *Parser) Feed(data []byte, end bool, errs *ParseErrors) ([]Entry, *APIError) {
	if p.bad || p.cfg.Update == WeightedFmt || p.cfg.Update == Redis {
		// The engine reaches todo!() or panic!() under a lock here, which
		// poisons the endpoint for all later requests.
		p.bad = true
		return nil, &APIError{Status: http.StatusInternalServerError, Code: "DbspPanic", Message: "the endpoint's parser has panicked", Details: struct{}{}, Abort: true}
	}
	var out []Entry
	p.split.feed(data)
	for {
		chunk := p.split.next(end)
		if chunk == nil {
			return out, nil
		}
		if e := p.chunk(chunk, errs); e.Records > 0 {
			out = append(out, e)
		}
	}
}

func (p *Parser) chunk(b []byte, errs *ParseErrors) Entry {
	e := Entry{Bytes: len(b)}
	if p.cfg.Format == "csv" {
		p.csv(b, &e, errs)
		return e
	}
	if !utf8.Valid(b) {
		text := strings.ToValidUTF8(string(b), "\uFFFD")
		errs.Add(envelopeError("failed to parse string as a JSON document: invalid unicode code point at line 1 column 1", text, ""))
		return e
	}
	for i := skipSpace(b, 0); i < len(b); i = skipSpace(b, i) {
		if p.cfg.Array && p.cfg.Update == InsertDelete {
			if p.null {
				if n, count, ok := countElements(b, i); ok && p.Refuse == nil {
					e.Records += count
					p.last += uint64(count)
					i = n
					continue
				}
			} else if p.Refuse == nil {
				if n, ok := p.fastArray(b, i, &e); ok {
					i = n
					continue
				}
			}
		}
		n, ok := skipValue(b, i, 0)
		if !ok {
			verr := &valueError{"expected value", n}
			if n >= len(b) {
				verr = &valueError{"EOF while parsing a value", len(b)}
			}
			errs.Add(envelopeError("failed to parse string as a JSON document: "+verr.at(b, i), string(b[i:]), ""))
			return e
		}
		p.document(b[i:n], &e, errs)
		i = n
	}
	return e
}

// countElements checks a JSON array and counts its elements.
func countElements(b []byte, i int) (next, count int, ok bool) {
	if i >= len(b) || b[i] != '[' {
		return i, 0, false
	}
	i = skipSpace(b, i+1)
	if i < len(b) && b[i] == ']' {
		return i + 1, 0, true
	}
	for {
		if i, ok = skipValue(b, i, 1); !ok {
			return i, 0, false
		}
		count++
		i = skipSpace(b, i)
		if i >= len(b) {
			return i, 0, false
		}
		if b[i] == ']' {
			return i + 1, count, true
		}
		if b[i] != ',' {
			return i, 0, false
		}
		i = skipSpace(b, i+1)
	}
}

// fastArray reads an array of insert_delete events in one pass. At the first
// thing that is not as it should be it gives up and leaves e as it was: the
// slow path then finds out what exactly the engine would say.
func (p *Parser) fastArray(b []byte, i int, e *Entry) (int, bool) {
	if b[i] != '[' {
		return i, false
	}
	before := len(e.Ops)
	fail := func() (int, bool) { e.Ops = e.Ops[:before]; return i, false }
	j := skipSpace(b, i+1)
	if j < len(b) && b[j] == ']' {
		return j + 1, true
	}
	if e.Ops == nil {
		e.Ops = make([]Op, 0, min(4096, 1+len(b)/64))
	}
	for {
		if j >= len(b) || b[j] != '{' {
			return fail()
		}
		j = skipSpace(b, j+1)
		key, _, n, ok := scanString(b, j)
		if !ok {
			return fail()
		}
		j = skipSpace(b, n)
		if j >= len(b) || b[j] != ':' {
			return fail()
		}
		j = skipSpace(b, j+1)
		if j >= len(b) || b[j] != '{' && b[j] != '[' {
			return fail()
		}
		kind := OpKind(0)
		switch str(key) {
		case "insert":
			kind = OpInsert
		case "delete":
			kind = OpDelete
		case "update":
			kind = OpUpdate
		}
		op, n, ferr := p.op(b, j, kind)
		if ferr != nil {
			return fail()
		}
		e.Ops = append(e.Ops, op)
		j = skipSpace(b, n)
		if j >= len(b) || b[j] != '}' {
			return fail()
		}
		j = skipSpace(b, j+1)
		if j >= len(b) {
			return fail()
		}
		if b[j] == ']' {
			n := len(e.Ops) - before
			e.Records += n
			p.last += uint64(n)
			return j + 1, true
		}
		if b[j] != ',' {
			return fail()
		}
		j = skipSpace(b, j+1)
	}
}

// op reads one row as an operation.
func (p *Parser) op(b []byte, i int, kind OpKind) (Op, int, *fieldError) {
	mode := wholeRow
	switch {
	case kind == 0:
		return Op{}, i, &fieldError{"", errSyntax}
	case kind == OpUpdate && !p.hasPK:
		return Op{}, i, &fieldError{"", &valueError{"update operation is not supported on this stream", -1}}
	case kind == OpUpdate:
		mode = patchOnly
	case kind == OpDelete && p.hasPK:
		mode = keyOnly
	}
	keyLen, next, ferr := p.codec.read(b, i, mode)
	if ferr != nil {
		return Op{}, i, ferr
	}
	row := Row(p.codec.out)
	return Op{Kind: kind, Key: string(row[:keyLen]), Row: row}, next, nil
}

// envelope is one event of a body, as spans of raw JSON.
type envelope struct {
	whole                 []byte
	insert, delete, patch []byte
}

// document parses one top-level JSON value whose syntax is known to be good.
func (p *Parser) document(doc []byte, e *Entry, errs *ParseErrors) {
	if !p.cfg.Array {
		ev, verr := p.envelope(doc)
		if verr != nil {
			errs.Add(p.eventError(singleError(p.cfg.Update)+": "+verr.at(doc, 0), "", doc, singleExample(p.cfg.Update)))
		} else if perr := p.apply(ev, e); perr != nil {
			errs.Add(perr)
		}
		p.last++
		return
	}
	evs, verr := p.elements(doc)
	if verr != nil {
		errs.Add(envelopeError(arrayError(p.cfg.Update)+": "+verr.at(doc, 0), string(doc), arrayExample(p.cfg.Update)))
		return
	}
	ops, records, failed := len(e.Ops), e.Records, false
	for _, ev := range evs {
		if perr := p.apply(ev, e); perr != nil {
			failed = true
			errs.Add(perr)
		}
		p.last++
	}
	if failed {
		e.Ops, e.Records = e.Ops[:ops], records
	}
}

func (p *Parser) elements(doc []byte) ([]envelope, *valueError) {
	if doc[0] != '[' {
		return nil, invalidType(doc, 0, "a sequence")
	}
	var out []envelope
	i := skipSpace(doc, 1)
	for i < len(doc) && doc[i] != ']' {
		n, ok := skipValue(doc, i, 1)
		if !ok {
			return nil, &valueError{"expected value", n}
		}
		ev, verr := p.envelope(doc[i:n])
		if verr != nil {
			return nil, &valueError{verr.text, verr.end + i}
		}
		out = append(out, ev)
		i = skipSpace(doc, n)
		if i < len(doc) && doc[i] == ',' {
			i = skipSpace(doc, i+1)
		}
	}
	return out, nil
}

// envelope takes one event apart without reading its rows.
func (p *Parser) envelope(b []byte) (envelope, *valueError) {
	ev := envelope{whole: b}
	switch p.cfg.Update {
	case Raw:
		ev.insert = b
		return ev, nil
	case Debezium:
		return p.debezium(b)
	default:
	}
	if b[0] != '{' {
		return ev, invalidType(b, 0, "struct InsDelUpdate")
	}
	seen := map[string]bool{}
	_, verr := eachMember(b, 0, func(key string, at int) (int, *valueError) {
		n, ok := skipValue(b, at, 1)
		if !ok {
			return at, errSyntax
		}
		if seen[key] {
			return at, errAt(at, "duplicate field `%s`", key)
		}
		seen[key] = true
		val := b[at:n]
		if hasWord(val, 0, "null") {
			val = nil
		}
		switch key {
		case "insert":
			ev.insert = val
		case "delete":
			ev.delete = val
		case "update":
			ev.patch = val
		case "table":
			if val != nil && val[0] != '"' {
				return at, invalidType(b, at, "a string")
			}
		default:
			return at, errAt(at, "unknown field `%s`, expected one of `table`, `insert`, `delete`, `update`", key)
		}
		return n, nil
	})
	return ev, verr
}

func (p *Parser) debezium(b []byte) (envelope, *valueError) {
	ev := envelope{whole: b}
	if b[0] != '{' {
		return ev, invalidType(b, 0, "struct DebeziumUpdate")
	}
	havePayload, haveOp := false, false
	end, verr := eachMember(b, 0, func(key string, at int) (int, *valueError) {
		if key != "payload" {
			n, ok := skipValue(b, at, 1)
			if !ok {
				return at, errSyntax
			}
			return n, nil
		}
		havePayload = true
		if b[at] != '{' {
			return at, invalidType(b, at, "struct DebeziumPayload")
		}
		return eachMember(b, at, func(key string, at int) (int, *valueError) {
			n, ok := skipValue(b, at, 2)
			if !ok {
				return at, errSyntax
			}
			val := b[at:n]
			switch key {
			case "op":
				haveOp = true
				switch str(val) {
				case `"c"`, `"u"`, `"d"`, `"r"`:
				default:
					return at, errAt(n, "unknown variant %s, expected one of `c`, `d`, `u`, `r`", val)
				}
			case "before":
				if val[0] != 'n' {
					ev.delete = val
				}
			case "after":
				if val[0] != 'n' {
					ev.insert = val
				}
			}
			return n, nil
		})
	})
	switch {
	case verr != nil:
	case !havePayload:
		verr = errAt(end, "missing field `payload`")
	case !haveOp:
		verr = errAt(end, "missing field `op`")
	}
	return ev, verr
}

// apply reads the rows of one event, in the order delete, insert, update. On
// an error the parts before it stay; the caller takes them back where the
// whole array is lost.
func (p *Parser) apply(ev envelope, e *Entry) *ParseError {
	for _, part := range []struct {
		row  []byte
		kind OpKind
	}{{ev.delete, OpDelete}, {ev.insert, OpInsert}, {ev.patch, OpUpdate}} {
		if part.row == nil {
			continue
		}
		if p.Refuse != nil && p.Refuse(part.row) {
			perr := p.rowError("the row breaks a rule", "", part.row)
			if p.Silent {
				perr.InvalidText = nil
			}
			return perr
		}
		op, _, ferr := p.op(part.row, 0, part.kind)
		if ferr != nil {
			text := ferr.err.text
			if ferr.err.end >= 0 {
				text = ferr.err.at(part.row, 0)
			}
			return p.rowError(text, ferr.field, part.row)
		}
		if !p.null {
			e.Ops = append(e.Ops, op)
		}
		e.Records++
	}
	return nil
}

func (p *Parser) rowError(text, field string, row []byte) *ParseError {
	desc := "failed to deserialize JSON record: "
	if field != "" {
		desc += "error parsing field '" + field + "': "
	}
	return p.eventError(desc+text, field, row, "")
}

func (p *Parser) eventError(desc, field string, text []byte, suggestion string) *ParseError {
	n := p.last + 1
	tag := "text_event_err"
	e := &ParseError{Description: desc, EventNumber: &n, Tag: &tag}
	if field != "" {
		e.Field = &field
	}
	s := string(text)
	e.InvalidText = &s
	if suggestion != "" {
		e.Suggestion = &suggestion
	}
	return e
}

func envelopeError(desc, text, suggestion string) *ParseError {
	tag := "text_envelope_err"
	e := &ParseError{Description: desc, InvalidText: &text, Tag: &tag}
	if suggestion != "" {
		e.Suggestion = &suggestion
	}
	return e
}

func singleError(u UpdateFormat) string {
	switch u {
	case Debezium:
		return "error deserializing JSON string as a Debezium CDC event"
	case Raw:
		return "failed to parse JSON string"
	default:
		return "error deserializing JSON string as a single-row update"
	}
}

func arrayError(u UpdateFormat) string {
	switch u {
	case Debezium:
		return "error deserializing string as a JSON array of Debezium CDC events"
	case Raw:
		return "error deserializing string as a JSON array"
	default:
		return "error deserializing string as a JSON array of updates"
	}
}

// The doubled braces are the engine's own.
func singleExample(u UpdateFormat) string {
	switch u {
	case InsertDelete:
		return `Example valid JSON: '{{"insert": {{...}} }}'`
	case Debezium:
		return `Example valid JSON: '{{"payload": {{"op": "u", "before": {{...}}, "after": {{...}} }} }}'`
	default:
		return ""
	}
}

func arrayExample(u UpdateFormat) string {
	switch u {
	case InsertDelete:
		return `Example valid JSON: '[{{"insert": {{...}} }}, {{"delete": {{...}} }}]'`
	case Debezium:
		return `Example valid JSON: '[{{"payload": {{"op": "u", "before": {{...}}, "after": {{...}} }} }}]'`
	default:
		return ""
	}
}

func (p *Parser) csv(b []byte, e *Entry, errs *ParseErrors) {
	r := csv.NewReader(bytes.NewReader(b))
	r.Comma = p.cfg.Delimiter
	r.FieldsPerRecord = -1
	r.LazyQuotes = true
	for {
		fields, err := r.Read()
		if errors.Is(err, io.EOF) {
			return
		}
		if p.cfg.HasHeaders && p.last == 0 {
			p.last++
			continue
		}
		if err != nil {
			errs.Add(p.eventError("failed to deserialize CSV record: "+err.Error(), "", b, ""))
			p.last++
			return
		}
		keyLen, ferr := p.codec.readFields(fields)
		if ferr != nil {
			desc := "failed to deserialize CSV record: "
			if ferr.field != "" {
				desc += "error parsing field '" + ferr.field + "': "
			}
			errs.Add(p.eventError(desc+ferr.err.text, ferr.field, []byte(strings.Join(fields, string(p.cfg.Delimiter))), ""))
			p.last++
			continue
		}
		p.last++
		row := Row(p.codec.out)
		if !p.null {
			e.Ops = append(e.Ops, Op{Kind: OpInsert, Key: string(row[:keyLen]), Row: row})
		}
		e.Records++
	}
}

// keepBuffer is how much memory an idle endpoint holds on to.
const keepBuffer = 16 << 20

// splitter finds where one chunk of a body ends and the next begins. With
// lines, a chunk is every full line that has arrived; otherwise it is one
// top-level JSON value, found by its brackets and quotes alone.
type splitter struct {
	lines bool
	buf   []byte
	pos   int // buf[:pos] has been looked at and holds no end of a chunk
	start int // of the chunk that is under way
	state uint8
	depth int
}

const (
	splitStart uint8 = iota
	splitValue
	splitQuote
	splitEscape
)

func (s *splitter) reset() { s.buf, s.pos, s.start, s.state, s.depth = nil, 0, 0, splitStart, 0 }

func (s *splitter) feed(data []byte) {
	if s.start > 0 {
		s.buf = append(s.buf[:0], s.buf[s.start:]...)
		s.pos -= s.start
		s.start = 0
	}
	s.buf = append(s.buf, data...)
}

// next gives the next complete chunk, or with end whatever is left; nil when
// there is none. The chunk is valid until the next feed.
func (s *splitter) next(end bool) []byte {
	if s.lines {
		n := bytes.LastIndexByte(s.buf[s.start:], '\n') + 1
		if end {
			n = len(s.buf) - s.start
		}
		return s.take(s.start + n)
	}
	for s.pos < len(s.buf) {
		c := s.buf[s.pos]
		switch s.state {
		case splitQuote:
			// The common state: run through the string.
			i := s.pos
			for i < len(s.buf) && s.buf[i] != '"' && s.buf[i] != '\\' {
				i++
			}
			s.pos = i
			if i == len(s.buf) {
				continue
			}
			if s.buf[i] == '"' {
				s.state = splitValue
			} else {
				s.state = splitEscape
			}
			s.pos++
			continue
		case splitEscape:
			s.state = splitQuote
			s.pos++
			continue
		}
		switch c {
		case ' ', '\t', '\n', '\r', '\f':
			if s.state == splitValue && s.depth == 0 {
				s.state = splitStart
				return s.take(s.pos)
			}
		case '{', '[':
			if s.state == splitValue && s.depth == 0 {
				s.state = splitStart
				return s.take(s.pos)
			}
			s.state = splitValue
			s.depth++
		case '}', ']':
			if s.state == splitStart {
				s.state = splitValue
				break
			}
			if s.depth == 0 {
				s.state = splitStart
				return s.take(s.pos)
			}
			s.depth--
			if s.depth == 0 {
				s.state = splitStart
				return s.take(s.pos + 1)
			}
		case '"':
			if s.state == splitValue && s.depth == 0 {
				s.state = splitStart
				return s.take(s.pos)
			}
			s.state = splitQuote
		default:
			s.state = splitValue
		}
		s.pos++
	}
	if end {
		s.state, s.depth = splitStart, 0
		return s.take(len(s.buf))
	}
	return nil
}

// take cuts the chunk that ends at i, nil when it is empty.
func (s *splitter) take(i int) []byte {
	if i <= s.start {
		if s.start == len(s.buf) {
			s.buf, s.start, s.pos = s.buf[:0], 0, 0
			if cap(s.buf) > keepBuffer {
				s.buf = nil
			}
		}
		return nil
	}
	chunk := s.buf[s.start:i]
	s.start = i
	s.pos = max(s.pos, i)
	return chunk
}
