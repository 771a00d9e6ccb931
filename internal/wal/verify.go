package wal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/wal/runs"
)

// This file compares the source's tables with the pipeline's while changes go
// on flowing between them.
//
//	source  ──pages──▶ images ──▶ sorted runs ──┐
//	                                            ├─ merge by key ──▶ suspects ──▶ looked at again, by key
//	table   ──pages──▶ images ──▶ sorted runs ──┘
//
// The first look at a table takes as long as it takes, and each of its rows is
// of another moment, so it proves nothing: it only finds the keys that are
// worth a second look (verify_settle.go). What those looks prove is reported.

// VerifyOptions says what is compared, and what it may cost.
type VerifyOptions struct {
	// Tables are those to compare, nil for all: see [Source.FindTables].
	Tables []Table
	// Sample compares a fraction of the keys, the same ones on both sides. 0 and
	// 1 mean all.
	Sample float64
	// Values reports the values that differ, and not only the columns' names.
	Values bool
	// Most bounds the differences that are listed of each table. The comparison
	// of a table ends when so many are proven. 0 means 1000.
	Most int
	// RowsPerSecond bounds the pace of reading each side; 0 is no bound.
	RowsPerSecond int
	// Wait bounds each wait for the acknowledged position to pass what was read
	// of the source. 0 means 2 minutes.
	Wait time.Duration
	// Dir, Memory and Disk are where the sort puts what does not fit into memory,
	// and its bounds: see [runs.Options].
	Dir          string
	Memory, Disk int64
	// Progress is told how far it is; it may be nil.
	Progress func(VerifyProgress)
	// Found gets each table's differences as they are proven; it may be nil.
	Found func(*Difference)
}

// VerifyProgress is how far the comparison of one table is.
type VerifyProgress struct {
	Table string
	Stage string // "source", "destination", "suspects"
	Rows  int64
}

// DifferenceKind is in which way a row differs.
type DifferenceKind string

// The kinds of differences.
const (
	// DifferenceMissing: the source has the row, the pipeline has not.
	DifferenceMissing DifferenceKind = "missing"
	// DifferenceGhost: the pipeline has a row that the source has not.
	DifferenceGhost DifferenceKind = "ghost"
	// DifferenceStale: both have it, with other values.
	DifferenceStale DifferenceKind = "stale"
	// DifferenceUnsendable: the source's row cannot be written to the table.
	DifferenceUnsendable DifferenceKind = "unsendable"
)

// Difference is one row that differs, proven.
type Difference struct {
	Table string         `json:"table"` // of the source
	Kind  DifferenceKind `json:"kind"`
	Key   string         `json:"key"`
	// Columns are those whose values differ, of a stale row.
	Columns []ColumnDifference `json:"columns,omitempty"`
	// Why says why a row is unsendable.
	Why string `json:"why,omitempty"`

	// job is the key as a copy job names it, nil for a row that cannot be sent.
	job []string
}

// ColumnDifference is one column of a stale row; the values are there where
// they were asked for.
type ColumnDifference struct {
	Column string `json:"column"`
	Source string `json:"source,omitempty"`
	Target string `json:"target,omitempty"`
}

// Unsettled is a key that differed at each look and did not come to rest.
type Unsettled struct {
	Key string `json:"key"`
	Why string `json:"why"`
}

// TableReport is what the comparison of one table found.
type TableReport struct {
	Table  string `json:"table"`
	Target string `json:"target"`
	// SourceRows and TargetRows are what was read, Equal the keys whose rows were
	// equal at the first look.
	SourceRows int64 `json:"source_rows"`
	TargetRows int64 `json:"target_rows"`
	Equal      int64 `json:"equal"`
	// Suspects were looked at again.
	Suspects    int64        `json:"suspects"`
	Differences []Difference `json:"differences"`
	// More: there are further differences; the comparison was ended.
	More      bool                 `json:"more"`
	Unsettled []Unsettled          `json:"unsettled"`
	Left      []feldera.Uncompared `json:"not_compared"`
	// Refused says why the table cannot be compared at all, "" where it can.
	Refused string `json:"refused,omitempty"`
	// Coarse says why two keys that are one to the source may be two in the
	// pipeline, "" where that cannot be.
	Coarse  string  `json:"coarse_key,omitempty"`
	Seconds float64 `json:"seconds"`

	name tableName
}

