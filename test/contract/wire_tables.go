package main

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

// tableClauses are contract §3.
func tableClauses() []clause {
	del := func(p *probe, n int) string { return fmt.Sprintf(`{"delete":{"id":%d}}`, p.id(n)) }
	return []clause{
		{
			id: "C3-PK-UPSERT", section: "3", says: "insert of a present key replaces the whole row: what it leaves out becomes NULL",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.put("hfc_kv", fmt.Sprintf(`{"insert":{"id":%d,"n":2}}`, p.id(0)))
				p.holds("hfc_kv", "0:null/2")
			},
		},
		{
			id: "C3-PK-LAST-WINS", section: "3", says: "of several inserts of a key in one request the last one wins",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1), p.kv(0, "b", 2), p.kv(0, "c", 3))
				p.holds("hfc_kv", "0:c/3")
			},
		},
		{
			id: "C3-PK-DELETE-key-only", section: "3", says: "delete reads the key columns alone: others may hold anything",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.put("hfc_kv", fmt.Sprintf(`{"delete":{"id":%d,"note":7,"n":"not a number"}}`, p.id(0)))
				p.holds("hfc_kv", "")
			},
		},
		{
			id: "C3-PK-DELETE-missing", section: "3", says: "delete of an absent key is ignored",
			run: func(p *probe) { p.put("hfc_kv", del(p, 0), p.kv(1, "b", 2)); p.holds("hfc_kv", "1:b/2") },
		},
		{
			id: "C3-PK-DELETE-no-key", section: "3", says: "delete without the key is a parse error",
			run: func(p *probe) { p.array("hfc_kv", `{"delete":{"note":"a"}}`).bad(1) },
		},
		{
			id: "C3-PK-UPDATE-partial", section: "3", says: "update leaves absent columns as they are",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.put("hfc_kv", fmt.Sprintf(`{"update":{"id":%d,"note":"b"}}`, p.id(0)))
				p.holds("hfc_kv", "0:b/1")
			},
		},
		{
			id: "C3-PK-UPDATE-null", section: "3", says: "update sets NULL where null stands",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.put("hfc_kv", fmt.Sprintf(`{"update":{"id":%d,"note":null}}`, p.id(0)))
				p.holds("hfc_kv", "0:null/1")
			},
		},
		{
			id: "C3-PK-UPDATE-missing", section: "3", says: "update of an absent key is ignored",
			run: func(p *probe) {
				p.put("hfc_kv", fmt.Sprintf(`{"update":{"id":%d,"note":"b"}}`, p.id(0)))
				p.holds("hfc_kv", "")
			},
		},
		{
			id: "C3-PK-UPDATE-no-key", section: "3", says: "update needs all columns of the key",
			run: func(p *probe) {
				p.array("hfc_kv", `{"update":{"note":"b"}}`).bad(1)
				p.array("hfc_composite", fmt.Sprintf(`{"update":{"k1":%d,"note":"b"}}`, p.id(0))).bad(1)
			},
		},
		{
			id: "C3-PK-UPDATE-key", section: "3", says: "a key cannot be changed by update: a new key is an absent one",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.put("hfc_kv", fmt.Sprintf(`{"update":{"id":%d,"n":9}}`, p.id(1)))
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C3-PK-ORDER", section: "3", says: "all operations on a key in one request are applied in their order",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1), del(p, 0), p.kv(0, "b", 2), fmt.Sprintf(`{"update":{"id":%d,"n":3}}`, p.id(0)), p.kv(1, "x", 1), del(p, 1))
				p.holds("hfc_kv", "0:b/3")
			},
		},
		{
			id: "C3-PK-ORDER-step", section: "3", says: "operations on a key from several requests of one endpoint that fall into one step are applied in their order", needs: needFaults,
			run: func(p *probe) {
				p.sim().HoldIngest("")
				p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.array("hfc_kv", del(p, 0)).token()
				tok := p.array("hfc_kv", p.kv(0, "b", 2)).token()
				p.sim().ReleaseIngest("")
				p.complete(tok)
				p.holds("hfc_kv", "0:b/2")
			},
		},
		{
			id: "C3-PK-REPLAY", section: "3", says: "replaying a suffix of the changes to its end gives the same rows",
			run: func(p *probe) {
				changes := []string{
					p.kv(0, "a", 1), p.kv(1, "b", 2), del(p, 0), p.kv(0, "c", 3),
					fmt.Sprintf(`{"update":{"id":%d,"n":7}}`, p.id(1)), p.kv(2, "d", 4), del(p, 2),
				}
				p.put("hfc_kv", changes...)
				const end = "0:c/3 1:b/7"
				p.holds("hfc_kv", end)
				for from := range changes {
					p.put("hfc_kv", changes[from:]...)
					p.holds("hfc_kv", end)
				}
			},
		},
		{
			id: "C3-PK-COMPOSITE", section: "3", says: "a key of several columns is equal only in all of them",
			run: func(p *probe) {
				row := func(k2, note string) string {
					return fmt.Sprintf(`{"insert":{"k1":%d,"k2":"%s","note":"%s"}}`, p.id(0), k2, note)
				}
				drop := func(k2 string) string { return fmt.Sprintf(`{"delete":{"k1":%d,"k2":"%s"}}`, p.id(0), k2) }
				p.after(func() { p.put("hfc_composite", drop("x"), drop("y")) })
				p.put("hfc_composite", row("x", "a"), row("y", "b"), row("x", "c"))
				p.put("hfc_composite", drop("y"))
				rows := p.query(fmt.Sprintf("SELECT k2, note FROM hfc_composite WHERE k1 = %d", p.id(0)))
				if len(rows) != 1 || text(rows[0]["k2"]) != "x" || text(rows[0]["note"]) != "c" {
					p.failf("expected one row x/c, got %v", rows)
				}
			},
		},
		{
			id: "C3-PK-MATERIALIZED", section: "3", says: "a table with a primary key can be queried although it was not declared materialized",
			run: func(p *probe) {
				want(p, "materialized of hfc_kv as declared", false, p.table("hfc_kv").Materialized)
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C3-BAG-DUPLICATES", section: "3", says: "without a primary key equal rows count",
			run: func(p *probe) {
				row := fmt.Sprintf(`{"insert":{"id":%d,"note":"a"}}`, p.id(0))
				p.put("hfc_bag", row, row)
				p.put("hfc_bag", row)
				want(p, "the rows", "0:a×3", p.bag())
			},
		},
		{
			id: "C3-BAG-DELETE", section: "3", says: "without a primary key delete takes one of the whole row away",
			run: func(p *probe) {
				row := fmt.Sprintf(`{"id":%d,"note":"a"}`, p.id(0))
				p.put("hfc_bag", `{"insert":`+row+`}`, `{"insert":`+row+`}`)
				p.put("hfc_bag", `{"delete":`+row+`}`)
				want(p, "the rows", "0:a×1", p.bag())
			},
		},
		{
			id: "C3-BAG-UPDATE", section: "3", says: `without a primary key update is a parse error: "update operation is not supported on this stream"`,
			run: func(p *probe) {
				d := p.array("hfc_bag", fmt.Sprintf(`{"update":{"id":%d,"note":"a"}}`, p.id(0))).bad(1)
				if !strings.Contains(d.Errors[0].Description, "update operation is not supported on this stream") {
					p.failf("expected a description with %q, got %q", "update operation is not supported on this stream", d.Errors[0].Description)
				}
			},
		},
		{
			id: "C3-BAG-REPLAY", section: "3", says: "without a primary key a replay is not idempotent",
			run: func(p *probe) {
				for range 2 {
					p.put("hfc_bag", fmt.Sprintf(`{"insert":{"id":%d,"note":"a"}}`, p.id(0)))
				}
				want(p, "the rows", "0:a×2", p.bag())
			},
		},
		{
			id: "C3-BAG-NEGATIVE", section: "3", says: "without a primary key a deletion before its insert leaves a negative weight that the insert takes up", needs: needFaults,
			run: func(p *probe) {
				row := fmt.Sprintf(`{"id":%d,"note":"a"}`, p.id(0))
				p.put("hfc_bag", `{"delete":`+row+`}`)
				want(p, "the rows", "", p.bag())
				p.put("hfc_bag", `{"insert":`+row+`}`)
				want(p, "the rows", "", p.bag())
				p.put("hfc_bag", `{"insert":`+row+`}`)
				want(p, "the rows", "0:a×1", p.bag())
			},
		},
	}
}

