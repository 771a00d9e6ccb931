package harness

import (
	"archive/zip"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
)

// KafkaOptions says how a private broker differs from the usual one.
type KafkaOptions struct {
	// Settings win over the harness's own broker settings, by Kafka's names.
	Settings map[string]string
	// Listeners gives further listeners, of a security protocol each, by names
	// of their own. [Kafka.Listener] gives their addresses.
	Listeners map[string]string
	// Through gives proxies by listener name: clients of the listener are sent
	// through its proxy.
	Through map[string]*Proxy
	// Scram gives users that exist from the start: the values of the format
	// tool's --add-scram.
	Scram []string
	// Join makes this a further broker of the other one's cluster, which has
	// its controller. NodeID is its number, from 2.
	Join   *Kafka
	NodeID int
}

// Kafka is a real Apache Kafka broker, controller and broker in one process
// (KRaft), with its own folder and its own ports on 127.0.0.1. Topics are not
// made by use. Methods are safe for concurrent use, except those that start and
// stop.
type Kafka struct {
	Brokers

	files     kafkaFiles
	listeners map[string]string
	cluster   string // the cluster's id, by which another broker joins
	voters    string
	dir       string // holds the log folder and the two configuration files
	releases  []func()
	log       *Log
	proc      *Process // nil while stopped
}

const (
	kafkaMain    = "kafka.Kafka"
	kafkaArchive = "classes.jsa"
)

// kafkaStarted is what a broker logs last when it has started.
var kafkaStarted = regexp.MustCompile(`Kafka Server started`)

// StartKafka formats a new log folder, starts a broker on it and waits until it
// answers. The caller must Close it.
func StartKafka(ctx context.Context, opts KafkaOptions) (*Kafka, error) {
	ctx, cancel := withDefaultTimeout(ctx, 5*time.Minute) // the first run of a machine fetches the jars
	defer cancel()
	files, err := kafkaCache(ctx)
	if err != nil {
		return nil, err
	}
	k, err := newKafka(ctx, files, opts)
	if err != nil {
		return nil, err
	}
	if err := k.Start(ctx); err != nil {
		return nil, errors.Join(err, k.Close())
	}
	return k, nil
}

// NeedKafka is [StartKafka] for tests: it fails the test when the broker does not
// start, closes it at the end, and shows its log when the test failed.
func NeedKafka(tb testing.TB, opts KafkaOptions) *Kafka {
	tb.Helper()
	k, err := StartKafka(tb.Context(), opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := k.Close(); err != nil {
			tb.Errorf("close Kafka: %v", err)
		}
		showLog(tb, "kafka", k.log)
	})
	return k
}

// newKafka makes the folder of a broker that has not been started.
func newKafka(ctx context.Context, files kafkaFiles, opts KafkaOptions) (*Kafka, error) {
	dir, err := os.MkdirTemp("", "hf-kafka-")
	if err != nil {
		return nil, fmt.Errorf("make temporary folder: %w", err)
	}
	k := &Kafka{files: files, dir: dir, log: newLog()}
	if err := k.prepare(ctx, opts); err != nil {
		return nil, errors.Join(err, k.Close())
	}
	return k, nil
}

