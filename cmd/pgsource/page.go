package main

import (
	"holdfast/internal/config"
	"holdfast/internal/decode"
	"holdfast/internal/ops"
)

// page says what the status page of pgsource shows.
func page(settings []config.Row) ops.Page {
	return ops.Page{
		Positions:      "pgsource_position_bytes",
		Unit:           "bytes",
		FormatPosition: decode.FormatLSN,
		Charts: []ops.Chart{
			{Metric: "pgsource_acknowledged_lag_bytes", Title: "Not acknowledged yet"},
			{Metric: "pgsource_received_lag_bytes", Title: "Not received yet"},
			{Metric: "pgsource_slot_retained_bytes", Title: "WAL kept by the slot"},
			{Metric: "pgsource_buffered_bytes", Title: "Buffered"},
			{Metric: "pgsource_inflight_batches", Title: "Batches in flight"},
		},
		Counts: []ops.Count{
			{Metric: "pgsource_rows_total", Title: "Rows accepted by Feldera"},
			{Metric: "pgsource_snapshot_rows_total", Title: "Existing rows copied"},
			{Metric: "pgsource_values_altered_total", Title: "Values that arrived changed, as configured"},
		},
		Facts: []string{
			"pgsource_slot_status", "pgsource_slot_active", "pgsource_slot_safe_wal_bytes",
			"pgsource_snapshot_jobs", "pgsource_snapshot_percent", "pgsource_snapshot_rows_per_second", "pgsource_snapshot_remaining_seconds",
			"pgsource_last_commit_timestamp_seconds", "pgsource_last_acknowledged_timestamp_seconds",
		},
		Settings: ops.SettingRows(settings, func(r config.Row) ops.SettingRow {
			return ops.SettingRow{Name: r.Name, Value: r.Value, Source: string(r.Source)}
		}),
	}
}