// Report is what a comparison found.
type Report struct {
	Tables []TableReport `json:"tables"`
}

// Different tells whether any difference is proven, Unsettled whether any key
// is undecided.
func (r *Report) Different() bool {
	return slices.ContainsFunc(r.Tables, func(t TableReport) bool { return len(t.Differences) > 0 })
}

// Undecided tells whether any key did not come to rest, or any table could not
// be compared.
func (r *Report) Undecided() bool {
	return slices.ContainsFunc(r.Tables, func(t TableReport) bool { return len(t.Unsettled) > 0 || t.Refused != "" })
}

const (
	defaultMost = 1000
	defaultWait = 2 * time.Minute
	// maxUnsettled bounds the undecided keys that are listed of a table; with so
	// many the comparison of it ends.
	maxUnsettled = 10_000
	// verifyPage is how many rows are read of the source in one transaction.
	verifyPage = 5_000
	// verifyPageTimeout bounds one page: a transaction of the source is never
	// open for longer.
	verifyPageTimeout = time.Minute
	// pacedPage is how many seconds' rows one query asks the pipeline for where
	// the pace is bounded.
	pacedPage = 10
)

// FindTables finds mapped tables by the names that a person gives: schema.table
// as in PGSOURCE_TABLES, or the table alone where that is unique.
func (s *Source) FindTables(names []string) ([]Table, error) {
	if len(names) == 0 {
		return s.cfg.Tables, nil
	}
	var found []Table
	for _, name := range names {
		var hits []Table
		for _, t := range s.cfg.Tables {
			if t.Schema+"."+t.Name == name || t.Name == name {
				hits = append(hits, t)
			}
		}
		switch len(hits) {
		case 1:
			if !slices.Contains(found, hits[0]) {
				found = append(found, hits[0])
			}
		default:
			all := make([]string, len(s.cfg.Tables))
			for i, t := range s.cfg.Tables {
				all[i] = t.Schema + "." + t.Name
			}
			return nil, &decode.Refusal{
				Reason: decode.ReasonSetup, What: "table", Where: name, Why: fmt.Sprintf("%d tables of PGSOURCE_TABLES have this name", len(hits)),
				Expected: "one of " + strings.Join(all[:min(len(all), 20)], ", "), Do: "name the table with its schema",
			}
		}
	}
	return found, nil
}

// Verify compares tables. It changes nothing, and may run beside the pgsource
// that carries the changes, in a process of its own or in the same one.
//
// Errors: *decode.Refusal for what a person has to mend; anything else is
// worth another attempt.
func (s *Source) Verify(ctx context.Context, o VerifyOptions) (*Report, error) {
	if o.Most <= 0 {
		o.Most = defaultMost
	}
	if o.Wait <= 0 {
		o.Wait = defaultWait
	}
	if o.Progress == nil {
		o.Progress = func(VerifyProgress) {}
	}
	if o.Found == nil {
		o.Found = func(*Difference) {}
	}
	if o.Tables == nil {
		o.Tables = s.cfg.Tables
	}
	schema, err := s.cfg.Pipeline.Describe(ctx)
	if err != nil {
		return nil, fmt.Errorf("describe the pipeline: %w", err)
	}
	space, err := runs.Open(runs.Options{Dir: o.Dir, Memory: o.Memory, Limit: o.Disk})
	if err != nil {
		return nil, &decode.Refusal{
			Reason: decode.ReasonSetup, What: "comparison", Why: err.Error(), Expected: "a directory for what does not fit into memory",
			Do: "name one with -dir",
		}
	}
	conn, err := s.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	report := &Report{}
	for _, t := range o.Tables {
		target, err := schema.Table(t.Target)
		if err != nil {
			return nil, err
		}
		v := &verifier{s: s, o: &o, conn: conn, space: space, seed: maphash.MakeSeed(), seen: make(map[string]bool)}
		err = v.table(ctx, t, target)
		if refused, ok := errors.AsType[*decode.Refusal](err); ok && refused.Reason == decode.ReasonUnsupported {
			v.report.Refused, err = refused.Error(), nil // the others can be compared
		}
		if err != nil {
			return nil, fmt.Errorf("compare %s.%s: %w", t.Schema, t.Name, err)
		}
		report.Tables = append(report.Tables, v.report)
	}
	return report, nil
}

