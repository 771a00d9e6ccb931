package main

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"holdfast/test/felderasim"
	"holdfast/test/felderasim/core"
)

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

func gzipped(s string) string {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, s) // to memory
	_ = z.Close()
	return b.String()
}

// parameterClauses are contract §2.1.
func parameterClauses() []clause {
	return []clause{
		{
			id: "C2.1-FORMAT-default", section: "2.1", says: "the default format is csv: a CSV body without parameters is taken",
			run: func(p *probe) {
				p.complete(p.ingress("hfc_kv", "", fmt.Sprintf("%d,hello,7\n", p.id(0))).token())
				p.holds("hfc_kv", "0:hello/7")
			},
		},
		{
			id: "C2.1-FORMAT-not-json", section: "2.1", says: "a JSON body without format=json is not taken for JSON",
			run: func(p *probe) {
				p.ingress("hfc_kv", "", "["+p.kv(0, "a", 1)+"]\n").refused(http.StatusBadRequest, "ParseErrors")
			},
		},
		{
			id: "C2.1-UPDATE-FORMAT-default", section: "2.1", says: "the default update_format is insert_delete",
			run: func(p *probe) {
				p.complete(p.ingress("hfc_kv", "format=json", p.kv(0, "a", 1)).token())
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C2.1-ARRAY-default", section: "2.1", says: "the default of array is false: an array is a bad record then",
			run: func(p *probe) { p.single("hfc_kv", "["+p.kv(0, "a", 1)+"]").bad(1); p.holds("hfc_kv", "") },
		},
		{
			id: "C2.1-UNKNOWN", section: "2.1", says: "unknown parameters are ignored, wait, backpressure and partial among them, and make no endpoint of their own",
			run: func(p *probe) {
				a := p.array("hfc_kv", p.kv(0, "a", 1)).token()
				b := p.ingress("hfc_kv", arrayParams+"&wait=true&backpressure=true&partial=true&nonsense=1", "["+p.kv(1, "b", 2)+"]").token()
				p.complete(b)
				want(p, "the endpoint", p.readToken(a).Endpoint, p.readToken(b).Endpoint)
				p.holds("hfc_kv", "0:a/1 1:b/2")
			},
		},
		{
			id: "C2.1-LINES-multiple", section: "2.1", says: "by default a record may stretch over lines",
			run: func(p *probe) {
				p.complete(p.single("hfc_kv", strings.ReplaceAll(p.kv(0, "a", 1), ",", "\n,\n")).token())
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C2.1-LINES-single", section: "2.1", says: "with lines=single every line is a record",
			run: func(p *probe) {
				p.complete(p.ingress("hfc_kv", singleParams+"&lines=single", p.kv(0, "a", 1)+"\n"+p.kv(1, "b", 2)+"\n").token())
				p.holds("hfc_kv", "0:a/1 1:b/2")
			},
		},
	}
}

// formatClauses are contract §2.2.
func formatClauses() []clause {
	// into sends one body to hfc_kv, into which a first row was put, and
	// compares the rows.
	into := func(id, says, params string, body func(p *probe) string, expected string) clause {
		return clause{id: id, section: "2.2", says: says, run: func(p *probe) {
			p.put("hfc_kv", p.kv(0, "old", 1))
			p.complete(p.ingress("hfc_kv", params, body(p)).token())
			p.holds("hfc_kv", expected)
		}}
	}
	bad := func(id, says, params string, body func(p *probe) string) clause {
		return clause{id: id, section: "2.2", says: says, run: func(p *probe) {
			p.ingress("hfc_kv", params, body(p)).bad(1)
			p.holds("hfc_kv", "")
		}}
	}
	return []clause{
		into("C2.2-INSERT", `{"insert":ROW} inserts`, arrayParams, func(p *probe) string { return "[" + p.kv(1, "a", 2) + "]" }, "0:old/1 1:a/2"),
		into("C2.2-DELETE", `{"delete":ROW} deletes`, arrayParams, func(p *probe) string { return fmt.Sprintf(`[{"delete":{"id":%d}}]`, p.id(0)) }, ""),
		into("C2.2-UPDATE", `{"update":ROW} updates`, arrayParams, func(p *probe) string { return fmt.Sprintf(`[{"update":{"id":%d,"n":9}}]`, p.id(0)) }, "0:old/9"),
		into("C2.2-EMPTY-ARRAY", "an empty array is taken and changes nothing", arrayParams, func(*probe) string { return "[]" }, "0:old/1"),
		bad("C2.2-UNKNOWN-KEY", "an unknown top-level key is a parse error", singleParams, func(p *probe) string { return fmt.Sprintf(`{"upsert":{"id":%d}}`, p.id(0)) }),
		into("C2.2-TABLE-KEY", "a string under the top-level key table is tolerated and ignored", singleParams,
			func(p *probe) string {
				return fmt.Sprintf(`{"table":"elsewhere","insert":{"id":%d,"note":"a","n":2}}`, p.id(1))
			}, "0:old/1 1:a/2"),
		into("C2.2-ORDER", "several keys of one object are applied as delete, insert, update", singleParams,
			func(p *probe) string {
				id := p.id(0)
				return fmt.Sprintf(`{"update":{"id":%d,"n":9},"insert":{"id":%d,"note":"new","n":5},"delete":{"id":%d}}`, id, id, id)
			}, "0:new/9"),
		into("C2.2-RAW", "update_format=raw: each record is an insert", "format=json&update_format=raw",
			func(p *probe) string { return fmt.Sprintf(`{"id":%d,"note":"raw","n":2}`, p.id(1)) }, "0:old/1 1:raw/2"),
		into("C2.2-RAW-array", "update_format=raw with array=true takes an array of rows", "format=json&update_format=raw&array=true",
			func(p *probe) string { return fmt.Sprintf(`[{"id":%d,"note":"raw","n":2}]`, p.id(1)) }, "0:old/1 1:raw/2"),
		into("C2.2-DEBEZIUM-insert", "debezium: after is inserted", "format=json&update_format=debezium",
			func(p *probe) string {
				return fmt.Sprintf(`{"payload":{"op":"c","before":null,"after":{"id":%d,"note":"d","n":2}}}`, p.id(1))
			}, "0:old/1 1:d/2"),
		into("C2.2-DEBEZIUM-delete", "debezium: before is deleted", "format=json&update_format=debezium",
			func(p *probe) string {
				return fmt.Sprintf(`{"payload":{"op":"d","before":{"id":%d,"note":"old","n":1},"after":null}}`, p.id(0))
			}, ""),
		into("C2.2-DEBEZIUM-op", "debezium: op is not acted on: a delete with after inserts", "format=json&update_format=debezium",
			func(p *probe) string {
				return fmt.Sprintf(`{"payload":{"op":"d","after":{"id":%d,"note":"d","n":2}}}`, p.id(1))
			}, "0:old/1 1:d/2"),
		bad("C2.2-DEBEZIUM-payload", "debezium: payload is required", "format=json&update_format=debezium", func(p *probe) string { return fmt.Sprintf(`{"op":"c","after":{"id":%d}}`, p.id(0)) }),
		bad("C2.2-DEBEZIUM-op-required", "debezium: a valid op is required", "format=json&update_format=debezium", func(p *probe) string { return fmt.Sprintf(`{"payload":{"op":"x","after":{"id":%d}}}`, p.id(0)) }),
		into("C2.2-POSITIONAL", "a row may be an array of all columns", arrayParams, func(p *probe) string { return fmt.Sprintf(`[{"insert":[%d,"pos",2]}]`, p.id(1)) }, "0:old/1 1:pos/2"),
		into("C2.2-FRAMING", "records need nothing between them", singleParams, func(p *probe) string { return p.kv(1, "a", 2) + p.kv(2, "b", 3) }, "0:old/1 1:a/2 2:b/3"),
		into("C2.2-TWO-ARRAYS", "a body may hold several arrays", arrayParams, func(p *probe) string { return "[" + p.kv(1, "a", 2) + "]\n[" + p.kv(2, "b", 3) + "]" }, "0:old/1 1:a/2 2:b/3"),
		{
			id: "C2.2-WEIGHTED", section: "2.2", says: "update_format=weighted and redis kill their request and break their endpoint for good (inferred from the source); other endpoints go on", needs: needFaults,
			run: func(p *probe) {
				for _, format := range []string{"weighted", "redis"} {
					params := "format=json&update_format=" + format
					for _, body := range []string{p.kv(0, "a", 1), ""} {
						a := p.send(p.ctx, http.MethodPost, p.w.base+ingressPath("hfc_kv", params), p.w.key, nil, strings.NewReader(body))
						if a.err == nil && a.status < 500 {
							p.failf("expected no answer or a server's error with %s, got %d %s", format, a.status, clip(a.body))
						}
					}
				}
				p.put("hfc_kv", p.kv(1, "b", 2))
				p.holds("hfc_kv", "1:b/2")
			},
		},
		bad("C2.2-NOT-AN-ARRAY", "with array=true a top-level value that is no array is an error", arrayParams, func(p *probe) string { return p.kv(0, "a", 1) }),
	}
}

// badBodyClauses are contract §2.3.
func badBodyClauses() []clause {
	return []clause{
		{
			id: "C2.3-SINGLE-skips", section: "2.3", says: "array=false: a bad record is reported and skipped, all others go in",
			run: func(p *probe) {
				p.single("hfc_kv", p.kv(0, "a", 1), fmt.Sprintf(`{"insert":{"id":%d,"n":"x"}}`, p.id(1)), p.kv(2, "c", 3)).bad(1)
				p.until("the good records are in", func() bool { return p.rows("hfc_kv") == "0:a/1 2:c/3" })
			},
		},
		{
			id: "C2.3-SINGLE-parts", section: "2.3", says: "array=false: of an object with several keys the parts before the bad one stay",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.single("hfc_kv", fmt.Sprintf(`{"delete":{"id":%d},"insert":{"id":%d,"n":"x"}}`, p.id(0), p.id(0))).bad(1)
				p.until("the deletion has been applied", func() bool { return p.rows("hfc_kv") == "" })
			},
		},
		{
			id: "C2.3-ARRAY-nothing", section: "2.3", says: "array=true: one bad element drops the whole array",
			run: func(p *probe) {
				p.array("hfc_kv", p.kv(0, "a", 1), fmt.Sprintf(`{"insert":{"id":%d,"n":"x"}}`, p.id(1)), p.kv(2, "c", 3)).bad(1)
				p.put("hfc_kv", p.kv(3, "d", 4))
				p.holds("hfc_kv", "3:d/4")
			},
		},
		{
			id: "C2.3-ARRAY-others", section: "2.3", says: "array=true: another array of the same body stands",
			run: func(p *probe) {
				p.ingress("hfc_kv", arrayParams, "["+p.kv(0, "a", 1)+"]\n["+fmt.Sprintf(`{"insert":{"id":%d,"n":"x"}}`, p.id(1))+"]\n["+p.kv(2, "c", 3)+"]").bad(1)
				p.until("the good arrays are in", func() bool { return p.rows("hfc_kv") == "0:a/1 2:c/3" })
			},
		},
		{
			id: "C2.3-SYNTAX", section: "2.3", says: "malformed JSON: the chunk is abandoned, earlier chunks stand",
			run: func(p *probe) {
				p.single("hfc_kv", p.kv(0, "a", 1), `{"insert":{"id":,}}`).refused(http.StatusBadRequest, "ParseErrors")
				p.until("the first record is in", func() bool { return p.rows("hfc_kv") == "0:a/1" })
			},
		},
		{
			id: "C2.3-TRUNCATED", section: "2.3", says: "a complete body with an array that is not closed is an error and applies nothing",
			run: func(p *probe) {
				p.ingress("hfc_kv", arrayParams, "["+p.kv(0, "a", 1)+",").refused(http.StatusBadRequest, "ParseErrors")
				p.put("hfc_kv", p.kv(1, "b", 2))
				p.holds("hfc_kv", "1:b/2")
			},
		},
		{
			id: "C2.3-COUNT", section: "2.3", says: "num_errors is the true count, and at most 1000 are listed",
			run: func(p *probe) {
				bad := make([]string, 1005)
				for i := range bad {
					bad[i] = `{"insert":{"id":"x"}}`
				}
				d := p.single("hfc_kv", bad...).bad(1005)
				want(p, "errors listed", 1000, len(d.Errors))
			},
		},
		{
			id: "C2.3-NO-TOKEN", section: "2.3", says: "a 400 carries no token, although the good records stay",
			run: func(p *probe) {
				a := p.single("hfc_kv", p.kv(0, "a", 1), `{"insert":{"id":"x"}}`)
				p.has("the error", a.is(http.StatusBadRequest).members(), "message", "error_code", "details")
				p.until("the good record is in", func() bool { return p.rows("hfc_kv") == "0:a/1" })
			},
		},
		{
			id: "C2.3-EVENT-NUMBER", section: "2.3", says: "event_number counts from the creation of the endpoint, not of the request",
			run: func(p *probe) {
				first := p.single("hfc_kv", `{"insert":{"id":"x"}}`).bad(1)
				second := p.single("hfc_kv", `{"insert":{"id":"x"}}`).bad(1)
				a, b := first.Errors[0].Event, second.Errors[0].Event
				if a == nil || b == nil || *b <= *a {
					p.failf("expected a higher event_number in the second request, got %v and %v", deref(a), deref(b))
				}
			},
		},
		{
			id: "C2.3-DETAILS", section: "2.3", says: "an entry names description, field, invalid_text and the tag text_event_err",
			run: func(p *probe) {
				row := fmt.Sprintf(`{"id":%d,"n":"x"}`, p.id(0))
				e := p.single("hfc_kv", `{"insert":`+row+`}`).bad(1).Errors[0]
				if e.Field == nil || e.Text == nil || e.Tag == nil {
					p.failf("expected field, invalid_text and tag, got %+v", e)
				}
				want(p, "field", "n", *e.Field)
				want(p, "invalid_text", row, *e.Text)
				want(p, "tag", "text_event_err", *e.Tag)
				if !strings.HasPrefix(e.Description, "failed to deserialize JSON record: error parsing field 'n': ") {
					p.failf("expected a description that names the field, got %q", e.Description)
				}
			},
		},
		{
			id: "C2.3-MESSAGE", section: "2.3", says: "the message counts the errors and shows the fragment",
			run: func(p *probe) {
				e := p.single("hfc_kv", `{"insert":{"id":"x"}}`).refused(http.StatusBadRequest, "ParseErrors")
				if !strings.HasPrefix(e.Message, "Errors parsing input data (1 errors):") || !strings.Contains(e.Message, `Invalid fragment: '{"id":"x"}'`) {
					p.failf("expected the count and the fragment in the message, got %q", e.Message)
				}
			},
		},
		{
			id: "C2.3-ENVELOPE", section: "2.3", says: "an error of a whole array has the tag text_envelope_err, and event_number and field null",
			run: func(p *probe) {
				e := p.ingress("hfc_kv", arrayParams, `{"insert":{}}`).bad(1).Errors[0]
				if e.Event != nil || e.Field != nil || e.Tag == nil || *e.Tag != "text_envelope_err" {
					p.failf("expected text_envelope_err without event_number and field, got %+v", e)
				}
			},
		},
		{
			id: "C2.3-PARSE-COUNTED", section: "2.3", says: "parse errors are counted in num_parse_errors of the endpoint",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				count := func() uint64 { return p.counted("hfc_kv", func(in inputStats) uint64 { return in.Metrics.Parse }) }
				before := count()
				p.array("hfc_kv", `{"insert":{"id":"x"}}`, `{"insert":{"id":"y"}}`).bad(2)
				p.until("two more errors are counted", func() bool { return count() == before+2 })
			},
		},
		{
			id: "C2.3-PARSE-COUNTED-early", section: "2.3", says: "they are counted when the array is read, before the request has ended and before its answer",
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				count := func() uint64 { return p.counted("hfc_kv", func(in inputStats) uint64 { return in.Metrics.Parse }) }
				before := count()
				r, w := io.Pipe()
				answered := make(chan answer, 1)
				p.owned.Go(func() {
					answered <- p.send(p.ctx, http.MethodPost, p.w.base+ingressPath("hfc_kv", arrayParams), p.w.key, nil, r)
				})
				_, err := io.WriteString(w, `[{"insert":{"id":"x"}}]`+strings.Repeat(" ", 1<<18))
				p.noErr("sending the array", err)
				p.until("the error is counted", func() bool { return count() == before+1 })
				select {
				case a := <-answered:
					p.failf("expected no answer to an open request, got %d", a.status)
				default:
				}
				p.noErr("ending the body", w.Close())
				select {
				case a := <-answered:
					want(p, "the answer", http.StatusBadRequest, a.status)
				case <-p.ctx.Done():
					p.failf("expected an answer, got none")
				}
				want(p, "errors at the first look behind an answer", before+1, count())
				p.array("hfc_kv", `{"insert":{"id":"y"}}`).bad(1)
				want(p, "errors at the first look behind an answer", before+2, count())
			},
		},
		{
			id: "C2.3-TOKEN-endpoint", section: "2.3", says: "a token for the good records of a 400 can be had from the endpoint",
			run: func(p *probe) {
				p.single("hfc_pair", p.kv(0, "a", 1), `{"insert":{"id":"x"}}`).bad(1)
				for _, in := range p.endpoints("hfc_pair") {
					path := "/input_endpoints/" + in.Name + "/completion_token"
					if p.w.root != "" {
						_, connector, _ := strings.Cut(in.Name, ".")
						path = "/tables/hfc_pair/connectors/" + connector + "/completion_token"
					}
					p.complete(p.get(path).token())
				}
				p.holds("hfc_pair", "0:a/1")
			},
		},
		{
			id: "C2.3-TOKEN-empty-body", section: "2.3", says: "an empty body to the same URL gives a token for the good records of a 400",
			run: func(p *probe) {
				p.single("hfc_kv", p.kv(0, "a", 1), `{"insert":{"id":"x"}}`).bad(1)
				p.complete(p.ingress("hfc_kv", singleParams, "").token())
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C2.3-DISCONNECT", section: "2.3", says: "a client that goes away in the middle: complete records stay, the endpoint counts a transport error and notes it as fatal",
			run: func(p *probe) {
				p.cut(singleParams, p.kv(0, "a", 1)+"\n"+strings.Repeat(" ", 1<<18))
				p.until("the complete record is in", func() bool { return p.rows("hfc_cut") == "0:a/1" })
				fatal := false
				for _, in := range p.endpoints("hfc_cut") {
					fatal = fatal || in.Fatal != nil
				}
				if !fatal {
					p.failf("expected a fatal_error on the endpoint, got none")
				}
			},
		},
		{
			id: "C2.3-FRAGMENT", section: "2.3", says: "the fragment of a cut request is put before the next body: that one gets 400 ParseErrors and applies nothing, the one after it works",
			run: func(p *probe) {
				p.cut(arrayParams, "["+p.kv(0, "a", 1)+","+strings.Repeat(" ", 1<<18))
				again := "[" + p.kv(0, "a", 1) + "," + p.kv(1, "b", 2) + "]"
				p.ingress("hfc_cut", arrayParams, again).refused(http.StatusBadRequest, "ParseErrors")
				p.complete(p.ingress("hfc_cut", arrayParams, "").token())
				p.holds("hfc_cut", "")
				p.complete(p.ingress("hfc_cut", arrayParams, again).token())
				p.holds("hfc_cut", "0:a/1 1:b/2")
			},
		},
		{
			id: "C2.3-FRAGMENT-fault", section: "2.3", says: "the same when the connection breaks behind the client's back", needs: needFaults,
			run: func(p *probe) {
				body := "[" + p.kv(0, "a", 1) + "," + p.kv(1, "b", 2) + "]"
				p.inject(felderasim.Fault{Kind: felderasim.CutBody, Bytes: int64(len(body) / 2)})
				p.touch("hfc_cut")
				if a := p.send(p.ctx, http.MethodPost, p.w.base+ingressPath("hfc_cut", arrayParams), p.w.key, nil, strings.NewReader(body)); a.err == nil {
					p.failf("expected no answer, got %d", a.status)
				}
				p.until("the process has noticed", func() bool {
					return p.counted("hfc_cut", func(in inputStats) uint64 { return in.Metrics.Transport }) == 1
				})
				p.ingress("hfc_cut", arrayParams, body).refused(http.StatusBadRequest, "ParseErrors")
				p.holds("hfc_cut", "")
				p.complete(p.ingress("hfc_cut", arrayParams, body).token())
				p.holds("hfc_cut", "0:a/1 1:b/2")
			},
		},
		{
			id: "C2.3-FRAGMENT-endpoint", section: "2.3", says: "the fragment stays with its endpoint: another table and another format are not touched", needs: needFaults,
			run: func(p *probe) {
				p.cut(arrayParams, "["+p.kv(0, "a", 1)+","+strings.Repeat(" ", 1<<18))
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.complete(p.ingress("hfc_cut", singleParams, p.kv(1, "b", 2)).token())
				p.holds("hfc_cut", "1:b/2")
				p.ingress("hfc_cut", arrayParams, "[]").refused(http.StatusBadRequest, "ParseErrors")
			},
		},
	}
}

