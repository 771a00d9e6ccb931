package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

const (
	slot       = "holdfast"
	group      = "holdfast"
	topic      = "orders"
	pipeline   = "shop"
	partitions = 3

	// What the demo sets lower than the daemons' defaults, so that taking over
	// from a killed process takes seconds: see startWorld, which prints it.
	requestTimeout   = "2s"
	requestLifetime  = "3s"
	sessionTimeout   = "4s"
	drainTimeout     = "3s"
	rebalanceTimeout = "6s"
)

// program is the pipeline: two tables for the Postgres path, one for Kafka's.
const program = `
CREATE TABLE orders (
  id BIGINT NOT NULL PRIMARY KEY, customer VARCHAR NOT NULL, amount DECIMAL(12, 2) NOT NULL,
  status VARCHAR NOT NULL, note VARCHAR, placed TIMESTAMP NOT NULL
) WITH ('materialized' = 'true');
CREATE TABLE order_items (
  order_id BIGINT NOT NULL, line INT NOT NULL, sku VARCHAR NOT NULL, quantity INT NOT NULL,
  price DECIMAL(12, 2) NOT NULL, PRIMARY KEY (order_id, line)
) WITH ('materialized' = 'true');
CREATE TABLE web_orders (
  id BIGINT NOT NULL PRIMARY KEY, customer VARCHAR NOT NULL, amount DECIMAL(12, 2) NOT NULL,
  status VARCHAR NOT NULL, note VARCHAR, placed TIMESTAMP NOT NULL
) WITH ('materialized' = 'true');
`

// sourceTables are the two tables in Postgres; one transaction spans both.
const sourceTables = `
CREATE TABLE orders (
  id bigint PRIMARY KEY, customer text NOT NULL, amount numeric(12, 2) NOT NULL,
  status text NOT NULL, note text, placed timestamp NOT NULL);
CREATE TABLE order_items (
  order_id bigint, line int, sku text NOT NULL, quantity int NOT NULL,
  price numeric(12, 2) NOT NULL, PRIMARY KEY (order_id, line));
`

// world is everything that runs. A field is nil until it has been started.
type world struct {
	say       *printer
	dir       string // the broker's data
	pg        *harness.Postgres
	broker    *harness.FakeKafka
	sim       *felderasim.Sim
	traffic   *traffic
	pgsource  *harness.Daemon
	kafkasink *harness.Daemon
}

// startWorld starts the servers, then both daemons, and waits until these call
// themselves healthy. What it returns must be closed, also beside an error.
func startWorld(ctx context.Context, say *printer) (*world, error) {
	w := &world{say: say}
	say.line("demo", "building both daemons")
	programs := map[string]string{}
	for _, name := range []string{"pgsource", "kafkasink"} {
		path, err := harness.Build(ctx, "./cmd/"+name, harness.BuildOptions{})
		if err != nil {
			return w, err
		}
		programs[name] = path
	}
	if err := w.startServers(ctx); err != nil {
		return w, err
	}
	var err error
	if w.traffic, err = newTraffic(ctx, w); err != nil {
		return w, err
	}
	say.line("demo", "FELDERA_REQUEST_LIFETIME is lowered to %s and KAFKASINK_SESSION_TIMEOUT to %s, so that taking over from a\nkilled kafkasink takes seconds; the defaults are 30s and 45s, and a real pipeline needs the first of them", requestLifetime, sessionTimeout)
	return w, w.startDaemons(ctx, programs)
}

