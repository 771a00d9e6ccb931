package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/prometheus/client_golang/prometheus"

	"holdfast/internal/config"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
	"holdfast/internal/ops"
	"holdfast/internal/partition/registry"
)

// checkRegistry is the named check of the schema registry.
const checkRegistry = "registry"

// maxSchemaFile bounds what is read of a file with a schema.
const maxSchemaFile = 1 << 20

// decoding is what the decoders of all topics share.
type decoding struct {
	schemas *registry.Registry // nil where no topic is Avro
	// fixed are the schemas of topics whose Avro names none, by file.
	fixed          map[string]*decode.AvroSchema
	ignoredRecords *prometheus.CounterVec // topic, kind
	ignoredFields  *prometheus.CounterVec // topic
	fetches        *prometheus.CounterVec // outcome
}

// newDecoding reads the files with schemas, and makes what asks for others.
func newDecoding(ctx context.Context, c *config.KafkaSink, rt ops.Runtime) (*decoding, error) {
	d := &decoding{
		fixed: make(map[string]*decode.AvroSchema),
		ignoredRecords: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: daemon, Name: "ignored_records_total", Help: "Records that need nothing of the destination, by what they are. Counted when they are read: a batch that is built twice counts them twice.",
		}, []string{"topic", "kind"}),
		ignoredFields: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: daemon, Name: "ignored_fields_total", Help: "Fields of records that are no column of the table. Counted when they are read.",
		}, []string{"topic"}),
		fetches: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: daemon, Name: "schema_fetches_total", Help: "Attempts to get a schema from the registry, by outcome: answered or failed.",
		}, []string{"outcome"}),
	}
	for _, collector := range []prometheus.Collector{d.ignoredRecords, d.ignoredFields, d.fetches} {
		if err := rt.Registry.Register(collector); err != nil {
			return nil, fmt.Errorf("register metrics of decoding: %w", err)
		}
	}
	avro := false
	for _, t := range c.Topics {
		avro = avro || decode.Format(t.Format).Avro() || c.KeyFormats.Of(t.Topic) == string(decode.KeyAvro)
	}
	for _, s := range c.AvroSchemas {
		schema, err := readSchema("KAFKASINK_AVRO_SCHEMAS", s.Path)
		if err != nil {
			return nil, err
		}
		d.fixed[s.Path] = schema
	}
	if !avro {
		return d, nil
	}
	cfg := registry.Config{URL: c.RegistryURL, Timeout: c.RegistryTimeout, User: c.RegistryUser, OnAttempt: d.tell(ctx, rt)}
	if c.RegistryPassword.IsSet() {
		cfg.Password = c.RegistryPassword.Value
	}
	if c.RegistryToken.IsSet() {
		cfg.Token = c.RegistryToken.Value
	}
	if c.RegistryCAFile != "" {
		roots, err := readRoots("KAFKASINK_REGISTRY_CA_FILE", c.RegistryCAFile)
		if err != nil {
			return nil, err
		}
		cfg.TLS = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	}
	for _, f := range c.SchemaFiles {
		schema, err := readSchema("KAFKASINK_SCHEMA_FILES", f.Path)
		if err != nil {
			return nil, err
		}
		cfg.Files = append(cfg.Files, registry.File{Ref: f.Ref, Schema: schema})
	}
	d.schemas = registry.New(cfg)
	if c.RegistryURL != "" {
		rt.Health.Set(checkRegistry, ops.Check{OK: true, Message: "no schema was asked for yet"})
	}
	return d, nil
}

// tell shows how attempts to get schemas end.
func (d *decoding) tell(ctx context.Context, rt ops.Runtime) func(string, error) {
	const asking = "ask the schema registry"
	return func(what string, err error) {
		if err != nil {
			d.fetches.WithLabelValues("failed").Inc()
			rt.Repeats.Failed(ctx, asking, fmt.Errorf("%s: %w", what, err))
			rt.Health.Set(checkRegistry, ops.Check{
				Message: what + ": " + err.Error(),
				Hint:    "it is asked again until it answers; partitions that need the schema wait, the others go on, and no offset moves past a record that waits",
			})
			return
		}
		d.fetches.WithLabelValues("answered").Inc()
		rt.Repeats.Worked(ctx, asking)
		rt.Health.Set(checkRegistry, ops.Check{OK: true, Message: "it answered about " + what})
	}
}

// run asks for schemas until ctx ends.
func (d *decoding) run(ctx context.Context) {
	if d.schemas != nil {
		d.schemas.Run(ctx)
	}
}

// readSchema reads a file with an Avro schema.
func readSchema(setting, path string) (*decode.AvroSchema, error) {
	text, err := readFile(path, maxSchemaFile)
	if err == nil {
		var s *decode.AvroSchema
		if s, err = decode.ParseAvro(string(text)); err == nil {
			return s, nil
		}
	}
	return nil, ops.WithExitCode(ops.ExitConfig, fmt.Errorf("read a schema of %s: %s: %w", setting, path, err))
}

// readRoots reads a file with certificates.
func readRoots(setting, path string) (*x509.CertPool, error) {
	pem, err := readFile(path, maxSchemaFile)
	if err != nil {
		return nil, ops.WithExitCode(ops.ExitConfig, fmt.Errorf("read %s: %w", setting, err))
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, ops.WithExitCode(ops.ExitConfig, errors.New(setting+" holds no certificate in PEM form"))
	}
	return roots, nil
}

func readFile(path string, most int64) ([]byte, error) {
	f, err := os.Open(path) //nolint:gosec // the operator names the file
	if err != nil {
		return nil, fmt.Errorf("open the file: %w", err)
	}
	defer func() { _ = f.Close() }() // read only: nothing can be lost
	text, err := io.ReadAll(io.LimitReader(f, most+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the file: %w", err)
	case int64(len(text)) > most:
		return nil, fmt.Errorf("the file has more than %d bytes", most)
	}
	return text, nil
}

// decoder makes the decoder of one topic.
func (s *sink) decoder(topic config.TopicMapping, table *feldera.Table) (*decode.Topic, error) {
	cfg := s.c.Decoding(topic)
	cfg.Relation = table.Relation()
	if s.decoding.schemas != nil {
		cfg.Schemas = s.decoding.schemas
	}
	cfg.ValueSchema = s.decoding.fixed[s.c.AvroSchemas.Of(topic.Topic, false)]
	cfg.KeySchema = s.decoding.fixed[s.c.AvroSchemas.Of(topic.Topic, true)]
	fields := s.decoding.ignoredFields.WithLabelValues(topic.Topic)
	cfg.OnUnknown = fields.Inc
	cfg.OnPassed = func(kind decode.Passed) {
		s.decoding.ignoredRecords.WithLabelValues(topic.Topic, string(kind)).Inc()
	}
	d, err := decode.NewTopic(cfg)
	if err != nil {
		return nil, ops.WithExitCode(ops.ExitConfig, fmt.Errorf("topic %s: %w", topic.Topic, err))
	}
	return d, nil
}
