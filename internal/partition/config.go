// Package partition carries Kafka records into Feldera and commits an offset
// only when everything below it is proven completed there.
//
// What it promises:
//
//   - The offsets it commits come from evidence: the completion of rows, or
//     the position of records that need nothing of the destination (tombstones
//     and values that a decoder passes over, control records, records skipped
//     by policy) with everything before them complete.
//   - Within a partition, rows are sent in offset order, and nothing later is
//     sent while the outcome of an earlier request is unknown.
//   - A partition that was revoked or lost is dead: what still comes in for it
//     commits nothing, although the broker would accept it.
//   - It never moves a position silently. A log that no longer has the next
//     record, a topic that was made anew, a group without offsets: the
//     partition stops with numbers, or goes on as the configuration says, and
//     is counted.
//   - One partition's bad record stops that partition; the others go on.
//   - Memory, requests, waits and labels are bounded, and everything it starts
//     has ended when Run returns.
//
// What it does not promise: that a row is applied once. After a crash the
// records from the committed offset on are sent again; a table with a primary
// key converges. Nor that two members never overlap: before a new owner sends,
// it waits out one request lifetime unless the last owner left a clean note.
//
// Its caller is cmd/kafkasink, which wires the Feldera client in through
// [Destination] and [Watcher] and restarts the session when Run reports a
// change of incarnation. The pure part, one assignment of one partition, is
// the sub-package lane.
package partition

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// StartPolicy says where a partition begins for which the group has no
// committed offset.
type StartPolicy string

// The start policies.
const (
	// StartEarliest reads the log from its start.
	StartEarliest StartPolicy = "earliest"
	// StartLatest begins at the end as it is when the group first takes the
	// topic; partitions that are added to the topic later are read from their
	// start, or their first records would be missed.
	StartLatest StartPolicy = "latest"
	// StartStop refuses: offsets are expected to be there.
	StartStop StartPolicy = "stop"
)

// GapPolicy says what happens when the log no longer has what comes next.
type GapPolicy string

// The gap policies.
const (
	// GapStop stops the partition and states the numbers.
	GapStop GapPolicy = "stop"
	// GapContinue goes on at the earliest record there is after the gap, and
	// counts it.
	GapContinue GapPolicy = "continue"
)

// PoisonPolicy says what happens to a record that can never be delivered.
type PoisonPolicy string

// The poison policies.
const (
	// PoisonStop stops the record's partition in front of it.
	PoisonStop PoisonPolicy = "stop"
	// PoisonDLQ writes the record to the dead-letter topic and, when every
	// replica in sync has it there, passes over it.
	PoisonDLQ PoisonPolicy = "dlq"
	// PoisonSkip passes over the record, counted and logged.
	PoisonSkip PoisonPolicy = "skip"
)

// RevokePolicy says what happens to a partition that another member is to get.
type RevokePolicy string

// The revocation policies.
const (
	// RevokeDrain waits for the evidence of what was sent, then commits.
	RevokeDrain RevokePolicy = "drain"
	// RevokeAbandon commits what is completed and waits for nothing.
	RevokeAbandon RevokePolicy = "abandon"
)

// LossPolicy says what happens when the pipeline lost what was acknowledged.
type LossPolicy string

// The loss policies.
const (
	// LossHeal delivers again from what the pipeline holds, or from the log's
	// start. It takes Progress; without it a loss is only said.
	LossHeal LossPolicy = "heal"
	// LossStop stops the partition and states both positions.
	LossStop LossPolicy = "stop"
)

// Route carries one topic into one table.
type Route struct {
	Topic string
	// Table is the destination's name, for logs and health.
	Table string
	// Destination is the table's sender. Topics of the same table share it:
	// there is one request in flight per Destination.
	Destination Destination
	// Decoder reads the topic's records. It is used by one goroutine.
	Decoder Decoder
}

