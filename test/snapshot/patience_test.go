//go:build !sabotage

package snapshot_test

import "time"

// patience bounds each wait for something that must happen. It is far above
// what anything takes, and is only spent by a failure.
const patience = 4 * time.Minute