// prepare reserves the ports, writes the configuration and formats the folder.
func (k *Kafka) prepare(ctx context.Context, opts KafkaOptions) error {
	var ports [2]string
	for i := range ports {
		port, release, err := ReservePort()
		if err != nil {
			return err
		}
		ports[i], k.releases = loopback(port), append(k.releases, release)
	}
	k.Seeds = []string{ports[0]}
	settings := map[string]string{
		"process.roles":                                    "broker,controller",
		"node.id":                                          "1",
		"controller.quorum.voters":                         "1@" + ports[1],
		"listeners":                                        "PLAINTEXT://" + ports[0] + ",CONTROLLER://" + ports[1],
		"advertised.listeners":                             "PLAINTEXT://" + ports[0],
		"listener.security.protocol.map":                   "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
		"inter.broker.listener.name":                       "PLAINTEXT",
		"controller.listener.names":                        "CONTROLLER",
		"log.dirs":                                         filepath.Join(k.dir, "logs"),
		"num.partitions":                                   "4",
		"offsets.topic.num.partitions":                     "4",
		"offsets.topic.replication.factor":                 "1",
		"transaction.state.log.num.partitions":             "4",
		"transaction.state.log.replication.factor":         "1",
		"transaction.state.log.min.isr":                    "1",
		"share.coordinator.state.topic.replication.factor": "1",
		"share.coordinator.state.topic.min.isr":            "1",
		"group.initial.rebalance.delay.ms":                 "0",
		"group.min.session.timeout.ms":                     "1000",
		// A broker that was killed is let in again when its old session has ended:
		// 3 s instead of 9, still enough for a busy machine.
		"broker.session.timeout.ms":       "3000",
		"broker.heartbeat.interval.ms":    "500",
		"log.retention.check.interval.ms": "2000",
		"auto.create.topics.enable":       "false",
	}
	k.voters = settings["controller.quorum.voters"]
	if opts.Join != nil {
		k.voters = opts.Join.voters
		settings["process.roles"], settings["node.id"] = "broker", strconv.Itoa(opts.NodeID)
		settings["controller.quorum.voters"], settings["listeners"] = k.voters, "PLAINTEXT://"+ports[0]
	}
	k.listeners = make(map[string]string)
	for _, name := range slices.Sorted(maps.Keys(opts.Listeners)) {
		port, release, err := ReservePort()
		if err != nil {
			return err
		}
		k.releases = append(k.releases, release)
		k.listeners[name] = loopback(port)
		settings["listeners"] += "," + name + "://" + loopback(port)
		advertised := loopback(port)
		if proxy := opts.Through[name]; proxy != nil {
			proxy.SetTarget(advertised)
			advertised = proxy.Addr()
		}
		settings["advertised.listeners"] += "," + name + "://" + advertised
		settings["listener.security.protocol.map"] += "," + name + ":" + opts.Listeners[name]
	}
	maps.Copy(settings, opts.Settings)
	var conf strings.Builder
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&conf, "%s=%s\n", name, settings[name])
	}
	if err := os.WriteFile(k.conf(), []byte(conf.String()), 0o600); err != nil {
		return fmt.Errorf("write broker configuration: %w", err)
	}
	if err := os.WriteFile(k.logging(), []byte(kafkaLogging), 0o600); err != nil {
		return fmt.Errorf("write logging configuration: %w", err)
	}
	tool, err := storageTool(k.files.lib)
	if err != nil {
		return err
	}
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	id[0] &= 0x7f           // an id must not begin with "-"
	k.cluster = base64.RawURLEncoding.EncodeToString(id[:])
	if opts.Join != nil {
		k.cluster = opts.Join.cluster
	}
	format := []string{"format", "--cluster-id", k.cluster, "--config", k.conf()}
	for _, user := range opts.Scram {
		format = append(format, "--add-scram", user)
	}
	_, err = output(ctx, k.java(tool, nil, format...))
	if err != nil {
		return fmt.Errorf("format the broker's folder: %w", err)
	}
	return nil
}

func (k *Kafka) conf() string    { return filepath.Join(k.dir, "server.properties") }
func (k *Kafka) logging() string { return filepath.Join(k.dir, "log4j2.properties") }

// kafkaLogging sends the broker's log to stdout: without a configuration of its
// own log4j shows errors only, and the line that says "started" is none.
const kafkaLogging = `status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1} %m%n
rootLogger.level = info
rootLogger.appenderRef.out.ref = out
`

// java gives how to run a class of the jars. The first compiler only and the
// simplest collector: these processes live for seconds on two shared cores.
func (k *Kafka) java(class string, flags []string, args ...string) processSpec {
	all := []string{
		"-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xms128m", "-Xmx384m", "-Xshare:auto",
		"-Dlog4j2.configurationFile=" + k.logging(),
	}
	if k.files.archive != "" && fileExists(k.files.archive) {
		all = append(all, "-XX:SharedArchiveFile="+k.files.archive)
	}
	all = append(append(all, flags...), "-cp", filepath.Join(k.files.lib, "*"), class)
	return processSpec{
		name: "java " + class, path: "java", args: append(all, args...),
		env: serverEnv(), dir: k.dir, onLoss: syscall.SIGKILL,
	}
}

// Start starts a broker that was stopped, on the same ports and folder, and
// waits until it answers.
func (k *Kafka) Start(ctx context.Context) error { return k.start(ctx, nil) }

func (k *Kafka) start(ctx context.Context, flags []string) error {
	if k.proc != nil {
		return errors.New("start Kafka: it runs already")
	}
	ctx, cancel := withDefaultTimeout(ctx, 2*time.Minute)
	defer cancel()
	mark := k.log.Mark()
	proc, err := startProcess(k.java(kafkaMain, flags, k.conf()), k.log)
	if err != nil {
		return err
	}
	k.proc = proc
	if _, err := k.log.WaitSince(ctx, mark, kafkaStarted); err != nil {
		k.Kill()
		return fmt.Errorf("start Kafka: %w", err)
	}
	err = k.admin(func(adm *kadm.Client) error {
		return Eventually(ctx, "an answer of Kafka", func(ctx context.Context) (any, bool) {
			_, err := adm.ApiVersions(ctx)
			return err, err == nil
		})
	})
	if err != nil {
		k.Kill()
		return fmt.Errorf("start Kafka: %w", err)
	}
	return nil
}

// Stop asks the broker to stop in order, and waits until it is gone. One that is
// stopped already is no error.
func (k *Kafka) Stop() error {
	if k.proc == nil {
		return nil
	}
	proc := k.proc
	k.proc = nil
	return proc.stop(syscall.SIGTERM)
}

// Kill ends the broker as a crash does, and waits until it is gone.
func (k *Kafka) Kill() {
	if k.proc != nil {
		k.proc.Kill()
		k.proc = nil
	}
}

// Restart is Stop and Start.
func (k *Kafka) Restart(ctx context.Context) error {
	return errors.Join(k.Stop(), k.Start(ctx))
}

