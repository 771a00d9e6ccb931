package wal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus"
	"pgregory.net/rapid"

	"holdfast/internal/ack"
	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// testSource makes a Source around a store, with nothing behind it.
func testSource(tb testing.TB, store StateStore) *Source {
	tb.Helper()
	s, err := newTestSource(store, NewMetrics(prometheus.NewRegistry()))
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

func newTestSource(store StateStore, metrics *Metrics) (*Source, error) {
	pipeline, err := feldera.New(feldera.Config{URL: "http://127.0.0.1:1", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	return New(Config{
		DSN: func() (string, error) { return "", errors.New("nobody is there") }, Slot: "holdfast", Publication: "holdfast",
		Tables: []Table{{"public", "orders", "orders"}}, BatchRows: 1, BatchBytes: 1, InFlight: 1, MemoryLimit: 1, StallTimeout: 1,
		State: store, Pipeline: pipeline, Logger: slog.New(slog.DiscardHandler), Metrics: metrics,
	})
}

// flakyStore keeps what it was given, and can fail in both ways: with nothing
// saved, and with the state saved although it says that it failed.
type flakyStore struct {
	noStore

	durable *State
	saves   []LSN
	fail    func() (before, after bool)
	calm    bool // it does not fail now
}

func (f *flakyStore) Load(context.Context) (*State, error) { return f.durable, nil }
func (f *flakyStore) Where() string                        { return "flaky" }

func (f *flakyStore) Save(_ context.Context, st *State) error {
	var before, after bool
	if !f.calm && f.fail != nil {
		before, after = f.fail()
	}
	if before {
		return errors.New("not saved")
	}
	f.durable = st
	f.saves = append(f.saves, st.Acknowledged)
	if after {
		return errors.New("saved, and nobody knows")
	}
	return nil
}

// The rule of the bookmark under random interleavings of receipt, evidence,
// saves, status updates, failures of the store, reconnects, new attempts and
// crashes, against a plain list: what the server is told is durable before it
// is told, was proven, never goes back, and a restart begins at or above it.
func TestBookmarkProperty(t *testing.T) {
	metrics := NewMetrics(prometheus.NewRegistry())
	rapid.Check(t, func(t *rapid.T) {
		ctx := context.Background()
		fails := rapid.SampledFrom([]int{0, 0, 1, 3}).Draw(t, "failing tenths")
		store := &flakyStore{fail: func() (bool, bool) {
			n := rapid.IntRange(0, 9).Draw(t, "store")
			return n < fails, n >= fails && n < 2*fails
		}}
		var (
			told     LSN // the highest position that the server was told
			position = LSN(100)
			proven   map[LSN]bool // by position: is everything up to it completed?
			a        *attempt
			tickets  map[ack.Ticket]LSN
			done     map[ack.Ticket]bool
		)
		// attempt begins anew: from the store when the process is new, from the
		// keeper otherwise.
		begin := func(s *Source) {
			st, err := s.keeper.get(ctx)
			if err != nil {
				t.Fatal(err)
			}
			start := uint64(100)
			if st == nil {
				store.calm = true // must would wait
				err := s.keeper.must(ctx, func(next *State) bool {
					*next = *stateAt(100)
					return true
				})
				store.calm = false
				if err != nil {
					t.Fatal(err)
				}
			} else {
				start = uint64(st.Acknowledged)
			}
			if LSN(start) < told {
				t.Fatalf("a start at %s, and the server was told %s", LSN(start), told)
			}
			a = &attempt{
				s: s, ledger: ack.New(start), bookmarked: start, start: start,
				proven: newSignal(), progress: newSignal(), drained: newOnce(), settled: newOnce(),
			}
			position = LSN(start)
			proven, tickets, done = map[LSN]bool{LSN(start): true}, map[ack.Ticket]LSN{}, map[ack.Ticket]bool{}
		}
		restart := func() {
			s, err := newTestSource(store, metrics)
			if err != nil {
				t.Fatal(err)
			}
			if s.keeper, err = s.openKeeper(ctx); err != nil {
				t.Fatal(err)
			}
			if store.durable != nil && LSN(s.told.Load()) != store.durable.Acknowledged {
				t.Fatalf("it begins with %s, the store holds %s", LSN(s.told.Load()), store.durable.Acknowledged)
			}
			begin(s)
		}
		// isProven asks the plain list.
		isProven := func(p LSN) bool {
			for ticket, end := range tickets {
				if end <= p && !done[ticket] {
					return false
				}
			}
			_, admitted := proven[p]
			return admitted
		}
		restart()
		t.Repeat(map[string]func(*rapid.T){
			"receive a transaction": func(t *rapid.T) {
				position += LSN(rapid.IntRange(1, 50).Draw(t, "step"))
				ticket, err := a.ledger.Admit(uint64(position))
				if err != nil {
					t.Fatal(err)
				}
				tickets[ticket], proven[position] = position, true
				a.brought(uint64(position))
			},
			"receive a keepalive": func(t *rapid.T) {
				position += LSN(rapid.IntRange(1, 50).Draw(t, "step"))
				a.ledger.AdmitIdle(uint64(position))
				proven[position] = true
			},
			"complete": func(t *rapid.T) {
				if len(tickets) == 0 {
					return
				}
				all := make([]ack.Ticket, 0, len(tickets))
				for ticket := range tickets {
					all = append(all, ticket)
				}
				slices.Sort(all)
				ticket := rapid.SampledFrom(all).Draw(t, "ticket")
				done[ticket] = true
				a.evidence(ticket, ticket, ack.Completed)
			},
			"save": func(t *rapid.T) {
				if err := a.saveBookmark(ctx); err != nil && (errors.Is(err, errGoesBack) || store.durable == nil) {
					t.Fatal(err)
				}
			},
			"tell the server": func(t *rapid.T) {
				lsn := LSN(a.bookmarked)
				switch {
				case lsn > store.durable.Acknowledged:
					t.Fatalf("the server is told %s, and %s is durable", lsn, store.durable.Acknowledged)
				case lsn < told:
					t.Fatalf("the server is told %s after %s", lsn, told)
				case !isProven(lsn):
					t.Fatalf("the server is told %s, which is not proven", lsn)
				}
				told = lsn
				if err := a.ledger.Confirm(uint64(lsn), ack.Completed); err != nil {
					t.Fatal(err)
				}
			},
			"another attempt": func(*rapid.T) { begin(a.s) },
			"crash":           func(*rapid.T) { restart() },
		})
	})
}

// A bookmark below the one before is refused with both positions, and nothing
// is saved.
func TestBookmarkNeverGoesBack(t *testing.T) {
	store := &flakyStore{fail: func() (bool, bool) { return false, false }, durable: stateAt(0x200)}
	s := testSource(t, store)
	k, err := s.openKeeper(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = k.update(t.Context(), func(next *State) bool {
		next.Acknowledged = 0x1FF
		return true
	})
	if want := "broken invariant: the bookmark would go back from 0/200 to 0/1FF"; !errors.Is(err, errGoesBack) || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	if len(store.saves) != 0 {
		t.Errorf("it was saved: %v", store.saves)
	}
}

// What may have been sent is recorded ahead: one save for many batches, and
// none for what a process before has covered.
func TestSentRunsAhead(t *testing.T) {
	store := &flakyStore{fail: func() (bool, bool) { return false, false }, durable: stateAt(1000)}
	s := testSource(t, store)
	k, err := s.openKeeper(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const step = sentStep / 64
	for end := uint64(1000); end < 1000+4*sentStep; end += step {
		if err := k.beforeSend(t.Context(), end); err != nil {
			t.Fatal(err)
		}
		if store.durable.Sent < LSN(end) {
			t.Fatalf("rows up to %s go out, and the state says %s", LSN(end), store.durable.Sent)
		}
	}
	if n := len(store.saves); n == 0 || n > 4 {
		t.Errorf("%d saves for 256 batches over 4 steps", n)
	}
	// The process before may have sent up to its Sent: that counts until it is
	// acknowledged.
	if got := k.exactlySent(1000); got < LSN(1000+sentStep) {
		t.Errorf("exactly sent %s", got)
	}
	if got := k.exactlySent(1000 + 5*sentStep); got != 1000+5*sentStep {
		t.Errorf("exactly sent %s with everything acknowledged", got)
	}
}

// While the store fails, a batch waits and the check says why; a stop ends the
// wait.
func TestStoreFailuresAreSaidAndWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var failing atomic.Bool
		failing.Store(true)
		store := &flakyStore{fail: func() (bool, bool) { return failing.Load(), false }, durable: stateAt(1000)}
		s := testSource(t, store)
		var mu sync.Mutex
		var said Status
		s.cfg.Report = func(st Status) {
			mu.Lock()
			defer mu.Unlock()
			if st.Check == CheckStore {
				said = st
			}
		}
		check := func() Status {
			mu.Lock()
			defer mu.Unlock()
			return said
		}
		k, err := s.openKeeper(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- k.beforeSend(ctx, 1000+2*sentStep) }()
		synctest.Wait()
		if last := check(); last.OK || last.Blocking || last.Message != "not saved" || last.Hint == "" {
			t.Errorf("the check says %+v", last)
		}
		failing.Store(false)
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		if last := check(); !last.OK {
			t.Errorf("the check says %+v after the store works again", last)
		}
		failing.Store(true)
		go func() { ended <- k.beforeSend(ctx, 1000+9*sentStep) }()
		synctest.Wait()
		stop()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("a stop ends it with %v", err)
		}
	})
}

// An intent is known again after a restart, in the file as in the process.
func TestIntentIsDurable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	want := Intent{Incarnation: "i1", ID: 7, Through: 0x1234}
	store := openFile(t, path)
	mustSave(t, store, stateAt(100))
	if err := store.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	for round := range 2 {
		s := testSource(t, NewFileStore(path))
		k, err := s.openKeeper(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got := k.Intent(); round == 1 && got != want {
			t.Errorf("after a restart it is %+v", got)
		}
		if err := k.RecordIntent(t.Context(), want); err != nil {
			t.Fatal(err)
		}
		if got := k.Intent(); got != want {
			t.Errorf("it is %+v", got)
		}
		k.close(t.Context())
	}
}

// A change of incarnation is a loss only where rows were acknowledged.
func TestIncarnationNotice(t *testing.T) {
	for _, rows := range []LSN{0, 50} {
		t.Run(fmt.Sprintf("rows %s", rows), func(t *testing.T) {
			st := stateAt(100)
			st.Rows = rows
			store := &flakyStore{fail: func() (bool, bool) { return false, false }, durable: st}
			s := testSource(t, store)
			var shown, blocking bool // a loss that is healed calls nobody
			s.cfg.Report = func(st Status) {
				shown = shown || (st.Check == CheckResync && !st.OK)
				blocking = blocking || st.Blocking
			}
			var err error
			if s.keeper, err = s.openKeeper(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := s.cfg.Pipeline.Expected(); got != "i1" {
				t.Errorf("it expects incarnation %q", got)
			}
			if err := s.destinationRestarted(t.Context(), &feldera.IncarnationChanged{Was: "i1", Now: "i2"}); err != nil {
				t.Fatal(err)
			}
			if n := len(store.durable.Notices); (n == 1) != (rows > 0) || shown != (rows > 0) || blocking || store.durable.Incarnation != "i2" || s.cfg.Pipeline.Expected() != "i2" {
				t.Errorf("%d notices, shown %t, blocking %t, incarnation %s", n, shown, blocking, store.durable.Incarnation)
			}
		})
	}
}

// A state about something else is refused, naming both.
func TestOwnState(t *testing.T) {
	for name, change := range map[string]func(*State){
		"slot":        func(st *State) { st.Slot = "other" },
		"publication": func(st *State) { st.Publication = "other" },
	} {
		st := stateAt(100)
		change(st)
		s := testSource(t, &flakyStore{durable: st})
		_, err := s.openKeeper(t.Context())
		if refused := refusal(t, err); refused.Reason != decode.ReasonSetup {
			t.Errorf("%s: %v", name, err)
		}
	}
	st := stateAt(100)
	for _, c := range []struct {
		now identity
		ok  bool
	}{
		{identity{st.System, 1, st.Database}, true},
		{identity{st.System, 9, st.Database}, true}, // another timeline is looked at elsewhere
		{identity{"7300000000000000002", 1, st.Database}, false},
		{identity{st.System, 1, "another"}, false},
	} {
		if err := st.sameCluster(c.now, "here"); (err == nil) != c.ok {
			t.Errorf("%+v: %v", c.now, err)
		}
	}
}

// Behind a reset the next start still waits for requests that may be on their
// way, of the stream or of copies, which the new state knows nothing of.
func TestResetKeepsWhatIsOnItsWay(t *testing.T) {
	for _, c := range []struct {
		name   string
		before State
		waits  bool
	}{
		{"nothing", State{System: "1", Sent: 50}, false},
		{"rows of the stream", State{System: "1", Sent: 150}, true},
		{"rows of another cluster", State{System: "2", Sent: 150}, false},
		{"copies that are quiet", State{System: "1", Snapshot: &snapshotState{Quiet: true}}, false},
		{"copied rows", State{System: "1", Snapshot: &snapshotState{}}, true},
	} {
		st := &State{System: "1", Acknowledged: 100, Sent: 100}
		st.follow(&c.before)
		if got := st.Sent > st.Acknowledged; got != c.waits {
			t.Errorf("%s: the next start waits: %t", c.name, got)
		}
	}
}
