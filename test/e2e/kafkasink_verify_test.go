package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"

	"holdfast/internal/feldera"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
	"holdfast/test/harness"
)

// TestKafkasinkVerify: what kafkasink verify finds, against a real broker, each
// finding by what makes it come about.
func TestKafkasinkVerify(t *testing.T) {
	t.Parallel()
	sinkCases(t, harness.NeedKafka(t, harness.KafkaOptions{}), map[string]func(*sinkWorld){
		"verified what agrees":                     verifyAgrees,
		"verified a pipeline that came back empty": verifyLost,
		"verified an owner that died":              verifyAhead,
		"verified retention":                       verifyRetention,
		"verified rows that are gone":              verifyGone,
		"verified a foreign owner":                 verifyForeign,
		"verified offsets that were set":           verifySet,
		"verified another table":                   verifyRemapped,
		"verified a group that is gone":            verifyCommitMissing,
		"verified at least once":                   verifyAtLeastOnce,
		"verified without its table":               verifyNoTable,
		"verified a topic made anew":               verifyRecreated,
		"verified rows with an identity":           verifyIdentity,
		"verified a row that nobody wrote":         verifyInvalidRow,
		"verified what is called wrong":            verifyMistakes,
	})
}

// verifiedGroup is the result of the verb as JSON.
type verifiedGroup struct {
	Agree, Undecided, Progress bool
	Members, Looks             int
	Findings                   []finding
	Partitions                 []struct {
		Topic                 string
		Partition             int32
		Committed, Held, Rows int64
		LogStart              int64 `json:"log_start"`
		LogEnd                int64 `json:"log_end"`
		Proven                bool
		TableRows             int64 `json:"table_rows"`
		Findings              []finding
	}
	Strays []struct {
		Lane, Topic string
		Position    uint64
	}
}

type finding struct {
	Name, Effect, Says, Do string
	From, To               int64
}

// verify runs the verb twice, for people and for machines, and gives what it
// found of partition 0.
func (w *sinkWorld) verify(changes map[string]string, code int, args ...string) (verifiedGroup, string) {
	w.t.Helper()
	args = append([]string{"verify", "-wait", "1s"}, args...)
	text := w.verb(changes, args...)
	says(w.t, text, code)
	args = append([]string{"verify", "-json"}, args[1:]...)
	r := w.verb(changes, args...)
	says(w.t, r, code)
	var out verifiedGroup
	if err := json.Unmarshal([]byte(r.Stdout), &out); err != nil {
		w.t.Fatalf("%v: %s", err, r.Stdout)
	}
	if out.Agree != (code == 0) || out.Undecided != (code == 69) {
		w.t.Errorf("code %d, and it says %+v", code, out)
	}
	return out, text.Stdout
}

// wantFound runs the verb and wants exactly one finding of partition 0.
func (w *sinkWorld) wantFound(changes map[string]string, code int, name string, from, to int64, text ...string) verifiedGroup {
	w.t.Helper()
	out, said := w.verify(changes, code)
	got := out.Partitions[0].Findings
	if len(got) != 1 || got[0].Name != name || got[0].From != from || got[0].To != to {
		w.t.Fatalf("found %+v, want %s from %d to %d", got, name, from, to)
	}
	for _, part := range append(text, name+" (") {
		if !strings.Contains(said, part) {
			w.t.Errorf("it does not say %q:\n%s", part, said)
		}
	}
	for _, p := range out.Partitions[1:] {
		if len(p.Findings) != 0 {
			w.t.Errorf("partition %d: %+v", p.Partition, p.Findings)
		}
	}
	return out
}

// setOffset commits as another program does. The group must be empty.
func (w *sinkWorld) setOffset(offset int64, note string) {
	w.t.Helper()
	if err := w.kafka.Commit(w.t.Context(), w.group, w.topic, 0, offset, note); err != nil {
		w.t.Fatal(err)
	}
}

func (w *sinkWorld) deleteRecords(below int64) {
	w.t.Helper()
	if err := w.kafka.DeleteRecords(w.t.Context(), w.topic, 0, below); err != nil {
		w.t.Fatal(err)
	}
}

