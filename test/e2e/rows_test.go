package e2e

import (
	"encoding/hex"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"time"

	"holdfast/test/felderasim"
)

// rows gives a table of the simulator in the texts that the tests ask
// Postgres for, ordered by its id: NULL is "-", binary is hex, decimals have
// no surplus zeros, timestamps have microseconds.
func rows(sim *felderasim.Sim, table string, columns ...string) [][]string {
	all := sim.Rows(table)
	slices.SortFunc(all, func(a, b map[string]any) int {
		x, _ := a["id"].(int64)
		y, _ := b["id"].(int64)
		return int(x - y)
	})
	out := make([][]string, 0, len(all))
	for _, row := range all {
		texts := make([]string, len(columns))
		for i, c := range columns {
			texts[i] = text(row[c])
		}
		out = append(out, texts)
	}
	return out
}

func text(v any) string {
	switch x := v.(type) {
	case nil:
		return "-"
	case []byte:
		return hex.EncodeToString(x)
	case string:
		for _, layout := range []string{"2006-01-02 15:04:05.999999", "2006-01-02T15:04:05.999999"} {
			if ts, err := time.Parse(layout, strings.TrimSuffix(x, "Z")); err == nil {
				return ts.Format("2006-01-02 15:04:05.000000")
			}
		}
		return decimal(x)
	}
	return fmt.Sprint(v)
}

// decimal gives one text for all that name the same number.
func decimal(s string) string {
	if n, ok := new(big.Rat).SetString(s); ok && strings.Trim(s, "-+.0123456789") == "" {
		return strings.TrimRight(strings.TrimRight(n.FloatString(9), "0"), ".")
	}
	return s
}
