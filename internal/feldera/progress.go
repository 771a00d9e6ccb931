package feldera

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
)

// This file reads and writes the progress table. What the rows mean is
// decide.go's.

// ProgressStore is one source's part of the progress table. It is safe for
// concurrent use.
//
// An owner of a lane goes through these steps, in this order:
//
//  1. wait until every request of the owner before has ended: the life of a
//     request, unless that owner noted that nothing of its own was in flight;
//  2. [ProgressStore.Read], then [Decide];
//  3. note the decision's epoch durably (bookmark, or a commit's note);
//  4. [ProgressStore.Claim]: send nothing else before it returns;
//  5. [ProgressStore.Write], each time for rows that are ingested, and
//     acknowledge on the completion of what it wrote.
type ProgressStore struct {
	c           *Client
	writer      *Writer
	enc         *Encoder
	rel         *decode.Relation
	source      string
	fingerprint string
}

// maxProgressName bounds a source's and a lane's name, in bytes.
const maxProgressName = 1024

// Progress opens a source's part of the progress table. fingerprint is of the
// mapping of source to tables: see [Fingerprint].
//
// The error is a *decode.Refusal where the program has no such table.
func (c *Client) Progress(s *Schema, table, source, fingerprint string) (*ProgressStore, error) {
	if source == "" || len(source) > maxProgressName {
		return nil, fmt.Errorf("progress table: the source's name has %d bytes, expected 1 to %d", len(source), maxProgressName)
	}
	def := ProgressTable(table)
	if diffs := Differences(s, []TableDef{def}, Policy{}); len(diffs) > 0 {
		d := diffs[0]
		where := "table " + d.Table
		if d.Column != "" {
			where += fmt.Sprintf(", column %q", d.Column)
		}
		return nil, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "progress table", Where: where, Why: d.Text,
			Expected: "the table in which a restart finds out what the pipeline holds",
			Do:       "add to the pipeline's program:\n" + def.SQL(),
		}
	}
	t, err := s.Table(table)
	if err != nil {
		return nil, err
	}
	rel := &decode.Relation{Name: def.Target, Identity: decode.IdentityDefault}
	for _, col := range def.Columns {
		rel.Columns = append(rel.Columns, decode.Column{Name: col.Name, Key: slices.Contains(def.Key, col.Name)})
	}
	enc, err := NewEncoder(t, rel, Policy{})
	if err != nil {
		return nil, err
	}
	w := c.Writer(t)
	w.alsoOthers.Store(true)
	return &ProgressStore{c: c, writer: w, enc: enc, rel: rel, source: source, fingerprint: fingerprint}, nil
}

// Fingerprint condenses what a source's rows go where by. The order of the
// parts counts.
func Fingerprint(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(p)))
		h.Write(n[:])
		h.Write([]byte(p))
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// Mapping gives the fingerprint that the store writes.
func (p *ProgressStore) Mapping() string { return p.fingerprint }

// ProgressFound is what [ProgressStore.Read] found.
type ProgressFound struct {
	// Incarnation is the one that was read, at the beginning and at the end.
	Incarnation string
	// Lanes holds the rows by lane.
	Lanes map[string][]ProgressRow
}

// maxProgressRows bounds what is read of one source: two rows for each epoch
// that was not superseded yet, for each lane.
const maxProgressRows = 200_000

// Read gives the rows that the pipeline shows. All that was queued in the
// table before is visible then: an empty array goes ahead, and its completion
// is awaited. Under an open transaction nothing completes; if it is the one of
// own, which a daemon left open that writes no row while one is, what was
// visible before it is the answer. Any other transaction is waited for.
//
// Errors: *decode.Refusal, *[IncarnationChanged], or ctx's cause joined with
// the last reason.
func (p *ProgressStore) Read(ctx context.Context, own *Intent) (*ProgressFound, error) {
	var found *ProgressFound
	err := p.c.insist(ctx, "read the progress table", func() (err error) {
		found, err = p.read(ctx, own)
		return err
	})
	return found, err
}

// insist does something that changes nothing, or may be done again, until it
// succeeds, is refused, or ctx ends.
func (c *Client) insist(ctx context.Context, what string, do func() error) error {
	r := c.retrier(what)
	for {
		err := do()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			if r.last == nil {
				r.last = err
			}
			return r.ended(ctx)
		case errors.Is(err, ErrIncomplete):
		default:
			if final := c.transient(err); final != nil {
				return final
			}
		}
		if err := r.wait(ctx, err); err != nil {
			return err
		}
	}
}