func (w *sinkWorld) note() string {
	w.t.Helper()
	note, err := w.kafka.CommitMetadata(w.t.Context(), w.group, w.topic, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	return note
}

// It agrees beside a running kafkasink and without one, and takes part in
// nothing.
func verifyAgrees(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	d := w.begun(map[string]string{"KAFKASINK_DELIVERY": "effectively_once"})
	w.found(d, "fresh", 3)
	waitHealthy(t, d)
	sent, note := len(w.sim.Requests()), w.note()
	out, said := w.verify(nil, 0)
	if p := out.Partitions[0]; len(out.Partitions) != 3 || p.Committed != 10 || p.Held != 10 || !p.Proven || p.LogEnd != 10 || out.Members != 1 || !out.Progress {
		t.Errorf("%+v", out)
	}
	for _, part := range []string{"Stable, 1 members", "3 partitions: 0 differ, 0 not decided, 3 agree", "they agree"} {
		if !strings.Contains(said, part) {
			t.Errorf("it does not say %q:\n%s", part, said)
		}
	}
	if strings.Contains(said, "TOPIC") {
		t.Errorf("partitions in order have a line:\n%s", said)
	}
	if out, said := w.verify(nil, 0, "-all", w.topic+":1"); len(out.Partitions) != 1 || out.Partitions[0].Partition != 1 || !strings.Contains(said, "TOPIC") {
		t.Errorf("%+v\n%s", out, said)
	}
	if n := len(w.sim.Requests()); n != sent {
		t.Errorf("it sent %d requests to the pipeline's tables", n-sent)
	}
	if now := w.note(); now != note {
		t.Errorf("the commit was %s and is %s", note, now)
	}
	if n := sinkMetric(t, d, "kafkasink_rebalances_total"); n > 2 {
		t.Errorf("%v rebalances", n)
	}
	stop(t, d)
	w.verify(nil, 0)
	w.produceOrders(0, 10, 20, "b") // a lag is no difference
	w.verify(nil, 0)
}

func verifyLost(w *sinkWorld) {
	w.recorded(felderasim.Options{})
	stop(w.t, w.begun(nil))
	w.sim.Crash(core.KeepNothing)
	w.wantFound(nil, 65, "lost", 0, 10, "proves to hold none", "goes back to offset 0", "1 differ", "DIFFERENT")
	w.wantFound(map[string]string{"KAFKASINK_ON_DESTINATION_LOSS": "stop"}, 65, "lost", 0, 10, "offsets reset -to 0")
	w.deleteRecords(4)
	// The commit is above the log's start: nothing that was not committed is gone.
	w.wantFound(nil, 65, "lost", 0, 10, "Retention has taken offsets 0 to 3 (4 of them)")
	d := w.start(nil)
	w.found(d, "lost", 1)
	w.awaitCommitted(map[int32]int64{0: 10})
	waitCheck(w.t, d, "state", func(c check) bool { return !c.OK })
	w.wantFound(nil, 65, "gone", 0, 4, "deletes included", "load what is missing")
}

func verifyAhead(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{Edition: felderasim.Enterprise, Model: core.ModelExactlyOnce})
	stop(t, w.begun(nil))
	d := w.start(map[string]string{"KAFKASINK_COMMIT_INTERVAL": "1m"})
	w.produceOrders(0, 10, 20, "b")
	waitSim(t, w.sim, "the second rows have their progress row", func(v felderasim.View) bool {
		return v.Count("orders") == 20 && newestPosition(v.Rows(feldera.DefaultProgressTable)) == 20
	})
	w.verify(nil, 0) // what is about to be committed is in order while a member lives
	d.Kill()
	w.awaitMembers(0)
	out := w.wantFound(nil, 0, "ahead", 10, 20, "passes over")
	if p := out.Partitions[0]; p.Committed != 10 || p.Held != 20 || !p.Proven {
		t.Errorf("%+v", p)
	}
	// What was not committed is not lost by retention where the pipeline holds it.
	w.deleteRecords(17)
	w.wantFound(nil, 0, "ahead", 10, 20)
	// A pipeline that kept everything proves less than it has: its newest row could
	// have come later than the rows.
	w.sim.Crash(core.KeepJournal)
	w.wantFound(nil, 65, "below_log_start", 10, 17, "holds what lies below 20, and nothing proves it")
}

