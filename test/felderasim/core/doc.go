// Package core is the deterministic heart of the Feldera simulator: tables,
// ingress endpoints and their queues, steps, transactions, completion tokens,
// checkpoints, the journal and incarnations, as one state machine.
//
// It promises to move only when it is told to: every step of the circuit and
// every phase of a checkpoint is one method call, so a test can stand between
// "queued" and "ingested", between "ingested" and "completed", or between
// "listed" and "resume point", and look. It does no I/O, starts no goroutine
// and reads no clock but the function it was handed.
//
// It is not synchronised: the caller holds a lock around an Engine. A Parser
// is the exception: it touches only immutable schema and its own state, so a
// body may be parsed outside that lock, under a lock of its own.
//
// Its caller is package felderasim, which puts the HTTP fronts around it, and
// the tests of both.
package core
