package partition

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/twmb/franz-go/pkg/kadm"

	"holdfast/internal/feldera"
	"holdfast/internal/partition/lane"
)

// The names of the findings. docs/operations.md has a line for each.
const (
	findUnreadable   = "unreadable"
	findMoving       = "moving"
	findNoCommits    = "no_commits"
	findCommitGone   = "commit_missing"
	findRecreated    = "topic_recreated"
	findForeign      = "foreign_owner"
	findLost         = "lost"
	findRemapped     = "remapped"
	findAhead        = "ahead"
	findSetAbove     = "set_above_progress"
	findSetBelow     = "set_below_progress"
	findUnrecorded   = "unrecorded"
	findNoTable      = "progress_table_missing"
	findInvalidRow   = "invalid_progress_row"
	findRestarted    = "pipeline_restarted"
	findGone         = "gone"
	findAboveEnd     = "above_log_end"
	findHeldAboveEnd = "progress_above_log_end"
	findCut          = "log_cut"
	findRetention    = "below_log_start"
	findRowMissing   = "row_missing"
)

// compare says what follows from a look.
func (o *VerifyOptions) compare(group string, seen *look) *VerifyReport {
	r := &VerifyReport{
		Group: group, State: seen.state, Members: seen.members, Incarnation: seen.incarnation,
		Progress: o.store != nil, Why: o.why, LeaderEpochs: seen.epochsKnown,
		Findings: []Finding{}, Partitions: []PartitionVerified{}, Strays: []StrayProgress{},
	}
	ours := make(map[string]bool)
	commits, recorded := 0, 0
	for _, t := range o.Topics {
		d := seen.topics[t.Topic]
		for n := range d.Partitions {
			name := laneNameOf(d.ID, t.Topic, n)
			ours[name] = true
			if !o.wanted(t.Topic, n) {
				continue
			}
			c := comparison{o: o, seen: seen, topic: t, at: place{t.Topic, n}, id: d.ID, rows: seen.lanes[name]}
			p := c.compare()
			if c.before.offset != lane.NoCommit || c.before.err != nil {
				commits++
			}
			recorded += len(c.rows)
			r.Partitions = append(r.Partitions, p)
		}
	}
	if commits == 0 && recorded == 0 {
		r.Findings = append(r.Findings, Finding{
			Name: findNoCommits, Effect: Undecided,
			Says: fmt.Sprintf("group %s has committed no offset for these partitions, and the pipeline has no progress row of it: there is nothing to compare", group),
			Do:   "is KAFKASINK_GROUP right, and has kafkasink run? Offsets of a group without members expire (offsets.retention.minutes)",
		})
	}
	if o.Only == nil {
		for name, rows := range seen.lanes {
			if !ours[name] {
				r.Strays = append(r.Strays, strayOf(name, rows, seen.names))
			}
		}
	}
	r.sortVerified()
	return r
}

func strayOf(name string, rows []feldera.ProgressRow, names map[string]string) StrayProgress {
	id, _, _ := strings.Cut(name, "/")
	s := StrayProgress{Lane: name, Topic: names[id], Rows: len(rows)}
	for i := range rows {
		s.Position = max(s.Position, rows[i].Position)
	}
	return s
}

// comparison is of one partition.
type comparison struct {
	o     *VerifyOptions
	seen  *look
	topic VerifyTopic
	at    place
	id    kadm.TopicID
	rows  []feldera.ProgressRow

	before, after commitSight
	start, end    int64
	held          int64 // proven; 0 for nothing
	recorded      int64 // the highest position of the newest epoch, believed or not
	out           PartitionVerified
}

func (c *comparison) add(name string, effect Effect, from, to int64, says, do string) {
	c.out.Findings = append(c.out.Findings, Finding{Name: name, Effect: effect, From: from, To: to, Says: says, Do: do})
}