func (p *ProgressStore) read(ctx context.Context, own *Intent) (*ProgressFound, error) {
	st, err := p.c.TransactionState(ctx)
	if err != nil {
		return nil, err
	}
	if err := p.c.sameIncarnation(st.Incarnation); err != nil {
		return nil, err
	}
	found := &ProgressFound{Incarnation: st.Incarnation, Lanes: map[string][]ProgressRow{}}
	ours := st.API == apiStarted && own.matches(&st)
	if st.Open() && !ours {
		return nil, fmt.Errorf("somebody else's %s", st.String())
	}
	if !ours {
		tok, err := p.writer.SendOnly(ctx, &Array{}, found.Incarnation)
		if err != nil {
			return nil, err
		}
		if err := p.c.awaitCompleted(ctx, "await what was written to the progress table", []Token{tok}); err != nil {
			return nil, err
		}
	}
	if err := p.completed(ctx, found); err != nil {
		return nil, err
	}
	return found, nil
}

// Look gives the rows that are completed, for whoever owns no lane: unlike
// [ProgressStore.Read] it sends nothing to the table, so what an owner has on
// its way is not waited for. What was completed before the call is there.
//
// Errors: *decode.Refusal, *[IncarnationChanged], or ctx's cause joined with
// the last reason.
func (p *ProgressStore) Look(ctx context.Context) (*ProgressFound, error) {
	var found *ProgressFound
	err := p.c.insist(ctx, "look at the progress table", func() error {
		now, err := p.c.Incarnation(ctx)
		if err == nil {
			err = p.c.sameIncarnation(now)
		}
		if err != nil {
			return err
		}
		found = &ProgressFound{Incarnation: now, Lanes: map[string][]ProgressRow{}}
		return p.completed(ctx, found)
	})
	return found, err
}

// completed reads the rows that a query shows, and makes sure that the answer
// is of the expected incarnation: that is asked for behind it, since the answer
// says nothing of it.
func (p *ProgressStore) completed(ctx context.Context, found *ProgressFound) error {
	if err := p.query(ctx, func(row ProgressRow) { found.Lanes[row.Lane] = append(found.Lanes[row.Lane], row) }); err != nil {
		return err
	}
	now, err := p.c.Incarnation(ctx)
	if err != nil {
		return err
	}
	return p.c.sameIncarnation(now)
}

// query reads the rows that are completed.
func (p *ProgressStore) query(ctx context.Context, take func(ProgressRow)) error {
	which := "= " + QuoteText(p.source)
	if p.source == ownerSource {
		which = "LIKE " + QuoteText(ownerSource+"%")
	}
	q := Query{Select: "SELECT * FROM " + identifier(p.writer.table.Name) + " WHERE source " + which, MaxLine: 64 << 10}
	rows := 0
	return p.c.Query(ctx, q, func(line []byte) error {
		row, err := p.parse(line)
		if err != nil {
			return err
		}
		if rows++; rows > maxProgressRows {
			return p.wrongRow(fmt.Sprintf("there are more than %d rows of this source", maxProgressRows))
		}
		take(row)
		return nil
	})
}

// parse reads one row and refuses what no daemon writes.
func (p *ProgressStore) parse(line []byte) (ProgressRow, error) {
	var w struct {
		Source      *string `json:"source"`
		Lane        *string `json:"lane"`
		Epoch       *int64  `json:"epoch"`
		Slot        *int64  `json:"slot"`
		Position    *uint64 `json:"position"`
		Incarnation *string `json:"incarnation"`
		Step        uint64  `json:"step"`
		Fingerprint string  `json:"fingerprint"`
		RecordedAt  string  `json:"recorded_at"`
	}
	if err := json.Unmarshal(line, &w); err != nil {
		return ProgressRow{}, p.wrongRow("it cannot be read: " + clip(err.Error(), maxMessage))
	}
	switch {
	case w.Source == nil || w.Lane == nil || w.Epoch == nil || w.Slot == nil || w.Position == nil || w.Incarnation == nil:
		return ProgressRow{}, p.wrongRow("a column is missing: " + clip(string(line), maxMessage))
	case *w.Source != p.source && (p.source != ownerSource || !strings.HasPrefix(*w.Source, ownerSource)):
		return ProgressRow{}, p.wrongRow("it is of another source: " + clip(*w.Source, maxMessage))
	case *w.Epoch < 1 || *w.Slot < 0 || *w.Slot > 1 || len(*w.Lane) > maxProgressName || len(*w.Incarnation) > maxIncarnation:
		return ProgressRow{}, p.wrongRow("a value is out of its range: " + clip(string(line), maxMessage))
	}
	row := ProgressRow{
		Source: *w.Source, Lane: *w.Lane, Epoch: *w.Epoch, Slot: *w.Slot, Position: *w.Position,
		Incarnation: *w.Incarnation, Step: w.Step, Fingerprint: clip(w.Fingerprint, maxProgressName),
	}
	// It informs only, so that a form that is not known is no matter.
	if at, err := time.Parse("2006-01-02T15:04:05.999999", strings.Replace(w.RecordedAt, " ", "T", 1)); err == nil {
		row.RecordedAt = at
	}
	return row, nil
}

