package e2e

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/test/harness"
)

// TestKafkasinkMembership: what members of one group do to each other, on a
// real coordinator.
func TestKafkasinkMembership(t *testing.T) {
	t.Parallel()
	kafka := harness.NeedKafka(t, harness.KafkaOptions{Settings: map[string]string{
		"group.consumer.min.session.timeout.ms": "3000", "group.consumer.session.timeout.ms": "6000",
		"group.consumer.min.heartbeat.interval.ms": "500", "group.consumer.heartbeat.interval.ms": "500",
	}})
	sinkCases(t, kafka, map[string]func(*sinkWorld){
		"late evidence of an old owner":         sinkStaleCompletion,
		"the brokers assign":                    sinkServerSide,
		"a static member keeps its partitions":  sinkStaticMember,
		"two with one instance id":              sinkTwoWithOneID,
		"a member that leaves without draining": sinkAbandons,
	})
}

// gate stands between a member and the pipeline and can hold back the answers
// about completion.
func (w *sinkWorld) gate() (address string, held *atomic.Bool) {
	w.t.Helper()
	target, err := url.Parse(w.sim.URL())
	if err != nil {
		w.t.Fatal(err)
	}
	held = new(atomic.Bool)
	pass := httputil.NewSingleHostReverseProxy(target)
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if held.Load() && strings.Contains(r.URL.Path, "completion_status") {
			rw.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		pass.ServeHTTP(rw, r)
	}))
	w.t.Cleanup(srv.Close)
	return srv.URL, held
}

// forward samples the committed offsets, from the outside, until stop is
// called, and fails the test when one goes back.
func (w *sinkWorld) forward() (stop func()) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		highest := map[int32]int64{}
		for ctx.Err() == nil {
			all, err := w.kafka.CommittedOffsets(ctx, w.group)
			if err != nil {
				continue
			}
			for p, o := range all[w.topic] {
				if o < highest[p] {
					w.t.Errorf("the committed offset of %s[%d] went back from %d to %d", w.topic, p, highest[p], o)
				}
				highest[p] = o
			}
		}
	}()
	return func() { cancel(); <-done }
}

func (w *sinkWorld) awaitShared(n float64, members ...*harness.Daemon) {
	w.t.Helper()
	harness.Await(w.t, patience, "the members share the partitions", func(ctx context.Context) (any, bool) {
		var each []float64
		sum, all := 0.0, true
		for _, m := range members {
			v, err := m.Metric(ctx, "kafkasink_assigned_partitions", nil)
			if err != nil {
				return err, false
			}
			each, sum, all = append(each, v), sum+v, all && v >= 1
		}
		return each, all && sum == n
	})
}

// The first owner's evidence for a partition arrives when the second owner has
// committed far above it. The broker would take the old offset: it fences the
// member, not the partition.
func sinkStaleCompletion(w *sinkWorld) {
	t := w.t
	address, held := w.gate()
	stop := w.forward()
	defer stop()
	first := w.start(map[string]string{"FELDERA_URL": address, "KAFKASINK_DRAIN_TIMEOUT": "500ms"})
	for p := range int32(3) {
		w.produceOrders(p, int(p)*1000, int(p)*1000+10, "first")
	}
	w.awaitCommitted(map[int32]int64{0: 10, 1: 10, 2: 10})
	held.Store(true)
	for p := range int32(3) {
		w.produceOrders(p, int(p)*1000+10, int(p)*1000+20, "in flight")
	}
	harness.Await(t, patience, "the first member has sent them", func(ctx context.Context) (any, bool) {
		v, err := first.Metric(ctx, "kafkasink_sent_rows_total", nil)
		return fmt.Sprint(v, err), v >= 60
	})
	second := w.start(nil)
	w.awaitShared(3, first, second)
	for p := range int32(3) {
		w.produceOrders(p, int(p)*1000+20, int(p)*1000+50, "second")
	}
	moved := int32(-1)
	harness.Await(t, patience, "the second member has committed above", func(ctx context.Context) (any, bool) {
		all, err := w.kafka.CommittedOffsets(ctx, w.group)
		for p, o := range all[w.topic] {
			if o == 50 {
				moved = p
			}
		}
		return fmt.Sprint(all, err), moved >= 0
	})
	held.Store(false) // now the old evidence comes
	w.awaitCommitted(map[int32]int64{0: 50, 1: 50, 2: 50})
	harness.Await(t, patience, "the late evidence is counted", func(ctx context.Context) (any, bool) {
		v, err := first.Metric(ctx, "kafkasink_late_evidence_records_total", map[string]string{"rung": "completed"})
		return fmt.Sprint(v, err), v >= 10
	})
	if v, err := first.Metric(t.Context(), "kafkasink_drains_total", map[string]string{"outcome": "deadline"}); err != nil || v < 1 {
		t.Errorf("drains by deadline: %v, %v", v, err)
	}
	w.wantOrders(150)
}

