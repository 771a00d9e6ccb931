package wal

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"holdfast/internal/decode"
)

func TestOtherNode(t *testing.T) {
	t.Parallel()
	primary, standby := node{started: "1", streams: true}, node{standby: true, started: "2", streams: true}
	for _, c := range []struct {
		name     string
		was, now node
		other    bool
	}{
		{"itself", primary, primary, false},
		{"a standby in place of the primary", primary, standby, true},
		{"the primary in place of the standby", standby, primary, true},
		{"another primary", primary, node{started: "3"}, true},
		{"another standby", standby, node{standby: true, started: "3"}, true},
		{"promoted under its stream", standby, node{started: "2"}, false},
		{"restarted, and nothing streams", node{started: "3"}, primary, false},
		{"a standby, and nothing streams", node{started: "3"}, standby, true},
		{"promoted, and nothing streams", node{standby: true, started: "2"}, node{started: "2"}, false},
	} {
		err := c.was.other(c.now)
		if (err != nil) != c.other {
			t.Errorf("%s: %v", c.name, err)
		}
		if refused := (*decode.Refusal)(nil); errors.As(err, &refused) {
			t.Errorf("%s is refused: %v", c.name, err)
		}
	}
}

func TestHostsNote(t *testing.T) {
	t.Parallel()
	for dsn, noted := range map[string]bool{
		"postgres://u@a:1/d?sslmode=prefer":                                  false,
		"postgres://u@a:1,b:1/d?sslmode=prefer":                              true,
		"postgres://u@a:1,a:2/d?sslmode=disable":                             true,
		"postgres://u@a:1,b:1/d?sslmode=prefer&target_session_attrs=any":     true,
		"postgres://u@a:1,b:1/d?sslmode=prefer&target_session_attrs=primary": false,
	} {
		cfg, err := pgconn.ParseConfig(dsn)
		if err != nil {
			t.Fatal(err)
		}
		if got := hostsNote(cfg); (got != "") != noted {
			t.Errorf("%s: %q", dsn, got)
		}
	}
}
