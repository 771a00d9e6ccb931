package feldera

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"holdfast/internal/decode"
	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// delivered is the dumb side of the property: a map from key to value that
// replays the changes in the order in which they were accepted.
type delivered map[int]string

func (d delivered) dump() []string {
	var rows []string
	for _, id := range slices.Sorted(maps.Keys(d)) {
		rows = append(rows, fmt.Sprintf("%d=%s", id, d[id]))
	}
	return rows
}

// bad is an element that the engine refuses and that no encoder makes.
const bad = `{"insert":{"id":"no number","note":"bad","qty":1}}`

// change is one random change with its meaning for the map.
type change struct {
	op       decode.OrderChange
	apply    func(delivered)
	rejected bool
}

func drawChange(t *rapid.T, rel *decode.Relation) change {
	id, other := rapid.IntRange(1, 5).Draw(t, "id"), rapid.IntRange(1, 5).Draw(t, "other")
	name := rapid.StringMatching(`[a-z"\\\x01é☃]{0,6}`).Draw(t, "name")
	row := func(id int) []decode.Value { return []decode.Value{num(strconv.Itoa(id)), txt(name), num("1")} }
	key := func(id int) []decode.Value { return []decode.Value{num(strconv.Itoa(id)), {}, {}} }
	switch rapid.IntRange(0, 5).Draw(t, "kind") {
	case 0, 1:
		return change{decode.OrderChange{Op: decode.Insert, Relation: rel, After: row(id)}, func(d delivered) { d[id] = name }, false}
	case 2:
		return change{decode.OrderChange{Op: decode.Delete, Relation: rel, Before: key(id)}, func(d delivered) { delete(d, id) }, false}
	case 3:
		return change{decode.OrderChange{Op: decode.Update, Relation: rel, Before: key(other), After: row(id)}, func(d delivered) {
			delete(d, other)
			d[id] = name
		}, false}
	case 4: // a partial update touches nothing that is absent
		after := []decode.Value{num(strconv.Itoa(id)), txt(name), {State: decode.Unchanged}}
		return change{decode.OrderChange{Op: decode.Update, Relation: rel, After: after}, func(d delivered) {
			if _, ok := d[id]; ok {
				d[id] = name
			}
		}, false}
	default:
		return change{rejected: true, apply: func(delivered) {}}
	}
}

// Random batches, faults and restarts: a keyed table is what a map is that
// replays the accepted changes in order; a refused row takes no good one with
// it; nothing later is sent while an outcome is unknown.
func TestDeliveryProperty(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		w := newPropertyWorld(t, rt)
		defer w.close()
		rt.Repeat(map[string]func(*rapid.T){
			"send":  w.send,
			"fault": w.fault,
			"crash": func(*rapid.T) {
				w.sim.Crash(core.KeepNothing)
				clear(w.want)
			},
			"": func(*rapid.T) {},
		})
		w.sim.ClearFault("")
		w.send(rt)
		w.settled(rt)
		w.checkOrder(rt)
	})
}

type propertyWorld struct {
	ctx    context.Context //nolint:containedctx // the life of one check
	sim    *felderasim.Sim
	client *Client
	table  *Table
	enc    *Encoder
	want   delivered
	tap    *wiretap
}

func newPropertyWorld(t *testing.T, rt *rapid.T) *propertyWorld {
	t.Helper()
	sim, err := felderasim.New(felderasim.Options{SQL: simSQL})
	if err == nil {
		err = sim.Start(t.Context())
	}
	if err != nil {
		rt.Fatal(err)
	}
	w := &propertyWorld{ctx: t.Context(), sim: sim, want: delivered{}}
	w.client, err = New(Config{
		URL: sim.URL(), Pipeline: "p", RequestTimeout: 5 * time.Second, RequestLifetime: 2 * time.Millisecond,
		BackoffInitial: time.Millisecond, BackoffMax: 2 * time.Millisecond,
	})
	if err != nil {
		rt.Fatal(err)
	}
	w.tap = &wiretap{RoundTripper: w.client.http.Transport}
	w.client.http.Transport = w.tap
	schema, err := w.client.Await(w.ctx)
	if err != nil {
		rt.Fatal(err)
	}
	if w.table, err = schema.Table("orders"); err != nil {
		rt.Fatal(err)
	}
	if w.enc, err = NewEncoder(w.table, w.table.Relation(), Policy{}); err != nil {
		rt.Fatal(err)
	}
	return w
}