func (w *sinkWorld) awaitMembers(n int) {
	w.t.Helper()
	harness.Await(w.t, patience, fmt.Sprintf("the group has %d members", n), func(context.Context) (any, bool) {
		var shown struct{ Members int }
		r := w.verb(nil, "offsets", "show", "-json") //nolint:contextcheck // a verb runs under the test's own context
		err := json.Unmarshal([]byte(r.Stdout), &shown)
		return fmt.Sprint(shown, err), err == nil && shown.Members == n
	})
}

func verifyRetention(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	stop(t, w.begun(nil))
	w.produceOrders(0, 10, 30, "b")
	w.deleteRecords(25)
	w.wantFound(nil, 65, "below_log_start", 10, 25, "offsets 10 to 24 (15 of them)", "they are lost\n", "offsets reset -to 25")
	// A member may have read them before.
	d := w.start(map[string]string{"KAFKASINK_ON_REFUSAL": "wait"})
	waitCheck(t, d, "partitions", func(c check) bool { return !c.OK })
	w.wantFound(nil, 69, "below_log_start", 10, 25, "unless a member has read them", "not decided")
}

func verifyGone(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	d := w.losesBehindRetention()
	w.wantFound(nil, 65, "gone", 0, 15, "(15 of them)")
	stop(t, d)
	w.wantFound(nil, 65, "gone", 0, 15)
	says(t, w.verb(nil, "offsets", "reset", "-to", "25", "-yes", w.topic+":0"), 0)
	w.verify(nil, 0)
}

func verifyForeign(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	stop(t, w.begun(nil))
	old := w.note()
	d := w.start(nil)
	w.produceOrders(0, 10, 20, "b")
	w.awaitCommitted(map[int32]int64{0: 20})
	stop(t, d)
	w.setOffset(10, old)
	w.wantFound(nil, 65, "foreign_owner", 0, 0, "another owner has taken over", "stops this partition")
}

func verifySet(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{Edition: felderasim.Enterprise, Model: core.ModelExactlyOnce})
	stop(t, w.begun(nil))
	w.produceOrders(0, 10, 30, "b")
	// By the verb, which has told how many are passed over.
	says(t, w.verb(nil, "offsets", "reset", "-to", "4", "-yes", w.topic+":0"), 0)
	w.wantFound(nil, 0, "set_below_progress", 4, 10, "sends the records from there again")
	says(t, w.verb(nil, "offsets", "reset", "-to", "10", "-yes", w.topic+":0"), 0)
	w.verify(nil, 0)
	says(t, w.verb(nil, "offsets", "reset", "-to", "20", "-yes", w.topic+":0"), 0)
	w.wantFound(nil, 0, "set_above_progress", 10, 20, "set by kafkasink offsets reset")
	// By another program, which has told nobody.
	w.setOffset(25, "")
	w.wantFound(nil, 65, "set_above_progress", 10, 25, "passes over the 15 offsets between", "offsets reset -to 10")
	w.setOffset(3, "somebody's own text")
	w.wantFound(nil, 0, "set_below_progress", 3, 10)
	w.setOffset(99, "")
	out, _ := w.verify(nil, 65)
	if got := out.Partitions[0].Findings; len(got) != 2 || got[0].Name != "set_above_progress" || got[1].Name != "above_log_end" || got[1].From != 30 || got[1].To != 99 {
		t.Errorf("%+v", got)
	}
	// Where the newest row is not proven, nobody can tell what is between.
	says(t, w.verb(nil, "offsets", "reset", "-to", "10", "-yes", w.topic+":0"), 0)
	d := w.start(nil)
	w.awaitCommitted(map[int32]int64{0: 30})
	stop(t, d)
	w.verify(nil, 0)
	w.setOffset(30, "")
	w.verify(nil, 0)
	w.sim.Crash(core.KeepJournal)
	held := w.verifiedHeld()
	if held < 10 || held >= 30 {
		t.Errorf("the pipeline proves %d", held)
	}
	w.wantFound(nil, 69, "set_above_progress", held, 30, "of another incarnation")
}

// verifiedHeld gives what the pipeline proves to hold of partition 0.
func (w *sinkWorld) verifiedHeld() int64 {
	w.t.Helper()
	out, _ := w.verify(nil, 69)
	return out.Partitions[0].Held
}

