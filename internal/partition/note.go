package partition

import (
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/go-json-experiment/json"

	"holdfast/internal/feldera"
)

// maxNote bounds the metadata that is committed with an offset, in bytes. The
// brokers' own default limit is 4096.
const maxNote = 512

// noteVersion is the version of the note's layout.
const noteVersion = 1

// note is what is committed beside an offset: what the next owner of the
// partition needs to know and the offset alone cannot tell.
type note struct {
	V int `json:"v"`
	// Offset repeats the offset it was committed with. A note whose offset is
	// another one belongs to a commit that was since replaced, by a tool that
	// kept the metadata, and says nothing.
	Offset int64 `json:"offset"`
	// TopicID in hexadecimal: the same name may be another topic by now.
	TopicID string `json:"topic_id,omitempty"`
	// Incarnation of the pipeline that completed the rows below Offset.
	Incarnation string `json:"incarnation,omitempty"`
	// Epoch is raised by one by each owner.
	Epoch int64 `json:"epoch"`
	// Owner is the session that wrote the note. Every owner writes one before
	// it sends anything, so the session that finds its own knows that nobody
	// else has sent since.
	Owner string `json:"owner,omitempty"`
	// Clean: nothing that was sent was without an outcome.
	Clean bool `json:"clean"`
	// Time is the timestamp of the last record below Offset, in milliseconds;
	// 0 if unknown.
	Time int64 `json:"time,omitempty"`
	// Rows is the offset behind the last record below Offset that gave a row;
	// 0 if none did, or it is not known. Skipped and dead-lettered records,
	// tombstones without effect and markers move Offset and not this.
	Rows int64 `json:"rows,omitempty"`
	// Row names the progress row that was completed for Rows; nil where nothing
	// is remembered of progress rows.
	Row *noteRow `json:"row,omitempty"`
	// Begin is where the group began to deliver the partition, where that is not
	// the log's start: a loss of the pipeline is not healed behind it.
	Begin int64 `json:"begin,omitempty"`
	// GoneFrom and GoneTo bound the offsets that the pipeline lost when retention
	// had taken them, GoneTo excluded. They stay until the offset is set by a
	// person.
	GoneFrom int64 `json:"gone_from,omitempty"`
	GoneTo   int64 `json:"gone_to,omitempty"`
}

// noteRow names a progress row.
type noteRow struct {
	Epoch       int64  `json:"epoch"`
	Incarnation string `json:"incarnation"`
}

// noTopicID is the id of topics on brokers that have none.
var noTopicID [16]byte

func topicIDText(id [16]byte) string {
	if id == noTopicID {
		return ""
	}
	return hex.EncodeToString(id[:])
}

// encode gives the metadata. An incarnation too long for the limit is left
// out rather than cut: half of one would compare unequal to the whole.
func (n note) encode() string {
	n.V = noteVersion
	b, err := json.Marshal(n)
	if err == nil && len(b) > maxNote {
		n.Incarnation = ""
		b, err = json.Marshal(n)
	}
	if err == nil && len(b) > maxNote && n.Row != nil {
		n.Row = &noteRow{} // it names none, so that more is sent again
		b, err = json.Marshal(n)
	}
	if err != nil || len(b) > maxNote {
		return ""
	}
	return string(b)
}

func (n note) time() time.Time {
	if n.Time <= 0 {
		return time.Time{}
	}
	return time.UnixMilli(n.Time)
}

// completed says in noted which progress row was completed, where the note
// names one.
func (n *note) completed(noted *feldera.Noted) {
	if r := n.Row; r != nil {
		noted.Known, noted.Produced = true, uint64(n.Rows) //nolint:gosec // parseNote refuses a negative one
		noted.RowEpoch, noted.RowIncarnation = r.Epoch, r.Incarnation
	}
}

// errMoved marks a note of this program beside an offset that somebody else has
// set.
var errMoved = errors.New("not beside its offset")

// parseNote reads metadata that was committed with offset. Metadata of other
// programs is normal, so an error is only a reason to do without.
func parseNote(metadata string, offset int64) (note, error) {
	if metadata == "" {
		return note{}, fmt.Errorf("no note was committed with offset %d", offset)
	}
	if len(metadata) > maxNote {
		return note{}, fmt.Errorf("the metadata committed with offset %d has %d bytes, more than a note's %d", offset, len(metadata), maxNote)
	}
	var n note
	if err := json.Unmarshal([]byte(metadata), &n); err != nil {
		return note{}, fmt.Errorf("the metadata committed with offset %d is not a note of this program", offset)
	}
	switch {
	case n.V != noteVersion:
		return note{}, fmt.Errorf("the note committed with offset %d has version %d, expected %d", offset, n.V, noteVersion)
	case n.Offset != offset:
		return note{}, fmt.Errorf("%w: the note committed with offset %d speaks of offset %d: the offset was changed since", errMoved, offset, n.Offset)
	case n.Rows < 0 || n.Rows > n.Offset:
		return note{}, fmt.Errorf("the note committed with offset %d has its last row at %d", offset, n.Rows-1)
	case n.Epoch < 0:
		return note{}, fmt.Errorf("the note committed with offset %d has the negative epoch %d", offset, n.Epoch)
	}
	if r := n.Row; r != nil && (r.Epoch < 0 || r.Epoch > n.Epoch) {
		return note{}, fmt.Errorf("the note committed with offset %d names a progress row of epoch %d", offset, r.Epoch)
	}
	if n.Begin < 0 || n.GoneFrom < 0 || n.GoneTo < n.GoneFrom {
		return note{}, fmt.Errorf("the note committed with offset %d has impossible bounds", offset)
	}
	if n.TopicID != "" {
		if id, err := hex.DecodeString(n.TopicID); err != nil || len(id) != 16 {
			return note{}, fmt.Errorf("the note committed with offset %d has no valid topic id", offset)
		}
	}
	return n, nil
}
