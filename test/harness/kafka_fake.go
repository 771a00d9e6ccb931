package harness

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
)

// FakeKafkaOptions says what an in-process broker starts with.
type FakeKafkaOptions struct {
	// Topics gives the number of partitions of the topics that exist at once.
	Topics map[string]int32
	// Brokers is the number of brokers; 0 is 1.
	Brokers int
	// DataDir, if not empty, keeps the data over a restart with the same folder.
	DataDir string
	// Fake are further options of kfake: SASL, TLS, faults, logger.
	Fake []kfake.Opt
}

// FakeKafka is franz-go's in-process broker on 127.0.0.1, on ports of its own
// that stay the same over [FakeKafka.Restart]. Its Cluster takes faults.
type FakeKafka struct {
	Brokers
	Cluster *kfake.Cluster

	opts     []kfake.Opt
	releases []func()
}

// StartFakeKafka starts an in-process broker. The caller must Close it.
func StartFakeKafka(opts FakeKafkaOptions) (*FakeKafka, error) {
	f := &FakeKafka{}
	var ports []int
	for range max(opts.Brokers, 1) {
		port, release, err := ReservePort()
		if err != nil {
			f.free()
			return nil, err
		}
		ports, f.releases = append(ports, port), append(f.releases, release)
		f.Seeds = append(f.Seeds, loopback(port))
	}
	f.opts = []kfake.Opt{kfake.Ports(ports...), kfake.GroupMinSessionTimeout(100 * time.Millisecond)}
	for topic, partitions := range opts.Topics {
		f.opts = append(f.opts, kfake.SeedTopics(partitions, topic))
	}
	if opts.DataDir != "" {
		f.opts = append(f.opts, kfake.DataDir(opts.DataDir), kfake.SyncWrites())
	}
	f.opts = append(f.opts, opts.Fake...)
	if err := f.start(); err != nil {
		f.free()
		return nil, err
	}
	return f, nil
}

// NeedFakeKafka is [StartFakeKafka] for tests: it fails the test when the broker
// does not start and closes it at the end.
func NeedFakeKafka(tb testing.TB, opts FakeKafkaOptions) *FakeKafka {
	tb.Helper()
	f, err := StartFakeKafka(opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(f.Close)
	return f
}

func (f *FakeKafka) start() error {
	cluster, err := kfake.NewCluster(f.opts...)
	if err != nil {
		return fmt.Errorf("start in-process Kafka: %w", err)
	}
	f.Cluster = cluster
	return nil
}

// Stop stops the brokers; ports stay reserved, and data stays if there is a
// data folder.
func (f *FakeKafka) Stop() {
	if f.Cluster != nil {
		f.Cluster.Close()
		f.Cluster = nil
	}
}

// Restart is Stop and a start with the same options and ports. Faults set on the
// old Cluster are gone.
func (f *FakeKafka) Restart() error {
	if f.releases == nil {
		return errors.New("restart in-process Kafka: it was closed")
	}
	f.Stop()
	return f.start()
}

// Close stops the brokers and gives their ports back.
func (f *FakeKafka) Close() {
	f.Stop()
	f.free()
}

func (f *FakeKafka) free() {
	for _, release := range f.releases {
		release()
	}
	f.releases = nil
}