func verifyRemapped(w *sinkWorld) {
	second := strings.ReplaceAll(program, "TABLE orders", "TABLE orders_too")
	w.recorded(felderasim.Options{SQL: program + second[:strings.Index(second, ";")+1] + "\n"})
	stop(w.t, w.begun(nil))
	w.verify(nil, 0)
	w.wantFound(map[string]string{"KAFKASINK_TOPICS": w.topic + "=orders_too:json"}, 65, "remapped", 0, 10, "only what is not committed yet", "correct KAFKASINK_TOPICS")
}

func verifyCommitMissing(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	out, _ := w.verify(nil, 69)
	if len(out.Findings) != 1 || out.Findings[0].Name != "no_commits" {
		t.Errorf("%+v", out)
	}
	stop(t, w.begun(nil))
	client, err := w.kafka.Client()
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := kadm.NewClient(client).DeleteGroup(t.Context(), w.group); err != nil {
		t.Fatal(err)
	}
	w.produceOrders(0, 10, 15, "b")
	named := func(start string, code int, from, to int64, text string) {
		t.Helper()
		out, said := w.verify(map[string]string{"KAFKASINK_START": start}, code, w.topic+":0")
		if got := out.Partitions[0].Findings; len(got) != 1 || got[0].Name != "commit_missing" || got[0].From != from || got[0].To != to || !strings.Contains(said, text) {
			t.Errorf("%s: %+v\n%s", start, got, said)
		}
	}
	named("earliest", 0, 0, 0, "reads the log from its start")
	named("latest", 65, 10, 15, "offsets reset -to 10")
	named("stop", 65, 0, 0, "stops the partition")
}

func verifyAtLeastOnce(w *sinkWorld) {
	once := map[string]string{"KAFKASINK_DELIVERY": "at_least_once"}
	// Without a table in the program.
	stop(w.t, w.begun(once))
	out, said := w.verify(nil, 0)
	if out.Progress || out.Partitions[0].Proven || !strings.Contains(said, "the progress table was not compared") {
		w.t.Errorf("%+v\n%s", out, said)
	}
	w.sim.Crash(core.KeepNothing)
	w.wantFound(nil, 69, "pipeline_restarted", 0, 10, "nobody can tell")
	// With one that nobody writes to.
	w.group += "-too"
	w.recorded(felderasim.Options{})
	d := w.start(once)
	w.awaitCommitted(map[int32]int64{0: 10})
	stop(w.t, d)
	w.wantFound(nil, 0, "unrecorded", 0, 10, "committed with at_least_once")
	w.setOffset(5, "")
	w.wantFound(nil, 0, "unrecorded", 0, 5, "by another program")
}

func verifyNoTable(w *sinkWorld) {
	w.recorded(felderasim.Options{})
	stop(w.t, w.begun(nil))
	w.wantFound(map[string]string{"KAFKASINK_PROGRESS_TABLE": "elsewhere"}, 69, "progress_table_missing", 0, 10, "KAFKASINK_PROGRESS_TABLE")
}

func verifyRecreated(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{})
	stop(t, w.begun(nil))
	before := w.note()
	w.recreate()
	w.produceOrders(0, 100, 130, "new")
	w.setOffset(10, before) // the broker has forgotten it; one that does not would have it
	out, _ := w.verify(nil, 65)
	if got := out.Partitions[0].Findings; len(got) != 1 || got[0].Name != "topic_recreated" || !strings.Contains(got[0].Do, "KAFKASINK_ON_GAP=continue") {
		t.Errorf("%+v", got)
	}
	if len(out.Strays) != 3 || out.Strays[0].Topic != "" {
		t.Errorf("%+v", out.Strays)
	}
	_, said := w.verify(nil, 65)
	if !strings.Contains(said, "no topic has this id") {
		t.Error(said)
	}
	// A topic that the group does not carry any more is named.
	other := w.topic + "-other"
	if err := w.kafka.CreateTopic(t.Context(), other, 1, nil); err != nil {
		t.Fatal(err)
	}
	d := w.start(map[string]string{"KAFKASINK_TOPICS": w.topic + "=orders:json," + other + "=orders:json", "KAFKASINK_ON_GAP": "continue"})
	w.awaitCommitted(map[int32]int64{0: 30})
	stop(t, d)
	out, said = w.verify(nil, 0)
	if len(out.Strays) != 4 || !strings.Contains(said, "it is topic "+other) {
		t.Errorf("%+v\n%s", out.Strays, said)
	}
}

