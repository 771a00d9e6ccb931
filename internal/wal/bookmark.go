package wal

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"holdfast/internal/decode"
)

// State is what pgsource remembers beyond its own life: the bookmark, whose it
// is, and under which incarnation of the pipeline it was proven.
//
// Its first purpose is a proof. Acknowledged is durable before the server is
// told of it, so a slot whose confirmed_flush_lsn is above it was moved or made
// anew by somebody else, and what lies between is missing from the stream.
//
// A State is a value: what a store is given or gives is not changed afterwards.
type State struct {
	// Sequence counts the saves; it tells two writers apart.
	Sequence uint64 `json:"sequence"`

	// What the positions are positions of. LSNs of another cluster, or of
	// another timeline, look the same and mean something else.
	System      string `json:"system_identifier"`
	Timeline    uint32 `json:"timeline"`
	Database    string `json:"database"`
	Slot        string `json:"slot"`
	Publication string `json:"publication"`

	// Acknowledged is the bookmark: nothing above it was told to the server.
	Acknowledged LSN `json:"acknowledged_lsn"`
	// Rows is the last acknowledged position that brought rows; 0 when none
	// did since the slot was made. What was before an adopted slot is not
	// known, so its position counts as one that did.
	Rows LSN `json:"rows_lsn"`
	// Sent bounds what was sent to the pipeline: no row above it was. It runs
	// ahead of what was sent, in steps of sentStep.
	Sent LSN `json:"sent_lsn"`

	// Incarnation is the pipeline's process that proved the positions, "" when
	// none has yet.
	Incarnation string `json:"incarnation"`
	// Intent is the Feldera transaction that is, or was about to be, open.
	Intent *storedIntent `json:"transaction_intent,omitzero"`
	// Progress is what is known of the progress table; nil where it is not used.
	Progress *storedProgress `json:"progress,omitzero"`
	// Notices are what no person has said yet to have looked after, oldest
	// first, at most maxNotices.
	Notices []Notice `json:"notices,omitzero"`
	// Differing are the tables whose rows are known to differ from the source's,
	// each once, until a resync has read it or a person has accepted it.
	Differing []DifferingTable `json:"differing,omitzero"`
	// Refused is the transaction that ended the last run, Skip the one that a
	// person has decided to pass over. Both are forgotten when the bookmark has
	// passed them.
	Refused *RefusedTransaction `json:"refused,omitzero"`
	Skip    *SkippedTransaction `json:"skip,omitzero"`
	// Snapshot is what is known of copies of existing rows, and how far they have
	// got; nil in a state of a version that made none.
	Snapshot *snapshotState `json:"snapshot,omitzero"`

	// Resyncs are those that are not done, in their order.
	Resyncs []resyncState `json:"resyncs,omitzero"`
	// Events counts notices, differing tables and beginnings of resyncs: which of
	// two was first is told by their numbers, since a clock can be put back between
	// them.
	Events uint64 `json:"events,omitzero"`

	Saved  time.Time `json:"saved_at"`
	Writer string    `json:"writer"` // process that saved it, for people
}

// storedIntent is an Intent as it is recorded.
type storedIntent struct {
	Incarnation string `json:"incarnation"`
	ID          int64  `json:"id"`
	Through     LSN    `json:"through_lsn"`
}

// Notice is something that may have made the destination differ from the
// source. It is shown until a person has accepted it.
type Notice struct {
	Kind NoticeKind `json:"kind"`
	// Was and Now are the two incarnations, or the two timelines.
	Was string `json:"was"`
	Now string `json:"now"`
	// From and To bound what is in doubt: From excluded, To included.
	From LSN `json:"from_lsn"`
	To   LSN `json:"to_lsn"`
	// Noticed is for people. Order is the notice's number among State.Events: 0 in
	// one of a version that did not count, which is before all that do.
	Noticed time.Time `json:"noticed_at"`
	Order   uint64    `json:"order,omitzero"`
	// Tables are those, as schema.table, that may lack rows and were not read
	// again since: see State.NeedsResync.
	Tables []string `json:"tables,omitzero"`
}

// NoticeKind is what a Notice is about.
type NoticeKind string