func deref(n *uint64) string {
	if n == nil {
		return "null"
	}
	return strconv.FormatUint(*n, 10)
}

// errCut breaks a request off.
var errCut = errors.New("the clause cuts its request here")

// cut sends the beginning of a body to hfc_cut, promises more, and goes away.
// It waits until the process has noticed.
func (p *probe) cut(params, body string) {
	p.touch("hfc_cut")
	count := func() uint64 { return p.counted("hfc_cut", func(in inputStats) uint64 { return in.Metrics.Transport }) }
	before := count()
	req, err := http.NewRequestWithContext(p.ctx, http.MethodPost, p.w.base+ingressPath("hfc_cut", params), io.MultiReader(strings.NewReader(body), failing{}))
	p.noErr("making a request", err)
	req.ContentLength = int64(len(body)) + 1000
	if p.w.key != "" {
		req.Header.Set("Authorization", "Bearer "+p.w.key)
	}
	resp, err := p.w.http.Do(req)
	if err == nil {
		_ = resp.Body.Close() // an answer to half a request is looked at below
		p.failf("expected no answer to half a request, got %d", resp.StatusCode)
	}
	p.until("the process has noticed that the client is gone", func() bool { return count() > before })
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errCut }

// orderClauses are contract §2.5.
func orderClauses() []clause {
	return []clause{
		{
			id: "C2.5-NAME", section: "2.5", says: "the endpoint of a URL is named <table as written>.api-ingress-<16 hex digits>",
			run: func(p *probe) {
				p.complete(p.array("HFC_pair", p.kv(0, "a", 1)).token())
				in := p.endpoints("HFC_pair")
				if len(in) == 0 || !endpointName.MatchString(in[0].Name) {
					p.failf("expected an endpoint HFC_pair.api-ingress-<16 hex>, got %+v", in)
				}
			},
		},
		{
			id: "C2.5-SAME", section: "2.5", says: "the same URL is the same endpoint: same e, and c grows by the records",
			run: func(p *probe) {
				a := p.readToken(p.array("hfc_pair", p.kv(0, "a", 1)).token())
				tok := p.array("hfc_pair", p.kv(1, "b", 2), p.kv(2, "c", 3)).token()
				b := p.readToken(tok)
				p.complete(tok)
				want(p, "the endpoint", a.Endpoint, b.Endpoint)
				want(p, "the count", a.Count+2, b.Count)
			},
		},
		{
			id: "C2.5-SPELLING", section: "2.5", says: "another spelling of the table is another endpoint that feeds the same table",
			run: func(p *probe) {
				a := p.array("hfc_pair", p.kv(0, "a", 1)).token()
				b := p.array("Hfc_pair", p.kv(1, "b", 2)).token()
				p.complete(a)
				p.complete(b)
				if p.readToken(a).Endpoint == p.readToken(b).Endpoint {
					p.failf("expected two endpoints, got one")
				}
				p.holds("hfc_pair", "0:a/1 1:b/2")
			},
		},
		{
			id: "C2.5-PARAMETERS", section: "2.5", says: "another format configuration is another endpoint",
			run: func(p *probe) {
				a := p.array("hfc_pair", p.kv(0, "a", 1)).token()
				b := p.single("hfc_pair", p.kv(1, "b", 2)).token()
				p.complete(a)
				p.complete(b)
				if p.readToken(a).Endpoint == p.readToken(b).Endpoint {
					p.failf("expected two endpoints, got one")
				}
			},
		},
		{
			id: "C2.5-DEFAULTS", section: "2.5", says: "parameters written out with their default values are the same format configuration",
			run: func(p *probe) {
				a := p.ingress("hfc_pair", "format=json", p.kv(0, "a", 1)).token()
				b := p.ingress("hfc_pair", singleParams+"&array=false", p.kv(1, "b", 2)).token()
				p.complete(b)
				want(p, "the endpoint", p.readToken(a).Endpoint, p.readToken(b).Endpoint)
			},
		},
		{
			id: "C2.5-LIMIT", section: "2.5", says: "a process has slots for 100 HTTP endpoints: the 101st gets 429 ApiConnectionLimit, those that exist go on", needs: needRestart | needManager,
			run: func(p *probe) {
				p.restart()
				p.after(p.restart)
				const name = "hfc_kv"
				made := 0
				for n := range 4 * 32 {
					b := []byte(name)
					for bit, at := range []int{0, 1, 2, 4, 5} {
						if n>>bit&1 == 1 {
							b[at] -= 'a' - 'A'
						}
					}
					params := []string{arrayParams, singleParams, "format=json&update_format=raw", "format=csv"}[n/32]
					a := p.ingress(string(b), params, "")
					if a.status == http.StatusTooManyRequests {
						a.refused(http.StatusTooManyRequests, "ApiConnectionLimit")
						break
					}
					a.token()
					made++
				}
				want(p, "endpoints before the limit", 100, made)
				p.put(name, p.kv(0, "a", 1))
			},
		},
		{
			id: "C2.5-ORDER", section: "2.5", says: "requests to one endpoint, one after the other, are applied in their order",
			run: func(p *probe) {
				var tok string
				for n := range 30 {
					tok = p.array("hfc_kv", p.kv(0, "a", n)).token()
				}
				p.complete(tok)
				p.holds("hfc_kv", "0:a/29")
			},
		},
		{
			id: "C2.5-BACKPRESSURE", section: "2.5", says: "with 100 000 records queued the body of the next request is not read", needs: needFaults, sim: impatient,
			run: func(p *probe) {
				p.fill()
				p.array("hfc_kv", p.kv(0, "late", 1)).refused(http.StatusServiceUnavailable, "PipelineInteractionUnreachable")
				want(p, "records queued", uint64(core.MaxQueuedRecords), p.stats().Global.Buffered)
			},
		},
		{
			id: "C2.5-BACKPRESSURE-self", section: "2.5", says: "so is the end of the request that fills the queue: it hangs with all of its records queued, and is answered when they are ingested", needs: needFaults,
			run: func(p *probe) {
				ch := p.fill()
				p.pending("the request that has filled the queue", ch)
				p.sim().ReleaseIngest("")
				p.complete(p.receive(ch).token())
			},
		},
		{
			id: "C2.5-BACKPRESSURE-others", section: "2.5", says: "a full endpoint does not keep another table from being read", needs: needFaults,
			run: func(p *probe) {
				p.fill()
				p.array("hfc_pair", p.kv(0, "a", 1)).token()
			},
		},
		{
			id: "C2.5-FORCE", section: "2.5", says: "force=true goes past backpressure", needs: needFaults,
			run: func(p *probe) {
				p.fill()
				p.ingress("hfc_kv", arrayParams+"&force=true", "["+p.kv(0, "forced", 1)+"]").token()
				want(p, "records queued", uint64(core.MaxQueuedRecords)+1, p.stats().Global.Buffered)
			},
		},
	}
}

