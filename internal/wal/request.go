package wal

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/decode"
)

// A person asks for a resync or a repair with a verb, in a process of its own;
// the pgsource that runs does it, since nobody else may write into the tables.
// Between the two is a request in the state store, beside the state: it is
// durable when the verb says so, waits for a pgsource that is down, and is
// taken away when the state itself has what it asks for.

// Request is what a verb asks a pgsource for.
type Request struct {
	// ID is unique, and in the order in which requests were made.
	ID string `json:"id"`
	// Kind is CopyResync for a whole table, CopyRepair for the keys.
	Kind   string `json:"kind"`
	Schema string `json:"schema"`
	Name   string `json:"name"`
	// Keys are as in a copy job; nil for all of the table.
	Keys  [][]string `json:"keys,omitzero"`
	Asked time.Time  `json:"asked_at"`
	By    string     `json:"by"` // for people
}

// RequestStore is a StateStore that requests can be put into. Putting one needs
// no lock: it happens beside the pgsource that has the store.
type RequestStore interface {
	StateStore
	// PutRequest makes a request durable before it returns.
	PutRequest(ctx context.Context, r *Request) error
	// Requests gives those that wait, oldest first, at most maxRequests. What
	// cannot be read is left out, and dropped by the store that is taken.
	Requests(ctx context.Context) ([]*Request, error)
	// DropRequest takes one away. One that is not there is no error.
	DropRequest(ctx context.Context, id string) error
}

const (
	requestFormat = "holdfast-pgsource-request"
	// maxRequests bounds the requests that are looked at together.
	maxRequests = 64
	// maxRequestBytes bounds one.
	maxRequestBytes = 256 << 10
)

// newRequest names a request.
func newRequest(kind, schema, name string, keys [][]string) *Request {
	var id [6]byte
	_, _ = rand.Read(id[:]) // never fails
	now := time.Now().UTC()
	return &Request{
		ID:   now.Format("20060102t150405.000000") + "-" + hex.EncodeToString(id[:]),
		Kind: kind, Schema: schema, Name: name, Keys: keys, Asked: now, By: thisProcess(),
	}
}

func encodeRequest(r *Request) ([]byte, error) {
	record, err := json.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode the request: %w", err)
	}
	b, err := json.Marshal(envelope{Format: requestFormat, Version: 1, Checksum: checksum(record), Record: record})
	if err != nil {
		return nil, fmt.Errorf("encode the request: %w", err)
	}
	if len(b) > maxRequestBytes {
		return nil, &decode.Refusal{
			Reason: decode.ReasonLimit, What: "request", Where: "table " + r.Schema + "." + r.Name, Why: fmt.Sprintf("it has %d bytes", len(b)),
			Expected: fmt.Sprintf("at most %d", maxRequestBytes), Do: "ask for a resync of the table",
		}
	}
	return append(b, '\n'), nil
}

// errNoRequest marks what is none that this program would have written.
var errNoRequest = errors.New("it is no request")

func decodeRequest(b []byte) (*Request, error) {
	var e envelope
	if len(b) > maxRequestBytes+1 || json.Unmarshal(bytes.TrimSpace(b), &e) != nil || e.Format != requestFormat || e.Version != 1 || e.Checksum != checksum(e.Record) {
		return nil, errNoRequest
	}
	r := new(Request)
	if err := json.Unmarshal(e.Record, r, json.RejectUnknownMembers(true)); err != nil {
		return nil, errNoRequest
	}
	if !validRequestID(r.ID) || len(r.Schema) > maxStateText || len(r.Name) > maxStateText || (r.Kind != string(CopyResync) && r.Kind != string(CopyRepair)) {
		return nil, errNoRequest
	}
	return r, nil
}

// validRequestID: it is a part of a file's name.
func validRequestID(id string) bool {
	return len(id) > 0 && len(id) < 64 && strings.Trim(id, "0123456789abcdefghijklmnopqrstuvwxyz.-") == "" && !strings.HasPrefix(id, ".")
}

