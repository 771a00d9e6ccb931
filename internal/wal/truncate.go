package wal

import (
	"fmt"

	"holdfast/internal/decode"
)

func (d *deliverer) truncate(m *decode.Message, tx *transaction) error {
	if d.cfg.IgnoreTruncate {
		d.cfg.Metrics.truncates.Inc()
		return nil
	}
	var names []string
	for _, rel := range m.Truncated {
		names = append(names, rel.String())
	}
	return at(&decode.Refusal{
		Reason: decode.ReasonUnsupported, What: "TRUNCATE", Where: fmt.Sprint(names),
		Why:      "the rows it removes are unknown to the stream, and Feldera has no such operation",
		Expected: "no TRUNCATE of a published table (DELETE is carried)",
		Do:       "empty the Feldera table by other means, then start once with PGSOURCE_TRUNCATE=ignore",
	}, tx)
}