// fill queues as many records of hfc_kv as the engine lets in, and holds them
// there. All are one row. It gives the answer of the request that brought
// them, which hangs.
func (p *probe) fill() <-chan answer {
	p.sim().HoldIngest("")
	record := p.kv(1, "q", 1)
	body := "[" + strings.Repeat(record+",", core.MaxQueuedRecords-1) + record + "]"
	out := make(chan answer, 1)
	p.owned.Go(func() {
		// At the process, which has no time-out.
		out <- p.send(p.ctx, http.MethodPost, p.w.bare+ingressPath("hfc_kv", arrayParams), "", nil, strings.NewReader(body))
	})
	p.until("the queue is full", func() bool { return p.stats().Global.Buffered == core.MaxQueuedRecords })
	return out
}

// stateClauses are contract §2.6.
func stateClauses() []clause {
	return []clause{
		{
			id: "C2.6-PAUSED-blocks", section: "2.6", says: "while the pipeline is paused a request hangs, and goes on when it is resumed", needs: needExclusive,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.pause()
				ch := p.background("hfc_kv", arrayParams, "["+p.kv(0, "b", 2)+"]")
				p.pending("a request to a paused pipeline", ch)
				p.resume()
				p.complete(p.receive(ch).token())
				p.holds("hfc_kv", "0:b/2")
			},
		},
		{
			id: "C2.6-PAUSED-manager", section: "2.6", says: "while the pipeline is paused the manager answers 503 PipelineInteractionUnreachable at its time-out", needs: needExclusive | needManager, sim: impatient,
			run: func(p *probe) {
				p.pause()
				p.array("hfc_kv", p.kv(0, "a", 1)).refused(http.StatusServiceUnavailable, "PipelineInteractionUnreachable")
			},
		},
		{
			id: "C2.6-PAUSED-late", section: "2.6", says: "what a paused process already had of an abandoned body can be ingested on resuming", needs: needFaults, sim: impatient,
			run: func(p *probe) {
				p.pause()
				p.array("hfc_kv", p.kv(0, "a", 1)).refused(http.StatusServiceUnavailable, "PipelineInteractionUnreachable")
				p.holds("hfc_kv", "")
				p.resume()
				p.until("the abandoned row has come", func() bool { return p.rows("hfc_kv") == "0:a/1" })
			},
		},
		{
			id: "C2.6-PAUSED-force", section: "2.6", says: "force=true is ingested, stepped and completed while the pipeline is paused", needs: needExclusive,
			run: func(p *probe) {
				p.pause()
				p.complete(p.ingress("hfc_kv", arrayParams+"&force=true", "["+p.kv(0, "a", 1)+"]").token())
				p.holds("hfc_kv", "0:a/1")
			},
		},
		{
			id: "C2.6-ENDPOINT-PAUSED", section: "2.6", says: "a paused endpoint hangs as a paused pipeline does, and others do not", needs: needExclusive | needBare,
			run: func(p *probe) {
				p.put("hfc_cut", p.kv(0, "a", 1))
				each := func(what string) {
					for _, in := range p.endpoints("hfc_cut") {
						p.process(http.MethodGet, "/input_endpoints/"+in.Name+"/"+what).is(http.StatusOK)
					}
				}
				p.after(func() { each("start") })
				each("pause")
				p.put("hfc_kv", p.kv(0, "a", 1))
				ch := p.background("hfc_cut", arrayParams, "["+p.kv(0, "b", 2)+"]")
				p.pending("a request to a paused endpoint", ch)
				each("start")
				p.complete(p.receive(ch).token())
			},
		},
		{
			id: "C2.6-RESTORING-existing", section: "2.6", says: "while the pipeline restores an endpoint that exists blocks instead of refusing", needs: needFaults,
			run: func(p *probe) {
				p.put("hfc_kv", p.kv(0, "a", 1))
				p.sim().SetState(core.StateRestoring)
				ch := p.background("hfc_kv", arrayParams, "["+p.kv(0, "b", 2)+"]")
				p.pending("a request to a restoring pipeline", ch)
				p.sim().Resume()
				p.complete(p.receive(ch).token())
			},
		},
		{
			id: "C2.6-CRASH", section: "2.6", says: "a process that dies under a request gives 503 through the manager and no token", needs: needFaults | needManager,
			run: func(p *probe) {
				p.inject(felderasim.Fault{Kind: felderasim.CrashBefore, Keep: core.KeepNothing})
				p.array("hfc_kv", p.kv(0, "a", 1)).refused(http.StatusServiceUnavailable, "PipelineInteractionUnreachable")
				p.holds("hfc_kv", "")
			},
		},
	}
}
