package main

import (
	"holdfast/internal/config"
	"holdfast/internal/ops"
)

// page says what the status page of kafkasink shows.
func page(settings []config.Row) ops.Page {
	return ops.Page{
		Positions: "kafkasink_partition_position_offset",
		Unit:      "records",
		Charts: []ops.Chart{
			{Metric: "kafkasink_partition_lag_records", Title: "Records behind"},
			{Metric: "kafkasink_inflight_records", Title: "Records in flight"},
			{Metric: "kafkasink_inflight_bytes", Title: "Bytes in flight"},
		},
		Counts: []ops.Count{
			{Metric: "kafkasink_sent_rows_total", Title: "Changes accepted by Feldera"},
			{Metric: "kafkasink_records_total", Title: "Records received"},
			{Metric: "kafkasink_skipped_records_total", Title: "Records passed over, as configured"},
			{Metric: "kafkasink_gaps_total", Title: "Gaps in the log"},
			{Metric: "kafkasink_rewound_offsets_total", Title: "Offsets delivered again, since the pipeline had lost them"},
			{Metric: "kafkasink_gone_offsets_total", Title: "Offsets that the pipeline lost and retention has taken"},
			{Metric: "kafkasink_values_altered_total", Title: "Values that arrived changed, as configured"},
		},
		Facts: []string{"kafkasink_assigned_partitions", "kafkasink_partitions", "kafkasink_expulsions_total"},
		Settings: ops.SettingRows(settings, func(r config.Row) ops.SettingRow {
			return ops.SettingRow{Name: r.Name, Value: r.Value, Source: string(r.Source)}
		}),
	}
}