func (w *propertyWorld) close() {
	w.client.CloseIdle()
	_ = w.sim.Close()
}

func (w *propertyWorld) fault(rt *rapid.T) {
	kind := rapid.SampledFrom([]felderasim.FaultKind{
		felderasim.DropRequest, felderasim.DropResponse, felderasim.UnavailableBefore, felderasim.UnavailableAfter,
		felderasim.ApplyLate, felderasim.CutBody, felderasim.TooMany,
	}).Draw(rt, "fault")
	_, err := w.sim.Inject(felderasim.Fault{Kind: kind, Count: rapid.IntRange(1, 2).Draw(rt, "count"), Bytes: rapid.Int64Range(0, 80).Draw(rt, "bytes")})
	if err != nil {
		rt.Fatal(err)
	}
}

// send delivers one random array, over as many changes of incarnation as come.
func (w *propertyWorld) send(rt *rapid.T) {
	var a Array
	var changes []change
	for range rapid.IntRange(1, 6).Draw(rt, "changes") {
		c := drawChange(rt, w.enc.rel)
		changes = append(changes, c)
		if !c.rejected {
			if err := a.Add(w.enc, &c.op); err != nil {
				rt.Fatal(err)
			}
			continue
		}
		if len(a.buf) == 0 {
			a.table, a.buf = w.table, append(a.buf, '[')
		}
		a.openElement(bad)
		a.ends = append(a.ends, len(a.buf))
	}
	for {
		_, rejected, err := w.client.Writer(w.table).SendSplit(w.ctx, &a)
		var changed *IncarnationChanged
		if errors.As(err, &changed) {
			// Whatever the old process had is gone with it.
			clear(w.want)
			w.client.Expect(changed.Now)
			continue
		}
		if err != nil {
			rt.Fatalf("send: %v", err)
		}
		var got, want []int
		for _, r := range rejected {
			got = append(got, r.Index)
		}
		for i, c := range changes {
			if c.rejected {
				want = append(want, i)
			}
			c.apply(w.want)
		}
		if !slices.Equal(got, want) {
			rt.Fatalf("rejected rows %v, want %v", got, want)
		}
		return
	}
}

// settled waits until the table is what the map is.
func (w *propertyWorld) settled(rt *rapid.T) {
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	var got []string
	err := w.sim.WaitFor(ctx, func(v felderasim.View) bool {
		st := v.Stats()
		return st.Global.BufferedInputRecords == 0 && st.Global.TotalCompletedRecords == st.Global.TotalInputRecords
	})
	for _, row := range w.sim.Rows("orders") {
		got = append(got, fmt.Sprintf("%v=%v", row["id"], row["note"]))
	}
	slices.SortFunc(got, func(a, b string) int { return int(a[0]) - int(b[0]) })
	if err != nil || !slices.Equal(got, w.want.dump()) {
		rt.Fatalf("the table holds %q, the accepted changes make %q (%v)", got, w.want.dump(), err)
	}
}

// attempt is one ingress request as the client made it.
type attempt struct {
	body   []byte
	status int // 0 = no answer
}

// wiretap is a transport that remembers the ingress requests.
type wiretap struct {
	http.RoundTripper
	attempts []attempt
}

func (w *wiretap) RoundTrip(r *http.Request) (*http.Response, error) {
	if !strings.Contains(r.URL.Path, "/ingress/") {
		return w.RoundTripper.RoundTrip(r)
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	answer, err := w.RoundTripper.RoundTrip(r)
	status := 0
	if err == nil {
		status = answer.StatusCode
	}
	w.attempts = append(w.attempts, attempt{body, status})
	return answer, err
}

// checkOrder holds that a request whose outcome is unknown is followed by
// nothing but itself.
func (w *propertyWorld) checkOrder(rt *rapid.T) {
	for i := 1; i < len(w.tap.attempts); i++ {
		before, after := w.tap.attempts[i-1], w.tap.attempts[i]
		if before.status != 200 && before.status != 400 && before.status != 410 && !bytes.Equal(before.body, after.body) {
			rt.Fatalf("after a request without an outcome (status %d) came other rows:\n%s\n%s", before.status, before.body, after.body)
		}
	}
}
