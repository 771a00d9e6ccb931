package feldera

import (
	"context"
	"errors"
	"fmt"
	"net/url"

	"holdfast/internal/decode"
)

// The bounds of the queries that read a table for comparison.
const (
	// comparePage is how many rows one query asks for. The engine holds a page
	// in memory to sort it, and looks at every row of the table for each.
	comparePage = 100_000
	// comparePageBytes bounds a page's answer; one that is larger is halved.
	comparePageBytes = 256 << 20
	// keyQueryBytes bounds the text of a query by keys, which travels in the
	// address: proxies take no long ones.
	keyQueryBytes = 6 << 10
	// compositeKeys bounds the keys of more than one column in a query: their
	// condition is nested.
	compositeKeys = 50
	// readAttempts is how often a query that brings no row is tried.
	readAttempts = 6
)

// ReadAll hands the image of every row of the table to fn: page by page, each
// of another moment. Rows that change meanwhile may come twice, or not at all.
// A page has at most so many rows, 0 for as many as one query may ask for;
// between is called after each, and may wait.
//
// Errors: *decode.Refusal, *[IncarnationChanged] where the pipeline restarted
// meanwhile, fn's, ctx's, or the last reason after a few attempts.
func (m *Comparer) ReadAll(ctx context.Context, c *Client, page int, fn func(*Image) error, between func() error) error {
	if err := m.same(ctx, c); err != nil {
		return err
	}
	if page <= 0 {
		page = comparePage
	}
	var after []byte
	for size := min(page, comparePage); ; {
		sql, err := m.SelectPage(after, size)
		if err != nil {
			return err
		}
		rows := 0
		var last []byte
		err = m.read(ctx, c, Query{Select: sql, OrderBy: m.OrderBy(), MaxBytes: comparePageBytes}, false, func(im *Image) error {
			rows, last = rows+1, im.Key
			return fn(im)
		})
		if refused, ok := errors.AsType[*decode.Refusal](err); ok && refused.Reason == decode.ReasonLimit && size > 1 {
			size /= 2
			continue
		}
		if err != nil {
			return err
		}
		if rows < size {
			break
		}
		after = last
		if err := between(); err != nil {
			return err
		}
	}
	return m.same(ctx, c)
}

// ReadKeys hands the images of the rows with the given keys to fn, with their
// values. Those that are not there are left out. Errors are those of ReadAll.
func (m *Comparer) ReadKeys(ctx context.Context, c *Client, keys [][]byte, fn func(*Image) error) error {
	if err := m.same(ctx, c); err != nil {
		return err
	}
	for len(keys) > 0 {
		n, sql := 0, ""
		for step := 1; n < len(keys); step *= 2 {
			more := min(n+step, len(keys))
			if m.keys > 1 {
				more = min(more, compositeKeys)
			}
			text, err := m.SelectKeys(keys[:more])
			if err != nil {
				return err
			}
			if more == n || sql != "" && len(url.QueryEscape(text)) > keyQueryBytes {
				break
			}
			n, sql = more, text
		}
		if err := m.read(ctx, c, Query{Select: sql, MaxBytes: comparePageBytes}, true, fn); err != nil {
			return err
		}
		keys = keys[n:]
	}
	return m.same(ctx, c)
}

// same sees to it that the answers come from the incarnation that is expected:
// an answer says nothing of it.
func (m *Comparer) same(ctx context.Context, c *Client) error {
	r := c.retrier("ask which process of the pipeline answers")
	for {
		now, err := c.Incarnation(ctx)
		if err == nil {
			return c.sameIncarnation(now)
		}
		if err := m.again(ctx, r, err); err != nil {
			return err
		}
	}
}

// read runs one query until its answer is whole. What a broken answer handed
// out may come again: fn must not mind.
func (m *Comparer) read(ctx context.Context, c *Client, q Query, values bool, fn func(*Image) error) error {
	r := c.retrier("read table " + m.enc.table.spelling)
	var own *callerError
	for {
		err := c.Query(ctx, q, func(row []byte) error {
			im, err := m.Answer(row, values)
			if err != nil {
				return err
			}
			if err := fn(&im); err != nil {
				return &callerError{err}
			}
			return nil
		})
		if err == nil {
			return nil
		}
		if errors.As(err, &own) {
			return own.err
		}
		if err := m.again(ctx, r, err); err != nil {
			return err
		}
	}
}

// callerError is an error of the function that gets the rows.
type callerError struct{ err error }

func (e *callerError) Error() string { return e.err.Error() }

// again waits where another attempt may do, a few times.
func (m *Comparer) again(ctx context.Context, r *retrier, err error) error {
	if _, refused := errors.AsType[*decode.Refusal](err); refused {
		return err
	}
	if !errors.Is(err, ErrIncomplete) {
		switch Classify(err) {
		case ClassOtherIncarnation:
			return &IncarnationChanged{Was: r.c.Expected()}
		case ClassStopOperator:
			if e, ok := errors.AsType[*Error](err); ok {
				return e.refusal(r.c)
			}
			return err
		default: // it may pass
		}
	}
	if r.attempt+1 >= readAttempts {
		return fmt.Errorf("%s: %d attempts, the last one: %w", r.what, readAttempts, err)
	}
	return r.wait(ctx, err)
}