// compare holds the partition's positions against each other.
func (c *comparison) compare() PartitionVerified {
	c.before, c.after = commitOf(c.seen.before, c.at), commitOf(c.seen.after, c.at)
	c.out = PartitionVerified{
		Topic: c.at.topic, Partition: c.at.partition, Table: c.topic.Table,
		Committed: c.before.offset, Rows: c.before.note.Rows, Held: lane.NoCommit, LogStart: -1, LogEnd: -1,
		Epoch: c.before.note.Epoch, TableRows: -1, Findings: []Finding{},
	}
	start, end, err := boundsOf(c.seen.starts, c.seen.ends, c.at)
	if err != nil {
		err = errors.Join(err, c.seen.unlisted)
	}
	if err = cmp.Or(err, c.before.err, c.after.err); err != nil {
		c.add(findUnreadable, Undecided, 0, 0, fmt.Sprintf("the brokers do not say where %s stands: %v", c.at, err),
			"is a leader there for it (kafka-topics --describe)? Ask again")
		return c.out
	}
	c.start, c.end = start, end
	c.out.LogStart, c.out.LogEnd = start, end
	if c.before.offset > c.after.offset || c.before.ours != c.after.ours || c.before.note.TopicID != c.after.note.TopicID && c.before.ours {
		c.add(findMoving, Undecided, 0, 0, fmt.Sprintf("the group's offset went from %d to %d while it was looked at: a person sets it, or a member delivers again what the pipeline lost", c.before.offset, c.after.offset),
			"ask again when the group has come to rest")
		return c.out
	}
	if c.recreated() {
		return c.out
	}
	if c.o.store != nil {
		c.progress()
	} else {
		c.withoutProgress()
	}
	c.log()
	c.tableRows()
	return c.out
}

// recreated tells that the commit is about another topic of the same name.
func (c *comparison) recreated() bool {
	now := topicIDText(c.id)
	was := c.before.note.TopicID
	if was == "" || now == "" || was == now {
		return false
	}
	c.add(findRecreated, Differs, 0, 0,
		fmt.Sprintf("the topic was deleted and made anew: offset %d is of the topic with id %s, and the present one has id %s (the log has %d to %d)", c.before.offset, was, now, c.start, c.end),
		"what was not read of the old topic is gone. KAFKASINK_ON_GAP=continue reads the new one from its start; or set the offset: "+c.resetTo(c.start))
	return true
}

func (c *comparison) resetTo(offset int64) string {
	return fmt.Sprintf("kafkasink offsets reset -to %d -yes %s:%d", offset, c.at.topic, c.at.partition)
}

// progress holds the commit against the progress rows, by the decision that the
// next owner would make.
func (c *comparison) progress() {
	noted := feldera.Noted{Epoch: max(c.before.note.Epoch, c.after.note.Epoch)}
	c.before.note.completed(&noted)
	dec := feldera.Decide(c.rows, noted, c.seen.incarnation, mappingOf(c.at.topic, c.topic.Table))
	for i := range c.rows {
		row := &c.rows[i]
		if row.Position > math.MaxInt64 {
			c.add(findInvalidRow, Differs, 0, 0, fmt.Sprintf("a progress row of epoch %d names position %d, which is no offset", row.Epoch, row.Position),
				"kafkasink writes no such row, and stops the partition: find out who writes to the progress table; delete the row")
			return
		}
		if row.Epoch > c.out.RecordedEpoch {
			c.out.RecordedEpoch, c.recorded = row.Epoch, 0
		}
		if row.Epoch == c.out.RecordedEpoch {
			c.recorded = max(c.recorded, int64(row.Position))
		}
	}
	if dec.Held <= math.MaxInt64 {
		c.held = int64(dec.Held)
	}
	if dec.Found == feldera.ProgressRemapped && dec.Proof != nil {
		c.held = int64(min(dec.Proof.Position, math.MaxInt64))
	}
	c.out.Held = c.held
	c.out.Proven = noted.Known && c.held >= c.before.note.Rows
	if k := c.before.note; k.GoneTo > k.GoneFrom {
		c.add(findGone, Differs, k.GoneFrom, k.GoneTo,
			fmt.Sprintf("the pipeline lost the rows of offsets %d to %d (%d of them) when retention had taken them from the log: what they changed, deletes included, is missing from table %s", k.GoneFrom, k.GoneTo-1, k.GoneTo-k.GoneFrom, c.topic.Table),
			"load what is missing from where the topic has it from, then set the offset to where it stands, with the group stopped: "+c.resetTo(c.before.offset))
	}
	c.decided(&dec)
}

