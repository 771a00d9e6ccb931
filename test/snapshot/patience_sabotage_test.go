//go:build sabotage

package snapshot_test

import "time"

// patience is what a wrong build gets, which is expected to fail.
const patience = 40 * time.Second