// Close ends the broker at once, waits until it is gone and removes its folder.
// It may be called twice.
func (k *Kafka) Close() error {
	k.Kill()
	for _, release := range k.releases {
		release()
	}
	k.releases = nil
	return os.RemoveAll(k.dir)
}

// Listener gives the address of a listener by its name in the options.
func (k *Kafka) Listener(name string) string { return k.listeners[name] }

// Log gives what the broker has written, over restarts.
func (k *Kafka) Log() *Log { return k.log }

// kafkaFiles says where a broker's jars are, and the class archive that halves
// the time a JVM needs to start one.
type kafkaFiles struct {
	lib     string // folder of the jars
	archive string // may not exist: then a JVM starts without it
}

// kafkaCache gives the jars that test/kafka/pom.xml names, from the cache or
// through Maven with the machine's own settings, and the archive. The folders'
// names have the hash of the pom, and the archive's that of the JVM too, so no
// two versions mix.
func kafkaCache(ctx context.Context) (kafkaFiles, error) {
	java, err := exec.LookPath("java")
	if err != nil {
		return kafkaFiles{}, fmt.Errorf("find java, which Kafka needs (17 or newer): %w; run test/setup.sh (Debian: apt-get install openjdk-17-jre-headless)", err)
	}
	root, err := ModuleRoot()
	if err != nil {
		return kafkaFiles{}, err
	}
	pom := filepath.Join(root, "test", "kafka", "pom.xml")
	text, err := os.ReadFile(pom)
	if err != nil {
		return kafkaFiles{}, fmt.Errorf("read the list of Kafka's jars: %w", err)
	}
	name := "kafka-" + shortHash(string(text))
	jars, err := cached(ctx, name, func(dir string) error { return fetchKafkaJars(ctx, pom, dir) })
	if err != nil {
		return kafkaFiles{}, err
	}
	version, err := output(ctx, processSpec{name: "java -version", path: java, args: []string{"-version"}})
	if err != nil {
		return kafkaFiles{}, err
	}
	classes, err := cached(ctx, name+"-classes-"+shortHash(version), func(dir string) error {
		return archiveKafkaClasses(ctx, kafkaFiles{lib: jars, archive: filepath.Join(dir, kafkaArchive)})
	})
	if err != nil {
		return kafkaFiles{}, err
	}
	return kafkaFiles{lib: jars, archive: filepath.Join(classes, kafkaArchive)}, nil
}

func shortHash(text string) string {
	hash := sha256.Sum256([]byte(text))
	return hex.EncodeToString(hash[:6])
}

func fetchKafkaJars(ctx context.Context, pom, dir string) error {
	if _, err := exec.LookPath("mvn"); err != nil {
		return fmt.Errorf("find mvn, which fetches Kafka's jars: %w; run test/setup.sh (Debian: apt-get install maven)", err)
	}
	_, err := output(ctx, processSpec{
		name: "mvn copy-dependencies", path: "mvn", env: os.Environ(),
		args: []string{
			"-B", "-q", "-f", pom, "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies",
			"-DincludeScope=runtime", "-DoutputDirectory=" + dir,
		},
	})
	if err != nil {
		return fmt.Errorf("fetch Kafka's jars: %w", err)
	}
	return nil
}

// archiveKafkaClasses starts and stops a broker, and lets the JVM write at its
// exit the classes that it had loaded. The archive names the jars by their path,
// so it is made when they are at their final one.
func archiveKafkaClasses(ctx context.Context, files kafkaFiles) error {
	k, err := newKafka(ctx, kafkaFiles{lib: files.lib}, KafkaOptions{})
	if err != nil {
		return err
	}
	err = k.start(ctx, []string{"-XX:ArchiveClassesAtExit=" + files.archive})
	if err == nil {
		err = k.Stop()
	}
	if err := errors.Join(err, k.Close()); err != nil {
		return fmt.Errorf("archive Kafka's classes: %w", err)
	}
	return nil
}

// storageTool finds the class that formats a log folder: it has moved between
// Kafka's packages, and may again.
func storageTool(lib string) (string, error) {
	for _, pattern := range []string{"kafka_2.13-*.jar", "kafka-tools-*.jar"} {
		jars, err := filepath.Glob(filepath.Join(lib, pattern))
		if err != nil {
			return "", fmt.Errorf("look for Kafka's jars: %w", err)
		}
		for _, jar := range jars {
			r, err := zip.OpenReader(jar)
			if err != nil {
				return "", fmt.Errorf("open %s: %w", jar, err)
			}
			for _, f := range r.File {
				class, ok := strings.CutSuffix(f.Name, ".class")
				if ok && strings.HasSuffix(class, "kafka/tools/StorageTool") {
					return strings.ReplaceAll(class, "/", "."), r.Close()
				}
			}
			if err := r.Close(); err != nil {
				return "", fmt.Errorf("close %s: %w", jar, err)
			}
		}
	}
	return "", fmt.Errorf("find StorageTool in the jars of %s: none has it; delete that folder and run again", lib)
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
