package felderasim

import (
	"context"
	"net/http"
	"slices"
	"sort"

	"holdfast/test/felderasim/core"
)

// Request is one ingress request as the simulator saw it.
type Request struct {
	Seq         int64    `json:"seq"` // from 1, over all requests
	Front       string   `json:"front"`
	Table       string   `json:"table"` // as spelled in the URL
	Query       string   `json:"query"`
	Incarnation string   `json:"incarnation"` // of the process it came to
	Bytes       int64    `json:"bytes"`       // of the body that were read by the process
	Records     int      `json:"records"`     // queued by it
	Status      int      `json:"status"`      // answered; 0: the connection was cut, or no answer yet
	Done        bool     `json:"done"`
	Token       string   `json:"token,omitempty"` // issued, also when the answer was lost
	Faults      []string `json:"faults,omitempty"`
	// Answer is the error code of an answer that was not 200.
	Answer string `json:"answer,omitempty"`
}

// record begins the entry of an ingress request; other calls have none.
func (s *Sim) record(f front, c call, r *http.Request, faults map[FaultKind]*activeFault) int64 {
	if c.endpoint != "ingress" {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seq++
	s.count.Requests++
	rec := Request{Seq: s.seq, Front: string(f), Table: c.table, Query: r.URL.RawQuery, Incarnation: s.engine.Incarnation()}
	for k := range faults {
		rec.Faults = append(rec.Faults, string(k))
	}
	sort.Strings(rec.Faults)
	s.journal = append(s.journal, rec)
	if n := len(s.journal) - s.opts.JournalSize; n > 0 {
		s.journal = append(s.journal[:0], s.journal[n:]...)
	}
	s.notifyLocked()
	return s.seq
}

func (s *Sim) finish(seq int64, a answer) {
	if seq == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.status == http.StatusOK {
		s.count.Accepted++
	} else {
		s.count.Rejected++
	}
	if i := int(seq-s.seq) + len(s.journal) - 1; i >= 0 && i < len(s.journal) {
		rec := &s.journal[i]
		rec.Done, rec.Bytes, rec.Records, rec.Token = true, a.bytes, a.records, a.token
		if !a.abort {
			rec.Status, rec.Answer = a.status, a.code
		}
	}
	s.notifyLocked()
}

// enter counts a request at a table; the returned function ends it.
func (s *Sim) enter(table string) func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := core.CanonicalName(table)
	if s.atOnce == nil {
		s.atOnce = map[string]int64{}
	}
	s.atOnce[t]++
	s.count.Concurrent = max(s.count.Concurrent, s.atOnce[t])
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.atOnce[t]--
	}
}

// Requests gives the last ingress requests, oldest first.
func (s *Sim) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.journal)
}

// Counters gives the totals.
func (s *Sim) Counters() Counters {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count
}

// Incarnation is the uuid of the running process, or of the last one.
func (s *Sim) Incarnation() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.engine.Incarnation()
}

// Stats is what GET /stats answers.
func (s *Sim) Stats() core.Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.engine.Stats()
}

// Dump gives a table as of the last completed transaction, one JSON object
// per row, sorted; rows of a table without a primary key end in " weight=N".
// It is nil for an unknown table.
func (s *Sim) Dump(table string) []string {
	s.mu.Lock()
	rows, def, ok := s.engine.Contents(table)
	s.mu.Unlock()
	if !ok {
		return nil
	}
	return core.DumpRows(def, rows)
}

// Rows gives a table as of the last completed transaction, in the order of
// Dump. A row of a table without a primary key carries its weight under
// "$weight". The Go types are those of core.RowReader.Values.
func (s *Sim) Rows(table string) []map[string]any {
	s.mu.Lock()
	rows, def, ok := s.engine.Contents(table)
	s.mu.Unlock()
	if !ok {
		return nil
	}
	return rowValues(rows, def)
}

func rowValues(rows []core.Weighted, def *core.TableDef) []map[string]any {
	core.SortRows(def, rows)
	rr := core.NewRowReader(def)
	out := make([]map[string]any, 0, len(rows))
	for _, w := range rows {
		m := rr.Values(w.Row)
		if len(def.PrimaryKey) == 0 {
			m["$weight"] = w.Weight
		}
		out = append(out, m)
	}
	return out
}

// Count is the number of rows of a table, weights counted; -1 for an unknown
// table.
func (s *Sim) Count(table string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.engine.Count(table)
}

// View is the simulator at one instant. It is valid only during the call that
// it was handed to.
type View struct{ s *Sim }

// Count is Sim.Count.
func (v View) Count(table string) int64 { return v.s.engine.Count(table) }

// Rows is Sim.Rows.
func (v View) Rows(table string) []map[string]any {
	rows, def, ok := v.s.engine.Contents(table)
	if !ok {
		return nil
	}
	return rowValues(rows, def)
}

// Changed gives the rows of a table that have changed since the last call and
// are there, in no order; the first call, and one of a new incarnation, gives
// all of them. Nobody may query the table as well: a query takes the same
// changes.
func (v View) Changed(table string) []map[string]any {
	rows, def, _, ok := v.s.engine.Changes(table)
	if !ok {
		return nil
	}
	rr := core.NewRowReader(def)
	var out []map[string]any
	for _, w := range rows {
		if w.Weight > 0 {
			out = append(out, rr.Values(w.Row))
		}
	}
	return out
}

// InTransaction tells whether a transaction is open.
func (v View) InTransaction() bool { return v.s.engine.InTransaction() }

// Settled tells whether everything that the tables hold is completed: no
// transaction is open and no output is frozen.
func (v View) Settled() bool { return v.s.engine.Settled() }

// Dump is Sim.Dump.
func (v View) Dump(table string) []string { return v.s.engine.Dump(table) }

// Stats is Sim.Stats.
func (v View) Stats() core.Stats { return v.s.engine.Stats() }

// Counters is Sim.Counters.
func (v View) Counters() Counters { return v.s.count }

// Requests is Sim.Requests; the slice must not be kept.
func (v View) Requests() []Request { return v.s.journal }

// Checkpoints is what GET /checkpoints answers.
func (v View) Checkpoints() []core.CheckpointInfo { return v.s.engine.Checkpoints() }

// CheckpointStatus is what GET /checkpoint_status answers.
func (v View) CheckpointStatus() core.CheckpointStatus {
	st, _ := v.s.engine.CheckpointStatus("") // fails only for a foreign incarnation
	return st
}

// Incarnation is Sim.Incarnation.
func (v View) Incarnation() string { return v.s.engine.Incarnation() }

// WaitFor blocks until cond holds. It is called at once and after every
// change, under the simulator's lock: it must be quick and must not call the
// simulator but through the view.
func (s *Sim) WaitFor(ctx context.Context, cond func(View) bool) error {
	for {
		s.mu.Lock()
		ok := cond(View{s})
		ch := s.changeLocked()
		s.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-ch:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
