package feldera

import (
	"context"
	"errors"

	"holdfast/internal/decode"
)

// Await waits until the pipeline can be described and says which incarnation
// it is, and returns its schema. Whatever waiting may mend is retried, and
// reported by OnRetry; a refusal ends it, and so does ctx.
func (c *Client) Await(ctx context.Context) (*Schema, error) {
	retry := c.retrier("wait for the pipeline")
	for {
		schema, err := c.Describe(ctx)
		if err == nil {
			if _, err = c.Incarnation(ctx); err == nil {
				return schema, nil
			}
		}
		var refused *decode.Refusal
		if errors.As(err, &refused) || Classify(err) == ClassStopOperator {
			return nil, err
		}
		if ctx.Err() != nil {
			return nil, retry.ended(ctx)
		}
		if err := retry.wait(ctx, err); err != nil {
			return nil, err
		}
	}
}
