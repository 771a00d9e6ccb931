//go:build !linux

package wal

import "time"

// setUserTimeout does nothing: this system has no such bound for one
// connection. Silence on the wire is still noticed by the reader.
func setUserTimeout(uintptr, time.Duration) error { return nil }
