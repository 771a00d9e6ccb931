package main

import (
	"context"
	"fmt"
	"slices"

	"holdfast/internal/feldera"
	"holdfast/internal/ops"
	"holdfast/internal/partition"
)

// checkOwners is the named check of who else feeds the tables.
const checkOwners = "owners"

// askCluster is what the log calls the question for the cluster's name.
const askCluster = "ask for the cluster's name"

// clusterName asks the brokers for the name of their cluster until they answer.
// The error is that of ctx, which has ended.
func (s *sink) clusterName(ctx context.Context) (name string, err error) {
	err = s.askBrokers(ctx, askCluster, func() error {
		return admin(ctx, s.c, s.rt, func(ctx context.Context, a *partition.Admin) (err error) {
			name, err = a.Cluster(ctx)
			return err
		})
	})
	return name, err
}

// askedCluster gives the cluster's name where something needs it: the record of
// owners, or rows that are told apart by where they stand.
func (s *sink) askedCluster(ctx context.Context, schema *feldera.Schema) (string, error) {
	_, err := schema.Table(s.c.ProgressTable)
	needed := err == nil
	for _, topic := range s.topics {
		if table, err := schema.Table(topic.Table); err == nil {
			identity, err := table.Identity()
			needed = needed || identity && err == nil
		}
	}
	if !needed {
		return "", nil
	}
	return s.clusterName(ctx)
}

// own says in the pipeline that the group feeds the tables, before a row is
// sent: a pgsource that takes away rows, whoever wrote them, must not meet
// ours. All members of the group say the same.
func (s *sink) own(ctx context.Context, schema *feldera.Schema, cluster string) error {
	if _, err := schema.Table(s.c.ProgressTable); err != nil {
		s.rt.Health.Set(checkOwners, ops.Check{OK: true, Message: "who feeds the tables is not recorded, since the pipeline has no table for it"})
		return nil //nolint:nilerr // the program has no such table: there is no record
	}
	owners, err := s.pipeline.Owners(schema, s.c.ProgressTable, feldera.KafkasinkOwner(cluster, s.c.Group))
	if err != nil {
		return err
	}
	var tables []*feldera.Table
	for _, topic := range s.topics {
		table, err := schema.Table(topic.Table)
		if err != nil {
			return err
		}
		if !slices.Contains(tables, table) {
			tables = append(tables, table)
		}
	}
	if err := owners.Claim(ctx, nil, "", tables...); err != nil {
		return fmt.Errorf("say who feeds the tables: %w", err)
	}
	list, err := owners.List(ctx, tables...)
	if err != nil {
		return fmt.Errorf("read who feeds the tables: %w", err)
	}
	s.rt.Health.Set(checkOwners, ops.Check{OK: true, Message: feldera.OthersText(list, owners.Name())})
	return nil
}