// change sends one change to a table of the pipeline, as any client can.
func (w *sinkWorld) change(table, body string) {
	w.t.Helper()
	url := w.sim.URL() + "/v0/pipelines/p/ingress/" + table + "?format=json&update_format=insert_delete&array=true"
	req, err := http.NewRequestWithContext(w.t.Context(), http.MethodPost, url, strings.NewReader("["+body+"]"))
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		w.t.Fatalf("%s", resp.Status)
	}
	waitSim(w.t, w.sim, "the change is in", func(v felderasim.View) bool { return v.Settled() })
}

func verifyIdentity(w *sinkWorld) {
	t := w.t
	w.recorded(felderasim.Options{SQL: keylessProgram()})
	log := map[string]string{"KAFKASINK_TOPICS": w.topic + "=log:json"}
	once := merged(log, map[string]string{"KAFKASINK_DELIVERY": "at_least_once"})
	d := w.start(once)
	w.produce(0, "a", `{"word":"a","n":1}`, "b", `{"word":"b","n":2}`)
	w.awaitCommitted(map[int32]int64{0: 2})
	stop(t, d)
	out, _ := w.verify(log, 0, "-rows")
	if out.Partitions[0].TableRows != 2 || out.Partitions[1].TableRows != 0 {
		t.Errorf("%+v", out)
	}
	if out, _ := w.verify(log, 0); out.Partitions[0].TableRows != -1 {
		t.Errorf("%+v", out)
	}
	take := func(position int64) {
		t.Helper()
		for _, row := range w.sim.Rows("log") {
			if fmt.Sprint(row["holdfast_position"]) == fmt.Sprint(position) {
				text, err := json.Marshal(map[string]any{"delete": row})
				if err != nil {
					t.Fatal(err)
				}
				w.change("log", string(text))
				return
			}
		}
		t.Fatalf("no row of offset %d", position)
	}
	missing := func(code int, from, to int64) {
		t.Helper()
		out, said := w.verify(log, code, "-rows")
		got := out.Partitions[0].Findings
		if last := got[len(got)-1]; last.Name != "row_missing" || last.From != from || last.To != to {
			t.Errorf("%+v\n%s", got, said)
		}
	}
	take(1)
	missing(65, 1, 2)
	take(0)
	missing(65, 0, 2)
	w.verify(log, 0) // without -rows nobody looks
	// With progress rows the offset may be one that a person has set.
	d = w.start(log)
	w.produce(0, "c", `{"word":"c","n":3}`)
	w.awaitCommitted(map[int32]int64{0: 3})
	stop(t, d)
	w.verify(log, 0, "-rows")
	take(2)
	missing(69, 0, 3)
}

func verifyInvalidRow(w *sinkWorld) {
	w.recorded(felderasim.Options{})
	stop(w.t, w.begun(nil))
	row := w.sim.Rows(feldera.DefaultProgressTable)
	for _, r := range row {
		if !strings.HasSuffix(fmt.Sprint(r["lane"]), "/0") {
			continue
		}
		r["position"], r["epoch"] = uint64(1<<63), 99
		text, err := json.Marshal(map[string]any{"insert": r})
		if err != nil {
			w.t.Fatal(err)
		}
		w.change(feldera.DefaultProgressTable, string(text))
		break
	}
	w.wantFound(nil, 65, "invalid_progress_row", 0, 0, "which is no offset")
}

func verifyMistakes(w *sinkWorld) {
	t := w.t
	says(t, w.verb(nil, "verify", "nowhere"), 64, "none of KAFKASINK_TOPICS")
	says(t, w.verb(nil, "verify", w.topic+":77"), 64, "does not have")
	says(t, w.verb(nil, "verify", "-wait", "-1s"), 64, "-wait must not be negative")
	says(t, w.verb(map[string]string{"KAFKASINK_BROKERS": "127.0.0.1:1"}, "verify"), 69, "no answer")
	says(t, w.verb(map[string]string{"FELDERA_URL": "http://127.0.0.1:1"}, "verify"), 69, "127.0.0.1:1")
	says(t, w.verb(map[string]string{"KAFKASINK_TOPICS": w.topic + "=nothing:json"}, "verify"), 65, "nothing")
	says(t, w.verb(map[string]string{"KAFKASINK_TOPICS": "absent=orders:json"}, "verify"), 65, "does not exist")
	secret := "hunter2-of-nobody"
	r := w.verb(map[string]string{"FELDERA_API_KEY": secret, "FELDERA_URL": "http://127.0.0.1:1"}, "verify")
	if strings.Contains(r.Stdout+r.Stderr, secret) {
		t.Error("it says the key")
	}
	w.sim.Kill()
	says(t, w.verb(nil, "verify", "-timeout", "3s"), 69)
}

