// Package sabotage makes wrong builds, one rule broken in each. A test that has
// never seen the rule broken proves little: "make sabotage" builds the daemons
// with the tag sabotage, breaks one rule after the other, and fails when the
// tests stay green with one.
//
// In a release build a hook costs nothing and leaves nothing in the binary. The
// package imports nothing of this module and may be called by all of it that is
// not held to be pure.
package sabotage

// Wrong names a rule that is broken, as the environment variable SABOTAGE says
// it.
type Wrong string

// The rules. test/crash says how each is found out.
const (
	AckOnReceived         Wrong = "ack-on-received"          // what was decoded counts as completed
	AckOnAccepted         Wrong = "ack-on-accepted"          // a 200 counts as completed
	KeepaliveEcho         Wrong = "keepalive-echo"           // a keepalive's position is sent back
	KeepaliveOvertakes    Wrong = "keepalive-overtakes"      // the server's position is acknowledged before what was received before it
	StatusReceived        Wrong = "status-timer-received"    // the timed status says what was received
	BookmarkReceived      Wrong = "bookmark-received"        // the bookmark is what was received
	NoSync                Wrong = "no-fsync"                 // the state is not made durable
	MaxWatermark          Wrong = "max-watermark"            // the highest completed position, not the contiguous one
	TimeoutIsSuccess      Wrong = "timeout-is-success"       // a request of unknown outcome counts as accepted
	GoneIsComplete        Wrong = "gone-is-complete"         // a token of another incarnation counts as completed
	StatusBeforeBookmark  Wrong = "status-before-bookmark"   // the server is told before the state is durable
	DropBuffer            Wrong = "drop-buffer"              // a reconnect keeps the position and drops what was received
	TrustSlot             Wrong = "trust-slot"               // a slot ahead of the bookmark is followed
	LetterLater           Wrong = "letter-later"             // the offset passes before the dead letter is written
	CommitAfterRevoke     Wrong = "commit-after-revoke"      // a partition that was given up is committed once more
	CommitPolled          Wrong = "commit-polled"            // what was received is committed
	RetryAtOnce           Wrong = "retry-at-once"            // a request of unknown outcome is not waited out
	TablesApart           Wrong = "tables-apart"             // the tables of one transaction are sent without a transaction
	NoFirstStatus         Wrong = "no-first-status"          // nothing is said right after START_REPLICATION
	SkipUnrenderable      Wrong = "skip-unrenderable"        // a row that cannot be carried is left out
	AckBeforeRow          Wrong = "ack-before-row"           // the rows' completion counts, not the progress row's
	RowBeforeIngested     Wrong = "row-before-ingested"      // the progress row goes out with its rows
	RowIntoNewIncarnation Wrong = "row-into-new-incarnation" // a progress row is sent to whichever process answers
	RowNotLast            Wrong = "row-not-last"             // the progress row goes into a transaction before its rows are in
	SameEpoch             Wrong = "same-epoch"               // an owner does not raise the epoch
	SingleCheckpoint      Wrong = "single-checkpoint"        // one checkpoint counts as proof
	NeverUsedIsLost       Wrong = "never-used-is-lost"       // an empty progress table counts as a loss
	BelieveAnyRow         Wrong = "believe-any-row"          // a progress row of any incarnation is believed
	BelieveByPosition     Wrong = "believe-by-position"      // a progress row is believed by its position alone
	StartWithoutWait      Wrong = "start-without-wait"       // requests of the process before are not waited out
	HandOverWithoutWait   Wrong = "hand-over-without-wait"   // nor are those of the owner before
	ReplayApart           Wrong = "replay-apart"             // a replay becomes visible transaction by transaction
	IdleCompared          Wrong = "idle-compared"            // the acknowledged position is compared with the progress row's, idle or not
	CleanNoteKept         Wrong = "clean-note-kept"          // an owner sends before it has replaced a clean note
	ResetForgotten        Wrong = "reset-forgotten"          // who finds a reset remembers progress again before its claim is completed
	EpochByRow            Wrong = "epoch-by-row"             // an epoch is claimed by a row, and is in no memory before
	CommitForgotten       Wrong = "commit-forgotten"         // a request to begin or to commit is outlived by the attempt that made it alone

	// Of copies of existing rows.
	CopyBelievesDelivered Wrong = "copy-believes-delivered" // a read that lacks a transaction delivered before it is used
	CopySuspectsNobody    Wrong = "copy-suspects-nobody"    // nor is one looked for that the process before has delivered
	CopyByPosition        Wrong = "copy-by-position"        // a commit before the read's position counts as seen by it
	CopySettlesAtOnce     Wrong = "copy-settles-at-once"    // a first read does not wait for whom the publication lacks
	CopyAfterRewrite      Wrong = "copy-after-rewrite"      // the table's files are not compared between two chunks
	CopyLocksLate         Wrong = "copy-locks-late"         // the snapshot is taken before the lock
	CopyAbsenceStands     Wrong = "copy-absence-stands"     // what a read does not find is deleted whatever the stream has brought since
	CopyWithoutShadow     Wrong = "copy-without-shadow"     // a change that leaves out values takes the row's copy away
	CopyNewKeyOnly        Wrong = "copy-new-key-only"       // a change of the key leaves the copy of the old one
	CopyOldKeyOnly        Wrong = "copy-old-key-only"       // or that of the new one
	CopyGhostUnasked      Wrong = "copy-ghost-unasked"      // a key that one read has not found is deleted without another
	CopyJobGoneIsDone     Wrong = "copy-job-gone-is-done"   // a resync takes a copy that the state does not have for done
)
