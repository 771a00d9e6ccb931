package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
)

// A recording is a folder: manifest.json and the files it names, each a list of
// JSON values, one a line.
const (
	manifestFile  = "manifest.json"
	streamFile    = "pgoutput.jsonl"  // message
	catalogueFile = "catalogue.jsonl" // answer
	recordsFile   = "records.jsonl"   // tapeRecord
	programFile   = "program.sql"     // the Feldera tables, for the simulator

	tapeVersion = 1
	// maxLine bounds one line of a file, and so one message: a third is Base64.
	maxLine     = 96 << 20
	maxManifest = 1 << 20
)

// manifest says what was recorded. It is written last: without it there is no
// recording.
type manifest struct {
	Version  int               `json:"version"`
	Postgres *postgresPart     `json:"postgres,omitempty"`
	Kafka    *kafkaPart        `json:"kafka,omitempty"`
	SHA256   map[string]string `json:"sha256"` // by file
}

// postgresPart is the stretch of one slot.
type postgresPart struct {
	Slot        string            `json:"slot"`
	Publication string            `json:"publication"`
	Tables      string            `json:"tables"` // PGSOURCE_TABLES
	Database    string            `json:"database"`
	User        string            `json:"user"`
	From        lsn               `json:"from"` // where the slot stood
	To          lsn               `json:"to"`   // end of the last transaction
	Commits     int               `json:"commits"`
	Parameters  map[string]string `json:"parameters"` // what the server says of itself at the connect
}

// kafkaPart is what was read of topics.
type kafkaPart struct {
	Topics  map[string]int32 `json:"topics"` // partitions
	Records int              `json:"records"`
}

// message is one pgoutput message with its position.
type message struct {
	LSN  lsn    `json:"lsn"`
	Data []byte `json:"data"`
}

// tapeRecord is one record of a topic.
type tapeRecord struct {
	Topic     string   `json:"topic"`
	Partition int32    `json:"partition"`
	Offset    int64    `json:"offset"`
	Time      int64    `json:"time_ms"`
	Key       []byte   `json:"key"`
	Value     []byte   `json:"value"` // null is a tombstone
	Headers   []header `json:"headers,omitempty"`
}

type header struct {
	Key   string `json:"key"`
	Value []byte `json:"value"`
}

// errFull says that what comes next does not fit into the limit.
var errFull = errors.New("the limit of the recording is reached")

// tapeWriter writes one file and its checksum.
type tapeWriter struct {
	file *os.File
	out  *bufio.Writer
	sum  hash.Hash
	name string
	left int64
}

// newTapeWriter makes a file that is not there yet: a recording is never mixed
// with another.
func newTapeWriter(dir, name string, limit int64) (*tapeWriter, error) {
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a recording: %w", err)
	}
	w := &tapeWriter{file: f, sum: sha256.New(), name: name, left: limit}
	w.out = bufio.NewWriterSize(io.MultiWriter(f, w.sum), 1<<20)
	return w, nil
}

// write adds all of lines, or nothing and [errFull].
func (w *tapeWriter) write(lines ...[]byte) error {
	size := int64(0)
	for _, l := range lines {
		if len(l) > maxLine {
			return fmt.Errorf("%s: one line has %d bytes: %w", w.name, len(l), errFull)
		}
		size += int64(len(l)) + 1
	}
	if size > w.left {
		return errFull
	}
	w.left -= size
	for _, l := range lines {
		if _, err := w.out.Write(append(l, '\n')); err != nil {
			return fmt.Errorf("write %s: %w", w.name, err)
		}
	}
	return nil
}

// finish makes the file durable and notes its checksum.
func (w *tapeWriter) finish(m *manifest) error {
	if err := errors.Join(w.out.Flush(), w.file.Sync(), w.file.Close()); err != nil {
		return fmt.Errorf("write %s: %w", w.name, err)
	}
	m.SHA256[w.name] = hex.EncodeToString(w.sum.Sum(nil))
	return nil
}

// abandon closes a file that is not to be finished.
func (w *tapeWriter) abandon() { _ = w.file.Close() } // it is no recording without its manifest

func jsonLine(v any) ([]byte, error) {
	line, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("write a line: %w", err)
	}
	return line, nil
}

func (m *manifest) save(dir string) error {
	text, err := json.MarshalIndent(m, "", "  ")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, manifestFile), append(text, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", manifestFile, err)
	}
	return nil
}

// loadManifest reads the manifest and holds every file against its checksum.
func loadManifest(dir string) (*manifest, error) {
	f, err := os.Open(filepath.Join(dir, manifestFile))
	if err != nil {
		return nil, fmt.Errorf("open the recording (record one first): %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxManifest))
	_ = f.Close() // it was only read
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", manifestFile, err)
	}
	var m manifest
	if err := json.Unmarshal(text, &m); err != nil {
		return nil, fmt.Errorf("read %s: %w", manifestFile, err)
	}
	if m.Version != tapeVersion {
		return nil, fmt.Errorf("%s is of version %d, this reads version %d: record anew", manifestFile, m.Version, tapeVersion)
	}
	if m.Postgres == nil && m.Kafka == nil {
		return nil, fmt.Errorf("%s names no source", manifestFile)
	}
	for name, want := range m.SHA256 {
		if filepath.Base(name) != name {
			return nil, fmt.Errorf("%s names %q, which is no file of the folder", manifestFile, name)
		}
		got, err := fileSum(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		if got != want {
			return nil, fmt.Errorf("%s is not what was recorded: its SHA-256 is %s, want %s: record anew", name, got, want)
		}
	}
	return &m, nil
}

func fileSum(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("open the recording: %w", err)
	}
	defer func() { _ = f.Close() }() // it is only read
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", fmt.Errorf("read the recording: %w", err)
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// readLines hands every line of a file of the recording to fn, decoded. The file
// must be one whose checksum the manifest has.
func readLines[T any](dir string, m *manifest, name string, fn func(T) error) error {
	if m.SHA256[name] == "" {
		return fmt.Errorf("%s has no checksum of %s", manifestFile, name)
	}
	f, err := os.Open(filepath.Join(dir, name))
	if err != nil {
		return fmt.Errorf("open the recording: %w", err)
	}
	defer func() { _ = f.Close() }() // it is only read
	in := bufio.NewScanner(f)
	in.Buffer(make([]byte, 1<<16), maxLine+1)
	for n := 1; in.Scan(); n++ {
		var v T
		d := json.NewDecoder(bytes.NewReader(in.Bytes()))
		d.DisallowUnknownFields()
		if err := d.Decode(&v); err != nil {
			return fmt.Errorf("%s line %d: %w", name, n, err)
		}
		if err := fn(v); err != nil {
			return fmt.Errorf("%s line %d: %w", name, n, err)
		}
	}
	if err := in.Err(); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	return nil
}