// stepClauses are contract §4.1.
func stepClauses() []clause {
	oneWorker := func(o *felderasim.Options) { o.Workers = 1 }
	many := func(p *probe, from, n int) string {
		rows := make([]string, n)
		for i := range rows {
			rows[i] = p.kv(from+i, "a", i)
		}
		return "[" + strings.Join(rows, ",") + "]"
	}
	return []clause{
		{
			id: "C4.1-ARRAY-one-step", section: "4.1", says: "one array is one step, also above the batch size of 10 000 × workers", needs: needFaults, sim: oneWorker,
			run: func(p *probe) {
				before := p.stats().Global.Initiated
				p.complete(p.ingress("hfc_kv", arrayParams, many(p, 0, core.BatchPerWorker+5_000)).token())
				want(p, "steps", before+1, p.stats().Global.Initiated)
			},
		},
		{
			id: "C4.1-ARRAY-atomic", section: "4.1", says: "no query sees half of an array",
			run: func(p *probe) {
				for round := range 5 {
					tok := p.array("hfc_kv", p.kv(0, "r", round), p.kv(1, "r", round), p.kv(2, "r", round)).token()
					for done := false; !done; {
						done = p.status(tok).Status == "complete"
						seen := p.query(fmt.Sprintf("SELECT COUNT(DISTINCT n) AS d FROM hfc_kv WHERE id >= %d AND id <= %d", p.id(0), p.id(2)))
						if d := string(seen[0]["d"]); d != "1" && d != "0" {
							p.failf("expected rows of one array, got %s different ones", d)
						}
					}
				}
			},
		},
		{
			id: "C4.1-ENTRIES-whole", section: "4.1", says: "a step takes whole queue entries until it has 10 000 × workers", needs: needFaults, sim: oneWorker,
			run: func(p *probe) {
				p.sim().HoldIngest("")
				var toks []string
				for n := range 3 {
					toks = append(toks, p.ingress("hfc_kv", arrayParams, many(p, n*6000, 6000)).token())
				}
				p.sim().ReleaseIngest("")
				a, b, c := p.complete(toks[0]), p.complete(toks[1]), p.complete(toks[2])
				if a != b || c != b+1 {
					p.failf("expected the arrays in steps n, n and n+1, got %d, %d, %d", a, b, c)
				}
			},
		},
		{
			id: "C4.1-RECORDS-cut", section: "4.1", says: "records without an array can be cut between any two across steps", needs: needFaults, sim: oneWorker,
			run: func(p *probe) {
				p.sim().HoldIngest("")
				rows := make([]string, core.BatchPerWorker+1)
				for i := range rows {
					rows[i] = p.kv(i, "a", i)
				}
				before := p.stats().Global.Initiated
				tok := p.single("hfc_kv", rows...).token()
				p.sim().ReleaseIngest("")
				p.complete(tok)
				want(p, "steps", before+2, p.stats().Global.Initiated)
			},
		},
		{
			id: "C4.1-ALL-ENDPOINTS", section: "4.1", says: "all endpoints are flushed in the same step", needs: needFaults,
			run: func(p *probe) {
				p.sim().HoldIngest("")
				a, b := p.array("hfc_kv", p.kv(0, "a", 1)).token(), p.array("hfc_pair", p.kv(0, "b", 2)).token()
				p.sim().ReleaseIngest("")
				want(p, "the step of the second table", p.complete(a), p.complete(b))
			},
		},
		{
			id: "C4.3-TWO-REQUESTS", section: "4.3", says: "two requests without a transaction can land in different steps",
			run: func(p *probe) {
				a := p.complete(p.array("hfc_kv", p.kv(0, "a", 1)).token())
				b := p.complete(p.array("hfc_pair", p.kv(0, "b", 2)).token())
				if b <= a {
					p.failf("expected a later step for the request that was sent when the first had completed, got %d and %d", a, b)
				}
			},
		},
	}
}