func (p *ProgressStore) wrongRow(why string) *decode.Refusal {
	return &decode.Refusal{
		Reason: decode.ReasonMalformed, What: "progress row", Where: fmt.Sprintf("table %s, source %q", p.writer.table.Name, p.source),
		Why: why, Expected: "rows that the daemons wrote, and nobody else",
		Do: "look at the rows of this source; delete those that are not of this program",
	}
}

// ProgressLane is one owner's hold on a lane. It belongs to one goroutine at a
// time.
type ProgressLane struct {
	lane    string
	epoch   int64
	slot    int64
	at      uint64 // the position of the newest row
	claimed bool
	// fingerprint is of the lane's mapping; "" for the source's.
	fingerprint string
	// newest is the token of the newest row, once there is one.
	newest Token
	drop   []ProgressRow
}

// Lane makes the hold that follows from a decision, for a lane whose last
// position with rows is the given one (0 for none): where the owner begins.
//
// Its claim will say that the pipeline holds all rows up to there. So after
// [ProgressLost] the owner begins at Held at most, and after [ProgressForeign]
// there is nothing to claim: both are refused as mistakes of the caller.
func (p *ProgressStore) Lane(lane string, d *Decision, produced uint64) (*ProgressLane, error) {
	switch {
	case d.Found == ProgressForeign:
		return nil, fmt.Errorf("progress lane %q: it is another owner's", lane)
	case d.Found == ProgressLost && produced > d.Held:
		return nil, fmt.Errorf("progress lane %q: a claim at %d would hide that the pipeline proves to hold %d alone", lane, produced, d.Held)
	case len(lane) > maxProgressName:
		return nil, fmt.Errorf("progress table: the lane's name has %d bytes, expected at most %d", len(lane), maxProgressName)
	}
	return &ProgressLane{lane: lane, epoch: d.Epoch, at: produced, drop: d.Superseded()}, nil
}

// Under has the lane's rows carry the fingerprint of its own mapping, which is
// then what the decision compares: a source with many lanes can change the
// mapping of one.
func (l *ProgressLane) Under(fingerprint string) *ProgressLane {
	l.fingerprint = fingerprint
	return l
}

// Position is the newest row's.
func (l *ProgressLane) Position() uint64 { return l.at }

// Epoch is the lane's: with position and incarnation it names a row, which is
// what bookmark or commit note keep of one that is completed.
func (l *ProgressLane) Epoch() int64 { return l.epoch }

// Claim writes the lanes' first rows, which say where their owner begins, and
// waits for them: see [ProgressStore.SendClaim] and [ProgressStore.AwaitClaim].
func (p *ProgressStore) Claim(ctx context.Context, incarnation string, inTransaction bool, lanes ...*ProgressLane) (Token, error) {
	tok, err := p.SendClaim(ctx, incarnation, lanes...)
	if err != nil {
		return tok, err
	}
	return tok, p.AwaitClaim(ctx, inTransaction, tok)
}

// SendClaim writes the lanes' first rows. incarnation is the one that was
// decided in. Nothing else is sent for the lanes before [ProgressStore.AwaitClaim]
// has returned.
func (p *ProgressStore) SendClaim(ctx context.Context, incarnation string, lanes ...*ProgressLane) (Token, error) {
	rows := make([]ProgressRow, 0, len(lanes))
	for _, l := range lanes {
		if l.claimed {
			return Token{}, fmt.Errorf("progress lane %q: claimed twice", l.lane)
		}
		rows = append(rows, p.row(l, l.at, incarnation, 0))
	}
	return p.send(ctx, incarnation, rows, lanes)
}

// AwaitClaim waits until a claim is completed, or, inside a transaction of
// ours, ingested.
func (p *ProgressStore) AwaitClaim(ctx context.Context, inTransaction bool, claim Token) error {
	const what = "await the claim in the progress table"
	if inTransaction {
		return p.c.awaitIngested(ctx, what, []Token{claim})
	}
	return p.c.awaitCompleted(ctx, what, []Token{claim})
}

// Advance is one lane's new position.
type Advance struct {
	Lane *ProgressLane
	// Position is above the lane's newest.
	Position uint64
	// Data is the evidence for all rows up to Position that no earlier row
	// stands for: the newest of each table, ingested at least, of one
	// incarnation.
	Data []Evidence
}

