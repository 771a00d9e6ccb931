package feldera

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// mixing is what a writer knows of the parse errors of its endpoint.
//
// The engine reads concurrent requests of an endpoint into one splitter, piece
// by piece. Why a 200 may then mean nothing, with F the other's body:
//
//  1. the first piece of F is read: an array is open in the splitter;
//  2. all of our body is read: it stands inside of F's array;
//  3. the last piece of F is read: the array is complete, it is no array of
//     rows, and F's request has the error. Nothing of ours was applied;
//  4. the end of our request is read: the splitter is empty, there is no error
//     of ours, and we get a 200 with a token.
//
// The error of (3) is counted at the endpoint before the answer of (4): a count
// that has not grown from before (2) until after (4) proves that our body was
// not part of such a mixture. One that has grown may have other reasons; the
// repetition is then one too many, which a table with a key does not show.
type mixing struct {
	known  bool
	errors uint64
	// incarnation is the process that has counted: another one begins anew.
	incarnation string
}

// errMixed is why a request that was answered with 200 is sent again.
var errMixed = errors.New("accepted, but the table's endpoint had parse errors meanwhile, of which the rows may have been a part: another process sends to it at the same time")

// beforeMixing sees to it that the count from before a request is known.
func (w *Writer) beforeMixing(ctx context.Context, r *retrier) error {
	if !w.shared() || w.mixing.known && w.mixing.incarnation == w.c.Expected() {
		return nil
	}
	now, err := w.parseErrors(ctx, r, false)
	if err == nil {
		w.mixing = now
	}
	return err
}

// unmixed says whether an answered request has kept its rows. After false the
// caller sends again; the pause is behind it then.
func (w *Writer) unmixed(ctx context.Context, r *retrier) (bool, error) {
	if !w.shared() {
		return true, nil
	}
	now, err := w.parseErrors(ctx, r, true)
	if err != nil {
		// The rows may or may not be in: as after an answer that was lost, but
		// nothing of them can come late.
		w.mixing.known = false
		return false, err
	}
	was := w.mixing
	w.mixing = now
	if was == now {
		return true, nil
	}
	// What is counted during the pause has nothing to do with the next attempt:
	// with a stranger's errors in every pause there would never be a last one.
	w.mixing.known = false
	return false, r.wait(ctx, errMixed)
}

// parseErrors reads how many parse errors the table's endpoint has had, again
// and again where it must. used tells that a request of ours has been there.
func (w *Writer) parseErrors(ctx context.Context, r *retrier, used bool) (mixing, error) {
	for {
		// The look belongs to the request that was answered: it is no more cut
		// by the end of ctx than the request is.
		uncut, done := w.c.unlessHalted(ctx)
		s, err := w.c.Stats(uncut)
		done()
		if err == nil {
			if err := w.c.sameIncarnation(s.Incarnation); err != nil {
				return mixing{}, err
			}
			n, shown := w.parseErrorsIn(s)
			if !shown && used && !w.blind {
				w.blind = true
				w.c.cfg.Logger.WarnContext(ctx, "the pipeline's statistics do not show the table's endpoint: rows that another process's request swallowed would not be noticed", "table", w.table.spelling)
			}
			return mixing{known: true, errors: n, incarnation: s.Incarnation}, nil
		}
		if ctx.Err() != nil {
			return mixing{}, r.ended(ctx)
		}
		if class := Classify(err); class == ClassOtherIncarnation || class == ClassStopOperator {
			return mixing{}, w.final(err)
		}
		if err := r.wait(ctx, fmt.Errorf("look for parse errors: %w", err)); err != nil {
			return mixing{}, err
		}
	}
}

// parseErrorsIn adds up the HTTP endpoints of the table's spelling. An endpoint
// that no request has made yet has none.
func (w *Writer) parseErrorsIn(s *Stats) (n uint64, shown bool) {
	prefix := w.table.spelling + ".api-ingress-"
	for _, in := range s.Inputs {
		if strings.HasPrefix(in.Endpoint, prefix) {
			n, shown = n+in.ParseErrors, true
		}
	}
	return n, shown
}