func oldestFirst(list []*Request) []*Request {
	slices.SortFunc(list, func(a, b *Request) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

// Files.

func (f *FileStore) requestPath(id string) string { return f.path + ".request-" + id }

// PutRequest writes a file beside the state's.
func (f *FileStore) PutRequest(_ context.Context, r *Request) error {
	b, err := encodeRequest(r)
	if err != nil {
		return err
	}
	temp := f.path + ".ask-" + r.ID
	file, err := os.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) //nolint:gosec // the operator names the file
	if err != nil {
		return fmt.Errorf("write the request: %w", err)
	}
	_, err = file.Write(b)
	if err = errors.Join(err, file.Sync(), file.Close()); err == nil {
		err = os.Rename(temp, f.requestPath(r.ID))
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write the request: %w", err), os.Remove(temp))
	}
	return f.syncFolder()
}

func (f *FileStore) syncFolder() error {
	folder, err := os.Open(filepath.Dir(f.path))
	if err != nil {
		return fmt.Errorf("make the folder of the state durable: %w", err)
	}
	return errors.Join(folder.Sync(), folder.Close())
}

// Requests reads the files beside the state's.
func (f *FileStore) Requests(context.Context) (list []*Request, err error) {
	names, err := f.requestNames()
	if err != nil {
		return nil, err
	}
	for _, name := range names[:min(len(names), maxRequests)] {
		r, err := readRequestFile(name)
		switch {
		case errors.Is(err, os.ErrNotExist): // taken away meanwhile
		case errors.Is(err, errNoRequest):
			if f.lock != nil {
				err = os.Remove(name)
			}
			if err != nil && !errors.Is(err, errNoRequest) {
				return nil, fmt.Errorf("remove what is no request: %w", err)
			}
		case err != nil:
			return nil, err
		default:
			list = append(list, r)
		}
	}
	return oldestFirst(list), nil
}

// requestNames lists the files, sorted. The folder is the operator's, so a
// pattern is not made of its name.
func (f *FileStore) requestNames() (names []string, err error) {
	entries, err := os.ReadDir(filepath.Dir(f.path))
	if err != nil {
		return nil, fmt.Errorf("look for requests: %w", err)
	}
	prefix := filepath.Base(f.path) + ".request-"
	for _, e := range entries {
		if id, ok := strings.CutPrefix(e.Name(), prefix); ok && validRequestID(id) && e.Type().IsRegular() {
			names = append(names, f.requestPath(id))
		}
	}
	return names, nil
}

func readRequestFile(name string) (*Request, error) {
	file, err := os.Open(name) //nolint:gosec // beside the state
	if err != nil {
		return nil, fmt.Errorf("read a request: %w", err)
	}
	defer func() { _ = file.Close() }() // read only
	b, err := io.ReadAll(io.LimitReader(file, maxRequestBytes+2))
	if err != nil {
		return nil, fmt.Errorf("read a request: %w", err)
	}
	r, err := decodeRequest(b)
	if err == nil && !strings.HasSuffix(name, ".request-"+r.ID) {
		return nil, errNoRequest
	}
	return r, err
}

// DropRequest removes the file.
func (f *FileStore) DropRequest(_ context.Context, id string) error {
	if !validRequestID(id) {
		return errNoRequest
	}
	if err := os.Remove(f.requestPath(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove a request: %w", err)
	}
	return f.syncFolder()
}

// The table.

// requestKey begins the key of a request's row. No slot's name has a colon.
func (t *TableStore) requestKey(id string) string { return "request:" + t.slot + ":" + id }

// PutRequest writes a row beside the state's.
func (t *TableStore) PutRequest(ctx context.Context, r *Request) error {
	b, err := encodeRequest(r)
	if err != nil {
		return err
	}
	return t.withConn(ctx, func(conn *pgx.Conn) error {
		if _, err := conn.Exec(ctx, `INSERT INTO `+t.name()+` (slot, owner, record) VALUES ($1, $2, $3)`, t.requestKey(r.ID), "request", string(b)); err != nil {
			return classify("write the request", err)
		}
		return nil
	})
}

// withConn uses the store's connection, or one of its own where the store is
// not taken.
func (t *TableStore) withConn(ctx context.Context, do func(*pgx.Conn) error) error {
	if t.conn != nil && !t.conn.IsClosed() {
		return do(t.conn)
	}
	if t.taken {
		if err := t.Acquire(ctx); err != nil {
			return notFinal(err)
		}
		return do(t.conn)
	}
	conn, err := t.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return do(conn)
}

// Requests reads the rows beside the state's.
func (t *TableStore) Requests(ctx context.Context) (list []*Request, err error) {
	prefix := t.requestKey("")
	err = t.withConn(ctx, func(conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, `SELECT slot, CASE WHEN octet_length(record) <= $2 THEN record ELSE '' END FROM `+t.name()+`
			WHERE starts_with(slot, $1) AND record <> '' ORDER BY slot LIMIT $3`, prefix, maxRequestBytes+1, maxRequests)
		if err != nil {
			return classify("look for requests", err)
		}
		defer rows.Close()
		for rows.Next() {
			var key, record string
			if err := rows.Scan(&key, &record); err != nil {
				return fmt.Errorf("read a request: %w", err)
			}
			if r, err := decodeRequest([]byte(record)); err == nil && key == t.requestKey(r.ID) {
				list = append(list, r)
			}
		}
		if err := rows.Err(); err != nil {
			return classify("look for requests", err)
		}
		return nil
	})
	return oldestFirst(list), err
}

// DropRequest deletes the row, or empties it where the role may not delete.
func (t *TableStore) DropRequest(ctx context.Context, id string) error {
	return t.withConn(ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `DELETE FROM `+t.name()+` WHERE slot = $1`, t.requestKey(id))
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "42501" {
			_, err = conn.Exec(ctx, `UPDATE `+t.name()+` SET record = '' WHERE slot = $1`, t.requestKey(id))
		}
		if err != nil {
			return classify("take a request away", err)
		}
		return nil
	})
}

