package lane

import (
	"go/build"
	"slices"
	"testing"
)

// TestImports holds that this package decides and does no I/O itself.
func TestImports(t *testing.T) {
	pkg, err := build.ImportDir(".", 0)
	if err != nil {
		t.Fatal(err)
	}
	allowed := []string{"errors", "fmt", "sync", "time", "holdfast/internal/ack", "holdfast/internal/decode"}
	for _, imported := range pkg.Imports {
		if !slices.Contains(allowed, imported) {
			t.Errorf("imports %q; the lane knows %q and nothing else", imported, allowed)
		}
	}
}
