package wal

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/jackc/pgx/v5"

	"holdfast/internal/decode"
)

// Passing over one transaction that can never be delivered takes three steps,
// none of which the daemon takes by itself:
//
//	the daemon is refused a transaction → it records which one, and stops
//	a person names it (pgsource skip LSN) → it is read from the slot without
//	moving it, written whole to a file, made durable, and marked in the state
//	the daemon starts → it meets exactly that transaction, passes over its rows
//	and says so
//
// The mark stays until the bookmark has passed it, so a crash in between
// passes over the same transaction again and over no other: a commit's end
// belongs to one transaction only.

// RefusedTransaction is the transaction that ended the last run.
type RefusedTransaction struct {
	End     LSN       `json:"end_lsn"`
	XID     uint32    `json:"xid"`
	Why     string    `json:"why"`
	Refused time.Time `json:"refused_at"`
}

// SkippedTransaction is one that a person has decided to pass over.
type SkippedTransaction struct {
	End     LSN       `json:"end_lsn"`
	XID     uint32    `json:"xid"`
	File    string    `json:"file"` // where its rows were written
	Decided time.Time `json:"decided_at"`
}

// maxRefusedText bounds the reason that is recorded.
const maxRefusedText = 1024

// transactionError is an error about one transaction.
type transactionError struct {
	xid uint32
	end uint64
	err error
}

func (e *transactionError) Error() string {
	return fmt.Sprintf("transaction %d ending at LSN %s: %v", e.xid, decode.FormatLSN(e.end), e.err)
}

func (e *transactionError) Unwrap() error { return e.err }

// recordRefused notes which transaction ended the run, so that it and no other
// can be passed over. Failing to is no reason to fail in another way: the
// refusal will come again.
func (s *Source) recordRefused(ctx context.Context, err error) {
	about, ok := errors.AsType[*transactionError](err)
	if _, refused := errors.AsType[*decode.Refusal](err); !ok || !refused {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveTimeout)
	defer cancel()
	text := err.Error()
	if len(text) > maxRefusedText {
		text = text[:maxRefusedText] + "…"
	}
	saveErr := s.keeper.update(ctx, func(next *State) bool {
		if next.System == "" {
			return false
		}
		next.Refused = &RefusedTransaction{End: LSN(about.end), XID: about.xid, Why: string(bytes.ToValidUTF8([]byte(text), []byte("?"))), Refused: time.Now().UTC()}
		return true
	})
	if saveErr != nil {
		s.log.WarnContext(ctx, "which transaction was refused could not be recorded", "err", saveErr)
	}
}

// skipping gives the end of the transaction to pass over, 0 for none, and
// forgets marks that the bookmark has passed.
func (s *Source) skipping(ctx context.Context) (uint64, error) {
	st, err := s.keeper.get(ctx)
	if err != nil || st == nil {
		return 0, err
	}
	passed := func(end LSN) bool { return end <= st.Acknowledged }
	if (st.Skip != nil && passed(st.Skip.End)) || (st.Refused != nil && passed(st.Refused.End)) {
		err = s.keeper.must(ctx, func(next *State) bool {
			if next.Skip != nil && passed(next.Skip.End) {
				next.Skip = nil
			}
			if next.Refused != nil && passed(next.Refused.End) {
				next.Refused = nil
			}
			return true
		})
		if err != nil {
			return 0, err
		}
		if st, err = s.keeper.get(ctx); err != nil {
			return 0, err
		}
	}
	if st.Skip == nil {
		return 0, nil
	}
	return uint64(st.Skip.End), nil
}

// Skip marks the transaction that ends at end to be passed over, after it was
// written to a new file at path. sure is told what it is and has to agree. Only
// the transaction that stopped the daemon last can be marked, and only while
// no daemon runs or it stands blocked.
// changed has the number of changes of each table in it, by its full name.
func (s *Source) Skip(ctx context.Context, end LSN, path string, sure func(*RefusedTransaction) error) (done *SkippedTransaction, changed map[string]int, err error) {
	if _, none := s.cfg.State.(noStore); none {
		return nil, nil, errNoState()
	}
	if err := s.cfg.State.Acquire(ctx); err != nil {
		return nil, nil, err
	}
	defer func() {
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveTimeout)
		defer cancel()
		err = errors.Join(err, s.cfg.State.Release(rctx))
	}()
	st, err := s.cfg.State.Load(ctx)
	if err != nil {
		return nil, nil, err
	}
	refuse := func(why, do string) error {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "transaction", Where: "LSN " + end.String(), Why: why,
			Expected: "the end LSN of the transaction that stopped pgsource", Do: do,
		}
	}
	switch {
	case st == nil:
		return nil, nil, refuse("the state holds nothing, so no transaction has stopped this pgsource", "start pgsource first")
	case st.Refused == nil:
		return nil, nil, refuse("no transaction has stopped this pgsource", "look at what did: pgsource state show")
	case st.Refused.End != end:
		return nil, nil, refuse(fmt.Sprintf("it is another one that stopped pgsource: %s, at LSN %s", st.Refused.Why, st.Refused.End),
			"run: pgsource skip "+st.Refused.End.String())
	case st.Skip != nil && st.Skip.End == end:
		return nil, nil, refuse(fmt.Sprintf("it is marked already, and was written to %s", st.Skip.File), "start pgsource")
	}
	if err := s.ownState(st); err != nil {
		return nil, nil, err
	}
	if err := sure(st.Refused); err != nil {
		return nil, nil, err
	}
	changed, err = s.writeDeadLetter(ctx, st, path)
	if err != nil {
		return nil, nil, err
	}
	absolute, err := filepath.Abs(path)
	if err != nil {
		absolute = path
	}
	next := st.clone()
	next.Skip = &SkippedTransaction{End: end, XID: st.Refused.XID, File: absolute, Decided: time.Now().UTC()}
	next.Sequence++
	next.Saved, next.Writer = time.Now().UTC(), thisProcess()
	if err := s.cfg.State.Save(ctx, next); err != nil {
		return nil, nil, fmt.Errorf("mark the transaction in the state, after it was written to %s: %w", path, err)
	}
	return next.Skip, changed, nil
}

