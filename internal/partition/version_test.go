package partition

import (
	"regexp"
	"testing"

	"pgregory.net/rapid"
)

func TestClientVersion(t *testing.T) {
	t.Parallel()
	if got := clientVersion("(devel)"); got != "devel" {
		t.Errorf("%q", got)
	}
	valid := regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?$`)
	rapid.Check(t, func(t *rapid.T) {
		if got := clientVersion(rapid.String().Draw(t, "version")); !valid.MatchString(got) {
			t.Fatalf("a broker refuses %q", got)
		}
	})
}
