package model

// The pipeline, as feldera-contract has it: a request is one entry in the
// queue of its table's endpoint; the circuit takes entries one by one, per
// endpoint in order, the endpoints in any order; a step completes, and what it
// changed becomes visible, unless a transaction is open; a transaction ends by
// commit alone; a process that dies takes its queue and its transaction along.

// The endpoints. Units write to tables A and B, progress rows to P.
const (
	tableA = iota
	tableB
	tableP
	endpoints
)

const (
	// maxLog bounds the positions of a log, maxEpoch the decisions of a run,
	// maxQueue an endpoint's queue.
	maxLog   = 4
	maxEpoch = 7
	maxQueue = 2
)

// entry is one request's content: unit's rows for one table, or a progress row.
type entry struct {
	used bool
	to   uint8 // endpoint
	// unit is the unit of a data entry, the position of a row.
	unit uint8
	// epoch and slot of a row.
	epoch, slot uint8
	// inc is the incarnation that the daemon believed it spoke to, which a row
	// names.
	inc uint8
	// step is the label of the data that a row stands for, counted only where a
	// broken rule looks at it.
	step uint8
	// drop has bit e for each epoch whose rows a claim deletes along with it.
	drop uint8
	// mine marks what the daemon that lives now has sent and still follows.
	mine bool
}

// row is a progress row, 0 for none: position + 1, incarnation, step. It is
// packed because it makes most of a state.
type row uint8

func makeRow(pos, inc, step uint8) row { return row((pos+1)<<5 | inc<<3 | step) }

func (r row) posPlus1() uint8 { return uint8(r) >> 5 }
func (r row) inc() uint8      { return uint8(r) >> 3 & 3 }
func (r row) step() uint8     { return uint8(r) & 7 }

// content is what tables hold.
type content struct {
	// mask has bit u-1 for each unit u whose row is in the table.
	mask [2]uint8
	// x is the last writer of the one key that units 1 and 2 both write, in A.
	x    uint8
	rows [maxEpoch][2]row
}

// put applies an entry.
func (c *content) put(e entry) {
	if e.to == tableP {
		c.rows[e.epoch][e.slot] = makeRow(e.unit, e.inc, e.step)
		for epoch := range c.rows {
			if e.drop&(1<<epoch) != 0 {
				c.rows[epoch] = [2]row{}
			}
		}
		return
	}
	c.mask[e.to] |= 1 << (e.unit - 1)
	if e.to == tableA && e.unit <= 2 {
		c.x = e.unit
	}
}

// pipeline is the destination's process and its storage.
type pipeline struct {
	// inc is the incarnation, from 1.
	inc uint8
	// work is what the circuit has ingested, seen what a query sees.
	work, seen content
	// stored is the checkpoint that a restart resumes from, writing the one
	// being written; its content was fixed when it began.
	stored, writing content
	isWriting       bool
	// tx: a transaction is open. named: the daemon's record has its number.
	// filled: it has data, whoever sent them.
	tx, named, filled bool

	queue [endpoints][maxQueue]entry
	// steps and storedSteps count steps where a broken rule looks at them.
	steps, storedSteps, writingSteps, resumed uint8
}

func (p *pipeline) room(e uint8) bool { return !p.queue[e][maxQueue-1].used }

func (p *pipeline) push(e entry) {
	for i := range p.queue[e.to] {
		if !p.queue[e.to][i].used {
			p.queue[e.to][i] = e
			return
		}
	}
	panic("model: pushed into a full queue")
}

// ingest takes the oldest entry of an endpoint into the circuit.
func (p *pipeline) ingest(e int) entry {
	head := p.queue[e][0]
	copy(p.queue[e][:], p.queue[e][1:])
	p.queue[e][maxQueue-1] = entry{}
	p.filled = p.tx
	p.work.put(head)
	return head
}

func (p *pipeline) idle() bool {
	return p.queue == [endpoints][maxQueue]entry{}
}

// open is a request to begin a transaction. One that is open already stays.
func (p *pipeline) open() { p.tx = true }

// shut ends the transaction, if one is open.
func (p *pipeline) shut() { p.tx, p.named, p.filled = false, false, false }

// restart is a process that died and a new one in its place.
func (p *pipeline) restart(with content, steps uint8) {
	p.inc++
	p.work, p.seen = with, with
	p.writing, p.isWriting, p.writingSteps = content{}, false, 0
	p.shut()
	p.queue = [endpoints][maxQueue]entry{}
	p.steps, p.resumed = steps, steps
}
