package main

import (
	"context"
	"errors"
	"time"

	"github.com/cenkalti/backoff/v4"

	"holdfast/internal/config"
	"holdfast/internal/decode"
	"holdfast/internal/wal"
)

// sourceTables gives the tables to carry. Where PGSOURCE_TABLES has a schema.*,
// the source is asked which those are, once.
func sourceTables(ctx context.Context, c *config.PGSource) ([]wal.Table, error) {
	mappings := c.Tables
	if schemas := mappings.Schemas(); len(schemas) > 0 {
		found, err := wal.ListTables(ctx, wal.DDLConfig{DSN: c.DSN.Value, Slot: c.Slot, Publication: c.Publication}, schemas, stateTable(c))
		if err != nil {
			return nil, err
		}
		if mappings, err = mappings.Expand(found); err != nil {
			return nil, err
		}
	}
	tables := make([]wal.Table, len(mappings))
	for i, t := range mappings {
		tables[i] = wal.Table{Schema: t.Schema, Name: t.Name, Target: t.Target}
	}
	return tables, nil
}

// insistOnTables is sourceTables for the daemon: a source that is away is
// waited for.
func insistOnTables(ctx context.Context, c *config.PGSource, beat func(), say func(wal.Status)) ([]wal.Table, error) {
	retry := backoff.NewExponentialBackOff(backoff.WithMaxInterval(15*time.Second), backoff.WithMaxElapsedTime(0), backoff.WithRandomizationFactor(0.8))
	for {
		beat()
		tables, err := sourceTables(ctx, c)
		var refused *decode.Refusal
		if err == nil || errors.As(err, &refused) || ctx.Err() != nil {
			return tables, err
		}
		say(wal.Status{Check: wal.CheckSource, Message: err.Error(), Hint: "it is tried again until it works"})
		timer := time.NewTimer(retry.NextBackOff())
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		}
	}
}

// stateTable is the table of the state where it may lie among the source's.
func stateTable(c *config.PGSource) *wal.Table {
	if place := c.StatePlace(); place.Table != "" && !c.StateDSN.IsSet() {
		return &wal.Table{Schema: place.Schema, Name: place.Table}
	}
	return nil
}