// verifier compares one table.
type verifier struct {
	s     *Source
	o     *VerifyOptions
	conn  *pgx.Conn // plain, of this verifier alone
	space *runs.Space
	seed  maphash.Seed
	src   *sourceTable

	report TableReport
	// keysOnly: nothing is reported of rows.
	keysOnly bool
	// seen are the unsendable rows that were reported, by their keys: no more
	// than the differences that are listed.
	seen map[string]bool
}

// errEnough ends the comparison of a table early.
var errEnough = errors.New("as many differences as were asked for are proven")

func (v *verifier) table(ctx context.Context, t Table, target *feldera.Table) (err error) {
	began := time.Now()
	v.report = TableReport{Table: t.Schema + "." + t.Name, Target: target.Spelling(), Differences: []Difference{}, Unsettled: []Unsettled{}}
	defer func() { v.report.Seconds = time.Since(began).Seconds() }()
	if v.src, err = v.s.openSourceTable(ctx, v.conn, t, target); err != nil {
		return err
	}
	v.report.name, v.report.Coarse = v.src.name, v.src.coarse
	v.report.Left = append([]feldera.Uncompared{}, v.src.cmp.Uncompared()...)

	source, destination := v.space.NewSorter(), v.space.NewSorter()
	defer func() { err = errors.Join(err, source.Close(), destination.Close()) }()
	position, err := v.readSource(ctx, source)
	if err != nil {
		return v.enough(err)
	}
	// Not a must: what the first look at the pipeline sees too early is looked at
	// again. But without the wait that would be everything that is on its way.
	if _, err := v.awaitAcknowledged(ctx, position); err != nil {
		return err
	}
	if err := v.readDestination(ctx, destination); err != nil {
		return err
	}
	return v.enough(v.merge(ctx, source, destination))
}

// enough takes the early end for what it is.
func (v *verifier) enough(err error) error {
	if errors.Is(err, errEnough) {
		v.report.More = true
		return nil
	}
	return err
}

// sampled tells whether a key belongs to the sample.
func (v *verifier) sampled(key []byte) bool {
	if v.o.Sample <= 0 || v.o.Sample >= 1 {
		return true
	}
	return float64(maphash.Bytes(v.seed, key)) < v.o.Sample*math.MaxUint64
}

// pace holds a reader back to the rows per second that are allowed.
func (v *verifier) pace(ctx context.Context, began time.Time, rows int64) error {
	if v.o.RowsPerSecond <= 0 {
		return ctx.Err()
	}
	due := began.Add(time.Duration(float64(rows) / float64(v.o.RowsPerSecond) * float64(time.Second)))
	if wait := time.Until(due); wait > 0 {
		return sleep(ctx, wait)
	}
	return ctx.Err()
}

