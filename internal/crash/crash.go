// Package crash names the places at which a crash must be harmless: each step
// between two rungs of evidence. In a release build a place costs nothing and
// leaves nothing in the binary; built with the tag crashpoints, a daemon can
// be told to die, or to stand still, at the n-th visit of a place.
//
// The crash matrix (test/crash) is its only user. The package imports nothing
// of this module and may be called by all of it.
package crash

// Point is a place. The names are listed here, so that the matrix can tell
// that it has visited each of them.
type Point string

// The places of pgsource, in the order in which a transaction passes them.
const (
	PgBegin             Point = "pgsource.begin"              // BEGIN was received
	PgBuffer            Point = "pgsource.mid-buffer"         // a row of an open transaction was buffered
	PgSpill             Point = "pgsource.mid-spill"          // part of a transaction was written to the spill file
	PgAdmitted          Point = "pgsource.admitted"           // a whole transaction is in queue and ledger
	PgIntent            Point = "pgsource.intent-recorded"    // the intent to open a Feldera transaction is durable
	PgTxOpen            Point = "pgsource.transaction-open"   // a Feldera transaction was opened
	PgBeforeSend        Point = "pgsource.before-send"        // an array is about to be sent
	PgBeforeAnswer      Point = "pgsource.before-answer"      // an array is applied, its answer is on its way
	PgSent              Point = "pgsource.sent"               // an array was accepted
	PgTxIngested        Point = "pgsource.before-commit"      // everything in the Feldera transaction is ingested
	PgTxCommitted       Point = "pgsource.after-commit"       // the Feldera transaction was committed
	PgAccepted          Point = "pgsource.accepted"           // all arrays of a batch were accepted
	PgIngested          Point = "pgsource.ingested"           // a batch was ingested
	PgCompleted         Point = "pgsource.completed"          // a batch was completed
	PgBeforeBookmark    Point = "pgsource.before-bookmark"    // a position may be acknowledged
	PgAfterBookmark     Point = "pgsource.after-bookmark"     // the bookmark is durable, the server was not told
	PgAfterStatus       Point = "pgsource.after-status"       // the server was told
	PgEpochNoted        Point = "pgsource.epoch-noted"        // the epoch to claim is durable, the claim was not sent
	PgClaimSent         Point = "pgsource.claim-sent"         // the claim of the progress table was accepted
	PgClaimed           Point = "pgsource.claim-completed"    // it is completed: rows may be sent
	PgBeforeProgress    Point = "pgsource.before-progress"    // a progress row is about to be sent
	PgProgressSent      Point = "pgsource.progress-sent"      // it was accepted
	PgProgressCompleted Point = "pgsource.progress-completed" // it is completed: the position may be acknowledged
	PgReconnect         Point = "pgsource.reconnect"          // a connection ended and another is about to be made
	PgCopyBefore        Point = "pgsource.copy-before-read"   // a chunk of existing rows is about to be read
	PgCopyRead          Point = "pgsource.copy-after-read"    // a chunk was read, none of it was sent
	PgCopySent          Point = "pgsource.copy-sent"          // rows of a chunk were accepted
	PgCopyProven        Point = "pgsource.copy-proven"        // all rows of a chunk are proven, the cursor is not saved
	PgCopySaved         Point = "pgsource.copy-saved"         // the cursor is behind the chunk
	PgRequestTaken      Point = "pgsource.request-taken"      // a verb's request is in the state, and not taken away
	PgResyncBegun       Point = "pgsource.resync-begun"       // a resync has its copy of all rows
	PgResyncRows        Point = "pgsource.resync-rows"        // the rows are copied, the ghosts are not looked for
	PgResyncGhosts      Point = "pgsource.resync-ghosts"      // the ghosts are deleted, the resync is not over
	PgShutdown          Point = "pgsource.shutdown"           // the drain after a signal has begun
	PgShutdownLastWord  Point = "pgsource.shutdown-last-word" // everything is drained, the last status is to be sent
)

