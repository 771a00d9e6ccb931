package harness

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strconv"
	"testing"
	"time"

	"holdfast/internal/decode"
)

// StartStandby makes a standby of this cluster, which must be stopped, and
// starts it; it follows once the cluster is started again. It is a copy of the
// files, replication slots included: what a base backup leaves out, and what
// slot synchronisation of newer servers brings. The caller must Close it.
func (pg *Postgres) StartStandby(ctx context.Context) (*Postgres, error) {
	if pg.proc != nil {
		return nil, errors.New("copy a cluster: it runs")
	}
	ctx, cancel := withDefaultTimeout(ctx, 90*time.Second)
	defer cancel()
	settings := map[string]string{"primary_conninfo": "host=127.0.0.1 port=" + strconv.Itoa(pg.port) + " user=postgres"}
	maps.Copy(settings, pg.opts.Settings)
	standby := &Postgres{
		Version: pg.Version, bin: pg.bin, user: pg.user, log: newLog(),
		opts: PostgresOptions{Settings: settings, Files: map[string][]byte{"standby.signal": nil}},
	}
	var err error
	if standby.dir, err = tempDirFor(standby.user, "hf-pg-"); err != nil {
		return nil, err
	}
	if standby.port, standby.release, err = ReservePort(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(standby.dir))
	}
	if err := standby.prepare(ctx, pg.dir); err != nil {
		return nil, errors.Join(err, standby.Close())
	}
	if err := standby.Start(ctx); err != nil {
		return nil, errors.Join(err, standby.Close())
	}
	return standby, nil
}

// NeedStandby stops the cluster, makes a standby of it and starts it again.
func (pg *Postgres) NeedStandby(tb testing.TB) *Postgres {
	tb.Helper()
	if err := pg.Stop(Fast); err != nil {
		tb.Fatal(err)
	}
	standby, err := pg.StartStandby(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	closeAtEnd(tb, standby)
	if err := pg.Start(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	return standby
}

// AwaitReplayed waits until a standby has replayed up to lsn.
func (pg *Postgres) AwaitReplayed(ctx context.Context, lsn uint64) error {
	return Eventually(ctx, "the standby has replayed up to "+decode.FormatLSN(lsn), func(ctx context.Context) (any, bool) {
		at, err := pg.lsn(ctx, `SELECT (coalesce(pg_last_wal_replay_lsn(), '0/0') - '0/0')::text`)
		if err != nil {
			return err, false
		}
		return decode.FormatLSN(at), at >= lsn
	})
}

// Promote makes a standby a primary, on a new timeline.
func (pg *Postgres) Promote(ctx context.Context) error {
	promoted, err := QueryValue[bool](ctx, pg, `SELECT pg_promote(true, 60)`)
	if err == nil && !promoted {
		err = errors.New("it took longer than a minute")
	}
	if err != nil {
		return fmt.Errorf("promote the standby: %w", err)
	}
	return nil
}
