// Package felderasim is a simulator of a Feldera pipeline, as strange as the
// real engine: it keeps tables, honours completion tokens, transactions,
// checkpoints and incarnations as the engine's contract describes them, and
// can be told to fail at each point. It is not Feldera and evaluates no view
// incrementally.
//
// It promises that what it answers, refuses and loses is what the contract
// says; where the contract leaves a choice open, it takes the worse one for a
// client (an abandoned request whose body had arrived is still applied). It
// does not promise the engine's speed, nor formats other than JSON and CSV.
//
// The state machine is package core, moved by one stepper goroutine, or by
// hand with Options.Manual. This package puts two HTTP fronts around it: the
// manager's, with /v0/pipelines/{pipeline}/…, authentication and time-outs,
// and the bare process's. Faults are injected from Go with Inject or over
// HTTP under /sim/ on either front.
//
// Its callers are the tests and benchmarks of the daemons, the demo, and
// cmd/felderasim.
package felderasim
