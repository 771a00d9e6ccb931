package harness

import (
	"context"
	"fmt"
	"time"
)

// HoldCommits makes every commit wait, from now on, for a synchronous standby
// that is not there: it is in the WAL, and nobody sees it. It returns when that
// is so, which is some time after the setting is made: the server's processes
// take it up one by one, and the last of them tells the sessions to wait.
// ReleaseCommits ends it.
func (pg *Postgres) HoldCommits(ctx context.Context) error {
	if err := pg.standbys(ctx, "nobody"); err != nil {
		return err
	}
	return Eventually(ctx, "a commit waits for a standby", func(ctx context.Context) (any, bool) {
		held, err := pg.commitWaits(ctx)
		return err, held
	})
}

// ReleaseCommits lets the commits that wait go on, and all later ones.
func (pg *Postgres) ReleaseCommits(ctx context.Context) error { return pg.standbys(ctx, "") }

func (pg *Postgres) standbys(ctx context.Context, names string) error {
	if err := pg.Exec(ctx, "ALTER SYSTEM SET synchronous_standby_names = '"+names+"'"); err != nil {
		return err
	}
	return pg.Exec(ctx, "SELECT pg_reload_conf()")
}

// commitWaits commits something, and tells whether that has to wait; then it ends
// the session that does.
func (pg *Postgres) commitWaits(ctx context.Context) (held bool, err error) {
	conn, err := pg.Connect(ctx)
	if err != nil {
		return false, err
	}
	pid := conn.PgConn().PID()
	done := make(chan struct{})
	var failed error // once done
	go func() {
		defer close(done)
		_, failed = conn.Exec(ctx, "SELECT pg_logical_emit_message(true, 'harness', '')")
	}()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for !held {
		select {
		case <-done:
			_ = conn.Close(context.WithoutCancel(ctx))
			return false, failed
		case <-look.C:
		}
		if held, err = QueryValue[bool](ctx, pg, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'SyncRep')", pid); err != nil {
			break
		}
	}
	if held {
		err = pg.Exec(ctx, "SELECT pg_terminate_backend($1)", pid)
	}
	if err != nil {
		err = fmt.Errorf("a commit that waits: %w", err)
		_ = conn.PgConn().Conn().Close()
	}
	<-done
	_ = conn.Close(context.WithoutCancel(ctx))
	if err != nil {
		return false, err
	}
	return true, Eventually(ctx, "the session is gone", func(ctx context.Context) (any, bool) {
		there, err := QueryValue[bool](ctx, pg, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", pid)
		return err, err == nil && !there
	})
}
