//go:build !sabotage

package sabotage

// On tells whether a rule is broken. In this build none is.
func On(Wrong) bool { return false }