// readSource puts the images of the source's rows into w, and gives a position
// behind everything that it has seen.
func (v *verifier) readSource(ctx context.Context, w *runs.Sorter) (position uint64, err error) {
	began := time.Now()
	var after []string
	for {
		page, err := v.src.page(ctx, v.conn, after, verifyPage, func(im *feldera.Image, unsendable *decode.Refusal) error {
			v.report.SourceRows++
			if !v.sampled(im.Key) {
				return nil
			}
			if unsendable != nil && v.keysOnly {
				if im.Key == nil {
					return nil // the pipeline cannot have it either
				}
			} else if unsendable != nil {
				if err := v.unsendable(im.Key, unsendable); err != nil || im.Key == nil {
					return err
				}
			}
			return w.Add(runs.Record{Key: im.Key, Sum: im.Sum})
		})
		if err != nil {
			return 0, v.sortError(err)
		}
		v.o.Progress(VerifyProgress{v.report.Table, "source", v.report.SourceRows})
		if page.last == nil {
			return page.position, nil
		}
		after = page.last
		if err := v.pace(ctx, began, v.report.SourceRows); err != nil {
			return 0, err
		}
	}
}

// sortError words the faults of the sort for a person.
func (v *verifier) sortError(err error) error {
	if !errors.Is(err, runs.ErrFull) {
		return err
	}
	return &decode.Refusal{
		Reason: decode.ReasonLimit, What: "comparison", Where: "table " + v.report.Table, Why: err.Error(), Expected: "room for a key and 16 bytes of each row of both sides",
		Do: "give it more with -disk, or compare a part of the rows with -sample",
	}
}

// unsendable enters a row that cannot be sent, once.
func (v *verifier) unsendable(key []byte, why *decode.Refusal) error {
	text := v.src.cmp.KeyText(key)
	if text == "" {
		text = why.Where
	}
	if v.seen[text] {
		return nil
	}
	v.seen[text] = true
	return v.found(&Difference{Kind: DifferenceUnsendable, Key: text, Why: why.Error()})
}

// found enters a proven difference.
func (v *verifier) found(d *Difference) error {
	d.Table = v.report.Table
	if len(v.report.Differences) == v.o.Most {
		return errEnough
	}
	v.report.Differences = append(v.report.Differences, *d)
	v.o.Found(d)
	return nil
}

func (v *verifier) readDestination(ctx context.Context, w *runs.Sorter) error {
	began := time.Now()
	page := 0
	if v.o.RowsPerSecond > 0 {
		page = max(pacedPage*v.o.RowsPerSecond, 1000)
	}
	between := func() error {
		v.o.Progress(VerifyProgress{v.report.Table, "destination", v.report.TargetRows})
		return v.pace(ctx, began, v.report.TargetRows)
	}
	err := v.src.cmp.ReadAll(ctx, v.s.cfg.Pipeline, page, func(im *feldera.Image) error {
		v.report.TargetRows++
		if !v.sampled(im.Key) {
			return nil
		}
		return w.Add(runs.Record{Key: im.Key, Sum: im.Sum})
	}, between)
	v.o.Progress(VerifyProgress{v.report.Table, "destination", v.report.TargetRows})
	return v.sortError(err)
}

// merge puts both sides side by side and has the keys settled in which they
// differ.
func (v *verifier) merge(ctx context.Context, source, destination *runs.Sorter) error {
	settle := newSettler(v)
	err := v.sideBySide(source, destination, func(key []byte, here, there *group) error {
		if here != nil && there != nil && here.one && there.one && here.sum == there.sum {
			v.report.Equal++
			return nil
		}
		v.report.Suspects++
		return settle.suspect(ctx, key)
	})
	if err != nil {
		return err
	}
	return settle.finish(ctx)
}

