package feldera

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestStats(t *testing.T) {
	const body = `{"global_metrics":{"state":"Running","transaction_status":"TransactionInProgress","transaction_id":12,"transaction_msecs":60000,
 "transaction_records":5,"transaction_initiators":{"transaction_id":12,"initiated_by_api":"Started","initiated_by_connectors":{"delta":{}}},
 "start_time":1787000000,"incarnation_uuid":"u1","initial_start_time":1786000000,"buffered_input_records":4,
 "total_initiated_steps":9,"total_completed_steps":7,"something_new":[1]},
 "suspend_error":{"Temporary":["Replaying"]},"checkpoint_activity":{"status":"delayed","reasons":["TransactionInProgress",{"Other":"x"}]},
 "permanent_checkpoint_errors":null,
 "inputs":[{"endpoint_name":"orders.api-ingress-01","config":{"stream":"orders"},"metrics":{"buffered_records":4,"num_parse_errors":1},"fatal_error":"broken","paused":true}],
 "outputs":[{"endpoint_name":"slow","metrics":{"total_processed_steps":7},"fatal_error":null},{"endpoint_name":"quick","metrics":{"total_processed_steps":9}}]}`
	c, _ := newScripted(t, Config{}, func(int, seen) answer { return answer{status: 200, body: body} })
	s, err := c.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if age := time.Since(s.Transaction.Since); age < time.Minute || age > 2*time.Minute {
		t.Errorf("age %s", age)
	}
	s.Transaction.Since = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	want := &Stats{
		State: "Running", Incarnation: "u1", StartTime: 1787000000, InitialStartTime: 1786000000,
		InitiatedSteps: 9, CompletedSteps: 7, BufferedRecords: 4,
		Transaction: TransactionState{
			Incarnation: "u1", Status: "TransactionInProgress", ID: 12, API: "Started", Connectors: []string{"delta"},
			Since: s.Transaction.Since, Records: 5,
		},
		Checkpoint: "delayed", CheckpointDelays: []string{"TransactionInProgress", `{"Other":"x"}`},
		Inputs:  []InputStats{{Endpoint: "orders.api-ingress-01", Table: "orders", BufferedRecords: 4, ParseErrors: 1, FatalError: "broken", Paused: true}},
		Outputs: []OutputStats{{Endpoint: "slow", Steps: 7}, {Endpoint: "quick", Steps: 9}},
	}
	if diff := cmp.Diff(want, s); diff != "" {
		t.Error(diff)
	}
	for _, c := range []struct {
		change func(*Stats)
		want   string
	}{
		{func(*Stats) {}, "transaction 12 open since 2026-01-02T03:04:05Z with 5 records, held by connectors delta; nothing completes before it ends"},
		{func(s *Stats) { s.Transaction = TransactionState{Status: statusNone}; s.State = "Paused" }, "the pipeline is Paused"},
		{func(s *Stats) { s.State = stateRunning }, "outputs that have not delivered yet: slow"},
		{func(s *Stats) { s.CompletedSteps = 9 }, ""},
	} {
		c.change(s)
		if got := s.Stalled(); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}

// Optional parts that changed their shape must not hide the rest.
func TestStatsOfAnotherVersion(t *testing.T) {
	c, _ := newScripted(t, Config{}, func(int, seen) answer {
		return answer{status: 200, body: `{"global_metrics":{"state":"Running","incarnation_uuid":"u1"},"suspend_error":"text","checkpoint_activity":7,` +
			`"permanent_checkpoint_errors":{"a":1},"inputs":[{"fatal_error":{"code":3}}]}`}
	})
	s, err := c.Stats(t.Context())
	if err != nil || s.State != "Running" || s.Inputs[0].FatalError != `{"code":3}` || len(s.CheckpointsImpossible) != 0 {
		t.Errorf("%+v, %v", s, err)
	}
}