func sinkServerSide(w *sinkWorld) {
	stop := w.forward()
	defer stop()
	consumer := map[string]string{"KAFKASINK_GROUP_PROTOCOL": "consumer"}
	first := w.start(consumer)
	for p := range int32(3) {
		w.produceOrders(p, int(p)*1000, int(p)*1000+100, "first")
	}
	w.awaitCommitted(map[int32]int64{0: 100, 1: 100, 2: 100})
	if typ, err := w.kafka.GroupType(w.t.Context(), w.group); err != nil || !strings.EqualFold(typ, "consumer") {
		w.t.Errorf("the group is of type %q, %v", typ, err)
	}
	second := w.start(consumer)
	w.awaitShared(3, first, second)
	for p := range int32(3) {
		w.produceOrders(p, int(p)*1000+100, int(p)*1000+200, "both")
	}
	w.awaitCommitted(map[int32]int64{0: 200, 1: 200, 2: 200})
	first.Kill()
	for p := range int32(3) {
		w.produceOrders(p, int(p)*1000+200, int(p)*1000+300, "second")
	}
	w.awaitCommitted(map[int32]int64{0: 300, 1: 300, 2: 300})
	waitHealthy(w.t, second)
	w.wantOrders(900)
}

// A static member that is stopped and started again before its session has run
// out finds its partitions, and the other member gives none up.
func sinkStaticMember(w *sinkWorld) {
	t := w.t
	stop := w.forward()
	defer stop()
	id := func(id string) map[string]string {
		return map[string]string{"KAFKASINK_INSTANCE_ID": id, "KAFKASINK_SESSION_TIMEOUT": "25s"}
	}
	a, b := w.start(id("a")), w.start(id("b"))
	w.awaitShared(3, a, b)
	w.produceOrders(0, 0, 10, "x")
	w.produceOrders(1, 10, 20, "x")
	w.produceOrders(2, 20, 30, "x")
	w.awaitCommitted(map[int32]int64{0: 10, 1: 10, 2: 10})
	had, err := a.Metric(t.Context(), "kafkasink_assigned_partitions", nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := a.Terminate(); err != nil {
		t.Fatal(err)
	}
	if code, err := a.Wait(ctx); err != nil || code != 0 {
		t.Fatalf("it ended with %d, %v", code, err)
	}
	if err := a.Restart(nil); err != nil {
		t.Fatal(err)
	}
	w.awaitShared(3, a, b)
	w.produceOrders(0, 30, 40, "y")
	w.produceOrders(1, 40, 50, "y")
	w.produceOrders(2, 50, 60, "y")
	w.awaitCommitted(map[int32]int64{0: 20, 1: 20, 2: 20})
	if now, err := a.Metric(t.Context(), "kafkasink_assigned_partitions", nil); err != nil || now != had {
		t.Errorf("it has %v partitions again, had %v (%v)", now, had, err)
	}
	for _, line := range b.Log().Grep(regexp.MustCompile("partition given up")) {
		t.Errorf("the other member says %s", line)
	}
	w.wantOrders(60)
}

func sinkTwoWithOneID(w *sinkWorld) {
	t := w.t
	id := map[string]string{"KAFKASINK_INSTANCE_ID": "the-one"}
	first := w.start(id)
	w.awaitShared(3, first)
	second := w.start(id)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	code, err := first.Wait(ctx)
	if err != nil || code != 65 {
		t.Fatalf("the one that was put out ended with %d, %v", code, err)
	}
	if all := strings.Join(first.Log().Tail(20), "\n"); !strings.Contains(all, "KAFKASINK_INSTANCE_ID") {
		t.Errorf("it says\n%s", all)
	}
	w.produceOrders(0, 0, 10, "x")
	w.awaitCommitted(map[int32]int64{0: 10})
	waitHealthy(t, second)
}

// With the policy abandon a revocation waits for nothing; the next owner sends
// what was in flight again, after the life of a request.
func sinkAbandons(w *sinkWorld) {
	t := w.t
	address, held := w.gate()
	stop := w.forward()
	defer stop()
	first := w.start(map[string]string{"FELDERA_URL": address, "KAFKASINK_REVOKE": "abandon"})
	w.produceOrders(0, 0, 10, "a")
	w.produceOrders(1, 10, 20, "a")
	w.produceOrders(2, 20, 30, "a")
	w.awaitCommitted(map[int32]int64{0: 10, 1: 10, 2: 10})
	held.Store(true)
	for p := range int32(3) {
		w.produceOrders(p, 100+10*int(p), 110+10*int(p), "in flight")
	}
	harness.Await(t, patience, "they are sent", func(ctx context.Context) (any, bool) {
		v, err := first.Metric(ctx, "kafkasink_sent_rows_total", nil)
		return fmt.Sprint(v, err), v >= 60
	})
	began := time.Now()
	second := w.start(nil)
	w.awaitShared(3, first, second)
	if took := time.Since(began); took > 9*time.Second {
		t.Errorf("the hand-over took %v, as long as a drain", took)
	}
	harness.Await(t, patience, "the abandoned drain is counted", func(ctx context.Context) (any, bool) {
		v, err := first.Metric(ctx, "kafkasink_drains_total", map[string]string{"outcome": "abandoned"})
		return fmt.Sprint(v, err), v >= 1
	})
	held.Store(false)
	w.awaitCommitted(map[int32]int64{0: 20, 1: 20, 2: 20})
	w.wantOrders(60)
}