// sideBySide hands each key to fn with what either side has of it, nil for
// nothing, in the order of their bytes.
func (v *verifier) sideBySide(source, destination *runs.Sorter, fn func(key []byte, here, there *group) error) (err error) {
	s, err := source.Sort()
	if err != nil {
		return v.sortError(err)
	}
	d, err := destination.Sort()
	if err != nil {
		return errors.Join(v.sortError(err), s.Close())
	}
	defer func() { err = errors.Join(err, s.Close(), d.Close()) }()
	left, right := &groups{r: s}, &groups{r: d}
	for {
		a, err := left.peek()
		if err != nil {
			return err
		}
		b, err := right.peek()
		if err != nil {
			return err
		}
		switch {
		case a == nil && b == nil:
			return nil
		case b == nil || a != nil && bytes.Compare(a.key, b.key) < 0:
			b = nil
		case a == nil || bytes.Compare(a.key, b.key) > 0:
			a = nil
		}
		key := []byte(nil)
		if a != nil {
			key = a.key
			left.now = nil
		}
		if b != nil {
			key = b.key
			right.now = nil
		}
		if err := fn(key, a, b); err != nil {
			return err
		}
	}
}

// group is what one side has of a key. A row that moved between two pages can
// come twice, with two sums.
type group struct {
	key []byte
	sum [runs.SumSize]byte
	one bool
}

type groups struct {
	r    *runs.Reader
	head *runs.Record // the first record behind now
	done bool
	now  *group
}

// peek gives the present group, nil behind the last one; who has dealt with it
// sets now to nil.
func (g *groups) peek() (*group, error) {
	if g.now == nil {
		var err error
		if g.now, err = g.next(); err != nil {
			return nil, err
		}
	}
	return g.now, nil
}

func (g *groups) next() (*group, error) {
	if g.head == nil && !g.done {
		if err := g.advance(); err != nil {
			return nil, err
		}
	}
	if g.head == nil {
		return nil, nil //nolint:nilnil // the end
	}
	out := &group{key: g.head.Key, sum: g.head.Sum, one: true}
	for {
		if err := g.advance(); err != nil {
			return nil, err
		}
		if g.head == nil || !bytes.Equal(g.head.Key, out.key) {
			return out, nil
		}
		out.one = out.one && g.head.Sum == out.sum
	}
}

func (g *groups) advance() error {
	rec, ok, err := g.r.Next()
	if err != nil {
		return err
	}
	g.head, g.done = nil, !ok
	if ok {
		g.head = &rec
	}
	return nil
}

// walPage and the two lengths of the header at its beginning: a position right
// behind a header is the end of the record before it as well.
const (
	walPage        = 8192
	walShortHeader = 24
	walLongHeader  = 40
)

// awaitAcknowledged waits until the slot's confirmed position has passed a
// position of the source: the pipeline has completed then what the source had.
// It says why, where that does not come within the time.
func (v *verifier) awaitAcknowledged(ctx context.Context, position uint64) (why string, err error) {
	if into := position % walPage; into == walShortHeader || into == walLongHeader {
		position -= into
	}
	deadline := time.Now().Add(v.o.Wait)
	for {
		slot, err := readSlot(ctx, v.conn, v.s.cfg.Slot)
		switch {
		case err != nil:
			return "", err
		case slot == nil:
			return "the server has no slot " + v.s.cfg.Slot + ", so nothing carries changes", nil
		case slot.confirmed >= position:
			return "", nil
		case slot.lost():
			return "the slot " + v.s.cfg.Slot + " is lost, so nothing carries changes", nil
		case !slot.active && v.s.cfg.Transport != TransportPeek && time.Until(deadline) < v.o.Wait-inactiveFor:
			return "no pgsource reads slot " + v.s.cfg.Slot + ", so its position does not move", nil
		case time.Now().After(deadline):
			return fmt.Sprintf("the acknowledged position %s has not passed %s within %s", decode.FormatLSN(slot.confirmed), decode.FormatLSN(position), v.o.Wait), nil
		}
		if err := sleep(ctx, acknowledgedEvery); err != nil {
			return "", err
		}
	}
}

const (
	// inactiveFor is how long a slot may be without a reader, as between two
	// connections of a pgsource, before nobody is waited for.
	inactiveFor = 5 * time.Second
	// acknowledgedEvery is how often the slot is looked at.
	acknowledgedEvery = 50 * time.Millisecond
)