// transactionClauses are contract §4.2.
func transactionClauses() []clause {
	return []clause{
		{
			id: "C4.2-START", section: "4.2", says: `start_transaction answers 200 {"transaction_id":N}`, needs: needExclusive,
			run: func(p *probe) {
				if id := p.begin(); id < 1 {
					p.failf("expected an id from 1 on, got %d", id)
				}
			},
		},
		{
			id: "C4.2-IDS", section: "4.2", says: "ids count from 1 in each process", needs: needRestart | needExclusive | needManager,
			run: func(p *probe) {
				for range 2 {
					p.restart()
					for n := range int64(3) {
						want(p, "the id", n+1, p.begin())
						p.commit()
					}
				}
			},
		},
		{
			id: "C4.2-START-twice", section: "4.2", says: "a second start gets 409 TransactionInProgress", needs: needExclusive,
			run: func(p *probe) {
				p.begin()
				p.post("/start_transaction").refused(http.StatusConflict, "TransactionInProgress")
			},
		},
		{
			id: "C4.2-START-twice-message", section: "4.2", says: "the 409 of a second start has its message", needs: needExclusive,
			run: func(p *probe) {
				p.begin()
				e := p.post("/start_transaction").refused(http.StatusConflict, "TransactionInProgress")
				want(p, "the message", "Cannot perform this operation while there is a transaction in progress", e.Message)
			},
		},
		{
			id: "C4.2-COMMIT-none", section: "4.2", says: "commit without an open transaction gets 400 NoTransactionInProgress", needs: needExclusive,
			run: func(p *probe) {
				e := p.post("/commit_transaction").refused(http.StatusBadRequest, "NoTransactionInProgress")
				want(p, "the message", "This operation requires an active transaction, but none is currently in progress", e.Message)
			},
		},
		{
			id: "C4.2-COMMIT-twice", section: "4.2", says: "a second commit gets 400", needs: needExclusive,
			run: func(p *probe) {
				p.begin()
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.ingested(tok)
				p.commit()
				p.post("/commit_transaction").refused(http.StatusBadRequest, "NoTransactionInProgress")
				p.complete(tok)
			},
		},
		{
			id: "C4.2-REQUESTED", section: "4.2", says: "the engine opens a requested transaction only when input arrives: until then transaction_status is NoTransaction, although transaction_id and the initiator are set", needs: needExclusive,
			run: func(p *probe) {
				id := p.begin()
				g := p.stats().Global
				want(p, "transaction_status", "NoTransaction", g.TransactionStatus)
				want(p, "transaction_id", id, g.TransactionID)
				if g.Initiators.API == nil || *g.Initiators.API != "Started" || g.Initiators.ID == nil || *g.Initiators.ID != id {
					p.failf("expected the initiator Started with id %d, got %+v", id, g.Initiators)
				}
			},
		},
		{
			id: "C4.2-OPENED", section: "4.2", says: "with input transaction_status becomes TransactionInProgress", needs: needExclusive,
			run: func(p *probe) {
				id := p.begin()
				p.ingested(p.array("hfc_kv", p.kv(0, "a", 1)).token())
				g := p.stats().Global
				want(p, "transaction_status", "TransactionInProgress", g.TransactionStatus)
				want(p, "transaction_id", id, g.TransactionID)
			},
		},
		{
			id: "C4.2-VANISHES", section: "4.2", says: "a commit before any step answers 200 and no transaction takes place", needs: needExclusive,
			run: func(p *probe) {
				p.begin()
				p.commit()
				g := p.stats().Global
				want(p, "transaction_status", "NoTransaction", g.TransactionStatus)
				if g.Initiators.API != nil {
					p.failf("expected no initiator, got %s", *g.Initiators.API)
				}
				p.put("hfc_kv", p.kv(0, "a", 1))
			},
		},
		{
			id: "C4.2-VANISHES-queued", section: "4.2", says: "data that was queued but not ingested at such a commit goes in as ordinary steps", needs: needFaults,
			run: func(p *probe) {
				p.sim().HoldIngest("")
				p.begin()
				a, b := p.array("hfc_kv", p.kv(0, "a", 1)).token(), p.array("hfc_pair", p.kv(0, "b", 2)).token()
				p.commit()
				p.sim().ReleaseIngest("")
				p.complete(a)
				p.complete(b)
				want(p, "transaction_status", "NoTransaction", p.stats().Global.TransactionStatus)
			},
		},
		{
			id: "C4.2-INGESTS", section: "4.2", says: "inside a transaction rows are ingested: their token gets a step", needs: needExclusive,
			run: func(p *probe) {
				p.begin()
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.ingested(tok)
				want(p, "the status", "inprogress", p.status(tok).Status)
			},
		},
		{
			id: "C4.2-FREEZES", section: "4.2", says: "while a transaction is open nothing completes, in any table", needs: needExclusive,
			run: func(p *probe) {
				p.begin()
				p.ingested(p.array("hfc_kv", p.kv(0, "a", 1)).token())
				other := p.array("hfc_pair", p.kv(0, "b", 2)).token()
				p.ingested(other)
				p.stays("the other table's rows stay incomplete", func() bool { return p.status(other).Status == "inprogress" })
				p.commit()
				p.complete(other)
			},
		},
		{
			id: "C4.2-COMPLETED-STEPS", section: "4.2", says: "total_completed_steps stands still while a transaction is open, total_initiated_steps does not", needs: needExclusive,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				before := p.stats().Global
				p.begin()
				p.ingested(p.array("hfc_kv", p.kv(0, "b", 2)).token())
				after := p.stats().Global
				want(p, "total_completed_steps", before.Completed, after.Completed)
				if after.Initiated <= before.Initiated {
					p.failf("expected more than %d initiated steps, got %d", before.Initiated, after.Initiated)
				}
			},
		},
		{
			id: "C4.2-TWO-TABLES", section: "4.2", says: "the rows of several tables appear together at the commit", needs: needExclusive,
			run: func(p *probe) {
				p.begin()
				a := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.ingested(a)
				b := p.array("hfc_pair", p.kv(0, "b", 2)).token()
				p.ingested(b)
				p.holds("hfc_kv", "")
				p.holds("hfc_pair", "")
				p.commit()
				p.complete(a)
				p.complete(b)
				p.holds("hfc_kv", "0:a/1")
				p.holds("hfc_pair", "0:b/2")
			},
		},
		{
			id: "C4.2-BEFORE", section: "4.2", says: "data that was queued before the start and not yet ingested belongs to the transaction", needs: needFaults,
			run: func(p *probe) {
				p.sim().HoldIngest("")
				early := p.array("hfc_kv", p.kv(0, "early", 1)).token()
				p.begin()
				p.sim().ReleaseIngest("")
				p.ingested(early)
				p.stays("the early row is not seen", func() bool { return p.rows("hfc_kv") == "" })
				p.commit()
				p.complete(early)
			},
		},
		{
			id: "C4.2-LAST-BATCH", section: "4.2", says: "the commit first ingests one more batch of every endpoint into the transaction", needs: needFaults,
			sim: func(o *felderasim.Options) { o.Manual = true },
			run: func(p *probe) {
				p.begin()
				in := p.array("hfc_pair", p.kv(0, "b", 2)).token()
				want(p, "steps", 1, p.sim().Step(1))
				last := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.commit()
				want(p, "steps", 1, p.sim().Step(1))
				if p.status(last).Step == nil {
					p.failf("expected that the queued row is ingested with the commit, got no step")
				}
				want(p, "transaction_status", "CommitInProgress", p.stats().Global.TransactionStatus)
				p.holds("hfc_kv", "")
				want(p, "steps", 1, p.sim().Step(1))
				p.complete(in)
				p.complete(last)
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C4.2-OUTSIDE", section: "4.2", says: "what is still queued after that batch falls outside of the transaction", needs: needFaults,
			run: func(p *probe) {
				p.begin()
				in := p.array("hfc_pair", p.kv(0, "b", 2)).token()
				p.ingested(in)
				p.sim().HoldIngest("hfc_kv")
				out := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.commit()
				p.complete(in)
				p.holds("hfc_pair", "0:b/2")
				p.holds("hfc_kv", "")
				p.sim().ReleaseIngest("")
				p.complete(out)
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C4.2-COMMITTING", section: "4.2", says: "while a transaction commits nothing is ingested", needs: needFaults,
			run: func(p *probe) {
				p.committing()
				tok := p.array("hfc_pair", p.kv(0, "b", 2)).token()
				p.stays("the row is not ingested", func() bool { return p.status(tok).Step == nil })
				p.sim().ReleaseCommit()
				p.complete(tok)
			},
		},
		{
			id: "C4.2-COMMITTING-status", section: "4.2", says: "while it commits transaction_status is CommitInProgress and the initiators are cleared", needs: needFaults,
			run: func(p *probe) {
				p.committing()
				if api := p.stats().Global.Initiators.API; api != nil {
					p.failf("expected no initiator, got %s", *api)
				}
				p.sim().ReleaseCommit()
			},
		},
		{
			id: "C4.2-COMMITTING-start", section: "4.2", says: "the next transaction may be started while one commits", needs: needFaults,
			run: func(p *probe) {
				id := p.committing()
				want(p, "the id", id+1, p.begin())
				p.sim().ReleaseCommit()
				p.noTransaction()
				tok := p.array("hfc_pair", p.kv(0, "b", 2)).token()
				p.ingested(tok)
				want(p, "the status", "inprogress", p.status(tok).Status)
				p.commit()
				p.complete(tok)
			},
		},
		{
			id: "C4.2-ANY-CLIENT", section: "4.2", says: "a transaction has no owner: any client may commit it", needs: needFaults,
			run: func(p *probe) {
				if _, err := p.sim().StartTransaction(); err != nil {
					p.failf("expected a stranger's transaction, got %v", err)
				}
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.ingested(tok)
				want(p, "the status", "inprogress", p.status(tok).Status)
				p.commit()
				p.complete(tok)
			},
		},
		{
			id: "C4.2-END", section: "4.2", says: "after the commit /stats has neither transaction nor initiator", needs: needExclusive,
			run: func(p *probe) {
				p.begin()
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.ingested(tok)
				p.commit()
				p.complete(tok)
				g := p.stats().Global
				want(p, "transaction_status", "NoTransaction", g.TransactionStatus)
				want(p, "transaction_id", 0, g.TransactionID)
				if g.Initiators.API != nil || g.Initiators.ID != nil {
					p.failf("expected no initiator, got %+v", g.Initiators)
				}
			},
		},
		{
			id: "C4.2-PARSE-ERROR", section: "4.2", says: "a refused array inside a transaction leaves it open and adds nothing to it", needs: needExclusive,
			run: func(p *probe) {
				p.begin()
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.ingested(tok)
				p.array("hfc_kv", p.kv(1, "b", 2), `{"insert":{"id":"x"}}`).bad(1)
				want(p, "transaction_status", "TransactionInProgress", p.stats().Global.TransactionStatus)
				p.commit()
				p.complete(tok)
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C4.2-503", section: "4.2", says: "start_transaction gets 503 while the pipeline restores or bootstraps", needs: needFaults,
			run: func(p *probe) {
				p.sim().SetState(core.StateRestoring)
				p.post("/start_transaction").refused(http.StatusServiceUnavailable, "RestoreInProgress")
				p.sim().SetState(core.StateBootstrapping)
				p.post("/start_transaction").refused(http.StatusServiceUnavailable, "BootstrapInProgress")
			},
		},
	}
}

// committing brings a transaction into the state of committing and keeps it
// there.
func (p *probe) committing() int64 {
	id := p.begin()
	p.ingested(p.array("hfc_kv", p.kv(9, "t", 1)).token())
	p.sim().HoldCommit()
	p.commit()
	p.until("the transaction commits", func() bool { return p.stats().Global.TransactionStatus == "CommitInProgress" })
	return id
}

// tokenParts is what a token holds.
type tokenParts struct {
	Incarnation string `json:"u"`
	Endpoint    uint64 `json:"e"`
	Count       uint64 `json:"c"`
}

// readToken demands the form of a token and gives its parts.
func (p *probe) readToken(token string) tokenParts {
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil {
		p.failf("expected a token in base64url without padding, got %q", token)
	}
	var m map[string]jsontext.Value
	var t tokenParts
	if json.Unmarshal(b, &m) != nil || json.Unmarshal(b, &t) != nil {
		p.failf("expected a JSON object in the token, got %s", clip(b))
	}
	p.has("the token", m, "u", "e", "c")
	return t
}

// writeToken makes a token.
func (p *probe) writeToken(t tokenParts) string {
	b, err := json.Marshal(t)
	p.noErr("writing a token", err)
	return base64.RawURLEncoding.EncodeToString(b)
}

// completionClauses are contract §5.
func completionClauses() []clause {
	return []clause{
		{
			id: "C5-FORM", section: "5", says: "a token is base64url without padding of an object with u, e and c",
			run: func(p *probe) {
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.readToken(tok)
				p.complete(tok)
			},
		},
		{
			id: "C5-INCARNATION", section: "5", says: "u is the incarnation of /stats",
			run: func(p *probe) {
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				want(p, "u", p.incarnation(), p.readToken(tok).Incarnation)
				p.complete(tok)
			},
		},
		{
			id: "C5-COUNT", section: "5", says: "c is the number of records that the endpoint has received",
			run: func(p *probe) {
				a := p.readToken(p.array("hfc_kv", p.kv(0, "a", 1)).token())
				for n := range 3 {
					tok := p.array("hfc_kv", p.kv(0, "a", 1), p.kv(1, "b", 2)).token()
					want(p, "c", a.Count+2*uint64(n+1), p.readToken(tok).Count)
					p.complete(tok)
				}
			},
		},
		{
			id: "C5-COVERS", section: "5", says: "a token covers what was sent to its endpoint before",
			run: func(p *probe) {
				p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.complete(p.array("hfc_kv", p.kv(1, "b", 2)).token())
				p.holds("hfc_kv", "0:a/1 1:b/2")
			},
		},
		{
			id: "C5-STATES", section: "5", says: "the status goes from inprogress without step to inprogress with one to complete with the same", needs: needFaults,
			run: func(p *probe) {
				p.sim().HoldIngest("")
				p.sim().HoldCompletion()
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.stays("the token has no step", func() bool { c := p.status(tok); return c.Step == nil && c.Status == "inprogress" })
				p.sim().ReleaseIngest("")
				step := p.ingested(tok)
				p.stays("the token is in progress at its step", func() bool {
					c := p.status(tok)
					return c.Step != nil && *c.Step == step && c.Status == "inprogress"
				})
				p.sim().ReleaseCompletion()
				want(p, "the step", step, p.complete(tok))
			},
		},
		{
			id: "C5-OUTPUTS", section: "5", says: "a stuck output stalls every token and does not stop ingestion", needs: needFaults,
			run: func(p *probe) {
				p.sim().HoldCompletion()
				a, b := p.array("hfc_kv", p.kv(0, "a", 1)).token(), p.array("hfc_pair", p.kv(0, "b", 2)).token()
				p.ingested(a)
				p.ingested(b)
				p.stays("both are incomplete", func() bool { return p.status(a).Status == "inprogress" && p.status(b).Status == "inprogress" })
				p.sim().ReleaseCompletion()
				p.complete(a)
				p.complete(b)
			},
		},
		{
			id: "C5-STEP", section: "5", says: "complete means total_completed_steps at or above the step",
			run: func(p *probe) {
				step := p.complete(p.array("hfc_kv", p.kv(0, "a", 1)).token())
				if done := p.stats().Global.Completed; done < step {
					p.failf("expected total_completed_steps of at least %d, got %d", step, done)
				}
			},
		},
		{
			id: "C5-STEP-order", section: "5", says: "later rows of an endpoint have no earlier step",
			run: func(p *probe) {
				last := uint64(0)
				for n := range 20 {
					step := p.complete(p.array("hfc_kv", p.kv(0, "a", n)).token())
					if step <= last {
						p.failf("expected a step above %d, got %d", last, step)
					}
					last = step
				}
			},
		},
		{
			id: "C5-OLD", section: "5", says: "an old token keeps answering complete",
			run: func(p *probe) {
				var toks []string
				for n := range 20 {
					toks = append(toks, p.array("hfc_kv", p.kv(0, "a", n)).token())
				}
				p.complete(toks[len(toks)-1])
				slices.Reverse(toks)
				for _, tok := range toks {
					want(p, "the status of an old token", "complete", p.status(tok).Status)
				}
			},
		},
		{
			id: "C5-PADDING", section: "5", says: "a token with padding does not decode: 400 InvalidParam",
			run: func(p *probe) {
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.complete(tok)
				p.completionOf(tok+"=").refused(http.StatusBadRequest, "InvalidParam")
				p.completionOf(tok+"==").refused(http.StatusBadRequest, "InvalidParam")
			},
		},
		{
			id: "C5-UNDECODABLE", section: "5", says: "what is not a token gets 400 InvalidParam",
			run: func(p *probe) {
				for _, bad := range []string{"", "%", "e30", base64.RawURLEncoding.EncodeToString([]byte("nonsense"))} {
					p.get("/completion_status?token="+url.QueryEscape(bad)).refused(http.StatusBadRequest, "InvalidParam")
				}
			},
		},
		{
			id: "C5-FOREIGN", section: "5", says: "the token of another incarnation gets 410 PipelineRestarted, which names both",
			run: func(p *probe) {
				t := p.readToken(p.ingress("hfc_kv", arrayParams, "").token())
				now := t.Incarnation
				t.Incarnation = "019a0000-0000-7000-8000-000000000001"
				e := p.completionOf(p.writeToken(t)).refused(http.StatusGone, "PipelineRestarted")
				if !strings.Contains(e.Message, t.Incarnation) || !strings.Contains(e.Message, now) {
					p.failf("expected both incarnations in the message, got %q", e.Message)
				}
			},
		},
		{
			id: "C5-RESTART", section: "5", says: "a restart turns every token into 410 PipelineRestarted", needs: needRestart | needManager,
			run: func(p *probe) {
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.complete(tok)
				p.restart()
				p.completionOf(tok).refused(http.StatusGone, "PipelineRestarted")
			},
		},
		{
			id: "C5-UNKNOWN-ENDPOINT", section: "5", says: "a token of an endpoint that does not exist gets 410 UnknownEndpointInCompletionToken with its id",
			run: func(p *probe) {
				t := p.readToken(p.ingress("hfc_kv", arrayParams, "").token())
				t.Endpoint = 987654
				e := p.completionOf(p.writeToken(t)).refused(http.StatusGone, "UnknownEndpointInCompletionToken")
				want(p, "details", `{"endpoint_id":987654}`, string(e.Details))
			},
		},
		{
			id: "C5-NEVER-ISSUED", section: "5", says: "a count that was never issued is inprogress without a step",
			run: func(p *probe) {
				t := p.readToken(p.ingress("hfc_kv", arrayParams, "").token())
				t.Count += 1 << 40
				p.put("hfc_kv", p.kv(0, "a", 1))
				want(p, "the status", "inprogress without a step", p.status(p.writeToken(t)).String())
			},
		},
		{
			id: "C5-EMPTY-BODY", section: "5", says: "an empty body gets a token that completes",
			run: func(p *probe) { p.complete(p.ingress("hfc_kv", arrayParams, "").token()) },
		},
		{
			id: "C5-EMPTY-NEW", section: "5", says: "so does the very first request of an endpoint", needs: needFaults,
			run: func(p *probe) {
				tok := p.ingress("hfc_kv", arrayParams, "").token()
				want(p, "c", 0, p.readToken(tok).Count)
				p.complete(tok)
			},
		},
		{
			id: "C5-PAUSED", section: "5", says: "pausing the pipeline does not keep queued rows from completing", needs: needFaults,
			run: func(p *probe) {
				p.sim().HoldIngest("")
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.pause()
				p.sim().ReleaseIngest("")
				p.complete(tok)
			},
		},
		{
			id: "C5-HTTP-200", section: "5", says: "completion_status answers 200 also while it is in progress, never 202", needs: needFaults,
			run: func(p *probe) {
				p.sim().HoldIngest("")
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				p.completionOf(tok).is(http.StatusOK)
			},
		},
		{
			id: "C5-ASKED-OFTEN", section: "5", says: "asking for a status changes nothing: the answer after complete stays complete",
			run: func(p *probe) {
				tok := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				step := p.complete(tok)
				for range 5 {
					want(p, "the step", step, p.complete(tok))
				}
			},
		},
	}
}
