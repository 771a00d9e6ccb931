package wal

import (
	"context"
	"fmt"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// FelderaTransaction is the pipeline's transaction as a person is shown it.
type FelderaTransaction struct {
	Open        bool   `json:"open"`
	ID          int64  `json:"id,omitzero"`
	Incarnation string `json:"incarnation"`
	// Text describes it: since when, with how many records, by whom.
	Text string `json:"text"`
	// Ours: the state says that this pgsource has opened it, and Through is the
	// end LSN of the last transaction whose rows may be in it.
	Ours    bool `json:"ours"`
	Through LSN  `json:"through_lsn,omitzero"`
	// Connectors are input connectors of the pipeline that take part: it ends by
	// them and by nobody else.
	Connectors []string `json:"connectors,omitempty"`
}

// ShowFelderaTransaction looks at the pipeline's transaction and at the state.
// It changes nothing and takes no lock.
func (s *Source) ShowFelderaTransaction(ctx context.Context) (*FelderaTransaction, error) {
	st, err := s.cfg.Pipeline.TransactionState(ctx)
	if err != nil {
		return nil, err
	}
	shown := &FelderaTransaction{Open: st.Open(), ID: st.ID, Incarnation: st.Incarnation, Text: st.String(), Connectors: st.Connectors}
	if !shown.Open {
		return shown, nil
	}
	saved, err := s.cfg.State.Load(ctx)
	if err != nil {
		return nil, err
	}
	if saved != nil && saved.Intent != nil && saved.Intent.Incarnation == st.Incarnation && saved.Intent.ID == st.ID {
		shown.Ours, shown.Through = true, saved.Intent.Through
	}
	return shown, nil
}

// CommitFelderaTransaction ends the pipeline's open transaction id, as it was
// shown, whoever has opened it: what is in it becomes visible, and there is no
// other end. sure is told what it is and has to agree. Another transaction than
// the one that was shown is not touched.
func (s *Source) CommitFelderaTransaction(ctx context.Context, id int64, sure func(*FelderaTransaction) error) error {
	shown, err := s.ShowFelderaTransaction(ctx)
	if err != nil {
		return err
	}
	if !shown.Open || shown.ID != id {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "Feldera transaction", Where: fmt.Sprint(id), Why: "it is not the one that is open: " + shown.Text,
			Expected: "the number of the open transaction", Do: "run: pgsource feldera-transaction show",
		}
	}
	if len(shown.Connectors) > 0 {
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "Feldera transaction", Where: fmt.Sprint(id), Why: "input connectors of the pipeline hold it: " + shown.Text,
			Expected: "one that was opened over HTTP", Do: "let the connectors end it, or pause them",
		}
	}
	if err := sure(shown); err != nil {
		return err
	}
	return s.cfg.Pipeline.CommitOrphan(ctx, feldera.Intent{Incarnation: shown.Incarnation, ID: id})
}
