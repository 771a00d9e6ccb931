package feldera

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/go-json-experiment/json"

	"holdfast/internal/decode"
)

// Query is an ad-hoc SELECT over materialized tables and views. It sees the
// last completed transaction.
type Query struct {
	// Select is a SELECT statement without ORDER BY, LIMIT and semicolon at
	// its end, whose columns have names.
	Select string
	// OrderBy is a list of the select's columns; "" = any order.
	OrderBy string
	// MaxLine and MaxBytes bound one row and the whole answer. Zero means
	// 16 MiB and 1 GiB.
	MaxLine, MaxBytes int64
	// Timeout ends the query. Zero means 5 minutes.
	Timeout time.Duration
}

// rowsColumn is the column that is added to every row: the number of rows in
// the whole result.
const rowsColumn = "holdfast_rows"

// ErrIncomplete says that a query's answer is not the whole result. What was
// handed out counts for nothing; another attempt may do.
var ErrIncomplete = errors.New("the query's answer is incomplete")

// Query runs q once and hands each row to fn as one JSON object, which fn must
// not keep. Rows carry one more member than was selected, "holdfast_rows".
//
// The engine begins its answer with 200 before it knows whether the query will
// succeed, and writes a later error into the same body, or just ends it. So
// the rows count only when Query returns nil: every row carries the number of
// all rows, counted by the same query in the same snapshot, and as many have
// come. An answer without a row proves nothing by itself, and is confirmed by
// a count of its own.
//
// Errors: fn's, *decode.Refusal for a query that the engine refuses,
// [ErrIncomplete], an *[Error], or ctx's.
func (c *Client) Query(ctx context.Context, q Query, fn func(row []byte) error) error {
	sql := "SELECT q.*, COUNT(*) OVER () AS " + rowsColumn + " FROM (" + q.Select + ") AS q"
	if q.OrderBy != "" {
		sql += " ORDER BY " + q.OrderBy
	}
	n, err := c.queryRows(ctx, q, sql, fn)
	if err != nil || n > 0 {
		return err
	}
	count, err := c.Count(ctx, q)
	if err != nil {
		return err
	}
	if count != 0 {
		return fmt.Errorf("%w: no row came, a count finds %d", ErrIncomplete, count)
	}
	return nil
}

// Count runs q for the number of its rows: one attempt. Its answer is one row,
// so that it is there or is not.
func (c *Client) Count(ctx context.Context, q Query) (uint64, error) {
	sql := "SELECT COUNT(*) AS " + rowsColumn + " FROM (" + q.Select + ") AS q"
	var count *uint64
	err := c.stream(ctx, q, sql, func(row []byte) error {
		if count != nil {
			return fmt.Errorf("%w: more than one row for a count", ErrIncomplete)
		}
		n, err := c.rowTotal(row)
		count = &n
		return err
	})
	switch {
	case err != nil:
		return 0, err
	case count == nil:
		return 0, fmt.Errorf("%w: a count without a row", ErrIncomplete)
	}
	return *count, nil
}

// queryRows streams the rows and holds the total against them.
func (c *Client) queryRows(ctx context.Context, q Query, sql string, fn func([]byte) error) (uint64, error) {
	var seen, total uint64
	err := c.stream(ctx, q, sql, func(row []byte) error {
		n, err := c.rowTotal(row)
		if err != nil {
			return err
		}
		if seen > 0 && n != total {
			return fmt.Errorf("%w: rows disagree on their number, %d and %d", ErrIncomplete, total, n)
		}
		seen, total = seen+1, n
		if seen > total {
			return fmt.Errorf("%w: more than the %d rows announced", ErrIncomplete, total)
		}
		return fn(row)
	})
	if err == nil && seen != total {
		err = fmt.Errorf("%w: %d of %d rows came", ErrIncomplete, seen, total)
	}
	return seen, err
}

