package main

import (
	"slices"
	"strings"

	"holdfast/test/felderasim"
)

// need is a set of things that a clause asks of its target.
type need uint16

// The requirements. All but the last five are properties of a real target;
// needFaults only a simulator meets.
const (
	// needFaults: the target can be told to fail, or the clause may damage it.
	needFaults need = 1 << iota
	// needEnterprise: checkpoints can be made.
	needEnterprise
	// needExclusive: nobody else uses the pipeline meanwhile.
	needExclusive
	// needRestart: the pipeline may be stopped and started.
	needRestart
	// needOpenSource: the manager is the open-source edition.
	needOpenSource
	// needManager: the target is spoken to through a manager.
	needManager
	// needBare: the pipeline process itself can be reached.
	needBare
	// needAuth: the manager wants a key.
	needAuth
	// needReadOnly: there is a key that may only read.
	needReadOnly
)

// String lists the requirements in words, "" for none.
func (n need) String() string {
	var out []string
	for i, word := range []string{"faults", "enterprise", "exclusive", "restart", "open-source", "manager", "bare", "auth", "read-only-key"} {
		if n&(1<<i) != 0 {
			out = append(out, word)
		}
	}
	return strings.Join(out, "|")
}

// disturbing requirements get a simulator of their own.
const disturbing = needFaults | needEnterprise | needExclusive | needRestart

// clause is one statement of the contract with its proof.
type clause struct {
	// id is unique and stable: reports refer to it.
	id string
	// section of the contract page that the statement comes from; "client" for
	// what internal/feldera promises.
	section string
	// says is the statement.
	says  string
	needs need
	// sim alters the options of the simulator that the clause gets; nil: the
	// defaults. A clause that has it gets one of its own.
	sim func(*felderasim.Options)
	// run proves the statement. It ends by returning, or by p.failf.
	run func(p *probe)
}

// clauses gives all of them in the order in which they run.
func clauses() []clause {
	return slices.Concat(
		endpointClauses(), managerClauses(), authClauses(), errorClauses(), schemaClauses(), queryClauses(),
		parameterClauses(), formatClauses(), badBodyClauses(), typeClauses(), nameClauses(), orderClauses(), stateClauses(),
		tableClauses(), stepClauses(), transactionClauses(), completionClauses(),
		modelClauses(), checkpointClauses(), lossClauses(),
		clientSchemaClauses(), clientEncodeClauses(), clientSendClauses(), clientTransactionClauses(), clientQueryClauses(), clientDurableClauses(),
	)
}