// decided says what a decision comes to.
func (c *comparison) decided(dec *feldera.Decision) {
	committed := c.before.offset
	reason := dec.Reason(offsetText)
	switch dec.Found {
	case feldera.ProgressForeign:
		c.out.Proven = false
		c.add(findForeign, Differs, 0, 0, reason,
			"kafkasink stops this partition. Stop whoever else writes as this group; where its offsets were put back to an older copy, set them on purpose: kafkasink offsets reset")
	case feldera.ProgressLost:
		c.lost(reason)
	case feldera.ProgressRemapped:
		c.out.Proven = false
		c.add(findRemapped, Differs, 0, committed,
			fmt.Sprintf("what lies below offset %d was delivered under another mapping of topic to table than %s to %s: this table gets only what is not committed yet", committed, c.at.topic, c.topic.Table),
			"correct KAFKASINK_TOPICS; or, if the table is to have the earlier records too: "+c.resetTo(c.start))
	case feldera.ProgressAhead:
		if c.seen.members == 0 {
			c.add(findAhead, Harmless, committed, c.held,
				fmt.Sprintf("the pipeline holds what lies below offset %d, and %d is committed: the last owner ended before it committed", c.held, committed), "nothing: the next start passes over what the pipeline holds")
		}
	case feldera.ProgressReset:
		c.set()
	case feldera.ProgressFresh:
		if committed > 0 && !c.before.ours {
			c.add(findUnrecorded, Harmless, 0, committed, fmt.Sprintf("offset %d was committed by another program, or by a person, and there is no progress row: nothing proves what the pipeline holds below it", committed), "")
		} else if c.before.note.Row == nil && c.before.note.Rows > 0 {
			c.unrecorded()
		}
	case feldera.ProgressEqual:
	}
}

// lost says that the pipeline does not prove to hold what was acknowledged.
func (c *comparison) lost(reason string) {
	committed := c.before.offset
	to := max(c.held, min(c.before.note.Begin, committed))
	do := fmt.Sprintf("start kafkasink, or leave the running one to it: it goes back to offset %d by itself (KAFKASINK_ON_DESTINATION_LOSS=heal)", to)
	if c.o.OnLoss == LossStop {
		do = fmt.Sprintf("set KAFKASINK_ON_DESTINATION_LOSS=heal to deliver again from offset %d, or set the group's offset: %s", to, c.resetTo(to))
	}
	if from := max(to, min(c.start, committed)); from > to {
		do += fmt.Sprintf(". Retention has taken offsets %d to %d (%d of them): load what they changed from where the topic has it from", to, from-1, from-to)
	}
	c.add(findLost, Differs, to, c.before.note.Rows, "rows that were committed are not in the pipeline: "+reason, do)
}

