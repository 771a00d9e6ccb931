package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"holdfast/test/felderasim"
	"holdfast/test/harness"
)

// sinkCases runs cases against one real broker, each with a topic, a group and
// a pipeline of its own.
func sinkCases(t *testing.T, kafka *harness.Kafka, cases map[string]func(*sinkWorld)) {
	t.Helper()
	for name, run := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := &sinkWorld{t: t, kafka: kafka, sim: startSim(t, felderasim.Options{})}
			w.topic = "t-" + regexp.MustCompile(`[^a-z]+`).ReplaceAllString(strings.ToLower(name), "-")
			w.group = "g-" + w.topic
			if err := kafka.CreateTopic(t.Context(), w.topic, 3, nil); err != nil {
				t.Fatal(err)
			}
			run(w)
		})
	}
}

// TestKafkasinkPoison: what happens to records that cannot be delivered.
func TestKafkasinkPoison(t *testing.T) {
	t.Parallel()
	sinkCases(t, harness.NeedKafka(t, harness.KafkaOptions{}), map[string]func(*sinkWorld){
		"bad records go to a dead letter topic":        sinkDeadLetters,
		"without its dead letter topic it waits":       sinkDeadLetterTopicMissing,
		"a row that Feldera refuses stops its own":     sinkRefusedRowStopsOne,
		"too many bad records stop in spite of a skip": sinkBreaker,
	})
}

// refusing stands between kafkasink and the pipeline, and refuses every array
// that holds one of the words, as the pipeline's parser would.
func (w *sinkWorld) refusing(words ...string) string {
	w.t.Helper()
	target, err := url.Parse(w.sim.URL())
	if err != nil {
		w.t.Fatal(err)
	}
	pass := httputil.NewSingleHostReverseProxy(target)
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		if strings.Contains(r.URL.Path, "/ingress/") {
			for _, word := range words {
				if bytes.Contains(body, []byte(word)) {
					rw.Header().Set("Content-Type", "application/json")
					rw.WriteHeader(http.StatusBadRequest)
					_, _ = io.WriteString(rw, `{"message":"Errors parsing input data (1 errors)","error_code":"ParseErrors","details":{"num_errors":1,"errors":[{"description":"this row will not do"}]}}`)
					return
				}
			}
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		pass.ServeHTTP(rw, r)
	}))
	w.t.Cleanup(srv.Close)
	return srv.URL
}

