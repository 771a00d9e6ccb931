package feldera

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"

	"pgregory.net/rapid"

	"holdfast/internal/decode"
	"holdfast/test/felderasim/core"
)

// faultsOf gives parse errors with the given texts; "-" stands for none.
func faultsOf(texts ...string) []rowFault {
	var out []rowFault
	for _, text := range texts {
		f := rowFault{Description: "d"}
		if text != "-" {
			f.InvalidText = &text
		}
		out = append(out, f)
	}
	return out
}

func TestBlamed(t *testing.T) {
	const body = `[{"insert":{"id":1,"doc":[{"id":7}]}},{"delete":{"id":2}},{"insert":{"id":2}},{"insert":{"id":1,"doc":[{"id":7}]}}]`
	for _, c := range []struct {
		name  string
		total int
		rows  []rowFault
		want  blame
	}{
		{"a row", 1, faultsOf(`{"id":1,"doc":[{"id":7}]}`), blameOwn},
		{"the same row, twice", 2, faultsOf(`{"id":1,"doc":[{"id":7}]}`, `{"id":1,"doc":[{"id":7}]}`), blameOwn},
		{"the same row, thrice", 3, faultsOf(`{"id":1,"doc":[{"id":7}]}`, `{"id":1,"doc":[{"id":7}]}`, `{"id":1,"doc":[{"id":7}]}`), blameOther},
		{"both parts of a change of key", 2, faultsOf(`{"id":2}`, `{"id":2}`), blameOwn},
		{"rows in another order than ours", 2, faultsOf(`{"id":2}`, `{"id":2}`, `{"id":2}`), blameOther},
		{"the whole body", 1, faultsOf(body), blameOwn},
		{"a part of the body that is no row", 1, faultsOf(`{"id":7}`), blameOther},
		{"one byte of the body", 1, faultsOf(`7`), blameOther},
		{"a bracket of the body", 1, faultsOf(`]`), blameOther},
		{"another's row", 1, faultsOf(`{"id":9}`), blameOther},
		{"another's beginning and ours", 1, faultsOf(`[{"insert":{"id":9,"note":"abc` + body), blameOther},
		{"another's and then ours", 2, faultsOf(`7`, `{"id":2}`), blameOther},
		{"a row that was cut", 1, faultsOf(`{"id":1,"doc":[{"i...`), blameOther},
		{"the beginning of the body", 1, faultsOf(body[:20]), blameOther},
		{"no rows", 1, nil, blameOpen},
		{"a row without a text", 1, faultsOf("-"), blameOpen},
		{"a row with an empty text", 1, faultsOf(""), blameOpen},
		{"not all rows", 3, faultsOf(`{"id":2}`), blameOpen},
	} {
		if got := blamed([]byte(body), c.total, c.rows); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

// Whatever another client has left in the endpoint, and whatever our rows hold,
// errors of the mixture are never taken for a refusal of our good rows; and
// those of bad rows in a clean endpoint always are.
func TestBlameProperty(t *testing.T) {
	const sql = `CREATE TABLE t (id BIGINT NOT NULL PRIMARY KEY, s VARCHAR, doc VARIANT, n INT) WITH ('materialized' = 'true');`
	program, err := core.ParseProgram(sql)
	if err != nil {
		t.Fatal(err)
	}
	// The encoder believes n to be a VARIANT: so a text in it is a bad row.
	tab := &Table{Name: "t", spelling: "t", key: []int{0}, Columns: []Column{
		{Name: "id", Type: Type{Name: BigInt}, Key: true},
		{Name: "s", Type: typeOf(Varchar)},
		{Name: "doc", Type: typeOf(Variant)},
		{Name: "n", Type: typeOf(Variant)},
	}}
	enc, err := NewEncoder(tab, tab.Relation(), Policy{})
	if err != nil {
		t.Fatal(err)
	}
	config, apiErr := core.ParserConfigFromQuery("t", url.Values{"format": {"json"}, "array": {"true"}})
	if apiErr != nil {
		t.Fatal(apiErr)
	}
	noise := rapid.StringMatching(`(\[\{"insert":|\{"delete":\{|[\[\]{}",:\\a1 ]){0,8}`)
	docs := rapid.SampledFrom([]string{
		`{}`, `[]`, `[{"insert":{"id":1}}]`, `{"insert":{"id":1,"s":"[{"}}`, `"}}]"`, `"[{\"insert\":{\"id\":1}}]"`, `[[[]]]`, `7`,
	})
	batch := func(rt *rapid.T, label string, mayBeBad bool) (body []byte, bad int) {
		var a Array
		for range rapid.IntRange(1, 3).Draw(rt, label+" rows") {
			n := num(rapid.SampledFrom([]string{"1", "7"}).Draw(rt, label+" n"))
			if mayBeBad && rapid.Bool().Draw(rt, label+" bad") {
				n = txt(noise.Draw(rt, label+" text"))
				bad++
			}
			row := []decode.Value{num(fmt.Sprint(rapid.IntRange(1, 3).Draw(rt, label+" id"))), txt(noise.Draw(rt, label+" s")), set(decode.JSON, docs.Draw(rt, label+" doc")), n}
			if err := a.Add(enc, &decode.OrderChange{Op: decode.Insert, Relation: enc.rel, After: row}); err != nil {
				rt.Fatal(err)
			}
		}
		return a.Body(), bad
	}
	mixed, refusedRows := 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		engine, err := core.New(core.Config{Program: program})
		if err != nil {
			rt.Fatal(err)
		}
		ep, apiErr := engine.Open("t", config)
		if apiErr != nil {
			rt.Fatal(apiErr)
		}
		feed := func(data []byte, end bool, errs *core.ParseErrors) {
			if _, apiErr := ep.Parser.Feed(data, end, errs); apiErr != nil {
				rt.Fatal(apiErr)
			}
		}
		clean := rapid.IntRange(0, 2).Draw(rt, "clean") == 0
		if !clean {
			left := []byte(noise.Draw(rt, "left over"))
			if rapid.Bool().Draw(rt, "of a batch") {
				whole, _ := batch(rt, "other", false)
				left = whole[:rapid.IntRange(1, len(whole)-1).Draw(rt, "cut")]
			}
			feed(left, false, &core.ParseErrors{})
			clean = ep.Parser.Pending() == 0
		}
		body, bad := batch(rt, "our", clean)
		var errs core.ParseErrors
		cut := rapid.IntRange(0, len(body)).Draw(rt, "read in two")
		feed(body[:cut], false, &errs)
		feed(body[cut:], false, &errs)
		feed(nil, true, &errs)
		var rows []rowFault
		for _, e := range errs.List {
			rows = append(rows, rowFault{Description: e.Description, InvalidText: e.InvalidText})
		}
		got := blamed(body, errs.Num, rows)
		switch {
		case !clean && errs.Num > 0:
			mixed++
			if got == blameOwn {
				rt.Fatalf("taken for a refusal of %s: %q", body, *rows[0].InvalidText)
			}
		case clean && bad != errs.Num:
			rt.Fatalf("%d of %d bad rows were refused", errs.Num, bad)
		case clean && bad > 0:
			refusedRows++
			if got != blameOwn {
				rt.Fatalf("not taken for a refusal of %s: %q", body, *rows[0].InvalidText)
			}
		}
	})
	t.Logf("%d mixtures, %d refusals", mixed, refusedRows)
	if mixed == 0 || refusedRows == 0 {
		t.Error("a case never occurred")
	}
}

