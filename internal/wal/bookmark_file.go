package wal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"

	"holdfast/internal/decode"
	"holdfast/internal/sabotage"
)

// filePace bounds what fsync costs: a save takes some milliseconds on a disk.
const filePace = 100 * time.Millisecond

// FileStore keeps a State in a file: written beside it, made durable, renamed
// over it, and the folder made durable too. Whatever instant a crash picks,
// the file holds the old state or the new one, and a state that Save has
// returned from is there after a power cut.
//
// One process at a time holds the lock on path + ".lock", which the kernel
// gives back when it dies. That file stays where it is: to remove it would let
// a process that has it open hold a lock that nobody else sees.
type FileStore struct {
	path string
	lock *os.File
	// last is what the file holds as far as we know, nil when it is not there.
	last []byte
	// step is called between the steps of a save; tests let it crash there.
	step func(name string) error
	// sync makes a file or a folder durable; tests see whether it is called.
	sync func(*os.File) error
}

// NewFileStore makes a store in the file with that absolute path.
func NewFileStore(path string) *FileStore {
	return &FileStore{path: path, step: func(string) error { return nil }, sync: durably}
}

// Where gives file: and the path.
func (f *FileStore) Where() string { return "file:" + f.path }

// Pace is the same for both kinds of positions.
func (f *FileStore) Pace() (rows, idle time.Duration) { return filePace, filePace }

// Acquire takes the lock.
func (f *FileStore) Acquire(context.Context) error {
	if f.lock != nil {
		return nil
	}
	lock, err := os.OpenFile(f.path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return f.noFolder()
	case err != nil:
		return fmt.Errorf("open the lock of the state: %w", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return errors.Join(fmt.Errorf("lock the state: %w", err), lock.Close())
		}
		owner := readOwner(lock)
		_ = lock.Close()
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "state", Where: f.Where(), Why: "another process holds it: " + owner,
			Expected: "one pgsource for one state",
			Do:       "stop the other one, or give this one a PGSOURCE_STATE (and a PGSOURCE_SLOT) of its own",
		}
	}
	// Only for the message to the next one: the lock is the kernel's.
	if err := lock.Truncate(0); err == nil {
		_, _ = lock.WriteAt([]byte(thisProcess()), 0)
	}
	f.lock = lock
	return nil
}

// maxOwner bounds what is shown of a lock file.
const maxOwner = 200

func readOwner(lock io.ReaderAt) string {
	b := make([]byte, maxOwner)
	n, _ := lock.ReadAt(b, 0) // nothing to read is an answer too
	text := strings.Map(func(c rune) rune {
		if unicode.IsControl(c) {
			return ' '
		}
		return c
	}, strings.ToValidUTF8(string(b[:n]), "?"))
	if strings.TrimSpace(text) == "" {
		return "it has not said which"
	}
	return text
}

// thisProcess names this process to a person who meets its lock.
var thisProcess = sync.OnceValue(func() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("process %d on host %.100s, since %s", os.Getpid(), host, time.Now().UTC().Format(time.RFC3339))
})

// Load reads the file. It needs no lock, since the file is replaced as a whole.
func (f *FileStore) Load(context.Context) (*State, error) {
	b, err := f.read()
	if err != nil || b == nil {
		return nil, err
	}
	f.last = b
	st, err := decodeState(b)
	if err != nil {
		return nil, refuseState(f.Where(), err)
	}
	return st, nil
}

