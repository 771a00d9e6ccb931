package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strings"
)

// redacted is what every way of printing a Secret gives.
const redacted = "[redacted]"

// maxSecretBytes bounds what is read from a secret's file.
const maxSecretBytes = 64 << 10

// Secret is a value that no print, log, page or error may show: all its
// printing methods give "[redacted]", whether it is set or not. The zero value
// is a secret that is not set. It may be copied, and used by many goroutines
// at once.
type Secret struct {
	// read gives the value. It is a closure and not a string because printers
	// that use reflection (fmt on a struct with an unexported field of type
	// Secret) do not call the methods below; of a func they show an address.
	read func() (string, error)
}

// NewSecret makes a secret of a value that is already at hand.
func NewSecret(value string) Secret {
	return Secret{read: func() (string, error) { return value, nil }}
}

// fileSecret makes a secret that is read from a file, each time it is asked
// for. name is the variable that named the file.
func fileSecret(name, path string) Secret {
	return Secret{read: func() (string, error) {
		value, err := readSecretFile(path)
		if err != nil {
			return "", fmt.Errorf("read the secret again: %s names a file that %w", name, err)
		}
		return value, nil
	}}
}

// IsSet tells whether there is a value to ask for.
func (s Secret) IsSet() bool { return s.read != nil }

// Value gives the secret itself, "" when it is not set. A secret from a file
// is read from it again by every call, so a rotated one takes effect at the
// next connect; the error then names the variable and carries neither path nor
// content.
func (s Secret) Value() (string, error) {
	if s.read == nil {
		return "", nil
	}
	return s.read()
}

// UnmarshalText takes the value from an environment variable.
func (s *Secret) UnmarshalText(text []byte) error {
	*s = NewSecret(string(text))
	return nil
}

// String hides the value.
func (Secret) String() string { return redacted }

// GoString hides the value from %#v.
func (Secret) GoString() string { return redacted }

// Format hides the value from every verb, %x and %d too.
func (Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, redacted) }

// LogValue hides the value from slog.
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalJSON hides the value.
func (Secret) MarshalJSON() ([]byte, error) { return []byte(`"` + redacted + `"`), nil }

// MarshalText hides the value from encoders that know no other method.
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// readSecretFile reads a secret and cuts the one line break that editors and
// echo leave at the end. Its errors continue a sentence about the file. The
// path stays out of them: a common mistake is to put the secret itself where
// its file's name belongs.
func readSecretFile(path string) (value string, err error) {
	f, err := os.Open(path) //nolint:gosec // the operator names the file
	if err != nil {
		return "", fmt.Errorf("cannot be opened (%w)", withoutPath(err))
	}
	defer func() { _ = f.Close() }() // read only: nothing can be lost
	raw, err := io.ReadAll(io.LimitReader(f, maxSecretBytes+1))
	if err != nil {
		return "", fmt.Errorf("cannot be read (%w)", withoutPath(err))
	}
	if len(raw) > maxSecretBytes {
		return "", wrong("is larger than %s", Size(maxSecretBytes))
	}
	value = strings.TrimSuffix(strings.TrimSuffix(string(raw), "\n"), "\r")
	if value == "" {
		return "", wrong("is empty")
	}
	return value, nil
}

// withoutPath keeps the cause of a file error and drops the path.
func withoutPath(err error) error {
	if pathErr, ok := errors.AsType[*fs.PathError](err); ok {
		return pathErr.Err
	}
	return err
}