func parseErrorsOf(texts ...string) answer {
	var rows []string
	for _, text := range texts {
		if text == "" {
			rows = append(rows, `{"description":"d","invalid_text":null}`)
			continue
		}
		rows = append(rows, fmt.Sprintf(`{"description":"error parsing field 'qty'","event_number":2,"field":"qty","invalid_text":%s,"tag":"text_event_err"}`, appendString(nil, []byte(text))))
	}
	return answer{status: 400, body: fmt.Sprintf(`{"message":"Errors parsing input data (%d errors)","error_code":"ParseErrors","details":{"num_errors":%d,"errors":[%s]}}`,
		len(texts), len(texts), strings.Join(rows, ","))}
}

// When a refusal is believed: at once for our own row, the second time in a
// row without a text, never for another's.
func TestSendBelievesRefusals(t *testing.T) {
	const own = `{"id":1,"note":null,"qty":1}`
	other := func(n int) answer { return parseErrorsOf(fmt.Sprintf(`[{"insert":{"id":9,"note":"%d[{`, n)) }
	for name, c := range map[string]struct {
		answers []answer // what comes before a 200
		reason  decode.Reason
		posts   int
	}{
		"our row":                      {[]answer{parseErrorsOf(own)}, decode.ReasonRejected, 1},
		"no text":                      {[]answer{parseErrorsOf("")}, "", 2},
		"no text, twice":               {[]answer{parseErrorsOf(""), parseErrorsOf("")}, decode.ReasonRejected, 2},
		"no text, twice, not in a row": {[]answer{parseErrorsOf(""), {status: 429}, parseErrorsOf("")}, "", 4},
		"another's text, many times":   {[]answer{other(1), other(2), other(3), other(4), other(5), other(6), other(7), other(8), other(9), other(10)}, "", 11},
		"another's text, then no text": {[]answer{other(1), parseErrorsOf(""), other(1), parseErrorsOf("")}, "", 5},
		"another's text, then our row": {[]answer{other(1), parseErrorsOf(own)}, decode.ReasonRejected, 2},
		"the same text of another's":   {[]answer{other(1), other(1), other(1), other(1), other(1), other(1), other(1), other(1)}, decode.ReasonSetup, 8},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := send(t, func(n int, r seen) answer {
					switch {
					case r.path == "/stats":
						return statsOf("u1", "Running")
					case n <= len(c.answers):
						return c.answers[n-1]
					}
					return accepted("u1", 1)
				})
				var refused *decode.Refusal
				switch errors.As(got.err, &refused); {
				case c.reason == "" && got.err != nil:
					t.Errorf("refused: %v", got.err)
				case c.reason != "" && (refused == nil || refused.Reason != c.reason):
					t.Errorf("got %v, want a refusal for %s", got.err, c.reason)
				}
				if n := len(got.server.requests("/ingress/orders")); n != c.posts {
					t.Errorf("%d posts, want %d", n, c.posts)
				}
			})
		})
	}
}

