package partition

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
	"pgregory.net/rapid"
)

// act is one thing that happens to the members, the brokers or the
// destination. n is for it to use.
type act struct {
	name string
	n    int
}

func (a act) String() string { return fmt.Sprintf("%s(%d)", a.name, a.n) }

var values = []string{"row", "row", "row", "none", "bad", "reject"}

// acts are what can happen. What holds at every instant is checked by the
// world itself, on every commit that reaches the broker: it lies at or below
// the first record that is not completed, and never below an earlier one.
var acts = map[string]func(w *world, n int){
	"produce": func(w *world, n int) {
		p := int32(n % 3)
		var some []string
		for i := range n%5 + 1 {
			some = append(some, values[(n+i)%len(values)])
		}
		at := place{topic, p}
		w.produceTogether(topic, p, some...)
		for o := range w.engine.length(at) { // these are skipped by policy
			if v := w.engine.value(at, o); v == "bad" || v == "reject" {
				w.engine.forgive(at, o)
			}
		}
	},
	"hold":    func(w *world, _ int) { w.engine.hold() },
	"release": func(w *world, _ int) { w.engine.release() },
	"complete some": func(w *world, n int) {
		r := rand.New(rand.NewPCG(uint64(n), 1))
		w.engine.completeIf(func() bool { return r.IntN(2) == 0 })
	},
	// A request hangs until the destination is back, or it is given up.
	"destination away": func(w *world, n int) {
		w.destinationBack()
		back := make(chan struct{})
		w.back = sync.OnceFunc(func() { close(back) })
		left := n%3 + 1
		w.engine.table("orders").set(func(ctx context.Context, _ int) error {
			if left--; left < 0 {
				return nil
			}
			select {
			case <-ctx.Done():
				return until(ctx, 0)
			case <-back:
				return nil
			}
		})
	},
	"destination back": func(w *world, _ int) { w.destinationBack() },
	"commit applied, answer lost": func(w *world, n int) {
		w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Group: group, Err: kerr.RequestTimedOut, Count: n%3 + 1})
	},
	"fenced": func(w *world, n int) {
		code := []*kerr.Error{kerr.IllegalGeneration, kerr.UnknownMemberID}[n%2]
		w.cluster.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetCommit}, Group: group, Err: code})
	},
	"coordinator moves": func(w *world, _ int) { w.cluster.RehashCoordinators() },
	"cut": func(w *world, n int) {
		if len(w.members) > 0 {
			w.members[n%len(w.members)].line.cut(true)
		}
	},
	"mend": func(w *world, _ int) {
		for _, m := range w.members {
			m.line.cut(false)
		}
	},
	"join": func(w *world, n int) {
		if len(w.members) < w.most {
			w.start(func(c *Config) {
				c.Poison, c.PoisonLimit, c.BatchRows, c.InFlight = PoisonSkip, 100_000, n%4+1, 2
				c.Revoke = []RevokePolicy{RevokeDrain, RevokeAbandon}[n%2]
				if !w.fake {
					c.RequestLifetime, c.DrainTimeout = 200*time.Millisecond, 500*time.Millisecond
				}
			})
		}
	},
	"leave": func(w *world, n int) { w.end(n, false) },
	"die":   func(w *world, n int) { w.end(n, true) },
	"pass":  func(w *world, n int) { w.pass(time.Duration(n%7+1) * w.pace) },
}

func (w *world) destinationBack() {
	w.engine.table("orders").set(nil)
	if w.back != nil {
		w.back()
	}
}

// end stops a member, in order or at once.
func (w *world) end(n int, now bool) {
	if len(w.members) == 0 {
		return
	}
	i := n % len(w.members)
	m := w.members[i]
	m.line.cut(false) // a cut line is met by the other acts
	if now {
		m.now()
	}
	if err := m.stop(); err != nil && !errors.Is(err, context.Canceled) {
		w.t.Errorf("a member ended with %v", err)
	}
	w.members = slices.Delete(w.members, i, i+1)
}

// play has the acts happen, then mends everything and waits until every record
// is committed.
func (w *world) play(script []act) {
	for _, a := range script {
		acts[a.name](w, a.n)
		w.forward()
	}
	acts["mend"](w, 0)
	acts["destination back"](w, 0)
	acts["release"](w, 0)
	acts["join"](w, 0)
	for p := range int32(3) {
		at := place{topic, p}
		want := w.engine.length(at)
		if want == 0 {
			continue
		}
		w.eventually(fmt.Sprintf("every record of %s is committed, %d of them (script %v)", at, want, script), func() bool {
			w.engine.complete()
			return w.committed(at) == want
		})
		if o, missing := w.engine.missing(at, want); missing {
			w.t.Errorf("record %d of %s never completed", o, at)
		}
	}
	for len(w.members) > 0 {
		w.end(0, false)
	}
}

func actNames() []string {
	var names []string
	for name := range acts {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// TestModelOfOneMember plays random histories of one member on a clock that
// costs nothing.
func TestModelOfOneMember(t *testing.T) {
	names := actNames()
	rapid.Check(t, func(rt *rapid.T) {
		script := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) act {
			return act{rapid.SampledFrom(names).Draw(t, "act"), rapid.IntRange(0, 59).Draw(t, "n")}
		}), 1, 25).Draw(rt, "script")
		failed := false
		synctest.Test(t, func(t *testing.T) {
			inWorld(t, true, func(w *world) {
				w.most, w.pace = 1, 3*time.Second
				acts["join"](w, 1)
				w.play(script)
			}, []kfake.Opt{kfake.SeedTopics(3, topic)})
			failed = t.Failed()
		})
		if failed {
			rt.Fatalf("the history was %v", script)
		}
	})
}

// TestModelOfManyMembers plays random histories of several members, which come,
// go, are cut off and hand partitions to each other. It runs on the real clock,
// so they are few; each says its seed.
func TestModelOfManyMembers(t *testing.T) {
	names := slices.DeleteFunc(actNames(), func(n string) bool { return strings.Contains(n, "coordinator") })
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			realTime(t, func(w *world) {
				w.most, w.pace = 3, 50*time.Millisecond
				r := rand.New(rand.NewPCG(seed, 2))
				script := []act{{"join", 1}, {"produce", 4}, {"pass", 6}, {"join", 2}}
				for range 40 {
					script = append(script, act{names[r.IntN(len(names))], r.IntN(60)})
				}
				w.play(script)
			}, kfake.SeedTopics(3, topic))
		})
	}
}
