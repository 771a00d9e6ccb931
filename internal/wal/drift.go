package wal

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"holdfast/internal/decode"
	"holdfast/internal/feldera"
)

// drift is how a source table's shape differs from the one before.
type drift struct {
	added, dropped, changed []string // names of columns
}

// compareShapes compares two versions of a table's shape by column name.
func compareShapes(was, now *decode.Relation) (d drift) {
	find := func(rel *decode.Relation, name string) *decode.Column {
		if i := slices.IndexFunc(rel.Columns, func(c decode.Column) bool { return c.Name == name }); i >= 0 {
			return &rel.Columns[i]
		}
		return nil
	}
	for i := range was.Columns {
		old := &was.Columns[i]
		switch c := find(now, old.Name); {
		case c == nil:
			d.dropped = append(d.dropped, old.Name)
		case c.TypeOID != old.TypeOID || c.TypeModifier != old.TypeModifier:
			d.changed = append(d.changed, old.Name)
		}
	}
	for i := range now.Columns {
		if find(was, now.Columns[i].Name) == nil {
			d.added = append(d.added, now.Columns[i].Name)
		}
	}
	return d
}

// before gives the shape that a table had until rel came: the stream's last
// one, or what the catalogue had at the start, where the transaction came
// after that. In a backlog the catalogue is of a later time than the stream.
func (d *deliverer) before(rel *decode.Relation, tx *transaction) *decode.Relation {
	if r := d.routes[rel.ID]; r != nil {
		return r.rel
	}
	if was := d.a.ready.shapes[nameOf(rel)]; was != nil && was.ID == rel.ID && tx.end > d.a.ready.at {
		return was
	}
	return nil
}

// checkDrift decides on a change of a table's shape before the first row of
// the new one: what the encoder cannot know, since it sees one shape alone.
// Each version that passes is what the next one is compared with.
func (d *deliverer) checkDrift(ctx context.Context, was, rel *decode.Relation, table *feldera.Table) error {
	if was == nil {
		return nil
	}
	diff := compareShapes(was, rel)
	if hasIdentity(was) && !hasIdentity(rel) {
		if err := checkIdentity(rel, table); err != nil {
			return err
		}
	}
	resync := "pgsource resync " + rel.String()
	if moved := movedColumns(was, rel, table); len(moved) > 0 {
		return d.a.s.differs(ctx, d.drifted(was, rel, table, fmt.Sprintf("columns %s stand in another order: names were exchanged, or a column was dropped and made anew, so the rows that are in the Feldera table have under these names what the source has under others, or no more",
			strings.Join(moved, ", ")), "start pgsource again, which goes on with the new shape, then run: "+resync), nameOf(rel))
	}
	gone := slices.DeleteFunc(slices.Clone(diff.dropped), func(name string) bool { return !table.Has(name) })
	if len(gone) > 0 && len(diff.added) > 0 {
		return d.a.s.differs(ctx, d.drifted(was, rel, table, fmt.Sprintf("columns %s went and %s came in one change, which is what a rename looks like: the Feldera table would keep the old ones, and have NULL in them from here on",
			strings.Join(gone, ", "), strings.Join(diff.added, ", ")), "rename them in the Feldera table too; or make both changes apart, if they are two"), nameOf(rel))
	}
	for _, name := range diff.changed {
		i := slices.IndexFunc(rel.Columns, func(c decode.Column) bool { return c.Name == name })
		if want, ok := d.a.s.types.narrower(&rel.Columns[i], table, d.cfg.Policy); ok {
			return d.drifted(was, rel, table, fmt.Sprintf("column %s is now %s, and not every value of that fits into the Feldera column", name, d.a.s.types.text(&rel.Columns[i])),
				fmt.Sprintf("widen the Feldera column to %s; a restart without that goes on, and refuses the values that do not fit, one by one", want))
		}
	}
	if len(gone) > 0 && !d.rehearsing {
		d.a.s.log.WarnContext(ctx, "the source has dropped columns that the Feldera table still has: rows have NULL there from here on, older rows keep their values",
			"table", rel.String(), "columns", gone)
	}
	if stale := staleColumns(was, rel, table); len(stale) > 0 && !d.rehearsing {
		d.a.s.log.WarnContext(ctx, "columns were added or have another type: what that made of the rows that were there before (a DEFAULT, USING, rounding) is not in the stream, and a resync of the table brings it",
			"table", rel.String(), "columns", stale, "run", resync)
	}
	return nil
}

// movedColumns are those of the Feldera table's columns that stand in another
// order. Postgres never moves a column, so such a name means another one now.
func movedColumns(was, now *decode.Relation, table *feldera.Table) (moved []string) {
	common := func(rel, other *decode.Relation) (names []string) {
		for i := range rel.Columns {
			name := rel.Columns[i].Name
			if table.Has(name) && slices.ContainsFunc(other.Columns, func(c decode.Column) bool { return c.Name == name }) {
				names = append(names, name)
			}
		}
		return names
	}
	before := common(was, now)
	for i, name := range common(now, was) {
		if before[i] != name {
			moved = append(moved, name)
		}
	}
	return moved
}

// staleColumns are those of the Feldera table in which rows that were there
// before may have another value at the source now.
func staleColumns(was, now *decode.Relation, table *feldera.Table) []string {
	if was == nil {
		return nil
	}
	d := compareShapes(was, now)
	return slices.DeleteFunc(slices.Concat(d.added, d.changed), func(name string) bool { return !table.Has(name) })
}

// drifted words the refusal of a change of shape, with all shapes named.
func (d *deliverer) drifted(was, rel *decode.Relation, table *feldera.Table, why, do string) *decode.Refusal {
	types := &d.a.s.types
	return &decode.Refusal{
		Reason: decode.ReasonSchema, What: "change of table", Where: rel.String(),
		Why:      fmt.Sprintf("%s (it was %s and is %s; the Feldera table has %s)", why, types.shape(was), types.shape(rel), table.Shape()),
		Expected: "a Feldera table that takes every row of the new shape", Do: do,
	}
}

// encoderFor compiles the encoder of a shape; where it is refused and the
// table had another shape before, the refusal says so.
func (d *deliverer) encoderFor(was, rel *decode.Relation, table *feldera.Table) (*feldera.Encoder, error) {
	encoder, err := feldera.NewEncoder(table, rel, d.cfg.Policy)
	if err == nil || was == nil {
		return encoder, err
	}
	diff := compareShapes(was, rel)
	refused, ok := err.(*decode.Refusal) //nolint:errorlint // its text is added to, so it must be the whole error
	if !ok || len(diff.added)+len(diff.dropped)+len(diff.changed) == 0 {
		return nil, err
	}
	drifted := *refused
	if len(diff.added) > 0 && drifted.Do != "" {
		drifted.Do += "; where a new column has a DEFAULT, run afterwards: pgsource resync " + rel.String() + ", since the rows that were there before do not come again"
	}
	drifted.Why += fmt.Sprintf(" (the source table changed: it was %s and is %s; the Feldera table has %s)",
		d.a.s.types.shape(was), d.a.s.types.shape(rel), table.Shape())
	return nil, &drifted
}

// narrower tells whether the Feldera column cannot take every value that the
// source's column now can have, and gives the type that could.
func (c *typeCache) narrower(col *decode.Column, table *feldera.Table, p feldera.Policy) (want string, narrower bool) {
	c.mu.Lock()
	m := c.types.column(col.TypeOID, col.TypeModifier, 0, 0)
	c.mu.Unlock()
	def := feldera.ColumnDef{Name: col.Name, Type: m.typ, BaseOID: m.base, Loose: m.loose}
	return m.typ.String(), !def.HeldBy(table, p)
}

// text writes a column's type as Postgres calls it.
func (c *typeCache) text(col *decode.Column) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := c.types.nameOf(col.TypeOID)
	if col.TypeOID == oidNumeric && col.TypeModifier >= 4 {
		precision, scale := numericModifier(col.TypeModifier)
		name += "(" + strconv.Itoa(precision) + "," + strconv.Itoa(scale) + ")"
	}
	return name
}

// shape writes a table's columns for a message, bounded.
func (c *typeCache) shape(rel *decode.Relation) string {
	const most = 40
	var b strings.Builder
	b.WriteByte('(')
	for i := range rel.Columns {
		if i > 0 {
			b.WriteString(", ")
		}
		if i == most {
			b.WriteString("…")
			break
		}
		b.WriteString(rel.Columns[i].Name + " " + c.text(&rel.Columns[i]))
		if rel.Columns[i].Key && rel.Identity != decode.IdentityFull {
			b.WriteString(" key")
		}
	}
	return b.String() + ")"
}