func (w *world) startServers(ctx context.Context) error {
	var err error
	if w.pg, err = harness.StartPostgres(ctx, harness.PostgresOptions{}); err != nil {
		return err
	}
	if err := w.pg.Exec(ctx, sourceTables); err != nil {
		return fmt.Errorf("create the source tables: %w", err)
	}
	w.say.line("postgres", "%s on %s, tables orders and order_items", w.pg.Version, w.pg.Addr())
	if w.dir, err = os.MkdirTemp("", "hf-demo-"); err != nil {
		return fmt.Errorf("make a folder for the broker: %w", err)
	}
	w.broker, err = harness.StartFakeKafka(harness.FakeKafkaOptions{Topics: map[string]int32{topic: partitions}, DataDir: w.dir})
	if err != nil {
		return err
	}
	w.say.line("kafka", "kfake on %s, topic %s with %d partitions", w.broker.Seeds[0], topic, partitions)
	w.sim, err = felderasim.New(felderasim.Options{SQL: program, Pipeline: pipeline, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	if err := w.sim.Start(ctx); err != nil {
		return err
	}
	w.say.line("feldera", "simulated on %s, pipeline %s with tables orders, order_items and web_orders", w.sim.URL(), pipeline)
	return nil
}

func (w *world) startDaemons(ctx context.Context, programs map[string]string) error {
	feldera := map[string]string{
		"FELDERA_URL": w.sim.URL(), "FELDERA_PIPELINE": pipeline,
		"FELDERA_REQUEST_TIMEOUT": requestTimeout, "FELDERA_REQUEST_LIFETIME": requestLifetime,
	}
	start := func(name, listen string, env map[string]string) (*harness.Daemon, error) {
		for k, v := range feldera {
			env[k] = v
		}
		return harness.StartDaemon(harness.DaemonOptions{Program: programs[name], Env: env, ListenVar: listen})
	}
	var err error
	w.pgsource, err = start("pgsource", "PGSOURCE_LISTEN", map[string]string{
		"PGSOURCE_DSN": w.pg.DSN(), "PGSOURCE_TABLES": "public.orders,public.order_items",
		"PGSOURCE_SLOT": slot, "PGSOURCE_CREATE": "true", "PGSOURCE_STATE": "file:" + filepath.Join(w.pg.Dir(), "pgsource.json"),
	})
	if err != nil {
		return err
	}
	w.kafkasink, err = start("kafkasink", "KAFKASINK_LISTEN", map[string]string{
		"KAFKASINK_BROKERS": w.broker.Seeds[0], "KAFKASINK_TOPICS": topic + "=web_orders:json", "KAFKASINK_GROUP": group,
		"KAFKASINK_SESSION_TIMEOUT": sessionTimeout, "KAFKASINK_DRAIN_TIMEOUT": drainTimeout, "KAFKASINK_REBALANCE_TIMEOUT": rebalanceTimeout,
	})
	if err != nil {
		return err
	}
	for _, d := range w.daemons() {
		if err := w.healthy(ctx, d.name, d.Daemon); err != nil {
			return err
		}
	}
	return nil
}

// daemon is one of the two with its name.
type daemon struct {
	name string
	*harness.Daemon
}

func (w *world) daemons() []daemon {
	return []daemon{{"pgsource", w.pgsource}, {"kafkasink", w.kafkasink}}
}

func (w *world) healthy(ctx context.Context, name string, d *harness.Daemon) error {
	ctx, cancel := context.WithTimeout(ctx, 40*time.Second)
	defer cancel()
	if err := d.WaitHealthy(ctx); err != nil {
		return err
	}
	w.say.line(name, "process %d is healthy, http://%s/healthz", d.Pid(), d.Addr())
	return nil
}

// acknowledged is what the sources themselves hold as acknowledged, read back
// from them and not from the daemons.
type acknowledged struct {
	lsn     uint64
	offsets map[int32]int64 // what the group has committed, 0 where nothing
}

func (w *world) acknowledged(ctx context.Context) (acknowledged, error) {
	lsn, err := w.pg.ConfirmedFlushLSN(ctx, slot)
	if err != nil {
		return acknowledged{}, err
	}
	committed, err := w.broker.CommittedOffsets(ctx, group)
	if err != nil {
		return acknowledged{}, err
	}
	offsets := make(map[int32]int64, partitions)
	for p := range int32(partitions) {
		offsets[p] = committed[topic][p]
	}
	return acknowledged{lsn: lsn, offsets: offsets}, nil
}

func (a acknowledged) records() int64 {
	n := int64(0)
	for _, o := range a.offsets {
		n += o
	}
	return n
}

// awaitAcknowledged waits until the server confirms the WAL up to its end and
// the group has committed up to the end of every partition.
func (w *world) awaitAcknowledged(ctx context.Context) error {
	lsn, err := w.pg.CurrentLSN(ctx)
	if err != nil {
		return err
	}
	ends, err := w.broker.EndOffsets(ctx, topic)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 45*time.Second)
	defer cancel()
	what := fmt.Sprintf("confirmed_flush_lsn to reach %s and the committed offsets to reach %s", decode.FormatLSN(lsn), offsetsText(ends))
	return harness.Eventually(ctx, what, func(ctx context.Context) (any, bool) {
		got, err := w.acknowledged(ctx)
		if err != nil {
			return err, false
		}
		done := got.lsn >= lsn
		for p, end := range ends {
			done = done && got.offsets[p] >= end
		}
		return decode.FormatLSN(got.lsn) + ", " + offsetsText(got.offsets), done
	})
}

// stopDaemons stops both as a service manager does, and wants the exit code 0.
func (w *world) stopDaemons(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for _, d := range w.daemons() {
		if err := d.Terminate(); err != nil {
			return err
		}
	}
	for _, d := range w.daemons() {
		code, err := d.Wait(ctx)
		if err != nil {
			return err
		}
		if code != 0 {
			return fmt.Errorf("%s ended with code %d after SIGTERM, not with 0; its last lines:\n%s", d.name, code, lastLines(d.Daemon))
		}
		w.say.line(d.name, "stopped in order on SIGTERM, exit code 0")
	}
	return nil
}

// close ends and removes everything, in the reverse order of the start. It also
// runs after Ctrl-C, so its ctx must not be the one that this ends; each part
// bounds itself.
func (w *world) close(ctx context.Context) error {
	for _, d := range w.daemons() {
		if d.Daemon != nil {
			d.Close()
		}
	}
	var errs []error
	keep := func(c io.Closer) { errs = append(errs, c.Close()) }
	if w.traffic != nil {
		errs = append(errs, w.traffic.close(ctx))
	}
	if w.sim != nil {
		keep(w.sim)
	}
	if w.broker != nil {
		w.broker.Close()
	}
	if w.dir != "" {
		errs = append(errs, os.RemoveAll(w.dir))
	}
	if w.pg != nil {
		keep(w.pg)
	}
	return errors.Join(errs...)
}
