package main

import (
	"holdfast/internal/config"
	"holdfast/internal/feldera"
	"holdfast/internal/ops"
	"holdfast/internal/partition"
)

// connection gives the part of the consumer's configuration that any look at
// the brokers needs too.
func connection(c *config.KafkaSink) (partition.Config, error) {
	cfg := partition.Config{
		Brokers: c.Brokers, Group: c.Group, ClientID: daemon, Version: ops.Version().Version, DLQTopic: c.DLQTopic,
		InstanceID: c.InstanceID, ServerSide: c.GroupProtocol == config.Consumer,
	}
	if c.TLS {
		var err error
		cfg.TLS, err = partition.TLSConfig(partition.TLSFiles{CA: c.CAFile, Cert: c.ClientCertFile, Key: c.ClientKeyFile, ServerName: c.ServerName})
		if err != nil {
			return cfg, ops.WithExitCode(ops.ExitConfig, err)
		}
	}
	if c.SASLMechanism != "" {
		cfg.SASL = &partition.SASL{
			Mechanism: c.SASLMechanism, User: c.SASLUser, Password: c.SASLPassword.Value, TokenURL: c.SASLTokenURL, Scope: c.SASLScope,
		}
		if c.SASLToken.IsSet() {
			cfg.SASL.Token = c.SASLToken.Value
		}
	}
	return cfg, nil
}

// felderaConfig gives the part of the client's configuration that any look at
// the pipeline needs too.
func felderaConfig(c *config.KafkaSink) feldera.Config {
	cfg := feldera.Config{
		URL: c.Feldera.URL, Pipeline: c.Feldera.Pipeline, CAFile: c.Feldera.CAFile,
		RequestTimeout: c.Feldera.RequestTimeout, RequestLifetime: c.Feldera.RequestLifetime, CheckpointInterval: c.Feldera.CheckpointInterval,
		Shared: true, // by the other members of the group
	}
	if c.Feldera.APIKey.IsSet() {
		cfg.APIKey = c.Feldera.APIKey.Value
	}
	return cfg
}
