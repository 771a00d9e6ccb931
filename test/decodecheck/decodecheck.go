// Package decodecheck holds the project's pgoutput decoder against pglogrepl's,
// and keeps sessions of real servers as files for it.
package decodecheck

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pglogrepl"

	"holdfast/internal/decode"
)

// Compare holds a message that the decoder accepted against pglogrepl's
// reading of it. It must not be called with others: on them pglogrepl may
// panic, or allocate what the message claims.
func Compare(raw []byte, m *decode.Message) error {
	theirs, err := pglogrepl.Parse(raw)
	if err != nil {
		return fmt.Errorf("accepted a %c message that pglogrepl refuses: %w", raw[0], err)
	}
	switch x := theirs.(type) {
	case *pglogrepl.BeginMessage:
		if uint64(x.FinalLSN) != m.CommitLSN || x.Xid != m.XID || !sameTime(m.CommitTime, x.CommitTime) {
			return fmt.Errorf("begin %+v, pglogrepl %+v", m, x)
		}
	case *pglogrepl.CommitMessage:
		if uint64(x.CommitLSN) != m.CommitLSN || uint64(x.TransactionEndLSN) != m.EndLSN || !sameTime(m.CommitTime, x.CommitTime) {
			return fmt.Errorf("commit %+v, pglogrepl %+v", m, x)
		}
	case *pglogrepl.RelationMessage:
		return relation(m.Relation, x)
	case *pglogrepl.InsertMessage:
		return tuple(m.Change.Relation, m.Change.After, x.Tuple, false)
	case *pglogrepl.UpdateMessage:
		if err := tuple(m.Change.Relation, m.Change.Before, x.OldTuple, x.OldTupleType == 'K'); err != nil {
			return err
		}
		return tuple(m.Change.Relation, m.Change.After, x.NewTuple, false)
	case *pglogrepl.DeleteMessage:
		return tuple(m.Change.Relation, m.Change.Before, x.OldTuple, x.OldTupleType == 'K')
	case *pglogrepl.TruncateMessage:
		if len(x.RelationIDs) != len(m.Truncated) {
			return fmt.Errorf("truncate of %d, pglogrepl %d", len(m.Truncated), len(x.RelationIDs))
		}
		for i, id := range x.RelationIDs {
			if m.Truncated[i].ID != id {
				return fmt.Errorf("truncated relation %d is %d, pglogrepl %d", i, m.Truncated[i].ID, id)
			}
		}
	case *pglogrepl.LogicalDecodingMessage:
		if x.Transactional != m.Transactional || x.Prefix != m.Prefix || !bytes.Equal(x.Content, m.Content) {
			return fmt.Errorf("logical message %+v, pglogrepl %+v", m, x)
		}
	}
	return nil
}

// sameTime compares times where pglogrepl's arithmetic holds: it overflows for
// what lies more than 292 years from 1970.
func sameTime(got, want time.Time) bool {
	return got.Year() < 1680 || got.Year() > 2260 || got.Equal(want)
}

func relation(got *decode.Relation, want *pglogrepl.RelationMessage) error {
	schema := want.Namespace
	if schema == "" {
		schema = "pg_catalog"
	}
	if got.ID != want.RelationID || got.Schema != schema || got.Name != want.RelationName || byte(got.Identity) != want.ReplicaIdentity || len(got.Columns) != len(want.Columns) {
		return fmt.Errorf("relation %+v, pglogrepl %+v", got, want)
	}
	for i, c := range want.Columns {
		g := got.Columns[i]
		if g.Name != c.Name || g.TypeOID != c.DataType || g.TypeModifier != c.TypeModifier || g.Key != (c.Flags&1 == 1) {
			return fmt.Errorf("column %+v, pglogrepl %+v", g, c)
		}
	}
	return nil
}

func tuple(rel *decode.Relation, got []decode.Value, want *pglogrepl.TupleData, keyOnly bool) error {
	if want == nil {
		if got != nil {
			return fmt.Errorf("a row that pglogrepl does not see: %v", got)
		}
		return nil
	}
	if len(got) != len(want.Columns) {
		return fmt.Errorf("%d columns, pglogrepl %d", len(got), len(want.Columns))
	}
	for i, c := range want.Columns {
		v := got[i]
		if keyOnly && !rel.Columns[i].Key {
			if v.State != decode.Absent {
				return fmt.Errorf("column %d outside the key is %v", i, v.State)
			}
			continue
		}
		state := map[uint8]decode.State{'n': decode.Null, 'u': decode.Unchanged, 't': decode.Set}[c.DataType]
		text := string(v.Bytes)
		switch v.Kind {
		case decode.Hex:
			text = `\x` + text
		case decode.Bool:
			text = text[:1]
		default: // as it stands
		}
		if v.State != state || state == decode.Set && text != string(c.Data) {
			return fmt.Errorf("column %d: state %v %q, pglogrepl %q %q", i, v.State, text, c.DataType, c.Data)
		}
	}
	return nil
}

// Save writes the messages of one session, one a line in hexadecimal.
func Save(path string, messages [][]byte) error {
	var b bytes.Buffer
	for _, m := range messages {
		b.WriteString(hex.EncodeToString(m) + "\n")
	}
	return os.WriteFile(path, b.Bytes(), 0o600)
}

// Sessions reads the sessions of a folder by name.
func Sessions(dir string) (map[string][][]byte, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.hex"))
	if err != nil {
		return nil, err
	}
	sessions := make(map[string][][]byte, len(files))
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		lines := bufio.NewScanner(bytes.NewReader(raw))
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			msg, err := hex.DecodeString(lines.Text())
			if err != nil {
				return nil, fmt.Errorf("%s: %w", f, err)
			}
			sessions[filepath.Base(f)] = append(sessions[filepath.Base(f)], msg)
		}
	}
	return sessions, nil
}
