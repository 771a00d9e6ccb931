// Command pgsource carries the changes of a Postgres database into Feldera
// and confirms them to Postgres only when Feldera has processed them.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	// CA roots for images that have no store of their own; a system store wins.
	_ "golang.org/x/crypto/x509roots/fallback"

	"holdfast/internal/ack"
	"holdfast/internal/config"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/ops"
	"holdfast/internal/wal"
)

const daemon = "pgsource"

func main() {
	os.Exit(program().Main(context.Background(), os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

func program() ops.Program {
	return ops.Program{
		Name:    daemon,
		Summary: "Postgres logical replication into Feldera, confirmed only when processed",
		Verbs: []ops.Verb{
			{Name: "run", Help: "carry changes until a signal", MoreHelp: config.HelpPGSource, Run: run},
			ops.ConfigVerb(func(environ []string) (ops.Printer, error) { return load(environ) }, config.HelpPGSource),
			ops.CheckVerb(preflights),
			felderaSQLVerb(),
			stateVerb(),
			slotVerb(),
			ownersVerb(),
			verifyVerb(),
			resyncVerb(),
			skipVerb(),
			snapshotVerb(),
			publicationVerb(),
			transactionVerb(),
			ops.HealthcheckVerb(func(environ []string) (string, error) {
				c, err := config.LoadPGSource(environ)
				if err != nil {
					return "", err
				}
				return c.Listen, nil
			}),
			ops.VersionVerb(daemon),
		},
	}
}

// load reads the configuration and lets the Postgres driver have its say on
// the connection string, which only it can fully parse.
func load(environ []string) (*config.PGSource, error) {
	c, err := config.LoadPGSource(environ)
	if err != nil {
		return nil, err
	}
	err = checkDSN("PGSOURCE_DSN", c.DSN)
	if err == nil && c.StateDSN.IsSet() {
		err = checkDSN("PGSOURCE_STATE_DSN", c.StateDSN)
	}
	if err != nil {
		return nil, ops.WithExitCode(ops.ExitConfig, err)
	}
	return c, nil
}

func checkDSN(setting string, secret config.Secret) error {
	dsn, err := secret.Value()
	if err != nil {
		return err
	}
	return wal.CheckDSN(setting, dsn)
}

func run(ctx context.Context, call ops.Call) error {
	c, err := load(call.Environ)
	if err != nil {
		return err
	}
	boundMemory(call.Environ, int64(c.MemoryLimit))
	var source *wal.Source
	return ops.Daemon{
		Name: daemon, Listen: c.Listen, LogLevel: c.LogLevel, LogFormat: c.LogFormat, Fingerprint: c.Fingerprint(),
		ListenSetting: "PGSOURCE_LISTEN",
		ReadyWhen:     []string{wal.CheckSource, wal.CheckDestination, wal.CheckPipeline, wal.CheckStore}, WaitOnRefusal: c.OnRefusal == config.Wait,
		Page:        page(c.Rows()),
		LongestStep: c.Feldera.RequestTimeout + c.Feldera.RequestLifetime + c.ShutdownTimeout,
		Work: func(ctx context.Context, rt ops.Runtime) error {
			made, closing, err := newSource(ctx, c, rt, func(say *reporter) ([]wal.Table, error) {
				return insistOnTables(ctx, c, rt.Health.Beat, say.report)
			})
			var refused *decode.Refusal
			switch {
			case err != nil && ctx.Err() != nil && !errors.As(err, &refused):
				return nil // stopped while the source was waited for
			case err != nil:
				return err
			}
			defer closing()
			source = made
			return source.Run(ctx)
		},
		WhileBlocked: func(ctx context.Context) {
			if source != nil { // else the tables themselves were refused
				source.WatchSlot(ctx)
			}
		},
	}.Run(ctx, call)
}

// boundMemory makes the garbage collector work the harder the nearer memory
// comes to what is counted and a share for the rest. Without it garbage may
// take as much again as what is held. GOMEMLIMIT, where it is set, wins.
func boundMemory(environ []string, counted int64) {
	const rest = 128 << 20
	if !slices.ContainsFunc(environ, func(e string) bool { return strings.HasPrefix(e, "GOMEMLIMIT=") }) {
		debug.SetMemoryLimit(counted + rest)
	}
}

// progressTable is the table in which progress is recorded, "" for none.
func progressTable(c *config.PGSource) string {
	if c.Delivery == config.AtLeastOnce {
		return ""
	}
	return c.ProgressTable
}

// newSource wires one Source from the configuration, for the tables that
// tablesOf gives.
func newSource(ctx context.Context, c *config.PGSource, rt ops.Runtime, tablesOf func(*reporter) ([]wal.Table, error)) (source *wal.Source, closing func(), err error) {
	metrics := feldera.NewMetrics(rt.Registry, daemon)
	say := newReporter(ctx, rt)
	pipeline, err := feldera.New(pipelineConfig(c, say, metrics))
	if err != nil {
		return nil, nil, err
	}
	tables, err := tablesOf(say)
	if err != nil {
		return nil, nil, err
	}
	policy := feldera.Policy{IgnoreExtraColumns: c.ExtraColumns == config.Ignore, OnAltered: metrics.Altered}
	if c.Unrepresentable == config.Null {
		policy.NonFinite, policy.OutOfRange = feldera.NullSpecial, feldera.NullSpecial
	}
	if c.DecimalExcess == config.Truncate {
		policy.Fraction = feldera.TruncateExcess
	}
	source, err = wal.New(wal.Config{
		DSN: c.DSN.Value, Slot: c.Slot, Publication: c.Publication, Tables: tables, Schemas: c.Tables.Schemas(), Unlisted: stateTable(c), Create: c.Create, Failover: c.SlotFailover,
		Transport: transports[c.Transport], PeekInterval: c.PeekInterval,
		BatchRows: c.BatchRows, BatchBytes: int(c.BatchBytes), BatchAge: c.BatchAge, InFlight: c.InFlight,
		MemoryLimit: int64(c.MemoryLimit), StallTimeout: c.StallTimeout, SenderTimeout: c.SenderTimeout, ShutdownTimeout: c.ShutdownTimeout,
		SpillDir: c.SpillDir, SpillLimit: spillLimit(c), TableAtomicity: c.Atomicity == config.PerTable,
		Truncate: truncates[c.Truncate], IgnorePartitions: c.Partitions == config.Ignore,
		AckOn: rungs[c.AckOn], Policy: policy, Pipeline: pipeline,
		ProgressTable: progressTable(c), ProgressIfPossible: c.Delivery == config.Auto, OwnersTable: c.ProgressTable, StopOnLoss: c.OnLoss == config.Stop,
		Snapshot: snapshots[c.Snapshot], ChunkTime: c.ChunkTime, ChunkBytes: int(c.ChunkBytes), SnapshotLag: int64(c.SnapshotLag),
		State: stateStore(c), StateByDefault: c.StatePlace().ByDefault,
		Logger: rt.Logger, Metrics: wal.NewMetrics(rt.Registry), StopNow: rt.StopNow,
		TakeoverAfter: c.TakeoverAfter, VerifyInterval: c.VerifyInterval, VerifyRate: c.VerifyRate,
		Report: say.report,
		Phase:  func(phase string) { rt.Health.SetPhase(phases[phase]) },
		Beat:   rt.Health.Beat,
	})
	if err != nil {
		return nil, nil, err
	}
	say.delivering = source.Delivering
	return source, pipeline.CloseIdle, nil
}

// spillLimit is 0 where there is to be no spill.
func spillLimit(c *config.PGSource) int64 {
	if c.SpillDir == config.Off {
		return 0
	}
	return int64(c.SpillLimit)
}

// rungs maps PGSOURCE_ACK_ON.
var rungs = map[string]ack.Rung{config.Completed: ack.Completed, config.Durable: ack.Durable}

// transports maps PGSOURCE_TRANSPORT.
var transports = map[string]wal.Transport{config.Stream: wal.TransportStream, config.Peek: wal.TransportPeek}

// snapshots maps PGSOURCE_SNAPSHOT.
var snapshots = map[string]wal.SnapshotMode{
	config.Auto: wal.SnapshotAuto, config.Initial: wal.SnapshotInitial, config.Never: wal.SnapshotNever, config.Only: wal.SnapshotOnly,
}

// truncates maps PGSOURCE_TRUNCATE.
var truncates = map[string]wal.TruncatePolicy{
	config.Stop: wal.TruncateStop, config.Ignore: wal.TruncateIgnore, config.DeleteAll: wal.TruncateDeleteAll,
}

// phases maps the source's phases to the daemon's.
var phases = map[string]ops.Phase{wal.PhaseConnecting: ops.PhaseConnecting, wal.PhaseStreaming: ops.PhaseStreaming, wal.PhaseNeedsResync: ops.PhaseNeedsResync}

func pipelineConfig(c *config.PGSource, say *reporter, metrics *feldera.Metrics) feldera.Config {
	cfg := feldera.Config{
		URL: c.Feldera.URL, Pipeline: c.Feldera.Pipeline, CAFile: c.Feldera.CAFile,
		RequestTimeout: c.Feldera.RequestTimeout, RequestLifetime: c.Feldera.RequestLifetime, CheckpointInterval: c.Feldera.CheckpointInterval, UnansweredLimit: wal.PoisonAttempts,
		Logger: say.rt.Logger, Observe: metrics.Observe,
		OnRetry: func(r feldera.Retry) {
			metrics.Retried(r)
			say.rt.Health.Beat() // waiting for Feldera is no hang
			say.report(retryStatus(r, say.delivering))
		},
	}
	if c.Feldera.APIKey.IsSet() {
		cfg.APIKey = c.Feldera.APIKey.Value
	}
	return cfg
}

// reporter shows the checks of the source in health, what they mean for
// readiness, and their comings and goings in the log.
type reporter struct {
	ctx     context.Context //nolint:containedctx // the life of the run, for its log lines
	rt      ops.Runtime
	repeats *ops.Repeats
	// delivering says what is on its way to the pipeline. It is set before the
	// source runs.
	delivering func() string
}

// retryStatus words what is tried again. Requests that a running pipeline does
// not take, time after time, are named; whether they are to blame is found out
// by an empty one, and if so the source refuses them.
func retryStatus(r feldera.Retry, delivering func() string) wal.Status {
	st := wal.Status{Check: wal.CheckDestination, Message: r.What + ": " + r.Err.Error(), Hint: "it is tried again until it works; the LSN does not move meanwhile"}
	if r.Unknown < wal.PoisonAttempts {
		return st
	}
	what := ""
	if delivering != nil {
		what = delivering()
	}
	if what == "" {
		what = r.What
	}
	st.Message = fmt.Sprintf("%s: %d requests with these rows got no answer from a pipeline that runs: %v", what, r.Unknown, r.Err)
	st.Hint = "give the request more time (FELDERA_REQUEST_TIMEOUT, FELDERA_REQUEST_LIFETIME) or less to carry (PGSOURCE_BATCH_ROWS, PGSOURCE_BATCH_BYTES), " +
		"and look at what is between pgsource and the pipeline; it is tried again meanwhile, and the LSN does not move"
	return st
}

func newReporter(ctx context.Context, rt ops.Runtime) *reporter {
	return &reporter{ctx: ctx, rt: rt, repeats: rt.Repeats}
}

// report shows one check. Source, destination and pipeline have to be in order
// for the daemon to be ready; a slow slot has not. What the source logs by
// itself is not logged again.
func (r *reporter) report(s wal.Status) {
	r.rt.Health.Set(s.Check, ops.Check{OK: s.OK, Blocking: s.Blocking, Message: s.Message, Hint: s.Hint})
	switch s.Check {
	case wal.CheckDestination, wal.CheckPipeline:
		if s.OK {
			r.repeats.Worked(r.ctx, s.Check)
		} else {
			r.repeats.Failed(r.ctx, s.Check, errors.New(s.Message))
		}
	case wal.CheckSource:
	case wal.CheckSlot:
		if s.Works && !s.OK { // it could not be looked at; how it is doing is no failure of anything
			r.repeats.Failed(r.ctx, s.Check, errors.New(s.Message))
		} else {
			r.repeats.Worked(r.ctx, s.Check)
		}
		return
	case wal.CheckStore:
		// That none was chosen is worth a look, and no reason to wait.
		r.rt.Health.SetReady(s.Check, s.OK || s.Works, s.Message)
		return
	default:
		return
	}
	r.rt.Health.SetReady(s.Check, s.OK, s.Message)
}

// preflightTimeout is how long each of connecting and looking may take.
const preflightTimeout = 15 * time.Second

// preflights are the checks of the check verb. They change nothing.
func preflights(ctx context.Context, call ops.Call) ([]ops.NamedCheck, error) {
	c, err := load(call.Environ)
	if err != nil {
		return nil, err
	}
	rt, err := ops.LookingRuntime(daemon)
	if err != nil {
		return nil, err
	}
	source, _, err := newSource(ctx, c, rt, func(*reporter) ([]wal.Table, error) { return sourceTables(ctx, c) })
	if err != nil {
		return nil, err
	}
	check := func(name, right string, look func(context.Context) error) ops.NamedCheck {
		return ops.NamedCheck{Name: name, Timeout: 2 * preflightTimeout, Run: func(ctx context.Context) (string, error) { return right, look(ctx) }}
	}
	saying := func(name string, look func(context.Context) (string, error)) ops.NamedCheck {
		return ops.NamedCheck{Name: name, Timeout: 2 * preflightTimeout, Run: look}
	}
	return []ops.NamedCheck{
		check("feldera", "the pipeline answers and has every table", source.CheckDestination),
		saying("postgres", source.CheckServer),
		saying("replication", source.CheckReplication),
		check("tables", "every source table fits its Feldera table", source.CheckTables),
		saying("publication", source.CheckPublication),
		saying("slot", source.CheckSlotState),
		saying("state", source.CheckStateStore),
		saying("snapshot", source.CheckCopies),
		saying("delivery", source.CheckDelivery),
		check("spill", "it has a place, or none was asked for", func(context.Context) error { return source.CheckSpillDir() }),
	}, nil
}