// read gives nil where there is no file.
func (f *FileStore) read() ([]byte, error) {
	file, err := os.Open(f.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the state: %w", err)
	}
	defer func() { _ = file.Close() }() // read only: nothing can be lost
	info, err := file.Stat()
	if err != nil {
		return nil, fmt.Errorf("look at the state: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, refuseState(f.Where(), unreadable("it is no regular file"))
	}
	b, err := io.ReadAll(io.LimitReader(file, maxStateBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read the state: %w", err)
	}
	if b == nil {
		b = []byte{}
	}
	return b, nil
}

// Save replaces the file. It needs the lock.
func (f *FileStore) Save(_ context.Context, st *State) error {
	if f.lock == nil {
		return errors.New("broken invariant: the state is saved without its lock")
	}
	b, err := encodeState(st)
	if err != nil {
		return err
	}
	if err := f.alone(); err != nil {
		return err
	}
	if err := f.replace(b); err != nil {
		return fmt.Errorf("save the state in %s: %w", f.path, err)
	}
	f.last = b
	return nil
}

// alone refuses to write over what somebody else has written: on a file system
// without working locks, two processes would take turns otherwise. A file that
// is gone is written again, since everything it said is still known here.
//
// After a save that failed half-way the file may hold that save or the one
// before: both are ours, and tell their writer.
func (f *FileStore) alone() error {
	b, err := f.read()
	if err != nil || b == nil || string(b) == string(f.last) {
		return err
	}
	there, err := decodeState(b)
	if err == nil && there.Writer == thisProcess() {
		return nil
	}
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "state", Where: f.Where(), Why: "somebody else has changed it while this process held it",
		Expected: "one pgsource for one state", Do: "find the other writer and stop it; a file system without locks cannot keep them apart",
	}
}

func (f *FileStore) replace(b []byte) (err error) {
	if sabotage.On(sabotage.NoSync) {
		f.sync = func(*os.File) error { return nil }
	}
	temp := f.path + ".tmp"
	// A leftover of a crash is written over: nobody else writes here.
	file, err := os.OpenFile(temp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600) //nolint:gosec // the operator names the file
	if err != nil {
		return err
	}
	err = f.fill(file, b)
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	if err := f.step("rename"); err != nil {
		return err
	}
	if err := os.Rename(temp, f.path); err != nil {
		return err
	}
	if err := f.step("sync folder"); err != nil {
		return err
	}
	folder, err := os.Open(filepath.Dir(f.path))
	if err != nil {
		return err
	}
	return errors.Join(f.sync(folder), folder.Close())
}

func durably(file *os.File) error { return file.Sync() }

func (f *FileStore) fill(file *os.File, b []byte) error {
	half := len(b) / 2
	if _, err := file.Write(b[:half]); err != nil {
		return err
	}
	if err := f.step("write"); err != nil {
		return err
	}
	if _, err := file.Write(b[half:]); err != nil {
		return err
	}
	if err := f.step("sync file"); err != nil {
		return err
	}
	return f.sync(file)
}

// Check looks whether the folder is there and may be written to.
func (f *FileStore) Check(context.Context) error {
	folder := filepath.Dir(f.path)
	switch info, err := os.Stat(folder); {
	case errors.Is(err, os.ErrNotExist):
		return f.noFolder()
	case err != nil:
		return fmt.Errorf("look at the folder of the state: %w", err)
	case !info.IsDir():
		return f.noFolder()
	}
	if err := syscall.Access(folder, 0x2); err != nil { // W_OK
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "state", Where: f.Where(), Why: "the folder cannot be written to: " + err.Error(),
			Expected: "a folder that this user may write to", Do: "make it writable, or correct PGSOURCE_STATE", Err: err,
		}
	}
	return nil
}

func (f *FileStore) noFolder() error {
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "state", Where: f.Where(), Why: "there is no folder " + filepath.Dir(f.path),
		Expected: "a folder that keeps its content over a restart; it is not made here, since a volume may not be mounted",
		Do:       "mount the folder, or make it (run: mkdir -p '" + filepath.Dir(f.path) + "'), or correct PGSOURCE_STATE",
	}
}

// Release gives the lock back.
func (f *FileStore) Release(context.Context) error {
	if f.lock == nil {
		return nil
	}
	err := f.lock.Close()
	f.lock = nil
	return err
}