// set is about an offset that no owner with progress rows has left, beside rows
// of owners that came before.
func (c *comparison) set() {
	committed := c.before.offset
	byReset := c.before.ours && c.before.note.Owner == resetOwner
	switch {
	case committed == lane.NoCommit:
		c.commitMissing()
	case c.before.ours && !byReset:
		c.unrecorded()
	case committed < c.held:
		c.add(findSetBelow, Harmless, committed, c.held,
			fmt.Sprintf("offset %d was set by a person or another program, below what the pipeline holds (%d)", committed, c.held), "nothing: the next start obeys, and sends the records from there again")
	case committed <= c.held:
	case byReset:
		c.add(findSetAbove, Harmless, c.recorded, committed,
			fmt.Sprintf("offset %d was set by kafkasink offsets reset, and the pipeline's newest progress row is for offset %d: records between are passed over, if they give rows", committed, c.recorded), "nothing, if it was meant: the next start obeys")
	case committed > c.recorded:
		c.add(findSetAbove, Differs, c.recorded, committed,
			fmt.Sprintf("offset %d was set by a person or another program, and the pipeline's newest progress row is for offset %d: the group passes over the %d offsets between", committed, c.recorded, committed-c.recorded),
			"if that is not meant, before kafkasink is started: "+c.resetTo(max(c.recorded, c.start)))
	default:
		c.add(findSetAbove, Undecided, c.held, committed,
			fmt.Sprintf("offset %d was set by a person or another program; the newest progress row says that the pipeline holds what lies below %d, and is of another incarnation than the present one, so that only offset %d is proven", committed, c.recorded, c.held),
			"if the pipeline came back without its rows: "+c.resetTo(max(c.held, c.start)))
	}
}

// unrecorded is about rows that kafkasink carried without progress rows.
func (c *comparison) unrecorded() {
	c.add(findUnrecorded, Harmless, 0, c.before.offset,
		fmt.Sprintf("offset %d was committed with at_least_once: no progress row proves what the pipeline holds below it", c.before.offset), "")
	c.restarted()
}

// withoutProgress compares what can be without a progress table.
func (c *comparison) withoutProgress() {
	if r := c.before.note.Row; r != nil && c.before.note.Rows > 0 {
		c.add(findNoTable, Undecided, 0, c.before.note.Rows,
			fmt.Sprintf("the note beside offset %d names a progress row (epoch %d), and the progress table cannot be read: %s", c.before.offset, r.Epoch, c.o.why),
			"set KAFKASINK_PROGRESS_TABLE to the table that was used, or put it back into the program")
		return
	}
	c.restarted()
}

// restarted says that the pipeline is another process than the one that
// completed the rows, where nothing tells whether it kept them.
func (c *comparison) restarted() {
	n := &c.before.note
	if n.Rows > 0 && n.Incarnation != "" && n.Incarnation != c.seen.incarnation {
		c.add(findRestarted, Undecided, 0, n.Rows,
			fmt.Sprintf("incarnation %s of the pipeline completed the rows below offset %d, and the present one is %s: whether it has kept them nobody can tell without progress rows", n.Incarnation, n.Rows, c.seen.incarnation),
			"compare the table with the topic's source; if rows are missing: "+c.resetTo(c.start))
	}
}

// commitMissing is about a partition whose offset the group has forgotten.
func (c *comparison) commitMissing() {
	added := false // the group knows other partitions of the topic, so this one is read from its start
	for _, o := range c.seen.before[c.at.topic] {
		added = added || o.Err == nil && o.At >= 0
	}
	says := fmt.Sprintf("the group has no committed offset, and the pipeline's newest progress row is for offset %d: the offset was deleted, or has expired", c.recorded)
	do := "if that is not meant, before kafkasink is started: " + c.resetTo(max(c.recorded, c.start))
	switch {
	case c.o.Start == StartLatest && !added:
		c.add(findCommitGone, Differs, c.recorded, c.end, fmt.Sprintf("%s; with KAFKASINK_START=latest the next start passes over everything up to the log's end (%d)", says, c.end), do)
	case c.o.Start == StartStop:
		c.add(findCommitGone, Differs, 0, 0, says+"; with KAFKASINK_START=stop the next start stops the partition", do)
	default:
		c.add(findCommitGone, Harmless, 0, 0, says, "nothing: the next start reads the log from its start, and the rows that are there meet themselves")
	}
}

