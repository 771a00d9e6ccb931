package decode

import (
	"go/build"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestImports holds that decoding does no I/O: no driver, no network, no
// files, and nothing of this module, since everything of it imports decode.
func TestImports(t *testing.T) {
	t.Parallel()
	pkg, err := build.ImportDir(".", 0)
	if err != nil {
		t.Fatal(err)
	}
	drivers := []string{"net", "os", "syscall", "database/sql", "github.com/jackc", "github.com/twmb/franz-go", "holdfast"}
	for _, imported := range pkg.Imports {
		if slices.ContainsFunc(drivers, func(d string) bool { return imported == d || strings.HasPrefix(imported, d+"/") }) {
			t.Errorf("imports %q", imported)
		}
	}
}
