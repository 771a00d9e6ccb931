// Command contract holds a Feldera pipeline to its HTTP contract: one
// numbered clause for each statement that can be observed from outside.
//
// It has two groups. Clauses named C… speak raw HTTP and state what the engine
// and its manager do: status, error code, the shape of every answer, and what
// the tables hold afterwards. Clauses named K… drive internal/feldera's client
// and state that its reading of the contract holds.
//
// Without a target it starts the simulator, anew for each clause that disturbs
// it. With FELDERA_URL and FELDERA_PIPELINE it speaks to any real pipeline that
// runs the program of "make contract-sql"; FELDERA_URL alone is a bare pipeline
// process. A clause whose requirements the target does not meet is reported as
// untestable there and never counts as passed.
//
// What it promises: rows it writes have random keys of its own and are deleted
// by key afterwards, so that it can run again, and beside other tables of the
// same pipeline. What it does not: the endpoints that its requests create stay
// until the pipeline ends (a few dozen of the engine's hundred), and a clause
// that fails half way can leave rows behind.
//
// Its callers are "make contract", and the test of this package, which demands
// that every clause is testable on the simulator and holds.
package main