// log holds commit and progress against what the log has.
func (c *comparison) log() {
	committed := c.before.offset
	epoch := c.before.leaderEpoch
	ending, asked := c.seen.epochs[c.at.topic][c.at.partition]
	gap := "find out what was lost (rows that were delivered from it stay in the pipeline); KAFKASINK_ON_GAP=continue goes on at the oldest record there is, or set the offset: "
	switch {
	case committed > c.end:
		c.add(findAboveEnd, Differs, c.end, committed,
			fmt.Sprintf("the log ends at %d, %d below the committed offset %d: its tail was lost, or the topic was made anew", c.end, committed-c.end, committed), gap+c.resetTo(c.end))
	case asked && ending.Err == nil && (ending.LeaderEpoch < 0 || ending.EndOffset < committed):
		says := fmt.Sprintf("offset %d was read under leader epoch %d, which the log does not know", committed, epoch)
		from := int64(0)
		if ending.LeaderEpoch >= 0 {
			from = ending.EndOffset
			says = fmt.Sprintf("offset %d was read under leader epoch %d, and the log has that epoch up to offset %d only: its tail was lost, and other records stand in its place", committed, epoch, ending.EndOffset)
		}
		c.add(findCut, Differs, from, committed, says, gap+c.resetTo(max(from, c.start)))
	case c.held > c.end:
		c.add(findHeldAboveEnd, Differs, c.end, c.held,
			fmt.Sprintf("the log ends at %d, below what the pipeline holds (%d): its tail was lost, and its rows stay in the pipeline", c.end, c.held), gap+c.resetTo(c.end))
	}
	from := max(committed, c.held)
	if committed != lane.NoCommit && from < c.start {
		says := fmt.Sprintf("retention has taken offsets %d to %d (%d of them), which were not committed", from, c.start-1, c.start-from)
		lost := "they are lost"
		if c.recorded > from {
			lost = fmt.Sprintf("the newest progress row says that the pipeline holds what lies below %d, and nothing proves it since the pipeline restarted; the rest is lost", c.recorded)
		}
		do := "load the table from its source, then set KAFKASINK_ON_GAP=continue, or set the offset: " + c.resetTo(c.start)
		if c.seen.members > 0 {
			c.add(findRetention, Undecided, from, c.start, says+": "+lost+", unless a member has read them before and is about to deliver them", "look at the check \"partitions\" of the members; once they have ended, ask again. If it is lost: "+do)
		} else {
			c.add(findRetention, Differs, from, c.start, says+": "+lost, do)
		}
	}
}

// tableRows holds the last record that gave a row against the rows of a table
// with identity columns. Which of the other records gave rows nobody knows
// without reading the log, so that their number says nothing.
func (c *comparison) tableRows() {
	if c.topic.Rows == nil {
		return
	}
	has := c.seen.rows[c.at.topic][c.at.partition]
	c.out.TableRows = int64(min(has.Rows, math.MaxInt64))
	rows := c.before.note.Rows
	if rows == 0 || has.Rows > 0 && has.Last >= rows-1 {
		return
	}
	from := int64(0)
	says := fmt.Sprintf("the record at offset %d gave a row, and table %s has no row of this partition", rows-1, c.topic.Table)
	if has.Rows > 0 {
		from = has.Last + 1
		says = fmt.Sprintf("the record at offset %d gave a row, and the last row of this partition in table %s is of offset %d", rows-1, c.topic.Table, has.Last)
	}
	effect := Differs
	if c.before.note.Row != nil {
		// The owner that obeys a reset claims the offset that was set, whatever
		// record stands before it.
		effect = Undecided
		says += "; that is so too where a person has set the offset and no record has given a row since"
	}
	c.add(findRowMissing, effect, from, rows, says, "find out who took rows out of the table; to deliver them again, with the group stopped: "+c.resetTo(max(c.start, from)))
}
