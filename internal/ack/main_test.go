package ack_test

import (
	"go/build"
	"slices"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestImports holds that the rule is decided without I/O and without a clock.
func TestImports(t *testing.T) {
	t.Parallel()
	pkg, err := build.ImportDir(".", 0)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(pkg.Imports, []string{"cmp", "fmt"}) {
		t.Errorf("imports %q", pkg.Imports)
	}
}