// Config is everything a Consumer needs. Zero values are replaced by the
// defaults named here.
type Config struct {
	Brokers []string
	Group   string
	// ClientID defaults to "kafkasink".
	ClientID string
	// InstanceID, if not empty, makes the member static: the group keeps its
	// partitions for it through a restart. No two processes may share one.
	InstanceID string
	// ServerSide has the brokers assign partitions (KIP-848). It takes brokers
	// that do, and all of the group's members.
	ServerSide bool
	// Version is the software version told to the brokers.
	Version string
	Routes  []Route
	Watcher Watcher
	// Cluster is the cluster's name, for tables with identity columns: brokers
	// that give topics no id have no other way to tell theirs from another's.
	Cluster string
	// Incarnation of the pipeline at the session's start, for the notes that
	// are committed with the offsets; "" if unknown.
	Incarnation string
	// Progress has rows completed by progress rows; nil for completion that is
	// the rows' own.
	Progress *Progress
	OnLoss   LossPolicy // LossHeal

	Start  StartPolicy  // StartEarliest
	OnGap  GapPolicy    // GapStop
	Poison PoisonPolicy // PoisonStop
	// DLQTopic is the dead-letter topic of PoisonDLQ. It is not made by use.
	DLQTopic string
	// PoisonLimit (100) records of a topic may be set aside by PoisonDLQ or
	// PoisonSkip within PoisonWindow (1m); one more stops its partition.
	PoisonLimit  int
	PoisonWindow time.Duration
	Revoke       RevokePolicy // RevokeDrain

	// DrainTimeout bounds how long a revocation or a shutdown waits for
	// evidence (20s). RebalanceTimeout (60s) must be at least twice that: a
	// member that answers a rebalance later than it is expelled.
	DrainTimeout, RebalanceTimeout time.Duration
	// SessionTimeout (45s) is how long the broker waits for a heartbeat
	// (HeartbeatInterval, 3s). No request is started when the last heartbeat
	// that was answered is older than SessionTimeout less SessionMargin (a
	// third of SessionTimeout).
	SessionTimeout, HeartbeatInterval, SessionMargin time.Duration
	// CommitInterval is the time between commits (1s).
	CommitInterval time.Duration
	// RequestLifetime is how long an abandoned request may still be applied
	// (30s). Nothing is sent for as long after an uncertain outcome, or after
	// taking over a partition whose last owner left no clean note. Negative
	// means not at all.
	RequestLifetime time.Duration

	// An array is sent when it has BatchRows (10000) or BatchBytes (4 MiB) or
	// its oldest row is BatchAge (0) old. InFlight (8) arrays of a table may
	// be accepted and not completed.
	BatchRows, BatchBytes int
	BatchAge              time.Duration
	InFlight              int

	// LaneMemory (16 MiB) and MemoryLimit (256 MiB) bound the bytes that are
	// received and not accepted, of one partition and of all. What one poll
	// brings may exceed them.
	LaneMemory, MemoryLimit int64
	// LaneRecords (100000) bounds the same by number, per partition.
	LaneRecords int
	// PollRecords (2000) is how many records one poll hands over.
	PollRecords int
	// LagInterval is the time between looks at the logs' ends (10s).
	LagInterval time.Duration

	TLS  *tls.Config // nil = no TLS
	SASL *SASL       // nil = none

	// StopNow, when closed, makes every wait of a drain end at once.
	StopNow <-chan struct{}
	Logger  *slog.Logger
	// Metrics may be nil.
	Metrics *Metrics
	// Options are added to the client's own, for hooks and dialers.
	Options []kgo.Opt

	breaker *breaker // outlives the sessions
}

