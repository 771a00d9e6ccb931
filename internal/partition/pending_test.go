package partition

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"

	"holdfast/internal/decode"
)

// gate is a decoder that waits for a schema before it reads "odd".
type gate struct {
	plainDecoder
	mu    sync.Mutex
	ready chan struct{}
	asked int
	open  bool
}

func (g *gate) Decode(rec *decode.Record) (*decode.OrderChange, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if string(rec.Value) != "odd" {
		return g.plainDecoder.Decode(rec)
	}
	if g.asked++; !g.open {
		return nil, &decode.PendingError{What: "schema 7", Why: errors.New("the registry is away"), Ready: g.ready}
	}
	return g.plainDecoder.Decode(&decode.Record{Value: []byte("row"), Position: rec.Position})
}

// news tells those who wait to look again.
func (g *gate) news(open bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = open
	close(g.ready)
	g.ready = make(chan struct{})
}

// A partition whose decoder waits for a schema is held without poison and
// looked at as soon as there is news; the others of its table go on.
func TestPendingSchemaHoldsOnePartition(t *testing.T) {
	bubble(t, func(w *world) {
		t := w.t
		w.produce(topic, 0, "row", "odd", "row")
		w.produce(topic, 1, "row", "row")
		g := &gate{ready: make(chan struct{})}
		m := w.start(func(c *Config) { c.Routes[0].Decoder, c.Poison = g, PoisonSkip })
		w.eventually("the other partition is committed, and this one up to the record", func() bool {
			return w.committed(place{topic, 1}) == 2 && w.committed(first) == 1
		})
		p, _ := m.partition(first)
		if p.Block != nil {
			t.Errorf("it is blocked: %v", p.Block.Err)
		}
		g.news(false)
		w.pass(5 * time.Minute)
		if w.committed(first) != 1 {
			t.Error("the position moved past the record")
		}
		g.mu.Lock()
		asked := g.asked
		g.mu.Unlock()
		if asked < 3 || asked > 60 {
			t.Errorf("it was decoded %d times while it waited", asked)
		}
		began := time.Now()
		g.news(true)
		w.eventually("all is committed", func() bool { return w.committed(first) == 3 })
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("it went on after %v", took)
		}
		if got := m.metric("kafkasink_skipped_records_total"); got != 0 {
			t.Errorf("%v records skipped", got)
		}
		if err := m.stop(); err != nil {
			t.Fatal(err)
		}
	}, kfake.SeedTopics(2, topic))
}
