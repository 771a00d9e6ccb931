package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// answer is what the source said to one of pgsource's queries. pgsource looks at
// the catalogue over the simple protocol only, so a text has one answer.
type answer struct {
	Replication bool          `json:"replication"` // asked on a replication connection
	Query       string        `json:"query"`
	Fields      []field       `json:"fields"`
	Rows        [][]*string   `json:"rows"`
	Tag         string        `json:"tag"`
	Error       *refusedQuery `json:"error,omitempty"`
}

type field struct {
	Name     string `json:"name"`
	OID      uint32 `json:"oid"`
	Size     int16  `json:"size"`
	Modifier int32  `json:"modifier"`
}

type refusedQuery struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// catalogue answers pgsource's queries from what was recorded. While recording
// it asks the source what it does not have yet.
type catalogue struct {
	mu      sync.Mutex
	answers map[string]answer
	// ask is nil when playing.
	ask func(ctx context.Context, replication bool, query string) (answer, error)
	// added are the answers that came while recording, in order.
	added []answer
}

func newCatalogue() *catalogue { return &catalogue{answers: map[string]answer{}} }

func key(replication bool, query string) string { return fmt.Sprintf("%t %s", replication, query) }

func (c *catalogue) put(a answer) { c.answers[key(a.Replication, a.Query)] = a }

// writes are the first words of what recording must not pass on to the source.
var writes = []string{"insert", "update", "delete", "create", "alter", "drop", "truncate", "grant", "copy", "lock"}

func (c *catalogue) answer(ctx context.Context, replication bool, query string) (answer, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if a, ok := c.answers[key(replication, query)]; ok {
		return a, nil
	}
	if c.ask == nil {
		return answer{}, fmt.Errorf("the recording has no answer to this query of pgsource; was it made with another version, or with other settings? record anew: %s", query)
	}
	first, _, _ := strings.Cut(strings.ToLower(strings.TrimSpace(query)), " ")
	for _, w := range writes {
		if first == w {
			return answer{}, fmt.Errorf("pgsource wants to change the source while it is recorded, which is not let through: %s", query)
		}
	}
	a, err := c.ask(ctx, replication, query)
	if err != nil {
		return answer{}, err
	}
	c.put(a)
	c.added = append(c.added, a)
	return a, nil
}

// source is a pair of connections to the server that is recorded.
type source struct {
	plain, replication *pgconn.PgConn
}

func openSource(ctx context.Context, dsn string) (*source, error) {
	open := func(replication bool) (*pgconn.PgConn, error) {
		cfg, err := pgconn.ParseConfig(dsn)
		if err != nil {
			return nil, fmt.Errorf("read PGSOURCE_DSN: %w", err)
		}
		cfg.RuntimeParams["application_name"] = "holdfast-replay"
		// As pgsource has them: answers are to be the same.
		cfg.RuntimeParams["client_encoding"] = "UTF8"
		cfg.RuntimeParams["DateStyle"], cfg.RuntimeParams["IntervalStyle"], cfg.RuntimeParams["TimeZone"] = "ISO", "postgres", "UTC"
		if replication {
			cfg.RuntimeParams["replication"] = "database"
		}
		conn, err := pgconn.ConnectConfig(ctx, cfg)
		if err != nil {
			return nil, fmt.Errorf("connect to the source: %w", err)
		}
		return conn, nil
	}
	s := &source{}
	var err error
	if s.plain, err = open(false); err != nil {
		return nil, err
	}
	if s.replication, err = open(true); err != nil {
		return nil, errors.Join(err, s.plain.Close(ctx))
	}
	return s, nil
}

func (s *source) close(ctx context.Context) {
	_ = s.plain.Close(ctx) // nothing is under way
	_ = s.replication.Close(ctx)
}

// ask runs one query of pgsource at the source. Only one at a time.
func (s *source) ask(ctx context.Context, replication bool, query string) (answer, error) {
	conn := s.plain
	if replication {
		conn = s.replication
	}
	a := answer{Replication: replication, Query: query}
	results := conn.Exec(ctx, query)
	for results.NextResult() {
		r := results.ResultReader()
		a.Fields, a.Rows = nil, nil
		for _, f := range r.FieldDescriptions() {
			a.Fields = append(a.Fields, field{f.Name, f.DataTypeOID, f.DataTypeSize, f.TypeModifier})
		}
		for r.NextRow() {
			row := make([]*string, len(r.Values()))
			for i, v := range r.Values() {
				if v != nil {
					text := string(v)
					row[i] = &text
				}
			}
			a.Rows = append(a.Rows, row)
		}
		tag, err := r.Close()
		if err != nil {
			break // Close below says it again
		}
		a.Tag = tag.String()
	}
	err := results.Close()
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok {
		a.Error = &refusedQuery{refused.Code, refused.Message}
		return a, nil
	}
	if err != nil {
		return answer{}, fmt.Errorf("ask the source: %w", err)
	}
	return a, nil
}

// send writes the answer as the server would.
func (a answer) send(to *pgproto3.Backend) {
	switch {
	case a.Error != nil:
		to.Send(&pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: a.Error.Code, Message: a.Error.Message})
	default:
		if a.Fields != nil {
			d := &pgproto3.RowDescription{}
			for _, f := range a.Fields {
				d.Fields = append(d.Fields, pgproto3.FieldDescription{
					Name: []byte(f.Name), DataTypeOID: f.OID, DataTypeSize: f.Size, TypeModifier: f.Modifier,
				})
			}
			to.Send(d)
			for _, row := range a.Rows {
				values := make([][]byte, len(row))
				for i, v := range row {
					if v != nil {
						values[i] = []byte(*v)
					}
				}
				to.Send(&pgproto3.DataRow{Values: values})
			}
		}
		to.Send(&pgproto3.CommandComplete{CommandTag: []byte(a.Tag)})
	}
	to.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
}

// slotQuery is the beginning of the one query whose answer changes while
// pgsource runs: the state of its slot.
const slotQuery = "FROM pg_replication_slots AS s, to_jsonb(s) AS j"

// The columns of it that are set to where the play stands.
const (
	slotActive, slotPID                   = 4, 5
	slotConfirmed, slotRestart, slotAt    = 7, 8, 9
	slotRetained, slotColumns, slotStatus = 10, 20, 6
)

// patchSlot gives the answer about the slot for a server that has just the
// recorded stretch.
func patchSlot(a answer, confirmed, end lsn) (answer, error) {
	if len(a.Rows) != 1 || len(a.Rows[0]) != slotColumns {
		return a, fmt.Errorf("the recording has %d slots with %d columns, and one with %d is needed", len(a.Rows), len(a.Fields), slotColumns)
	}
	row := append([]*string(nil), a.Rows[0]...)
	set := func(i int, text string) { row[i] = &text }
	set(slotActive, "f")
	set(slotPID, "0")
	set(slotStatus, "reserved")
	set(slotConfirmed, confirmed.String())
	set(slotRestart, confirmed.String())
	set(slotAt, end.String())
	set(slotRetained, fmt.Sprint(uint64(end-min(confirmed, end))))
	a.Rows = [][]*string{row}
	return a, nil
}