// The kinds of notices.
const (
	// NoticeIncarnation: the pipeline came back as another process. Rows that
	// were acknowledged up to To may be missing from it.
	NoticeIncarnation NoticeKind = "incarnation"
	// NoticeLoss: by the progress table, the pipeline does not hold acknowledged
	// rows between From and To.
	NoticeLoss NoticeKind = "loss"
	// NoticeTimeline: a standby was promoted at From, and rows up to To may
	// have been sent that it never had.
	NoticeTimeline NoticeKind = "timeline"
)

// maxNotices bounds the notices; of more, the oldest and the newest are kept,
// and every table that is at risk.
const maxNotices = 16

// event numbers what happens now.
func (st *State) event() uint64 {
	st.Events++
	return st.Events
}

// notice adds n.
func (st *State) notice(n Notice) {
	n.Order = st.event()
	list := slices.Clone(st.Notices)
	if len(list) == maxNotices {
		list = withoutOne(list, &n)
	}
	st.Notices = append(list, n)
}

// withoutOne makes room for n. A notice that goes leaves the tables that it says
// are at risk to a later one, since nobody would know of them any more.
func withoutOne(list []Notice, n *Notice) []Notice {
	last := len(list) - 1
	if !list[last].atRisk() {
		return list[:last]
	}
	heir := n
	if !n.atRisk() {
		for i := last - 1; i >= 0; i-- {
			if !list[i].atRisk() {
				return slices.Delete(list, i, i+1)
			}
		}
		heir = &list[last-1]
		heir.Order, heir.Noticed = list[last].Order, list[last].Noticed
	}
	heir.Tables = slices.Compact(slices.Sorted(slices.Values(slices.Concat(heir.Tables, list[last].Tables))))
	return list[:last]
}

// StateStore keeps one State. Its methods are called by one goroutine at a
// time. Errors that are no *decode.Refusal are worth another attempt.
type StateStore interface {
	// Acquire takes the store for this process alone. A second process is
	// refused, by name where it can be known.
	Acquire(ctx context.Context) error
	// Load gives the state, nil where there is none. What cannot be trusted is
	// refused and never guessed.
	Load(ctx context.Context) (*State, error)
	// Save makes the state durable before it returns. After an error it may
	// or may not be durable.
	Save(ctx context.Context, st *State) error
	// Check looks whether the store can be used, without taking it or changing
	// anything.
	Check(ctx context.Context) error
	// Release gives the store back.
	Release(ctx context.Context) error
	// Where names the store for people: never with a secret.
	Where() string
	// Pace is the least time between two saves: that of positions that brought
	// rows, and of positions that did not.
	Pace() (rows, idle time.Duration)
}

// LSN is a position in the write-ahead log, in Postgres' own notation in text.
type LSN uint64

// String gives the notation of Postgres, such as 16/B374D848.
func (l LSN) String() string { return decode.FormatLSN(uint64(l)) }

// MarshalText gives String.
func (l LSN) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText reads what MarshalText gives, and nothing else.
func (l *LSN) UnmarshalText(text []byte) error {
	high, low, ok := strings.Cut(string(text), "/")
	h, errHigh := strconv.ParseUint(high, 16, 32)
	w, errLow := strconv.ParseUint(low, 16, 32)
	lsn := LSN(h<<32 | w)
	if !ok || errHigh != nil || errLow != nil || lsn.String() != string(text) {
		return errors.New("an LSN is not of the form 16/B374D848")
	}
	*l = lsn
	return nil
}

const (
	stateFormat  = "holdfast-pgsource-state"
	stateVersion = 1
	// maxStateBytes bounds what is written to a store and read of it. A state has
	// a few hundred bytes, some hundred more for each table, and about 15 for each
	// of its columns and partitions; what can make it large are the keys of copies
	// (maxJobsBytes, before JSON) and the tables that the notices name.
	maxStateBytes = 64 << 20
	// maxStateText bounds each name in it.
	maxStateText = 256
)

// envelope is a state as it is stored: the checksum is that of the record's
// bytes as they stand.
type envelope struct {
	Format   string         `json:"format"`
	Version  int            `json:"version"`
	Checksum string         `json:"checksum"`
	Record   jsontext.Value `json:"record"`
}

// encodeState gives the bytes to store.
func encodeState(st *State) ([]byte, error) {
	record, err := json.Marshal(st)
	if err != nil {
		return nil, fmt.Errorf("encode the state: %w", err)
	}
	b, err := json.Marshal(envelope{Format: stateFormat, Version: stateVersion, Checksum: checksum(record), Record: record})
	if err != nil {
		return nil, fmt.Errorf("encode the state: %w", err)
	}
	if len(b) >= maxStateBytes {
		return nil, fmt.Errorf("the state has %d bytes, and more than %d are not read again: map fewer tables", len(b), maxStateBytes)
	}
	return append(b, '\n'), nil
}

