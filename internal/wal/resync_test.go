package wal

import (
	"slices"
	"testing"
	"time"
)

// A resync believes that its copy is done by what the state says with the end of
// that copy, in one. A copy that the state does not have was not for that reason
// done: the resync begins again.
func TestResyncWhoseCopyIsGone(t *testing.T) {
	st := stateAt(100)
	st.Snapshot = &snapshotState{Quiet: true, Last: 7}
	began := time.Now().UTC()
	st.Resyncs = []resyncState{
		{ID: "gone", Schema: "public", Name: "orders", Job: 6, Began: began},
		{ID: "done", Schema: "public", Name: "orders", Job: 7, Began: began},
	}
	st.Resyncs = rowsCopied(st.Resyncs, 7)
	store := &flakyStore{durable: st}
	s := testSource(t, store)
	var err error
	if s.keeper, err = s.openKeeper(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer s.keeper.close(t.Context())
	if err := s.stillGood(t.Context(), &st.Resyncs[1]); err != nil {
		t.Errorf("the one whose copy is done: %v", err)
	}
	if err := s.stillGood(t.Context(), &st.Resyncs[0]); err == nil {
		t.Error("the copy that is gone counts as done")
	}
	if r := store.durable.Resyncs[0]; r.Job != 0 || !r.Began.IsZero() || r.stage() != stageWaiting {
		t.Errorf("the resync goes on: %+v", r)
	}
	if r := store.durable.Resyncs[1]; r.Job != 7 || r.stage() != stageGhosts {
		t.Errorf("the other one has changed: %+v", r)
	}
}

// Copies that are given up, since their table is not carried any more or has
// lost its key, take the resync that needs them back to its beginning; those of
// other tables, and a snapshot's, do not.
func TestResyncsWithoutTheirJobs(t *testing.T) {
	was := &snapshotState{Last: 4, Jobs: []copyJob{
		{ID: 1, Kind: CopyResync, Schema: "public", Name: "orders"},
		{ID: 2, Kind: CopySnapshot, Schema: "public", Name: "items"},
		{ID: 3, Kind: CopyResync, Schema: "public", Name: "kept"},
		{ID: 4, Kind: CopyResync, Schema: "public", Name: "ghosts", Keys: [][]string{{"1"}}},
	}}
	next := &snapshotState{Last: 4, Jobs: was.Jobs[2:3]}
	var list []resyncState
	for i, name := range []string{"orders", "items", "kept", "ghosts"} {
		list = append(list, resyncState{ID: name, Schema: "public", Name: name, Job: uint64(i) + 1, Began: time.Now(), Ghosts: name == "ghosts"})
	}
	var again []string
	for _, r := range withoutJobs(list, was, next) {
		if r.stage() == stageWaiting {
			again = append(again, r.Name)
		}
	}
	if !slices.Equal(again, []string{"orders", "ghosts"}) {
		t.Errorf("%v begin again", again)
	}
	if list[0].Job == 0 {
		t.Error("the state's own list was changed")
	}
	if got := withoutJobs(list, nil, next); len(got) != 4 || got[0].Job != 1 {
		t.Errorf("without a state before: %+v", got)
	}
}