// writeDeadLetter writes the refused transaction to a new file and makes it
// durable. On any failure there is no file.
func (s *Source) writeDeadLetter(ctx context.Context, st *State, path string) (changed map[string]int, err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600) //nolint:gosec // the operator names the file
	if err != nil {
		return nil, fmt.Errorf("make the file for the transaction: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(path)
		}
	}()
	letter := &deadLetter{file: f, out: bufio.NewWriterSize(f, 1<<16), decoder: decode.NewPgOutput(), refused: st.Refused, state: st}
	err = s.look(ctx, func(_ context.Context, conn *pgx.Conn) error {
		tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly})
		if err != nil {
			return classify("begin to read the slot", err)
		}
		defer tx.Rollback(context.WithoutCancel(ctx)) //nolint:errcheck // it has only read
		if err := pinTransaction(ctx, conn); err != nil {
			return err
		}
		return s.peek(ctx, conn, st.Refused.End, letter.take)
	})
	if err == nil && !letter.found {
		err = &decode.Refusal{
			Reason: decode.ReasonGap, What: "transaction", Where: "LSN " + st.Refused.End.String(), Why: "the slot does not have it any more",
			Expected: "a slot that stands before it", Do: "look at the slot: pgsource slot show",
		}
	}
	err = errors.Join(err, letter.out.Flush(), f.Sync(), f.Close())
	if err == nil {
		err = syncFolder(filepath.Dir(path))
	}
	return letter.changed, err
}

// syncFolder makes a new name in a folder durable.
func syncFolder(path string) error {
	dir, err := os.Open(path) //nolint:gosec // the folder of the file that the operator named
	if err != nil {
		return fmt.Errorf("open the folder of the file: %w", err)
	}
	if err := errors.Join(dir.Sync(), dir.Close()); err != nil {
		return fmt.Errorf("make the file's name durable: %w", err)
	}
	return nil
}

// peek reads the slot's transactions up to the one that ends at end, without
// moving the slot, and hands on every message.
func (s *Source) peek(ctx context.Context, conn *pgx.Conn, end LSN, take func(xid uint32, msg []byte) error) error {
	rows, err := conn.Query(ctx, `
		SELECT xid::text, data FROM pg_logical_slot_peek_binary_changes($1, $2::pg_lsn, NULL, 'proto_version', '1', 'publication_names', $3)`,
		s.cfg.Slot, end.String(), quoteIdentifier(s.cfg.Publication))
	if err != nil {
		return classify("read the slot", err)
	}
	defer rows.Close()
	for rows.Next() {
		var xid string
		var msg []byte
		if err := rows.Scan(&xid, &msg); err != nil {
			return fmt.Errorf("read the slot: %w", err)
		}
		n, err := strconv.ParseUint(xid, 10, 32)
		if err != nil {
			return fmt.Errorf("read the slot: %w", err)
		}
		if err := take(uint32(n), msg); err != nil {
			return err
		}
	}
	if err := rows.Err(); err != nil {
		return classify("read the slot", err)
	}
	return nil
}

// deadLetter writes one transaction as lines of JSON: what it is, then each
// message decoded and as the server sent it, then a line that says it is whole.
// It is given all transactions before it too, whose Relation messages it may
// depend on; what was written of one that proves to be another is taken back.
type deadLetter struct {
	file    *os.File
	out     *bufio.Writer
	decoder *decode.PgOutput
	refused *RefusedTransaction
	state   *State
	found   bool
	rows    int
	changed map[string]int // rows by the table's full name, unquoted
}