func checksum(record []byte) string {
	sum := sha256.Sum256(record)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// errStateUnreadable marks what decodeState refuses.
var errStateUnreadable = errors.New("unreadable")

func unreadable(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{errStateUnreadable}, args...)...)
}

// decodeState reads what encodeState gave. Everything else is an error that
// says in what way, without repeating what was found.
func decodeState(b []byte) (*State, error) {
	switch {
	case len(bytes.TrimSpace(b)) == 0:
		return nil, unreadable("it is empty")
	case len(b) > maxStateBytes:
		return nil, unreadable("it is larger than %d bytes", maxStateBytes)
	}
	var e envelope
	if err := json.Unmarshal(b, &e); err != nil {
		return nil, unreadable("it is cut off, damaged or no JSON")
	}
	switch {
	case e.Format != stateFormat:
		return nil, unreadable("it is not a state of pgsource")
	case e.Version > stateVersion:
		return nil, unreadable("it was written by a newer pgsource (version %d, this program reads up to %d)", e.Version, stateVersion)
	case e.Version < 1:
		return nil, unreadable("it has version %d", e.Version)
	case e.Checksum != checksum(e.Record):
		return nil, unreadable("its checksum does not fit: it was damaged or changed by hand")
	}
	st := new(State)
	if err := json.Unmarshal(e.Record, st, json.RejectUnknownMembers(true)); err != nil {
		return nil, unreadable("its record cannot be read: %v", err)
	}
	if err := st.valid(); err != nil {
		return nil, unreadable("%v", err)
	}
	return st, nil
}

// valid refuses a state that this program would not have written.
func (st *State) valid() error {
	for _, text := range []string{st.System, st.Database, st.Slot, st.Publication, st.Incarnation, st.Writer} {
		if len(text) > maxStateText {
			return errors.New("a name in it is too long")
		}
	}
	switch {
	case st.System == "" || st.Timeline == 0 || st.Slot == "":
		return errors.New("it does not say which slot of which cluster it is about")
	case st.Rows > st.Acknowledged:
		return fmt.Errorf("rows_lsn %s is above acknowledged_lsn %s", st.Rows, st.Acknowledged)
	case len(st.Notices) > maxNotices:
		return fmt.Errorf("it has %d notices", len(st.Notices))
	case len(st.Resyncs) > maxStateResyncs:
		return fmt.Errorf("it has %d resyncs", len(st.Resyncs))
	}
	return st.Snapshot.valid()
}

// errGoesBack marks a bookmark below the one before.
var errGoesBack = errors.New("broken invariant: the bookmark would go back")

// follows tells whether next may be saved over st. A bookmark never goes back:
// the server may have been told of it.
func (st *State) follows(next *State) error {
	if next.Acknowledged < st.Acknowledged {
		return fmt.Errorf("%w from %s to %s", errGoesBack, st.Acknowledged, next.Acknowledged)
	}
	return nil
}

// clone gives a copy that shares nothing that is changed.
func (st *State) clone() *State {
	next := *st
	return &next
}

// refuseState says that what a store holds cannot be used.
func refuseState(where string, cause error) error {
	return &decode.Refusal{
		Reason: decode.ReasonMalformed, What: "state", Where: where, Why: strings.TrimPrefix(cause.Error(), errStateUnreadable.Error()+": "),
		Expected: "what pgsource wrote last: without it nobody can tell whether the slot was moved meanwhile",
		Do:       "restore it from a copy; or go on from the slot's present position: " + wayBack,
		Err:      errStateUnreadable,
	}
}

// noStore is the store for PGSOURCE_STATE=none: it remembers within the
// process, which is what the source needs anyway, and forgets with it.
type noStore struct{}

func (noStore) Acquire(context.Context) error        { return nil }
func (noStore) Load(context.Context) (*State, error) { return nil, nil } //nolint:nilnil // absence is the answer
func (noStore) Save(context.Context, *State) error   { return nil }
func (noStore) Check(context.Context) error          { return nil }
func (noStore) Release(context.Context) error        { return nil }
func (noStore) Where() string                        { return "none" }
func (noStore) Pace() (rows, idle time.Duration)     { return 0, 0 }