// TestKafkasinkVerifyUnderLoad runs the verb again and again while kafkasink
// carries records and its members come and go: it never calls anything wrong.
func TestKafkasinkVerifyUnderLoad(t *testing.T) {
	t.Parallel()
	sinkCases(t, harness.NeedKafka(t, harness.KafkaOptions{}), map[string]func(*sinkWorld){
		"verified under load, effectively once": func(w *sinkWorld) { w.recorded(felderasim.Options{}); verifyUnderLoad(w, true) },
		"verified under load, at least once":    func(w *sinkWorld) { verifyUnderLoad(w, false) },
	})
}

// lateAnswers stands between the verb and the pipeline, and keeps each answer of
// it back until the group has committed more than when it was given: whoever
// reads the commits after it finds more than it shows.
func (w *sinkWorld) lateAnswers() string {
	w.t.Helper()
	target, err := url.Parse(w.sim.URL())
	if err != nil {
		w.t.Fatal(err)
	}
	pass := httputil.NewSingleHostReverseProxy(target)
	sum := func(ctx context.Context) (n int64) {
		all, err := w.kafka.CommittedOffsets(ctx, w.group)
		if err != nil {
			return 0
		}
		for _, at := range all[w.topic] {
			n += at
		}
		return n
	}
	pass.ModifyResponse = func(resp *http.Response) error {
		// While a member has died, nothing is committed for longer than that.
		ctx, cancel := context.WithTimeout(resp.Request.Context(), 2*time.Second)
		defer cancel()
		before := sum(ctx)
		_ = harness.Eventually(ctx, "the group commits more", func(ctx context.Context) (any, bool) { n := sum(ctx); return n, n > before })
		return nil
	}
	srv := httptest.NewServer(pass)
	w.t.Cleanup(srv.Close)
	return srv.URL
}

// runsUnderLoad is how often the verb runs in each of the two cases.
const runsUnderLoad = 25

func verifyUnderLoad(w *sinkWorld, proven bool) {
	t := w.t
	d := w.start(nil)
	w.produceOrders(0, 0, 10, "a")
	w.awaitCommitted(map[int32]int64{0: 10})
	var over atomic.Bool
	var load sync.WaitGroup
	load.Go(func() {
		for id := 10; !over.Load(); id += 30 {
			for p := range int32(3) {
				w.produceOrders(p, id+int(p)*10, id+int(p)*10+10, "load")
			}
		}
	})
	defer load.Wait()
	defer over.Store(true)
	moved, members := map[int64]bool{}, map[int]bool{}
	late := w.lateAnswers()
	var second *harness.Daemon
	for n := range runsUnderLoad {
		switch n % 8 {
		case 2:
			second = w.start(nil)
		case 4:
			d.Kill()
			d = second
		}
		changes := map[string]string{}
		if n%2 == 1 {
			changes = map[string]string{"FELDERA_URL": late, "FELDERA_REQUEST_TIMEOUT": "10s", "FELDERA_REQUEST_LIFETIME": "10s"}
		}
		r := w.verb(changes, "verify", "-json", "-wait", "20s")
		var out verifiedGroup
		if err := json.Unmarshal([]byte(r.Stdout), &out); err != nil || r.ExitCode != 0 || !out.Agree {
			t.Fatalf("run %d ends with %d:\n%s\n%s", n, r.ExitCode, r.Stdout, r.Stderr)
		}
		// The order of reading alone keeps it from false alarms: nothing had to be
		// looked at twice.
		if out.Looks != 1 {
			t.Errorf("run %d took %d looks", n, out.Looks)
		}
		members[out.Members] = true
		moved[out.Partitions[0].Committed] = true
		if proven && !out.Partitions[0].Proven {
			t.Errorf("run %d: %+v", n, out.Partitions[0])
		}
	}
	if len(moved) < 5 || len(members) < 2 {
		t.Errorf("the load stood still: offsets %v, members %v", moved, members)
	}
	t.Logf("%d runs agreed; offsets %v, members %v", runsUnderLoad, moved, members)
}