func (l *deadLetter) take(xid uint32, msg []byte) error {
	if l.found || len(msg) == 0 {
		return nil
	}
	m, decodeErr := l.decoder.Decode(msg)
	switch decode.MessageKind(msg[0]) {
	case decode.MsgBegin:
		return l.begin(xid)
	case decode.MsgCommit:
		if decodeErr != nil {
			return decodeErr
		}
		if LSN(m.EndLSN) != l.refused.End {
			return l.takeBack()
		}
		l.found = true
		return l.line(map[string]any{"kind": "end", "rows": l.rows, "end_lsn": l.refused.End, "commit_time": m.CommitTime.UTC().Format(time.RFC3339Nano)})
	case decode.MsgInsert, decode.MsgUpdate, decode.MsgDelete, decode.MsgTruncate, decode.MsgRelation, decode.MsgType, decode.MsgOrigin, decode.MsgLogical:
	}
	return l.message(msg, m, decodeErr)
}

func (l *deadLetter) begin(xid uint32) error {
	l.rows, l.changed = 0, make(map[string]int)
	return l.line(map[string]any{
		"kind": "transaction", "slot": l.state.Slot, "system_identifier": l.state.System, "timeline": l.state.Timeline,
		"database": l.state.Database, "xid": xid, "end_lsn": l.refused.End, "refused": l.refused.Why,
	})
}

func (l *deadLetter) takeBack() error {
	l.out.Reset(io.Discard)
	if err := l.file.Truncate(0); err != nil {
		return fmt.Errorf("take back what was written of another transaction: %w", err)
	}
	if _, err := l.file.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("take back what was written of another transaction: %w", err)
	}
	l.out.Reset(l.file)
	return nil
}

func (l *deadLetter) message(msg []byte, m *decode.Message, decodeErr error) error {
	line := map[string]any{"raw": base64.StdEncoding.EncodeToString(msg)}
	switch {
	case decodeErr != nil:
		line["kind"], line["error"] = "undecodable", decodeErr.Error()
	case m.Kind == decode.MsgRelation:
		line["kind"], line["table"] = "relation", m.Relation.String()
	case m.Kind == decode.MsgTruncate:
		var names []string
		for _, rel := range m.Truncated {
			names = append(names, rel.String())
			l.changed[rel.String()]++
		}
		line["kind"], line["tables"] = "truncate", names
	case m.Kind == decode.MsgInsert, m.Kind == decode.MsgUpdate, m.Kind == decode.MsgDelete:
		line["kind"], line["table"] = m.Change.Op.String(), m.Change.Relation.String()
		l.changed[m.Change.Relation.String()]++
		for name, row := range map[string][]decode.Value{"before": m.Change.Before, "after": m.Change.After} {
			if row != nil {
				line[name] = rowOf(m.Change.Relation, row)
			}
		}
	default:
		line["kind"] = "other"
	}
	if strings.ContainsRune("IUDT", rune(msg[0])) {
		l.rows++
	}
	return l.line(line)
}

// rowOf writes the values of a row as the text that the stream had. What the
// stream left out is left out, and an unchanged value says that it is one.
func rowOf(rel *decode.Relation, row []decode.Value) map[string]any {
	values := make(map[string]any, len(row))
	for i, v := range row {
		if i >= len(rel.Columns) {
			break
		}
		name := rel.Columns[i].Name
		switch v.State {
		case decode.Null:
			values[name] = nil
		case decode.Unchanged:
			values[name] = map[string]bool{"unchanged": true}
		case decode.Set:
			values[name] = string(bytes.ToValidUTF8(v.Bytes, []byte("\uFFFD")))
		case decode.Absent:
		}
	}
	return values
}

func (l *deadLetter) line(v map[string]any) error {
	b, err := json.Marshal(v, json.Deterministic(true), jsontext.AllowInvalidUTF8(true))
	if err != nil {
		return fmt.Errorf("write the transaction: %w", err)
	}
	if _, err := l.out.Write(append(b, '\n')); err != nil {
		return fmt.Errorf("write the transaction: %w", err)
	}
	return nil
}

// passesOver tells whether tx is the one that a person has decided to pass
// over.
func (d *deliverer) passesOver(tx *transaction) bool {
	return d.a.ready.skip != 0 && tx.end == d.a.ready.skip
}

// passOver takes one message of a transaction that is passed over. Its rows are
// not looked at. What it says about tables and types counts, since later
// transactions rely on it; where that is what was refused, their rows are.
func (d *deliverer) passOver(work context.Context, msg []byte, tx *transaction) {
	if d.passed != tx.end {
		d.passed = tx.end
		d.cfg.Metrics.slot.skipped.Inc()
		d.a.s.log.WarnContext(work, "transaction passed over, as pgsource skip was told to: its changes are missing from the pipeline",
			"xid", tx.xid, "lsn", decode.FormatLSN(tx.end), "rows", tx.rows)
	}
	if len(msg) == 0 {
		return
	}
	switch decode.MessageKind(msg[0]) {
	case decode.MsgType, decode.MsgRelation:
		m, err := d.decoder.Decode(msg)
		if err != nil || m.Kind != decode.MsgRelation {
			return // the rows that need it are refused by the decoder
		}
		if err := d.setRoute(work, m.Relation, tx); err != nil {
			delete(d.routes, m.Relation.ID)
			d.unusable[m.Relation.ID] = err
		}
	default:
	}
}