// A single row is set aside on the same evidence and on no less; and where the
// endpoint never gets clean nothing is.
func TestSplitBelievesRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		reply    func(n int) answer
		rejected int
		stops    bool
	}{
		"another's text once":       {func(n int) answer { return one(n, parseErrorsOf(`[{"insert":{"id":9[{`)) }, 0, false},
		"another's text, always":    {func(int) answer { return parseErrorsOf(`[{"insert":{"id":9[{`) }, 0, true},
		"no text once":              {func(n int) answer { return one(n, parseErrorsOf("")) }, 0, false},
		"no text, always":           {func(int) answer { return parseErrorsOf("") }, 1, false},
		"a stray byte that we have": {func(n int) answer { return one(n, parseErrorsOf("1")) }, 0, false},
		"our row":                   {func(int) answer { return parseErrorsOf(`{"id":1,"note":null,"qty":1}`) }, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cl, _ := newScripted(t, Config{}, func(n int, r seen) answer {
					if r.path == "/stats" {
						return statsOf("u1", "Running")
					}
					return c.reply(n)
				})
				tab := ordersTable(true)
				_, rejected, err := cl.Writer(tab).SendSplit(t.Context(), orderRows(t, tab, "1"))
				if (err != nil) != c.stops || len(rejected) != c.rejected {
					t.Errorf("set aside %+v, %v", rejected, err)
				}
			})
		})
	}
}

// one gives the answer to the first request and accepts every other.
func one(n int, first answer) answer {
	if n == 1 {
		return first
	}
	return accepted("u1", 1)
}

// A server or proxy that echoes the key does not get it into our errors, in
// whatever part of an answer it stands, and not half of it where a text is cut.
func TestAnswersAreRedacted(t *testing.T) {
	key := "apikey:" + strings.Repeat("k3y", 40)
	for name, a := range map[string]answer{
		"invalid text":    parseErrorsOf("Authorization: Bearer " + key),
		"cut":             parseErrorsOf(strings.Repeat("x", maxFragment-30) + key),
		"field":           {status: 400, body: `{"message":"m","error_code":"ParseErrors","details":{"num_errors":1,"errors":[{"description":"d","field":"` + key + `","invalid_text":"{\"id\":1,\"note\":null,\"qty\":1}"}]}}`},
		"message":         {status: 404, body: `{"message":"` + strings.Repeat("m", maxMessage-20) + key + `","error_code":"X"}`},
		"code":            {status: 404, body: `{"message":"m","error_code":"` + key + `"}`},
		"not JSON":        {status: 404, body: "<html>" + strings.Repeat("m", maxMessage-60) + key},
		"a wrong success": {status: 200, body: `{"` + key + `":1,"` + key + `":2,` + strings.Repeat(" ", 50)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var said []string
				cfg := Config{
					APIKey:  func() (string, error) { return key, nil },
					OnRetry: func(r Retry) { said = append(said, r.Err.Error()) },
				}
				cl, _ := newScripted(t, cfg, func(n int, r seen) answer {
					if r.path == "/stats" {
						return statsOf("u1", "Running")
					}
					if n > 1 {
						return accepted("u1", 1)
					}
					return a
				})
				tab := ordersTable(true)
				_, err := cl.Writer(tab).Send(t.Context(), orderRows(t, tab, "1"))
				said = append(said, fmt.Sprint(err))
				if all := strings.Join(said, "\n"); strings.Contains(all, "k3y") {
					t.Errorf("the key is in: %s", all)
				}
			})
		})
	}
	cl, _ := newScripted(t, Config{APIKey: func() (string, error) { return key, nil }}, func(int, seen) answer {
		return answer{status: 200, body: strings.Repeat("e", maxMessage-20) + key}
	})
	if _, err := cl.Count(t.Context(), Query{Select: "SELECT 1"}); err == nil || strings.Contains(err.Error(), "k3y") {
		t.Errorf("got %v", err)
	}
}
