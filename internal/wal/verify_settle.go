package wal

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"holdfast/internal/feldera"
)

// settler looks at suspects again until each is equal, proven to differ, or
// given up. One look is
//
//	read the source by key (position H) → wait until H is acknowledged
//	→ read the pipeline by key → read the source by key once more
//
// What the pipeline then has is at least as new as the first read. So it is
// wrong where it equals neither read and the row's version is the same in both:
// nothing has changed it in between. That is only believed when the next looks
// say the same: a row that was absent in both reads can have come and gone
// between them, and a commit that waits for a synchronous standby is in the
// pipeline before the source shows it.
type settler struct {
	v     *verifier
	batch []*suspect
	// aside are those that a few looks have not settled.
	aside []*suspect
}

// suspect is one key that differed.
type suspect struct {
	key []byte
	// last is what the last look made of it, times how many looks said the same.
	last  verdictOfLook
	times int
	// waiting are the sessions that may hold a commit back, of all looks since.
	waiting map[string]bool
	why     string
}

// verdictOfLook is what one look found, comparable.
type verdictOfLook struct {
	version string // of the source's row, "" = there is none
	there   bool   // the pipeline has a row
	sum     [16]byte
}

const (
	// settleBatch is how many suspects are looked at together.
	settleBatch = 500
	// settleLooks is how often a suspect is looked at before it is set aside,
	// finalLooks how often after that.
	settleLooks = 4
	finalLooks  = 6
	// Looks that have to agree before a difference is believed: more where the
	// source has no row, and so no version.
	looksOfRow, looksOfAbsence = 2, 3
	// settlePause is the wait between two looks, growing and with jitter, so
	// that they do not beat in time with what changes the row.
	settlePause    = 100 * time.Millisecond
	maxSettlePause = 3 * time.Second
)

func newSettler(v *verifier) *settler { return &settler{v: v} }

// suspect takes a key; when there are enough, they are settled.
func (s *settler) suspect(ctx context.Context, key []byte) error {
	s.batch = append(s.batch, &suspect{key: key})
	if len(s.batch) < settleBatch {
		return nil
	}
	return s.settle(ctx)
}

func (s *settler) settle(ctx context.Context) error {
	left, err := s.looks(ctx, s.batch, settleLooks)
	s.batch = nil
	if err != nil {
		return err
	}
	s.aside = append(s.aside, left...)
	if len(s.aside) >= maxUnsettled {
		s.giveUp()
		return errEnough
	}
	return nil
}

// finish settles the rest, then looks at what was set aside for a last time.
func (s *settler) finish(ctx context.Context) error {
	if err := s.settle(ctx); err != nil {
		return err
	}
	aside := s.aside
	s.aside = nil
	for part := range slices.Chunk(aside, settleBatch) {
		left, err := s.looks(ctx, part, finalLooks)
		if err != nil {
			return err
		}
		s.aside = append(s.aside, left...)
	}
	s.giveUp()
	return nil
}

// giveUp reports what is left as unsettled.
func (s *settler) giveUp() {
	for _, k := range s.aside {
		if len(s.v.report.Unsettled) == maxUnsettled {
			break
		}
		s.v.report.Unsettled = append(s.v.report.Unsettled, Unsettled{Key: s.v.src.cmp.KeyText(k.key), Why: k.why})
	}
	s.aside = nil
}

// looks looks at suspects up to n times and gives those that are still open.
func (s *settler) looks(ctx context.Context, open []*suspect, n int) ([]*suspect, error) {
	pause := settlePause
	for look := 0; look < n && len(open) > 0; look++ {
		s.v.o.Progress(VerifyProgress{s.v.report.Table, "suspects", s.v.report.Suspects})
		if look > 0 {
			if err := sleep(ctx, pause/2+rand.N(pause)); err != nil { //nolint:gosec // no secret
				return nil, err
			}
			pause = min(2*pause, maxSettlePause)
		}
		left, cannot, err := s.look(ctx, open)
		if err != nil {
			return nil, err
		}
		open = left
		if cannot {
			break // the next one would wait as long, and as much in vain
		}
	}
	return open, nil
}

// look is one look at all of open; it gives those that are not settled by it.
// cannot: the acknowledged position does not move far enough for any proof.
func (s *settler) look(ctx context.Context, open []*suspect) (left []*suspect, cannot bool, err error) {
	v := s.v
	keys := make([][]byte, len(open))
	for i, k := range open {
		keys[i] = k.key
	}
	before, err := v.src.keys(ctx, v.conn, keys)
	if err != nil {
		return nil, false, err
	}
	why, err := v.awaitAcknowledged(ctx, before.position)
	if err != nil {
		return nil, false, err
	}
	have := make(map[string]*feldera.Image, len(keys))
	err = v.src.cmp.ReadKeys(ctx, v.s.cfg.Pipeline, keys, func(im *feldera.Image) error {
		have[string(im.Key)] = im
		return nil
	})
	if err != nil {
		return nil, false, err
	}
	after, err := v.src.keys(ctx, v.conn, keys)
	if err != nil {
		return nil, false, err
	}
	for _, k := range open {
		one, two, there := before.rows[string(k.key)], after.rows[string(k.key)], have[string(k.key)]
		if one != nil && one.unsendable != nil {
			if err := v.unsendable(k.key, one.unsendable); err != nil {
				return nil, false, err
			}
			continue
		}
		if one.same(there) || two.same(there) {
			continue // it was right at one of two moments that are not older than what it shows
		}
		if why != "" {
			k.why, k.times = why, 0
			left = append(left, k)
			continue
		}
		proven, err := s.judge(k, one, two, there, before, after)
		if err != nil {
			return nil, false, err
		}
		if !proven {
			left = append(left, k)
		}
	}
	return left, why != "", nil
}

// same tells whether the source's row, nil for none, is what the pipeline has.
func (r *sourceRow) same(im *feldera.Image) bool {
	if r == nil || im == nil {
		return r == nil && im == nil
	}
	return r.image.Sum == im.Sum
}

func (r *sourceRow) versionOrNone() string {
	if r == nil {
		return ""
	}
	return r.version
}

// judge takes one look at a suspect that differs into account; true when that
// proves the difference.
func (s *settler) judge(k *suspect, one, two *sourceRow, there *feldera.Image, before, after *sourceLook) (bool, error) {
	if one.versionOrNone() != two.versionOrNone() {
		k.times, k.why = 0, "the row changed at each look"
		return false, nil
	}
	now := verdictOfLook{version: one.versionOrNone(), there: there != nil}
	if there != nil {
		now.sum = there.Sum
	}
	// A commit that hides the row waits from the first of the looks that agree
	// through the last: seen by the second read of that first look, and by both of
	// the others. Its first read can have been before it:
	//
	//	read the source → commit, in the WAL and held back → read the pipeline, which
	//	has it → read the source, which does not show it
	if k.times == 0 || k.last != now {
		k.last, k.times, k.waiting = now, 0, maps.Clone(after.waiting)
	} else {
		maps.DeleteFunc(k.waiting, func(session string, _ bool) bool { return !before.waiting[session] || !after.waiting[session] })
	}
	k.times++
	need := looksOfRow
	if one == nil {
		need = looksOfAbsence
	}
	if k.times < need {
		k.why = "it differed at the last look"
		return false, nil
	}
	if len(k.waiting) > 0 {
		k.why = "a commit waits for a synchronous standby: the pipeline has what the source does not show yet"
		if before.hidden {
			k.why = "a session does not show whether its commit waits for a synchronous standby: GRANT pg_read_all_stats to the role of PGSOURCE_DSN"
		}
		return false, nil
	}
	job, err := s.v.src.jobKey(k.key)
	if err != nil {
		return false, err
	}
	d := &Difference{Kind: DifferenceStale, Key: s.v.src.cmp.KeyText(k.key), job: job}
	switch {
	case one == nil:
		d.Kind = DifferenceGhost
	case there == nil:
		d.Kind = DifferenceMissing
	default:
		d.Columns = s.v.columns(&one.image, there)
	}
	return true, s.v.found(d)
}

// columns gives the columns in which two images differ.
func (v *verifier) columns(source, target *feldera.Image) (columns []ColumnDifference) {
	names := v.src.cmp.Columns()
	for _, name := range v.src.cmp.Different(source, target) {
		c := ColumnDifference{Column: name}
		if v.o.Values {
			i := slices.Index(names, name)
			c.Source, c.Target = v.src.cmp.ValueText(i, source.Values[i]), v.src.cmp.ValueText(i, target.Values[i])
		}
		columns = append(columns, c)
	}
	return columns
}