func orDefault[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// prepare fills in the defaults and reports every fault at once.
func (c *Config) prepare() error {
	orDefault(&c.ClientID, "kafkasink")
	orDefault(&c.Version, "unknown")
	orDefault(&c.Start, StartEarliest)
	orDefault(&c.OnGap, GapStop)
	orDefault(&c.Poison, PoisonStop)
	orDefault(&c.PoisonLimit, 100)
	orDefault(&c.PoisonWindow, time.Minute)
	orDefault(&c.Revoke, RevokeDrain)
	orDefault(&c.OnLoss, LossHeal)
	orDefault(&c.DrainTimeout, 20*time.Second)
	orDefault(&c.RebalanceTimeout, time.Minute)
	orDefault(&c.SessionTimeout, 45*time.Second)
	orDefault(&c.HeartbeatInterval, min(3*time.Second, c.SessionTimeout/3))
	orDefault(&c.SessionMargin, c.SessionTimeout/3)
	orDefault(&c.CommitInterval, time.Second)
	orDefault(&c.RequestLifetime, 30*time.Second)
	orDefault(&c.BatchRows, 10_000)
	orDefault(&c.BatchBytes, 4<<20)
	orDefault(&c.InFlight, 8)
	orDefault(&c.LaneMemory, 16<<20)
	orDefault(&c.MemoryLimit, 256<<20)
	orDefault(&c.LaneRecords, 100_000)
	orDefault(&c.PollRecords, 2000)
	orDefault(&c.LagInterval, 10*time.Second)

	var faults []error
	fault := func(bad bool, format string, args ...any) {
		if bad {
			faults = append(faults, fmt.Errorf(format, args...))
		}
	}
	fault(len(c.Brokers) == 0, "no brokers")
	fault(c.Group == "", "no consumer group")
	fault(len(c.Routes) == 0, "no topics")
	fault(c.Watcher == nil, "no watcher for completions")
	fault(c.Logger == nil, "no logger")
	fault(!slices.Contains([]StartPolicy{StartEarliest, StartLatest, StartStop}, c.Start), "start policy %q is not earliest, latest or stop", c.Start)
	fault(!slices.Contains([]GapPolicy{GapStop, GapContinue}, c.OnGap), "gap policy %q is not stop or continue", c.OnGap)
	fault(!slices.Contains([]PoisonPolicy{PoisonStop, PoisonDLQ, PoisonSkip}, c.Poison), "poison policy %q is not stop, dlq or skip", c.Poison)
	fault(c.Poison == PoisonDLQ && c.DLQTopic == "", "poison policy dlq needs a dead-letter topic")
	fault(c.PoisonLimit < 1 || c.PoisonWindow <= 0, "poison limit %d and window %v must be positive", c.PoisonLimit, c.PoisonWindow)
	fault(c.OnLoss != LossHeal && c.OnLoss != LossStop, "loss policy %q is not heal or stop", c.OnLoss)
	fault(c.Progress != nil && c.Incarnation == "", "progress rows without the pipeline's incarnation")
	fault(!slices.Contains([]RevokePolicy{RevokeDrain, RevokeAbandon}, c.Revoke), "revocation policy %q is not drain or abandon", c.Revoke)
	for name, d := range map[string]time.Duration{
		"drain timeout": c.DrainTimeout, "session timeout": c.SessionTimeout, "heartbeat interval": c.HeartbeatInterval,
		"session margin": c.SessionMargin, "commit interval": c.CommitInterval, "lag interval": c.LagInterval,
	} {
		fault(d < 0, "%s %v is negative", name, d)
	}
	fault(c.BatchAge < 0, "batch age %v is negative", c.BatchAge)
	fault(c.RebalanceTimeout < 2*c.DrainTimeout, "rebalance timeout %v is below twice the drain timeout %v: a drain that takes its time would get the member expelled", c.RebalanceTimeout, c.DrainTimeout)
	fault(c.SessionMargin >= c.SessionTimeout, "session margin %v leaves nothing of the session timeout %v", c.SessionMargin, c.SessionTimeout)
	fault(c.HeartbeatInterval >= c.SessionTimeout-c.SessionMargin, "heartbeat interval %v is not below session timeout less margin %v: nothing could ever be sent", c.HeartbeatInterval, c.SessionTimeout-c.SessionMargin)
	fault(c.BatchRows < 1 || c.BatchBytes < 1 || c.InFlight < 1 || c.PollRecords < 1 || c.LaneRecords < 1, "batch rows, batch bytes, arrays in flight, poll records and lane records must be at least 1")
	fault(c.LaneMemory < 1 || c.MemoryLimit < c.LaneMemory, "memory limit %d is below one partition's %d", c.MemoryLimit, c.LaneMemory)
	seen := map[string]bool{}
	for _, r := range c.Routes {
		fault(r.Topic == "" || r.Table == "" || r.Destination == nil || r.Decoder == nil, "topic %q: topic, table, destination and decoder must be given", r.Topic)
		fault(seen[r.Topic], "topic %q is routed twice", r.Topic)
		fault(c.DLQTopic != "" && r.Topic == c.DLQTopic, "topic %q is consumed and is the dead-letter topic: a bad record would come round for ever", r.Topic)
		seen[r.Topic] = true
	}
	if c.SASL != nil {
		if _, err := c.SASL.mechanism(); err != nil {
			faults = append(faults, err)
		}
	}
	c.breaker = &breaker{limit: c.PoisonLimit, window: c.PoisonWindow}
	return errors.Join(faults...)
}

func (c *Config) topics() []string {
	out := make([]string, 0, len(c.Routes))
	for i := range c.Routes {
		out = append(out, c.Routes[i].Topic)
	}
	return out
}