// rowTotal reads the added column. A line without it is no row: it is how an
// error inside a 200 looks.
func (c *Client) rowTotal(row []byte) (uint64, error) {
	var r struct {
		Rows *uint64 `json:"holdfast_rows"`
	}
	if err := json.Unmarshal(row, &r); err != nil || r.Rows == nil {
		return 0, fmt.Errorf("%w: instead of a row came %q", ErrIncomplete, c.excerpt(row, maxMessage))
	}
	return *r.Rows, nil
}

// stream runs sql and hands each line of the answer to fn.
func (c *Client) stream(ctx context.Context, q Query, sql string, fn func([]byte) error) (err error) {
	timeout := orDefault(q.Timeout, 5*time.Minute)
	start := time.Now()
	defer func() { c.observe(epQuery, err, time.Since(start)) }()
	ctx, cancel := context.WithTimeoutCause(ctx, timeout,
		fmt.Errorf("no complete answer within %s: %w", timeout, context.DeadlineExceeded))
	defer cancel()
	cl := call{endpoint: epQuery, method: http.MethodGet, path: "/query?format=json&sql=" + url.QueryEscape(sql)}
	resp, err := c.open(ctx, cl)
	if err == nil && resp.StatusCode == http.StatusUnauthorized && c.cfg.APIKey != nil {
		_ = resp.Body.Close() // the answer is not looked at
		c.forgetKey()
		resp, err = c.open(ctx, cl)
	}
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		body, readErr := readBounded(resp.Body, maxSmallBody)
		return c.queryError(c.answerError(ctx, cl, resp, body, readErr))
	}
	maxLine, maxBytes := q.MaxLine, q.MaxBytes
	if maxLine <= 0 {
		maxLine = 16 << 20
	}
	if maxBytes <= 0 {
		maxBytes = 1 << 30
	}
	if err := lines(resp.Body, maxLine, maxBytes, fn); err != nil {
		var read *readError
		if errors.As(err, &read) {
			return c.answerError(ctx, cl, resp, nil, read.err)
		}
		return err
	}
	return nil
}

// queryError words a refused query.
func (c *Client) queryError(e *Error) error {
	if Classify(e) != ClassStopOperator {
		return e
	}
	r := e.refusal(c)
	if e.Status == http.StatusBadRequest {
		r.Reason, r.What, r.Why = decode.ReasonUnsupported, "query", "the engine refuses it"
		r.Expected = "materialized tables and views with the columns asked for"
		r.Do = "declare the table with 'materialized' = 'true', or give it a PRIMARY KEY"
	}
	return r
}

// readError is an error of reading, as against one of a line.
type readError struct{ err error }

func (e *readError) Error() string { return e.err.Error() }

// lines hands each non-empty line of r to fn. The line is lent until fn
// returns.
func lines(r io.Reader, maxLine, maxBytes int64, fn func([]byte) error) error {
	limited := &io.LimitedReader{R: r, N: maxBytes + 1}
	in := bufio.NewReaderSize(limited, 64<<10)
	var long []byte
	for {
		part, err := in.ReadSlice('\n')
		if limited.N <= 0 {
			return tooLarge("the answer", maxBytes)
		}
		line := part
		if len(long) > 0 || errors.Is(err, bufio.ErrBufferFull) {
			long = append(long, part...)
			line = long
		}
		if int64(len(line)) > maxLine {
			return tooLarge("a row", maxLine)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		last := errors.Is(err, io.EOF)
		if err != nil && !last {
			return &readError{err}
		}
		if text := bytes.TrimSpace(line); len(text) > 0 {
			if err := fn(text); err != nil {
				return err
			}
		}
		if last {
			return nil
		}
		long = long[:0]
	}
}

func tooLarge(what string, limit int64) *decode.Refusal {
	return &decode.Refusal{
		Reason: decode.ReasonLimit, What: "query answer", Why: what + " is larger than the bound",
		Expected: fmt.Sprintf("at most %d bytes", limit), Do: "ask for fewer rows or columns at once",
	}
}

// QuoteName writes a column's or table's name for a query, so that it is taken
// exactly.
func QuoteName(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

// QuoteText writes a text for a query as a string literal.
func QuoteText(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }
