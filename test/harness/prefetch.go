package harness

import (
	"context"
	"errors"
	"time"
)

// Prefetch fills [CacheDir] with what the servers need, so that no test pays for
// it: an initialised Postgres cluster, and Kafka's jars and class archive. It
// says, all at once, what this machine lacks. Without a deadline of ctx it gives
// up after ten minutes.
func Prefetch(ctx context.Context) error {
	ctx, cancel := withDefaultTimeout(ctx, 10*time.Minute)
	defer cancel()
	_, kafka := kafkaCache(ctx)
	return errors.Join(prefetchPostgres(ctx), kafka)
}

func prefetchPostgres(ctx context.Context) error {
	bin, err := postgresBin()
	if err != nil {
		return err
	}
	u, err := postgresUser()
	if err != nil {
		return err
	}
	_, _, err = postgresTemplate(ctx, bin, u)
	return err
}
