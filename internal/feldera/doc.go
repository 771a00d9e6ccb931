// Package feldera speaks the HTTP contract of a Feldera pipeline: it reads the
// tables of the program, encodes changes to rows, sends them, and finds out
// what became of them.
//
// What it promises:
//
//   - A row is sent only as the destination's column can hold it. A value that
//     would arrive cut, rounded or as something else is refused by table, key
//     and column, or altered only where a [Policy] says so, and then counted.
//   - One JSON array is one request, one all-or-nothing unit and one engine
//     step. There is one URL and one request in flight per table ([Writer]).
//   - An answer that leaves the outcome open never counts as an answer. The
//     same bytes go out again only after the incarnation was compared, the
//     pipeline is Running, and a whole request lifetime has passed.
//   - Every token's incarnation is compared with the expected one, on success
//     too. Another incarnation is the event [IncarnationChanged], never a
//     retry: what the pipeline had accepted may be gone.
//   - Every wait ends with its context, every body read is bounded, no secret
//     enters an error.
//
// What it does not promise: that accepted means applied ([Completions] tells),
// that completed means on disk ([Durability] tells, where the build can), or
// that a bare pipeline process drops an abandoned request after any bound of
// time. It keeps no position: internal/wal and internal/partition do, by the
// evidence that comes from here.
//
// The callers are cmd/pgsource, cmd/kafkasink, internal/wal and
// internal/partition.
package feldera