// The places of kafkasink.
const (
	KafkaPolled            Point = "kafkasink.polled"             // records were received
	KafkaDecoded           Point = "kafkasink.decoded"            // records were decoded into an array
	KafkaBeforeSend        Point = "kafkasink.before-send"        // an array is about to be sent
	KafkaAccepted          Point = "kafkasink.accepted"           // an array was accepted
	KafkaIngested          Point = "kafkasink.ingested"           // an array was ingested
	KafkaCompleted         Point = "kafkasink.completed"          // an array was completed
	KafkaClaimSent         Point = "kafkasink.claim-sent"         // the claim of partitions in the progress table was accepted
	KafkaClaimed           Point = "kafkasink.claim-completed"    // it is completed: rows may be sent
	KafkaBeforeProgress    Point = "kafkasink.before-progress"    // progress rows are about to be sent
	KafkaProgressSent      Point = "kafkasink.progress-sent"      // they were accepted
	KafkaProgressCompleted Point = "kafkasink.progress-completed" // they are completed: the offsets may be committed
	KafkaBeforeCommit      Point = "kafkasink.before-commit"      // offsets are about to be committed
	KafkaLastLook          Point = "kafkasink.last-look"          // the commit is written next; the client has waited for rebalances
	KafkaMidCommit         Point = "kafkasink.mid-commit"         // the broker has the offsets, its answer is on its way
	KafkaAfterCommit       Point = "kafkasink.after-commit"       // offsets were committed
	KafkaRevoke            Point = "kafkasink.revoked"            // inside the revoke callback
	KafkaDrain             Point = "kafkasink.drain"              // inside a drain
	KafkaLost              Point = "kafkasink.lost"               // after partitions were lost
	KafkaBeforeDLQ         Point = "kafkasink.before-dlq"         // a dead letter is about to be written
	KafkaAfterDLQ          Point = "kafkasink.after-dlq"          // a dead letter was written
	KafkaShutdown          Point = "kafkasink.shutdown-leave"     // everything is committed, the group is to be left
)

// CopyPoints are the places of a copy of existing rows, which a daemon passes
// only while it has one to make.
var CopyPoints = []Point{PgCopyBefore, PgCopyRead, PgCopySent, PgCopyProven, PgCopySaved}

// ResyncPoints are those of a resync, which a daemon passes only when it is
// asked for one, or the pipeline has lost rows. A repair passes the first.
var ResyncPoints = []Point{PgRequestTaken, PgResyncBegun, PgResyncRows, PgResyncGhosts}

// OutsidePoints are places that no line of a daemon marks, since it waits there
// for an answer: who has the answer in his hands knows that it is there.
var OutsidePoints = []Point{PgBeforeAnswer, KafkaMidCommit}

// Points lists all places.
var Points = []Point{
	PgBegin, PgBuffer, PgSpill, PgAdmitted, PgIntent, PgTxOpen, PgBeforeSend, PgBeforeAnswer, PgSent, PgTxIngested, PgTxCommitted, PgAccepted, PgIngested,
	PgCompleted, PgBeforeBookmark, PgAfterBookmark, PgAfterStatus, PgReconnect, PgShutdown, PgShutdownLastWord,
	PgEpochNoted, PgClaimSent, PgClaimed, PgBeforeProgress, PgProgressSent, PgProgressCompleted,
	PgCopyBefore, PgCopyRead, PgCopySent, PgCopyProven, PgCopySaved, PgRequestTaken, PgResyncBegun, PgResyncRows, PgResyncGhosts,
	KafkaPolled, KafkaDecoded, KafkaBeforeSend, KafkaAccepted, KafkaIngested, KafkaCompleted, KafkaBeforeCommit, KafkaLastLook, KafkaMidCommit, KafkaAfterCommit,
	KafkaRevoke, KafkaDrain, KafkaLost, KafkaBeforeDLQ, KafkaAfterDLQ, KafkaShutdown,
	KafkaClaimSent, KafkaClaimed, KafkaBeforeProgress, KafkaProgressSent, KafkaProgressCompleted,
}