// readTopic reads n records of a topic from its start.
func (w *sinkWorld) readTopic(topic string, n int) []*kgo.Record {
	w.t.Helper()
	client, err := w.kafka.Client(kgo.ConsumeTopics(topic))
	if err != nil {
		w.t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	var out []*kgo.Record
	for len(out) < n {
		out = append(out, client.PollFetches(ctx).Records()...)
		if ctx.Err() != nil {
			w.t.Fatalf("%d records in %s, want %d", len(out), topic, n)
		}
	}
	return out
}

func header(r *kgo.Record, key string) string {
	for _, h := range r.Headers {
		if h.Key == key {
			return string(h.Value)
		}
	}
	return ""
}

func sinkDeadLetters(w *sinkWorld) {
	t := w.t
	dlq := w.topic + "-dead"
	if err := w.kafka.CreateTopic(t.Context(), dlq, 1, nil); err != nil {
		t.Fatal(err)
	}
	w.start(map[string]string{"KAFKASINK_POISON": "dlq", "KAFKASINK_DLQ_TOPIC": dlq, "FELDERA_URL": w.refusing("unwanted")})
	w.produce(0, "1", order(1, "good"), "2", "not json", "3", order(3, "unwanted"), "4", order(4, "good"))
	w.produceOrders(1, 10, 60, "others")
	w.awaitCommitted(map[int32]int64{0: 4, 1: 50})
	w.wantOrders(52)
	letters := w.readTopic(dlq, 2)
	for i, want := range []struct{ key, value, offset, class, stage, message string }{
		{"2", "not json", "1", "malformed", "VALUE_CONVERTER", "JSON"},
		{"3", order(3, "unwanted"), "2", "rejected", "TASK_PUT", "this row will not do"},
	} {
		r := letters[i]
		if string(r.Key) != want.key || string(r.Value) != want.value || header(r, "__connect.errors.offset") != want.offset ||
			header(r, "__connect.errors.topic") != w.topic || header(r, "__connect.errors.exception.class.name") != want.class ||
			header(r, "__connect.errors.stage") != want.stage || !strings.Contains(header(r, "__connect.errors.exception.message"), want.message) {
			t.Errorf("dead letter %d: %s=%s %v", i, r.Key, r.Value, r.Headers)
		}
	}
}

func sinkDeadLetterTopicMissing(w *sinkWorld) {
	t := w.t
	dlq := w.topic + "-dead"
	d := w.start(map[string]string{"KAFKASINK_POISON": "dlq", "KAFKASINK_DLQ_TOPIC": dlq})
	w.produce(0, "1", order(1, "good"), "2", "not json", "4", order(4, "good"))
	w.produceOrders(1, 10, 20, "others")
	w.awaitCommitted(map[int32]int64{0: 1, 1: 10})
	waitCheck(t, d, "partitions", func(c check) bool {
		return !c.OK && strings.Contains(c.Message, dlq) && strings.Contains(c.Message, w.topic+"[0]")
	})
	if err := w.kafka.CreateTopic(t.Context(), dlq, 1, nil); err != nil {
		t.Fatal(err)
	}
	w.awaitCommitted(map[int32]int64{0: 3, 1: 10})
	w.readTopic(dlq, 1)
	waitHealthy(t, d)
}

func sinkRefusedRowStopsOne(w *sinkWorld) {
	t := w.t
	d := w.start(map[string]string{"FELDERA_URL": w.refusing("unwanted")})
	w.produceOrders(0, 0, 20, "a")
	w.produce(0, "20", order(20, "unwanted"), "21", order(21, "after"))
	w.produceOrders(1, 100, 140, "b")
	w.awaitCommitted(map[int32]int64{0: 20, 1: 40})
	w.produceOrders(1, 140, 180, "b")
	w.awaitCommitted(map[int32]int64{0: 20, 1: 80})
	w.wantOrders(100)
	waitCheck(t, d, "partitions", func(c check) bool {
		return !c.OK && strings.Contains(c.Message, fmt.Sprintf("%s[0]@20", w.topic)) && strings.Contains(c.Message, "this row will not do")
	})
}

func sinkBreaker(w *sinkWorld) {
	t := w.t
	d := w.start(map[string]string{"KAFKASINK_POISON": "skip", "KAFKASINK_POISON_LIMIT": "3"})
	w.produce(0, "1", "bad", "2", order(2, "good"), "3", "bad", "4", "bad", "5", order(5, "good"), "6", "bad", "7", order(7, "late"))
	w.produceOrders(1, 10, 20, "others")
	w.awaitCommitted(map[int32]int64{0: 5, 1: 10})
	waitCheck(t, d, "partitions", func(c check) bool { return !c.OK && strings.Contains(c.Message, "KAFKASINK_POISON_LIMIT") })
	w.wantOrders(12)
}

// check is one named check of /healthz.
type check struct {
	Name    string `json:"name"`
	OK      bool   `json:"ok"`
	Message string `json:"message"`
	Hint    string `json:"hint"`
}

// waitCheck waits until a check of /healthz is as wanted.
func waitCheck(t *testing.T, d *harness.Daemon, name string, want func(check) bool) {
	t.Helper()
	harness.Await(t, patience+30*time.Second, "check "+name, func(ctx context.Context) (any, bool) {
		_, body, err := d.Health(ctx)
		if err != nil {
			return err, false
		}
		var page struct {
			Checks []check `json:"checks"`
		}
		if err := json.Unmarshal(body, &page); err != nil {
			return err, false
		}
		for _, c := range page.Checks {
			if c.Name == name {
				return c, want(c)
			}
		}
		return string(body), false
	})
}
