//go:build sabotage

package sabotage

import "os"

// broken is read once: a process breaks one rule for all of its life.
var broken = Wrong(os.Getenv("SABOTAGE"))

// On tells whether a rule is broken.
func On(w Wrong) bool { return w == broken }
