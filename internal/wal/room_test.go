package wal

import (
	"strings"
	"testing"
)

// Nothing more is sent while so much waits for completion or for a checkpoint; but
// what belongs in a transaction of the pipeline that is open is, since neither
// comes before its commit. Nor does it wait to stand alone.
func TestFull(t *testing.T) {
	s := testSource(t, noStore{})
	s.cfg.InFlight = 2
	d := &deliverer{cfg: &s.cfg, a: &attempt{s: s}}
	var said []Status
	s.cfg.Report = func(st Status) { said = append(said, st) }
	is := func(want bool) {
		t.Helper()
		if d.full() != want {
			t.Errorf("with %d in flight, %d batches and %d transactions in no checkpoint, open %v: full is not %v",
				len(d.inFlight), d.undurable.batches, d.undurable.transactions, d.opened != nil, want)
		}
	}
	one := &batch{first: 5, last: 7}
	is(false)
	d.inFlight = []*batch{one, one}
	is(true)
	d.inFlight = nil
	d.undurable.batches, d.undurable.transactions = 2*maxUndurableBatches, 10
	is(true)
	d.opened = &opened{}
	is(false)
	d.inFlight = []*batch{one, one}
	is(false)
	s.struggle.attempts = PoisonAttempts
	if !s.struggle.cautious() || d.mustStandAlone() {
		t.Error("what belongs in an open transaction waits for what cannot arrive before its commit")
	}
	d.opened = nil
	is(true)
	if !d.mustStandAlone() {
		t.Error("what comes next does not stand alone, although something fails again and again")
	}
	d.inFlight = nil
	d.undurable.batches, d.undurable.transactions = 1, maxUndurableTransactions
	is(true)
	d.lookAround()
	d.opened = &opened{}
	d.lookAround()
	d.opened = nil
	if len(said) != 2 || said[0].OK || said[1].OK || said[0].Check != CheckDestination {
		t.Fatalf("it says %+v", said)
	}
	if strings.Contains(said[0].Message, "transaction that is open") || !strings.Contains(said[1].Message, "but what belongs in the pipeline's transaction that is open") {
		t.Errorf("it says %q, and with a transaction open %q", said[0].Message, said[1].Message)
	}
	d.undurable.batches = 2
	d.undurable.transactions = maxUndurableTransactions + 2
	d.proven(one)
	is(false)
	if len(said) != 3 || !said[2].OK || d.undurable.batches != 1 || d.undurable.transactions != maxUndurableTransactions-1 {
		t.Errorf("it says %+v, with %+v left", said, d.undurable)
	}
	d.lost = true
	d.undurable.batches, d.undurable.transactions = 0, 0
	d.proven(one)
	if d.undurable.batches != 0 || d.undurable.transactions != 0 {
		t.Errorf("an attempt that is lost has %+v left", d.undurable)
	}
}