// Requests go through the keeper like everything that the store does.

// requests gives those that wait, none where the store takes none.
func (k *keeper) requests(ctx context.Context) (list []*Request, err error) {
	store, ok := k.store.(RequestStore)
	if !ok {
		return nil, nil
	}
	err = k.inTurn(ctx, func(ctx context.Context) error { list, err = store.Requests(ctx); return err })
	return list, err
}

func (k *keeper) dropRequest(ctx context.Context, id string) error {
	store, ok := k.store.(RequestStore)
	if !ok {
		return nil
	}
	return k.inTurn(ctx, func(ctx context.Context) error { return store.DropRequest(ctx, id) })
}

// inTurn does something with the store while nobody else does.
func (k *keeper) inTurn(ctx context.Context, do func(context.Context) error) error {
	select {
	case k.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-k.turn }()
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	return do(ctx)
}

// AskResync asks for a resync of a table.
func (s *Source) AskResync(ctx context.Context, t Table) (*Request, error) {
	r := newRequest(string(CopyResync), t.Schema, t.Name, nil)
	return r, s.ask(ctx, t, r)
}

// AskRepair asks for a look at the rows that were found to differ, but for
// those that cannot be sent.
func (s *Source) AskRepair(ctx context.Context, report *Report) (asked []*Request, err error) {
	for i := range report.Tables {
		t := &report.Tables[i]
		var keys [][]string
		for j := range t.Differences {
			if job := t.Differences[j].job; job != nil {
				keys = append(keys, job)
			}
		}
		for part := range slices.Chunk(keys, repairKeys) {
			r := newRequest(string(CopyRepair), t.name.schema, t.name.name, part)
			if err := s.ask(ctx, Table{Schema: t.name.schema, Name: t.name.name}, r); err != nil {
				return asked, err
			}
			asked = append(asked, r)
		}
	}
	return asked, nil
}

// repairKeys is how many keys one request names.
const repairKeys = 500

// ask refuses what the pgsource that runs would refuse, as far as can be known
// here, and puts the request into the state store.
func (s *Source) ask(ctx context.Context, t Table, r *Request) error {
	if err := s.CanAsk(); err != nil {
		return err
	}
	t, err := s.mapped(t.Schema, t.Name)
	if err != nil {
		return err
	}
	if err := s.soleFor(ctx, t, "a "+r.Kind); err != nil {
		return err
	}
	return s.put(ctx, r)
}

// CanAsk refuses where a request could not be kept.
func (s *Source) CanAsk() error {
	if _, ok := s.cfg.State.(RequestStore); ok {
		return nil
	}
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "request", Why: "PGSOURCE_STATE keeps nothing, so the pgsource that runs cannot be asked for anything",
		Expected: "a file or a table", Do: "set PGSOURCE_STATE for the daemon, restart it, and run the verb with the same",
	}
}

// put puts a request into the state store, for the pgsource that has it or will
// have it.
func (s *Source) put(ctx context.Context, r *Request) error {
	store, ok := s.cfg.State.(RequestStore)
	if !ok {
		return s.CanAsk()
	}
	return store.PutRequest(ctx, r)
}

// Asked tells whether a request still waits.
func (s *Source) Asked(ctx context.Context, id string) (bool, error) {
	store, ok := s.cfg.State.(RequestStore)
	if !ok {
		return false, nil
	}
	list, err := store.Requests(ctx)
	return slices.ContainsFunc(list, func(r *Request) bool { return r.ID == id }), err
}