// Write sends the rows of all advances in one array. It refuses what is not
// ingested, waits until the rows before are, and sends to no incarnation but
// that of the data. Inside a Feldera transaction it is what goes last: see
// [Transaction.Commit].
//
// Errors: *decode.Refusal, *[IncarnationChanged], or ctx's cause joined with
// the last reason. Then the lanes are as before, and the rows may have been
// applied: the next Write of the same owner goes over them.
func (p *ProgressStore) Write(ctx context.Context, advances ...Advance) (Token, error) {
	if len(advances) == 0 {
		return Token{}, errors.New("progress table: nothing to write")
	}
	var incarnation string
	rows := make([]ProgressRow, 0, len(advances))
	lanes := make([]*ProgressLane, 0, len(advances))
	var before []Token
	for _, a := range advances {
		step, err := a.check(&incarnation)
		if err == nil && slices.Contains(lanes, a.Lane) {
			err = errors.New("given twice: both rows would be the one of the same slot")
		}
		if err != nil {
			return Token{}, fmt.Errorf("progress lane %q: %w", a.Lane.lane, err)
		}
		rows = append(rows, p.row(a.Lane, a.Position, incarnation, step))
		lanes = append(lanes, a.Lane)
		if tok := a.Lane.newest; tok.Raw != "" && !slices.Contains(before, tok) {
			before = append(before, tok)
		}
	}
	if err := p.c.awaitIngested(ctx, "await the progress rows before", before); err != nil {
		return Token{}, err
	}
	return p.send(ctx, incarnation, rows, lanes)
}

// check holds an advance against the rule, and gives the last step of its data.
func (a *Advance) check(incarnation *string) (step uint64, err error) {
	switch {
	case !a.Lane.claimed:
		return 0, errors.New("not claimed")
	case a.Position <= a.Lane.at:
		return 0, fmt.Errorf("position %d is not above %d", a.Position, a.Lane.at)
	case len(a.Data) == 0:
		return 0, fmt.Errorf("position %d comes without evidence", a.Position)
	}
	for _, ev := range a.Data {
		switch {
		case ev.Err != nil:
			return 0, ev.Err
		case ev.Rung < ack.Ingested:
			return 0, fmt.Errorf("position %d: its rows are %v, not %v", a.Position, ev.Rung, ack.Ingested)
		case *incarnation == "":
			*incarnation = ev.Token.Incarnation
		case *incarnation != ev.Token.Incarnation:
			return 0, &IncarnationChanged{Was: *incarnation, Now: ev.Token.Incarnation}
		}
		step = max(step, ev.Step)
	}
	return step, nil
}

func (p *ProgressStore) row(l *ProgressLane, position uint64, incarnation string, step uint64) ProgressRow {
	return ProgressRow{
		Source: p.source, Lane: l.lane, Epoch: l.epoch, Slot: l.slot, Position: position,
		Incarnation: incarnation, Step: step, Fingerprint: cmp.Or(l.fingerprint, p.fingerprint), RecordedAt: time.Now(),
	}
}

// send writes one row for each lane, and with a claim deletes what it
// supersedes.
func (p *ProgressStore) send(ctx context.Context, incarnation string, rows []ProgressRow, lanes []*ProgressLane) (Token, error) {
	var a Array
	for i := range rows {
		if !lanes[i].claimed {
			for k := range lanes[i].drop {
				ch := decode.OrderChange{Op: decode.Delete, Relation: p.rel, Before: lanes[i].drop[k].values()}
				if err := a.Add(p.enc, &ch); err != nil {
					return Token{}, err
				}
			}
		}
		ch := decode.OrderChange{Op: decode.Insert, Relation: p.rel, After: rows[i].values()}
		if err := a.Add(p.enc, &ch); err != nil {
			return Token{}, err
		}
	}
	tok, err := p.writer.SendOnly(ctx, &a, incarnation)
	if err != nil {
		return Token{}, err
	}
	for i, l := range lanes {
		l.at, l.claimed, l.drop = rows[i].Position, true, nil
		l.slot, l.newest = 1-l.slot, tok
	}
	return tok, nil
}

// values gives the row in the order of the table's columns.
func (r *ProgressRow) values() []decode.Value {
	text := func(s string) decode.Value {
		return decode.Value{State: decode.Set, Kind: decode.Text, Bytes: []byte(s)}
	}
	number := func(s string) decode.Value {
		return decode.Value{State: decode.Set, Kind: decode.Number, Bytes: []byte(s)}
	}
	return []decode.Value{
		text(r.Source), text(r.Lane), number(strconv.FormatInt(r.Epoch, 10)), number(strconv.FormatInt(r.Slot, 10)),
		number(strconv.FormatUint(r.Position, 10)), text(r.Incarnation), number(strconv.FormatUint(r.Step, 10)),
		text(r.Fingerprint), text(r.RecordedAt.UTC().Format("2006-01-02 15:04:05.000000")),
	}
}
