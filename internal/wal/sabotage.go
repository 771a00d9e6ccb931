package wal

// This file is what wrong builds do that takes more than a line. Nothing of it
// is called, or is in the binary, but in a build with the tag sabotage.

// dropReceived drops what was received and not delivered, as if the next
// connection brought it again.
func (a *attempt) dropReceived() {
	for {
		txs, err := a.queue.take(1<<30, 1<<30)
		if err != nil || len(txs) == 0 {
			return
		}
		a.queue.release(txs)
	}
}

// overtake notes a completed position, whatever is before it.
func (a *attempt) overtake(end uint64) {
	a.mu.Lock()
	a.highest = max(a.highest, end)
	a.mu.Unlock()
	a.proven.set()
}

// echo has the server told a position that it sent.
func (a *attempt) echo(walEnd uint64) {
	a.mu.Lock()
	a.bookmarked = max(a.bookmarked, walEnd)
	a.mu.Unlock()
	a.progress.set()
}
