// Command kafkasink carries records of Kafka topics into Feldera and commits
// their offsets only when Feldera has processed them.
package main

import (
	"context"
	"os"

	// CA roots for images that have no store of their own; a system store wins.
	_ "golang.org/x/crypto/x509roots/fallback"

	"holdfast/internal/config"
	"holdfast/internal/feldera"
	"holdfast/internal/ops"
	"holdfast/internal/partition"
)

const daemon = "kafkasink"

func main() {
	os.Exit(program().Main(context.Background(), os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

func program() ops.Program {
	return ops.Program{
		Name:    daemon,
		Summary: "Kafka topics into Feldera, committed only when processed",
		Verbs: []ops.Verb{
			{Name: "run", Help: "carry records until a signal", MoreHelp: config.HelpKafkaSink, Run: run},
			ops.ConfigVerb(func(environ []string) (ops.Printer, error) { return config.LoadKafkaSink(environ) }, config.HelpKafkaSink),
			ops.CheckVerb(preflights),
			offsetsShowVerb(), offsetsResetVerb(), verifyVerb(),
			dlqListVerb(), dlqShowVerb(), dlqRedriveVerb(),
			ops.HealthcheckVerb(func(environ []string) (string, error) {
				c, err := config.LoadKafkaSink(environ)
				if err != nil {
					return "", err
				}
				return c.Listen, nil
			}),
			ops.VersionVerb(daemon),
		},
	}
}

func run(ctx context.Context, call ops.Call) error {
	c, err := config.LoadKafkaSink(call.Environ)
	if err != nil {
		return err
	}
	return ops.Daemon{
		Name: daemon, Listen: c.Listen, ListenSetting: "KAFKASINK_LISTEN", LogLevel: c.LogLevel, LogFormat: c.LogFormat, Fingerprint: c.Fingerprint(),
		ReadyWhen: []string{checkDestination, checkGroup, checkPipeline}, WaitOnRefusal: c.OnRefusal == config.Wait,
		Page: page(c.Rows()),
		Work: func(ctx context.Context, rt ops.Runtime) error {
			s, err := newSink(ctx, c, rt)
			if err != nil {
				return err
			}
			defer s.pipeline.CloseIdle()
			return s.run(ctx)
		},
	}.Run(ctx, call)
}

// preflights are the checks of the check verb. They change nothing.
func preflights(ctx context.Context, call ops.Call) ([]ops.NamedCheck, error) {
	c, err := config.LoadKafkaSink(call.Environ)
	if err != nil {
		return nil, err
	}
	rt, err := ops.LookingRuntime(daemon)
	if err != nil {
		return nil, err
	}
	s, err := newSink(ctx, c, rt)
	if err != nil {
		return nil, err
	}
	if s.topics = c.Topics; c.Topics.HasPatterns() {
		if s.topics, err = matchTopics(ctx, c, rt); err != nil {
			return nil, ops.WithExitCode(ops.ExitUnavailable, err)
		}
	}
	checks := []ops.NamedCheck{{Name: "feldera", Run: func(ctx context.Context) (string, error) {
		schema, err := s.pipeline.Describe(ctx)
		if err != nil {
			return "", err
		}
		_, err = s.routes(schema, func(string) {})
		return "the pipeline answers and has every table", err
	}}}
	checks = append(checks, ops.NamedCheck{Name: "delivery", Run: func(ctx context.Context) (string, error) {
		if c.Delivery == config.AtLeastOnce {
			return s.levelText(nil), nil
		}
		schema, err := s.pipeline.Describe(ctx)
		if err != nil {
			return "", err
		}
		why := s.canRecord(schema)
		if why != nil && c.Delivery == config.EffectivelyOnce {
			return "", why
		}
		return s.levelText(why), nil
	}})
	if s.decoding.schemas != nil && c.RegistryURL != "" {
		checks = append(checks, ops.NamedCheck{Name: "schema registry", Run: func(ctx context.Context) (string, error) {
			return "it answers", s.decoding.schemas.Check(ctx)
		}})
	}
	cfg, err := s.consumerConfig(nil, nil, "")
	if err != nil {
		return nil, err
	}
	for _, topic := range s.topics {
		cfg.Routes = append(cfg.Routes, partition.Route{Topic: topic.Topic, Table: topic.Table, Destination: noDestination{}, Decoder: noDecoder{}})
	}
	cfg.Watcher = s.pipeline.NewCompletions(feldera.CompletionsOptions{})
	for _, p := range partition.Preflights(cfg) {
		checks = append(checks, ops.NamedCheck{Name: p.Name, Run: func(ctx context.Context) (string, error) { return "as needed", p.Run(ctx) }})
	}
	return checks, nil
}
