package main

import "holdfast/internal/sabotage"

// copyBuilds break the rules of copies of existing rows, one in each. The tests
// hold the order of events in their hands, on a real server.
var copyBuilds = []wrongBuild{
	{wrong: sabotage.CopyBelievesDelivered, what: "read used that lacks what was delivered before it", pkg: "./test/snapshot", test: "TestCommitThatIsNotVisibleBeforeTheRead"},
	{wrong: sabotage.CopySuspectsNobody, what: "read used that lacks what the process before delivered", pkg: "./test/snapshot", test: "TestCommitThatIsNotVisibleBeforeTheProcess"},
	{wrong: sabotage.CopyByPosition, what: "commit before the read's position taken for seen", pkg: "./test/snapshot", test: "TestCommitThatIsNotVisibleAfterTheRead"},
	{wrong: sabotage.CopySettlesAtOnce, what: "first read not waiting for whom the publication lacks", pkg: "./test/snapshot", test: "TestTableAddedUnderAnOpenTransaction"},
	{wrong: sabotage.CopyAfterRewrite, what: "rewrite between two chunks not noticed", pkg: "./test/snapshot", test: "TestRewriteBetweenTwoChunks"},
	{wrong: sabotage.CopyLocksLate, what: "snapshot taken before the lock", pkg: "./test/snapshot", test: "TestRewriteWhileTheReadWaitsForItsLock"},
	{wrong: sabotage.CopyAbsenceStands, what: "absence not overridden by the stream", pkg: "./test/snapshot", test: "TestInsertAfterTheReadIsNoGhost"},
	{wrong: sabotage.CopyGhostUnasked, what: "ghost deleted without asking the source again", pkg: "./test/snapshot", test: "TestInsertBetweenTheReadsOfAResync"},
	{wrong: sabotage.CopyWithoutShadow, what: "copy taken away by a change that leaves out values", pkg: "./test/snapshot", test: "TestChangesBetweenTheReadAndTheRows"},
	{wrong: sabotage.CopyNewKeyOnly, what: "copy of the old key of a key change kept", pkg: "./test/snapshot", test: "TestChangesBetweenTheReadAndTheRows"},
	{wrong: sabotage.CopyOldKeyOnly, what: "absence of the new key of a key change kept", pkg: "./test/snapshot", test: "TestInsertAfterTheReadIsNoGhost"},
	{wrong: sabotage.CopyJobGoneIsDone, what: "copy that is gone taken for done", pkg: "./internal/wal", test: "TestResyncWhoseCopyIsGone"},
}
